"""The operations as torch custom ops: `torch.ops.deltawave.layer`, `prefill` and its gradients, `prefill_pool`, `decode`,
`verify`, `commit`, `conv`, `norm` and `gate`, or the functions here.

torch.compile and torch.export take each op as one node, because it has a fake function. Ops run on torch's current
stream, allocate through torch, and do not wait for the device, so they can be captured into a graph. The first call with
new shapes makes a plan for them: make that call before the capture.

Lengths on the host are part of a plan's shapes; lengths on the device are not. If every step has other lengths, pass
cu_seqlens on the device, padded to a few numbers of sequences and tokens. With cu_seqlens on the host each step would make
a plan. Beyond 256 plans it would also drop the oldest, which waits for the device.

Workspaces are kept: one tensor per device and stream, as large as the largest so far. A capture allocates its own from
the graph's memory. With `out=` the functions here allocate nothing else.

CPU tensors run on the simulator, for tests. Tensors outside its memory (`empty`) are copied there and back, with the
strides that they have: what a GPU refuses is refused here.
"""

import ctypes
import functools
import inspect
import itertools
import os
import threading
from collections import OrderedDict
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple, TypeVar, Union, get_args

import torch
from torch import Tensor

from . import arrays
from .calls import Calls, note_output
from .context import Context, Memory
from .conv import STATE_LAYOUTS as CONV_LAYOUTS
from .conv import Conv, ConvBackward, ConvSpec
from .decode import Decode, DecodeSpec
from .errors import ArgumentError, Error, RanksError
from .gate import gate as launch_gate
from .gate import gate_backward as launch_gate_backward
from .gate import gate_backward_workspace_bytes
from .layer import Layer, LayerBackward, LayerSpec
from .library import default as default_library
from .norm import norm as launch_norm
from .norm import norm_backward as launch_norm_backward
from .norm import norm_backward_workspace_bytes
from .parallel import ParallelPrefill, RankLayout
from .plan import Plans
from .prefill import Prefill, PrefillBackward, PrefillSpec
from .prefill import round_tokens as round_tokens_of
from .structs import STATE_LAYOUTS, VECTORS
from .values import choice, shown

_plans = Plans(most=256)
# Arguments that are not numbers of floating point.
INTEGERS = {*VECTORS, "cu_seqlens", "order"}
# Held while a context is made: a device must have only one, because contexts do not know each other's memory.
_lock = threading.Lock()
_workspace_lock = threading.Lock()
_F = TypeVar("_F", bound=Callable[..., Any])
# The largest workspace so far of each device and stream.
_workspaces: Dict[Tuple[torch.device, Optional[int]], Tensor] = {}


@functools.lru_cache(maxsize=None)
def _context(kind: str, index: Optional[int]) -> Context:
    if kind == "cpu":
        return Context("simulator")
    if torch.version.hip is None:
        os.environ.setdefault("DELTAWAVE_HIP_LIBRARY", "cuda")
    return Context("hip", index or 0)


def context_of(device: torch.device) -> Context:
    """The context of a torch device. CPU tensors have the simulator's context."""
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device: {device}; it must be cuda (a GPU) or cpu (the simulator)")
    index = None if device.type == "cpu" else device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    with _lock:
        return _context(device.type, index)


def empty(shape: Any, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
    """An uninitialised tensor that kernels can use. A CPU tensor is in the simulator's memory."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(f"device: {shown(device)}; it must be a torch device") from None
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype: {shown(dtype)}; it must be a torch dtype")
    shape = arrays.dimensions("shape", shape)
    made = _empty(shape, dtype, device)
    note_output(made)
    return made


def _empty(shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    count = 1
    for n in shape:
        count *= n
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = Memory(context_of(device), count * dtype.itemsize)
    bytes_there: Any = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    bytes_there.memory = memory  # the tensor keeps the ctypes array alive, the array keeps the memory
    return torch.frombuffer(bytes_there, dtype=dtype, count=count).view(shape)


def _reachable(name: str, x: Optional[Tensor], device: torch.device) -> Any:
    """A tensor that the device can reach: `x`, or a copy of a CPU tensor outside the simulator's memory. The copy has the
    strides of `x`, so that the simulator refuses the strides that a GPU refuses."""
    if x is None or device.type != "cpu":
        return x
    found = arrays.describe(name, x, tuple(arrays.SIZES) if name in INTEGERS else arrays.FLOATS)
    if x.device.type != "cpu":
        raise ArgumentError(f"{name}: memory of {x.device}; it must be on the device of the others, {device}")
    if context_of(device).owns(x):
        return x
    count = found.extent() // arrays.SIZES[found.dtype]
    if not count:
        return empty(found.shape, x.dtype)
    copy = empty((count,), x.dtype).copy_(x.as_strided((count,), (1,)))
    return copy.as_strided(found.shape, found.strides)


def _all_reachable(tensors: Dict[str, Optional[Tensor]], device: torch.device) -> Dict[str, Any]:
    """`_reachable` for tensors by name."""
    return {name: _reachable(name, x, device) for name, x in tensors.items()}


def on_device(lengths: Tensor) -> Tensor:
    """`lengths` where a plan reads them on the device: CPU tensors are copied into the simulator's memory."""
    return _reachable("cu_seqlens", lengths, lengths.device)


def _copied_back(written: Dict[str, Optional[Tensor]], reached: Dict[str, Any]) -> None:
    """Copies tensors that a launch wrote from the simulator's memory to where they were."""
    for name, tensor in written.items():
        if tensor is not None and tensor is not reached[name]:
            tensor.copy_(reached[name])


def capturing() -> bool:
    """Whether torch's current stream is being captured."""
    # Not before torch has initialised CUDA. torch.cuda.is_available would ask the driver each time.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_key(device: torch.device) -> Tuple[torch.device, Optional[int]]:
    """A device and its current stream. The simulator's has no number."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _raw_stream(device: torch.device) -> Optional[int]:
    """The address of the current stream. None on the simulator."""
    if device.type != "cuda":
        return None
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return address(device.index) if address else torch.cuda.current_stream(device).cuda_stream


def _workspace(nbytes: int, device: torch.device) -> Tensor:
    """Scratch memory of the current stream, at least `nbytes` long. A capture has memory of its own."""
    if _capturing(device):
        return torch.empty((nbytes,), dtype=torch.uint8, device=device)
    key = _stream_key(device)
    with _workspace_lock:
        found = _workspaces.get(key)
        if found is None or found.shape[0] < nbytes:
            found = _workspaces[key] = _empty((nbytes,), torch.uint8, device)  # no output of an op
        return found


def _output(out: Optional[Tensor], shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out` if it has this shape and type, else an uninitialised tensor if it is None."""
    if out is None:
        return empty(shape, dtype, device)
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype:
        raise ArgumentError(f"out: {out.dtype} of shape {list(out.shape)}; it must be {dtype} of shape {list(shape)}")
    return out


def _without_null(null_slot: int, slots: Optional[Tensor]) -> Optional[Tensor]:
    """Slots `[N]` with -1, which is never a slot, instead of `null_slot`."""
    if slots is None or null_slot == -1:
        return slots
    return slots.masked_fill(slots == null_slot, -1)


def needs_gradient(*tensors: Any) -> bool:
    """Whether autograd would record a function of these arguments."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


class _WithoutBackward(torch.autograd.Function):  # type: ignore[misc]
    """Gives tensors a backward that raises."""

    @staticmethod
    def forward(ctx: Any, text: str, made: List[Tensor], *inputs: Tensor) -> Tuple[Tensor, ...]:
        ctx.text = text
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(ctx.text)


def without_backward(name: str, instead: str, inputs: Sequence[Any], results: Sequence[Optional[Tensor]]) -> Any:
    """`results`, made without autograd, of a function that has no backward. A backward through them raises
    NotImplementedError, which names the function and what differentiates in its place."""
    text = f"{name}: no backward; {instead} has one"
    needed = [x for x in inputs if getattr(x, "requires_grad", False)]
    made = iter(_WithoutBackward.apply(text, [x for x in results if x is not None], *needed))
    return tuple(None if x is None else next(made) for x in results)


def _refuses_backward(name: str, instead: str, out: Optional[Tensor], call: Callable[[], Any],
                      inputs: Sequence[Any]) -> Any:
    """Results of `call`, an op without a backward. `without_backward` says so where a gradient is required."""
    if not needs_gradient(*inputs):
        _refuse_own_gradient(out)
        return call()
    if out is not None:
        raise ArgumentError(_OUT_AND_GRADIENTS)
    with torch.no_grad():
        results = call()
    if isinstance(results, Tensor):
        return without_backward(name, instead, inputs, (results,))[0]
    return without_backward(name, instead, inputs, results)


def _refuse_tangents(name: str, tensors: Sequence[Any]) -> None:
    """Refuses tensors with tangents: an op has no forward-mode derivative, and its results would silently have none."""
    forward = torch.autograd.forward_ad
    # Without a level there are no tangents. The number is private; without it every tensor is looked at.
    if getattr(forward, "_current_level", 0) < 0:
        return
    for x in tensors:
        if isinstance(x, Tensor) and forward.unpack_dual(x).tangent is not None:
            text = f"{name}: no forward-mode derivative (jvp, dual tensors); reverse mode has one where the op has a backward"
            raise NotImplementedError(text)


def _refuse_wide(function: Callable[..., Any], arguments: Sequence[Any], named: Dict[str, Any]) -> None:
    """Refuses the first whole number that torch cannot pass to an op: it does not say which argument it is."""
    for name, value in [*zip(inspect.signature(function).parameters, arguments), *named.items()]:
        if isinstance(value, int) and not -1 << 63 <= value < 1 << 63:
            allowed = f"a whole number from 0 to {(1 << 31) - 1}" if name == "segments" else "a number that fits 64 bits"
            raise ArgumentError(f"{name}: {shown(value)}; it must be {allowed}") from None


@functools.lru_cache(maxsize=None)
def _plain_keys(kind: str) -> Tuple[FrozenSet[int], FrozenSet[Tuple[int, int]]]:
    """torch's dispatch keys without anything special, as numbers: of tensors on a kind of device, and pairs of those that a
    thread includes and excludes. In inference mode too. A new thread has no modes, whatever its maker's."""
    tensors, threads = set(), set()

    def look() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference):
                tensors.add(torch._C._dispatch_keys(torch.empty(0, device=kind)).raw_repr())
                threads.add(_keys_of_thread())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return frozenset(tensors), frozenset(threads)


def _keys_of_thread() -> Tuple[int, int]:
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


# Whether this torch has the private functions that tell plain calls.
_TELLS_PLAIN = all(hasattr(getattr(torch, "_C", None), f"_dispatch_{name}")
                   for name in ("keys", "tls_local_include_set", "tls_local_exclude_set"))
# Types of arguments that torch passes to an op as they are.
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
_PLAIN_TYPES: Dict[Any, Tuple[type, ...]] = {
    Tensor: _TENSOR_TYPES, Optional[Tensor]: (*_TENSOR_TYPES, type(None)), bool: (bool,), int: (int,), float: (float,), Optional[float]: (float, type(None)), str: (str,)}


class _PlainCalls:
    """Tells calls of an op that need nothing of torch's dispatcher: no gradient, no mode, no trace, and arguments of the
    right types. A decode step in eager mode waits for the host, and the dispatcher takes a third of each op's time."""

    def __init__(self, function: Callable[..., Any], mutates: Tuple[str, ...]) -> None:
        parameters = inspect.signature(function).parameters
        self.names = tuple(parameters)
        self.types = [_PLAIN_TYPES.get(p.annotation, ()) for p in parameters.values()]
        self.by_name = dict(zip(self.names, self.types))
        self.required = [p.name for p in parameters.values() if p.default is p.empty]
        self.mutates = [(self.names.index(name), name) for name in mutates]

    def key(self, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> Optional[Tuple[Any, ...]]:
        """The layouts and numbers of such a call's arguments; None of another call."""
        count = len(arguments)
        if count > len(self.names) or any(name not in named for name in self.required[count:]):
            return None
        device, records = None, torch.is_grad_enabled()
        parts: List[Any] = [*named]
        append = parts.append
        for x, types in [*zip(arguments, self.types), *((x, self.by_name.get(name, ())) for name, x in named.items())]:
            kind = type(x)
            if kind not in types or kind is int and not -1 << 63 <= x < 1 << 63:
                return None
            if kind in _TENSOR_TYPES:
                if device is None:
                    device = x.device.type
                    if device not in ("cpu", "cuda"):
                        return None
                    keys, threads = _plain_keys(device)
                    if _keys_of_thread() not in threads:
                        return None
                if torch._C._dispatch_keys(x).raw_repr() not in keys or records and x.requires_grad:
                    return None
                append((x.dtype, x.shape, x.stride(), x.device))
            else:
                append(x if x is None else (kind, x))
        if device is None or torch._C._get_tracing_state() is not None or torch.autograd._profiler_enabled():
            return None
        return tuple(parts)

    def wrote(self, arguments: Tuple[Any, ...], named: Dict[str, Any]) -> None:
        """Tells autograd what such a call wrote."""
        for place, name in self.mutates:
            x = arguments[place] if place < len(arguments) else named.get(name)
            if x is not None and not x.is_inference():
                torch.autograd.graph.increment_version(x)


def custom_op(name: str, mutates_args: Tuple[str, ...], repeats: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` of a function, called through a function that refuses tensors with tangents. The op itself,
    in `torch.ops`, refuses them too, unless it writes its arguments or torch.func hides the tangents. Plain calls of the
    function made go past the dispatcher. With `repeats`, for functions that launch and do nothing else on the device, calls
    like earlier ones go past the function too."""

    def register(function: Callable[..., Any]) -> Any:
        def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def checked(*arguments: Any, **named: Any) -> Any:
                _refuse_tangents(name, (*arguments, *named.values()))
                try:
                    return call(*arguments, **named)
                except (OverflowError, RuntimeError, TypeError):
                    _refuse_wide(function, arguments, named)
                    raise

            return checked

        # Where arguments are written, torch calls the kernel below the keys that tangents are read by.
        made = torch.library.custom_op(name, mutates_args=mutates_args)(function if mutates_args else refusing(function))
        through_torch, plain = refusing(made), _PlainCalls(function, mutates_args)
        calls = Calls(_empty, _workspace, _raw_stream) if repeats else None

        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            key = None if not _TELLS_PLAIN or torch.compiler.is_compiling() else plain.key(arguments, named)
            if key is None:
                return through_torch(*arguments, **named)
            values = (*arguments, *named.values())
            _refuse_tangents(name, values)
            # A capture needs plans that are kept for it.
            if calls is None or capturing():
                result = function(*arguments, **named)
            else:
                result = calls.run(key, values, lambda: function(*arguments, **named))
            plain.wrote(arguments, named)
            return result

        for attribute in ("register_fake", "register_autograd"):
            setattr(called, attribute, getattr(made, attribute))
        return called

    return register


_OUT_AND_GRADIENTS = "out: given where a gradient is required; it must be absent, or the call under torch.no_grad()"


def _refuse_own_gradient(out: Optional[Tensor]) -> None:
    """Refuses an `out` that requires a gradient: autograd would not see that it is written."""
    if needs_gradient(out):
        raise ArgumentError("out: requires a gradient; it must not, or the call must be under torch.no_grad()")


def _operation(name: str, mutates_args: Tuple[str, ...] = (), more: Tuple[str, ...] = (), instead: str = "",
               repeats: bool = False) -> Callable[[_F], _F]:
    """Registers a function as two custom ops. `deltawave::NAME` returns all its results. `deltawave::NAME_out` first takes
    `out`, which it writes instead of returning the first result, and then the optional tensors `more`, which it writes
    too. The function made takes both as keywords, and calls one of the two ops. `instead`: an op has no backward, and this
    function has one."""

    def register(function: _F) -> _F:
        given = inspect.signature(function)
        inputs = [p for p in given.parameters.values() if p.name not in ("out", *more)]
        first = [inspect.Parameter("out", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)]
        # Without defaults: torch drops trailing arguments that equal their defaults before it looks for mutated ones.
        first += [given.parameters[p].replace(default=inspect.Parameter.empty, kind=first[0].kind) for p in more]
        rest = get_args(given.return_annotation)[1:]

        def allocating(*arguments: Any, **named: Any) -> Any:
            return function(*arguments, **named)

        def filling(out: Tensor, *arguments: Any, **named: Any) -> Any:
            tensors, arguments = arguments[:len(more)], arguments[len(more):]
            named.update(zip(more, tensors))
            results = function(*arguments, out=out, **named)
            return results[1] if rest else None

        setattr(allocating, "__signature__", given.replace(parameters=inputs))
        setattr(filling, "__signature__", given.replace(parameters=first + inputs,
                                                        return_annotation=rest[0] if rest else None))
        new = custom_op(f"deltawave::{name}", mutates_args, repeats)(allocating)
        into = custom_op(f"deltawave::{name}_out", ("out", *more, *mutates_args), repeats)(filling)
        fakes: List[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*arguments: Any, out: Optional[Tensor] = None, **named: Any) -> Any:
            inputs = (*arguments, *named.values())
            if instead:
                return _refuses_backward(name, instead, out, lambda: run(out, arguments, named), inputs)
            if out is not None and needs_gradient(*inputs):
                raise ArgumentError(_OUT_AND_GRADIENTS)
            _refuse_own_gradient(out)
            return run(out, arguments, named)

        def run(out: Optional[Tensor], arguments: Tuple[Any, ...], named: Dict[str, Any]) -> Any:
            extra = [named.pop(p, None) for p in more]
            if out is None and all(x is None for x in extra):
                return new(*arguments, **named)
            if out is None:
                made = fakes[0](*arguments, **named)
                out = made[0] if rest else made
            others = into(out, *extra, *arguments, **named)
            return (out, others) if rest else out

        def register_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
            fakes.append(fake)
            new.register_fake(fake)

            def filled(out: Tensor, *arguments: Any, **named: Any) -> Any:
                return fake(*arguments[len(more):], **named)[1] if rest else None

            into.register_fake(filled)
            return fake

        setattr(call, "register_fake", register_fake)
        setattr(call, "register_autograd", new.register_autograd)
        return call  # type: ignore[return-value]

    return register


def _fake(op: Callable[..., Any]) -> Callable[[_F], _F]:
    """Registers the fake function of an operation: results without values, for torch.compile."""
    return getattr(op, "register_fake")


def _of_rank(name: str, x: Tensor, *ranks: int) -> Tensor:
    """Refuses a tensor unless its number of dimensions is one of `ranks`."""
    if x.dim() not in ranks:
        allowed = " or ".join(map(str, ranks))
        raise ArgumentError(f"{name}: shape {list(x.shape)}; it must have {allowed} dimension{'s' * (ranks != (1,))}")
    return x


def _rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses q, k and v unless they have three or four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _of_rank(name, x, 3, 4)


class _OfShapes:
    """Context manager that renames errors. An op takes spec fields and outputs from shapes of tensors: an error about such
    a field becomes an error about the tensor. `_OfShapes(key_dim=("k", k))`: key_dim comes from the shape of k."""

    def __init__(self, **sources: Tuple[str, Tensor]) -> None:
        self.sources = sources

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, problem: Any, traceback: Any) -> None:
        if isinstance(problem, ArgumentError):
            source = self.sources.get(str(problem).partition(":")[0])
            if source:
                raise ArgumentError(f"{source[0]}: shape {list(source[1].shape)}; {problem}") from None


def _dims_of(k: Tensor, v: Tensor) -> _OfShapes:
    """Tensors whose shapes give prefill and decode the numbers of a spec."""
    return _OfShapes(key_heads=("k", k), key_dim=("k", k), value_heads=("v", v), value_dim=("v", v))


def _dtype_of(name: str, x: Tensor) -> str:
    """The element type of a tensor that gives a plan its dtype."""
    return arrays.dtype_name(x.dtype, name, ("bf16", "fp16"))


def _sequences_of(cu_seqlens: Tensor) -> int:
    """The number of sequences in `cu_seqlens`."""
    if _of_rank("cu_seqlens", cu_seqlens, 1).shape[0] < 1:
        raise ArgumentError("cu_seqlens: it is empty; it must have one entry more than sequences")
    return cu_seqlens.shape[0] - 1


def _plan(key: Any, make: Callable[[], Any]) -> Any:
    """The plan for a call's shapes, made once. A captured graph needs its plan as long as it may be replayed."""
    return _plans.get(key, make, capturing())


def _packed_plan(kind: Any, spec: Any, tokens: int, cu_seqlens: Union[Tensor, Tuple[int, ...], None], device: torch.device,
                 decodes: Tuple[int, ...] = ()) -> Tuple[Any, Dict[str, Tensor]]:
    """A plan for packed sequences, and the launch arguments for their lengths. `cu_seqlens` is read on the host, and not
    read on the device; numbers are those of the host. Without it the rows after the decodes are one sequence. `decodes` is
    empty, or a layer's number of decodes."""
    if isinstance(cu_seqlens, tuple):
        numbers = cu_seqlens
        return _plan((kind, device, spec, tokens, numbers, decodes),
                     lambda: kind.packed(context_of(device), spec, numbers, tokens, *decodes)), {}
    context = context_of(device)
    if cu_seqlens is not None:
        _sequences_of(cu_seqlens)
        arrays.dtype_name(cu_seqlens.dtype, "cu_seqlens", ("i32", "i64"))
    on_host = cu_seqlens is None or (cu_seqlens.device.type == "cpu"
                                     and not (device.type == "cpu" and context.owns(cu_seqlens)))
    if on_host:
        numbers = _lengths(tokens, *decodes) if cu_seqlens is None else tuple(cu_seqlens.tolist())
        return _plan((kind, device, spec, tokens, numbers, decodes),
                     lambda: kind.packed(context, spec, numbers, tokens, *decodes)), {}
    assert cu_seqlens is not None
    sequences = _sequences_of(cu_seqlens)
    key = (kind, device, spec, tokens, sequences, decodes)
    return _plan(key, lambda: kind.device(context, spec, tokens, sequences, *decodes)), {"cu_seqlens": cu_seqlens}


def _lengths(tokens: int, decodes: int = 0) -> Tuple[int, ...]:
    """cu_seqlens of `decodes` sequences of one token each, and one sequence of the remaining tokens."""
    rest = (tokens,) if tokens > decodes or not decodes else ()
    return (*range(min(decodes, tokens) + 1), *rest)


def equal_lengths(batch: int, tokens: int) -> Tensor:
    """cu_seqlens on the host of `batch` sequences of `tokens` tokens each, 1 or more."""
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device="cpu")


def _sequences(q: Tensor, cu_seqlens: Optional[Tensor]) -> int:
    if cu_seqlens is not None:
        return _of_rank("cu_seqlens", cu_seqlens, 1).shape[0] - 1
    return q.shape[0] if q.dim() == 4 else 1


@_operation("prefill")
def prefill(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
            a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
            dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False, initial_state: Optional[Tensor] = None,
            has_initial_state: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None,
            scale: Optional[float] = None, qk_l2norm: bool = False, head_map: str = "grouped",
            state_layout: str = "key_major", segments: Optional[int] = None, path: str = "auto",
            output_final_state: bool = True, *, out: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Returns o and the final states, in f32; without `output_final_state` an empty tensor instead of the states. o is
    `out` if that is given. `deltawave.Prefill` documents the arguments.

    q is `[T, HK, K]`, or `[B, T, HK, K]`. With cu_seqlens, q is one packed batch, and B must be 1. Without it, q is one
    sequence, or B sequences. Long sequences may be cut into segments. The host reads cu_seqlens on the CPU, and does not
    read cu_seqlens on a device, where a kernel cuts. Gradients flow to all inputs but has_initial_state and cu_seqlens.
    """
    choice("state_layout", state_layout, STATE_LAYOUTS)
    if cu_seqlens is not None:
        _sequences_of(cu_seqlens)
    _rows(q, k, v)
    o = _output(out, tuple(v.shape), v.dtype, v.device)
    final_state = prefill_state(q, k, v, cu_seqlens, state_layout, output_final_state, empty)
    per_token = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b}
    others = {"a_log": a_log, "dt_bias": dt_bias, "initial_state": initial_state, "has_initial_state": has_initial_state,
              "final_state": final_state if output_final_state else None}
    _launch_prefill((qk_l2norm, head_map, scale, segments, path), per_token, others, {"o": o}, cu_seqlens,
                    allow_neg_eigval=allow_neg_eigval, initial_layout=state_layout, final_layout=state_layout)
    return o, final_state


def _round_tokens(k: Tensor, v: Tensor) -> int:
    """Most tokens of a round of the backward, by the heads of k and v."""
    return _round_tokens_of(int(k.shape[-2]), int(v.shape[-2]), int(k.shape[-1]), int(v.shape[-1]))


@functools.lru_cache(maxsize=None)
def _round_tokens_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    return round_tokens_of(default_library(), PrefillSpec(key_heads, value_heads, key_dim, value_dim, save="boundaries"))


def _saves(q: Tensor, cu_seqlens: Optional[Tensor], round_tokens: int) -> Any:
    """A spec's `save` for rounds of so many tokens, if the host knows the lengths."""
    device = q.device
    on_host = cu_seqlens is None or (cu_seqlens.device.type == "cpu"
                                     and not (device.type == "cpu" and context_of(device).owns(cu_seqlens)))
    return round_tokens if on_host else "nothing"


def _context_bytes(k: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], round_tokens: int) -> int:
    """Bytes that hold the context of every batch of these shapes: the states of boundaries."""
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        return 0
    rows = k.shape[0] * k.shape[1] if k.dim() == 4 else k.shape[0]
    return rows // round_tokens * v.shape[-2] * k.shape[-1] * v.shape[-1] * 4


def _context_at(context: Optional[Tensor], device: torch.device) -> Optional[Tensor]:
    """A saved context where the device reaches it; None if it is empty."""
    if context is None or not context.shape[0]:
        return None
    if device.type == "cpu" and not context_of(device).owns(context):
        return empty(context.shape, context.dtype).copy_(context)
    return context


def _launch_prefill(options: Tuple[Any, ...], per_token: Dict[str, Any], others: Dict[str, Any], written: Dict[str, Any],
                    cu_seqlens: Optional[Tensor], context: Optional[Tensor] = None, **numbers: Any) -> None:
    """Launches a prefill. `per_token`: tensors over tokens, with or without a batch dimension. `others`: other inputs.
    `written`: o, which is per token, and other tensors that the launch writes. `context`: memory for what it saves."""
    plan, lengths, rows, device = _prefill_plan(options, {**per_token, "o": written["o"]}, cu_seqlens)
    written = {**written, "o": rows.pop("o")}
    inputs, outputs = _all_reachable({**rows, **others}, device), _all_reachable(written, device)
    plan.launch(**inputs, **outputs, **lengths, **numbers, context=context if plan.context_bytes else None,
                workspace=_workspace(plan.workspace_bytes, device))
    _copied_back(written, outputs)


def _prefill_plan(options: Tuple[Any, ...], per_token: Dict[str, Any], cu_seqlens: Optional[Tensor]
                  ) -> Tuple[Any, Dict[str, Tensor], Dict[str, Any], torch.device]:
    """The plan of a prefill, the launch arguments for its lengths, its tensors over tokens as the plan takes them, and the
    device."""
    q, k, v = (per_token[name] for name in "qkv")
    dense = q.dim() == 4 and cu_seqlens is None
    if q.dim() == 4 and cu_seqlens is not None and q.shape[0] != 1:
        raise ArgumentError(f"q: shape {list(q.shape)}; a batch with cu_seqlens must be [T, HK, K] or [1, T, HK, K]")
    device, context = q.device, context_of(q.device)
    qk_l2norm, head_map, scale, segments, path, *save = options
    spec = PrefillSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], _dtype_of("q", q), head_map,
                       qk_l2norm, scale, segments, path=path, save=(save or ["nothing"])[0])
    lengths: Dict[str, Tensor] = {}
    if dense:
        batch, tokens = q.shape[:2]
        key = (Prefill, device, spec, tokens, "dense", batch)
        with _dims_of(k, v):
            plan = _plan(key, lambda: Prefill.dense(context, spec, batch, tokens))
    else:
        with _dims_of(k, v):
            plan, lengths = _packed_plan(Prefill, spec, q.shape[-3], cu_seqlens, device)
        if q.dim() == 4:
            per_token = {name: None if x is None else x.squeeze(0) for name, x in per_token.items()}
    return plan, lengths, per_token, device


def prefill_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], state_layout: str, wanted: bool,
                  make: Callable[..., Tensor]) -> Tensor:
    """Uninitialised final states of a prefill, or an empty tensor if they are not wanted."""
    dims = (k.shape[-1], v.shape[-1]) if state_layout == "key_major" else (v.shape[-1], k.shape[-1])
    shape = (_sequences(q, cu_seqlens), v.shape[-2], *dims) if wanted else (0,)
    return make(shape, torch.float32, device=v.device)


def _fake_empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@_fake(prefill)
def _(q, k, v, g=None, beta=None, a=None, b=None, a_log=None, dt_bias=None, allow_neg_eigval=False, initial_state=None,
      has_initial_state=None, cu_seqlens=None, scale=None, qk_l2norm=False, head_map="grouped",
      state_layout="key_major", segments=None, path="auto", output_final_state=True):
    return (_fake_empty(v.shape, v.dtype, v.device),
            prefill_state(q, k, v, cu_seqlens, state_layout, output_final_state, _fake_empty))


@custom_op("deltawave::prefill_saving", mutates_args=())
def prefill_saving(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
                   a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
                   dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
                   initial_state: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
                   cu_seqlens: Optional[Tensor] = None, scale: Optional[float] = None, qk_l2norm: bool = False,
                   head_map: str = "grouped", state_layout: str = "key_major", segments: Optional[int] = None,
                   path: str = "auto", output_final_state: bool = True,
                   round_tokens: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """`prefill` that also returns the context of its backward, bytes: the states between rounds of the backward.

    round_tokens: most tokens of a round, a multiple of 64; the default bounds the backward's workspace to about 1 GiB. The
    context is empty if the batch has fewer tokens, or if its lengths are on a device, where there are no rounds. `prefill`
    saves nothing: its backward launches the forward again for these states, if it has rounds. Gradients have the same
    bits."""
    choice("state_layout", state_layout, STATE_LAYOUTS)
    if cu_seqlens is not None:
        _sequences_of(cu_seqlens)
    _rows(q, k, v)
    round_tokens = _round_tokens(k, v) if round_tokens is None else round_tokens
    save = _saves(q, cu_seqlens, _checked_tokens(round_tokens))
    o = empty(tuple(v.shape), v.dtype, v.device)
    context = empty((_context_bytes(k, v, cu_seqlens, round_tokens),), torch.uint8, v.device)
    final_state = prefill_state(q, k, v, cu_seqlens, state_layout, output_final_state, empty)
    per_token = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b}
    others = {"a_log": a_log, "dt_bias": dt_bias, "initial_state": initial_state, "has_initial_state": has_initial_state,
              "final_state": final_state if output_final_state else None}
    _launch_prefill((qk_l2norm, head_map, scale, segments, path, save), per_token, others, {"o": o}, cu_seqlens, context,
                    allow_neg_eigval=allow_neg_eigval, initial_layout=state_layout, final_layout=state_layout)
    return o, final_state, context


def _checked_tokens(round_tokens: int) -> int:
    if round_tokens < 64 or round_tokens % 64:
        raise ArgumentError(f"round_tokens: {round_tokens}; it must be a positive multiple of 64")
    return round_tokens


@prefill_saving.register_fake
def _(q, k, v, g=None, beta=None, a=None, b=None, a_log=None, dt_bias=None, allow_neg_eigval=False, initial_state=None,
      has_initial_state=None, cu_seqlens=None, scale=None, qk_l2norm=False, head_map="grouped",
      state_layout="key_major", segments=None, path="auto", output_final_state=True, round_tokens=None):
    round_tokens = _round_tokens(k, v) if round_tokens is None else round_tokens
    return (_fake_empty(v.shape, v.dtype, v.device),
            prefill_state(q, k, v, cu_seqlens, state_layout, output_final_state, _fake_empty),
            _fake_empty((_context_bytes(k, v, cu_seqlens, round_tokens),), torch.uint8, v.device))


# Gradients of `prefill_backward`, and the inputs of `prefill` that they belong to.
_GRADIENTS = {"d_q": "q", "d_k": "k", "d_v": "v", "d_g": "g", "d_beta": "beta", "d_a_log": "a_log",
              "d_dt_bias": "dt_bias", "d_initial_state": "initial_state"}


@custom_op("deltawave::prefill_backward", mutates_args=())
def prefill_backward(d_o: Tensor, d_final_state: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor],
                     beta: Optional[Tensor], a: Optional[Tensor], b: Optional[Tensor], a_log: Optional[Tensor],
                     dt_bias: Optional[Tensor], allow_neg_eigval: bool, initial_state: Optional[Tensor],
                     has_initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor], scale: Optional[float],
                     qk_l2norm: bool, head_map: str, state_layout: str, wanted: List[bool],
                     segments: Optional[int] = None, path: str = "auto", round_tokens: Optional[int] = None,
                     context: Optional[Tensor] = None) -> List[Tensor]:
    """Returns the gradients of q, k, v, g or a, beta or b, a_log, dt_bias and initial_state, of which `wanted` says which
    are computed; the others are empty. Gradients of a_log, dt_bias and initial_state are f32, the others have the type of
    their input. segments and path: as for `prefill`; lengths that only the device knows are not cut. round_tokens and
    context: as `prefill_saving` has them; without round_tokens there is one round, and without the context a launch of the
    forward computes it."""
    choice("state_layout", state_layout, STATE_LAYOUTS)
    if cu_seqlens is not None and cu_seqlens.device.type != "cpu":
        segments = None
    found = prefill_gradients(q, k, v, g, beta, a, b, a_log, dt_bias, initial_state, wanted, empty)
    outputs = {name: x for (name, x), want in zip(zip(_GRADIENTS, found), wanted) if want}
    per_token = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "d_o": _dense_rows(d_o)}
    over_tokens = {name: outputs.pop(name) for name in tuple(_GRADIENTS)[:5] if name in outputs}
    save = "nothing" if round_tokens is None else _saves(q, cu_seqlens, _checked_tokens(round_tokens))
    plan, lengths, per_token, device = _prefill_plan((qk_l2norm, head_map, scale, segments, path, save),
                                                     {**per_token, **over_tokens}, cu_seqlens)
    backward = _plan((PrefillBackward, plan), lambda: PrefillBackward(plan))
    context = _context_at(context, device) if plan.context_bytes else None
    if plan.context_bytes and context is None:
        context = _saved_again(plan, per_token, {"a_log": a_log, "dt_bias": dt_bias, "initial_state": initial_state,
                                                 "has_initial_state": has_initial_state}, device,
                               allow_neg_eigval=allow_neg_eigval, initial_layout=state_layout)
    final = None if d_final_state is None else d_final_state.contiguous()
    tensors = _all_reachable({**per_token, "a_log": a_log, "dt_bias": dt_bias, "initial_state": initial_state,
                              "has_initial_state": has_initial_state, "d_final_state": final, **outputs}, device)
    backward.launch(**tensors, **lengths, allow_neg_eigval=allow_neg_eigval, initial_layout=state_layout,
                    d_final_layout=state_layout, d_initial_layout=state_layout, context=context,
                    workspace=_workspace(backward.workspace_bytes, device))
    return found


def _saved_again(plan: Prefill, per_token: Dict[str, Any], others: Dict[str, Optional[Tensor]], device: torch.device,
                 **numbers: Any) -> Tensor:
    """The context of a prefill, from another launch of it."""
    context = empty((plan.context_bytes,), torch.uint8, device)
    inputs = {name: per_token[name] for name in ("q", "k", "v", "g", "beta", "a", "b")}
    v = per_token["v"]
    plan.launch(**_all_reachable({**inputs, **others}, device), **numbers, o=empty(tuple(v.shape), v.dtype, device),
                context=context, workspace=_workspace(plan.workspace_bytes, device))
    return context


def _dense_rows(x: Tensor) -> Tensor:
    """`x`, copied unless its rows are dense: the gradient of a sum is expanded from one number."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)  # a copy would keep strides of 0
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def prefill_gradients(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Optional[Tensor], a: Optional[Tensor],
                      b: Optional[Tensor], a_log: Optional[Tensor], dt_bias: Optional[Tensor],
                      initial_state: Optional[Tensor], wanted: List[bool], make: Callable[..., Tensor]) -> List[Tensor]:
    """Uninitialised gradients of a prefill. Those that are not wanted have no elements."""
    inputs = (q, k, v, a if g is None else g, b if beta is None else beta, a_log, dt_bias, initial_state)
    single = (a_log, dt_bias, initial_state)
    return [make(tuple(x.shape) if want else (0,),
                 torch.float32 if x is None or any(x is y for y in single) else x.dtype, device=q.device)
            for x, want in zip(inputs, wanted)]


@prefill_backward.register_fake
def _(d_o, d_final_state, q, k, v, g, beta, a, b, a_log, dt_bias, allow_neg_eigval, initial_state, has_initial_state,
      cu_seqlens, scale, qk_l2norm, head_map, state_layout, wanted, segments=None, path="auto", round_tokens=None,
      context=None):
    return prefill_gradients(q, k, v, g, beta, a, b, a_log, dt_bias, initial_state, wanted, _fake_empty)


def _save_nothing(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    pass


def _no_second_order(name: str) -> Callable[..., Any]:
    """The backward of a backward, which raises."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(f"{name}: no gradients of gradients; the backward of {name} cannot be differentiated")

    return backward


def _needed(ctx: Any, inputs: Sequence[Optional[Tensor]]) -> List[bool]:
    """Which of the first inputs need a gradient. torch leaves out arguments at the end that were not given."""
    needs = list(ctx.needs_input_grad) + [False] * len(inputs)
    return [x is not None and bool(need) for x, need in zip(inputs, needs)]


def _cast(found: Sequence[Tensor], inputs: Sequence[Optional[Tensor]], wanted: Sequence[bool]) -> List[Optional[Tensor]]:
    """Gradients in the types of their inputs; None where none is wanted."""
    return [d.to(x.dtype) if want and x is not None else None for d, x, want in zip(found, inputs, wanted)]


prefill_backward.register_autograd(_no_second_order("prefill"), setup_context=_save_nothing)

_PREFILL_TENSORS = ("q", "k", "v", "g", "beta", "a", "b", "a_log", "dt_bias", "initial_state", "has_initial_state",
                    "cu_seqlens")
_PREFILL_INPUTS = ("q", "k", "v", "g", "beta", "a", "b", "a_log", "dt_bias", "allow_neg_eigval", "initial_state",
                   "has_initial_state", "cu_seqlens", "scale", "qk_l2norm", "head_map", "state_layout", "segments", "path",
                   "output_final_state")


def _save_prefill(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)  # the gradient of unused states, in f32, would be as large as they are
    given = dict(zip(_PREFILL_INPUTS, inputs))
    ctx.save_for_backward(*(given[name] for name in _PREFILL_TENSORS), *output[2:])
    ctx.others = {name: given[name] for name in ("allow_neg_eigval", "scale", "qk_l2norm", "head_map", "state_layout",
                                                       "segments", "path")}
    rounds = inputs[len(_PREFILL_INPUTS):]  # of `prefill_saving`
    ctx.round_tokens = rounds[0] if rounds and rounds[0] is not None else _round_tokens(given["k"], given["v"])


def _prefill_autograd(ctx: Any, d_o: Optional[Tensor], d_final_state: Optional[Tensor],
                      *of_context: Any) -> Tuple[Optional[Tensor], ...]:
    saved, others = ctx.saved_tensors, ctx.others
    x, context = dict(zip(_PREFILL_TENSORS, saved)), (saved[len(_PREFILL_TENSORS):] or (None,))[0]
    needs = dict(zip(_PREFILL_INPUTS, ctx.needs_input_grad))
    raw = {"g": "a", "beta": "b"} if x["a"] is not None else {}
    sources = [raw.get(name, name) for name in _GRADIENTS.values()]
    # torch leaves out arguments at the end that were not given.
    wanted = [bool(needs.get(name)) and x[name] is not None for name in sources]
    if d_final_state is not None and d_final_state.numel() == 0:
        d_final_state = None  # the states were not returned
    if d_o is None and d_final_state is None:
        return (*(None for _ in _PREFILL_INPUTS), *(None for _ in of_context))
    if d_o is None:
        d_o = torch.zeros_like(x["v"])
    found = prefill_backward(
        d_o, d_final_state, x["q"], x["k"], x["v"], x["g"], x["beta"], x["a"], x["b"], x["a_log"], x["dt_bias"],
        others["allow_neg_eigval"], x["initial_state"], x["has_initial_state"], x["cu_seqlens"], others["scale"],
        others["qk_l2norm"], others["head_map"], others["state_layout"], wanted, others["segments"], others["path"],
        ctx.round_tokens, context)
    gradients = {name: d.to(x[name].dtype) for name, d, want in zip(sources, found, wanted) if want}
    return (*(gradients.get(name) for name in _PREFILL_INPUTS), *(None for _ in of_context))


getattr(prefill, "register_autograd")(_prefill_autograd, setup_context=_save_prefill)
prefill_saving.register_autograd(_prefill_autograd, setup_context=_save_prefill)


def prefill_parallel(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
                     a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
                     dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
                     initial_state: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
                     scale: Optional[float] = None, qk_l2norm: bool = False, head_map: str = "grouped",
                     state_layout: str = "key_major", *, lengths: Sequence[int], kind: str = "contiguous",
                     block: Optional[int] = None, group: Any = None, agree: str = "first") -> Tuple[Tensor, Tensor]:
    """`prefill` of sequences that the ranks of a process group of torch.distributed share. Every rank calls it, with its own
    rows, and the same `lengths`: tokens of each whole sequence. `deltawave.RankLayout` documents kind and block.

    q is `[T, HK, K]`, the rank's fragments in the order of the layout: see `rank_fragments`. Returns o, and states `[N, HV,
    K, V]` in f32, N fragments: the final state for a fragment with its sequence's last token, zeros for others.
    initial_state and has_initial_state are per fragment, too; those of fragments that do not begin a sequence are not
    read. Outputs and states have the same bits for any number of ranks and any kind, if the block is the same.

    group: a process group, None for the default one. Ranks are those within the group.

    Gradients flow to all inputs but has_initial_state, and have the same bits for any number of ranks and any kind, if the
    block is the same; those of a_log and dt_bias are sums over the rank's tokens, to be added up over ranks like those of
    other weights. Gradients of states of fragments that are zeros or not read are not used, and zeros. The backward has an
    all-gather: either all ranks, those without tokens too, require gradients and run it, in the same order, or none.

    agree: when the ranks compare their layouts and specs, in a collective of its own, before they send anything. "first": at
    the first use of a layout and spec in a group, which must be the first on all ranks; "always"; "never", for callers that
    know. Ranks that differ all raise RanksError, which names what differs."""
    choice("state_layout", state_layout, STATE_LAYOUTS)
    choice("agree", agree, AGREE)
    import torch.distributed as dist

    from .rank_gradients import PrefillFunction, Saved, gathered
    ranks = dist.get_world_size(group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _of_rank(name, x, 3)

    def launch() -> Tuple[Tensor, Tensor, Saved]:
        device = q.device
        layout = RankLayout(lengths, ranks, kind, block)
        spec = PrefillSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], _dtype_of("q", q), head_map, qk_l2norm, scale)
        with _dims_of(k, v):
            plan = _rank_plan(device, spec, layout, q.shape[0], group, agree)
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
        plan.finish(gathered(plan, summary, group, ranks), workspace, **tensors)
        return o, final_state, Saved(plan, group, ranks, allow_neg_eigval, state_layout)

    inputs = (q, k, v, g, beta, a, b, a_log, dt_bias, initial_state)
    _refuse_tangents("prefill_parallel", inputs)
    if needs_gradient(*inputs):
        results: Tuple[Tensor, Tensor] = PrefillFunction.apply(launch, has_initial_state, *inputs)
        return results
    o, final_state, _ = launch()
    return o, final_state


AGREE = {"first": 0, "always": 1, "never": 2}
# Layouts and specs that the ranks of a group have compared, the latest last. The value keeps the group, so that no other one
# gets its id.
_compared: "OrderedDict[Any, Any]" = OrderedDict()


def _rank_plan(device: torch.device, spec: PrefillSpec, layout: RankLayout, rows: int, group: Any,
               agree: str) -> ParallelPrefill:
    """The plan of this rank, once all ranks have compared theirs, if `agree` says so. A rank whose plan is refused tells the
    others, which would wait for it."""
    import torch.distributed as dist
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    of_group = dist.group.WORLD if group is None else group
    key = (id(of_group), layout, spec)
    compares = ranks > 1 and (agree == "always" or agree == "first" and key not in _compared)
    plan, problem, context = None, None, context_of(device)
    try:
        plan = _plan((ParallelPrefill, device, spec, layout, rank, rows),
                     lambda: ParallelPrefill(context, spec, layout, rank, rows))
    except Error as error:
        problem = error
    if compares:
        every: List[Any] = [None] * ranks
        dist.all_gather_object(every, (plan and plan.agreement(), problem and str(problem)), group=group)
        for other, (_, text) in enumerate(every):
            if text is not None and problem is None:
                raise RanksError(f"rank {other} refused its part: {text}")
        if plan is not None:
            plan.check_agreement([agreement for agreement, _ in every])
            _compared[key] = of_group
            while len(_compared) > 256:
                _compared.popitem(last=False)
    if plan is None:
        raise problem or Error("no plan")
    return plan


def conv_parallel(x: Tensor, weight: Tensor, bias: Optional[Tensor], key_heads: int, value_heads: int, key_dim: int,
                  value_dim: int, initial_state: Optional[Tensor] = None, activation: str = "silu", x_layout: str = "flat",
                  state_layout: str = "channel_major", qk_l2norm: bool = False, *, lengths: Sequence[int],
                  kind: str = "contiguous", block: Optional[int] = None, group: Any = None,
                  agree: str = "first") -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """`conv` of sequences that the ranks of a process group share, before `prefill_parallel`: x has the rows of the rank's
    fragments, in the same layout. Returns q, k, v, and the conv states after each fragment, `[N, channels, width - 1]` or
    with the last two exchanged; those of a fragment with its sequence's last token are final. initial_state: as those, zeros
    if it is absent; only fragments that begin a sequence read it. All outputs have one rank's bits.

    Each rank sends the last width - 1 rows of every fragment that another fragment follows. group, agree: as for
    `prefill_parallel`.

    Gradients flow to x, weight, bias and initial_state. Gradients of x have one rank's bits; those of
    weight and bias are sums over the rank's rows, to be added up over ranks. Gradients of states of fragments that do not end their
    sequence are not used. The backward has an all-reduce: either all ranks require gradients and run it, in the same order,
    or none."""
    choice("state_layout", state_layout, CONV_LAYOUTS)
    choice("agree", agree, AGREE)
    import torch.distributed as dist

    from .rank_gradients import ConvFunction, SavedConv
    ranks = dist.get_world_size(group)
    device, width, rows = _of_rank("x", x, 2).device, _of_rank("weight", weight, 2).shape[1], x.shape[0]
    heads = (key_heads, value_heads, key_dim, value_dim)
    inputs = (x, weight, bias, initial_state)
    _refuse_tangents("conv_parallel", inputs)
    differentiates = needs_gradient(*inputs)

    def launch() -> Tuple[Any, ...]:
        # Only the layout matters here: any plan for it says which rows lie where.
        spec = PrefillSpec(key_heads, value_heads, 16, 16, _dtype_of("x", x))
        layout = RankLayout(lengths, ranks, kind, block)
        plan = _rank_plan(device, spec, layout, rows, group, agree)
        ends = list(itertools.accumulate(tokens for _, _, tokens in plan.fragments))
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        tail = (channels, width - 1) if state_layout == "channel_major" else (width - 1, channels)
        states = empty((len(ends), *tail), x.dtype, device).zero_()
        if initial_state is not None:
            if initial_state.shape != states.shape:
                raise ArgumentError(f"initial_state: shape {list(initial_state.shape)}; it must be {list(states.shape)}")
            states.copy_(initial_state)

        def convolved(x: Tensor, ends: List[int], states: Tensor) -> Tuple[Tensor, ...]:
            offsets = torch.tensor([0, *ends], dtype=torch.int32)
            return conv(x, weight, bias, states, *heads, offsets, activation=activation, x_layout=x_layout,
                        state_layout=state_layout, qk_l2norm=qk_l2norm)

        if plan.tail_slots:
            # A convolution of the last rows alone leaves them in its states, in any layout of x.
            send = empty((plan.tail_slots, *tail), x.dtype, device).zero_()
            last = [row for (slot, _), end in zip(plan.tails, ends) if slot >= 0 for row in range(end - width + 1, end)]
            if last:
                of_tails = list(range(width - 1, len(last) + 1, width - 1))
                convolved(x[torch.tensor(last, device=device)], of_tails, send[:len(of_tails)])
            gathered = send
            if ranks > 1:
                gathered = empty((ranks * plan.tail_slots, *tail), x.dtype, device)
                dist.all_gather_into_tensor(gathered, send, group=group)
            for n, (_, slot) in enumerate(plan.tails):
                if slot >= 0:
                    states[n] = gathered[slot]
        before = states.clone() if differentiates else states
        left = [layout.lengths[n] - begin - tokens for n, begin, tokens in plan.fragments]
        saved = SavedConv(plan, group, ranks, before, left, heads, activation, x_layout, state_layout, qk_l2norm)
        if not ends:
            return (*conv_outputs(x, *heads, empty), states, saved)
        q, k, v = convolved(x, ends, states)
        return q, k, v, states, saved

    if differentiates:
        results: Tuple[Tensor, Tensor, Tensor, Tensor] = ConvFunction.apply(launch, *inputs)
        return results
    q, k, v, states, _ = launch()
    return q, k, v, states


def rank_fragments(lengths, ranks, rank, value_heads, kind="contiguous", block=None, device="cpu"):
    """Fragments of a rank, `(sequence, begin, tokens)`: the rows that it passes to `prefill_parallel`, in this order."""
    layout = RankLayout(lengths, ranks, kind, block)
    plan = ParallelPrefill(context_of(torch.device(device)), PrefillSpec(value_heads, value_heads, 16, 16), layout, rank,
                           sum(layout.lengths))
    return plan.fragments


@_operation("prefill_pool", mutates_args=("pool",), more=("snapshots",), instead="deltawave.ops.prefill")
def prefill_pool(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
                 write_slots: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
                 g: Optional[Tensor] = None, beta: Optional[Tensor] = None, a: Optional[Tensor] = None,
                 b: Optional[Tensor] = None, a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None,
                 allow_neg_eigval: bool = False, cu_seqlens: Optional[Tensor] = None, scale: Optional[float] = None,
                 qk_l2norm: bool = False, head_map: str = "grouped", pool_layout: str = "key_major",
                 snapshot_slots: Optional[Tensor] = None, segments: Optional[int] = None,
                 path: str = "auto", snapshot_layout: str = "key_major", null_slot: int = -1, *,
                 snapshots: Optional[Tensor] = None, out: Optional[Tensor] = None) -> Tensor:
    """Returns o of a `prefill` on a pool of states, which is updated in place. o is `out` if that is given.

    Snapshots go to the pool, or to the tensor `snapshots` `[slots, HV, K, V]`, f32, bf16 or fp16, in `snapshot_layout`.
    `null_slot` is the slot that means padding in slots and write_slots. If it is not -1 the op makes other slots: an
    engine better makes them once a step.
    """
    _rows(q, k, v)
    o = _output(out, tuple(v.shape), v.dtype, v.device)
    per_token = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b}
    others = {"a_log": a_log, "dt_bias": dt_bias, "slots": _without_null(null_slot, slots),
              "write_slots": _without_null(null_slot, write_slots), "has_initial_state": has_initial_state,
              "snapshot_slots": snapshot_slots}
    layouts = {"pool_layout": pool_layout, **({} if snapshots is None else {"snapshot_layout": snapshot_layout})}
    _launch_prefill((qk_l2norm, head_map, scale, segments, path), per_token, others,
                    {"o": o, "pool": pool, "snapshots": snapshots}, cu_seqlens, allow_neg_eigval=allow_neg_eigval,
                    **layouts)
    return o


@_fake(prefill_pool)
def _(q, k, v, pool, slots=None, write_slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None,
      dt_bias=None, allow_neg_eigval=False, cu_seqlens=None, scale=None, qk_l2norm=False, head_map="grouped",
      pool_layout="key_major", snapshot_slots=None, segments=None, path="auto", snapshot_layout="key_major",
      null_slot=-1):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@_operation("decode", mutates_args=("pool",), instead="deltawave.ops.prefill", repeats=True)
def decode(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
           write_slots: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None, g: Optional[Tensor] = None,
           beta: Optional[Tensor] = None, a: Optional[Tensor] = None, b: Optional[Tensor] = None,
           a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
           scale: Optional[float] = None, qk_l2norm: bool = False, head_map: str = "grouped",
           pool_layout: str = "key_major", null_slot: int = -1, *, out: Optional[Tensor] = None) -> Tensor:
    """Returns o of the next tokens of every sequence, and updates the pool in place. o is `out` if that is given.
    `deltawave.Decode` documents the arguments. q is `[B, HK, K]`, one token of each sequence, or `[B, T, HK, K]`.
    null_slot: as for `prefill_pool`."""
    _rows(q, k, v)
    o = _output(out, tuple(v.shape), v.dtype, v.device)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
              "slots": _without_null(null_slot, slots), "write_slots": _without_null(null_slot, write_slots),
              "has_initial_state": has_initial_state}
    _launch_decode((head_map, qk_l2norm, scale), inputs, {"o": o, "pool": pool}, pool_layout=pool_layout,
                   allow_neg_eigval=allow_neg_eigval)
    return o


def _launch_decode(options: Tuple[Any, ...], inputs: Dict[str, Any], written: Dict[str, Any], **others: Any) -> None:
    """Launches a decode, which reads `inputs` and writes `written`."""
    q, k, v = (inputs[name] for name in "qkv")
    device, tokens = q.device, q.shape[1] if q.dim() == 4 else 1
    head_map, qk_l2norm, scale = options
    spec = DecodeSpec(k.shape[-2], v.shape[-2], k.shape[-1], v.shape[-1], _dtype_of("q", q), head_map, qk_l2norm, scale,
                      tokens)
    with _OfShapes(**_dims_of(k, v).sources, tokens=("q", q), batch=("q", q)):
        plan = _decode_plan(device, spec, q.shape[0])
    reached, outputs = _all_reachable(inputs, device), _all_reachable(written, device)
    plan.launch(**reached, **outputs, **others)
    _copied_back(written, outputs)


def _decode_plan(device: torch.device, spec: DecodeSpec, batch: int) -> Decode:
    return _plan((Decode, device, spec, batch), lambda: Decode(context_of(device), spec, batch))


@_fake(decode)
def _(q, k, v, pool, slots=None, write_slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None,
      dt_bias=None, allow_neg_eigval=False, scale=None, qk_l2norm=False, head_map="grouped", pool_layout="key_major",
      null_slot=-1):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def verify(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
           has_initial_state: Optional[Tensor] = None, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
           a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
           dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False, scale: Optional[float] = None,
           qk_l2norm: bool = False, head_map: str = "grouped", pool_layout: str = "key_major", null_slot: int = -1, *,
           out: Optional[Tensor] = None, states: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """Verifies drafts. Returns o as `decode` does, and the states after every token for `commit`: `[B, T, HV, K, V]` in the
    layout and dtype of the pool. The pool is not written. q is `[B, T, HK, K]`. States of padding are uninitialised.
    Writes `out` and `states`, f32, bf16 or fp16 with T states of a sequence one after the other, if they are given."""
    inputs = (q, k, v, pool, slots, has_initial_state, g, beta, a, b, a_log, dt_bias, allow_neg_eigval, scale, qk_l2norm,
              head_map, pool_layout, null_slot)
    if needs_gradient(*inputs):
        written = out if states is None else states
        return _refuses_backward("verify", "deltawave.ops.prefill", written, lambda: _verify(*inputs), inputs)
    if out is None and states is None:
        return _verify(*inputs)
    o = _fake_empty(v.shape, v.dtype, v.device) if out is None else out
    after = _fake_empty(verify_states(q, pool), pool.dtype, v.device) if states is None else states
    _verify_out(o, after, *inputs)
    return o, after


@custom_op("deltawave::verify", mutates_args=(), repeats=True)
def _verify(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
            has_initial_state: Optional[Tensor] = None, g: Optional[Tensor] = None, beta: Optional[Tensor] = None,
            a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
            dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False, scale: Optional[float] = None,
            qk_l2norm: bool = False, head_map: str = "grouped", pool_layout: str = "key_major",
            null_slot: int = -1) -> Tuple[Tensor, Tensor]:
    _rows(q, k, v)
    o, states = verify_outputs(q, v, pool, empty)
    _launch_verify(o, states, q, k, v, pool, slots, has_initial_state, g, beta, a, b, a_log, dt_bias, allow_neg_eigval,
                   scale, qk_l2norm, head_map, pool_layout, null_slot)
    return o, states


@custom_op("deltawave::verify_out", mutates_args=("out", "states"), repeats=True)
def _verify_out(out: Tensor, states: Tensor, q: Tensor, k: Tensor, v: Tensor, pool: Tensor,
                slots: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None, g: Optional[Tensor] = None,
                beta: Optional[Tensor] = None, a: Optional[Tensor] = None, b: Optional[Tensor] = None,
                a_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False,
                scale: Optional[float] = None, qk_l2norm: bool = False, head_map: str = "grouped",
                pool_layout: str = "key_major", null_slot: int = -1) -> None:
    _launch_verify(out, states, q, k, v, pool, slots, has_initial_state, g, beta, a, b, a_log, dt_bias, allow_neg_eigval,
                   scale, qk_l2norm, head_map, pool_layout, null_slot)


def _launch_verify(out: Tensor, states: Tensor, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Optional[Tensor],
                   has_initial_state: Optional[Tensor], g: Optional[Tensor], beta: Optional[Tensor],
                   a: Optional[Tensor], b: Optional[Tensor], a_log: Optional[Tensor], dt_bias: Optional[Tensor],
                   allow_neg_eigval: bool, scale: Optional[float], qk_l2norm: bool, head_map: str, pool_layout: str,
                   null_slot: int) -> None:
    _rows(q, k, v)
    o = _output(out, tuple(v.shape), v.dtype, v.device)
    shape = verify_states(q, pool)
    if tuple(states.shape) != shape or shape[1] > 1 and states.stride()[0] != shape[1] * states.stride()[1]:
        allowed = f"it must be {list(shape)}, with the states of a sequence one after the other"
        raise ArgumentError(f"states: shape {list(states.shape)}, strides {list(states.stride())}; {allowed}")
    each = states.flatten(0, 1) if shape[1] > 1 else states.squeeze(1)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
              "slots": _without_null(null_slot, slots), "has_initial_state": has_initial_state, "pool": pool}
    _launch_decode((head_map, qk_l2norm, scale), inputs, {"o": o, "states": each}, pool_layout=pool_layout,
                   allow_neg_eigval=allow_neg_eigval)


def verify_states(q: Tensor, pool: Tensor) -> Tuple[int, ...]:
    """Shape of the states of `verify`."""
    tokens = q.shape[1] if _of_rank("q", q, 3, 4).dim() == 4 else 1
    _of_rank("pool", pool, 4)
    return (q.shape[0], tokens, *pool.shape[1:])


def verify_outputs(q: Tensor, v: Tensor, pool: Tensor, make: Callable[..., Tensor]) -> Tuple[Tensor, Tensor]:
    """Uninitialised outputs of `verify`."""
    shape = verify_states(q, pool)
    return make(tuple(v.shape), v.dtype, device=v.device), make(shape, pool.dtype, device=v.device)


@_verify.register_fake
def _(q, k, v, pool, slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None, dt_bias=None,
      allow_neg_eigval=False, scale=None, qk_l2norm=False, head_map="grouped", pool_layout="key_major", null_slot=-1):
    return verify_outputs(q, v, pool, _fake_empty)


@_verify_out.register_fake
def _(out, states, q, k, v, pool, slots=None, has_initial_state=None, g=None, beta=None, a=None, b=None, a_log=None,
      dt_bias=None, allow_neg_eigval=False, scale=None, qk_l2norm=False, head_map="grouped", pool_layout="key_major",
      null_slot=-1):
    return None


def commit(accepted: Tensor, states: Tensor, pool: Tensor, slots: Optional[Tensor] = None,
           conv_state: Optional[Tensor] = None, x: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None,
           pool_layout: str = "key_major", x_layout: str = "flat", conv_layout: str = "channel_major") -> None:
    """Commits the first accepted[n] tokens of each sequence n: moves the state after the last of them from `states`, made
    by `verify`, to the pool. With conv_state, also moves their columns from the rows x `[B T, columns]` of a `conv` with
    `keep_states`. accepted is `[B]` i32."""
    _commit(accepted, states, pool, slots, conv_state, x, has_initial_state, pool_layout, x_layout, conv_layout)


# conv_state has no default here: torch drops trailing arguments that equal their defaults before it looks for mutated ones.
@custom_op("deltawave::commit", mutates_args=("pool", "conv_state"))
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
    _copied_back(written, reached)


@_commit.register_fake
def _(accepted, states, pool, slots, conv_state, x=None, has_initial_state=None, pool_layout="key_major",
      x_layout="flat", conv_layout="channel_major"):
    return None


def conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Optional[Tensor], key_heads: int, value_heads: int,
         key_dim: int, value_dim: int, cu_seqlens: Optional[Tensor] = None, slots: Optional[Tensor] = None,
         has_initial_state: Optional[Tensor] = None, activation: str = "silu", x_layout: str = "flat",
         state_layout: str = "channel_major", keep_states: bool = False, qk_l2norm: bool = False, null_slot: int = -1, *,
         a: Optional[Tensor] = None, b: Optional[Tensor] = None, a_log: Optional[Tensor] = None,
         dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False) -> Tuple[Tensor, ...]:
    """Returns q, k and v of packed rows x `[T, columns]`. Updates the pool `state` in place, except with `keep_states`.
    `deltawave.Conv` documents the arguments. Without cu_seqlens x is one sequence. Without a state, gradients flow to x, weight,
    bias, a, b, a_log and dt_bias. With a, b and a_log the same launch
    computes g and beta `[T, HV]`, f32, which are returned after v. null_slot: as for `prefill_pool`."""
    inputs = (x, weight, bias, state, key_heads, value_heads, key_dim, value_dim)
    rest = (cu_seqlens, slots, has_initial_state, activation, x_layout, state_layout, keep_states, qk_l2norm, null_slot)
    gates = (a, b, a_log, dt_bias)
    if a is None and b is None and a_log is None:
        if dt_bias is not None or allow_neg_eigval:
            name = "dt_bias" if dt_bias is not None else "allow_neg_eigval"
            raise ArgumentError(f"{name}: given without gates; it must come with a, b and a_log")
    for name, given in (("a", a), ("b", b), ("a_log", a_log)):
        if given is None and (a is not None or b is not None or a_log is not None):
            raise ArgumentError(f"{name}: None; gates need a, b and a_log")

    def launch() -> Tuple[Tensor, ...]:
        return _conv(*inputs, *rest) if a is None else _conv_gates(*inputs, *gates, allow_neg_eigval, *rest)

    if state is None and (slots is not None or has_initial_state is not None):
        name = "slots" if slots is not None else "has_initial_state"
        raise ArgumentError(f"{name}: given without a state; it must be absent")
    if state is None and needs_gradient(*inputs, *gates):
        if a is not None and b is not None and a_log is not None:
            for name, t, wanted in (("a", a, (x.shape[0], value_heads)), ("b", b, (x.shape[0], value_heads)),
                                    ("a_log", a_log, (value_heads,)), ("dt_bias", dt_bias, (value_heads,))):
                if t is not None and tuple(t.shape) != wanted:
                    raise ArgumentError(f"{name}: shape {list(t.shape)}; it must be {list(wanted)}")
        made = _conv_rows(x, weight, bias, key_heads, value_heads, key_dim, value_dim, cu_seqlens, activation, x_layout,
                          state_layout, qk_l2norm)
        return made if a is None else (*made, *gate(a, b, a_log, dt_bias, allow_neg_eigval))
    return _refuses_backward("conv", "deltawave.ops.conv without a state", None, launch, (*inputs, *gates))


@custom_op("deltawave::conv", mutates_args=("state",))
def _conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Optional[Tensor], key_heads: int, value_heads: int,
          key_dim: int, value_dim: int, cu_seqlens: Optional[Tensor] = None, slots: Optional[Tensor] = None,
          has_initial_state: Optional[Tensor] = None, activation: str = "silu", x_layout: str = "flat",
          state_layout: str = "channel_major", keep_states: bool = False, qk_l2norm: bool = False,
          null_slot: int = -1) -> Tuple[Tensor, Tensor, Tensor]:
    heads = (key_heads, value_heads, key_dim, value_dim)
    outputs: Dict[str, Tensor] = {}

    def make() -> Dict[str, Tensor]:
        outputs.update(zip("qkv", conv_outputs(x, *heads, empty)))
        return outputs

    launch_conv(x, weight, bias, state, heads, make, {}, cu_seqlens, slots, has_initial_state, activation, x_layout,
                state_layout, keep_states, qk_l2norm, null_slot)
    return outputs["q"], outputs["k"], outputs["v"]


@custom_op("deltawave::conv_gates", mutates_args=("state",))
def _conv_gates(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Optional[Tensor], key_heads: int,
                value_heads: int, key_dim: int, value_dim: int, a: Tensor, b: Tensor, a_log: Tensor,
                dt_bias: Optional[Tensor] = None, allow_neg_eigval: bool = False, cu_seqlens: Optional[Tensor] = None,
                slots: Optional[Tensor] = None, has_initial_state: Optional[Tensor] = None, activation: str = "silu",
                x_layout: str = "flat", state_layout: str = "channel_major", keep_states: bool = False,
                qk_l2norm: bool = False, null_slot: int = -1) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = (key_heads, value_heads, key_dim, value_dim)
    outputs: Dict[str, Tensor] = {}

    def make() -> Dict[str, Tensor]:
        outputs.update(zip("qkv", conv_outputs(x, *heads, empty)))
        outputs.update({name: empty((x.shape[0], value_heads), torch.float32, x.device) for name in ("g", "beta")})
        return outputs

    gates = {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias, "allow_neg_eigval": allow_neg_eigval}
    launch_conv(x, weight, bias, state, heads, make, gates, cu_seqlens, slots, has_initial_state, activation, x_layout,
                state_layout, keep_states, qk_l2norm, null_slot)
    return outputs["q"], outputs["k"], outputs["v"], outputs["g"], outputs["beta"]


def launch_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Optional[Tensor],
                heads: Tuple[int, int, int, int], make: Callable[[], Dict[str, Tensor]], gates: Dict[str, Any],
                cu_seqlens: Union[Tensor, Tuple[int, ...], None] = None, slots: Optional[Tensor] = None,
                has_initial_state: Optional[Tensor] = None, activation: str = "silu", x_layout: str = "flat",
                state_layout: str = "channel_major", keep_states: bool = False, qk_l2norm: bool = False,
                null_slot: int = -1) -> None:
    """Launches a convolution that writes the tensors of `make`: q, k and v, with gates g and beta too, of any strides
    between rows. `heads`: HK, HV, K, V. No custom op: for functions that are inside one."""
    device, tokens, width = x.device, _of_rank("x", x, 2).shape[0], _of_rank("weight", weight, 2).shape[1]
    spec = ConvSpec(*heads, width, _dtype_of("x", x), activation, keep_states, qk_l2norm)
    with _OfShapes(width=("weight", weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Conv, spec, tokens, cu_seqlens, device)
    numbers = {name: gates[name] for name in gates if name == "allow_neg_eigval"}
    inputs = {"x": x, "weight": weight, "bias": bias, "slots": _without_null(null_slot, slots),
              "has_initial_state": has_initial_state, **{name: t for name, t in gates.items() if name not in numbers}}
    written: Dict[str, Optional[Tensor]] = {"state": state, **make()}
    reached = _all_reachable(written, device)
    plan.launch(**_all_reachable(inputs, device), **lengths, **reached, **numbers, x_layout=x_layout,
                state_layout=state_layout)
    _copied_back({name: t for name, t in written.items() if name != "state" or not keep_states}, reached)


def conv_outputs(x: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int,
                 make: Callable[..., Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """Uninitialised outputs of a convolution."""
    _of_rank("x", x, 2)
    heads = ((key_heads, key_dim), (key_heads, key_dim), (value_heads, value_dim))
    q, k, v = (make((x.shape[0], *shape), x.dtype, device=x.device) for shape in heads)
    return q, k, v


@_conv.register_fake
def _(x, weight, bias, state, key_heads, value_heads, key_dim, value_dim, cu_seqlens=None, slots=None,
      has_initial_state=None, activation="silu", x_layout="flat", state_layout="channel_major", keep_states=False,
      qk_l2norm=False, null_slot=-1):
    return conv_outputs(x, key_heads, value_heads, key_dim, value_dim, _fake_empty)


@_conv_gates.register_fake
def _(x, weight, bias, state, key_heads, value_heads, key_dim, value_dim, a, b, a_log, dt_bias=None,
      allow_neg_eigval=False, cu_seqlens=None, slots=None, has_initial_state=None, activation="silu", x_layout="flat",
      state_layout="channel_major", keep_states=False, qk_l2norm=False, null_slot=-1):
    gates = (torch.empty((x.shape[0], value_heads), dtype=torch.float32, device=x.device) for _ in range(2))
    return (*conv_outputs(x, key_heads, value_heads, key_dim, value_dim, _fake_empty), *gates)


@custom_op("deltawave::conv_backward", mutates_args=())
def conv_backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, d_final_state: Optional[Tensor], x: Tensor, weight: Tensor,
                  bias: Optional[Tensor], initial_state: Optional[Tensor], has_initial_state: Optional[Tensor],
                  key_heads: int, value_heads: int, key_dim: int, value_dim: int, cu_seqlens: Optional[Tensor],
                  activation: str, x_layout: str, state_layout: str, qk_l2norm: bool, wanted: List[bool]) -> List[Tensor]:
    """Returns the gradients of x, weight, bias and initial_state of a convolution, of which `wanted` says which are computed;
    the others are empty. Those of weight and bias are f32. Columns of x that are not of q, k and v have the gradient 0.
    initial_state `[N, channels, columns]` is a copy of what the convolution read. `deltawave.ConvBackward` documents the
    arguments."""
    device, width = x.device, _of_rank("weight", weight, 2).shape[1]
    found = conv_gradients(x, weight, initial_state, d_final_state, wanted, empty)
    channels = weight.shape[0]
    if wanted[0] and x.shape[-1] != channels:
        found[0].zero_()
    spec = ConvSpec(key_heads, value_heads, key_dim, value_dim, width, _dtype_of("x", x), activation, False, qk_l2norm)
    with _OfShapes(width=("weight", weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Conv, spec, _of_rank("x", x, 2).shape[0], cu_seqlens, device)
    backward = _plan((ConvBackward, plan), lambda: ConvBackward(plan))
    names = ("d_x", "d_weight", "d_bias", "d_initial_state")
    outputs = {name: t for name, t, want in zip(names, found, wanted) if want}
    given = {"d_q": _dense_rows(d_q), "d_k": _dense_rows(d_k), "d_v": _dense_rows(d_v), "d_final_state": d_final_state}
    tensors = _all_reachable({"x": x, "weight": weight, "bias": bias, "initial_state": initial_state,
                              "has_initial_state": has_initial_state, **given, **outputs}, device)
    backward.launch(**tensors, **lengths, x_layout=x_layout, initial_layout=state_layout, d_final_layout=state_layout,
                    d_initial_layout=state_layout, workspace=_workspace(backward.workspace_bytes, device))
    return found


@custom_op("deltawave::conv_rows", mutates_args=())
def _conv_rows(x: Tensor, weight: Tensor, bias: Optional[Tensor], key_heads: int, value_heads: int, key_dim: int,
               value_dim: int, cu_seqlens: Optional[Tensor], activation: str, x_layout: str, state_layout: str,
               qk_l2norm: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """`conv` of sequences that start from zeros and leave no states: the op that autograd differentiates."""
    heads = (key_heads, value_heads, key_dim, value_dim)
    outputs = dict(zip("qkv", conv_outputs(x, *heads, empty)))
    launch_conv(x, weight, bias, None, heads, lambda: outputs, {}, cu_seqlens, None, None, activation, x_layout, state_layout,
                False, qk_l2norm)
    return outputs["q"], outputs["k"], outputs["v"]


@_conv_rows.register_fake
def _(x, weight, bias, key_heads, value_heads, key_dim, value_dim, cu_seqlens, activation, x_layout, state_layout, qk_l2norm):
    return conv_outputs(x, key_heads, value_heads, key_dim, value_dim, _fake_empty)


def conv_gradients(x: Tensor, weight: Tensor, initial_state: Optional[Tensor], d_final_state: Optional[Tensor],
                   wanted: List[bool], make: Callable[..., Tensor]) -> List[Tensor]:
    """Uninitialised gradients of a convolution. Those that are not wanted have no elements."""
    state = initial_state if initial_state is not None else d_final_state
    shapes = (tuple(x.shape), tuple(weight.shape), (weight.shape[0],), (0,) if state is None else tuple(state.shape))
    types = (x.dtype, torch.float32, torch.float32, x.dtype)
    return [make(shape if want else (0,), dtype, device=x.device) for shape, dtype, want in zip(shapes, types, wanted)]


@conv_backward.register_fake
def _(d_q, d_k, d_v, d_final_state, x, weight, bias, initial_state, has_initial_state, key_heads, value_heads, key_dim,
      value_dim, cu_seqlens, activation, x_layout, state_layout, qk_l2norm, wanted):
    return conv_gradients(x, weight, initial_state, d_final_state, wanted, _fake_empty)


def _save_conv(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], inputs[7])
    ctx.heads, ctx.others = inputs[3:7], inputs[8:]


def _conv_autograd(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Tuple[Optional[Tensor], ...]:
    *x, cu_seqlens = ctx.saved_tensors
    wanted = _needed(ctx, x)
    found = conv_backward(d_q, d_k, d_v, None, *x, None, None, *ctx.heads, cu_seqlens, *ctx.others, [*wanted, False])
    return (*_cast(found, x, wanted), *(None for _ in range(9)))


conv_backward.register_autograd(_no_second_order("conv"), setup_context=_save_nothing)
_conv_rows.register_autograd(_conv_autograd, setup_context=_save_conv)


def _has_heads(name: str, x: Tensor, trailing: int) -> Tensor:
    """Refuses a tensor with fewer than `trailing` dimensions, or with a 0 among the last `trailing`."""
    if x.dim() < trailing or 0 in x.shape[-trailing:]:
        allowed = ("[..., HV]", "[..., HV, V]")[trailing - 1]
        raise ArgumentError(f"{name}: shape {list(x.shape)}; it must be {allowed}, neither of them 0")
    return x


def _of_heads(name: str, x: Tensor, heads: int) -> Tensor:
    """A tensor `[..., heads]` viewed as `[rows, heads]`."""
    if x.dim() < 1 or x.shape[-1] != heads:
        raise ArgumentError(f"{name}: shape {list(x.shape)}; its last dimension must be {heads} heads, as of a")
    return x.reshape(-1, heads)


@custom_op("deltawave::gate", mutates_args=())
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


@custom_op("deltawave::gate_backward", mutates_args=())
def gate_backward(d_g: Optional[Tensor], d_beta: Optional[Tensor], a: Tensor, b: Tensor, a_log: Tensor,
                  dt_bias: Optional[Tensor], allow_neg_eigval: bool, wanted: List[bool]) -> List[Tensor]:
    """Returns the gradients of a, b, a_log and dt_bias, of which `wanted` says which are computed; the others are empty.
    Those of a and b have the type of their input, the others are f32. d_g and d_beta: None is 0."""
    device, heads = _has_heads("a", a, 1).device, a.shape[-1]
    found = gate_gradients(a, b, a_log, wanted, empty)
    rows = a.reshape(-1, heads)
    inputs = {"a": rows, "b": _of_heads("b", b, heads), "a_log": a_log, "dt_bias": dt_bias,
              "d_g": None if d_g is None else _of_heads("d_g", d_g, heads).float(),
              "d_beta": None if d_beta is None else _of_heads("d_beta", d_beta, heads).float()}
    names = ("d_a", "d_b", "d_a_log", "d_dt_bias")
    outputs = {name: t if name.endswith(("log", "bias")) else t.view(-1, heads)
               for name, t, want in zip(names, found, wanted) if want}
    context = context_of(device)
    size = gate_backward_workspace_bytes(context, rows.shape[0], heads)
    launch_gate_backward(context, **_all_reachable({**inputs, **outputs}, device), allow_neg_eigval=allow_neg_eigval,
                         workspace=_workspace(size, device))
    return found


def gate_gradients(a: Tensor, b: Tensor, a_log: Tensor, wanted: List[bool], make: Callable[..., Tensor]) -> List[Tensor]:
    """Uninitialised gradients of gates. Those that are not wanted have no elements."""
    sources = ((a, a.dtype), (b, b.dtype), (a_log, torch.float32), (a_log, torch.float32))
    return [make(tuple(x.shape) if want else (0,), dtype, device=a.device) for (x, dtype), want in zip(sources, wanted)]


@gate_backward.register_fake
def _(d_g, d_beta, a, b, a_log, dt_bias, allow_neg_eigval, wanted):
    return gate_gradients(a, b, a_log, wanted, _fake_empty)


def _save_gate(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4])
    ctx.allow_neg_eigval = inputs[4]


def _gate_autograd(ctx: Any, d_g: Optional[Tensor], d_beta: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    x = ctx.saved_tensors
    wanted = _needed(ctx, x)
    if d_g is None:
        wanted = [False, wanted[1], False, False]
    return (*_cast(gate_backward(d_g, d_beta, *x, ctx.allow_neg_eigval, wanted), x, wanted), None)


gate_backward.register_autograd(_no_second_order("gate"), setup_context=_save_nothing)
gate.register_autograd(_gate_autograd, setup_context=_save_gate)


@_operation("norm", repeats=True)
def norm(x: Tensor, z: Tensor, weight: Optional[Tensor] = None, eps: float = 1e-6, gate: str = "silu", *,
         out: Optional[Tensor] = None) -> Tensor:
    """Returns the gated RMS norm of x `[..., HV, V]`, in its shape: `out` if that is given, which must be dense.
    `deltawave.norm` documents the arguments."""
    device, shape = _has_heads("x", x, 2).device, x.shape
    _dtype_of("x", x)
    _has_heads("z", z, 2)
    y = _output(out, tuple(shape), x.dtype, device)
    if not arrays.describe("out", y).is_dense():
        raise ArgumentError(f"out: strides {list(y.stride())}; it must be dense")
    inputs = {"x": x.reshape(-1, *shape[-2:]), "z": z.reshape(-1, *z.shape[-2:]), "weight": weight}
    written: Dict[str, Optional[Tensor]] = {"y": y.view(-1, *shape[-2:])}
    reached = _all_reachable(written, device)
    with _OfShapes(y=("x", x)):
        launch_norm(context_of(device), **_all_reachable(inputs, device), **reached, eps=eps, gate=gate)
    _copied_back(written, reached)
    return y


@_fake(norm)
def _(x, z, weight=None, eps=1e-6, gate="silu"):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@custom_op("deltawave::norm_backward", mutates_args=())
def norm_backward(d_y: Tensor, x: Tensor, z: Tensor, weight: Optional[Tensor], eps: float, gate: str,
                  wanted: List[bool]) -> List[Tensor]:
    """Returns the gradients of x, z and weight of a gated norm, of which `wanted` says which are computed; the others are
    empty. That of weight is f32. x is what the norm read: a norm in place has no gradients."""
    device, shape = _has_heads("x", x, 2).device, x.shape
    _dtype_of("x", x)
    _has_heads("z", z, 2)
    found = norm_gradients(x, z, wanted, empty)
    inputs = {"x": x.reshape(-1, *shape[-2:]), "z": z.reshape(-1, *z.shape[-2:]), "weight": weight,
              "d_y": _dense_rows(d_y).reshape(-1, *d_y.shape[-2:])}
    views = {"d_x": found[0].view(-1, *shape[-2:]) if wanted[0] else None,
             "d_z": found[1].view(-1, *z.shape[-2:]) if wanted[1] else None, "d_weight": found[2] if wanted[2] else None}
    context = context_of(device)
    size = norm_backward_workspace_bytes(context, inputs["x"].shape[0], *shape[-2:])
    launch_norm_backward(context, **_all_reachable({**inputs, **views}, device), eps=eps, gate=gate,
                         workspace=_workspace(size, device))
    return found


def norm_gradients(x: Tensor, z: Tensor, wanted: List[bool], make: Callable[..., Tensor]) -> List[Tensor]:
    """Uninitialised gradients of a gated norm. Those that are not wanted have no elements."""
    shapes = ((tuple(x.shape), x.dtype), (tuple(z.shape), x.dtype), ((x.shape[-1],), torch.float32))
    return [make(shape if want else (0,), dtype, device=x.device) for (shape, dtype), want in zip(shapes, wanted)]


@norm_backward.register_fake
def _(d_y, x, z, weight, eps, gate, wanted):
    return norm_gradients(x, z, wanted, _fake_empty)


def _save_norm(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.others = inputs[3:]


def _norm_autograd(ctx: Any, d_y: Tensor) -> Tuple[Optional[Tensor], ...]:
    x = ctx.saved_tensors
    wanted = _needed(ctx, x)
    return (*_cast(norm_backward(d_y, *x, *ctx.others, wanted), x, wanted), None, None)


norm_backward.register_autograd(_no_second_order("norm"), setup_context=_save_nothing)
getattr(norm, "register_autograd")(_norm_autograd, setup_context=_save_norm)


@_operation("layer", mutates_args=("conv_state", "pool"), instead="deltawave.training.gated_delta_net", repeats=True)
def layer(x: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, pool: Tensor, conv_weight: Tensor, a_log: Tensor,
          key_heads: int, value_heads: int, key_dim: int, value_dim: int, z: Optional[Tensor] = None,
          conv_bias: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, norm_weight: Optional[Tensor] = None,
          cu_seqlens: Optional[Tensor] = None, decodes: int = 0, slots: Optional[Tensor] = None,
          has_initial_state: Optional[Tensor] = None, eps: float = 1e-6, gate: str = "silu", qk_l2norm: bool = True,
          allow_neg_eigval: bool = False, scale: Optional[float] = None, head_map: str = "grouped", x_layout: str = "flat",
          conv_layout: str = "channel_major", pool_layout: str = "key_major", segments: Optional[int] = None,
          path: str = "auto", null_slot: int = -1, *, out: Optional[Tensor] = None) -> Tensor:
    """Returns y `[T, HV, V]` of packed rows x `[T, columns]`, and updates both pools in place. y is `out` if that is given.
    The first `decodes` rows are sequences of one token each. `deltawave.Layer` documents the arguments. Without cu_seqlens
    the rows after the decodes are one sequence. null_slot: as for `prefill_pool`."""
    device, width = _of_rank("x", x, 2, 3).device, _of_rank("conv_weight", conv_weight, 2).shape[1]
    spec = LayerSpec(key_heads, value_heads, key_dim, value_dim, _dtype_of("x", x), head_map, width, qk_l2norm, scale,
                     allow_neg_eigval, eps, gate, segments, path)
    with _OfShapes(width=("conv_weight", conv_weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Layer, spec, x.shape[0], cu_seqlens, device, (decodes,))
    y = _output(out, (x.shape[0], value_heads, value_dim), x.dtype, device)
    written: Dict[str, Optional[Tensor]] = {"conv_state": conv_state, "pool": pool, "y": y}
    inputs = {"x": x, "z": z, "a": a, "b": b, "conv_weight": conv_weight, "conv_bias": conv_bias, "a_log": a_log,
              "dt_bias": dt_bias, "norm_weight": norm_weight, "slots": _without_null(null_slot, slots),
              "has_initial_state": has_initial_state}
    reached = _all_reachable(written, device)
    plan.launch(**_all_reachable(inputs, device), **reached, **lengths, x_layout=x_layout, conv_layout=conv_layout,
                pool_layout=pool_layout, workspace=_workspace(plan.workspace_bytes, device))
    _copied_back(written, reached)
    return y


@_fake(layer)
def _(x, a, b, conv_state, pool, conv_weight, a_log, key_heads, value_heads, key_dim, value_dim, z=None, conv_bias=None,
      dt_bias=None, norm_weight=None, cu_seqlens=None, decodes=0, slots=None, has_initial_state=None, eps=1e-6, gate="silu",
      qk_l2norm=True, allow_neg_eigval=False, scale=None, head_map="grouped", x_layout="flat",
      conv_layout="channel_major", pool_layout="key_major", segments=None, path="auto", null_slot=-1):
    return torch.empty((x.shape[0], value_heads, value_dim), dtype=x.dtype, device=x.device)


# Gradients of `layer_backward`, in order.
_LAYER_GRADIENTS = ("d_x", "d_z", "d_a", "d_b", "d_conv_weight", "d_conv_bias", "d_a_log", "d_dt_bias", "d_norm_weight",
                    "d_initial_conv_state", "d_initial_state")


@custom_op("deltawave::layer_forward", mutates_args=())
def layer_forward(x: Tensor, a: Tensor, b: Tensor, conv_weight: Tensor, a_log: Tensor, key_heads: int, value_heads: int,
                  key_dim: int, value_dim: int, z: Optional[Tensor], conv_bias: Optional[Tensor],
                  dt_bias: Optional[Tensor], norm_weight: Optional[Tensor], initial_conv_state: Optional[Tensor],
                  initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor], eps: float, gate: str, qk_l2norm: bool,
                  allow_neg_eigval: bool, scale: Optional[float], head_map: str, x_layout: str
                  ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """A layer without pools, for training: returns y and o `[T, HV, V]`, and the states after the batch, conv states
    `[N, channels, width - 1]` in the type of x and recurrent ones `[N, HV, K, V]` in f32. Initial states have these shapes;
    None: zeros. It differentiates: by all tensors but cu_seqlens, from y and both states. Autograd keeps the inputs and o, which
    has no gradient of its own."""
    device, width = x.device, _of_rank("conv_weight", conv_weight, 2).shape[1]
    spec = LayerSpec(key_heads, value_heads, key_dim, value_dim, _dtype_of("x", x), head_map, width, qk_l2norm, scale,
                     allow_neg_eigval, eps, gate)
    with _OfShapes(width=("conv_weight", conv_weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Layer, spec, x.shape[0], cu_seqlens, device, (0,))
    y, o, conv_state, pool = layer_outputs(x, conv_weight, value_heads, key_dim, value_dim, cu_seqlens, empty)
    for name, given, to in (("initial_conv_state", initial_conv_state, conv_state), ("initial_state", initial_state, pool)):
        if given is None:
            to.zero_()
        elif given.shape != to.shape:
            raise ArgumentError(f"{name}: shape {list(given.shape)}; it must be {list(to.shape)}")
        else:
            to.copy_(given)
    inputs = {"x": x, "z": z, "a": a, "b": b, "conv_weight": conv_weight, "conv_bias": conv_bias, "a_log": a_log,
              "dt_bias": dt_bias, "norm_weight": norm_weight}
    plan.launch(**_all_reachable(inputs, device), y=y, o=o, conv_state=conv_state, pool=pool, **lengths, x_layout=x_layout,
                workspace=_workspace(plan.workspace_bytes, device))
    return y, o, conv_state, pool


def layer_outputs(x: Tensor, conv_weight: Tensor, value_heads: int, key_dim: int, value_dim: int,
                  cu_seqlens: Optional[Tensor], make: Callable[..., Tensor]) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of `layer_forward`."""
    sequences = 1 if cu_seqlens is None else _sequences_of(cu_seqlens)
    rows = (x.shape[0], value_heads, value_dim)
    channels, width = conv_weight.shape
    return (make(rows, x.dtype, device=x.device), make(rows, x.dtype, device=x.device),
            make((sequences, channels, width - 1), x.dtype, device=x.device),
            make((sequences, value_heads, key_dim, value_dim), torch.float32, device=x.device))


@layer_forward.register_fake
def _(x, a, b, conv_weight, a_log, key_heads, value_heads, key_dim, value_dim, z, conv_bias, dt_bias, norm_weight,
      initial_conv_state, initial_state, cu_seqlens, eps, gate, qk_l2norm, allow_neg_eigval, scale, head_map, x_layout):
    return layer_outputs(x, conv_weight, value_heads, key_dim, value_dim, cu_seqlens, _fake_empty)


@custom_op("deltawave::layer_backward", mutates_args=())
def layer_backward(d_y: Tensor, d_final_conv_state: Optional[Tensor], d_final_state: Optional[Tensor], o: Tensor, x: Tensor,
                   a: Tensor, b: Tensor, conv_weight: Tensor, a_log: Tensor, key_heads: int, value_heads: int,
                   key_dim: int, value_dim: int, z: Optional[Tensor], conv_bias: Optional[Tensor],
                   dt_bias: Optional[Tensor], norm_weight: Optional[Tensor], initial_conv_state: Optional[Tensor],
                   initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor], eps: float, gate: str, qk_l2norm: bool,
                   allow_neg_eigval: bool, scale: Optional[float], head_map: str, x_layout: str,
                   wanted: List[bool]) -> List[Tensor]:
    """Returns the gradients of `layer_forward`: of x, z, a, b, conv_weight, conv_bias, a_log, dt_bias, norm_weight,
    initial_conv_state and initial_state, of which `wanted` says which are computed; the others are empty. Those of weights
    and of initial_state are f32. Without z, which then lies in x, the gradient of x has that of z in its columns."""
    device, width = x.device, _of_rank("conv_weight", conv_weight, 2).shape[1]
    spec = LayerSpec(key_heads, value_heads, key_dim, value_dim, _dtype_of("x", x), head_map, width, qk_l2norm, scale,
                     allow_neg_eigval, eps, gate)
    with _OfShapes(width=("conv_weight", conv_weight), tokens=("x", x)):
        plan, lengths = _packed_plan(Layer, spec, x.shape[0], cu_seqlens, device, (0,))
    backward = _plan((LayerBackward, plan), lambda: LayerBackward(plan))
    found = layer_gradients(o, x, a, b, conv_weight, a_log, key_dim, z, cu_seqlens, wanted, empty)
    if wanted[0] and x.shape[-1] != conv_weight.shape[0] + (value_heads * value_dim if z is None else 0):
        found[0].zero_()
    outputs = {name: t for name, t, want in zip(_LAYER_GRADIENTS, found, wanted)
               if want and not (name == "d_z" and z is None)}
    # Without sequences there are no states, and an empty gradient may have any strides.
    final_conv, final = (None if t is None or not t.shape[0] else t for t in (d_final_conv_state, d_final_state))
    final = None if final is None else final.contiguous()
    tensors = _all_reachable({
        "x": x, "z": z, "a": a, "b": b, "conv_weight": conv_weight, "conv_bias": conv_bias, "a_log": a_log,
        "dt_bias": dt_bias, "norm_weight": norm_weight, "o": o, "initial_conv_state": initial_conv_state,
        "initial_state": initial_state, "d_y": _dense_rows(d_y), "d_final_conv_state": final_conv,
        "d_final_state": final, **outputs}, device)
    backward.launch(**tensors, **lengths, x_layout=x_layout, workspace=_workspace(backward.workspace_bytes, device))
    return found


def layer_gradients(o: Tensor, x: Tensor, a: Tensor, b: Tensor, conv_weight: Tensor, a_log: Tensor, key_dim: int,
                    z: Optional[Tensor], cu_seqlens: Optional[Tensor], wanted: List[bool],
                    make: Callable[..., Tensor]) -> List[Tensor]:
    """Uninitialised gradients of a layer. Those that are not wanted have no elements, and so has that of z without z."""
    sequences = 1 if cu_seqlens is None else _sequences_of(cu_seqlens)
    channels, width = conv_weight.shape
    heads, single = tuple(a_log.shape), torch.float32
    shapes = ((tuple(x.shape), x.dtype), (None if z is None else tuple(z.shape), x.dtype), (tuple(a.shape), a.dtype),
              (tuple(b.shape), b.dtype), ((channels, width), single), ((channels,), single), (heads, single), (heads, single),
              ((o.shape[-1],), single), ((sequences, channels, width - 1), x.dtype),
              ((sequences, o.shape[-2], key_dim, o.shape[-1]), single))
    return [make(shape if want and shape is not None else (0,), dtype, device=x.device)
            for (shape, dtype), want in zip(shapes, wanted)]


@layer_backward.register_fake
def _(d_y, d_final_conv_state, d_final_state, o, x, a, b, conv_weight, a_log, key_heads, value_heads, key_dim, value_dim, z,
      conv_bias, dt_bias, norm_weight, initial_conv_state, initial_state, cu_seqlens, eps, gate, qk_l2norm, allow_neg_eigval,
      scale, head_map, x_layout, wanted):
    return layer_gradients(o, x, a, b, conv_weight, a_log, key_dim, z, cu_seqlens, wanted, _fake_empty)


# Inputs of `layer_forward` in the order of their gradients.
_LAYER_INPUTS = (0, 9, 1, 2, 3, 10, 4, 11, 12, 13, 14)


def _save_layer(ctx: Any, inputs: Tuple[Any, ...], output: Any) -> None:
    o = output[1]
    ctx.mark_non_differentiable(o)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(o, *(inputs[i] for i in _LAYER_INPUTS), inputs[15])
    ctx.heads, ctx.others = inputs[5:9], inputs[16:]


def _layer_autograd(ctx: Any, d_y: Optional[Tensor], _: Optional[Tensor], d_conv_state: Optional[Tensor],
                    d_state: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    o, *given, cu_seqlens = ctx.saved_tensors
    wanted = [x is not None and bool(ctx.needs_input_grad[i]) for i, x in zip(_LAYER_INPUTS, given)]
    x, z, a, b, weight, bias, a_log, *rest = given
    d_y = torch.zeros_like(o) if d_y is None else d_y
    found = layer_backward(d_y, d_conv_state, d_state, o, x, a, b, weight, a_log, *ctx.heads, z, bias, *rest, cu_seqlens,
                           *ctx.others, wanted)
    gradients: List[Optional[Tensor]] = [None] * 23
    for i, d in zip(_LAYER_INPUTS, _cast(found, given, wanted)):
        gradients[i] = d
    return tuple(gradients)


layer_backward.register_autograd(_no_second_order("layer_forward"), setup_context=_save_nothing)
layer_forward.register_autograd(_layer_autograd, setup_context=_save_layer)
