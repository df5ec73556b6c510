"""A prompt, then tokens one by one, from one pool of states: what a serving engine does.

    python3 prefill.py          on the simulator

Two prompts of 65 and 127 tokens leave their states in slots 3 and 0 of the pool. Two steps of decode go on from there. The
last line compares them with a prefill of prompt and tokens together.
"""

from typing import Any

import numpy as np
import numpy.typing

import deltawave as dw

KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 128
LENGTHS, STEPS, SLOTS = (65, 127), 2, (3, 0)
Numbers = numpy.typing.NDArray[Any]


def main() -> None:
    context = dw.Context("simulator")
    random = np.random.default_rng(0)
    longest = max(LENGTHS) + STEPS

    def drawn(heads: int, low: float, high: float) -> Numbers:
        return random.uniform(low, high, (len(LENGTHS), longest, heads, DIM))

    q, k, v = drawn(KEY_HEADS, -0.1, 0.1), drawn(KEY_HEADS, -0.1, 0.1), drawn(VALUE_HEADS, -1, 1)
    g = random.uniform(-0.2, 0, (len(LENGTHS), longest, VALUE_HEADS))
    beta = random.uniform(0, 1, g.shape)

    spec = dw.PrefillSpec(KEY_HEADS, VALUE_HEADS, DIM, DIM)
    slots = context.array(np.array(SLOTS, np.int32))

    def prefill(extra: int, pool: object) -> Numbers:
        """Outputs of the last token of each prompt with `extra` tokens after it."""
        ends = [0, *np.cumsum([length + extra for length in LENGTHS])]
        plan = dw.Prefill.packed(context, spec, ends, tokens=ends[-1])

        def packed(x: Numbers, dtype: str) -> object:
            return context.array(np.concatenate([x[n, :length + extra] for n, length in enumerate(LENGTHS)]), dtype)

        o = context.empty((ends[-1], VALUE_HEADS, DIM), "bf16")
        plan.launch(q=packed(q, "bf16"), k=packed(k, "bf16"), v=packed(v, "bf16"), g=packed(g, "f32"),
                    beta=packed(beta, "f32"), o=o, pool=pool, slots=slots,
                    has_initial_state=context.array(np.zeros(len(LENGTHS), np.uint8)))
        context.synchronize()
        return dw.to_float(o)[np.array(ends[1:]) - 1]

    pool = context.zeros((8, VALUE_HEADS, DIM, DIM))
    prefill(0, pool)
    decode = dw.Decode(context, dw.DecodeSpec(KEY_HEADS, VALUE_HEADS, DIM, DIM), batch=len(LENGTHS))
    o = context.empty((len(LENGTHS), VALUE_HEADS, DIM), "bf16")
    for step in range(STEPS):
        at = (np.arange(len(LENGTHS)), np.array(LENGTHS) + step)
        decode.launch(q=context.array(q[at], "bf16"), k=context.array(k[at], "bf16"), v=context.array(v[at], "bf16"),
                      g=context.array(g[at], "f32"), beta=context.array(beta[at], "f32"), pool=pool, slots=slots, o=o)
    context.synchronize()
    together = prefill(STEPS, context.zeros((8, VALUE_HEADS, DIM, DIM)))
    difference = np.abs(dw.to_float(o) - together).max() / np.abs(together).max()
    print(f"{context.name}: {STEPS} decoded tokens differ from a prefill by {difference:.1e} of the largest output")


if __name__ == "__main__":
    main()
