// Chain of segments that do not forget: S_{i+1} = M_i S_i + N_i, with some columns of S in each workgroup. Contract of
// a target for prefill_combine (short chains may be prefill_scan's, walk.h): <target>/chain.h supplies
//
//   combine_threads(keys), combine_residency
//                                  threads and residency for KERNEL
//   chain_columns                  columns of S in a workgroup; as in src/kernels/target.rs
//   Chains<Keys>(x)                shared memory of a workgroup, for K up to `Keys`. All waves construct it; it reads
//                                  nothing that earlier kernels wrote
//               .run(first, head, slab, count)
//                                  chains `count` summaries, at least 2, from `first` on, for these columns of a value
//                                  head. All waves call it
//   next_unit(unit)                the next unit of work of a workgroup, or a number that no unit has
//   COMBINE_SHARED_BYTES(keys)     states the bytes of dynamic shared memory, if the host requests any
#pragma once

#if defined(__NVPTX__)
#include "sm90/chain.h"
#else
#include "gfx9/chain.h"
#endif
