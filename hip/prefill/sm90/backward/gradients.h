// Gradients of q, k and gates on sm_90a, for K of 65 to 128: the formulas are those of
// ../../backward/gradients.h.
//
// Persistent workgroups of four warpgroups. One copies: what the walk kept arrives as whole panels (kept.h), a value
// head's slab of 64 value columns at a time, in a ring of two stages; rows of K and Q in a ring of two chunks. Two
// multiply by states, each for half of the keys of dQ and dK. One has the matrices of tokens by tokens, D .* dP and
// D .* dL: their sums take as long as the products by states, and overlap with them.
//
// Rows of accumulators are tokens, columns are keys or earlier tokens. All operands are in shared memory.
#pragma once

#include "../../../dispatch.h"
#include "../../../math/norms.h"
#include "../../backward/token_gates.h"
#include "../copies.h"
#include "../registers.h"
#include "kept.h"

namespace prefill {
namespace backward {

// Factors that sums need when the stage has gone.
enum KeptFactor { kept_sum, kept_beta, kept_k_norm, kept_factors };

// Shared memory, from ring() on.
struct GradientPlaces {
    static constexpr u32 k = 0, q = 2 * panel_bytes;                         // in a slot of keys: panels of 64 keys
    static constexpr u32 key_bytes = 4 * panel_bytes;                        // two slots
    static constexpr u32 stages = 2 * key_bytes;                             // two stages
    static constexpr u32 state = 0, d_state = 2 * panel_bytes;               // in a stage: panels of 64 keys
    static constexpr u32 error = 4 * panel_bytes, low = error + panel_bytes; // E and its rounding error
    static constexpr u32 update = low + panel_bytes;                         // dX
    static constexpr u32 outputs = update + panel_bytes;                     // dO, rows are tokens
    static constexpr u32 factors = outputs + panel_bytes;                    // the record's row factors and numbers
    static constexpr u32 factor_bytes = record_numbers + 16;
    static constexpr u32 stage_bytes = factors + 2048;  // a multiple of 1024, the period of the permutation
    static constexpr u32 item = factors + factor_bytes; // 1, or 0 past the last chunk
    // Matrices of tokens by tokens: first lower tiles of D .* dL and D .* dP, f32, added up over the value heads. Then
    // three panels of 16-bit operands: D .* dL with its transposed and norms of k, D .* dP with norms of k, and D .* dP
    // with norms of q. The first lies where D .* dL was, so that D .* dP can be read later. When these have been
    // multiplied, dots: [dQ, dK][half of the keys][chunk].
    static constexpr u32 matrices = stages + 2 * stage_bytes, matrices_bytes = 3 * panel_bytes;
    static constexpr u32 lower = matrices, tile_bytes = 16 * 16 * 4, dots = matrices;
    static_assert(2 * lower_blocks * tile_bytes <= matrices_bytes && panel_bytes <= lower_blocks * tile_bytes,
                  "tiles and panels fit");
    static constexpr u32 sums = matrices + matrices_bytes; // two GradientSums
    static constexpr u32 sums_bytes = 2624;
    static constexpr u32 kept = sums + 2 * sums_bytes;             // factors of a value head, see KeptFactor
    static constexpr u32 items = kept + kept_factors * chunk * 4;  // of both slots of keys: rows, sequence, begin, head
    static constexpr u32 barriers = items + 2 * 16;                // see below
    static constexpr u32 dynamic_bytes = barriers + 10 * 8 + 1024; // 1024 for alignment
    static_assert(item + 32 <= factors + 2048 && factor_bytes % 16 == 0, "row factors fit");
    static_assert(dynamic_bytes <= arch::Traits::shared_bytes, "fits");

    static DEVICE_MEMBER u32 barrier(int number) { return shared_address(ring()) + barriers + 8 * number; }
    static DEVICE_MEMBER u32 full(int slot) { return barrier(slot); }
    static DEVICE_MEMBER u32 empty(int slot) { return barrier(2 + slot); }
    static DEVICE_MEMBER u32 sums_full(int slot) { return barrier(4 + slot); }
    static DEVICE_MEMBER u32 sums_empty(int slot) { return barrier(6 + slot); }
    static DEVICE_MEMBER u32 keys_empty(int slot) { return barrier(8 + slot); }
};

constexpr int key_groups = 2; // warpgroups of half of the keys each
constexpr int key_threads = key_groups * group_threads, key_waves = key_groups * scan_waves;
constexpr int multiplying_threads = key_threads + group_threads; // and the warpgroup of the matrices
constexpr int multiplying_waves = key_waves + scan_waves;
constexpr int gradient_copying_waves = 2, gate_waves = 2;
constexpr int gradient_copying_threads = gradient_copying_waves * arch::lanes;
constexpr int own_gradient_threads = multiplying_threads + group_threads;
constexpr int gradient_copying_registers = 40, key_registers = 168, matrix_registers = 136;
static_assert(gradient_copying_registers + key_groups * key_registers + matrix_registers <= 4 * 128,
              "setmaxnreg would wait forever");

// Barriers of warpgroups that multiply.
enum GradientBarrier {
    keys_barrier = 1,     // the key groups
    panels_barrier = 2,   // key groups have multiplied the last chunk's matrices: they may be overwritten
    matrices_barrier = 3, // the matrices are there
    own_barrier = 4       // the warpgroup of the matrices
};

// Sums of a value head, in turn for each of the two warps that write gates.
struct GradientSums {
    // D .* dP .* (Q K^T) and D .* dL .* (K K^T), added up for a token over earlier tokens, less over later ones.
    // `rows`: elements of the token's row in the warps' matrices. `columns`: of its column in those of a warp,
    // negative. D .* dL is transposed there.
    float rows[chunk];
    float columns[scan_waves][chunk];
    float states[key_groups][chunk];  // a, of each half of the keys
    float updates[key_groups][chunk]; // b
    float betas[chunk];               // dbeta
    float whole[scan_waves];          // <dS1, S0>
};
static_assert(sizeof(GradientSums) <= GradientPlaces::sums_bytes, "fits");

// A chunk and key head.
struct GradientItem {
    int record, key_head, sequence, begin, rows;
    bool exists;
};
DEVICE GradientItem gradient_item(const dwk_prefill_backward_args &x, int number) {
    const dwk_prefill_prepare_args &p = x.prepare;
    GradientItem item;
    item.record = number / p.key_heads;
    item.key_head = number - item.record * p.key_heads;
    item.sequence = sequence_of_record(p.cu_seqlens, p.sequences, item.record);
    Rows range{0, 0};
    if (item.sequence < p.sequences) {
        range = rows_of(p.cu_seqlens, item.sequence, p.tokens);
    }
    const int chunk_number = item.record - first_record(range.begin, item.sequence);
    item.exists = chunk_number >= 0 && chunk_number < (range.end - range.begin + chunk - 1) / chunk;
    item.begin = range.begin + chunk_number * chunk;
    item.rows = min_of(range.end - item.begin, chunk);
    return item;
}

// Calls f(item, head) for each value head of the workgroup's chunks, and skip(number) for items that have none.
template <class F, class Skip>
DEVICE void each_gradient_head(const dwk_prefill_backward_args &x, const F &f, const Skip &skip) {
    const dwk_prefill_prepare_args &p = x.prepare;
#pragma unroll 1
    for (int number = arch::workgroup(); number < (x.records + 1) * p.key_heads; number += arch::workgroups_here()) {
        const GradientItem item = gradient_item(x, number);
        if (!item.exists) {
            skip(number);
            continue;
        }
#pragma unroll 1
        for (int v = 0; v < p.group_heads; ++v) {
            f(item, dispatch::value_head(p, item.key_head, p.group_heads, v), v == 0);
        }
    }
}

// Copies what the chunks of this workgroup need, stage after stage.
class GradientCopier {
    typedef GradientPlaces P;

  public:
    DEVICE_MEMBER explicit GradientCopier(const dwk_prefill_backward_args &x)
        : x(x), slabs(kept_slabs(x.prepare.value_dim)), thread(arch::thread() - multiplying_threads) {}

    DEVICE_MEMBER void run() {
        const dwk_prefill_prepare_args &p = x.prepare;
        int chunks = -1;
        each_gradient_head(
            x,
            [&](const GradientItem &item, int head, bool first) __attribute__((always_inline)) {
                chunks += first;
                const u32 keys = memory() + chunks % 2 * P::key_bytes;
#pragma unroll 1
                for (int s = 0; s < slabs; ++s) {
                    begin_stage();
                    const bool with_keys = first && s == 0;
                    if (with_keys) {
                        begin_keys(item, chunks);
                    }
                    copy_panels(item, head, s);
                    bool whole = true;
                    if (with_keys) {
#pragma unroll 1
                        for (int panel = 0; panel < 2; ++panel) {
                            whole &= copy_rows(keys + P::k + panel * panel_bytes, p.k, p.k_strides, item, item.key_head,
                                               64 * panel, p.key_dim);
                            whole &= copy_rows(keys + P::q + panel * panel_bytes, p.q, p.q_strides, item, item.key_head,
                                               64 * panel, p.key_dim);
                        }
                    }
                    whole &= copy_rows(stage_at() + P::outputs, x.d_o, x.d_o_strides, item, head, 64 * s, p.value_dim);
                    if (whole) {
                        arch::phase_arrive_after_copies(P::full(stage % 2));
                    } else {
                        arch::await_copies();
                        arch::publish_shared();
                        arch::phase_arrive(P::full(stage % 2));
                    }
                    ++stage;
                }
            },
            [](int) {});
        // Tells the warps that multiply that nothing follows.
        begin_stage();
        if (thread == 0) {
            store_shared(stage_at() + P::item, i32x4{});
            arch::phase_arrive(P::full(stage % 2));
        }
        arch::await_copies();
        arch::phase_arrive(P::full(stage % 2));
    }

  private:
    // Opaque: registers should not hold it through a loop.
    static DEVICE_MEMBER u32 memory() { return (u32)arch::opaque((int)shared_address(ring())); }
    DEVICE_MEMBER u32 stage_at() const { return memory() + P::stages + stage % 2 * P::stage_bytes; }
    // Waits until the stage is empty.
    DEVICE_MEMBER void begin_stage() const {
        if (stage >= 2) {
            arch::phase_wait(P::empty(stage % 2), stage / 2 - 1);
        }
    }
    // Waits until the chunk's slot of keys is empty, and says there what the chunk is. Before an arrival at `full`.
    DEVICE_MEMBER void begin_keys(const GradientItem &item, int chunks) const {
        if (chunks >= 2) {
            arch::phase_wait(P::keys_empty(chunks % 2), chunks / 2 - 1);
        }
        if (thread == 0) {
            store_shared(memory() + P::items + chunks % 2 * 16,
                         i32x4{item.rows, item.sequence, item.begin, item.key_head});
        }
    }

    // By one thread.
    DEVICE_MEMBER void copy_panels(const GradientItem &item, int head, int s) const {
        if (thread != 0) {
            return;
        }
        const int64_t place = place_of(x.prepare, item.record, head);
        const u32 to = stage_at(), full = P::full(stage % 2);
        store_shared(to + P::item, i32x4{1, 0, 0, 0});
        const int columns = x.prepare.value_dim;
        arch::phase_arrive_expecting(full, 7 * panel_bytes + P::factor_bytes);
        arch::copy_bulk(to + P::state, kept_state(x.states, place, s, columns), 2 * panel_bytes, full);
        arch::copy_bulk(to + P::d_state, kept_state(x.d_states, place, s, columns), 2 * panel_bytes, full);
        arch::copy_bulk(to + P::error, kept_errors(x.errors, place, s, columns), 2 * panel_bytes, full);
        arch::copy_bulk(to + P::update, kept_updates(x.d_updates, place, s, columns), panel_bytes, full);
        arch::copy_bulk(to + P::factors, record_of(x.prepare, item.record, head), P::factor_bytes, full);
    }
    // Rows of a chunk, 64 columns from `column` on, to a panel. Past the chunk's rows and past `columns` come zeros.
    // Returns whether the copies are asynchronous.
    DEVICE_MEMBER bool copy_rows(u32 to, const void *from, const dwk_token_strides &strides, const GradientItem &item,
                                 int head, int column, int columns) const {
        const u32 stride = (u32)strides.token * 2;
        const char *const base = row_address(from, strides, item.sequence, item.begin, head) + 2 * column;
        const bool aligned = arch::aligned_rows(base, stride);
        const int group = thread % 8u, first = thread / 8u;
        constexpr int at_once = gradient_copying_threads / 8;
        const auto inside = [&](int row) { return (row < item.rows) & (column + 8 * group < columns); };
        if (aligned) {
            for (int i = 0; i < chunk / at_once; ++i) {
                const int row = first + i * at_once;
                copy_async(to + swizzled(row, group), base + (u64)row * stride + 16 * group, inside(row));
            }
        } else {
#pragma unroll 1
            for (int row = first; row < chunk; row += at_once) {
                copy_any(to + swizzled(row, group), base + (u64)row * stride + 16 * group, false, inside(row));
            }
        }
        return aligned;
    }

    const dwk_prefill_backward_args &x;
    const int slabs, thread;
    int stage = 0;
};

// Writes the gradients of the gates of every other value head, by one warp.
class GateWriter {
    typedef GradientPlaces P;

  public:
    DEVICE_MEMBER GateWriter(const dwk_prefill_backward_args &x, int slot) : x(x), slot(slot) {}

    // `skip`(number, thread): of an item that has no chunk, by gate_waves warps.
    template <class Skip> DEVICE_MEMBER void run(const Skip &skip) {
        int heads = 0;
        each_gradient_head(
            x,
            [&](const GradientItem &item, int head, bool) __attribute__((always_inline)) {
                if (heads % gate_waves == slot) {
                    arch::phase_wait(P::sums_full(slot), heads / gate_waves);
                    write_gates(item, head, ((const GradientSums *)(ring() + P::sums))[slot]);
                    arch::wave_sync();
                    if (arch::lane() == 0) {
                        arch::phase_arrive(P::sums_empty(slot));
                    }
                }
                ++heads;
            },
            [&](int number) __attribute__((always_inline)) { skip(number, slot * arch::lanes + arch::lane()); });
    }

  private:
    DEVICE_MEMBER void write_gates(const GradientItem &item, int head, const GradientSums &from) const {
        const int lane = arch::lane();
        const char *const factors = record_of(x.prepare, item.record, head);
        const float total = numbers_of(factors).total;
        float whole = 0.0f;
        for (int w = 0; w < scan_waves; ++w) {
            whole += from.whole[w];
        }
        whole *= arch::exp2(total);
        // Lane l has token 63 - l, then token 31 - l, for sums over later tokens; and token l, then 32 + l, over
        // earlier.
        float later[2], earlier[2];
        for (int h = 0; h < 2; ++h) {
            const int token = chunk - 1 - arch::lanes * h - lane;
            float sum = from.states[0][token] + from.states[1][token] + from.rows[token];
            for (int w = 0; w < scan_waves; ++w) {
                sum -= from.columns[w][token];
            }
            later[h] = arch::inclusive_sum(sum);
            const int before = arch::lanes * h + lane - 1;
            earlier[h] = arch::inclusive_sum(before >= 0 ? from.updates[0][before] + from.updates[1][before] : 0.0f);
        }
        later[1] += arch::read_lane(later[0], arch::lanes - 1);
        earlier[1] += arch::read_lane(earlier[0], arch::lanes - 1);
        float of_a_log = 0.0f, of_dt_bias = 0.0f;
        for (int h = 0; h < 2; ++h) {
            const int token = arch::lanes * h + lane;
            // Sums over later tokens of token 32 h + l are in lane 31 - l, in the other half.
            const float d_gate = arch::read_lane(later[1 - h], arch::lanes - 1 - lane) + earlier[h] + whole;
            float d_a_log = 0.0f, d_dt_bias = 0.0f;
            if (token < item.rows) {
                write_token_gates(x, item.sequence, item.begin, head, factors, token, d_gate, from.betas[token],
                                  d_a_log, d_dt_bias);
            }
            of_a_log += arch::inclusive_sum(d_a_log);
            of_dt_bias += arch::inclusive_sum(d_dt_bias);
        }
        if (lane == arch::lanes - 1) {
            float *const to = x.partials + 2 * place_of(x.prepare, item.record, head);
            to[0] = of_a_log;
            to[1] = of_dt_bias;
        }
    }

    const dwk_prefill_backward_args &x;
    const int slot;
};

// a (+)= left right over 64 contracted elements. `Rows..`: whether these lie in rows of a panel, not along them.
// Addresses are opaque: registers should not hold them through a loop.
template <class T, bool RowsOfRight, bool RowsOfLeft>
DEVICE void multiply_panels(Accumulators<tiles> &a, u32 right, u32 left, bool adds) {
    const u64 of_right = arch::described((u32)arch::opaque((int)right)),
              of_left = arch::described((u32)arch::opaque((int)left));
    for (int i = 0; i < tiles; ++i) {
        T::template multiply_async_shared<RowsOfRight, RowsOfLeft>(
            a.at, of_right + i * ((RowsOfRight ? 16 * 128 : 32) >> 4),
            of_left + i * ((RowsOfLeft ? 16 * 128 : 32) >> 4), adds || i > 0);
    }
}

// What warpgroups that multiply have in common.
template <class T> class GradientMultiplier {
  protected:
    typedef GradientPlaces P;

    DEVICE_MEMBER explicit GradientMultiplier(const dwk_prefill_backward_args &x)
        : x(x), slabs(kept_slabs(x.prepare.value_dim)), own(arch::wave() % scan_waves) {}

    // Opaque: registers should not hold what is computed from them through a loop.
    static DEVICE_MEMBER u32 memory() { return (u32)arch::opaque((int)shared_address(ring())); }
    static DEVICE_MEMBER int own_lane() { return arch::opaque(arch::lane()); }
    DEVICE_MEMBER int own_row() const { return arch::opaque(16 * own) + (u32)own_lane() / 4; }

    // A lane's rows are own_row() and 8 more. Element i of accumulators: of the lane's row which_row(i), and of the
    // column column_of(lane, i).
    static constexpr int which_row(int i) { return i / 2 % 2; }
    static DEVICE_MEMBER int column_of(int lane, int i) { return i / 4 * 8 + (u32)lane % 4 * 2 + i % 2; }
    // The lane's first word in a panel of 16-bit numbers. Opaque: registers should not hold places through a loop.
    DEVICE_MEMBER u32 first_word(u32 panel) const {
        return (u32)arch::opaque((int)(panel + swizzled(own_row(), 0) + (u32)own_lane() % 4 * 4));
    }
    // The word of elements i and i + 1, i even.
    static DEVICE_MEMBER u32 place_of_word(u32 first, int i) { return (first ^ i / 4 << 4) + which_row(i) * (8 * 128); }

    // Where the lane's row of a panel is, for load_operand and store_operand: of the columns of elements 0 to 7, and of
    // elements i to i + 7.
    DEVICE_MEMBER u32 first_row(u32 panel) const {
        const u32 lane = own_lane();
        return (u32)arch::opaque((int)(panel + swizzled(16 * own + lane % 16, lane / 16)));
    }
    static DEVICE_MEMBER u32 columns_from(u32 first, int i) { return first ^ i / 8 << 5; }

    DEVICE_MEMBER u32 stage_at() const { return memory() + P::stages + stage % 2 * P::stage_bytes; }
    // Waits for the stage. Returns whether it has a chunk: past the last one, none follows.
    DEVICE_MEMBER bool await_stage() const {
        arch::phase_wait(P::full(stage % 2), stage / 2);
        return arch::load_shared_word(stage_at() + P::item) != 0;
    }
    // Address of the stage's factors of the lane's first row. of_row: factor of its row r.
    DEVICE_MEMBER u32 row_factors() const { return (u32)arch::opaque((int)(stage_at() + P::factors + own_row() * 4)); }
    static DEVICE_MEMBER float of_row(u32 factors, int which, int r) {
        return arch::load_shared_number(factors + (which * chunk + 8 * r) * 4);
    }
    // Sum over the four lanes that have a row.
    static DEVICE_MEMBER float sum_of_row(float x) {
        x += arch::exchanged(x, 1);
        return x + arch::exchanged(x, 2);
    }
    // Writes sums of the lane's two rows, which are parts of four lanes each.
    DEVICE_MEMBER void put_rows(float *to, const float (&x)[2]) const {
        const int lane = own_lane(), row = own_row();
        for (int r = 0; r < 2; ++r) {
            const float sum = sum_of_row(x[r]);
            if (lane % 4 == 0) {
                to[row + 8 * r] = sum;
            }
        }
    }
    // Goes on to the next stage, and gives this one back.
    DEVICE_MEMBER void release() {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(P::empty(stage % 2));
        }
        ++stage;
    }
    // Gives the chunk's slot of keys back.
    DEVICE_MEMBER void release_keys() const {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(P::keys_empty(slot));
        }
    }
    // Memory for the sums of the next value head, until it is given.
    DEVICE_MEMBER GradientSums &await_sums() const {
        const int slot = heads % gate_waves;
        if (heads >= gate_waves) {
            arch::phase_wait(P::sums_empty(slot), heads / gate_waves - 1);
        }
        return ((GradientSums *)(ring() + P::sums))[slot];
    }
    DEVICE_MEMBER void give_sums() {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(P::sums_full(heads % gate_waves));
        }
        ++heads;
    }

    const dwk_prefill_backward_args &x;
    const int slabs, own; // own: number of the warp in its warpgroup
    int slot;             // of the chunk's keys
    u32 keys;             // its address
    int stage = 0, heads = 0;
};

// Multiplies by states, for half `Group` of the keys, and ends the chunk.
template <class T, int Group> class KeyMultiplier : GradientMultiplier<T> {
    typedef GradientMultiplier<T> Base;
    typedef GradientPlaces P;
    using Base::put_rows, Base::release, Base::release_keys;
    using Base::which_row, Base::first_row, Base::columns_from, Base::stage_at, Base::row_factors, Base::of_row;
    using Base::x, Base::memory, Base::slabs, Base::own_row, Base::slot, Base::keys;

  public:
    DEVICE_MEMBER explicit KeyMultiplier(const dwk_prefill_backward_args &x) : Base(x) {}

    DEVICE_MEMBER void run() {
#pragma unroll 1
        for (int chunks = 0; this->await_stage(); ++chunks) {
            slot = chunks % 2;
            keys = memory() + slot * P::key_bytes;
            // Reads of the last chunk's matrices and dots are over.
            arch::barrier_arrive(panels_barrier, multiplying_threads);
            for (int i = 0; i < 32; ++i) {
                d_query.at[i] = d_key.at[i] = 0.0f;
            }
            // Loops of at least one turn: registers of results would otherwise be copied for none.
            int heads_left = x.prepare.group_heads;
#pragma unroll 1
            do {
                add_head();
            } while (--heads_left > 0);
            finish();
        }
    }

  private:
    // Barrier of both key groups.
    static DEVICE_MEMBER void sync() { arch::barrier_wait(keys_barrier, key_threads); }

    // Adds the lane's part of the dot products of the rows of `a` and of the panel.
    DEVICE_MEMBER void add_products(float (&to)[2], const Accumulators<tiles> &a, u32 panel) const {
        const u32 rows = first_row(panel);
        for (int i = 0; i < 32; i += 8) {
            const i32x4 words = arch::load_operand(columns_from(rows, i));
            for (int e = 0; e < 8; e += 2) {
                to[which_row(e)] += a.at[i + e] * T::low(words[e / 2]);
                to[which_row(e)] += a.at[i + e + 1] * T::high(words[e / 2]);
            }
        }
    }
    // Adds a product that has arrived, row by row `by`, and its dot products with the rows of the panel.
    DEVICE_MEMBER void add(float (&dot)[2], Accumulators<tiles> &to, const float (&by)[2], Accumulators<tiles> &product,
                           u32 panel) const {
        product.pin();
        for (int i = 0; i < 32; ++i) {
            to.at[i] += by[which_row(i)] * product.at[i];
        }
        add_products(dot, product, panel);
        // Sums are pinned, too: the compiler would put them off beyond the next products, and spill.
        product.pin();
        to.pin();
        arch::pin(dot[0]);
        arch::pin(dot[1]);
    }
    // Adds a value head.
    DEVICE_MEMBER void add_head() {
        float read_q[2] = {}, read_k[2] = {}, write[2] = {};
        float of_out[2], of_error[2], of_update[2];
        int s = 0;
#pragma unroll 1
        do {
            this->await_stage();
            arch::publish_shared();
            const u32 at = stage_at();
            if (s == 0) {
                const float total = arch::load_shared_number(at + P::factors + record_numbers + 8);
                const u32 factors = row_factors();
                for (int r = 0; r < 2; ++r) {
                    const float sum = of_row(factors, sum_row, r), beta = of_row(factors, beta_row, r);
                    const float decay = arch::exp2(sum);
                    of_out[r] = x.scale * decay;
                    of_error[r] = arch::exp2(total - sum) * beta;
                    of_update[r] = -decay * beta;
                    q_norm[r] = of_row(factors, q_norm_row, r);
                    k_norm[r] = of_row(factors, k_norm_row, r);
                }
            }
            // Two products at a time: registers hold no third.
            Accumulators<tiles> first, second;
            arch::begin_products();
            // dO S0^T                                                       [64 tokens, 64 keys]
            multiply_panels<T, false, true>(first, at + P::outputs, at + P::state + half, false);
            arch::commit_products();
            // E dS1^T
            multiply_panels<T, true, true>(second, at + P::error, at + P::d_state + half, false);
            arch::commit_products();
            arch::await_products<1>();
            add(read_q, d_query, of_out, first, keys + P::q + half);
            arch::begin_products();
            // dX S0^T
            multiply_panels<T, true, true>(first, at + P::update, at + P::state + half, false);
            arch::commit_products();
            arch::await_products<1>();
            add(write, d_key, of_error, second, keys + P::k + half);
            arch::await_products<0>();
            first.pin();
            release();
            add(read_k, d_key, of_update, first, keys + P::k + half);
        } while (++s < slabs);
        float of_states[2], of_updates[2];
        for (int r = 0; r < 2; ++r) {
            of_states[r] = read_q[r] * (of_out[r] * q_norm[r]) + read_k[r] * (of_update[r] * k_norm[r]);
            of_updates[r] = write[r] * (of_error[r] * k_norm[r]);
        }
        GradientSums &to = this->await_sums();
        put_rows(to.states[Group], of_states);
        put_rows(to.updates[Group], of_updates);
        this->give_sums();
    }

    // dQ += (D .* dP) K, dK += (D .* dP)^T Q + (D .* dL + (D .* dL)^T) K, of all value heads; norms; stores.
    DEVICE_MEMBER void finish() {
        const u32 both_l = memory() + P::matrices, from_p = both_l + panel_bytes, to_p = from_p + panel_bytes;
        arch::barrier_wait(matrices_barrier, multiplying_threads);
        d_query.pin();
        d_key.pin();
        arch::begin_products();
        multiply_panels<T, false, true>(d_query, from_p, keys + P::k + half, true);
        multiply_panels<T, true, true>(d_key, to_p, keys + P::q + half, true);
        multiply_panels<T, false, true>(d_key, both_l, keys + P::k + half, true);
        arch::commit_products();
        arch::await_products<0>();
        d_query.pin();
        d_key.pin();
        sync(); // of all warps: matrices, K and Q may be overwritten
        if (x.prepare.flags & DWK_QK_L2NORM) {
            // dx = r (dy - y (y . dy)), with y = r x. A row of zeros has r = 1000.
            float(&dots)[2][2][chunk] = *(float(*)[2][2][chunk])(ring() + P::dots);
            float of_q[2] = {}, of_k[2] = {};
            add_products(of_q, d_query, keys + P::q + half);
            add_products(of_k, d_key, keys + P::k + half);
            put_rows(dots[0][Group], of_q);
            put_rows(dots[1][Group], of_k);
            sync();
            differentiate_norm(d_query, q_norm, dots[0], keys + P::q + half);
            differentiate_norm(d_key, k_norm, dots[1], keys + P::k + half);
        }
        // In place of Q and K: a warp has itself read the words that it overwrites.
        put_panel(keys + P::q + half, d_query);
        put_panel(keys + P::k + half, d_key);
        GradientItem item;
        const u32 of_slot = memory() + P::items + slot * 16;
        item.rows = arch::load_shared_word(of_slot);
        item.sequence = arch::load_shared_word(of_slot + 4);
        item.begin = arch::load_shared_word(of_slot + 8);
        item.key_head = arch::load_shared_word(of_slot + 12);
        sync();
        store_rows(item, keys + P::q, x.d_q, x.d_q_strides);
        store_rows(item, keys + P::k, x.d_k, x.d_k_strides);
        release_keys();
    }
    // Puts rounded accumulators to a panel.
    DEVICE_MEMBER void put_panel(u32 panel, const Accumulators<tiles> &a) const {
        const u32 rows = first_row(panel);
        for (int i = 0; i < 32; i += 8) {
            i32x4 words;
            for (int e = 0; e < 4; ++e) {
                words[e] = T::pack(x.unit * a.at[i + 2 * e], x.unit * a.at[i + 2 * e + 1]);
            }
            arch::store_operand(columns_from(rows, i), words);
        }
    }
    DEVICE_MEMBER void differentiate_norm(Accumulators<tiles> &own, const float (&norm)[2],
                                          const float (&dots)[2][chunk], u32 panel) const {
        const int row = own_row();
        float r[2], along[2];
        for (int i = 0; i < 2; ++i) {
            along[i] = (dots[0][row + 8 * i] + dots[1][row + 8 * i]) * norm[i] * norm[i];
            r[i] = norm[i] == 0.0f ? math::inverse_norm(0.0f) : norm[i];
        }
        const u32 rows = first_row(panel);
        for (int i = 0; i < 32; i += 8) {
            const i32x4 words = arch::load_operand(columns_from(rows, i));
            for (int e = 0; e < 8; ++e) {
                const float number = e % 2 ? T::high(words[e / 2]) : T::low(words[e / 2]);
                own.at[i + e] = (own.at[i + e] - number * along[which_row(e)]) * r[which_row(e)];
            }
        }
    }
    // Stores rows of dQ or dK from two panels.
    DEVICE_MEMBER void store_rows(const GradientItem &item, u32 panels, void *to,
                                  const dwk_token_strides &strides) const {
        if (!to) {
            return;
        }
        const u32 stride = (u32)strides.token * 2;
        char *const base = (char *)row_address(to, strides, item.sequence, item.begin, item.key_head);
        const bool aligned = arch::aligned_rows(base, stride);
        const int group = arch::thread() % 16u, first = arch::thread() / 16u;
        constexpr int at_once = key_threads / 16;
#pragma unroll 1
        for (int i = 0; i < chunk / at_once; ++i) {
            const int own = first + i * at_once;
            if ((own < item.rows) & (8 * group < x.prepare.key_dim)) {
                const i32x4 words = arch::load_shared(panels + group / 8 * panel_bytes + swizzled(own, group % 8));
                char *const place = base + (u64)own * stride + 16 * group;
                if (aligned) {
                    arch::store_b128(place, words);
                } else {
                    for (int w = 0; w < 8; ++w) {
                        ((short *)place)[w] = (short)(words[w / 2] >> 16 * (w % 2));
                    }
                }
            }
        }
    }

    static constexpr u32 half = Group * panel_bytes;
    Accumulators<tiles> d_query, d_key; // [64 tokens, 64 keys]
    float q_norm[2], k_norm[2];         // of the lane's rows
};

// Multiplies tokens by tokens: D .* dP and D .* dL of each value head, their sums for the gates, and their sums over
// value heads, as operands for the key groups.
template <class T> class MatrixMultiplier : GradientMultiplier<T> {
    typedef GradientMultiplier<T> Base;
    typedef GradientPlaces P;
    using Base::put_rows, Base::release, Base::release_keys;
    using Base::which_row, Base::column_of, Base::first_word, Base::place_of_word, Base::stage_at, Base::row_factors,
        Base::of_row;
    using Base::x, Base::memory, Base::slabs, Base::own_lane, Base::own, Base::own_row, Base::slot, Base::keys,
        Base::stage;

  public:
    DEVICE_MEMBER explicit MatrixMultiplier(const dwk_prefill_backward_args &x) : Base(x) {}

    DEVICE_MEMBER void run() {
#pragma unroll 1
        for (int chunks = 0; this->await_stage(); ++chunks) {
            slot = chunks % 2;
            keys = memory() + slot * P::key_bytes;
            int heads_left = x.prepare.group_heads;
            bool first = true;
#pragma unroll 1
            do {
                add_head(first);
                first = false;
            } while (--heads_left > 0);
            finish();
        }
    }

  private:
    // A warp has 16 rows of D .* dP and of the transposed of D .* dL: of the first the tiles up to the diagonal, of the
    // second those from it on. So every warp has five tiles, two of them on the diagonal. Whether tile t is only in D
    // .* dL:
    DEVICE_MEMBER bool is_later(int t) const { return t > own; }
    // A lane's part of tile t of D .* dL, or of D .* dP, in shared memory.
    DEVICE_MEMBER u32 lower_place(bool of_l, int t) const {
        const int other = arch::opaque(own); // registers should not hold places through a loop
        const int row = of_l ? t : other, column = of_l ? other : t;
        return memory() + P::lower + ((of_l ? 0 : lower_blocks) + lower_block(row, column)) * P::tile_bytes +
               own_lane() * 16;
    }
    static DEVICE_MEMBER Tile load_lower(u32 at) {
        const f32x4 x = arch::load_shared_f32(at), y = arch::load_shared_f32(at + P::tile_bytes / 2);
        return Tile{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    }
    DEVICE_MEMBER void load_all(Tile (&to)[tiles], bool of_l) const {
        for (int t = 0; t < tiles; ++t) {
            to[t] = (of_l ? t < own : t > own) ? Tile{} : load_lower(lower_place(of_l, t));
        }
    }
    static DEVICE_MEMBER void store_lower(u32 at, const Tile &x) {
        for (int h = 0; h < 2; ++h) {
            store_shared(at + h * (P::tile_bytes / 2), i32x4{bits<int>(x[4 * h]), bits<int>(x[4 * h + 1]),
                                                             bits<int>(x[4 * h + 2]), bits<int>(x[4 * h + 3])});
        }
    }
    // Barrier of the warpgroup.
    static DEVICE_MEMBER void sync() { arch::barrier_wait(own_barrier, group_threads); }
    // Keeps factors of the value head for after its last stage. Every warp writes all of them, and reads what it has
    // written.
    DEVICE_MEMBER void keep_factors() const {
        sync(); // no warp reads those of the value head before
        const u32 own_kept = kept() + own_lane() * 4, factors = stage_at() + P::factors + own_lane() * 4;
        const auto keep = [&](KeptFactor to, RowFactor from) __attribute__((always_inline)) {
            for (int h = 0; h < 2; ++h) {
                arch::store_shared_word(own_kept + (to * chunk + h * arch::lanes) * 4,
                                        arch::load_shared_word(factors + (from * chunk + h * arch::lanes) * 4));
            }
        };
        keep(kept_sum, sum_row);
        keep(kept_beta, beta_row);
        keep(kept_k_norm, k_norm_row);
        arch::wave_sync();
    }
    // Address of the factors, see KeptFactor.
    DEVICE_MEMBER u32 kept() const { return memory() + P::kept; }
    // Kept factors of the lane's first columns, and of the columns of elements i and i + 1.
    DEVICE_MEMBER u32 kept_columns() const { return (u32)arch::opaque((int)(kept() + (u32)own_lane() % 4 * 8)); }
    static DEVICE_MEMBER f32x2 pair_of(u32 first, int which, int i) {
        return arch::load_shared_pair(first + (which * chunk + i / 4 * 8) * 4);
    }
    // Adds up a lane's columns of a tile over the eight lanes that have them, and stores the sums. x[2 n + c]: of
    // column 8 n + c of the lane's. Two steps leave a lane half of the columns.
    DEVICE_MEMBER void put_columns(float *to, const float (&x)[4]) const {
        const auto add_half = [](bool upper, float low, float high, int step) __attribute__((always_inline)) {
            return (upper ? high : low) + arch::exchanged(upper ? low : high, step);
        };
        const int lane = own_lane();
        const bool second = lane & 16, odd = lane & 8;
        const float half = add_half(odd, add_half(second, x[0], x[2], 16), add_half(second, x[1], x[3], 16), 8);
        const float whole = half + arch::exchanged(half, 4);
        if ((lane & 4) == 0) {
            to[(second ? 8 : 0) + (u32)lane % 4 * 2 + (odd ? 1 : 0)] = whole;
        }
    }
    static DEVICE_MEMBER float chosen(bool second, float x, float y) { return second ? y : x; }
    // Tile `own` of the warp's rows.
    DEVICE_MEMBER Tile own_tile(const Accumulators<tiles> &x) const {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] =
                chosen(own & 2, chosen(own & 1, x.at[e], x.at[8 + e]), chosen(own & 1, x.at[16 + e], x.at[24 + e]));
        }
        return out;
    }
    // Diagonal of a tile, where the lane holds it: element of its row r goes to to[r], which is 0 elsewhere.
    DEVICE_MEMBER void diagonal_of(float (&to)[2], const Tile &x) const {
        const int lane = own_lane(), row = lane / 4, column = (u32)lane % 4 * 2;
        for (int r = 0; r < 2; ++r) {
            to[r] = row == column ? x[6 * r] : row == column + 1 ? x[6 * r + 1] : 0.0f;
        }
    }
    // Factors of the lane's rows.
    struct RowFactors {
        float sum[2], beta[2];
    };
    // D .* dP in place of tile t of dP or, transposed, D .* dL in place of that of dL. Adds it to the tile of the value
    // heads before. Leaves what is strictly below the diagonal, or above it. `diagonal`: whether the tile is on it.
    DEVICE_MEMBER void decay(Tile &tile, bool of_l, int t, const RowFactors &rows, bool diagonal) const {
        const u32 of_pairs = (u32)arch::opaque((int)(kept_columns() + 16 * t * 4));
        const float sign = of_l ? -1.0f : 1.0f;
        float sum[2], by[2];
        for (int r = 0; r < 2; ++r) {
            sum[r] = sign * rows.sum[r];
            by[r] = of_l ? -rows.beta[r] : x.scale;
        }
        for (int e = 0; e < elements; e += 4) {
            const f32x2 sums = pair_of(of_pairs, kept_sum, e), beta = pair_of(of_pairs, kept_beta, e);
            for (int i = e; i < e + 4; ++i) {
                const int r = which_row(i), c = i % 2;
                tile[i] *= arch::exp2(__builtin_fmaf(-sign, sums[c], sum[r])) * (beta[c] * by[r]);
            }
        }
        const int lane = own_lane();
        const auto after = [&](int i) __attribute__((always_inline)) { // of the row, after the column
            const int of_row = (u32)lane / 4 + 8 * which_row(i), of_column = column_of(lane, i);
            return of_l ? of_column - of_row : of_row - of_column;
        };
        if (diagonal) {
            // Elements of earlier tokens than the other's may be anything.
            for (int i = 0; i < elements; ++i) {
                tile[i] = after(i) < (of_l ? 1 : 0) ? 0.0f : tile[i];
            }
        }
        const u32 at = lower_place(of_l, t);
        store_lower(at, load_lower(at) + tile);
        if (diagonal && !of_l) {
            for (int i = 0; i < elements; ++i) {
                tile[i] = after(i) == 0 ? 0.0f : tile[i];
            }
        }
    }
    // Adds the products of a tile with Q K^T or K K^T, which are divided by the norms, to the sums of the lane's rows
    // and columns, of later tokens less earlier ones. Sums of columns are negative.
    DEVICE_MEMBER void add_tile(const Tile &products, bool of_l, int t, float (&of_rows)[2],
                                float (&of_columns)[4]) const {
        const u32 of_pairs = kept_columns() + 16 * t * 4;
        float sums[2] = {}, by[2];
        for (int r = 0; r < 2; ++r) {
            by[r] = of_l ? -k_norm[r] : q_norm[r];
        }
        for (int e = 0; e < elements; e += 4) {
            const f32x2 norm = pair_of(of_pairs, kept_k_norm, e);
            float columns[2] = {};
            for (int i = e; i < e + 4; ++i) {
                const int r = which_row(i), c = i % 2;
                sums[r] += products[i] * norm[c];
                columns[c] += products[i] * by[r];
            }
            for (int c = 0; c < 2; ++c) {
                of_columns[e / 2 + c] += columns[c] * norm[c];
            }
        }
        for (int r = 0; r < 2; ++r) {
            of_rows[r] += sums[r] * by[r];
        }
    }
    // Adds dS1 S0^T of the warp's 16 value columns: <dS1, S0> is its trace.
    DEVICE_MEMBER void add_trace(Tile &to, u32 at) const {
        const u32 lane = own_lane();
        const u32 first = (u32)arch::opaque((int)(at + swizzled(16 * own + lane % 16, lane / 16)));
        for (int panel = 0; panel < 2; ++panel) {
            for (int i = 0; i < tiles; ++i) {
                const u32 words = (first ^ i << 5) + panel * panel_bytes;
                to = T::mma(arch::load_operand(words + P::state), arch::load_operand(words + P::d_state), to);
            }
        }
    }
    DEVICE_MEMBER void put_trace(float &to, const Tile &trace) const {
        const int lane = own_lane(), row = lane / 4, column = (u32)lane % 4 * 2;
        float whole = row == column ? trace[0] + trace[6] : row == column + 1 ? trace[1] + trace[7] : 0.0f;
        for (int step = arch::lanes / 2; step > 0; step /= 2) {
            whole += arch::exchanged(whole, step);
        }
        if (lane == 0) {
            to = whole;
        }
    }
    // Rows of Q K^T or K K^T, without norms                                  [64 tokens, 64 earlier tokens]
    DEVICE_MEMBER void multiply_rows(Accumulators<tiles> &rows, u32 left) const {
        for (int panel = 0; panel < 2; ++panel) {
            multiply_panels<T, false, false>(rows, keys + left + panel * panel_bytes, keys + P::k + panel * panel_bytes,
                                             panel > 0);
        }
        arch::commit_products();
    }
    static DEVICE_MEMBER Tile tile_of(const Accumulators<tiles> &a, int t) {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] = a.at[8 * t + e];
        }
        return out;
    }
    static DEVICE_MEMBER void put_tile(Accumulators<tiles> &a, int t, const Tile &x) {
        for (int e = 0; e < elements; ++e) {
            a.at[8 * t + e] = x[e];
        }
    }
    // Adds a value head.
    DEVICE_MEMBER void add_head(bool first_head) {
        Accumulators<tiles> mine, of_l; // dO E^T and E dX^T         [64 tokens, 64 earlier tokens], and transposed
        Tile trace{};
        // Zeros, since ptxas keeps registers of undefined values for these through the loop over value heads.
        for (int i = 0; i < 32; ++i) {
            mine.at[i] = of_l.at[i] = 0.0f;
        }
        int s = 0;
#pragma unroll 1
        do {
            this->await_stage();
            arch::publish_shared();
            const u32 at = stage_at();
            mine.pin();
            of_l.pin();
            arch::begin_products();
            multiply_panels<T, false, true>(mine, at + P::outputs, at + P::error, s > 0);
            // With the rounding error of E: the diagonal is dbeta.
            multiply_panels<T, true, true>(of_l, at + P::error, at + P::update, s > 0);
            multiply_panels<T, true, true>(of_l, at + P::low, at + P::update, true);
            arch::commit_products();
            add_trace(trace, at);
            if (s == 0) {
                keep_factors();
                const u32 factors = row_factors();
                for (int r = 0; r < 2; ++r) {
                    q_norm[r] = of_row(factors, q_norm_row, r);
                    k_norm[r] = of_row(factors, k_norm_row, r);
                }
            }
            arch::await_products<0>();
            mine.pin();
            of_l.pin();
            release();
        } while (++s < slabs);
        // The warp's tiles: all but the second one on the diagonal take the place of dP.
        Tile second = own_tile(of_l);
        float betas[2];
        diagonal_of(betas, second);
        for (int i = 0; i < 32; ++i) {
            mine.at[i] = is_later(i / 8) ? of_l.at[i] : mine.at[i];
        }
        mine.pin();
        Accumulators<tiles> of_rows; // Q K^T, then K K^T
        for (int i = 0; i < 32; ++i) {
            of_rows.at[i] = 0.0f;
        }
        arch::begin_products();
        multiply_rows(of_rows, P::q);
        if (first_head) {
            arch::barrier_wait(panels_barrier, multiplying_threads);
            for (int t = 0; t < tiles; ++t) {
                store_lower(lower_place(is_later(t), t), Tile{});
            }
            store_lower(lower_place(true, own), Tile{});
        }
        RowFactors rows;
        const u32 of_rows_at = kept() + own_row() * 4;
        for (int r = 0; r < 2; ++r) {
            rows.sum[r] = of_row(of_rows_at, kept_sum, r);
            rows.beta[r] = of_row(of_rows_at, kept_beta, r);
        }
        for (int t = 0; t < tiles; ++t) {
            Tile tile = tile_of(mine, t);
            decay(tile, is_later(t), t, rows, t == own);
            put_tile(mine, t, tile);
            mine.pin();
        }
        decay(second, true, own, rows, true);
        mine.pin();
        arch::await_products<0>();
        of_rows.pin();
        for (int t = 0; t < tiles; ++t) {
            if (!is_later(t)) {
                put_tile(mine, t, tile_of(mine, t) * tile_of(of_rows, t));
            }
        }
        mine.pin();
        of_rows.pin();
        arch::begin_products();
        multiply_rows(of_rows, P::k);
        GradientSums &to = this->await_sums();
        put_rows(to.betas, betas);
        put_trace(to.whole[own], trace);
        arch::await_products<0>();
        of_rows.pin();
        float row_sums[2] = {}, of_own[4] = {};
        add_tile(second * own_tile(of_rows), true, own, row_sums, of_own);
        for (int t = 0; t < tiles; ++t) {
            float of_columns[4];
            for (int c = 0; c < 4; ++c) {
                of_columns[c] = t == own ? of_own[c] : 0.0f;
            }
            if (is_later(t)) {
                put_tile(mine, t, tile_of(mine, t) * tile_of(of_rows, t));
            }
            add_tile(tile_of(mine, t), is_later(t), t, row_sums, of_columns);
            put_columns(to.columns[own] + 16 * t, of_columns);
        }
        put_rows(to.rows, row_sums);
        this->give_sums();
    }
    // Rounds the matrices of all value heads, with norms, in place of their sums.
    DEVICE_MEMBER void finish() {
        release_keys();
        const u32 of_pairs = kept_columns();
        Tile sums[tiles];
        load_all(sums, true);
        sync();
        const u32 both = memory() + P::matrices;
        for (int t = 0; t < tiles; ++t) {
            if (t < own) {
                continue;
            }
            Tile by_columns, by_rows; // with norms of the columns, and of the rows
            for (int e = 0; e < elements; e += 2) {
                const int i = 8 * t + e;
                const f32x2 norm = pair_of(of_pairs, kept_k_norm, i);
                by_columns[e] = sums[t][e] * norm.x;
                by_columns[e + 1] = sums[t][e + 1] * norm.y;
                by_rows[e] = sums[t][e] * k_norm[which_row(i)];
                by_rows[e + 1] = sums[t][e + 1] * k_norm[which_row(i)];
            }
            const int lane = own_lane();
            arch::store_transposed(both + swizzled(16 * t + lane / 16 * 8 + lane % 8, 2 * own + lane / 8 % 2),
                                   rounded<T>(by_rows));
            const u32 at = both + swizzled(16 * own + lane % 16, 2 * t + lane / 16);
            Operand x = rounded<T>(by_columns);
            if (t == own) {
                // Above the diagonal the transposed is zeros, below it the tile is.
                arch::wave_sync();
                const Operand transposed = arch::load_operand(at);
                for (int w = 0; w < 4; ++w) {
                    x[w] |= transposed[w];
                }
                arch::wave_sync();
            }
            arch::store_operand(at, x);
        }
        load_all(sums, false);
        sync();
        const u32 words = first_word(both + panel_bytes);
        for (int i = 0; i < 32; i += 2) {
            const f32x2 norm = pair_of(of_pairs, kept_k_norm, i);
            const float low = sums[i / 8][i % 8], high = sums[i / 8][i % 8 + 1], of_row = q_norm[which_row(i)];
            const u32 to = place_of_word(words, i);
            arch::store_shared_word(to, T::pack(low * norm.x, high * norm.y));
            arch::store_shared_word(to + panel_bytes, T::pack(low * of_row, high * of_row));
        }
        arch::publish_shared();
        arch::barrier_arrive(matrices_barrier, multiplying_threads);
    }

    float q_norm[2], k_norm[2]; // of the lane's rows
};

// All chunks of a workgroup. `skip`(number, thread): of an item that has no chunk, by own_skip_threads threads.
constexpr int own_skip_threads = gate_waves * arch::lanes;
template <class T, class Skip> DEVICE void run_own_gradients(const dwk_prefill_backward_args &x, const Skip &skip) {
    typedef GradientPlaces P;
    if (arch::thread() == 0) {
        for (int slot = 0; slot < 2; ++slot) {
            arch::phases_begin(P::full(slot), gradient_copying_threads + 1);
            arch::phases_begin(P::empty(slot), multiplying_waves);
            arch::phases_begin(P::sums_full(slot), multiplying_waves);
            arch::phases_begin(P::sums_empty(slot), 1);
            arch::phases_begin(P::keys_empty(slot), multiplying_waves);
        }
        arch::publish_phases();
    }
    arch::workgroup_sync();
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const int wave = arch::wave();
    if (wave >= multiplying_waves) {
        arch::give_registers<gradient_copying_registers>();
        if (wave < multiplying_waves + gradient_copying_waves) {
            GradientCopier(x).run();
        } else {
            GateWriter(x, wave - multiplying_waves - gradient_copying_waves).run(skip);
        }
        arch::end_wave();
    }
    if (wave >= key_waves) {
        arch::take_registers<matrix_registers>();
        MatrixMultiplier<T>(x).run();
        arch::end_wave();
    }
    arch::take_registers<key_registers>();
    if (wave >= scan_waves) {
        KeyMultiplier<T, 1>(x).run();
        arch::end_wave();
    }
    KeyMultiplier<T, 0>(x).run();
    arch::end_wave();
}

} // namespace backward
} // namespace prefill
