// Contract of a target for prefill_prepare. <target>/prepare.h supplies
//
//   prepare_residency                         residency for KERNEL
//   Shared<T>                                 shared memory of a workgroup
//   prepare_chunk<T>(x, unit, shared)         one chunk of a key head, for a run of its value heads
//
// made of <target>/matrices.h
//
//   ChunkRows(q, k, .., rows, columns, memory)
//                                             operands of a chunk's rows of Q and K; ChunkRows::Memory is shared
//   Products<T>.multiply(rows, K, norm)       K K^T, Q K^T and, for norms, Q Q^T
//              .normalise(factors)            scales them by 1 / |k| and 1 / |q|
//              .key_squares(factors)          |k|^2 alone
//   ChunkSolver<T>(products, memory)          ChunkSolver::Memory is shared, overlaying ChunkRows::Memory
//              .write_t_and_p(factors, writer, diagonal)
//                                             T = (I - A)^-1 and P of one value head to its record
//
// and <target>/record.h
//
//   row_position(row)                         position of a row within a factor of the record (record.h)
//   RecordWriter<T>(record).put_t .put_p      writes blocks of T and P in the order in which the walk reads them
#pragma once

#if defined(__NVPTX__)
#include "sm90/prepare.h"
#else
#include "gfx9/prepare.h"
#endif

namespace prefill {

// Units of a batch, some of which may be empty: (chunk or rows of padding, key head, group of its value heads).
DEVICE int chunk_units(const dwk_prefill_prepare_args &x) { return first_record(x.tokens, x.sequences) + 1; }
DEVICE int units(const dwk_prefill_prepare_args &x) { return chunk_units(x) * x.key_heads * x.head_groups; }

// Prepares unit `index`, in the order in which the GPU deals units to its dies, if it has a chunk.
template <class T> DEVICE void prepare_unit(const dwk_prefill_prepare_args &x, int index, Shared<T> &shared) {
    // Those that read the gates of the same chunk go to one die.
    const dispatch::Dealt to = dispatch::dealt(index, chunk_units(x), x.key_heads * x.head_groups, x.dies);
    const int record = to.unit;
    const int key_head = arch::uniform_value(to.member / x.head_groups),
              head_group = to.member - key_head * x.head_groups;
    const int first_head = head_group * x.group_heads;
    const int end_head = min_of(first_head + x.group_heads, arch::uniform_value(x.value_heads / x.key_heads));
    const int sequence = sequence_of_record(x.cu_seqlens, x.sequences, record);
    if (sequence == x.sequences) {
        const int end = token_at(x.cu_seqlens, sequence, x.tokens);
        if (head_group == 0) {
            clear_rows(x, end, max_of(record - first_record(end, sequence), 0), key_head);
        }
        return;
    }
    if (is_padding(x, sequence)) {
        return;
    }
    const Rows range = rows_of(x.cu_seqlens, sequence, x.tokens);
    if (range.end - range.begin < x.least_tokens) {
        return;
    }
    const int number = record - first_record(range.begin, sequence);
    if (number < 0 || number >= (range.end - range.begin + chunk - 1) / chunk) {
        return;
    }
    const int begin = range.begin + number * chunk;
    const Unit unit{record, key_head, first_head, end_head, sequence, begin, min_of(range.end - begin, chunk)};
    prepare_chunk<T>(x, unit, shared);
}

} // namespace prefill
