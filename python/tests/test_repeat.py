"""Launches on tensors of the layouts of an earlier launch, whose structs they take."""

import threading
import unittest
from unittest import mock

try:
    import torch

    from deltawave import ArgumentError, ops
    from deltawave.calls import Calls
    from deltawave.repeat import Repeats
except ImportError as problem:
    if problem.name != "torch" and "custom_op" not in str(problem):
        raise
    torch = None

V = 16


def norm_inputs(seed, rows=3):
    made = torch.Generator().manual_seed(seed)
    return [ops.empty((rows, 2, V), torch.bfloat16).copy_(torch.randn(rows, 2, V, generator=made)) for _ in range(2)]


def norm_of(x, z):
    x, z = x.double(), z.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * torch.nn.functional.silu(z)


@unittest.skipIf(torch is None, "torch 2.4 or newer is not installed")
class Repeated(unittest.TestCase):
    def setUp(self):
        self.taken, real = 0, Repeats.take

        def take(repeats, key, context, tensors):
            found = real(repeats, key, context, tensors)
            self.taken += found is not None
            return found

        Repeats.take = take
        self.addCleanup(setattr, Repeats, "take", real)
        # Calls of ops like earlier ones do not come so far.
        long_way = mock.patch.object(Calls, "run", lambda calls, key, values, function: function())
        long_way.start()
        self.addCleanup(long_way.stop)
        self.context = ops.context_of(torch.device("cpu"))
        self.context.norms = Repeats()

    def close(self, found, wanted):
        self.assertLess((found.double() - wanted).abs().max().item(), 2e-2)

    def test_other_addresses(self):
        for seed in range(4):
            x, z = norm_inputs(seed)
            self.close(ops.norm(x, z), norm_of(x, z))
        self.assertEqual(self.taken, 3)

    def test_other_layouts_and_values(self):
        x, z = norm_inputs(1)
        wide = ops.empty((3, 2, 2 * V), torch.bfloat16)
        apart = wide[..., :V].copy_(z)
        for eps in (1e-6, 1.0):
            for second in (z, apart, None):
                if second is None:
                    with self.assertRaises(ArgumentError):
                        ops.norm(x, z.float(), eps=eps)
                    continue
                wanted = norm_of(x, z)
                if eps == 1.0:
                    wanted *= ((x.double().pow(2).mean(-1, keepdim=True) + 1e-6) /
                               (x.double().pow(2).mean(-1, keepdim=True) + 1)).sqrt()
                self.close(ops.norm(x, second, eps=eps), wanted)
        self.assertEqual(self.taken, 0)

    def test_memory_of_others_is_refused_again(self):
        x, z = norm_inputs(2)
        from deltawave.norm import norm

        y = ops.empty(x.shape, x.dtype)
        for _ in range(2):
            norm(self.context, x=x, z=z, y=y)
        self.assertEqual(self.taken, 1)
        with self.assertRaisesRegex(ArgumentError, "z: memory of"):
            norm(self.context, x=x, z=z.clone(), y=y)
        norm(self.context, x=x, z=z, y=y)
        self.close(y, norm_of(x, z))

    def test_plans(self):
        made = torch.Generator().manual_seed(5)
        for seed in range(3):
            q, k, v = (ops.empty((2, 1, V), torch.bfloat16).copy_(torch.randn(2, 1, V, generator=made) / 4) for _ in "qkv")
            pool = ops.empty((2, 1, V, V), torch.float32).copy_(torch.randn(2, 1, V, V, generator=made))
            before = pool.double()
            o = ops.decode(q, k, v, pool)
            read = torch.einsum("bhkv,bhk->bhv", before, k.double())
            after = before + torch.einsum("bhk,bhv->bhkv", k.double(), v.double() - read)
            self.close(pool, after)
            self.close(o, torch.einsum("bhkv,bhk->bhv", after, q.double()) * V ** -0.5)
        self.assertEqual(self.taken, 2)

    def test_threads(self):
        inputs = [norm_inputs(seed) for seed in range(4)]
        wrong = []

        def work(x, z):
            wanted = norm_of(x, z)
            for _ in range(20):
                if (ops.norm(x, z).double() - wanted).abs().max() > 2e-2:
                    wrong.append(1)

        threads = [threading.Thread(target=work, args=pair) for pair in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertFalse(wrong)

    def test_no_more_than_a_number(self):
        repeats = Repeats()
        for key in range(3 * Repeats.MOST):
            repeats.give(key, None)
        self.assertLessEqual(len(repeats._kept), Repeats.MOST)


if __name__ == "__main__":
    unittest.main()
