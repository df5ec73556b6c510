// Schedule of one chunk on sm_90a: phases in the order in which their products are queued.
#pragma once

#include "../recurrence.h"
#include "chunk.h"

namespace prefill {

// Computes one chunk: updates the state and, with `Outputs`, computes this warp's 16 columns of O.
template <class T, int Keys, bool Outputs, class Next>
DEVICE void step(State<Keys> &state, Chunk<T, Keys, Outputs> chunk, const Next &next, float scale, bool last) {
    typedef Chunk<T, Keys, true> Products;
    constexpr int across = Products::across, rows = Products::row_tiles;
    constexpr bool state_first = Products::state_first;
    typename Products::Slab read, out;
    typename Products::SlabOperands x;
    chunk.read_state(read, out, state, next);

    // X = beta V - beta exp(G) R                                     [64, 16], in place of R, and rounded
    for (int i = 0; i < rows; ++i) {
        const Tile decay = chunk.factor(read_row, i);
        Tile weighted[across];
        chunk.load_weighted(i, weighted);
        for (int j = 0; j < across; ++j) {
            read[i][j] = solve_x(weighted[j], decay, read[i][j]);
            x[i][j] = rounded<T>(read[i][j]);
        }
    }

    // decay.x = exp(G_C) / unit, decay.y = unit of the record.
    const f32x2 decay = chunk.decay();
    const auto scale_state = [&](float by) __attribute__((always_inline)) {
        for (int t = 0; t < Products::key_tiles; ++t) {
            for (int j = 0; j < across; ++j) {
                state[t][j] *= by;
            }
        }
    };
    // U = X + (T - I) X, in place of X in `read`                      [64, 16]; meanwhile S <- exp(G_C) S0 / unit
    chunk.solve_u(read, x, out, next, [&]() __attribute__((always_inline)) { scale_state(decay.x); });

    // O = exp(G) Q S0 + diag(P) U + (P - diag(P)) U                  [64, 16]
    const auto write_outputs = [&]() __attribute__((always_inline)) {
        chunk.finish_reads(out);
        for (int i = 0; i < rows; ++i) {
            const Tile decay = chunk.factor(output_row, i), diagonal = chunk.factor(diagonal_row, i);
            for (int j = 0; j < across; ++j) {
                out[i][j] = output_of(decay, out[i][j], diagonal, read[i][j]);
                x[i][j] = rounded<T>(read[i][j]);
            }
        }
        chunk.multiply_p(out, x);
    };

    // S1 = exp(G_C) S0 + K^T (exp(G_C - G) U), in units of the record [K, 16] In the last chunk the rounding error of
    // the update is added first.
    typename Products::SlabOperands update;
    const auto update_state = [&]() __attribute__((always_inline)) {
        typename Products::Slab change;
        for (int i = 0; i < rows; ++i) {
            const Tile decay = chunk.factor(write_row, i);
            for (int j = 0; j < across; ++j) {
                change[i][j] = change_of(decay, read[i][j]);
                update[i][j] = rounded<T>(change[i][j]);
            }
        }
        if (last) {
            typename Products::SlabOperands rest;
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < across; ++j) {
                    rest[i][j] = rounding_of<T>(change[i][j], update[i][j]);
                }
            }
            chunk.accumulate(state, rest);
            chunk.finish_all(state, rest);
        }
        chunk.accumulate(state, update);
    };
    const auto finish_state = [&]() __attribute__((always_inline)) {
        next.fetch();
        chunk.finish_state(state, update);
        if (decay.y != 1.0f) {
            scale_state(decay.y);
        }
    };
    if constexpr (Outputs && !state_first) {
        write_outputs();
    }
    update_state();
    if constexpr (state_first) {
        if constexpr (Outputs) {
            write_outputs();
        }
        finish_state();
        chunk.prepare_reads(state);
    }
    if constexpr (Outputs) {
        chunk.finish_outputs(out, x);
        chunk.keep_outputs(out, scale);
    }
    if constexpr (!state_first) {
        finish_state();
    }
}

} // namespace prefill
