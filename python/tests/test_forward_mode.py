"""Forward-mode derivatives, which no op has, and outputs that require a gradient: errors, not wrong numbers. On the
simulator."""

import unittest

import deltawave as dw

from .common import np
from .test_ops import torch

if torch is not None:
    from torch.autograd import forward_ad

    from deltawave import causal_conv1d, drafts, fla, ops

HK, HV, K, V, T = 1, 2, 32, 16, 5


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class ForwardMode(unittest.TestCase):
    def setUp(self):
        random = torch.Generator().manual_seed(3)
        self.normal = lambda *shape: torch.randn(*shape, generator=random)
        self.rows = lambda *shape: self.normal(*shape).to(torch.bfloat16)

    def operations(self):
        """Functions of the tensor that each is differentiated by."""
        q, k, v = self.rows(T, HK, K), self.rows(T, HK, K), self.rows(T, HV, V)
        z, a, a_log, channels = self.rows(T, HV, V), self.normal(T, HV), self.normal(HV), 2 * HK * K + HV * V
        weight, pool = self.rows(channels, 4), self.normal(T, HV, K, V)
        x, heads = self.rows(T, channels), (HK, HV, K, V)
        conv_pool = torch.zeros(2, channels, 3, dtype=torch.bfloat16)
        table = torch.arange(T, dtype=torch.int32)[:, None]
        return {
            "norm": (lambda x: ops.norm(x, z), v),
            "norm, raw op": (lambda x: torch.ops.deltawave.norm(x, z), v),
            "norm, out": (lambda x: ops.norm(x, z, out=torch.empty_like(x)), v),
            "gate": (lambda x: ops.gate(x, a, a_log)[0], a),
            "prefill": (lambda x: ops.prefill(q, k, x)[0], v),
            "prefill_pool": (lambda x: ops.prefill_pool(q, k, x, pool.clone()), v),
            "decode": (lambda x: ops.decode(q, k, x, pool.clone()), v),
            "verify": (lambda x: ops.verify(q[None], k[None], x[None], pool)[0], v),
            "decode_drafts": (lambda x: drafts.decode_drafts(q[:, None], k[:, None], x[:, None], pool.clone(), table), v),
            "conv": (lambda x: ops.conv(x, weight, None, None, *heads)[2], x),
            "layer": (lambda x: ops.layer(x, a, a, conv_pool, pool[:2], weight, a_log, *heads, z=z), x),
            "layer_forward": (lambda x: ops.layer_forward(x, a, a, weight, a_log, *heads, z, None, None, None, None, None,
                                                          None, 1e-6, "silu", True, False, None, "grouped", "flat")[0], x),
            "chunk": (lambda x: fla.chunk_gated_delta_rule(q[None], k[None], x[None], a[None], a[None])[0], v),
            "causal_conv1d": (lambda x: causal_conv1d.causal_conv1d_fn(x, weight[:V], activation="silu"), self.rows(1, V, T)),
        }

    def test_dual_tensors_are_refused(self):
        for name, (function, x) in self.operations().items():
            for required in (False, True):
                with self.subTest(name=name, required=required):
                    if required and name in ("norm, out", "norm, raw op"):
                        continue
                    self.assertTrue(torch.isfinite(function(x).float()).all())
                    with forward_ad.dual_level():
                        dual = forward_ad.make_dual(x.clone().requires_grad_(required), torch.ones_like(x))
                        with self.assertRaises(NotImplementedError) as caught:
                            function(dual)
                    self.assertRegex(str(caught.exception), "forward.mode")

    def test_functional_jvp_is_refused(self):
        for name, (function, x) in self.operations().items():
            if name == "norm, raw op":
                continue  # torch.func hides tangents from kernels
            with self.subTest(name=name):
                with self.assertRaises(NotImplementedError) as caught:
                    torch.func.jvp(function, (x,), (torch.ones_like(x),))
                self.assertRegex(str(caught.exception), "forward.mode")

    def test_other_tensors_pass_inside_a_level(self):
        x, z = self.rows(T, HV, V), self.rows(T, HV, V)
        wanted = ops.norm(x, z)
        with forward_ad.dual_level():
            forward_ad.make_dual(self.normal(3), torch.ones(3))
            self.assertTrue(torch.equal(ops.norm(x, z), wanted))

    def test_an_out_that_requires_a_gradient_is_refused(self):
        x, z = self.rows(T, HV, V), self.rows(T, HV, V)
        q, k, pool = self.rows(T, HK, K), self.rows(T, HK, K), self.normal(T, HV, K, V)
        for call in (lambda out: ops.norm(x, z, out=out), lambda out: ops.prefill(q, k, x, out=out),
                     lambda out: ops.decode(q, k, x, pool, out=out)):
            out = torch.full_like(x, 7).requires_grad_()
            for given in (out, out * 1):
                with self.assertRaises(dw.ArgumentError) as caught:
                    call(given)
                self.assertTrue(str(caught.exception).startswith("out: requires a gradient"), str(caught.exception))
                self.assertTrue((given == 7).all())
            with torch.no_grad():
                call(out)
            self.assertFalse((out == 7).all())


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Named(unittest.TestCase):
    """What the errors of ops say."""

    def test_types_that_kernels_lack(self):
        a, double = torch.zeros(3, 2), torch.zeros(2, dtype=torch.float64)
        for call in (lambda: ops.gate(a, a, torch.zeros(2), double),
                     lambda: ops.prefill(torch.zeros(3, 1, 16, dtype=torch.bfloat16), torch.zeros(3, 1, 16, dtype=torch.bfloat16),
                                         torch.zeros(3, 2, 16, dtype=torch.bfloat16), a=a, b=a, a_log=torch.zeros(2),
                                         dt_bias=double)):
            with self.assertRaises(dw.ArgumentError) as caught:
                call()
            self.assertEqual(str(caught.exception), "dt_bias: dtype torch.float64; it must be one of f32, bf16, fp16")

    def test_a_layer_of_no_sequences(self):
        channels, heads = 2 * HK * K + HV * V, (HK, HV, K, V)
        for rows in (0, 3):
            x = torch.ones(rows, channels, dtype=torch.bfloat16, requires_grad=True)
            a = torch.zeros(rows, HV)
            y, o, conv, state = ops.layer_forward(
                x, a, a, torch.ones(channels, 4, dtype=torch.bfloat16), torch.zeros(HV), *heads,
                torch.ones(rows, HV, V, dtype=torch.bfloat16), None, None, None, None, None, torch.tensor([0]), 1e-6, "silu",
                True, False, None, "grouped", "flat")
            self.assertEqual((tuple(y.shape), tuple(conv.shape), tuple(state.shape)),
                             ((rows, HV, V), (0, channels, 3), (0, HV, K, V)))
            self.assertTrue((y == 0).all())
            gradient, = torch.autograd.grad(y.float().sum() + state.sum(), x)
            self.assertTrue((gradient == 0).all() and gradient.shape == x.shape)


if __name__ == "__main__":
    unittest.main()
