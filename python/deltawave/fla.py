"""FLA's functions of the gated delta rule: `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule` and
`fused_gdn_gate`, with the parameters and results of fla-core 0.6.0, and `register`, which makes them a backend of FLA.

    from deltawave.fla import chunk_gated_delta_rule        # instead of fla.ops.gated_delta_rule
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)

Beyond FLA's functions these need no autotuning. They do less:

- q, k and v are bf16 or fp16, all of one type. K and V are multiples of 16 up to 256.
- `gk`, `gv`, beta per channel and context parallelism are not supported.

`chunk_gated_delta_rule` and `fused_gdn_gate` differentiate. Gradients of gradients raise NotImplementedError. So does the
backward of `fused_recurrent_gated_delta_rule`, as in FLA.

What cannot be done raises `deltawave.Unsupported`, whose text names the argument. Arguments that no implementation takes
raise `deltawave.ArgumentError`. Both are ValueErrors.

Memory: the functions allocate o, and the final state if it is wanted. A tensor is copied only if its innermost stride is
not 1 (q, k, v, states), or if g is not f32. Autograd keeps the inputs, and of batches whose backward has rounds the
states between them (`ops.prefill_saving`).
"""

import numbers
import os
import warnings
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from . import ops
from .errors import ArgumentError, Unsupported

# Releases whose signatures these functions have.
FLA_VERSIONS = ("0.6.0",)


def refuse_gradients(**tensors: Any) -> None:
    """Raises `Unsupported`, which names the first tensor that requires a gradient while autograd records."""
    for name, x in tensors.items():
        if ops.needs_gradient(x):
            raise Unsupported(f"{name}: requires a gradient; there are forward kernels only, under torch.no_grad()")


def rows(x: Tensor) -> Tensor:
    """`x`, or a copy if its innermost stride is not 1, which kernels need."""
    return x if x.shape[-1] == 1 or x.stride()[-1] == 1 else x.contiguous()


def check_tensors(device: Any, **tensors: Any) -> None:
    """Refuses arguments that are not strided tensors, and tensors on other devices than `device`, that of the first argument.
    None: an argument that was not given. torch itself would compute nothing, without a word, if one of them is on `meta`."""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            was = f"of layout {x.layout}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ArgumentError(f"{name}: {was}; it must be a strided tensor")
        if x.device != device:
            raise ArgumentError(f"{name}: memory of {x.device}; it must be on the device of the first argument, {device}")


def device_of(name: str, x: Any) -> Any:
    """The device of an argument that must be a tensor."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name}: a {type(x).__name__}; it must be a tensor")
    return x.device


def _checked_heads(q: Tensor, k: Tensor, v: Tensor, scale: Any) -> None:
    """Refuses q, k `[B, T, H, K]`, v `[B, T, HV, V]` and a scale that no kernel takes."""
    if scale is not None and not isinstance(scale, numbers.Real):
        raise ArgumentError(f"scale: a {type(scale).__name__}; it must be a number or None")
    for name, x in (("q", q), ("k", k), ("v", v)):
        device_of(name, x)
        if x.dim() != 4:
            raise ArgumentError(f"{name}: shape {list(x.shape)}; it must have 4 dimensions, [B, T, H, D]")
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported(f"{name}: dtype {x.dtype}; it must be torch.bfloat16 or torch.float16")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise Unsupported(f"{name}: dtype {x.dtype}; it must be that of q, {q.dtype}")
    heads, value_heads = q.shape[2], v.shape[2]
    if k.shape[2] != heads:
        raise ArgumentError(f"k: {k.shape[2]} heads; it must have those of q, {heads}")
    if not heads or value_heads % heads:
        raise ArgumentError(f"v: {value_heads} heads; their number must be a multiple of the {heads} heads of q")
    for name, x in (("k", k), ("v", v)):
        if x.shape[3] % 16 or not 0 < x.shape[3] <= 256:
            raise Unsupported(f"{name}: {x.shape[3]} numbers per head; it must be a multiple of 16 up to 256")


def _checked_batch(q: Tensor, initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor]) -> None:
    """Refuses a packed batch of several rows, and states of other sequences."""
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ArgumentError(f"q: batch size {q.shape[0]}; with cu_seqlens it must be 1, with all sequences in one row")
    if initial_state is not None and initial_state.shape[0] != cu_seqlens.shape[0] - 1:
        count = cu_seqlens.shape[0] - 1
        raise ArgumentError(f"initial_state: {initial_state.shape[0]} states; there must be one for each of the {count} "
                            "sequences")


def _checked_gates(v: Tensor, g: Optional[Tensor], beta: Optional[Tensor]) -> None:
    """Refuses gates that are not `[B, T, HV]`."""
    check_tensors(v.device, g=g, beta=beta)
    shape = tuple(v.shape[:3])
    for name, x in (("g", g), ("beta", beta)):
        if x is None:
            continue
        if x.dim() > 3:
            raise Unsupported(f"{name}: shape {list(x.shape)}; there are no gates per channel, it must be {list(shape)}")
        if tuple(x.shape) != shape:
            raise ArgumentError(f"{name}: shape {list(x.shape)}; it must be {list(shape)}")


def _gates(v: Tensor, g: Optional[Tensor], beta: Optional[Tensor], raw_g: bool, raw_beta: bool, a_log: Optional[Tensor],
           dt_bias: Optional[Tensor], negative: bool) -> Dict[str, Any]:
    """Gate arguments of an op. Raw gates go to the kernels if both are raw, else a kernel computes the raw one."""
    _checked_gates(v, g, beta)
    if raw_g and a_log is None:
        raise ArgumentError("A_log: None; use_gate_in_kernel needs it, [HV]")
    if raw_g and g is None:
        raise ArgumentError("g: None; use_gate_in_kernel needs it, [B, T, HV]")
    if negative and not raw_beta:
        raise ArgumentError("allow_neg_eigval: True; it needs use_beta_sigmoid_in_kernel=True")
    if raw_g and raw_beta and beta is not None:
        return {"a": g, "b": beta, "a_log": a_log, "dt_bias": dt_bias, "allow_neg_eigval": negative}
    if raw_g and g is not None and a_log is not None:
        g, _ = ops.gate(g, g, a_log, dt_bias)
    if raw_beta and beta is not None:
        zeros = torch.zeros(beta.shape[-1], dtype=torch.float32, device=beta.device)
        _, beta = ops.gate(beta, beta, zeros, None, negative)
    return {"g": None if g is None else g.float(), "beta": beta}


def _state(initial_state: Optional[Tensor]) -> Optional[Tensor]:
    """A state of a type and strides that kernels read."""
    if initial_state is None:
        return None
    if initial_state.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        allowed = "it must be torch.float32, torch.bfloat16 or torch.float16"
        raise Unsupported(f"initial_state: dtype {initial_state.dtype}; {allowed}")
    return rows(initial_state)


def _check_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Optional[Tensor],
                 cu_seqlens: Optional[Tensor], cp_context: Any, kwargs: Dict[str, Any], scale: Any) -> None:
    """Raises what `chunk_gated_delta_rule` refuses of its tensors."""
    if cp_context is not None:
        raise Unsupported("cp_context: context parallelism is not supported; it must be None")
    _checked_heads(q, k, v, scale)
    check_tensors(q.device, q=q, k=k, v=v, initial_state=initial_state, A_log=kwargs.get("A_log"),
                  dt_bias=kwargs.get("dt_bias"))
    _checked_batch(q, initial_state, cu_seqlens)
    _checked_gates(v, g, beta)


def _renamed(state_v_first: bool, kwargs: Dict[str, Any]) -> bool:
    """`state_v_first`, also under its old name."""
    if "head_first" in kwargs:
        raise Unsupported("head_first: not supported; inputs must be [B, T, H, ...]")
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ArgumentError("transpose_state_layout: given with state_v_first, its new name")
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=3)
    return bool(kwargs["transpose_state_layout"])


def _prefill(q: Tensor, k: Tensor, v: Tensor, gates: Dict[str, Any], initial_state: Optional[Tensor], wanted: bool,
             cu_seqlens: Optional[Tensor], scale: Optional[float], qk_l2norm: bool,
             layout: str) -> Tuple[Tensor, Optional[Tensor]]:
    trains = ops.needs_gradient(q, k, v, initial_state, *gates.values())
    op: Any = ops.prefill_saving if trains else ops.prefill
    o, state, *_ = op(rows(q), rows(k), rows(v), **gates, initial_state=initial_state, cu_seqlens=cu_seqlens,
                      scale=scale, qk_l2norm=qk_l2norm, state_layout=layout, output_final_state=wanted)
    return o, state if wanted else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    chunk_indices: Optional[Tensor] = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Returns o `[B, T, HV, V]` in the type of q, and the final state in f32, or None without `output_final_state`.

    q, k `[B, T, H, K]` and v `[B, T, HV, V]`, bf16 or fp16, of any strides; HV is a multiple of H. g `[B, T, HV]`, natural
    logarithms; beta `[B, T, HV]`; both of any type. `initial_state` `[N, HV, K, V]`, f32, bf16 or fp16, is not written;
    `[N, HV, V, K]` with `state_v_first`, as is the final state. cu_seqlens `[N + 1]` i32 or i64: B is then 1. On the host it
    makes a plan for these lengths; on a GPU it is read there. cu_seqlens_cpu and chunk_indices are not needed.

    Keywords: `use_gate_in_kernel=True` with `A_log` `[HV]` and `dt_bias` `[HV]` or None makes g the input of the gate.
    `chunk_size` is accepted; chunks have 64 tokens. With `use_beta_sigmoid_in_kernel` beta is the input of the sigmoid,
    doubled with `allow_neg_eigval`.

    Gradients flow to q, k, v, g, beta, initial_state, A_log and dt_bias, each in the type of its input.

    Raises `Unsupported` for f32 q, other K and V, gates per channel and `cp_context`.
    """
    _check_chunk(q, k, v, g, beta, initial_state, cu_seqlens, cp_context, kwargs, scale)
    state_v_first = _renamed(state_v_first, kwargs)
    if kwargs.get("chunk_size", 64) not in (16, 32, 64):
        raise ArgumentError(f"chunk_size: {kwargs['chunk_size']}; it must be 16, 32 or 64")
    gates = _gates(v, g, beta, bool(kwargs.get("use_gate_in_kernel", False)), use_beta_sigmoid_in_kernel,
                   kwargs.get("A_log"), kwargs.get("dt_bias"), allow_neg_eigval)
    return _prefill(q, k, v, gates, _state(initial_state), output_final_state, cu_seqlens, scale, use_qk_l2norm_in_kernel,
                    "value_major" if state_v_first else "key_major")


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor] = None,
    gk: Optional[Tensor] = None,
    gv: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    **kwargs: Any,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Returns what `chunk_gated_delta_rule` returns, for the same shapes and types. g None: no decay; beta None: 1.

    One token of every sequence, with an initial and a final state, is a decode: one kernel reads each state once and
    writes the new one once. Everything else is a prefill. `initial_state` is not written.

    Raises `Unsupported` for gk, gv, and what `chunk_gated_delta_rule` does not support. There is no backward, as in FLA:
    it raises NotImplementedError. `chunk_gated_delta_rule` has one, for any number of tokens.
    """
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    if ops.needs_gradient(*inputs):
        with torch.no_grad():
            results = fused_recurrent_gated_delta_rule(
                q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
                **kwargs)
        return ops.without_backward("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule", inputs, results)
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            raise Unsupported(f"{name}: there are no gates per channel; it must be None")
    state_v_first = _renamed(state_v_first, kwargs)
    _checked_heads(q, k, v, scale)
    check_tensors(q.device, q=q, k=k, v=v, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias)
    _checked_batch(q, initial_state, cu_seqlens)
    gates = _gates(v, g, beta, use_gate_in_kernel, use_beta_sigmoid_in_kernel, A_log, dt_bias, allow_neg_eigval)
    state = _state(initial_state)
    layout = "value_major" if state_v_first else "key_major"
    if cu_seqlens is not None or q.shape[1] != 1 or state is None or not output_final_state:
        return _prefill(q, k, v, gates, state, output_final_state, cu_seqlens, scale, use_qk_l2norm_in_kernel, layout)
    after = torch.empty((q.shape[0], 1, *state.shape[1:]), dtype=torch.float32, device=q.device)
    o, after = ops.verify(rows(q), rows(k), rows(v), state, **gates, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
                          pool_layout=layout, states=after)
    return o, after.squeeze(1)


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Optional[Tensor] = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns `-exp(A_log) softplus(g + dt_bias)` in the shape of g, computed in f32 and rounded to `output_dtype`.

    g `[..., HV]`, A_log and dt_bias `[HV]`, of any type. Gradients flow to all three.
    """
    computed, _ = ops.gate(g, g, A_log, dt_bias)
    return computed.to(output_dtype)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def register(simulator: bool = False) -> Any:
    """Makes deltawave a backend of FLA's gated delta rule, before FlashQLA and Triton, and returns its class, whose `calls`
    counts the calls that it answered. With `simulator` it takes tensors on the CPU too, which run on deltawave's simulator.

    FLA then calls `chunk_gated_delta_rule` here wherever it can; what raises `Unsupported` or `ArgumentError` goes to FLA's
    next backend, and FLA logs why. `FLA_DELTAWAVE=0` in the environment switches it off. FLA dispatches only this
    function: `fused_recurrent_gated_delta_rule` must be called here.

    Raises `Unsupported` if fla-core is missing or older than 0.6, whose registry this uses, or if
    FLA_DISABLE_BACKEND_DISPATCH=1 has switched the registry off.
    """
    try:
        from fla.backends import BaseBackend, register as add
    except ImportError as problem:
        raise Unsupported(f"fla: {problem}; deltawave.fla.register needs fla-core 0.6 or newer") from None
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise Unsupported("FLA_DISABLE_BACKEND_DISPATCH: 1; unset it, FLA calls no backend with it")

    class DeltawaveBackend(BaseBackend):  # type: ignore[misc]
        """Kernels for gfx942 and sm_90a, and the simulator for CPU tensors."""

        backend_type = "deltawave"
        package_name = "deltawave"
        env_var = "FLA_DELTAWAVE"
        priority = 1
        calls = 0  # answered by deltawave, for tests

        def chunk_gated_delta_rule_verifier(
                self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: Optional[float] = None,
                initial_state: Optional[Tensor] = None, output_final_state: bool = False,
                use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
                allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Optional[Tensor] = None,
                cu_seqlens_cpu: Optional[Tensor] = None, chunk_indices: Optional[Tensor] = None, cp_context: Any = None,
                **kwargs: Any) -> Tuple[bool, Optional[str]]:
            if q.device.type != "cuda" and not simulator:
                return False, f"q: on {q.device}; register(simulator=True) takes tensors on the CPU"
            try:
                _check_chunk(q, k, v, g, beta, initial_state, cu_seqlens, cp_context, kwargs, scale)
            except ArgumentError as problem:
                return False, str(problem)
            return True, None

        def chunk_gated_delta_rule(self, *arguments: Any, **named: Any) -> Tuple[Tensor, Optional[Tensor]]:
            type(self).calls += 1
            return chunk_gated_delta_rule(*arguments, **named)

    add("gated_delta_rule")(DeltawaveBackend)
    return DeltawaveBackend
