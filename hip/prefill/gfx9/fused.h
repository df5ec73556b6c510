// Making waves of prefill_fused on CDNA: K and Q to LDS, K^T, T, P and row factors of each chunk, one chunk ahead of the
// waves that hold the state. Each of the four has a row tile of the chunk. fused_chunks.h lists the barriers.
//
// T = (I - A)^-1 as in math/inverse.h: each wave inverts its diagonal block, then the waves share the products that join
// the blocks. Wave r has A_rr and the blocks of A left of it, but A_32 belongs to wave 0.
#pragma once

#include "../../tensor/rows.h"
#include "../phases.h"
#include "fused_memory.h"
#include "rows.h"

namespace prefill {

template <int Keys, bool Outputs> constexpr int fused_threads() { return walk_threads<Keys, Outputs>(); }
template <int Keys, bool Outputs> constexpr int fused_residency() { return walk_residency<Keys, Outputs>(); }
// Empty: the code object declares LDS.
#define FUSED_SHARED_BYTES(keys)
#define FUSED_SUMMARISE_SHARED_BYTES(keys)

// One number of each token of a (sequence, value head): g or beta, of any type. Rows past the end of a chunk read as 0.
class ScalarRows {
  public:
    DEVICE_MEMBER ScalarRows(const void *p, const dwk_token_strides &s, int type, int sequence, int begin, int head)
        : present(p), type(type), size(type == DWK_F32 ? 4 : 2), stride((u32)s.token * size),
          memory((const char *)p + size * token_offset(s, sequence, begin, head)) {}

    // Requests this lane's token of a chunk of which `rows` tokens exist, and goes on to the next chunk.
    DEVICE_MEMBER void request(int &raw, int rows) {
        if (present) {
            rows = min_of(arch::opaque_uniform(arch::uniform_value(rows)), chunk);
            memory.limit(rows > 0 ? (rows - 1) * stride + size : 0);
            raw = type == DWK_F32 ? memory.load_b32(arch::lane() * stride) : memory.load_b16(arch::lane() * stride);
            memory.advance((u64)stride * chunk);
        }
    }
    DEVICE_MEMBER float value(int raw, float absent) const { return present ? scalar_of(raw, type) : absent; }

  private:
    const bool present;
    const int type;
    const u32 size, stride;
    Window memory;
};

template <class T, int Keys> class Maker {
    static constexpr int pairs = key_pairs(Keys);

  public:
    DEVICE_MEMBER Maker(const dwk_prefill_prepare_args &x, const Segment &s, int head, int key_head)
        : shared(fused_memory<Keys>()), at(arch::lane()), row(making_row()),
          q(x.q, x.q_strides, s.sequence, s.begin, key_head, x.key_dim),
          k(x.k, x.k_strides, s.sequence, s.begin, key_head, x.key_dim),
          g(x.g, x.g_strides, x.g_type, s.sequence, s.begin, head),
          beta(x.beta, x.beta_strides, x.beta_type, s.sequence, s.begin, head), key_dim(x.key_dim),
          rest(s.end - s.begin), flags(x.flags), norm(flags & DWK_QK_L2NORM) {
        if (flags & DWK_RAW_GATES) {
            of_head = head_gates(x, head);
        }
        const int own_row = 16 * row + arch::lane() % 16, eighth = arch::eighth(arch::lane()) * 16;
        q_offset = own_row * q.stride + eighth;
        k_offset = own_row * k.stride + eighth;
    }

    DEVICE_MEMBER void run() {
        if (rest <= 0) {
            return;
        }
        q.limit_to(rest);
        k.limit_to(rest);
        request_rows();
        request_gates(rest);
        sum_gates(rest, 0);
        request_gates(rest - chunk);
        copy_rows();
        arch::workgroup_sync();
        make_blocks();
        arch::workgroup_sync();
#pragma unroll 1
        while (true) {
            join_blocks();
            arch::workgroup_sync(); // made
            rest = arch::opaque_uniform(arch::uniform_value(rest - chunk));
            if (rest <= 0) {
                return;
            }
            copy_rows();
            arch::workgroup_sync(); // copied
            make_blocks();
            arch::workgroup_sync(); // used
        }
    }

  private:
    static DEVICE_MEMBER int making_row() { return arch::opaque_uniform(arch::uniform_value(arch::wave())); }
    DEVICE_MEMBER bool reads_gates() const { return row == 1; }

    // Requests the wave's rows of K and Q.
    DEVICE_MEMBER void request_rows() {
        for (int b = 0; b < pairs; ++b) {
            const bool inside = inside_keys<Keys>(b, key_dim);
            own_k[b].data = k.memory.load_b128(inside ? k_offset + 64 * b : Window::nowhere);
            own_q[b].data = q.memory.load_b128(inside ? q_offset + 64 * b : Window::nowhere);
        }
    }
    // Requests the gates of the next chunk, of which `rows` tokens exist.
    DEVICE_MEMBER void request_gates(int rows) {
        if (reads_gates()) {
            g.request(raw_g, rows);
            beta.request(raw_beta, rows);
        }
    }
    // Sums the gates that were requested. Rows past the sequence's end get 0 and 0.
    DEVICE_MEMBER void sum_gates(int rows, int to) {
        if (reads_gates()) {
            gates = Gates{0.0f, 0.0f};
            if (arch::lane() < rows) {
                gates = Gates{g.value(raw_g, 0.0f), beta.value(raw_beta, 1.0f)};
                if (flags & DWK_RAW_GATES) {
                    gates = computed_gates(gates, of_head, flags);
                }
            }
            bound_gates(gates);
            sums.sum = arch::chunk_sum(log2_of(gates), sums.total, nullptr);
            write_factors(shared.factors[to], arch::lane(), gates, sums);
        }
    }

    // Copies the wave's rows of K and Q to LDS. Computes the diagonal blocks of K K^T and Q K^T, norms, and K^T.
    DEVICE_MEMBER void copy_rows() {
        for (int b = 0; b < pairs; ++b) {
            shared.k[row][b][arch::lane()] = own_k[b].data;
            shared.q[row][b][arch::lane()] = own_q[b].data;
        }
        kk = kq = Tile{};
        for (int b = 0; b < pairs; ++b) {
            multiply(kk, own_k[b], own_k[b]);
            multiply(kq, own_k[b], own_q[b]);
        }
        arch::products_done();
        if (norm) {
            Tile qq{};
            for (int b = 0; b < pairs; ++b) {
                multiply(qq, own_q[b], own_q[b]);
            }
            ChunkFactors &factors = shared.factors[parity];
            on_diagonal(kk, row, at, [&](int i, float square) { factors.k_norm[i] = square; });
            on_diagonal(qq, row, at, [&](int i, float square) { factors.q_norm[i] = square; });
            arch::wave_sync();
            invert_norms(factors, 16 * row + arch::lane() % 16);
            arch::wave_sync();
            normalise(kk, kq, row, row);
        }
        // Exact: a product with the identity gives each lane four rows of a column.
        Tile one;
        for (int e = 0; e < elements; ++e) {
            one[e] = at.row(e) == at.column(e) ? 1.0f : 0.0f;
        }
        const Operand identity = arch::packed<T>(one);
        for (int b = 0; b < pairs; ++b) {
            const Operand first = arch::packed<T>(T::mma(own_k[b].first(), identity, Tile{})),
                          second = arch::packed<T>(T::mma(own_k[b].second(), identity, Tile{}));
            transposed[b] = i32x4{first.x, first.y, second.x, second.y};
        }
    }
    // out += rows of x times rows of y, transposed blocks.
    static DEVICE_MEMBER void multiply(Tile &out, OperandPair x, OperandPair y) {
        out = T::mma(x.first(), y.first(), out);
        out = T::mma(x.second(), y.second(), out);
    }
    // Scales blocks (i, j) of K K^T and Q K^T by 1 / |k| and 1 / |q|.
    DEVICE_MEMBER void normalise(Tile &kk, Tile &kq, int i, int j) const {
        const ChunkFactors &factors = shared.factors[parity];
        const Tile rows = rows_at(factors.k_norm + 16 * j, at);
        kk *= rows * columns_at(factors.k_norm + 16 * i, at);
        kq *= rows * columns_at(factors.q_norm + 16 * i, at);
    }

    // Computes the wave's blocks of A and P, and the inverse of its diagonal block. Requests the next chunk.
    DEVICE_MEMBER void make_blocks() {
        const int i = left_row(), j = left_column();
        if (row == 0) {
            for (int b = 0; b < pairs; ++b) {
                own_k[b].data = shared.k[i][b][arch::lane()];
                own_q[b].data = shared.q[i][b][arch::lane()];
            }
        }
        OperandPair other[pairs];
        load_left(other, j);
        const ChunkFactors &factors = shared.factors[parity];
        // While these arrive: the diagonal block.
        const Tile decayed = chunk_decay(factors, row, row, at);
        const Tile own_a = block_of_a(decayed, columns_at(factors.beta + 16 * row, at), kk);
        own_p = rounded<T>(strictly_lower(block_of_p(decayed, kq), at));
        shared.inverses.put(row, own_a, at);
        arch::phase();
        Tile kk_left[2]{}, kq_left[2]{};
        multiply_left(kk_left[0], kq_left[0], other);
        if (row >= 2) {
            load_left(other, 1);
            multiply_left(kk_left[1], kq_left[1], other);
            arch::products_done();
        }
        arch::products_done();
        q.advance();
        k.advance();
        q.limit_to(rest - chunk);
        k.limit_to(rest - chunk);
        request_rows();
        if (norm) {
            norms.k = factors.k_norm[arch::lane()];
            norms.q = factors.q_norm[arch::lane()];
            norms.unit = power_of_two_below(arch::chunk_max(bits<int>(norms.k), nullptr));
            normalise(kk_left[0], kq_left[0], i, j);
            normalise(kk_left[1], kq_left[1], i, 1);
        }
        invert_block();
        left_block(kk_left[0], kq_left[0], i, j, 0);
        if (row >= 2) {
            left_block(kk_left[1], kq_left[1], i, 1, 1);
        }
        previous = gates;
        previous_sums = sums;
        parity ^= 1;
        sum_gates(rest - chunk, parity);
        request_gates(rest - 2 * chunk);
    }
    // (I - x)^-1 of the wave's block in LDS, as math::invert_blocks. Each row of 16 lanes computes the same.
    DEVICE_MEMBER void invert_block() {
        const int column = arch::lane() % 16;
        const auto four = [&](int quarter) __attribute__((always_inline)) -> f32x4 & {
            return *(f32x4 *)(shared.inverses.at + math::Blocks::place(row, 4 * quarter, column));
        };
        float entries[16], t[16];
        for (int q = 0; q < 4; ++q) {
            const f32x4 rows = four(q);
            for (int r = 0; r < 4; ++r) {
                entries[4 * q + r] = rows[r];
                t[4 * q + r] = arch::held(column == 4 * q + r ? 1.0f : 0.0f);
            }
        }
        substitute<15>(t, entries);
        arch::wave_sync();
        for (int q = 0; q < 4; ++q) {
            four(q) = f32x4{t[4 * q], t[4 * q + 1], t[4 * q + 2], t[4 * q + 3]};
        }
    }
    template <int Column> static DEVICE_MEMBER void substitute(float (&t)[16], const float (&a)[16]) {
        if constexpr (Column > 0) {
            if constexpr (Column == 15 || Column <= 3) {
                arch::row_operands_done();
            }
            // The next column's number first: it is an operand of all that follows.
            for (int i = Column - 1; i >= 0; --i) {
                t[i] = arch::row_multiply_add<Column>(a[i], t[Column], t[i]);
            }
            substitute<Column - 1>(t, a);
        }
    }
    // Blocks left of the diagonal that the wave has: row, and first column.
    DEVICE_MEMBER int left_row() const { return row == 0 ? tiles - 1 : row; }
    DEVICE_MEMBER int left_column() const { return row == 0 ? 2 : 0; }
    // Blocks of K K^T and Q K^T: rows of the wave's registers, and rows of another tile, from LDS.
    DEVICE_MEMBER void load_left(OperandPair (&other)[pairs], int j) const {
        for (int b = 0; b < pairs; ++b) {
            other[b].data = shared.k[j][b][arch::lane()];
        }
    }
    DEVICE_MEMBER void multiply_left(Tile &kk, Tile &kq, const OperandPair (&other)[pairs]) const {
        for (int b = 0; b < pairs; ++b) {
            multiply(kk, other[b], own_k[b]);
            multiply(kq, other[b], own_q[b]);
        }
    }
    // Block (i, j) of A and P.
    DEVICE_MEMBER void left_block(Tile kk, Tile kq, int i, int j, int which) {
        const ChunkFactors &factors = shared.factors[parity];
        const Tile decayed = chunk_decay(factors, i, j, at);
        a[which] = block_of_a(decayed, columns_at(factors.beta + 16 * i, at), kk);
        left_p[which] = rounded<T>(block_of_p(decayed, kq));
    }

    // Joins the inverses of the diagonal blocks. Writes T, P, K^T and row factors.
    DEVICE_MEMBER void join_blocks() {
        using math::multiply_transposed;
        const int lane = arch::lane();
        for (int b = 0; b < pairs; ++b) {
            shared.transposed[b][row][lane] = transposed[b];
        }
        const auto inverse = [&](int i) __attribute__((always_inline)) { return shared.inverses.get_transposed(i, at); };
        const auto transposed_inverse = [&](int i) __attribute__((always_inline)) { return shared.inverses.get(i, at); };
        const Tile own = strictly_lower(transposed_inverse(row), at);
        Tile below, first, second;
        if (row == 0) {
            below = transposed_inverse(3);
            first = multiply_transposed(multiply_transposed(a[0], inverse(2), Tile{}), below, Tile{}); // T_32^T
            shared.joined[3][lane] = first;
        } else {
            first = multiply_transposed(a[0], inverse(0), Tile{}); // A_i0 T_00
            arch::products_done();
            if (row == 1) {
                const Tile own_transposed = transposed_inverse(1);
                shared.joined[0][lane] = multiply_transposed(own_transposed, first, Tile{}); // T_10
                first = multiply_transposed(first, own_transposed, Tile{});                  // T_10^T
                below = transposed_inverse(2);
            } else {
                second = multiply_transposed(a[1], inverse(1), Tile{}); // A_i1 T_11
                shared.joined[row - 1][lane] = second;
                below = transposed_inverse(row);
            }
        }
        arch::products_done();
        arch::workgroup_sync(); // joined
        if (row == 0) {
            second = multiply_transposed(shared.joined[2][lane], below,
                                         multiply_transposed(shared.joined[1][lane], first, Tile{})); // T_31^T
        } else if (row == 1) {
            second = multiply_transposed(shared.joined[1][lane], below, Tile{}); // T_21^T
        } else {
            const Tile joined = multiply_transposed(a[1], shared.joined[0][lane], first); // A_i0 T_00 + A_i1 T_10
            arch::products_done();
            if (row == 2) {
                shared.corner[lane] = joined;
            } else {
                second = shared.joined[3][lane]; // T_32^T
            }
            first = multiply_transposed(joined, below, Tile{}); // T_20^T, part of T_30^T
        }
        arch::products_done();
        if (reads_gates()) {
            write_factors(shared.rows, lane, lane, previous, previous_sums, norms, norms.per_unit());
        }
        arch::workgroup_sync(); // corner
        if (row == 3) {
            first = multiply_transposed(shared.corner[lane], second, first); // T_30^T
        }
        arch::products_done();
        put(shared.t, lower_block(row, row), rounded<T>(own));
        put(shared.t, lower_block(left_row(), left_column()), rounded<T>(first));
        if (row < 2) {
            put(shared.t, lower_block(row == 0 ? 3 : 2, 1), rounded<T>(second));
        }
        put(shared.p, lower_block(row, row), own_p);
        put(shared.p, lower_block(left_row(), left_column()), left_p[0]);
        if (row >= 2) {
            put(shared.p, lower_block(row, 1), left_p[1]);
        }
        on_diagonal(kq, row, at, [&](int i, float product) {
            ((float *)(shared.rows + record_rows))[diagonal_row * chunk + i] = product;
        });
    }
    static DEVICE_MEMBER void put(BlockPairs &to, int block, Operand x) {
        ((Operand *)&to[block / 2][arch::lane()])[block % 2] = x;
    }

    FusedMemory<Keys> &shared;
    const LaneMap at;
    const int row;
    TokenRows q, k;
    ScalarRows g, beta;
    const int key_dim;
    u32 q_offset, k_offset;
    int rest; // tokens from the chunk on that is being made
    const u32 flags;
    const bool norm;
    HeadGates of_head{0.0f, 0.0f};
    int raw_g = 0, raw_beta = 0;
    OperandPair own_q[pairs], own_k[pairs];
    i32x4 transposed[pairs];
    Tile kk, kq, a[2];
    Operand own_p, left_p[2];
    Gates gates, previous;
    GateSums sums, previous_sums;
    int parity = 0; // of the chunk that is being made
    Norms norms{1.0f, 1.0f, 1.0f};
};

// Runs the making waves, which end here. The waves that hold the state return.
template <class T, int Keys, bool Outputs>
DEVICE void run_making_waves(const dwk_prefill_fused_args &x, const Segment &segment, const Work &work) {
    if (arch::wave() >= making_waves) {
        return;
    }
    arch::set_priority<1>(); // the waves that hold the state wait for these
    Maker<T, Keys>(x.prepare, segment, work.head, work.key_head).run();
    arch::end_wave();
}

// Runs f() in the waves that hold the state.
template <int Keys, bool Outputs, class F> DEVICE void run_fused_state_waves(const F &f) { f(); }

} // namespace prefill
