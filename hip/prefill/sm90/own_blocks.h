// Lower 16x16 blocks of a chunk's matrices that each of two warps computes on sm_90a.
#pragma once

#include "../../arch/tile.h"

namespace prefill {

// Lower blocks of warp `half`: those of diagonal 32x32 block `half`, then 16 columns of the 32x32 block below the
// diagonal.
constexpr int blocks_of_warp = 5;
class OwnBlocks {
  public:
    DEVICE_MEMBER explicit OwnBlocks(int half) : half(half) {}
    DEVICE_MEMBER int row(int block) const { return block < 3 ? 2 * half + (block > 0) : block - 1; }
    DEVICE_MEMBER int column(int block) const { return block < 3 ? 2 * half + (block > 1) : half; }
    static DEVICE_MEMBER bool on_diagonal(int block) { return block == 0 || block == 2; }

    const int half;
};

} // namespace prefill
