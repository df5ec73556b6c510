"""The convolution on the simulator against NumPy in double precision."""

import unittest

import deltawave as dw

from . import reference
from .common import Numbers, needs_numpy, np, poisoned, simulator

HK, HV, K, V, WIDTH = 2, 4, 12, 10, 4
KEYS, VALUES = HK * K, HV * V
CHANNELS = 2 * KEYS + VALUES
# A sequence shorter than the width, an empty one, a longer one; a row belongs to none.
OFFSETS, TOKENS, SLOTS = [0, 2, 2, 11], 12, 5


def spec(**more):
    return dw.ConvSpec(HK, HV, K, V, WIDTH, **more)


def outputs(dtype="bf16"):
    return {"q": poisoned((TOKENS, HK, K), dtype), "k": poisoned((TOKENS, HK, K), dtype),
            "v": poisoned((TOKENS, HV, V), dtype)}


def joined(out):
    """What came out, as rows of channels."""
    return np.concatenate([dw.to_float(out[name]).reshape(TOKENS, -1) for name in "qkv"], 1)


@needs_numpy
class Conv(unittest.TestCase):
    def close(self, found, wanted, step):
        """Within one unit in the last place of bf16 or fp16."""
        self.assertTrue(np.isfinite(found).all())
        np.testing.assert_allclose(found, wanted, rtol=step, atol=1e-6)

    def test_flat_rows_and_a_pool_of_states(self):
        for dtype, step in (("bf16", 2 ** -8), ("fp16", 2 ** -11)):
            for layout in ("channel_major", "token_major"):
                with self.subTest(dtype=dtype, layout=layout):
                    self.flat(dtype, step, layout)

    def flat(self, dtype, step, layout):
        numbers = Numbers(3)
        x, exact = numbers.uniform(-2, 2, (TOKENS, CHANNELS + 7), dtype)
        weight, exact_weight = numbers.uniform(-1, 1, (CHANNELS, WIDTH), "f32")
        bias, exact_bias = numbers.uniform(-1, 1, (CHANNELS,), dtype)
        shape = (SLOTS, CHANNELS, WIDTH - 1)
        token_major = layout == "token_major"
        shape = (shape[0], shape[2], shape[1]) if token_major else shape
        state, before = numbers.uniform(-2, 2, shape, dtype)
        before = before.swapaxes(1, 2) if token_major else before
        # The first sequence's slot reads as zeros, the second sequence is empty, the third has garbage's neighbour.
        slots, has = np.array([4, 1, 0], np.int32), np.array([False, True, True])
        out = outputs(dtype)
        lengths = simulator().array(np.array(OFFSETS, np.int64))
        plan = dw.Conv.device(simulator(), spec(dtype=dtype), TOKENS, 3)
        plan.launch(x=x, weight=weight, bias=bias, state=state, state_layout=layout, slots=simulator().array(slots),
                    has_initial_state=simulator().array(has), cu_seqlens=lengths, **out)
        start = np.where(has[:, None, None], before[slots], 0)
        y, states = reference.conv(exact[:, :CHANNELS], exact_weight, exact_bias, OFFSETS, start)
        states[1] = before[1]
        found = joined(out)
        self.close(found[:OFFSETS[-1]], y[:OFFSETS[-1]], step)
        self.assertTrue((found[OFFSETS[-1]:] == 0).all())
        wanted = before.copy()
        wanted[slots] = states
        after = dw.to_float(state)
        np.testing.assert_array_equal(after.swapaxes(1, 2) if token_major else after, wanted)

    def test_other_ways_for_rows_to_lie(self):
        numbers = Numbers(4)
        weight, exact_weight = numbers.uniform(-1, 1, (CHANNELS, WIDTH), "bf16")
        x, exact = numbers.uniform(-2, 2, (TOKENS, CHANNELS), "bf16")
        zeros = np.zeros((3, CHANNELS, WIDTH - 1))
        wanted, _ = reference.conv(exact, exact_weight, 0, OFFSETS, zeros, silu=False)
        plan = dw.Conv.packed(simulator(), spec(activation="none"), OFFSETS, TOKENS)
        parts = [x[:, :KEYS], x[:, KEYS:2 * KEYS], x[:, 2 * KEYS:]]
        blocks = [p.reshape(TOKENS, HK, -1) for p in parts]
        z = np.zeros((TOKENS, HK, VALUES // HK), x.dtype)
        interleaved = simulator().array(np.concatenate([*blocks, z], 2).reshape(TOKENS, -1))
        separate = {f"x_{name}": simulator().array(b) for name, b in zip("qkv", blocks)}
        for given in ({"x": x}, {"x": interleaved, "x_layout": "interleaved"}, {**separate, "x_layout": "separate"}):
            with self.subTest(layout=given.get("x_layout", "flat")):
                out = outputs()
                plan.launch(**given, weight=weight, **out)
                self.close(joined(out)[:OFFSETS[-1]], wanted[:OFFSETS[-1]], 2 ** -8)

    def test_norms_and_gates_in_the_launch(self):
        numbers = Numbers(7)
        x, exact = numbers.uniform(-2, 2, (TOKENS, CHANNELS), "bf16")
        weight, exact_weight = numbers.uniform(-1, 1, (CHANNELS, WIDTH), "bf16")
        # Rows of each key head: b of its value heads, then a of them.
        ba, exact_ba = numbers.uniform(-4, 4, (TOKENS, HK, 2, HV // HK), "bf16")
        a_log, exact_a_log = numbers.uniform(-1, 1, (HV,), "f32")
        dt_bias, exact_dt_bias = numbers.uniform(-1, 1, (HV,), "bf16")
        g, beta, out = poisoned((TOKENS, HV), "f32"), poisoned((TOKENS, HV), "f32"), outputs()
        plan = dw.Conv.packed(simulator(), spec(qk_l2norm=True), OFFSETS, TOKENS)
        gates = {"a": ba[:, :, 1], "b": ba[:, :, 0], "a_log": a_log, "dt_bias": dt_bias}
        plan.launch(x=x, weight=weight, **gates, g=g, beta=beta, allow_neg_eigval=True, **out)
        y, _ = reference.conv(exact, exact_weight, 0, OFFSETS, np.zeros((3, CHANNELS, WIDTH - 1)))
        keys = y[:, :2 * KEYS].reshape(TOKENS, -1, K)
        y[:, :2 * KEYS] = reference.l2_normalised(keys).reshape(TOKENS, -1)
        self.close(joined(out)[:OFFSETS[-1]], y[:OFFSETS[-1]], 2 ** -8)
        flat = exact_ba.transpose(2, 0, 1, 3).reshape(2, TOKENS, HV)
        wanted = reference.gates(flat[1], flat[0], exact_a_log, exact_dt_bias, True)
        for found, exact in zip((g, beta), wanted):
            np.testing.assert_allclose(found, exact, rtol=2e-6)
        # The operation on its own takes the same.
        alone = poisoned((TOKENS, HV), "f32"), poisoned((TOKENS, HV), "f32")
        dw.gate(simulator(), **gates, g=alone[0], beta=alone[1], allow_neg_eigval=True)
        self.assertEqual([x.tobytes() for x in alone], [g.tobytes(), beta.tobytes()])

    def test_padding(self):
        x, _ = Numbers(5).uniform(-2, 2, (TOKENS, CHANNELS), "bf16")
        weight, _ = Numbers(6).uniform(-1, 1, (CHANNELS, WIDTH), "bf16")
        state = poisoned((SLOTS, CHANNELS, WIDTH - 1), "bf16")
        before, out = state.tobytes(), outputs()
        plan = dw.Conv.packed(simulator(), spec(), OFFSETS, TOKENS)
        plan.launch(x=x, weight=weight, state=state, slots=simulator().array(np.array([-1, -1, SLOTS], np.int32)), **out)
        self.assertTrue((joined(out) == 0).all())
        self.assertEqual(state.tobytes(), before)
