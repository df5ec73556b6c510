"""deltawave and its peers behind one interface: `build(x)` makes a function of nothing that returns `o` of shape
[1, T, HV, V] and the final states [N, HV, K, V]. A contestant that cannot run here raises `Missing` with the reason."""

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cases import D

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# FLA on its own Triton kernels, and its choice of configurations made anew in each process.
os.environ.setdefault("FLA_FLASH_QLA", "0")
os.environ.setdefault("FLA_TILELANG", "0")
os.environ.setdefault("FLA_CACHE_RESULTS", "0")


class Missing(Exception):
    """Why a contestant cannot run."""


def need(module):
    if importlib.util.find_spec(module) is None:
        raise Missing(f"the Python package {module} is not installed")


class Deltawave:
    """This repository, through the C library."""

    name, label = "deltawave", "deltawave"
    _context = None

    @staticmethod
    def library():
        names = [os.environ.get("DELTAWAVE_C_LIBRARY"), ROOT / "target/release/libdeltawave_c.so",
                 ROOT / ".whl/libdeltawave_c.so"]
        for path in names:
            if path and Path(path).exists():
                return Path(path)
        raise Missing("libdeltawave_c.so was not built: cargo build --release -p deltawave-c")

    @staticmethod
    def package():
        """The Python package, from where it lies in this repository: nothing has to be installed."""
        folder = str(ROOT / "python")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import deltawave

        return deltawave

    def check(self):
        self.library()

    def warm_up_jobs(self, cases):
        return []

    def context(self):
        import torch

        if self._context is None:
            # The CUDA driver stands in for the HIP runtime; its primary context is torch's too.
            os.environ.setdefault("DELTAWAVE_HIP_LIBRARY", "cuda")
            self._context = self.package().Context("hip", torch.cuda.current_device(), self.library())
        return self._context

    def version(self):
        return "{0.name} ({0.arch})".format(self.context())

    def build(self, x):
        import torch

        dw, case, sequences = self.package(), x.case, len(x.case.lengths)
        spec = dw.PrefillSpec(case.key_heads, case.value_heads, D, D, case.dtype, scale=x.scale)
        plan = dw.Prefill.packed(self.context(), spec, x.offsets, case.tokens)
        o = torch.empty_like(x.v)
        state = torch.empty(sequences, case.value_heads, D, D, dtype=torch.float32, device=x.v.device)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.v.device)
        launch = plan.bind(q=x.q[0], k=x.k[0], v=x.v[0], o=o[0], g=x.g[0], beta=x.beta[0], final_state=state,
                           workspace=workspace)

        def run():
            launch(torch.cuda.current_stream().cuda_stream)
            return o, state

        return run


class Fla:
    """flash-linear-attention's Triton kernels."""

    name, label = "fla", "FLA"

    def check(self):
        need("fla")

    def warm_up_jobs(self, cases):
        """It compiles what it chooses from for each type and head configuration, and for ragged batches, whatever
        the lengths are."""
        found = first_of_each(cases, lambda c: (c.dtype, c.key_heads, c.value_heads, len(set(c.lengths)) > 1))
        return [replace(case, lengths=tuple(n // 8 for n in case.lengths)) for case in found]

    def version(self):
        import fla

        return fla.__version__

    def build(self, x):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        lengths = x.case.lengths
        ragged = len(set(lengths)) > 1
        # Equal lengths are a dense batch to it.
        rows = 1 if ragged else len(lengths)
        q, k, v, g, beta = (t.view(rows, -1, *t.shape[2:]) for t in (x.q, x.k, x.v, x.g, x.beta))

        def run():
            o, state = chunk_gated_delta_rule(q, k, v, g, beta, scale=x.scale, output_final_state=True,
                                              cu_seqlens=x.cu_seqlens if ragged else None)
            return o.view(x.v.shape), state

        return run


class FlashQla:
    """FlashQLA's TileLang kernels."""

    name, label = "flashqla", "FlashQLA"

    def check(self):
        need("flash_qla")
        need("tilelang")

    def warm_up_jobs(self, cases):
        """What shares kernels comes later, and finds them compiled."""
        first = first_of_each(cases, lambda c: (c.dtype, c.key_heads, c.value_heads, len(c.lengths)))
        every = first_of_each(cases, lambda c: (c.dtype, c.key_heads, c.value_heads, c.lengths))
        return first + [case for case in every if case not in first]

    def version(self):
        import flash_qla

        return flash_qla.__version__

    def build(self, x):
        import flash_qla

        # Without cu_seqlens it makes its metadata anew in every call and waits for the device.
        def run():
            results = flash_qla.chunk_gated_delta_rule_fwd(x.q, x.k, x.v, x.g, x.beta, scale=x.scale,
                                                           output_final_state=True, cu_seqlens=x.cu_seqlens)
            return results[2], results[4]

        return run


class FlashInfer:
    """FlashInfer's kernel for sm_90a, of which flashinfer.cu builds the instantiation that is wanted."""

    name, label = "flashinfer", "FlashInfer"
    FLAGS = ["-O3", "-DNDEBUG", "-std=c++20", "-use_fast_math", "--expt-relaxed-constexpr",
             "-static-global-template-stub=false", "-gencode=arch=compute_90a,code=sm_90a",
             "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DFLAT_SM90A_ENABLED", "-Xcompiler", "-fPIC", "-shared"]
    INCLUDES = ["cccl/libcudacxx/include", "cccl/cub", "cccl/thrust", "include", "cutlass/include",
                "cutlass/tools/util/include"]

    @staticmethod
    def data():
        need("flashinfer")
        return Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0]) / "data"

    @staticmethod
    def nvcc():
        path = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not Path(path).exists():
            raise Missing("its kernels have to be compiled, and there is no nvcc")
        return path

    def check(self):
        self.data()
        self.nvcc()

    def warm_up_jobs(self, cases):
        return first_of_each(cases, lambda c: (c.dtype, c.value_heads > c.key_heads))

    def version(self):
        return importlib.metadata.version("flashinfer-python")

    def library(self, dtype, gva):
        """Compiles once into the cache folder; another process may be doing the same."""
        folder = Path(os.environ["DELTAWAVE_PEERS_CACHE"])
        path = folder / f"flashinfer_{dtype}_{int(gva)}.so"
        if not path.exists():
            element = {"bf16": "nv_bfloat16", "fp16": "half"}[dtype]
            partial = path.with_suffix(f".{os.getpid()}")
            includes = [f"-I{self.data() / i}" for i in self.INCLUDES]
            command = [self.nvcc(), *self.FLAGS, f"-DELEMENT={element}", f"-DGVA={int(gva)}", *includes,
                       "-o", str(partial), str(HERE / "flashinfer.cu")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"nvcc: {done.stderr.strip()[-500:]}")
            partial.rename(path)
        return ctypes.CDLL(str(path))

    def build(self, x):
        import torch

        case, sequences = x.case, len(x.case.lengths)
        entry = self.library(case.dtype, case.value_heads > case.key_heads).flashinfer_prefill
        device = x.v.device
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        alpha = x.g[0].exp()  # it takes the factor itself: not timed
        cu_seqlens = x.cu_seqlens.long()
        o = torch.empty_like(x.v)
        state = torch.empty(sequences, case.value_heads, D, D, dtype=torch.float32, device=device)
        workspace = torch.empty(128 * multiprocessors, dtype=torch.uint8, device=device)
        tensors = (o, state, x.q, x.k, x.v, alpha, x.beta, cu_seqlens, workspace)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        transposed = state.transpose(-1, -2)  # [N, HV, V, K]

        def run():
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = entry(*pointers, sequences, case.key_heads, case.value_heads, ctypes.c_int64(case.tokens),
                           ctypes.c_float(x.scale), multiprocessors, stream)
            if status:
                raise RuntimeError("the kernel was refused")
            return o, transposed

        run.keep = tensors
        return run


def first_of_each(cases, key):
    """One case for each value of a key."""
    found = {}
    for case in cases:
        found.setdefault(key(case), case)
    return list(found.values())


# In the order in which they are given up if time runs out, last first.
CONTESTANTS = {c.name: c for c in (Deltawave(), Fla(), FlashQla(), FlashInfer())}
