// Products of one chunk on sm_90a (wgmma). Every warp reads operands from shared memory; K^T is read from the copy of
// K.
#pragma once

#include "registers.h"

namespace prefill {

// Products of one chunk for the columns of one warp; without `Outputs` only those of the state. The four warps of a
// warpgroup multiply together. Products are queued in the order in which their results are needed. Independent work
// runs meanwhile (step.h):
//   K S0, half of Q S0 | (T - I) X, the rest of Q S0 | K^T U, P U
template <class T, int Keys, bool Outputs> class Chunk {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    static constexpr int across = 1;
    static constexpr int row_tiles = tiles;
    static constexpr int key_tiles = StateLayout<Keys>::key_tiles;
    // Whether K^T U is queued before P U. This needs registers for both products.
    static constexpr bool state_first = !registers_are_short(Keys);
    typedef prefill::State<Keys> State;
    typedef Tile Slab[tiles][across];
    typedef Operand SlabOperands[tiles][across];

    // Whether a phase loads from shared memory before it queues its products. Loads after that would wait for the
    // products.
    static constexpr bool reads_ahead = !registers_are_short(Keys);

    static constexpr int held = registers_are_short(Keys) ? 4 : Keys / 16;
    // Rounded tiles of the state, operands of K S0 and Q S0.
    typedef Operand Reads[held][1];

    // `memory`: the ring.
    DEVICE_MEMBER Chunk(const char *memory, Slots slots, bool has_values, Output &o, Reads &reads)
        : rows(memory + slots.factors), has_values(Outputs || has_values), o(o), reads(reads),
          thread(registers_are_short(Keys) ? arch::opaque(thread_of_group()) : thread_of_group()),
          v(memory + slots.values + Stage::v + group<Stage>() * panel_bytes), at(thread & (arch::lanes - 1)),
          keys(arch::described(shared_address(memory) + slots.keys)),
          matrices(Stage::lower_described(shared_address(memory) + slots.matrices)) {}

    // R = K S0                                                       [64, 16] in `read`
    // O = Q S0                                                       [64, 16], complete after finish_reads
    template <class Next> DEVICE_MEMBER void read_state(Slab &read, Slab &out, const State &state, const Next &next) {
        Accumulators<tiles> r, o;
        if constexpr (registers_are_short(Keys)) {
            for (int panel = 0; panel < Keys / 16; panel += held) {
                round_state(state, panel);
                read_tiles<0, held>(r, Stage::k, panel);
                if constexpr (Outputs) {
                    read_tiles<0, held>(o, Stage::q, panel);
                }
                arch::await_products<0>();
                r.pin();
                if constexpr (Outputs) {
                    o.pin();
                }
                pin(reads);
            }
        } else {
            Operand words[tiles][1];
            for (int i = 0; i < tiles; ++i) {
                words[i][0] = value_words(i);
                ahead[beta_row][i] = rows_of(beta_row, i);
                ahead[read_row][i] = rows_of(read_row, i);
            }
            pin(words);
            // Without outputs beta V is computed during K S0, because no other work runs then.
            if constexpr (Outputs) {
                weigh(words);
            }
            read_tiles<0, held>(r, Stage::k, 0);
            next.store();
            if constexpr (Outputs) {
                read_tiles<0, held / 2>(o, Stage::q, 0);
            } else {
                weigh(words);
            }
            arch::await_products<Outputs ? 1 : 0>();
            r.pin();
        }
        next.release();
        r.to(read);
        if constexpr (Outputs) {
            o.to(out);
        }
    }

    // Loads beta V, [16, 16].
    DEVICE_MEMBER void load_weighted(int i, Tile (&x)[across]) const {
        if constexpr (reads_ahead) {
            x[0] = weighted[i];
        } else {
            x[0] = rows_of(beta_row, i) * value_rows(value_words(i));
        }
    }

    // U += (T - I) X                                                 [64, 16]; blocks above the diagonal are zeros
    template <class Next, class F>
    DEVICE_MEMBER void solve_u(Slab &u, SlabOperands &x, Slab &out, const Next &, const F &meanwhile) {
        for (int i = 0; i < tiles && reads_ahead; ++i) {
            ahead[write_row][i] = rows_of(write_row, i);
        }
        Accumulators<tiles> a(u);
        multiply_lower(a, Stage::t, x);
        if constexpr (queued) {
            Accumulators<tiles> o(out);
            read_tiles<held / 2, held>(o, Stage::q, 0);
            o.to(out);
        }
        meanwhile();
        arch::await_products<queued ? 1 : 0>();
        a.pin();
        pin(x);
        a.to(u);
    }

    // S += K^T x                                                     [K, 16], complete after finish_state
    DEVICE_MEMBER void accumulate(State &state, SlabOperands &x) {
        if constexpr (queued) {
            for (int i = 0; i < tiles; ++i) {
                ahead[output_row][i] = rows_of(output_row, i);
                ahead[diagonal_row][i] = rows_of(diagonal_row, i);
            }
        }
        Accumulators<key_tiles> a(state);
        a.pin();
        pin(x);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            accumulate_panels<0>(a, x[c][0], c);
        }
        arch::commit_products();
        a.to(state);
    }

    // Waits until Q S0 is complete.
    DEVICE_MEMBER void finish_reads(Slab &out) {
        if constexpr (queued) {
            Accumulators<tiles> o(out);
            arch::await_products<1>();
            o.pin();
            pin(reads);
            o.to(out);
        }
    }

    // O += (P - diag(P)) U                                           [64, 16], complete after finish_outputs
    DEVICE_MEMBER void multiply_p(Slab &out, SlabOperands &u) const {
        Accumulators<tiles> a(out);
        multiply_lower(a, Stage::p, u);
        a.to(out);
    }
    DEVICE_MEMBER void finish_state(State &state, SlabOperands &x) const {
        Accumulators<key_tiles> a(state);
        arch::await_products<Outputs && state_first ? 1 : 0>();
        a.pin();
        pin(x);
        a.to(state);
    }
    // Finishes K^T x if no product is queued after it.
    DEVICE_MEMBER void finish_all(State &state, SlabOperands &x) const {
        Accumulators<key_tiles> a(state);
        arch::await_products<0>();
        a.pin();
        pin(x);
        a.to(state);
    }
    DEVICE_MEMBER void finish_outputs(Slab &out, SlabOperands &u) const {
        Accumulators<tiles> a(out);
        arch::await_products<state_first ? 0 : 1>();
        a.pin();
        pin(u);
        a.to(out);
    }

    // Rounds scale O and keeps it for the store.
    DEVICE_MEMBER void keep_outputs(const Slab &x, float scale) { o.keep<T>(x, scale); }

    // Rounds the state for the next chunk.
    DEVICE_MEMBER void prepare_reads(const State &state) {
        if constexpr (!registers_are_short(Keys)) {
            round_state(state, 0);
        }
    }

    DEVICE_MEMBER Tile factor(RowFactor which, int i) const {
        if constexpr (reads_ahead) {
            return ahead[which][i];
        } else {
            return rows_of(which, i);
        }
    }
    DEVICE_MEMBER f32x2 decay() const { return *(const f32x2 *)(rows + row_factors * chunk * 4); }

  private:
    // Whether the product with T takes 32 rows at a time and leaves out the upper right 32x32 block, which is zero.
    // Scan is slower with that on an H200; why is not known.
    static constexpr bool lower_in_halves = !Outputs;
    // Whether half of Q S0 is queued after the product with T.
    static constexpr bool queued = Outputs && !registers_are_short(Keys);

    DEVICE_MEMBER Tile rows_of(RowFactor which, int i) const {
        const f32x4 x = *(const f32x4 *)(rows + (which * chunk + 16 * i) * 4 + thread % 4 * 16);
        return Tile{x.x, x.y, x.x, x.y, x.z, x.w, x.z, x.w};
    }
    // Reads words of V from shared memory: two columns of four rows, or zeros.
    DEVICE_MEMBER Operand value_words(int i) const {
        if (!has_values) {
            return Operand{};
        }
        int w[4];
        for (int r = 0; r < 4; ++r) {
            const int row = at.row(r / 2 * 4 + r % 2), word = at.column(0);
            const u32 group = swizzled(row % 8, (u32)thread / arch::lanes * 2 + word / 4);
            w[r] = *(const int *)(v + i * 16 * 128 + row / 8 * (8 * 128) + group + word % 4 * 4);
        }
        return Operand{w[0], w[1], w[2], w[3]};
    }
    static DEVICE_MEMBER Tile value_rows(Operand w) {
        return Tile{T::low(w.x), T::low(w.y), T::high(w.x), T::high(w.y),
                    T::low(w.z), T::low(w.w), T::high(w.z), T::high(w.w)};
    }
    // weighted = beta V.
    DEVICE_MEMBER void weigh(const Operand (&words)[tiles][1]) {
        for (int i = 0; i < tiles; ++i) {
            weighted[i] = ahead[beta_row][i] * value_rows(words[i][0]);
            for (int e = 0; e < elements; ++e) {
                float x = weighted[i][e];
                arch::pin(x);
                weighted[i][e] = x;
            }
        }
    }

    // Descriptors of operands in shared memory: column_tile: column tile t of a matrix in `slot`; row_tile: 16 rows of
    // a panel of 64 columns of K.
    static DEVICE_MEMBER u64 column_tile(u64 slot, u32 matrix, int t) {
        return slot + ((matrix + t / 4 * panel_bytes + t % 4 * 32) >> 4);
    }
    DEVICE_MEMBER u64 row_tile(int panel, int i) const {
        return keys + ((Stage::k + panel * panel_bytes + i * 16 * 128) >> 4);
    }

    // Rounds `held` tiles of the state, from `first` on.
    DEVICE_MEMBER void round_state(const State &state, int first) {
        for (int t = 0; t < held; ++t) {
            reads[t][0] = rounded<T>(state[first + t][0]);
        }
        pin(reads);
    }
    // a (+)= column tiles `first` + [Begin, End) of a matrix times the rounded tiles of the state.
    template <int Begin, int End> DEVICE_MEMBER void read_tiles(Accumulators<tiles> &a, u32 matrix, int first) {
        arch::begin_products();
        for (int t = Begin; t < End; ++t) {
            T::template multiply_async<false>(a.at, reads[t][0], column_tile(keys, matrix, first + t), first + t > 0);
        }
        arch::commit_products();
    }
    DEVICE_MEMBER void multiply_lower(Accumulators<tiles> &a, u32 matrix, SlabOperands &x) const {
        a.pin();
        pin(x);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            const u64 column = matrices + ((matrix + c * Stage::lower_column_bytes) >> 4);
            if constexpr (lower_in_halves) {
                float(&upper)[16] = *(float(*)[16])a.at, (&lower)[16] = *(float(*)[16])(a.at + 16);
                if (c < tiles / 2) {
                    T::template multiply_async<false>(upper, x[c][0], column, true);
                }
                T::template multiply_async<false>(lower, x[c][0], column + (Stage::lower_place(32, 0) >> 4), true);
            } else {
                T::template multiply_async<false>(a.at, x[c][0], column, true);
            }
        }
        arch::commit_products();
    }
    // S += K^T x for token tile c, 64 key elements at a time.
    template <int Panel> DEVICE_MEMBER void accumulate_panels(Accumulators<key_tiles> &a, Operand x, int c) const {
        if constexpr (Panel < Stage::panels) {
            float(&panel)[32] = *(float(*)[32])(a.at + 32 * Panel);
            T::template multiply_async<true>(panel, x, row_tile(Panel, c), true);
            accumulate_panels<Panel + 1>(a, x, c);
        }
    }

    const char *const rows; // row factors
    const bool has_values;  // false: V counts as zeros
    Output &o;
    Reads &reads;
    const int thread; // index in the warpgroup
    const char *const v;
    const LaneMap at;
    const u64 keys, matrices;
    Tile weighted[tiles], ahead[row_factors][tiles];
};

} // namespace prefill
