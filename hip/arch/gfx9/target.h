// Target CDNA (gfx90a, gfx942, gfx950): implements arch/contract.h.
#pragma once

#include "barriers.h"
#include "compiler.h"
#include "functions.h"
#include "lanes.h"
#include "memory.h"
#include "products.h"
#include "tiles.h"

namespace arch {

struct Traits {
    static constexpr int wave_lanes = lanes;
    static constexpr int tile_elements = elements;
    static constexpr int tile_run = run;
    static constexpr int words_of_operand = operand_words;
    static constexpr bool pack_keeps_nans = false; // T::pack rounds every NaN to a NaN
    static constexpr bool any_alignment = true;    // one access covers 16 bytes at any even address
    static constexpr bool one_die = false;         // one L2 cache: any order of workgroups finds what others read
    static constexpr int shared_bytes = 64 << 10;  // LDS of a workgroup, at most
};

} // namespace arch
