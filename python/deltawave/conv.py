"""Causal depthwise convolution of the projections, split into q, k and v, as include/deltawave.h specifies it."""

from ctypes import byref
from dataclasses import dataclass

from . import _abi, arrays, structs
from .plan import Plan
from .values import whole

ACTIVATIONS = {"silu": _abi.DW_ACTIVATION_SILU, "none": _abi.DW_ACTIVATION_NONE}
X_LAYOUTS = {"flat": _abi.DW_CONV_FLAT, "interleaved": _abi.DW_CONV_INTERLEAVED, "separate": _abi.DW_CONV_SEPARATE}
STATE_LAYOUTS = {"channel_major": _abi.DW_CONV_CHANNEL_MAJOR, "token_major": _abi.DW_CONV_TOKEN_MAJOR}


@dataclass(frozen=True)
class ConvSpec:
    """What a convolution computes, whatever the batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    width: int = 4  # tokens that an output depends on: 2, 3 or 4
    dtype: str = "bf16"  # of x, q, k, v and the states: "bf16" or "fp16", or torch's or NumPy's dtype
    activation: str = "silu"  # or "none"
    keep_states: bool = False  # states are read and not written: `Decode.commit` makes up for it
    qk_l2norm: bool = False  # rows of q and k, of key_dim up to 256, are normed before they are rounded

    @property
    def channels(self):
        """Channels in all: q, then k, then v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def struct(self):
        """The C struct."""
        return structs.spec(_abi.dw_conv_spec, {"activation": ACTIVATIONS}, **vars(self))


class Conv(Plan):
    """A convolution of one batch shape. `packed` and `device` make one.

    Launches take, as arrays of the context or tensors of its device:

    - x `[T, columns]`, with `x_layout` "flat" (q | k | v, and what follows) or "interleaved" (for each key head q | k |
      v | z); or x_q, x_k, x_v `[T, blocks, channels of a block]` with "separate"
    - weight `[channels, width]`, the newest token's last, and bias `[channels]`, of any type
    - state `[slots, channels, columns]`, updated in place; `[slots, columns, channels]` with
      `state_layout="token_major"`
    - slots `[N]` i32, negative or beyond the pool: padding; has_initial_state `[N]`, bytes or booleans
    - q, k `[T, HK, K]` and v `[T, HV, V]`, which are written; rows past the last sequence become 0
    - cu_seqlens `[N + 1]`, i32 or i64, with plans of `device`
    - a, b, a_log, dt_bias, g, beta and `allow_neg_eigval`, as `gate` has them: g and beta in the same launch
    """

    NAME, TENSORS = "conv", _abi.dw_conv_tensors
    CHOICES = {"x_layout": X_LAYOUTS, "state_layout": STATE_LAYOUTS}
    keep_states = False

    @classmethod
    def packed(cls, context, spec, cu_seqlens, tokens):
        """Of packed sequences; n has rows `cu_seqlens[n]` to `cu_seqlens[n + 1]`, numbers that the host has."""
        lengths = arrays.host_lengths(cu_seqlens)
        tokens, struct = whole("tokens", tokens, 64), structs.made(spec, ConvSpec)
        made = cls(context, lengths.entries - 1, "packed", struct, byref(lengths), tokens)
        made.keep_states = bool(spec.keep_states)
        return made

    @classmethod
    def device(cls, context, spec, tokens, sequences):
        """Of packed sequences whose lengths are on the device alone."""
        tokens, sequences = whole("tokens", tokens, 64), whole("sequences", sequences, 64)
        made = cls(context, sequences, "device", structs.made(spec, ConvSpec), tokens, sequences)
        made.keep_states = bool(spec.keep_states)
        return made

    def unwritten(self, tensors):
        return ("state",) if self.keep_states else ()
