// States before segments on CDNA that prefill_scan chains itself, where chains are short (DWK_CHAINS): a launch of
// prefill_combine would take longer. Each workgroup chains the summaries before its segment, for its own columns. It
// begins where prefill_summarise says that N is a state: after a segment that forgets, or after the first.
#pragma once

#include "../forget.h"
#include "chain.h"
#include "exchange.h"

namespace prefill {

// Whether prefill_scan can (Shape::scan_chains on the host): its eight waves must have all rows of M, for 16 columns in
// each half.
constexpr bool chains_itself(int keys) { return !registers_are_short(keys) && !is_narrow(keys); }

// S in shared memory, for each 16 columns.
template <int Keys> using ChainMemory = typename Chain<Keys, false>::Exchange[scan_tiles];

// Brings the state before a segment to `state`, in the waves that hold it, or returns false if the last summary before
// the segment is that state. All waves call it.
template <int Keys>
DEVICE bool chain_before(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, State<Keys> &state) {
    static_assert(sizeof(ChainMemory<Keys>) <= sizeof(Exchange<Keys, true>),
                  "the memory of the chunks holds that of the chain");
    if (!(x.flags & DWK_CHAINS) || !segment.summarised || segment.first || segment.begin == segment.end) {
        return false;
    }
    const int last = max_of(segment.summary - 1, 0), own = last - arch::lane();
    const u64 states = arch::ballot(own >= 0 && *forgotten_by(x, max_of(own, 0), work.head) != 0);
    const int steps = min_of(states ? __builtin_ctzll(states) : arch::lanes - 1, last);
    if (steps == 0) {
        return false;
    }
    auto &memory = *(ChainMemory<Keys> *)&exchange<Keys, true>();
    constexpr int waves = Keys / wave_rows;
    constexpr bool all_have_rows = waves * scan_tiles == walk_threads<Keys, true>() / arch::lanes;
    const int wave = arch::wave(), columns = all_have_rows ? wave / waves : min_of(wave / waves, scan_tiles - 1);
    const bool idle = !all_have_rows && wave >= waves * scan_tiles;
    Chain<Keys, false>(x, memory[columns], last - steps, work.head, work.slab * scan_tiles + columns, wave % waves,
                       idle)
        .run(steps + 1);
    if (wave < scan_waves) {
        const int lane = arch::lane(), column = first_column(lane, scan_tiles);
        for (int t = 0; t < StateLayout<Keys>::key_tiles; ++t) {
            for (int j = 0; j < scan_tiles; ++j) {
                for (int e = 0; e < elements; ++e) {
                    const int key = state_key(t, e, lane), of_slab = column + state_column(j, e);
                    state[t][j][e] = key < Keys ? bits<float>(memory[of_slab / 16].at[0][of_slab % 16][key]) : 0.0f;
                }
            }
        }
    }
    arch::workgroup_sync(); // before others write to this memory
    return true;
}

} // namespace prefill
