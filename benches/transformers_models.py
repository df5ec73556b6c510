"""A model of Qwen3.5-35B-A3B's layer shapes with random bf16 weights in transformers: torch's code, FLA and deltawave.

    python3 benches/transformers_models.py [--layers 8] [--json FILE]      on an NVIDIA or AMD GPU
    python3 benches/transformers_models.py --budget 520                    for at most about 520 seconds; again: goes on
    python3 benches/transformers_models.py --only fla:prefill,deltawave    these rows alone
    python3 benches/transformers_models.py --tiny                          a moment, on the CPU and the simulator

Rows, by name and size: `logits` (rms of differences from torch's code, and how often the greatest is the same), `prefill`
(tokens/s), `decode` (tokens/s, launched one by one), `captured` (the same, as a CUDA graph of a step), `graph` (torch.compile
with CUDA graphs). `prefill_layers` and `decode_layers` are milliseconds in Gated DeltaNet layers, each waited for, of one
prefill and of one step, and `prefill_share` and `decode_share` their part of the whole.

FILE is written after each row, and rows that are in it are not measured again: delete it to begin anew. Each implementation
runs in a process of its own, because transformers chooses FLA when it is imported. It needs torch and transformers, FLA for
`fla`, and PYTHONPATH and DELTAWAVE_C_LIBRARY for `deltawave`. Whatever cannot run is said, and left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

# In this order, so that a short budget gives the rows that are compared first.
HOWS = ("deltawave", "fla", "torch")
SIZES = {"logits": (1000,), "prefill": (2048, 8192, 32768), "decode": (1, 8, 32), "captured": (1, 8, 32),
         "graph": (1, 8, 32)}
TINY = {"logits": (100,), "prefill": (100,), "decode": (2,)}
# A row is begun only if this many seconds are left.
LEAST = {"logits": 20, "prefill": 15, "decode": 20, "captured": 20, "graph": 90}
PROMPT, STEPS = 512, 32


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
    call()
    found = []
    for _ in range(runs):
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def in_layers(model, call, synchronize):
    """Seconds of a call that are spent in Gated DeltaNet layers, each waited for, and seconds of the call."""
    spent, begun = [], []

    def before(*_):
        synchronize()
        begun.append(time.perf_counter())

    def after(*_):
        synchronize()
        spent.append(time.perf_counter() - begun.pop())

    layers = [x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet")]
    hooks = [h for x in layers for h in (x.register_forward_pre_hook(before), x.register_forward_hook(after))]
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

    def add(self, how, row, size, value):
        self.of(how).setdefault(row, {})[str(size)] = value
        self.write()
        print(f"{how:10} {row} {size}: {value if isinstance(value, str) else round(value, 4)}", flush=True)

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


def rows_of(given, how, results):
    """Rows that are still to be measured."""
    sizes = TINY if given.tiny else SIZES
    return [(row, size) for row in sizes for size in sizes[row]
            if wanted(given.only, how, row, size) and not results.has(how, row, size)]


def measure(given):
    """Measures rows of one implementation."""
    how, tiny, begin = given.child, given.tiny, time.monotonic()
    if how != "fla":
        sys.modules["fla"] = None
    sys.modules["causal_conv1d"] = None
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cpu" if tiny else "cuda"
    results = Results(given.json)
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "layers": 4 if tiny else given.layers}
    if how == "fla":
        import fla

        about["fla"] = getattr(fla, "__version__", "?")
    if how == "deltawave":
        import deltawave.transformers

        deltawave.transformers.enable(simulator=tiny)
    if not tiny:
        about["device"] = torch.cuda.get_device_name()
    results.of(how).update(about)
    synchronize = (lambda: None) if tiny else torch.cuda.synchronize
    model = model_of(tiny, given.layers, device)
    vocabulary, runs = model.config.vocab_size, 1 if tiny else 5
    length, steps = (10, 3) if tiny else (PROMPT, STEPS)
    print(f"{how:10} model made in {time.monotonic() - begin:.0f} s", flush=True)

    def ids(batch, tokens):
        made = torch.Generator().manual_seed(batch * 100003 + tokens)
        return torch.randint(3, vocabulary, (batch, tokens), generator=made).to(device)

    def logits(tokens):
        torch.save(model(ids(1, tokens), use_cache=False).logits.float().cpu(), f"{given.json}.{how}.logits")
        return "saved"

    def note_layers(row, size, call, times):
        spent, whole = in_layers(model, call, synchronize)
        results.of(how).setdefault(f"{row}_layers", {})[str(size)] = 1e3 * spent / times
        results.of(how).setdefault(f"{row}_share", {})[str(size)] = spent / whole

    def prefill(tokens):
        prompt = ids(1, tokens)
        call = lambda: model(prompt, use_cache=True, logits_to_keep=1)  # noqa: E731
        speed = tokens / timed(call, synchronize, runs)
        note_layers("prefill", tokens, call, 1)
        return speed

    def decode(batch):
        cache, step = model(ids(batch, length), use_cache=True).past_key_values, ids(batch, 1)

        def call():
            for _ in range(steps):
                model(step, past_key_values=cache, use_cache=True)

        speed = batch * steps / timed(call, synchronize, runs)
        note_layers("decode", batch, call, steps)
        return speed

    measures = {"logits": logits, "prefill": prefill, "decode": decode,
                "captured": lambda batch: captured(model, ids(batch, length), ids(batch, 1), synchronize, runs),
                "graph": lambda batch: graph(model, ids(batch, length), ids(batch, 1), synchronize, runs)}
    with torch.no_grad():
        for row, size in rows_of(given, how, results):
            left = given.budget - (time.monotonic() - begin)
            if left < LEAST[row]:
                print(f"{how:10} {row} {size}: no time left, {left:.0f} s of {LEAST[row]}", flush=True)
                continue
            try:
                results.add(how, row, size, measures[row](size))
            except Exception as problem:
                results.leave_out(how, row, size, f"{type(problem).__name__}: {str(problem)[:300]}")
            if not tiny:
                torch.cuda.empty_cache()
    if how == "deltawave":
        answered = results.of(how).setdefault("answered", {})
        for name, count in deltawave.transformers.answered.items():
            answered[name] = answered.get(name, 0) + count
    results.write()


def static_cache(model, prompt):
    """A cache of fixed size that holds a prompt."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + 12 * STEPS)
    model(prompt, past_key_values=cache, use_cache=True)
    return cache


def captured(model, prompt, step, synchronize, runs):
    """Decode tokens/s of a CUDA graph of one step, without torch.compile."""
    import torch

    cache = static_cache(model, prompt)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(step, past_key_values=cache, use_cache=True)
    torch.cuda.current_stream().wait_stream(side)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        model(step, past_key_values=cache, use_cache=True)

    def decode():
        for _ in range(STEPS):
            made.replay()

    return step.shape[0] * STEPS / timed(decode, synchronize, runs)


def graph(model, prompt, step, synchronize, runs):
    """Decode tokens/s of torch.compile with CUDA graphs."""
    import torch

    torch._dynamo.reset()
    cache = static_cache(model, prompt)
    one = torch.compile(lambda: model(step, past_key_values=cache, use_cache=True).logits, mode="reduce-overhead")

    def decode():
        for _ in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            one()

    decode()
    return step.shape[0] * STEPS / timed(decode, synchronize, runs)


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
    for name, unit in (("prefill", "prefill tokens/s"), ("prefill_layers", "GDN layers, ms, prefill"),
                       ("prefill_share", "share of GDN layers, prefill"), ("decode", "decode tokens/s, batch"),
                       ("decode_layers", "GDN layers, ms a step, batch"), ("decode_share", "share of GDN layers, batch"),
                       ("captured", "captured tokens/s, batch"), ("graph", "compiled tokens/s, batch")):
        sizes = sorted({int(size) for how in hows for size in results.found[how].get(name, {})})
        for size in sizes:
            values = [results.found[how].get(name, {}).get(str(size)) for how in hows]
            shown = ["-" if x is None else f"{x:.3f}" if name.endswith(("share", "layers")) else f"{x:,.1f}" for x in values]
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
    parser.add_argument("--child", choices=HOWS, help=argparse.SUPPRESS)
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
    for how in HOWS:
        left = given.budget - (time.monotonic() - begin)
        if not rows_of(given, how, Results(given.json)) or left < min(LEAST.values()):
            continue
        command = [sys.executable, __file__, "--child", how, "--json", given.json, "--layers", str(given.layers), "--only",
                   given.only, "--budget", str(left)] + ["--tiny"] * given.tiny
        # Its warnings go to a file: the last line of it says what stopped it.
        with open(f"{given.json}.{how}.log", "w") as log:
            # Compilation, which a row's estimate cannot know, may not take the time of the rows after it.
            try:
                code = subprocess.run(command, stderr=log, timeout=left + 5 if given.budget < 1e9 else None).returncode
            except subprocess.TimeoutExpired:
                print(f"{how:10} stopped: the budget is spent", flush=True)
                continue
        if code:
            with open(f"{given.json}.{how}.log") as log:
                print(f"{how}: left out: {(log.read().strip().splitlines() or ['?'])[-1]}")
            status |= how != "fla"
    table(Results(given.json))
    return status


if __name__ == "__main__":
    sys.exit(main())
