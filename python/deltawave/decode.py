"""Decode: Gated DeltaNet over 1 to 16 tokens of every sequence. include/deltawave.h specifies it."""

from ctypes import byref
from dataclasses import dataclass
from typing import Any, Collection, Mapping, Optional

from . import _abi, structs
from .context import Context, stream_of
from .conv import STATE_LAYOUTS, X_LAYOUTS
from .errors import ArgumentError
from .norm import GATES
from .plan import Launch, Plan
from .values import whole

DRAFTS = {"chain": _abi.DW_DRAFT_CHAIN, "tree": _abi.DW_DRAFT_TREE}


@dataclass(frozen=True)
class DecodeSpec:
    """Heads, dimensions and options of a decode, for any batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 16 up to 256
    value_dim: int  # a multiple of 16 up to 256
    dtype: str = "bf16"  # of q, k, v and o: "bf16", "fp16", or a torch or NumPy dtype
    head_map: str = "grouped"  # value head h reads key head h // (HV / HK); "tiled": h % HK
    qk_l2norm: bool = False  # the kernels l2-normalise the rows of q and k
    scale: Optional[float] = None  # None or 0: K ** -0.5
    tokens: int = 1  # T: tokens of every sequence, 1 to 16
    draft: str = "chain"  # each token follows the one before it; "tree" is refused

    def struct(self) -> _abi.dw_decode_spec:
        """The C struct."""
        return structs.spec(_abi.dw_decode_spec, {"head_map": structs.HEAD_MAPS, "draft": DRAFTS}, **vars(self))


class Decode(Plan):
    """A decode of `batch` sequences of `spec.tokens` tokens each.

    Launches take, as arrays of the context or tensors of its device, `[B, T, ...]`, or `[B T, ...]` with the tokens of a
    sequence one after the other:

    - q, k `[B, T, HK, K]`, v `[B, T, HV, V]`, and o `[B, T, HV, V]`, an output
    - g and beta, or a, b, a_log, dt_bias and `allow_neg_eigval`, as for `Prefill`
    - pool `[slots, HV, K, V]`, updated in place; `[slots, HV, V, K]` with `pool_layout="value_major"`
    - slots, write_slots `[B]` i32 and has_initial_state `[B]`, as for `Prefill`
    - states `[B T, HV, K, V]` in the layout of the pool, an output: the state after every token; the pool is then not
      written

    Speculative decoding without a commit, where every draft has a slot, and the next step reads that of the last accepted
    draft:

    - draft_slots `[B, T]` i32: slot of the state after each token; write_slots is then absent. Slots of states if that is
      given, which is then `[slots, HV, K, V]` of any number of slots, and the pool is not written
    - read_slots `[B, columns]` i32 and accepted `[B]` i32, instead of slots: sequence n reads the slot in column
      `accepted[n] - 1`; counts are clamped. read_slots and draft_slots may be one table
    - cu_seqlens `[B + 1]` on the device, i32 or i64: rows of each sequence, at most T; tensors over tokens are then
      `[rows, ...]`
    - null_slot, a number: no slot, besides slots that are negative or beyond the pool

    The gated norm of o, in place, as `deltawave.norm`; o is then `[B T, HV, V]` or `[rows, HV, V]`:

    - z, as for `deltawave.norm`, norm_weight `[V]`, norm_eps and norm_gate, "silu" or "sigmoid". One kernel in all if V is
      128, K at most 128 and that is faster for the batch, otherwise one more. Rows of no sequence must be zeros if they are to
      stay so
    """

    NAME, TENSORS, CHOICES = "decode", _abi.dw_decode_tensors, {"pool_layout": structs.STATE_LAYOUTS, "norm_gate": GATES}
    COMMIT_CHOICES = {"pool_layout": structs.STATE_LAYOUTS, "x_layout": X_LAYOUTS, "conv_layout": STATE_LAYOUTS}

    def __init__(self, context: Context, spec: DecodeSpec, batch: int) -> None:
        batch = whole("batch", batch, 64)
        super().__init__(context, batch, "create", structs.made(spec, DecodeSpec), batch)
        self.tokens = spec.tokens

    def entries(self, name: str) -> Any:
        tables = {"draft_slots": (self.sequences, self.tokens), "read_slots": (self.sequences, None)}
        return tables.get(name) or super().entries(name)

    def bind(self, **tensors: Any) -> Launch:
        if "read_columns" in tensors:
            raise ArgumentError("read_columns: no argument of a launch; it follows from read_slots")
        slots = tensors.get("read_slots")
        if slots is not None:
            tensors["read_columns"] = (1, *self.context.describe("read_slots", slots).shape)[-1]
        if tensors.get("z") is not None:
            tensors.setdefault("norm_eps", 1e-6)
        for name in ("norm_eps", "norm_gate"):
            if tensors.get("z") is None and tensors.get(name) is not None:
                raise ArgumentError(f"{name}: given without z; a norm needs z")
        return super().bind(**structs.with_null_slot(tensors))

    def unwritten(self, tensors: Mapping[str, Any]) -> Collection[str]:
        return ("pool",) if tensors.get("states") is not None else ()

    def commit(self, stream: Any = None, **tensors: Any) -> None:
        """Enqueues the commit of accepted tokens: moves the state after the last of them to its slot.

        Takes accepted `[B]` i32, 0 to T; slots `[B]` i32; states and pool of the launch. To commit conv states too, pass
        conv_state with `conv_layout`, x (or x_q, x_k, x_v) with `x_layout`, and has_initial_state, as to the `Conv` launch
        with `keep_states`.
        """
        arguments = structs.tensors(_abi.dw_commit_tensors, self.COMMIT_CHOICES, self.context, self.entries, tensors)
        self.context.library.call("dw_commit_launch", self.handle, stream_of(stream, tensors.values()), byref(arguments))
