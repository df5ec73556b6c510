// How a slab of value columns lies in a workgroup's waves on CDNA. The waves share the columns and divide the rows,
// twice: four waves hold the state, each some key elements of it and a tile of tokens; in prefill_scan four more make
// the outputs, each of a tile of tokens.
#pragma once

#include "../../arch/tile.h"
#include "../batch.h"

namespace prefill {

using namespace tile;

constexpr int scan_waves = tiles; // that hold the state
constexpr int scan_threads = scan_waves * arch::lanes;
// Column tiles of a workgroup, which all its waves share.
constexpr int scan_tiles = 2;
// Whether registers do not hold operands of the whole state.
constexpr bool registers_are_short(int keys) { return keys > 128; }

template <int Keys, bool Outputs> constexpr int slab_columns() { return 16 * scan_tiles; }
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
    static constexpr int column_tiles = scan_tiles;
};
template <int Keys> using State = Tile[StateLayout<Keys>::key_tiles][StateLayout<Keys>::column_tiles];

// Operands of Q and K come in pairs of 32 key elements: the first of a lane's four elements of tile 2 b + s is
// 32 b + 8 (lane / 16) + 4 s.
DEVICE int state_key(int tile_index, int element, int lane) {
    const int pair = tile_index / 2 * scan_waves + arch::wave();
    return pair * 32 + lane / 16 * 8 + tile_index % 2 * 4 + element;
}
DEVICE constexpr int state_column(int column_tile, int) { return column_tile; }
// The columns of a lane, one of each tile, are neighbours.
DEVICE int first_column(int lane, int column_tiles) { return lane % 16 * column_tiles; }

// The smallest K that is launched with a bucket of `Keys`: 16 more than the next smaller bucket.
constexpr int smallest_key_dim(int bucket) {
    return bucket == 256 ? 208 : bucket == 192 ? 144 : bucket == 128 ? 112 : bucket == 96 ? 80 : 16;
}

// LDS is declared in the code object.
#define SCAN_SHARED_BYTES(keys)
#define SUMMARISE_SHARED_BYTES(keys)

} // namespace prefill
