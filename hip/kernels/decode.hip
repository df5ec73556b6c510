// Decode: the recurrence, token by token, for T tokens of every sequence (1, or a few to verify). Per value head, with
// S [K, V] f32, q, k [K], v, o [V] and decay = exp(g); DWK_QK_L2NORM divides q and k by their norms:
//   d = beta (v - decay S^T k)
//   S <- decay S + k d^T
//   o = scale S^T q = scale (decay S0^T q + (k.q) d),   S0: the state before the token
// in f32; o and the stored state are rounded once. S0^T k, S0^T q, k.k, q.q and k.q are all sums over keys, computed in
// one pass (decode/sums.h).
//
// q, k [B, T, HK, K], v, o [B, T, HV, V] bf16 or f16; state [slots, HV, K, V] or [slots, HV, V, K], f32, bf16 or f16. A
// team of threads owns 32 value columns of a (sequence, value head) (decode/share.h). Their state stays in registers
// from the first token to the last.
#include "../decode/walk.h"

namespace {

using namespace decode;

template <class T, int Keys, bool Norm> DEVICE void recur(const dwk_decode_args &x) {
    SHARED static Exchange<Keys> exchanges[Norm ? row_teams : 1];
    Exchange<Keys> &exchange = exchanges[Norm ? team() : 0];
    Row *row = nullptr;
    if constexpr (Norm) {
        SHARED static Row shared_row;
        row = &shared_row;
    }
    const Work at = work_of(x);
    const int slot = x.slots ? arch::uniform(x.slots + at.sequence) : at.sequence;
    const int write_slot = x.write_slots ? arch::uniform(x.write_slots + at.sequence) : slot;
    const bool reads = is_slot(slot, x.slot_count), writes = is_slot(write_slot, x.slot_count);
    if (!reads && !writes) {
        // Padding: outputs are zeros.
        const int column = at.column + member();
        for (int t = 0; t < x.tokens && member() < columns && column < x.value_dim; ++t) {
            const int64_t row = token_offset(x.o_strides, at.sequence, at.sequence * x.tokens + t, at.head);
            ((short *)x.o)[row + column] = 0;
        }
        return;
    }
    const bool initial = reads && (!x.has_initial_state || arch::uniform(x.has_initial_state + at.sequence));
    // With `states` the pool is not written: `commit` later copies the state that stays.
    const int read = initial ? slot : -1, write = writes && !x.states ? write_slot : -1;
    const bool value_major = x.flags & DWK_INITIAL_VALUE_MAJOR;
    if (x.state_type == DWK_F32) {
        value_major ? walk<T, true, true, Keys, Norm, false>(x, at, read, write, exchange, row)
                    : walk<T, true, false, Keys, Norm, false>(x, at, read, write, exchange, row);
    } else {
        value_major ? walk<T, false, true, Keys, Norm, false>(x, at, read, write, exchange, row)
                    : walk<T, false, false, Keys, Norm, false>(x, at, read, write, exchange, row);
    }
}

} // namespace

KERNEL(threads, residency) void dw_decode_bf16_k128(dwk_decode_args x) { recur<arch::Bf16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_bf16_k256(dwk_decode_args x) { recur<arch::Bf16, 256, false>(x); }
KERNEL(threads, residency) void dw_decode_f16_k128(dwk_decode_args x) { recur<arch::F16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_f16_k256(dwk_decode_args x) { recur<arch::F16, 256, false>(x); }
KERNEL(row_threads, 1) void dw_decode_norm_bf16(dwk_decode_args x) { recur<arch::Bf16, 128, true>(x); }
KERNEL(row_threads, 1) void dw_decode_norm_f16(dwk_decode_args x) { recur<arch::F16, 128, true>(x); }
