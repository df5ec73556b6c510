/* Arguments of every kernel: one plain struct each, passed by value. Shared by the kernels (HIP C++), the C++
 * benchmark and Rust (bindgen, src/abi.rs). Only <stdint.h>; pointers first; padding is explicit.
 *
 * Strides count elements. Offset of element (s, t, h, d) of a token tensor, s = sequence, t = token in the packed
 * batch: s * sequence + t * token + h * head + d. `sequence` is 0 for packed batches; a dense batch [B, T, ...]
 * with its own batch stride has sequence = batch stride - T * token.
 */
#ifndef DELTAWAVE_KERNEL_ARGS_H
#define DELTAWAVE_KERNEL_ARGS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types of arguments that a kernel distinguishes at run time. */
enum { DWK_F32 = 0, DWK_BF16 = 1, DWK_F16 = 2 };

/* Bits of `flags`. */
enum {
    DWK_QK_L2NORM = 1,             /* divide q and k by sqrt(sum of squares + 1e-6) */
    DWK_RAW_GATES = 2,             /* g, beta point to a, b: compute both */
    DWK_NEGATIVE_EIGENVALUES = 4,  /* beta = 2 sigmoid(b) */
    DWK_TILED_HEADS = 8,           /* value head h reads key head h % HK, not h / (HV / HK) */
    DWK_INITIAL_VALUE_MAJOR = 16,  /* initial_state is [N, HV, V, K] */
    DWK_FINAL_VALUE_MAJOR = 32,    /* final_state is [N, HV, V, K] */
    DWK_SNAPSHOT_VALUE_MAJOR = 64, /* snapshots is [slots, HV, V, K] */
    DWK_FROM_HBM = 128,      /* scan: its tensors and records do not fit in the last cache; changes the time only */
    DWK_STARTS_EARLY = 256,  /* scan, summarise: items with DWK_ITEM_HALF have no summaries */
    DWK_ALIGNED = 512,       /* decode: rows of q, k, v, o and states begin at multiples of 16 bytes */
    DWK_STARTS_SOON = 1024,  /* scan, summarise: a segment starts early where few chunks before it forget (sm_90a) */
    DWK_KEEPS_STATES = 2048, /* scan, summarise: final states do not overwrite initial ones (sm_90a) */
    DWK_CHAINS = 4096, /* scan: prefill_combine does not run; each segment chains the summaries before it (gfx942) */
    DWK_DEFERS_STATES = 8192 /* fused: the final state of a sequence that is cut waits in place of N of the summary that
                                its last item names, until prefill_scan stores it: other segments may still read the
                                initial state */
};

/* Bits of `flags` of conv. */
enum {
    DWK_CONV_SILU = 1,         /* silu of the sums */
    DWK_CONV_WIDE_LENGTHS = 2, /* cu_seqlens is i64 */
    DWK_CONV_KEEP_STATES = 4,  /* states are read and not written */
    DWK_CONV_QK_L2NORM = 8     /* rows of q and k are divided by sqrt(sum of squares + 1e-6) */
};

/* Bits of `flags` of norm. */
enum {
    DWK_NORM_SILU = 1 /* the gate is silu, not sigmoid */
};

/* Tokens of a chunk, and bytes of a record. */
enum {
    DWK_CHUNK = 64,
    DWK_RECORD_BYTES = 11776, /* record of a (chunk, value head): prepare writes it, summarise and scan read it */
    DWK_SHORT_TOKENS = 16,    /* most tokens of a sequence that prefill_short computes */
    DWK_BACKWARD_RECORD_BYTES = 17152, /* record of a (chunk, value head) in the backward of prefill */
    /* A second argument of prefill_scan and prefill_summarise on sm_90a, aligned to 64 bytes: CUtensorMap of q, k, v,
     * the initial and the final state (hip/prefill/sm90/maps.h). Zeros: the kernels do without. */
    DWK_MAPS_BYTES = 704
};

/* Division of n < 2^31 by a constant: n * multiplier >> shift, in 64 bits. */
typedef struct dwk_divisor {
    uint32_t multiplier;
    uint32_t shift;
} dwk_divisor;

/* Strides of a token tensor. */
typedef struct dwk_token_strides {
    int64_t sequence;
    int64_t token;
    int64_t head;
} dwk_token_strides;

/* Strides of a state tensor; `row` steps along K (key-major) or V (value-major). */
typedef struct dwk_state_strides {
    int64_t sequence;
    int64_t head;
    int64_t row;
} dwk_state_strides;

/* Strides of a token tensor that spans at most 2^31 elements. Offsets have 32 bits: a negative stride is one modulo
 * 2^32. */
typedef struct dwk_token_steps {
    uint32_t sequence;
    uint32_t token;
    uint32_t head;
} dwk_token_steps;

/* Strides of a state tensor: below 2^32, and the states of a sequence span at most 2^31 elements. */
typedef struct dwk_state_steps {
    uint32_t sequence;
    uint32_t head;
    uint32_t row;
} dwk_state_steps;

/* A segment: a run of chunks of one sequence, which a workgroup of prefill_scan or prefill_summarise walks. */
typedef struct dwk_prefill_item {
    int32_t sequence;    /* -1: no item, nor are those that follow; in lists that the device made */
    int32_t first_chunk; /* counted in the sequence; DWK_ITEM_CONTINUES */
    int32_t chunks;      /* DWK_ITEM_FOLLOWED */
    int32_t summary;     /* index of its first summary, if a segment follows it; the last one of the segment before it
                            is summary - 1; DWK_ITEM_HALF. Where the gates choose: 1 + the index of the summary in
                            whose place the final state of a sequence that is cut may wait, in its last item */
} dwk_prefill_item;

/* Bits of an item. For sequences of which other ranks have parts: in first_chunk, although its first chunk is the
 * sequence's, a segment is before it; in chunks, although its last chunk is the sequence's, a segment follows it. In
 * summary, in lists that the device made: no sequence of the batch has more than two segments. With DWK_STARTS_EARLY,
 * prefill_scan then needs no summary (hip/prefill/forget.h). */
enum { DWK_ITEM_CONTINUES = 0x40000000, DWK_ITEM_FOLLOWED = 0x40000000, DWK_ITEM_HALF = 0x40000000 };

/* Lists of segments that prefill_lengths makes (hip/prefill/plan.h), and the rule by which it cuts the sequences of a
 * fused prefill (src/ops/prefill/plan/balance.rs computes the same on the host). Costs are in sixteenths of the time of
 * a chunk. */
typedef struct dwk_prefill_plan {
    dwk_prefill_item *items; /* [items_count], as in dwk_prefill_scan_args; null: no lists are made */
    int32_t *chains;         /* [chains_count, 2], as in dwk_prefill_combine_args */
    int32_t items_count;
    int32_t chains_count;
    int32_t segments;       /* of each sequence; 0: the cheapest, by this rule or by dwk_prefill_machine */
    int32_t workgroups;     /* of an item */
    int32_t compute_units;  /* workgroups at a time */
    int32_t most_summaries; /* items that another follows, if `segments` is 0 */
    int32_t least_chunks;   /* of a segment, if `segments` is 0 */
    int32_t start;          /* cost of an item's start */
    int32_t warm_up;        /* cost of the chunks that a segment begins early */
    int32_t summaries;      /* cost of prefill_fused_summarise */
    int32_t worthwhile;     /* sequences are cut below so many sixteenths of the time of whole ones */
    int32_t pieces;         /* summaries of an item that another follows */
} dwk_prefill_plan;

/* Modelled time of a kernel that walks chunks, in nanoseconds. */
typedef struct dwk_kernel_time {
    int32_t workgroups; /* of a segment */
    int32_t chunk;      /* with one workgroup on a compute unit */
    int32_t each_more;  /* of a chunk, for each further workgroup on the compute unit */
    int32_t residency;  /* most workgroups on a compute unit */
} dwk_kernel_time;

/* Rule by which prefill_lengths cuts the sequences of a prefill with prefill_scan (hip/prefill/machine.h;
 * src/ops/prefill/plan/machine.rs computes the same on the host). Times are modelled, in nanoseconds. Shares are in
 * 1024ths. */
typedef struct dwk_prefill_machine {
    dwk_kernel_time scan;
    dwk_kernel_time summarise;
    int32_t compute_units;      /* 0: dwk_prefill_plan has the rule */
    int32_t combine_workgroups; /* of a sequence */
    int32_t combine;            /* of a segment */
    int32_t launch;             /* of one more kernel */
    int32_t combine_launch;     /* of prefill_combine */
    int32_t shared_start;       /* of prefill_scan, if workgroups share compute units; a further round: eight times */
    int32_t summarised;         /* share of the chunks that prefill_summarise is expected to walk */
    int32_t worthwhile;         /* sequences are cut at most at this share of the time of whole ones */
    int32_t fewer;              /* fewer segments may take this share of the least time */
    int32_t filling;            /* sequences and further segments that fill the device; 0: no candidate */
    int32_t most_summaries;     /* items that another follows */
    int32_t halves;             /* 1: mark items with DWK_ITEM_HALF */
} dwk_prefill_machine;

/* Choice between prefill_fused and prefill_prepare with prefill_scan by the lengths, and segments of prefill_fused that
 * the gates may choose instead (hip/prefill/uneven.h; src/ops/prefill/plan/uneven.rs computes the same on the host).
 * Times are modelled, in nanoseconds. The list of the path that is not chosen has no items, unless the gates choose.
 * Where they do not, prefill_fused cuts no sequence. */
typedef struct dwk_prefill_choice {
    dwk_prefill_item *split_items; /* [plan.items_count]: prefill_scan's list; plan.items [sequences + room] is
                                      prefill_fused's; null: no choice */
    int32_t *samples;              /* as in dwk_prefill_by_gates; null: the gates choose nothing */
    int32_t compute_units;
    int32_t fused_workgroups; /* of a sequence */
    int32_t fused_chunk;
    int32_t fused_start; /* of a workgroup */
    int32_t scan_workgroups;
    int32_t scan_chunk;
    int32_t scan_start;
    int32_t prepare_start;
    int32_t prepare_chunk; /* of all heads, on one compute unit */
    int32_t room;          /* with samples: most items of prefill_fused, beside one for each sequence */
    int32_t least_chunks;  /* of a segment that the gates choose, about */
    int32_t start;         /* cost of its start, in sixteenths of the time of a chunk */
    int32_t warm_up;       /* cost of the chunks that it begins early, likewise */
    int32_t least_time;    /* of the prefill for a choice by the gates */
    int32_t without_work;  /* time of a kernel without work */
    int32_t wait_time;     /* for final states that wait (DWK_DEFERS_STATES); 0: none do */
    int32_t cut_chunk;     /* of the segments, where the split path is planned: with norms and gates to compute */
    int32_t pad0;
} dwk_prefill_choice;

/* prefill_lengths: makes cu_seqlens safe, so that no entry leads out of bounds, and lists of segments. */
typedef struct dwk_prefill_lengths_args {
    const void *cu_seqlens; /* [sequences + 1], i32 or i64 */
    int32_t *checked;       /* [sequences + 1]: clamped to 0..tokens, non-decreasing, first 0 */
    uint32_t *status;       /* 0, or 1 + index of the first entry that was replaced */
    int32_t *rest;          /* [sequences - decodes + 1]: checked[decodes + i] - decodes; null: not written */
    int32_t sequences;
    int32_t tokens;
    int32_t wide;          /* 1: cu_seqlens is i64 */
    int32_t decodes;       /* the first `decodes` sequences must have one row each; at most tokens and sequences */
    dwk_prefill_plan plan; /* of the sequences after the decodes */
    dwk_prefill_choice choice;
    dwk_prefill_machine machine;
} dwk_prefill_lengths_args;

/* prefill_prepare_{bf16,f16}: T, P and row factors of every (chunk, value head). */
typedef struct dwk_prefill_prepare_args {
    const void *q;             /* [T, HK, K] */
    const void *k;             /* [T, HK, K] */
    const void *g;             /* [T, HV]: g, or a with DWK_RAW_GATES; null: no decay */
    const void *beta;          /* [T, HV]: beta, or b with DWK_RAW_GATES; null: 1 */
    const void *a_log;         /* [HV], with DWK_RAW_GATES */
    const void *dt_bias;       /* [HV], with DWK_RAW_GATES; null: 0 */
    void *o;                   /* [T, HV, V]: rows past the last sequence become 0 */
    const int32_t *cu_seqlens; /* [sequences + 1], checked */
    void *records;             /* [slots, HV] records of DWK_RECORD_BYTES */
    float *retained;           /* [HV, slots]: log2 of a bound on how much a chunk scales the norm of any state;
                                  null: not written */
    const int32_t *read_slots; /* [N], as in prefill_scan */
    const int32_t *write_slots;
    dwk_token_strides q_strides;
    dwk_token_strides k_strides;
    dwk_token_strides g_strides;
    dwk_token_strides beta_strides;
    dwk_token_strides o_strides;
    int64_t a_log_stride;
    int64_t dt_bias_stride;
    int32_t sequences;
    int32_t tokens;
    int32_t key_heads;
    int32_t value_heads;
    int32_t key_dim;
    int32_t value_dim;
    uint32_t flags;
    int32_t g_type;
    int32_t beta_type;
    int32_t a_log_type;
    int32_t dt_bias_type;
    int32_t head_groups;  /* workgroups that share the value heads of a (chunk, key head) */
    int32_t group_heads;  /* value heads of each workgroup, at most */
    int32_t dies;         /* dies of the GPU, which deals workgroups to them in turn */
    int32_t slots;        /* slots of the pool of states */
    int32_t least_tokens; /* sequences of fewer tokens are prefill_short's */
} dwk_prefill_prepare_args;

/* prefill_scan_{bf16,f16}_k{64,96,128,192,256}: outputs and final states, one workgroup per (item, value head, slab of
 * value columns).
 * prefill_summarise, of the same types and sizes: N and M of pieces of items that another item of the sequence follows,
 * one workgroup per (piece, value head, slab of the columns of N and M). It does not use q, o and final_state. */
typedef struct dwk_prefill_scan_args {
    const void *q;                    /* [T, HK, K] */
    const void *k;                    /* [T, HK, K] */
    const void *v;                    /* [T, HV, V] */
    void *o;                          /* [T, HV, V] */
    const void *initial_state;        /* [slots, HV, K, V] or [slots, HV, V, K]; null: zeros */
    const uint8_t *has_initial_state; /* [N], 0: the sequence starts from zeros; null: every sequence has a state */
    void *final_state;                /* shaped as initial_state, may be the same memory; null: not written */
    const int32_t *read_slots;  /* [N]: slot of each sequence in initial_state; null: slot n for sequence n. Out of
                                   range: the sequence starts from zeros. */
    const int32_t *write_slots; /* [N]: slot of each sequence in final_state; null: slot n for sequence n. Out of range:
                                   skipped. */
    void *snapshots;            /* shaped as final_state: states after some chunks */
    const int32_t *snapshot_slots; /* [tokens / 64 + sequences]: slot in snapshots of the state after each chunk, in
                                      the order of records; out of range: not written; null: no snapshots */
    const int32_t *cu_seqlens;     /* [sequences + 1], checked */
    const void *records;           /* as prefill_prepare wrote them */
    const dwk_prefill_item *items; /* [items]; null: every sequence is one item */
    float *states;   /* [summaries, HV]: N [V, K], or a final state that waits, then M^T [K, K] or, for a first segment,
                        its initial state [V, K] */
    float *retained; /* as prefill_prepare wrote it; null where there are no summaries */
    int32_t *forgotten; /* [summaries, HV]; 1: M is 0 and not stored. First segments: unused or, on gfx942, 1, because N
                           is the state after them. With prefill_fused, [2, summaries, HV]: then how the segment after
                           starts, 2 (chunks before its begin) + (from zeros); 0: at its begin, from N */
    dwk_token_strides q_strides;
    dwk_token_strides k_strides;
    dwk_token_strides v_strides;
    dwk_token_strides o_strides;
    dwk_state_strides initial_strides;
    dwk_state_strides final_strides;
    dwk_state_strides snapshot_strides;
    int32_t sequences;
    int32_t key_heads;
    int32_t value_heads;
    int32_t key_dim;
    int32_t value_dim;
    uint32_t flags;
    float scale;
    int32_t initial_type; /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t final_type;   /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t slabs;        /* workgroups that divide the value columns */
    int32_t tokens;
    int32_t items_count;
    int32_t summaries;
    int32_t dies;           /* dies of the GPU, which deals workgroups to them in turn */
    int32_t slots;          /* slots of the pool; 0: states are separate tensors */
    int32_t snapshot_count; /* slots of snapshots */
    int32_t snapshot_type;  /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t least_tokens;   /* sequences of fewer tokens are prefill_short's */
    int32_t pieces;         /* summaries of an item that another follows, at least 1 */
    int32_t pad0;
} dwk_prefill_scan_args;

/* Segments of prefill_fused that the gates choose. It runs first and needs no summaries: each segment starts where
 * gates before it forget. If they do not, it does what prefill_prepare does for the split path, or walks whole
 * sequences if that path has no items. If they do, the kernels of the split path after it find no work in their lists,
 * but items without chunks for final states that wait (DWK_DEFERS_STATES). */
typedef struct dwk_prefill_by_gates {
    const dwk_prefill_item *items; /* [items_count]: of the split path, which may be split_items; null: it has none */
    const int32_t *chains;         /* [chains_count, 2]: of the split path */
    dwk_prefill_item
        *split_items;       /* [items_count]: what prefill_summarise and prefill_scan read; null: they do not run */
    int32_t *split_chains;  /* [chains_count, 2]: what prefill_combine reads */
    const int32_t *samples; /* how many, which may be none; 1 if the split path has items, 0 if whole sequences are
                               walked otherwise; then for each sample its sequence and the token from which on 16
                               tokens' gates are read. Null: no choice */
    int32_t items_count;    /* at least one for each sequence that is cut, where final states wait */
    int32_t chains_count;
    int32_t soon; /* the segments are chosen if gates forget within so many chunks; 0: never */
    int32_t pad0;
} dwk_prefill_by_gates;

/* prefill_fused_{bf16,f16}_k{64,96,128}: what prefill_prepare and prefill_scan do, in one kernel without records. One
 * workgroup per (item, value head, slab of value columns).
 * prefill_fused_summarise, of the same types and sizes: what prefill_prepare and prefill_summarise do, for items that
 * another item of the sequence follows, and how that item starts. */
typedef struct dwk_prefill_fused_args {
    dwk_prefill_prepare_args prepare; /* without o, records, retained, head_groups and group_heads; with split_items or
                                         by_gates, all of them */
    dwk_prefill_scan_args scan;       /* without records */
    const dwk_prefill_item *split_items; /* [scan.items_count]: prefill_scan's list. If it has an item, prefill_fused
                                            does what prefill_prepare does, unless the gates choose the segments, and
                                            prefill_scan runs after it; null: it has none */
    int32_t preparing_groups; /* workgroups that take part where prefill_fused does what prefill_prepare does */
    int32_t warm_up; /* most chunks before its segment with which a walk starts from zeros instead of a state */
    dwk_prefill_by_gates by_gates;
    int32_t walkers; /* workgroups, each of which walks several units of work: no sequence is cut, and slabs is 1; 0: a
                        workgroup for each unit */
    int32_t pad0;
} dwk_prefill_fused_args;

/* prefill_short_{bf16,f16}_k{64,96,128}: what prefill_prepare and prefill_scan do, for sequences of at most
 * DWK_SHORT_TOKENS tokens. One wave per (item, value head, slab of value columns). */
typedef struct dwk_prefill_short_args {
    dwk_prefill_prepare_args prepare; /* without o, records, retained, head_groups and group_heads */
    dwk_prefill_scan_args scan;       /* without records, items and summaries; items_count: sequences */
    const int32_t *items;             /* [items_count]: sequences; null: item n is sequence n */
    int32_t clears;                   /* 1: rows of o past the last sequence become 0 */
    int32_t pad0;
} dwk_prefill_short_args;

/* prefill_combine_k{64,96,128,192,256}: the state after each segment but the last, in place of N. One workgroup per
 * (sequence with several summaries, value head, 16 value columns). */
typedef struct dwk_prefill_combine_args {
    float *states; /* as prefill_summarise wrote them */
    const int32_t *forgotten;
    const int32_t *chains; /* [chains, 2]: first summary of a sequence, and how many it has */
    int32_t chains_count;
    int32_t value_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t slabs; /* workgroups along V */
    int32_t summaries;
    int32_t dies;
    int32_t pad0;
} dwk_prefill_combine_args;

/* Backward of prefill. All kernels take the same arguments. Sequences that are cut into segments take two more kernels:
 * prefill_backward_summarise, and prefill_combine for both directions.
 * prefill_backward_prepare_{bf16,f16}: T, P and row factors of every (chunk, value head).
 * prefill_backward_summarise_{bf16,f16}_k{64,128,256}: N and M of segments that another follows, and N of those that
 * follow another in the reverse walk. One workgroup per (summary, value head, 32 columns of one of the three; 64 where
 * a target has a schedule of its own, prefill/backward/schedule.h). prefill_backward_walk_{bf16,f16}_k{64,128,256}:
 * states and errors from the first chunk to the last, and gradients of states and updates from the last to the first.
 * One workgroup per (item, value head, 32 value columns, direction); with a schedule of the target's own, 64 for each
 * warpgroup that multiplies. prefill_backward_gradients, of the same types and sizes: gradients of q, k and gates. One
 * workgroup per (chunk, key head), or persistent workgroups that share these. What the walk keeps for it is laid out as
 * below, or as the target's own schedule says. prefill_backward_sums: gradients of A_log and dt_bias. One wave per
 * value head. */
typedef struct dwk_prefill_backward_args {
    dwk_prefill_prepare_args prepare; /* without o, slots; `records` of DWK_BACKWARD_RECORD_BYTES */
    const void *v;                    /* [T, HV, V] */
    const void *d_o;                  /* [T, HV, V] */
    const void *initial_state;        /* [N, HV, K, V] or [N, HV, V, K]; null: zeros */
    const uint8_t *has_initial_state; /* [N], 0: the sequence starts from zeros; null: every sequence has a state */
    const void *d_final;              /* gradient of the final state, shaped as it; null: zeros */
    void *d_initial;                  /* gradient of the initial state, shaped as it; null: not written */
    void *d_q;                        /* [T, HK, K]; null: not written */
    void *d_k;                        /* [T, HK, K]; null: not written */
    void *d_v;                        /* [T, HV, V]; null: not written */
    void *d_g;                        /* [T, HV], of g or, with DWK_RAW_GATES, of a; null: not written */
    void *d_beta;                     /* [T, HV], of beta or, with DWK_RAW_GATES, of b; null: not written */
    float *d_a_log;                   /* [HV], with DWK_RAW_GATES; null: not written */
    float *d_dt_bias;                 /* [HV], with DWK_RAW_GATES; null: not written */
    char *states;   /* [slots, HV] of pairs of 16x16 blocks [key bucket / 16, V / 32, rounded up]: state before each
                       chunk, 16 bits */
    char *d_states; /* as states: gradient of the state after each chunk */
    char *errors;   /* [slots, HV] of pairs [2, 4, V / 32, rounded up]: E, the update of each token before beta, and its
                       rounding */
    char *d_updates;               /* [slots, HV] of pairs [4, V / 32, rounded up]: gradient of each token's update */
    float *partials;               /* [slots, HV, 2]: sums of a chunk for d_a_log and d_dt_bias */
    const dwk_prefill_item *items; /* segments: first those that another follows, item i with summary i, then the last
                                      of each sequence; null: every sequence is one item */
    float *boundaries;  /* [2 summaries, HV] as prefill_summarise writes them. Number i belongs to the state after item
                           i;  number `mirror` - i to the gradient of the state before the item with summary i */
    int32_t *forgotten; /* [2 summaries, HV]. 1: M is 0 and not stored */
    dwk_token_strides v_strides;
    dwk_token_strides d_o_strides;
    dwk_token_strides d_q_strides;
    dwk_token_strides d_k_strides;
    dwk_token_strides d_v_strides;
    dwk_token_strides d_g_strides;
    dwk_token_strides d_beta_strides;
    dwk_state_strides initial_strides;
    dwk_state_strides d_final_strides;
    dwk_state_strides d_initial_strides;
    int64_t d_a_log_stride;
    int64_t d_dt_bias_stride;
    int32_t initial_type; /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t d_final_type;
    int32_t d_initial_type;
    int32_t d_g_type; /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t d_beta_type;
    float scale;    /* a power of two: the factor of o is scale times unit */
    float unit;     /* Gradients are divided by it until they are written. The kernels' right operands are then dO times
                       powers of two and decays, where norms are not inside. */
    float per_unit; /* 1 / unit */
    uint32_t d_final_value_major;   /* 1: d_final is [N, HV, V, K] */
    uint32_t d_initial_value_major; /* 1: d_initial is [N, HV, V, K] */
    int32_t records;                /* slots */
    int32_t summaries;              /* segments that another follows */
    int32_t mirror;                 /* 2 summaries, unless `blocks` */
    int32_t blocks; /* of prefill_backward_summarise. 1: items are a rank's blocks of sequences that have
                       others, in `boundaries` that the rank sends. Item i has numbers i and mirror - i */
} dwk_prefill_backward_args;

/* prefill_collect: copies the summaries of blocks, gathered from all ranks, into the order in which prefill_combine
 * reads them. One workgroup per (summary, value head). */
typedef struct dwk_prefill_collect_args {
    const void *gathered; /* [ranks] of rank_bytes: summaries [rank_slots, HV], then their flags [rank_slots, HV] */
    const int32_t *order; /* [summaries]: slot of each summary in gathered; slot s is slot s % rank_slots of rank
                             s / rank_slots. Out of range: slot 0. */
    float *states;        /* [summaries, HV], as in dwk_prefill_scan_args */
    int32_t *forgotten;   /* [summaries, HV] */
    int64_t rank_bytes;
    int32_t ranks;
    int32_t rank_slots;
    int32_t value_heads;
    int32_t words; /* of a summary and value head, a multiple of 4 */
} dwk_prefill_collect_args;

/* gate: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) or 2 sigmoid(b). */
typedef struct dwk_gate_args {
    const void *a;       /* [T, blocks, block_heads], HV heads; a_strides.head is within a block */
    const void *b;       /* [T, blocks, block_heads], HV heads */
    const void *a_log;   /* [HV] */
    const void *dt_bias; /* [HV]; null: 0 */
    float *g;            /* [T, HV] */
    float *beta;         /* [T, HV] */
    dwk_token_strides a_strides;
    dwk_token_strides b_strides;
    dwk_token_strides g_strides;
    dwk_token_strides beta_strides;
    int64_t a_block;
    int64_t b_block;
    int64_t a_log_stride;
    int64_t dt_bias_stride;
    int64_t tokens;
    int32_t value_heads;
    int32_t block_heads; /* heads per block of a and b */
    uint32_t flags;      /* DWK_NEGATIVE_EIGENVALUES */
    int32_t a_type;
    int32_t b_type;
    int32_t a_log_type;
    int32_t dt_bias_type;
    int32_t groups; /* workgroups that share the work */
} dwk_gate_args;

/* gate_backward: gradients of a and b, and sums for those of A_log and dt_bias. In `gate`, g and beta are the gradients
 * of g and beta, read; null: 0. Workgroup w has `rows` tokens from w * rows on. */
typedef struct dwk_gate_backward_args {
    dwk_gate_args gate;
    void *d_a;       /* [T, blocks, block_heads]; d_a_strides.head is within a block; null: not written */
    void *d_b;       /* [T, blocks, block_heads]; null: not written */
    float *partials; /* [groups, 2, HV]: sums of a workgroup, of A_log, then of dt_bias; null: not written */
    dwk_token_strides d_a_strides;
    dwk_token_strides d_b_strides;
    int64_t d_a_block;
    int64_t d_b_block;
    int32_t d_a_type; /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t d_b_type;
    int32_t rows;
    int32_t lanes_log2; /* log2 of adjacent threads with different heads, at most 8 */
} dwk_gate_backward_args;

/* An output of gradient_sums: columns of the sums. Column c goes to out[c / inner * outer_stride + c % inner *
 * inner_stride]. */
typedef struct dwk_gradient_sums_part {
    float *out; /* null: not written */
    int64_t outer_stride;
    int64_t inner_stride;
    int32_t columns;
    int32_t inner;
} dwk_gradient_sums_part;

/* gradient_sums: sums over records, in an order that depends on their number alone. One workgroup per 16 columns. */
typedef struct dwk_gradient_sums_args {
    const float *partials; /* [records, columns of `first`, then of `second`] */
    dwk_gradient_sums_part first;
    dwk_gradient_sums_part second;
    int32_t records;
    int32_t columns; /* of a record */
} dwk_gradient_sums_args;

/* Channels of q, k or v. Channel c is read at (c / block) * x_block + c % block of a row of x, and written at
 * (c / dim) * out_head + c % dim of a row of the output. */
typedef struct dwk_conv_part {
    const void *x;
    void *out;
    int64_t x_token;
    int64_t x_block;
    int64_t out_token;
    int64_t out_head;
    int32_t block;
    int32_t dim;
    int32_t channels;
    int32_t lanes; /* threads that share the channels of a token */
} dwk_conv_part;

/* conv_{bf16,f16}: causal depthwise convolution of q, k and v, and the conv state's update. Weight, bias and
 * state have the channels of q, then k, then v. With DWK_CONV_QK_L2NORM the rows of q and k have up to 256 channels.
 * The first `gates.groups` workgroups, a multiple of the dies, compute g and beta. */
typedef struct dwk_conv_args {
    dwk_conv_part q;
    dwk_conv_part k;
    dwk_conv_part v;
    dwk_gate_args gates;              /* gates of all rows; 0 groups: not computed */
    const void *weight;               /* [channels, width], the newest token's last */
    const void *bias;                 /* [channels]; null: 0 */
    void *state;                      /* [slots, channels, columns], the newest token's column last; null: none */
    const int32_t *slots;             /* [N]: slot of each sequence, negative: padding; null: slot n for sequence n */
    const uint8_t *has_initial_state; /* [N], 0: the slot reads as zeros; null: every sequence has a state */
    const void *cu_seqlens;           /* [sequences + 1], i32 or i64 */
    int64_t weight_channel;
    int64_t weight_tap;
    int64_t bias_stride;
    int64_t state_slot;
    int64_t state_channel;
    int64_t state_column;
    int32_t tokens;
    int32_t sequences;
    int32_t state_slots;
    int32_t state_columns;
    int32_t width; /* 2..4 */
    int32_t weight_type;
    int32_t bias_type;
    int32_t run_log2;        /* log2 of consecutive tokens per thread */
    int32_t block_log2;      /* log2 of consecutive tokens per block of tokens */
    int32_t groups;          /* workgroups per block of tokens */
    int32_t dies;            /* dies of the GPU, which deals workgroups to them in turn */
    int32_t die_groups;      /* workgroups per die */
    uint32_t flags;          /* DWK_CONV_* */
    int32_t lane_group_log2; /* log2 of threads per head of q or k, 4 or 5; with DWK_CONV_QK_L2NORM */
} dwk_conv_args;

/* conv_draft_{bf16,f16}: conv for speculative decoding. A sequence reads width - 1 columns of its state from column
 * accepted - 1 on. Then the state is, from column 0 on, those columns but the first, and x of the sequence. */
typedef struct dwk_conv_draft_args {
    dwk_conv_args conv;      /* with DWK_CONV_KEEP_STATES; state_columns is width - 1 */
    const int32_t *accepted; /* [N], clamped to 1 to columns - (width - 2); null: 1 */
    int32_t columns;         /* of the state */
    int32_t slot_stride;     /* between entries of `slots` */
    int32_t null_slot;       /* a slot that is none, besides those out of range */
    int32_t keep_states;     /* 1: states are not written */
} dwk_conv_draft_args;

/* conv_lengths_{bf16,f16}: conv of a layer whose lengths are on the device. Its first workgroup does what
 * prefill_lengths does, for the kernels after it. */
typedef struct dwk_conv_lengths_args {
    dwk_conv_args conv; /* cu_seqlens is not read: that of `lengths` is, and each workgroup checks what it reads */
    dwk_prefill_lengths_args lengths;
} dwk_conv_lengths_args;

/* Gradient of x, of the channels of q, k or v: as dwk_conv_part has them in x. */
typedef struct dwk_conv_backward_part {
    void *d_x; /* null: not written */
    int64_t token;
    int64_t block_stride;
    int32_t block;
    int32_t pad0;
} dwk_conv_backward_part;

/* conv_backward_{bf16,f16}: gradients of x and of the conv states, and sums for those of weight and bias. In `conv`,
 * the parts' `out` is the gradient of the output, read; `state` is the initial states, read, slot n for sequence n;
 * there are no gates. Walker w of `walkers` has the blocks of tokens w, w + walkers, ...; `conv.groups` workgroups are
 * a walker. */
typedef struct dwk_conv_backward_args {
    dwk_conv_args conv;
    dwk_conv_backward_part q;
    dwk_conv_backward_part k;
    dwk_conv_backward_part v;
    const void *d_final; /* [N, channels, columns], gradient of the states that the forward leaves; null: 0 */
    void *d_initial;     /* [N, channels, columns]; null: not written */
    float *partials;     /* [walkers, runs of a block, width + 1, channels]: taps, then bias; null: not written */
    int64_t d_final_slot;
    int64_t d_final_channel;
    int64_t d_final_column;
    int64_t d_initial_slot;
    int64_t d_initial_channel;
    int64_t d_initial_column;
    int32_t blocks; /* of all sequences, at most */
    int32_t walkers;
} dwk_conv_backward_args;

/* norm_{bf16,f16}: y = x / sqrt(mean(x^2) + eps) * weight * gate(z), row by row of V. */
typedef struct dwk_norm_args {
    const void *x;      /* [T, HV, V] */
    const void *z;      /* [T, blocks, block_heads, V], dense from block_heads on */
    const void *weight; /* [V]; null: 1 */
    void *y;            /* [T, HV, V], may be x */
    dwk_token_strides x_strides;
    dwk_token_strides y_strides;
    int64_t z_token;
    int64_t z_block;
    int64_t weight_stride;
    int32_t tokens;
    int32_t value_heads;
    int32_t value_dim;
    int32_t block_heads; /* heads per block of z */
    int32_t run;         /* consecutive tokens per sixteen lanes */
    int32_t weight_type;
    float mean; /* 1 / V */
    float eps;
    uint32_t flags;      /* DWK_NORM_* */
    int32_t group_heads; /* of a workgroup: its threads over the lanes of a row */
} dwk_norm_args;

/* norm_backward_{bf16,f16}: gradients of x and z, and sums for that of the weight. In `norm`, y is the gradient of y,
 * read, `run` is the rows that each row of lanes computes, one after the other, and `group_heads` is not read. */
typedef struct dwk_norm_backward_args {
    dwk_norm_args norm;
    void *d_x;              /* [T, HV, V]; null: not written */
    void *d_z;              /* [T, blocks, d_z_heads, V], dense from d_z_heads on; null: not written */
    float *partials;        /* [workgroups, V]; null: not written */
    const void *cu_seqlens; /* its last entry: tokens that count; the gradients of others are 0. Null: all count */
    dwk_token_strides d_x_strides;
    int64_t d_z_token;
    int64_t d_z_block;
    int32_t d_z_heads; /* heads per block of d_z */
    int32_t last;      /* index of the last entry of cu_seqlens */
    int32_t wide;      /* 1: cu_seqlens is i64 */
    int32_t pad0;
} dwk_norm_backward_args;

/* decode_{bf16,f16}_k{128,256}: the recurrence over `tokens` tokens of every sequence, on a pool of states. One
 * workgroup per (sequence, value head, 32 value columns). flags: DWK_QK_L2NORM, DWK_RAW_GATES,
 * DWK_NEGATIVE_EIGENVALUES, DWK_TILED_HEADS, DWK_ALIGNED, and DWK_INITIAL_VALUE_MAJOR for `state` and `states`.
 * decode_norm_{bf16,f16}: with the gated norm of o, for V = 128 and K up to 128; one workgroup per (sequence, value
 * head), `slabs` is 1. */
typedef struct dwk_decode_args {
    /* In the order of their first use: a kernel waits for each line of its arguments' cache, 64 bytes, when it first
     * needs one. On sm_90a the first line ends after 48 bytes. */
    dwk_divisor by_slabs;
    dwk_divisor by_value_heads;
    dwk_divisor by_key_heads; /* divides by HV / HK, or by HK with DWK_TILED_HEADS */
    int32_t slabs;            /* workgroups along V */
    int32_t value_heads;
    int32_t key_heads;
    int32_t tokens; /* tokens per sequence */
    int32_t value_dim;
    int32_t key_dim;

    const int32_t *slots;             /* [B]: slot that each sequence reads; null: slot n for sequence n */
    const int32_t *write_slots;       /* [B]: slot that each sequence writes; null: the slot that it reads */
    const uint8_t *has_initial_state; /* [B], 0: the sequence starts from zeros; null: every sequence has a state */
    const void *g;                    /* [B, T, HV]: g, or a with DWK_RAW_GATES; null: no decay */
    const void *beta;                 /* [B, T, HV]: beta, or b with DWK_RAW_GATES; null: 1 */
    uint32_t flags;
    int32_t g_type;
    int32_t beta_type;
    int32_t a_log_type;
    int32_t dt_bias_type;
    int32_t state_type; /* DWK_F32, DWK_BF16 or DWK_F16 */

    dwk_token_strides g_strides;
    dwk_token_strides beta_strides;
    const void *a_log;   /* [HV], with DWK_RAW_GATES */
    const void *dt_bias; /* [HV], with DWK_RAW_GATES; null: 0 */

    int64_t a_log_stride;
    int64_t dt_bias_stride;
    const void *q; /* [B, T, HK, K] */
    const void *k; /* [B, T, HK, K] */
    const void *v; /* [B, T, HV, V] */
    dwk_token_strides q_strides;

    dwk_token_strides k_strides;
    dwk_token_strides v_strides;
    void *state; /* [slots, HV, K, V] or [slots, HV, V, K] */
    int32_t slot_count;
    float scale;

    dwk_state_strides state_strides;
    void *o; /* [B, T, HV, V] */
    dwk_token_strides o_strides;
    void *states; /* [B, T, HV, ...] as `state`: state after every token; `state` is then not written. Or null */

    dwk_state_strides states_strides;
    int64_t states_token;
    int32_t states_type; /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t batch;
    int32_t dies; /* dies of the GPU, which deals workgroups to them in turn */
    int32_t pad0;
    dwk_norm_args norm; /* gated norm of o, for decode_norm; V is 128 */
} dwk_decode_args;

/* decode_full_{bf16,f16}_{s32,s16}_{kv,vk}, decode_few_*: decode for K = 128, V a multiple of 32, and tensors that
 * dwk_token_steps and dwk_state_steps describe. s32, s16: bits of the pool's elements. kv, vk: layout of the states.
 * Every row of q, k, v, o and the states begins at a multiple of 16 bytes. Fields are those of dwk_decode_args. */
typedef struct dwk_decode_full_args {
    /* In the order of their first use, as there. */
    dwk_divisor by_slabs;
    dwk_divisor by_value_heads;
    dwk_divisor by_key_heads;
    int32_t slabs;
    int32_t value_heads;
    int32_t key_heads;
    int32_t tokens;
    uint32_t flags;
    int32_t slot_count;

    const int32_t *slots;
    const int32_t *write_slots;
    const uint8_t *has_initial_state;
    const void *g;
    const void *beta;
    int32_t g_type;
    int32_t beta_type;
    int32_t a_log_type;
    int32_t dt_bias_type;
    int32_t state_type;
    float scale;

    dwk_token_steps g_strides;
    dwk_token_steps beta_strides;
    const void *a_log;
    const void *dt_bias;
    uint32_t a_log_stride;
    uint32_t dt_bias_stride;
    const void *q;
    const void *k;

    const void *v;
    void *state;
    dwk_token_steps q_strides;
    dwk_token_steps k_strides;
    dwk_token_steps v_strides;
    dwk_state_steps state_strides;

    void *o;
    void *states;
    dwk_token_steps o_strides;
    dwk_state_steps states_strides;
    uint32_t states_token;
    int32_t states_type;
    int32_t batch;
    int32_t dies;
} dwk_decode_full_args;

/* decode_draft_{bf16,f16}_k{128,256}: decode for speculative decoding. decode_draft_norm_{bf16,f16}: with the gated
 * norm of o, as decode_norm. `write_slots` is [B, write_columns] if that is not 0. They are then slots of `states`,
 * [states_slots, HV, ...], or of `state` if that is null. `slots` is [B, read_columns]. */
typedef struct dwk_decode_draft_args {
    dwk_decode_args decode;  /* `tokens`: most tokens of a sequence */
    const int32_t *accepted; /* [B]: column of `slots` that a sequence reads, plus 1, clamped; null: the first column */
    const void *cu_seqlens;  /* [B + 1], i32 or i64: rows of each sequence, which are packed; null: `tokens` each */
    int32_t rows;            /* rows of the tensors over tokens, with cu_seqlens */
    int32_t wide_lengths;    /* 1: cu_seqlens is i64 */
    int32_t read_columns;    /* 1 without `accepted` */
    int32_t write_columns;   /* slots that a sequence writes, one after each token; 0: one, after its last token */
    int32_t null_slot;       /* a slot that is none, besides those out of range */
    int32_t states_slots;    /* slots of `states`, with write_columns */
} dwk_decode_draft_args;

/* commit: copies the state after each sequence's last accepted token to its slot, and the accepted tokens' columns to
 * its conv state. One workgroup per (sequence, value head), then one per (sequence, 256 channels). */
typedef struct dwk_commit_args {
    const int32_t *accepted;          /* [B]: accepted tokens; 0: the slot is not written */
    const int32_t *slots;             /* [B]: slot of each sequence, negative: none; null: slot n for sequence n */
    const uint8_t *has_initial_state; /* [B], 0: the conv state reads as zeros; null: every sequence has a state */
    const void *states;               /* [B, T, HV, rows, columns] */
    void *pool;                       /* [slots, HV, rows, columns] */
    void *conv_state;                 /* [slots, channels, columns], the newest token's column last; null: none */
    dwk_conv_part q;                  /* q in x [B T]; `out` is not written */
    dwk_conv_part k;
    dwk_conv_part v;
    dwk_state_strides states_strides;
    dwk_state_strides pool_strides;
    int64_t states_token;
    int64_t conv_slot;
    int64_t conv_channel;
    int64_t conv_column;
    int32_t batch;
    int32_t tokens;
    int32_t pool_slots;
    int32_t conv_slots;
    int32_t value_heads;
    int32_t rows;
    int32_t columns;
    int32_t states_type; /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t pool_type;   /* DWK_F32, DWK_BF16 or DWK_F16 */
    int32_t conv_columns;
    int32_t blocks; /* blocks of 256 channels */
    int32_t pad0;
} dwk_commit_args;

#ifdef __cplusplus
}
#endif

#endif
