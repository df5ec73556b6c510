"""Gated RMS norm of the outputs, and its gradients. include/deltawave.h specifies it."""

from ctypes import byref, c_size_t
from typing import Any

from . import _abi, structs
from .calls import note_launch
from .context import Context, checked, stream_of
from .errors import ArgumentError
from .plan import memory_of
from .values import whole

GATES = {"silu": _abi.DW_GATE_SILU, "sigmoid": _abi.DW_GATE_SIGMOID}


def norm(context: Context, stream: Any = None, *, eps: float = 1e-6, gate: str = "silu", **tensors: Any) -> None:
    """Enqueues `y = x / sqrt(mean(x^2) + eps) * weight * gate(z)`, for each row of V numbers.

    x and the output y are `[T, HV, V]`; without x, y is normalised in place. z is `[T, HV, V]`, or
    `[T, blocks, heads * V]` as a view of the projections. weight `[V]` has any type; absent: 1. `gate` is "silu" or
    "sigmoid".
    """
    values, repeats = {**tensors, "eps": eps, "gate": gate}, checked(context).norms
    key, stream = repeats.key(values), stream_of(stream, tensors.values())

    def bind() -> _abi.dw_norm_tensors:
        return structs.tensors(_abi.dw_norm_tensors, {"gate": GATES}, context, structs.no_vectors, values)

    note_launch(context, "dw_norm_launch", context.handle, bind, values, context)
    repeat = repeats.take(key, context, values)
    arguments = repeat.arguments if repeat else bind()
    context.library.call("dw_norm_launch", context.handle, stream, byref(arguments))
    if repeat:
        repeats.give(key, repeat)
    elif key is not None:
        repeats.keep(key, arguments, values)


def norm_backward_workspace_bytes(context: Context, tokens: int, value_heads: int, value_dim: int) -> int:
    """Bytes of workspace that `norm_backward` needs."""
    size = c_size_t()
    sizes = (whole("tokens", tokens, 64), whole("value_heads", value_heads, 64), whole("value_dim", value_dim, 64))
    checked(context).library.call("dw_norm_backward_workspace_bytes", context.handle, *sizes, byref(size))
    return size.value


def norm_backward(context: Context, stream: Any = None, *, workspace: Any, eps: float = 1e-6, gate: str = "silu",
                  **tensors: Any) -> None:
    """Enqueues the gradients of `norm`. x, z and weight are its inputs: x is what the norm read, so a norm in place has no
    gradients. d_y `[T, HV, V]` is the gradient of y.

    Outputs, those that are wanted: d_x `[T, HV, V]` and d_z, shaped as z, of the type of x; d_weight `[V]` f32. workspace: a
    tensor of `norm_backward_workspace_bytes` bytes, or its address.
    """
    shape = tuple(checked(context).describe("x", tensors["x"]).shape) if tensors.get("x") is not None else ()
    try:
        least = norm_backward_workspace_bytes(context, *shape) if len(shape) == 3 else 0
    except ArgumentError:  # the launch says so, and names the tensor
        least = 0
    address, size = memory_of(context, workspace, least)
    values = {**tensors, "eps": eps, "gate": gate, "workspace": address, "workspace_bytes": size}
    arguments = structs.tensors(_abi.dw_norm_backward_tensors, {"gate": GATES}, context, structs.no_vectors, values)
    context.library.call("dw_norm_backward_launch", context.handle, stream_of(stream, tensors.values()), byref(arguments))
