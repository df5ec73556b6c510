"""The signatures of the adapters against those recorded of the packages that they stand in for, and the records against the
packages that are installed. The first needs neither torch nor the packages: it reads sources."""

import importlib.metadata
import importlib.util
import json
import os
import unittest
from pathlib import Path

import deltawave

from . import record_signatures as record

HERE = Path(deltawave.__file__).parent
RECORDED = json.loads(record.FILE.read_text())


def ours(file, name):
    """Parameters of a function of this package."""
    return record.signatures((HERE / file).read_text(), [name])[name]


def theirs(package, end, name):
    """Recorded parameters of a function of another package."""
    files = RECORDED[package]["files"]
    return next(found[name] for file, found in files.items() if file.endswith(end))


class Signatures(unittest.TestCase):
    def test_those_of_fla_are_equal(self):
        for end, name in (("chunk.py", "chunk_gated_delta_rule"),
                          ("fused_recurrent.py", "fused_recurrent_gated_delta_rule"), ("gate.py", "fused_gdn_gate")):
            with self.subTest(name=name):
                self.assertEqual(ours("fla.py", name), theirs("fla", end, name))

    def test_those_of_causal_conv1d_are_equal(self):
        for name in ("causal_conv1d_fn", "causal_conv1d_update"):
            with self.subTest(name=name):
                self.assertEqual(ours("causal_conv1d.py", name), theirs("causal_conv1d", "interface.py", name))

    def test_the_prefill_op_of_vllm_is_equal(self):
        wanted = theirs("vllm", "linear_attn.py", "ChunkGatedDeltaRule.forward_native")
        self.assertEqual(ours("vllm.py", "prefill"), wanted)

    def test_methods_of_vllm_that_are_replaced(self):
        names = [n for n, *_ in theirs("vllm", "linear_attn.py", "QwenGatedDeltaNetAttention._forward_core_rocm")]
        self.assertEqual(names, ["qkvz", "ba", "z_out", "core_attn_out"])
        names = [n for n, *_ in theirs("vllm", "linear_attn.py", "qwen_gdn_attention_core")]
        self.assertEqual(names[3:], ["core_attn_out", "layer_name", "use_aiter"])
        names = [n for n, *_ in theirs("vllm", "olmo_gdn_linear_attn.py", "OlmoHybridGatedDeltaNetAttention._full_forward")]
        self.assertEqual(names, ["hidden_states", "output"])

    def test_fields_of_vllm_that_are_read(self):
        import ast

        known = [n for n, *_ in theirs("vllm", "gdn_attn.py", "GDNAttentionMetadata")]
        read = {x.attr for x in ast.walk(ast.parse((HERE / "vllm.py").read_text()))
                if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == "metadata"}
        self.assertEqual(read | {"checkpoint"}, set(known))

    def takes(self, given, wanted, kind):
        """Whether parameters `given` take every call that `wanted` takes by `kind`."""
        rest = any(k == "**" for _, k, _ in given)
        known = {name: (k, default) for name, k, default in given}
        for name, k, default in wanted:
            if k not in kind or k == "**":
                continue
            self.assertTrue(name in known or rest, name)
            if default is not None and name in known:
                self.assertIsNotNone(known[name][1], f"{name} has no default")

    def test_kernels_of_sglang_take_what_it_passes(self):
        source = (HERE / "sglang.py").read_text()
        import ast

        tree = next(x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.ClassDef) and x.name == "DeltawaveGDNKernel")
        methods = {x.name: record.parameters(x) for x in tree.body if isinstance(x, ast.FunctionDef)}
        for end, name in (("kernel_backend.py", "LinearAttnKernelBase.decode"),
                          ("kernel_backend.py", "LinearAttnKernelBase.extend"),
                          ("kernel_backend.py", "LinearAttnKernelBase.target_verify"),
                          ("gdn_triton.py", "TritonGDNKernel.packed_decode"),
                          ("gdn_triton.py", "TritonGDNKernel.target_verify")):
            with self.subTest(name=name):
                self.takes(methods[name.rpartition(".")[2]], theirs("sglang", end, name), ("positional", "keyword"))
        hook = [n for n, *_ in ours("sglang.py", "make_dispatcher")]
        wanted = [n for n, *_ in theirs("sglang", "gdn_backend.py", "GDNKernelDispatcher.__init__")]
        self.assertEqual(hook[2:], wanted)

    def test_functions_of_transformers_are_called_with_what_ours_take(self):
        pairs = {"torch_chunk_gated_delta_rule": ("fla.py", "chunk_gated_delta_rule"),
                 "torch_recurrent_gated_delta_rule": ("fla.py", "fused_recurrent_gated_delta_rule"),
                 "causal_conv1d_fn": ("causal_conv1d.py", "causal_conv1d_fn"),
                 "causal_conv1d_update": ("causal_conv1d.py", "causal_conv1d_update")}
        for file, functions in RECORDED["transformers"]["files"].items():
            for name, (own, function) in pairs.items():
                with self.subTest(file=file, name=name):
                    wanted, given = functions[name], ours(own, function)
                    # Models pass keywords, and these tensors by position.
                    count = 3 if "gated_delta_rule" in name else 2
                    self.assertEqual(len(wanted[:count]), len(given[:count]))
                    named = {n for n, k, _ in wanted[count:] if k != "**"} - {"chunk_size"}
                    self.assertLessEqual(named, {n for n, *_ in given})

    def test_the_verifier_of_the_backend_is_that_of_fla(self):
        import ast

        tree = ast.parse((HERE / "fla.py").read_text())
        method = next(x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name.endswith("_verifier"))
        given = {n for n, *_ in record.parameters(method)}
        wanted = {n for n, *_ in theirs("fla", "flash_qla.py", "FlashQLABackend.chunk_gated_delta_rule_verifier")}
        self.assertLessEqual(wanted, given)

    def version(self, distribution):
        """The installed release of a distribution or of its CPU build; None if it was only unpacked."""
        for name in (distribution, f"{distribution}-cpu"):
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
        return None

    def test_the_records_are_those_of_the_installed_packages(self):
        required = os.environ.get("DELTAWAVE_REQUIRE_PACKAGES", "").split(",")
        compared = []
        for package, wanted in RECORDED.items():
            found = importlib.util.find_spec(package)
            if found is None or not found.submodule_search_locations:
                self.assertNotIn(package, required, "not installed")
                continue
            release = wanted["release"].split()
            if package not in required and self.version(release[0]) not in (*release[1:], None):
                continue
            folder = Path(list(found.submodule_search_locations)[0]).parent
            with self.subTest(package=package, release=wanted["release"]):
                self.assertEqual(record.of_package(package, folder), wanted["files"])
            compared.append(package)
        if not compared:
            self.skipTest(f"none of {', '.join(RECORDED)} is installed")
