// Matrix products of CDNA and their 16-bit element types: v_mfma_16x16x16 of bf16 and f16, and products of f32.
#pragma once

#include "tiles.h"

namespace arch {

// 16-bit element types: products, and rounding of f32 to nearest even. `join` takes numbers that are exact in the type,
// such as results of `nearest`. `pack` takes any numbers.
struct Bf16 {
    static DEVICE_MEMBER f32x4 mma(Operand left, Operand right, f32x4 c) {
        return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(bits<i16x4>(left), bits<i16x4>(right), c, 0, 0, 0);
    }
    static DEVICE_MEMBER float low(int pair) { return bits<float>(pair << 16); }
    static DEVICE_MEMBER float high(int pair) { return bits<float>((int)(pair & 0xffff0000)); }
    static DEVICE_MEMBER u32 round(float x) {
        const u32 u = bits<u32>(x);
        return u + 0x7fff + (u >> 16 & 1);
    }
    static DEVICE_MEMBER int pack(float low, float high) {
        return (int)__builtin_amdgcn_perm(round(high), round(low), 0x07060302);
    }
    static DEVICE_MEMBER short narrow(float x) { return (short)(round(x) >> 16); }
    // Rounds two numbers with two packed instructions. Let x be an integer m of 24 bits. 2^16 m - m is rounded to a
    // multiple of 2^16, which leaves m rounded to 8 bits. A tie goes to the even multiple, because m is even then. The
    // first product is exact and is fused with the difference; the second is not fused. The pragma ensures this under
    // any contraction flag. Valid for normal numbers below 2^112. Above, 65535 x overflows and the result is an
    // infinity of the other sign.
    static DEVICE_MEMBER Tile nearest(Tile x) {
#pragma clang fp contract(fast)
        return 65536.0f * x - 65535.0f * x;
    }
    // Rounds x times `unit`, a power of two.
    static DEVICE_MEMBER Tile nearest(Tile x, float unit) {
#pragma clang fp contract(fast)
        return 65536.0f * unit * x - 65535.0f * unit * x;
    }
    static DEVICE_MEMBER int join(float low, float high) {
        return (int)__builtin_amdgcn_perm(bits<u32>(high), bits<u32>(low), 0x07060302);
    }
};

struct F16 {
    typedef _Float16 half2 __attribute__((ext_vector_type(2)));
    typedef _Float16 half4 __attribute__((ext_vector_type(4)));
    static DEVICE_MEMBER f32x4 mma(Operand left, Operand right, f32x4 c) {
        return __builtin_amdgcn_mfma_f32_16x16x16f16(bits<half4>(left), bits<half4>(right), c, 0, 0, 0);
    }
    static DEVICE_MEMBER float low(int pair) { return (float)bits<_Float16>((short)pair); }
    static DEVICE_MEMBER float high(int pair) { return (float)bits<_Float16>((short)(pair >> 16)); }
    static DEVICE_MEMBER int pack(float low, float high) { return bits<int>(half2{(_Float16)low, (_Float16)high}); }
    // Identity: `join` rounds.
    static DEVICE_MEMBER Tile nearest(Tile x) { return x; }
    static DEVICE_MEMBER Tile nearest(Tile x, float unit) { return unit * x; }
    static DEVICE_MEMBER int join(float low, float high) { return pack(low, high); }
};

// Waits until the results of products may be read and overwritten: the eleven states of an f32 product. To be called
// before a branch: clang 19 omits waits that are due at its target.
DEVICE void products_done() {
    __builtin_amdgcn_sched_barrier(0);
    asm volatile("s_nop 10");
    __builtin_amdgcn_sched_barrier(0);
}

// Converts an accumulator tile to an operand: the right operand of a product that contracts over the tile's rows, or
// the left operand whose rows are the tile's columns. `packed` takes numbers that are exact in the type, `rounded` any
// numbers.
template <class T> DEVICE Operand packed(Tile x) { return Operand{T::join(x[0], x[1]), T::join(x[2], x[3])}; }
template <class T> DEVICE Operand rounded(Tile x) { return packed<T>(T::nearest(x)); }

template <class T> DEVICE Tile widened(Operand x) { return Tile{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y)}; }

// c + x^T y in f32 for accumulator tiles x and y. Step r contracts rows r, r + 4, r + 8, r + 12.
DEVICE Tile multiply_transposed_f32(Tile x, Tile y, Tile c) {
    for (int r = 0; r < 4; ++r) {
        const float left = x[r], right = y[r];
        c = __builtin_amdgcn_mfma_f32_16x16x4f32(left, right, c, 0, 0, 0);
    }
    return c;
}

} // namespace arch
