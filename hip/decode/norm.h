// Gated norm of an output row, which a workgroup holds.
#pragma once

#include "../math/activations.h"
#include "../math/norms.h"
#include "../tensor/scalar.h"
#include "token.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// Output row of V numbers, rounded to 16 bits, for this token and the one before.
struct __attribute__((aligned(16))) Row {
    float o[2][row_dim];
};

// o / rms(o) * weight * gate(z) for the thread's column of the row, once all teams have stored their columns. Sums have
// the order of kernels/norm.hip, so that bits are equal. `weight`: the column's, unconverted.
template <class T> DEVICE float normed(const float *row, int z, int weight, const dwk_decode_args &x, int column) {
    constexpr int octet = 8;
    arch::workgroup_sync();
    float squares = 0.0f;
    for (int i = 0; i < octet; ++i) {
        const float own = row[member() % (row_dim / octet) * octet + i];
        squares = __builtin_fmaf(own, own, squares);
    }
    const float factor = math::inverse_rms(arch::row_sum(squares), x.norm.mean, x.norm.eps);
    const float scale = x.norm.weight ? widen_raw(weight, x.norm.weight_type) : 1.0f;
    const float input = arch::held(T::low(z));
    const f32x2 scaled{row[column] * factor * scale, 0.0f}, gate{input, 0.0f};
    const bool with_silu = x.norm.flags & DWK_NORM_SILU;
    // As `math::gated`, which computes both.
    if (math::abs(input) < math::near_gate) {
        return math::gated_near(scaled, gate, with_silu).x;
    }
    return math::gated_far(scaled, gate, with_silu).x;
}

} // namespace
} // namespace decode
