// Operands of a chunk's rows of Q and K for prefill_prepare on sm_90a. Both warps together copy 128 columns at a time
// to shared memory.
#pragma once

#include "../../arch/contract.h"

namespace prefill {

using arch::Operand;
using arch::Window;

// Rows of Q and K of a chunk, read 16 columns at a time. Shared memory holds rows of 256 bytes. The row's number
// permutes their 16-byte groups, so that eight rows of one group lie in different banks.
class ChunkRows {
  public:
    static constexpr int rows_of_chunk = 64, groups = 16, threads = 64, columns_at_once = 8 * groups;
    static constexpr int row_bytes = 16 * groups;
    struct Memory {
        i32x4 q[rows_of_chunk * groups], k[rows_of_chunk * groups];
    };
    DEVICE_MEMBER ChunkRows(const void *q, const void *k, u32 q_stride, u32 k_stride, int rows, int columns,
                            Memory &memory)
        : q((const char *)q), k((const char *)k), q_stride(q_stride), k_stride(k_stride), rows(rows), columns(columns),
          memory(memory) {}

    // Copies 128 columns from `column` on. Both warps must call it, with ascending columns.
    DEVICE_MEMBER void fetch(int column) const {
        if (column > 0) {
            arch::workgroup_sync();
        }
        copy(memory.k, k, k_stride, column);
        copy(memory.q, q, q_stride, column);
        arch::await_copies();
        arch::workgroup_sync();
    }
    // 16 rows of 16 columns as a left or right operand of T::mma. `column` counts from the first copied column.
    DEVICE_MEMBER Operand left_k(int tile, int column) const {
        const i32x4 x = load(memory.k, tile, column, arch::lane() / 16 * 8, arch::lane() / 8 % 2);
        return Operand{x.x, x.z, x.y, x.w};
    }
    DEVICE_MEMBER Operand right_k(int tile, int column) const { return right(memory.k, tile, column); }
    DEVICE_MEMBER Operand right_q(int tile, int column) const { return right(memory.q, tile, column); }

  private:
    static DEVICE_MEMBER int place(int row, int group) { return row * groups + (group ^ (row & 7)); }

    // A thread copies 16 bytes of every fourth row.
    DEVICE_MEMBER void copy(i32x4 *to, const char *from, u32 stride, int column) const {
        constexpr int apart = threads / groups;
        const int own = arch::opaque(arch::thread()) & (threads - 1), group = own % groups, first = own / groups;
        const char *const own_from = from + (first * stride + (column + 8 * group) * 2);
        const bool inside = column + 8 * group < columns;
        if (!arch::aligned_rows(from, stride)) {
#pragma unroll 1
            for (int row = 0; row < rows_of_chunk; row += apart) {
                to[place(first + row, group)] =
                    Window(own_from).gather_b128(inside && first + row < rows ? row * stride : Window::nowhere);
            }
        } else if (rows == rows_of_chunk && columns - column >= columns_at_once) {
            // Whole chunks, which most are, in fewer instructions: no masks, and two addresses in shared memory.
            const u32 even = arch::shared_address(to + place(first, group)),
                      odd = arch::shared_address(to + place(first + apart, group)) - apart * row_bytes;
            for (int row = 0; row < rows_of_chunk; row += apart) {
                arch::copy_async((row & apart ? odd : even) + row * row_bytes, own_from + row * stride);
            }
        } else {
#pragma unroll 1
            for (int row = 0; row < rows_of_chunk; row += apart) {
                arch::copy_async(arch::shared_address(to + place(first + row, group)), own_from + row * stride,
                                 inside && first + row < rows);
            }
        }
    }
    static DEVICE_MEMBER Operand right(const i32x4 *from, int tile, int column) {
        return load(from, tile, column, arch::lane() / 8 % 2 * 8, arch::lane() / 16);
    }
    // Loads four 8x8 matrices, one register each. This lane supplies the address of one row (counted from `first_row`)
    // and its eight columns.
    static DEVICE_MEMBER i32x4 load(const i32x4 *from, int tile, int column, int first_row, int second) {
        const int row = first_row + arch::lane() % 8;
        const u32 at = arch::shared_address(from) + tile * (16 * row_bytes) + (place(row, second) * 16 ^ column * 2);
        int x, y, z, w;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                     : "r"(at)
                     : "memory");
        return i32x4{x, y, z, w};
    }

    const char *q, *k;
    const u32 q_stride, k_stride;
    const int rows, columns;
    Memory &memory;
};

} // namespace prefill
