"""NumPy arrays and torch tensors as the C library takes them: an address, an element type, a shape and strides.

Nothing here needs either package: arrays are known by what they offer. bf16, which NumPy lacks, is ml_dtypes' where that
is installed, and arrays of uint16 with the same bits are taken too.
"""

import ctypes
import functools
from typing import NamedTuple, Tuple

from . import _abi
from .errors import ArgumentError
from .values import whole, wholes

DTYPES = {"f32": _abi.DW_F32, "bf16": _abi.DW_BF16, "fp16": _abi.DW_F16, "i32": _abi.DW_I32, "i64": _abi.DW_I64}
SIZES = {"f32": 4, "bf16": 2, "fp16": 2, "i32": 4, "i64": 8, "u8": 1}
FOUR = ctypes.c_int64 * 4
# Other packages' names of them.
ALIASES = {"float32": "f32", "bfloat16": "bf16", "uint16": "bf16", "float16": "fp16", "int32": "i32", "int64": "i64",
           "uint8": "u8", "bool": "u8"}


def dtype_name(dtype):
    """The name here of an element type: a NumPy or torch dtype, or a name."""
    try:
        return _dtype_name(dtype)
    except TypeError:  # it has no hash
        raise ArgumentError(f"dtype: {dtype!r}; it must be one of {', '.join(SIZES)}") from None


@functools.lru_cache(maxsize=None)
def _dtype_name(dtype):
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    name = ALIASES.get(name, name)
    if name not in SIZES:
        raise ArgumentError(f"dtype: {dtype}; it must be one of {', '.join(SIZES)}")
    return name


class Array(NamedTuple):
    """Memory of a device. Strides are in elements. `array` makes one of a caller's numbers, and checks them."""

    address: int
    dtype: str
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]

    def extent(self):
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides))
        return (last + 1) * SIZES[self.dtype]

    def is_dense(self):
        return self.strides == dense(self.shape)


def dense(shape):
    """Strides of an array without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def array(address, dtype, shape, strides=None):
    """Memory that no package has an array of."""
    shape = tuple(wholes("shape", shape, 64))
    strides = dense(shape) if strides is None else tuple(wholes("strides", strides, 64))
    return Array(whole("address", address, 64), dtype_name(dtype), shape, strides)


def is_torch(x):
    """Whether something is a torch tensor."""
    return hasattr(x, "data_ptr")


def describe(name, x):
    """An argument as an `Array`; the name is for errors."""
    if isinstance(x, Array):
        return x
    if is_torch(x):
        return Array(x.data_ptr(), dtype_name(x.dtype), tuple(x.shape), tuple(x.stride()))
    if not hasattr(x, "__array_interface__"):
        raise ArgumentError(f"{name}: a {type(x).__name__}; it must be an array or a tensor")
    dtype = dtype_name(x.dtype)
    if any(stride % x.itemsize for stride in x.strides):
        raise ArgumentError(f"{name}: strides of {x.strides} bytes; they must be multiples of the {x.itemsize} bytes of "
                            "an element")
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return Array(x.__array_interface__["data"][0], dtype, tuple(x.shape), strides)


def tensor_struct(name, a):
    """A `dw_tensor`."""
    if a.dtype not in ("f32", "bf16", "fp16") or len(a.shape) > 4:
        allowed = "it must be f32, bf16 or fp16, of at most 4 dimensions"
        raise ArgumentError(f"{name}: {a.dtype} of shape {list(a.shape)}; {allowed}")
    return _abi.dw_tensor(data=a.address, dtype=DTYPES[a.dtype], rank=len(a.shape), shape=FOUR(*a.shape),
                          strides=FOUR(*a.strides))


def lengths_struct(name, a):
    """A `dw_lengths`."""
    if a.dtype not in ("i32", "i64") or len(a.shape) != 1 or not a.is_dense():
        raise ArgumentError(f"{name}: {a.dtype} of shape {list(a.shape)}; it must be a dense vector of i32 or i64")
    return _abi.dw_lengths(data=a.address, entries=a.shape[0], dtype=DTYPES[a.dtype])


def host_lengths(cu_seqlens):
    """A `dw_lengths` of numbers that the host has: a list, a NumPy array, a tensor of the host. It keeps what it
    points to."""
    entries = wholes("cu_seqlens", cu_seqlens, 64)
    lengths = _abi.dw_lengths(data=ctypes.addressof(entries), entries=len(entries), dtype=_abi.DW_I64)
    lengths.entries_of_host = entries
    return lengths


def bf16_dtype():
    """What NumPy calls bf16 here: ml_dtypes' type, or uint16 with its bits."""
    import numpy

    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return numpy.dtype(numpy.uint16)
    return numpy.dtype(bfloat16)


def numpy_dtype(dtype):
    """NumPy's element type of a name."""
    import numpy

    name = dtype_name(dtype)
    if name == "bf16":
        return bf16_dtype()
    return numpy.dtype({"f32": "float32", "fp16": "float16", "i32": "int32", "i64": "int64", "u8": "uint8"}[name])


def to_bf16(values):
    """A NumPy array rounded to bf16, to nearest, ties to even; NaN stays NaN."""
    import numpy

    values = numpy.ascontiguousarray(values, dtype=numpy.float32)
    bits = values.view(numpy.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(numpy.uint16)
    rounded = numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), rounded)
    return rounded.view(bf16_dtype())


def to_float(values):
    """A NumPy array of any type here as f32. Whole numbers of 16 bits are those of bf16."""
    import numpy

    values = numpy.asarray(values)
    if dtype_name(values.dtype) != "bf16":
        return values.astype(numpy.float32)
    bits = numpy.ascontiguousarray(values).view(numpy.uint16)
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)
