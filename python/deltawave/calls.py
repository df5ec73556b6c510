"""Calls of ops like earlier ones. A decode step in eager mode waits for the host, and most of an op's time there goes into
checks whose results depend on layouts and numbers alone. The first such call is watched; the ones after it make its outputs,
put addresses into its struct and launch.

An op may be watched if it launches once, on its arguments, views of them and outputs that it makes, and does nothing else. Calls
that do anything else are never kept.
"""

import threading
from ctypes import Structure, byref
from typing import TYPE_CHECKING, Any, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .repeat import targets_of

if TYPE_CHECKING:
    from .context import Context

_watched = threading.local()


class Seen(NamedTuple):
    """A launch that a call made. `bind` makes another struct for the same tensors; `keeps` is what must live as long."""

    context: "Context"
    function: str
    handle: Any
    bind: Callable[[], Structure]
    tensors: Mapping[str, Any]
    keeps: Any


def note_launch(*launch: Any) -> None:
    """Called by launches: tells the call that is watched, if one is."""
    seen = getattr(_watched, "launches", None)
    if seen is not None:
        seen.append(Seen(*launch))


def note_output(x: Any) -> None:
    """Called where ops make outputs."""
    made = getattr(_watched, "outputs", None)
    if made is not None:
        made.append(x)


class Target(NamedTuple):
    """Where an address goes: that of value `source` of a call, and `offset` bytes. `field` of the struct, or `pointed`, a
    struct that it points to. `extent`: bytes that the kernel reaches there."""

    source: int
    offset: int
    field: str
    pointed: Any
    extent: int


class Call(NamedTuple):
    """What a call does. Values are the arguments in their order, then the outputs. `results`: None, or an output's number and
    geometry (None: as it is), or a list of these. `scratch`: bytes of workspace, or None."""

    context: "Context"
    function: str
    handle: Any
    arguments: Structure
    targets: List[Target]
    outputs: List[Tuple[Tuple[int, ...], Any]]
    results: Any
    scratch: Optional[int]
    device: Any
    keeps: Any


class Calls:
    """Calls of one op by the layouts and numbers of their arguments. A struct is here or in use, so threads share none."""

    MOST = 64

    def __init__(self, make: Callable[..., Any], workspace: Callable[[int, Any], Any],
                 stream: Callable[[Any], Optional[int]]) -> None:
        self._make, self._workspace, self._stream = make, workspace, stream
        self._kept: Dict[Hashable, Optional[Call]] = {}

    def run(self, key: Hashable, values: Sequence[Any], function: Callable[[], Any]) -> Any:
        """The results of `function`, an op's, on `values`."""
        if getattr(_watched, "launches", None) is not None:
            return function()  # inside of another call, which has to see each launch
        if key not in self._kept:
            return self._watch(key, values, function)
        call = self._kept.pop(key, None)
        if call is None:  # it cannot be repeated, or another thread has just taken it
            self._kept.setdefault(key, None)
            return function()
        device, make = call.device, self._make
        everything = [*values, *(make(shape, dtype, device) for shape, dtype in call.outputs)]
        arguments, memories = call.arguments, call.context.memories if call.context.is_simulator else None
        for source, offset, field, pointed, extent in call.targets:
            address = everything[source].data_ptr() + offset
            if memories is not None and extent and not memories.contains(address, extent):
                return function()  # not in the simulator's memory: the long way copies, or refuses
            if pointed is None:
                setattr(arguments, field, address)
            else:
                pointed.data = address
        if call.scratch is not None:
            memory = self._workspace(call.scratch, device)
            arguments.workspace, arguments.workspace_bytes = memory.data_ptr(), memory.shape[0]
        call.context.library.call(call.function, call.handle, self._stream(device), byref(arguments))
        self._keep(key, call)
        made = everything[len(values):]
        results = call.results
        if type(results) is list:
            return tuple(_result(made, one) for one in results)
        return _result(made, results)

    def _keep(self, key: Hashable, call: Optional[Call]) -> None:
        if len(self._kept) >= self.MOST:
            self._kept.clear()
        self._kept[key] = call

    def _watch(self, key: Hashable, values: Sequence[Any], function: Callable[[], Any]) -> Any:
        """Runs the function, and keeps what it did."""
        launches: List[Seen] = []
        outputs: List[Any] = []
        _watched.launches, _watched.outputs = launches, outputs
        try:
            results = function()
        finally:
            _watched.launches = _watched.outputs = None
        try:
            call = _call(values, launches, outputs, results)
        except Exception:  # the op has written its arguments: its results must reach the caller
            call = None
        self._keep(key, call)
        return results


def _result(made: Sequence[Any], one: Any) -> Any:
    if one is None:
        return None
    number, geometry = one
    return made[number] if geometry is None else made[number].as_strided(*geometry)


def _storage(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())


def _source(x: Any, candidates: Sequence[Any]) -> Optional[Tuple[int, int]]:
    """The one value that a tensor is or is a view of, and the bytes between their beginnings."""
    tensors = [(n, y) for n, y in enumerate(candidates) if hasattr(y, "data_ptr")]
    same = [n for n, y in tensors if y is x]
    if not same:
        same = [n for n, y in tensors if y.device == x.device and _storage(y) == _storage(x)]
        begins = [n for n in same if candidates[n].data_ptr() == x.data_ptr()]
        same = begins if len(same) > 1 else same
    if len(same) != 1:
        return None
    return same[0], x.data_ptr() - candidates[same[0]].data_ptr()


def _call(values: Sequence[Any], launches: List[Seen], outputs: List[Any], results: Any) -> Optional[Call]:
    """What a watched call did, or None if it cannot be repeated."""
    if len(launches) != 1:
        return None
    seen, everything = launches[0], [*values, *outputs]
    given = {name: x for name, x in seen.tensors.items() if name != "workspace"}
    workspace, device = seen.tensors.get("workspace"), next(x.device for x in values if hasattr(x, "data_ptr"))
    arguments, targets = seen.bind(), []
    if workspace is None and getattr(arguments, "workspace_bytes", None):
        return None  # memory that nothing here knows
    for name, pointed, extent in targets_of(arguments, given):
        source = _source(given[name], everything)
        if source is None:
            return None
        targets.append(Target(*source, name, pointed, extent))
    # A tensor that the kernel does not get was read by the host: lengths.
    if {n for n, x in enumerate(values) if hasattr(x, "data_ptr")} - {target.source for target in targets}:
        return None
    returned = []
    for x in results if isinstance(results, (tuple, list)) else [results]:
        at = None if x is None else _source(x, outputs)
        if x is not None and at is None:
            return None
        same = at is None or x is outputs[at[0]]
        place = None if same else (tuple(x.shape), tuple(x.stride()), x.storage_offset())
        returned.append(None if at is None else (at[0], place))
    return Call(seen.context, seen.function, seen.handle, arguments, targets, [(tuple(x.shape), x.dtype) for x in outputs],
                returned if isinstance(results, (tuple, list)) else returned[0],
                None if workspace is None else int(seen.keeps.workspace_bytes), device, seen.keeps)
