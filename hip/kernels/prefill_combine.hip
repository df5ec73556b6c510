// Second kernel of segmented prefill: the state after each segment but the last,
//   S_1 = N_0,   S_{i+1} = M_i S_i + N_i       S, N [K, 16 columns], M [K, K]
// written in place of N_i. After a segment that forgets, N_i already is the state, so a chain ends there. One workgroup
// per (sequence with several summaries, value head, 16 value columns); some targets let it take several of these,
// where the launch has fewer workgroups. Waves divide the rows of M, and S passes from wave to wave through shared
// memory. M and S are sums of two bf16 numbers each (prefill/parts.h). Three of the four products of these are
// computed, which is accurate to 2^-17. A single bf16 would lose the accuracy of a whole chunk.
//
// N, S [V, K] f32; M [K, K] as high and low bf16 (prefill/parts.h).
#include "../prefill/chain.h"

namespace {

using prefill::Chains;

// Finds the first segment from `from` on that forgets (`forgets` true) or does not (false). Returns `count` if none
// does.
DEVICE int next_that(bool forgets, const dwk_prefill_combine_args &x, int first, int head, int from, int count) {
#pragma unroll 1
    for (; from < count; from += arch::lanes) {
        const int own = from + arch::lane();
        const bool found = own < count && (*prefill::forgotten_by(x, first + own, head) != 0) == forgets;
        const u64 lanes_that = arch::ballot(found);
        if (lanes_that) {
            return from + __builtin_ctzll(lanes_that);
        }
    }
    return count;
}

// A unit of work: 16 columns of the summaries of a chain, for a value head. Past the end of the list `count` is 0.
struct ChainUnit {
    int first, count, head, slab;
};
DEVICE ChainUnit chain_unit(const dwk_prefill_combine_args &x, int unit) {
    // Slabs of a (sequence, value head) read the same M, so they go to one die.
    const dispatch::Dealt to = dispatch::dealt(unit, x.chains_count * x.value_heads, x.slabs, x.dies);
    const int chain = arch::uniform_value(to.unit / x.value_heads);
    const int first = min_of(max_of(arch::uniform(x.chains + 2 * chain), 0), x.summaries);
    const int count = min_of(arch::uniform(x.chains + 2 * chain + 1), x.summaries - first);
    return ChainUnit{first, count, to.unit - chain * x.value_heads, to.member};
}

// Combines each run of segments that do not forget. The state before such a run is known.
template <int Keys> DEVICE void combine_unit(const dwk_prefill_combine_args &x, Chains<Keys> &chains, ChainUnit unit) {
#pragma unroll 1
    for (int segment = 1; segment < unit.count;) {
        const int begin = next_that(false, x, unit.first, unit.head, segment, unit.count);
        segment = next_that(true, x, unit.first, unit.head, begin, unit.count);
        if (begin < segment) {
            chains.run(unit.first + begin - 1, unit.head, unit.slab, segment - begin + 1);
        }
    }
}

template <int Keys> DEVICE void combine(const dwk_prefill_combine_args &x) {
    const int units = x.chains_count * x.value_heads * x.slabs;
    int unit = arch::workgroup();
    // The list is older than prefill_prepare, beside which this kernel may run.
    ChainUnit work = chain_unit(x, unit);
    if (work.count <= 0) {
        arch::end_without_work();
        return;
    }
    Chains<Keys> chains(x);
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
#pragma unroll 1
    do {
        combine_unit<Keys>(x, chains, work);
        unit = prefill::next_unit(unit);
        if (unit >= units) {
            break;
        }
        work = chain_unit(x, unit);
    } while (work.count > 0);
}

} // namespace

#define COMBINE(keys)                                                                                                  \
    KERNEL(prefill::combine_threads(keys), prefill::combine_residency)                                                 \
    void dw_prefill_combine_k##keys(dwk_prefill_combine_args x) { combine<keys>(x); }

COMBINE_SHARED_BYTES(64)
COMBINE_SHARED_BYTES(96)
COMBINE_SHARED_BYTES(128)
COMBINE_SHARED_BYTES(192)
COMBINE_SHARED_BYTES(256)

COMBINE(64)
COMBINE(96)
COMBINE(128)
COMBINE(192)
COMBINE(256)
