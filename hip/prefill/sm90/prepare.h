// Schedule of prefill_prepare on sm_90a. Two warps. The gates of a value head are loaded during the computation of the
// head before.
#pragma once

#include "../../tensor/rows.h"
#include "../phases.h"
#include "matrices.h"

namespace prefill {

template <class T> struct Shared {
    union {
        ChunkRows::Memory rows;
        typename ChunkSolver<T>::Memory solver; // overlays the rows
    };
    float scratch[4];
    ChunkFactors factors;
};

// Prepares one chunk of a key head for a run of its value heads: writes row factors, T and P to each record.
template <class T> DEVICE void prepare_chunk(const dwk_prefill_prepare_args &x, const Unit &unit, Shared<T> &shared) {
    const bool norm = x.flags & DWK_QK_L2NORM;
    const int group = arch::uniform_value(x.value_heads / x.key_heads);
    const int row = arch::thread();
    ChunkRows chunk_rows(row_address(x.q, x.q_strides, unit.sequence, unit.begin, unit.key_head),
                         row_address(x.k, x.k_strides, unit.sequence, unit.begin, unit.key_head),
                         (u32)x.q_strides.token * 2, (u32)x.k_strides.token * 2, unit.rows, x.key_dim, shared.rows);
    const int token = arch::thread();
    Gates loaded = GateReader(x, unit.sequence, unit.begin + token, token < unit.rows)
                       .load_ahead(dispatch::value_head(x, unit.key_head, group, unit.first_head));
    // K K^T, Q K^T, 1 / |q|, 1 / |k|                                [64, 64], [64]
    Products<T> products;
    products.multiply(chunk_rows, x.key_dim, norm);
    const Norms norms = normalise(products, x, norm, shared);
    const float per_unit = bits<float>(0x7f000000 - bits<int>(norms.unit)); // 1 / unit
    const GateReader reader(x, unit.sequence, unit.begin + token, token < unit.rows);
    const ChunkSolver<T> solver(products, shared.solver);
#pragma unroll 1
    for (int v = unit.first_head; v < unit.end_head; ++v) {
        const dwk_prefill_prepare_args &y = arch::reread(x); // saves registers
        const int head = dispatch::value_head(y, unit.key_head, group, v);
        char *record = (char *)y.records + ((int64_t)unit.record * y.value_heads + head) * DWK_RECORD_BYTES;
        const int place = row_position(row);
        const Gates gates = reader.gates_of(head, [&]() __attribute__((always_inline)) { return loaded; });
        // G, and factors of the rows                                [64]
        const GateSums g = sum_gates(y, gates, unit.record, head, shared);
        write_factors(record, place, gates, g, norms, per_unit, shared);
        if (v + 1 < unit.end_head) {
            loaded = reader.load_ahead(dispatch::value_head(x, unit.key_head, group, v + 1));
        }
        arch::team_sync<prepare_waves>();
        // T = (I - A)^-1, P                                         [64, 64]
        solver.write_t_and_p(
            shared.factors, RecordWriter<T>(record), [&](int of_row, float product) __attribute__((always_inline)) {
                ((float *)(record + record_rows))[diagonal_row * chunk + row_position(of_row)] = product;
            });
        arch::team_sync<prepare_waves>();
    }
}

} // namespace prefill
