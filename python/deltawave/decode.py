"""Decode: Gated DeltaNet over one or a few tokens of every sequence, as include/deltawave.h specifies it."""

from ctypes import byref
from dataclasses import dataclass
from typing import Optional

from . import _abi, structs
from .context import stream_of
from .conv import STATE_LAYOUTS, X_LAYOUTS
from .plan import Plan
from .values import whole

DRAFTS = {"chain": _abi.DW_DRAFT_CHAIN, "tree": _abi.DW_DRAFT_TREE}


@dataclass(frozen=True)
class DecodeSpec:
    """What a decode computes, whatever the batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 16 up to 256
    value_dim: int  # a multiple of 16 up to 256
    dtype: str = "bf16"  # of q, k, v and o: "bf16" or "fp16", or torch's or NumPy's dtype
    head_map: str = "grouped"  # value head h reads key head h // (HV / HK); "tiled": h % HK
    qk_l2norm: bool = False  # rows of q and k are l2-normalised inside
    scale: Optional[float] = None  # None or 0: K ** -0.5
    tokens: int = 1  # T, of every sequence: 1 to 16
    draft: str = "chain"  # what several tokens are to each other; "tree" is refused, for now

    def struct(self):
        """The C struct."""
        return structs.spec(_abi.dw_decode_spec, {"head_map": structs.HEAD_MAPS, "draft": DRAFTS}, **vars(self))


class Decode(Plan):
    """A decode of `batch` sequences of `spec.tokens` tokens each.

    Launches take, as arrays of the context or tensors of its device, `[B, T, ...]`, or `[B T, ...]` with the tokens of a
    sequence one after the other:

    - q, k `[B, T, HK, K]`, v `[B, T, HV, V]`, and o `[B, T, HV, V]`, which is written
    - g and beta, or a, b, a_log, dt_bias and `allow_neg_eigval`, as `Prefill` has them
    - pool `[slots, HV, K, V]`, updated in place; `[slots, HV, V, K]` with `pool_layout="value_major"`
    - slots, write_slots `[B]` i32 and has_initial_state `[B]`, as `Prefill` has them
    - states `[B T, HV, K, V]`, in the order of the pool, which is then not written: the state after every token
    """

    NAME, TENSORS, CHOICES = "decode", _abi.dw_decode_tensors, {"pool_layout": structs.STATE_LAYOUTS}
    COMMIT_CHOICES = {"pool_layout": structs.STATE_LAYOUTS, "x_layout": X_LAYOUTS, "conv_layout": STATE_LAYOUTS}

    def __init__(self, context, spec, batch):
        batch = whole("batch", batch, 64)
        super().__init__(context, batch, "create", structs.made(spec, DecodeSpec), batch)

    def unwritten(self, tensors):
        return ("pool",) if tensors.get("states") is not None else ()

    def commit(self, stream=None, **tensors):
        """Enqueues what the accepted ones of verified tokens leave behind.

        accepted `[B]` i32, 0 to T; slots `[B]` i32; states and pool of the launch; and where the convolution's states
        follow, conv_state with `conv_layout`, x (or x_q, x_k, x_v) with `x_layout`, and has_initial_state, as `Conv` has
        them, of a launch with `keep_states`.
        """
        arguments = structs.tensors(_abi.dw_commit_tensors, self.COMMIT_CHOICES, self.context, self.entries, tensors)
        self.context.library.call("dw_commit_launch", self.handle, stream_of(stream, tensors.values()), byref(arguments))
