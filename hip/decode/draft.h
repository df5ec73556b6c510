// Drafts: rows and slots of a sequence of speculative decoding. Slots, counts and lengths are checked here, because the
// device's memory may hold anything.
#pragma once

#include "share.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// The arguments of a kernel for drafts, of which `x` is the first member.
DEVICE const dwk_decode_draft_args &draft_of(const dwk_decode_args &x) { return *(const dwk_decode_draft_args *)&x; }

DEVICE bool is_slot(int slot, int slots) { return slot >= 0 && slot < slots; }

// `slot`, or -1 if a pool of `slots` has no such slot.
DEVICE int slot_or_none(const dwk_decode_draft_args &x, int slot, int slots) {
    return is_slot(slot, slots) && slot != x.null_slot ? slot : -1;
}

// Entry of cu_seqlens, clamped to the rows.
DEVICE int row_at(const dwk_decode_draft_args &x, int index) {
    const int64_t raw = x.wide_lengths ? arch::uniform((const int64_t *)x.cu_seqlens + index)
                                       : arch::uniform((const int32_t *)x.cu_seqlens + index);
    return (int)max_of<int64_t>(0, min_of<int64_t>(raw, x.rows));
}

// Finds the first row of the sequence, and its number of tokens: at most `tokens`.
DEVICE void find_rows(Work &at, const dwk_decode_draft_args &x) {
    const int tokens = x.decode.tokens;
    at.first = at.sequence * tokens;
    at.count = tokens;
    if (x.cu_seqlens) {
        at.first = row_at(x, at.sequence);
        at.count = min_of(row_at(x, at.sequence + 1) - at.first, tokens);
    }
}

// Slot of the initial state: that of the last accepted token, if there are counts of accepted tokens.
DEVICE int slot_to_read(const dwk_decode_draft_args &x, const Work &at) {
    if (!x.decode.slots) {
        return slot_or_none(x, at.sequence, x.decode.slot_count);
    }
    int column = 0;
    if (x.accepted) {
        column = max_of(0, min_of(arch::uniform(x.accepted + at.sequence), x.read_columns) - 1);
    }
    const int slot = arch::uniform(x.decode.slots + (int64_t)at.sequence * x.read_columns + column);
    return slot_or_none(x, slot, x.decode.slot_count);
}

// Slot of the state after the last token. `read`: the slot that the sequence reads.
DEVICE int slot_to_write(const dwk_decode_draft_args &x, const Work &at, int read) {
    if (!x.decode.write_slots) {
        return read;
    }
    return slot_or_none(x, arch::uniform(x.decode.write_slots + at.sequence), x.decode.slot_count);
}

// Slot of the state after token t, if each token has one: of `states` if that is given, else of the pool.
DEVICE int written_after(const dwk_decode_draft_args &x, const Work &at, int t) {
    if (!x.write_columns) {
        return -1;
    }
    const int slot = arch::uniform(x.decode.write_slots + (int64_t)at.sequence * x.write_columns + t);
    return slot_or_none(x, slot, x.decode.states ? x.states_slots : x.decode.slot_count);
}

// Element of `states` where the state after token t begins, or -1: in the token's slot, or in the place of the token.
DEVICE int64_t element_of_states(const dwk_decode_draft_args &x, const Work &at, int t) {
    const dwk_state_strides &each = x.decode.states_strides;
    if (!x.write_columns) {
        return at.sequence * each.sequence + t * x.decode.states_token;
    }
    const int slot = written_after(x, at, t);
    return slot < 0 ? -1 : slot * each.sequence;
}

// Whether the state after any token is stored to a slot of its own.
DEVICE bool writes_any(const dwk_decode_draft_args &x, const Work &at) {
    bool any = false;
    for (int t = 0; t < at.count; ++t) {
        any |= written_after(x, at, t) >= 0;
    }
    return any;
}

} // namespace
} // namespace decode
