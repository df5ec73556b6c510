// M and S as sums of two bf16 numbers, high and low, accurate to 2^-17. prefill_summarise stores M this way;
// prefill_combine reads M and passes S from wave to wave this way. Contract of a target for prefill_combine:
// <target>/parts.h supplies
//
//   row_tiles, wave_rows           16x16 tiles and rows of M that a wave owns
//   product_sums                   number of sums that share the terms of a product
//   tiles_are_operands             whether an accumulator tile, rounded, is an operand of the next product
//   tiles_ahead(key_tiles)         column tiles of M loaded ahead of the product
//   matrices_held(key_tiles)       matrices M held in registers or being loaded to them
//   tiles_reloaded_after_use       whether a tile's registers are loaded again as soon as it is multiplied, else all
//                                  loads precede the products
//   combine_residency              residency for KERNEL
//   next_unit(unit)                the next unit of work of a workgroup of combine, or a number that no unit has
//   store_high_low<Keys>(m, to, column, K)
//                                  stores M to a summary, as high and low numbers
//   store_high_low(to, row, column, K, x)
//                                  stores an element of M likewise
//   MatrixTile, load_matrix_tile(matrix, first_row, tile, K, lane)
//                                  a column tile of a wave's rows of M: .high(row tile) and .low(row tile)
//   HighLow, StateExchange<Keys>
//                                  S in shared memory: .put and .get(buffer, tile, lane), a HighLow {high, low}
#pragma once

#if defined(__NVPTX__)
#include "sm90/parts.h"
#else
#include "gfx9/parts.h"
#endif

namespace prefill {

static_assert(wave_rows == 16 * row_tiles, "a wave's rows are whole tiles");
static_assert(2 * sizeof(Operand) == sizeof(HighLow), "two operands");

} // namespace prefill
