// Descriptions of q, k, v and states on sm_90a, with which a thread lets the copy engine (TMA, Tensor Memory
// Accelerator) bring chunks and initial states to shared memory, and final states from there to memory. They are a
// second parameter of a kernel: src/ops/prefill/lower.rs makes them.
#pragma once

#include "../../arch/base.h"
#include "../../kernel_args.h"

namespace prefill {

struct __attribute__((aligned(64))) TensorMap {
    u64 words[16];
};
struct TensorMaps {
    TensorMap tensors[5]; // of q, k, v, the initial and the final state
    u32 usable;           // bits: maps_of_...
    u32 sequence_tokens;  // tokens of each sequence in a tensor with a stride for sequences
};
static_assert(sizeof(TensorMaps) == DWK_MAPS_BYTES, "as the host gives it");

// Descriptions that can be used: those of q, k and v, of the final state, of the initial state.
constexpr u32 maps_of_tokens = 1, map_of_final_state = 2, map_of_initial_state = 4;

// Address of the descriptions, in the memory of parameters, and the rest of `TensorMaps`.
struct Maps {
    u64 at;
    u32 usable;
    int sequence_tokens;
    DEVICE_MEMBER bool has_tokens() const { return usable & maps_of_tokens; }
    DEVICE_MEMBER bool has_initial_state() const { return usable & map_of_initial_state; }
    DEVICE_MEMBER bool has_final_state() const { return usable & map_of_final_state; }
    DEVICE_MEMBER u64 q() const { return at; }
    DEVICE_MEMBER u64 k() const { return at + sizeof(TensorMap); }
    DEVICE_MEMBER u64 v() const { return at + 2 * sizeof(TensorMap); }
    DEVICE_MEMBER u64 initial_state() const { return at + 3 * sizeof(TensorMap); }
    DEVICE_MEMBER u64 final_state() const { return at + 4 * sizeof(TensorMap); }
};

} // namespace prefill

// The second parameter of a kernel, and its value. The copies need the parameter itself, where it lies: the compiler
// would make a copy of it to give its address. LLVM names a kernel's second parameter `<kernel>_param_1`.
#define MAPS_PARAMETER , prefill::TensorMaps maps
#define MAPS_OF(kernel)                                                                                                \
    prefill::Maps {                                                                                                    \
        [] __attribute__((device, always_inline)) () {                                                                 \
            u64 at;                                                                                                    \
            asm("{.reg .b64 t; mov.b64 t, " #kernel "_param_1; cvta.param.u64 %0, t;}" : "=l"(at));                    \
            return at;                                                                                                 \
        }(),                                                                                                           \
            maps.usable, (int)maps.sequence_tokens                                                                     \
    }
