"""What engines need of the ops: outputs of their own, snapshots, norms and gates in the convolution, other null slots, and
strides that are refused on the CPU as on a GPU. On torch where that is installed, and on a stand-in."""

import unittest

import deltawave as dw

from . import reference
from .common import np
from .test_fla import OnStandIn as Base
from .test_fla import torch_stand_in
from .test_ops import torch as real

H, HV, K, V, T = 2, 4, 16, 32, 70


@unittest.skipIf(np is None, "NumPy is not installed")
class OnStandIn(unittest.TestCase):
    tensor, close = Base.tensor, Base.close

    def array(self, x):
        return Base.array(self, x)

    def setUp(self):
        self.torch, self.ops = torch_stand_in, torch_stand_in.package("ops").ops

    def rows(self, tokens=T, seed=1):
        random = np.random.default_rng(seed)
        shapes = {"q": (tokens, H, K), "k": (tokens, H, K), "v": (tokens, HV, V)}
        made = {n: self.tensor(random.uniform(-0.5, 0.5, s), "bfloat16") for n, s in shapes.items()}
        made["g"] = self.tensor(random.uniform(-0.2, 0, (tokens, HV)))
        made["beta"] = self.tensor(random.uniform(0, 1, (tokens, HV)), "bfloat16")
        return {n: x for n, (x, _) in made.items()}, {n: x for n, (_, x) in made.items()}

    def pool(self, slots=4):
        return self.tensor(np.random.default_rng(2).uniform(-1, 1, (slots, HV, K, V)))

    def same(self, a, b):
        self.assertTrue((self.array(a) == self.array(b)).all())

    def empty(self, shape, dtype="bfloat16"):
        return self.tensor(np.zeros(shape), dtype)[0]

    def test_outputs(self):
        x, _ = self.rows()
        o, state = self.ops.prefill(**x)
        out = self.empty((T, HV, V))
        found, again = self.ops.prefill(**x, out=out)
        self.assertIs(found, out)
        self.same(out, o)
        self.same(again, state)
        o, none = self.ops.prefill(**x, output_final_state=False)
        self.same(out, o)
        self.assertEqual(tuple(none.shape), (0,))
        for op, rows in (("prefill_pool", T), ("decode", 3)):
            x, _ = self.rows(rows)
            pools = [self.pool()[0] for _ in range(2)]
            slots, _ = self.tensor([2] if op == "prefill_pool" else [2, 0, 3], "int32")
            out = self.empty((rows, HV, V))
            call = getattr(self.ops, op)
            self.assertIs(call(**x, pool=pools[0], slots=slots, out=out), out)
            self.same(out, call(**x, pool=pools[1], slots=slots))
            self.same(*pools)
        drafts = {n: t.view(2, 3, *t.shape[1:]) for n, t in self.rows(6)[0].items()}
        pool, slots = self.pool()[0], self.tensor([2, 0], "int32")[0]
        o, states = self.ops.verify(**drafts, pool=pool, slots=slots)
        out, mine = self.empty((2, 3, HV, V)), self.empty((2, 3, HV, K, V), "float32")
        self.ops.verify(**drafts, pool=pool, slots=slots, out=out, states=mine)
        self.same(out, o)
        self.same(mine, states)
        y = self.ops.norm(o, o)
        self.same(self.ops.norm(o, o, out=out), y)

    def test_outputs_of_another_shape_are_refused(self):
        x, _ = self.rows()
        for wrong in (self.empty((T, HV, V + 1)), self.empty((T, HV, V), "float32")):
            for call in (lambda: self.ops.prefill(**x, out=wrong),
                         lambda: self.ops.prefill_pool(**x, pool=self.pool()[0], out=wrong)):
                with self.assertRaises(dw.ArgumentError) as caught:
                    call()
                self.assertTrue(str(caught.exception).startswith("out:"))
        drafts = {n: t.view(2, 35, *t.shape[1:])[:, :3] for n, t in x.items()}
        with self.assertRaises(dw.ArgumentError) as caught:
            self.ops.verify(**drafts, pool=self.pool()[0], states=self.empty((2, 2, HV, K, V), "float32"))
        self.assertTrue(str(caught.exception).startswith("states:"))

    def test_snapshots_in_a_tensor_of_their_own(self):
        x, exact = self.rows()
        pool, start = self.pool()
        slots, _ = self.tensor([1], "int32")
        where, _ = self.tensor([1, -1], "int32")
        snapshots, _ = self.tensor(np.zeros((2, HV, V, K)))
        found = self.ops.prefill_pool(**x, pool=pool, slots=slots, snapshots=snapshots, snapshot_slots=where,
                                      snapshot_layout="value_major")
        _, after = reference.prefill(*(exact[n][:64] for n in "qkv"), exact["g"][:64], exact["beta"][:64], [0, 64],
                                     start[[1]], K ** -0.5)
        kept = self.array(snapshots)
        self.assertLess(reference.error(kept[1].swapaxes(1, 2), after[0]), 8e-3)
        self.assertTrue((kept[0] == 0).all())
        again = self.pool()[0]
        self.same(found, self.ops.prefill_pool(**x, pool=again, slots=slots))
        self.same(pool, again)

    def test_a_null_slot_of_zero(self):
        x, _ = self.rows(3)
        results = []
        for null, numbers in ((0, [0, 2, 0]), (-1, [-1, 2, -1])):
            pool, start = self.pool()
            slots, _ = self.tensor(numbers, "int32")
            o = self.ops.decode(**x, pool=pool, slots=slots, null_slot=null)
            self.assertTrue((self.array(o)[[0, 2]] == 0).all(), "padding")
            self.assertTrue((self.array(pool)[[0, 1, 3]] == start[[0, 1, 3]]).all())
            results.append((o, pool))
        for a, b in zip(*results):
            self.same(a, b)

    def test_norms_and_gates_in_the_convolution(self):
        channels, random = 2 * H * K + HV * V, np.random.default_rng(7)
        x, rows = self.tensor(random.uniform(-1, 1, (T, channels)), "bfloat16")
        weight, w = self.tensor(random.uniform(-1, 1, (channels, 4)), "bfloat16")
        (a, a_exact), (b, b_exact) = (self.tensor(random.uniform(-2, 2, (T, HV)), "bfloat16") for _ in range(2))
        (a_log, a_log_exact), (bias, bias_exact) = (self.tensor(random.uniform(-1, 1, HV)) for _ in range(2))
        arguments = (x, weight, None, None, H, HV, K, V)
        q, k, v, g, beta = self.ops.conv(*arguments, qk_l2norm=True, a=a, b=b, a_log=a_log, dt_bias=bias)
        y, _ = reference.conv(rows, w, 0, [0, T], np.zeros((1, channels, 3)))
        for found, begin in ((q, 0), (k, H * K)):
            wanted = reference.l2_normalised(y[:, begin:begin + H * K].reshape(T, H, K))
            self.close(found, wanted)
        self.close(v, y[:, 2 * H * K:].reshape(T, HV, V))
        for found, wanted in zip((g, beta), reference.gates(a_exact, b_exact, a_log_exact, bias_exact)):
            self.close(found, wanted, 1e-5)
        for wrong, name in (({"a": a, "b": b}, "a_log"), ({"a_log": a_log}, "a"), ({"dt_bias": bias}, "dt_bias")):
            with self.assertRaises(dw.ArgumentError) as caught:
                self.ops.conv(*arguments, **wrong)
            self.assertTrue(str(caught.exception).startswith(name + ":"))

    def test_the_cpu_refuses_the_strides_that_a_gpu_refuses(self):
        x, _ = self.rows()
        for name in ("q", "k", "v"):
            across, _ = self.tensor(np.zeros((*x[name].shape[1:], T)), "bfloat16")
            turned = across.transpose(0, 2).transpose(1, 2)
            self.assertEqual(tuple(turned.shape), tuple(x[name].shape))
            with self.assertRaises(dw.ArgumentError) as caught:
                self.ops.prefill(**{**x, name: turned})
            self.assertTrue(str(caught.exception).startswith(name + ":"), caught.exception)
        with self.assertRaises(dw.ArgumentError) as caught:
            pairs, _ = self.tensor([[0, 0], [1, 0]], "int32")
            few = {n: t[:2] for n, t in x.items()}
            self.ops.decode(**few, pool=self.pool()[0], slots=pairs[:, 0])
        self.assertTrue(str(caught.exception).startswith("slots:"), caught.exception)

    def test_strides_between_rows_are_kept(self):
        x, _ = self.rows()
        o, state = self.ops.prefill(**x)
        wide = {}
        for name, t in x.items():
            values = self.array(t)
            padded = np.full((T, *values.shape[1:-1], values.shape[-1] + 5), 9.0)
            padded[..., :values.shape[-1]] = values
            dtype = "float32" if name == "g" else "bfloat16"
            wide[name] = self.tensor(padded, dtype)[0][..., :values.shape[-1]]
        again, same = self.ops.prefill(**wide)
        self.same(o, again)
        self.same(state, same)


@unittest.skipIf(real is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class OnTorch(OnStandIn):
    def setUp(self):
        from deltawave import ops

        self.torch, self.ops = real, ops

    def test_torch_sees_what_they_do(self):
        from torch.library import opcheck

        checks = ("test_schema", "test_faketensor")
        x, _ = self.rows()
        pool, snapshots = self.pool()[0], self.pool()[0]
        named = real.ops.deltawave
        rows = (x["q"], x["k"], x["v"])
        opcheck(named.prefill_out.default, (real.empty_like(x["v"]), *rows, x["g"], x["beta"]), test_utils=checks)
        where = {"snapshot_slots": self.tensor([1, -1], "int32")[0]}
        opcheck(named.prefill_pool_out.default, (real.empty_like(x["v"]), snapshots, *rows, pool), where,
                test_utils=checks)
        opcheck(named.prefill_pool_out.default, (real.empty_like(x["v"]), None, *rows, pool), test_utils=checks)
        few = tuple(t[:4] for t in rows)
        opcheck(named.decode_out.default, (real.empty_like(few[2]), *few, pool), test_utils=checks)
        after = real.empty(4, 1, HV, K, V)
        opcheck(named.verify_out.default, (real.empty_like(few[2]), after, *few, pool), test_utils=checks)
        opcheck(named.norm_out.default, (real.empty_like(x["v"]), x["v"], x["v"]), test_utils=checks)

    def test_torch_compile_takes_them(self):
        x, _ = self.rows(4)

        def step(q, k, v, pool, out):
            o = self.ops.decode(q, k, v, pool, out=out)
            return o * 2

        pools = [self.pool()[0] for _ in range(2)]
        outs = [real.empty_like(x["v"]) for _ in range(2)]
        eager = step(x["q"], x["k"], x["v"], pools[0], outs[0])
        compiled = real.compile(step, backend="aot_eager", fullgraph=True)(x["q"], x["k"], x["v"], pools[1], outs[1])
        self.assertTrue(real.equal(eager, compiled) and real.equal(*pools) and real.equal(*outs))


class OnCard(OnStandIn):
    """The same on a GPU, where torch has one and the library has kernels for it."""

    def setUp(self):
        from .test_cuda import missing

        why = missing()
        if why:
            self.skipTest(why)
        OnTorch.setUp(self)

    def tensor(self, values, dtype="float32"):
        made, exact = super().tensor(values, dtype)
        return made.cuda(), exact

    def array(self, x):
        return super().array(x.cpu())
