// Work of a workgroup of the convolution: gates, or channels of some tokens.
#pragma once

#include "../gate/gates.h"
#include "heads.h"
#include "lengths.h"

namespace conv {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

static_assert(threads == gates::threads, "workgroups compute gates or channels");

// Convolves this thread's share of q, k and v.
template <class T, bool Draft, bool Lengths> DEVICE void convolution(const dwk_conv_args &x, int dealt) {
    // The GPU deals consecutive workgroups to different dies. Workgroups of neighbouring tokens both read some rows, so
    // they go to one die.
    const int workgroup = dealt % x.dies * x.die_groups + dealt / x.dies;
    const int block = arch::uniform_value(workgroup / x.groups);
    const SequenceRows rows = Lengths ? checked_rows_of_block(x, block) : rows_of_block(x, block);
    const int sequence = rows.sequence;
    Work work;
    work.first = rows.first;
    work.last = rows.last;
    const int blocks_before = block - first_block(x, work.first, sequence);
    const int first_index = (workgroup - block * x.groups) * threads;

    int slot = -1;
    if (sequence < x.sequences) {
        slot = x.slots ? arch::uniform(x.slots + (Draft ? slot_index(x, sequence) : sequence)) : sequence;
    }
    if (Draft && slot == draft_of(x).null_slot) {
        slot = -1;
    }
    const bool padding = slot < 0 || (x.state && slot >= x.state_slots);
    const bool has_state = x.state && !padding;
    const bool initial = has_state && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence));

    // Lanes of a wave may take different branches. Each branch computes the thread's index again, so that no registers
    // live across branches.
    const auto next = [&]() __attribute__((always_inline)) { return first_index + arch::opaque(arch::thread()); };
    int part, group;
    work.initial = initial;
    work.shift = Draft ? shift_of(x, sequence) : 0;
    if (x.flags & DWK_CONV_QK_L2NORM) {
        const dwk_conv_args &y = arch::reread(x);
        if (share_of(work, part, group, y, blocks_before, next()) && part < 2) {
            run_lane_group<T, Draft>(y, work, part, group, has_state, slot, padding);
        }
    }
    const dwk_conv_args &y = arch::reread(x);
    if (!share_of(work, part, group, y, blocks_before, next())) {
        return;
    }
    // v has extra threads without channels, so that lane groups never cross a wave.
    if (y.flags & DWK_CONV_QK_L2NORM && (part < 2 || group * octet >= y.v.channels)) {
        return;
    }
    work.initial = initial;
    work.writes = true;
    const int channel = group * octet;
    place(work, y, part, channel, has_state, slot);
    if (is_one(work, y, part, channel)) {
        run<T, octet, without_norm, Draft>(y, work, padding);
        leave_draft<Channels<octet>, Draft>(y, work);
        return;
    }
    // One channel at a time.
    const dwk_conv_args &z = arch::reread(x);
    share_of(work, part, group, z, blocks_before, next());
    const int end = min_of((group + 1) * octet, of_part(z, part, &dwk_conv_part::channels));
#pragma unroll 1
    for (int channel = group * octet; channel < end; ++channel) {
        place(work, z, part, channel, has_state, slot);
        run<T, 1, without_norm, Draft>(z, work, padding);
        leave_draft<Channels<1>, Draft>(z, work);
    }
}

// `Lengths`: `x` is the first member of dwk_conv_lengths_args, and a workgroup comes before all others.
template <class T, bool Draft, bool Lengths = false> DEVICE void launch(const dwk_conv_args &x) {
    int workgroup = arch::workgroup();
    if constexpr (Lengths) {
        if (workgroup == 0) {
            lengths::make<threads / arch::lanes>(lengths_of(arch::reread(x)));
            return;
        }
        --workgroup;
    }
    const int of_gates = x.gates.groups;
    if (workgroup < of_gates) {
        gates::compute(arch::reread(x).gates, workgroup, of_gates);
    } else {
        convolution<T, Draft, Lengths>(x, workgroup - of_gates);
    }
}

} // namespace
} // namespace conv
