// Copies of rows of tokens (K, Q and V) to shared memory on sm_90a.
#pragma once

#include "../../tensor/rows.h"
#include "../segment.h"
#include "layout.h"

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
            const u32 at = matrices + Stage::lower_place(from_row * 16 + row, column * 2 + half);
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
          groups(prefill::groups<Stage>()),
          in_last(64 * (Stage::panels - 1) + (int)(Rows::thread() % 8u) * 8 < x.key_dim),
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
    DEVICE_MEMBER bool in_values(int group) const { return group * 64 + (int)(Rows::thread() % 8u) * 8 < values; }

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

} // namespace prefill
