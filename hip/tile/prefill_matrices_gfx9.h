// How prepare makes the matrices of a chunk on CDNA: one wave makes all blocks, and holds them in registers.
#pragma once

#include "prefill_inverse.h"

namespace prefill {

// Whether the gates of a value head are loaded while the one before is worked on, and how many value heads' are loaded
// together, if they are not.
constexpr bool gates_ahead = false;
constexpr int gates_at_once = 4;

// (K K^T)^T and (Q K^T)^T, rows j, columns i, of the lower blocks, and the diagonal blocks of Q Q^T.
template <class T> struct Products {
    Tile kk[lower_blocks];
    Tile kq[lower_blocks];
    Tile qq[tiles];

    // 32 columns at a time are on their way together.
    DEVICE_MEMBER void multiply(arch::ChunkRows &rows, int key_dim, bool norm) {
        for (int i = 0; i < lower_blocks; ++i) {
            kk[i] = Tile{};
            kq[i] = Tile{};
        }
        for (int i = 0; i < tiles; ++i) {
            qq[i] = Tile{};
        }
#pragma unroll 1
        for (int column = 0; column < key_dim; column += 32 * arch::ChunkRows::pairs) {
            rows.fetch(column);
            OperandPair kf[arch::ChunkRows::pairs][tiles], qf[arch::ChunkRows::pairs][tiles];
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                // What lies in one line of memory, one after the other: between them other waves would drive it out.
                for (int p = 0; p < arch::ChunkRows::pairs; ++p) {
                    kf[p][i] = rows.k(i, column + 32 * p);
                }
                arch::phase();
            }
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
                for (int p = 0; p < arch::ChunkRows::pairs; ++p) {
                    qf[p][i] = rows.q(i, column + 32 * p);
                }
                arch::phase();
            }
#pragma unroll
            for (int p = 0; p < arch::ChunkRows::pairs; ++p) {
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

    // |k|^2 of every token, from the diagonal, in the place of its norm.
    DEVICE_MEMBER void key_squares(ChunkFactors &factors) const {
        const Place at(arch::lane());
        for (int i = 0; i < tiles; ++i) {
            on_diagonal(kk[lower_block(i, i)], i, at, [&](int token, float x) { factors.k_norm[token] = x; });
        }
    }

    // Scales rows and columns by 1 / |q| and 1 / |k|, whose squares stand on the diagonals.
    DEVICE_MEMBER void normalise(ChunkFactors &factors) {
        const Place at(arch::lane());
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

// T and P of one value head after the other.
template <class T> class Maker {
  public:
    typedef Blocks Memory;
    DEVICE_MEMBER Maker(const Products<T> &products, Memory &memory)
        : products(products), exchange(memory), unit_column(arch::lane()) {}

    // `diagonal` is called for each token of this lane with q . k.
    template <class Diagonal>
    DEVICE_MEMBER void make(const ChunkFactors &factors, const RecordWriter<T> &write, const Diagonal &diagonal) const {
        // Opaque, or a pair of scalar registers holds each comparison of row and column across the whole loop.
        const int same_lane = arch::opaque(arch::lane());
        const Place at(same_lane), later(arch::opaque(arch::lane()));
        // Registers hold all blocks of A, and a decay is computed once for both.
        Tile blocks[lower_blocks];
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
#pragma unroll
            for (int j = 0; j <= i; ++j) {
                const Tile decayed = chunk_decay(factors, i, j, at);
                const int block = lower_block(i, j);
                blocks[block] = decayed * (columns_at(factors.beta + 16 * i, at) * products.kk[block]);
                const Tile p = decayed * products.kq[block];
                write.put_p(i, j, i == j ? strictly_lower(p, at) : p);
                if (i == j) {
                    on_diagonal(products.kq[block], i, at, diagonal);
                }
            }
        }
        invert(
            blocks,
            [&](int i, int j, Tile transposed) __attribute__((always_inline)) {
                write.put_t(i, j, i == j ? strictly_lower(transposed, later) : transposed);
            },
            later, same_lane);
    }

  private:
    // T^T for T = (I - A)^-1 of a 64x64 strictly lower A in f32, given transposed as blocks A_ij^T: the diagonal blocks
    // by substitution, then blocks of 16 are joined to 32, and of 32 to 64, by T21 = T22 A21 T11. A product x^T y of
    // accumulator tiles needs no movement of data, so it is T21^T = (A21 T11)^T T22^T, besides the blocks of T11
    // itself. put(i, j, tile) is called for each block of T^T as soon as it is known.
    template <class Put>
    DEVICE_MEMBER void invert(const Tile (&blocks)[lower_blocks], const Put &put, Place at, int lane) const {
        const auto a = [&](int i, int j) __attribute__((always_inline)) { return blocks[lower_block(i, j)]; };
        for (int b = 0; b < tiles; ++b) {
            exchange.put(b, a(b, b), at);
        }
        arch::wave_sync();
        invert_diagonal_blocks(exchange, unit_column, lane, 0);
        Tile diagonal[tiles];
        for (int b = 0; b < tiles; ++b) {
            diagonal[b] = exchange.get(b, at);
            put(b, b, diagonal[b]);
        }
        const Tile t00 = exchange.get_transposed(0, at), t11 = exchange.get_transposed(1, at),
                   t22 = exchange.get_transposed(2, at);
        arch::wave_sync();

        const auto product = [](Tile left_transposed, Tile right, Tile c) __attribute__((always_inline)) {
            return arch::multiply_transposed_f32(left_transposed, right, c);
        };
        // 16 -> 32.
        const Tile tt10 = product(product(a(1, 0), t00, Tile{}), diagonal[1], Tile{});
        put(1, 0, tt10);
        const Tile tt32 = product(product(a(3, 2), t22, Tile{}), diagonal[3], Tile{});
        put(3, 2, tt32);
        Tile identity;
        for (int e = 0; e < elements; ++e) {
            identity[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
        }
        const Tile t10 = product(tt10, identity, Tile{});
        // 32 -> 64, the same with 2x2 blocks: w = A21 T11.
        for (int j = 0; j < 2; ++j) {
            Tile w[2];
            for (int i = 0; i < 2; ++i) {
                w[i] = j == 0 ? product(a(2 + i, 1), t10, product(a(2 + i, 0), t00, Tile{}))
                              : product(a(2 + i, 1), t11, Tile{});
            }
            put(2, j, product(w[0], diagonal[2], Tile{}));
            put(3, j, product(w[1], diagonal[3], product(w[0], tt32, Tile{})));
        }
    }

    const Products<T> &products;
    Blocks &exchange;
    const UnitColumn unit_column;
};

} // namespace prefill
