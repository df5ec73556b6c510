"""A model of Qwen3.5-35B-A3B's layer shapes with random bf16 weights in transformers: torch's code, FLA and deltawave.

    python3 benches/transformers_models.py [--layers 8] [--json FILE]      on an NVIDIA or AMD GPU
    python3 benches/transformers_models.py --tiny                          a moment, on the CPU and the simulator

Prints prefill tokens/s, decode tokens/s (eagerly and with torch.compile and CUDA graphs), the share of a prefill that Gated
DeltaNet layers take, and the rms of differences of logits from torch's code. Each implementation runs in a process of its
own, because transformers chooses FLA when it is imported. It needs torch and transformers, FLA for `fla`, and PYTHONPATH and
DELTAWAVE_C_LIBRARY for `deltawave`. Whatever cannot run is said, and left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HOWS = ("torch", "fla", "deltawave")


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


def share_of_layers(model, call, synchronize):
    """Share of a call's time that is spent in Gated DeltaNet layers, each waited for."""
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
    return sum(spent) / whole


def measure(how, tiny, layers, to):
    """Measures one implementation, and writes what was found to a file."""
    if how != "fla":
        sys.modules["fla"] = None
    sys.modules["causal_conv1d"] = None
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cpu" if tiny else "cuda"
    found = {"how": how, "torch": torch.__version__, "transformers": transformers.__version__, "prefill": {}, "decode": {},
             "graph": {}, "share": {}, "left out": {}}
    if how == "fla":
        import fla

        found["fla"] = getattr(fla, "__version__", "?")
    if how == "deltawave":
        import deltawave.transformers

        deltawave.transformers.enable(simulator=tiny)
    synchronize = (lambda: None) if tiny else torch.cuda.synchronize
    model = model_of(tiny, layers, device)
    vocabulary = model.config.vocab_size
    made = torch.Generator().manual_seed(2)
    runs = 1 if tiny else 5

    def rows(batch, tokens):
        return torch.randint(3, vocabulary, (batch, tokens), generator=made).to(device)

    with torch.no_grad():
        ids = rows(1, 100 if tiny else 1000)
        torch.save(model(ids, use_cache=False).logits.float().cpu(), to + ".logits")
        for tokens in (100,) if tiny else (2048, 8192, 32768):
            ids = rows(1, tokens)
            call = lambda: model(ids, use_cache=True, logits_to_keep=1)  # noqa: E731
            found["prefill"][tokens] = tokens / timed(call, synchronize, runs)
            found["share"][tokens] = share_of_layers(model, call, synchronize)
        for batch in (2,) if tiny else (1, 8, 32):
            length, steps = (10, 3) if tiny else (512, 32)
            ids = rows(batch, length)
            cache = model(ids, use_cache=True).past_key_values
            step = rows(batch, 1)

            def decode():
                for _ in range(steps):
                    model(step, past_key_values=cache, use_cache=True)

            found["decode"][batch] = batch * steps / timed(decode, synchronize, runs)
            if tiny:
                continue
            try:
                found["graph"][batch] = graph(model, step, length, steps, synchronize, runs)
            except Exception as problem:
                found["left out"][f"graph, batch {batch}"] = f"{type(problem).__name__}: {str(problem)[:200]}"
    if how == "deltawave":
        found["answered"] = dict(deltawave.transformers.answered)
    with open(to, "w") as file:
        json.dump(found, file)


def graph(model, step, length, steps, synchronize, runs):
    """Decode tokens/s of torch.compile with CUDA graphs, on a cache of fixed size."""
    import torch
    from transformers import StaticCache

    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=length + 8 * steps)
    model(step.repeat(1, length), past_key_values=cache, use_cache=True)
    one = torch.compile(lambda: model(step, past_key_values=cache, use_cache=True).logits, mode="reduce-overhead")

    def decode():
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            one()

    for _ in range(2):
        decode()
    return step.shape[0] * steps / timed(decode, synchronize, runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", default="transformers_models.json")
    parser.add_argument("--only", choices=HOWS)
    given = parser.parse_args()
    if given.only:
        return measure(given.only, given.tiny, given.layers, given.json)
    results, status = [], 0
    for how in HOWS:
        to = f"{given.json}.{how}"
        command = [sys.executable, __file__, "--only", how, "--json", to, "--layers", str(given.layers)]
        run = subprocess.run(command + ["--tiny"] * given.tiny, capture_output=True, text=True, env=os.environ)
        if run.returncode:
            print(f"{how}: left out: {(run.stderr.strip().splitlines() or ['?'])[-1]}")
            status |= how != "fla"
            continue
        with open(to) as file:
            results.append(json.load(file))
    import torch

    logits = {r["how"]: torch.load(f"{given.json}.{r['how']}.logits") for r in results}
    for one in results:
        difference = logits[one["how"]] - logits.get("torch", logits[one["how"]])
        one["logits"] = float(difference.pow(2).mean().sqrt() / logits[one["how"]].pow(2).mean().sqrt())
        print(f"{one['how']:10} logits differ by {one['logits']:.1e} of their rms from torch's")
        for name, unit in (("prefill", "tokens/s of a prompt of"), ("share", "of a prefill in GDN layers, tokens"),
                           ("decode", "tokens/s, batch"), ("graph", "tokens/s compiled with graphs, batch")):
            for size, value in one[name].items():
                print(f"    {value:12.3f} {unit} {size}")
        for what, why in one["left out"].items():
            print(f"    left out: {what}: {why}")
    with open(given.json, "w") as file:
        json.dump(results, file, indent=1)
    for how in HOWS:
        for name in (f"{given.json}.{how}", f"{given.json}.{how}.logits"):
            if os.path.exists(name):
                os.remove(name)
    return status


if __name__ == "__main__":
    sys.exit(main())
