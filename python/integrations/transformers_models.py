"""Tiny Qwen3-Next, Qwen3.5 and OLMo-Hybrid models of transformers with random weights, on deltawave's simulator.

    transformers_models.py [SEEDS]

For every model, head shape, dtype and seed: logits of a prefill, of a batch with padding, and of a cached decode, by
transformers' torch code and by deltawave (whole layers, and with `layers=False` function by function), against the same
weights in float64. The error of deltawave's logits (rms, over all seeds) is at most 1.1 times that of torch's code. Greedy tokens are equal wherever the margin of the best token exceeds four
times the largest difference of logits.
"""

import sys
import time

sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # type: ignore[assignment]  # transformers' own torch code

import torch
import transformers
from transformers import (OlmoHybridConfig, OlmoHybridForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig,
                          Qwen3NextForCausalLM)

import deltawave.transformers

# HK, HV, K, V
SHAPES = ((2, 4, 32, 32), (2, 2, 128, 128), (1, 4, 64, 64), (2, 4, 96, 192))
DTYPES = (torch.bfloat16, torch.float16)
SEEDS = 5
BAR = 1.1
VOCABULARY, TOKENS, NEW = 256, 100, 12


def config_of(kind: str, heads: tuple) -> tuple:
    key_heads, value_heads, key_dim, value_dim = heads
    common = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
                  linear_key_head_dim=key_dim, linear_value_head_dim=value_dim, linear_conv_kernel_dim=4,
                  max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "qwen3_next":
        return Qwen3NextForCausalLM, Qwen3NextConfig(
            **common, head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            # All experts for every token: a choice would be decided by rounding, and hide the errors to be compared.
            num_experts=2, num_experts_per_tok=2)
    if kind == "qwen3_5":
        return Qwen3_5ForCausalLM, Qwen3_5TextConfig(**common, head_dim=16)
    return OlmoHybridForCausalLM, OlmoHybridConfig(**common)


def weights(model: torch.nn.Module, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 1.0 if "lm_head" in name or "embed" in name else 0.08
                parameter.copy_(scale * torch.randn(parameter.shape, generator=made))


def run(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> dict:
    """Logits of real tokens: a prefill, a batch with padding on the left, and a cached decode; greedy tokens."""
    with torch.no_grad():
        found = {"prefill": model(ids).logits, "padded": model(ids, attention_mask=mask).logits[mask.bool()]}
        first = model(ids[:, :TOKENS - 3], use_cache=True)
        steps, cache = [], first.past_key_values
        for t in range(TOKENS - 3, TOKENS):
            step = model(ids[:, t:t + 1], past_key_values=cache, use_cache=True)
            steps.append(step.logits)
            cache = step.past_key_values
        found["decode"] = torch.cat(steps, 1)
        tokens = model.generate(ids[:1], max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, TOKENS:]
    return {**{name: x.double() for name, x in found.items()}, "tokens": tokens}


def squares(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found - exact) ** 2).mean())


NAMES = ("prefill", "padded", "decode")
# What deltawave replaces: the argument `layers` of `enable`, and what must have answered then.
WAYS = {"layers": (True, {"layer"}), "functions": (False, {*deltawave.transformers.FUNCTIONS, "RMSNormGated"})}


def by_deltawave(way: str, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> dict:
    """`run` with deltawave, which must have answered everything."""
    layers, expected = WAYS[way]
    answered = deltawave.transformers.answered
    answered.clear()
    deltawave.transformers.enable(simulator=True, layers=layers)
    try:
        found = run(model, ids, mask)
    finally:
        deltawave.transformers.disable()
    assert set(answered) == expected, f"deltawave answered {answered}, not all of {expected}"
    assert not deltawave.transformers._said, deltawave.transformers._said
    return found


def check(kind: str, heads: tuple, dtype: torch.dtype, seeds: int) -> str:
    """Runs all seeds of one model. Returns lines of the report, or raises AssertionError."""
    theirs = dict.fromkeys(NAMES, 0.0)
    ours = {way: dict.fromkeys(NAMES, 0.0) for way in WAYS}
    equal = dict.fromkeys(WAYS, 0)
    for seed in range(seeds):
        made, config = config_of(kind, heads)
        torch.manual_seed(seed)
        model = made(config).eval().to(dtype)
        weights(model, seed)
        exact = made(config).eval().double()
        if kind == "qwen3_next":
            exact.set_experts_implementation("eager")  # grouped products have no float64
        exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
        ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[1, :37] = 0
        wanted, torch_code = run(exact, ids, mask), run(model, ids, mask)
        with torch.no_grad():
            sequence = torch.cat([ids[0], torch_code["tokens"]])[None]
            top = model(sequence).logits[0, TOKENS - 1:-1].double().topk(2).values
        for name in NAMES:
            theirs[name] += squares(torch_code[name], wanted[name])
        for way in WAYS:
            found = by_deltawave(way, model, ids, mask)
            for name in NAMES:
                ours[way][name] += squares(found[name], wanted[name])
            # Greedy tokens, up to the first that a rounding may decide.
            difference = max(float((found[n] - torch_code[n]).abs().max()) for n in NAMES)
            for t in range(NEW):
                if top[t, 0] - top[t, 1] <= 4 * difference:
                    break
                assert torch_code["tokens"][t] == found["tokens"][t], f"{kind} {heads} {dtype} {way} seed {seed}: token {t}"
                equal[way] += 1
    lines, worst = [], 0.0
    for way in WAYS:
        ratios = {name: (ours[way][name] / theirs[name]) ** 0.5 for name in NAMES}
        worst = max(worst, *ratios.values())
        lines.append(f"{kind:12} HK, HV, K, V {heads!s:18} {str(dtype)[6:]:9} {way:10} error over torch's: " + ", ".join(
            f"{name} {ratio:.3f}" for name, ratio in ratios.items()) + f"; {equal[way]} of {seeds * NEW} tokens compared, equal")
    assert worst <= BAR, "\n".join([*lines, f"above {BAR}"])
    return "\n".join(lines)


def compiled() -> str:
    """torch.compile takes a layer whole, and gives the bits of the layer as it is. Returns a line of the report."""
    made, config = config_of("qwen3_5", SHAPES[0])
    model = made(config).eval().to(torch.bfloat16)
    weights(model, 0)
    layer = next(x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet"))
    rows = torch.randn(2, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    deltawave.transformers.enable(simulator=True)
    try:
        with torch.no_grad():
            same = torch.equal(layer(rows), torch.compile(layer, backend="aot_eager", fullgraph=True)(rows))
    finally:
        deltawave.transformers.disable()
    assert same, "torch.compile changes a layer's output"
    return "torch.compile(fullgraph=True) of a layer: the same bits"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    begin, failed = time.time(), 0
    print(compiled(), flush=True)
    for kind in ("qwen3_next", "qwen3_5", "olmo_hybrid"):
        for heads in SHAPES:
            for dtype in DTYPES:
                try:
                    print(check(kind, heads, dtype, seeds), flush=True)
                except AssertionError as problem:
                    failed += 1
                    print(f"FAILED: {problem}", flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {failed} failed, {time.time() - begin:.0f} s")
    sys.exit(failed != 0)
