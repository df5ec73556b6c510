// The convolution of conv.hip for a layer whose lengths are on the device. Its first workgroup does what
// prefill_lengths.hip does (conv/lengths.h), so that later kernels need no launch more.
#include "../conv/convolution.h"

KERNEL(conv::threads, 2) void dw_conv_lengths_bf16(dwk_conv_lengths_args x) {
    conv::launch<arch::Bf16, false, true>(x.conv);
}
KERNEL(conv::threads, 2) void dw_conv_lengths_f16(dwk_conv_lengths_args x) {
    conv::launch<arch::F16, false, true>(x.conv);
}
