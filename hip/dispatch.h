// Which work a workgroup takes. The GPU deals workgroups to its dies in turn; a die has its own L2 cache.
#pragma once

#include "arch/contract.h"

namespace dispatch {

// Member of a unit. The members of a unit read the same memory and go to one die, so that its cache holds it once.
// Units are dealt in order.
struct Dealt {
    int unit;
    int member;
};

DEVICE Dealt dealt(int workgroup, int units, int members, int dies) {
    const int turn = arch::uniform_value(workgroup / (dies * members));
    const int width = min_of(dies, units - turn * dies);
    const int within = workgroup - turn * (dies * members);
    const int member = arch::uniform_value(within / width);
    return Dealt{turn * dies + within - member * width, member};
}

// Value head of a (key head, index in its group): value heads of a key head are neighbours, or `tiled` over all groups.
DEVICE int value_head(bool tiled, int key_heads, int group, int key_head, int index) {
    return tiled ? index * key_heads + key_head : key_head * group + index;
}

} // namespace dispatch
