// Walks of the backward over the chunks of a sequence, by four waves for a slab of 32 value columns. The state, or its
// gradient, is in registers: a wave has some pairs of 16 keys of all columns. Of each chunk a wave computes the rows of
// a tile of tokens. What all waves need as right operands goes through shared memory, rounded.
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
//
// Three products of a chunk depend on each other, and end at the three barriers of a chunk: the rows of K S, the
// solution of the triangular system, the new state. Between a wave's contribution and the barrier it does what does not
// depend on them: K and Q are turned, results are turned and stored, P^T dO' and Q^T dO' are multiplied, and operands
// of the next chunk are requested as soon as those of this one have been multiplied.
//
// Gradients of the second walk are in units of x.unit, so that x.scale is a power of two. Without norms inside,
// exp(G) dO' is then exact where a head forgets nothing. Otherwise rounding errors of this product would add up in dS0.
//
// A sequence that is cut is walked in segments at the same time (segment.h). Walks that keep nothing then come first:
// they give what a segment leaves.
#pragma once

#include "../recurrence.h"
#include "../state.h"
#include "record.h"
#include "segment.h"

namespace prefill {
namespace backward {

constexpr int walk_waves = tiles;
constexpr int walk_threads = walk_waves * arch::lanes;
constexpr int walk_residency = arch::lanes / 32; // 256 registers a lane on both kinds of targets

// Pairs of key tiles. Wave w owns pairs w, w + 4, ...
template <int Keys> constexpr int key_pairs_of = Keys / 32;
template <int Keys> constexpr int own_pairs_of = (key_pairs_of<Keys> + walk_waves - 1) / walk_waves;
// The wave's rows of a state: element e of tile [t][j] has key 32 pair + pair_element(t % 2, at.row(e)) of the wave's
// pair t / 2, and column pair_element(j, at.column(e)) of the slab.
template <int Keys> using OwnState = Tile[2 * own_pairs_of<Keys>][2];

// Whether operands of the next chunk are requested ahead, in registers.
constexpr bool requests_ahead = adjacent;

template <int Keys> struct WalkMemory {
    SharedPair state[own_pairs_of<Keys> * walk_waves][2]; // [key pair][column tile]: right operands, contract over keys
    SharedPair right[tiles], change[tiles];               // [token tile], a pair of column tiles
    SharedPair outputs[tiles], of_q[tiles];               // dO and what Q^T multiplies
};

// Where a walk starts, unless at the state of a summary, whose number is then in its place.
enum WalkStart {
    from_identity = -3, // with V = 0: columns of M
    from_zeros = -2,
    from_given = -1 // the initial state, or the gradient of the final state
};

// Work of a workgroup.
struct WalkWork {
    Piece piece; // the chunks to walk
    int head, key_head;
    int slab;      // number of the slab of columns
    int start;     // WalkStart, or the number of a summary
    int has_state; // whether the sequence has an initial state, if there are any
    int summary;   // of a walk that keeps nothing: number of the summary to write
};

DEVICE int key_head_of(const dwk_prefill_prepare_args &p, int head) {
    return arch::uniform_value(p.flags & DWK_TILED_HEADS ? head % p.key_heads : head / p.group_heads);
}
DEVICE int has_state(const dwk_prefill_backward_args &x, int sequence) {
    return arch::uniform_value(!x.has_initial_state || arch::uniform(x.has_initial_state + sequence) ? 1 : 0);
}

// `unit`, x.unit or its inverse, if the walk has its gradients in units. Those of a sequence without tokens are copied.
DEVICE float unit_of(const dwk_prefill_backward_args &x, const WalkWork &work, float unit) {
    return work.piece.chunks == 0 && work.piece.first && work.start == from_given ? 1.0f : unit;
}

// Calls f(tile, column tile, element, index) for each element of the wave's rows that lies within K and V.
template <int Keys, class F>
DEVICE void each_element(const StateView &view, int first_column, int key_dim, int value_dim, F f) {
    const LaneMap at(arch::opaque(arch::lane()));
#pragma unroll
    for (int t = 0; t < 2 * own_pairs_of<Keys>; ++t) {
        const int first_key = 32 * (t / 2 * walk_waves + arch::wave());
#pragma unroll
        for (int run = 0; run < elements; run += arch::run) {
            const int key = first_key + pair_element(t % 2, at.row(run)); // K is a multiple of 16: of the whole run
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = first_column + pair_element(j, at.column(run));
                if ((key < key_dim) & (column < value_dim)) {
#pragma unroll
                    for (int r = 0; r < arch::run; ++r) {
                        f(t, j, run + r, (key + r) * view.key_step + column * view.value_step);
                    }
                }
            }
        }
    }
}

// load_rows, store_rows: the wave's rows of a state from memory, and to memory.
template <int Type, int Keys>
DEVICE void load_narrow_rows(OwnState<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    each_element<Keys>(from, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
        s[t][j][e] = state::widened<Type>(((const short *)from.base)[index], 0);
    });
}

template <int Keys>
DEVICE void load_rows(OwnState<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    if (from.type == DWK_F32) {
        each_element<Keys>(from, column, key_dim, value_dim,
                           [&](int t, int j, int e, int64_t index) { s[t][j][e] = ((const float *)from.base)[index]; });
    } else if (from.type == DWK_F16) {
        load_narrow_rows<DWK_F16, Keys>(s, from, column, key_dim, value_dim);
    } else {
        load_narrow_rows<DWK_BF16, Keys>(s, from, column, key_dim, value_dim);
    }
}

template <int Type, int Keys>
DEVICE void store_narrow_rows(const OwnState<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    each_element<Keys>(to, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
        ((short *)to.base)[index] = state::narrowed<Type>(s[t][j][e]);
    });
}

template <int Keys>
DEVICE void store_rows(const OwnState<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    if (to.type == DWK_F32) {
        each_element<Keys>(to, column, key_dim, value_dim,
                           [&](int t, int j, int e, int64_t index) { ((float *)to.base)[index] = s[t][j][e]; });
    } else if (to.type == DWK_F16) {
        store_narrow_rows<DWK_F16, Keys>(s, to, column, key_dim, value_dim);
    } else {
        store_narrow_rows<DWK_BF16, Keys>(s, to, column, key_dim, value_dim);
    }
}

// Pairs of a tensor's rows of a chunk: of the wave's tile of tokens (Tiles = 1), or of all four. Where operands are
// requested ahead they are in registers from request() on, otherwise get() loads them.
template <int Pairs, int Tiles, bool Ahead = requests_ahead> class ChunkPairs {
  public:
    // `pair`: of this object, of 32 elements from `column` on. `first`: the first tile.
    DEVICE_MEMBER void place(const PairRows<> &rows, int pair, int first, int column) {
        for (int r = 0; r < Tiles; ++r) {
            places[pair][r] = rows.place(first + r, column);
        }
    }
    DEVICE_MEMBER void request(const PairRows<> &rows, const RowMask<> &mask) {
        if constexpr (Ahead && !adjacent && Tiles == 1) {
            rows.load(&held[0][0], &places[0][0], Pairs, mask.own());
        } else if constexpr (Ahead) {
#pragma unroll
            for (int r = 0; r < Tiles; ++r) {
#pragma unroll
                for (int p = 0; p < Pairs; ++p) {
                    held[p][r] = load(rows, mask, p, r);
                }
            }
        }
    }
    DEVICE_MEMBER Pair get(const PairRows<> &rows, const RowMask<> &mask, int pair, int tile) const {
        if constexpr (Ahead) {
            return held[pair][tile];
        } else {
            return load(rows, mask, pair, tile);
        }
    }
    // `Count` pairs of a tile, or all tiles of a pair, from `pair` on. Loads that are not ahead are requested together.
    template <int Count>
    DEVICE_MEMBER void get_all(Pair (&out)[Count], const PairRows<> &rows, const RowMask<> &mask, int pair) const {
        if constexpr (Ahead || adjacent) {
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                out[i] = Tiles == 1 ? get(rows, mask, pair + i, 0) : get(rows, mask, pair, i);
            }
        } else {
            rows.load(out, Tiles == 1 ? &places[pair][0] : places[pair], Count, mask.own());
        }
    }

  private:
    DEVICE_MEMBER Pair load(const PairRows<> &rows, const RowMask<> &mask, int pair, int tile) const {
        return rows.load(places[pair][tile], Tiles == 1 ? mask.own() : mask.tile(tile));
    }

    u32 places[Pairs][Tiles];
    Pair held[Ahead ? Pairs : 1][Ahead ? Tiles : 1];
};

// Places of four blocks of a triangular matrix of a record: of the wave's row of blocks (wave, 0..3), or of its column
// (0..3, wave). Blocks past the triangle are zeros.
struct TrianglePlaces {
    u32 of[tiles];

    DEVICE_MEMBER TrianglePlaces(int wave, bool rows) {
        for (int i = 0; i < tiles; ++i) {
            const int block = rows ? lower_block(wave, i) : lower_block(i, wave);
            of[i] = (rows ? i <= wave : i >= wave) ? block * block_bytes + arch::lane() * (u32)sizeof(Operand)
                                                   : Window::nowhere;
        }
    }
};

// These blocks, of a chunk.
template <bool Ahead = true> class Triangle {
  public:
    DEVICE_MEMBER void request(const char *blocks, const TrianglePlaces &places) {
        from = blocks;
        if constexpr (Ahead) {
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                held[i] = load(i, places);
            }
        }
    }
    DEVICE_MEMBER Operand get(int i, const TrianglePlaces &places) const {
        if constexpr (Ahead) {
            return held[i];
        } else {
            return load(i, places);
        }
    }

  private:
    template <class W> static DEVICE_MEMBER Operand load_written(const W &memory, u32 offset) {
        return memory.load_written_b128(offset);
    }
    DEVICE_MEMBER Operand load(int i, const TrianglePlaces &places) const {
        if constexpr (adjacent) {
            const i32x2 words = Window(from).load_b64(places.of[i]);
            Operand out;
            out[0] = words.x;
            out[1] = words.y;
            return out;
        } else {
            return load_written(Window(from), places.of[i]);
        }
    }

    const char *from;
    Operand held[Ahead ? tiles : 1];
};

// Row factors of the wave's tile, and numbers of the chunk.
struct WalkFactors {
    Tile sum, k_norm, beta, q_norm, diagonal;
    ChunkNumbers chunk;
};
template <bool Reverse> DEVICE void load_factors(WalkFactors &to, const char *record, int wave) {
    const LaneMap at(arch::lane());
    to.sum = rows_at(factor_of(record, sum_row) + 16 * wave, at);
    to.k_norm = rows_at(factor_of(record, k_norm_row) + 16 * wave, at);
    to.beta = rows_at(factor_of(record, beta_row) + 16 * wave, at);
    if constexpr (Reverse) {
        to.q_norm = rows_at(factor_of(record, q_norm_row) + 16 * wave, at);
        to.diagonal = rows_at(factor_of(record, diagonal_row) + 16 * wave, at);
    }
    to.chunk = numbers_of(record);
}

// A walk in one direction, by one wave of four. `Keep`: stores what the gradients need. Otherwise only the last state
// is stored, in a summary.
template <class T, int Keys, bool Reverse, bool Keep = true> class Walk {
    static constexpr int pairs = key_pairs_of<Keys>, own_pairs = own_pairs_of<Keys>, own_tiles = 2 * own_pairs;
    // Products of f16 are in units that keep them within its range; bf16 has the range of f32.
    static constexpr bool has_units = !__is_same(T, Bf16);
    // Whether registers hold operands of K^T and Q^T of the next chunk.
    static constexpr bool holds_columns = requests_ahead && own_pairs == 1;
    // Whether registers hold an operand that is turned until the barrier before its product.
    static constexpr bool turns_ahead = requests_ahead || own_pairs == 1;

  public:
    DEVICE_MEMBER Walk(const dwk_prefill_backward_args &all, const WalkWork &work, WalkMemory<Keys> &memory)
        : all(all), memory(memory), work(work), wave(arch::wave()), at(arch::lane()), one(identity<T>()),
          step(Reverse ? -1 : 1), places(arch::wave(), !Reverse),
          k(all.prepare.k, all.prepare.k_strides, work.piece.sequence, begin_of(work), work.key_head,
            all.prepare.key_dim),
          q(all.prepare.q, all.prepare.q_strides, work.piece.sequence, begin_of(work), work.key_head,
            all.prepare.key_dim),
          given(Reverse ? all.d_o : all.v, Reverse ? all.d_o_strides : all.v_strides, work.piece.sequence,
                begin_of(work), work.head, !Keep && work.start == from_identity ? 0 : all.prepare.value_dim),
          d_v(all.d_v, all.d_v_strides, work.piece.sequence, begin_of(work), work.head, all.prepare.value_dim) {
        const dwk_prefill_prepare_args &p = all.prepare;
        slabs = (u32)(p.value_dim + slab - 1) / slab;
        place = place_of(p, work.piece.first_record() + first_number(work), work.head);
        chunk_rows = work.piece.range.end - begin_of(work);
        for (int b = 0; b < pairs; ++b) {
            k_rows.place(k, b, wave, slab * b);
        }
        for (int b = 0; b < own_pairs; ++b) {
            k_columns.place(k, b, 0, slab * (wave + walk_waves * b));
            if constexpr (Reverse) {
                q_columns.place(q, b, 0, slab * (wave + walk_waves * b));
            }
        }
        given_rows.place(given, 0, wave, slab * work.slab);
        d_v_place = d_v.place(wave, slab * work.slab);
    }

    DEVICE_MEMBER void run() {
        for (int t = 0; t < own_tiles; ++t) {
            state[t][0] = state[t][1] = Tile{};
        }
        begin_state();
        if (work.piece.chunks > 0) {
            request_first();
            share_state();
            prepare_given();
            arch::workgroup_sync();
#pragma unroll 1
            for (int rest = work.piece.chunks - 1; rest >= 0; --rest) {
                walk_chunk(rest > 0);
            }
        }
        const dwk_prefill_backward_args &x = arch::reread(all);
        if constexpr (!Keep) {
            store_summary(x);
        } else if (Reverse && x.d_initial && work.piece.first) {
            if (!work.has_state) {
                for (int t = 0; t < own_tiles; ++t) {
                    state[t][0] = state[t][1] = Tile{};
                }
            }
            scale_state(unit_of(x, work, x.unit));
            store_rows<Keys>(state,
                             StateView(x.d_initial, x.d_initial_strides, x.d_initial_type, x.d_initial_value_major,
                                       work.piece.sequence, work.head),
                             slab * work.slab, x.prepare.key_dim, x.prepare.value_dim);
        }
    }

  private:
    typedef Tile Slab[2]; // [16 tokens, slab]

    // The state that the walk starts from, unless zeros.
    DEVICE_MEMBER void begin_state() {
        const dwk_prefill_prepare_args &p = all.prepare;
        if (work.start >= 0) {
            load_rows<Keys>(state, matrix_view(boundary_of(all, work.start, work.head), p.key_dim), slab * work.slab,
                            p.key_dim, p.value_dim);
        } else if (work.start == from_given) {
            if (Reverse && all.d_final) {
                load_rows<Keys>(state,
                                StateView(all.d_final, all.d_final_strides, all.d_final_type, all.d_final_value_major,
                                          work.piece.sequence, work.head),
                                slab * work.slab, p.key_dim, p.value_dim);
                scale_state(unit_of(all, work, all.per_unit));
            }
            if (!Reverse && all.initial_state && work.has_state) {
                load_rows<Keys>(state,
                                StateView(all.initial_state, all.initial_strides, all.initial_type,
                                          p.flags & DWK_INITIAL_VALUE_MAJOR, work.piece.sequence, work.head),
                                slab * work.slab, p.key_dim, p.value_dim);
            }
        } else if (!Keep && work.start == from_identity) {
            // The index of an element is its key less its column.
            each_element<Keys>(matrix_view(nullptr, -1), slab * work.slab, p.key_dim, p.key_dim,
                               [&](int t, int j, int e, int64_t index) { state[t][j][e] = index == 0 ? 1.0f : 0.0f; });
        }
    }
    // Columns of N, or those of M for both directions: the reverse one applies the transposed matrix.
    DEVICE_MEMBER void store_summary(const dwk_prefill_backward_args &x) {
        const dwk_prefill_prepare_args &p = x.prepare;
        float *const to = boundary_of(x, work.summary, work.head);
        if (work.start != from_identity) {
            store_rows<Keys>(state, matrix_view(to, p.key_dim), slab * work.slab, p.key_dim, p.value_dim);
            return;
        }
        float *const forward = second_part(to, p);
        float *const reverse = second_part(boundary_of(x, mirrored(x, work.summary), work.head), p);
        const StateView numbered = matrix_view(nullptr, Keys); // key + Keys column
        each_element<Keys>(numbered, slab * work.slab, p.key_dim, p.key_dim, [&](int t, int j, int e, int64_t index) {
            const int key = (int)index % Keys, column = (int)index / Keys;
            store_high_low(forward, key, column, p.key_dim, state[t][j][e]);
            store_high_low(reverse, column, key, p.key_dim, state[t][j][e]);
        });
    }

    DEVICE_MEMBER const char *record() const {
        return arch::uniform_pointer((const char *)all.prepare.records + place * DWK_BACKWARD_RECORD_BYTES);
    }
    // The chunk that the walk begins with, and its first token.
    static DEVICE_MEMBER int first_number(const WalkWork &work) {
        return work.piece.first_chunk + (Reverse ? work.piece.chunks - 1 : 0);
    }
    static DEVICE_MEMBER int begin_of(const WalkWork &work) {
        return work.piece.range.begin + first_number(work) * chunk;
    }
    DEVICE_MEMBER void request_first() {
        mask.set(chunk_rows, wave);
        own_mask = mask;
        given_rows.request(given, mask);
        load_factors<Reverse>(factors, record(), wave);
        inside.request(record() + record_p, places);
        k_rows.request(k, mask);
        k_columns.request(k, mask);
        if constexpr (Reverse) {
            q_columns.request(q, mask);
        }
        solve.request(record() + (Reverse ? record_reverse : record_forward), places);
    }
    // From here on requests are of the next chunk. Past the last one they give zeros, and the same record.
    DEVICE_MEMBER void go_on(bool more) {
        chunk_rows = more ? chunk_rows - step * chunk : 0;
        mask.set(chunk_rows, wave);
        k.advance(step);
        given.advance(step);
        if constexpr (Reverse && (holds_columns || !requests_ahead)) {
            q.advance(step);
        }
        place += more ? step * all.prepare.value_heads : 0;
    }

    // Writes the wave's rows of the state, rounded, to shared memory.
    DEVICE_MEMBER void share_state() {
#pragma unroll
        for (int b = 0; b < own_pairs; ++b) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                memory.state[b * walk_waves + wave][j].put(
                    Pair{{rounded<T>(state[2 * b][j]), rounded<T>(state[2 * b + 1][j])}});
            }
        }
    }
    // Stores the wave's rows of the rounded state, from shared memory, with rows of keys.
    DEVICE_MEMBER void store_state(char *to, int64_t place) {
        char *const states = to + place * (Keys / 16 * slabs) * pair_bytes;
#pragma unroll
        for (int b = 0; b < own_pairs; ++b) {
            const int pair = b * walk_waves + wave;
            if (pair < pairs) {
                const Pair first = memory.state[pair][0].get(), second = memory.state[pair][1].get();
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    store_pair(states, (2 * pair + s) * slabs + work.slab,
                               Pair{{flipped<T>(first.part[s], one), flipped<T>(second.part[s], one)}});
                }
            }
        }
    }

    // What makes of dO what Q^T multiplies.
    DEVICE_MEMBER Tile factor_of_q(const WalkFactors &f) const {
        const float per_q = has_units ? f.chunk.per_q() : 1.0f, first = has_units ? f.chunk.first : 0.0f;
        return all.scale * per_q * f.q_norm * exp2_of(f.sum - first);
    }
    // Rounding errors of right operands, in the last chunk that a reverse walk computes: where the state was.
    DEVICE_MEMBER SharedPair *low_of_right() { return &memory.state[0][0]; }
    DEVICE_MEMBER SharedPair *low_of_q() { return &memory.state[0][0] + tiles; }

    // V or dO of the chunk that was requested last; in reverse also what of it the other waves multiply.
    DEVICE_MEMBER void prepare_given() {
        const Pair rows = given_rows.get(given, mask, 0, 0);
        for (int j = 0; j < 2; ++j) {
            value[j] = tile_of<T>(rows.part[j], one);
        }
        if constexpr (Reverse) {
            Pair outputs, of_q;
            const Tile factor = factor_of_q(factors);
            for (int j = 0; j < 2; ++j) {
                outputs.part[j] = exactly<T>(value[j]);
                of_q.part[j] = rounded<T>(factor * value[j]);
            }
            memory.outputs[wave].put(outputs);
            memory.of_q[wave].put(of_q);
        }
    }

    // out += S of all keys, from the left K.
    DEVICE_MEMBER void read_state(Slab &out) {
        out[0] = out[1] = Tile{};
        constexpr int at_once = pairs < 4 ? pairs : 4;
#pragma unroll
        for (int begin = 0; begin < pairs; begin += at_once) {
            Pair rows[at_once];
            k_rows.get_all(rows, k, own_mask, begin);
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const int b = begin + i;
                const Pair first = memory.state[b][0].get(), second = memory.state[b][1].get();
                out[0] = T::mma(rows[i].part[0], first.part[0], out[0]);
                out[1] = T::mma(rows[i].part[0], second.part[0], out[1]);
                out[0] = T::mma(rows[i].part[1], first.part[1], out[0]);
                out[1] = T::mma(rows[i].part[1], second.part[1], out[1]);
            }
        }
    }
    // out += blocks of the triangle times tokens in shared memory.
    DEVICE_MEMBER void multiply(Slab &out, const Triangle<> &triangle, const SharedPair *tokens) {
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const Operand block = triangle.get(i, places);
            const Pair right = tokens[i].get();
            out[0] = T::mma(block, right.part[0], out[0]);
            out[1] = T::mma(block, right.part[1], out[1]);
        }
    }
    // Own keys of K^T or Q^T.
    template <class Source> DEVICE_MEMBER void turn(const Source &source, const PairRows<> &rows) {
        if constexpr (turns_ahead) {
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                Pair of_keys[tiles];
                source.get_all(of_keys, rows, own_mask, b);
#pragma unroll
                for (int i = 0; i < tiles; ++i) {
                    turned[b][i] = flipped_pair<T>(of_keys[i], one);
                }
            }
        }
    }
    // Those of K, of which rows of the next chunk may have been requested.
    DEVICE_MEMBER void turn_k() {
        PairRows<> rows = k;
        if constexpr (requests_ahead && !holds_columns) {
            rows.advance(-step);
        }
        turn(k_columns, rows);
    }
    // state += turned times tokens in shared memory.
    template <class Source>
    DEVICE_MEMBER void accumulate(const Source &source, const PairRows<> &rows, const SharedPair *tokens) {
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const Pair right = tokens[i].get();
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                Pair left;
                if constexpr (turns_ahead) {
                    left = turned[b][i];
                } else {
                    left = flipped_pair<T>(source.get(rows, own_mask, b, i), one);
                }
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    state[2 * b + s][0] = T::mma(left.part[s], right.part[0], state[2 * b + s][0]);
                    state[2 * b + s][1] = T::mma(left.part[s], right.part[1], state[2 * b + s][1]);
                }
            }
            if constexpr (!turns_ahead) {
                arch::phase();
            }
        }
    }
    DEVICE_MEMBER void scale_state(float by) {
#pragma unroll
        for (int t = 0; t < own_tiles; ++t) {
            state[t][0] *= by;
            state[t][1] *= by;
        }
    }
    DEVICE_MEMBER void walk_chunk(bool more) {
        const dwk_prefill_backward_args &x = arch::reread(all); // saves scalar registers
        const int64_t now = place;
        own_mask = mask;
        const WalkFactors f = factors;
        if constexpr (requests_ahead) {
            go_on(more);
            given_rows.request(given, mask);
        }
        if constexpr (Reverse) {
            reverse_chunk(x, now, f, more);
        } else {
            forward_chunk(x, now, f, more);
        }
    }

    // Factors and triangles of the next chunk, and what else is not requested earlier. Where no operand is turned
    // ahead, at the end of a chunk.
    DEVICE_MEMBER void request_next(bool more) {
        if constexpr (!requests_ahead) {
            go_on(more);
            given_rows.request(given, mask);
            k_rows.request(k, mask);
        }
        load_factors<Reverse>(factors, record(), wave);
        solve.request(record() + (Reverse ? record_reverse : record_forward), places);
        if constexpr (Reverse) {
            inside.request(record() + record_p, places);
        }
    }

    DEVICE_MEMBER void forward_chunk(const dwk_prefill_backward_args &x, int64_t now, const WalkFactors &f, bool more) {
        Slab error;
        // R = K S0                                                     [16 tokens, slab]
        read_state(error);
        if constexpr (requests_ahead) {
            k_rows.request(k, mask);
        }
        arch::phase();
        // V - exp(G) R
        const Tile read = f.k_norm * exp2_of(f.sum);
        Pair right;
        for (int j = 0; j < 2; ++j) {
            error[j] = arch::held(arch::minus_product(value[j], read, error[j]));
            right.part[j] = rounded<T>(error[j]);
        }
        memory.right[wave].put(right);
        arch::phase();
        turn_k();
        k_columns.request(k, mask);
        if constexpr (Keep) {
            store_state(x.states, now);
        }
        arch::phase();
        arch::workgroup_sync();
        // E = T' (V - exp(G) R)                                        [16 tokens, slab]
        multiply(error, solve, memory.right);
        const float per_unit = has_units ? f.chunk.per_k() : 1.0f;
        const Tile factor = per_unit * f.k_norm * f.beta * exp2_of(f.chunk.total - f.sum);
        Pair change;
        for (int j = 0; j < 2; ++j) {
            error[j] = arch::held(error[j]);
            change.part[j] = rounded<T>(factor * error[j]);
        }
        memory.change[wave].put(change);
        arch::phase();
        if constexpr (turns_ahead) {
            request_next(more);
        }
        scale_state(arch::exp2(f.chunk.total) * per_unit);
        if constexpr (Keep) {
            Pair high, low;
            for (int j = 0; j < 2; ++j) {
                high.part[j] = rounded<T>(error[j]);
                low.part[j] = rounding_of<T>(error[j], high.part[j]);
            }
            char *const errors = x.errors + now * (2 * tiles * slabs) * pair_bytes;
            store_pair(errors, wave * slabs + work.slab, flipped_pair<T>(high, one));
            store_pair(errors, (tiles + wave) * slabs + work.slab, flipped_pair<T>(low, one));
        }
        arch::phase();
        arch::workgroup_sync();
        // S1 = exp(G_C) S0 + K^T (exp(G_C - G) beta E)                 [own keys, slab]
        accumulate(k_columns, k, memory.change);
        if constexpr (has_units) {
            scale_state(f.chunk.k_unit);
        }
        share_state();
        arch::phase();
        if constexpr (!turns_ahead) {
            request_next(more);
        }
        prepare_given();
        arch::phase();
        arch::workgroup_sync();
    }

    DEVICE_MEMBER void reverse_chunk(const dwk_prefill_backward_args &x, int64_t now, const WalkFactors &f, bool more) {
        Slab update, within;
        // K dS1                                                        [16 tokens, slab]
        read_state(update);
        if constexpr (requests_ahead) {
            k_rows.request(k, mask);
        }
        arch::phase();
        // dU = P^T dO' + exp(G_C - G) K dS1                            [16 tokens, slab]
        for (int j = 0; j < 2; ++j) {
            within[j] = f.diagonal * value[j];
        }
        multiply(within, inside, memory.outputs);
        const Tile write = f.k_norm * exp2_of(f.chunk.total - f.sum);
        Pair right;
        for (int j = 0; j < 2; ++j) {
            update[j] = arch::held(x.scale * arch::held(within[j]) + write * arch::held(update[j]));
            right.part[j] = rounded<T>(update[j]);
        }
        memory.right[wave].put(right);
        arch::phase();
        // dS0 = exp(G_C) dS1 + Q^T (exp(G) dO') ..                     [own keys, slab]
        if constexpr (Keep) {
            store_state(x.d_states, now);
        }
        turn(q_columns, q);
        q_columns.request(q, mask);
        if constexpr (requests_ahead && !holds_columns) {
            q.advance(step);
        }
        const float first = has_units ? f.chunk.first : 0.0f;
        scale_state(arch::exp2(f.chunk.total - first) * (has_units ? f.chunk.per_q() : 1.0f));
        accumulate(q_columns, q, memory.of_q);
        arch::phase();
        if (!more) {
            // The gradient of the initial state: rounding errors of the right operands are multiplied too.
            arch::workgroup_sync(); // nobody reads the state from shared memory any more
            Pair low_right, low_q;
            const Tile factor = factor_of_q(f);
            for (int j = 0; j < 2; ++j) {
                low_right.part[j] = rounding_of<T>(update[j], right.part[j]);
                const Tile of_q = factor * value[j];
                low_q.part[j] = rounding_of<T>(of_q, rounded<T>(of_q));
            }
            low_of_right()[wave].put(low_right);
            low_of_q()[wave].put(low_q);
        }
        arch::workgroup_sync();
        // dX = T^T dU, dV = beta dX                                    [16 tokens, slab]
        multiply(update, solve, memory.right);
        if (!more) {
            multiply(update, solve, low_of_right());
            accumulate(q_columns, q, low_of_q());
        }
        const Tile factor = -f.k_norm * f.beta * exp2_of(f.sum - first) * (has_units ? f.chunk.per_k() : 1.0f);
        Pair change;
        for (int j = 0; j < 2; ++j) {
            update[j] = arch::held(update[j]);
            change.part[j] = rounded<T>(factor * update[j]);
        }
        memory.change[wave].put(change);
        if (!more) {
            Pair low;
            for (int j = 0; j < 2; ++j) {
                low.part[j] = rounding_of<T>(factor * update[j], change.part[j]);
            }
            memory.outputs[wave].put(low);
        }
        arch::phase();
        turn_k();
        k_columns.request(k, mask);
        if constexpr (has_units) {
            scale_state(f.chunk.q_unit * f.chunk.per_k());
        }
        if constexpr (turns_ahead) {
            request_next(more);
        }
        if constexpr (Keep) {
            Pair d_update, d_value;
            for (int j = 0; j < 2; ++j) {
                d_update.part[j] = rounded<T>(update[j]);
                d_value.part[j] = rounded<T>(x.unit * f.beta * update[j]);
            }
            store_pair(x.d_updates + now * (tiles * slabs) * pair_bytes, wave * slabs + work.slab,
                       flipped_pair<T>(d_update, one));
            if (x.d_v) {
                d_v.store(d_v_place, own_mask.own(), flipped_pair<T>(d_value, one));
            }
            d_v.advance(step);
        }
        arch::phase();
        arch::workgroup_sync();
        // .. - K^T (exp(G) dV)
        accumulate(k_columns, k, memory.change);
        if (!more) {
            accumulate(k_columns, k, memory.outputs);
        }
        if constexpr (has_units) {
            scale_state(f.chunk.k_unit * arch::exp2(first));
        }
        if (!more) {
            return;
        }
        share_state();
        arch::phase();
        if constexpr (!turns_ahead) {
            request_next(more);
        }
        prepare_given();
        arch::phase();
        arch::workgroup_sync();
    }

    const dwk_prefill_backward_args &all;
    WalkMemory<Keys> &memory;
    const WalkWork work;
    const int wave;
    const LaneMap at;
    const Operand one;
    const int step;
    const TrianglePlaces places;
    int slabs;
    int chunk_rows; // rows from the first one of the chunk on, in the sequence
    int64_t place;
    PairRows<> k, q, given, d_v;
    RowMask<> mask, own_mask;
    ChunkPairs<pairs, 1, turns_ahead> k_rows;
    ChunkPairs<own_pairs, tiles, holds_columns> k_columns;
    ChunkPairs<own_pairs, tiles, holds_columns> q_columns;
    ChunkPairs<1, 1, turns_ahead> given_rows;
    u32 d_v_place;
    Triangle<> solve, inside;
    WalkFactors factors;
    OwnState<Keys> state;
    Pair turned[turns_ahead ? own_pairs : 1][turns_ahead ? tiles : 1]; // own keys of K^T or Q^T
    Slab value;                                                        // V or dO
};

} // namespace backward
} // namespace prefill
