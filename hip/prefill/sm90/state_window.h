// States in f32 on sm_90a: implements ../state_window.h. A lane moves two adjacent elements at once.
#pragma once

#include "../state_view.h"

namespace prefill {

// Row strides in elements from which on offsets of 32 bits do not reach all rows.
constexpr int64_t long_stride = 1 << 21;
static_assert(255 * (long_stride - 1) * 4 + 256 * 4 < 0x7fffffff, "K and V are at most 256");

// Pairs must be aligned to 8 bytes.
DEVICE bool fits_a_window(const StateView &view) {
    const int64_t row = max_of(view.key_step, view.value_step);
    return row < long_stride && row % 2 == 0 && (u64)view.base % 8 == 0;
}

// Calls f(tile, element, next element, address) for each pair of adjacent elements that this lane owns and that lies
// within K and V: two columns of a key or, if keys are adjacent in memory, two keys of a column.
template <int Keys, class F>
DEVICE void for_each_pair(const StateView &view, int column, int key_dim, int value_dim, const F &f) {
    constexpr int size = sizeof(float);
    if (column >= value_dim) {
        return;
    }
    // Opaque: otherwise addresses of the initial state stay in registers until the final one is stored.
    const int key = state_key(0, 0, arch::opaque(arch::lane()));
    if (view.key_step == 1) {
        const u32 row = size * (u32)view.value_step;
        char *const first = view.base + (column * row + size * key), *const second = first + row;
#pragma unroll
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            if (16 * t < key_dim) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    f(t, 4 * h, 4 * h + 1, first + size * (16 * t + 8 * h));
                    f(t, 4 * h + 2, 4 * h + 3, second + size * (16 * t + 8 * h));
                }
            }
        }
        return;
    }
    const u32 row = size * (u32)view.key_step;
    char *at = view.base + (key * row + size * column);
#pragma unroll
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
        if (16 * t < key_dim) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                f(t, 4 * h, 4 * h + 2, at);
                f(t, 4 * h + 1, 4 * h + 3, at + row);
                at = arch::opaque(at + 8 * row);
            }
        }
    }
}

template <int Keys>
DEVICE void load_through_window(State<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    for_each_pair<Keys>(from, column, key_dim, value_dim,
                        [&](int t, int e, int next, const char *at) __attribute__((always_inline)) {
                            const f32x2 x = *(const f32x2 *)at;
                            s[t][0][e] = math::canonical(x.x);
                            s[t][0][next] = math::canonical(x.y);
                        });
}

template <int Keys>
DEVICE void store_through_window(const State<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    for_each_pair<Keys>(to, column, key_dim, value_dim,
                        [&](int t, int e, int next, char *at)
                            __attribute__((always_inline)) { *(f32x2 *)at = f32x2{s[t][0][e], s[t][0][next]}; });
}

} // namespace prefill
