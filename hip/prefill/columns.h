// Walk of prefill_scan and prefill_fused over a segment, in the waves that hold the state: initial state, chunks with
// their outputs, snapshots and final state.
#pragma once

#include "../tensor/rows.h"
#include "forget.h"
#include "walk.h"

namespace prefill {

// Writes zeros to the outputs of padding, with `threads` threads of which this is number `thread`.
template <int Keys>
DEVICE void clear_outputs(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, int thread,
                          int threads) {
    const int columns = slab_columns<Keys, true>();
    const int column = work.slab * columns + thread % columns;
    if (column >= x.value_dim) {
        return;
    }
#pragma unroll 1
    for (int token = segment.begin + thread / columns; token < segment.end; token += threads / columns) {
        ((short *)row_address(x.o, x.o_strides, segment.sequence, token, work.head))[column] = 0;
    }
}
template <int Keys>
DEVICE void clear_outputs(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
    clear_outputs<Keys>(x, segment, work, arch::thread(), walking_threads<Keys, true>());
}

// Number of a unit of work: of this workgroup or, where workgroups walk several units, as `units` says.
template <class... Units> DEVICE int unit_of(const Units &...units) {
    if constexpr (sizeof...(units) > 0) {
        return (units.unit, ...);
    } else {
        return arch::opaque_uniform(arch::workgroup());
    }
}

template <class... Units> DEVICE Work work_at(const dwk_prefill_scan_args &x, const Units &...units) {
    return work_of(x, unit_of(units...));
}
template <class... Units>
DEVICE Segment segment_at(const dwk_prefill_scan_args &x, const Work &work, const Units &...) {
    return segment_of(x, work.item);
}

// Work and segment of a unit, without quiet tokens. Derived again when needed: they are not worth registers during the
// walk. `whole`: in prefill_fused, the walk is of a whole sequence, whatever the list says.
template <int Keys> struct Located {
    Work work;
    Segment segment;
    template <class... Units>
    DEVICE_MEMBER Located(const dwk_prefill_scan_args &x, bool whole, const Units &...units)
        : work(work_at(x, units...)), segment(segment_at(x, work, units...)) {
        if constexpr (is_narrow(Keys)) {
            walk_whole(x, segment, work);
        } else if (whole) {
            extend(x, segment);
        }
    }
};

// First value column of this lane's elements of the state. Workgroups that walk several units derive it again after a
// walk: it is not worth a register.
template <int Keys> DEVICE int column_of_state(const Work &work) {
    constexpr int column_tiles = StateLayout<Keys>::column_tiles;
    return work.slab * slab_columns<Keys, true>() + wave_column_of_slab(column_tiles) +
           first_column(arch::opaque(arch::lane()), column_tiles);
}

// Next stop of the walk, in tokens left: after the next chunk with a snapshot. A wave looks at as many chunks as it has
// lanes. If none has a snapshot, it stops after these chunks. Quiet chunks have negative numbers; the segment before
// takes their snapshots.
template <int Keys, bool Fused, class... Units>
DEVICE int next_stop(const dwk_prefill_scan_args &x, int left, bool whole, const Units &...units) {
    const Segment segment = Located<Keys>(x, whole, units...).segment;
    const int tokens = segment.end - segment.begin, done = (tokens - left) / chunk;
    const int ahead = done + arch::lane();
    bool wanted = false;
    if ((!(Fused || early_starts || starts_soon) || ahead >= 0) && ahead * chunk < tokens) {
        wanted = (u32)x.snapshot_slots[segment.record + ahead] < (u32)x.snapshot_count;
    }
    const u64 found = arch::ballot(wanted);
    const int stop = done + (found ? __builtin_ctzll(found) + 1 : arch::lanes);
    return arch::uniform_value(max_of(tokens - stop * chunk, 0));
}

// Stores the state after the chunks so far, if a snapshot is wanted.
template <int Keys, class... Units>
DEVICE void take_snapshot(const State<Keys> &state, const dwk_prefill_scan_args &x, int left, int column, bool whole,
                          const Units &...units) {
    const Located<Keys> at(x, whole, units...);
    const int done = (at.segment.end - at.segment.begin - left) / chunk;
    const int slot = done > 0 ? arch::uniform(x.snapshot_slots + at.segment.record + done - 1) : -1;
    if ((u32)slot < (u32)x.snapshot_count) {
        const StateView to(x.snapshots, x.snapshot_strides, x.snapshot_type, x.flags & DWK_SNAPSHOT_VALUE_MAJOR, slot,
                           at.work.head);
        if constexpr (sizeof...(Units) > 0) {
            column = column_of_state<Keys>(at.work);
        }
        store_state<Keys>(state, to, column, x.key_dim, x.value_dim);
    }
}

// Walks all chunks of a segment, and takes snapshots.
template <class T, int Keys, bool Fused, class C, class... Units>
DEVICE void walk_chunks(State<Keys> &state, C &chunks, const dwk_prefill_scan_args &x, int column, bool whole,
                        const Units &...units) {
    do {
        int rest = 0;
        if (arch::reread(x).snapshot_slots) {
            rest = next_stop<Keys, Fused>(arch::reread(x), chunks.left(), whole, units...);
        }
        walk<T, Keys>(state, chunks, x, rest);
        if (arch::reread(x).snapshot_slots) {
            take_snapshot<Keys>(state, arch::reread(x), chunks.left(), after_walk(column), whole, units...);
        }
    } while (chunks.left() > 0);
}

// The state before a segment, if prefill_scan has chained summaries to it (walk.h).
template <int Keys> struct Chained {
    bool known = false;
    State<Keys> state;
};

// Walks the chunks, in the waves that hold the state. `Fused`: in prefill_fused. `C`: how (walk.h). `before`: the state
// before the segment, if it is chained.
// `units`: which unit, and its place in the ring, where workgroups walk several.
template <class T, int Keys, bool Fused = false, class C = Chunks<T, Keys>, class... Units>
DEVICE void scan_columns(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work,
                         const Chained<Keys> &before, Units &...units) {
    constexpr int column_tiles = StateLayout<Keys>::column_tiles;
    const int wave_column = work.slab * slab_columns<Keys, true>() + wave_column_of_slab(column_tiles);
    const int column = wave_column + first_column(arch::lane(), column_tiles);
    const u32 column_offset = column < x.value_dim ? 2 * column : Window::nowhere;

    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    State<Keys> state;
    clear_state<Keys>(state);
    bool has_started = false;
    if constexpr (sizeof...(units) > 0) {
        has_started = (start_unit<Keys>(state, x, units), ...);
    }
    if ((Fused || early_starts || starts_soon) && segment.from_zeros) {
        // Earlier tokens are forgotten.
    } else if (before.known) {
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            for (int j = 0; j < column_tiles; ++j) {
                state[t][j] = before.state[t][j];
            }
        }
    } else if (starts_from_summary(x, segment)) {
        load_matrix<Keys>(state, state_before(x, segment, work.head), column, x.value_dim, x.key_dim);
    } else if (!has_started) {
        first_state<Keys>(state, x, segment.sequence, work.head, column);
    }
    C chunks(x, segment, work.head, work.key_head, wave_column, column_offset, units...);
    chunks.begin(state);
    if constexpr (Fused) {
        chunks.warm_up(state, x);
    }
    const bool whole = Fused && segment.first && segment.last;
    walk_chunks<T, Keys, Fused>(state, chunks, x, column, whole, units...);
    chunks.finish();

    const dwk_prefill_scan_args &y = arch::reread(x);
    bool handed_over = false;
    if constexpr (sizeof...(units) > 0) {
        handed_over = y.final_state && (hand_over<Keys>(state, y, units), ...);
    }
    if (y.final_state && !handed_over) {
        const Located<Keys> at(y, whole, units...);
        if (Fused && y.flags & DWK_DEFERS_STATES && at.segment.last && !at.segment.first) {
            store_matrix<Keys>(state, waiting_state(y, at.segment, at.work.head), after_walk(column), y.value_dim,
                               y.key_dim);
        } else if (at.segment.last) {
            if constexpr (sizeof...(Units) > 0) {
                last_state<Keys>(state, y, at.segment.sequence, at.work.head, column_of_state<Keys>(at.work));
            } else {
                last_state<Keys>(state, y, at.segment.sequence, at.work.head, after_walk(column));
            }
        }
    }
    if constexpr (sizeof...(units) > 0) {
        (end_unit(units), ...);
    }
}

} // namespace prefill
