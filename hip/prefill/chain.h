// Chain of segments that do not forget: S_{i+1} = M_i S_i + N_i, with some columns of S in each workgroup. Contract of
// a target for prefill_combine: <target>/chain.h supplies
//
//   combine_threads(keys), combine_residency
//                                  threads and residency for KERNEL
//   Chains<Keys>(x)                shared memory of a workgroup, for launches with so many keys
//               .run(first, head, slab, count)
//                                  chains `count` summaries from `first` on, for these columns of a value head. All
//                                  waves of the workgroup call it
//   next_unit(unit)                the next unit of work of a workgroup, or a number that no unit has
//   COMBINE_SHARED_BYTES(keys)     states the bytes of dynamic shared memory, if the host requests any
#pragma once

#if defined(__NVPTX__)
#include "sm90/chain.h"
#else
#include "gfx9/chain.h"
#endif
