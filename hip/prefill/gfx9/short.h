// Lanes of a wave of prefill_short on CDNA: implements ../short.h. A wave has 32 value columns.
#pragma once

#include "../place.h"
#include "rows.h"

namespace prefill {

// Waves that share a SIMD, at least. With K = 128 clang 19 makes code for four. clang 22 takes two registers more than
// four have: asked for four, it spills dozens.
constexpr int short_residency = 3;
constexpr int short_tiles = scan_tiles;
constexpr int group_tiles = 2;
constexpr bool corrects_first = false;

DEVICE int quarter_of(int lane) { return arch::eighth(lane); }
DEVICE int first_column_of(int lane) { return first_column(lane, short_tiles); }
DEVICE constexpr Place place_of(int row, int column) { return Place{column, row}; }
template <int Keys> DEVICE bool inside_group(int group, int key, int key_dim) {
    return 32 * group + 32 <= smallest_key_dim(Keys) || 32 * group + key < key_dim;
}

// Rows of Q or K.
template <int Keys> class ShortRows {
  public:
    DEVICE_MEMBER ShortRows(const char *base, u32 stride, int rows, int key_dim) {
        const int row = arch::lane() % 16, key = 8 * arch::eighth(arch::lane());
        const u32 offset = row < rows ? row * stride + 2 * key : Window::nowhere;
        const Window memory(base);
        for (int b = 0; b < key_pairs(Keys); ++b) {
            pairs[b].data = memory.load_b128(inside_group<Keys>(b, key, key_dim) ? offset + 64 * b : Window::nowhere);
        }
    }
    DEVICE_MEMBER void operands(int group, Operand (&to)[group_tiles]) const {
        to[0] = pairs[group].first();
        to[1] = pairs[group].second();
    }

  private:
    OperandPair pairs[key_pairs(Keys)];
};

// Rows of V and O.
class PairRows {
  public:
    DEVICE_MEMBER PairRows(const char *base, u32) : memory(base) {}
    DEVICE_MEMBER int load(u32 offset) const { return memory.load_b32(offset); }
    DEVICE_MEMBER void store(u32 offset, int x) const { memory.store_b32(offset, x); }

  private:
    const Window memory;
};

template <class T> DEVICE void widen_pairs(const int (&pair)[4], Tile (&to)[short_tiles]) {
    for (int r = 0; r < 4; ++r) {
        to[0][r] = T::low(pair[r]);
        to[1][r] = T::high(pair[r]);
    }
}
template <class T> DEVICE void round_pairs(const Tile (&from)[short_tiles], int (&pair)[4]) {
    const Tile first = arch::held(T::nearest(from[0])), second = arch::held(T::nearest(from[1]));
    for (int r = 0; r < 4; ++r) {
        pair[r] = T::join(first[r], second[r]);
    }
}
template <class T> DEVICE Operand exact_operand(Tile x) { return arch::packed<T>(x); }
template <class T> DEVICE Tile add_product(Operand left, Operand right, Tile c) { return T::mma(left, right, c); }

} // namespace prefill
