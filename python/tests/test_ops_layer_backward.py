"""Gradients of the ops around the recurrence, `conv`, `norm` and `gate`, and of `causal_conv1d_fn`, on the simulator, beside
those of float64."""

import unittest

import deltawave as dw
from deltawave import Unsupported

from .common import np
from .test_ops import torch

if torch is not None:
    import torch.nn.functional as F

    from deltawave import causal_conv1d, ops

    from . import differentiable

HK, HV, K, V = 1, 2, 32, 16
CHANNELS = 2 * HK * K + HV * V


def convolved(x, weight, bias, offsets=None, states=None, silu=True):
    """The convolution of packed rows `[T, C]`, and the columns `[N, C, width - 1]` after each sequence."""
    width, outputs, after = weight.shape[1], [], []
    offsets = [0, len(x)] if offsets is None else offsets
    for n, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        past = x.new_zeros(width - 1, x.shape[1]) if states is None else states[n].T
        seen = torch.cat([past, x[begin:end]])
        y = sum(seen[tap:tap + end - begin] * weight[:, tap] for tap in range(width))
        outputs.append(y if bias is None else y + bias)
        after.append(seen[len(seen) - width + 1:].T)
    y = torch.cat(outputs)
    return F.silu(y) if silu else y, torch.stack(after)


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Gradients(unittest.TestCase):
    def setUp(self):
        self.random = torch.Generator().manual_seed(11)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random).to(dtype or torch.float32)

    def compare(self, inputs, function, exact, bar):
        """Gradients of `function` beside those of `exact`, from random gradients of all outputs; twice the same bits."""
        runs = []
        weights = None
        for kind in (function, function, exact):
            given = [None if x is None else (x.double() if kind is exact else x).detach().clone().requires_grad_()
                     for x in inputs]
            outputs = kind(*given)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            weights = weights or [self.normal(*o.shape, dtype=o.dtype) for o in outputs]
            torch.autograd.backward(outputs, [w.to(o.dtype) for w, o in zip(weights, outputs)])
            runs.append([None if x is None else x.grad for x in given])
        for i, (one, two, wanted) in enumerate(zip(*runs)):
            if wanted is None:
                continue
            self.assertTrue(torch.equal(one, two), i)
            self.assertEqual((one.dtype, one.shape), (inputs[i].dtype, inputs[i].shape))
            self.assertLess(float((one.double() - wanted).norm() / wanted.norm()), bar, i)

    def test_convolution(self):
        for offsets, width, activation, dtype, biased in (
                (None, 4, "silu", torch.bfloat16, True), ([0, 1, 1, 3, 66, 70], 4, "silu", torch.bfloat16, True),
                ([0, 2, 70], 3, "none", torch.float16, False), ([0, 35, 70], 2, "silu", torch.float16, True)):
            for qk_l2norm in (False, True):
                with self.subTest(offsets=offsets, width=width, qk_l2norm=qk_l2norm):
                    x, weight = self.normal(70, CHANNELS, dtype=dtype), 0.5 * self.normal(CHANNELS, width)
                    bias = self.normal(CHANNELS) if biased else None

                    def op(x, weight, bias):
                        lengths = None if offsets is None else torch.tensor(offsets)
                        return ops.conv(x, weight, bias, None, HK, HV, K, V, lengths, activation=activation,
                                        qk_l2norm=qk_l2norm)

                    def exact(x, weight, bias):
                        rows, _ = convolved(x, weight, bias, offsets, silu=activation == "silu")
                        q, k, v = (r.unflatten(1, (-1, d)) for r, d in zip(rows.split((HK * K, HK * K, HV * V), 1), (K, K, V)))
                        return (differentiable.unit(q), differentiable.unit(k), v) if qk_l2norm else (q, k, v)

                    self.compare((x, weight, bias), op, exact, 4e-3 if dtype == torch.bfloat16 else 1e-3)

    def test_convolution_of_some_columns_with_gates(self):
        wide = self.normal(20, CHANNELS + 24, dtype=torch.bfloat16)
        weight, a, b, a_log = self.normal(CHANNELS, 4), self.normal(20, HV), self.normal(20, HV), self.normal(HV)

        def op(x, weight, a, b, a_log):
            return ops.conv(x[:, :CHANNELS], weight, None, None, HK, HV, K, V, a=a, b=b, a_log=a_log)

        def exact(x, weight, a, b, a_log):
            rows, _ = convolved(x[:, :CHANNELS], weight, None)
            parts = (r.unflatten(1, (-1, d)) for r, d in zip(rows.split((HK * K, HK * K, HV * V), 1), (K, K, V)))
            return (*parts, *differentiable.gates(a, b, a_log))

        self.compare((wide, weight, a, b, a_log), op, exact, 4e-3)

    def test_norm(self):
        for gate, dtype, with_weight in (("silu", torch.bfloat16, True), ("sigmoid", torch.float16, True),
                                         ("silu", torch.float16, False)):
            shape = (2, 9, HV, V)
            x, z = self.normal(*shape, dtype=dtype), self.normal(*shape, dtype=dtype)
            weight = self.normal(V) if with_weight else None

            def exact(x, z, weight):
                y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (F.silu(z) if gate == "silu" else z.sigmoid())
                return y if weight is None else y * weight

            self.compare((x, z, weight), lambda x, z, weight: ops.norm(x, z, weight, gate=gate), exact,
                         4e-3 if dtype == torch.bfloat16 else 1e-3)

    def test_gate(self):
        for dtype, biased, most in ((torch.bfloat16, True, 1.0), (torch.float32, False, 2.0)):
            a, b = self.normal(2, 33, HV, dtype=dtype), self.normal(2, 33, HV, dtype=dtype)
            bias = self.normal(HV) if biased else None
            self.compare((a, b, self.normal(HV), bias), lambda *x: ops.gate(*x, most == 2.0),
                         lambda *x: differentiable.gates(*x, most=most), 4e-3 if dtype == torch.bfloat16 else 1e-5)

    def test_gradients_of_any_strides(self):
        x = self.normal(12, CHANNELS, dtype=torch.bfloat16).requires_grad_()
        weight = self.normal(CHANNELS, 4)
        q, k, v = ops.conv(x, weight, None, None, HK, HV, K, V)
        found, = torch.autograd.grad(q.sum() + v.sum(), x, retain_graph=True)  # strides of 0, and k unused
        wanted, = torch.autograd.grad((q, k, v), x, [torch.ones_like(q), torch.zeros_like(k), torch.ones_like(v)])
        self.assertTrue(torch.equal(found, wanted))
        o, z = (self.normal(12, HV, V, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        y = ops.norm(o, z)
        d_y = self.normal(V, HV, 12, dtype=torch.bfloat16).permute(2, 1, 0)
        one = torch.autograd.grad(y, (o, z), d_y, retain_graph=True)
        other = torch.autograd.grad(y, (o, z), d_y.contiguous(), retain_graph=True)
        self.assertTrue(all(map(torch.equal, one, other)))
        one = torch.autograd.grad(y.sum(), (o, z), retain_graph=True)
        other = torch.autograd.grad(y, (o, z), torch.ones_like(y))
        self.assertTrue(all(map(torch.equal, one, other)))

    def test_sums_of_empty_batches(self):
        """The gradient of a sum is one number with strides of 0, and there is nothing to copy."""
        x = torch.empty(0, CHANNELS, dtype=torch.bfloat16, requires_grad=True)
        o, z = (torch.empty(0, HV, V, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        q, k = (torch.empty(0, HK, K, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        gates = self.normal(0, HV)
        for made, leaf in ((ops.conv(x, self.normal(CHANNELS, 4), None, None, HK, HV, K, V)[0], x), (ops.norm(o, z), o),
                           (ops.prefill(q, k, o, g=gates, beta=gates)[0], q)):
            made.sum().backward()
            self.assertEqual(leaf.grad.shape, leaf.shape)

    def test_each_input_alone(self):
        x, weight, bias = self.normal(12, CHANNELS, dtype=torch.bfloat16), self.normal(CHANNELS, 4), self.normal(CHANNELS)
        o, z, scale = self.normal(6, HV, V, dtype=torch.bfloat16), self.normal(6, HV, V, dtype=torch.bfloat16), self.normal(V)
        a, b, a_log, dt = self.normal(6, HV), self.normal(6, HV), self.normal(HV), self.normal(HV)
        for inputs, op in (((x, weight, bias), lambda *t: ops.conv(*t, None, HK, HV, K, V)), ((o, z, scale), ops.norm),
                           ((a, b, a_log, dt), ops.gate)):
            every = [t.clone().requires_grad_() for t in inputs]
            made = op(*every)
            made = made if isinstance(made, tuple) else (made,)
            d = [self.normal(*m.shape, dtype=m.dtype) for m in made]
            wanted = torch.autograd.grad(made, every, d)
            for i in range(len(inputs)):
                given = [t.clone().requires_grad_(i == j) for j, t in enumerate(inputs)]
                again = op(*given)
                again = again if isinstance(again, tuple) else (again,)
                pairs = [(m, g) for m, g in zip(again, d) if m.requires_grad]
                torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
                self.assertTrue(torch.equal(given[i].grad, wanted[i]), i)
                self.assertTrue(all(t.grad is None for j, t in enumerate(given) if j != i))

    def test_a_convolution_refuses_the_same_with_and_without_gradients(self):
        weight, a_log = self.normal(CHANNELS, 4), self.normal(HV)
        for wants in (False, True):
            x = self.normal(9, CHANNELS, dtype=torch.bfloat16).requires_grad_(wants)
            rows, few, wide = self.normal(9, HV), self.normal(7, HV), self.normal(9, HV + 3)
            for name, a, b, log in (("a", few, rows, a_log), ("b", rows, few, a_log), ("a", wide, wide, self.normal(HV + 3)),
                                    ("a_log", rows, rows, self.normal(HV + 3))):
                with self.subTest(name=name, wants=wants), self.assertRaisesRegex(dw.ArgumentError, f"^{name}: shape"):
                    ops.conv(x, weight, None, None, HK, HV, K, V, a=a, b=b, a_log=log)
            with self.assertRaisesRegex(dw.ArgumentError, "^slots: given without a state"):
                ops.conv(x, weight, None, None, HK, HV, K, V, slots=torch.zeros(1, dtype=torch.int32))

    def test_gradients_of_gradients_are_refused(self):
        a, b, a_log = (self.normal(*shape).requires_grad_() for shape in ((6, HV), (6, HV), (HV,)))
        o, z = (self.normal(6, HV, V, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        x = self.normal(12, CHANNELS, dtype=torch.bfloat16).requires_grad_()
        rows = ops.conv(x, self.normal(CHANNELS, 4), None, None, HK, HV, K, V)[0]
        for name, made, of in (("gate", ops.gate(a, b, a_log)[0], a), ("norm", ops.norm(o, z), o), ("conv", rows, x)):
            first, = torch.autograd.grad(made.float().square().sum(), of, create_graph=True)
            with self.assertRaisesRegex(NotImplementedError, f"^{name}: no gradients of gradients"):
                first.float().square().sum().backward()

    def test_causal_conv1d(self):
        for batch, tokens, states, final, silu, by_token in ((2, 9, False, False, True, True), (2, 9, True, True, False, False),
                                                             (1, 2, True, True, True, True), (3, 1, False, True, True, False)):
            with self.subTest(batch=batch, tokens=tokens, states=states, final=final):
                x = self.normal(batch, tokens, 20, dtype=torch.bfloat16)
                x = x.transpose(1, 2) if by_token else x.transpose(1, 2).contiguous()
                start = self.normal(batch, 20, 3, dtype=torch.bfloat16) if states else None

                def op(x, weight, bias, start):
                    return causal_conv1d.causal_conv1d_fn(x, weight, bias, initial_states=start, return_final_states=final,
                                                          activation="silu" if silu else None)

                def exact(x, weight, bias, start):
                    offsets = list(range(0, batch * tokens + 1, tokens))
                    y, after = convolved(x.transpose(1, 2).flatten(0, 1), weight, bias, offsets, start, silu)
                    y = y.unflatten(0, (batch, tokens)).transpose(1, 2)
                    return (y, after) if final else y

                self.compare((x, self.normal(20, 4), self.normal(20), start), op, exact, 4e-3)

    def test_causal_conv1d_of_packed_sequences(self):
        seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.int32)
        x = self.normal(2, 9, 20, dtype=torch.bfloat16).transpose(1, 2)

        def exact(x, weight):
            y, _ = convolved(x.transpose(1, 2).flatten(0, 1), weight, None, [0, 3, 5, 6, 9, 17, 18], silu=False)
            return y.unflatten(0, (2, 9)).transpose(1, 2)

        self.compare((x, self.normal(20, 4)), lambda x, w: causal_conv1d.causal_conv1d_fn(x, w, seq_idx=seq_idx), exact, 4e-3)
        with self.assertRaisesRegex(Unsupported, "^final_states_out:"):
            causal_conv1d.causal_conv1d_fn(x.requires_grad_(), self.normal(20, 4), return_final_states=True,
                                           final_states_out=torch.zeros(2, 20, 3, dtype=x.dtype))


if __name__ == "__main__":
    unittest.main()
