// Backward of the gates (gate/gates.h). Per (token t, value head h), with dg and dbeta given:
//   da = -dg exp(A_log) sigmoid(a + dt_bias)       db = dbeta beta (1 - beta / most), most: 1, or 2 of 2 sigmoid(b)
//   dA_log[h] = sum over t of dg g                 ddt_bias[h] = sum over t of da
// in f32; sums are of numbers before rounding. Where dg is 0, da is 0, even if exp(A_log) is infinite.
//
// a, b, da, db [T, HV] f32, bf16 or f16; dg, dbeta [T, HV] f32. Adjacent threads have adjacent heads. A workgroup
// leaves its sums, which gradient_sums adds up.
#include "../gate/gates.h"

namespace {

constexpr int threads = gates::threads;

DEVICE void store(void *p, int64_t index, int type, float x) {
    if (type == DWK_F32) {
        ((float *)p)[index] = x;
    } else {
        const float known = math::canonical(x);
        ((short *)p)[index] = (short)(type == DWK_BF16 ? arch::Bf16::pack(known, 0.0f) : arch::F16::pack(known, 0.0f));
    }
}

} // namespace

KERNEL(threads, 4) void dw_gate_backward(dwk_gate_backward_args all) {
    SHARED float sums[2][threads];
    const dwk_gate_backward_args &args = arch::reread(all);
    const dwk_gate_args &x = args.gate;
    const int lanes = 1 << args.lanes_log2, slices = threads >> args.lanes_log2;
    const int lane = arch::thread() & (lanes - 1), slice = arch::thread() >> args.lanes_log2;
    const int64_t first = (int64_t)arch::workgroup() * args.rows, end = min_of<int64_t>(first + args.rows, x.tokens);
    const bool negative = x.flags & DWK_NEGATIVE_EIGENVALUES;
#pragma unroll 1
    for (int begin = 0; begin < x.value_heads; begin += lanes) {
        const int h = begin + lane;
        float of_a_log = 0.0f, of_dt_bias = 0.0f;
        if (h < x.value_heads) {
            const int block = (u32)h / (u32)x.block_heads, of_block = h - block * x.block_heads;
            const float a_log = load_scalar(x.a_log, h * x.a_log_stride, x.a_log_type);
            const float dt_bias = x.dt_bias ? load_scalar(x.dt_bias, h * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
            const float rate = arch::exp(a_log);
#pragma unroll 1
            for (int64_t t = first + slice; t < end; t += slices) {
                const dwk_gate_backward_args &args = arch::reread(all); // saves scalar registers
                const dwk_gate_args &x = args.gate;
                const auto at = [&](const dwk_token_strides &strides, int64_t block_stride)
                                    __attribute__((always_inline)) {
                                        return t * strides.token + block * block_stride + of_block * strides.head;
                                    };
                const float d_g = x.g ? x.g[t * x.g_strides.token + h * x.g_strides.head] : 0.0f;
                const float d_beta = x.beta ? x.beta[t * x.beta_strides.token + h * x.beta_strides.head] : 0.0f;
                const float sum = load_scalar(x.a, at(x.a_strides, x.a_block), x.a_type) + dt_bias;
                const float b = load_scalar(x.b, at(x.b_strides, x.b_block), x.b_type);
                const float open = math::slope(f32x2{sum, 0.0f}, false).value[0];
                const float d_a = d_g == 0.0f ? 0.0f : -d_g * (rate * open);
                const float d_b = d_beta * math::slope(f32x2{b, 0.0f}, false).slope[0];
                of_a_log += d_g == 0.0f ? 0.0f : -d_g * (rate * math::softplus(sum));
                of_dt_bias += d_a;
                const dwk_gate_backward_args &to = arch::reread(all);
                if (to.d_a) {
                    store(to.d_a, at(to.d_a_strides, to.d_a_block), to.d_a_type, d_a);
                }
                if (to.d_b) {
                    store(to.d_b, at(to.d_b_strides, to.d_b_block), to.d_b_type, negative ? 2.0f * d_b : d_b);
                }
            }
        }
        if (args.partials) {
            sums[0][arch::thread()] = of_a_log;
            sums[1][arch::thread()] = of_dt_bias;
            arch::workgroup_sync();
            if (slice == 0 && h < x.value_heads) {
                float *const to = args.partials + 2 * (int64_t)arch::workgroup() * x.value_heads + h;
                float a_log = 0.0f, dt_bias = 0.0f;
#pragma unroll 1
                for (int i = lane; i < threads; i += lanes) {
                    a_log += sums[0][i];
                    dt_bias += sums[1][i];
                }
                to[0] = a_log;
                to[x.value_heads] = dt_bias;
            }
            arch::workgroup_sync();
        }
    }
}
