// Operands of the backward in memory: rows of token tensors, and 16x16 blocks in the order of lanes.
//
// A block is an operand: lane l has its words at byte l * sizeof(Operand). Blocks pass between kernels of the same
// target, so that any order of lanes will do.
#pragma once

#include "../../arch/tile.h"
#include "../../tensor/rows.h"
#include "../batch.h"

namespace prefill {

using namespace tile;

namespace backward {

// Whether a lane's words of an operand are adjacent in memory.
constexpr bool adjacent = arch::operand_words == 2;
constexpr int block_bytes = 16 * 16 * 2;
static_assert(block_bytes == arch::lanes * (int)sizeof(Operand), "a lane has its share of a block");

DEVICE Operand load_block(const char *blocks, int index) {
    return ((const Operand *)(blocks + (int64_t)index * block_bytes))[arch::lane()];
}
DEVICE void store_block(char *blocks, int index, Operand x) {
    ((Operand *)(blocks + (int64_t)index * block_bytes))[arch::lane()] = x;
}

// Identity [16, 16], as either operand.
template <class T> DEVICE Operand identity() {
    Operand out;
    const int lane = arch::opaque(arch::lane());
    for (int w = 0; w < arch::operand_words; ++w) {
        const int row = arch::operand_row(w, lane), element = arch::operand_element(w, lane);
        out[w] = T::pack(row == element ? 1.0f : 0.0f, row == element + 1 ? 1.0f : 0.0f);
    }
    return out;
}

// Rounds numbers that are exact in the type.
template <class T> DEVICE Operand exactly(Tile x) {
    if constexpr (adjacent) {
        return Operand{T::join(x[0], x[1]), T::join(x[2], x[3])};
    } else {
        return rounded<T>(x);
    }
}

// The tile whose rows are the operand's rows, and whose columns are its contracted elements. Exact. `widened` gives the
// transposed tile.
template <class T> DEVICE Tile tile_of(Operand x, Operand identity) { return arch::held(T::mma(x, identity, Tile{})); }

// The transposed operand: contracts over what were rows. Exact.
template <class T> DEVICE Operand flipped(Operand x, Operand identity) { return exactly<T>(tile_of<T>(x, identity)); }

// Two operands side by side: 16 rows, 32 contracted elements. A lane has eight adjacent elements of each of its rows,
// four in each operand: memory moves in 16 bytes. It has one row where its words of an operand are adjacent, else two.
struct Pair {
    Operand part[2];
};
constexpr int pair_bytes = 2 * block_bytes;
constexpr int slab = 32; // contracted elements of a pair, value columns of a workgroup

// Which of the 32 elements is contracted element `element` (0 to 15) of an operand of a pair.
DEVICE constexpr int pair_element(int part, int element) {
    return adjacent ? element / 4 * 8 + 4 * part + element % 4
                    : element % 8 / 2 * 8 + 4 * part + element / 8 * 2 + element % 2;
}

DEVICE Pair pair_of_words(i32x4 x) {
    Pair out;
    for (int w = 0; w < 2; ++w) {
        out.part[0][w] = x[w];
        out.part[1][w] = x[2 + w];
    }
    return out;
}
DEVICE i32x4 words_of_pair(const Pair &x) { return i32x4{x.part[0][0], x.part[0][1], x.part[1][0], x.part[1][1]}; }

// The pair at `pairs`, equal in all lanes, and an offset that contains the lane's place.
DEVICE u32 place_in_pair() { return arch::lane() * 16; }
DEVICE Pair load_pair_at(const char *pairs, u32 offset) {
    const char *const from = pairs + offset;
    if constexpr (adjacent) {
        return pair_of_words(*(const i32x4 *)from);
    } else {
        return Pair{{*(const Operand *)from, *(const Operand *)(from + block_bytes)}};
    }
}

// A pair in memory: a lane's words, of both operands together where they are adjacent.
DEVICE Pair load_pair(const char *pairs, int index) {
    const char *const from = pairs + (int64_t)index * pair_bytes;
    if constexpr (adjacent) {
        return pair_of_words(((const i32x4 *)from)[arch::lane()]);
    } else {
        return Pair{{load_block(from, 0), load_block(from, 1)}};
    }
}
DEVICE void store_pair(char *pairs, int index, const Pair &x) {
    char *const to = pairs + (int64_t)index * pair_bytes;
    if constexpr (adjacent) {
        ((i32x4 *)to)[arch::lane()] = words_of_pair(x);
    } else {
        store_block(to, 0, x.part[0]);
        store_block(to, 1, x.part[1]);
    }
}

// Pairs [count] of a workspace: those from `count` on read as zeros.
template <bool Adjacent = adjacent> class Pairs {
  public:
    DEVICE_MEMBER explicit Pairs(const char *pairs) : memory(pairs) {}
    template <class W = Window> DEVICE_MEMBER Pair load(int index, bool there) const {
        const W &w = memory;
        const u32 at = there ? index * pair_bytes + arch::lane() * (u32)sizeof(Operand) : Window::nowhere;
        return Pair{{w.load_written_b128(at), w.load_written_b128(at + block_bytes)}};
    }

  private:
    const Window memory;
};
template <class W> DEVICE i32x4 load_b128_at(const W &memory, u32 offset, int uniform) {
    return memory.load_b128(offset, uniform);
}
template <> class Pairs<true> {
  public:
    DEVICE_MEMBER explicit Pairs(const char *pairs) : memory(arch::uniform_pointer((char *)pairs)) {}
    // `there` must be equal in all lanes.
    template <class W = Window> DEVICE_MEMBER Pair load(int index, bool there) const {
        const W &w = memory;
        return pair_of_words(load_b128_at(w, there ? arch::lane() * 16 : Window::nowhere, index * pair_bytes));
    }

  private:
    const Window memory;
};

// Mask of this lane's row of a tile, for loads and stores of pairs.
DEVICE u32 mask_of(int tile, int rows) {
    if (adjacent) {
        return 16 * tile + arch::lane() % 16 < rows ? 0 : Window::nowhere;
    }
    return rows;
}

// A pair in shared memory.
struct SharedPair {
    i32x4 words[pair_bytes / 16];

    DEVICE_MEMBER Pair get() const { return load_pair((const char *)words, 0); }
    DEVICE_MEMBER void put(const Pair &x) { store_pair((char *)words, 0, x); }
};

// The transposed operands of a pair of tiles, exact for numbers of 16 bits.
template <class T> DEVICE Pair flipped_pair(const Pair &x, Operand identity) {
    return Pair{{flipped<T>(x.part[0], identity), flipped<T>(x.part[1], identity)}};
}

// Which rows of a chunk there are: of a tile of tokens, for loads and stores of pairs.
template <bool Adjacent = adjacent> class RowMask {
  public:
    DEVICE_MEMBER void set(int count, int) { rows = count; }
    DEVICE_MEMBER int tile(int) const { return rows; }
    DEVICE_MEMBER int own() const { return rows; }

  private:
    int rows;
};
template <> class RowMask<true> {
  public:
    // Of `count` rows. `own_tile`: the wave's tile, of which own() is.
    DEVICE_MEMBER void set(int count, int own_tile) {
        const int row = arch::lane() % 16;
        for (int i = 0; i < tiles; ++i) {
            of[i] = 16 * i + row < count ? 0 : Window::nowhere;
        }
        of_own = 16 * own_tile + row < count ? 0 : Window::nowhere;
    }
    DEVICE_MEMBER u32 tile(int i) const { return of[i]; }
    DEVICE_MEMBER u32 own() const { return of_own; }

  private:
    u32 of[tiles], of_own;
};

// Rows of a token tensor of 16-bit elements as pairs, 64 tokens after 64 tokens.
template <bool Adjacent = adjacent> class PairRows {
  public:
    DEVICE_MEMBER PairRows(const void *p, const dwk_token_strides &s, int sequence, int begin, int head, int columns)
        : base((char *)row_address(p, s, sequence, begin, head)), stride((u32)s.token * 2), columns(columns),
          whole(arch::in_one_access(base) && arch::in_one_access((const void *)(u64)stride)) {}
    DEVICE_MEMBER void advance(int chunks) { base += (int64_t)chunks * chunk * stride; }

    // What a pair's loads need: of the rows of a tile, 32 elements from `column` on.
    DEVICE_MEMBER u32 place(int tile, int column) const { return tile << 16 | column; }
    DEVICE_MEMBER Pair load(u32 place, int rows) const {
        Pair out;
        load(&out, &place, 1, rows);
        return out;
    }
    // Several pairs at once. One branch for all of them: behind a branch of its own each load would wait for the one
    // before.
    template <class W = Window> DEVICE_MEMBER void load(Pair *out, const u32 *places, int count, int rows) const {
        const W memory(base);
        const int lane = arch::opaque(arch::lane()); // otherwise registers hold all places through a loop
        if (whole) {
            for (int i = 0; i < count; ++i) {
                for (int r = 0; r < own_rows; ++r) {
                    put(out[i], r, memory.load_b128(offset(places[i], r, rows, lane)));
                }
            }
        } else {
            for (int i = 0; i < count; ++i) {
                for (int r = 0; r < own_rows; ++r) {
                    put(out[i], r, memory.gather_b128(offset(places[i], r, rows, lane)));
                }
            }
        }
    }
    DEVICE_MEMBER void store(u32 place, int rows, const Pair &x) const {
        const int lane = arch::opaque(arch::lane());
        for (int r = 0; r < own_rows; ++r) {
            const u32 to = offset(place, r, rows, lane);
            const i32x4 words{x.part[0][r], x.part[0][2 + r], x.part[1][r], x.part[1][2 + r]};
            if (to == Window::nowhere) {
            } else if (whole) {
                arch::store_b128(base + to, words);
            } else {
                for (int i = 0; i < 8; ++i) {
                    ((short *)(base + to))[i] = (short)(words[i / 2] >> 16 * (i % 2));
                }
            }
        }
    }

  private:
    static constexpr int own_rows = 2; // of a lane, eight apart

    static DEVICE_MEMBER void put(Pair &to, int row, i32x4 words) {
        for (int part = 0; part < 2; ++part) {
            to.part[part][row] = words[2 * part];
            to.part[part][2 + row] = words[2 * part + 1];
        }
    }
    // The lane's eight elements of one of its rows.
    DEVICE_MEMBER u32 offset(u32 place, int own_row, int rows, int lane) const {
        const int row = (int)(place >> 16) * 16 + 8 * own_row + (u32)lane / 4;
        const int column = (int)(place & 0xffff) + (u32)lane % 4 * 8;
        return ((row < rows) & (column < columns)) ? row * stride + 2 * column : Window::nowhere;
    }

    char *base;
    const u32 stride;
    const int columns;
    const bool whole;
};
template <> class PairRows<true> {
  public:
    DEVICE_MEMBER PairRows(const void *p, const dwk_token_strides &s, int sequence, int begin, int head, int columns)
        : base(arch::uniform_pointer((char *)row_address(p, s, sequence, begin, head))), stride((u32)s.token * 2),
          columns(columns) {}
    DEVICE_MEMBER void advance(int chunks) { base += (int64_t)chunks * chunk * stride; }

    DEVICE_MEMBER u32 place(int tile, int column) const {
        const int lane = arch::lane(), own = column + lane / 16 * 8;
        return own < columns ? (16 * tile + lane % 16) * stride + 2 * own : Window::nowhere;
    }
    DEVICE_MEMBER Pair load(u32 place, u32 mask) const { return pair_of_words(Window(base).load_b128(place | mask)); }
    DEVICE_MEMBER void store(u32 place, u32 mask, const Pair &x) const {
        const u32 to = place | mask;
        if ((int)to >= 0) {
            arch::store_b128(base + to, words_of_pair(x));
        }
    }

  private:
    char *base;
    const u32 stride;
    const int columns;
};

} // namespace backward
} // namespace prefill
