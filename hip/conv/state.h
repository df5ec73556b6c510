// Conv state of a sequence, [channels, columns]: the tokens before its first one; afterwards, its last tokens.
#pragma once

#include "work.h"

namespace conv {

// Address of a column of the state.
DEVICE char *column(const dwk_conv_args &x, const Work &work, int index) {
    return work.state + 2 * index * x.state_column;
}

// x of token t. Before the sequence's first token: a column of its state (the last column is the token just before), or
// zeros.
template <class Some> DEVICE typename Some::Bits token(const dwk_conv_args &x, const Work &work, int t) {
    if (t >= work.first) {
        return Some::load(work.from + t * work.from_stride);
    }
    if (!work.initial) {
        return typename Some::Bits{};
    }
    return Some::gather(column(x, work, x.state_columns + t - work.first), 2 * x.state_channel);
}

// Whether this thread writes the new state. Only the thread with the sequence's first tokens does: it has read the old
// state.
DEVICE bool leaves_state(const dwk_conv_args &x, const Work &work) {
    return work.state && work.begin == work.first && !(x.flags & DWK_CONV_KEEP_STATES);
}
// state <- last columns of (state, x).
template <class Some> DEVICE void leave_state(const dwk_conv_args &x, const Work &work) {
    if (leaves_state(x, work)) {
        // Ascending, so that in a sequence shorter than the state every column is read before it is written.
#pragma unroll 1
        for (int j = 0; j < x.state_columns; ++j) {
            Some::scatter(column(x, work, j), 2 * x.state_channel,
                          token<Some>(x, work, work.last - x.state_columns + j));
        }
    }
}

// `leave_state` for a state of Width - 1 columns, which `old` holds. Requests all loads before the first store.
template <class Some, int Width>
DEVICE void leave_columns(const dwk_conv_args &x, const Work &work, const typename Some::Bits (&old)[Width - 1]) {
    constexpr int columns = Width - 1;
    const int length = work.last - work.first;
    typename Some::Bits next[columns];
    for (int j = 0; j < columns; ++j) {
        next[j] = old[columns - 1];
        for (int shift = 1; shift + j < columns - 1; ++shift) {
            next[j] = length == shift ? old[j + shift] : next[j];
        }
        if (length + j >= columns) {
            next[j] = Some::load(work.from + (work.last - columns + j) * work.from_stride);
        }
    }
    for (int j = 0; j < columns; ++j) {
        Some::scatter(column(x, work, j), 2 * x.state_channel, next[j]);
    }
}

} // namespace conv
