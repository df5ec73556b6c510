// What the prefill kernels share: which sequence a chunk belongs to, and the record that prepare hands to scan.
#pragma once

#include "tile.h"

namespace prefill {

constexpr int chunk = DWK_CHUNK;
constexpr int tiles = chunk / 16;

// Lower 16x16 blocks of a 64x64 matrix, row by row: (0,0) (1,0) (1,1) (2,0) ...
constexpr int lower_blocks = tiles * (tiles + 1) / 2;
DEVICE constexpr int lower_block(int row, int column) { return row * (row + 1) / 2 + column; }

// A record: one f32 per row and factor, then T and P without their diagonals as left operands, in the order in which
// this target's scan reads them (RecordWriter).
constexpr int matrix_bytes = lower_blocks * 16 * 16 * 2;
constexpr int record_rows = 0;
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
constexpr int record_matrices = 1536;
static_assert(record_decay + 8 <= record_matrices, "a record holds all parts");
static_assert(DWK_RECORD_BYTES % 256 == 0, "records are aligned");

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

// Where the bounds of a value head lie from a slot on.
template <class Arguments> DEVICE float *retained_by(const Arguments &x, int slot, int head) {
    return x.retained + (int64_t)head * first_slot(x.tokens, x.sequences) + slot;
}

// A run of chunks of one sequence: all of it, or one of its segments.
struct Segment {
    int sequence;
    int begin; // its first token
    int end;
    int slot;    // of its first chunk
    int summary; // its own; the segment before has the one before
    bool first;  // of its sequence
    bool last;
    bool summarised; // its sequence is cut, so that the state before it is in a summary
};

// An item only chooses among the chunks of a sequence: whatever it holds, it does not lead out of bounds.
DEVICE Segment segment_of(const dwk_prefill_scan_args &x, int index) {
    dwk_prefill_item item{index, 0, 1 << 30, 0};
    if (x.items) {
        const i32x4 stored = arch::uniform((const i32x4 *)(x.items + index));
        item = dwk_prefill_item{min_of(max_of(stored.x, 0), x.sequences - 1), stored.y, stored.z, stored.w};
    }
    const Rows range = rows_of(x.cu_seqlens, item.sequence, x.tokens);
    const int chunks = (range.end - range.begin + chunk - 1) / chunk;
    const int first = min_of(max_of(item.first_chunk, 0), chunks);
    const int count = min_of(max_of(item.chunks, 0), chunks - first);
    const int begin = range.begin + first * chunk;
    return Segment{item.sequence,
                   min_of(begin, range.end),
                   min_of(begin + count * chunk, range.end),
                   first_slot(range.begin, item.sequence) + first,
                   min_of(max_of(item.summary, 0), x.summaries),
                   first == 0,
                   first + count == chunks,
                   x.summaries > 0 && (first > 0 || count < chunks)};
}

// Workgroups are dealt to the dies of a GPU in turn. Those that read the same memory, the members of a unit, go to one
// die, so that its cache holds it once. Units are in order.
struct Dealt {
    int unit;
    int member;
};
DEVICE Dealt dealt(int workgroup, int units, int members, int dies) {
    const int turn = arch::uniform_value(workgroup / (dies * members));
    const int width = min_of(dies, units - turn * dies);
    const int within = workgroup - turn * (dies * members);
    const int member = arch::uniform_value(within / width);
    return Dealt{turn * dies + within - member * width, member};
}

// What a workgroup works on.
struct Work {
    int item;
    int head;
    int key_head;
    int slab;
};

// The value heads and slabs of an (item, key head) read the same K and Q.
DEVICE Work work_of(const dwk_prefill_scan_args &x, int workgroup) {
    const int group = x.value_heads / x.key_heads;
    const Dealt to = dealt(workgroup, x.items_count * x.key_heads, group * x.slabs, x.dies);
    const int item = arch::uniform_value(to.unit / x.key_heads), key_head = to.unit - item * x.key_heads;
    const int of_group = arch::uniform_value(to.member / x.slabs);
    return Work{item, x.flags & DWK_TILED_HEADS ? of_group * x.key_heads + key_head : key_head * group + of_group,
                key_head, to.member - of_group * x.slabs};
}

// What a segment hands on, in the workspace, for all segments and value heads: N [V, K] in f32, then M [K, K] with each
// element in two parts (prefill_parts.h). Once combined, N is the state after the segment. A first segment has no M. In
// its place is the state that the sequence starts from, [V, K] in f32: where that came from, the last segment may write
// meanwhile.
template <class Arguments> DEVICE int summary_size(const Arguments &x) {
    return (x.value_dim + max_of(x.key_dim, x.value_dim)) * x.key_dim;
}
template <class Arguments> DEVICE float *summary_of(const Arguments &x, int summary, int head) {
    return x.states + ((int64_t)summary * x.value_heads + head) * summary_size(x);
}
// M^T, or the state before.
template <class Arguments> DEVICE float *second_part(float *summary, const Arguments &x) {
    return summary + x.value_dim * x.key_dim;
}
// Whether a segment leaves nothing of the state before it.
template <class Arguments> DEVICE auto *forgotten_by(const Arguments &x, int summary, int head) {
    return x.forgotten + (int64_t)summary * x.value_heads + head;
}
// Where the state before a segment of a sequence that is cut lies.
DEVICE const float *state_before(const dwk_prefill_scan_args &x, const Segment &segment, int head) {
    return segment.first ? second_part(summary_of(x, min_of(segment.summary, x.summaries - 1), head), x)
                         : summary_of(x, max_of(segment.summary - 1, 0), head);
}

// The slot of a sequence's state: `slots` are the caller's and may hold anything. Negative: it has none.
template <class Arguments> DEVICE int slot_of(const Arguments &x, const int32_t *slots, int sequence) {
    if (!slots) {
        return sequence;
    }
    const int slot = arch::uniform(slots + sequence);
    return slot < x.slots ? slot : -1;
}

// A sequence that has no state, neither before nor after. Nothing is made of its tokens but zeros.
template <class Arguments> DEVICE bool is_padding(const Arguments &x, int sequence) {
    return x.read_slots && slot_of(x, x.read_slots, sequence) < 0 && slot_of(x, x.write_slots, sequence) < 0;
}

// Byte address of (token of a sequence, head) in a 16-bit token tensor.
DEVICE const char *row_address(const void *base, const dwk_token_strides &strides, int sequence, int token, int head) {
    return (const char *)base + 2 * (sequence * strides.sequence + token * strides.token + head * strides.head);
}

} // namespace prefill

#if defined(__NVPTX__)
#include "prefill_sm90.h"
#else
#include "prefill_gfx9_chunk.h"
#endif
