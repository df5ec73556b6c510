// The recurrence over the tokens of a sequence. The state stays in registers from the first token to the last.
#pragma once

#include "norm.h"
#include "slots.h"
#include "sums.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

// Stores the thread's columns of the output of token t. One of the threads with the same columns writes them.
template <class S, class Arguments>
DEVICE void store_output(const Arguments &x, const Work &at, int t, typename S::Words words) {
    const int column = at.column + S::column();
    if (S::group() == 0 && S::has_column(x, column)) {
        char *to = (char *)row_address(x.o, x.o_strides, at.sequence, at.first + t, at.head, 2 * column);
        if constexpr (S::across == across) {
            piece::store_half<false>(to, words, S::whole);
        } else {
            piece::store_pair(to, words.x, S::whole);
        }
    }
}

// Computes a token, given its sums: updates the state and stores the output. `row`: memory of the output row, with the
// norm.
template <class T, bool Norm, class S, class Arguments>
DEVICE void advance(StateShare<S> &share, const Token<S> &token, const Sums<S> &sums, Gates gates, const Arguments &x,
                    const Work &at, int t, float *row, int weight) {
    float of_k = 1.0f, of_q = 1.0f;
    if (x.flags & DWK_QK_L2NORM) {
        of_k = math::inverse_norm(sums.k_k);
        of_q = math::inverse_norm(sums.q_q);
    }
    // d = beta (v - decay S^T k), and o = scale (decay S0^T q + (k.q) d).
    typedef typename S::Columns Columns;
    const Columns v = widen_columns<T, S>(token.v);
    const float of_u = -gates.decay * of_k, of_d = of_k * sums.k_q, of_o = x.scale * of_q;
    const Columns d = gates.beta * __builtin_elementwise_fma((Columns)of_u, sums.u, v);
    const Columns o = of_o * __builtin_elementwise_fma((Columns)gates.decay, sums.w, of_d * d);
    const Columns of_key = of_k * d;
#pragma unroll
    for (int j = 0; j < S::steps; ++j) {
        float k[S::run];
        keys_of<T, S>(k, token.k[j], j, x);
        for (int e = 0; e < S::run; ++e) {
            const Columns kept = gates.decay * share.s[j][e];
            share.s[j][e] = __builtin_elementwise_fma((Columns)k[e], of_key, kept);
        }
        S::step_done();
    }
    typename S::Words words;
    for (int i = 0; i < S::across; i += 2) {
        words[i / 2] = T::pack(math::packable(o[i]), math::packable(o[i + 1]));
    }
    if constexpr (Norm) {
        if (S::group() == 0) {
            *(Columns *)(row + at.column + S::column()) = widen_columns<T, S>(words);
        }
        const int column = normed_column(at);
        const float y = math::packable(normed<T>(row, token.z, weight, x, column));
        if (member() < S::columns) {
            const int64_t first = token_offset(x.o_strides, at.sequence, at.first + t, at.head);
            ((short *)x.o)[first + column] = (short)T::pack(y, 0.0f);
        }
    } else {
        store_output<S>(x, at, t, words);
    }
}

// Stores the state to its element `element` of a tensor of states.
template <class S, class Strides, class Arguments>
DEVICE void store_state(const StateShare<S> &share, void *all, const Strides &strides, int64_t element, int type,
                        const Arguments &x, const Work &at) {
    const state::Head to(all, element + at.head * strides.head, strides.row, type);
    store_state<S>(share, Pieces<S, Arguments>(to, at.column, x));
}

// Type of the states of the pool. `Wide`: f32.
template <bool Wide, class Arguments> DEVICE int pool_type(const Arguments &x) {
    return Wide ? DWK_F32 : state::narrow_type(x.state_type);
}

// Computes all tokens of a sequence. The slots, the gates and the first token are requested together, then the state.
template <class T, class S, bool Norm, bool Draft, class Arguments>
DEVICE void walk(const Arguments &x, const Work &at, const RawSlots &raw_slots, const RawGates &raw_gates, Row *row) {
    Token<S> token;
    load_token<Norm>(token, arch::reread(x), at, 0);
    int weight = 0;
    if constexpr (Norm) {
        weight =
            x.norm.weight ? load_raw(x.norm.weight, normed_column(at) * x.norm.weight_stride, x.norm.weight_type) : 0;
    }
    const Slots slots = slots_of<Draft>(arch::reread(x), at, raw_slots);
    if (slots.idle) {
        // Padding: outputs are zeros.
#pragma unroll 1
        for (int t = 0; t < at.count; ++t) {
            store_output<S>(arch::reread(x), at, t, typename S::Words{});
        }
        return;
    }
    StateShare<S> share{};
    RawState<S> raw{};
    if (slots.read >= 0) {
        const Arguments &y = arch::reread(x);
        const int64_t element = element_of(y.state_strides, slots.read) + at.head * y.state_strides.head;
        const state::Head from(y.state, element, y.state_strides.row, pool_type<S::Wide>(y));
        request_state<S>(raw, Pieces<S, Arguments>(from, at.column, y));
    }
    arch::phase();
    const Gates all = gates_of(raw_gates, arch::reread(x)); // of token t in thread t
    if constexpr (S::Wide) {
        widen_state<DWK_F32>(share, raw);
    } else if (arch::reread(x).state_type == DWK_F16) {
        widen_state<DWK_F16>(share, raw);
    } else {
        widen_state<DWK_BF16>(share, raw);
    }
#pragma unroll 1
    for (int t = 0; t < at.count; ++t) {
        const Sums<S> own = sums_of<T, S>(share, token, arch::reread(x));
        Token<S> next;
        const bool last = t + 1 == at.count;
        if (S::requests_early && !last) {
            load_token<Norm>(next, arch::reread(x), at, t + 1);
        }
        const Gates gates{arch::read_lane(all.decay, t), arch::read_lane(all.beta, t)};
        advance<T, Norm, S>(share, token, total_of<S>(own), gates, arch::reread(x), at, t,
                            Norm ? row->o[t % 2] : nullptr, weight);
        if (!S::requests_early && !last) {
            load_token<Norm>(next, arch::reread(x), at, t + 1);
        }
        token = next;
        const Arguments &y = arch::reread(x);
        if (y.states) {
            int64_t element = element_of(y.states_strides, at.sequence) + (int64_t)t * y.states_token;
            if constexpr (Draft) {
                element = element_of_states(draft_of(y), at, t);
            }
            if (element >= 0) {
                store_state<S>(share, y.states, y.states_strides, element, y.states_type, y, at);
            }
        } else if constexpr (Draft) {
            const int slot = written_after(draft_of(y), at, t);
            if (slot >= 0) {
                store_state<S>(share, y.state, y.state_strides, element_of(y.state_strides, slot),
                               pool_type<S::Wide>(y), y, at);
            }
        }
    }
    if (slots.write >= 0) {
        const Arguments &y = arch::reread(x);
        store_state<S>(share, y.state, y.state_strides, element_of(y.state_strides, slots.write), pool_type<S::Wide>(y),
                       y, at);
    }
}

// The walk for the states' type and layout. `Shares`: the share for whether they are f32, value-major and whole.
template <class T, template <bool, bool, bool> class Shares, bool Whole, bool Norm, bool Draft>
DEVICE void walk(const dwk_decode_args &x, const Work &at, const RawSlots &slots, const RawGates &gates, Row *row) {
    const bool value_major = x.flags & DWK_INITIAL_VALUE_MAJOR;
    if (x.state_type == DWK_F32) {
        value_major ? walk<T, Shares<true, true, Whole>, Norm, Draft>(x, at, slots, gates, row)
                    : walk<T, Shares<true, false, Whole>, Norm, Draft>(x, at, slots, gates, row);
    } else {
        value_major ? walk<T, Shares<false, true, Whole>, Norm, Draft>(x, at, slots, gates, row)
                    : walk<T, Shares<false, false, Whole>, Norm, Draft>(x, at, slots, gates, row);
    }
}

// Computes the share of this team, for heads of K up to `Keys`.
template <class T, int Keys, bool Norm, bool Draft> DEVICE void recur(const dwk_decode_args &x) {
    Row *row = nullptr;
    if constexpr (Norm) {
        SHARED static Row shared_row;
        row = &shared_row;
    }
    Work at = work_of<columns_of<across>>(x);
    if constexpr (Draft) {
        find_rows(at, draft_of(x));
        if (at.count <= 0) {
            return;
        }
    }
    if (at.column >= x.value_dim) {
        return;
    }
    // Before the paths part, so that they are under way while a path's instructions are fetched.
    const RawSlots slots = Draft ? RawSlots{} : load_slots(x, at);
    const RawGates gates = load_gates(arch::reread(x), at);
    // One path for all accesses: a test at each would put code between the loads that nobody runs.
    if (arch::Traits::any_alignment || x.flags & DWK_ALIGNED) {
        walk<T, Heads<Keys>::template Of, true, Norm, Draft>(x, at, slots, gates, row);
    } else {
        walk<T, Heads<Keys>::template Of, false, Norm, Draft>(x, at, slots, gates, row);
    }
}

// Computes the share of this team, as `S` (a `FullShare`) lays the state out.
template <class T, class S> DEVICE void recur_full(const dwk_decode_full_args &x) {
    const Work at = work_of<S::columns>(x);
    const RawSlots slots = load_slots(x, at);
    const RawGates gates = load_gates(arch::reread(x), at);
    walk<T, S, false, false>(x, at, slots, gates, nullptr);
}

} // namespace
} // namespace decode
