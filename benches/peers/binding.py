"""include/deltawave.h by ctypes: the part that a benchmark needs. Tensors are anything with an address."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

ABI_VERSION = 1
AUTO, HIP, SIMULATOR = 0, 1, 2
DTYPES = {"f32": 0, "bf16": 1, "fp16": 2, "i32": 3, "i64": 4}
TO_DEVICE, TO_HOST = 0, 1


class Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(self), **fields)


class DeviceInfo(Sized):
    _fields_ = [("size", c_size_t), ("memory_bytes", c_uint64), ("compute_units", c_uint32), ("pad0", c_uint32),
                ("backend", ctypes.c_char * 16), ("arch", ctypes.c_char * 32), ("name", ctypes.c_char * 256)]


class Tensor(Sized):
    _fields_ = [("size", c_size_t), ("data", c_void_p), ("dtype", c_int32), ("rank", c_int32),
                ("shape", c_int64 * 4), ("strides", c_int64 * 4)]


class Lengths(Sized):
    _fields_ = [("size", c_size_t), ("data", c_void_p), ("entries", c_int64), ("dtype", c_int32), ("pad0", c_int32)]


class Spec(Sized):
    _fields_ = [("size", c_size_t), ("dtype", c_int32), ("head_map", c_int32), ("key_heads", c_int32),
                ("value_heads", c_int32), ("key_dim", c_int32), ("value_dim", c_int32), ("qk_l2norm", c_int32),
                ("scale", c_float)]


class Tensors(Sized):
    _fields_ = [("size", c_size_t),
                *[(name, POINTER(Tensor)) for name in "q k v o g beta a b a_log dt_bias".split()],
                ("allow_neg_eigval", c_int32), ("initial_layout", c_int32), ("initial_state", POINTER(Tensor)),
                ("has_initial_state", c_void_p), ("final_state", POINTER(Tensor)), ("final_layout", c_int32),
                ("pad0", c_int32), ("cu_seqlens", POINTER(Lengths)), ("workspace", c_void_p),
                ("workspace_bytes", c_size_t)]


SIGNATURES = {
    "dw_abi_version": [],
    "dw_context_create": [c_int, c_int, POINTER(c_void_p)],
    "dw_context_info": [c_void_p, POINTER(DeviceInfo)],
    "dw_context_destroy": [c_void_p],
    "dw_malloc": [c_void_p, c_size_t, POINTER(c_void_p)],
    "dw_free": [c_void_p, c_void_p],
    "dw_copy": [c_void_p, c_void_p, c_void_p, c_size_t, c_int],
    "dw_synchronize": [c_void_p, c_void_p],
    "dw_prefill_packed": [c_void_p, POINTER(Spec), POINTER(Lengths), c_int64, POINTER(c_void_p)],
    "dw_prefill_destroy": [c_void_p],
    "dw_prefill_workspace_bytes": [c_void_p, POINTER(c_size_t)],
    "dw_prefill_launch": [c_void_p, c_void_p, POINTER(Tensors)],
}


class Error(RuntimeError):
    """What dw_last_error said."""


class Library:
    """libdeltawave_c. Calls raise `Error` where C returns a status."""

    def __init__(self, path):
        self.c = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            getattr(self.c, name).argtypes = arguments
        self.c.dw_last_error.restype = c_char_p
        for name in ("dw_context_destroy", "dw_prefill_destroy"):
            getattr(self.c, name).restype = None
        version = self.c.dw_abi_version()
        if version != ABI_VERSION:
            raise Error(f"{path} has ABI version {version}, this binding is for {ABI_VERSION}")

    def call(self, name, *arguments):
        status = getattr(self.c, name)(*arguments)
        if status != 0:
            raise Error(f"{name}: {self.c.dw_last_error().decode()}")


class Context:
    """A device."""

    def __init__(self, library, backend=AUTO, device=0):
        self.library, self.handle = library, c_void_p()
        library.call("dw_context_create", backend, device, byref(self.handle))

    def info(self):
        info = DeviceInfo()
        self.library.call("dw_context_info", self.handle, byref(info))
        return {name: getattr(info, name).decode() for name in ("backend", "arch", "name")}

    def malloc(self, size):
        address = c_void_p()
        self.library.call("dw_malloc", self.handle, size, byref(address))
        return address.value

    def copy(self, to, source, size, direction):
        self.library.call("dw_copy", self.handle, to, source, size, direction)

    def synchronize(self, stream=None):
        self.library.call("dw_synchronize", self.handle, stream)


def tensor(address, dtype, shape, strides=None):
    """A tensor struct; without strides a dense one."""
    if strides is None:
        strides, step = [], 1
        for n in reversed(shape):
            strides.insert(0, step)
            step *= n
    return Tensor(data=address, dtype=DTYPES[dtype], rank=len(shape), shape=(c_int64 * 4)(*shape),
                  strides=(c_int64 * 4)(*strides))


class Prefill:
    """A plan for a packed batch. `cu_seqlens` is a list of numbers."""

    def __init__(self, context, cu_seqlens, tokens, **spec):
        self.library, self.handle = context.library, c_void_p()
        spec["dtype"] = DTYPES[spec["dtype"]]
        entries = (c_int64 * len(cu_seqlens))(*cu_seqlens)
        lengths = Lengths(data=ctypes.addressof(entries), entries=len(entries), dtype=DTYPES["i64"])
        self.library.call("dw_prefill_packed", context.handle, byref(Spec(**spec)), byref(lengths), tokens,
                          byref(self.handle))
        size = c_size_t()
        self.library.call("dw_prefill_workspace_bytes", self.handle, byref(size))
        self.workspace_bytes = size.value

    def bind(self, workspace, **tensors):
        """A function of a stream that launches on these tensors: all that can be prepared is."""
        pointers = {name: ctypes.pointer(t) for name, t in tensors.items()}
        arguments = Tensors(workspace=workspace, workspace_bytes=self.workspace_bytes, **pointers)

        def launch(stream):
            self.library.call("dw_prefill_launch", self.handle, stream, byref(arguments))

        launch.keep = (self, pointers)
        return launch

    def __del__(self):
        if getattr(self, "handle", None):
            self.library.c.dw_prefill_destroy(self.handle)
