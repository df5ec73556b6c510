// How prefill moves its operands on CDNA. The waves of a workgroup of prefill_scan share its value columns and divide
// the rows: each owns a tile of tokens and some key elements of the state. So a wave reads its own rows of K, Q, T, P
// and K^T alone, straight from memory, a whole chunk before it multiplies with them; what a product makes, rounded,
// goes through LDS, in operand order, to all waves.
#pragma once

#include "prefill.h"

namespace prefill {

using namespace tile;
using arch::OperandPair;

// The blocks of T and P as left operands, in pairs, of which a lane's parts are 16 bytes: of a row of blocks two
// neighbours up to the diagonal. Where only the first of these is, on the diagonal of even rows, the blocks of T and P
// are a pair.
constexpr int pair_bytes = 2 * 16 * 16 * 2;
constexpr int record_t = record_matrices;
DEVICE constexpr int t_pair(int row, int pair) { return record_t + ((row == 3 ? 4 : row) + pair) * pair_bytes; }
constexpr int record_p = record_t + 6 * pair_bytes;
DEVICE constexpr int p_pair(int row, int pair) {
    return row % 2 == 0 && 2 * pair == row ? t_pair(row, pair) : record_p + (row - (row > 0) + pair) * pair_bytes;
}
static_assert(p_pair(3, 1) + pair_bytes <= DW_RECORD_BYTES, "a record holds all parts");

// Lower blocks of T and P, given transposed (an accumulator tile, rounded, is then a left operand), to a record.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + arch::lane() * 16) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const {
        put(t_pair(row, column / 2) + column % 2 * 8, transposed);
    }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        const bool with_t = row == column && row % 2 == 0;
        put(p_pair(row, column / 2) + (with_t ? 1 : column % 2) * 8, transposed);
    }

  private:
    DEVICE_MEMBER void put(int at, Tile transposed) const { *(Operand *)(to + at) = rounded<T>(transposed); }

    char *const to;
};

// LDS is part of the code object.
#define SCAN_SHARED_BYTES(keys)
#define SUMMARISE_SHARED_BYTES(keys)

// Workgroups of prepare that share a SIMD.
constexpr int prepare_residency = 2;

constexpr int scan_waves = tiles;
constexpr int scan_threads = scan_waves * arch::lanes;
// Where a row's factors lie in a record.
DEVICE int row_place(int row) { return row; }
// Column tiles of a workgroup.
constexpr int scan_tiles(int) { return 2; }
constexpr int slab_columns(int keys) { return 16 * scan_tiles(keys); }
// Whether registers do not allow to hold operands of the whole state, and of the next chunk what this one has used.
constexpr bool registers_are_short(int keys) { return keys > 128; }

// Threads of a workgroup of scan or, without outputs, of summarise, and how many share a SIMD.
template <int Keys, bool Outputs> constexpr int walk_threads() { return scan_waves * arch::lanes; }
template <int Keys, bool Outputs> constexpr int walk_residency() {
    return Outputs || registers_are_short(Keys) ? 2 : 3;
}
// The first value column of a wave.
DEVICE int first_wave_column(int slab, int across) { return slab * 16 * across; }
// Whether T and P have more than two blocks in a wave's rows, and whether the last two are whole (t_pair).
DEVICE bool has_second_pair(int wave) { return wave >= 2; }
DEVICE bool last_pair_is_whole(int wave) { return wave % 2 == 1; }

// Pairs of key tiles, of which wave w owns w, w + 4, ...
constexpr int key_pairs(int keys) { return keys / 32; }
constexpr int own_pairs(int keys) { return (key_pairs(keys) + scan_waves - 1) / scan_waves; }

// The key element and, from the lane's first column on, the column of an element of the state. Operands of Q and K come
// in pairs: the first of a lane's four elements of tile 2 b + s is 32 b + 8 (lane / 16) + 4 s.
DEVICE int state_key(int tile_index, int element, int lane) {
    const int pair = tile_index / 2 * scan_waves + arch::wave();
    return pair * 32 + lane / 16 * 8 + tile_index % 2 * 4 + element;
}
DEVICE constexpr int state_column(int column_tile, int) { return column_tile; }
// The first of a lane's columns: those of all its tiles are neighbours.
DEVICE int first_column(int lane, int across) { return lane % 16 * across; }

// The smallest key dimension that a bucket serves is 16 more than the next smaller bucket.
constexpr int smallest_key_dim(int bucket) {
    return bucket == 256 ? 208 : bucket == 192 ? 144 : bucket == 128 ? 112 : bucket == 96 ? 80 : 16;
}

// What the waves of a workgroup hand each other, each a quarter of every part: right operands, 16 bytes a lane, of a
// key pair of a column tile of the state, or of two column tiles of a token tile of X, U and the state's update.
template <int Keys> struct Exchange {
    static constexpr int state_quarters = own_pairs(Keys) * scan_tiles(Keys);
    i32x4 state[state_quarters][scan_threads];
    i32x4 x[scan_threads];
    i32x4 u[scan_threads];
    i32x4 update[scan_threads];
};

// The rows of a token tensor for one sequence and head, from some chunk on. Rows that the chunk does not have read as
// zeros and are not written.
class TokenRows {
  public:
    DEVICE_MEMBER TokenRows(const void *p, const dw_token_strides &s, int sequence, int begin, int head, int dim)
        : stride((u32)s.token * 2), row_bytes(2 * dim),
          memory(row_address(p, s, sequence, begin, head), (chunk - 1) * stride + row_bytes) {}

    // This chunk, or the next one, has the first of so many rows.
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            memory.limit(rows > 0 ? (rows - 1) * stride + row_bytes : 0);
        }
    }
    DEVICE_MEMBER void advance() { memory.advance((u64)stride * chunk); }

    const u32 stride, row_bytes;
    Window memory;
};

// What a wave reads of a chunk, in registers.
template <int Keys> struct Part {
    OperandPair k[key_pairs(Keys)]; // its rows
    OperandPair q[key_pairs(Keys)];
    OperandPair columns[own_pairs(Keys)][tiles]; // its key elements of all rows of K
    OperandPair t[tiles / 2];                    // its blocks of T and P
    OperandPair p[tiles / 2];
    int v[elements];
    Tile factor[row_factors];
    f32x2 decay;
    // Operands of the state, which all waves have shared.
    OperandPair state[registers_are_short(Keys) ? 1 : key_pairs(Keys)][scan_tiles(Keys)];
};

// Where a wave finds its part of a chunk.
template <class T, int Keys> class Source {
  public:
    DEVICE_MEMBER Source(const dw_prefill_scan_args &x, int sequence, int begin, int slot, int head, int key_head,
                         u32 value_offset)
        : q(x.q, x.q_strides, sequence, begin, key_head, x.key_dim),
          k(x.k, x.k_strides, sequence, begin, key_head, x.key_dim),
          v(x.v, x.v_strides, sequence, begin, head, x.value_dim), record_step((u64)x.value_heads * DW_RECORD_BYTES),
          key_dim(x.key_dim) {
        const int lane = arch::lane(), wave = arch::wave(), row = lane % 16, eighth = arch::eighth(lane) * 16;
        q_offset = (16 * wave + row) * q.stride + eighth;
        k_offset = (16 * wave + row) * k.stride + eighth;
        column_offset = row * k.stride + eighth + 64 * wave;
        for (int c = 0; c < tiles; ++c) {
            columns[c] = column_of(column_offset, 0, c);
        }
        for (int r = 0; r < elements; ++r) {
            v_offset[r] = (16 * wave + Place(lane).row(r)) * v.stride + value_offset;
        }
        factor_offset = (16 * wave + Place(lane).row(0)) * 4;
        first_pair = lane * 16;
        second_pair = has_second_pair(wave) ? first_pair : Window::nowhere;
        t_rows = arch::opaque_uniform(t_pair(wave, 0));
        p_rows = arch::opaque_uniform(p_pair(wave, 0));
        p_second = arch::opaque_uniform(p_pair(wave, 1));
        record = Window((const char *)x.records + ((int64_t)slot * x.value_heads + head) * DW_RECORD_BYTES);
    }

    // The first of so many rows, which may be none.
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            rows = arch::opaque_uniform(rows); // or three limits are counted down through the loop
            q.limit(rows);
            k.limit(rows);
            v.limit(rows);
        }
    }
    DEVICE_MEMBER void advance(int rows) {
        q.advance();
        k.advance();
        v.advance();
        limit(rows);
    }
    // Its record.
    DEVICE_MEMBER void advance_record(int rows) {
        record.advance(record_step);
        if (rows <= 0) {
            record.limit(0);
        }
    }

    DEVICE_MEMBER void load_k(Part<Keys> &to) const {
        const u32 offset = fresh(k_offset);
        for (int b = 0; b < key_pairs(Keys); ++b) {
            to.k[b].data = k.memory.load_b128(inside(b) ? offset + 64 * b : Window::nowhere);
        }
    }
    DEVICE_MEMBER void load_q(Part<Keys> &to) const {
        const u32 offset = fresh(q_offset);
        for (int b = 0; b < key_pairs(Keys); ++b) {
            to.q[b].data = q.memory.load_b128(inside(b) ? offset + 64 * b : Window::nowhere);
        }
    }
    template <int B> DEVICE_MEMBER void load_k(Part<Keys> &to) const {
        to.k[B].data = k.memory.load_b128(inside(B) ? fresh(k_offset) + 64 * B : Window::nowhere);
    }
    template <int C> DEVICE_MEMBER void load_column(Part<Keys> &to) const {
        to.columns[0][C].data = k.memory.load_b128(columns[C]);
    }
    template <int R> DEVICE_MEMBER void load_value(Part<Keys> &to) const { to.v[R] = v.memory.load_b32(v_offset[R]); }
    DEVICE_MEMBER void load_columns(Part<Keys> &to) const {
        const u32 offset = fresh(column_offset);
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int c = 0; c < tiles; ++c) {
                to.columns[p][c].data =
                    k.memory.load_b128(registers_are_short(Keys) ? column_of(offset, p, c) : columns[c]);
            }
        }
    }
    DEVICE_MEMBER void load_t(Part<Keys> &to) const {
        to.t[0].data = record.load_b128(first_pair, t_rows);
        to.t[1].data = record.load_b128(second_pair + pair_bytes, t_rows);
    }
    DEVICE_MEMBER void load_p(Part<Keys> &to) const {
        to.p[0].data = record.load_b128(first_pair, p_rows);
        to.p[1].data = record.load_b128(second_pair, p_second);
    }
    DEVICE_MEMBER void load_values(Part<Keys> &to) const {
        for (int r = 0; r < elements; ++r) {
            to.v[r] = v.memory.load_b32(v_offset[r]);
        }
    }
    DEVICE_MEMBER void load_factor(Part<Keys> &to, RowFactor which) const {
        to.factor[which] = bits<Tile>(record.load_b128(record_rows + which * chunk * 4 + fresh(factor_offset)));
    }
    DEVICE_MEMBER void load_decay(Part<Keys> &to) const { to.decay = bits<f32x2>(record.load_b64(record_decay)); }

  private:
    // Registers that are short do not hold the sums of an offset and constants.
    static DEVICE_MEMBER u32 fresh(u32 offset) {
        return registers_are_short(Keys) ? (u32)arch::opaque((int)offset) : offset;
    }
    // Token tile c of the wave's key pair p.
    DEVICE_MEMBER u32 column_of(u32 offset, int p, int c) const {
        return inside(p * scan_waves + arch::wave()) ? offset + 16 * c * k.stride + 64 * scan_waves * p
                                                     : Window::nowhere;
    }
    // Whether this lane's eighth of a key pair is part of the rows.
    DEVICE_MEMBER bool inside(int pair) const {
        return 32 * pair + 32 <= smallest_key_dim(Keys) || 32 * pair + 8 * arch::eighth(arch::lane()) < key_dim;
    }

    TokenRows q, k, v;
    const u64 record_step;
    const int key_dim;
    u32 q_offset, k_offset, column_offset, columns[tiles], v_offset[elements], factor_offset, first_pair, second_pair;
    int t_rows, p_rows, p_second; // offsets that all lanes share
    Window record;
};

// One chunk for the rows of one wave; without `Outputs`, only what the state takes.
template <class T, int Keys, bool Outputs = true> class Chunk {
  public:
    static constexpr int across = scan_tiles(Keys);
    static constexpr int row_tiles = 1;
    static constexpr int key_tiles = 2 * own_pairs(Keys);
    static constexpr bool asynchronous = false;
    static constexpr bool state_first = false;
    typedef Tile State[key_tiles][across];
    typedef Tile Slab[row_tiles][across];
    typedef Operand SlabOperands[row_tiles][across];

    DEVICE_MEMBER Chunk(Exchange<Keys> &shared, Part<Keys> &part, Source<T, Keys> &next, const TokenRows &o,
                        const u32 (&o_offset)[elements], int wave, int left)
        : shared(shared), part(part), next(next), o(o), o_offset(o_offset), wave(wave), left(left), lane(arch::lane()) {
    }

    // Hands the wave's rows of the state to all waves.
    DEVICE_MEMBER void share_state(const State &state) const {
        share_state(shared, state);
        arch::phase();
    }
    static DEVICE_MEMBER void share_state(Exchange<Keys> &to, const State &state) {
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int j = 0; j < across; ++j) {
                to.state[p * across + j][arch::thread()] =
                    both(rounded<T>(state[2 * p][j]), rounded<T>(state[2 * p + 1][j]));
            }
        }
    }
    // All of it, if it fits into the registers besides the rest; else it is read where it is used.
    DEVICE_MEMBER void take_state() const { take_state(shared, part); }
    static DEVICE_MEMBER void take_state(const Exchange<Keys> &from, Part<Keys> &part) {
        arch::workgroup_sync();
        if constexpr (!registers_are_short(Keys)) {
            for (int b = 0; b < key_pairs(Keys); ++b) {
                for (int j = 0; j < across; ++j) {
                    part.state[b][j].data = state_of(from, b, j);
                }
                arch::phase();
            }
        }
    }

    // R = K S0, of the wave's rows.
    template <class Next> DEVICE_MEMBER void read_state(Slab &read, Slab &out, const State &, const Next &) {
        for (int j = 0; j < across; ++j) {
            read[0][j] = Tile{};
            out[0][j] = Tile{};
        }
        multiply_rows<0, key_pairs(Keys)>(read, part.k);
        transpose();
    }

    // U += (T - I) X, and O = Q S0 while the waves exchange X.
    template <class Next, class F>
    DEVICE_MEMBER void multiply_t(Slab &u, const SlabOperands &x, Slab &out, const Next &, const F &) {
        shared.x[arch::thread()] = both(x[0][0], x[0][1]);
        arch::phase();
        constexpr int pairs = key_pairs(Keys), half = pairs / 2;
        if constexpr (registers_are_short(Keys)) {
            load_rest(next, part);
            next.advance_record(left - chunk);
            if constexpr (Outputs) {
                multiply_rows<0, half>(out, part.q);
            }
        } else if constexpr (Outputs) {
            multiply_rows_and_load<0, half, (first_loads + 2 * half - 1) / (2 * half)>(out, part.q);
        } else {
            load_first<0, first_loads - 2>(next, part);
        }
        arch::workgroup_sync();
        OperandPair all[tiles];
        take(all, shared.x);
        arch::phase();
        if constexpr (Outputs) {
            multiply_rows<half, pairs>(out, part.q);
        }
        multiply_lower<false>(u, part.t, all);
        arch::phase();
        next.load_t(part);
    }
    DEVICE_MEMBER void multiply_p(Slab &, const SlabOperands &u) const {
        shared.u[arch::thread()] = both(u[0][0], u[0][1]);
    }

    // S += K^T x.
    template <bool First, class F>
    DEVICE_MEMBER void accumulate(State &state, const SlabOperands &x, const F &meanwhile) {
        i32x4(&exchange)[scan_threads] = First ? shared.update : shared.x;
        exchange[arch::thread()] = both(x[0][0], x[0][1]);
        arch::phase();
        if constexpr (registers_are_short(Keys) && First) {
            next.load_k(part);
        } else if constexpr (!Outputs && First) {
            load_first<first_loads - 2, first_loads>(next, part);
        }
        meanwhile();
        arch::phase();
        arch::workgroup_sync();
        OperandPair all[tiles];
        take(all, exchange);
        if (Outputs && !registers_are_short(Keys) && First) {
            take(new_values, shared.u);
        }
        arch::phase();
        if constexpr (Outputs && First && !registers_are_short(Keys)) {
            next.load_q(part);
        }
        for (int c = 0; c < tiles; ++c) {
            for (int t = 0; t < key_tiles; ++t) {
                state[t][0] = T::mma(transposed[t][c], all[c].first(), state[t][0]);
                state[t][1] = T::mma(transposed[t][c], all[c].second(), state[t][1]);
            }
        }
    }

    // O += (P - diag(P)) U.
    DEVICE_MEMBER void finish_outputs(Slab &out, const SlabOperands &) {
        if constexpr (registers_are_short(Keys)) {
            take(new_values, shared.u);
        }
        multiply_lower<true>(out, part.p, new_values);
    }
    DEVICE_MEMBER void finish_state(State &, const SlabOperands &) const {}
    DEVICE_MEMBER void finish() {
        if constexpr (registers_are_short(Keys)) {
            load_late(next, part);
        } else {
            load_rest(next, part);
        }
    }

    // What the next chunk needs first, in the order in which it does: what this one has used when it has made X. One
    // load after the other, where the matrix unit is busy for longer than it takes to issue some.
    static constexpr int first_loads = key_pairs(Keys) + tiles + 2 + elements;
    template <int I, int End> static DEVICE_MEMBER void load_first(const Source<T, Keys> &from, Part<Keys> &to) {
        if constexpr (I < End && I < first_loads) {
            constexpr int of_columns = I - key_pairs(Keys), of_values = of_columns - tiles;
            if constexpr (of_columns < 0) {
                from.template load_k<I>(to);
            } else if constexpr (of_values < 0) {
                from.template load_column<of_columns>(to);
            } else if constexpr (of_values < elements) {
                from.template load_value<of_values>(to);
            } else {
                from.load_factor(to, of_values == elements ? read_row : beta_row);
            }
            arch::phase();
            load_first<I + 1, End>(from, to);
        }
    }
    // The same, but for its rows of K, with those of Q, where registers are short.
    static DEVICE_MEMBER void load_late(const Source<T, Keys> &from, Part<Keys> &to) {
        arch::phase();
        from.load_columns(to);
        arch::phase();
        from.load_factor(to, read_row);
        from.load_factor(to, beta_row);
        from.load_values(to);
        arch::phase();
        if constexpr (Outputs) {
            from.load_q(to);
        }
    }
    static DEVICE_MEMBER void load_rest(const Source<T, Keys> &from, Part<Keys> &to) {
        arch::phase();
        from.load_decay(to);
        from.load_factor(to, write_row);
        if constexpr (Outputs) {
            from.load_factor(to, output_row);
            from.load_factor(to, diagonal_row);
            from.load_p(to);
        }
    }

    // Rows of beta V, and, scaled, to O.
    DEVICE_MEMBER void load_weighted(int i, Tile (&x)[across]) const {
        for (int r = 0; r < elements; ++r) {
            x[0][r] = T::low(part.v[r]);
            x[1][r] = T::high(part.v[r]);
        }
        for (int j = 0; j < across; ++j) {
            x[j] = factor(beta_row, i) * x[j];
        }
    }
    DEVICE_MEMBER void store_outputs(int, const Tile (&x)[across], float scale) const {
        const Tile first = arch::held(T::nearest(scale * x[0])), second = arch::held(T::nearest(scale * x[1]));
        for (int r = 0; r < elements; ++r) {
            o.memory.store_b32(o_offset[r], T::join(first[r], second[r]));
        }
    }

    DEVICE_MEMBER Tile factor(RowFactor which, int) const { return part.factor[which]; }
    DEVICE_MEMBER f32x2 decay() const {
        return f32x2{part.decay.x, bits<float>(arch::uniform_value(bits<int>(part.decay.y)))};
    }

  private:
    static DEVICE_MEMBER i32x4 state_of(const Exchange<Keys> &from, int pair, int j) {
        return from.state[pair / scan_waves * across + j][pair % scan_waves * arch::lanes + arch::lane()];
    }
    static DEVICE_MEMBER i32x4 both(Operand first, Operand second) {
        return i32x4{first.x, first.y, second.x, second.y};
    }
    DEVICE_MEMBER void take(OperandPair (&to)[tiles], const i32x4 (&from)[scan_threads]) const {
        for (int c = 0; c < tiles; ++c) {
            to[c].data = from[c * arch::lanes + lane];
            arch::phase();
        }
    }

    template <int First, int End>
    DEVICE_MEMBER void multiply_rows(Slab &out, const OperandPair (&rows)[key_pairs(Keys)]) const {
        for (int b = First; b < End; ++b) {
            if constexpr (registers_are_short(Keys)) {
                arch::phase();
            }
            const OperandPair *const held = &part.state[0][0];
            OperandPair s[across];
            for (int j = 0; j < across; ++j) {
                s[j].data = registers_are_short(Keys) ? state_of(shared, b, j) : held[b * across + j].data;
            }
            for (int j = 0; j < across; ++j) {
                out[0][j] = T::mma(rows[b].first(), s[j].first(), out[0][j]);
            }
            for (int j = 0; j < across; ++j) {
                out[0][j] = T::mma(rows[b].second(), s[j].second(), out[0][j]);
            }
        }
    }
    // The same, with so many loads of what the next chunk needs after every two products.
    template <int B, int End, int Loads>
    DEVICE_MEMBER void multiply_rows_and_load(Slab &out, const OperandPair (&rows)[key_pairs(Keys)]) {
        if constexpr (B < End) {
            const OperandPair *const held = &part.state[B][0];
            for (int j = 0; j < across; ++j) {
                out[0][j] = T::mma(rows[B].first(), held[j].first(), out[0][j]);
            }
            load_first<2 * B * Loads, (2 * B + 1) * Loads>(next, part);
            for (int j = 0; j < across; ++j) {
                out[0][j] = T::mma(rows[B].second(), held[j].second(), out[0][j]);
            }
            load_first<(2 * B + 1) * Loads, (2 * B + 2) * Loads>(next, part);
            multiply_rows_and_load<B + 1, End, Loads>(out, rows);
        }
    }
    // Blocks of the wave's rows of T or P times tokens that all waves have made.
    template <bool OfP>
    DEVICE_MEMBER void multiply_lower(Slab &out, const OperandPair (&blocks)[tiles / 2],
                                      const OperandPair (&tokens)[tiles]) const {
        if (has_second_pair(wave)) {
            multiply_block(out, blocks[0].first(), tokens[0]);
            multiply_block(out, blocks[0].second(), tokens[1]);
            multiply_last<OfP>(out, blocks[1], tokens[2], tokens[3]);
        } else {
            multiply_last<OfP>(out, blocks[0], tokens[0], tokens[1]);
        }
    }
    template <bool OfP>
    DEVICE_MEMBER void multiply_last(Slab &out, OperandPair blocks, OperandPair first, OperandPair second) const {
        const bool whole = last_pair_is_whole(wave);
        const Operand a = blocks.first(), b = blocks.second();
        const Operand left{OfP && !whole ? b.x : a.x, OfP && !whole ? b.y : a.y},
            right{whole ? b.x : 0, whole ? b.y : 0};
        multiply_block(out, left, first);
        multiply_block(out, right, second);
    }
    static DEVICE_MEMBER void multiply_block(Slab &out, Operand block, OperandPair tokens) {
        out[0][0] = T::mma(block, tokens.first(), out[0][0]);
        out[0][1] = T::mma(block, tokens.second(), out[0][1]);
    }

    static DEVICE_MEMBER Operand transposed_of(Operand rows, Operand identity) {
        return arch::packed<T>(T::mma(rows, identity, Tile{}));
    }
    // K^T of the wave's key elements: a product with the identity has each lane hold four rows of a column, exactly.
    DEVICE_MEMBER void transpose() {
        const Place at(lane);
        Tile one;
        for (int e = 0; e < elements; ++e) {
            one[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
        }
        const Operand identity = arch::packed<T>(one);
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int c = 0; c < tiles; ++c) {
                transposed[2 * p][c] = transposed_of(part.columns[p][c].first(), identity);
                transposed[2 * p + 1][c] = transposed_of(part.columns[p][c].second(), identity);
            }
        }
    }

    Exchange<Keys> &shared;
    Part<Keys> &part;
    Source<T, Keys> &next;
    const TokenRows &o;
    const u32 (&o_offset)[elements];
    const int wave, left, lane;
    OperandPair new_values[tiles];
    Operand transposed[key_tiles][tiles];
};

// The chunks of a segment, one after the other. While one is multiplied, the next one is on its way to the registers
// that have been read.
template <class T, int Keys, bool Outputs = true> class Chunks {
    typedef prefill::Chunk<T, Keys, Outputs> Chunk;

  public:
    DEVICE_MEMBER Chunks(const dw_prefill_scan_args &x, const Segment &s, int head, int key_head, int,
                         u32 column_offset)
        : shared(memory()), next(x, s.sequence, s.begin, s.slot, head, key_head, column_offset),
          o(x.o, apart(x.o_strides, x.value_dim), s.sequence, s.begin, head, x.value_dim), output_scale(x.scale),
          rest(s.end - s.begin) {
        for (int r = 0; r < elements; ++r) {
            o_offset[r] = (16 * arch::wave() + Place(arch::lane()).row(r)) * o.stride + column_offset;
        }
        if (rest <= 0) {
            return;
        }
        next.limit(rest);
        o.limit(rest);
        // In the order of every chunk.
        if constexpr (registers_are_short(Keys)) {
            next.load_k(part);
            next.load_t(part);
            Chunk::load_late(next, part);
        } else {
            Chunk::template load_first<0, Chunk::first_loads>(next, part);
            next.load_t(part);
            if constexpr (Outputs) {
                next.load_q(part);
            }
            Chunk::load_rest(next, part);
        }
    }

    DEVICE_MEMBER void begin(const typename Chunk::State &state) {
        Chunk::share_state(shared, state);
        Chunk::take_state(shared, part);
    }
    DEVICE_MEMBER float scale(const dw_prefill_scan_args &) const { return output_scale; }
    // Tokens that are left.
    DEVICE_MEMBER int left() const { return rest; }
    DEVICE_MEMBER bool last() const { return rest <= chunk; }
    static DEVICE_MEMBER bool works(bool) { return true; }
    DEVICE_MEMBER void wait() {}
    struct Next {
        DEVICE_MEMBER Next(Chunks &, const dw_prefill_scan_args &) {}
    };

    DEVICE_MEMBER Chunk current(const dw_prefill_scan_args &) {
        next.advance(rest - chunk);
        if constexpr (!registers_are_short(Keys)) {
            next.advance_record(rest - chunk);
        }
        return Chunk(shared, part, next, o, o_offset, wave, rest);
    }

    DEVICE_MEMBER void advance(const dw_prefill_scan_args &) {
        rest -= chunk;
        if constexpr (Outputs) {
            o.advance();
            if (rest < chunk) {
                o.limit(arch::opaque_uniform(rest));
            }
        }
    }
    DEVICE_MEMBER void finish() {}

  private:
    // A single token may have any stride; rows that are not there must not lie in its place.
    static DEVICE_MEMBER dw_token_strides apart(dw_token_strides s, int dim) {
        s.token = max_of(s.token, (int64_t)dim);
        return s;
    }

    static DEVICE_MEMBER Exchange<Keys> &memory() {
        __attribute__((shared)) static Exchange<Keys> shared;
        return shared;
    }

    Exchange<Keys> &shared;
    Part<Keys> part;
    Source<T, Keys> next;
    TokenRows o;
    u32 o_offset[elements];
    const float output_scale;
    const int wave = arch::opaque_uniform(arch::wave()); // in a scalar register
    int rest;
};

// Every wave multiplies.
template <int Keys, bool Outputs> DEVICE bool copy_chunks(const dw_prefill_scan_args &, const Segment &, const Work &) {
    return false;
}

} // namespace prefill
