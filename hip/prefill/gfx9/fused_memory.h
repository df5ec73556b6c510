// LDS of prefill_fused on CDNA: what the making waves pass to the waves that hold the state, and to each other.
#pragma once

#include "../../math/inverse.h"
#include "../factors.h"
#include "../record.h"
#include "layout.h"

namespace prefill {

using arch::OperandPair;

// Two adjacent lower blocks of T or P as left operands, 16 bytes a lane. Blocks are counted by lower_block.
typedef i32x4 BlockPairs[lower_blocks / 2][arch::lanes];

// A unit of work (units.h). Without tokens: none.
struct UnitPlace {
    int sequence, begin, end, head;
    int key_head, unit, unused[2];
};
// Units that are kept: that of the state, that of the making waves, which may be the next, and two more. A power of
// two.
constexpr int units_ahead = 4;

template <int Keys> struct FusedMemory {
    i32x4 k[tiles][key_pairs(Keys)][arch::lanes]; // rows of K as left operands, as memory holds them
    i32x4 q[tiles][key_pairs(Keys)][arch::lanes];
    i32x4 transposed[key_pairs(Keys)][tiles][arch::lanes]; // K^T as left operands
    union {
        BlockPairs t;
        math::Blocks inverses; // of the diagonal blocks of I - A, transposed, f32; before T is written
    };
    union {
        BlockPairs p;
        Tile joined[tiles][arch::lanes]; // parts of T, f32; before P is written
    };
    Tile corner[arch::lanes];                // another part of T
    ChunkFactors factors[2];                 // of this chunk and of the next
    alignas(16) char rows[record_decay + 8]; // row factors and decay as in a record
    UnitPlace units[units_ahead];            // where the workgroup walks several units of work (units.h), in turn
    int units_found;

    DEVICE_MEMBER Tile factor(RowFactor which, int row_tile) const {
        return rows_at((const float *)(rows + record_rows) + which * chunk + 16 * row_tile, LaneMap(arch::lane()));
    }
    DEVICE_MEMBER f32x2 decay() const { return *(const f32x2 *)(rows + record_decay); }
};

template <int Keys> DEVICE FusedMemory<Keys> &fused_memory() {
    __attribute__((shared)) static FusedMemory<Keys> shared;
    return shared;
}

static_assert(sizeof(FusedMemory<128>) <= arch::Traits::shared_bytes, "LDS of a workgroup");

} // namespace prefill
