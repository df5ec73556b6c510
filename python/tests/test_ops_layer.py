"""The torch custom ops of engines, layer, verify and commit, on tensors of the CPU, which run on the simulator."""

import unittest

from . import reference
from .common import np
from .test_ops import HK, HV, K, V, exact, inputs, torch

if torch is not None:
    from torch.library import opcheck

    from deltawave import ArgumentError, ops

CHANNELS, VALUES, WIDTH, SLOTS = 2 * HK * K + HV * V, HV * V, 4, 5
# Two decodes, then prefills.
DECODES, OFFSETS = 2, [0, 1, 2, 40, 45]
TOKENS = OFFSETS[-1]


def step():
    """The arguments of a step."""
    made = torch.Generator().manual_seed(7)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=made)

    return {"x": uniform(-1, 1, TOKENS, CHANNELS + VALUES).bfloat16(), "a": uniform(-1, 1, TOKENS, HV).bfloat16(),
            "b": uniform(-1, 1, TOKENS, HV).bfloat16(),
            "conv_state": uniform(-1, 1, SLOTS, CHANNELS, WIDTH - 1).bfloat16(), "pool": uniform(-1, 1, SLOTS, HV, K, V),
            "conv_weight": uniform(-1, 1, CHANNELS, WIDTH).bfloat16(), "a_log": uniform(0, 1, HV), "key_heads": HK,
            "value_heads": HV, "key_dim": K, "value_dim": V, "z": None, "conv_bias": uniform(-1, 1, CHANNELS),
            "dt_bias": uniform(-4, -2, HV), "norm_weight": uniform(.5, 1.5, V),
            "cu_seqlens": torch.tensor(OFFSETS, dtype=torch.int32), "decodes": DECODES,
            "slots": torch.tensor([3, 0, 4, 1], dtype=torch.int32), "has_initial_state": torch.tensor([1, 1, 0, 1]).bool()}


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class LayerOps(unittest.TestCase):
    def same(self, found, wanted):
        for a, b in zip(found, wanted):
            self.assertTrue(torch.equal(a, b))

    def run_layer(self, **changed):
        given = {**step(), **changed}
        return ops.layer(**given), given["conv_state"], given["pool"]

    def test_a_mixed_step(self):
        given = step()
        names = ("a", "b", "conv_weight", "conv_bias", "a_log", "dt_bias", "norm_weight")
        values = {name: given[name].double().numpy() for name in names}
        rows = given["x"].double().numpy()
        slots, has = given["slots"].long(), given["has_initial_state"]
        starts = [given[n][slots].double().numpy() * has.numpy().reshape(-1, *[1] * (given[n].dim() - 1))
                  for n in ("conv_state", "pool")]
        z = rows[:, CHANNELS:].reshape(TOKENS, HV, V)
        wanted = reference.layer(rows[:, :CHANNELS], z, **values, cu_seqlens=OFFSETS, conv_states=starts[0],
                                 states=starts[1])
        found = self.run_layer()
        self.assertLess(reference.error(found[0].double().numpy(), wanted[0]), 1e-2)
        self.assertTrue((found[1][slots].double().numpy() == wanted[1]).all())
        self.assertLess(reference.error(found[2][slots].numpy(), wanted[2]), 1e-2)
        before = step()
        self.same((found[1][2], found[2][2]), (before["conv_state"][2], before["pool"][2]))
        # Lengths on the device, z apart from x.
        on_device = ops.empty((len(OFFSETS),), torch.int32).copy_(before["cu_seqlens"])
        self.same(self.run_layer(cu_seqlens=on_device, segments=1), self.run_layer(segments=1))
        self.same(self.run_layer(z=before["x"][:, CHANNELS:].reshape(TOKENS, HV, V)), found)

    def test_without_lengths(self):
        one = [0, 1, 2, TOKENS]
        lengths = torch.tensor(one, dtype=torch.int32)
        more = {"slots": step()["slots"][:3], "has_initial_state": None}
        self.same(self.run_layer(cu_seqlens=None, **more), self.run_layer(cu_seqlens=lengths, **more))
        rows = {name: step()[name][:3] for name in ("x", "a", "b")}
        more["decodes"] = 3
        self.same(self.run_layer(cu_seqlens=None, **rows, **more),
                  self.run_layer(cu_seqlens=torch.arange(4, dtype=torch.int32), **rows, **more))

    def verified(self):
        """Three tokens of two sequences, verified: inputs, pool, slots, o, states."""
        x = inputs(torch.bfloat16, (2, 3))
        pool = torch.rand(4, HV, K, V, generator=torch.Generator().manual_seed(8))
        slots = torch.tensor([2, 0], dtype=torch.int32)
        return (x, pool, slots, *ops.verify(x["q"], x["k"], x["v"], pool, slots, g=x["g"], beta=x["beta"]))

    def test_verify_and_commit(self):
        x, pool, slots, o, states = self.verified()
        before = pool.clone()
        flat = {name: t.flatten(0, 1) for name, t in x.items()}
        wanted, last = reference.prefill(**exact(flat), cu_seqlens=[0, 3, 6], states=before[[2, 0]].double().numpy(),
                                         scale=K ** -0.5)
        self.assertLess(reference.error(o.flatten(0, 1).double().numpy(), wanted), 8e-3)
        self.assertEqual(states.shape, (2, 3, HV, K, V))
        self.assertLess(reference.error(states[:, 2].numpy(), last), 1e-5)
        ops.commit(torch.tensor([2, 0], dtype=torch.int32), states, pool, slots)
        self.same((pool[2], pool[[0, 1, 3]]), (states[0, 1], before[[0, 1, 3]]))
        # Those of a conv that kept its states.
        given = step()
        rows, conv_state = given["x"][:6], given["conv_state"]
        kept = conv_state.clone()
        lengths = torch.tensor([0, 3, 6], dtype=torch.int32)
        arguments = (rows, given["conv_weight"], None, conv_state, HK, HV, K, V, lengths, slots)
        drafts = ops.conv(*arguments, keep_states=True)
        self.same((conv_state,), (kept,))
        ops.commit(torch.tensor([3, 1], dtype=torch.int32), states, pool, slots, conv_state, rows)
        self.same((conv_state[0, :, :2], conv_state[0, :, 2]), (kept[0, :, 1:], rows[3, :CHANNELS]))
        self.same((pool[[2, 0]],), (states[[0, 1], [2, 0]],))
        stepped = kept.clone()
        self.same(ops.conv(*arguments[:3], stepped, *arguments[4:]), drafts)
        self.same((conv_state[2], conv_state[[1, 3, 4]]), (stepped[2], kept[[1, 3, 4]]))

    def test_what_is_refused(self):
        _, pool, slots, _, states = self.verified()
        given, accepted = step(), torch.tensor([2, 0], dtype=torch.int32)

        def commit(states, conv_state=None):
            return lambda: ops.commit(accepted, states, pool, slots, conv_state, given["x"][:6])

        for start, call in (("states: shape", commit(states.flatten(0, 1))),
                            ("conv_state: shape", commit(states, given["conv_state"][0])),
                            ("conv_state: 10 channels", commit(states, given["conv_state"][:, :10])),
                            ("conv_state: 64 channels", commit(states, given["conv_state"][:, :VALUES])),
                            ("conv_state", commit(states[:, :, :, :0], given["conv_state"])),
                            ("decodes: 46", lambda: self.run_layer(cu_seqlens=None, decodes=46)),
                            ("cu_seqlens: shape", lambda: self.run_layer(cu_seqlens=given["cu_seqlens"][None]))):
            with self.subTest(start), self.assertRaises(ArgumentError) as caught:
                call()
            self.assertTrue(str(caught.exception).startswith(start), caught.exception)

    def test_torch_sees_what_they_do(self):
        checks = ("test_schema", "test_faketensor")
        opcheck(torch.ops.deltawave.layer.default, tuple(step().values()), test_utils=checks)
        x, pool, slots, _, states = self.verified()
        opcheck(torch.ops.deltawave.verify.default, (x["q"], x["k"], x["v"], pool, slots), test_utils=checks)
        accepted = torch.tensor([1, 3], dtype=torch.int32)
        opcheck(torch.ops.deltawave.commit.default, (accepted, states, pool, slots, None), test_utils=checks)
        given = step()
        arguments = (accepted, states, pool, slots, given["conv_state"], given["x"][:6])
        opcheck(torch.ops.deltawave.commit.default, arguments, test_utils=checks)

    def test_they_have_shapes_without_data(self):
        given = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in step().items()}
        y = ops.layer(**given)
        self.assertEqual((y.device.type, y.dtype, y.shape), ("meta", torch.bfloat16, (TOKENS, HV, V)))
        x = {name: t.to("meta") for name, t in inputs(torch.bfloat16, (2, 3)).items()}
        o, states = ops.verify(x["q"], x["k"], x["v"], given["pool"])
        self.assertEqual((o.shape, states.shape), ((2, 3, HV, V), (2, 3, HV, K, V)))
        self.assertEqual((o.dtype, states.dtype), (torch.bfloat16, torch.float32))

    def test_torch_compile_takes_them_whole(self):
        def engine(x, a, b, conv_state, pool, conv_weight, a_log, cu_seqlens, slots, q, k, v, accepted):
            y = ops.layer(x * 1, a, b, conv_state, pool, conv_weight, a_log, HK, HV, K, V, cu_seqlens=cu_seqlens,
                          decodes=DECODES, slots=slots)
            o, states = ops.verify(q, k, v, pool, slots[:2])
            ops.commit(accepted, states, pool, slots[:2])
            return y + 1, o * 2

        given, drafts = step(), inputs(torch.bfloat16, (2, 3))
        names = ("x", "a", "b", "conv_state", "pool", "conv_weight", "a_log", "cu_seqlens", "slots")
        arguments = [given[name] for name in names] + [drafts[name] for name in "qkv"]
        arguments.append(torch.tensor([2, 1], dtype=torch.int32))
        copies = [t.clone() for t in arguments]
        eager = engine(*arguments)
        compiled = torch.compile(engine, backend="aot_eager", fullgraph=True)(*copies)
        self.same((*compiled, *copies[3:5]), (*eager, *arguments[3:5]))
