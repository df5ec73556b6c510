// Formulas of a chunk's matrices by 16x16 blocks: A and P from K K^T, Q K^T, gates and norms. All blocks are
// transposed: a rounded accumulator tile then holds rows of the matrix in consecutive words.
#pragma once

#include "../math/norms.h"
#include "recurrence.h"

namespace prefill {

// Row factors of a chunk in shared memory, while its matrices are computed.
struct ChunkFactors {
    alignas(16) float gate_sum[chunk]; // G / ln 2
    alignas(16) float beta[chunk];     // -beta
    alignas(16) float q_norm[chunk];   // |q|^2, then 1 / |q|
    alignas(16) float k_norm[chunk];   // |k|^2, then 1 / |k|
};

// 2^(rows_i - columns_j), [16, 16].
DEVICE Tile decay(Tile rows, ColumnFactor columns) {
    Tile out = arch::held(rows - columns);
    for (int e = 0; e < elements; ++e) {
        out[e] = arch::exp2(out[e]);
    }
    return out;
}

// D_ij^T = exp(G_i - G_j) of block (i, j), transposed.
DEVICE Tile chunk_decay(const ChunkFactors &factors, int i, int j, LaneMap at) {
    return decay(-rows_at(factors.gate_sum + 16 * j, at), -columns_at(factors.gate_sum + 16 * i, at));
}

// Keeps the strictly lower part of a diagonal block; the block is given transposed.
DEVICE Tile strictly_lower(Tile transposed, LaneMap at) {
    for (int e = 0; e < elements; ++e) {
        transposed[e] = at.row(e) < at.column(e) ? transposed[e] : 0.0f;
    }
    return transposed;
}

// Calls f(row of the chunk, x) for each diagonal element of a diagonal block that this lane holds.
template <class F> DEVICE void on_diagonal(Tile x, int row_tile, LaneMap at, F f) {
    arch::each_on_diagonal(x, at,
                           [&](int i, float element) __attribute__((always_inline)) { f(16 * row_tile + i, element); });
}

// Replaces |q|^2 and |k|^2 of a row, this thread's by default, by 1 / |q| and 1 / |k|.
DEVICE void invert_norms(ChunkFactors &factors, int token = own_row()) {
    // A row of zeros gets 0, not 1000: with 1000 the factor `write_row` could leave the range of f16.
    const float k_square = factors.k_norm[token];
    factors.k_norm[token] = k_square == 0.0f ? 0.0f : math::inverse_norm(k_square);
    factors.q_norm[token] = math::inverse_norm(factors.q_norm[token]);
}

// A_ij^T = -beta_i D_ij (k_i . k_j), block (i, j) transposed. `minus_beta`: -beta of rows i. `kk`: K K^T of the block,
// transposed.
DEVICE Tile block_of_a(Tile decayed, ColumnFactor minus_beta, Tile kk) { return decayed * (minus_beta * kk); }

// P_ij^T = D_ij (q_i . k_j), block (i, j) transposed. `kq`: Q K^T of the block, transposed.
DEVICE Tile block_of_p(Tile decayed, Tile kq) { return decayed * kq; }

} // namespace prefill
