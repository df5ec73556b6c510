// Math functions of f32 on sm_90a. exp and log have full precision; exp2, rsqrt and reciprocal are one instruction
// each.
#pragma once

#include "../base.h"

namespace arch {

// 2^x; results below 2^-126 are 0.
DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float rsqrt(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to one unit in the last place, for normal numbers.
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x in full precision: 2^n e^r with r = x - n log(2), and a polynomial for e^r.
DEVICE float exp(float x) {
    const float bounded = x > 89.0f ? 89.0f : x < -105.0f ? -105.0f : x; // NaN stays
    const float whole = __builtin_rintf(bounded * 1.44269504088896340736f);
    const float r = __builtin_fmaf(whole, -1.42860677e-6f, __builtin_fmaf(whole, -0.693145752f, bounded));
    float series = 1.0f / 5040;
    series = __builtin_fmaf(series, r, 1.0f / 720);
    series = __builtin_fmaf(series, r, 1.0f / 120);
    series = __builtin_fmaf(series, r, 1.0f / 24);
    series = __builtin_fmaf(series, r, 1.0f / 6);
    series = __builtin_fmaf(series, r, 0.5f);
    const float y = __builtin_fmaf(__builtin_fmaf(series, r, 1.0f), r, 1.0f);
    const int n = (int)whole, half = n / 2;
    return y * bits<float>((half + 127) << 23) * bits<float>((n - half + 127) << 23);
}

// log x in full precision for normal x: 2^n m with m around 1, and log m = 2 artanh((m - 1) / (m + 1)).
DEVICE float log(float x) {
    const int n = (bits<int>(x) - 0x3f3504f3) >> 23;
    const float m = bits<float>(bits<int>(x) - (n << 23));
    const float s = (m - 1.0f) / (m + 1.0f), square = s * s;
    float series = 1.0f / 9;
    series = __builtin_fmaf(series, square, 1.0f / 7);
    series = __builtin_fmaf(series, square, 1.0f / 5);
    series = __builtin_fmaf(series, square, 1.0f / 3);
    series *= square;
    return __builtin_fmaf((float)n, 0.693147180559945309417f, __builtin_fmaf(2.0f * s, series, 2.0f * s));
}

} // namespace arch
