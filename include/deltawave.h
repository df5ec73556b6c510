/* deltawave: Gated DeltaNet inference on AMD Instinct MI300, for C.
 *
 * - Errors: functions that can fail return DW_OK or one of DW_ERROR_*. After an error dw_last_error() names the
 *   argument, its value and the allowed values. A refused call enqueues nothing. It writes nothing except output
 *   handles, which become NULL.
 * - Launches allocate nothing, wait for nothing and read nothing back, so they can be captured into a graph. The caller
 *   owns device pointers, streams and the workspace. Memory must stay alive until the work that uses it is done.
 * - Structs: set the first field, size, to sizeof the struct. Set unused fields to zero. Structs may grow in later
 *   versions.
 * - Threads: several threads may use one handle at once. Do not destroy a handle that another thread is using.
 * - Streams: launches of several threads on one stream are each enqueued whole, in some order. No launch of this
 *   library comes between the kernels of another. Across streams, the caller orders launches that share memory.
 *
 * Link with -ldeltawave_c. capi/examples/prefill.c shows the order of the calls, layer.c a step of an engine.
 */
#ifndef DELTAWAVE_H
#define DELTAWAVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the binary interface. It changes when programs compiled with an older header would break. */
#define DW_ABI_VERSION 1

/* Status that functions return. */
enum {
    DW_OK = 0,
    DW_ERROR_ARGUMENT = 1, /* an argument was refused */
    DW_ERROR_DEVICE = 2,   /* no runtime, no such device, or no kernels for it */
    DW_ERROR_RUNTIME = 3,  /* a call of the device's runtime failed */
    DW_ERROR_INTERNAL = 4, /* a bug of this library */
    DW_ERROR_RANKS = 5     /* ranks differ, a rank did not come in time, or the library of collectives failed */
};

/* Backend: the device that executes the kernels. */
enum {
    DW_BACKEND_AUTO = 0, /* a GPU if a runtime finds one, else the simulator */
    DW_BACKEND_HIP = 1,  /* a HIP runtime, or the library that DELTAWAVE_HIP_LIBRARY names */
    DW_BACKEND_SIMULATOR = 2
};

/* Element types of tensors and of lengths. */
enum { DW_F32 = 0, DW_BF16 = 1, DW_F16 = 2, DW_I32 = 3, DW_I64 = 4 };

/* Head map: the key head that value head h reads. */
enum {
    DW_HEADS_GROUPED = 0, /* h / (HV / HK) */
    DW_HEADS_TILED = 1    /* h % HK, the order of GGUF */
};

/* Layout of states: the order of the last two dimensions. */
enum {
    DW_STATE_KEY_MAJOR = 0,  /* [N, HV, K, V] */
    DW_STATE_VALUE_MAJOR = 1 /* [N, HV, V, K] */
};

/* Directions of dw_copy. */
enum { DW_TO_DEVICE = 0, DW_TO_HOST = 1, DW_ON_DEVICE = 2 };

/* DW_ABI_VERSION of the loaded library. */
int dw_abi_version(void);
/* Version of the loaded library, such as "0.1.0". */
const char *dw_version(void);
/* Architectures that the loaded library has kernels for, separated by commas: "gfx942,sm_90a". "" if there are none. */
const char *dw_archs(void);
/* Error text of this thread's last failed call; "" before the first failure. Valid until the next call fails. */
const char *dw_last_error(void);

/* ---- devices ---- */

/* A device with all kernels loaded. No later call loads or compiles anything. */
typedef struct dw_context dw_context;

typedef struct dw_device_info {
    size_t size;
    uint64_t memory_bytes;
    uint32_t compute_units;
    uint32_t pad0;
    char backend[16]; /* "hip", "simulator" */
    char arch[32];    /* "gfx942" */
    char name[256];
} dw_device_info;

int dw_context_create(int backend, int device, dw_context **context);
/* Destroys a context; NULL does nothing. Plans keep the kernels loaded: they are unloaded when the context and all its
 * plans are destroyed. Unloading waits for the device, so do not do it while a stream is being captured. A captured
 * graph of dw_gate_launch or dw_norm_launch needs the context as long as it may be replayed. On the simulator a fault
 * stops one context; other contexts go on. */
void dw_context_destroy(dw_context *context);
int dw_context_info(const dw_context *context, dw_device_info *info);

/* Allocates `bytes` of device memory, for callers without a runtime of their own. On the simulator this is memory of
 * the process: the host may read and write it. */
int dw_malloc(const dw_context *context, size_t bytes, void **address);
/* Frees memory of dw_malloc; NULL does nothing. */
int dw_free(const dw_context *context, void *address);
/* Copies `bytes` in `direction`, DW_TO_DEVICE, DW_TO_HOST or DW_ON_DEVICE. Returns when the copy is done. Does not wait
 * for queued work. */
int dw_copy(const dw_context *context, void *to, const void *from, size_t bytes, int direction);
/* Waits for all work of `stream`: a hipStream_t or CUstream; NULL: the default stream. */
int dw_synchronize(const dw_context *context, void *stream);

/* ---- tensors ---- */

/* A tensor in device memory. The innermost stride of q, k, v, o and states must be 1; other strides are free. An output
 * must not share memory with another argument, except as docs/reference/aliasing.md lists. */
typedef struct dw_tensor {
    size_t size;
    void *data;
    int32_t dtype; /* DW_F32, DW_BF16, DW_F16 */
    int32_t rank;  /* dimensions, 1 to 4: entries of shape and strides that are read */
    int64_t shape[4];
    int64_t strides[4]; /* in elements; not read for a dimension of length 0 or 1 */
} dw_tensor;

/* cu_seqlens: sequence n has the rows from entry n up to entry n + 1. */
typedef struct dw_lengths {
    size_t size;
    const void *data;
    int64_t entries; /* sequences + 1 */
    int32_t dtype;   /* DW_I32, DW_I64 */
    int32_t pad0;
} dw_lengths;

/* ---- prefill ----
 *
 * Recurrence over the tokens, per value head, with a state S of shape [K, V]:
 *
 *   S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = scale S^T q
 */

/* Kernels that compute a prefill. Results differ by rounding only. */
enum {
    DW_PATH_AUTO = 0,  /* the faster ones, as estimated */
    DW_PATH_FUSED = 1, /* one kernel, for K up to 128; more before it if sequences are cut */
    DW_PATH_SPLIT = 2, /* one kernel for the chunks, one for the walk; more between them if sequences are cut */
    DW_PATH_SHORT = 3  /* as AUTO, but a kernel of its own computes sequences of at most 16 tokens, for K up to 128 */
};

/* Context that a prefill saves for its backward. */
enum {
    DW_SAVE_NOTHING = 0, /* the backward is one round, and its workspace grows with the tokens */
    /* f32 states between rounds of the backward, which share a workspace. Whole sequences share a round; a sequence is
     * cut only if its backward alone needs more than about 1 GiB of workspace. */
    DW_SAVE_BOUNDARIES = 1
};

typedef struct dw_prefill_spec {
    size_t size;
    int32_t dtype;       /* of q, k, v, o: DW_BF16 or DW_F16 */
    int32_t head_map;    /* DW_HEADS_* */
    int32_t key_heads;   /* HK */
    int32_t value_heads; /* HV, a multiple of HK */
    int32_t key_dim;     /* K, a multiple of 16 up to 256 */
    int32_t value_dim;   /* V, a multiple of 16 up to 256 */
    int32_t qk_l2norm;   /* 1: the kernels l2-normalise the rows of q and k */
    float scale;         /* 0: K^-0.5 */
    /* Number of segments of each sequence, walked in parallel. 1: no sequence is cut. 0: numbers with the least
     * estimated time, whether the host or only the device knows the lengths. The environment variable
     * DELTAWAVE_SEGMENTS overrides it. */
    int32_t segments;
    int32_t compute_units; /* compute units that launches can use; 0: all of the device */
    int32_t path;          /* DW_PATH_*; the environment variable DELTAWAVE_PREFILL overrides it */
    /* Context that launches may save for the backward: DW_SAVE_*, or a number of tokens, a positive multiple of 64: as
     * DW_SAVE_BOUNDARIES, with rounds of at most so many tokens. 0 where only the device knows the lengths. */
    int32_t save;
} dw_prefill_spec;

/* Tensors of one launch. Packed batches have no batch dimension: [T, H, D]. Dense batches have one: [B, T, H, D]. */
typedef struct dw_prefill_tensors {
    size_t size;
    const dw_tensor *q; /* [T, HK, K] */
    const dw_tensor *k; /* [T, HK, K] */
    const dw_tensor *v; /* [T, HV, V] */
    const dw_tensor *o; /* [T, HV, V], written; rows past the last sequence become 0 */

    /* Computed gates. */
    const dw_tensor *g;    /* [T, HV], f32, natural logarithms, at most 0; NULL: no decay */
    const dw_tensor *beta; /* [T, HV], any dtype; NULL: 1 */

    /* Or raw gates of the projections, any dtype: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b). */
    const dw_tensor *a;       /* [T, HV] */
    const dw_tensor *b;       /* [T, HV] */
    const dw_tensor *a_log;   /* [HV] */
    const dw_tensor *dt_bias; /* [HV]; NULL: 0 */
    /* 1: beta = 2 sigmoid(b). Repeated keys without decay are ill-conditioned for beta from 1.5 to 2. In bf16, o and
     * states then have errors of 20% to 80% of their rms and more, here and in unfused kernels
     * (docs/results/accuracy.md). */
    int32_t allow_neg_eigval;

    int32_t initial_layout;           /* DW_STATE_*: layout of initial_state */
    const dw_tensor *initial_state;   /* f32, bf16 or fp16; NULL: zeros */
    const uint8_t *has_initial_state; /* [N] on the device. 0: sequence n starts from zeros. NULL: all have a state */
    /* f32, bf16 or fp16, written; NULL: not wanted. It may be initial_state itself. For a sequence without tokens it is
     * the initial state, or zeros. */
    const dw_tensor *final_state;
    int32_t final_layout; /* DW_STATE_*: layout of final_state */
    int32_t pad0;

    const dw_lengths *cu_seqlens; /* on the device, for plans of dw_prefill_device; else NULL */

    /* Scratch memory, aligned to 256 bytes. Launches on one stream may share it, also from several threads. Launches on
     * different streams may share it only one after the other, in an order that the caller makes. */
    void *workspace;
    size_t workspace_bytes;

    /* Pool of states, updated in place, instead of initial_state and final_state. A slot that is negative or beyond
     * the pool is no slot. A sequence without a slot to read starts from zeros. Without a slot to write it leaves no
     * state. Without both it is padding, and its outputs become zeros. No two sequences may write one slot, and none
     * may read a slot that another one writes. A sequence without tokens writes nothing, whatever has_initial_state
     * holds. */
    const dw_tensor *pool;      /* [slots, HV, K, V] or [slots, HV, V, K], f32, bf16 or fp16 */
    const int32_t *slots;       /* [N] on the device, slots to read; NULL: the plan's slots, or slot n for sequence n */
    const int32_t *write_slots; /* [N] on the device, slots to write; NULL: as slots */

    /* Snapshots: states after chunks of 64 tokens, for the chunks that have a slot. A sequence that continues from a
     * snapshot in f32, with segments = 1, has the same bits as the whole sequence. */
    const dw_tensor *snapshots;    /* shape as pool; NULL: the pool itself, in slots that no sequence has */
    const int32_t *snapshot_slots; /* on the device; entry cu_seqlens[n] / 64 + n + c is the slot for the state after
                                      chunk c of sequence n. Negative or beyond the tensor: no snapshot. NULL: the
                                      plan's snapshots, if any */
    int32_t pool_layout;           /* DW_STATE_*: layout of pool */
    int32_t snapshot_layout;       /* DW_STATE_*: layout of snapshots */

    /* Written, aligned to 256 bytes: the context of the spec's `save`, for the backward. NULL: nothing is saved. */
    void *context;
    size_t context_bytes; /* at least those of dw_prefill_context_bytes */
} dw_prefill_tensors;

/* Snapshot: the state of a sequence after some of its tokens. */
typedef struct dw_snapshot {
    int64_t sequence;
    int64_t tokens; /* tokens before the state: a multiple of 64, at least 64 */
    int64_t slot;
} dw_snapshot;

/* Plan: a checked batch shape. Launch it any number of times. */
typedef struct dw_prefill dw_prefill;

/* Makes a plan for a packed batch whose lengths the host knows. cu_seqlens is in host memory, and copied. */
int dw_prefill_packed(const dw_context *context, const dw_prefill_spec *spec, const dw_lengths *cu_seqlens,
                      int64_t tokens, dw_prefill **plan);
/* Makes a plan for a dense batch: `batch` sequences of `tokens` rows each. */
int dw_prefill_dense(const dw_context *context, const dw_prefill_spec *spec, int64_t batch, int64_t tokens,
                     dw_prefill **plan);
/* Makes a plan for a packed batch whose lengths are on the device alone. Entries of cu_seqlens that decrease or exceed
 * `tokens` are replaced by the nearest allowed ones. After a launch the first 4 bytes of the workspace are 0, or 1 +
 * the index of the first wrong entry. An absent sequence has no tokens: its entry of cu_seqlens repeats the one before.
 * Sequences are cut into segments on the device, as dw_prefill_packed cuts them on the host for as many rows. */
int dw_prefill_device(const dw_context *context, const dw_prefill_spec *spec, int64_t tokens, int64_t sequences,
                      dw_prefill **plan);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_prefill_destroy(dw_prefill *plan);
int dw_prefill_workspace_bytes(const dw_prefill *plan, size_t *bytes);
/* Most tokens of a round of the backward for a spec's `save`, a multiple of 64: a sequence of no more tokens is not
 * cut, and n tokens have at most n / `tokens` boundaries, each of HV K V f32 numbers. 0: there are no rounds. */
int dw_prefill_round_tokens(const dw_prefill_spec *spec, int64_t *tokens);
/* Bytes of the context that launches may save; 0: the backward needs none. */
int dw_prefill_context_bytes(const dw_prefill *plan, size_t *bytes);
/* Number of entries of snapshot_slots. */
int dw_prefill_chunk_entries(const dw_prefill *plan, int64_t *entries);
/* Sets `count` slots that the host knows, for all later launches of a plan whose lengths the host knows. They are
 * checked and copied. A negative slot is no slot. Launches refuse slots beyond their pool. write_slots may be NULL: as
 * slots. Nothing else may use the plan during the call, and no captured graph may need the plan. */
int dw_prefill_set_slots(dw_prefill *plan, const int32_t *slots, const int32_t *write_slots, int64_t count);
/* Sets `count` snapshots for all later launches of a plan whose lengths the host knows. They are checked and copied.
 * Nothing else may use the plan during the call, and no captured graph may need the plan. */
int dw_prefill_set_snapshots(dw_prefill *plan, const dw_snapshot *snapshots, int64_t count);
int dw_prefill_launch(const dw_prefill *plan, void *stream, const dw_prefill_tensors *tensors);

/* ---- backward of prefill ---- */

/* The inputs of a prefill, the gradients of what it returned, and the gradients to compute. Gradients that are NULL are
 * not computed. Rows past the last sequence become zeros. */
typedef struct dw_prefill_backward_tensors {
    size_t size;
    const dw_tensor *q; /* inputs as in dw_prefill_tensors */
    const dw_tensor *k;
    const dw_tensor *v;
    const dw_tensor *g;
    const dw_tensor *beta;
    const dw_tensor *a;
    const dw_tensor *b;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;
    int32_t allow_neg_eigval;
    int32_t initial_layout;
    const dw_tensor *initial_state;
    const uint8_t *has_initial_state;
    const dw_lengths *cu_seqlens;
    const dw_tensor *d_o;             /* [T, HV, V] */
    const dw_tensor *d_final_state;   /* as final_state; NULL: zeros */
    const dw_tensor *d_q;             /* [T, HK, K], of the type of q; NULL: not computed, as for all that follow */
    const dw_tensor *d_k;             /* [T, HK, K] */
    const dw_tensor *d_v;             /* [T, HV, V] */
    const dw_tensor *d_g;             /* [T, HV], any dtype: gradient of g or, with raw gates, of a */
    const dw_tensor *d_beta;          /* [T, HV], any dtype: gradient of beta or, with raw gates, of b */
    const dw_tensor *d_a_log;         /* [HV], f32, with raw gates */
    const dw_tensor *d_dt_bias;       /* [HV], f32, with raw gates */
    const dw_tensor *d_initial_state; /* as initial_state, f32, bf16 or fp16; zeros where has_initial_state is 0 */
    int32_t d_final_layout;
    int32_t d_initial_layout;
    void *workspace;
    size_t workspace_bytes;
    void *context; /* that a launch of the forward saved, from the same inputs; NULL: none, if none is needed */
    size_t context_bytes;
} dw_prefill_backward_tensors;

/* Plan of the backward of a prefill, for the same batches. */
typedef struct dw_prefill_backward dw_prefill_backward;

/* Makes the backward of a plan, which may be destroyed afterwards. It cuts sequences into the plan's `segments`, or
 * into numbers with the least estimated time of its own; none where only the device knows the lengths. The plan's
 * `save` says whether it has rounds. */
int dw_prefill_backward_create(const dw_prefill *plan, dw_prefill_backward **backward);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_prefill_backward_destroy(dw_prefill_backward *backward);
int dw_prefill_backward_workspace_bytes(const dw_prefill_backward *backward, size_t *bytes);
int dw_prefill_backward_launch(const dw_prefill_backward *backward, void *stream,
                               const dw_prefill_backward_tensors *tensors);
/* ---- prefill of sequences that several ranks share ----
 *
 * Each sequence is cut into blocks of the same number of tokens; its last block may be shorter. All ranks describe the
 * same layout. A rank's batch is packed, and its sequences are its fragments: runs of blocks of a sequence.
 *
 *   dw_parallel_prefill_summarise_launch    writes summaries of the rank's blocks
 *   all-gather of summary_bytes of each rank, on the same stream (ncclAllGather, rcclAllGather, ...); not if it is 0
 *   dw_parallel_prefill_finish_launch       outputs, final states and snapshots
 *
 * Outputs and states have the same bits for any number of ranks, one included, and any layout with the same block. */

/* Which rank has which blocks. */
enum {
    DW_RANKS_CONTIGUOUS = 0, /* the blocks of the packed sequences in runs of equal length, rank after rank */
    DW_RANKS_ZIGZAG = 1,     /* each sequence in 2 R pieces: rank r has pieces r and 2 R - 1 - r */
    DW_RANKS_FRAGMENTS = 2,  /* as `fragments` says */
    DW_RANKS_PACKED = 3      /* whole sequences, the longest first, each on the rank with the fewest blocks so far */
};

typedef struct dw_fragment {
    int64_t sequence;
    int64_t begin;  /* tokens of the sequence before it: a multiple of the block */
    int64_t tokens; /* a multiple of the block, unless the sequence ends with it */
} dw_fragment;

typedef struct dw_rank_layout {
    size_t size;
    const int64_t *lengths; /* [sequences], tokens of each sequence, on the host */
    int64_t sequences;
    /* Tokens of a block, a multiple of 64. 0: chosen by the lengths and the spec's value heads, not by the ranks. */
    int64_t block;
    int32_t ranks;
    int32_t kind;                 /* DW_RANKS_* */
    const dw_fragment *fragments; /* with DW_RANKS_FRAGMENTS: of rank 0, then of rank 1, ..., on the host; else NULL */
    const int64_t *fragment_counts; /* [ranks], with DW_RANKS_FRAGMENTS; else NULL */
} dw_rank_layout;

typedef struct dw_parallel_prefill_sizes {
    size_t size;
    size_t summary_bytes;   /* that each rank sends, equal on all ranks; 0: nothing is exchanged on any rank */
    size_t gathered_bytes;  /* of all ranks, rank by rank */
    size_t workspace_bytes; /* both launches need the same workspace, unchanged between them */
    int64_t fragments;      /* of this rank: the sequences of its batch */
    int64_t order_entries;
    int64_t chunk_entries; /* of snapshot_slots */
    int64_t block;         /* tokens of a block: the layout's, or the one that was chosen */
} dw_parallel_prefill_sizes;

/* Plan of one rank's part. */
typedef struct dw_parallel_prefill dw_parallel_prefill;

/* Makes a plan for `rank`, whose batch has `tokens` rows; rows past its last fragment belong to no sequence. The spec's
 * segments must be 0, and its path DW_PATH_AUTO or DW_PATH_SPLIT. */
int dw_parallel_prefill_create(const dw_context *context, const dw_prefill_spec *spec, const dw_rank_layout *layout,
                               int32_t rank, int64_t tokens, dw_parallel_prefill **plan);
void dw_parallel_prefill_destroy(dw_parallel_prefill *plan);
/* Fills in *sizes, whose field `size` the caller sets. */
int dw_parallel_prefill_get_sizes(const dw_parallel_prefill *plan, dw_parallel_prefill_sizes *sizes);
/* Copies the rank's fragments, in the order of its batch, to fragments[count], and the slots of the summaries that it
 * folds to order[entries]. Slot s is summary s % n of rank s / n, where n is the number of summaries that fit into
 * summary_bytes. Counts must be those of the sizes; either array may be NULL. */
int dw_parallel_prefill_tables(const dw_parallel_prefill *plan, dw_fragment *fragments, int64_t count, int32_t *order,
                               int64_t entries);
/* As dw_prefill_set_snapshots: sequences are fragments, and tokens count from a fragment's begin. */
int dw_parallel_prefill_set_snapshots(dw_parallel_prefill *plan, const dw_snapshot *snapshots, int64_t count);
/* The first stage. Tensors are per fragment: a fragment with the first token of a sequence reads its initial state, one
 * with the last token writes its final state. Slots of a pool must be the same for all fragments of a sequence. Tensors
 * must not change until the second stage is complete. `summary`: device memory, aligned to 256 bytes. */
int dw_parallel_prefill_summarise_launch(const dw_parallel_prefill *plan, void *stream,
                                         const dw_prefill_tensors *tensors, void *summary, size_t summary_bytes);
/* The second stage, with the same tensors and workspace. `gathered`: only read. `order`: [order_entries] on the device;
 * NULL: the plan's. */
int dw_parallel_prefill_finish_launch(const dw_parallel_prefill *plan, void *stream, const dw_prefill_tensors *tensors,
                                      const void *gathered, size_t gathered_bytes, const int32_t *order);

/* Layout and spec of a rank's plan, as bytes. Gather them from all ranks once per plan, and compare them before the
 * first launch: ranks with different plans would wait for each other, or read each other's bytes as something else. */
enum { DW_AGREEMENT_BYTES = 128 };
int dw_parallel_prefill_agreement(const dw_parallel_prefill *plan, void *bytes);
/* `all`: DW_AGREEMENT_BYTES of each rank, rank by rank. DW_ERROR_RANKS if they differ: the text names what differs. */
int dw_parallel_prefill_check_agreement(const dw_parallel_prefill *plan, const void *all, size_t bytes);

/* Exchange of a convolution's tails, the last width - 1 rows of each fragment that another fragment follows. Each rank
 * sends *slots tails; 0: nobody sends. For fragment n, sent[n] is the place of its tail among them, and before[n] is
 * the slot, in the tails of all ranks, of the rows before it; -1: none. `count`: the plan's fragments. */
int dw_parallel_prefill_tails(const dw_parallel_prefill *plan, int64_t *slots, int32_t *sent, int32_t *before,
                              int64_t count);

/* ---- backward of a prefill that several ranks share ----
 *
 *   dw_parallel_prefill_backward_summarise_launch    writes summaries of the rank's blocks, for both directions
 *   all-gather of summary_bytes of each rank, on the same stream; not if it is 0
 *   dw_parallel_prefill_backward_finish_launch       gradients
 *
 * Gradients have the same bits for any number of ranks, one included, and any layout with the same block. Gradients of
 * A_log and dt_bias are sums over the rank's tokens: the caller adds up those of all ranks. Nothing of the forward is
 * kept. */

typedef struct dw_parallel_prefill_backward_sizes {
    size_t size;
    size_t summary_bytes;   /* that each rank sends, equal on all ranks; 0: nothing is exchanged on any rank */
    size_t gathered_bytes;  /* of all ranks, rank by rank */
    size_t workspace_bytes; /* both launches need the same workspace, unchanged between them */
    int64_t fragments;      /* of this rank: the sequences of its batch */
    int64_t block;          /* tokens of a block */
} dw_parallel_prefill_backward_sizes;

/* Plan of the backward of one rank's part. */
typedef struct dw_parallel_prefill_backward dw_parallel_prefill_backward;

/* Makes the backward of a plan, which may be destroyed afterwards. */
int dw_parallel_prefill_backward_create(const dw_parallel_prefill *plan, dw_parallel_prefill_backward **backward);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_parallel_prefill_backward_destroy(dw_parallel_prefill_backward *backward);
/* Fills in *sizes, whose field `size` the caller sets. */
int dw_parallel_prefill_backward_get_sizes(const dw_parallel_prefill_backward *backward,
                                           dw_parallel_prefill_backward_sizes *sizes);
/* The first stage. Tensors are those of the rank's batch, without cu_seqlens and context. States are per fragment: a
 * fragment with the first token of a sequence reads its initial state and writes the gradient of it, one with the last
 * token reads the gradient of its final state. Other fragments' states are neither read nor written. Tensors must not
 * change until the second stage is complete. `summary`: device memory, aligned to 256 bytes. */
int dw_parallel_prefill_backward_summarise_launch(const dw_parallel_prefill_backward *backward, void *stream,
                                                  const dw_prefill_backward_tensors *tensors, void *summary,
                                                  size_t summary_bytes);
/* The second stage, with the same tensors and workspace. `gathered`: only read. */
int dw_parallel_prefill_backward_finish_launch(const dw_parallel_prefill_backward *backward, void *stream,
                                               const dw_prefill_backward_tensors *tensors, const void *gathered,
                                               size_t gathered_bytes);

/* ---- ranks that exchange through RCCL or NCCL, which is opened at run time ----
 *
 * An engine with a communicator of its own needs nothing of this. No call waits longer than the timeout: where another
 * rank died, or never made the same call, the communicator is aborted, the call returns DW_ERROR_RANKS, and the text
 * names the function of the library of collectives. Later calls return DW_ERROR_RANKS at once. */

enum { DW_UNIQUE_ID_BYTES = 128 };

/* A rank among ranks, each with a device of its own. */
typedef struct dw_communicator dw_communicator;

/* Writes DW_UNIQUE_ID_BYTES to `id`. One rank makes an id and hands it to the others. `library`: name or path of the
 * library of collectives; NULL: the one that DELTAWAVE_CCL_LIBRARY names, or RCCL, or NCCL. It is never unloaded. */
int dw_communicator_unique_id(const dw_context *context, const char *library, void *id);
/* Joins the ranks with the same id. Every rank calls it; it returns once all have. */
int dw_communicator_create(const dw_context *context, const char *library, const void *id, int32_t rank, int32_t ranks,
                           int64_t timeout_ms, dw_communicator **communicator);
/* Lets issued work end, at most for the timeout. */
void dw_communicator_destroy(dw_communicator *communicator);
/* Compares the layouts and specs of all ranks' plans, and waits for the result. All ranks call it, once per plan,
 * before the first prefill. It allocates. DW_ERROR_RANKS if they differ: the text names what differs. */
int dw_communicator_agree(const dw_communicator *communicator, const dw_parallel_prefill *plan);
/* All steps: the first stage, the all-gather (unless summary_bytes of the plan is 0), the second stage. Enqueues them,
 * and returns. `summary` and `gathered`: device memory of summary_bytes and gathered_bytes of the plan, aligned to 256.
 */
int dw_communicator_prefill(const dw_communicator *communicator, const dw_parallel_prefill *plan, void *stream,
                            const dw_prefill_tensors *tensors, void *summary, size_t summary_bytes, void *gathered,
                            size_t gathered_bytes);
/* All steps of the backward, as dw_communicator_prefill, with sizes of the plan of the backward. */
int dw_communicator_prefill_backward(const dw_communicator *communicator, const dw_parallel_prefill_backward *backward,
                                     void *stream, const dw_prefill_backward_tensors *tensors, void *summary,
                                     size_t summary_bytes, void *gathered, size_t gathered_bytes);
/* Enqueues an all-gather: `bytes` bytes of each rank go to `receive`, rank by rank, on every rank. Device memory,
 * aligned to 256 bytes. */
int dw_communicator_all_gather(const dw_communicator *communicator, void *stream, const void *send, void *receive,
                               size_t bytes);
/* Waits until all work of the stream is done, at most for the timeout. dw_synchronize has no limit, and hangs if
 * another rank dies. */
int dw_communicator_synchronize(const dw_communicator *communicator, void *stream);

/* ---- gates as an operation of their own ---- */

typedef struct dw_gate_tensors {
    size_t size;
    const dw_tensor *a;       /* [T, HV], or [T, blocks, heads of a block] with any stride between blocks; any dtype */
    const dw_tensor *b;       /* shapes as a; any dtype */
    const dw_tensor *a_log;   /* [HV], any dtype */
    const dw_tensor *dt_bias; /* [HV], any dtype; NULL: 0 */
    const dw_tensor *g;       /* [T, HV], f32, written: -exp(a_log) softplus(a + dt_bias) */
    const dw_tensor *beta;    /* [T, HV], f32, written: sigmoid(b) */
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pad0;
} dw_gate_tensors;

int dw_gate_launch(const dw_context *context, void *stream, const dw_gate_tensors *tensors);

/* Gradients of the gates: the inputs of dw_gate_tensors, gradients of g and beta, and the gradients to compute; NULL:
 * not computed. Launches with d_a_log or d_dt_bias enqueue two kernels, others one. No output may overlap another
 * argument. */
typedef struct dw_gate_backward_tensors {
    size_t size;
    const dw_tensor *a; /* [T, HV] or [T, blocks, heads of a block], as in dw_gate_tensors */
    const dw_tensor *b;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;   /* NULL: 0 */
    const dw_tensor *d_g;       /* [T, HV], f32; NULL: 0 */
    const dw_tensor *d_beta;    /* [T, HV], f32; NULL: 0 */
    const dw_tensor *d_a;       /* shapes as a; any dtype, written */
    const dw_tensor *d_b;       /* shapes as b; any dtype, written */
    const dw_tensor *d_a_log;   /* [HV], f32, written */
    const dw_tensor *d_dt_bias; /* [HV], f32, written */
    void *workspace;            /* aligned to 256 bytes; as in dw_prefill_tensors */
    size_t workspace_bytes;
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pad0;
} dw_gate_backward_tensors;

/* Bytes of workspace of a launch over these numbers of tokens and value heads. */
int dw_gate_backward_workspace_bytes(const dw_context *context, int64_t tokens, int64_t value_heads, size_t *bytes);
int dw_gate_backward_launch(const dw_context *context, void *stream, const dw_gate_backward_tensors *tensors);

/* ---- causal depthwise convolution of the projections, split into q, k and v: one kernel ----
 *
 * Optionally the same kernel normalises q and k, and computes g and beta: pass the results to prefill. */

/* Layout of q, k and v in a row of the projections. */
enum {
    DW_CONV_FLAT = 0,        /* q | k | v, then columns that are not read, as in Qwen3.5 */
    DW_CONV_INTERLEAVED = 1, /* for each key head: its q | its k | v | z of its value heads, as in Qwen3-Next */
    DW_CONV_SEPARATE = 2     /* q, k and v in three tensors */
};

/* Activation of the convolution's sums. */
enum {
    DW_ACTIVATION_SILU = 0, /* x / (1 + exp(-x)) */
    DW_ACTIVATION_NONE = 1
};

/* Layout of conv states: the order of the last two dimensions. */
enum {
    DW_CONV_CHANNEL_MAJOR = 0, /* [slots, channels, columns] */
    DW_CONV_TOKEN_MAJOR = 1    /* [slots, columns, channels] */
};

typedef struct dw_conv_spec {
    size_t size;
    int32_t dtype; /* of x, q, k, v and the conv states: DW_BF16 or DW_F16 */
    int32_t key_heads;
    int32_t value_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t width;      /* tokens that an output depends on: 2, 3 or 4 */
    int32_t activation; /* DW_ACTIVATION_* */
    /* 1: conv states are read, not written, for draft tokens. dw_commit_launch writes them for the accepted tokens. */
    int32_t keep_states;
    /* 1: rows of q and k are divided by sqrt(sum of squares + 1e-6), then rounded. K is then at most 256. */
    int32_t qk_l2norm;
    int32_t pad0;
} dw_conv_spec;

/* Tensors of a launch over a packed batch. Channels of weight, bias and states: q, then k, then v. No output may
 * overlap x. */
typedef struct dw_conv_tensors {
    size_t size;
    const dw_tensor *x;   /* [T, columns], with DW_CONV_FLAT and DW_CONV_INTERLEAVED */
    const dw_tensor *x_q; /* [T, blocks, channels of a block], with DW_CONV_SEPARATE; x_k, x_v likewise */
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const dw_tensor *weight; /* [channels, width], any dtype; the last column is for the newest token */
    const dw_tensor *bias;   /* [channels], any dtype; NULL: 0 */

    /* Pool of conv states, updated in place. NULL: sequences start from zeros and leave no state. It has at least
     * width - 1 columns: one per token, the newest last. */
    const dw_tensor *state;
    /* [N] on the device. No two sequences may share a slot. A slot that is negative or beyond the pool makes the
     * sequence padding: its outputs become zeros, and no state is touched. NULL: slot n for sequence n. */
    const int32_t *slots;
    const uint8_t *has_initial_state; /* [N] on the device. 0: the slot reads as zeros. NULL: all have a state */

    const dw_tensor *q; /* [T, HK, K], written; rows past the last sequence become zeros */
    const dw_tensor *k; /* [T, HK, K], written */
    const dw_tensor *v; /* [T, HV, V], written */

    const dw_lengths *cu_seqlens; /* on the device, for plans of dw_conv_device; else NULL */
    int32_t x_layout;             /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE */
    int32_t state_layout;         /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */

    /* Gates of all rows, computed in the same launch; fields as in dw_gate_tensors. All NULL: not wanted. */
    const dw_tensor *a;
    const dw_tensor *b;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;
    const dw_tensor *g;
    const dw_tensor *beta;
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pad0;

    /* Speculative decoding: [N] on the device, tokens of the step before that were accepted, counted from 1. Counts
     * outside are clamped. Sequence n reads width - 1 columns of its state from column accepted[n] - 1 on. Then it
     * writes, from column 0 on, those columns but the first, and its tokens: a state has width - 2 columns more than a
     * sequence has tokens. Tokens beyond the last column are not stored. NULL: the last columns are read and written.
     */
    const int32_t *accepted;
    int32_t slot_columns;  /* slots is [N, slot_columns], and the first column holds the slots; 0: 1 */
    int32_t has_null_slot; /* 1: null_slot, besides slots that are negative or beyond, makes a sequence padding */
    int32_t null_slot;
    int32_t pad1;
} dw_conv_tensors;

/* Plan: a checked batch shape. Launch it any number of times. */
typedef struct dw_conv dw_conv;

/* Makes a plan for a packed batch whose lengths the host knows. cu_seqlens is in host memory, and copied. */
int dw_conv_packed(const dw_context *context, const dw_conv_spec *spec, const dw_lengths *cu_seqlens, int64_t tokens,
                   dw_conv **plan);
/* Makes a plan for a packed batch whose lengths are on the device alone. Entries of cu_seqlens that decrease or exceed
 * `tokens` never lead out of bounds. The outputs of a batch with such an entry are not specified. */
int dw_conv_device(const dw_context *context, const dw_conv_spec *spec, int64_t tokens, int64_t sequences,
                   dw_conv **plan);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_conv_destroy(dw_conv *plan);
int dw_conv_launch(const dw_conv *plan, void *stream, const dw_conv_tensors *tensors);

/* Gradients of a convolution: its inputs, gradients of what it returned, and the gradients to compute; NULL: not
 * computed. The forward's outputs are computed again. States are those of sequence n in row n: a forward on a pool
 * overwrites them, so keep a copy. No output may overlap another argument. */
typedef struct dw_conv_backward_tensors {
    size_t size;
    const dw_tensor *x; /* as in dw_conv_tensors */
    const dw_tensor *x_q;
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const dw_tensor *weight;
    const dw_tensor *bias;          /* NULL: 0 */
    const dw_tensor *initial_state; /* [N, channels, columns], dtype of x; NULL: sequences started from zeros */
    const uint8_t
        *has_initial_state;         /* [N] on the device. 0: the sequence started from zeros. NULL: all have a state */
    const dw_tensor *d_q;           /* [T, HK, K], dtype of x, of any strides that inputs may have */
    const dw_tensor *d_k;           /* [T, HK, K] */
    const dw_tensor *d_v;           /* [T, HV, V] */
    const dw_tensor *d_final_state; /* gradient of the states after the batch; NULL: 0 */
    const dw_tensor *d_x;   /* shapes as x, by x_layout, written; rows past the last sequence become zeros, and columns
                               that are   not of q, k and v stay */
    const dw_tensor *d_x_q; /* with DW_CONV_SEPARATE */
    const dw_tensor *d_x_k;
    const dw_tensor *d_x_v;
    const dw_tensor *d_weight;        /* [channels, width], f32, written */
    const dw_tensor *d_bias;          /* [channels], f32, written */
    const dw_tensor *d_initial_state; /* as initial_state, written; zeros for sequences that started from zeros */
    const dw_lengths *cu_seqlens;     /* on the device, for plans of dw_conv_device; else NULL */
    void *workspace;                  /* aligned to 256 bytes; as in dw_prefill_tensors */
    size_t workspace_bytes;
    int32_t x_layout;       /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE: of x and d_x */
    int32_t initial_layout; /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */
    int32_t d_final_layout;
    int32_t d_initial_layout;
} dw_conv_backward_tensors;

/* Plan of the gradients of a convolution, for the same batches. */
typedef struct dw_conv_backward dw_conv_backward;

/* Makes the plan. The convolution's plan may be destroyed before it. */
int dw_conv_backward_create(const dw_conv *plan, dw_conv_backward **backward);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_conv_backward_destroy(dw_conv_backward *backward);
int dw_conv_backward_workspace_bytes(const dw_conv_backward *backward, size_t *bytes);
/* Enqueues one kernel, and with d_weight or d_bias another one. */
int dw_conv_backward_launch(const dw_conv_backward *backward, void *stream, const dw_conv_backward_tensors *tensors);

/* ---- decode: the same small number of tokens of every sequence, on a pool of states: one kernel ----
 *
 * The recurrence of prefill, token after token. One token is a step of generation. Several tokens verify a draft. */

/* Structure of a draft. */
enum {
    DW_DRAFT_CHAIN = 0, /* each token follows the one before it */
    DW_DRAFT_TREE = 1   /* refused: no kernel supports trees yet */
};

typedef struct dw_decode_spec {
    size_t size;
    int32_t dtype;       /* of q, k, v, o: DW_BF16 or DW_F16 */
    int32_t head_map;    /* DW_HEADS_* */
    int32_t key_heads;   /* HK */
    int32_t value_heads; /* HV, a multiple of HK */
    int32_t key_dim;     /* K, a multiple of 16 up to 256 */
    int32_t value_dim;   /* V, a multiple of 16 up to 256 */
    int32_t qk_l2norm;   /* 1: the kernels l2-normalise the rows of q and k */
    float scale;         /* 0: K^-0.5 */
    int32_t tokens;      /* T: tokens of every sequence, 1 to 16 */
    int32_t draft;       /* DW_DRAFT_* */
} dw_decode_spec;

/* Tensors of a launch. Tensors over tokens are [B, T, ...], or [B T, ...] with the tokens of a sequence one after the
 * other. */
typedef struct dw_decode_tensors {
    size_t size;
    const dw_tensor *q; /* [B, T, HK, K] */
    const dw_tensor *k; /* [B, T, HK, K] */
    const dw_tensor *v; /* [B, T, HV, V] */
    const dw_tensor *o; /* [B, T, HV, V], written */

    /* Gates, computed or raw, as in dw_prefill_tensors. */
    const dw_tensor *g;
    const dw_tensor *beta;
    const dw_tensor *a;
    const dw_tensor *b;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;

    /* Pool of states, updated in place. A slot that is negative or beyond the pool is no slot. A sequence without a
     * slot to read starts from zeros. Without a slot to write it leaves no state. Without both it is padding, and its
     * outputs become zeros. No two sequences may write one slot, and none may read a slot that another one writes. */
    const dw_tensor *pool;            /* [slots, HV, K, V] or [slots, HV, V, K], f32, bf16 or fp16 */
    const int32_t *slots;             /* [B] on the device, slots to read; NULL: slot n for sequence n */
    const int32_t *write_slots;       /* [B] on the device, slots to write; NULL: as slots */
    const uint8_t *has_initial_state; /* [B] on the device. 0: the slot reads as zeros. NULL: all have a state */

    /* States after every token, written, for dw_commit_launch; NULL: not wanted. The pool is then not written. f32,
     * bf16 or fp16, [B T, HV, ...] in the layout of the pool. */
    const dw_tensor *states;
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pool_layout;      /* DW_STATE_*: layout of pool and states */

    /* Speculative decoding without a commit, all on the device; NULL or 0: not wanted. The state after each draft goes
     * to a slot of its own, and the next step reads the slot of the last accepted one. read_slots and draft_slots may
     * be one table. */
    /* [B, T]: slot of the state after each token; write_slots is then NULL. Slots of states if that is given, which is
     * then [slots, HV, ...] of any number of slots, and the pool is not written. */
    const int32_t *draft_slots;
    const int32_t *read_slots; /* [B, read_columns], of which sequence n reads column accepted[n] - 1; slots is NULL */
    const int32_t *accepted;   /* [B], with read_slots: counts of the step before; those outside are clamped */
    /* [B + 1]: rows of each sequence, at most T. Tensors over tokens are then [rows, ...], of any number of rows. A
     * sequence without rows reads and writes nothing. Entries that decrease or exceed the rows never lead out of
     * bounds. The outputs of the sequences beside such an entry are not specified. Rows of no sequence stay as they
     * are. */
    const dw_lengths *cu_seqlens;
    int32_t read_columns;  /* 0: T */
    int32_t has_null_slot; /* 1: null_slot is no slot, besides those that are negative or beyond the pool */
    int32_t null_slot;
    int32_t pad0;

    /* Gated norm of o, in place, as dw_norm_tensors: one kernel in all if V is 128, K at most 128 and that is faster
     * for the batch, otherwise one more. o must then be packed, [B T, HV, V] or [rows, HV, V]. Rows of no sequence must
     * be zeros if they are to stay so. */
    const dw_tensor *z;           /* NULL: no norm */
    const dw_tensor *norm_weight; /* [V]; NULL: 1 */
    float norm_eps;
    int32_t norm_gate; /* DW_GATE_* */
} dw_decode_tensors;

/* Commit of the accepted tokens: the first accepted[n] of the verified tokens of sequence n. The state after the last
 * of them goes to the pool, and their columns go to the conv state. A sequence without accepted tokens keeps both. */
typedef struct dw_commit_tensors {
    size_t size;
    const int32_t *accepted; /* [B] on the device, clamped to 0 to T */
    const int32_t *slots;    /* [B] on the device, of both pools; negative or beyond: skipped; NULL: slot n */
    const dw_tensor *states; /* [B T, HV, K, V] or [B T, HV, V, K] */
    const dw_tensor *pool;   /* written */

    /* Conv state and projections of all verified tokens, as in dw_conv_tensors. conv_state NULL: only the pool. */
    const dw_tensor *conv_state;
    const dw_tensor *x;
    const dw_tensor *x_q;
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const uint8_t *has_initial_state; /* [B] on the device, for the conv states */
    int32_t pool_layout;              /* DW_STATE_*: layout of states and pool */
    int32_t x_layout;                 /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE */
    int32_t conv_layout;              /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */
    int32_t pad0;
} dw_commit_tensors;

/* Plan for `batch` sequences. Launch it any number of times. */
typedef struct dw_decode dw_decode;

int dw_decode_create(const dw_context *context, const dw_decode_spec *spec, int64_t batch, dw_decode **plan);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_decode_destroy(dw_decode *plan);
int dw_decode_launch(const dw_decode *plan, void *stream, const dw_decode_tensors *tensors);
/* Commits the tokens that a launch of this plan verified: one kernel. */
int dw_commit_launch(const dw_decode *plan, void *stream, const dw_commit_tensors *tensors);

/* ---- gated RMS norm of the outputs: one kernel ----
 *
 *   y = x / sqrt(mean(x^2) + eps) * weight * gate(z), for each row of V numbers
 */

/* Output gate: the activation of z. */
enum {
    DW_GATE_SILU = 0,   /* z / (1 + exp(-z)) */
    DW_GATE_SIGMOID = 1 /* 1 / (1 + exp(-z)) */
};

/* Tensors of a launch over a packed batch. x, z and y have one dtype, bf16 or fp16. */
typedef struct dw_norm_tensors {
    size_t size;
    const dw_tensor *x;      /* [T, HV, V], V a multiple of 16 up to 256; NULL: y is normalised in place */
    const dw_tensor *z;      /* [T, blocks, heads * V]: blocks of adjacent heads, HV heads in all, such as [T, HV, V] */
    const dw_tensor *weight; /* [V], any dtype; NULL: 1 */
    const dw_tensor *y;      /* [T, HV, V], written; must not overlap z; may be the same view as x */
    float eps;               /* positive, at least 1.18e-38 */
    int32_t gate;            /* DW_GATE_* */
} dw_norm_tensors;

int dw_norm_launch(const dw_context *context, void *stream, const dw_norm_tensors *tensors);

/* Gradients of a gated norm: its inputs, the gradient of y, and the gradients to compute; NULL: not computed. x is what
 * the norm read, so a norm in place has no gradients. Launches with d_weight enqueue two kernels, others one. No output
 * may overlap another argument. */
typedef struct dw_norm_backward_tensors {
    size_t size;
    const dw_tensor *x;        /* [T, HV, V], as in dw_norm_tensors */
    const dw_tensor *z;        /* [T, blocks, heads * V] */
    const dw_tensor *weight;   /* [V], any dtype; NULL: 1 */
    const dw_tensor *d_y;      /* [T, HV, V], dtype of x, of any strides that inputs may have */
    const dw_tensor *d_x;      /* [T, HV, V], dtype of x, written */
    const dw_tensor *d_z;      /* [T, blocks, heads * V], dtype of x, with blocks of its own, written */
    const dw_tensor *d_weight; /* [V], f32, written */
    void *workspace;           /* aligned to 256 bytes; as in dw_prefill_tensors */
    size_t workspace_bytes;
    float eps;    /* as in the forward */
    int32_t gate; /* DW_GATE_* */
} dw_norm_backward_tensors;

/* Bytes of workspace of a launch over these numbers of tokens, value heads and numbers per row. */
int dw_norm_backward_workspace_bytes(const dw_context *context, int64_t tokens, int64_t value_heads, int64_t value_dim,
                                     size_t *bytes);
int dw_norm_backward_launch(const dw_context *context, void *stream, const dw_norm_backward_tensors *tensors);

/* ---- layer: everything between the input projections and the output projection, in place on pools of states ----
 *
 *   q, k, v = silu(conv(x)); o = recurrence(q, k, v, a, b); y = rmsnorm(o) * norm_weight * gate(z)
 *
 * A batch begins with the decodes, sequences of one token each. Prefills of any lengths follow. */

typedef struct dw_layer_spec {
    size_t size;
    int32_t dtype;            /* of x, z, y and conv states: DW_BF16 or DW_F16 */
    int32_t head_map;         /* DW_HEADS_* */
    int32_t key_heads;        /* HK */
    int32_t value_heads;      /* HV, a multiple of HK */
    int32_t key_dim;          /* K, a multiple of 16 up to 256 */
    int32_t value_dim;        /* V, a multiple of 16 up to 256 */
    int32_t width;            /* tokens that an output of the convolution depends on: 2, 3 or 4 */
    int32_t qk_l2norm;        /* 1: rows of q and k are l2-normalised */
    float scale;              /* 0: K^-0.5 */
    float eps;                /* of the norm: positive, at least 1.18e-38 */
    int32_t gate;             /* output gate of the norm: DW_GATE_* */
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t segments;         /* as in dw_prefill_spec */
    int32_t path;             /* as in dw_prefill_spec */
} dw_layer_spec;

/* Tensors of a launch over T packed rows. Channels: q, then k, then v. */
typedef struct dw_layer_tensors {
    size_t size;
    /* Projections, as in dw_conv_tensors. */
    const dw_tensor *x; /* [T, columns] */
    const dw_tensor *x_q;
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const dw_tensor *z; /* [T, blocks, heads * V]; NULL: the columns of x after q, k and v, per row or key head */
    const dw_tensor *a; /* [T, HV], or [T, blocks, heads of a block] with any stride between blocks; any dtype */
    const dw_tensor *b; /* shapes as a; any dtype */

    /* Weights of any dtype. */
    const dw_tensor *conv_weight; /* [channels, width]; the last column is for the newest token */
    const dw_tensor *conv_bias;   /* [channels]; NULL: 0 */
    const dw_tensor *a_log;       /* [HV] */
    const dw_tensor *dt_bias;     /* [HV]; NULL: 0 */
    const dw_tensor *norm_weight; /* [V]; NULL: 1 */

    /* Pools with the same number of slots, updated in place. A sequence without tokens writes to neither, whatever
     * has_initial_state holds. */
    const dw_tensor *conv_state; /* [slots, channels, columns] or [slots, columns, channels]; dtype of x */
    const dw_tensor *pool;       /* [slots, HV, K, V] or [slots, HV, V, K], f32, bf16 or fp16 */
    /* [N] on the device, slots in both pools. No two sequences may share a slot. A slot that is negative or beyond the
     * pools makes the sequence padding: its rows of y become zeros, and no state is touched. NULL: slot n for sequence
     * n. */
    const int32_t *slots;
    const uint8_t *has_initial_state; /* [N] on the device. 0: both states read as zeros. NULL: all have states */

    const dw_tensor *y; /* [T, HV, V], written, memory of its own; rows past the last sequence become 0 */

    const dw_lengths *cu_seqlens; /* on the device, for plans of dw_layer_device; else NULL */

    /* Scratch memory, aligned to 256 bytes. Launches on one stream may share it, also from several threads. Launches on
     * different streams may share it only one after the other, in an order that the caller makes. */
    void *workspace;
    size_t workspace_bytes;

    int32_t x_layout;    /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE */
    int32_t conv_layout; /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */
    int32_t pool_layout; /* DW_STATE_* */
    int32_t pad0;

    /* [T, HV, V], dtype of x, written: what the norm reads, for dw_layer_backward_launch. The norm then does not work
     * in place, and the bits of y are the same. NULL: not kept. */
    const dw_tensor *o;
} dw_layer_tensors;

/* Plan: a checked batch shape. Launch it any number of times. */
typedef struct dw_layer dw_layer;

/* Makes a plan for a packed batch whose lengths the host knows. cu_seqlens is in host memory, and copied. The first
 * `decodes` sequences have one token each. */
int dw_layer_packed(const dw_context *context, const dw_layer_spec *spec, const dw_lengths *cu_seqlens, int64_t tokens,
                    int64_t decodes, dw_layer **plan);
/* Makes a plan for a packed batch whose lengths are on the device alone, so that a captured graph serves batches of
 * varying lengths. Give unused decodes a negative slot, and unused prefills no tokens. Wrong entries of cu_seqlens are
 * replaced by the nearest allowed ones: entries up to `decodes` must be 0, 1, 2, ..., and later ones must not decrease
 * or exceed `tokens`. After a launch the first 4 bytes of the workspace are 0, or 1 + the index of the first wrong
 * entry. */
int dw_layer_device(const dw_context *context, const dw_layer_spec *spec, int64_t tokens, int64_t sequences,
                    int64_t decodes, dw_layer **plan);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_layer_destroy(dw_layer *plan);
int dw_layer_workspace_bytes(const dw_layer *plan, size_t *bytes);
/* Enqueues at most six kernels if no sequence is cut into segments. If the host knows that every row is a decode, it
 * enqueues two for V = 128 and K up to 128, else three. */
int dw_layer_launch(const dw_layer *plan, void *stream, const dw_layer_tensors *tensors);

/* Gradients of a layer without decodes: its inputs, o, gradients of what it returned, and the gradients to compute;
 * NULL: not computed. q, k and v are computed again. States are those of sequence n in row n: a forward overwrites its
 * pools, so keep copies. Rows of gradients past the last sequence become zeros, whatever d_y has there. No output may
 * overlap another argument. */
typedef struct dw_layer_backward_tensors {
    size_t size;
    /* Inputs, as in dw_layer_tensors. */
    const dw_tensor *x;
    const dw_tensor *x_q;
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const dw_tensor *z;
    const dw_tensor *a;
    const dw_tensor *b;
    const dw_tensor *conv_weight;
    const dw_tensor *conv_bias;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;
    const dw_tensor *norm_weight;
    /* States before the batch, both or neither; NULL: sequences started from zeros. */
    const dw_tensor *initial_conv_state; /* [N, channels, columns] or [N, columns, channels], dtype of x */
    const dw_tensor *initial_state;      /* [N, HV, K, V] or [N, HV, V, K], f32, bf16 or fp16 */
    const uint8_t *has_initial_state; /* [N] on the device. 0: the sequence started from zeros. NULL: all have states */
    const dw_tensor *o;               /* [T, HV, V], of dw_layer_tensors */

    const dw_tensor *d_y;                /* [T, HV, V], dtype of x, of any strides that inputs may have */
    const dw_tensor *d_final_conv_state; /* gradients of the states after the batch; NULL: 0 */
    const dw_tensor *d_final_state;

    /* Written. */
    const dw_tensor *d_x; /* shapes as x, by x_layout; columns that are not of q, k and v stay */
    const dw_tensor *d_x_q;
    const dw_tensor *d_x_k;
    const dw_tensor *d_x_v;
    const dw_tensor *d_z; /* [T, blocks, heads * V]; NULL: with d_x of a flat or interleaved layout and z NULL, the
                             columns of d_x where z lies in x; else not computed */
    const dw_tensor *d_a; /* shapes as a; any dtype */
    const dw_tensor *d_b;
    const dw_tensor *d_conv_weight;        /* [channels, width], f32 */
    const dw_tensor *d_conv_bias;          /* [channels], f32 */
    const dw_tensor *d_a_log;              /* [HV], f32 */
    const dw_tensor *d_dt_bias;            /* [HV], f32 */
    const dw_tensor *d_norm_weight;        /* [V], f32 */
    const dw_tensor *d_initial_conv_state; /* as initial_conv_state; zeros for sequences that started from zeros */
    const dw_tensor *d_initial_state;      /* as initial_state */

    const dw_lengths *cu_seqlens; /* on the device, for plans of dw_layer_device; else NULL */
    void *workspace;              /* aligned to 256 bytes; as in dw_layer_tensors */
    size_t workspace_bytes;
    int32_t x_layout;    /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE: of x and d_x */
    int32_t conv_layout; /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR: of all conv states */
    int32_t pool_layout; /* DW_STATE_*: of all recurrent states */
    int32_t pad0;
} dw_layer_backward_tensors;

/* Plan of the gradients of a layer, for the same batches. */
typedef struct dw_layer_backward dw_layer_backward;

/* Makes the plan of a layer without decodes. The layer's plan may be destroyed before it. */
int dw_layer_backward_create(const dw_layer *plan, dw_layer_backward **backward);
/* Destroys a plan; NULL does nothing. A captured graph needs its plan as long as it may be replayed. */
void dw_layer_backward_destroy(dw_layer_backward *backward);
int dw_layer_backward_workspace_bytes(const dw_layer_backward *backward, size_t *bytes);
int dw_layer_backward_launch(const dw_layer_backward *backward, void *stream, const dw_layer_backward_tensors *tensors);

#ifdef __cplusplus
}
#endif

#endif
