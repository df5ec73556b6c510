"""Gradients of the torch op `prefill` on tensors of the CPU, which run on the simulator, beside those of torch's autograd in
double precision."""

import unittest

from .common import np

try:
    import torch
    from torch.library import opcheck

    from deltawave import ArgumentError, ops
except ImportError as problem:
    if problem.name != "torch" and "opcheck" not in str(problem) and "custom_op" not in str(problem):
        raise
    torch = None

HK, HV, K, V, TOKENS = 1, 2, 32, 16, 70
OFFSETS = [0, 65, 65, TOKENS]


def inputs(raw, dtype):
    made = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=made)

    x = {"q": normal(TOKENS, HK, K).to(dtype), "k": normal(TOKENS, HK, K).to(dtype),
         "v": normal(TOKENS, HV, V).to(dtype), "initial_state": normal(3, HV, K, V)}
    if raw:
        return {**x, "a": normal(TOKENS, HV).to(dtype), "b": normal(TOKENS, HV).to(dtype), "a_log": .3 * normal(HV),
                "dt_bias": normal(HV)}
    return {**x, "g": -torch.rand(TOKENS, HV, generator=made), "beta": torch.rand(TOKENS, HV, generator=made)}


def recurrence(x, most=1.0):
    """Outputs and final states of the token recurrence, in the type of its inputs."""
    def unit(rows):
        return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = unit(x["q"]), unit(x["k"]), x["v"]
    g, beta = x.get("g"), x.get("beta")
    if g is None:
        g = -x["a_log"].exp() * torch.nn.functional.softplus(x["a"] + x["dt_bias"])
        beta = most * x["b"].sigmoid()
    o, states = [], []
    for n, (begin, end) in enumerate(zip(OFFSETS, OFFSETS[1:])):
        for t in range(begin, end) or (None,):
            state = x["initial_state"][n] if t in (None, begin) else state
            if t is None:
                continue
            state = g[t].exp()[:, None, None] * state
            key, query = k[t, 0], q[t, 0]
            error = v[t] - torch.einsum("hkv,k->hv", state, key)
            state = state + torch.einsum("k,hv->hkv", key, beta[t][:, None] * error)
            o.append(K ** -0.5 * torch.einsum("hkv,k->hv", state, query))
        states.append(state)
    return torch.stack(o), torch.stack(states)


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Gradients(unittest.TestCase):
    def differentiate(self, f, x, weights):
        x = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
        o, states = f(x)
        ((o * weights[0]).sum() + (states * weights[1]).sum()).backward()
        return {name: t.grad for name, t in x.items()}

    def weights(self, dtype):
        made = torch.Generator().manual_seed(2)
        return (torch.randn(TOKENS, HV, V, generator=made).to(dtype), torch.randn(3, HV, K, V, generator=made))

    def close(self, found, wanted, bar=1e-2):
        for name, x in wanted.items():
            error = (found[name].double() - x).norm() / x.norm()
            self.assertLess(float(error), bar, name)

    def test_segments_of_the_forward_are_those_of_the_backward(self):
        made = torch.Generator().manual_seed(3)
        x = {"q": torch.randn(300, HK, K, generator=made), "k": torch.randn(300, HK, K, generator=made),
             "v": torch.randn(300, HV, V, generator=made)}
        x = {name: t.to(torch.bfloat16).requires_grad_() for name, t in x.items()}
        x["g"], x["beta"] = torch.zeros(300, HV), torch.rand(300, HV, generator=made)
        d_o = torch.randn(300, HV, V, generator=made).to(torch.bfloat16)
        d_final = torch.randn(1, HV, K, V, generator=made)
        of = {}
        for segments in (1, 3):
            o, states = ops.prefill(**x, qk_l2norm=True, segments=segments)
            found = torch.autograd.grad((o, states), [x["q"], x["k"], x["v"]], (d_o, d_final))
            direct = ops.prefill_backward(
                d_o, d_final, x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, None, None, False, None, None, None,
                None, True, "grouped", "key_major", [True] * 3 + [False] * 5, segments)
            for a, b in zip(found, direct):
                self.assertTrue(torch.equal(a, b))
            of[segments] = found
        self.assertFalse(torch.equal(of[1][2], of[3][2]))
        for whole, cut in zip(of[1], of[3]):
            self.assertLess(float((whole.double() - cut).norm() / whole.double().norm()), 1e-2)

    def test_gradients_are_those_of_the_recurrence(self):
        for raw, most, dtype in ((False, 1.0, torch.bfloat16), (True, 1.0, torch.bfloat16), (True, 2.0, torch.float16)):
            x, weights = inputs(raw, dtype), self.weights(dtype)
            double = {name: t.double() for name, t in x.items()}
            wanted = self.differentiate(lambda x: recurrence(x, most), double, [w.double() for w in weights])

            def op(x):
                return ops.prefill(**x, cu_seqlens=torch.tensor(OFFSETS), qk_l2norm=True, allow_neg_eigval=most == 2.0)

            found = self.differentiate(op, x, weights)
            self.close(found, wanted)
            for name, t in x.items():
                self.assertEqual((found[name].dtype, found[name].shape), (t.dtype, t.shape), name)
            again = self.differentiate(op, x, weights)
            for name in x:
                self.assertTrue(torch.equal(found[name], again[name]), name)

    def test_a_batch_of_one_and_a_dense_batch(self):
        x, weights = inputs(False, torch.bfloat16), self.weights(torch.bfloat16)
        flat = self.differentiate(lambda x: ops.prefill(**x, cu_seqlens=torch.tensor(OFFSETS)), x, weights)
        state = x.pop("initial_state")
        batch = {**{name: t[None] for name, t in x.items()}, "initial_state": state}
        one = self.differentiate(lambda x: ops.prefill(**x, cu_seqlens=torch.tensor(OFFSETS)), batch,
                                 (weights[0][None], weights[1]))
        for name, d in flat.items():
            self.assertTrue(torch.equal(d, one[name].view(d.shape)), name)
        halves = {name: t.view(2, TOKENS // 2, *t.shape[1:]) for name, t in x.items()}
        dense = self.differentiate(lambda x: ops.prefill(**x), halves, (weights[0].view(2, -1, HV, V), weights[1][:2]))
        lengths = torch.tensor([0, TOKENS // 2, TOKENS])
        packed = self.differentiate(lambda x: ops.prefill(**x, cu_seqlens=lengths), x, (weights[0], weights[1][:2]))
        for name, d in packed.items():
            self.assertTrue(torch.equal(d, dense[name].view(d.shape)), name)

    def test_a_sum_and_some_inputs_alone(self):
        x = inputs(False, torch.bfloat16)
        x["v"].requires_grad_()
        o, _ = ops.prefill(**x, cu_seqlens=torch.tensor(OFFSETS), qk_l2norm=True)
        o.sum().backward()  # a gradient whose strides are 0
        wanted = {name: t.detach().double() for name, t in x.items()}
        wanted["v"].requires_grad_()
        recurrence(wanted)[0].sum().backward()
        self.close({"v": x["v"].grad}, {"v": wanted["v"].grad})
        self.assertTrue(all(t.grad is None for name, t in x.items() if name != "v"))

    def test_checkpoints_have_the_same_bits(self):
        from torch.utils.checkpoint import checkpoint
        x, weights = inputs(False, torch.bfloat16), self.weights(torch.bfloat16)

        def op(*values):
            return ops.prefill(**dict(zip(x, values)), cu_seqlens=torch.tensor(OFFSETS))

        plain = self.differentiate(lambda x: op(*x.values()), x, weights)
        again = self.differentiate(lambda x: checkpoint(op, *x.values(), use_reentrant=False), x, weights)
        for name in x:
            self.assertTrue(torch.equal(plain[name], again[name]), name)

    def test_the_op_is_a_proper_one(self):
        x = {name: t.requires_grad_() for name, t in inputs(True, torch.bfloat16).items()}
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        given = {**x, "cu_seqlens": torch.tensor(OFFSETS), "qk_l2norm": True}
        opcheck(torch.ops.deltawave.prefill, (), given, test_utils=tests)

    def test_pools_refuse_gradients(self):
        x = inputs(False, torch.bfloat16)
        pool = x.pop("initial_state")
        o = ops.prefill_pool(**{name: t.requires_grad_() for name, t in x.items()}, pool=pool,
                             cu_seqlens=torch.tensor(OFFSETS))
        with self.assertRaises((RuntimeError, ArgumentError)):
            o.sum().backward()


if __name__ == "__main__":
    unittest.main()
