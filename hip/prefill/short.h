// Sequences of at most 16 tokens (prefill_short): a chunk of one row tile, computed by one wave for some value columns.
//
// A lane holds, of a tile or of the two tiles of a group, elements of two adjacent columns: of four rows, or of
// 4 group_tiles adjacent keys. Contract of a target: <target>/short.h supplies
//
//   short_residency                 residency for KERNEL
//   short_tiles                     16x16 column tiles of a wave
//   group_tiles                     key tiles of a group, of which a lane holds adjacent keys
//   corrects_first                  whether the rounding error of the update is added before the update, as in the walk
//   quarter_of(lane)                which quarter of a group's keys the lane holds
//   first_column_of(lane)           the lane's first column
//   place_of(row, column)           tile and element of row 0..3 and column 0..1 of the lane
//   inside_group<Keys>(group, key, K)
//                                   whether the lane's keys of a group are below K; `key`: its first key in a group
//   ShortRows<Keys>(base, stride, rows, K)
//                                   rows of Q or K, operands(group, to) in the order of the state's keys
//   PairRows(base, stride)          rows of V or O: load and store of two adjacent columns
//   widen_pairs round_pairs         pairs of the lane's rows to tiles, and rounded back
//   exact_operand<T>(tile)          `rounded` for numbers that are exact in T
//   add_product<T>(left, right, c)  T::mma for K K^T, with sums as accurate as the inverse needs them
//
// With the same order of sums as the walk over chunks, the results have the same bits.
#pragma once

#include "../math/inverse.h"
#include "../tensor/pieces.h"
#include "../tensor/rows.h"
#include "../tensor/states.h"
#include "factors.h"
#include "gates.h"
#include "place.h"
#include "segment.h"

namespace prefill {

constexpr int short_tokens = DWK_SHORT_TOKENS;
static_assert(short_tokens == 16, "one row tile");

} // namespace prefill

#if defined(__NVPTX__)
#include "sm90/short.h"
#else
#include "gfx9/short.h"
#endif

namespace prefill {

constexpr int short_columns = 16 * short_tiles;
// Adjacent keys of a lane in a group.
constexpr int own_keys = 4 * group_tiles;

typedef Tile ShortSlab[short_tiles];
template <int Keys> using ShortState = ShortSlab[Keys / 16];

// Element (key, column) of a lane, counted from its first key in a group and its first column.
template <int Keys> DEVICE float get(const ShortState<Keys> &s, int group, int key, int column) {
    const Place at = place_of(key % 4, column);
    return s[group * group_tiles + key / 4][at.tile][at.element];
}
template <int Keys> DEVICE void set(ShortState<Keys> &s, int group, int key, int column, float x) {
    const Place at = place_of(key % 4, column);
    s[group * group_tiles + key / 4][at.tile][at.element] = x;
}

// Elements of a lane in a state in memory, [K, V] or [V, K], f32, bf16 or f16.
template <int Keys> class ShortView {
  public:
    DEVICE_MEMBER ShortView(const void *p, const dwk_state_strides &s, int type, bool value_major, int slot, int head,
                            int column, const dwk_prefill_scan_args &x)
        : type(type), size(state::size_of(type)), row(s.row * size), value_major(value_major), key_dim(x.key_dim),
          has_column(column < x.value_dim) {
        char *const base = (char *)p + (slot * s.sequence + head * s.head) * size;
        whole = arch::in_one_access(base) && arch::in_one_access((const void *)(u64)row);
        const int key = own_keys * quarter_of(arch::lane());
        own = base + (value_major ? column * row + key * size : key * row + column * size);
    }

    DEVICE_MEMBER void load(ShortState<Keys> &s) const {
        if (!has_column) {
            return;
        }
        if (type == DWK_F32) {
            value_major ? load_keys<DWK_F32>(s) : load_columns<DWK_F32>(s);
            for (auto &tiles_of_row : s) {
                for (Tile &tile : tiles_of_row) {
                    for (int e = 0; e < elements; ++e) {
                        tile[e] = math::canonical(tile[e]);
                    }
                    tile = arch::held(tile); // otherwise scalar registers hold all comparisons
                }
            }
        } else if (type == DWK_F16) {
            value_major ? load_keys<DWK_F16>(s) : load_columns<DWK_F16>(s);
        } else {
            value_major ? load_keys<DWK_BF16>(s) : load_columns<DWK_BF16>(s);
        }
    }
    DEVICE_MEMBER void store(const ShortState<Keys> &s) const {
        if (!has_column) {
            return;
        }
        if (type == DWK_F32) {
            value_major ? store_keys<DWK_F32>(s) : store_columns<DWK_F32>(s);
        } else if (type == DWK_F16) {
            value_major ? store_keys<DWK_F16>(s) : store_columns<DWK_F16>(s);
        } else {
            value_major ? store_keys<DWK_BF16>(s) : store_columns<DWK_BF16>(s);
        }
    }

  private:
    static constexpr int groups = Keys / 16 / group_tiles;

    // The stride, hidden: otherwise scalar registers hold its multiples for all keys and all kinds of states.
    DEVICE_MEMBER int64_t fresh_row() const {
        const u32 low = arch::opaque_uniform((int)row);
        return (int64_t)arch::opaque_uniform((int)(row >> 32)) << 32 | low;
    }
    // Calls f(group, key, address) for each own key: both columns are adjacent in memory.
    template <class F> DEVICE_MEMBER void each_key(F f) const {
        const int key = arch::opaque(own_keys * quarter_of(arch::lane()));
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            if (inside_group<Keys>(g, key, key_dim)) {
                const int64_t step = fresh_row();
                char *p = own + 16 * group_tiles * g * step;
#pragma unroll
                for (int i = 0; i < own_keys; ++i) {
                    f(g, i, p);
                    p += step;
                }
            }
        }
    }
    // Calls f(group, column, address) for each group and column: own keys are adjacent in memory.
    template <class F> DEVICE_MEMBER void each_column(F f) const {
        char *const columns[2] = {own, own + fresh_row()};
        const int key = arch::opaque(own_keys * quarter_of(arch::lane()));
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            if (inside_group<Keys>(g, key, key_dim)) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    f(g, c, columns[c] + 16 * group_tiles * g * size);
                }
            }
        }
    }
    template <int Type> DEVICE_MEMBER void load_columns(ShortState<Keys> &s) const {
        each_key([&](int g, int i, const char *p) __attribute__((always_inline)) {
            float x[2];
            if (Type == DWK_F32) {
                const i32x2 words = whole ? arch::load_b64(p) : i32x2{((const int *)p)[0], ((const int *)p)[1]};
                x[0] = bits<float>(words.x);
                x[1] = bits<float>(words.y);
            } else {
                const u32 low = ((const unsigned short *)p)[0], high = ((const unsigned short *)p)[1];
                const int word = whole ? *(const int *)p : (int)(low | high << 16);
                x[0] = state::widened<Type>(word, 0);
                x[1] = state::widened<Type>(word, 1);
            }
            set<Keys>(s, g, i, 0, x[0]);
            set<Keys>(s, g, i, 1, x[1]);
        });
    }
    template <int Type> DEVICE_MEMBER void store_columns(const ShortState<Keys> &s) const {
        each_key([&](int g, int i, char *p) __attribute__((always_inline)) {
            const float a = get<Keys>(s, g, i, 0), b = get<Keys>(s, g, i, 1);
            if (Type == DWK_F32) {
                if (whole) {
                    arch::store_b64(p, i32x2{bits<int>(a), bits<int>(b)});
                } else {
                    ((float *)p)[0] = a;
                    ((float *)p)[1] = b;
                }
            } else {
                const int word = state::narrowed<Type>(arch::held(a), arch::held(b));
                if (whole) {
                    *(int *)p = word;
                } else {
                    ((short *)p)[0] = (short)word;
                    ((short *)p)[1] = (short)(word >> 16);
                }
            }
        });
    }
    template <int Type> DEVICE_MEMBER void load_keys(ShortState<Keys> &s) const {
        each_column([&](int g, int c, const char *p) __attribute__((always_inline)) {
            if (Type == DWK_F32) {
                for (int i = 0; i < own_keys; i += 4) {
                    const i32x4 words = piece::load<true>(p + 4 * i, whole);
                    for (int n = 0; n < 4; ++n) {
                        set<Keys>(s, g, i + n, c, bits<float>(words[n]));
                    }
                }
            } else {
                int words[own_keys / 2];
                load_narrow(words, p);
                for (int n = 0; n < own_keys / 2; ++n) {
                    set<Keys>(s, g, 2 * n, c, state::widened<Type>(words[n], 0));
                    set<Keys>(s, g, 2 * n + 1, c, state::widened<Type>(words[n], 1));
                }
            }
        });
    }
    template <int Type> DEVICE_MEMBER void store_keys(const ShortState<Keys> &s) const {
        each_column([&](int g, int c, char *p) __attribute__((always_inline)) {
            float x[own_keys];
            for (int i = 0; i < own_keys; ++i) {
                const float own_element = get<Keys>(s, g, i, c);
                x[i] = Type == DWK_F32 ? own_element : arch::held(own_element);
            }
            state::store(p, x, Type, whole);
        });
    }
    DEVICE_MEMBER void load_narrow(int (&words)[own_keys / 2], const char *p) const {
        if constexpr (own_keys == 8) {
            const i32x4 all = piece::load<false>(p, whole);
            for (int n = 0; n < 4; ++n) {
                words[n] = all[n];
            }
        } else if (whole) {
            const i32x2 all = arch::load_b64(p);
            words[0] = all.x;
            words[1] = all.y;
        } else {
            const unsigned short *const x = (const unsigned short *)p;
            words[0] = x[0] | x[1] << 16;
            words[1] = x[2] | x[3] << 16;
        }
    }

    const int type;
    const int size; // bytes of an element
    const int64_t row;
    const bool value_major;
    const int key_dim;
    const bool has_column;
    bool whole; // whether one access can cover adjacent elements of a lane
    char *own;  // the lane's first element
};

// Factors of the rows in shared memory, and A, then T.
struct ShortMemory {
    float gate_sum[short_tokens]; // G / ln 2
    float beta[short_tokens];
    float minus_beta[short_tokens];
    float q_norm[short_tokens]; // |q|^2, then 1 / |q|
    float k_norm[short_tokens]; // |k|^2, then 1 / |k|
    float read[short_tokens];   // RowFactor (record.h)
    float output[short_tokens];
    float write[short_tokens];
    float diagonal[short_tokens];
    math::SomeBlocks<1> block;
};

// A sequence in a wave: T, P and factors, which do not depend on the state, then its outputs and its last state.
template <class T, int Keys> class ShortSequence {
    static constexpr int key_tiles = Keys / 16, groups = key_tiles / group_tiles;
    typedef ShortSlab Slab;

  public:
    // `column`: the wave's first value column.
    DEVICE_MEMBER ShortSequence(const dwk_prefill_short_args &y, ShortMemory &memory, const Work &work, int sequence,
                                Rows range, int column)
        : memory(memory), lane(arch::lane()), at(lane), tokens(range.end - range.begin),
          q(row_address(y.scan.q, y.scan.q_strides, sequence, range.begin, work.key_head),
            (u32)y.scan.q_strides.token * 2, tokens, y.scan.key_dim),
          k(row_address(y.scan.k, y.scan.k_strides, sequence, range.begin, work.key_head),
            (u32)y.scan.k_strides.token * 2, tokens, y.scan.key_dim) {
        const dwk_prefill_scan_args &x = y.scan;
        const PairRows v(row_address(x.v, x.v_strides, sequence, range.begin, work.head), (u32)x.v_strides.token * 2);
        for (int r = 0; r < 4; ++r) {
            value[r] = v.load(offset_of(r, (u32)x.v_strides.token * 2, column, x.value_dim));
        }
    }

    // T, P and the factors of the rows. T stays in shared memory.
    DEVICE_MEMBER void prepare(const dwk_prefill_prepare_args &x, int sequence, int begin, int head) {
        const GateReader reader(x, sequence, begin + lane, lane < tokens);
        const Gates loaded = reader.load_ahead(head);
        const bool norm = x.flags & DWK_QK_L2NORM;
        // K K^T, Q K^T                                                 [16, 16], transposed
        Tile kk{}, kq{};
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            Operand of_k[group_tiles], of_q[group_tiles];
            k.operands(g, of_k);
            q.operands(g, of_q);
            for (int t = 0; t < group_tiles; ++t) {
                kk = add_product<T>(of_k[t], of_k[t], kk);
                kq = T::mma(of_k[t], of_q[t], kq);
            }
        }
        // Complete before the branch: clang 19 does not count the wait for products across branches.
        kk = arch::held(kk);
        kq = arch::held(kq);
        float k_norm = 1.0f, q_norm = 1.0f, unit = 1.0f;
        if (norm) {
            // Q Q^T                                                    [16, 16]
            Tile qq{};
#pragma unroll
            for (int g = 0; g < groups; ++g) {
                Operand of_q[group_tiles];
                q.operands(g, of_q);
                for (int t = 0; t < group_tiles; ++t) {
                    qq = T::mma(of_q[t], of_q[t], qq);
                }
            }
            on_diagonal(kk, 0, at, [&](int token, float square) { memory.k_norm[token] = square; });
            on_diagonal(qq, 0, at, [&](int token, float square) { memory.q_norm[token] = square; });
            arch::wave_sync();
            const float square = memory.k_norm[lane % 16];
            k_norm = square == 0.0f ? 0.0f : math::inverse_norm(square);
            q_norm = math::inverse_norm(memory.q_norm[lane % 16]);
            arch::wave_sync();
            if (lane < 16) {
                memory.k_norm[lane] = k_norm;
                memory.q_norm[lane] = q_norm;
            }
            arch::wave_sync();
            const Tile rows = rows_at(memory.k_norm, at);
            kk *= rows * columns_at(memory.k_norm, at);
            kq *= rows * columns_at(memory.q_norm, at);
            unit = power_of_two_below(arch::read_lane(arch::inclusive_max(bits<int>(k_norm)), arch::lanes - 1));
        }
        const float per_unit = bits<float>(0x7f000000 - bits<int>(unit)); // 1 / unit
        // G, and factors of the rows                                   [16]
        const Gates gates = reader.gates_of(head, [&]() __attribute__((always_inline)) { return loaded; });
        // Opaque, as in prefill_prepare: the product is not fused into the sum.
        const float log2_gate = bits<float>(arch::opaque(bits<int>(gates.g * math::log2e)));
        const float sum = arch::inclusive_sum(log2_gate), total = arch::read_lane(sum, arch::lanes - 1);
        if (lane < 16) {
            memory.gate_sum[lane] = sum;
            memory.beta[lane] = gates.beta;
            memory.minus_beta[lane] = -gates.beta;
            memory.read[lane] = read_factor(gates.beta, k_norm, sum);
            memory.output[lane] = output_factor(q_norm, sum);
            memory.write[lane] = write_factor(k_norm, per_unit, total, sum);
        }
        decay_of_state = bits<float>(arch::uniform_value(bits<int>(arch::exp2(total) * per_unit)));
        unit_of_state = bits<float>(arch::uniform_value(bits<int>(unit)));
        on_diagonal(kq, 0, at, [&](int token, float product) { memory.diagonal[token] = product; });
        arch::wave_sync();
        // A, P and T = (I - A)^-1, without the diagonals               [16, 16]
        const Tile decayed = decay(-rows_at(memory.gate_sum, at), -columns_at(memory.gate_sum, at));
        memory.block.put(0, block_of_a(decayed, columns_at(memory.minus_beta, at), kk), at);
        // Complete here: beside the whole state, registers have no room for what P is made from.
        p = arch::held(rounded<T>(strictly_lower(block_of_p(decayed, kq), at)));
        arch::wave_sync();
        math::invert_blocks(memory.block, math::UnitColumn(lane), lane, 0);
    }

    // O and S1, in place of S0.
    DEVICE_MEMBER void run(ShortState<Keys> &state, const dwk_prefill_scan_args &x, int sequence, int begin, int head,
                           int column) {
        // R = K S0, O = Q S0                                           [16, columns]
        Slab u, out;
        for (int j = 0; j < short_tiles; ++j) {
            u[j] = out[j] = Tile{};
        }
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            Operand of_k[group_tiles], of_q[group_tiles];
            k.operands(g, of_k);
            q.operands(g, of_q);
            for (int i = 0; i < group_tiles; ++i) {
                for (int j = 0; j < short_tiles; ++j) {
                    const Operand s = rounded<T>(state[g * group_tiles + i][j]);
                    u[j] = T::mma(of_k[i], s, u[j]);
                    out[j] = T::mma(of_q[i], s, out[j]);
                }
            }
            arch::phase();
        }
        // X = beta V - beta exp(G) R                                   [16, columns], in place of R
        // U = X + (T - I) X                                            [16, columns], in place of X
        const Operand t = rounded<T>(strictly_lower(memory.block.get(0, at), at));
        Slab weighted;
        widen_pairs<T>(value, weighted);
        const Tile beta = rows_at(memory.beta, at), read = rows_at(memory.read, at);
        for (int j = 0; j < short_tiles; ++j) {
            u[j] = solve_x(arch::held(beta * weighted[j]), read, u[j]);
            u[j] = T::mma(t, rounded<T>(u[j]), u[j]);
        }
        // O = scale (exp(G) Q S0 + diag(P) U + (P - diag(P)) U)        [16, columns]
        // change = exp(G_C - G) U / unit                               [16, columns], and its rounding
        const Tile output = rows_at(memory.output, at), diagonal = rows_at(memory.diagonal, at),
                   write = rows_at(memory.write, at);
        Operand update[short_tiles], lost[short_tiles];
        for (int j = 0; j < short_tiles; ++j) {
            out[j] = output_of(output, out[j], diagonal, u[j]);
            out[j] = T::mma(p, rounded<T>(u[j]), out[j]);
            out[j] = x.scale * out[j];
            const Tile change = arch::held(change_of(write, u[j])); // not fused into the difference
            update[j] = rounded<T>(change);
            lost[j] = rounding_of<T>(change, update[j]);
        }
        write_outputs(out, x, sequence, begin, head, column);
        arch::phase();
        // S1 = exp(G_C) S0 + K^T change                                [K, columns]
        Tile one;
        for (int e = 0; e < elements; ++e) {
            one[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
        }
        const Operand identity = exact_operand<T>(one);
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            Operand of_k[group_tiles];
            k.operands(g, of_k);
            for (int i = 0; i < group_tiles; ++i) {
                // K^T, exactly: a product with the identity gives each lane rows of a column.
                const Operand turned = exact_operand<T>(T::mma(of_k[i], identity, Tile{}));
                for (int j = 0; j < short_tiles; ++j) {
                    Tile &s = state[g * group_tiles + i][j];
                    s *= decay_of_state;
                    s = T::mma(turned, corrects_first ? lost[j] : update[j], s);
                    s = T::mma(turned, corrects_first ? update[j] : lost[j], s);
                    s *= unit_of_state;
                }
            }
            arch::phase();
        }
    }

  private:
    // Byte offset of the lane's r-th row in rows of V or O.
    DEVICE_MEMBER u32 offset_of(int r, u32 stride, int column, int value_dim) const {
        const int row = at.row(place_of(r, 0).element), own = column + first_column_of(lane);
        return row < tokens && own < value_dim ? row * stride + 2 * own : Window::nowhere;
    }
    DEVICE_MEMBER void write_outputs(const Slab &out, const dwk_prefill_scan_args &x, int sequence, int begin, int head,
                                     int column) const {
        const u32 stride = (u32)x.o_strides.token * 2;
        const PairRows o(row_address(x.o, x.o_strides, sequence, begin, head), stride);
        int pair[4];
        round_pairs<T>(out, pair);
        for (int r = 0; r < 4; ++r) {
            o.store(offset_of(r, stride, column, x.value_dim), pair[r]);
        }
    }

    ShortMemory &memory;
    const int lane;
    const LaneMap at;
    const int tokens;
    const ShortRows<Keys> q, k;
    int value[4]; // V: two columns of four rows
    Operand p;    // P without its diagonal
    float decay_of_state, unit_of_state;
};

} // namespace prefill
