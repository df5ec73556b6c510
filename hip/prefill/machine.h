// Rule by which the device cuts the sequences of a prefill with prefill_scan. It is that of
// src/ops/prefill/plan/machine.rs, in integers, so that host and device cut alike.
//
// A candidate is a number of segments of the longest sequence: 2, 3, 4, 6, .. 192, and the number that fills the
// device. Its segments have the chunks of the longest sequence over that number, and shorter sequences stay whole. Its
// cost is the modelled time of prefill_scan, prefill_summarise and prefill_combine.
#pragma once

#include "plan_batch.h"

namespace plan {

constexpr int least_chunks = 4; // of a segment
constexpr int eighths = 8;      // of the longest segment: shares of the lengths that are counted
constexpr int one = 1024;       // denominator of shares

// Number of segments of the longest sequence in a candidate; below 2: nothing is cut.
DEVICE int segments_of(const dwk_prefill_machine &x, const Batch &batch, int index) {
    if (index == candidates - 1) {
        return x.filling - batch.sequences;
    }
    return index % 2 ? 1 << (index + 1) / 2 : 3 << index / 2 >> 1;
}

// Time of a chunk with so many workgroups, of which each compute unit has its share.
DEVICE int chunk_time(const dwk_kernel_time &x, int64_t workgroups, int compute_units) {
    int time = x.chunk;
#pragma unroll 1
    for (int i = 1; i < x.residency; ++i) {
        time += workgroups > (int64_t)i * compute_units ? x.each_more : 0;
    }
    return time;
}

// Time of a chunk of each workgroup, where the workgroups of so many segments take turns.
DEVICE int64_t rounds_time(const dwk_kernel_time &x, int segments, int compute_units) {
    const u32 workgroups = (u32)segments * x.workgroups, at_once = (u32)compute_units * x.residency;
    const u32 rounds = workgroups / at_once, left = workgroups - rounds * at_once;
    const int64_t time = (int64_t)rounds * chunk_time(x, at_once, compute_units);
    return time + (left > 0 ? chunk_time(x, left, compute_units) : 0);
}

// Modelled time with segments of so many chunks; negative: there are too many of them.
DEVICE int64_t time_of(const dwk_prefill_machine &x, const Batch &batch, int segment) {
    int summaries = 0, chained = 0, at_least[eighths] = {};
#pragma unroll 1
    for (int block = 0; block < batch.blocks(); ++block) {
        const int n = batch.chunks(block), followed = followed_of(n, segment), rest = n - followed * segment;
        summaries += followed;
        chained += __builtin_popcountll(arch::ballot(followed > 1));
        for (int i = 0; i < eighths; ++i) {
            at_least[i] += __builtin_popcountll(arch::ballot(eighths * (int64_t)rest >= (i + 1) * (int64_t)segment));
        }
    }
    summaries = sum_of_lanes(summaries);
    if (summaries > x.most_summaries) {
        return -1;
    }
    int64_t longest = 0;
    for (int i = 0; i < eighths; ++i) {
        longest += chunk_time(x.scan, (int64_t)(at_least[i] + summaries) * x.scan.workgroups, x.compute_units);
    }
    const int segments = batch.sequences + summaries;
    const int64_t mean = (u32)ceil_of((int)((u32)batch.total * chunk), max_of(segments, 1)); // in tokens
    int64_t time =
        max_of<int64_t>(longest * segment / eighths, rounds_time(x.scan, segments, x.compute_units) * mean / chunk);
    const int workgroups = segments * x.scan.workgroups;
    if (workgroups > x.compute_units) {
        const int rounds = ceil_of(workgroups, x.compute_units * x.scan.residency);
        time += (int64_t)(8 * rounds - 7) * x.shared_start;
    }
    if (summaries > 0) {
        const int64_t walked = rounds_time(x.summarise, summaries, x.compute_units) * segment;
        time += x.launch + x.summarised * walked / one;
    }
    if (chained > 0) {
        const int steps = followed_of(batch.longest, segment) - 1;
        time +=
            x.combine_launch + (int64_t)steps * ceil_of(chained * x.combine_workgroups, x.compute_units) * x.combine;
    }
    return time;
}

// Modelled times of the candidates, and the chunks of their longest segments.
struct Times {
    int64_t of[candidates]; // negative: it is none
    int segment[candidates];
};

// Evaluates all candidates. All threads of the workgroup, of so many waves, take part. They wait for each other before
// they choose.
template <int Waves> DEVICE void evaluate(Times &times, const dwk_prefill_machine &x, const Batch &batch) {
#pragma unroll 1
    for (int i = 0; i < candidates / Waves; ++i) {
        const int index = arch::wave() + i * Waves, segments = max_of(segments_of(x, batch, index), 1);
        const bool exists = index == 0 || (segments > 1 && segments * (int64_t)least_chunks <= batch.longest);
        const int segment = exists ? max_of(ceil_of(batch.longest, segments), 1) : 0;
        const int64_t time = exists ? time_of(x, batch, segment) : -1;
        if (arch::lane() == 0) {
            times.of[index] = time;
            times.segment[index] = segment;
        }
    }
}

// How the longest sequence is cut: chunks of a segment, and the modelled time.
struct Chosen {
    int segment;
    int64_t time;
};

// Chooses, among the candidates within x.fewer of the fastest, the one with the fewest segments.
DEVICE Chosen chosen(const Times &times, const dwk_prefill_machine &x) {
    const int64_t none = (int64_t)1 << 62;
    int64_t least = none;
    for (int i = 1; i < candidates; ++i) {
        least = times.of[i] >= 0 && times.of[i] < least ? times.of[i] : least;
    }
    const int64_t worthwhile = times.of[0] * x.worthwhile;
    const int64_t most = least == none ? -1 : min_of<int64_t>(worthwhile, least * x.fewer);
    Chosen found{0, 0};
    for (int i = 1; i < candidates; ++i) {
        const bool fast = times.of[i] >= 0 && one * times.of[i] <= most;
        if (fast && times.segment[i] > found.segment) {
            found = Chosen{times.segment[i], times.of[i]};
        }
    }
    return found.segment > 0 ? found : Chosen{times.segment[0], times.of[0]};
}

} // namespace plan
