// Contract of a target for prefill_fused: waves that make T, P and the row factors of each chunk on chip, beside the
// waves that walk (walk.h). <target>/fused.h supplies
//
//   fused_threads<Keys>(), fused_residency<Keys>()  for KERNEL
//   FUSED_SHARED_BYTES(keys)                        declares the dynamic shared memory; empty if it is static
//   run_making_waves<T, Keys>(x, segment, work)     runs the waves that do not hold the state and ends them; returns in
//                                                   the others
//   run_fused_state_waves<Keys>(f)                  runs f() in the waves that hold the state
#pragma once

// Targets whose slabs differ from those of prefill_scan ask for it in layout.h and walk.h.
#define PREFILL_FUSED

#include "columns.h"

#if defined(__NVPTX__)
#include "sm90/fused.h"
#else
#include "gfx9/fused.h"
#endif
