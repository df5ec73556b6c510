// Prefill of sequences of at most 16 tokens in one kernel (prefill/recurrence.h, with C = 16). One wave per (sequence,
// value head, slab of value columns) computes T and P of the one row tile, the outputs and the last state. Longer
// sequences are left to the other kernels of the plan.
//
// q, k [T, HK, K], v, o [T, HV, V] bf16 or f16; g, beta [T, HV] (or a, b with DWK_RAW_GATES); states [slots, HV, K, V]
// or [slots, HV, V, K], f32, bf16 or f16.
#include "../prefill/short.h"

namespace {

using namespace prefill;

// Writes zeros to the wave's columns of all rows of padding.
DEVICE void clear_padding(const dwk_prefill_scan_args &x, Rows range, int sequence, int head, int column) {
    const int own = column + arch::lane() % short_columns;
    if (own >= x.value_dim) {
        return;
    }
#pragma unroll 1
    for (int token = range.begin + arch::lane() / short_columns; token < range.end;
         token += arch::lanes / short_columns) {
        ((short *)row_address(x.o, x.o_strides, sequence, token, head))[own] = 0;
    }
}

// Writes zeros to the rows of o past the last sequence: each wave to its share of them.
DEVICE void clear_rest(const dwk_prefill_scan_args &x) {
    const int waves = x.items_count * x.value_heads * x.slabs;
#pragma unroll 1
    for (int64_t token = (int64_t)token_at(x.cu_seqlens, x.sequences, x.tokens) + arch::workgroup(); token < x.tokens;
         token += waves) {
        for (int head = 0; head < x.value_heads; ++head) {
            short *const o = (short *)x.o + token * x.o_strides.token + head * x.o_strides.head;
            for (int column = arch::lane(); column < x.value_dim; column += arch::lanes) {
                o[column] = 0;
            }
        }
    }
}

// The state before the first token.
template <int Keys>
DEVICE void read_state(ShortState<Keys> &state, const dwk_prefill_scan_args &x, const Work &work, int sequence,
                       int column) {
    const int slot = slot_of(x, x.read_slots, sequence);
    if (x.initial_state && slot >= 0 && (!x.has_initial_state || arch::uniform(x.has_initial_state + sequence))) {
        ShortView<Keys>(x.initial_state, x.initial_strides, x.initial_type, x.flags & DWK_INITIAL_VALUE_MAJOR, slot,
                        work.head, column, x)
            .load(state);
    }
}

// The state after the last token, and after the only chunk.
template <int Keys>
DEVICE void write_states(const ShortState<Keys> &state, const dwk_prefill_scan_args &x, const Work &work, int sequence,
                         Rows range, int column) {
    if (x.final_state) {
        const int slot = slot_of(x, x.write_slots, sequence);
        if (slot >= 0) {
            ShortView<Keys>(x.final_state, x.final_strides, x.final_type, x.flags & DWK_FINAL_VALUE_MAJOR, slot,
                            work.head, column, x)
                .store(state);
        }
    }
    if (x.snapshot_slots && range.end > range.begin) {
        const int slot = arch::uniform(x.snapshot_slots + first_record(range.begin, sequence));
        if ((u32)slot < (u32)x.snapshot_count) {
            ShortView<Keys>(x.snapshots, x.snapshot_strides, x.snapshot_type, x.flags & DWK_SNAPSHOT_VALUE_MAJOR, slot,
                            work.head, column, x)
                .store(state);
        }
    }
}

template <class T, int Keys> DEVICE void short_sequence(const dwk_prefill_short_args &y) {
    SHARED static ShortMemory memory;
    const dwk_prefill_scan_args &x = y.scan;
    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    if (y.clears) {
        clear_rest(x);
    }
    const Work work = work_of(x, arch::workgroup());
    const int sequence = y.items ? min_of(max_of(arch::uniform(y.items + work.item), 0), x.sequences - 1) : work.item;
    const Rows range = rows_of(x.cu_seqlens, sequence, x.tokens);
    const int tokens = range.end - range.begin;
    const int column = work.slab * short_columns, own_column = column + first_column_of(arch::lane());
    if (tokens > short_tokens) {
        return;
    }
    if (is_padding(x, sequence)) {
        clear_padding(x, range, sequence, work.head, column);
        return;
    }
    // A sequence without tokens writes no slot of a pool.
    if (x.slots > 0 && tokens == 0) {
        return;
    }
    ShortSequence<T, Keys> chunk(y, memory, work, sequence, range, column);
    chunk.prepare(arch::reread(y).prepare, sequence, range.begin, work.head);
    arch::phase();
    ShortState<Keys> state;
    for (auto &tiles_of_row : state) {
        for (auto &tile : tiles_of_row) {
            tile = Tile{};
        }
    }
    read_state<Keys>(state, arch::reread(y).scan, work, sequence, own_column);
    if (tokens > 0) {
        chunk.run(state, arch::reread(y).scan, sequence, range.begin, work.head, column);
    }
    write_states<Keys>(state, arch::reread(y).scan, work, sequence, range, own_column);
}

} // namespace

#define SHORT(name, type, keys)                                                                                        \
    KERNEL(arch::lanes, prefill::short_residency)                                                                      \
    void dw_prefill_short_##name##_k##keys(dwk_prefill_short_args x) { short_sequence<type, keys>(x); }

SHORT(bf16, Bf16, 64)
SHORT(bf16, Bf16, 96)
SHORT(bf16, Bf16, 128)
SHORT(f16, F16, 64)
SHORT(f16, F16, 96)
SHORT(f16, F16, 128)
