// First kernel of prefill: matrices and row factors of a chunk, which do not depend on the state
// (prefill/recurrence.h). One workgroup per (chunk of 64 tokens, key head, group of its value heads), with one of its
// 64 threads per row of the chunk. K K^T and Q K^T are computed once for all value heads of the group. For each value
// head, with G the inclusive sum of g in the chunk and D_ij = exp(G_i - G_j):
//   A = strictly lower head_group of -beta_i D_ij (k_i . k_j)       [64, 64] f32
//   T = (I - A)^-1                                            [64, 64] f32; its strictly lower head_group in 16 bits
//   P = strictly lower head_group of D_ij (q_i . k_j)               [64, 64] 16 bits
// Also computes the row factors of prefill_scan (prefill/record.h). With DWK_QK_L2NORM the norms of q and k scale rows
// and columns of these matrices, so q and k are not rounded again.
//
// q, k [T, HK, K] bf16 or f16; g, beta [T, HV] f32 (or a, b with DWK_RAW_GATES); records [records, HV].
#include "../prefill/prepare.h"

namespace {

using namespace prefill;

template <class T> DEVICE void prepare(const dwk_prefill_prepare_args &x) {
    SHARED static Shared<T> shared;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    prepare_unit<T>(x, arch::workgroup(), shared);
}

} // namespace

KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_bf16(dwk_prefill_prepare_args x) {
    prepare<Bf16>(x);
}
KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_f16(dwk_prefill_prepare_args x) {
    prepare<F16>(x);
}
