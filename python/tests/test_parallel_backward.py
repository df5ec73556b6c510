"""The backward of ops.prefill_parallel and ops.conv_parallel in processes of torch.distributed with gloo, and the stages of
the former in one process."""

import unittest

import deltawave as dw

from . import test_parallel
from .common import Numbers, needs_numpy, np, poisoned, simulator
from .test_parallel import BLOCK, CHANNELS, HK, HV, LENGTHS, WIDTH, V, K, torch

if torch is not None:
    import torch.distributed as dist

    from deltawave import ops

    from .differentiable import gates as gates_of
    from .differentiable import gated_delta_rule, unit

STARTS = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
WEIGHTS = ("a_log", "dt_bias")
# Fragments of five ranks: one has none, one has a sequence's end and another one's begin, in this order.
FRAGMENTS = [[], [(3, 128, 22), (0, 0, 64), (1, 0, 0)], [(0, 64, 128), (2, 0, 64)], [(0, 320, 10), (3, 0, 128)], [(0, 192, 128)]]


def inputs(gates):
    """Rows of all sequences, states, weights and other arguments of a case, and the gradients that come in."""
    rows, states = test_parallel.inputs()
    made = torch.Generator().manual_seed(5)
    rows["q"], rows["k"] = (unit(rows[n].float()).bfloat16() for n in "qk")
    weights, more = {}, {}
    if gates == "raw":
        del rows["g"], rows["beta"]
        rows["a"], rows["b"] = (torch.randn(sum(LENGTHS), HV, generator=made).bfloat16() for _ in "ab")
        weights = {"a_log": torch.tensor([-3.0, 0.5]), "dt_bias": torch.tensor([-2.0, 0.1])}
        # A layout of states with the last two dimensions exchanged, and a sequence that does not read its state.
        states = states.transpose(2, 3).contiguous()
        more = {"state_layout": "value_major", "qk_l2norm": True}
    elif gates == "zero":
        rows["g"] = torch.zeros_like(rows["g"])
    elif gates == "mixed":
        rows["g"] = rows["g"] * torch.tensor([1e-2, 30.0])
    d_o = torch.randn(sum(LENGTHS), HV, V, generator=made).bfloat16()
    d_final = torch.randn(states.shape, generator=made)
    has = torch.tensor([1, 1, 1, 0 if gates == "raw" else 1], dtype=torch.uint8)
    return rows, states, has, weights, more, d_o, d_final


def process(rank, ranks, kind, folder):
    """A rank: its rows, fragments and gradients go to a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    kind, gates, *chosen = kind.split()
    block = None if chosen else BLOCK
    rows, states, has, weights, more, d_o, d_final = inputs(gates)
    kind = FRAGMENTS if kind == "fragments" else kind
    fragments = ops.rank_fragments(LENGTHS, ranks, rank, HV, kind, block)
    own = [i for n, begin, count in fragments for i in range(STARTS[n] + begin, STARTS[n] + begin + count)]
    sequences = [n for n, _, _ in fragments]
    leaves = {name: x[own].requires_grad_() for name, x in rows.items()}
    leaves.update({name: x.clone().requires_grad_() for name, x in weights.items()})
    # States and gradients that must not be read are NaN.
    initial, d_last = states[sequences], d_final[sequences]
    for i, (n, begin, count) in enumerate(fragments):
        if begin:
            initial[i] = torch.nan
        if begin + count < LENGTHS[n]:
            d_last[i] = torch.nan
    leaves["initial_state"] = initial.requires_grad_()
    results = []
    for _ in range(2):
        o, final = ops.prefill_parallel(**leaves, has_initial_state=has[sequences], **more, lengths=LENGTHS, kind=kind,
                                        block=block)
        results.append(torch.autograd.grad([o, final], list(leaves.values()), [d_o[own], d_last]))
    same = all(torch.equal(x, y) for x, y in zip(*results))
    # A rank that gets no gradient of its own takes part, too; and results without gradients have the same bits.
    unused, _ = ops.prefill_parallel(**leaves, has_initial_state=has[sequences], **more, lengths=LENGTHS, kind=kind, block=block)
    part = torch.autograd.grad((unused * (rank == 0)).sum(), leaves["v"])[0]
    with torch.no_grad():
        plain = ops.prefill_parallel(**leaves, has_initial_state=has[sequences], **more, lengths=LENGTHS, kind=kind, block=block)
    same = same and torch.equal(plain[0], o) and torch.equal(plain[1], final) and bool(part.isfinite().all())
    torch.save((own, fragments, same, {n: d.clone() for n, d in zip(leaves, results[0])}), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Gradients(test_parallel.InProcesses):
    def ranks(self, ranks, kind, gates):
        """Gradients by name: of all rows and all sequences, summed over ranks for weights."""
        rows, states, _, weights, *_ = inputs(gates)
        whole = {name: torch.full_like(x, torch.nan) for name, x in {**rows, "initial_state": states}.items()}
        whole.update({name: torch.zeros_like(x) for name, x in weights.items()})
        for own, fragments, same, found in self.files("process", ranks, f"{kind} {gates}", "test_parallel_backward"):
            self.assertTrue(same)
            for name in rows:
                whole[name][own] = found[name]
            for name in weights:
                whole[name] += found[name]
            for i, (n, begin, _) in enumerate(fragments):
                if begin:
                    self.assertTrue((found["initial_state"][i] == 0).all())
                else:
                    whole["initial_state"][n] = found["initial_state"][i]
        return whole

    def exact(self, gates):
        """Gradients in double precision by a recurrence over tokens, and those of one process without ranks."""
        rows, states, has, weights, more, d_o, d_final = inputs(gates)
        named = {**rows, **weights, "initial_state": states}
        alone = {name: x.clone().requires_grad_() for name, x in named.items()}
        o, final = ops.prefill(**alone, has_initial_state=has, cu_seqlens=torch.tensor(STARTS), **more)
        one = dict(zip(alone, torch.autograd.grad([o, final], list(alone.values()), [d_o, d_final])))
        x = {name: t.double().requires_grad_() for name, t in named.items()}
        g, beta = (x.get("g"), x.get("beta")) if gates != "raw" else gates_of(x["a"], x["b"], x["a_log"], x["dt_bias"])
        q, k = (unit(x[n]) if gates == "raw" else x[n] for n in "qk")
        o, final = gated_delta_rule(*(t[None] for t in (q, k, x["v"], g, beta)), x["initial_state"] * has[:, None, None, None],
                                    STARTS, state_v_first=gates == "raw")
        return one, dict(zip(x, torch.autograd.grad([o[0], final], list(x.values()), [d_o.double(), d_final.double()])))

    def check(self, gates, cases):
        one, exact = self.exact(gates)
        alone = self.ranks(1, "contiguous", gates)
        for name, wanted in exact.items():
            error, plain = (float((x[name].double() - wanted).norm() / wanted.norm()) for x in (alone, one))
            # A gradient of two weights has few elements, and its error scatters.
            self.assertLess(error, max(1.25 * plain, 6e-3 if name in WEIGHTS else 3e-3), f"{gates}, {name}: {plain} in one process")
        for ranks, kind in cases:
            found = self.ranks(ranks, kind, gates)
            for name, wanted in alone.items():
                if name in WEIGHTS:  # sums over the tokens of a rank, then over ranks
                    self.assertLess(float((found[name] - wanted).norm() / wanted.norm()), 1e-5, name)
                else:
                    self.assertTrue(torch.equal(found[name], wanted), f"{name}, {gates}, {ranks} ranks, {kind}")

    def test_given_gates(self):
        self.check("normal", ((2, "contiguous"), (4, "zigzag"), (5, "fragments")))

    def test_raw_gates_and_states_by_value(self):
        self.check("raw", ((2, "zigzag"), (3, "packed")))

    def test_gates_that_forget_and_gates_that_do_not(self):
        self.check("mixed", ((3, "contiguous"),))
        self.check("zero", ((2, "contiguous"), (5, "fragments")))

    def test_a_block_that_the_library_chooses(self):
        """Without a block the lengths and the value heads choose one, in the backward as in the forward."""
        alone = self.ranks(1, "contiguous", "normal chosen")
        exact = self.exact("normal")[1]
        for name, wanted in exact.items():
            self.assertLess(float((alone[name].double() - wanted).norm() / wanted.norm()), 5e-3, name)
        for ranks, kind in ((2, "contiguous"), (4, "zigzag")):
            found = self.ranks(ranks, kind, "normal chosen")
            for name, wanted in alone.items():
                self.assertTrue(torch.equal(found[name], wanted), f"{name}, {ranks} ranks, {kind}")
        # It is not the block of the other tests, whose bits differ.
        self.assertFalse(torch.equal(alone["k"], self.ranks(1, "contiguous", "normal")["k"]))


# The last fragments of sequences have one row and two, fewer than a convolution looks back.
CONV_LENGTHS = [321, 0, 64, 130, 2]
CONV_STARTS = [sum(CONV_LENGTHS[:n]) for n in range(len(CONV_LENGTHS) + 1)]
CONV_FRAGMENTS = [[(0, 320, 1), (4, 0, 2)], [(3, 128, 2), (1, 0, 0)], [], [(3, 0, 128), (0, 64, 256)], [(0, 0, 64), (2, 0, 64)]]


def conv_inputs(layout):
    """x with columns of others, weight, bias, states; then gradients of q, k, v and of the last states."""
    made, total = torch.Generator().manual_seed(7), sum(CONV_LENGTHS)
    columns = CHANNELS + (HV * V if layout == "interleaved" else 5)
    shapes = ((total, columns), (CHANNELS, WIDTH), (CHANNELS,), (len(CONV_LENGTHS), CHANNELS, WIDTH - 1),
              (total, HK, K), (total, HK, K), (total, HV, V), (len(CONV_LENGTHS), CHANNELS, WIDTH - 1))
    return [torch.randn(*shape, generator=made).bfloat16() for shape in shapes]


def conv_options(layout):
    """Arguments beside tensors: of rows with l2 norms, and states with tokens first."""
    return {"x_layout": layout, "qk_l2norm": layout == "interleaved",
            "state_layout": "token_major" if layout == "interleaved" else "channel_major"}


def conv_process(rank, ranks, kind, folder):
    """A rank's convolution: its gradients go to a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    kind, layout = kind.split()
    kind = CONV_FRAGMENTS if kind == "fragments" else kind
    fragments = ops.rank_fragments(CONV_LENGTHS, ranks, rank, HV, kind, BLOCK)
    own = [i for n, begin, count in fragments for i in range(CONV_STARTS[n] + begin, CONV_STARTS[n] + begin + count)]
    x, weight, bias, states, *upstream, d_states = conv_inputs(layout)
    options = conv_options(layout)
    initial, d_last = (t[[n for n, _, _ in fragments]] for t in (states, d_states))
    for i, (n, begin, count) in enumerate(fragments):
        if begin:
            initial[i] = torch.nan
        if begin + count < CONV_LENGTHS[n]:
            d_last[i] = torch.nan
    if options["state_layout"] == "token_major":
        initial, d_last = (t.transpose(1, 2).contiguous() for t in (initial, d_last))
    leaves = [t.requires_grad_() for t in (x[own], weight, bias, initial)]
    shared = {"lengths": CONV_LENGTHS, "kind": kind, "block": BLOCK}
    results = ops.conv_parallel(*leaves[:3], HK, HV, K, V, leaves[3], **options, **shared)
    found = torch.autograd.grad(results, leaves, [*(t[own] for t in upstream), d_last])
    with torch.no_grad():
        plain = ops.conv_parallel(*leaves[:3], HK, HV, K, V, leaves[3], **options, **shared)
    same = all(torch.equal(a, b) for a, b in zip(plain, results))
    # A rank that gets no gradient of its own takes part, too.
    v = ops.conv_parallel(*leaves[:3], HK, HV, K, V, leaves[3], **options, **shared)[2]
    part = torch.autograd.grad((v * (rank == 0)).sum(), leaves[0])[0]
    # x of three dimensions is refused before anything is sent.
    words = ""
    try:
        ops.conv_parallel(leaves[0][:, None], weight, bias, HK, HV, K, V, **options, **shared)
    except dw.ArgumentError as error:
        words = str(error)
    torch.save((own, fragments, same and bool(part.isfinite().all()), words, [t.clone() for t in found]), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Convolutions(test_parallel.InProcesses):
    def check(self, layout, cases):
        x, weight, bias, states, *upstream, d_states = conv_inputs(layout)
        options = conv_options(layout)
        if options["state_layout"] == "token_major":
            states, d_states = (t.transpose(1, 2).contiguous() for t in (states, d_states))
        wanted = ops.conv_backward(*upstream, d_states, x, weight, bias, states, None, HK, HV, K, V,
                                   torch.tensor(CONV_STARTS), "silu", layout, options["state_layout"], options["qk_l2norm"],
                                   [True] * 4)
        self.assertTrue(all(t.float().norm() > 1 for t in wanted))
        for ranks, kind in cases:
            case = f"{layout}, {ranks} ranks, {kind}"
            rows, sums = 0, [torch.zeros_like(t) for t in wanted[1:3]]
            for own, fragments, same, words, found in self.files("conv_process", ranks, f"{kind} {layout}",
                                                                 "test_parallel_backward"):
                self.assertTrue(same, case)
                self.assertIn("it must have 2 dimensions", words)
                rows += len(own)
                self.assertTrue(torch.equal(found[0], wanted[0][own]), case)
                for sum_, of_rank in zip(sums, found[1:3]):
                    sum_ += of_rank.float()
                for i, (n, begin, _) in enumerate(fragments):
                    of_state = torch.zeros_like(found[3][i]) if begin else wanted[3][n]
                    self.assertTrue(torch.equal(found[3][i], of_state), f"{case}, fragment {i}")
            self.assertEqual(rows, len(x))
            for sum_, of_one in zip(sums, wanted[1:3]):
                # bf16, as weights are, on each rank.
                self.assertLess(float((sum_ - of_one).norm() / of_one.norm()), 4e-3, case)

    def test_flat_rows(self):
        self.check("flat", ((1, "contiguous"), (2, "contiguous"), (4, "zigzag"), (5, "fragments")))

    def test_interleaved_rows_with_norms(self):
        self.check("interleaved", ((3, "contiguous"), (5, "fragments")))


@needs_numpy
class Stages(unittest.TestCase):
    def ranks(self, ranks, kind, block=BLOCK):
        """Gradients of all sequences by name, computed by ranks in this process, and the block."""
        context, numbers, total = simulator(), Numbers(3), sum(LENGTHS)
        starts = np.cumsum([0, *LENGTHS])
        shapes = {"q": (HK, K), "k": (HK, K), "v": (HV, V), "d_o": (HV, V)}
        whole = {name: numbers.uniform(-.5, .5, (total, *shape), "bf16")[1] for name, shape in shapes.items()}
        whole["g"] = numbers.uniform(-.1, 0, (total, HV), "f32")[1]
        whole["beta"] = numbers.uniform(0, 1, (total, HV), "f32")[1]
        d_states = numbers.uniform(-1, 1, (len(LENGTHS), HV, K, V), "f32")[1]
        layout, each = dw.RankLayout(LENGTHS, ranks, kind, block), []
        for rank in range(ranks):
            plan = dw.ParallelPrefill(context, dw.PrefillSpec(HK, HV, K, V), layout, rank, total)
            backward = dw.ParallelPrefillBackward(plan)
            self.assertEqual((backward.block, backward.fragments), (plan.block, plan.fragments))
            rows = [i for n, begin, count in plan.fragments for i in range(starts[n] + begin, starts[n] + begin + count)]
            padded = rows + [0] * (total - len(rows))
            tensors = {name: context.array(x[padded], "f32" if name in ("g", "beta") else "bf16") for name, x in whole.items()}
            tensors.update({f"d_{name}": poisoned((total, *shapes[name]), "bf16") for name in "qkv"})
            tensors.update({f"d_{name}": poisoned((total, HV), "f32") for name in ("g", "beta")})
            if plan.fragments:
                tensors["d_final_state"] = context.array(d_states[[n for n, _, _ in plan.fragments]], "f32")
            summary, workspace = (dw.Memory(context, max(n, 1)) for n in (backward.summary_bytes, backward.workspace_bytes))
            backward.summarise(summary.address, workspace.address, **tensors)
            each.append((backward, rows, tensors, summary, workspace))
        context.synchronize()
        size = each[0][0].summary_bytes
        self.assertEqual({x[0].summary_bytes for x in each}, {size})
        gathered = context.array(np.concatenate([test_parallel._bytes(x[3], size) for x in each]).view(np.float32), "f32")
        found = {f"d_{name}": np.full((total, *(shapes.get(name) or (HV,))), np.nan) for name in ("q", "k", "v", "g", "beta")}
        for backward, rows, tensors, _, workspace in each:
            backward.finish(gathered, workspace.address, **tensors)
            context.synchronize()
            for name, to in found.items():
                own = dw.to_float(tensors[name])
                to[rows] = own[:len(rows)]
                self.assertTrue((own[len(rows):] == 0).all(), "rows of no fragment")
        return found, each[0][0].block

    def test_ranks_have_one_ranks_bits(self):
        alone, block = self.ranks(1, "contiguous")
        self.assertEqual(block, BLOCK)
        self.assertTrue(all(np.isfinite(x).all() and np.abs(x).max() > .01 for x in alone.values()))
        for ranks, kind in ((2, "contiguous"), (4, "zigzag"), (5, FRAGMENTS)):
            shared, _ = self.ranks(ranks, kind)
            for name, x in alone.items():
                self.assertTrue(np.array_equal(x, shared[name]), (name, ranks, kind))
        # The block that the library chooses is said, and gives other bits.
        other, block = self.ranks(2, "contiguous", None)
        self.assertEqual(block, 256)
        self.assertFalse(np.array_equal(alone["d_k"], other["d_k"]))

    def test_wrong_arguments(self):
        context, spec = simulator(), dw.PrefillSpec(HK, HV, K, V)
        with self.assertRaisesRegex(dw.ArgumentError, "prefill: .*ParallelPrefill"):
            dw.ParallelPrefillBackward(dw.Prefill.packed(context, spec, [0, 5], 5))
        plan = dw.ParallelPrefillBackward(dw.ParallelPrefill(context, spec, dw.RankLayout([130], 2, block=64), 0, 128))
        with self.assertRaisesRegex(dw.ArgumentError, "two stages"):
            plan.launch()
        with self.assertRaisesRegex(dw.ArgumentError, "o: no argument"):
            plan.summarise(0, 0, o=None)
        with self.assertRaisesRegex(dw.ArgumentError, "q: a null pointer"):
            plan.finish(0, 0)


if __name__ == "__main__":
    unittest.main()
