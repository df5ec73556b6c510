// Copying warps of prefill_backward_walk on sm_90a: they fill stages of the ring ahead of the warps that multiply.
#pragma once

#include "../copies.h"
#include "../record.h"
#include "ring.h"

namespace prefill {
namespace backward {

// A thread's share of the rows of a 16-bit token tensor, from chunk to chunk in either direction: 16 bytes of every
// 16th row, of one panel of 64 columns or more.
class RowsToCopy {
  public:
    static constexpr int at_once = group_threads / 8, times = chunk / at_once;
    // `begin`: first token of the chunk. `column`: of the first panel.
    DEVICE_MEMBER RowsToCopy(const void *p, const dwk_token_strides &s, int sequence, int begin, int head, int column)
        : stride((u32)s.token * 2) {
        const char *const base = row_address(p, s, sequence, begin, head);
        aligned = arch::aligned_rows(base, stride);
        from = base + ((u64)row(0) * stride + (thread_of_group() % 8u * 16 + 2 * column));
    }
    // Opaque: registers should not hold addresses from chunk to chunk.
    static DEVICE_MEMBER int own_thread() { return arch::opaque(thread_of_group()); }
    static DEVICE_MEMBER int row(int i) { return i * at_once + own_thread() / 8; }
    // Offset of the thread's 16 bytes of its i-th row in a panel.
    static DEVICE_MEMBER u32 place(int i) {
        static_assert(at_once % 8 == 0, "all rows of a thread have the same permutation");
        return swizzled(row(0), own_thread() % 8u) + i * at_once * 128;
    }
    DEVICE_MEMBER bool in_one_access() const { return aligned; }
    // Copies a chunk's panels of 64 columns to `to`. `rows`: there are so many, the others become zeros. `columns`: of
    // the tensor, from the first panel on, likewise.
    template <int Panels> DEVICE_MEMBER void copy(u32 to, int panels, int rows, int columns) const {
        const int own = own_thread() % 8u * 8;
        if (aligned && rows >= chunk) {
#pragma unroll
            for (int i = 0; i < times; ++i) {
#pragma unroll
                for (int panel = 0; panel < Panels; ++panel) {
                    if (panel < panels) {
                        copy_async(to + panel * panel_bytes + place(i),
                                   from + ((u64)(i * at_once * stride) + panel * 128), 64 * panel + own < columns);
                    }
                }
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < times; ++i) {
#pragma unroll 1
                for (int panel = 0; panel < panels; ++panel) {
                    copy_any(to + panel * panel_bytes + place(i), from + ((u64)(i * at_once * stride) + panel * 128),
                             aligned, 64 * panel + own < columns && row(i) < rows);
                }
            }
        }
    }
    // Goes on by `chunks`.
    DEVICE_MEMBER void advance(int chunks) { from += (int64_t)chunks * chunk * stride; }

  private:
    const char *from;
    const u32 stride;
    bool aligned;
};

// Row of blocks that contains lower block `block`.
DEVICE constexpr int tile_row(int block) { return block >= 6 ? 3 : block >= 3 ? 2 : block >= 1 ? 1 : 0; }

// Fills the ring for one walk.
template <class T, int Keys, bool Reverse> class WalkCopier {
    typedef WalkStage<Keys> Stage;
    // Products of f16 are in units that keep them within its range; bf16 has the range of f32.
    static constexpr bool has_units = !__is_same(T, Bf16);
    static constexpr int step = Reverse ? -1 : 1;
    // Blocks of triangular matrices that a warp copies.
    static constexpr int blocks = Reverse ? 2 * lower_blocks : lower_blocks;
    static constexpr int blocks_of_warp = (blocks + scan_waves - 1) / scan_waves;

  public:
    // `first`: first token of the first chunk. `record`: number of its record. `column`: the workgroup's first one.
    DEVICE_MEMBER WalkCopier(const dwk_prefill_backward_args &x, const WalkWork &work, int first, int64_t place,
                             int column, int groups)
        : ring(groups), copied(groups), groups(groups),
          k(x.prepare.k, x.prepare.k_strides, work.piece.sequence, first, work.key_head, 0),
          q(x.prepare.q, x.prepare.q_strides, work.piece.sequence, first, work.key_head, 0),
          given(Reverse ? x.d_o : x.v, Reverse ? x.d_o_strides : x.v_strides, work.piece.sequence, first, work.head,
                column),
          rows(work.piece.range.end - first), chunks(work.piece.chunks), key_dim(x.prepare.key_dim),
          values(work.start == from_identity ? 0 : x.prepare.value_dim - column), scale(x.scale), unit(x.unit),
          record((const char *)x.prepare.records + place * DWK_BACKWARD_RECORD_BYTES),
          record_step((int64_t)step * x.prepare.value_heads * DWK_BACKWARD_RECORD_BYTES) {}

    DEVICE_MEMBER void run() {
        clear_blocks();
        // A chunk is handed over when copies of the next one have begun, unless the next one's stage is free only then.
        bool pending = false;
        // What goes through registers is loaded a chunk ahead, and before copies that would delay it.
        Operand some[blocks_of_warp];
        Row own{};
        if (chunks > 0) {
            load_blocks(some);
            own = load_row();
        }
#pragma unroll 1
        for (int rest = chunks; rest > 0; --rest) {
            if (pending && ring.stages() == 2) {
                hand_over<0>();
                pending = false;
            }
            ring.wait_empty();
            const u32 to = ring.at();
            store_blocks(to, some);
            store_factors(to, own);
            record += record_step;
            if (rest > 1) {
                load_blocks(some);
                own = load_row();
            }
            k.template copy<Stage::panels>(to + Stage::k, Stage::panels, rows, key_dim);
            if constexpr (Reverse) {
                q.template copy<Stage::panels>(to + Stage::q, Stage::panels, rows, key_dim);
            }
            given.template copy<Stage::most_groups>(to + Stage::given, groups, rows, values);
            arch::commit_copies();
            if (pending) {
                hand_over<1>();
            }
            pending = true;
            ring.advance();
            k.advance(step);
            if constexpr (Reverse) {
                q.advance(step);
            }
            given.advance(step);
            rows -= step * chunk;
        }
        if (pending) {
            hand_over<0>();
        }
    }

  private:
    // Numbers of a token and of its chunk.
    struct Row {
        float sum, beta, k_norm, q_norm, diagonal;
        ChunkNumbers chunk;
    };

    // Hands over the oldest chunk that has not been, when all but the last `Pending` chunks are there.
    template <int Pending> DEVICE_MEMBER void hand_over() {
        arch::await_copies<Pending>();
        arch::publish_shared();
        copied.give_full();
        copied.advance();
    }

    // Which block warp and i stand for: of T' or T^T first, then of P^T. Past the last one, the last one again.
    static DEVICE_MEMBER int block_of(int i) {
        return min_of(i * scan_waves + arch::opaque(wave_of_group()), blocks - 1);
    }

    // Zeros where blocks of the matrices are not copied: above the diagonal of T', below those of T^T and P^T.
    DEVICE_MEMBER void clear_blocks() const {
        const int row = arch::lane() % 16, half = arch::lane() / 16;
#pragma unroll 1
        for (int stage = 0; stage < ring.stages(); ++stage) {
            const u32 to = ring.stage_at(stage);
#pragma unroll 1
            for (int block = wave_of_group(); block < tiles * tiles; block += scan_waves) {
                const int i = block / tiles, j = block % tiles;
                if (Reverse ? i > j : i < j) {
                    const u32 at = to + swizzled(i * 16 + row, j * 2 + half);
                    store_shared(at + Stage::t, i32x4{});
                    if constexpr (Reverse) {
                        store_shared(at + Stage::p, i32x4{});
                    }
                }
            }
        }
    }
    DEVICE_MEMBER void load_blocks(Operand (&to)[blocks_of_warp]) const {
        const Window memory(record);
#pragma unroll
        for (int i = 0; i < blocks_of_warp; ++i) {
            const int block = block_of(i);
            const u32 from = !Reverse               ? record_forward
                             : block < lower_blocks ? record_reverse
                                                    : record_p - lower_blocks * backward::block_bytes;
            to[i] = memory.load_written_b128(from + block * backward::block_bytes + arch::opaque(arch::lane()) * 16);
        }
    }
    DEVICE_MEMBER void store_blocks(u32 to, const Operand (&from)[blocks_of_warp]) const {
        const int lane = arch::opaque(arch::lane());
#pragma unroll
        for (int i = 0; i < blocks_of_warp; ++i) {
            const int block = block_of(i), of_matrix = block < lower_blocks ? block : block - lower_blocks;
            const int row = tile_row(of_matrix), column = of_matrix - lower_block(row, 0);
            const int to_row = Reverse ? column : row, to_column = Reverse ? row : column;
            arch::store_operand(to + (block < lower_blocks ? Stage::t : Stage::p) +
                                    swizzled(16 * to_row + lane % 16, 2 * to_column + lane / 16),
                                from[i]);
        }
    }
    DEVICE_MEMBER Row load_row() const {
        Row out{};
        const int row = thread_of_group();
        if (row < chunk) {
            out.sum = factor_of(record, sum_row)[row];
            out.beta = factor_of(record, backward::beta_row)[row];
            out.k_norm = factor_of(record, k_norm_row)[row];
            if constexpr (Reverse) {
                out.q_norm = factor_of(record, q_norm_row)[row];
                out.diagonal = factor_of(record, backward::diagonal_row)[row];
            }
            out.chunk = numbers_of(record);
        }
        return out;
    }
    DEVICE_MEMBER void store_factors(u32 to, const Row &x) const {
        const int row = arch::opaque(thread_of_group());
        if (row >= chunk) {
            return;
        }
        const float total = x.chunk.total, per_k = has_units ? x.chunk.per_k() : 1.0f;
        const auto put = [&](int which, float value) __attribute__((always_inline)) {
            arch::store_shared_word(to + Stage::factors + which * (chunk * 4) + row_position(row) * 4,
                                    bits<int>(value));
        };
        i32x4 numbers;
        if constexpr (Reverse) {
            const float first = has_units ? x.chunk.first : 0.0f, per_q = has_units ? x.chunk.per_q() : 1.0f;
            put(write_factor_row, x.k_norm * arch::exp2(total - x.sum));
            put(of_x_factor_row, -x.k_norm * x.beta * arch::exp2(x.sum - first) * per_k);
            put(of_o_factor_row, scale * per_q * x.q_norm * arch::exp2(x.sum - first));
            put(of_p_factor_row, x.diagonal);
            put(of_v_factor_row, unit * x.beta);
            numbers = i32x4{bits<int>(arch::exp2(total - first) * per_q),
                            bits<int>(has_units ? x.chunk.q_unit * per_k : 1.0f),
                            bits<int>(has_units ? x.chunk.k_unit * arch::exp2(first) : 1.0f), 0};
        } else {
            put(read_factor_row, x.k_norm * arch::exp2(x.sum));
            put(gain_factor_row, per_k * x.k_norm * x.beta * arch::exp2(total - x.sum));
            numbers = i32x4{bits<int>(arch::exp2(total) * per_k), bits<int>(1.0f),
                            bits<int>(has_units ? x.chunk.k_unit : 1.0f), 0};
        }
        if (row == 0) {
            store_shared(to + Stage::numbers, numbers);
        }
    }
    RingPlace<Keys> ring, copied; // the next stage to fill, and to hand over
    const int groups;
    RowsToCopy k, q, given;
    int rows; // rows from the first one of the chunk on, in the sequence
    const int chunks, key_dim, values;
    const float scale, unit;
    const char *record;
    const int64_t record_step;
};

} // namespace backward
} // namespace prefill
