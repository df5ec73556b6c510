// Record on sm_90a: T, then P, each as rows up to the diagonal block, in the order of the copies to shared memory.
#pragma once

#include "../../arch/tile.h"
#include "../record.h"

namespace prefill {

using namespace tile;

// Bytes of a 16x16 block of T or P, and the row of blocks that contains lower block `block`.
constexpr int block_bytes = 16 * 16 * 2;
DEVICE constexpr int tile_row(int block) { return block >= 6 ? 3 : block >= 3 ? 2 : block >= 1 ? 1 : 0; }

// Position of a row within a factor of the record. A lane's four rows of a tile are adjacent.
DEVICE int row_position(int row) { return (row & ~15) + (row & 6) * 2 + (row & 8) / 4 + (row & 1); }

// Writes lower blocks of T and P. Blocks are given transposed: a rounded accumulator tile then holds rows of the matrix
// in consecutive words.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + record_matrices), lane(arch::lane()) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const { put(to, row, column, transposed); }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        put(to + matrix_bytes, row, column, transposed);
    }

  private:
    DEVICE_MEMBER void put(char *matrix, int row, int column, Tile transposed) const {
        const Operand operand = rounded<T>(transposed);
        const int row_bytes = (row + 1) * 32;
        char *at = matrix + lower_block(row, 0) * block_bytes + column * 32 + (u32)lane / 4 * row_bytes + lane % 4 * 4;
        // Neighbouring lanes exchange words. Each then stores eight bytes of a row, and four lanes store 32: memory
        // takes parts of 32 bytes as slowly as all of them.
        const bool odd = lane & 1;
        at += odd ? 16 - 4 : 0;
        for (int i = 0; i < 2; ++i) {
            const int given = odd ? operand[i] : operand[i + 2], taken = arch::exchanged(given, 1);
            *(i32x2 *)(at + i * 8 * row_bytes) = odd ? i32x2{taken, operand[i + 2]} : i32x2{operand[i], taken};
        }
    }

    char *const to;
    const int lane;
};

} // namespace prefill
