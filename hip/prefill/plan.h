// Lists of segments, made on the device by one workgroup: which sequences are cut, and where. Sequences of a prefill
// with prefill_scan are cut by machine.h. The rule for prefill_fused is that of src/ops/prefill/plan/balance.rs, in
// integers, so that host and device cut alike.
//
// A candidate is the chunks of the longest segment. Sequences of c chunks are cut into ceil(c / candidate) segments of
// equal length. Candidates are chosen so that all items fit into 1 to 8 rounds of workgroups, once counting as if every
// sequence ended in a segment of its own, once in half a segment. The cost of a candidate is the greatest of
//   the mean of the workgroups' costs over the compute units
//   rounds of the items that are at least 4/8, 5/8, .. 8/8 of the candidate, times their cost
// and the summaries if anything is cut.
#pragma once

#include "machine.h"
#include "uneven.h"

namespace plan {

constexpr int first_share = 4, shares = 8;

// Chunks of each segment of a sequence, at least 1. `segments`: of a sequence; 0: of at most `candidate` chunks.
DEVICE int segment_chunks(int segments, int chunks, int candidate) {
    if (chunks == 0 || segments == 1) {
        return max_of(chunks, 1);
    }
    return ceil_of(chunks, segments > 0 ? min_of(segments, chunks) : ceil_of(chunks, candidate));
}

// A candidate; 0: none.
DEVICE int candidate_of(const dwk_prefill_plan &x, const Batch &batch, int index) {
    if (index == 0) {
        return max_of(batch.longest, 1);
    }
    const int ends = max_of(batch.nonempty - 1, 0);
    const int room = x.compute_units * ((index + 1) / 2) / x.workgroups - (index % 2 ? ends : ends / 2);
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
    for (int block = 0; block < batch.blocks(); ++block) {
        const int n = batch.chunks(block);
        if (n > 0) {
            const int each = segment_chunks(0, n, candidate), count = ceil_of(n, each);
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

// Chooses the chunks of the longest segment of a fused prefill. All threads of the workgroup, of so many waves, take
// part.
template <int Waves> DEVICE int balanced(const dwk_prefill_plan &x, const Batch &batch) {
    SHARED static int64_t costs[candidates];
    SHARED static int lengths[candidates];
#pragma unroll 1
    for (int i = 0; i < candidates / Waves; ++i) {
        const int index = arch::wave() + i * Waves;
        const int own = candidate_of(x, batch, index);
        const int64_t cost = own > 0 ? cost_of(x, batch, own) : 0;
        if (arch::lane() == 0) {
            costs[index] = cost;
            lengths[index] = own;
        }
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
template <int Waves> DEVICE void end_list(dwk_prefill_item *items, int from, int count) {
#pragma unroll 1
    for (int i = from + arch::thread(); i < count; i += Waves * arch::lanes) {
        items[i] = dwk_prefill_item{-1, 0, 0, 0};
    }
}

// Ends the list of chains after so many. For one wave.
DEVICE void end_chains(const dwk_prefill_plan &x, int chains) {
#pragma unroll 1
    for (int i = chains + arch::lane(); i < x.chains_count; i += arch::lanes) {
        x.chains[2 * i] = x.chains[2 * i + 1] = 0;
    }
}

// Modelled times of prefill_fused, and of prefill_prepare.
struct PathTimes {
    int64_t fused, prepare;
    bool takes_fused; // it takes less than prefill_prepare and prefill_scan
};

// Compares the paths, and leaves the result in shared memory. The rule is that of src/ops/prefill/plan/choice.rs, in
// integers. One wave computes it: a division of 64 bits is a long program on CDNA, so each of its lanes has another one
// of them.
DEVICE void compare_paths(const dwk_prefill_choice &x, const Batch &batch, PathTimes &out) {
    constexpr int shares_count = shares - first_share + 1;
    constexpr int of_walk = 8; // lanes of a walk: one for each share, and one for the mean. Those of the scan follow
    constexpr int of_fused = 0, of_scan = of_walk, of_prepare = 2 * of_walk;
    static_assert(shares_count < of_walk, "a lane of a walk for the mean");
    SHARED static int64_t times[of_prepare + 1];
    const int lane = arch::lane(), part = lane % of_walk;
    int at_least[shares_count] = {};
#pragma unroll 1
    for (int block = 0; block < batch.blocks(); ++block) {
        const int64_t n = batch.chunks(block);
        for (int share = first_share; share <= shares; ++share) {
            const u64 are = arch::ballot(n > 0 && 8 * n >= share * (int64_t)batch.longest);
            at_least[share - first_share] += __builtin_popcountll(are);
        }
    }
    int own_count = 0; // of this lane's share
    for (int i = 0; i < shares_count; ++i) {
        own_count = part == i ? at_least[i] : own_count;
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
    arch::wave_sync();
    const auto walk = [&](int first) __attribute__((always_inline)) {
        int64_t time = times[first];
        for (int i = 1; i <= shares_count; ++i) {
            time = max_of<int64_t>(time, times[first + i]);
        }
        return time;
    };
    const int64_t fused = walk(of_fused), prepare = times[of_prepare] + x.prepare_start;
    if (lane == 0) {
        out = PathTimes{fused, prepare, 100 * fused < 97 * (walk(of_scan) + prepare)};
    }
}

// How a batch is divided, and where the list of its items is.
struct Division {
    dwk_prefill_item *items;
    int items_count; // room
    int longest;     // chunks of the longest segment
    int segments;    // of each sequence; 0: segments of so many chunks, or evenly of at most so many
    bool evenly;
    bool halves; // whether to mark items with DWK_ITEM_HALF
    int cut;     // number of the candidate that the gates may choose (uneven.h); -1: none

    // Chunks of each segment of a sequence, at least 1.
    DEVICE_MEMBER int each(int chunks) const {
        if (segments == 0 && !evenly) {
            return longest;
        }
        return segment_chunks(segments, chunks, longest);
    }
};

// Makes the lists of items and chains (src/ops/prefill/plan.rs): first the segments that another follows, sequence by
// sequence, then the others, longer ones first. Each part of the lengths is one wave's, of so many waves.
template <int Waves> DEVICE void make_lists(const dwk_prefill_plan &x, const Batch &batch, const Division &division) {
    static_assert(parts % Waves == 0, "every wave has parts");
    SHARED static int of_part[parts];
    const int sequences = batch.sequences, longest = division.longest;
    const int wave = arch::wave(), lane = arch::lane();
    // Whether a length is of a part: parts * chunks / (longest + 1) is its number from the last part on.
    const auto is_of_part = [&](int part, int chunks) __attribute__((always_inline)) {
        const u32 given = (u32)chunks * parts, least = (parts - 1 - part) * (u32)(longest + 1);
        return given >= least && (part == 0 || given - least < (u32)(longest + 1));
    };
    const auto put = [&](int at, int sequence, int first, int chunks, int summary) __attribute__((always_inline)) {
        if (at < division.items_count) {
            division.items[at] = dwk_prefill_item{sequence, first, chunks, summary};
        }
    };

    int summaries = 0, chained = 0;
#pragma unroll 1
    for (int i = 0; i < parts / Waves; ++i) {
        const int part = wave + i * Waves;
        int count = 0;
        summaries = chained = 0;
#pragma unroll 1
        for (int block = 0; block < batch.blocks(); ++block) {
            const int n = batch.chunks(block), each = division.each(n);
            const int followed = followed_of(n, each);
            summaries += followed;
            chained += __builtin_popcountll(arch::ballot(followed > 1));
            const bool inside = block * arch::lanes + lane < sequences;
            count += __builtin_popcountll(arch::ballot(inside && is_of_part(part, n - followed * each)));
        }
        if (lane == 0) {
            of_part[part] = count;
        }
    }
    summaries = sum_of_lanes(summaries);
    arch::workgroup_sync();

    // Two segments of a sequence may need no summaries.
    const int half = division.halves && chained == 0 ? DWK_ITEM_HALF : 0;
    const u64 lower = ((u64)1 << lane) - 1;
    int chains = 0; // before a block of sequences
#pragma unroll 1
    for (int i = 0; i < parts / Waves; ++i) {
        const int part = wave + i * Waves;
        int at = summaries; // next item of this part
        for (int before = 0; before < part; ++before) {
            at += of_part[before];
        }
        int summary = 0; // before a block of sequences
        chains = 0;
#pragma unroll 1
        for (int block = 0; block < batch.blocks(); ++block) {
            const int sequence = block * arch::lanes + lane;
            const bool inside = sequence < sequences;
            const int n = batch.chunks(block), each = division.each(n);
            const int followed = followed_of(n, each);
            const int end = summary + (int)arch::inclusive_sum((float)followed), first = end - followed;
            const u64 cut = arch::ballot(followed * x.pieces > 1);
            if (block % parts == part) {
                for (int i = 0; i < followed; ++i) {
                    put(first + i, sequence, i * each, each, (first + i) * x.pieces | half);
                }
                const int chain = chains + __builtin_popcountll(cut & lower);
                if (followed * x.pieces > 1 && chain < x.chains_count) {
                    x.chains[2 * chain] = first * x.pieces;
                    x.chains[2 * chain + 1] = followed * x.pieces;
                }
            }
            const int rest = n - followed * each;
            const bool own = inside && is_of_part(part, rest);
            const u64 owned = arch::ballot(own);
            if (own) {
                put(at + __builtin_popcountll(owned & lower), sequence, followed * each, rest, end * x.pieces | half);
            }
            at += __builtin_popcountll(owned);
            chains += __builtin_popcountll(cut);
            summary = arch::read_lane(end, arch::lanes - 1);
        }
    }
    // Ends of the lists.
    end_list<Waves>(division.items, summaries + sequences, division.items_count);
#pragma unroll 1
    for (int i = chains + arch::thread(); i < x.chains_count; i += Waves * arch::lanes) {
        x.chains[2 * i] = x.chains[2 * i + 1] = 0;
    }
}

// Items of prefill_fused, if the lengths choose the path.
DEVICE int fused_items(const dwk_prefill_choice &x, const Batch &batch) {
    return batch.sequences + (x.samples ? x.room : 0);
}

// Number of the candidate that the gates may choose, or -1. `planned`: modelled time of the prefill without that
// choice. `others`: kernels after prefill_fused. `of_chunk`: time of a chunk of that.
DEVICE int candidate_of_gates(const dwk_prefill_choice &x, const Cheapest &cheapest, int64_t planned, int others,
                              int of_chunk) {
    const int best = cheapest.best();
    const int64_t walk = (int64_t)cheapest.cost[best] * of_chunk / 16;
    const int64_t time = walk + others * (int64_t)x.without_work + x.wait_time;
    const bool faster = cheapest.cost[best] != no_cut && 20 * time <= 19 * planned;
    return planned >= x.least_time && faster ? cheapest.index[best] : -1;
}

// Divides a batch, and leaves no work to the kernels of a path that is not chosen. All threads of the workgroup take
// part.
template <int Waves> DEVICE Division divide(const dwk_prefill_lengths_args &y, const Batch &batch) {
    SHARED static Times times;
    SHARED static PathTimes paths;
    SHARED static Cheapest cheapest;
    const dwk_prefill_plan &x = y.plan;
    const int longest = max_of(batch.longest, 1);
    if (x.segments > 0) {
        return Division{x.items, x.items_count, ceil_of(longest, x.segments), x.segments, true, false, -1};
    }
    if (y.machine.compute_units == 0) {
        return Division{x.items, x.items_count, balanced<Waves>(x, batch), 0, true, false, -1};
    }
    dwk_prefill_item *const split = y.choice.split_items;
    const bool gates_choose = y.choice.samples;
    if (split && arch::wave() == Waves - 1) {
        compare_paths(y.choice, batch, paths);
    }
    static_assert(Waves > Cheapest::waves, "a wave compares the paths");
    if (gates_choose) {
        cheapest.evaluate(y.choice, batch);
    }
    if (y.machine.most_summaries > 0 || gates_choose) {
        evaluate<Waves>(times, y.machine, batch);
    }
    arch::workgroup_sync();
    const bool fused = split && paths.takes_fused;
    Chosen segments{longest, 0};
    if (!fused && (y.machine.most_summaries > 0 || gates_choose)) {
        segments = chosen(times, y.machine);
    }
    int cut = -1;
    if (gates_choose) {
        const int64_t planned = fused ? paths.fused : segments.time + paths.prepare;
        const int others = fused ? y.choice.wait_time > 0 : 1 + (batch.longest > segments.segment);
        cut =
            candidate_of_gates(y.choice, cheapest, planned, others, fused ? y.choice.fused_chunk : y.choice.cut_chunk);
    }
    if (fused) {
        end_list<Waves>(split, 0, x.items_count);
        return Division{x.items, fused_items(y.choice, batch), longest, 1, true, false, cut};
    }
    if (split && cut < 0) {
        end_list<Waves>(x.items, 0, fused_items(y.choice, batch));
    }
    return Division{split ? split : x.items, x.items_count, segments.segment, 0, false, y.machine.halves != 0, cut};
}

// Makes the lists of a small batch, as make_lists does. One wave has all sequences, so nothing waits for other waves.
DEVICE void list_small(const dwk_prefill_plan &x, const Batch &batch, const Division &division) {
    const int lane = arch::lane(), sequences = batch.sequences, n = batch.first_chunks;
    const int each = division.each(n), followed = followed_of(n, each), rest = n - followed * each;
    const int end = (int)arch::inclusive_sum((float)followed), first = end - followed;
    const int summaries = arch::read_lane(end, arch::lanes - 1);
    const u64 lower = ((u64)1 << lane) - 1, cut = arch::ballot(followed * x.pieces > 1);
    const int half = division.halves && !arch::ballot(followed > 1) ? DWK_ITEM_HALF : 0;
    const auto put = [&](int at, const dwk_prefill_item &item) __attribute__((always_inline)) {
        if (at < division.items_count) {
            division.items[at] = item;
        }
    };
#pragma unroll 1
    for (int i = 0; i < followed; ++i) {
        put(first + i, dwk_prefill_item{lane, i * each, each, (first + i) * x.pieces | half});
    }
    const int chain = __builtin_popcountll(cut & lower), chains = __builtin_popcountll(cut);
    if (followed * x.pieces > 1 && chain < x.chains_count) {
        x.chains[2 * chain] = first * x.pieces;
        x.chains[2 * chain + 1] = followed * x.pieces;
    }
    // The longest sixteenth of the others first.
    const u32 given = (u32)rest * parts, sixteenth = division.longest + 1;
    const bool inside = lane < sequences;
    bool placed = !inside;
    int at = summaries, place = 0;
    for (int part = parts - 1; part >= 0; --part) {
        const bool own = !placed && given >= part * sixteenth;
        const u64 owned = arch::ballot(own);
        place = own ? at + __builtin_popcountll(owned & lower) : place;
        placed |= own;
        at += __builtin_popcountll(owned);
    }
    if (inside) {
        put(place, dwk_prefill_item{lane, followed * each, rest, end * x.pieces | half});
    }
#pragma unroll 1
    for (int i = at + lane; i < division.items_count; i += arch::lanes) {
        division.items[i] = dwk_prefill_item{-1, 0, 0, 0};
    }
    end_chains(x, chains);
}

// Chooses a path for a small batch and makes its list, where no sequence is cut on either.
DEVICE void list_whole(const dwk_prefill_plan &plan, const dwk_prefill_choice &x, const Batch &batch) {
    SHARED static PathTimes paths;
    compare_paths(x, batch, paths);
    arch::wave_sync();
    const bool fused = paths.takes_fused;
    dwk_prefill_item *const items = fused ? plan.items : x.split_items;
    list_small(plan, batch, Division{items, batch.sequences, max_of(batch.longest, 1), 0, false, false, -1});
    if (arch::lane() < batch.sequences) {
        (fused ? x.split_items : plan.items)[arch::lane()] = dwk_prefill_item{-1, 0, 0, 0};
    }
}

} // namespace plan
