// How prefill moves its operands on CDNA: records in operand order, K and Q straight from memory, K^T through LDS.
#pragma once

#include "prefill.h"

namespace prefill {

using namespace tile;

// Lower blocks, given transposed (an accumulator tile, rounded, is then a left operand), to a matrix of a record: pairs
// of blocks, 16 bytes a lane.
template <class T> class MatrixWriter {
  public:
    DEVICE_MEMBER explicit MatrixWriter(char *to) : to(to) {}
    DEVICE_MEMBER void put(int block, Tile transposed) { operands[block] = rounded<T>(transposed); }
    DEVICE_MEMBER void finish() const {
        for (int b = 0; b < lower_blocks; b += 2) {
            const Operand first = operands[b], second = operands[b + 1];
            *(i32x4 *)(to + b / 2 * 1024 + arch::lane() * 16) = i32x4{first.x, first.y, second.x, second.y};
        }
    }

  private:
    char *to;
    Operand operands[lower_blocks];
};

// The blocks of a matrix of a record, as left operands.
struct LowerOperands {
    OperandPair pair[lower_blocks / 2];
    DEVICE_MEMBER explicit LowerOperands(const char *matrix) {
        for (int b = 0; b < lower_blocks / 2; ++b) {
            pair[b].data = *(const i32x4 *)(matrix + b * 1024 + arch::lane() * 16);
        }
    }
    DEVICE_MEMBER Operand block(int row, int column) const {
        const int b = lower_block(row, column);
        return b % 2 ? pair[b / 2].second() : pair[b / 2].first();
    }
};

// LDS is part of the code object.
#define SCAN_SHARED_BYTES(keys)
#define SUMMARISE_SHARED_BYTES(keys)

// Workgroups of prepare that share a SIMD.
constexpr int prepare_residency = 2;

constexpr int scan_waves = 4;
constexpr int scan_threads = scan_waves * arch::lanes;
// Column tiles of a wave.
constexpr int scan_tiles(int keys) { return keys <= 128 ? 2 : 1; }

// Rows of K^T, one for each of `Keys` key elements, 64 tokens wide: a double buffer where two workgroups of a compute
// unit can have one. The 8-byte groups of a row are
// exchanged by the row's number, so that the 16 rows of an operand tile, and the rows that one store fills, lie in
// different banks.
template <int Keys> struct Transposed {
    static constexpr int buffers = Keys <= 128 ? 2 : 1;
    i32x2 at[buffers][Keys][chunk / 4];

    static DEVICE_MEMBER int group(int key, int g) {
        const int mixed = key ^ key >> 5;
        return g ^ (mixed & 3) ^ (key >> 1 & 12);
    }
};

// Where the elements of a lane lie in the contraction when operands come in pairs: the first of its four elements of
// tile 2 b + s is 32 b + 8 (lane / 16) + 4 s.
DEVICE int paired_row(int tile_index, int lane) { return tile_index / 2 * 32 + lane / 16 * 8 + tile_index % 2 * 4; }

// The key element and, from the lane's first column on, the column of an element of the state.
DEVICE int state_key(int tile_index, int element, int lane) { return paired_row(tile_index, lane) + element; }
DEVICE constexpr int state_column(int column_tile, int) { return column_tile; }
// The first of a lane's columns: those of all its tiles are neighbours.
DEVICE int first_column(int lane, int across) { return lane % 16 * across; }

// The smallest key dimension that a bucket serves is 16 more than the next smaller bucket.
constexpr int smallest_key_dim(int bucket) {
    return bucket == 256 ? 208 : bucket == 192 ? 144 : bucket == 128 ? 112 : bucket == 96 ? 80 : 16;
}

// The rows of a 16-bit token tensor from some token on.
struct TokenRows {
    Window memory;
    u32 stride; // bytes
};

// One token tensor of this workgroup's sequence and head, chunk after chunk.
class Stream {
  public:
    DEVICE_MEMBER Stream(const void *p, const dw_token_strides &s, int sequence, int begin, int head)
        : base(prefill::row_address(p, s, sequence, begin, head)), stride((u32)s.token * 2) {}

    DEVICE_MEMBER TokenRows rows() const { return TokenRows{Window(base), stride}; }
    DEVICE_MEMBER TokenRows next_rows() const { return TokenRows{Window(base + (u64)stride * chunk), stride}; }
    DEVICE_MEMBER void advance() { base += (u64)stride * chunk; }

  private:
    const char *base;
    u32 stride;
};

// Four token rows by four key elements of K, on their way to LDS.
struct Patch {
    i32x2 rows[4];
};

template <int Keys> struct Staging {
    static constexpr int patches = chunk / 4 * (Keys / 4);
    static constexpr int per_thread = (patches + scan_threads - 1) / scan_threads;
    Patch patch[per_thread];

    DEVICE_MEMBER void load(const TokenRows &k, int rows, int key_dim) {
        // Opaque, or what depends on the thread alone is kept in scalar registers through the loop over chunks.
        const int thread = arch::opaque(arch::thread());
        for (int p = 0; p < per_thread; ++p) {
            const int index = p * scan_threads + thread;
            const int key = index % (Keys / 4) * 4, token = index / (Keys / 4) * 4;
            for (int i = 0; i < 4; ++i) {
                const bool inside = token + i < rows && key < key_dim;
                patch[p].rows[i] = k.memory.load_b64(inside ? (token + i) * k.stride + 2 * key : Window::nowhere);
            }
        }
    }

    DEVICE_MEMBER void store(Transposed<Keys> &to, int buffer) const {
        const int thread = arch::opaque(arch::thread());
        for (int p = 0; p < per_thread; ++p) {
            const int index = p * scan_threads + thread;
            if (patches % scan_threads != 0 && index >= patches) {
                return;
            }
            const int key = index % (Keys / 4) * 4, group = index / (Keys / 4);
            const i32x2 *r = patch[p].rows;
            for (int pair = 0; pair < 2; ++pair) {
                const u32 a = pair ? r[0].y : r[0].x, b = pair ? r[1].y : r[1].x;
                const u32 c = pair ? r[2].y : r[2].x, d = pair ? r[3].y : r[3].x;
                const int low = key + 2 * pair;
                to.at[buffer][low][Transposed<Keys>::group(low, group)] =
                    i32x2{arch::low_halves(a, b), arch::low_halves(c, d)};
                to.at[buffer][low + 1][Transposed<Keys>::group(low + 1, group)] =
                    i32x2{arch::high_halves(a, b), arch::high_halves(c, d)};
            }
        }
    }
};

template <class T, int Tiles> struct Columns;

// V and O elements of one row: two neighbouring columns in a word, or one column.
template <class T> struct Columns<T, 2> {
    static DEVICE_MEMBER void load(const Window &w, u32 offset, float (&x)[2]) {
        const int pair = w.load_b32(offset);
        x[0] = T::low(pair);
        x[1] = T::high(pair);
    }
    static DEVICE_MEMBER void store(const Window &w, u32 offset, const float (&x)[2]) {
        w.store_b32(offset, T::pack(x[0], x[1]));
    }
};
template <class T> struct Columns<T, 1> {
    static DEVICE_MEMBER void load(const Window &w, u32 offset, float (&x)[1]) { x[0] = T::low(w.load_b16(offset)); }
    static DEVICE_MEMBER void store(const Window &w, u32 offset, const float (&x)[1]) {
        w.store_b16(offset, T::pack(x[0], 0.0f));
    }
};

// One chunk for the columns of one wave; without `Outputs`, only what the state takes.
template <class T, int Keys, bool Outputs = true> class Chunk {
  public:
    static constexpr int across = scan_tiles(Keys);
    static constexpr int key_tiles = Keys / 16;
    static constexpr bool asynchronous = false;
    typedef Tile State[key_tiles][across];
    typedef Tile Slab[tiles][across];
    typedef Operand SlabOperands[tiles][across];

    DEVICE_MEMBER Chunk(const Transposed<Keys> &kt, int buffer, TokenRows q, TokenRows k, TokenRows v, TokenRows o,
                        const char *record, int rows, int key_dim, u32 column_offset)
        : kt(kt), buffer(buffer), q(q), k(k), v(v), o(o), record(record), rows(rows), key_dim(key_dim),
          column_offset(column_offset), lane(arch::opaque(arch::lane())), at(lane) {}

    // R = K S0, and for outputs O = Q S0.
    template <class Next> DEVICE_MEMBER void read_state(Slab &read, Slab &out, const State &state, const Next &) const {
        arch::OperandRows q_row[tiles], k_row[tiles];
        for (int i = 0; i < tiles; ++i) {
            if constexpr (Outputs) {
                q_row[i] = arch::OperandRows(i, rows, q.stride, lane);
            }
            k_row[i] = arch::OperandRows(i, rows, k.stride, lane);
            for (int j = 0; j < across; ++j) {
                read[i][j] = Tile{};
                out[i][j] = Tile{};
            }
        }
        for (int b = 0; b < Keys / 32; ++b) {
            const bool inside = 32 * b + 32 <= smallest_key_dim(Keys) || 32 * b + arch::eighth(lane) * 8 < key_dim;
            Operand first[across], second[across];
            for (int j = 0; j < across; ++j) {
                first[j] = rounded<T>(state[2 * b][j]);
                second[j] = rounded<T>(state[2 * b + 1][j]);
            }
            for (int i = 0; i < tiles; ++i) {
                const OperandPair kf = k_row[i].load(k.memory, 32 * b, inside);
                OperandPair qf;
                if constexpr (Outputs) {
                    qf = q_row[i].load(q.memory, 32 * b, inside);
                }
                for (int j = 0; j < across; ++j) {
                    read[i][j] = T::mma(kf.first(), first[j], read[i][j]);
                    read[i][j] = T::mma(kf.second(), second[j], read[i][j]);
                    if constexpr (Outputs) {
                        out[i][j] = T::mma(qf.first(), first[j], out[i][j]);
                        out[i][j] = T::mma(qf.second(), second[j], out[i][j]);
                    }
                }
            }
        }
    }

    // U += (T - I) X, O += (P - diag(P)) U.
    template <class Next> DEVICE_MEMBER void multiply_t(Slab &u, const SlabOperands &x, Slab &, const Next &) const {
        // The operands, loaded any earlier, would not fit into the registers.
        arch::phase();
        multiply_lower(u, record + record_t, x);
    }
    DEVICE_MEMBER void multiply_p(Slab &out, const SlabOperands &u) const { multiply_lower(out, record + record_p, u); }

    // S += K^T x.
    DEVICE_MEMBER void accumulate(State &state, const SlabOperands &x) const {
        for (int t = 0; t < Keys / 16; ++t) {
            // The key element of this lane's row of the left operand: the order in which the state's rows are held.
            const int key = paired_row(t, lane % 16 / 4 * 16) + lane % 4;
            for (int c = 0; c < tiles; ++c) {
                const Operand left = kt.at[buffer][key][Transposed<Keys>::group(key, 4 * c + lane / 16)];
                for (int j = 0; j < across; ++j) {
                    state[t][j] = T::mma(left, x[c][j], state[t][j]);
                }
            }
        }
    }

    // Products are complete when they are written down.
    DEVICE_MEMBER void finish_outputs(Slab &, const SlabOperands &) const {}
    DEVICE_MEMBER void finish_state(State &, const SlabOperands &) const {}

    // Rows of row tile i of V, and, scaled, to O.
    DEVICE_MEMBER void load_values(int i, Tile (&x)[across]) const {
        for (int r = 0; r < elements; ++r) {
            const int row = 16 * i + at.row(r);
            float value[across];
            Columns<T, across>::load(v.memory, row < rows ? row * v.stride + column_offset : Window::nowhere, value);
            for (int j = 0; j < across; ++j) {
                x[j][r] = value[j];
            }
        }
    }
    DEVICE_MEMBER void store_outputs(int i, const Tile (&x)[across], float scale) const {
        for (int r = 0; r < elements; ++r) {
            const int row = 16 * i + at.row(r);
            float value[across];
            for (int j = 0; j < across; ++j) {
                value[j] = scale * x[j][r];
            }
            Columns<T, across>::store(o.memory, row < rows ? row * o.stride + column_offset : Window::nowhere, value);
        }
    }

    DEVICE_MEMBER Tile factor(RowFactor which, int i) const {
        return rows_at((const float *)(record + record_rows) + which * chunk + 16 * i, at);
    }
    DEVICE_MEMBER f32x2 decay() const { return arch::uniform((const f32x2 *)(record + record_decay)); }

  private:
    DEVICE_MEMBER void multiply_lower(Slab &out, const char *matrix, const SlabOperands &x) const {
        const LowerOperands lower(matrix);
        for (int i = 0; i < tiles; ++i) {
            for (int c = 0; c <= i; ++c) {
                for (int j = 0; j < across; ++j) {
                    out[i][j] = T::mma(lower.block(i, c), x[c][j], out[i][j]);
                }
            }
        }
    }

    const Transposed<Keys> &kt;
    const int buffer;
    const TokenRows q, k, v, o;
    const char *const record;
    const int rows, key_dim;
    const u32 column_offset;
    const int lane;
    const Place at;
};

// The chunks of a segment, one after the other. While a chunk is worked on, nothing of the next is held; K^T of the
// next goes to LDS at its end.
template <class T, int Keys, bool Outputs = true> class Chunks {
  public:
    DEVICE_MEMBER Chunks(const dw_prefill_scan_args &x, const Segment &s, int head, int key_head, int,
                         u32 column_offset)
        : kt(memory()), q(x.q, x.q_strides, s.sequence, s.begin, key_head),
          k(x.k, x.k_strides, s.sequence, s.begin, key_head), v(x.v, x.v_strides, s.sequence, s.begin, head),
          o(x.o, x.o_strides, s.sequence, s.begin, head),
          record((const char *)x.records + ((int64_t)s.slot * x.value_heads + head) * DW_RECORD_BYTES),
          column_offset(column_offset), left(s.end - s.begin) {
        if (left > 0) {
            Staging<Keys> staging;
            staging.load(k.rows(), min_of(left, chunk), x.key_dim);
            staging.store(kt, 0);
            arch::workgroup_sync();
        }
    }

    DEVICE_MEMBER bool more() const { return left > 0; }
    DEVICE_MEMBER bool last() const { return left <= chunk; }
    // A wave without columns only helps to move K^T.
    static DEVICE_MEMBER bool works(bool has_columns) { return has_columns; }
    DEVICE_MEMBER void wait() {}
    struct Next {
        DEVICE_MEMBER Next(Chunks &, const dw_prefill_scan_args &) {}
    };

    DEVICE_MEMBER Chunk<T, Keys, Outputs> current(const dw_prefill_scan_args &x) const {
        return Chunk<T, Keys, Outputs>(kt, buffer, q.rows(), k.rows(), v.rows(), o.rows(), record, min_of(left, chunk),
                                       x.key_dim, column_offset);
    }

    DEVICE_MEMBER void advance(const dw_prefill_scan_args &x) {
        left -= chunk;
        if (left > 0) {
            Staging<Keys> staging;
            staging.load(k.next_rows(), min_of(left, chunk), x.key_dim);
            if (Transposed<Keys>::buffers == 1) {
                arch::workgroup_sync();
            } else {
                buffer ^= 1;
            }
            staging.store(kt, buffer);
        }
        arch::workgroup_sync();
        q.advance();
        k.advance();
        v.advance();
        o.advance();
        record += (int64_t)x.value_heads * DW_RECORD_BYTES;
    }

  private:
    static DEVICE_MEMBER Transposed<Keys> &memory() {
        __attribute__((shared)) static Transposed<Keys> kt;
        return kt;
    }

    Transposed<Keys> &kt;
    Stream q, k, v, o;
    const char *record;
    const u32 column_offset;
    int left;
    int buffer = 0;
};

} // namespace prefill
