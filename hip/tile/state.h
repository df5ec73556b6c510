// Elements of recurrent states in memory, f32 or bf16: runs of four or eight that are neighbours in a row.
#pragma once

#include "tile.h"

namespace state {

using tile::Bf16;

constexpr int piece_bytes = 16;

DEVICE int size_of(int type) { return type == DWK_F32 ? 4 : 2; }

// 16 bytes at the alignment of their elements; `whole`: they may be accessed at once.
template <bool Wide> DEVICE i32x4 load_piece(const char *p, bool whole) {
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

template <bool Wide> DEVICE void store_piece(char *p, i32x4 x, bool whole) {
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

// Two numbers as bf16; a NaN stays one.
DEVICE int narrowed(float a, float b) { return Bf16::pack(math::canonical(a), math::canonical(b)); }

// N numbers (4 or 8) to a row of elements of a type.
template <int N> DEVICE void store(char *p, const float (&x)[N], int type, bool whole) {
    if (type == DWK_F32) {
        for (int i = 0; i < N; i += 4) {
            const i32x4 some{bits<int>(x[i]), bits<int>(x[i + 1]), bits<int>(x[i + 2]), bits<int>(x[i + 3])};
            store_piece<true>(p + 4 * i, some, whole);
        }
    } else if constexpr (N == 8) {
        const i32x4 all{narrowed(x[0], x[1]), narrowed(x[2], x[3]), narrowed(x[4], x[5]), narrowed(x[6], x[7])};
        store_piece<false>(p, all, whole);
    } else {
        const i32x2 all{narrowed(x[0], x[1]), narrowed(x[2], x[3])};
        if (whole) {
            arch::store_b64(p, all);
        } else {
            for (int i = 0; i < 2; ++i) {
                ((short *)p)[2 * i] = (short)all[i];
                ((short *)p)[2 * i + 1] = (short)(all[i] >> 16);
            }
        }
    }
}

// Eight elements of a type.
DEVICE void load_eight(float (&out)[8], const char *p, int type, bool whole) {
    if (type == DWK_F32) {
        for (int i = 0; i < 8; i += 4) {
            const i32x4 some = load_piece<true>(p + 4 * i, whole);
            for (int n = 0; n < 4; ++n) {
                out[i + n] = bits<float>(some[n]);
            }
        }
    } else {
        const i32x4 all = load_piece<false>(p, whole);
        for (int n = 0; n < 4; ++n) {
            out[2 * n] = Bf16::low(all[n]);
            out[2 * n + 1] = Bf16::high(all[n]);
        }
    }
}

// The elements of one head of a sequence: rows of neighbouring elements, less than 2^31 bytes of them.
struct Head {
    char *base;
    u32 row; // bytes from row to row
    int type;
    bool whole;

    // Of the head that starts so many elements on.
    DEVICE_MEMBER Head(const void *all, int64_t element, int64_t row_stride, int type)
        : base((char *)all + element * size_of(type)), row((u32)row_stride * size_of(type)), type(type),
          whole(arch::in_one_access(base) && arch::in_one_access((const void *)(u64)row)) {}
};

} // namespace state
