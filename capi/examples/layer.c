/* Steps of a serving engine from C: a layer over batches of decodes and prefills, in place on pools of states.
 *
 *   cargo build --release -p deltawave-c
 *   cc -std=c99 -Iinclude capi/examples/layer.c -Ltarget/release -ldeltawave_c -lm -o layer
 *   LD_LIBRARY_PATH=target/release ./layer
 *
 * Two prompts are prefilled; then one step decodes a token of each and prefills a third prompt. What it leaves must be
 * what a prefill of the first prompt and its next token leaves. It runs on the simulator where there is no card.
 */
#include "deltawave.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HK = 1, HV = 2, K = 32, V = 128, WIDTH = 4, SLOTS = 4, MOST_ROWS = 64, MOST_SEQUENCES = 4 };
enum { CHANNELS = 2 * HK * K + HV * V, COLUMNS = CHANNELS + HV * V, STATE = HV * K * V };

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

/* Number i of what a model has for token t of a prompt, between -1 and 1. */
static float number(int prompt, int t, int i) {
    uint32_t x = (uint32_t)prompt * 0x9e3779b1u + (uint32_t)t * 0x85ebca6bu + (uint32_t)i * 0xc2b2ae35u;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    return (float)(x >> 8) / 8388608.0f - 1.0f;
}

static dw_context *context;

static void *device_memory(size_t bytes) {
    void *address;
    check(dw_malloc(context, bytes, &address), "dw_malloc");
    return address;
}

static void upload(void *to, const void *from, size_t bytes) {
    check(dw_copy(context, to, from, bytes, DW_TO_DEVICE), "dw_copy");
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

/* The engine's memory on the device: what projections are written to, weights, pools. */
static void *x, *a, *b, *y, *conv_weight, *a_log, *dt_bias, *norm_weight, *conv_pool, *pool, *slots, *has_state;

/* A sequence of a step: so many tokens of a prompt from the first on, with the states of a slot. */
typedef struct {
    int prompt, first, tokens, slot;
} sequence;

/* Runs a step whose first `decodes` sequences have a token each, and reads what it puts out. */
static void step(const sequence *batch, int sequences, int decodes, uint16_t out[][HV][V]) {
    static uint16_t rows[MOST_ROWS][COLUMNS];
    static float gates[2][MOST_ROWS][HV];
    int32_t cu_seqlens[MOST_SEQUENCES + 1] = {0}, slot[MOST_SEQUENCES];
    uint8_t has[MOST_SEQUENCES];
    dw_layer_spec spec = {0};
    dw_layer_tensors tensors = {0};
    dw_lengths lengths = {0};
    dw_layer *plan;
    dw_tensor tx, ta, tb, ty, tweight, talog, tbias, tnorm, tconv, tpool;
    int n, t, i, row = 0;

    /* What the input projections would write: q | k | v | z of every row, and a and b. */
    for (n = 0; n < sequences; n++) {
        for (t = batch[n].first; t < batch[n].first + batch[n].tokens; t++, row++) {
            for (i = 0; i < COLUMNS; i++)
                rows[row][i] = to_bf16(number(batch[n].prompt, t, i));
            for (i = 0; i < 2 * HV; i++)
                gates[i / HV][row][i % HV] = number(batch[n].prompt, t, COLUMNS + i);
        }
        cu_seqlens[n + 1] = row;
        slot[n] = batch[n].slot;
        has[n] = batch[n].first > 0;
    }
    upload(x, rows, sizeof rows);
    upload(a, gates[0], sizeof gates[0]);
    upload(b, gates[1], sizeof gates[1]);
    upload(slots, slot, sizeof slot);
    upload(has_state, has, sizeof has);

    /* A plan for the lengths of this step, which all layers of a model share. dw_layer_device makes plans that one
     * graph of varying lengths needs. */
    spec.size = sizeof spec;
    spec.dtype = DW_BF16;
    spec.key_heads = HK;
    spec.value_heads = HV;
    spec.key_dim = K;
    spec.value_dim = V;
    spec.width = WIDTH;
    spec.qk_l2norm = 1;
    spec.eps = 1e-6f;
    spec.gate = DW_GATE_SILU;
    lengths.size = sizeof lengths;
    lengths.data = cu_seqlens;
    lengths.entries = sequences + 1;
    lengths.dtype = DW_I32;
    check(dw_layer_packed(context, &spec, &lengths, row, decodes, &plan), "dw_layer_packed");

    tx = dense(x, DW_BF16, 2, 1, 1, row, COLUMNS);
    ta = dense(a, DW_F32, 2, 1, 1, row, HV);
    tb = dense(b, DW_F32, 2, 1, 1, row, HV);
    ty = dense(y, DW_BF16, 3, 1, row, HV, V);
    tweight = dense(conv_weight, DW_BF16, 2, 1, 1, CHANNELS, WIDTH);
    talog = dense(a_log, DW_F32, 1, 1, 1, 1, HV);
    tbias = dense(dt_bias, DW_F32, 1, 1, 1, 1, HV);
    tnorm = dense(norm_weight, DW_F32, 1, 1, 1, 1, V);
    tconv = dense(conv_pool, DW_BF16, 3, 1, SLOTS, CHANNELS, WIDTH - 1);
    tpool = dense(pool, DW_F32, 4, SLOTS, HV, K, V);
    tensors.size = sizeof tensors;
    tensors.x = &tx; /* z lies in the same rows */
    tensors.x_layout = DW_CONV_FLAT;
    tensors.a = &ta;
    tensors.b = &tb;
    tensors.conv_weight = &tweight;
    tensors.a_log = &talog;
    tensors.dt_bias = &tbias;
    tensors.norm_weight = &tnorm;
    tensors.conv_state = &tconv;
    tensors.conv_layout = DW_CONV_CHANNEL_MAJOR;
    tensors.pool = &tpool;
    tensors.pool_layout = DW_STATE_KEY_MAJOR;
    tensors.slots = slots;
    tensors.has_initial_state = has_state;
    tensors.y = &ty;
    check(dw_layer_workspace_bytes(plan, &tensors.workspace_bytes), "dw_layer_workspace_bytes");
    tensors.workspace = device_memory(tensors.workspace_bytes);

    /* Enqueued on the default stream. */
    check(dw_layer_launch(plan, NULL, &tensors), "dw_layer_launch");
    check(dw_synchronize(context, NULL), "dw_synchronize");
    check(dw_copy(context, out, y, sizeof(uint16_t) * (size_t)row * HV * V, DW_TO_HOST), "dw_copy");
    dw_free(context, tensors.workspace);
    dw_layer_destroy(plan);
}

/* Weights: numbers of a prompt of their own. */
static void load_weights(void) {
    static uint16_t conv[CHANNELS * WIDTH];
    float heads[2][HV], norm[V];
    int i;
    for (i = 0; i < CHANNELS * WIDTH; i++)
        conv[i] = to_bf16(number(-1, 0, i));
    for (i = 0; i < HV; i++) {
        heads[0][i] = number(-1, 1, i);
        heads[1][i] = -3.0f + number(-1, 2, i);
    }
    for (i = 0; i < V; i++)
        norm[i] = 1.0f + 0.1f * number(-1, 3, i);
    upload(conv_weight, conv, sizeof conv);
    upload(a_log, heads[0], sizeof heads[0]);
    upload(dt_bias, heads[1], sizeof heads[1]);
    upload(norm_weight, norm, sizeof norm);
}

int main(void) {
    /* Slots of the pools: prompts 0 and 1 have 2 and 0; a decode without a slot pads the batch to 3. */
    static const sequence prompts[] = {{0, 0, 20, 2}, {1, 0, 33, 0}};
    static const sequence mixed[] = {{0, 20, 1, 2}, {1, 33, 1, 0}, {3, 0, 1, -1}, {2, 0, 17, 3}};
    static const sequence whole[] = {{0, 0, 21, 1}};
    static uint16_t out[MOST_ROWS][HV][V], expected[MOST_ROWS][HV][V];
    static float states[SLOTS][STATE];
    double error[2] = {0, 0}, reference[2] = {0, 0};
    dw_device_info info = {0};
    int h, i, padding = 1;
    void **memory[] = {&x,       &a,           &b,         &y,    &conv_weight, &a_log,
                       &dt_bias, &norm_weight, &conv_pool, &pool, &slots,       &has_state};
    const size_t sizes[] = {2 * MOST_ROWS * COLUMNS,
                            4 * MOST_ROWS * HV,
                            4 * MOST_ROWS * HV,
                            2 * MOST_ROWS * HV * V,
                            2 * CHANNELS * WIDTH,
                            4 * HV,
                            4 * HV,
                            4 * V,
                            2 * SLOTS * CHANNELS * (WIDTH - 1),
                            sizeof states,
                            4 * MOST_SEQUENCES,
                            MOST_SEQUENCES};

    check(dw_context_create(DW_BACKEND_AUTO, 0, &context), "dw_context_create");
    info.size = sizeof info;
    check(dw_context_info(context, &info), "dw_context_info");
    for (i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++)
        *memory[i] = device_memory(sizes[i]);
    load_weights();

    step(prompts, 2, 0, out);
    step(mixed, 4, 3, out);
    step(whole, 1, 0, expected);
    check(dw_copy(context, states, pool, sizeof states, DW_TO_HOST), "dw_copy");

    for (h = 0; h < HV; h++) {
        for (i = 0; i < V; i++) {
            const double wanted = from_bf16(expected[20][h][i]);
            error[0] += pow(from_bf16(out[0][h][i]) - wanted, 2);
            reference[0] += wanted * wanted;
            padding = padding && out[2][h][i] == 0;
        }
    }
    for (i = 0; i < STATE; i++) {
        error[1] += pow((double)states[2][i] - states[1][i], 2);
        reference[1] += pow(states[1][i], 2);
    }
    for (i = 0; i < 2; i++)
        error[i] = sqrt(error[i] / reference[i]);
    printf("%s (%s): a decoded token beside a prefilled one: outputs differ by %.1e, states by %.1e\n", info.name,
           info.backend, error[0], error[1]);

    for (i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++)
        dw_free(context, *memory[i]);
    dw_context_destroy(context);
    return error[0] < 1e-2 && error[1] < 1e-2 && reference[0] > 0 && reference[1] > 0 && padding ? 0 : 1;
}
