"""Compiles the code objects of rows.json from a checkout of aiter, without a GPU: compile.py AITER FOLDER [NAME...]

AITER is a checkout of https://github.com/ROCm/aiter at the commit in rows.json. FOLDER gets a code object for each launch;
`calibrate.py --code FOLDER` models them. Each is compared with the checksum of the one that was modelled last. NAMEs, which
need not be in rows.json, are compiled in place of those.

Needs Python 3.11 with triton==3.7.1, flydsl==0.3.1, torch, packaging and einops, and ld.lld of LLVM 19.
"""

import argparse
import glob
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import types

HERE = os.path.dirname(os.path.abspath(__file__))
TRITON = "aiter.ops.triton._triton_kernels.gated_delta_rule"
FLYDSL = "aiter.ops.flydsl.kernels"
# Head dimensions, and tokens of a chunk.
K = V = 128
BT = 64
# Key heads for each number of value heads, in the rows of Triton's kernels.
KEY_HEADS = {32: 16, 16: 8, 64: 16}


def packages(root):
    """Makes aiter's folders importable without their own start-up code, which wants a GPU."""
    for name in (TRITON, TRITON + ".prefill", FLYDSL):
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:n]))
            module.__path__ = [os.path.join(root, *parts[:n])]
            sys.modules.setdefault(module.__name__, module)


def triton_kernels():
    """Functions that compile the kernels of Triton's `prepare`, by their names in rows.json."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    target = GPUTarget("hip", "gfx942", 64)

    class Driver:
        def get_current_target(self):
            return target

        def get_current_device(self):
            return 0

    triton.runtime.driver.set_active(Driver())
    cumsum = importlib.import_module(TRITON + ".prefill.fused_cumsum_kkt")
    recompute = importlib.import_module(TRITON + ".prefill.fused_solve_tril_recompute")
    solve = importlib.import_module(TRITON + ".utils.solve_tril")

    def compiled(kernel, pointers, constants):
        options, heuristics = {}, []
        constants = {"cu_seqlens": None, "sequence_ids": None, "chunk_ids": None, **constants}
        while not isinstance(kernel, JITFunction):
            if isinstance(kernel, Heuristics):
                heuristics.append(kernel.values)
            elif isinstance(kernel, Autotuner):
                # aiter's default configuration.
                (config,) = kernel.configs
                constants.update(config.kwargs)
                options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            kernel = kernel.fn
        for values in heuristics:
            for name, value in values.items():
                constants[name] = value({**pointers, **constants})
        signature, given, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            name = parameter.name
            if name in pointers:
                signature[name] = "*" + pointers[name]
                attributes[(i,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
            elif name == "T":
                signature[name] = "i32"
            else:
                signature[name] = "constexpr"
                given[(i,)] = constants.get(name, parameter.default)
        source = ASTSource(kernel, signature=signature, constexprs=given, attrs=attributes)
        return triton.compile(source, target=target, options=options).asm["hsaco"]

    full, half = "fp32", "bf16"
    rest = dict(BT=BT, INDEX_STRIDE=1)

    def kkt(heads):
        return compiled(cumsum.fused_chunk_local_cumsum_scaled_dot_kkt_fwd_kernel,
                        dict(g=full, k=half, beta=full, g_cumsum_out=full, A_out=full),
                        dict(H=heads, Hg=KEY_HEADS[heads], K=K, USE_EXP2=True, G_SCALE=cumsum.RCP_LN2, **rest))

    def fused(heads):
        return compiled(recompute.fused_solve_tril_recompute_w_u_kernel,
                        dict(A_raw=full, k=half, v=half, beta=full, g=full, w=half, u=half),
                        dict(H=heads, Hg=KEY_HEADS[heads], K=K, V=V, DOT_PRECISION=recompute.FLA_TRIL_PRECISION,
                             USE_EXP2=True, LOWP_DTYPE_IS_BF16=True, **rest))

    def inverse(heads):
        return compiled(solve.merge_16x16_to_64x64_inverse_kernel, dict(A=full, Ai=half),
                        dict(H=heads, USE_TMA=False, **rest))

    def w_and_u(heads):
        return compiled(recompute.recompute_w_u_head_major_kernel,
                        dict(k=half, v=half, beta=full, Ai=half, g=full, w=half, u=half),
                        dict(H=heads, Hg=KEY_HEADS[heads], K=K, V=V, USE_EXP2=True, **rest))

    return {"vk_kkt": kkt, "vk_fused": fused, "vk_solve": inverse, "vk_wu": w_and_u}


def flydsl_kernels(dumps):
    """Functions that compile FlyDSL's `prepare` and K5. FlyDSL writes its stages to `dumps`."""
    import flydsl.compiler
    import flydsl.expr
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    k5_module = importlib.import_module(FLYDSL + ".chunk_gated_delta_h_opt")
    prepare_module = importlib.import_module(FLYDSL + ".gdn_prepare")
    full, half = torch.float32, torch.bfloat16
    stream = flydsl.expr.Stream(0)

    def compiled(make):
        shutil.rmtree(dumps, ignore_errors=True)
        with FakeTensorMode():
            function, arguments = make()
            flydsl.compiler.compile(function, *arguments)
        (path,) = glob.glob(os.path.join(dumps, "*", "*gpu_module_to_binary.mlir"))
        with open(path, encoding="latin-1") as file:
            text = re.search(r'bin = "((?:[^"\\]|\\.)*)"', file.read())[1]
        plain = {"n": b"\n", "t": b"\t", '"': b'"', "\\": b"\\"}
        code = bytearray()
        for escape, character in re.findall(r'\\([nt"\\]|[0-9A-Fa-f]{2})|([^\\])', text):
            code += character.encode("latin-1") if character else plain.get(escape) or bytes.fromhex(escape)
        return bytes(code)

    def empty(*shape, dtype=half):
        return torch.empty(shape, dtype=dtype)

    def prepare():
        def make():
            function = prepare_module.compile_gdn_prepare(BT=BT, K=K, V=V, is_varlen=False, g_scale=1.4426950408889634)
            tokens, heads, key_heads = 8192, 32, 16
            key, value = tokens * key_heads * K, tokens * heads * V
            gate = tokens * heads
            return function, (empty(key), empty(value), empty(gate, dtype=full), empty(gate, dtype=full), empty(key),
                              empty(value), empty(value), empty(gate, dtype=full), tokens, heads, key_heads,
                              tokens // BT, heads, stream)

        return compiled(make)

    def k5(heads, key_heads, columns, mode):
        # Final states are stored in packed batches, as in aiter's tuned tables, and where the name says so.
        packed, final = mode == "varlen", mode != "dense"

        def make():
            function = k5_module.compile_chunk_gated_delta_h_opt(
                K=K, V=V, BT=BT, BV=columns, H=heads, Hg=key_heads, USE_G=True, USE_GK=False, USE_INITIAL_STATE=True,
                STORE_FINAL_STATE=final, SAVE_NEW_VALUE=True, IS_VARLEN=packed, WU_CONTIGUOUS=True,
                STATE_DTYPE_BF16=False, SNAPSHOT_DTYPE_BF16=True, G_IS_LOG2_SCALED=True, USE_STATE_INDICES=False,
                SCHED_GFX942=True, G_HEAD_MAJOR=True, BF16_CONVERT_TRUNC=True)
            none, integers = empty(1, dtype=full), empty(1, dtype=torch.int32)
            state = empty(1, heads, V, K, dtype=full)
            lengths = empty(2, dtype=torch.int32) if packed else integers
            return function, (empty(1, BT, key_heads, K), empty(1, heads, BT, V), empty(1, heads, BT, K),
                              empty(1, heads, BT, V), empty(1, heads, BT, dtype=full), none, empty(1, 1, heads, V, K),
                              state, state if final else none, lengths, lengths, integers, BT, BT, 1, V // columns,
                              heads, stream)

        return compiled(make)

    return prepare, k5


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("aiter", metavar="AITER")
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("names", metavar="NAME", nargs="*")
    arguments = parser.parse_args()
    linker = os.environ.get("LLD") or shutil.which("ld.lld-19") or shutil.which("ld.lld")
    if not linker:
        sys.exit("no ld.lld-19; LLD names another")
    with open(os.path.join(HERE, "rows.json")) as file:
        rows = json.load(file)["rows"]
    known = {launch["code"]: launch["sha256"] for row in rows for launch in row["launches"]}
    os.makedirs(arguments.folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        # FlyDSL finds the linker below ROCM_PATH.
        tools = os.path.join(temporary, "rocm/llvm/bin")
        os.makedirs(tools)
        os.symlink(linker, os.path.join(tools, "ld.lld"))
        dumps = os.path.join(temporary, "dumps")
        os.environ.update({
            "ROCM_PATH": os.path.join(temporary, "rocm"), "TRITON_CACHE_DIR": os.path.join(temporary, "triton"),
            # Lines would put the path of the checkout into the code objects.
            "TRITON_DISABLE_LINE_INFO": "1", "FLYDSL_GPU_ARCH": "gfx942", "COMPILE_ONLY": "1", "FLYDSL_DUMP_IR": "1",
            "FLYDSL_DUMP_DIR": dumps, "FLYDSL_RUNTIME_CACHE_DIR": os.path.join(temporary, "flydsl")})
        packages(os.path.abspath(arguments.aiter))
        triton, (prepare, k5) = triton_kernels(), flydsl_kernels(dumps)
        for name in arguments.names or known:
            kind, *parts = name.split(".")
            if kind == "fly_prepare":
                code = prepare()
            elif kind == "fly_k5":
                heads, key_heads, columns, mode, _ = parts
                code = k5(int(heads), int(key_heads), int(columns), mode)
            else:
                code = triton[kind](int(parts[0]))
            with open(os.path.join(arguments.folder, name), "wb") as file:
                file.write(code)
            same = hashlib.sha256(code).hexdigest() == known.get(name)
            said = "as modelled last" if same else "not the bytes that were modelled last"
            print(f"{name}: {said if name in known else 'compiled'}", flush=True)


if __name__ == "__main__":
    main()
