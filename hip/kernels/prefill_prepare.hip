// Prefill, first part. One workgroup of 64 threads per (chunk of 64 tokens, key head, part of its value heads): one
// wave, or two that make different blocks of the matrices. K K^T and Q K^T are computed once for all value heads of the
// part. For each value head, with G the inclusive chunk-local sum of g and D_ij = exp(G_i - G_j):
//   A = strictly lower part of -beta_i D_ij (k_i . k_j)       f32
//   T = (I - A)^-1                                            f32, then its strictly lower part in 16 bits
//   P = strictly lower part of D_ij (q_i . k_j)               16 bits
// and the row factors that prefill_scan multiplies by (prefill.h). With DWK_QK_L2NORM the norms of q and k are factors
// of rows and columns of these, so that neither q nor k is ever rounded again.
//
// q, k [T, HK, K] 16-bit; g, beta [T, HV] f32 (or a, b); records [slots, HV].
#include "../tile/prefill_matrices.h"

namespace {

using namespace tile;

// exp(-120) is 0 in f32, so a token whose gate is below erases the state exactly as this value does, while the sums of
// a chunk stay small enough to be accurate. -infinity is legal for the same reason.
constexpr float lowest_gate = -120.0f;

constexpr int waves = prefill::chunk / arch::lanes;

// g and beta of a token.
struct Gates {
    float g;
    float beta;
};

// Those of a chunk, for some value heads.
template <int Heads> struct Stash {
    Gates at[Heads][prefill::chunk];
};
template <> struct Stash<0> {};

template <class T> struct Shared {
    union {
        arch::ChunkRows::Memory rows;
        typename prefill::Maker<T>::Memory made; // of them
    };
    float scratch[4];
    prefill::ChunkFactors factors;
    Stash<prefill::gates_at_once> gates;
};

// The largest power of two that is not above a positive number, given as bits, and at most 1; 1 for zero and NaN.
DEVICE float power_of_two_below(int number) {
    const int exponent = number & 0x7f800000;
    return exponent == 0 || exponent > 0x3f800000 ? 1.0f : bits<float>(exponent);
}

// g and beta of this lane's token, for any value head. Rows past the end: no decay, nothing written.
class GateReader {
  public:
    DEVICE_MEMBER GateReader(const dwk_prefill_prepare_args &x, int sequence, int64_t token, bool inside)
        : x(x), inside(inside), g_index(sequence * x.g_strides.sequence + token * x.g_strides.token),
          beta_index(sequence * x.beta_strides.sequence + token * x.beta_strides.token) {}

    // As they are in memory.
    DEVICE_MEMBER Gates load(int64_t head) const {
        Gates out{0.0f, 1.0f};
        if (x.beta) {
            out.beta = load_scalar(x.beta, beta_index + head * x.beta_strides.head, arch::opaque_uniform(x.beta_type));
        }
        if (x.g) {
            out.g = load_scalar(x.g, g_index + head * x.g_strides.head, arch::opaque_uniform(x.g_type));
        }
        return out;
    }
    DEVICE_MEMBER Gates load_ahead(int64_t head) const { return inside ? load(head) : Gates{}; }

    // Of heads that are `step` apart, of which the first `count` are wanted.
    template <int N> DEVICE_MEMBER void load_ahead(Gates (&out)[N], int64_t head, int64_t step, int count) const {
        float g[N] = {}, beta[N];
        for (int i = 0; i < N; ++i) {
            beta[i] = 1.0f;
        }
        if (inside && x.g) {
            load_scalars(g, x.g, g_index + head * x.g_strides.head, step * x.g_strides.head, count, x.g_type);
        }
        if (inside && x.beta) {
            load_scalars(beta, x.beta, beta_index + head * x.beta_strides.head, step * x.beta_strides.head, count,
                         x.beta_type);
        }
        for (int i = 0; i < N; ++i) {
            out[i] = Gates{g[i], beta[i]};
        }
    }

    // What they are; `loaded` gives what was loaded.
    template <class F> DEVICE_MEMBER Gates made(int64_t head, F loaded) const {
        Gates out{0.0f, 0.0f};
        const u32 flags = arch::opaque_uniform(x.flags);
        if (inside) {
            out = loaded();
            if (flags & DWK_RAW_GATES) {
                const float a_log = load_scalar(x.a_log, head * x.a_log_stride, x.a_log_type);
                const float dt_bias =
                    x.dt_bias ? load_scalar(x.dt_bias, head * x.dt_bias_stride, x.dt_bias_type) : 0.0f;
                out = Gates{gate(out.g, a_log, dt_bias), beta_of(out.beta, flags & DWK_NEGATIVE_EIGENVALUES)};
            }
        }
        out.g = math::canonical(out.g);
        out.beta = math::canonical(out.beta);
        out.g = out.g < lowest_gate ? lowest_gate : out.g;
        return out;
    }

  private:
    const dwk_prefill_prepare_args &x;
    const bool inside;
    const int64_t g_index;
    const int64_t beta_index;
};

// Rows of o past the last sequence become zeros: `slot` counts the slots past its chunks.
DEVICE void clear_rows(const dwk_prefill_prepare_args &x, int end, int slot, int key_head) {
    const int group = x.value_heads / x.key_heads;
    const int64_t first = end + (int64_t)slot * prefill::chunk;
#pragma unroll 1
    for (int row = 0; row < prefill::chunk; ++row) {
        const int64_t token = first + row;
        if (token >= x.tokens) {
            return;
        }
        for (int v = 0; v < group; ++v) {
            const int head = key_head * group + v;
            short *o = (short *)x.o + token * x.o_strides.token + head * x.o_strides.head;
            for (int column = arch::thread(); column < x.value_dim; column += prefill::chunk) {
                o[column] = 0;
            }
        }
    }
}

// The v-th of the value heads that read a key head, `group` of them.
DEVICE int value_head(const dwk_prefill_prepare_args &x, int key_head, int group, int v) {
    return x.flags & DWK_TILED_HEADS ? v * x.key_heads + key_head : key_head * group + v;
}

// One chunk of a key head, and a run of its value heads.
struct Unit {
    int slot;
    int key_head;
    int first_head, end_head; // of those that read the key head
    int sequence;
    int begin; // its first token
    int rows;
};

template <class T> DEVICE void prepare_unit(const dwk_prefill_prepare_args &x, const Unit &unit_of, Shared<T> &shared) {
    const int slot = unit_of.slot, key_head = unit_of.key_head, sequence = unit_of.sequence;
    const int first_head = unit_of.first_head, end_head = unit_of.end_head;
    const int begin = unit_of.begin, rows = unit_of.rows;
    const bool norm = x.flags & DWK_QK_L2NORM;
    const int group = arch::uniform_value(x.value_heads / x.key_heads);
    const int token = arch::thread();

    arch::ChunkRows chunk_rows(prefill::row_address(x.q, x.q_strides, sequence, begin, key_head),
                               prefill::row_address(x.k, x.k_strides, sequence, begin, key_head),
                               (u32)x.q_strides.token * 2, (u32)x.k_strides.token * 2, rows, x.key_dim, shared.rows);
    // A token's gates for several heads lie in one line of memory, which other accesses drive out of the caches.
    constexpr int at_once = prefill::gates_at_once;
    Gates loaded{}, several[at_once > 0 ? at_once : 1];
    const auto load_several = [&](const dwk_prefill_prepare_args &y, int v) __attribute__((always_inline)) {
        if constexpr (at_once > 0) {
            GateReader(y, sequence, begin + token, token < rows)
                .load_ahead(several, value_head(y, key_head, group, v), y.flags & DWK_TILED_HEADS ? y.key_heads : 1,
                            end_head - v);
        }
    };
    const auto keep_several = [&]() __attribute__((always_inline)) {
        if constexpr (at_once > 0) {
            for (int i = 0; i < at_once; ++i) {
                shared.gates.at[i][token] = several[i];
            }
        }
    };
    if constexpr (prefill::gates_ahead) {
        loaded =
            GateReader(x, sequence, begin + token, token < rows).load_ahead(value_head(x, key_head, group, first_head));
    }
    load_several(x, first_head);
    prefill::Products<T> products;
    products.multiply(chunk_rows, x.key_dim, norm);
    keep_several();
    float q_norm = 1.0f, k_norm = 1.0f, unit = 1.0f;
    if (norm) {
        products.normalise(shared.factors);
        q_norm = shared.factors.q_norm[token];
        k_norm = shared.factors.k_norm[token];
        unit = power_of_two_below(arch::chunk_max(bits<int>(k_norm), (int *)shared.scratch));
    }
    if (x.retained && !norm) {
        products.key_squares(shared.factors);
        arch::team_sync<waves>();
    }

    const float per_unit = bits<float>(0x7f000000 - bits<int>(unit)); // 1 / unit
    const GateReader read_gates(x, sequence, begin + token, token < rows);
    const prefill::Maker<T> maker(products, shared.made);
#pragma unroll 1
    for (int v = first_head; v < end_head; ++v) {
        const dwk_prefill_prepare_args &y = arch::reread(x); // or scalar registers are short
        const int head = value_head(y, key_head, group, v);
        char *record = (char *)y.records + ((int64_t)slot * y.value_heads + head) * DWK_RECORD_BYTES;
        float *factors = (float *)(record + prefill::record_rows);
        const int place = prefill::row_place(token);

        Gates gates;
        if constexpr (at_once > 0) {
            gates =
                GateReader(y, sequence, begin + token, token < rows).made(head, [&]() __attribute__((always_inline)) {
                    return shared.gates.at[(v - first_head) % at_once][token];
                });
        } else {
            gates = read_gates.made(head, [&]() __attribute__((always_inline)) { return loaded; });
        }
        // Opaque, or it is fused into the sum, and that in other ways with bounds than without.
        const float log2_gate = bits<float>(arch::opaque(bits<int>(gates.g * math::log2e)));
        float total, sum; // G / ln 2
        if (y.retained) {
            // A token multiplies what lies along k by exp(g) (1 - beta |k|^2), and the rest of a state by exp(g).
            const float key_square = y.flags & DWK_QK_L2NORM ? 1.0f : shared.factors.k_norm[token];
            const float along = math::abs(1.0f - gates.beta * key_square);
            int greatest;
            sum = arch::chunk_sum(log2_gate, total, bits<int>(along < 1.0f ? 1.0f : along), greatest, shared.scratch);
            float bound = total;
            if (greatest != bits<int>(1.0f)) {
                bound += prefill::chunk * math::log2e * arch::log(bits<float>(greatest));
            }
            if (token == 0) {
                *prefill::retained_by(y, slot, head) = bound;
            }
        } else {
            sum = arch::chunk_sum(log2_gate, total, shared.scratch);
        }
        shared.factors.gate_sum[token] = sum;
        shared.factors.beta[token] = -gates.beta;
        factors[prefill::beta_row * prefill::chunk + place] = gates.beta;
        factors[prefill::read_row * prefill::chunk + place] = gates.beta * k_norm * arch::exp2(sum);
        factors[prefill::output_row * prefill::chunk + place] = q_norm * arch::exp2(sum);
        factors[prefill::write_row * prefill::chunk + place] = k_norm * per_unit * arch::exp2(total - sum);
        if (token == 0) {
            *(f32x2 *)(record + prefill::record_decay) = f32x2{arch::exp2(total) * per_unit, unit};
        }
        if constexpr (at_once > 0) {
            if (v + 1 < end_head && (v + 1 - first_head) % at_once == 0) {
                load_several(y, v + 1);
                keep_several();
            }
        }
        if (prefill::gates_ahead && v + 1 < end_head) {
            loaded = read_gates.load_ahead(value_head(x, key_head, group, v + 1));
        }
        arch::team_sync<waves>();
        maker.make(shared.factors, prefill::RecordWriter<T>(record),
                   [&](int of_token, float product) __attribute__((always_inline)) {
                       factors[prefill::diagonal_row * prefill::chunk + prefill::row_place(of_token)] = product;
                   });
        arch::team_sync<waves>();
    }
}

template <class T> DEVICE void prepare(const dwk_prefill_prepare_args &x) {
    __attribute__((shared)) static Shared<T> shared;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    // All that read the gates of a chunk go to one die.
    const int units = prefill::first_slot(x.tokens, x.sequences) + 1;
    const prefill::Dealt to = prefill::dealt(arch::workgroup(), units, x.key_heads * x.parts, x.dies);
    const int slot = to.unit;
    const int key_head = arch::uniform_value(to.member / x.parts), part = to.member - key_head * x.parts;
    const int first_head = part * x.part_heads;
    const int end_head = min_of(first_head + x.part_heads, arch::uniform_value(x.value_heads / x.key_heads));
    const int sequence = prefill::sequence_of_slot(x.cu_seqlens, x.sequences, slot);
    if (sequence == x.sequences) {
        const int end = prefill::token_at(x.cu_seqlens, sequence, x.tokens);
        if (part == 0) {
            clear_rows(x, end, max_of(slot - prefill::first_slot(end, sequence), 0), key_head);
        }
        return;
    }
    if (prefill::is_padding(x, sequence)) {
        return;
    }
    const prefill::Rows range = prefill::rows_of(x.cu_seqlens, sequence, x.tokens);
    const int chunk = slot - prefill::first_slot(range.begin, sequence);
    if (chunk < 0 || chunk >= (range.end - range.begin + prefill::chunk - 1) / prefill::chunk) {
        return;
    }
    const int begin = range.begin + chunk * prefill::chunk;
    const Unit unit{slot, key_head, first_head, end_head, sequence, begin, min_of(range.end - begin, prefill::chunk)};
    prepare_unit<T>(x, unit, shared);
}

} // namespace

KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_bf16(dwk_prefill_prepare_args x) {
    prepare<Bf16>(x);
}
KERNEL(prefill::chunk, prefill::prepare_residency) void dw_prefill_prepare_f16(dwk_prefill_prepare_args x) {
    prepare<F16>(x);
}
