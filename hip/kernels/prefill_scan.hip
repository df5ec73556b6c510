// Prefill, second part. One workgroup per (sequence, value head, slab of value columns) walks the chunks of a sequence.
// A wave owns 16 or 32 value columns and all K rows of the state, in accumulators; per chunk of 64 tokens
//   R  = K S0                                          O  = Q S0
//   X  = beta (V - exp(G) R)                           U  = X + (T - I) X
//   O  = scale (exp(G) O + diag(P) U + (P - diag) U)   S1 = exp(G_C) S0 + K^T (exp(G_C - G) U)
// with T, P and the row factors from prefill_prepare. R, X, U and S never leave the wave's registers: each, rounded, is
// the right operand of the next product. K and Q come from memory in operand order; K^T through LDS.
//
// q, k [T, HK, K], v, o [T, HV, V] 16-bit; states [N, HV, K, V] or [N, HV, V, K], f32 or bf16.
#include "../tile/prefill.h"

namespace {

using namespace tile;
using prefill::chunk;
using prefill::lower_block;
using prefill::lower_blocks;
using prefill::tiles;

constexpr int waves = 4;
constexpr int threads = waves * arch::lanes;

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

// The smallest key dimension that a bucket serves is 16 more than the next smaller bucket.
constexpr int smallest_key_dim(int bucket) {
    return bucket == 256 ? 208 : bucket == 192 ? 144 : bucket == 128 ? 112 : bucket == 96 ? 80 : 16;
}

// The rows of a 16-bit token tensor from some token on.
struct Rows {
    Window memory;
    u32 stride; // bytes
};

// One token tensor of this workgroup's sequence and head, chunk after chunk.
class Stream {
  public:
    DEVICE_MEMBER Stream(const void *p, const dw_token_strides &s, int sequence, int begin, int head)
        : base(prefill::row_address(p, s, sequence, begin, head)), stride((u32)s.token * 2) {}

    DEVICE_MEMBER Rows rows() const { return Rows{Window(base), stride}; }
    DEVICE_MEMBER Rows next_rows() const { return Rows{Window(base + (u64)stride * chunk), stride}; }
    DEVICE_MEMBER void advance() { base += (u64)stride * chunk; }

  private:
    const char *base;
    u32 stride;
};

// The state of a wave: rows in the order in which K and Q bring the key elements, `Tiles` tiles of columns; lane n of
// a tile owns columns Tiles n, Tiles n + 1 .., so that neighbours move as one word.
template <int Keys, int Tiles> struct State {
    Tile at[Keys / 16][Tiles];
};

// Where the state of a (sequence, head) lies in memory; null: nowhere.
struct StateView {
    char *base;
    int64_t key_step;
    int64_t value_step;
    bool wide; // f32, not bf16

    DEVICE_MEMBER StateView(const void *p, const dw_state_strides &s, int type, bool value_major, int sequence,
                            int head)
        : base((char *)p), key_step(value_major ? 1 : s.row), value_step(value_major ? s.row : 1),
          wide(type == DW_F32) {
        base += (wide ? 4 : 2) * (sequence * s.sequence + head * s.head);
    }
};

// Calls f(tile, register, column tile, index) for each element of the state that this lane owns and the tensor has.
template <int Keys, int Tiles, class F>
DEVICE void for_each_element(const StateView &view, int column, int key_dim, int value_dim, F f) {
    // Opaque, or the comparisons of the first use are kept in scalar registers up to the second.
    const int lane = arch::opaque(arch::lane());
    if (column >= value_dim) {
        return;
    }
#pragma unroll
    for (int t = 0; t < Keys / 16; ++t) {
        const int key = paired_row(t, lane); // and the next three: K is a multiple of 16
        if (key < key_dim) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
#pragma unroll
                for (int j = 0; j < Tiles; ++j) {
                    f(t, r, j, (key + r) * view.key_step + (column + j) * view.value_step);
                }
            }
        }
    }
}

template <int Keys, int Tiles>
DEVICE void load_state(State<Keys, Tiles> &s, const StateView &from, int column, int key_dim, int value_dim) {
    if (from.wide) {
        for_each_element<Keys, Tiles>(from, column, key_dim, value_dim, [&](int t, int r, int j, int64_t index) {
            s.at[t][j][r] = math::canonical(((const float *)from.base)[index]);
        });
    } else {
        for_each_element<Keys, Tiles>(from, column, key_dim, value_dim, [&](int t, int r, int j, int64_t index) {
            s.at[t][j][r] = Bf16::low(((const short *)from.base)[index]);
        });
    }
}

template <int Keys, int Tiles>
DEVICE void store_state(const State<Keys, Tiles> &s, const StateView &to, int column, int key_dim, int value_dim) {
    if (to.wide) {
        for_each_element<Keys, Tiles>(to, column, key_dim, value_dim, [&](int t, int r, int j, int64_t index) {
            ((float *)to.base)[index] = s.at[t][j][r];
        });
    } else {
        for_each_element<Keys, Tiles>(to, column, key_dim, value_dim, [&](int t, int r, int j, int64_t index) {
            const float value = s.at[t][j][r];
            ((short *)to.base)[index] = (short)(Bf16::round(math::canonical(value)) >> 16);
        });
    }
}

// Four token rows by four key elements of K, on their way to LDS.
struct Patch {
    i32x2 rows[4];
};

template <int Keys> struct Staging {
    static constexpr int patches = chunk / 4 * (Keys / 4);
    static constexpr int per_thread = (patches + threads - 1) / threads;
    Patch patch[per_thread];

    DEVICE_MEMBER void load(const Rows &k, int rows, int key_dim) {
        // Opaque, or what depends on the thread alone is kept in scalar registers through the loop over chunks.
        const int thread = arch::opaque(arch::thread());
        for (int p = 0; p < per_thread; ++p) {
            const int index = p * threads + thread;
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
            const int index = p * threads + thread;
            if (patches % threads != 0 && index >= patches) {
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

// A row factor for this lane's rows of row tile i.
DEVICE f32x4 row_factor(const char *record, prefill::RowFactor which, int i, int row) {
    return *(const f32x4 *)(record + prefill::record_rows + 4 * (which * chunk + 16 * i + row));
}

// S += K^T x.
template <class T, int Keys, int Tiles>
DEVICE void accumulate(State<Keys, Tiles> &state, const Transposed<Keys> &kt, int buffer,
                       const Operand (&x)[tiles][Tiles], int lane) {
    for (int t = 0; t < Keys / 16; ++t) {
        // The key element of this lane's row of the left operand: the order in which the state's rows are held.
        const int key = paired_row(t, lane % 16 / 4 * 16) + lane % 4;
        for (int c = 0; c < tiles; ++c) {
            const Operand left = kt.at[buffer][key][Transposed<Keys>::group(key, 4 * c + lane / 16)];
            for (int j = 0; j < Tiles; ++j) {
                state.at[t][j] = T::mma(left, x[c][j], state.at[t][j]);
            }
        }
    }
}

// One chunk: reads and updates the state, writes the outputs of this wave's columns.
template <class T, int Keys, int Tiles>
DEVICE void step(State<Keys, Tiles> &state, const Transposed<Keys> &kt, int buffer, const Rows &q, const Rows &k,
                 const Rows &v, const Rows &o, const char *record, int rows, int key_dim, u32 column_offset,
                 float scale, bool last) {
    const int lane = arch::opaque(arch::lane());
    const Place at(lane);

    Tile read[tiles][Tiles], out[tiles][Tiles];
    u32 q_row[tiles], k_row[tiles];
    for (int i = 0; i < tiles; ++i) {
        const int row = 16 * i + lane % 16;
        q_row[i] = row < rows ? row * q.stride + lane / 16 * 16 : Window::nowhere;
        k_row[i] = row < rows ? row * k.stride + lane / 16 * 16 : Window::nowhere;
        for (int j = 0; j < Tiles; ++j) {
            read[i][j] = Tile{};
            out[i][j] = Tile{};
        }
    }
    for (int b = 0; b < Keys / 32; ++b) {
        const bool inside = 32 * b + 32 <= smallest_key_dim(Keys) || 32 * b + lane / 16 * 8 < key_dim;
        Operand first[Tiles], second[Tiles];
        for (int j = 0; j < Tiles; ++j) {
            first[j] = rounded<T>(state.at[2 * b][j]);
            second[j] = rounded<T>(state.at[2 * b + 1][j]);
        }
        for (int i = 0; i < tiles; ++i) {
            const OperandPair kf{k.memory.load_b128(inside ? k_row[i] + 64 * b : Window::nowhere)};
            const OperandPair qf{q.memory.load_b128(inside ? q_row[i] + 64 * b : Window::nowhere)};
            for (int j = 0; j < Tiles; ++j) {
                read[i][j] = T::mma(kf.first(), first[j], read[i][j]);
                read[i][j] = T::mma(kf.second(), second[j], read[i][j]);
                out[i][j] = T::mma(qf.first(), first[j], out[i][j]);
                out[i][j] = T::mma(qf.second(), second[j], out[i][j]);
            }
        }
    }

    // X, in place of R, and its operands.
    Operand x[tiles][Tiles];
    for (int i = 0; i < tiles; ++i) {
        const f32x4 beta = row_factor(record, prefill::beta_row, i, at.row);
        const f32x4 decay = row_factor(record, prefill::read_row, i, at.row);
        for (int r = 0; r < 4; ++r) {
            const int row = 16 * i + at.row + r;
            float value[Tiles];
            Columns<T, Tiles>::load(v.memory, row < rows ? row * v.stride + column_offset : Window::nowhere, value);
            for (int j = 0; j < Tiles; ++j) {
                read[i][j][r] = beta[r] * value[j] - decay[r] * read[i][j][r];
            }
        }
        for (int j = 0; j < Tiles; ++j) {
            x[i][j] = rounded<T>(read[i][j]);
        }
    }

    // The operands of T and P, loaded any earlier, would not fit into the registers.
    arch::phase();
    // U = X + (T - I) X.
    const LowerOperands t(record + prefill::record_t);
    for (int i = 0; i < tiles; ++i) {
        for (int c = 0; c <= i; ++c) {
            for (int j = 0; j < Tiles; ++j) {
                read[i][j] = T::mma(t.block(i, c), x[c][j], read[i][j]);
            }
        }
    }

    // O = exp(G) (Q S0) + diag(P) U + (P - diag) U.
    for (int i = 0; i < tiles; ++i) {
        const f32x4 decay = row_factor(record, prefill::output_row, i, at.row);
        const f32x4 diagonal = row_factor(record, prefill::diagonal_row, i, at.row);
        for (int j = 0; j < Tiles; ++j) {
            out[i][j] = decay * out[i][j] + diagonal * read[i][j];
            x[i][j] = rounded<T>(read[i][j]);
        }
    }
    const LowerOperands p(record + prefill::record_p);
    for (int i = 0; i < tiles; ++i) {
        for (int c = 0; c <= i; ++c) {
            for (int j = 0; j < Tiles; ++j) {
                out[i][j] = T::mma(p.block(i, c), x[c][j], out[i][j]);
            }
        }
        for (int r = 0; r < 4; ++r) {
            const int row = 16 * i + at.row + r;
            float value[Tiles];
            for (int j = 0; j < Tiles; ++j) {
                value[j] = scale * out[i][j][r];
            }
            Columns<T, Tiles>::store(o.memory, row < rows ? row * o.stride + column_offset : Window::nowhere, value);
        }
    }

    // S1 = exp(G_C) S0 + K^T (exp(G_C - G) U), in units of the record.
    for (int i = 0; i < tiles; ++i) {
        const f32x4 decay = row_factor(record, prefill::write_row, i, at.row);
        for (int j = 0; j < Tiles; ++j) {
            read[i][j] *= decay;
            x[i][j] = rounded<T>(read[i][j]);
        }
    }
    const f32x2 decay = arch::uniform((const f32x2 *)(record + prefill::record_decay));
    for (int t = 0; t < Keys / 16; ++t) {
        for (int j = 0; j < Tiles; ++j) {
            state.at[t][j] *= decay.x;
        }
    }
    accumulate<T>(state, kt, buffer, x, lane);
    // What decays leaves the final state to its last chunk: there the rounding of the update is made good.
    if (last) {
        for (int i = 0; i < tiles; ++i) {
            for (int j = 0; j < Tiles; ++j) {
                x[i][j] = rounded<T>(read[i][j] - widened<T>(x[i][j]));
            }
        }
        accumulate<T>(state, kt, buffer, x, lane);
    }
    if (decay.y != 1.0f) {
        for (int t = 0; t < Keys / 16; ++t) {
            for (int j = 0; j < Tiles; ++j) {
                state.at[t][j] *= decay.y;
            }
        }
    }
}

template <class T, int Keys, int Tiles> DEVICE void scan(const dw_prefill_scan_args &x) {
    __attribute__((shared)) static Transposed<Keys> kt;
    const int sequence = arch::uniform_value(arch::workgroup() / (x.value_heads * x.slabs));
    const int head_slab = arch::workgroup() - sequence * (x.value_heads * x.slabs);
    const int head = arch::uniform_value(head_slab / x.slabs);
    const int slab = head_slab - head * x.slabs;
    const prefill::Rows range = prefill::rows_of(x.cu_seqlens, sequence, x.tokens);
    const int key_head = arch::uniform_value(prefill::key_head_of(head, x.key_heads, x.value_heads, x.flags));

    const int wave_column = (slab * waves + arch::wave()) * 16 * Tiles;
    const bool active = wave_column < x.value_dim;
    const int column = wave_column + arch::lane() % 16 * Tiles;
    const u32 column_offset = column < x.value_dim ? 2 * column : Window::nowhere;

    State<Keys, Tiles> state;
    const bool starts = x.initial_state && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence));
    for (int t = 0; t < Keys / 16; ++t) {
        for (int j = 0; j < Tiles; ++j) {
            state.at[t][j] = Tile{};
        }
    }
    if (starts) {
        const StateView from(x.initial_state, x.initial_strides, x.initial_type, x.flags & DW_INITIAL_VALUE_MAJOR,
                             sequence, head);
        load_state(state, from, column, x.key_dim, x.value_dim);
    }

    Stream q(x.q, x.q_strides, sequence, range.begin, key_head), k(x.k, x.k_strides, sequence, range.begin, key_head);
    Stream v(x.v, x.v_strides, sequence, range.begin, head), o(x.o, x.o_strides, sequence, range.begin, head);
    const char *record = (const char *)x.records +
                         ((int64_t)prefill::first_slot(range.begin, sequence) * x.value_heads + head) * DW_RECORD_BYTES;
    int left = range.end - range.begin;
    if (left > 0) {
        Staging<Keys> staging;
        staging.load(k.rows(), min_of(left, chunk), x.key_dim);
        staging.store(kt, 0);
        arch::workgroup_sync();
    }
    int buffer = 0;
#pragma unroll 1
    while (left > 0) {
        const dw_prefill_scan_args &y = arch::reread(x);
        if (active) {
            step<T, Keys, Tiles>(state, kt, buffer, q.rows(), k.rows(), v.rows(), o.rows(), record, min_of(left, chunk),
                                 y.key_dim, column_offset, y.scale, left <= chunk);
        }
        left -= chunk;
        if (left > 0) {
            Staging<Keys> staging;
            staging.load(k.next_rows(), min_of(left, chunk), y.key_dim);
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
        record += (int64_t)y.value_heads * DW_RECORD_BYTES;
    }
    const dw_prefill_scan_args &y = arch::reread(x);
    if (y.final_state) {
        const StateView to(y.final_state, y.final_strides, y.final_type, y.flags & DW_FINAL_VALUE_MAJOR, sequence,
                           head);
        store_state(state, to, column, y.key_dim, y.value_dim);
    }
}

} // namespace

#define SCAN(name, type, keys, tiles)                                                                                  \
    KERNEL(threads, 2) void dw_prefill_scan_##name##_k##keys(dw_prefill_scan_args x) { scan<type, keys, tiles>(x); }

SCAN(bf16, Bf16, 64, 2)
SCAN(bf16, Bf16, 96, 2)
SCAN(bf16, Bf16, 128, 2)
SCAN(bf16, Bf16, 192, 1)
SCAN(bf16, Bf16, 256, 1)
SCAN(f16, F16, 64, 2)
SCAN(f16, F16, 96, 2)
SCAN(f16, F16, 128, 2)
SCAN(f16, F16, 192, 1)
SCAN(f16, F16, 256, 1)
