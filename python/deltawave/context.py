"""A device with all kernels loaded, and memory on it for callers that have no runtime of their own."""

import bisect
import ctypes
import threading
from ctypes import byref, c_void_p

from . import _abi, arrays, library
from .errors import ArgumentError
from .values import choice, whole, wholes

BACKENDS = {"auto": _abi.DW_BACKEND_AUTO, "hip": _abi.DW_BACKEND_HIP, "simulator": _abi.DW_BACKEND_SIMULATOR}


class Memory:
    """Memory of a device, freed with this object. On the simulator NumPy can look into it."""

    def __init__(self, context, nbytes):
        self.context, self.nbytes, address = context, whole("nbytes", nbytes, 64), c_void_p()
        context.library.call("dw_malloc", context.handle, max(nbytes, 1), byref(address))
        self.address = address.value
        context.memories.add(self.address, nbytes)

    @property
    def __array_interface__(self):
        if not self.context.is_simulator:
            raise AttributeError("memory of a card has no address on the host")
        return {"version": 3, "data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1"}

    def __del__(self):
        address, self.address = getattr(self, "address", None), None
        if address:
            self.context.memories.remove(address)
            self.context.library.c.dw_free(self.context.handle, address)


class Memories:
    """Where the allocations of a context lie."""

    def __init__(self):
        # Reentrant: a collection of garbage may free memory while this thread is in here.
        self.lock, self.starts, self.sizes = threading.RLock(), [], {}

    def add(self, address, nbytes):
        with self.lock:
            bisect.insort(self.starts, address)
            self.sizes[address] = nbytes

    def remove(self, address):
        with self.lock:
            del self.starts[bisect.bisect_left(self.starts, address)]
            del self.sizes[address]

    def contains(self, address, nbytes):
        with self.lock:
            at = bisect.bisect_right(self.starts, address) - 1
            if at < 0:
                return False
            start = self.starts[at]
            return address + nbytes <= start + self.sizes[start]


class Context:
    """A device: a card, or the simulator where there is none.

    `backend` is "auto", "hip" or "simulator". Memory for the simulator comes from `array`, `empty` and `zeros`, as NumPy
    arrays; for a card from the caller, as torch tensors or as addresses (`deltawave.array`).
    """

    def __init__(self, backend="auto", device=0, path=None):
        self.library = library.Library(path) if path else library.default()
        self.handle, self.memories, self.device = c_void_p(), Memories(), whole("device", device, 32)
        self.library.call("dw_context_create", choice("backend", backend, BACKENDS), self.device, byref(self.handle))
        info = _abi.dw_device_info()
        self.library.call("dw_context_info", self.handle, byref(info))
        self.backend, self.arch, self.name = (getattr(info, f).decode() for f in ("backend", "arch", "name"))
        self.memory_bytes, self.compute_units = info.memory_bytes, info.compute_units

    @property
    def is_simulator(self):
        return self.backend == "simulator"

    def __repr__(self):
        return f"<deltawave.Context {self.name} ({self.backend}, {self.arch})>"

    def __del__(self):
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self.library.c.dw_context_destroy(handle)

    def synchronize(self, stream=None):
        """Waits for all work of a stream; None is the default one."""
        self.library.call("dw_synchronize", self.handle, stream)

    def copy(self, to, source, nbytes, direction):
        """Copies between addresses; the direction is one of DW_TO_DEVICE, DW_TO_HOST, DW_ON_DEVICE."""
        nbytes, direction = whole("nbytes", nbytes, 64), whole("direction", direction, 32)
        self.library.call("dw_copy", self.handle, to, source, nbytes, direction)

    def empty(self, shape, dtype="f32"):
        """A NumPy array in the simulator's memory, which kernels and the host can use. It is not initialised."""
        import numpy

        if not self.is_simulator:
            raise ArgumentError(f"context: {self.name}; NumPy arrays are for the simulator, cards take torch tensors")
        dtype = arrays.numpy_dtype(dtype)
        shape = tuple(wholes("shape", (shape,) if isinstance(shape, int) else shape, 64))
        count = 1
        for n in shape:
            count *= n
        memory = Memory(self, count * dtype.itemsize)
        return numpy.asarray(memory).view(dtype).reshape(shape)

    def array(self, values, dtype=None):
        """A copy of a NumPy array, or of what becomes one, in the simulator's memory. With a dtype it is converted."""
        import numpy

        values = numpy.asarray(values)
        name = arrays.dtype_name(values.dtype if dtype is None else dtype)
        if name == "bf16" and values.dtype.name not in ("bfloat16", "uint16"):
            values = arrays.to_bf16(values)
        values = numpy.ascontiguousarray(values, dtype=None if name == "bf16" else arrays.numpy_dtype(name))
        made = self.empty(values.shape, name)
        self.copy(made.ctypes.data, values.ctypes.data, values.nbytes, _abi.DW_TO_DEVICE)
        return made

    def zeros(self, shape, dtype="f32"):
        """A NumPy array of zeros in the simulator's memory."""
        import numpy

        return self.array(numpy.zeros(shape, arrays.numpy_dtype(dtype)))

    def owns(self, x):
        """Whether an array lies in memory of this device, as far as that can be told."""
        return self._refusal(x, arrays.describe("x", x)) is None

    def _refusal(self, x, a):
        """What is wrong with where an array lies, or None."""
        if isinstance(x, arrays.Array):
            return None
        if not self.is_simulator:
            if arrays.is_torch(x) and x.is_cuda and x.device.index == self.device:
                return None
            where = getattr(x, "device", "the host")
            return f"memory of {where}; it must be a tensor of device {self.device}"
        size = a.extent()
        # What has no elements lies nowhere, and negative strides are the library's to refuse.
        if not size or any(stride < 0 for stride in a.strides) or self.memories.contains(a.address, size):
            return None
        return "memory of the host; it must be made by this context: array, empty or zeros"

    def describe(self, name, x):
        """An argument as an `Array` whose memory the device can reach."""
        a = arrays.describe(name, x)
        refusal = self._refusal(x, a)
        if refusal:
            raise ArgumentError(f"{name}: {refusal}")
        return a


def stream_of(stream, tensors):
    """The address of a stream: what is given, else torch's current one where there are tensors of a card."""
    if stream is not None:
        return getattr(stream, "cuda_stream", stream)
    for x in tensors:
        if arrays.is_torch(x) and x.is_cuda:
            import torch

            return torch.cuda.current_stream(x.device).cuda_stream
    return None
