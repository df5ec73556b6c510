// Search for the sequence to which a block of tokens or a record belongs.
#pragma once

#include "../arch/contract.h"

// The last of `sequences` sequences that has begun; `sequences` where the one past all has. `begins_by(n)` says whether
// sequence n, not 0, has begun. Every lane of a wave asks for another sequence at once: a load from memory takes long.
template <class BeginsBy> DEVICE int last_sequence(int sequences, BeginsBy begins_by) {
    int low = 0, high = sequences;
    while (low < high) {
        const int step = (high - low + arch::lanes - 1) / arch::lanes, asked = low + (arch::lane() + 1) * step;
        // The first ones: in wrong lengths others may follow, and the answer must have begun.
        const u64 not_yet = ~arch::ballot(asked <= high && begins_by(asked));
        const int count = not_yet ? __builtin_ctzll(not_yet) : arch::lanes;
        low += count * step;
        high = min_of(high, low + step - 1);
    }
    return low;
}
