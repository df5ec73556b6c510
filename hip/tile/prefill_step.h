// One chunk of prefill, and how states get to the registers and back: what prefill_scan and prefill_summarise share.
// A workgroup owns a slab of value columns, a wave part of its columns or rows, in accumulators; per chunk of 64 tokens
//   R  = K S0                                          O  = Q S0
//   X  = beta (V - exp(G) R)                           U  = X + (T - I) X
//   O  = scale (exp(G) O + diag(P) U + (P - diag) U)   S1 = exp(G_C) S0 + K^T (exp(G_C - G) U)
// with T, P and the row factors from prefill_prepare. R, X, U and S never leave the compute unit: each, rounded, is an
// operand of the next product. How a target moves K, Q, T and P to where its matrix unit takes them, and the step of a
// chunk, is prefill_*.h.
#pragma once

#include "prefill.h"

namespace prefill {

// Where the state of a (slot, head) lies in memory.
struct StateView {
    char *base;
    int64_t key_step;
    int64_t value_step;
    bool wide; // f32, not bf16

    DEVICE_MEMBER StateView(const void *p, const dwk_state_strides &s, int type, bool value_major, int slot, int head)
        : base((char *)p), key_step(value_major ? 1 : s.row), value_step(value_major ? s.row : 1),
          wide(type == DWK_F32) {
        base += (wide ? 4 : 2) * (slot * s.sequence + head * s.head);
    }
};

// Calls f(tile, column tile, element, index) for each element of the state that this lane owns and the tensor has.
template <class T, int Keys, class F>
DEVICE void for_each_element(const StateView &view, int column, int key_dim, int value_dim, F f) {
    // Opaque, or the comparisons of the first use are kept in scalar registers up to the second.
    const int lane = arch::opaque(arch::lane());
    if (column >= value_dim) {
        return;
    }
#pragma unroll
    for (int t = 0; t < Chunk<T, Keys>::key_tiles; ++t) {
#pragma unroll
        for (int run = 0; run < elements; run += arch::run) {
            const int key = state_key(t, run, lane); // and the next: K is a multiple of 16
            if (key < key_dim) {
#pragma unroll
                for (int r = 0; r < arch::run; ++r) {
#pragma unroll
                    for (int j = 0; j < Chunk<T, Keys>::across; ++j) {
                        f(t, j, run + r, (key + r) * view.key_step + (column + state_column(j, run)) * view.value_step);
                    }
                }
            }
        }
    }
}

template <class T, int Keys>
DEVICE void load_state(typename Chunk<T, Keys>::State &s, const StateView &from, int column, int key_dim,
                       int value_dim) {
    if (from.wide) {
        for_each_element<T, Keys>(from, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
            s[t][j][e] = math::canonical(((const float *)from.base)[index]);
        });
    } else {
        for_each_element<T, Keys>(from, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
            s[t][j][e] = Bf16::low(((const short *)from.base)[index]);
        });
    }
}

template <class T, int Keys>
DEVICE void store_state(const typename Chunk<T, Keys>::State &s, const StateView &to, int column, int key_dim,
                        int value_dim) {
    if (to.wide) {
        for_each_element<T, Keys>(to, column, key_dim, value_dim,
                                  [&](int t, int j, int e, int64_t index) { ((float *)to.base)[index] = s[t][j][e]; });
    } else {
        for_each_element<T, Keys>(to, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
            const float value = s[t][j][e];
            ((short *)to.base)[index] = Bf16::narrow(math::canonical(value));
        });
    }
}

// Calls f(tile, column tile, element, index) for each run of elements of a matrix [columns, K] that this lane owns.
template <class T, int Keys, class F> DEVICE void for_each_run(int column, int columns, int key_dim, F f) {
    const int lane = arch::opaque(arch::lane());
    if (column >= columns) {
        return;
    }
#pragma unroll
    for (int t = 0; t < Chunk<T, Keys>::key_tiles; ++t) {
#pragma unroll
        for (int run = 0; run < elements; run += arch::run) {
            const int key = state_key(t, run, lane);
            if (key < key_dim) {
#pragma unroll
                for (int j = 0; j < Chunk<T, Keys>::across; ++j) {
                    f(t, j, run, (column + state_column(j, run)) * key_dim + key);
                }
            }
        }
    }
}

template <class T, int Keys>
DEVICE void load_matrix(typename Chunk<T, Keys>::State &s, const float *from, int column, int columns, int key_dim) {
    for_each_run<T, Keys>(column, columns, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        const arch::Run x = *(const arch::Run *)(from + index);
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            s[t][j][e + r] = x[r];
        }
    });
}

template <class T, int Keys>
DEVICE void store_matrix(const typename Chunk<T, Keys>::State &s, float *to, int column, int columns, int key_dim) {
    for_each_run<T, Keys>(column, columns, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        arch::Run x;
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            x[r] = s[t][j][e + r];
        }
        *(arch::Run *)(to + index) = x;
    });
}

// The state that a sequence starts from, where it does not start from zeros.
template <class T, int Keys>
DEVICE void first_state(typename Chunk<T, Keys>::State &state, const dwk_prefill_scan_args &x, int sequence, int head,
                        int column) {
    const int slot = slot_of(x, x.read_slots, sequence);
    if (x.initial_state && slot >= 0 && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence))) {
        const StateView from(x.initial_state, x.initial_strides, x.initial_type, x.flags & DWK_INITIAL_VALUE_MAJOR, slot,
                             head);
        load_state<T, Keys>(state, from, column, x.key_dim, x.value_dim);
    }
}

// The chunks of a segment, one after the other, until `rest` of its tokens are left; between chunks.begin and
// chunks.finish.
template <class T, int Keys, bool Outputs>
DEVICE void walk(typename Chunk<T, Keys>::State &state, Chunks<T, Keys, Outputs> &chunks, const dwk_prefill_scan_args &x,
                 int rest) {
#pragma unroll 1
    while (chunks.left() > rest) {
        chunks.step(state, x);
    }
    chunks.settle(state);
}

} // namespace prefill
