// Walks of the backward on sm_90a (wgmma), as ../../backward/walk.h has them: for each chunk, with all matrices
// transposed, by a warpgroup for 64 value columns, of which a warp has 16. The state is in accumulators. Accumulators
// that are rounded are the right operand of the next product, so that the chain of a chunk stays in registers.
//
//   from the first chunk to the last                      from the last chunk to the first
//     R^T  = S0^T K^T                     [V, C]            R^T   = dS1^T K^T                               [V, C]
//     E^T  = (V - exp(G) R)^T T'^T        [V, C]            dU^T  = dO'^T P + (exp(G_C - G) R)^T            [V, C]
//     S1^T = exp(G_C) S0^T                                  dX^T  = dU^T T                                  [V, C]
//            + (exp(G_C - G) beta E)^T K  [V, K]            dS0^T = exp(G_C) dS1^T + (exp(G) dO')^T Q
//                                                                   - (exp(G) dV)^T K                       [V, K]
//
// What the walks keep for the gradients lies in memory as kept.h says.
#pragma once

#include "../registers.h"
#include "copies.h"
#include "kept.h"

namespace prefill {
namespace backward {

constexpr int column_block = 16 * 128; // bytes of 16 columns of a panel

// A walk in one direction, by a warp of a warpgroup. `Keep`: stores what the gradients need. Otherwise only the last
// state is stored, in a summary.
template <class T, int Keys, bool Reverse, bool Keep> class ColumnWalk {
    typedef WalkStage<Keys> Stage;
    typedef StoreMemory<Keys> Stores;
    static constexpr int key_tiles = Keys / 16;
    static constexpr bool has_units = !__is_same(T, Bf16);
    static constexpr int step = Reverse ? -1 : 1;
    typedef Operand Operands[tiles][1];

  public:
    DEVICE_MEMBER ColumnWalk(const dwk_prefill_backward_args &x, const WalkWork &work, int first, int64_t place,
                             int column, int groups)
        : x(x), work(work), ring(groups), group(arch::wave() / (u32)scan_waves),
          own_column(column + 16 * (arch::wave() % (u32)(groups * scan_waves))), rows(work.piece.range.end - first),
          stores(shared_address(prefill::ring()) + WalkLayout<Keys>::stages(groups) + arch::wave() * Stores::bytes) {
        if constexpr (Keep) {
            const int slab = own_column / kept_columns, rows_before = own_column % kept_columns / 16 * column_block;
            is_kept = slab < kept_slabs(x.prepare.value_dim);
            kept_states = kept_state(Reverse ? x.d_states : x.states, place, slab, x.prepare.value_dim) + rows_before;
            kept_tokens = rows_before + (Reverse ? kept_updates(x.d_updates, place, slab, x.prepare.value_dim)
                                                 : kept_errors(x.errors, place, slab, x.prepare.value_dim));
        }
        if constexpr (Keep && Reverse) {
            const int half = arch::lane() % 2;
            const u32 stride = (u32)x.d_v_strides.token * 2;
            char *const base =
                (char *)row_address(x.d_v, x.d_v_strides, work.piece.sequence, first, work.head) + 2 * own_column;
            d_v = base + (u64)((u32)arch::lane() / 2) * stride + 16 * half;
            d_v_access = !x.d_v || own_column + 8 * half >= x.prepare.value_dim ? not_written
                         : arch::aligned_rows(base, stride)                     ? in_one
                                                                                : by_elements;
        }
    }

    DEVICE_MEMBER void run() {
        for (int i = 0; i < 8 * key_tiles; ++i) {
            state.at[i] = 0.0f;
        }
        begin_state();
        round_state();
#pragma unroll 1
        for (int rest = work.piece.chunks - 1; rest >= 0; --rest) {
            ring.wait_full();
            if constexpr (Reverse) {
                reverse_chunk(rest == 0);
            } else {
                forward_chunk();
            }
            ring.advance();
            rows -= step * chunk;
            if constexpr (Keep) {
                const int64_t slabs = (int64_t)x.prepare.value_heads * kept_slabs(x.prepare.value_dim);
                kept_states += step * slabs * (2 * panel_bytes);
                kept_tokens += step * slabs * ((Reverse ? 1 : 2) * panel_bytes);
            }
            if constexpr (Keep && Reverse) {
                d_v -= (int64_t)chunk * (u32)(x.d_v_strides.token * 2);
            }
        }
        if constexpr (!Keep) {
            store_summary();
            return;
        }
        if (Reverse && x.d_initial && work.piece.first) {
            if (!work.has_state) {
                for (int i = 0; i < 8 * key_tiles; ++i) {
                    state.at[i] = 0.0f;
                }
            }
            scale_state(unit_of(x, work, x.unit));
            store(StateView(x.d_initial, x.d_initial_strides, x.d_initial_type, x.d_initial_value_major,
                            work.piece.sequence, work.head));
        }
        if (arch::lane() == 0) {
            arch::await_stores();
        }
    }

  private:
    // Calls f(index in the state, element of the memory) for each element of the state that lies within K and
    // `columns`.
    template <class F> DEVICE_MEMBER void each_element(const StateView &view, int columns, F f) const {
        const LaneMap at(arch::opaque(arch::lane()));
#pragma unroll
        for (int t = 0; t < key_tiles; ++t) {
#pragma unroll
            for (int e = 0; e < elements; ++e) {
                const int key = 16 * t + at.row(e), column = own_column + at.column(e);
                if ((key < x.prepare.key_dim) & (column < columns)) {
                    f(8 * t + e, key * view.key_step + column * view.value_step);
                }
            }
        }
    }
    template <int Type> DEVICE_MEMBER void load_narrow(const StateView &from) {
        each_element(from, x.prepare.value_dim, [&](int i, int64_t index) __attribute__((always_inline)) {
            state.at[i] = state::widened<Type>(((const short *)from.base)[index], 0);
        });
    }
    DEVICE_MEMBER void load(const StateView &from) {
        if (from.type == DWK_F32) {
            each_element(from, x.prepare.value_dim, [&](int i, int64_t index) __attribute__((always_inline)) {
                state.at[i] = ((const float *)from.base)[index];
            });
        } else if (from.type == DWK_F16) {
            load_narrow<DWK_F16>(from);
        } else {
            load_narrow<DWK_BF16>(from);
        }
    }
    template <int Type> DEVICE_MEMBER void store_narrow(const StateView &to) const {
        each_element(to, x.prepare.value_dim, [&](int i, int64_t index) __attribute__((always_inline)) {
            ((short *)to.base)[index] = state::narrowed<Type>(state.at[i]);
        });
    }
    DEVICE_MEMBER void store(const StateView &to) const {
        if (to.type == DWK_F32) {
            each_element(to, x.prepare.value_dim, [&](int i, int64_t index) __attribute__((always_inline)) {
                ((float *)to.base)[index] = state.at[i];
            });
        } else if (to.type == DWK_F16) {
            store_narrow<DWK_F16>(to);
        } else {
            store_narrow<DWK_BF16>(to);
        }
    }
    // The state that the walk starts from, unless zeros.
    DEVICE_MEMBER void begin_state() {
        const dwk_prefill_prepare_args &p = x.prepare;
        if (work.start >= 0) {
            load(matrix_view(boundary_of(x, work.start, work.head), p.key_dim));
        } else if (work.start == from_identity) {
            // The index of an element is its key less its column.
            each_element(matrix_view(nullptr, -1), p.key_dim, [&](int i, int64_t index) __attribute__((always_inline)) {
                state.at[i] = index == 0 ? 1.0f : 0.0f;
            });
        } else if (work.start == from_zeros) {
            return;
        } else if (Reverse) {
            if (x.d_final) {
                load(StateView(x.d_final, x.d_final_strides, x.d_final_type, x.d_final_value_major, work.piece.sequence,
                               work.head));
                scale_state(unit_of(x, work, x.per_unit));
            }
        } else if (x.initial_state && work.has_state) {
            load(StateView(x.initial_state, x.initial_strides, x.initial_type, p.flags & DWK_INITIAL_VALUE_MAJOR,
                           work.piece.sequence, work.head));
        }
    }

    // Columns of N, or those of M for both directions: the reverse one applies the transposed matrix.
    DEVICE_MEMBER void store_summary() const {
        const dwk_prefill_prepare_args &p = x.prepare;
        float *const to = boundary_of(x, work.summary, work.head);
        if (work.start != from_identity) {
            store(matrix_view(to, p.key_dim));
            return;
        }
        float *const forward = second_part(to, p);
        float *const reverse = second_part(boundary_of(x, mirrored(x, work.summary), work.head), p);
        // key + Keys column
        each_element(matrix_view(nullptr, Keys), p.key_dim, [&](int i, int64_t index) __attribute__((always_inline)) {
            const int key = (int)index % Keys, column = (int)index / Keys;
            store_high_low(forward, key, column, p.key_dim, state.at[i]);
            store_high_low(reverse, column, key, p.key_dim, state.at[i]);
        });
    }

    // Tile i of accumulators.
    template <int N> static DEVICE_MEMBER Tile tile_of(const Accumulators<N> &a, int i) {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] = a.at[8 * i + e];
        }
        return out;
    }
    template <int N> static DEVICE_MEMBER void put(Accumulators<N> &a, int i, Tile x) {
        for (int e = 0; e < elements; ++e) {
            a.at[8 * i + e] = x[e];
        }
    }
    DEVICE_MEMBER void round_state() {
        for (int t = 0; t < key_tiles; ++t) {
            reads[t][0] = rounded<T>(tile_of(state, t));
        }
        pin(reads);
    }
    DEVICE_MEMBER void scale_state(float by) {
        for (int i = 0; i < 8 * key_tiles; ++i) {
            state.at[i] *= by;
        }
    }

    // Factors of the tokens of tile i.
    DEVICE_MEMBER Tile factors(int which, int i) const {
        const f32x4 x = arch::load_shared_f32(ring.at() + Stage::factors + (which * chunk + 16 * i) * 4 +
                                              arch::opaque(arch::lane()) % 4 * 16);
        return Tile{x.x, x.y, x.x, x.y, x.z, x.w, x.z, x.w};
    }
    // V^T or dO^T of the warp's columns.
    DEVICE_MEMBER void load_given(Operands &to) const {
        const u32 from = ring.at() + Stage::given + group * panel_bytes;
        const int lane = arch::opaque(arch::lane()), chunk_of_row = arch::wave() % (u32)scan_waves * 2 + lane / 8 % 2;
        for (int i = 0; i < tiles; ++i) {
            to[i][0] = arch::load_transposed(from + swizzled(16 * i + lane / 16 * 8 + lane % 8, chunk_of_row));
        }
        pin(to);
    }

    // Descriptors of the left operands: column tile t of a matrix of the stage, and rows of 64 columns of K or Q.
    DEVICE_MEMBER u64 column_tile(u64 stage, u32 matrix, int t) const {
        return stage + ((matrix + t / 4 * panel_bytes + t % 4 * 32) >> 4);
    }
    DEVICE_MEMBER u64 row_tile(u64 stage, u32 matrix, int panel, int i) const {
        return stage + ((matrix + panel * panel_bytes + i * column_block) >> 4);
    }
    DEVICE_MEMBER u64 described_stage() const { return arch::described(ring.at()); }

    // r = K S                                                         [64, 16]
    DEVICE_MEMBER void read_state(Accumulators<tiles> &r, u64 stage) {
        arch::begin_products();
        for (int t = 0; t < key_tiles; ++t) {
            T::template multiply_async<false>(r.at, reads[t][0], column_tile(stage, Stage::k, t), t > 0);
        }
        arch::commit_products();
    }
    // a += (triangular matrix without its diagonal) tokens            [64, 16]
    DEVICE_MEMBER void multiply(Accumulators<tiles> &a, u64 stage, u32 matrix, Operands &tokens) {
        a.pin();
        pin(tokens);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            T::template multiply_async<false>(a.at, tokens[c][0], column_tile(stage, matrix, c), true);
        }
        arch::commit_products();
    }
    // state += K^T tokens or Q^T tokens                               [K, 16]. The state is pinned, or in products that
    // are queued.
    DEVICE_MEMBER void accumulate(u64 stage, u32 matrix, Operands &tokens) {
        pin(tokens);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            accumulate_panels<0>(tokens[c][0], stage, matrix, c);
        }
        arch::commit_products();
    }
    template <int Panel> DEVICE_MEMBER void accumulate_panels(Operand x, u64 stage, u32 matrix, int c) {
        if constexpr (Panel < Stage::panels) {
            float(&panel)[32] = *(float(*)[32])(state.at + 32 * Panel);
            T::template multiply_async<true>(panel, x, row_tile(stage, matrix, Panel, c), true);
            accumulate_panels<Panel + 1>(x, stage, matrix, c);
        }
    }

    // Waits until the warp's stores of the chunk before have read shared memory.
    DEVICE_MEMBER void begin_stores() const {
        if (arch::lane() == 0) {
            arch::await_store_reads<0>();
        }
        arch::wave_sync();
    }
    // Puts the rounded state where it is stored from, as the first of a chunk's tensors.
    DEVICE_MEMBER void put_state() const {
        begin_stores();
        const int lane = arch::opaque(arch::lane());
        for (int t = 0; t < key_tiles; ++t) {
            arch::store_operand(stores + Stores::state + t / 4 * column_block +
                                    swizzled(lane % 16, t % 4 * 2 + lane / 16),
                                reads[t][0]);
        }
    }
    // Puts a tensor of tokens there.
    DEVICE_MEMBER void put_tokens(u32 to, const Operands &tokens) const {
        const int lane = arch::opaque(arch::lane());
        for (int i = 0; i < tiles; ++i) {
            arch::store_operand(to + swizzled(lane % 16, 2 * i + lane / 16), tokens[i][0]);
        }
    }
    // Stores the warp's rows of all panels that a chunk keeps. One fence for all of them: it waits for every access of
    // the thread.
    DEVICE_MEMBER void store_kept() const {
        arch::publish_shared();
        arch::wave_sync();
        // The last warpgroup may be past all slabs. Not by wave(): all lanes must take part in it, and one lane stores.
        if (arch::lane() == 0 && is_kept) {
            arch::store_async(kept_states, stores + Stores::state, column_block);
            if constexpr (Stage::panels > 1) {
                arch::store_async(kept_states + panel_bytes, stores + Stores::state + column_block, column_block);
            }
            arch::store_async(kept_tokens, stores + Stores::updates, column_block);
            if constexpr (!Reverse) {
                arch::store_async(kept_tokens + panel_bytes, stores + Stores::values, column_block);
            }
            arch::commit_stores();
        }
    }
    // Stores dV: a row of the warp's columns has 32 bytes.
    DEVICE_MEMBER void store_values(const Operands &tokens) const {
        const u32 lane = arch::opaque(arch::lane()), memory = stores + Stores::values;
        // Halves of rows are exchanged in every other group of four rows.
        const u32 to = memory + (lane / 16 * 8 + lane % 8) * 32 + (lane / 8 % 2 ^ lane / 4 % 2) * 16,
                  from = memory + lane / 2 * 32 + (lane % 2 ^ lane / 8 % 2) * 16;
        for (int i = 0; i < tiles; ++i) {
            arch::store_transposed(to + i * 512, tokens[i][0]);
        }
        arch::wave_sync();
        i32x4 words[tiles];
        for (int i = 0; i < tiles; ++i) {
            words[i] = arch::load_shared(from + i * 512);
        }
        arch::wave_sync();
        const u32 stride = (u32)x.d_v_strides.token * 2;
        if (rows >= chunk && d_v_access == in_one) {
            for (int i = 0; i < tiles; ++i) {
                arch::store_b128(d_v + (u64)(16 * i) * stride, words[i]);
            }
        } else if (d_v_access != not_written) {
            for (int i = 0; i < tiles; ++i) {
                char *const at = d_v + (u64)(16 * i) * stride;
                if ((int)(16 * i + lane / 2) >= rows) {
                } else if (d_v_access == in_one) {
                    arch::store_b128(at, words[i]);
                } else {
                    for (int e = 0; e < 8; ++e) {
                        ((short *)at)[e] = (short)(words[i][e / 2] >> 16 * (e % 2));
                    }
                }
            }
        }
        arch::wave_sync(); // lanes may have left one by one, and products follow
    }

    // Stores E and its rounding error, and the state before the chunk.
    DEVICE_MEMBER void store_errors(const Accumulators<tiles> &error) const {
        Operands high, low;
        for (int i = 0; i < tiles; ++i) {
            const Tile of_token = tile_of(error, i);
            high[i][0] = rounded<T>(of_token);
            low[i][0] = rounding_of<T>(of_token, high[i][0]);
        }
        put_tokens(stores + Stores::updates, high);
        put_tokens(stores + Stores::values, low);
        store_kept();
    }
    // Stores dX, dV and the gradient of the state after the chunk.
    DEVICE_MEMBER void store_updates(const Accumulators<tiles> &update) const {
        Operands d_update, d_value;
        for (int i = 0; i < tiles; ++i) {
            const Tile of_token = tile_of(update, i);
            d_update[i][0] = rounded<T>(of_token);
            d_value[i][0] = rounded<T>(factors(of_v_factor_row, i) * of_token);
        }
        put_tokens(stores + Stores::updates, d_update);
        store_kept();
        store_values(d_value);
    }

    DEVICE_MEMBER void forward_chunk() {
        const u64 stage = described_stage();
        Operands given, right;
        // R = K S0                                                    [64, 16]
        Accumulators<tiles> error;
        read_state(error, stage);
        load_given(given);
        if constexpr (Keep) {
            put_state();
        }
        const f32x4 numbers = arch::load_shared_f32(ring.at() + Stage::numbers);
        Tile read[tiles];
        for (int i = 0; i < tiles; ++i) {
            read[i] = factors(read_factor_row, i);
        }
        arch::await_products<0>();
        error.pin();
        pin(reads);
        // V - exp(G) R
        for (int i = 0; i < tiles; ++i) {
            const Tile of_v = arch::minus_product(widened<T>(given[i][0]), read[i], tile_of(error, i));
            put(error, i, of_v);
            right[i][0] = rounded<T>(of_v);
        }
        // E = T' (V - exp(G) R)                                       [64, 16]
        multiply(error, stage, Stage::t, right);
        scale_state(numbers.x);
        for (int i = 0; i < tiles; ++i) {
            read[i] = factors(gain_factor_row, i);
        }
        arch::await_products<0>();
        error.pin();
        pin(right);
        // S1 = exp(G_C) S0 + K^T (exp(G_C - G) beta E)                [K, 16]
        Operands change;
        for (int i = 0; i < tiles; ++i) {
            change[i][0] = rounded<T>(read[i] * tile_of(error, i));
        }
        state.pin();
        accumulate(stage, Stage::k, change);
        if constexpr (Keep) {
            store_errors(error);
        }
        arch::await_products<0>();
        state.pin();
        pin(change);
        ring.give_empty();
        if constexpr (has_units) {
            scale_state(numbers.z);
        }
        round_state();
    }

    DEVICE_MEMBER void reverse_chunk(bool last) {
        const u64 stage = described_stage();
        Operands given;
        Accumulators<tiles> update;
        {
            Accumulators<tiles> within;
            // K dS1                                                   [64, 16]
            read_state(update, stage);
            // P^T dO                                                  [64, 16]
            load_given(given);
            for (int i = 0; i < tiles; ++i) {
                put(within, i, factors(of_p_factor_row, i) * widened<T>(given[i][0]));
            }
            multiply(within, stage, Stage::p, given);
            if constexpr (Keep) {
                put_state();
            }
            arch::await_products<0>();
            update.pin();
            within.pin();
            pin(reads);
            pin(given);
            // dU = P^T dO' + exp(G_C - G) K dS1                       [64, 16]
            for (int i = 0; i < tiles; ++i) {
                put(update, i, x.scale * tile_of(within, i) + factors(write_factor_row, i) * tile_of(update, i));
            }
        }
        Operands right;
        for (int i = 0; i < tiles; ++i) {
            right[i][0] = rounded<T>(tile_of(update, i));
        }
        if (last) {
            // The gradient of the initial state: rounding errors of the right operands are multiplied too.
            Operands rest;
            for (int i = 0; i < tiles; ++i) {
                rest[i][0] = rounding_of<T>(tile_of(update, i), right[i][0]);
            }
            multiply(update, stage, Stage::t, rest);
            arch::await_products<0>();
            update.pin();
            pin(rest);
        }
        // dX = T^T dU, dV = beta dX                                   [64, 16]
        multiply(update, stage, Stage::t, right);
        // dS0 = exp(G_C) dS1 + Q^T (exp(G) dO') ..                    [K, 16]
        const f32x4 numbers = arch::load_shared_f32(ring.at() + Stage::numbers);
        scale_state(numbers.x);
        load_given(given); // again: registers are few
        Operands of_q;
        for (int i = 0; i < tiles; ++i) {
            of_q[i][0] = rounded<T>(factors(of_o_factor_row, i) * widened<T>(given[i][0]));
        }
        state.pin();
        accumulate(stage, Stage::q, of_q);
        if (last) {
            Operands rest;
            load_given(given);
            for (int i = 0; i < tiles; ++i) {
                rest[i][0] = rounding_of<T>(factors(of_o_factor_row, i) * widened<T>(given[i][0]), of_q[i][0]);
            }
            arch::await_products<0>();
            update.pin();
            state.pin();
            accumulate(stage, Stage::q, rest);
            arch::await_products<0>();
            state.pin();
            pin(rest);
        }
        arch::await_products<1>();
        update.pin();
        pin(right);
        // .. - K^T (exp(G) dV)
        Operands change;
        for (int i = 0; i < tiles; ++i) {
            change[i][0] = rounded<T>(factors(of_x_factor_row, i) * tile_of(update, i));
        }
        if (has_units || last) {
            arch::await_products<0>();
            state.pin();
            pin(of_q);
            if constexpr (has_units) {
                scale_state(numbers.y);
            }
            state.pin();
        }
        if (last) {
            Operands rest;
            for (int i = 0; i < tiles; ++i) {
                rest[i][0] = rounding_of<T>(factors(of_x_factor_row, i) * tile_of(update, i), change[i][0]);
            }
            accumulate(stage, Stage::k, rest);
            arch::await_products<0>();
            state.pin();
            pin(rest);
        }
        accumulate(stage, Stage::k, change);
        if constexpr (Keep) {
            store_updates(update);
        }
        arch::await_products<0>();
        state.pin();
        pin(of_q);
        pin(change);
        ring.give_empty();
        if constexpr (has_units) {
            scale_state(numbers.z);
        }
        round_state();
    }

    const dwk_prefill_backward_args &x;
    const WalkWork work;
    RingPlace<Keys> ring;
    const int group;      // of this warp
    const int own_column; // the warp's first one
    int rows;             // rows from the first one of the chunk on, in the sequence
    const u32 stores;
    // Where the warp's columns of the chunk are kept: the state, and E or dX. Not if the warpgroup is past all slabs.
    char *kept_states, *kept_tokens;
    bool is_kept;
    // The lane's 16 bytes of its first row of dV in the chunk. It has every 16th row.
    char *d_v;
    enum { not_written, in_one, by_elements } d_v_access;
    Accumulators<key_tiles> state;
    Operand reads[key_tiles][1]; // the rounded state
};

// Registers per thread of copying and of multiplying warps. The average must not exceed the 168 that each thread is
// launched with.
constexpr int walk_copying_registers = 72, walk_multiplying_registers = 216;
static_assert(walk_copying_registers + 2 * walk_multiplying_registers <= 3 * 168, "setmaxnreg would wait forever");

// `work.slab`: number of the workgroup's columns in its matrix.
template <class T, int Keys, bool Reverse, bool Keep>
DEVICE void run_direction(const dwk_prefill_backward_args &x, const WalkWork &work, int groups) {
    const int column = work.slab * kept_columns * groups;
    const int number = work.piece.first_chunk + (Reverse ? work.piece.chunks - 1 : 0);
    const int first = work.piece.range.begin + number * chunk;
    const int64_t place = place_of(x.prepare, work.piece.first_record() + number, work.head);
    if (arch::wave() >= groups * scan_waves) {
        arch::give_registers<walk_copying_registers>();
        WalkCopier<T, Keys, Reverse>(x, work, first, place, column, groups).run();
        arch::end_wave();
    }
    arch::take_registers<walk_multiplying_registers>();
    ColumnWalk<T, Keys, Reverse, Keep>(x, work, first, place, column, groups).run();
    arch::end_wave();
}

template <class T, int Keys, bool Keep>
DEVICE void run_walk(const dwk_prefill_backward_args &x, const WalkWork &work, bool reverse, int groups) {
    if (arch::thread() == 0) {
        RingPlace<Keys>(groups).begin(groups);
    }
    arch::workgroup_sync();
    if (reverse) {
        run_direction<T, Keys, true, Keep>(x, work, groups);
    } else {
        run_direction<T, Keys, false, Keep>(x, work, groups);
    }
}

// One workgroup per (item, value head, 64 value columns for each warpgroup that multiplies, direction).
template <class T, int Keys> DEVICE void run_own_walk(const dwk_prefill_backward_args &x) {
    const dwk_prefill_prepare_args &p = x.prepare;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const int groups = walking_groups(), columns = kept_columns * groups;
    const int slabs = (u32)(p.value_dim + columns - 1) / columns;
    const int unit = arch::workgroup() / (2 * slabs), rest = arch::workgroup() - unit * 2 * slabs;
    const bool reverse = rest % 2 == 0;
    const int item = unit / p.value_heads;
    WalkWork work;
    work.piece = piece_of(x, item);
    work.head = unit - item * p.value_heads;
    work.key_head = key_head_of(p, work.head);
    work.slab = rest / 2;
    work.has_state = has_state(x, work.piece.sequence);
    const bool outermost = reverse ? work.piece.is_last() : work.piece.first;
    work.start = outermost ? from_given : reverse ? mirrored(x, work.piece.summary + 1) : work.piece.summary - 1;
    work.summary = 0;
    run_walk<T, Keys, true>(x, work, reverse, groups);
}

// One workgroup per (summary, value head, 64 columns of one of the matrices).
constexpr int own_columns = kept_columns;
template <class T, int Keys>
DEVICE void run_own_summary(const dwk_prefill_backward_args &x, const WalkWork &work, bool reverse) {
    run_walk<T, Keys, false>(x, work, reverse, 1);
}

} // namespace backward
} // namespace prefill
