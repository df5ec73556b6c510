// Prefill, second part: outputs and final states. One workgroup per (segment, value head, slab of value columns) walks
// the chunks of its segment, from the state that the sequence starts with or, where sequences are cut, from what
// prefill_summarise and prefill_combine left.
//
// q, k [T, HK, K], v, o [T, HV, V] 16-bit; states [slots, HV, K, V] or [slots, HV, V, K], f32 or bf16.
#include "../tile/prefill_step.h"

namespace {

using namespace prefill;

// A sequence that has no state, neither before nor after, is padding: its outputs are zeros.
template <int Keys> DEVICE void clear_outputs(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
    const int columns = slab_columns<Keys, true>();
    const int column = work.slab * columns + arch::thread() % columns;
    if (column >= x.value_dim) {
        return;
    }
#pragma unroll 1
    for (int token = segment.begin + arch::thread() / columns; token < segment.end;
         token += walking_threads<Keys, true>() / columns) {
        ((short *)row_address(x.o, x.o_strides, segment.sequence, token, work.head))[column] = 0;
    }
}

// What a workgroup walks, found once more: not worth holding through the loop.
struct Again {
    Work work;
    Segment segment;
    DEVICE_MEMBER explicit Again(const dwk_prefill_scan_args &x)
        : work(work_of(x, arch::opaque_uniform(arch::workgroup()))), segment(segment_of(x, work.item)) {}
};

// Where the walk has to stop next, as tokens that are left then: after the next chunk whose state is wanted, or to look
// for one among further chunks.
DEVICE int next_stop(const dwk_prefill_scan_args &x, int left) {
    const Segment segment = Again(x).segment;
    const int tokens = segment.end - segment.begin, done = (tokens - left) / chunk;
    const int ahead = done + arch::lane();
    bool wanted = false;
    if (ahead * chunk < tokens) {
        wanted = (u32)x.snapshot_slots[segment.slot + ahead] < (u32)x.snapshot_count;
    }
    const u64 found = arch::ballot(wanted);
    const int stop = done + (found ? __builtin_ctzll(found) + 1 : arch::lanes);
    return arch::uniform_value(max_of(tokens - stop * chunk, 0));
}

// The state after the chunks so far, if it is wanted.
template <class T, int Keys>
DEVICE void take_snapshot(const typename Chunk<T, Keys>::State &state, const dwk_prefill_scan_args &x, int left,
                          int column) {
    const Again again(x);
    const int done = (again.segment.end - again.segment.begin - left) / chunk;
    const int slot = done > 0 ? arch::uniform(x.snapshot_slots + again.segment.slot + done - 1) : -1;
    if ((u32)slot < (u32)x.snapshot_count) {
        const StateView to(x.snapshots, x.snapshot_strides, x.snapshot_type, x.flags & DWK_SNAPSHOT_VALUE_MAJOR, slot,
                           again.work.head);
        store_state<T, Keys>(state, to, column, x.key_dim, x.value_dim);
    }
}

// The work of the warps that multiply.
template <class T, int Keys>
DEVICE void scan_columns(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
    constexpr int across = Chunk<T, Keys>::across;
    const int wave_column = work.slab * slab_columns<Keys, true>() + wave_column_of_slab(across);
    const int column = wave_column + first_column(arch::lane(), across);
    const u32 column_offset = column < x.value_dim ? 2 * column : Window::nowhere;

    arch::wait_for_previous_kernel();
    arch::let_next_kernel_begin();
    typename Chunk<T, Keys>::State state;
    for (int t = 0; t < Chunk<T, Keys>::key_tiles; ++t) {
        for (int j = 0; j < across; ++j) {
            state[t][j] = Tile{};
        }
    }
    if (segment.summarised) {
        load_matrix<T, Keys>(state, state_before(x, segment, work.head), column, x.value_dim, x.key_dim);
    } else {
        first_state<T, Keys>(state, x, segment.sequence, work.head, column);
    }
    Chunks<T, Keys> chunks(x, segment, work.head, work.key_head, wave_column, column_offset);
    chunks.begin(state);
    do {
        int rest = 0;
        if (arch::reread(x).snapshot_slots) {
            rest = next_stop(arch::reread(x), chunks.left());
        }
        walk<T, Keys>(state, chunks, x, rest);
        if (arch::reread(x).snapshot_slots) {
            take_snapshot<T, Keys>(state, arch::reread(x), chunks.left(), column);
        }
    } while (chunks.left() > 0);
    chunks.finish();

    const dwk_prefill_scan_args &y = arch::reread(x);
    if (y.final_state) {
        const Again ended(y);
        const int slot = slot_of(y, y.write_slots, ended.segment.sequence);
        if (ended.segment.last && slot >= 0) {
            const StateView to(y.final_state, y.final_strides, y.final_type, y.flags & DWK_FINAL_VALUE_MAJOR, slot,
                               ended.work.head);
            store_state<T, Keys>(state, to, column, y.key_dim, y.value_dim);
        }
    }
}

template <class T, int Keys> DEVICE void scan(const dwk_prefill_scan_args &x) {
    const Work work = work_of(x, arch::workgroup());
    const Segment segment = segment_of(x, work.item);
    // A sequence without tokens writes no slot of a pool, whatever it would start from.
    if (x.slots > 0 && segment.begin == segment.end) {
        arch::wait_for_previous_kernel();
        return;
    }
    if (is_padding(x, segment.sequence)) {
        arch::wait_for_previous_kernel();
        clear_outputs<Keys>(x, segment, work);
        return;
    }
    accompany_chunks<T, Keys, true>(x, segment, work);
    multiply_chunks<Keys, true>([&]() __attribute__((always_inline)) { scan_columns<T, Keys>(x, segment, work); });
}

} // namespace

#define SCAN(name, type, keys)                                                                                         \
    KERNEL((prefill::walk_threads<keys, true>()), (prefill::walk_residency<keys, true>()))                             \
    void dw_prefill_scan_##name##_k##keys(dwk_prefill_scan_args x) { scan<type, keys>(x); }

SCAN_SHARED_BYTES(64)
SCAN_SHARED_BYTES(96)
SCAN_SHARED_BYTES(128)
SCAN_SHARED_BYTES(192)
SCAN_SHARED_BYTES(256)

SCAN(bf16, Bf16, 64)
SCAN(bf16, Bf16, 96)
SCAN(bf16, Bf16, 128)
SCAN(bf16, Bf16, 192)
SCAN(bf16, Bf16, 256)
SCAN(f16, F16, 64)
SCAN(f16, F16, 96)
SCAN(f16, F16, 128)
SCAN(f16, F16, 192)
SCAN(f16, F16, 256)
