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

// Whether all columns of an octet lie side by side, so that few wide accesses cover them.
DEVICE bool is_dense(const dwk_conv_args &x, const Work &work) {
    return x.state_column == 1 && x.state_channel == x.state_columns && arch::in_one_access(work.state);
}

// Number c of the eight 16-bit numbers of an octet.
DEVICE u32 number(i32x4 eight, int c) { return (u32)eight[c / 2] >> 16 * (c % 2) & 0xffff; }

// Columns of an octet whose channels have `Columns` each, side by side.
template <int Columns> DEVICE void load_dense(const char *p, i32x4 *columns) {
    i32x4 raw[Columns];
    for (int i = 0; i < Columns; ++i) {
        raw[i] = arch::load_b128(p + piece::bytes * i);
    }
    const auto at = [&](int channel, int column) __attribute__((always_inline)) {
        const int index = channel * Columns + column;
        return number(raw[index / octet], index % octet);
    };
    for (int j = 0; j < Columns; ++j) {
        for (int i = 0; i < octet / 2; ++i) {
            columns[j][i] = (int)(at(2 * i, j) | at(2 * i + 1, j) << 16);
        }
    }
}
template <int Columns> DEVICE void store_dense(char *p, const i32x4 *columns) {
    const auto at = [&](int index)
                        __attribute__((always_inline)) { return number(columns[index % Columns], index / Columns); };
    for (int i = 0; i < Columns; ++i) {
        i32x4 raw;
        for (int j = 0; j < octet / 2; ++j) {
            const int index = i * octet + 2 * j;
            raw[j] = (int)(at(index) | at(index + 1) << 16);
        }
        arch::store_b128(p + piece::bytes * i, raw);
    }
}

// The last Width - 1 columns, in a state of Width - 1 columns or more. `Draft`: of Width - 1.
template <int Width, int N, bool Draft>
DEVICE void load_columns(const dwk_conv_args &x, const Work &work, typename Channels<N>::Bits (&old)[Width - 1]) {
    if constexpr (N == octet) {
        if (x.state_columns == Width - 1 && is_dense(x, work)) {
            load_dense<Width - 1>(work.state, old);
            return;
        }
        if (!Draft && x.state_columns == Width && is_dense(x, work)) {
            i32x4 all[Width];
            load_dense<Width>(work.state, all);
            for (int i = 0; i < Width - 1; ++i) {
                old[i] = all[i + 1];
            }
            return;
        }
    }
    for (int i = 0; i < Width - 1; ++i) {
        old[i] = Channels<N>::gather(column(x, work, x.state_columns - (Width - 1) + i), 2 * x.state_channel);
    }
}

// `leave_state` for a state of Width - 1 or Width columns, of which `old` holds the last Width - 1. Requests all loads
// before the first store.
template <int Width, int N>
DEVICE void leave_columns(const dwk_conv_args &x, const Work &work,
                          const typename Channels<N>::Bits (&old)[Width - 1]) {
    typedef Channels<N> Some;
    const int length = work.last - work.first, skipped = Width - x.state_columns;
    typename Some::Bits next[Width]; // the last Width columns
    for (int j = 0; j < Width; ++j) {
        next[j] = old[Width - 2];
        for (int i = j; i < Width - 2; ++i) {
            next[j] = length - 1 + j == i ? old[i] : next[j];
        }
        if (length + j >= Width && j >= skipped) {
            next[j] = Some::load(work.from + (work.last - Width + j) * work.from_stride);
        }
    }
    if constexpr (N == octet) {
        if (is_dense(x, work)) {
            if (skipped) {
                store_dense<Width - 1>(work.state, next + 1);
            } else {
                store_dense<Width>(work.state, next);
            }
            return;
        }
    }
    for (int j = 0; j < Width; ++j) {
        if (j >= skipped) {
            Some::scatter(column(x, work, j - skipped), 2 * x.state_channel, next[j]);
        }
    }
}

} // namespace conv
