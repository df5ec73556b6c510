// Walk of prefill_fused over chunks on CDNA, in the waves that hold the state. A wave has all rows of its value
// columns, so S, X and U, rounded, are its own right operands, and nothing of the slab goes through LDS. K, Q, K^T, T,
// P and row factors come from the making waves (fused.h), one chunk after the other. Vector instructions are spread
// over the steps of the long products, so that the matrix unit has work meanwhile.
//
// Barriers of a chunk, which all waves meet:
//   joined    the making waves have exchanged parts of T
//   corner    they have exchanged another part; row factors of this chunk are in LDS
//   made      T, P and K^T of this chunk are in LDS; K and Q are no longer read
//   copied    K and Q of the next chunk are in LDS; T is no longer read
//   diagonal  the making waves have exchanged the diagonal blocks of A
//   used      P, K^T and row factors are no longer read
#pragma once

#include "../fused_mode.h"

#include "../segment.h"
#include "../recurrence.h"
#include "fused_memory.h"
#include "rows.h"

namespace prefill {

// V of a chunk, two columns a word. With units (units.h) it outlives the walk of a unit.
template <class... Unit> struct ChunkValues {
    int at[tiles][elements];
};
template <class Unit> struct ChunkValues<Unit> {
    Unit &unit;
    int (&at)[tiles][elements];
    DEVICE_MEMBER explicit ChunkValues(Unit &unit) : unit(unit), at(unit.values) {}
};

// `Unit`: of a workgroup that walks several (units.h), without quiet tokens.
template <class T, int Keys, bool Outputs = true, class... Unit> class Chunks {
    static constexpr int across = wave_tiles, key_tiles = StateLayout<Keys>::key_tiles, pairs = key_pairs(Keys);
    typedef prefill::State<Keys> State;
    typedef Tile Slab[tiles][across]; // [64 tokens, the wave's columns]
    typedef Operand RoundedSlab[tiles][across];

  public:
    DEVICE_MEMBER Chunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int, int, u32 column_offset,
                         Unit &...unit)
        : shared(fused_memory<Keys>()), values{unit...}, v(x.v, x.v_strides, s.sequence, s.begin, head, x.value_dim),
          o(x.o, apart(x.o_strides, x.value_dim), s.sequence, s.begin - chunk, head, x.value_dim), scale(x.scale),
          rest(s.end - s.begin), quiet(s.quiet) {
        for (int r = 0; r < elements; ++r) {
            const int row = LaneMap(arch::lane()).row(r);
            v_offset[r] = row * v.stride + column_offset;
            o_offset[r] = row * o.stride + column_offset;
        }
        for (int i = 0; i < tiles; ++i) {
            for (int j = 0; j < across; ++j) {
                out[i][j] = Tile{};
            }
        }
        if (is_first() && rest > 0) {
            v.limit_to(rest);
            load_values();
        }
    }

    // Meets the barriers of the making waves before the first chunk.
    DEVICE_MEMBER void begin(const State &state) {
        round_first(state);
        if (is_first() && rest > 0) {
            arch::workgroup_sync(); // copied
            arch::workgroup_sync(); // diagonal
            arch::workgroup_sync(); // used
        }
    }
    // Tokens left in the segment.
    DEVICE_MEMBER int left() const { return rest; }

    // Computes one chunk, and writes the outputs of the chunk before.
    DEVICE_MEMBER void step(State &state, const dwk_prefill_scan_args &args) { step_with<Outputs>(state, args); }
    // Walks the quiet tokens, in a loop of its own: a branch in step() would leave it too few registers.
    DEVICE_MEMBER void warm_up(State &state, const dwk_prefill_scan_args &args) {
#pragma unroll 1
        while (quiet > 0) {
            step_with<false>(state, args);
            o.advance();
            quiet = arch::opaque_uniform(arch::uniform_value(quiet - chunk));
        }
    }

    // Converts the state to unit 1.
    DEVICE_MEMBER void complete(State &state) {
        for (int t = 0; t < key_tiles; ++t) {
            multiply(state, t, unit);
        }
        unit = 1.0f;
    }
    // Writes the outputs of the last chunk.
    DEVICE_MEMBER void finish() {
        if constexpr (Outputs) {
            o.limit_to(pending);
            for (int n = 0; n < quarters; ++n) {
                write_quarter(n);
            }
        }
    }

  private:
    static constexpr bool units = sizeof...(Unit) > 0;

    // Computes one chunk, and its outputs if they are `Written`.
    template <bool Written> DEVICE_MEMBER void step_with(State &state, const dwk_prefill_scan_args &args) {
        Slab x;
        RoundedSlab rounded_x;
        read_state<Written>(state, x, rounded_x);
        arch::workgroup_sync(); // copied
        solve_u(x, rounded_x, state, args);
        RoundedSlab rounded_u;
        update_state<Written>(state, x, rounded_u);
        if constexpr (Written) {
            // O / scale += (P - diag(P)) U                           [64 tokens, 32 columns]
            OperandPair p[lower_blocks / 2];
            load_lower(p, shared.p);
            multiply_lower(out, p, rounded_u);
            pending = rest;
        }
        round_first(state); // beside these products
        arch::phase();
        arch::workgroup_sync(); // used
        arch::phase();
        rest = arch::opaque_uniform(arch::uniform_value(rest - chunk));
    }
    // Whether no unit of the workgroup was walked before.
    DEVICE_MEMBER bool is_first() const {
        if constexpr (units) {
            return values.unit.is_first();
        } else {
            return true;
        }
    }
    // Requests V of the next chunk: also that of the next unit.
    DEVICE_MEMBER void next_values(const dwk_prefill_scan_args &args) {
        if constexpr (units) {
            if (rest <= chunk) {
                const dwk_prefill_scan_args &x = arch::reread(args);
                const Segment next = values.unit.segment(1);
                v.move_to(x.v, x.v_strides, next.sequence, next.begin, values.unit.work(1).head);
                v.limit_to(next.end - next.begin);
            } else {
                v.advance();
                v.limit_to(rest - chunk);
            }
        } else {
            v.advance();
            v.limit_to(rest - chunk);
        }
        load_values();
    }

    // Operand pairs that are loaded ahead of their products.
    static constexpr int ahead = 3;
    static constexpr int steps = pairs * tiles; // of K S0, Q S0 and K^T U: an operand pair each

    // Byte offset of row tile i. Opaque: there are no registers for the sums with every lane's offsets.
    static DEVICE_MEMBER u32 of_tile(int i, u32 stride) {
        return i == 0 ? 0 : (u32)arch::opaque_uniform((int)(16 * i * stride));
    }
    DEVICE_MEMBER void load_values() {
        for (int i = 0; i < tiles; ++i) {
            for (int r = 0; r < elements; ++r) {
                values.at[i][r] = v.memory.load_b32(v_offset[r] + of_tile(i, v.stride));
            }
        }
    }
    // Operand pair of step n of K S0, then of Q S0: row tile n % 4 of key pair n / 4.
    DEVICE_MEMBER OperandPair rows_of_step(int n) const {
        const int b = n % steps / tiles, i = n % tiles;
        return OperandPair{n < steps ? shared.k[i][b][arch::lane()] : shared.q[i][b][arch::lane()]};
    }

    // R = K S0                                                       [64 tokens, 32 columns]
    // out = Q S0                                                     [64 tokens, 32 columns]
    // X = beta V - beta exp(G) R                                     [64 tokens, 32 columns], f32 and rounded
    template <bool Written> DEVICE_MEMBER void read_state(const State &state, Slab &x, RoundedSlab &rounded_x) {
        constexpr int all = (Written ? 2 : 1) * steps;
        constexpr int joined = Written ? steps * 3 / 4 : steps / 2, corner = Written ? steps * 3 / 2 : steps * 3 / 4,
                      made = Written ? all - 2 : all - 1;
        static_assert(joined < corner && corner < made && made + ahead > all, "K and Q are requested before `made`");
        // Steps from one tile of X to the next.
        constexpr int every = all - corner > 2 * (tiles + 1) ? (all - corner - 1) / (tiles + 1) : 1;
        OperandPair ring[ahead + 1];
        for (int n = 0; n < ahead; ++n) {
            ring[n] = rows_of_step(n);
        }
        Operand s[pairs][2][across];
        Tile beta, read;
        for (int h = 0; h < tiles; ++h) {
            s[0][h / across][h % across] = first[h];
        }
        if constexpr (Written) {
            o.limit_to(pending);
        }
        arch::phase();
#pragma unroll
        for (int n = 0; n < all; ++n) {
            const int b = n % steps / tiles, i = n % tiles;
            if (n == joined) {
                __builtin_amdgcn_s_barrier(); // joined: these waves read nothing that depends on it
                arch::phase();
            }
            if (n == corner || n == made) {
                arch::workgroup_sync();
                arch::phase();
            }
            if (n + ahead < all) {
                ring[(n + ahead) % (ahead + 1)] = rows_of_step(n + ahead);
            }
            if (n == made) {
                load_lower(t, shared.t);
            }
            const OperandPair rows = ring[n % (ahead + 1)];
            Slab &to = n < steps ? x : out;
            for (int j = 0; j < across; ++j) {
                to[i][j] = T::mma(rows.first(), s[b][0][j], b == 0 ? Tile{} : to[i][j]);
            }
            for (int j = 0; j < across; ++j) {
                to[i][j] = T::mma(rows.second(), s[b][1][j], to[i][j]);
            }
            if (n < steps) {
                if (b + 1 < pairs) {
                    s[b + 1][i / across][i % across] = round_state(state, b + 1, i);
                }
                if constexpr (Written) {
                    constexpr int of_step = (quarters + steps - 1) / steps;
#pragma unroll
                    for (int q = 0; q < of_step; ++q) {
                        if (n * of_step + q < quarters) {
                            write_quarter(n * of_step + q);
                        }
                    }
                }
            }
            // X, as soon as the row factors are there: those of a tile some steps before.
            if (Written && n >= corner && (n - corner) % every == 0 && (n - corner) / every <= tiles) {
                const int q = (n - corner) / every;
                const Tile last_beta = beta, last_read = read;
                if (q < tiles) {
                    beta = shared.factor(beta_row, q);
                    read = shared.factor(read_row, q);
                }
                if (q > 0) {
                    solve_x_tile(x, rounded_x, q - 1, last_beta, last_read);
                }
            }
            arch::phase();
        }
        if constexpr (Written) {
            o.advance();
            if (corner + tiles * every >= all) {
                solve_x_tile(x, rounded_x, tiles - 1, beta, read);
            }
        } else {
            for (int q = 0; q < tiles; ++q) {
                solve_x_tile(x, rounded_x, q, shared.factor(beta_row, q), shared.factor(read_row, q));
            }
        }
        arch::phase();
    }
    // Quarter h of key pair b of the state as right operands.
    DEVICE_MEMBER Operand round_state(const State &state, int b, int h) const {
        return arch::packed<T>(T::nearest(state[2 * b + h / across][h % across], unit));
    }
    // The operands with which the next chunk begins.
    DEVICE_MEMBER void round_first(const State &state) {
        for (int h = 0; h < tiles; ++h) {
            first[h] = round_state(state, 0, h);
        }
    }
    DEVICE_MEMBER void solve_x_tile(Slab &x, RoundedSlab &rounded_x, int i, Tile beta, Tile read) const {
        Tile weighted[across];
        for (int r = 0; r < elements; ++r) {
            weighted[0][r] = T::low(values.at[i][r]);
            weighted[1][r] = T::high(values.at[i][r]);
        }
        for (int j = 0; j < across; ++j) {
            x[i][j] = arch::held(solve_x(beta * weighted[j], read, x[i][j]));
            rounded_x[i][j] = arch::held(rounded<T>(x[i][j]));
        }
    }

    // U = X + (T - I) X, in place                                    [64 tokens, 32 columns]
    // state <- exp(G_C) S0 / unit
    DEVICE_MEMBER void solve_u(Slab &x, const RoundedSlab &rounded_x, State &state, const dwk_prefill_scan_args &args) {
        next_values(args);
        const f32x2 decay = shared.decay();
        arch::phase();
        multiply_lower(x, t, rounded_x);
        for (int k = 0; k < key_tiles; ++k) {
            multiply(state, k, decay.x * unit);
        }
        unit = decay.y;
        arch::phase();
        __builtin_amdgcn_s_barrier(); // diagonal: these waves read nothing that depends on it
        arch::phase();
    }
    typedef OperandPair Lower[lower_blocks / 2];
    static DEVICE_MEMBER void load_lower(Lower &to, const BlockPairs &blocks) {
        for (int n = 0; n < lower_blocks / 2; ++n) {
            to[n].data = blocks[n][arch::lane()];
        }
    }
    // out += lower blocks times x.
    static DEVICE_MEMBER void multiply_lower(Slab &out, const Lower &blocks, const RoundedSlab &x) {
        for (int i = 0; i < tiles; ++i) {
            for (int c = 0; c <= i; ++c) {
                const int n = lower_block(i, c);
                for (int j = 0; j < across; ++j) {
                    out[i][j] = T::mma(n % 2 == 0 ? blocks[n / 2].first() : blocks[n / 2].second(), x[c][j], out[i][j]);
                }
            }
        }
    }

    // S1 = exp(G_C) S0 + K^T (exp(G_C - G) U / unit)                 [K, 32 columns]
    // out = exp(G) Q S0 + diag(P) U                                  [64 tokens, 32 columns]
    // After the last chunk also the product with the update's rounding error (rounding_of).
    template <bool Written> DEVICE_MEMBER void update_state(State &state, const Slab &u, RoundedSlab &rounded_u) {
        RoundedSlab update;
        Tile write, output, diagonal;
        const auto round_update = [&](int c, int j) __attribute__((always_inline)) {
            update[c][j] = arch::held(rounded<T>(change_of(write, u[c][j])));
        };
        accumulate(
            state, update,
            [&]() __attribute__((always_inline)) {
                write = shared.factor(write_row, 0);
                for (int j = 0; j < across; ++j) {
                    round_update(0, j);
                }
            },
            [&](int c, int b) __attribute__((always_inline)) {
                if (b == 0) {
                    write = shared.factor(write_row, min_of(c + 1, tiles - 1));
                    output = shared.factor(output_row, c);
                    diagonal = shared.factor(diagonal_row, c);
                }
                // A column tile of the next update at each of two steps, and of the outputs at the last two.
                for (int j = 0; j < across; ++j) {
                    if (b == min_of(1 + j, pairs - 1) && c + 1 < tiles) {
                        round_update(c + 1, j);
                    }
                    if (Written && b == pairs - across + j) {
                        rounded_u[c][j] = arch::held(rounded<T>(u[c][j]));
                        out[c][j] = arch::held(output_of(output, out[c][j], diagonal, u[c][j]));
                    }
                }
            });
        arch::products_done();
        if (rest <= chunk) {
            for (int c = 0; c < tiles; ++c) {
                const Tile write = shared.factor(write_row, c);
                for (int j = 0; j < across; ++j) {
                    update[c][j] = rounding_of<T>(change_of(write, u[c][j]), update[c][j]);
                }
            }
            const auto nothing = [](auto...) {};
            accumulate(state, update, nothing, nothing);
            arch::products_done();
        }
    }
    // S += K^T x, token tile c after token tile. Calls before() once operands are requested, and beside(c, key pair) at
    // each step.
    template <class F, class G>
    DEVICE_MEMBER void accumulate(State &state, const RoundedSlab &x, const F &before, const G &beside) const {
        OperandPair ring[ahead + 1];
        for (int n = 0; n < ahead; ++n) {
            ring[n].data = shared.transposed[n % pairs][n / pairs][arch::lane()];
        }
        before();
        arch::phase();
#pragma unroll
        for (int n = 0; n < steps; ++n) {
            const int b = n % pairs, c = n / pairs, next = n + ahead;
            if (next < steps) {
                ring[next % (ahead + 1)].data = shared.transposed[next % pairs][next / pairs][arch::lane()];
            }
            const OperandPair keys = ring[n % (ahead + 1)];
            for (int j = 0; j < across; ++j) {
                state[2 * b][j] = T::mma(keys.first(), x[c][j], state[2 * b][j]);
            }
            for (int j = 0; j < across; ++j) {
                state[2 * b + 1][j] = T::mma(keys.second(), x[c][j], state[2 * b + 1][j]);
            }
            beside(c, b);
            arch::phase();
        }
    }

    // Writes a quarter of a row tile of the outputs: quarters 0 and 1 round, 2 and 3 store.
    static constexpr int quarters = 4 * tiles;
    DEVICE_MEMBER void write_quarter(int n) {
        const int i = n / 4, q = n % 4;
        if (q < across) {
            out[i][q] = arch::held(T::nearest(scale * out[i][q]));
            return;
        }
        for (int r = 2 * (q - across); r < 2 * (q - across) + 2; ++r) {
            o.memory.store_b32(o_offset[r] + of_tile(i, o.stride), T::join(out[i][0][r], out[i][1][r]));
        }
    }

    static DEVICE_MEMBER void multiply(State &state, int key_tile, float by) {
        for (int j = 0; j < across; ++j) {
            state[key_tile][j] *= by;
        }
    }

    const FusedMemory<Keys> &shared;
    ChunkValues<Unit...> values;
    TokenRows v, o; // o: of the chunk before
    const float scale;
    u32 v_offset[elements], o_offset[elements];
    OperandPair t[lower_blocks / 2];
    Operand first[tiles]; // key pair 0 of the state, rounded
    Slab out;             // outputs of the chunk before, not yet written
    int pending = 0;      // rows of them, or more
    float unit = 1.0f;    // unit of the state in registers
    int rest;
    int quiet; // tokens left whose outputs are not written
};

} // namespace prefill
