// What a thread of the convolution does with adjacent channels: how they lie in memory, and their filters.
#pragma once

#include "tile.h"

namespace conv {

constexpr int octet = 8;

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

// The filters of N channels.
template <class T, int Width, int N> class Filter {
  public:
    typedef typename Channels<N>::Values Values;
    typedef typename Channels<N>::Bits Bits;

    DEVICE_MEMBER Filter(const dwk_conv_args &x, int channel) : bias{}, silu_follows(x.flags & DWK_CONV_SILU) {
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

    // The output of a token, not rounded; `before` holds the tokens before it, oldest first, and moves on.
    DEVICE_MEMBER Values apply(Values (&before)[Width - 1], Bits bits) const {
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
        return sum;
    }

    static DEVICE_MEMBER void push(Values (&before)[Width - 1], Values now) {
        for (int j = 0; j < Width - 2; ++j) {
            before[j] = before[j + 1];
        }
        before[Width - 2] = now;
    }

  private:
    // Weights of the type of x that are dense, in few loads.
    DEVICE_MEMBER bool load_dense(const dwk_conv_args &x, const char *p) {
        constexpr int own_type = __is_same(T, tile::Bf16) ? DWK_BF16 : DWK_F16;
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

} // namespace conv
