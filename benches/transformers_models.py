"""A model of Qwen3.5-35B-A3B's layer shapes with random bf16 weights in transformers: torch's code, FLA and deltawave.

    python3 benches/transformers_models.py [--layers 8] [--json FILE]      on an NVIDIA or AMD GPU
    python3 benches/transformers_models.py --budget 520                    for at most about 520 seconds; again: goes on
    python3 benches/transformers_models.py --only fla:prefill,deltawave    these rows alone
    python3 benches/transformers_models.py --tiny                          a moment, on the CPU and the simulator

Implementations: `torch`; `fla`; `deltawave`, which runs everything between a layer's projections in one call; `functions`, the
same with `enable(layers=False)`.

Rows, by name and size: `logits` (rms of differences from torch's code, and how often the greatest is the same), `prefill`
(tokens/s), `decode` (tokens/s, launched one by one), `captured` (the same, as a CUDA graph of a step), `graph` (torch.compile
with CUDA graphs), `prefill_alone` and `decode_alone` (microseconds on the GPU between the projections of one layer: a CUDA
graph of the layer, less one of its projections). Rows of prefill and decode bring more figures. `*_layers` are milliseconds in
Gated DeltaNet layers, each waited for, of one prefill and of one step, and `*_share` their part of the whole; `*_between` are
milliseconds from the end of the input projections to the output projection, both waited for, median of three.

`prefill` and `decode` run the implementations of a process in turn, round by round: they wait for the host, whose speed changes
in minutes. torch's code has a process of its own, because transformers chooses FLA when it is imported. Prompts before a decode
are computed by deltawave if it is installed.

FILE is written after each row, and rows that are in it are not measured again: delete it to begin anew. It needs torch and
transformers, FLA for `fla`, and PYTHONPATH and DELTAWAVE_C_LIBRARY for `deltawave`. Whatever cannot run is said, and left out.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

HOWS = ("torch", "fla", "functions", "deltawave")
# Implementations that share a process, in this order.
PROCESSES = (("deltawave", "functions", "fla"), ("torch",))
SIZES = {"decode_alone": (1, 8, 32), "decode": (1, 8, 32), "captured": (1, 8, 32), "prefill": (2048, 8192, 32768),
         "prefill_alone": (2048, 8192, 32768), "logits": (1000,), "graph": (1, 8, 32)}
TINY = {"decode": (2,), "prefill": (100,), "logits": (100,)}
# A row is begun only if this many seconds are left.
LEAST = {"prefill_alone": 15, "decode_alone": 10, "prefill": 10, "decode": 10, "captured": 10, "logits": 10, "graph": 60}
PROMPT, STEPS = 512, 8


def config_of(tiny, layers):
    from transformers import Qwen3_5MoeTextConfig

    if tiny:
        return Qwen3_5MoeTextConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
            moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=2, num_experts_per_tok=2,
            max_position_embeddings=512)
    return Qwen3_5MoeTextConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
        vocab_size=32768, max_position_embeddings=65536)


def model_of(tiny, layers, device):
    import torch
    from transformers import Qwen3_5MoeForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3_5MoeForCausalLM(config_of(tiny, layers)).eval()
    torch.set_default_dtype(torch.float32)
    made = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if "embed" in name or "lm_head" in name else 0.02, generator=made)
    return model


def timed(call, synchronize, runs):
    """Median seconds of a call, after one to warm up."""
    return timed_in_turn({None: call}, synchronize, runs, lambda how: None)[None]


def timed_in_turn(calls, synchronize, runs, switch):
    """Median seconds of calls by name, after one of each to warm up. `switch(name)` comes before a call of it."""
    found = {name: [] for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            switch(name)
            synchronize()
            begin = time.perf_counter()
            call()
            synchronize()
            if run:
                found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def layers_of(model):
    return [x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet")]


def in_layers(model, call, synchronize, between=False):
    """Seconds of a call that are spent in Gated DeltaNet layers, or between their projections, each waited for, and seconds
    of the call."""
    spent, begun = [], []

    def before(*_):
        synchronize()
        begun.append(time.perf_counter())

    def after(*_):
        synchronize()
        spent.append(time.perf_counter() - begun.pop())

    if between:  # `in_proj_a` is the last input projection that the layer's forward calls
        ends = [(x.in_proj_a.register_forward_hook, x.out_proj.register_forward_pre_hook) for x in layers_of(model)]
    else:
        ends = [(x.register_forward_pre_hook, x.register_forward_hook) for x in layers_of(model)]
    hooks = [h for begins, stops in ends for h in (begins(before), stops(after))]
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    whole = time.perf_counter() - begin
    for hook in hooks:
        hook.remove()
    return sum(spent), whole


class Results:
    """Rows of all implementations in a file, which is written after each."""

    def __init__(self, path):
        self.path, self.found = path, {}
        if os.path.exists(path):
            with open(path) as file:
                self.found = json.load(file)

    def of(self, how):
        return self.found.setdefault(how, {"left out": {}})

    def has(self, how, row, size):
        one = self.found.get(how, {})
        return str(size) in one.get(row, {}) or f"{row} {size}" in one.get("left out", {})

    def add(self, how, row, size, value, seconds):
        self.of(how).setdefault(row, {})[str(size)] = value
        self.write()
        print(f"{how:10} {row} {size}: {value if isinstance(value, str) else round(value, 4)}, in {seconds:.1f} s", flush=True)

    def leave_out(self, how, row, size, why):
        self.of(how)["left out"][f"{row} {size}"] = why
        self.write()
        print(f"{how:10} {row} {size}: left out: {why}", flush=True)

    def write(self):
        with open(self.path + ".new", "w") as file:
            json.dump(self.found, file, indent=1)
        os.replace(self.path + ".new", self.path)


def wanted(only, how, row, size):
    """Whether `only`, `HOW[:ROW[:SIZE]]` with commas between them, names a row."""
    parts = [part.split(":") for part in only.split(",")] if only else [[how]]
    return any(part == [how, row, str(size)][:len(part)] for part in parts)


def rows_of(given, hows, results):
    """Rows that are still to be measured, and of whom: those with torch.compile last, which take the longest."""
    sizes = TINY if given.tiny else SIZES
    found = [(row, size, [how for how in hows if wanted(given.only, how, row, size) and not results.has(how, row, size)])
             for row in sizes for size in sizes[row]]
    return sorted((one for one in found if one[2]), key=lambda one: one[0] == "graph")


class Model:
    """The model, and what is measured of it: methods by row, for implementations and a size, return values by implementation."""

    def __init__(self, given, results):
        import torch

        self.given, self.results, self.tiny = given, results, given.tiny
        self.device = "cpu" if self.tiny else "cuda"
        self.synchronize = (lambda: None) if self.tiny else torch.cuda.synchronize
        self.model = model_of(self.tiny, given.layers, self.device)
        self.runs, self.length, self.steps = (1, 10, 3) if self.tiny else (5, PROMPT, STEPS)

    def switch(self, how):
        """Makes transformers use an implementation."""
        before = sys.modules.get("deltawave.transformers")
        if before is not None:
            before.disable()
        if how in ("deltawave", "functions"):
            from deltawave import transformers

            transformers.enable(simulator=self.tiny, layers=how == "deltawave")
            self.results.of(how)["answered"] = transformers.answered

    def ids(self, batch, tokens):
        import torch

        made = torch.Generator().manual_seed(batch * 100003 + tokens)
        return torch.randint(3, self.model.config.vocab_size, (batch, tokens), generator=made).to(self.device)

    def prompted(self, how, batch, static=False):
        """A cache that holds a prompt, for decodes by an implementation."""
        from transformers import StaticCache

        prompt = self.ids(batch, self.length)
        cache = StaticCache(config=self.model.config, max_cache_len=self.length + 12 * STEPS) if static else None
        self.switch("deltawave" if importlib.util.find_spec("deltawave") else how)
        cache = self.model(prompt, past_key_values=cache, use_cache=True).past_key_values
        self.switch(how)
        return cache

    def each(self, hows, call):
        """`call(how)` of each, by name."""
        found = {}
        for how in hows:
            self.switch(how)
            found[how] = call(how)
        return found

    def logits(self, hows, tokens):
        import torch

        def saved(how):
            found = self.model(self.ids(1, tokens), use_cache=False).logits
            torch.save(found.float().cpu(), f"{self.given.json}.{how}.logits")
            return "saved"

        return self.each(hows, saved)

    def in_turn(self, row, size, calls, times):
        """Seconds of calls by implementation, and notes about the time in layers."""
        seconds = timed_in_turn(calls, self.synchronize, self.runs, self.switch)
        between = {how: [] for how in calls}
        for _ in range(1 if self.tiny else 3):
            for how, call in calls.items():
                self.switch(how)
                between[how].append(in_layers(self.model, call, self.synchronize, True)[0])
        for how, call in calls.items():
            self.switch(how)
            spent, whole = in_layers(self.model, call, self.synchronize)
            one = self.results.of(how)
            one.setdefault(f"{row}_layers", {})[str(size)] = 1e3 * spent / times
            one.setdefault(f"{row}_share", {})[str(size)] = spent / whole
            one.setdefault(f"{row}_between", {})[str(size)] = 1e3 * statistics.median(between[how]) / times
        return seconds

    def prefill(self, hows, tokens):
        prompt = self.ids(1, tokens)
        call = lambda: self.model(prompt, use_cache=True, logits_to_keep=1)  # noqa: E731
        seconds = self.in_turn("prefill", tokens, dict.fromkeys(hows, call), 1)
        return {how: tokens / one for how, one in seconds.items()}

    def decode(self, hows, batch):
        step = self.ids(batch, 1)

        def steps_of(cache):
            def call():
                for _ in range(self.steps):
                    self.model(step, past_key_values=cache, use_cache=True)

            return call

        calls = {how: steps_of(self.prompted(how, batch)) for how in hows}
        # Whoever is the first to reach a length of keys is slow outside of the layers: a cache that is thrown away is.
        first = steps_of(self.prompted(hows[0], batch))
        for _ in range(self.runs + 5):
            first()
        seconds = self.in_turn("decode", batch, calls, self.steps)
        return {how: batch * self.steps / one for how, one in seconds.items()}

    def captured(self, hows, batch):
        def of(how):
            cache, step = self.prompted(how, batch, True), self.ids(batch, 1)
            return batch / replayed(lambda: self.model(step, past_key_values=cache, use_cache=True), STEPS, self.runs)

        return self.each(hows, of)

    def graph(self, hows, batch):
        import torch

        def of(how):
            torch._dynamo.reset()
            cache, step = self.prompted(how, batch, True), self.ids(batch, 1)
            one = torch.compile(lambda: self.model(step, past_key_values=cache, use_cache=True).logits, mode="reduce-overhead")

            def decode():
                for _ in range(STEPS):
                    torch.compiler.cudagraph_mark_step_begin()
                    one()

            decode()
            return batch * STEPS / timed(decode, self.synchronize, self.runs)

        return self.each(hows, of)

    def prefill_alone(self, hows, tokens):
        return self.each(hows, lambda how: self.alone(1, tokens, None))

    def decode_alone(self, hows, batch):
        return self.each(hows, lambda how: self.alone(batch, 1, self.prompted(how, batch)))

    def alone(self, batch, tokens, cache):
        import torch

        layer = layers_of(self.model)[0]
        made = torch.Generator(self.device).manual_seed(tokens)
        rows = torch.randn(batch, tokens, layer.hidden_size, generator=made, device=self.device, dtype=torch.bfloat16)
        inner = torch.randn(batch, tokens, layer.value_dim, generator=made, device=self.device, dtype=torch.bfloat16)

        def projections():
            for one in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a):
                one(rows)
            layer.out_proj(inner)

        times = 100 if tokens == 1 else 10
        whole = replayed(lambda: layer(rows, cache_params=cache), times, 9)
        return 1e6 * (whole - replayed(projections, times, 9))


def measure(given):
    """Measures rows of the implementations of one process."""
    hows, begin = given.child.split(","), time.monotonic()
    if "fla" not in hows:
        sys.modules["fla"] = None
    sys.modules["causal_conv1d"] = None
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    results = Results(given.json)
    about = {"torch": torch.__version__, "transformers": transformers.__version__,
             "layers": 4 if given.tiny else given.layers}
    if not given.tiny:
        about["device"] = torch.cuda.get_device_name()
    if "fla" in hows:
        try:
            import fla

            about["fla"] = getattr(fla, "__version__", "?")
        except ImportError as problem:
            print(f"fla: left out: {problem}", flush=True)
            hows.remove("fla")
    model = Model(given, results)
    print(f"{given.child} model made in {time.monotonic() - begin:.0f} s", flush=True)
    for row, size, those in rows_of(given, hows, results):
        left = given.budget - (time.monotonic() - begin)
        if left < LEAST[row]:
            print(f"{row} {size}: no time left, {left:.0f} s of {LEAST[row]}", flush=True)
            continue
        for how in those:
            results.of(how).update(about)
        # In turn, or one after the other, as after a failure: it is then known whose it is.
        todo = [those] if row in ("prefill", "decode") else [[how] for how in those]
        while todo:
            some, started = todo.pop(0), time.monotonic()
            try:
                with torch.no_grad():
                    found = getattr(model, row)(some, size)
                for how, value in found.items():
                    results.add(how, row, size, value, time.monotonic() - started)
            except Exception as problem:
                if len(some) > 1:
                    todo = [[how] for how in some]
                else:
                    results.leave_out(some[0], row, size, f"{type(problem).__name__}: {str(problem)[:300]}")
            if not given.tiny:
                torch.cuda.empty_cache()
    results.write()


def replayed(call, times, runs):
    """Seconds of a call as a CUDA graph, median over runs of `times` replays each."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        call()

    def replays():
        for _ in range(times):
            made.replay()

    return timed(replays, torch.cuda.synchronize, runs) / times


def table(results):
    """Prints all rows, implementations side by side, and compares logits."""
    import torch

    hows = [how for how in HOWS if how in results.found]
    paths = {how: f"{results.path}.{how}.logits" for how in hows}
    logits = {how: torch.load(path) for how, path in paths.items() if os.path.exists(path)}
    if "torch" in logits:
        exact = logits["torch"]
        for how, found in logits.items():
            one, rms = results.of(how), exact.pow(2).mean().sqrt()
            one["logits_rms"] = float((found - exact).pow(2).mean().sqrt() / rms)
            one["same_greatest"] = float((found.argmax(-1) == exact.argmax(-1)).double().mean())
        results.write()
    print(f"{'':36}" + "".join(f"{how:>14}" for how in hows))
    for name, unit in (("logits_rms", "rms of logits from torch's"), ("same_greatest", "same greatest logit")):
        values = [results.found[how].get(name) for how in hows]
        print(f"{unit:36}" + "".join(f"{'-' if x is None else format(x, '.2e' if 'rms' in name else '.2%'):>14}"
                                     for x in values))
    for name, unit in (("prefill_alone", "one layer alone, us, prefill"), ("decode_alone", "one layer alone, us, batch"),
                       ("prefill", "prefill tokens/s"), ("prefill_layers", "GDN layers, ms, prefill"),
                       ("prefill_share", "share of GDN layers, prefill"), ("prefill_between", "between projections, ms, prefill"),
                       ("decode", "decode tokens/s, batch"),
                       ("decode_layers", "GDN layers, ms a step, batch"), ("decode_share", "share of GDN layers, batch"),
                       ("decode_between", "between projections, ms, batch"),
                       ("captured", "captured tokens/s, batch"), ("graph", "compiled tokens/s, batch")):
        sizes = sorted({int(size) for how in hows for size in results.found[how].get(name, {})})
        for size in sizes:
            values = [results.found[how].get(name, {}).get(str(size)) for how in hows]
            shown = ["-" if x is None else f"{x:.3f}" if name.endswith(("share", "layers", "between")) else f"{x:,.1f}" for x in values]
            print(f"{f'{unit} {size}':36}" + "".join(f"{x:>14}" for x in shown))
    for how in hows:
        for what, why in results.found[how]["left out"].items():
            print(f"{how}: {what}: left out: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU and the simulator")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", default="transformers_models.json", help="file of results; its rows are not measured again")
    parser.add_argument("--only", default="", help="rows, HOW[:ROW[:SIZE]] with commas between them")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; rows that would not fit are left for another call")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    for part in filter(None, given.only.split(",")):
        names = part.split(":")
        if names[0] not in HOWS or len(names) > 1 and names[1] not in SIZES or len(names) > 3:
            parser.error(f"--only: {part!r}; it must be HOW[:ROW[:SIZE]], HOW one of {', '.join(HOWS)}, ROW one of "
                         f"{', '.join(SIZES)}")
    if given.child:
        measure(given)
        return 0
    begin, status = time.monotonic(), 0
    for hows in PROCESSES:
        left, names = given.budget - (time.monotonic() - begin), ",".join(hows)
        if not rows_of(given, hows, Results(given.json)) or left < min(LEAST.values()):
            continue
        command = [sys.executable, __file__, "--child", names, "--json", given.json, "--layers", str(given.layers), "--only",
                   given.only, "--budget", str(left)] + ["--tiny"] * given.tiny
        # Its warnings go to a file: the last line of it says what stopped it.
        with open(f"{given.json}.{names}.log", "w") as log:
            # Compilation, which a row's estimate cannot know, may not take the time of the rows after it.
            try:
                code = subprocess.run(command, stderr=log, timeout=left + 5 if given.budget < 1e9 else None).returncode
            except subprocess.TimeoutExpired:
                print(f"{names} stopped: the budget is spent", flush=True)
                continue
        if code:
            with open(f"{given.json}.{names}.log") as log:
                print(f"{names}: left out: {(log.read().strip().splitlines() or ['?'])[-1]}")
            status = 1
    table(Results(given.json))
    return status


if __name__ == "__main__":
    sys.exit(main())
