// Prefill in one kernel: what prefill_prepare and prefill_scan compute (prefill/recurrence.h), without records. One
// workgroup per (segment, value head, slab of value columns). Some waves hold the state and walk the chunks. The others
// make T, P and the row factors of the next chunk on chip meanwhile.
//
// q, k [T, HK, K], v, o [T, HV, V] bf16 or f16; g, beta [T, HV] (or a, b with DWK_RAW_GATES); states [slots, HV, K, V]
// or [slots, HV, V, K], f32 or bf16.
#include "../prefill/fused.h"

namespace {

using namespace prefill;

// Writes zeros to the rows of o past the last sequence: each workgroup to its share of them.
template <int Keys> DEVICE void clear_rest(const dwk_prefill_scan_args &x) {
    const int groups = x.items_count * x.value_heads * x.slabs;
    const int words = x.value_heads * x.value_dim;
#pragma unroll 1
    for (int token = token_at(x.cu_seqlens, x.sequences, x.tokens) + arch::workgroup(); token < x.tokens;
         token += groups) {
        for (int i = arch::thread(); i < words; i += walking_threads<Keys, true>()) {
            const int head = i / x.value_dim;
            ((short *)x.o)[token * x.o_strides.token + head * x.o_strides.head + (i - head * x.value_dim)] = 0;
        }
    }
}

template <class T, int Keys> DEVICE void fused(const dwk_prefill_fused_args &y) {
    const dwk_prefill_scan_args &x = y.scan;
    const Work work = work_of(x, arch::workgroup());
    const Segment segment = segment_of(x, work.item);
    if (token_at(x.cu_seqlens, x.sequences, x.tokens) < x.tokens) {
        arch::wait_for_previous_kernel();
        clear_rest<Keys>(x);
    }
    // A sequence without tokens writes no slot of a pool.
    if (x.slots > 0 && segment.begin == segment.end) {
        arch::wait_for_previous_kernel();
        return;
    }
    if (is_padding(x, segment.sequence)) {
        arch::wait_for_previous_kernel();
        clear_outputs<Keys>(x, segment, work);
        return;
    }
    run_making_waves<T, Keys>(y, segment, work);
    run_fused_state_waves<Keys>([&]() __attribute__((always_inline)) { scan_columns<T, Keys>(x, segment, work); });
}

} // namespace

#define FUSED(name, type, keys)                                                                                        \
    KERNEL((prefill::fused_threads<keys>()), (prefill::fused_residency<keys>()))                                       \
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
