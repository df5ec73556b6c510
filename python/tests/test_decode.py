"""Decode on the simulator: steps against the recurrence in double precision, verified tokens against steps."""

import unittest

import deltawave as dw

from . import reference
from .common import Numbers, needs_numpy, np, poisoned, simulator
from .test_pool import i32, value_major_pool
from .test_prefill import HK, HV, K, V

CHANNELS, WIDTH = 2 * HK * K + HV * V, 4


def spec(**more):
    return dw.DecodeSpec(HK, HV, K, V, **more)


def inputs(rows, seed=8):
    """q, k, v, g, beta: arrays of the device, and in double precision."""
    numbers = Numbers(seed)
    made = {"q": numbers.uniform(-0.3, 0.3, (rows, HK, K), "bf16"), "k": numbers.uniform(-0.3, 0.3, (rows, HK, K), "bf16"),
            "v": numbers.uniform(-1, 1, (rows, HV, V), "bf16"), "g": numbers.uniform(-0.2, 0, (rows, HV), "f32"),
            "beta": numbers.uniform(0, 1, (rows, HV), "f32")}
    return {n: x for n, (x, _) in made.items()}, {n: x for n, (_, x) in made.items()}


@needs_numpy
class Decode(unittest.TestCase):
    def test_a_step_in_place_with_padding(self):
        for dtype, bar in (("f32", 1e-5), ("bf16", 3e-3), ("fp16", 4e-4)):
            with self.subTest(dtype=dtype):
                self.stepped_in_place(dtype, bar)

    def stepped_in_place(self, dtype, bar):
        x, exact = inputs(3)
        pool, before = value_major_pool(dtype)
        slots, has = np.array([4, -1, 2]), np.array([True, True, False])
        o = poisoned((3, HV, V), "bf16")
        plan = dw.Decode(simulator(), spec(), 3)
        plan.launch(**x, o=o, pool=pool, pool_layout="value_major", slots=i32(slots),
                    has_initial_state=simulator().array(has))
        start = np.where(has[:, None, None, None], before[slots], 0)
        wanted, states = reference.prefill(**exact, cu_seqlens=range(4), states=start, scale=K ** -0.5)
        found, after = dw.to_float(o), dw.to_float(pool).swapaxes(2, 3)
        self.assertLess(reference.error(found[[0, 2]], wanted[[0, 2]]), 4e-3)
        self.assertTrue((found[1] == 0).all(), "padding")
        self.assertLess(reference.error(after[[4, 2]], states[[0, 2]]), bar)
        self.assertTrue((after[[0, 1, 3]] == before[[0, 1, 3]]).all(), "slots of nobody")

    def test_a_step_with_the_norm_of_its_outputs(self):
        x, _ = inputs(3)
        z = Numbers(5).uniform(-1, 1, (3, HV, V), "bf16")[0]
        weight = Numbers(6).uniform(0.5, 1.5, (V,), "f32")[0]
        plan, outputs = dw.Decode(simulator(), spec(), 3), []
        for normed in (False, True):
            pool, o = value_major_pool()[0], poisoned((3, HV, V), "bf16")
            given = {**x, "o": o, "pool": pool, "pool_layout": "value_major"}
            if normed:
                plan.launch(**given, z=z, norm_weight=weight, norm_gate="sigmoid")
            else:
                plan.launch(**given)
                dw.norm(simulator(), z=z, weight=weight, y=o, gate="sigmoid")
            outputs.append((dw.to_float(o), dw.to_float(pool)))
        for apart, together in zip(*outputs):
            self.assertTrue((apart == together).all())
        for more, start in (({"norm_weight": weight}, "norm_weight: given without z"),
                            ({"norm_eps": 1e-5}, "norm_eps: given without z"),
                            ({"norm_gate": "sigmoid"}, "norm_gate: given without z"),
                            ({"z": z, "norm_gate": "relu"}, "norm_gate: 'relu'"),
                            ({"z": z, "norm_eps": 0.0}, "norm_eps: 0"),
                            ({"z": o}, "o: it overlaps z")):
            with self.assertRaises(dw.ArgumentError) as caught:
                plan.launch(**given, **more)
            self.assertTrue(str(caught.exception).startswith(start), str(caught.exception))

    def test_accepted_tokens_are_steps(self):
        batch, tokens, accepted, slots = 3, 3, np.array([0, 2, 3]), i32([1, 4, 0])
        offsets = np.arange(0, batch * tokens + 1, tokens)
        x = Numbers(11).uniform(-1, 1, (batch * tokens, CHANNELS), "bf16")[0]
        weight = Numbers(12).uniform(-1, 1, (CHANNELS, WIDTH), "bf16")[0]
        conv_state = Numbers(13).uniform(-1, 1, (5, CHANNELS, WIDTH - 1), "bf16")[0]
        pool, before = value_major_pool()
        gates = {n: t for n, t in inputs(batch * tokens)[0].items() if n in ("g", "beta")}

        def convolved(rows, offsets, states, **more):
            count = len(rows)
            out = {"q": poisoned((count, HK, K), "bf16"), "k": poisoned((count, HK, K), "bf16"),
                   "v": poisoned((count, HV, V), "bf16")}
            plan = dw.Conv.packed(simulator(), dw.ConvSpec(HK, HV, K, V, WIDTH, **more), offsets, count)
            plan.launch(x=rows, weight=weight, state=states, slots=slots, **out)
            return out

        # Verified at once: neither pool changes before the commit.
        untouched = conv_state.tobytes(), pool.tobytes()
        rows = convolved(x, offsets, conv_state, keep_states=True)
        verify = dw.Decode(simulator(), spec(tokens=tokens, qk_l2norm=True), batch)
        o, states = poisoned((batch * tokens, HV, V), "bf16"), poisoned((batch * tokens, HV, V, K), "f32")
        layout = {"pool_layout": "value_major"}
        verify.launch(**rows, **gates, o=o, pool=pool, slots=slots, states=states, **layout)
        self.assertEqual((conv_state.tobytes(), pool.tobytes()), untouched)
        stepped_conv, stepped = simulator().array(conv_state), simulator().array(pool)
        verify.commit(accepted=i32(accepted), slots=slots, states=states, pool=pool, conv_state=conv_state, x=x, **layout)
        # And one after the other, those that are accepted.
        taken = np.concatenate([np.arange(n * tokens, n * tokens + m) for n, m in enumerate(accepted)])
        convolved(simulator().array(x[taken]), np.concatenate([[0], accepted.cumsum()]), stepped_conv)
        step = dw.Decode(simulator(), spec(qk_l2norm=True), batch)
        for t in range(tokens):
            at = np.arange(batch) * tokens + t
            one = {n: simulator().array(r[at]) for n, r in {**rows, **gates}.items()}
            found = poisoned((batch, HV, V), "bf16")
            step.launch(**one, o=found, pool=stepped, slots=i32(np.where(t < accepted, slots, -1)), **layout)
            for n in np.flatnonzero(t < accepted):
                self.assertEqual(found[n].tobytes(), o[at[n]].tobytes())
        self.assertEqual(pool.tobytes(), stepped.tobytes())
        self.assertEqual(conv_state.tobytes(), stepped_conv.tobytes())
        self.assertTrue((np.asarray(pool).swapaxes(2, 3)[1] == before[1]).all(), "nothing accepted")

    def test_what_is_refused(self):
        for start, changed in (("draft", {"draft": "tree", "tokens": 3}), ("tokens", {"tokens": 17}),
                               ("scale: 1e-50", {"scale": 1e-50})):
            with self.assertRaises(dw.ArgumentError) as caught:
                dw.Decode(simulator(), spec(**changed), 2)
            self.assertTrue(str(caught.exception).startswith(start), caught.exception)
