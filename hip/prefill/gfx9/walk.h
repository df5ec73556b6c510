// Walk over chunks on CDNA: implements ../walk.h.
#pragma once

#if defined(PREFILL_FUSED)
#include "fused_chunks.h"
#else
#include "chained.h"
#include "chunks.h"
#include "outputs.h"
#endif

namespace prefill {

#if !defined(PREFILL_FUSED)
// Chunks of prefill_scan where they come from HBM. Larger states leave no registers for another loop.
constexpr bool orders_loads(int keys) { return !registers_are_short(keys); }
template <class T, int Keys> using ChunksOfHbm = Chunks<T, Keys, true, orders_loads(Keys)>;
#endif

// A number that is used before and after a walk. In prefill_fused nothing that is computed from it occupies registers
// during the walk.
#if defined(PREFILL_FUSED)
DEVICE int after_walk(int x) { return arch::opaque(x); }
#else
DEVICE int after_walk(int x) { return x; }
#endif

// Runs f(), the work of the waves that hold the state.
template <int Keys, bool Outputs, class F> DEVICE void run_state_waves(const F &f) { f(); }

} // namespace prefill
