// Inputs on the host, the same on every machine: l2-normalised q and k, gates of which a quarter of the heads has none,
// initial states.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "shapes.h"

namespace bench {

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1); // no NaN comes here
    return static_cast<uint16_t>(bits >> 16);
}

inline float from_bf16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

struct Inputs {
    std::vector<uint16_t> q;   // bf16 [T, HK, K]
    std::vector<uint16_t> k;   // bf16 [T, HK, K]
    std::vector<uint16_t> v;   // bf16 [T, HV, V]
    std::vector<float> g;      // [T, HV]
    std::vector<float> beta;   // [T, HV]
    std::vector<float> states; // [N, HV, K, V]

    explicit Inputs(const Shape &shape);
};

} // namespace bench
