// Roles of prefill_fused on sm_90a: implements ../fused.h. Two warpgroups hold 64 columns of the state each. The warps
// of a third copy and make chunks, in two pairs.
#pragma once

#include "../fused_mode.h"

#include "../segment.h"
#include "maker.h"

namespace prefill {

template <int Keys, bool Outputs> constexpr int fused_threads() { return 3 * group_threads; }
template <int Keys, bool Outputs> constexpr int fused_residency() { return 1; }
constexpr int making_threads = 0;
constexpr bool may_prepare = false;
template <int Keys> DEVICE float *choice_memory() { return nullptr; }
template <class T, int Keys> DEVICE void prepare_instead(const dwk_prefill_fused_args &) {}
constexpr bool fused_walks_units = false;
template <class T, int Keys> DEVICE void walk_fused_units(const dwk_prefill_fused_args &) {}

// Registers per thread of the warps that make and of those that hold the state.
constexpr int making_registers = 88, fused_state_registers = 208;
static_assert(making_registers + 2 * fused_state_registers <= 3 * 168, "setmaxnreg would wait forever");

template <class T, int Keys, bool Outputs>
DEVICE void run_making_waves(const dwk_prefill_fused_args &x, const Segment &segment, const Work &work) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    if (arch::thread() == 0) {
        Handover<Stage>::begin();
    }
    arch::workgroup_sync();
    if (arch::wave() < 2 * scan_waves) {
        return;
    }
    arch::give_registers<making_registers>();
    Maker<T, Keys, Outputs>(x, segment, work.head, work.key_head, work.slab * slab_columns<Keys, Outputs>()).run();
    arch::end_wave();
}

template <int Keys, bool Outputs, class F> DEVICE void run_fused_state_waves(const F &f) {
    arch::take_registers<fused_state_registers>();
    f();
}

// Bytes of dynamic shared memory: 1024 for alignment.
template <class Stage> constexpr u32 fused_bytes() { return Stage::maker_memory + pairs * sizeof(MakerMemory) + 1024; }

#define FUSED_SHARED_BYTES(keys)                                                                                       \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_fused_shared_bytes_k##keys =                         \
        prefill::fused_bytes<prefill::Stage<keys, true>>();
#define FUSED_SUMMARISE_SHARED_BYTES(keys)                                                                             \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_fused_summarise_shared_bytes_k##keys =               \
        prefill::fused_bytes<prefill::Stage<keys, false>>();

} // namespace prefill
