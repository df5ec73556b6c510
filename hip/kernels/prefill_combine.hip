// Prefill of segments, second part: the state after each segment but the last,
//   S_1 = N_0, S_{i+1} = M_i S_i + N_i
// written where N_i was. One workgroup per (sequence of more than two segments, value head, 16 value columns); a wave
// owns some rows of M, and S passes from wave to wave through shared memory. M and S are sums of two bf16 numbers each
// (two_parts), of whose products three count: an accuracy of 2^-17, where one bf16 would cost that of a whole chunk.
//
// N, S [V, K] f32; M^T [K, K] in two parts.
#include "../tile/prefill.h"

namespace {

using namespace tile;

constexpr int columns = 16;
// Row tiles of a wave. Their rows alternate, so that a lane finds those of all tiles side by side.
constexpr int row_tiles = arch::lanes / 32;
constexpr int wave_rows = 16 * row_tiles;

// Each column of S; padded, so that the columns of an operand lie in different banks.
template <int Keys> struct Exchange {
    int at[2][columns][Keys + 4];
};

// A column tile of this wave's rows of M.
struct Left {
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

template <int Keys> class Chain {
  public:
    static constexpr int key_tiles = Keys / 16;
    // Column tiles of M that are under way while one is multiplied.
    static constexpr int ahead = key_tiles <= 8 ? key_tiles : key_tiles / (arch::lanes == 64 ? 2 : 4);
    static_assert(key_tiles % ahead == 0, "a tile's place in the ring is known to the compiler");

    // Of a summary of this head, and this slab's columns.
    DEVICE_MEMBER Chain(const dw_prefill_combine_args &x, Exchange<Keys> &exchange, int first, int head, int slab)
        : exchange(exchange), key_dim(x.key_dim), lane(arch::lane()), at(lane), first_row(arch::wave() * wave_rows),
          has_rows(first_row + row_tiles * at.row(0) < key_dim),
          n(arch::uniform_pointer(prefill::summary_of(x, first, head) + slab * columns * key_dim)),
          m(arch::uniform_pointer(prefill::second_part(prefill::summary_of(x, first + 1, head), x))),
          step((int64_t)x.value_heads * prefill::summary_size(x)) {}

    // Of so many summaries.
    DEVICE_MEMBER void run(int count) {
        Tile state[row_tiles];
        load(state);
        publish(state, 0);
        for (int t = 0; t < ahead; ++t) {
            tiles_of_m[t] = left(m, t);
        }
        arch::workgroup_sync();
#pragma unroll 1
        for (int i = 1; i < count; ++i) {
            n += step;
            const float *const current = m;
            m += i + 1 < count ? step : 0;
            Tile added[row_tiles];
            load(added);
            for (int r = 0; r < row_tiles; ++r) {
                state[r] = Tile{};
            }
            multiply(state, (i - 1) & 1, current);
            for (int r = 0; r < row_tiles; ++r) {
                state[r] += added[r];
            }
            store(state);
            publish(state, i & 1);
            arch::workgroup_sync();
        }
    }

  private:
    // Calls f(tile, element, row, column) for each element of this wave's rows, neighbours in memory in turn.
    template <class F> DEVICE_MEMBER void for_each(F f) const {
        for (int e = 0; e < elements; e += arch::run) {
            for (int q = 0; q < arch::run * row_tiles; ++q) {
                f(q % row_tiles, e + q / row_tiles, first_row + row_tiles * at.row(e) + q, at.column(e));
            }
        }
    }
    DEVICE_MEMBER void load(Tile (&to)[row_tiles]) const {
        for (int r = 0; r < row_tiles; ++r) {
            to[r] = Tile{};
        }
        if (has_rows) {
            for_each([&](int t, int e, int row, int column) { to[t][e] = n[column * key_dim + row]; });
        }
    }
    DEVICE_MEMBER void store(const Tile (&from)[row_tiles]) const {
        if (has_rows) {
            for_each([&](int t, int e, int row, int column) { n[column * key_dim + row] = from[t][e]; });
        }
    }
    DEVICE_MEMBER void publish(const Tile (&from)[row_tiles], int buffer) const {
        for_each([&](int t, int e, int row, int column) {
            const float value = from[t][e];
            exchange.at[buffer][column][row] = prefill::two_parts(value);
        });
    }

    template <class Memory> static DEVICE_MEMBER Left::Rows rows(const Memory &m, u32 offset) {
        if constexpr (row_tiles == 2) {
            return bits<Left::Rows>(m.load_b64(offset));
        } else {
            return bits<Left::Rows>(m.load_b32(offset));
        }
    }
    DEVICE_MEMBER Left left(const float *matrix, int tile) const {
        const Window memory(matrix);
        Left out;
        for (int w = 0; w < arch::operand_words; ++w) {
            const int row = first_row + row_tiles * arch::operand_row(w, lane);
            const int column = arch::operand_element(w, lane);
            const u32 offset = row < key_dim ? (column * key_dim + row) * 4 : Window::nowhere;
            for (int i = 0; i < 2; ++i) {
                const u32 from = (16 * tile + i) * key_dim * 4;
                out.at[w][i] = rows(memory, 16 * tile < key_dim ? offset + from : Window::nowhere);
            }
        }
        return out;
    }

    // to += M S, S as published in a buffer; the first tiles of the next M are under way afterwards.
    DEVICE_MEMBER void multiply(Tile (&to)[row_tiles], int buffer, const float *current) {
#pragma unroll 1
        for (int first = 0; first < key_tiles; first += ahead) {
            const bool over = first + ahead == key_tiles;
            const float *const following = over ? m : current;
            const int following_tile = over ? 0 : first + ahead;
            // All at once, before the products: sm_90a waits for loads in groups, not one by one.
            Left next[ahead];
            for (int t = 0; t < ahead; ++t) {
                next[t] = left(following, following_tile + t);
            }
#pragma unroll
            for (int t = 0; t < ahead; ++t) {
                const Left m = tiles_of_m[t];
                Operand high, low;
                for (int w = 0; w < arch::operand_words; ++w) {
                    const int row = 16 * (first + t) + arch::operand_element(w, lane);
                    const int *s = &exchange.at[buffer][arch::operand_row(w, lane)][row];
                    high[w] = arch::high_halves(s[0], s[1]);
                    low[w] = arch::low_halves(s[0], s[1]);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    to[r] = arch::Bf16::mma(m.low(r), high, to[r]);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    to[r] = arch::Bf16::mma(m.high(r), low, to[r]);
                }
                for (int r = 0; r < row_tiles; ++r) {
                    to[r] = arch::Bf16::mma(m.high(r), high, to[r]);
                }
            }
            for (int t = 0; t < ahead; ++t) {
                tiles_of_m[t] = next[t];
            }
        }
    }

    Exchange<Keys> &exchange;
    const int key_dim;
    const int lane;
    const Place at;
    const int first_row;
    const bool has_rows; // all rows of a lane, or none: K is a multiple of 16
    float *n;            // of the segment at hand, and this slab's columns
    const float *m;      // the next to be loaded
    const int64_t step;
    Left tiles_of_m[ahead];
};

template <int Keys> DEVICE void combine(const dw_prefill_combine_args &x) {
    SHARED static Exchange<Keys> exchange;
    // The slabs of a (sequence, value head) read the same M.
    const prefill::Dealt to = prefill::dealt(arch::workgroup(), x.chains_count * x.value_heads, x.slabs, x.dies);
    const int chain = arch::uniform_value(to.unit / x.value_heads);
    const int first = min_of(max_of(arch::uniform(x.chains + 2 * chain), 0), x.summaries);
    const int count = min_of(arch::uniform(x.chains + 2 * chain + 1), x.summaries - first);
    if (count > 1) {
        Chain<Keys>(x, exchange, first, to.unit - chain * x.value_heads, to.member).run(count);
    }
}

} // namespace

// On CDNA, where one alone would be given accumulation registers.
constexpr int residency = arch::lanes == 64 ? 2 : 1;

#define COMBINE(keys)                                                                                                  \
    KERNEL(keys / wave_rows * arch::lanes, residency) void dw_prefill_combine_k##keys(dw_prefill_combine_args x) {     \
        combine<keys>(x);                                                                                              \
    }

COMBINE(64)
COMBINE(96)
COMBINE(128)
COMBINE(192)
COMBINE(256)
