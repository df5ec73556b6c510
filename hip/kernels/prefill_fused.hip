// Prefill in one kernel: what prefill_prepare and prefill_scan compute (prefill/recurrence.h), without records. One
// workgroup per (segment, value head, slab of value columns). Some waves hold the state and walk the chunks. The others
// make T, P and the row factors of the next chunk on chip meanwhile. A segment that is not its sequence's first starts
// some chunks early, from zeros, if prefill_fused_summarise found that these forget what was before them;
// otherwise from the state that the summaries hold. Where the gates choose the segments (prefill/by_gates.h), it finds
// the starts itself, and there are no summaries; if they do not, some workgroups walk whole sequences, or all prepare
// chunks. Where lengths on the device choose the split path, it prepares chunks (prefill/prepare.h). Where sequences
// are short, a workgroup walks several of them (prefill/gfx9/units.h).
//
// q, k [T, HK, K], v, o [T, HV, V] bf16 or f16; g, beta [T, HV] (or a, b with DWK_RAW_GATES); states [slots, HV, K, V]
// or [slots, HV, V, K], f32, bf16 or f16.
#include "../prefill/fused.h"

#include "../prefill/by_gates.h"

namespace {

using namespace prefill;

// Writes zeros to the rows of o past the last sequence: each workgroup to its share of them, by threads from
// `making_threads` on. Those before have more to do at the start.
template <int Keys> DEVICE void clear_rest(const dwk_prefill_scan_args &x, int groups) {
    const int words = x.value_heads * x.value_dim;
#pragma unroll 1
    for (int token = token_at(x.cu_seqlens, x.sequences, x.tokens) + arch::workgroup(); token < x.tokens;
         token += groups) {
        for (int i = arch::thread() - making_threads; i < words; i += walking_threads<Keys, true>() - making_threads) {
            const int head = i / x.value_dim;
            ((short *)x.o)[token * x.o_strides.token + head * x.o_strides.head + (i - head * x.value_dim)] = 0;
        }
    }
}

// Workgroups that walk.
DEVICE int walking_groups(const dwk_prefill_fused_args &y) {
    const int units = y.scan.items_count * y.scan.value_heads * y.scan.slabs;
    return fused_walks_units && y.walkers > 0 ? y.walkers : units;
}

// Whether this workgroup neither walks nor prepares, because a list that the device made is shorter than any could be.
DEVICE bool is_past_the_list(const dwk_prefill_fused_args &y) {
    if (!y.split_items || arch::workgroup() < y.preparing_groups) {
        return false;
    }
    const int item = work_of(y.scan, arch::workgroup()).item;
    return arch::uniform(&arch::reread(y).scan.items[item].sequence) < 0;
}

template <class T, int Keys> DEVICE void fused(const dwk_prefill_fused_args &y) {
    const dwk_prefill_scan_args &x = y.scan;
    // The kernel before may have made the lengths and the items.
    arch::wait_for_previous_kernel();
    arch::touch_arguments<sizeof(dwk_prefill_fused_args)>();
    constexpr int threads = fused_threads<Keys, true>();
    const int walkers = fused_walks_units ? y.walkers : 0; // loaded together with what follows
    bool gates_choose = false, whole = false;
    if constexpr (may_prepare) {
        bool split = false;
        const int samples = y.by_gates.samples ? arch::uniform(y.by_gates.samples) : 0;
        gates_choose = samples > 0;
        // A workgroup past the list has no share in the choice, but clears its rows.
        if (gates_choose && is_past_the_list(arch::reread(y))) {
            gates_choose = false;
        } else if (gates_choose) {
            const bool forget = gates_forget<threads / arch::lanes>(arch::reread(y), samples, choice_memory<Keys>());
            if (!forget) {
                split = arch::uniform(y.by_gates.samples + 1);
                whole = !split;
            }
            if (arch::reread(y).by_gates.split_items && arch::workgroup() == 0) {
                leave_lists<threads>(arch::reread(y), split, forget);
            }
        } else if (y.split_items) {
            split = arch::uniform(&y.split_items->sequence) >= 0;
        }
        if (split) {
            prepare_instead<T, Keys>(arch::reread(y));
            return;
        }
        // There may be more workgroups, to prepare chunks.
        if (arch::workgroup() >= walking_groups(arch::reread(y))) {
            return;
        }
    }
    if (arch::uniform_value(arch::thread()) >= making_threads &&
        token_at(x.cu_seqlens, x.sequences, x.tokens) < x.tokens) {
        clear_rest<Keys>(x, walking_groups(arch::reread(y)));
    }
    if constexpr (fused_walks_units) {
        if (walkers > 0) {
            walk_fused_units<T, Keys>(arch::reread(y));
            return;
        }
    }
    const Work work = work_of(x, arch::workgroup());
    Segment segment = segment_of(x, work.item);
    // A sequence without tokens writes no slot of a pool.
    if (!segment.exists || (x.slots > 0 && is_empty(segment)) || is_short(x, segment)) {
        return;
    }
    if (is_padding(x, segment.sequence)) {
        clear_outputs<Keys>(x, segment, work);
        return;
    }
    if (whole) {
        // The workgroups of first segments walk all chunks of their sequences.
        if (!segment.first) {
            return;
        }
        extend(x, segment);
    } else if (gates_choose && !segment.first) {
        begin_alone<T, threads>(arch::reread(y), segment, work);
    } else if (segment.summarised && !segment.first) {
        begin_early(x, segment, work.head);
    }
    run_making_waves<T, Keys, true>(arch::reread(y), segment, work);
    run_fused_state_waves<Keys, true>([&]() __attribute__((always_inline)) {
        scan_columns<T, Keys, true>(arch::reread(y).scan, segment, work, Chained<Keys>{});
    });
}

} // namespace

#define FUSED(name, type, keys)                                                                                        \
    KERNEL((prefill::fused_threads<keys, true>()), (prefill::fused_residency<keys, true>()))                           \
    void dw_prefill_fused_##name##_k##keys(dwk_prefill_fused_args x) { fused<type, keys>(x); }

FUSED_SHARED_BYTES(64)
FUSED_SHARED_BYTES(96)
FUSED_SHARED_BYTES(128)

FUSED(bf16, Bf16, 64)
FUSED(bf16, Bf16, 96)
FUSED(bf16, Bf16, 128)
FUSED(f16, F16, 64)
FUSED(f16, F16, 96)
FUSED(f16, F16, 128)
