"""g and beta from what the projections give, as an operation of its own. Prefill computes them inside if asked to."""

from ctypes import byref

from . import _abi, structs
from .context import checked, stream_of


def gate(context, stream=None, **tensors):
    """Enqueues `g = -exp(a_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, doubled with `allow_neg_eigval=True`.

    a, b `[T, HV]`, or `[T, blocks, heads of a block]` with blocks at any distance, a_log and dt_bias `[HV]` have any type; g
    and beta `[T, HV]`, f32, are written.
    """
    arguments = structs.tensors(_abi.dw_gate_tensors, {}, checked(context), None, tensors)
    context.library.call("dw_gate_launch", context.handle, stream_of(stream, tensors.values()), byref(arguments))
