// States on sm_90a of workgroups that walk several units. A load or store from registers would keep the warps that
// multiply waiting for memory. Instead the copy engine brings the initial state to a stage of the ring, before those of
// the chunks. The warps that multiply write the final state to the stage of the unit's last chunk, and go on with the
// next unit. When the copying warps come to this stage again, they let the copy engine store the state before they fill
// it.
#pragma once

#include "../state.h"
#include "maps.h"
#include "ring.h"

namespace prefill {

// Where a unit's final state goes. Each copying warp keeps it in the stage of the unit's last chunk, for itself; the
// warps that multiply read that of the last copying warp.
struct StatePlace {
    int slot; // negative: the warps that multiply store the state themselves, if it is wanted
    int head;
    int column; // the workgroup's first value column
};
template <class Stage> DEVICE StatePlace *state_place(int stage, int warp) {
    return (StatePlace *)(ring() + stage * Stage::bytes + Stage::state_places) + warp;
}
// Whether there is an initial state in a unit's first stage.
template <class Stage> DEVICE int *has_start(int stage) {
    return (int *)(ring() + stage * Stage::bytes + Stage::has_start);
}

// The state in a stage: 32 KiB for each warpgroup's 64 columns, as boxes of 32 adjacent numbers in rows of 128 bytes
// (swizzled). Rows are keys, 128 in a box, or value columns, 64 in a box.
constexpr int group_state_bytes = 64 * 128 * 4;

// Calls f(tile, element, next element, address) for each pair of adjacent numbers of this warp's state in a stage.
template <class Stage, int Keys, class F> DEVICE void for_each_pair_in(int stage, bool value_major, const F &f) {
    static_assert(StateLayout<Keys>::key_tiles * 16 * 64 * 4 == group_state_bytes, "K is 128");
    static_assert(Stage::rows == 2 * group_state_bytes, "two warpgroups' states fill what lies before the row factors");
    const int thread = arch::opaque(arch::thread()), lane = thread % arch::lanes;
    char *const state = ring() + stage * Stage::bytes + thread / group_threads * group_state_bytes;
    const int column = thread / arch::lanes % scan_waves * 16 + lane / 4 * 2, key = lane % 4 * 2;
    if (value_major) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int row = column + c;
            char *const at = state + row * 128 + key % 4 * 4;
            const u32 group = (key / 4 ^ (row & 7)) << 4;
#pragma unroll
            for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    f(t, 4 * h + 2 * c, 4 * h + 2 * c + 1,
                      at + t / 2 * (64 * 128) + (group ^ (t % 2 * 4 + h * 2) << 4));
                }
            }
        }
        return;
    }
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        const int row = key + p;
        char *const at = state + column / 32 * (128 * 128) + swizzled(row, column % 32 / 4) + column % 4 * 4;
#pragma unroll
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                f(t, 4 * h + p, 4 * h + 2 + p, at + (16 * t + 8 * h) * 128);
            }
        }
    }
}
// Writes the state of this warp to a stage that all warpgroups have read.
template <class Stage, int Keys> DEVICE void write_state(const State<Keys> &s, int stage, bool value_major) {
    for_each_pair_in<Stage, Keys>(stage, value_major,
                                  [&](int t, int e, int next, char *at) __attribute__((always_inline)) {
                                      *(f32x2 *)at = f32x2{s[t][0][e], s[t][0][next]};
                                  });
}
// Reads it, before the stage is given back.
template <class Stage, int Keys> DEVICE void read_state(State<Keys> &s, int stage, bool value_major) {
    for_each_pair_in<Stage, Keys>(stage, value_major,
                                  [&](int t, int e, int next, const char *at) __attribute__((always_inline)) {
                                      const f32x2 x = *(const f32x2 *)at;
                                      float first = math::canonical(x.x), second = math::canonical(x.y);
                                      arch::pin(first);
                                      arch::pin(second);
                                      s[t][0][e] = first;
                                      s[t][0][next] = second;
                                  });
}

// Calls f(address in shared memory, first element of a row, first row) for each box of quarter `quarter` of a state in
// a stage: one, or two if it is value-major. `column`: the workgroup's first value column.
template <class Stage, class F>
DEVICE void for_each_box(int stage, int quarter, int column, bool value_major, const F &f) {
    const u32 at = shared_address(ring()) + stage * Stage::bytes + quarter * (group_state_bytes / 2);
    const int first = column + quarter / 2 * 64, half = quarter % 2;
    if (value_major) {
        for (int box = 0; box < 2; ++box) {
            f(at + box * (64 * 128), 64 * half + 32 * box, first);
        }
    } else {
        f(at, first + 32 * half, 0);
    }
}

// Starts to copy a quarter of the initial state in `place` to a stage, 16 KiB, if it has a slot. The phase of the
// barrier at `full` waits for it.
template <class Stage>
DEVICE void copy_quarter(const Maps &maps, int stage, int quarter, StatePlace place, bool value_major, u32 full) {
    arch::phase_arrive_expecting(full, place.slot >= 0 ? group_state_bytes / 2 : 0);
    if (place.slot >= 0) {
        for_each_box<Stage>(stage, quarter, place.column, value_major,
                            [&](u32 to, int element, int row) __attribute__((always_inline)) {
                                arch::copy_box(to, maps.initial_state(), element, row, place.head, place.slot, full);
                            });
    }
}

// Stores a quarter of the final state in a stage to `place`. Returns when shared memory has been read.
template <class Stage>
DEVICE void store_quarter(const Maps &maps, int stage, int quarter, StatePlace place, bool value_major) {
    for_each_box<Stage>(stage, quarter, place.column, value_major,
                        [&](u32 from, int element, int row) __attribute__((always_inline)) {
                            arch::store_box(maps.final_state(), from, element, row, place.head, place.slot);
                        });
    arch::commit_stores();
    arch::await_store_reads<0>();
}

} // namespace prefill
