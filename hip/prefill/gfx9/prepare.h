// Schedule of prefill_prepare on CDNA. One wave loads the gates of four value heads together and keeps them in LDS.
// They lie in one line of memory, which other accesses would evict from the caches between heads.
#pragma once

#include "../../tensor/rows.h"
#include "../phases.h"
#include "matrices.h"

namespace prefill {

constexpr int gates_at_once = 4;

template <class T> struct Shared {
    union {
        ChunkRows::Memory rows;
        typename ChunkSolver<T>::Memory solver; // overlays the rows
    };
    float scratch[4];
    ChunkFactors factors;
    Gates gates[gates_at_once][chunk];
};

// Prepares one chunk of a key head for a run of its value heads: writes row factors, T and P to each record.
template <class T> DEVICE void prepare_chunk(const dwk_prefill_prepare_args &x, const Unit &unit, Shared<T> &shared) {
    const bool norm = x.flags & DWK_QK_L2NORM;
    const int group = arch::uniform_value(x.value_heads / x.key_heads);
    const int row = own_row();
    ChunkRows chunk_rows(row_address(x.q, x.q_strides, unit.sequence, unit.begin, unit.key_head),
                         row_address(x.k, x.k_strides, unit.sequence, unit.begin, unit.key_head),
                         (u32)x.q_strides.token * 2, (u32)x.k_strides.token * 2, unit.rows, x.key_dim, shared.rows);
    const int token = row, sequence = unit.sequence, begin = unit.begin, rows = unit.rows;
    const int key_head = unit.key_head, first_head = unit.first_head, end_head = unit.end_head;
    // request_gates loads g and beta of four value heads from the v-th on; keep_gates writes them to shared memory.
    Gates several[gates_at_once];
    const auto request_gates = [&](const dwk_prefill_prepare_args &y, int v) __attribute__((always_inline)) {
        GateReader(y, sequence, begin + token, token < rows)
            .load_ahead(several, dispatch::value_head(y, key_head, group, v),
                        y.flags & DWK_TILED_HEADS ? y.key_heads : 1, end_head - v);
    };
    const auto keep_gates = [&]() __attribute__((always_inline)) {
        for (int i = 0; i < gates_at_once; ++i) {
            shared.gates[i][token] = several[i];
        }
    };
    request_gates(x, first_head);
    // K K^T, Q K^T, 1 / |q|, 1 / |k|                                [64, 64], [64]
    Products<T> products;
    products.multiply(chunk_rows, x.key_dim, norm);
    keep_gates();
    const Norms norms = normalise(products, x, norm, shared);
    const float per_unit = norms.per_unit();
    const ChunkSolver<T> solver(products, shared.solver);
#pragma unroll 1
    for (int v = unit.first_head; v < unit.end_head; ++v) {
        const dwk_prefill_prepare_args &y = arch::reread(x); // saves scalar registers
        const int head = dispatch::value_head(y, unit.key_head, group, v);
        char *record = (char *)y.records + ((int64_t)unit.record * y.value_heads + head) * DWK_RECORD_BYTES;
        const int place = row_position(row);
        const Gates gates =
            GateReader(y, sequence, begin + token, token < rows).gates_of(head, [&]() __attribute__((always_inline)) {
                return shared.gates[(v - first_head) % gates_at_once][token];
            });
        // G, and factors of the rows                                [64]
        const GateSums g = sum_gates(y, gates, unit.record, head, shared);
        write_factors(record, place, gates, g, norms, per_unit, shared);
        if (v + 1 < end_head && (v + 1 - first_head) % gates_at_once == 0) {
            request_gates(y, v + 1);
            keep_gates();
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
