// Ring of stages in shared memory, through which chunks reach the matrix unit on sm_90a: layout and hand-over of a
// stage.
#pragma once

#include "../../arch/tile.h"
#include "../record.h"

namespace prefill {

using namespace tile;

// Warps of a warpgroup. They multiply together, each for 16 columns. Four more warps copy, one per scheduler.
constexpr int scan_waves = 4;
constexpr int group_threads = scan_waves * arch::lanes;
// A matrix in shared memory, in wgmma's layout: panels of rows of 128 bytes. The row's number permutes the 16-byte
// groups of a row, so that eight rows of one group lie in different banks.
constexpr int panel_bytes = chunk * 128;
DEVICE constexpr u32 swizzled(int row, int group) { return row * 128 + ((group ^ (row & 7)) << 4); }

// One chunk in shared memory: offsets of K, Q, T, P, V and the row factors. Q and P exist only with outputs. V has one
// panel for the columns of each warpgroup that multiplies.
template <int Keys, bool Outputs> struct Stage {
    static constexpr bool outputs = Outputs;
    // Most warpgroups that multiply; the launch decides how many do. They share K, Q, T and P.
    static constexpr int most_groups = Keys <= 128 ? 2 : 1;
    static constexpr int panels = (Keys + 63) / 64;
    static constexpr u32 k = 0;
    static constexpr u32 q = k + panels * panel_bytes;
    static constexpr u32 t = q + (Outputs ? panels * panel_bytes : 0);
    static constexpr u32 p = t + panel_bytes;
    static constexpr u32 v = p + (Outputs ? panel_bytes : 0);
    static constexpr u32 rows = v + most_groups * panel_bytes;
    static constexpr u32 bytes = rows + 2048; // a multiple of 1024, the period of the permutation
    static constexpr int count = 3 * bytes + 1024 <= arch::Traits::shared_bytes ? 3 : 2;
    static constexpr u32 dynamic_bytes = count * bytes + 1024; // 1024 for alignment
};
static_assert(row_factors * chunk * 4 + 16 <= 2048, "row factors fit");

extern "C" SHARED __attribute__((aligned(16))) char dw_dynamic_shared[];

using arch::copy_async;
using arch::shared_address;
using arch::store_shared;

// Number of warpgroups that multiply in this workgroup, and index of this warp's warpgroup.
template <class Stage> DEVICE int groups() { return Stage::most_groups == 1 ? 1 : arch::threads() / group_threads - 1; }
template <class Stage> DEVICE int group() { return groups<Stage>() == 1 ? 0 : arch::wave() / scan_waves; }

// Barriers that hand a full stage of the ring from the copying warps to each warpgroup, and back when it has been read.
template <class Stage> struct Handover {
    static DEVICE_MEMBER void wait_full(int group, int stage) {
        arch::barrier_wait(id(group, stage), 2 * group_threads);
    }
    static DEVICE_MEMBER void full(int group, int stage) { arch::barrier_arrive(id(group, stage), 2 * group_threads); }
    static DEVICE_MEMBER void wait_empty(int group, int stage) {
        arch::barrier_wait(id(group, 3 + stage), 2 * group_threads);
    }
    static DEVICE_MEMBER void empty(int group, int stage) {
        arch::barrier_arrive(id(group, 3 + stage), 2 * group_threads);
    }

  private:
    static DEVICE_MEMBER int id(int group, int which) { return 1 + 6 * group + which; }
};

// Address of the ring, aligned to 1024 bytes.
DEVICE char *ring() { return dw_dynamic_shared + (-shared_address(dw_dynamic_shared) & 1023); }

// Index of a thread, and of its warp, in its warpgroup.
DEVICE int thread_of_group() { return arch::thread() % (u32)group_threads; }
DEVICE int wave_of_group() { return arch::wave() % (u32)scan_waves; }

} // namespace prefill
