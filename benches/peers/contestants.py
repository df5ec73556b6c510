"""deltawave and its peers behind one interface: `prefill(x)` makes a function of nothing that returns `o` of shape
[1, T, HV, V] and the final states [N, HV, K, V]. `decode`, `norm`, `conv` and `layer` are the same for the inputs of a
`Step`, `backward` for those of a `Backward`: the outputs are those that it names. A function that updates states in place has an attribute `before`, which
puts them back. A contestant that cannot run here raises `Missing` with the reason."""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import flashinfer_parts
from cases import D
from steps import EPS, WIDTH

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# FLA on its own Triton kernels, and its choice of configurations made anew in each process.
os.environ.setdefault("FLA_FLASH_QLA", "0")
os.environ.setdefault("FLA_TILELANG", "0")
os.environ.setdefault("FLA_CACHE_RESULTS", "0")


class Missing(Exception):
    """Why a contestant cannot run."""


def need(module):
    if module not in sys.modules and importlib.util.find_spec(module) is None:
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

    def prefill(self, x):
        import torch

        dw, case, sequences = self.package(), x.case, len(x.case.lengths)
        spec = dw.PrefillSpec(case.key_heads, case.value_heads, D, D, case.dtype, scale=x.scale)
        plan = dw.Prefill.packed(self.context(), spec, x.offsets, case.tokens)
        o = torch.empty_like(x.v)
        state = torch.empty(sequences, case.value_heads, D, D, dtype=torch.float32, device=x.v.device)
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.v.device)
        launch = plan.bind(q=x.q[0], k=x.k[0], v=x.v[0], o=o[0], g=x.g[0], beta=x.beta[0], final_state=state,
                           workspace=workspace)

        return launched(launch, o, state)

    def backward(self, x):
        import torch

        dw, case = self.package(), x.case
        spec = dw.PrefillSpec(case.key_heads, case.value_heads, D, D, case.dtype, scale=x.scale)
        plan = dw.PrefillBackward(dw.Prefill.packed(self.context(), spec, x.offsets, case.tokens))
        found = [torch.empty_like(t) for t in (x.q, x.k, x.v, x.g, x.beta, x.state)]
        d_q, d_k, d_v, d_g, d_beta, d_state = found
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=x.v.device)
        launch = plan.bind(q=x.q[0], k=x.k[0], v=x.v[0], g=x.g[0], beta=x.beta[0], initial_state=x.state, d_o=x.d_o[0],
                           d_final_state=x.d_state, d_q=d_q[0], d_k=d_k[0], d_v=d_v[0], d_g=d_g[0], d_beta=d_beta[0],
                           d_initial_state=d_state, workspace=workspace)
        return launched(launch, *found)

    def decode(self, x):
        import torch

        dw, step = self.package(), x.case
        spec = dw.DecodeSpec(step.key_heads, step.value_heads, D, D, step.dtype, qk_l2norm=True, scale=x.scale,
                             tokens=step.tokens)
        before, o = x.pool.transpose(-1, -2).contiguous(), torch.empty_like(x.v)
        pool = before.clone()  # [B, HV, V, K], as FlashInfer's, and with slots in memory, as there
        slots = torch.arange(step.batch, dtype=torch.int32, device=pool.device)
        launch = dw.Decode(self.context(), spec, step.batch).bind(q=x.q, k=x.k, v=x.v, o=o, a=x.a, b=x.b, a_log=x.a_log,
                                                                  dt_bias=x.dt_bias, pool=pool, slots=slots,
                                                                  pool_layout="value_major")
        return launched(launch, o, pool.transpose(-1, -2), before=lambda: pool.copy_(before))

    def norm(self, x):
        import torch

        dw, y = self.package(), torch.empty_like(x.x)
        context = self.context()
        return launched(lambda stream: dw.norm(context, stream, x=x.x, z=x.z, weight=x.weight, y=y, eps=EPS), y)

    def conv(self, x):
        import torch

        dw, step = self.package(), x.case
        spec = dw.ConvSpec(step.key_heads, step.value_heads, D, D, WIDTH, step.dtype)
        plan = dw.Conv.packed(self.context(), spec, [0, step.tokens], step.tokens)
        made = lambda *shape: torch.empty(*shape, dtype=x.x.dtype, device=x.x.device)  # noqa: E731
        q, k = made(step.tokens, step.key_heads, D), made(step.tokens, step.key_heads, D)
        v, state = made(step.tokens, step.value_heads, D), made(1, step.channels, WIDTH - 1)
        fresh = torch.zeros(1, dtype=torch.uint8, device=x.x.device)
        launch = plan.bind(x=x.x, weight=x.conv_weight, state=state, q=q, k=k, v=v, has_initial_state=fresh)
        return launched(launch, q, k, v)

    def layer(self, x):
        import torch

        dw, step = self.package(), x.case
        spec = dw.LayerSpec(step.key_heads, step.value_heads, D, D, step.dtype, width=WIDTH, scale=x.scale, eps=EPS)
        plan = dw.Layer.packed(self.context(), spec, [0, step.tokens], step.tokens)
        made = lambda *shape, dtype=x.x.dtype: torch.empty(*shape, dtype=dtype, device=x.x.device)  # noqa: E731
        y, pool = made(step.tokens, step.value_heads, D), made(1, step.value_heads, D, D, dtype=torch.float32)
        launch = plan.bind(x=x.x, a=x.a, b=x.b, conv_weight=x.conv_weight, a_log=x.a_log, dt_bias=x.dt_bias,
                           norm_weight=x.norm_weight, conv_state=made(1, step.channels, WIDTH - 1), pool=pool,
                           has_initial_state=torch.zeros(1, dtype=torch.uint8, device=x.x.device), y=y,
                           workspace=made(plan.workspace_bytes, dtype=torch.uint8))
        return launched(launch, y, pool)


def launched(launch, *outputs, before=None):
    """A bound launch on torch's current stream, which returns `outputs`."""
    import torch

    def run():
        launch(torch.cuda.current_stream().cuda_stream)
        return outputs

    run.before = before
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

    def prefill(self, x):
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

    def backward(self, x):
        """The kernels of its autograd function, called directly: torch records no graph here."""
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

        rows = len(x.case.lengths)  # equal lengths are a dense batch to it
        q, k, v, g, beta, d_o = (t.view(rows, -1, *t.shape[2:]) for t in (x.q, x.k, x.v, x.g, x.beta, x.d_o))
        sums, _, inverse, *_ = chunk_gated_delta_rule_fwd(q, k, v, g, beta, x.scale, x.state, True)

        def run():
            dq, dk, dv, db, dg, ds0, *_ = chunk_gated_delta_rule_bwd(q, k, v, sums, beta, inverse, x.scale, x.state, d_o,
                                                                     x.d_state)
            shaped = [t.reshape(1, -1, *t.shape[2:]) for t in (dq, dk, dv, dg, db)]
            return *shaped, ds0

        return run

    def decode(self, x):
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        step = x.case
        if step.state != "f32":
            raise Missing("it returns states in f32 alone")
        q, k, v, a, b = (t.view(step.batch, step.tokens, *t.shape[1:]) for t in (x.q, x.k, x.v, x.a, x.b))

        def run():
            o, state = fused_recurrent_gated_delta_rule(
                q, k, v, a, beta=b, scale=x.scale, initial_state=x.pool, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=x.a_log, dt_bias=x.dt_bias,
                use_beta_sigmoid_in_kernel=True)
            return o.view(x.v.shape), state

        return run

    def norm(self, x):
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        return lambda: (rms_norm_gated(x.x, x.z, x.weight, None, activation="swish", eps=EPS),)

    def rows(self, x):
        """The convolution, then q, k and v as tensors of their own, as the kernels after it read them."""
        from fla.modules.causal_conv1d import causal_conv1d

        step, keys = x.case, x.case.key_heads * D
        y, _ = causal_conv1d(x.x[None, :, :step.channels], x.conv_weight, activation="silu", output_final_state=True)
        parts = y[0].split([keys, keys, step.value_heads * D], -1)
        return tuple(part.reshape(step.tokens, -1, D) for part in parts)

    def conv(self, x):
        return lambda: self.rows(x)

    def layer(self, x):
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        step = x.case

        def run():
            q, k, v = (t[None] for t in self.rows(x))
            o, state = chunk_gated_delta_rule(
                q, k, v, x.a[None], x.b[None], scale=x.scale, output_final_state=True, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, A_log=x.a_log, dt_bias=x.dt_bias, use_beta_sigmoid_in_kernel=True)
            z = x.x[:, step.channels:].reshape(v.shape)
            return rms_norm_gated(o, z, x.norm_weight, None, activation="swish", eps=EPS)[0], state

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

    def prefill(self, x):
        import flash_qla

        # Without cu_seqlens it makes its metadata anew in every call and waits for the device.
        def run():
            results = flash_qla.chunk_gated_delta_rule_fwd(x.q, x.k, x.v, x.g, x.beta, scale=x.scale,
                                                           output_final_state=True, cu_seqlens=x.cu_seqlens)
            return results[2], results[4]

        return run

    def backward(self, x):
        """The kernels of its autograd function, called directly, with the summaries that its forward hands on."""
        import flash_qla

        shared = {"scale": x.scale, "initial_state": x.state, "cu_seqlens": x.cu_seqlens}
        sums, inverse, *_, cache = flash_qla.chunk_gated_delta_rule_fwd(x.q, x.k, x.v, x.g, x.beta, enable_fwd_cp_cache=True,
                                                                        **shared)

        def run():
            dq, dk, dv, db, dg, ds0 = flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, sums, x.beta, inverse, x.d_o,
                                                                           x.d_state, cp_cache=cache, **shared)
            return dq, dk, dv, dg, db, ds0

        return run


class FlashInfer:
    """FlashInfer's kernel for sm_90a, in the CuTe DSL: one launch, a workgroup for each sequence and value head."""

    name, label = "flashinfer", "FlashInfer"
    file, entry = "gdn_kernels.delta_rule_dsl.delta_rule_sm90", "delta_rule_prefill_dsl_sm90"
    parts = ()

    def check(self):
        for package in ("flashinfer", "cutlass", "tvm_ffi"):
            need(package)
        try:
            for part in (*self.parts, self.file):
                flashinfer_parts.module(part)
        except Exception as problem:  # whatever an import of foreign code raises
            raise Missing(f"its import fails: {type(problem).__name__}: {str(problem)[:300]}")

    def warm_up_jobs(self, cases):
        """None: what it compiles, in seconds, it keeps in memory alone."""
        return []

    def version(self):
        return "{}, nvidia-cutlass-dsl {}".format(*map(installed, ("flashinfer-python", "nvidia-cutlass-dsl-libs-base")))

    def call(self, x, o, state, alpha, cu_seqlens):
        kernel = getattr(flashinfer_parts.module(self.file), self.entry)
        q, k, v, beta = x.q[0], x.k[0], x.v[0], x.beta[0]
        return lambda: kernel(o, state, q, k, v, None, alpha, beta, cu_seqlens, x.scale)

    def prefill(self, x):
        import torch

        o = torch.empty_like(x.v)
        state = torch.empty(len(x.case.lengths), x.case.value_heads, D, D, dtype=torch.float32, device=x.v.device)
        # It takes the factor exp(g) itself: not timed.
        call = self.call(x, o[0], state, x.g[0].exp(), x.cu_seqlens.long())
        transposed = state.transpose(-1, -2)  # [N, HV, V, K]

        def run():
            call()
            return o, transposed

        return run

    def forget(self):
        flashinfer_parts.forget()


class FlashInferDecode(FlashInfer):
    """FlashInfer's decode kernels, in the CuTe DSL. Which one runs depends on the states' type and the tokens."""

    name, label, file = "flashinfer-decode", "FlashInfer decode", "gdn_decode"
    # The first module leaves out kernels that cannot be imported, without words.
    parts = ("gdn_kernels.gdn_decode_bf16_state", "gdn_kernels.gdn_decode_pretranspose", "gdn_kernels.gdn_decode_mtp")
    prefill = None

    def decode(self, x):
        import torch

        step, kernel = x.case, flashinfer_parts.module(self.file).gated_delta_rule_decode_pretranspose
        q, k, v, a, b = (t.view(step.batch, step.tokens, *t.shape[1:]) for t in (x.q, x.k, x.v, x.a, x.b))
        before, o = x.pool.transpose(-1, -2).contiguous(), torch.empty_like(v)
        pool = before.clone()  # [B, HV, V, K]
        slots = torch.arange(step.batch, dtype=torch.int32, device=q.device)

        def run():
            kernel(q, k, v, None, x.a_log, a, x.dt_bias, b, x.scale, o, True, pool, slots)
            return o.view(x.v.shape), pool.transpose(-1, -2)

        run.before = lambda: pool.copy_(before)
        return run


class FlashInferCut(FlashInfer):
    """FlashInfer's other kernels, which cut sequences into pieces: four launches. FlashInfer itself chooses these where
    sequences times heads are fewer than half the multiprocessors."""

    name, label = "flashinfer-cut", "FlashInfer, cut"
    file, entry = "gdn_kernels.delta_rule_dsl.delta_rule_cp_sm90", "cp_delta_rule_dsl_sm90"

    def call(self, x, o, state, alpha, cu_seqlens):
        kernel = getattr(flashinfer_parts.module(self.file), self.entry)
        q, k, v, beta, longest = x.q[0], x.k[0], x.v[0], x.beta[0], max(x.case.lengths)
        return lambda: kernel(o, state, q, k, v, alpha, beta, cu_seqlens, x.scale, max_seqlen=longest)


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def first_of_each(cases, key):
    """One case for each value of a key."""
    found = {}
    for case in cases:
        found.setdefault(key(case), case)
    return list(found.values())


# In the order in which they are given up if time runs out, last first.
CONTESTANTS = {c.name: c for c in (Deltawave(), FlashInfer(), FlashInferCut(), FlashInferDecode(), FlashQla(), Fla())}
