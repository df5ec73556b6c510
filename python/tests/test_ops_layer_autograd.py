"""Autograd of a whole layer, `layer_forward`, on tensors of the CPU, which run on the simulator: gradients beside those of
float64, and what autograd keeps."""

import unittest

from .common import np
from .test_ops import torch

if torch is not None:
    import torch.nn.functional as F

    from deltawave import ops, training

    from . import differentiable

HK, HV, K, V, WIDTH = 1, 2, 32, 16, 4
CHANNELS = 2 * HK * K + HV * V
LENGTHS = [65, 0, 2, 33]
TOKENS = sum(LENGTHS)
# Inputs of the op that have gradients, by their names.
NAMES = ("x", "a", "b", "conv_weight", "a_log", "z", "conv_bias", "dt_bias", "norm_weight", "initial_conv_state", "initial_state")
OPTIONS = {"eps": 1e-6, "gate": "silu", "qk_l2norm": True, "allow_neg_eigval": False, "scale": None, "head_map": "grouped",
           "x_layout": "flat"}


def exact(x, lengths=LENGTHS, gate="silu", most=1.0):
    """y, conv states and states of a layer, in the type of its inputs. x: tensors by name."""
    width = x["conv_weight"].shape[1]
    rows, states, begin = [], [], 0
    for n, length in enumerate(lengths):
        seen = torch.cat([x["initial_conv_state"][n].T, x["x"][begin:begin + length]])
        rows.append(F.silu(sum(seen[i:i + length] * x["conv_weight"][:, i] for i in range(width)) + x["conv_bias"]))
        states.append(seen[len(seen) - width + 1:].T)
        begin += length
    q, k, v = (r.unflatten(1, (-1, d))[None] for r, d in zip(torch.cat(rows).split((HK * K, HK * K, HV * V), 1), (K, K, V)))
    g, beta = differentiable.gates(*(x[n][None] for n in ("a", "b")), x["a_log"], x["dt_bias"], most)
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    parts, finals = [], []
    for n, (i, j) in enumerate(zip(offsets, offsets[1:])):
        start = x["initial_state"][n:n + 1]
        if i == j:
            finals.append(start)
            continue
        o, final = differentiable.gated_delta_rule(*(t[:, i:j] for t in (differentiable.unit(q), differentiable.unit(k), v, g, beta)),
                                                   start)
        parts.append(o[0])
        finals.append(final)
    o = torch.cat(parts)
    y = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * x["norm_weight"]
    return y * (F.silu(x["z"]) if gate == "silu" else x["z"].sigmoid()), torch.stack(states), torch.cat(finals)


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Gradients(unittest.TestCase):
    def setUp(self):
        self.random = torch.Generator().manual_seed(31)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random).to(dtype or torch.float32)

    def inputs(self, dtype=None, weights=None, lengths=LENGTHS):
        dtype, tokens, count = dtype or torch.bfloat16, sum(lengths), len(lengths)
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        return {"x": self.normal(tokens, CHANNELS, dtype=dtype), "a": self.normal(tokens, HV, dtype=weights),
                "b": self.normal(tokens, HV, dtype=weights), "conv_weight": 0.5 * self.normal(CHANNELS, WIDTH, dtype=weights),
                "a_log": 0.5 * self.normal(HV), "z": self.normal(tokens, HV, V, dtype=dtype),
                "conv_bias": 0.5 * self.normal(CHANNELS, dtype=weights), "dt_bias": self.normal(HV),
                "norm_weight": self.normal(V, dtype=weights),
                "initial_conv_state": self.normal(count, CHANNELS, WIDTH - 1, dtype=dtype),
                "initial_state": 0.25 * self.normal(count, HV, K, V)}

    def upstream(self, dtype=None, count=len(LENGTHS), tokens=TOKENS):
        dtype = dtype or torch.bfloat16
        return [self.normal(tokens, HV, V, dtype=dtype), self.normal(count, CHANNELS, WIDTH - 1, dtype=dtype),
                0.25 * self.normal(count, HV, K, V)]

    def op(self, x, offsets=None, **options):
        """y and both states."""
        offsets = self.offsets if offsets is None else offsets
        given = [x["x"], x["a"], x["b"], x["conv_weight"], x["a_log"], HK, HV, K, V, *(x.get(n) for n in NAMES[5:]), offsets]
        y, _, conv_state, state = ops.layer_forward(*given, *{**OPTIONS, **options}.values())
        return y, conv_state, state

    def gradients(self, x, upstream, function=None, names=None, **options):
        """Gradients by name. Outputs without an upstream gradient are left out."""
        leaves = {n: t.detach().clone().requires_grad_(names is None or n in names) for n, t in x.items()}
        made = function(leaves) if function else self.op(leaves, **options)
        pairs = [(o, d.to(o.dtype)) for o, d in zip(made, upstream) if d is not None]
        torch.autograd.backward(*zip(*pairs))
        return {n: t.grad for n, t in leaves.items()}

    def same(self, one, other):
        for name, d in one.items():
            self.assertTrue(d is other[name] is None or torch.equal(d, other[name]), name)

    def close(self, found, wanted, bar):
        for name, d in wanted.items():
            self.assertLess(float((found[name].double() - d).norm() / d.norm()), bar, name)

    def test_gradients_are_those_of_float64(self):
        for dtype, weights, gate, negative, bar in ((torch.bfloat16, None, "silu", False, 1.5e-2),
                                                    (torch.float16, None, "sigmoid", True, 2.5e-3),
                                                    (torch.bfloat16, torch.bfloat16, "sigmoid", False, 2e-2)):
            with self.subTest(dtype=dtype, weights=weights):
                x, upstream = self.inputs(dtype, weights), self.upstream(dtype)
                wanted = self.gradients({n: t.double() for n, t in x.items()}, upstream,
                                        lambda x: exact(x, gate=gate, most=1.0 + negative))
                found = self.gradients(x, upstream, gate=gate, allow_neg_eigval=negative)
                self.close(found, wanted, bar)
                for name, t in x.items():
                    self.assertEqual((found[name].dtype, found[name].shape), (t.dtype, t.shape), name)
                self.same(found, self.gradients(x, upstream, gate=gate, allow_neg_eigval=negative))

    def test_gradients_are_those_of_its_three_ops(self):
        x, upstream = self.inputs(), self.upstream()
        x = {n: t for n, t in x.items() if not n.startswith("initial")}

        def chain(x):
            q, k, v = ops.conv(x["x"], x["conv_weight"], x["conv_bias"], None, HK, HV, K, V, self.offsets)
            o, _ = ops.prefill(q, k, v, a=x["a"], b=x["b"], a_log=x["a_log"], dt_bias=x["dt_bias"], cu_seqlens=self.offsets,
                               qk_l2norm=True)
            return (ops.norm(o, x["z"], x["norm_weight"]),)

        self.same(self.gradients(x, upstream[:1], chain), self.gradients(x, upstream[:1]))

    def test_each_input_and_each_output_alone(self):
        x, upstream = self.inputs(), self.upstream()
        wanted = self.gradients(x, upstream)
        for name in NAMES:
            found = self.gradients(x, upstream, names=(name,))
            self.same({name: wanted[name]}, found)
            self.assertTrue(all(d is None for n, d in found.items() if n != name))
        for i in range(3):
            one = [d if i == j else None for j, d in enumerate(upstream)]
            zeros = [d if i == j else torch.zeros_like(d) for j, d in enumerate(upstream)]
            self.same(self.gradients(x, one), self.gradients(x, zeros))

    def test_gradients_of_any_strides(self):
        x = self.inputs()
        d_y = self.normal(V, HV, TOKENS, dtype=torch.bfloat16).permute(2, 1, 0)
        d_conv = self.normal(len(LENGTHS), WIDTH - 1, CHANNELS, dtype=torch.bfloat16).transpose(1, 2)
        d_state = self.normal(len(LENGTHS), HV, V, K).transpose(2, 3)
        self.same(self.gradients(x, (d_y, d_conv, d_state)),
                  self.gradients(x, (d_y.contiguous(), d_conv.contiguous(), d_state.contiguous())))
        ones = [torch.ones_like(t) for t in (d_y, d_conv, d_state)]
        expanded = [torch.ones((), dtype=t.dtype).expand(t.shape) for t in ones]
        self.same(self.gradients(x, [t.contiguous() for t in ones]), self.gradients(x, expanded))

    def test_a_sequence_in_two_calls(self):
        x, upstream = self.inputs(lengths=[130]), self.upstream(count=1, tokens=130)
        one = self.gradients(x, upstream)
        for at in (1, 2, 64, 100):
            leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
            states, outputs = (leaves["initial_conv_state"], leaves["initial_state"]), []
            for rows in (slice(0, at), slice(at, 130)):
                part = {n: t[rows] if n in ("x", "a", "b", "z") else t for n, t in leaves.items()}
                part.update(initial_conv_state=states[0], initial_state=states[1])
                y, *states = self.op(part, torch.tensor([0, len(part["x"])]))
                outputs.append(y)
            torch.autograd.backward([torch.cat(outputs), *states], upstream)
            self.close({n: t.grad for n, t in leaves.items()}, {n: d.double() for n, d in one.items()}, 5e-3)

    def test_z_in_the_rows_of_x(self):
        x, upstream = self.inputs(), self.upstream()
        one = self.gradients(x, upstream)
        packed = {**x, "x": torch.cat([x["x"], x["z"].flatten(1)], 1)}
        del packed["z"]
        other = self.gradients(packed, upstream)
        self.assertTrue(torch.equal(other["x"], torch.cat([one["x"], one["z"].flatten(1)], 1)))
        self.same({n: d for n, d in other.items() if n != "x"}, one)

    def test_without_what_may_be_left_out(self):
        x, upstream = self.inputs(), self.upstream()
        zeros = {"conv_bias", "dt_bias", "initial_conv_state", "initial_state"}
        full = {n: torch.zeros_like(t) if n in zeros else torch.ones_like(t) if n == "norm_weight" else t for n, t in x.items()}
        fewer = {n: t for n, t in x.items() if n not in zeros and n != "norm_weight"}
        self.same(self.gradients(fewer, upstream), self.gradients(full, upstream))

    def test_rows_past_the_last_sequence_have_no_gradient(self):
        x = self.inputs()
        self.offsets = torch.tensor([0, 10, 10, 20, 30])
        d_y = torch.full((TOKENS, HV, V), float("inf"), dtype=torch.bfloat16).index_fill(0, torch.arange(30), 1.0)
        found = self.gradients(x, (d_y, None, None))
        for name, d in found.items():
            self.assertTrue(d.isfinite().all(), name)
        for name in ("x", "a", "b", "z"):
            self.assertEqual(float(found[name][30:].abs().sum()), 0, name)

    def test_no_tokens_at_all(self):
        x, (_, d_conv, d_state) = self.inputs(lengths=[0, 0]), self.upstream(count=2)
        found = self.gradients(x, (None, d_conv, d_state))
        self.assertTrue(torch.equal(found["initial_state"], d_state))
        self.assertTrue(torch.equal(found["initial_conv_state"], d_conv))
        self.assertEqual(float(found["conv_weight"].abs().sum() + found["a_log"].abs().sum()), 0)

    def test_lengths_that_the_host_does_not_read(self):
        x, upstream = self.inputs(), self.upstream()
        wanted = self.gradients(x, upstream)
        self.offsets = ops.on_device(self.offsets.int())
        self.same(wanted, self.gradients(x, upstream))

    def test_autograd_keeps_the_inputs_and_o(self):
        x = {n: t.requires_grad_() for n, t in self.inputs().items()}
        inputs = {t.untyped_storage().data_ptr() for t in x.values()} | {self.offsets.untyped_storage().data_ptr()}
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            self.op(x)
        own = [t for t in kept if t.untyped_storage().data_ptr() not in inputs]
        self.assertEqual([tuple(t.shape) for t in own], [(TOKENS, HV, V)])

    def test_o_has_no_gradient(self):
        x = {n: t.requires_grad_() for n, t in self.inputs().items()}
        given = [x["x"], x["a"], x["b"], x["conv_weight"], x["a_log"], HK, HV, K, V, *(x[n] for n in NAMES[5:]), self.offsets]
        y, o, conv_state, state = ops.layer_forward(*given, *OPTIONS.values())
        self.assertEqual([t.requires_grad for t in (y, o, conv_state, state)], [True, False, True, True])

    def test_gradients_of_gradients_are_refused(self):
        x = {n: t.requires_grad_() for n, t in self.inputs().items()}
        d_x, = torch.autograd.grad(self.op(x)[0].float().square().sum(), x["x"], create_graph=True)
        with self.assertRaisesRegex(NotImplementedError, "^layer_forward: no gradients of gradients"):
            d_x.float().square().sum().backward()

    def test_checkpoints_have_the_same_bits(self):
        from torch.utils.checkpoint import checkpoint

        x, upstream = self.inputs(), self.upstream()
        wanted = self.gradients(x, upstream)
        for reentrant in (False, True):
            def run(leaves, reentrant=reentrant):
                return checkpoint(lambda *t: self.op(dict(zip(leaves, t))), *leaves.values(), use_reentrant=reentrant)

            self.same(wanted, self.gradients(x, upstream, run))

    def test_torch_takes_it_as_a_proper_op(self):
        from torch.library import opcheck

        x = {n: t.requires_grad_() for n, t in self.inputs().items()}
        given = [x["x"], x["a"], x["b"], x["conv_weight"], x["a_log"], HK, HV, K, V, *(x[n] for n in NAMES[5:]), self.offsets]
        opcheck(torch.ops.deltawave.layer_forward, (*given, *OPTIONS.values()),
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))

    def test_batches_without_rows(self):
        for batch, tokens in ((0, 5), (2, 0), (1, 0)):
            x = self.normal(batch, tokens, CHANNELS, dtype=torch.bfloat16).requires_grad_()
            z, gates = self.normal(batch, tokens, HV, V, dtype=torch.bfloat16), self.normal(batch, tokens, HV)
            weight, a_log = self.normal(CHANNELS, WIDTH).requires_grad_(), self.normal(HV).requires_grad_()
            y = training.gated_delta_net(x, z, gates, gates, weight, a_log, HK, HV, K, V)
            self.assertEqual(y.shape, (batch, tokens, HV, V))
            y.sum().backward()
            self.assertEqual(x.grad.shape, x.shape)
            self.assertEqual(float(weight.grad.abs().sum() + a_log.grad.abs().sum()), 0)


if __name__ == "__main__":
    unittest.main()
