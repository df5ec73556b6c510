// Rows of token tensors [T, H, D], packed or dense, by the strides of kernel_args.h.
#pragma once

#include "../arch/base.h"
#include "../kernel_args.h"

// Offset in elements of (token, head) of a sequence.
DEVICE int64_t token_offset(const dwk_token_strides &strides, int sequence, int token, int head) {
    return sequence * strides.sequence + token * strides.token + head * strides.head;
}

// Address of (token, head) of a sequence in a tensor of 16-bit elements.
DEVICE const char *row_address(const void *base, const dwk_token_strides &strides, int sequence, int token, int head) {
    return (const char *)base + 2 * token_offset(strides, sequence, token, head);
}
