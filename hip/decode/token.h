// Token of decode: q, k and v, loaded during the computation of the token before, and the gates of all tokens.
#pragma once

#include "../math/gates.h"
#include "../tensor/rows.h"
#include "share.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// A thread's share of a token, unconverted: nothing here waits for a load.
template <class S> struct Token {
    static constexpr int words = S::run / 2;
    typedef int Run __attribute__((ext_vector_type(words)));
    Run q[S::steps], k[S::steps]; // the thread's keys, zeros beyond K
    typename S::Words v;          // the thread's columns
    int z;                        // of the norm: input of the gate
};

// load_raw: bits of a scalar in memory. widen_raw: its value.
DEVICE int load_raw(const void *p, int64_t index, int type) {
    return type == DWK_F32 ? ((const int *)p)[index] : ((const unsigned short *)p)[index];
}
DEVICE float widen_raw(int raw, int type) {
    return type == DWK_F32 ? bits<float>(raw) : type == DWK_BF16 ? arch::Bf16::low(raw) : arch::F16::low(raw);
}

// Column of the output row that this thread norms; the threads after the team's columns repeat them.
DEVICE int normed_column(const Work &at) { return at.column + member() % columns_of<across>; }

// Input of the norm's gate for token t.
DEVICE int load_z(const dwk_decode_args &x, const Work &at, int t) {
    const int block = at.head / x.norm.block_heads, of_block = at.head - block * x.norm.block_heads;
    const unsigned short *z =
        (const unsigned short *)x.norm.z + (at.first + t) * x.norm.z_token + block * x.norm.z_block;
    return arch::request_b16(z + (of_block * row_dim + normed_column(at)));
}

// Loads a number of 16 bits for each of the thread's columns.
template <class S> DEVICE typename S::Words load_columns(const char *p) {
    if constexpr (S::across == across) {
        return S::whole ? arch::request_b64(p) : piece::load_half<false>(p, false);
    } else {
        return S::whole ? arch::request_b32(p) : piece::load_pair(p, false);
    }
}

// Numbers of type T for each of the thread's columns, as f32.
template <class T, class S> DEVICE typename S::Columns widen_columns(typename S::Words words) {
    typename S::Columns out;
    for (int i = 0; i < S::across; ++i) {
        out[i] = i % 2 ? T::high(words[i / 2]) : T::low(words[i / 2]);
    }
    return out;
}

template <bool Norm, class S, class Arguments>
DEVICE void load_token(Token<S> &out, const Arguments &x, const Work &at, int t) {
    // Threads beyond K or V read the first elements, because a branch would wait for its loads.
    // All keys of a full head are at constants from the thread's first.
    const u32 first_key = S::full ? 2 * S::group() * S::run : 0;
    const char *q = row_address(x.q, x.q_strides, at.sequence, at.first + t, at.key_head, first_key);
    const char *k = row_address(x.k, x.k_strides, at.sequence, at.first + t, at.key_head, first_key);
#pragma unroll
    for (int j = 0; j < S::steps; ++j) {
        const int key = (S::full ? 0 : S::group() * S::run) + j * S::step;
        const u32 of_key = 2 * (S::has_key(x, key) ? key : 0);
        if constexpr (S::run == 8) {
            out.q[j] = S::whole ? arch::request_b128(q + of_key) : piece::load<false>(q + of_key, false);
            out.k[j] = S::whole ? arch::request_b128(k + of_key) : piece::load<false>(k + of_key, false);
        } else {
            out.q[j] = S::whole ? arch::request_b64(q + of_key) : piece::load_half<false>(q + of_key, false);
            out.k[j] = S::whole ? arch::request_b64(k + of_key) : piece::load_half<false>(k + of_key, false);
        }
    }
    const int column = at.column + S::column();
    const u32 of_v = 2 * (S::has_column(x, column) ? column : at.column);
    const char *v = row_address(x.v, x.v_strides, at.sequence, at.first + t, at.head, of_v);
    out.v = load_columns<S>(v);
    if constexpr (Norm) {
        out.z = load_z(x, at, t);
    }
}

// The thread's keys of step j of q or k: run numbers, zeros beyond K.
template <class T, class S, class Arguments>
DEVICE void keys_of(float (&out)[S::run], const typename Token<S>::Run &raw, int j, const Arguments &x) {
    const bool inside = S::has_key(x, S::group() * S::run + j * S::step);
    for (int e = 0; e < S::run; e += 2) {
        const int word = inside ? raw[e / 2] : 0;
        out[e] = T::low(word);
        out[e + 1] = T::high(word);
    }
}

// Gates of a token, unconverted.
struct RawGates {
    int g, beta;
    int a_log, dt_bias; // with raw gates
};

// Loads the gates of all tokens at once: thread t those of token t.
template <class Arguments> DEVICE RawGates load_gates(const Arguments &x, const Work &at) {
    RawGates out{};
    const int token = at.first + min_of(member(), at.count - 1);
    out.g = x.g ? load_raw(x.g, token_offset(x.g_strides, at.sequence, token, at.head), x.g_type) : 0;
    out.beta = x.beta ? load_raw(x.beta, token_offset(x.beta_strides, at.sequence, token, at.head), x.beta_type) : 0;
    if (x.flags & DWK_RAW_GATES) {
        out.a_log = load_raw(x.a_log, at.head * x.a_log_stride, x.a_log_type);
        out.dt_bias = x.dt_bias ? load_raw(x.dt_bias, at.head * x.dt_bias_stride, x.dt_bias_type) : 0;
    }
    return out;
}

// Gates of a token: decay = exp(g), and beta.
struct Gates {
    float decay, beta;
};
template <class Arguments> DEVICE Gates gates_of(const RawGates &raw, const Arguments &x) {
    float g = x.g ? widen_raw(raw.g, x.g_type) : 0.0f, beta = x.beta ? widen_raw(raw.beta, x.beta_type) : 1.0f;
    if (x.flags & DWK_RAW_GATES) {
        const float dt_bias = x.dt_bias ? widen_raw(raw.dt_bias, x.dt_bias_type) : 0.0f;
        g = math::gate(g, widen_raw(raw.a_log, x.a_log_type), dt_bias);
        beta = math::beta(beta, x.flags & DWK_NEGATIVE_EIGENVALUES);
    }
    return Gates{arch::exp(g), beta};
}

} // namespace
} // namespace decode
