// Exchange between the waves of a workgroup on CDNA, in LDS: X, U and the state, rounded, as right operands.
#pragma once

#include "layout.h"

namespace prefill {

using arch::OperandPair;

// X, the state's update and the state. Each wave that holds the state writes a quarter of each array, 16 bytes a lane:
// a key pair of a column tile of the state, or two column tiles of a token tile of X and the update. With outputs the
// state is stored twice: output waves read one copy while the next is written.
template <int Keys, bool Outputs> struct Exchange {
    static constexpr int states = Outputs ? 2 : 1;
    i32x4 state[states][own_pairs(Keys) * scan_tiles][scan_threads];
    i32x4 x[scan_threads];
    i32x4 update[scan_threads];

    DEVICE_MEMBER OperandPair operand(int parity, int pair, int j) const {
        const int from = pair % scan_waves * arch::lanes + arch::lane();
        return OperandPair{state[parity][pair / scan_waves * scan_tiles + j][from]};
    }
};

// U for the waves that compute outputs. `exact`: f32, written by the waves that hold the state. `operands`: rounded,
// exchanged between the output waves.
struct Values {
    i32x4 exact[scan_tiles][scan_threads];
    i32x4 operands[scan_threads];
};

template <int Keys, bool Outputs> DEVICE Exchange<Keys, Outputs> &exchange() {
    __attribute__((shared)) static Exchange<Keys, Outputs> shared;
    return shared;
}
DEVICE Values &shared_values() {
    __attribute__((shared)) static Values shared;
    return shared;
}

static_assert(sizeof(Exchange<256, true>) + sizeof(Values) <= arch::Traits::shared_bytes, "LDS of a workgroup");

} // namespace prefill
