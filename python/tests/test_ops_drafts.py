"""The torch custom ops of speculative decoding on tensors of the CPU, which run on the simulator."""

import sys
import threading
import unittest
from unittest import mock

from .common import np

try:
    import torch
    from torch.library import opcheck

    from deltawave import ArgumentError, drafts, ops
except ImportError as problem:
    if problem.name != "torch" and "opcheck" not in str(problem) and "custom_op" not in str(problem):
        raise
    torch = None

HK, HV, K, V, BATCH, TOKENS, WIDTH = 1, 2, 16, 32, 2, 3, 4
CHANNELS = 2 * HK * K + HV * V


def uniform(low, high, *shape):
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def inputs(*leading):
    return {"q": uniform(-.4, .4, *leading, HK, K).bfloat16(), "k": uniform(-.3, .4, *leading, HK, K).bfloat16(),
            "v": uniform(-1, 1, *leading, HV, V).bfloat16(), "g": uniform(-.2, 0, *leading, HV),
            "beta": uniform(0, 1, *leading, HV)}


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Drafts(unittest.TestCase):
    def test_states_of_drafts_are_those_of_verify(self):
        x, pool = inputs(BATCH, TOKENS), uniform(-1, 1, 8, HV, K, V)
        table = torch.tensor([[1, 5, 0], [3, 2, 7]], dtype=torch.int32)
        accepted = torch.tensor([2, 1], dtype=torch.int32)
        wanted, states = ops.verify(**x, pool=pool, slots=torch.tensor([5, 3], dtype=torch.int32))
        lengths = ops.empty((BATCH + 1,), torch.int32).copy_(torch.tensor([0, TOKENS, TOKENS + 2]))
        for ragged in (False, True):
            rows = {name: t.flatten(0, 1)[:TOKENS + 2] for name, t in x.items()} if ragged else x
            after, out = pool.clone(), torch.zeros_like(rows["v"])
            more = {"cu_seqlens": lengths} if ragged else {}
            found = drafts.decode_drafts(**rows, **more, pool=after, draft_slots=table, accepted=accepted, null_slot=0, out=out)
            self.assertIs(found, out)
            self.assertTrue(torch.equal(found.flatten(0, -3), wanted.flatten(0, 1)[:found.flatten(0, -3).shape[0]]))
            for n in range(BATCH):
                for t in range(TOKENS):
                    stored = table[n, t] and not (ragged and (n, t) == (1, 2))
                    now = states[n, t] if stored else pool[table[n, t]]
                    self.assertTrue(torch.equal(after[table[n, t]], now), (n, t))
            again = pool.clone()
            found = drafts.decode_drafts(**rows, **more, pool=again, draft_slots=table, accepted=accepted, null_slot=0)
            self.assertTrue(torch.equal(found, out) and torch.equal(again, after))

    def test_states_go_to_slots_of_their_own(self):
        x, pool, states = inputs(BATCH, TOKENS), uniform(-1, 1, 8, HV, K, V), torch.zeros(7, HV, K, V)
        table = torch.tensor([[1, 5, 0], [3, 2, 7]], dtype=torch.int32)
        slots, before = torch.tensor([5, 3], dtype=torch.int32), pool.clone()
        wanted, after = ops.verify(**x, pool=pool, slots=slots)
        found = drafts.verify_drafts(**x, pool=pool, states=states, draft_slots=table, slots=slots)
        self.assertTrue(torch.equal(found, wanted) and torch.equal(pool, before))
        for n in range(BATCH):
            for t in range(TOKENS):
                if table[n, t] < 7:
                    self.assertTrue(torch.equal(states[table[n, t]], after[n, t]), (n, t))
        self.assertTrue((states[[4, 6]] == 0).all())
        out, lengths = torch.zeros(5, HV, V).bfloat16(), torch.tensor([0, 3, 5], dtype=torch.int32)
        rows = {name: t.flatten(0, 1)[:5] for name, t in x.items()}
        self.assertIs(drafts.verify_drafts(**rows, pool=pool, states=states, draft_slots=table, slots=slots,
                                           cu_seqlens=lengths, out=out), out)
        self.assertTrue(torch.equal(out, wanted.flatten(0, 1)[:5]))
        q, k, v, g, beta = x.values()
        rest = (q, k, v, pool, table, slots, None, g, beta, None, None, None, None, False, None, None, False, "grouped",
                "key_major", None)
        tests = ("test_schema", "test_faketensor")
        opcheck(torch.ops.deltawave.verify_drafts.default, (states, *rest), test_utils=tests)
        opcheck(torch.ops.deltawave.verify_drafts_out.default, (torch.empty_like(v), states, *rest), test_utils=tests)

    def test_conv_reads_from_the_accepted_column(self):
        x, weight = uniform(-1, 1, 5, CHANNELS).bfloat16(), uniform(-1, 1, CHANNELS, WIDTH).bfloat16()
        state = uniform(-1, 1, 4, CHANNELS, WIDTH - 2 + TOKENS).bfloat16()
        lengths, heads = torch.tensor([0, 3, 5]), (HK, HV, K, V)
        slots = torch.tensor([[2, 9], [1, 9]], dtype=torch.int32)
        before = torch.stack([state[2, :, 1:4], state[1, :, 0:3]])
        wanted = ops.conv(x, weight, None, before, *heads, cu_seqlens=lengths)
        after = state.clone()
        found = drafts.conv_drafts(x, weight, None, after, *heads, torch.tensor([2, 1], dtype=torch.int32), lengths, slots)
        for a, b in zip(found, wanted):
            self.assertTrue(torch.equal(a, b))
        self.assertTrue(torch.equal(after[2], torch.cat([state[2, :, 2:4], x[:3].T], 1)))
        self.assertTrue(torch.equal(after[1], torch.cat([state[1, :, 1:3], x[3:].T, state[1, :, 4:]], 1)))
        self.assertTrue(torch.equal(after[[0, 3]], state[[0, 3]]))

    def layer(self, interleaved=False):
        """Arguments of a layer of drafts up to its optional ones, and z."""
        rows, blocks = 5, HK if interleaved else 1
        qkv, z = uniform(-1, 1, rows, CHANNELS).bfloat16(), uniform(-1, 1, rows, HV * V).bfloat16()
        x = torch.cat([t.view(rows, blocks, -1) for t in (qkv, z)], 2).flatten(1)
        a, b = uniform(-1, 1, rows, HV), uniform(-1, 1, rows, HV, 1)[:, :, 0]
        states = uniform(-1, 1, 8, CHANNELS, WIDTH - 2 + TOKENS).bfloat16(), uniform(-1, 1, 8, HV, K, V)
        return [x, a, b, *states, uniform(-1, 1, CHANNELS, WIDTH).bfloat16(), uniform(0, 1, HV), HK, HV, K, V,
                torch.tensor([[1, 5, 0], [3, 2, 7]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32),
                torch.tensor([0, 2, 5], dtype=torch.int32)], z.view(rows, HV, V)

    def test_layer_is_its_three_kernels(self):
        for interleaved in (False, True):
            given, z = self.layer(interleaved)
            x, a, b, conv_state, pool, weight, a_log, *heads, table, accepted, lengths = given
            named = {"x_layout": "interleaved" if interleaved else "flat", "null_slot": 0}
            after = pool.clone()
            q, k, v = drafts.conv_drafts(x, weight, None, conv_state.clone(), *heads, accepted, lengths, table, **named)
            inside = ops.empty((3,), torch.int32).copy_(lengths)
            o = drafts.decode_drafts(q, k, v, after, table, accepted=accepted, cu_seqlens=inside, qk_l2norm=True, a=a, b=b,
                                     a_log=a_log, null_slot=0)
            y = ops.norm(o, z)
            found = [conv_state.clone(), pool.clone()]
            given[3:5] = found
            self.assertTrue(torch.allclose(drafts.layer_drafts(*given, **named).float(), y.float(), atol=2e-2, rtol=2e-2))
            self.assertTrue(torch.allclose(found[1], after, atol=1e-5, rtol=1e-5))
            given[3:5] = conv_state.clone(), pool.clone()
            out = torch.zeros(5, HV, V, dtype=torch.bfloat16)
            self.assertIs(drafts.layer_drafts(*given, **named, z=z, out=out), out)
            given[3:5] = conv_state.clone(), pool.clone()
            self.assertTrue(torch.equal(drafts.layer_drafts(*given, **named), out))

    def test_layer_of_two_kernels(self):
        """V of 128: the norm is part of the decode's kernel."""
        with mock.patch.multiple(sys.modules[__name__], K=32, V=128, CHANNELS=2 * HK * 32 + HV * 128):
            self.test_layer_is_its_three_kernels()
            self.test_rows_of_no_sequence()

    def test_threads_do_not_share_what_lies_between_kernels(self):
        given = [self.layer()[0] for _ in range(2)]
        given[1][0] = given[1][0] * 0.5

        def run(inputs):
            inputs = [*inputs[:3], inputs[3].clone(), inputs[4].clone(), *inputs[5:]]
            return drafts.layer_drafts(*inputs, null_slot=0), inputs[4]

        wanted, wrong = [run(one) for one in given], []

        def repeat(which):
            for _ in range(60):
                wrong.extend(which for pair in zip(run(given[which]), wanted[which]) if not torch.equal(*pair))

        threads = [threading.Thread(target=repeat, args=(which,)) for which in range(2)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        self.assertEqual(wrong, [])

    def test_no_sequences(self):
        x, table = inputs(0, TOKENS), torch.empty(0, TOKENS, dtype=torch.int32)
        pool, states = uniform(-1, 1, 8, HV, K, V), uniform(-1, 1, 2, HV, K, V)
        before = pool.clone(), states.clone()
        o = drafts.verify_drafts(x["q"], x["k"], x["v"], pool, states, table, g=x["g"], beta=x["beta"])
        self.assertEqual(tuple(o.shape), tuple(x["v"].shape))
        self.assertTrue(torch.equal(pool, before[0]) and torch.equal(states, before[1]))

    def test_rows_of_no_sequence(self):
        given, _ = self.layer()
        given[-1] = torch.tensor([0, 2, 4], dtype=torch.int32)
        self.assertTrue((drafts.layer_drafts(*given, null_slot=0)[4] == 0).all())

    def test_layers_that_are_refused(self):
        for place, changed, name in ((0, torch.zeros(5, CHANNELS).bfloat16(), "x"),
                                     (-1, torch.tensor([0, 2], dtype=torch.int32), "cu_seqlens"),
                                     (-3, torch.zeros(2, 17, dtype=torch.int32), "draft_slots"),
                                     (3, torch.zeros(8, CHANNELS, WIDTH - 1).bfloat16(), "state"),
                                     (5, torch.zeros(CHANNELS, 5).bfloat16(), "conv_weight")):
            given, _ = self.layer()
            given[place] = changed
            with self.assertRaises(ArgumentError) as caught:
                drafts.layer_drafts(*given)
            self.assertRegex(str(caught.exception), f"^{name}:")
        # What only the recurrence takes is refused before the convolution writes its states.
        z = self.layer()[1]
        of_slots = uniform(-1, 1, 8, HV, K + 16, V)
        for name, wrong, text in (
                ("pool", of_slots, f"pool: shape {[8, HV, K + 16, V]}; it must be [slots, {HV}, {K}, {V}], of at least one slot"),
                ("pool", of_slots[:0, :, :K], f"pool: shape {[0, HV, K, V]}; it must be"),
                ("pool", of_slots[:, :, :K].transpose(2, 3).contiguous().transpose(2, 3), "pool: an innermost stride of"),
                ("pool", of_slots[:, :, :K].double(), "pool: "),
                ("z", z[:-1], f"z: shape {[4, HV, V]}; it must be [5, blocks, heads of a block * {V}], of {HV} heads"),
                ("z", z.flatten(1), f"z: shape {[5, HV * V]}; it must be"),
                ("z", z.float(), "z: "),
                ("norm_weight", torch.ones(V + 1), f"norm_weight: shape {[V + 1]}; it must be {[V]}")):
            given, _ = self.layer()
            before = given[3].clone()
            named = {} if name == "pool" else {name: wrong}
            given[4] = wrong if name == "pool" else given[4]
            with self.assertRaises(ArgumentError) as caught:
                drafts.layer_drafts(*given, **named, null_slot=0)
            self.assertEqual(str(caught.exception)[:len(text)], text)
            self.assertTrue(torch.equal(given[3], before), name)
        # Arguments of the norm have the names that the op gives them.
        for name, wrong in (("eps", -1.0), ("eps", float("inf")), ("eps", 1e-46), ("gate", "relu")):
            given, _ = self.layer()
            with self.assertRaises(ArgumentError) as caught:
                drafts.layer_drafts(*given, **{name: wrong})
            self.assertRegex(str(caught.exception), f"^{name}: ")

    def test_ops_are_what_torch_wants(self):
        x, pool = inputs(BATCH, TOKENS), uniform(-1, 1, 8, HV, K, V)
        table = torch.tensor([[1, 5, 0], [3, 2, 7]], dtype=torch.int32)
        q, k, v, g, beta = x.values()
        rest = (pool, table, None, None, None, g, beta, None, None, None, None, False, None, None, False, "grouped",
                "key_major", 0)
        tests = ("test_schema", "test_faketensor")
        opcheck(torch.ops.deltawave.decode_drafts.default, (q, k, v, *rest), test_utils=tests)
        opcheck(torch.ops.deltawave.decode_drafts_out.default, (torch.empty_like(v), q, k, v, *rest), test_utils=tests)
        given, z = self.layer()
        opcheck(torch.ops.deltawave.layer_drafts.default, tuple(given), test_utils=tests)
        opcheck(torch.ops.deltawave.layer_drafts_out.default, (torch.zeros_like(z), *given), test_utils=tests)

    def test_what_is_refused(self):
        x, pool = inputs(BATCH, TOKENS), uniform(-1, 1, 8, HV, K, V)
        for changed in (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32),
                        torch.tensor([[1, 2, 3], [4, 5, 6]])):
            with self.assertRaises(ArgumentError) as caught:
                drafts.decode_drafts(**x, pool=pool, draft_slots=changed)
            self.assertRegex(str(caught.exception), "^(draft_slots|q)")
