// Matrices of a chunk on CDNA. One wave computes all blocks and holds them in registers.
#pragma once

#include "../../math/inverse.h"
#include "../factors.h"
#include "chunk_rows.h"
#include "record.h"

namespace prefill {

// Waves of prefill_prepare that share a SIMD.
constexpr int prepare_residency = 2;

// Lower blocks of K K^T and Q K^T [64, 64], each transposed, and the diagonal blocks of Q Q^T.
template <class T> struct Products {
    Tile kk[lower_blocks];
    Tile kq[lower_blocks];
    Tile qq[tiles];

    // Computes K K^T and Q K^T, and with `norm` Q Q^T.
    DEVICE_MEMBER void multiply(ChunkRows &rows, int key_dim, bool norm) {
        for (int i = 0; i < lower_blocks; ++i) {
            kk[i] = Tile{};
            kq[i] = Tile{};
        }
        for (int i = 0; i < tiles; ++i) {
            qq[i] = Tile{};
        }
#pragma unroll 1
        for (int column = 0; column < key_dim; column += 32 * ChunkRows::pairs) {
            rows.fetch(column);
            OperandPair kf[ChunkRows::pairs][tiles], qf[ChunkRows::pairs][tiles];
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                // Loads of one line of memory follow each other. Otherwise other waves could evict it from the cache
                // between them.
                for (int p = 0; p < ChunkRows::pairs; ++p) {
                    kf[p][i] = rows.k(i, column + 32 * p);
                }
                arch::phase();
            }
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                for (int p = 0; p < ChunkRows::pairs; ++p) {
                    qf[p][i] = rows.q(i, column + 32 * p);
                }
                arch::phase();
            }
#pragma unroll
            for (int p = 0; p < ChunkRows::pairs; ++p) {
#pragma unroll
                for (int i = 0; i < tiles; ++i) {
#pragma unroll
                    for (int j = 0; j <= i; ++j) {
                        Tile &with_k = kk[lower_block(i, j)];
                        with_k = T::mma(kf[p][j].first(), kf[p][i].first(), with_k);
                        with_k = T::mma(kf[p][j].second(), kf[p][i].second(), with_k);
                        Tile &with_q = kq[lower_block(i, j)];
                        with_q = T::mma(kf[p][j].first(), qf[p][i].first(), with_q);
                        with_q = T::mma(kf[p][j].second(), qf[p][i].second(), with_q);
                    }
                    if (norm) {
                        qq[i] = T::mma(qf[p][i].first(), qf[p][i].first(), qq[i]);
                        qq[i] = T::mma(qf[p][i].second(), qf[p][i].second(), qq[i]);
                    }
                }
            }
        }
    }

    // Sets factors.k_norm = |k|^2, from the diagonal of K K^T.
    DEVICE_MEMBER void key_squares(ChunkFactors &factors) const {
        const LaneMap at(arch::lane());
        for (int i = 0; i < tiles; ++i) {
            on_diagonal(kk[lower_block(i, i)], i, at, [&](int token, float x) { factors.k_norm[token] = x; });
        }
    }

    // Scales rows and columns by 1 / |q| and 1 / |k|. The diagonals hold |q|^2 and |k|^2.
    DEVICE_MEMBER void normalise(ChunkFactors &factors) {
        const LaneMap at(arch::lane());
        key_squares(factors);
        for (int i = 0; i < tiles; ++i) {
            on_diagonal(qq[i], i, at, [&](int token, float x) { factors.q_norm[token] = x; });
        }
        arch::team_sync<1>();
        invert_norms(factors);
        arch::team_sync<1>();
        for (int i = 0; i < tiles; ++i) {
            for (int j = 0; j <= i; ++j) {
                const Tile rows = rows_at(factors.k_norm + 16 * j, at);
                kk[lower_block(i, j)] *= rows * columns_at(factors.k_norm + 16 * i, at);
                kq[lower_block(i, j)] *= rows * columns_at(factors.q_norm + 16 * i, at);
            }
        }
    }
};

// Computes T and P of one value head after the other.
template <class T> class ChunkSolver {
  public:
    typedef math::Blocks Memory; // shared memory
    DEVICE_MEMBER ChunkSolver(const Products<T> &products, Memory &memory)
        : products(products), exchange(memory), unit_column(arch::lane()) {}

    // Writes T = (I - A)^-1 and P, [64, 64] each, of a value head. Calls diagonal(row, q . k) for each row of this
    // lane.
    template <class Writer, class Diagonal>
    DEVICE_MEMBER void write_t_and_p(const ChunkFactors &factors, const Writer &write, const Diagonal &diagonal) const {
        // Opaque: otherwise each comparison of row and column occupies two scalar registers during the loop over heads.
        const int same_lane = arch::opaque(arch::lane());
        const LaneMap at(same_lane), later(arch::opaque(arch::lane()));
        Tile blocks[lower_blocks]; // A
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
#pragma unroll
            for (int j = 0; j <= i; ++j) {
                const Tile decayed = chunk_decay(factors, i, j, at);
                const int block = lower_block(i, j);
                blocks[block] = block_of_a(decayed, columns_at(factors.beta + 16 * i, at), products.kk[block]);
                const Tile p = block_of_p(decayed, products.kq[block]);
                write.put_p(i, j, i == j ? strictly_lower(p, at) : p);
                if (i == j) {
                    on_diagonal(products.kq[block], i, at, diagonal);
                }
            }
            arch::phase(); // otherwise loads of later blocks move up and occupy registers
        }
        invert(
            blocks,
            [&](int i, int j, Tile transposed) __attribute__((always_inline)) {
                write.put_t(i, j, i == j ? strictly_lower(transposed, later) : transposed);
            },
            later, same_lane);
    }

  private:
    // Computes T = (I - A)^-1 from the blocks of A (math/inverse.h), all transposed. Calls put(i, j, block) as soon as
    // a block of T is known.
    template <class Put>
    DEVICE_MEMBER void invert(const Tile (&blocks)[lower_blocks], const Put &put, LaneMap at, int lane) const {
        const auto a = [&](int i, int j) __attribute__((always_inline)) { return blocks[lower_block(i, j)]; };
        for (int b = 0; b < tiles; ++b) {
            exchange.put(b, a(b, b), at);
        }
        arch::wave_sync();
        math::invert_blocks(exchange, unit_column, lane, 0);
        Tile diagonal[tiles];
        for (int b = 0; b < tiles; ++b) {
            diagonal[b] = exchange.get(b, at);
            put(b, b, diagonal[b]);
        }
        const Tile t00 = exchange.get_transposed(0, at), t11 = exchange.get_transposed(1, at),
                   t22 = exchange.get_transposed(2, at);
        arch::wave_sync();

        using math::join;
        using math::multiply_transposed;
        // Joins 16x16 inverses to 32x32.
        const Tile tt10 = join(a(1, 0), t00, diagonal[1]);
        put(1, 0, tt10);
        const Tile tt32 = join(a(3, 2), t22, diagonal[3]);
        put(3, 2, tt32);
        const Tile t10 = math::transposed(tt10, at);
        // Joins 32x32 inverses to 64x64, by 2x2 blocks: w = A21 T11, then T22 w.
        for (int j = 0; j < 2; ++j) {
            Tile w[2];
            for (int i = 0; i < 2; ++i) {
                w[i] = j == 0 ? multiply_transposed(a(2 + i, 1), t10, multiply_transposed(a(2 + i, 0), t00, Tile{}))
                              : multiply_transposed(a(2 + i, 1), t11, Tile{});
            }
            put(2, j, multiply_transposed(w[0], diagonal[2], Tile{}));
            put(3, j, multiply_transposed(w[1], diagonal[3], multiply_transposed(w[0], tt32, Tile{})));
        }
    }

    const Products<T> &products;
    math::Blocks &exchange;
    const math::UnitColumn unit_column;
};

} // namespace prefill
