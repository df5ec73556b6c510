// State of a walk: loads and stores of the state in the registers of a workgroup's waves.
#pragma once

#include "segment.h"
#include "state_window.h"

namespace prefill {

// Calls f(tile, column tile, element, index) for each element that this lane owns and that lies within K and V.
template <int Keys, class F>
DEVICE void for_each_element(const StateView &view, int column, int key_dim, int value_dim, F f) {
    // Opaque: otherwise comparisons stay in scalar registers from the first use to the second.
    const int lane = arch::opaque(arch::lane());
    if (column >= value_dim) {
        return;
    }
#pragma unroll
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
#pragma unroll
        for (int run = 0; run < elements; run += arch::run) {
            const int key = state_key(t, run, lane); // valid for the whole run: K is a multiple of 16
            if (key < key_dim) {
#pragma unroll
                for (int r = 0; r < arch::run; ++r) {
#pragma unroll
                    for (int j = 0; j < StateLayout<Keys>::column_tiles; ++j) {
                        f(t, j, run + r, (key + r) * view.key_step + (column + state_column(j, run)) * view.value_step);
                    }
                }
            }
        }
    }
}

// load_narrow, store_narrow: a state of type `Type` of 16 bits from memory, and to memory.
template <int Type, int Keys>
DEVICE void load_narrow(State<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    for_each_element<Keys>(from, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
        s[t][j][e] = state::widened<Type>(((const short *)from.base)[index], 0);
    });
}

template <int Type, int Keys>
DEVICE void store_narrow(const State<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    for_each_element<Keys>(to, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
        const float value = s[t][j][e];
        ((short *)to.base)[index] = state::narrowed<Type>(value);
    });
}

// load_state, store_state: a state from memory, and to memory.
template <int Keys>
DEVICE void load_state(State<Keys> &s, const StateView &from, int column, int key_dim, int value_dim) {
    if (from.type == DWK_F32 && fits_a_window(from)) {
        load_through_window<Keys>(s, from, column, key_dim, value_dim);
        return;
    }
    if (from.type == DWK_F32) {
        for_each_element<Keys>(from, column, key_dim, value_dim, [&](int t, int j, int e, int64_t index) {
            s[t][j][e] = math::canonical(((const float *)from.base)[index]);
        });
    } else if (from.type == DWK_F16) {
        load_narrow<DWK_F16, Keys>(s, from, column, key_dim, value_dim);
    } else {
        load_narrow<DWK_BF16, Keys>(s, from, column, key_dim, value_dim);
    }
}

template <int Keys>
DEVICE void store_state(const State<Keys> &s, const StateView &to, int column, int key_dim, int value_dim) {
    if (to.type == DWK_F32 && fits_a_window(to)) {
        store_through_window<Keys>(s, to, column, key_dim, value_dim);
        return;
    }
    if (to.type == DWK_F32) {
        for_each_element<Keys>(to, column, key_dim, value_dim,
                               [&](int t, int j, int e, int64_t index) { ((float *)to.base)[index] = s[t][j][e]; });
    } else if (to.type == DWK_F16) {
        store_narrow<DWK_F16, Keys>(s, to, column, key_dim, value_dim);
    } else {
        store_narrow<DWK_BF16, Keys>(s, to, column, key_dim, value_dim);
    }
}

// Calls f(tile, column tile, element, index) for each run of elements of a matrix [columns, K] that this lane owns.
template <int Keys, class F> DEVICE void for_each_run(int column, int columns, int key_dim, F f) {
    const int lane = arch::opaque(arch::lane());
    if (column >= columns) {
        return;
    }
#pragma unroll
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
#pragma unroll
        for (int run = 0; run < elements; run += arch::run) {
            const int key = state_key(t, run, lane);
            if (key < key_dim) {
#pragma unroll
                for (int j = 0; j < StateLayout<Keys>::column_tiles; ++j) {
                    f(t, j, run, (column + state_column(j, run)) * key_dim + key);
                }
            }
        }
    }
}

// load_matrix, store_matrix: a matrix [columns, K] f32, the transposed state, from memory and to memory.
template <int Keys> DEVICE void load_matrix(State<Keys> &s, const float *from, int column, int columns, int key_dim) {
    for_each_run<Keys>(column, columns, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        const arch::Run x = *(const arch::Run *)(from + index);
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            s[t][j][e + r] = x[r];
        }
    });
}

template <int Keys> DEVICE void store_matrix(const State<Keys> &s, float *to, int column, int columns, int key_dim) {
    for_each_run<Keys>(column, columns, key_dim, [&](int t, int j, int e, int index) __attribute__((always_inline)) {
        arch::Run x;
#pragma unroll
        for (int r = 0; r < arch::run; ++r) {
            x[r] = s[t][j][e + r];
        }
        *(arch::Run *)(to + index) = x;
    });
}

// Slot of a sequence's initial state; negative: it starts from zeros.
DEVICE int first_slot(const dwk_prefill_scan_args &x, int sequence) {
    const int slot = slot_of(x, x.read_slots, sequence);
    const bool has_state =
        x.initial_state && slot >= 0 && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence));
    return has_state ? slot : -1;
}

// Loads the initial state of a sequence, unless it starts from zeros.
template <int Keys>
DEVICE void first_state(State<Keys> &state, const dwk_prefill_scan_args &x, int sequence, int head, int column) {
    const int slot = first_slot(x, sequence);
    if (slot >= 0) {
        const StateView from(x.initial_state, x.initial_strides, x.initial_type, x.flags & DWK_INITIAL_VALUE_MAJOR,
                             slot, head);
        load_state<Keys>(state, from, column, x.key_dim, x.value_dim);
    }
}

// Stores the final state of a sequence, if it has a slot. There is memory for it.
template <int Keys>
DEVICE void last_state(const State<Keys> &state, const dwk_prefill_scan_args &x, int sequence, int head, int column) {
    const int slot = slot_of(x, x.write_slots, sequence);
    if (slot >= 0) {
        const StateView to(x.final_state, x.final_strides, x.final_type, x.flags & DWK_FINAL_VALUE_MAJOR, slot, head);
        store_state<Keys>(state, to, column, x.key_dim, x.value_dim);
    }
}

// S = 0.
template <int Keys> DEVICE void clear_state(State<Keys> &state) {
    for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
        for (int j = 0; j < StateLayout<Keys>::column_tiles; ++j) {
            state[t][j] = Tile{};
        }
    }
}

} // namespace prefill
