// Backward of the convolution. With s the sums before the activation, y the outputs and w the weights of a channel:
//   ds[t]     = dy[t] activation'(s[t])
//   dx[t]     = sum over j of w[j] ds[t + width - 1 - j], rows past the sequence are 0
//   dw[j]     = sum over t of ds[t] x[t - (width - 1) + j];   dbias = sum over t of ds[t]
// dx of the width - 1 tokens before a sequence is the gradient of its state's last columns. With norms, dy of q and k
// first becomes (dy - n (n . dy)) / |silu(s)|, with n the normed row, not rounded.
//
// A thread owns eight channels. It walks over a run of tokens, and over width - 1 more, whose ds the run's dx needs. s
// is computed again from x. Sums of dw and dbias stay in registers over all blocks of tokens of the thread's walker.
#pragma once

#include "run.h"

namespace conv {
namespace backward {

constexpr int threads = 128;
typedef piece::Octet Values;

// Shifts eight numbers of 16 bits down by one. `last`: the new last one.
DEVICE void shift_in(i32x4 &x, u32 last) {
    for (int i = 0; i < 3; ++i) {
        x[i] = (int)((u32)x[i] >> 16 | (u32)x[i + 1] << 16);
    }
    x[3] = (int)((u32)x[3] >> 16 | last << 16);
}

// Reads up to eight numbers of 16 bits at addresses at(0), at(1), ...; the others are 0.
template <class At> DEVICE i32x4 gather(int count, At at) {
    i32x4 out{};
#pragma unroll 1
    for (int e = 0; e < octet; ++e) {
        shift_in(out, e < count ? *(const unsigned short *)at(e) : 0);
    }
    return out;
}
template <class At> DEVICE void scatter(i32x4 x, int count, At at) {
#pragma unroll 1
    for (int e = 0; e < count; ++e) {
        *(short *)at(e) = (short)x[0];
        shift_in(x, 0);
    }
}

// What a thread has for all of its blocks.
struct Share {
    int part;    // q, k or v
    int run;     // of a block
    int runs;    // of a block
    int channel; // first, of the part
    int first;   // first, of all
    int count;   // channels, at most eight
};

template <class Field>
DEVICE Field of_gradient(const dwk_conv_backward_args &x, int part, Field dwk_conv_backward_part::*f) {
    const Field q = x.q.*f, k = x.k.*f, v = x.v.*f;
    return part == 0 ? q : part == 1 ? k : v;
}

// Tensors over tokens: x, the gradient of y, and the gradient of x.
enum Tensor { of_x, of_d_y, of_d_x };

// Bytes from channel 0 of a part to channel c.
template <Tensor Which> DEVICE int64_t channel_offset(const dwk_conv_backward_args &x, int part, u32 c) {
    u32 block;
    int64_t stride;
    if constexpr (Which == of_x) {
        block = of_part(x.conv, part, &dwk_conv_part::block), stride = of_part(x.conv, part, &dwk_conv_part::x_block);
    } else if constexpr (Which == of_d_y) {
        block = of_part(x.conv, part, &dwk_conv_part::dim), stride = of_part(x.conv, part, &dwk_conv_part::out_head);
    } else {
        block = of_gradient(x, part, &dwk_conv_backward_part::block);
        stride = of_gradient(x, part, &dwk_conv_backward_part::block_stride);
    }
    return 2 * (c / block * stride + c % block);
}

// A thread's channels in the rows of a tensor. Few registers: what only rows that are not whole need is computed again.
template <Tensor Which> struct Rows {
    const dwk_conv_backward_args &all;
    const Share &share;
    char *base;     // the first channel, token 0
    int64_t stride; // bytes from token to token
    bool whole;     // one access covers all channels, for each token

    DEVICE_MEMBER Rows(const dwk_conv_backward_args &all, const Share &share) : all(all), share(share) {
        const dwk_conv_backward_args &x = arch::reread(all);
        const int part = share.part;
        if constexpr (Which == of_x) {
            base = (char *)of_part(x.conv, part, &dwk_conv_part::x);
            stride = 2 * of_part(x.conv, part, &dwk_conv_part::x_token);
        } else if constexpr (Which == of_d_y) {
            base = (char *)of_part(x.conv, part, &dwk_conv_part::out);
            stride = 2 * of_part(x.conv, part, &dwk_conv_part::out_token);
        } else {
            base = (char *)of_gradient(x, part, &dwk_conv_backward_part::d_x);
            stride = 2 * of_gradient(x, part, &dwk_conv_backward_part::token);
        }
        const int64_t start = channel_offset<Which>(x, part, share.channel);
        const int64_t end = channel_offset<Which>(x, part, share.channel + octet - 1);
        base += start;
        whole = share.count == octet && end - start == 2 * (octet - 1) && arch::in_one_access(base) &&
                arch::in_one_access(base + stride);
    }

    // Address of channel e in a row.
    DEVICE_MEMBER char *at(char *row, int e) const {
        const dwk_conv_backward_args &x = arch::reread(all);
        return row + (channel_offset<Which>(x, share.part, share.channel + e) -
                      channel_offset<Which>(x, share.part, share.channel));
    }
    DEVICE_MEMBER i32x4 load(int64_t t) const {
        char *const row = base + t * stride;
        if (whole) {
            return arch::load_b128(row);
        }
        return gather(share.count, [&](int e) __attribute__((always_inline)) { return at(row, e); });
    }
    DEVICE_MEMBER void store(int64_t t, i32x4 x) const {
        char *const row = base + t * stride;
        if (whole) {
            arch::store_b128(row, x);
        } else {
            scatter(x, share.count, [&](int e) __attribute__((always_inline)) { return at(row, e); });
        }
    }
};

// A thread's channels of conv states of a sequence.
struct Columns {
    char *base;      // column 0 of the first channel
    int64_t channel; // bytes from channel to channel
    int64_t column;  // bytes from column to column
    int count;

    DEVICE_MEMBER Columns(const void *all, int64_t slot, int64_t channel, int64_t column, int sequence,
                          const Share &share)
        : base((char *)all + 2 * (sequence * slot + share.first * channel)), channel(2 * channel), column(2 * column),
          count(share.count) {}
    DEVICE_MEMBER i32x4 load(int index) const {
        return gather(count, [&](int e) __attribute__((always_inline)) { return base + index * column + e * channel; });
    }
    DEVICE_MEMBER void store(int index, i32x4 x) const {
        scatter(x, count, [&](int e) __attribute__((always_inline)) { return base + index * column + e * channel; });
    }
};

template <class T> DEVICE i32x4 packed(Values x) {
    i32x4 out;
    for (int i = 0; i < 4; ++i) {
        out[i] = T::pack(math::packable(x[2 * i]), math::packable(x[2 * i + 1]));
    }
    return out;
}

template <class T, int Width, Norm Norms> class Walk {
  public:
    DEVICE_MEMBER Walk(const dwk_conv_backward_args &args, const Share &share) : all(args), share(share) {
        const dwk_conv_args &x = arch::reread(all).conv;
        for (int j = 0; j < Width; ++j) {
            weight[j] =
                read(x.weight, share.first * x.weight_channel + j * x.weight_tap, x.weight_channel, x.weight_type);
        }
        bias = x.bias ? read(x.bias, share.first * x.bias_stride, x.bias_stride, x.bias_type) : Values{};
        for (int j = 0; j <= Width; ++j) {
            sums[j] = Values{};
        }
    }

    // Walks over tokens `begin` to `end` of a sequence of tokens `first` to `last`.
    DEVICE_MEMBER void run(int sequence, int first, int last, int begin, int end) {
        const Rows<of_d_x> d_own(all, share);
        const bool wants_rows = of_gradient(arch::reread(all), share.part, &dwk_conv_backward_part::d_x);
        if (sequence >= arch::reread(all).conv.sequences) {
#pragma unroll 1
            for (int t = begin; t < end && wants_rows; ++t) {
                d_own.store(t, i32x4{});
            }
            return;
        }
        const Rows<of_x> own(all, share);
        const Rows<of_d_y> d_y(all, share);
        const dwk_conv_backward_args &args = arch::reread(all);
        const int columns = args.conv.state_columns;
        const bool starts = !args.conv.has_initial_state || arch::uniform(args.conv.has_initial_state + sequence);
        const bool wants_state = begin == first && args.d_initial;
        // Token of the first column that the sequence leaves, if the gradient of those is given.
        const int left = args.d_final ? last - columns : last;

        Values before[Width - 1], later[Width - 1];
        for (int i = 0; i < Width - 1; ++i) {
            const int t = begin - (Width - 1) + i;
            i32x4 old{};
            if (begin > first) {
                old = own.load(t);
            } else if (args.conv.state && starts) {
                old = initial(sequence).load(columns + t - first);
            }
            before[i] = piece::widened<T>(old);
            later[i] = Values{};
        }
        if (wants_state) {
#pragma unroll 1
            for (int t = first - columns; t < first - (Width - 1); ++t) {
                const i32x4 x = starts && t >= left ? d_final(sequence).load(t - left) : i32x4{};
                d_initial(sequence).store(columns + t - first, x);
            }
        }
        i32x4 next_x{}, next_y{};
        if (begin < last) {
            next_x = own.load(begin);
            next_y = d_y.load(begin);
        }
#pragma unroll 1
        for (int t = begin; t < end + Width - 1; ++t) {
            const Values now = piece::widened<T>(next_x), d = piece::widened<T>(next_y);
            next_x = next_y = i32x4{};
            if (t + 1 < min_of(last, end + Width - 1)) {
                next_x = own.load(t + 1);
                next_y = d_y.load(t + 1);
            }
            const Values d_sum = t < last ? differentiated(before, now, d) : Values{};
            if (t < end) {
                for (int j = 0; j < Width; ++j) {
                    sums[j] = __builtin_elementwise_fma(d_sum, j < Width - 1 ? before[j] : now, sums[j]);
                }
                sums[Width] += d_sum;
            }
            const int to = t - (Width - 1);
            if (to >= begin ? wants_rows : wants_state) {
                Values d_x = weight[0] * d_sum;
                for (int i = 1; i < Width; ++i) {
                    d_x = __builtin_elementwise_fma(weight[i], later[Width - 1 - i], d_x);
                }
                if (to >= left) {
                    d_x += piece::widened<T>(d_final(sequence).load(to - left));
                }
                if (to >= begin) {
                    d_own.store(to, packed<T>(d_x));
                } else {
                    d_initial(sequence).store(columns + to - first, starts ? packed<T>(d_x) : i32x4{});
                }
            }
            Filter<T, Width, octet>::push(before, now);
            Filter<T, Width, octet>::push(later, d_sum);
        }
    }

    // Writes the sums of all runs.
    DEVICE_MEMBER void leave(int walker) const {
        const dwk_conv_backward_args &args = arch::reread(all);
        const dwk_conv_args &x = args.conv;
        if (!args.partials) {
            return;
        }
        const int channels = x.q.channels + x.k.channels + x.v.channels;
        float *to = args.partials + ((int64_t)walker * share.runs + share.run) * (Width + 1) * channels + share.first;
        for (int j = 0; j <= Width; ++j) {
            for (int e = 0; e < octet; ++e) {
                if (e < share.count) {
                    to[e] = sums[j][e];
                }
            }
            to += channels;
        }
    }

  private:
    DEVICE_MEMBER Columns initial(int sequence) const {
        const dwk_conv_args &x = arch::reread(all).conv;
        return Columns(x.state, x.state_slot, x.state_channel, x.state_column, sequence, share);
    }
    DEVICE_MEMBER Columns d_initial(int sequence) const {
        const dwk_conv_backward_args &x = arch::reread(all);
        return Columns(x.d_initial, x.d_initial_slot, x.d_initial_channel, x.d_initial_column, sequence, share);
    }
    DEVICE_MEMBER Columns d_final(int sequence) const {
        const dwk_conv_backward_args &x = arch::reread(all);
        return Columns(x.d_final, x.d_final_slot, x.d_final_channel, x.d_final_column, sequence, share);
    }

    // Reads the channels' weights as f32, 0 for channels that there are not.
    DEVICE_MEMBER Values read(const void *p, int64_t index, int64_t stride, int type) const {
        Values out{};
#pragma unroll 1
        for (int e = 0; e < octet; ++e) {
            for (int i = 0; i < octet - 1; ++i) {
                out[i] = out[i + 1];
            }
            out[octet - 1] = e < share.count ? load_scalar(p, index + e * stride, type) : 0.0f;
        }
        return out;
    }

    // ds of a token, from x of the tokens before it, x and dy.
    DEVICE_MEMBER Values differentiated(const Values (&before)[Width - 1], Values now, Values d) const {
        Values s = bias;
        for (int j = 0; j < Width - 1; ++j) {
            s = __builtin_elementwise_fma(weight[j], before[j], s);
        }
        s = __builtin_elementwise_fma(weight[Width - 1], now, s);
        const dwk_conv_args &x = arch::reread(all).conv;
        Values slope = (Values)1.0f;
        if (x.flags & DWK_CONV_SILU) {
            for (int i = 0; i < octet; i += 2) {
                const math::Slope silu = math::slope(f32x2{s[i], s[i + 1]}, true);
                s[i] = silu.value.x;
                s[i + 1] = silu.value.y;
                slope[i] = silu.slope.x;
                slope[i + 1] = silu.slope.y;
            }
        }
        if constexpr (Norms == with_norm) {
            f32x2 squares{}, along{};
            for (int i = 0; i < octet; i += 2) {
                const f32x2 pair{s[i], s[i + 1]};
                squares = __builtin_elementwise_fma(pair, pair, squares);
                along = __builtin_elementwise_fma(pair, f32x2{d[i], d[i + 1]}, along);
            }
            const float factor = norm_factor(squares.x + squares.y, x.lane_group_log2);
            float dot = arch::row_sum(along.x + along.y);
            if (x.lane_group_log2 > 4) {
                dot += arch::other_row(dot);
            }
            d = (d - (s * factor) * (factor * dot)) * factor;
        }
        return d * slope;
    }

    const dwk_conv_backward_args &all;
    const Share &share;
    Values weight[Width], bias, sums[Width + 1];
};

// rows_of_block by a search that needs no other lanes: threads without channels have left.
DEVICE SequenceRows rows_of_lone_block(const dwk_conv_args &x, int block) {
    int low = 0, high = x.sequences;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_block(x, token_at(x, middle), middle) <= block) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return rows_of(x, arch::uniform_value(low));
}

// Walks over the blocks of a walker.
template <class T, int Width, Norm Norms>
DEVICE void walk(const dwk_conv_backward_args &args, const Share &share, int walker) {
    Walk<T, Width, Norms> walk(args, share);
#pragma unroll 1
    for (int block = walker; block < arch::reread(args).blocks; block += arch::reread(args).walkers) {
        const dwk_conv_args &x = arch::reread(args).conv;
        const auto [sequence, first, last] = rows_of_lone_block(x, block);
        const int blocks_before = block - first_block(x, first, sequence);
        const int begin = first + (blocks_before << x.block_log2) + (share.run << x.run_log2);
        const int end = min_of(begin + (1 << x.run_log2), last);
        // An empty sequence hands the gradient of its state on.
        if (begin < end || (begin == first && begin == end)) {
            walk.run(sequence, first, last, begin, end);
        }
    }
    walk.leave(walker);
}

template <class T, Norm Norms> DEVICE void by_width(const dwk_conv_backward_args &x, const Share &share, int walker) {
    if (x.conv.width == 2) {
        walk<T, 2, Norms>(x, share, walker);
    } else if (x.conv.width == 3) {
        walk<T, 3, Norms>(x, share, walker);
    } else {
        walk<T, 4, Norms>(x, share, walker);
    }
}

template <class T> DEVICE void launch(const dwk_conv_backward_args &args) {
    const dwk_conv_args &x = args.conv;
    const int walker = arch::uniform_value(arch::workgroup() / x.groups);
    const int index = (arch::workgroup() - walker * x.groups) * threads + arch::thread();
    const int q_lanes = x.q.lanes, k_lanes = x.k.lanes, lanes = q_lanes + k_lanes + x.v.lanes;
    Share share;
    share.run = index / lanes;
    share.runs = 1 << (x.block_log2 - x.run_log2);
    if (share.run >= share.runs) {
        return;
    }
    int group = index - share.run * lanes;
    share.part = (group >= q_lanes) + (group >= q_lanes + k_lanes);
    group -= share.part == 0 ? 0 : share.part == 1 ? q_lanes : q_lanes + k_lanes;
    const bool normed = x.flags & DWK_CONV_QK_L2NORM && share.part < 2;
    if (normed) {
        const int dim = x.q.dim, own = (group & ((1 << x.lane_group_log2) - 1)) * octet;
        share.channel = (group >> x.lane_group_log2) * dim + min_of(own, dim);
        share.count = max_of(min_of(dim - own, octet), 0);
    } else {
        share.channel = group * octet;
        share.count = min_of(of_part(x, share.part, &dwk_conv_part::channels) - share.channel, octet);
    }
    share.first = share.channel + (share.part > 0 ? x.q.channels : 0) + (share.part > 1 ? x.k.channels : 0);
    if (normed) {
        by_width<T, with_norm>(args, share, walker);
    } else if (share.count > 0) { // v has more threads than octets, so that lane groups never cross a wave
        by_width<T, without_norm>(args, share, walker);
    }
}

} // namespace backward
} // namespace conv
