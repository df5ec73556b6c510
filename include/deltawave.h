/* deltawave: Gated DeltaNet inference on AMD Instinct MI300, for C.
 *
 * - Functions that can fail return DW_OK or one of DW_ERROR_*; dw_last_error() then says what was wrong, by the name of
 *   the argument. A refused call has enqueued and written nothing but its outputs' handles, which become NULL.
 * - Device pointers, streams and the workspace are the caller's. A launch allocates nothing, waits for nothing and
 * reads nothing back, so that it can be captured into a graph. Memory must stay alive until the work that uses it is
 * done.
 * - The first field of a struct is its size in the header that the caller was compiled with: set it to sizeof, set what
 *   is not wanted to zero, and the struct may grow in later versions.
 * - Handles may be used by several threads at once. Destroying one that is in use is an error of the caller.
 * - Launches of several threads on one stream are each enqueued whole, in some order: no launch of this library comes
 *   between the kernels of another. On different streams the caller orders what shares memory.
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

/* Changes where a program that was compiled with an older header would break. */
#define DW_ABI_VERSION 1

/* Status. */
enum {
    DW_OK = 0,
    DW_ERROR_ARGUMENT = 1, /* an argument was refused */
    DW_ERROR_DEVICE = 2,   /* no runtime, no such device, or no kernels for it */
    DW_ERROR_RUNTIME = 3,  /* a call of the device's runtime failed */
    DW_ERROR_INTERNAL = 4  /* a bug of this library */
};

/* What executes the kernels. */
enum {
    DW_BACKEND_AUTO = 0, /* a runtime with a device if there is one, else the simulator */
    DW_BACKEND_HIP = 1,  /* a HIP runtime, or what DELTAWAVE_HIP_LIBRARY names */
    DW_BACKEND_SIMULATOR = 2
};

/* Element types of tensors, and of lengths. */
enum { DW_F32 = 0, DW_BF16 = 1, DW_F16 = 2, DW_I32 = 3, DW_I64 = 4 };

/* Which key head value head h reads. */
enum {
    DW_HEADS_GROUPED = 0, /* h / (HV / HK) */
    DW_HEADS_TILED = 1    /* h % HK, the order of GGUF */
};

/* The order of the last two dimensions of states. */
enum {
    DW_STATE_KEY_MAJOR = 0,  /* [N, HV, K, V] */
    DW_STATE_VALUE_MAJOR = 1 /* [N, HV, V, K] */
};

/* Directions of dw_copy. */
enum { DW_TO_DEVICE = 0, DW_TO_HOST = 1, DW_ON_DEVICE = 2 };

/* DW_ABI_VERSION of the library that is loaded. */
int dw_abi_version(void);
/* The library's version, "0.1.0". */
const char *dw_version(void);
/* What was wrong with the last call of this thread that failed, "" before the first. Valid until the next one fails. */
const char *dw_last_error(void);

/* ---- devices ---- */

/* One device with all kernels loaded. Made once: no later call loads or compiles anything. */
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
/* NULL does nothing. Plans keep what they need of it: its kernels are unloaded with the last of them, after waiting for
 * the device, so not while a stream is being captured. A captured graph of dw_gate_launch or dw_norm_launch needs the
 * context as long as it may be replayed. On the simulator a fault is that of one context: others go on. */
void dw_context_destroy(dw_context *context);
int dw_context_info(const dw_context *context, dw_device_info *info);

/* Memory of the device, for callers without a runtime of their own: on the simulator above all, where
 * it is memory of the process that the host may read and write, too. */
int dw_malloc(const dw_context *context, size_t bytes, void **address);
/* NULL does nothing. */
int dw_free(const dw_context *context, void *address);
/* Returns when the copy is done. Work that is queued is not waited for. */
int dw_copy(const dw_context *context, void *to, const void *from, size_t bytes, int direction);
/* Waits for all work of a stream (a hipStream_t or CUstream; NULL: the default stream). */
int dw_synchronize(const dw_context *context, void *stream);

/* ---- tensors ---- */

/* A tensor in device memory. Strides are free, but for the innermost one of q, k, v, o and states, which must be 1.
 * An output that shares memory with another argument is refused, but for what docs/reference/aliasing.md lists. */
typedef struct dw_tensor {
    size_t size;
    void *data;
    int32_t dtype; /* DW_F32, DW_BF16, DW_F16 */
    int32_t rank;  /* how many entries of shape and strides count */
    int64_t shape[4];
    int64_t strides[4]; /* in elements; any for a dimension of length 0 or 1 */
} dw_tensor;

/* cu_seqlens: sequence n has rows [n] to [n + 1]. */
typedef struct dw_lengths {
    size_t size;
    const void *data;
    int64_t entries; /* sequences + 1 */
    int32_t dtype;   /* DW_I32, DW_I64 */
    int32_t pad0;
} dw_lengths;

/* ---- prefill ----
 *
 * Per value head, with a state S of shape [K, V], token after token:
 *
 *   S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = scale S^T q
 */

typedef struct dw_prefill_spec {
    size_t size;
    int32_t dtype;       /* of q, k, v, o: DW_BF16 or DW_F16 */
    int32_t head_map;    /* DW_HEADS_* */
    int32_t key_heads;   /* HK */
    int32_t value_heads; /* HV, a multiple of HK */
    int32_t key_dim;     /* K, a multiple of 16 up to 256 */
    int32_t value_dim;   /* V, a multiple of 16 up to 256 */
    int32_t qk_l2norm;   /* 1: rows of q and k are l2-normalised inside */
    float scale;         /* 0: K^-0.5 */
    /* Segments into which the longest sequence is cut where the host knows the lengths, to be walked in parallel; 1: no
     * sequence is cut; 0: as many as take least time by estimate, and one unless that saves 15%. The environment
     * variable DELTAWAVE_SEGMENTS overrides it. */
    int32_t segments;
    int32_t compute_units; /* that the launches will have; 0: all of the device */
} dw_prefill_spec;

/* The tensors of one launch. Packed batches have no batch dimension: [T, H, D]; dense ones have: [B, T, H, D]. */
typedef struct dw_prefill_tensors {
    size_t size;
    const dw_tensor *q; /* [T, HK, K] */
    const dw_tensor *k; /* [T, HK, K] */
    const dw_tensor *v; /* [T, HV, V] */
    const dw_tensor *o; /* [T, HV, V], written; rows past the last sequence become 0 */

    /* Gates as they are: f32. */
    const dw_tensor *g;    /* [T, HV], natural logarithms, at most 0; NULL: no decay */
    const dw_tensor *beta; /* [T, HV]; NULL: 1 */

    /* Or as the projections give them, of any dtype: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b). */
    const dw_tensor *a;       /* [T, HV] */
    const dw_tensor *b;       /* [T, HV] */
    const dw_tensor *a_log;   /* [HV] */
    const dw_tensor *dt_bias; /* [HV]; NULL: 0 */
    /* 1: beta = 2 sigmoid(b). Beta of 1.5 to 2 on repeated keys without decay is ill-conditioned: in bf16 o and states
     * then have errors of 20% to 80% of their rms and more, here and in unfused kernels (docs/results/accuracy.md). */
    int32_t allow_neg_eigval;

    int32_t initial_layout;           /* DW_STATE_*, of initial_state */
    const dw_tensor *initial_state;   /* f32 or bf16; NULL: zeros */
    const uint8_t *has_initial_state; /* [N] on the device, 0: the sequence starts from zeros; NULL: all have one */
    /* f32 or bf16, written, may be initial_state itself; NULL: not wanted. A sequence without tokens leaves its initial
     * state, or zeros. */
    const dw_tensor *final_state;
    int32_t final_layout; /* DW_STATE_*, of final_state */
    int32_t pad0;

    const dw_lengths *cu_seqlens; /* on the device: for plans of dw_prefill_device, NULL for others */

    /* Scratch memory, aligned to 256 bytes. Launches on one stream may share it, from several threads, too; those on
     * different streams only one after the other, in an order that the caller makes. */
    void *workspace;
    size_t workspace_bytes;

    /* A pool, updated in place: instead of initial_state and final_state. A slot that is negative or beyond the pool is
     * none: without one to read a sequence starts from zeros, without one to write it leaves no state, and without both
     * it is padding, whose outputs become zeros. None may be written by two, or read by one and written by another. A
     * sequence without tokens writes nothing, whatever has_initial_state says. */
    const dw_tensor *pool;      /* [slots, HV, K, V] or [slots, HV, V, K], f32 or bf16 */
    const int32_t *slots;       /* [N] on the device, to read; NULL: those of the plan, or slot n for sequence n */
    const int32_t *write_slots; /* [N] on the device; NULL: the same */

    /* States in the course of sequences: after each chunk of 64 tokens that has a slot. They are what the sequence went
     * on with: one that is continued from such a state in f32, unpartitioned, has the bits of the whole. */
    const dw_tensor *snapshots;    /* as pool; NULL: the pool, in slots that no sequence has */
    const int32_t *snapshot_slots; /* on the device, entry cu_seqlens[n] / 64 + n + c: of the state after chunk c of
                                      sequence n; negative, or beyond: not wanted; NULL: those of the plan, if any */
    int32_t pool_layout;           /* DW_STATE_* */
    int32_t snapshot_layout;       /* DW_STATE_* */
} dw_prefill_tensors;

/* A state in the course of a sequence. */
typedef struct dw_snapshot {
    int64_t sequence;
    int64_t tokens; /* of the sequence: a multiple of 64, at least that */
    int64_t slot;
} dw_snapshot;

/* A batch shape that was checked: launched any number of times. */
typedef struct dw_prefill dw_prefill;

/* A packed batch whose lengths the host knows; cu_seqlens is on the host, and copied. */
int dw_prefill_packed(const dw_context *context, const dw_prefill_spec *spec, const dw_lengths *cu_seqlens,
                      int64_t tokens, dw_prefill **plan);
/* A dense batch: `batch` sequences of `tokens` rows each. */
int dw_prefill_dense(const dw_context *context, const dw_prefill_spec *spec, int64_t batch, int64_t tokens,
                     dw_prefill **plan);
/* A packed batch whose lengths are on the device alone. Entries that decrease or exceed the tokens are replaced by the
 * nearest allowed ones; the first 4 bytes of the workspace are 0 afterwards, or 1 + the index of the first of them. */
int dw_prefill_device(const dw_context *context, const dw_prefill_spec *spec, int64_t tokens, int64_t sequences,
                      dw_prefill **plan);
/* NULL does nothing. A captured graph needs its plan. */
void dw_prefill_destroy(dw_prefill *plan);
int dw_prefill_workspace_bytes(const dw_prefill *plan, size_t *bytes);
/* How many entries snapshot_slots has. */
int dw_prefill_chunk_entries(const dw_prefill *plan, int64_t *entries);
/* Slots that the host knows, `count` of them, for all later launches of a plan whose lengths the host knows: checked
 * and copied. A negative one is none; launches refuse those beyond their pool. Nothing else may use the plan meanwhile,
 * and no captured graph may need it. write_slots may be NULL. */
int dw_prefill_set_slots(dw_prefill *plan, const int32_t *slots, const int32_t *write_slots, int64_t count);
/* The same for snapshots. */
int dw_prefill_set_snapshots(dw_prefill *plan, const dw_snapshot *snapshots, int64_t count);
int dw_prefill_launch(const dw_prefill *plan, void *stream, const dw_prefill_tensors *tensors);

/* ---- gates, as an operation of its own ---- */

typedef struct dw_gate_tensors {
    size_t size;
    const dw_tensor *a;       /* [T, HV], or [T, blocks, heads of a block] with blocks at any distance; any dtype */
    const dw_tensor *b;       /* likewise */
    const dw_tensor *a_log;   /* [HV], any dtype */
    const dw_tensor *dt_bias; /* [HV], any dtype; NULL: 0 */
    const dw_tensor *g;       /* [T, HV], f32, written: -exp(a_log) softplus(a + dt_bias) */
    const dw_tensor *beta;    /* [T, HV], f32, written: sigmoid(b) */
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pad0;
} dw_gate_tensors;

int dw_gate_launch(const dw_context *context, void *stream, const dw_gate_tensors *tensors);

/* ---- causal depthwise convolution of the projections, split into q, k and v: one kernel ----
 *
 * With norms of q and k, and with g and beta, where they are asked for: prefill is then given them. */

/* How q, k and v lie in a row of the projections. */
enum {
    DW_CONV_FLAT = 0,        /* q | k | v, and what follows them, as in Qwen3.5 */
    DW_CONV_INTERLEAVED = 1, /* for each key head: q | k | v | z of it and its value heads, as in Qwen3-Next */
    DW_CONV_SEPARATE = 2     /* each is a tensor of its own */
};

/* What is done with the sums. */
enum {
    DW_ACTIVATION_SILU = 0, /* x / (1 + exp(-x)) */
    DW_ACTIVATION_NONE = 1
};

/* The order of the last two dimensions of conv states. */
enum {
    DW_CONV_CHANNEL_MAJOR = 0, /* [slots, channels, columns] */
    DW_CONV_TOKEN_MAJOR = 1    /* [slots, columns, channels] */
};

typedef struct dw_conv_spec {
    size_t size;
    int32_t dtype; /* of x, q, k, v and the states: DW_BF16 or DW_F16 */
    int32_t key_heads;
    int32_t value_heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t width;      /* tokens that an output depends on: 2, 3 or 4 */
    int32_t activation; /* DW_ACTIVATION_* */
    /* 1: states are read and not written, for tokens that are yet to be verified: dw_commit_launch makes up for it. */
    int32_t keep_states;
    /* 1: rows of q and k, of K up to 256, are divided by sqrt(sum of squares + 1e-6), then rounded. */
    int32_t qk_l2norm;
    int32_t pad0;
} dw_conv_spec;

/* Tensors of a launch, of packed batches. The channels of weight, bias and states are those of q, then k, then v. No
 * output may overlap x. */
typedef struct dw_conv_tensors {
    size_t size;
    const dw_tensor *x;   /* [T, columns], with DW_CONV_FLAT and DW_CONV_INTERLEAVED */
    const dw_tensor *x_q; /* [T, blocks, channels of a block], with DW_CONV_SEPARATE; x_k, x_v likewise */
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const dw_tensor *weight; /* [channels, width], any dtype, the newest token's last */
    const dw_tensor *bias;   /* [channels], any dtype; NULL: 0 */

    /* A pool, updated in place; NULL: sequences start from zeros and leave nothing. A column is a token, the newest
     * last: at least width - 1 of them. */
    const dw_tensor *state;
    /* [N] on the device; no two sequences may share one. Negative, or beyond the pool: padding, outputs become zeros
     * and no state is touched. NULL: sequence n has slot n. */
    const int32_t *slots;
    const uint8_t *has_initial_state; /* [N] on the device, 0: the slot reads as zeros; NULL: all have one */

    const dw_tensor *q; /* [T, HK, K], written; rows past the last sequence become zeros */
    const dw_tensor *k; /* [T, HK, K], written */
    const dw_tensor *v; /* [T, HV, V], written */

    const dw_lengths *cu_seqlens; /* on the device: for plans of dw_conv_device, NULL for others */
    int32_t x_layout;             /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE */
    int32_t state_layout;         /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */

    /* g and beta of all rows, in the same launch: as dw_gate_tensors has them. All NULL: not wanted. */
    const dw_tensor *a;
    const dw_tensor *b;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;
    const dw_tensor *g;
    const dw_tensor *beta;
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pad0;
} dw_conv_tensors;

/* A batch shape that was checked: launched any number of times. */
typedef struct dw_conv dw_conv;

/* A packed batch whose lengths the host knows; cu_seqlens is on the host, and copied. */
int dw_conv_packed(const dw_context *context, const dw_conv_spec *spec, const dw_lengths *cu_seqlens, int64_t tokens,
                   dw_conv **plan);
/* A packed batch whose lengths are on the device alone. Entries that decrease or exceed the tokens never lead out of
 * bounds; which outputs the sequences beside them have is not specified. */
int dw_conv_device(const dw_context *context, const dw_conv_spec *spec, int64_t tokens, int64_t sequences,
                   dw_conv **plan);
/* NULL does nothing. A captured graph needs its plan. */
void dw_conv_destroy(dw_conv *plan);
int dw_conv_launch(const dw_conv *plan, void *stream, const dw_conv_tensors *tensors);

/* ---- decode: the same few tokens of every sequence, on a pool of states: one kernel ----
 *
 * What prefill computes, token after token. One token is a step of generation; several verify those of a draft. */

/* What several tokens of a sequence are to each other. */
enum {
    DW_DRAFT_CHAIN = 0, /* each follows the one before it */
    DW_DRAFT_TREE = 1   /* refused: no kernel does it yet */
};

typedef struct dw_decode_spec {
    size_t size;
    int32_t dtype;       /* of q, k, v, o: DW_BF16 or DW_F16 */
    int32_t head_map;    /* DW_HEADS_* */
    int32_t key_heads;   /* HK */
    int32_t value_heads; /* HV, a multiple of HK */
    int32_t key_dim;     /* K, a multiple of 16 up to 256 */
    int32_t value_dim;   /* V, a multiple of 16 up to 256 */
    int32_t qk_l2norm;   /* 1: rows of q and k are l2-normalised inside */
    float scale;         /* 0: K^-0.5 */
    int32_t tokens;      /* T, of every sequence: 1 to 16 */
    int32_t draft;       /* DW_DRAFT_* */
} dw_decode_spec;

/* Tensors of a launch. Those over tokens are [B, T, ...], or [B T, ...] with a sequence's tokens one after the other.
 */
typedef struct dw_decode_tensors {
    size_t size;
    const dw_tensor *q; /* [B, T, HK, K] */
    const dw_tensor *k; /* [B, T, HK, K] */
    const dw_tensor *v; /* [B, T, HV, V] */
    const dw_tensor *o; /* [B, T, HV, V], written */

    /* Gates, of either kind, as dw_prefill_tensors has them. */
    const dw_tensor *g;
    const dw_tensor *beta;
    const dw_tensor *a;
    const dw_tensor *b;
    const dw_tensor *a_log;
    const dw_tensor *dt_bias;

    /* Updated in place. A slot that is negative or beyond the pool is none: without one to read a sequence starts from
     * zeros, without one to write it leaves no state, and without both it is padding, whose outputs become zeros. None
     * may be written by two, or read by one and written by another. */
    const dw_tensor *pool;            /* [slots, HV, K, V] or [slots, HV, V, K], f32 or bf16 */
    const int32_t *slots;             /* [B] on the device, to read; NULL: slot n for sequence n */
    const int32_t *write_slots;       /* [B] on the device; NULL: the same */
    const uint8_t *has_initial_state; /* [B] on the device, 0: the slot reads as zeros; NULL: all have one */

    /* The state after every token, for dw_commit_launch; the pool is then not written. f32 or bf16, [B T, HV, ...] in
     * the order of the pool; NULL: not wanted. */
    const dw_tensor *states;
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t pool_layout;      /* DW_STATE_*, of states, too */
} dw_decode_tensors;

/* What the accepted tokens of each sequence, the first of those that were verified, leave behind: the state after the
 * last of them, and their columns in the conv state. A sequence without accepted tokens keeps both. */
typedef struct dw_commit_tensors {
    size_t size;
    const int32_t *accepted; /* [B] on the device: 0 to T; what lies outside counts as the nearest */
    const int32_t *slots;    /* [B] on the device, of both pools; negative or beyond: none; NULL: slot n */
    const dw_tensor *states; /* [B T, HV, K, V] or [B T, HV, V, K] */
    const dw_tensor *pool;   /* written */

    /* The convolution's, of all tokens that were verified, as dw_conv_tensors has them; conv_state NULL: left out. */
    const dw_tensor *conv_state;
    const dw_tensor *x;
    const dw_tensor *x_q;
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const uint8_t *has_initial_state; /* [B] on the device, of the conv states */
    int32_t pool_layout;              /* DW_STATE_*, of states and pool */
    int32_t x_layout;                 /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE */
    int32_t conv_layout;              /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */
    int32_t pad0;
} dw_commit_tensors;

/* A batch of `batch` sequences that was checked: launched any number of times. */
typedef struct dw_decode dw_decode;

int dw_decode_create(const dw_context *context, const dw_decode_spec *spec, int64_t batch, dw_decode **plan);
/* NULL does nothing. A captured graph needs its plan. */
void dw_decode_destroy(dw_decode *plan);
int dw_decode_launch(const dw_decode *plan, void *stream, const dw_decode_tensors *tensors);
/* One kernel, for what a launch of this plan has verified. */
int dw_commit_launch(const dw_decode *plan, void *stream, const dw_commit_tensors *tensors);

/* ---- gated RMS norm of the outputs: one kernel ----
 *
 *   y = x / sqrt(mean(x^2) + eps) * weight * gate(z), row by row of V
 */

/* What is made of z. */
enum {
    DW_GATE_SILU = 0,   /* z / (1 + exp(-z)) */
    DW_GATE_SIGMOID = 1 /* 1 / (1 + exp(-z)) */
};

/* Tensors of a launch, of packed batches. x, z and y are bf16 or fp16, alike. */
typedef struct dw_norm_tensors {
    size_t size;
    const dw_tensor *x;      /* [T, HV, V], V a multiple of 16 up to 256; NULL: y, in place */
    const dw_tensor *z;      /* [T, blocks, heads * V]: blocks of adjacent heads, HV in all, such as [T, HV, V] */
    const dw_tensor *weight; /* [V], any dtype; NULL: 1 */
    const dw_tensor *y;      /* [T, HV, V], written; other memory than z, and than x where that is given */
    float eps;               /* positive, at least 1.18e-38 */
    int32_t gate;            /* DW_GATE_* */
} dw_norm_tensors;

int dw_norm_launch(const dw_context *context, void *stream, const dw_norm_tensors *tensors);

/* ---- layer: all between the input projections and the output projection, in place on pools of states ----
 *
 *   q, k, v = silu(conv(x)); o = recurrence(q, k, v, a, b); y = rmsnorm(o) * norm_weight * gate(z)
 *
 * of a batch that begins with the sequences that have one token each, the decodes, before prefills of any lengths. */

typedef struct dw_layer_spec {
    size_t size;
    int32_t dtype;            /* of x, z, y and conv states: DW_BF16 or DW_F16 */
    int32_t head_map;         /* DW_HEADS_* */
    int32_t key_heads;        /* HK */
    int32_t value_heads;      /* HV, a multiple of HK */
    int32_t key_dim;          /* K, a multiple of 16 up to 256 */
    int32_t value_dim;        /* V, a multiple of 16 up to 256 */
    int32_t width;            /* of the convolution: 2, 3 or 4 */
    int32_t qk_l2norm;        /* 1: rows of q and k are l2-normalised */
    float scale;              /* 0: K^-0.5 */
    float eps;                /* of the norm: positive, at least 1.18e-38 */
    int32_t gate;             /* of the norm: DW_GATE_* */
    int32_t allow_neg_eigval; /* 1: beta = 2 sigmoid(b) */
    int32_t segments;         /* as in dw_prefill_spec */
    int32_t pad0;
} dw_layer_spec;

/* Tensors of a launch over T packed rows. Channels are those of q, then k, then v. */
typedef struct dw_layer_tensors {
    size_t size;
    /* The projections, as dw_conv_tensors has them. */
    const dw_tensor *x; /* [T, columns] */
    const dw_tensor *x_q;
    const dw_tensor *x_k;
    const dw_tensor *x_v;
    const dw_tensor *z; /* [T, blocks, heads * V]; NULL: of x, behind q, k and v, of all or of each key head */
    const dw_tensor *a; /* [T, HV], or [T, blocks, heads of a block] with blocks at any distance; any dtype */
    const dw_tensor *b; /* likewise */

    /* Weights, of any dtype. */
    const dw_tensor *conv_weight; /* [channels, width], the newest token's last */
    const dw_tensor *conv_bias;   /* [channels]; NULL: 0 */
    const dw_tensor *a_log;       /* [HV] */
    const dw_tensor *dt_bias;     /* [HV]; NULL: 0 */
    const dw_tensor *norm_weight; /* [V]; NULL: 1 */

    /* Pools, updated in place, both of as many slots. A sequence without tokens writes to neither, whatever
     * has_initial_state says. */
    const dw_tensor *conv_state; /* [slots, channels, columns] or [slots, columns, channels], of the dtype of x */
    const dw_tensor *pool;       /* [slots, HV, K, V] or [slots, HV, V, K], f32 or bf16 */
    /* [N] on the device, of both pools; no two sequences may share one. Negative, or beyond the pools: padding, whose
     * rows of y become zeros, and no state is touched. NULL: slot n for sequence n. */
    const int32_t *slots;
    const uint8_t *has_initial_state; /* [N] on the device, 0: both states read as zeros; NULL: all have them */

    const dw_tensor *y; /* [T, HV, V], written; rows past the last sequence become 0; other memory than x and z */

    const dw_lengths *cu_seqlens; /* on the device: for plans of dw_layer_device, NULL for others */

    /* Scratch memory, aligned to 256 bytes. Launches on one stream may share it, from several threads, too; those on
     * different streams only one after the other, in an order that the caller makes. */
    void *workspace;
    size_t workspace_bytes;

    int32_t x_layout;    /* DW_CONV_FLAT, DW_CONV_INTERLEAVED, DW_CONV_SEPARATE */
    int32_t conv_layout; /* DW_CONV_CHANNEL_MAJOR, DW_CONV_TOKEN_MAJOR */
    int32_t pool_layout; /* DW_STATE_* */
    int32_t pad0;
} dw_layer_tensors;

/* A batch shape that was checked: launched any number of times. */
typedef struct dw_layer dw_layer;

/* A packed batch whose lengths the host knows; cu_seqlens is on the host, and copied. The first `decodes` sequences
 * have one token each. */
int dw_layer_packed(const dw_context *context, const dw_layer_spec *spec, const dw_lengths *cu_seqlens, int64_t tokens,
                    int64_t decodes, dw_layer **plan);
/* A packed batch whose lengths are on the device alone, so that a captured graph serves batches of varying lengths:
 * decodes that are not there have a negative slot, prefills that are not there have no tokens. Entries of cu_seqlens
 * that do not count up to the decodes, that decrease or exceed the tokens are replaced by the nearest allowed ones; the
 * first 4 bytes of the workspace are 0 afterwards, or 1 + the index of the first of them. */
int dw_layer_device(const dw_context *context, const dw_layer_spec *spec, int64_t tokens, int64_t sequences,
                    int64_t decodes, dw_layer **plan);
/* NULL does nothing. A captured graph needs its plan. */
void dw_layer_destroy(dw_layer *plan);
int dw_layer_workspace_bytes(const dw_layer *plan, size_t *bytes);
/* At most six kernels where no sequence is cut into segments. Where the host knows that all are decodes, of all rows,
 * two if V is 128 and K at most that, else three. */
int dw_layer_launch(const dw_layer *plan, void *stream, const dw_layer_tensors *tensors);

#ifdef __cplusplus
}
#endif

#endif
