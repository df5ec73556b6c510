// First kernel of prefill: matrices and row factors of a chunk, which do not depend on the state
// (prefill/recurrence.h). One workgroup per (chunk of 64 tokens, key head, group of its value heads), with one of its
// 64 threads per row of the chunk. K K^T and Q K^T are computed once for all value heads of the group. For each value
// head, with G the inclusive sum of g in the chunk and D_ij = exp(G_i - G_j):
//   A = strictly lower head_group of -beta_i D_ij (k_i . k_j)       [64, 64] f32
//   T = (I - A)^-1                                            [64, 64] f32; its strictly lower head_group in 16 bits
//   P = strictly lower head_group of D_ij (q_i . k_j)               [64, 64] 16 bits
// Also computes the row factors of prefill_scan (prefill/record.h). With DWK_QK_L2NORM the norms of q and k scale rows
// and columns of these matrices, so q and k are not rounded again.
//
// q, k [T, HK, K] bf16 or f16; g, beta [T, HV] f32 (or a, b with DWK_RAW_GATES); records [records, HV].
#include "../prefill/prepare.h"

namespace {

using namespace prefill;

// Prepares the chunk of this workgroup, if it has one.
template <class T> DEVICE void prepare(const dwk_prefill_prepare_args &x) {
    SHARED static Shared<T> shared;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    // Workgroups that read the gates of the same chunk go to one die.
    const int units = first_record(x.tokens, x.sequences) + 1;
    const dispatch::Dealt to = dispatch::dealt(arch::workgroup(), units, x.key_heads * x.head_groups, x.dies);
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

} // namespace

KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_bf16(dwk_prefill_prepare_args x) {
    prepare<Bf16>(x);
}
KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_f16(dwk_prefill_prepare_args x) {
    prepare<F16>(x);
}
