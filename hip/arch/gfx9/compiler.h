// Hints to the compiler on CDNA: where values are computed, in which order, and what it must not conclude.
#pragma once

#include "../base.h"

namespace arch {

// The same value, about which the compiler may conclude nothing: keeps what is computed from it inside a loop.
DEVICE int opaque(int x) {
    asm volatile("" : "+v"(x));
    return x;
}

// The same for a value in a scalar register.
DEVICE int opaque_uniform(int x) {
    asm volatile("" : "+s"(x));
    return x;
}

// The same value, computed here and as a whole: neither again, nor later, nor element by element.
template <class X> DEVICE X held(X x) {
    asm volatile("" : "+v"(x));
    return x;
}

// No instruction moves across this point.
DEVICE void phase() { __builtin_amdgcn_sched_barrier(0); }

// Between two phases: the next `Count` instructions are of this kind.
enum class Kind { vector = 2, product = 8, load = 32 };
template <Kind Which, int Count> DEVICE void schedule() {
    if constexpr (Count > 0) {
        __builtin_amdgcn_sched_group_barrier((int)Which, Count, 0);
    }
}

// The kernel's arguments, loaded again: for values that are used before and after a loop but not worth a register
// through it.
template <class Arguments> DEVICE const Arguments &reread(const Arguments &) {
    typedef const __attribute__((address_space(4))) Arguments *Constant;
    Constant p = (Constant)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(p));
    return *(const Arguments *)p;
}

} // namespace arch
