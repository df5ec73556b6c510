// Ring of prefill_fused on sm_90a. Chunk n is in slot n % 4 of K and Q, n % 3 of T, P and the row factors, and n % 2 of
// V. Each warp that multiplies copies its own columns of V.
#pragma once

#include "../fused_mode.h"

#include "../../tensor/rows.h"
#include "../segment.h"
#include "stage.h"

namespace prefill {

template <int Keys, bool Outputs> struct Stage {
    static constexpr bool outputs = Outputs;
    static constexpr int most_groups = 2; // warpgroups that multiply
    static constexpr int panels = (Keys + 63) / 64;
    static constexpr int key_slots = 4, matrix_slots = 3, value_slots = 2;
    // Offsets in a slot.
    static constexpr u32 k = 0;
    static constexpr u32 q = k + panels * panel_bytes;
    static constexpr u32 key_bytes = q + (Outputs ? panels * panel_bytes : 0);
    static constexpr u32 t = 0;
    static constexpr u32 p = t + panel_bytes;
    static constexpr u32 matrix_bytes = p + (Outputs ? panel_bytes : 0);
    static constexpr u32 v = 0;
    static constexpr u32 value_bytes = most_groups * panel_bytes;
    // Offsets in the ring.
    static constexpr u32 matrices = key_slots * key_bytes;
    static constexpr u32 values = matrices + matrix_slots * matrix_bytes;
    static constexpr u32 factors = values + value_slots * value_bytes;
    static constexpr u32 factor_bytes = row_factors * chunk * 4 + 16;
    static constexpr u32 barriers = factors + matrix_slots * factor_bytes;
    static constexpr u32 maker_memory = (barriers + 8 * (key_slots + matrix_slots) + 127) / 128 * 128; // MakerMemory
};

// The work of a workgroup, in shared memory, because a register that is spilled would come back from beyond the L1
// cache. Addresses are those of its first row.
struct WorkMemory {
    const char *q, *k, *v, *g, *beta;
    char *o;
    u32 g_step, beta_step; // bytes from row to row
    int sequence, begin, end, head, key_head, column;
    int quiet;   // tokens whose outputs are not written
    int aligned; // whether 16-byte accesses can read all rows
    int words;   // whether two elements of o form an aligned word

    DEVICE_MEMBER void set(const dwk_prefill_fused_args &x, const Segment &segment, int of_head, int of_key_head,
                           int first) {
        const auto rows = [&](const void *p, const dwk_token_strides &s, int h) __attribute__((always_inline)) {
            return row_address(p, s, segment.sequence, segment.begin, h);
        };
        const dwk_prefill_scan_args &y = x.scan;
        sequence = segment.sequence;
        begin = segment.begin;
        end = segment.end;
        head = of_head;
        key_head = of_key_head;
        column = first;
        q = rows(y.q, y.q_strides, key_head);
        k = rows(y.k, y.k_strides, key_head);
        v = rows(y.v, y.v_strides, head) + column * 2;
        aligned = arch::aligned_rows(q, (u32)y.q_strides.token * 2) &&
                  arch::aligned_rows(k, (u32)y.k_strides.token * 2) &&
                  arch::aligned_rows(v, (u32)y.v_strides.token * 2);
        o = (char *)rows(y.o, y.o_strides, head) + column * 2;
        words = (((u32)(u64)o | (u32)y.o_strides.token * 2) & 3) == 0;
        quiet = segment.quiet;
        const auto gates = [&](const void *p, const dwk_token_strides &s, int type,
                               u32 &step) __attribute__((always_inline)) {
            const int size = type == DWK_F32 ? 4 : 2;
            step = (u32)s.token * size;
            return p ? (const char *)p + (sequence * s.sequence + begin * s.token + head * s.head) * size : nullptr;
        };
        g = gates(x.prepare.g, x.prepare.g_strides, x.prepare.g_type, g_step);
        beta = gates(x.prepare.beta, x.prepare.beta_strides, x.prepare.beta_type, beta_step);
    }
};

// Barriers between the warps that make chunks and those that multiply. Chunk `number` is full when the warps
// that make have made it, and finished when all warps that multiply have.
template <class Stage> struct Handover {
    static DEVICE_MEMBER void begin() {
        for (int i = 0; i < Stage::matrix_slots; ++i) {
            arch::phases_begin(full(i), scan_waves);
        }
        for (int i = 0; i < Stage::key_slots; ++i) {
            arch::phases_begin(finished(i), Stage::most_groups * scan_waves);
        }
    }
    static DEVICE_MEMBER u32 full(int slot) { return shared_address(ring()) + Stage::barriers + 8 * slot; }
    static DEVICE_MEMBER u32 finished(int number) {
        return shared_address(ring()) + Stage::barriers + 8 * (Stage::matrix_slots + number % Stage::key_slots);
    }
    // Waits until the chunk is finished; at once for numbers below 0.
    static DEVICE_MEMBER void wait_finished(int number) {
        if (number >= 0) {
            arch::phase_wait(finished(number), number / Stage::key_slots);
        }
    }
};

template <class Stage> DEVICE const WorkMemory &work_memory() {
    return *(const WorkMemory *)(ring() + Stage::maker_memory);
}

// Reads the ring chunk by chunk, in the warps that multiply.
template <class Stage> class RingReader {
  public:
    DEVICE_MEMBER explicit RingReader(int) {}
    // Waits until the chunk is there.
    DEVICE_MEMBER void wait() const {
        arch::await_copies<1>(); // of V; that of the next chunk may be under way
        arch::phase_wait(Handover<Stage>::full(number % Stage::matrix_slots), number / Stage::matrix_slots);
    }
    DEVICE_MEMBER Slots slots() const {
        const u32 slot = number % Stage::matrix_slots;
        return Slots{number % Stage::key_slots * Stage::key_bytes, Stage::matrices + slot * Stage::matrix_bytes,
                     Stage::values + number % Stage::value_slots * Stage::value_bytes,
                     Stage::factors + slot * Stage::factor_bytes};
    }
    DEVICE_MEMBER void give_back() const {
        arch::wave_sync();
        if (arch::lane() == 0) {
            arch::phase_arrive(Handover<Stage>::finished((int)number));
        }
    }
    // Stores outputs of the chunk, whose first `rows` rows exist.
    template <class Pairs> DEVICE_MEMBER void store(const dwk_prefill_scan_args &x, const Pairs &out, int rows) const {
        const WorkMemory &work = work_memory<Stage>();
        const int lane = arch::opaque(arch::lane());
        const int column = prefill::group<Stage>() * 64 + thread_of_group() / arch::lanes * 16 + first_column_of(lane);
        if ((int)number * chunk < work.quiet || column >= x.value_dim - work.column) {
            return;
        }
        const u32 stride = (u32)x.o_strides.token * 2;
        char *const to = work.o + ((u64)(number * chunk + LaneMap(lane).row(0)) * stride + column * 2);
        if (rows >= chunk && work.words) [[likely]] {
            out.store_words(to, stride);
        } else {
            out.store_some(to, stride, rows);
        }
    }
    // Copies this warp's columns of V of the chunk that is `ahead` chunks after this one, of which `rows` are left.
    DEVICE_MEMBER void copy_values(const dwk_prefill_scan_args &x, int ahead, int rows) const {
        const WorkMemory &work = work_memory<Stage>();
        const int lane = arch::opaque(arch::lane()), row = (u32)lane / 2;
        const int of_chunk = number + ahead, group = (thread_of_group() / arch::lanes) * 2 + (lane & 1);
        const int column = prefill::group<Stage>() * 64 + group * 8;
        const u32 stride = (u32)x.v_strides.token * 2;
        const bool inside = column < x.value_dim - work.column;
        const char *from = work.v + ((u64)(u32)(of_chunk * chunk + row) * stride + column * 2);
        u32 to = shared_address(ring()) + Stage::values + of_chunk % Stage::value_slots * Stage::value_bytes +
                 Stage::v + prefill::group<Stage>() * panel_bytes + swizzled(row, group);
        if (rows > 0) {
            if (work.aligned) {
                for (int i = 0; i < chunk / 16; ++i) {
                    copy_async(to + i * 16 * 128, from, inside && row + 16 * i < rows);
                    from += (u64)(16 * stride);
                }
            } else {
#pragma unroll 1
                for (int i = row; i < chunk; i += 16) {
                    store_shared(to, Window(from).gather_b128(inside && i < rows ? 0 : Window::nowhere));
                    from += (u64)(16 * stride);
                    to += 16 * 128;
                }
            }
        }
        arch::commit_copies();
    }
    // Goes on to the next chunk.
    DEVICE_MEMBER void advance() { ++number; }

  private:
    static DEVICE_MEMBER int first_column_of(int lane) { return lane / 4 * 2; }

    u32 number = 0;
};

template <class> struct UnitInRing; // a workgroup walks one unit

} // namespace prefill
