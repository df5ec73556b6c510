// Norms of rows, given their sums of squares.
#pragma once

#include "../arch/contract.h"

namespace math {

// 1 / |x| of q and k: 1 / sqrt(squares + 1e-6).
DEVICE float inverse_norm(float squares) { return arch::rsqrt(squares + 1e-6f); }

// 1 / rms of a gated norm: 1 / sqrt(squares / V + eps), with `mean` = 1 / V.
DEVICE float inverse_rms(float squares, float mean, float eps) {
    return arch::rsqrt(__builtin_fmaf(squares, mean, eps));
}

} // namespace math
