// Walk over chunks on CDNA, in the waves that hold the state. A wave loads its rows of K, T and K^T from memory to
// registers, one chunk ahead. Results of products, rounded and in operand order, go through LDS to all waves.
#pragma once

#include "../recurrence.h"
#include "../segment.h"
#include "exchange.h"
#include "record.h"
#include "rows.h"

namespace prefill {

// A wave's share of a chunk in registers: K, V, T and row factors.
template <int Keys> struct ChunkOperands {
    OperandPair k[key_pairs(Keys)];              // K, the wave's rows
    OperandPair columns[own_pairs(Keys)][tiles]; // K, the wave's key elements of all rows
    LowerBlocks t;
    int v[elements];
    Tile beta, read, write; // factors of the wave's rows
    f32x2 decay;
};

// Loads a wave's share of successive chunks.
template <int Keys> class ChunkLoader {
  public:
    DEVICE_MEMBER ChunkLoader(const dwk_prefill_scan_args &x, const Segment &s, int head, int key_head,
                              u32 value_offset)
        : k(x.k, x.k_strides, s.sequence, s.begin, key_head, x.key_dim),
          v(x.v, x.v_strides, s.sequence, s.begin, head, x.value_dim), record(x, s.record, head), key_dim(x.key_dim) {
        const int lane = arch::lane(), wave = arch::wave(), row = lane % 16, eighth = arch::eighth(lane) * 16;
        k_offset = (16 * wave + row) * k.stride + eighth;
        column_offset = row * k.stride + eighth + 64 * wave;
        // Narrow slabs: two lanes load the same word, and each takes its half. Loads of 16 bits would be waited for
        // early, because the compiler widens them in the chunk before.
        const u32 word_offset = is_narrow(Keys) ? value_offset & ~3u : value_offset;
        for (int c = 0; c < tiles; ++c) {
            columns[c] = column_of(column_offset, 0, c);
        }
        for (int r = 0; r < elements; ++r) {
            v_offset[r] = (16 * wave + LaneMap(lane).row(r)) * v.stride + word_offset;
        }
        factor_offset = (16 * wave + LaneMap(lane).row(0)) * 4;
        t = LowerBlocks::Offsets::of_t(wave);
    }

    // Limits loads to the chunk's `rows` rows, at least 0.
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            rows = arch::opaque_uniform(arch::uniform_value(rows)); // otherwise the compiler keeps three loop counters
            k.limit(rows);
            v.limit(rows);
        }
    }
    DEVICE_MEMBER void advance(int rows) {
        k.advance();
        v.advance();
        // Past the last chunk, reads the last record again. No document says whether a limit of 0 bytes applies to
        // offsets that all lanes share.
        record.advance(rows > 0);
        limit(rows);
    }

    // Loads V, in the order of use.
    DEVICE_MEMBER void load_values(ChunkOperands<Keys> &to) const {
        for (int r = 0; r < elements; ++r) {
            to.v[r] = v.memory.load_b32(v_offset[r]);
        }
        to.beta = factor(beta_row);
        to.read = factor(read_row);
    }
    DEVICE_MEMBER void load_k(ChunkOperands<Keys> &to) const {
        const u32 offset = fresh(k_offset);
        for (int b = 0; b < key_pairs(Keys); ++b) {
            to.k[b].data = k.memory.load_b128(inside_keys<Keys>(b, key_dim) ? offset + 64 * b : Window::nowhere);
        }
    }
    DEVICE_MEMBER void load_columns(ChunkOperands<Keys> &to) const {
        const u32 offset = fresh(column_offset);
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int c = 0; c < tiles; ++c) {
                to.columns[p][c].data =
                    k.memory.load_b128(registers_are_short(Keys) ? column_of(offset, p, c) : columns[c]);
            }
        }
    }
    DEVICE_MEMBER void load_rest(ChunkOperands<Keys> &to) const {
        to.decay = bits<f32x2>(record.memory.load_b64(record_decay));
        to.write = factor(write_row);
        arch::phase();
        to.t.load(record.memory, t);
    }

  private:
    DEVICE_MEMBER Tile factor(RowFactor which) const {
        return bits<Tile>(record.memory.load_b128(record_rows + which * chunk * 4 + fresh(factor_offset)));
    }
    // Opaque if registers are short: the compiler then keeps no sums of offset and constants in registers.
    static DEVICE_MEMBER u32 fresh(u32 offset) {
        return registers_are_short(Keys) ? (u32)arch::opaque((int)offset) : offset;
    }
    // Byte offset of token tile c of the wave's key pair p.
    DEVICE_MEMBER u32 column_of(u32 offset, int p, int c) const {
        return inside_keys<Keys>(p * scan_waves + arch::wave(), key_dim)
                   ? offset + 16 * c * k.stride + 64 * scan_waves * p
                   : Window::nowhere;
    }

    TokenRows k, v;
    Records record;
    const int key_dim;
    u32 k_offset, column_offset, columns[tiles], v_offset[elements], factor_offset;
    LowerBlocks::Offsets t;
};

// Walks a segment's chunks in the waves that hold the state: all waves of prefill_summarise, half of prefill_scan's.
// While a chunk is multiplied, the next is loaded to registers that are already read.
//
// TFirst: the next T and row factors are requested as soon as their registers are free, before K^T. From HBM they are
// late otherwise. From a cache they are not, and are requested after half of the state's update, which delays it less.
template <class T, int Keys, bool Outputs = true, bool TFirst = false> class Chunks {
    static constexpr int across = slab_tiles(Keys), key_tiles = StateLayout<Keys>::key_tiles, pairs = key_pairs(Keys);
    typedef prefill::State<Keys> State;
    typedef Tile Slab[across]; // [16 tokens, slab]
    typedef SlabOperands<across> Tokens;

  public:
    DEVICE_MEMBER Chunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int key_head, int,
                         u32 column_offset)
        : shared(exchange<Keys, Outputs>()), next(x, s, head, key_head, column_offset), tokens(s.end - s.begin),
          rest(tokens) {
        if (rest > 0) {
            next.limit(rest);
            // In the order of the loop: its waits count the loads after the one that is needed, on every way into it.
            // Out of order, each chunk would wait for loads that it does not need yet.
            if constexpr (shares_keys(Keys)) {
                next.load_k(part);
                arch::phase();
                next.load_values(part);
            } else {
                next.load_values(part);
                arch::phase();
                next.load_k(part);
            }
            arch::phase();
            if constexpr (TFirst) {
                next.load_rest(part);
                arch::phase();
            }
            if constexpr (!shares_keys(Keys)) {
                next.load_columns(part);
                arch::phase();
            }
            if constexpr (!TFirst) {
                next.load_rest(part);
            }
        }
    }

    DEVICE_MEMBER void begin(const State &state) {
        share_state<0>(state);
        if constexpr (across > 1) {
            share_state<1>(state);
        }
        arch::workgroup_sync();
        take_state();
        // With loads on the way into the loop, clang 22 waits for all but one of them in each chunk: 20% of the scan.
        if constexpr (Outputs) {
            arch::loads_done();
        }
    }
    // Tokens left in the segment.
    DEVICE_MEMBER int left() const { return rest; }

    // Computes one chunk. Between barriers runs one long chain of products and roundings. All other work fills the
    // times when the wave would wait for the matrix unit, LDS or other waves.
    DEVICE_MEMBER void step(State &state, const dwk_prefill_scan_args &) {
        rest = arch::opaque_uniform(arch::uniform_value(rest - chunk));
        Slab x;
        Tile turned[key_tiles][tiles]; // K^T of the wave's key elements, f32
        read_state(x, turned);
        Tokens all[tiles];
        solve_u(x, all, turned, state);
        update_state(state, all, turned);
    }

    // Completes the state so that it may be stored: converts it to unit 1 and, after the segment's last chunk, adds the
    // rounding error of the last update (rounding_of).
    DEVICE_MEMBER void complete(State &state) {
        if (rest <= 0 && tokens > 0) {
            Operand lost[across];
            for (int j = 0; j < across; ++j) {
                lost[j] = rounding_of<T>(change[j], update[j]);
            }
            put(shared.x, lost);
            arch::workgroup_sync();
            Tokens all[tiles];
            take(all, shared.x);
            for (int c = 0; c < tiles; ++c) {
                accumulate<0>(state, all, c);
                if constexpr (across > 1) {
                    accumulate<1>(state, all, c);
                }
            }
        }
        multiply(state, unit);
        unit = 1.0f;
    }
    DEVICE_MEMBER void finish() {}

  private:
    // R = K S0                                                       [16 tokens, slab]
    // X = beta V - beta exp(G) R                                     [16 tokens, slab], f32 and, rounded, to all waves
    DEVICE_MEMBER void read_state(Slab &x, Tile (&turned)[key_tiles][tiles]) {
        Slab weighted;
        multiply_k(x, weighted);
        if constexpr (shares_keys(Keys)) {
            next.load_k(part);
        }
        Operand rounded_x[across];
        for (int j = 0; j < across; ++j) {
            x[j] = solve_x(weighted[j], part.read, x[j]);
            rounded_x[j] = rounded<T>(x[j]);
        }
        put(shared.x, rounded_x);
        arch::phase();
        if constexpr (shares_keys(Keys)) {
            next.load_values(part);
        } else {
            transpose<tiles / 2, tiles>(turned);
            next.load_values(part);
            with_others<4, 2, 0>();
        }
        arch::phase();
        arch::workgroup_sync();
    }

    // U = X + (T - I) X, in place of X in `x`                         [16 tokens, slab], f32, to the waves of outputs
    // update = exp(G_C - G) U / unit                                 [16 tokens, slab], rounded, to all waves
    // state <- exp(G_C) S0 / unit                                    [own keys, slab]
    DEVICE_MEMBER void solve_u(Slab &x, Tokens (&all)[tiles], Tile (&turned)[key_tiles][tiles], State &state) {
        LowerBlocks::take(all, shared.x, wave);
        if constexpr (shares_keys(Keys)) {
            take_columns();
        } else {
            transpose<0, tiles / 2>(turned);
            next.load_k(part);
            with_others<4, 2, 0>();
        }
        arch::phase();
        part.t.template multiply<T, across>(x, all, wave);
        for (int j = 0; j < across; ++j) {
            if constexpr (Outputs) {
                shared_values<across>().exact[j][arch::thread()] = bits<i32x4>(x[j]);
            }
            change[j] = change_of(part.write, x[j]);
            update[j] = rounded<T>(change[j]);
        }
        put(shared.update, update);
        arch::phase();
        if constexpr (shares_keys(Keys)) {
            transpose<0, tiles / 2>(turned);
        }
        const float decay = arch::held(part.decay.x * unit);
        unit = arch::held(part.decay.y);
        multiply(state, decay);
        for (int c = 0; c < tiles / 2; ++c) {
            pack(turned, c);
        }
        if constexpr (TFirst) {
            next.load_rest(part);
        }
        if constexpr (!shares_keys(Keys)) {
            next.load_columns(part);
        }
        arch::phase();
        arch::workgroup_sync();
    }

    // S1 = exp(G_C) S0 + K^T update, in units of the record          [own keys, slab], f32 and, rounded, to all waves
    DEVICE_MEMBER void update_state(State &state, Tokens (&all)[tiles], Tile (&turned)[key_tiles][tiles]) {
        take(all, shared.update);
        if constexpr (shares_keys(Keys)) {
            transpose<tiles / 2, tiles>(turned);
        }
        for (int c = tiles / 2; c < tiles; ++c) {
            pack(turned, c);
        }
        arch::phase();
        for (int c = 0; c < tiles; ++c) {
            accumulate<0>(state, all, c);
            arch::phase();
        }
        if constexpr (!TFirst) {
            next.load_rest(part);
        }
        if constexpr (across > 1) {
            for (int c = 0; c < tiles; ++c) {
                accumulate<1>(state, all, c);
            }
            share_state<0>(state);
            // In fours, because clang 22 makes two of each packed instruction that follows a product directly.
            with_others<2, 1, 0>();
            with_others<tiles * key_tiles - 2, 1, Outputs ? 4 : 2>();
            arch::phase();
        }
        share_state<across - 1>(state);
        arch::phase();
        arch::workgroup_sync();
        take_state();
    }

    static DEVICE_MEMBER i32x4 both(Operand first, Operand second) {
        return i32x4{first.x, first.y, second.x, second.y};
    }
    static DEVICE_MEMBER void put(Tokens (&to)[scan_threads], const Operand (&x)[across]) {
        to[arch::thread()] = Tokens(x);
    }
    static DEVICE_MEMBER void take(Tokens (&to)[tiles], const Tokens (&from)[scan_threads]) {
        for (int c = 0; c < tiles; ++c) {
            to[c] = from[c * arch::lanes + arch::lane()];
            arch::phase();
        }
    }
    static DEVICE_MEMBER void multiply(State &state, float by) {
        for (int t = 0; t < key_tiles; ++t) {
            for (int j = 0; j < across; ++j) {
                state[t][j] *= by;
            }
        }
    }

    // Writes column tile J of the wave's key elements of the state, rounded, to LDS for all waves.
    template <int J> DEVICE_MEMBER void share_state(const State &state) {
        for (int p = 0; p < own_pairs(Keys); ++p) {
            shared.state[parity][p * across + J][arch::thread()] =
                both(arch::packed<T>(T::nearest(state[2 * p][J], unit)),
                     arch::packed<T>(T::nearest(state[2 * p + 1][J], unit)));
        }
    }
    // Loads operands of the whole state, if registers hold them. Otherwise loads the first pair; multiply_k loads each
    // other pair before the products with the one ahead of it.
    DEVICE_MEMBER void take_state() {
        for (int b = 0; b < (registers_are_short(Keys) ? 1 : pairs); ++b) {
            take_state(b);
        }
    }
    DEVICE_MEMBER void take_state(int b) {
        for (int j = 0; j < across; ++j) {
            operands[b % held_pairs][j] = shared.operand(parity, b, j);
            arch::phase();
        }
    }

    // out = K S0, one key pair after the other. Meanwhile computes weighted = beta V and the addresses of the next
    // chunk.
    template <int B = 0> DEVICE_MEMBER void multiply_k(Slab &out, Slab &weighted) {
        if constexpr (registers_are_short(Keys) && B + 1 < pairs) {
            take_state(B + 1);
        }
        if constexpr (shares_keys(Keys)) {
            shared.k[wave][B][arch::lane()] = part.k[B].data;
        }
        const OperandPair(&s)[across] = operands[B % held_pairs];
        for (int j = 0; j < across; ++j) {
            out[j] = T::mma(part.k[B].first(), s[j].first(), B == 0 ? Tile{} : out[j]);
        }
        for (int j = 0; j < across; ++j) {
            out[j] = T::mma(part.k[B].second(), s[j].second(), out[j]);
        }
        if constexpr (B == 0) {
            for (int r = 0; r < elements; ++r) {
                weighted[0][r] = T::low(across > 1 ? part.v[r] : (int)((u32)part.v[r] >> half));
                weighted[across - 1][r] = across > 1 ? T::high(part.v[r]) : weighted[0][r];
            }
            for (int j = 0; j < across; ++j) {
                weighted[j] = arch::held(weighted[j]);
            }
        } else if constexpr (B == 1) {
            for (int j = 0; j < across; ++j) {
                weighted[j] = arch::held(part.beta * weighted[j]);
            }
        }
        if constexpr (B == pairs - 2) {
            next.advance(rest);
        }
        if constexpr (Outputs && B == pairs - 1) {
            parity ^= 1;
        }
        arch::phase();
        if constexpr (B + 1 < pairs) {
            multiply_k<B + 1>(out, weighted);
        }
    }
    // Loads the wave's key elements of all rows of K, which the other waves have put to LDS.
    DEVICE_MEMBER void take_columns() {
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int c = 0; c < tiles; ++c) {
                part.columns[p][c].data = shared.k[c][min_of(p * scan_waves + wave, pairs - 1)][arch::lane()];
            }
        }
    }
    // Transposes the wave's key elements of K, exactly: a product with the identity gives each lane four rows of a
    // column.
    template <int First, int End> DEVICE_MEMBER void transpose(Tile (&to)[key_tiles][tiles]) const {
        const LaneMap at(arch::lane());
        Tile one;
        for (int e = 0; e < elements; ++e) {
            one[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
        }
        const Operand identity = arch::packed<T>(one);
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int c = End - 1; c >= First; --c) {
                to[2 * p][c] = T::mma(part.columns[p][c].first(), identity, Tile{});
                to[2 * p + 1][c] = T::mma(part.columns[p][c].second(), identity, Tile{});
            }
        }
    }
    DEVICE_MEMBER void pack(const Tile (&from)[key_tiles][tiles], int c) {
        for (int t = 0; t < key_tiles; ++t) {
            transposed[t][c] = arch::packed<T>(from[t][c]);
        }
    }
    // S += K^T x for column tile J and the tokens of tile c.
    template <int J> DEVICE_MEMBER void accumulate(State &state, const Tokens (&x)[tiles], int c) const {
        for (int t = 0; t < key_tiles; ++t) {
            state[t][J] = T::mma(transposed[t][c], x[c].template of<J>(), state[t][J]);
        }
    }
    // Schedules `Products` products next, each followed by `Loads` loads and `Vectors` vector instructions.
    template <int Products, int Loads, int Vectors> static DEVICE_MEMBER void with_others() {
        for (int i = 0; i < Products; ++i) {
            arch::schedule<arch::Kind::product, 1>();
            arch::schedule<arch::Kind::load, Loads>();
            arch::schedule<arch::Kind::vector, Vectors>();
        }
    }

    static constexpr int held_pairs = registers_are_short(Keys) ? 2 : pairs;
    Exchange<Keys, Outputs> &shared;
    ChunkOperands<Keys> part;
    ChunkLoader<Keys> next;
    OperandPair operands[held_pairs][across]; // S0, from all waves
    Operand transposed[key_tiles][tiles];
    Slab change; // exp(G_C - G) U / unit, in f32
    Operand update[across];
    float unit = 1.0f;                                   // unit of the state in registers
    const int wave = arch::opaque_uniform(arch::wave()); // in a scalar register
    const int half = arch::lane() % 2 * 16;              // narrow slabs: bits of a word of V before the lane's column
    const int tokens;
    int rest;
    int parity = 0;
};

} // namespace prefill
