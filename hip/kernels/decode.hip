// The recurrence, token after token, for batches of sequences of the same few tokens (one, or a handful to verify). Per
// value head, with decay = exp(g), and k and q divided by their norms where the layer asks for it:
//   d = beta (v - decay S^T k)    S <- decay S + k d^T    o = scale S^T q
// in f32, o and the stored state rounded once. With S the state before the token, o = scale (decay S^T q + (k q) d), so
// that S^T k, S^T q and the three products of k and q are sums over keys of one kind, taken in one go.
//
// A workgroup owns 32 value columns of a (sequence, value head): all of the state that it works on is in registers from
// the first token to the last, loaded and stored once, 16 bytes a thread, along the memory's rows. Which elements a
// thread has, and so the order of sums, depends on the state's layout and type, but not on the batch: neither do the
// bits.
#include "../tile/prefill.h"
#include "../tile/state.h"

namespace {

constexpr int threads = 64;
constexpr int columns = 32; // of so many threads
constexpr int waves = threads / arch::lanes;

// With the gated norm in the output's place, which takes whole rows: teams of as many threads and columns as a
// workgroup has without.
constexpr int row_teams = 4;
constexpr int row_dim = row_teams * columns;
constexpr int row_threads = row_teams * threads;

DEVICE int member() { return arch::thread() % threads; }
DEVICE int team() { return arch::uniform_value(arch::thread() / threads); }

// The part of the state that a thread owns: in each `step` keys `run` consecutive ones, of `across` columns. The
// threads of a group have the same keys.
template <bool Wide, bool ValueMajor, int Keys> struct Share {
    static constexpr int piece = state::piece_bytes / (Wide ? 4 : 2);
    static constexpr int run = ValueMajor ? piece : 4;
    static constexpr int across = ValueMajor ? 4 : piece;
    static constexpr int groups = threads * across / columns;
    static constexpr int step = groups * run;
    static constexpr int steps = Keys / step;
    static constexpr int pieces = ValueMajor ? across : run; // of a step
    static constexpr int column_stride = ValueMajor ? threads / groups : 1;

    // Computed anew wherever it is used: nothing of it is worth a register.
    static DEVICE_MEMBER int group() {
        const u32 thread = arch::opaque(member());
        return ValueMajor ? thread % groups : thread / (threads / groups);
    }
    // Within the workgroup's columns.
    static DEVICE_MEMBER int column(int i) {
        const u32 thread = arch::opaque(member());
        return ValueMajor ? thread / groups + i * column_stride : thread % (threads / groups) * across + i;
    }
};

// Sums over keys: of each group, for u = S^T k and w = S^T q of all columns, then k k, q q, k q.
constexpr int most_groups = 16, dots = 2 * columns, sums_row = dots + 4;
constexpr int most_keys = 256;
struct Exchange {
    i32x4 q[most_keys / 8], k[most_keys / 8]; // of a token, zeros beyond its keys
    float sums[most_groups][sums_row];
    float d[columns];
};
static_assert(threads * 8 == 2 * most_keys, "a thread copies eight numbers of q or of k");

// What a workgroup works on.
struct Place {
    int sequence;
    int head;
    int key_head;
    int column; // its first one
};

// The value heads and slabs of a (sequence, key head) read the same q and k.
DEVICE Place place_of(const dw_decode_args &x) {
    const int group = x.value_heads / x.key_heads;
    const prefill::Dealt to = prefill::dealt(arch::workgroup(), x.batch * x.key_heads, group * x.slabs, x.dies);
    const int sequence = arch::uniform_value(to.unit / x.key_heads), key_head = to.unit - sequence * x.key_heads;
    const int of_group = arch::uniform_value(to.member / x.slabs);
    const int head = x.flags & DW_TILED_HEADS ? of_group * x.key_heads + key_head : key_head * group + of_group;
    return Place{sequence, head, key_head, (to.member - of_group * x.slabs + team()) * columns};
}

DEVICE int64_t token_offset(const dw_token_strides &strides, int sequence, int token, int head) {
    return sequence * strides.sequence + token * strides.token + head * strides.head;
}

// What a thread reads of a token, as it lies in memory and so not waited for: eight numbers of q or, in the other half
// of the threads, of k; v of column `thread`; the gates.
struct Token {
    i32x4 keys;
    int v, g, beta;
    int a_log, dt_bias; // with raw gates
    int z;              // of the norm
};

DEVICE int load_raw(const void *p, int64_t index, int type) {
    return type == DW_F32 ? ((const int *)p)[index] : ((const unsigned short *)p)[index];
}
DEVICE float widen_raw(int raw, int type) {
    return type == DW_F32 ? bits<float>(raw) : type == DW_BF16 ? tile::Bf16::low(raw) : tile::F16::low(raw);
}

DEVICE bool has_keys(int key_dim) { return member() % (threads / 2) * 8 < key_dim; }

template <bool Norm> DEVICE Token load_token(const dw_decode_args &x, const Place &at, int t) {
    Token out{};
    const int token = at.sequence * x.tokens + t;
    const bool of_k = member() >= threads / 2;
    const char *q = (const char *)x.q + 2 * token_offset(x.q_strides, at.sequence, token, at.key_head);
    const char *k = (const char *)x.k + 2 * token_offset(x.k_strides, at.sequence, token, at.key_head);
    const char *row = of_k ? k : q;
    // Threads beyond the keys read the first ones, which are not theirs: a branch would wait for what it loads.
    const int piece = has_keys(x.key_dim) ? member() % (threads / 2) * 16 : 0;
    out.keys = state::load_piece<false>(row + piece, arch::in_one_access(row));
    const int column = at.column + member() % columns;
    const unsigned short *v = (const unsigned short *)x.v + token_offset(x.v_strides, at.sequence, token, at.head);
    out.v = v[column < x.value_dim ? column : at.column];
    out.g = x.g ? load_raw(x.g, token_offset(x.g_strides, at.sequence, token, at.head), x.g_type) : 0;
    out.beta = x.beta ? load_raw(x.beta, token_offset(x.beta_strides, at.sequence, token, at.head), x.beta_type) : 0;
    if (x.flags & DW_RAW_GATES) {
        out.a_log = load_raw(x.a_log, at.head * x.a_log_stride, x.a_log_type);
        out.dt_bias = x.dt_bias ? load_raw(x.dt_bias, at.head * x.dt_bias_stride, x.dt_bias_type) : 0;
    }
    if (Norm) {
        const int block = at.head / x.norm.block_heads, of_block = at.head - block * x.norm.block_heads;
        const unsigned short *z = (const unsigned short *)x.norm.z + token * x.norm.z_token + block * x.norm.z_block;
        out.z = z[of_block * row_dim + column];
    }
    return out;
}

// The thread's keys of a step, of q or k.
template <class T, class S> DEVICE void keys_of(float (&out)[S::run], const i32x4 *all, int j) {
    const int *words = (const int *)all + (j * S::step + S::group() * S::run) / 2;
    for (int e = 0; e < S::run; e += 4) {
        const i32x2 raw = *(const i32x2 *)(words + e / 2);
        for (int i = 0; i < 2; ++i) {
            out[e + 2 * i] = T::low(raw[i]);
            out[e + 2 * i + 1] = T::high(raw[i]);
        }
    }
}

// Of a token.
struct Gates {
    float decay, beta;
};
DEVICE Gates gates_of(const Token &token, const dw_decode_args &x) {
    float g = x.g ? widen_raw(token.g, x.g_type) : 0.0f, beta = x.beta ? widen_raw(token.beta, x.beta_type) : 1.0f;
    if (x.flags & DW_RAW_GATES) {
        const float dt_bias = x.dt_bias ? widen_raw(token.dt_bias, x.dt_bias_type) : 0.0f;
        g = gate(g, widen_raw(token.a_log, x.a_log_type), dt_bias);
        beta = beta_of(beta, x.flags & DW_NEGATIVE_EIGENVALUES);
    }
    return Gates{arch::exp(g), beta};
}

// The part of a state that a thread owns.
template <class S> struct Part {
    typedef float Columns __attribute__((ext_vector_type(S::across)));
    Columns s[S::steps][S::run];
};

// Where the pieces of a thread lie in a state. Threads that have no key or column of a step read those of others: their
// k and q are 0, and they write nothing.
template <class S, bool ValueMajor> class Pieces {
  public:
    DEVICE_MEMBER Pieces(const state::Head &memory, int slab_column, int key_dim, int value_dim)
        : memory(memory), first_key(S::group() * S::run), key_dim(key_dim), columns_left(value_dim - slab_column),
          column_inside(S::column(0) < columns_left) {
        const u32 size = state::size_of(memory.type), column = column_inside ? S::column(0) : 0;
        fallback = ValueMajor ? (slab_column + column) * memory.row : (slab_column + column) * size;
        key_bytes = ValueMajor ? size : memory.row;
    }

    DEVICE_MEMBER bool inside(int j, int i) const {
        return column_inside && first_key + j * S::step < key_dim &&
               (!ValueMajor || i * S::column_stride < columns_left);
    }
    DEVICE_MEMBER char *at(int j, int i) const {
        const int key = first_key + j * S::step;
        const u32 of_key = key < key_dim ? key * key_bytes : 0;
        const u32 of_row = i * S::column_stride * memory.row;
        return memory.base + (fallback + of_key + (!ValueMajor || i * S::column_stride < columns_left ? of_row : 0));
    }

    const state::Head &memory;

  private:
    const int first_key, key_dim, columns_left;
    const bool column_inside;
    u32 fallback, key_bytes;
};

// All of it is requested before any of it is used.
template <class S, bool Wide, bool ValueMajor> DEVICE void load_part(Part<S> &part, const Pieces<S, ValueMajor> &from) {
    i32x4 raw[S::steps][S::pieces];
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            raw[j][i] = state::load_piece<Wide>(from.at(j, i), from.memory.whole);
        }
    }
    arch::phase();
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            for (int n = 0; n < S::piece; ++n) {
                const int word = raw[j][i][Wide ? n : n / 2];
                const float x = Wide ? bits<float>(word) : n % 2 ? tile::Bf16::high(word) : tile::Bf16::low(word);
                part.s[j][ValueMajor ? n : i][ValueMajor ? i : n] = x;
            }
        }
    }
}

template <class S, bool ValueMajor> DEVICE void store_part(const Part<S> &part, const Pieces<S, ValueMajor> &to) {
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            float x[S::piece];
            for (int n = 0; n < S::piece; ++n) {
                x[n] = part.s[j][ValueMajor ? n : i][ValueMajor ? i : n];
            }
            if (to.inside(j, i)) {
                state::store(to.at(j, i), x, to.memory.type, to.memory.whole);
            }
        }
    }
}

// A token's sums over the thread's keys.
template <class S> struct Sums {
    typename Part<S>::Columns u, w;
    f32x4 dot; // k k, q q, k q
};

template <class T, class S> DEVICE Sums<S> sums_of(const Part<S> &part, const Exchange &exchange) {
    typedef typename Part<S>::Columns Columns;
    Sums<S> out{};
    float k_k = 0.0f, q_q = 0.0f, k_q = 0.0f;
    for (int j = 0; j < S::steps; ++j) {
        float k[S::run], q[S::run];
        keys_of<T, S>(k, exchange.k, j);
        keys_of<T, S>(q, exchange.q, j);
        for (int e = 0; e < S::run; ++e) {
            out.u = __builtin_elementwise_fma((Columns)k[e], part.s[j][e], out.u);
            out.w = __builtin_elementwise_fma((Columns)q[e], part.s[j][e], out.w);
            k_k = __builtin_fmaf(k[e], k[e], k_k);
            q_q = __builtin_fmaf(q[e], q[e], q_q);
            k_q = __builtin_fmaf(k[e], q[e], k_q);
        }
    }
    out.dot = arch::held(f32x4{k_k, q_q, k_q, 0.0f}); // not later, where few threads need it
    return out;
}

// The sums over all keys.
struct Total {
    float column; // thread c: u of column c; thread 32 + c: w of it
    f32x4 dot;
};
template <class S> DEVICE Total total_of(const Sums<S> &sums, Exchange &exchange) {
    float *own = exchange.sums[S::group()];
    for (int i = 0; i < S::across; ++i) {
        own[S::column(i)] = sums.u[i];
        own[columns + S::column(i)] = sums.w[i];
    }
    if (S::column(0) == 0) {
        *(f32x4 *)(own + dots) = sums.dot;
    }
    arch::team_sync<waves>();
    Total out{};
    for (int i = 0; i < S::groups; ++i) {
        out.column += exchange.sums[i][member()];
        out.dot += *(const f32x4 *)(exchange.sums[i] + dots);
    }
    out.dot = arch::held(out.dot);
    return out;
}

// The outputs of a head's row, rounded, of this token and the one before.
struct Row {
    float o[2][row_dim];
};

// The gated norm of a number of the row, which a workgroup has: sums in the order of norm.hip.
template <class T>
DEVICE float normed(float o, Row &row, const Token &token, const dw_decode_args &x, int column, int t) {
    constexpr int octet = 8;
    float *all = row.o[t % 2];
    if (member() >= columns) {
        all[column] = o;
    }
    arch::workgroup_sync();
    float squares = 0.0f;
    for (int i = 0; i < octet; ++i) {
        const float own = all[member() % (row_dim / octet) * octet + i];
        squares = __builtin_fmaf(own, own, squares);
    }
    const float factor = arch::rsqrt(__builtin_fmaf(arch::row_sum(squares), x.norm.mean, x.norm.eps));
    const float weight =
        x.norm.weight ? load_scalar(x.norm.weight, column * x.norm.weight_stride, x.norm.weight_type) : 1.0f;
    const float z = T::low(token.z);
    return math::gated(f32x2{o * factor * weight, 0.0f}, f32x2{z, 0.0f}, x.norm.flags & DW_NORM_SILU).x;
}

// The rest of a token: the state moves on, and the output is stored.
template <class T, bool Norm, class S>
DEVICE void update(Part<S> &part, const Token &token, const Total &total, Gates gates, const dw_decode_args &x,
                   const Place &at, int t, Exchange &exchange, Row *row_of_head) {
    typedef typename Part<S>::Columns Columns;
    float k_factor = 1.0f, q_factor = 1.0f;
    if (x.flags & DW_QK_L2NORM) {
        k_factor = arch::rsqrt(total.dot[0] + 1e-6f);
        q_factor = arch::rsqrt(total.dot[1] + 1e-6f);
    }
    const int own = member() % columns;
    if (member() < columns) {
        const float v = T::low(token.v);
        exchange.d[own] = gates.beta * __builtin_fmaf(-gates.decay * k_factor, total.column, v);
    }
    arch::team_sync<waves>();

    Columns d;
    for (int i = 0; i < S::across; ++i) {
        d[i] = k_factor * exchange.d[S::column(i)];
    }
    for (int j = 0; j < S::steps; ++j) {
        float k[S::run];
        keys_of<T, S>(k, exchange.k, j);
        for (int e = 0; e < S::run; ++e) {
            const Columns kept = gates.decay * part.s[j][e];
            part.s[j][e] = __builtin_elementwise_fma((Columns)k[e], d, kept);
        }
    }
    // Of the other half of the threads it means nothing.
    const float written = k_factor * total.dot[2] * exchange.d[own];
    float o = math::canonical(x.scale * (q_factor * __builtin_fmaf(gates.decay, total.column, written)));
    if (Norm) {
        o = math::canonical(normed<T>(T::low(T::pack(o, 0.0f)), *row_of_head, token, x, at.column + own, t));
    }
    if (member() >= columns && at.column + own < x.value_dim) {
        const int64_t row = token_offset(x.o_strides, at.sequence, at.sequence * x.tokens + t, at.head);
        ((short *)x.o)[row + at.column + own] = (short)T::pack(o, 0.0f);
    }
}

DEVICE bool is_slot(int slot, int slots) { return slot >= 0 && slot < slots; }

template <class T, bool Wide, bool ValueMajor, int Keys, bool Norm>
DEVICE void walk(const dw_decode_args &x, const Place &at, int read, int write, Exchange &exchange, Row *row) {
    typedef Share<Wide, ValueMajor, Keys> S;
    typedef Pieces<S, ValueMajor> Own;
    Token token = load_token<Norm>(arch::reread(x), at, 0);
    Part<S> part{};
    if (read >= 0) {
        const dw_decode_args &y = arch::reread(x);
        const int64_t element = read * y.state_strides.sequence + at.head * y.state_strides.head;
        const state::Head from(y.state, element, y.state_strides.row, Wide ? DW_F32 : DW_BF16);
        load_part<S, Wide>(part, Own(from, at.column, y.key_dim, y.value_dim));
    }
#pragma unroll 1
    for (int t = 0; t < x.tokens; ++t) {
        if (t > 0) {
            arch::team_sync<waves>(); // all have read what the token before left there
        }
        const i32x4 keys = has_keys(arch::reread(x).key_dim) ? token.keys : i32x4{};
        (member() < threads / 2 ? exchange.q : exchange.k)[member() % (threads / 2)] = keys;
        const Gates gates = gates_of(token, arch::reread(x));
        arch::team_sync<waves>();
        const Sums<S> sums = sums_of<T, S>(part, exchange);
        Token next = token;
        if (t + 1 < x.tokens) {
            next = load_token<Norm>(arch::reread(x), at, t + 1);
        }
        update<T, Norm>(part, token, total_of<S>(sums, exchange), gates, arch::reread(x), at, t, exchange, row);
        token = next;
        const dw_decode_args &y = arch::reread(x);
        if (y.states) {
            const dw_state_strides &each = y.states_strides;
            const int64_t element = at.sequence * each.sequence + t * y.states_token + at.head * each.head;
            const state::Head to(y.states, element, each.row, y.states_type);
            store_part<S>(part, Own(to, at.column, y.key_dim, y.value_dim));
        }
    }
    // No load is under way from here on, so that no store waits for the one before it.
    arch::held(token.v);
    if (write >= 0) {
        const dw_decode_args &y = arch::reread(x);
        const int64_t element = write * y.state_strides.sequence + at.head * y.state_strides.head;
        const state::Head to(y.state, element, y.state_strides.row, Wide ? DW_F32 : DW_BF16);
        store_part<S>(part, Own(to, at.column, y.key_dim, y.value_dim));
    }
}

template <class T, int Keys, bool Norm> DEVICE void decode(const dw_decode_args &x) {
    SHARED static Exchange exchanges[Norm ? row_teams : 1];
    Exchange &exchange = exchanges[Norm ? team() : 0];
    Row *row = nullptr;
    if constexpr (Norm) {
        SHARED static Row shared_row;
        row = &shared_row;
    }
    const Place at = place_of(x);
    const int slot = x.slots ? arch::uniform(x.slots + at.sequence) : at.sequence;
    const int write_slot = x.write_slots ? arch::uniform(x.write_slots + at.sequence) : slot;
    const bool reads = is_slot(slot, x.slot_count), writes = is_slot(write_slot, x.slot_count);
    if (!reads && !writes) {
        // Padding.
        const int column = at.column + member();
        for (int t = 0; t < x.tokens && member() < columns && column < x.value_dim; ++t) {
            const int64_t row = token_offset(x.o_strides, at.sequence, at.sequence * x.tokens + t, at.head);
            ((short *)x.o)[row + column] = 0;
        }
        return;
    }
    const bool initial = reads && (!x.has_initial_state || arch::uniform(x.has_initial_state + at.sequence));
    // With the states of all tokens wanted, which of them stays is decided later.
    const int read = initial ? slot : -1, write = writes && !x.states ? write_slot : -1;
    const bool value_major = x.flags & DW_INITIAL_VALUE_MAJOR;
    if (x.state_type == DW_F32) {
        value_major ? walk<T, true, true, Keys, Norm>(x, at, read, write, exchange, row)
                    : walk<T, true, false, Keys, Norm>(x, at, read, write, exchange, row);
    } else {
        value_major ? walk<T, false, true, Keys, Norm>(x, at, read, write, exchange, row)
                    : walk<T, false, false, Keys, Norm>(x, at, read, write, exchange, row);
    }
}

} // namespace

KERNEL(threads, 3) void dw_decode_bf16_k128(dw_decode_args x) { decode<tile::Bf16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_bf16_k256(dw_decode_args x) { decode<tile::Bf16, 256, false>(x); }
KERNEL(threads, 3) void dw_decode_f16_k128(dw_decode_args x) { decode<tile::F16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_f16_k256(dw_decode_args x) { decode<tile::F16, 256, false>(x); }
KERNEL(row_threads, 1) void dw_decode_norm_bf16(dw_decode_args x) { decode<tile::Bf16, 128, true>(x); }
KERNEL(row_threads, 1) void dw_decode_norm_f16(dw_decode_args x) { decode<tile::F16, 128, true>(x); }
