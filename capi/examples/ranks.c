/* One sequence on several ranks, a process each: every rank's outputs are compared, bit for bit, with those of a single
 * rank.
 *
 *   cc -std=c99 -Iinclude capi/examples/ranks.c -Ltarget/release -ldeltawave_c -o ranks
 *   LD_LIBRARY_PATH=target/release ./ranks [RANKS [DEVICES]]
 *
 * Rank r runs on device r % DEVICES; RANKS is 2 and DEVICES as many, if they are not given. RCCL or NCCL is opened at
 * run time. An engine on many hosts would send the id by its own means, and share one communicator among all layers.
 */
#define _POSIX_C_SOURCE 200809L
#include "deltawave.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOKENS = 700, BLOCK = 64, HK = 1, HV = 2, K = 32, V = 48, MOST_RANKS = 64 };

static void check(int status, const char *what) {
    if (status != DW_OK) {
        fprintf(stderr, "%s: status %d: %s\n", what, status, dw_last_error());
        exit(1);
    }
}

/* bf16 is the upper half of a float. */
static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x8000) >> 16);
}

/* Numbers between -1 and 1, the same on all ranks. */
static float number(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static uint16_t q[TOKENS][HK][K], k[TOKENS][HK][K], v[TOKENS][HV][V];
static float g[TOKENS][HV], beta[TOKENS][HV];
static dw_context *context;

static void *memory(size_t bytes) {
    void *address;
    check(dw_malloc(context, bytes ? bytes : 1, &address), "dw_malloc");
    return address;
}

/* A dense tensor [n, b, c] on the device, or [n, b] if c is 0, with the bytes of `from`, if there are any. */
static dw_tensor dense(const void *from, int32_t dtype, int64_t n, int64_t b, int64_t c) {
    const int64_t row = b * (c ? c : 1);
    const size_t bytes = (size_t)(n * row) * (dtype == DW_F32 ? 4 : 2);
    dw_tensor t = {sizeof t, memory(bytes), dtype, c ? 3 : 2, {n, b, c}, {row, c ? c : 1, c ? 1 : 0}};
    if (from && bytes)
        check(dw_copy(context, t.data, from, bytes, DW_TO_DEVICE), "dw_copy");
    return t;
}

/* Runs `rank` of `ranks`; returns its rows of o, and the first of them in *begin. One rank needs no communicator. */
static uint16_t *run(const dw_communicator *communicator, int rank, int ranks, int64_t *begin, int64_t *rows) {
    const int64_t lengths[1] = {TOKENS};
    dw_prefill_spec spec = {0};
    dw_rank_layout layout = {0};
    dw_parallel_prefill_sizes sizes = {0};
    dw_prefill_tensors t = {0};
    dw_tensor tq, tk, tv, to, tg, tbeta;
    dw_parallel_prefill *plan;
    dw_fragment all[1];
    void *summary, *gathered;
    uint16_t *o;
    size_t bytes;

    spec.size = sizeof spec;
    spec.dtype = DW_BF16;
    spec.key_heads = HK;
    spec.value_heads = HV;
    spec.key_dim = K;
    spec.value_dim = V;
    layout.size = sizeof layout;
    layout.lengths = lengths;
    layout.sequences = 1;
    layout.block = BLOCK; /* results depend on it, and not on the ranks */
    layout.ranks = ranks;
    layout.kind = DW_RANKS_CONTIGUOUS;

    /* A plan for all tokens says which of them this rank has: a contiguous layout of one sequence, one run or none. */
    sizes.size = sizeof sizes;
    check(dw_parallel_prefill_create(context, &spec, &layout, rank, TOKENS, &plan), "dw_parallel_prefill_create");
    check(dw_parallel_prefill_get_sizes(plan, &sizes), "dw_parallel_prefill_get_sizes");
    check(dw_parallel_prefill_tables(plan, all, sizes.fragments, NULL, 0), "dw_parallel_prefill_tables");
    dw_parallel_prefill_destroy(plan);
    *begin = sizes.fragments ? all[0].begin : 0;
    *rows = sizes.fragments ? all[0].tokens : 0;
    check(dw_parallel_prefill_create(context, &spec, &layout, rank, *rows, &plan), "dw_parallel_prefill_create");
    check(dw_parallel_prefill_get_sizes(plan, &sizes), "dw_parallel_prefill_get_sizes");

    tq = dense(q[*begin], DW_BF16, *rows, HK, K);
    tk = dense(k[*begin], DW_BF16, *rows, HK, K);
    tv = dense(v[*begin], DW_BF16, *rows, HV, V);
    to = dense(NULL, DW_BF16, *rows, HV, V);
    tg = dense(g[*begin], DW_F32, *rows, HV, 0);
    tbeta = dense(beta[*begin], DW_F32, *rows, HV, 0);
    t.size = sizeof t;
    t.q = &tq;
    t.k = &tk;
    t.v = &tv;
    t.o = &to;
    t.g = &tg;
    t.beta = &tbeta;
    t.workspace_bytes = sizes.workspace_bytes;
    t.workspace = memory(sizes.workspace_bytes);
    summary = memory(sizes.summary_bytes);
    gathered = memory(sizes.gathered_bytes);
    if (communicator) {
        /* Once per plan; then a call per layer. */
        check(dw_communicator_agree(communicator, plan), "dw_communicator_agree");
        check(dw_communicator_prefill(communicator, plan, NULL, &t, summary, sizes.summary_bytes, gathered,
                                      sizes.gathered_bytes),
              "dw_communicator_prefill");
        check(dw_communicator_synchronize(communicator, NULL), "dw_communicator_synchronize");
    } else {
        /* The stages by themselves. One rank's summaries are those of all ranks. */
        check(dw_parallel_prefill_summarise_launch(plan, NULL, &t, summary, sizes.summary_bytes), "the first stage");
        check(dw_parallel_prefill_finish_launch(plan, NULL, &t, summary, sizes.summary_bytes, NULL), "the second");
        check(dw_synchronize(context, NULL), "dw_synchronize");
    }
    bytes = (size_t)*rows * HV * V * sizeof *o;
    o = malloc(bytes ? bytes : 1);
    if (o == NULL)
        exit(1);
    if (bytes)
        check(dw_copy(context, o, to.data, bytes, DW_TO_HOST), "dw_copy");
    dw_free(context, t.workspace);
    dw_free(context, summary);
    dw_free(context, gathered);
    dw_free(context, tq.data);
    dw_free(context, tk.data);
    dw_free(context, tv.data);
    dw_free(context, to.data);
    dw_free(context, tg.data);
    dw_free(context, tbeta.data);
    dw_parallel_prefill_destroy(plan);
    return o;
}

static int rank_main(int rank, int ranks, int devices, const char *id) {
    dw_communicator *communicator;
    const char *limit = getenv("RANKS_TIMEOUT_MS");
    int64_t begin, rows, zero, tokens;
    uint16_t *shared, *alone;
    int t, i, same;
    for (t = 0; t < TOKENS; t++) {
        for (i = 0; i < K; i++) {
            q[t][0][i] = to_bf16(0.3f * number());
            k[t][0][i] = to_bf16(0.3f * number());
        }
        for (i = 0; i < HV * V; i++)
            v[t][i / V][i % V] = to_bf16(number());
        for (i = 0; i < HV; i++) {
            g[t][i] = -0.1f * (1.0f + number());
            beta[t][i] = 0.5f + 0.5f * number();
        }
    }
    if (context == NULL)
        check(dw_context_create(DW_BACKEND_AUTO, rank % devices, &context), "dw_context_create");
    check(dw_communicator_create(context, NULL, id, rank, ranks, limit ? atol(limit) : 60000, &communicator),
          "dw_communicator_create");
    shared = run(communicator, rank, ranks, &begin, &rows);
    alone = run(NULL, 0, 1, &zero, &tokens);
    same = memcmp(shared, alone + begin * HV * V, (size_t)rows * HV * V * sizeof *alone) == 0;
    printf("rank %d of %d: tokens %ld to %ld, %s\n", rank, ranks, (long)begin, (long)(begin + rows),
           same ? "the bits of one rank" : "OTHER BITS than one rank");
    free(shared);
    free(alone);
    dw_communicator_destroy(communicator);
    dw_context_destroy(context);
    return same ? 0 : 1;
}

int main(int count, char **arguments) {
    const int ranks = count > 1 ? atoi(arguments[1]) : 2, devices = count > 2 ? atoi(arguments[2]) : ranks;
    char id[DW_UNIQUE_ID_BYTES];
    int pipes[MOST_RANKS][2], rank, failed;
    if (ranks < 1 || ranks > MOST_RANKS || devices < 1) {
        fprintf(stderr, "ranks [RANKS [DEVICES]]: 1 to %d ranks, at least 1 device\n", MOST_RANKS);
        return 2;
    }
    /* Processes first: a process that has a device must not fork. */
    for (rank = 1; rank < ranks; rank++) {
        pid_t process;
        if (pipe(pipes[rank]) || (process = fork()) < 0) {
            perror("a process");
            return 1;
        }
        if (process == 0) {
            close(pipes[rank][1]);
            if (read(pipes[rank][0], id, sizeof id) != (ssize_t)sizeof id)
                return 1;
            return rank_main(rank, ranks, devices, id);
        }
        close(pipes[rank][0]);
    }
    check(dw_context_create(DW_BACKEND_AUTO, 0, &context), "dw_context_create");
    check(dw_communicator_unique_id(context, NULL, id), "dw_communicator_unique_id");
    for (rank = 1; rank < ranks; rank++) {
        if (write(pipes[rank][1], id, sizeof id) != (ssize_t)sizeof id)
            perror("the id");
        close(pipes[rank][1]);
    }
    failed = rank_main(0, ranks, devices, id);
    for (rank = 1; rank < ranks; rank++) {
        int status;
        failed |= wait(&status) < 0 || status != 0;
    }
    return failed;
}
