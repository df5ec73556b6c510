// Causal depthwise convolution of the packed projections, split into q, k and v. For token t of a sequence, channel c:
//   y[t, c] = activation(bias[c] + sum over j of weight[c, j] x[t - (width - 1) + j, c])
// summed in f32 by fused multiply-adds, bias first, then the oldest token; rounded once. Tokens before the sequence are
// the last columns of its conv state, or zeros. The conv state becomes the last tokens of (old state, sequence).
//
// A thread owns eight channels and walks over a run of consecutive tokens, the last width - 1 of them in registers. The
// threads of a block of tokens, of one sequence, are numbered octet of channels by octet, then run by run, and fill
// `groups` workgroups. Blocks are numbered as in prefill: sequence n owns those from cu_seqlens[n] / tokens of a block
// + n on. The thread that reads a sequence's state is the one that writes it, so that nothing has to be synchronised.
//
// With norms, rows of q and k are divided by sqrt(sum of squares + 1e-6) before they are rounded: a team of 16 or 32
// adjacent threads then has the octets of one head, and those of its threads that are left over none. g and beta of all
// rows are for workgroups of their own.
#include "../tile/conv.h"
#include "../tile/gates.h"

namespace {

using conv::Channels;
using conv::Filter;
using conv::octet;

constexpr int threads = gates::threads;
constexpr int rows_at_once = 4; // whose loads are under way together

// What a thread works on: a run of tokens of adjacent channels.
struct Work {
    const char *from; // token 0 of x
    char *to;         // token 0 of the output
    int64_t from_stride;
    int64_t to_stride;
    char *state;  // column 0; null: none
    bool initial; // whether the state is read
    int channel;  // of weight, bias and state
    int first;    // token of the sequence
    int last;     // past the sequence
    int begin;    // token of the run
    int end;      // past the run
    bool writes;  // whether the channels are the thread's, or it only takes part in its team's sums
};

// Whether rows have norms, which the threads of a team add up.
enum Norm { without_norm, with_norm };

// Of a row: 1 / sqrt(sum of squares + 1e-6), the same in all threads of the team.
DEVICE float norm_factor(float squares, int team_log2) {
    float sum = arch::row_sum(squares);
    if (team_log2 > 4) {
        sum += arch::other_row(sum);
    }
    return arch::rsqrt(sum + 1e-6f);
}

template <class Values> DEVICE Values normed(Values y, bool counts, int team_log2) {
    f32x2 squares{};
    for (int i = 0; i < octet; i += 2) {
        const f32x2 pair{y[i], y[i + 1]};
        squares = __builtin_elementwise_fma(pair, pair, squares);
    }
    return y * norm_factor(counts ? squares.x + squares.y : 0.0f, team_log2);
}

// `Rows` tokens of a run, the next at `from` and `to`, which move on.
template <int Rows, Norm Norms, class T, int Width, int N>
DEVICE void step(const Filter<T, Width, N> &filter, typename Channels<N>::Values (&before)[Width - 1], const Work &work,
                 int team_log2, const char *&from, char *&to) {
    typename Channels<N>::Bits raw[Rows];
    for (int i = 0; i < Rows; ++i) {
        raw[i] = Channels<N>::load(from);
        from += work.from_stride;
    }
    for (int i = 0; i < Rows; ++i) {
        typename Channels<N>::Values y = filter.apply(before, raw[i]);
        if constexpr (Norms == with_norm) {
            y = normed(y, work.writes, team_log2);
        }
        if (Norms == without_norm || work.writes) {
            Channels<N>::store(to, Channels<N>::template rounded<T>(y));
        }
        // Computed here: the addresses of all rows, kept through the loop, are worth more registers than there are.
        to = Norms == with_norm ? arch::held(to + work.to_stride) : to + work.to_stride;
    }
}

DEVICE char *column(const dw_conv_args &x, const Work &work, int index) {
    return work.state + 2 * index * x.state_column;
}

// A token of the sequence, or of its state: the last column is the token before the first.
template <class Some> DEVICE typename Some::Bits token(const dw_conv_args &x, const Work &work, int t) {
    if (t >= work.first) {
        return Some::load(work.from + t * work.from_stride);
    }
    if (!work.initial) {
        return typename Some::Bits{};
    }
    return Some::gather(column(x, work, x.state_columns + t - work.first), 2 * x.state_channel);
}

// The new state, by the thread that has the sequence's first tokens.
DEVICE bool leaves_state(const dw_conv_args &x, const Work &work) {
    return work.state && work.begin == work.first && !(x.flags & DW_CONV_KEEP_STATES);
}
template <class Some> DEVICE void leave_state(const dw_conv_args &x, const Work &work) {
    if (leaves_state(x, work)) {
        // Ascending: in a sequence shorter than the state a column is read before it is written.
#pragma unroll 1
        for (int j = 0; j < x.state_columns; ++j) {
            Some::scatter(column(x, work, j), 2 * x.state_channel,
                          token<Some>(x, work, work.last - x.state_columns + j));
        }
    }
}

// The same of a state with no more columns than the filter needs, of which the old ones are at hand: all that is read
// is requested before any of it is written.
template <class Some, int Width>
DEVICE void leave_columns(const dw_conv_args &x, const Work &work, const typename Some::Bits (&old)[Width - 1]) {
    constexpr int columns = Width - 1;
    const int length = work.last - work.first;
    typename Some::Bits next[columns];
    for (int j = 0; j < columns; ++j) {
        next[j] = old[columns - 1];
        for (int shift = 1; shift + j < columns - 1; ++shift) {
            next[j] = length == shift ? old[j + shift] : next[j];
        }
        if (length + j >= columns) {
            next[j] = Some::load(work.from + (work.last - columns + j) * work.from_stride);
        }
    }
    for (int j = 0; j < columns; ++j) {
        Some::scatter(column(x, work, j), 2 * x.state_channel, next[j]);
    }
}

template <class T, int Width, int N, Norm Norms> DEVICE void convolve(const dw_conv_args &x, const Work &work) {
    typedef Channels<N> Some;
    const Filter<T, Width, N> filter(x, work.channel);
    // What precedes the run, requested at once: runs are longer than that.
    typename Some::Bits old[Width - 1] = {};
    if (work.begin > work.first) {
        for (int i = 0; i < Width - 1; ++i) {
            old[i] = Some::load(work.from + (work.begin - (Width - 1) + i) * work.from_stride);
        }
    } else if (work.initial) {
        for (int i = 0; i < Width - 1; ++i) {
            old[i] = Some::gather(column(x, work, x.state_columns - (Width - 1) + i), 2 * x.state_channel);
        }
    }
    if (x.state_columns > Width - 1) {
        leave_state<Some>(x, work);
    } else if (leaves_state(x, work)) {
        leave_columns<Some, Width>(x, work, old);
    }
    typename Some::Values before[Width - 1];
    for (int i = 0; i < Width - 1; ++i) {
        before[i] = Some::template widened<T>(old[i]);
    }
    const char *from = work.from + work.begin * work.from_stride;
    char *to = work.to + work.begin * work.to_stride;
    int left = work.end - work.begin;
#pragma unroll 1
    for (; left >= rows_at_once; left -= rows_at_once) {
        step<rows_at_once, Norms>(filter, before, work, x.team_log2, from, to);
    }
#pragma unroll 1
    for (; left > 0; --left) {
        step<1, Norms>(filter, before, work, x.team_log2, from, to);
    }
}

// `padding`: the sequence has no slot, or the tokens belong to none.
template <class T, int N, Norm Norms> DEVICE void run(const dw_conv_args &x, const Work &work, bool padding) {
    if (padding) {
#pragma unroll 1
        for (int t = work.begin; t < work.end && work.writes; ++t) {
            Channels<N>::store(work.to + t * work.to_stride, typename Channels<N>::Bits{});
        }
    } else if (x.width == 2) {
        convolve<T, 2, N, Norms>(x, work);
    } else if (x.width == 3) {
        convolve<T, 3, N, Norms>(x, work);
    } else {
        convolve<T, 4, N, Norms>(x, work);
    }
}

// An entry of cu_seqlens. Whatever the device holds, rows stay within the batch and blocks within their sequence.
DEVICE int token_at(const dw_conv_args &x, int index) {
    if (index == 0) {
        return 0;
    }
    const int64_t raw = x.flags & DW_CONV_WIDE_LENGTHS ? arch::uniform((const int64_t *)x.cu_seqlens + index)
                                                       : arch::uniform((const int32_t *)x.cu_seqlens + index);
    return (int)max_of<int64_t>(0, min_of<int64_t>(raw, x.tokens));
}

DEVICE int first_block(const dw_conv_args &x, int token, int sequence) { return (token >> x.block_log2) + sequence; }

// The last sequence, or `sequences` for the rows past them all, whose first block is at most `block`.
DEVICE int sequence_of(const dw_conv_args &x, int block) {
    int low = 0, high = x.sequences;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_block(x, token_at(x, middle), middle) <= block) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// A field of the part that a thread works on.
template <class Field> DEVICE Field of_part(const dw_conv_args &x, int part, Field dw_conv_part::*field) {
    const Field q = x.q.*field, k = x.k.*field, v = x.v.*field;
    return part == 0 ? q : part == 1 ? k : v;
}

// Where a channel of a part lies.
DEVICE void place(Work &work, const dw_conv_args &x, int part, int channel, bool has_state, int slot) {
    const u32 block = of_part(x, part, &dw_conv_part::block), dim = of_part(x, part, &dw_conv_part::dim), c = channel;
    work.from = (const char *)of_part(x, part, &dw_conv_part::x) +
                2 * (c / block * of_part(x, part, &dw_conv_part::x_block) + c % block);
    work.to = (char *)of_part(x, part, &dw_conv_part::out) +
              2 * (c / dim * of_part(x, part, &dw_conv_part::out_head) + c % dim);
    work.from_stride = 2 * of_part(x, part, &dw_conv_part::x_token);
    work.to_stride = 2 * of_part(x, part, &dw_conv_part::out_token);
    work.channel = channel + (part > 0 ? x.q.channels : 0) + (part > 1 ? x.k.channels : 0);
    work.state = nullptr;
    if (has_state) {
        work.state = (char *)x.state + 2 * (slot * x.state_slot + work.channel * x.state_channel);
    }
}

// Whether an octet can be accessed at once, for every token: side by side on both sides, and aligned where that counts.
DEVICE bool is_one(const Work &work, const dw_conv_args &x, int part, int channel) {
    if (channel + octet > of_part(x, part, &dw_conv_part::channels)) {
        return false;
    }
    Work last;
    place(last, x, part, channel + octet - 1, false, 0);
    constexpr int bytes = 2 * (octet - 1);
    return last.from - work.from == bytes && last.to - work.to == bytes && arch::in_one_access(work.from) &&
           arch::in_one_access(work.from + work.from_stride) && arch::in_one_access(work.to) &&
           arch::in_one_access(work.to + work.to_stride);
}

// The part, thread of it and run of a thread of a block, of a sequence whose first and last token are known. False: it
// has none.
DEVICE bool share_of(Work &work, int &part, int &group, const dw_conv_args &x, int blocks_before, int index) {
    const int q_lanes = x.q.lanes, k_lanes = x.k.lanes, all = q_lanes + k_lanes + x.v.lanes;
    const int run = index / all;
    group = index - run * all;
    part = (group >= q_lanes) + (group >= q_lanes + k_lanes);
    group -= part == 0 ? 0 : part == 1 ? q_lanes : q_lanes + k_lanes;
    work.begin = work.first + (blocks_before << x.block_log2) + (run << x.run_log2);
    work.end = min_of(work.begin + (1 << x.run_log2), work.last);
    return run >> (x.block_log2 - x.run_log2) == 0 && work.begin < work.end;
}

// A channel of a row, not rounded.
template <class T> DEVICE float channel_at(const dw_conv_args &x, const Work &work, int t) {
    float sum = x.bias ? math::canonical(load_scalar(x.bias, work.channel * x.bias_stride, x.bias_type)) : 0.0f;
#pragma unroll 1
    for (int j = 0; j < x.width; ++j) {
        const int64_t at = work.channel * x.weight_channel + j * x.weight_tap;
        const int before = token<Channels<1>>(x, work, t - (x.width - 1) + j);
        sum = __builtin_fmaf(math::canonical(load_scalar(x.weight, at, x.weight_type)), T::low(before), sum);
    }
    return x.flags & DW_CONV_SILU ? math::silu(f32x2{sum, 0.0f}).x : sum;
}

// Rows with a norm whose octets are not in one piece, channel by channel: for the sum of squares, and then for the
// output.
template <class T>
DEVICE void run_apart(const dw_conv_args &x, Work &work, int part, int channel, int end, bool has_state, int slot,
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
        const float factor = norm_factor(squares, x.team_log2);
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
    }
}

// Whether every octet of every row of q or k can be accessed at once.
DEVICE bool rows_are_whole(const dw_conv_args &x, int part) {
    const auto field = [&](auto dw_conv_part::*f) __attribute__((always_inline)) { return of_part(x, part, f); };
    const auto fits = [&](int64_t elements)
                          __attribute__((always_inline)) { return arch::in_one_access((const void *)(2 * elements)); };
    return field(&dw_conv_part::dim) % octet == 0 && field(&dw_conv_part::block) % octet == 0 &&
           arch::in_one_access(field(&dw_conv_part::x)) && fits(field(&dw_conv_part::x_token)) &&
           fits(field(&dw_conv_part::x_block)) && arch::in_one_access(field(&dw_conv_part::out)) &&
           fits(field(&dw_conv_part::out_token)) && fits(field(&dw_conv_part::out_head));
}

// What a thread of a team does, which has a head of q or k: all of the team go the same way.
template <class T>
DEVICE void run_team(const dw_conv_args &x, Work &work, int part, int group, bool has_state, int slot, bool padding) {
    const int dim = x.q.dim, head = (group >> x.team_log2) * dim;
    const int own = (group & ((1 << x.team_log2) - 1)) * octet;
    work.writes = own < dim;
    if (!rows_are_whole(x, part)) {
        run_apart<T>(arch::reread(x), work, part, head + own, head + min_of(own + octet, dim), has_state, slot,
                     padding);
        return;
    }
    // Those without an octet read that of the first, and no state.
    work.initial = work.initial && work.writes;
    place(work, x, part, head + (work.writes ? own : 0), has_state && work.writes, slot);
    run<T, octet, with_norm>(x, work, padding);
}

template <class T> DEVICE void convolution(const dw_conv_args &x, int dealt) {
    // Consecutive workgroups go to different dies. Those of neighbouring tokens, which read some rows twice, shall not.
    const int workgroup = dealt % x.dies * x.die_groups + dealt / x.dies;
    const int block = arch::uniform_value(workgroup / x.groups);
    const int sequence = arch::uniform_value(sequence_of(x, block));
    Work work;
    work.first = token_at(x, sequence);
    work.last = sequence < x.sequences ? max_of(token_at(x, sequence + 1), work.first) : x.tokens;
    const int blocks_before = block - first_block(x, work.first, sequence);
    const int first_index = (workgroup - block * x.groups) * threads;

    int slot = -1;
    if (sequence < x.sequences) {
        slot = x.slots ? arch::uniform(x.slots + sequence) : sequence;
    }
    const bool padding = slot < 0 || (x.state && slot >= x.state_slots);
    const bool has_state = x.state && !padding;
    const bool initial = has_state && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence));

    // Where lanes of a wave go different ways, all is read and computed anew: they keep no registers for each other.
    const auto next = [&]() __attribute__((always_inline)) { return first_index + arch::opaque(arch::thread()); };
    int part, group;
    work.initial = initial;
    if (x.flags & DW_CONV_QK_L2NORM) {
        const dw_conv_args &y = arch::reread(x);
        if (share_of(work, part, group, y, blocks_before, next()) && part < 2) {
            run_team<T>(y, work, part, group, has_state, slot, padding);
        }
    }
    const dw_conv_args &y = arch::reread(x);
    if (!share_of(work, part, group, y, blocks_before, next())) {
        return;
    }
    // Threads are added to those of v until teams never cross a wave.
    if (y.flags & DW_CONV_QK_L2NORM && (part < 2 || group * octet >= y.v.channels)) {
        return;
    }
    work.initial = initial;
    work.writes = true;
    const int channel = group * octet;
    place(work, y, part, channel, has_state, slot);
    if (is_one(work, y, part, channel)) {
        run<T, octet, without_norm>(y, work, padding);
        return;
    }
    // One by one.
    const dw_conv_args &z = arch::reread(x);
    share_of(work, part, group, z, blocks_before, next());
    const int end = min_of((group + 1) * octet, of_part(z, part, &dw_conv_part::channels));
#pragma unroll 1
    for (int channel = group * octet; channel < end; ++channel) {
        place(work, z, part, channel, has_state, slot);
        run<T, 1, without_norm>(z, work, padding);
    }
}

template <class T> DEVICE void launch(const dw_conv_args &x) {
    const int of_gates = x.gates.groups;
    if (arch::workgroup() < of_gates) {
        gates::compute(arch::reread(x).gates, arch::workgroup(), of_gates);
    } else {
        convolution<T>(x, arch::workgroup() - of_gates);
    }
}

} // namespace

KERNEL(threads, 2) void dw_conv_bf16(dw_conv_args x) { launch<tile::Bf16>(x); }
KERNEL(threads, 2) void dw_conv_f16(dw_conv_args x) { launch<tile::F16>(x); }
