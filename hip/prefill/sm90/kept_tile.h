// Tile in shared memory, in the layout of registers, on sm_90a.
#pragma once

#include "../../arch/tile.h"

namespace prefill {

using namespace tile;

// A tile kept in shared memory. A lane reads the elements of its own lane number.
struct KeptTile {
    f32x4 half[2][arch::lanes];
    DEVICE_MEMBER void put(Tile x) {
        half[0][arch::lane()] = x.lo;
        half[1][arch::lane()] = x.hi;
    }
    DEVICE_MEMBER Tile get() const {
        Tile out;
        out.lo = half[0][arch::lane()];
        out.hi = half[1][arch::lane()];
        return out;
    }
};

// The same for a tile as the sum of two bf16 operands.
struct KeptParts {
    i32x4 high[arch::lanes], low[arch::lanes];
    DEVICE_MEMBER void put(arch::Parts x) {
        high[arch::lane()] = x.high;
        low[arch::lane()] = x.low;
    }
    DEVICE_MEMBER arch::Parts get() const { return arch::Parts(high[arch::lane()], low[arch::lane()]); }
};

} // namespace prefill
