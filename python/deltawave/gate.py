"""Gates g and beta from raw gates of the projections. Prefill, decode and conv can compute them in their own launches."""

from ctypes import byref, c_size_t
from typing import Any

from . import _abi, structs
from .context import Context, checked, stream_of
from .errors import ArgumentError
from .plan import memory_of
from .values import whole


def gate(context: Context, stream: Any = None, **tensors: Any) -> None:
    """Enqueues `g = -exp(a_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, doubled with `allow_neg_eigval=True`.

    Inputs of any type: a, b `[T, HV]`, or `[T, blocks, heads of a block]` with any stride between blocks; a_log, dt_bias
    `[HV]`. Outputs: g and beta `[T, HV]`, f32.
    """
    arguments = structs.tensors(_abi.dw_gate_tensors, {}, checked(context), structs.no_vectors, tensors)
    context.library.call("dw_gate_launch", context.handle, stream_of(stream, tensors.values()), byref(arguments))


def gate_backward_workspace_bytes(context: Context, tokens: int, value_heads: int) -> int:
    """Bytes of workspace that `gate_backward` needs."""
    size = c_size_t()
    sizes = (whole("tokens", tokens, 64), whole("value_heads", value_heads, 64))
    checked(context).library.call("dw_gate_backward_workspace_bytes", context.handle, *sizes, byref(size))
    return size.value


def gate_backward(context: Context, stream: Any = None, *, workspace: Any, **tensors: Any) -> None:
    """Enqueues the gradients of `gate`, whose inputs it takes. d_g and d_beta `[T, HV]`, f32, are gradients of g and beta;
    absent: zeros.

    Outputs, those that are wanted: d_a and d_b, shaped as a and b, of any type; d_a_log and d_dt_bias `[HV]`, f32.
    workspace: a tensor of `gate_backward_workspace_bytes` bytes, or its address.
    """
    shape = tuple(checked(context).describe("a", tensors["a"]).shape) if tensors.get("a") is not None else ()
    heads = shape[1] * (shape[2] if len(shape) == 3 else 1) if len(shape) in (2, 3) else 0
    try:
        least = gate_backward_workspace_bytes(context, shape[0], heads) if heads else 0
    except ArgumentError:  # the launch says so, and names the tensor
        least = 0
    address, size = memory_of(context, workspace, least)
    values = {**tensors, "workspace": address, "workspace_bytes": size}
    arguments = structs.tensors(_abi.dw_gate_backward_tensors, {}, context, structs.no_vectors, values)
    context.library.call("dw_gate_backward_launch", context.handle, stream_of(stream, tensors.values()), byref(arguments))
