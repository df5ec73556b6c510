// Conv states of speculative decoding: more columns than a filter reads. After a launch they hold the tokens of all
// drafts; the count of accepted ones tells the next launch from which column on to read.
#pragma once

#include "state.h"

namespace conv {

// The arguments of a kernel for drafts, of which `x` is the first member.
DEVICE const dwk_conv_draft_args &draft_of(const dwk_conv_args &x) { return *(const dwk_conv_draft_args *)&x; }

// Index of the sequence's slot.
DEVICE int64_t slot_index(const dwk_conv_args &x, int sequence) { return (int64_t)sequence * draft_of(x).slot_stride; }

// Bytes from column 0 of a state to the first column that the sequence reads. Counts are clamped, because the device's
// memory may hold anything.
DEVICE int64_t shift_of(const dwk_conv_args &x, int sequence) {
    const dwk_conv_draft_args &all = draft_of(x);
    if (!all.accepted || sequence >= x.sequences) {
        return 0;
    }
    const int most = all.columns - (x.width - 1);
    return 2 * x.state_column * max_of(0, min_of(arch::uniform(all.accepted + sequence) - 1, most));
}

// state <- (columns that were read, but the first; x of the sequence), from column 0 on. By the thread that has read
// the state. Tokens beyond the last column are dropped.
template <class Some, bool Draft> DEVICE void leave_draft(const dwk_conv_args &x, const Work &work) {
    if constexpr (Draft) {
        constexpr int at_once = 4;
        const dwk_conv_draft_args &all = draft_of(x);
        if (!work.state || work.begin != work.first || !work.writes || all.keep_states) {
            return;
        }
        const int kept = x.width - 2;
        const int count = min_of(work.last - work.first, all.columns - kept) + kept;
        char *to = work.state - work.shift;
        // Ascending: a column is read before it is written, because it is written at most as far right as it is read.
#pragma unroll 1
        for (int first = 0; first < count; first += at_once) {
            typename Some::Bits some[at_once];
            for (int i = 0; i < at_once; ++i) {
                const int j = min_of(first + i, count - 1);
                some[i] = typename Some::Bits{};
                if (j >= kept) {
                    some[i] = Some::load(work.from + (work.first + j - kept) * work.from_stride);
                } else if (work.initial) {
                    some[i] = Some::gather(column(x, work, j + 1), 2 * x.state_channel);
                }
            }
            for (int i = 0; i < at_once; ++i) {
                if (first + i < count) {
                    Some::scatter(to + 2 * (first + i) * x.state_column, 2 * x.state_channel, some[i]);
                }
            }
        }
    }
}

} // namespace conv
