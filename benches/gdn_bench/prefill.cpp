#include "prefill.h"

namespace bench {

Tensors::Tensors(const Inputs &x)
    : q(Buffer::of(x.q)), k(Buffer::of(x.k)), v(Buffer::of(x.v)), g(Buffer::of(x.g)), beta(Buffer::of(x.beta)),
      initial_state(Buffer::of(x.states)), o(v.bytes()), final_state(initial_state.bytes()) {
    // NaN: what is not written is found.
    o.fill(0xff);
    final_state.fill(0xff);
}

size_t Tensors::bytes() const {
    return q.bytes() + k.bytes() + v.bytes() + g.bytes() + beta.bytes() + initial_state.bytes() + o.bytes() +
           final_state.bytes();
}

} // namespace bench
