// M and S as pairs of bf16 numbers on sm_90a, stored as operands: first the high numbers of a block, then the low.
// Memory holds M as 16x16 blocks, by rows of blocks, so that a lane loads a block in two accesses.
#pragma once

#include "../state.h"

namespace prefill {

// Row tiles per wave of combine.
constexpr int row_tiles = 1;
constexpr int wave_rows = 16;
// Number of sums that share the terms of a product. Several, because products of one sum wait for each other.
constexpr int product_sums = 3;
// Whether an accumulator tile, rounded, is an operand of the next product.
constexpr bool tiles_are_operands = true;
// Column tiles of M loaded ahead of the product, and matrices M held in registers. With two matrices, loads may take
// longer than a product.
constexpr int tiles_ahead(int key_tiles) { return key_tiles / (key_tiles <= 8 ? 1 : key_tiles <= 12 ? 4 : 8); }
constexpr int matrices_held(int key_tiles) { return tiles_ahead(key_tiles) == key_tiles ? 2 : 1; }
// Whether a tile of M is loaded to the registers of the one that was multiplied.
constexpr bool tiles_reloaded_after_use = false;
// Least number of workgroups of combine that share a multiprocessor.
constexpr int combine_residency = 1;
DEVICE int next_unit(int unit) { return unit + arch::workgroups(); }

// Words of a block's high (or low) numbers, and the index of a block's first word.
constexpr int part_words = arch::lanes * arch::operand_words;
DEVICE int block_of_parts(int row, int column, int key_dim) { return (row * (key_dim / 16) + column) * 2 * part_words; }

// Stores M to a summary, as pairs of bf16.
template <int Keys> DEVICE void store_high_low(const State<Keys> &s, float *to, int column, int key_dim) {
    if (column >= key_dim) {
        return;
    }
    const int lane = arch::opaque(arch::lane());
    // A lane's two columns are adjacent and form a word of an operand, which another lane (`reader`) will load.
    const int of_column = column % 16 / 2, reader = lane % 4 * 8 + of_column % 4;
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
        if (16 * t < key_dim) {
            int *const block = (int *)to + block_of_parts(t, column / 16, key_dim);
            for (int e = 0; e < elements; e += 4) {
                for (int p = 0; p < 2; ++p) {
                    const float first = s[t][0][e + p], second = s[t][0][e + 2 + p];
                    const int high = Bf16::pack(first, second);
                    int *const at = block + (reader + 4 * p) * arch::operand_words + of_column / 4 * 2 + e / 4;
                    at[0] = high;
                    at[part_words] = Bf16::pack(first - Bf16::low(high), second - Bf16::high(high));
                }
            }
        }
    }
}

// Stores an element of M to a summary, as a pair of bf16.
DEVICE void store_high_low(float *to, int row, int column, int key_dim, float x) {
    const int reader = row % 8 * 4 + column % 8 / 2, word = column % 16 / 8 * 2 + row % 16 / 8;
    const int block = block_of_parts(row / 16, column / 16, key_dim);
    short *const at = (short *)to + 2 * (block + reader * arch::operand_words + word) + column % 2;
    const short high = Bf16::narrow(x);
    at[0] = high;
    at[2 * part_words] = Bf16::narrow(x - Bf16::low(high));
}

// Operand tile of S, high and low.
struct HighLow {
    Operand high, low;
};
// Column tile of a wave's rows of M, high and low.
struct MatrixTile {
    HighLow parts;
    DEVICE_MEMBER Operand high(int) const { return parts.high; }
    DEVICE_MEMBER Operand low(int) const { return parts.low; }
};

DEVICE MatrixTile load_matrix_tile(const float *matrix, int first_row, int tile, int key_dim, int lane) {
    const Window memory(matrix);
    const bool inside = first_row < key_dim && 16 * tile < key_dim;
    const u32 block = block_of_parts(first_row / 16, tile, key_dim) * 4 + lane * 16;
    return MatrixTile{HighLow{memory.load_written_b128(inside ? block : Window::nowhere),
                              memory.load_written_b128(inside ? block + part_words * 4 : Window::nowhere)}};
}

// S in shared memory, in two buffers, as operand tiles.
template <int Keys> struct StateExchange {
    Operand at[2][Keys / 16][2][arch::lanes];

    DEVICE_MEMBER void put(Tile x, int buffer, int first_row) {
        const Operand high = rounded<Bf16>(x);
        at[buffer][first_row / 16][0][arch::lane()] = high;
        at[buffer][first_row / 16][1][arch::lane()] = rounded<Bf16>(x - widened<Bf16>(high));
    }
    DEVICE_MEMBER HighLow get(int buffer, int tile, int lane) const {
        return HighLow{at[buffer][tile][0][lane], at[buffer][tile][1][lane]};
    }
};

} // namespace prefill
