// Gates of a unit on sm_90a: the gates of a value head are loaded while the head before is worked on.
#pragma once

#include "../gates.h"

namespace prefill {

class GateLoader {
  public:
    struct Memory {};
    DEVICE_MEMBER GateLoader(const Unit &unit, int group, Memory &) : unit(unit), group(group), token(arch::thread()) {}

    DEVICE_MEMBER void request_first(const dwk_prefill_prepare_args &x) { request(x, unit.first_head); }
    DEVICE_MEMBER void keep_first() {}
    DEVICE_MEMBER Gates of(const dwk_prefill_prepare_args &y, int, int head) const {
        return reader(y).gates_of(head, [&]() __attribute__((always_inline)) { return loaded; });
    }
    DEVICE_MEMBER void request_next(const dwk_prefill_prepare_args &y, int v) {
        if (v + 1 < unit.end_head) {
            request(y, v + 1);
        }
    }

  private:
    DEVICE_MEMBER GateReader reader(const dwk_prefill_prepare_args &y) const {
        return GateReader(y, unit.sequence, unit.begin + token, token < unit.rows);
    }
    DEVICE_MEMBER void request(const dwk_prefill_prepare_args &y, int v) {
        loaded = reader(y).load_ahead(dispatch::value_head(y, unit.key_head, group, v));
    }

    const Unit unit;
    const int group, token;
    Gates loaded{};
};

} // namespace prefill
