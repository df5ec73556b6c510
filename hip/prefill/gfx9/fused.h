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

template <class T, int Keys> class Maker {
    static constexpr int pairs = key_pairs(Keys);

  public:
    DEVICE_MEMBER Maker(const dwk_prefill_prepare_args &x, const Segment &s, int head, int key_head)
        : x(x), shared(fused_memory<Keys>()), at(arch::lane()), unit_column(arch::lane()), row(making_row()),
          q(x.q, x.q_strides, s.sequence, s.begin, key_head, x.key_dim),
          k(x.k, x.k_strides, s.sequence, s.begin, key_head, x.key_dim), sequence(s.sequence), head(head),
          token(s.begin + arch::lane()), rest(s.end - s.begin), norm(x.flags & DWK_QK_L2NORM) {
        const int own_row = 16 * row + arch::lane() % 16, eighth = arch::eighth(arch::lane()) * 16;
        q_offset = own_row * q.stride + eighth;
        k_offset = own_row * k.stride + eighth;
    }

    DEVICE_MEMBER void run() {
        if (rest <= 0) {
            return;
        }
        q.limit(rest);
        k.limit(rest);
        request(rest);
        sum_gates(rest);
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
    static DEVICE_MEMBER int making_row() { return arch::opaque_uniform(arch::uniform_value(arch::wave() - state_waves)); }
    DEVICE_MEMBER bool reads_gates() const { return row == 0; }

    // Requests the wave's rows of K and Q of a chunk of which `rows` tokens exist, and its gates.
    DEVICE_MEMBER void request(int rows) {
        for (int b = 0; b < pairs; ++b) {
            const bool inside = inside_keys<Keys>(b, x.key_dim);
            own_k[b].data = k.memory.load_b128(inside ? k_offset + 64 * b : Window::nowhere);
            own_q[b].data = q.memory.load_b128(inside ? q_offset + 64 * b : Window::nowhere);
        }
        if (reads_gates()) {
            gates = GateReader(x, sequence, token, arch::lane() < rows).load_ahead(head);
        }
    }
    // Sums the gates that were requested.
    DEVICE_MEMBER void sum_gates(int rows) {
        if (reads_gates()) {
            gates = GateReader(x, sequence, token, arch::lane() < rows)
                        .gates_of(head, [&]() __attribute__((always_inline)) { return gates; });
            sums.sum = arch::chunk_sum(log2_of(gates), sums.total, nullptr);
            write_factors(shared.factors, arch::lane(), gates, sums);
            token += chunk;
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
            on_diagonal(kk, row, at, [&](int i, float square) { shared.factors.k_norm[i] = square; });
            on_diagonal(qq, row, at, [&](int i, float square) { shared.factors.q_norm[i] = square; });
            arch::wave_sync();
            invert_norms(shared.factors, 16 * row + arch::lane() % 16);
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
        const Tile rows = rows_at(shared.factors.k_norm + 16 * j, at);
        kk *= rows * columns_at(shared.factors.k_norm + 16 * i, at);
        kq *= rows * columns_at(shared.factors.q_norm + 16 * i, at);
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
        left_product(i, j, a[0], left_p[0]);
        if (row >= 2) {
            left_product(i, 1, a[1], left_p[1]);
        }
        if (norm) {
            norms.k = shared.factors.k_norm[arch::lane()];
            norms.q = shared.factors.q_norm[arch::lane()];
            norms.unit = power_of_two_below(arch::chunk_max(bits<int>(norms.k), nullptr));
        }
        previous = gates;
        previous_sums = sums;
        q.advance();
        k.advance();
        q.limit(rest - chunk);
        k.limit(rest - chunk);
        request(rest - chunk);

        const Tile decayed = chunk_decay(shared.factors, row, row, at);
        const Tile own_a = block_of_a(decayed, columns_at(shared.factors.beta + 16 * row, at), kk);
        own_p = rounded<T>(strictly_lower(block_of_p(decayed, kq), at));
        shared.inverses.put(row, own_a, at);
        arch::wave_sync();
        math::invert_blocks(shared.inverses, unit_column, arch::lane() % 16, row);
    }
    // Blocks left of the diagonal that the wave has: row, and first column.
    DEVICE_MEMBER int left_row() const { return row == 0 ? tiles - 1 : row; }
    DEVICE_MEMBER int left_column() const { return row == 0 ? 2 : 0; }
    // Blocks (i, j) of A and P.
    DEVICE_MEMBER void left_product(int i, int j, Tile &block_a, Operand &block_p) const {
        Tile kk{}, kq{};
        for (int b = 0; b < pairs; ++b) {
            const OperandPair other{shared.k[j][b][arch::lane()]};
            multiply(kk, other, own_k[b]);
            multiply(kq, other, own_q[b]);
        }
        arch::products_done();
        if (norm) {
            normalise(kk, kq, i, j);
        }
        const Tile decayed = chunk_decay(shared.factors, i, j, at);
        block_a = block_of_a(decayed, columns_at(shared.factors.beta + 16 * i, at), kk);
        block_p = rounded<T>(block_of_p(decayed, kq));
    }

    // Joins the inverses of the diagonal blocks. Writes T, P, K^T and row factors. Sums the gates of the next chunk.
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
        if (reads_gates()) {
            write_factors(shared.rows, lane, lane, previous, previous_sums, norms, norms.per_unit());
        }
        sum_gates(rest - chunk);
    }
    static DEVICE_MEMBER void put(BlockPairs &to, int block, Operand x) {
        ((Operand *)&to[block / 2][arch::lane()])[block % 2] = x;
    }

    const dwk_prefill_prepare_args &x;
    FusedMemory<Keys> &shared;
    const LaneMap at;
    const math::UnitColumn unit_column;
    const int row;
    TokenRows q, k;
    u32 q_offset, k_offset;
    const int sequence, head;
    int64_t token; // of this lane, in the chunk whose gates are requested next
    int rest;      // tokens from the chunk on that is being made
    const bool norm;
    OperandPair own_q[pairs], own_k[pairs];
    i32x4 transposed[pairs];
    Tile kk, kq, a[2];
    Operand own_p, left_p[2];
    Gates gates, previous;
    GateSums sums, previous_sums;
    Norms norms{1.0f, 1.0f, 1.0f};
};

// Runs the making waves, which end here. The waves that hold the state return.
template <class T, int Keys, bool Outputs>
DEVICE void run_making_waves(const dwk_prefill_fused_args &x, const Segment &segment, const Work &work) {
    if (arch::wave() < state_waves) {
        return;
    }
    arch::set_priority<1>(); // the waves that hold the state wait for these
    Maker<T, Keys>(x.prepare, segment, work.head, work.key_head).run();
    arch::end_wave();
}

// Runs f() in the waves that hold the state.
template <int Keys, bool Outputs, class F> DEVICE void run_fused_state_waves(const F &f) { f(); }

} // namespace prefill
