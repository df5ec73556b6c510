// Sums over keys, all sums of a token in one pass: over a thread's keys, then over all threads.
#pragma once

#include "state.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// Sums of a token over the thread's keys: u = S^T k, w = S^T q, and the products k.k, q.q, k.q.
template <class S> struct Sums {
    typename StateShare<S>::Columns u, w;
    f32x4 dot; // k.k, q.q, k.q
};

template <class T, class S> DEVICE Sums<S> sums_of(const StateShare<S> &share, const Exchange<S::keys> &exchange) {
    typedef typename StateShare<S>::Columns Columns;
    Sums<S> out{};
    float k_k = 0.0f, q_q = 0.0f, k_q = 0.0f;
    for (int j = 0; j < S::steps; ++j) {
        float k[S::run], q[S::run];
        keys_of<T, S>(k, exchange.k, j);
        keys_of<T, S>(q, exchange.q, j);
        for (int e = 0; e < S::run; ++e) {
            out.u = __builtin_elementwise_fma((Columns)k[e], share.s[j][e], out.u);
            out.w = __builtin_elementwise_fma((Columns)q[e], share.s[j][e], out.w);
            k_k = __builtin_fmaf(k[e], k[e], k_k);
            q_q = __builtin_fmaf(q[e], q[e], q_q);
            k_q = __builtin_fmaf(k[e], q[e], k_q);
        }
    }
    out.dot = arch::held(f32x4{k_k, q_q, k_q, 0.0f}); // here, not later, where few threads need it
    return out;
}

// Sums of a token over all keys. `dot` as in `Sums`.
struct Total {
    float column; // u of column c in thread c, w of column c in thread 32 + c
    f32x4 dot;
};
template <class S> DEVICE Total total_of(const Sums<S> &sums, Exchange<S::keys> &exchange) {
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

} // namespace
} // namespace decode
