"""Mistakes that backward kernels of the delta rule have had elsewhere, one test each, on the simulator."""

import unittest

from .common import np
from .test_ops import torch

if torch is not None:
    import torch.nn.functional as F

    from deltawave import ops

    from . import differentiable

HK, HV, K, V = 1, 2, 32, 16


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Traps(unittest.TestCase):
    def setUp(self):
        self.random = torch.Generator().manual_seed(41)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random).to(dtype or torch.float32)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.random)

    def rows(self, tokens, heads=HK, value_heads=HV, dtype=None):
        dtype = dtype or torch.bfloat16
        return {"q": self.normal(tokens, heads, K, dtype=dtype), "k": self.normal(tokens, heads, K, dtype=dtype),
                "v": self.normal(tokens, value_heads, V, dtype=dtype)}

    def gradients(self, x, d_o, d_state=None, lengths=None, **options):
        """Gradients by name, of the op."""
        leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
        offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
        o, state = ops.prefill(**leaves, cu_seqlens=offsets, qk_l2norm=True, **options)
        torch.autograd.backward([o, state], [d_o, torch.zeros_like(state) if d_state is None else d_state])
        return {n: t.grad for n, t in leaves.items()}

    def exact(self, x, d_o, d_state=None):
        """Gradients by name, in float64, of one sequence. x has g and beta, or a, b, a_log and dt_bias, or neither."""
        x = {n: t.detach().double().requires_grad_() for n, t in x.items()}
        if "a" in x:
            g, beta = differentiable.gates(x["a"], x["b"], x["a_log"], x.get("dt_bias"))
        else:
            shape = x["v"].shape[:2]
            g, beta = x.get("g", x["v"].new_zeros(shape)), x.get("beta", x["v"].new_ones(shape))
        q, k = (differentiable.unit(x[n]) for n in "qk")
        o, state = differentiable.gated_delta_rule(*(t[None] for t in (q, k, x["v"], g, beta)), x.get("initial_state"))
        loss = (o[0] * d_o.double()).sum()
        if d_state is not None:
            loss = loss + (state * d_state.double()).sum()
        loss.backward()
        return {n: t.grad for n, t in x.items()}

    def error(self, found, wanted):
        return float((found.double() - wanted).norm() / wanted.norm())

    def close(self, found, wanted, bar):
        for name, d in wanted.items():
            self.assertTrue(found[name].isfinite().all(), name)
            self.assertLess(self.error(found[name], d), bar, name)

    def test_sums_of_gates_are_of_unrounded_terms(self):
        """Gradients of A_log and dt_bias are sums in f32. With gates of bf16 a sum of the rounded terms would differ."""
        tokens = 500
        x = {**self.rows(tokens), "a": self.normal(tokens, HV, dtype=torch.bfloat16),
             "b": self.normal(tokens, HV, dtype=torch.bfloat16), "a_log": 0.3 * self.normal(HV), "dt_bias": self.normal(HV)}
        d_o = self.normal(tokens, HV, V, dtype=torch.bfloat16)
        narrow, wide = self.gradients(x, d_o), self.gradients({**x, "a": x["a"].float(), "b": x["b"].float()}, d_o)
        for name in ("a_log", "dt_bias"):
            self.assertTrue(torch.equal(narrow[name], wide[name]), name)
        self.assertTrue(torch.equal(narrow["a"], wide["a"].bfloat16()))
        self.assertLess(self.error(narrow["dt_bias"], wide["a"].double().sum(0)), 1e-5)
        self.assertGreater(self.error(narrow["a"].double().sum(0), wide["a"].double().sum(0)), 1e-5)
        without = {n: t for n, t in x.items() if n != "dt_bias"}
        zeros = self.gradients({**x, "dt_bias": torch.zeros(HV)}, d_o)
        for name, d in self.gradients(without, d_o).items():
            self.assertTrue(torch.equal(d, zeros[name]), name)

    def test_sums_over_value_heads_are_not_rounded_head_by_head(self):
        tokens, group = 100, 16
        x = {**self.rows(tokens, 1, group), "g": -self.uniform(tokens, group), "beta": self.uniform(tokens, group)}
        d_o = self.normal(tokens, group, V, dtype=torch.bfloat16)
        wanted, together = self.exact(x, d_o), self.gradients(x, d_o)
        alone = self.gradients({**x, **{n: x[n].expand(tokens, group, K).contiguous() for n in "qk"}}, d_o)
        for name in "qk":
            rounded = torch.zeros(tokens, K, dtype=torch.bfloat16)
            for h in range(group):
                rounded += alone[name][:, h]
            self.assertLess(self.error(together[name][:, 0], wanted[name][:, 0]), 6e-3)
            self.assertLess(1.3 * self.error(together[name][:, 0], wanted[name][:, 0]), self.error(rounded, wanted[name][:, 0]))

    def test_gates_that_forget_everything(self):
        """Differences of large sums of gates: exp above the diagonal overflows, 0 * inf is NaN, dg is a small difference."""
        tokens = 130
        for dtype, bar in ((torch.bfloat16, 1.2e-2), (torch.float16, 2e-3)):
            for low, high in ((-8.0, -2.0), (-100.0, -30.0), (-3e4, 0.0)):
                x = {**self.rows(tokens, dtype=dtype), "g": low + (high - low) * self.uniform(tokens, HV),
                     "beta": self.uniform(tokens, HV), "initial_state": self.normal(1, HV, K, V)}
                given = self.normal(tokens, HV, V, dtype=dtype), self.normal(1, HV, K, V)
                wanted, found = self.exact(x, *given), self.gradients(x, *given)
                for name, d in wanted.items():
                    self.assertTrue(found[name].isfinite().all(), name)
                    if d.square().mean().sqrt() > 1e-12:
                        self.assertLess(self.error(found[name], d), bar, (name, low))
                    else:
                        self.assertLess(float(found[name].double().square().mean().sqrt()), 1e-12, (name, low))

    def test_gates_of_zero_and_of_minus_infinity_in_turn(self):
        """Terms from state to state, which gates of logsigmoid hide; gates that erase among gates that keep all."""
        tokens = 200
        g = torch.zeros(tokens, HV)
        x = {**self.rows(tokens), "g": g, "beta": self.uniform(tokens, HV), "initial_state": self.normal(1, HV, K, V)}
        given = self.normal(tokens, HV, V, dtype=torch.bfloat16), self.normal(1, HV, K, V)
        self.close(self.gradients(x, *given), self.exact(x, *given), 1.5e-2)
        g[torch.tensor([0, 63, 64, 65, 150])] = float("-inf")
        found = self.gradients(x, *given)
        wanted = self.exact({**x, "g": g.clamp_min(-1e4)}, *given)
        wanted.pop("initial_state")
        self.close(found, wanted, 1.5e-2)
        self.assertEqual(float(found["initial_state"].abs().sum()), 0)

    def test_no_gates(self):
        tokens = 100
        d_o = self.normal(tokens, HV, V, dtype=torch.bfloat16)
        rows = self.rows(tokens)
        for more in ({}, {"g": -self.uniform(tokens, HV)}, {"beta": self.uniform(tokens, HV)}):
            x = {**rows, **more}
            self.close(self.gradients(x, d_o), self.exact(x, d_o), 1.2e-2)

    def test_raw_gates_over_their_whole_range(self):
        """softplus and exp saturate: no gradient is NaN, and tokens of usual gates have theirs."""
        tokens = 96
        x = {**self.rows(tokens), "a": self.normal(tokens, HV), "b": self.normal(tokens, HV), "a_log": self.normal(HV),
             "dt_bias": self.normal(HV)}
        for at, value in ((3, 1e4), (17, -1e4), (40, 80.0), (65, -80.0)):
            x["a"][at], x["b"][at + 1] = value, value
        d_o = self.normal(tokens, HV, V, dtype=torch.bfloat16)
        self.close(self.gradients(x, d_o), self.exact(x, d_o), 1.5e-2)
        x["a"].clamp_(-80.0, 1e4)  # exp(A_log) is infinite above 88.7: where softplus is 0, too, g has no value
        for a_log in (88.0, 89.0, 200.0, -200.0):
            found = self.gradients({**x, "a_log": torch.full((HV,), a_log)}, d_o)
            for name, d in found.items():
                self.assertTrue(d.isfinite().all(), (name, a_log))

    def test_no_initial_state_and_one_of_zeros(self):
        """Zeros that are given have the gradient that the oracle says, and change no other bit."""
        tokens = 70
        x = {**self.rows(tokens), "g": -self.uniform(tokens, HV), "beta": self.uniform(tokens, HV)}
        given = self.normal(tokens, HV, V, dtype=torch.bfloat16), self.normal(1, HV, K, V)
        one = self.gradients(x, *given)
        zeros = {**x, "initial_state": torch.zeros(1, HV, K, V)}
        other = self.gradients(zeros, *given)
        for name, d in one.items():
            self.assertTrue(torch.equal(d, other[name]), name)
        self.assertLess(self.error(other["initial_state"], self.exact(zeros, *given)["initial_state"]), 5e-3)

    def test_rows_as_short_as_the_epsilon_of_the_norm(self):
        tokens = 80
        x = {**self.rows(tokens), "g": -self.uniform(tokens, HV), "beta": self.uniform(tokens, HV)}
        for name in "qk":
            x[name][::3] *= 2.0 ** -13  # squares of the norm near 1e-6
            x[name][1::9] = 0
        d_o = self.normal(tokens, HV, V, dtype=torch.bfloat16)
        self.close(self.gradients(x, d_o), self.exact(x, d_o), 1.2e-2)

    def test_more_sequences_than_a_grid_has_rows(self):
        """66 000 sequences, of which few have tokens: gradients of these, and of the initial states of all."""
        count, size = 66000, 16
        lengths = torch.zeros(count, dtype=torch.int64)
        for n, length in ((0, 65), (40000, 3), (count - 1, 70)):
            lengths[n] = length
        tokens = int(lengths.sum())
        x = {"q": self.normal(tokens, 1, size, dtype=torch.bfloat16), "k": self.normal(tokens, 1, size, dtype=torch.bfloat16),
             "v": self.normal(tokens, 1, size, dtype=torch.bfloat16), "g": -self.uniform(tokens, 1),
             "beta": self.uniform(tokens, 1), "initial_state": self.normal(count, 1, size, size)}
        d_o, d_state = self.normal(tokens, 1, size, dtype=torch.bfloat16), self.normal(count, 1, size, size)
        found = self.gradients(x, d_o, d_state, lengths.tolist())
        used = lengths > 0
        few = self.gradients({**x, "initial_state": x["initial_state"][used]}, d_o, d_state[used], lengths[used].tolist())
        for name, d in few.items():
            self.assertTrue(torch.equal(d, found[name][used] if name == "initial_state" else found[name]), name)
        self.assertTrue(torch.equal(found["initial_state"][~used], d_state[~used]))

    def test_offsets_beyond_32_bits(self):
        """Rows that lie 2^24 - 16 elements apart. Only pages that are written exist."""
        tokens, stride = 150, 2 ** 24 - 16
        x = {**self.rows(tokens), "g": -self.uniform(tokens, HV), "beta": self.uniform(tokens, HV)}
        d_o = self.normal(tokens, HV, V, dtype=torch.bfloat16)

        def backward(v, d_o):
            return ops.prefill_backward(d_o, None, x["q"], x["k"], v, x["g"], x["beta"], None, None, None, None, False, None,
                                        None, None, None, True, "grouped", "key_major", [True] * 5 + [False] * 3)

        far = []
        for t in (x["v"], d_o):
            place = ops.empty(((tokens - 1) * stride + HV * V,), torch.bfloat16).as_strided(t.shape, (stride, V, 1))
            far.append(place.copy_(t))
        for one, other in zip(backward(x["v"], d_o), backward(*far)):
            self.assertTrue(torch.equal(one, other))

    def test_weights_of_a_batch(self):
        """Gradients of a convolution's weights are sums over all sequences, of which some are shorter than its width."""
        channels, lengths = 2 * HK * K + HV * V, (33, 1, 2, 3, 64)
        x = self.normal(sum(lengths), channels, dtype=torch.bfloat16)
        weight, bias = self.normal(channels, 4), self.normal(channels)
        d = [self.normal(sum(lengths), n, w, dtype=torch.bfloat16) for n, w in ((HK, K), (HK, K), (HV, V))]

        def gradients(rows, offsets):
            leaves = [t.clone().requires_grad_() for t in (x[rows], weight, bias)]
            made = ops.conv(leaves[0], leaves[1], leaves[2], None, HK, HV, K, V, offsets)
            return torch.autograd.grad(made, leaves, [t[rows] for t in d])

        whole = gradients(slice(None), torch.tensor([0, *lengths]).cumsum(0))
        parts, begin = [], 0
        for length in lengths:
            parts.append(gradients(slice(begin, begin + length), None))
            begin += length
        self.assertTrue(torch.equal(whole[0], torch.cat([p[0] for p in parts])))
        for i in (1, 2):
            self.assertLess(self.error(whole[i], sum(p[i].double() for p in parts)), 1e-6)

    def test_a_sum_is_no_test_of_its_own(self):
        """Upstream gradients that are all one hide mistakes of order: random ones of the same tokens differ, and are right."""
        tokens = 90
        x = {**self.rows(tokens), "g": F.logsigmoid(self.normal(tokens, HV)), "beta": self.uniform(tokens, HV)}
        ones = torch.ones(tokens, HV, V, dtype=torch.bfloat16)
        for d_o in (ones, ones * (1 - 2 * (torch.arange(tokens) % 2))[:, None, None].bfloat16(),
                    F.one_hot(torch.arange(tokens) % V, V)[:, None].expand(tokens, HV, V).bfloat16()):
            self.close(self.gradients(x, d_o.contiguous()), self.exact(x, d_o), 1.5e-2)


if __name__ == "__main__":
    unittest.main()
