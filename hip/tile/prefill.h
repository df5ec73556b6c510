// What the prefill kernels share: which sequence a chunk belongs to, and the record that prepare hands to scan.
#pragma once

#include "tile.h"

namespace prefill {

constexpr int chunk = DW_CHUNK;
constexpr int tiles = chunk / 16;

// Lower 16x16 blocks of a 64x64 matrix, row by row: (0,0) (1,0) (1,1) (2,0) ...
constexpr int lower_blocks = tiles * (tiles + 1) / 2;
DEVICE constexpr int lower_block(int row, int column) { return row * (row + 1) / 2 + column; }

// A record: T and P without their diagonals as left operands, in the order in which this target's scan reads them
// (MatrixWriter), then one f32 per row and factor.
constexpr int matrix_bytes = lower_blocks * 16 * 16 * 2;
constexpr int record_t = 0;
constexpr int record_p = matrix_bytes;
constexpr int record_rows = 2 * matrix_bytes;
enum RowFactor {
    beta_row,     // beta_i
    read_row,     // beta_i exp(G_i), of K S0
    output_row,   // exp(G_i), of Q S0
    write_row,    // exp(G_C - G_i) / unit, of U in the state update
    diagonal_row, // q_i . k_i, the diagonal of P
    row_factors
};
// Two numbers of the state update: exp(G_C) / unit, and the unit, a power of two of at most 1. write_row holds
// multiples of it, so that long key rows, normalised inside, do not drive the update below the range of fp16.
constexpr int record_decay = record_rows + row_factors * chunk * 4;
static_assert(record_decay + 8 <= DW_RECORD_BYTES, "a record holds all parts");
static_assert(DW_RECORD_BYTES % 256 == 0, "records are aligned");

// The rows of one sequence. Its chunks own the slots first_slot, first_slot + 1, ...: token / 64 + sequence is an
// increasing function of the sequence that leaves room for all chunks before it, so no table is needed.
struct Rows {
    int begin;
    int end;
};

// An entry of cu_seqlens, clamped once more: checked lengths that the host overwrites while kernels are queued must not
// lead out of bounds.
DEVICE int token_at(const int32_t *cu_seqlens, int index, int tokens) {
    return min_of(max_of(arch::uniform(cu_seqlens + index), 0), tokens);
}

DEVICE Rows rows_of(const int32_t *cu_seqlens, int sequence, int tokens) {
    const int begin = token_at(cu_seqlens, sequence, tokens);
    return Rows{begin, max_of(token_at(cu_seqlens, sequence + 1, tokens), begin)};
}

DEVICE int first_slot(int token, int sequence) { return token / chunk + sequence; }

// The last sequence (or `sequences`, past them all) whose first slot is at most `slot`.
DEVICE int sequence_of_slot(const int32_t *cu_seqlens, int sequences, int slot) {
    int low = 0, high = sequences;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_slot(arch::uniform(cu_seqlens + middle), middle) <= slot) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Byte address of (token of a sequence, head) in a 16-bit token tensor.
DEVICE const char *row_address(const void *base, const dw_token_strides &strides, int sequence, int token, int head) {
    return (const char *)base + 2 * (sequence * strides.sequence + token * strides.token + head * strides.head);
}

// The key head that a value head reads.
DEVICE int key_head_of(int value_head, int key_heads, int value_heads, u32 flags) {
    return flags & DW_TILED_HEADS ? value_head % key_heads : value_head / (value_heads / key_heads);
}

} // namespace prefill

#if defined(__NVPTX__)
#include "prefill_sm90.h"
#else
#include "prefill_gfx9.h"
#endif
