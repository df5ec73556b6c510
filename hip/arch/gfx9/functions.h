// Math functions of f32 on CDNA. exp and log have full precision; exp2, rsqrt and reciprocal are one instruction each.
#pragma once

#include "../base.h"

namespace arch {

// 2^x; results below 2^-126 are 0.
DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
DEVICE float exp(float x) { return __builtin_expf(x); }
DEVICE float log(float x) { return __builtin_logf(x); }

} // namespace arch
