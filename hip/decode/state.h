// Recurrent state in registers. It is loaded and stored once, along rows in memory.
#pragma once

#include "../tensor/states.h"
#include "token.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// State elements that a thread owns, as `S` (a `Share`) lays them out.
template <class S> struct StateShare {
    typename S::Columns s[S::steps][S::run];
};

// Addresses of a thread's pieces of a state. A thread without a key or column in a step reads another piece of the
// team: its k and q are 0, and it writes nothing.
template <class S, class Arguments> class Pieces {
  public:
    DEVICE_MEMBER Pieces(const state::Head &memory, int team_column, const Arguments &x)
        : memory(memory), first_key(S::group() * S::run), x(x),
          column_inside(S::has_column(x, team_column + S::column())) {
        const u32 size = state::size_of(memory.type), column = team_column + (column_inside ? S::column() : 0);
        of_column = column * (S::value_major ? memory.row : size);
        key_bytes = S::value_major ? size : memory.row;
    }

    DEVICE_MEMBER bool inside(int j) const { return column_inside && S::has_key(x, first_key + j * S::step); }
    // Piece i of step j: column i of the thread, or key i of the step.
    DEVICE_MEMBER char *at(int j, int i) const {
        const int key = first_key + j * S::step;
        return memory.base + (of_column + (S::has_key(x, key) ? key * key_bytes : 0) + i * memory.row);
    }

    const state::Head &memory;

  private:
    const int first_key;
    const Arguments &x;
    const bool column_inside;
    u32 of_column, key_bytes;
};

// Words of a thread's state in memory.
template <class S> struct RawState {
    typedef int Piece __attribute__((ext_vector_type(S::words)));
    Piece pieces[S::steps][S::pieces];
};

// Loads a piece element by element.
template <class S> DEVICE typename RawState<S>::Piece in_parts(const char *p) {
    if constexpr (S::words == 4) {
        return piece::load<S::Wide>(p, false);
    } else if constexpr (S::words == 2) {
        return piece::load_half<S::Wide>(p, false);
    } else {
        return piece::load_pair(p, false);
    }
}

// Requests a thread's state. Waits for nothing.
template <class S, class Arguments> DEVICE void request_state(RawState<S> &raw, const Pieces<S, Arguments> &from) {
#pragma unroll
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            const char *from_piece = from.at(j, i);
            if constexpr (!S::whole) {
                raw.pieces[j][i] = in_parts<S>(from_piece);
            } else if constexpr (S::value_major) {
                raw.pieces[j][i] = arch::load_b128(from_piece);
            } else if constexpr (S::words == 4) {
                raw.pieces[j][i] = arch::load_line_b128(from_piece); // the neighbouring teams read the rest of it
            } else if constexpr (S::words == 2) {
                raw.pieces[j][i] = arch::load_line_b64(from_piece);
            } else {
                raw.pieces[j][i] = arch::load_line_b32(from_piece);
            }
        }
    }
}

// Elements of a thread's pieces, which have the type `Type`.
template <int Type, class S> DEVICE void widen_state(StateShare<S> &share, const RawState<S> &raw) {
#pragma unroll
    for (int j = 0; j < S::steps; ++j) {
        for (int i = 0; i < S::pieces; ++i) {
            for (int n = 0; n < S::piece; ++n) {
                const float x = state::widened<Type>(raw.pieces[j][i][Type == DWK_F32 ? n : n / 2], n % 2);
                share.s[j][S::value_major ? n : i][S::value_major ? i : n] = x;
            }
        }
        S::step_done();
    }
}

template <class S, class Arguments>
DEVICE void store_state(const StateShare<S> &share, const Pieces<S, Arguments> &to) {
    const auto all = [&](int type) __attribute__((always_inline)) {
#pragma unroll
        for (int j = 0; j < S::steps; ++j) {
            for (int i = 0; i < S::pieces && to.inside(j); ++i) {
                float x[S::piece];
                for (int n = 0; n < S::piece; ++n) {
                    x[n] = share.s[j][S::value_major ? n : i][S::value_major ? i : n];
                }
                state::store(to.at(j, i), x, type, S::whole);
            }
        }
    };
    if (to.memory.type == DWK_F32) {
        all(DWK_F32);
    } else if (to.memory.type == DWK_F16) {
        all(DWK_F16);
    } else {
        all(DWK_BF16);
    }
}

} // namespace
} // namespace decode
