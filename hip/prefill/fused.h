// Contract of a target for prefill_fused (Outputs) and prefill_fused_summarise (without): waves that make T, the row
// factors and, with Outputs, P of each chunk on chip, beside the waves that walk (walk.h). <target>/fused.h supplies
//
//   fused_threads<Keys, Outputs>(), fused_residency<Keys, Outputs>()
//                                                   for KERNEL
//   FUSED_SHARED_BYTES(keys), FUSED_SUMMARISE_SHARED_BYTES(keys)
//                                                   declare the dynamic shared memory; empty if it is static
//   making_threads                                  threads of the waves that make, if these are the first of the
//                                                   workgroup, otherwise 0
//   may_prepare                                     whether gates (by_gates.h) or lengths on the device (plan.h) may
//                                                   choose the split path
//   choice_memory<Keys>()                           shared memory for that: 64 numbers a wave
//   prepare_instead<T, Keys>(x)                     does what prefill_prepare does, if they did
//   fused_walks_units, walk_fused_units<T, Keys>(x)
//                                                   whether a workgroup may walk several units of work, and all of that
//   run_making_waves<T, Keys, Outputs>(x, segment, work)
//                                                   runs the waves that do not hold the state and ends them; returns in
//                                                   the others
//   run_fused_state_waves<Keys, Outputs>(f)         runs f() in the waves that hold the state
//
// Chunks (walk.h) does not write the outputs of the first segment.quiet tokens, a multiple of a chunk.
#pragma once

#include "fused_mode.h"

#include "columns.h"

#if defined(__NVPTX__)
#include "sm90/fused.h"
#else
#include "gfx9/fused.h"
#endif
