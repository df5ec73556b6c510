// One chunk of prefill_scan or, without outputs, of prefill_summarise on CDNA, and the walk over them.
#pragma once

#include "prefill_gfx9.h"

namespace prefill {

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
                o.limit(arch::opaque_uniform(arch::uniform_value(rest)));
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
template <int Keys, bool Outputs>
DEVICE void copy_chunks(const dw_prefill_scan_args &, const Segment &, const Work &) {}
template <int Keys, bool Outputs, class F> DEVICE void multiply_chunks(const F &f) { f(); }

} // namespace prefill
