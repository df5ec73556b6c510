"""Outputs that share memory with another argument, which are refused, and those that may."""

import unittest

import deltawave as dw

from .common import Numbers, needs_numpy, np, poisoned, simulator

TOKENS, HK, HV, K, V = 9, 1, 2, 32, 32
CHANNELS = 2 * HK * K + HV * V


@needs_numpy
class Overlaps(unittest.TestCase):
    def refused(self, output, other, call):
        with self.assertRaises(dw.ArgumentError) as caught:
            call()
        start = f"{output}: it overlaps {other}, between addresses 0x"
        self.assertTrue(str(caught.exception).startswith(start), f"wanted {start!r}, was {caught.exception}")

    def inputs(self):
        numbers = Numbers(1)
        return {"q": numbers.uniform(-0.2, 0.2, (TOKENS, HK, K), "bf16")[0],
                "k": numbers.uniform(-0.2, 0.2, (TOKENS, HK, K), "bf16")[0],
                "v": numbers.uniform(-1, 1, (TOKENS, HV, V), "bf16")[0]}

    def test_prefill(self):
        context, good = simulator(), self.inputs()
        plan = dw.Prefill.packed(context, dw.PrefillSpec(HK, HV, K, V), [0, 4, TOKENS], TOKENS)
        o = poisoned((TOKENS, HV, V), "bf16")
        plan.launch(**good, o=o)
        # One buffer: heads of q and k are as long as those of v.
        both = context.empty((TOKENS, HV, V), "bf16")
        for name in ("q", "k"):
            self.refused("o", name, lambda: plan.launch(**{**good, name: both[:, :1]}, o=both))
        states = context.zeros((2, HV, K, V), "f32")
        pool = context.zeros((3, HV, K, V), "f32")
        slots, none = context.array(np.array([2, 0], np.int32)), context.array(np.full(2, -1, np.int32))
        self.refused("final_state", "v", lambda: plan.launch(
            **{**good, "v": states.view(np.uint16).reshape(-1)[:TOKENS * HV * V].reshape(TOKENS, HV, V)}, o=o,
            final_state=states))
        self.refused("snapshots", "pool", lambda: plan.launch(**good, o=o, pool=pool, slots=slots, snapshots=pool,
                                                              snapshot_slots=none))
        workspace = context.empty(1 << 20, "u8")
        inside = workspace[1 << 12:(1 << 12) + 2 * TOKENS * HV * V].view(np.uint16).reshape(TOKENS, HV, V)
        self.refused("o", "workspace", lambda: plan.launch(**good, o=inside, workspace=workspace))
        # o may be v, and the final state the initial one.
        plan.launch(**good, o=good["v"], initial_state=states, final_state=states)
        self.assertEqual(good["v"].tobytes(), o.tobytes())

    def test_decode(self):
        context, good = simulator(), self.inputs()
        plan = dw.Decode(context, dw.DecodeSpec(HK, HV, K, V), TOKENS)
        pool = context.zeros((TOKENS, HV, K, V), "f32")
        o = poisoned((TOKENS, HV, V), "bf16")
        plan.launch(**good, o=o, pool=pool)
        both = context.empty((TOKENS, HV, V), "bf16")
        for name in ("q", "k"):
            self.refused("o", name, lambda: plan.launch(**{**good, name: both[:, :1]}, o=both, pool=pool))
        accepted = context.zeros(TOKENS, "i32")
        self.refused("pool", "states", lambda: plan.commit(accepted=accepted, states=pool, pool=pool))
        plan.launch(**good, o=good["v"], pool=context.zeros((TOKENS, HV, K, V), "f32"))
        self.assertEqual(good["v"].tobytes(), o.tobytes())

    def test_conv(self):
        context = simulator()
        x = Numbers(2).uniform(-1, 1, (TOKENS, CHANNELS), "bf16")[0]
        weight = Numbers(3).uniform(-1, 1, (CHANNELS, 4), "bf16")[0]
        plan = dw.Conv.packed(context, dw.ConvSpec(HK, HV, K, V), [0, TOKENS], TOKENS)
        out = {"q": poisoned((TOKENS, HK, K), "bf16"), "k": poisoned((TOKENS, HK, K), "bf16"),
               "v": poisoned((TOKENS, HV, V), "bf16")}
        plan.launch(x=x, weight=weight, **out)
        self.refused("q", "k", lambda: plan.launch(x=x, weight=weight, **{**out, "q": out["k"]}))
        self.refused("q", "x.q", lambda: plan.launch(x=x, weight=weight, **{**out, "q": x[:, :K].reshape(TOKENS, HK, K)}))
        state = x.reshape(-1)[:3 * CHANNELS].reshape(1, CHANNELS, 3)
        self.refused("state", "x.q", lambda: plan.launch(x=x, weight=weight, state=state, **out))
        # Side by side in rows of one buffer.
        rows = context.empty((TOKENS, CHANNELS), "bf16")
        packed = {"q": rows[:, None, :K], "k": rows[:, None, K:2 * K], "v": rows[:, 2 * K:].reshape(TOKENS, HV, V)}
        plan.launch(x=x, weight=weight, **packed)
        for name, found in packed.items():
            self.assertEqual(found.tobytes(), out[name].tobytes())

    def test_norm_and_gate(self):
        context = simulator()
        x, z = (Numbers(seed).uniform(-1, 1, (TOKENS, HV, V), "bf16")[0] for seed in (4, 5))
        y = poisoned((TOKENS, HV, V), "bf16")
        dw.norm(context, x=x, z=z, y=y)
        self.refused("y", "z", lambda: dw.norm(context, x=x, z=z, y=z))
        dw.norm(context, x=x, z=z, y=x)
        self.assertEqual(x.tobytes(), y.tobytes())
        a, b = (Numbers(seed).uniform(-1, 1, (TOKENS, HV), "f32")[0] for seed in (6, 7))
        a_log = context.zeros(HV, "f32")
        g = context.empty((TOKENS, HV), "f32")
        self.refused("g", "beta", lambda: dw.gate(context, a=a, b=b, a_log=a_log, g=g, beta=g))
