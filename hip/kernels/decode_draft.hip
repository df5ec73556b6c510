// Decode for speculative decoding: the recurrence of decode.hip over the drafts of every sequence. The state after each
// token is stored to a slot of its own. The next launch starts from the slot that the count of accepted tokens chooses.
// Sequences may have different lengths (decode/draft.h).
#include "../decode/walk.h"

namespace {

using namespace decode;

template <class T, int Keys> DEVICE void recur(const dwk_decode_draft_args &all) {
    SHARED static Exchange<Keys> exchange;
    const dwk_decode_args &x = all.decode;
    Work at = work_of(x);
    find_rows(at, all);
    if (at.count <= 0) {
        return;
    }
    const int slot = slot_to_read(all, at), write_slot = all.write_columns ? -1 : slot_to_write(all, at, slot);
    if (slot < 0 && write_slot < 0 && !writes_any(all, at)) {
        // Padding: outputs are zeros.
        const int column = at.column + member();
        for (int t = 0; t < at.count && member() < columns && column < x.value_dim; ++t) {
            const int64_t row = token_offset(x.o_strides, at.sequence, row_of<true>(x, at, t), at.head);
            ((short *)x.o)[row + column] = 0;
        }
        return;
    }
    const bool initial = slot >= 0 && (!x.has_initial_state || arch::uniform(x.has_initial_state + at.sequence));
    const int read = initial ? slot : -1, write = x.states ? -1 : write_slot;
    const bool value_major = x.flags & DWK_INITIAL_VALUE_MAJOR;
    if (x.state_type == DWK_F32) {
        value_major ? walk<T, true, true, Keys, false, true>(x, at, read, write, exchange, nullptr)
                    : walk<T, true, false, Keys, false, true>(x, at, read, write, exchange, nullptr);
    } else {
        value_major ? walk<T, false, true, Keys, false, true>(x, at, read, write, exchange, nullptr)
                    : walk<T, false, false, Keys, false, true>(x, at, read, write, exchange, nullptr);
    }
}

} // namespace

KERNEL(threads, 3) void dw_decode_draft_bf16_k128(dwk_decode_draft_args x) { recur<arch::Bf16, 128>(x); }
KERNEL(threads, 2) void dw_decode_draft_bf16_k256(dwk_decode_draft_args x) { recur<arch::Bf16, 256>(x); }
KERNEL(threads, 3) void dw_decode_draft_f16_k128(dwk_decode_draft_args x) { recur<arch::F16, 128>(x); }
KERNEL(threads, 2) void dw_decode_draft_f16_k256(dwk_decode_draft_args x) { recur<arch::F16, 256>(x); }
