// Record of a (chunk, value head) in the backward, DWK_BACKWARD_RECORD_BYTES in the workspace.
// prefill_backward_prepare writes it.
//
//   offset 0                       six arrays of 64 row factors, f32
//   record_numbers                 ChunkNumbers
//   record_forward .. record_p     T' [i, j], T^T [j, i] and P^T [j, i] without their diagonals: lower 16x16 blocks
//
// T' = (I + L diag(beta))^-1 gives the errors, T = (I + diag(beta) L)^-1 the gradients (recurrence.h): neither needs a
// division by beta afterwards, so that beta may be 0.
#pragma once

#include "../record.h"
#include "blocks.h"

namespace prefill {
namespace backward {

enum RowFactor {
    sum_row,      // G_i / ln 2
    beta_row,     // beta_i
    k_norm_row,   // 1 / |k_i|, or 1 without norms; 0 for a row of zeros
    q_norm_row,   // 1 / |q_i|, or 1 without norms
    diagonal_row, // q_i . k_i
    gate_row,     // g_i
    row_factors
};
constexpr int record_numbers = row_factors * chunk * 4;
constexpr int record_forward = 1792;
constexpr int record_reverse = record_forward + lower_blocks * block_bytes;
constexpr int record_p = record_reverse + lower_blocks * block_bytes;
static_assert(record_numbers + 16 <= record_forward, "a record holds all parts");
static_assert(record_p + lower_blocks * block_bytes == DWK_BACKWARD_RECORD_BYTES, "a record holds all parts");

DEVICE char *record_of(const dwk_prefill_prepare_args &x, int record, int head) {
    return (char *)x.records + ((int64_t)record * x.value_heads + head) * DWK_BACKWARD_RECORD_BYTES;
}
DEVICE const float *factor_of(const char *record, RowFactor factor) { return (const float *)record + factor * chunk; }

// Numbers of a chunk. In units of 2^first, which is about the largest exp(G), operands stay within the range of f16.
struct ChunkNumbers {
    float k_unit, q_unit; // units of K^T and of Q^T, powers of two (../record.h)
    float total;          // G_C / ln 2
    float first;          // G_1 / ln 2, rounded up to an integer

    DEVICE_MEMBER float per_k() const { return bits<float>(0x7f000000 - bits<int>(k_unit)); }
    DEVICE_MEMBER float per_q() const { return bits<float>(0x7f000000 - bits<int>(q_unit)); }
};
DEVICE ChunkNumbers numbers_of(const char *record) {
    const f32x4 x = *(const f32x4 *)(record + record_numbers);
    return ChunkNumbers{x[0], x[1], x[2], x[3]};
}

// 2^x of every element.
DEVICE float exp2_of(float x) { return arch::exp2(x); }
DEVICE Tile exp2_of(Tile x) {
    for (int e = 0; e < elements; ++e) {
        x[e] = arch::exp2(x[e]);
    }
    return x;
}

// Place of a (record, value head) in arrays of blocks.
DEVICE int64_t place_of(const dwk_prefill_prepare_args &x, int record, int head) {
    return (int64_t)record * x.value_heads + head;
}

} // namespace backward
} // namespace prefill
