// Walk over chunks on CDNA: implements ../walk.h.
#pragma once

#if defined(PREFILL_FUSED)
#include "fused_chunks.h"
#else
#include "chunks.h"
#include "outputs.h"
#endif

namespace prefill {

// Runs f(), the work of the waves that hold the state.
template <int Keys, bool Outputs, class F> DEVICE void run_state_waves(const F &f) { f(); }

} // namespace prefill
