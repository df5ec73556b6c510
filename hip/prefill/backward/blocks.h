// Operands of the backward in memory: rows of token tensors, and 16x16 blocks in the order of lanes.
//
// A block is an operand: lane l has its words at byte l * sizeof(Operand). Blocks pass between kernels of the same
// target, so that any order of lanes will do.
#pragma once

#include "../../arch/tile.h"
#include "../../tensor/rows.h"
#include "../batch.h"

namespace prefill {

using namespace tile;

namespace backward {

constexpr int block_bytes = 16 * 16 * 2;
static_assert(block_bytes == arch::lanes * (int)sizeof(Operand), "a lane has its share of a block");

DEVICE Operand load_block(const char *blocks, int index) {
    return ((const Operand *)(blocks + (int64_t)index * block_bytes))[arch::lane()];
}
DEVICE void store_block(char *blocks, int index, Operand x) {
    ((Operand *)(blocks + (int64_t)index * block_bytes))[arch::lane()] = x;
}

// Identity [16, 16], as either operand.
template <class T> DEVICE Operand identity() {
    Operand out;
    const int lane = arch::opaque(arch::lane());
    for (int w = 0; w < arch::operand_words; ++w) {
        const int row = arch::operand_row(w, lane), element = arch::operand_element(w, lane);
        out[w] = T::pack(row == element ? 1.0f : 0.0f, row == element + 1 ? 1.0f : 0.0f);
    }
    return out;
}

// The tile whose rows are the operand's rows, and whose columns are its contracted elements. Exact. `widened` gives the
// transposed tile.
template <class T> DEVICE Tile tile_of(Operand x, Operand identity) { return arch::held(T::mma(x, identity, Tile{})); }

// The transposed operand: contracts over what were rows. Exact.
template <class T> DEVICE Operand flipped(Operand x, Operand identity) { return rounded<T>(tile_of<T>(x, identity)); }

// 16 rows of a token tensor of 16-bit elements, from row 16 * tile of a chunk on: an operand whose rows are tokens.
class Rows16 {
  public:
    DEVICE_MEMBER Rows16(const void *p, const dwk_token_strides &s, int sequence, int begin, int head, int rows)
        : base(arch::uniform_pointer((char *)row_address(p, s, sequence, begin, head))), stride((u32)s.token * 2),
          rows(rows), whole(arch::in_one_access(base) && arch::in_one_access((const void *)(u64)stride)) {}

    // Operand of 16 elements from `column` on. Rows past the chunk, and columns from `columns` on, give zeros.
    DEVICE_MEMBER Operand load(int tile, int column, int columns) const {
        const int lane = arch::opaque(arch::lane()); // otherwise scalar registers hold all comparisons
        const Window memory(base);
        Operand out;
        if constexpr (arch::operand_words == 2) {
            const i32x2 words = memory.load_b64(offset(tile, column, columns, 0, lane));
            out[0] = words.x;
            out[1] = words.y;
        } else {
            for (int w = 0; w < arch::operand_words; ++w) {
                const u32 from = offset(tile, column, columns, w, lane);
                if (whole) {
                    out[w] = memory.load_b32(from);
                } else {
                    out[w] = memory.load_b16(from) | memory.load_b16(from + 2) << 16;
                }
            }
        }
        return out;
    }
    // Place of this lane's row of a tile, for targets where a lane's words of an operand are adjacent; and the operand
    // of 16 elements from `column` on there. Rows past the chunk give zeros.
    DEVICE_MEMBER u32 place(int tile) const { return offset(tile, 0, 1, 0, arch::lane()); }
    DEVICE_MEMBER Operand load_at(u32 place, int column, int columns) const {
        const i32x2 words = Window(base).load_b64(column < columns ? place + 2 * column : Window::nowhere);
        Operand out;
        out[0] = words.x;
        out[1] = words.y;
        return out;
    }
    // Stores an operand. Rows past the chunk, and columns from `columns` on, are skipped.
    DEVICE_MEMBER void store(int tile, int column, int columns, Operand x) const {
        const int lane = arch::opaque(arch::lane());
        if constexpr (arch::operand_words == 2) {
            const u32 to = offset(tile, column, columns, 0, lane);
            if (to != Window::nowhere) {
                arch::store_b64(base + to, i32x2{x[0], x[1]});
            }
        } else {
            for (int w = 0; w < arch::operand_words; ++w) {
                const u32 to = offset(tile, column, columns, w, lane);
                if (to == Window::nowhere) {
                } else if (whole) {
                    *(int *)(base + to) = x[w];
                } else {
                    ((short *)(base + to))[0] = (short)x[w];
                    ((short *)(base + to))[1] = (short)(x[w] >> 16);
                }
            }
        }
    }

  private:
    DEVICE_MEMBER u32 offset(int tile, int column, int columns, int word, int lane) const {
        const int row = 16 * tile + arch::operand_row(word, lane);
        return ((row < rows) & (column < arch::opaque_uniform(columns)))
                   ? row * stride + 2 * (column + arch::operand_element(word, lane))
                   : Window::nowhere;
    }

    char *const base;
    const u32 stride;
    const int rows;
    const bool whole;
};

} // namespace backward
} // namespace prefill
