// Ring of prefill_fused on sm_90a. Chunk n is in slot n % 4 of K and Q, n % 3 of T, P and the row factors, and n % 2 of
// V: K and Q are there long before the state needs them, because two chunks are in the making at a time.
#pragma once

#include "../fused_mode.h"

#include "stage.h"

namespace prefill {

// Pairs of warps that make chunks. Pair p makes chunks p, p + 2, p + 4, ...
constexpr int pairs = 2;
constexpr int pair_threads = 2 * arch::lanes;

template <int Keys, bool Outputs> struct Stage {
    static constexpr bool outputs = Outputs;
    static constexpr int most_groups = 2; // warpgroups that multiply
    static constexpr int panels = (Keys + 63) / 64;
    static constexpr int key_slots = 4, matrix_slots = 3, value_slots = 2;
    // Offsets in a slot.
    static constexpr u32 k = 0;
    static constexpr u32 q = k + panels * panel_bytes;
    static constexpr u32 key_bytes = q + (Outputs ? panels * panel_bytes : 0);
    static constexpr u32 t = 0;
    static constexpr u32 p = t + panel_bytes;
    static constexpr u32 matrix_bytes = p + (Outputs ? panel_bytes : 0);
    // T and P: rows of 128 bytes.
    static constexpr u32 lower_column_bytes = 32;
    static DEVICE_MEMBER constexpr u32 lower_place(int row, int group) { return swizzled(row, group); }
    static DEVICE_MEMBER u64 lower_described(u32 shared) { return arch::described(shared); }
    static constexpr u32 v = 0;
    static constexpr u32 value_bytes = most_groups * panel_bytes;
    // Offsets in the ring.
    static constexpr u32 matrices = key_slots * key_bytes;
    static constexpr u32 values = matrices + matrix_slots * matrix_bytes;
    static constexpr u32 factors = values + value_slots * value_bytes;
    static constexpr u32 factor_bytes = row_factors * chunk * 4 + 16;
    static constexpr u32 barriers = factors + matrix_slots * factor_bytes;
    static constexpr u32 maker_memory = barriers + 8 * (key_slots + matrix_slots) + 8; // memory of each pair
    static_assert(maker_memory % 16 == 0, "aligned");
};

// Barriers between the warps that make chunks and those that multiply. Chunk `number` is full when both warps of a pair
// have made it, and finished when all warps that multiply have.
template <class Stage> struct Handover {
    static DEVICE_MEMBER void begin() {
        for (int i = 0; i < Stage::matrix_slots; ++i) {
            arch::phases_begin(full(i), 2);
        }
        for (int i = 0; i < Stage::key_slots; ++i) {
            arch::phases_begin(finished(i), Stage::most_groups * scan_waves);
        }
    }
    static DEVICE_MEMBER u32 full(int slot) { return shared_address(ring()) + Stage::barriers + 8 * slot; }
    static DEVICE_MEMBER u32 finished(int number) {
        return shared_address(ring()) + Stage::barriers + 8 * (Stage::matrix_slots + number % Stage::key_slots);
    }
    // Waits until the chunk is finished; at once for numbers below 0.
    static DEVICE_MEMBER void wait_finished(int number) {
        if (number >= 0) {
            arch::phase_wait(finished(number), number / Stage::key_slots);
        }
    }
};

// Reads the ring chunk by chunk, in the warps that multiply.
template <class Stage> class RingReader {
  public:
    // Waits until the chunk is there.
    DEVICE_MEMBER void wait() const { arch::phase_wait(Handover<Stage>::full(slot), phase); }
    DEVICE_MEMBER Slots slots() const {
        return Slots{number % Stage::key_slots * Stage::key_bytes, Stage::matrices + slot * Stage::matrix_bytes,
                     Stage::values + number % Stage::value_slots * Stage::value_bytes,
                     Stage::factors + slot * Stage::factor_bytes};
    }
    DEVICE_MEMBER bool has_previous() const { return false; } // outputs are stored at the end of their chunk
    DEVICE_MEMBER void give_back_previous(int) const {}
    DEVICE_MEMBER void give_back() const {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(Handover<Stage>::finished((int)number));
        }
    }
    // Goes on to the next chunk.
    DEVICE_MEMBER void advance() {
        ++number;
        if (++slot == Stage::matrix_slots) {
            slot = 0;
            ++phase;
        }
    }

  private:
    u32 number = 0;
    int slot = 0, phase = 0;
};

template <class> struct UnitInRing; // a workgroup walks one unit

} // namespace prefill
