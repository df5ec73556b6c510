// A state in memory.
#pragma once

#include "../arch/tile.h"
#include "../tensor/states.h"
#include "layout.h"

namespace prefill {

// State of a (slot, head) in memory, [K, V] or [V, K], f32, bf16 or f16.
struct StateView {
    char *base;
    int64_t key_step;
    int64_t value_step;
    int type;

    DEVICE_MEMBER StateView(const void *p, const dwk_state_strides &s, int type, bool value_major, int slot, int head)
        : base((char *)p), key_step(value_major ? 1 : s.row), value_step(value_major ? s.row : 1), type(type) {
        base += state::size_of(type) * (slot * s.sequence + head * s.head);
    }
};

} // namespace prefill
