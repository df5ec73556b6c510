// Convolves a run of consecutive tokens of a thread's channels. The last Width - 1 tokens stay in registers.
#pragma once

#include "../math/norms.h"
#include "filter.h"
#include "state.h"

namespace conv {

constexpr int rows_at_once = 4; // rows whose loads are in flight together
// Whether a thread loads the next rows while it computes those that it has. On gfx942 one wave fewer would then fit on
// each SIMD.
constexpr bool loads_ahead = arch::Traits::one_die;

// Whether rows of a head are divided by their norm. The threads of a lane group sum the squares.
enum Norm { without_norm, with_norm };

// 1 / |y| of a row, equal in all 2^lane_group_log2 threads of the lane group. `squares`: this thread's sum.
DEVICE float norm_factor(float squares, int lane_group_log2) {
    float sum = arch::row_sum(squares);
    if (lane_group_log2 > 4) {
        sum += arch::other_row(sum);
    }
    return math::inverse_norm(sum);
}

// y / |y|. `counts`: whether the octet belongs to the row.
template <class Values> DEVICE Values normed(Values y, bool counts, int lane_group_log2) {
    f32x2 squares{};
    for (int i = 0; i < octet; i += 2) {
        const f32x2 pair{y[i], y[i + 1]};
        squares = __builtin_elementwise_fma(pair, pair, squares);
    }
    return y * norm_factor(counts ? squares.x + squares.y : 0.0f, lane_group_log2);
}

// Rows of a thread's channels, unconverted.
template <int Rows, int N> struct Raw {
    typename Channels<N>::Bits row[Rows];
};

// Loads `Rows` tokens. Advances the pointer. Waits for nothing.
template <int Rows, int N> DEVICE Raw<Rows, N> load(const Work &work, const char *&from) {
    Raw<Rows, N> raw;
    for (int i = 0; i < Rows; ++i) {
        raw.row[i] = Channels<N>::load(from);
        from += work.from_stride;
    }
    return raw;
}

// Computes y = activation(filter * x), and y / |y| with norms, for `Rows` tokens. Advances the pointer.
template <Norm Norms, class T, int Width, int Rows, int N>
DEVICE void step(const Filter<T, Width, N> &filter, typename Channels<N>::Values (&before)[Width - 1], const Work &work,
                 int lane_group_log2, const Raw<Rows, N> &raw, char *&to) {
    for (int i = 0; i < Rows; ++i) {
        typename Channels<N>::Values y = filter.apply(before, raw.row[i]);
        if constexpr (Norms == with_norm) {
            y = normed(y, work.writes, lane_group_log2);
        }
        if (Norms == without_norm || work.writes) {
            Channels<N>::store(to, Channels<N>::template rounded<T>(y));
        }
        // `held` computes the address here. Addresses of all rows, kept through the loop, would need more registers
        // than there are.
        to = Norms == with_norm ? arch::held(to + work.to_stride) : to + work.to_stride;
    }
}

// Convolves a run and writes the new state, except with drafts (draft.h).
template <class T, int Width, int N, Norm Norms, bool Draft>
DEVICE void convolve(const dwk_conv_args &x, const Work &work) {
    typedef Channels<N> Some;
    const Filter<T, Width, N> filter(x, work.channel);
    // Tokens before the run.
    typename Some::Bits old[Width - 1] = {};
    if (work.begin > work.first) {
        for (int i = 0; i < Width - 1; ++i) {
            old[i] = Some::load(work.from + (work.begin - (Width - 1) + i) * work.from_stride);
        }
    } else if (work.initial) {
        load_columns<Width, N, Draft>(x, work, old);
    }
    if constexpr (!Draft) {
        if (x.state_columns > Width) {
            leave_state<Some>(x, work);
        } else if (leaves_state(x, work)) {
            leave_columns<Width, N>(x, work, old);
        }
    }
    typename Some::Values before[Width - 1];
    for (int i = 0; i < Width - 1; ++i) {
        before[i] = Some::template widened<T>(old[i]);
    }
    const char *from = work.from + work.begin * work.from_stride;
    char *to = work.to + work.begin * work.to_stride;
    int left = work.end - work.begin;
    const auto load_rows = [&]() __attribute__((always_inline)) { return load<rows_at_once, N>(work, from); };
    const auto compute = [&](const auto &raw) __attribute__((always_inline)) {
        step<Norms>(filter, before, work, x.lane_group_log2, raw, to);
    };
    constexpr bool ahead = loads_ahead && !Draft; // drafts are few tokens
    Raw<rows_at_once, N> next{};
    if (ahead && left >= rows_at_once) {
        next = load_rows();
    }
#pragma unroll 1
    for (; left >= rows_at_once; left -= rows_at_once) {
        const Raw<rows_at_once, N> raw = ahead ? next : load_rows();
        if (ahead && left >= 2 * rows_at_once) {
            next = load_rows();
        }
        compute(raw);
    }
#pragma unroll 1
    for (; left > 0; --left) {
        compute(load<1, N>(work, from));
    }
}

// Dispatches a run by its filter width. `padding`: the sequence has no slot, or the tokens are past all sequences.
// Outputs are then zeros.
template <class T, int N, Norm Norms, bool Draft>
DEVICE void run(const dwk_conv_args &x, const Work &work, bool padding) {
    if (padding) {
#pragma unroll 1
        for (int t = work.begin; t < work.end && work.writes; ++t) {
            Channels<N>::store(work.to + t * work.to_stride, typename Channels<N>::Bits{});
        }
    } else if (x.width == 2) {
        convolve<T, 2, N, Norms, Draft>(x, work);
    } else if (x.width == 3) {
        convolve<T, 3, N, Norms, Draft>(x, work);
    } else {
        convolve<T, 4, N, Norms, Draft>(x, work);
    }
}

} // namespace conv
