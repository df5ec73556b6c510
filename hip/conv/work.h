// Work division of the convolution. A block is a range of tokens of one sequence. Its threads are numbered by octet of
// channels first, then by run of tokens. Sequence n owns the blocks from cu_seqlens[n] / (tokens of a block) + n on.
#pragma once

#include "../kernel_args.h"
#include "../tensor/last_sequence.h"
#include "channels.h"

namespace conv {

constexpr int threads = 256; // per workgroup

// Work of a thread: a run of tokens of adjacent channels.
struct Work {
    const char *from; // token 0 of x
    char *to;         // token 0 of the output
    int64_t from_stride;
    int64_t to_stride;
    char *state;       // column 0, or with drafts the first column that is read; null: none
    bool initial;      // whether the state is read
    int channel;       // index in weight, bias and state
    int first;         // first token of the sequence
    int last;          // past the last token of the sequence
    int begin;         // first token of the run
    int end;           // past the last token of the run
    bool writes;       // whether the thread owns channels; else it only joins its lane group's sums
    int64_t shift = 0; // bytes from column 0 to `state`, with drafts
};

// Entry `index`, not 0, of cu_seqlens, clamped so that rows stay within the batch for any contents of the device's
// memory. `read` reads a number.
template <class Read> DEVICE int clamped_token(const dwk_conv_args &x, int index, Read read) {
    const int64_t raw = x.flags & DWK_CONV_WIDE_LENGTHS ? read((const int64_t *)x.cu_seqlens + index)
                                                        : read((const int32_t *)x.cu_seqlens + index);
    return (int)max_of<int64_t>(0, min_of<int64_t>(raw, x.tokens));
}
DEVICE int token_at(const dwk_conv_args &x, int index) {
    if (index == 0) {
        return 0;
    }
    return clamped_token(x, index,
                         [](const auto *p) __attribute__((always_inline)) -> int64_t { return arch::uniform(p); });
}

DEVICE int first_block(const dwk_conv_args &x, int token, int sequence) { return (token >> x.block_log2) + sequence; }

// Sequence of a block; `sequences` for rows past all sequences.
DEVICE int sequence_of(const dwk_conv_args &x, int block) {
    return last_sequence(x.sequences, [&](int n) __attribute__((always_inline)) {
        const int token =
            clamped_token(x, n, [](const auto *p) __attribute__((always_inline)) -> int64_t { return *p; });
        return first_block(x, token, n) <= block;
    });
}

// Rows of the sequence that a block belongs to. Past all sequences: those from the end of the last one on.
struct SequenceRows {
    int sequence;
    int first, last;
};
DEVICE SequenceRows rows_of(const dwk_conv_args &x, int sequence) {
    const int first = token_at(x, sequence);
    return SequenceRows{sequence, first, sequence < x.sequences ? max_of(token_at(x, sequence + 1), first) : x.tokens};
}

DEVICE SequenceRows rows_of_block(const dwk_conv_args &x, int block) {
    return rows_of(x, arch::uniform_value(sequence_of(x, block)));
}

// Selects a field of q (`part` 0), k (1) or v (2).
template <class Field> DEVICE Field of_part(const dwk_conv_args &x, int part, Field dwk_conv_part::*field) {
    const Field q = x.q.*field, k = x.k.*field, v = x.v.*field;
    return part == 0 ? q : part == 1 ? k : v;
}

// Sets the addresses of `channel` of q, k or v (`part`) in x, the output and the state.
DEVICE void place(Work &work, const dwk_conv_args &x, int part, int channel, bool has_state, int slot) {
    const u32 block = of_part(x, part, &dwk_conv_part::block), dim = of_part(x, part, &dwk_conv_part::dim), c = channel;
    work.from = (const char *)of_part(x, part, &dwk_conv_part::x) +
                2 * (c / block * of_part(x, part, &dwk_conv_part::x_block) + c % block);
    work.to = (char *)of_part(x, part, &dwk_conv_part::out) +
              2 * (c / dim * of_part(x, part, &dwk_conv_part::out_head) + c % dim);
    work.from_stride = 2 * of_part(x, part, &dwk_conv_part::x_token);
    work.to_stride = 2 * of_part(x, part, &dwk_conv_part::out_token);
    work.channel = channel + (part > 0 ? x.q.channels : 0) + (part > 1 ? x.k.channels : 0);
    work.state = nullptr;
    if (has_state) {
        work.state = (char *)x.state + 2 * (slot * x.state_slot + work.channel * x.state_channel) + work.shift;
    }
}

// Whether one access can cover the octet at `channel`, for every token: channels adjacent in x and in the output, and
// aligned if the target needs that.
DEVICE bool is_one(const Work &work, const dwk_conv_args &x, int part, int channel) {
    if (channel + octet > of_part(x, part, &dwk_conv_part::channels)) {
        return false;
    }
    Work last;
    place(last, x, part, channel + octet - 1, false, 0);
    constexpr int bytes = 2 * (octet - 1);
    return last.from - work.from == bytes && last.to - work.to == bytes && arch::in_one_access(work.from) &&
           arch::in_one_access(work.from + work.from_stride) && arch::in_one_access(work.to) &&
           arch::in_one_access(work.to + work.to_stride);
}

// Finds q, k or v (`part`), the octet (`group`) and the run of tokens of thread `index` of a block. `work` holds the
// first and last token of the sequence. Returns false if the thread has no work.
DEVICE bool share_of(Work &work, int &part, int &group, const dwk_conv_args &x, int blocks_before, int index) {
    const int q_lanes = x.q.lanes, k_lanes = x.k.lanes, all = q_lanes + k_lanes + x.v.lanes;
    const int run = index / all;
    group = index - run * all;
    part = (group >= q_lanes) + (group >= q_lanes + k_lanes);
    group -= part == 0 ? 0 : part == 1 ? q_lanes : q_lanes + k_lanes;
    work.begin = work.first + (blocks_before << x.block_log2) + (run << x.run_log2);
    work.end = min_of(work.begin + (1 << x.run_log2), work.last);
    return run >> (x.block_log2 - x.run_log2) == 0 && work.begin < work.end;
}

// Whether one access can cover each octet of every row of q or k (`part`).
DEVICE bool rows_are_whole(const dwk_conv_args &x, int part) {
    const auto field = [&](auto dwk_conv_part::*f) __attribute__((always_inline)) { return of_part(x, part, f); };
    const auto fits = [&](int64_t elements)
                          __attribute__((always_inline)) { return arch::in_one_access((const void *)(2 * elements)); };
    return field(&dwk_conv_part::dim) % octet == 0 && field(&dwk_conv_part::block) % octet == 0 &&
           arch::in_one_access(field(&dwk_conv_part::x)) && fits(field(&dwk_conv_part::x_token)) &&
           fits(field(&dwk_conv_part::x_block)) && arch::in_one_access(field(&dwk_conv_part::out)) &&
           fits(field(&dwk_conv_part::out_token)) && fits(field(&dwk_conv_part::out_head));
}

} // namespace conv
