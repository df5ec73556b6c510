// Phases of prefill_prepare that all targets share: norms, sums of gates and row factors, one thread per row of the
// chunk. Formulas are in recurrence.h.
#pragma once

#include "factors.h"
#include "gates.h"

namespace prefill {

constexpr int prepare_waves = chunk / arch::lanes;

// Unit of the state update; 1 / |k| and 1 / |q| of this thread's row, or 1 without norms.
struct Norms {
    float unit, k, q;
    // 1 / unit, of a power of two.
    DEVICE_MEMBER float per_unit() const { return bits<float>(0x7f000000 - bits<int>(unit)); }
};

// Divides the products by the norms of q and k if `norm`. Leaves |k|^2 in factors.k_norm if bounds need it.
template <class Products, class Shared>
DEVICE Norms normalise(Products &products, const dwk_prefill_prepare_args &x, bool norm, Shared &shared) {
    Norms out{1.0f, 1.0f, 1.0f};
    if (norm) {
        products.normalise(shared.factors);
        out.q = shared.factors.q_norm[own_row()];
        out.k = shared.factors.k_norm[own_row()];
        out.unit = power_of_two_below(arch::chunk_max(bits<int>(out.k), (int *)shared.scratch));
    }
    if (x.retained && !norm) {
        products.key_squares(shared.factors);
        arch::team_sync<prepare_waves>();
    }
    return out;
}

// G_i / ln 2 of this thread's row i, and G_C / ln 2.
struct GateSums {
    float sum, total;
};

// log2 of exp(g). Opaque: otherwise the product may be fused into a sum, differently with bounds than without, and bits
// would differ.
DEVICE float log2_of(Gates gates) { return bits<float>(arch::opaque(bits<int>(gates.g * math::log2e))); }

// Sums the gates of the chunk and, with `retained`, writes log2 of a bound on how much the chunk scales the norm of any
// state: exp(G_C) max_i growth_i^C.
template <class Shared>
DEVICE GateSums sum_gates(const dwk_prefill_prepare_args &y, Gates gates, int record, int head, Shared &shared) {
    GateSums out;
    const float log2_gate = log2_of(gates);
    if (y.retained) {
        const float key_square = y.flags & DWK_QK_L2NORM ? 1.0f : shared.factors.k_norm[own_row()];
        int greatest;
        out.sum =
            arch::chunk_sum(log2_gate, out.total, bits<int>(growth(gates.beta, key_square)), greatest, shared.scratch);
        float bound = out.total;
        if (greatest != bits<int>(1.0f)) {
            bound += chunk * math::log2e * arch::log(bits<float>(greatest));
        }
        if (own_row() == 0) {
            *retained_by(y, record, head) = bound;
        }
    } else {
        out.sum = arch::chunk_sum(log2_gate, out.total, shared.scratch);
    }
    return out;
}

// Writes the factors of this thread's row for A and P.
DEVICE void write_factors(ChunkFactors &factors, int row, Gates gates, GateSums g) {
    factors.gate_sum[row] = g.sum;
    factors.beta[row] = -gates.beta;
}

// Writes the factors of this thread's row for the walk, at `place` of the arrays of a record.
DEVICE void write_factors(char *record, int row, int place, Gates gates, GateSums g, Norms norms, float per_unit) {
    float *const factors = (float *)(record + record_rows);
    factors[beta_row * chunk + place] = gates.beta;
    factors[read_row * chunk + place] = read_factor(gates.beta, norms.k, g.sum);
    factors[output_row * chunk + place] = output_factor(norms.q, g.sum);
    factors[write_row * chunk + place] = write_factor(norms.k, per_unit, g.total, g.sum);
    if (row == 0) {
        *(f32x2 *)(record + record_decay) = f32x2{arch::exp2(g.total) * per_unit, norms.unit};
    }
}

// Both.
template <class Shared>
DEVICE void write_factors(char *record, int place, Gates gates, GateSums g, Norms norms, float per_unit,
                          Shared &shared) {
    const int row = own_row();
    write_factors(shared.factors, row, gates, g);
    write_factors(record, row, place, gates, g, norms, per_unit);
}

} // namespace prefill
