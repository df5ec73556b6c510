"""Gated DeltaNet layers that train: `gated_delta_net`, a function between the projections, and `GatedDeltaNet`, a module with
them.

    from deltawave.training import GatedDeltaNet

    layer = GatedDeltaNet(hidden=512, key_heads=4, value_heads=4, key_dim=128, value_dim=128).cuda()
    layer(torch.randn(2, 300, 512, device="cuda")).sum().backward()

Autograd keeps the inputs of a layer and o, which the norm reads: the backward computes the convolution and the states again.
Parameters have the names and shapes that `deltawave.Layer` takes. A trained layer is served with the bits of its training.
"""

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import ops
from .errors import ArgumentError


def gated_delta_net(x: Tensor, z: Tensor, a: Tensor, b: Tensor, conv_weight: Tensor, a_log: Tensor, key_heads: int,
                    value_heads: int, key_dim: int, value_dim: int, conv_bias: Optional[Tensor] = None,
                    dt_bias: Optional[Tensor] = None, norm_weight: Optional[Tensor] = None,
                    cu_seqlens: Optional[Tensor] = None, eps: float = 1e-6, gate: str = "silu", qk_l2norm: bool = True,
                    allow_neg_eigval: bool = False, scale: Optional[float] = None, head_map: str = "grouped") -> Tensor:
    """Returns y `[B, T, HV, V]` of projected rows x `[B, T, 2 HK K + HV V]`: the convolution, the gated delta rule, the gated
    norm. Gradients flow to all tensors but cu_seqlens.

    x holds q, k and v side by side, bf16 or fp16; z `[B, T, HV, V]` in the type of x; a, b `[B, T, HV]`, raw gates, of any
    type; conv_weight `[channels, width]`, conv_bias `[channels]`, a_log and dt_bias `[HV]`, norm_weight `[V]`, of any type.
    Sequences start from zeros. With cu_seqlens `[N + 1]` B is 1, and the rows are packed sequences. Options are those of
    `deltawave.ops.layer`, which serves the same layer from pools of states. `deltawave.ops.layer_forward` is the op behind this
    function, with states before and after.
    """
    columns = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    if x.dim() != 3 or x.shape[2] != sum(columns):
        raise ArgumentError(f"x: shape {list(x.shape)}; it must be [B, T, {sum(columns)}]")
    batch, tokens = x.shape[:2]
    if cu_seqlens is not None and batch != 1:
        raise ArgumentError(f"x: shape {list(x.shape)}; with cu_seqlens it must be [1, T, {sum(columns)}]")
    if tuple(z.shape) != (batch, tokens, value_heads, value_dim):
        raise ArgumentError(f"z: shape {list(z.shape)}; it must be {[batch, tokens, value_heads, value_dim]}")
    for name, gates in (("a", a), ("b", b)):
        if tuple(gates.shape) != (batch, tokens, value_heads):
            raise ArgumentError(f"{name}: shape {list(gates.shape)}; it must be {[batch, tokens, value_heads]}")
    offsets = cu_seqlens
    if offsets is None and batch > 1:
        offsets = torch.arange(batch + 1) * tokens
    y, _, _, _ = ops.layer_forward(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), conv_weight, a_log, key_heads, value_heads,
                                   key_dim, value_dim, z.flatten(0, 1), conv_bias, dt_bias, norm_weight, None, None, offsets,
                                   eps, gate, qk_l2norm, allow_neg_eigval, scale, head_map, "flat")
    return y.unflatten(0, (batch, tokens))


class GatedDeltaNet(nn.Module):  # type: ignore[misc]
    """A Gated DeltaNet layer with its projections, `[B, T, hidden]` to the same shape.

    `hidden` numbers per token; heads and dimensions as in `deltawave.LayerSpec`. `dtype`: the type of the kernels' inputs,
    bf16 or fp16; the projections run in the types of their parameters, or of torch.autocast. Gates are f32. The decay
    starts between exp(-16 * 0.1) and exp(-0.001) a token, as in Mamba2.
    """

    def __init__(self, hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_width: int = 4,
                 eps: float = 1e-6, gate: str = "silu", allow_neg_eigval: bool = False,
                 dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentError(f"dtype: {dtype}; it must be torch.bfloat16 or torch.float16")
        self.heads = (key_heads, value_heads, key_dim, value_dim)
        self.options: dict[str, Any] = {"eps": eps, "gate": gate, "allow_neg_eigval": allow_neg_eigval}
        self.dtype = dtype
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.in_proj = nn.Linear(hidden, channels, bias=False)
        self.z_proj = nn.Linear(hidden, value_heads * value_dim, bias=False)
        self.gate_proj = nn.Linear(hidden, 2 * value_heads, bias=False)
        self.out_proj = nn.Linear(value_heads * value_dim, hidden, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(channels, conv_width).uniform_(-1, 1) / math.sqrt(conv_width))
        self.a_log = nn.Parameter(torch.empty(value_heads).uniform_(1, 16).log())
        step = torch.empty(value_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is `step`
        self.norm_weight = nn.Parameter(torch.ones(value_dim))

    def mix(self, x: Tensor, z: Tensor, a: Tensor, b: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
        """y `[B, T, HV, V]`: the layer between its projections."""
        return gated_delta_net(x.to(self.dtype), z.to(self.dtype), a.float(), b.float(), self.conv_weight, self.a_log,
                               *self.heads, dt_bias=self.dt_bias, norm_weight=self.norm_weight, cu_seqlens=cu_seqlens,
                               **self.options)

    def forward(self, hidden: Tensor, cu_seqlens: Optional[Tensor] = None) -> Any:
        """The layer's output. With cu_seqlens `[N + 1]`, hidden is `[1, T, hidden]`: packed sequences."""
        _, value_heads, _, value_dim = self.heads
        z = self.z_proj(hidden).unflatten(-1, (value_heads, value_dim))
        a, b = self.gate_proj(hidden).chunk(2, -1)
        y = self.mix(self.in_proj(hidden), z, a, b, cu_seqlens)
        return self.out_proj(y.flatten(2).to(self.out_proj.weight.dtype))
