// The walk over chunks on CDNA, as ../walk.h asks for it.
#pragma once

#include "chunks.h"
#include "outputs.h"

namespace prefill {

// Runs f(), the work of the waves that hold the state.
template <int Keys, bool Outputs, class F> DEVICE void run_state_waves(const F &f) { f(); }

} // namespace prefill
