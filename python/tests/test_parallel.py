"""Prefill over ranks: stages in one process, and ops.prefill_parallel in processes of torch.distributed with gloo."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import deltawave as dw

from .common import Numbers, needs_numpy, np, poisoned, simulator

try:
    import torch
    import torch.distributed as dist

    from deltawave import ops
except ImportError as problem:
    if problem.name != "torch" and "custom_op" not in str(problem):
        raise
    torch = None

HK, HV, K, V = 1, 2, 16, 32
LENGTHS, BLOCK = [330, 0, 64, 150], 64


@needs_numpy
class Stages(unittest.TestCase):
    def ranks(self, ranks, kind):
        """Output and final states of all sequences, computed by ranks in this process."""
        context, numbers = simulator(), Numbers(3)
        total, starts = sum(LENGTHS), np.cumsum([0, *LENGTHS])
        shapes = {"q": (HK, K), "k": (HK, K), "v": (HV, V)}
        whole = {name: numbers.uniform(-.5, .5, (total, *shape), "bf16")[1] for name, shape in shapes.items()}
        whole["g"] = numbers.uniform(-.1, 0, (total, HV), "f32")[1]
        whole["beta"] = numbers.uniform(0, 1, (total, HV), "f32")[1]
        states = numbers.uniform(-1, 1, (len(LENGTHS), HV, K, V), "f32")[1]
        layout, each = dw.RankLayout(LENGTHS, ranks, kind, BLOCK), []
        spec = dw.PrefillSpec(HK, HV, K, V)
        tokens = [sum(n for _, _, n in dw.ParallelPrefill(context, spec, layout, rank, total).fragments)
                  for rank in range(ranks)]
        for rank in range(ranks):
            plan = dw.ParallelPrefill(context, spec, layout, rank, tokens[rank])
            rows = [i for n, begin, count in plan.fragments for i in range(starts[n] + begin, starts[n] + begin + count)]
            tensors = {name: context.array(x[rows], "f32" if name in ("g", "beta") else "bf16")
                       for name, x in whole.items()}
            tensors["o"] = poisoned((len(rows), HV, V), "bf16")
            if plan.fragments:
                tensors["initial_state"] = context.array(states[[n for n, _, _ in plan.fragments]], "f32")
                tensors["final_state"] = poisoned((len(plan.fragments), HV, K, V), "f32")
            summary = dw.Memory(context, max(plan.summary_bytes, 1))
            workspace = dw.Memory(context, max(plan.workspace_bytes, 1))
            plan.summarise(summary.address, workspace.address, **tensors)
            each.append((plan, rows, tensors, summary, workspace))
        context.synchronize()
        size = each[0][0].summary_bytes
        self.assertEqual({x[0].summary_bytes for x in each}, {size})
        gathered = context.array(np.concatenate([_bytes(x[3], size) for x in each]).view(np.float32), "f32")
        o, final = np.full((total, HV, V), np.nan), np.full(states.shape, np.nan)
        for plan, rows, tensors, _, workspace in each:
            plan.finish(gathered, workspace.address, **tensors)
            context.synchronize()
            o[rows] = dw.to_float(tensors["o"])
            for i, (n, begin, count) in enumerate(plan.fragments):
                if begin + count == LENGTHS[n]:
                    final[n] = dw.to_float(tensors["final_state"])[i]
        return o, final

    def test_ranks_have_one_ranks_bits(self):
        alone = self.ranks(1, "contiguous")
        self.assertTrue(np.isfinite(alone[0]).all() and np.isfinite(alone[1]).all())
        other = [[], [(3, 128, 22), (0, 0, 64), (1, 0, 0)], [(0, 64, 266), (2, 0, 64), (3, 0, 128)]]
        for ranks, kind in ((2, "contiguous"), (3, "zigzag"), (4, "packed"), (8, "contiguous"), (3, other)):
            shared = self.ranks(ranks, kind)
            self.assertTrue(np.array_equal(alone[0], shared[0]) and np.array_equal(alone[1], shared[1]), (ranks, kind))

    def test_wrong_arguments(self):
        spec = dw.PrefillSpec(HK, HV, K, V)
        for layout, words in ((lambda: dw.RankLayout([5], 2, "round"), "kind"),
                              (lambda: dw.RankLayout([5], 2, [[(0, 0, 5)]]), "of 1 ranks"),
                              (lambda: dw.RankLayout([5], 2, block=0), "block"),
                              (lambda: dw.RankLayout([-5], 2), "lengths"),
                              (lambda: dw.RankLayout([5], 2, block=65), "block"),
                              (lambda: dw.RankLayout([5], 1, [[(0, 0, 4)]], 64), "fragments")):
            with self.assertRaisesRegex(dw.ArgumentError, words):
                dw.ParallelPrefill(simulator(), spec, layout(), 0, 10)
        with self.assertRaisesRegex(dw.ArgumentError, "rank"):
            dw.ParallelPrefill(simulator(), spec, dw.RankLayout([5], 2), 2, 10)


def _bytes(memory, size):
    """A copy of the simulator's memory."""
    import ctypes
    return np.frombuffer(ctypes.string_at(memory.address, size), np.uint8)


def inputs():
    """Rows of all sequences, and their initial states."""
    made, total = torch.Generator().manual_seed(1), sum(LENGTHS)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=made)

    rows = {"q": uniform(-.5, .5, total, HK, K), "k": uniform(-.5, .5, total, HK, K), "v": uniform(-1, 1, total, HV, V)}
    rows = {name: x.bfloat16() for name, x in rows.items()}
    rows.update(g=uniform(-.1, 0, total, HV), beta=uniform(0, 1, total, HV))
    return rows, uniform(-1, 1, len(LENGTHS), HV, K, V)


WIDTH, CHANNELS = 4, 2 * HK * K + HV * V


def conv_inputs():
    """Rows of all sequences, weights, and their conv states."""
    made = torch.Generator().manual_seed(2)
    shapes = ((sum(LENGTHS), CHANNELS), (CHANNELS, WIDTH), (len(LENGTHS), CHANNELS, WIDTH - 1))
    return [torch.randn(*shape, generator=made).bfloat16() for shape in shapes]


def refusals(rank, ranks, kind, folder):
    """Ranks that differ: each learns what differs before anything is sent, and the group stays usable."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows, _ = inputs()
    last = rank == ranks - 1

    def run(tokens, given, **more):
        ops.prefill_parallel(**{name: x[:tokens] for name, x in given.items()}, block=BLOCK, **more)

    def of(kind, lengths):
        return sum(n for _, _, n in ops.rank_fragments(lengths, ranks, rank, HV, kind, BLOCK))

    own = kind if last else "contiguous"
    cases = [(lambda: run(of(own, LENGTHS), rows, lengths=LENGTHS, kind=own), "fragments of the ranks: hash"),
             (lambda: run(of("contiguous", [544 if last else 500]), rows, lengths=[544 if last else 500]),
              "tokens of all sequences: [0-9]+ on rank"),
             (lambda: run(of("contiguous", LENGTHS), {**rows, "v": rows["v"][..., :16 if last else None]}, lengths=LENGTHS),
              "value dimension: [0-9]+ on rank"),
             (lambda: run(of("contiguous", LENGTHS), rows, lengths=LENGTHS, scale=.5 if last else .25), "scale or norm")]
    other = rf"on rank {0 if last else ranks - 1}, .* on rank {rank};"
    problems = []
    for call, words in cases:
        try:
            call()
            problems.append(f"{words}: not refused")
        except dw.RanksError as error:
            import re
            if not re.search(words, str(error)) or not re.search(other, str(error)):
                problems.append(f"{words}: {error}")
    # A rank that has too few rows refuses them; the others do not wait for it.
    try:
        run(of("contiguous", LENGTHS) - last, rows, lengths=LENGTHS)
        problems.append("too few rows: not refused")
    except dw.RanksError as error:
        if last or f"rank {ranks - 1} refused its part: " not in str(error):
            problems.append(str(error))
    except dw.ArgumentError as error:
        if not last:
            problems.append(str(error))
    # Equal layouts are compared once, or always, or never.
    for agree in ("first", "first", "always", "never"):
        run(of("contiguous", LENGTHS), rows, lengths=LENGTHS, agree=agree)
    # A tensor that one rank refuses: the others wait, and it makes the call again.
    n = of("contiguous", LENGTHS)
    if last:
        try:
            run(n, {**rows, "beta": rows["beta"][:, :1]}, lengths=LENGTHS)
            problems.append("a wrong tensor: not refused")
        except dw.ArgumentError as error:
            if not str(error).startswith("beta: "):
                problems.append(str(error))
    run(n, rows, lengths=LENGTHS)
    # There are no gradients of gradients, and the error says so.
    n = of("contiguous", LENGTHS)
    given = {name: x[:n] for name, x in rows.items()}
    given["q"] = given["q"].detach().requires_grad_()
    o, _ = ops.prefill_parallel(**given, lengths=LENGTHS, block=BLOCK)
    d_q, = torch.autograd.grad(o.float().square().sum(), given["q"], create_graph=True)
    try:
        d_q.sum().backward()
        problems.append("a second backward: not refused")
    except NotImplementedError as error:
        if not str(error).startswith("prefill_parallel: no gradients of gradients"):
            problems.append(str(error))
    torch.save(problems, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def conv_process(rank, ranks, kind, folder):
    """A rank's convolution: its fragments, outputs and states go to a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    x, weight, states = conv_inputs()
    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
    fragments = ops.rank_fragments(LENGTHS, ranks, rank, HV, kind, BLOCK)
    own = [i for n, begin, count in fragments for i in range(starts[n] + begin, starts[n] + begin + count)]
    given = states[[n for n, _, _ in fragments]]
    for i, (_, begin, _) in enumerate(fragments):
        if begin:
            given[i] = torch.nan
    found = ops.conv_parallel(x[own], weight, None, HK, HV, K, V, given, lengths=LENGTHS, kind=kind, block=BLOCK)
    torch.save((own, fragments, *(t.clone() for t in found)), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def process(rank, ranks, kind, folder):
    """A rank: its fragments, outputs and states go to a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows, states = inputs()
    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
    fragments = ops.rank_fragments(LENGTHS, ranks, rank, HV, kind, BLOCK)
    own = [i for n, begin, count in fragments for i in range(starts[n] + begin, starts[n] + begin + count)]
    initial = states[[n for n, _, _ in fragments]] if fragments else None
    o, final = ops.prefill_parallel(**{name: x[own] for name, x in rows.items()}, initial_state=initial, lengths=LENGTHS,
                                    kind=kind, block=BLOCK)
    torch.save((own, fragments, o.clone(), final.clone()), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class InProcesses(unittest.TestCase):
    def files(self, function, ranks, kind, module="test_parallel"):
        """What the ranks' processes write."""
        with tempfile.TemporaryDirectory() as folder:
            code = f"from tests.{module} import {function} as run; import sys; run(int(sys.argv[1]), {ranks}, '{kind}', " \
                   f"{folder!r})"
            root = Path(__file__).resolve().parent.parent
            path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
            started = [subprocess.Popen([sys.executable, "-c", code, str(rank)], cwd=root,
                                        env={**os.environ, "PYTHONPATH": path})
                       for rank in range(ranks)]
            try:
                self.assertEqual([p.wait(timeout=300) for p in started], [0] * ranks)
            finally:
                for p in started:
                    p.kill()
            return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


@unittest.skipIf(torch is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class Processes(InProcesses):
    def ranks(self, ranks, kind):
        o, final = torch.full((sum(LENGTHS), HV, V), torch.nan), torch.full((len(LENGTHS), HV, K, V), torch.nan)
        for own, fragments, o_rank, final_rank in self.files("process", ranks, kind):
            o[own] = o_rank.float()
            for i, (n, begin, count) in enumerate(fragments):
                if begin + count == LENGTHS[n]:
                    final[n] = final_rank[i]
                else:
                    self.assertTrue((final_rank[i] == 0).all())
        return o, final

    def test_processes_have_one_ranks_bits(self):
        alone = self.ranks(1, "contiguous")
        rows, states = inputs()
        offsets = torch.tensor([sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)])
        o, final = ops.prefill(**rows, initial_state=states, cu_seqlens=offsets)
        for found, wanted in zip(alone, (o, final)):
            error = (found - wanted.float()).norm() / wanted.float().norm()
            self.assertLess(float(error), 8e-3)
        for ranks, kind in ((2, "contiguous"), (3, "packed"), (4, "zigzag")):
            for found, wanted in zip(self.ranks(ranks, kind), alone):
                self.assertTrue(torch.equal(found, wanted), (ranks, kind))

    def test_ranks_that_differ(self):
        for ranks, kind in ((2, "zigzag"), (3, "packed")):
            for rank, problems in enumerate(self.files("refusals", ranks, kind)):
                self.assertEqual(problems, [], f"rank {rank} of {ranks}")

    def test_convolutions_have_one_ranks_bits(self):
        x, weight, states = conv_inputs()
        offsets = torch.tensor([sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)])
        q, k, v = ops.conv(x, weight, None, states, HK, HV, K, V, offsets)
        for ranks, kind in ((1, "contiguous"), (2, "contiguous"), (3, "zigzag"), (5, "packed")):
            rows = 0
            for own, fragments, *found, after in self.files("conv_process", ranks, kind):
                rows += len(own)
                for one, wanted in zip(found, (q, k, v)):
                    self.assertTrue(torch.equal(one, wanted[own]), (ranks, kind))
                for i, (n, begin, count) in enumerate(fragments):
                    if begin + count == LENGTHS[n]:
                        self.assertTrue(torch.equal(after[i], states[n]), (ranks, kind, n))
            self.assertEqual(rows, sum(LENGTHS))


if __name__ == "__main__":
    unittest.main()
