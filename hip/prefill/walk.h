// Contract of a target for walks over chunks (prefill_scan, prefill_summarise), part 2: the schedule of a chunk
// (recurrence.h). <target>/walk.h supplies
//
//   Chunks<T, Keys, Outputs>(x, segment, head, key_head, wave_column, column_offset)
//                                  walks a segment's chunks, for the columns of a wave that holds the state
//       .begin(state)              before the first chunk
//       .warm_up(state, x)         in prefill_fused: the quiet chunks, unless step() takes them too
//       .step(state, x)            one chunk: read_state, solve_x, solve_u, update_state and, with Outputs, its outputs
//       .complete(state)           makes the state ready to be stored, after any chunk
//       .left()                    tokens left in the segment
//       .finish()                  after the last chunk
//   ChunksOfHbm<T, Keys>           the same with outputs and another order of loads, if orders_loads(Keys)
//   Maps, MAPS_PARAMETER, MAPS_OF(kernel)
//                                  descriptions of q, k, v and states that the host gives to a kernel, if any
//   run_helper_waves<T, Keys, Outputs>(x, segment, work, maps)
//                                  runs the waves that do not hold the state and ends them; returns in the others
//   run_state_waves<Keys, Outputs>(f)
//                                  runs f() in the waves that hold the state
//   after_walk(x)                  x, used before and after a walk
//   chains_itself(keys), chain_before<Keys>(x, segment, work, state)
//                                  whether prefill_scan can chain summaries. With DWK_CHAINS brings the state before a
//                                  segment to `state`; false: that state is in memory. All waves call it
//   are_fewer_workgroups_than(units)
//                                  whether the launch has fewer workgroups than units of work
//   walk_units<T, Keys, Outputs>(x, maps, units, locate, f)
//                                  the walks of a workgroup that takes several units of work, if walks_units(Keys)
//   start_unit<Keys>(state, x, unit)
//                                  before the first chunk of such a unit: loads its initial state, or returns false
//   hand_over<Keys>(state, x, unit)
//                                  after its last chunk: lets other waves store its final state, or returns false
//   end_unit(unit)                 after both
#pragma once

#include "state.h"

#if defined(__NVPTX__)
#include "sm90/walk.h"
namespace prefill {
constexpr bool orders_loads(int) { return false; }
constexpr bool chains_itself(int) { return false; }
template <int Keys>
DEVICE bool chain_before(const dwk_prefill_scan_args &, const Segment &, const Work &, State<Keys> &) {
    return false;
}
template <class T, int Keys> using ChunksOfHbm = Chunks<T, Keys>;
DEVICE int after_walk(int x) { return x; }
} // namespace prefill
#else
#include "gfx9/maps.h"
#include "gfx9/walk.h"
namespace prefill {
DEVICE bool are_fewer_workgroups_than(int) { return false; }
template <class T, int Keys, bool Outputs, class Locate, class F>
DEVICE void walk_units(const dwk_prefill_scan_args &, Maps, int, const Locate &, const F &) {}
template <int Keys, class Unit> DEVICE bool start_unit(State<Keys> &, const dwk_prefill_scan_args &, Unit &) {
    return false;
}
template <int Keys, class Unit> DEVICE bool hand_over(const State<Keys> &, const dwk_prefill_scan_args &, Unit &) {
    return false;
}
template <class Unit> DEVICE void end_unit(Unit &) {}
} // namespace prefill
#endif

namespace prefill {

// Walks the chunks of a segment until `rest` of its tokens are left. Call between chunks.begin and chunks.finish.
template <class T, int Keys, bool Outputs = true, class C>
DEVICE void walk(State<Keys> &state, C &chunks, const dwk_prefill_scan_args &x, int rest) {
#pragma unroll 1
    while (chunks.left() > rest) {
        chunks.step(state, x);
    }
    chunks.complete(state);
}

} // namespace prefill
