// Ring of prefill_scan and prefill_summarise on sm_90a: stages that hold a whole chunk each, and their hand-over from
// the copying warps.
#pragma once

#include "stage.h"

namespace prefill {

// One chunk in shared memory: offsets of K, Q, T, P, V and the row factors. Q and P exist only with outputs. V has one
// panel for the columns of each warpgroup that multiplies.
template <int Keys, bool Outputs> struct Stage {
    static constexpr bool outputs = Outputs;
    // Most warpgroups that multiply; the launch decides how many do. They share K, Q, T and P.
    static constexpr int most_groups = Keys <= 128 ? 2 : 1;
    static constexpr int panels = (Keys + 63) / 64;
    static constexpr u32 k = 0;
    static constexpr u32 q = k + panels * panel_bytes;
    static constexpr u32 t = q + (Outputs ? panels * panel_bytes : 0);
    static constexpr u32 p = t + panel_bytes;
    static constexpr u32 v = p + (Outputs ? panel_bytes : 0);
    static constexpr u32 rows = v + most_groups * panel_bytes;
    static constexpr u32 full = rows + 2048 - 8;            // barrier in shared memory (Handover)
    static constexpr u32 landed = full - 2 * 8;             // of the first stage: barriers of boxes that are awaited
    static constexpr u32 has_start = landed - 8;            // whether it has an initial state (handed_state.h)
    static constexpr u32 state_places = has_start - 4 * 16; // where a final state goes (handed_state.h)
    static_assert(rows + row_factors * chunk * 4 + 16 <= state_places, "row factors fit");
    static constexpr u32 bytes = rows + 2048; // a multiple of 1024, the period of the permutation
    static constexpr int count = 3 * bytes + 1024 <= arch::Traits::shared_bytes ? 3 : 2;
    static constexpr u32 dynamic_bytes = count * bytes + 1024; // 1024 for alignment

    // T and P: columns of 16x16 blocks. Eight rows of eight elements are contiguous. Place of eight elements of a row.
    static constexpr u32 lower_column_bytes = chunk * 16 * 2;
    static DEVICE_MEMBER constexpr u32 lower_place(int row, int group) {
        return group / 2 * lower_column_bytes + row / 8 * 256 + group % 2 * 128 + row % 8 * 16;
    }
    static DEVICE_MEMBER u64 lower_described(u32 shared) { return arch::described_blocks(shared); }
};

// Barriers that hand a stage of the ring over: one in shared memory, which the copies to the stage complete, and named
// ones, which give the stage back when a warpgroup has read it.
template <class Stage> struct Handover {
    // Called by all threads of a workgroup before its first chunk.
    static DEVICE_MEMBER void begin() {
        if (arch::thread() == 0) {
            for (int i = 0; i < Stage::count; ++i) {
                arch::phases_begin(full(i), scan_waves);
            }
            arch::phases_begin(landed(0), 1);
            arch::phases_begin(landed(1), 1);
            arch::publish_phases();
        }
        arch::workgroup_sync();
    }
    // Barrier of the copies to a stage.
    static DEVICE_MEMBER u32 full(int stage) { return at(stage) + Stage::full; }
    // Barrier of boxes that copying warp `part` waits for itself.
    static DEVICE_MEMBER u32 landed(int part) { return at(0) + Stage::landed + 8 * part; }
    // Waits for the copies to a stage. `number`: uses of the stage before this one.
    static DEVICE_MEMBER void wait_full(int stage, int number) { arch::phase_wait(full(stage), number); }
    static DEVICE_MEMBER void wait_empty(int group, int stage) {
        arch::barrier_wait(id(group, stage), 2 * group_threads);
    }
    static DEVICE_MEMBER void empty(int group, int stage) { arch::barrier_arrive(id(group, stage), 2 * group_threads); }
    // Waits until both warpgroups have come here.
    static DEVICE_MEMBER void meet() { arch::barrier_wait(7, 2 * group_threads); }

  private:
    static DEVICE_MEMBER int id(int group, int stage) { return 1 + 3 * group + stage; }
    static DEVICE_MEMBER u32 at(int stage) { return shared_address(ring()) + stage * Stage::bytes; }
};

// Reads the ring chunk by chunk, in the warps of one warpgroup that multiply.
template <class Stage> class RingReader {
  public:
    // Waits until the chunk is there.
    DEVICE_MEMBER void wait() const { Handover<Stage>::wait_full(stage, round); }
    DEVICE_MEMBER Slots slots() const {
        const u32 at = stage * Stage::bytes;
        return Slots{at, at, at, at + Stage::rows};
    }
    // Whether a chunk lies behind.
    DEVICE_MEMBER bool has_previous() const { return before >= 0; }
    // Gives back the chunk before.
    DEVICE_MEMBER void give_back_previous(int rest) const {
        if (has_previous() && rest > (Stage::count - 1) * chunk) { // otherwise nobody waits for the stage
            Handover<Stage>::empty(group<Stage>(), before);
        }
    }
    DEVICE_MEMBER void give_back() const {}
    // Stage of the next chunk.
    DEVICE_MEMBER int next_stage() const { return stage; }
    // Gives back a stage that is not a chunk's, and goes on.
    DEVICE_MEMBER void skip() {
        advance();
        end_unit();
    }
    // Stage of the last chunk of a unit; negative: it has none.
    DEVICE_MEMBER int last_stage() const { return before; }
    // Gives back the last chunk of a unit, where more units follow.
    DEVICE_MEMBER void end_unit() {
        if (has_previous()) {
            Handover<Stage>::empty(group<Stage>(), before);
            before = -1;
        }
    }
    // Goes on to the next chunk.
    DEVICE_MEMBER void advance() {
        before = stage;
        if (++stage == Stage::count) {
            stage = 0;
            ++round;
        }
    }

  private:
    int stage = 0, before = -1, round = 0;
};

// A unit of work of a workgroup that walks several, and its place in the ring.
template <class Stage> struct UnitInRing {
    int unit;
    RingReader<Stage> reader;
    const bool has_starts; // each unit begins with a stage for its initial state
};

} // namespace prefill
