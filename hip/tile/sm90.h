// The arch trait of NVIDIA sm_90a, as PTX: 32-lane warps; prepare multiplies with mma.sync, scan with wgmma.
//
// A tile is 16x16 f32, held by one warp as the two halves of a transposed product: the matrix unit's M counts the
// tile's columns, its N the tile's rows.
//   element e = 4 h + 2 c + p of lane l: row 8 h + 2 (l % 4) + p, column 8 c + l / 4
// A 16-bit operand is 16 rows by 16 contracted elements.
//   word 2 d + s of lane l: elements 8 d + 2 (l % 4) + 0..1 of row 8 s + l / 4
// So an accumulator tile, rounded, is an operand whose rows are the tile's columns: the right operand of a product that
// contracts over the tile's rows.
#pragma once

#include "base.h"

#define KERNEL(threads, workgroups) extern "C" __attribute__((global, launch_bounds(threads, workgroups)))

namespace arch {

constexpr int lanes = 32;

DEVICE int thread() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE int workgroup() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE int lane() { return thread() & (lanes - 1); }
// Threads of this workgroup.
DEVICE int threads() { return __nvvm_read_ptx_sreg_ntid_x(); }

// The value of one lane.
DEVICE int read_lane(int x, int from) { return __nvvm_shfl_sync_idx_i32(0xffffffff, x, from, 0x1f); }

// Number of this wave in its workgroup, the same for all its lanes.
DEVICE int wave() { return read_lane(thread() / lanes, 0); }

// A read of memory that nobody writes during the launch.
template <class T> DEVICE T uniform(const T *p) { return *(const __attribute__((address_space(1))) T *)(u64)p; }

// A write of memory that is known to be global, whatever is known of the pointer.
template <class T> DEVICE void store_global(char *to, T x) { *(__attribute__((address_space(1))) T *)(u64)to = x; }

// The same value, of which the compiler may conclude nothing: keeps what is computed from it inside a loop.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What only CDNA's compiler has to be told.
DEVICE int uniform_value(int x) { return x; }
DEVICE char *opaque(char *x) {
    asm volatile("" : "+l"(x));
    return x;
}
template <class T> DEVICE T *uniform_pointer(T *p) { return p; }
DEVICE int opaque_uniform(int x) { return opaque(x); }
template <class X> DEVICE X held(X x) { return x; }
DEVICE void phase() {}
template <class Arguments> DEVICE const Arguments &reread(const Arguments &x) { return x; }

DEVICE void workgroup_sync() { __syncthreads(); }
// Some of the workgroup's warps meet at a barrier of their own: those that wait, and those that only say they were
// there.
DEVICE void barrier_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// From here on, the warps of this warpgroup have so many registers each: those that give some up, and those that wait
// until there are enough.
template <int Registers> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
// Ends this wave. ptxas gives each role of a kernel its own registers where the roles' code does not join again.
[[noreturn]] DEVICE void end_wave() {
    asm volatile("exit;");
    __builtin_unreachable();
}
DEVICE void wave_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// All waves of a workgroup that has so many.
template <int Waves> DEVICE void team_sync() {
    if constexpr (Waves == 1) {
        wave_sync();
    } else {
        workgroup_sync();
    }
}

// Until the kernels before this one in the stream are complete, nothing that they write may be read. Where a kernel has
// said that the next one may begin, that one may not even rely on what was complete before; so it says so once it has
// waited itself.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// 2^x, one instruction; results below 2^-126 are 0.
DEVICE float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float rsqrt(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to one unit in the last place, for normal numbers.
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x in full precision: 2^n e^r with r = x - n log(2), and a polynomial for e^r.
DEVICE float exp(float x) {
    const float bounded = x > 89.0f ? 89.0f : x < -105.0f ? -105.0f : x; // NaN stays
    const float whole = __builtin_rintf(bounded * 1.44269504088896340736f);
    const float r = __builtin_fmaf(whole, -1.42860677e-6f, __builtin_fmaf(whole, -0.693145752f, bounded));
    float series = 1.0f / 5040;
    series = __builtin_fmaf(series, r, 1.0f / 720);
    series = __builtin_fmaf(series, r, 1.0f / 120);
    series = __builtin_fmaf(series, r, 1.0f / 24);
    series = __builtin_fmaf(series, r, 1.0f / 6);
    series = __builtin_fmaf(series, r, 0.5f);
    const float y = __builtin_fmaf(__builtin_fmaf(series, r, 1.0f), r, 1.0f);
    const int n = (int)whole, half = n / 2;
    return y * bits<float>((half + 127) << 23) * bits<float>((n - half + 127) << 23);
}

// log x in full precision for normal x: 2^n m with m around 1, and log m = 2 artanh((m - 1) / (m + 1)).
DEVICE float log(float x) {
    const int n = (bits<int>(x) - 0x3f3504f3) >> 23;
    const float m = bits<float>(bits<int>(x) - (n << 23));
    const float s = (m - 1.0f) / (m + 1.0f), square = s * s;
    float series = 1.0f / 9;
    series = __builtin_fmaf(series, square, 1.0f / 7);
    series = __builtin_fmaf(series, square, 1.0f / 5);
    series = __builtin_fmaf(series, square, 1.0f / 3);
    series *= square;
    return __builtin_fmaf((float)n, 0.693147180559945309417f, __builtin_fmaf(2.0f * s, series, 2.0f * s));
}

// 16 or 8 bytes at an address that is a multiple of 16 or 8.
DEVICE bool in_one_access(const void *p) { return ((u64)p & 15) == 0; }
DEVICE i32x4 load_b128(const void *p) { return *(const i32x4 *)p; }
DEVICE void store_b128(void *p, i32x4 x) { *(i32x4 *)p = x; }
DEVICE i32x2 load_b64(const void *p) { return *(const i32x2 *)p; }
DEVICE void store_b64(void *p, i32x2 x) { *(i32x2 *)p = x; }

// Of each half of 16 lanes the sum, the same bits in all of them; the other half need not be there.
DEVICE float row_sum(float x) {
    const u32 half = 0xffffu << (lane() & 16);
    for (int step = 8; step > 0; step /= 2) {
        x += __nvvm_shfl_sync_bfly_f32(half, x, step, 0x1f);
    }
    return x;
}

// What the same lane of the other half of 16 has.
DEVICE float other_row(float x) { return __nvvm_shfl_sync_bfly_f32(0xffffffff, x, 16, 0x1f); }

// Inclusive prefix sum and maximum over the lanes.
DEVICE float inclusive_sum(float x) {
    for (int step = 1; step < lanes; step *= 2) {
        const float before = __nvvm_shfl_sync_up_f32(0xffffffff, x, step, 0);
        x += lane() >= step ? before : 0.0f;
    }
    return x;
}
DEVICE int inclusive_max(int x) {
    for (int step = 1; step < lanes; step *= 2) {
        x = max_of(x, __nvvm_shfl_sync_up_i32(0xffffffff, x, step, 0)); // below `step`, the lane's own
    }
    return x;
}

// Over the 64 threads of a workgroup: prefix sum and total, and the greatest. Each uses its own half of `scratch`,
// which the next use must not meet without a synchronisation.
DEVICE float chunk_sum(float x, float &total, float *scratch) {
    float sum = inclusive_sum(x);
    if (lane() == lanes - 1) {
        scratch[thread() / lanes] = sum;
    }
    workgroup_sync();
    sum += thread() / lanes ? scratch[0] : 0.0f;
    total = scratch[1] + scratch[0];
    return sum;
}
DEVICE int chunk_max(int x, int *scratch) {
    const int greatest = inclusive_max(x);
    if (lane() == lanes - 1) {
        scratch[2 + thread() / lanes] = greatest;
    }
    workgroup_sync();
    return max_of(scratch[2], scratch[3]);
}
// The sum of some and the greatest of others, in one exchange.
DEVICE float chunk_sum(float x, float &total, int of, int &greatest, float *scratch) {
    const int of_warp = __nvvm_redux_sync_max(of, 0xffffffff);
    if (lane() == 0) {
        ((int *)scratch)[2 + thread() / lanes] = of_warp;
    }
    const float sum = chunk_sum(x, total, scratch);
    greatest = max_of(((int *)scratch)[2], ((int *)scratch)[3]);
    return sum;
}

// The low, or the high, 16 bits of two words: first in the low half.
DEVICE int low_halves(u32 a, u32 b) { return (int)((a & 0xffff) | b << 16); }
DEVICE int high_halves(u32 a, u32 b) { return (int)(a >> 16 | (b & 0xffff0000)); }

// One bit per lane.
DEVICE u64 ballot(bool x) { return (u32)__nvvm_vote_ballot_sync(0xffffffff, x); }

// The memory from a pointer on, which is not written once the launch has begun, but for load_written_b128. Offsets are
// bytes; a load at `nowhere` or beyond gives 0, which is how rows past the end of a sequence and elements past the head
// dimension are masked.
class Window {
  public:
    static constexpr u32 nowhere = 0x80000000u;

    DEVICE_MEMBER explicit Window(const void *base) : base((u64)base) {}

    // At multiples of 16 bytes.
    DEVICE_MEMBER i32x4 load_b128(u32 offset) const {
        int x, y, z, w;
        asm("{.reg .pred p; setp.ge.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
            "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
            : "=&r"(x), "=&r"(y), "=&r"(z), "=&r"(w)
            : "l"(base + offset), "r"(offset));
        return i32x4{x, y, z, w};
    }
    // Of what the kernel before writes, which this one may have overtaken until it waited.
    DEVICE_MEMBER i32x4 load_written_b128(u32 offset) const {
        int x, y, z, w;
        asm volatile(
            "{.reg .pred p; setp.ge.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
            "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
            : "=&r"(x), "=&r"(y), "=&r"(z), "=&r"(w)
            : "l"(base + offset), "r"(offset));
        return i32x4{x, y, z, w};
    }
    DEVICE_MEMBER int load_b32(u32 offset) const {
        int x;
        asm("{.reg .pred p; setp.ge.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1];}"
            : "=&r"(x)
            : "l"(base + offset), "r"(offset));
        return x;
    }
    DEVICE_MEMBER int load_b16(u32 offset) const {
        short x;
        asm("{.reg .pred p; setp.ge.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1];}"
            : "=&h"(x)
            : "l"(base + offset), "r"(offset));
        return (unsigned short)x;
    }

    // 16 bytes at any even address.
    DEVICE_MEMBER i32x4 gather_b128(u32 offset) const {
        i32x4 out;
        for (int i = 0; i < 4; ++i) {
            out[i] = load_b16(offset + 4 * i) | load_b16(offset + 4 * i + 2) << 16;
        }
        return out;
    }

  private:
    u64 base;
};

// What is computed so far stays before this point, and what depends on it after.
DEVICE void pin(float &x) { asm volatile("" : "+f"(x)); }
// A register as it is.
DEVICE float unset() {
    float x;
    asm volatile("" : "=f"(x));
    return x;
}
DEVICE void pin(int &x) { asm volatile("" : "+r"(x)); }

// Asynchronous products of a warpgroup: their operands in registers are complete (begin), the products since the last
// commit are a group, all but the last `Pending` groups are complete. Until then nothing may touch their registers.
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> DEVICE void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Where the left operand of such products lies: rows of 128 bytes, swizzled (in prefill_sm90.h), eight of them 1024
// bytes.
DEVICE u64 described(u32 shared) { return 1ull << 62 | 64ull << 32 | 1ull << 16 | shared >> 4; }

// Makes the writes of this thread to shared memory visible to asynchronous products.
DEVICE void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Rows whose 16-byte groups can be loaded in one access.
DEVICE bool aligned_rows(const void *base, u32 stride) { return ((u64)base & 15) == 0 && (stride & 15) == 0; }

// An accumulator tile: 16x16 f32, of which a lane holds two neighbouring rows in each half of two columns.
typedef float Tile __attribute__((ext_vector_type(8)));
constexpr int elements = 8;
// Elements that lie in consecutive rows, as one vector.
typedef f32x2 Run;
constexpr int run = 2;

// Rows and columns of the elements of a lane's part of a tile.
class Place {
  public:
    DEVICE_MEMBER explicit Place(int lane) : first_row((u32)lane % 4 * 2), first_column((u32)lane / 4) {}
    DEVICE_MEMBER int row(int element) const { return first_row + element / 4 * 8 + element % 2; }
    DEVICE_MEMBER int column(int element) const { return first_column + element / 2 % 2 * 8; }

  private:
    int first_row;
    int first_column;
};

// One number for each of a lane's columns: multiplies a tile's columns.
typedef Tile ColumnFactor;
DEVICE ColumnFactor columns_at(const float *values, Place at) {
    const float a = values[at.column(0)], b = values[at.column(2)];
    return ColumnFactor{a, a, b, b, a, a, b, b};
}

// A 16-bit operand tile.
typedef i32x4 Operand;
// Word w of it holds two neighbouring elements of the contraction, from this one on, of this row or column.
constexpr int operand_words = 4;
DEVICE int operand_element(int word, int lane) { return word / 2 * 8 + (u32)lane % 4 * 2; }
DEVICE int operand_row(int word, int lane) { return word % 2 * 8 + (u32)lane / 4; }

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

// d = (d +) left right by the four warps of a warpgroup, asynchronously: 64 rows of this warp's 16 columns, whose 16
// contracted elements are in `a`; the left operand lies in shared memory, where `b` says. `Transposed`: its columns are
// contiguous there.
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
    }

// The 16-bit element types: what the matrix unit takes and how f32 is rounded to it (to nearest even).
struct Bf16 {
    // Whether errors of single f32 operations show beside the rounding of matrices such as T.
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

// An accumulator tile rounded to 16 bits: the right operand of a product that contracts over its rows, and the left
// operand whose rows are its columns.
template <class T> DEVICE Operand rounded(Tile x) {
    return Operand{T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
}

template <class T> DEVICE Tile widened(Operand x) {
    return Tile{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y),
                T::low(x.z), T::high(x.z), T::low(x.w), T::high(x.w)};
}

// Shared memory by its own addresses, which asynchronous copies and products take.
DEVICE u32 shared_address(const void *p) { return (u32)(u64)(const __attribute__((address_space(3))) void *)p; }
// 16 bytes from global memory, or zeros, at some time before await_copies.
DEVICE void copy_async(u32 to, const char *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void copy_async(u32 to, const char *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// All copies of this thread are complete.
DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void store_shared(u32 to, i32x4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

} // namespace arch
