"""Calls of ops like earlier ones give the same bits by a short way, and what is not like them takes the long one."""

import threading
import unittest
from unittest import mock

import deltawave as dw

try:
    import torch

    from deltawave import calls, causal_conv1d, ops
except ImportError as problem:
    if problem.name != "torch" and "custom_op" not in str(problem):
        raise
    torch = None

B, H, HV, K, V, WIDTH = 2, 2, 4, 32, 128, 4
CHANNELS = 2 * H * K + HV * V


def inside(*shape, seed=0, dtype=None, low=-1.0):
    """Random numbers in the simulator's memory, as a GPU's tensors are on the GPU."""
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * (1 - low) + low
    return ops.empty(shape, dtype or torch.bfloat16).copy_(made)


def layer_of(seed):
    """Arguments of a layer of B decodes: a and b are views of one tensor."""
    ba, weights = inside(B, 2 * HV, seed=seed), {
        "conv_weight": inside(CHANNELS, WIDTH, seed=100), "a_log": inside(HV, seed=101, dtype=torch.float32),
        "dt_bias": inside(HV, seed=102, dtype=torch.float32), "norm_weight": inside(V, seed=103)}
    return {"x": inside(B, CHANNELS, seed=seed + 1), "z": inside(B, 1, HV * V, seed=seed + 2), "a": ba[:, :HV], "b": ba[:, HV:],
            "conv_state": inside(B, CHANNELS, WIDTH, seed=seed + 3), "pool": inside(B, HV, K, V, seed=seed + 4, dtype=torch.float32),
            "key_heads": H, "value_heads": HV, "key_dim": K, "value_dim": V, "decodes": B, **weights}


def decode_of(seed, batch=B):
    qkv = inside(batch, CHANNELS, seed=seed)
    q, k, v = (part.view(batch, -1, d) for part, d in zip(qkv.split([H * K, H * K, HV * V], 1), (K, K, V)))
    return {"q": q, "k": k, "v": v, "pool": inside(batch, HV, K, V, seed=seed + 1, dtype=torch.float32),
            "g": inside(batch, HV, seed=seed + 2, dtype=torch.float32), "beta": inside(batch, HV, seed=seed + 3, low=0)}


@unittest.skipIf(torch is None, "torch 2.4 or newer is not installed")
class RepeatedCalls(unittest.TestCase):
    def long_ways(self, call):
        """The result of a call, and how often it took the long way."""
        with mock.patch.object(calls, "note_launch", wraps=calls.note_launch) as noted:
            with mock.patch("deltawave.plan.note_launch", noted), mock.patch("deltawave.norm.note_launch", noted):
                return call(), noted.call_count

    def test_scratch_memory_is_no_output(self):
        kept = []
        with mock.patch.object(calls.Calls, "_keep", lambda self, key, call: kept.append(call)):
            ops._workspaces.clear()
            arguments = layer_of(40)
            del arguments["decodes"]
            with torch.no_grad():
                y = ops.layer(**arguments)
        self.assertTrue(ops._workspaces)
        self.assertEqual([shape for shape, _ in kept[0].outputs], [tuple(y.shape)])

    def test_bookkeeping_that_fails_costs_no_result(self):
        arguments = layer_of(50)
        with mock.patch.object(calls, "_call", side_effect=KeyError("x")), torch.no_grad():
            found = ops.layer(**arguments, eps=3e-6)
        with torch.no_grad():
            self.assertTrue(torch.equal(found, ops.layer(**layer_of(50), eps=3e-6)))

    def test_lengths_stay_on_the_host(self):
        with torch.device("meta"):
            self.assertEqual(ops.equal_lengths(2, 3).tolist(), [0, 3, 6])

    def check(self, op, arguments):
        """The third call of an op is short, and gives the bits of a call that is like no other."""
        for seed in (10, 20):
            op(**arguments(seed))
        given, others = arguments(30), arguments(30)
        with torch.no_grad():
            found, count = self.long_ways(lambda: op(**given))
            self.assertEqual(count, 0)
            with mock.patch.object(calls.Calls, "run", lambda self, key, values, function: function()):
                wanted, count = self.long_ways(lambda: op(**others))
            self.assertEqual(count, 1)
        for one, two in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, wanted))):
            self.assertTrue(torch.equal(one, two))
            self.assertEqual((one.shape, one.stride()), (two.shape, two.stride()))
        for name, x in given.items():  # what is written in place, too
            if isinstance(x, torch.Tensor):
                self.assertTrue(torch.equal(x, others[name]), name)

    def test_ops(self):
        with torch.no_grad():
            self.check(ops.layer, layer_of)
            self.check(ops.decode, decode_of)
            self.check(ops.verify, lambda seed: {**decode_of(seed), **{
                name: x.unsqueeze(1) for name, x in decode_of(seed).items() if name != "pool"}})
            self.check(ops.norm, lambda seed: {"x": inside(3, HV, V, seed=seed), "z": inside(3, 1, HV * V, seed=seed + 1),
                                               "weight": inside(V, seed=seed + 2)})
            self.check(ops.norm, lambda seed: {"x": inside(2, 3, HV, V, seed=seed), "z": inside(2, 3, HV, V, seed=seed + 1),
                                               "out": inside(2, 3, HV, V, seed=seed + 2)})

            def update(seed):
                return {"x": inside(B, 1, 24, seed=seed).transpose(1, 2), "conv_state": inside(B, 24, WIDTH, seed=seed + 1),
                        "weight": inside(24, WIDTH, seed=seed + 2), "activation": "silu"}

            self.check(causal_conv1d.causal_conv1d_update, update)

    def test_versions_are_counted(self):
        with torch.no_grad():
            for _ in range(3):
                given = layer_of(1)
                before = given["pool"]._version
                ops.layer(**given)
                self.assertEqual(given["pool"]._version, before + 1)

    def test_lengths_on_the_host_are_no_layout(self):
        def prefill(lengths):
            given = layer_of(5)
            given.update(x=inside(5, CHANNELS, seed=1), z=inside(5, 1, HV * V, seed=2), a=inside(5, HV, seed=3), b=inside(5, HV, seed=4),
                         decodes=0, cu_seqlens=torch.tensor(lengths, dtype=torch.int32))
            return ops.layer(**given)

        with torch.no_grad():
            first = [prefill([0, 2, 5]) for _ in range(3)][-1]
            other = prefill([0, 4, 5])
            with mock.patch.object(calls.Calls, "run", lambda self, key, values, function: function()):
                wanted = prefill([0, 4, 5])
        self.assertTrue(torch.equal(other, wanted))
        self.assertFalse(torch.equal(other, first))

    def test_one_tensor_for_two_arguments(self):
        def decode(same, batch):
            given = decode_of(3, batch)
            return ops.decode(**{**given, "k": given["q"] if same else given["k"]})

        with torch.no_grad():
            for batch, order in ((3, (True, True, False, False, True)), (4, (False, False, True, True, False))):
                for same in order:
                    with mock.patch.object(calls.Calls, "run", lambda self, key, values, function: function()):
                        wanted = decode(same, batch)
                    self.assertTrue(torch.equal(decode(same, batch), wanted))

    def test_memory_that_the_simulator_does_not_reach(self):
        with torch.no_grad():
            for seed in range(3):
                ops.layer(**layer_of(seed))
            given, others = layer_of(7), layer_of(7)
            wanted = ops.layer(**given)
            others = {name: x.clone() if name in ("x", "pool") else x for name, x in others.items()}
            self.assertTrue(torch.equal(ops.layer(**others), wanted))
            self.assertTrue(torch.equal(others["pool"], given["pool"]))

    def test_a_refusal_of_the_library(self):
        with torch.no_grad():
            def norm(x, out):
                return ops.norm(x, inside(3, HV, V, seed=2), out=out)

            for seed in range(3):
                wanted = norm(inside(3, HV, V, seed=1), inside(3, HV, V, seed=seed))
            memory = inside(4, HV, V, seed=1)
            with self.assertRaises(dw.ArgumentError):
                norm(memory[:3], memory[1:])
            self.assertTrue(torch.equal(norm(inside(3, HV, V, seed=1), inside(3, HV, V, seed=9)), wanted))

    def test_threads(self):
        with torch.no_grad():
            wanted = {seed: ops.layer(**layer_of(seed)) for seed in range(4)}
        wrong = []

        def run(seed):
            with torch.no_grad():
                for _ in range(20):
                    if not torch.equal(ops.layer(**layer_of(seed)), wanted[seed]):
                        wrong.append(seed)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
