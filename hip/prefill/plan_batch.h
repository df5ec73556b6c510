// Lengths of a batch in the registers of a wave, for the rules by which the device cuts sequences (plan.h, machine.h).
#pragma once

#include "batch.h"

namespace plan {

using prefill::chunk;

constexpr int parts = 16;         // of the lengths of items; the longest part is listed first
constexpr int candidates = parts; // of a rule by which sequences are cut; the first cuts nothing

DEVICE int ceil_of(int a, int b) { return (int)(((u32)a + (u32)b - 1) / (u32)b); }

// Sum over the lanes of a wave of numbers from 0 on. Exact: each half is below 2^24 in f32.
DEVICE int sum_of_lanes(int x) {
    const float low = arch::inclusive_sum((float)(x & 0xfff)), high = arch::inclusive_sum((float)(x >> 12));
    return arch::read_lane((int)low, arch::lanes - 1) + (arch::read_lane((int)high, arch::lanes - 1) << 12);
}
DEVICE int max_of_lanes(int x) { return arch::read_lane(arch::inclusive_max(x), arch::lanes - 1); }

// Lengths of a batch, and totals of its chunks. Sequences are in blocks: lane l has sequence l of each. Those of the
// first block stay in registers, because every pass over the batch would otherwise wait for memory again.
struct Batch {
    const int32_t *cu_seqlens; // in memory, for blocks after the first
    int sequences;
    int first_chunks; // of this lane's sequence in the first block
    int first_start;  // its first token, in a small batch
    int total, longest, nonempty;

    // Checked lengths of any number of sequences.
    DEVICE_MEMBER Batch(const int32_t *cu_seqlens, int sequences) : cu_seqlens(cu_seqlens), sequences(sequences) {
        const int lane = arch::lane();
        first_start = 0;
        first_chunks = lane < sequences ? chunks_of(cu_seqlens[lane], cu_seqlens[lane + 1]) : 0;
        add_up();
    }
    // Whether the lengths need not be checked in memory first, because all starts are in one block.
    static DEVICE_MEMBER bool is_small(int sequences) { return sequences < arch::lanes; }
    // The sequences after the decodes, which are a small batch.
    DEVICE_MEMBER Batch(const dwk_prefill_lengths_args &x) : cu_seqlens(nullptr), sequences(x.sequences - x.decodes) {
        const int lane = arch::lane();
        const auto clamped = [&](int i) __attribute__((always_inline)) {
            const int start = min_of(i, sequences), at = x.decodes + start;
            const int64_t raw = x.wide ? ((const int64_t *)x.cu_seqlens)[at] : ((const int32_t *)x.cu_seqlens)[at];
            return start == 0 ? 0 : (int)(max_of<int64_t>(x.decodes, min_of<int64_t>(raw, x.tokens)) - x.decodes);
        };
        const int start = clamped(lane), end = clamped(lane + 1);
        first_start = arch::inclusive_max(start);
        first_chunks = chunks_of(first_start, arch::inclusive_max(end));
        add_up();
    }
    DEVICE_MEMBER int blocks() const { return ceil_of(sequences, arch::lanes); }
    // Chunks of this lane's sequence in a block; 0 past the last sequence.
    DEVICE_MEMBER int chunks(int block) const {
        if (block == 0) {
            return first_chunks;
        }
        const int sequence = block * arch::lanes + arch::lane();
        return sequence < sequences ? chunks_of(cu_seqlens[sequence], cu_seqlens[sequence + 1]) : 0;
    }

  private:
    static DEVICE_MEMBER int chunks_of(int start, int end) { return ceil_of(max_of(end - start, 0), chunk); }
    DEVICE_MEMBER void add_up() {
        int sum = 0, greatest = 0, count = 0;
#pragma unroll 1
        for (int block = 0; block < blocks(); ++block) {
            const int n = chunks(block);
            sum += n;
            greatest = max_of(greatest, n);
            count += __builtin_popcountll(arch::ballot(n > 0));
        }
        total = sum_of_lanes(sum);
        longest = max_of_lanes(greatest);
        nonempty = count;
    }
};

// Segments of a sequence that another follows, each with so many chunks. Most sequences are not cut, and a division is
// a long program.
DEVICE int followed_of(int chunks, int each) { return chunks > each ? ceil_of(chunks, each) - 1 : 0; }

} // namespace plan
