// Compiler hints on CDNA: where and in which order values are computed, and facts that must not be deduced.
#pragma once

#include "../base.h"

namespace arch {

// Returns x and hides its value from the compiler, which then cannot hoist computations with it out of a loop.
DEVICE int opaque(int x) {
    asm volatile("" : "+v"(x));
    return x;
}

// `opaque` for a value in a scalar register.
DEVICE int opaque_uniform(int x) {
    asm volatile("" : "+s"(x));
    return x;
}

// Returns x and forces its computation here, once and as a whole, not element by element.
template <class X> DEVICE X held(X x) {
    asm volatile("" : "+v"(x));
    return x;
}

// No instruction moves across this point.
DEVICE void phase() { __builtin_amdgcn_sched_barrier(0); }

// Schedules `Count` instructions of this kind next. Used between two phases.
enum class Kind { vector = 2, product = 8, load = 32 };
template <Kind Which, int Count> DEVICE void schedule() {
    if constexpr (Count > 0) {
        __builtin_amdgcn_sched_group_barrier((int)Which, Count, 0);
    }
}

// Bytes before arguments of this type in the kernel's arguments: 0 unless they are a part of those.
template <class Arguments> constexpr u32 arguments_offset = 0;

// Loads the kernel's arguments again, for values that are used before and after a loop but not worth a register in it.
template <class Arguments> DEVICE const Arguments &reread(const Arguments &) {
    typedef const __attribute__((address_space(4))) char *Constant;
    typedef const __attribute__((address_space(4))) Arguments *Constants;
    Constant p = (Constant)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(p));
    return *(const Arguments *)(Constants)(p + arguments_offset<Arguments>);
}

// Brings `Bytes` of the kernel's arguments to the scalar cache at once. Otherwise each line is waited for when it is
// first needed.
template <u32 Bytes> DEVICE void touch_arguments() {
    typedef const __attribute__((address_space(4))) int *Constants;
    const Constants p = (Constants)__builtin_amdgcn_kernarg_segment_ptr();
    constexpr u32 line = 64, lines = (Bytes + line - 1) / line;
    int words[lines];
#pragma unroll
    for (u32 i = 0; i < lines; ++i) {
        words[i] = p[i * line / 4];
    }
#pragma unroll
    for (u32 i = 0; i < lines; ++i) {
        asm volatile("" ::"s"(words[i]));
    }
}

} // namespace arch
