// Forgetting: whether a segment's gates leave less than 2^-64 of the state before it. Decided by the bounds of
// prefill_prepare, log2 of how much a chunk scales the norm of any state.
#pragma once

#include "layout.h"
#include "segment.h"

namespace prefill {

// Bounds that a lane reads at once.
constexpr int bounds_of_lane = 4;

// A segment forgets what was before some last chunks if the bounds of these, and of every longer run of its last
// chunks, add up to less than this. Of the state before the segment, and of what each earlier chunk adds, at most 2^-64
// is then left: 2^-40 of what f32 resolves of a number as large. The difference allows for the sum's rounding.
constexpr float forgotten_below = -64.5f;

// The fewest last chunks of `chunks` that forget what was before them; chunks + 1: none does. `bounds`: of the chunks.
DEVICE int needed_chunks(const float *bounds, int chunks) {
    float later = 0.0f; // sum of the bounds of later chunks
    int needed = 1;     // one more than the longest run that does not forget
#pragma unroll 1
    for (int done = 0; done < chunks; done += bounds_of_lane * arch::lanes) {
        const int first = done + bounds_of_lane * arch::lane(); // counted from the end
        float own[bounds_of_lane];
        for (int i = 0; i < bounds_of_lane; ++i) {
            own[i] = first + i < chunks ? bounds[chunks - 1 - first - i] : 0.0f;
        }
        for (int i = 1; i < bounds_of_lane; ++i) {
            own[i] += own[i - 1];
        }
        const float sum = later + arch::inclusive_sum(own[bounds_of_lane - 1]);
        const float before = sum - own[bounds_of_lane - 1];
        int longest = 0; // of this lane's runs that do not forget; also if they are not numbers
        for (int i = 0; i < bounds_of_lane; ++i) {
            longest = first + i < chunks && !(before + own[i] < forgotten_below) ? first + i + 1 : longest;
        }
        const u64 lanes_that_do_not = arch::ballot(longest > 0);
        if (lanes_that_do_not) {
            needed = 1 + arch::read_lane(longest, 63 - __builtin_clzll(lanes_that_do_not));
        }
        later = bits<float>(arch::read_lane(bits<int>(sum), arch::lanes - 1));
    }
    return needed;
}

// Whether a segment's last chunks forget what was before them. If so, shortens the segment to the fewest that do:
// walked from zeros, they end in its state, and M is 0. A piece of a segment, with so many chunks after it, is
// shortened to its part of these, at least a chunk.
DEVICE bool forget(const dwk_prefill_scan_args &x, int head, Segment &segment, int later_chunks = 0) {
    const int own_chunks = chunks_of(segment), chunks = own_chunks + later_chunks;
    const int needed = needed_chunks(retained_by(x, segment.record, head), chunks);
    if (needed > chunks) {
        return false;
    }
    const int left_out = min_of(chunks - needed, own_chunks - 1);
    segment.begin += left_out * chunk;
    segment.record += left_out;
    return true;
}

// Whether the chunks of its segment after a piece forget the piece. The next piece decides by the same numbers whether
// its M is 0.
DEVICE bool is_passed(const dwk_prefill_scan_args &x, const Segment &piece, int later_chunks, int head) {
    const int record = piece.record + chunks_of(piece);
    return later_chunks > 0 && needed_chunks(retained_by(x, record, head), later_chunks) <= later_chunks;
}

// Most last chunks that a segment may need to forget what was before them, for the segment after it to start before
// these, from zeros. It then walks them once more, without outputs. A summary takes longer.
constexpr int soon_chunks = 4;

// Lets a segment start early, from zeros, if the last piece of the segment before forgets soon: by the same numbers by
// which prefill_summarise decides about that piece (is_unread). Waits for the bounds. Only where `starts_soon`.
DEVICE void begin_earlier(const dwk_prefill_scan_args &x, Segment &segment, int head) {
    if (!(x.flags & DWK_STARTS_SOON) || !segment.summarised || segment.first) {
        return;
    }
    arch::wait_for_previous_kernel();
    int later;
    const Segment before = piece_of(x, max_of(segment.summary - 1, 0), later);
    const int chunks = chunks_of(before), needed = needed_chunks(retained_by(x, before.record, head), chunks);
    const bool follows = before.sequence == segment.sequence && before.end == segment.begin;
    if (follows && needed <= min_of(soon_chunks, chunks)) {
        segment.quiet = needed * chunk;
        segment.begin -= segment.quiet;
        segment.record -= needed;
        segment.from_zeros = true;
    }
}

// Whether nothing needs N of a piece that forgets, which forget() has shortened: it is passed; or the next segment
// starts early and is the last of its sequence, or forgets itself, so that prefill_combine does not chain N either.
// `item`: of its segment.
DEVICE bool is_unread(const dwk_prefill_scan_args &x, int item, const Segment &piece, int later_chunks, bool passed,
                      int head) {
    if (stores_initial_state(x, piece)) {
        return false;
    }
    if (passed) {
        return true;
    }
    if (!starts_soon || !(x.flags & DWK_STARTS_SOON) || later_chunks > 0 || chunks_of(piece) > soon_chunks) {
        return false;
    }
    const Segment next = segment_of(x, min_of(item + 1, x.items_count / x.pieces - 1));
    if (item + 1 >= x.items_count / x.pieces || !next.exists || next.last || next.sequence != piece.sequence) {
        return true; // the next is the last of the sequence
    }
    const int chunks = chunks_of(next);
    return needed_chunks(retained_by(x, next.record, head), chunks) <= chunks;
}

// Whether a segment is one of two of its sequence, and there are no summaries: divide() then says who walks what.
DEVICE bool is_half(const dwk_prefill_scan_args &x, const Segment &segment) {
    return early_starts && x.retained && !segment.summarised && segment.first != segment.last;
}

// Whether a sequence that is cut in two without summaries is walked as two segments: the last chunks of the first
// forget, and the second starts early, from zeros. Moves its begin to there. Otherwise, or if it would start so early
// that this takes longer, workgroups of both segments walk the whole sequence (walk_whole).
DEVICE bool divide(const dwk_prefill_scan_args &x, Segment &segment, int head) {
    const Rows range = rows_of(x.cu_seqlens, segment.sequence, x.tokens);
    Segment before = segment; // the first of the two
    before.begin = range.begin;
    before.end = segment.first ? segment.end : segment.begin;
    before.record = first_record(range.begin, segment.sequence);
    const bool from_zeros = forget(x, head, before);
    // A chunk of a narrow slab takes four fifths of the time, and moves less of what others move, too.
    const bool soon = from_zeros && 4 * (range.end - before.begin) <= 3 * (range.end - range.begin);
    if (soon && !segment.first) {
        segment.quiet = segment.begin - before.begin;
        segment.begin = before.begin;
        segment.record = before.record;
        segment.from_zeros = true;
    }
    return soon;
}

// The work of a half if the sequence is not divided: all of the sequence, for a slab of half the columns. Workgroups of
// the first segment have the lower half of all columns, those of the second the upper: so slabs that share lines of
// memory are on one die.
DEVICE void walk_whole(const dwk_prefill_scan_args &x, Segment &segment, Work &work) {
    const Rows range = rows_of(x.cu_seqlens, segment.sequence, x.tokens);
    work.slab += segment.first ? 0 : x.slabs;
    segment.begin = range.begin;
    segment.end = range.end;
    segment.record = first_record(range.begin, segment.sequence);
    segment.first = segment.last = true;
}

} // namespace prefill
