// The recurrence over the tokens of a sequence. The state stays in registers from the first token to the last.
#pragma once

#include "draft.h"
#include "norm.h"
#include "sums.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

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
template <class T, bool Norm, bool Draft, class S>
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
        const int64_t row = token_offset(x.o_strides, at.sequence, row_of<Draft>(x, at, t), at.head);
        ((short *)x.o)[row + at.column + own] = (short)T::pack(o, 0.0f);
    }
}

// Type of the states of the pool. `Wide`: f32.
template <bool Wide> DEVICE int pool_type(const dwk_decode_args &x) {
    return Wide ? DWK_F32 : state::narrow_type(x.state_type);
}

// Computes all tokens of a sequence. `read`, `write`: slots of the state, or -1.
template <class T, bool Wide, bool ValueMajor, int Keys, bool Norm, bool Draft>
DEVICE void walk(const dwk_decode_args &x, const Work &at, int read, int write, Exchange<Keys> &exchange, Row *row) {
    typedef Share<Wide, ValueMajor, Keys> S;
    typedef Pieces<S, ValueMajor> Own;
    Token token = load_token<Norm, Draft>(arch::reread(x), at, 0);
    StateShare<S> share{};
    if (read >= 0) {
        const dwk_decode_args &y = arch::reread(x);
        const int64_t element = read * y.state_strides.sequence + at.head * y.state_strides.head;
        const state::Head from(y.state, element, y.state_strides.row, pool_type<Wide>(y));
        load_state_share<S, Wide>(share, Own(from, at.column, y.key_dim, y.value_dim));
    }
#pragma unroll 1
    for (int t = 0; t < tokens_of<Draft>(x, at); ++t) {
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
        if (t + 1 < tokens_of<Draft>(x, at)) {
            next = load_token<Norm, Draft>(arch::reread(x), at, t + 1);
        }
        advance<T, Norm, Draft>(share, token, total_of<S>(sums, exchange), gates, arch::reread(x), at, t, exchange,
                                row);
        token = next;
        const dwk_decode_args &y = arch::reread(x);
        if (y.states) {
            const dwk_state_strides &each = y.states_strides;
            int64_t element = 0;
            if constexpr (Draft) {
                element = element_of_states(draft_of(y), at, t);
            } else {
                element = at.sequence * each.sequence + t * y.states_token;
            }
            if (element >= 0) {
                const state::Head to(y.states, element + at.head * each.head, each.row, y.states_type);
                store_state_share<S>(share, Own(to, at.column, y.key_dim, y.value_dim));
            }
        } else if constexpr (Draft) {
            const int slot = written_after(arch::reread(draft_of(x)), at, t);
            if (slot >= 0) {
                const dwk_decode_args &z = arch::reread(x);
                const int64_t element = slot * z.state_strides.sequence + at.head * z.state_strides.head;
                const state::Head to(z.state, element, z.state_strides.row, pool_type<Wide>(z));
                store_state_share<S>(share, Own(to, at.column, z.key_dim, z.value_dim));
            }
        }
    }
    // Completes the last load. While a load is in flight, each store would wait for the store before it.
    arch::held(token.v);
    if (write >= 0) {
        const dwk_decode_args &y = arch::reread(x);
        const int64_t element = write * y.state_strides.sequence + at.head * y.state_strides.head;
        const state::Head to(y.state, element, y.state_strides.row, pool_type<Wide>(y));
        store_state_share<S>(share, Own(to, at.column, y.key_dim, y.value_dim));
    }
}

} // namespace
} // namespace decode
