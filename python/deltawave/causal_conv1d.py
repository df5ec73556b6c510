"""causal_conv1d's `causal_conv1d_fn` and `causal_conv1d_update`, with the parameters and results of causal-conv1d 1.7.0.

    from deltawave.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

Outputs are views `[B, C, T]` of memory in which channels are adjacent, `[B, T, C]`: slices of them are what
`deltawave.fla` reads without a copy. An input whose channels are not adjacent, such as a dense `[B, C, T]`, is copied.

`causal_conv1d_fn` differentiates; `causal_conv1d_update` refuses gradients. The functions do less than causal_conv1d's: x is
bf16 or fp16, `cache_seqlens` (a circular state) is not supported, and C is at least 3. What cannot be done raises
`deltawave.Unsupported`, which names the argument.
"""

from typing import Any, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from . import ops
from .errors import ArgumentError, Unsupported
from .fla import check_tensors, device_of, refuse_gradients

# Releases whose signatures these functions have.
CAUSAL_CONV1D_VERSIONS = ("1.7.0",)


def _activation(activation: Optional[str]) -> str:
    """The name of an activation in `deltawave.ops`."""
    if activation not in (None, "silu", "swish"):
        raise Unsupported(f"activation: {activation!r}; it must be None, 'silu' or 'swish'")
    return "none" if activation is None else "silu"


def _split(channels: int) -> Tuple[int, int, int, int]:
    """HK, HV, K and V of a convolution over this number of channels. Parts begin at multiples of 8 channels, which a thread
    reads at once."""
    if channels < 3:
        raise Unsupported(f"x: {channels} channels; it must have at least 3")
    keys = channels // 3 // 8 * 8 or 1
    return 1, 1, keys, channels - 2 * keys


def _checked(x: Tensor, weight: Tensor) -> None:
    """Refuses x that is not `[B, C, T]` in bf16 or fp16, and weights that are not `[C, width]`."""
    if x.dim() != 3:
        raise ArgumentError(f"x: shape {list(x.shape)}; it must be [B, C, T]")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"x: dtype {x.dtype}; it must be torch.bfloat16 or torch.float16")
    device_of("weight", weight)
    if weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ArgumentError(f"weight: shape {list(weight.shape)}; it must be [{x.shape[1]}, width]")


def _packed(x: Tensor) -> Tensor:
    """x `[B, C, T]` as rows `[B T, C]` with adjacent channels: a view, or a copy if x has no such view."""
    by_token = x.transpose(1, 2)
    if by_token.stride()[2] != 1:
        by_token = by_token.contiguous()
    return by_token.reshape(-1, x.shape[1])


def _convolve(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Optional[Tensor],
              cu_seqlens: Union[Tensor, Tuple[int, ...]],
              slots: Optional[Tensor], has_initial_state: Optional[Tensor], activation: str, keep_states: bool) -> Tensor:
    """The convolution of x `[B, C, T]`, dense `[B, T, C]`."""
    batch, channels, tokens = x.shape
    heads = _split(channels)
    out = ops.empty((batch, tokens, channels), x.dtype, x.device)
    flat, keys = out.view(batch * tokens, 1, channels), heads[2]

    def parts() -> Dict[str, Tensor]:
        return {"q": flat[:, :, :keys], "k": flat[:, :, keys:2 * keys], "v": flat[:, :, 2 * keys:]}

    ops.launch_conv(_packed(x), weight, bias, state, heads, parts, {}, cu_seqlens, slots, has_initial_state, activation,
                    keep_states=keep_states)
    return out


def _starts(batch: int, tokens: int) -> Tuple[int, ...]:
    """cu_seqlens of `batch` sequences of `tokens` each."""
    return tuple(n * tokens for n in range(batch + 1))


def _starts_of(seq_idx: Tensor) -> Tensor:
    """cu_seqlens of packed sequences, from the number of each token's sequence, `[B, T]`. Without reading seq_idx on the
    host: there are as many entries as tokens, and those of absent sequences repeat the end."""
    batch, tokens = seq_idx.shape
    begins = torch.ones(seq_idx.shape, dtype=torch.bool, device=seq_idx.device)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    flat = begins.reshape(-1)
    count = batch * tokens
    positions = torch.arange(count, dtype=torch.int32, device=seq_idx.device)
    found = torch.full((count + 1,), count, dtype=torch.int32, device=seq_idx.device)
    # Tokens inside a sequence all write the last entry, which is the end anyway.
    place = torch.where(flat, flat.cumsum(0) - 1, count)
    value = torch.where(flat, positions, count)
    return found.scatter_(0, place, value.to(torch.int32))


def _convolve_rows(x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_states: Optional[Tensor],
                   final_states: Optional[Tensor], seq_idx: Optional[Tensor] = None, activation: str = "none") -> Tensor:
    """Writes `final_states` if they are given. Returns dense `[B, T, C]`."""
    batch, _, tokens = x.shape
    lengths: Union[Tensor, Tuple[int, ...]] = _starts(batch, tokens)
    if seq_idx is not None:
        lengths = ops.on_device(_starts_of(seq_idx))
    state, has, keep = initial_states, None, True
    if final_states is not None:
        state, keep = final_states, False
        if initial_states is None:
            has = torch.zeros(batch, dtype=torch.uint8, device=x.device)
        else:
            final_states.copy_(initial_states)
    return _convolve(x, weight, bias, state, lengths, None, has, activation, keep)


def _fake_rows(x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_states: Optional[Tensor],
               final_states: Optional[Tensor], seq_idx: Optional[Tensor] = None, activation: str = "none") -> Tensor:
    return torch.empty((x.shape[0], x.shape[2], x.shape[1]), dtype=x.dtype, device=x.device)


def _convolve_next(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                   activation: str = "none", conv_state_indices: Optional[Tensor] = None) -> Tensor:
    """Returns dense `[B, T, C]`."""
    lengths = _starts(x.shape[0], x.shape[2])
    return _convolve(x, weight, bias, conv_state, lengths, conv_state_indices, None, activation, False)


def _fake_next(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: str = "none",
               conv_state_indices: Optional[Tensor] = None) -> Tensor:
    return torch.empty((x.shape[0], x.shape[2], x.shape[1]), dtype=x.dtype, device=x.device)


_fn = ops.custom_op("deltawave::causal_conv1d_fn", mutates_args=("final_states",))(_convolve_rows)
_fn.register_fake(_fake_rows)
_update = ops.custom_op("deltawave::causal_conv1d_update", mutates_args=("conv_state",), repeats=True)(_convolve_next)
_update.register_fake(_fake_next)


@ops.custom_op("deltawave::causal_conv1d", mutates_args=())
def _differentiable(x: Tensor, weight: Tensor, bias: Optional[Tensor], initial_states: Optional[Tensor],
                    seq_idx: Optional[Tensor], activation: str, with_final: bool) -> Tuple[Tensor, Tensor]:
    """Dense `[B, T, C]`, and the final states, or an empty tensor if they are not wanted."""
    final = _final_states(x, weight, with_final, ops.empty)
    return _convolve_rows(x, weight, bias, initial_states, final if with_final else None, seq_idx, activation), final


def _final_states(x: Tensor, weight: Tensor, wanted: bool, make: Any) -> Tensor:
    return make((x.shape[0], x.shape[1], weight.shape[1] - 1) if wanted else (0,), x.dtype, device=x.device)


@_differentiable.register_fake
def _(x, weight, bias, initial_states, seq_idx, activation, with_final):
    def make(shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return _fake_rows(x, weight, bias, None, None), _final_states(x, weight, with_final, make)


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5])
    ctx.activation = inputs[5]


def _gradients(ctx: Any, d_y: Optional[Tensor], d_final: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    x, weight, bias, initial_states, seq_idx = ctx.saved_tensors
    batch, channels, tokens = x.shape
    inputs = (x, weight, bias, initial_states)
    wanted = [t is not None and need for t, need in zip(inputs, ctx.needs_input_grad)]
    if d_final is not None and d_final.numel() == 0:
        d_final = None  # the states were not returned
    d_y = x.new_zeros((batch, tokens, channels)) if d_y is None else d_y
    heads = _split(channels)
    keys, rows = heads[2], d_y.reshape(batch * tokens, 1, channels)
    lengths = torch.tensor(_starts(batch, tokens)) if seq_idx is None else ops.on_device(_starts_of(seq_idx))
    found = ops.conv_backward(
        rows[:, :, :keys], rows[:, :, keys:2 * keys], rows[:, :, 2 * keys:], None if d_final is None else d_final.contiguous(),
        _packed(x), weight, bias, None if initial_states is None else initial_states.contiguous(), None, *heads, lengths,
        ctx.activation, "flat", "channel_major", False, wanted)
    d_x = found[0].view(batch, tokens, channels).transpose(1, 2) if wanted[0] else None
    others = (d.to(t.dtype) if want else None for d, t, want in zip(found[1:], inputs[1:], wanted[1:]))
    return (d_x, *others, None, None, None)


_differentiable.register_autograd(_gradients, setup_context=_save)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Tensor] = None,
    activation: Optional[str] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Returns `activation(conv(x) + bias)` `[B, C, T]`; with `return_final_states` also the last width - 1 columns.

    x `[B, C, T]` bf16 or fp16; weight `[C, width]`, width 2 to 4, and bias `[C]`, of any type. seq_idx `[B, T]` i32: tokens
    of one number are one sequence. initial_states and final_states_out `[B, C, width - 1]`, in the type of x;
    `final_states_out` is written and returned, with the result `(out, final_states)`.

    Gradients flow to x, weight, bias and initial_states, from both results. Raises `Unsupported` for f32 x, fewer than 3
    channels, other activations, and `final_states_out` where a gradient is required, and `ArgumentError` for seq_idx with
    states.
    """
    word = _activation(activation)
    check_tensors(device_of("x", x), x=x, weight=weight, bias=bias, seq_idx=seq_idx, initial_states=initial_states,
                  final_states_out=final_states_out)
    _checked(x, weight)
    _split(x.shape[1])
    width = weight.shape[1]
    states = [x.shape[0], x.shape[1], width - 1]
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            name = "initial_states" if initial_states is not None else "return_final_states"
            raise ArgumentError(f"{name}: given with seq_idx, whose sequences start from zeros and leave no states")
        if list(seq_idx.shape) != [x.shape[0], x.shape[2]]:
            raise ArgumentError(f"seq_idx: shape {list(seq_idx.shape)}; it must be {[x.shape[0], x.shape[2]]}")
    for name, given in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if given is not None and (list(given.shape) != states or given.dtype != x.dtype):
            raise ArgumentError(f"{name}: {given.dtype} of shape {list(given.shape)}; it must be {x.dtype} of shape {states}")
    if ops.needs_gradient(x, weight, bias, initial_states):
        if final_states_out is not None:
            raise Unsupported("final_states_out: given where a gradient is required; it must be None")
        out, after = _differentiable(x, weight, bias, initial_states, seq_idx, word, return_final_states)
        return (out.transpose(1, 2), after) if return_final_states else out.transpose(1, 2)
    final = None
    if return_final_states:
        final = final_states_out
        if final is None:
            final = torch.empty((states[0], states[2], states[1]), dtype=x.dtype, device=x.device).transpose(1, 2)
    out = _fn(x, weight, bias, initial_states, final, seq_idx, word).transpose(1, 2)
    return out if final is None else (out, final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[Tensor] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """Returns the convolution of the next tokens, in the shape of x, and updates `conv_state` in place.

    x `[B, C]` or `[B, C, T]`, bf16 or fp16; conv_state `[B, C, columns]` in the type of x, with at least width - 1 columns;
    with `conv_state_indices` `[B]` i32 a pool `[slots, C, columns]`. weight and bias: as for `causal_conv1d_fn`.

    Raises `Unsupported` for `cache_seqlens`, f32 x, fewer than 3 channels, other activations and required gradients.
    """
    refuse_gradients(x=x, conv_state=conv_state, weight=weight, bias=bias)
    if cache_seqlens is not None:
        raise Unsupported("cache_seqlens: circular states are not supported; it must be None")
    word = _activation(activation)
    check_tensors(device_of("x", x), x=x, conv_state=conv_state, weight=weight, bias=bias,
                  conv_state_indices=conv_state_indices)
    by_token = x.unsqueeze(-1) if x.dim() == 2 else x
    _checked(by_token, weight)
    _split(by_token.shape[1])
    device_of("conv_state", conv_state)
    if conv_state.dtype != x.dtype:
        raise ArgumentError(f"conv_state: dtype {conv_state.dtype}; it must be that of x, {x.dtype}")
    if conv_state_indices is None and conv_state.shape[0] != x.shape[0]:
        raise ArgumentError(f"conv_state: {conv_state.shape[0]} states; without conv_state_indices there must be one for each "
                            f"of the {x.shape[0]} rows of x")
    out = _update(by_token, conv_state, weight, bias, word, conv_state_indices).transpose(1, 2)
    return out.squeeze(-1) if x.dim() == 2 else out
