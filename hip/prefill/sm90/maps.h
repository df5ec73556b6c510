// Descriptions of q, k and v on sm_90a, with which a thread lets the copy engine (TMA, Tensor Memory Accelerator) bring
// whole chunks to shared memory. They are a second parameter of a kernel: src/ops/prefill/lower.rs makes them.
#pragma once

#include "../../arch/base.h"
#include "../../kernel_args.h"

namespace prefill {

struct __attribute__((aligned(64))) TensorMap {
    u64 words[16];
};
struct TokenMaps {
    TensorMap tensors[3];
    u32 usable;
    u32 sequence_tokens; // tokens of each sequence in a tensor with a stride for sequences
};
static_assert(sizeof(TokenMaps) == DWK_TOKEN_MAPS_BYTES, "as the host gives it");

// Address of the descriptions, in the memory of parameters (0: they cannot be used), and `TokenMaps::sequence_tokens`.
struct Maps {
    u64 at;
    int sequence_tokens;
    DEVICE_MEMBER bool usable() const { return at != 0; }
    DEVICE_MEMBER u64 q() const { return at; }
    DEVICE_MEMBER u64 k() const { return at + sizeof(TensorMap); }
    DEVICE_MEMBER u64 v() const { return at + 2 * sizeof(TensorMap); }
};

} // namespace prefill

// The second parameter of a kernel, and its value. The copies need the parameter itself, where it lies: the compiler
// would make a copy of it to give its address. LLVM names a kernel's second parameter `<kernel>_param_1`.
#define MAPS_PARAMETER , prefill::TokenMaps maps
#define MAPS_OF(kernel)                                                                                                \
    prefill::Maps {                                                                                                    \
        maps.usable ? [] __attribute__((device, always_inline)) () {                                         \
        u64 at;                                                                                                        \
        asm("{.reg .b64 t; mov.b64 t, " #kernel "_param_1; cvta.param.u64 %0, t;}" : "=l"(at));                        \
        return at;                                                                                                     \
    }()                                                                                                                \
                              : 0,                                                                                     \
                 int(maps.sequence_tokens)         \
    }
