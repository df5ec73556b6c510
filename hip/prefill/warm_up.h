// Warm-up: a segment that is not its sequence's first may start its walk some chunks early, from zeros, if these chunks
// leave nothing of any earlier state. It then needs no summary of the segments before it.
#pragma once

#include "../tensor/pieces.h"
#include "../tensor/rows.h"
#include "gates.h"
#include "recurrence.h"
#include "segment.h"

namespace prefill {

// log2 of what the chunks of a warm-up may leave of the norm of an earlier state. Rounding a state to f32 loses 2^-24
// of it, rounding to operands of 16 bits 2^-9 or 2^-12. States of up to 2^64 then leave less than 2^-64, below the
// rounding of any state above 2^-40. (prefill/forget.h keeps 2^-288, which leaves nothing of any f32 state.)
constexpr float nothing_of_a_state = -128.0f;

// Finds how many of the chunks that end at token `end`, the begin of a chunk of a sequence, forget. All threads of the
// workgroup, one for each token, take part and get the same numbers.
template <class T, int Threads> class Forgetting {
  public:
    DEVICE_MEMBER Forgetting(const dwk_prefill_prepare_args &x, int threads, int sequence, int end, int head,
                             int key_head)
        : x(x), threads(threads), sequence(sequence), end(end), head(head), key_head(key_head) {}

    // Least number of chunks, at most `most`, that leave less than 2^-128 of any state before them. -1: none does.
    DEVICE_MEMBER int chunks(int most) const {
        const int by_gates = search(most, false);
        if (by_gates < 0 || x.flags & DWK_QK_L2NORM) {
            return by_gates;
        }
        // Long keys may make states grow, so that more chunks are needed, or all are too few. Rows of K are read only
        // where gates alone would be enough.
        const int found = search(by_gates, true);
        return found >= 0 || by_gates == most ? found : search(most, true);
    }

  private:
    static constexpr int waves = Threads / arch::lanes, waves_of_chunk = chunk / arch::lanes;

    // log2 of a bound on how much a token scales the norm of any state.
    DEVICE_MEMBER float bound_of(int token, bool inside, bool with_keys) const {
        const GateReader reader(x, sequence, token, inside);
        const Gates gates = reader.gates_of(head, [&]() __attribute__((always_inline)) { return reader.load(head); });
        float bound = gates.g * math::log2e;
        if (inside && (with_keys || x.flags & DWK_QK_L2NORM)) {
            const float by = growth(gates.beta, with_keys ? key_square(token) : 1.0f);
            if (by != 1.0f) {
                bound += math::log2e * arch::log(by);
            }
        }
        return bound;
    }
    DEVICE_MEMBER float key_square(int token) const {
        const char *const row = row_address(x.k, x.k_strides, sequence, token, key_head);
        const bool whole = arch::in_one_access(row);
        float sum = 0.0f;
#pragma unroll 4
        for (int i = 0; i < x.key_dim; i += piece::octet) {
            const piece::Octet k = piece::widened<T>(piece::load<false>(row + 2 * i, whole));
            for (int e = 0; e < piece::octet; ++e) {
                sum = __builtin_fmaf(k[e], k[e], sum);
            }
        }
        return sum;
    }

    // `chunks`, with the growth of keys or as if no state grew along them.
    DEVICE_MEMBER int search(int most, bool with_keys) const {
        SHARED static float sums[2][waves];
        const int at_once = threads / chunk;
        float sum = 0.0f; // of the bounds of later chunks
        int buffer = 0;
        arch::workgroup_sync();
#pragma unroll 1
        for (int first = 0; first < most; first += at_once) {
            // Chunks count backwards.
            const int number = first + arch::thread() / chunk;
            const int token = end - (number + 1) * chunk + arch::thread() % chunk;
            const float of_wave = arch::inclusive_sum(bound_of(token, number < most, with_keys));
            if (arch::lane() == arch::lanes - 1) {
                sums[buffer][arch::thread() / arch::lanes] = of_wave;
            }
            arch::workgroup_sync();
            const int here = min_of(at_once, most - first);
#pragma unroll 1
            for (int i = 0; i < here; ++i) {
                for (int w = 0; w < waves_of_chunk; ++w) {
                    sum += sums[buffer][i * waves_of_chunk + w];
                }
                if (sum < nothing_of_a_state) {
                    return arch::uniform_value(first + i + 1);
                }
            }
            buffer ^= 1;
        }
        return -1;
    }

    const dwk_prefill_prepare_args &x;
    const int threads;
    const int sequence, end, head, key_head;
};

// How the segment after one with a summary starts (dwk_prefill_scan_args.forgotten).
DEVICE int *start_after(const dwk_prefill_scan_args &x, int summary, int head) {
    return x.forgotten + ((int64_t)x.summaries + summary) * x.value_heads + head;
}

// Moves the begin of a segment that is not its sequence's first to where its walk starts.
DEVICE void begin_early(const dwk_prefill_scan_args &x, Segment &segment, int head) {
    const int start = arch::uniform_value(*start_after(x, max_of(segment.summary - 1, 0), head));
    const Rows range = rows_of(x.cu_seqlens, segment.sequence, x.tokens);
    const int chunks = min_of(max_of(start >> 1, 0), (segment.begin - range.begin) / chunk);
    segment.quiet = chunks * chunk;
    segment.begin -= segment.quiet;
    segment.record -= chunks;
    segment.from_zeros = chunks > 0 && start & 1;
}

} // namespace prefill
