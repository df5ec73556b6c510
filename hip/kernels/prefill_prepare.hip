// Prefill, first part. One workgroup of 64 threads per (chunk of 64 tokens, key head): one wave, or one that makes T
// and one that makes P. K K^T and Q K^T are computed once for all value heads of the key head. For each value head,
// with G the inclusive chunk-local sum of g and D_ij = exp(G_i - G_j):
//   A = strictly lower part of -beta_i D_ij (k_i . k_j)       f32
//   T = (I - A)^-1                                            f32, then its strictly lower part in 16 bits
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

constexpr int waves = prefill::chunk / arch::lanes;

struct Shared {
    union {
        arch::ChunkRows::Memory rows;
        struct {
            Exchange blocks;
            arch::Kept<lower_blocks>::Memory kk, kq;
        } made; // of them
    };
    float scratch[4];
    float gate_sum[prefill::chunk];
    float beta[prefill::chunk]; // times -1
    float q_norm[prefill::chunk];
    float k_norm[prefill::chunk];
};

// (K K^T)^T and (Q K^T)^T, rows j, columns i, of the lower blocks, and the diagonal blocks of Q Q^T.
struct Products {
    Tile kk[lower_blocks];
    Tile kq[lower_blocks];
    Tile qq[tiles];
};

// What this wave makes of them: Q K^T for P, the others for T. 64 columns at a time are on their way together.
template <class T, bool ForT, bool ForP>
DEVICE void multiply_rows(Products &out, arch::ChunkRows &rows, int key_dim, bool norm) {
    for (int i = 0; i < lower_blocks; ++i) {
        out.kk[i] = Tile{};
        out.kq[i] = Tile{};
    }
    for (int i = 0; i < tiles; ++i) {
        out.qq[i] = Tile{};
    }
#pragma unroll 1
    for (int column = 0; column < key_dim; column += 32 * arch::ChunkRows::pairs) {
        rows.fetch(column);
        OperandPair kf[arch::ChunkRows::pairs][tiles], qf[arch::ChunkRows::pairs][tiles];
#pragma unroll
        for (int p = 0; p < arch::ChunkRows::pairs; ++p) {
            for (int i = 0; i < tiles; ++i) {
                kf[p][i] = rows.k(i, column + 32 * p);
            }
            for (int i = 0; i < tiles; ++i) {
                qf[p][i] = ForP || norm ? rows.q(i, column + 32 * p) : OperandPair{};
            }
        }
#pragma unroll
        for (int p = 0; p < arch::ChunkRows::pairs; ++p) {
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
#pragma unroll
                for (int j = 0; j <= i; ++j) {
                    if constexpr (ForT) {
                        Tile &kk = out.kk[lower_block(i, j)];
                        kk = T::mma(kf[p][j].first(), kf[p][i].first(), kk);
                        kk = T::mma(kf[p][j].second(), kf[p][i].second(), kk);
                    }
                    if constexpr (ForP) {
                        Tile &kq = out.kq[lower_block(i, j)];
                        kq = T::mma(kf[p][j].first(), qf[p][i].first(), kq);
                        kq = T::mma(kf[p][j].second(), qf[p][i].second(), kq);
                    }
                }
                if (ForT && norm) {
                    out.qq[i] = T::mma(qf[p][i].first(), qf[p][i].first(), out.qq[i]);
                    out.qq[i] = T::mma(qf[p][i].second(), qf[p][i].second(), out.qq[i]);
                }
            }
        }
    }
}

// Scales rows and columns of the products by 1 / |q| and 1 / |k|, whose squares stand on the diagonals.
template <bool ForT, bool ForP> DEVICE void normalise(Products &x, Shared &shared, Place at) {
    const int token = arch::thread();
    for (int i = 0; i < tiles; ++i) {
        for (int e = 0; e < elements; ++e) {
            if (at.row(e) == at.column(e)) {
                if constexpr (ForT) {
                    shared.k_norm[16 * i + at.column(e)] = x.kk[lower_block(i, i)][e];
                    shared.q_norm[16 * i + at.column(e)] = x.qq[i][e];
                }
            }
        }
    }
    arch::team_sync<waves>();
    // A row of zeros stays one whatever it is multiplied by; by 1000, its value could leave the range of 16 bits.
    const float k_square = shared.k_norm[token];
    shared.k_norm[token] = k_square == 0.0f ? 0.0f : arch::rsqrt(k_square + 1e-6f);
    shared.q_norm[token] = arch::rsqrt(shared.q_norm[token] + 1e-6f);
    arch::team_sync<waves>();
    for (int i = 0; i < tiles; ++i) {
        for (int j = 0; j <= i; ++j) {
            if constexpr (ForT) {
                x.kk[lower_block(i, j)] *= rows_at(shared.k_norm + 16 * j, at) * columns_at(shared.k_norm + 16 * i, at);
            }
            if constexpr (ForP) {
                x.kq[lower_block(i, j)] *= rows_at(shared.k_norm + 16 * j, at) * columns_at(shared.q_norm + 16 * i, at);
            }
        }
    }
}

struct Nothing {};
template <bool Wanted> DEVICE auto keep(const Tile (&x)[lower_blocks], arch::Kept<lower_blocks>::Memory &memory) {
    if constexpr (Wanted) {
        return arch::Kept<lower_blocks>(x, memory);
    } else {
        return Nothing{};
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

// exp(rows - columns) of numbers in units of log2.
DEVICE Tile decay(Tile rows, ColumnFactor columns) {
    Tile out = arch::held(rows - columns);
    for (int e = 0; e < elements; ++e) {
        out[e] = arch::exp2(out[e]);
    }
    return out;
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

// Leaves the inverses of I - (block) in `x` for the four blocks there.
DEVICE void invert_diagonal_blocks(Exchange &x, const UnitColumn &unit, int lane) {
    for (int first = 0; first < tiles; first += arch::lanes / 16) {
        const int block = first + lane / 16, column = lane % 16;
        const auto four = [&](int of_column, int quarter) __attribute__((always_inline)) -> f32x4 & {
            return *(f32x4 *)(x.at + Exchange::place(block, 4 * quarter, of_column));
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
    }
    arch::wave_sync();
}

// T^T for T = (I - A)^-1 of a 64x64 strictly lower A in f32, given transposed as blocks a(i, j) = A_ij^T: the diagonal
// blocks by substitution, then blocks of 16 are joined to 32, and of 32 to 64, by T21 = T22 A21 T11. A product x^T y of
// accumulator tiles needs no movement of data, so it is T21^T = (A21 T11)^T T22^T, besides the blocks of T11 itself.
// put(i, j, tile) is called for each block of T^T as soon as it is known.
template <class A, class Put>
DEVICE void invert(const A &a, const Put &put, Exchange &x, const UnitColumn &unit, Place at, int lane) {
    for (int b = 0; b < tiles; ++b) {
        x.put(b, a(b, b), at);
    }
    arch::wave_sync();
    invert_diagonal_blocks(x, unit, lane);
    Tile diagonal[tiles];
    for (int b = 0; b < tiles; ++b) {
        diagonal[b] = x.get(b, at);
        put(b, b, diagonal[b]);
    }
    const Tile t00 = x.get_transposed(0, at), t11 = x.get_transposed(1, at), t22 = x.get_transposed(2, at);
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

// Rows of o past the last sequence become zeros: `slot` counts the slots past its chunks.
DEVICE void clear_rows(const dw_prefill_prepare_args &x, int end, int slot, int key_head) {
    const int group = x.value_heads / x.key_heads;
    const int64_t first = end + (int64_t)slot * prefill::chunk;
#pragma unroll 1
    for (int row = 0; row < prefill::chunk; ++row) {
        const int64_t token = first + row;
        if (token >= x.tokens) {
            return;
        }
        for (int v = 0; v < group; ++v) {
            const int head = key_head * group + v;
            short *o = (short *)x.o + token * x.o_strides.token + head * x.o_strides.head;
            for (int column = arch::thread(); column < x.value_dim; column += prefill::chunk) {
                o[column] = 0;
            }
        }
    }
}

// One chunk of a key head, and all value heads of it.
struct Unit {
    int slot;
    int key_head;
    int sequence;
    int begin; // its first token
    int rows;
};

// The part of one wave: T, or P, or both.
template <class T, bool ForT, bool ForP>
DEVICE void prepare_unit(const dw_prefill_prepare_args &x, const Unit &unit_of, Shared &shared) {
    const auto [slot, key_head, sequence, begin, rows] = unit_of;
    const bool norm = x.flags & DW_QK_L2NORM;
    const int lane = arch::lane(), token = arch::thread();

    Products products;
    arch::ChunkRows chunk_rows(prefill::row_address(x.q, x.q_strides, sequence, begin, key_head),
                               prefill::row_address(x.k, x.k_strides, sequence, begin, key_head),
                               (u32)x.q_strides.token * 2, (u32)x.k_strides.token * 2, rows, x.key_dim, shared.rows);
    multiply_rows<T, ForT, ForP>(products, chunk_rows, x.key_dim, norm);
    float q_norm = 1.0f, k_norm = 1.0f, unit = 1.0f;
    if (norm) {
        normalise<ForT, ForP>(products, shared, Place(lane));
        q_norm = shared.q_norm[token];
        k_norm = shared.k_norm[token];
        unit = power_of_two_below(arch::chunk_max(bits<int>(k_norm), (int *)shared.scratch));
    }
    if constexpr (waves > 1) {
        arch::team_sync<waves>(); // nobody reads the rows any more, whose place the products take
    }
    const auto kk = keep<ForT>(products.kk, shared.made.kk);
    const auto kq = keep<ForP>(products.kq, shared.made.kq);

    const float per_unit = bits<float>(0x7f000000 - bits<int>(unit)); // 1 / unit
    const GateReader read_gates(x, sequence, begin + token, token < rows);
    const int group = x.value_heads / x.key_heads;
    const UnitColumn unit_column(lane);
#pragma unroll 1
    for (int v = 0; v < group; ++v) {
        // Opaque, or a pair of scalar registers holds each comparison of row and column across the whole loop.
        const int same_lane = arch::opaque(lane);
        const Place at(same_lane), later(arch::opaque(lane));
        const int head = x.flags & DW_TILED_HEADS ? v * x.key_heads + key_head : key_head * group + v;
        char *record = (char *)x.records + ((int64_t)slot * x.value_heads + head) * DW_RECORD_BYTES;
        float *factors = (float *)(record + prefill::record_rows);
        const int place = prefill::row_place(token);

        const Gates gates = read_gates(head);
        float total;
        const float sum = arch::chunk_sum(gates.g * math::log2e, total, shared.scratch); // G / ln 2
        shared.gate_sum[token] = sum;
        shared.beta[token] = -gates.beta;
        factors[prefill::beta_row * prefill::chunk + place] = gates.beta;
        factors[prefill::read_row * prefill::chunk + place] = gates.beta * k_norm * arch::exp2(sum);
        factors[prefill::output_row * prefill::chunk + place] = q_norm * arch::exp2(sum);
        factors[prefill::write_row * prefill::chunk + place] = k_norm * per_unit * arch::exp2(total - sum);
        if (token == 0) {
            *(f32x2 *)(record + prefill::record_decay) = f32x2{arch::exp2(total) * per_unit, unit};
        }
        arch::team_sync<waves>();

        const prefill::RecordWriter<T> write(record);
        const auto decay_of = [&](int i, int j) __attribute__((always_inline)) {
            return decay(-rows_at(shared.gate_sum + 16 * j, at), -columns_at(shared.gate_sum + 16 * i, at));
        };
        const auto block_of_a = [&](const auto &kk, int i, int j, Tile decayed) __attribute__((always_inline)) {
            return decayed * (columns_at(shared.beta + 16 * i, at) * kk.get(lower_block(i, j)));
        };
        const auto put_p = [&](const auto &kq, int i, int j, Tile decayed) __attribute__((always_inline)) {
            const Tile product = kq.get(lower_block(i, j));
            Tile out = decayed * product;
            if (i == j) {
                for (int e = 0; e < elements; ++e) {
                    if (at.row(e) == at.column(e)) {
                        factors[prefill::diagonal_row * prefill::chunk + prefill::row_place(16 * i + at.column(e))] =
                            product[e];
                    }
                    out[e] = at.row(e) < at.column(e) ? out[e] : 0.0f;
                }
            }
            write.put_p(i, j, out);
        };
        const auto put_t = [&](int i, int j, Tile transposed) __attribute__((always_inline)) {
            if (i == j) {
                for (int e = 0; e < elements; ++e) {
                    transposed[e] = later.row(e) < later.column(e) ? transposed[e] : 0.0f;
                }
            }
            write.put_t(i, j, transposed);
        };
        if constexpr (waves == 1) {
            // Registers hold all blocks of A, and a decay is computed once for both.
            Tile blocks[lower_blocks];
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
#pragma unroll
                for (int j = 0; j <= i; ++j) {
                    const Tile decayed = decay_of(i, j);
                    blocks[lower_block(i, j)] = block_of_a(kk, i, j, decayed);
                    put_p(kq, i, j, decayed);
                }
            }
            const auto held = [&](int i, int j) __attribute__((always_inline)) { return blocks[lower_block(i, j)]; };
            invert(held, put_t, shared.made.blocks, unit_column, later, same_lane);
        } else if constexpr (ForT) {
            const auto made = [&](int i, int j)
                                  __attribute__((always_inline)) { return block_of_a(kk, i, j, decay_of(i, j)); };
            invert(made, put_t, shared.made.blocks, UnitColumn(same_lane), at, same_lane);
        } else {
#pragma unroll
            for (int i = 0; i < tiles; ++i) {
#pragma unroll
                for (int j = 0; j <= i; ++j) {
                    put_p(kq, i, j, decay_of(i, j));
                }
            }
        }
        arch::team_sync<waves>();
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
    const Unit unit{slot, key_head, sequence, begin, min_of(range.end - begin, prefill::chunk)};
    if constexpr (waves == 1) {
        prepare_unit<T, true, true>(x, unit, shared);
    } else if (arch::wave() == 0) {
        prepare_unit<T, true, false>(x, unit, shared);
    } else {
        prepare_unit<T, false, true>(x, unit, shared);
    }
}

} // namespace

KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_bf16(dw_prefill_prepare_args x) {
    prepare<Bf16>(x);
}
KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_f16(dw_prefill_prepare_args x) {
    prepare<F16>(x);
}
