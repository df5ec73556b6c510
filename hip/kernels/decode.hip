// Decode: the recurrence, token by token, for T tokens of every sequence (1, or a few to verify). Per value head, with
// S [K, V] f32, q, k [K], v, o [V] and decay = exp(g); DWK_QK_L2NORM divides q and k by their norms:
//   d = beta (v - decay S^T k)
//   S <- decay S + k d^T
//   o = scale S^T q = scale (decay S0^T q + (k.q) d),   S0: the state before the token
// in f32; o and the stored state are rounded once. S0^T k, S0^T q, k.k, q.q and k.q are all sums over keys, computed in
// one pass (decode/sums.h).
//
// q, k [B, T, HK, K], v, o [B, T, HV, V] bf16 or f16; state [slots, HV, K, V] or [slots, HV, V, K], f32 or bf16. A team
// of threads owns 32 value columns of a (sequence, value head) (decode/share.h). Their state stays in registers from
// the first token to the last.
#include "../decode/norm.h"
#include "../decode/sums.h"

namespace {

using namespace decode;

// 1 / |q| and 1 / |k|, or 1.
struct Norms {
    float q, k;
};
DEVICE Norms norms_of(const Total &total, const dwk_decode_args &x) {
    Norms out{1.0f, 1.0f};
    if (x.flags & DWK_QK_L2NORM) {
        out.k = math::inverse_norm(total.dot[0]);
        out.q = math::inverse_norm(total.dot[1]);
    }
    return out;
}

// Writes d = beta (v - decay S^T k), [32], to shared memory. The lower half of the threads holds u = S^T k.
template <class T, int Keys>
DEVICE void solve_d(const Token &token, const Total &total, Gates gates, Norms norms, Exchange<Keys> &exchange,
                    int own) {
    if (member() < columns) {
        const float v = T::low(token.v);
        exchange.d[own] = gates.beta * __builtin_fmaf(-gates.decay * norms.k, total.column, v);
    }
}

// S <- decay S + k d^T, [K, 32], for the thread's elements.
template <class T, class S>
DEVICE void update_state(StateShare<S> &share, Gates gates, Norms norms, const Exchange<S::keys> &exchange) {
    typedef typename StateShare<S>::Columns Columns;
    Columns d;
    for (int i = 0; i < S::across; ++i) {
        d[i] = norms.k * exchange.d[S::column(i)];
    }
    for (int j = 0; j < S::steps; ++j) {
        float k[S::run];
        keys_of<T, S>(k, exchange.k, j);
        for (int e = 0; e < S::run; ++e) {
            const Columns kept = gates.decay * share.s[j][e];
            share.s[j][e] = __builtin_elementwise_fma((Columns)k[e], d, kept);
        }
    }
}

// Computes a token: updates the state and stores the output.
template <class T, bool Norm, class S>
DEVICE void advance(StateShare<S> &share, const Token &token, const Total &total, Gates gates, const dwk_decode_args &x,
                    const Work &at, int t, Exchange<S::keys> &exchange, Row *row_of_head) {
    const Norms norms = norms_of(total, x);
    const int own = member() % columns;
    solve_d<T>(token, total, gates, norms, exchange, own);
    arch::team_sync<waves>();
    update_state<T>(share, gates, norms, exchange);
    // o = scale (decay S0^T q + (k.q) d). Valid only in the upper half of the threads, which hold w = S0^T q.
    const float written = norms.k * total.dot[2] * exchange.d[own];
    float o = math::canonical(x.scale * (norms.q * __builtin_fmaf(gates.decay, total.column, written)));
    if (Norm) {
        o = math::canonical(normed<T>(T::low(T::pack(o, 0.0f)), *row_of_head, token, x, at.column + own, t));
    }
    if (member() >= columns && at.column + own < x.value_dim) {
        const int64_t row = token_offset(x.o_strides, at.sequence, at.sequence * x.tokens + t, at.head);
        ((short *)x.o)[row + at.column + own] = (short)T::pack(o, 0.0f);
    }
}

DEVICE bool is_slot(int slot, int slots) { return slot >= 0 && slot < slots; }

// Computes all tokens of a sequence. `read`, `write`: slots of the state, or -1.
template <class T, bool Wide, bool ValueMajor, int Keys, bool Norm>
DEVICE void walk(const dwk_decode_args &x, const Work &at, int read, int write, Exchange<Keys> &exchange, Row *row) {
    typedef Share<Wide, ValueMajor, Keys> S;
    typedef Pieces<S, ValueMajor> Own;
    Token token = load_token<Norm>(arch::reread(x), at, 0);
    StateShare<S> share{};
    if (read >= 0) {
        const dwk_decode_args &y = arch::reread(x);
        const int64_t element = read * y.state_strides.sequence + at.head * y.state_strides.head;
        const state::Head from(y.state, element, y.state_strides.row, Wide ? DWK_F32 : DWK_BF16);
        load_state_share<S, Wide>(share, Own(from, at.column, y.key_dim, y.value_dim));
    }
#pragma unroll 1
    for (int t = 0; t < x.tokens; ++t) {
        if (t > 0) {
            arch::team_sync<waves>(); // all threads have read q and k of the token before
        }
        const i32x4 keys = has_keys(arch::reread(x).key_dim) ? token.keys : i32x4{};
        if (Keys == most_keys || member() % (threads / 2) < Keys / 8) {
            (member() < threads / 2 ? exchange.q : exchange.k)[member() % (threads / 2)] = keys;
        }
        const Gates gates = gates_of(token, arch::reread(x));
        arch::team_sync<waves>();
        const Sums<S> sums = sums_of<T, S>(share, exchange);
        Token next = token;
        if (t + 1 < x.tokens) {
            next = load_token<Norm>(arch::reread(x), at, t + 1);
        }
        advance<T, Norm>(share, token, total_of<S>(sums, exchange), gates, arch::reread(x), at, t, exchange, row);
        token = next;
        const dwk_decode_args &y = arch::reread(x);
        if (y.states) {
            const dwk_state_strides &each = y.states_strides;
            const int64_t element = at.sequence * each.sequence + t * y.states_token + at.head * each.head;
            const state::Head to(y.states, element, each.row, y.states_type);
            store_state_share<S>(share, Own(to, at.column, y.key_dim, y.value_dim));
        }
    }
    // Completes the last load. While a load is in flight, each store would wait for the store before it.
    arch::held(token.v);
    if (write >= 0) {
        const dwk_decode_args &y = arch::reread(x);
        const int64_t element = write * y.state_strides.sequence + at.head * y.state_strides.head;
        const state::Head to(y.state, element, y.state_strides.row, Wide ? DWK_F32 : DWK_BF16);
        store_state_share<S>(share, Own(to, at.column, y.key_dim, y.value_dim));
    }
}

template <class T, int Keys, bool Norm> DEVICE void recur(const dwk_decode_args &x) {
    SHARED static Exchange<Keys> exchanges[Norm ? row_teams : 1];
    Exchange<Keys> &exchange = exchanges[Norm ? team() : 0];
    Row *row = nullptr;
    if constexpr (Norm) {
        SHARED static Row shared_row;
        row = &shared_row;
    }
    const Work at = work_of(x);
    const int slot = x.slots ? arch::uniform(x.slots + at.sequence) : at.sequence;
    const int write_slot = x.write_slots ? arch::uniform(x.write_slots + at.sequence) : slot;
    const bool reads = is_slot(slot, x.slot_count), writes = is_slot(write_slot, x.slot_count);
    if (!reads && !writes) {
        // Padding: outputs are zeros.
        const int column = at.column + member();
        for (int t = 0; t < x.tokens && member() < columns && column < x.value_dim; ++t) {
            const int64_t row = token_offset(x.o_strides, at.sequence, at.sequence * x.tokens + t, at.head);
            ((short *)x.o)[row + column] = 0;
        }
        return;
    }
    const bool initial = reads && (!x.has_initial_state || arch::uniform(x.has_initial_state + at.sequence));
    // With `states` the pool is not written: `commit` later copies the state that stays.
    const int read = initial ? slot : -1, write = writes && !x.states ? write_slot : -1;
    const bool value_major = x.flags & DWK_INITIAL_VALUE_MAJOR;
    if (x.state_type == DWK_F32) {
        value_major ? walk<T, true, true, Keys, Norm>(x, at, read, write, exchange, row)
                    : walk<T, true, false, Keys, Norm>(x, at, read, write, exchange, row);
    } else {
        value_major ? walk<T, false, true, Keys, Norm>(x, at, read, write, exchange, row)
                    : walk<T, false, false, Keys, Norm>(x, at, read, write, exchange, row);
    }
}

} // namespace

KERNEL(threads, 3) void dw_decode_bf16_k128(dwk_decode_args x) { recur<arch::Bf16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_bf16_k256(dwk_decode_args x) { recur<arch::Bf16, 256, false>(x); }
KERNEL(threads, 3) void dw_decode_f16_k128(dwk_decode_args x) { recur<arch::F16, 128, false>(x); }
KERNEL(threads, 2) void dw_decode_f16_k256(dwk_decode_args x) { recur<arch::F16, 256, false>(x); }
KERNEL(row_threads, 1) void dw_decode_norm_bf16(dwk_decode_args x) { recur<arch::Bf16, 128, true>(x); }
KERNEL(row_threads, 1) void dw_decode_norm_f16(dwk_decode_args x) { recur<arch::F16, 128, true>(x); }
