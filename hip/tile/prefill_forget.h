// What a segment leaves of the state before it.
#pragma once

#include "prefill.h"

namespace prefill {

// Bounds of several chunks that a lane reads together.
constexpr int bounds_of_lane = 4;

// Where all bounds of a segment, added up, are below this, M is 0 in f32: no element is greater than its norm. The rest
// is for the sum's rounding.
constexpr float nothing_of_one = -152.0f;
// Where those of its last chunks are below this, these leave nothing of any state: its elements are less than 2^128, so
// that a column of up to 256 has at most 16 times that as its norm, and what is below 2^-150 is 0.
constexpr float nothing_of_any = -288.0f;

// Whether M of a segment is 0. If its last chunks leave nothing of any state before them, the segment is made to begin
// with these: walked from zeros, they end in the same state.
DEVICE bool forget(const dwk_prefill_scan_args &x, int head, Segment &segment, bool &from_zeros) {
    const int chunks = (segment.end - segment.begin + chunk - 1) / chunk;
    const float *const bounds = retained_by(x, segment.slot, head);
    float later = 0.0f; // sum of the chunks behind
    from_zeros = false;
#pragma unroll 1
    for (int end = chunks; end > 0; end -= bounds_of_lane * arch::lanes) {
        const int last = end - 1 - bounds_of_lane * arch::lane();
        float own[bounds_of_lane];
        for (int i = 0; i < bounds_of_lane; ++i) {
            own[i] = last >= i ? bounds[last - i] : 0.0f;
        }
        for (int i = 1; i < bounds_of_lane; ++i) {
            own[i] += own[i - 1];
        }
        const float sum = later + arch::inclusive_sum(own[bounds_of_lane - 1]);
        const float before = sum - own[bounds_of_lane - 1];
        int first = -1;
        for (int i = bounds_of_lane - 1; i >= 0; --i) {
            first = before + own[i] < nothing_of_any ? last - i : first;
        }
        const u64 lanes_that_forget = arch::ballot(first >= 0);
        if (lanes_that_forget) {
            const int chosen = arch::read_lane(first, __builtin_ctzll(lanes_that_forget));
            segment.begin += chosen * chunk;
            segment.slot += chosen;
            from_zeros = true;
            return true;
        }
        later = bits<float>(arch::read_lane(bits<int>(sum), arch::lanes - 1));
    }
    return later < nothing_of_one;
}

} // namespace prefill
