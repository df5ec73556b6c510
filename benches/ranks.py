#!/usr/bin/env python3
"""Measures a prefill that the GPUs of one host share, beside one GPU:

    torchrun --nproc-per-node 2 benches/ranks.py [--tokens 131072,524288] [--heads 16,32] [--gates normal,mixed,zero]

Rank 0 prints a line of JSON per case: milliseconds of one GPU (`alone`: a plan whose kernels and segments the planner chose),
of all ranks (`shared`), of their all-gather alone (`gather`), the speed-up, and whether the ranks' outputs and final state
have the bits of one GPU with the same blocks (`bits_equal_one_rank`). Each time is the median of `--runs` runs, of the
slowest rank. Needs torch with NCCL or RCCL; the library is built with `make` or named by DELTAWAVE_C_LIBRARY."""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import deltawave as dw  # noqa: E402
from deltawave import ops  # noqa: E402

D = 128


def inputs(tokens, heads, gates, device):
    """Rows of a whole sequence, equal on all ranks."""
    made = torch.Generator(device).manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=made, device=device)

    q, k = (torch.nn.functional.normalize(normal(tokens, heads[0], D), dim=-1).bfloat16() for _ in "qk")
    v, g = normal(tokens, heads[1], D).bfloat16(), torch.nn.functional.logsigmoid(normal(tokens, heads[1]))
    beta = torch.sigmoid(normal(tokens, heads[1]))
    if gates == "mixed":
        g = g / 16
        g[:, ::4] = 0
    elif gates == "zero":
        g.zero_()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


class Part:
    """A rank's part, with its memory."""

    def __init__(self, rows, tokens, heads, layout, rank, device):
        context = ops.context_of(device)
        spec = dw.PrefillSpec(*heads, D, D)
        # One block or many: the rows of a contiguous layout of one sequence are one run.
        probe = dw.ParallelPrefill(context, spec, layout, rank, tokens)
        begin = probe.fragments[0][1] if probe.fragments else 0
        count = sum(n for _, _, n in probe.fragments)
        self.plan = dw.ParallelPrefill(context, spec, layout, rank, count)
        self.rows = slice(begin, begin + count)
        self.tensors = {name: x[self.rows].contiguous() for name, x in rows.items()}
        self.tensors["o"] = torch.empty(count, heads[1], D, dtype=torch.bfloat16, device=device)
        self.final = torch.zeros(len(probe.fragments), heads[1], D, D, device=device)
        if probe.fragments:
            self.tensors["final_state"] = self.final
        self.workspace, self.summary, self.gathered = (
            torch.zeros(max(n, 1), dtype=torch.uint8, device=device)
            for n in (self.plan.workspace_bytes, self.plan.summary_bytes, self.plan.gathered_bytes))

    def gather(self):
        if self.plan.summary_bytes:
            if dist.get_world_size() > 1 and self.gathered.numel() > self.summary.numel():
                dist.all_gather_into_tensor(self.gathered, self.summary)
            else:
                self.gathered.copy_(self.summary)

    def run(self):
        self.plan.summarise(self.summary, self.workspace, **self.tensors)
        self.gather()
        self.plan.finish(self.gathered, self.workspace, **self.tensors)


def milliseconds(f, runs, device):
    """Median over runs of the slowest rank's time."""
    times = []
    for i in range(runs + 3):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        f()
        end.record()
        end.synchronize()
        time = torch.tensor([begin.elapsed_time(end)], device=device)
        dist.all_reduce(time, dist.ReduceOp.MAX)
        if i >= 3:
            times.append(time.item())
    return statistics.median(times)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", default="131072,524288")
    arguments.add_argument("--heads", default="16,32")
    arguments.add_argument("--gates", default="normal,mixed,zero")
    arguments.add_argument("--block", type=int, help="tokens of a block; without it by lengths and heads")
    arguments.add_argument("--runs", type=int, default=20)
    given = arguments.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    heads = tuple(map(int, given.heads.split(",")))
    for tokens in map(int, given.tokens.split(",")):
        for gates in given.gates.split(","):
            rows = inputs(tokens, heads, gates, device)
            one = dw.RankLayout([tokens], 1, block=given.block)
            alone = Part(rows, tokens, heads, one, 0, device)
            shared = Part(rows, tokens, heads, dw.RankLayout([tokens], ranks, block=given.block), rank, device)
            # Everything runs on every rank, so that no rank waits for another.
            alone.gathered = alone.summary
            alone.plan.summarise(alone.summary, alone.workspace, **alone.tensors)
            alone.plan.finish(alone.gathered, alone.workspace, **alone.tensors)
            shared.run()
            equal = torch.equal(shared.tensors["o"], alone.tensors["o"][shared.rows])
            if shared.rows.stop == tokens:
                equal = equal and torch.equal(shared.final[-1:], alone.final[-1:])
            all_equal = torch.tensor([int(equal)], device=device)
            dist.all_reduce(all_equal, dist.ReduceOp.MIN)
            whole = dw.Prefill.packed(ops.context_of(device), dw.PrefillSpec(*heads, D, D), [0, tokens], tokens)
            o, final = torch.empty_like(rows["v"]), torch.empty_like(alone.final[:1])
            bound = whole.bind(**rows, o=o, final_state=final)
            stream = torch.cuda.current_stream()
            times = {"alone": milliseconds(lambda: bound(stream.cuda_stream), given.runs, device),
                     "shared": milliseconds(shared.run, given.runs, device),
                     "gather": milliseconds(shared.gather, given.runs, device)}
            if rank == 0:
                print(json.dumps({"tokens": tokens, "heads": heads, "gates": gates, "ranks": ranks, **times,
                                  "speed_up": times["alone"] / times["shared"],
                                  "summary_bytes": shared.plan.summary_bytes,
                                  "bits_equal_one_rank": bool(all_equal.item())}), flush=True)
            del alone, shared, whole, bound
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
