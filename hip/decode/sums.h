// Sums over keys, all sums of a token in one pass: over a thread's keys, then over the threads with the same columns.
#pragma once

#include "state.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// Sums of a token over keys: u = S^T k and w = S^T q of the thread's columns, and the products k.k, q.q, k.q.
template <class S> struct Sums {
    typename S::Columns u, w;
    float k_k, q_q, k_q;
};

// Sums over the thread's keys.
template <class T, class S, class Arguments>
DEVICE Sums<S> sums_of(const StateShare<S> &share, const Token<S> &token, const Arguments &x) {
    Sums<S> out{};
#pragma unroll
    for (int j = 0; j < S::steps; ++j) {
        float k[S::run], q[S::run];
        keys_of<T, S>(k, token.k[j], j, x);
        keys_of<T, S>(q, token.q[j], j, x);
        for (int e = 0; e < S::run; ++e) {
            out.u = __builtin_elementwise_fma((typename S::Columns)k[e], share.s[j][e], out.u);
            out.w = __builtin_elementwise_fma((typename S::Columns)q[e], share.s[j][e], out.w);
            out.k_k = __builtin_fmaf(k[e], k[e], out.k_k);
            out.q_q = __builtin_fmaf(q[e], q[e], out.q_q);
            out.k_q = __builtin_fmaf(k[e], q[e], out.k_q);
        }
        S::step_done();
    }
    return out;
}

// Sums over all keys, the same bits in all threads with the same columns.
template <class S> DEVICE Sums<S> total_of(Sums<S> sums) {
    sums.k_k = S::sum(sums.k_k);
    sums.q_q = S::sum(sums.q_q);
    sums.k_q = S::sum(sums.k_q);
    for (int i = 0; i < S::across; ++i) {
        sums.u[i] = S::sum(sums.u[i]);
        sums.w[i] = S::sum(sums.w[i]);
    }
    return sums;
}

} // namespace
} // namespace decode
