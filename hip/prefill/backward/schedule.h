// Contract of a target for the walks of the backward (prefill_backward_walk, prefill_backward_summarise): which key
// buckets have a schedule of the target's own, instead of that of walk.h. <target>/backward/schedule.h supplies
//
//   own_walk(keys)                      whether this bucket has one
//   run_own_walk<T, Keys>(x)            one workgroup of prefill_backward_walk, if it has
//   run_own_summary<T, Keys>(x, work, reverse)
//                                       one workgroup of prefill_backward_summarise, if it has
//   own_columns                         columns of that workgroup
//   walk_kernel_threads<Keys>()         most threads of a workgroup of either
//   walk_kernel_residency<Keys>()       residency for KERNEL
//   BACKWARD_WALK_SHARED_BYTES(keys) BACKWARD_SUMMARISE_SHARED_BYTES(keys)
//                                       declare their dynamic shared memory; empty if it is static
//
// What a walk of its own keeps has a layout of its own, which prefill_backward_gradients of the bucket must read.
#pragma once

#if defined(__NVPTX__)
#include "../sm90/backward/schedule.h"
#else
#include "../gfx9/backward/schedule.h"
#endif
