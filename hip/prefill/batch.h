// The packed batch: which tokens, chunks and records a sequence has. A chunk is 64 tokens of one sequence.
//
// Sequence n, which begins at token b, owns the records b / 64 + n and following. That is an increasing function of n
// that leaves room for all chunks before, so that no table is needed.
#pragma once

#include "../arch/contract.h"
#include "../kernel_args.h"

namespace prefill {

constexpr int chunk = DWK_CHUNK;
constexpr int tiles = chunk / 16; // of a chunk's tokens

// Tokens of a sequence, [begin, end).
struct Rows {
    int begin;
    int end;
};

// Entry of cu_seqlens, clamped once more: it must not lead out of bounds even where the host overwrites it while
// kernels are queued.
DEVICE int token_at(const int32_t *cu_seqlens, int index, int tokens) {
    return min_of(max_of(arch::uniform(cu_seqlens + index), 0), tokens);
}

DEVICE Rows rows_of(const int32_t *cu_seqlens, int sequence, int tokens) {
    const int begin = token_at(cu_seqlens, sequence, tokens);
    return Rows{begin, max_of(token_at(cu_seqlens, sequence + 1, tokens), begin)};
}

// Number of the first record of a sequence that begins at `token`.
DEVICE int first_record(int token, int sequence) { return token / chunk + sequence; }

// Sequence of a record: the last one whose first record is at most `record`; `sequences` past them all.
DEVICE int sequence_of_record(const int32_t *cu_seqlens, int sequences, int record) {
    int low = 0, high = sequences;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_record(arch::uniform(cu_seqlens + middle), middle) <= record) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Bounds on how much chunks scale the norm of a state, log2, for a value head from a record on.
template <class Arguments> DEVICE float *retained_by(const Arguments &x, int record, int head) {
    return x.retained + (int64_t)head * first_record(x.tokens, x.sequences) + record;
}

// Pool slot of a sequence's state, or negative: none. `slots` is the caller's memory, which may hold anything; null:
// sequence n has slot n.
template <class Arguments> DEVICE int slot_of(const Arguments &x, const int32_t *slots, int sequence) {
    if (!slots) {
        return sequence;
    }
    const int slot = arch::uniform(slots + sequence);
    return slot < x.slots ? slot : -1;
}

// Whether a sequence has no state, neither before nor after: its outputs are zeros.
template <class Arguments> DEVICE bool is_padding(const Arguments &x, int sequence) {
    return x.read_slots && slot_of(x, x.read_slots, sequence) < 0 && slot_of(x, x.write_slots, sequence) < 0;
}

} // namespace prefill
