// Lengths that only the device knows: the first workgroup of a launch leaves them to later kernels, checked
// (prefill/lengths.h), and the others check for themselves what they read of them.
#pragma once

#include "../prefill/lengths.h"
#include "work.h"

namespace conv {

// The lengths among the arguments of a kernel, of which `x` is the first member.
DEVICE const dwk_prefill_lengths_args &lengths_of(const dwk_conv_args &x) {
    return ((const dwk_conv_lengths_args *)&x)->lengths;
}

// rows_of_block for checked lengths. Every entry depends on all before it, so lanes read them instead of a search.
// Those of the decodes are their indices.
DEVICE SequenceRows checked_rows_of_block(const dwk_conv_args &x, int block) {
    const dwk_prefill_lengths_args &lengths = lengths_of(x);
    const int decodes = lengths.decodes;
    if (block < first_block(x, decodes, decodes)) {
        const int sequence =
            last_sequence(decodes, [&](int n) __attribute__((always_inline)) { return first_block(x, n, n) <= block; });
        return SequenceRows{sequence, sequence, sequence + 1};
    }
    SequenceRows rows{decodes, decodes, x.tokens};
    int longest = 0;
#pragma unroll 1
    for (int base = decodes; base <= x.sequences; base += arch::lanes) {
        const lengths::Block entries(lengths, base, longest);
        const u64 begin = arch::ballot(entries.inside && first_block(x, entries.checked, entries.index) <= block);
        const int count = __builtin_popcountll(begin); // they are the first ones
        if (count > 0) {
            rows.sequence = base + count - 1;
            rows.first = arch::read_lane(entries.checked, count - 1);
        }
        rows.last =
            rows.sequence < x.sequences ? arch::read_lane(entries.checked, min_of(count, arch::lanes - 1)) : x.tokens;
        if (count < arch::lanes) {
            break;
        }
        longest = entries.longest();
    }
    return rows;
}

} // namespace conv
