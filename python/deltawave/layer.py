"""A whole Gated DeltaNet layer between its projections. include/deltawave.h specifies it."""

from ctypes import byref
from dataclasses import dataclass
from typing import Any, Optional, Tuple

from . import _abi, arrays, structs
from .context import Context
from .conv import STATE_LAYOUTS, X_LAYOUTS
from .errors import ArgumentError
from .norm import GATES
from .plan import PlanWithWorkspace
from .values import shown, whole


@dataclass(frozen=True)
class LayerSpec:
    """Heads, dimensions and options of a layer, for any batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 16 up to 256
    value_dim: int  # a multiple of 16 up to 256
    dtype: str = "bf16"  # of x, z, y and the conv states: "bf16", "fp16", or a torch or NumPy dtype
    head_map: str = "grouped"  # value head h reads key head h // (HV / HK); "tiled": h % HK
    width: int = 4  # tokens that an output of the convolution depends on: 2, 3 or 4
    qk_l2norm: bool = True  # rows of q and k are l2-normalised
    scale: Optional[float] = None  # None or 0: K ** -0.5
    allow_neg_eigval: bool = False  # beta is 2 sigmoid(b); see `Prefill` for its errors
    eps: float = 1e-6  # of the norm
    gate: str = "silu"  # output gate of the norm; or "sigmoid"
    segments: Optional[int] = None  # number of segments of each prefill; None: least estimated time
    path: str = "auto"  # kernels of the prefill, as in `PrefillSpec`

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: q, then k, then v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def struct(self) -> _abi.dw_layer_spec:
        """The C struct."""
        choices = {"head_map": structs.HEAD_MAPS, "gate": GATES, "path": structs.PATHS}
        return structs.spec(_abi.dw_layer_spec, choices, **vars(self))


class Layer(PlanWithWorkspace):
    """A layer over batches of one shape: first decodes, sequences of one token each, then prefills of any lengths.
    `packed` and `device` make one.

    Launches take, as arrays of the context or tensors of its device:

    - x, the rows that contain q, k and v, with `x_layout`; or x_q, x_k and x_v: as for `Conv`
    - z `[T, blocks, heads * V]`; absent: the columns of x after q, k and v
    - a, b `[T, HV]`, or `[T, blocks, heads of a block]` with any stride between blocks, of any type
    - conv_weight `[channels, width]`, conv_bias `[channels]`, a_log, dt_bias `[HV]`, norm_weight `[V]`, of any type;
      absent biases are 0, an absent norm_weight is 1
    - conv_state `[slots, channels, columns]` with `conv_layout`, and pool `[slots, HV, K, V]` with `pool_layout`, both
      updated in place; a sequence without tokens writes to neither, whatever has_initial_state holds
    - slots `[N]` i32, in both pools; absent: slot n for sequence n; a slot that is negative or beyond the pools makes the
      sequence padding
    - has_initial_state `[N]`, bytes or booleans; 0: both states read as zeros
    - y `[T, HV, V]`, an output; rows past the last sequence become 0
    - o `[T, HV, V]`, an output: what the norm reads, for `LayerBackward`. Without it the norm works in place, with the same
      bits
    - cu_seqlens `[N + 1]`, i32 or i64, with plans of `device`
    - workspace, as for `Prefill`
    """

    NAME, TENSORS = "layer", _abi.dw_layer_tensors
    CHOICES = {"x_layout": X_LAYOUTS, "conv_layout": STATE_LAYOUTS, "pool_layout": structs.STATE_LAYOUTS}

    @classmethod
    def packed(cls, context: Context, spec: LayerSpec, cu_seqlens: Any, tokens: int, decodes: int = 0) -> "Layer":
        """A plan for packed sequences whose lengths the host knows: n has rows `cu_seqlens[n]` to `cu_seqlens[n + 1]`."""
        lengths = arrays.host_lengths(cu_seqlens)
        tokens, decodes = whole("tokens", tokens, 64), whole("decodes", decodes, 64)
        return cls(context, lengths.entries - 1, "packed", structs.made(spec, LayerSpec), byref(lengths), tokens, decodes)

    @classmethod
    def device(cls, context: Context, spec: LayerSpec, tokens: int, sequences: int, decodes: int = 0) -> "Layer":
        """A plan for packed sequences whose lengths are on the device alone, so that a captured graph serves batches of
        varying lengths. Give unused decodes a negative slot, and unused prefills no tokens. Wrong entries of cu_seqlens
        are replaced and reported as by `Prefill.device`."""
        tokens, sequences = whole("tokens", tokens, 64), whole("sequences", sequences, 64)
        decodes = whole("decodes", decodes, 64)
        return cls(context, sequences, "device", structs.made(spec, LayerSpec), tokens, sequences, decodes)


class LayerBackward(PlanWithWorkspace):
    """The gradients of a `Layer` without decodes, for the same batches. Launches take its inputs, and

    - o `[T, HV, V]`, which the forward kept: nothing else is needed from it
    - initial_conv_state `[N, channels, columns]` with `conv_layout` and initial_state `[N, HV, K, V]` with `pool_layout`:
      copies of the states before the batch, row n for sequence n; absent: sequences started from zeros. has_initial_state
      `[N]`, as for the layer
    - d_y `[T, HV, V]`, of any strides that inputs may have; d_final_conv_state and d_final_state, absent: zeros
    - the gradients to compute, outputs; those that are absent are not computed: d_x, laid out as x (d_x_q, d_x_k, d_x_v with
      "separate"); d_z, shaped as z, absent with z absent: the columns of d_x where z lies in x; d_a and d_b, shaped as a and
      b, of any type; d_conv_weight `[channels, width]`, d_conv_bias `[channels]`, d_a_log and d_dt_bias `[HV]` and
      d_norm_weight `[V]`, f32; d_initial_conv_state and d_initial_state, as the initial states. Rows past the last sequence
      become 0, whatever d_y has there
    """

    NAME, TENSORS = "layer_backward", _abi.dw_layer_backward_tensors
    CHOICES = Layer.CHOICES

    def __init__(self, layer: Layer) -> None:
        if not isinstance(layer, Layer):
            raise ArgumentError(f"layer: {shown(layer)}; it must be a Layer")
        super().__init__(layer.context, layer.sequences, "create", layer.handle)

    def origin(self) -> Tuple[Any, ...]:
        return ()
