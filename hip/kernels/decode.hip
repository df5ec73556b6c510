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
// registers from the first token to the last.
//
// decode_full: for K = 128, V a multiple of 32, strides of 32 bits and rows that begin at multiples of 16 bytes. Each
// kernel has one path, for states of 32 (s32) or 16 bits (s16) that are [K, V] (kv) or [V, K] (vk). decode_few: the
// same, with twice as many teams, each with half as many columns.
#include "../decode/walk.h"

using namespace decode;

KERNEL(threads, residency) void dw_decode_bf16_k128(dwk_decode_args x) { recur<arch::Bf16, 128, false, false>(x); }
KERNEL(threads, 2) void dw_decode_bf16_k256(dwk_decode_args x) { recur<arch::Bf16, 256, false, false>(x); }
KERNEL(threads, residency) void dw_decode_f16_k128(dwk_decode_args x) { recur<arch::F16, 128, false, false>(x); }
KERNEL(threads, 2) void dw_decode_f16_k256(dwk_decode_args x) { recur<arch::F16, 256, false, false>(x); }

#define FULL_KERNELS(name, T, Wide, ValueMajor)                                                                        \
    KERNEL(threads, residency) void dw_decode_full_##name(dwk_decode_full_args x) {                                    \
        recur_full<T, FullShare<across, Wide, ValueMajor>>(x);                                                         \
    }                                                                                                                  \
    KERNEL(few_threads, few_residency) void dw_decode_few_##name(dwk_decode_full_args x) {                             \
        recur_full<T, FullShare<few_across, Wide, ValueMajor>>(x);                                                     \
    }
FULL_KERNELS(bf16_s32_kv, arch::Bf16, true, false)
FULL_KERNELS(bf16_s32_vk, arch::Bf16, true, true)
FULL_KERNELS(bf16_s16_kv, arch::Bf16, false, false)
FULL_KERNELS(bf16_s16_vk, arch::Bf16, false, true)
FULL_KERNELS(f16_s32_kv, arch::F16, true, false)
FULL_KERNELS(f16_s32_vk, arch::F16, true, true)
FULL_KERNELS(f16_s16_kv, arch::F16, false, false)
FULL_KERNELS(f16_s16_vk, arch::F16, false, true)

KERNEL(row_threads, row_residency) void dw_decode_norm_bf16(dwk_decode_args x) {
    recur<arch::Bf16, 128, true, false>(x);
}
KERNEL(row_threads, row_residency) void dw_decode_norm_f16(dwk_decode_args x) { recur<arch::F16, 128, true, false>(x); }
