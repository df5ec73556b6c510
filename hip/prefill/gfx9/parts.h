// M and S in two parts of bf16 on CDNA: both parts of an element are a word, the greater in the high half. M^T [K, K]
// in memory.
#pragma once

#include "../state.h"

namespace prefill {

// Row tiles of a wave of combine. Their rows alternate, so that a lane finds its rows of all tiles side by side.
constexpr int row_tiles = 2;
constexpr int wave_rows = 16 * row_tiles;
// Sums into which the terms of a product are divided.
constexpr int product_sums = 1;
constexpr bool tiles_are_operands = false;
// Column tiles of M that are loaded while one is multiplied, and matrices that registers hold.
constexpr int tiles_ahead(int key_tiles) { return key_tiles <= 8 ? key_tiles : key_tiles / 2; }
constexpr int matrices_held(int) { return 1; }
// Waves of combine that share a SIMD. One alone would be given accumulation registers.
constexpr int combine_residency = 2;

// x as two bf16: the greater part in the high half.
DEVICE int two_parts(float x) {
    const float high = arch::Bf16::high(arch::Bf16::pack(0.0f, x));
    return arch::Bf16::pack(x - high, x);
}

// M^T [column, K], in parts, to a summary.
template <int Keys> DEVICE void store_parts(const State<Keys> &s, float *to, int column, int key_dim) {
    for_each_run<Keys>(column, key_dim, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        arch::Run x;
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            const float value = s[t][j][e + r];
            x[r] = bits<float>(two_parts(value));
        }
        *(arch::Run *)(to + index) = x;
    });
}

// Column tile of a wave's rows of M, both parts.
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

// Operand tile of S, both parts.
struct StateParts {
    Operand high, low;
};

// S in shared memory, twice, column after column; padded, so that the columns of an operand lie in different banks.
template <int Keys> struct StateExchange {
    int at[2][16][Keys + 4];

    DEVICE_MEMBER void put(float value, int buffer, int row, int column) { at[buffer][column][row] = two_parts(value); }
    DEVICE_MEMBER StateParts get(int buffer, int tile, int lane) const {
        StateParts out;
        for (int w = 0; w < arch::operand_words; ++w) {
            const int row = 16 * tile + arch::operand_element(w, lane);
            const int *s = &at[buffer][arch::operand_row(w, lane)][row];
            out.high[w] = arch::high_halves(s[0], s[1]);
            out.low[w] = arch::low_halves(s[0], s[1]);
        }
        return out;
    }
};

} // namespace prefill
