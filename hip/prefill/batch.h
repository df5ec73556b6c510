// Packed batch: tokens, chunks and records of each sequence. A chunk is 64 tokens of one sequence.
//
// Sequence n, which begins at token b, owns the records from b / 64 + n on. This number increases with n and leaves
// room for all chunks of earlier sequences, so no table is needed.
#pragma once

#include "../arch/contract.h"
#include "../kernel_args.h"
#include "../tensor/last_sequence.h"
#include "narrow.h"

namespace prefill {

constexpr int chunk = DWK_CHUNK;
constexpr int tiles = chunk / 16; // row tiles of a chunk

// Row of this thread, where teams of one thread per row share a chunk. A workgroup may have several.
DEVICE int own_row() { return arch::thread() % chunk; }

// Tokens of a sequence, [begin, end).
struct Rows {
    int begin;
    int end;
};

// Entry of cu_seqlens, clamped again: the host may overwrite it while kernels are queued, and it must not lead out of
// bounds.
DEVICE int token_at(const int32_t *cu_seqlens, int index, int tokens) {
    return min_of(max_of(arch::uniform(cu_seqlens + index), 0), tokens);
}

DEVICE Rows rows_of(const int32_t *cu_seqlens, int sequence, int tokens) {
    const int begin = token_at(cu_seqlens, sequence, tokens);
    return Rows{begin, max_of(token_at(cu_seqlens, sequence + 1, tokens), begin)};
}

// Number of the first record of a sequence that begins at `token`.
DEVICE int first_record(int token, int sequence) { return token / chunk + sequence; }

// Sequence of a record: the last sequence whose first record is at most `record`. `sequences` if the record is past all
// sequences.
DEVICE int sequence_of_record(const int32_t *cu_seqlens, int sequences, int record) {
    return last_sequence(
        sequences, [&](int n) __attribute__((always_inline)) { return first_record(cu_seqlens[n], n) <= record; });
}

// log2 of bounds on how much each chunk scales the norm of a state, for a value head, from `record` on.
template <class Arguments> DEVICE float *retained_by(const Arguments &x, int record, int head) {
    return x.retained + (int64_t)head * first_record(x.tokens, x.sequences) + record;
}

// Pool slot of a sequence's state; negative: none. `slots` is the caller's memory, which may hold anything. Null:
// sequence n has slot n.
template <class Arguments> DEVICE int slot_of(const Arguments &x, const int32_t *slots, int sequence) {
    if (!slots) {
        return sequence;
    }
    const int slot = arch::uniform(slots + sequence);
    return slot < x.slots ? slot : -1;
}

// Whether a sequence is padding: it neither reads nor writes a state, and its outputs are zeros.
template <class Arguments> DEVICE bool is_padding(const Arguments &x, int sequence) {
    return x.read_slots && slot_of(x, x.read_slots, sequence) < 0 && slot_of(x, x.write_slots, sequence) < 0;
}

} // namespace prefill
