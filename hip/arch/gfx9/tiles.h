// Tiles of v_mfma_16x16x16 on CDNA. A tile is 16x16 f32, held by one wave; l is a lane, e an element:
//   accumulator    element e: row 4 (l / 16) + e, column l % 16
//   left operand   (16 rows x 16 contracted)      row l % 16,    elements 4 (l / 16) + 0..3 of the contraction
//   right operand  (16 contracted x 16 columns)   column l % 16, elements 4 (l / 16) + 0..3 of the contraction
// An accumulator tile, rounded to 16 bits, is therefore the right operand of a product that contracts over its rows.
#pragma once

#include "../base.h"

namespace arch {

// Operand tile of 16-bit numbers: four elements of a lane, in contraction order.
typedef i32x2 Operand;

// Word w of a lane holds elements `operand_element` and the next of the contraction, in row `operand_row` of a left
// operand or the same column of a right one.
constexpr int operand_words = 2;
DEVICE int operand_element(int word, int lane) { return lane / 16 * 4 + 2 * word; }
DEVICE int operand_row(int, int lane) { return lane % 16; }

// Accumulator tile, 16x16 f32: a lane holds four consecutive rows of one column.
typedef f32x4 Tile;
constexpr int elements = 4;
// A lane's elements in consecutive rows, as one vector.
typedef f32x4 Run;
constexpr int run = 4;

// Lane map: row and column in the tile of a lane's element e.
class LaneMap {
  public:
    DEVICE_MEMBER explicit LaneMap(int lane) : first_row(lane / 16 * 4), only_column(lane % 16) {}
    DEVICE_MEMBER int row(int element) const { return first_row + element; }
    DEVICE_MEMBER int column(int) const { return only_column; }

  private:
    int first_row;
    int only_column;
};

// Place of an element among 16x16 f32 blocks in LDS (math/inverse.h): blocks by columns. The column's number permutes
// the column's quarters of four rows, which avoids bank conflicts.
DEVICE int place_in_block(int block, int row, int column) {
    return (block * 16 + column) * 16 + (row / 4 ^ (column >> 1 & 3)) * 4 + row % 4;
}
// Place of a lane's element of a block, or of the transposed block.
class BlockMap {
  public:
    DEVICE_MEMBER explicit BlockMap(LaneMap at) : at(at) {}
    DEVICE_MEMBER int place(int block, int e) const { return place_in_block(block, at.row(e), at.column(e)); }
    DEVICE_MEMBER int transposed_place(int block, int e) const {
        return place_in_block(block, at.column(e), at.row(e));
    }

  private:
    const LaneMap at;
};

// Calls f(i, x[i][i]) for this lane's elements on the diagonal of a tile.
template <class F> DEVICE void each_on_diagonal(Tile x, LaneMap at, F f) {
    for (int e = 0; e < elements; ++e) {
        if (at.row(e) == at.column(e)) {
            f(at.column(e), x[e]);
        }
    }
}

// One number for each of a lane's columns. Multiplying a tile by it scales the columns.
typedef float ColumnFactor;
DEVICE ColumnFactor columns_at(const float *values, LaneMap at) { return values[at.column(0)]; }

// c - a b, in two halves. Computed as a whole tile, half of the sign changes would take extra instructions. The empty
// instruction hides from clang 22 that the upper half is one: they would change its sign as an integer's.
DEVICE Tile minus_product(Tile c, Tile a, Tile b) {
    f32x2 upper = a.zw;
    asm("" : "+v"(upper));
    const f32x2 low = __builtin_elementwise_fma(-a.xy, b.xy, c.xy),
                high = __builtin_elementwise_fma(-upper, b.zw, c.zw);
    return Tile{low.x, low.y, high.x, high.y};
}

// Two operand tiles that lie in memory as 16 rows of 32 elements. A lane loads 16 bytes of a row, which belong to both
// tiles. Contracting the two in turn visits elements in a permuted order, which is the same for all operands loaded
// this way.
struct OperandPair {
    i32x4 data;
    DEVICE_MEMBER Operand first() const { return Operand{data.x, data.y}; }
    DEVICE_MEMBER Operand second() const { return Operand{data.z, data.w}; }
};

// Index (0 to 3) of the eight contracted elements of a pair that a lane holds.
DEVICE int eighth(int lane) { return lane / 16; }

} // namespace arch
