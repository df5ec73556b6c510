// Backward of the causal convolution (conv/backward.h): gradients of the projections, of the conv states, and sums for
// those of weight and bias, which gradient_sums adds up.
//
// x, dx [T, channels], dy [T, H, D] bf16 or f16; weight [channels, width]; states [N, channels, columns], as x.
#include "../conv/backward.h"

KERNEL(conv::backward::threads, 2) void dw_conv_backward_bf16(dwk_conv_backward_args x) {
    conv::backward::launch<arch::Bf16>(x);
}
KERNEL(conv::backward::threads, 2) void dw_conv_backward_f16(dwk_conv_backward_args x) {
    conv::backward::launch<arch::F16>(x);
}
