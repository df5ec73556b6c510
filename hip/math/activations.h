// sigmoid, silu and softplus in f32, accurate over the whole range.
#pragma once

#include "../arch/contract.h"

namespace math {

constexpr float log2e = 1.44269504088896340736f;

DEVICE float abs(float x) { return __builtin_fabsf(x); }

// 1 / (1 + e^-x).
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + arch::exp(-x)); }

// 1 / (1 + e^-x) as the product `root` times `rest`, to a few units in the last place of f32, even if e^x is far below
// the range of f32. With h = e^-|x|/2 it is 1 / (1 + h^2), or h (h / (1 + h^2)) for negative x. A NaN gives a number.
struct Sigmoid {
    f32x2 root, rest;
};
DEVICE Sigmoid sigmoid(f32x2 x) {
    constexpr float scale = -0.5f * log2e, scale_rest = -0.5f * 1.92596299e-8f;
    const f32x2 size{min_of(abs(x[0]), 512.0f), min_of(abs(x[1]), 512.0f)}; // beyond 512 h is 0
    const f32x2 exponent = size * scale;
    // Corrects the rounding of the exponent, to first order.
    f32x2 rest = __builtin_elementwise_fma(size, (f32x2)scale, -exponent);
    rest = __builtin_elementwise_fma(size, (f32x2)scale_rest, rest);
    f32x2 h{arch::exp2(exponent[0]), arch::exp2(exponent[1])};
    h = __builtin_elementwise_fma(h, rest * 0.693147181f, h);
    const f32x2 sum = __builtin_elementwise_fma(h, h, (f32x2)1.0f);
    const f32x2 factor{arch::reciprocal(sum[0]), arch::reciprocal(sum[1])};
    h = f32x2{x[0] < 0.0f ? h[0] : 1.0f, x[1] < 0.0f ? h[1] : 1.0f};
    return Sigmoid{h, h * factor};
}

// x / (1 + e^-x), as accurate as `sigmoid`.
DEVICE f32x2 silu(f32x2 x) {
    const Sigmoid y = sigmoid(x);
    return x * y.root * y.rest;
}

// x silu(z), or x sigmoid(z), for any z. If x is 0 the result is 0 for any z, NaN included, because z of padding may
// hold anything.
DEVICE f32x2 gated_far(f32x2 x, f32x2 z, bool with_silu) {
    const Sigmoid y = sigmoid(z);
    f32x2 gate;
    for (int i = 0; i < 2; ++i) {
        // `sigmoid` turns a NaN into a number, so z itself carries it.
        gate[i] = with_silu || z[i] != z[i] ? z[i] : 1.0f;
        if (x[i] == 0.0f && !(abs(z[i]) < __builtin_inff())) {
            gate[i] = 0.0f;
        }
    }
    return x * gate * y.root * y.rest;
}

// x silu(z), or x sigmoid(z), for |z| < near_gate, as accurate as `gated_far` in half the instructions: e^-z is a
// normal number, and so is its square.
constexpr float near_gate = 64.0f;
DEVICE f32x2 gated_near(f32x2 x, f32x2 z, bool with_silu) {
    constexpr float ln2 = 0.693147180559945309417f;
    const f32x2 exponent = z * -log2e;
    const f32x2 rest = __builtin_elementwise_fma(exponent, (f32x2)-ln2, -z); // what rounding the exponent lost
    f32x2 h{arch::exp2(exponent[0]), arch::exp2(exponent[1])};
    h = __builtin_elementwise_fma(h, rest, h) + 1.0f;
    const f32x2 gate{with_silu ? z[0] : 1.0f, with_silu ? z[1] : 1.0f};
    return x * gate * f32x2{arch::reciprocal(h[0]), arch::reciprocal(h[1])};
}

// x silu(z), or x sigmoid(z). The bits of an element do not depend on the other one.
DEVICE f32x2 gated(f32x2 x, f32x2 z, bool with_silu) {
    const f32x2 far = gated_far(x, z, with_silu), near = gated_near(x, z, with_silu);
    return f32x2{abs(z[0]) < near_gate ? near[0] : far[0], abs(z[1]) < near_gate ? near[1] : far[1]};
}

// A gate and its derivative.
struct Slope {
    f32x2 value, slope;
};

// sigmoid(x) and its derivative, or silu(x) and its derivative. Products of e^-|x|, so that both are accurate at both
// ends. NaN for a NaN.
DEVICE Slope slope(f32x2 x, bool with_silu) {
    constexpr float ln2 = 0.693147180559945309417f;
    Slope y;
    for (int i = 0; i < 2; ++i) {
        const float size = 128.0f < abs(x[i]) ? 128.0f : abs(x[i]); // beyond 128 e^-x is 0
        const float exponent = size * -log2e;
        const float rest = __builtin_fmaf(exponent, -ln2, -size); // what rounding the exponent lost
        float h = arch::exp2(exponent);
        h = __builtin_fmaf(h, rest, h);
        const float greater = arch::reciprocal(1.0f + h), less = h * greater;
        const float s = x[i] < 0.0f ? less : greater, other = x[i] < 0.0f ? greater : less; // other: 1 - s
        y.value[i] = with_silu ? x[i] * s : s;
        y.slope[i] = with_silu ? __builtin_fmaf(x[i] * s, other, s) : greater * less;
    }
    return y;
}

// log(1 + e^x), accurate for every x: max(x, 0) + log1p(e^-|x|), with log1p(y) = log(u) y / (u - 1) and u = 1 + y. The
// rounding error of u cancels in the quotient.
DEVICE float softplus(float x) {
    const float y = arch::exp(-abs(x));
    const float u = 1.0f + y;
    const float log1p = u == 1.0f ? y : arch::log(u) * (y / (u - 1.0f));
    return (x > 0.0f ? x : 0.0f) + log1p;
}

// Replaces any NaN by a quiet NaN whose payload survives rounding to 16 bits. Returns other values unchanged.
DEVICE float canonical(float x) { return x == x ? x : __builtin_nanf(""); }
// The same where rounding to 16 bits needs it.
DEVICE float packable(float x) { return arch::Traits::pack_keeps_nans ? x : canonical(x); }

} // namespace math
