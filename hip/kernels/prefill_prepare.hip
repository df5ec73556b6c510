// Prefill, first part: the matrices and factors of a chunk, independent of the state (prefill/recurrence.h). One
// workgroup of 64 threads, a row of the chunk each, per (chunk of 64 tokens, key head, part of its value heads). K K^T
// and Q K^T are computed once for all value heads of the part. For each, with G the inclusive sum of g in the chunk and
// D_ij = exp(G_i - G_j):
//   A = strictly lower part of -beta_i D_ij (k_i . k_j)       [64, 64] f32
//   T = (I - A)^-1                                            [64, 64] f32; its strictly lower part in 16 bits
//   P = strictly lower part of D_ij (q_i . k_j)               [64, 64] 16 bits
// and the row factors that prefill_scan multiplies by (prefill/record.h). With DWK_QK_L2NORM the norms of q and k are
// factors of rows and columns of these, so that neither q nor k is ever rounded again.
//
// q, k [T, HK, K] bf16 or f16; g, beta [T, HV] f32 (or a, b with DWK_RAW_GATES); records [records, HV].
#include "../prefill/gates.h"
#include "../prefill/matrices.h"
#include "../tensor/rows.h"

namespace {

using namespace prefill;

constexpr int waves = chunk / arch::lanes;

template <class T> struct Shared {
    union {
        ChunkRows::Memory rows;
        typename ChunkSolver<T>::Memory solver; // in their place
    };
    float scratch[4];
    ChunkFactors factors;
    GateLoader::Memory gates;
};

// The unit of the state update, and 1 / |k| and 1 / |q| of this thread's row, or 1.
struct Norms {
    float unit, k, q;
};

// Divides the products by the norms of q and k, where asked for. Leaves |k|^2 in factors.k_norm where bounds need it.
template <class T>
DEVICE Norms normalise(Products<T> &products, const dwk_prefill_prepare_args &x, bool norm, Shared<T> &shared) {
    Norms out{1.0f, 1.0f, 1.0f};
    if (norm) {
        products.normalise(shared.factors);
        out.q = shared.factors.q_norm[arch::thread()];
        out.k = shared.factors.k_norm[arch::thread()];
        out.unit = power_of_two_below(arch::chunk_max(bits<int>(out.k), (int *)shared.scratch));
    }
    if (x.retained && !norm) {
        products.key_squares(shared.factors);
        arch::team_sync<waves>();
    }
    return out;
}

// G_i / ln 2 of this thread's row i, and G_C / ln 2.
struct GateSums {
    float sum, total;
};

// Sums the gates of the chunk and, with `retained`, writes log2 of a bound on how much the chunk scales the norm of any
// state: exp(G_C) max_i growth_i^C.
template <class T>
DEVICE GateSums sum_gates(const dwk_prefill_prepare_args &y, Gates gates, int record, int head, Shared<T> &shared) {
    GateSums out;
    // Opaque: else it is fused into the sum, with bounds in other ways than without.
    const float log2_gate = bits<float>(arch::opaque(bits<int>(gates.g * math::log2e)));
    if (y.retained) {
        const float key_square = y.flags & DWK_QK_L2NORM ? 1.0f : shared.factors.k_norm[arch::thread()];
        int greatest;
        out.sum =
            arch::chunk_sum(log2_gate, out.total, bits<int>(growth(gates.beta, key_square)), greatest, shared.scratch);
        float bound = out.total;
        if (greatest != bits<int>(1.0f)) {
            bound += chunk * math::log2e * arch::log(bits<float>(greatest));
        }
        if (arch::thread() == 0) {
            *retained_by(y, record, head) = bound;
        }
    } else {
        out.sum = arch::chunk_sum(log2_gate, out.total, shared.scratch);
    }
    return out;
}

// The factors of this thread's row: to shared memory for A and P, and to the record for the walk.
template <class T>
DEVICE void write_factors(char *record, int place, Gates gates, GateSums g, Norms norms, float per_unit,
                          Shared<T> &shared) {
    const int row = arch::thread();
    shared.factors.gate_sum[row] = g.sum;
    shared.factors.beta[row] = -gates.beta;
    float *const factors = (float *)(record + record_rows);
    factors[beta_row * chunk + place] = gates.beta;
    factors[read_row * chunk + place] = read_factor(gates.beta, norms.k, g.sum);
    factors[output_row * chunk + place] = output_factor(norms.q, g.sum);
    factors[write_row * chunk + place] = write_factor(norms.k, per_unit, g.total, g.sum);
    if (row == 0) {
        *(f32x2 *)(record + record_decay) = f32x2{arch::exp2(g.total) * per_unit, norms.unit};
    }
}

// One chunk of a key head, for a run of its value heads.
template <class T> DEVICE void prepare_chunk(const dwk_prefill_prepare_args &x, const Unit &unit, Shared<T> &shared) {
    const bool norm = x.flags & DWK_QK_L2NORM;
    const int group = arch::uniform_value(x.value_heads / x.key_heads);
    const int row = arch::thread();
    ChunkRows rows(row_address(x.q, x.q_strides, unit.sequence, unit.begin, unit.key_head),
                   row_address(x.k, x.k_strides, unit.sequence, unit.begin, unit.key_head), (u32)x.q_strides.token * 2,
                   (u32)x.k_strides.token * 2, unit.rows, x.key_dim, shared.rows);
    GateLoader gates_of_heads(unit, group, shared.gates);
    gates_of_heads.request_first(x);
    // K K^T, Q K^T                                                  [64, 64]
    Products<T> products;
    products.multiply(rows, x.key_dim, norm);
    gates_of_heads.keep_first();
    const Norms norms = normalise(products, x, norm, shared);
    const float per_unit = bits<float>(0x7f000000 - bits<int>(norms.unit)); // 1 / unit
    const ChunkSolver<T> solver(products, shared.solver);
#pragma unroll 1
    for (int v = unit.first_head; v < unit.end_head; ++v) {
        const dwk_prefill_prepare_args &y = arch::reread(x); // scalar registers are short
        const int head = dispatch::value_head(y, unit.key_head, group, v);
        char *record = (char *)y.records + ((int64_t)unit.record * y.value_heads + head) * DWK_RECORD_BYTES;
        const int place = row_place(row);
        const Gates gates = gates_of_heads.of(y, v, head);
        const GateSums g = sum_gates(y, gates, unit.record, head, shared);
        write_factors(record, place, gates, g, norms, per_unit, shared);
        gates_of_heads.request_next(y, v);
        arch::team_sync<waves>();
        // T = (I - A)^-1, P                                         [64, 64]
        solver.write_t_and_p(shared.factors, RecordWriter<T>(record),
                             [&](int of_row, float product) __attribute__((always_inline)) {
                                 ((float *)(record + record_rows))[diagonal_row * chunk + row_place(of_row)] = product;
                             });
        arch::team_sync<waves>();
    }
}

// The chunk of this workgroup, if there is one.
template <class T> DEVICE void prepare(const dwk_prefill_prepare_args &x) {
    SHARED static Shared<T> shared;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    // Workgroups that read the gates of a chunk go to one die.
    const int units = first_record(x.tokens, x.sequences) + 1;
    const dispatch::Dealt to = dispatch::dealt(arch::workgroup(), units, x.key_heads * x.parts, x.dies);
    const int record = to.unit;
    const int key_head = arch::uniform_value(to.member / x.parts), part = to.member - key_head * x.parts;
    const int first_head = part * x.part_heads;
    const int end_head = min_of(first_head + x.part_heads, arch::uniform_value(x.value_heads / x.key_heads));
    const int sequence = sequence_of_record(x.cu_seqlens, x.sequences, record);
    if (sequence == x.sequences) {
        const int end = token_at(x.cu_seqlens, sequence, x.tokens);
        if (part == 0) {
            clear_rows(x, end, max_of(record - first_record(end, sequence), 0), key_head);
        }
        return;
    }
    if (is_padding(x, sequence)) {
        return;
    }
    const Rows range = rows_of(x.cu_seqlens, sequence, x.tokens);
    const int number = record - first_record(range.begin, sequence);
    if (number < 0 || number >= (range.end - range.begin + chunk - 1) / chunk) {
        return;
    }
    const int begin = range.begin + number * chunk;
    const Unit unit{record, key_head, first_head, end_head, sequence, begin, min_of(range.end - begin, chunk)};
    prepare_chunk<T>(x, unit, shared);
}

} // namespace

KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_bf16(dwk_prefill_prepare_args x) {
    prepare<Bf16>(x);
}
KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_f16(dwk_prefill_prepare_args x) {
    prepare<F16>(x);
}
