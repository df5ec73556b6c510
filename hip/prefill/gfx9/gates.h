// Gates of a unit on CDNA: the gates of four value heads are loaded together and wait in LDS. They lie in one line of
// memory, which other accesses would drive out of the caches between the heads.
#pragma once

#include "../gates.h"

namespace prefill {

class GateLoader {
    static constexpr int at_once = 4;

  public:
    struct Memory {
        Gates at[at_once][chunk];
    };
    DEVICE_MEMBER GateLoader(const Unit &unit, int group, Memory &memory)
        : unit(unit), group(group), token(arch::thread()), memory(memory) {}

    DEVICE_MEMBER void request_first(const dwk_prefill_prepare_args &x) { request(x, unit.first_head); }
    DEVICE_MEMBER void keep_first() { keep(); }
    DEVICE_MEMBER Gates of(const dwk_prefill_prepare_args &y, int v, int head) const {
        return reader(y).gates_of(
            head, [&]() __attribute__((always_inline)) { return memory.at[(v - unit.first_head) % at_once][token]; });
    }
    DEVICE_MEMBER void request_next(const dwk_prefill_prepare_args &y, int v) {
        if (v + 1 < unit.end_head && (v + 1 - unit.first_head) % at_once == 0) {
            request(y, v + 1);
            keep();
        }
    }

  private:
    DEVICE_MEMBER GateReader reader(const dwk_prefill_prepare_args &y) const {
        return GateReader(y, unit.sequence, unit.begin + token, token < unit.rows);
    }
    DEVICE_MEMBER void request(const dwk_prefill_prepare_args &y, int v) {
        reader(y).load_ahead(several, dispatch::value_head(y, unit.key_head, group, v),
                             y.flags & DWK_TILED_HEADS ? y.key_heads : 1, unit.end_head - v);
    }
    DEVICE_MEMBER void keep() const {
        for (int i = 0; i < at_once; ++i) {
            memory.at[i][token] = several[i];
        }
    }

    const Unit unit;
    const int group, token;
    Memory &memory;
    Gates several[at_once];
};

} // namespace prefill
