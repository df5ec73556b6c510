// Inverse T = (I - A)^-1 of a strictly lower triangular A in f32, from blocks of 16x16:
//   diagonal blocks by substitution (invert_blocks),
//   then two inverses T11, T22 of neighbouring blocks are joined by T21 = T22 A21 T11 (join), 16 to 32, and 32 to 64.
// All blocks are transposed: A^T and T^T are upper triangular, T21^T = (A21 T11)^T T22^T. The product x^T y of
// accumulator tiles then needs no movement of data between lanes.
#pragma once

#include "../arch/tile.h"

namespace math {

using namespace tile;

// 16x16 f32 blocks in shared memory, through which lanes exchange them. Stored by columns, which the target
// permutes (place_in_block) so that banks do not conflict.
template <int Count> struct SomeBlocks {
    static constexpr int count = Count;
    // Accessed as vectors, through pointers: clang 22 takes what is cast directly from an element of a member for as
    // aligned as that element.
    alignas(16) float at[count * 16 * 16];

    static DEVICE_MEMBER int place(int block, int row, int column) { return arch::place_in_block(block, row, column); }

    DEVICE_MEMBER void put(int block, Tile x, LaneMap at_) {
        const arch::BlockMap map(at_);
        for (int e = 0; e < elements; e += arch::run) {
            arch::Run consecutive;
            for (int i = 0; i < arch::run; ++i) {
                consecutive[i] = x[e + i];
            }
            float *const to = at + map.place(block, e);
            *(arch::Run *)to = consecutive;
        }
    }
    DEVICE_MEMBER Tile get(int block, LaneMap at_) const {
        const arch::BlockMap map(at_);
        Tile out;
        for (int e = 0; e < elements; e += arch::run) {
            const float *const from = at + map.place(block, e);
            const arch::Run consecutive = *(const arch::Run *)from;
            for (int i = 0; i < arch::run; ++i) {
                out[e + i] = consecutive[i];
            }
        }
        return out;
    }
    DEVICE_MEMBER Tile get_transposed(int block, LaneMap at_) const {
        const arch::BlockMap map(at_);
        Tile out;
        for (int e = 0; e < elements; ++e) {
            out[e] = at[map.transposed_place(block, e)];
        }
        return out;
    }
};
typedef SomeBlocks<4> Blocks; // the diagonal blocks of a chunk

// Column of the 16x16 identity: lane l of 16 has column l.
struct UnitColumn {
    float at[16];
    DEVICE_MEMBER explicit UnitColumn(int lane) {
        for (int i = 0; i < 16; ++i) {
            at[i] = arch::held(lane % 16 == i ? 1.0f : 0.0f);
        }
    }
};

// (I - a)^-1 of a strictly upper triangular 16x16 matrix by backward substitution, column by column:
//   t[i] += a[i][c] t[c] for i < c, c = 15, 14, ..., 1
// 16 lanes hold one matrix. A lane has a column of a and a column `t` of the inverse, which starts as a column of the
// identity. Only elements of a above the diagonal are read.
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

// x[b] <- (I - x[b])^-1 for blocks from `first` on, one block for each 16 lanes of the wave. A single block is computed
// by each 16 lanes alike.
template <int Count> DEVICE void invert_blocks(SomeBlocks<Count> &x, const UnitColumn &unit, int lane, int first) {
    const int block = Count == 1 ? 0 : first + lane / 16, column = lane % 16;
    const auto four = [&](int of_column, int quarter) __attribute__((always_inline)) -> f32x4 & {
        float *const rows = x.at + SomeBlocks<Count>::place(block, 4 * quarter, of_column);
        return *(f32x4 *)rows;
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
    if constexpr (Count == 1) {
        // Otherwise the compiler would move the sums, not the exchanges, into the branch.
        for (float &x : t) {
            x = arch::held(x);
        }
    }
    arch::wave_sync();
    for (int q = 0; q < 4 && (Count > 1 || lane < 16); ++q) {
        four(column, q) = f32x4{t[4 * q], t[4 * q + 1], t[4 * q + 2], t[4 * q + 3]};
    }
    arch::wave_sync();
}

// c + x^T y, f32.
DEVICE Tile multiply_transposed(Tile x, Tile y, Tile c) { return arch::multiply_transposed_f32(x, y, c); }

// T21^T = (A21 T11)^T T22^T, [16, 16], from A21^T, T11 and T22^T.
DEVICE Tile join(Tile a21_transposed, Tile t11, Tile t22_transposed) {
    return multiply_transposed(multiply_transposed(a21_transposed, t11, Tile{}), t22_transposed, Tile{});
}

// x^T, as a product with the identity.
DEVICE Tile transposed(Tile x, LaneMap at) {
    Tile identity;
    for (int e = 0; e < elements; ++e) {
        identity[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
    }
    return multiply_transposed(x, identity, Tile{});
}

} // namespace math
