// Making waves of prefill_fused on CDNA: K and Q to LDS, K^T, T, P and row factors of each chunk, one chunk ahead of
// the waves that hold the state. Each of the four has a row tile of the chunk. fused_chunks.h lists the barriers.
//
// T = (I - A)^-1 as in math/inverse.h: wave 0 inverts the diagonal blocks and sums the gates; waves 1 to 3 make two
// more blocks of A and P each: (1, 0) and (3, 2), (2, 0) and (2, 1), (3, 0) and (3, 1). Then all share the products
// that join the inverses.
#pragma once

#include "../fused_mode.h"

#include "../segment.h"
#include "../../tensor/rows.h"
#include "../prepare.h"
#include "fused_memory.h"
#include "rows.h"
#include "units.h"

namespace prefill {

template <int Keys, bool Outputs> constexpr int fused_threads() { return walk_threads<Keys, Outputs>(); }
constexpr int making_threads = making_waves * arch::lanes;
constexpr bool may_prepare = true;
// For the choice by gates: 64 numbers a wave.
template <int Keys> DEVICE float *choice_memory() { return (float *)&fused_memory<Keys>(); }
template <int Keys, bool Outputs> constexpr int fused_residency() { return walk_residency<Keys, Outputs>(); }
// Empty: the code object declares LDS.
#define FUSED_SHARED_BYTES(keys)
#define FUSED_SUMMARISE_SHARED_BYTES(keys)

// One number of each token of a (sequence, value head), g or beta, of any type: this lane's token of each chunk.
class ScalarRows {
  public:
    DEVICE_MEMBER ScalarRows(const void *p, const dwk_token_strides &s, int type, int sequence, int begin, int head)
        : kind(p ? type : absent), step((u32)s.token * size() * chunk),
          address((const char *)p + size() * token_offset(s, sequence, begin + arch::lane(), head)) {}

    // Requests the token of the next chunk, if it is `inside` the sequence.
    DEVICE_MEMBER void request(int &raw, bool inside) {
        if (kind != absent && inside) {
            raw = kind == DWK_F32 ? *(const int *)address : *(const unsigned short *)address;
        }
        address += step;
    }
    DEVICE_MEMBER float value(int raw, float otherwise) const {
        return kind == absent ? otherwise : scalar_of(raw, kind);
    }

  private:
    static constexpr int absent = -1;
    DEVICE_MEMBER u32 size() const { return kind == DWK_F32 ? 4 : 2; }
    const int kind; // type, or absent
    const u32 step;
    const char *address;
};

// Gates of this lane's token, and A_log and dt_bias of its value head, as bits in memory. Types and addresses are
// derived again each time: they are not worth registers.
class UnitGates {
  public:
    // Requests those of a token. It exists if it is `inside`.
    DEVICE_MEMBER void request(const dwk_prefill_prepare_args &x, int sequence, int token, int head, bool inside) {
        request(g, x.g, inside ? token_offset(x.g_strides, sequence, token, head) : 0, x.g_type);
        request(beta, x.beta, inside ? token_offset(x.beta_strides, sequence, token, head) : 0, x.beta_type);
        if (x.flags & DWK_RAW_GATES) {
            request(a_log, x.a_log, head * x.a_log_stride, x.a_log_type);
            request(dt_bias, x.dt_bias, head * x.dt_bias_stride, x.dt_bias_type);
        }
    }
    DEVICE_MEMBER Gates gates(const dwk_prefill_prepare_args &x) const {
        return Gates{value(g, x.g, x.g_type, 0.0f), value(beta, x.beta, x.beta_type, 1.0f)};
    }
    DEVICE_MEMBER HeadGates of_head(const dwk_prefill_prepare_args &x) const {
        return HeadGates{value(a_log, x.a_log, x.a_log_type, 0.0f), value(dt_bias, x.dt_bias, x.dt_bias_type, 0.0f)};
    }

  private:
    static DEVICE_MEMBER void request(int &raw, const void *p, int64_t index, int type) {
        if (p) {
            raw = type == DWK_F32 ? ((const int *)p)[index] : ((const unsigned short *)p)[index];
        }
    }
    static DEVICE_MEMBER float value(int raw, const void *p, int type, float otherwise) {
        return p ? scalar_of(raw, type) : otherwise;
    }
    int g = 0, beta = 0, a_log = 0, dt_bias = 0;
};

// Priority of the waves that hold the state, and of the making waves. One of each shares a SIMD. Between two barriers
// both should end at about the same time, so making waves begin patiently and become urgent on the way.
constexpr int state_priority = 1, patient = 0, urgent = 2;

// `Units`: the workgroup walks several units of work (units.h).
template <class T, int Keys, bool Outputs, bool Units = false> class Maker {
    static constexpr int pairs = key_pairs(Keys);

  public:
    DEVICE_MEMBER Maker(const dwk_prefill_fused_args &args, const Segment &s, int head, int key_head)
        : Maker(args, args.prepare, s, head, key_head) {}
    DEVICE_MEMBER Maker(const dwk_prefill_fused_args &args, const dwk_prefill_prepare_args &x, const Segment &s,
                        int head, int key_head)
        : shared(fused_memory<Keys>()), row(making_row()),
          q(x.q, x.q_strides, s.sequence, s.begin, key_head, x.key_dim),
          k(x.k, x.k_strides, s.sequence, s.begin, key_head, x.key_dim),
          g(x.g, x.g_strides, x.g_type, s.sequence, s.begin, head),
          beta(x.beta, x.beta_strides, x.beta_type, s.sequence, s.begin, head), key_dim(x.key_dim),
          rest(s.end - s.begin), flags(x.flags), args(args) {
        if (!Units && reads_gates() && x.flags & DWK_RAW_GATES) {
            of_head = head_gates(x, head);
            of_head = HeadGates{arch::held(of_head.a_log), arch::held(of_head.dt_bias)};
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
        copy_rows();
        arch::workgroup_sync(); // copied
        request_gates(rest - chunk);
        make_blocks();
        arch::workgroup_sync(); // used
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

    // Makes the chunks of all units of the workgroup, as if they were those of one. Rows and gates are requested a
    // chunk ahead, also across units.
    DEVICE_MEMBER void run_units() {
        const UnitPlace first = found_unit(arch::workgroup());
        take_unit(first);
        q.limit_to(rest);
        k.limit_to(rest);
        request_rows();
        if (row == finding_row) {
            shared.units[0] = first;
            shared.units_found = 1;
            arch::wave_sync();
            find_next_unit();
        }
        arch::workgroup_sync(); // the first two units are known
        if (rest <= 0) {
            return;
        }
        request_gates(rest);
#pragma unroll 1
        while (true) {
            copy_rows();
            sum_gates(rest, parity);
            arch::workgroup_sync(); // copied
            make_blocks();
            arch::workgroup_sync(); // used
            join_blocks();
            arch::workgroup_sync(); // made
            if (rest <= 0) {
                return;
            }
        }
    }

  private:
    static DEVICE_MEMBER int making_row() { return arch::opaque_uniform(arch::uniform_value(arch::wave())); }
    // Opaque: otherwise each comparison of row and column occupies two scalar registers during the loop over chunks.
    static DEVICE_MEMBER LaneMap lane_map() { return LaneMap(arch::opaque(arch::lane())); }
    DEVICE_MEMBER bool reads_gates() const { return arch::opaque_uniform(row) == 0; }

    // Finds the first unit with chunks from number `from` on.
    DEVICE_MEMBER UnitPlace found_unit(int from) const {
        const dwk_prefill_fused_args &y = arch::reread(args);
        UnitPlace place{};
        each_unit(y, from, [&](int unit, const Work &work, const Segment &segment) __attribute__((always_inline)) {
            if (!has_chunks(y.scan, segment)) {
                return false;
            }
            place = UnitPlace{segment.sequence, segment.begin, segment.end, work.head, work.key_head, unit, {}};
            return true;
        });
        return place;
    }
    // Finds one unit more. After the last one it may find an earlier one again, which nobody takes.
    DEVICE_MEMBER void find_next_unit() {
        const int found = arch::uniform_value(shared.units_found);
        const int unit = arch::uniform_value(shared.units[(found - 1) % units_ahead].unit);
        shared.units[found % units_ahead] = found_unit(unit + arch::reread(args).walkers);
        shared.units_found = found + 1;
    }
    // Moves to a unit. `rest`: its tokens.
    DEVICE_MEMBER void take_unit(const UnitPlace &place) {
        const dwk_prefill_prepare_args &x = arch::reread(args).prepare;
        const int sequence = arch::uniform_value(place.sequence), begin = arch::uniform_value(place.begin),
                  key_head = arch::uniform_value(place.key_head);
        rest = arch::uniform_value(place.end) - begin;
        ++taken;
        q.move_to(x.q, x.q_strides, sequence, begin, key_head);
        k.move_to(x.k, x.k_strides, sequence, begin, key_head);
    }
    // Requests the wave's rows of K and Q.
    DEVICE_MEMBER void request_rows() {
        for (int b = 0; b < pairs; ++b) {
            const bool inside = inside_keys<Keys>(b, key_dim);
            own_k[b].data = k.memory.load_b128(inside ? k_offset + 64 * b : Window::nowhere);
            if constexpr (Outputs) {
                own_q[b].data = q.memory.load_b128(inside ? q_offset + 64 * b : Window::nowhere);
            }
        }
    }
    // Requests the gates of the next chunk, of which `rows` tokens exist.
    DEVICE_MEMBER void request_gates(int rows) {
        if (reads_gates()) {
            const bool inside = arch::lane() < rows;
            if constexpr (Units) {
                if (rows > 0) {
                    const UnitPlace &place = shared.units[(taken - 1) % units_ahead];
                    const int sequence = arch::uniform_value(place.sequence), end = arch::uniform_value(place.end),
                              head = arch::uniform_value(place.head);
                    unit_gates.request(arch::reread(args).prepare, sequence, end - rows + arch::lane(), head, inside);
                }
                return;
            }
            g.request(raw_g, inside);
            beta.request(raw_beta, inside);
        }
    }
    // Sums the gates that were requested. Rows past the sequence's end get 0 and 0.
    DEVICE_MEMBER void sum_gates(int rows, int to) {
        if (reads_gates()) {
            const u32 flags = arch::opaque_uniform(this->flags);
            gates = Gates{0.0f, 0.0f};
            if (arch::lane() < rows) {
                if constexpr (Units) {
                    gates = unit_gates.gates(arch::reread(args).prepare);
                    of_head = unit_gates.of_head(arch::reread(args).prepare);
                } else {
                    gates = Gates{g.value(raw_g, 0.0f), beta.value(raw_beta, 1.0f)};
                }
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
        const LaneMap at(arch::lane());
        for (int b = 0; b < pairs; ++b) {
            shared.k[row][b][arch::lane()] = own_k[b].data;
            if constexpr (Outputs) {
                shared.q[row][b][arch::lane()] = own_q[b].data;
            }
        }
        kk = kq = Tile{};
        for (int b = 0; b < pairs; ++b) {
            multiply(kk, own_k[b], own_k[b]);
            if constexpr (Outputs) {
                multiply(kq, own_k[b], own_q[b]);
            }
        }
        arch::products_done();
        if (arch::opaque_uniform(flags) & DWK_QK_L2NORM) {
            Tile qq{};
            for (int b = 0; b < pairs && Outputs; ++b) {
                multiply(qq, own_q[b], own_q[b]);
            }
            ChunkFactors &factors = shared.factors[parity];
            on_diagonal(kk, row, lane_map(), [&](int i, float square) { factors.k_norm[i] = square; });
            on_diagonal(qq, row, lane_map(), [&](int i, float square) { factors.q_norm[i] = square; });
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
        const LaneMap at(arch::lane());
        const ChunkFactors &factors = shared.factors[parity];
        const Tile rows = rows_at(factors.k_norm + 16 * j, at);
        kk *= rows * columns_at(factors.k_norm + 16 * i, at);
        kq *= rows * columns_at(factors.q_norm + 16 * i, at);
    }

    // Computes the wave's blocks of A and P, and the inverses of the diagonal blocks. Requests the next chunk.
    DEVICE_MEMBER void make_blocks() {
        const int row = arch::opaque_uniform(this->row); // no conditions of it live across phases
        const LaneMap at(arch::lane());
        const ChunkFactors &factors = shared.factors[parity];
        OperandPair other[pairs];
        load_left(other, 0);
        arch::set_priority<patient>();
        // While these arrive: the diagonal block.
        const Tile decayed = chunk_decay(factors, row, row, at);
        const Tile own_a = block_of_a(decayed, columns_at(factors.beta + 16 * row, at), kk);
        arch::set_priority<urgent>();
        own_p = rounded<T>(strictly_lower(block_of_p(decayed, kq), lane_map()));
        shared.inverses.put(row, own_a, at);
        arch::workgroup_sync(); // diagonal
        arch::set_priority<patient>();
        if (row == 0) {
            next_rows();
            invert_blocks();
            previous = gates;
            previous_sums = sums;
            if (arch::opaque_uniform(flags) & DWK_QK_L2NORM) {
                norms.k = factors.k_norm[arch::lane()];
                norms.q = factors.q_norm[arch::lane()];
                norms.unit = power_of_two_below(arch::chunk_max(bits<int>(norms.k), nullptr));
            }
            if constexpr (Units) {
                request_gates(rest);
            } else {
                sum_gates(rest - chunk, parity ^ 1);
                request_gates(rest - 2 * chunk);
            }
        } else {
            Tile kk_left[2]{}, kq_left[2]{};
            multiply_left(kk_left[0], kq_left[0], other);
            load_left(other, second_column());
            if (row == 1) {
                for (int b = 0; b < pairs; ++b) {
                    own_k[b].data = shared.k[second_row()][b][arch::lane()];
                    if constexpr (Outputs) {
                        own_q[b].data = shared.q[second_row()][b][arch::lane()];
                    }
                }
                arch::products_done();
            }
            arch::phase();
            arch::set_priority<urgent>();
            multiply_left(kk_left[1], kq_left[1], other);
            arch::products_done();
            next_rows();
            if (arch::opaque_uniform(flags) & DWK_QK_L2NORM) {
                normalise(kk_left[0], kq_left[0], row, 0);
                normalise(kk_left[1], kq_left[1], second_row(), second_column());
            }
            left_block(kk_left[0], kq_left[0], row, 0, 0);
            left_block(kk_left[1], kq_left[1], second_row(), second_column(), 1);
            if (row == 1) {
                shared.corner[arch::lane()] = a[1]; // A_32 for wave 0
            }
        }
        arch::set_priority<urgent>();
        parity ^= 1;
    }
    // The second of the wave's blocks left of the diagonal. The first is (row, 0).
    DEVICE_MEMBER int second_row() const { return row == 1 ? 3 : row; }
    DEVICE_MEMBER int second_column() const { return row == 1 ? 2 : 1; }
    // Requests the wave's rows of K and Q of the next chunk. With Units `rest` is then of that chunk.
    DEVICE_MEMBER void next_rows() {
        if constexpr (Units) {
            rest = arch::opaque_uniform(arch::uniform_value(rest - chunk));
            firsts <<= 1;
            if (rest > 0) {
                q.advance();
                k.advance();
            } else {
                take_unit(shared.units[taken % units_ahead]);
                firsts |= 1;
            }
            q.limit_to(rest);
            k.limit_to(rest);
            request_rows();
            return;
        }
        q.advance();
        k.advance();
        q.limit_to(rest - chunk);
        k.limit_to(rest - chunk);
        request_rows();
    }
    // (I - x)^-1 of the blocks in LDS, as math::invert_blocks: one for each row of 16 lanes.
    DEVICE_MEMBER void invert_blocks() {
        const int block = arch::lane() / 16, column = arch::lane() % 16, same_column = arch::opaque(column);
        const auto four = [&](int quarter) __attribute__((always_inline)) -> f32x4 & {
            return *(f32x4 *)(shared.inverses.at + math::Blocks::place(block, 4 * quarter, column));
        };
        float entries[16], t[16];
        for (int q = 0; q < 4; ++q) {
            const f32x4 rows = four(q);
            for (int r = 0; r < 4; ++r) {
                entries[4 * q + r] = rows[r];
                t[4 * q + r] = arch::held(same_column == 4 * q + r ? 1.0f : 0.0f);
            }
        }
        substitute<15>(t, entries);
        arch::wave_sync();
        for (int q = 0; q < 4; ++q) {
            four(q) = f32x4{t[4 * q], t[4 * q + 1], t[4 * q + 2], t[4 * q + 3]};
        }
    }
    static constexpr int urgent_from = 12; // modelled: 15, 11 and 10 are slower
    template <int Column> static DEVICE_MEMBER void substitute(float (&t)[16], const float (&a)[16]) {
        if constexpr (Column > 0) {
            if constexpr (Column == urgent_from) {
                arch::set_priority<urgent>();
            }
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
    // Blocks of K K^T and Q K^T: rows of the wave's registers, and rows of another tile, from LDS.
    DEVICE_MEMBER void load_left(OperandPair (&other)[pairs], int j) const {
        for (int b = 0; b < pairs; ++b) {
            other[b].data = shared.k[j][b][arch::lane()];
        }
    }
    DEVICE_MEMBER void multiply_left(Tile &kk, Tile &kq, const OperandPair (&other)[pairs]) const {
        for (int b = 0; b < pairs; ++b) {
            multiply(kk, other[b], own_k[b]);
            if constexpr (Outputs) {
                multiply(kq, other[b], own_q[b]);
            }
        }
    }
    // Block (i, j) of A and P.
    DEVICE_MEMBER void left_block(Tile kk, Tile kq, int i, int j, int which) {
        const LaneMap at(arch::lane());
        const ChunkFactors &factors = shared.factors[parity];
        const Tile decayed = chunk_decay(factors, i, j, at);
        a[which] = block_of_a(decayed, columns_at(factors.beta + 16 * i, at), kk);
        left_p[which] = rounded<T>(block_of_p(decayed, kq));
    }

    // Joins the inverses of the diagonal blocks. Writes T, P, K^T and row factors.
    DEVICE_MEMBER void join_blocks() {
        arch::set_priority<patient>();
        const int row = arch::opaque_uniform(this->row); // no conditions of it live across phases
        const LaneMap at(arch::lane());
        using math::multiply_transposed;
        const int lane = arch::lane();
        for (int b = 0; b < pairs; ++b) {
            shared.transposed[b][row][lane] = transposed[b];
        }
        const auto inverse = [&](int i)
                                 __attribute__((always_inline)) { return shared.inverses.get_transposed(i, at); };
        const auto transposed_inverse = [&](int i)
                                            __attribute__((always_inline)) { return shared.inverses.get(i, at); };
        const Tile own = strictly_lower(transposed_inverse(row), lane_map());
        Tile below, first, second;
        if (row == 0) {
            below = transposed_inverse(3);
            const Tile a_32 = shared.corner[lane];
            const Tile half = multiply_transposed(a_32, inverse(2), Tile{});
            arch::phase();
            arch::set_priority<urgent>();
            first = multiply_transposed(half, below, Tile{}); // T_32^T
            shared.joined[3][lane] = first;
            write_factors(shared.rows, lane, lane, previous, previous_sums, norms, norms.per_unit());
        } else {
            first = multiply_transposed(a[0], inverse(0), Tile{}); // A_i0 T_00
            arch::products_done();
            arch::set_priority<urgent>();
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
        if constexpr (Units) {
            // Here these waves wait longest: those that hold the state store the last one.
            if (row == finding_row && firsts & 2) {
                find_next_unit();
            }
        }
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
        put(shared.t, row == 0 ? lower_block(3, 2) : lower_block(row, 0), rounded<T>(first));
        if (row < 2) {
            put(shared.t, row == 0 ? lower_block(3, 1) : lower_block(2, 1), rounded<T>(second));
        }
        if constexpr (Outputs) {
            put(shared.p, lower_block(row, row), own_p);
            if (row > 0) {
                put(shared.p, lower_block(row, 0), left_p[0]);
                put(shared.p, lower_block(second_row(), second_column()), left_p[1]);
            }
            on_diagonal(kq, row, lane_map(), [&](int i, float product) {
                ((float *)(shared.rows + record_rows))[diagonal_row * chunk + i] = product;
            });
        }
    }
    static DEVICE_MEMBER void put(BlockPairs &to, int block, Operand x) {
        ((Operand *)&to[block / 2][arch::lane()])[block % 2] = x;
    }

    FusedMemory<Keys> &shared;
    const int row;
    TokenRows q, k;
    ScalarRows g, beta;
    const int key_dim;
    u32 q_offset, k_offset;
    int rest;        // tokens from the chunk on that is being made
    const int flags; // as opaque numbers: conditions would occupy two scalar registers each
    HeadGates of_head{0.0f, 0.0f};
    // With Units:
    const dwk_prefill_fused_args &args; // read through arch::reread, so that no registers hold fields
    int taken = 0;                      // units whose rows were requested
    u32 firsts = 1;                     // bit 0: whether the rows are a unit's first chunk; bit 1: those before
    UnitGates unit_gates;
    static constexpr int finding_row = 2;
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
    arch::set_priority<urgent>();
    Maker<T, Keys, Outputs>(x, segment, work.head, work.key_head).run();
    arch::end_wave();
}

constexpr bool fused_walks_units = true;
// Walks several units of work in a workgroup (units.h), and ends all its waves.
template <class T, int Keys> DEVICE void walk_fused_units(const dwk_prefill_fused_args &y) {
    if (arch::wave() < making_waves) {
        arch::set_priority<urgent>();
        Maker<T, Keys, true, true>(y, Segment{}, 0, 0).run_units();
        arch::end_wave();
    }
    // Results of units without chunks, while the first chunk is made.
    each_unit(y, arch::workgroup(), [&](int, const Work &work, const Segment &segment) __attribute__((always_inline)) {
        if (!has_chunks(y.scan, segment)) {
            finish_without_chunks<Keys>(arch::reread(y).scan, segment, work);
        }
        return false;
    });
    arch::workgroup_sync(); // the first two units are known
    arch::set_priority<state_priority>();
    walk_units_columns<T, Keys>(arch::reread(y).scan);
    arch::end_wave();
}

// Prepares chunks, one at a time in each wave that has memory for it. The first waves of all workgroups come before the
// second ones, so that few chunks are spread over all SIMDs.
template <class T, int Keys> DEVICE void prepare_instead(const dwk_prefill_fused_args &x) {
    constexpr int waves = fused_threads<Keys, true>() / arch::lanes;
    constexpr int room = sizeof(FusedMemory<Keys>) / sizeof(Shared<T>), teams = room < waves ? room : waves;
    const int wave = arch::uniform_value(arch::wave());
    if (wave >= teams || arch::workgroup() >= x.preparing_groups) {
        return;
    }
    int next = arch::opaque(wave * x.preparing_groups + arch::workgroup());
#pragma unroll 1
    while (true) {
        // Read again, and `next` in a vector register, because few scalar registers are left.
        const dwk_prefill_fused_args &y = arch::reread(x);
        const int index = arch::uniform_value(next);
        if (index >= units(y.prepare)) {
            return;
        }
        prepare_unit<T>(y.prepare, index, ((Shared<T> *)&fused_memory<Keys>())[arch::uniform_value(arch::wave())]);
        next += teams * arch::reread(x).preparing_groups;
    }
}

// Runs f() in the waves that hold the state.
template <int Keys, bool Outputs, class F> DEVICE void run_fused_state_waves(const F &f) {
    arch::set_priority<state_priority>();
    f();
}

} // namespace prefill
