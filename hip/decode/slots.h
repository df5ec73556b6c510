// Rows and slots of a sequence. Slots, counts and lengths are checked here, because the device's memory may hold
// anything.
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
    if (x.cu_seqlens) {
        at.first = row_at(x, at.sequence);
        at.count = min_of(row_at(x, at.sequence + 1) - at.first, x.decode.tokens);
    }
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

// Element where the states of a slot begin.
DEVICE int64_t element_of(const dwk_state_strides &strides, int slot) { return slot * strides.sequence; }
DEVICE int64_t element_of(const dwk_state_steps &steps, int slot) { return (u64)(u32)slot * steps.sequence; }

// Slots of a sequence, or -1: `read` of the initial state, `write` of the state after the last token. `idle`: the
// sequence is padding, which has no slot at all.
struct Slots {
    int read, write;
    bool idle;
};

// Slots of a sequence without drafts, unchecked. No value depends on another, so nothing here waits for a load.
struct RawSlots {
    int slot, write;
    bool initial;
};
template <class Arguments> DEVICE RawSlots load_slots(const Arguments &x, const Work &at) {
    // The slot that is read is also written, unless there are others to write.
    const int32_t *const writes = x.write_slots ? x.write_slots : x.slots;
    return RawSlots{x.slots ? arch::uniform(x.slots + at.sequence) : at.sequence,
                    writes ? arch::uniform(writes + at.sequence) : at.sequence,
                    !x.has_initial_state || arch::uniform(x.has_initial_state + at.sequence)};
}

// Slots without drafts, checked.
template <class Arguments> DEVICE Slots plain_slots(const Arguments &x, const RawSlots &raw) {
    const bool reads = is_slot(raw.slot, x.slot_count), writes = is_slot(raw.write, x.slot_count);
    return Slots{reads && raw.initial ? raw.slot : -1, writes ? raw.write : -1, !reads && !writes};
}

// Slots of drafts: reads the slot of the last accepted token, if there are counts of accepted tokens.
DEVICE Slots draft_slots(const dwk_decode_draft_args &x, const Work &at) {
    const dwk_decode_args &decode = x.decode;
    int column = 0;
    if (x.accepted) {
        column = max_of(0, min_of(arch::uniform(x.accepted + at.sequence), x.read_columns) - 1);
    }
    int read = at.sequence;
    if (decode.slots) {
        read = arch::uniform(decode.slots + (int64_t)at.sequence * x.read_columns + column);
    }
    read = slot_or_none(x, read, decode.slot_count);
    int write = read;
    bool idle = read < 0;
    if (x.write_columns) {
        write = -1;
        for (int t = 0; t < at.count; ++t) {
            idle = idle && written_after(x, at, t) < 0;
        }
    } else if (decode.write_slots) {
        write = slot_or_none(x, arch::uniform(decode.write_slots + at.sequence), decode.slot_count);
        idle = idle && write < 0;
    }
    const bool initial = !decode.has_initial_state || arch::uniform(decode.has_initial_state + at.sequence);
    return Slots{initial ? read : -1, write, idle};
}

// With `states` the pool is not written: `commit` later copies the state that stays.
template <bool Draft, class Arguments> DEVICE Slots slots_of(const Arguments &x, const Work &at, const RawSlots &raw) {
    Slots out;
    if constexpr (Draft) {
        out = draft_slots(draft_of(x), at);
    } else {
        out = plain_slots(x, raw);
    }
    out.write = x.states ? -1 : out.write;
    return out;
}

} // namespace
} // namespace decode
