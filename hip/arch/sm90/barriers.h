// Order between lanes, warps and kernels on sm_90a, and the registers that warps hand each other.
#pragma once

#include "../base.h"

namespace arch {

// A kernel may begin before the kernels before it in the stream are complete. Before `wait_for_previous_kernel`
// returns, nothing that they write may be read. `let_next_kernel_begin` follows that wait: the next kernel could not
// even rely on what was complete before this one.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Barrier of all waves of the workgroup.
DEVICE void workgroup_sync() { __syncthreads(); }
// Makes writes of the lanes of one wave to shared memory visible to each other.
DEVICE void wave_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// Barrier of a workgroup of `Waves` waves.
template <int Waves> DEVICE void team_sync() {
    if constexpr (Waves == 1) {
        wave_sync();
    } else {
        workgroup_sync();
    }
}

// Barrier `id` of some of the workgroup's warps, `threads` of them in all: `wait` returns when all have come, `arrive`
// at once.
DEVICE void barrier_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Registers of each thread of this warpgroup from here on: gives some up, or waits until there are enough.
template <int Registers> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
// Ends this wave. ptxas gives each role of a kernel its own registers where the roles' code does not join again.
[[noreturn]] DEVICE void end_wave() {
    asm volatile("exit;");
    __builtin_unreachable();
}
} // namespace arch
