// Recurrent state in registers. It is loaded and stored once, 16 bytes a thread, along rows in memory.
#pragma once

#include "../tensor/states.h"
#include "token.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// State elements that a thread owns, as `S` (a `Share`) lays them out.
template <class S> struct StateShare {
    typedef float Columns __attribute__((ext_vector_type(S::across)));
    Columns s[S::steps][S::run];
};

// Addresses of a thread's 16-byte pieces of a state. A thread without a key or column in a step reads another thread's
// piece: its k and q are 0, and it writes nothing.
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

// Elements of a thread's pieces, which have the type `Type`.
template <int Type, bool ValueMajor, class S>
DEVICE void widen_share(StateShare<S> &share, const i32x4 (&raw)[S::steps][S::pieces]) {
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            for (int n = 0; n < S::piece; ++n) {
                const float x = state::widened<Type>(raw[j][i][Type == DWK_F32 ? n : n / 2], n % 2);
                share.s[j][ValueMajor ? n : i][ValueMajor ? i : n] = x;
            }
        }
    }
}

// Loads a thread's state. Requests all loads before the first is used.
template <class S, bool Wide, bool ValueMajor>
DEVICE void load_state_share(StateShare<S> &share, const Pieces<S, ValueMajor> &from) {
    i32x4 raw[S::steps][S::pieces];
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            raw[j][i] = piece::load<Wide>(from.at(j, i), from.memory.whole);
        }
    }
    arch::phase();
    if constexpr (Wide) {
        widen_share<DWK_F32, ValueMajor>(share, raw);
    } else if (from.memory.type == DWK_F16) {
        widen_share<DWK_F16, ValueMajor>(share, raw);
    } else {
        widen_share<DWK_BF16, ValueMajor>(share, raw);
    }
}

template <class S, bool ValueMajor>
DEVICE void store_state_share(const StateShare<S> &share, const Pieces<S, ValueMajor> &to) {
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            float x[S::piece];
            for (int n = 0; n < S::piece; ++n) {
                x[n] = share.s[j][ValueMajor ? n : i][ValueMajor ? i : n];
            }
            if (to.inside(j, i)) {
                state::store(to.at(j, i), x, to.memory.type, to.memory.whole);
            }
        }
    }
}

} // namespace
} // namespace decode
