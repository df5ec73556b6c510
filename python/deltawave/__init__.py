"""Gated DeltaNet inference kernels for AMD Instinct MI300 (gfx942), through libdeltawave_c.

    import deltawave as dw

    context = dw.Context()                              # a GPU, or the simulator
    spec = dw.PrefillSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
    plan = dw.Prefill.packed(context, spec, [0, 65, 192], tokens=192)
    plan.launch(q=q, k=k, v=v, g=g, beta=beta, o=o, final_state=state)
    context.synchronize()

Tensors are torch tensors on a GPU. On the simulator they are NumPy arrays that the context made. `deltawave.ops` has the
operations as torch custom ops. README.md has examples.
"""

from .arrays import Array, array, bf16_bits, to_bf16, to_float
from .context import Context, Memory
from .conv import Conv, ConvBackward, ConvSpec
from .decode import Decode, DecodeSpec
from .errors import ArgumentError, DeviceError, DriverError, Error, InternalError, LibraryError, RanksError, Unsupported
from .gate import gate, gate_backward, gate_backward_workspace_bytes
from .layer import Layer, LayerBackward, LayerSpec
from .library import Library
from .norm import norm, norm_backward, norm_backward_workspace_bytes
from .parallel import ParallelPrefill, ParallelPrefillBackward, RankLayout
from .prefill import Prefill, PrefillBackward, PrefillSpec

__version__ = "0.1.0"

__all__ = ["ArgumentError", "Array", "Context", "Conv", "ConvBackward", "ConvSpec", "Decode", "DecodeSpec", "DeviceError",
           "DriverError", "Error", "InternalError", "Layer", "LayerBackward", "LayerSpec", "Library", "LibraryError",
           "Memory", "ParallelPrefill", "ParallelPrefillBackward", "Prefill", "PrefillBackward", "PrefillSpec", "RankLayout",
           "RanksError", "Unsupported", "array", "bf16_bits", "gate", "gate_backward", "gate_backward_workspace_bytes", "norm",
           "norm_backward", "norm_backward_workspace_bytes", "to_bf16", "to_float"]
