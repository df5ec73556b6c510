// One chunk on sm_90a, in the order in which its products are queued.
#pragma once

#include "prefill.h"

namespace prefill {

template <class T, int Keys, bool Outputs = true> class Chunk;

// Reads and updates the state; with `Outputs`, writes the outputs of this wave's columns.
template <class T, int Keys, bool Outputs, class Next>
DEVICE void step(typename Chunk<T, Keys>::State &state, Chunk<T, Keys, Outputs> chunk, const Next &next, float scale,
                 bool last) {
    constexpr int across = Chunk<T, Keys>::across, rows = Chunk<T, Keys>::row_tiles;
    constexpr bool state_first = Chunk<T, Keys>::state_first;
    typename Chunk<T, Keys>::Slab read, out;
    typename Chunk<T, Keys>::SlabOperands x;
    chunk.read_state(read, out, state, next);

    // X, in place of R, and its operands.
    for (int i = 0; i < rows; ++i) {
        const Tile decay = chunk.factor(read_row, i);
        Tile weighted[across];
        chunk.load_weighted(i, weighted);
        for (int j = 0; j < across; ++j) {
            read[i][j] = weighted[j] - decay * read[i][j];
            x[i][j] = rounded<T>(read[i][j]);
        }
    }

    // exp(G_C) and the unit of the record.
    const f32x2 decay = chunk.decay();
    const auto scale_state = [&](float by) __attribute__((always_inline)) {
        for (int t = 0; t < Chunk<T, Keys>::key_tiles; ++t) {
            for (int j = 0; j < across; ++j) {
                state[t][j] *= by;
            }
        }
    };
    // U = X + (T - I) X, which leaves time for other work.
    chunk.multiply_t(read, x, out, next, [&]() __attribute__((always_inline)) { scale_state(decay.x); });

    // O = exp(G) (Q S0) + diag(P) U + (P - diag) U.
    const auto make_outputs = [&]() __attribute__((always_inline)) {
        chunk.finish_reads(out);
        for (int i = 0; i < rows; ++i) {
            const Tile decay = chunk.factor(output_row, i), diagonal = chunk.factor(diagonal_row, i);
            for (int j = 0; j < across; ++j) {
                out[i][j] = decay * out[i][j] + diagonal * read[i][j];
                x[i][j] = rounded<T>(read[i][j]);
            }
        }
        chunk.multiply_p(out, x);
    };

    // S1 = exp(G_C) S0 + K^T (exp(G_C - G) U), in units of the record. What decays leaves the final state to its last
    // chunk: there the rounding of the update is made good.
    typename Chunk<T, Keys>::SlabOperands update;
    const auto update_state = [&]() __attribute__((always_inline)) {
        typename Chunk<T, Keys>::Slab change;
        for (int i = 0; i < rows; ++i) {
            const Tile decay = chunk.factor(write_row, i);
            for (int j = 0; j < across; ++j) {
                change[i][j] = decay * read[i][j];
                update[i][j] = rounded<T>(change[i][j]);
            }
        }
        if (last) {
            typename Chunk<T, Keys>::SlabOperands rest;
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < across; ++j) {
                    rest[i][j] = rounded<T>(change[i][j] - widened<T>(update[i][j]));
                }
            }
            chunk.accumulate(state, rest);
            chunk.finish_all(state, rest);
        }
        chunk.accumulate(state, update);
    };
    const auto finish_state = [&]() __attribute__((always_inline)) {
        chunk.finish_state(state, update);
        if (decay.y != 1.0f) {
            scale_state(decay.y);
        }
    };
    if constexpr (Outputs && !state_first) {
        make_outputs();
    }
    update_state();
    if constexpr (state_first) {
        if constexpr (Outputs) {
            make_outputs();
        }
        finish_state();
        chunk.prepare_reads(state);
    }
    if constexpr (Outputs) {
        chunk.finish_outputs(out, x);
        chunk.store_outputs(out, scale);
    }
    if constexpr (!state_first) {
        finish_state();
    }
}

} // namespace prefill
