// Division of a (sequence, value head)'s state among the threads of decode. A team is one wave and holds 8, 16 or 32
// value columns of the state in registers. No team waits for another, except in the gated norm. The keys of a thread,
// and so the order of sums, depend on the state's layout and type. They do not depend on the batch, so neither do the
// bits of results.
#pragma once

#include "../dispatch.h"
#include "../kernel_args.h"
#include "../tensor/pieces.h"

namespace decode {
namespace { // internal linkage: the compiler then knows ranges of results before it inlines

constexpr int across = 4;     // value columns of a thread, neighbours
constexpr int few_across = 2; // the same in the kernel for few sequences
constexpr int groups = 8;     // threads with the same columns, which divide the keys
template <int Across> constexpr int columns_of = arch::lanes / groups * Across; // of a team

// Workgroups compute `slab` columns; those with the gated norm, of `row_threads`, whole output rows.
constexpr int slab = 32;
constexpr int threads = slab / columns_of<across> * arch::lanes,
              few_threads = slab / columns_of<few_across> * arch::lanes;
static_assert(threads == 64 && few_threads == 128, "as the host launches them");
constexpr int row_dim = 128;
constexpr int row_threads = row_dim / columns_of<across> * arch::lanes;

// What runs at once, for K up to 128: waves on a SIMD of gfx942, workgroups on a multiprocessor of sm_90a.
constexpr int residency = arch::Traits::one_die ? 8 : 3;
constexpr int few_residency = arch::Traits::one_die ? 4 : 3;
constexpr int row_residency = arch::Traits::one_die ? 1 : 3;
constexpr int draft_residency = arch::Traits::one_die ? 6 : 3; // of eight, registers would spill

// Index of the thread in its team, and of the team in its workgroup.
DEVICE int member() { return arch::lane(); }
DEVICE int team() { return arch::uniform_value(arch::thread() / arch::lanes); }

// Elements of the state S [K, columns] that a thread owns: `run` consecutive keys of every `step` keys, in `across`
// columns. A piece is `run` keys of a column, or a key of `across` columns. `Whole`: one access covers a piece.
// `Full`: the head has `Keys` keys, and every team has all its columns.
template <int Across, int Keys, bool Wide_, bool ValueMajor, bool Whole, bool Full> struct Share {
    static constexpr int across = Across, columns = columns_of<Across>;
    typedef float Columns __attribute__((ext_vector_type(across)));
    typedef int Words __attribute__((ext_vector_type(across / 2))); // a number of 16 bits for each column
    static constexpr bool Wide = Wide_, value_major = ValueMajor, whole = Whole, full = Full;
    static constexpr int run = ValueMajor && !Wide ? 8 : 4;
    static constexpr int step = groups * run;
    static constexpr int steps = Keys / step;
    static constexpr int pieces = ValueMajor ? across : run; // of a step
    static constexpr int piece = ValueMajor ? run : across;  // elements
    static constexpr int words = piece / (Wide ? 1 : 2);
    // Whether registers hold the next token beside the last use of a token.
    static constexpr bool requests_early = Keys <= 128;
    // Distance of threads with the same columns.
    static constexpr int group_step = ValueMajor ? 1 : arch::lanes / groups;

    // Whether the head has the key `key`, and the value column `column`.
    template <class Arguments> static DEVICE_MEMBER bool has_key(const Arguments &x, int key) {
        if constexpr (Full) {
            return true;
        } else {
            return key < x.key_dim;
        }
    }
    template <class Arguments> static DEVICE_MEMBER bool has_column(const Arguments &x, int column) {
        if constexpr (Full) {
            return true;
        } else {
            return column < x.value_dim;
        }
    }

    // Ends a step of a loop over keys. With more keys, registers hold numbers of one step alone beside the state.
    static DEVICE_MEMBER void step_done() {
        if constexpr (!requests_early) {
            arch::phase();
        }
    }
    // The thread in the team. Computed at each use where registers have no room for what depends on it: with more keys,
    // and on gfx942 in kernels of full heads, where the compiler would keep the addresses of all pieces.
    static constexpr bool keeps_thread = requests_early && (arch::Traits::one_die || !Full);
    static DEVICE_MEMBER u32 thread() { return keeps_thread ? member() : arch::opaque(member()); }
    static DEVICE_MEMBER int group() { return thread() / group_step % groups; }
    // The thread's first column, counted in the team's.
    static DEVICE_MEMBER int column() {
        return (ValueMajor ? thread() / groups : thread() % (arch::lanes / groups)) * across;
    }
    // Sum over the threads with the same columns; all get the same bits.
    static DEVICE_MEMBER float sum(float x) { return arch::sum_of_eight<group_step>(x); }
};

// Heads that a kernel with all paths computes: K up to `Keys`.
template <int Keys> struct Heads {
    template <bool Wide, bool ValueMajor, bool Whole> using Of = Share<across, Keys, Wide, ValueMajor, Whole, false>;
};
// Heads of K = 128 and V a multiple of `slab`, in a kernel that knows the type and the layout of the states, and that
// all rows are aligned: one path, in which nothing is masked.
constexpr int full_keys = 128;
template <int Across, bool Wide, bool ValueMajor>
using FullShare = Share<Across, full_keys, Wide, ValueMajor, true, true>;

// Work of a team: a (sequence, value head) and `columns` value columns.
struct Work {
    int sequence;
    int head;
    int key_head;
    int column; // the team's first
    // Rows of the sequence in tensors over tokens: the first, and their number.
    int first, count;
};

// n / by for n < 2^31, without a division.
DEVICE int quotient(int n, const dwk_divisor &by) { return (int)((u64)(u32)n * by.multiplier >> by.shift); }

// Work of this team, which has `Columns` columns. Workgroups of one (sequence, key head) read the same q and k, so they
// go to one die.
template <int Columns, class Arguments> DEVICE Work work_of(const Arguments &x) {
    Work at;
    int of_row; // slab of the head's columns
    if constexpr (arch::Traits::one_die) {
        const int index = quotient(arch::workgroup(), x.by_slabs);
        of_row = arch::workgroup() - index * x.slabs;
        at.sequence = quotient(index, x.by_value_heads);
        at.head = index - at.sequence * x.value_heads;
        const int of_head = quotient(at.head, x.by_key_heads); // by HV / HK, or HK with DWK_TILED_HEADS
        at.key_head = x.flags & DWK_TILED_HEADS ? at.head - of_head * x.key_heads : of_head;
    } else {
        const int group = x.value_heads / x.key_heads;
        const dispatch::Dealt to = dispatch::dealt(arch::workgroup(), x.batch * x.key_heads, group * x.slabs, x.dies);
        at.sequence = arch::uniform_value(to.unit / x.key_heads);
        at.key_head = to.unit - at.sequence * x.key_heads;
        const int of_group = arch::uniform_value(to.member / x.slabs);
        at.head = dispatch::value_head(x, at.key_head, group, of_group);
        of_row = to.member - of_group * x.slabs;
    }
    at.column = of_row * slab + team() * Columns;
    at.first = at.sequence * x.tokens;
    at.count = x.tokens;
    return at;
}

} // namespace
} // namespace decode
