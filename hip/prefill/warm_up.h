// Warm-up: a segment that is not its sequence's first may start its walk some chunks early, from zeros, if these chunks
// forget what was before them. It then needs no summary of the segments before it.
//
// A state may have grown in earlier chunks, if keys are long or beta is not within 0 and 2. So two bounds hold: the
// chunks that are walked early, and every longer run of a window of chunks, leave less than 2^-64 (forget.h) of what
// each earlier chunk of the window added. The whole window leaves nothing in f32 of any state before it.
//
// Contract of a target: <target>/growth.h may supply
//   finds_squares          whether it supplies the following
//   greatest_squares<T>(out, x, sequence, token, step, count, head)
//                          this lane's parts of the greatest |k|^2 of some chunks
#pragma once

#include "../tensor/pieces.h"
#include "../tensor/rows.h"
#include "forget.h"
#include "gates.h"
#include "recurrence.h"

#if defined(__NVPTX__)
namespace prefill {
constexpr bool finds_squares = false;
} // namespace prefill
#else
#include "gfx9/growth.h"
#endif

namespace prefill {

// Chunks whose bounds add up to less than this leave nothing of any state in f32. Its elements are below 2^128, so the
// norm of a column of up to 256 elements is below 2^132. Numbers below 2^-150 are 0.
constexpr float nothing_of_any = -288.0f;

// log2 of what a window may leave of the state before it. With keys of length 1, and beta as the kernels compute it, no
// state can grow, so that window and early chunks are the same.
DEVICE float forgotten_before(const dwk_prefill_prepare_args &x) {
    constexpr u32 no_growth = DWK_QK_L2NORM | DWK_RAW_GATES;
    return (x.flags & no_growth) == no_growth ? forgotten_below : nothing_of_any;
}

// Chunks that are looked at first.
constexpr int first_looked_at = 8;

// Finds how many of the chunks that end at token `end`, the begin of a chunk of a sequence, forget. All threads of the
// workgroup, one for each token, take part and get the same numbers.
template <class T, int Threads> class Forgetting {
  public:
    DEVICE_MEMBER Forgetting(const dwk_prefill_prepare_args &x, int threads, int sequence, int end, int head,
                             int key_head)
        : x(x), threads(threads), sequence(sequence), end(end), head(head), key_head(key_head) {}

    // Least number of early chunks, in a window of at most `most`. -1: there is none.
    DEVICE_MEMBER int chunks(int most) const {
        if (most <= 0) {
            return -1;
        }
        if constexpr (finds_squares) {
            const int early = first_chunks(most);
            if (early >= 0) {
                return early;
            }
        }
        const Found by_gates = search(most, false);
        if (by_gates.early < 0 || x.flags & DWK_QK_L2NORM || !any_growth(by_gates.window)) {
            return by_gates.early;
        }
        // Long keys may make states grow, so that more chunks are needed, or all are too few. Rows of K are read only
        // where gates alone would be enough.
        const int early = search(by_gates.window, true).early;
        return early >= 0 || by_gates.window == most ? early : search(most, true).early;
    }

  private:
    // Chunks before `end` to walk early, and chunks of the window.
    struct Found {
        int early, window;
    };

    static constexpr int waves = Threads / arch::lanes, waves_of_chunk = chunk / arch::lanes;

    // log2 of a bound on how much a token scales the norm of any state, if that may grow along a key of this |k|^2.
    static DEVICE_MEMBER float bound_of(Gates gates, bool may, float key_square) {
        float bound = gates.g * math::log2e;
        if (may) {
            const float by = growth(gates.beta, key_square);
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

    // `chunks` for a window of a few chunks in which no state may grow, sooner than by `search`: half of the waves sum
    // gates, the others look at keys meanwhile. -1: there is no such window.
    DEVICE_MEMBER int first_chunks(int most) const {
        constexpr int count = first_looked_at, halves = waves / 2, of_wave = count / halves;
        static_assert(count % halves == 0, "each wave has as many chunks");
        SHARED static float sums[count];
        SHARED static int greatest[2][count]; // beta, |k|^2
        const int wave = arch::wave(), number = wave % halves, last = arch::lanes - 1;
        const bool of_unit_length = x.flags & DWK_QK_L2NORM;
        if (wave < halves) {
            int g[of_wave], beta[of_wave]; // bits in memory
            // Of one type, so that nothing waits between the loads.
            const bool together = x.g && x.beta && x.g_type == x.beta_type;
            if (together && x.g_type == DWK_F32) {
                load_gates<int>(g, beta, number, halves, most);
            } else if (together) {
                load_gates<unsigned short>(g, beta, number, halves, most);
            }
            for (int i = 0; i < of_wave; ++i) {
                const int n = number + i * halves;
                const GateReader reader(x, sequence, end - (n + 1) * chunk + arch::lane(), n < most);
                const Gates gates = reader.gates_of(head, [&]() __attribute__((always_inline)) {
                    return together ? reader.numbers({g[i], beta[i]}) : reader.load(head);
                });
                const float sum = arch::inclusive_sum(bound_of(gates, of_unit_length && n < most, 1.0f));
                const int most_beta = arch::inclusive_max(order_of(gates.beta));
                if (arch::lane() == last) {
                    sums[n] = sum;
                    greatest[0][n] = most_beta;
                }
            }
        } else if (!of_unit_length) {
            int squares[of_wave];
            const int exist = (most - number + halves - 1) / halves;
            greatest_squares<T>(squares, x, sequence, end - (number + 1) * chunk, halves * chunk, exist, key_head);
            for (int i = 0; i < of_wave; ++i) {
                const int square = arch::inclusive_max(squares[i]);
                if (arch::lane() == last) {
                    greatest[1][number + i * halves] = square;
                }
            }
        }
        arch::workgroup_sync();
        const float least = forgotten_before(x);
        float sum = 0.0f;
        int early = 1, beta = 0, square = 0;
        for (int i = 0; i < count && i < most; ++i) {
            sum += sums[i];
            beta = max_of(beta, greatest[0][i]);
            square = max_of(square, of_unit_length ? 0 : greatest[1][i]);
            if (!(sum < forgotten_below)) {
                early = i + 2;
            }
            if (sum < least) {
                return arch::uniform_value(may_grow(beta, square) ? -1 : early);
            }
        }
        return -1;
    }

    // Loads bits of g and beta of this lane's token of N chunks, counted backwards from chunk `number` on in steps of
    // `step`. Of chunks from `most` on it loads others instead.
    template <class Bits, int N>
    DEVICE_MEMBER void load_gates(int (&g)[N], int (&beta)[N], int number, int step, int most) const {
        for (int i = 0; i < N; ++i) {
            const int token = end - (min_of(number + i * step, most - 1) + 1) * chunk + arch::lane();
            g[i] = ((const Bits *)x.g)[token_offset(x.g_strides, sequence, token, head)];
            beta[i] = ((const Bits *)x.beta)[token_offset(x.beta_strides, sequence, token, head)];
        }
    }

    // Bits of numbers from 0 on are in the order of the numbers. Negative ones and NaNs count as infinity.
    static DEVICE_MEMBER int order_of(float x) { return x >= 0.0f ? bits<int>(x) : 0x7f800000; }

    // Whether such a beta and |k|^2, as bits, may make a state grow. Sums in another order may differ by less.
    static DEVICE_MEMBER bool may_grow(int beta, int square) {
        return !(bits<float>(beta) * bits<float>(square) < 1.999f);
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
                square = max_of(square, order_of(arch::row_sum(sum)));
            }
        }
        const int beta = arch::inclusive_max(order_of(gates_of(end - 1 - thread, thread < tokens).beta));
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
        return arch::uniform_value(may_grow(most_beta, most_square));
    }

    DEVICE_MEMBER Gates gates_of(int token, bool inside) const {
        const GateReader reader(x, sequence, token, inside);
        return reader.gates_of(head, [&]() __attribute__((always_inline)) { return reader.load(head); });
    }

    // `chunks`, with the growth of keys or as if no state grew along them.
    DEVICE_MEMBER Found search(int most, bool with_keys) const {
        SHARED static float sums[2][waves];
        const int at_once = threads / chunk;
        const float least = forgotten_before(x);
        float sum = 0.0f; // of the bounds of later chunks
        int early = 1;    // one more than the longest run that does not forget
        int buffer = 0;
        arch::workgroup_sync();
#pragma unroll 1
        for (int first = 0; first < most; first += at_once) {
            // Chunks count backwards.
            const int number = first + arch::thread() / chunk;
            const int token = end - (number + 1) * chunk + arch::thread() % chunk;
            const bool inside = number < most, grows = inside && (with_keys || x.flags & DWK_QK_L2NORM);
            const float bound = bound_of(gates_of(token, inside), grows, grows && with_keys ? key_square(token) : 1.0f);
            const float of_wave = arch::inclusive_sum(bound);
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
                if (!(sum < forgotten_below)) {
                    early = first + i + 2;
                }
                if (sum < least) {
                    return Found{arch::uniform_value(early), arch::uniform_value(first + i + 1)};
                }
            }
            buffer ^= 1;
        }
        return Found{-1, 0};
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
