// Copying warps of prefill_scan and prefill_summarise on sm_90a: they bring chunks (K, Q, V, T, P and the row factors)
// to shared memory ahead of the computation.
#pragma once

#include "copies.h"
#include "maps.h"
#include "record.h"

namespace prefill {

// Copies successive chunks, each to its stage of the ring as soon as the stage is free. A thread of each warp starts
// copies of whole chunks. Other chunks, and tensors that the host could not describe, are copied by all threads.
template <int Keys, bool Outputs> class Copier {
    typedef prefill::Stage<Keys, Outputs> Stage;
    typedef prefill::Handover<Stage> Handover;

  public:
    // `column`: the workgroup's first value column.
    DEVICE_MEMBER Copier(const dwk_prefill_scan_args &x, Maps maps, const Segment &s, const Work &work, int column)
        : x(x), maps(maps), segment(s), head(work.head), key_head(work.key_head), column(column) {}

    // Place in the ring.
    struct Place {
        int stage = 0;         // of the next chunk
        bool is_first = true;  // no chunk was copied yet
        bool is_again = false; // all stages have been used

        DEVICE_MEMBER void advance() {
            is_first = false;
            if (++stage == Stage::count) {
                stage = 0;
                is_again = true;
            }
        }
    };

    // Copies the chunks of a segment, of the only one of a workgroup.
    DEVICE_MEMBER void run() {
        clear_stages();
        Place at;
        copy_all(at, groups<Stage>());
    }
    // Copies the chunks of a unit.
    DEVICE_MEMBER void run(Place &at) { copy_all(at, groups_of_units()); }
    // Waits until all stages have been given back.
    static DEVICE_MEMBER void end(const Place &at) {
        for (int i = 0; i < Stage::count; ++i) {
            if (at.is_again || i < at.stage) {
                wait_empty(i, groups_of_units());
            }
        }
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

    DEVICE_MEMBER void copy_all(Place &at, int groups) {
#pragma unroll 1
        for (int token = segment.begin; token < segment.end; token += chunk) {
            if (at.is_again) {
                wait_empty(at.stage, groups);
            }
            copy(at, token, groups);
            at.advance();
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
    DEVICE_MEMBER void copy(const Place &at, int token, int groups) const {
        const u32 to = shared_address(ring()) + at.stage * Stage::bytes, full = Handover::full(at.stage);
        const bool whole = maps.usable() && token + chunk <= segment.end;
        const int part = wave_of_group();
        // The record's copies go on while rows are copied. The first record is not there before the wait in
        // copy_record, for which rows need not wait.
        const bool record_first = !whole && !at.is_first;
        if (record_first && part == 3 && arch::lane() == 0) {
            copy_record(to, token, false, full);
        }
        arch::wave_sync();
        if (!whole) {
            copy_rows(to, token);
        }
        if (arch::lane() == 0) {
            if (part == 0) {
                copy_panels(to + Stage::k, whole ? Stage::panels : 0, maps.k(), x.k_strides, key_head, 0, token, full);
            } else if (part == 1) {
                const int panels = whole && (Outputs || column < x.value_dim) ? groups : 0;
                copy_panels(to + Stage::v, panels, maps.v(), x.v_strides, head, column, token, full);
            } else if (part == 2) {
                const int panels = Outputs && whole ? Stage::panels : 0;
                copy_panels(to + Stage::q, panels, maps.q(), x.q_strides, key_head, 0, token, full);
            } else if (!record_first) {
                copy_record(to, token, at.is_first, full);
            }
        }
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
