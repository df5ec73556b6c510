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

constexpr int parts = 16;         // of the lengths of items; the longest part is listed first
constexpr int candidates = parts; // the first cuts nothing
constexpr int first_share = 4, shares = 8;

DEVICE int ceil_of(int a, int b) { return (int)(((u32)a + (u32)b - 1) / (u32)b); }

// Chunks of each segment of a sequence, at least 1.
DEVICE int segment_chunks(const dwk_prefill_plan &x, int chunks, int candidate) {
    if (chunks == 0 || x.segments == 1) {
        return max_of(chunks, 1);
    }
    return ceil_of(chunks, x.segments > 0 ? min_of(x.segments, chunks) : ceil_of(chunks, candidate));
}

// Sum over the lanes of a wave of numbers from 0 on. Exact: each half is below 2^24 in f32.
DEVICE int sum_of_lanes(int x) {
    const float low = arch::inclusive_sum((float)(x & 0xfff)), high = arch::inclusive_sum((float)(x >> 12));
    return arch::read_lane((int)low, arch::lanes - 1) + (arch::read_lane((int)high, arch::lanes - 1) << 12);
}
DEVICE int max_of_lanes(int x) { return arch::read_lane(arch::inclusive_max(x), arch::lanes - 1); }

// Lengths of a batch, and totals of its chunks. Sequences are in blocks: lane l has sequence l of each. Those of the
// first block stay in registers, because every pass over the batch would otherwise wait for memory again.
struct Batch {
    const int32_t *cu_seqlens; // in memory, for blocks after the first
    int sequences;
    int first_chunks; // of this lane's sequence in the first block
    int total, longest, nonempty;

    // Checked lengths of any number of sequences.
    DEVICE_MEMBER Batch(const int32_t *cu_seqlens, int sequences) : cu_seqlens(cu_seqlens), sequences(sequences) {
        const int lane = arch::lane();
        first_chunks = lane < sequences ? chunks_of(cu_seqlens[lane], cu_seqlens[lane + 1]) : 0;
        add_up();
    }
    // Whether the lengths need not be checked in memory first, because all starts are in one block.
    static DEVICE_MEMBER bool is_small(int sequences) { return sequences < arch::lanes; }
    // The sequences after the decodes, which are a small batch.
    DEVICE_MEMBER Batch(const dwk_prefill_lengths_args &x) : cu_seqlens(nullptr), sequences(x.sequences - x.decodes) {
        const int lane = arch::lane();
        const auto clamped = [&](int i) __attribute__((always_inline)) {
            const int start = min_of(i, sequences), at = x.decodes + start;
            const int64_t raw = x.wide ? ((const int64_t *)x.cu_seqlens)[at] : ((const int32_t *)x.cu_seqlens)[at];
            return start == 0 ? 0 : (int)(max_of<int64_t>(x.decodes, min_of<int64_t>(raw, x.tokens)) - x.decodes);
        };
        const int start = clamped(lane), end = clamped(lane + 1);
        first_chunks = chunks_of(arch::inclusive_max(start), arch::inclusive_max(end));
        add_up();
    }
    DEVICE_MEMBER int blocks() const { return ceil_of(sequences, arch::lanes); }
    // Chunks of this lane's sequence in a block; 0 past the last sequence.
    DEVICE_MEMBER int chunks(int block) const {
        if (block == 0) {
            return first_chunks;
        }
        const int sequence = block * arch::lanes + arch::lane();
        return sequence < sequences ? chunks_of(cu_seqlens[sequence], cu_seqlens[sequence + 1]) : 0;
    }

  private:
    static DEVICE_MEMBER int chunks_of(int start, int end) { return ceil_of(max_of(end - start, 0), chunk); }
    DEVICE_MEMBER void add_up() {
        int sum = 0, greatest = 0, count = 0;
#pragma unroll 1
        for (int block = 0; block < blocks(); ++block) {
            const int n = chunks(block);
            sum += n;
            greatest = max_of(greatest, n);
            count += __builtin_popcountll(arch::ballot(n > 0));
        }
        total = sum_of_lanes(sum);
        longest = max_of_lanes(greatest);
        nonempty = count;
    }
};

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

// Chooses the chunks of the longest segment. All threads of the workgroup, of so many waves, take part.
template <int Waves> DEVICE int choose(const dwk_prefill_plan &x, const Batch &batch) {
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

// Segments of a sequence that another follows. Most sequences are not cut, and a division is a long program.
DEVICE int followed_of(int chunks, int each) { return chunks > each ? ceil_of(chunks, each) - 1 : 0; }

// Makes the lists of items and chains (src/ops/prefill/plan.rs): first the segments that another follows, sequence by
// sequence, then the others, longer ones first. Each part of the lengths is one wave's, of so many waves.
template <int Waves> DEVICE void make_lists(const dwk_prefill_plan &x, const Batch &batch) {
    static_assert(parts % Waves == 0, "every wave has parts");
    SHARED static int of_part[parts];
    const int sequences = batch.sequences;
    const int candidate = x.segments > 0 ? ceil_of(max_of(batch.longest, 1), x.segments) : choose<Waves>(x, batch);
    const int wave = arch::wave(), lane = arch::lane();
    // Whether a length is of a part: parts * chunks / (candidate + 1) is its number from the last part on.
    const auto is_of_part = [&](int part, int chunks) __attribute__((always_inline)) {
        const u32 given = (u32)chunks * parts, least = (parts - 1 - part) * (u32)(candidate + 1);
        return given >= least && (part == 0 || given - least < (u32)(candidate + 1));
    };
    const auto put = [&](int at, int sequence, int first, int chunks, int summary) __attribute__((always_inline)) {
        if (at < x.items_count) {
            x.items[at] = dwk_prefill_item{sequence, first, chunks, summary};
        }
    };

    int summaries = 0;
#pragma unroll 1
    for (int i = 0; i < parts / Waves; ++i) {
        const int part = wave + i * Waves;
        int count = 0;
        summaries = 0;
#pragma unroll 1
        for (int block = 0; block < batch.blocks(); ++block) {
            const int n = batch.chunks(block), each = segment_chunks(x, n, candidate);
            const int followed = followed_of(n, each);
            summaries += followed;
            const bool inside = block * arch::lanes + lane < sequences;
            count += __builtin_popcountll(arch::ballot(inside && is_of_part(part, n - followed * each)));
        }
        if (lane == 0) {
            of_part[part] = count;
        }
    }
    summaries = sum_of_lanes(summaries);
    arch::workgroup_sync();

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
            const int n = batch.chunks(block), each = segment_chunks(x, n, candidate);
            const int followed = followed_of(n, each);
            const int end = summary + (int)arch::inclusive_sum((float)followed), first = end - followed;
            const u64 chained = arch::ballot(followed > 1);
            if (block % parts == part) {
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
            const bool own = inside && is_of_part(part, rest);
            const u64 owned = arch::ballot(own);
            if (own) {
                put(at + __builtin_popcountll(owned & lower), sequence, followed * each, rest, end);
            }
            at += __builtin_popcountll(owned);
            chains += __builtin_popcountll(chained);
            summary = arch::read_lane(end, arch::lanes - 1);
        }
    }
    // Ends of the lists.
    end_list<Waves>(x.items, summaries + sequences, x.items_count);
#pragma unroll 1
    for (int i = chains + arch::thread(); i < x.chains_count; i += Waves * arch::lanes) {
        x.chains[2 * i] = x.chains[2 * i + 1] = 0;
    }
}

// Whether prefill_fused takes less time than prefill_prepare and prefill_scan. The rule is that of
// src/ops/prefill/plan/choice.rs, in integers. One wave computes it: a division of 64 bits is a long program on CDNA,
// so each of its lanes has another one of them.
DEVICE bool takes_fused(const dwk_prefill_choice &x, const Batch &batch) {
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
    return 100 * walk(of_fused) < 97 * (walk(of_scan) + times[of_prepare] + x.prepare_start);
}

// Chooses a path, leaves no work to the kernels of the other, and returns where the chosen one's items are.
template <int Waves>
DEVICE dwk_prefill_item *chosen_items(const dwk_prefill_plan &plan, const dwk_prefill_choice &x, const Batch &batch) {
    SHARED static int chosen;
    if (arch::wave() == 0) {
        const bool fused = takes_fused(x, batch);
        if (arch::lane() == 0) {
            chosen = fused;
        }
    }
    arch::workgroup_sync();
    const bool fused = chosen;
    end_list<Waves>(fused ? x.split_items : plan.items, 0, plan.items_count);
    return fused ? plan.items : x.split_items;
}

// Chooses a path for a small batch and makes its list, as chosen_items and make_lists do: no sequence is cut where
// there is a choice. One wave has all sequences, so nothing waits for other waves.
DEVICE void list_small(const dwk_prefill_plan &plan, const dwk_prefill_choice &x, const Batch &batch) {
    const int lane = arch::lane(), sequences = batch.sequences;
    const bool fused = takes_fused(x, batch), inside = lane < sequences;
    dwk_prefill_item *const items = fused ? plan.items : x.split_items, *const others =
                                                                            fused ? x.split_items : plan.items;
    // The longest sixteenth first.
    const u64 lower = ((u64)1 << lane) - 1;
    const u32 given = (u32)batch.first_chunks * parts, sixteenth = max_of(batch.longest, 1) + 1;
    bool placed = !inside;
    int at = 0, place = 0;
    for (int part = parts - 1; part >= 0; --part) {
        const bool own = !placed && given >= part * sixteenth;
        const u64 owned = arch::ballot(own);
        place = own ? at + __builtin_popcountll(owned & lower) : place;
        placed |= own;
        at += __builtin_popcountll(owned);
    }
    if (inside) {
        items[place] = dwk_prefill_item{lane, 0, batch.first_chunks, 0};
        others[lane] = dwk_prefill_item{-1, 0, 0, 0};
    }
}

} // namespace plan
