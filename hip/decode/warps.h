// Decode by warps of 32 lanes, for targets with Traits::decode_by_warps. A team of warps owns 32 value columns of a
// state, in registers. Value-major: a warp owns columns, a lane four keys of each. Key-major: a lane owns eight keys of
// four columns. Exchanges between lanes add up over keys: value-major states need no barrier, key-major states one for
// each token. The order of sums does not depend on the number of warps.
#pragma once

#include "../math/norms.h"
#include "norm.h"
#include "state.h"

namespace decode {
namespace warps {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

constexpr int lanes = 32;
constexpr int part_keys = 128;           // keys of a part of the state: the warp's, value-major; the team's, key-major
constexpr int eight = 8;                 // columns whose sums a warp adds up together, and consecutive keys of a lane
constexpr int slots = part_keys / lanes; // of 32 keys, key-major: each is added up on its own

// A team of a row with the gated norm has fewer warps, so that two rows fit a multiprocessor.
template <bool Norm> struct Team {
    static constexpr int warps = Norm ? 2 : 4;
    static constexpr int threads = warps * lanes;
    static constexpr int groups = columns / warps / eight; // of eight columns of a warp, value-major
    static constexpr int blocks = slots / warps;           // of 32 keys of a warp, key-major
    static DEVICE_MEMBER int warp() { return arch::thread() / lanes % warps; }
    static DEVICE_MEMBER int index() { return arch::thread() / threads; }
};

DEVICE int lane() { return arch::thread() % lanes; }

DEVICE int quotient(int n, const dwk_divisor &by) { return (int)((u64)(u32)n * by.multiplier >> by.shift); }

// Work of this thread's team.
template <bool Norm> DEVICE Work work_of(const dwk_decode_args &x) {
    const int index = quotient(arch::workgroup(), x.by_slabs), slab = arch::workgroup() - index * x.slabs;
    const int sequence = quotient(index, x.by_value_heads), head = index - sequence * x.value_heads;
    // The divisor is HV / HK, or HK with DWK_TILED_HEADS.
    const int of_head = quotient(head, x.by_key_heads);
    const int key_head = x.flags & DWK_TILED_HEADS ? head - of_head * x.key_heads : of_head;
    return Work{sequence, head, key_head, (slab + Team<Norm>::index()) * columns};
}

// Adds up N values over lanes that differ in Step, Step / 2, ... Each step halves the values of a lane: lanes with the
// bit keep the upper half.
template <int Step, int N> DEVICE float spread_sum(const float (&x)[N]) {
    const bool upper = lane() & Step;
    float half[N / 2];
    for (int i = 0; i < N / 2; ++i) {
        const float low = x[i], high = x[i + N / 2]; // values: an address that depends on the lane is no register
        half[i] = (upper ? high : low) + arch::swap32<Step>(upper ? low : high);
    }
    if constexpr (N == 2) {
        return half[0];
    } else {
        return spread_sum<Step / 2>(half);
    }
}

// N 16-bit numbers at p, four to a pair of words. `whole`: one access can cover 16 bytes at p.
template <int N> DEVICE void load_numbers(i32x2 (&out)[N / 4], const unsigned short *p, bool whole) {
    for (int i = 0; i < N / 4; ++i) {
        out[i] =
            whole ? arch::load_b64(p + 4 * i) : i32x2{p[4 * i] | p[4 * i + 1] << 16, p[4 * i + 2] | p[4 * i + 3] << 16};
    }
}
// x, which the compiler then widens again where it is used, rather than to keep twice the registers.
DEVICE i32x2 packed(i32x2 x) { return i32x2{arch::opaque(x.x), arch::opaque(x.y)}; }
template <class T> DEVICE f32x4 widened(i32x2 x) { return f32x4{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y)}; }

// q and k of a token: this lane's four keys of every 128, zeros beyond K.
template <int Parts> struct Keys {
    i32x2 q[Parts], k[Parts];
};
template <int Parts> DEVICE Keys<Parts> load_keys(const unsigned short *q, const unsigned short *k, int key_dim) {
    Keys<Parts> out{};
    const bool whole = arch::in_one_access(q) && arch::in_one_access(k);
    for (int j = 0; j < Parts; ++j) {
        const int key = 4 * lane() + j * part_keys;
        if (key < key_dim) {
            i32x2 part[1];
            load_numbers<4>(part, q + key, whole);
            out.q[j] = part[0];
            load_numbers<4>(part, k + key, whole);
            out.k[j] = part[0];
        }
    }
    return out;
}

// Adds k.k, q.q and k.q of four keys.
template <class T> DEVICE void add_dots(f32x4 &out, i32x2 of_q, i32x2 of_k) {
    const f32x4 q = widened<T>(of_q), k = widened<T>(of_k);
    for (int i = 0; i < 4; ++i) {
        out[0] = __builtin_fmaf(k[i], k[i], out[0]);
        out[1] = __builtin_fmaf(q[i], q[i], out[1]);
        out[2] = __builtin_fmaf(k[i], q[i], out[2]);
    }
}

// Factors of a token. 1 / |q| and 1 / |k|, or 1.
struct Factors {
    float decay, beta, q, k, k_q;
};
DEVICE Factors factors_of(f32x4 dots, Gates gates, const dwk_decode_args &x) {
    const bool norms = x.flags & DWK_QK_L2NORM;
    return Factors{gates.decay, gates.beta, norms ? math::inverse_norm(dots[1]) : 1.0f,
                   norms ? math::inverse_norm(dots[0]) : 1.0f, dots[2]};
}

// State elements of four keys, or columns, in memory: f32 or bf16.
template <bool Wide> DEVICE f32x4 load_four(const char *p, bool whole) {
    if constexpr (Wide) {
        return bits<f32x4>(piece::load<true>(p, whole));
    } else {
        i32x2 raw[1];
        load_numbers<4>(raw, (const unsigned short *)p, whole);
        return widened<arch::Bf16>(raw[0]);
    }
}

// Loads Rows x 4 elements, or zeros; all loads are requested before the first is used. `row`: bytes from row to row.
template <bool Wide, int Rows>
DEVICE void load_rows(f32x4 (&out)[Rows], const char *p, u32 row, bool whole, bool inside) {
    for (int r = 0; r < Rows; ++r) {
        out[r] = f32x4{};
    }
    if (inside && whole) {
        for (int r = 0; r < Rows; ++r) {
            out[r] = load_four<Wide>(p + r * row, true);
        }
    } else if (inside) {
        for (int r = 0; r < Rows; ++r) {
            out[r] = load_four<Wide>(p + r * row, false);
        }
    }
}
template <int Rows>
DEVICE void store_rows(const f32x4 (&s)[Rows], char *p, u32 row, int type, bool whole, bool inside) {
    if (!inside) {
        return;
    }
    float each[Rows][4];
    for (int r = 0; r < Rows; ++r) {
        for (int i = 0; i < 4; ++i) {
            each[r][i] = s[r][i];
        }
    }
    if (whole && type == DWK_F32) {
        for (int r = 0; r < Rows; ++r) {
            state::store(p + r * row, each[r], DWK_F32, true);
        }
    } else if (whole) {
        for (int r = 0; r < Rows; ++r) {
            state::store(p + r * row, each[r], DWK_BF16, true);
        }
    } else {
        for (int r = 0; r < Rows; ++r) {
            state::store(p + r * row, each[r], type, false);
        }
    }
}

// Stores o of column `at.column + own`.
template <class T> DEVICE void store_output(float o, const dwk_decode_args &x, const Work &at, int own, int t) {
    if (at.column + own < x.value_dim) {
        const int64_t offset = token_offset(x.o_strides, at.sequence, at.sequence * x.tokens + t, at.head);
        ((short *)x.o)[offset + at.column + own] = (short)T::pack(o, 0.0f);
    }
}

// A state in memory, from the first element of the lane on.
template <bool ValueMajor> struct Place {
    char *base;
    u32 row, part; // bytes from row to row, and from 128 keys to the next
    int type;
    bool whole;

    DEVICE_MEMBER Place(const state::Head &head, int column, int key)
        : row(head.row), part(ValueMajor ? part_keys * state::size_of(head.type) : part_keys * head.row),
          type(head.type), whole(head.whole) {
        const u32 size = state::size_of(type);
        base = head.base + (ValueMajor ? column * row + key * size : key * row + column * size);
    }
};

DEVICE state::Head pool_head(const dwk_decode_args &x, const Work &at, int slot, bool wide) {
    const int64_t element = slot * x.state_strides.sequence + at.head * x.state_strides.head;
    return state::Head(x.state, element, x.state_strides.row, wide ? DWK_F32 : DWK_BF16);
}
DEVICE state::Head token_state(const dwk_decode_args &x, const Work &at, int t) {
    const dwk_state_strides &each = x.states_strides;
    const int64_t element = at.sequence * each.sequence + t * x.states_token + at.head * each.head;
    return state::Head(x.states, element, each.row, x.states_type);
}

DEVICE const unsigned short *row_of(const void *all, const dwk_token_strides &strides, const dwk_decode_args &x,
                                    const Work &at, int t, int head) {
    return (const unsigned short *)row_address(all, strides, at.sequence, at.sequence * x.tokens + t, head);
}

// Moves a token's q, k and v towards this multiprocessor. Registers have no room for them during the token before.
DEVICE void prefetch(const dwk_decode_args &x, const Work &at, int t) {
    const int which = lane() / 8, line = lane() % 8 * 64; // rows of up to 512 bytes
    if (which == 0 && line < x.key_dim) {
        arch::prefetch(row_of(x.q, x.q_strides, x, at, t, at.key_head) + line);
    } else if (which == 1 && line < x.key_dim) {
        arch::prefetch(row_of(x.k, x.k_strides, x, at, t, at.key_head) + line);
    } else if (which == 2 && line == 0) {
        arch::prefetch(row_of(x.v, x.v_strides, x, at, t, at.head) + at.column);
    }
}

// Value-major: a warp has 8 or 16 columns; a lane keys 4 lane + 128 j of them.
template <class T, bool Wide, int MostKeys, bool Norm>
DEVICE void walk_value_major(const dwk_decode_args &x, const Work &at, int read, int write, Row *row) {
    typedef Team<Norm> Team;
    constexpr int parts = MostKeys / part_keys, groups = Team::groups, rows = groups * eight;
    const int first = Team::warp() * rows; // of the warp's columns
    // Column of each eight whose sums the lane gets: those of u = S^T k in lanes below 16, of w = S^T q from there on.
    const int own = first + (lane() >> 2 & 3) + (lane() >> 1 & 1) * 4;
    const bool owner = (lane() & 17) == 16;
    const auto lane_of = [](int r) __attribute__((always_inline)) { return (r & 3) << 2 | r >> 2 << 1; };
    const auto inside = [&](int j) __attribute__((always_inline)) {
        return 4 * lane() + j * part_keys < x.key_dim && at.column + first < x.value_dim;
    };
    struct Inputs {
        Keys<parts> keys;
        Token tokens[groups];
    };
    const auto load = [&](int t) __attribute__((always_inline)) {
        Inputs out;
        out.keys = load_keys<parts>(row_of(x.q, x.q_strides, x, at, t, at.key_head),
                                    row_of(x.k, x.k_strides, x, at, t, at.key_head), x.key_dim);
        for (int g = 0; g < groups; ++g) {
            out.tokens[g] = load_scalars<Norm>(x, at, t, own + g * eight);
        }
        return out;
    };

    f32x4 s[parts][rows];
    const Place<true> from(pool_head(x, at, read >= 0 ? read : 0, Wide), at.column + first, 4 * lane());
    for (int j = 0; j < parts; ++j) {
        load_rows<Wide>(s[j], from.base + j * from.part, from.row, from.whole, read >= 0 && inside(j));
    }
#pragma unroll 1
    for (int t = 0; t < x.tokens; ++t) {
        const Inputs in = load(t);
        if (t + 1 < x.tokens) {
            prefetch(x, at, t + 1);
        }
        f32x4 dots{};
        for (int j = 0; j < parts; ++j) {
            add_dots<T>(dots, in.keys.q[j], in.keys.k[j]);
        }
        for (int i = 0; i < 3; ++i) {
            dots[i] = arch::row_sum(dots[i]);
            dots[i] += arch::swap32<16>(dots[i]);
        }
        const Factors f = factors_of(dots, gates_of(in.tokens[0], x), x);
        // u and w of four columns at a time, in lanes that differ in 3; then of eight, in lanes that differ in 1.
        float totals[groups];
        for (int g = 0; g < groups; ++g) {
            float four[2];
            for (int b = 0; b < 2; ++b) {
                float sums[8] = {};
                for (int j = 0; j < parts; ++j) {
                    const f32x4 q = widened<T>(in.keys.q[j]), k = widened<T>(in.keys.k[j]);
                    for (int r = 0; r < 4; ++r) {
                        const f32x4 column = s[j][eight * g + 4 * b + r];
                        for (int i = 0; i < 4; ++i) {
                            sums[r] = __builtin_fmaf(column[i], k[i], sums[r]);
                            sums[4 + r] = __builtin_fmaf(column[i], q[i], sums[4 + r]);
                        }
                    }
                }
                four[b] = spread_sum<16>(sums);
            }
            const float half = spread_sum<2>(four);
            totals[g] = half + arch::swap32<1>(half);
        }
        float o[groups];
        for (int g = 0; g < groups; ++g) {
            // d = beta (v - decay S^T k), in lanes below 16.
            const float d = f.beta * __builtin_fmaf(-f.decay * f.k, totals[g], T::low(in.tokens[g].v));
            // S <- decay S + k d^T
            for (int r = 0; r < eight; ++r) {
                const f32x4 d_k = (f32x4)(f.k * arch::read32(d, lane_of(r)));
                for (int j = 0; j < parts; ++j) {
                    f32x4 &column = s[j][eight * g + r];
                    column = __builtin_elementwise_fma(widened<T>(in.keys.k[j]), d_k, f.decay * column);
                }
            }
            // o = scale (decay S0^T q + (k.q) d), in lanes from 16 on.
            const float written = f.k * f.k_q * arch::read32(d, lane() & 15);
            o[g] = math::packable(x.scale * (f.q * __builtin_fmaf(f.decay, totals[g], written)));
        }
        if constexpr (Norm) {
            for (int g = 0; g < groups; ++g) {
                o[g] = T::low(T::pack(o[g], 0.0f));
                publish(o[g], *row, owner, at.column + own + g * eight, t);
            }
            arch::workgroup_sync();
            const float factor = row_factor(*row, x, t);
            for (int g = 0; g < groups; ++g) {
                o[g] = math::packable(normed<T>(o[g], factor, in.tokens[g], x));
            }
        }
        for (int g = 0; g < groups && owner; ++g) {
            store_output<T>(o[g], x, at, own + g * eight, t);
        }
        if (x.states) {
            const Place<true> to(token_state(x, at, t), at.column + first, 4 * lane());
            for (int j = 0; j < parts; ++j) {
                store_rows(s[j], to.base + j * to.part, to.row, to.type, to.whole, inside(j));
            }
        }
    }
    if (write >= 0) {
        const Place<true> to(pool_head(x, at, write, Wide), at.column + first, 4 * lane());
        for (int j = 0; j < parts; ++j) {
            store_rows(s[j], to.base + j * to.part, to.row, Wide ? DWK_F32 : DWK_BF16, to.whole, inside(j));
        }
    }
}

// Sums over each slot of keys, of this token and the one before: u = S^T k, then w = S^T q of 32 columns; then k.k, q.q
// and k.q.
struct Sums {
    f32x4 of[2][slots][2 * columns / 4 + 1];
};

// Key-major: the lane has columns 4 (lane % 8) + i, i < 4, of keys 32 slot + 8 (lane / 8) + r + 128 j, r < 8.
template <class T, bool Wide, int MostKeys, bool Norm>
DEVICE void walk_key_major(const dwk_decode_args &x, const Work &at, int read, int write, Sums &sums, Row *row) {
    typedef Team<Norm> Team;
    constexpr int parts = MostKeys / part_keys, blocks = Team::blocks;
    constexpr int dots_at = 2 * columns / 4;
    const int quad = lane() % 8;
    const bool column_inside = at.column + 4 * quad < x.value_dim;
    const int column = at.column + (column_inside ? 4 * quad : 0);
    const int own = lane(); // column whose output the lane stores, in the first warp
    const bool owner = Team::warp() == 0;
    const auto slot_of = [](int b) __attribute__((always_inline)) { return b * Team::warps + Team::warp(); };
    const auto key_of = [&](int b, int j) __attribute__((always_inline)) {
        return j * part_keys + slot_of(b) * lanes + lane() / 8 * eight;
    };
    const auto inside = [&](int b, int j)
                            __attribute__((always_inline)) { return key_of(b, j) < x.key_dim && column_inside; };
    // A token: q and k of the lane's keys, v of its columns.
    struct Inputs {
        i32x2 q[blocks][parts][2], k[blocks][parts][2], v[1];
        Token token;
    };
    const auto load = [&](int t) __attribute__((always_inline)) {
        Inputs out{};
        const unsigned short *q = row_of(x.q, x.q_strides, x, at, t, at.key_head);
        const unsigned short *k = row_of(x.k, x.k_strides, x, at, t, at.key_head);
        for (int b = 0; b < blocks; ++b) {
            for (int j = 0; j < parts; ++j) {
                if (key_of(b, j) < x.key_dim) {
                    load_numbers<eight>(out.q[b][j], q + key_of(b, j), arch::in_one_access(q));
                    load_numbers<eight>(out.k[b][j], k + key_of(b, j), arch::in_one_access(k));
                }
            }
        }
        const unsigned short *v = row_of(x.v, x.v_strides, x, at, t, at.head);
        load_numbers<4>(out.v, v + column, arch::in_one_access(v));
        out.token = load_scalars<Norm>(x, at, t, own);
        return out;
    };

    f32x4 s[blocks][parts][eight];
    const Place<false> from(pool_head(x, at, read >= 0 ? read : 0, Wide), column, key_of(0, 0));
    const auto offset = [](const Place<false> &place, int b, int j) __attribute__((always_inline)) {
        return j * place.part + b * Team::warps * lanes * place.row;
    };
    for (int b = 0; b < blocks; ++b) {
        for (int j = 0; j < parts; ++j) {
            load_rows<Wide>(s[b][j], from.base + offset(from, b, j), from.row, from.whole, read >= 0 && inside(b, j));
        }
    }
    const auto store = [&](const Place<false> &to) __attribute__((always_inline)) {
        for (int b = 0; b < blocks; ++b) {
            for (int j = 0; j < parts; ++j) {
                store_rows(s[b][j], to.base + offset(to, b, j), to.row, to.type, to.whole, inside(b, j));
            }
        }
    };
#pragma unroll 1
    for (int t = 0; t < x.tokens; ++t) {
        const Inputs in = load(t);
        if (t + 1 < x.tokens) {
            prefetch(x, at, t + 1);
        }
        const Gates gates = gates_of(in.token, x);
        f32x4(&all)[slots][dots_at + 1] = sums.of[t % 2];
        for (int b = 0; b < blocks; ++b) {
            f32x4 dots{}, u{}, w{};
            for (int j = 0; j < parts; ++j) {
                for (int h = 0; h < 2; ++h) {
                    add_dots<T>(dots, in.q[b][j][h], in.k[b][j][h]);
                }
            }
            for (int i = 0; i < 3; ++i) {
                dots[i] += arch::swap32<16>(dots[i]);
                dots[i] += arch::swap32<8>(dots[i]);
            }
            if (lane() == 0) {
                all[slot_of(b)][dots_at] = dots;
            }
            for (int j = 0; j < parts; ++j) {
                for (int h = 0; h < 2; ++h) {
                    const f32x4 q = widened<T>(packed(in.q[b][j][h])), k = widened<T>(packed(in.k[b][j][h]));
                    for (int r = 0; r < 4; ++r) {
                        u = __builtin_elementwise_fma(s[b][j][4 * h + r], (f32x4)k[r], u);
                        w = __builtin_elementwise_fma(s[b][j][4 * h + r], (f32x4)q[r], w);
                    }
                }
            }
            // u in lanes below 16, w from there on.
            f32x4 own_sums;
            for (int i = 0; i < 4; ++i) {
                const float both[2] = {u[i], w[i]};
                const float sum = spread_sum<16>(both);
                own_sums[i] = sum + arch::swap32<8>(sum);
            }
            if (!(lane() & 8)) {
                all[slot_of(b)][lane() / 16 * 8 + quad] = own_sums;
            }
        }
        arch::workgroup_sync();
        f32x4 total_u{}, total_w{}, dots{};
        for (int i = 0; i < slots; ++i) {
            dots += all[i][dots_at];
            total_u += all[i][quad];
            total_w += all[i][8 + quad];
        }
        const Factors f = factors_of(dots, gates, x);
        // d = beta (v - decay S^T k), S <- decay S + k d^T
        const f32x4 d = f.beta * __builtin_elementwise_fma(total_u, (f32x4)(-f.decay * f.k), widened<T>(in.v[0]));
        const f32x4 d_k = f.k * d;
        for (int b = 0; b < blocks; ++b) {
            for (int j = 0; j < parts; ++j) {
                for (int h = 0; h < 2; ++h) {
                    const f32x4 k = widened<T>(packed(in.k[b][j][h]));
                    for (int r = 0; r < 4; ++r) {
                        f32x4 &row = s[b][j][4 * h + r];
                        row = __builtin_elementwise_fma((f32x4)k[r], d_k, f.decay * row);
                    }
                }
            }
        }
        // o = scale (decay S0^T q + (k.q) d). Column c of the slab is element c % 4 of lane c / 4.
        const f32x4 written = f.k * f.k_q * d;
        const f32x4 four = x.scale * (f.q * __builtin_elementwise_fma(total_w, (f32x4)f.decay, written));
        float o = 0.0f;
        for (int i = 0; i < 4; ++i) {
            const float one = arch::read32(four[i], lane() / 4);
            o = lane() % 4 == i ? one : o;
        }
        o = math::packable(o);
        if constexpr (Norm) {
            o = T::low(T::pack(o, 0.0f));
            publish(o, *row, owner, at.column + own, t);
            arch::workgroup_sync();
            o = math::packable(normed<T>(o, row_factor(*row, x, t), in.token, x));
        }
        if (owner) {
            store_output<T>(o, x, at, own, t);
        }
        if (x.states) {
            store(Place<false>(token_state(x, at, t), column, key_of(0, 0)));
        }
    }
    if (write >= 0) {
        store(Place<false>(pool_head(x, at, write, Wide), column, key_of(0, 0)));
    }
}

// Computes all tokens of a sequence. `read`, `write`: slots of the state, or -1.
template <class T, bool Wide, bool ValueMajor, int MostKeys, bool Norm>
DEVICE void walk(const dwk_decode_args &x, const Work &at, int read, int write, Sums &sums, Row *row) {
    if constexpr (ValueMajor) {
        walk_value_major<T, Wide, MostKeys, Norm>(x, at, read, write, row);
    } else {
        walk_key_major<T, Wide, MostKeys, Norm>(x, at, read, write, sums, row);
    }
}

} // namespace
} // namespace warps
} // namespace decode
