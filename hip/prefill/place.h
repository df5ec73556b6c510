// Place of an element in the registers of a lane.
#pragma once

namespace prefill {

// Tile and element of a lane.
struct Place {
    int tile;
    int element;
};

} // namespace prefill
