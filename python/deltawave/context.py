"""Context: a device with all kernels loaded. Memory: device memory for callers without a runtime of their own."""

import bisect
import ctypes
import os
import threading
import warnings
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Sequence, Union

from . import _abi, arrays, library
from .errors import ArgumentError, DeviceError, Error
from .repeat import Repeats
from .values import address as address_of, choice, shown, whole

if TYPE_CHECKING:
    from .arrays import Array, NumPyArray

BACKENDS = {"auto": _abi.DW_BACKEND_AUTO, "hip": _abi.DW_BACKEND_HIP, "simulator": _abi.DW_BACKEND_SIMULATOR}


class Memory:
    """Device memory, freed with this object. On the simulator NumPy can read and write it."""

    def __init__(self, context: "Context", nbytes: int) -> None:
        self.context, address = checked(context), c_void_p()
        self.address = 0
        self.nbytes = whole("nbytes", nbytes, 64, least=0)
        context.library.call("dw_malloc", context.handle, max(self.nbytes, 1), byref(address))
        self.address = address.value or 0
        context.memories.add(self.address, self.nbytes)

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        if not self.context.is_simulator:
            raise AttributeError("memory of a GPU has no address on the host")
        return {"version": 3, "data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1"}

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            self.context.memories.remove(address)
            self.context.library.c.dw_free(self.context.handle, address)


class Memories:
    """Address ranges of a context's allocations."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may free memory while this thread holds the lock.
        self.lock = threading.RLock()
        self.starts: List[int] = []
        self.sizes: Dict[int, int] = {}

    def add(self, address: int, nbytes: int) -> None:
        with self.lock:
            bisect.insort(self.starts, address)
            self.sizes[address] = nbytes

    def remove(self, address: int) -> None:
        with self.lock:
            del self.starts[bisect.bisect_left(self.starts, address)]
            del self.sizes[address]

    def contains(self, address: int, nbytes: int) -> bool:
        with self.lock:
            at = bisect.bisect_right(self.starts, address) - 1
            if at < 0:
                return False
            start = self.starts[at]
            return address + nbytes <= start + self.sizes[start]


class Context:
    """A device with all kernels loaded: a GPU, or the simulator.

    `backend` is "auto" (a GPU if there is one, else the simulator), "hip" (a GPU) or "simulator". `device` is the number
    of the GPU. If the library has no kernels for the GPU, "hip" raises a `DeviceError` that names those it has, and "auto"
    warns. On a GPU, tensors are the caller's torch tensors or addresses (`deltawave.array`). On the simulator they
    are NumPy arrays from `array`, `empty` and `zeros`.
    """

    def __init__(self, backend: str = "auto", device: int = 0,
                 path: "Optional[Union[str, os.PathLike[str]]]" = None) -> None:
        self.library = library.default() if path is None else library.Library(path)
        self.handle: Optional[c_void_p] = c_void_p()
        self.memories, self.device = Memories(), whole("device", device, 32)
        self.norms = Repeats()  # a norm has no plan that keeps them
        self.library.call("dw_context_create", choice("backend", backend, BACKENDS), self.device, byref(self.handle))
        info = _abi.dw_device_info()
        self.library.call("dw_context_info", self.handle, byref(info))
        self.backend, self.arch, self.name = (getattr(info, f).decode() for f in ("backend", "arch", "name"))
        self.memory_bytes, self.compute_units = info.memory_bytes, info.compute_units
        if backend == "auto" and self.is_simulator and not os.environ.get("DELTAWAVE_BACKEND"):
            self._warn_of_unused_gpu()

    def _warn_of_unused_gpu(self) -> None:
        """Warns if there is a GPU that the library has no kernels for: the simulator is slower by orders of magnitude."""
        gpu = c_void_p()
        try:
            self.library.call("dw_context_create", _abi.DW_BACKEND_HIP, self.device, byref(gpu))
        except DeviceError as problem:
            if str(problem).startswith("there are no kernels for"):
                warnings.warn(f"{problem}; the simulator runs instead", RuntimeWarning, stacklevel=3)
        except Error:
            pass  # no GPU
        self.library.c.dw_context_destroy(gpu)

    @property
    def is_simulator(self) -> bool:
        return self.backend == "simulator"

    def __repr__(self) -> str:
        return f"<deltawave.Context {self.name} ({self.backend}, {self.arch})>"

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self.library.c.dw_context_destroy(handle)

    def synchronize(self, stream: Any = None) -> None:
        """Waits for all work of `stream`: an address, a torch stream, or None for the default stream."""
        self.library.call("dw_synchronize", self.handle, stream_address(stream))

    def copy(self, to: Any, source: Any, nbytes: int, direction: int) -> None:
        """Copies `nbytes` between addresses. `direction` is DW_TO_DEVICE, DW_TO_HOST or DW_ON_DEVICE."""
        nbytes, direction = whole("nbytes", nbytes, 64, least=0), whole("direction", direction, 32)
        to, source = address_of("to", to), address_of("source", source)
        self.library.call("dw_copy", self.handle, to, source, nbytes, direction)

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any = "f32") -> "NumPyArray":
        """An uninitialised NumPy array in the simulator's memory, which kernels and the host can use."""
        import numpy

        if not self.is_simulator:
            raise ArgumentError(f"context: {self.name}; NumPy arrays are for the simulator, GPUs take torch tensors")
        dtype = arrays.numpy_dtype(dtype)
        shape, count = arrays.dimensions("shape", shape), 1
        for n in shape:
            count *= n
        if count * dtype.itemsize >= 1 << 63:
            raise ArgumentError(f"shape: {list(shape)}; it must have less than 2^63 bytes")
        memory = numpy.asarray(Memory(self, count * dtype.itemsize))
        try:
            return memory.view(dtype).reshape(shape)
        except ValueError as problem:  # more dimensions than NumPy has
            raise ArgumentError(f"shape: {list(shape)}; {problem}") from None

    def array(self, values: Any, dtype: Any = None) -> "NumPyArray":
        """Copies `values`, an array, a tensor or nested lists, into the simulator's memory.

        With a dtype the copy is converted. Without one f64 becomes f32 and other types stay: uint16 holds bits of bf16.
        Conversions never wrap. i32, i64 and u8 take only whole numbers that they can hold. f32, fp16 and bf16 round to
        nearest, and to infinity. Complex numbers are refused. Float types refuse a uint16 array without the bf16 mark,
        because it may hold numbers or bits: `deltawave.bf16_bits` marks bits, and `empty`, `zeros`, `array` and
        `to_bf16` mark their results.
        """
        values = arrays.converted("values", values, None if dtype is None else arrays.dtype_name(dtype))
        made = self.empty(values.shape, values.dtype)
        self.copy(made.ctypes.data, values.ctypes.data, values.nbytes, _abi.DW_TO_DEVICE)
        return made

    def zeros(self, shape: Union[int, Sequence[int]], dtype: Any = "f32") -> "NumPyArray":
        """A NumPy array of zeros in the simulator's memory."""
        import numpy

        made = self.empty(shape, dtype)
        zeros = numpy.zeros(made.shape, made.dtype)
        self.copy(made.ctypes.data, zeros.ctypes.data, zeros.nbytes, _abi.DW_TO_DEVICE)
        return made

    def owns(self, x: Any) -> bool:
        """Whether an array lies in memory of this device, as far as the package can tell."""
        return self._refusal(x, arrays.describe("x", x)) is None

    def _refusal(self, x: Any, a: "Array") -> Optional[str]:
        """Text about an array in memory that the device cannot reach, or None."""
        if isinstance(x, arrays.Array):
            return None
        on_card = arrays.is_torch(x) and x.is_cuda
        if not self.is_simulator or on_card:
            if on_card and not self.is_simulator and x.device.index == self.device:
                return None
            where, wanted = getattr(x, "device", "the host"), f"a tensor of device {self.device}"
            if self.is_simulator:
                wanted = "made by this context: array, empty or zeros"
            return f"memory of {where}; it must be {wanted}"
        size = a.extent()
        # An array without elements needs no memory. The library refuses negative strides.
        if not size or a.has_negative_strides() or self.memories.contains(a.address, size):
            return None
        return "memory of the host; it must be made by this context: array, empty or zeros"

    def describe(self, name: str, x: Any, allowed: Sequence[str] = tuple(arrays.SIZES)) -> "Array":
        """An argument of one of the `allowed` types as an `Array` whose memory the device can reach."""
        a = arrays.describe(name, x, allowed)
        refusal = self._refusal(x, a)
        if refusal:
            raise ArgumentError(f"{name}: {refusal}")
        return a


def checked(context: Any) -> Context:
    """Refuses everything but a `Context`."""
    if not isinstance(context, Context):
        raise ArgumentError(f"context: a {type(context).__name__}; it must be a deltawave.Context")
    return context


def stream_address(stream: Any) -> Union[None, int, c_void_p]:
    """The address of a stream: None, an address, or an object with a `cuda_stream`, such as a torch stream."""
    if stream is None:
        return None
    try:
        return address_of("stream", getattr(stream, "cuda_stream", stream))
    except ArgumentError:
        allowed = "it must be None, the address of a stream, or a torch stream"
        raise ArgumentError(f"stream: {shown(stream)}; {allowed}") from None


def stream_of(stream: Any, tensors: Iterable[Any]) -> Union[None, int, c_void_p]:
    """The address of `stream`; if it is None and a tensor is on a GPU, of torch's current stream."""
    if stream is not None:
        return stream_address(stream)
    for x in tensors:
        if arrays.is_torch(x) and x.is_cuda:
            import torch

            # The address alone, without an object around it.
            address = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
            return address(x.device.index) if address else torch.cuda.current_stream(x.device).cuda_stream
    return None
