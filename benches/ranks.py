#!/usr/bin/env python3
"""Measures a prefill of one sequence that several GPUs of a host share, beside one GPU, and beside FLA's context parallelism
where FLA is installed:

    python3 benches/ranks.py --ranks 2                              starts a process for each of two GPUs
    torchrun --nproc-per-node 2 benches/ranks.py                    the same, started by torchrun
    python3 benches/ranks.py --ranks 2 --check --json rows.jsonl    errors and bits against one GPU; rows as lines of JSON
    python3 benches/ranks.py --ranks 2 --backward --check           forward and backward, of deltawave alone
    python3 benches/ranks.py --ranks 2 --device cpu                 the logic alone, on the simulator with gloo: no times

It needs torch with NCCL or RCCL, and libdeltawave_c.so: of `make`, or named by DELTAWAVE_C_LIBRARY. It fetches nothing. FLA is
found where Python finds it, or in folders and wheels that --fla names: a machine without a network needs fla-core and einops,
which FLA imports, beside torch and Triton:

    python3 benches/ranks.py --ranks 2 --fla carried/fla_core-0.6.0-py3-none-any.whl:carried/einops-0.8.2-py3-none-any.whl
"""

import argparse
import importlib.machinery
import importlib.util
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

COLUMNS = """columns, and keys of the JSON lines:
  who         deltawave, or fla: chunk_gated_delta_rule with cp_context
  alone       ms on one GPU: deltawave's plan for one GPU, whose kernels and segments the planner chose; FLA without cp_context.
              All GPUs measure it, and the fastest counts
  shared      ms of all ranks: both stages and the all-gather between them, in memory that is kept; for FLA its function
  call        ms of ops.prefill_parallel, which also allocates; FLA's function does so, too: its `call` is its `shared`
  gather      ms of the all-gather of the summaries alone
  speed_up    alone / shared
  host        ms that the host takes to enqueue `call`; FLA's function may wait for the GPU in it
  bits        whether outputs and the final state have the bits of one rank with the same blocks (bits_equal_one_rank)
  error       with --check: |shared - alone| / |alone| of outputs over all rows, and of final states (state_error)
with --backward, where FLA is left out, all of them are of a forward and the backward after it:
  alone       both on one GPU, with the plans for one GPU
  shared      both, with an all-gather each
  call        ops.prefill_parallel and its backward by autograd
  gather      both all-gathers alone
  bits        whether the gradients of q, k, v, g and beta have the bits of one rank with the same blocks, too
  error       with --check: the largest of these gradients' errors; `errors` has each
  backward_alone, backward_shared   ms of the backward alone; backward_gather: of its all-gather (keys of the JSON lines)
Times are medians over --runs. A run begins on all GPUs at once, behind an all-reduce and a pause that hides the host's
time; it ends with the slowest rank. Results are exchanged between ranks after the clock has stopped.

exit status: 0; 1 if --check finds other bits, or an error above 8e-3 (of gradients 1.6e-2, of g's 4e-2); 2 for wrong arguments
"""
LIMIT = 8e-3
# Both sides of a comparison of gradients are rounded, and a gradient of g is a difference of sums over tokens.
GRADIENT_LIMITS = {"q": 1.6e-2, "k": 1.6e-2, "v": 1.6e-2, "g": 4e-2, "beta": 1.6e-2}
D = 128


def numbers(text, at_least=1):
    found = [int(x) for x in text.split(",")]
    if any(x < at_least for x in found):
        raise ValueError
    return found


def usable(path):
    return bool(path) and (Path(path).is_dir() or zipfile.is_zipfile(path))


def parsed(given=None):
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=COLUMNS, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, help="start so many processes; without it torchrun starts them")
    add("--tokens", help="lengths of the sequence, with commas; 131072,524288 (on the CPU: 200)")
    add("--heads", help="key and value heads of 128; 16,32 (on the CPU: 1,2)")
    add("--gates", default="normal,mixed,zero",
        help="normal: log-sigmoid of normal numbers; mixed: a sixteenth of these, and every fourth head does not forget; "
             "zero: no head forgets; default: %(default)s")
    add("--kind", default="contiguous", choices=("contiguous", "zigzag"), help="layout of the sequence; default: %(default)s")
    add("--block", type=int, help="tokens of a block, a multiple of 64; default: chosen by tokens and heads")
    add("--runs", type=int, default=20, help="runs of each time; default: %(default)s")
    add("--backward", action="store_true", help="measure a forward and its backward instead")
    add("--check", action="store_true", help="compare with one GPU, and fail if bits differ or errors are large")
    add("--fla", default="auto", metavar="auto|never|PATHS",
        help="auto: measure FLA if Python finds it; PATHS: folders with the package fla and what it needs, or wheels of them, "
             "with colons between them; default: %(default)s")
    add("--json", nargs="?", const="-", metavar="FILE", help="write rows as lines of JSON, to stdout without FILE")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the simulator; default: %(default)s")
    add("--timeout", type=int, default=300, help="seconds after which a collective gives up on a rank; default: %(default)s")
    options = parser.parse_args(given)

    def wrong(name, allowed):
        parser.error(f"--{name}: {getattr(options, name)}; it must be {allowed}")

    on_gpu = options.device == "cuda"
    for name, value in (("tokens", "131072,524288" if on_gpu else "200"), ("heads", "16,32" if on_gpu else "1,2")):
        text = getattr(options, name)
        try:
            setattr(options, name, numbers(value if text is None else text))
        except ValueError:
            wrong(name, "positive whole numbers with commas between them")
    if len(options.heads) != 2 or options.heads[1] % options.heads[0]:
        wrong("heads", "key heads, and value heads, a multiple of them")
    options.gates = options.gates.split(",")
    if not set(options.gates) <= {"normal", "mixed", "zero"}:
        wrong("gates", "some of normal,mixed,zero")
    for name in ("runs", "timeout", "ranks"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            wrong(name, "at least 1")
    if options.block is not None and (options.block < 64 or options.block % 64):
        wrong("block", "a positive multiple of 64")
    if options.fla not in ("auto", "never") and not all(map(usable, options.fla.split(":"))):
        wrong("fla", "auto, never, or folders and wheels that exist, with colons between them")
    if options.json not in (None, "-"):
        folder = Path(options.json).resolve().parent
        if not folder.is_dir() or Path(options.json).is_dir():
            wrong("json", "a file in a folder that exists")
    if "RANK" in os.environ:
        if options.ranks not in (None, int(os.environ["WORLD_SIZE"])):
            wrong("ranks", f"absent where torchrun has started {os.environ['WORLD_SIZE']} processes")
    elif options.ranks is None:
        parser.error("--ranks: absent; it must be the number of processes to start, unless torchrun starts them")
    return options


def start(ranks):
    """Starts this program once for each rank. The first that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [subprocess.Popen([sys.executable, *sys.argv], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
               for rank in range(ranks)]
    try:
        while True:
            codes = [p.poll() for p in started]
            bad = [code for code in codes if code]
            if bad or None not in codes:
                return abs(bad[0]) if bad else 0
            time.sleep(.05)
    finally:
        for p in started:
            if p.poll() is None:
                p.kill()
            p.wait()


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
    rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return rows if device.type == "cuda" else {name: ops.empty(x.shape, x.dtype, device).copy_(x) for name, x in rows.items()}


def zeros(shape, dtype, device):
    return ops.empty(shape, dtype, device).zero_()


def selected(x, runs):
    """Rows `(begin, tokens)` of x, without a copy if they are one run."""
    if len(runs) == 1:
        return x[runs[0][0]:sum(runs[0])]
    found, at = ops.empty((sum(n for _, n in runs), *x.shape[1:]), x.dtype, x.device), 0
    for begin, n in runs:
        found[at:at + n] = x[begin:begin + n]
        at += n
    return found


class TwoStages:
    """Two stages around an all-gather. `plan`, `tensors` and `ranks` are the subclass's."""

    def take_memory(self, device):
        self.workspace, self.summary, self.gathered = (
            zeros((max(n, 1),), torch.uint8, device)
            for n in (self.plan.workspace_bytes, self.plan.summary_bytes, self.plan.gathered_bytes))
        if self.ranks == 1:
            self.gathered = self.summary
        self.sends = self.ranks > 1 and self.plan.summary_bytes > 0

    def gather(self):
        if self.sends:
            dist.all_gather_into_tensor(self.gathered, self.summary)

    def run(self):
        self.plan.summarise(self.summary, self.workspace, **self.tensors)
        self.gather()
        self.plan.finish(self.gathered, self.workspace, **self.tensors)


class Part(TwoStages):
    """A rank's part, with its memory."""

    def __init__(self, rows, layout, rank, heads):
        device, tokens = rows["q"].device, rows["q"].shape[0]
        context, spec = ops.context_of(device), dw.PrefillSpec(*heads, D, D)
        # Fragments do not depend on the rows that a plan is for.
        found = dw.ParallelPrefill(context, spec, layout, rank, tokens).fragments
        self.runs, count = [(begin, n) for _, begin, n in found], sum(n for _, _, n in found)
        self.plan, self.ranks = dw.ParallelPrefill(context, spec, layout, rank, count), layout.ranks
        self.rows = {name: selected(x, self.runs) for name, x in rows.items()}
        self.o = zeros((count, heads[1], D), torch.bfloat16, device)
        self.final = zeros((len(found), heads[1], D, D), torch.float32, device)
        self.tensors = {**self.rows, "o": self.o, **({"final_state": self.final} if found else {})}
        self.has_end = [begin + n == tokens for begin, n in self.runs]
        self.take_memory(device)


GRADIENTS = tuple(GRADIENT_LIMITS)


class BackwardPart(TwoStages):
    """The backward of a rank's part, with its memory. `d_o`: of the whole sequence."""

    def __init__(self, part, d_o):
        device, self.part, self.ranks = d_o.device, part, part.ranks
        self.plan = dw.ParallelPrefillBackward(part.plan)
        self.d_o = selected(d_o, part.runs)
        self.found = {name: zeros(part.rows[name].shape, part.rows[name].dtype, device) for name in GRADIENTS}
        self.tensors = {**part.rows, "d_o": self.d_o, **{f"d_{name}": x for name, x in self.found.items()}}
        self.take_memory(device)


class Clock:
    """Times of functions that all ranks call together: GPU times by events, none on the simulator."""

    def __init__(self, device, runs):
        self.device, self.runs, self.host = device, runs, None
        self.one = torch.zeros(1, device=device)

    def over_ranks(self, number, how):
        x = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(x, getattr(dist.ReduceOp, how))
        return x.item()

    def __call__(self, f, how="MAX"):
        """Median of the runs' ms, of the slowest rank, or of the fastest with how="MIN". `host` is then the host's."""
        if self.device.type == "cpu":
            f()
            return None
        times, host = [], []
        for i in range(self.runs + 3):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The host has enqueued f before the pause ends, and no GPU passes the all-reduce before all have reached it.
            torch.cuda._sleep(8_000_000)
            dist.all_reduce(self.one)
            begin.record()
            before = time.perf_counter()
            f()
            enqueued = time.perf_counter() - before
            end.record()
            end.synchronize()
            measured = self.over_ranks(begin.elapsed_time(end), how)
            if i >= 3:
                times.append(measured)
                host.append(enqueued * 1e3)
        self.host = statistics.median(host)
        return statistics.median(times)


def errors(pairs, clock):
    """|found - wanted| / |wanted| over the pairs of all ranks, in parts, because a tensor in f64 may not fit. NaN if any
    number is."""
    off = norm = 0.
    for found, wanted in pairs:
        for x, y in zip(found.split(1 << 14), wanted.split(1 << 14)):
            x, y = x.double(), y.double()
            off, norm = off + (x - y).square().sum().item(), norm + y.square().sum().item()
    off, norm = clock.over_ranks(off, "SUM"), clock.over_ranks(norm, "SUM")
    return (off / norm) ** .5 if norm else off ** .5


def measure_own(case, rows, options, clock, rank, ranks):
    """A row of deltawave."""
    tokens, gates = case
    device, heads = rows["q"].device, tuple(options.heads)
    shared = Part(rows, dw.RankLayout([tokens], ranks, options.kind, options.block), rank, heads)
    # Every rank runs everything, so that no rank waits for another.
    alone = Part(rows, dw.RankLayout([tokens], 1, "contiguous", options.block), 0, heads)
    alone.run()
    shared.run()
    called = ops.prefill_parallel(**shared.rows, lengths=[tokens], kind=options.kind, block=options.block)
    ops.context_of(device).synchronize()
    equal = all(torch.equal(o, selected(alone.o, shared.runs)) for o in (shared.o, called[0]))
    for n, ends in enumerate(shared.has_end):
        if ends:
            equal = equal and torch.equal(shared.final[n], alone.final[0]) and torch.equal(called[1][n], alone.final[0])
    row = {"who": "deltawave", "tokens": tokens, "heads": heads, "gates": gates, "ranks": ranks, "kind": options.kind,
           "block": options.block, "summary_bytes": shared.plan.summary_bytes,
           "bits_equal_one_rank": bool(clock.over_ranks(float(equal), "MIN"))}
    del alone, called
    whole = dw.Prefill.packed(ops.context_of(device), dw.PrefillSpec(*heads, D, D), [0, tokens], tokens)
    o, final = (zeros(shape, dtype, device) for shape, dtype in (((tokens, heads[1], D), torch.bfloat16),
                                                                 ((1, heads[1], D, D), torch.float32)))
    bound = whole.bind(**rows, o=o, final_state=final)
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None
    row["alone"] = clock(lambda: bound(stream), "MIN")
    if options.check:
        ops.context_of(device).synchronize()
        row["error"] = errors([(shared.o, selected(o, shared.runs))], clock)
        row["state_error"] = errors([(shared.final[n], final[0]) for n, ends in enumerate(shared.has_end) if ends], clock)
    del bound, whole, o, final
    row["shared"] = clock(shared.run)
    row["gather"] = clock(shared.gather) if shared.sends else None
    row["call"] = clock(lambda: ops.prefill_parallel(**shared.rows, lengths=[tokens], kind=options.kind, block=options.block))
    row["host"] = clock.host
    row["speed_up"] = row["alone"] / row["shared"] if row["shared"] else None
    return row


def measure_backward(case, rows, options, clock, rank, ranks):
    """A row of deltawave, of a forward and its backward."""
    tokens, gates = case
    device, heads = rows["q"].device, tuple(options.heads)
    made = torch.Generator(device).manual_seed(2)
    d_o = zeros((tokens, heads[1], D), torch.bfloat16, device)
    d_o.copy_(torch.randn(tokens, heads[1], D, generator=made, device=device))
    shared = Part(rows, dw.RankLayout([tokens], ranks, options.kind, options.block), rank, heads)
    alone = Part(rows, dw.RankLayout([tokens], 1, "contiguous", options.block), 0, heads)
    of_shared, of_alone = BackwardPart(shared, d_o), BackwardPart(alone, d_o)

    def both():
        shared.run()
        of_shared.run()

    def call():
        with torch.enable_grad():
            leaves = {name: x.detach().requires_grad_() for name, x in shared.rows.items()}
            o, _ = ops.prefill_parallel(**leaves, lengths=[tokens], kind=options.kind, block=options.block)
            return o, torch.autograd.grad(o, [leaves[name] for name in GRADIENTS], of_shared.d_o)

    alone.run()
    of_alone.run()
    both()
    o, called = call()
    ops.context_of(device).synchronize()
    equal = all(torch.equal(x, selected(alone.o, shared.runs)) for x in (shared.o, o))
    for name, of_call in zip(GRADIENTS, called):
        wanted = selected(of_alone.found[name], shared.runs)
        equal = equal and torch.equal(of_shared.found[name], wanted) and torch.equal(of_call, wanted)
    row = {"who": "deltawave", "backward": True, "tokens": tokens, "heads": heads, "gates": gates, "ranks": ranks,
           "kind": options.kind, "block": of_shared.plan.block, "summary_bytes": shared.plan.summary_bytes,
           "backward_summary_bytes": of_shared.plan.summary_bytes,
           "bits_equal_one_rank": bool(clock.over_ranks(float(equal), "MIN"))}
    del alone, of_alone, called, o
    plan = dw.Prefill.packed(ops.context_of(device), dw.PrefillSpec(*heads, D, D), [0, tokens], tokens)
    whole = {name: zeros(x.shape, x.dtype, device) for name, x in rows.items()}
    forward = plan.bind(**rows, o=zeros((tokens, heads[1], D), torch.bfloat16, device))
    backward = dw.PrefillBackward(plan).bind(**rows, d_o=d_o, **{f"d_{name}": x for name, x in whole.items()})
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None

    def on_one():
        forward(stream)
        backward(stream)

    row["alone"] = clock(on_one, "MIN")
    row["backward_alone"] = clock(lambda: backward(stream), "MIN")
    if options.check:
        ops.context_of(device).synchronize()
        row["errors"] = {name: errors([(of_shared.found[name], selected(whole[name], shared.runs))], clock)
                         for name in GRADIENTS}
        row["error"] = max(row["errors"].values(), key=lambda x: float("inf") if x != x else x)
    del forward, backward, plan, whole
    row["shared"] = clock(both)
    row["backward_shared"] = clock(of_shared.run)
    row["backward_gather"] = clock(of_shared.gather) if of_shared.sends else None
    row["gather"] = clock(lambda: (shared.gather(), of_shared.gather())) if of_shared.sends else None
    row["call"] = clock(call)
    row["host"] = clock.host
    row["speed_up"] = row["alone"] / row["shared"] if row["shared"] else None
    return row


def everywhere(call):
    """The result of a call, and why it failed on any rank, the same on all."""
    result, problem = None, None
    try:
        result = call()
    except Exception as found:  # whatever foreign code raises
        problem = f"{type(found).__name__}: {' '.join(str(found).split())[:300]}"
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, problem)
    return result, next((f"rank {rank}: {text}" for rank, text in enumerate(every) if text), None)


def import_fla(where, device, folder):
    """FLA's function and its module of context parallelism."""
    if where == "auto" and device.type == "cpu":
        raise RuntimeError("its kernels need a GPU")
    # Its own kernels, where FlashQLA is installed, too.
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    if where != "auto":
        # Triton reads the source of kernels from files, so wheels are unpacked.
        for path in where.split(":"):
            if Path(path).is_file():
                zipfile.ZipFile(path).extractall(folder)
        named = [folder, *(str(Path(path).resolve()) for path in where.split(":") if Path(path).is_dir())]
        sys.path[:0] = named
        found = importlib.machinery.PathFinder.find_spec("fla", named)
        if found is not None and found.origin is None:
            # A namespace, which Python would pass over for a package that is installed.
            sys.modules["fla"] = importlib.util.module_from_spec(found)
    import fla.ops.cp
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule, fla.ops.cp.build_cp_context


def measure_fla(fla, case, rows, options, clock, rank, ranks):
    """A row of FLA, and why there is none."""
    tokens, gates = case
    function, build_context = fla
    pieces = ranks * (2 if options.kind == "zigzag" else 1)
    if tokens % pieces:
        return None, f"its context parallelism takes tokens that {pieces} divides, and not {tokens}"
    n = tokens // pieces
    runs = [(n * rank, n), (n * (pieces - 1 - rank), n)] if options.kind == "zigzag" else [(n * rank, n)]
    own = {name: selected(x, runs)[None] for name, x in rows.items()}
    every = {name: x[None] for name, x in rows.items()}
    offsets = torch.tensor([0, tokens], device=clock.device)

    def alone():
        return function(**every)[0]

    def context():
        return build_context(offsets, dist.group.WORLD, cu_seqlens_cpu=offsets.cpu(), layout=options.kind)

    # The first call compiles. Where a rank fails in the middle of a collective, the others wait for --timeout.
    o, problem = everywhere(alone)
    built, problem = everywhere(context) if problem is None else (None, problem)
    if problem is None:
        cp_o, problem = everywhere(lambda: function(**own, cp_context=built)[0])
    if problem is not None:
        return None, problem
    row = {"who": "fla", "tokens": tokens, "heads": tuple(options.heads), "gates": gates, "ranks": ranks, "kind": options.kind}
    if options.check:
        row["error"] = errors([(cp_o[0], selected(o[0], runs))], clock)
    del o, cp_o
    row["alone"] = clock(alone, "MIN")
    row["shared"] = row["call"] = clock(lambda: function(**own, cp_context=built))
    row["host"] = clock.host
    row["speed_up"] = row["alone"] / row["shared"] if row["shared"] else None
    return row, None


HEADS = ("who", "tokens", "gates", "ranks", "alone", "shared", "call", "gather", "speed_up", "host", "bits", "error")


def table(rows):
    """Rows as lines of text, with FLA's beside deltawave's."""
    def cell(row, name):
        x = row.get("bits_equal_one_rank" if name == "bits" else name)
        if x is None:
            return "-"
        if isinstance(x, bool):
            return "equal" if x else "OTHER"
        if name == "error":
            return f"{x:.1e}"
        return f"{x:.3f}" if isinstance(x, float) else str(x)

    order = {id(row): n for n, row in enumerate(r for r in rows if r["who"] == "deltawave")}
    first = {(row["tokens"], row["gates"]): order[id(row)] for row in rows if id(row) in order}
    rows = sorted(rows, key=lambda row: (first.get((row["tokens"], row["gates"]), 0), row["who"]))
    cells = [HEADS, *(tuple(cell(row, name) for name in HEADS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(x.ljust(w) if n in (0, 2) else x.rjust(w) for n, (x, w) in enumerate(zip(line, widths))).rstrip()
            for line in cells]


def failures(rows):
    """What --check finds wrong."""
    found = []
    for row in rows:
        case = f"{row['tokens']} tokens, {row['gates']} gates"
        if row["who"] == "deltawave":
            if not row["bits_equal_one_rank"]:
                found.append(f"{case}: other bits than one rank's")
            if "errors" in row:
                measured = [(f"error of d_{name}", x, GRADIENT_LIMITS[name]) for name, x in row["errors"].items()]
            else:
                measured = [(name, row[name], LIMIT) for name in ("error", "state_error")]
            found += [f"{case}: {name} {x:.2e}, above {limit:.1e}" for name, x, limit in measured if not x <= limit]
    return found


def main():
    options = parsed()
    if "RANK" not in os.environ:
        return start(options.ranks)
    global torch, dist, dw, ops
    import torch
    import torch.distributed as dist

    import deltawave as dw
    from deltawave import ops

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        if torch.cuda.device_count() <= local:
            print(f"rank {rank} has no GPU: this machine has {torch.cuda.device_count()}; --device cpu tries the logic",
                  file=sys.stderr)
            return 2
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    limit = datetime.timedelta(seconds=options.timeout)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, timeout=limit)
    else:
        dist.init_process_group("gloo", timeout=limit)
    out = None
    if rank == 0 and options.json:
        out = sys.stdout if options.json == "-" else open(options.json, "w")
    says = sys.stderr if options.json == "-" else sys.stdout
    clock, rows = Clock(device, options.runs), []

    def note(row):
        rows.append({key: round(x, 6) if isinstance(x, float) and "error" not in key else x for key, x in row.items()})
        if out:
            print(json.dumps(rows[-1]), file=out, flush=True)

    cases = [(tokens, gates) for tokens in options.tokens for gates in options.gates]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            where = torch.cuda.get_device_name() if device.type == "cuda" else "the simulator, which has no times"
            print(f"{ranks} ranks, {where}; torch {torch.__version__}, deltawave {ops.context_of(device).library.version()}; "
                  f"heads {options.heads[0]}, {options.heads[1]} of {D}; {options.kind}", file=says, flush=True)
        # Rows of deltawave come first: where foreign code ends the run, they have been written.
        for case in cases:
            measure = measure_backward if options.backward else measure_own
            note(measure(case, inputs(*case[:1], options.heads, case[1], device), options, clock, rank, ranks))
        left_out = "--fla never"
        if options.backward:
            left_out = "--backward measures deltawave alone"
        elif options.fla != "never":
            fla, left_out = everywhere(lambda: import_fla(options.fla, device, folder))
            for case in cases if left_out is None else ():
                row, left_out = measure_fla(fla, case, inputs(*case[:1], options.heads, case[1], device), options, clock, rank,
                                            ranks)
                if row:
                    note(row)
                elif rank == 0:
                    print(f"fla: {case[0]} tokens, {case[1]} gates: left out: {left_out}", file=says, flush=True)
                    left_out = None
        if rank == 0:
            print("\n".join(table(rows)), file=says)
            if left_out:
                print(f"fla: left out: {left_out}", file=says)
    wrong = failures(rows) if options.check else []
    if rank == 0:
        for text in wrong:
            print(f"check: {text}", file=sys.stderr)
        if options.check and not wrong:
            print(f"check: bits of one rank, errors below {'their limits' if options.backward else '8e-3'}", file=says)
        if out and out is not sys.stdout:
            out.close()
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
