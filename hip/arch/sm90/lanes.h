// Lanes, warps and workgroups of NVIDIA sm_90a. A warp is a wave of 32 lanes. Shuffles move values between lanes.
#pragma once

#include "../base.h"
#include "barriers.h"

#define KERNEL(threads, workgroups) extern "C" __attribute__((global, launch_bounds(threads, workgroups)))

namespace arch {

constexpr int lanes = 32;

DEVICE int thread() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE int workgroup() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE int workgroups() { return __nvvm_read_ptx_sreg_nctaid_x(); }
// Read where it stands: no register holds it through a loop.
DEVICE int workgroups_here() {
    int x;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
    return x;
}
DEVICE int lane() { return thread() & (lanes - 1); }
// Threads of this workgroup.
DEVICE int threads() { return __nvvm_read_ptx_sreg_ntid_x(); }

// In place of `wait_for_previous_kernel` and `let_next_kernel_begin` (barriers.h), in a workgroup that has no work and
// ends here. Such kernels in a row may all run beside the kernel before the first of them. So what their workgroups
// read here, and what the kernel after them reads before it waits, must be older than that kernel. One workgroup waits,
// so that no kernel is complete before those before it.
DEVICE void end_without_work() {
    let_next_kernel_begin();
    if (workgroup() == 0) {
        wait_for_previous_kernel();
    }
}

// Reads x of lane `from`.
DEVICE int read_lane(int x, int from) { return __nvvm_shfl_sync_idx_i32(0xffffffff, x, from, 0x1f); }
DEVICE float read_lane(float x, int from) { return bits<float>(read_lane(bits<int>(x), from)); }

// x of the lane whose number differs by the bit `step`.
DEVICE float exchanged(float x, int step) { return __nvvm_shfl_sync_bfly_f32(0xffffffff, x, step, 0x1f); }
DEVICE int exchanged(int x, int step) { return __nvvm_shfl_sync_bfly_i32(0xffffffff, x, step, 0x1f); }

// Number of this wave in its workgroup, equal in all its lanes.
DEVICE int wave() { return read_lane(thread() / lanes, 0); }

// Inclusive prefix sum over the lanes of a wave.
DEVICE float inclusive_sum(float x) {
    for (int step = 1; step < lanes; step *= 2) {
        const float before = __nvvm_shfl_sync_up_f32(0xffffffff, x, step, 0);
        x += lane() >= step ? before : 0.0f;
    }
    return x;
}
// Inclusive prefix maximum over the lanes of a wave.
DEVICE int inclusive_max(int x) {
    for (int step = 1; step < lanes; step *= 2) {
        x = max_of(x, __nvvm_shfl_sync_up_i32(0xffffffff, x, step, 0)); // lanes below `step` get their own x
    }
    return x;
}

// Sum over each half of 16 lanes; all 16 lanes get the same bits. The other half need not take part.
DEVICE float row_sum(float x) {
    const u32 half = 0xffffu << (lane() & 16);
    for (int step = 8; step > 0; step /= 2) {
        x += __nvvm_shfl_sync_bfly_f32(half, x, step, 0x1f);
    }
    return x;
}

// Sum over eight lanes, `Step` apart; all eight get the same bits.
template <int Step> DEVICE float sum_of_eight(float x) {
    for (int step = Step; step < 8 * Step; step *= 2) {
        x += exchanged(x, step);
    }
    return x;
}

// Exchanges x with the same lane of the other half.
DEVICE float other_row(float x) { return __nvvm_shfl_sync_bfly_f32(0xffffffff, x, 16, 0x1f); }

// Bit l of the result is x of lane l.
DEVICE u64 ballot(bool x) { return (u32)__nvvm_vote_ballot_sync(0xffffffff, x); }

// chunk_sum: prefix sum and total over the 64 threads of a workgroup. chunk_max: greatest x. Each uses its own half of
// `scratch`, four words of shared memory. Do not reuse `scratch` before a barrier.
DEVICE float chunk_sum(float x, float &total, float *scratch) {
    float sum = inclusive_sum(x);
    if (lane() == lanes - 1) {
        scratch[thread() / lanes] = sum;
    }
    workgroup_sync();
    sum += thread() / lanes ? scratch[0] : 0.0f;
    total = scratch[1] + scratch[0];
    return sum;
}
DEVICE int chunk_max(int x, int *scratch) {
    const int greatest = inclusive_max(x);
    if (lane() == lanes - 1) {
        scratch[2 + thread() / lanes] = greatest;
    }
    workgroup_sync();
    return max_of(scratch[2], scratch[3]);
}
// Computes the prefix sum and total of x and the greatest `key` in one exchange.
DEVICE float chunk_sum(float x, float &total, int key, int &greatest, float *scratch) {
    const int of_warp = __nvvm_redux_sync_max(key, 0xffffffff);
    if (lane() == 0) {
        ((int *)scratch)[2 + thread() / lanes] = of_warp;
    }
    const float sum = chunk_sum(x, total, scratch);
    greatest = max_of(((int *)scratch)[2], ((int *)scratch)[3]);
    return sum;
}

// out[i] = row i of column `Column` of a 16x16 matrix, for i < Column. `four(column, i / 4)` reads four rows of the
// matrix from memory. Each lane of a half also holds a column in registers; this target does not read it.
template <int Column, class Memory>
DEVICE void spread_column(float (&out)[16], const float (&)[16], const Memory &four) {
    for (int q = 0; q < (Column + 3) / 4; ++q) {
        const f32x4 rows = four(Column, q);
        for (int r = 0; r < 4; ++r) {
            out[4 * q + r] = rows[r];
        }
    }
}

} // namespace arch
