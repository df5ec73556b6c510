// Gated delta rule: the recurrence, and its form in chunks of C = 64 tokens. All formulas of prefill are here;
// <target>/ decides in which order and by which waves they are computed. lab/src/oracle/t_form.rs has them in 35 lines
// of f64.
//
// Token by token, for one value head, with the state S [K, V] and rows q_t, k_t [K], v_t, o_t [V]:
//
//   d_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        S_t = exp(g_t) S_{t-1} + k_t d_t^T        o_t = scale S_t^T q_t
//
// In a chunk, with rows Q, K [C, K] and V, O [C, V], S0 the state before it and S1 after, G [C] the inclusive sum of g,
// and D_ij = exp(G_i - G_j), the d_t are the rows of U [C, V], which solve one triangular system:
//
//   prefill_prepare, independent of the state, f32:
//     A  = strictly lower part of -beta_i D_ij (k_i . k_j)           [C, C]
//     T  = (I - A)^-1                                                [C, C], unit lower triangular; math/inverse.h
//     P  = lower part of D_ij (q_i . k_j)                            [C, C]
//   prefill_scan and prefill_summarise, chunk after chunk:
//     R  = K S0                                                      [C, V]   read_state
//     X  = beta (V - exp(G) R)                                       [C, V]   solve_x
//     U  = T X = X + (T - I) X                                       [C, V]   solve_u
//     O  = scale (exp(G) Q S0 + diag(P) U + (P - diag(P)) U)         [C, V]   write_outputs (scan alone)
//     S1 = exp(G_C) S0 + K^T (exp(G_C - G) U)                        [K, V]   update_state
//
// R, X, U and S stay in the compute unit. X, U, exp(G_C - G) U and S are rounded to 16 bits as operands of the next
// product; sums are f32. T and P are 16-bit without their diagonals; products with the diagonals are f32.
//
// Norms of q and k are factors of rows and columns, so q and k are not rounded again. The row factors of K^T contain
// the norm of k; the state is therefore kept in units of a power of two (record.h).
//
// A segment of several chunks maps S to M S + N (prefill_summarise). N is the state after it, starting from zeros. A
// column of M is the state after it with V = 0, starting from a column of the identity. prefill_combine chains
// segments: S_{i+1} = M_i S_i + N_i.
#pragma once

#include "../arch/tile.h"
#include "../math/activations.h"
#include "record.h"

namespace prefill {

using namespace tile;

// Factors of row i of a chunk (RowFactor in record.h). `sum` = G_i / ln 2, `total` = G_C / ln 2, `per_unit` = 1 / unit.
// `k_norm` and `q_norm`: 1 / |k_i| and 1 / |q_i|, or 1 without norms.
DEVICE float read_factor(float beta, float k_norm, float sum) { return beta * k_norm * arch::exp2(sum); }
DEVICE float output_factor(float q_norm, float sum) { return q_norm * arch::exp2(sum); }
DEVICE float write_factor(float k_norm, float per_unit, float total, float sum) {
    return k_norm * per_unit * arch::exp2(total - sum);
}

// Bound on how much a token scales the norm of any state, without the factor exp(g). The token scales the state by 1 -
// beta |k|^2 along k, and by 1 across k.
DEVICE float growth(float beta, float key_square) {
    const float along = math::abs(1.0f - beta * key_square);
    return along < 1.0f ? 1.0f : along;
}

// Largest power of two that is at most 1 and at most a positive number, given as bits. 1 for zero and NaN.
DEVICE float power_of_two_below(int number) {
    const int exponent = number & 0x7f800000;
    return exponent == 0 || exponent > 0x3f800000 ? 1.0f : bits<float>(exponent);
}

// X = beta V - (beta exp(G)) R, one 16x16 tile. `weighted` = beta V, `read` = beta exp(G).
DEVICE Tile solve_x(Tile weighted, Tile read, Tile r) { return arch::minus_product(weighted, read, r); }

// exp(G) Q S0 + diag(P) U, one tile: O before the product with the rest of P.
DEVICE Tile output_of(Tile output, Tile q_state, Tile diagonal, Tile u) { return output * q_state + diagonal * u; }

// exp(G_C - G) U / unit, one tile.
DEVICE Tile change_of(Tile write, Tile u) { return write * u; }

// Rounding error of the last update of a walk, which a further product corrects. Errors of earlier updates shrink,
// because states decay.
template <class T> DEVICE Operand rounding_of(Tile change, Operand update) {
    return rounded<T>(change - widened<T>(update));
}

} // namespace prefill
