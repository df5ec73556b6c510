// Third kernel of the backward of prefill: gradients of q, k and gates (prefill/backward/gradients.h). One workgroup
// per (chunk of 64 tokens, key head), which loops over the value heads of the key head. Rows past the last sequence
// become zeros.
//
// q, k, d_q, d_k [T, HK, K], d_o, d_v [T, HV, V] bf16 or f16; d_g, d_beta [T, HV].
#include "../dispatch.h"
#include "../prefill/backward/schedule.h"

namespace {

using namespace prefill;
using namespace prefill::backward;

// Writes zeros to the 64 rows from `first` on of the gradients of a key head and its value heads. `Threads` threads
// take part, of which this is `thread`.
template <int Threads>
DEVICE void clear_rows(const dwk_prefill_backward_args &all, int64_t first, int key_head, int thread) {
    const dwk_prefill_backward_args &x = arch::reread(all); // saves scalar registers
    const dwk_prefill_prepare_args &p = x.prepare;
    const int group = arch::uniform_value(p.value_heads / p.key_heads);
    const auto clear = [&](void *to, const dwk_token_strides &strides, int64_t token, int head, int dim)
                           __attribute__((always_inline)) {
                               if (to) {
                                   short *const row = (short *)to + token_offset(strides, 0, 0, 0) +
                                                      token * strides.token + head * strides.head;
                                   for (int column = thread; column < dim; column += Threads) {
                                       row[column] = 0;
                                   }
                               }
                           };
    const auto clear_scalar = [&](void *to, const dwk_token_strides &strides, int type, int64_t token, int head)
                                  __attribute__((always_inline)) {
                                      if (to && thread == 0) {
                                          store_scalar(to, token * strides.token + head * strides.head, type, 0.0f);
                                      }
                                  };
#pragma unroll 1
    for (int64_t token = first; token < min_of<int64_t>(first + chunk, p.tokens); ++token) {
        clear(x.d_q, x.d_q_strides, token, key_head, p.key_dim);
        clear(x.d_k, x.d_k_strides, token, key_head, p.key_dim);
#pragma unroll 1
        for (int v = 0; v < group; ++v) {
            const int head = dispatch::value_head(p, key_head, group, v);
            clear(x.d_v, x.d_v_strides, token, head, p.value_dim);
            clear_scalar(x.d_g, x.d_g_strides, x.d_g_type, token, head);
            clear_scalar(x.d_beta, x.d_beta_strides, x.d_beta_type, token, head);
        }
    }
}

// Workgroups without a chunk add nothing to the sums, and clear rows past the last sequence.
template <int Threads> DEVICE void skip_chunk(const dwk_prefill_backward_args &all, int workgroup, int thread) {
    const dwk_prefill_backward_args &x = arch::reread(all);
    const dwk_prefill_prepare_args &p = x.prepare;
    const int record = arch::uniform_value(workgroup / p.key_heads), key_head = workgroup - record * p.key_heads;
    const int sequence = sequence_of_record(p.cu_seqlens, p.sequences, record);
    if (sequence == p.sequences) {
        const int end = token_at(p.cu_seqlens, sequence, p.tokens);
        clear_rows<Threads>(x, end + (int64_t)max_of(record - first_record(end, sequence), 0) * chunk, key_head,
                            thread);
    }
    const int group = arch::uniform_value(p.value_heads / p.key_heads);
    for (int v = thread; v < group && record < x.records; v += Threads) {
        float *const to = x.partials + 2 * place_of(p, record, dispatch::value_head(p, key_head, group, v));
        to[0] = to[1] = 0.0f;
    }
}

template <class T, int Keys> DEVICE void gradients_of_chunk(const dwk_prefill_backward_args &x) {
    SHARED static GradientMemory memory;
    const dwk_prefill_prepare_args &p = x.prepare;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    const int record = arch::uniform_value(arch::workgroup() / p.key_heads);
    const int key_head = arch::workgroup() - record * p.key_heads;
    const int sequence = sequence_of_record(p.cu_seqlens, p.sequences, record);
    Rows range{0, 0};
    if (sequence < p.sequences) {
        range = rows_of(p.cu_seqlens, sequence, p.tokens);
    }
    const int number = record - first_record(range.begin, sequence);
    if (number < 0 || number >= (range.end - range.begin + chunk - 1) / chunk) {
        skip_chunk<gradient_threads>(x, arch::opaque_uniform(arch::workgroup()), arch::thread());
        return;
    }
    const int begin = range.begin + number * chunk;
    Gradients<T, Keys>(arch::reread(x), memory, record, key_head, sequence, begin, min_of(range.end - begin, chunk))
        .run();
}

template <class T, int Keys> DEVICE void gradients(const dwk_prefill_backward_args &x) {
    if constexpr (own_gradients(Keys)) {
        run_own_gradients<T>(x, [&](int number, int thread) __attribute__((always_inline)) {
            skip_chunk<own_skip_threads>(x, number, thread);
        });
    } else {
        gradients_of_chunk<T, Keys>(x);
    }
}

} // namespace

#define GRADIENTS(name, type, keys)                                                                                    \
    KERNEL((prefill::backward::gradient_kernel_threads<keys>()),                                                       \
           (prefill::backward::gradient_kernel_residency<keys>()))                                                     \
    void dw_prefill_backward_gradients_##name##_k##keys(dwk_prefill_backward_args x) { gradients<type, keys>(x); }

BACKWARD_GRADIENTS_SHARED_BYTES(64)
BACKWARD_GRADIENTS_SHARED_BYTES(128)
BACKWARD_GRADIENTS_SHARED_BYTES(256)

GRADIENTS(bf16, Bf16, 64)
GRADIENTS(bf16, Bf16, 128)
GRADIENTS(bf16, Bf16, 256)
GRADIENTS(f16, F16, 64)
GRADIENTS(f16, F16, 128)
GRADIENTS(f16, F16, 256)
