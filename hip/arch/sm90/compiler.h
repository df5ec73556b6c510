// Hints to the compiler on sm_90a. Hints that only CDNA's compiler needs do nothing.
#pragma once

#include "../base.h"

namespace arch {

// Read of memory that nobody writes during the launch, at the same address in all lanes.
template <class T> DEVICE T uniform(const T *p) { return *(const __attribute__((address_space(1))) T *)(u64)p; }

// The same value, about which the compiler may conclude nothing: keeps what is computed from it inside a loop.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE char *opaque(char *x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Hints that this compiler does not need.
DEVICE int uniform_value(int x) { return x; }
template <class T> DEVICE T *uniform_pointer(T *p) { return p; }
DEVICE int opaque_uniform(int x) { return opaque(x); }
template <class X> DEVICE X held(X x) { return x; }
DEVICE void phase() {}
template <class Arguments> DEVICE const Arguments &reread(const Arguments &x) { return x; }

// Pins a register: computations before this point stay before it, and uses of x after.
DEVICE void pin(float &x) { asm volatile("" : "+f"(x)); }
DEVICE void pin(int &x) { asm volatile("" : "+r"(x)); }
// A register's present contents.
DEVICE float unset() {
    float x;
    asm volatile("" : "=f"(x));
    return x;
}
} // namespace arch
