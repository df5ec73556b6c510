// M and S as pairs of bf16 numbers on CDNA. A word holds both numbers of an element, the greater (high) in the high
// half. Memory holds M^T [K, K].
#pragma once

#include "../state.h"

namespace prefill {

// Splits x into two bf16 numbers, the greater in the high half.
DEVICE int pack_high_low(float x) {
    const float high = arch::Bf16::high(arch::Bf16::pack(0.0f, x));
    return arch::Bf16::pack(x - high, x);
}

// Stores M^T [column, K] to a summary, as pairs of bf16.
template <int Keys> DEVICE void store_high_low(const State<Keys> &s, float *to, int column, int key_dim) {
    for_each_run<Keys>(column, key_dim, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        arch::Run x;
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            const float value = s[t][j][e + r];
            x[r] = bits<float>(pack_high_low(value));
        }
        *(arch::Run *)(to + index) = x;
    });
}

// Stores an element of M to a summary, as a pair of bf16.
DEVICE void store_high_low(float *to, int row, int column, int key_dim, float x) {
    ((int *)to)[column * key_dim + row] = pack_high_low(x);
}

} // namespace prefill
