// States in f32 on CDNA: implements ../state_window.h. A lane moves its adjacent elements at once.
#pragma once

#include "../state_view.h"

namespace prefill {

// Row strides in elements from which on a window does not reach all rows.
constexpr int64_t long_stride = 1 << 21;
static_assert(255 * (long_stride - 1) * 4 + 256 * 4 < 0x7fffffff, "K and V are at most 256");

DEVICE bool fits_a_window(const StateView &view) { return max_of(view.key_step, view.value_step) < long_stride; }

// Moves N adjacent numbers between registers and a byte offset of the window: `offset` + `uniform`. NaNs stay as they
// are.
template <int N> DEVICE void load_piece(float (&x)[N], const Window &from, u32 offset, int uniform) {
    if constexpr (N == 4) {
        const f32x4 all = bits<f32x4>(from.load_b128(offset, uniform));
        for (int i = 0; i < N; ++i) {
            x[i] = all[i];
        }
    } else if constexpr (N == 2) {
        const f32x2 both = bits<f32x2>(from.load_b64(offset, uniform));
        x[0] = both.x;
        x[1] = both.y;
    } else {
        x[0] = bits<float>(from.load_b32(offset, uniform));
    }
}
template <int N> DEVICE void store_piece(const float (&x)[N], const Window &to, u32 offset, int uniform) {
    if constexpr (N == 4) {
        to.store_b128(offset, bits<i32x4>(f32x4{x[0], x[1], x[2], x[3]}), uniform);
    } else if constexpr (N == 2) {
        to.store_b64(offset, bits<i32x2>(f32x2{x[0], x[1]}), uniform);
    } else {
        to.store_b32(offset, bits<int>(x[0]), uniform);
    }
}

// Calls rows(t, e, window, offset, uniform) for every row of adjacent value columns that this lane owns if rows of
// memory are keys, otherwise columns(t, j, window, offset, uniform) for every column of four adjacent keys. Offsets
// lead nowhere for elements beyond K and V.
template <int Keys, class Rows, class Columns>
DEVICE void for_each_piece(const StateView &view, int column, int key_dim, int value_dim, const Rows &rows,
                           const Columns &columns) {
    constexpr int size = sizeof(float);
    const bool keys_adjacent = view.key_step == 1;
    const u32 row = size * (u32)(keys_adjacent ? view.value_step : view.key_step);
    const Window window(arch::uniform_pointer(view.base));
    // Opaque: otherwise addresses of the initial state stay in registers until the final one is stored.
    const int key = state_key(0, 0, arch::opaque(arch::lane()));
    const bool inside = column < value_dim;
    if (keys_adjacent) {
#pragma unroll
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            const int first = state_key(t, 0, 0) - state_key(0, 0, 0);
#pragma unroll
            for (int j = 0; j < StateLayout<Keys>::column_tiles; ++j) {
                const u32 offset = (column + state_column(j, 0)) * row + size * key;
                columns(t, j, window, inside && key < key_dim - first ? offset : Window::nowhere, size * first);
            }
        }
        return;
    }
    const u32 offset = key * row + size * column;
#pragma unroll
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
        const int first = state_key(t, 0, 0) - state_key(0, 0, 0);
        const u32 own = inside && key < key_dim - first ? offset : Window::nowhere;
        // Otherwise all multiples of `row` occupy registers at once.
        arch::phase();
        const int step = arch::opaque_uniform((int)row);
#pragma unroll
        for (int e = 0; e < elements; ++e) {
            rows(t, e, window, own, (first + e) * step);
        }
    }
}

template <int Keys>
DEVICE void load_through_window(State<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    constexpr int across = StateLayout<Keys>::column_tiles;
    for_each_piece<Keys>(
        from, column, key_dim, value_dim,
        [&](int t, int e, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[across];
            load_piece(x, window, offset, uniform);
            for (int j = 0; j < across; ++j) {
                s[t][j][e] = x[j];
            }
        },
        [&](int t, int j, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[elements];
            load_piece(x, window, offset, uniform);
            for (int e = 0; e < elements; ++e) {
                s[t][j][e] = x[e];
            }
        });
    // After all loads, and one after the other: otherwise their comparisons occupy scalar registers at the same time.
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
        for (int j = 0; j < across; ++j) {
            for (int e = 0; e < elements; ++e) {
                s[t][j][e] = arch::held(math::canonical(s[t][j][e]));
            }
        }
    }
}

template <int Keys>
DEVICE void store_through_window(const State<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    constexpr int across = StateLayout<Keys>::column_tiles;
    for_each_piece<Keys>(
        to, column, key_dim, value_dim,
        [&](int t, int e, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[across];
            for (int j = 0; j < across; ++j) {
                x[j] = s[t][j][e];
            }
            store_piece(x, window, offset, uniform);
        },
        [&](int t, int j, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[elements];
            for (int e = 0; e < elements; ++e) {
                x[e] = s[t][j][e];
            }
            store_piece(x, window, offset, uniform);
        });
}

} // namespace prefill
