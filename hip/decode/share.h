// How the threads of decode share the state of a (sequence, value head). A team of 64 threads has 32 value columns, all
// of their state in registers. Which elements a thread has, and so the order of sums, depends on the state's layout and
// type, but not on the batch: neither do the bits.
#pragma once

#include "../dispatch.h"
#include "../kernel_args.h"
#include "../tensor/pieces.h"

namespace decode {
namespace { // internal: so the compiler knows the ranges of results before it inlines

constexpr int threads = 64;
constexpr int columns = 32; // value columns of a team
constexpr int waves = threads / arch::lanes;

// With the gated norm of the output, which takes whole rows, a workgroup is several teams. Without, it is one.
constexpr int row_teams = 4;
constexpr int row_dim = row_teams * columns;
constexpr int row_threads = row_teams * threads;

// Thread of the team, and team of the workgroup.
DEVICE int member() { return arch::thread() % threads; }
DEVICE int team() { return arch::uniform_value(arch::thread() / threads); }

// The part of the state S [K, 32] that a thread owns: of every `step` keys `run` consecutive ones, for `across`
// columns. The threads of a group have the same keys.
template <bool Wide, bool ValueMajor, int Keys> struct Share {
    static constexpr int piece = piece::bytes / (Wide ? 4 : 2);
    static constexpr int run = ValueMajor ? piece : 4;
    static constexpr int across = ValueMajor ? 4 : piece;
    static constexpr int groups = threads * across / columns;
    static constexpr int step = groups * run;
    static constexpr int steps = Keys / step;
    static constexpr int pieces = ValueMajor ? across : run; // of a step
    static constexpr int column_stride = ValueMajor ? threads / groups : 1;

    // The thread's group. Computed anew at each use: it is not worth a register.
    static DEVICE_MEMBER int group() {
        const u32 thread = arch::opaque(member());
        return ValueMajor ? thread % groups : thread / (threads / groups);
    }
    // Its i-th column, of the team's.
    static DEVICE_MEMBER int column(int i) {
        const u32 thread = arch::opaque(member());
        return ValueMajor ? thread / groups + i * column_stride : thread % (threads / groups) * across + i;
    }
};

// The (sequence, value head) of a workgroup, and the columns of a team.
struct Place {
    int sequence;
    int head;
    int key_head;
    int column; // first of the team
};

// The value heads and slabs of a (sequence, key head) read the same q and k: they go to one die.
DEVICE Place place_of(const dwk_decode_args &x) {
    const int group = x.value_heads / x.key_heads;
    const dispatch::Dealt to = dispatch::dealt(arch::workgroup(), x.batch * x.key_heads, group * x.slabs, x.dies);
    const int sequence = arch::uniform_value(to.unit / x.key_heads), key_head = to.unit - sequence * x.key_heads;
    const int of_group = arch::uniform_value(to.member / x.slabs);
    const int head = dispatch::value_head(x, key_head, group, of_group);
    return Place{sequence, head, key_head, (to.member - of_group * x.slabs + team()) * columns};
}

} // namespace
} // namespace decode
