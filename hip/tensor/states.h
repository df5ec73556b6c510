// Recurrent states in memory, f32, bf16 or f16, accessed two, four or eight adjacent elements of a row at a time.
#pragma once

#include "../kernel_args.h"
#include "../math/activations.h"
#include "pieces.h"

namespace state {

DEVICE int size_of(int type) { return type == DWK_F32 ? 4 : 2; }

// The type of a state that is not f32, for the compiler: one of two.
DEVICE int narrow_type(int type) { return type == DWK_F16 ? DWK_F16 : DWK_BF16; }

// Element of a word: the word itself if `Type` is DWK_F32, else its low half (0) or its high half (1).
template <int Type> DEVICE float widened(int word, int half) {
    if (Type == DWK_F32) {
        return bits<float>(word);
    }
    if (Type == DWK_F16) {
        return half ? arch::F16::high(word) : arch::F16::low(word);
    }
    return half ? arch::Bf16::high(word) : arch::Bf16::low(word);
}

// Rounds two numbers to 16 bits, to nearest even. Numbers beyond f16 become infinities; NaNs stay NaNs.
template <int Type> DEVICE int narrowed(float a, float b) {
    const float x = math::packable(a), y = math::packable(b);
    return Type == DWK_F16 ? arch::F16::pack(x, y) : arch::Bf16::pack(x, y);
}
template <int Type> DEVICE short narrowed(float a) {
    const float x = math::packable(a);
    return Type == DWK_F16 ? (short)arch::F16::pack(x, 0.0f) : arch::Bf16::narrow(x);
}

// Stores N numbers, 2, 4 or 8, as elements of type DWK_F32, DWK_BF16 or DWK_F16. `whole`: one access can cover 16
// bytes.
template <int N> DEVICE void store(char *p, const float (&x)[N], int type, bool whole) {
    if (type == DWK_F32) {
        if constexpr (N == 2) {
            piece::store_half<true>(p, i32x2{bits<int>(x[0]), bits<int>(x[1])}, whole);
        } else {
            for (int i = 0; i < N; i += 4) {
                const i32x4 some{bits<int>(x[i]), bits<int>(x[i + 1]), bits<int>(x[i + 2]), bits<int>(x[i + 3])};
                piece::store<true>(p + 4 * i, some, whole);
            }
        }
        return;
    }
    int words[N / 2];
    if (type == DWK_F16) {
        for (int i = 0; i < N / 2; ++i) {
            words[i] = narrowed<DWK_F16>(x[2 * i], x[2 * i + 1]);
        }
    } else {
        for (int i = 0; i < N / 2; ++i) {
            words[i] = narrowed<DWK_BF16>(x[2 * i], x[2 * i + 1]);
        }
    }
    if constexpr (N == 8) {
        piece::store<false>(p, i32x4{words[0], words[1], words[2], words[3]}, whole);
    } else if constexpr (N == 4) {
        piece::store_half<false>(p, i32x2{words[0], words[1]}, whole);
    } else {
        piece::store_pair(p, words[0], whole);
    }
}

// Loads eight elements of type DWK_F32, DWK_BF16 or DWK_F16.
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
        for (int n = 0; n < 8; ++n) {
            out[n] = type == DWK_F16 ? widened<DWK_F16>(all[n / 2], n % 2) : widened<DWK_BF16>(all[n / 2], n % 2);
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
