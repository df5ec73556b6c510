// Segments of prefill_fused that the gates may choose, where only the device knows the lengths. The rule is that of
// src/ops/prefill/plan/uneven.rs, in integers, so that host and device cut alike. Costs are in sixteenths of the time
// of a chunk.
#pragma once

#include "plan_batch.h"

namespace plan {

constexpr int most_samples = 8;
constexpr int no_cut = 0x7fffffff; // its cost

// Division by one number, of numbers up to 2^23.
class Divisor {
  public:
    DEVICE_MEMBER explicit Divisor(int by) : by(max_of(by, 1)), per(arch::reciprocal((float)max_of(by, 1))) {}
    DEVICE_MEMBER int quotient(int n) const {
        const int near = (int)((float)n * per), rest = n - near * by;
        return near + (rest >= by) - (rest < 0);
    }
    DEVICE_MEMBER int rounded_up(int n) const { return quotient(n + by - 1); }

  private:
    const int by;
    const float per;
};

// A way to cut: the `whole` longest sequences not at all, the others into segments of about `longer` chunks, and what
// is left of each into segments of about `shorter`; 0: it lengthens the longer ones.
struct Candidate {
    static constexpr int count = 128, with_rests = 96, parts_count = 5, shorts_of_round = 4;
    int whole, longer, shorter;
    bool exists;

    DEVICE_MEMBER Candidate(const dwk_prefill_choice &x, const Batch &batch, int index) {
        if (index < with_rests) {
            const int64_t mean = ((int64_t)batch.total * x.fused_workgroups + x.compute_units - 1) / x.compute_units;
            const int first = max_of((int)min_of<int64_t>(mean, 1 << 22), x.least_chunks);
            const int step = index / parts_count, number = index - step * parts_count;
            const int parts = number == parts_count - 1 ? 8 : number + 1;
            whole = 0;
            longer = first + step * first / 64;
            shorter = max_of(Divisor(parts).quotient(longer), x.least_chunks);
            exists = longer < batch.longest;
        } else {
            const int round = (index - with_rests) / shorts_of_round;
            whole = (int)((u32)(round * x.compute_units) / (u32)x.fused_workgroups);
            longer = ((index - with_rests) % shorts_of_round + 1) * x.least_chunks;
            shorter = 0;
            exists = whole < batch.sequences;
        }
    }
};

// Segments of a sequence of so many chunks: `longs` of the same length but for a chunk, then `shorts` likewise. No
// longs: it is whole.
struct Pieces {
    int chunks, rest, longs, shorts; // `rest`: chunks of all short ones

    DEVICE_MEMBER Pieces(const Candidate &x, const Divisor &longer, const Divisor &shorter, int chunks, int rank)
        : chunks(chunks), rest(0), longs(0), shorts(0) {
        if (rank < x.whole) {
            return;
        }
        longs = longer.quotient(chunks);
        if (longs > 0 && x.shorter > 0) {
            const int left = chunks - longs * x.longer, full = shorter.quotient(left);
            shorts = full + (left - full * x.shorter > x.shorter / 2);
            rest = shorts > 0 ? left : 0;
        }
    }
    DEVICE_MEMBER int count() const { return max_of(longs + shorts, 1); }
};

// Place of this lane's sequence, longest first, otherwise in order.
DEVICE int rank_of(const Batch &batch) {
    int rank = 0;
#pragma unroll 1
    for (int i = 0; i < batch.sequences; ++i) {
        const int n = arch::read_lane(batch.first_chunks, i);
        rank += n > batch.first_chunks || (n == batch.first_chunks && i < arch::lane());
    }
    return rank;
}

// Cost of a candidate, of which each lane may have its own; no_cut: it is none.
DEVICE int cost_of_cut(const dwk_prefill_choice &x, const Batch &batch, const Candidate &candidate, int ranks) {
    constexpr int most = 1 << 30;
    const Divisor longer(candidate.longer), shorter(candidate.shorter);
    // Numbers of segments, and costs of the longest. `small`: of sequences that are too short for a cut.
    int items = 0, longs = 0, long_cost = 0, shorts = 0, short_cost = 0, small = 0, longest_small = 0;
#pragma unroll 1
    for (int i = 0; i < batch.sequences; ++i) {
        const int n = arch::read_lane(batch.first_chunks, i), rank = arch::read_lane(ranks, i);
        const Pieces pieces(candidate, longer, shorter, n, rank);
        const int whole_cost = 16 * n + x.start;
        items += pieces.count();
        if (rank < candidate.whole) {
            longs += 1;
            long_cost = max_of(long_cost, whole_cost);
        } else if (pieces.longs == 0) {
            small += whole_cost;
            longest_small = max_of(longest_small, whole_cost);
        } else {
            const int each = Divisor(pieces.longs).rounded_up(n - pieces.rest);
            const int cost = 16 * each + x.start + (pieces.longs > 1 ? x.warm_up : 0);
            const bool first = candidate.whole == 0;
            longs += first ? pieces.longs : 0;
            long_cost = first ? max_of(long_cost, cost) : long_cost;
            shorts += first ? 0 : pieces.longs;
            short_cost = first ? short_cost : max_of(short_cost, cost);
        }
        if (pieces.shorts > 0) {
            shorts += pieces.shorts;
            const int each = Divisor(pieces.shorts).rounded_up(pieces.rest);
            short_cost = max_of(short_cost, 16 * each + x.start + x.warm_up);
        }
    }
    if (!candidate.exists || items <= batch.sequences || items > batch.sequences + x.room) {
        return no_cut;
    }
    short_cost = max_of(max_of(short_cost, longest_small), 1);
    const u32 units = x.compute_units, workgroups = x.fused_workgroups;
    const u32 all_shorts = (shorts + (u32)ceil_of(small, short_cost)) * workgroups;
    const u32 rounds = longs * workgroups / units, busy = longs * workgroups - rounds * units;
    const int64_t begin = (int64_t)rounds * long_cost, end = begin + long_cost;
    int64_t time;
    if (busy == 0) {
        time = begin + (int64_t)ceil_of(all_shorts, units) * short_cost;
    } else {
        // Compute units without a long segment in the last round begin short ones before the others.
        const u32 fit = (u32)long_cost / (u32)short_cost, idle = units - busy;
        const int64_t left = all_shorts - (int64_t)fit * idle;
        if (left <= 0) {
            time = end;
        } else {
            const u32 full = (u32)left / units, rest = (u32)left - full * units;
            const int64_t first = begin + (int64_t)(fit + full + (rest > 0)) * short_cost;
            time = max_of<int64_t>(first, end + (int64_t)(full + (rest > idle)) * short_cost);
        }
    }
    return (int)min_of<int64_t>(time, most);
}

// The cheapest way to cut: its number and cost.
struct Cheapest {
    static constexpr int waves = Candidate::count / arch::lanes;
    int cost[waves];
    int index[waves];

    // Evaluates the candidates, in the first waves of a workgroup, which then wait for each other.
    DEVICE_MEMBER void evaluate(const dwk_prefill_choice &x, const Batch &batch) {
        const int wave = arch::uniform_value(arch::wave());
        if (wave >= waves) {
            return;
        }
        const int own = wave * arch::lanes + arch::lane();
        const int costs = cost_of_cut(x, batch, Candidate(x, batch, own), rank_of(batch));
        const int least = -max_of_lanes(-costs);
        const u64 found = arch::ballot(costs == least);
        if (arch::lane() == 0) {
            cost[wave] = batch.total > 1 << 22 ? no_cut : least;
            index[wave] = wave * arch::lanes + __builtin_ctzll(found);
        }
    }
    DEVICE_MEMBER int best() const {
        int wave = 0;
        for (int i = 1; i < waves; ++i) {
            wave = cost[i] < cost[wave] ? i : wave;
        }
        return wave;
    }
};

// Makes the list of segments of a candidate, `items_count` items, and the samples of gates. `or_split`: whether the
// split path has items. For one wave, which has all sequences.
DEVICE void list_cut(const dwk_prefill_choice &x, const Batch &batch, int index, bool or_split, dwk_prefill_item *items,
                     int items_count) {
    const int lane = arch::lane(), n = batch.first_chunks, rank = rank_of(batch);
    const bool inside = lane < batch.sequences;
    const Candidate candidate(x, batch, index);
    const Pieces pieces(candidate, Divisor(candidate.longer), Divisor(candidate.shorter), n, rank);
    const int count = inside ? pieces.count() : 0, longs = inside ? pieces.longs : 0;
    const int shorts = inside ? pieces.shorts : 0;
    const u64 cut = arch::ballot(count > 1), lower = ((u64)1 << lane) - 1;
    const int summary = count > 1 ? __builtin_popcountll(cut & lower) + 1 : 0;
    // Even lengths: so many chunks, and one more from some segment on.
    const int of_longs = n - pieces.rest;
    const int each_long = Divisor(longs).quotient(of_longs), each_short = Divisor(shorts).quotient(pieces.rest);
    const int longer_from = longs - (of_longs - longs * each_long);
    const int shorter_from = shorts - (pieces.rest - shorts * each_short);
    const auto put = [&](int at, const dwk_prefill_item &item) __attribute__((always_inline)) {
        if (at < items_count) {
            items[at] = item;
        }
    };
    int at = 0; // next item
    // Longest first: whole sequences, long segments, short ones, and sequences that are too short for a cut.
    const auto put_whole = [&](bool own) __attribute__((always_inline)) {
        const u64 are = arch::ballot(own);
        if (own) {
            put(at + __builtin_popcountll(are & lower), dwk_prefill_item{lane, 0, n, 0});
        }
        at += __builtin_popcountll(are);
    };
    const auto put_segments = [&](int begin, int parts, int each, int one_more_from,
                                  bool last) __attribute__((always_inline)) {
#pragma unroll 1
        for (u64 left = arch::ballot(parts > 0); left; left &= left - 1) {
            const int sequence = __builtin_ctzll(left);
            const auto of = [&](int x) __attribute__((always_inline)) { return arch::read_lane(x, sequence); };
            const int first = of(begin), number = of(parts), chunks = of(each), more = of(one_more_from);
            const int of_last = of(last ? summary : 0);
#pragma unroll 1
            for (int i = lane; i < number; i += arch::lanes) {
                put(at + i, dwk_prefill_item{sequence, first + i * chunks + max_of(i - more, 0), chunks + (i >= more),
                                             i + 1 == number ? of_last : 0});
            }
            at += number;
        }
    };
    put_whole(inside && longs == 0 && rank < candidate.whole);
    put_segments(0, longs, each_long, longer_from, shorts == 0);
    const bool small = inside && longs == 0 && rank >= candidate.whole;
    put_whole(small && n >= candidate.shorter);
    put_segments(of_longs, shorts, each_short, shorter_from, true);
    put_whole(small && n < candidate.shorter);
#pragma unroll 1
    for (int i = at + lane; i < items_count; i += arch::lanes) {
        items[i] = dwk_prefill_item{-1, 0, 0, 0};
    }
    // In the chunk before a segment. Segments that start early are counted in the order of their tokens.
    const int end = (int)arch::inclusive_sum((float)max_of(count - 1, 0));
    const int early = arch::read_lane(end, arch::lanes - 1), samples = min_of(early, most_samples);
    if (lane == 0) {
        x.samples[0] = samples;
        x.samples[1] = or_split;
    }
#pragma unroll 1
    for (int i = 0; i < samples; ++i) {
        const int wanted = (u32)(i * early) / (u32)samples;
        const int sequence = __builtin_ctzll(arch::ballot(end > wanted));
        const auto of = [&](int x) __attribute__((always_inline)) { return arch::read_lane(x, sequence); };
        const int segment = wanted - of(end) + of(count), in_rest = segment - of(longs);
        const int first = in_rest < 0 ? segment * of(each_long) + max_of(segment - of(longer_from), 0)
                                      : of(of_longs) + in_rest * of(each_short) + max_of(in_rest - of(shorter_from), 0);
        if (lane == 0) {
            x.samples[2 + 2 * i] = sequence;
            x.samples[3 + 2 * i] = of(batch.first_start) + (first - 1) * chunk;
        }
    }
}

} // namespace plan
