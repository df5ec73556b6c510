#include "inputs.h"

#include <cmath>

#include "parallel.h"

namespace bench {
namespace {

enum Stream : uint64_t { Q = 1, K, V, G, BETA, STATE };

// Nearly normal, by the place alone: the sum of four uniform numbers, of variance 1.
float normal(Stream stream, uint64_t place) {
    uint64_t x = (stream << 56) + place * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
    const int64_t sum = int64_t(x & 0xffff) + int64_t(x >> 16 & 0xffff) + int64_t(x >> 32 & 0xffff) + int64_t(x >> 48);
    return static_cast<float>(sum - 2 * 0xffff) * (1.7320508f / 65536.0f);
}

void unit_rows(std::vector<uint16_t> &out, Stream stream, int64_t row, int64_t rows, int dim) {
    std::vector<float> x(static_cast<size_t>(dim));
    for (int64_t r = row; r < row + rows; r++) {
        float squares = 0;
        for (int i = 0; i < dim; i++) {
            x[i] = normal(stream, r * dim + i);
            squares += x[i] * x[i];
        }
        for (int i = 0; i < dim; i++)
            out[r * dim + i] = to_bf16(x[i] / std::sqrt(squares));
    }
}

} // namespace

Inputs::Inputs(const Shape &s) {
    const int64_t tokens = s.tokens(), hk = s.key_heads, hv = s.value_heads;
    q.resize(tokens * hk * s.key_dim);
    k.resize(q.size());
    v.resize(tokens * hv * s.value_dim);
    g.resize(tokens * hv);
    beta.resize(tokens * hv);
    states.resize(s.sequences() * hv * s.key_dim * s.value_dim);
    in_parallel(tokens, [&](int64_t t) {
        unit_rows(q, Q, t * hk, hk, s.key_dim);
        unit_rows(k, K, t * hk, hk, s.key_dim);
        for (int64_t i = t * hv * s.value_dim; i < (t + 1) * hv * s.value_dim; i++)
            v[i] = to_bf16(normal(V, i));
        for (int64_t h = 0; h < hv; h++) {
            const int64_t i = t * hv + h;
            // A sixteenth of logsigmoid.
            g[i] = h % 4 == 3 ? 0.0f : -std::log1p(std::exp(-normal(G, i))) / 16.0f;
            beta[i] = 1.0f / (1.0f + std::exp(-normal(BETA, i)));
        }
    });
    const int64_t state = int64_t{s.key_dim} * s.value_dim;
    in_parallel(s.sequences() * hv, [&](int64_t n) {
        for (int64_t i = n * state; i < (n + 1) * state; i++)
            states[i] = normal(STATE, i);
    });
}

} // namespace bench
