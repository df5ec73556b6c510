// What the walks of the backward keep for the gradients on sm_90a, for K of 65 to 128: panels as matrix products read
// them from shared memory (stage.h), so that copies are whole. Rows of a panel are value columns of a slab of 64. Past
// V, past the chunk's tokens and past K they are zeros.
#pragma once

#include "../backward/record.h"
#include "stage.h"

namespace prefill {
namespace backward {

constexpr int kept_columns = 64;
DEVICE int kept_slabs(int value_dim) { return (value_dim + kept_columns - 1) / kept_columns; }

constexpr int kept_state_bytes = 2 * panel_bytes; // keys 0 to 63, and from 64 on
constexpr int kept_error_bytes = 2 * panel_bytes; // columns are tokens: E, and its rounding error
constexpr int kept_update_bytes = panel_bytes;    // columns are tokens

// Panels of a slab, of a chunk and value head (place_of). `state`: S0 or dS1.
DEVICE char *kept_state(char *states, int64_t place, int slab, int slabs) {
    return states + (place * slabs + slab) * kept_state_bytes;
}
DEVICE char *kept_error(char *errors, int64_t place, int slab, int slabs) {
    return errors + (place * slabs + slab) * kept_error_bytes;
}
DEVICE char *kept_update(char *d_updates, int64_t place, int slab, int slabs) {
    return d_updates + (place * slabs + slab) * kept_update_bytes;
}

} // namespace backward
} // namespace prefill
