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
    static constexpr u32 bytes = rows + 2048; // a multiple of 1024, the period of the permutation
    static constexpr int count = 3 * bytes + 1024 <= arch::Traits::shared_bytes ? 3 : 2;
    static constexpr u32 dynamic_bytes = count * bytes + 1024; // 1024 for alignment
};
static_assert(row_factors * chunk * 4 + 16 <= 2048, "row factors fit");

// Barriers that hand a full stage of the ring from the copying warps to each warpgroup, and back when it has been read.
template <class Stage> struct Handover {
    static DEVICE_MEMBER void wait_full(int group, int stage) {
        arch::barrier_wait(id(group, stage), 2 * group_threads);
    }
    static DEVICE_MEMBER void full(int group, int stage) { arch::barrier_arrive(id(group, stage), 2 * group_threads); }
    static DEVICE_MEMBER void wait_empty(int group, int stage) {
        arch::barrier_wait(id(group, 3 + stage), 2 * group_threads);
    }
    static DEVICE_MEMBER void empty(int group, int stage) {
        arch::barrier_arrive(id(group, 3 + stage), 2 * group_threads);
    }

  private:
    static DEVICE_MEMBER int id(int group, int which) { return 1 + 6 * group + which; }
};

// Reads the ring chunk by chunk, in the warps of one warpgroup that multiply.
template <class Stage> class RingReader {
  public:
    DEVICE_MEMBER explicit RingReader(int group) : group(group) {}
    // Waits until the chunk is there.
    DEVICE_MEMBER void wait() const { Handover<Stage>::wait_full(group, stage); }
    DEVICE_MEMBER Slots slots() const {
        const u32 at = stage * Stage::bytes;
        return Slots{at, at, at, at + Stage::rows};
    }
    // Whether a chunk lies behind.
    DEVICE_MEMBER bool has_previous() const { return before >= 0; }
    // Gives back the chunk before.
    DEVICE_MEMBER void give_back_previous(int rest) const {
        if (has_previous() && rest > (Stage::count - 1) * chunk) { // otherwise nobody waits for the stage
            Handover<Stage>::empty(group, before);
        }
    }
    DEVICE_MEMBER void give_back() const {}
    // Gives back the last chunk of a unit, where more units follow.
    DEVICE_MEMBER void end_unit() {
        if (has_previous()) {
            Handover<Stage>::empty(group, before);
            before = -1;
        }
    }
    // Goes on to the next chunk.
    DEVICE_MEMBER void advance() {
        before = stage;
        stage = stage + 1 == Stage::count ? 0 : stage + 1;
    }

  private:
    int group;
    int stage = 0, before = -1;
};

// A unit of work of a workgroup that walks several, and its place in the ring.
template <class Stage> struct UnitInRing {
    int unit;
    RingReader<Stage> reader;
};

} // namespace prefill
