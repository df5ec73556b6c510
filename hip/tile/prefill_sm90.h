// How prefill moves its operands on sm_90a: K, Q, T, P and the row factors of a chunk are copied to shared memory while
// chunks before it are worked on, and every warp reads its operands there; K^T is read from the copy of K.
#pragma once

#include "prefill_sm90_registers.h"
#include "prefill_sm90_step.h"

namespace prefill {

using namespace tile;

// Lower blocks of T and P, given transposed (an accumulator tile, rounded, has the rows of the matrix in consecutive
// words), to a record: T, then P, of each its rows up to the diagonal block, as they are copied to shared memory.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + record_matrices), lane(arch::lane()) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const { put(to, row, column, transposed); }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        put(to + matrix_bytes, row, column, transposed);
    }

  private:
    DEVICE_MEMBER void put(char *matrix, int row, int column, Tile transposed) const {
        const Operand operand = rounded<T>(transposed);
        const int row_bytes = (row + 1) * 32;
        char *at = matrix + lower_block(row, 0) * block_bytes + column * 32 + (u32)lane / 4 * row_bytes + lane % 4 * 4;
        for (int i = 0; i < 4; ++i) {
            *(int *)(at + i % 2 * 8 * row_bytes + i / 2 * 16) = operand[i];
        }
    }

    char *const to;
    const int lane;
};

// Workgroups of prepare that share a multiprocessor.
constexpr int prepare_residency = 6;

// Column tiles of a wave.
constexpr int scan_tiles(int) { return 1; }
// Columns of a workgroup of scan or, without outputs, of summarise, its threads, as it is launched and at most, and how
// many workgroups share a multiprocessor.
template <int Keys, bool Outputs> DEVICE int slab_columns() { return scan_waves * 16 * groups<Stage<Keys, Outputs>>(); }
template <int Keys, bool Outputs> DEVICE int walking_threads() { return arch::threads(); }
template <int Keys, bool Outputs> constexpr int walk_threads() {
    return (Stage<Keys, Outputs>::most_groups + 1) * group_threads;
}
template <int Keys, bool Outputs> constexpr int walk_residency() { return 1; }
// The first of a wave's columns, from its slab's on.
DEVICE int wave_column_of_slab(int across) { return arch::wave() * 16 * across; }

// The key element and, from the lane's first column on, the column of an element of the state: a lane's columns are
// neighbours.
DEVICE int state_key(int tile_index, int element, int lane) { return 16 * tile_index + Place(lane).row(element); }
DEVICE constexpr int state_column(int, int element) { return element / 2 % 2; }
DEVICE int first_column(int lane, int) { return lane / 4 * 2; }

// Where a row's factors lie in a record: those of a lane's four rows of a tile are neighbours.
DEVICE int row_place(int row) { return (row & ~15) + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2; }

// Whether what is needed later is loaded when it is needed, not ahead.
constexpr bool registers_are_short(int keys) { return keys > 128; }

// One chunk for the columns of one warp; without `Outputs`, only what the state takes. The four warps multiply
// together. Products are queued in the order in which their results are needed, and what does not wait for one is done
// while it runs:
//   K S0, half of Q S0 | (T - I) X, the rest of Q S0 | K^T U, P U
template <class T, int Keys, bool Outputs> class Chunk {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    static constexpr int across = 1;
    static constexpr int row_tiles = tiles;
    static constexpr int key_tiles = Stage::panels * 4;
    // Whether the state's product is queued before that of P, which needs registers for both.
    static constexpr bool state_first = !registers_are_short(Keys);
    typedef Tile State[key_tiles][across];
    typedef Tile Slab[tiles][across];
    typedef Operand SlabOperands[tiles][across];

    // Whether what a phase reads of shared memory is read before its products are queued, behind which the reads would
    // wait.
    static constexpr bool reads_ahead = !registers_are_short(Keys);

    static constexpr int held = registers_are_short(Keys) ? 4 : Keys / 16;
    // Tiles of the state, rounded, as K S0 and Q S0 take them.
    typedef Operand Reads[held][1];

    DEVICE_MEMBER Chunk(const char *memory, bool has_values, Output &o, Reads &reads)
        : memory(memory), has_values(Outputs || has_values), o(o), reads(reads),
          thread(registers_are_short(Keys) ? arch::opaque(thread_of_group()) : thread_of_group()),
          v(memory + Stage::v + group<Stage>() * panel_bytes), at(thread & (arch::lanes - 1)),
          shared(arch::described(shared_address(memory))) {}

    // R = K S0, and O = Q S0, which is complete after finish_reads. Meanwhile the next chunk is copied.
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
            // Where there is nothing else to do while K S0 runs, beside it.
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

    // beta V.
    DEVICE_MEMBER void load_weighted(int i, Tile (&x)[across]) const {
        if constexpr (reads_ahead) {
            x[0] = weighted[i];
        } else {
            x[0] = rows_of(beta_row, i) * value_rows(value_words(i));
        }
    }

    // U += (T - I) X: all blocks, those above the diagonal are zero.
    template <class Next, class F>
    DEVICE_MEMBER void multiply_t(Slab &u, SlabOperands &x, Slab &out, const Next &, const F &meanwhile) {
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

    // S += K^T x, complete after finish_state.
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

    // The products that are queued before the last one are complete.
    DEVICE_MEMBER void finish_reads(Slab &out) {
        if constexpr (queued) {
            Accumulators<tiles> o(out);
            arch::await_products<1>();
            o.pin();
            pin(reads);
            o.to(out);
        }
    }

    // O += (P - diag(P)) U, complete after finish_outputs.
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
    // The state alone, with no product queued after it.
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

    // All rows, scaled, on their way to O.
    DEVICE_MEMBER void store_outputs(const Slab &x, float scale) { o.keep<T>(x, scale); }

    // What the next chunk reads of the state.
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
    DEVICE_MEMBER f32x2 decay() const { return *(const f32x2 *)(memory + Stage::rows + row_factors * chunk * 4); }

  private:
    // Whether half of Q S0 is queued after T's product.
    static constexpr bool queued = Outputs && !registers_are_short(Keys);

    DEVICE_MEMBER Tile rows_of(RowFactor which, int i) const {
        const f32x4 x = *(const f32x4 *)(memory + Stage::rows + (which * chunk + 16 * i) * 4 + thread % 4 * 16);
        return Tile{x.x, x.y, x.x, x.y, x.z, x.w, x.z, x.w};
    }
    // Of V, as they lie there: two columns of four rows, or zeros.
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

    // Column tile t of a matrix in shared memory, and 16 rows of a panel of 64 columns.
    DEVICE_MEMBER u64 column_tile(u32 matrix, int t) const {
        return shared + ((matrix + t / 4 * panel_bytes + t % 4 * 32) >> 4);
    }
    DEVICE_MEMBER u64 row_tile(u32 matrix, int panel, int i) const {
        return shared + ((matrix + panel * panel_bytes + i * 16 * 128) >> 4);
    }

    // The operands of tiles of the state from `first` on, as many as are held.
    DEVICE_MEMBER void round_state(const State &state, int first) {
        for (int t = 0; t < held; ++t) {
            reads[t][0] = rounded<T>(state[first + t][0]);
        }
        pin(reads);
    }
    // a (+)= the matrix's column tiles from `first` on, times these operands: from Begin to End.
    template <int Begin, int End> DEVICE_MEMBER void read_tiles(Accumulators<tiles> &a, u32 matrix, int first) {
        arch::begin_products();
        for (int t = Begin; t < End; ++t) {
            T::template multiply_async<false>(a.at, reads[t][0], column_tile(matrix, first + t), first + t > 0);
        }
        arch::commit_products();
    }
    DEVICE_MEMBER void multiply_lower(Accumulators<tiles> &a, u32 matrix, SlabOperands &x) const {
        a.pin();
        pin(x);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            T::template multiply_async<false>(a.at, x[c][0], column_tile(matrix, c), true);
        }
        arch::commit_products();
    }
    // Token tile c of K^T, 64 key elements at a time.
    template <int Panel> DEVICE_MEMBER void accumulate_panels(Accumulators<key_tiles> &a, Operand x, int c) const {
        if constexpr (Panel < Stage::panels) {
            float(&panel)[32] = *(float(*)[32])(a.at + 32 * Panel);
            T::template multiply_async<true>(panel, x, row_tile(Stage::k, Panel, c), true);
            accumulate_panels<Panel + 1>(a, x, c);
        }
    }

    const char *const memory;
    const bool has_values; // or V is zeros
    Output &o;
    Reads &reads;
    const int thread; // of the warpgroup
    const char *const v;
    const Place at;
    const u64 shared;
    Tile weighted[tiles], ahead[row_factors][tiles];
};

// The chunks of a segment, one after the other, each in its stage of a ring that other warps fill.
template <class T, int Keys, bool Outputs = true> class Chunks {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    DEVICE_MEMBER Chunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int, int wave_column,
                         u32 column_offset)
        : memory(ring()), has_values(wave_column < x.value_dim), o(x.o, x.o_strides, s, head, column_offset),
          rest(s.end - s.begin), group(prefill::group<Stage>()) {}

    // Tokens that are left.
    DEVICE_MEMBER int left() const { return rest; }

    // One chunk. Every warp takes its part in the products, columns or none.
    DEVICE_MEMBER void step(typename Chunk<T, Keys>::State &state, const dwk_prefill_scan_args &x) {
        const dwk_prefill_scan_args &y = arch::reread(x);
        Handover<Stage>::wait_full(group, stage);
        const Next next(*this);
        prefill::step<T, Keys, Outputs>(state, current(), next, y.scale, rest <= chunk);
        advance();
    }
    // After some chunks.
    DEVICE_MEMBER void settle(typename Chunk<T, Keys>::State &) {}
    // Before the first chunk.
    DEVICE_MEMBER void begin(const typename Chunk<T, Keys, Outputs>::State &state) {
        Chunk<T, Keys, Outputs>(memory, has_values, o, reads).prepare_reads(state);
    }
    // After the last chunk.
    DEVICE_MEMBER void finish() {
        if (Outputs && !registers_are_short(Keys) && before >= 0) {
            o.store_some(rest + chunk);
        }
    }

  private:
    // The stage of the chunk before is given back when the first product of this one is complete: its copies, which
    // take turns with other accesses to shared memory, then do not meet the loads that the product waits for.
    class Next {
      public:
        DEVICE_MEMBER explicit Next(Chunks &chunks) : chunks(chunks) {}
        // The outputs of the chunk before, where they were not stored at its end.
        DEVICE_MEMBER void store() const {
            if (Outputs && chunks.before >= 0) {
                chunks.o.store();
            }
        }
        DEVICE_MEMBER void release() const {
            if (chunks.before >= 0 && chunks.rest > (Stage::count - 1) * chunk) { // or nobody waits for it
                Handover<Stage>::empty(chunks.group, chunks.before);
            }
        }

      private:
        Chunks &chunks;
    };
    DEVICE_MEMBER Chunk<T, Keys, Outputs> current() {
        return Chunk<T, Keys, Outputs>(memory + stage * Stage::bytes, has_values, o, reads);
    }
    DEVICE_MEMBER void advance() {
        if (Outputs && registers_are_short(Keys)) {
            o.store_some(rest);
        }
        rest -= chunk;
        before = stage;
        stage = stage + 1 == Stage::count ? 0 : stage + 1;
    }

    char *const memory;
    const bool has_values;
    Output o;
    typename Chunk<T, Keys, Outputs>::Reads reads;
    int rest;
    int stage = 0, before = -1;
    const int group;
};

// Registers of a warp that copies and of one that multiplies, beside another warpgroup and alone: on average no more
// than the 168 that each thread is launched with where two warpgroups may multiply.
constexpr int copying_registers = 56, shared_registers = 224, lone_registers = 248;
static_assert(copying_registers + 2 * shared_registers <= 3 * 168 && copying_registers + lone_registers <= 2 * 168,
              "setmaxnreg would wait for registers that there are not");

// The work of the warps that copy, which end with it; the others go on.
template <class T, int Keys, bool Outputs>
DEVICE void accompany_chunks(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    if (arch::wave() < scan_waves * groups<Stage>()) {
        return;
    }
    if constexpr (Stage::most_groups > 1) {
        arch::give_registers<copying_registers>();
    }
    Copier<Keys, Outputs>(x, segment, work.head, work.key_head, work.slab * slab_columns<Keys, Outputs>()).run();
    arch::end_wave();
}

// Calls f(), the work of the warps that multiply. Outputs take more registers than two warpgroups can have: where one
// is alone, it has code of its own.
template <int Keys, bool Outputs, class F> DEVICE void multiply_chunks(const F &f) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    if constexpr (Stage::most_groups > 1) {
        if constexpr (Outputs) {
            if (groups<Stage>() == 1) {
                arch::take_registers<lone_registers>();
                f();
                arch::end_wave();
            }
        }
        arch::take_registers<shared_registers>();
    }
    f();
}

} // namespace prefill
