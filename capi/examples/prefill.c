/* A prefill of two sequences from C, checked against the recurrence in double precision.
 *
 *   cargo build --release -p deltawave-c
 *   cc -std=c99 -Iinclude capi/examples/prefill.c -Ltarget/release -ldeltawave_c -lm -o prefill
 *   LD_LIBRARY_PATH=target/release ./prefill
 *
 * It runs on the simulator where there is no card. With a card, memory and streams would be the program's own: any
 * device pointer and any stream of the same device will do.
 */
#include "deltawave.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 150, SEQUENCES = 2, HK = 1, HV = 2, K = 32, V = 48 };
static const int32_t cu_seqlens[SEQUENCES + 1] = {0, 65, TOKENS};

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
    bits += 0x7fff + (bits >> 16 & 1);
    return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* Numbers between -1 and 1. */
static float number(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static const dw_context *context;

static void *device_copy(const void *from, size_t bytes) {
    void *address;
    check(dw_malloc(context, bytes, &address), "dw_malloc");
    check(dw_copy(context, address, from, bytes, DW_TO_DEVICE), "dw_copy");
    return address;
}

/* A dense tensor [a, b, c, d] of the given rank, which takes the last dimensions of them. */
static dw_tensor dense(void *data, int32_t dtype, int32_t rank, int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t all[4] = {a, b, c, d};
    dw_tensor t = {sizeof t, data, dtype, rank, {0}, {0}};
    int64_t stride = 1;
    int i;
    for (i = rank - 1; i >= 0; i--) {
        t.shape[i] = all[4 - rank + i];
        t.strides[i] = stride;
        stride *= t.shape[i];
    }
    return t;
}

static uint16_t q[TOKENS][HK][K], k[TOKENS][HK][K], v[TOKENS][HV][V], o[TOKENS][HV][V];
static float g[TOKENS][HV], beta[TOKENS][HV], states[SEQUENCES][HV][K][V];

/* Squares of errors and of references, summed over the outputs and the final state of one head of one sequence. */
static void compare(int n, int h, double *errors, double *references) {
    static double s[K][V];
    int t, i, j;
    memset(s, 0, sizeof s);
    for (t = cu_seqlens[n]; t < cu_seqlens[n + 1]; t++) {
        const uint16_t *key = k[t][h / (HV / HK)], *query = q[t][h / (HV / HK)];
        for (j = 0; j < V; j++) {
            double read = 0, out = 0, delta, error;
            for (i = 0; i < K; i++) {
                s[i][j] *= exp(g[t][h]);
                read += from_bf16(key[i]) * s[i][j];
            }
            delta = beta[t][h] * (from_bf16(v[t][h][j]) - read);
            for (i = 0; i < K; i++) {
                s[i][j] += from_bf16(key[i]) * delta;
                out += from_bf16(query[i]) * s[i][j] / sqrt(K);
            }
            error = from_bf16(o[t][h][j]) - out;
            errors[0] += error * error;
            references[0] += out * out;
        }
    }
    for (i = 0; i < K; i++) {
        for (j = 0; j < V; j++) {
            const double error = states[n][h][i][j] - s[i][j];
            errors[1] += error * error;
            references[1] += s[i][j] * s[i][j];
        }
    }
}

int main(void) {
    dw_context *made;
    dw_prefill *plan;
    dw_device_info info = {0};
    dw_prefill_spec spec = {0};
    dw_prefill_tensors tensors = {0};
    dw_lengths lengths = {0};
    dw_tensor tq, tk, tv, to, tg, tbeta, tstate;
    double errors[2] = {0, 0}, references[2] = {0, 0};
    int n, t, h, i;

    check(dw_abi_version() == DW_ABI_VERSION ? DW_OK : DW_ERROR_ARGUMENT, "another version of the library");
    check(dw_context_create(DW_BACKEND_AUTO, 0, &made), "dw_context_create");
    context = made;
    info.size = sizeof info;
    check(dw_context_info(context, &info), "dw_context_info");

    /* A plan: what does not change from launch to launch, checked once. */
    spec.size = sizeof spec;
    spec.dtype = DW_BF16;
    spec.key_heads = HK;
    spec.value_heads = HV;
    spec.key_dim = K;
    spec.value_dim = V;
    lengths.size = sizeof lengths;
    lengths.data = cu_seqlens;
    lengths.entries = SEQUENCES + 1;
    lengths.dtype = DW_I32;
    check(dw_prefill_packed(context, &spec, &lengths, TOKENS, &plan), "dw_prefill_packed");

    /* Inputs: keys of about unit length, gates below 0. */
    for (t = 0; t < TOKENS; t++) {
        for (h = 0; h < HK; h++) {
            for (i = 0; i < K; i++) {
                q[t][h][i] = to_bf16(0.3f * number());
                k[t][h][i] = to_bf16(0.3f * number());
            }
        }
        for (h = 0; h < HV; h++) {
            for (i = 0; i < V; i++)
                v[t][h][i] = to_bf16(number());
            g[t][h] = -0.1f * (1.0f + number());
            beta[t][h] = 0.5f + 0.5f * number();
        }
    }
    tq = dense(device_copy(q, sizeof q), DW_BF16, 3, 1, TOKENS, HK, K);
    tk = dense(device_copy(k, sizeof k), DW_BF16, 3, 1, TOKENS, HK, K);
    tv = dense(device_copy(v, sizeof v), DW_BF16, 3, 1, TOKENS, HV, V);
    to = dense(device_copy(o, sizeof o), DW_BF16, 3, 1, TOKENS, HV, V);
    tg = dense(device_copy(g, sizeof g), DW_F32, 2, 1, 1, TOKENS, HV);
    tbeta = dense(device_copy(beta, sizeof beta), DW_F32, 2, 1, 1, TOKENS, HV);
    tstate = dense(device_copy(states, sizeof states), DW_F32, 4, SEQUENCES, HV, K, V);

    tensors.size = sizeof tensors;
    tensors.q = &tq;
    tensors.k = &tk;
    tensors.v = &tv;
    tensors.o = &to;
    tensors.g = &tg;
    tensors.beta = &tbeta;
    tensors.final_state = &tstate;
    tensors.final_layout = DW_STATE_KEY_MAJOR;
    check(dw_prefill_workspace_bytes(plan, &tensors.workspace_bytes), "dw_prefill_workspace_bytes");
    check(dw_malloc(context, tensors.workspace_bytes, &tensors.workspace), "dw_malloc");

    /* Enqueued on the default stream. */
    check(dw_prefill_launch(plan, NULL, &tensors), "dw_prefill_launch");
    check(dw_synchronize(context, NULL), "dw_synchronize");
    check(dw_copy(context, o, to.data, sizeof o, DW_TO_HOST), "dw_copy");
    check(dw_copy(context, states, tstate.data, sizeof states, DW_TO_HOST), "dw_copy");

    for (n = 0; n < SEQUENCES; n++) {
        for (h = 0; h < HV; h++)
            compare(n, h, errors, references);
    }
    for (i = 0; i < 2; i++)
        errors[i] = sqrt(errors[i] / references[i]);
    printf("%s (%s): %d tokens, error of o %.1e, of the states %.1e\n", info.name, info.backend, TOKENS, errors[0],
           errors[1]);

    dw_free(context, tensors.workspace);
    dw_free(context, tq.data);
    dw_free(context, tk.data);
    dw_free(context, tv.data);
    dw_free(context, to.data);
    dw_free(context, tg.data);
    dw_free(context, tbeta.data);
    dw_free(context, tstate.data);
    dw_prefill_destroy(plan);
    dw_context_destroy(made);
    return errors[0] < 1e-2 && errors[1] < 1e-2 ? 0 : 1;
}
