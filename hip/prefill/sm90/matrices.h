// Matrices of a chunk on sm_90a. Two warps do the same work on different blocks. Shared memory keeps the products of q
// and k from one value head to the next.
#pragma once

#include "../../math/inverse.h"
#include "../factors.h"
#include "chunk_rows.h"
#include "kept_tile.h"
#include "own_blocks.h"
#include "record.h"

namespace prefill {

// Workgroups of prefill_prepare that share a multiprocessor.
constexpr int prepare_residency = 6;

// This warp's blocks of K K^T and Q K^T [64, 64], each transposed, and its diagonal blocks of Q Q^T.
template <class T> struct Products {
    Tile kk[blocks_of_warp];
    Tile kq[blocks_of_warp];
    Tile qq[2];

    // Computes K K^T and Q K^T, and with `norm` Q Q^T.
    DEVICE_MEMBER void multiply(ChunkRows &rows, int key_dim, bool norm) {
        for (int b = 0; b < blocks_of_warp; ++b) {
            kk[b] = Tile{};
            kq[b] = Tile{};
        }
        for (int i = 0; i < 2; ++i) {
            qq[i] = Tile{};
        }
        const OwnBlocks own(arch::wave());
        for (int first = 0; first < key_dim; first += ChunkRows::columns_at_once) {
            rows.fetch(first);
            const int columns = min_of(key_dim - first, ChunkRows::columns_at_once);
#pragma unroll 1
            for (int column = 0; column < columns; column += 16) {
                multiply_columns(rows, column, own, norm);
            }
        }
    }

    // Sets factors.k_norm = |k|^2, from the diagonal of K K^T.
    DEVICE_MEMBER void key_squares(ChunkFactors &factors) const {
        const LaneMap at(arch::lane());
        const OwnBlocks own(arch::wave());
        for (int i = 0; i < 2; ++i) {
            on_diagonal(kk[2 * i], own.row(2 * i), at, [&](int token, float x) { factors.k_norm[token] = x; });
        }
    }

    // Scales rows and columns by 1 / |q| and 1 / |k|. The diagonals hold |q|^2 and |k|^2.
    DEVICE_MEMBER void normalise(ChunkFactors &factors) {
        const LaneMap at(arch::lane());
        const OwnBlocks own(arch::wave());
        key_squares(factors);
        for (int i = 0; i < 2; ++i) {
            on_diagonal(qq[i], own.row(i), at, [&](int token, float x) { factors.q_norm[token] = x; });
        }
        arch::workgroup_sync();
        invert_norms(factors);
        arch::workgroup_sync();
        for (int b = 0; b < blocks_of_warp; ++b) {
            const Tile rows = rows_at(factors.k_norm + 16 * own.column(b), at);
            kk[b] *= rows * columns_at(factors.k_norm + 16 * own.row(b), at);
            kq[b] *= rows * columns_at(factors.q_norm + 16 * own.row(b), at);
        }
    }

  private:
    DEVICE_MEMBER void multiply_columns(const ChunkRows &rows, int column, const OwnBlocks &own, bool norm) {
        const Operand left = rows.left_k(own.column(0), column);
        const Operand k = rows.right_k(own.row(0), column), q = rows.right_q(own.row(0), column);
        add(0, left, k, q, norm);
        const Operand next_k = rows.right_k(own.row(1), column), next_q = rows.right_q(own.row(1), column);
        add(1, left, next_k, next_q, norm);
        add(2, rows.left_k(own.column(2), column), next_k, next_q, false);
        // The rows of the lower half of the chunk are those of the second warp's diagonal blocks.
        if (own.half == 0) {
            for (int b = 3; b < blocks_of_warp; ++b) {
                add(b, left, rows.right_k(own.row(b), column), rows.right_q(own.row(b), column), false);
            }
        } else {
            const Operand below = rows.left_k(own.column(3), column);
            add(3, below, k, q, false);
            add(4, below, next_k, next_q, false);
        }
    }
    // Adds products of 16 columns to block `b`.
    DEVICE_MEMBER void add(int b, Operand left, Operand k, Operand q, bool norm) {
        if constexpr (T::rounds_finely) {
            // Adds in f32, which rounds: the matrix unit would truncate the sum.
            kk[b] += T::mma(left, k, Tile{});
        } else {
            kk[b] = T::mma(left, k, kk[b]);
        }
        kq[b] = T::mma(left, q, kq[b]);
        if (norm) {
            qq[b] = T::mma(q, q, qq[b]);
        }
    }
};

// Factors of the inverse's products, and their place in shared memory: f32 where T is rounded finely, otherwise the sum
// of two bf16 numbers.
template <bool Finely> struct InverseFactor {
    typedef Tile Factor;
    typedef KeptTile Kept;
    static DEVICE_MEMBER Tile multiply_transposed(Tile x, Tile y, Tile c) { return math::multiply_transposed(x, y, c); }
};
template <> struct InverseFactor<false> {
    typedef arch::Parts Factor;
    typedef KeptParts Kept;
    static DEVICE_MEMBER Tile multiply_transposed(const Factor &x, const Factor &y, Tile c) {
        return arch::multiply_transposed_parts(x, y, c);
    }
};

// Computes T and P of one value head after the other.
template <class T> class ChunkSolver {
    typedef InverseFactor<T::rounds_finely> Inverse;
    typedef typename Inverse::Factor Factor;

  public:
    struct Memory {
        math::Blocks blocks;
        KeptTile kk[2][blocks_of_warp], kq[2][blocks_of_warp];
        math::SomeBlocks<1> joined; // of the first warp, which reads it transposed
        // Written by the second warp. The first reads `below`, both read `inverse_below`.
        typename Inverse::Kept inverse_below, below[2];
    };
    // `memory` overlays the rows of Q and K, which are no longer read.
    DEVICE_MEMBER ChunkSolver(const Products<T> &products, Memory &memory) : memory(memory), own(arch::wave()) {
        arch::workgroup_sync();
        for (int b = 0; b < blocks_of_warp; ++b) {
            memory.kk[own.half][b].put(products.kk[b]);
            memory.kq[own.half][b].put(products.kq[b]);
        }
    }

    // Writes T = (I - A)^-1 and P, [64, 64] each, of a value head. Calls diagonal(row, q . k) for each row of this
    // lane.
    template <class Writer, class Diagonal>
    DEVICE_MEMBER void write_t_and_p(const ChunkFactors &factors, const Writer &write, const Diagonal &diagonal) const {
        const int lane = arch::opaque(arch::lane()) & (arch::lanes - 1); // the mask tells the compiler the range
        const LaneMap at(lane);
        Tile a[blocks_of_warp];
        for (int b = 0; b < blocks_of_warp; ++b) {
            const int row = own.row(b), column = own.column(b);
            const Tile decayed = chunk_decay(factors, row, column, at);
            a[b] = block_of_a(decayed, columns_at(factors.beta + 16 * row, at), memory.kk[own.half][b].get());
            const Tile product = memory.kq[own.half][b].get();
            const Tile p = block_of_p(decayed, product);
            write.put_p(row, column, own.on_diagonal(b) ? strictly_lower(p, at) : p);
            if (own.on_diagonal(b)) {
                on_diagonal(product, row, at, diagonal);
            }
        }
        invert(a, write, at, lane);
    }

  private:
    // Computes this warp's blocks of T = (I - A)^-1 from the blocks of A (math/inverse.h), all transposed.
    template <class Writer>
    DEVICE_MEMBER void invert(const Tile (&a)[blocks_of_warp], const Writer &write, LaneMap at, int lane) const {
        const int half = own.half;
        math::Blocks &blocks = memory.blocks;
        blocks.put(2 * half, a[0], at);
        blocks.put(2 * half + 1, a[2], at);
        const Factor below[2] = {Factor(a[3]), Factor(a[4])};
        if (half == 1) {
            for (int i = 0; i < 2; ++i) {
                memory.below[i].put(below[i]);
            }
        }
        arch::wave_sync();
        math::invert_blocks(blocks, math::UnitColumn(lane), lane, 2 * half);
        const Tile first = blocks.get(2 * half, at), second = blocks.get(2 * half + 1, at);
        write.put_t(2 * half, 2 * half, strictly_lower(first, at));
        write.put_t(2 * half + 1, 2 * half + 1, strictly_lower(second, at));
        const Tile joined = Inverse::multiply_transposed(
            Inverse::multiply_transposed(a[1], blocks.get_transposed(2 * half, at), Tile{}), second, Tile{});
        write.put_t(2 * half + 1, 2 * half, joined);
        if (half == 0) {
            memory.joined.put(0, joined, at);
        } else {
            memory.inverse_below.put(joined);
        }
        arch::workgroup_sync();

        // w = A21 T11, one column of blocks per warp. In the first column T11 has two blocks.
        const Factor t11 = blocks.get_transposed(half, at);
        Tile w[2];
        for (int i = 0; i < 2; ++i) {
            w[i] = Inverse::multiply_transposed(below[i], t11, Tile{});
        }
        if (half == 0) {
            const Factor t10 = memory.joined.get_transposed(0, at);
            for (int i = 0; i < 2; ++i) {
                w[i] = Inverse::multiply_transposed(memory.below[i].get(), t10, w[i]);
            }
        }
        const Factor w0(w[0]), w1(w[1]);
        write.put_t(2, half, Inverse::multiply_transposed(w0, blocks.get(2, at), Tile{}));
        write.put_t(3, half,
                    Inverse::multiply_transposed(w1, blocks.get(3, at),
                                                 Inverse::multiply_transposed(w0, memory.inverse_below.get(), Tile{})));
    }

    Memory &memory;
    const OwnBlocks own;
};

} // namespace prefill
