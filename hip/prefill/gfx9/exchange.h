// Exchange between the waves of a workgroup on CDNA, in LDS: X, U and the state, rounded, as right operands.
#pragma once

#include "record.h"

namespace prefill {

using arch::OperandPair;

// Rows of K, if the waves that hold the state pass them to each other.
template <int Keys, bool Shared> struct SharedKeys {};
template <int Keys> struct SharedKeys<Keys, true> {
    i32x4 k[tiles][key_pairs(Keys)][arch::lanes];
};

// X, the state's update and the state. Each wave that holds the state writes a quarter of each array, 16 bytes a lane:
// a key pair of a column tile of the state, or two column tiles of a token tile of X and the update. With outputs the
// state is stored twice: output waves read one copy while the next is written.
template <int Keys, bool Outputs> struct Exchange : SharedKeys<Keys, shares_keys(Keys)> {
    static constexpr int states = Outputs ? 2 : 1;
    static constexpr int across = slab_tiles(Keys);
    i32x4 state[states][own_pairs(Keys) * across][scan_threads];
    SlabOperands<across> x[scan_threads];
    SlabOperands<across> update[scan_threads];

    DEVICE_MEMBER OperandPair operand(int parity, int pair, int j) const {
        const int from = pair % scan_waves * arch::lanes + arch::lane();
        return OperandPair{state[parity][pair / scan_waves * across + j][from]};
    }
};

// U for the waves that compute outputs. `exact`: f32, written by the waves that hold the state. `operands`: rounded,
// exchanged between the output waves.
template <int Across> struct Values {
    i32x4 exact[Across][scan_threads];
    SlabOperands<Across> operands[scan_threads];
};

// Memory of a workgroup, whose slab is wide or narrow.
template <int Bucket, bool Outputs> DEVICE Exchange<Bucket, Outputs> &exchange_of_bucket() {
    union Memory {
        Exchange<Bucket, Outputs> wide;
        Exchange<Outputs ? narrow(Bucket) : Bucket, Outputs> narrow;
    };
    __attribute__((shared)) static Memory shared;
    return shared.wide;
}
DEVICE Values<scan_tiles> &values_of_slab() {
    __attribute__((shared)) static Values<scan_tiles> shared;
    return shared;
}
template <int Keys, bool Outputs> DEVICE Exchange<Keys, Outputs> &exchange() {
    return (Exchange<Keys, Outputs> &)exchange_of_bucket<bucket_of(Keys), Outputs>();
}
template <int Across> DEVICE Values<Across> &shared_values() { return (Values<Across> &)values_of_slab(); }

static_assert(sizeof(Exchange<256, true>) + sizeof(Values<scan_tiles>) <= arch::Traits::shared_bytes,
              "LDS of a workgroup");

} // namespace prefill
