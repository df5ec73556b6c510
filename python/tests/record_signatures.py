"""Writes signatures.json: parameters of the functions and methods that this package's adapters stand in for, fields of the
classes that they read, and releases.

    python -m tests.record_signatures fla=... causal_conv1d=... transformers=... vllm=... sglang=...

Each NAME=FOLDER is a folder with the unpacked package; packages that are not named keep their records. Nothing is imported:
signatures are read from the sources.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Dict, List, Optional

FILE = Path(__file__).with_name("signatures.json")
# Fields that the adapters read.
FIELDS = {"GDNAttentionMetadata": [
    "num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_spec_decodes", "num_spec_decode_tokens",
    "num_actual_tokens", "checkpoint", "has_initial_state", "spec_query_start_loc", "non_spec_query_start_loc",
    "spec_state_indices_tensor", "non_spec_state_indices_tensor", "spec_sequence_masks", "spec_sequence_masks_cpu",
    "spec_token_indx", "non_spec_token_indx", "num_accepted_tokens"]}
# Package, releases, file, and functions, methods or classes.
QWEN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
LINEAR = "sglang/srt/layers/attention/linear"
WANTED = {
    "fla": ("fla-core 0.6.0", {
        "fla/ops/gated_delta_rule/chunk.py": ["chunk_gated_delta_rule"],
        "fla/ops/gated_delta_rule/fused_recurrent.py": ["fused_recurrent_gated_delta_rule"],
        "fla/ops/gated_delta_rule/gate.py": ["fused_gdn_gate"],
        "fla/ops/gated_delta_rule/backends/flash_qla.py": ["FlashQLABackend.chunk_gated_delta_rule_verifier"],
        "fla/backends.py": ["register", "BaseBackend.verify"]}),
    "causal_conv1d": ("causal-conv1d 1.7.0", {
        "causal_conv1d/causal_conv1d_interface.py": ["causal_conv1d_fn", "causal_conv1d_update"]}),
    "transformers": ("transformers 5.23.0", {
        f"transformers/models/{name}/modeling_{name}.py": [
            "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update",
            f"{prefix}RMSNormGated.forward"]
        for name, prefix in (("qwen3_next", "Qwen3Next"), ("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"),
                             ("olmo_hybrid", "OlmoHybrid"))}),
    "vllm": ("vllm 0.32.0 0.33.0", {
        QWEN: ["ChunkGatedDeltaRule.forward_native", "QwenGatedDeltaNetAttention._forward_core",
               "QwenGatedDeltaNetAttention._forward_core_rocm", "QwenGatedDeltaNetAttention.split_ba",
               "QwenGatedDeltaNetAttention.prepare_gdn_attention_core_inputs", "qwen_gdn_attention_core"],
        "vllm/model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py": [
            "OlmoHybridGatedDeltaNetAttention._full_forward", "OlmoHybridGatedDeltaNetAttention._forward_core"],
        "vllm/v1/attention/backends/gdn_attn.py": ["GDNAttentionMetadata"],
        "vllm/model_executor/custom_op.py": ["PluggableLayer.register_oot", "CustomOp.register_oot"]}),
    "sglang": ("sglang 0.5.23", {
        f"{LINEAR}/kernels/kernel_backend.py": [f"LinearAttnKernelBase.{name}"
                                                for name in ("decode", "extend", "target_verify")],
        f"{LINEAR}/kernels/gdn_triton.py": ["TritonGDNKernel.packed_decode", "TritonGDNKernel.target_verify"],
        f"{LINEAR}/gdn_backend.py": ["GDNKernelDispatcher.__init__"]}),
}


def parameters(function: ast.FunctionDef) -> List[List[Optional[str]]]:
    """Name, kind and default (source, or None) of every parameter."""
    given, found = function.args, []
    positional = given.posonlyargs + given.args
    defaults: list = [None] * (len(positional) - len(given.defaults)) + given.defaults
    for argument, default in zip(positional, defaults):
        found.append([argument.arg, "positional", None if default is None else ast.unparse(default)])
    if given.vararg:
        found.append([given.vararg.arg, "*", None])
    for argument, default in zip(given.kwonlyargs, given.kw_defaults):
        found.append([argument.arg, "keyword", None if default is None else ast.unparse(default)])
    if given.kwarg:
        found.append([given.kwarg.arg, "**", None])
    return [one for one in found if one[0] not in ("self", "cls")]


def fields(kind: ast.ClassDef, names: List[str]) -> List[List[Optional[str]]]:
    """Name, kind and default of the fields of a dataclass that `names` has, in the order of `names`."""
    given = {x.target.id: x.value for x in kind.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    return [[name, "field", None if given[name] is None else ast.unparse(given[name])] for name in names if name in given]


def signatures(source: str, names: List[str]) -> Dict[str, List[List[Optional[str]]]]:
    """Parameters by name, of functions and `Class.method`s in a file's text, and fields of classes."""
    tree, found = ast.parse(source), {}
    for name in names:
        scope: list = tree.body
        for part in name.split("."):
            node = next(x for x in scope if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name == part)
            scope = node.body
        found[name] = parameters(node) if isinstance(node, ast.FunctionDef) else fields(node, FIELDS[name])
    return found


def of_package(name: str, folder: Path) -> Dict[str, Dict[str, List[List[Optional[str]]]]]:
    """Signatures of a package's files."""
    return {file: signatures((folder / file).read_text(), names) for file, names in WANTED[name][1].items()}


if __name__ == "__main__":
    folders = dict(argument.split("=", 1) for argument in sys.argv[1:])
    recorded = json.loads(FILE.read_text())
    recorded.update({name: {"release": WANTED[name][0], "files": of_package(name, Path(folder))}
                     for name, folder in folders.items()})
    lines = json.dumps(recorded, indent=1)
    FILE.write_text(lines + "\n")
