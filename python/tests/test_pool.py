"""Prefill in place on a pool of states, and states in the course of sequences, on the simulator."""

import unittest

import deltawave as dw

from . import reference
from .common import Numbers, needs_numpy, np, poisoned, simulator
from .test_prefill import BARS, HK, HV, K, OFFSETS, TOKENS, V, inputs, spec

SLOTS = 5


def value_major_pool(dtype="f32"):
    """A pool, and its states `[slots, HV, K, V]` in double precision."""
    pool, exact = Numbers(9).uniform(-1, 1, (SLOTS, HV, V, K), dtype)
    return pool, exact.swapaxes(2, 3)


def i32(values):
    return simulator().array(np.array(values, np.int32))


@needs_numpy
class Pool(unittest.TestCase):
    def test_slots_of_the_device(self):
        x, exact = inputs("bf16")
        slots, has = np.array([3, -1, 0]), np.array([False, True, False])
        packed = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        device = dw.Prefill.device(simulator(), spec(), TOKENS, 3)
        lengths = {"cu_seqlens": i32(OFFSETS)}
        for plan, more, dtype in ((packed, {}, "f32"), (device, lengths, "f32"), (packed, {}, "fp16"), (device, lengths, "bf16")):
            pool, before = value_major_pool(dtype)
            o = poisoned((TOKENS, HV, V), "bf16")
            plan.launch(**x, o=o, pool=pool, pool_layout="value_major", slots=i32(slots),
                        has_initial_state=simulator().array(has), **more)
            start = np.where(has[:, None, None, None], before[slots], 0)
            wanted, states = reference.prefill(**exact, cu_seqlens=OFFSETS, states=start, scale=K ** -0.5)
            found, after = dw.to_float(o), dw.to_float(pool).swapaxes(2, 3)
            self.assertTrue((found[0] == 0).all(), "padding")
            self.assertLess(reference.error(found[1:], wanted[1:]), BARS["bf16"])
            self.assertLess(reference.error(after[0], states[2]), BARS["bf16"])
            self.assertTrue((after[1:] == before[1:]).all(), "slots of nobody, and of the new sequence without tokens")

    def test_slots_of_the_host(self):
        x, _ = inputs("bf16")
        plan = dw.Prefill.packed(simulator(), spec(), OFFSETS, TOKENS)
        pool, _ = value_major_pool()
        before = np.array(pool)
        with self.assertRaises(dw.ArgumentError) as caught:
            plan.set_slots([1, 2, 1])
        self.assertIn("slots", str(caught.exception))
        with self.assertRaises(dw.ArgumentError):
            plan.set_slots([1, 2, 3], [1])
        plan.set_slots([1, 2, 3], [1, 4, 0])
        o = poisoned((TOKENS, HV, V), "bf16")
        plan.launch(**x, o=o, pool=pool, pool_layout="value_major")
        changed = [(pool[n] != before[n]).any() for n in range(SLOTS)]
        self.assertEqual(changed, [True, False, False, False, True])

    def test_a_sequence_goes_on_from_a_snapshot(self):
        tokens = 128
        numbers = Numbers(10)
        x = {name: numbers.uniform(-0.3, 0.3, (tokens, heads, dim), "bf16")[0]
             for name, heads, dim in (("q", HK, K), ("k", HK, K), ("v", HV, V))}
        g = numbers.uniform(-0.2, 0, (tokens, HV), "f32")[0]

        def run(begin, **more):
            plan = dw.Prefill.packed(simulator(), spec(segments=1), [0, tokens - begin], tokens - begin)
            if "snapshots" in more:
                self.assertEqual(plan.chunk_entries, 3)
                plan.set_snapshots([(0, 64, 1)])
            o, state = poisoned((tokens - begin, HV, V), "bf16"), poisoned((1, HV, K, V), "f32")
            rows = {name: t[begin:] for name, t in x.items()}
            plan.launch(**rows, g=g[begin:], o=o, final_state=state, **more)
            return o, state

        snapshots = poisoned((2, HV, K, V), "f32")
        o, state = run(0, snapshots=snapshots)
        self.assertTrue(np.isnan(snapshots[0]).all())
        o_after, state_after = run(64, initial_state=snapshots[1:])
        self.assertEqual(o_after.tobytes(), o[64:].tobytes())
        self.assertEqual(state_after.tobytes(), state.tobytes())
        # The slots as a table on the device.
        found = poisoned((2, HV, K, V), "f32")
        plan = dw.Prefill.packed(simulator(), spec(segments=1), [0, tokens], tokens)
        plan.launch(**x, g=g, o=o, snapshots=found, snapshot_slots=i32([0, -1, -1]))
        self.assertEqual(found[0].tobytes(), snapshots[1].tobytes())
        with self.assertRaises(dw.ArgumentError):
            plan.launch(**x, g=g, o=o, snapshots=found, snapshot_slots=i32([0, -1]))
