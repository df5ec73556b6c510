"""A layer on the simulator against NumPy in double precision, without the roundings between its stages."""

import unittest

import deltawave as dw

from . import reference
from .common import Numbers, needs_numpy, np, poisoned, simulator

HK, HV, K, V, WIDTH, SLOTS = 1, 2, 16, 128, 4, 6
CHANNELS, VALUES = 2 * HK * K + HV * V, HV * V
# Two decodes, then prefills, one of them empty; a row belongs to none.
DECODES, OFFSETS, TOKENS = 2, [0, 1, 2, 40, 40, 49], 50
SPEC = dw.LayerSpec(HK, HV, K, V)


class Step:
    """The tensors of a step, and what they are in double precision."""

    def __init__(self, seed=1):
        numbers = Numbers(seed)

        def make(name, low, high, shape, dtype):
            self.tensors[name], self.exact[name] = numbers.uniform(low, high, shape, dtype)

        self.tensors, self.exact = {}, {}
        make("x", -1, 1, (TOKENS, CHANNELS + VALUES), "bf16")
        make("a", -1, 1, (TOKENS, HV), "bf16")
        make("b", -1, 1, (TOKENS, HV), "bf16")
        make("conv_weight", -1, 1, (CHANNELS, WIDTH), "bf16")
        make("conv_bias", -1, 1, (CHANNELS,), "f32")
        make("a_log", 0, 1, (HV,), "f32")
        make("dt_bias", -4, -2, (HV,), "f32")
        make("norm_weight", 0.5, 1.5, (V,), "f32")
        make("conv_state", -1, 1, (SLOTS, CHANNELS, WIDTH - 1), "bf16")
        make("pool", -1, 1, (SLOTS, HV, K, V), "f32")
        # The second decode is padding, the last prefills, the empty one too, start anew.
        self.slots, self.has = np.array([4, -1, 0, 3, 1], np.int32), np.array([1, 1, 1, 0, 0], bool)
        self.tensors["slots"], self.tensors["has_initial_state"] = map(simulator().array, (self.slots, self.has))
        self.y = poisoned((TOKENS, HV, V), "bf16")

    def launch(self, plan, **more):
        plan.launch(**self.tensors, y=self.y, **more)
        return self.y.tobytes(), self.tensors["conv_state"].tobytes(), self.tensors["pool"].tobytes()

    def wanted(self):
        exact = dict(self.exact)
        rows, pools = exact.pop("x"), [exact.pop(name) for name in ("conv_state", "pool")]
        starts = [pool[self.slots] * self.has.reshape(-1, *[1] * (pool.ndim - 1)) for pool in pools]
        z = rows[:, CHANNELS:].reshape(TOKENS, HV, V)
        return reference.layer(rows[:, :CHANNELS], z, **exact, cu_seqlens=OFFSETS, conv_states=starts[0],
                               states=starts[1])


@needs_numpy
class Layer(unittest.TestCase):
    def test_a_mixed_step_in_place(self):
        step = Step()
        before = {name: dw.to_float(step.tensors[name]) for name in ("conv_state", "pool")}
        y, conv_states, states = step.wanted()
        step.launch(dw.Layer.packed(simulator(), SPEC, OFFSETS, TOKENS, DECODES))
        found = dw.to_float(step.y)
        rows = [t for t in range(OFFSETS[-1]) if t != 1]
        self.assertLess(reference.error(found[rows], y[rows]), 1e-2)
        self.assertTrue((found[[1, OFFSETS[-1]]] == 0).all(), "padding, and a row of nobody")
        used = [0, 2, 4]
        after = {name: dw.to_float(step.tensors[name]) for name in before}
        self.assertTrue((after["conv_state"][step.slots[used]] == conv_states[used]).all())
        self.assertLess(reference.error(after["pool"][step.slots[used]], states[used]), 1e-2)
        # A sequence without tokens keeps its states, though it is new, and so do slots of nobody.
        for name, pool in before.items():
            self.assertTrue((after[name][[2, 3, 5]] == pool[[2, 3, 5]]).all(), name)

    def test_lengths_on_the_device(self):
        host = Step().launch(dw.Layer.packed(simulator(), SPEC, OFFSETS, TOKENS, DECODES))
        plan = dw.Layer.device(simulator(), SPEC, TOKENS, len(OFFSETS) - 1, DECODES)
        lengths = simulator().array(np.array(OFFSETS, np.int32))
        workspace = simulator().empty((plan.workspace_bytes,), "u8")
        self.assertEqual(Step().launch(plan, cu_seqlens=lengths, workspace=workspace), host)
        self.assertEqual(workspace[:4].tobytes(), bytes(4))
        # An entry that is no decode's is replaced, and reported.
        lengths[1] = 7
        self.assertEqual(Step().launch(plan, cu_seqlens=lengths, workspace=workspace), host)
        self.assertEqual(workspace[:4].tobytes(), bytes([2, 0, 0, 0]))

    def test_where_the_projections_lie(self):
        step = Step()
        wanted = step.launch(dw.Layer.packed(simulator(), SPEC, OFFSETS, TOKENS, DECODES))
        # One key head: its q, k, v and z are the row.
        step = Step()
        plan = dw.Layer.packed(simulator(), SPEC, OFFSETS, TOKENS, DECODES)
        self.assertEqual(step.launch(plan, x_layout="interleaved"), wanted)
        step = Step()
        rows = step.tensors.pop("x").reshape(TOKENS, 1, -1)
        ends = [0, K, 2 * K, CHANNELS, CHANNELS + VALUES]
        parts = [rows[:, :, begin:end] for begin, end in zip(ends, ends[1:])]
        more = dict(zip(("x_q", "x_k", "x_v", "z"), parts), x_layout="separate")
        self.assertEqual(step.launch(plan, **more), wanted)

    def test_what_is_refused(self):
        def packed(spec=SPEC, offsets=OFFSETS, decodes=DECODES):
            return lambda: dw.Layer.packed(simulator(), spec, offsets, TOKENS, decodes)

        def launch(**changed):
            step = Step()
            step.tensors.update(changed)
            return lambda: step.launch(packed()())

        few, turned = simulator().zeros((2, HV, K, V)), simulator().zeros((SLOTS, HV, V, K))
        for start, call in (("decodes", packed(decodes=3)), ("eps: 0", packed(dw.LayerSpec(HK, HV, K, V, eps=0.0))),
                            ("gate: 'tanh'", packed(dw.LayerSpec(HK, HV, K, V, gate="tanh"))),
                            ("width", packed(dw.LayerSpec(HK, HV, K, V, width=5))),
                            ("cu_seqlens", packed(offsets=[0, 2, 1], decodes=0)), ("pool", launch(pool=turned)),
                            ("conv_state", launch(pool=few)), ("z", launch(z=Step().y[:, :1])),
                            ("x_layout", launch(x_layout="tiled")), ("slots", launch(slots=Step().tensors["slots"][:2]))):
            with self.subTest(start), self.assertRaises(dw.ArgumentError) as caught:
                call()
            self.assertTrue(str(caught.exception).startswith(start), caught.exception)
