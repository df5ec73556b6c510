// Gradients of a token's gates in memory.
#pragma once

#include "../../math/gates.h"
#include "../gates.h"
#include "record.h"

namespace prefill {
namespace backward {

DEVICE void store_scalar(void *p, int64_t index, int type, float x) {
    if (type == DWK_F32) {
        ((float *)p)[index] = x;
    } else {
        ((short *)p)[index] = type == DWK_BF16 ? Bf16::narrow(math::canonical(x)) : (short)F16::pack(x, 0.0f);
    }
}

// Writes the gradients of the gates of row `token` of a chunk that begins at `begin`: of g and beta, or of a and b.
// `d_gate`, `d_beta`: in units. `factors`: the record. Sets what the token adds to the gradients of A_log and dt_bias.
DEVICE void write_token_gates(const dwk_prefill_backward_args &x, int sequence, int begin, int head,
                              const char *factors, int token, float d_gate, float d_beta, float &d_a_log,
                              float &d_dt_bias) {
    const dwk_prefill_prepare_args &p = x.prepare;
    d_gate *= x.unit;
    d_beta *= x.unit;
    if (p.flags & DWK_RAW_GATES) {
        const float beta = factor_of(factors, beta_row)[token], gate = factor_of(factors, gate_row)[token];
        const HeadGates of_head = head_gates(p, head);
        const Gates raw = GateReader(p, sequence, begin + token, true).load(head);
        d_a_log = d_gate == 0.0f ? 0.0f : d_gate * gate;
        // Where dg is 0, da is 0: exp(A_log) may be infinite.
        d_gate = d_gate == 0.0f ? 0.0f : -d_gate * arch::exp(of_head.a_log) * math::sigmoid(raw.g + of_head.dt_bias);
        d_dt_bias = d_gate;
        d_beta *= beta * (1.0f - (p.flags & DWK_NEGATIVE_EIGENVALUES ? 0.5f : 1.0f) * beta);
    }
    if (x.d_g) {
        store_scalar(x.d_g, token_offset(x.d_g_strides, sequence, begin + token, head), x.d_g_type, d_gate);
    }
    if (x.d_beta) {
        store_scalar(x.d_beta, token_offset(x.d_beta_strides, sequence, begin + token, head), x.d_beta_type, d_beta);
    }
}

} // namespace backward
} // namespace prefill
