// The arch trait of CDNA (gfx90a, gfx942, gfx950): 64-lane waves, v_mfma_16x16x16.
//
// A tile is 16x16 f32, held by one wave:
//   accumulator  register r of lane l: row 4 (l / 16) + r, column l % 16
//   left operand (16 rows x 16 contracted)    l % 16 = row,    elements 4 (l / 16) + 0..3 of the contraction
//   right operand (16 contracted x 16 columns) l % 16 = column, elements 4 (l / 16) + 0..3 of the contraction
// So an accumulator tile, rounded, is the right operand of a product that contracts over its rows.
#pragma once

#include "base.h"

#define KERNEL(threads, waves_per_simd)                                                                                \
    extern "C"                                                                                                         \
        __attribute__((global, amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves_per_simd)))

namespace arch {

constexpr int lanes = 64;

DEVICE int thread() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_begin() {}
DEVICE int workgroup() { return (int)__builtin_amdgcn_workgroup_id_x(); }
// Number of this wave in its workgroup, known to be the same for all its lanes.
DEVICE int wave() { return __builtin_amdgcn_readfirstlane(thread() / lanes); }
DEVICE int lane() { return thread() & (lanes - 1); }

// A wave-uniform read of memory that nobody writes during the launch: becomes a scalar load.
template <class T> DEVICE T uniform(const T *p) { return *(const __attribute__((address_space(4))) T *)(u64)p; }

// The same value, told to be the same in all lanes: the quotient of uniform numbers is computed by vector instructions,
// and a buffer access whose address depends on it would loop over the lanes.
DEVICE int uniform_value(int x) { return __builtin_amdgcn_readfirstlane(x); }

template <class T> DEVICE T *uniform_pointer(T *p) {
    const u32 low = __builtin_amdgcn_readfirstlane((int)(u64)p), high = __builtin_amdgcn_readfirstlane((u64)p >> 32);
    return (T *)(__attribute__((address_space(1))) T *)((u64)high << 32 | low);
}

// The same value, of which the compiler may conclude nothing: keeps what is computed from it inside a loop.
DEVICE int opaque(int x) {
    asm volatile("" : "+v"(x));
    return x;
}

// Of what the compiler knows to be in a scalar register at every level of optimisation.
DEVICE int opaque_uniform(int x) {
    asm volatile("" : "+s"(x));
    return x;
}

// The same value, computed here and as a whole: not again, not later, and not element by element.
template <class X> DEVICE X held(X x) {
    asm volatile("" : "+v"(x));
    return x;
}

// Nothing is moved from after this point to before it.
DEVICE void phase() { __builtin_amdgcn_sched_barrier(0); }

// Of the instructions between two such points, so many of a kind come next.
enum class Kind { vector = 2, product = 8, load = 32 };
template <Kind Which, int Count> DEVICE void schedule() {
    if constexpr (Count > 0) {
        __builtin_amdgcn_sched_group_barrier((int)Which, Count, 0);
    }
}

// Waits for all loads and stores of memory.
DEVICE void loads_done() { __builtin_amdgcn_s_waitcnt(0x0f70); }

// Of this wave, from 0 to 3: it goes first where several can go on. Waves of different priorities have different parts
// in a kernel, and meet at barriers of their own: the hardware counts waves.
template <int Priority> DEVICE void set_priority() { __builtin_amdgcn_s_setprio(Priority); }

DEVICE void end_wave() { __builtin_amdgcn_endpgm(); }

// The kernel's arguments once more, read anew: for what is used before and after a loop, and not worth holding through
// it.
template <class Arguments> DEVICE const Arguments &reread(const Arguments &) {
    typedef const __attribute__((address_space(4))) Arguments *Constant;
    Constant p = (Constant)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(p));
    return *(const Arguments *)p;
}

// All waves of the workgroup, with LDS made visible: a bare s_barrier does not wait for LDS.
DEVICE void workgroup_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Lanes of one wave exchange data through LDS.
DEVICE void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// All waves of a workgroup that has so many.
template <int Waves> DEVICE void team_sync() {
    if constexpr (Waves == 1) {
        wave_sync();
    } else {
        workgroup_sync();
    }
}

// 2^x, one instruction; results below 2^-126 are 0.
DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
DEVICE float exp(float x) { return __builtin_expf(x); }
DEVICE float log(float x) { return __builtin_logf(x); }

// The value of lane `Source` of each row of 16 lanes.
template <int Source> DEVICE float row_broadcast(float x) {
    return bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), 0x150 + Source, 0xf, 0xf, true));
}

// Of each row of 16 lanes the sum, the same bits in all of them.
template <int Rotation> DEVICE float add_rotated(float x) {
    return x + bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), 0x120 + Rotation, 0xf, 0xf, false));
}
DEVICE float row_sum(float x) { return add_rotated<1>(add_rotated<2>(add_rotated<4>(add_rotated<8>(x)))); }

// What the same lane of the other row of a pair of them has.
DEVICE float other_row(float x) { return bits<float>(__builtin_amdgcn_ds_swizzle(bits<int>(x), 16 << 10 | 31)); }

// The value of one lane.
DEVICE int read_lane(int x, int from) { return __builtin_amdgcn_readlane(x, from); }
DEVICE float read_lane(float x, int from) { return bits<float>(read_lane(bits<int>(x), from)); }

template <int Control, int RowMask> DEVICE float scan_step(float x) {
    return x + bits<float>(__builtin_amdgcn_update_dpp(0, bits<int>(x), Control, RowMask, 0xf, false));
}

// Inclusive prefix sum over the 64 lanes: within rows of 16, then across rows.
DEVICE float inclusive_sum(float x) {
    x = scan_step<0x111, 0xf>(x);
    x = scan_step<0x112, 0xf>(x);
    x = scan_step<0x114, 0xf>(x);
    x = scan_step<0x118, 0xf>(x);
    x = scan_step<0x142, 0xa>(x);
    return scan_step<0x143, 0xc>(x);
}

template <int Control, int RowMask> DEVICE int scan_step_max(int x) {
    return max_of(x, __builtin_amdgcn_update_dpp(x, x, Control, RowMask, 0xf, false));
}

// Inclusive prefix maximum over the 64 lanes.
DEVICE int inclusive_max(int x) {
    x = scan_step_max<0x111, 0xf>(x);
    x = scan_step_max<0x112, 0xf>(x);
    x = scan_step_max<0x114, 0xf>(x);
    x = scan_step_max<0x118, 0xf>(x);
    x = scan_step_max<0x142, 0xa>(x);
    return scan_step_max<0x143, 0xc>(x);
}

// Over the 64 threads of a workgroup: prefix sum and total, and the greatest. This target needs no `scratch`.
DEVICE float chunk_sum(float x, float &total, float *) {
    const float sum = inclusive_sum(x);
    total = read_lane(sum, lanes - 1);
    return sum;
}
DEVICE int chunk_max(int x, int *) { return read_lane(inclusive_max(x), lanes - 1); }
// The sum of some and the greatest of others, in one exchange.
DEVICE float chunk_sum(float x, float &total, int of, int &greatest, float *scratch) {
    greatest = chunk_max(of, (int *)scratch);
    return chunk_sum(x, total, scratch);
}

// 16 or 8 bytes at an even address. This target takes every such address, `in_one_access` or not.
typedef i32x4 Even16 __attribute__((aligned(2)));
DEVICE bool in_one_access(const void *) { return true; }
DEVICE i32x4 load_b128(const void *p) { return *(const Even16 *)p; }
DEVICE void store_b128(void *p, i32x4 x) { *(Even16 *)p = x; }
typedef i32x2 Even8 __attribute__((aligned(2)));
DEVICE i32x2 load_b64(const void *p) { return *(const Even8 *)p; }
DEVICE void store_b64(void *p, i32x2 x) { *(Even8 *)p = x; }

// The low, or the high, 16 bits of two words: first in the low half.
DEVICE int low_halves(u32 a, u32 b) { return (int)__builtin_amdgcn_perm(b, a, 0x05040100); }
DEVICE int high_halves(u32 a, u32 b) { return (int)__builtin_amdgcn_perm(b, a, 0x07060302); }

// One bit per lane.
DEVICE u64 ballot(bool x) { return __builtin_amdgcn_ballot_w64(x); }

// Buffer intrinsics by their LLVM names: the builtins exist only from clang 19 on.
#define INTRINSIC __attribute__((device))
INTRINSIC i32x4 raw_buffer_load(i32x4 rsrc, int offset, int soffset,
                                int aux) __asm("llvm.amdgcn.raw.buffer.load.v4i32");
INTRINSIC i32x2 raw_buffer_load_b64(i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.load.v2i32");
INTRINSIC int raw_buffer_load_b32(i32x4 rsrc, int offset, int soffset,
                                  int aux) __asm("llvm.amdgcn.raw.buffer.load.i32");
INTRINSIC void raw_buffer_store_b32(int x, i32x4 rsrc, int offset, int soffset,
                                    int aux) __asm("llvm.amdgcn.raw.buffer.store.i32");
#undef INTRINSIC

// The memory from a uniform pointer on. Offsets are bytes; an access at `nowhere` loads 0 or stores nothing, which is
// how rows past the end of a sequence and elements past the head dimension are masked.
class Window {
  public:
    static constexpr u32 nowhere = 0x80000000u;

    Window() = default;
    // Of so many bytes.
    DEVICE_MEMBER explicit Window(const void *base, u32 bytes = 0x7fffffff)
        : rsrc{(int)(u64)base, (int)((u64)base >> 32 & 0xffff), (int)bytes, 0x00020000} {}

    // From so many bytes further on.
    DEVICE_MEMBER void advance(u64 bytes) {
        const i32x2 base = bits<i32x2>(bits<u64>(i32x2{rsrc.x, rsrc.y}) + bytes);
        rsrc.x = base.x;
        rsrc.y = base.y;
    }
    DEVICE_MEMBER void limit(u32 bytes) { rsrc.z = (int)bytes; }

    // `uniform`: further bytes, the same for all lanes, which the range counts too.
    DEVICE_MEMBER i32x4 load_b128(u32 offset, int uniform = 0) const {
        return raw_buffer_load(rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER i32x2 load_b64(u32 offset, int uniform = 0) const {
        return raw_buffer_load_b64(rsrc, (int)offset, uniform, 0);
    }
    DEVICE_MEMBER int load_b32(u32 offset) const { return raw_buffer_load_b32(rsrc, (int)offset, 0, 0); }
    DEVICE_MEMBER void store_b32(u32 offset, int x) const { raw_buffer_store_b32(x, rsrc, (int)offset, 0, 0); }

  private:
    i32x4 rsrc;
};

// A 16-bit operand tile: four elements of a lane, in contraction order.
typedef i32x2 Operand;

// Word w of it holds two neighbouring elements of the contraction, from this one on, of this row or column.
constexpr int operand_words = 2;
DEVICE int operand_element(int word, int lane) { return lane / 16 * 4 + 2 * word; }
DEVICE int operand_row(int, int lane) { return lane % 16; }

// An accumulator tile: 16x16 f32, of which a lane holds four consecutive rows of one column.
typedef f32x4 Tile;
constexpr int elements = 4;
// Elements that lie in consecutive rows, as one vector.
typedef f32x4 Run;
constexpr int run = 4;

// c - a b. As a whole, half of the signs would take instructions of their own.
DEVICE Tile minus_product(Tile c, Tile a, Tile b) {
    const f32x2 low = __builtin_elementwise_fma(-a.xy, b.xy, c.xy), high = __builtin_elementwise_fma(-a.zw, b.zw, c.zw);
    return Tile{low.x, low.y, high.x, high.y};
}

// The 16-bit element types: what the matrix unit takes and how f32 is rounded to it (to nearest even). `join` takes
// what `nearest` gave, or numbers that are of the type anyway; `pack` takes any.
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
    // Two packed instructions for two numbers. Let x be an integer m of 24 bits: 2^16 m - m is rounded to a multiple of
    // 2^16, which leaves m rounded to one, of 8 bits. A tie goes to the even multiple, because m is even then.
    // The first product, which is exact anyway, is fused with the difference, the second is not: this holds whatever
    // the command line says of contractions. For normal numbers below 2^112: from there on 65535 x overflows, and the
    // result is an infinity of the other sign.
    static DEVICE_MEMBER Tile nearest(Tile x) {
#pragma clang fp contract(fast)
        return 65536.0f * x - 65535.0f * x;
    }
    // Of x times a power of two.
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
    // `join` rounds.
    static DEVICE_MEMBER Tile nearest(Tile x) { return x; }
    static DEVICE_MEMBER Tile nearest(Tile x, float unit) { return unit * x; }
    static DEVICE_MEMBER int join(float low, float high) { return pack(low, high); }
};

// Rows and columns of the elements of a lane's part of a tile.
class Place {
  public:
    DEVICE_MEMBER explicit Place(int lane) : first_row(lane / 16 * 4), only_column(lane % 16) {}
    DEVICE_MEMBER int row(int element) const { return first_row + element; }
    DEVICE_MEMBER int column(int) const { return only_column; }

  private:
    int first_row;
    int only_column;
};

// One number for each of a lane's columns: multiplies a tile's columns.
typedef float ColumnFactor;
DEVICE ColumnFactor columns_at(const float *values, Place at) { return values[at.column(0)]; }

// An accumulator tile of 16-bit numbers, and one rounded to them: the right operand of a product that contracts over
// its rows, and the left operand whose rows are its columns.
template <class T> DEVICE Operand packed(Tile x) { return Operand{T::join(x[0], x[1]), T::join(x[2], x[3])}; }
template <class T> DEVICE Operand rounded(Tile x) { return packed<T>(T::nearest(x)); }

template <class T> DEVICE Tile widened(Operand x) { return Tile{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y)}; }

// Two operand tiles that lie in memory as 16 rows of 32 elements: 16 bytes of a row are a lane's part of both.
// Contracting both in turn visits the elements in a permuted order, the same for everything loaded so.
struct OperandPair {
    i32x4 data;
    DEVICE_MEMBER Operand first() const { return Operand{data.x, data.y}; }
    DEVICE_MEMBER Operand second() const { return Operand{data.z, data.w}; }
};

// The eight of 32 contracted elements that a lane holds of such a pair.
DEVICE int eighth(int lane) { return lane / 16; }

// Where this lane finds 16 rows of a 16-bit matrix of `rows` rows; rows past the end read as zeros.
class OperandRows {
  public:
    OperandRows() = default;
    DEVICE_MEMBER OperandRows(int tile, int rows, u32 stride, int lane) {
        const int row = 16 * tile + lane % 16;
        offset = row < rows ? row * stride + eighth(lane) * 16 : Window::nowhere;
    }
    // 32 columns from `column` on; zeros where not `inside`. Memory need not be aligned on this target.
    DEVICE_MEMBER OperandPair load(const Window &memory, int column, bool inside) const {
        return OperandPair{memory.load_b128(inside ? offset + 2 * column : Window::nowhere)};
    }

  private:
    u32 offset;
};

// Operands of a chunk's rows of Q and K, 32 columns at a time: loaded where they are used.
class ChunkRows {
  public:
    struct Memory {};
    // Of 32 columns, at once.
    static constexpr int pairs = 2;
    DEVICE_MEMBER ChunkRows(const void *q, const void *k, u32 q_stride, u32 k_stride, int rows, int columns, Memory &)
        : q_memory(q), k_memory(k), columns(columns) {
        for (int i = 0; i < 4; ++i) {
            q_row[i] = OperandRows(i, rows, q_stride, lane());
            k_row[i] = OperandRows(i, rows, k_stride, lane());
        }
    }
    DEVICE_MEMBER void fetch(int) {}
    DEVICE_MEMBER OperandPair q(int tile, int column) const {
        return q_row[tile].load(q_memory, column, column + eighth(lane()) * 8 < columns);
    }
    DEVICE_MEMBER OperandPair k(int tile, int column) const {
        return k_row[tile].load(k_memory, column, column + eighth(lane()) * 8 < columns);
    }

  private:
    const Window q_memory, k_memory;
    const int columns;
    OperandRows q_row[4], k_row[4];
};

// c + x^T y in f32, x and y accumulator tiles. One step contracts rows r, r + 4, r + 8, r + 12.
DEVICE Tile multiply_transposed_f32(Tile x, Tile y, Tile c) {
    for (int r = 0; r < 4; ++r) {
        const float left = x[r], right = y[r];
        c = __builtin_amdgcn_mfma_f32_16x16x4f32(left, right, c, 0, 0, 0);
    }
    return c;
}

// Column `Column` of a 16x16 matrix up to row `Column` - 1, for lanes that each hold a column of it: a row of 16
// lanes holds one matrix, which also lies in memory, four rows (`four(column, row / 4)`) at a time.
template <int Column, class Memory>
DEVICE void spread_column(float (&out)[16], const float (&own)[16], const Memory &) {
    for (int i = 0; i < Column; ++i) {
        out[i] = row_broadcast<Column>(own[i]);
    }
}

} // namespace arch
