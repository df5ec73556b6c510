// Gates of a Gated DeltaNet layer, on their own.
#include "../tile/gates.h"

KERNEL(gates::threads, 4) void dw_gate(dw_gate_args x) { gates::compute(x, arch::workgroup(), x.groups); }
