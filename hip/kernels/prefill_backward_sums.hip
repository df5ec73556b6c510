// Last kernel of the backward of prefill with raw gates: gradients of A_log and dt_bias, sums over all chunks. One wave
// per value head adds in an order that depends on the number of records alone.
//
// partials [records, HV, 2], d_a_log, d_dt_bias [HV], f32.
#include "../arch/contract.h"
#include "../kernel_args.h"

KERNEL(arch::lanes, 2) void dw_prefill_backward_sums(dwk_prefill_backward_args x) {
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const int head = arch::workgroup();
    float of_a_log = 0.0f, of_dt_bias = 0.0f;
#pragma unroll 1
    for (int record = arch::lane(); record < x.records; record += arch::lanes) {
        const float *const from = x.partials + 2 * ((int64_t)record * x.prepare.value_heads + head);
        of_a_log += from[0];
        of_dt_bias += from[1];
    }
    of_a_log = arch::inclusive_sum(of_a_log);
    of_dt_bias = arch::inclusive_sum(of_dt_bias);
    if (arch::lane() == arch::lanes - 1) {
        if (x.d_a_log) {
            x.d_a_log[head * x.d_a_log_stride] = of_a_log;
        }
        if (x.d_dt_bias) {
            x.d_dt_bias[head * x.d_dt_bias_stride] = of_dt_bias;
        }
    }
}
