// Gated RMS norm of the outputs of a Gated DeltaNet layer, row by row of V numbers, for token t and value head h:
//   y[t, h] = x[t, h] / sqrt(mean(x[t, h]^2) + eps) * weight * gate(z[t, h]),   gate: silu or sigmoid
// in f32, rounded once. x, y, z [T, HV, V] bf16 or f16; weight [V] f32, bf16 or f16.
//
// Sixteen lanes own a row, eight numbers each, or 32 lanes if V > 128. They compute `run` tokens of one head; the next
// lanes have the next head. A lane writes only elements that it has read itself, so y may be x.
#include "../kernel_args.h"
#include "../math/activations.h"
#include "../math/norms.h"
#include "../tensor/pieces.h"
#include "../tensor/scalar.h"

namespace {

using piece::octet;
typedef piece::Octet Values;

constexpr int threads = 256;                                // at most
constexpr int rows_at_once = arch::Traits::one_die ? 3 : 4; // of a lane, loads in flight together
constexpr int residency = arch::Traits::one_die ? 4 : 3;    // workgroups of 256 on a multiprocessor; waves on a SIMD
constexpr int short_row = 16 * octet;
static_assert(threads % 32 == 0 && arch::lanes % 32 == 0, "a row is within a wave");

// Rows of a head: address of this lane's elements of token 0, and bytes from token to token.
struct Rows {
    const char *x;
    const char *z;
    char *y;
    int64_t x_stride;
    int64_t z_stride;
    int64_t y_stride;
};

// A lane's elements of N tokens, unconverted.
template <int N> struct Raw {
    i32x4 x[N], z[N];
};

// Whether |z| < near_gate for eight numbers. Compares bits of numbers without signs; NaNs are greater than all numbers.
template <class T> DEVICE bool near(i32x4 z) {
    typedef unsigned short u16x2 __attribute__((ext_vector_type(2)));
    static_assert(math::near_gate == 64.0f, "bits of 64");
    constexpr u32 bound = __is_same(T, arch::Bf16) ? 0x4280 : 0x5400;
    u16x2 greatest = bits<u16x2>(z[0] & 0x7fff7fff);
    for (int i = 1; i < 4; ++i) {
        greatest = __builtin_elementwise_max(greatest, bits<u16x2>(z[i] & 0x7fff7fff));
    }
    return greatest[0] < bound && greatest[1] < bound;
}

// Norm of a lane's elements. `Whole`: each of its accesses to x, y and z is one.
template <class T, bool Whole> class Norm {
  public:
    DEVICE_MEMBER Norm(const dwk_norm_args &x, int column)
        : mean(x.mean), eps(x.eps), silu_gates(x.flags & DWK_NORM_SILU), long_rows(x.value_dim > short_row),
          inside(column < x.value_dim) {}

    // Loads the weights. Call it after the first `load`, so that both are under way together.
    DEVICE_MEMBER void load_weight(const dwk_norm_args &x, int column) {
        weight = inside ? read_weight(x, column) : Values{};
    }

    // Loads N tokens from token t on.
    template <int N> DEVICE_MEMBER Raw<N> load(const Rows &rows, int t) const {
        Raw<N> raw{};
        for (int i = 0; i < N && inside; ++i) {
            raw.x[i] = piece::load<false>(rows.x + (t + i) * rows.x_stride, Whole);
            raw.z[i] = piece::load<false>(rows.z + (t + i) * rows.z_stride, Whole);
        }
        return raw;
    }

    // y = x / rms(x) * weight * gate(z) for N tokens from token t on.
    template <int N> DEVICE_MEMBER void apply(const Raw<N> &raw, const Rows &rows, int t) const {
        for (int i = 0; i < N; ++i) {
            const Values x = piece::widened<T>(raw.x[i]);
            float squares = 0.0f;
            for (int e = 0; e < octet; ++e) {
                squares = __builtin_fmaf(x[e], x[e], squares);
            }
            float sum = arch::row_sum(squares);
            if (long_rows) {
                sum += arch::other_row(sum);
            }
            const float factor = math::inverse_rms(sum, mean, eps);
            if (inside) {
                const i32x4 y = near<T>(raw.z[i]) ? gated<math::gated_near>(raw.x[i], factor, raw.z[i])
                                                  : gated<math::gated>(raw.x[i], factor, raw.z[i]);
                piece::store<false>(rows.y + (t + i) * rows.y_stride, y, Whole);
            }
        }
    }

  private:
    template <f32x2 (*Gated)(f32x2, f32x2, bool)> DEVICE_MEMBER i32x4 gated(i32x4 x, float factor, i32x4 z) const {
        i32x4 y;
        for (int i = 0; i < 4; ++i) {
            const f32x2 normed = f32x2{T::low(x[i]), T::high(x[i])} * factor * f32x2{weight[2 * i], weight[2 * i + 1]};
            const f32x2 pair = Gated(normed, f32x2{T::low(z[i]), T::high(z[i])}, silu_gates);
            y[i] = T::pack(math::packable(pair[0]), math::packable(pair[1]));
        }
        return y;
    }

    static DEVICE_MEMBER Values read_weight(const dwk_norm_args &x, int column) {
        constexpr int own_type = __is_same(T, arch::Bf16) ? DWK_BF16 : DWK_F16;
        if (!x.weight) {
            return (Values)1.0f;
        }
        if (Whole && x.weight_stride == 1 && arch::in_one_access(x.weight)) {
            if (x.weight_type == own_type) {
                return piece::widened<T>(arch::load_b128((const char *)x.weight + 2 * column));
            }
            if (x.weight_type == DWK_F32) {
                const char *p = (const char *)x.weight + 4 * column;
                Values out{};
                out.lo = bits<f32x4>(arch::load_b128(p));
                out.hi = bits<f32x4>(arch::load_b128(p + 16));
                return out;
            }
        }
        Values out{};
#pragma unroll 1
        for (int e = 0; e < octet; ++e) {
            for (int i = 0; i < octet - 1; ++i) {
                out[i] = out[i + 1];
            }
            out[octet - 1] = load_scalar(x.weight, (column + e) * x.weight_stride, x.weight_type);
        }
        return out;
    }

    Values weight;
    float mean, eps;
    bool silu_gates, long_rows, inside;
};

// Computes rows from token t on, N at a time, while there are N before `end`; returns the token after them. `first`:
// the weights are not loaded yet.
template <int N, class Norm>
DEVICE int walk_rows(Norm &norm, const Rows &rows, const dwk_norm_args &x, int column, int t, int end, bool first) {
    if (t + N > end) {
        return t;
    }
    Raw<N> raw = norm.template load<N>(rows, t);
    if (first) {
        norm.load_weight(x, column);
    }
#pragma unroll 1
    for (;;) {
        norm.template apply<N>(raw, rows, t);
        t += N;
        if (t + N > end) {
            return t;
        }
        raw = norm.template load<N>(rows, t);
    }
}

template <class T, bool Whole> DEVICE void walk(const dwk_norm_args &x) {
    const int row_lanes = x.value_dim > short_row ? 32 : 16;
    const u32 index = arch::workgroup() * x.group_heads + arch::thread() / row_lanes;
    const int run = index / (u32)x.value_heads, head = index - run * x.value_heads;
    const int column = arch::thread() % row_lanes * octet;
    const int block = (u32)head / (u32)x.block_heads;
    Rows rows;
    rows.x = (const char *)x.x + 2 * (head * x.x_strides.head + column);
    rows.z = (const char *)x.z + 2 * (block * x.z_block + (head - block * x.block_heads) * x.value_dim + column);
    rows.y = (char *)x.y + 2 * (head * x.y_strides.head + column);
    rows.x_stride = 2 * x.x_strides.token;
    rows.z_stride = 2 * x.z_token;
    rows.y_stride = 2 * x.y_strides.token;

    const int start = run * x.run, end = min_of(start + x.run, x.tokens);
    Norm<T, Whole> norm(x, column);
    int t = start;
    if (Whole) {
        t = walk_rows<rows_at_once>(norm, rows, x, column, t, end, true);
    }
    walk_rows<1>(norm, rows, x, column, t, end, t == start);
}

template <class T> DEVICE void norm(const dwk_norm_args &x) {
    const u64 strides =
        x.x_strides.head | x.x_strides.token | x.y_strides.head | x.y_strides.token | x.z_token | x.z_block;
    const u64 addresses = (u64)x.x | (u64)x.z | (u64)x.y | 2 * strides;
    if (arch::in_one_access((const void *)addresses)) {
        walk<T, true>(x);
    } else {
        walk<T, false>(x);
    }
}

} // namespace

KERNEL(threads, residency) void dw_norm_bf16(dwk_norm_args x) { norm<arch::Bf16>(x); }
KERNEL(threads, residency) void dw_norm_f16(dwk_norm_args x) { norm<arch::F16>(x); }
