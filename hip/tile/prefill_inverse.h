// What prepare needs to invert I - A in f32, whichever waves share the work: the exchange of lanes, and the inverses of
// 16x16 blocks.
#pragma once

#include "prefill.h"

namespace prefill {

using namespace tile;

// Row factors of a chunk in shared memory, while its matrices are made.
struct ChunkFactors {
    float gate_sum[chunk]; // G / log(2)
    float beta[chunk];     // times -1
    float q_norm[chunk];
    float k_norm[chunk];
};

// Matrices that exchange lanes through LDS: four 16x16 f32 blocks, column after column, the 16-byte quarters of a
// column exchanged by its number so that no access meets another in a bank.
struct Blocks {
    float at[tiles * 16 * 16];

    static DEVICE_MEMBER int place(int block, int row, int column) {
        return (block * 16 + column) * 16 + (row / 4 ^ (column >> 1 & 3)) * 4 + row % 4;
    }

    DEVICE_MEMBER void put(int block, Tile x, Place at_) {
        for (int e = 0; e < elements; e += arch::run) {
            arch::Run consecutive;
            for (int i = 0; i < arch::run; ++i) {
                consecutive[i] = x[e + i];
            }
            *(arch::Run *)(at + place(block, at_.row(e), at_.column(e))) = consecutive;
        }
    }
    DEVICE_MEMBER Tile get(int block, Place at_) const {
        Tile out;
        for (int e = 0; e < elements; e += arch::run) {
            const arch::Run consecutive = *(const arch::Run *)(at + place(block, at_.row(e), at_.column(e)));
            for (int i = 0; i < arch::run; ++i) {
                out[e + i] = consecutive[i];
            }
        }
        return out;
    }
    DEVICE_MEMBER Tile get_transposed(int block, Place at_) const {
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] = at[place(block, at_.column(e), at_.row(e))];
        }
        return out;
    }
};

// exp(rows - columns) of numbers in units of log2.
DEVICE Tile decay(Tile rows, ColumnFactor columns) {
    Tile out = arch::held(rows - columns);
    for (int e = 0; e < elements; ++e) {
        out[e] = arch::exp2(out[e]);
    }
    return out;
}

// D_ij^T of block (i, j).
DEVICE Tile chunk_decay(const ChunkFactors &factors, int i, int j, Place at) {
    return decay(-rows_at(factors.gate_sum + 16 * j, at), -columns_at(factors.gate_sum + 16 * i, at));
}

// Of a diagonal block, given transposed.
DEVICE Tile strictly_lower(Tile transposed, Place at) {
    for (int e = 0; e < elements; ++e) {
        transposed[e] = at.row(e) < at.column(e) ? transposed[e] : 0.0f;
    }
    return transposed;
}

// Calls f(token, x) for the elements of a diagonal block that are its diagonal.
template <class F> DEVICE void on_diagonal(Tile x, int row_tile, Place at, F f) {
    for (int e = 0; e < elements; ++e) {
        if (at.row(e) == at.column(e)) {
            f(16 * row_tile + at.column(e), x[e]);
        }
    }
}

// This lane's of the squares of norms become 1 / |q| and 1 / |k|.
DEVICE void invert_norms(ChunkFactors &factors) {
    const int token = arch::thread();
    // A row of zeros stays one whatever it is multiplied by; by 1000, its value could leave the range of 16 bits.
    const float k_square = factors.k_norm[token];
    factors.k_norm[token] = k_square == 0.0f ? 0.0f : arch::rsqrt(k_square + 1e-6f);
    factors.q_norm[token] = arch::rsqrt(factors.q_norm[token] + 1e-6f);
}

// The columns of the identity of 16 rows, one for a lane of a row of 16.
struct UnitColumn {
    float at[16];
    DEVICE_MEMBER explicit UnitColumn(int lane) {
        for (int i = 0; i < 16; ++i) {
            at[i] = arch::held(lane % 16 == i ? 1.0f : 0.0f);
        }
    }
};

// The inverses of unit upper triangular 16x16 blocks I - a, by backward substitution in f32. A row of 16 lanes has one
// block, a lane one column of its inverse, `t`, and of a, of which nothing from the diagonal down is looked at.
template <int Column, class Memory> DEVICE void substitute(float (&t)[16], const float (&a)[16], const Memory &memory) {
    if constexpr (Column > 0) {
        float coefficient[16];
        arch::spread_column<Column>(coefficient, a, memory);
        for (int i = 0; i < Column; ++i) {
            t[i] = __builtin_fmaf(coefficient[i], t[Column], t[i]);
        }
        substitute<Column - 1>(t, a, memory);
    }
}

// Leaves the inverses of I - (block) in `x` for as many blocks as a wave has lanes for, from `first` on.
DEVICE void invert_diagonal_blocks(Blocks &x, const UnitColumn &unit, int lane, int first) {
    const int block = first + lane / 16, column = lane % 16;
    const auto four = [&](int of_column, int quarter) __attribute__((always_inline)) -> f32x4 & {
        return *(f32x4 *)(x.at + Blocks::place(block, 4 * quarter, of_column));
    };
    float entries[16], t[16];
    for (int q = 0; q < 4; ++q) {
        const f32x4 rows = four(column, q);
        for (int r = 0; r < 4; ++r) {
            entries[4 * q + r] = rows[r];
            t[4 * q + r] = unit.at[4 * q + r];
        }
    }
    substitute<15>(t, entries, four);
    arch::wave_sync();
    for (int q = 0; q < 4; ++q) {
        four(column, q) = f32x4{t[4 * q], t[4 * q + 1], t[4 * q + 2], t[4 * q + 3]};
    }
    arch::wave_sync();
}

} // namespace prefill
