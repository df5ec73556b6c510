// Barriers and priorities of lanes, waves and kernels on CDNA.
#pragma once

#include "../base.h"

namespace arch {

// Nothing to wait for: kernels of a stream do not overlap on this target.
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_begin() {}
DEVICE void end_without_work() {}

// Barrier of all waves of the workgroup. Makes LDS visible: a bare s_barrier does not wait for LDS.
DEVICE void workgroup_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Makes writes of the lanes of one wave to LDS visible to each other.
DEVICE void wave_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// Barrier of a workgroup of `Waves` waves.
template <int Waves> DEVICE void team_sync() {
    if constexpr (Waves == 1) {
        wave_sync();
    } else {
        workgroup_sync();
    }
}

// Waits for all of this wave's loads and stores of memory.
DEVICE void loads_done() { __builtin_amdgcn_s_waitcnt(0x0f70); }

// Sets this wave's priority, 0 to 3. A SIMD issues from the ready wave with the highest priority.
template <int Priority> DEVICE void set_priority() { __builtin_amdgcn_s_setprio(Priority); }

// Ends this wave. Later barriers do not wait for it: the hardware counts the waves that run.
DEVICE void end_wave() { __builtin_amdgcn_endpgm(); }

} // namespace arch
