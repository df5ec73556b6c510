// Registers of asynchronous products on sm_90a: accumulators, operands, and outputs of a chunk until they are stored.
#pragma once

#include "../../tensor/rows.h"
#include "../segment.h"
#include "layout.h"

namespace prefill {

// Accumulators of `Tiles` tiles, in wgmma's register order.
template <int Tiles> struct Accumulators {
    float at[8 * Tiles];

    // Undefined values: the first product does not read them. Explicit, because otherwise the compiler would keep the
    // previous chunk's values alive.
    DEVICE_MEMBER Accumulators() {
        for (int i = 0; i < 8 * Tiles; ++i) {
            at[i] = arch::unset();
        }
    }
    DEVICE_MEMBER explicit Accumulators(const Tile (*x)[1]) {
        for (int i = 0; i < 8 * Tiles; ++i) {
            at[i] = x[i / 8][0][i % 8];
        }
    }
    DEVICE_MEMBER void to(Tile (*x)[1]) const {
        for (int i = 0; i < 8 * Tiles; ++i) {
            x[i / 8][0][i % 8] = at[i];
        }
    }
    DEVICE_MEMBER void pin() {
        for (int i = 0; i < 8 * Tiles; ++i) {
            arch::pin(at[i]);
        }
    }
};

// Keeps operands in registers up to this point.
template <int N> DEVICE void pin(Operand (&x)[N][1]) {
    for (int i = 0; i < N; ++i) {
        int word[4] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w};
        for (int w = 0; w < 4; ++w) {
            arch::pin(word[w]);
        }
        x[i][0] = Operand{word[0], word[1], word[2], word[3]};
    }
}

// A lane's elements of O: two columns of four rows of each row tile. They are stored during the next chunk's first
// product.
class Output {
  public:
    DEVICE_MEMBER Output(const void *p, const dwk_token_strides &s, const Segment &segment, int head, u32 column_offset)
        : stride((u32)s.token * 2), has_columns(column_offset != Window::nowhere), quiet(segment.quiet) {
        const char *base = row_address(p, s, segment.sequence, segment.begin, head);
        words = (((u32)(u64)base | stride) & 3) == 0;
        to = (char *)base + ((u64)LaneMap(arch::lane()).row(0) * stride + (has_columns ? column_offset : 0));
    }

    template <class T> DEVICE_MEMBER void keep(const Tile (&x)[tiles][1], float scale) {
        for (int i = 0; i < 4 * tiles; ++i) {
            const int e = i % 4 / 2 * 4 + i % 2;
            pair[i] = T::pack(scale * x[i / 4][0][e], scale * x[i / 4][0][e + 2]);
        }
    }
    // Stores a whole chunk, or its first `rows` rows, unless it is quiet, and advances to the next chunk.
    DEVICE_MEMBER void store() {
        if (is_quiet()) {
            return;
        }
        if (words) [[likely]] {
            if (has_columns) {
                each([](char *at, int, int x) __attribute__((always_inline)) { arch::store_global(at, x); });
            }
            to += (u64)stride * chunk;
        } else {
            store_some(chunk);
        }
    }
    DEVICE_MEMBER void store_some(int rows) {
        if (is_quiet()) {
            return;
        }
        if (has_columns) {
            const int first = LaneMap(arch::lane()).row(0);
            each([&](char *at, int row, int x) __attribute__((always_inline)) {
                if (first + row < rows) {
                    if (words) {
                        arch::store_global(at, x);
                    } else {
                        arch::store_global(at, (short)x);
                        arch::store_global(at + 2, (short)(x >> 16));
                    }
                }
            });
        }
        to += (u64)stride * chunk;
    }

  private:
    // Skips a quiet chunk. Compiled away where no segment has any.
    DEVICE_MEMBER bool is_quiet() {
        if (quiet <= 0) {
            return false;
        }
        quiet -= chunk;
        to += (u64)stride * chunk;
        return true;
    }
    // Calls f(address, row counted from the lane's first, both elements).
    template <class F> DEVICE_MEMBER void each(F f) const {
        char *at = arch::opaque(to); // otherwise registers hold all addresses from chunk to chunk
        for (int i = 0; i < 4 * tiles; i += 2) {
            f(at, 4 * i, pair[i]);
            f(at + stride, 4 * i + 1, pair[i + 1]);
            at += (u64)(8 * stride);
        }
    }

    int pair[4 * tiles];
    char *to;
    const u32 stride;
    const bool has_columns;
    bool words; // whether two elements form an aligned word
    int quiet;  // tokens left whose outputs are not written
};

} // namespace prefill
