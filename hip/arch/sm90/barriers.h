// Barriers of lanes, warps and kernels on sm_90a, and register counts of warpgroups.
#pragma once

#include "../base.h"

namespace arch {

// A kernel may begin before earlier kernels of the stream are complete. It must not read their results before
// `wait_for_previous_kernel` returns. Call `let_next_kernel_begin` only after that wait, because otherwise the next
// kernel could overtake kernels before this one; `end_without_work` (lanes.h) is the exception.
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

// Named barrier `id` between `threads` threads, which may be some of the workgroup's warps. `barrier_wait` returns when
// all have arrived; `barrier_arrive` returns at once.
DEVICE void barrier_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Barrier in shared memory, 8 bytes at `at`, that counts phases of `count` arrivals each. `phase_arrive` returns at
// once. `phase_wait` returns when the phase is complete of which `number` is the count of phases before it; the barrier
// must not be further than one phase ahead of it.
DEVICE void phases_begin(u32 at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
DEVICE void phase_arrive(u32 at) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(at) : "memory");
}
DEVICE void phase_wait(u32 at, int number) {
    int done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(at), "r"(number & 1)
                     : "memory");
    } while (!done);
    wave_sync(); // lanes may leave the loop one by one
}
// Arrives, and makes the phase wait for `bytes` of copy_bulk and copy_box, too.
DEVICE void phase_arrive_expecting(u32 at, int bytes) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(at), "r"(bytes)
                 : "memory");
}
// Arrives as soon as the copies that this thread has started are complete. Returns at once.
DEVICE void phase_arrive_after_copies(u32 at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// Makes the initialisation of barriers visible to asynchronous copies.
DEVICE void publish_phases() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Sets the registers per thread of this warpgroup. `give_registers` releases some; `take_registers` waits until enough
// are free.
template <int Registers> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
// Ends this wave. ptxas allocates registers separately for each role of a kernel if the roles' code does not join
// again.
[[noreturn]] DEVICE void end_wave() {
    asm volatile("exit;");
    __builtin_unreachable();
}
} // namespace arch
