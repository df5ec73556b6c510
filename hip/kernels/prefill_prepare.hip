// Prefill, first part. One wave per (chunk of 64 tokens, key head); K K^T and Q K^T are computed once for all value
// heads of the key head. For each value head, with G the inclusive chunk-local sum of g and D_ij = exp(G_i - G_j):
//   A = strictly lower part of beta_i D_ij (k_i . k_j)        f32
//   T = (I + A)^-1                                            f32, then its strictly lower part in 16 bits
//   P = strictly lower part of D_ij (q_i . k_j)               16 bits
// and the row factors that prefill_scan multiplies by (prefill.h). With DW_QK_L2NORM the norms of q and k are factors
// of rows and columns of these, so that neither q nor k is ever rounded again.
//
// q, k [T, HK, K] 16-bit; g, beta [T, HV] f32 (or a, b); records [slots, HV].
#include "../tile/prefill.h"

namespace {

using namespace tile;
using prefill::lower_block;
using prefill::lower_blocks;
using prefill::tiles;

// exp(-120) is 0 in f32, so a token whose gate is below erases the state exactly as this value does, while the sums of
// a chunk stay small enough to be accurate. -infinity is legal for the same reason.
constexpr float lowest_gate = -120.0f;

// Matrices that exchange lanes through LDS: four 16x16 f32 blocks, column after column, the 16-byte quarters of a
// column exchanged by its number so that no access meets another in a bank.
struct Exchange {
    float at[tiles * 16 * 16];

    static DEVICE_MEMBER int quarter(int block, int column, int q) {
        return (block * 16 + column) * 16 + (q ^ (column >> 1 & 3)) * 4;
    }
};

struct Shared {
    Exchange blocks;
    float gate_sum[prefill::chunk];
    float beta[prefill::chunk];
    float q_norm[prefill::chunk];
    float k_norm[prefill::chunk];
};

// Four consecutive rows' values for this lane's rows of block `b`, and the value for its column.
DEVICE f32x4 rows_at(const float *values, int b, Place at) { return *(const f32x4 *)(values + 16 * b + at.row); }
DEVICE float column_at(const float *values, int b, Place at) { return values[16 * b + at.column]; }

// K K^T (rows i, columns j) and (Q K^T)^T (rows j, columns i), lower blocks, and the diagonal blocks of Q Q^T.
struct Products {
    Tile kk[lower_blocks];
    Tile kq[lower_blocks];
    Tile qq[tiles];
};

template <class T>
DEVICE void multiply_rows(Products &out, const Window &q, const Window &k, u32 q_stride, u32 k_stride, int rows,
                          int key_dim, bool norm) {
    const int lane = arch::lane();
    u32 q_row[tiles], k_row[tiles];
    for (int i = 0; i < tiles; ++i) {
        const int row = 16 * i + lane % 16;
        q_row[i] = row < rows ? row * q_stride + lane / 16 * 16 : Window::nowhere;
        k_row[i] = row < rows ? row * k_stride + lane / 16 * 16 : Window::nowhere;
    }
    for (int i = 0; i < lower_blocks; ++i) {
        out.kk[i] = Tile{};
        out.kq[i] = Tile{};
    }
    for (int i = 0; i < tiles; ++i) {
        out.qq[i] = Tile{};
    }
#pragma unroll 1
    for (int column = 0; column < key_dim; column += 32) {
        const bool inside = column + lane / 16 * 8 < key_dim;
        OperandPair kf[tiles], qf[tiles];
        for (int i = 0; i < tiles; ++i) {
            kf[i].data = k.load_b128(inside ? k_row[i] + 2 * column : Window::nowhere);
            qf[i].data = q.load_b128(inside ? q_row[i] + 2 * column : Window::nowhere);
        }
        for (int i = 0; i < tiles; ++i) {
            for (int j = 0; j <= i; ++j) {
                Tile &kk = out.kk[lower_block(i, j)];
                kk = T::mma(kf[i].first(), kf[j].first(), kk);
                kk = T::mma(kf[i].second(), kf[j].second(), kk);
                Tile &kq = out.kq[lower_block(i, j)];
                kq = T::mma(kf[j].first(), qf[i].first(), kq);
                kq = T::mma(kf[j].second(), qf[i].second(), kq);
            }
            if (norm) {
                out.qq[i] = T::mma(qf[i].first(), qf[i].first(), out.qq[i]);
                out.qq[i] = T::mma(qf[i].second(), qf[i].second(), out.qq[i]);
            }
        }
    }
}

// Scales rows and columns of the products by 1 / |q| and 1 / |k|, whose squares stand on the diagonals.
DEVICE void normalise(Products &x, Shared &shared, Place at) {
    const int lane = arch::lane();
    for (int i = 0; i < tiles; ++i) {
        for (int r = 0; r < 4; ++r) {
            if (at.row + r == at.column) {
                shared.k_norm[16 * i + at.column] = x.kk[lower_block(i, i)][r];
                shared.q_norm[16 * i + at.column] = x.qq[i][r];
            }
        }
    }
    arch::wave_sync();
    // A row of zeros stays one whatever it is multiplied by; by 1000, its value could leave the range of 16 bits.
    const float k_square = shared.k_norm[lane];
    shared.k_norm[lane] = k_square == 0.0f ? 0.0f : arch::rsqrt(k_square + 1e-6f);
    shared.q_norm[lane] = arch::rsqrt(shared.q_norm[lane] + 1e-6f);
    arch::wave_sync();
    for (int i = 0; i < tiles; ++i) {
        for (int j = 0; j <= i; ++j) {
            x.kk[lower_block(i, j)] *= rows_at(shared.k_norm, i, at) * column_at(shared.k_norm, j, at);
            x.kq[lower_block(i, j)] *= rows_at(shared.k_norm, j, at) * column_at(shared.q_norm, i, at);
        }
    }
}

// The largest power of two that is not above a positive number, given as bits, and at most 1; 1 for zero and NaN.
DEVICE float power_of_two_below(int number) {
    const int exponent = number & 0x7f800000;
    return exponent == 0 || exponent > 0x3f800000 ? 1.0f : bits<float>(exponent);
}

// g and beta of this lane's token, for any value head. Rows past the end: no decay, nothing written.
struct Gates {
    float g;
    float beta;
};

class GateReader {
  public:
    DEVICE_MEMBER GateReader(const dw_prefill_prepare_args &x, int sequence, int64_t token, bool inside)
        : x(x), inside(inside), g_index(sequence * x.g_strides.sequence + token * x.g_strides.token),
          beta_index(sequence * x.beta_strides.sequence + token * x.beta_strides.token) {}

    DEVICE_MEMBER Gates operator()(int64_t head) const {
        Gates out{0.0f, 0.0f};
        const u32 flags = arch::opaque_uniform(x.flags);
        if (inside) {
            out.beta = 1.0f;
            if (x.beta) {
                out.beta =
                    load_scalar(x.beta, beta_index + head * x.beta_strides.head, arch::opaque_uniform(x.beta_type));
            }
            if (x.g) {
                out.g = load_scalar(x.g, g_index + head * x.g_strides.head, arch::opaque_uniform(x.g_type));
            }
            if (flags & DW_RAW_GATES) {
                const float a_log = load_scalar(x.a_log, head * x.a_log_stride, x.a_log_type);
                const float dt_bias =
                    x.dt_bias ? load_scalar(x.dt_bias, head * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
                out = Gates{gate(out.g, a_log, dt_bias), beta_of(out.beta, flags & DW_NEGATIVE_EIGENVALUES)};
            }
        }
        out.g = math::canonical(out.g);
        out.beta = math::canonical(out.beta);
        out.g = out.g < lowest_gate ? lowest_gate : out.g;
        return out;
    }

  private:
    const dw_prefill_prepare_args &x;
    const bool inside;
    const int64_t g_index;
    const int64_t beta_index;
};

// exp(rows - columns) of G (in units of log2), block (i, j); rows and columns as the tile has them.
DEVICE Tile decay(f32x4 row, float column) {
    Tile out;
    for (int r = 0; r < 4; ++r) {
        out[r] = arch::exp2(row[r] - column);
    }
    return out;
}

// The inverses of four unit lower triangular 16x16 blocks I + a[b], by forward substitution in f32. A row of 16 lanes
// has one block, a lane one column of its inverse; entries of `a` reach the others of the row by broadcast.
// Left in `x` as columns.
template <int Column> DEVICE void substitute(float (&t)[16], const float (&a)[16]) {
    if constexpr (Column < 15) {
        for (int i = Column + 1; i < 16; ++i) {
            t[i] = __builtin_fmaf(-arch::row_broadcast<Column>(a[i]), t[Column], t[i]);
        }
        substitute<Column + 1>(t, a);
    }
}

DEVICE void invert_diagonal_blocks(Exchange &x, const Tile (&a)[tiles], Place at) {
    for (int b = 0; b < tiles; ++b) {
        *(f32x4 *)(x.at + Exchange::quarter(b, at.column, at.row / 4)) = a[b];
    }
    arch::wave_sync();
    const int block = at.row / 4, column = at.column;
    float entries[16], t[16];
    for (int q = 0; q < 4; ++q) {
        const f32x4 four = *(const f32x4 *)(x.at + Exchange::quarter(block, column, q));
        for (int r = 0; r < 4; ++r) {
            entries[4 * q + r] = four[r];
            t[4 * q + r] = 4 * q + r == column ? 1.0f : 0.0f;
        }
    }
    substitute<0>(t, entries);
    arch::wave_sync();
    for (int q = 0; q < 4; ++q) {
        *(f32x4 *)(x.at + Exchange::quarter(block, column, q)) =
            f32x4{t[4 * q], t[4 * q + 1], t[4 * q + 2], t[4 * q + 3]};
    }
    arch::wave_sync();
}

// T^T for T = (I + A)^-1 of a 64x64 strictly lower A in f32: the diagonal blocks by substitution, then blocks of 16 are
// joined to 32, and of 32 to 64, by T21 = -T22 A21 T11. Kept in registers; a product x^T y of accumulator tiles needs
// no movement of data, so A is held as it is and T transposed, besides the three blocks of T that the last level reads.
DEVICE void invert(Tile (&tt)[lower_blocks], const Tile (&a)[lower_blocks], Exchange &x, Place at) {
    const Tile diagonal[tiles] = {a[lower_block(0, 0)], a[lower_block(1, 1)], a[lower_block(2, 2)],
                                  a[lower_block(3, 3)]};
    invert_diagonal_blocks(x, diagonal, at);
    Tile t00, t11, t22;
    for (int b = 0; b < tiles; ++b) {
        Tile &transposed = tt[lower_block(b, b)];
        for (int r = 0; r < 4; ++r) {
            transposed[r] = x.at[Exchange::quarter(b, at.row + r, at.column / 4) + at.column % 4];
        }
    }
    t00 = *(const f32x4 *)(x.at + Exchange::quarter(0, at.column, at.row / 4));
    t11 = *(const f32x4 *)(x.at + Exchange::quarter(1, at.column, at.row / 4));
    t22 = *(const f32x4 *)(x.at + Exchange::quarter(2, at.column, at.row / 4));
    arch::wave_sync();

    const auto product = [](Tile left_transposed, Tile right, Tile c) {
        return arch::multiply_transposed_f32(left_transposed, right, c);
    };
    // 16 -> 32: T21^T = -T11^T (A21^T T22^T).
    tt[lower_block(1, 0)] = product(t00, -product(a[lower_block(1, 0)], tt[lower_block(1, 1)], Tile{}), Tile{});
    tt[lower_block(3, 2)] = product(t22, -product(a[lower_block(3, 2)], tt[lower_block(3, 3)], Tile{}), Tile{});
    Tile identity;
    for (int r = 0; r < 4; ++r) {
        identity[r] = at.row + r == at.column ? 1.0f : 0.0f;
    }
    const Tile t10 = product(tt[lower_block(1, 0)], identity, Tile{});
    // 32 -> 64, the same with 2x2 blocks: w = A21^T T22^T, then -T11^T w.
    Tile w[2][2];
    for (int j = 0; j < 2; ++j) {
        w[j][0] = -product(a[lower_block(2, j)], tt[lower_block(2, 2)], Tile{});
        const Tile partial = product(a[lower_block(2, j)], tt[lower_block(3, 2)], Tile{});
        w[j][1] = -product(a[lower_block(3, j)], tt[lower_block(3, 3)], partial);
    }
    for (int i = 0; i < 2; ++i) {
        tt[lower_block(2 + i, 0)] = product(t10, w[1][i], product(t00, w[0][i], Tile{}));
        tt[lower_block(2 + i, 1)] = product(t11, w[1][i], Tile{});
    }
}

// Stores lower blocks, given transposed, as left operands: a transposed accumulator tile, rounded, is one.
template <class T> DEVICE void store_matrix(char *to, const Tile (&transposed)[lower_blocks]) {
    for (int b = 0; b < lower_blocks; b += 2) {
        const Operand first = rounded<T>(transposed[b]), second = rounded<T>(transposed[b + 1]);
        *(i32x4 *)(to + b / 2 * 1024 + arch::lane() * 16) = i32x4{first.x, first.y, second.x, second.y};
    }
}

// Rows of o past the last sequence become zeros: `slot` counts the slots past its chunks.
DEVICE void clear_rows(const dw_prefill_prepare_args &x, int end, int slot, int key_head) {
    const int group = x.value_heads / x.key_heads;
    const int64_t first = end + (int64_t)slot * prefill::chunk;
    for (int row = 0; row < prefill::chunk; ++row) {
        const int64_t token = first + row;
        if (token >= x.tokens) {
            return;
        }
        for (int v = 0; v < group; ++v) {
            const int head = key_head * group + v;
            short *o = (short *)x.o + token * x.o_strides.token + head * x.o_strides.head;
            for (int column = arch::lane(); column < x.value_dim; column += arch::lanes) {
                o[column] = 0;
            }
        }
    }
}

template <class T> DEVICE void prepare(const dw_prefill_prepare_args &x) {
    __attribute__((shared)) static Shared shared;
    const int slot = arch::uniform_value(arch::workgroup() / x.key_heads);
    const int key_head = arch::workgroup() - slot * x.key_heads;
    const int sequence = prefill::sequence_of_slot(x.cu_seqlens, x.sequences, slot);
    if (sequence == x.sequences) {
        const int end = prefill::token_at(x.cu_seqlens, sequence, x.tokens);
        clear_rows(x, end, max_of(slot - prefill::first_slot(end, sequence), 0), key_head);
        return;
    }
    const prefill::Rows range = prefill::rows_of(x.cu_seqlens, sequence, x.tokens);
    const int chunk = slot - prefill::first_slot(range.begin, sequence);
    if (chunk < 0 || chunk >= (range.end - range.begin + prefill::chunk - 1) / prefill::chunk) {
        return;
    }
    const int begin = range.begin + chunk * prefill::chunk;
    const int rows = min_of(range.end - begin, prefill::chunk);
    const bool norm = x.flags & DW_QK_L2NORM;
    const int lane = arch::lane();

    Products products;
    multiply_rows<T>(products, Window(prefill::row_address(x.q, x.q_strides, sequence, begin, key_head)),
                     Window(prefill::row_address(x.k, x.k_strides, sequence, begin, key_head)),
                     (u32)x.q_strides.token * 2, (u32)x.k_strides.token * 2, rows, x.key_dim, norm);
    float q_norm = 1.0f, k_norm = 1.0f, unit = 1.0f;
    if (norm) {
        normalise(products, shared, Place(lane));
        q_norm = shared.q_norm[lane];
        k_norm = shared.k_norm[lane];
        unit = power_of_two_below(arch::read_lane(arch::inclusive_max(bits<int>(k_norm)), arch::lanes - 1));
    }

    const float per_unit = bits<float>(0x7f000000 - bits<int>(unit)); // 1 / unit
    const GateReader read_gates(x, sequence, begin + lane, lane < rows);
    const int group = x.value_heads / x.key_heads;
#pragma unroll 1
    for (int v = 0; v < group; ++v) {
        // Opaque, or a pair of scalar registers holds each comparison of row and column across the whole loop.
        const Place at(arch::opaque(lane));
        const int head = x.flags & DW_TILED_HEADS ? v * x.key_heads + key_head : key_head * group + v;
        char *record = (char *)x.records + ((int64_t)slot * x.value_heads + head) * DW_RECORD_BYTES;
        float *factors = (float *)(record + prefill::record_rows);

        const Gates gates = read_gates(head);
        const float sum = arch::inclusive_sum(gates.g * math::log2e); // G / ln 2
        const float total = arch::read_lane(sum, arch::lanes - 1);
        shared.gate_sum[lane] = sum;
        shared.beta[lane] = gates.beta;
        factors[prefill::beta_row * prefill::chunk + lane] = gates.beta;
        factors[prefill::read_row * prefill::chunk + lane] = gates.beta * k_norm * arch::exp2(sum);
        factors[prefill::output_row * prefill::chunk + lane] = q_norm * arch::exp2(sum);
        factors[prefill::write_row * prefill::chunk + lane] = k_norm * per_unit * arch::exp2(total - sum);
        if (lane == 0) {
            *(f32x2 *)(record + prefill::record_decay) = f32x2{arch::exp2(total) * per_unit, unit};
        }
        arch::wave_sync();

        Tile a[lower_blocks];
        for (int i = 0; i < tiles; ++i) {
            const f32x4 beta = rows_at(shared.beta, i, at);
            const f32x4 sums = rows_at(shared.gate_sum, i, at);
            for (int j = 0; j <= i; ++j) {
                Tile &block = a[lower_block(i, j)];
                block = beta * decay(sums, column_at(shared.gate_sum, j, at)) * products.kk[lower_block(i, j)];
                if (i == j) {
                    for (int r = 0; r < 4; ++r) {
                        block[r] = at.row + r > at.column ? block[r] : 0.0f;
                    }
                }
            }
        }
        Tile transposed[lower_blocks];
        invert(transposed, a, shared.blocks, at);
        for (int b = 0; b < tiles; ++b) {
            Tile &block = transposed[lower_block(b, b)];
            for (int r = 0; r < 4; ++r) {
                block[r] = at.row + r < at.column ? block[r] : 0.0f;
            }
        }
        store_matrix<T>(record + prefill::record_t, transposed);

        for (int i = 0; i < tiles; ++i) {
            const float sum_i = column_at(shared.gate_sum, i, at);
            for (int j = 0; j <= i; ++j) {
                const Tile kq = products.kq[lower_block(i, j)];
                Tile &block = transposed[lower_block(i, j)];
                block = decay(-rows_at(shared.gate_sum, j, at), -sum_i) * kq;
                if (i == j) {
                    for (int r = 0; r < 4; ++r) {
                        if (at.row + r == at.column) {
                            factors[prefill::diagonal_row * prefill::chunk + 16 * i + at.column] = kq[r];
                        }
                        block[r] = at.row + r < at.column ? block[r] : 0.0f;
                    }
                }
            }
        }
        store_matrix<T>(record + prefill::record_p, transposed);
        arch::wave_sync();
    }
}

} // namespace

KERNEL(64, 2) void dw_prefill_prepare_bf16(dw_prefill_prepare_args x) { prepare<Bf16>(x); }
KERNEL(64, 2) void dw_prefill_prepare_f16(dw_prefill_prepare_args x) { prepare<F16>(x); }
