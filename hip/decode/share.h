// Division of a (sequence, value head)'s state among the threads of decode. A team of 64 threads holds 32 value columns
// of the state in registers. The elements of a thread, and so the order of sums, depend on the state's layout and type.
// They do not depend on the batch, so neither do the bits of results.
#pragma once

#include "../dispatch.h"
#include "../kernel_args.h"
#include "../tensor/pieces.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

constexpr int threads = 64;
constexpr int columns = 32; // value columns per team
constexpr int waves = threads / arch::lanes;

// Teams of a workgroup with the gated norm, which needs whole output rows. Without the norm a workgroup is one team.
constexpr int row_teams = 4;
constexpr int row_dim = row_teams * columns;
constexpr int row_threads = row_teams * threads;

// What runs at once, for K up to 128: waves on a SIMD of gfx942, workgroups on a multiprocessor of sm_90a. Of these,
// six request states at once, where registers without a bound leave room for four. Eight would spill them.
constexpr int residency = arch::Traits::one_die ? 6 : 3;

// Index of the thread in its team, and of the team in its workgroup.
DEVICE int member() { return arch::thread() % threads; }
DEVICE int team() { return arch::uniform_value(arch::thread() / threads); }

// Elements of the state S [K, 32] that a thread owns: `run` consecutive keys of every `step` keys, in `across` columns.
// Threads of a group have the same keys.
template <bool Wide, bool ValueMajor, int Keys> struct Share {
    static constexpr int piece = piece::bytes / (Wide ? 4 : 2);
    static constexpr int run = ValueMajor ? piece : 4;
    static constexpr int across = ValueMajor ? 4 : piece;
    static constexpr int groups = threads * across / columns;
    static constexpr int step = groups * run;
    static constexpr int keys = Keys;
    static constexpr int steps = Keys / step;
    static constexpr int pieces = ValueMajor ? across : run; // per step
    static constexpr int column_stride = ValueMajor ? threads / groups : 1;

    // The thread's group. Computed at each use, because it is not worth a register.
    static DEVICE_MEMBER int group() {
        const u32 thread = arch::opaque(member());
        return ValueMajor ? thread % groups : thread / (threads / groups);
    }
    // The thread's i-th column, counted in the team's 32.
    static DEVICE_MEMBER int column(int i) {
        const u32 thread = arch::opaque(member());
        return ValueMajor ? thread / groups + i * column_stride : thread % (threads / groups) * across + i;
    }
};

// Work of a team: a (sequence, value head) and 32 value columns.
struct Work {
    int sequence;
    int head;
    int key_head;
    int column; // the team's first
    // With drafts: the sequence's first row in tensors over tokens, and its number of tokens.
    int first, count;
};

// Row of token t of the sequence, and number of its tokens.
template <bool Draft> DEVICE int row_of(const dwk_decode_args &x, const Work &at, int t) {
    return (Draft ? at.first : at.sequence * x.tokens) + t;
}
template <bool Draft> DEVICE int tokens_of(const dwk_decode_args &x, const Work &at) {
    return Draft ? at.count : x.tokens;
}

// n / by for n < 2^31, without a division.
DEVICE int quotient(int n, const dwk_divisor &by) { return (int)((u64)(u32)n * by.multiplier >> by.shift); }

// Work of this team. Workgroups of one (sequence, key head) read the same q and k, so they go to one die.
DEVICE Work work_of(const dwk_decode_args &x) {
    if constexpr (arch::Traits::one_die) {
        const int index = quotient(arch::workgroup(), x.by_slabs), slab = arch::workgroup() - index * x.slabs;
        const int sequence = quotient(index, x.by_value_heads), head = index - sequence * x.value_heads;
        const int of_head = quotient(head, x.by_key_heads); // by HV / HK, or HK with DWK_TILED_HEADS
        const int key_head = x.flags & DWK_TILED_HEADS ? head - of_head * x.key_heads : of_head;
        return Work{sequence, head, key_head, (slab + team()) * columns, 0, 0};
    }
    const int group = x.value_heads / x.key_heads;
    const dispatch::Dealt to = dispatch::dealt(arch::workgroup(), x.batch * x.key_heads, group * x.slabs, x.dies);
    const int sequence = arch::uniform_value(to.unit / x.key_heads), key_head = to.unit - sequence * x.key_heads;
    const int of_group = arch::uniform_value(to.member / x.slabs);
    const int head = dispatch::value_head(x, key_head, group, of_group);
    return Work{sequence, head, key_head, (to.member - of_group * x.slabs + team()) * columns, 0, 0};
}

} // namespace
} // namespace decode
