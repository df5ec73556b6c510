"""Measuring: the worker process. Results are checked first, then timed by replaying CUDA graphs."""

import gc
import json
import os
import statistics
import sys
import time
import traceback

from cases import D, make_inputs
from contestants import CONTESTANTS, Missing

ROUNDS = 3
SAMPLES = (5, 30)  # fewest and most in a round
ROUND_MS = 30
LOST = 3  # exit status: the device cannot be used any more


def recurrence(x):
    """The recurrence token by token in float64, all sequences and heads at once."""
    import torch

    case = x.case
    sequences, longest, group = len(case.lengths), max(case.lengths), case.value_heads // case.key_heads

    def padded(t):
        """[1, T, ...] to [longest, sequences, ...]; zeros past an end leave the state as it is."""
        out = torch.zeros(longest, sequences, *t.shape[2:], dtype=torch.float64, device=t.device)
        for n, length in enumerate(case.lengths):
            out[:length, n] = t[0, x.offsets[n]:x.offsets[n + 1]]
        return out

    rows = sequences * case.value_heads
    q = padded(x.q).repeat_interleave(group, 2).view(longest, rows, 1, D) * x.scale
    k = padded(x.k).repeat_interleave(group, 2).view(longest, rows, 1, D)
    v = padded(x.v).view(longest, rows, 1, D)
    decay = padded(x.g).exp_().view(longest, rows, 1, 1)
    beta = padded(x.beta).view(longest, rows, 1, 1)
    state = torch.zeros(rows, D, D, dtype=torch.float64, device=q.device)
    o = torch.empty_like(v)
    for block in zip(*(t.split(1024) for t in (q, k, k.transpose(-1, -2), v, decay, beta, o))):
        for q_t, k_t, k_column, v_t, decay_t, beta_t, o_t in zip(*block):
            state.mul_(decay_t)
            delta = torch.baddbmm(v_t, k_t, state, alpha=-1).mul_(beta_t)
            state.baddbmm_(k_column, delta)
            torch.bmm(q_t, state, out=o_t)
    o = o.view(longest, sequences, case.value_heads, D)
    o = torch.cat([o[:length, n] for n, length in enumerate(case.lengths)])[None]
    return o, state.view(sequences, case.value_heads, D, D)


def reference(x, chunk=64, budget=1 << 31):
    """The same recurrence in float64, a chunk of tokens at a time: thousands of times fewer steps. Sequences of like
    lengths go together. `budget`: bytes of the largest intermediate tensor."""
    import torch

    case, device = x.case, x.v.device
    o = torch.empty(case.tokens, case.value_heads, D, dtype=torch.float64, device=device)
    states = torch.empty(len(case.lengths), case.value_heads, D, D, dtype=torch.float64, device=device)
    left = sorted(range(len(case.lengths)), key=lambda n: -case.lengths[n])
    while left:
        together = [n for n in left if 2 * case.lengths[n] > case.lengths[left[0]]]
        left = left[len(together):]
        chunks = -(-case.lengths[together[0]] // chunk)
        state = torch.zeros(len(together) * case.value_heads, D, D, dtype=torch.float64, device=device)
        step = max(1, budget // (len(together) * case.value_heads * chunk * D * 8))
        for first in range(0, chunks, step):
            state = chunks_of(x, together, range(first, min(first + step, chunks)), chunk, state, o)
        states[together] = state.view(-1, case.value_heads, D, D)
    return o[None], states


def chunks_of(x, sequences, which, chunk, state, o):
    """The chunks `which` of `sequences`: writes their rows of `o`, returns the state after them."""
    import torch

    heads, device = x.case.value_heads, x.v.device
    group = heads // x.case.key_heads
    starts = torch.tensor([x.offsets[n] for n in sequences], device=device)[:, None]
    lengths = torch.tensor([x.case.lengths[n] for n in sequences], device=device)[:, None]
    position = torch.arange(which.start * chunk, which.stop * chunk, device=device)[None]
    inside = position < lengths
    token = torch.where(inside, starts + position, starts)

    def rows(t, repeat=1):
        """[1, T, heads, ...] to [sequences * HV, chunks, chunk, ...]; tokens past an end change nothing."""
        t = t[0][token].double()
        t = t * inside.view(*inside.shape, *[1] * (t.dim() - 2))
        t = t.repeat_interleave(repeat, 2).transpose(1, 2)
        return t.reshape(len(sequences) * heads, len(which), chunk, *t.shape[3:])

    q, k, v = rows(x.q, group) * x.scale, rows(x.k, group), rows(x.v)
    beta, total = rows(x.beta)[..., None], rows(x.g).cumsum(-1)
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill_(upper, -torch.inf).exp_()
    since = total.exp()[..., None]
    system = (k @ k.transpose(-1, -2)).mul_(decay).mul_(beta)
    # Its diagonal and what is above are not read.
    right = torch.linalg.solve_triangular(system, torch.cat([beta * v, beta * since * k], -1), upper=False,
                                          unitriangular=True)
    values, keys = right.split(D, -1)
    within = (q @ k.transpose(-1, -2)).mul_(decay)
    q = q * since
    k = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    whole = since[:, :, -1:]
    out = torch.empty_like(v)
    for c in range(len(which)):
        delta = torch.baddbmm(values[:, c], keys[:, c], state, alpha=-1)
        out[:, c] = torch.baddbmm(q[:, c] @ state, within[:, c], delta)
        state = torch.baddbmm(state * whole[:, c], k[:, c], delta)
    out = out.view(len(sequences), heads, len(which) * chunk, D).transpose(1, 2)
    o[token[inside]] = out[inside]
    return state


def error(found, wanted):
    """rms of the difference over rms of what is wanted; NaN if anything is not finite. Both [N, ..., heads or so, D],
    in parts, so that a long sequence's doubles fit."""
    square = total = 0.0
    for f, w in zip(found.flatten(0, 1).split(8192), wanted.flatten(0, 1).split(8192)):
        w = w.double()
        square += (f.double() - w).square_().sum().item()
        total += w.square().sum().item()
    return (square / total) ** 0.5 if total else float("nan")


class Clock:
    """Times what a function enqueues, the L2 cache flushed before each call."""

    def __init__(self):
        import torch

        self.torch = torch
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def samples(self, call):
        """Milliseconds of each call of a round."""
        event = lambda: self.torch.cuda.Event(enable_timing=True)  # noqa: E731

        def some(count):
            pairs = []
            for _ in range(count):
                pairs.append((event(), event()))
                self.flush.zero_()  # longer than it takes to enqueue what follows
                pairs[-1][0].record()
                call()
                pairs[-1][1].record()
            self.torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairs]

        few, many = SAMPLES
        first = statistics.median(some(3))
        return some(int(min(many, max(few, ROUND_MS / max(first, 1e-3)))))


def copy_bandwidth(clock):
    """Bytes read and written per second by a copy of 2 GiB."""
    import torch

    source = torch.empty(2 << 30, dtype=torch.int8, device="cuda").random_(0, 100)
    target = torch.empty_like(source)
    return 2 * source.numel() / (statistics.median(clock.samples(lambda: target.copy_(source))) * 1e-3)


def copy_ms(clock, moved):
    """Milliseconds that a copy takes which reads and writes `moved` bytes together."""
    import torch

    source = torch.empty(moved // 2, dtype=torch.int8, device="cuda").random_(0, 100)
    target = torch.empty_like(source)
    graph, _ = graph_of(lambda: target.copy_(source))
    return statistics.median(clock.samples(graph.replay))


def graph_of(call):
    """A captured call and its outputs."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


class Row:
    """One case, all contestants."""

    def __init__(self, case, names, note):
        self.case, self.names, self.note = case, names, note
        self.entries, self.graphs, self.others = {}, {}, {}

    def attempt(self, name, step, action):
        """An exception is that contestant's result, unless the device is lost with it."""
        import torch

        self.note(f"{self.case.name}|{name}|{step}")
        try:
            action()
            torch.cuda.synchronize()
        except Missing as reason:
            self.entries[name]["absent"] = str(reason)
        except Exception as problem:
            self.entries[name]["error"] = f"{step}: {type(problem).__name__}: {str(problem)[:300]}"
            self.graphs.pop(name, None)
            traceback.print_exc()
            try:
                torch.cuda.synchronize()
            except Exception:
                sys.stdout.flush()
                os._exit(LOST)

    def run(self, clock, with_reference):
        import torch

        x = self.case.inputs()
        self.note(f"{self.case.name}|reference|")
        wanted = self.case.reference(x) if with_reference else None
        for name in self.names:
            self.entries[name] = {}
            self.attempt(name, "run", lambda: self.check(name, x, wanted))
        del wanted
        self.others.clear()
        gc.collect()
        torch.cuda.empty_cache()
        for _ in range(ROUNDS):
            for name in list(self.graphs):
                self.attempt(name, "time", lambda: self.time(name, clock))
        self.graphs.clear()
        for name in self.names:
            forget = getattr(CONTESTANTS[name], "forget", None)
            if forget:
                forget()
        return self.entries

    def check(self, name, x, wanted):
        """Runs a contestant once to compile what it compiles, then as a graph whose outputs held NaN before."""
        import torch

        entry, call = self.entries[name], getattr(CONTESTANTS[name], self.case.operation)(x)
        before = getattr(call, "before", None)
        started = time.time()
        call()
        torch.cuda.synchronize()
        entry["first_call_s"] = round(time.time() - started, 2)
        graph, outputs = graph_of(call)
        for output in outputs:
            output.fill_(float("nan"))
        if before:
            before()
        graph.replay()
        torch.cuda.synchronize()
        for index, label in enumerate(self.case.outputs):
            if wanted is not None:
                entry[f"{label}_error"] = error(outputs[index], wanted[index])
            for other, theirs in self.others.items():
                entry[f"{label}_against_{other}"] = error(outputs[index], theirs[index])
        if not self.others:
            self.others[name] = [output.clone() for output in outputs]
        if not all(bool(torch.isfinite(t).all()) for t in outputs):
            raise ArithmeticError("outputs are missing or not finite")
        self.graphs[name] = (graph, call)

    def time(self, name, clock):
        graph = self.graphs[name][0]
        samples = sorted(clock.samples(graph.replay))
        entry = self.entries[name]
        entry.setdefault("rounds_ms", []).append(round(statistics.median(samples), 5))
        entry.setdefault("fastest_ms", []).append(round(samples[0], 5))
        entry["ms"] = round(statistics.median(entry["rounds_ms"]), 5)


def versions(names, note):
    """What runs, and on what."""
    import platform

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    found["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
    for module in ("triton", "tilelang"):
        try:
            found[module] = getattr(__import__(module), "__version__", "?")
        except Exception as problem:  # whatever an import of foreign code raises
            found[module] = f"none ({type(problem).__name__})"
    for name in names:
        note(f"start|{name}|version")
        try:
            found[name] = CONTESTANTS[name].version()
        except Exception as problem:
            found[name] = f"none ({problem})"
    return found


def work(cases, names, out, deadline, bad):
    """Measures the cases that `out` does not have yet. `bad`: pairs of case and contestant that are left out; the
    case `*` is every one, the contestant `reference` the float64 results."""
    import torch

    path = out / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {line["case"] for line in lines if line["kind"] == "row"}
    names = [name for name in names if ("*", name) not in bad]

    def emit(line):
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def note(text):
        (out / "in_flight").write_text(text)

    note("start||")
    torch.cuda.init()
    clock = Clock()
    check_reference()
    bandwidth = copy_bandwidth(clock)
    if not any(line["kind"] == "machine" for line in lines):
        emit({"kind": "machine", **versions(names, note), "copy_bytes_per_s": bandwidth})
    left = [case for case in cases if case.name not in done]
    started, measured = time.time(), 0
    for index, case in enumerate(left):
        now = time.time()
        if now > deadline:
            emit({"kind": "dropped", "what": f"{len(left) - index} rows", "reason": "out of time"})
            break
        # A run behind its time gives up the last contestant, for good; deltawave and FlashInfer always stay.
        if measured >= 4 and len(names) > 3 and (now - started) / measured * (len(left) - index) > deadline - now:
            emit({"kind": "dropped", "what": names[-1], "reason": f"out of time from `{case.name}` on"})
            names, started, measured = names[:-1], now, 0
        able = [name for name in names if getattr(CONTESTANTS[name], case.operation, None)]
        here = [name for name in able if (case.name, name) not in bad]
        with torch.inference_mode():
            entries = Row(case, here, note).run(clock, (case.name, "reference") not in bad)
        for other in able:
            if other not in here:
                entries[other] = {"error": "it brought the process down"}
        emit({"kind": "row", "case": case.name, **case.line(), "copy_bytes_per_s": bandwidth,
              "copy_ms": copy_ms(clock, case.io_bytes + case.state_bytes), "results": entries,
              "seconds": round(time.time() - now, 2)})
        measured += 1
        said = [f"{n} {e.get('ms') or e.get('error') or e.get('absent')}" for n, e in entries.items()]
        print(f"{case.name}: {', '.join(said)}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    emit({"kind": "end", "copy_bytes_per_s": copy_bandwidth(clock)})
    note("done||")


def check_reference():
    """Holds the reference, made a chunk at a time, against the recurrence token by token."""
    from cases import Case

    for gates in ("mixed", "model"):
        x = make_inputs(Case("bf16", 2, 4, (300, 64, 1, 129), gates))
        for found, wanted in zip(reference(x), recurrence(x)):
            if not error(found, wanted) < 1e-12:
                raise ArithmeticError(f"the reference is wrong by {error(found, wanted)} with {gates} gates")


def warm_up(name, case):
    """Builds what a contestant compiles for a case, for the caches on disk."""
    import torch

    with torch.inference_mode():
        getattr(CONTESTANTS[name], case.operation)(case.inputs())()
        torch.cuda.synchronize()


def available(names):
    """Which contestants can run here, and why the others cannot."""
    can, cannot = [], {}
    for name in names:
        try:
            CONTESTANTS[name].check()
            can.append(name)
        except Missing as reason:
            cannot[name] = str(reason)
    return can, cannot
