// Chain of segments that do not forget: S_{i+1} = M_i S_i + N_i, [K, 16 columns] per workgroup. Each wave owns some
// rows of M.
#pragma once

#include "parts.h"

namespace prefill {

constexpr int columns = 16; // per workgroup

template <int Keys> class Chain {
  public:
    static constexpr int key_tiles = Keys / 16;
    // Column tiles of M loaded ahead of the product, and matrices M held in registers.
    static constexpr int ahead = tiles_ahead(key_tiles);
    static constexpr int matrices = matrices_held(key_tiles);
    static_assert(key_tiles % ahead == 0, "a tile's place in the ring is known to the compiler");
    static_assert(matrices == 1 || ahead == key_tiles, "two matrices are held whole");

    // Chain of summaries from `first` on, for this head and this slab's columns.
    DEVICE_MEMBER Chain(const dwk_prefill_combine_args &x, StateExchange<Keys> &exchange, int first, int head, int slab)
        : exchange(exchange), key_dim(x.key_dim), lane(arch::lane()), at(lane), first_row(arch::wave() * wave_rows),
          has_rows(first_row + row_tiles * at.row(0) < key_dim),
          n(arch::uniform_pointer(summary_of(x, first, head) + slab * columns * key_dim)),
          m(arch::uniform_pointer(second_part(summary_of(x, first + 1, head), x))),
          step((int64_t)x.value_heads * summary_size(x)) {}

    // Combines `count` summaries.
    DEVICE_MEMBER void run(int count) {
        Tile state[row_tiles];
        load(state, n);
        if (matrices > 1) {
            load(added, n + step);
        }
        publish(state, 0);
        for (int slot = 0; slot < matrices; ++slot) {
            m += slot > 0 && slot + 1 < count ? step : 0;
            for (int t = 0; t < ahead; ++t) {
                tiles_of_m[slot][t] = left(m, t);
            }
        }
        arch::workgroup_sync();
#pragma unroll 1
        for (int i = 1; i < count; i += matrices) {
            next_state<0>(state, i, count);
            if (matrices > 1 && i + 1 < count) {
                next_state<matrices - 1>(state, i + 1, count);
            }
        }
    }

  private:
    // S_i = M_{i-1} S_{i-1} + N_{i-1}, with M in register set `RingPlace`.
    template <int RingPlace> DEVICE_MEMBER void next_state(Tile (&state)[row_tiles], int i, int count) {
        n += step;
        const float *const current = m;
        m += i + matrices < count ? step : 0;
        if (matrices == 1) {
            load(added, n);
        }
        multiply<RingPlace>(state, (i - 1) & 1, current);
        for (int r = 0; r < row_tiles; ++r) {
            state[r] += added[r];
        }
        if (matrices > 1 && i + 1 < count) {
            load(added, n + step);
        }
        store(state);
        publish(state, i & 1);
        arch::workgroup_sync();
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
        if constexpr (tiles_are_operands) {
            exchange.put(from[0], buffer, first_row);
        } else {
            for_each([&](int t, int e, int row, int column) {
                const float value = from[t][e];
                exchange.put(value, buffer, row, column);
            });
        }
    }

    DEVICE_MEMBER MatrixTile left(const float *matrix, int tile) const {
        return load_matrix_tile(matrix, first_row, tile, key_dim, lane);
    }

    // to = M S, with S in buffer `buffer` of the exchange. Also loads the first tiles of the next M.
    template <int RingPlace> DEVICE_MEMBER void multiply(Tile (&to)[row_tiles], int buffer, const float *current) {
        Tile sums[product_sums][row_tiles];
        for (auto &sum : sums) {
            for (int r = 0; r < row_tiles; ++r) {
                sum[r] = Tile{};
            }
        }
#pragma unroll 1
        for (int first = 0; first < key_tiles; first += ahead) {
            const bool over = first + ahead == key_tiles;
            const float *const following = over ? m : current;
            const int following_tile = over ? 0 : first + ahead;
            // A target that waits for loads in groups, not one by one, loads all before the products.
            MatrixTile next[ahead];
            for (int t = 0; t < ahead && matrices == 1 && !tiles_reloaded_after_use; ++t) {
                next[t] = left(following, following_tile + t);
            }
            HighLow s = exchange.get(buffer, first, lane);
#pragma unroll
            for (int t = 0; t < ahead; ++t) {
                const MatrixTile m = tiles_of_m[RingPlace][t];
                if (t > 0 && !tiles_reloaded_after_use) {
                    s = exchange.get(buffer, first + t, lane);
                }
                const auto add = [&](int term, int r, Operand left, Operand right) __attribute__((always_inline)) {
                    Tile &sum = sums[term % product_sums][r];
                    sum = arch::Bf16::mma(left, right, sum);
                };
                for (int r = 0; r < row_tiles; ++r) {
                    add(0, r, m.low(r), s.high);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    add(1, r, m.high(r), s.low);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    add(2, r, m.high(r), s.high);
                }
                if constexpr (tiles_reloaded_after_use) {
                    if (t + 1 < ahead) {
                        s = exchange.get(buffer, first + t + 1, lane);
                    }
                    tiles_of_m[RingPlace][t] = left(following, following_tile + t);
                    // In this order, whatever the compiler: otherwise products wait for loads that only later ones use.
                    arch::phase();
                }
            }
            for (int t = 0; t < ahead && !tiles_reloaded_after_use; ++t) {
                tiles_of_m[RingPlace][t] = matrices == 1 ? next[t] : left(following, following_tile + t);
            }
        }
        for (int r = 0; r < row_tiles; ++r) {
            to[r] = sums[0][r];
            for (int i = 1; i < product_sums; ++i) {
                to[r] += sums[i][r];
            }
        }
    }

    StateExchange<Keys> &exchange;
    const int key_dim;
    const int lane;
    const LaneMap at;
    const int first_row;
    const bool has_rows; // whether the lane's rows are below K: all or none, as K is a multiple of 16
    float *n;            // N of the current segment, this slab's columns
    const float *m;      // next M to load
    const int64_t step;
    MatrixTile tiles_of_m[matrices][ahead];
    Tile added[row_tiles]; // N of the next state
};

} // namespace prefill
