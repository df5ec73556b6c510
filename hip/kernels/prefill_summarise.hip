// First kernel of segmented prefill: the map S -> M S + N of a piece of a segment. One workgroup per (piece of a
// segment that another follows, value head, slab of columns of N or M) walks the chunks as prefill_scan does, without
// outputs (prefill/recurrence.h). Below, segments are pieces, of which a segment of prefill_scan has one or more:
//   N [K, V]   state after the segment, starting from zeros
//   M [K, K]   state after the segment, starting from the identity with v = 0
// The first segment of a sequence starts from the initial state and needs no M; it stores the initial state in M's
// place for prefill_scan, unless that can read the caller's. If the gates forget the state before the segment
// (prefill/forget.h), M is 0 and is not stored. The walk then skips leading chunks that do not influence the state
// after the segment. Some targets let a workgroup take several units of work, where the launch has fewer workgroups.
//
// k [T, HK, K], v [T, HV, V] bf16 or f16; summaries [HV] of N [V, K] and M [K, K], or the initial state [V, K], f32.
#include "../prefill/forget.h"
#include "../prefill/parts.h"
#include "../prefill/walk.h"

namespace {

using namespace prefill;

// Walks the chunks for columns of N or M, in the waves that hold the state. `units`: the place in the ring, where
// workgroups take several units of work.
template <class T, int Keys, class... Units>
DEVICE void summarise_columns(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, int n_slabs,
                              Units &...units) {
    constexpr int column_tiles = StateLayout<Keys>::column_tiles;
    const bool of_m = work.slab >= n_slabs;
    const int slab = work.slab - (of_m ? n_slabs : 0);
    const int wave_column = slab * slab_columns<Keys, false>() + wave_column_of_slab(column_tiles);
    const int column = wave_column + first_column(arch::lane(), column_tiles);
    const int columns = of_m ? x.key_dim : x.value_dim;
    const u32 column_offset = !of_m && column < columns ? 2 * column : Window::nowhere;

    State<Keys> state;
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
        for (int j = 0; j < column_tiles; ++j) {
            for (int e = 0; e < elements; ++e) {
                const bool diagonal = of_m && state_key(t, e, arch::lane()) == column + state_column(j, e);
                state[t][j][e] = diagonal ? 1.0f : 0.0f;
            }
        }
    }
    if (segment.first) {
        first_state<Keys>(state, x, segment.sequence, work.head, column);
        if (stores_initial_state(x, segment)) {
            float *summary = summary_of(x, min_of(segment.summary, x.summaries - 1), work.head);
            store_matrix<Keys>(state, second_part(summary, x), column, columns, x.key_dim);
        }
    }
    if (segment.from_zeros) {
        clear_state<Keys>(state);
    }
    Chunks<T, Keys, false> chunks(x, segment, work.head, work.key_head, of_m ? x.value_dim : wave_column, column_offset,
                                  units...);
    chunks.begin(state);
    walk<T, Keys, false>(state, chunks, x, 0);
    chunks.finish();

    const dwk_prefill_scan_args &y = arch::reread(x);
    float *summary = summary_of(y, min_of(segment.summary, y.summaries - 1), work.head);
    if (of_m) {
        store_high_low<Keys>(state, second_part(summary, y), column, y.key_dim);
    } else {
        store_matrix<Keys>(state, summary, column, columns, y.key_dim);
    }
}

template <class T, int Keys> DEVICE void summarise(const dwk_prefill_scan_args &x, Maps maps) {
    // Slabs of N come first, then slabs of M. Columns beyond V count as zeros.
    const int of_slab = slab_columns<Keys, false>();
    const int n_slabs = arch::uniform_value((x.value_dim + of_slab - 1) / of_slab);
    const auto locate = [&](int unit, Work &work, Segment &segment) __attribute__((always_inline)) {
        work = work_of(x, unit);
        int later; // chunks
        segment = piece_of(x, work.item, later);
        // Segments that another follows come first. In lists that the device made they are fewer than the launch has
        // units for.
        if (!segment.exists || segment.last) {
            return Found::end;
        }
        if (!segment.summarised) {
            return Found::nothing;
        }
        if (work.slab >= n_slabs && segment.first) {
            // Chains of prefill_scan begin here (chain_before).
            if (chains_itself(Keys) && work.slab == n_slabs && arch::thread() == 0) {
                *forgotten_by(x, min_of(segment.summary, x.summaries - 1), work.head) = true;
            }
            return Found::nothing;
        }
        arch::wait_for_previous_kernel();
        arch::let_next_kernel_begin();
        // Padding has no records and needs no summary. Marking it as forgotten makes combine skip it.
        const bool padding = is_padding(x, segment.sequence);
        const bool passed = !padding && is_passed(x, segment, later, work.head);
        segment.from_zeros = !padding && (forget(x, work.head, segment, later) || passed);
        const bool forgotten = padding || segment.from_zeros;
        if (work.slab == n_slabs && arch::thread() == 0) {
            *forgotten_by(x, min_of(segment.summary, x.summaries - 1), work.head) = forgotten;
        }
        if (padding || (work.slab >= n_slabs && forgotten)) {
            return Found::nothing;
        }
        const int item = arch::uniform_value(work.item / x.pieces);
        return forgotten && is_unread(x, item, segment, later, passed, work.head) ? Found::nothing : Found::chunks;
    };
    if constexpr (walks_units(Keys)) {
        // Segments that are summarised come first in the list, which is older than prefill_prepare.
        const Segment segment = segment_of(x, arch::uniform_value(work_of(x, arch::workgroup()).item / x.pieces));
        if (!segment.exists || segment.last) {
            arch::end_without_work();
            return;
        }
        const int units = x.items_count * x.value_heads * x.slabs;
        if (are_fewer_workgroups_than(units)) {
            walk_units<T, Keys, false>(
                x, maps, units, locate,
                [&](const Segment &segment, const Work &work, auto &unit)
                    __attribute__((always_inline)) { summarise_columns<T, Keys>(x, segment, work, n_slabs, unit); });
            return;
        }
    }
    Work work;
    Segment segment;
    if (locate(arch::workgroup(), work, segment) != Found::chunks) {
        arch::wait_for_previous_kernel();
        return;
    }
    run_helper_waves<T, Keys, false>(x, segment, work, maps);
    run_state_waves<Keys, false>(
        [&]() __attribute__((always_inline)) { summarise_columns<T, Keys>(x, segment, work, n_slabs); });
}

} // namespace

#define SUMMARISE(name, type, keys)                                                                                    \
    KERNEL((prefill::walk_threads<keys, false>()), (prefill::walk_residency<keys, false>()))                           \
    void dw_prefill_summarise_##name##_k##keys(dwk_prefill_scan_args x MAPS_PARAMETER) {                               \
        summarise<type, keys>(x, MAPS_OF(dw_prefill_summarise_##name##_k##keys));                                      \
    }

SUMMARISE_SHARED_BYTES(64)
SUMMARISE_SHARED_BYTES(96)
SUMMARISE_SHARED_BYTES(128)
SUMMARISE_SHARED_BYTES(192)
SUMMARISE_SHARED_BYTES(256)

SUMMARISE(bf16, Bf16, 64)
SUMMARISE(bf16, Bf16, 96)
SUMMARISE(bf16, Bf16, 128)
SUMMARISE(bf16, Bf16, 192)
SUMMARISE(bf16, Bf16, 256)
SUMMARISE(f16, F16, 64)
SUMMARISE(f16, F16, 96)
SUMMARISE(f16, F16, 128)
SUMMARISE(f16, F16, 192)
SUMMARISE(f16, F16, 256)
