// How prefill moves its operands on CDNA. The waves of a workgroup that walks chunks share its value columns and divide
// the rows, twice: four hold the state, each a tile of tokens and some key elements, and in prefill_scan four make the
// outputs, each of a tile of tokens. So a wave reads its own rows of K, T and K^T, or of Q and P, straight from memory,
// a whole chunk before it multiplies with them; what a product makes, rounded, goes through LDS, in operand order, to
// all.
#pragma once

#include "prefill.h"

namespace prefill {

using namespace tile;
using arch::OperandPair;

// The blocks of T and P as left operands, in pairs, of which a lane's parts are 16 bytes: of a row of blocks two
// neighbours up to the diagonal. Where only the first of these is, on the diagonal of even rows, the blocks of T and P
// are a pair.
constexpr int pair_bytes = 2 * 16 * 16 * 2;
constexpr int record_t = record_matrices;
DEVICE constexpr int t_pair(int row, int pair) { return record_t + ((row == 3 ? 4 : row) + pair) * pair_bytes; }
constexpr int record_p = record_t + 6 * pair_bytes;
DEVICE constexpr int p_pair(int row, int pair) {
    return row % 2 == 0 && 2 * pair == row ? t_pair(row, pair) : record_p + (row - (row > 0) + pair) * pair_bytes;
}
static_assert(p_pair(3, 1) + pair_bytes <= DWK_RECORD_BYTES, "a record holds all parts");

// Lower blocks of T and P, given transposed (an accumulator tile, rounded, is then a left operand), to a record.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + arch::lane() * 16) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const {
        put(t_pair(row, column / 2) + column % 2 * 8, transposed);
    }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        const bool with_t = row == column && row % 2 == 0;
        put(p_pair(row, column / 2) + (with_t ? 1 : column % 2) * 8, transposed);
    }

  private:
    DEVICE_MEMBER void put(int at, Tile transposed) const { *(Operand *)(to + at) = rounded<T>(transposed); }

    char *const to;
};

// LDS is part of the code object.
#define SCAN_SHARED_BYTES(keys)
#define SUMMARISE_SHARED_BYTES(keys)

// Workgroups of prepare that share a SIMD.
constexpr int prepare_residency = 2;

constexpr int scan_waves = tiles;
constexpr int scan_threads = scan_waves * arch::lanes;
// Where a row's factors lie in a record.
DEVICE int row_place(int row) { return row; }
// Column tiles of a workgroup.
constexpr int scan_tiles(int) { return 2; }
// Whether registers do not allow to hold operands of the whole state.
constexpr bool registers_are_short(int keys) { return keys > 128; }

// Columns of a workgroup of scan or, without outputs, of summarise, its threads, at most and as it is launched, and how
// many waves share a SIMD.
template <int Keys, bool Outputs> constexpr int slab_columns() { return 16 * scan_tiles(Keys); }
template <int Keys, bool Outputs> constexpr int walk_threads() { return (Outputs ? 2 : 1) * scan_threads; }
template <int Keys, bool Outputs> constexpr int walking_threads() { return walk_threads<Keys, Outputs>(); }
template <int Keys, bool Outputs> constexpr int walk_residency() {
    return Outputs || registers_are_short(Keys) ? 2 : 3;
}
// The first of a wave's columns, from its slab's on.
DEVICE int wave_column_of_slab(int) { return 0; }

// Pairs of key tiles, of which wave w owns w, w + 4, ...
constexpr int key_pairs(int keys) { return keys / 32; }
constexpr int own_pairs(int keys) { return (key_pairs(keys) + scan_waves - 1) / scan_waves; }

// The key element and, from the lane's first column on, the column of an element of the state. Operands of Q and K come
// in pairs: the first of a lane's four elements of tile 2 b + s is 32 b + 8 (lane / 16) + 4 s.
DEVICE int state_key(int tile_index, int element, int lane) {
    const int pair = tile_index / 2 * scan_waves + arch::wave();
    return pair * 32 + lane / 16 * 8 + tile_index % 2 * 4 + element;
}
DEVICE constexpr int state_column(int column_tile, int) { return column_tile; }
// The first of a lane's columns: those of all its tiles are neighbours.
DEVICE int first_column(int lane, int across) { return lane % 16 * across; }

// The smallest key dimension that a bucket serves is 16 more than the next smaller bucket.
constexpr int smallest_key_dim(int bucket) {
    return bucket == 256 ? 208 : bucket == 192 ? 144 : bucket == 128 ? 112 : bucket == 96 ? 80 : 16;
}

// What the waves of a workgroup that hold the state hand each other, each a quarter of every part: right operands, 16
// bytes a lane, of a key pair of a column tile of the state, or of two column tiles of a token tile of X and of the
// state's update. Those that make outputs read a state while the next one is written.
template <int Keys, bool Outputs> struct Exchange {
    static constexpr int states = Outputs ? 2 : 1;
    i32x4 state[states][own_pairs(Keys) * scan_tiles(Keys)][scan_threads];
    i32x4 x[scan_threads];
    i32x4 update[scan_threads];

    DEVICE_MEMBER OperandPair operand(int parity, int pair, int j) const {
        const int from = pair % scan_waves * arch::lanes + arch::lane();
        return OperandPair{state[parity][pair / scan_waves * scan_tiles(Keys) + j][from]};
    }
};
// What those that make outputs are handed, U in f32, and hand each other, U as operands.
struct Values {
    i32x4 exact[scan_tiles(0)][scan_threads];
    i32x4 operands[scan_threads];
};

template <int Keys, bool Outputs> DEVICE Exchange<Keys, Outputs> &exchange() {
    __attribute__((shared)) static Exchange<Keys, Outputs> shared;
    return shared;
}
DEVICE Values &shared_values() {
    __attribute__((shared)) static Values shared;
    return shared;
}

// The lower blocks of T or P in the rows of one wave: two up to the diagonal, of which an even row has one, and those
// before, of the lower half.
class LowerBlocks {
  public:
    // Where they are.
    class Place {
      public:
        Place() = default;
        static DEVICE_MEMBER Place of_t(int row) { return Place(row, t_pair(row, 0), t_pair(row, row / 2)); }
        static DEVICE_MEMBER Place of_p(int row) {
            return Place(row, p_pair(row, 0), p_pair(row, row / 2) + (row % 2 == 0 ? 8 : 0));
        }

      private:
        friend LowerBlocks;
        DEVICE_MEMBER Place(int row, int first, int last)
            : before(row < 2 ? Window::nowhere : arch::lane() * 16),
              second(row % 2 == 0 ? Window::nowhere : arch::lane() * 16 + 8),
              first(arch::opaque_uniform(arch::uniform_value(first))),
              last(arch::opaque_uniform(arch::uniform_value(last))) {}
        u32 before, second;
        int first, last; // offsets that all lanes share
    };

    DEVICE_MEMBER void load(const Window &record, const Place &from) {
        before.data = record.load_b128(from.before, from.first);
        last[0] = record.load_b64(arch::lane() * 16, from.last);
        last[1] = record.load_b64(from.second, from.last);
    }
    // out += blocks times tokens that all waves have made, as `take` has found them. No branch is behind the last
    // products: clang 19 would forget to wait for them.
    template <class T> DEVICE_MEMBER void multiply(Tile (&out)[2], const OperandPair (&tokens)[tiles], int row) const {
        if (row >= 2) {
            multiply<T>(out, before.first(), tokens[0]);
            multiply<T>(out, before.second(), tokens[1]);
        }
        multiply<T>(out, last[0], tokens[2]);
        multiply<T>(out, last[1], tokens[3]);
    }
    static DEVICE_MEMBER void take(OperandPair (&to)[tiles], const i32x4 (&from)[scan_threads], int row) {
        const i32x4 *const first = from + arch::lane(), *const last = first + row / 2 * 2 * arch::lanes;
        to[0].data = first[0];
        to[1].data = first[arch::lanes];
        arch::phase();
        to[2].data = last[0];
        to[3].data = last[arch::lanes];
        arch::phase();
    }

  private:
    template <class T> static DEVICE_MEMBER void multiply(Tile (&out)[2], Operand block, OperandPair tokens) {
        out[0] = T::mma(block, tokens.first(), out[0]);
        out[1] = T::mma(block, tokens.second(), out[1]);
    }

    Operand last[2];
    OperandPair before;
};

// The rows of a token tensor for one sequence and head, from some chunk on. Rows that the chunk does not have read as
// zeros and are not written.
class TokenRows {
  public:
    DEVICE_MEMBER TokenRows(const void *p, const dwk_token_strides &s, int sequence, int begin, int head, int dim)
        : stride((u32)s.token * 2), row_bytes(2 * dim),
          memory(row_address(p, s, sequence, begin, head), (chunk - 1) * stride + row_bytes) {}

    // This chunk, or the next one, has the first of so many rows.
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            memory.limit(rows > 0 ? (rows - 1) * stride + row_bytes : 0);
        }
    }
    DEVICE_MEMBER void advance() { memory.advance((u64)stride * chunk); }

    const u32 stride, row_bytes;
    Window memory;
};

// The records of a value head, from some chunk on.
class Records {
  public:
    DEVICE_MEMBER Records(const dwk_prefill_scan_args &x, int slot, int head)
        : memory((const char *)x.records + ((int64_t)slot * x.value_heads + head) * DWK_RECORD_BYTES),
          step((u64)x.value_heads * DWK_RECORD_BYTES) {}

    DEVICE_MEMBER void advance(bool there = true) { memory.advance(there ? step : 0); }

    Window memory;

  private:
    const u64 step;
};

// Whether this lane's eighth of a key pair is part of the rows of Q and K.
template <int Keys> DEVICE bool inside_keys(int pair, int key_dim) {
    return 32 * pair + 32 <= smallest_key_dim(Keys) || 32 * pair + 8 * arch::eighth(arch::lane()) < key_dim;
}

} // namespace prefill
