// Segments of the backward: sequences that are cut are walked by several workgroups at the same time, in both
// directions. A segment maps the state before it to M S + N, and the gradient of the state after it to M^T dS + N'.
//
// Summaries: number i is of item i, which another follows. Once combined, its N is the state after the item. Number
// mirrored(i) is of the reverse walk, of the item that has summary i or, as the last of its sequence, would have it.
// Once combined, its N' is the gradient of the state before the item. So a sequence's summaries are adjacent, in the
// order of either walk.
//
// Ranks that share a sequence cut it into blocks, which are its segments (src/ops/prefill/parallel_backward.rs). A
// rank's sequence then is a fragment: the blocks before it and after it are other ranks'.
#pragma once

#include "../forget.h"
#include "../parts.h"

namespace prefill {
namespace backward {

// Chunks of a sequence that a workgroup walks: all, or those of a segment.
struct Piece {
    int sequence;
    Rows range; // tokens of the sequence
    int first_chunk;
    int chunks;
    int total;     // chunks of the sequence
    int summary;   // the piece before has summary - 1
    bool first;    // whether the sequence begins with it
    bool followed; // whether another rank has what follows the rank's last chunk

    DEVICE_MEMBER int first_record() const { return prefill::first_record(range.begin, sequence); }
    DEVICE_MEMBER bool is_last() const { return !followed && first_chunk + chunks == total; }
};

// Item `index`, clamped to the chunks of its sequence. Without items: all of sequence `index`.
DEVICE Piece piece_of(const dwk_prefill_backward_args &x, int index) {
    dwk_prefill_item item{index, 0, DWK_ITEM_FOLLOWED - 1, 0};
    if (x.items) {
        const i32x4 stored = arch::uniform((const i32x4 *)(x.items + index));
        item = dwk_prefill_item{stored.x, stored.y, stored.z, stored.w};
    }
    const Rows range = rows_of(x.prepare.cu_seqlens, item.sequence, x.prepare.tokens);
    const int total = (range.end - range.begin + chunk - 1) / chunk;
    const int first = min_of(item.first_chunk & (DWK_ITEM_CONTINUES - 1), total);
    const int count = min_of(item.chunks & (DWK_ITEM_FOLLOWED - 1), total - first);
    const bool followed = (item.chunks & DWK_ITEM_FOLLOWED) != 0;
    return Piece{item.sequence, range, first, count, total, item.summary, item.first_chunk == 0, followed};
}
// The piece after one that has a summary.
DEVICE Piece piece_after(const dwk_prefill_backward_args &x, const Piece &piece) {
    Piece out = piece;
    out.first_chunk += piece.chunks;
    out.summary += 1;
    out.first = false;
    out.chunks = piece.total - out.first_chunk;
    if (out.summary < x.summaries) {
        const Piece next = piece_of(x, out.summary);
        out.chunks = next.sequence == piece.sequence ? next.chunks : out.chunks;
    }
    return out;
}

// Number of the summary of the reverse walk.
DEVICE int mirrored(const dwk_prefill_backward_args &x, int summary) { return x.mirror - summary; }
DEVICE float *boundary_of(const dwk_prefill_backward_args &x, int summary, int head) {
    return x.boundaries + ((int64_t)summary * x.prepare.value_heads + head) * summary_size(x.prepare);
}
// A matrix [columns, `rows`] f32: the transposed state.
DEVICE StateView matrix_view(const float *matrix, int rows) {
    return StateView(matrix, dwk_state_strides{0, 0, rows}, DWK_F32, true, 0, 0);
}

// Whether the last chunks of a piece forget what was before them or, reversed, the first ones what is after them
// (../forget.h): if all chunks together do, so for both or for neither. Then M is 0. `needed`: the least number of
// these chunks, or all.
DEVICE bool forget(const dwk_prefill_backward_args &x, const Piece &piece, int head, bool reverse, int &needed) {
    const float *const bounds = retained_by(x.prepare, piece.first_record() + piece.first_chunk, head);
    float sum = 0.0f;
    needed = 1;
#pragma unroll 1
    for (int done = 0; done < piece.chunks; done += arch::lanes) {
        const int own = done + arch::lane();
        const float bound = own < piece.chunks ? bounds[reverse ? own : piece.chunks - 1 - own] : 0.0f;
        const float run = sum + arch::inclusive_sum(bound);
        const u64 lanes_that_do_not = arch::ballot(own < piece.chunks && !(run < forgotten_below));
        if (lanes_that_do_not) {
            needed = done + 64 - __builtin_clzll(lanes_that_do_not) + 1;
        }
        sum = bits<float>(arch::read_lane(bits<int>(run), arch::lanes - 1));
    }
    const bool forgets = needed <= piece.chunks;
    needed = min_of(needed, piece.chunks);
    return forgets;
}

} // namespace backward
} // namespace prefill
