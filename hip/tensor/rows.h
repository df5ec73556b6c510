// Rows of token tensors [T, H, D], packed or dense, by the strides of kernel_args.h.
#pragma once

#include "../arch/base.h"
#include "../kernel_args.h"

// Offset in elements of (token, head) of a sequence.
DEVICE int64_t token_offset(const dwk_token_strides &strides, int sequence, int token, int head) {
    return sequence * strides.sequence + token * strides.token + head * strides.head;
}
DEVICE u32 token_offset(const dwk_token_steps &steps, int sequence, int token, int head) {
    return sequence * steps.sequence + token * steps.token + head * steps.head;
}

// Address of byte `byte` of (token, head) of a sequence in a tensor of 16-bit elements.
DEVICE const char *row_address(const void *base, const dwk_token_strides &strides, int sequence, int token, int head,
                               u32 byte = 0) {
    return (const char *)base + 2 * token_offset(strides, sequence, token, head) + byte;
}
DEVICE const char *row_address(const void *base, const dwk_token_steps &steps, int sequence, int token, int head,
                               u32 byte = 0) {
    return (const char *)base + (2 * token_offset(steps, sequence, token, head) + byte);
}
