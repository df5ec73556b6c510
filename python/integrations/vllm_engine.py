"""Runs a tiny Qwen3-Next or OLMo-Hybrid in vLLM's engine on its CPU build, with vLLM's kernels or with deltawave on the
simulator.

    vllm_engine.py model DIR SEED [KIND]       writes the model
    vllm_engine.py run DIR RESULT HOW          writes tokens and logprobs as JSON
    vllm_engine.py exact DIR RESULT...         adds transformers' logprobs of the same tokens, in float64 and bf16, to each RESULT

KIND: `next`, `cycles` (a Qwen3-Next whose tokens tend to follow each other in cycles, so that drafts are accepted), `olmo`.
HOW: `vllm` (its own kernels), `layer` (deltawave's), `prefixes` (deltawave's, with prefix caching), `drafts` and `vllm-drafts`
(with speculative decoding by n-grams). run.py leaves the last one out: vLLM 0.32's CPU build fails there with its own kernels.
It has none for OLMo-Hybrid.
"""

import json
import os
import random
import sys

LENGTHS = (100, 37, 5, 150)
NEW = 16
VOCABULARY = 256
# Tokens of a cycle, and how much the next one is preferred.
CYCLE, PREFERENCE = 4, 0.33


def olmo():
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    return OlmoHybridForCausalLM(OlmoHybridConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=96,
        linear_value_head_dim=192, linear_conv_kernel_dim=4, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
        pad_token_id=0))


def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
        # All experts for every token: a choice would be decided by rounding, and hide the errors to be compared.
        num_experts=2, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return Qwen3NextForCausalLM(config)


def model(folder: str, seed: str, kind: str = "next") -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    made = (olmo if kind == "olmo" else qwen3_next)().eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if "lm_head" in name or "embed" in name else 0.06)
        if kind == "cycles":
            embedding = made.get_input_embeddings().weight.unflatten(0, (-1, CYCLE))
            made.get_output_embeddings().weight.add_(embedding.roll(1, 1).flatten(0, 1), alpha=PREFERENCE)
    made.save_pretrained(folder)
    if kind == "olmo":
        as_vllm_loads(os.path.join(folder, "model.safetensors"))


def as_vllm_loads(path: str) -> None:
    """Names as vLLM's: transformers saves those of the first checkpoints. It also cuts the convolution into thirds, though
    it has other numbers of channels for q and k than for v."""
    import torch
    from safetensors.torch import load_file, save_file

    old = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    tensors = {".".join(old.get(part, part) for part in name.split(".")): x for name, x in load_file(path).items()}
    for name in [name for name in tensors if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        channels = [len(tensors[n.replace("conv1d", "proj")]) for n in names]
        parts = torch.cat([tensors[n] for n in names]).split(channels)
        tensors.update(zip(names, (part.clone() for part in parts)))
    save_file(tensors, path, {"format": "pt"})


def prompts() -> list:
    random.seed(0)
    shared = [random.randrange(3, VOCABULARY) for _ in range(max(LENGTHS))]
    # The last prompt begins with the first: prefix caching has something to find.
    made = [[random.randrange(3, VOCABULARY) for _ in range(n)] for n in LENGTHS[:-1]]
    return [shared[:LENGTHS[0]], *made[1:], shared]


def run(folder: str, result: str, how: str) -> None:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1",
                      VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
                      DELTAWAVE_VLLM="0" if how.startswith("vllm") else "layer")
    import deltawave.vllm

    deltawave.vllm.register()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

    # Its Triton kernels do not run here, and the CPU build's Triton has no allocator to set. Its loader of convolutions is
    # not told which part a weight is.
    olmo_gdn_linear_attn.set_triton_allocator = lambda device: None
    make_loader = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader

    def of_part(*arguments):
        load = make_loader(*arguments)
        return lambda parameter, weight: load(parameter, weight, weight.shard_id)

    olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = of_part
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2,
                                     "prompt_lookup_min": 1}} if how.endswith("drafts") else {}
    engine = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=512,
                 max_num_seqs=4, max_num_batched_tokens=128, enable_prefix_caching=how == "prefixes",
                 num_gpu_blocks_override=64, **drafts)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0)
    found, batches = [], []
    run_step = deltawave.vllm.run_step

    def recorded(layer, parts, metadata, *tensors):
        counts = metadata.num_accepted_tokens if metadata.num_spec_decodes else None
        batches.append([metadata.num_decodes, metadata.num_prefills, metadata.num_spec_decodes,
                        metadata.num_spec_decode_tokens,
                        0 if counts is None else int(counts[:metadata.num_spec_decodes].max())])
        run_step(layer, parts, metadata, *tensors)

    deltawave.vllm.run_step = recorded
    for _ in range(2 if how == "prefixes" else 1):
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts()], sampling)
        found += [{"prompt": list(o.prompt_token_ids), "tokens": list(o.outputs[0].token_ids),
                   "logprobs": [next(iter(step.values())).logprob for step in o.outputs[0].logprobs]} for o in outputs]
    steps = {}
    if not how.startswith("vllm"):
        from vllm.model_executor.custom_op import op_registry_oot

        kinds = [op_registry_oot[f"{name}GatedDeltaNetAttention"].steps for name in ("Qwen", "OlmoHybrid")]
        steps = {who: sum(kind[who] for kind in kinds) for who in kinds[0]}
    with open(result, "w") as to:
        json.dump({"how": how, "steps": steps, "batches": batches, "sequences": found}, to)


def exact(folder: str, *results: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    made, rounded = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
                     for dtype in (torch.float64, torch.bfloat16))
    for result in results:
        with open(result) as source:
            data = json.load(source)
        for one in data["sequences"]:
            ids = torch.tensor([one["prompt"] + one["tokens"]])
            with torch.no_grad():
                logits = made(ids).logits[0, len(one["prompt"]) - 1:-1].double()
                other = rounded(ids).logits[0, len(one["prompt"]) - 1:-1].double()
            # In float64, and by transformers' own code in bf16.
            for name, found in (("exact", logits), ("bfloat16", other)):
                one[name] = found.log_softmax(-1).gather(1, torch.tensor(one["tokens"])[:, None])[:, 0].tolist()
            top = logits.topk(2).values
            one["margins"] = (top[:, 0] - top[:, 1]).tolist()
            one["best"] = logits.argmax(-1).tolist()
        with open(result, "w") as to:
            json.dump(data, to)


if __name__ == "__main__":
    if sys.argv[1] != "run":
        sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # transformers' own code, in any precision
    {"model": model, "run": run, "exact": exact}[sys.argv[1]](*sys.argv[2:])
