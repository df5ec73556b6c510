// Operands of a chunk's rows of Q and K for prefill_prepare on CDNA, loaded from memory where they are used.
#pragma once

#include "../../arch/contract.h"

namespace prefill {

using arch::OperandPair;
using arch::Window;

// 16 rows of a 16-bit matrix [rows, ...], one row a lane. Rows past the end read as zeros.
class OperandRows {
  public:
    OperandRows() = default;
    DEVICE_MEMBER OperandRows(int tile, int rows, u32 stride, int lane) {
        const int row = 16 * tile + lane % 16;
        offset = row < rows ? row * stride + arch::eighth(lane) * 16 : Window::nowhere;
    }
    // Loads 32 columns from `column` on; zeros if not `inside`.
    DEVICE_MEMBER OperandPair load(const Window &memory, int column, bool inside) const {
        return OperandPair{memory.load_b128(inside ? offset + 2 * column : Window::nowhere)};
    }

  private:
    u32 offset;
};

// Rows of Q and K of a chunk, loaded 32 columns at a time.
class ChunkRows {
  public:
    struct Memory {}; // needs no shared memory
    // Operand pairs of 32 columns that are loaded together.
    static constexpr int pairs = 2;
    DEVICE_MEMBER ChunkRows(const void *q, const void *k, u32 q_stride, u32 k_stride, int rows, int columns, Memory &)
        : q_memory(q), k_memory(k), columns(columns) {
        for (int i = 0; i < 4; ++i) {
            q_row[i] = OperandRows(i, rows, q_stride, arch::lane());
            k_row[i] = OperandRows(i, rows, k_stride, arch::lane());
        }
    }
    // Nothing is loaded ahead on this target.
    DEVICE_MEMBER void fetch(int) {}
    DEVICE_MEMBER OperandPair q(int tile, int column) const {
        return q_row[tile].load(q_memory, column, column + arch::eighth(arch::lane()) * 8 < columns);
    }
    DEVICE_MEMBER OperandPair k(int tile, int column) const {
        return k_row[tile].load(k_memory, column, column + arch::eighth(arch::lane()) * 8 < columns);
    }

  private:
    const Window q_memory, k_memory;
    const int columns;
    OperandRows q_row[4], k_row[4];
};

} // namespace prefill
