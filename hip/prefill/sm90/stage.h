// Shared memory through which chunks reach the matrix unit on sm_90a: panels of matrices, and the ring that holds the
// chunks.
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

extern "C" SHARED __attribute__((aligned(16))) char dw_dynamic_shared[];

using arch::copy_async;
using arch::shared_address;
using arch::store_shared;

// Number of warpgroups that multiply in this workgroup, and index of this warp's warpgroup.
template <class Stage> DEVICE int groups() { return Stage::most_groups == 1 ? 1 : arch::threads() / group_threads - 1; }
// By the thread's number, which unlike a wave's number costs no register from chunk to chunk.
template <class Stage> DEVICE int group() { return groups<Stage>() == 1 ? 0 : arch::thread() / group_threads; }

// Barrier of the four copying warps.
DEVICE void copying_warps_sync() { arch::barrier_wait(13, group_threads); }

// Address of the ring, aligned to 1024 bytes.
DEVICE char *ring() { return dw_dynamic_shared + (-shared_address(dw_dynamic_shared) & 1023); }

// Index of a thread, and of its warp, in its warpgroup.
DEVICE int thread_of_group() { return arch::thread() % (u32)group_threads; }
DEVICE int wave_of_group() { return arch::wave() % (u32)scan_waves; }

// Places of one chunk's parts, in bytes from the start of the ring.
struct Slots {
    u32 keys;     // K and Q
    u32 matrices; // T and P
    u32 values;   // V
    u32 factors;  // row factors
};

} // namespace prefill
