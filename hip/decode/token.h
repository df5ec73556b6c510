// Token of decode: q, k, v and the gates, loaded during the computation of the token before.
#pragma once

#include "../math/gates.h"
#include "../tensor/rows.h"
#include "share.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// Shared memory of a team. `sums`: each group's sums u = S^T k and w = S^T q of all columns, then k.k, q.q, k.q.
constexpr int most_groups = 16, dots = 2 * columns, sums_row = dots + 4;
constexpr int most_keys = 256;
template <int Keys> struct Exchange {
    i32x4 q[Keys / 8], k[Keys / 8]; // q and k of a token, zeros beyond K
    float sums[most_groups][sums_row];
    float d[columns];
};
static_assert(threads * 8 == 2 * most_keys, "a thread copies eight numbers of q or of k");

// A thread's share of a token, unconverted: nothing here waits for a load. `keys`: eight numbers of q in the lower half
// of the threads, of k in the upper. `v`: v of column `member() % 32`.
struct Token {
    i32x4 keys;
    int v, g, beta;
    int a_log, dt_bias; // with raw gates
    int z, weight;      // of the norm: input of the gate, and the column's weight
};

// load_raw: bits of a scalar in memory. widen_raw: its value.
DEVICE int load_raw(const void *p, int64_t index, int type) {
    return type == DWK_F32 ? ((const int *)p)[index] : ((const unsigned short *)p)[index];
}
DEVICE float widen_raw(int raw, int type) {
    return type == DWK_F32 ? bits<float>(raw) : type == DWK_BF16 ? arch::Bf16::low(raw) : arch::F16::low(raw);
}

DEVICE bool has_keys(int key_dim) { return member() % (threads / 2) * 8 < key_dim; }

template <bool Norm, bool Draft> DEVICE Token load_token(const dwk_decode_args &x, const Work &at, int t) {
    Token out{};
    const int token = row_of<Draft>(x, at, t);
    const bool of_k = member() >= threads / 2;
    const char *q = (const char *)x.q + 2 * token_offset(x.q_strides, at.sequence, token, at.key_head);
    const char *k = (const char *)x.k + 2 * token_offset(x.k_strides, at.sequence, token, at.key_head);
    const char *row = of_k ? k : q;
    // Threads beyond K read the first keys, because a branch would wait for its loads.
    const int piece = has_keys(x.key_dim) ? member() % (threads / 2) * 16 : 0;
    out.keys = piece::load<false>(row + piece, arch::in_one_access(row));
    const int column = at.column + member() % columns;
    const unsigned short *v = (const unsigned short *)x.v + token_offset(x.v_strides, at.sequence, token, at.head);
    out.v = v[column < x.value_dim ? column : at.column];
    out.g = x.g ? load_raw(x.g, token_offset(x.g_strides, at.sequence, token, at.head), x.g_type) : 0;
    out.beta = x.beta ? load_raw(x.beta, token_offset(x.beta_strides, at.sequence, token, at.head), x.beta_type) : 0;
    if (x.flags & DWK_RAW_GATES) {
        out.a_log = load_raw(x.a_log, at.head * x.a_log_stride, x.a_log_type);
        out.dt_bias = x.dt_bias ? load_raw(x.dt_bias, at.head * x.dt_bias_stride, x.dt_bias_type) : 0;
    }
    if (Norm) {
        const int block = at.head / x.norm.block_heads, of_block = at.head - block * x.norm.block_heads;
        const unsigned short *z = (const unsigned short *)x.norm.z + token * x.norm.z_token + block * x.norm.z_block;
        out.z = z[of_block * row_dim + column];
        const dwk_norm_args &norm = x.norm;
        out.weight = norm.weight ? load_raw(norm.weight, column * norm.weight_stride, norm.weight_type) : 0;
    }
    return out;
}

// Reads the thread's keys of step j of q or k in shared memory.
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

// Gates of a token: decay = exp(g), and beta.
struct Gates {
    float decay, beta;
};
DEVICE Gates gates_of(const Token &token, const dwk_decode_args &x) {
    float g = x.g ? widen_raw(token.g, x.g_type) : 0.0f, beta = x.beta ? widen_raw(token.beta, x.beta_type) : 1.0f;
    if (x.flags & DWK_RAW_GATES) {
        const float dt_bias = x.dt_bias ? widen_raw(token.dt_bias, x.dt_bias_type) : 0.0f;
        g = math::gate(g, widen_raw(token.a_log, x.a_log_type), dt_bias);
        beta = math::beta(beta, x.flags & DWK_NEGATIVE_EIGENVALUES);
    }
    return Gates{arch::exp(g), beta};
}

} // namespace
} // namespace decode
