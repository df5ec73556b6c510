// Tiles of sm_90a. A tile is 16x16 f32, held by one warp as the two halves of a transposed product: the matrix unit's M
// counts the tile's columns, its N the tile's rows. l is a lane:
//   accumulator  element e = 4 h + 2 c + p: row 8 h + 2 (l % 4) + p, column 8 c + l / 4
//   operand      16 rows x 16 contracted, word 2 d + s: elements 8 d + 2 (l % 4) + 0..1 of row 8 s + l / 4
// An accumulator tile, rounded to 16 bits, is therefore an operand whose rows are the tile's columns: the right operand
// of a product that contracts over the tile's rows.
#pragma once

#include "../base.h"

namespace arch {

// Accumulator tile, 16x16 f32: a lane holds two neighbouring rows in each half of two columns.
typedef float Tile __attribute__((ext_vector_type(8)));
constexpr int elements = 8;
// A lane's elements in consecutive rows, as one vector.
typedef f32x2 Run;
constexpr int run = 2;

// Lane map: row and column in the tile of a lane's element e.
class LaneMap {
  public:
    DEVICE_MEMBER explicit LaneMap(int lane) : first_row((u32)lane % 4 * 2), first_column((u32)lane / 4) {}
    DEVICE_MEMBER int row(int element) const { return first_row + element / 4 * 8 + element % 2; }
    DEVICE_MEMBER int column(int element) const { return first_column + element / 2 % 2 * 8; }

  private:
    int first_row;
    int first_column;
};

// Place of an element among 16x16 f32 blocks in shared memory (math/inverse.h): blocks by columns. Columns and quarters
// of four rows are permuted, so that none of these accesses has a bank conflict: two rows of a lane's column of a tile;
// an element of the transposed tile; a quarter of a lane's column; a quarter of one block in half of the lanes, and
// that of the next block in the others.
DEVICE int place_in_block(int block, int row, int column) {
    const int quarter = row / 4 ^ (column >> 1 & 1) ^ ((column >> 1 ^ column >> 2) & 1) * 2 ^ (block & 1);
    return (block * 16 + (column ^ (column >> 1 & 1))) * 16 + quarter * 4 + row % 4;
}
// Place of a lane's element of a block, or of the transposed block; place() has even elements only. A place is that of
// element 0 in block 0 with some bits inverted, plus what does not depend on the lane. So few registers hold addresses.
class BlockMap {
  public:
    DEVICE_MEMBER explicit BlockMap(LaneMap at)
        : of_lane(place_in_block(0, at.row(0), at.column(0))),
          transposed_of_lane(place_in_block(0, at.column(0), at.row(0))) {}
    DEVICE_MEMBER int place(int block, int e) const {
        return (of_lane ^ (e / 4 * 8 ^ (block & 1) * 4)) + e / 2 % 2 * 128 + block * 256;
    }
    DEVICE_MEMBER int transposed_place(int block, int e) const {
        return (transposed_of_lane ^ (e % 2 * 16 ^ e / 2 % 2 * 8 ^ (block & 1) * 4)) + e / 4 * 128 + block * 256;
    }

  private:
    const int of_lane, transposed_of_lane;
};

// Calls f(i, x[i][i]) for this lane's elements on the diagonal of a tile: two in the lanes that have some.
template <class F> DEVICE void each_on_diagonal(Tile x, LaneMap at, F f) {
    const int column = at.column(0);
    if ((column & ~1) == at.row(0)) {
        const bool odd = column & 1;
        f(column, odd ? x[1] : x[0]);
        f(column + 8, odd ? x[7] : x[6]);
    }
}

// One number for each of a lane's columns. Multiplying a tile by it scales the columns.
typedef Tile ColumnFactor;
DEVICE ColumnFactor columns_at(const float *values, LaneMap at) {
    const float a = values[at.column(0)], b = values[at.column(2)];
    return ColumnFactor{a, a, b, b, a, a, b, b};
}

// c - a b.
DEVICE Tile minus_product(Tile c, Tile a, Tile b) { return c - a * b; }

// Operand tile of 16-bit numbers.
typedef i32x4 Operand;
// Word w of a lane holds elements `operand_element` and the next of the contraction, in row `operand_row` of a left
// operand or the same column of a right one.
constexpr int operand_words = 4;
DEVICE int operand_element(int word, int lane) { return word / 2 * 8 + (u32)lane % 4 * 2; }
DEVICE int operand_row(int word, int lane) { return word % 2 * 8 + (u32)lane / 4; }

} // namespace arch
