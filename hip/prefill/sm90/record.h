// Record on sm_90a: T, then P, each in the order in which shared memory holds it (Stage::lower_place), without the
// blocks above the diagonal.
#pragma once

#include "../../arch/tile.h"
#include "../record.h"

namespace prefill {

using namespace tile;

// Bytes of a 16x16 block of T or P, and place of lower block (row, column): blocks of a column follow each other.
constexpr int block_bytes = 16 * 16 * 2;
DEVICE constexpr int block_place(int row, int column) {
    return (column * tiles - column * (column - 1) / 2 + row - column) * block_bytes;
}

// Position of a row within a factor of the record. A lane's four rows of a tile are adjacent.
DEVICE int row_position(int row) { return (row & ~15) + (row & 6) * 2 + (row & 8) / 4 + (row & 1); }

// Writes lower blocks of T and P. Blocks are given transposed: a rounded accumulator tile then holds rows of the matrix
// in consecutive words. A word of all lanes is eight rows of eight elements.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + record_matrices) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const { put(to, row, column, transposed); }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        put(to + matrix_bytes, row, column, transposed);
    }

  private:
    static DEVICE_MEMBER void put(char *matrix, int row, int column, Tile transposed) {
        const Operand operand = rounded<T>(transposed);
        int *const at = (int *)(matrix + block_place(row, column)) + arch::lane();
        for (int word = 0; word < arch::operand_words; ++word) {
            at[word % 2 * 64 + word / 2 * 32] = operand[word];
        }
    }

    char *const to;
};

} // namespace prefill
