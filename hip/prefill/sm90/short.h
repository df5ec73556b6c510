// Lanes of a wave of prefill_short on sm_90a: implements ../short.h. A wave has 16 value columns.
#pragma once

#include "../../arch/tile.h"

namespace prefill {

constexpr int short_residency = 8;
constexpr int short_tiles = 1;
constexpr int group_tiles = 1;
constexpr bool corrects_first = true;

DEVICE int quarter_of(int lane) { return (u32)lane % 4; }
DEVICE int first_column_of(int lane) { return (u32)lane / 4 * 2; }
DEVICE constexpr Place place_of(int row, int column) { return Place{0, row / 2 * 4 + column * 2 + row % 2}; }
template <int> DEVICE bool inside_group(int group, int, int key_dim) { return 16 * group < key_dim; }

// Rows of Q or K. A load of four keys is one access if all are aligned.
template <int Keys> class ShortRows {
  public:
    DEVICE_MEMBER ShortRows(const char *base, u32 stride, int rows, int key_dim) {
        const Window memory(base);
        u32 offset[2];
        for (int s = 0; s < 2; ++s) {
            const int row = 8 * s + (u32)arch::lane() / 4;
            offset[s] = row < rows ? row * stride + 8 * quarter_of(arch::lane()) : Window::nowhere;
        }
        if ((((u32)(u64)base | stride) & 7) == 0) {
            load(offset, key_dim, [&](u32 at) __attribute__((always_inline)) { return memory.load_b64(at); });
        } else {
            load(offset, key_dim, [&](u32 at) __attribute__((always_inline)) { return memory.gather_b64(at); });
        }
    }
    DEVICE_MEMBER void operands(int group, Operand (&to)[group_tiles]) const { to[0] = tiles_of_rows[group]; }

  private:
    template <class F> DEVICE_MEMBER void load(const u32 (&offset)[2], int key_dim, F four) {
        for (int t = 0; t < Keys / 16; ++t) {
            i32x2 row[2];
            for (int s = 0; s < 2; ++s) {
                row[s] = four(16 * t < key_dim ? offset[s] + 32 * t : Window::nowhere);
            }
            tiles_of_rows[t] = Operand{row[0].x, row[1].x, row[0].y, row[1].y};
        }
    }

    Operand tiles_of_rows[Keys / 16];
};

// Rows of V and O. A pair is one access if all pairs are aligned.
class PairRows {
  public:
    DEVICE_MEMBER PairRows(const char *base, u32 stride)
        : base((char *)base), memory(base), words((((u32)(u64)base | stride) & 3) == 0) {}
    DEVICE_MEMBER int load(u32 offset) const {
        return words ? memory.load_b32(offset) : memory.load_b16(offset) | memory.load_b16(offset + 2) << 16;
    }
    DEVICE_MEMBER void store(u32 offset, int x) const {
        if ((int)offset < 0) {
            return;
        }
        if (words) {
            arch::store_global(base + offset, x);
        } else {
            arch::store_global(base + offset, (short)x);
            arch::store_global(base + offset + 2, (short)(x >> 16));
        }
    }

  private:
    char *const base;
    const Window memory;
    const bool words;
};

template <class T> DEVICE void widen_pairs(const int (&pair)[4], Tile (&to)[short_tiles]) {
    for (int r = 0; r < 4; ++r) {
        to[0][place_of(r, 0).element] = T::low(pair[r]);
        to[0][place_of(r, 1).element] = T::high(pair[r]);
    }
}
template <class T> DEVICE void round_pairs(const Tile (&from)[short_tiles], int (&pair)[4]) {
    for (int r = 0; r < 4; ++r) {
        pair[r] = T::pack(from[0][place_of(r, 0).element], from[0][place_of(r, 1).element]);
    }
}
template <class T> DEVICE Operand exact_operand(Tile x) { return rounded<T>(x); }
// The matrix unit would truncate the sum.
template <class T> DEVICE Tile add_product(Operand left, Operand right, Tile c) {
    if constexpr (T::rounds_finely) {
        return c + T::mma(left, right, Tile{});
    } else {
        return T::mma(left, right, c);
    }
}

} // namespace prefill
