"""Identities of gradients that hold for the kernels' own outputs: conservation, splitting, powers of two, order of a batch."""

import unittest

from .common import np
from .test_ops import torch

if torch is not None:
    from deltawave import ops

HK, HV, K, V = 1, 2, 32, 32
LENGTHS = (150, 64, 37)
TOKENS = sum(LENGTHS)


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Identities(unittest.TestCase):
    def setUp(self):
        self.random = torch.Generator().manual_seed(21)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random).to(dtype or torch.float32)

    def inputs(self, dtype, decay=1.0):
        x = {"q": self.normal(TOKENS, HK, K, dtype=dtype), "k": self.normal(TOKENS, HK, K, dtype=dtype),
             "v": self.normal(TOKENS, HV, V, dtype=dtype), "g": -decay * torch.rand(TOKENS, HV, generator=self.random),
             "beta": torch.rand(TOKENS, HV, generator=self.random), "initial_state": self.normal(len(LENGTHS), HV, K, V)}
        return x, self.normal(TOKENS, HV, V, dtype=dtype), self.normal(len(LENGTHS), HV, K, V)

    def run_op(self, x, d_o, d_state, lengths=LENGTHS):
        """Outputs, states and gradients by name."""
        leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        o, state = ops.prefill(**leaves, cu_seqlens=offsets, qk_l2norm=True)
        torch.autograd.backward([o, state], [d_o, d_state])
        return o.detach(), state.detach(), {name: t.grad for name, t in leaves.items()}

    def test_conservation(self):
        """Scaling v and the initial state scales outputs and final state: what gradients say of both is the same number."""
        for dtype, bar in ((torch.bfloat16, 1.2e-2), (torch.float16, 1.5e-3)):
            for decay in (0.0, 1.0, 8.0):
                x, d_o, d_state = self.inputs(dtype, decay)
                o, state, found = self.run_op(x, d_o, d_state)
                begin = 0
                for n, length in enumerate(LENGTHS):
                    rows = slice(begin, begin + length)
                    begin += length
                    terms = [(found["initial_state"][n] * x["initial_state"][n]).double(),
                             (found["v"][rows].double() * x["v"][rows].double()), -(d_o[rows].double() * o[rows].double()),
                             -(d_state[n].double() * state[n].double())]
                    size = float(sum(t.square().sum() for t in terms)) ** 0.5
                    self.assertLess(abs(float(sum(t.sum() for t in terms))), bar * size, (dtype, decay, n))

    def test_powers_of_two(self):
        x, d_o, d_state = self.inputs(torch.bfloat16)
        _, _, one = self.run_op(x, d_o, d_state)
        for factor in (2.0 ** -6, 2.0 ** 10):
            _, _, other = self.run_op(x, factor * d_o, factor * d_state)
            for name, d in one.items():
                self.assertTrue(torch.equal(factor * d, other[name]), name)

    def test_splitting(self):
        """A sequence in two calls, with the state handed on, has the gradients of one call."""
        x, d_o, d_state = self.inputs(torch.bfloat16)
        rows = {name: t[:LENGTHS[0]] if name != "initial_state" else t[:1] for name, t in x.items()}
        d_o, d_state = d_o[:LENGTHS[0]], d_state[:1]
        o, state, one = self.run_op(rows, d_o, d_state, LENGTHS[:1])
        for at in (64, 128, 1, 70, 149):
            leaves = {name: t.detach().clone().requires_grad_() for name, t in rows.items()}
            outputs, carried = [], leaves["initial_state"]
            for part in (slice(0, at), slice(at, LENGTHS[0])):
                given = {name: t[part] for name, t in leaves.items() if name != "initial_state"}
                out, carried = ops.prefill(**given, initial_state=carried, qk_l2norm=True)
                outputs.append(out)
            torch.autograd.backward([torch.cat(outputs), carried], [d_o, d_state])
            for name, d in one.items():
                error = float((leaves[name].grad.double() - d.double()).norm() / d.double().norm())
                self.assertLess(error, 2e-3 if at % 64 == 0 else 6e-3, (at, name))

    def test_order_of_a_batch(self):
        x, d_o, d_state = self.inputs(torch.bfloat16)
        _, _, one = self.run_op(x, d_o, d_state)
        order = [2, 0, 1]
        begins = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
        rows = torch.cat([torch.arange(begins[n], begins[n] + LENGTHS[n]) for n in order])
        mixed = {name: t[rows] if name != "initial_state" else t[order] for name, t in x.items()}
        _, _, other = self.run_op(mixed, d_o[rows], d_state[order], [LENGTHS[n] for n in order])
        for name, d in one.items():
            self.assertTrue(torch.equal(d[rows] if name != "initial_state" else d[order], other[name]), name)


if __name__ == "__main__":
    unittest.main()
