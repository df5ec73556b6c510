"""Plain calls of ops go past torch's dispatcher. Everything that a dispatcher is for goes through it."""

import contextlib
import unittest

try:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    from deltawave import causal_conv1d, ops
except ImportError as problem:
    if problem.name not in ("torch", "torch._subclasses", "torch.utils", "torch.fx") and "custom_op" not in str(problem):
        raise
    torch = None


def tensors():
    made = torch.Generator().manual_seed(3)
    x = torch.randn(2, 8, 1, generator=made).to(torch.bfloat16)
    state = torch.randn(2, 8, 3, generator=made).to(torch.bfloat16)
    return x, state, torch.randn(8, 4, generator=made).to(torch.bfloat16)


@unittest.skipIf(torch is None, "torch 2.4 or newer is not installed")
class PlainCalls(unittest.TestCase):
    def setUp(self):
        self.norm_of = (torch.randn(3, 2, 16, dtype=torch.bfloat16), torch.randn(3, 2, 16, dtype=torch.bfloat16))

    def seen(self, call):
        """Names of deltawave's ops that torch dispatches in a call."""
        found = []

        class Records(TorchDispatchMode):
            def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
                if str(function).startswith("deltawave"):
                    found.append(str(function))
                return function(*arguments, **(named or {}))

        with Records():
            call()
        return found

    @contextlib.contextmanager
    def refused(self):
        """Fails a call that reaches the dispatcher."""
        def fails(*_):
            raise AssertionError("through the dispatcher")

        real, torch._ops.OpOverload.__call__ = torch._ops.OpOverload.__call__, fails
        try:
            yield
        finally:
            torch._ops.OpOverload.__call__ = real

    def test_plain_calls_are_the_same(self):
        x, state, weight = tensors()
        other, before = state.clone(), state._version
        with self.refused():
            found = causal_conv1d.causal_conv1d_update(x, state, weight, activation="silu")
            y = ops.norm(*self.norm_of)
        wanted = torch.ops.deltawave.causal_conv1d_update(x, other, weight, None, "silu", None).transpose(1, 2)
        self.assertTrue(torch.equal(found, wanted) and torch.equal(state, other))
        self.assertTrue(torch.equal(y, torch.ops.deltawave.norm(*self.norm_of)))
        # Autograd sees what was written.
        self.assertGreater(state._version, before)

    def test_a_tensor_that_autograd_saved_is_not_overwritten(self):
        x, state, weight = tensors()
        factor = torch.ones(2, 8, 3, dtype=torch.bfloat16, requires_grad=True)
        product = (state * factor).sum()
        with torch.no_grad():
            causal_conv1d.causal_conv1d_update(x, state, weight)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            product.backward()

    def test_inference_mode(self):
        with torch.inference_mode(), self.refused():
            x, state, weight = tensors()
            causal_conv1d.causal_conv1d_update(x, state, weight)

    def test_modes_see_ops(self):
        x, state, weight = tensors()
        self.assertEqual(self.seen(lambda: ops.norm(*self.norm_of)), ["deltawave.norm.default"])
        self.assertEqual(self.seen(lambda: causal_conv1d.causal_conv1d_update(x, state, weight)),
                         ["deltawave.causal_conv1d_update.default"])
        traced = make_fx(lambda x, z: ops.norm(x, z))(*self.norm_of)
        self.assertIn("deltawave.norm", traced.code)
        with FakeTensorMode() as mode:
            fake = ops.norm(*(mode.from_tensor(t) for t in self.norm_of))
        self.assertEqual(type(fake).__name__, "FakeTensor")
        meta = ops.norm(*(t.to("meta") for t in self.norm_of))
        self.assertTrue(meta.is_meta)

    def test_profilers_see_ops(self):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ops.norm(*self.norm_of)
        self.assertIn("deltawave::norm", {event.key for event in profile.key_averages()})

    def test_gradients_go_through_the_dispatcher(self):
        x, z = self.norm_of
        x = x.clone().requires_grad_()
        self.assertTrue(ops.norm(x, z).requires_grad)
        with torch.no_grad(), self.refused():
            self.assertFalse(ops.norm(x, z).requires_grad)

    def test_subclasses_and_transforms(self):
        class Other(torch.Tensor):
            pass

        x, z = self.norm_of
        with self.assertRaises(AssertionError), self.refused():
            ops.norm(x.as_subclass(Other), z)
        each = torch.vmap(lambda t: ops.norm(t, t))(torch.stack([x, z]))
        self.assertTrue(torch.equal(each, torch.stack([ops.norm(x, x), ops.norm(z, z)])))

    def test_arguments_of_other_types(self):
        # The dispatcher says what it takes.
        with self.assertRaises((RuntimeError, TypeError)):
            ops.norm(*self.norm_of, eps="1")
        with self.assertRaises((RuntimeError, TypeError)):
            ops.norm(*self.norm_of, None, 1e-6, "silu", 3)
        self.assertTrue(torch.equal(ops.norm(*self.norm_of, eps=1), ops.norm(*self.norm_of, eps=1.0)))


if __name__ == "__main__":
    unittest.main()
