// Matrix products of sm_90a and their 16-bit element types: mma.sync of one warp, wgmma of a warpgroup, and products of
// f32 from tf32.
#pragma once

#include "tiles.h"

namespace arch {

#define DELTAWAVE_MMA(type)                                                                                            \
    static DEVICE_MEMBER Tile mma(Operand left, Operand right, Tile c) {                                               \
        float out[8];                                                                                                  \
        for (int e = 0; e < 8; ++e) {                                                                                  \
            out[e] = c[e];                                                                                             \
        }                                                                                                              \
        for (int h = 0; h < 2; ++h) {                                                                                  \
            const int low = h ? left.y : left.x, high = h ? left.w : left.z;                                           \
            float *d = out + 4 * h;                                                                                    \
            asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "     \
                "{%8, %9}, {%0, %1, %2, %3};"                                                                          \
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
                : "r"(right.x), "r"(right.y), "r"(right.z), "r"(right.w), "r"(low), "r"(high));                        \
        }                                                                                                              \
        return Tile{out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]};                                   \
    }

// Asynchronous product of the four warps of a warpgroup: d = left right, or d += left right if `adds`. d holds 64 rows,
// or 32, of this warp's 16 columns. The right operand, 16 contracted elements, is `a`. The left operand is in shared
// memory, with descriptor `b`. `Transposed`: its columns are contiguous there. multiply_async_shared: the right
// operand, too, is in shared memory, with descriptor `a`: 64 columns, of which this warp gets 16. `OfRight`, `OfLeft`:
// whether the contracted elements of that operand lie in different rows of 128 bytes, not along them.
#define DELTAWAVE_WGMMA(type)                                                                                          \
    template <bool Transposed> static DEVICE_MEMBER void multiply_async(float(&d)[32], Operand a, u64 b, bool adds) {  \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                         \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                   \
                     "{%32, %33, %34, %35}, %36, p, 1, 1, %38;}"                                                       \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
                       "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
                       "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
                       "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                                           \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)adds), "n"((int)Transposed));          \
    }                                                                                                                  \
    template <bool Transposed> static DEVICE_MEMBER void multiply_async(float(&d)[16], Operand a, u64 b, bool adds) {  \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"                                                         \
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                       \
                     "{%16, %17, %18, %19}, %20, p, 1, 1, %22;}"                                                       \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
                       "+f"(d[15])                                                                                     \
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)adds), "n"((int)Transposed));          \
    }                                                                                                                  \
    template <bool OfRight = false, bool OfLeft = false>                                                               \
    static DEVICE_MEMBER void multiply_async_shared(float(&d)[32], u64 a, u64 b, bool adds) {                          \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                         \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                       \
                     " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                   \
                     "%32, %33, p, 1, 1, %35, %36;}"                                                                   \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                       "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
                       "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
                       "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
                       "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                                           \
                     : "l"(a), "l"(b), "r"((int)adds), "n"((int)OfRight), "n"((int)OfLeft));                           \
    }

// 16-bit element types: products, and rounding of f32 to nearest even.
struct Bf16 {
    // Whether the rounding of matrices such as T is so fine that errors of single f32 operations show.
    static constexpr bool rounds_finely = false;
    DELTAWAVE_MMA("bf16")
    DELTAWAVE_WGMMA("bf16")
    static DEVICE_MEMBER float low(int pair) { return bits<float>(pair << 16); }
    static DEVICE_MEMBER float high(int pair) { return bits<float>((int)(pair & 0xffff0000)); }
    static DEVICE_MEMBER int pack(float low, float high) {
        int pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    static DEVICE_MEMBER short narrow(float x) { return (short)pack(x, 0.0f); }
};

struct F16 {
    static constexpr bool rounds_finely = true;
    DELTAWAVE_MMA("f16")
    DELTAWAVE_WGMMA("f16")
    static DEVICE_MEMBER float low(int pair) {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((short)pair));
        return x;
    }
    static DEVICE_MEMBER float high(int pair) { return low(pair >> 16); }
    static DEVICE_MEMBER int pack(float low, float high) {
        int pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};
#undef DELTAWAVE_MMA
#undef DELTAWAVE_WGMMA

// Rounds an accumulator tile to an operand: the right operand of a product that contracts over the tile's rows, or the
// left operand whose rows are the tile's columns.
template <class T> DEVICE Operand rounded(Tile x) {
    return Operand{T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
}

template <class T> DEVICE Tile widened(Operand x) {
    return Tile{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y),
                T::low(x.z), T::high(x.z), T::low(x.w), T::high(x.w)};
}

// Asynchronous products of a warpgroup. `begin_products`: the operands in registers are complete. `commit_products`:
// makes a group of the products since the last commit. `await_products`: waits for all but the last `Pending` groups;
// do not touch their registers before.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> DEVICE void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Descriptor of a left operand in shared memory: swizzled rows of 128 bytes (prefill/sm90/stage.h), eight rows are 1024
// bytes.
DEVICE u64 described(u32 shared) { return 1ull << 62 | 64ull << 32 | 1ull << 16 | shared >> 4; }

// Descriptor of a left operand of 16 columns without permutation: eight rows of eight elements are contiguous, those of
// the next eight columns follow, then the next eight rows.
DEVICE u64 described_blocks(u32 shared) { return 16ull << 32 | 8ull << 16 | shared >> 4; }

// Makes the writes of this thread to shared memory visible to asynchronous products.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An f32 tile as the sum of two tf32 tiles. `high` is rounded to nearest, so that the matrix unit's truncation of `low`
// has no bias.
struct Split {
    int high[elements], low[elements];
    DEVICE_MEMBER explicit Split(Tile x) {
        for (int e = 0; e < elements; ++e) {
            high[e] = (bits<int>(x[e]) + 0x1000) & 0xffffe000;
            low[e] = bits<int>(x[e] - bits<float>(high[e]));
        }
    }
};

// d += x^T y for the eight contracted rows of half h and the eight rows of d in half n. A lane's two neighbouring rows
// are two contracted elements. Their order is permuted, equally for both operands.
DEVICE void multiply_tf32(float *d, const int (&x)[elements], const int (&y)[elements], int h, int n) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(y[4 * h]), "r"(y[4 * h + 2]), "r"(y[4 * h + 1]), "r"(y[4 * h + 3]), "r"(x[4 * h + 2 * n]),
          "r"(x[4 * h + 2 * n + 1]));
}

// c + x^T y in f32 for accumulator tiles x and y, accurate to 2^-22 of the greatest terms. Skips the product of the low
// tiles; adds the product of the high tiles last.
DEVICE Tile multiply_transposed_f32(Tile x, Tile y, Tile c) {
    const Split xs(x), ys(y);
    float out[elements];
    for (int e = 0; e < elements; ++e) {
        out[e] = c[e];
    }
    for (int n = 0; n < 2; ++n) {
        for (int h = 0; h < 2; ++h) {
            multiply_tf32(out + 4 * n, xs.low, ys.high, h, n);
            multiply_tf32(out + 4 * n, xs.high, ys.low, h, n);
        }
        for (int h = 0; h < 2; ++h) {
            multiply_tf32(out + 4 * n, xs.high, ys.high, h, n);
        }
    }
    return Tile{out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7]};
}

// A tile as the sum of two bf16 operands.
struct Parts {
    Operand high, low;
    DEVICE_MEMBER Parts(Tile x) : high(rounded<Bf16>(x)), low(rounded<Bf16>(x - widened<Bf16>(high))) {}
    DEVICE_MEMBER Parts(Operand high, Operand low) : high(high), low(low) {}
};

// c + x^T y for accumulator tiles x and y, each as the sum of two bf16 numbers: accurate to 2^-16 of the greatest
// terms, in half of the instructions of multiply_transposed_f32. Skips the product of the low parts.
DEVICE Tile multiply_transposed_parts(Parts x, Parts y, Tile c) {
    return Bf16::mma(x.high, y.high, Bf16::mma(x.high, y.low, Bf16::mma(x.low, y.high, c)));
}

} // namespace arch
