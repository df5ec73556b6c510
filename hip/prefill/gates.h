// Gates g and beta of a chunk's tokens for prefill_prepare, one token per thread.
#pragma once

#include "../math/gates.h"
#include "../tensor/scalar.h"
#include "unit.h"

namespace prefill {

// Smallest g; lower values, -infinity included, are replaced by it. exp(-120) is 0 in f32, so the token erases the
// state all the same. The sums of a chunk stay small enough to be accurate.
constexpr float lowest_gate = -120.0f;

struct Gates {
    float g;
    float beta;
};

// A_log and dt_bias of a value head, with raw gates.
struct HeadGates {
    float a_log, dt_bias;
};
DEVICE HeadGates head_gates(const dwk_prefill_prepare_args &x, int64_t head) {
    const float a_log = load_scalar(x.a_log, head * x.a_log_stride, x.a_log_type);
    const float dt_bias = x.dt_bias ? load_scalar(x.dt_bias, head * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
    return HeadGates{a_log, dt_bias};
}

// g and beta from a and b.
DEVICE Gates computed_gates(Gates raw, HeadGates head, u32 flags) {
    return Gates{math::gate(raw.g, head.a_log, head.dt_bias), math::beta(raw.beta, flags & DWK_NEGATIVE_EIGENVALUES)};
}

// Makes NaNs canonical and g at least `lowest_gate`.
DEVICE void bound_gates(Gates &out) {
    out.g = math::canonical(out.g);
    out.beta = math::canonical(out.beta);
    out.g = out.g < lowest_gate ? lowest_gate : out.g;
}

// Reads g and beta of this thread's token for any value head. Rows past the sequence's end get 0 and 0.
class GateReader {
  public:
    DEVICE_MEMBER GateReader(const dwk_prefill_prepare_args &x, int sequence, int64_t token, bool inside)
        : x(x), inside(inside), g_index(sequence * x.g_strides.sequence + token * x.g_strides.token),
          beta_index(sequence * x.beta_strides.sequence + token * x.beta_strides.token) {}

    // Loads the numbers in memory. Without a tensor, g = 0 or beta = 1.
    DEVICE_MEMBER Gates load(int64_t head) const {
        Gates out{0.0f, 1.0f};
        if (x.beta) {
            out.beta = load_scalar(x.beta, beta_index + head * x.beta_strides.head, arch::opaque_uniform(x.beta_type));
        }
        if (x.g) {
            out.g = load_scalar(x.g, g_index + head * x.g_strides.head, arch::opaque_uniform(x.g_type));
        }
        return out;
    }
    DEVICE_MEMBER Gates load_ahead(int64_t head) const { return inside ? load(head) : Gates{}; }

    // g and beta as bits in memory.
    struct Bits {
        int g, beta;
    };
    // Starts to load a head. Nothing waits for it before `numbers`. `load`(address, whether it has 32 bits) gives bits.
    template <class F> DEVICE_MEMBER Bits load_bits(int64_t head, const F &load) const {
        const auto at = [&](const void *p, int64_t index, int type) __attribute__((always_inline)) {
            const bool wide = type == DWK_F32;
            return p && inside ? load((const char *)p + index * (wide ? 4 : 2), wide) : 0;
        };
        return Bits{at(x.g, g_index + head * x.g_strides.head, x.g_type),
                    at(x.beta, beta_index + head * x.beta_strides.head, x.beta_type)};
    }
    DEVICE_MEMBER Gates numbers(Bits loaded) const {
        return Gates{x.g ? scalar_of(loaded.g, x.g_type) : 0.0f, x.beta ? scalar_of(loaded.beta, x.beta_type) : 1.0f};
    }

    // Loads N heads that are `step` apart; only the first `count` exist.
    template <int N> DEVICE_MEMBER void load_ahead(Gates (&out)[N], int64_t head, int64_t step, int count) const {
        float g[N] = {}, beta[N];
        for (int i = 0; i < N; ++i) {
            beta[i] = 1.0f;
        }
        if (inside && x.g) {
            load_scalars(g, x.g, g_index + head * x.g_strides.head, step * x.g_strides.head, count, x.g_type);
        }
        if (inside && x.beta) {
            load_scalars(beta, x.beta, beta_index + head * x.beta_strides.head, step * x.beta_strides.head, count,
                         x.beta_type);
        }
        for (int i = 0; i < N; ++i) {
            out[i] = Gates{g[i], beta[i]};
        }
    }

    // g and beta of a head: computed from a and b if gates are raw. NaNs are canonical, and g is at least
    // `lowest_gate`. loaded() returns the numbers in memory.
    template <class F> DEVICE_MEMBER Gates gates_of(int64_t head, F loaded) const {
        Gates out{0.0f, 0.0f};
        const u32 flags = arch::opaque_uniform(x.flags);
        if (inside) {
            out = loaded();
            if (flags & DWK_RAW_GATES) {
                const float a_log = load_scalar(x.a_log, head * x.a_log_stride, x.a_log_type);
                const float dt_bias =
                    x.dt_bias ? load_scalar(x.dt_bias, head * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
                out = computed_gates(out, HeadGates{a_log, dt_bias}, flags);
            }
        }
        bound_gates(out);
        return out;
    }

  private:
    const dwk_prefill_prepare_args &x;
    const bool inside;
    const int64_t g_index;
    const int64_t beta_index;
};

} // namespace prefill
