// What prepare alone needs of sm_90a: operands of Q and K, products in f32, tiles that wait in shared memory.
#pragma once

#include "sm90.h"

namespace arch {

// Operands of a chunk's rows of Q and K, 16 columns at a time: both warps copy 128 columns at once to shared memory.
// Rows of 256 bytes, whose 16-byte groups are exchanged by the row's number, so that eight rows of one group lie in
// different banks.
class ChunkRows {
  public:
    static constexpr int rows_of_chunk = 64, groups = 16, threads = 64, columns_at_once = 8 * groups;
    struct Memory {
        i32x4 q[rows_of_chunk * groups], k[rows_of_chunk * groups];
    };
    DEVICE_MEMBER ChunkRows(const void *q, const void *k, u32 q_stride, u32 k_stride, int rows, int columns,
                            Memory &memory)
        : q_base((const char *)q), k_base((const char *)k), q_stride(q_stride), k_stride(k_stride), rows(rows),
          columns(columns), memory(memory) {}

    // Called by both warps, in order: so many columns from this one on.
    DEVICE_MEMBER void fetch(int column) const {
        if (column > 0) {
            workgroup_sync();
        }
        copy(memory.k, k_base, k_stride, column);
        copy(memory.q, q_base, q_stride, column);
        await_copies();
        workgroup_sync();
    }
    // 16 columns from one of them on, of 16 rows, as the operands of T::mma, in whose order registers they are loaded.
    DEVICE_MEMBER Operand left_k(int tile, int column) const {
        const i32x4 x = load(memory.k, tile, column, lane() / 16 * 8, lane() / 8 % 2);
        return Operand{x.x, x.z, x.y, x.w};
    }
    DEVICE_MEMBER Operand right_k(int tile, int column) const { return right(memory.k, tile, column); }
    DEVICE_MEMBER Operand right_q(int tile, int column) const { return right(memory.q, tile, column); }

  private:
    static DEVICE_MEMBER int place(int row, int group) { return row * groups + (group ^ (row & 7)); }

    DEVICE_MEMBER void copy(i32x4 *to, const char *from, u32 stride, int column) const {
        const int own = opaque(thread()) & (threads - 1), group = own % groups, first = own / groups;
        const bool inside = column + 8 * group < columns;
        const u32 offset = (column + 8 * group) * 2;
        if (aligned_rows(from, stride)) {
#pragma unroll 1
            for (int some = first; some < rows_of_chunk; some += 4 * (threads / groups)) {
                for (int i = 0; i < 4; ++i) {
                    const int row = some + i * (threads / groups);
                    copy_async(shared_address(to + place(row, group)), from + (row * stride + offset),
                               inside && row < rows);
                }
            }
        } else {
#pragma unroll 1
            for (int row = first; row < rows_of_chunk; row += threads / groups) {
                to[place(row, group)] =
                    Window(from).gather_b128(inside && row < rows ? row * stride + offset : Window::nowhere);
            }
        }
    }
    static DEVICE_MEMBER Operand right(const i32x4 *from, int tile, int column) {
        return load(from, tile, column, lane() / 8 % 2 * 8, lane() / 16);
    }
    // Four 8x8 matrices, a register each; this lane names a row of one, from `first_row` on, and its eight columns.
    static DEVICE_MEMBER i32x4 load(const i32x4 *from, int tile, int column, int first_row, int second) {
        const int row = first_row + lane() % 8;
        const u32 at = shared_address(from) + tile * (16 * groups * 16) + (place(row, second) * 16 ^ column * 2);
        int x, y, z, w;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                     : "r"(at)
                     : "memory");
        return i32x4{x, y, z, w};
    }

    const char *q_base, *k_base;
    const u32 q_stride, k_stride;
    const int rows, columns;
    Memory &memory;
};

// An f32 tile as the sum of two of tf32, which the matrix unit makes of f32 by truncation: the first to nearest, so
// that the truncation of the rest has no direction.
struct Split {
    int high[elements], low[elements];
    DEVICE_MEMBER explicit Split(Tile x) {
        for (int e = 0; e < elements; ++e) {
            high[e] = (bits<int>(x[e]) + 0x1000) & 0xffffe000;
            low[e] = bits<int>(x[e] - bits<float>(high[e]));
        }
    }
};

// d += x^T y for eight contracted rows, half h, of eight rows of d, half n. A lane's two neighbouring rows are two of
// the contracted elements, in an order that is the same for both operands.
DEVICE void multiply_tf32(float *d, const int (&x)[elements], const int (&y)[elements], int h, int n) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(y[4 * h]), "r"(y[4 * h + 2]), "r"(y[4 * h + 1]), "r"(y[4 * h + 3]), "r"(x[4 * h + 2 * n]),
          "r"(x[4 * h + 2 * n + 1]));
}

// c + x^T y in f32, x and y accumulator tiles: of the products of their parts the smallest is left out, and the
// greatest comes last. Accurate to 2^-22 of the greatest terms.
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

// A tile that is kept in shared memory while others are worked on: each lane has its own elements.
struct KeptTile {
    f32x4 half[2][lanes];
    DEVICE_MEMBER void put(Tile x) {
        half[0][lane()] = x.lo;
        half[1][lane()] = x.hi;
    }
    DEVICE_MEMBER Tile get() const {
        Tile out;
        out.lo = half[0][lane()];
        out.hi = half[1][lane()];
        return out;
    }
};

// Column `Column` of a 16x16 matrix up to row `Column` - 1, for lanes that each hold a column of it: a row of 16
// lanes holds one matrix, which also lies in memory, four rows (`four(column, row / 4)`) at a time.
template <int Column, class Memory>
DEVICE void spread_column(float (&out)[16], const float (&)[16], const Memory &four) {
    for (int q = 0; q < (Column + 3) / 4; ++q) {
        const f32x4 rows = four(Column, q);
        for (int r = 0; r < 4; ++r) {
            out[4 * q + r] = rows[r];
        }
    }
}

} // namespace arch
