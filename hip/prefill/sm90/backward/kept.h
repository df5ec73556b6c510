// What the walks of the backward keep for the gradients on sm_90a. Panels lie in memory as matrices do in shared memory
// (../stage.h), and are copied as they are: 64 rows of 128 bytes, whose 16-byte groups the row's number permutes. Rows
// are value columns of a slab of 64; rows past V, tokens past the sequence's end and keys past K are zeros.
//
//   states, d_states   [place][slab] two panels: keys 0 to 63, and 64 to 127
//   errors             [place][slab] two panels: E of the chunk's 64 tokens, and its rounding error
//   d_updates          [place][slab] one panel: dX of the chunk's tokens
//
// `place` is place_of a (record, value head). The numbers are those of ../../backward/walk.h.
#pragma once

#include "../stage.h"

namespace prefill {
namespace backward {

constexpr int kept_columns = 64; // value columns of a slab
DEVICE int kept_slabs(int value_dim) { return (u32)(value_dim + kept_columns - 1) / kept_columns; }

// Address of a slab's first panel, of `states` or `d_states`, `errors` and `d_updates`.
DEVICE char *kept_state(char *states, int64_t place, int slab, int value_dim) {
    return states + (place * kept_slabs(value_dim) + slab) * (2 * panel_bytes);
}
DEVICE char *kept_errors(char *errors, int64_t place, int slab, int value_dim) {
    return errors + (place * kept_slabs(value_dim) + slab) * (2 * panel_bytes);
}
DEVICE char *kept_updates(char *d_updates, int64_t place, int slab, int value_dim) {
    return d_updates + (place * kept_slabs(value_dim) + slab) * panel_bytes;
}

} // namespace backward
} // namespace prefill
