// Chain of segments that do not forget on CDNA, in prefill_combine and, for short chains, in prefill_scan. A wave owns
// 32 rows of M, which it loads to registers ahead of the product. S passes from wave to wave through shared memory.
#pragma once

#include "parts.h"

namespace prefill {

constexpr int chain_columns = 16; // of the waves that share a chain: in prefill_combine all of a workgroup
// Row tiles of M per wave. Rows of the tiles alternate, so that a lane's rows are adjacent in memory.
constexpr int row_tiles = 2;
constexpr int wave_rows = 16 * row_tiles;
constexpr int combine_threads(int keys) { return keys / wave_rows * arch::lanes; }
// Waves that share a SIMD. With 1 the compiler would use accumulation registers.
constexpr int combine_residency = 2;
// A workgroup has one.
DEVICE int next_unit(int) { return 0x7fffffff; }

// Column tile of a wave's rows of M, high and low.
struct MatrixTile {
    struct Rows {
        int row[row_tiles];
    } at[arch::operand_words][2];

    DEVICE_MEMBER Operand high(int tile) const {
        Operand out;
        for (int w = 0; w < arch::operand_words; ++w) {
            out[w] = arch::high_halves(at[w][0].row[tile], at[w][1].row[tile]);
        }
        return out;
    }
    DEVICE_MEMBER Operand low(int tile) const {
        Operand out;
        for (int w = 0; w < arch::operand_words; ++w) {
            out[w] = arch::low_halves(at[w][0].row[tile], at[w][1].row[tile]);
        }
        return out;
    }
};

DEVICE MatrixTile load_matrix_tile(const float *matrix, int first_row, int tile, int key_dim, int lane) {
    const Window memory(matrix);
    MatrixTile out;
    for (int w = 0; w < arch::operand_words; ++w) {
        const int row = first_row + row_tiles * arch::operand_row(w, lane);
        const int column = arch::operand_element(w, lane);
        const u32 offset = row < key_dim ? (column * key_dim + row) * 4 : Window::nowhere;
        for (int i = 0; i < 2; ++i) {
            const u32 from = (16 * tile + i) * key_dim * 4;
            out.at[w][i] =
                bits<MatrixTile::Rows>(memory.load_b64(16 * tile < key_dim ? offset + from : Window::nowhere));
        }
    }
    return out;
}

// Operand tile of S, high and low.
struct HighLow {
    Operand high, low;
};

// S in shared memory, in one buffer or two, stored by columns. Padded so that the columns of an operand lie in
// different banks.
template <int Keys, int Buffers> struct StateExchange {
    int at[Buffers][chain_columns][Keys + 4];

    DEVICE_MEMBER void put(float value, int buffer, int row, int column) {
        at[buffer][column][row] = pack_high_low(value);
    }
    DEVICE_MEMBER HighLow get(int buffer, int tile, int lane) const {
        HighLow out;
        for (int w = 0; w < arch::operand_words; ++w) {
            const int row = 16 * tile + arch::operand_element(w, lane);
            const int *s = &at[buffer][arch::operand_row(w, lane)][row];
            out.high[w] = arch::high_halves(s[0], s[1]);
            out.low[w] = arch::low_halves(s[0], s[1]);
        }
        return out;
    }
};

// `Stores`: writes each state in place of N, as prefill_combine does. Otherwise leaves the last one in shared memory.
template <int Keys, bool Stores> class Chain {
  public:
    typedef StateExchange<Keys, Stores ? 2 : 1> Exchange;
    static constexpr int key_tiles = Keys / 16;
    // Column tiles of M loaded ahead of the product.
    static constexpr int ahead = key_tiles <= 8 ? key_tiles : key_tiles / 2;
    static_assert(key_tiles % ahead == 0, "a tile has the same registers in every step");

    // Chain of summaries from `first` on, for a head and the columns of a slab. `wave`: of those that share the chain.
    // `idle`: this wave takes part in barriers, and its results are not used.
    template <class Arguments>
    DEVICE_MEMBER Chain(const Arguments &x, Exchange &exchange, int first, int head, int slab, int wave,
                        bool idle = false)
        : exchange(exchange), key_dim(x.key_dim), lane(arch::lane()), at(lane), first_row(wave * wave_rows), idle(idle),
          has_rows(!idle && first_row + row_tiles * at.row(0) < key_dim && slab * chain_columns < x.value_dim),
          n(arch::uniform_pointer(summary_of(x, first, head) + slab * chain_columns * key_dim)),
          m(arch::uniform_pointer(second_part(summary_of(x, first + 1, head), x))),
          step((int64_t)x.value_heads * summary_size(x)) {}

    // Combines `count` summaries.
    DEVICE_MEMBER void run(int count) {
        Tile state[row_tiles];
        load(state, n);
        publish(state, 0);
        for (int t = 0; t < ahead; ++t) {
            tiles_of_m[t] = left(m, t);
        }
        arch::workgroup_sync();
#pragma unroll 1
        for (int i = 1; i < count; ++i) {
            next_state(state, i, count);
        }
        if constexpr (!Stores) {
            if (!idle) {
                for_each(
                    [&](int t, int e, int row, int column) { exchange.at[0][column][row] = bits<int>(state[t][e]); });
            }
            arch::workgroup_sync();
        }
    }

  private:
    // S_i = M_{i-1} S_{i-1} + N_{i-1}.
    DEVICE_MEMBER void next_state(Tile (&state)[row_tiles], int i, int count) {
        n += step;
        const float *const current = m;
        m += i + 1 < count ? step : 0;
        Tile added[row_tiles]; // N of the next state
        load(added, n);
        multiply(state, Stores ? (i - 1) & 1 : 0, current);
        for (int r = 0; r < row_tiles; ++r) {
            state[r] += added[r];
        }
        if constexpr (Stores) {
            store(state);
        } else {
            arch::workgroup_sync(); // all have read the buffer
        }
        if (Stores || i + 1 < count) {
            publish(state, Stores ? i & 1 : 0);
            arch::workgroup_sync();
        }
    }

    // Calls f(tile, element, row, column) for each element of this wave's rows, in the order of memory.
    template <class F> DEVICE_MEMBER void for_each(F f) const {
        for (int e = 0; e < elements; e += arch::run) {
            for (int q = 0; q < arch::run * row_tiles; ++q) {
                f(q % row_tiles, e + q / row_tiles, first_row + row_tiles * at.row(e) + q, at.column(e));
            }
        }
    }
    DEVICE_MEMBER void load(Tile (&to)[row_tiles], const float *from) const {
        for (int r = 0; r < row_tiles; ++r) {
            to[r] = Tile{};
        }
        if (has_rows) {
            for_each([&](int t, int e, int row, int column) { to[t][e] = from[column * key_dim + row]; });
        }
    }
    DEVICE_MEMBER void store(const Tile (&from)[row_tiles]) const {
        if (has_rows) {
            for_each([&](int t, int e, int row, int column) { n[column * key_dim + row] = from[t][e]; });
        }
    }
    DEVICE_MEMBER void publish(const Tile (&from)[row_tiles], int buffer) const {
        if (idle) {
            return;
        }
        for_each([&](int t, int e, int row, int column) {
            const float value = from[t][e];
            exchange.put(value, buffer, row, column);
        });
    }

    DEVICE_MEMBER MatrixTile left(const float *matrix, int tile) const {
        return load_matrix_tile(matrix, first_row, tile, key_dim, lane);
    }

    // to = M S, with S in buffer `buffer` of the exchange. Also loads the first tiles of the next M.
    DEVICE_MEMBER void multiply(Tile (&to)[row_tiles], int buffer, const float *current) {
        for (int r = 0; r < row_tiles; ++r) {
            to[r] = Tile{};
        }
#pragma unroll 1
        for (int first = 0; first < key_tiles; first += ahead) {
            const bool over = first + ahead == key_tiles;
            const float *const following = over ? m : current;
            const int following_tile = over ? 0 : first + ahead;
            HighLow s = exchange.get(buffer, first, lane);
#pragma unroll
            for (int t = 0; t < ahead; ++t) {
                const MatrixTile m = tiles_of_m[t];
                for (int r = 0; r < row_tiles; ++r) {
                    to[r] = arch::Bf16::mma(m.low(r), s.high, to[r]);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    to[r] = arch::Bf16::mma(m.high(r), s.low, to[r]);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    to[r] = arch::Bf16::mma(m.high(r), s.high, to[r]);
                }
                if (t + 1 < ahead) {
                    s = exchange.get(buffer, first + t + 1, lane);
                }
                tiles_of_m[t] = left(following, following_tile + t);
                // In this order, whatever the compiler: otherwise products wait for loads that only later ones use.
                arch::phase();
            }
        }
    }

    Exchange &exchange;
    const int key_dim;
    const int lane;
    const LaneMap at;
    const int first_row;
    const bool idle;
    const bool has_rows; // whether the lane's rows are below K: all or none, as K is a multiple of 16
    float *n;            // N of the current segment, this slab's columns
    const float *m;      // next M to load
    const int64_t step;
    MatrixTile tiles_of_m[ahead];
};

template <int Keys> class Chains {
  public:
    DEVICE_MEMBER explicit Chains(const dwk_prefill_combine_args &x) : x(x) {}
    DEVICE_MEMBER void run(int first, int head, int slab, int count) {
        SHARED static typename Chain<Keys, true>::Exchange exchange;
        Chain<Keys, true>(x, exchange, first, head, slab, arch::wave()).run(count);
    }

  private:
    const dwk_prefill_combine_args &x;
};

} // namespace prefill

// Empty: the code object declares LDS.
#define COMBINE_SHARED_BYTES(keys)
