// The vocabulary of the kernels. The arch trait says how tiles lie in a wave; this says what is done with them.
#pragma once

#include "arch.h"

namespace tile {

using arch::Bf16;
using arch::ColumnFactor;
using arch::F16;
using arch::Operand;
using arch::Place;
using arch::Tile;
using arch::Window;

using arch::columns_at;
using arch::elements;
using arch::rounded;
using arch::widened;

// Values of 16 rows, one for each element of a lane: multiplies a tile's rows.
DEVICE Tile rows_at(const float *values, Place at) {
    Tile out;
    for (int e = 0; e < elements; e += arch::run) {
        const arch::Run consecutive = *(const arch::Run *)(values + at.row(e));
        for (int i = 0; i < arch::run; ++i) {
            out[e + i] = consecutive[i];
        }
    }
    return out;
}

} // namespace tile

namespace math {

constexpr float log2e = 1.44269504088896340736f;

DEVICE float abs(float x) { return __builtin_fabsf(x); }

// 1 / (1 + e^-x).
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + arch::exp(-x)); }

// 1 / (1 + e^-x) as a product, to a few units in the last place of f32, also where e^x is far below the range of f32:
// with h = e^-|x|/2 it is 1 / (1 + h^2), or h (h / (1 + h^2)) for negative x. That of a NaN is a number.
struct Sigmoid {
    f32x2 root, rest;
};
DEVICE Sigmoid sigmoid(f32x2 x) {
    constexpr float scale = -0.5f * log2e, scale_rest = -0.5f * 1.92596299e-8f;
    const f32x2 size{min_of(abs(x[0]), 512.0f), min_of(abs(x[1]), 512.0f)}; // beyond, h is 0
    const f32x2 exponent = size * scale;
    // What rounding the exponent took away is made up for to first order.
    f32x2 rest = __builtin_elementwise_fma(size, (f32x2)scale, -exponent);
    rest = __builtin_elementwise_fma(size, (f32x2)scale_rest, rest);
    f32x2 h{arch::exp2(exponent[0]), arch::exp2(exponent[1])};
    h = __builtin_elementwise_fma(h, rest * 0.693147181f, h);
    const f32x2 sum = __builtin_elementwise_fma(h, h, (f32x2)1.0f);
    const f32x2 factor{arch::reciprocal(sum[0]), arch::reciprocal(sum[1])};
    h = f32x2{x[0] < 0.0f ? h[0] : 1.0f, x[1] < 0.0f ? h[1] : 1.0f};
    return Sigmoid{h, h * factor};
}

// x / (1 + e^-x), as accurate.
DEVICE f32x2 silu(f32x2 x) {
    const Sigmoid y = sigmoid(x);
    return x * y.root * y.rest;
}

// x times silu(z), or sigmoid(z). No z, not even NaN, makes more of 0 than 0: rows of padding have any.
DEVICE f32x2 gated(f32x2 x, f32x2 z, bool with_silu) {
    const Sigmoid y = sigmoid(z);
    f32x2 gate;
    for (int i = 0; i < 2; ++i) {
        // The sigmoid of a NaN is a number.
        gate[i] = with_silu || z[i] != z[i] ? z[i] : 1.0f;
        if (x[i] == 0.0f && !(abs(z[i]) < __builtin_inff())) {
            gate[i] = 0.0f;
        }
    }
    return x * gate * y.root * y.rest;
}

// log(1 + e^x), accurate for every x: max(x, 0) + log1p(e^-|x|), with log1p(y) = log(u) y / (u - 1), u = 1 + y,
// in which the rounding error of u cancels.
DEVICE float softplus(float x) {
    const float y = arch::exp(-abs(x));
    const float u = 1.0f + y;
    const float log1p = u == 1.0f ? y : arch::log(u) * (y / (u - 1.0f));
    return (x > 0.0f ? x : 0.0f) + log1p;
}

// A quiet NaN whose payload survives rounding to 16 bits; other values as they are.
DEVICE float canonical(float x) { return x == x ? x : __builtin_nanf(""); }

} // namespace math

// A [T, heads] element of type DWK_F32, DWK_BF16 or DWK_F16.
DEVICE float load_scalar(const void *p, int64_t index, int type) {
    if (type == DWK_F32) {
        return ((const float *)p)[index];
    }
    const int raw = ((const unsigned short *)p)[index];
    return type == DWK_BF16 ? arch::Bf16::low(raw) : arch::F16::low(raw);
}

// Those that are `step` apart, of which the first `count` are wanted.
template <int N>
DEVICE void load_scalars(float (&out)[N], const void *p, int64_t index, int64_t step, int count, int type) {
    const auto at = [&](int i) __attribute__((always_inline)) { return index + (i < count ? i * step : 0); };
    if (type == DWK_F32) {
        for (int i = 0; i < N; ++i) {
            out[i] = ((const float *)p)[at(i)];
        }
        return;
    }
    int raw[N];
    for (int i = 0; i < N; ++i) {
        raw[i] = ((const unsigned short *)p)[at(i)];
    }
    for (int i = 0; i < N; ++i) {
        out[i] = type == DWK_BF16 ? arch::Bf16::low(raw[i]) : arch::F16::low(raw[i]);
    }
}

// g = -exp(A_log) softplus(a + dt_bias).
DEVICE float gate(float a, float a_log, float dt_bias) { return -arch::exp(a_log) * math::softplus(a + dt_bias); }

// beta = sigmoid(b), doubled when negative eigenvalues are allowed.
DEVICE float beta_of(float b, bool negative_eigenvalues) {
    const float beta = math::sigmoid(b);
    return negative_eigenvalues ? 2.0f * beta : beta;
}
