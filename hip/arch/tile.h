// Tiles and operands for the kernels: names of the target (arch/contract.h), and operations common to all targets.
#pragma once

#include "contract.h"

namespace tile {

using arch::Bf16;
using arch::ColumnFactor;
using arch::F16;
using arch::LaneMap;
using arch::Operand;
using arch::Tile;
using arch::Window;

using arch::columns_at;
using arch::elements;
using arch::rounded;
using arch::widened;

// Values of 16 rows, one for each of a lane's elements. Multiplying a tile by the result scales the rows.
DEVICE Tile rows_at(const float *values, LaneMap at) {
    Tile out;
    for (int e = 0; e < elements; e += arch::run) {
        const arch::Run consecutive = *(const arch::Run *)(values + at.row(e));
        for (int i = 0; i < arch::run; ++i) {
            out[e + i] = consecutive[i];
        }
    }
    return out;
}

} // namespace tile
