// Heads of q and k with norms: a lane group of 16 or 32 adjacent threads owns the octets of one head.
#pragma once

#include "draft.h"
#include "run.h"

namespace conv {

// Computes y[t] of one channel in f32.
template <class T> DEVICE float channel_at(const dwk_conv_args &x, const Work &work, int t) {
    float sum = x.bias ? math::canonical(load_scalar(x.bias, work.channel * x.bias_stride, x.bias_type)) : 0.0f;
#pragma unroll 1
    for (int j = 0; j < x.width; ++j) {
        const int64_t at = work.channel * x.weight_channel + j * x.weight_tap;
        const int before = token<Channels<1>>(x, work, t - (x.width - 1) + j);
        sum = __builtin_fmaf(math::canonical(load_scalar(x.weight, at, x.weight_type)), T::low(before), sum);
    }
    return x.flags & DWK_CONV_SILU ? math::silu(f32x2{sum, 0.0f}).x : sum;
}

// Normed rows with octets that are not contiguous: computes every channel twice, for the sum of squares and for the
// output.
template <class T, bool Draft>
DEVICE void run_apart(const dwk_conv_args &x, Work &work, int part, int channel, int end, bool has_state, int slot,
                      bool padding) {
#pragma unroll 1
    for (int t = work.begin; t < work.end; ++t) {
        float squares = 0.0f;
#pragma unroll 1
        for (int c = channel; c < end && !padding; ++c) {
            place(work, x, part, c, has_state, slot);
            const float y = channel_at<T>(x, work, t);
            squares = __builtin_fmaf(y, y, squares);
        }
        const float factor = norm_factor(squares, x.lane_group_log2);
#pragma unroll 1
        for (int c = channel; c < end; ++c) {
            place(work, x, part, c, has_state, slot);
            const float y = padding ? 0.0f : factor * channel_at<T>(x, work, t);
            Channels<1>::store(work.to + t * work.to_stride, T::pack(y, 0.0f));
        }
    }
#pragma unroll 1
    for (int c = channel; c < end; ++c) {
        place(work, x, part, c, has_state, slot);
        leave_state<Channels<1>>(x, work);
        leave_draft<Channels<1>, Draft>(x, work);
    }
}

// Convolves the runs of a lane group, which owns a head of q or k. All threads of the group take the same branches.
template <class T, bool Draft>
DEVICE void run_lane_group(const dwk_conv_args &x, Work &work, int part, int group, bool has_state, int slot,
                           bool padding) {
    const int dim = x.q.dim, head = (group >> x.lane_group_log2) * dim;
    const int own = (group & ((1 << x.lane_group_log2) - 1)) * octet;
    work.writes = own < dim;
    if (!rows_are_whole(x, part)) {
        run_apart<T, Draft>(arch::reread(x), work, part, head + own, head + min_of(own + octet, dim), has_state, slot,
                            padding);
        return;
    }
    // A thread without an octet reads the first octet and no state.
    work.initial = work.initial && work.writes;
    place(work, x, part, head + (work.writes ? own : 0), has_state && work.writes, slot);
    run<T, octet, with_norm, Draft>(x, work, padding);
    leave_draft<Channels<octet>, Draft>(x, work);
}

} // namespace conv
