// Gated RMS norm of the outputs of a Gated DeltaNet layer, row by row of V numbers, for token t and value head h:
//   y[t, h] = x[t, h] / sqrt(mean(x[t, h]^2) + eps) * weight * gate(z[t, h]),   gate: silu or sigmoid
// in f32, rounded once. x, y, z [T, HV, V] bf16 or f16; weight [V] f32, bf16 or f16.
//
// Sixteen lanes own a row, eight numbers each, or twice eight if V > 128. They compute `run` tokens of one head; the
// next sixteen lanes have the next head. A lane writes only elements that it has read itself, so y may be x.
#include "../kernel_args.h"
#include "../math/activations.h"
#include "../math/norms.h"
#include "../tensor/pieces.h"
#include "../tensor/scalar.h"

namespace {

using piece::octet;
typedef piece::Octet Values;

constexpr int threads = 256;
constexpr int row_lanes = 16;
constexpr int octets_at_once = 4; // loads in flight together
static_assert(threads % row_lanes == 0 && arch::lanes % row_lanes == 0, "a row is within a wave");

DEVICE i32x4 load(const char *p) { return piece::load<false>(p, arch::in_one_access(p)); }
DEVICE void store(char *p, i32x4 x) { piece::store<false>(p, x, arch::in_one_access(p)); }

// Rows of a head: address of this lane's elements of token 0, and bytes from token to token.
struct Rows {
    const char *x;
    const char *z;
    char *y;
    int64_t x_stride;
    int64_t z_stride;
    int64_t y_stride;
};

// Norm of a lane's elements: octet o begins at column + 128 o.
template <class T, int Octets> class Norm {
  public:
    DEVICE_MEMBER explicit Norm(const dwk_norm_args &x, int column)
        : mean(x.mean), eps(x.eps), silu_gates(x.flags & DWK_NORM_SILU) {
        for (int o = 0; o < Octets; ++o) {
            inside[o] = column + o * row_lanes * octet < x.value_dim;
            weight[o] = inside[o] ? read_weight(x, column + o * row_lanes * octet) : Values{};
        }
    }

    // y = x / rms(x) * weight * gate(z) for N tokens from token t on.
    template <int N> DEVICE_MEMBER void apply(const Rows &rows, int t) const {
        i32x4 x[N][Octets], z[N][Octets];
        for (int i = 0; i < N; ++i) {
            for (int o = 0; o < Octets; ++o) {
                x[i][o] = z[i][o] = i32x4{};
                if (inside[o]) {
                    x[i][o] = load(rows.x + (t + i) * rows.x_stride + o * bytes);
                    z[i][o] = load(rows.z + (t + i) * rows.z_stride + o * bytes);
                }
            }
        }
        for (int i = 0; i < N; ++i) {
            float squares = 0.0f;
            for (int o = 0; o < Octets; ++o) {
                const Values v = piece::widened<T>(x[i][o]);
                for (int e = 0; e < octet; ++e) {
                    squares = __builtin_fmaf(v[e], v[e], squares);
                }
            }
            const float factor = math::inverse_rms(arch::row_sum(squares), mean, eps);
            for (int o = 0; o < Octets; ++o) {
                if (inside[o]) {
                    const Values y = gated(piece::widened<T>(x[i][o]) * factor * weight[o], piece::widened<T>(z[i][o]));
                    store(rows.y + (t + i) * rows.y_stride + o * bytes, piece::rounded<T>(y));
                }
            }
        }
    }

  private:
    static constexpr int bytes = 2 * row_lanes * octet;

    DEVICE_MEMBER Values gated(Values x, Values z) const {
        Values y;
        for (int e = 0; e < octet; e += 2) {
            const f32x2 pair = math::gated(f32x2{x[e], x[e + 1]}, f32x2{z[e], z[e + 1]}, silu_gates);
            y[e] = math::canonical(pair[0]);
            y[e + 1] = math::canonical(pair[1]);
        }
        return y;
    }

    static DEVICE_MEMBER Values read_weight(const dwk_norm_args &x, int column) {
        constexpr int own_type = __is_same(T, arch::Bf16) ? DWK_BF16 : DWK_F16;
        if (!x.weight) {
            return (Values)1.0f;
        }
        if (x.weight_stride == 1 && x.weight_type == own_type) {
            return piece::widened<T>(load((const char *)x.weight + 2 * column));
        }
        Values out{};
        if (x.weight_stride == 1 && x.weight_type == DWK_F32) {
            const char *p = (const char *)x.weight + 4 * column;
            out.lo = bits<f32x4>(load(p));
            out.hi = bits<f32x4>(load(p + 16));
            return out;
        }
#pragma unroll 1
        for (int e = 0; e < octet; ++e) {
            for (int i = 0; i < octet - 1; ++i) {
                out[i] = out[i + 1];
            }
            out[octet - 1] = load_scalar(x.weight, (column + e) * x.weight_stride, x.weight_type);
        }
        return out;
    }

    Values weight[Octets];
    bool inside[Octets];
    float mean, eps;
    bool silu_gates;
};

template <class T, int Octets> DEVICE void walk(const dwk_norm_args &x) {
    const int index = arch::workgroup() * (threads / row_lanes) + arch::thread() / row_lanes;
    const int run = index / x.value_heads, head = index - run * x.value_heads;
    const int column = arch::thread() % row_lanes * octet;
    const int block = head / x.block_heads;
    Rows rows;
    rows.x = (const char *)x.x + 2 * (head * x.x_strides.head + column);
    rows.z = (const char *)x.z + 2 * (block * x.z_block + (head - block * x.block_heads) * x.value_dim + column);
    rows.y = (char *)x.y + 2 * (head * x.y_strides.head + column);
    rows.x_stride = 2 * x.x_strides.token;
    rows.z_stride = 2 * x.z_token;
    rows.y_stride = 2 * x.y_strides.token;

    int t = run * x.run;
    const int end = min_of(t + x.run, x.tokens);
    if (t >= end) {
        return;
    }
    const Norm<T, Octets> norm(x, column);
    constexpr int rows_at_once = octets_at_once / Octets;
#pragma unroll 1
    for (; t + rows_at_once <= end; t += rows_at_once) {
        norm.template apply<rows_at_once>(rows, t);
    }
#pragma unroll 1
    for (; t < end; ++t) {
        norm.template apply<1>(rows, t);
    }
}

template <class T> DEVICE void norm(const dwk_norm_args &x) {
    if (x.value_dim <= row_lanes * octet) {
        walk<T, 1>(x);
    } else {
        walk<T, 2>(x);
    }
}

} // namespace

KERNEL(threads, 2) void dw_norm_bf16(dwk_norm_args x) { norm<arch::Bf16>(x); }
KERNEL(threads, 2) void dw_norm_f16(dwk_norm_args x) { norm<arch::F16>(x); }
