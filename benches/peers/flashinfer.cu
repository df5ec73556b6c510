// A C entry to FlashInfer's Gated DeltaNet prefill for sm_90a, with the one instantiation that a benchmark needs.
// FlashInfer itself builds 64 of them. ELEMENT: half or nv_bfloat16; GVA: more value heads than key heads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flashinfer/flat/prefill/prefill_kernel_delta_rule_sm90.cuh"

extern "C" int flashinfer_prefill(void *o, float *state, const void *q, const void *k, const void *v,
                                  const float *alpha, const float *beta, const int64_t *cu_seqlens, uint8_t *workspace,
                                  int sequences, int key_heads, int value_heads, int64_t tokens, float scale,
                                  int multiprocessors, cudaStream_t stream) try {
    constexpr bool gva = GVA != 0, with_beta = true, with_alpha = true, with_initial_state = false, checkpoints = false;
    flat::launch_delta_rule_prefill_kernel_gbai<gva, with_beta, with_alpha, with_initial_state, checkpoints,
                                                cutlass::arch::Sm90, ELEMENT, ELEMENT, float>(
        stream, static_cast<ELEMENT *>(o), state, static_cast<const ELEMENT *>(q), static_cast<const ELEMENT *>(k),
        static_cast<const ELEMENT *>(v), nullptr, alpha, beta, cu_seqlens, workspace, sequences, key_heads, key_heads,
        value_heads, value_heads, 128, tokens, scale, multiprocessors, nullptr, nullptr, 0);
    return 0;
} catch (const std::exception &) {
    return 1;
}
