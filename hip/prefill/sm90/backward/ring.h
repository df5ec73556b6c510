// Ring of prefill_backward_walk on sm_90a: stages that hold a whole chunk each, filled by copying warps, and memory
// through which warps store.
#pragma once

#include "../../backward/walk.h"
#include "../stage.h"

namespace prefill {
namespace backward {

// Factors of the tokens of a chunk, as the walks multiply by them. A lane's four rows of a tile are adjacent
// (row_position).
enum TokenFactor {
    // From the first chunk to the last.
    read_factor_row, // exp(G), multiplies K S0
    gain_factor_row, // exp(G_C - G) beta, multiplies E
    // From the last chunk to the first.
    write_factor_row = 0, // exp(G_C - G), multiplies K dS1
    of_x_factor_row,      // -beta exp(G), multiplies dX
    of_o_factor_row,      // scale exp(G), multiplies dO
    of_p_factor_row,      // diagonal of P
    of_v_factor_row,      // unit beta, multiplies dX
    token_factors
};

// One chunk in shared memory: offsets of K, Q, the triangular matrices, factors, and V or dO. The last have one panel
// for the columns of each warpgroup that multiplies, at the end.
template <int Keys> struct WalkStage {
    static constexpr int panels = (Keys + 63) / 64;
    static constexpr u32 k = 0;
    static constexpr u32 q = k + panels * panel_bytes;
    static constexpr u32 t = q + panels * panel_bytes; // T' [i, j], or T^T [j, i]
    static constexpr u32 p = t + panel_bytes;          // P^T [j, i]
    static constexpr u32 factors = p + panel_bytes;
    static constexpr u32 numbers = factors + token_factors * chunk * 4; // three factors of the state
    static constexpr u32 given = factors + 2048;
    static_assert(numbers + 16 <= given, "factors fit");
    // Warpgroups that multiply, and stages for so many.
    static constexpr int most_groups = 2;
    static constexpr u32 bytes(int groups) { return given + groups * panel_bytes; }
    static constexpr int count(int groups) { return groups == 1 ? 3 : 2; }
};

// Memory through which a warp stores: 16 rows of a state, of errors and their rounding or of dX, and of dV.
template <int Keys> struct StoreMemory {
    static constexpr u32 row_bytes = 16 * 128; // of a panel
    static constexpr u32 state = 0;
    static constexpr u32 updates = state + WalkStage<Keys>::panels * row_bytes;
    static constexpr u32 values = updates + row_bytes;
    static constexpr u32 bytes = values + row_bytes;
};

template <int Keys> struct WalkLayout {
    typedef WalkStage<Keys> Stage;
    static constexpr u32 stages(int groups) { return Stage::count(groups) * Stage::bytes(groups); }
    static constexpr u32 barriers(int groups) {
        return stages(groups) + groups * scan_waves * StoreMemory<Keys>::bytes;
    }
    static constexpr int most_stages = 3;
    static constexpr u32 bytes(int groups) { return barriers(groups) + 2 * most_stages * 8 + 1024; } // 1024 to align
    static constexpr u32 most_bytes = bytes(1) > bytes(2) ? bytes(1) : bytes(2);
    static_assert(most_bytes <= (u32)arch::Traits::shared_bytes, "the ring fits");
};

// Warpgroups of this workgroup that multiply. One more copies.
DEVICE int walking_groups() { return arch::threads() / group_threads - 1; }

// Position in the ring, for a copying or a multiplying warp, and the barriers of its stages: `full` when all four
// copying warps have filled a stage, `empty` when all warps that multiply have read it.
template <int Keys> class RingPlace {
    typedef WalkStage<Keys> Stage;

  public:
    DEVICE_MEMBER explicit RingPlace(int groups)
        : memory(shared_address(ring())), barriers(memory + WalkLayout<Keys>::barriers(groups)),
          stage_bytes(Stage::bytes(groups)), count(Stage::count(groups)) {}

    // By one thread, before a barrier of the workgroup.
    DEVICE_MEMBER void begin(int groups) const {
        for (int i = 0; i < count; ++i) {
            arch::phases_begin(full(i), scan_waves);
            arch::phases_begin(empty(i), groups * scan_waves);
        }
    }
    // Address of the stage.
    DEVICE_MEMBER u32 at() const { return memory + stage * stage_bytes; }
    DEVICE_MEMBER u32 stage_at(int i) const { return memory + i * stage_bytes; }
    DEVICE_MEMBER int stages() const { return count; }
    DEVICE_MEMBER void wait_full() const { arch::phase_wait(full(stage), round); }
    DEVICE_MEMBER void wait_empty() const {
        if (round > 0) {
            arch::phase_wait(empty(stage), round - 1);
        }
    }
    DEVICE_MEMBER void give_full() const {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(full(stage));
        }
    }
    DEVICE_MEMBER void give_empty() const {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(empty(stage));
        }
    }
    DEVICE_MEMBER void advance() {
        if (++stage == count) {
            stage = 0;
            ++round;
        }
    }

  private:
    DEVICE_MEMBER u32 full(int i) const { return barriers + 8 * i; }
    DEVICE_MEMBER u32 empty(int i) const { return barriers + 8 * (WalkLayout<Keys>::most_stages + i); }

    const u32 memory, barriers, stage_bytes;
    const int count;
    int stage = 0, round = 0;
};

} // namespace backward
} // namespace prefill
