// The filters of a thread's channels, and the formula of the convolution.
#pragma once

#include "../kernel_args.h"
#include "../math/activations.h"
#include "../tensor/scalar.h"
#include "channels.h"

namespace conv {

// Filters of N adjacent channels in registers: weights w [channels, Width] and biases.
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

    // y[t] = activation(bias + sum over j of w[j] x[t - (Width - 1) + j]) in f32. `before`: x of the Width - 1 tokens
    // before t, oldest first; shifted by one token.
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
    // Loads weights 16 bytes at a time. Returns false, and loads nothing, unless they are dense and of the type of x,
    // and one access can cover 16 bytes.
    DEVICE_MEMBER bool load_dense(const dwk_conv_args &x, const char *p) {
        constexpr int own_type = __is_same(T, arch::Bf16) ? DWK_BF16 : DWK_F16;
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

    // Reads weights as f32. NaNs become canonical, because the payload of an f32 NaN may be lost when it is rounded.
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
