// States in f32 on sm_90a: implements ../state_window.h. They are moved element by element (../state.h).
#pragma once

#include "../state_view.h"

namespace prefill {

DEVICE bool fits_a_window(const StateView &) { return false; }
template <int Keys> DEVICE void load_through_window(State<Keys> &, const StateView &, int, int, int) {}
template <int Keys> DEVICE void store_through_window(const State<Keys> &, const StateView &, int, int, int) {}

} // namespace prefill
