// Types and macros of every kernel. Freestanding: compiler builtins only, no HIP headers, no device libraries.
#pragma once

#include <stdint.h>

#define DEVICE static inline __attribute__((device, always_inline))
#define DEVICE_MEMBER inline __attribute__((device, always_inline))
#define SHARED __attribute__((shared))

typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short i16x4 __attribute__((ext_vector_type(4)));
typedef int i32x2 __attribute__((ext_vector_type(2)));
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32;
typedef unsigned long long u64;

// Reinterprets the bits of one type as another. The argument is a copy: in clang up to 22, `__builtin_bit_cast` of a
// vector element reads element 0.
template <class To, class From> DEVICE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    return __builtin_bit_cast(To, x);
}

template <class T> DEVICE T min_of(T a, T b) { return a < b ? a : b; }
template <class T> DEVICE T max_of(T a, T b) { return a > b ? a : b; }
