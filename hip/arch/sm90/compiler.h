// Compiler hints on sm_90a. Hints that only CDNA's compiler needs do nothing.
#pragma once

#include "../base.h"

namespace arch {

// Load of memory that nobody writes during the launch. The address must be equal in all lanes.
template <class T> DEVICE T uniform(const T *p) { return *(const __attribute__((address_space(1))) T *)(u64)p; }

// Returns x and hides its value from the compiler, which then cannot hoist computations with it out of a loop.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE char *opaque(char *x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Identities: hints that this compiler does not need.
DEVICE int uniform_value(int x) { return x; }
template <class T> DEVICE T *uniform_pointer(T *p) { return p; }
DEVICE int opaque_uniform(int x) { return opaque(x); }
template <class X> DEVICE X held(X x) { return x; }
DEVICE void phase() {}
template <class Arguments> DEVICE const Arguments &reread(const Arguments &x) { return x; }
template <u32 Bytes> DEVICE void touch_arguments() {}

// Pins x to a register here: x is computed before this point and used after it.
DEVICE void pin(float &x) { asm volatile("" : "+f"(x)); }
DEVICE void pin(int &x) { asm volatile("" : "+r"(x)); }
// An undefined value: whatever the register holds.
DEVICE float unset() {
    float x;
    asm volatile("" : "=f"(x));
    return x;
}
} // namespace arch
