// M and S as sums of two bf16 numbers each, accurate to 2^-17: how prefill_summarise leaves M, and how prefill_combine
// reads it and passes S from wave to wave. The contract of a target for prefill_combine: <target>/parts.h supplies
//
//   row_tiles, wave_rows           16x16 tiles and rows of M that a wave owns
//   product_sums                   sums into which the terms of a product are divided
//   tiles_are_operands             whether an accumulator tile, rounded, is an operand of the next product
//   tiles_ahead(key_tiles)         column tiles of M that are loaded while one is multiplied
//   matrices_held(key_tiles)       matrices M in registers, or on their way there
//   combine_residency              for KERNEL
//   store_parts<Keys>(m, to, column, K)
//                                  M, in parts, to a summary
//   MatrixTile, load_matrix_tile(matrix, first_row, tile, K, lane)
//                                  a column tile of a wave's rows of M: .high(row tile) and .low(row tile)
//   StateParts, StateExchange<Keys>
//                                  S in shared memory: .put and .get(buffer, tile, lane), a StateParts {high, low}
#pragma once

#if defined(__NVPTX__)
#include "sm90/parts.h"
#else
#include "gfx9/parts.h"
#endif

namespace prefill {

static_assert(wave_rows == 16 * row_tiles, "a wave's rows are whole tiles");
static_assert(2 * sizeof(Operand) == sizeof(StateParts), "two operands");

} // namespace prefill
