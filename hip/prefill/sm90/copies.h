// Copy warps on sm_90a: they copy chunks (K, Q, V, T, P and the row factors) to shared memory ahead of the computation.
#pragma once

#include "../../tensor/rows.h"
#include "../segment.h"
#include "layout.h"
#include "record.h"

namespace prefill {

// A thread's share of the rows of a 16-bit token tensor, chunk by chunk: 16 bytes of every `at_once`-th row.
// `Threads` threads of a warpgroup share the rows.
template <int Threads> class RowsOfThread {
  public:
    static constexpr int at_once = Threads / 8, times = chunk / at_once;
    DEVICE_MEMBER RowsOfThread(const void *p, const dwk_token_strides &s, const Segment &segment, int head, u32 offset)
        : stride((u32)s.token * 2) {
        const char *base = row_address(p, s, segment.sequence, segment.begin, head);
        aligned = arch::aligned_rows(base, stride);
        from = base + ((u64)row(0) * stride + (thread() % 8u * 16 + offset));
    }
    // Opaque where few threads copy: their registers should not hold addresses from chunk to chunk.
    static DEVICE_MEMBER int thread() {
        return Threads < group_threads ? arch::opaque(thread_of_group()) : thread_of_group();
    }
    // row(i): this thread's i-th row. place(i): offset of the thread's 16 bytes of it in a panel.
    static DEVICE_MEMBER int row(int i) { return i * at_once + thread() % (u32)Threads / 8; }
    static DEVICE_MEMBER u32 place(int i) {
        static_assert(at_once % 8 == 0, "all rows of a thread have the same permutation");
        return swizzled(row(0), thread() % 8u) + i * at_once * 128;
    }
    // Whether one access can cover the 16 bytes.
    DEVICE_MEMBER bool in_one_access() const { return aligned; }

    // Calls f(address, i) for each row of a chunk, and moves on to the next chunk.
    template <class F> DEVICE_MEMBER void all(F f) {
        for (int i = 0; i < times; ++i) {
            f(from, i);
            from += (u64)(at_once * stride);
        }
    }
    // `all` in little code: a loop that is not unrolled.
    template <class F> DEVICE_MEMBER void each(F f) {
#pragma unroll 1
        for (int i = 0; i < times; ++i) {
            f(from, i);
            from += (u64)(at_once * stride);
        }
    }

  private:
    const char *from;
    u32 stride;
    bool aligned;
};

// Copies 16 bytes from any even address, or zeros if not `inside`, to shared memory.
DEVICE void copy_any(u32 to, const char *from, bool aligned, bool inside) {
    if (aligned) {
        copy_async(to, from, inside);
    } else {
        store_shared(to, Window(from).gather_b128(inside ? 0 : Window::nowhere));
    }
}

// Writes zeros to the blocks of T and P above the diagonal, which nothing else writes. `warp` of `warps` take part.
template <class Stage> DEVICE void clear_upper_blocks(u32 matrices, int warp, int warps) {
    const int row = arch::lane() % 16, half = arch::lane() / 16;
#pragma unroll 1
    for (int block = warp; block < tiles * tiles; block += warps) {
        const int from_row = block / tiles, column = block % tiles;
        if (from_row < column) {
            const u32 at = matrices + swizzled(from_row * 16 + row, column * 2 + half);
            store_shared(at + Stage::t, i32x4{});
            if constexpr (Stage::outputs) {
                store_shared(at + Stage::p, i32x4{});
            }
        }
    }
}

// Copies K, Q and V of successive chunks to the ring.
template <int Keys, bool Outputs, int Threads> class TokenCopier {
    typedef RowsOfThread<Threads> Rows;

  public:
    typedef prefill::Stage<Keys, Outputs> Stage;

    // `column`: the workgroup's first value column.
    DEVICE_MEMBER TokenCopier(const dwk_prefill_scan_args &x, const Segment &s, int head, int key_head, int column)
        : memory(shared_address(ring())), k(x.k, x.k_strides, s, key_head, 0), q(x.q, x.q_strides, s, key_head, 0),
          v(x.v, x.v_strides, s, head, column * 2), left(s.end - s.begin), values(x.value_dim - column),
          groups(prefill::groups<Stage>()), in_last(64 * (Stage::panels - 1) + Rows::thread() % 8u * 8 < x.key_dim),
          aligned(k.in_one_access() && q.in_one_access() && v.in_one_access()) {}

    // Copies K and Q of the next chunk, of which `rows` are left of the segment, to `to`.
    DEVICE_MEMBER void copy_keys(u32 to, int rows) {
        if (rows >= chunk && aligned) {
            copy_keys(to + Stage::k, k);
            if constexpr (Outputs) {
                copy_keys(to + Stage::q, q);
            }
        } else {
            copy_some_keys(to + Stage::k, k, rows);
            if constexpr (Outputs) {
                copy_some_keys(to + Stage::q, q, rows);
            }
        }
    }
    // Copies V likewise.
    DEVICE_MEMBER void copy_values(u32 to, int rows) {
        if (!Outputs && values <= 0) {
            return;
        }
        if (rows >= chunk && aligned) {
            copy_values(to + Stage::v);
        } else {
            copy_some_values(to + Stage::v, rows);
        }
    }
    const u32 memory;
    Rows k, q, v;
    int left;
    const int values; // columns of V, counted from the workgroup's first
    const int groups;

  private:
    // Whether V has the columns that this thread copies for a warpgroup.
    DEVICE_MEMBER bool in_values(int group) const { return group * 64 + Rows::thread() % 8u * 8 < values; }

    DEVICE_MEMBER void copy_keys(u32 to, Rows &rows) {
        rows.all([&](const char *from, int i) __attribute__((always_inline)) {
            for (int panel = 0; panel < Stage::panels - 1; ++panel) {
                copy_async(to + panel * panel_bytes + Rows::place(i), from + panel * 128);
            }
            copy_async(to + (Stage::panels - 1) * panel_bytes + Rows::place(i), from + (Stage::panels - 1) * 128,
                       in_last);
        });
    }
    DEVICE_MEMBER void copy_values(u32 to) {
        v.all([&](const char *from, int i) __attribute__((always_inline)) {
            for (int g = 0; g < Stage::most_groups; ++g) {
                if (g < groups) {
                    copy_async(to + g * panel_bytes + Rows::place(i), from + g * 128, in_values(g));
                }
            }
        });
    }
    DEVICE_MEMBER void copy_some_keys(u32 to, Rows &rows, int left) {
        rows.each([&](const char *from, int i) __attribute__((always_inline)) {
            const bool inside = Rows::row(i) < left;
#pragma unroll 1
            for (int panel = 0; panel < Stage::panels; ++panel) {
                copy_any(to + panel * panel_bytes + Rows::place(i), from + panel * 128, rows.in_one_access(),
                         inside && (panel < Stage::panels - 1 || in_last));
            }
        });
    }
    DEVICE_MEMBER void copy_some_values(u32 to, int left) {
        v.each([&](const char *from, int i) __attribute__((always_inline)) {
#pragma unroll 1
            for (int g = 0; g < groups; ++g) {
                copy_any(to + g * panel_bytes + Rows::place(i), from + g * 128, v.in_one_access(),
                         in_values(g) && Rows::row(i) < left);
            }
        });
    }

    const bool in_last, aligned;
};

// Copies successive chunks, each to its stage of the ring as soon as the stage is free.
template <int Keys, bool Outputs> class Copier : TokenCopier<Keys, Outputs, group_threads> {
    typedef TokenCopier<Keys, Outputs, group_threads> Base;
    typedef prefill::Stage<Keys, Outputs> Stage;
    using Base::groups;
    using Base::left;
    using Base::memory;

  public:
    // `column`: the workgroup's first value column.
    DEVICE_MEMBER Copier(const dwk_prefill_scan_args &x, const Segment &s, int head, int key_head, int column)
        : Base(x, s, head, key_head, column),
          record((const char *)x.records + ((int64_t)s.record * x.value_heads + head) * DWK_RECORD_BYTES),
          record_step(x.value_heads * DWK_RECORD_BYTES) {
        for (int i = 0; i < parts_of_warp; ++i) {
            const int part = min_of(i * scan_waves + wave_of_group(), parts - 1);
            const int of_matrix = part % lower_blocks, tile = tile_row(of_matrix),
                      groups = 2 * (tile + 1); // 16-byte groups per row
            const int own = (of_matrix - lower_block(tile, 0)) * arch::lanes + arch::lane();
            matrix_place[i] = arch::opaque((part < lower_blocks ? Stage::t : Stage::p) +
                                           swizzled(16 * tile + own / groups, own % groups));
        }
    }

    DEVICE_MEMBER void run() {
        for (int i = 0; i < Stage::count; ++i) {
            clear_upper_blocks<Stage>(memory + i * Stage::bytes, wave_of_group(), scan_waves);
        }
        int stage = 0, copied = -1;
#pragma unroll 1
        for (int number = 0; left > 0; ++number) {
            if constexpr (Stage::count == 2) {
                hand_over(copied); // otherwise the stage waited for next would never be given back
            }
            if (number >= Stage::count) {
                for (int g = 0; g < Stage::most_groups; ++g) {
                    if (g < groups) {
                        Handover<Stage>::wait_empty(g, stage);
                    }
                }
            }
            hand_over(copied);
            copy(memory + stage * Stage::bytes, number == 0);
            copied = stage;
            stage = stage + 1 == Stage::count ? 0 : stage + 1;
            left -= chunk;
        }
        hand_over(copied);
    }

    // Place in the ring, where the workgroup walks several units.
    struct Place {
        int stage = 0;   // of the next chunk
        int copied = -1; // stage that was copied and not handed over, if any
        int number = 0;  // chunks so far, at most Stage::count
    };
    // Copies the chunks of a unit. The last one is handed over with the next unit, or by `end`.
    DEVICE_MEMBER void run(Place &at) {
        static_assert(Stage::count > 2, "a stage is given back before the one copied last is handed over");
#pragma unroll 1
        for (; left > 0; left -= chunk) {
            const bool first = at.number == 0;
            if (at.number == Stage::count) {
                wait_empty(at.stage);
            } else {
                ++at.number;
            }
            hand_over(at.copied);
            copy(memory + at.stage * Stage::bytes, first);
            at.copied = at.stage;
            at.stage = next_of(at.stage);
        }
    }
    // Hands over the last chunk, and waits until all have been given back.
    static DEVICE_MEMBER void end(Place &at) {
        if (at.copied >= 0) {
            arch::await_copies();
            arch::publish_shared();
            for (int g = 0; g < groups_of_units(); ++g) {
                Handover<Stage>::full(g, at.copied);
            }
        }
        int stage = at.number == Stage::count ? at.stage : 0;
        for (int i = 0; i < Stage::count; ++i) {
            if (i < at.number) {
                wait_empty(stage);
                stage = next_of(stage);
            }
        }
    }
    static DEVICE_MEMBER void clear_stages() {
        for (int i = 0; i < Stage::count; ++i) {
            clear_upper_blocks<Stage>(shared_address(ring()) + i * Stage::bytes, wave_of_group(), scan_waves);
        }
    }

  private:
    static DEVICE_MEMBER int next_of(int stage) { return stage + 1 == Stage::count ? 0 : stage + 1; }
    // Warpgroups that multiply where a workgroup walks several units. prefill_scan then has two.
    static DEVICE_MEMBER int groups_of_units() { return Outputs ? Stage::most_groups : prefill::groups<Stage>(); }
    // Waits until all warpgroups have given back a stage.
    static DEVICE_MEMBER void wait_empty(int stage) {
        for (int g = 0; g < groups_of_units(); ++g) {
            Handover<Stage>::wait_empty(g, stage);
        }
    }
    // Hands over the stage that was copied, if any (`copied` >= 0).
    DEVICE_MEMBER void hand_over(int &copied) const {
        if (copied >= 0) {
            arch::await_copies();
            arch::publish_shared();
            for (int g = 0; g < Stage::most_groups; ++g) {
                if (g < groups) {
                    Handover<Stage>::full(g, copied);
                }
            }
            copied = -1;
        }
    }

    DEVICE_MEMBER void copy(u32 to, bool first) {
        Base::copy_keys(to, left);
        Base::copy_values(to, left);
        if (first) {
            arch::wait_for_previous_kernel();
        }
        copy_record(to);
    }

    // Copies T, P and the row factors. A record stores rows of T and P up to their diagonal blocks, so a row of shared
    // memory is contiguous in it.
    DEVICE_MEMBER void copy_record(u32 to) {
        const char *from = record + thread_of_group() * 16;
        constexpr int waves = scan_waves;
        for (int i = 0; i < parts_of_warp; ++i) {
            if ((i + 1) * waves <= parts || thread_of_group() < (parts - i * waves) * arch::lanes) {
                copy_async(to + matrix_place[i], from + record_matrices + i * waves * block_bytes);
            }
        }
        for (int at = 0; at < row_bytes; at += waves * block_bytes) {
            if (at + thread_of_group() * 16 < row_bytes) {
                copy_async(to + Stage::rows + at + thread_of_group() * 16, from + record_rows + at);
            }
        }
        record += record_step;
    }

    // Blocks of T and P; a warp copies one at a time.
    static_assert(arch::lanes * 16 == block_bytes, "a warp copies a block");
    static constexpr int parts = Outputs ? 2 * lower_blocks : lower_blocks;
    static constexpr int parts_of_warp = (parts + scan_waves - 1) / scan_waves;
    static constexpr int row_bytes = row_factors * chunk * 4 + 16;
    const char *record;
    const u32 record_step;
    u32 matrix_place[parts_of_warp];
};

} // namespace prefill
