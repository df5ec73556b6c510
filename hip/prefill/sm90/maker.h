// Making warps on sm_90a: pairs of warps that copy chunks to shared memory and compute T, P and the row factors there,
// ahead of the warps that multiply with the state (prefill_fused). The pairs make chunks in turn, so two chunks are in
// the making at a time: a pair alone would mostly wait for its own instructions.
//
// Lower blocks [16, 16] of A, P and T of warp h of a pair: those of diagonal 32x32 block h, and block column h of the
// 32x32 block below the diagonal (OwnBlocks). T = (I - A)^-1 is computed from blocks (math/inverse.h).
#pragma once

#include "../fused_mode.h"

#include "../../math/inverse.h"
#include "../factors.h"
#include "../gates.h"
#include "copies.h"
#include "own_blocks.h"
#include "record.h"

namespace prefill {

// Shared memory of a pair, besides the ring.
struct MakerMemory {
    math::Blocks diagonal;     // A^T of the diagonal blocks, then T^T
    i32x4 t32[2][arch::lanes]; // T32^T, in the layout of registers
    ChunkFactors factors;      // gate_sum counts from the first row of each half of the chunk; norms are inverse
    float halves[2];           // sum of the gates of each half
    // Numbers of the work, here because a register that is spilled would come back from beyond the L1 cache.
    int sequence, begin, end, head, key_head, column;
};

// A pair of making warps, and what they do for one segment and value head.
template <class T, int Keys, bool Outputs> class Maker {
    typedef TokenCopier<Keys, Outputs, pair_threads> Copier;
    typedef prefill::Stage<Keys, Outputs> Stage;
    typedef prefill::Handover<Stage> Handover;

  public:
    DEVICE_MEMBER Maker(const dwk_prefill_fused_args &x, const Segment &segment, int head, int key_head, int column)
        : x(x.prepare), scan(x.scan), memory(shared_address(ring())),
          own(*(MakerMemory *)(ring() + Stage::maker_memory + pair() * sizeof(MakerMemory))), half(arch::wave() & 1) {
        own.sequence = segment.sequence;
        own.begin = segment.begin;
        own.end = segment.end;
        own.head = head;
        own.key_head = key_head;
        own.column = column;
    }

    DEVICE_MEMBER void run() {
        for (int i = 0; i < Stage::matrix_slots; ++i) {
            clear_upper_blocks<Stage>(matrices_at(i), wave_of_group(), scan_waves);
        }
        arch::barrier_wait(both_pairs, group_threads);
        if (left_at(pair()) <= 0) {
            return;
        }
        copier(pair()).copy_keys(keys_at(pair()), left_at(pair()));
        sum_gates(pair(), load_gates(pair()));
        arch::await_copies();
        arch::publish_shared();
#pragma unroll 1
        for (int number = pair(); left_at(number) > 0; number += pairs) {
            make(number);
        }
    }

  private:
    enum { both_pairs = 13, of_pair = 14 }; // and 15
    static DEVICE_MEMBER int pair() { return wave_of_group() / 2; }
    static DEVICE_MEMBER int row_of_thread() { return thread_of_group() % (u32)chunk; }
    // Barrier of this pair.
    static DEVICE_MEMBER void sync() { arch::barrier_wait(of_pair + pair(), pair_threads); }

    DEVICE_MEMBER u32 keys_at(int number) const { return memory + number % Stage::key_slots * Stage::key_bytes; }
    DEVICE_MEMBER u32 matrices_at(int slot) const { return memory + Stage::matrices + slot * Stage::matrix_bytes; }
    DEVICE_MEMBER u32 values_at(int number) const {
        return memory + Stage::values + number % Stage::value_slots * Stage::value_bytes;
    }

    DEVICE_MEMBER int left_at(int number) const { return own.end - own.begin - number * chunk; }
    // Addresses of a chunk's rows, derived anew each time: they are not worth registers.
    DEVICE_MEMBER Copier copier(int number) const {
        const Segment at{own.sequence, own.begin + number * chunk, own.end, 0, 0, false, false, false, 0, false};
        return Copier(scan, at, own.head, own.key_head, own.column);
    }
    DEVICE_MEMBER GateReader reader(int number) const {
        const int row = row_of_thread();
        return GateReader(x, own.sequence, own.begin + number * chunk + row, row < left_at(number));
    }
    // Starts to load the gates of this thread's row of a chunk.
    DEVICE_MEMBER GateReader::Bits load_gates(int number) const {
        return reader(number).load_bits(own.head, arch::load_bits);
    }
    // G within each half of the chunk, and -beta.
    DEVICE_MEMBER void sum_gates(int number, GateReader::Bits loaded) const {
        const GateReader from = reader(number);
        const Gates gates =
            from.gates_of(own.head, [&]() __attribute__((always_inline)) { return from.numbers(loaded); });
        const float sum = arch::inclusive_sum(gates.g * math::log2e);
        own.factors.gate_sum[row_of_thread()] = sum;
        own.factors.beta[row_of_thread()] = -gates.beta;
        if (arch::lane() == arch::lanes - 1) {
            own.halves[half] = sum;
        }
    }

    // Makes chunk `number`, and gets what this pair needs for its next one.
    DEVICE_MEMBER void make(int number) {
        const bool norm = x.flags & DWK_QK_L2NORM;
        const int slot = number % Stage::matrix_slots;
        const u32 keys = keys_at(number), matrices = matrices_at(slot);
        char *const rows = ring() + Stage::factors + slot * Stage::factor_bytes;
        const ChunkFactors &factors = own.factors;
        // Opaque: otherwise registers hold addresses of shared memory from chunk to chunk.
        const int lane = arch::opaque(arch::lane()) & (arch::lanes - 1);
        const LaneMap at(lane);
        const OwnBlocks blocks(arch::opaque(half));
        const int h = blocks.half;

        sync(); // copies and sums of gates are there
        if (norm) {
            find_norms(keys, at, h);
        }
        const float first_half = own.halves[0];
        // A = -beta D K K^T, strictly lower, and P = D Q K^T              [64, 64] each
        Handover::wait_finished(number - Stage::matrix_slots);
        const auto write = [&](int b, Tile kk, Tile kq) __attribute__((always_inline)) {
            const int row = blocks.row(b), column = blocks.column(b);
            if (norm) {
                const Tile norms = rows_at(factors.k_norm + 16 * column, at);
                kk *= norms * columns_at(factors.k_norm + 16 * row, at);
                if constexpr (Outputs) {
                    kq *= norms * columns_at(factors.q_norm + 16 * row, at);
                }
            }
            const Tile decayed = decay((b >= 3 ? first_half : 0.0f) - rows_at(factors.gate_sum + 16 * column, at),
                                       -columns_at(factors.gate_sum + 16 * row, at));
            const Tile a = block_of_a(decayed, columns_at(factors.beta + 16 * row, at), kk);
            if (blocks.on_diagonal(b)) {
                own.diagonal.put(row, a, at);
            } else {
                put_scratch(matrices, scratch_of(blocks, b), a);
            }
            if constexpr (Outputs) {
                Tile p = block_of_p(decayed, kq);
                if (blocks.on_diagonal(b)) {
                    p = strictly_lower(p, at);
                    on_diagonal(kq, row, at, [&](int of_row, float x) __attribute__((always_inline)) {
                        ((float *)rows)[diagonal_row * chunk + row_position(of_row)] = x;
                    });
                }
                put(matrices + Stage::p, row, column, p);
            }
        };
        {
            Tile kk[2], kq[2];
            multiply(kk, kq, keys, 2 * h, 2 * h);
            write(0, kk[0], kq[0]);
            write(1, kk[1], kq[1]);
        }
        {
            Tile kk[1], kq[1];
            multiply(kk, kq, keys, 2 * h + 1, 2 * h + 1);
            write(2, kk[0], kq[0]);
        }
        {
            Tile kk[2], kq[2];
            multiply(kk, kq, keys, h, 2);
            write(3, kk[0], kq[0]);
            write(4, kk[1], kq[1]);
        }
        write_factors(rows, norm, first_half);
        // The state is through with the chunk before this pair's last one by now.
        Handover::wait_finished(number - Stage::value_slots);
        copier(number).copy_values(values_at(number), left_at(number));
        if (left_at(number + pairs) > 0) {
            copier(number + pairs).copy_keys(keys_at(number + pairs), left_at(number + pairs));
        }
        const GateReader::Bits loaded = load_gates(number + pairs);
        invert(matrices, blocks, at, lane);
        arch::await_copies();
        arch::publish_shared();
        arch::wave_sync();
        if (lane == 0) {
            arch::phase_arrive(Handover::full(slot));
        }
        sum_gates(number + pairs, loaded);
    }

    // Transposed blocks (row + i, column) of K K^T and Q K^T.
    template <int Count>
    DEVICE_MEMBER void multiply(Tile (&kk)[Count], Tile (&kq)[Count], u32 keys, int column, int row) const {
        const int lane = arch::opaque(arch::lane());
        constexpr u32 tile_bytes = 16 * 128;
        const u32 left = keys + column * tile_bytes + swizzled(lane / 16 * 8 + lane % 8, lane / 8 % 2);
        const u32 right = keys + row * tile_bytes + swizzled(lane % 16, lane / 16);
        for (int i = 0; i < Count; ++i) {
            kk[i] = Tile{};
            kq[i] = Tile{};
        }
        for (int t = 0; t < Keys / 16; ++t) {
            const u32 panel = t / 4 * panel_bytes, step = t % 4 * 32;
            const Operand k = arch::load_left_operand((left ^ step) + (Stage::k + panel));
            for (int i = 0; i < Count; ++i) {
                const Operand x = arch::load_operand((right ^ step) + (Stage::k + panel + i * tile_bytes));
                if constexpr (T::rounds_finely) {
                    // Adds in f32, which rounds; the matrix unit would truncate the sum.
                    kk[i] += T::mma(k, x, Tile{});
                } else {
                    kk[i] = T::mma(k, x, kk[i]);
                }
                if constexpr (Outputs) {
                    kq[i] = T::mma(k, arch::load_operand((right ^ step) + (Stage::q + panel + i * tile_bytes)), kq[i]);
                }
            }
        }
    }

    // Finds 1 / |q| and 1 / |k| of this warp's rows.
    DEVICE_MEMBER void find_norms(u32 keys, LaneMap at, int h) const {
        ChunkFactors &factors = own.factors;
        for (int i = 0; i < 2; ++i) {
            const int row = 2 * h + i;
            const int lane = arch::opaque(arch::lane());
            const u32 place = row * (16 * 128) + swizzled(lane % 16, lane / 16);
            Tile qq{}, kk{};
#pragma unroll 2
            for (int t = 0; t < Keys / 16; ++t) {
                const u32 step = t / 4 * panel_bytes + (place ^ t % 4 * 32);
                const Operand k = arch::load_operand(keys + Stage::k + step);
                if constexpr (T::rounds_finely) {
                    kk += T::mma(k, k, Tile{});
                } else {
                    kk = T::mma(k, k, kk);
                }
                if constexpr (Outputs) {
                    const Operand q = arch::load_operand(keys + Stage::q + step);
                    qq = T::mma(q, q, qq);
                }
            }
            on_diagonal(kk, row, at, [&](int of_row, float x) __attribute__((always_inline)) {
                // A row of zeros gets 0, not 1000 (factors.h).
                factors.k_norm[of_row] = x == 0.0f ? 0.0f : math::inverse_norm(x);
            });
            if constexpr (Outputs) {
                on_diagonal(qq, row, at, [&](int of_row, float x) __attribute__((always_inline)) {
                    factors.q_norm[of_row] = math::inverse_norm(x);
                });
            }
        }
        sync();
    }

    // Writes the factors of this thread's row to the ring.
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

    // Writes block (i, j) of T or P, given transposed.
    static DEVICE_MEMBER void put(u32 matrix, int i, int j, Tile transposed) {
        const int lane = arch::opaque(arch::lane());
        arch::store_operand(matrix + swizzled(16 * i + lane % 16, 2 * j + lane / 16), rounded<T>(transposed));
    }

    // Blocks of A below the diagonal wait in the memory of T, where no block of T is written before they have been
    // read. A lane of any warp reads the elements of its own lane number.
    static DEVICE_MEMBER int scratch_of(const OwnBlocks &blocks, int b) {
        // Warp 0: A10, A20, A30. Warp 1: A32, and, in the upper right quadrant, A21 and A31.
        return blocks.half == 0 ? (b == 1 ? 0 : b == 3 ? 1 : 4) : (b == 1 ? 5 : b == 3 ? 2 : 3);
    }
    static DEVICE_MEMBER u32 scratch_at(u32 matrices, int scratch, int half) {
        return matrices + Stage::t + scratch / 4 * (32 * 128) + swizzled(arch::lane(), scratch % 4 * 2 + half);
    }
    static DEVICE_MEMBER void put_scratch(u32 matrices, int scratch, Tile x) {
        store_shared(scratch_at(matrices, scratch, 0), bits<i32x4>(x.lo));
        store_shared(scratch_at(matrices, scratch, 1), bits<i32x4>(x.hi));
    }
    static DEVICE_MEMBER Tile get_scratch(u32 matrices, int scratch) {
        Tile x;
        x.lo = bits<f32x4>(arch::load_shared(scratch_at(matrices, scratch, 0)));
        x.hi = bits<f32x4>(arch::load_shared(scratch_at(matrices, scratch, 1)));
        return x;
    }

    // Computes this warp's blocks of T = (I - A)^-1, all transposed.
    DEVICE_MEMBER void invert(u32 matrices, const OwnBlocks &blocks, LaneMap at, int lane) const {
        const auto multiply_transposed = [](Tile x, Tile y, Tile c) __attribute__((always_inline)) {
            return arch::multiply_transposed_parts(x, y, c);
        };
        const int h = blocks.half;
        const u32 to = matrices + Stage::t;
        math::Blocks &diagonal = own.diagonal;
        arch::wave_sync();
        math::invert_blocks(diagonal, math::UnitColumn(lane), lane, 2 * h);
        const Tile inside = get_scratch(matrices, scratch_of(blocks, 1));
        const Tile a2 = get_scratch(matrices, scratch_of(blocks, 3)), a3 = get_scratch(matrices, scratch_of(blocks, 4));
        arch::wave_sync();
        const Tile first = diagonal.get(2 * h, at), second = diagonal.get(2 * h + 1, at);
        put(to, 2 * h, 2 * h, strictly_lower(first, at));
        put(to, 2 * h + 1, 2 * h + 1, strictly_lower(second, at));
        const Tile joined = multiply_transposed(multiply_transposed(inside, diagonal.get_transposed(2 * h, at), Tile{}),
                                                second, Tile{});
        put(to, 2 * h + 1, 2 * h, joined);
        if (h == 1) {
            own.t32[0][lane] = bits<i32x4>(joined.lo);
            own.t32[1][lane] = bits<i32x4>(joined.hi);
        }
        sync();
        // W = [A20 A21; A30 A31] [T00 0; T10 T11], column h
        const Tile t11 = diagonal.get_transposed(h, at);
        Tile w2 = multiply_transposed(a2, t11, Tile{}), w3 = multiply_transposed(a3, t11, Tile{});
        if (h == 0) {
            const Tile t10 = math::transposed(joined, at);
            w2 = multiply_transposed(get_scratch(matrices, 2), t10, w2);
            w3 = multiply_transposed(get_scratch(matrices, 3), t10, w3);
            // These blocks of T are zeros.
            for (int half = 0; half < 4; ++half) {
                store_shared(scratch_at(matrices, 2 + half / 2, half % 2), i32x4{});
            }
            if (lane < 16) {
                store_shared(scratch_at(matrices, 1, 0), i32x4{});
                store_shared(scratch_at(matrices, 1, 1), i32x4{});
            }
        }
        Tile t32;
        t32.lo = bits<f32x4>(own.t32[0][lane]);
        t32.hi = bits<f32x4>(own.t32[1][lane]);
        // T2c = T22 W2c, T3c = T33 W3c + T32 W2c
        put(to, 2, h, multiply_transposed(w2, diagonal.get(2, at), Tile{}));
        put(to, 3, h, multiply_transposed(w3, diagonal.get(3, at), multiply_transposed(w2, t32, Tile{})));
    }

    const dwk_prefill_prepare_args &x;
    const dwk_prefill_scan_args &scan;
    const u32 memory;
    MakerMemory &own;
    const int half; // of the pair
};

} // namespace prefill
