// Recurrent states in memory, f32 or bf16, accessed four or eight adjacent elements of a row at a time.
#pragma once

#include "../kernel_args.h"
#include "../math/activations.h"
#include "pieces.h"

namespace state {

DEVICE int size_of(int type) { return type == DWK_F32 ? 4 : 2; }

// Rounds two numbers to bf16; NaNs stay NaNs.
DEVICE int narrowed(float a, float b) { return arch::Bf16::pack(math::canonical(a), math::canonical(b)); }

// Stores N numbers, 4 or 8, as elements of type DWK_F32 or DWK_BF16. `whole`: one access can cover 16 bytes.
template <int N> DEVICE void store(char *p, const float (&x)[N], int type, bool whole) {
    if (type == DWK_F32) {
        for (int i = 0; i < N; i += 4) {
            const i32x4 some{bits<int>(x[i]), bits<int>(x[i + 1]), bits<int>(x[i + 2]), bits<int>(x[i + 3])};
            piece::store<true>(p + 4 * i, some, whole);
        }
    } else if constexpr (N == 8) {
        const i32x4 all{narrowed(x[0], x[1]), narrowed(x[2], x[3]), narrowed(x[4], x[5]), narrowed(x[6], x[7])};
        piece::store<false>(p, all, whole);
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

// Loads eight elements of type DWK_F32 or DWK_BF16.
DEVICE void load_eight(float (&out)[8], const char *p, int type, bool whole) {
    if (type == DWK_F32) {
        for (int i = 0; i < 8; i += 4) {
            const i32x4 some = piece::load<true>(p + 4 * i, whole);
            for (int n = 0; n < 4; ++n) {
                out[i + n] = bits<float>(some[n]);
            }
        }
    } else {
        const i32x4 all = piece::load<false>(p, whole);
        for (int n = 0; n < 4; ++n) {
            out[2 * n] = arch::Bf16::low(all[n]);
            out[2 * n + 1] = arch::Bf16::high(all[n]);
        }
    }
}

// State of one (sequence, head): rows of adjacent elements, less than 2^31 bytes in all.
struct Head {
    char *base;
    u32 row; // stride of rows in bytes
    int type;
    bool whole;

    // `element`: index of the head's first element. `row_stride`: in elements.
    DEVICE_MEMBER Head(const void *all, int64_t element, int64_t row_stride, int type)
        : base((char *)all + element * size_of(type)), row((u32)row_stride * size_of(type)), type(type),
          whole(arch::in_one_access(base) && arch::in_one_access((const void *)(u64)row)) {}
};

} // namespace state
