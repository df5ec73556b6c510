"""Runs a tiny Qwen3-Next in vLLM's engine on its CPU build, with vLLM's kernels or with deltawave on the simulator.

    vllm_engine.py model DIR SEED              writes the model
    vllm_engine.py run DIR RESULT HOW          writes tokens and logprobs as JSON
    vllm_engine.py exact DIR RESULT...         adds float64 logprobs of the same tokens to each RESULT

HOW: `vllm` (its own kernels), `layer` (deltawave's), `prefixes` (deltawave's, with prefix caching), `drafts` and `vllm-drafts`
(with speculative decoding by n-grams). run.py leaves the last two out: vLLM 0.32's CPU build gives wrong logprobs with its own
kernels there.
"""

import json
import os
import random
import sys

LENGTHS = (100, 37, 5, 150)
NEW = 16
VOCABULARY = 256


def model(folder: str, seed: str) -> None:
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.set_num_threads(1)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
        # All experts for every token: a choice would be decided by rounding, and hide the errors to be compared.
        num_experts=2, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(int(seed))
    made = Qwen3NextForCausalLM(config).eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if "lm_head" in name or "embed" in name else 0.06)
    made.save_pretrained(folder)


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

    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2,
                                     "prompt_lookup_min": 1}} if how.endswith("drafts") else {}
    engine = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=512,
                 max_num_seqs=4, max_num_batched_tokens=128, enable_prefix_caching=how == "prefixes",
                 num_gpu_blocks_override=64, **drafts)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for _ in range(2 if how == "prefixes" else 1):
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts()], sampling)
        found += [{"prompt": list(o.prompt_token_ids), "tokens": list(o.outputs[0].token_ids),
                   "logprobs": [next(iter(step.values())).logprob for step in o.outputs[0].logprobs]} for o in outputs]
    steps = {}
    if not how.startswith("vllm"):
        from vllm.model_executor.custom_op import op_registry_oot

        steps = op_registry_oot["QwenGatedDeltaNetAttention"].steps
    with open(result, "w") as to:
        json.dump({"how": how, "steps": steps, "sequences": found}, to)


def exact(folder: str, *results: str) -> None:
    import torch
    from transformers import Qwen3NextForCausalLM

    torch.set_num_threads(1)
    made = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    for result in results:
        with open(result) as source:
            data = json.load(source)
        for one in data["sequences"]:
            ids = torch.tensor([one["prompt"] + one["tokens"]])
            with torch.no_grad():
                logits = made(ids).logits[0, len(one["prompt"]) - 1:-1].double()
            logprobs = logits.log_softmax(-1)
            one["exact"] = logprobs.gather(1, torch.tensor(one["tokens"])[:, None])[:, 0].tolist()
            top = logits.topk(2).values
            one["margins"] = (top[:, 0] - top[:, 1]).tolist()
            one["best"] = logits.argmax(-1).tolist()
        with open(result, "w") as to:
            json.dump(data, to)


if __name__ == "__main__":
    if sys.argv[1] != "run":
        sys.modules["fla"] = sys.modules["causal_conv1d"] = None  # transformers' own code, in any precision
    {"model": model, "run": run, "exact": exact}[sys.argv[1]](*sys.argv[2:])
