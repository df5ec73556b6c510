// Making warps on sm_90a: a warpgroup that copies chunks to shared memory and computes T, P and the row factors there,
// ahead of the warps that multiply with the state (prefill_fused).
//
// K K^T and Q K^T are products of the warpgroup. Warp w then holds row w of the 16x16 blocks of A and P. Decays of
// blocks below the diagonal are products of a number of the row and one of the column: D_ij = exp(G_i - G_r) exp(G_r -
// G_j) with the last row r before row block w. Two warps invert the diagonal blocks of I - A by substitution, while the
// others go on with A and P. With T_ii = (I - A_ii)^-1 and B_ij = T_ii A_ij the other blocks of T = (I - A)^-1 are
//
//   T_ij = M_ij T_jj, M = I + B + B^2 + B^3: M_20 = B_20 + B_21 B_10, M_30 = B_30 + B_31 B_10 + B_32 M_20    [16, 16]
//
// in few products that wait for each other. Their operands are pairs of bf16 numbers (Parts).
#pragma once

#include "../fused_mode.h"

#include "../../math/inverse.h"
#include "../factors.h"
#include "../gates.h"
#include "copies.h"
#include "record.h"
#include "registers.h"

namespace prefill {

// A 16x16 f32 block as the sum of two bf16 operands.
struct Parts {
    Operand high, low;
    DEVICE_MEMBER Parts(Operand high, Operand low) : high(high), low(low) {}
    // Rows of the operands are columns of x.
    DEVICE_MEMBER explicit Parts(Tile x) : high(rounded<Bf16>(x)), low(rounded<Bf16>(x - widened<Bf16>(high))) {}
    DEVICE_MEMBER Tile sum() const { return widened<Bf16>(high) + widened<Bf16>(low); }
};

// c[i][j] + sum over k of left[i][k] right[j][k], without the product of the low parts.
DEVICE Tile multiply(const Parts &left, const Parts &right, Tile c) {
    return Bf16::mma(left.high, right.high, Bf16::mma(left.high, right.low, Bf16::mma(left.low, right.high, c)));
}

// Lower 16x16 blocks of A, T and B in shared memory, 1 KiB each. Diagonal blocks are f32 at first (math::Blocks).
// Others are parts: rows of 64 bytes, the high numbers of a row before the low ones. The row's number permutes its
// 16-byte quarters as in math::SomeBlocks, so eight rows of a quarter lie in different banks.
class PartsBlocks {
  public:
    static constexpr int bytes = 1024, count = lower_blocks;
    // Index of block (i, j): diagonal blocks come first.
    static DEVICE_MEMBER int index(int i, int j) { return i == j ? i : tiles + i * (i - 1) / 2 + j; }

    DEVICE_MEMBER PartsBlocks(u32 memory, int lane)
        : rows(memory + place(lane % 16, lane / 16)), columns(memory + place(lane / 16 * 8 + lane % 8, lane / 8 % 2)) {}
    // The quarters of a block's row.
    static DEVICE_MEMBER u32 place(int row, int quarter) { return row * 64 + (quarter ^ (row >> 1 & 3)) * 16; }

    // Operands with the rows of the block, and with its columns.
    DEVICE_MEMBER Parts by_rows(int block) const {
        const u32 at = rows + block * bytes;
        return Parts(arch::load_operand(at), arch::load_operand(at ^ 32));
    }
    DEVICE_MEMBER Parts by_columns(int block) const {
        const u32 at = columns + block * bytes;
        return Parts(arch::load_transposed(at), arch::load_transposed(at ^ 32));
    }
    // Writes a block, given transposed.
    DEVICE_MEMBER void put(int block, Tile transposed) const {
        const Parts x(transposed);
        const u32 at = rows + block * bytes;
        arch::store_operand(at, x.high);
        arch::store_operand(at ^ 32, x.low);
    }

  private:
    const u32 rows, columns;
};

// What follows from the gates of a chunk, whose rows count from the first row of their half.
struct ChunkGates {
    alignas(16) float sum[chunk];  // G / ln 2
    alignas(16) float beta[chunk]; // -beta
    // Factors of A and P below the diagonal blocks, in rows and, for row w of blocks, in columns 0 to 16 w - 1.
    alignas(16) float a_rows[chunk], p_rows[chunk], columns[96];
    float halves[2]; // sum of each half
    // Index of the first factor in columns.
    static DEVICE_MEMBER int columns_of(int w) { return 8 * w * (w - 1); }
    // G_r of row w of blocks: r is the last row before it.
    DEVICE_MEMBER float before(int w) const { return w % 2 ? sum[16 * w - 1] : 0.0f; }
};

// Shared memory of the making warps, besides the ring.
struct MakerMemory {
    WorkMemory work;
    union alignas(64) {
        math::Blocks diagonal; // A^T of the diagonal blocks, in f32
        char blocks[PartsBlocks::count * PartsBlocks::bytes];
    };
    ChunkGates gates[2];                            // of chunk n in n % 2
    alignas(16) float q_norm[chunk], k_norm[chunk]; // 1 / |q|, 1 / |k|
};

// What the making warps do for one segment and value head.
template <class T, int Keys, bool Outputs> class Maker {
    typedef TokenCopier<Keys, Outputs, 2 * arch::lanes> Copier;
    typedef prefill::Stage<Keys, Outputs> Stage;
    typedef prefill::Handover<Stage> Handover;

  public:
    DEVICE_MEMBER explicit Maker(const dwk_prefill_fused_args &x)
        : x(x.prepare), scan(x.scan), own(*(MakerMemory *)(ring() + Stage::maker_memory)), warp(wave_of_group()) {}

    DEVICE_MEMBER void run() {
        for (int i = 0; i < Stage::matrix_slots; ++i) {
            clear_upper_blocks<Stage>(matrices_at(i), warp, scan_waves);
        }
        sync();
        if (left_at(0) <= 0) {
            return;
        }
        if (warp < inverting) {
            copy_keys(0);
        } else {
            sum_gates(0, load_gates(0));
            find_decays(0);
        }
        GateReader::Bits loaded = load_gates(1);
#pragma unroll 1
        for (int number = 0; left_at(number) > 0; ++number) {
            make(number, loaded);
        }
    }

  private:
    enum { of_all = 13, of_diagonal = 14, of_gates = 15 };
    // Barrier of the making warps.
    static DEVICE_MEMBER void sync() { arch::barrier_wait(of_all, group_threads); }
    // Warps that copy K and Q, and invert diagonal blocks, two blocks each. The others sum gates and write row factors.
    static constexpr int inverting = 2;
    // The row of a thread of these.
    static DEVICE_MEMBER int own_row() { return arch::opaque(thread_of_group()) % (u32)chunk; }

    static DEVICE_MEMBER u32 memory() { return shared_address(ring()); }
    DEVICE_MEMBER u32 keys_at(int number) const { return memory() + number % Stage::key_slots * Stage::key_bytes; }
    DEVICE_MEMBER u32 matrices_at(int slot) const { return memory() + Stage::matrices + slot * Stage::matrix_bytes; }
    DEVICE_MEMBER float *factors_at(int slot) const {
        return (float *)(ring() + Stage::factors + slot * Stage::factor_bytes);
    }
    DEVICE_MEMBER int left_at(int number) const { return own.work.end - own.work.begin - number * chunk; }
    // Copies rows of K or Q.
    DEVICE_MEMBER void copy_rows(u32 to, const char *base, u32 stride, int number) const {
        constexpr int at_once = 2 * arch::lanes / 8;
        const int thread = arch::opaque(thread_of_group()), row = (u32)thread / 8, group = thread % 8u;
        const bool in_last = 64 * (Stage::panels - 1) + group * 8 < scan.key_dim;
        const char *from = base + ((u64)(u32)(number * chunk + row) * stride + group * 16);
        to += swizzled(row, group);
        for (int i = 0; i < chunk / at_once; ++i) {
            for (int panel = 0; panel < Stage::panels - 1; ++panel) {
                copy_async(to + panel * panel_bytes + i * at_once * 128, from + panel * 128);
            }
            copy_async(to + (Stage::panels - 1) * panel_bytes + i * at_once * 128, from + (Stage::panels - 1) * 128,
                       in_last);
            from += (u64)(at_once * stride);
        }
    }
    // Copies K and Q, in the warps that invert.
    DEVICE_MEMBER void copy_keys(int number) const {
        const int left = left_at(number);
        const u32 to = keys_at(number);
        const WorkMemory &work = own.work;
        if (left >= chunk && work.aligned) {
            copy_rows(to + Stage::k, work.k, (u32)scan.k_strides.token * 2, number);
            if constexpr (Outputs) {
                copy_rows(to + Stage::q, work.q, (u32)scan.q_strides.token * 2, number);
            }
        } else if (left > 0) {
            const Segment at{work.sequence, work.begin + number * chunk, work.end, 0, 0, false, false, false, 0, false};
            Copier(scan, at, work.head, work.key_head, work.column).copy_keys(to, left);
        }
    }
    DEVICE_MEMBER GateReader reader(int number) const {
        const int row = own_row();
        return GateReader(x, own.work.sequence, own.work.begin + number * chunk + row, row < left_at(number));
    }
    // Starts to load the gates of this thread's row of a chunk.
    DEVICE_MEMBER GateReader::Bits load_gates(int number) const {
        GateReader::Bits out{0, 0};
        const int row = own_row();
        if (warp >= inverting && row < left_at(number)) {
            const u32 index = number * chunk + row;
            const WorkMemory &work = own.work;
            out.g = work.g ? arch::load_bits(work.g + (u64)index * work.g_step, x.g_type == DWK_F32) : 0;
            out.beta = work.beta ? arch::load_bits(work.beta + (u64)index * work.beta_step, x.beta_type == DWK_F32) : 0;
        }
        return out;
    }
    DEVICE_MEMBER ChunkGates &gates_at(int number) const { return own.gates[number % 2u]; }
    // G within each half of a chunk, and -beta.
    DEVICE_MEMBER void sum_gates(int number, GateReader::Bits loaded) const {
        const GateReader from = reader(number);
        const Gates gates =
            from.gates_of(own.work.head, [&]() __attribute__((always_inline)) { return from.numbers(loaded); });
        const float sum = arch::inclusive_sum(gates.g * math::log2e);
        ChunkGates &to = gates_at(number);
        to.sum[own_row()] = sum;
        to.beta[own_row()] = -gates.beta;
        if (arch::lane() == arch::lanes - 1) {
            to.halves[warp - inverting] = sum;
        }
    }
    // Finds factors of A and P below the diagonal blocks, after sum_gates in both warps.
    DEVICE_MEMBER void find_decays(int number) const {
        arch::barrier_wait(of_gates, 2 * arch::lanes);
        ChunkGates &gates = gates_at(number);
        const int row = own_row();
        const float decay = arch::exp2(gates.sum[row] - gates.before(row / 16));
        gates.a_rows[row] = gates.beta[row] * decay;
        gates.p_rows[row] = decay;
        const auto find = [&](int w, int j) __attribute__((always_inline)) {
            const float between = w >= 2 && j < arch::lanes ? gates.halves[0] : 0.0f;
            gates.columns[ChunkGates::columns_of(w) + j] = arch::exp2((gates.before(w) + between) - gates.sum[j]);
        };
        const int w = row < 16 ? 1 : row < 48 ? 2 : 3;
        find(w, row - ChunkGates::columns_of(w));
        if (row < arch::lanes) {
            find(3, 16 + row);
        }
    }

    // Makes chunk `number`. `loaded` are the gates of the next chunk, then those of the one after it. Each phase
    // derives addresses again: registers do not hold them from phase to phase.
    DEVICE_MEMBER void make(int number, GateReader::Bits &loaded) {
        if (warp < inverting) {
            arch::await_copies();
            arch::publish_shared();
        }
        sync();
        // K K^T                                                          [64, 64]
        Accumulators<tiles> product;
        begin_product<T::rounds_finely>(product, keys_at(number) + Stage::k, keys_at(number) + Stage::k);
        // The slots of T, P and the row factors are free, and so is that of K and Q of the next chunk.
        static_assert(Stage::key_slots == Stage::matrix_slots + 1, "K and Q are one chunk ahead of T and P");
        Handover::wait_finished(number - Stage::matrix_slots);
        if (warp < inverting) {
            copy_keys(number + 1);
        } else {
            sum_gates(number + 1, loaded);
            loaded = load_gates(number + 2);
        }
        if (norms_wanted()) {
            find_norms(keys_at(number));
            sync();
            scale_decays(number);
        }
        arch::await_products<0>();
        product.pin();
        write_a(product, arch::opaque(number));
        if (warp < inverting) {
            arch::barrier_wait(of_diagonal, group_threads);
            invert_diagonal(matrices_at(arch::opaque(number) % Stage::matrix_slots));
        } else {
            write_factors(arch::opaque(number));
            find_decays(arch::opaque(number) + 1);
        }
        sync(); // diagonal blocks of T and others of A are there
        // Q K^T                                                          [64, 64]
        Accumulators<tiles> outputs;
        if constexpr (Outputs) {
            const u32 keys = keys_at(arch::opaque(number));
            begin_product<false>(outputs, keys + Stage::q, keys + Stage::k);
        }
        find_b();
        sync(); // blocks of B are there
        find_t(matrices_at(arch::opaque(number) % Stage::matrix_slots) + Stage::t);
        if constexpr (Outputs) {
            arch::await_products<0>();
            outputs.pin();
            write_p(outputs, arch::opaque(number));
        }
        arch::publish_shared();
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(Handover::full(arch::opaque(number) % Stage::matrix_slots));
        }
    }

    DEVICE_MEMBER bool norms_wanted() const { return x.flags & DWK_QK_L2NORM; }
    // Index of the lane, derived again. The mask tells the compiler its range.
    static DEVICE_MEMBER int own_lane() { return arch::opaque(arch::lane()) & (arch::lanes - 1); }

    // Multiplies the factors of A and P, in this warp's rows and of its columns, by norms.
    DEVICE_MEMBER void scale_decays(int number) const {
        const int lane = own_lane();
        ChunkGates &gates = gates_at(number);
        for (int j = lane; j < 16 * warp; j += arch::lanes) {
            gates.columns[ChunkGates::columns_of(warp) + j] *= own.k_norm[j];
        }
        if (lane < 16) {
            const int row = 16 * warp + lane;
            gates.a_rows[row] *= own.k_norm[row];
            if constexpr (Outputs) {
                gates.p_rows[row] *= own.q_norm[row];
            }
        }
        arch::wave_sync();
    }
    // D of the diagonal block, transposed, times 1 / |k| of its columns.
    DEVICE_MEMBER Tile diagonal_decay(const ChunkGates &gates, LaneMap at) const {
        const float *const sums = gates.sum + 16 * warp;
        Tile out = decay(-rows_at(sums, at), -columns_at(sums, at));
        if (norms_wanted()) {
            out *= rows_at(own.k_norm + 16 * warp, at);
        }
        return out;
    }
    // Calls put(j, block) for this warp's blocks of A or P below the diagonal, transposed.
    template <class F>
    DEVICE_MEMBER void below_diagonal(const Accumulators<tiles> &product, const ChunkGates &gates,
                                      const float *row_factors, LaneMap at, const F &put) const {
        const ColumnFactor rows = columns_at(row_factors + 16 * warp, at);
        const float *const of_columns = gates.columns + ChunkGates::columns_of(warp);
        Tile columns[tiles - 1];
        for (int j = 0; j < tiles - 1; ++j) {
            columns[j] = rows_at(of_columns + (j < warp ? 16 * j : 0), at);
        }
        for (int j = 0; j < tiles - 1; ++j) {
            if (j < warp) {
                put(j, tile_of(product, j) * columns[j] * rows);
            }
        }
    }
    // Writes this warp's blocks of A = -beta D K K^T: first the diagonal block, which other warps wait for.
    DEVICE_MEMBER void write_a(const Accumulators<tiles> &product, int number) const {
        const int lane = own_lane();
        const LaneMap at(lane);
        const ChunkGates &gates = gates_at(number);
        ColumnFactor minus_beta = columns_at(gates.beta + 16 * warp, at);
        if (norms_wanted()) {
            minus_beta *= columns_at(own.k_norm + 16 * warp, at);
        }
        own.diagonal.put(warp, block_of_a(diagonal_decay(gates, at), minus_beta, own_diagonal(product)), at);
        if (warp >= inverting) {
            arch::barrier_arrive(of_diagonal, group_threads);
        }
        const PartsBlocks blocks(shared_address(own.blocks), lane);
        below_diagonal(product, gates, gates.a_rows, at, [&](int j, Tile a) __attribute__((always_inline)) {
            blocks.put(PartsBlocks::index(warp, j), a);
        });
    }
    // Writes this warp's blocks of P = D Q K^T.
    DEVICE_MEMBER void write_p(const Accumulators<tiles> &product, int number) const {
        const int lane = own_lane(), slot = number % Stage::matrix_slots;
        const LaneMap at(lane);
        const ChunkGates &gates = gates_at(number);
        const u32 to = matrices_at(slot) + Stage::p;
        const auto put = [&](int j, Tile transposed) __attribute__((always_inline)) {
            arch::store_operand(to + swizzled(16 * warp + lane % 16, 2 * j + lane / 16), rounded<T>(transposed));
        };
        Tile diagonal = block_of_p(diagonal_decay(gates, at), own_diagonal(product));
        if (norms_wanted()) {
            diagonal *= columns_at(own.q_norm + 16 * warp, at);
        }
        on_diagonal(diagonal, warp, at, [&](int of_row, float x) __attribute__((always_inline)) {
            factors_at(slot)[diagonal_row * chunk + row_position(of_row)] = x;
        });
        put(warp, strictly_lower(diagonal, at));
        below_diagonal(product, gates, gates.p_rows, at, put);
    }

    // Starts left right^T for 64 rows of each, [64, 64]. This warp gets 16 rows: tile j holds block (warp, j),
    // transposed. `Finely`: adds in f32, which rounds; the matrix unit would truncate the sum.
    template <bool Finely> static DEVICE_MEMBER void begin_product(Accumulators<tiles> &out, u32 left, u32 right) {
        const u64 a = arch::described(left), b = arch::described(right);
        if constexpr (Finely) {
            Accumulators<tiles> part;
            for (int t = 0; t < Keys / 16; ++t) {
                const int step = (t / 4 * panel_bytes + t % 4 * 32) >> 4;
                arch::begin_products();
                T::multiply_async_shared(part.at, a + step, b + step, false);
                arch::commit_products();
                arch::await_products<0>();
                part.pin();
                for (int i = 0; i < 8 * tiles; ++i) {
                    out.at[i] = t > 0 ? out.at[i] + part.at[i] : part.at[i];
                }
                out.pin();
            }
        } else {
            out.pin();
            arch::begin_products();
            for (int t = 0; t < Keys / 16; ++t) {
                const int step = (t / 4 * panel_bytes + t % 4 * 32) >> 4;
                T::multiply_async_shared(out.at, a + step, b + step, t > 0);
            }
            arch::commit_products();
        }
    }
    static DEVICE_MEMBER Tile tile_of(const Accumulators<tiles> &x, int i) {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] = x.at[8 * i + e];
        }
        return out;
    }
    // The block on the diagonal that this warp holds.
    DEVICE_MEMBER Tile own_diagonal(const Accumulators<tiles> &x) const {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            // Values: a choice of places would move x to memory.
            const float a = x.at[e], b = x.at[8 + e], c = x.at[16 + e], d = x.at[24 + e];
            const float first = warp == 0 ? a : b, second = warp == 2 ? c : d;
            out[e] = warp < 2 ? first : second;
        }
        return out;
    }

    // Finds 1 / |q| and 1 / |k| of this warp's rows.
    DEVICE_MEMBER void find_norms(u32 keys) const {
        const int lane = own_lane();
        const LaneMap at(lane);
        const u32 place = warp * (16 * 128) + swizzled(lane % 16, lane / 16);
        Tile qq{}, kk{};
#pragma unroll 2
        for (int t = 0; t < Keys / 16; ++t) {
            const u32 step = keys + t / 4 * panel_bytes + (place ^ t % 4 * 32);
            const Operand k = arch::load_operand(step + Stage::k);
            if constexpr (T::rounds_finely) {
                kk += T::mma(k, k, Tile{});
            } else {
                kk = T::mma(k, k, kk);
            }
            if constexpr (Outputs) {
                const Operand q = arch::load_operand(step + Stage::q);
                qq = T::mma(q, q, qq);
            }
        }
        on_diagonal(kk, warp, at, [&](int of_row, float x) __attribute__((always_inline)) {
            // A row of zeros gets 0, not 1000 (factors.h).
            own.k_norm[of_row] = x == 0.0f ? 0.0f : math::inverse_norm(x);
        });
        if constexpr (Outputs) {
            on_diagonal(qq, warp, at, [&](int of_row, float x) __attribute__((always_inline)) {
                own.q_norm[of_row] = math::inverse_norm(x);
            });
        }
    }

    // Writes the factors of this thread's row to the ring.
    DEVICE_MEMBER void write_factors(int number) const {
        const int row = own_row();
        float *const rows = factors_at(number % Stage::matrix_slots);
        const ChunkGates &gates = gates_at(number);
        const float first_half = gates.halves[0];
        const float beta = -gates.beta[row], total = first_half + gates.halves[1];
        const float sum = gates.sum[row] + (row >= arch::lanes ? first_half : 0.0f);
        float q_norm = 1.0f, k_norm = 1.0f, unit = 1.0f;
        if (norms_wanted()) {
            q_norm = Outputs ? own.q_norm[row] : 1.0f;
            k_norm = own.k_norm[row];
            const int greatest = max_of(bits<int>(k_norm), bits<int>(own.k_norm[row ^ arch::lanes]));
            unit = power_of_two_below(__nvvm_redux_sync_max(greatest, 0xffffffff));
        }
        const float per_unit = bits<float>(0x7f000000 - bits<int>(unit)); // 1 / unit
        float *const to = rows + row_position(row);
        to[beta_row * chunk] = beta;
        to[read_row * chunk] = read_factor(beta, k_norm, sum);
        to[output_row * chunk] = output_factor(q_norm, sum);
        to[write_row * chunk] = write_factor(k_norm, per_unit, total, sum);
        if (row == 0) {
            *(f32x2 *)(rows + row_factors * chunk) = f32x2{arch::exp2(total) * per_unit, unit};
        }
    }

    // Inverts two diagonal blocks of I - A, each in 16 lanes. Writes them as parts, and to T without their diagonals.
    DEVICE_MEMBER void invert_diagonal(u32 matrices) const {
        const int lane = own_lane();
        const int block = 2 * warp + lane / 16, row = lane % 16;
        const u32 from = shared_address(own.diagonal.at) + block * PartsBlocks::bytes;
        // t is this row of the inverse: t[i] += a[c][i] t[c] for i < c, c = 15, 14, ..., 1. Rows of A are loaded ahead.
        constexpr int ahead = 2;
        float t[16];
        f32x4 a[ahead + 1][4];
        const auto load = [&](int c) __attribute__((always_inline)) {
            for (int q = 0; q < (c + 3) / 4; ++q) {
                a[c % (ahead + 1)][q] = arch::load_shared_f32(from + PartsBlocks::place(c, q));
            }
        };
        for (int i = 0; i < ahead; ++i) {
            load(15 - i);
        }
        for (int i = 0; i < 16; ++i) {
            t[i] = row == i ? 1.0f : 0.0f;
        }
        for (int c = 15; c > 0; --c) {
            if (c > ahead) {
                load(c - ahead);
            }
            for (int i = c - 1; i >= 0; --i) {
                t[i] = __builtin_fmaf(a[c % (ahead + 1)][i / 4][i % 4], t[c], t[i]);
            }
        }
        arch::wave_sync();
        int high[8], low[8], rest[8];
        for (int i = 0; i < 8; ++i) {
            high[i] = Bf16::pack(t[2 * i], t[2 * i + 1]);
            low[i] = Bf16::pack(t[2 * i] - Bf16::low(high[i]), t[2 * i + 1] - Bf16::high(high[i]));
            rest[i] = T::pack(row == 2 * i ? 0.0f : t[2 * i], row == 2 * i + 1 ? 0.0f : t[2 * i + 1]);
        }
        const u32 to = shared_address(own.blocks) + block * PartsBlocks::bytes;
        for (int i = 0; i < 2; ++i) {
            store_shared(to + PartsBlocks::place(row, i),
                         i32x4{high[4 * i], high[4 * i + 1], high[4 * i + 2], high[4 * i + 3]});
            store_shared(to + PartsBlocks::place(row, 2 + i),
                         i32x4{low[4 * i], low[4 * i + 1], low[4 * i + 2], low[4 * i + 3]});
            store_shared(matrices + Stage::t + swizzled(16 * block + row, 2 * block + i),
                         i32x4{rest[4 * i], rest[4 * i + 1], rest[4 * i + 2], rest[4 * i + 3]});
        }
    }

    // B_ij = T_ii A_ij, in place of A_ij: two blocks a warp. The last warps have one block twice, because a branch
    // would keep the products of the others apart.
    DEVICE_MEMBER void find_b() const {
        const PartsBlocks blocks(shared_address(own.blocks), own_lane());
        const int first = tiles + warp, second = warp < 2 ? first + 4 : first;
        const auto row = [&](int block) { return block < 5 ? 1 : block < 7 ? 2 : 3; };
        const Parts a = blocks.by_columns(first), b = blocks.by_columns(second);
        const Tile x = multiply(a, blocks.by_rows(row(first)), Tile{}),
                   y = multiply(b, blocks.by_rows(row(second)), Tile{});
        blocks.put(first, x);
        blocks.put(second, y);
    }

    // Blocks of T below the diagonal.
    DEVICE_MEMBER void find_t(u32 to) const {
        const int lane = own_lane();
        const PartsBlocks blocks(shared_address(own.blocks), lane);
        const auto by_rows = [&](int i, int j)
                                 __attribute__((always_inline)) { return blocks.by_rows(PartsBlocks::index(i, j)); };
        const auto by_columns = [&](int i, int j) __attribute__((always_inline)) {
            return blocks.by_columns(PartsBlocks::index(i, j));
        };
        const auto write = [&](int i, int j, Tile transposed) __attribute__((always_inline)) {
            arch::store_operand(to + swizzled(16 * i + lane % 16, 2 * j + lane / 16), rounded<T>(transposed));
        };
        // T_ij from M_ij.
        const auto put = [&](int i, int j, const Parts &m)
                             __attribute__((always_inline)) { write(i, j, multiply(by_columns(j, j), m, Tile{})); };
        if (warp == 0) {
            const Parts b10 = by_columns(1, 0);
            const Tile m20 = multiply(by_rows(2, 1), b10, by_columns(2, 0).sum());
            const Tile sum = multiply(b10, by_rows(3, 1), by_rows(3, 0).sum());
            put(3, 0, Parts(multiply(Parts(m20), by_rows(3, 2), sum)));
        } else if (warp > 1) {
            const int i = warp, middle = warp - 1, j = warp - 2;
            put(i, j, Parts(multiply(by_columns(middle, j), by_rows(i, middle), by_rows(i, j).sum())));
        } else {
            Tile x[3];
            for (int j = 0; j < 3; ++j) {
                x[j] = multiply(by_columns(j, j), by_rows(j + 1, j), Tile{});
            }
            for (int j = 0; j < 3; ++j) {
                write(j + 1, j, x[j]);
            }
        }
    }

    const dwk_prefill_prepare_args &x;
    const dwk_prefill_scan_args &scan;
    MakerMemory &own;
    const int warp; // of the group
};

} // namespace prefill
