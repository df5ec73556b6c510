// Gates of a Gated DeltaNet layer, one thread per (token, value head):
//   g    = -exp(A_log[h]) * softplus(a[t, h] + dt_bias[h])       f32
//   beta = sigmoid(b[t, h]), or 2 sigmoid(b[t, h])               f32
#include "../tile/tile.h"

KERNEL(256, 4) void dw_gate(dw_gate_args x) {
    const int64_t index = (int64_t)arch::workgroup() * 256 + arch::thread();
    if (index >= x.tokens * x.value_heads) {
        return;
    }
    const int64_t t = index / x.value_heads;
    const int64_t h = index - t * x.value_heads;
    const float a = load_scalar(x.a, t * x.a_strides.token + h * x.a_strides.head, x.a_type);
    const float b = load_scalar(x.b, t * x.b_strides.token + h * x.b_strides.head, x.b_type);
    const float a_log = load_scalar(x.a_log, h * x.a_log_stride, x.a_log_type);
    const float dt_bias = x.dt_bias ? load_scalar(x.dt_bias, h * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
    x.g[t * x.g_strides.token + h * x.g_strides.head] = gate(a, a_log, dt_bias);
    x.beta[t * x.beta_strides.token + h * x.beta_strides.head] = beta_of(b, x.flags & DW_NEGATIVE_EIGENVALUES);
}
