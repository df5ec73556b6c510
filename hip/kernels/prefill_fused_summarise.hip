// First kernel of a fused prefill that cuts sequences: for each segment but the last of a sequence, how the segment
// after it starts, and the map S -> M S + N of the segment if that start needs it. One workgroup per (segment that
// another follows, value head, slab of columns of N or M). The segment after starts
//   - some chunks early, from zeros, if these forget every earlier state (prefill/warm_up.h): no summary is needed
//   - from the first chunk of the sequence if that is no further away: N holds the sequence's initial state
//   - at its begin otherwise. N and M are then as prefill_summarise computes them. M is left out, and marked as
//     forgotten, if this segment forgets the state before it, or if its own walk can start early.
// The first segment of a sequence stores the initial state in M's place, because the last segment may overwrite the
// caller's state meanwhile.
//
// k [T, HK, K], v [T, HV, V] bf16 or f16; summaries [HV] of N [V, K] and M [K, K], or the initial state [V, K], f32.
#include "../prefill/fused.h"
#include "../prefill/parts.h"
#include "../prefill/warm_up.h"

namespace {

using namespace prefill;

// Steps of a workgroup for its columns of N.
struct Task {
    bool keeps_initial; // stores the initial state in M's place
    bool has_initial;   // N starts from the sequence's initial state, not from zeros
    bool stores;        // stores N
};

// Walks the chunks for columns of N or M, in the waves that hold the state.
template <class T, int Keys>
DEVICE void summarise_columns(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, int n_slabs,
                              Task task) {
    constexpr int column_tiles = StateLayout<Keys>::column_tiles;
    const bool of_m = work.slab >= n_slabs;
    const int slab = work.slab - (of_m ? n_slabs : 0);
    const int wave_column = slab * slab_columns<Keys, false>() + wave_column_of_slab(column_tiles);
    const int column = wave_column + first_column(arch::lane(), column_tiles);
    const int columns = of_m ? x.key_dim : x.value_dim;
    const u32 column_offset = !of_m && column < columns ? 2 * column : Window::nowhere;

    State<Keys> state;
    clear_state<Keys>(state);
    if (of_m) {
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            for (int j = 0; j < column_tiles; ++j) {
                for (int e = 0; e < elements; ++e) {
                    const bool diagonal = state_key(t, e, arch::lane()) == column + state_column(j, e);
                    state[t][j][e] = diagonal ? 1.0f : 0.0f;
                }
            }
        }
    } else if (task.keeps_initial || task.has_initial) {
        first_state<Keys>(state, x, segment.sequence, work.head, column);
        if (task.keeps_initial) {
            float *summary = summary_of(x, min_of(segment.summary, x.summaries - 1), work.head);
            store_matrix<Keys>(state, second_part(summary, x), column, columns, x.key_dim);
        }
        if (!task.has_initial) {
            clear_state<Keys>(state);
        }
    }
    Chunks<T, Keys, false> chunks(x, segment, work.head, work.key_head, of_m ? x.value_dim : wave_column,
                                  column_offset);
    chunks.begin(state);
    walk<T, Keys, false>(state, chunks, x, 0);
    chunks.finish();

    const dwk_prefill_scan_args &y = arch::reread(x);
    float *summary = summary_of(y, min_of(segment.summary, y.summaries - 1), work.head);
    if (of_m) {
        store_high_low<Keys>(state, second_part(summary, y), column, y.key_dim);
    } else if (task.stores) {
        store_matrix<Keys>(state, summary, column, columns, y.key_dim);
    }
}

template <class T, int Keys> DEVICE void summarise(const dwk_prefill_fused_args &y) {
    const dwk_prefill_scan_args &x = y.scan;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const Work work = work_of(x, arch::workgroup());
    Segment segment = segment_of(x, work.item);
    if (!segment.exists || segment.last) {
        return;
    }
    // Slabs of N come first, then slabs of M.
    const int of_slab = slab_columns<Keys, false>();
    const int n_slabs = arch::uniform_value((x.value_dim + of_slab - 1) / of_slab);
    const bool of_m = work.slab >= n_slabs;
    const int summary = min_of(segment.summary, x.summaries - 1);
    // Padding needs no summary.
    const bool padding = is_padding(x, segment.sequence);

    int start = 0; // of the segment after, as in dwk_prefill_scan_args.forgotten
    bool needs_m = false;
    Task task{!padding && segment.first, false, false};
    int begin = segment.end; // of the walk
    if (!padding) {
        const auto forgetting = [&](int end, int most) __attribute__((always_inline)) {
            // Arguments are loaded again by each part of the kernel: together they would not fit into registers.
            return Forgetting<T, fused_threads<Keys, false>()>(arch::reread(y).prepare, walking_threads<Keys, false>(),
                                                               segment.sequence, end, work.head, work.key_head)
                .chunks(most);
        };
        const int first_token = rows_of(x.cu_seqlens, segment.sequence, x.tokens).begin;
        const int before = (segment.begin - first_token) / chunk, own = (segment.end - segment.begin) / chunk;
        // Chunks that forget before the segment after, and before this one.
        const int after = forgetting(segment.end, max_of(min_of(y.warm_up, before + own), own));
        if (after >= 0 && after <= y.warm_up) {
            start = 2 * after + 1;
        } else if (before + own <= y.warm_up) {
            start = 2 * (before + own);
            task.has_initial = task.stores = true;
        } else {
            task.stores = true;
            begin = segment.begin;
            if (after >= 0) {
                begin = segment.end - after * chunk;
            } else if (segment.first) {
                task.has_initial = true;
            } else {
                const int early = forgetting(segment.begin, min_of(y.warm_up, before));
                if (early >= 0) {
                    begin = segment.begin - early * chunk;
                } else if (before <= y.warm_up) {
                    begin = first_token;
                    task.has_initial = true;
                } else {
                    needs_m = true;
                }
            }
        }
    }
    if (work.slab == 0 && arch::thread() == 0) {
        *forgotten_by(x, summary, work.head) = !needs_m;
        *start_after(x, summary, work.head) = start;
    }
    if (of_m ? !needs_m : !task.keeps_initial && !task.stores) {
        return;
    }
    // Nothing to walk: N is the initial state, or not needed.
    segment.begin = begin;
    run_making_waves<T, Keys, false>(arch::reread(y), segment, work);
    run_fused_state_waves<Keys, false>([&]() __attribute__((always_inline)) {
        summarise_columns<T, Keys>(arch::reread(y).scan, segment, work, n_slabs, task);
    });
}

} // namespace

#define FUSED_SUMMARISE(name, type, keys)                                                                              \
    KERNEL((prefill::fused_threads<keys, false>()), (prefill::fused_residency<keys, false>()))                         \
    void dw_prefill_fused_summarise_##name##_k##keys(dwk_prefill_fused_args x) { summarise<type, keys>(x); }

FUSED_SUMMARISE_SHARED_BYTES(64)
FUSED_SUMMARISE_SHARED_BYTES(96)
FUSED_SUMMARISE_SHARED_BYTES(128)

FUSED_SUMMARISE(bf16, Bf16, 64)
FUSED_SUMMARISE(bf16, Bf16, 96)
FUSED_SUMMARISE(bf16, Bf16, 128)
FUSED_SUMMARISE(f16, F16, 64)
FUSED_SUMMARISE(f16, F16, 96)
FUSED_SUMMARISE(f16, F16, 128)
