// Gradients of q, k and gates of a chunk and key head, by eight waves. A wave has 16 tokens (row tile i) and half of
// the key elements of dQ and dK, and up to two of the lower blocks (i, j) of dP and dL: its rows of dO, E and dX are in
// registers for all products. With dO' = scale dO, in units (walk.h), per value head:
//
//   dP = lower part of dO' U^T                     dL = -strictly lower part of dV U^T              [C, C]
//   dQ = exp(G) dO' S0^T + (D .* dP) K                                                              [C, K]
//   dK = exp(G_C - G) U dS1^T - exp(G) dV S0^T + (D .* dP)^T Q + (D .* dL + (D .* dL)^T) K          [C, K]
//
// Value heads of a key head add up in f32: dQ and dK in registers, and D .* dP and D .* dL before their products with K
// and Q. All tiles are transposed: rows are keys, columns are tokens. Gates, from pairs that pass over them:
//
//   W_ij = D_ij dP_ij (q_i . k_j) + D_ij dL_ij (k_i . k_j), i > j
//   a_i  = dO'_i . exp(G_i) S0^T q_i - dV_i . exp(G_i) S0^T k_i
//   b_j  = U_j . exp(G_C - G_j) dS1^T k_j
//   c    = exp(G_C) <dS1, S0>
//   dg_t = sum_{i >= t} (sum_j W_ij - sum_j W_ji + a_i) + sum_{j < t} b_j + c
//   dbeta_i = dX_i . E_i
#pragma once

#include "../../math/norms.h"
#include "token_gates.h"

namespace prefill {
namespace backward {

constexpr int gradient_waves = 8;
constexpr int gradient_threads = gradient_waves * arch::lanes;
constexpr int gradient_residency = arch::lanes / 32; // 256 registers a lane on both kinds of targets
constexpr int most_blocks = 2;                       // lower blocks of a wave
constexpr int sum_parts = gradient_threads / chunk;

// Shared memory of a workgroup.
struct GradientMemory {
    union {
        float pairs[chunk][chunk + 1]; // W of a value head; its upper blocks are zeros
        // D .* dP as rows of tokens i and of j, D .* dL likewise; lower blocks.
        Operand matrices[4][lower_blocks][arch::lanes];
    };
    Tile products[2][lower_blocks][arch::lanes]; // Q K^T and K K^T, lower blocks
    float states[2][chunk];                      // a, of each half of the keys
    float updates[2][chunk];                     // b
    float betas[2][chunk];                       // dbeta, of each half of the value tiles
    float sums[sum_parts][chunk];                // row sums less column sums of W
    float before[chunk];                         // sums of b over earlier tokens
    float whole[gradient_waves];                 // c
    float carry[4];
};

// Sums of a tile's columns, from its 16 rows, to `to`[column]. `adds`: to what is there.
DEVICE void put_column_sums(float *to, Tile x, bool adds = false) {
    Tile ones;
    for (int e = 0; e < elements; ++e) {
        ones[e] = 1.0f;
    }
    const LaneMap at(arch::lane());
    const Tile sums = arch::held(arch::multiply_transposed_f32(x, ones, Tile{}));
    for (int e = 0; e < elements; ++e) {
        if (at.column(e) == 0) {
            float &sum = to[at.row(e)];
            sum = adds ? sum + sums[e] : sums[e];
        }
    }
}

// Inclusive sum over the first 64 threads; in others unspecified. All threads take part.
DEVICE float first_threads_sum(float x, float *carry) {
    float sum = arch::inclusive_sum(x);
    constexpr int waves = chunk / arch::lanes;
    if constexpr (waves == 2) {
        if (arch::thread() == arch::lanes - 1) {
            *carry = sum;
        }
        arch::workgroup_sync();
        if (arch::wave() == 1) {
            sum += *carry;
        }
        arch::workgroup_sync();
    }
    return sum;
}

template <class T, int Keys> class Gradients {
    static constexpr int key_tiles = Keys / 16;
    static constexpr int own_pairs = Keys / 64, own_tiles = 2 * own_pairs;
    // As many as registers hold.
    static constexpr int slabs_at_once = adjacent ? Keys > 128 ? 2 : 4 : Keys > 64 ? 1 : 2;
    typedef Pair SlabRows[slabs_at_once];

  public:
    DEVICE_MEMBER Gradients(const dwk_prefill_backward_args &x, GradientMemory &memory, int record, int key_head,
                            int sequence, int begin, int rows)
        : all(x), memory(memory), record(record), key_head(key_head), sequence(sequence), begin(begin), rows(rows),
          wave(arch::wave()), at(arch::lane()), one(identity<T>()),
          q(x.prepare.q, x.prepare.q_strides, sequence, begin, key_head, x.prepare.key_dim),
          k(x.prepare.k, x.prepare.k_strides, sequence, begin, key_head, x.prepare.key_dim) {}

    DEVICE_MEMBER void run() {
        for (int t = 0; t < own_tiles; ++t) {
            d_query[t] = d_key[t] = Tile{};
        }
        for (int i = arch::thread(); i < chunk * (chunk + 1); i += gradient_threads) {
            memory.pairs[0][i] = 0.0f;
        }
        multiply_rows();
        arch::workgroup_sync();
        // Loops of at least one turn: registers of results would otherwise be copied for none.
        int v = 0;
#pragma unroll 1
        do {
            const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
            add_head(dispatch::value_head(p, key_head, p.group_heads, v));
        } while (++v < arch::reread(all).prepare.group_heads);
        add_matrices();
        const dwk_prefill_backward_args &y = arch::reread(all);
        finish(d_query, q, y.d_q, y.d_q_strides, q_norm_row, true);
        finish(d_key, k, y.d_k, y.d_k_strides, k_norm_row, false);
    }

  private:
    DEVICE_MEMBER int row_tile() const { return arch::opaque_uniform(wave) % tiles; }
    DEVICE_MEMBER int half() const { return arch::opaque_uniform(wave) / tiles; }
    // First of the 32 keys of the wave's pair p.
    DEVICE_MEMBER int keys_of(int half, int p) const { return slab * (half * own_pairs + p); }
    // Column j of the wave's n-th block (row_tile, j); past row_tile the wave has none.
    DEVICE_MEMBER static int column_of_block(int half, int n) { return half + 2 * n; }

    // Record of a value head, for norms: all value heads of a key head have the same.
    DEVICE_MEMBER const char *norms() const {
        const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
        return record_of(p, record, dispatch::value_head(p, arch::opaque_uniform(key_head), p.group_heads, 0));
    }

    // K K^T and Q K^T of the wave's blocks, transposed, divided by the norms.
    DEVICE_MEMBER void multiply_rows() {
        const int i = row_tile(), half = this->half();
        Tile of_k[most_blocks], of_q[most_blocks];
        for (int n = 0; n < most_blocks; ++n) {
            of_k[n] = of_q[n] = d_p[n] = d_l[n] = Tile{};
        }
        const u32 own_mask = mask_of(i, rows);
        struct Rows {
            Pair k, q, left[most_blocks];
        };
        const auto load = [&](int b) __attribute__((always_inline)) {
            Rows out{k.load(k.place(i, slab * b), own_mask), q.load(q.place(i, slab * b), own_mask), {}};
            for (int n = 0; n < most_blocks; ++n) {
                const int j = min_of(column_of_block(half, n), i);
                out.left[n] = k.load(k.place(j, slab * b), mask_of(j, rows));
            }
            return out;
        };
        const auto multiply = [&](const Rows &x) __attribute__((always_inline)) {
#pragma unroll
            for (int n = 0; n < most_blocks; ++n) {
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    of_k[n] = T::mma(x.left[n].part[s], x.k.part[s], of_k[n]);
                    of_q[n] = T::mma(x.left[n].part[s], x.q.part[s], of_q[n]);
                }
            }
            for (int n = 0; n < most_blocks; ++n) {
                of_k[n] = arch::held(of_k[n]);
                of_q[n] = arch::held(of_q[n]);
            }
        };
        if constexpr (adjacent) {
            // Loads of several turns wait for memory together.
            constexpr int at_once = Keys < 4 * slab ? Keys / slab : 4;
#pragma unroll 1
            for (int first = 0; first < Keys / slab; first += at_once) {
                Rows some[at_once];
#pragma unroll
                for (int b = 0; b < at_once; ++b) {
                    some[b] = load(first + b);
                }
                arch::phase();
#pragma unroll
                for (int b = 0; b < at_once; ++b) {
                    multiply(some[b]);
                }
            }
        } else {
#pragma unroll 2
            for (int b = 0; b < Keys / slab; ++b) {
                multiply(load(b));
            }
        }
        for (int n = 0; n < most_blocks; ++n) {
            const int j = min_of(column_of_block(half, n), i);
            const Tile columns = rows_at(factor_of(norms(), k_norm_row) + 16 * j, at);
            if (column_of_block(half, n) <= i) {
                products(1, n) = of_k[n] * columns * columns_at(factor_of(norms(), k_norm_row) + 16 * i, at);
                products(0, n) = of_q[n] * columns * columns_at(factor_of(norms(), q_norm_row) + 16 * i, at);
            }
        }
    }

    // Sum of the products of two states' elements, which are in the same places.
    static DEVICE_MEMBER float dot(const Pair &x, const Pair &y) {
        const Tile product =
            widened<T>(x.part[0]) * widened<T>(y.part[0]) + widened<T>(x.part[1]) * widened<T>(y.part[1]);
        float sum = 0.0f;
        for (int e = 0; e < elements; ++e) {
            sum += product[e];
        }
        return sum;
    }

    // Adds a block of E dO^T and of E dX^T, of some values, to D .* dP, D .* dL and W.
    DEVICE_MEMBER void add_block(const dwk_prefill_backward_args &x, int n, int half, int i, bool adds, Tile of_o,
                                 Tile of_x, const float *sums, const float *betas, ColumnFactor sum,
                                 ColumnFactor beta) {
        const LaneMap at(arch::opaque(arch::lane()));
        const int j = arch::opaque_uniform(column_of_block(half, n));
        const Tile decayed = exp2_of(sum - rows_at(sums + 16 * j, at)) * rows_at(betas + 16 * j, at);
        Tile of_p = x.scale * decayed * of_o, of_l = -(decayed * beta * of_x);
        for (int e = 0; e < elements; ++e) {
            const int earlier = 16 * j + at.row(e), later = 16 * i + at.column(e);
            of_p[e] = earlier <= later ? of_p[e] : 0.0f;
            of_l[e] = earlier < later ? of_l[e] : 0.0f;
        }
        d_p[n] = arch::held(d_p[n] + of_p);
        d_l[n] = arch::held(d_l[n] + of_l);
        const Tile pairs = of_p * products(0, n) + of_l * products(1, n);
        for (int e = 0; e < elements; ++e) {
            const int earlier = 16 * j + at.row(e), later = 16 * i + at.column(e);
            if (earlier < later) {
                float &to = memory.pairs[later][earlier];
                to = adds ? to + pairs[e] : pairs[e];
            }
        }
    }

    // Q K^T (0) or K K^T (1) of the wave's n-th block.
    DEVICE_MEMBER Tile &products(int which, int n) {
        const int i = row_tile(), j = min_of(column_of_block(half(), n), i);
        return memory.products[which][lower_block(i, j)][arch::opaque(arch::lane())];
    }

    // Adds the value head's part of dQ and dK that passes through states, and its D .* dP and D .* dL. Writes dg and
    // dbeta.
    DEVICE_MEMBER void add_head(int head) {
        const dwk_prefill_backward_args &x = arch::reread(all); // saves scalar registers
        const dwk_prefill_prepare_args &p = x.prepare;
        const LaneMap at(arch::opaque(arch::lane()));
        // Opaque, too: otherwise all that follows from them is computed ahead of the loop over heads.
        const int slabs = (u32)(p.value_dim + slab - 1) / slab, row_tile = this->row_tile(), half = this->half();
        const char *const factors = record_of(p, record, head);
        const int64_t place = place_of(p, record, head);
        const Pairs<> errors(x.errors + place * (2 * tiles * slabs) * pair_bytes);
        const Pairs<> updates(x.d_updates + place * (tiles * slabs) * pair_bytes);
        const int64_t first_state = (place * key_tiles + half * own_tiles) * slabs * pair_bytes;
        const char *const states = x.states + first_state, *const d_states = x.d_states + first_state;
        const PairRows<> d_o(x.d_o, x.d_o_strides, sequence, begin, head, p.value_dim);
        const float *const sums = factor_of(factors, sum_row), *const betas = factor_of(factors, beta_row);
        const float total = numbers_of(factors).total;
        const ColumnFactor sum = columns_at(sums + 16 * row_tile, at), beta = columns_at(betas + 16 * row_tile, at);
        const ColumnFactor after_first = exp2_of(sum), of_out_factor = x.scale * after_first,
                           of_err_factor = exp2_of(total - sum) * beta, of_upd_factor = -after_first * beta;
        const u32 own_mask = mask_of(row_tile, rows);
        // Elements of which sums over keys are a and b, but for factors of tokens.
        Tile read_q{}, read_k{}, write{};
        float state_pairs = 0.0f;
        int group = 0;
#pragma unroll 1
        do {
            SlabRows out, error, update, state, d_state;
            // Past the last slab that of the last one, which zeros of dO, E and dX multiply.
            u32 state_place[slabs_at_once];
            for (int u = 0; u < slabs_at_once; ++u) {
                state_place[u] = min_of(group + u, slabs - 1) * pair_bytes + place_in_pair();
            }
            const auto request_state = [&](int t, int u) __attribute__((always_inline)) {
                const int tile = t * arch::opaque_uniform(slabs) * pair_bytes;
                state[u] = load_pair_at(states + tile, state_place[u]);
                d_state[u] = load_pair_at(d_states + tile, state_place[u]);
            };
#pragma unroll
            for (int u = 0; u < slabs_at_once; ++u) {
                const bool there = group + u < slabs;
                const int index = arch::opaque_uniform(row_tile) * slabs + group + u;
                out[u] = d_o.load(d_o.place(row_tile, slab * (group + u)), own_mask);
                error[u] = errors.load(index, there);
                update[u] = updates.load(index, there);
            }
            SlabRows left;
            const auto request_left = [&](int n) __attribute__((always_inline)) {
                const int j = min_of(arch::opaque_uniform(column_of_block(half, n)), arch::opaque_uniform(row_tile));
#pragma unroll
                for (int u = 0; u < slabs_at_once; ++u) {
                    left[u] = errors.load(j * slabs + group + u, group + u < slabs);
                }
            };
            const auto low_of = [&](int u) __attribute__((always_inline)) {
                return errors.load((tiles + arch::opaque_uniform(row_tile)) * slabs + group + u, group + u < slabs);
            };
            constexpr int most_lows = slabs_at_once > 1 ? slabs_at_once / 2 : 1;
            Pair lows[most_lows];
            // Requests come a step ahead where registers suffice.
            if constexpr (adjacent) {
                request_left(0);
            }
            arch::phase();
            // E dO^T, E dX^T                                           [16, 16], rows are tokens j
#pragma unroll
            for (int n = 0; n < most_blocks; ++n) {
                const int j = arch::opaque_uniform(column_of_block(half, n)); // scalar registers are short
                Tile of_o{}, of_x{};
                if constexpr (!adjacent) {
                    if (j > row_tile) {
                        continue;
                    }
                    request_left(n);
                }
                if (j <= row_tile) {
#pragma unroll
                    for (int u = 0; u < slabs_at_once; ++u) {
#pragma unroll
                        for (int s = 0; s < 2; ++s) {
                            of_o = T::mma(left[u].part[s], out[u].part[s], of_o);
                            of_x = T::mma(left[u].part[s], update[u].part[s], of_x);
                        }
                    }
                    of_o = arch::held(of_o);
                    of_x = arch::held(of_x);
                }
                if constexpr (adjacent) {
                    arch::phase();
                    if (n + 1 < most_blocks) {
                        request_left(n + 1);
                    } else {
#pragma unroll
                        for (int u = 0; u < slabs_at_once / 2; ++u) {
                            lows[u] = low_of(half * (slabs_at_once / 2) + u);
                        }
#pragma unroll
                        for (int u = 0; u < slabs_at_once; ++u) {
                            request_state(0, u);
                        }
                    }
                    arch::phase();
                }
                if (j <= row_tile) {
                    add_block(x, n, half, row_tile, group > 0, of_o, of_x, sums, betas, sum, beta);
                }
                arch::phase();
            }
            // dX . E
            Tile of_beta;
            const auto add_beta = [&](int u) __attribute__((always_inline)) {
                const Pair low = adjacent ? lows[u % most_lows] : low_of(u);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    of_beta += (widened<T>(error[u].part[s]) + widened<T>(low.part[s])) * widened<T>(update[u].part[s]);
                }
                of_beta = arch::held(of_beta);
            };
            of_beta = Tile{};
            if (slabs_at_once == 1 && group % 2 == half) {
                add_beta(0);
            }
#pragma unroll
            for (int u = 0; u < slabs_at_once / 2; ++u) {
                if (arch::opaque_uniform(half) == 0) {
                    add_beta(u);
                } else {
                    add_beta(slabs_at_once / 2 + u);
                }
            }
            put_column_sums(memory.betas[half] + 16 * row_tile, of_beta, group > 0);
            arch::phase();
            if constexpr (!adjacent) {
#pragma unroll
                for (int u = 0; u < slabs_at_once; ++u) {
                    request_state(0, u);
                }
            }
            // dO S0^T, E dS1^T and dX S0^T                             [keys, 16 tokens]
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                const int column = keys_of(arch::opaque_uniform(half), b);
                const Pair q_rows = q.load(q.place(row_tile, column), own_mask),
                           k_rows = k.load(k.place(row_tile, column), own_mask);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const int t = 2 * b + s;
#pragma unroll
                    for (int u = 0; u < slabs_at_once; ++u) {
                        if ((group + u < slabs) & ((group + u) % tiles == arch::opaque_uniform(row_tile))) {
                            state_pairs = arch::held(state_pairs + dot(state[u], d_state[u]));
                        }
                    }
                    Tile from_out{}, from_error{}, from_update{};
#pragma unroll
                    for (int u = 0; u < slabs_at_once; ++u) {
#pragma unroll
                        for (int part = 0; part < 2; ++part) {
                            from_out = T::mma(state[u].part[part], out[u].part[part], from_out);
                            from_error = T::mma(d_state[u].part[part], error[u].part[part], from_error);
                            from_update = T::mma(state[u].part[part], update[u].part[part], from_update);
                        }
                        arch::phase();
                        if (t + 1 < own_tiles) {
                            request_state(t + 1, u);
                        }
                    }
                    // Held: otherwise the compiler moves all this behind the branches of later tiles.
                    from_out = arch::held(from_out);
                    from_error = arch::held(from_error);
                    from_update = arch::held(from_update);
                    const Tile of_q = widened<T>(q_rows.part[s]), of_k = widened<T>(k_rows.part[s]);
                    read_q = arch::held(read_q + from_out * of_q);
                    read_k = arch::held(read_k + from_update * of_k);
                    write = arch::held(write + from_error * of_k);
                    d_query[t] = arch::held(d_query[t] + from_out * of_out_factor);
                    d_key[t] = arch::held(d_key[t] + from_error * of_err_factor + from_update * of_upd_factor);
                    arch::phase();
                }
            }
            group += slabs_at_once;
        } while (group < slabs);
        const ColumnFactor q_norm = columns_at(factor_of(factors, q_norm_row) + 16 * row_tile, at),
                           k_norm = columns_at(factor_of(factors, k_norm_row) + 16 * row_tile, at);
        put_column_sums(memory.states[half] + 16 * row_tile,
                        read_q * (of_out_factor * q_norm) + read_k * (of_upd_factor * k_norm));
        put_column_sums(memory.updates[half] + 16 * row_tile, write * (of_err_factor * k_norm));
        const float all_pairs = arch::inclusive_sum(state_pairs);
        if (arch::opaque(arch::lane()) == arch::lanes - 1) {
            memory.whole[arch::opaque_uniform(wave)] = all_pairs;
        }
        arch::workgroup_sync();
        write_gates(head, factors, total);
    }

    // dg and dbeta of a value head, from the sums in shared memory.
    DEVICE_MEMBER void write_gates(int head, const char *factors, float total) {
        const dwk_prefill_backward_args &x = arch::reread(all);
        const dwk_prefill_prepare_args &p = x.prepare;
        const int thread = arch::opaque(arch::thread());
        {
            const int token = thread % chunk, part = thread / chunk;
            constexpr int each = chunk / sum_parts;
            float sum = 0.0f;
            for (int i = 0; i < each; ++i) {
                sum += memory.pairs[token][part * each + i] - memory.pairs[part * each + i][token];
            }
            memory.sums[part][token] = sum;
        }
        arch::workgroup_sync();
        const int own = thread % chunk, token = chunk - 1 - own; // tokens in reverse
        float later = memory.states[0][token] + memory.states[1][token];
        for (int part = 0; part < sum_parts; ++part) {
            later += memory.sums[part][token];
        }
        const float suffix = first_threads_sum(later, memory.carry);
        const float earlier = own > 0 ? memory.updates[0][own - 1] + memory.updates[1][own - 1] : 0.0f;
        const float prefix = first_threads_sum(earlier, memory.carry + 1);
        if (thread < chunk) {
            memory.before[own] = prefix;
        }
        arch::workgroup_sync();
        float d_a_log = 0.0f, d_dt_bias = 0.0f;
        if (thread < chunk && token < rows) {
            float pairs = 0.0f;
            for (int w = 0; w < gradient_waves; ++w) {
                pairs += memory.whole[w];
            }
            const float d_gate = suffix + memory.before[token] + arch::exp2(total) * pairs;
            const float d_beta = memory.betas[0][token] + memory.betas[1][token];
            write_token_gates(arch::reread(all), sequence, begin, head, factors, token, d_gate, d_beta, d_a_log,
                              d_dt_bias);
        }
        const float of_a_log = first_threads_sum(d_a_log, memory.carry + 2);
        const float of_dt_bias = first_threads_sum(d_dt_bias, memory.carry + 3);
        if (thread == chunk - 1) {
            float *const to = x.partials + 2 * place_of(p, record, head);
            to[0] = of_a_log;
            to[1] = of_dt_bias;
        }
        arch::workgroup_sync();
    }

    // dQ += (D .* dP) K, dK += (D .* dP)^T Q + (D .* dL + (D .* dL)^T) K, of all value heads.
    DEVICE_MEMBER void add_matrices() {
        const int row_tile = this->row_tile(), half = this->half();
        for (int n = 0; n < most_blocks; ++n) {
            const int i = row_tile, j = column_of_block(half, n), block = lower_block(i, min_of(j, i));
            const Tile earlier = rows_at(factor_of(norms(), k_norm_row) + 16 * min_of(j, i), at);
            const Operand from_p = rounded<T>(arch::held(d_p[n] * earlier));
            const Operand to_p =
                flipped<T>(rounded<T>(d_p[n] * columns_at(factor_of(norms(), q_norm_row) + 16 * i, at)), one);
            const Operand from_l = rounded<T>(arch::held(d_l[n] * earlier));
            const Operand to_l =
                flipped<T>(rounded<T>(d_l[n] * columns_at(factor_of(norms(), k_norm_row) + 16 * i, at)), one);
            if (j <= i) {
                memory.matrices[0][block][arch::lane()] = from_p;
                memory.matrices[1][block][arch::lane()] = to_p;
                memory.matrices[2][block][arch::lane()] = from_l;
                memory.matrices[3][block][arch::lane()] = to_l;
            }
        }
        struct Rows {
            Pair k[own_pairs], q[own_pairs];
        };
        const auto load = [&](int j) __attribute__((always_inline)) {
            Rows out;
            const u32 mask = mask_of(j, rows);
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                const int column = keys_of(half, b);
                out.k[b] = k.load(k.place(j, column), mask);
                out.q[b] = q.load(q.place(j, column), mask);
            }
            return out;
        };
        Rows next;
        if constexpr (adjacent) {
            next = load(0);
        }
        arch::workgroup_sync();
#pragma unroll 1
        for (int j = 0; j < tiles; ++j) {
            Rows present;
            if constexpr (adjacent) {
                present = next;
                next = load(min_of(j + 1, tiles - 1));
                arch::phase();
            }
            const bool before = j <= row_tile, after = j >= row_tile;
            const int below = lower_block(max_of(j, row_tile), min_of(j, row_tile));
            const auto matrix = [&](int which, bool wanted) __attribute__((always_inline)) {
                const Operand stored = memory.matrices[which][below][arch::lane()];
                return wanted ? stored : Operand{};
            };
            const Operand of_p = matrix(0, before), of_p_later = matrix(1, after), of_l = matrix(2, before),
                          of_l_later = matrix(3, after);
            if constexpr (!adjacent) {
                present = load(j);
            }
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                const Pair of_k = flipped_pair<T>(present.k[b], one), of_q = flipped_pair<T>(present.q[b], one);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const int t = 2 * b + s;
                    d_query[t] = T::mma(of_k.part[s], of_p, d_query[t]);
                    d_key[t] = T::mma(of_q.part[s], of_p_later, d_key[t]);
                    d_key[t] = T::mma(of_k.part[s], of_l, d_key[t]);
                    d_key[t] = T::mma(of_k.part[s], of_l_later, d_key[t]);
                }
            }
#pragma unroll
            for (int t = 0; t < own_tiles; ++t) {
                d_query[t] = arch::held(d_query[t]);
                d_key[t] = arch::held(d_key[t]);
            }
        }
        arch::workgroup_sync();
    }

    // Gradient of a norm, and stores. `own`: gradients with regard to normalised rows.
    DEVICE_MEMBER void finish(Tile (&own)[own_tiles], const PairRows<> &of, void *to, const dwk_token_strides &strides,
                              RowFactor norm, bool of_q) {
        const int row_tile = this->row_tile(), half = this->half();
        const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
        const u32 mask = mask_of(row_tile, rows);
        if (p.flags & DWK_QK_L2NORM) {
            // dx = r (dy - y (y . dy)), with y = r x. A row of zeros has r = 1000.
            // Held where registers are enough, otherwise loaded twice.
            Pair own_rows[adjacent ? own_pairs : 1];
            Tile dot{};
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                const Pair x = of.load(of.place(row_tile, keys_of(half, b)), mask);
                if constexpr (adjacent) {
                    own_rows[b] = x;
                }
                dot += own[2 * b] * widened<T>(x.part[0]) + own[2 * b + 1] * widened<T>(x.part[1]);
            }
            float(&sums)[2][chunk] = of_q ? memory.states : memory.updates;
            put_column_sums(sums[half] + 16 * row_tile, dot);
            arch::workgroup_sync();
            ColumnFactor r = columns_at(factor_of(norms(), norm) + 16 * row_tile, at);
            const ColumnFactor along =
                (columns_at(sums[0] + 16 * row_tile, at) + columns_at(sums[1] + 16 * row_tile, at)) * r * r;
            const auto of_zeros = r == 0.0f;
            const ColumnFactor most = r * 0.0f + math::inverse_norm(0.0f);
            r = of_zeros ? most : r;
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                Pair x;
                if constexpr (adjacent) {
                    x = own_rows[b];
                } else {
                    x = of.load(of.place(row_tile, keys_of(half, b)), mask);
                }
                for (int s = 0; s < 2; ++s) {
                    own[2 * b + s] = (own[2 * b + s] - widened<T>(x.part[s]) * along) * r;
                }
            }
        }
        if (to) {
            const PairRows<> rows_of_to(to, strides, sequence, begin, key_head, p.key_dim);
            const float unit = arch::reread(all).unit;
#pragma unroll
            for (int b = 0; b < own_pairs; ++b) {
                rows_of_to.store(rows_of_to.place(row_tile, keys_of(half, b)), mask,
                                 Pair{{rounded<T>(unit * own[2 * b]), rounded<T>(unit * own[2 * b + 1])}});
            }
        }
    }

    const dwk_prefill_backward_args &all;
    GradientMemory &memory;
    const int record, key_head, sequence, begin, rows, wave;
    const LaneMap at;
    const Operand one;
    const PairRows<> q, k;
    Tile d_query[own_tiles], d_key[own_tiles];
    Tile d_p[most_blocks], d_l[most_blocks];
};

} // namespace backward
} // namespace prefill
