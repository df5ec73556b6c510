// Last kernel of prefill: outputs and final states. One workgroup per (segment, value head, slab of value columns)
// walks the chunks of its segment; some targets let a workgroup walk several segments. It starts from the sequence's
// initial state or, if the sequence is cut, from the state that prefill_summarise and prefill_combine left; on gfx942
// it chains few summaries itself. A segment may start some chunks early instead, from zeros (on gfx942 the second of
// two), or both of two segments' workgroups walk the whole sequence in narrower slabs (prefill/forget.h). Per chunk of
// 64 tokens (prefill/recurrence.h; the phases are in prefill/<target>/):
//   R = K S0     X = beta (V - exp(G) R)     U = T X     O = scale (exp(G) Q S0 + P U)     S1 = exp(G_C) S0 + K^T
//   (exp(G_C - G) U)
//
// q, k [T, HK, K], v, o [T, HV, V] bf16 or f16; states [slots, HV, K, V] or [slots, HV, V, K], f32, bf16 or f16.
#include "../prefill/columns.h"

namespace {

using namespace prefill;

// Walks a segment in all waves of the workgroup.
template <class T, int Keys>
DEVICE void walk_segment(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, Maps maps) {
    Chained<Keys> before;
    if constexpr (chains_itself(Keys)) {
        before.known = chain_before<Keys>(x, segment, work, before.state);
    }
    run_helper_waves<T, Keys, true>(x, segment, work, maps);
    run_state_waves<Keys, true>([&]() __attribute__((always_inline)) {
        if constexpr (orders_loads(Keys)) {
            // Narrow slabs take less time a chunk, so they need the next one sooner, wherever it comes from.
            if (is_narrow(Keys) || x.flags & DWK_FROM_HBM) {
                scan_columns<T, Keys, false, ChunksOfHbm<T, Keys>>(x, segment, work, before);
                return;
            }
        }
        scan_columns<T, Keys>(x, segment, work, before);
    });
}

template <class T, int Keys> DEVICE void scan(const dwk_prefill_scan_args &x, Maps maps) {
    if constexpr (walks_units(Keys)) {
        const int units = x.items_count * x.value_heads * x.slabs;
        if (are_fewer_workgroups_than(units)) {
            const auto locate = [&](int unit, Work &work, Segment &segment) __attribute__((always_inline)) {
                work = work_of(x, unit);
                segment = segment_of(x, work.item);
                // Not `Found::end`: if the loop over units can be left early, ptxas spills registers of the walk.
                if (!segment.exists || (x.slots > 0 && is_empty(segment)) || is_short(x, segment)) {
                    return Found::nothing;
                }
                if (is_padding(x, segment.sequence)) {
                    arch::wait_for_previous_kernel();
                    clear_outputs<Keys>(x, segment, work);
                    return Found::nothing;
                }
                return Found::chunks;
            };
            const auto walk_one =
                [&](const Segment &segment, const Work &work, auto &unit)
                    __attribute__((always_inline)) { scan_columns<T, Keys>(x, segment, work, Chained<Keys>{}, unit); };
            walk_units<T, Keys, true>(x, maps, units, locate, walk_one);
            return;
        }
    }
    Work work = work_of(x, arch::workgroup());
    Segment segment = segment_of(x, work.item);
    // A sequence without tokens writes no slot of a pool.
    if (!segment.exists || (x.slots > 0 && is_empty(segment)) || is_short(x, segment)) {
        arch::wait_for_previous_kernel();
        return;
    }
    if (is_padding(x, segment.sequence)) {
        arch::wait_for_previous_kernel();
        clear_outputs<Keys>(x, segment, work);
        return;
    }
    if constexpr (starts_soon) {
        begin_earlier(x, segment, work.head);
    }
    if constexpr (early_starts) {
        if (is_half(x, segment) && !divide(x, segment, work.head)) {
            walk_whole(x, segment, work);
            walk_segment<T, narrow(Keys)>(arch::reread(x), segment, work, maps);
            return;
        }
    }
    walk_segment<T, Keys>(early_starts ? arch::reread(x) : x, segment, work, maps);
}

} // namespace

#define SCAN(name, type, keys)                                                                                         \
    KERNEL((prefill::walk_threads<keys, true>()), (prefill::walk_residency<keys, true>()))                             \
    void dw_prefill_scan_##name##_k##keys(dwk_prefill_scan_args x MAPS_PARAMETER) {                                    \
        scan<type, keys>(x, MAPS_OF(dw_prefill_scan_##name##_k##keys));                                                \
    }

SCAN_SHARED_BYTES(64)
SCAN_SHARED_BYTES(96)
SCAN_SHARED_BYTES(128)
SCAN_SHARED_BYTES(192)
SCAN_SHARED_BYTES(256)

SCAN(bf16, Bf16, 64)
SCAN(bf16, Bf16, 96)
SCAN(bf16, Bf16, 128)
SCAN(bf16, Bf16, 192)
SCAN(bf16, Bf16, 256)
SCAN(f16, F16, 64)
SCAN(f16, F16, 96)
SCAN(f16, F16, 128)
SCAN(f16, F16, 192)
SCAN(f16, F16, 256)
