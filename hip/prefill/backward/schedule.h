// Contract of a target for the walks and gradients of the backward: which key buckets have a schedule of the target's
// own, instead of those of walk.h and gradients.h. <target>/backward/schedule.h supplies
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
//   own_gradients(keys)                 whether prefill_backward_gradients has one. Its launch is persistent
//   run_own_gradients<T>(x, skip)       one workgroup of it; skip(number, thread): of a (chunk, key head) without
//                                       tokens, by own_skip_threads threads
//   gradient_kernel_threads<Keys>(), gradient_kernel_residency<Keys>(), BACKWARD_GRADIENTS_SHARED_BYTES(keys)
//                                       as of the walk
//
// A bucket with a walk of its own has gradients of its own: they agree on the layout of what the walk keeps.
#pragma once

#if defined(__NVPTX__)
#include "../sm90/backward/schedule.h"
#else
#include "../gfx9/backward/schedule.h"
#endif
