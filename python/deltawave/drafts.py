"""Speculative decoding as torch custom ops: `torch.ops.deltawave.decode_drafts`, `verify_drafts`, `conv_drafts`,
`layer_drafts` and `layer_step`, or the functions here.

The state after each draft goes to a slot of its own, and the next step reads the slot of the last accepted draft, so that
nothing is copied when drafts are accepted. As for the ops of `deltawave.ops`, CPU tensors run on the simulator.
"""

import contextlib
import threading
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from . import arrays, ops
from .context import stream_of
from .conv import Conv, ConvSpec
from .decode import DecodeSpec
from .errors import ArgumentError
from .norm import GATES
from .values import choice, positive


def decode_drafts(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, draft_slots: Tensor, read_slots: Optional[Tensor] = None,
                  accepted: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None, g: Optional[Tensor] = None,
                  beta: Optional[Tensor] = None, a: Optional[Tensor] = None, b: Optional[Tensor] = None,
                  a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
                  has_initial_state: Optional[Tensor] = None, scale: Optional[float] = None, qk_l2norm: bool = False,
                  head_map: str = "grouped", pool_layout: str = "key_major", null_slot: Optional[int] = None,
                  out: Optional[Tensor] = None) -> Tensor:
    """Returns o of the drafts of every sequence: `out` if that is given. Stores the state after each to the pool.

    `deltawave.Decode` documents the arguments. draft_slots is `[B, T]` i32. read_slots is draft_slots unless it is given;
    without accepted each sequence reads the first of its slots. q is `[rows, HK, K]` with cu_seqlens `[B + 1]`, on the
    device of q. Without it q is `[B, T, HK, K]`."""
    inputs = (q, k, v, pool, draft_slots, read_slots, accepted, cu_seqlens, g, beta, a, b, a_log, dt_bias,
              allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot)
    if out is None:
        return _decode_drafts(*inputs)
    _decode_drafts_out(out, *inputs)
    return out


def _launch_decode(out, q, k, v, pool, draft_slots, read_slots, accepted, cu_seqlens, g, beta, a, b, a_log, dt_bias,
                   allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot):
    ops._rows(q, k, v)
    batch, tokens = ops._of_rank("draft_slots", draft_slots, 2).shape
    device = q.device
    if read_slots is None:
        read_slots = draft_slots
    if accepted is None:
        accepted = torch.ones(batch, dtype=torch.int32, device=device)
    lengths = None
    if cu_seqlens is not None:
        ops._sequences_of(cu_seqlens)
        if cu_seqlens.device != device:
            raise ArgumentError(f"cu_seqlens: memory of {cu_seqlens.device}; it must be on {device}, the device of q")
        lengths = cu_seqlens
    spec = DecodeSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], ops._dtype_of("q", q), head_map, qk_l2norm,
                      scale, tokens)
    with ops._OfShapes(**ops._dims_of(k, v).sources, tokens=("draft_slots", draft_slots),
                       batch=("draft_slots", draft_slots)):
        plan = ops._decode_plan(device, spec, batch)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
              "draft_slots": draft_slots, "read_slots": read_slots, "accepted": accepted, "cu_seqlens": lengths,
              "has_initial_state": has_initial_state}
    _launch(plan, inputs, {"pool": pool, "o": out}, device, pool_layout=pool_layout, allow_neg_eigval=allow_neg_eigval,
            null_slot=null_slot)


def verify_drafts(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, states: Tensor, draft_slots: Tensor,
                  slots: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None, g: Optional[Tensor] = None,
                  beta: Optional[Tensor] = None, a: Optional[Tensor] = None, b: Optional[Tensor] = None,
                  a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
                  has_initial_state: Optional[Tensor] = None, scale: Optional[float] = None, qk_l2norm: bool = False,
                  head_map: str = "grouped", pool_layout: str = "key_major", null_slot: Optional[int] = None,
                  out: Optional[Tensor] = None) -> Tensor:
    """`decode_drafts` that leaves the pool as it is: stores the state after each draft to a slot of `states`.

    states is `[slots, HV, K, V]` in the layout of the pool, f32, bf16 or fp16, of any number of slots, which draft_slots
    `[B, T]` chooses. A slot that is none: the state is not stored. slots `[B]` i32 are those that are read, from the pool."""
    inputs = (q, k, v, pool, draft_slots, slots, cu_seqlens, g, beta, a, b, a_log, dt_bias, allow_neg_eigval,
              has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot)
    if out is None:
        return _verify_drafts(states, *inputs)
    _verify_drafts_out(out, states, *inputs)
    return out


def _launch_verify(out, states, q, k, v, pool, draft_slots, slots, cu_seqlens, g, beta, a, b, a_log, dt_bias,
                   allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot):
    ops._rows(q, k, v)
    batch, tokens = ops._of_rank("draft_slots", draft_slots, 2).shape
    device = q.device
    if cu_seqlens is not None:
        ops._sequences_of(cu_seqlens)
        if cu_seqlens.device != device:
            raise ArgumentError(f"cu_seqlens: memory of {cu_seqlens.device}; it must be on {device}, the device of q")
    spec = DecodeSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], ops._dtype_of("q", q), head_map, qk_l2norm,
                      scale, tokens)
    with ops._OfShapes(**ops._dims_of(k, v).sources, tokens=("draft_slots", draft_slots),
                       batch=("draft_slots", draft_slots)):
        plan = ops._decode_plan(device, spec, batch)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias, "pool": pool,
              "draft_slots": draft_slots, "slots": slots, "cu_seqlens": cu_seqlens, "has_initial_state": has_initial_state}
    # Without sequences, draft_slots has no address, and says nothing of the states.
    _launch(plan, inputs, {"states": states if batch else None, "o": out}, device, pool_layout=pool_layout, allow_neg_eigval=allow_neg_eigval,
            null_slot=null_slot)


def _launch(plan, inputs, written, device, **others):
    """Launches a plan. What it wrote to copies goes back to the caller's tensors."""
    reached = ops._all_reachable(written, device)
    plan.launch(**ops._all_reachable(inputs, device), **reached, **others)
    for name, tensor in written.items():
        if tensor is not reached[name]:
            tensor.copy_(reached[name])


@ops.custom_op("deltawave::decode_drafts", mutates_args=("pool",))
def _decode_drafts(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, draft_slots: Tensor, read_slots: Optional[Tensor],
                   accepted: Optional[Tensor], cu_seqlens: Optional[Tensor], g: Optional[Tensor], beta: Optional[Tensor],
                   a: Optional[Tensor], b: Optional[Tensor], a_log: Optional[Tensor], dt_bias: Optional[Tensor],
                   allow_neg_eigval: bool, has_initial_state: Optional[Tensor], scale: Optional[float], qk_l2norm: bool,
                   head_map: str, pool_layout: str, null_slot: Optional[int]) -> Tensor:
    ops._rows(q, k, v)
    out = ops.empty(tuple(v.shape), v.dtype, v.device)
    _launch_decode(out, q, k, v, pool, draft_slots, read_slots, accepted, cu_seqlens, g, beta, a, b, a_log, dt_bias,
                   allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot)
    return out


@_decode_drafts.register_fake
def _(q, k, v, *others):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@ops.custom_op("deltawave::decode_drafts_out", mutates_args=("out", "pool"))
def _decode_drafts_out(out: Tensor, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, draft_slots: Tensor,
                       read_slots: Optional[Tensor], accepted: Optional[Tensor], cu_seqlens: Optional[Tensor],
                       g: Optional[Tensor], beta: Optional[Tensor], a: Optional[Tensor], b: Optional[Tensor],
                       a_log: Optional[Tensor], dt_bias: Optional[Tensor], allow_neg_eigval: bool,
                       has_initial_state: Optional[Tensor], scale: Optional[float], qk_l2norm: bool, head_map: str,
                       pool_layout: str, null_slot: Optional[int]) -> None:
    _launch_decode(out, q, k, v, pool, draft_slots, read_slots, accepted, cu_seqlens, g, beta, a, b, a_log, dt_bias,
                   allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot)


@_decode_drafts_out.register_fake
def _(out, *others):
    return None


@ops.custom_op("deltawave::verify_drafts", mutates_args=("states",))
def _verify_drafts(states: Tensor, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, draft_slots: Tensor,
                   slots: Optional[Tensor], cu_seqlens: Optional[Tensor], g: Optional[Tensor], beta: Optional[Tensor],
                   a: Optional[Tensor], b: Optional[Tensor], a_log: Optional[Tensor], dt_bias: Optional[Tensor],
                   allow_neg_eigval: bool, has_initial_state: Optional[Tensor], scale: Optional[float], qk_l2norm: bool,
                   head_map: str, pool_layout: str, null_slot: Optional[int]) -> Tensor:
    ops._rows(q, k, v)
    out = ops.empty(tuple(v.shape), v.dtype, v.device)
    _launch_verify(out, states, q, k, v, pool, draft_slots, slots, cu_seqlens, g, beta, a, b, a_log, dt_bias,
                   allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot)
    return out


@_verify_drafts.register_fake
def _(states, q, k, v, *others):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@ops.custom_op("deltawave::verify_drafts_out", mutates_args=("out", "states"))
def _verify_drafts_out(out: Tensor, states: Tensor, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, draft_slots: Tensor,
                       slots: Optional[Tensor], cu_seqlens: Optional[Tensor], g: Optional[Tensor], beta: Optional[Tensor],
                       a: Optional[Tensor], b: Optional[Tensor], a_log: Optional[Tensor], dt_bias: Optional[Tensor],
                       allow_neg_eigval: bool, has_initial_state: Optional[Tensor], scale: Optional[float],
                       qk_l2norm: bool, head_map: str, pool_layout: str, null_slot: Optional[int]) -> None:
    _launch_verify(out, states, q, k, v, pool, draft_slots, slots, cu_seqlens, g, beta, a, b, a_log, dt_bias,
                   allow_neg_eigval, has_initial_state, scale, qk_l2norm, head_map, pool_layout, null_slot)


@_verify_drafts_out.register_fake
def _(out, *others):
    return None


@ops.custom_op("deltawave::conv_drafts", mutates_args=("state",))
def conv_drafts(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Tensor, key_heads: int, value_heads: int,
                key_dim: int, value_dim: int, accepted: Tensor, cu_seqlens: Tensor, slots: Tensor,
                has_initial_state: Optional[Tensor] = None, activation: str = "silu", qk_l2norm: bool = False,
                x_layout: str = "flat", state_layout: str = "channel_major",
                null_slot: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of the drafts x `[rows, columns]`. `deltawave.Conv` documents the arguments.

    Sequence n starts from the columns of its state from `accepted[n] - 1` on; the state then holds them and the drafts.
    slots is `[N]` i32, or `[N, columns]` as draft_slots, of which the first column counts. cu_seqlens is on the device of x,
    or on the host."""
    device, width = x.device, ops._of_rank("weight", weight, 2).shape[1]
    spec = ConvSpec(key_heads, value_heads, key_dim, value_dim, width, ops._dtype_of("x", x), activation, False, qk_l2norm)
    with ops._OfShapes(width=("weight", weight), tokens=("x", x)):
        plan, lengths = ops._packed_plan(Conv, spec, ops._of_rank("x", x, 2).shape[0], cu_seqlens, device)
    q, k, v = ops.conv_outputs(x, key_heads, value_heads, key_dim, value_dim, ops.empty)
    inputs = {"x": x, "weight": weight, "bias": bias, "slots": slots, "has_initial_state": has_initial_state,
              "accepted": accepted, **lengths}
    _launch(plan, inputs, {"state": state, "q": q, "k": k, "v": v}, device, x_layout=x_layout, state_layout=state_layout,
            null_slot=null_slot)
    return q, k, v


@conv_drafts.register_fake
def _(x, weight, bias, state, key_heads, value_heads, key_dim, value_dim, *others, **more):
    return ops.conv_outputs(x, key_heads, value_heads, key_dim, value_dim, ops._fake_empty)


_scratches: Dict[Any, Tuple[threading.Lock, List[Tensor]]] = {}
_scratches_lock = threading.Lock()


@contextlib.contextmanager
def _scratch(device: torch.device, *wanted: Tuple[Tuple[int, ...], torch.dtype]) -> Iterator[List[Tensor]]:
    """Uninitialised tensors of these shapes and types, for launches inside a `with`. They lie in memory of the current stream, which
    is kept and which other threads wait for; a capture has memory of its own."""
    sizes, total = [], 0
    for shape, dtype in wanted:
        count = 1
        for n in shape:
            count *= n
        sizes.append((total, count * dtype.itemsize))
        total += -(-count * dtype.itemsize // 256) * 256

    def parts(memory: Tensor) -> List[Tensor]:
        return [memory[begin:begin + size].view(dtype).view(*shape) for (begin, size), (shape, dtype) in zip(sizes, wanted)]

    if ops._capturing(device):
        yield parts(ops.empty((total,), torch.uint8, device))
        return
    with _scratches_lock:
        turn, kept = _scratches.setdefault(ops._stream_key(device), (threading.Lock(), []))
    with turn:
        if not kept or kept[0].shape[0] < total:
            kept[:] = [ops.empty((total,), torch.uint8, device)]
        yield parts(kept[0])


@ops._operation("layer_drafts", mutates_args=("conv_state", "pool"))
def layer_drafts(x: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, pool: Tensor, conv_weight: Tensor, a_log: Tensor,
                 key_heads: int, value_heads: int, key_dim: int, value_dim: int, draft_slots: Tensor, accepted: Tensor,
                 cu_seqlens: Tensor, z: Optional[Tensor] = None, conv_bias: Optional[Tensor] = None,
                 dt_bias: Optional[Tensor] = None, norm_weight: Optional[Tensor] = None,
                 has_initial_state: Optional[Tensor] = None, eps: float = 1e-6, gate: str = "silu", qk_l2norm: bool = True,
                 allow_neg_eigval: bool = False, scale: Optional[float] = None, head_map: str = "grouped",
                 x_layout: str = "flat", conv_layout: str = "channel_major", pool_layout: str = "key_major",
                 null_slot: Optional[int] = None, *, out: Optional[Tensor] = None) -> Tensor:
    """`ops.layer` for sequences of drafts: returns y `[rows, HV, V]` of x `[rows, columns]`. y is `out` if that is given.

    Two kernels if V is 128, K at most 128 and that is faster for the batch: the convolution, which computes the gates too,
    and the recurrence with the gated norm; otherwise the norm is a third. draft_slots
    `[N, T]` i32, accepted `[N]` i32 and cu_seqlens `[N + 1]` are as for `decode_drafts`; the first column of draft_slots
    holds the slots of conv states. Sequences have 0 to T rows. Rows of no sequence become 0; in `out` they must have been 0.
    The other arguments are those of `ops.layer`."""
    # The decode has other names for them, and comes after the convolution has written its states.
    norm_eps, _ = positive("eps", eps), choice("gate", gate, GATES)
    device, width = ops._of_rank("x", x, 2, 3).device, ops._of_rank("conv_weight", conv_weight, 2).shape[1]
    batch, tokens = ops._of_rank("draft_slots", draft_slots, 2).shape
    rows, dtype = x.shape[0], ops._dtype_of("x", x)
    y = ops._output(out, (rows, value_heads, value_dim), x.dtype, device)
    if out is None:
        y.zero_()
    if ops._sequences_of(cu_seqlens) != batch:
        was = f"{cu_seqlens.shape[0]} entries"
        raise ArgumentError(f"cu_seqlens: {was}; it must have one more than draft_slots has rows, {batch}")
    heads = (key_heads, value_heads, key_dim, value_dim)
    conv_spec = ConvSpec(*heads, width, dtype, "silu")
    decode_spec = DecodeSpec(*heads, dtype, head_map, qk_l2norm, scale, tokens)
    with ops._OfShapes(width=("conv_weight", conv_weight), tokens=("x", x)):
        conv_plan, lengths = ops._packed_plan(Conv, conv_spec, rows, cu_seqlens, device)
    with ops._OfShapes(tokens=("draft_slots", draft_slots), batch=("draft_slots", draft_slots)):
        decode_plan = ops._decode_plan(device, decode_spec, batch)
    written: Dict[str, Optional[Tensor]] = {"conv_state": conv_state, "pool": pool, "y": y}
    reached = ops._all_reachable(written, device)
    weight = ops._reachable("norm_weight", norm_weight, device)
    shared: Dict[str, Any] = ops._all_reachable(
        {"x": x, "z": z, "draft_slots": draft_slots, "accepted": accepted, "cu_seqlens": cu_seqlens,
         "has_initial_state": has_initial_state}, device)
    given = ops._all_reachable({"weight": conv_weight, "bias": conv_bias, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias},
                               device)
    if lengths:
        lengths = {"cu_seqlens": shared["cu_seqlens"]}
    if z is None:
        shared["z"] = _z_of(shared["x"], heads, x_layout)
    keys, values, gates = (rows, key_heads, key_dim), (rows, value_heads, value_dim), (rows, value_heads)
    with _scratch(device, (keys, x.dtype), (keys, x.dtype), (values, x.dtype), (gates, torch.float32),
                  (gates, torch.float32)) as (q, k, v, g, beta):
        conv = conv_plan.bind(x=shared["x"], state=reached["conv_state"], slots=shared["draft_slots"], q=q, k=k, v=v, g=g,
                              beta=beta, accepted=shared["accepted"], has_initial_state=shared["has_initial_state"],
                              x_layout=x_layout, state_layout=conv_layout, allow_neg_eigval=allow_neg_eigval,
                              null_slot=null_slot, **given, **lengths)
        recurrence = decode_plan.bind(q=q, k=k, v=v, g=g, beta=beta, pool=reached["pool"], o=reached["y"],
                                      read_slots=shared["draft_slots"], draft_slots=shared["draft_slots"],
                                      accepted=shared["accepted"], cu_seqlens=shared["cu_seqlens"],
                                      has_initial_state=shared["has_initial_state"], pool_layout=pool_layout,
                                      null_slot=null_slot, z=shared["z"], norm_weight=weight, norm_eps=norm_eps,
                                      norm_gate=gate)
        _refuse_of_recurrence(reached["pool"], shared["z"], weight, rows, heads, dtype, pool_layout)
        stream = stream_of(None, [shared["x"]])
        conv(stream)
        recurrence(stream)
    ops._copied_back(written, reached)
    return y


def _refuse_of_recurrence(pool: Tensor, z: Tensor, norm_weight: Optional[Tensor], rows: int, heads: Tuple[int, int, int, int],
                          dtype: str, pool_layout: str) -> None:
    """Refuses what the recurrence refuses. It comes after the convolution, which would have written its states by then."""
    _, value_heads, key_dim, value_dim = heads
    matrix = [key_dim, value_dim] if pool_layout == "key_major" else [value_dim, key_dim]
    whole = z.dim() == 3 and z.shape[2] > 0 and z.shape[2] % value_dim == 0
    arrays.dtype_name(z.dtype, "z", (dtype,))
    for name, t, fits, allowed in (
            ("pool", pool, pool.dim() == 4 and pool.shape[0] > 0 and list(pool.shape[1:]) == [value_heads, *matrix],
             f"[slots, {value_heads}, {matrix[0]}, {matrix[1]}], of at least one slot"),
            ("z", z, whole and z.shape[0] == rows and z.shape[1] * z.shape[2] == value_heads * value_dim,
             f"[{rows}, blocks, heads of a block * {value_dim}], of {value_heads} heads"),
            ("norm_weight", norm_weight, norm_weight is None or list(norm_weight.shape) == [value_dim], f"[{value_dim}]")):
        if t is not None and not fits:
            raise ArgumentError(f"{name}: shape {list(t.shape)}; it must be {allowed}")
    for name, t in (("pool", pool), ("z", z)):
        if t.stride(-1) != 1:
            raise ArgumentError(f"{name}: an innermost stride of {t.stride(-1)}; it must be 1")


def _z_of(x: Tensor, heads: Tuple[int, int, int, int], x_layout: str) -> Tensor:
    """z in the rows of x, after q, k and v: a view `[rows, blocks, heads of a block * V]`."""
    key_heads, value_heads, key_dim, value_dim = heads
    values = value_heads * value_dim
    if x_layout == "flat":
        begin, blocks = 2 * key_heads * key_dim + values, 1
        x = x.flatten(1) if x.dim() == 3 else x
        columns = x[:, begin:begin + values]
        if columns.shape[1] != values:
            raise ArgumentError(f"x: {x.shape[1]} columns; without z it must have {begin + values}")
        return columns.unflatten(1, (1, values))
    begin, share = 2 * key_dim + values // key_heads, values // key_heads
    if x.dim() == 2:
        if x.shape[1] != key_heads * (begin + share):
            raise ArgumentError(f"x: {x.shape[1]} columns; without z it must have {key_heads * (begin + share)}")
        x = x.unflatten(1, (key_heads, begin + share))
    return x[:, :, begin:begin + share]


@ops._fake(layer_drafts)
def _(x, a, b, conv_state, pool, conv_weight, a_log, key_heads, value_heads, key_dim, value_dim, draft_slots, accepted,
      cu_seqlens, z=None, conv_bias=None, dt_bias=None, norm_weight=None, has_initial_state=None, eps=1e-6, gate="silu",
      qk_l2norm=True, allow_neg_eigval=False, scale=None, head_map="grouped", x_layout="flat",
      conv_layout="channel_major", pool_layout="key_major", null_slot=None):
    return torch.empty((x.shape[0], value_heads, value_dim), dtype=x.dtype, device=x.device)


@ops._operation("layer_step", mutates_args=("conv_state", "pool"))
def layer_step(x: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, pool: Tensor, conv_weight: Tensor, a_log: Tensor,
               key_heads: int, value_heads: int, key_dim: int, value_dim: int, draft_rows: int, draft_slots: Tensor,
               accepted: Tensor, draft_cu_seqlens: Tensor, cu_seqlens: Tensor, decodes: int = 0,
               slots: Optional[Tensor] = None, z: Optional[Tensor] = None, conv_bias: Optional[Tensor] = None,
               dt_bias: Optional[Tensor] = None, norm_weight: Optional[Tensor] = None,
               draft_has_initial_state: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
               eps: float = 1e-6, gate: str = "silu", qk_l2norm: bool = True, allow_neg_eigval: bool = False,
               scale: Optional[float] = None, head_map: str = "grouped", x_layout: str = "flat",
               conv_layout: str = "channel_major", pool_layout: str = "key_major", segments: Optional[int] = None,
               path: str = "auto", null_slot: Optional[int] = None, *, out: Optional[Tensor] = None) -> Tensor:
    """The layer for all sequences of a step: returns y `[T, HV, V]` of x `[T, columns]`. y is `out` if that is given.

    The first `draft_rows` rows are of sequences with drafts, as `layer_drafts` takes them: draft_slots `[N, T]`, accepted
    `[N]`, draft_cu_seqlens `[N + 1]`, draft_has_initial_state `[N]`. The rows after them are decodes and prefills, as
    `ops.layer` takes them: cu_seqlens `[M + 1]`, which counts from 0 at row `draft_rows`, decodes, slots `[M]` and
    has_initial_state `[M]`. Both tables of slots are of the same pools; conv_state has a column for each draft.

    Any part may be absent or padded. Sequences without tokens write no state. A draft's slot null_slot and a slot of -1 are
    padding, and rows of y that belong to no sequence become 0."""
    rows, device = ops._of_rank("x", x, 2, 3).shape[0], x.device
    if not 0 <= draft_rows <= rows:
        raise ArgumentError(f"draft_rows: {draft_rows}; it must be 0 to {rows}, the rows of x")
    y = ops._output(out, (rows, value_heads, value_dim), x.dtype, device)
    shared: Dict[str, Any] = {
        "pool": pool, "conv_weight": conv_weight, "a_log": a_log, "key_heads": key_heads, "value_heads": value_heads,
        "key_dim": key_dim, "value_dim": value_dim, "conv_bias": conv_bias, "dt_bias": dt_bias, "norm_weight": norm_weight,
        "eps": eps, "gate": gate, "qk_l2norm": qk_l2norm, "allow_neg_eigval": allow_neg_eigval, "scale": scale,
        "head_map": head_map, "x_layout": x_layout, "conv_layout": conv_layout, "pool_layout": pool_layout}

    def part(begin: int, end: int) -> Dict[str, Any]:
        return {**shared, "x": x[begin:end], "a": a[begin:end], "b": b[begin:end], "z": None if z is None else z[begin:end],
                "out": y[begin:end]}

    if draft_rows:
        y[:draft_rows].zero_()
        layer_drafts(**part(0, draft_rows), conv_state=conv_state, draft_slots=draft_slots, accepted=accepted,
                     cu_seqlens=draft_cu_seqlens, has_initial_state=draft_has_initial_state, null_slot=null_slot)
    if draft_rows < rows:
        # Further columns are for drafts; the first ones hold the state.
        columns, state = ops._of_rank("conv_weight", conv_weight, 2).shape[1] - 1, ops._of_rank("conv_state", conv_state, 3)
        state = state[:, :columns] if conv_layout == "token_major" else state[:, :, :columns]
        ops.layer(**part(draft_rows, rows), conv_state=state, cu_seqlens=cu_seqlens, decodes=decodes, slots=slots,
                  has_initial_state=has_initial_state, segments=segments, path=path)
    return y


@ops._fake(layer_step)
def _(x, a, b, conv_state, pool, conv_weight, a_log, key_heads, value_heads, key_dim, value_dim, draft_rows, draft_slots,
      accepted, draft_cu_seqlens, cu_seqlens, decodes=0, slots=None, z=None, conv_bias=None, dt_bias=None, norm_weight=None,
      draft_has_initial_state=None, has_initial_state=None, eps=1e-6, gate="silu", qk_l2norm=True, allow_neg_eigval=False,
      scale=None, head_map="grouped", x_layout="flat", conv_layout="channel_major", pool_layout="key_major", segments=None,
      path="auto", null_slot=None):
    return torch.empty((x.shape[0], value_heads, value_dim), dtype=x.dtype, device=x.device)
