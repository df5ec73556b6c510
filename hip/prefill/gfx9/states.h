// States in memory on CDNA, through a window: a lane moves its adjacent elements at once, and all its pieces have one
// address. Included by ../state.h.
#pragma once

namespace prefill {

// Row strides in elements from which on a window does not reach all rows.
constexpr int64_t long_stride = 1 << 21;

DEVICE bool fits_a_window(const StateView &view) { return max_of(view.key_step, view.value_step) < long_stride; }

// Moves `x`, adjacent elements of type `Type`, between registers and `offset` + `uniform`. NaNs stay as they are.
template <int Type, int N> DEVICE void load_piece(float (&x)[N], const Window &from, u32 offset, int uniform) {
    constexpr int words = Type == DWK_F32 ? N : N / 2;
    int word[words > 0 ? words : 1];
    if constexpr (words == 4) {
        const i32x4 all = from.load_b128(offset, uniform);
        for (int i = 0; i < 4; ++i) {
            word[i] = all[i];
        }
    } else if constexpr (words == 2) {
        const i32x2 both = from.load_b64(offset, uniform);
        word[0] = both.x;
        word[1] = both.y;
    } else {
        word[0] = words == 1 ? from.load_b32(offset, uniform) : from.load_b16(offset, uniform);
    }
    for (int i = 0; i < N; ++i) {
        x[i] = Type == DWK_F32 ? bits<float>(word[i]) : state::widened<Type>(word[i / 2], i % 2);
    }
}
template <int Type, int N> DEVICE void store_piece(const float (&x)[N], const Window &to, u32 offset, int uniform) {
    constexpr int words = Type == DWK_F32 ? N : N / 2;
    int word[words > 0 ? words : 1];
    if constexpr (Type == DWK_F32) {
        for (int i = 0; i < N; ++i) {
            word[i] = bits<int>(x[i]);
        }
    } else {
        for (int i = 0; i < words; ++i) {
            word[i] = state::narrowed<Type>(x[2 * i], x[2 * i + 1]);
        }
    }
    if constexpr (words == 4) {
        to.store_b128(offset, i32x4{word[0], word[1], word[2], word[3]}, uniform);
    } else if constexpr (words == 2) {
        to.store_b64(offset, i32x2{word[0], word[1]}, uniform);
    } else if constexpr (words == 1) {
        to.store_b32(offset, word[0], uniform);
    } else {
        to.store_b16(offset, state::narrowed<Type>(x[0]), uniform);
    }
}

// Calls rows(t, e, window, offset, uniform) for every row of adjacent value columns that this lane owns, or
// columns(t, j, window, offset, uniform) for every column of four adjacent keys, as the state lies in memory. Offsets
// lead nowhere for elements beyond K and V.
template <int Type, int Keys, class Rows, class Columns>
DEVICE void for_each_piece(const StateView &view, int column, int key_dim, int value_dim, const Rows &rows,
                           const Columns &columns) {
    const bool keys_adjacent = view.key_step == 1;
    const u32 size = state::size_of(Type), row = size * (u32)(keys_adjacent ? view.value_step : view.key_step);
    const Window window(arch::uniform_pointer(view.base));
    // Opaque: otherwise addresses stay in registers from the first use to the second.
    const int key = state_key(0, 0, arch::opaque(arch::lane()));
    const bool inside = column < value_dim;
    if (keys_adjacent) {
#pragma unroll
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            const int first = state_key(t, 0, 0) - state_key(0, 0, 0);
#pragma unroll
            for (int j = 0; j < StateLayout<Keys>::column_tiles; ++j) {
                const u32 offset = (column + state_column(j, 0)) * row + size * key;
                columns(t, j, window, inside && key < key_dim - first ? offset : Window::nowhere, (int)size * first);
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

template <int Type, int Keys>
DEVICE void load_through_window(State<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    constexpr int across = StateLayout<Keys>::column_tiles;
    for_each_piece<Type, Keys>(
        from, column, key_dim, value_dim,
        [&](int t, int e, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[across];
            load_piece<Type>(x, window, offset, uniform);
            for (int j = 0; j < across; ++j) {
                s[t][j][e] = x[j];
            }
        },
        [&](int t, int j, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[elements];
            load_piece<Type>(x, window, offset, uniform);
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

template <int Type, int Keys>
DEVICE void store_through_window(const State<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    constexpr int across = StateLayout<Keys>::column_tiles;
    for_each_piece<Type, Keys>(
        to, column, key_dim, value_dim,
        [&](int t, int e, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[across];
            for (int j = 0; j < across; ++j) {
                x[j] = s[t][j][e];
            }
            store_piece<Type>(x, window, offset, uniform);
        },
        [&](int t, int j, const Window &window, u32 offset, int uniform) __attribute__((always_inline)) {
            float x[elements];
            for (int e = 0; e < elements; ++e) {
                x[e] = s[t][j][e];
            }
            store_piece<Type>(x, window, offset, uniform);
        });
}

} // namespace prefill
