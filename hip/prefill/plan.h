// Lists of segments, made on the device by one workgroup: which sequences are cut, and where. The
// rule is that of src/ops/prefill/plan/balance.rs, in integers, so that host and device cut alike.
//
// A candidate is the chunks of the longest segment. Sequences of c chunks are cut into ceil(c / candidate) segments of
// equal length. Candidates are chosen so that all items fit into 1 to 8 rounds of workgroups, once counting as if every
// sequence ended in a segment of its own, once in half a segment. The cost of a candidate is the greatest of
//   the mean of the workgroups' costs over the compute units
//   rounds of the items that are at least 4/8, 5/8, .. 8/8 of the candidate, times their cost
// and the summaries if anything is cut.
#pragma once

#include "batch.h"

namespace plan {

using prefill::chunk;

constexpr int waves = 16;
constexpr int candidates = waves; // one for each wave; the first cuts nothing
constexpr int first_share = 4, shares = 8;

DEVICE int ceil_of(int a, int b) { return (int)(((u32)a + (u32)b - 1) / (u32)b); }

// Chunks of each segment of a sequence, at least 1.
DEVICE int segment_chunks(const dwk_prefill_plan &x, int chunks, int candidate) {
    if (chunks == 0) {
        return 1;
    }
    return ceil_of(chunks, x.segments > 0 ? min_of(x.segments, chunks) : ceil_of(chunks, candidate));
}

// Sum over the lanes of a wave of numbers from 0 on. Exact: each half is below 2^24 in f32.
DEVICE int sum_of_lanes(int x) {
    const float low = arch::inclusive_sum((float)(x & 0xfff)), high = arch::inclusive_sum((float)(x >> 12));
    return arch::read_lane((int)low, arch::lanes - 1) + (arch::read_lane((int)high, arch::lanes - 1) << 12);
}
DEVICE int max_of_lanes(int x) { return arch::read_lane(arch::inclusive_max(x), arch::lanes - 1); }

// Lengths of a batch, and totals of its chunks.
struct Batch {
    const int32_t *cu_seqlens;
    int sequences;
    int total, longest, nonempty;

    DEVICE_MEMBER int chunks(int sequence) const {
        if (sequence >= sequences) {
            return 0;
        }
        return ceil_of(max_of(cu_seqlens[sequence + 1] - cu_seqlens[sequence], 0), chunk);
    }
    DEVICE_MEMBER Batch(const int32_t *cu_seqlens, int sequences) : cu_seqlens(cu_seqlens), sequences(sequences) {
        int sum = 0, greatest = 0, count = 0;
#pragma unroll 1
        for (int i = arch::lane(); i < sequences; i += arch::lanes) {
            const int n = chunks(i);
            sum += n;
            greatest = max_of(greatest, n);
            count += n > 0;
        }
        total = sum_of_lanes(sum);
        longest = max_of_lanes(greatest);
        nonempty = sum_of_lanes(count);
    }
};

// Candidate of a wave; 0: none.
DEVICE int candidate_of(const dwk_prefill_plan &x, const Batch &batch, int wave) {
    if (wave == 0) {
        return max_of(batch.longest, 1);
    }
    const int ends = max_of(batch.nonempty - 1, 0);
    const int room = x.compute_units * ((wave + 1) / 2) / x.workgroups - (wave % 2 ? ends : ends / 2);
    if (room <= 0 || x.most_summaries <= 0) {
        return 0;
    }
    const int least = max_of(x.least_chunks, ceil_of(batch.total, x.most_summaries));
    const int candidate = max_of(ceil_of(batch.total, room), least);
    return candidate < batch.longest ? candidate : 0;
}

// Cost of a candidate.
DEVICE int64_t cost_of(const dwk_prefill_plan &x, const Batch &batch, int candidate) {
    int items = 0, early = 0, at_least[shares - first_share + 1] = {};
#pragma unroll 1
    for (int i = arch::lane(); i < batch.sequences; i += arch::lanes) {
        const int n = batch.chunks(i);
        if (n > 0) {
            const int each = segment_chunks(x, n, candidate), count = ceil_of(n, each);
            items += count;
            early += count - 1;
            for (int share = first_share; share <= shares; ++share) {
                at_least[share - first_share] += 8 * (int64_t)each >= share * (int64_t)candidate ? count : 0;
            }
        }
    }
    items = sum_of_lanes(items);
    early = sum_of_lanes(early);
    const auto rounds = [&](int64_t work) __attribute__((always_inline)) {
        return (work * x.workgroups + x.compute_units - 1) / x.compute_units;
    };
    int64_t cost = rounds(16 * (int64_t)batch.total + (int64_t)x.start * items + (int64_t)x.warm_up * early);
    const int each = x.start + (early > 0 ? x.warm_up : 0);
    for (int share = first_share; share <= shares; ++share) {
        const int count = sum_of_lanes(at_least[share - first_share]);
        const int64_t length = 2 * share * (int64_t)candidate; // sixteenths
        cost = max_of<int64_t>(cost, rounds(count) * (length + each));
    }
    return cost + (early > 0 ? x.summaries : 0);
}

// Chooses the chunks of the longest segment. All threads of the workgroup take part.
DEVICE int choose(const dwk_prefill_plan &x, const Batch &batch) {
    SHARED static int64_t costs[candidates];
    SHARED static int lengths[candidates];
    const int wave = arch::wave();
    const int own = candidate_of(x, batch, wave);
    const int64_t cost = own > 0 ? cost_of(x, batch, own) : 0;
    if (arch::lane() == 0) {
        costs[wave] = cost;
        lengths[wave] = own;
    }
    arch::workgroup_sync();
    int chosen = 0;
#pragma unroll 1
    for (int i = 1; i < candidates; ++i) {
        const int64_t most = chosen == 0 ? costs[0] * x.worthwhile / 16 : costs[chosen];
        if (lengths[i] > 0 && costs[i] < most) {
            chosen = i;
        }
    }
    return lengths[chosen];
}

// Ends a list with items that do not exist.
DEVICE void end_list(dwk_prefill_item *items, int from, int count) {
#pragma unroll 1
    for (int i = from + arch::thread(); i < count; i += waves * arch::lanes) {
        items[i] = dwk_prefill_item{-1, 0, 0, 0};
    }
}

// Makes the lists of items and chains (src/ops/prefill/plan.rs): first the segments that another follows, sequence by
// sequence, then the others, longer ones first. Each wave writes the latter of one sixteenth of the lengths.
DEVICE void make_lists(const dwk_prefill_plan &x, const int32_t *cu_seqlens, int sequences) {
    SHARED static int of_wave[waves];
    const Batch batch(cu_seqlens, sequences);
    const int candidate = x.segments > 0 ? ceil_of(max_of(batch.longest, 1), x.segments) : choose(x, batch);
    const int wave = arch::wave(), lane = arch::lane();
    const auto own_length = [&](int chunks) __attribute__((always_inline)) {
        return waves - 1 - min_of((int)((u32)chunks * waves / (u32)(candidate + 1)), waves - 1) == wave;
    };
    const auto put = [&](int at, int sequence, int first, int chunks, int summary) __attribute__((always_inline)) {
        if (at < x.items_count) {
            x.items[at] = dwk_prefill_item{sequence, first, chunks, summary};
        }
    };

    int summaries = 0, count = 0;
#pragma unroll 1
    for (int i = lane; i < sequences; i += arch::lanes) {
        const int n = batch.chunks(i), each = segment_chunks(x, n, candidate);
        const int followed = max_of(ceil_of(n, each) - 1, 0);
        summaries += followed;
        count += own_length(n - followed * each);
    }
    summaries = sum_of_lanes(summaries);
    count = sum_of_lanes(count);
    if (lane == 0) {
        of_wave[wave] = count;
    }
    arch::workgroup_sync();
    int at = summaries; // next item of this wave's lengths
    for (int i = 0; i < wave; ++i) {
        at += of_wave[i];
    }

    const u64 lower = ((u64)1 << lane) - 1;
    int summary = 0, chains = 0; // before this block of sequences
#pragma unroll 1
    for (int block = 0; sequences > block * arch::lanes; ++block) {
        const int sequence = block * arch::lanes + lane;
        const bool inside = sequence < sequences;
        const int n = batch.chunks(sequence), each = segment_chunks(x, n, candidate);
        const int followed = max_of(ceil_of(n, each) - 1, 0);
        const int end = summary + (int)arch::inclusive_sum((float)followed), first = end - followed;
        const u64 chained = arch::ballot(followed > 1);
        if (block % waves == wave) {
            for (int i = 0; i < followed; ++i) {
                put(first + i, sequence, i * each, each, first + i);
            }
            const int chain = chains + __builtin_popcountll(chained & lower);
            if (followed > 1 && chain < x.chains_count) {
                x.chains[2 * chain] = first;
                x.chains[2 * chain + 1] = followed;
            }
        }
        const int rest = n - followed * each;
        const bool own = inside && own_length(rest);
        const u64 owned = arch::ballot(own);
        if (own) {
            put(at + __builtin_popcountll(owned & lower), sequence, followed * each, rest, end);
        }
        at += __builtin_popcountll(owned);
        chains += __builtin_popcountll(chained);
        summary = arch::read_lane(end, arch::lanes - 1);
    }
    // Ends of the lists.
    end_list(x.items, summaries + sequences, x.items_count);
#pragma unroll 1
    for (int i = chains + arch::thread(); i < x.chains_count; i += waves * arch::lanes) {
        x.chains[2 * i] = x.chains[2 * i + 1] = 0;
    }
}

// Whether prefill_fused takes less time than prefill_prepare and prefill_scan. The rule is that of
// src/ops/prefill/plan/choice.rs, in integers. A division of 64 bits is a long program on CDNA, so each lane of the
// first wave has another one of them.
DEVICE bool takes_fused(const dwk_prefill_choice &x, const Batch &batch) {
    constexpr int shares_count = shares - first_share + 1;
    constexpr int of_walk = 8; // lanes of a walk: one for each share, and one for the mean. Those of the scan follow
    constexpr int of_fused = 0, of_scan = of_walk, of_prepare = 2 * of_walk;
    static_assert(shares_count < of_walk, "a lane of a walk for the mean");
    SHARED static int64_t times[of_prepare + 1];
    if (arch::wave() == 0) {
        const int lane = arch::lane(), part = lane % of_walk;
        int at_least[shares_count] = {};
#pragma unroll 1
        for (int i = lane; i < batch.sequences; i += arch::lanes) {
            const int64_t n = batch.chunks(i);
            for (int share = first_share; share <= shares; ++share) {
                at_least[share - first_share] += n > 0 && 8 * n >= share * (int64_t)batch.longest;
            }
        }
        int own_count = 0; // of this lane's share
        for (int i = 0; i < shares_count; ++i) {
            const int count = sum_of_lanes(at_least[i]);
            own_count = part == i ? count : own_count;
        }
        const bool scan = lane >= of_scan;
        const int64_t workgroups = scan ? x.scan_workgroups : x.fused_workgroups;
        const int64_t of_chunk = scan ? x.scan_chunk : x.fused_chunk, start = scan ? x.scan_start : x.fused_start;
        int64_t work = own_count * workgroups;
        int64_t each = (first_share + part) * batch.longest * of_chunk / 8 + start;
        if (part >= shares_count) {
            work = (of_chunk * batch.total + start * batch.nonempty) * workgroups;
            each = 1;
        }
        if (lane == of_prepare) {
            work = (int64_t)x.prepare_chunk * batch.total;
            each = 1;
        }
        const int64_t time = (work + x.compute_units - 1) / x.compute_units * each;
        if (lane <= of_prepare) {
            times[lane] = time;
        }
    }
    arch::workgroup_sync();
    const auto walk = [&](int first) __attribute__((always_inline)) {
        int64_t time = times[first];
        for (int i = 1; i <= shares_count; ++i) {
            time = max_of<int64_t>(time, times[first + i]);
        }
        return time;
    };
    return 100 * walk(of_fused) < 97 * (walk(of_scan) + times[of_prepare] + x.prepare_start);
}

// Chooses a path, leaves no work to the kernels of the other, and returns where the chosen one's items are.
DEVICE dwk_prefill_item *chosen_items(const dwk_prefill_plan &plan, const dwk_prefill_choice &x,
                                      const int32_t *cu_seqlens, int sequences, int tokens) {
    const bool fused = takes_fused(x, Batch(cu_seqlens, sequences));
#pragma unroll 1
    for (int i = arch::thread(); i <= sequences; i += waves * arch::lanes) {
        // Empty sequences at the end of the batch have no chunk, and no row is past them.
        x.prepare_lengths[i] = fused ? tokens : cu_seqlens[i];
    }
    end_list(fused ? x.split_items : plan.items, 0, plan.items_count);
    return fused ? plan.items : x.split_items;
}

} // namespace plan
