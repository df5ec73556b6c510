// Assignment of work to workgroups. The GPU deals workgroups to its dies in turn; a die has its own L2 cache.
#pragma once

#include "arch/contract.h"
#include "kernel_args.h"

namespace dispatch {

// a / n of numbers that are not negative. Most numbers of heads and dies are powers of two, and a division is about 20
// instructions in a row on CDNA, before a workgroup knows its work.
DEVICE int quotient(int a, int n) {
    if constexpr (!arch::Traits::one_die) {
        if ((n & (n - 1)) == 0) {
            return arch::uniform_value(a >> __builtin_ctz(n));
        }
    }
    return arch::uniform_value((u32)a / (u32)n);
}

// A unit of work and a member of it. Members of a unit read the same memory and go to one die, whose cache then holds
// it once. Units are dealt in order.
struct Dealt {
    int unit;
    int member;
};

DEVICE Dealt dealt(int workgroup, int units, int members, int dies) {
    if constexpr (arch::Traits::one_die) {
        const int unit = quotient(workgroup, members);
        return Dealt{unit, workgroup - unit * members};
    }
    const int turn = quotient(workgroup, dies * members);
    const int width = min_of(dies, units - turn * dies);
    const int within = workgroup - turn * (dies * members);
    const int member = quotient(within, width);
    return Dealt{turn * dies + within - member * width, member};
}

// The `index`-th of the `group` value heads that read `key_head`: adjacent heads, or every key_heads-th
// (DWK_TILED_HEADS).
template <class Arguments> DEVICE int value_head(const Arguments &x, int key_head, int group, int index) {
    return x.flags & DWK_TILED_HEADS ? index * x.key_heads + key_head : key_head * group + index;
}

} // namespace dispatch
