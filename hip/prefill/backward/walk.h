// Walks of the backward over the chunks of a sequence, by one wave for 16 value columns. The state, or its gradient, is
// in the wave's registers; no data passes between waves.
//
// With dO' = scale dO, and dS1 the gradient of the state after a chunk (recurrence.h has the rest):
//
//   from the first chunk to the last                      from the last chunk to the first
//     E  = T' (V - exp(G) K S0)                [C, V]       dU  = P^T dO' + exp(G_C - G) K dS1                 [C, V]
//     S1 = exp(G_C) S0                                      dX  = T^T dU                                       [C, V]
//          + K^T (exp(G_C - G) beta E)         [K, V]       dV  = beta dX                                      [C, V]
//                                                           dS0 = exp(G_C) dS1 + Q^T (exp(G) dO')
//                                                                 - K^T (exp(G) dV)                            [K, V]
//
// E is the error of each token, and U = beta E its update. The walks keep S0, dS1, E and dX for the gradients, rounded
// to 16 bits. E keeps its rounding error too, for dbeta = dX . E: with both factors rounded it would be less accurate
// than that of public kernels.
#pragma once

#include "../recurrence.h"
#include "../state.h"
#include "record.h"

namespace prefill {
namespace backward {

// A wave's columns of a state: element e of tile t has key 16 t + at.row(e).
template <int Keys> using Columns = Tile[Keys / 16];

// Calls f(tile, element, index) for each element of the wave's columns that lies within K.
template <int Keys, class F> DEVICE void each_element(const StateView &view, int column, int key_dim, F f) {
    const LaneMap at(arch::opaque(arch::lane()));
#pragma unroll
    for (int t = 0; t < Keys / 16; ++t) {
        if (16 * t < arch::opaque_uniform(key_dim)) {
#pragma unroll
            for (int e = 0; e < elements; ++e) {
                f(t, e, (16 * t + at.row(e)) * view.key_step + (column + at.column(e)) * view.value_step);
            }
        }
    }
}

template <int Keys> DEVICE void load_columns(Columns<Keys> &s, const StateView &from, int column, int key_dim) {
    if (from.wide) {
        each_element<Keys>(from, column, key_dim,
                           [&](int t, int e, int64_t index) { s[t][e] = ((const float *)from.base)[index]; });
    } else {
        each_element<Keys>(from, column, key_dim, [&](int t, int e, int64_t index) {
            s[t][e] = Bf16::low(((const short *)from.base)[index]);
        });
    }
}

template <int Keys> DEVICE void store_columns(const Columns<Keys> &s, const StateView &to, int column, int key_dim) {
    if (to.wide) {
        each_element<Keys>(to, column, key_dim,
                           [&](int t, int e, int64_t index) { ((float *)to.base)[index] = s[t][e]; });
    } else {
        each_element<Keys>(to, column, key_dim, [&](int t, int e, int64_t index) {
            ((short *)to.base)[index] = Bf16::narrow(math::canonical(s[t][e]));
        });
    }
}

// Work of a wave.
struct WalkWork {
    int sequence, head, key_head;
    int column; // first value column
    Rows range;
    int chunks;
    bool has_state; // whether the sequence has an initial state, if there are any
};

// Operands and factors of one chunk for a wave.
struct ChunkOfWalk {
    int record, begin, rows;
    const char *factors;
    int64_t place;
};
DEVICE ChunkOfWalk chunk_of(const dwk_prefill_backward_args &x, const WalkWork &work, int number) {
    const int begin = work.range.begin + number * chunk;
    const int record = first_record(work.range.begin, work.sequence) + number;
    return ChunkOfWalk{record, begin, min_of(work.range.end - begin, chunk), record_of(x.prepare, record, work.head),
                       place_of(x.prepare, record, work.head)};
}

// Rows of Q or K of a chunk as operands. Held in registers where they fit: all loads are then under way at once.
// Otherwise loaded where they are multiplied.
template <int Keys> constexpr bool holds_rows = arch::operand_words == 2 && Keys <= 128;
template <int Keys, bool Held = holds_rows<Keys>> class KeyRows {
  public:
    DEVICE_MEMBER KeyRows(const Rows16 &rows, int key_dim) : rows(rows), key_dim(key_dim) {}
    DEVICE_MEMBER Operand get(int i, int t) const { return rows.load(i, 16 * t, key_dim); }

  private:
    const Rows16 rows;
    const int key_dim;
};
template <int Keys> class KeyRows<Keys, true> {
  public:
    DEVICE_MEMBER KeyRows(const Rows16 &rows, int key_dim) {
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const u32 place = rows.place(i);
#pragma unroll
            for (int t = 0; t < Keys / 16; ++t) {
                at[t][i] = rows.load_at(place, 16 * t, arch::opaque_uniform(key_dim));
            }
        }
        arch::phase();
    }
    DEVICE_MEMBER Operand get(int i, int t) const { return at[t][i]; }

  private:
    Operand at[Keys / 16][tiles];
};

// S += Left^T change, with `left` rows of Q or K and `change` operands over the chunk's tokens.
template <class T, int Keys>
DEVICE void add_outer(Columns<Keys> &s, const KeyRows<Keys> &left, const Operand (&change)[tiles], Operand identity) {
#pragma unroll
    for (int t = 0; t < Keys / 16; ++t) {
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            s[t] = T::mma(flipped<T>(left.get(i, t), identity), change[i], s[t]);
        }
        arch::phase();
    }
}

// out = K S, and S rounded to blocks [keys, values] of `to`.
template <class T, int Keys>
DEVICE void read_and_keep(Tile (&out)[tiles], const Columns<Keys> &s, const KeyRows<Keys> &k, char *to, int value_tile,
                          int value_tiles, Operand identity) {
    for (int i = 0; i < tiles; ++i) {
        out[i] = Tile{};
    }
#pragma unroll
    for (int t = 0; t < Keys / 16; ++t) {
        const Operand state = rounded<T>(s[t]);
        store_block(to, t * value_tiles + value_tile, flipped<T>(state, identity));
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            out[i] = T::mma(k.get(i, t), state, out[i]);
        }
        arch::phase();
    }
    for (int i = 0; i < tiles; ++i) {
        out[i] = arch::held(out[i]);
    }
}

template <class T, int Keys> DEVICE void walk_forward(const dwk_prefill_backward_args &all, const WalkWork &work) {
    const LaneMap at(arch::lane());
    const Operand one = identity<T>();
    Columns<Keys> state;
    for (auto &tile : state) {
        tile = Tile{};
    }
    if (all.initial_state && work.has_state) {
        const StateView from(all.initial_state, all.initial_strides, all.initial_type,
                             all.prepare.flags & DWK_INITIAL_VALUE_MAJOR, work.sequence, work.head);
        load_columns<Keys>(state, from, work.column, all.prepare.key_dim);
    }
#pragma unroll 1
    for (int number = 0; number < work.chunks; ++number) {
        const dwk_prefill_backward_args &x = arch::reread(all); // saves scalar registers
        const dwk_prefill_prepare_args &p = x.prepare;
        const int value_tiles = (u32)p.value_dim / 16, value_tile = (u32)work.column / 16;
        const ChunkOfWalk c = chunk_of(x, work, number);
        const KeyRows<Keys> k(Rows16(p.k, p.k_strides, work.sequence, c.begin, work.key_head, c.rows), p.key_dim);
        const Rows16 v(x.v, x.v_strides, work.sequence, c.begin, work.head, c.rows);
        // R = K S0                                                     [64, 16]
        Tile error[tiles];
        read_and_keep<T, Keys>(error, state, k, x.states + c.place * (Keys / 16 * value_tiles) * block_bytes,
                               value_tile, value_tiles, one);
        // V - exp(G) R
        Operand right[tiles];
        for (int i = 0; i < tiles; ++i) {
            const Tile sum = rows_at(factor_of(c.factors, sum_row) + 16 * i, at);
            const Tile k_norm = rows_at(factor_of(c.factors, k_norm_row) + 16 * i, at);
            const Tile value = tile_of<T>(v.load(i, work.column, p.value_dim), one);
            error[i] = arch::held(arch::minus_product(value, k_norm * exp2_of(sum), error[i]));
            right[i] = rounded<T>(error[i]);
        }
        // E = T' (V - exp(G) R)                                        [64, 16]
        char *const errors = x.errors + c.place * (2 * tiles * value_tiles) * block_bytes;
        const float total = factor_of(c.factors, sum_row)[chunk - 1];
        const f32x2 units = *(const f32x2 *)(c.factors + record_units);
        const float per_unit = bits<float>(0x7f000000 - bits<int>(units.x));
        Operand change[tiles];
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            for (int j = 0; j <= i; ++j) {
                error[i] = T::mma(load_block(c.factors + record_forward, lower_block(i, j)), right[j], error[i]);
            }
            error[i] = arch::held(error[i]);
            const Operand high = rounded<T>(error[i]), low = rounding_of<T>(error[i], high);
            store_block(errors, i * value_tiles + value_tile, flipped<T>(high, one));
            store_block(errors, (tiles + i) * value_tiles + value_tile, flipped<T>(low, one));
            const Tile sum = rows_at(factor_of(c.factors, sum_row) + 16 * i, at);
            const Tile factor = per_unit * rows_at(factor_of(c.factors, k_norm_row) + 16 * i, at) *
                                rows_at(factor_of(c.factors, beta_row) + 16 * i, at);
            change[i] = rounded<T>(factor * exp2_of(total - sum) * error[i]);
        }
        if (number + 1 == work.chunks) {
            break; // nobody needs the last state
        }
        // S1 = exp(G_C) S0 + K^T (exp(G_C - G) beta E)                 [K, 16]
        const float decay = arch::exp2(total) * per_unit;
        for (auto &tile : state) {
            tile *= decay;
        }
        add_outer<T, Keys>(state, k, change, one);
        for (auto &tile : state) {
            tile = arch::held(units.x * tile);
        }
    }
}

template <class T, int Keys> DEVICE void walk_reverse(const dwk_prefill_backward_args &all, const WalkWork &work) {
    const LaneMap at(arch::lane());
    const Operand one = identity<T>();
    Columns<Keys> state;
    for (auto &tile : state) {
        tile = Tile{};
    }
    if (all.d_final) {
        const StateView from(all.d_final, all.d_final_strides, all.d_final_type, all.d_final_value_major, work.sequence,
                             work.head);
        load_columns<Keys>(state, from, work.column, all.prepare.key_dim);
    }
#pragma unroll 1
    for (int number = work.chunks - 1; number >= 0; --number) {
        const dwk_prefill_backward_args &x = arch::reread(all); // saves scalar registers
        const dwk_prefill_prepare_args &p = x.prepare;
        const int value_tiles = (u32)p.value_dim / 16, value_tile = (u32)work.column / 16;
        const ChunkOfWalk c = chunk_of(x, work, number);
        const KeyRows<Keys> k(Rows16(p.k, p.k_strides, work.sequence, c.begin, work.key_head, c.rows), p.key_dim);
        const Rows16 d_o(x.d_o, x.d_o_strides, work.sequence, c.begin, work.head, c.rows);
        const float total = factor_of(c.factors, sum_row)[chunk - 1];
        const f32x2 units = *(const f32x2 *)(c.factors + record_units);
        // exp(G) is at most about 2^first. In units of that, operands stay within the range of f16.
        const float first = __builtin_ceilf(factor_of(c.factors, sum_row)[0]);
        const float per_k = bits<float>(0x7f000000 - bits<int>(units.x)),
                    per_q = bits<float>(0x7f000000 - bits<int>(units.y));
        // K dS1                                                        [64, 16]
        Tile update[tiles];
        read_and_keep<T, Keys>(update, state, k, x.d_states + c.place * (Keys / 16 * value_tiles) * block_bytes,
                               value_tile, value_tiles, one);
        // dU = P^T dO' + exp(G_C - G) K dS1                            [64, 16]
        Operand output[tiles], of_q[tiles], right[tiles], of_k[tiles];
#pragma unroll
        for (int i = tiles - 1; i >= 0; --i) {
            const Tile sum = rows_at(factor_of(c.factors, sum_row) + 16 * i, at);
            const Tile d_output = tile_of<T>(d_o.load(i, work.column, p.value_dim), one);
            output[i] = rounded<T>(d_output); // exact
            of_q[i] = rounded<T>(x.scale * per_q * rows_at(factor_of(c.factors, q_norm_row) + 16 * i, at) *
                                 exp2_of(sum - first) * d_output);
            Tile inside = rows_at(factor_of(c.factors, diagonal_row) + 16 * i, at) * d_output;
            for (int j = i; j < tiles; ++j) {
                inside = T::mma(load_block(c.factors + record_p, lower_block(j, i)), output[j], inside);
            }
            inside = arch::held(inside);
            const Tile write = rows_at(factor_of(c.factors, k_norm_row) + 16 * i, at) * exp2_of(total - sum);
            update[i] = arch::held(x.scale * inside + write * update[i]);
            right[i] = rounded<T>(update[i]);
        }
        // dX = T^T dU, dV = beta dX                                    [64, 16]
        char *const updates = x.d_updates + c.place * (tiles * value_tiles) * block_bytes;
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            for (int j = i; j < tiles; ++j) {
                update[i] = T::mma(load_block(c.factors + record_reverse, lower_block(j, i)), right[j], update[i]);
            }
            update[i] = arch::held(update[i]);
            store_block(updates, i * value_tiles + value_tile, flipped<T>(rounded<T>(update[i]), one));
            const Tile d_value = rows_at(factor_of(c.factors, beta_row) + 16 * i, at) * update[i];
            if (x.d_v) {
                const Rows16 d_v(x.d_v, x.d_v_strides, work.sequence, c.begin, work.head, c.rows);
                d_v.store(i, work.column, p.value_dim, flipped<T>(rounded<T>(d_value), one));
            }
            const Tile sum = rows_at(factor_of(c.factors, sum_row) + 16 * i, at);
            of_k[i] = rounded<T>(-per_k * rows_at(factor_of(c.factors, k_norm_row) + 16 * i, at) *
                                 exp2_of(sum - first) * d_value);
        }
        // dS0 = exp(G_C) dS1 - K^T (exp(G) dV) + Q^T (exp(G) dO')      [K, 16]
        const float decay = arch::exp2(total - first) * per_k;
        for (auto &tile : state) {
            tile *= decay;
        }
        add_outer<T, Keys>(state, k, of_k, one);
        for (auto &tile : state) {
            tile = arch::held(units.x * per_q * tile);
        }
        // Q takes the registers of K.
        arch::phase();
        const KeyRows<Keys> q(Rows16(p.q, p.q_strides, work.sequence, c.begin, work.key_head, c.rows), p.key_dim);
        add_outer<T, Keys>(state, q, of_q, one);
        const float unit = units.y * arch::exp2(first);
        for (auto &tile : state) {
            tile = arch::held(unit * tile);
        }
    }
    const dwk_prefill_backward_args &x = arch::reread(all);
    if (x.d_initial) {
        if (!work.has_state) {
            for (auto &tile : state) {
                tile = Tile{};
            }
        }
        const StateView to(x.d_initial, x.d_initial_strides, x.d_initial_type, x.d_initial_value_major, work.sequence,
                           work.head);
        store_columns<Keys>(state, to, work.column, x.prepare.key_dim);
    }
}

} // namespace backward
} // namespace prefill
