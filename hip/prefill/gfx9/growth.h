// Greatest |k|^2 of chunks on CDNA: implements ../warm_up.h.
#pragma once

#include "rows.h"

namespace prefill {

constexpr bool finds_squares = true;

// This lane's parts of the greatest |k|^2, as bits, of N chunks, of which the first `count` exist. Each is `step`
// tokens before the one before it; the first begins at `token`. Of all products of two rows the greatest is that of a
// row with itself, so the products of each 16 rows are computed as a tile.
template <class T, int N>
DEVICE void greatest_squares(int (&out)[N], const dwk_prefill_prepare_args &x, int sequence, int token, int step,
                             int count, int head) {
    constexpr int pairs = 4; // up to 128 key elements
    const u32 offset = (u32)x.k_strides.token * 2 * (arch::lane() % 16) + arch::eighth(arch::lane()) * 16;
    OperandPair rows[N][tiles][pairs];
    for (int n = 0; n < N; ++n) {
        const TokenRows k(x.k, x.k_strides, sequence, n < count ? token - n * step : token, head, x.key_dim);
        for (int t = 0; t < tiles; ++t) {
            for (int b = 0; b < pairs; ++b) {
                const bool inside = 32 * b + 8 * arch::eighth(arch::lane()) < x.key_dim && n < count;
                rows[n][t][b].data = k.memory.load_b128(inside ? offset + 16 * t * k.stride + 64 * b : Window::nowhere);
            }
        }
    }
    arch::phase();
    for (int n = 0; n < N; ++n) {
        out[n] = 0;
        for (int t = 0; t < tiles; ++t) {
            Tile products{};
            for (int b = 0; b < pairs; ++b) {
                products = T::mma(rows[n][t][b].first(), rows[n][t][b].first(), products);
                products = T::mma(rows[n][t][b].second(), rows[n][t][b].second(), products);
            }
            for (int e = 0; e < elements; ++e) {
                // Without the sign: a NaN may have one.
                out[n] = max_of(out[n], bits<int>(products[e]) & 0x7fffffff);
            }
        }
    }
}

} // namespace prefill
