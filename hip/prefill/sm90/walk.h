// Walk over chunks on sm_90a: implements ../walk.h.
#pragma once

#include "copies.h"
#include "step.h"

namespace prefill {

// Whether a chunk's outputs are stored, and its slots given back, at its end.
#ifdef PREFILL_FUSED
constexpr bool ends_whole = true;
template <class> struct ChunkOutput : OutputPairs {
    DEVICE_MEMBER ChunkOutput(const void *, const dwk_token_strides &, const Segment &, int, u32) {}
};
constexpr int values_ahead = 2;
#else
constexpr int values_ahead = 0;
constexpr bool ends_whole = false;
template <class> using ChunkOutput = Output;
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
          rest(s.end - s.begin), reader(reader_of(unit...)), unit(in_ring(unit...)) {
        fetch(x, 0);
        fetch(x, 1);
    }

    // Tokens left in the segment.
    DEVICE_MEMBER int left() const { return rest; }

    // Computes one chunk. Every warp takes part in the products, even without value columns.
    DEVICE_MEMBER void step(State<Keys> &state, const dwk_prefill_scan_args &x) {
        const dwk_prefill_scan_args &y = arch::reread(x);
        reader.wait();
        const Next next(*this, y);
        prefill::step<T, Keys, Outputs>(state, current(), next, y.scale, rest <= chunk);
        advance(y);
    }
    // Makes the state ready to be stored: it always is on this target.
    DEVICE_MEMBER void complete(State<Keys> &) {}
    // Called before the first chunk.
    DEVICE_MEMBER void begin(const State<Keys> &state) { current().prepare_reads(state); }
    // Called after the last chunk.
    DEVICE_MEMBER void finish() {
        if constexpr (Outputs && !registers_are_short(Keys) && !ends_whole) {
            if (reader.has_previous()) {
                o.store_some(rest + chunk);
            }
        }
        if constexpr (walks_units) {
            if (unit) {
                reader.end_unit();
                unit->reader = reader;
            }
        }
    }

  private:
    // Gives back the previous chunk's stage when this chunk's first product is complete. Copies to the stage then do
    // not compete with that product's loads from shared memory.
    class Next {
      public:
        DEVICE_MEMBER Next(Chunks &chunks, const dwk_prefill_scan_args &x) : chunks(chunks), x(x) {}
        // Stores the previous chunk's outputs, if they were not stored at its end.
        DEVICE_MEMBER void store() const {
            if constexpr (Outputs && !ends_whole) {
                if (chunks.reader.has_previous()) {
                    chunks.o.store();
                }
            }
        }
        DEVICE_MEMBER void release() const {
            if constexpr (!ends_whole) {
                chunks.give_back_previous();
            }
        }
        // Copies V of the chunk after the next one, once V of this one has been read, if no other warps do.
        DEVICE_MEMBER void fetch() const { chunks.fetch(x, values_ahead); }

      private:
        Chunks &chunks;
        const dwk_prefill_scan_args &x;
    };
    DEVICE_MEMBER void give_back_previous() const {
        if (walks_units && unit) {
            reader.template give_back_previous<true>(rest);
        } else {
            reader.template give_back_previous<false>(rest);
        }
    }
    typedef UnitInRing<Stage> Unit;
    static DEVICE_MEMBER RingReader<Stage> reader_of() { return RingReader<Stage>(prefill::group<Stage>()); }
    static DEVICE_MEMBER RingReader<Stage> reader_of(const Unit &unit) { return unit.reader; }
    static DEVICE_MEMBER Unit *in_ring() { return nullptr; }
    static DEVICE_MEMBER Unit *in_ring(Unit &unit) { return &unit; }
    DEVICE_MEMBER void fetch([[maybe_unused]] const dwk_prefill_scan_args &x, [[maybe_unused]] int ahead) {
#ifdef PREFILL_FUSED
        reader.copy_values(x, ahead, Outputs || has_values ? rest - ahead * chunk : 0);
#endif
    }
    DEVICE_MEMBER Chunk<T, Keys, Outputs> current() {
        return Chunk<T, Keys, Outputs>(rederived ? ring() : memory, reader.slots(), has_values, o, reads);
    }
    DEVICE_MEMBER void advance([[maybe_unused]] const dwk_prefill_scan_args &x) {
        if constexpr (ends_whole) {
            if constexpr (Outputs) {
                reader.store(x, o, rest);
            }
            reader.give_back();
        } else if (Outputs && registers_are_short(Keys)) {
            o.store_some(rest);
        }
        rest -= chunk;
        reader.advance();
    }

    char *const memory;
    const bool has_values;
    ChunkOutput<Stage> o;
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
DEVICE void run_helper_waves(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
    typedef prefill::Stage<Keys, Outputs> Stage;
    if (arch::wave() < scan_waves * groups<Stage>()) {
        return;
    }
    if constexpr (Stage::most_groups > 1) {
        arch::give_registers<copying_registers>();
    }
    Copier<Keys, Outputs>(x, segment, work.head, work.key_head, work.slab * slab_columns<Keys, Outputs>()).run();
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

// Walks units workgroup(), workgroup() + workgroups(), ... of `units`. locate(unit, work, segment) says whether a unit
// has chunks; f(segment, work, unit) then walks them, in the warps that multiply. Warps that copy run ahead into the
// next unit.
template <class T, int Keys, class Locate, class F>
DEVICE void walk_units(const dwk_prefill_scan_args &x, int units, const Locate &locate, const F &f) {
    typedef prefill::Stage<Keys, true> Stage;
    if (arch::wave() >= scan_waves * groups<Stage>()) {
        typedef prefill::Copier<Keys, true> Copier;
        if constexpr (Stage::most_groups > 1) {
            arch::give_registers<copying_registers>();
        }
        Copier::clear_stages();
        typename Copier::Place at;
#pragma unroll 1
        for (int unit = arch::workgroup(); unit < units; unit += arch::workgroups()) {
            Work work;
            Segment segment;
            if (locate(unit, work, segment)) {
                Copier(x, segment, work.head, work.key_head, work.slab * slab_columns<Keys, true>()).run(at);
            }
        }
        Copier::end(at);
        arch::end_wave();
    }
    run_state_waves<Keys, true>([&]() __attribute__((always_inline)) {
        UnitInRing<Stage> at{arch::workgroup(), RingReader<Stage>(prefill::group<Stage>())};
#pragma unroll 1
        for (; at.unit < units; at.unit += arch::workgroups()) {
            Work work;
            Segment segment;
            if (locate(at.unit, work, segment)) {
                f(segment, work, at);
            }
        }
        arch::wait_for_previous_kernel();
    });
}

} // namespace prefill
