// Gates g and beta from the projections a and b, one thread per (token t, value head h):
//   g[t, h]    = -exp(A_log[h]) softplus(a[t, h] + dt_bias[h])       f32 [T, HV]
//   beta[t, h] = sigmoid(b[t, h]), or 2 sigmoid(b[t, h])             f32 [T, HV]
#pragma once

#include "../kernel_args.h"
#include "../math/gates.h"
#include "../tensor/scalar.h"

namespace gates {

constexpr int threads = 256;

// Computes the share of workgroup `workgroup` of `workgroups`.
DEVICE void compute(const dwk_gate_args &x, int workgroup, int workgroups) {
    const int64_t elements = x.tokens * x.value_heads, step = (int64_t)workgroups * threads;
#pragma unroll 1
    for (int64_t index = (int64_t)workgroup * threads + arch::thread(); index < elements; index += step) {
        const int64_t t = index / x.value_heads;
        const int h = (int)(index - t * x.value_heads);
        // Heads of a and b lie in blocks of `block_heads`.
        const int block = h / x.block_heads, of_block = h - block * x.block_heads;
        const auto at = [&](const dwk_token_strides &strides, int64_t block_stride) __attribute__((always_inline)) {
            return t * strides.token + block * block_stride + of_block * strides.head;
        };
        const float a = load_scalar(x.a, at(x.a_strides, x.a_block), x.a_type);
        const float b = load_scalar(x.b, at(x.b_strides, x.b_block), x.b_type);
        const float a_log = load_scalar(x.a_log, h * x.a_log_stride, x.a_log_type);
        const float dt_bias = x.dt_bias ? load_scalar(x.dt_bias, h * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
        x.g[t * x.g_strides.token + h * x.g_strides.head] = math::gate(a, a_log, dt_bias);
        x.beta[t * x.beta_strides.token + h * x.beta_strides.head] = math::beta(b, x.flags & DWK_NEGATIVE_EIGENVALUES);
    }
}

} // namespace gates
