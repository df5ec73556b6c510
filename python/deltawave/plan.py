"""Plans of all operations: the common handle, launches and workspace."""

from collections import OrderedDict
from ctypes import Structure, byref, c_size_t, c_void_p
from numbers import Integral
from threading import Lock, RLock, get_ident
from typing import Any, Callable, Collection, Dict, Hashable, Mapping, Optional, Tuple, Type

from . import arrays, structs
from .calls import note_launch
from .context import Context, Memory, checked, stream_address, stream_of
from .errors import ArgumentError
from .repeat import Repeats


class Plan:
    """A checked batch shape. Launch it any number of times. A captured graph needs its plan as long as it may be replayed."""

    # Set by subclasses. NAME: the functions are dw_NAME_*. TENSORS: the struct of a launch. CHOICES: its fields that are
    # words.
    NAME: str = ""
    TENSORS: Type[Structure]
    CHOICES: Mapping[str, Mapping[str, int]] = {}

    def __init__(self, context: Context, sequences: int, constructor: str, *arguments: Any) -> None:
        self.context, self.sequences = checked(context), sequences
        self._repeats = Repeats()
        self.handle: Optional[c_void_p] = c_void_p()
        context.library.call(f"dw_{self.NAME}_{constructor}", *self.origin(), *arguments, byref(self.handle))

    def origin(self) -> Tuple[Any, ...]:
        """First arguments of the constructors."""
        return (self.context.handle,)

    def entries(self, name: str) -> int:
        """Number of entries of the vector `name`: one per sequence."""
        return self.sequences

    def unwritten(self, tensors: Mapping[str, Any]) -> Collection[str]:
        """Names of outputs that a launch on these tensors only reads."""
        return ()

    def bind(self, **tensors: Any) -> "Launch":
        """Prepares a launch on these tensors. Returns a function that takes a stream and launches."""
        call, name = self.context.library.call, f"dw_{self.NAME}_launch"
        arguments = structs.tensors(self.TENSORS, self.CHOICES, self.context, self.entries, tensors,
                                    self.unwritten(tensors))

        def launch(stream: Any = None) -> None:
            call(name, self.handle, stream_address(stream), byref(arguments))

        return Launch(launch, arguments, (self, tensors))

    def launch(self, stream: Any = None, **tensors: Any) -> None:
        """Enqueues the operation on these tensors. `stream` is an address or a torch stream. None: torch's current stream if
        a tensor is on a GPU, else the default stream."""
        note_launch(self.context, f"dw_{self.NAME}_launch", self.handle, lambda: self.bind(**tensors).arguments, tensors, self)
        key = Repeats.key(tensors) if self.repeats(tensors) else None
        repeat = self._repeats.take(key, self.context, tensors)
        if repeat is None:
            bound = self.bind(**tensors)
            bound(stream_of(stream, tensors.values()))
            if key is not None:
                self._repeats.keep(key, bound.arguments, tensors)
            return
        try:
            self.context.library.call(f"dw_{self.NAME}_launch", self.handle, stream_of(stream, tensors.values()),
                                      byref(repeat.arguments))
        finally:
            self._repeats.give(key, repeat)

    def repeats(self, tensors: Mapping[str, Any]) -> bool:
        """Whether a launch on these tensors leaves a struct for others."""
        return True

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            getattr(self.context.library.c, f"dw_{self.NAME}_destroy")(handle)


class Launch:
    """A launch on tensors that are bound: call it with a stream. It keeps the plan, the tensors and what they point to."""

    def __init__(self, launch: Callable[[Any], None], arguments: Structure, kept: Tuple[Any, ...]) -> None:
        self._launch, self.arguments, self.kept = launch, arguments, kept

    def __call__(self, stream: Any = None) -> None:
        self._launch(stream)


def memory_of(context: Context, workspace: Any, least: int, name: str = "workspace") -> Tuple[Any, int]:
    """Address and size of a caller's workspace, or of the argument `name`. Of an address alone the size is taken to be
    `least`."""
    if isinstance(workspace, Integral):
        return workspace, least
    if isinstance(workspace, Memory):
        return workspace.address, workspace.nbytes
    found = context.describe(name, workspace)
    if not found.is_dense():
        raise ArgumentError(f"{name}: strides {list(found.strides)}; it must be dense")
    return found.address, found.extent()


# hipStreamPerThread and CU_STREAM_PER_THREAD: one address that is another stream in each thread.
PER_THREAD = 2


class PlanWithWorkspace(Plan):
    """A plan whose launches need scratch memory. Launches of several threads on one stream may share a workspace: each is
    enqueued whole. Without a workspace the plan allocates one for each stream."""

    def __init__(self, context: Context, sequences: int, constructor: str, *arguments: Any) -> None:
        super().__init__(context, sequences, constructor, *arguments)
        size = c_size_t()
        context.library.call(f"dw_{self.NAME}_workspace_bytes", self.handle, byref(size))
        self.workspace_bytes, self._lock = size.value, Lock()
        self._own: Dict[Hashable, Memory] = {}

    def repeats(self, tensors: Mapping[str, Any]) -> bool:
        return tensors.get("workspace") is not None

    def bind(self, workspace: Any = None, **tensors: Any) -> Launch:
        if "workspace_bytes" in tensors:
            raise ArgumentError("workspace_bytes: no argument of a launch; it follows from the workspace")
        if workspace is None:
            return self._bind_own(tensors)
        address, size = memory_of(self.context, workspace, self.workspace_bytes)
        launch = super().bind(workspace=address, workspace_bytes=size, **tensors)
        launch.kept += (workspace,)
        return launch

    def _bind_own(self, tensors: Mapping[str, Any]) -> Launch:
        """`bind` with the plan's own workspace, chosen by the stream of the launch."""
        bound = super().bind(workspace_bytes=self.workspace_bytes, **tensors)
        arguments = bound.arguments
        of_stream: Dict[Hashable, Structure] = {}
        call, name = self.context.library.call, f"dw_{self.NAME}_launch"
        card = next((x.device for x in tensors.values() if arrays.is_torch(x) and x.is_cuda), None)

        def with_workspace(address: Optional[int]) -> Structure:
            own = type(arguments).from_buffer_copy(arguments)
            own.workspace = address
            return own

        if card is not None:
            import torch

        def launch(stream: Any = None) -> None:
            stream = stream_address(stream)
            if card is not None and torch.cuda.is_current_stream_capturing():
                # Memory of the graph, which launches outside of it do not use. Freed in stream order.
                scratch = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=card)
                call(name, self.handle, stream, byref(with_workspace(scratch.data_ptr())))
                return
            key = _key(stream)
            if key not in of_stream:
                of_stream[key] = with_workspace(self._workspace(stream).address)
            call(name, self.handle, stream, byref(of_stream[key]))

        return Launch(launch, arguments, bound.kept)

    def _workspace(self, stream: Any) -> Memory:
        """The plan's own workspace for launches on a stream, kept as long as the plan."""
        key = _key(stream)
        with self._lock:
            if key not in self._own:
                self._own[key] = Memory(self.context, self.workspace_bytes)
            return self._own[key]


def _key(stream: Any) -> Hashable:
    stream = stream or 0
    return (stream, get_ident()) if stream == PER_THREAD else stream


class Plans:
    """Cache of plans: the `most` last used, and all plans that a captured graph may need."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.latest: "OrderedDict[Hashable, Any]" = OrderedDict()
        self.captured: Dict[Hashable, Any] = {}
        # Reentrant: garbage collection may run other code of this thread while it holds the lock.
        self.lock = RLock()

    def get(self, key: Hashable, make: Callable[[], Any], capturing: bool) -> Any:
        """The plan for a key. One thread makes it if it does not exist. While a stream is being captured no plan is dropped,
        because a capture does not allow that memory is freed."""
        with self.lock:
            plan = self.captured.get(key)
            if plan is None:
                plan = self.latest.pop(key, None) or make()
                (self.captured if capturing else self.latest)[key] = plan
            while not capturing and len(self.latest) > self.most:
                self.latest.popitem(last=False)
            return plan
