// First kernel of the backward of prefill: T, P and row factors of a chunk (prefill/recurrence.h), as prefill_prepare
// computes them. One workgroup per (chunk of 64 tokens, key head), with one thread per row; loops over the value heads.
// Writes backward records (prefill/backward/record.h).
//
// q, k [T, HK, K] bf16 or f16; g, beta [T, HV] f32 (or a, b with DWK_RAW_GATES); records [records, HV].
#include "../prefill/backward/record.h"
#include "../prefill/prepare.h"

namespace {

using namespace prefill;

// Rows of T' are rows of T divided by beta. Smaller numbers count as this one, in T and T' alone.
constexpr float least_beta = 0x1p-60f;

// Stores T', T^T and P^T from the transposed blocks of T and P.
template <class T> class BackwardWriter {
  public:
    DEVICE_MEMBER BackwardWriter(char *record, const ChunkFactors &factors)
        : record(record), factors(factors), identity(backward::identity<T>()) {}

    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const {
        const LaneMap at(arch::opaque(arch::lane()));
        const int block = lower_block(row, column);
        // T'_ij = T_ij beta_j / beta_i; both factors are negated.
        const Tile forward =
            transposed * (rows_at(factors.beta + 16 * column, at) * columns_at(factors.k_norm + 16 * row, at));
        backward::store_block(record + backward::record_forward, block, rounded<T>(forward));
        backward::store_block(record + backward::record_reverse, block,
                              backward::flipped<T>(rounded<T>(transposed), identity));
    }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        backward::store_block(record + backward::record_p, lower_block(row, column),
                              backward::flipped<T>(rounded<T>(transposed), identity));
    }

  private:
    char *const record;
    const ChunkFactors &factors;
    const Operand identity;
};

template <class T> DEVICE void prepare(const dwk_prefill_backward_args &all) {
    SHARED static Shared<T> shared;
    const dwk_prefill_prepare_args &x = all.prepare;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const int record = arch::uniform_value(arch::workgroup() / x.key_heads);
    const int key_head = arch::workgroup() - record * x.key_heads;
    const int sequence = sequence_of_record(x.cu_seqlens, x.sequences, record);
    if (sequence == x.sequences) {
        return;
    }
    const Rows range = rows_of(x.cu_seqlens, sequence, x.tokens);
    const int number = record - first_record(range.begin, sequence);
    if (number < 0 || number >= (range.end - range.begin + chunk - 1) / chunk) {
        return;
    }
    const int begin = range.begin + number * chunk, rows = min_of(range.end - begin, chunk);
    const bool norm = x.flags & DWK_QK_L2NORM;
    const int group = arch::uniform_value(x.value_heads / x.key_heads);
    const int row = arch::thread();
    // The gates of a value head are loaded during the computation of the head before.
    Gates loaded =
        GateReader(x, sequence, begin + row, row < rows).load_ahead(dispatch::value_head(x, key_head, group, 0));
    // K K^T, Q K^T, 1 / |q|, 1 / |k|                                [64, 64], [64]
    ChunkRows chunk_rows(row_address(x.q, x.q_strides, sequence, begin, key_head),
                         row_address(x.k, x.k_strides, sequence, begin, key_head), (u32)x.q_strides.token * 2,
                         (u32)x.k_strides.token * 2, rows, x.key_dim, shared.rows);
    Products<T> products;
    products.multiply(chunk_rows, x.key_dim, norm);
    const Norms norms = normalise(products, x, norm, shared);
    const float unit_of_q =
        norm ? power_of_two_below(arch::chunk_max(bits<int>(norms.q), (int *)shared.scratch)) : 1.0f;
    const ChunkSolver<T> solver(products, shared.solver);
    const float key_square = x.retained && !norm ? shared.factors.k_norm[row] : 0.0f;
#pragma unroll 1
    for (int v = 0; v < group; ++v) {
        const dwk_prefill_prepare_args &y = arch::reread(all).prepare; // saves scalar registers
        const int head = dispatch::value_head(y, key_head, group, v);
        char *const to = backward::record_of(y, record, head);
        float *const factors = (float *)to;
        const GateReader reader(y, sequence, begin + row, row < rows);
        const Gates gates = reader.gates_of(head, [&]() __attribute__((always_inline)) { return loaded; });
        if (v + 1 < group) {
            loaded = reader.load_ahead(dispatch::value_head(y, key_head, group, v + 1));
        }
        // G, and factors of the rows                                [64]
        if (y.retained) {
            shared.factors.k_norm[row] = key_square; // the value head before has written over it
        }
        const GateSums g = sum_gates(y, gates, record, head, shared);
        Gates solved = gates;
        if (math::abs(gates.beta) < least_beta) {
            solved.beta = gates.beta < 0.0f ? -least_beta : least_beta;
        }
        write_factors(shared.factors, row, solved, g);
        shared.factors.k_norm[row] = -1.0f / solved.beta; // of no other use from here on
        factors[backward::sum_row * chunk + row] = g.sum;
        factors[backward::beta_row * chunk + row] = gates.beta;
        factors[backward::k_norm_row * chunk + row] = norms.k;
        factors[backward::q_norm_row * chunk + row] = norms.q;
        factors[backward::gate_row * chunk + row] = gates.g;
        if (row == 0) {
            *(f32x4 *)(to + backward::record_numbers) = f32x4{norms.unit, unit_of_q, g.total, __builtin_ceilf(g.sum)};
        }
        arch::team_sync<prepare_waves>();
        // T = (I - A)^-1, P                                         [64, 64]
        solver.write_t_and_p(shared.factors, BackwardWriter<T>(to, shared.factors),
                             [&](int of_row, float product) __attribute__((always_inline)) {
                                 factors[backward::diagonal_row * chunk + of_row] = product;
                             });
        arch::team_sync<prepare_waves>();
    }
}

} // namespace

KERNEL(prefill::chunk, prefill::prepare_residency)
void dw_prefill_backward_prepare_bf16(dwk_prefill_backward_args x) { prepare<Bf16>(x); }
KERNEL(prefill::chunk, prefill::prepare_residency)
void dw_prefill_backward_prepare_f16(dwk_prefill_backward_args x) { prepare<F16>(x); }
