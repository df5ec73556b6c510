// The gated norm of a row of outputs, which a workgroup of four teams holds.
#pragma once

#include "../math/activations.h"
#include "../math/norms.h"
#include "../tensor/scalar.h"
#include "token.h"

namespace decode {
namespace { // internal: so the compiler knows the ranges of results before it inlines

// Outputs of a row of V, rounded to 16 bits, of this token and the one before.
struct Row {
    float o[2][row_dim];
};

// o / rms(o) * weight * gate(z) for `o` of one column. Sums are in the order of kernels/norm.hip.
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
    const float weight =
        x.norm.weight ? load_scalar(x.norm.weight, column * x.norm.weight_stride, x.norm.weight_type) : 1.0f;
    const float z = T::low(token.z);
    return math::gated(f32x2{o * factor * weight, 0.0f}, f32x2{z, 0.0f}, x.norm.flags & DWK_NORM_SILU).x;
}

} // namespace
} // namespace decode
