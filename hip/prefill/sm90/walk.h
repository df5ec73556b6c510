// Walk over chunks on sm_90a: implements ../walk.h.
#pragma once

#include "copier.h"
#include "maps.h"
#include "step.h"

namespace prefill {

// Whether a chunk's outputs are stored, and its slots given back, at its end.
#ifdef PREFILL_FUSED
constexpr bool ends_whole = true;
#else
constexpr bool ends_whole = false;
#endif

// Walks a segment's chunks. Copy warps put each chunk into a stage of the ring.
template <class T, int Keys, bool Outputs = true> class Chunks {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    // `unit`: where the workgroup walks several, the place in the ring.
    template <class... Unit>
    DEVICE_MEMBER Chunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int, int wave_column,
                         u32 column_offset, Unit &...unit)
        : memory(ring()), has_values(wave_column < x.value_dim), o(x.o, x.o_strides, s, head, column_offset),
          rest(s.end - s.begin), reader(reader_of(unit...)), unit(in_ring(unit...)) {}

    // Tokens left in the segment.
    DEVICE_MEMBER int left() const { return rest; }

    // Computes one chunk. Every warp takes part in the products, even without value columns.
    DEVICE_MEMBER void step(State<Keys> &state, const dwk_prefill_scan_args &x) {
        const dwk_prefill_scan_args &y = arch::reread(x);
        reader.wait();
        const Next next(*this);
        prefill::step<T, Keys, Outputs>(state, current(), next, y.scale, rest <= chunk);
        advance();
    }
    // Makes the state ready to be stored: it always is on this target.
    DEVICE_MEMBER void complete(State<Keys> &) {}
    // Called before the first chunk.
    DEVICE_MEMBER void begin(const State<Keys> &state) { current().prepare_reads(state); }
    DEVICE_MEMBER void warm_up(State<Keys> &, const dwk_prefill_scan_args &) {}
    // Called after the last chunk.
    DEVICE_MEMBER void finish() {
        if (Outputs && !registers_are_short(Keys) && !ends_whole && reader.has_previous()) {
            o.store_some(rest + chunk);
        }
        if constexpr (walks_units(Keys)) {
            if (unit) {
                if (!Outputs) {
                    reader.end_unit(); // with outputs the final state may come to the last stage first (hand_over)
                }
                unit->reader = reader;
            }
        }
    }

  private:
    // Gives back the previous chunk's stage when this chunk's first product is complete. Copies to the stage then do
    // not compete with that product's loads from shared memory.
    class Next {
      public:
        DEVICE_MEMBER explicit Next(Chunks &chunks) : chunks(chunks) {}
        // Stores the previous chunk's outputs, if they were not stored at its end.
        DEVICE_MEMBER void store() const {
            if (Outputs && !ends_whole && chunks.reader.has_previous()) {
                chunks.o.store();
            }
        }
        DEVICE_MEMBER void release() const {
            if (!ends_whole) {
                chunks.reader.give_back_previous(chunks.unit ? endless : chunks.rest);
            }
        }

      private:
        Chunks &chunks;
    };
    // Tokens left in the ring's view, where more units follow.
    static constexpr int endless = 1 << 30;
    typedef UnitInRing<Stage> Unit;
    static DEVICE_MEMBER RingReader<Stage> reader_of() { return RingReader<Stage>(); }
    static DEVICE_MEMBER RingReader<Stage> reader_of(const Unit &unit) { return unit.reader; }
    static DEVICE_MEMBER Unit *in_ring() { return nullptr; }
    static DEVICE_MEMBER Unit *in_ring(Unit &unit) { return &unit; }
    DEVICE_MEMBER Chunk<T, Keys, Outputs> current() {
        return Chunk<T, Keys, Outputs>(memory, reader.slots(), has_values, o, reads);
    }
    DEVICE_MEMBER void advance() {
        if (Outputs && (registers_are_short(Keys) || ends_whole)) {
            if (ends_whole && rest >= chunk) {
                o.store();
            } else {
                o.store_some(rest);
            }
        }
        if (ends_whole) {
            reader.give_back();
        }
        rest -= chunk;
        reader.advance();
    }

    char *const memory;
    const bool has_values;
    Output o;
    typename Chunk<T, Keys, Outputs>::Reads reads;
    int rest;
    RingReader<Stage> reader;
    Unit *const unit;
};

// Registers per thread: of copy warps, and of multiplying warps beside a second warpgroup (shared) or without (lone).
// The average must not exceed the 168 that each thread is launched with if two warpgroups may multiply.
constexpr int copying_registers = 56, shared_registers = 224, lone_registers = 248;
static_assert(copying_registers + 2 * shared_registers <= 3 * 168 && copying_registers + lone_registers <= 2 * 168,
              "setmaxnreg would wait forever");

// Runs the copy warps, which end here. The other warps return.
template <class T, int Keys, bool Outputs>
DEVICE void run_helper_waves(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work, Maps maps) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    Handover<Stage>::begin();
    if (arch::wave() < scan_waves * groups<Stage>()) {
        return;
    }
    if constexpr (Stage::most_groups > 1) {
        arch::give_registers<copying_registers>();
    }
    Copier<Keys, Outputs>(x, maps, segment, work, work.slab * slab_columns<Keys, Outputs>()).run();
    arch::end_wave();
}

// Runs f() in the warps that multiply. Compiled twice: a lone warpgroup can have more registers for outputs than two
// warpgroups can.
template <int Keys, bool Outputs, class F> DEVICE void run_state_waves(const F &f) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    if constexpr (Stage::most_groups > 1) {
        if constexpr (Outputs) {
            if (groups<Stage>() == 1) {
                arch::take_registers<lone_registers>();
                f();
                arch::end_wave();
            }
        }
        arch::take_registers<shared_registers>();
    }
    f();
}

// Called before the first chunk of a unit. Where initial states come through the ring, each unit begins with a stage
// for it: brings the state to `state`, which is zeros, if the unit has one. Otherwise returns false.
template <int Keys, class Stage>
DEVICE bool start_unit(State<Keys> &state, const dwk_prefill_scan_args &x, UnitInRing<Stage> &unit) {
    if constexpr (Stage::outputs) {
        if (unit.has_starts) {
            unit.reader.wait();
            if (*has_start<Stage>(unit.reader.next_stage())) {
                read_state<Stage, Keys>(state, unit.reader.next_stage(), x.flags & DWK_INITIAL_VALUE_MAJOR);
            }
            unit.reader.skip();
            return true;
        }
    }
    return false;
}

// Called after the last chunk of a unit: writes the state where the copying warps store it from, if they do.
template <int Keys, class Stage>
DEVICE bool hand_over(const State<Keys> &state, const dwk_prefill_scan_args &x, const UnitInRing<Stage> &unit) {
    if constexpr (Stage::outputs) {
        const int stage = unit.reader.last_stage();
        if (stage < 0 || state_place<Stage>(stage, scan_waves - 1)->slot < 0) {
            return false;
        }
        Handover<Stage>::meet();
        write_state<Stage, Keys>(state, stage, x.flags & DWK_FINAL_VALUE_MAJOR);
        arch::publish_shared();
        return true;
    }
    return false;
}
// Gives the last chunk's stage back.
template <class Stage> DEVICE void end_unit(UnitInRing<Stage> &unit) { unit.reader.end_unit(); }

DEVICE bool are_fewer_workgroups_than(int units) { return arch::workgroups() < units; }

// Walks units workgroup(), workgroup() + workgroups(), ... of `units`. locate(unit, work, segment) says what a unit is;
// f(segment, work, unit) walks one that has chunks, in the warps that multiply. Warps that copy run ahead into the next
// unit.
template <class T, int Keys, bool Outputs, class Locate, class F>
DEVICE void walk_units(const dwk_prefill_scan_args &x, Maps maps, int units, const Locate &locate, const F &f) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    Handover<Stage>::begin();
    if (arch::wave() >= scan_waves * groups<Stage>()) {
        typedef prefill::Copier<Keys, Outputs> Copier;
        arch::give_registers<copying_registers>();
        Copier::clear_stages();
        typename Copier::Place at;
#pragma unroll 1
        for (int unit = arch::workgroup(); unit < units; unit += arch::workgroups()) {
            Work work;
            Segment segment;
            const Found found = locate(unit, work, segment);
            if (found == Found::end) {
                break;
            }
            if (found == Found::chunks) {
                Copier(x, maps, segment, work, work.slab * slab_columns<Keys, Outputs>()).run(at);
            }
        }
        Copier::end(x, maps, at);
        arch::end_wave();
    }
    arch::take_registers<shared_registers>();
    UnitInRing<Stage> at{arch::workgroup(), RingReader<Stage>(), maps.has_initial_state()};
#pragma unroll 1
    for (; at.unit < units; at.unit += arch::workgroups()) {
        Work work;
        Segment segment;
        const Found found = locate(at.unit, work, segment);
        if (found == Found::end) {
            break;
        }
        if (found == Found::chunks) {
            f(segment, work, at);
        }
    }
    arch::wait_for_previous_kernel();
    arch::end_wave();
}

} // namespace prefill
