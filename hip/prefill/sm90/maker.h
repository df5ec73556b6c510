// Making warps on sm_90a: a warpgroup that copies chunks to shared memory and computes T, P and the row factors there,
// a chunk ahead of the warps that multiply with the state (prefill_fused).
//
// Warp w computes row w of the 16x16 blocks of A and P, blocks 0 to w. T = (I - A)^-1 is computed from blocks
// (math/inverse.h); its rows 0 and 1 are the inverse of the upper 32x32 block, and
//   W = [A20 A21; A30 A31] [T00 0; T10 T11]        T2c = T22 W2c        T3c = T33 W3c + T32 W2c
// with row 2 of W and T by warp 2, row 3 of W by warp 3, and column c of row 3 of T by warp c.
#pragma once

#include "../../math/inverse.h"
#include "../factors.h"
#include "../gates.h"
#include "copies.h"
#include "kept_tile.h"
#include "registers.h"

namespace prefill {

// Shared memory of the making warps, besides the ring.
struct MakerMemory {
    math::Blocks diagonal;         // A^T of the diagonal blocks, then T^T
    math::Blocks below;            // block 0: T10^T
    KeptTile a[lower_blocks];      // A^T of the blocks below the diagonal
    KeptTile q[lower_block(2, 0)]; // Q K^T of the blocks of warps 0 and 1
    KeptTile t32, w[2][2];         // T32^T; rows 2 and 3 of W
    ChunkFactors factors;          // gate_sum counts from the first row of each half of the chunk; norms are inverse
    float halves[2];               // sum of the gates of each half
};

// Making warps of a workgroup, and what they do for one segment and value head.
template <class T, int Keys, bool Outputs> class Maker : TokenCopier<Keys, Outputs, chunk> {
    typedef TokenCopier<Keys, Outputs, chunk> Base;
    typedef prefill::Stage<Keys, Outputs> Stage;
    using Base::groups;
    using Base::left;
    using Base::memory;

  public:
    DEVICE_MEMBER Maker(const dwk_prefill_fused_args &x, const Segment &s, int head, int key_head, int column,
                        MakerMemory &own)
        : Base(x.scan, s, head, key_head, column), x(x.prepare), own(own), sequence(s.sequence), head(head),
          token(s.begin + row_of_thread()), warp(wave_of_group()) {}

    DEVICE_MEMBER void run() {
        Base::clear_upper_blocks();
        int stage = 0;
        arch::wait_for_previous_kernel();
        GateReader::Bits loaded{0, 0};
        if (prepares()) {
            loaded = reader().load_bits(arch::opaque(head), arch::load_bits);
            Base::copy_tokens(memory);
            sum_gates(reader().gates_of(arch::opaque(head),
                                        [&]() __attribute__((always_inline)) { return reader().numbers(loaded); }));
        }
#pragma unroll 1
        for (int number = 0; left > 0; ++number) {
            const int next = stage + 1 == Stage::count ? 0 : stage + 1;
            make(stage, next, number + 1 >= Stage::count);
            arch::publish_shared();
            for (int g = 0; g < Stage::most_groups; ++g) {
                if (g < groups) {
                    Handover<Stage>::full(g, stage);
                }
            }
            left -= chunk;
            stage = next;
        }
    }

  private:
    // Barriers of the making warps. The ring uses the numbers below.
    enum { copied = 13, diagonals_made = 14, exchanged = 15 };
    static DEVICE_MEMBER void sync(int id) { arch::barrier_wait(id, group_threads); }

    // Warps 2 and 3 copy, and prepare the gates, while warps 0 and 1 invert diagonal blocks. They have a thread per
    // row.
    DEVICE_MEMBER bool prepares() const { return warp >= 2; }
    static DEVICE_MEMBER int row_of_thread() { return thread_of_group() % (u32)chunk; }
    // Reads the gates of this thread's row of the chunk that `token` and `left` are at.
    DEVICE_MEMBER GateReader reader() const {
        return GateReader(x, arch::opaque(sequence), token, row_of_thread() < left);
    }
    // G within each half of the chunk, and -beta.
    DEVICE_MEMBER void sum_gates(Gates gates) const {
        const float sum = arch::inclusive_sum(gates.g * math::log2e);
        own.factors.gate_sum[row_of_thread()] = sum;
        own.factors.beta[row_of_thread()] = -gates.beta;
        if (arch::lane() == arch::lanes - 1) {
            own.halves[warp - 2] = sum;
        }
    }

    // Copies the next chunk to its stage, once it is free.
    DEVICE_MEMBER void copy_next(int next, bool used) {
        if (left <= chunk) {
            return;
        }
        for (int g = 0; g < Stage::most_groups && used; ++g) {
            if (g < groups) {
                if (prepares()) {
                    Handover<Stage>::wait_empty(g, next);
                } else {
                    Handover<Stage>::empty(g, next); // takes part without waiting
                }
            }
        }
        if (prepares()) {
            left -= chunk;
            Base::copy_tokens(memory + next * Stage::bytes);
            left += chunk;
        }
    }

    // Makes T, P and the row factors of the chunk in `stage`, and starts to copy the chunk after it to stage `next`,
    // which was `used` before.
    DEVICE_MEMBER void make(int stage, int next, bool used) {
        const bool norm = x.flags & DWK_QK_L2NORM;
        const u32 at_stage = memory + stage * Stage::bytes;
        char *const rows = ring() + stage * Stage::bytes + Stage::rows;
        const ChunkFactors &factors = own.factors;
        // Opaque: otherwise registers hold addresses of shared memory from chunk to chunk.
        const int lane = arch::opaque(arch::lane()) & (arch::lanes - 1);
        const LaneMap at(lane);

        arch::await_copies();
        arch::publish_shared();
        sync(copied);
        const float first_half = own.halves[0];
        // K K^T, row `warp` of blocks, each transposed
        Accumulators<tiles> products;
        start_keys(products, at_stage);
        GateReader::Bits loaded{0, 0};
        if (prepares()) {
            token += chunk;
            left -= chunk;
            loaded = reader().load_bits(arch::opaque(head), arch::load_bits);
            left += chunk;
        }
        if constexpr (!T::rounds_finely) {
            arch::await_products<0>();
        }
        products.pin();
        if (norm) {
            find_norms(products, at_stage, at);
        }
        for (int j = 0; j < tiles; ++j) {
            if (j <= warp) {
                Tile kk = tile_of(products, j);
                if (norm) {
                    kk *= rows_at(factors.k_norm + 16 * j, at) * columns_at(factors.k_norm + 16 * warp, at);
                }
                const Tile a = block_of_a(decay_of(j, at, first_half), columns_at(factors.beta + 16 * warp, at), kk);
                if (j == warp) {
                    own.diagonal.put(j, a, at);
                } else {
                    own.a[lower_block(warp, j)].put(a);
                }
            }
        }
        // Q K^T reuses the registers of K K^T. It is complete before warps part: ptxas would wait there anyway.
        if constexpr (Outputs) {
            start_queries(products, at_stage);
            arch::await_products<0>();
            products.pin();
        }
        if (prepares()) {
            arch::barrier_arrive(diagonals_made, group_threads);
            copy_next(next, used);
            write_factors(rows, norm, first_half);
            for (int j = 0; j < tiles; ++j) {
                if (j <= warp) {
                    write_p(tile_of(products, j), j, at_stage, rows, norm, first_half, at);
                }
            }
        } else {
            for (int j = 0; j < 2 && Outputs; ++j) {
                if (j <= warp) {
                    own.q[lower_block(warp, j)].put(tile_of(products, j));
                }
            }
            sync(diagonals_made);
            copy_next(next, used);
            math::invert_blocks(own.diagonal, math::UnitColumn(lane), lane, 2 * warp);
        }
        sync(exchanged);
        invert(at_stage + Stage::t, at, [&]() __attribute__((always_inline)) {
            for (int j = 0; j < 2; ++j) {
                if (j <= warp) {
                    write_p(own.q[lower_block(warp, j)].get(), j, at_stage, rows, norm, first_half, at);
                }
            }
        });
        if (prepares() && left > chunk) {
            left -= chunk;
            sum_gates(reader().gates_of(arch::opaque(head),
                                        [&]() __attribute__((always_inline)) { return reader().numbers(loaded); }));
            left += chunk;
        }
    }

    // Block (warp, j) of P, from Q K^T, transposed.
    DEVICE_MEMBER void write_p(Tile kq, int j, u32 at_stage, char *rows, bool norm, float first_half,
                               LaneMap at) const {
        if constexpr (Outputs) {
            const ChunkFactors &factors = own.factors;
            if (norm) {
                kq *= rows_at(factors.k_norm + 16 * j, at) * columns_at(factors.q_norm + 16 * warp, at);
            }
            const Tile p = block_of_p(decay_of(j, at, first_half), kq);
            if (j == warp) {
                put(at_stage + Stage::p, j, j, strictly_lower(p, at));
                on_diagonal(kq, j, at, [&](int of_row, float x) __attribute__((always_inline)) {
                    ((float *)rows)[diagonal_row * chunk + row_position(of_row)] = x;
                });
            } else {
                put(at_stage + Stage::p, warp, j, p);
            }
        }
    }

    static DEVICE_MEMBER Tile tile_of(const Accumulators<tiles> &a, int i) {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] = a.at[elements * i + e];
        }
        return out;
    }

    // Starts K K^T of this warp's 16 rows of the left matrix, transposed: [64, 16]. Complete at once for f16.
    DEVICE_MEMBER void start_keys(Accumulators<tiles> &kk, u32 at_stage) const {
        const u64 stage = arch::described(at_stage);
        if constexpr (T::rounds_finely) {
            // Adds in f32, which rounds: the matrix unit would truncate the sum.
            Accumulators<tiles> part;
            for (int e = 0; e < elements * tiles; ++e) {
                kk.at[e] = 0.0f;
            }
            for (int t = 0; t < 4 * Stage::panels; ++t) {
                arch::begin_products();
                const u64 k = column_tile(stage, Stage::k, t);
                T::multiply_async_shared(part.at, k, k, false);
                arch::commit_products();
                arch::await_products<0>();
                part.pin();
                for (int e = 0; e < elements * tiles; ++e) {
                    kk.at[e] += part.at[e];
                }
                kk.pin();
            }
        } else {
            arch::begin_products();
            for (int t = 0; t < 4 * Stage::panels; ++t) {
                const u64 k = column_tile(stage, Stage::k, t);
                T::multiply_async_shared(kk.at, k, k, t > 0);
            }
            arch::commit_products();
        }
    }
    // Starts Q K^T of this warp's 16 rows of Q, transposed: [64, 16].
    DEVICE_MEMBER void start_queries(Accumulators<tiles> &kq, u32 at_stage) const {
        const u64 stage = arch::described(at_stage);
        kq.pin();
        arch::begin_products();
        for (int t = 0; t < 4 * Stage::panels; ++t) {
            T::multiply_async_shared(kq.at, column_tile(stage, Stage::q, t), column_tile(stage, Stage::k, t), t > 0);
        }
        arch::commit_products();
    }
    static DEVICE_MEMBER u64 column_tile(u64 stage, u32 matrix, int t) {
        return stage + ((matrix + t / 4 * panel_bytes + t % 4 * 32) >> 4);
    }

    // Finds 1 / |q| and 1 / |k| of this warp's rows. `kk`: K K^T.
    DEVICE_MEMBER void find_norms(const Accumulators<tiles> &kk, u32 at_stage, LaneMap at) const {
        ChunkFactors &factors = own.factors;
        if constexpr (Outputs) {
            Tile qq{};
#pragma unroll 2
            for (int t = 0; t < 4 * Stage::panels; ++t) {
                const int lane = arch::opaque(arch::lane()), of_row = 16 * warp + lane % 16;
                const Operand q = arch::load_operand(at_stage + Stage::q + t / 4 * panel_bytes +
                                                     swizzled(of_row, t % 4 * 2 + lane / 16));
                qq = T::mma(q, q, qq);
            }
            on_diagonal(qq, warp, at, [&](int of_row, float x) __attribute__((always_inline)) {
                factors.q_norm[of_row] = math::inverse_norm(x);
            });
        }
        for (int j = 0; j < tiles; ++j) {
            if (j == warp) {
                on_diagonal(tile_of(kk, j), j, at, [&](int of_row, float x) __attribute__((always_inline)) {
                    // A row of zeros gets 0, not 1000 (factors.h).
                    factors.k_norm[of_row] = x == 0.0f ? 0.0f : math::inverse_norm(x);
                });
            }
        }
        sync(exchanged);
    }

    // exp(G_i - G_j) of block (warp, j), transposed.
    DEVICE_MEMBER Tile decay_of(int j, LaneMap at, float first_half) const {
        const ChunkFactors &factors = own.factors;
        const float between = warp >= 2 && j < 2 ? first_half : 0.0f;
        return decay(between - rows_at(factors.gate_sum + 16 * j, at), -columns_at(factors.gate_sum + 16 * warp, at));
    }

    // Writes the factors of this thread's row to the stage.
    DEVICE_MEMBER void write_factors(char *rows, bool norm, float first_half) const {
        const int row = arch::opaque(row_of_thread());
        const ChunkFactors &factors = own.factors;
        const float beta = -factors.beta[row], total = first_half + own.halves[1];
        const float sum = factors.gate_sum[row] + (row >= arch::lanes ? first_half : 0.0f);
        float q_norm = 1.0f, k_norm = 1.0f, unit = 1.0f;
        if (norm) {
            q_norm = Outputs ? factors.q_norm[row] : 1.0f;
            k_norm = factors.k_norm[row];
            const int greatest = max_of(bits<int>(k_norm), bits<int>(factors.k_norm[row ^ arch::lanes]));
            unit = power_of_two_below(__nvvm_redux_sync_max(greatest, 0xffffffff));
        }
        const float per_unit = bits<float>(0x7f000000 - bits<int>(unit)); // 1 / unit
        float *const to = (float *)rows + row_position(row);
        to[beta_row * chunk] = beta;
        to[read_row * chunk] = read_factor(beta, k_norm, sum);
        to[output_row * chunk] = output_factor(q_norm, sum);
        to[write_row * chunk] = write_factor(k_norm, per_unit, total, sum);
        if (row == 0) {
            *(f32x2 *)(rows + row_factors * chunk * 4) = f32x2{arch::exp2(total) * per_unit, unit};
        }
    }

    // Writes block (i, j) of T or P to the stage, given transposed.
    static DEVICE_MEMBER void put(u32 matrix, int i, int j, Tile transposed) {
        const int lane = arch::opaque(arch::lane());
        arch::store_operand(matrix + swizzled(16 * i + lane % 16, 2 * j + lane / 16), rounded<T>(transposed));
    }

    // T = (I - A)^-1. All inverses of diagonal blocks are in own.diagonal. Warps 0 and 1 call meanwhile() where they
    // would wait.
    template <class F> DEVICE_MEMBER void invert(u32 to, LaneMap at, const F &meanwhile) {
        const auto multiply_transposed = [](Tile x, Tile y, Tile c) __attribute__((always_inline)) {
            return arch::multiply_transposed_parts(x, y, c);
        };
        const auto join = [&](Tile a21, Tile t11, Tile t22) __attribute__((always_inline)) {
            return multiply_transposed(multiply_transposed(a21, t11, Tile{}), t22, Tile{});
        };
        math::Blocks &diagonal = own.diagonal;
        const Tile own_inverse = diagonal.get(warp, at);
        put(to, warp, warp, strictly_lower(own_inverse, at));
        const auto a = [&](int j) __attribute__((always_inline)) { return own.a[lower_block(warp, j)].get(); };
        Tile w[2];
        if (warp == 1) {
            const Tile t10 = join(a(0), diagonal.get_transposed(0, at), own_inverse);
            own.below.put(0, t10, at);
            put(to, 1, 0, t10);
        } else if (warp >= 2) {
            if (warp == 3) {
                const Tile t32 = join(a(2), diagonal.get_transposed(2, at), own_inverse);
                own.t32.put(t32);
                put(to, 3, 2, t32);
            }
            w[0] = multiply_transposed(a(0), diagonal.get_transposed(0, at), Tile{});
            w[1] = multiply_transposed(a(1), diagonal.get_transposed(1, at), Tile{});
            own.w[warp - 2][1].put(w[1]);
        }
        if (warp < 2) {
            arch::barrier_arrive(copied, group_threads);
            meanwhile();
        } else {
            sync(copied);
            w[0] = multiply_transposed(a(1), own.below.get_transposed(0, at), w[0]);
            own.w[warp - 2][0].put(w[0]);
        }
        sync(exchanged);
        if (warp < 2) {
            put(to, 3, warp,
                multiply_transposed(own.w[1][warp].get(), diagonal.get(3, at),
                                    multiply_transposed(own.w[0][warp].get(), own.t32.get(), Tile{})));
        } else if (warp == 2) {
            put(to, 2, 0, multiply_transposed(w[0], own_inverse, Tile{}));
            put(to, 2, 1, multiply_transposed(w[1], own_inverse, Tile{}));
        }
    }

    const dwk_prefill_prepare_args &x;
    MakerMemory &own;
    const int sequence, head;
    int64_t token; // this thread's token of the current chunk
    const int warp;
};

} // namespace prefill
