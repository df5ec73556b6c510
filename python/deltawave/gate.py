"""Gates g and beta from raw gates of the projections. Prefill, decode and conv can compute them in their own launches."""

from ctypes import byref
from typing import Any

from . import _abi, structs
from .context import Context, checked, stream_of


def gate(context: Context, stream: Any = None, **tensors: Any) -> None:
    """Enqueues `g = -exp(a_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, doubled with `allow_neg_eigval=True`.

    Inputs of any type: a, b `[T, HV]`, or `[T, blocks, heads of a block]` with any stride between blocks; a_log, dt_bias
    `[HV]`. Outputs: g and beta `[T, HV]`, f32.
    """
    arguments = structs.tensors(_abi.dw_gate_tensors, {}, checked(context), structs.no_vectors, tensors)
    context.library.call("dw_gate_launch", context.handle, stream_of(stream, tensors.values()), byref(arguments))
