"""Writes signatures.json: parameters of the functions and methods that this package's adapters stand in for, and releases.

    python -m tests.record_signatures fla=... causal_conv1d=... transformers=... vllm=... sglang=...

Each NAME=FOLDER is a folder with the unpacked package. Nothing is imported: signatures are read from the sources.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Dict, List, Optional

FILE = Path(__file__).with_name("signatures.json")
# Package, release, file, and functions or methods.
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
    "vllm": ("vllm 0.32.0", {
        QWEN: ["ChunkGatedDeltaRule.forward_native", "QwenGatedDeltaNetAttention._forward_core",
               "QwenGatedDeltaNetAttention._forward_core_rocm", "QwenGatedDeltaNetAttention.split_ba",
               "QwenGatedDeltaNetAttention.prepare_gdn_attention_core_inputs", "qwen_gdn_attention_core"],
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


def signatures(source: str, names: List[str]) -> Dict[str, List[List[Optional[str]]]]:
    """Parameters by name, of functions and `Class.method`s in a file's text."""
    tree, found = ast.parse(source), {}
    for name in names:
        scope: list = tree.body
        for part in name.split("."):
            node = next(x for x in scope if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name == part)
            scope = node.body
        assert isinstance(node, ast.FunctionDef), name
        found[name] = parameters(node)
    return found


def of_package(name: str, folder: Path) -> Dict[str, Dict[str, List[List[Optional[str]]]]]:
    """Signatures of a package's files."""
    return {file: signatures((folder / file).read_text(), names) for file, names in WANTED[name][1].items()}


if __name__ == "__main__":
    folders = dict(argument.split("=", 1) for argument in sys.argv[1:])
    recorded = {name: {"release": WANTED[name][0], "files": of_package(name, Path(folders[name]))} for name in WANTED}
    lines = json.dumps(recorded, indent=1)
    FILE.write_text(lines + "\n")
