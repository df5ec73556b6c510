"""The operations as torch custom ops: `torch.ops.deltawave.layer`, `prefill`, `prefill_pool`, `decode`, `verify`,
`commit`, `conv`, `norm` and `gate`, or the functions here.

torch.compile and torch.export take each op as one node, because it has a fake function. Ops run on torch's current
stream, allocate through torch, and do not wait for the device, so they can be captured into a graph. The first call with
new shapes makes a plan for them: make that call before the capture.

Lengths on the host are part of a plan's shapes; lengths on the device are not. If every step has other lengths, pass
cu_seqlens on the device, padded to a few numbers of sequences and tokens. With cu_seqlens on the host each step would make
a plan. Beyond 256 plans it would also drop the oldest, which waits for the device.

CPU tensors run on the simulator, for tests. Tensors outside its memory (`empty`) are copied there and back.
"""

import ctypes
import functools
import os
import threading
from typing import Optional, Tuple

import torch
from torch import Tensor

from . import arrays
from .context import Context, Memory
from .conv import STATE_LAYOUTS as CONV_LAYOUTS
from .conv import Conv, ConvSpec
from .decode import Decode, DecodeSpec
from .errors import ArgumentError
from .gate import gate as launch_gate
from .layer import Layer, LayerSpec
from .norm import norm as launch_norm
from .parallel import ParallelPrefill, RankLayout
from .plan import Plans
from .prefill import Prefill, PrefillSpec
from .structs import STATE_LAYOUTS
from .values import choice, shown

_plans = Plans(most=256)
# Held while a context is made: a device must have only one, because contexts do not know each other's memory.
_lock = threading.Lock()


@functools.lru_cache(maxsize=None)
def _context(kind, index):
    if kind == "cpu":
        return Context("simulator")
    if torch.version.hip is None:
        os.environ.setdefault("DELTAWAVE_HIP_LIBRARY", "cuda")
    return Context("hip", index)


def context_of(device):
    """The context of a torch device. CPU tensors have the simulator's context."""
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device: {device}; it must be cuda (a GPU) or cpu (the simulator)")
    index = None if device.type == "cpu" else device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    with _lock:
        return _context(device.type, index)


def empty(shape, dtype, device="cpu"):
    """An uninitialised tensor that kernels can use. A CPU tensor is in the simulator's memory."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"device: {shown(device)}; it must be a torch device") from None
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype: {shown(dtype)}; it must be a torch device")
    shape = arrays.dimensions("shape", shape)
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    count = 1
    for n in shape:
        count *= n
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = Memory(context_of(device), count * dtype.itemsize)
    bytes_there = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    bytes_there.memory = memory  # the tensor keeps the ctypes array alive, the array keeps the memory
    return torch.frombuffer(bytes_there, dtype=dtype, count=count).view(shape)


def _reachable(name, x, device):
    """A tensor that the device can reach: `x`, or a copy of a CPU tensor outside the simulator's memory."""
    if x is None or device.type != "cpu":
        return x
    arrays.describe(name, x)
    if x.device.type != "cpu":
        raise ArgumentError(f"{name}: memory of {x.device}; it must be on the device of the others, {device}")
    return x if context_of(device).owns(x) else empty(tuple(x.shape), x.dtype).copy_(x)


def _all_reachable(tensors, device):
    """`_reachable` for tensors by name."""
    return {name: _reachable(name, x, device) for name, x in tensors.items()}


def _of_rank(name, x, *ranks):
    """Refuses a tensor unless its number of dimensions is one of `ranks`."""
    if x.dim() not in ranks:
        allowed = " or ".join(map(str, ranks))
        raise ArgumentError(f"{name}: shape {list(x.shape)}; it must have {allowed} dimension{'s' * (ranks != (1,))}")
    return x


def _rows(q, k, v):
    """Refuses q, k and v unless they have three or four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _of_rank(name, x, 3, 4)


class _OfShapes:
    """Context manager that renames errors. An op takes spec fields and outputs from shapes of tensors: an error about such
    a field becomes an error about the tensor. `_OfShapes(key_dim=("k", k))`: key_dim comes from the shape of k."""

    def __init__(self, **sources):
        self.sources = sources

    def __enter__(self):
        pass

    def __exit__(self, kind, problem, traceback):
        if isinstance(problem, ArgumentError):
            source = self.sources.get(str(problem).partition(":")[0])
            if source:
                raise ArgumentError(f"{source[0]}: shape {list(source[1].shape)}; {problem}") from None


def _dims_of(k, v):
    """Tensors whose shapes give prefill and decode the numbers of a spec."""
    return _OfShapes(key_heads=("k", k), key_dim=("k", k), value_heads=("v", v), value_dim=("v", v))


def _dtype_of(name, x):
    """The element type of a tensor that gives a plan its dtype."""
    return arrays.dtype_name(x.dtype, name, ("bf16", "fp16"))


def _sequences_of(cu_seqlens):
    """The number of sequences in `cu_seqlens`."""
    if _of_rank("cu_seqlens", cu_seqlens, 1).shape[0] < 1:
        raise ArgumentError("cu_seqlens: it is empty; it must have one entry more than sequences")
    return cu_seqlens.shape[0] - 1


def _plan(key, make):
    """The plan for a call's shapes, made once. A captured graph needs its plan as long as it may be replayed."""
    return _plans.get(key, make, torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _packed_plan(kind, spec, tokens, cu_seqlens, device, decodes=()):
    """A plan for packed sequences, and the launch arguments for their lengths. `cu_seqlens` is read on the host, and not
    read on the device. Without it the rows after the decodes are one sequence. `decodes` is empty, or a layer's number of
    decodes."""
    context = context_of(device)
    if cu_seqlens is not None:
        _sequences_of(cu_seqlens)
        arrays.dtype_name(cu_seqlens.dtype, "cu_seqlens", ("i32", "i64"))
    on_host = cu_seqlens is None or (cu_seqlens.device.type == "cpu"
                                     and not (device.type == "cpu" and context.owns(cu_seqlens)))
    if on_host:
        lengths = _lengths(tokens, *decodes) if cu_seqlens is None else tuple(cu_seqlens.tolist())
        key = (kind, device, spec, tokens, lengths, decodes)
        return _plan(key, lambda: kind.packed(context, spec, lengths, tokens, *decodes)), {}
    sequences = _sequences_of(cu_seqlens)
    key = (kind, device, spec, tokens, sequences, decodes)
    return _plan(key, lambda: kind.device(context, spec, tokens, sequences, *decodes)), {"cu_seqlens": cu_seqlens}


def _lengths(tokens, decodes=0):
    """cu_seqlens of `decodes` sequences of one token each, and one sequence of the remaining tokens."""
    rest = (tokens,) if tokens > decodes or not decodes else ()
    return (*range(min(decodes, tokens) + 1), *rest)


def _sequences(q, cu_seqlens):
    if cu_seqlens is not None:
        return _of_rank("cu_seqlens", cu_seqlens, 1).shape[0] - 1
    return q.shape[0] if q.dim() == 4 else 1


@torch.library.custom_op("deltawave::prefill", mutates_args=())
def prefill(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
            a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
            dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False, initial_state: Optional[Tensor] = None,
            has_initial_state: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None,
            scale: Optional[float] = None, qk_l2norm: bool = False, head_map: str = "grouped",
            state_layout: str = "key_major", segments: Optional[int] = None, path: str = "auto") -> Tuple[Tensor, Tensor]:
    """Returns o and the final states, in f32. `deltawave.Prefill` documents the arguments.

    q is `[T, HK, K]`, or `[B, T, HK, K]`. With cu_seqlens, q is one packed batch, and B must be 1. Without it, q is one
    sequence, or B sequences. The host reads cu_seqlens on the CPU, and may then cut long sequences into segments. It does
    not read cu_seqlens on a device.
    """
    choice("state_layout", state_layout, STATE_LAYOUTS)
    if cu_seqlens is not None:
        _sequences_of(cu_seqlens)
    o, final_state = prefill_outputs(q, k, v, cu_seqlens, state_layout, empty)
    per_token = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "o": o}
    others = {"a_log": a_log, "dt_bias": dt_bias, "initial_state": initial_state, "has_initial_state": has_initial_state,
              "final_state": final_state}
    _launch_prefill((qk_l2norm, head_map, scale, segments, path), per_token, others, cu_seqlens,
                    allow_neg_eigval=allow_neg_eigval, initial_layout=state_layout, final_layout=state_layout)
    return o, final_state


def _launch_prefill(spec, per_token, others, cu_seqlens, **numbers):
    """Launches a prefill. `per_token`: tensors over tokens, with or without a batch dimension. `others`: all others."""
    q, k, v = (per_token[name] for name in "qkv")
    dense = q.dim() == 4 and cu_seqlens is None
    if q.dim() == 4 and cu_seqlens is not None and q.shape[0] != 1:
        raise ArgumentError(f"q: shape {list(q.shape)}; a batch with cu_seqlens must be [T, HK, K] or [1, T, HK, K]")
    device, context = q.device, context_of(q.device)
    qk_l2norm, head_map, scale, segments, path = spec
    spec = PrefillSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], _dtype_of("q", q), head_map,
                       qk_l2norm, scale, segments, path=path)
    if dense:
        batch, tokens = q.shape[:2]
        key = (Prefill, device, spec, tokens, "dense", batch)
        with _dims_of(k, v):
            plan, lengths = _plan(key, lambda: Prefill.dense(context, spec, batch, tokens)), {}
    else:
        with _dims_of(k, v):
            plan, lengths = _packed_plan(Prefill, spec, q.shape[-3], cu_seqlens, device)
        per_token = {name: x if x is None or q.dim() == 3 else x.squeeze(0) for name, x in per_token.items()}
    tensors = _all_reachable({**per_token, **others}, device)
    plan.launch(**tensors, **lengths, **numbers, workspace=empty((plan.workspace_bytes,), torch.uint8, device))


def prefill_outputs(q, k, v, cu_seqlens, state_layout, make):
    """Uninitialised outputs of a prefill."""
    _rows(q, k, v)
    dims = (k.shape[-1], v.shape[-1]) if state_layout == "key_major" else (v.shape[-1], k.shape[-1])
    state = (_sequences(q, cu_seqlens), v.shape[-2], *dims)
    return make(tuple(v.shape), v.dtype, device=v.device), make(state, torch.float32, device=v.device)


def _fake_empty(shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


@prefill.register_fake
def _(q, k, v, g=None, beta=None, a=None, b=None, a_log=None, dt_bias=None, allow_neg_eigval=False, initial_state=None,
      has_initial_state=None, cu_seqlens=None, scale=None, qk_l2norm=False, head_map="grouped",
      state_layout="key_major", segments=None, path="auto"):
    return prefill_outputs(q, k, v, cu_seqlens, state_layout, _fake_empty)


def prefill_parallel(q, k, v, g=None, beta=None, a=None, b=None, a_log=None, dt_bias=None, allow_neg_eigval=False,
                     initial_state=None, has_initial_state=None, scale=None, qk_l2norm=False, head_map="grouped",
                     state_layout="key_major", *, lengths, kind="contiguous", block=None, group=None):
    """`prefill` of sequences that the ranks of a process group of torch.distributed share. Every rank calls it, with its own
    rows, and the same `lengths`: tokens of each whole sequence. `deltawave.RankLayout` documents kind and block.

    q is `[T, HK, K]`, the rank's fragments in the order of the layout: see `rank_fragments`. Returns o, and states `[N, HV,
    K, V]` in f32, N fragments: the final state for a fragment with its sequence's last token, zeros for others.
    initial_state and has_initial_state are per fragment, too; those of fragments that do not begin a sequence are not
    read. Outputs and states have the same bits for any number of ranks and any kind, if the block is the same.

    group: a process group, None for the default one. Ranks are those within the group. Forward only."""
    choice("state_layout", state_layout, STATE_LAYOUTS)
    import torch.distributed as dist
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _of_rank(name, x, 3)
    device = q.device
    context, layout = context_of(device), RankLayout(lengths, ranks, kind, block)
    spec = PrefillSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], _dtype_of("q", q), head_map, qk_l2norm, scale)
    key = (ParallelPrefill, device, spec, layout, rank, q.shape[0])
    with _dims_of(k, v):
        plan = _plan(key, lambda: ParallelPrefill(context, spec, layout, rank, q.shape[0]))
    dims = (k.shape[-1], v.shape[-1]) if state_layout == "key_major" else (v.shape[-1], k.shape[-1])
    o = empty(tuple(v.shape), v.dtype, device)
    final_state = empty((len(plan.fragments), v.shape[-2], *dims), torch.float32, device).zero_()
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
             "initial_state": initial_state, "has_initial_state": has_initial_state, "o": o, "final_state": final_state}
    tensors = {**_all_reachable(given, device), "allow_neg_eigval": allow_neg_eigval, "initial_layout": state_layout,
               "final_layout": state_layout}
    if not plan.fragments:
        tensors = {name: x for name, x in tensors.items() if "state" not in name and "layout" not in name}
    workspace = empty((plan.workspace_bytes,), torch.uint8, device)
    # Zeros: bytes past the summaries of a rank with fewer blocks are sent, too.
    summary = empty((plan.summary_bytes,), torch.uint8, device).zero_()
    plan.summarise(summary, workspace, **tensors)
    gathered = summary
    if plan.summary_bytes and ranks > 1:
        gathered = empty((plan.gathered_bytes,), torch.uint8, device)
        dist.all_gather_into_tensor(gathered, summary, group=group)
    plan.finish(gathered, workspace, **tensors)
    return o, final_state


def rank_fragments(lengths, ranks, rank, value_heads, kind="contiguous", block=None, device="cpu"):
    """Fragments of a rank, `(sequence, begin, tokens)`: the rows that it passes to `prefill_parallel`, in this order."""
    layout = RankLayout(lengths, ranks, kind, block)
    plan = ParallelPrefill(context_of(torch.device(device)), PrefillSpec(value_heads, value_heads, 16, 16), layout, rank,
                           sum(layout.lengths))
    return plan.fragments


@torch.library.custom_op("deltawave::prefill_pool", mutates_args=("pool",))
def prefill_pool(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
                 write_slots: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
                 g: Optional[Tensor] = None, beta: Optional[Tensor] = None, a: Optional[Tensor] = None,
                 b: Optional[Tensor] = None, a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None,
                 allow_neg_eigval: bool = False, cu_seqlens: Optional[Tensor] = None, scale: Optional[float] = None,
                 qk_l2norm: bool = False, head_map: str = "grouped", pool_layout: str = "key_major",
                 snapshot_slots: Optional[Tensor] = None, segments: Optional[int] = None,
                 path: str = "auto") -> Tensor:
    """Returns o of a `prefill` on a pool of states, which is updated in place. Snapshots go to the pool, too."""
    _rows(q, k, v)
    o, states = empty(tuple(v.shape), v.dtype, v.device), _reachable("pool", pool, v.device)
    per_token = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "o": o}
    others = {"a_log": a_log, "dt_bias": dt_bias, "pool": states, "slots": slots, "write_slots": write_slots,
              "has_initial_state": has_initial_state, "snapshot_slots": snapshot_slots}
    _launch_prefill((qk_l2norm, head_map, scale, segments, path), per_token, others, cu_seqlens,
                    allow_neg_eigval=allow_neg_eigval, pool_layout=pool_layout)
    if states is not pool:
        pool.copy_(states)
    return o


@prefill_pool.register_fake
def _(q, k, v, pool, slots=None, write_slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None,
      dt_bias=None, allow_neg_eigval=False, cu_seqlens=None, scale=None, qk_l2norm=False, head_map="grouped",
      pool_layout="key_major", snapshot_slots=None, segments=None, path="auto"):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@torch.library.custom_op("deltawave::decode", mutates_args=("pool",))
def decode(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
           write_slots: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None, g: Optional[Tensor] = None,
           beta: Optional[Tensor] = None, a: Optional[Tensor] = None, b: Optional[Tensor] = None,
           a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
           scale: Optional[float] = None, qk_l2norm: bool = False, head_map: str = "grouped",
           pool_layout: str = "key_major") -> Tensor:
    """Returns o of the next tokens of every sequence, and updates the pool in place. `deltawave.Decode` documents the
    arguments. q is `[B, HK, K]`, one token of each sequence, or `[B, T, HK, K]`."""
    _rows(q, k, v)
    o, states = empty(tuple(v.shape), v.dtype, v.device), _reachable("pool", pool, v.device)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
              "slots": slots, "write_slots": write_slots, "has_initial_state": has_initial_state}
    _launch_decode((head_map, qk_l2norm, scale), inputs, pool=states, o=o, pool_layout=pool_layout,
                   allow_neg_eigval=allow_neg_eigval)
    if states is not pool:
        pool.copy_(states)
    return o


def _launch_decode(spec, inputs, **others):
    """Launches a decode. `inputs` are copied if the device cannot reach them; `others` are passed as they are."""
    q, k, v = (inputs[name] for name in "qkv")
    device, tokens = q.device, q.shape[1] if q.dim() == 4 else 1
    spec = DecodeSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], _dtype_of("q", q), *spec, tokens)
    with _OfShapes(**_dims_of(k, v).sources, tokens=("q", q), batch=("q", q)):
        plan = _decode_plan(device, spec, q.shape[0])
    plan.launch(**_all_reachable(inputs, device), **others)


def _decode_plan(device, spec, batch):
    return _plan((Decode, device, spec, batch), lambda: Decode(context_of(device), spec, batch))


@decode.register_fake
def _(q, k, v, pool, slots=None, write_slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None,
      dt_bias=None, allow_neg_eigval=False, scale=None, qk_l2norm=False, head_map="grouped", pool_layout="key_major"):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@torch.library.custom_op("deltawave::verify", mutates_args=())
def verify(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
           has_initial_state: Optional[Tensor] = None, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
           a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
           dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False, scale: Optional[float] = None,
           qk_l2norm: bool = False, head_map: str = "grouped", pool_layout: str = "key_major") -> Tuple[Tensor, Tensor]:
    """Verifies drafts. Returns o as `decode` does, and the states after every token for `commit`: `[B, T, HV, K, V]` in the
    layout and dtype of the pool. The pool is not written. q is `[B, T, HK, K]`. States of padding are uninitialised."""
    _rows(q, k, v)
    o, states = verify_outputs(q, v, pool, empty)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
              "slots": slots, "has_initial_state": has_initial_state, "pool": pool}
    _launch_decode((head_map, qk_l2norm, scale), inputs, o=o, states=states.flatten(0, 1), pool_layout=pool_layout,
                   allow_neg_eigval=allow_neg_eigval)
    return o, states


def verify_outputs(q, v, pool, make):
    """Uninitialised outputs of `verify`."""
    tokens = _of_rank("q", q, 3, 4).shape[1] if q.dim() == 4 else 1
    _of_rank("pool", pool, 4)
    states = (q.shape[0], tokens, *pool.shape[1:])
    return make(tuple(v.shape), v.dtype, device=v.device), make(states, pool.dtype, device=v.device)


@verify.register_fake
def _(q, k, v, pool, slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None, dt_bias=None,
      allow_neg_eigval=False, scale=None, qk_l2norm=False, head_map="grouped", pool_layout="key_major"):
    return verify_outputs(q, v, pool, _fake_empty)


def commit(accepted: Tensor, states: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
           conv_state: Optional[Tensor] = None, x: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
           pool_layout: str = "key_major", x_layout: str = "flat", conv_layout: str = "channel_major") -> None:
    """Commits the first accepted[n] tokens of each sequence n: moves the state after the last of them from `states`, made
    by `verify`, to the pool. With conv_state, also moves their columns from the rows x `[B T, columns]` of a `conv` with
    `keep_states`. accepted is `[B]` i32."""
    _commit(accepted, states, pool, slots, conv_state, x, has_initial_state, pool_layout, x_layout, conv_layout)


# conv_state has no default here: torch drops trailing arguments that equal their defaults before it looks for mutated ones.
@torch.library.custom_op("deltawave::commit", mutates_args=("pool", "conv_state"))
def _commit(accepted: Tensor, states: Tensor, pool: Tensor, slots: Optional[Tensor], conv_state: Optional[Tensor],
            x: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None, pool_layout: str = "key_major",
            x_layout: str = "flat", conv_layout: str = "channel_major") -> None:
    choice("pool_layout", pool_layout, STATE_LAYOUTS)
    choice("conv_layout", conv_layout, CONV_LAYOUTS)
    device, (batch, tokens, value_heads, *matrix) = states.device, _of_rank("states", states, 5).shape
    key_dim, value_dim = matrix if pool_layout == "key_major" else reversed(matrix)
    key_heads, dtype = 1, "bf16"
    if conv_state is not None:
        channels = _of_rank("conv_state", conv_state, 3).shape[1 if conv_layout == "channel_major" else 2]
        keys, dtype = channels - value_heads * value_dim, _dtype_of("conv_state", conv_state)
        if keys <= 0 or not key_dim or keys % (2 * key_dim):
            allowed = f"it must have channels of q and k, in heads of {key_dim}, and {value_heads * value_dim} of v"
            raise ArgumentError(f"conv_state: {channels} channels; {allowed}")
        key_heads = keys // (2 * key_dim)
    spec = DecodeSpec(key_heads, value_heads, key_dim, value_dim, dtype, tokens=tokens)
    inputs = {"accepted": accepted, "states": states.flatten(0, 1), "slots": slots, "x": x,
              "has_initial_state": has_initial_state}
    written = {"pool": pool, "conv_state": conv_state}
    reached = _all_reachable({**inputs, **written}, device)
    taken = ("key_heads", "value_heads", "key_dim", "value_dim", "tokens", "batch")
    with _OfShapes(**{name: ("states", states) for name in taken}):
        plan = _decode_plan(device, spec, batch)
    plan.commit(**reached, pool_layout=pool_layout, x_layout=x_layout, conv_layout=conv_layout)
    for name, tensor in written.items():
        if tensor is not reached[name]:
            tensor.copy_(reached[name])


@_commit.register_fake
def _(accepted, states, pool, slots, conv_state, x=None, has_initial_state=None, pool_layout="key_major",
      x_layout="flat", conv_layout="channel_major"):
    return None


@torch.library.custom_op("deltawave::conv", mutates_args=("state",))
def conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Optional[Tensor], key_heads: int, value_heads: int,
         key_dim: int, value_dim: int, cu_seqlens: Optional[Tensor] = None, slots: Optional[Tensor] = None,
         has_initial_state: Optional[Tensor] = None, activation: str = "silu", x_layout: str = "flat",
         state_layout: str = "channel_major", keep_states: bool = False) -> Tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of packed rows x `[T, columns]`. Updates the pool `state` in place, except with `keep_states`.
    `deltawave.Conv` documents the arguments. Without cu_seqlens x is one sequence."""
    device, tokens, width = x.device, _of_rank("x", x, 2, 3).shape[0], _of_rank("weight", weight, 2).shape[1]
    spec = ConvSpec(key_heads, value_heads, key_dim, value_dim, width, _dtype_of("x", x), activation, keep_states)
    with _OfShapes(width=("weight", weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Conv, spec, tokens, cu_seqlens, device)
    pool = _reachable("state", state, device)
    q, k, v = conv_outputs(x, key_heads, value_heads, key_dim, value_dim, empty)
    inputs = {"x": x, "weight": weight, "bias": bias, "slots": slots, "has_initial_state": has_initial_state}
    plan.launch(**_all_reachable(inputs, device), **lengths, state=pool, q=q, k=k, v=v,
                x_layout=x_layout, state_layout=state_layout)
    if pool is not state and not keep_states:
        state.copy_(pool)
    return q, k, v


def conv_outputs(x, key_heads, value_heads, key_dim, value_dim, make):
    """Uninitialised outputs of a convolution."""
    _of_rank("x", x, 2, 3)
    heads = ((key_heads, key_dim), (key_heads, key_dim), (value_heads, value_dim))
    return tuple(make((x.shape[0], *shape), x.dtype, device=x.device) for shape in heads)


@conv.register_fake
def _(x, weight, bias, state, key_heads, value_heads, key_dim, value_dim, cu_seqlens=None, slots=None,
      has_initial_state=None, activation="silu", x_layout="flat", state_layout="channel_major", keep_states=False):
    return conv_outputs(x, key_heads, value_heads, key_dim, value_dim, _fake_empty)


def _has_heads(name, x, trailing):
    """Refuses a tensor with fewer than `trailing` dimensions, or with a 0 among the last `trailing`."""
    if x.dim() < trailing or 0 in x.shape[-trailing:]:
        allowed = ("[..., HV]", "[..., HV, V]")[trailing - 1]
        raise ArgumentError(f"{name}: shape {list(x.shape)}; it must be {allowed}, neither of them 0")
    return x


def _of_heads(name, x, heads):
    """A tensor `[..., heads]` viewed as `[rows, heads]`."""
    if x.dim() < 1 or x.shape[-1] != heads:
        raise ArgumentError(f"{name}: shape {list(x.shape)}; its last dimension must be {heads} heads, as of a")
    return x.reshape(-1, heads)


@torch.library.custom_op("deltawave::gate", mutates_args=())
def gate(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Optional[Tensor] = None,
         allow_neg_eigval: bool = False) -> Tuple[Tensor, Tensor]:
    """Returns g and beta, f32, in the shape of a. `deltawave.gate` documents the arguments."""
    device = _has_heads("a", a, 1).device
    g, beta = (empty(tuple(a.shape), torch.float32, device) for _ in range(2))
    heads = a.shape[-1]
    inputs = {"a": a.reshape(-1, heads), "b": _of_heads("b", b, heads), "a_log": a_log, "dt_bias": dt_bias}
    launch_gate(context_of(device), **_all_reachable(inputs, device),
                g=g.view(-1, heads), beta=beta.view(-1, heads), allow_neg_eigval=allow_neg_eigval)
    return g, beta


@gate.register_fake
def _(a, b, a_log, dt_bias=None, allow_neg_eigval=False):
    return tuple(torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))


@torch.library.custom_op("deltawave::norm", mutates_args=())
def norm(x: Tensor, z: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6, gate: str = "silu") -> Tensor:
    """Returns the gated RMS norm of x `[..., HV, V]`, in its shape. `deltawave.norm` documents the arguments."""
    device, shape = _has_heads("x", x, 2).device, x.shape
    _dtype_of("x", x)
    _has_heads("z", z, 2)
    y = empty(tuple(shape), x.dtype, device)
    inputs = {"x": x.reshape(-1, *shape[-2:]), "z": z.reshape(-1, *z.shape[-2:]), "weight": weight}
    with _OfShapes(y=("x", x)):
        launch_norm(context_of(device), **_all_reachable(inputs, device), y=y.view(-1, *shape[-2:]), eps=eps, gate=gate)
    return y


@norm.register_fake
def _(x, z, weight=None, eps=1e-6, gate="silu"):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("deltawave::layer", mutates_args=("conv_state", "pool"))
def layer(x: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, pool: Tensor, conv_weight: Tensor, a_log: Tensor,
          key_heads: int, value_heads: int, key_dim: int, value_dim: int, z: Optional[Tensor] = None,
          conv_bias: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, norm_weight: Optional[Tensor] = None,
          cu_seqlens: Optional[Tensor] = None, decodes: int = 0, slots: Optional[Tensor] = None,
          has_initial_state: Optional[Tensor] = None, eps: float = 1e-6, gate: str = "silu", qk_l2norm: bool = True,
          allow_neg_eigval: bool = False, scale: Optional[float] = None, head_map: str = "grouped", x_layout: str = "flat",
          conv_layout: str = "channel_major", pool_layout: str = "key_major", segments: Optional[int] = None,
          path: str = "auto") -> Tensor:
    """Returns y `[T, HV, V]` of packed rows x `[T, columns]`, and updates both pools in place. The first `decodes` rows are
    sequences of one token each. `deltawave.Layer` documents the arguments. Without cu_seqlens the rows after the decodes
    are one sequence."""
    device, width = _of_rank("x", x, 2, 3).device, _of_rank("conv_weight", conv_weight, 2).shape[1]
    spec = LayerSpec(key_heads, value_heads, key_dim, value_dim, _dtype_of("x", x), head_map, width, qk_l2norm, scale,
                     allow_neg_eigval, eps, gate, segments, path)
    with _OfShapes(width=("conv_weight", conv_weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Layer, spec, x.shape[0], cu_seqlens, device, (decodes,))
    written = {"conv_state": conv_state, "pool": pool}
    inputs = {"x": x, "z": z, "a": a, "b": b, "conv_weight": conv_weight, "conv_bias": conv_bias, "a_log": a_log,
              "dt_bias": dt_bias, "norm_weight": norm_weight, "slots": slots, "has_initial_state": has_initial_state}
    reached = _all_reachable({**inputs, **written}, device)
    y = empty((x.shape[0], value_heads, value_dim), x.dtype, device)
    plan.launch(**reached, **lengths, y=y, x_layout=x_layout, conv_layout=conv_layout, pool_layout=pool_layout,
                workspace=empty((plan.workspace_bytes,), torch.uint8, device))
    for name, tensor in written.items():
        if tensor is not reached[name]:
            tensor.copy_(reached[name])
    return y


@layer.register_fake
def _(x, a, b, conv_state, pool, conv_weight, a_log, key_heads, value_heads, key_dim, value_dim, z=None, conv_bias=None,
      dt_bias=None, norm_weight=None, cu_seqlens=None, decodes=0, slots=None, has_initial_state=None, eps=1e-6, gate="silu",
      qk_l2norm=True, allow_neg_eigval=False, scale=None, head_map="grouped", x_layout="flat",
      conv_layout="channel_major", pool_layout="key_major", segments=None, path="auto"):
    return torch.empty((x.shape[0], value_heads, value_dim), dtype=x.dtype, device=x.device)
