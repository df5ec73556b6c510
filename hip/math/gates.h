// The gates of a Gated DeltaNet layer from its projections a and b.
#pragma once

#include "activations.h"

namespace math {

// g = -exp(A_log) softplus(a + dt_bias).
DEVICE float gate(float a, float a_log, float dt_bias) { return -arch::exp(a_log) * softplus(a + dt_bias); }

// beta = sigmoid(b), doubled if negative eigenvalues are allowed.
DEVICE float beta(float b, bool negative_eigenvalues) {
    const float once = sigmoid(b);
    return negative_eigenvalues ? 2.0f * once : once;
}

} // namespace math
