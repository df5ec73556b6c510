"""`ops.prefill_saving`: gradients in rounds, from states that the forward saved or computed again."""

import unittest

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed") from None

import deltawave as dw
from deltawave import ops
from deltawave.errors import ArgumentError

HK, HV, K, V = 1, 2, 32, 16
STATE = HV * K * V * 4


def inputs(*shape, seed=0):
    """Leaves of a prefill of so many tokens."""
    made = torch.Generator().manual_seed(seed)

    def random(*dims, dtype=torch.float32):
        return torch.randn(*shape, *dims, generator=made).to(dtype)

    x = {"q": random(HK, K, dtype=torch.bfloat16), "k": random(HK, K, dtype=torch.bfloat16),
         "v": random(HV, V, dtype=torch.bfloat16), "g": -random(HV).abs(), "beta": random(HV).sigmoid()}
    return {name: t.requires_grad_() for name, t in x.items()}


def gradients(op, x, **options):
    """Gradients of a sum over o and the final states."""
    for t in x.values():
        t.grad = None
    o, state, *rest = op(**x, qk_l2norm=True, **options)
    weights = torch.linspace(-1, 1, o.numel()).view(o.shape)
    ((o.float() * weights).sum() + state.square().sum()).backward()
    return [t.grad.clone() for t in x.values()], rest


class Rounds(unittest.TestCase):
    def same(self, one, other):
        for a, b in zip(one, other):
            self.assertTrue(torch.equal(a, b))

    def saved(self, x, cu_seqlens=None, initial_state=None, round_tokens=64):
        """Gradients with the context that was saved, those with one that is computed again, and the context."""
        kept = []
        found, (context,) = gradients(ops.prefill_saving, x, cu_seqlens=cu_seqlens, initial_state=initial_state,
                                      round_tokens=round_tokens)
        with torch.no_grad():
            o, state = ops.prefill(**x, qk_l2norm=True, cu_seqlens=cu_seqlens, initial_state=initial_state)
        weights = torch.linspace(-1, 1, o.numel()).view(o.shape)
        d_o, d_state = weights.to(o.dtype), 2 * state
        kept = ops.prefill_backward(d_o, d_state, x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, None, None, False,
                                    initial_state, None, cu_seqlens, None, True, "grouped", "key_major",
                                    [True] * 5 + [False] * 3, round_tokens=round_tokens)
        return found, kept[:5], context

    def test_a_saved_context_and_one_computed_again_give_the_same_bits(self):
        made = torch.Generator().manual_seed(3)
        for shape, lengths in (((200,), [0, 150, 160, 200]), ((2, 100), None), ((1, 130), [0, 130])):
            with self.subTest(shape=shape):
                cu_seqlens = None if lengths is None else torch.tensor(lengths)
                count = shape[0] if lengths is None else len(lengths) - 1
                states = torch.randn(count, HV, K, V, generator=made)
                found, again, context = self.saved(inputs(*shape), cu_seqlens, states)
                rows = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
                self.assertEqual((context.dtype, context.numel()), (torch.uint8, rows // 64 * STATE))
                self.same(found, again)

    def test_one_round_has_the_bits_of_prefill(self):
        x = inputs(200)
        for round_tokens in (None, 256):
            found, (context,) = gradients(ops.prefill_saving, x, round_tokens=round_tokens)
            self.assertEqual(context.numel(), 0)
            self.same(found, gradients(ops.prefill, x)[0])

    def test_rounds_differ_from_one_round_by_rounding(self):
        x = inputs(300, seed=1)
        found, again = gradients(ops.prefill_saving, x, round_tokens=64)[0], gradients(ops.prefill, x)[0]
        for a, b in zip(found, again):
            a, b = a.double(), b.double()
            self.assertLess((a - b).norm().item(), 1e-2 * b.norm().item())

    def test_the_gradient_of_prefill_has_rounds(self):
        # With less memory for a round, the backward of `prefill` launches the forward again.
        x, default = inputs(200), ops._round_tokens
        try:
            ops._round_tokens = lambda k, v: 64
            again = gradients(ops.prefill, x)[0]
        finally:
            ops._round_tokens = default
        self.same(again, gradients(ops.prefill_saving, x, round_tokens=64)[0])

    def test_lengths_on_the_device_have_one_round(self):
        x, cu_seqlens = inputs(200), ops.on_device(torch.tensor([0, 150, 200]))
        found, _ = gradients(ops.prefill_saving, x, cu_seqlens=cu_seqlens, round_tokens=64)
        self.same(found, gradients(ops.prefill, x, cu_seqlens=cu_seqlens)[0])

    def test_checkpointing_and_compile_have_the_same_bits(self):
        x = inputs(1, 150)
        wanted, _ = gradients(ops.prefill_saving, x, round_tokens=64)

        def checkpointed(**named):
            return torch.utils.checkpoint.checkpoint(lambda: ops.prefill_saving(**named), use_reentrant=False)

        self.same(gradients(checkpointed, x, round_tokens=64)[0], wanted)
        compiled = torch.compile(lambda **named: ops.prefill_saving(**named), backend="aot_eager", fullgraph=True)
        self.same(gradients(compiled, x, round_tokens=64)[0], wanted)

    def test_plans_take_the_context(self):
        x = {name: t.detach() for name, t in inputs(200).items()}
        spec = dw.PrefillSpec(HK, HV, K, V, save=64)
        given = {name: ops.empty(t.shape, t.dtype).copy_(t) for name, t in x.items()}
        plan = dw.Prefill.packed(ops.context_of(torch.device("cpu")), spec, [0, 150, 200], 200)
        backward = dw.PrefillBackward(plan)
        self.assertEqual((plan.context_bytes, backward.context_bytes), (2 * STATE, 2 * STATE))
        o, d_q = ops.empty((200, HV, V), torch.bfloat16), ops.empty((200, HK, K), torch.bfloat16)
        memory = ops.empty((1 << 16,), torch.uint8)
        with self.assertRaisesRegex(ArgumentError, "context: it overlaps o|o: it overlaps context"):
            plan.launch(**given, o=o, context=o.view(torch.uint8).flatten())
        with self.assertRaisesRegex(ArgumentError, f"context: {STATE} bytes; at least {2 * STATE} bytes are needed"):
            plan.launch(**given, o=o, context=memory[:STATE])
        with self.assertRaisesRegex(ArgumentError, "context_bytes: no argument of a launch"):
            plan.launch(**given, o=o, context=memory, context_bytes=9)
        pool = ops.empty((2, HV, K, V), torch.float32)
        with self.assertRaisesRegex(ArgumentError, "pool: given; it must be absent: the launch saves context"):
            plan.launch(**given, o=o, pool=pool, context=memory)
        plan.launch(**given, o=o, context=memory)
        with self.assertRaisesRegex(ArgumentError, "context: absent; it must be given"):
            backward.launch(**given, d_o=o, d_q=d_q)
        with self.assertRaisesRegex(ArgumentError, "d_q: it overlaps context"):
            backward.launch(**given, d_o=o, d_q=d_q, context=d_q.view(torch.uint8).flatten()[:2 * STATE])
        backward.launch(**given, d_o=o, d_q=d_q, context=memory)
        self.assertTrue(d_q.isfinite().all())
        for wrong in (0, 1, 63, "all", None, 2.5):
            with self.assertRaisesRegex(ArgumentError, "save"):
                dw.Prefill.packed(ops.context_of(torch.device("cpu")), dw.PrefillSpec(HK, HV, K, V, save=wrong), [0, 200], 200)

    def test_the_default_bounds_the_workspace(self):
        k, v = torch.empty(1, 16, 128), torch.empty(1, 32, 128)
        self.assertEqual(ops._round_tokens(k, v), 16192)
        x = inputs(100)
        for wrong in (0, 63, 100, -64):
            with self.assertRaisesRegex(ArgumentError, f"round_tokens: {wrong}; it must be a positive multiple of 64"):
                ops.prefill_saving(**x, round_tokens=wrong)


if __name__ == "__main__":
    unittest.main()
