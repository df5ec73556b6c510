// Layout of a slab of value columns in a workgroup's warps on sm_90a. Each warp owns 16 columns and all rows of every
// product. The four warps of a warpgroup multiply together.
#pragma once

#include "ring.h"

namespace prefill {

// Value columns of all warpgroups that the launch has.
template <int Keys, bool Outputs> DEVICE int slab_columns() { return scan_waves * 16 * groups<Stage<Keys, Outputs>>(); }
template <int Keys, bool Outputs> DEVICE int walking_threads() { return arch::threads(); }
template <int Keys, bool Outputs> constexpr int walk_threads() {
    return (Stage<Keys, Outputs>::most_groups + 1) * group_threads;
}
template <int Keys, bool Outputs> constexpr int walk_residency() { return 1; }
// Whether prefill_scan may be launched for sequences that are cut in two without summaries (forget.h).
constexpr bool early_starts = false;
// Whether segments of prefill_scan start early where few chunks before them forget (forget.h).
#ifdef PREFILL_FUSED
constexpr bool starts_soon = false;
#else
constexpr bool starts_soon = true;
#endif
// Whether workgroups of prefill_scan and prefill_summarise take several units of work if a launch has fewer workgroups
// than units. Those of prefill_scan must have two warpgroups that multiply.
#ifdef PREFILL_FUSED
constexpr bool walks_units(int) { return false; }
#else
constexpr bool walks_units(int keys) { return keys > 64 && keys <= 128; }
#endif
DEVICE int wave_column_of_slab(int column_tiles) { return arch::wave() * 16 * column_tiles; }

template <int Keys> struct StateLayout {
    static constexpr int key_tiles = Stage<Keys, true>::panels * 4;
    static constexpr int column_tiles = 1;
};
template <int Keys> using State = Tile[StateLayout<Keys>::key_tiles][StateLayout<Keys>::column_tiles];

DEVICE int state_key(int tile_index, int element, int lane) { return 16 * tile_index + LaneMap(lane).row(element); }
// A lane's two columns are adjacent.
DEVICE constexpr int state_column(int, int element) { return element / 2 % 2; }
DEVICE int first_column(int lane, int) { return lane / 4 * 2; }

// Whether registers are too few to load operands ahead: they are loaded when needed.
constexpr bool registers_are_short(int keys) { return keys > 128; }

// Bytes of dynamic shared memory that the host requests at a launch. tests/ptx.rs compares it with
// src/kernels/target.rs.
#define SCAN_SHARED_BYTES(keys)                                                                                        \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_scan_shared_bytes_k##keys =                          \
        prefill::Stage<keys, true>::dynamic_bytes;
#define SUMMARISE_SHARED_BYTES(keys)                                                                                   \
    extern "C" __attribute__((device, used)) const u32 dw_prefill_summarise_shared_bytes_k##keys =                     \
        prefill::Stage<keys, false>::dynamic_bytes;

} // namespace prefill
