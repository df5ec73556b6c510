// How prepare makes the matrices of a chunk on sm_90a: two warps do the same work on different blocks, which wait in
// shared memory from one value head to the next.
#pragma once

#include "sm90_prepare.h"

#include "prefill_inverse.h"

namespace prefill {

// Whether the gates of a value head are loaded while the one before is worked on.
constexpr bool gates_ahead = true;
constexpr int gates_at_once = 0;

// The lower blocks of one warp, `half`: those of the diagonal 32x32 block of this number, then its 16 columns of the
// 32x32 block below the diagonal.
constexpr int blocks_of_warp = 5;
class OwnBlocks {
  public:
    DEVICE_MEMBER explicit OwnBlocks(int half) : half(half) {}
    DEVICE_MEMBER int row(int block) const { return block < 3 ? 2 * half + (block > 0) : block - 1; }
    DEVICE_MEMBER int column(int block) const { return block < 3 ? 2 * half + (block > 1) : half; }
    static DEVICE_MEMBER bool on_diagonal(int block) { return block == 0 || block == 2; }

    const int half;
};

// (K K^T)^T and (Q K^T)^T, rows j, columns i, of this warp's blocks, and its diagonal blocks of Q Q^T.
template <class T> struct Products {
    Tile kk[blocks_of_warp];
    Tile kq[blocks_of_warp];
    Tile qq[2];

    DEVICE_MEMBER void multiply(arch::ChunkRows &rows, int key_dim, bool norm) {
        for (int b = 0; b < blocks_of_warp; ++b) {
            kk[b] = Tile{};
            kq[b] = Tile{};
        }
        for (int i = 0; i < 2; ++i) {
            qq[i] = Tile{};
        }
        const OwnBlocks own(arch::wave());
        for (int first = 0; first < key_dim; first += arch::ChunkRows::columns_at_once) {
            rows.fetch(first);
            const int columns = min_of(key_dim - first, arch::ChunkRows::columns_at_once);
#pragma unroll 1
            for (int column = 0; column < columns; column += 16) {
                multiply_columns(rows, column, own, norm);
            }
        }
    }

    // |k|^2 of every token, from the diagonal, in the place of its norm.
    DEVICE_MEMBER void key_squares(ChunkFactors &factors) const {
        const Place at(arch::lane());
        const OwnBlocks own(arch::wave());
        for (int i = 0; i < 2; ++i) {
            on_diagonal(kk[2 * i], own.row(2 * i), at, [&](int token, float x) { factors.k_norm[token] = x; });
        }
    }

    // Scales rows and columns by 1 / |q| and 1 / |k|, whose squares stand on the diagonals.
    DEVICE_MEMBER void normalise(ChunkFactors &factors) {
        const Place at(arch::lane());
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
    DEVICE_MEMBER void multiply_columns(const arch::ChunkRows &rows, int column, const OwnBlocks &own, bool norm) {
        const Operand first = rows.left_k(own.column(0), column), second = rows.left_k(own.column(2), column),
                      below = rows.left_k(own.column(3), column);
        Operand k, q;
        for (int b = 0; b < blocks_of_warp; ++b) {
            const Operand left = b < 2 ? first : b == 2 ? second : below;
            if (b != 2) {
                k = rows.right_k(own.row(b), column);
                q = rows.right_q(own.row(b), column);
            }
            if constexpr (T::rounds_finely) {
                // The matrix unit truncates where it adds to a sum; f32 rounds.
                kk[b] += T::mma(left, k, Tile{});
            } else {
                kk[b] = T::mma(left, k, kk[b]);
            }
            kq[b] = T::mma(left, q, kq[b]);
            if (norm && b < 2) {
                qq[b] = T::mma(q, q, qq[b]);
            }
        }
    }
};

// T and P of one value head after the other.
template <class T> class Maker {
  public:
    struct Memory {
        Blocks blocks;
        arch::KeptTile kk[2][blocks_of_warp], kq[2][blocks_of_warp];
        arch::KeptTile inverse_below[2], below[2][2]; // what one warp makes and both read
    };
    // In the place of the rows, which nobody reads any more.
    DEVICE_MEMBER Maker(const Products<T> &products, Memory &memory) : memory(memory), own(arch::wave()) {
        arch::workgroup_sync();
        for (int b = 0; b < blocks_of_warp; ++b) {
            memory.kk[own.half][b].put(products.kk[b]);
            memory.kq[own.half][b].put(products.kq[b]);
        }
    }

    // `diagonal` is called for each token of this lane with q . k.
    template <class Diagonal>
    DEVICE_MEMBER void make(const ChunkFactors &factors, const RecordWriter<T> &write, const Diagonal &diagonal) const {
        const int lane = arch::opaque(arch::lane()) & (arch::lanes - 1); // a number of which its range is known
        const Place at(lane);
        Tile a[blocks_of_warp];
        for (int b = 0; b < blocks_of_warp; ++b) {
            const int row = own.row(b), column = own.column(b);
            const Tile decayed = chunk_decay(factors, row, column, at);
            a[b] = decayed * (columns_at(factors.beta + 16 * row, at) * memory.kk[own.half][b].get());
            const Tile product = memory.kq[own.half][b].get();
            const Tile p = decayed * product;
            write.put_p(row, column, own.on_diagonal(b) ? strictly_lower(p, at) : p);
            if (own.on_diagonal(b)) {
                on_diagonal(product, row, at, diagonal);
            }
        }
        invert(a, write, at, lane);
    }

  private:
    static DEVICE_MEMBER Tile product(Tile left_transposed, Tile right, Tile c) {
        return arch::multiply_transposed_f32(left_transposed, right, c);
    }

    // This warp's blocks of T^T for T = (I - A)^-1 of a 64x64 strictly lower A in f32, given transposed: the diagonal
    // blocks by substitution, then blocks of 16 are joined to 32, and of 32 to 64, by T21 = T22 A21 T11. A product x^T
    // y of accumulator tiles needs no movement of data, so it is T21^T = (A21 T11)^T T22^T, besides the blocks of T11.
    DEVICE_MEMBER void invert(const Tile (&a)[blocks_of_warp], const RecordWriter<T> &write, Place at, int lane) const {
        const int half = own.half;
        Blocks &blocks = memory.blocks;
        blocks.put(2 * half, a[0], at);
        blocks.put(2 * half + 1, a[2], at);
        for (int i = 0; i < 2; ++i) {
            memory.below[half][i].put(a[3 + i]);
        }
        arch::wave_sync();
        invert_diagonal_blocks(blocks, UnitColumn(lane), lane, 2 * half);
        const Tile first = blocks.get(2 * half, at), second = blocks.get(2 * half + 1, at);
        write.put_t(2 * half, 2 * half, strictly_lower(first, at));
        write.put_t(2 * half + 1, 2 * half + 1, strictly_lower(second, at));
        const Tile joined = product(product(a[1], blocks.get_transposed(2 * half, at), Tile{}), second, Tile{});
        write.put_t(2 * half + 1, 2 * half, joined);
        memory.inverse_below[half].put(joined);
        arch::workgroup_sync();

        // w = A21 T11, a column of blocks for each warp, of which T11 has two blocks in the first.
        const Tile t11 = blocks.get_transposed(half, at);
        Tile w[2];
        for (int i = 0; i < 2; ++i) {
            w[i] = product(a[3 + i], t11, Tile{});
        }
        if (half == 0) {
            Tile identity;
            for (int e = 0; e < elements; ++e) {
                identity[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
            }
            const Tile t10 = product(joined, identity, Tile{});
            for (int i = 0; i < 2; ++i) {
                w[i] = product(memory.below[1][i].get(), t10, w[i]);
            }
        }
        write.put_t(2, half, product(w[0], blocks.get(2, at), Tile{}));
        write.put_t(3, half, product(w[1], blocks.get(3, at), product(w[0], memory.inverse_below[1].get(), Tile{})));
    }

    Memory &memory;
    const OwnBlocks own;
};

} // namespace prefill
