// The vocabulary of the kernels. The arch trait says how tiles lie in a wave; this says what is done with them.
#pragma once

#include "gfx9.h"

namespace tile {

using arch::Bf16;
using arch::F16;
using arch::Operand;
using arch::Place;
using arch::Tile;
using arch::Window;

// An accumulator tile rounded to 16 bits: the right operand of a product that contracts over its rows, and the left
// operand whose rows are its columns.
template <class T> DEVICE Operand rounded(Tile x) { return Operand{T::pack(x[0], x[1]), T::pack(x[2], x[3])}; }

template <class T> DEVICE Tile widened(Operand x) { return Tile{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y)}; }

// Two operand tiles that one 16-byte load brings: eight consecutive elements of a row, the first four to the first
// tile. Contracting both in turn visits the 32 elements in a permuted order, the same for everything loaded so.
struct OperandPair {
    i32x4 data;
    DEVICE_MEMBER Operand first() const { return Operand{data.x, data.y}; }
    DEVICE_MEMBER Operand second() const { return Operand{data.z, data.w}; }
};

// Where the elements of a lane lie in the contraction when tiles come in such pairs: the first of its four elements of
// tile 2 b + s is 32 b + 8 (lane / 16) + 4 s.
DEVICE int paired_row(int tile_index, int lane) { return tile_index / 2 * 32 + lane / 16 * 8 + tile_index % 2 * 4; }

} // namespace tile

namespace math {

constexpr float log2e = 1.44269504088896340736f;

DEVICE float abs(float x) { return __builtin_fabsf(x); }

// 1 / (1 + e^-x).
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

// log(1 + e^x), accurate for every x: max(x, 0) + log1p(e^-|x|), with log1p(y) = log(u) y / (u - 1), u = 1 + y,
// in which the rounding error of u cancels.
DEVICE float softplus(float x) {
    const float y = __builtin_expf(-abs(x));
    const float u = 1.0f + y;
    const float log1p = u == 1.0f ? y : __builtin_logf(u) * (y / (u - 1.0f));
    return (x > 0.0f ? x : 0.0f) + log1p;
}

// A quiet NaN whose payload survives rounding to 16 bits; other values as they are.
DEVICE float canonical(float x) { return x == x ? x : __builtin_nanf(""); }

} // namespace math

// A [T, heads] element of type DW_F32, DW_BF16 or DW_F16.
DEVICE float load_scalar(const void *p, int64_t index, int type) {
    if (type == DW_F32) {
        return ((const float *)p)[index];
    }
    const int raw = ((const unsigned short *)p)[index];
    return type == DW_BF16 ? arch::Bf16::low(raw) : arch::F16::low(raw);
}

// g = -exp(A_log) softplus(a + dt_bias).
DEVICE float gate(float a, float a_log, float dt_bias) { return -__builtin_expf(a_log) * math::softplus(a + dt_bias); }

// beta = sigmoid(b), doubled when negative eigenvalues are allowed.
DEVICE float beta_of(float b, bool negative_eigenvalues) {
    const float beta = math::sigmoid(b);
    return negative_eigenvalues ? 2.0f * beta : beta;
}
