// Gated norm of an output row, which a workgroup of four teams holds.
#pragma once

#include "../math/activations.h"
#include "../math/norms.h"
#include "../tensor/scalar.h"
#include "token.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// Output row of V numbers, rounded to 16 bits, for this token and the one before.
struct Row {
    float o[2][row_dim];
};

// o / rms(o) * weight * gate(z) for one column. Sums have the order of kernels/norm.hip, so that bits are equal.
template <class T>
DEVICE float normed(float o, Row &row, const Token &token, const dwk_decode_args &x, int column, int t) {
    constexpr int octet = 8;
    float *all = row.o[t % 2];
    if (member() >= columns) {
        all[column] = o;
    }
    arch::workgroup_sync();
    float squares = 0.0f;
    for (int i = 0; i < octet; ++i) {
        const float own = all[member() % (row_dim / octet) * octet + i];
        squares = __builtin_fmaf(own, own, squares);
    }
    const float factor = math::inverse_rms(arch::row_sum(squares), x.norm.mean, x.norm.eps);
    const float weight = x.norm.weight ? widen_raw(token.weight, x.norm.weight_type) : 1.0f;
    const float z = arch::held(T::low(token.z));
    const f32x2 scaled{o * factor * weight, 0.0f}, gate{z, 0.0f};
    const bool with_silu = x.norm.flags & DWK_NORM_SILU;
    // As `math::gated`, which computes both.
    if (math::abs(z) < math::near_gate) {
        return math::gated_near(scaled, gate, with_silu).x;
    }
    return math::gated_far(scaled, gate, with_silu).x;
}

} // namespace
} // namespace decode
