"""Prefill on the simulator against the recurrence in double precision."""

import unittest

import deltawave as dw

from . import reference
from .common import Numbers, needs_numpy, np, poisoned, simulator

HK, HV, K, V = 1, 2, 32, 48
# An empty sequence, one token, a chunk and a token more; two rows belong to none.
OFFSETS, TOKENS = [0, 0, 1, 66], 68
# rms of the error over that of the result, by element type.
BARS = {"bf16": 8e-3, "fp16": 1e-3}


def inputs(dtype, seed=1):
    """q, k, v, g, beta: arrays of the device, and in double precision."""
    numbers = Numbers(seed)
    rows = [("q", -0.3, 0.3, (TOKENS, HK, K), dtype), ("k", -0.3, 0.3, (TOKENS, HK, K), dtype),
            ("v", -1, 1, (TOKENS, HV, V), dtype), ("g", -0.2, 0, (TOKENS, HV), "f32"),
            ("beta", 0, 1, (TOKENS, HV), "f32")]
    made = {name: numbers.uniform(low, high, shape, kind) for name, low, high, shape, kind in rows}
    return {n: x for n, (x, _) in made.items()}, {n: x for n, (_, x) in made.items()}


def spec(dtype="bf16", **more):
    return dw.PrefillSpec(HK, HV, K, V, dtype, **more)


@needs_numpy
class Prefill(unittest.TestCase):
    def check(self, dtype, found, wanted):
        o, states = found
        self.assertLess(reference.error(dw.to_float(o), wanted[0]), BARS[dtype])
        self.assertLess(reference.error(states, wanted[1]), BARS[dtype])
        self.assertTrue((dw.to_float(o)[OFFSETS[-1]:] == 0).all(), "rows past the last sequence")

    def test_packed_batches_with_and_without_states(self):
        for dtype in ("bf16", "fp16"):
            with self.subTest(dtype=dtype):
                x, exact = inputs(dtype)
                plan = dw.Prefill.packed(simulator(), spec(dtype, scale=0.5), OFFSETS, TOKENS)
                o, states = poisoned((TOKENS, HV, V), dtype), poisoned((3, HV, K, V), "f32")
                plan.launch(**x, o=o, final_state=states)
                self.check(dtype, (o, states),
                           reference.prefill(**exact, cu_seqlens=OFFSETS, states=np.zeros(states.shape), scale=0.5))
                self.assertTrue((states[0] == 0).all(), "an empty sequence keeps its state")
                # The next tokens of each sequence, from where it stopped, in the other layout, but for the last one.
                after, has = poisoned((3, HV, V, K), "f32"), simulator().array([True, True, False])
                plan.launch(**x, o=o, initial_state=states, has_initial_state=has, final_state=after,
                            final_layout="value_major")
                start = np.array(states)
                start[2] = 0
                self.check(dtype, (o, after.swapaxes(2, 3)),
                           reference.prefill(**exact, cu_seqlens=OFFSETS, states=start, scale=0.5))

    def test_pools_are_updated_in_place(self):
        x, _ = inputs("bf16")
        plan = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        o, states = poisoned((TOKENS, HV, V), "bf16"), poisoned((3, HV, K, V), "f32")
        plan.launch(**x, o=o, final_state=states)
        pool, has = poisoned((5, HV, K, V), "f32"), simulator().array([False] * 3)
        slots = simulator().array(np.array([4, 0, 3], np.int32))
        write_slots = simulator().array(np.array([-1, 0, 1], np.int32))
        plan.launch(**x, o=o, pool=pool, slots=slots, write_slots=write_slots, has_initial_state=has)
        self.assertTrue((pool[[0, 1]] == states[[1, 2]]).all())
        self.assertTrue(np.isnan(pool[2:]).all(), "other slots")

    def test_raw_gates_norms_and_tiled_heads(self):
        x, exact = inputs("bf16")
        numbers = Numbers(2)
        raw = {name: numbers.uniform(-2, 2, shape, kind) for name, shape, kind in
               (("a", (TOKENS, HV), "bf16"), ("b", (TOKENS, HV), "bf16"), ("a_log", (HV,), "f32"),
                ("dt_bias", (HV,), "bf16"))}
        wide = {name: np.concatenate([x[name], x[name][::-1]], 1) for name in ("q", "k")}
        rows = {name: simulator().array(w) for name, w in wide.items()}
        plan = dw.Prefill.packed(simulator(), dw.PrefillSpec(2, HV, K, V, head_map="tiled", qk_l2norm=True), OFFSETS,
                                 TOKENS)
        o, states = poisoned((TOKENS, HV, V), "bf16"), poisoned((3, HV, K, V), "f32")
        workspace = simulator().empty(plan.workspace_bytes, "u8")
        plan.launch(**rows, v=x["v"], **{name: device for name, (device, _) in raw.items()}, allow_neg_eigval=True, o=o,
                    final_state=states, workspace=workspace)
        g, beta = reference.gates(*(e for _, e in raw.values()), allow_neg_eigval=True)
        q, k = (reference.l2_normalised(dw.to_float(w).astype(np.float64)) for w in wide.values())
        self.check("bf16", (o, states), reference.prefill(q, k, exact["v"], g, beta, OFFSETS,
                                                          np.zeros(states.shape), K ** -0.5, tiled=True))
        # The same gates, from the operation of their own.
        out = [poisoned((TOKENS, HV), "f32") for _ in range(2)]
        dw.gate(simulator(), **{name: device for name, (device, _) in raw.items()}, allow_neg_eigval=True, g=out[0],
                beta=out[1])
        for found, wanted in zip(out, (g, beta)):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)

    def test_paths(self):
        x, exact = inputs("bf16")
        lengths = simulator().array(np.array(OFFSETS, np.int32))
        wanted = reference.prefill(**exact, cu_seqlens=OFFSETS, states=np.zeros((3, HV, K, V)), scale=K ** -0.5)
        for options in ({"path": "split"}, {"path": "fused"}, {"path": "fused", "segments": 2}):
            packed = dw.Prefill.packed(simulator(), spec(**options), OFFSETS, TOKENS)
            plans = [(packed, {})]
            if options["path"] == "fused":
                device = dw.Prefill.device(simulator(), spec(**options), TOKENS, 3)
                plans.append((device, {"cu_seqlens": lengths}))
            outputs = []
            for plan, more in plans:
                o, states = poisoned((TOKENS, HV, V), "bf16"), poisoned((3, HV, K, V), "bf16")
                plan.launch(**x, o=o, final_state=states, **more)
                self.check("bf16", (o, dw.to_float(states)), wanted)
                outputs.append((o.tobytes(), states.tobytes()))
            self.assertEqual(len(set(outputs)), 1)

    def test_strided_views_dense_batches_and_lengths_on_the_device(self):
        x, exact = inputs("bf16")
        qkv = simulator().array(np.concatenate([np.asarray(x[n]).reshape(TOKENS, -1) for n in "qkv"], 1))
        q, k, v = np.split(qkv, [HK * K, 2 * HK * K], 1)
        views = {"q": q.reshape(TOKENS, HK, K), "k": k.reshape(TOKENS, HK, K), "v": v.reshape(TOKENS, HV, V),
                 "g": x["g"], "beta": x["beta"]}
        self.assertTrue(np.shares_memory(views["v"], qkv))
        lengths = simulator().array(np.array(OFFSETS, np.int32))
        packed = dw.Prefill.packed(simulator(), spec(segments=1), OFFSETS, TOKENS)
        device = dw.Prefill.device(simulator(), spec(), TOKENS, 3)
        outputs = []
        for plan, more in ((packed, {}), (device, {"cu_seqlens": lengths})):
            o, states = poisoned((TOKENS, HV, V), "bf16"), poisoned((3, HV, K, V), "bf16")
            plan.launch(**views, o=o, final_state=states, **more)
            self.check("bf16", (o, dw.to_float(states)),
                       reference.prefill(**exact, cu_seqlens=OFFSETS, states=np.zeros(states.shape), scale=K ** -0.5))
            outputs.append((o, states))
        for a, b in zip(*outputs):
            self.assertEqual(a.tobytes(), b.tobytes())

        def halves(t):
            return np.asarray(t).reshape(2, TOKENS // 2, *t.shape[1:])

        dense = dw.Prefill.dense(simulator(), spec(), 2, TOKENS // 2)
        o = poisoned((TOKENS, HV, V), "bf16")
        dense.launch(**{name: halves(t) for name, t in x.items()}, o=halves(o))
        wanted, _ = reference.prefill(**exact, cu_seqlens=[0, TOKENS // 2, TOKENS], states=np.zeros((2, HV, K, V)),
                                      scale=K ** -0.5)
        self.assertLess(reference.error(dw.to_float(o), wanted), BARS["bf16"])

    def test_bound_launches_give_the_same_bits_again(self):
        x, _ = inputs("bf16")
        plan = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        o = poisoned((TOKENS, HV, V), "bf16")
        launch = plan.bind(**x, o=o)
        launch()
        first = o.tobytes()
        o[:] = poisoned(o.shape, "bf16")
        launch()
        simulator().synchronize()
        self.assertEqual(o.tobytes(), first)
