// Adjacent channels of a token that one thread of the convolution owns: an octet, or one channel if an octet is not
// contiguous.
#pragma once

#include "../tensor/pieces.h"

namespace conv {

using piece::octet;

// N adjacent channels of a token: `Values` in f32, `Bits` as stored in memory.
template <int N> struct Channels;
template <> struct Channels<octet> {
    typedef piece::Octet Values;
    typedef i32x4 Bits;
    static DEVICE_MEMBER Bits load(const char *p) { return arch::load_b128(p); }
    static DEVICE_MEMBER void store(char *p, Bits x) { arch::store_b128(p, x); }
    template <class T> static DEVICE_MEMBER Values widened(Bits x) { return piece::widened<T>(x); }
    template <class T> static DEVICE_MEMBER Bits rounded(Values x) { return piece::rounded<T>(x); }
    // Loads channels that are `stride` bytes apart.
    static DEVICE_MEMBER Bits gather(const char *p, int64_t stride) {
        if (stride == 2 && arch::in_one_access(p)) {
            return load(p);
        }
        Bits out;
        for (int i = 0; i < octet / 2; ++i) {
            out[i] = *(const unsigned short *)(p + 2 * i * stride) | *(const unsigned short *)(p + (2 * i + 1) * stride)
                                                                         << 16;
        }
        return out;
    }
    static DEVICE_MEMBER void scatter(char *p, int64_t stride, Bits x) {
        if (stride == 2 && arch::in_one_access(p)) {
            return store(p, x);
        }
        for (int i = 0; i < octet / 2; ++i) {
            *(short *)(p + 2 * i * stride) = (short)x[i];
            *(short *)(p + (2 * i + 1) * stride) = (short)(x[i] >> 16);
        }
    }
};
template <> struct Channels<1> {
    typedef float Values __attribute__((ext_vector_type(1)));
    typedef int Bits;
    static DEVICE_MEMBER Bits load(const char *p) { return *(const unsigned short *)p; }
    static DEVICE_MEMBER void store(char *p, Bits x) { *(short *)p = (short)x; }
    template <class T> static DEVICE_MEMBER Values widened(Bits x) { return Values{T::low(x)}; }
    template <class T> static DEVICE_MEMBER Bits rounded(Values x) { return T::pack(x[0], 0.0f); }
    static DEVICE_MEMBER Bits gather(const char *p, int64_t) { return load(p); }
    static DEVICE_MEMBER void scatter(char *p, int64_t, Bits x) { store(p, x); }
};

} // namespace conv
