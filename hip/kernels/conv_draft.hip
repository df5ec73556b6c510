// The convolution of conv.hip for speculative decoding: it starts from the columns of the conv state that the count of
// accepted tokens chooses, and stores the columns of all drafts (conv/draft.h).
#include "../conv/convolution.h"

KERNEL(conv::threads, 2) void dw_conv_draft_bf16(dwk_conv_draft_args x) { conv::launch<arch::Bf16, true>(x.conv); }
KERNEL(conv::threads, 2) void dw_conv_draft_f16(dwk_conv_draft_args x) { conv::launch<arch::F16, true>(x.conv); }
