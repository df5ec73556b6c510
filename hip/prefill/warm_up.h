// Warm-up: a segment that is not its sequence's first may start its walk some chunks early, from zeros, if these chunks
// forget what was before them. It then needs no summary of the segments before it.
//
// Nothing is known of the chunks before these. A state may have grown in them, if keys are long or beta is not within 0
// and 2. So only where no state can grow 2^-64 of it count as nothing (forget.h); otherwise nothing may be left in f32.
#pragma once

#include "../tensor/pieces.h"
#include "../tensor/rows.h"
#include "forget.h"
#include "gates.h"
#include "recurrence.h"

namespace prefill {

// Chunks whose bounds add up to less than this leave nothing of any state in f32. Its elements are below 2^128, so the
// norm of a column of up to 256 elements is below 2^132. Numbers below 2^-150 are 0.
constexpr float nothing_of_any = -288.0f;

// log2 of what chunks may leave of the states before them. With keys of length 1, and beta as the kernels compute it,
// no state can grow.
DEVICE float forgotten_early(const dwk_prefill_prepare_args &x) {
    constexpr u32 no_growth = DWK_QK_L2NORM | DWK_RAW_GATES;
    return (x.flags & no_growth) == no_growth ? forgotten_below : nothing_of_any;
}

// Finds how many of the chunks that end at token `end`, the begin of a chunk of a sequence, forget. All threads of the
// workgroup, one for each token, take part and get the same numbers.
template <class T, int Threads> class Forgetting {
  public:
    DEVICE_MEMBER Forgetting(const dwk_prefill_prepare_args &x, int threads, int sequence, int end, int head,
                             int key_head)
        : x(x), threads(threads), sequence(sequence), end(end), head(head), key_head(key_head) {}

    // Least number of chunks, at most `most`, that forget what was before them. -1: none does.
    DEVICE_MEMBER int chunks(int most) const {
        const int by_gates = search(most, false);
        if (by_gates < 0 || x.flags & DWK_QK_L2NORM || !any_growth(by_gates)) {
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
        const Gates gates = gates_of(token, inside);
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

    // Whether a token of `count` chunks may make a state grow along its key: whether the greatest beta times the
    // greatest |k|^2 reaches 2, or a beta is negative. True also if there are more tokens than threads. 16 lanes read a
    // row.
    DEVICE_MEMBER bool any_growth(int count) const {
        SHARED static int greatest[2][waves];
        constexpr int at_once = 8;
        const int tokens = count * chunk, thread = arch::thread(), rows = threads / 16;
        if (tokens > threads) {
            return true;
        }
        const char *const last = arch::uniform_pointer(row_address(x.k, x.k_strides, sequence, end - 1, key_head));
        const int64_t step = 2 * x.k_strides.token;
        const bool whole = arch::in_one_access(last) && arch::in_one_access((const void *)(u64)step);
        const int key = thread % 16 * piece::octet;
        const bool inside = key < x.key_dim;
        // Bits of numbers from 0 on are in the order of the numbers. Negative ones and NaNs count as infinity.
        const int infinity = 0x7f800000;
        const auto order = [](float x) { return x >= 0.0f ? bits<int>(x) : infinity; };
        int square = 0;
#pragma unroll 1
        for (int first = thread / 16; first < tokens; first += at_once * rows) {
            i32x4 loaded[at_once];
            for (int i = 0; i < at_once; ++i) {
                const int row = min_of(first + i * rows, tokens - 1);
                loaded[i] = inside ? piece::load<false>(last - row * step + 2 * key, whole) : i32x4{};
            }
            for (int i = 0; i < at_once; ++i) {
                const piece::Octet k = piece::widened<T>(loaded[i]);
                float sum = 0.0f;
                for (int e = 0; e < piece::octet; ++e) {
                    sum = __builtin_fmaf(k[e], k[e], sum);
                }
                square = max_of(square, order(arch::row_sum(sum)));
            }
        }
        const int beta = arch::inclusive_max(order(gates_of(end - 1 - thread, thread < tokens).beta));
        square = arch::inclusive_max(square);
        if (arch::lane() == arch::lanes - 1) {
            greatest[0][thread / arch::lanes] = beta;
            greatest[1][thread / arch::lanes] = square;
        }
        arch::workgroup_sync();
        int most_beta = 0, most_square = 0;
        for (int w = 0; w < threads / arch::lanes; ++w) {
            most_beta = max_of(most_beta, greatest[0][w]);
            most_square = max_of(most_square, greatest[1][w]);
        }
        // Sums in another order may differ by less.
        return !(arch::uniform_value(bits<float>(most_beta) * bits<float>(most_square) < 1.999f));
    }

    DEVICE_MEMBER Gates gates_of(int token, bool inside) const {
        const GateReader reader(x, sequence, token, inside);
        return reader.gates_of(head, [&]() __attribute__((always_inline)) { return reader.load(head); });
    }

    // `chunks`, with the growth of keys or as if no state grew along them.
    DEVICE_MEMBER int search(int most, bool with_keys) const {
        SHARED static float sums[2][waves];
        const int at_once = threads / chunk;
        const float least = forgotten_early(x);
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
                if (sum < least) {
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
