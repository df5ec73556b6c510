// Loads of elements whose type is known only at run time: gates, weights, biases.
#pragma once

#include "../arch/contract.h"
#include "../kernel_args.h"

// Loads an element of type DWK_F32, DWK_BF16 or DWK_F16.
DEVICE float load_scalar(const void *p, int64_t index, int type) {
    if (type == DWK_F32) {
        return ((const float *)p)[index];
    }
    const int raw = ((const unsigned short *)p)[index];
    return type == DWK_BF16 ? arch::Bf16::low(raw) : arch::F16::low(raw);
}

// Element of type DWK_F32, DWK_BF16 or DWK_F16 from its bits, in the low half if it has 16.
DEVICE float scalar_of(int raw, int type) {
    return type == DWK_F32 ? bits<float>(raw) : type == DWK_BF16 ? arch::Bf16::low(raw) : arch::F16::low(raw);
}

// out[i] = element index + i step for i < count. Entries from `count` on repeat the first element, so that no branch
// waits for a load.
template <int N>
DEVICE void load_scalars(float (&out)[N], const void *p, int64_t index, int64_t step, int count, int type) {
    const auto at = [&](int i) __attribute__((always_inline)) { return index + (i < count ? i * step : 0); };
    if (type == DWK_F32) {
        for (int i = 0; i < N; ++i) {
            out[i] = ((const float *)p)[at(i)];
        }
        return;
    }
    int raw[N];
    for (int i = 0; i < N; ++i) {
        raw[i] = ((const unsigned short *)p)[at(i)];
    }
    for (int i = 0; i < N; ++i) {
        out[i] = type == DWK_BF16 ? arch::Bf16::low(raw[i]) : arch::F16::low(raw[i]);
    }
}
