// M as pairs of bf16 numbers on sm_90a. Memory holds it as 16x16 blocks, by rows of blocks, and each block as two
// operands: first the high numbers, then the low, so that a lane loads a block in two accesses. The words of an operand
// lie there in the order 0, 2, 1, 3, in which the matrix unit takes pairs of registers.
#pragma once

#include "../state.h"

namespace prefill {

// Words of a block's high (or low) numbers, and the index of a block's first word.
constexpr int part_words = arch::lanes * arch::operand_words;
DEVICE int block_of_parts(int row, int column, int key_dim) { return (row * (key_dim / 16) + column) * 2 * part_words; }

// Place of word 2 d + s of an operand (arch/sm90/tiles.h) among a lane's words in memory.
DEVICE constexpr int place_of_word(int d, int s) { return 2 * s + d; }
// The operand of a lane's words in memory.
DEVICE Operand in_order(i32x4 words) { return Operand{words.x, words.z, words.y, words.w}; }

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
                    int *const at =
                        block + (reader + 4 * p) * arch::operand_words + place_of_word(of_column / 4, e / 4);
                    at[0] = high;
                    at[part_words] = Bf16::pack(first - Bf16::low(high), second - Bf16::high(high));
                }
            }
        }
    }
}

// Stores an element of M to a summary, as a pair of bf16.
DEVICE void store_high_low(float *to, int row, int column, int key_dim, float x) {
    const int reader = row % 8 * 4 + column % 8 / 2, word = place_of_word(column % 16 / 8, row % 16 / 8);
    const int block = block_of_parts(row / 16, column / 16, key_dim);
    short *const at = (short *)to + 2 * (block + reader * arch::operand_words + word) + column % 2;
    const short high = Bf16::narrow(x);
    at[0] = high;
    at[2 * part_words] = Bf16::narrow(x - Bf16::low(high));
}

} // namespace prefill
