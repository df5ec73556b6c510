// Gates of a unit on sm_90a: the gates of a value head are loaded while the head before is worked on.
#pragma once

#include "../gates.h"

namespace prefill {

class GateLoader {
  public:
    struct Memory {};
    DEVICE_MEMBER GateLoader(const dwk_prefill_prepare_args &x, const Unit &unit, int group, Memory &)
        : x(x), unit(unit), group(group), token(arch::thread()) {}

    DEVICE_MEMBER void request_first() { loaded = reader().load_ahead(head_of(unit.first_head)); }
    DEVICE_MEMBER void keep_first() {}
    DEVICE_MEMBER Gates of(const dwk_prefill_prepare_args &, int, int head) const {
        return reader().gates_of(head, [&]() __attribute__((always_inline)) { return loaded; });
    }
    DEVICE_MEMBER void request_next(const dwk_prefill_prepare_args &, int v) {
        if (v + 1 < unit.end_head) {
            loaded = reader().load_ahead(head_of(v + 1));
        }
    }

  private:
    DEVICE_MEMBER GateReader reader() const {
        return GateReader(x, unit.sequence, unit.begin + token, token < unit.rows);
    }
    DEVICE_MEMBER int head_of(int v) const { return dispatch::value_head(x, unit.key_head, group, v); }

    const dwk_prefill_prepare_args &x;
    const Unit &unit;
    const int group, token;
    Gates loaded{};
};

} // namespace prefill
