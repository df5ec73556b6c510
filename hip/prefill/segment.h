// Segments: runs of chunks of one sequence, which different workgroups walk at the same time, and their summaries.
#pragma once

#include "../dispatch.h"
#include "batch.h"

namespace prefill {

// A run of chunks of one sequence: the whole sequence, or a segment of it.
struct Segment {
    int sequence;
    int begin; // first token
    int end;
    int record;  // record of the first chunk
    int summary; // index of its first summary; the last one of the segment before is summary - 1
    bool first;  // whether it is the first of its sequence
    bool last;
    // Whether the sequence is cut: a summary then holds the state before it (or other ranks have parts).
    bool summarised;
    int quiet;       // tokens at its begin that belong to earlier segments: their outputs are not written
    bool from_zeros; // with quiet tokens: the walk starts from zeros
    // False past the end of a list: those that the device makes are as long as any batch could need, and end with items
    // of sequence -1.
    bool exists;
};

// Segment of item `index`, clamped to the chunks of its sequence, so that no item leads out of bounds. Without items:
// all of sequence `index`.
DEVICE Segment segment_of(const dwk_prefill_scan_args &x, int index) {
    dwk_prefill_item item{index, 0, DWK_ITEM_FOLLOWED - 1, 0};
    bool exists = true;
    if (x.items) {
        const i32x4 stored = arch::uniform((const i32x4 *)(x.items + index));
        exists = stored.x >= 0;
        item = dwk_prefill_item{min_of(max_of(stored.x, 0), x.sequences - 1), stored.y, stored.z, stored.w};
    }
    const Rows range = rows_of(x.cu_seqlens, item.sequence, x.tokens);
    const int chunks = (range.end - range.begin + chunk - 1) / chunk;
    const int first = min_of(item.first_chunk & (DWK_ITEM_CONTINUES - 1), chunks);
    const int count = min_of(item.chunks & (DWK_ITEM_FOLLOWED - 1), chunks - first);
    const int begin = range.begin + first * chunk;
    // Other ranks may have parts of the sequence before and after: then a bit is set.
    const int before = item.first_chunk, after = chunks - first - count + (item.chunks & DWK_ITEM_FOLLOWED);
    const bool is_first = before == 0, is_last = after == 0;
    const bool half = x.flags & DWK_STARTS_EARLY && item.summary & DWK_ITEM_HALF;
    const bool alone = half || x.flags & DWK_DEFERS_STATES;
    return Segment{item.sequence,
                   min_of(begin, range.end),
                   min_of(begin + count * chunk, range.end),
                   first_record(range.begin, item.sequence) + first,
                   min_of(item.summary & (DWK_ITEM_HALF - 1), x.summaries),
                   is_first,
                   is_last,
                   x.summaries > 0 && (before | after) != 0 && !alone,
                   0,
                   false,
                   exists};
}

// Lengthens the first segment of a sequence to all of it.
DEVICE void extend(const dwk_prefill_scan_args &x, Segment &segment) {
    segment.end = rows_of(x.cu_seqlens, segment.sequence, x.tokens).end;
    segment.last = true;
}

DEVICE int chunks_of(const Segment &segment) { return (segment.end - segment.begin + chunk - 1) / chunk; }

// Piece `index` of the list of segments that prefill_summarise cuts into x.pieces each: a segment in its own right.
// `later`: chunks of its segment that come after it.
DEVICE Segment piece_of(const dwk_prefill_scan_args &x, int index, int &later) {
    if (x.pieces == 1) {
        later = 0;
        return segment_of(x, index);
    }
    const int item = arch::uniform_value(index / x.pieces), piece = index - item * x.pieces;
    Segment out = segment_of(x, item);
    const int chunks = chunks_of(out), each = (chunks + x.pieces - 1) / x.pieces;
    const int first = min_of(piece * each, chunks), count = min_of(each, chunks - first);
    later = chunks - first - count;
    out.end = later > 0 ? out.begin + (first + count) * chunk : out.end;
    out.begin += first * chunk;
    out.record += first;
    out.summary = min_of(out.summary + piece, x.summaries);
    out.first = out.first && piece == 0;
    return out;
}

// Whether a sequence has no tokens. A segment without chunks that is not its sequence's first only stores a final state
// that waits.
DEVICE bool is_empty(const Segment &segment) { return segment.first && segment.begin == segment.end; }

// Whether prefill_short computes the sequence of this segment.
DEVICE bool is_short(const dwk_prefill_scan_args &x, const Segment &segment) {
    return segment.first && segment.last && segment.end - segment.begin < x.least_tokens;
}

// A unit of work in the list of segments: it has chunks to walk, or nothing is left to do for it, or it lies past the
// end of the list, as all later units do.
enum class Found { chunks, nothing, end };

// Work of a workgroup of scan or summarise.
struct Work {
    int item;
    int head;
    int key_head;
    int slab;
};

// Work of `workgroup`. Value heads and slabs of an (item, key head) read the same K and Q, so they go to one die.
DEVICE Work work_of(const dwk_prefill_scan_args &x, int workgroup) {
    const int group = dispatch::quotient(x.value_heads, x.key_heads);
    const dispatch::Dealt to = dispatch::dealt(workgroup, x.items_count * x.key_heads, group * x.slabs, x.dies);
    const int item = dispatch::quotient(to.unit, x.key_heads), key_head = to.unit - item * x.key_heads;
    const int of_group = dispatch::quotient(to.member, x.slabs);
    return Work{item, dispatch::value_head(x, key_head, group, of_group), key_head, to.member - of_group * x.slabs};
}

// f32 elements of the summary of a (segment that another follows, value head) in the workspace. The segment maps S to M
// S + N.
//   N [V, K] f32; once combined, the state after the segment
//   M [K, K], each element as two bf16 numbers, in the target's order (<target>/parts.h). In place of M, a first
//   segment stores the initial state of its sequence, [V, K] f32, if the last segment may overwrite the caller's state
//   meanwhile.
template <class Arguments> DEVICE int summary_size(const Arguments &x) {
    return (x.value_dim + max_of(x.key_dim, x.value_dim)) * x.key_dim;
}
template <class Arguments> DEVICE float *summary_of(const Arguments &x, int summary, int head) {
    return x.states + ((int64_t)summary * x.value_heads + head) * summary_size(x);
}
// M, or the initial state, of a summary.
template <class Arguments> DEVICE float *second_part(float *summary, const Arguments &x) {
    return summary + x.value_dim * x.key_dim;
}
// Flag of a segment. 1: N is the state after it, because M is 0 and not stored or, on gfx942, it is a first segment.
template <class Arguments> DEVICE auto *forgotten_by(const Arguments &x, int summary, int head) {
    return x.forgotten + (int64_t)summary * x.value_heads + head;
}
// Whether a summary also stores the initial state of its sequence, for prefill_scan. Otherwise that reads the caller's.
DEVICE bool stores_initial_state(const dwk_prefill_scan_args &x, const Segment &segment) {
    return segment.first && !(x.flags & DWK_KEEPS_STATES);
}

// Whether the state before a segment is that of a summary.
DEVICE bool starts_from_summary(const dwk_prefill_scan_args &x, const Segment &segment) {
    return segment.summarised && (!segment.first || stores_initial_state(x, segment));
}

// Where the state of the last segment of a sequence that is cut waits for prefill_scan (DWK_DEFERS_STATES).
DEVICE float *waiting_state(const dwk_prefill_scan_args &x, const Segment &segment, int head) {
    return summary_of(x, max_of(segment.summary - 1, 0), head);
}

// State before a segment of a sequence that is cut.
DEVICE const float *state_before(const dwk_prefill_scan_args &x, const Segment &segment, int head) {
    return segment.first ? second_part(summary_of(x, min_of(segment.summary, x.summaries - 1), head), x)
                         : summary_of(x, max_of(segment.summary - 1, 0), head);
}

} // namespace prefill
