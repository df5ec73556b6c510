// Pieces: 16 bytes aligned to their elements. Octets: eight numbers of 16 bits in a piece.
#pragma once

#include "../arch/contract.h"

namespace piece {

constexpr int bytes = 16;
constexpr int octet = 8; // numbers of 16 bits

// Loads a piece. `Wide`: elements have 32 bits, otherwise 16. `whole`: one access can cover the piece.
template <bool Wide> DEVICE i32x4 load(const char *p, bool whole) {
    if (whole) {
        return arch::load_b128(p);
    }
    i32x4 out;
    for (int i = 0; i < 4; ++i) {
        out[i] = Wide ? ((const int *)p)[i]
                      : ((const unsigned short *)p)[2 * i] | ((const unsigned short *)p)[2 * i + 1] << 16;
    }
    return out;
}

// Loads a quarter of a piece of numbers of 16 bits: two. `whole`: one access can cover it.
DEVICE int load_pair(const char *p, bool whole) {
    if (whole) {
        return arch::load_b32(p);
    }
    const unsigned short *all = (const unsigned short *)p;
    return all[0] | all[1] << 16;
}

// Loads half a piece. `whole`: one access can cover it.
template <bool Wide> DEVICE i32x2 load_half(const char *p, bool whole) {
    if (whole) {
        return arch::load_b64(p);
    }
    if constexpr (Wide) {
        return i32x2{((const int *)p)[0], ((const int *)p)[1]};
    } else {
        return i32x2{load_pair(p, false), load_pair(p + 4, false)};
    }
}

template <bool Wide> DEVICE void store(char *p, i32x4 x, bool whole) {
    if (whole) {
        arch::store_b128(p, x);
        return;
    }
    for (int i = 0; i < 4; ++i) {
        if (Wide) {
            ((int *)p)[i] = x[i];
        } else {
            ((short *)p)[2 * i] = (short)x[i];
            ((short *)p)[2 * i + 1] = (short)(x[i] >> 16);
        }
    }
}

DEVICE void store_pair(char *p, int x, bool whole) {
    if (whole) {
        arch::store_b32(p, x);
        return;
    }
    ((short *)p)[0] = (short)x;
    ((short *)p)[1] = (short)(x >> 16);
}

template <bool Wide> DEVICE void store_half(char *p, i32x2 x, bool whole) {
    if (whole) {
        arch::store_b64(p, x);
        return;
    }
    for (int i = 0; i < 2; ++i) {
        if constexpr (Wide) {
            ((int *)p)[i] = x[i];
        } else {
            store_pair(p + 4 * i, x[i], false);
        }
    }
}

typedef float Octet __attribute__((ext_vector_type(octet)));

// Eight numbers of type T as f32, and rounded back.
template <class T> DEVICE Octet widened(i32x4 x) {
    return Octet{T::low(x.x), T::high(x.x), T::low(x.y), T::high(x.y),
                 T::low(x.z), T::high(x.z), T::low(x.w), T::high(x.w)};
}
template <class T> DEVICE i32x4 rounded(Octet x) {
    return i32x4{T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
}

} // namespace piece
