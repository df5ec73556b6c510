// Record of a (chunk, value head), DWK_RECORD_BYTES in the workspace. prefill_prepare writes it; prefill_summarise and
// prefill_scan read it.
//
//   offset 0                five arrays of 64 row factors, f32 (RowFactor)
//   record_decay            exp(G_C) / unit and unit, f32
//   record_matrices         T and P [64, 64] without their diagonals, lower 16x16 blocks, 16-bit
//
// <target>/record.h decides the order of rows within a factor, of blocks, and of elements in a block: the order in
// which its schedule reads them.
#pragma once

#include "batch.h"

namespace prefill {

// Lower 16x16 blocks of a 64x64 matrix, row by row: (0,0) (1,0) (1,1) (2,0) ...
constexpr int lower_blocks = tiles * (tiles + 1) / 2;
DEVICE constexpr int lower_block(int row, int column) { return row * (row + 1) / 2 + column; }

constexpr int matrix_bytes = lower_blocks * 16 * 16 * 2;
constexpr int record_rows = 0;
// i: row of the chunk, G: inclusive sum of g from the chunk's first row on, C: its last row.
enum RowFactor {
    beta_row,     // beta_i
    read_row,     // beta_i exp(G_i), multiplies K S0
    output_row,   // exp(G_i), multiplies Q S0
    write_row,    // exp(G_C - G_i) / unit, multiplies U in the state update
    diagonal_row, // q_i . k_i, the diagonal of P
    row_factors
};
// `unit` is a power of two, at most 1. write_row is divided by it, so that long key rows that are normalised inside do
// not push the update below the range of f16.
constexpr int record_decay = record_rows + row_factors * chunk * 4;
constexpr int record_matrices = 1536;
static_assert(record_decay + 8 <= record_matrices, "a record holds all parts");
static_assert(DWK_RECORD_BYTES % 256 == 0, "records are aligned");

} // namespace prefill
