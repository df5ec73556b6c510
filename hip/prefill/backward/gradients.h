// Gradients of q, k and gates of a chunk and key head, by eight waves. A wave has 16 tokens (row tile i) and half of
// the key elements of dQ and dK, and one or two of the ten lower blocks of dP and dL. With dO' = scale dO, per value
// head:
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

#include "../../math/gates.h"
#include "../../math/norms.h"
#include "../gates.h"
#include "record.h"

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
    float states[2][chunk];       // a, of each half of the keys
    float updates[2][chunk];      // b
    float betas[2][chunk];        // dbeta, of each half of the value tiles
    float sums[sum_parts][chunk]; // row sums less column sums of W
    float before[chunk];          // sums of b over earlier tokens
    float whole[gradient_waves];  // c
    float carry[4];
};

// Sums of a tile's columns, from its 16 rows, to `to`[column].
DEVICE void put_column_sums(float *to, Tile x) {
    Tile ones;
    for (int e = 0; e < elements; ++e) {
        ones[e] = 1.0f;
    }
    const LaneMap at(arch::lane());
    const Tile sums = arch::held(arch::multiply_transposed_f32(x, ones, Tile{}));
    for (int e = 0; e < elements; ++e) {
        if (at.column(e) == 0) {
            to[at.row(e)] = sums[e];
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

DEVICE void store_scalar(void *p, int64_t index, int type, float x) {
    if (type == DWK_F32) {
        ((float *)p)[index] = x;
    } else {
        ((short *)p)[index] = type == DWK_BF16 ? Bf16::narrow(math::canonical(x)) : (short)F16::pack(x, 0.0f);
    }
}

// Row and column of a lower block.
DEVICE int row_of_block(int block) { return block >= 6 ? 3 : block >= 3 ? 2 : block >= 1 ? 1 : 0; }

template <class T, int Keys> class Gradients {
    static constexpr int key_tiles = Keys / 16;
    static constexpr int own_tiles = key_tiles / 2;

  public:
    DEVICE_MEMBER Gradients(const dwk_prefill_backward_args &x, GradientMemory &memory, int record, int key_head,
                            int sequence, int begin, int rows)
        : all(x), memory(memory), record(record), key_head(key_head), sequence(sequence), begin(begin), rows(rows),
          wave(arch::wave()), at(arch::lane()), one(identity<T>()),
          q(x.prepare.q, x.prepare.q_strides, sequence, begin, key_head, rows),
          k(x.prepare.k, x.prepare.k_strides, sequence, begin, key_head, rows) {}

    DEVICE_MEMBER void run() {
        for (int t = 0; t < own_tiles; ++t) {
            d_query[t] = d_key[t] = Tile{};
        }
        for (int i = arch::thread(); i < chunk * (chunk + 1); i += gradient_threads) {
            memory.pairs[0][i] = 0.0f;
        }
        multiply_rows();
        arch::workgroup_sync();
#pragma unroll 1
        for (int v = 0; v < arch::reread(all).prepare.group_heads; ++v) {
            const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
            add_head(dispatch::value_head(p, key_head, p.group_heads, v));
        }
        add_matrices();
        const dwk_prefill_backward_args &y = arch::reread(all);
        finish(d_query, q, y.d_q, y.d_q_strides, q_norm_row, true);
        finish(d_key, k, y.d_k, y.d_k_strides, k_norm_row, false);
    }

  private:
    DEVICE_MEMBER int block_of(int own) const { return arch::opaque_uniform(wave) + own * gradient_waves; }
    DEVICE_MEMBER bool has_block(int own) const { return block_of(own) < lower_blocks; }

    // Record of a value head, for norms: all value heads of a key head have the same.
    DEVICE_MEMBER const char *norms() const {
        const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
        return record_of(p, record, dispatch::value_head(p, arch::opaque_uniform(key_head), p.group_heads, 0));
    }

    // K K^T and Q K^T of the wave's blocks, transposed, divided by the norms.
    DEVICE_MEMBER void multiply_rows() {
        const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
        for (int n = 0; n < most_blocks; ++n) {
            const int block = min_of(block_of(n), lower_blocks - 1);
            const int i = row_of_block(block), j = block - lower_block(i, 0);
            Tile of_k{}, of_q{};
#pragma unroll 2
            for (int t = 0; t < key_tiles; ++t) {
                const Operand left = k.load(j, 16 * t, p.key_dim);
                of_k = arch::held(T::mma(left, k.load(i, 16 * t, p.key_dim), of_k));
                of_q = arch::held(T::mma(left, q.load(i, 16 * t, p.key_dim), of_q));
            }
            const Tile columns = rows_at(factor_of(norms(), k_norm_row) + 16 * j, at);
            keys[n] = of_k * columns * columns_at(factor_of(norms(), k_norm_row) + 16 * i, at);
            queries[n] = of_q * columns * columns_at(factor_of(norms(), q_norm_row) + 16 * i, at);
            d_p[n] = d_l[n] = Tile{};
        }
    }

    // Adds the value head's part of dQ and dK that passes through states, and its D .* dP and D .* dL. Writes dg and
    // dbeta.
    DEVICE_MEMBER void add_head(int head) {
        const dwk_prefill_backward_args &x = arch::reread(all); // saves scalar registers
        const dwk_prefill_prepare_args &p = x.prepare;
        const LaneMap at(arch::opaque(arch::lane()));
        // Opaque, too: otherwise all that follows from them is computed ahead of the loop over heads.
        const int value_tiles = (u32)p.value_dim / 16, wave = arch::opaque_uniform(this->wave), row_tile = wave % tiles,
                  half = wave / tiles;
        const auto block_of = [&](int own) __attribute__((always_inline)) { return wave + own * gradient_waves; };
        const char *const factors = record_of(p, record, head);
        const int64_t place = place_of(p, record, head);
        const char *const errors = x.errors + place * (2 * tiles * value_tiles) * block_bytes;
        const char *const updates = x.d_updates + place * (tiles * value_tiles) * block_bytes;
        const Rows16 d_o(x.d_o, x.d_o_strides, sequence, begin, head, rows);
        const float *const sums = factor_of(factors, sum_row), *const betas = factor_of(factors, beta_row);
        const float total = sums[chunk - 1];
        for (int n = 0; n < most_blocks; ++n) {
            const int block = min_of(block_of(n), lower_blocks - 1);
            const int i = row_of_block(block), j = block - lower_block(i, 0);
            // E dO^T, E dX^T                                           [16, 16], rows are tokens j
            Tile of_o{}, of_x{};
#pragma unroll 1
            for (int t = 0; t < value_tiles; ++t) {
                const Operand left = load_block(errors, j * value_tiles + t);
                of_o = arch::held(T::mma(left, d_o.load(i, 16 * t, p.value_dim), of_o));
                of_x = arch::held(T::mma(left, load_block(updates, i * value_tiles + t), of_x));
            }
            const Tile decayed =
                exp2_of(columns_at(sums + 16 * i, at) - rows_at(sums + 16 * j, at)) * rows_at(betas + 16 * j, at);
            Tile p_of_block = x.scale * decayed * of_o;
            Tile l_of_block = -(decayed * columns_at(betas + 16 * i, at) * of_x);
            for (int e = 0; e < elements; ++e) {
                const int earlier = 16 * j + at.row(e), later = 16 * i + at.column(e);
                p_of_block[e] = earlier <= later ? p_of_block[e] : 0.0f;
                l_of_block[e] = earlier < later ? l_of_block[e] : 0.0f;
                if (earlier < later && block_of(n) < lower_blocks) {
                    memory.pairs[later][earlier] = p_of_block[e] * queries[n][e] + l_of_block[e] * keys[n][e];
                }
            }
            d_p[n] += p_of_block;
            d_l[n] += l_of_block;
        }

        // dO S0^T, E dS1^T and dX S0^T                                 [keys, 16 tokens]
        const char *const states = x.states + place * (key_tiles * value_tiles) * block_bytes;
        const char *const d_states = x.d_states + place * (key_tiles * value_tiles) * block_bytes;
        const ColumnFactor sum = columns_at(sums + 16 * row_tile, at), beta = columns_at(betas + 16 * row_tile, at);
        Tile read{}, write{}; // elements of which the sums over keys are a and b
        float state_pairs = 0.0f;
#pragma unroll 1
        for (int t = 0; t < own_tiles; ++t) {
            const int key_tile = half * own_tiles + t;
            Tile of_o{}, of_s{}, of_x{};
#pragma unroll 1
            for (int u = 0; u < value_tiles; ++u) {
                const Operand state = load_block(states, key_tile * value_tiles + u),
                              d_state = load_block(d_states, key_tile * value_tiles + u);
                of_o = arch::held(T::mma(state, d_o.load(row_tile, 16 * u, p.value_dim), of_o));
                of_s = arch::held(T::mma(d_state, load_block(errors, row_tile * value_tiles + u), of_s));
                of_x = arch::held(T::mma(state, load_block(updates, row_tile * value_tiles + u), of_x));
                if (u % tiles == row_tile) {
                    const Tile product = widened<T>(state) * widened<T>(d_state);
                    for (int e = 0; e < elements; ++e) {
                        state_pairs += product[e];
                    }
                }
            }
            Tile later, ones;
            for (int e = 0; e < elements; ++e) {
                later[e] = total;
                ones[e] = 1.0f;
            }
            of_o = x.scale * (exp2_of(ones * sum) * of_o);
            of_s = exp2_of(later - sum) * beta * of_s;
            of_x = -(exp2_of(ones * sum) * beta * of_x);
            const Tile of_q = widened<T>(q.load(row_tile, 16 * key_tile, p.key_dim)) *
                              columns_at(factor_of(factors, q_norm_row) + 16 * row_tile, at);
            const Tile of_k = widened<T>(k.load(row_tile, 16 * key_tile, p.key_dim)) *
                              columns_at(factor_of(factors, k_norm_row) + 16 * row_tile, at);
            read += of_o * of_q + of_x * of_k;
            write += of_s * of_k;
            add(t, of_o, of_s + of_x);
        }
        put_column_sums(memory.states[half] + 16 * row_tile, read);
        put_column_sums(memory.updates[half] + 16 * row_tile, write);
        const float all_pairs = arch::inclusive_sum(state_pairs);
        if (arch::opaque(arch::lane()) == arch::lanes - 1) {
            memory.whole[wave] = all_pairs;
        }
        // dX . E
        Tile of_beta{};
#pragma unroll 1
        for (int u = half; u < value_tiles; u += 2) {
            const Tile error = widened<T>(load_block(errors, row_tile * value_tiles + u)) +
                               widened<T>(load_block(errors, (tiles + row_tile) * value_tiles + u));
            of_beta += error * widened<T>(load_block(updates, row_tile * value_tiles + u));
        }
        put_column_sums(memory.betas[half] + 16 * row_tile, of_beta);
        arch::workgroup_sync();
        write_gates(head, factors, total);
    }

    // Adds to the tile `t` of dQ and dK. The index is opaque to registers, so each is compared.
    DEVICE_MEMBER void add(int t, Tile of_q, Tile of_k) {
#pragma unroll
        for (int n = 0; n < own_tiles; ++n) {
            if (n == t) {
                d_query[n] += of_q;
                d_key[n] += of_k;
            }
        }
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
            write_token(head, factors, token, d_gate, d_beta, d_a_log, d_dt_bias);
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

    // Writes the gradients of a token's gates: of g and beta, or of a and b.
    DEVICE_MEMBER void write_token(int head, const char *factors, int token, float d_gate, float d_beta, float &d_a_log,
                                   float &d_dt_bias) {
        const dwk_prefill_backward_args &x = arch::reread(all);
        const dwk_prefill_prepare_args &p = x.prepare;
        if (p.flags & DWK_RAW_GATES) {
            const float beta = factor_of(factors, beta_row)[token], gate = factor_of(factors, gate_row)[token];
            const HeadGates of_head = head_gates(p, head);
            const Gates raw = GateReader(p, sequence, begin + token, true).load(head);
            d_a_log = d_gate == 0.0f ? 0.0f : d_gate * gate;
            // Where dg is 0, da is 0: exp(A_log) may be infinite.
            d_gate =
                d_gate == 0.0f ? 0.0f : -d_gate * arch::exp(of_head.a_log) * math::sigmoid(raw.g + of_head.dt_bias);
            d_dt_bias = d_gate;
            d_beta *= beta * (1.0f - (p.flags & DWK_NEGATIVE_EIGENVALUES ? 0.5f : 1.0f) * beta);
        }
        if (x.d_g) {
            store_scalar(x.d_g, token_offset(x.d_g_strides, sequence, begin + token, head), x.d_g_type, d_gate);
        }
        if (x.d_beta) {
            store_scalar(x.d_beta, token_offset(x.d_beta_strides, sequence, begin + token, head), x.d_beta_type,
                         d_beta);
        }
    }

    // dQ += (D .* dP) K, dK += (D .* dP)^T Q + (D .* dL + (D .* dL)^T) K, of all value heads.
    DEVICE_MEMBER void add_matrices() {
        const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
        for (int n = 0; n < most_blocks; ++n) {
            const int block = min_of(block_of(n), lower_blocks - 1);
            const int i = row_of_block(block), j = block - lower_block(i, 0);
            const Tile earlier = rows_at(factor_of(norms(), k_norm_row) + 16 * j, at);
            const Operand from_p = rounded<T>(arch::held(d_p[n] * earlier));
            const Operand to_p =
                flipped<T>(rounded<T>(d_p[n] * columns_at(factor_of(norms(), q_norm_row) + 16 * i, at)), one);
            const Operand from_l = rounded<T>(arch::held(d_l[n] * earlier));
            const Operand to_l =
                flipped<T>(rounded<T>(d_l[n] * columns_at(factor_of(norms(), k_norm_row) + 16 * i, at)), one);
            if (has_block(n)) {
                memory.matrices[0][block][arch::lane()] = from_p;
                memory.matrices[1][block][arch::lane()] = to_p;
                memory.matrices[2][block][arch::lane()] = from_l;
                memory.matrices[3][block][arch::lane()] = to_l;
            }
        }
        arch::workgroup_sync();
        const int row_tile = arch::opaque_uniform(wave) % tiles, half = arch::opaque_uniform(wave) / tiles;
        const Operand none{};
#pragma unroll
        for (int t = 0; t < own_tiles; ++t) {
            const int column = 16 * (half * own_tiles + t);
#pragma unroll
            for (int j = 0; j < tiles; ++j) {
                const Operand of_k = flipped<T>(k.load(j, column, p.key_dim), one);
                const Operand of_q = flipped<T>(q.load(j, column, p.key_dim), one);
                const bool before = j <= row_tile, after = j >= row_tile;
                const int below = lower_block(max_of(j, row_tile), min_of(j, row_tile));
                const auto matrix = [&](int which, bool wanted) __attribute__((always_inline)) {
                    const Operand stored = memory.matrices[which][below][arch::lane()];
                    return wanted ? stored : none;
                };
                d_query[t] = T::mma(of_k, matrix(0, before), d_query[t]);
                d_key[t] = T::mma(of_q, matrix(1, after), d_key[t]);
                d_key[t] = T::mma(of_k, matrix(2, before), d_key[t]);
                d_key[t] = T::mma(of_k, matrix(3, after), d_key[t]);
            }
            d_query[t] = arch::held(d_query[t]);
            d_key[t] = arch::held(d_key[t]);
        }
        arch::workgroup_sync();
    }

    // Gradient of a norm, and stores. `own`: gradients with regard to normalised rows.
    DEVICE_MEMBER void finish(Tile (&own)[own_tiles], const Rows16 &of, void *to, const dwk_token_strides &strides,
                              RowFactor norm, bool of_q) {
        const int row_tile = arch::opaque_uniform(wave) % tiles, half = arch::opaque_uniform(wave) / tiles;
        const dwk_prefill_prepare_args &p = arch::reread(all).prepare;
        if (p.flags & DWK_QK_L2NORM) {
            // dx = r (dy - y (y . dy)), with y = r x. A row of zeros has r = 1000.
            Tile dot{};
#pragma unroll
            for (int t = 0; t < own_tiles; ++t) {
                dot += own[t] * widened<T>(of.load(row_tile, 16 * (half * own_tiles + t), p.key_dim));
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
            for (int t = 0; t < own_tiles; ++t) {
                const Tile row = widened<T>(of.load(row_tile, 16 * (half * own_tiles + t), p.key_dim));
                own[t] = (own[t] - row * along) * r;
            }
        }
        if (to) {
            const Rows16 rows_of_to(to, strides, sequence, begin, key_head, rows);
#pragma unroll
            for (int t = 0; t < own_tiles; ++t) {
                rows_of_to.store(row_tile, 16 * (half * own_tiles + t), p.key_dim, rounded<T>(own[t]));
            }
        }
    }

    const dwk_prefill_backward_args &all;
    GradientMemory &memory;
    const int record, key_head, sequence, begin, rows, wave;
    const LaneMap at;
    const Operand one;
    const Rows16 q, k;
    Tile d_query[own_tiles], d_key[own_tiles];
    Tile keys[most_blocks], queries[most_blocks], d_p[most_blocks], d_l[most_blocks];
};

} // namespace backward
} // namespace prefill
