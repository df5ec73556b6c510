// How prefill moves its operands on CDNA. The waves of a workgroup of prefill_scan share its value columns and divide
// the rows: each owns a tile of tokens and some key elements of the state. So a wave reads its own rows of K, Q, T, P
// and K^T alone, straight from memory, a whole chunk before it multiplies with them; what a product makes, rounded,
// goes through LDS, in operand order, to all waves.
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
static_assert(p_pair(3, 1) + pair_bytes <= DW_RECORD_BYTES, "a record holds all parts");

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
// Whether registers do not allow to hold operands of the whole state, and of the next chunk what this one has used.
constexpr bool registers_are_short(int keys) { return keys > 128; }

// Columns of a workgroup of scan or, without outputs, of summarise, its threads, as it is launched and at most, and how
// many workgroups share a SIMD.
template <int Keys, bool Outputs> constexpr int slab_columns() { return 16 * scan_tiles(Keys); }
template <int Keys, bool Outputs> constexpr int walking_threads() { return scan_waves * arch::lanes; }
template <int Keys, bool Outputs> constexpr int walk_threads() { return scan_waves * arch::lanes; }
template <int Keys, bool Outputs> constexpr int walk_residency() {
    return Outputs || registers_are_short(Keys) ? 2 : 3;
}
// The first of a wave's columns, from its slab's on.
DEVICE int wave_column_of_slab(int) { return 0; }
// Whether T and P have more than two blocks in a wave's rows, and whether the last two are whole (t_pair).
DEVICE bool has_second_pair(int wave) { return wave >= 2; }
DEVICE bool last_pair_is_whole(int wave) { return wave % 2 == 1; }

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

// What the waves of a workgroup hand each other, each a quarter of every part: right operands, 16 bytes a lane, of a
// key pair of a column tile of the state, or of two column tiles of a token tile of X, U and the state's update.
template <int Keys> struct Exchange {
    static constexpr int state_quarters = own_pairs(Keys) * scan_tiles(Keys);
    i32x4 state[state_quarters][scan_threads];
    i32x4 x[scan_threads];
    i32x4 u[scan_threads];
    i32x4 update[scan_threads];
};

// The rows of a token tensor for one sequence and head, from some chunk on. Rows that the chunk does not have read as
// zeros and are not written.
class TokenRows {
  public:
    DEVICE_MEMBER TokenRows(const void *p, const dw_token_strides &s, int sequence, int begin, int head, int dim)
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

// What a wave reads of a chunk, in registers.
template <int Keys> struct Part {
    OperandPair k[key_pairs(Keys)]; // its rows
    OperandPair q[key_pairs(Keys)];
    OperandPair columns[own_pairs(Keys)][tiles]; // its key elements of all rows of K
    OperandPair t[tiles / 2];                    // its blocks of T and P
    OperandPair p[tiles / 2];
    int v[elements];
    Tile factor[row_factors];
    f32x2 decay;
    // Operands of the state, which all waves have shared.
    OperandPair state[registers_are_short(Keys) ? 1 : key_pairs(Keys)][scan_tiles(Keys)];
};

// Where a wave finds its part of a chunk.
template <class T, int Keys> class Source {
  public:
    DEVICE_MEMBER Source(const dw_prefill_scan_args &x, int sequence, int begin, int slot, int head, int key_head,
                         u32 value_offset)
        : q(x.q, x.q_strides, sequence, begin, key_head, x.key_dim),
          k(x.k, x.k_strides, sequence, begin, key_head, x.key_dim),
          v(x.v, x.v_strides, sequence, begin, head, x.value_dim), record_step((u64)x.value_heads * DW_RECORD_BYTES),
          key_dim(x.key_dim) {
        const int lane = arch::lane(), wave = arch::wave(), row = lane % 16, eighth = arch::eighth(lane) * 16;
        q_offset = (16 * wave + row) * q.stride + eighth;
        k_offset = (16 * wave + row) * k.stride + eighth;
        column_offset = row * k.stride + eighth + 64 * wave;
        for (int c = 0; c < tiles; ++c) {
            columns[c] = column_of(column_offset, 0, c);
        }
        for (int r = 0; r < elements; ++r) {
            v_offset[r] = (16 * wave + Place(lane).row(r)) * v.stride + value_offset;
        }
        factor_offset = (16 * wave + Place(lane).row(0)) * 4;
        first_pair = lane * 16;
        second_pair = has_second_pair(wave) ? first_pair : Window::nowhere;
        t_rows = arch::opaque_uniform(t_pair(wave, 0));
        p_rows = arch::opaque_uniform(p_pair(wave, 0));
        p_second = arch::opaque_uniform(p_pair(wave, 1));
        record = Window((const char *)x.records + ((int64_t)slot * x.value_heads + head) * DW_RECORD_BYTES);
    }

    // The first of so many rows, which may be none.
    DEVICE_MEMBER void limit(int rows) {
        if (rows < chunk) {
            rows = arch::opaque_uniform(arch::uniform_value(rows)); // or three limits are counted down through the loop
            q.limit(rows);
            k.limit(rows);
            v.limit(rows);
        }
    }
    DEVICE_MEMBER void advance(int rows) {
        q.advance();
        k.advance();
        v.advance();
        limit(rows);
    }
    // Its record.
    DEVICE_MEMBER void advance_record(int rows) {
        record.advance(record_step);
        if (rows <= 0) {
            record.limit(0);
        }
    }

    DEVICE_MEMBER void load_k(Part<Keys> &to) const {
        const u32 offset = fresh(k_offset);
        for (int b = 0; b < key_pairs(Keys); ++b) {
            to.k[b].data = k.memory.load_b128(inside(b) ? offset + 64 * b : Window::nowhere);
        }
    }
    DEVICE_MEMBER void load_q(Part<Keys> &to) const {
        const u32 offset = fresh(q_offset);
        for (int b = 0; b < key_pairs(Keys); ++b) {
            to.q[b].data = q.memory.load_b128(inside(b) ? offset + 64 * b : Window::nowhere);
        }
    }
    template <int B> DEVICE_MEMBER void load_k(Part<Keys> &to) const {
        to.k[B].data = k.memory.load_b128(inside(B) ? fresh(k_offset) + 64 * B : Window::nowhere);
    }
    template <int C> DEVICE_MEMBER void load_column(Part<Keys> &to) const {
        to.columns[0][C].data = k.memory.load_b128(columns[C]);
    }
    template <int R> DEVICE_MEMBER void load_value(Part<Keys> &to) const { to.v[R] = v.memory.load_b32(v_offset[R]); }
    DEVICE_MEMBER void load_columns(Part<Keys> &to) const {
        const u32 offset = fresh(column_offset);
        for (int p = 0; p < own_pairs(Keys); ++p) {
            for (int c = 0; c < tiles; ++c) {
                to.columns[p][c].data =
                    k.memory.load_b128(registers_are_short(Keys) ? column_of(offset, p, c) : columns[c]);
            }
        }
    }
    DEVICE_MEMBER void load_t(Part<Keys> &to) const {
        to.t[0].data = record.load_b128(first_pair, t_rows);
        to.t[1].data = record.load_b128(second_pair + pair_bytes, t_rows);
    }
    DEVICE_MEMBER void load_p(Part<Keys> &to) const {
        to.p[0].data = record.load_b128(first_pair, p_rows);
        to.p[1].data = record.load_b128(second_pair, p_second);
    }
    DEVICE_MEMBER void load_values(Part<Keys> &to) const {
        for (int r = 0; r < elements; ++r) {
            to.v[r] = v.memory.load_b32(v_offset[r]);
        }
    }
    DEVICE_MEMBER void load_factor(Part<Keys> &to, RowFactor which) const {
        to.factor[which] = bits<Tile>(record.load_b128(record_rows + which * chunk * 4 + fresh(factor_offset)));
    }
    DEVICE_MEMBER void load_decay(Part<Keys> &to) const { to.decay = bits<f32x2>(record.load_b64(record_decay)); }

  private:
    // Registers that are short do not hold the sums of an offset and constants.
    static DEVICE_MEMBER u32 fresh(u32 offset) {
        return registers_are_short(Keys) ? (u32)arch::opaque((int)offset) : offset;
    }
    // Token tile c of the wave's key pair p.
    DEVICE_MEMBER u32 column_of(u32 offset, int p, int c) const {
        return inside(p * scan_waves + arch::wave()) ? offset + 16 * c * k.stride + 64 * scan_waves * p
                                                     : Window::nowhere;
    }
    // Whether this lane's eighth of a key pair is part of the rows.
    DEVICE_MEMBER bool inside(int pair) const {
        return 32 * pair + 32 <= smallest_key_dim(Keys) || 32 * pair + 8 * arch::eighth(arch::lane()) < key_dim;
    }

    TokenRows q, k, v;
    const u64 record_step;
    const int key_dim;
    u32 q_offset, k_offset, column_offset, columns[tiles], v_offset[elements], factor_offset, first_pair, second_pair;
    int t_rows, p_rows, p_second; // offsets that all lanes share
    Window record;
};

} // namespace prefill
