// Copying warps of prefill_scan and prefill_summarise on sm_90a: they bring chunks (K, Q, V, T, P and the row factors)
// to shared memory ahead of the computation.
#pragma once

#include "copies.h"
#include "handed_state.h"
#include "record.h"

namespace prefill {

// Copies successive chunks, each to its stage of the ring as soon as the stage is free, and stores the final state that
// the stage may have by then. A thread of each warp starts copies. Tensors that the host could not describe are copied
// by all threads.
template <int Keys, bool Outputs> class Copier {
    typedef prefill::Stage<Keys, Outputs> Stage;
    typedef prefill::Handover<Stage> Handover;

  public:
    // `column`: the workgroup's first value column.
    DEVICE_MEMBER Copier(const dwk_prefill_scan_args &x, Maps maps, const Segment &s, const Work &work, int column)
        : x(x), maps(maps), segment(s), head(work.head), key_head(work.key_head), column(column) {}

    // Place in the ring, in few registers.
    struct Place {
        static_assert(Stage::count <= 3, "a stage has a bit each");
        static constexpr u32 state = 1;       // shifted by the stage: it has a final state, or will have it
        static constexpr u32 overwritten = 8; // shifted by the stage: a state has overwritten zeros of T and P
        static constexpr u32 first = 64;      // no chunk was copied yet
        static constexpr u32 again = 128;     // all stages have been used
        static constexpr u32 odd = 256;       // this warp has cleared the ends of an odd number of chunks
        int stage = 0;                        // of the next chunk
        u32 bits = first;

        DEVICE_MEMBER bool is_first() const { return bits & first; }
        DEVICE_MEMBER bool is_again() const { return bits & again; }
        DEVICE_MEMBER void advance() {
            if (++stage == Stage::count) {
                stage = 0;
                bits |= again;
            }
        }
    };

    // Copies the chunks of a segment, of the only one of a workgroup.
    DEVICE_MEMBER void run() {
        clear_stages();
        Place at;
        copy_all<false>(at, groups<Stage>());
    }
    // Copies the initial state and the chunks of a unit. No kernel from prefill_prepare on may write initial states:
    // copies do not wait for them.
    DEVICE_MEMBER void run(Place &at) {
        if (Outputs && maps.has_initial_state()) {
            copy_state(at, starts_from_summary(x, segment) ? -1 : first_slot(x, segment.sequence));
            at.advance();
        }
        copy_all<true>(at, groups_of_units());
    }
    // Waits until all stages have been given back, stores the states that are there, and waits until all are in memory.
    static DEVICE_MEMBER void end(const dwk_prefill_scan_args &x, const Maps &maps, Place &at) {
        for (int i = 0; i < Stage::count; ++i) {
            if (at.is_again() || i < at.stage) {
                wait_empty(i, groups_of_units());
                store_state(x, maps, at, i);
            }
        }
        if (arch::lane() == 0) {
            arch::await_stores();
        }
        arch::wave_sync();
    }
    static DEVICE_MEMBER void clear_stages() {
        for (int i = 0; i < Stage::count; ++i) {
            clear_upper_blocks<Stage>(shared_address(ring()) + i * Stage::bytes, wave_of_group(), scan_waves);
        }
        arch::publish_shared();
        copying_warps_sync();
    }

  private:
    // Warpgroups that multiply where a workgroup walks several units. prefill_scan then has two.
    static DEVICE_MEMBER int groups_of_units() { return Outputs ? Stage::most_groups : prefill::groups<Stage>(); }

    template <bool Units> DEVICE_MEMBER void copy_all(Place &at, int groups) {
#pragma unroll 1
        for (int token = segment.begin; token < segment.end; token += chunk) {
            if (at.is_again()) {
                wait_empty(at.stage, groups);
            }
            if constexpr (Units) {
                free_stage(at);
                if (Outputs && token + chunk >= segment.end) {
                    take_state(at);
                }
            }
            copy(at, token, groups);
            at.advance();
        }
    }
    // Copies an initial state to the next stage, a quarter in each warp, if it has a slot.
    DEVICE_MEMBER void copy_state(Place &at, int slot) const {
        if (at.is_again()) {
            wait_empty(at.stage, groups_of_units());
        }
        store_state(x, maps, at, at.stage);
        at.bits |= (slot >= 0 ? Place::overwritten : 0) << at.stage;
        const int quarter = own_quarter();
        if (arch::lane() == 0) {
            if (quarter == 2) { // of the last warp
                *has_start<Stage>(at.stage) = slot >= 0;
            }
            copy_quarter<Stage>(maps, at.stage, quarter, StatePlace{slot, head, column},
                                x.flags & DWK_INITIAL_VALUE_MAJOR, Handover::full(at.stage));
        }
        arch::wave_sync();
    }
    // Quarter of a state that lies where this warp copies K, Q, T and P, or V to.
    static DEVICE_MEMBER int own_quarter() {
        const int part = wave_of_group();
        return part == 0 ? 0 : part == 2 ? 1 : part == 3 ? 2 : 3;
    }
    // Makes a stage that was given back ready for a chunk.
    DEVICE_MEMBER void free_stage(Place &at) const {
        store_state(x, maps, at, at.stage);
        if (at.bits & Place::overwritten << at.stage) {
            at.bits &= ~(Place::overwritten << at.stage);
            if (wave_of_group() == 3) {
                clear_upper_blocks<Stage>(shared_address(ring()) + at.stage * Stage::bytes, 0, 1);
                arch::publish_shared();
            }
            arch::wave_sync();
        }
    }

    // Notes that the final state of this unit will be in the stage of the next chunk, its last.
    DEVICE_MEMBER void take_state(Place &at) const {
        const bool wanted = maps.has_final_state() && x.final_state && segment.last;
        const int slot = wanted ? slot_of(x, x.write_slots, segment.sequence) : -1;
        if (slot >= 0) {
            at.bits |= (Place::state | Place::overwritten) << at.stage;
        }
        const int part = wave_of_group(); // in all lanes, because it exchanges numbers between them
        if (arch::lane() == 0) {
            *state_place<Stage>(at.stage, part) = StatePlace{slot, head, column};
        }
        arch::wave_sync();
    }
    // Stores a quarter of the state in a stage, if it has one: the quarter that lies where this warp copies to.
    static DEVICE_MEMBER void store_state(const dwk_prefill_scan_args &x, const Maps &maps, Place &at, int stage) {
        if constexpr (Outputs) {
            if (!(at.bits & Place::state << stage)) {
                return;
            }
            at.bits &= ~(Place::state << stage);
            const int part = wave_of_group(), quarter = own_quarter();
            if (arch::lane() == 0) {
                store_quarter<Stage>(maps, stage, quarter, *state_place<Stage>(stage, part),
                                     x.flags & DWK_FINAL_VALUE_MAJOR);
            }
            arch::wave_sync();
        }
    }

    // Waits until all warpgroups have given back a stage.
    static DEVICE_MEMBER void wait_empty(int stage, int groups) {
        for (int g = 0; g < Stage::most_groups; ++g) {
            if (g < groups) {
                Handover::wait_empty(g, stage);
            }
        }
    }

    // Copies the chunk that begins with `token`. Each warp has a part: K, V, Q and P, or T and the row factors.
    DEVICE_MEMBER void copy(Place &at, int token, int groups) const {
        const u32 to = shared_address(ring()) + at.stage * Stage::bytes, full = Handover::full(at.stage);
        const bool boxes = maps.has_tokens();
        const int part = wave_of_group(), rows = segment.end - token;
        // Boxes have rows past the end of the segment, and what follows in memory may be no numbers. Rows of Q need not
        // be cleared: each makes one row of outputs.
        const bool is_cut = boxes && rows < chunk && part < 2;
        const u32 barrier = is_cut ? Handover::landed(part) : full;
        // The record's copies go on while rows are copied. The first record is not there before the wait in
        // copy_record, for which rows need not wait.
        const bool record_first = !boxes && !at.is_first();
        if (record_first && part == 3 && arch::lane() == 0) {
            copy_record(to, token, false, full);
        }
        arch::wave_sync();
        if (!boxes) {
            copying_warps_sync(); // all quarters of a state have been read
            copy_rows(to, token);
        }
        const int values = boxes && (Outputs || column < x.value_dim) ? groups : 0;
        if (arch::lane() == 0) {
            if (part == 0) {
                copy_panels(to + Stage::k, boxes ? Stage::panels : 0, maps.k(), x.k_strides, key_head, 0, token,
                            barrier);
            } else if (part == 1) {
                copy_panels(to + Stage::v, values, maps.v(), x.v_strides, head, column, token, barrier);
            } else if (part == 2) {
                const int panels = Outputs && boxes ? Stage::panels : 0;
                copy_panels(to + Stage::q, panels, maps.q(), x.q_strides, key_head, 0, token, full);
            } else if (!record_first) {
                copy_record(to, token, at.is_first(), full);
            }
        }
        arch::wave_sync();
        at.bits &= ~Place::first;
        if (is_cut) {
            arch::phase_wait(barrier, (at.bits & Place::odd) != 0);
            at.bits ^= Place::odd;
            const u32 first = to + (part == 0 ? Stage::k : Stage::v);
            clear_rows(first, part == 0 ? Stage::panels : values, rows);
            if (arch::lane() == 0) {
                arch::phase_arrive(full);
            }
            arch::wave_sync();
        }
    }
    // Clears rows from `row` on in panels that have been copied, in all lanes of a warp.
    static DEVICE_MEMBER void clear_rows(u32 to, int panels, int row) {
        for (int panel = 0; panel < panels; ++panel) {
#pragma unroll 1
            for (int at = row * 128 + arch::lane() * 16; at < panel_bytes; at += arch::lanes * 16) {
                store_shared(to + panel * panel_bytes + at, i32x4{});
            }
        }
        arch::publish_shared();
        arch::wave_sync();
    }
    // Copies 64 rows of some panels of 64 columns, from `column` on.
    DEVICE_MEMBER void copy_panels(u32 to, int panels, u64 map, const dwk_token_strides &strides, int head, int column,
                                   int token, u32 full) const {
        arch::phase_arrive_expecting(full, panels * panel_bytes);
        // A tensor without a stride for sequences is one sequence of all tokens.
        const int sequence = strides.sequence == 0 ? 0 : segment.sequence;
        const int row = token - sequence * maps.sequence_tokens;
        for (int panel = 0; panel < Stage::panels || panel < Stage::most_groups; ++panel) {
            if (panel < panels) {
                arch::copy_box(to + panel * panel_bytes, map, column + 64 * panel, head, row, sequence, full);
            }
        }
    }

    // Copies rows of K, Q and V in all threads, and waits for the copies.
    DEVICE_MEMBER void copy_rows(u32 to, int token) const {
        Segment rest = segment;
        rest.begin = token;
        TokenCopier<Keys, Outputs, group_threads> rows(x, rest, head, key_head, column);
        rows.copy_keys(to, rows.left);
        rows.copy_values(to, rows.left);
        arch::await_copies();
        arch::publish_shared();
        copying_warps_sync();
    }

    // Copies T, P and the row factors. A column of blocks, from the diagonal on, is contiguous in a record and in the
    // ring.
    DEVICE_MEMBER void copy_record(u32 to, int token, bool is_first, u32 full) const {
        constexpr int row_bytes = row_factors * chunk * 4 + 16;
        arch::phase_arrive_expecting(full, row_bytes + (Outputs ? 2 : 1) * matrix_bytes);
        const int number = segment.record + (token - segment.begin) / chunk;
        const char *const record =
            (const char *)x.records + ((int64_t)number * x.value_heads + head) * DWK_RECORD_BYTES;
        if (is_first) {
            arch::wait_for_previous_kernel();
        }
        arch::copy_bulk(to + Stage::rows, record + record_rows, row_bytes, full);
        copy_matrix(to + Stage::t, record + record_matrices, full);
        if constexpr (Outputs) {
            copy_matrix(to + Stage::p, record + record_matrices + matrix_bytes, full);
        }
    }
    static DEVICE_MEMBER void copy_matrix(u32 to, const char *from, u32 full) {
        for (int column = 0; column < tiles; ++column) {
            arch::copy_bulk(to + Stage::lower_place(16 * column, 2 * column), from + block_place(column, column),
                            (tiles - column) * block_bytes, full);
        }
    }

    const dwk_prefill_scan_args &x;
    const Maps maps;
    const Segment segment;
    const int head, key_head, column;
};

} // namespace prefill
