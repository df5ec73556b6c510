// Layout of a slab of value columns in a workgroup of prefill_fused on CDNA. Four waves hold the state, one per SIMD:
// all key elements of 32 value columns each. Four waves before them make T, P and the row factors (fused.h). SIMDs prefer
// older waves, and those that hold the state wait for the others.
#pragma once

#include "../../arch/tile.h"
#include "../batch.h"

namespace arch {

// The walk's arguments are a part of those of prefill_fused.
template <> constexpr u32 arguments_offset<dwk_prefill_scan_args> = __builtin_offsetof(dwk_prefill_fused_args, scan);

} // namespace arch

namespace prefill {

using namespace tile;

constexpr int state_waves = 4;
constexpr int making_waves = tiles; // one per row tile
// Column tiles of a wave that holds the state.
constexpr int wave_tiles = 2;

template <int Keys, bool Outputs> constexpr int slab_columns() { return 16 * wave_tiles * state_waves; }
template <int Keys, bool Outputs> constexpr int walk_threads() { return (state_waves + making_waves) * arch::lanes; }
template <int Keys, bool Outputs> constexpr int walking_threads() { return walk_threads<Keys, Outputs>(); }
// Waves that share a SIMD.
template <int Keys, bool Outputs> constexpr int walk_residency() { return 2; }
DEVICE int wave_column_of_slab(int column_tiles) { return 16 * column_tiles * (arch::wave() - making_waves); }

// Pairs of key tiles.
constexpr int key_pairs(int keys) { return keys / 32; }

template <int Keys> struct StateLayout {
    static constexpr int key_tiles = 2 * key_pairs(Keys);
    static constexpr int column_tiles = wave_tiles;
};
template <int Keys> using State = Tile[StateLayout<Keys>::key_tiles][StateLayout<Keys>::column_tiles];

// Key of an element of the state. Operands of Q and K come in pairs of 32 key elements: a lane's four elements of tile
// 2 b + s begin at key 32 b + 8 (lane / 16) + 4 s.
DEVICE int state_key(int tile_index, int element, int lane) {
    return tile_index / 2 * 32 + lane / 16 * 8 + tile_index % 2 * 4 + element;
}
DEVICE constexpr int state_column(int column_tile, int) { return column_tile; }
// A lane's columns, one of each tile, are adjacent.
DEVICE int first_column(int lane, int column_tiles) { return lane % 16 * column_tiles; }

} // namespace prefill
