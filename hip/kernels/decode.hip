// Decode: the recurrence, token by token, for T tokens of every sequence (1, or a few to verify). Per value head, with
// S [K, V] f32, q, k [K], v, o [V] and decay = exp(g); DWK_QK_L2NORM divides q and k by their norms:
//   d = beta (v - decay S^T k)
//   S <- decay S + k d^T
//   o = scale S^T q = scale (decay S0^T q + (k.q) d),   S0: the state before the token
// in f32; o and the stored state are rounded once. S0^T k, S0^T q, k.k, q.q and k.q are all sums over keys, computed in
// one pass (decode/sums.h).
//
// q, k [B, T, HK, K], v, o [B, T, HV, V] bf16 or f16; state [slots, HV, K, V] or [slots, HV, V, K], f32, bf16 or f16. A
// team, one wave, owns 8, 16 or 32 value columns of a (sequence, value head) (decode/share.h). Their state stays in
// registers from the first token to the last. decode_full: for K = 128 and V a multiple of 32. decode_few: the same,
// with twice as many teams, each with half as many columns.
#include "../decode/walk.h"

using namespace decode;
typedef Heads<128, true> FullHeads;
typedef Heads<128, true, few_across> FewHeads;

KERNEL(threads, residency) void dw_decode_bf16_k128(dwk_decode_args x) {
    recur<arch::Bf16, Heads<128, false>, false, false>(x);
}
KERNEL(threads, 2) void dw_decode_bf16_k256(dwk_decode_args x) {
    recur<arch::Bf16, Heads<256, false>, false, false>(x);
}
KERNEL(threads, residency) void dw_decode_f16_k128(dwk_decode_args x) {
    recur<arch::F16, Heads<128, false>, false, false>(x);
}
KERNEL(threads, 2) void dw_decode_f16_k256(dwk_decode_args x) { recur<arch::F16, Heads<256, false>, false, false>(x); }
KERNEL(threads, residency) void dw_decode_full_bf16(dwk_decode_args x) {
    recur<arch::Bf16, FullHeads, false, false>(x);
}
KERNEL(threads, residency) void dw_decode_full_f16(dwk_decode_args x) { recur<arch::F16, FullHeads, false, false>(x); }
KERNEL(few_threads, few_residency) void dw_decode_few_bf16(dwk_decode_args x) {
    recur<arch::Bf16, FewHeads, false, false>(x);
}
KERNEL(few_threads, few_residency) void dw_decode_few_f16(dwk_decode_args x) {
    recur<arch::F16, FewHeads, false, false>(x);
}
KERNEL(row_threads, 1) void dw_decode_norm_bf16(dwk_decode_args x) {
    recur<arch::Bf16, Heads<128, false>, true, false>(x);
}
KERNEL(row_threads, 1) void dw_decode_norm_f16(dwk_decode_args x) {
    recur<arch::F16, Heads<128, false>, true, false>(x);
}
