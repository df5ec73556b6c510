"""Causal depthwise convolution of the projections, split into q, k and v. include/deltawave.h specifies it."""

from ctypes import byref
from dataclasses import dataclass
from typing import Any, Collection, Mapping, Tuple

from . import _abi, arrays, structs
from .context import Context
from .errors import ArgumentError
from .plan import Launch, Plan, PlanWithWorkspace
from .values import shown, whole

ACTIVATIONS = {"silu": _abi.DW_ACTIVATION_SILU, "none": _abi.DW_ACTIVATION_NONE}
X_LAYOUTS = {"flat": _abi.DW_CONV_FLAT, "interleaved": _abi.DW_CONV_INTERLEAVED, "separate": _abi.DW_CONV_SEPARATE}
STATE_LAYOUTS = {"channel_major": _abi.DW_CONV_CHANNEL_MAJOR, "token_major": _abi.DW_CONV_TOKEN_MAJOR}


@dataclass(frozen=True)
class ConvSpec:
    """Heads, dimensions and options of a convolution, for any batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    width: int = 4  # tokens that an output depends on: 2, 3 or 4
    dtype: str = "bf16"  # of x, q, k, v and the conv states: "bf16", "fp16", or a torch or NumPy dtype
    activation: str = "silu"  # or "none"
    keep_states: bool = False  # conv states are read, not written: `Decode.commit` writes them for accepted tokens
    qk_l2norm: bool = False  # rows of q and k are l2-normalised, then rounded; key_dim is then at most 256

    @property
    def channels(self) -> int:
        """Number of channels: q, then k, then v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def struct(self) -> _abi.dw_conv_spec:
        """The C struct."""
        return structs.spec(_abi.dw_conv_spec, {"activation": ACTIVATIONS}, **vars(self))


class Conv(Plan):
    """A convolution of one batch shape. `packed` and `device` make one.

    Launches take, as arrays of the context or tensors of its device:

    - x `[T, columns]`, with `x_layout` "flat" (q | k | v, then columns that are not read) or "interleaved" (for each key
      head q | k | v | z); or x_q, x_k, x_v `[T, blocks, channels of a block]` with "separate"
    - weight `[channels, width]`, the last column for the newest token, and bias `[channels]`, of any type
    - state `[slots, channels, columns]`, updated in place; `[slots, columns, channels]` with
      `state_layout="token_major"`
    - slots `[N]` i32; a slot that is negative or beyond the pool makes the sequence padding, and so does null_slot, a
      number. Of slots `[N, columns]` the first column counts
    - has_initial_state `[N]`, bytes or booleans; 0: the slot reads as zeros
    - q, k `[T, HK, K]` and v `[T, HV, V]`, outputs; rows past the last sequence become 0
    - cu_seqlens `[N + 1]`, i32 or i64, with plans of `device`
    - a, b, a_log, dt_bias, g, beta and `allow_neg_eigval`, as for `gate`: computes g and beta in the same launch
    - accepted `[N]` i32, for speculative decoding: tokens of the step before that were accepted, counted from 1. Sequence n
      reads width - 1 columns of its state from column `accepted[n] - 1` on. Then it writes, from column 0 on, those columns
      but the first, and its tokens: a state has width - 2 columns more than a sequence has tokens
    """

    NAME, TENSORS = "conv", _abi.dw_conv_tensors
    CHOICES = {"x_layout": X_LAYOUTS, "state_layout": STATE_LAYOUTS}
    keep_states = False

    @classmethod
    def packed(cls, context: Context, spec: ConvSpec, cu_seqlens: Any, tokens: int) -> "Conv":
        """A plan for packed sequences whose lengths the host knows: n has rows `cu_seqlens[n]` to `cu_seqlens[n + 1]`."""
        lengths = arrays.host_lengths(cu_seqlens)
        tokens, struct = whole("tokens", tokens, 64), structs.made(spec, ConvSpec)
        made = cls(context, lengths.entries - 1, "packed", struct, byref(lengths), tokens)
        made.keep_states = bool(spec.keep_states)
        return made

    @classmethod
    def device(cls, context: Context, spec: ConvSpec, tokens: int, sequences: int) -> "Conv":
        """A plan for packed sequences whose lengths are on the device alone."""
        tokens, sequences = whole("tokens", tokens, 64), whole("sequences", sequences, 64)
        made = cls(context, sequences, "device", structs.made(spec, ConvSpec), tokens, sequences)
        made.keep_states = bool(spec.keep_states)
        return made

    def bind(self, **tensors: Any) -> Launch:
        if "slot_columns" in tensors:
            raise ArgumentError("slot_columns: no argument of a launch; it follows from slots")
        slots = tensors.get("slots")
        table = slots if slots is None else self.context.describe("slots", slots)
        if table is not None and len(table.shape) == 2:
            address = structs.vector("slots", table, (self.sequences, None))
            tensors.update(slots=arrays.array(address, "i32", self.sequences), slot_columns=table.shape[1])
        bound = super().bind(**structs.with_null_slot(tensors))
        bound.kept += (slots,)
        return bound

    def unwritten(self, tensors: Mapping[str, Any]) -> Collection[str]:
        return ("state",) if self.keep_states else ()


class ConvBackward(PlanWithWorkspace):
    """The gradients of a `Conv`, for the same batches. Launches take its inputs x, weight and bias, and

    - initial_state `[N, channels, columns]`, a copy of the states that the convolution read, row n for sequence n, with
      `initial_layout`; absent: sequences started from zeros. has_initial_state `[N]`, as for the convolution
    - d_q, d_k `[T, HK, K]` and d_v `[T, HV, V]`, of the type of x and any strides that inputs may have; d_final_state, as
      initial_state, with `d_final_layout`; absent: zeros
    - the gradients to compute, outputs; those that are absent are not computed: d_x, laid out as x (d_x_q, d_x_k, d_x_v with
      "separate"), of which columns that are not of q, k and v are not written; d_weight `[channels, width]` and d_bias
      `[channels]`, f32; d_initial_state, as initial_state, with `d_initial_layout`. Rows of d_x past the last sequence become
      0
    """

    NAME, TENSORS = "conv_backward", _abi.dw_conv_backward_tensors
    CHOICES = {"x_layout": X_LAYOUTS, **{name: STATE_LAYOUTS
                                         for name in ("initial_layout", "d_final_layout", "d_initial_layout")}}

    def __init__(self, conv: Conv) -> None:
        if not isinstance(conv, Conv):
            raise ArgumentError(f"conv: {shown(conv)}; it must be a Conv")
        super().__init__(conv.context, conv.sequences, "create", conv.handle)

    def origin(self) -> Tuple[Any, ...]:
        return ()
