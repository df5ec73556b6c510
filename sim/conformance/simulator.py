"""Calls the simulator's HIP runtime by ctypes; the other scripts launch kernels through it."""

import ctypes
import os

import numpy as np

LIBRARY = os.environ.get("DELTAWAVE_CONFORMANCE_LIBRARY", "libamdhip64.so.7")
# Where the code objects that ran are kept for the comparison of disassemblies.
CODE = os.environ.get("DELTAWAVE_CONFORMANCE_CODE")

_hip = ctypes.CDLL(LIBRARY)
_hip.hipGetErrorName.restype = ctypes.c_char_p


class HipError(RuntimeError):
    """A call that failed, with HIP's name of the status."""


def call(name, *arguments):
    """Calls a function of the runtime; raises what is not success."""
    status = getattr(_hip, name)(*arguments)
    if status != 0:
        raise HipError(f"{name}: {_hip.hipGetErrorName(status).decode()}")


def bf16(x):
    """float32 to the bits of bfloat16, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    """The bits of bfloat16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Buffer:
    """An array in device memory. `kind` is Triton's name of the element type."""

    CARRIERS = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "i1": np.int8,
                "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "u32": np.uint32, "fp8e4b8": np.uint8}

    def __init__(self, array, kind):
        array = np.asarray(array)
        self.kind, self.shape = kind, array.shape
        carrier = self.CARRIERS[kind]
        if kind == "bf16" and array.dtype != np.uint16:
            array = bf16(array)
        host = np.ascontiguousarray(array, dtype=carrier)
        self.pointer = ctypes.c_void_p()
        call("hipMalloc", ctypes.byref(self.pointer), ctypes.c_size_t(max(host.nbytes, 1)))
        call("hipMemcpy", self.pointer, ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes), ctypes.c_int(1))

    def get(self):
        """Content of the device memory; bfloat16 as float32."""
        host = np.empty(self.shape, self.CARRIERS[self.kind])
        call("hipMemcpy", ctypes.c_void_p(host.ctypes.data), self.pointer, ctypes.c_size_t(host.nbytes), ctypes.c_int(2))
        return from_bf16(host) if self.kind == "bf16" else host

    def __del__(self):
        _hip.hipFree(self.pointer)


def poisoned(shape, kind):
    """A buffer that nothing has been written to: NaN, or a pattern that is easy to see."""
    carrier = Buffer.CARRIERS[kind]
    if np.issubdtype(carrier, np.floating):
        return Buffer(np.full(shape, np.nan, carrier), kind)
    return Buffer(np.full(shape, 0x7FC1 if kind == "bf16" else 0x5A, carrier), kind)


_modules = {}


def function(image, name):
    """A kernel of a code object, which is loaded once."""
    key = (image, name)
    if key not in _modules:
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        call("hipModuleLoadData", ctypes.byref(module), image)
        call("hipModuleGetFunction", ctypes.byref(found), module, name.encode())
        _modules[key] = found
        if CODE:
            with open(os.path.join(CODE, f"{name}.{len(_modules)}.co"), "wb") as file:
                file.write(image)
    return _modules[key]


def launch(image, name, grid, block, shared, arguments):
    """Launches a kernel and waits for it. `arguments` are ctypes values in the order of the kernel's."""
    grid = tuple(grid) + (1,) * (3 - len(grid))
    block = tuple(block) + (1,) * (3 - len(block))
    pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
    sizes = [ctypes.c_uint(n) for n in (*grid, *block, shared)]
    call("hipModuleLaunchKernel", function(image, name), *sizes, None, pointers, None)
    call("hipDeviceSynchronize")
