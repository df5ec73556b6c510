// Layout of a slab of value columns in a workgroup's waves on CDNA. All waves have all columns and divide the rows.
// Four waves hold the state: each has some key elements and a tile of tokens. In prefill_scan four more waves compute
// the outputs, each for a tile of tokens.
#pragma once

#include "../../arch/tile.h"
#include "../batch.h"

namespace prefill {

using namespace tile;

constexpr int scan_waves = tiles; // waves that hold the state
constexpr int scan_threads = scan_waves * arch::lanes;
constexpr bool walks_units(int) { return false; }
// Column tiles of a workgroup's slab.
constexpr int scan_tiles = 2;
constexpr int slab_tiles(int keys) { return is_narrow(keys) ? 1 : scan_tiles; }
// Whether registers cannot hold operands of the whole state.
constexpr bool registers_are_short(int keys) { return bucket_of(keys) > 128; }

// Whether the waves that hold the state pass rows of K to each other in LDS. Otherwise each loads K in two ways.
constexpr bool shares_keys(int keys) { return is_narrow(keys) && !registers_are_short(keys); }

template <int Keys, bool Outputs> constexpr int slab_columns() { return 16 * slab_tiles(Keys); }
template <int Keys, bool Outputs> constexpr int walk_threads() { return (Outputs ? 2 : 1) * scan_threads; }
template <int Keys, bool Outputs> constexpr int walking_threads() { return walk_threads<Keys, Outputs>(); }
// Waves that share a SIMD.
template <int Keys, bool Outputs> constexpr int walk_residency() {
    return Outputs || registers_are_short(Keys) ? 2 : 3;
}
DEVICE int wave_column_of_slab(int) { return 0; }

// Pairs of key tiles. Wave w owns pairs w, w + 4, ...
constexpr int key_pairs(int keys) { return keys / 32; }
constexpr int own_pairs(int keys) { return (key_pairs(keys) + scan_waves - 1) / scan_waves; }

template <int Keys> struct StateLayout {
    static constexpr int key_tiles = 2 * own_pairs(Keys);
    static constexpr int column_tiles = slab_tiles(Keys);
};
template <int Keys> using State = Tile[StateLayout<Keys>::key_tiles][StateLayout<Keys>::column_tiles];

// Key of an element of the state. Operands of Q and K come in pairs of 32 key elements: a lane's four elements of tile
// 2 b + s begin at key 32 b + 8 (lane / 16) + 4 s.
DEVICE int state_key(int tile_index, int element, int lane) {
    const int pair = tile_index / 2 * scan_waves + arch::wave();
    return pair * 32 + lane / 16 * 8 + tile_index % 2 * 4 + element;
}
DEVICE constexpr int state_column(int column_tile, int) { return column_tile; }
// A lane's columns, one of each tile, are adjacent.
DEVICE int first_column(int lane, int column_tiles) { return lane % 16 * column_tiles; }

} // namespace prefill
