// Walk of prefill_fused over chunks on CDNA, in the waves that hold the state. A wave has all rows of its value columns,
// so S, X and U, rounded, are its own right operands, and nothing of the slab goes through LDS. K, Q, K^T, T, P and row
// factors come from the making waves (fused.h), one chunk after the other.
//
// Barriers of a chunk, which all waves meet:
//   joined, corner   the making waves have exchanged parts of T
//   made             T, P, K^T and row factors of this chunk are in LDS; K and Q are no longer read
//   copied           K and Q of the next chunk are in LDS; T is no longer read
//   used             P, K^T and row factors are no longer read
#pragma once

#include "../recurrence.h"
#include "../segment.h"
#include "fused_memory.h"
#include "rows.h"

namespace prefill {

template <class T, int Keys, bool Outputs = true> class Chunks {
    static constexpr int across = wave_tiles, key_tiles = StateLayout<Keys>::key_tiles, pairs = key_pairs(Keys);
    typedef prefill::State<Keys> State;
    typedef Tile Slab[tiles][across]; // [64 tokens, the wave's columns]
    typedef Operand RoundedSlab[tiles][across];

  public:
    DEVICE_MEMBER Chunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int, int, u32 column_offset)
        : shared(fused_memory<Keys>()), v(x.v, x.v_strides, s.sequence, s.begin, head, x.value_dim),
          o(x.o, apart(x.o_strides, x.value_dim), s.sequence, s.begin, head, x.value_dim), scale(x.scale),
          rest(s.end - s.begin),
          quiet(s.quiet) {
        for (int r = 0; r < elements; ++r) {
            const int row = LaneMap(arch::lane()).row(r);
            v_offset[r] = row * v.stride + column_offset;
            o_offset[r] = row * o.stride + column_offset;
        }
        if (rest > 0) {
            v.limit(rest);
            load_values();
        }
    }

    // Meets the barriers of the making waves before the first chunk.
    DEVICE_MEMBER void begin(const State &) {
        if (rest > 0) {
            arch::workgroup_sync();
            arch::workgroup_sync();
        }
    }
    // Tokens left in the segment.
    DEVICE_MEMBER int left() const { return rest; }

    DEVICE_MEMBER void step(State &state, const dwk_prefill_scan_args &) {
        Slab x, out;
        read_state(state, x, out);
        arch::workgroup_sync(); // made
        solve_u(x, state);
        arch::workgroup_sync(); // copied
        update_state(state, x);
        if constexpr (Outputs) {
            multiply_p(out, x);
        }
        arch::workgroup_sync(); // used
        if constexpr (Outputs) {
            write_outputs(out);
        }
        rest = arch::opaque_uniform(arch::uniform_value(rest - chunk));
    }

    // Converts the state to unit 1.
    DEVICE_MEMBER void complete(State &state) {
        multiply(state, unit);
        unit = 1.0f;
    }
    DEVICE_MEMBER void finish() {}

  private:
    // Operand pairs that are loaded ahead of their products.
    static constexpr int ahead = 3;

    DEVICE_MEMBER void load_values() {
        for (int i = 0; i < tiles; ++i) {
            for (int r = 0; r < elements; ++r) {
                values[i][r] = v.memory.load_b32((u32)arch::opaque((int)v_offset[r]) + 16 * i * v.stride);
            }
        }
    }
    // Step n of K S0 and Q S0: four row tiles of K, then of Q, for one key pair after the other.
    static constexpr int of_pair = (Outputs ? 2 : 1) * tiles, steps = pairs * of_pair;
    DEVICE_MEMBER OperandPair rows_of_step(int n) const {
        const int i = n % tiles;
        return OperandPair{n % of_pair < tiles ? shared.k[i][n / of_pair][arch::lane()]
                                               : shared.q[i][n / of_pair][arch::lane()]};
    }

    // R = K S0                                                       [64 tokens, 32 columns]
    // out = Q S0                                                     [64 tokens, 32 columns]
    DEVICE_MEMBER void read_state(const State &state, Slab &r, Slab &out) {
        OperandPair ring[ahead + 1];
        for (int n = 0; n < ahead; ++n) {
            ring[n] = rows_of_step(n);
        }
        Operand s[2][2][across]; // two key pairs
        for (int h = 0; h < 2 * across; ++h) {
            s[0][h / across][h % across] = round_state(state, 0, h);
        }
        arch::phase();
#pragma unroll
        for (int n = 0; n < steps; ++n) {
            const int b = n / of_pair, i = n % tiles;
            if (n == steps / 4 || n == steps / 2) {
                __builtin_amdgcn_s_barrier(); // joined, corner
                arch::phase();
            }
            if (n + ahead < steps) {
                ring[(n + ahead) % (ahead + 1)] = rows_of_step(n + ahead);
            }
            // A quarter of the next pair's rounding.
            if (b + 1 < pairs && n % of_pair >= of_pair - tiles) {
                s[(b + 1) % 2][i / across][i % across] = round_state(state, b + 1, i);
            }
            const OperandPair rows = ring[n % (ahead + 1)];
            Slab &to = n % of_pair < tiles ? r : out;
            for (int j = 0; j < across; ++j) {
                to[i][j] = T::mma(rows.first(), s[b % 2][0][j], b == 0 ? Tile{} : to[i][j]);
            }
            for (int j = 0; j < across; ++j) {
                to[i][j] = T::mma(rows.second(), s[b % 2][1][j], to[i][j]);
            }
            arch::phase();
        }
    }
    // Quarter h of key pair b of the state as right operands.
    DEVICE_MEMBER Operand round_state(const State &state, int b, int h) const {
        return arch::packed<T>(T::nearest(state[2 * b + h / across][h % across], unit));
    }

    // X = beta V - beta exp(G) R                                     [64 tokens, 32 columns]
    // U = X + (T - I) X, in place                                    [64 tokens, 32 columns]
    // state <- exp(G_C) S0 / unit
    DEVICE_MEMBER void solve_u(Slab &x, State &state) {
        RoundedSlab rounded_x;
        for (int i = 0; i < tiles; ++i) {
            const Tile beta = shared.factor(beta_row, i), read = shared.factor(read_row, i);
            Tile weighted[across];
            for (int r = 0; r < elements; ++r) {
                weighted[0][r] = T::low(values[i][r]);
                weighted[1][r] = T::high(values[i][r]);
            }
            for (int j = 0; j < across; ++j) {
                x[i][j] = solve_x(beta * weighted[j], read, x[i][j]);
                rounded_x[i][j] = rounded<T>(x[i][j]);
            }
        }
        v.advance();
        v.limit(rest - chunk);
        arch::phase();
        load_values();
        multiply_lower(x, shared.t, rounded_x);
        const f32x2 decay = shared.decay();
        multiply(state, decay.x * unit);
        unit = decay.y;
        arch::phase();
    }
    // out += lower blocks times x.
    static DEVICE_MEMBER void multiply_lower(Slab &out, const BlockPairs &blocks, const RoundedSlab &x) {
        OperandPair pair[lower_blocks / 2];
        for (int n = 0; n < lower_blocks / 2; ++n) {
            pair[n].data = blocks[n][arch::lane()];
        }
        for (int i = 0; i < tiles; ++i) {
            for (int c = 0; c <= i; ++c) {
                const int n = lower_block(i, c);
                for (int j = 0; j < across; ++j) {
                    out[i][j] = T::mma(n % 2 == 0 ? pair[n / 2].first() : pair[n / 2].second(), x[c][j], out[i][j]);
                }
            }
        }
        arch::phase();
    }

    // S1 = exp(G_C) S0 + K^T (exp(G_C - G) U / unit)                 [K, 32 columns]
    // After the last chunk also the product with the update's rounding error (rounding_of).
    DEVICE_MEMBER void update_state(State &state, const Slab &u) {
        RoundedSlab update;
        for (int i = 0; i < tiles; ++i) {
            const Tile write = shared.factor(write_row, i);
            for (int j = 0; j < across; ++j) {
                update[i][j] = rounded<T>(change_of(write, u[i][j]));
            }
        }
        arch::phase();
        accumulate(state, update);
        arch::products_done();
        if (rest <= chunk) {
            for (int i = 0; i < tiles; ++i) {
                const Tile write = shared.factor(write_row, i);
                for (int j = 0; j < across; ++j) {
                    update[i][j] = rounding_of<T>(change_of(write, u[i][j]), update[i][j]);
                }
            }
            accumulate(state, update);
            arch::products_done();
        }
    }
    // S += K^T x.
    DEVICE_MEMBER void accumulate(State &state, const RoundedSlab &x) const {
        OperandPair ring[ahead + 1];
        constexpr int steps = pairs * tiles;
        for (int n = 0; n < ahead; ++n) {
            ring[n].data = shared.transposed[n / tiles][n % tiles][arch::lane()];
        }
        arch::phase();
#pragma unroll
        for (int n = 0; n < steps; ++n) {
            const int b = n / tiles, c = n % tiles, next = n + ahead;
            if (next < steps) {
                ring[next % (ahead + 1)].data = shared.transposed[next / tiles][next % tiles][arch::lane()];
            }
            const OperandPair keys = ring[n % (ahead + 1)];
            for (int j = 0; j < across; ++j) {
                state[2 * b][j] = T::mma(keys.first(), x[c][j], state[2 * b][j]);
            }
            for (int j = 0; j < across; ++j) {
                state[2 * b + 1][j] = T::mma(keys.second(), x[c][j], state[2 * b + 1][j]);
            }
            arch::phase();
        }
    }

    // O / scale = exp(G) Q S0 + diag(P) U + (P - diag(P)) U          [64 tokens, 32 columns]
    DEVICE_MEMBER void multiply_p(Slab &out, const Slab &u) const {
        RoundedSlab rounded_u;
        for (int i = 0; i < tiles; ++i) {
            const Tile output = shared.factor(output_row, i), diagonal = shared.factor(diagonal_row, i);
            for (int j = 0; j < across; ++j) {
                rounded_u[i][j] = rounded<T>(u[i][j]);
                out[i][j] = output_of(output, out[i][j], diagonal, u[i][j]);
            }
        }
        multiply_lower(out, shared.p, rounded_u);
    }
    DEVICE_MEMBER void write_outputs(const Slab &out) {
        if (quiet > 0) {
            quiet = arch::opaque_uniform(arch::uniform_value(quiet - chunk));
            o.advance();
            return;
        }
        o.limit(rest);
        for (int i = 0; i < tiles; ++i) {
            const Tile first = arch::held(T::nearest(scale * out[i][0])),
                       second = arch::held(T::nearest(scale * out[i][1]));
            for (int r = 0; r < elements; ++r) {
                o.memory.store_b32((u32)arch::opaque((int)o_offset[r]) + 16 * i * o.stride,
                                   T::join(first[r], second[r]));
            }
        }
        o.advance();
    }

    static DEVICE_MEMBER void multiply(State &state, float by) {
        for (int t = 0; t < key_tiles; ++t) {
            for (int j = 0; j < across; ++j) {
                state[t][j] *= by;
            }
        }
    }

    const FusedMemory<Keys> &shared;
    TokenRows v, o;
    const float scale;
    u32 v_offset[elements], o_offset[elements];
    int values[tiles][elements]; // V, two columns a word
    float unit = 1.0f;           // unit of the state in registers
    int rest;
    int quiet; // tokens left whose outputs are not written
};

} // namespace prefill
