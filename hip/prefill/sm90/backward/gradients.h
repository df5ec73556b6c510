// Gradients of q, k and gates on sm_90a, for K of 65 to 128: the formulas are those of
// ../../backward/gradients.h.
//
// Persistent workgroups of three warpgroups. One copies: what the walk kept arrives as whole panels (kept.h), a value
// head's slab of 64 value columns at a time, in a ring of two stages; rows of K and Q in a ring of two chunks. The
// other two multiply, each for half of the keys of dQ and dK. One of them has D .* dP, the other one D .* dL.
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

// Shared memory, from ring() on.
struct GradientPlaces {
    static constexpr int groups = 2;                                         // warpgroups that multiply
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
    static constexpr u32 item = factors + factor_bytes; // number of rows, or 0 past the last chunk; then the rest
    // Reused memory of a chunk's last stage, whose panels have been multiplied: matrices of tokens by tokens, rounded
    // (rows with norms of k and of q or k), and dQ and dK until they are stored.
    static constexpr u32 matrices = state, results = error;
    static constexpr u32 sums = stages + 2 * stage_bytes;  // two GradientSums
    static constexpr u32 dots = sums + 2 * 6656;           // [dQ, dK][half of the keys][chunk]
    static constexpr u32 later = dots + 2 * 2 * chunk * 4; // later tiles of D .* dP and D .* dL, see GradientMultiplier
    static constexpr u32 later_bytes = 16 * 16 * 4;        // of a tile
    static constexpr u32 barriers = later + groups * 3 * later_bytes; // of full stages, empty ones, full and empty sums
    static constexpr u32 dynamic_bytes = barriers + 8 * 8 + 1024;     // 1024 for alignment
    static_assert(item + 32 <= factors + 2048 && factor_bytes % 16 == 0, "row factors fit");
    static_assert(dynamic_bytes <= arch::Traits::shared_bytes, "fits");

    static DEVICE_MEMBER u32 barrier(int number) { return shared_address(ring()) + barriers + 8 * number; }
    static DEVICE_MEMBER u32 full(int slot) { return barrier(slot); }
    static DEVICE_MEMBER u32 empty(int slot) { return barrier(2 + slot); }
    static DEVICE_MEMBER u32 sums_full(int slot) { return barrier(4 + slot); }
    static DEVICE_MEMBER u32 sums_empty(int slot) { return barrier(6 + slot); }
};

constexpr int multiplying_threads = GradientPlaces::groups * group_threads;
constexpr int multiplying_waves = GradientPlaces::groups * scan_waves;
constexpr int gradient_copying_waves = 2, gate_waves = 2;
constexpr int gradient_copying_threads = gradient_copying_waves * arch::lanes;
constexpr int own_gradient_threads = multiplying_threads + group_threads;
constexpr int gradient_copying_registers = 56, gradient_multiplying_registers = 224;
static_assert(gradient_copying_registers + 2 * gradient_multiplying_registers <= 3 * 168,
              "setmaxnreg would wait forever");

// Sums of a value head, in turn for each of the two warps that write gates.
struct GradientSums {
    float rows[2][chunk];                    // of D .* dP (Q K^T) and of D .* dL (K K^T), over earlier tokens
    float columns[multiplying_waves][chunk]; // over the later tokens of each warp
    float states[2][chunk];                  // a, of each half of the keys
    float updates[2][chunk];                 // b
    float betas[chunk];                      // dbeta
    float whole[multiplying_waves];          // <dS1, S0>
};
static_assert(sizeof(GradientSums) <= 6656, "fits");

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
    for (int number = arch::workgroup(); number < (x.records + 1) * p.key_heads; number += arch::workgroups()) {
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
        : x(x), memory(shared_address(ring())), slabs(kept_slabs(x.prepare.value_dim)),
          thread(arch::thread() - multiplying_threads) {}

    DEVICE_MEMBER void run() {
        const dwk_prefill_prepare_args &p = x.prepare;
        int chunks = 0;
        each_gradient_head(
            x,
            [&](const GradientItem &item, int head, bool first) __attribute__((always_inline)) {
                const u32 keys = memory + chunks % 2 * P::key_bytes;
                chunks += first;
#pragma unroll 1
                for (int s = 0; s < slabs; ++s) {
                    begin_stage();
                    copy_panels(item, head, s);
                    bool whole = true;
                    if (first && s == 0) {
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
    DEVICE_MEMBER u32 stage_at() const { return memory + P::stages + stage % 2 * P::stage_bytes; }
    // Waits until the stage is empty.
    DEVICE_MEMBER void begin_stage() const {
        if (stage >= 2) {
            arch::phase_wait(P::empty(stage % 2), stage / 2 - 1);
        }
    }

    // By one thread.
    DEVICE_MEMBER void copy_panels(const GradientItem &item, int head, int s) const {
        if (thread != 0) {
            return;
        }
        const int64_t place = place_of(x.prepare, item.record, head);
        const u32 to = stage_at(), full = P::full(stage % 2);
        store_shared(to + P::item, i32x4{item.rows, item.sequence, item.begin, item.key_head});
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
    const u32 memory;
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
        for (int w = 0; w < multiplying_waves; ++w) {
            whole += from.whole[w];
        }
        whole *= arch::exp2(total);
        // Lane l has token 63 - l, then token 31 - l, for sums over later tokens; and token l, then 32 + l, over
        // earlier.
        float later[2], earlier[2];
        for (int h = 0; h < 2; ++h) {
            const int token = chunk - 1 - arch::lanes * h - lane;
            float sum = from.states[0][token] + from.states[1][token] + from.rows[0][token] + from.rows[1][token];
            for (int w = 0; w < multiplying_waves; ++w) {
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

// Multiplies, for half `Group` of the keys.
template <class T, int Group> class GradientMultiplier {
    typedef GradientPlaces P;

  public:
    DEVICE_MEMBER explicit GradientMultiplier(const dwk_prefill_backward_args &x)
        : x(x), memory(shared_address(ring())), slabs(kept_slabs(x.prepare.value_dim)), lane(arch::lane()),
          wave(arch::thread() / (u32)arch::lanes), row(16 * (wave % scan_waves) + lane / 4) {}

    DEVICE_MEMBER void run() {
#pragma unroll 1
        for (int chunks = 0;; ++chunks) {
            arch::phase_wait(P::full(stage % 2), stage / 2);
            if (arch::load_shared_word(stage_at() + P::item) == 0) {
                return;
            }
            keys = memory + chunks % 2 * P::key_bytes;
            for (int i = 0; i < 32; ++i) {
                d_query.at[i] = d_key.at[i] = 0.0f;
            }
            for (int t = 0; t < tiles; ++t) {
                put_matrix(t, Tile{});
            }
            // Loops of at least one turn: registers of results would otherwise be copied for none.
            int heads_left = x.prepare.group_heads;
#pragma unroll 1
            do {
                add_head(heads_left == 1);
            } while (--heads_left > 0);
            finish();
        }
    }

  private:
    // A lane's rows are `row` and `row` + 8. Element i of accumulators: its row is `row` + 8 which_row(i), its column
    // column_of(i).
    static constexpr int which_row(int i) { return i / 2 % 2; }
    DEVICE_MEMBER int column_of(int i) const { return i / 4 * 8 + (u32)lane % 4 * 2 + i % 2; }
    // The lane's first word in a panel of 16-bit numbers. Opaque: registers should not hold places through a loop.
    DEVICE_MEMBER u32 first_word(u32 panel) const {
        return (u32)arch::opaque((int)(panel + swizzled(row, 0) + (u32)lane % 4 * 4));
    }
    // The word of elements i and i + 1, i even.
    static DEVICE_MEMBER u32 place_of_word(u32 first, int i) { return (first ^ i / 4 << 4) + which_row(i) * (8 * 128); }
    // Barrier of all warps that multiply.
    static DEVICE_MEMBER void sync() { arch::barrier_wait(1, multiplying_threads); }

    DEVICE_MEMBER u32 stage_at() const { return memory + P::stages + stage % 2 * P::stage_bytes; }
    DEVICE_MEMBER float factor(RowFactor which, int token) const {
        return arch::load_shared_number(stage_at() + P::factors + (which * chunk + token) * 4);
    }
    DEVICE_MEMBER f32x2 factors_of(RowFactor which, int i) const {
        const u32 first = (u32)arch::opaque((int)(stage_at() + P::factors + (u32)lane % 4 * 8));
        return arch::load_shared_pair(first + (which * chunk + i / 4 * 8) * 4);
    }
    // Opaque, for the same reason.
    static DEVICE_MEMBER u64 described(u32 at) { return arch::described((u32)arch::opaque((int)at)); }

    // a (+)= left right over 64 contracted elements. `Rows..`: whether these lie in rows of a panel, not along them.
    template <bool RowsOfRight, bool RowsOfLeft>
    static DEVICE_MEMBER void multiply(Accumulators<tiles> &a, u32 right, u32 left, bool adds) {
        const u64 of_right = described(right), of_left = described(left);
        for (int i = 0; i < tiles; ++i) {
            T::template multiply_async_shared<RowsOfRight, RowsOfLeft>(
                a.at, of_right + i * ((RowsOfRight ? 16 * 128 : 32) >> 4),
                of_left + i * ((RowsOfLeft ? 16 * 128 : 32) >> 4), adds || i > 0);
        }
    }
    // Sum over the four lanes that have a row.
    static DEVICE_MEMBER float sum_of_row(float x) {
        x += arch::exchanged(x, 1);
        return x + arch::exchanged(x, 2);
    }
    // Writes sums of the lane's two rows, which are parts of four lanes each.
    DEVICE_MEMBER void put_rows(float *to, const float (&x)[2]) const {
        for (int r = 0; r < 2; ++r) {
            const float sum = sum_of_row(x[r]);
            if (lane % 4 == 0) {
                to[row + 8 * r] = sum;
            }
        }
    }
    // Tile t of the columns of D .* dP or D .* dL. Later ones than the warp's rows are zeros. The last two tiles are in
    // shared memory: registers are too few, and stacks would leave the cache.
    DEVICE_MEMBER u32 later_place(int t) const {
        return memory + P::later + (3 * Group + wave % scan_waves - 2 + t - 2) * P::later_bytes +
               arch::opaque(lane) * (u32)sizeof(Tile);
    }
    DEVICE_MEMBER Tile matrix_tile(int t) const {
        if (t < 2) {
            return d_matrix[t];
        }
        if (t > wave % scan_waves) {
            return Tile{};
        }
        const f32x4 x = arch::load_shared_f32(later_place(t)), y = arch::load_shared_f32(later_place(t) + 16);
        return Tile{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    }
    DEVICE_MEMBER void put_matrix(int t, Tile x) {
        if (t < 2) {
            d_matrix[t] = x;
        } else if (t <= wave % scan_waves) {
            for (int h = 0; h < 2; ++h) {
                store_shared(later_place(t) + 16 * h, i32x4{bits<int>(x[4 * h]), bits<int>(x[4 * h + 1]),
                                                            bits<int>(x[4 * h + 2]), bits<int>(x[4 * h + 3])});
            }
        }
    }
    // Adds up a lane's columns of a tile over the eight lanes that have them, and stores the sums. x[2 n + c]: of
    // column 8 n + c of the lane's. Two steps leave a lane half of the columns.
    DEVICE_MEMBER void put_columns(float *to, const float (&x)[4]) const {
        const auto add_half = [](bool upper, float low, float high, int step) __attribute__((always_inline)) {
            return (upper ? high : low) + arch::exchanged(upper ? low : high, step);
        };
        const bool second = lane & 16, odd = lane & 8;
        const float sum = add_half(odd, add_half(second, x[0], x[2], 16), add_half(second, x[1], x[3], 16), 8);
        const float whole = sum + arch::exchanged(sum, 4);
        if ((lane & 4) == 0) {
            to[(second ? 8 : 0) + (u32)lane % 4 * 2 + (odd ? 1 : 0)] = whole;
        }
    }
    // Adds the lane's part of the dot products of the rows of `a` and of the panel.
    DEVICE_MEMBER void add_products(float (&to)[2], const Accumulators<tiles> &a, u32 panel) const {
        const u32 words = first_word(panel);
        for (int i = 0; i < 32; i += 2) {
            const int word = arch::load_shared_word(place_of_word(words, i));
            to[which_row(i)] += a.at[i] * T::low(word) + a.at[i + 1] * T::high(word);
        }
    }
    // Goes on to the next stage, and gives this one back.
    DEVICE_MEMBER void release() {
        arch::wave_sync();
        if (lane == 0) {
            arch::phase_arrive(P::empty(stage % 2));
        }
        ++stage;
    }

    // Diagonal of a matrix of 64 rows, where the lane holds it: element `row` + 8 r goes to to[r], which is 0
    // elsewhere.
    DEVICE_MEMBER void diagonal_of(float (&to)[2], const float (&x)[32]) const {
        const int own = wave % scan_waves;
        const auto chosen = [](bool second, float x, float y) __attribute__((always_inline)) { return second ? y : x; };
        const auto of_own = [&](int e) __attribute__((always_inline)) {
            return chosen(own & 2, chosen(own & 1, x[e], x[8 + e]), chosen(own & 1, x[16 + e], x[24 + e]));
        };
        const int row = lane / 4, column = (u32)lane % 4 * 2;
        for (int r = 0; r < 2; ++r) {
            const float even = of_own(6 * r), odd = of_own(6 * r + 1);
            to[r] = row == column ? even : row == column + 1 ? odd : 0.0f;
        }
    }
    // Adds dS1 S0^T of the warp's 16 value columns: <dS1, S0> is its trace.
    DEVICE_MEMBER void add_trace(Tile &to, u32 panel) const {
        const u32 first = (u32)arch::opaque((int)(panel + swizzled(16 * (wave % scan_waves) + lane % 16, lane / 16)));
        for (int i = 0; i < tiles; ++i) {
            const u32 at = first ^ i << 5;
            to = T::mma(arch::load_operand(at + P::state), arch::load_operand(at + P::d_state), to);
        }
    }
    // Adds a value head.
    DEVICE_MEMBER void add_head(bool last_head) {
        Accumulators<tiles> matrix; // dO E^T or dX E^T                      [64 tokens, 64 earlier tokens]
        float read_q[2] = {}, read_k[2] = {}, write[2] = {};
        Tile trace{};
        float of_out[2], of_error[2], of_update[2];
        int s = 0;
#pragma unroll 1
        do {
            arch::phase_wait(P::full(stage % 2), stage / 2);
            arch::publish_shared();
            const u32 at = stage_at(), half = Group * panel_bytes;
            if (s == 0) {
                const float total = arch::load_shared_number(at + P::factors + record_numbers + 8);
                for (int r = 0; r < 2; ++r) {
                    const float sum = factor(sum_row, row + 8 * r), beta = factor(beta_row, row + 8 * r);
                    const float decay = arch::exp2(sum);
                    of_out[r] = x.scale * decay;
                    of_error[r] = arch::exp2(total - sum) * beta;
                    of_update[r] = -decay * beta;
                }
            }
            // One product at a time: registers are short, and the other warpgroup multiplies meanwhile.
            Accumulators<tiles> product;
            const auto add = [&](float(&dot)[2], Accumulators<tiles> &to, const float(&by)[2], u32 panel)
                                 __attribute__((always_inline)) {
                                     arch::commit_products();
                                     arch::await_products<0>();
                                     product.pin();
                                     for (int i = 0; i < 32; ++i) {
                                         to.at[i] += by[which_row(i)] * product.at[i];
                                     }
                                     add_products(dot, product, panel);
                                     product.pin();
                                     arch::begin_products();
                                 };
            matrix.pin();
            arch::begin_products();
            if constexpr (Group == 0) {
                multiply<false, true>(matrix, at + P::outputs, at + P::error, s > 0);
            } else {
                // With the rounding error of E: the diagonal is dbeta.
                multiply<true, true>(matrix, at + P::update, at + P::error, s > 0);
                multiply<true, true>(matrix, at + P::update, at + P::low, true);
            }
            // dO S0^T                                                       [64 tokens, 64 keys]
            multiply<false, true>(product, at + P::outputs, at + P::state + half, false);
            add_trace(trace, at + half);
            add(read_q, d_query, of_out, keys + P::q + half);
            // E dS1^T
            multiply<true, true>(product, at + P::error, at + P::d_state + half, false);
            add(write, d_key, of_error, keys + P::k + half);
            // dX S0^T
            multiply<true, true>(product, at + P::update, at + P::state + half, false);
            add(read_k, d_key, of_update, keys + P::k + half);
            matrix.pin();
            if (s + 1 < slabs) {
                release();
            }
        } while (++s < slabs);
        const int slot = heads % gate_waves;
        if (heads >= gate_waves) {
            arch::phase_wait(P::sums_empty(slot), heads / gate_waves - 1);
        }
        ++heads;
        GradientSums &to = ((GradientSums *)(ring() + P::sums))[slot];
        // Q K^T or K K^T, divided by the norms                              [64 tokens, 64 earlier tokens]
        Accumulators<tiles> rows;
        arch::begin_products();
        for (int panel = 0; panel < 2; ++panel) {
            multiply<false, false>(rows, keys + (Group == 0 ? P::q : P::k) + panel * panel_bytes,
                                   keys + P::k + panel * panel_bytes, panel > 0);
        }
        arch::commit_products();
        {
            float of_states[2], of_updates[2];
            for (int r = 0; r < 2; ++r) {
                const float of_q = factor(q_norm_row, row + 8 * r), of_k = factor(k_norm_row, row + 8 * r);
                of_states[r] = read_q[r] * (of_out[r] * of_q) + read_k[r] * (of_update[r] * of_k);
                of_updates[r] = write[r] * (of_error[r] * of_k);
            }
            put_rows(to.states[Group], of_states);
            put_rows(to.updates[Group], of_updates);
            if constexpr (Group == 1) {
                float betas[2];
                diagonal_of(betas, matrix.at);
                put_rows(to.betas, betas);
            }
            const int row = lane / 4, column = (u32)lane % 4 * 2;
            float whole = row == column ? trace[0] + trace[6] : row == column + 1 ? trace[1] + trace[7] : 0.0f;
            for (int step = arch::lanes / 2; step > 0; step /= 2) {
                whole += arch::exchanged(whole, step);
            }
            if (lane == 0) {
                to.whole[wave] = whole;
            }
        }
        float sum[2], scale[2], norm[2], of_rows[2] = {};
        for (int r = 0; r < 2; ++r) {
            sum[r] = factor(sum_row, row + 8 * r);
            scale[r] = Group == 0 ? x.scale : -factor(beta_row, row + 8 * r);
            norm[r] = factor(Group == 0 ? q_norm_row : k_norm_row, row + 8 * r);
        }
        arch::await_products<0>();
        rows.pin();
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
            float of_columns[4] = {};
            // Later tiles of columns are past the warp's rows.
            if (t <= wave % scan_waves) {
                Tile sums_of_tile;
                for (int i = 8 * t; i < 8 * t + 8; i += 4) {
                    const f32x2 earlier = factors_of(sum_row, i), beta = factors_of(beta_row, i),
                                k_norm = factors_of(k_norm_row, i);
                    for (int e = 0; e < 4; ++e) {
                        const int r = which_row(i + e), c = e % 2, token = row + 8 * r, column = column_of(i + e);
                        const float decayed = arch::exp2(sum[r] - earlier[c]) * beta[c] * scale[r] * matrix.at[i + e];
                        const bool before = column < token;
                        sums_of_tile[i % 8 + e] = before || (Group == 0 && column == token) ? decayed : 0.0f;
                        const float product = before ? decayed * (rows.at[i + e] * norm[r] * k_norm[c]) : 0.0f;
                        of_rows[r] += product;
                        of_columns[i % 8 / 2 + c] += product;
                    }
                }
                put_matrix(t, matrix_tile(t) + sums_of_tile);
            }
            put_columns(to.columns[wave] + 16 * t, of_columns);
        }
        put_rows(to.rows[Group], of_rows);
        arch::wave_sync();
        if (lane == 0) {
            arch::phase_arrive(P::sums_full(slot));
        }
        if (!last_head) {
            release();
        }
    }

    // dQ += (D .* dP) K, dK += (D .* dP)^T Q + (D .* dL + (D .* dL)^T) K, of all value heads; norms; stores.
    DEVICE_MEMBER void finish() {
        const u32 at = stage_at(), half = Group * panel_bytes;
        const u32 to = at + P::matrices + 2 * Group * panel_bytes;
        sync(); // the stage has been multiplied
        float norm[2];
        for (int r = 0; r < 2; ++r) {
            norm[r] = factor(Group == 0 ? q_norm_row : k_norm_row, row + 8 * r);
        }
        const u32 words = first_word(to);
        for (int t = 0; t < tiles; ++t) {
            const Tile of_tile = matrix_tile(t);
            for (int i = 8 * t; i < 8 * t + 8; i += 2) {
                const f32x2 k_norm = factors_of(k_norm_row, i);
                const float low = of_tile[i % 8], high = of_tile[i % 8 + 1], of_row = norm[which_row(i)];
                arch::store_shared_word(place_of_word(words, i), T::pack(low * k_norm.x, high * k_norm.y));
                arch::store_shared_word(place_of_word(words, i) + panel_bytes, T::pack(low * of_row, high * of_row));
            }
        }
        arch::publish_shared();
        sync();
        const u32 from_p = at + P::matrices, to_p = from_p + panel_bytes, from_l = to_p + panel_bytes,
                  to_l = from_l + panel_bytes;
        d_query.pin();
        d_key.pin();
        arch::begin_products();
        multiply<false, true>(d_query, from_p, keys + P::k + half, true);
        multiply<true, true>(d_key, to_p, keys + P::q + half, true);
        multiply<false, true>(d_key, from_l, keys + P::k + half, true);
        multiply<true, true>(d_key, to_l, keys + P::k + half, true);
        arch::commit_products();
        arch::await_products<0>();
        d_query.pin();
        d_key.pin();
        if (x.prepare.flags & DWK_QK_L2NORM) {
            // dx = r (dy - y (y . dy)), with y = r x. A row of zeros has r = 1000.
            float(&dots)[2][2][chunk] = *(float(*)[2][2][chunk])(ring() + P::dots);
            float of_q[2] = {}, of_k[2] = {};
            add_products(of_q, d_query, keys + P::q + half);
            add_products(of_k, d_key, keys + P::k + half);
            put_rows(dots[0][Group], of_q);
            put_rows(dots[1][Group], of_k);
            sync();
            differentiate_norm(d_query, q_norm_row, dots[0], keys + P::q + half);
            differentiate_norm(d_key, k_norm_row, dots[1], keys + P::k + half);
        }
        const u32 results = first_word(at + P::results + half);
        for (int i = 0; i < 32; i += 2) {
            const u32 word = place_of_word(results, i);
            arch::store_shared_word(word, T::pack(d_query.at[i], d_query.at[i + 1]));
            arch::store_shared_word(word + 2 * panel_bytes, T::pack(d_key.at[i], d_key.at[i + 1]));
        }
        GradientItem item;
        item.rows = arch::load_shared_word(at + P::item);
        item.sequence = arch::load_shared_word(at + P::item + 4);
        item.begin = arch::load_shared_word(at + P::item + 8);
        item.key_head = arch::load_shared_word(at + P::item + 12);
        sync();
        store_rows(item, at + P::results, x.d_q, x.d_q_strides);
        store_rows(item, at + P::results + 2 * panel_bytes, x.d_k, x.d_k_strides);
        arch::publish_shared(); // before copies overwrite the stage
        release();
    }
    DEVICE_MEMBER void differentiate_norm(Accumulators<tiles> &own, RowFactor which, const float (&dots)[2][chunk],
                                          u32 panel) const {
        float r[2], along[2];
        for (int i = 0; i < 2; ++i) {
            r[i] = factor(which, row + 8 * i);
            along[i] = (dots[0][row + 8 * i] + dots[1][row + 8 * i]) * r[i] * r[i];
            r[i] = r[i] == 0.0f ? math::inverse_norm(0.0f) : r[i];
        }
        const u32 words = first_word(panel);
        for (int i = 0; i < 32; i += 2) {
            const int word = arch::load_shared_word(place_of_word(words, i));
            own.at[i] = (own.at[i] - T::low(word) * along[which_row(i)]) * r[which_row(i)];
            own.at[i + 1] = (own.at[i + 1] - T::high(word) * along[which_row(i)]) * r[which_row(i)];
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
        constexpr int at_once = multiplying_threads / 16;
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

    const dwk_prefill_backward_args &x;
    const u32 memory;
    const int slabs, lane, wave, row;
    u32 keys;
    int stage = 0, heads = 0;
    Accumulators<tiles> d_query, d_key; // [64 tokens, 64 keys]
    Tile d_matrix[2];                   // D .* dP or D .* dL, first two tiles of columns
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
    if (wave < scan_waves) {
        arch::take_registers<gradient_multiplying_registers>();
        GradientMultiplier<T, 0>(x).run();
        arch::end_wave();
    }
    arch::take_registers<gradient_multiplying_registers>();
    GradientMultiplier<T, 1>(x).run();
    arch::end_wave();
}

} // namespace backward
} // namespace prefill
