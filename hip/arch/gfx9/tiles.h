// Tiles of v_mfma_16x16x16 on CDNA. A tile is 16x16 f32, held by one wave; l is a lane, e an element:
//   accumulator    element e: row 4 (l / 16) + e, column l % 16
//   left operand   (16 rows x 16 contracted)      row l % 16,    elements 4 (l / 16) + 0..3 of the contraction
//   right operand  (16 contracted x 16 columns)   column l % 16, elements 4 (l / 16) + 0..3 of the contraction
// So an accumulator tile, rounded to 16 bits, is the right operand of a product that contracts over its rows.
#pragma once

#include "../base.h"

namespace arch {

// Operand tile of 16-bit numbers: four elements of a lane, in contraction order.
typedef i32x2 Operand;

// Word w of a lane holds two neighbouring elements of the contraction, from `operand_element` on, of this row (or, of a
// right operand, column).
constexpr int operand_words = 2;
DEVICE int operand_element(int word, int lane) { return lane / 16 * 4 + 2 * word; }
DEVICE int operand_row(int, int lane) { return lane % 16; }

// Accumulator tile, 16x16 f32: a lane holds four consecutive rows of one column.
typedef f32x4 Tile;
constexpr int elements = 4;
// Elements in consecutive rows, as one vector.
typedef f32x4 Run;
constexpr int run = 4;

// Row and column of element e of a lane.
class Place {
  public:
    DEVICE_MEMBER explicit Place(int lane) : first_row(lane / 16 * 4), only_column(lane % 16) {}
    DEVICE_MEMBER int row(int element) const { return first_row + element; }
    DEVICE_MEMBER int column(int) const { return only_column; }

  private:
    int first_row;
    int only_column;
};

// One number for each column of a lane: multiplies a tile's columns.
typedef float ColumnFactor;
DEVICE ColumnFactor columns_at(const float *values, Place at) { return values[at.column(0)]; }

// c - a b. In two halves: of a whole tile, half of the signs would take instructions of their own.
DEVICE Tile minus_product(Tile c, Tile a, Tile b) {
    const f32x2 low = __builtin_elementwise_fma(-a.xy, b.xy, c.xy), high = __builtin_elementwise_fma(-a.zw, b.zw, c.zw);
    return Tile{low.x, low.y, high.x, high.y};
}

// Two operand tiles that lie in memory as 16 rows of 32 elements: 16 bytes of a row are a lane's part of both.
// Contracting both in turn visits the elements in a permuted order, the same for everything loaded so.
struct OperandPair {
    i32x4 data;
    DEVICE_MEMBER Operand first() const { return Operand{data.x, data.y}; }
    DEVICE_MEMBER Operand second() const { return Operand{data.z, data.w}; }
};

// Which eight of the 32 contracted elements of a pair a lane holds.
DEVICE int eighth(int lane) { return lane / 16; }

} // namespace arch
