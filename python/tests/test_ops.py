"""The torch custom ops on tensors of the CPU, which run on the simulator."""

import unittest

from . import reference
from .common import np

try:
    import torch
    from torch.library import opcheck

    from deltawave import ArgumentError, ops
except ImportError as problem:
    if problem.name != "torch" and "opcheck" not in str(problem) and "custom_op" not in str(problem):
        raise
    torch = None

HK, HV, K, V, TOKENS = 1, 2, 16, 32, 70
OFFSETS = [0, 65, TOKENS]


def inputs(dtype, leading=(TOKENS,)):
    made = torch.Generator().manual_seed(1)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*leading, *shape, generator=made)

    return {"q": uniform(-.4, .4, HK, K).to(dtype), "k": uniform(-.4, .4, HK, K).to(dtype),
            "v": uniform(-1, 1, HV, V).to(dtype), "g": uniform(-.2, 0, HV), "beta": uniform(0, 1, HV)}


def exact(x):
    return {name: t.double().numpy() for name, t in x.items()}


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Ops(unittest.TestCase):
    def close(self, found, wanted, bar=8e-3):
        self.assertLess(reference.error(found.double().numpy(), wanted), bar)

    def test_prefill_of_packed_rows(self):
        x = inputs(torch.bfloat16)
        states = torch.rand(2, HV, V, K, generator=torch.Generator().manual_seed(2))
        start = states.double().numpy().swapaxes(2, 3)
        wanted = reference.prefill(**exact(x), cu_seqlens=OFFSETS, states=start, scale=K ** -0.5)
        on_host = torch.tensor(OFFSETS)
        on_device = ops.empty((3,), torch.int32).copy_(on_host)
        found = []
        for lengths in (on_host, on_device):
            o, after = ops.prefill(**x, initial_state=states, cu_seqlens=lengths, state_layout="value_major", segments=1,
                                   path="split")
            self.close(o, wanted[0])
            self.close(after.swapaxes(2, 3), wanted[1])
            found.append((o, after))
        self.assertTrue(torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]))
        # One batch of one, as other packages have it, and sequence by sequence.
        o, _ = ops.prefill(**{name: t[None] for name, t in x.items()}, cu_seqlens=on_host, segments=1)
        zeros = np.zeros((2, HV, K, V))
        wanted, _ = reference.prefill(**exact(x), cu_seqlens=OFFSETS, states=zeros, scale=K ** -0.5)
        self.close(o[0], wanted)
        for begin, end in zip(OFFSETS, OFFSETS[1:]):
            alone, _ = ops.prefill(**{name: t[begin:end] for name, t in x.items()}, segments=1)
            self.assertTrue(torch.equal(alone, o[0, begin:end]))
        with self.assertRaises(ArgumentError):
            ops.prefill(**inputs(torch.bfloat16, (2, TOKENS)), cu_seqlens=on_host)

    def test_prefill_on_a_pool(self):
        x = inputs(torch.bfloat16)
        before = torch.rand(4, HV, V, K, generator=torch.Generator().manual_seed(5))
        pool, on_host = before.clone(), torch.tensor(OFFSETS)
        slots, has = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([True, False])
        states = before[[3, 1]]
        o, after = ops.prefill(**x, initial_state=states, has_initial_state=has, cu_seqlens=on_host,
                               state_layout="value_major")
        # The state after the first sequence's 64 tokens goes to slot 0.
        snapshots = torch.tensor([0, -1, -1], dtype=torch.int32)
        found = ops.prefill_pool(x["q"], x["k"], x["v"], pool, slots, has_initial_state=has, g=x["g"], beta=x["beta"],
                                 cu_seqlens=on_host, pool_layout="value_major", snapshot_slots=snapshots)
        self.assertTrue(torch.equal(found, o) and torch.equal(pool[[3, 1]], after))
        self.assertTrue(torch.equal(pool[2], before[2]))
        self.assertFalse(torch.equal(pool[0], before[0]))

    def test_decode(self):
        x = inputs(torch.bfloat16, (2,))
        before = torch.rand(3, HV, K, V, generator=torch.Generator().manual_seed(6))
        pool, slots = before.clone(), torch.tensor([2, 0], dtype=torch.int32)
        o = ops.decode(x["q"], x["k"], x["v"], pool, slots, g=x["g"], beta=x["beta"])
        wanted, states = reference.prefill(**exact(x), cu_seqlens=[0, 1, 2], states=before[[2, 0]].double().numpy(),
                                           scale=K ** -0.5)
        self.close(o, wanted)
        self.close(pool[[2, 0]], states, 1e-5)
        self.assertTrue(torch.equal(pool[1], before[1]))

    def test_prefill_of_dense_batches_with_raw_gates(self):
        x = inputs(torch.float16, (2, TOKENS))
        raw = torch.Generator().manual_seed(3)
        a, b = (torch.randn(2, TOKENS, HV, generator=raw).half() for _ in range(2))
        a_log, dt_bias = (torch.randn(HV, generator=raw) for _ in range(2))
        o, _ = ops.prefill(x["q"], x["k"], x["v"], a=a, b=b, a_log=a_log, dt_bias=dt_bias, qk_l2norm=True)
        g, beta = (t.double().numpy() for t in ops.gate(a, b, a_log, dt_bias))
        q, k = (reference.l2_normalised(x[name].double().numpy()) for name in "qk")
        for n in range(2):
            wanted, _ = reference.prefill(q[n], k[n], x["v"][n].double().numpy(), g[n], beta[n], [0, TOKENS],
                                          torch.zeros(1, HV, K, V).numpy(), K ** -0.5)
            self.close(o[n], wanted, 1e-3)

    def conv_arguments(self):
        made = torch.Generator().manual_seed(4)
        channels = 2 * HK * K + HV * V
        return {"x": torch.randn(TOKENS, channels + 3, generator=made).bfloat16(),
                "weight": torch.randn(channels, 4, generator=made).bfloat16(), "bias": None,
                "state": torch.randn(4, channels, 3, generator=made).bfloat16(), "key_heads": HK, "value_heads": HV,
                "key_dim": K, "value_dim": V, "cu_seqlens": torch.tensor(OFFSETS, dtype=torch.int32),
                "slots": torch.tensor([2, 0], dtype=torch.int32), "has_initial_state": torch.tensor([True, False])}

    def test_conv(self):
        given = self.conv_arguments()
        before = given["state"].clone()
        q, k, v = ops.conv(**given)
        start = before.double().numpy()[[2, 0]]
        start[1] = 0
        channels = before.shape[1]
        y, states = reference.conv(given["x"].double().numpy()[:, :channels], given["weight"].double().numpy(), 0,
                                   OFFSETS, start)
        self.close(torch.cat([t.reshape(TOKENS, -1) for t in (q, k, v)], 1), y)
        after = given["state"].double().numpy()
        self.assertTrue((after[[2, 0]] == states).all())
        self.assertTrue(torch.equal(given["state"][[1, 3]], before[[1, 3]]))

    def test_torch_sees_what_they_do(self):
        checks = ("test_schema", "test_faketensor")
        x = inputs(torch.bfloat16)
        opcheck(torch.ops.deltawave.prefill.default, tuple(x.values()), test_utils=checks)
        pool = torch.zeros(1, HV, K, V)
        opcheck(torch.ops.deltawave.prefill_pool.default, (x["q"], x["k"], x["v"], pool), test_utils=checks)
        one = inputs(torch.bfloat16, (1,))
        opcheck(torch.ops.deltawave.decode.default, (one["q"], one["k"], one["v"], pool), test_utils=checks)
        given = self.conv_arguments()
        opcheck(torch.ops.deltawave.conv.default, tuple(given.values()), test_utils=checks)
        opcheck(torch.ops.deltawave.gate.default, (x["g"], x["beta"], torch.zeros(HV)), test_utils=checks)
        opcheck(torch.ops.deltawave.norm.default, (x["v"], x["v"]), test_utils=checks)

    def test_torch_compile_takes_them_whole(self):
        given = self.conv_arguments()

        def layer(x, weight, state, slots, has, g, beta, cu_seqlens):
            q, k, v = ops.conv(x * 1, weight, None, state, HK, HV, K, V, cu_seqlens, slots, has)
            o, states = ops.prefill(q, k, v, g, beta, cu_seqlens=cu_seqlens, qk_l2norm=True)
            return ops.norm(o, v, gate="sigmoid") * 2, states

        gates = inputs(torch.bfloat16)
        arguments = [given[n] for n in ("x", "weight", "state", "slots", "has_initial_state")]
        arguments += [gates["g"], gates["beta"], given["cu_seqlens"]]
        copies = [t.clone() for t in arguments]
        eager = layer(*arguments)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(*copies)
        for a, b in zip((*eager, arguments[2]), (*compiled, copies[2])):
            self.assertTrue(torch.equal(a, b))
