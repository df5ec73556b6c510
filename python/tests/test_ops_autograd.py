"""What autograd asks of the torch ops: gradients of any strides, of some inputs, of some outputs; torch.compile;
checkpoints; ops that have no backward."""

import unittest

from deltawave import ArgumentError

from .common import np
from .test_ops import torch

if torch is not None:
    from deltawave import ops

    from . import differentiable

HK, HV, K, V, TOKENS = 1, 2, 32, 16, 70
OFFSETS = [0, 65, 65, TOKENS]


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Autograd(unittest.TestCase):
    def setUp(self):
        self.random = torch.Generator().manual_seed(3)
        self.offsets = torch.tensor(OFFSETS)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random).to(dtype or torch.float32)

    def inputs(self, raw=False, tokens=TOKENS):
        x = {"q": self.normal(tokens, HK, K, dtype=torch.bfloat16), "k": self.normal(tokens, HK, K, dtype=torch.bfloat16),
             "v": self.normal(tokens, HV, V, dtype=torch.bfloat16)}
        if raw:
            x.update(a=self.normal(tokens, HV), b=self.normal(tokens, HV), a_log=0.3 * self.normal(HV), dt_bias=self.normal(HV))
        else:
            x.update(g=-torch.rand(tokens, HV, generator=self.random), beta=torch.rand(tokens, HV, generator=self.random))
        return {**x, "initial_state": self.normal(3, HV, K, V)}

    def gradients(self, x, d_o=None, d_state=None, of=None, **options):
        """Gradients of the inputs `of`, None: all."""
        of = list(x) if of is None else of
        leaves = {name: t.detach().clone().requires_grad_(name in of) for name, t in x.items()}
        outputs = ops.prefill(**leaves, cu_seqlens=self.offsets, qk_l2norm=True, **options)
        pairs = [(out, d) for out, d in zip(outputs, (d_o, d_state)) if d is not None]
        torch.autograd.backward([out for out, _ in pairs], [d for _, d in pairs])
        return {name: leaves[name].grad for name in of}

    def same(self, one, other):
        for name in one:
            self.assertTrue(torch.equal(one[name], other[name]), name)

    def test_gradients_of_any_strides(self):
        x = self.inputs()
        d_o, d_state = self.normal(TOKENS, HV, V, dtype=torch.bfloat16), self.normal(3, HV, K, V)
        wanted = self.gradients(x, d_o, d_state)
        wide = self.normal(TOKENS, HV, 2 * V, dtype=torch.bfloat16)
        wide[..., ::2] = d_o
        odd = self.normal(TOKENS * HV * V + 1, dtype=torch.bfloat16)
        odd[1:] = d_o.flatten()
        for given in (d_o.permute(2, 1, 0).contiguous().permute(2, 1, 0), wide[..., ::2], odd[1:].view(d_o.shape)):
            self.same(wanted, self.gradients(x, given, d_state.transpose(2, 3).contiguous().transpose(2, 3)))
        # Strides of 0, in each dimension alone and in all of them.
        for narrow in ((1, HV, V), (TOKENS, 1, V), (TOKENS, HV, 1), (1, 1, 1)):
            row = self.normal(*narrow, dtype=torch.bfloat16).expand(TOKENS, HV, V)
            state = self.normal(3, 1, 1, 1).expand(3, HV, K, V)
            self.same(self.gradients(x, row.contiguous(), state.contiguous()), self.gradients(x, row, state))

    def test_inputs_of_any_strides(self):
        x = self.inputs(True)
        d_o = self.normal(TOKENS, HV, V, dtype=torch.bfloat16)
        wanted = self.gradients(x, d_o)
        packed = torch.cat([x[n].flatten(1) for n in "qkv"], 1).requires_grad_()
        q, k, v = packed.split((HK * K, HK * K, HV * V), 1)
        gates = torch.stack([x["a"], x["b"]], 2).requires_grad_()
        o, _ = ops.prefill(q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HV, V)), a=gates[..., 0],
                           b=gates[..., 1], a_log=x["a_log"], dt_bias=x["dt_bias"], initial_state=x["initial_state"],
                           cu_seqlens=self.offsets, qk_l2norm=True)
        o.backward(d_o)
        self.assertTrue(torch.equal(packed.grad, torch.cat([wanted[n].flatten(1) for n in "qkv"], 1)))
        self.assertTrue(torch.equal(gates.grad, torch.stack([wanted["a"], wanted["b"]], 2)))
        # Gates that all tokens share, expanded: strides of 0 in inputs.
        shared = self.normal(1, HV).requires_grad_()
        expanded = {**{n: t for n, t in x.items() if n != "a"}, "a": shared.expand(TOKENS, HV)}
        o, _ = ops.prefill(**expanded, cu_seqlens=self.offsets, qk_l2norm=True)
        o.backward(d_o)
        whole = self.gradients({**x, "a": shared.detach().expand(TOKENS, HV).contiguous()}, d_o, of=["a"])
        self.assertTrue(torch.equal(shared.grad, whole["a"].sum(0, keepdim=True)))

    def test_each_input_alone(self):
        for raw in (False, True):
            x = self.inputs(raw)
            d_o, d_state = self.normal(TOKENS, HV, V, dtype=torch.bfloat16), self.normal(3, HV, K, V)
            wanted = self.gradients(x, d_o, d_state)
            for name in x:
                alone = self.gradients(x, d_o, d_state, of=[name])
                self.assertTrue(torch.equal(alone[name], wanted[name]), name)

    def test_each_output_alone(self):
        x = self.inputs()
        d_o, d_state = self.normal(TOKENS, HV, V, dtype=torch.bfloat16), self.normal(3, HV, K, V)
        zeros = torch.zeros_like(d_o), torch.zeros_like(d_state)
        self.same(self.gradients(x, d_o, zeros[1]), self.gradients(x, d_o))
        self.same(self.gradients(x, d_o, zeros[1]), self.gradients(x, d_o, output_final_state=False))
        self.same(self.gradients(x, zeros[0], d_state), self.gradients(x, None, d_state))
        # A sequence without tokens hands the gradient of its final state on.
        found = self.gradients(x, None, d_state)
        self.assertTrue(torch.equal(found["initial_state"][1], d_state[1]))
        self.assertEqual(float(found["v"][:65].abs().sum() > 0), 1)

    def test_no_tokens_at_all(self):
        x = self.inputs(tokens=0)
        leaves = {name: t.requires_grad_() for name, t in x.items()}
        o, state = ops.prefill(**leaves, cu_seqlens=torch.tensor([0, 0, 0, 0]))
        d_state = self.normal(3, HV, K, V)
        torch.autograd.backward([o, state], [torch.zeros_like(o), d_state])
        self.assertTrue(torch.equal(leaves["initial_state"].grad, d_state))
        self.assertEqual(leaves["q"].grad.shape, (0, HK, K))

    def test_rows_past_the_last_sequence_have_no_gradient(self):
        x = self.inputs()
        leaves = {name: t.requires_grad_() for name, t in x.items()}
        o, _ = ops.prefill(**leaves, cu_seqlens=torch.tensor([0, 10, 20, 30]))
        o.backward(torch.full_like(o, float("inf")).index_fill(0, torch.arange(30), 1.0))
        for name in ("q", "k", "v", "g", "beta"):
            self.assertEqual(float(leaves[name].grad[30:].abs().sum()), 0, name)
            self.assertTrue(leaves[name].grad.isfinite().all(), name)

    def test_lengths_that_the_host_does_not_read(self):
        x, d_o = self.inputs(), self.normal(TOKENS, HV, V, dtype=torch.bfloat16)
        wanted = self.gradients(x, d_o)
        self.offsets = ops.on_device(self.offsets.int())
        self.same(wanted, self.gradients(x, d_o))

    def test_both_head_maps_and_state_layouts(self):
        x = {**self.inputs(), "q": self.normal(TOKENS, 2, K, dtype=torch.bfloat16),
             "k": self.normal(TOKENS, 2, K, dtype=torch.bfloat16), "v": self.normal(TOKENS, 4, V, dtype=torch.bfloat16)}
        x.update(g=-torch.rand(TOKENS, 4), beta=torch.rand(TOKENS, 4), initial_state=self.normal(3, 4, K, V))
        d_o, d_state = self.normal(TOKENS, 4, V, dtype=torch.bfloat16), self.normal(3, 4, K, V)
        order = [0, 2, 1, 3]  # heads of a grouped map, as a tiled one has them
        mapped = {n: t[:, order].contiguous() if n in ("v", "g", "beta", "initial_state") else t for n, t in x.items()}
        one = self.gradients(x, d_o, d_state)
        other = self.gradients(mapped, d_o[:, order].contiguous(), d_state[:, order].contiguous(), head_map="tiled")
        for name in x:
            want = one[name][:, order] if name in ("v", "g", "beta", "initial_state") else one[name]
            if name in "qk":  # sums over value heads, in another order
                self.assertLess(float((want.double() - other[name].double()).norm() / want.double().norm()), 2e-3)
            else:
                self.assertTrue(torch.equal(want, other[name]), name)
        x["initial_state"] = x["initial_state"].transpose(2, 3).contiguous()
        again = self.gradients(x, d_o, d_state.transpose(2, 3).contiguous(), state_layout="value_major")
        again["initial_state"] = again["initial_state"].transpose(2, 3)
        self.same(one, again)

    def test_two_backwards_of_one_graph(self):
        x = {name: t.requires_grad_() for name, t in self.inputs().items()}
        o, _ = ops.prefill(**x, cu_seqlens=self.offsets)
        d_o = self.normal(*o.shape, dtype=o.dtype)
        first = torch.autograd.grad(o, list(x.values()), d_o, retain_graph=True)
        for one, other in zip(first, torch.autograd.grad(o, list(x.values()), d_o)):
            self.assertTrue(torch.equal(one, other))

    def test_gradients_of_gradients_are_refused(self):
        x = {name: t.requires_grad_() for name, t in self.inputs().items()}
        o, _ = ops.prefill(**x, cu_seqlens=self.offsets)
        d_q, = torch.autograd.grad(o.float().square().sum(), x["q"], create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "^prefill: no gradients of gradients"):
            d_q.float().square().sum().backward()

    def test_checkpoints_of_both_kinds_have_the_same_bits(self):
        from torch.utils.checkpoint import checkpoint

        x, d_o = self.inputs(True), self.normal(TOKENS, HV, V, dtype=torch.bfloat16)
        wanted = self.gradients(x, d_o)

        def op(*values):
            return ops.prefill(**dict(zip(x, values)), cu_seqlens=self.offsets, qk_l2norm=True)[0]

        for reentrant in (False, True):
            leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
            checkpoint(op, *leaves.values(), use_reentrant=reentrant).backward(d_o)
            self.same(wanted, {name: t.grad for name, t in leaves.items()})

    def test_torch_takes_the_ops_as_proper_ones(self):
        from torch.library import opcheck

        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        x = {name: t.requires_grad_() for name, t in self.inputs().items()}
        opcheck(torch.ops.deltawave.prefill, (), {**x, "cu_seqlens": self.offsets}, test_utils=tests)
        a, b, a_log = (self.normal(*shape).requires_grad_() for shape in ((TOKENS, HV), (TOKENS, HV), (HV,)))
        opcheck(torch.ops.deltawave.gate, (a, b, a_log), test_utils=tests)
        o, z = (self.normal(TOKENS, HV, V, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        opcheck(torch.ops.deltawave.norm, (o, z, self.normal(V).requires_grad_()), test_utils=tests)
        channels = 2 * HK * K + HV * V
        rows = self.normal(TOKENS, channels, dtype=torch.bfloat16).requires_grad_()
        weight, bias = self.normal(channels, 4).requires_grad_(), self.normal(channels).requires_grad_()
        opcheck(torch.ops.deltawave.conv_rows, (rows, weight, bias, HK, HV, K, V, self.offsets, "silu", "flat",
                                                "channel_major", False), test_utils=tests)

    def step(self, backend):
        """Losses of three steps of gradient descent, and parameters after them."""
        random = torch.Generator().manual_seed(5)
        weights = [(0.2 * torch.randn(*shape, generator=random)).requires_grad_()
                   for shape in ((24, 2 * HK * K + HV * V), (24, 2 * HV), (HV,), (HV,))]
        rows, target = torch.randn(TOKENS, 24, generator=random), torch.randn(TOKENS, HV, V, generator=random)

        def loss():
            q, k, v = (rows @ weights[0]).bfloat16().split((HK * K, HK * K, HV * V), 1)
            a, b = (rows @ weights[1]).split((HV, HV), 1)
            o, _ = ops.prefill(q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HV, V)), a=a, b=b,
                               a_log=weights[2], dt_bias=weights[3], qk_l2norm=True, output_final_state=False)
            return (o.float() - target).square().mean()

        called = torch.compile(loss, backend=backend, fullgraph=True) if backend else loss
        losses = []
        for _ in range(3):
            value = called()
            value.backward()
            losses.append(value.item())
            with torch.no_grad():
                for w in weights:
                    w -= 0.5 * w.grad
                    w.grad = None
        return losses, weights

    def test_a_compiled_training_step(self):
        losses, weights = self.step(None)
        self.assertLess(losses[2], losses[0])
        compiled, others = self.step("aot_eager")
        self.assertEqual(losses, compiled)
        for one, other in zip(weights, others):
            self.assertTrue(torch.equal(one, other))

    def test_a_step_compiled_by_inductor(self):
        try:
            torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
        except Exception as problem:  # no C++ compiler, or another release of Triton than torch's
            self.skipTest(f"inductor compiles nothing here: {type(problem).__name__}")
        losses, _ = self.step(None)
        compiled, _ = self.step("inductor")
        for one, other in zip(losses, compiled):  # inductor fuses roundings
            self.assertAlmostEqual(one, other, delta=2e-3 * one)

    def refused(self, name, made):
        for out in made if isinstance(made, tuple) else (made,):
            self.assertTrue(out.requires_grad, name)
            with self.assertRaisesRegex(NotImplementedError, f"^{name}: no backward; deltawave\\.\\S+.* has one$"):
                out.float().sum().backward()

    def test_ops_without_a_backward_name_themselves(self):
        x = self.inputs()
        pool = x.pop("initial_state")
        needs = {**x, "v": x["v"].clone().requires_grad_()}
        plain = ops.prefill_pool(**x, pool=pool.clone(), cu_seqlens=self.offsets)
        made = ops.prefill_pool(**needs, pool=pool.clone(), cu_seqlens=self.offsets)
        self.assertTrue(torch.equal(plain, made))
        self.refused("prefill_pool", made)
        self.refused("decode", ops.decode(**{n: t[:3] for n, t in needs.items()}, pool=pool.clone()))
        self.refused("verify", ops.verify(**{n: t[:3, None] for n, t in needs.items()}, pool=pool.clone()))
        channels = 2 * HK * K + HV * V
        rows, weight = self.normal(9, channels, dtype=torch.bfloat16), self.normal(channels, 4).requires_grad_()
        state = torch.zeros(1, channels, 3, dtype=torch.bfloat16)
        self.refused("conv", ops.conv(rows, weight, None, state, HK, HV, K, V))
        gates = {"a": self.normal(9, HV), "b": self.normal(9, HV), "a_log": self.normal(HV)}
        self.refused("conv", ops.conv(rows, weight, None, state, HK, HV, K, V, **gates))
        self.refused("layer", ops.layer(rows, gates["a"], gates["b"], state, torch.zeros(1, HV, K, V), weight, gates["a_log"],
                                        HK, HV, K, V, z=self.normal(9, HV, V, dtype=torch.bfloat16)))
        with torch.no_grad():
            self.assertFalse(ops.conv(rows, weight, None, state, HK, HV, K, V)[0].requires_grad)

    def test_an_output_that_is_given_refuses_gradients(self):
        x = self.inputs()
        x["q"].requires_grad_()
        out = torch.empty_like(x["v"])
        with self.assertRaisesRegex(ArgumentError, "^out:.*gradient"):
            ops.prefill(**x, cu_seqlens=self.offsets, out=out)
        pool = x.pop("initial_state")
        with self.assertRaisesRegex(ArgumentError, "^out:.*gradient"):
            ops.prefill_pool(**x, pool=pool, cu_seqlens=self.offsets, out=out)
        with self.assertRaisesRegex(ArgumentError, "^out:.*gradient"):
            rows = self.normal(4, HV, V, dtype=torch.bfloat16).requires_grad_()
            ops.norm(rows, rows.detach(), out=torch.empty_like(rows))
        with torch.no_grad():
            ops.prefill(**x, cu_seqlens=self.offsets, out=out)


if __name__ == "__main__":
    unittest.main()
