// Causal depthwise convolution of the packed projections, split into q, k and v. For token t of a sequence, channel c:
//   y[t, c] = activation(bias[c] + sum over j of weight[c, j] x[t - (width - 1) + j, c])     (conv/filter.h)
//   state[c] <- last columns of (state[c], x[:, c])                                           (conv/state.h)
// summed in f32 by fused multiply-adds, bias first, then the oldest token; rounded once. The last columns of the conv
// state, or zeros, stand for tokens before the sequence. With norms, rows of q and k are divided by sqrt(sum of squares
// + 1e-6) before rounding (conv/heads.h).
//
// x [T, channels], y [T, H, D] bf16 or f16; weight [channels, width]; state [slots, channels, columns], as x.
//
// A thread owns eight channels and walks over a run of consecutive tokens (conv/run.h, conv/work.h). The thread that
// reads a sequence's state also writes it, so no synchronisation is needed. The first workgroups compute g and beta of
// all rows (gate/gates.h).
#include "../conv/convolution.h"

KERNEL(conv::threads, 2) void dw_conv_bf16(dwk_conv_args x) { conv::launch<arch::Bf16, false>(x); }
KERNEL(conv::threads, 2) void dw_conv_f16(dwk_conv_args x) { conv::launch<arch::F16, false>(x); }
