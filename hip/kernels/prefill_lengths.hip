// cu_seqlens that cannot lead out of bounds, for callers whose lengths are known on the device alone:
//   checked[i] = i where i <= singles, else max over j <= i of clamp(cu_seqlens[j], singles, tokens)
//   rest[i] = checked[singles + i] - singles
// and a status word: 0, or 1 + the index of the first entry that was out of order, out of range or, up to the one after
// the single rows, not its own index.
#include "../tile/tile.h"

KERNEL(arch::lanes, 1) void dw_prefill_lengths(dw_prefill_lengths_args x) {
    const int lane = arch::lane();
    int longest = 0; // the running maximum of all blocks before
    int bad = 0x7fffffff;
    for (int base = 0; base <= x.sequences; base += arch::lanes) {
        const int i = base + lane;
        const bool inside = i <= x.sequences;
        int64_t raw = 0;
        if (inside) {
            raw = x.wide ? ((const int64_t *)x.cu_seqlens)[i] : (int64_t)((const int32_t *)x.cu_seqlens)[i];
        }
        int value = i <= x.singles ? i : (int)max_of<int64_t>(x.singles, min_of<int64_t>(raw, x.tokens));
        value = max_of(value, longest);
        value = arch::inclusive_max(value);
        if (inside) {
            x.checked[i] = value;
            if (x.rest && i >= x.singles) {
                x.rest[i - x.singles] = value - x.singles;
            }
        }
        const u64 wrong = arch::ballot(inside && raw != value);
        if (wrong && bad == 0x7fffffff) {
            bad = base + __builtin_ctzll(wrong);
        }
        longest = arch::read_lane(value, arch::lanes - 1);
    }
    if (lane == 0) {
        *x.status = bad == 0x7fffffff ? 0 : 1 + bad;
    }
}
