// M and S as pairs of bf16 numbers on CDNA. A word holds both numbers of an element, the greater (high) in the high
// half. Memory holds M^T [K, K].
#pragma once

#include "../state.h"

namespace prefill {

// Row tiles of M per wave of prefill_combine. Rows of the tiles alternate, so that a lane's rows are adjacent in
// memory.
constexpr int row_tiles = 2;

// Splits x into two bf16 numbers, the greater in the high half.
DEVICE int pack_high_low(float x) {
    const float high = arch::Bf16::high(arch::Bf16::pack(0.0f, x));
    return arch::Bf16::pack(x - high, x);
}

// Stores M^T [column, K] to a summary, as pairs of bf16.
template <int Keys> DEVICE void store_high_low(const State<Keys> &s, float *to, int column, int key_dim) {
    for_each_run<Keys>(column, key_dim, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        arch::Run x;
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            const float value = s[t][j][e + r];
            x[r] = bits<float>(pack_high_low(value));
        }
        *(arch::Run *)(to + index) = x;
    });
}

// Stores an element of M to a summary, as a pair of bf16.
DEVICE void store_high_low(float *to, int row, int column, int key_dim, float x) {
    ((int *)to)[column * key_dim + row] = pack_high_low(x);
}

// Column tile of a wave's rows of M, high and low.
struct MatrixTile {
    struct Rows {
        int row[row_tiles];
    } at[arch::operand_words][2];

    DEVICE_MEMBER Operand high(int tile) const {
        Operand out;
        for (int w = 0; w < arch::operand_words; ++w) {
            out[w] = arch::high_halves(at[w][0].row[tile], at[w][1].row[tile]);
        }
        return out;
    }
    DEVICE_MEMBER Operand low(int tile) const {
        Operand out;
        for (int w = 0; w < arch::operand_words; ++w) {
            out[w] = arch::low_halves(at[w][0].row[tile], at[w][1].row[tile]);
        }
        return out;
    }
};

DEVICE MatrixTile load_matrix_tile(const float *matrix, int first_row, int tile, int key_dim, int lane) {
    const Window memory(matrix);
    MatrixTile out;
    for (int w = 0; w < arch::operand_words; ++w) {
        const int row = first_row + row_tiles * arch::operand_row(w, lane);
        const int column = arch::operand_element(w, lane);
        const u32 offset = row < key_dim ? (column * key_dim + row) * 4 : Window::nowhere;
        for (int i = 0; i < 2; ++i) {
            const u32 from = (16 * tile + i) * key_dim * 4;
            out.at[w][i] =
                bits<MatrixTile::Rows>(memory.load_b64(16 * tile < key_dim ? offset + from : Window::nowhere));
        }
    }
    return out;
}

// Operand tile of S, high and low.
struct HighLow {
    Operand high, low;
};

} // namespace prefill
