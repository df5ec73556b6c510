// Causal depthwise convolution of the packed projections, split into q, k and v. For token t of a sequence, channel c:
//   y[t, c] = activation(bias[c] + sum over j of weight[c, j] x[t - (width - 1) + j, c])
// summed in f32 by fused multiply-adds, bias first, then the oldest token; rounded once. Tokens before the sequence are
// the last columns of its conv state, or zeros. The conv state becomes the last tokens of (old state, sequence).
//
// A thread owns eight channels and walks over a run of consecutive tokens, the last width - 1 of them in registers. The
// threads of a block of tokens, of one sequence, are numbered octet of channels by octet, then run by run, and fill
// `groups` workgroups. Blocks are numbered as in prefill: sequence n owns those from cu_seqlens[n] / tokens of a block
// + n on. The thread that reads a sequence's state is the one that writes it, so that nothing has to be synchronised.
#include "../tile/tile.h"

namespace {

constexpr int threads = 256;
constexpr int octet = 8;
constexpr int rows_at_once = 4; // whose loads are under way together

// N adjacent channels of a token: as numbers, and as they lie in memory.
template <int N> struct Channels;
template <> struct Channels<octet> {
    typedef float Values __attribute__((ext_vector_type(octet)));
    typedef i32x4 Bits;
    static DEVICE_MEMBER Bits load(const char *p) { return arch::load_b128(p); }
    static DEVICE_MEMBER void store(char *p, Bits x) { arch::store_b128(p, x); }
    template <class T> static DEVICE_MEMBER Values widened(Bits x) {
        return Values{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y),
                      T::low(x.z), T::high(x.z), T::low(x.w), T::high(x.w)};
    }
    template <class T> static DEVICE_MEMBER Bits rounded(Values x) {
        return Bits{T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
    }
    // The same of channels that are `stride` bytes apart.
    static DEVICE_MEMBER Bits gather(const char *p, int64_t stride) {
        if (stride == 2 && arch::in_one_access(p)) {
            return load(p);
        }
        Bits out;
        for (int i = 0; i < octet / 2; ++i) {
            out[i] = *(const unsigned short *)(p + 2 * i * stride) | *(const unsigned short *)(p + (2 * i + 1) * stride)
                                                                         << 16;
        }
        return out;
    }
    static DEVICE_MEMBER void scatter(char *p, int64_t stride, Bits x) {
        if (stride == 2 && arch::in_one_access(p)) {
            return store(p, x);
        }
        for (int i = 0; i < octet / 2; ++i) {
            *(short *)(p + 2 * i * stride) = (short)x[i];
            *(short *)(p + (2 * i + 1) * stride) = (short)(x[i] >> 16);
        }
    }
};
template <> struct Channels<1> {
    typedef float Values __attribute__((ext_vector_type(1)));
    typedef int Bits;
    static DEVICE_MEMBER Bits load(const char *p) { return *(const unsigned short *)p; }
    static DEVICE_MEMBER void store(char *p, Bits x) { *(short *)p = (short)x; }
    template <class T> static DEVICE_MEMBER Values widened(Bits x) { return Values{T::low(x)}; }
    template <class T> static DEVICE_MEMBER Bits rounded(Values x) { return T::pack(x[0], 0.0f); }
    static DEVICE_MEMBER Bits gather(const char *p, int64_t) { return load(p); }
    static DEVICE_MEMBER void scatter(char *p, int64_t, Bits x) { store(p, x); }
};

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
};

// The filters of N channels.
template <class T, int Width, int N> class Filter {
  public:
    typedef typename Channels<N>::Values Values;
    typedef typename Channels<N>::Bits Bits;

    DEVICE_MEMBER Filter(const dw_conv_args &x, int channel) : bias{}, silu_follows(x.flags & DW_CONV_SILU) {
        if (!load_dense(x, (const char *)x.weight + 2 * Width * (int64_t)channel)) {
            for (int j = 0; j < Width; ++j) {
                weight[j] = Values{};
            }
#pragma unroll 1
            for (int j = 0; j < Width; ++j) {
                for (int i = 0; i < Width - 1; ++i) {
                    weight[i] = weight[i + 1];
                }
                weight[Width - 1] =
                    read(x.weight, channel * x.weight_channel + j * x.weight_tap, x.weight_channel, x.weight_type);
            }
        }
        if (x.bias) {
            bias = read(x.bias, channel * x.bias_stride, x.bias_stride, x.bias_type);
        }
    }

    // The output of a token; `before` holds the tokens before it, oldest first, and moves on.
    DEVICE_MEMBER Bits apply(Values (&before)[Width - 1], Bits bits) const {
        const Values now = Channels<N>::template widened<T>(bits);
        Values sum = bias;
        for (int j = 0; j < Width - 1; ++j) {
            sum = __builtin_elementwise_fma(weight[j], before[j], sum);
        }
        sum = __builtin_elementwise_fma(weight[Width - 1], now, sum);
        push(before, now);
        if (silu_follows) {
            for (int i = 0; i < N; i += 2) {
                const f32x2 y = math::silu(f32x2{sum[i], N > 1 ? sum[i + 1] : 0.0f});
                sum[i] = y.x;
                if (N > 1) {
                    sum[i + 1] = y.y;
                }
            }
        }
        return Channels<N>::template rounded<T>(sum);
    }

    static DEVICE_MEMBER void push(Values (&before)[Width - 1], Values now) {
        for (int j = 0; j < Width - 2; ++j) {
            before[j] = before[j + 1];
        }
        before[Width - 2] = now;
    }

  private:
    // Weights of the type of x that are dense, in few loads.
    DEVICE_MEMBER bool load_dense(const dw_conv_args &x, const char *p) {
        constexpr int own_type = __is_same(T, tile::Bf16) ? DW_BF16 : DW_F16;
        if constexpr (N == octet) {
            if (x.weight_type == own_type && x.weight_tap == 1 && x.weight_channel == Width && arch::in_one_access(p)) {
                i32x4 raw[Width];
                for (int i = 0; i < Width; ++i) {
                    raw[i] = arch::load_b128(p + 16 * i);
                }
                for (int at = 0; at < N * Width; ++at) {
                    const int word = raw[at / 8][at / 2 % 4];
                    weight[at % Width][at / Width] = at % 2 ? T::high(word) : T::low(word);
                }
                return true;
            }
        }
        return false;
    }

    // A NaN of 16 bits survives rounding, one of f32 need not.
    static DEVICE_MEMBER Values read(const void *p, int64_t index, int64_t stride, int type) {
        Values out;
        for (int i = 0; i < N; ++i) {
            out[i] = math::canonical(load_scalar(p, index + i * stride, type));
        }
        return out;
    }

    Values weight[Width], bias;
    bool silu_follows;
};

// `Rows` tokens of a run, the next at `from` and `to`, which move on.
template <int Rows, class T, int Width, int N>
DEVICE void step(const Filter<T, Width, N> &filter, typename Channels<N>::Values (&before)[Width - 1], const Work &work,
                 const char *&from, char *&to) {
    typename Channels<N>::Bits raw[Rows];
    for (int i = 0; i < Rows; ++i) {
        raw[i] = Channels<N>::load(from);
        from += work.from_stride;
    }
    for (int i = 0; i < Rows; ++i) {
        Channels<N>::store(to, filter.apply(before, raw[i]));
        to += work.to_stride;
    }
}

template <class T, int Width, int N> DEVICE void convolve(const dw_conv_args &x, const Work &work) {
    typedef Channels<N> Some;
    const auto column = [&](int index)
                            __attribute__((always_inline)) { return work.state + 2 * index * x.state_column; };
    // A token of the sequence, or of its state: the last column is the token before the first.
    const auto token = [&](int t) __attribute__((always_inline)) -> typename Some::Bits {
        if (t >= work.first) {
            return Some::load(work.from + t * work.from_stride);
        }
        if (!work.initial) {
            return typename Some::Bits{};
        }
        return Some::gather(column(x.state_columns + t - work.first), 2 * x.state_channel);
    };
    const Filter<T, Width, N> filter(x, work.channel);
    typename Some::Values before[Width - 1] = {};
#pragma unroll 1
    for (int t = work.begin - (Width - 1); t < work.begin; ++t) {
        filter.push(before, Some::template widened<T>(token(t)));
    }
    if (work.state && work.begin == work.first && !(x.flags & DW_CONV_KEEP_STATES)) {
        // Ascending: in a sequence shorter than the state a column is read before it is written.
#pragma unroll 1
        for (int j = 0; j < x.state_columns; ++j) {
            Some::scatter(column(j), 2 * x.state_channel, token(work.last - x.state_columns + j));
        }
    }
    const char *from = work.from + work.begin * work.from_stride;
    char *to = work.to + work.begin * work.to_stride;
    int left = work.end - work.begin;
#pragma unroll 1
    for (; left >= rows_at_once; left -= rows_at_once) {
        step<rows_at_once, T, Width, N>(filter, before, work, from, to);
    }
#pragma unroll 1
    for (; left > 0; --left) {
        step<1, T, Width, N>(filter, before, work, from, to);
    }
}

// `padding`: the sequence has no slot, or the tokens belong to none.
template <class T, int N> DEVICE void run(const dw_conv_args &x, const Work &work, bool padding) {
    if (padding) {
#pragma unroll 1
        for (int t = work.begin; t < work.end; ++t) {
            Channels<N>::store(work.to + t * work.to_stride, typename Channels<N>::Bits{});
        }
    } else if (x.width == 2) {
        convolve<T, 2, N>(x, work);
    } else if (x.width == 3) {
        convolve<T, 3, N>(x, work);
    } else {
        convolve<T, 4, N>(x, work);
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

DEVICE int octets(const dw_conv_part &part) { return (part.channels + octet - 1) / octet; }

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

// The part, octet and run of a thread of a block, of a sequence whose first and last token are known. False: it has
// none.
DEVICE bool share_of(Work &work, int &part, int &group, const dw_conv_args &x, int blocks_before, int index) {
    const int q_octets = octets(x.q), k_octets = octets(x.k), all = q_octets + k_octets + octets(x.v);
    const int run = index / all;
    group = index - run * all;
    part = (group >= q_octets) + (group >= q_octets + k_octets);
    group -= part == 0 ? 0 : part == 1 ? q_octets : q_octets + k_octets;
    work.begin = work.first + (blocks_before << x.block_log2) + (run << x.run_log2);
    work.end = min_of(work.begin + (1 << x.run_log2), work.last);
    return run >> (x.block_log2 - x.run_log2) == 0 && work.begin < work.end;
}

template <class T> DEVICE void conv(const dw_conv_args &x) {
    // Consecutive workgroups go to different dies. Those of neighbouring tokens, which read some rows twice, shall not.
    const int workgroup = arch::workgroup() % x.dies * x.die_groups + arch::workgroup() / x.dies;
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
    work.initial = has_state && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence));

    int part, group;
    if (!share_of(work, part, group, x, blocks_before, first_index + arch::thread())) {
        return;
    }
    const int channel = group * octet;
    place(work, x, part, channel, has_state, slot);
    if (is_one(work, x, part, channel)) {
        run<T, octet>(x, work, padding);
        return;
    }
    // One by one. All is read and computed anew: lanes beside such that come here keep no registers for it.
    const dw_conv_args &again = arch::reread(x);
    share_of(work, part, group, again, blocks_before, first_index + arch::opaque(arch::thread()));
    const int end = min_of((group + 1) * octet, of_part(again, part, &dw_conv_part::channels));
#pragma unroll 1
    for (int channel = group * octet; channel < end; ++channel) {
        place(work, again, part, channel, has_state, slot);
        run<T, 1>(again, work, padding);
    }
}

} // namespace

KERNEL(threads, 2) void dw_conv_bf16(dw_conv_args x) { conv<tile::Bf16>(x); }
KERNEL(threads, 2) void dw_conv_f16(dw_conv_args x) { conv<tile::F16>(x); }
