// Segments of prefill_fused that the gates choose (dwk_prefill_by_gates), in place of the split path or of whole
// sequences. Every workgroup of prefill_fused, which runs first, samples the gates before the segments' begins, and
// finds the same choice. If kernels run after this one, the first workgroup leaves them their lists, or lists without
// chunks, and workgroups prepare chunks if the split path is chosen.
#pragma once

#include "warm_up.h"

namespace prefill {

// Tokens of a sample.
constexpr int sampled_tokens = 16;

// Whether, for each value head, the sampled gates are so strong on average that segments start at most y.by_gates.soon
// chunks early, and that the first chunks that are looked at show it (warm_up.h). In each sample they are at least half
// as strong. A guess of the time alone: the results do not need it. All threads take part. `sums`: shared memory of 64
// numbers for each wave.
template <int Waves> DEVICE bool gates_forget(const dwk_prefill_fused_args &y, int samples, float *sums) {
    const dwk_prefill_prepare_args &x = y.prepare;
    const int lane = arch::lane(), wave = arch::wave();
    if (y.by_gates.soon == 0) {
        return false;
    }
    // log2 of what a chunk, and the tokens of a sample, may leave on average.
    const float of_chunk = min_of(forgotten_below / (float)y.by_gates.soon, forgotten_before(x) / first_looked_at);
    const float mean = of_chunk * sampled_tokens / chunk;
    bool all = true;
#pragma unroll 1
    for (int first = 0; all && first < x.value_heads; first += arch::lanes) {
        const int head = min_of(first + lane, x.value_heads - 1);
        float sum = 0.0f;
#pragma unroll 1
        for (int i = wave; i < samples; i += Waves) {
            const int64_t sequence = arch::uniform(y.by_gates.samples + 2 + 2 * i);
            const int64_t token = arch::uniform(y.by_gates.samples + 3 + 2 * i);
            float g[sampled_tokens] = {};
            if (x.g) {
                const int64_t at = sequence * x.g_strides.sequence + token * x.g_strides.token;
                load_scalars(g, x.g, at + head * x.g_strides.head, x.g_strides.token, sampled_tokens, x.g_type);
            }
            if (x.flags & DWK_RAW_GATES) {
                const HeadGates of_head = head_gates(x, head);
                for (float &gate : g) {
                    gate = math::gate(gate, of_head.a_log, of_head.dt_bias);
                }
            }
            float own = 0.0f;
            for (float gate : g) {
                Gates gates{gate, 0.0f};
                bound_gates(gates);
                own += gates.g * math::log2e;
            }
            // A number that no other samples make good.
            sum += own < 0.5f * mean ? own : 1e9f;
        }
        arch::workgroup_sync();
        sums[wave * arch::lanes + lane] = sum;
        arch::workgroup_sync();
        sum = 0.0f;
        for (int w = 0; w < Waves; ++w) {
            sum += sums[w * arch::lanes + lane];
        }
        all = arch::ballot(!(sum < mean * (float)samples)) == 0;
    }
    arch::workgroup_sync();
    return all;
}

// Leaves lists to the kernels after prefill_fused: those of the split path if that is chosen (`split`), otherwise lists
// without chunks. They have an item for each final state that waits, if the segments are chosen (`cut`).
template <int Threads> DEVICE void leave_lists(const dwk_prefill_fused_args &y, bool split, bool cut) {
    const dwk_prefill_by_gates &x = y.by_gates;
    const int thread = arch::thread();
    const i32x4 nothing = {-1, 0, 0, 0};
    if (split && x.items == x.split_items) {
        return;
    }
#pragma unroll 1
    for (int i = thread; i < x.items_count; i += Threads) {
        ((i32x4 *)x.split_items)[i] = split ? ((const i32x4 *)x.items)[i] : nothing;
    }
#pragma unroll 1
    for (int i = thread; i < 2 * x.chains_count; i += Threads) {
        x.split_chains[i] = split ? x.chains[i] : 0;
    }
    if (!cut || !(y.scan.flags & DWK_DEFERS_STATES)) {
        return;
    }
    arch::workgroup_sync();
#pragma unroll 1
    for (int i = thread; i < y.scan.items_count; i += Threads) {
        const i32x4 item = ((const i32x4 *)y.scan.items)[i];
        if (item.x >= 0 && item.w > 0 && item.w <= x.items_count) {
            ((i32x4 *)x.split_items)[item.w - 1] = i32x4{item.x, item.y + item.z, 0, item.w};
        }
    }
}

// Moves the begin of a segment that is not its sequence's first to where its walk starts: so many chunks earlier that
// they forget every state before them, or at the first chunk of the sequence, from its initial state.
template <class T, int Threads>
DEVICE void begin_alone(const dwk_prefill_fused_args &y, Segment &segment, const Work &work) {
    const int first_token = rows_of(y.scan.cu_seqlens, segment.sequence, y.scan.tokens).begin;
    const int before = (segment.begin - first_token) / chunk;
    const int found =
        Forgetting<T, Threads>(y.prepare, Threads, segment.sequence, segment.begin, work.head, work.key_head)
            .chunks(before);
    const int chunks = found >= 0 ? found : before;
    segment.quiet = chunks * chunk;
    segment.begin -= segment.quiet;
    segment.record -= chunks;
    segment.from_zeros = found >= 0;
}

} // namespace prefill
