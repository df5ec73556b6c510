"""Gradients of conv, gate and norm as torch ops on the CPU, which run on the simulator, beside those of torch's autograd in
double precision."""

import unittest

from .common import np

try:
    import torch
    from torch.library import opcheck

    from deltawave import ArgumentError, ops
except ImportError as problem:
    if problem.name != "torch" and "opcheck" not in str(problem) and "custom_op" not in str(problem):
        raise
    torch = None

HK, HV, K, V, TOKENS, WIDTH = 1, 2, 16, 32, 40, 4
OFFSETS = [0, 25, 25, 38]


def normal(*shape, seed=1, dtype=None):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made if dtype is None else made.to(dtype)


def close(test, found, wanted, bar):
    for name, (x, y) in enumerate(zip(found, wanted)):
        error = (x.double() - y.double()).norm() / y.double().norm()
        test.assertLess(float(error), bar, name)


def gradients(function, inputs, weights):
    """Gradients of the sum of products of what `function` returns and `weights`, in double precision."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    sum((y * w.double()).sum() for y, w in zip(function(*inputs), weights)).backward()
    return [x.grad for x in inputs]


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Gradients(unittest.TestCase):
    def test_norm(self):
        for gate, dtype in (("silu", torch.bfloat16), ("sigmoid", torch.float16)):
            x, z, d_y = (normal(TOKENS, HV, V, seed=s, dtype=dtype) for s in (1, 2, 3))
            weight = normal(V, seed=4)

            def norm(x, z, weight):
                y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
                return (y * z.sigmoid() * (z if gate == "silu" else 1),)

            wanted = gradients(norm, (x, z, weight), (d_y,))
            found = ops.norm_backward(d_y, x, z, weight, 1e-6, gate, [True] * 3)
            close(self, found, wanted, 3e-3)
            # Expanded from one row, as a sum's gradient is, and without a weight.
            row = normal(1, 1, V, dtype=dtype).expand(TOKENS, HV, V)
            wanted = gradients(lambda x, z: norm(x, z, torch.ones(V)), (x, z), (row,))
            found = ops.norm_backward(row, x, z, None, 1e-6, gate, [True, True, False])
            close(self, found[:2], wanted, 3e-3)
            self.assertEqual(found[2].numel(), 0)
            one = torch.ones((), dtype=dtype).expand(TOKENS, HV, V)
            found = ops.norm_backward(one, x, z, weight, 1e-6, gate, [False, False, True])
            close(self, found[2:], gradients(norm, (x, z, weight), (one,))[2:], 1e-5)

    def test_gate(self):
        a, b = (4 * normal(TOKENS, HV, seed=s, dtype=torch.bfloat16) for s in (1, 2))
        a_log, dt_bias, d_g, d_beta = (normal(*shape, seed=s) for s, shape in ((3, (HV,)), (4, (HV,)), (5, (TOKENS, HV)),
                                                                               (6, (TOKENS, HV))))

        def gate(a, b, a_log, dt_bias):
            return -a_log.exp() * torch.nn.functional.softplus(a + dt_bias), 2 * b.sigmoid()

        wanted = gradients(gate, (a, b, a_log, dt_bias), (d_g, d_beta))
        found = ops.gate_backward(d_g, d_beta, a, b, a_log, dt_bias, True, [True] * 4)
        close(self, found, wanted, 4e-3)
        close(self, found[2:], wanted[2:], 1e-6)
        alone = ops.gate_backward(None, d_beta, a, b, a_log, None, True, [False, True, False, False])
        self.assertTrue(torch.equal(alone[1], found[1]))
        self.assertEqual([x.numel() for x in alone], [0, TOKENS * HV, 0, 0])

    def conv(self, x, weight, bias, state, norm):
        """Outputs and states of a convolution, on double precision."""
        channels, outputs, states = weight.shape[0], [], []
        for n, (begin, end) in enumerate(zip(OFFSETS, OFFSETS[1:])):
            rows = torch.cat([state[n].T, x[begin:end, :channels]])
            states.append(rows[rows.shape[0] - WIDTH + 1:].T)
            for t in range(end - begin):
                y = (rows[t:t + WIDTH].T * weight).sum(-1) + bias
                y = y * y.sigmoid()
                keys = [part / (part.square().sum() + 1e-6).sqrt() if norm else part for part in y[:2 * K].split(K)]
                outputs.append(torch.cat([*keys, y[2 * K:]]))
        return torch.stack(outputs), torch.stack(states)

    def test_conv(self):
        channels = 2 * HK * K + HV * V
        for norm, dtype, columns in ((False, torch.bfloat16, channels), (True, torch.float16, channels + HV * V)):
            x = normal(TOKENS, columns, dtype=dtype)
            weight, bias = normal(channels, WIDTH, seed=2), normal(channels, seed=3)
            state, d_state = (normal(3, channels, WIDTH - 1, seed=s, dtype=dtype) for s in (4, 5))
            d_y = normal(TOKENS, channels, seed=6, dtype=dtype)
            wanted = gradients(lambda *inputs: self.conv(*inputs, norm), (x, weight, bias, state), (d_y[:38], d_state))
            parts = (d_y[:, :K].reshape(TOKENS, HK, K), d_y[:, K:2 * K].reshape(TOKENS, HK, K),
                     d_y[:, 2 * K:].reshape(TOKENS, HV, V))
            cu_seqlens = torch.tensor(OFFSETS)
            arguments = (*parts, d_state, x, weight, bias, state, None, HK, HV, K, V, cu_seqlens, "silu", "flat",
                         "channel_major", norm)
            found = ops.conv_backward(*arguments, [True] * 4)
            close(self, found, wanted, 4e-3)
            close(self, found[1:3], wanted[1:3], 2e-5)
            self.assertEqual(float(found[0][:, channels:].abs().sum() + found[0][38:].abs().sum()), 0.0)
            alone = ops.conv_backward(*arguments, [False, True, False, False])
            self.assertTrue(torch.equal(alone[1], found[1]))

    def layer(self, x, z, a, b, weight, bias, a_log, dt_bias, norm, state, recurrent):
        """y and the states of a layer, on double precision."""
        (convolved, states), y, finals = self.conv(x, weight, bias, state, False), [], []
        for n, (begin, end) in enumerate(zip(OFFSETS, OFFSETS[1:])):
            s = recurrent[n]
            for t in range(begin, end):
                q, k = (part / (part.square().sum() + 1e-6).sqrt() for part in convolved[t, :2 * K].split(K))
                g = -a_log.exp() * torch.nn.functional.softplus(a[t] + dt_bias)
                s = g.exp()[:, None, None] * s
                error = convolved[t, 2 * K:].reshape(HV, V) - torch.einsum("hkv,k->hv", s, k)
                s = s + torch.einsum("k,hv->hkv", k, b[t].sigmoid()[:, None] * error)
                y.append(K ** -0.5 * torch.einsum("hkv,k->hv", s, q))
            finals.append(s)
        o = torch.stack(y)
        y = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm * z[:38] * z[:38].sigmoid()
        return y, states, torch.stack(finals)

    def test_layer(self):
        channels, dtype = 2 * HK * K + HV * V, torch.bfloat16
        x, z = normal(TOKENS, channels, dtype=dtype), normal(TOKENS, HV, V, seed=2, dtype=dtype)
        a, b = (normal(TOKENS, HV, seed=s, dtype=dtype) for s in (3, 4))
        weight, bias = normal(channels, WIDTH, seed=5), normal(channels, seed=6)
        a_log, dt_bias, norm = normal(HV, seed=7), normal(HV, seed=8), normal(V, seed=9)
        state, recurrent = normal(3, channels, WIDTH - 1, seed=10, dtype=dtype), normal(3, HV, K, V, seed=11)
        upstream = (normal(TOKENS, HV, V, seed=12, dtype=dtype), normal(3, channels, WIDTH - 1, seed=13, dtype=dtype),
                    normal(3, HV, K, V, seed=14))
        upstream[0][38:] = float("nan")  # rows past the last sequence do not count
        cu_seqlens = torch.tensor(OFFSETS)
        heads, options = (HK, HV, K, V), (cu_seqlens, 1e-6, "silu", True, False, None, "grouped", "flat")
        inputs = (x, z, a, b, weight, bias, a_log, dt_bias, norm, state, recurrent)
        with torch.no_grad():
            exact = self.layer(*(t.double() for t in inputs))
        of_layer = (z, bias, dt_bias, norm, state, recurrent, *options)
        y, o, states, finals = ops.layer_forward(x, a, b, weight, a_log, *heads, *of_layer)
        close(self, (y[:38], states, finals), exact, 2e-2)
        wanted = gradients(self.layer, inputs, (upstream[0][:38], *upstream[1:]))
        found = ops.layer_backward(*upstream, o, x, a, b, weight, a_log, *heads, *of_layer, [True] * 11)
        close(self, found, wanted, 3e-2)
        self.assertEqual(float(sum(t[38:].abs().sum() for t in found[:4])), 0.0)
        # z in the rows of x, and its gradient in those of x's.
        packed = torch.cat([x, z.reshape(TOKENS, -1)], -1)
        of_layer = (None, bias, dt_bias, norm, state, recurrent, *options)
        y2, o2, _, _ = ops.layer_forward(packed, a, b, weight, a_log, *heads, *of_layer)
        self.assertTrue(torch.equal(y, y2) and torch.equal(o, o2))
        again = ops.layer_backward(*upstream, o, packed, a, b, weight, a_log, *heads, *of_layer, [True] + [False] * 10)
        self.assertTrue(torch.equal(again[0], torch.cat([found[0], found[1].reshape(TOKENS, -1)], -1)))
        self.assertEqual([t.numel() for t in again[1:]], [0] * 10)
        opcheck(torch.ops.deltawave.layer_backward, (*upstream, o, x, a, b, weight, a_log, *heads, z, *of_layer[1:],
                                                     [True] * 11), test_utils=("test_schema", "test_faketensor"))
        opcheck(torch.ops.deltawave.layer_forward, (x, a, b, weight, a_log, *heads, z, *of_layer[1:]),
                test_utils=("test_schema", "test_faketensor"))

    def test_opcheck(self):
        x, z, d_y = (normal(6, HV, V, dtype=torch.bfloat16) for _ in range(3))
        tests = ("test_schema", "test_faketensor")
        opcheck(torch.ops.deltawave.norm_backward, (d_y, x, z, normal(V), 1e-6, "silu", [True] * 3), test_utils=tests)
        a, d_g = normal(6, HV), normal(6, HV)
        opcheck(torch.ops.deltawave.gate_backward, (d_g, None, a, a, normal(HV), None, False, [True] * 4), test_utils=tests)
        channels = 2 * K + HV * V
        packed, weight = normal(6, channels, dtype=torch.bfloat16), normal(channels, WIDTH)
        q, v = normal(6, HK, K, dtype=torch.bfloat16), normal(6, HV, V, dtype=torch.bfloat16)
        opcheck(torch.ops.deltawave.conv_backward,
                (q, q, v, None, packed, weight, None, None, None, HK, HV, K, V, None, "silu", "flat", "channel_major", False,
                 [True, True, True, False]), test_utils=tests)

    def test_refusals(self):
        x = normal(6, HV, V, dtype=torch.bfloat16)
        with self.assertRaisesRegex(ArgumentError, "d_y"):
            ops.norm_backward(x[:5], x, x, None, 1e-6, "silu", [True] * 3)
        with self.assertRaisesRegex(ArgumentError, "gate"):
            ops.norm_backward(x, x, x, None, 1e-6, "tanh", [True] * 3)
        with self.assertRaisesRegex(ArgumentError, "d_g"):
            ops.gate_backward(normal(6, 3), None, normal(6, 2), normal(6, 2), normal(2), None, False, [True] * 4)


if __name__ == "__main__":
    unittest.main()
