// How prefill moves its operands on sm_90a: K, Q, T, P and the row factors of a chunk are copied to shared memory while
// chunks before it are worked on, and every warp reads its operands there; K^T is read from the copy of K.
#pragma once

#include "prefill.h"

namespace prefill {

using namespace tile;

// Bytes of a 16x16 block of T or P: in each half, 8 columns wide, its rows one after the other.
constexpr int block_bytes = 16 * 16 * 2;

// Lower blocks of T and P, given transposed (an accumulator tile, rounded, has the rows of the matrix in consecutive
// words), to a record: T, then P.
template <class T> class RecordWriter {
  public:
    DEVICE_MEMBER explicit RecordWriter(char *record) : to(record + record_matrices + arch::lane() * 4) {}
    DEVICE_MEMBER void put_t(int row, int column, Tile transposed) const { put(lower_block(row, column), transposed); }
    DEVICE_MEMBER void put_p(int row, int column, Tile transposed) const {
        put(lower_blocks + lower_block(row, column), transposed);
    }

  private:
    DEVICE_MEMBER void put(int block, Tile transposed) const {
        const Operand operand = rounded<T>(transposed);
        for (int i = 0; i < 4; ++i) {
            *(int *)(to + block * block_bytes + i * 128) = operand[i];
        }
    }

    char *const to;
};

// Workgroups of prepare that share a multiprocessor.
constexpr int prepare_residency = 6;

constexpr int scan_waves = 4;
constexpr int scan_threads = scan_waves * arch::lanes;
// Column tiles of a wave.
constexpr int scan_tiles(int) { return 1; }
// The first value column of a wave.
DEVICE int first_wave_column(int slab, int across) { return (slab * scan_waves + arch::wave()) * 16 * across; }

// The key element and, from the lane's first column on, the column of an element of the state: a lane's columns are
// neighbours.
DEVICE int state_key(int tile_index, int element, int lane) { return 16 * tile_index + Place(lane).row(element); }
DEVICE constexpr int state_column(int, int element) { return element / 2 % 2; }
DEVICE int first_column(int lane, int) { return lane / 4 * 2; }

// Shared memory of the matrix unit: rows of 128 bytes, whose 16-byte groups are exchanged by the row's number, so that
// eight rows of one group lie in different banks. A matrix that is wider consists of panels.
constexpr int panel_bytes = chunk * 128;
DEVICE constexpr u32 swizzled(int row, int group) { return row * 128 + ((group ^ (row & 7)) << 4); }

// One chunk in shared memory, Q and P only for outputs.
template <int Keys, bool Outputs> struct Stage {
    static constexpr int panels = (Keys + 63) / 64;
    static constexpr u32 k = 0;
    static constexpr u32 q = k + panels * panel_bytes;
    static constexpr u32 t = q + (Outputs ? panels * panel_bytes : 0);
    static constexpr u32 p = t + panel_bytes;
    static constexpr u32 rows = p + (Outputs ? panel_bytes : 0);
    static constexpr u32 bytes = rows + 2048; // a multiple of 1024, with which the pattern of the groups repeats
    static constexpr int count = 2;
    static constexpr u32 dynamic_bytes = count * bytes + scan_waves * chunk * 32 + 1024; // V; alignment to 1024
};
static_assert(row_factors * chunk * 4 + 16 <= 2048, "row factors fit");

extern "C" SHARED __attribute__((aligned(16))) char dw_dynamic_shared[];

// What the host has to ask for at a launch; the tests compare it with src/launch.rs.
#define SCAN_SHARED_BYTES(keys)                                                                                        \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_scan_shared_bytes_k##keys =                          \
        prefill::Stage<keys, true>::dynamic_bytes;
#define SUMMARISE_SHARED_BYTES(keys)                                                                                   \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_summarise_shared_bytes_k##keys =                     \
        prefill::Stage<keys, false>::dynamic_bytes;

using arch::copy_async;
using arch::shared_address;
using arch::store_shared;

// One 16-bit token tensor of this workgroup's sequence and head, from some chunk on.
struct Stream {
    const char *base;
    u32 stride; // bytes

    DEVICE_MEMBER Stream(const void *p, const dw_token_strides &s, int sequence, int begin, int head)
        : base(row_address(p, s, sequence, begin, head)), stride((u32)s.token * 2) {}
    DEVICE_MEMBER void advance() { base += (u64)stride * chunk; }
    DEVICE_MEMBER bool aligned(u32 bytes) const { return (((u32)(u64)base | stride) & (bytes - 1)) == 0; }
};

// V of one warp's 16 columns in shared memory: rows of 32 bytes, whose 16-byte halves are exchanged between neighbours
// by the row's number, so that the words of four even or odd rows lie in different banks.
struct Values {
    static constexpr u32 bytes = chunk * 32;
    static DEVICE_MEMBER u32 half_row(int row, int half) { return (row * 2 + half ^ (row >> 2 & 1) << 1) << 4; }
};

// Whether addresses are computed anew for every chunk, not held.
constexpr bool registers_are_short(int keys) { return keys > 128; }

// Accumulators as the asynchronous products name them.
template <int Tiles> struct Accumulators {
    float at[8 * Tiles];

    Accumulators() = default;
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

template <int N> DEVICE void pin(Operand (&x)[N][1]) {
    for (int i = 0; i < N; ++i) {
        int word[4] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w};
        for (int w = 0; w < 4; ++w) {
            arch::pin(word[w]);
        }
        x[i][0] = Operand{word[0], word[1], word[2], word[3]};
    }
}

// One chunk for the columns of one warp; without `Outputs`, only what the state takes. The four warps multiply
// together.
template <class T, int Keys, bool Outputs = true> class Chunk {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    static constexpr int across = 1;
    static constexpr int row_tiles = tiles;
    static constexpr int key_tiles = Stage::panels * 4;
    static constexpr bool asynchronous = true;
    typedef Tile State[key_tiles][across];
    typedef Tile Slab[tiles][across];
    typedef Operand SlabOperands[tiles][across];

    DEVICE_MEMBER Chunk(const char *memory, const char *values, const Stream &o, int rows, u32 column_offset)
        : memory(memory), values(values), o(o), rows(rows), column_offset(column_offset),
          at(arch::opaque(arch::lane()) & (arch::lanes - 1)), shared(arch::described(shared_address(memory))) {}

    // R = K S0, the next chunk is copied, and O = Q S0, which is complete after multiply_t.
    template <class Next> DEVICE_MEMBER void read_state(Slab &read, Slab &out, const State &state, const Next &next) {
        Accumulators<tiles> r, o;
        if constexpr (registers_are_short(Keys)) {
            next.load();
            for (int panel = 0; panel < Keys / 16; panel += held) {
                round_state(state, panel);
                read_tiles(r, Stage::k, panel);
                if constexpr (Outputs) {
                    read_tiles(o, Stage::q, panel);
                }
                arch::await_products<0>();
                r.pin();
                if constexpr (Outputs) {
                    o.pin();
                }
                pin(reads);
            }
        } else {
            round_state(state, 0);
            read_tiles(r, Stage::k, 0);
            if constexpr (Outputs) {
                read_tiles(o, Stage::q, 0);
            }
            next.load();
            arch::await_products<Outputs ? 1 : 0>();
            r.pin();
        }
        r.to(read);
        if constexpr (Outputs) {
            o.to(out);
        }
    }

    // U += (T - I) X: all blocks, those above the diagonal are zero.
    template <class Next> DEVICE_MEMBER void multiply_t(Slab &u, SlabOperands &x, Slab &out, const Next &next) {
        Accumulators<tiles> a(u), o;
        if constexpr (Outputs) {
            o = Accumulators<tiles>(out);
        }
        multiply_lower(a, Stage::t, x);
        next.load_values();
        arch::await_products<0>();
        a.pin();
        pin(x);
        pin(reads);
        a.to(u);
        if constexpr (Outputs) {
            o.pin();
            o.to(out);
        }
    }

    // O += (P - diag(P)) U, complete after finish_outputs.
    DEVICE_MEMBER void multiply_p(Slab &out, SlabOperands &u) const {
        Accumulators<tiles> a(out);
        multiply_lower(a, Stage::p, u);
        a.to(out);
    }
    DEVICE_MEMBER void finish_outputs(Slab &out, SlabOperands &u) const {
        Accumulators<tiles> a(out);
        arch::await_products<1>();
        a.pin();
        pin(u);
        a.to(out);
    }

    // S += K^T x, complete after finish_state.
    DEVICE_MEMBER void accumulate(State &state, SlabOperands &x) const {
        Accumulators<key_tiles> a(state);
        a.pin();
        pin(x);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            accumulate_panels<0>(a, x[c][0], c);
        }
        arch::commit_products();
        a.to(state);
    }
    DEVICE_MEMBER void finish_state(State &state, SlabOperands &x) const {
        Accumulators<key_tiles> a(state);
        arch::await_products<0>();
        a.pin();
        pin(x);
        a.to(state);
    }

    // Rows of row tile i of V, and, scaled, to O.
    DEVICE_MEMBER void load_values(int i, Tile (&x)[across]) const {
        int w[4];
        for (int r = 0; r < 4; ++r) {
            const int row = at.row(r / 2 * 4 + r % 2), word = at.column(0);
            w[r] = *(const int *)(values + i * 16 * 32 + Values::half_row(row, word / 4) + word % 4 * 4);
        }
        x[0] = Tile{T::low(w[0]), T::low(w[1]), T::high(w[0]), T::high(w[1]),
                    T::low(w[2]), T::low(w[3]), T::high(w[2]), T::high(w[3])};
    }
    DEVICE_MEMBER void store_outputs(int i, const Tile (&x)[across], float scale) const {
        const Window to(o.base);
        u32 offset[4];
        int pair[4];
        for (int r = 0; r < 4; ++r) {
            const int e = r / 2 * 4 + r % 2, row = 16 * i + at.row(e);
            offset[r] = row < rows ? row * o.stride + column_offset : Window::nowhere;
            pair[r] = T::pack(scale * x[0][e], scale * x[0][e + 2]);
        }
        if (o.aligned(4)) {
            for (int r = 0; r < 4; ++r) {
                to.store_b32(offset[r], pair[r]);
            }
        } else {
            for (int r = 0; r < 4; ++r) {
                to.store_b16(offset[r], pair[r]);
                to.store_b16(offset[r] + 2, pair[r] >> 16);
            }
        }
    }

    DEVICE_MEMBER Tile factor(RowFactor which, int i) const {
        return rows_at((const float *)(memory + Stage::rows) + which * chunk + 16 * i, at);
    }
    DEVICE_MEMBER f32x2 decay() const { return *(const f32x2 *)(memory + Stage::rows + row_factors * chunk * 4); }

  private:
    // Column tile t of a matrix in shared memory, and 16 rows of a panel of 64 columns.
    DEVICE_MEMBER u64 column_tile(u32 matrix, int t) const {
        return shared + ((matrix + t / 4 * panel_bytes + t % 4 * 32) >> 4);
    }
    DEVICE_MEMBER u64 row_tile(u32 matrix, int panel, int i) const {
        return shared + ((matrix + panel * panel_bytes + i * 16 * 128) >> 4);
    }

    // The operands of tiles of the state from `first` on, as many as are held.
    DEVICE_MEMBER void round_state(const State &state, int first) {
        for (int t = 0; t < held; ++t) {
            reads[t][0] = rounded<T>(state[first + t][0]);
        }
        pin(reads);
    }
    // a (+)= the matrix's column tiles from `first` on, times these operands.
    DEVICE_MEMBER void read_tiles(Accumulators<tiles> &a, u32 matrix, int first) {
        arch::begin_products();
        for (int t = 0; t < held; ++t) {
            T::template multiply_async<false>(a.at, reads[t][0], column_tile(matrix, first + t), first + t > 0);
        }
        arch::commit_products();
    }
    DEVICE_MEMBER void multiply_lower(Accumulators<tiles> &a, u32 matrix, SlabOperands &x) const {
        a.pin();
        pin(x);
        arch::begin_products();
        for (int c = 0; c < tiles; ++c) {
            T::template multiply_async<false>(a.at, x[c][0], column_tile(matrix, c), true);
        }
        arch::commit_products();
    }
    // Token tile c of K^T, 64 key elements at a time.
    template <int Panel> DEVICE_MEMBER void accumulate_panels(Accumulators<key_tiles> &a, Operand x, int c) const {
        if constexpr (Panel < Stage::panels) {
            float(&panel)[32] = *(float(*)[32])(a.at + 32 * Panel);
            T::template multiply_async<true>(panel, x, row_tile(Stage::k, Panel, c), true);
            accumulate_panels<Panel + 1>(a, x, c);
        }
    }

    const char *const memory, *const values;
    const Stream o;
    const int rows;
    const u32 column_offset;
    const Place at;
    const u64 shared;
    static constexpr int held = registers_are_short(Keys) ? 4 : Keys / 16;
    Operand reads[held][1];
};

// The chunks of a segment, one after the other, each in its stage of a ring.
template <class T, int Keys, bool Outputs = true> class Chunks {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    DEVICE_MEMBER Chunks(const dw_prefill_scan_args &x, const Segment &s, int head, int key_head, int wave_column,
                         u32 column_offset)
        : memory(ring()), q(x.q, x.q_strides, s.sequence, s.begin, key_head),
          k(x.k, x.k_strides, s.sequence, s.begin, key_head), v(x.v, x.v_strides, s.sequence, s.begin, head),
          o(x.o, x.o_strides, s.sequence, s.begin, head),
          record((const char *)x.records + ((int64_t)s.slot * x.value_heads + head) * DW_RECORD_BYTES),
          column_offset(column_offset), has_columns(wave_column < x.value_dim), left(s.end - s.begin) {
        v.base += 2 * wave_column;
        clear_upper_blocks();
        copy(x, 0, left);
        copy_values(left);
    }

    // Every warp has all rows of the state.
    DEVICE_MEMBER void begin(const typename Chunk<T, Keys, Outputs>::State &) const {}
    DEVICE_MEMBER float scale(const dw_prefill_scan_args &x) const { return x.scale; }
    DEVICE_MEMBER bool more() const { return left > 0; }
    DEVICE_MEMBER bool last() const { return left <= chunk; }
    // Every warp takes its part in the copies and the products.
    static DEVICE_MEMBER bool works(bool) { return true; }

    // The chunk that is next has arrived; the one before it is no longer read.
    DEVICE_MEMBER void wait() {
        arch::await_copies();
        arch::publish_shared();
        arch::workgroup_sync();
    }

    // Copies of the next chunk, while this one is multiplied, and of its V, when that of this one is used.
    class Next {
      public:
        DEVICE_MEMBER Next(Chunks &chunks, const dw_prefill_scan_args &x) : chunks(chunks), x(x) {}
        DEVICE_MEMBER void load() const { chunks.copy(x, chunks.stage ^ 1, chunks.left - chunk); }
        DEVICE_MEMBER void load_values() const {
            arch::wave_sync();
            chunks.v.advance();
            chunks.copy_values(chunks.left - chunk);
        }

      private:
        Chunks &chunks;
        const dw_prefill_scan_args &x;
    };

    DEVICE_MEMBER Chunk<T, Keys, Outputs> current(const dw_prefill_scan_args &) const {
        return Chunk<T, Keys, Outputs>(memory + stage * Stage::bytes, values(), o, left, column_offset);
    }

    DEVICE_MEMBER void advance(const dw_prefill_scan_args &) {
        left -= chunk;
        o.advance();
        stage ^= 1;
    }

  private:
    static DEVICE_MEMBER char *ring() { return dw_dynamic_shared + (-shared_address(dw_dynamic_shared) & 1023); }

    // The blocks of T and P above the diagonal, which no copy touches.
    DEVICE_MEMBER void clear_upper_blocks() const {
        const int row = arch::lane() % 16, half = arch::lane() / 16;
        for (int i = 0; i < Stage::count; ++i) {
            for (int block = arch::thread() / arch::lanes; block < tiles * tiles; block += scan_waves) {
                if (block / tiles < block % tiles) {
                    const u32 at = shared_address(memory) + i * Stage::bytes +
                                   swizzled(block / tiles * 16 + row, block % tiles * 2 + half);
                    store_shared(at + Stage::t, i32x4{});
                    if constexpr (Outputs) {
                        store_shared(at + Stage::p, i32x4{});
                    }
                }
            }
        }
    }

    // Starts the copies of a chunk to a stage, if it has rows.
    DEVICE_MEMBER void copy(const dw_prefill_scan_args &x, int to_stage, int rows) {
        if (rows > 0) {
            const u32 to = shared_address(memory) + to_stage * Stage::bytes;
            if (k.aligned(16) && (!Outputs || q.aligned(16))) {
                copy_rows(to + Stage::k, k, rows, x.key_dim);
                if constexpr (Outputs) {
                    copy_rows(to + Stage::q, q, rows, x.key_dim);
                }
            } else {
                copy_unaligned_rows(to + Stage::k, k, rows, x.key_dim);
                if constexpr (Outputs) {
                    copy_unaligned_rows(to + Stage::q, q, rows, x.key_dim);
                }
            }
            copy_record(to);
            k.advance();
            q.advance();
            record += (int64_t)x.value_heads * DW_RECORD_BYTES;
        }
    }

    DEVICE_MEMBER char *values() const {
        const int thread = arch::opaque(arch::thread()) & (scan_threads - 1);
        return memory + Stage::count * Stage::bytes + thread / arch::lanes * Values::bytes;
    }
    // A warp copies its own columns of V; `rows` are left.
    DEVICE_MEMBER void copy_values(int rows) const {
        const int lane = arch::opaque(arch::lane()) & (arch::lanes - 1), first = lane / 2, half = lane % 2;
        const u32 to = shared_address(values());
        if (v.aligned(16)) {
            for (int i = 0; i < tiles; ++i) {
                const int row = 16 * i + first;
                copy_async(to + i * 16 * 32 + Values::half_row(first, half), v.base + (row * v.stride + half * 16),
                           has_columns && row < rows);
            }
        } else {
#pragma unroll 1
            for (int row = first; row < chunk; row += 16) {
                const u32 offset = has_columns && row < rows ? row * v.stride + half * 16 : Window::nowhere;
                store_shared(to + Values::half_row(row, half), Window(v.base).gather_b128(offset));
            }
        }
    }

    DEVICE_MEMBER void copy_rows(u32 to, const Stream &from, int rows, int key_dim) const {
        constexpr int rows_at_once = scan_threads / 8;
        const int thread = arch::opaque(arch::thread()) & (scan_threads - 1), group = thread % 8, first = thread / 8;
        for (int panel = 0; panel < Stage::panels; ++panel) {
            const bool inside = 64 * panel + 8 * group < key_dim;
            for (int i = 0; i < chunk / rows_at_once; ++i) {
                const int row = i * rows_at_once + first;
                copy_async(to + panel * panel_bytes + i * rows_at_once * 128 + swizzled(first, group),
                           from.base + (row * from.stride + panel * 128 + group * 16), inside && row < rows);
            }
        }
    }
    // Rows at any address, element by element: correct, not fast.
    DEVICE_MEMBER void copy_unaligned_rows(u32 to, const Stream &from, int rows, int key_dim) const {
        const int thread = arch::opaque(arch::thread()) & (scan_threads - 1), group = thread % 8;
#pragma unroll 1
        for (int row = thread / 8; row < chunk; row += scan_threads / 8) {
#pragma unroll 1
            for (int panel = 0; panel < Stage::panels; ++panel) {
                const bool inside = row < rows && 64 * panel + 8 * group < key_dim;
                const u32 offset = row * from.stride + panel * 128 + group * 16;
                store_shared(to + panel * panel_bytes + swizzled(row, group),
                             Window(from.base).gather_b128(inside ? offset : Window::nowhere));
            }
        }
    }

    // A warp copies a block of T or P at a time.
    DEVICE_MEMBER void copy_record(u32 to) const {
        const int thread = arch::opaque(arch::thread()) & (scan_threads - 1), lane = thread % arch::lanes,
                  warp = thread / arch::lanes;
        constexpr int blocks = Outputs ? 2 * lower_blocks : lower_blocks;
        for (int i = 0; i < (blocks + scan_waves - 1) / scan_waves; ++i) {
            const int block = i * scan_waves + warp;
            if (blocks % scan_waves != 0 && block >= blocks) {
                break;
            }
            const int lower = block < lower_blocks ? block : block - lower_blocks;
            const int row = lower >= 6 ? 3 : lower >= 3 ? 2 : lower >= 1 ? 1 : 0, column = lower - lower_block(row, 0);
            const u32 at = to + (block < lower_blocks ? Stage::t : Stage::p);
            copy_async(at + swizzled(16 * row + lane % 16, 2 * column + lane / 16),
                       record + record_matrices + block * block_bytes + lane * 16, true);
        }
        if (thread * 16 < row_factors * chunk * 4 + 16) {
            copy_async(to + Stage::rows + thread * 16, record + record_rows + thread * 16, true);
        }
    }

    char *const memory;
    Stream q, k, v, o;
    const char *record;
    const u32 column_offset;
    const bool has_columns;
    int left;
    int stage = 0;
};

} // namespace prefill
