// Contract of a target for walks over chunks (prefill_scan, prefill_summarise), part 1: how a workgroup's waves share a
// slab of value columns, and how their registers hold the state S [K, slab]. <target>/layout.h supplies
//
//   StateLayout<Keys>::key_tiles, column_tiles    16x16 tiles of S that a wave holds
//   State<Keys>                                   Tile[key_tiles][column_tiles]
//   state_key(tile, element, lane)                key of an element of S
//   state_column(column_tile, element)            column of an element, counted from the lane's first
//   first_column(lane, column_tiles)              the lane's first column, counted from its wave's first
//   wave_column_of_slab(column_tiles)             the wave's first column, counted from its slab's first
//   slab_columns<Keys, Outputs>()                 value columns of a workgroup of scan or, without outputs, summarise
//   walk_threads<Keys, Outputs>()                 most threads of a workgroup, as the kernel is compiled
//   walking_threads<Keys, Outputs>()              threads of a workgroup, as launched
//   walk_residency<Keys, Outputs>()               residency for KERNEL
//   walks_units(keys)                             whether workgroups of scan and summarise may take several units
//   early_starts, starts_soon                     how segments of scan may start without a summary (forget.h)
//   SCAN_SHARED_BYTES(keys) SUMMARISE_SHARED_BYTES(keys)
//                                                 declare the dynamic shared memory of a kernel; empty if it is static
#pragma once

#if defined(__NVPTX__)
#include "sm90/layout.h"
#else
#include "gfx9/layout.h"
#endif

namespace prefill {

template <int Keys> struct CheckedLayout {
    static_assert(sizeof(State<Keys>) == sizeof(Tile) * StateLayout<Keys>::key_tiles * StateLayout<Keys>::column_tiles,
                  "a wave's part of the state is an array of tiles");
    static_assert(walk_threads<Keys, true>() % arch::lanes == 0 && walk_threads<Keys, true>() <= 1024, "whole waves");
    static_assert(walk_threads<Keys, false>() <= walk_threads<Keys, true>(), "outputs take more waves, not fewer");
};
template struct CheckedLayout<64>;
template struct CheckedLayout<96>;
template struct CheckedLayout<128>;
template struct CheckedLayout<192>;
template struct CheckedLayout<256>;

} // namespace prefill
