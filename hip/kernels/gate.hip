// Gates of a Gated DeltaNet layer for T tokens and HV value heads (gate/gates.h):
//   g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) or 2 sigmoid(b)
// a, b [T, HV] f32, bf16 or f16; g, beta [T, HV] f32.
#include "../gate/gates.h"

KERNEL(gates::threads, 4) void dw_gate(dwk_gate_args x) { gates::compute(x, arch::workgroup(), x.groups); }
