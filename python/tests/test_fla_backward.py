"""Gradients of `deltawave.fla` on tensors of the CPU, which run on the simulator, beside those of the recurrence in double
precision: every option of FLA's `chunk_gated_delta_rule`, and what has no backward."""

import unittest

import deltawave as dw

from .common import np
from .test_ops import torch

if torch is not None:
    from . import differentiable

B, T, H, HV, K, V = 2, 70, 2, 4, 32, 16
OFFSETS = [0, 7, 7, 7 + 65, 2 * T]
# FLA's tolerances of its own test: rms of the difference over rms of the gradient.
BARS = {"q": 8e-3, "k": 8e-3, "v": 8e-3, "g": 2e-2, "beta": 2e-2, "initial_state": 8e-3, "A_log": 2e-2, "dt_bias": 2e-2}


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Chunk(unittest.TestCase):
    def setUp(self):
        from deltawave import fla

        self.fla = fla
        self.random = torch.Generator().manual_seed(7)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random).to(dtype or torch.float32)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.random)

    def inputs(self, dtype, raw_g=False, raw_beta=False, packed=False, state="f32", v_first=False, dt_bias=True,
               g=None):
        state = torch.float32 if state == "f32" else state
        batch, tokens = (1, B * T) if packed else (B, T)
        x = {"q": self.normal(batch, tokens, H, K, dtype=dtype), "k": self.normal(batch, tokens, H, K, dtype=dtype),
             "v": self.normal(batch, tokens, HV, V, dtype=dtype)}
        x["g"] = self.normal(batch, tokens, HV, dtype=dtype) if raw_g else (-self.uniform(batch, tokens, HV)).to(g or torch.float32)
        x["beta"] = (self.normal(batch, tokens, HV) if raw_beta else self.uniform(batch, tokens, HV)).to(dtype)
        if raw_g:
            x["A_log"] = self.normal(HV) * 0.3
            if dt_bias:
                x["dt_bias"] = self.normal(HV)
        if state is not None:
            count = len(OFFSETS) - 1 if packed else B
            x["initial_state"] = self.normal(count, HV, *((V, K) if v_first else (K, V)), dtype=state)
        return x

    def wanted(self, x, options, weights):
        """Gradients in double precision."""
        x = {name: t.detach().double().requires_grad_() for name, t in x.items()}
        q, k = (differentiable.unit(x[n]) if options.get("use_qk_l2norm_in_kernel") else x[n] for n in "qk")
        g, beta = x["g"], x["beta"]
        most = 2.0 if options.get("allow_neg_eigval") else 1.0
        if options.get("use_gate_in_kernel"):
            g, _ = differentiable.gates(g, g, x["A_log"], x.get("dt_bias"))
        if options.get("use_beta_sigmoid_in_kernel"):
            beta = most * beta.sigmoid()
        offsets = options.get("cu_seqlens")
        o, states = differentiable.gated_delta_rule(
            q, k, x["v"], g, beta, x.get("initial_state"), None if offsets is None else offsets.tolist(),
            options.get("scale"), options.get("state_v_first", False))
        self.backward(o, states if options.get("output_final_state") else None, weights)
        return {name: t.grad for name, t in x.items()}

    def backward(self, o, state, weights):
        loss = (o.double() * weights[0]).sum()
        if state is not None:
            loss = loss + (state.double() * weights[1]).sum()
        loss.backward()

    def compared(self, x, bar=None, **options):
        given = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
        o, state = self.fla.chunk_gated_delta_rule(**given, **options)
        self.assertEqual(state is None, not options.get("output_final_state"))
        weights = (self.normal(*o.shape, dtype=o.dtype).double(), None if state is None else self.normal(*state.shape).double())
        self.backward(o, state, weights)
        wanted = self.wanted(x, options, weights)
        for name, t in given.items():
            self.assertEqual((t.grad.dtype, t.grad.shape), (t.dtype, t.shape), name)
            error = (t.grad.double() - wanted[name]).norm() / wanted[name].norm()
            self.assertLess(float(error), bar or BARS[name], name)
        return given

    def test_given_gates(self):
        for dtype in (torch.bfloat16, torch.float16):
            self.compared(self.inputs(dtype), use_qk_l2norm_in_kernel=True, output_final_state=True)
        self.compared(self.inputs(torch.bfloat16, state=None), use_qk_l2norm_in_kernel=True)
        # g in bf16, as a model under autocast has it.
        self.compared(self.inputs(torch.bfloat16, state=None, g=torch.bfloat16), use_qk_l2norm_in_kernel=True)

    def test_keys_that_are_normalised_outside(self):
        x = self.inputs(torch.float16)
        x["q"], x["k"] = (differentiable.unit(x[name].float()).half() for name in "qk")
        self.compared(x, scale=0.25, output_final_state=True)

    def test_raw_gates(self):
        for raw_g, raw_beta, negative, dt_bias in ((True, True, False, True), (True, True, True, False),
                                                   (True, False, False, True), (True, False, False, False),
                                                   (False, True, True, True)):
            with self.subTest(raw_g=raw_g, raw_beta=raw_beta, negative=negative, dt_bias=dt_bias):
                x = self.inputs(torch.bfloat16, raw_g, raw_beta, dt_bias=dt_bias)
                self.compared(x, use_gate_in_kernel=raw_g, use_beta_sigmoid_in_kernel=raw_beta, allow_neg_eigval=negative,
                              use_qk_l2norm_in_kernel=True, output_final_state=True)

    def test_packed_sequences(self):
        for dtype in (torch.int32, torch.int64):
            offsets = torch.tensor(OFFSETS, dtype=dtype)
            given = self.compared(self.inputs(torch.bfloat16, packed=True), cu_seqlens=offsets, output_final_state=True,
                                  use_qk_l2norm_in_kernel=True)
        self.compared(self.inputs(torch.bfloat16, True, True, packed=True), cu_seqlens=offsets, use_gate_in_kernel=True,
                      use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)
        # The gradient of the final state of a sequence without tokens is the gradient of its initial state.
        x = {name: t.detach() for name, t in given.items()}
        x["initial_state"].requires_grad_()
        _, state = self.fla.chunk_gated_delta_rule(**x, cu_seqlens=offsets, output_final_state=True)
        d_state = self.normal(*state.shape)
        found, = torch.autograd.grad(state, x["initial_state"], d_state)
        self.assertTrue(torch.equal(found[1], d_state[1]))

    def test_states_of_other_types_and_layouts(self):
        for state in (torch.bfloat16, torch.float16):
            self.compared(self.inputs(torch.bfloat16, state=state), use_qk_l2norm_in_kernel=True, output_final_state=True)
        self.compared(self.inputs(torch.bfloat16, v_first=True), use_qk_l2norm_in_kernel=True, output_final_state=True,
                      state_v_first=True)

    def test_inputs_whose_tokens_are_adjacent(self):
        x = self.inputs(torch.bfloat16)
        across = {name: t.movedim(1, -1).contiguous().movedim(-1, 1) if name in "qkv" else t for name, t in x.items()}
        self.assertNotEqual(across["q"].stride(-1), 1)
        weights = self.normal(B, T, HV, V, dtype=torch.bfloat16)
        gradients = []
        for one in (x, across):
            leaves = {name: t.detach().requires_grad_() for name, t in one.items()}
            o, _ = self.fla.chunk_gated_delta_rule(**leaves, use_qk_l2norm_in_kernel=True)
            gradients.append(torch.autograd.grad(o, list(leaves.values()), weights))
        for name, one, other in zip(x, *gradients):
            self.assertTrue(torch.equal(one, other), name)

    def test_gradients_of_the_gate(self):
        a, a_log, bias = self.normal(B, T, HV, dtype=torch.bfloat16), self.normal(HV), self.normal(HV)
        d_g = self.normal(B, T, HV)
        inputs = [x.requires_grad_() for x in (a, a_log, bias)]
        found = torch.autograd.grad(self.fla.fused_gdn_gate(*inputs), inputs, d_g)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        g, _ = differentiable.gates(exact[0], exact[0], *exact[1:])
        for one, other, bar in zip(found, torch.autograd.grad(g, exact, d_g.double()), (4e-3, 1e-5, 1e-5)):
            self.assertLess(float((one - other).norm() / other.norm()), bar)
        self.assertEqual(found[0].dtype, torch.bfloat16)
        # A gate whose exp(A_log) is infinite, and which nothing depends on.
        a, a_log = torch.zeros(1, 2).requires_grad_(), torch.tensor([100.0, 0.0]).requires_grad_()
        self.fla.fused_gdn_gate(a, a_log)[:, 1].sum().backward()
        self.assertTrue(a.grad.isfinite().all() and a_log.grad.isfinite().all())

    def test_the_recurrent_form_has_no_backward(self):
        for tokens in (1, 5):
            x = {name: t[:, :tokens] if name != "initial_state" else t for name, t in self.inputs(torch.bfloat16).items()}
            plain, state = self.fla.fused_recurrent_gated_delta_rule(**x, output_final_state=True)
            x["v"].requires_grad_()
            o, after = self.fla.fused_recurrent_gated_delta_rule(**x, output_final_state=True)
            self.assertTrue(torch.equal(o, plain) and torch.equal(after, state))
            for made in (o, after):
                with self.assertRaisesRegex(NotImplementedError, "^fused_recurrent_gated_delta_rule: no backward"):
                    made.sum().backward()
        o, none = self.fla.fused_recurrent_gated_delta_rule(**x)
        self.assertIsNone(none)
        with torch.no_grad():
            self.assertFalse(self.fla.fused_recurrent_gated_delta_rule(**x)[0].requires_grad)

    def test_head_first_is_refused_with_gradients_too(self):
        x = {name: t.requires_grad_() for name, t in self.inputs(torch.bfloat16).items()}
        with self.assertRaisesRegex(dw.Unsupported, "^head_first:"):
            self.fla.chunk_gated_delta_rule(**x, head_first=True)


if __name__ == "__main__":
    unittest.main()
