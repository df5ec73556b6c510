// The walk over chunks on sm_90a, as ../walk.h asks for it.
#pragma once

#include "copies.h"
#include "step.h"

namespace prefill {

// The chunks of a segment, one after the other, each in its stage of the ring, which other warps fill.
template <class T, int Keys, bool Outputs = true> class Chunks {
    typedef prefill::Stage<Keys, Outputs> Stage;

  public:
    DEVICE_MEMBER Chunks(const dwk_prefill_scan_args &x, const Segment &s, int head, int, int wave_column,
                         u32 column_offset)
        : memory(ring()), has_values(wave_column < x.value_dim), o(x.o, x.o_strides, s, head, column_offset),
          rest(s.end - s.begin), group(prefill::group<Stage>()) {}

    // Tokens that are left of the segment.
    DEVICE_MEMBER int left() const { return rest; }

    // One chunk. Every warp takes its part in the products, columns or none.
    DEVICE_MEMBER void step(State<Keys> &state, const dwk_prefill_scan_args &x) {
        const dwk_prefill_scan_args &y = arch::reread(x);
        Handover<Stage>::wait_full(group, stage);
        const Next next(*this);
        prefill::step<T, Keys, Outputs>(state, current(), next, y.scale, rest <= chunk);
        advance();
    }
    // After some chunks. The state is complete.
    DEVICE_MEMBER void complete(State<Keys> &) {}
    // Before the first chunk.
    DEVICE_MEMBER void begin(const State<Keys> &state) {
        Chunk<T, Keys, Outputs>(memory, has_values, o, reads).prepare_reads(state);
    }
    // After the last chunk.
    DEVICE_MEMBER void finish() {
        if (Outputs && !registers_are_short(Keys) && before >= 0) {
            o.store_some(rest + chunk);
        }
    }

  private:
    // Gives back the stage of the chunk before when the first product of this one is complete. The copies to it, which
    // take turns with other accesses to shared memory, then do not delay the loads of that product.
    class Next {
      public:
        DEVICE_MEMBER explicit Next(Chunks &chunks) : chunks(chunks) {}
        // Stores the outputs of the chunk before, where they were not stored at its end.
        DEVICE_MEMBER void store() const {
            if (Outputs && chunks.before >= 0) {
                chunks.o.store();
            }
        }
        DEVICE_MEMBER void release() const {
            if (chunks.before >= 0 && chunks.rest > (Stage::count - 1) * chunk) { // else nobody waits for it
                Handover<Stage>::empty(chunks.group, chunks.before);
            }
        }

      private:
        Chunks &chunks;
    };
    DEVICE_MEMBER Chunk<T, Keys, Outputs> current() {
        return Chunk<T, Keys, Outputs>(memory + stage * Stage::bytes, has_values, o, reads);
    }
    DEVICE_MEMBER void advance() {
        if (Outputs && registers_are_short(Keys)) {
            o.store_some(rest);
        }
        rest -= chunk;
        before = stage;
        stage = stage + 1 == Stage::count ? 0 : stage + 1;
    }

    char *const memory;
    const bool has_values;
    Output o;
    typename Chunk<T, Keys, Outputs>::Reads reads;
    int rest;
    int stage = 0, before = -1;
    const int group;
};

// Registers of a thread that copies and of one that multiplies, beside another warpgroup and alone: on average at most
// the 168 that each thread is launched with where two warpgroups may multiply.
constexpr int copying_registers = 56, shared_registers = 224, lone_registers = 248;
static_assert(copying_registers + 2 * shared_registers <= 3 * 168 && copying_registers + lone_registers <= 2 * 168,
              "setmaxnreg would wait forever");

// Runs the warps that copy, which end here; the others return.
template <class T, int Keys, bool Outputs>
DEVICE void run_other_waves(const dwk_prefill_scan_args &x, const Segment &segment, const Work &work) {
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

// Runs f(), the work of the warps that multiply. Outputs take more registers than two warpgroups can have: a warpgroup
// that is alone has code of its own.
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

} // namespace prefill
