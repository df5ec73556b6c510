"""Tiny Qwen3-Next, Qwen3.5 and OLMo-Hybrid models of transformers with random weights, on deltawave's simulator.

    transformers_models.py [SEEDS]

For every model, head shape, dtype and seed: logits of a prefill, of a batch with padding, and of a cached decode, by
transformers' torch code and by deltawave, against the same weights in float64. The error of deltawave's logits (rms, over all
seeds) is at most 1.1 times that of torch's code. Greedy tokens are equal wherever the margin of the best token exceeds four
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


def check(kind: str, heads: tuple, dtype: torch.dtype, seeds: int) -> str:
    """Runs all seeds of one model. Returns a line of the report, or raises AssertionError."""
    names = ("prefill", "padded", "decode")
    theirs, ours = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    equal = compared = 0
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
        deltawave.transformers.answered.clear()
        deltawave.transformers.enable(simulator=True)
        try:
            found = run(model, ids, mask)
        finally:
            deltawave.transformers.disable()
        answered = deltawave.transformers.answered
        functions = {*deltawave.transformers.FUNCTIONS, "RMSNormGated"}
        assert set(answered) == functions, f"deltawave answered {answered}, not all of {functions}"
        assert not deltawave.transformers._said, deltawave.transformers._said
        for name in names:
            theirs[name] += squares(torch_code[name], wanted[name])
            ours[name] += squares(found[name], wanted[name])
        # Greedy tokens, up to the first that a rounding may decide.
        difference = max(float((found[n] - torch_code[n]).abs().max()) for n in names)
        with torch.no_grad():
            sequence = torch.cat([ids[0], torch_code["tokens"]])[None]
            logits = model(sequence).logits[0, TOKENS - 1:-1].double()
        top = logits.topk(2).values
        clear = (top[:, 0] - top[:, 1]) > 4 * difference
        for t in range(NEW):
            if not clear[t]:
                break
            assert torch_code["tokens"][t] == found["tokens"][t], f"{kind} {heads} {dtype} seed {seed}: token {t}"
            equal += 1
        compared += NEW
    ratios = {name: (ours[name] / theirs[name]) ** 0.5 for name in names}
    line = f"{kind:12} HK, HV, K, V {heads!s:18} {str(dtype)[6:]:9} error over torch's: " + ", ".join(
        f"{name} {ratio:.3f}" for name, ratio in ratios.items()) + f"; {equal} of {compared} tokens compared, equal"
    assert max(ratios.values()) <= BAR, f"{line}: above {BAR}"
    return line


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
