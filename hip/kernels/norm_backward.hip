// Backward of the gated RMS norm (norm.hip). Per row of V numbers, with n = x / sqrt(mean(x^2) + eps):
//   dn = dy * weight * gate(z)
//   dx = (dn - n mean(n * dn)) / sqrt(mean(x^2) + eps)
//   dz = dy * weight * n * gate'(z)
//   dweight = sum over rows of dy * n * gate(z)
// in f32, rounded once. x, dy, dx [T, HV, V], z, dz [T, blocks, heads * V] bf16 or f16; weight [V] f32, bf16 or f16.
//
// Sixteen lanes own a row, eight numbers each, or 32 lanes if V > 128. A workgroup computes adjacent rows, `run` for
// each row of lanes, and leaves its sums for dweight, which gradient_sums adds up.
#include "../kernel_args.h"
#include "../math/activations.h"
#include "../math/norms.h"
#include "../tensor/pieces.h"
#include "../tensor/scalar.h"

namespace {

using piece::octet;
typedef piece::Octet Values;

constexpr int threads = 256;
constexpr int short_row = 16 * octet;

DEVICE Values read_weight(const dwk_norm_args &x, int column) {
    Values out = (Values)1.0f;
    if (x.weight) {
#pragma unroll 1
        for (int e = 0; e < octet; ++e) {
            for (int i = 0; i < octet - 1; ++i) {
                out[i] = out[i + 1];
            }
            out[octet - 1] = load_scalar(x.weight, (column + e) * x.weight_stride, x.weight_type);
        }
    }
    return out;
}

template <class T> DEVICE i32x4 packed(Values x) {
    i32x4 out;
    for (int i = 0; i < 4; ++i) {
        out[i] = T::pack(math::packable(x[2 * i]), math::packable(x[2 * i + 1]));
    }
    return out;
}

// `Whole`: each of a lane's accesses to tensors over tokens is one.
template <class T, int RowLanes, bool Whole>
DEVICE void differentiate(const dwk_norm_backward_args &args, float *of_lanes) {
    constexpr int at_once = threads / RowLanes, columns = RowLanes * octet;
    const dwk_norm_args &x = args.norm;
    const int row_lane = arch::thread() / RowLanes, column = arch::thread() % RowLanes * octet;
    const bool inside = column < x.value_dim, with_silu = x.flags & DWK_NORM_SILU;
    const Values weight = inside ? read_weight(x, column) : Values{};
    const u32 rows = (u32)x.tokens * (u32)x.value_heads;
    u32 end = x.tokens;
    if (args.cu_seqlens) {
        const int64_t last = args.wide ? arch::uniform((const int64_t *)args.cu_seqlens + args.last)
                                       : arch::uniform((const int32_t *)args.cu_seqlens + args.last);
        end = (u32)max_of<int64_t>(0, min_of<int64_t>(last, x.tokens));
    }
    u32 row = (u32)arch::workgroup() * x.run * at_once + row_lane;
    Values sums{};
#pragma unroll 1
    for (int i = 0; i < x.run; ++i, row += at_once) {
        const bool there = inside && row < rows;
        const u32 token = row / (u32)x.value_heads, head = row - token * x.value_heads;
        i32x4 raw_x{}, raw_z{}, raw_y{};
        if (there && token < end) {
            const u32 block = head / (u32)x.block_heads, of_block = head - block * x.block_heads;
            raw_x = piece::load<false>(
                (const char *)x.x + 2 * (token * x.x_strides.token + head * x.x_strides.head + column), Whole);
            raw_z = piece::load<false>(
                (const char *)x.z + 2 * (token * x.z_token + block * x.z_block + of_block * x.value_dim + column),
                Whole);
            raw_y = piece::load<false>(
                (const char *)x.y + 2 * (token * x.y_strides.token + head * x.y_strides.head + column), Whole);
        }
        const Values own = piece::widened<T>(raw_x), z = piece::widened<T>(raw_z), d_y = piece::widened<T>(raw_y);
        Values d_normed, d_z, d_weight;
        f32x2 squares{}, along{};
        for (int e = 0; e < octet; e += 2) {
            const f32x2 pair{own[e], own[e + 1]};
            math::Slope gate = math::slope(f32x2{z[e], z[e + 1]}, with_silu);
            for (int n = 0; n < 2; ++n) {
                // As in the forward: z of padding may hold anything.
                if (pair[n] == 0.0f && !(math::abs(z[e + n]) < __builtin_inff())) {
                    gate.value[n] = gate.slope[n] = 0.0f;
                }
            }
            const f32x2 d{d_y[e], d_y[e + 1]};
            const f32x2 weighted = d * f32x2{weight[e], weight[e + 1]};
            const f32x2 normed = weighted * gate.value, of_z = weighted * gate.slope, of_weight = d * gate.value;
            squares = __builtin_elementwise_fma(pair, pair, squares);
            along = __builtin_elementwise_fma(pair, normed, along);
            for (int n = 0; n < 2; ++n) {
                d_normed[e + n] = normed[n];
                d_z[e + n] = of_z[n];
                d_weight[e + n] = of_weight[n];
            }
        }
        float square = arch::row_sum(squares[0] + squares[1]), dot = arch::row_sum(along[0] + along[1]);
        if (RowLanes > 16) {
            square += arch::other_row(square);
            dot += arch::other_row(dot);
        }
        const float factor = math::inverse_rms(square, x.mean, x.eps);
        const Values normed = own * factor;
        sums = __builtin_elementwise_fma(d_weight, normed, sums);
        const dwk_norm_backward_args &to_write = arch::reread(args); // saves scalar registers
        if (there && to_write.d_x) {
            const Values d_x = (d_normed - normed * (dot * factor * x.mean)) * factor;
            char *const to = (char *)to_write.d_x +
                             2 * (token * to_write.d_x_strides.token + head * to_write.d_x_strides.head + column);
            piece::store<false>(to, packed<T>(d_x), Whole);
        }
        if (there && to_write.d_z) {
            const u32 block = head / (u32)to_write.d_z_heads, of_block = head - block * to_write.d_z_heads;
            char *const to = (char *)to_write.d_z + 2 * (token * to_write.d_z_token + block * to_write.d_z_block +
                                                         of_block * to_write.norm.value_dim + column);
            piece::store<false>(to, packed<T>(d_z * normed), Whole);
        }
    }
    if (args.partials) {
        for (int e = 0; e < octet; ++e) {
            of_lanes[row_lane * columns + column + e] = sums[e];
        }
        arch::workgroup_sync();
        const int own = arch::thread();
        if (own < x.value_dim) {
            float sum = 0.0f;
            for (int i = 0; i < at_once; ++i) {
                sum += of_lanes[i * columns + own];
            }
            args.partials[(int64_t)arch::workgroup() * x.value_dim + own] = sum;
        }
    }
}

template <class T, bool Whole> DEVICE void by_length(const dwk_norm_backward_args &x, float *of_lanes) {
    if (x.norm.value_dim > short_row) {
        differentiate<T, 32, Whole>(x, of_lanes);
    } else {
        differentiate<T, 16, Whole>(x, of_lanes);
    }
}

template <class T> DEVICE void norm_backward(const dwk_norm_backward_args &x) {
    SHARED float of_lanes[threads * octet]; // each lane's sums
    const dwk_norm_args &n = x.norm;
    const u64 strides = n.x_strides.head | n.x_strides.token | n.y_strides.head | n.y_strides.token | n.z_token |
                        n.z_block | x.d_x_strides.head | x.d_x_strides.token | x.d_z_token | x.d_z_block;
    const u64 addresses = (u64)n.x | (u64)n.z | (u64)n.y | (u64)x.d_x | (u64)x.d_z | 2 * strides;
    if (arch::in_one_access((const void *)addresses)) {
        by_length<T, true>(x, of_lanes);
    } else {
        by_length<T, false>(x, of_lanes);
    }
}

} // namespace

KERNEL(threads, 2) void dw_norm_backward_bf16(dwk_norm_backward_args x) { norm_backward<arch::Bf16>(x); }
KERNEL(threads, 2) void dw_norm_backward_f16(dwk_norm_backward_args x) { norm_backward<arch::F16>(x); }
