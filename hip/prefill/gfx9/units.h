// Units of work, where a workgroup of prefill_fused walks several on CDNA. A unit is a sequence that is not cut and a
// value head, with V of at most a slab. Workgroup w of n has the units w, w + n, w + 2 n, ... The making waves are a
// chunk ahead of those that hold the state, also across units, and request rows another chunk ahead. They pass each
// unit on through LDS.
#pragma once

#include "../fused_mode.h"

#include "../columns.h"
#include "fused_memory.h"

namespace prefill {

DEVICE bool has_chunks(const dwk_prefill_scan_args &x, const Segment &segment) {
    return segment.begin < segment.end && !is_short(x, segment) && !is_padding(x, segment.sequence);
}

// Calls f(unit, work, segment) for the workgroup's units from `unit` on, until it returns true.
template <class F> DEVICE void each_unit(const dwk_prefill_fused_args &y, int unit, const F &f) {
    const dwk_prefill_scan_args &x = y.scan;
    const int units = x.items_count * x.value_heads;
#pragma unroll 1
    for (; unit < units; unit += y.walkers) {
        const Work work = work_of(x, unit);
        const Segment segment = segment_of(x, work.item);
        if (!segment.exists || f(unit, work, segment)) {
            return;
        }
    }
}

// The unit that a wave with the state walks, and V of its first chunk or of the chunk that is next.
template <int Keys> class WalkedUnit {
  public:
    // Whether there is such a unit. It is known after barriers.
    DEVICE_MEMBER bool exists() const {
        const Segment own = segment();
        return own.begin < own.end;
    }
    DEVICE_MEMBER Segment segment(int ahead = 0) const {
        const UnitPlace &own = fused_memory<Keys>().units[(index + ahead) % units_ahead];
        const int sequence = arch::uniform_value(own.sequence), begin = arch::uniform_value(own.begin);
        const int end = arch::uniform_value(own.end), record = first_record(begin, sequence);
        return Segment{sequence, begin, end, record, 0, true, true, false, 0, false, true};
    }
    DEVICE_MEMBER Work work(int ahead = 0) const {
        return Work{0, arch::uniform_value(fused_memory<Keys>().units[(index + ahead) % units_ahead].head), 0, 0};
    }
    DEVICE_MEMBER bool is_first() const { return index == 0; }
    DEVICE_MEMBER void advance() { index = arch::opaque_uniform(arch::uniform_value(index + 1)); }

    int values[tiles][elements]; // V, two columns a word

  private:
    int index = 0;
};

// Writes the results of a unit without chunks, in the waves that hold the state: zeros to the outputs of padding, and
// the initial state of a sequence without tokens to its final state.
template <int Keys>
DEVICE void finish_without_chunks(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
    if (is_padding(x, segment.sequence)) {
        constexpr int others = making_waves * arch::lanes;
        clear_outputs<Keys>(x, segment, work, arch::thread() - others, walking_threads<Keys, true>() - others);
        return;
    }
    if (x.slots > 0 || segment.begin < segment.end || is_short(x, segment) || !x.final_state) {
        return;
    }
    const int column = wave_column_of_slab(wave_tiles) + first_column(arch::lane(), wave_tiles);
    State<Keys> state;
    clear_state<Keys>(state);
    first_state<Keys>(state, x, segment.sequence, work.head, column);
    last_state<Keys>(state, arch::reread(x), segment.sequence, work.head, column);
}

// The state before a unit.
template <int Keys>
DEVICE void begin_unit(State<Keys> &state, const dwk_prefill_scan_args &x, const WalkedUnit<Keys> &unit, int column) {
    clear_state<Keys>(state);
    if (unit.exists()) {
        first_state<Keys>(state, x, unit.segment().sequence, unit.work().head, column);
    }
}

// Walks the workgroup's units, in the waves that hold the state.
template <class T, int Keys> DEVICE void walk_units_columns(const dwk_prefill_scan_args &x) {
    typedef WalkedUnit<Keys> Unit;
    const int column = wave_column_of_slab(wave_tiles) + first_column(arch::lane(), wave_tiles);
    Unit unit;
    State<Keys> state;
    begin_unit<Keys>(state, x, unit, column);
#pragma unroll 1
    while (unit.exists()) {
        {
            const int own = arch::opaque(column);
            const u32 offset = own < arch::reread(x).value_dim ? 2 * own : Window::nowhere;
            Chunks<T, Keys, true, Unit> chunks(arch::reread(x), unit.segment(), unit.work().head, 0, 0, offset, unit);
            chunks.begin(state);
            walk_chunks<T, Keys, true>(state, chunks, x, column, false, unit);
            // Before the state: memory is idle, and will not be.
            chunks.finish();
        }
        const Segment last = unit.segment();
        const int head = unit.work().head;
        unit.advance();
        // The next state is loaded before this one is stored: stores delay all that follows them.
        State<Keys> next;
        begin_unit<Keys>(next, arch::reread(x), unit, arch::opaque(column));
        const dwk_prefill_scan_args &y = arch::reread(x);
        if (y.final_state) {
            last_state<Keys>(state, y, last.sequence, head, arch::opaque(column));
        }
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            for (int j = 0; j < wave_tiles; ++j) {
                state[t][j] = next[t][j];
            }
        }
    }
}

template <int Keys> DEVICE Work work_at(const dwk_prefill_scan_args &, const WalkedUnit<Keys> &unit) {
    return unit.work();
}
template <int Keys>
DEVICE Segment segment_at(const dwk_prefill_scan_args &, const Work &, const WalkedUnit<Keys> &unit) {
    return unit.segment();
}

} // namespace prefill
