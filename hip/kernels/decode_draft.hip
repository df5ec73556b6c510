// Decode for speculative decoding: the recurrence of decode.hip over the drafts of every sequence. The state after each
// token is stored to a slot of its own. The next launch starts from the slot that the count of accepted tokens chooses.
// Sequences may have different lengths (decode/draft.h). decode_draft_norm: with the gated norm of o, as decode_norm.
#include "../decode/walk.h"

namespace {

using namespace decode;

template <class T, int Keys, bool Norm> DEVICE void recur(const dwk_decode_draft_args &all) {
    SHARED static Exchange<Keys> exchanges[Norm ? row_teams : 1];
    Exchange<Keys> &exchange = exchanges[Norm ? team() : 0];
    Row *row = nullptr;
    if constexpr (Norm) {
        SHARED static Row shared_row;
        row = &shared_row;
    }
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
        value_major ? walk<T, true, true, Keys, Norm, true>(x, at, read, write, exchange, row)
                    : walk<T, true, false, Keys, Norm, true>(x, at, read, write, exchange, row);
    } else {
        value_major ? walk<T, false, true, Keys, Norm, true>(x, at, read, write, exchange, row)
                    : walk<T, false, false, Keys, Norm, true>(x, at, read, write, exchange, row);
    }
}

} // namespace

KERNEL(threads, residency) void dw_decode_draft_bf16_k128(dwk_decode_draft_args x) { recur<arch::Bf16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_draft_bf16_k256(dwk_decode_draft_args x) { recur<arch::Bf16, 256, false>(x); }
KERNEL(threads, residency) void dw_decode_draft_f16_k128(dwk_decode_draft_args x) { recur<arch::F16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_draft_f16_k256(dwk_decode_draft_args x) { recur<arch::F16, 256, false>(x); }
KERNEL(row_threads, 1) void dw_decode_draft_norm_bf16(dwk_decode_draft_args x) { recur<arch::Bf16, 128, true>(x); }
KERNEL(row_threads, 1) void dw_decode_draft_norm_f16(dwk_decode_draft_args x) { recur<arch::F16, 128, true>(x); }
