// Commits the accepted tokens of verified drafts: the first n[b] of T tokens of sequence b.
//   pool[slot[b]] = states[b, n[b] - 1]                               recurrent state after the last accepted token
//   conv_state[slot[b]] = last columns of (conv_state[slot[b]], x[b, :n[b]])
// A sequence without accepted tokens keeps both states.
//
// Copies rows of states [B, T, HV, rows, columns] to [slots, HV, rows, columns], eight elements a thread at a time, and
// conv states [slots, channels, columns] of 16 bits, one channel a thread.
#include "../kernel_args.h"
#include "../tensor/states.h"

namespace {

constexpr int threads = 256;
constexpr int at_once = 8; // elements
constexpr int loads = 4;   // in flight together

// Accepted tokens of a sequence, and its slot (-1: none). Both are clamped, because the device's memory may hold
// anything.
DEVICE int accepted_of(const dwk_commit_args &x, int sequence) {
    return max_of(0, min_of(arch::uniform(x.accepted + sequence), x.tokens));
}
DEVICE int slot_of(const dwk_commit_args &x, int sequence, int slots) {
    const int slot = x.slots ? arch::uniform(x.slots + sequence) : sequence;
    return slot < slots ? slot : -1;
}

DEVICE void copy_state(const dwk_commit_args &x, int sequence, int head, int accepted, int slot) {
    const dwk_state_strides &of_states = x.states_strides, &of_pool = x.pool_strides;
    const int64_t first = sequence * of_states.sequence + (accepted - 1) * x.states_token + head * of_states.head;
    const state::Head from(x.states, first, of_states.row, x.states_type);
    const state::Head to(x.pool, slot * of_pool.sequence + head * of_pool.head, of_pool.row, x.pool_type);
    const int of_row = x.columns / at_once, runs = x.rows * of_row;
    const u32 from_bytes = at_once * state::size_of(from.type), to_bytes = at_once * state::size_of(to.type);
#pragma unroll 1
    for (int first = arch::thread(); first < runs; first += loads * threads) {
        float some[loads][at_once];
        for (int i = 0; i < loads; ++i) {
            const u32 run = min_of(first + i * threads, runs - 1), row = run / of_row, group = run - row * of_row;
            state::load_eight(some[i], from.base + (row * from.row + group * from_bytes), from.type, from.whole);
        }
        for (int i = 0; i < loads; ++i) {
            const u32 run = first + i * threads, row = run / of_row, group = run - row * of_row;
            if ((int)run < runs) {
                state::store(to.base + (row * to.row + group * to_bytes), some[i], to.type, to.whole);
            }
        }
    }
}

// Selects a field of q, k or v, whichever has this channel.
template <class Field> DEVICE Field of_part(const dwk_commit_args &x, int channel, Field dwk_conv_part::*field) {
    const Field q = x.q.*field, k = x.k.*field, v = x.v.*field;
    return channel < x.q.channels ? q : channel < x.q.channels + x.k.channels ? k : v;
}

DEVICE void move_columns(const dwk_commit_args &x, int sequence, int channel, int accepted, int slot) {
    if (channel >= x.q.channels + x.k.channels + x.v.channels) {
        return;
    }
    const int of_q = x.q.channels, of_k = x.k.channels;
    const u32 c = channel - (channel < of_q ? 0 : channel < of_q + of_k ? of_q : of_q + of_k);
    const u32 block = of_part(x, channel, &dwk_conv_part::block);
    const int64_t token_stride = of_part(x, channel, &dwk_conv_part::x_token);
    const unsigned short *from = (const unsigned short *)of_part(x, channel, &dwk_conv_part::x) +
                                 c / block * of_part(x, channel, &dwk_conv_part::x_block) + c % block +
                                 (int64_t)sequence * x.tokens * token_stride;
    short *state = (short *)x.conv_state + slot * x.conv_slot + channel * x.conv_channel;
    const bool initial = !x.has_initial_state || arch::uniform(x.has_initial_state + sequence);
    // Ascending, so that a column is read before it is written.
#pragma unroll 1
    for (int j = 0; j < x.conv_columns; ++j) {
        const int token = accepted - x.conv_columns + j;
        short value = 0;
        if (token >= 0) {
            value = (short)from[token * token_stride];
        } else if (initial) {
            value = state[(j + accepted) * x.conv_column];
        }
        state[j * x.conv_column] = value;
    }
}

} // namespace

KERNEL(threads, 2) void dw_commit(dwk_commit_args x) {
    const int heads = x.batch * x.value_heads;
    if (arch::workgroup() < heads) {
        const int sequence = arch::uniform_value(arch::workgroup() / x.value_heads);
        const int accepted = accepted_of(x, sequence), slot = slot_of(x, sequence, x.pool_slots);
        if (accepted > 0 && slot >= 0) {
            copy_state(x, sequence, arch::workgroup() - sequence * x.value_heads, accepted, slot);
        }
        return;
    }
    const int index = arch::workgroup() - heads, sequence = arch::uniform_value(index / x.blocks);
    const int accepted = accepted_of(x, sequence), slot = slot_of(x, sequence, x.conv_slots);
    if (accepted > 0 && slot >= 0) {
        move_columns(x, sequence, (index - sequence * x.blocks) * threads + arch::thread(), accepted, slot);
    }
}
