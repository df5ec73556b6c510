"""Gated RMS norm of the outputs. include/deltawave.h specifies it."""

from ctypes import byref
from typing import Any

from . import _abi, structs
from .context import Context, checked, stream_of

GATES = {"silu": _abi.DW_GATE_SILU, "sigmoid": _abi.DW_GATE_SIGMOID}


def norm(context: Context, stream: Any = None, *, eps: float = 1e-6, gate: str = "silu", **tensors: Any) -> None:
    """Enqueues `y = x / sqrt(mean(x^2) + eps) * weight * gate(z)`, for each row of V numbers.

    x and the output y are `[T, HV, V]`; without x, y is normalised in place. z is `[T, HV, V]`, or
    `[T, blocks, heads * V]` as a view of the projections. weight `[V]` has any type; absent: 1. `gate` is "silu" or
    "sigmoid".
    """
    values = {**tensors, "eps": eps, "gate": gate}
    arguments = structs.tensors(_abi.dw_norm_tensors, {"gate": GATES}, checked(context), structs.no_vectors, values)
    context.library.call("dw_norm_launch", context.handle, stream_of(stream, tensors.values()), byref(arguments))
