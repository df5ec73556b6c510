"""Conversion of NumPy arrays and torch tensors to C tensors: an address, an element type, a shape and strides.

This module needs neither package: it recognises arrays by their attributes. NumPy lacks bf16. With ml_dtypes, bf16 arrays
have its type. Without ml_dtypes they are uint16 with the same bits, and a mark in the dtype's metadata. Launches and
`to_float` take any uint16 array as bf16. Conversions refuse uint16 without the mark, because it may hold numbers: see
`bf16_bits`.
"""

import ctypes
import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi
from .errors import ArgumentError
from .values import shown, whole, wholes

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    NumPyArray = numpy.typing.NDArray[Any]
    NumPyDtype = numpy.dtype[Any]

DTYPES = {"f32": _abi.DW_F32, "bf16": _abi.DW_BF16, "fp16": _abi.DW_F16, "i32": _abi.DW_I32, "i64": _abi.DW_I64}
SIZES = {"f32": 4, "bf16": 2, "fp16": 2, "i32": 4, "i64": 8, "u8": 1}
FOUR = ctypes.c_int64 * 4
FLOATS = ("f32", "bf16", "fp16")
# Names of element types in other packages.
ALIASES = {"float32": "f32", "bfloat16": "bf16", "uint16": "bf16", "float16": "fp16", "int32": "i32", "int64": "i64",
           "uint8": "u8", "bool": "u8", "bool_": "u8"}
# The metadata of a uint16 dtype whose numbers are the bits of bf16.
BITS_OF = {"bits_of": "bf16"}


def dtype_name(dtype: Any, name: str = "dtype", allowed: Sequence[str] = tuple(SIZES)) -> str:
    """This package's name of an element type: `dtype` is a NumPy or torch dtype, a class of scalars, or a name. Errors name
    the argument `name` and the `allowed` types."""
    try:
        found = _dtype_name(dtype)
    except Exception:  # no hash, or an error of the caller's class
        found = None
    if found is None or found not in allowed:
        # A dtype has a size, a word has none.
        was = dtype if hasattr(dtype, "itemsize") else shown(dtype)
        raise ArgumentError(f"{name}: {'' if name == 'dtype' else 'dtype '}{was}; it must be one of {', '.join(allowed)}")
    return found


@functools.lru_cache(maxsize=None)
def _dtype_name(dtype: Any) -> Optional[str]:
    if isinstance(dtype, type):
        word = dtype.__name__  # numpy.float16, ml_dtypes.bfloat16
    elif not getattr(dtype, "isnative", True):
        return None  # numbers in the other byte order
    else:
        word = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    word = ALIASES.get(word, word)
    return word if word in SIZES else None


class Array(NamedTuple):
    """A view of device memory. Strides are in elements. `array` makes and checks one."""

    address: int
    dtype: str
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]

    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides))
        return (last + 1) * SIZES[self.dtype]

    def is_dense(self) -> bool:
        """Whether elements follow one another. The stride of a dimension of length 1 does not count."""
        return 0 in self.shape or all(n == 1 or stride == wanted
                                      for n, stride, wanted in zip(self.shape, self.strides, dense(self.shape)))

    def has_negative_strides(self) -> bool:
        return 0 not in self.shape and any(n > 1 and stride < 0 for n, stride in zip(self.shape, self.strides))


def dense(shape: Sequence[int]) -> Tuple[int, ...]:
    """Strides of an array without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def dimensions(name: str, shape: Any) -> Tuple[int, ...]:
    """A shape as a tuple of whole numbers. One number is the shape of a vector."""
    try:
        shape = (operator.index(shape),)
    except Exception:  # not one number; torch raises its own kinds of errors
        pass
    return tuple(wholes(name, shape, 64, least=0))


def array(address: int, dtype: Any, shape: Union[int, Sequence[int]], strides: Optional[Sequence[int]] = None) -> Array:
    """A tensor at an address of device memory. `strides` are in elements; without them the tensor is dense."""
    shape = dimensions("shape", shape)
    strides = dense(shape) if strides is None else tuple(wholes("strides", strides, 64))
    if len(strides) != len(shape):
        raise ArgumentError(f"strides: {shown(strides)}; there must be one for each dimension of the shape {list(shape)}")
    return Array(whole("address", address, 64, least=0), dtype_name(dtype), shape, strides)


def is_torch(x: Any) -> bool:
    """Whether `x` is a torch tensor."""
    return hasattr(x, "data_ptr")


def describe(name: str, x: Any, allowed: Sequence[str] = tuple(SIZES)) -> Array:
    """An argument as an `Array`. Errors name it `name`, and the `allowed` types."""
    if isinstance(x, Array):
        try:
            return array(*x)  # checked again: callers can make an Array without `array`
        except ArgumentError as problem:
            raise ArgumentError(f"{name}: {problem}") from None
    if is_torch(x):
        try:
            x.is_cuda  # says where it is: tensors of other packages have an address, but not this
            return Array(x.data_ptr(), dtype_name(x.dtype, name, allowed), tuple(x.shape), tuple(x.stride()))
        except ArgumentError:
            raise
        except Exception as problem:  # storages, sparse and fake tensors, and tensors of other packages
            was = f"a {type(x).__name__} without addresses of elements ({problem})"
            raise ArgumentError(f"{name}: {was}; it must be a strided tensor") from None
    # NumPy scalars have an array interface too; memory that is no array has no dtype.
    if not hasattr(x, "__array_interface__") or not hasattr(x, "dtype"):
        raise ArgumentError(f"{name}: a {type(x).__name__}; it must be an array or a tensor")
    dtype = dtype_name(x.dtype, name, allowed)
    try:
        address, itemsize, shape, steps = x.__array_interface__["data"][0], x.itemsize, tuple(x.shape), tuple(x.strides)
    except Exception as problem:  # what a caller's class lacks
        raise ArgumentError(f"{name}: a {type(x).__name__} ({problem}); it must be an array or a tensor") from None
    if any(step % itemsize for step in steps):
        raise ArgumentError(f"{name}: strides of {steps} bytes; they must be multiples of the {itemsize} bytes of an "
                            "element")
    return Array(address, dtype, shape, tuple(step // itemsize for step in steps))


@functools.lru_cache(maxsize=4096)
def _of_shape(dtype: str, shape: Tuple[int, ...], strides: Tuple[int, ...]) -> _abi.dw_tensor:
    """A `dw_tensor` without an address. Most launches have the shapes of the one before."""
    return _abi.dw_tensor(dtype=DTYPES[dtype], rank=len(shape), shape=FOUR(*shape), strides=FOUR(*strides))


def tensor_struct(name: str, a: Array) -> _abi.dw_tensor:
    """A `dw_tensor` of an `Array`."""
    if a.dtype not in FLOATS or len(a.shape) > 4:
        allowed = "it must be f32, bf16 or fp16, of at most 4 dimensions"
        raise ArgumentError(f"{name}: {a.dtype} of shape {list(a.shape)}; {allowed}")
    made = _abi.dw_tensor.from_buffer_copy(_of_shape(a.dtype, a.shape, a.strides))
    made.data = a.address
    return made


def lengths_struct(name: str, a: Array) -> _abi.dw_lengths:
    """A `dw_lengths` of an `Array` on the device."""
    if a.dtype not in ("i32", "i64") or len(a.shape) != 1 or not a.is_dense():
        raise ArgumentError(f"{name}: {a.dtype} of shape {list(a.shape)}; it must be a dense vector of i32 or i64")
    return _abi.dw_lengths(data=a.address, entries=a.shape[0], dtype=DTYPES[a.dtype])


def host_lengths(cu_seqlens: Any) -> _abi.dw_lengths:
    """A `dw_lengths` of numbers on the host: a list, a NumPy array, a CPU tensor. It keeps the memory that it points
    to."""
    entries = wholes("cu_seqlens", cu_seqlens, 64)
    lengths = _abi.dw_lengths(data=ctypes.addressof(entries), entries=len(entries), dtype=_abi.DW_I64)
    lengths.entries_of_host = entries
    return lengths


def bf16_dtype() -> "NumPyDtype":
    """The NumPy dtype of bf16: ml_dtypes' type, or uint16 with the mark."""
    import numpy

    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return numpy.dtype(numpy.uint16, metadata=BITS_OF)
    return numpy.dtype(bfloat16)


def is_bf16(dtype: Any) -> bool:
    """Whether a NumPy dtype is bf16: ml_dtypes' type, or uint16 with the mark."""
    return dtype.name == "bfloat16" or (dtype.metadata or {}).items() >= BITS_OF.items()


def bf16_bits(bits: "NumPyArray") -> "NumPyArray":
    """A bf16 view of a uint16 array that holds the bits of bf16. Copies nothing."""
    import numpy

    if not isinstance(bits, numpy.ndarray) or bits.dtype.newbyteorder("=") != numpy.uint16 and not is_bf16(bits.dtype):
        was = bits.dtype if isinstance(bits, numpy.ndarray) else f"a {type(bits).__name__}"
        raise ArgumentError(f"bits: {was}; it must be a NumPy array of uint16")
    return bits.astype(bits.dtype.newbyteorder("="), copy=False).view(bf16_dtype())


def numpy_dtype(dtype: Any) -> "NumPyDtype":
    """The NumPy dtype of an element type."""
    import numpy

    name = dtype_name(dtype)
    if name == "bf16":
        return bf16_dtype()
    return numpy.dtype({"f32": "float32", "fp16": "float16", "i32": "int32", "i64": "int64", "u8": "uint8"}[name])


def numbers(name: str, values: Any) -> "NumPyArray":
    """A NumPy array of real numbers in this machine's byte order, from an array, a tensor or nested lists."""
    import numpy

    if is_torch(values):
        try:
            values = values.detach().cpu()
            # NumPy has no bf16.
            values = values.float() if _dtype_name(values.dtype) == "bf16" else values
        except (AttributeError, RuntimeError) as problem:
            raise ArgumentError(f"{name}: a {type(values).__name__} ({problem}); it must be numbers") from None
    try:
        values = numpy.asarray(values)
    except Exception as problem:  # raised by a caller's object, or by lists of several lengths
        raise ArgumentError(f"{name}: {shown(values)}; it must be numbers in an array or in lists of one length "
                            f"({problem})") from None
    if values.dtype.kind not in "biuf" and not is_bf16(values.dtype):
        raise ArgumentError(f"{name}: dtype {values.dtype}; it must be real numbers of at most 64 bits")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def converted(name: str, values: Any, dtype: Optional[str] = None) -> "NumPyArray":
    """A dense NumPy array of `values`, converted to `dtype`.

    Floats round to nearest, and to infinity where they are too large, as in NumPy. A whole-number type refuses numbers
    that it cannot hold. Without a dtype f64 becomes f32 and other types stay: uint16 holds bits of bf16.
    """
    import numpy

    values = numbers(name, values)
    if dtype is None:
        dtype = "f32" if values.dtype == numpy.float64 else dtype_name(values.dtype, name)
        values = bf16_bits(values) if values.dtype == numpy.uint16 else values
    if is_bf16(values.dtype):
        if dtype == "bf16":
            return numpy.asarray(values.view(bf16_dtype()), order="C")
        values = to_float(values)
    elif values.dtype == numpy.uint16 and dtype in FLOATS:
        raise ArgumentError(f"{name}: dtype uint16, which may be numbers or bits of bf16; deltawave.bf16_bits({name}) says "
                            f"that they are bits, {name}.astype('f4') that they are numbers")
    if dtype not in FLOATS:
        return _whole_numbers(name, values, dtype)
    with numpy.errstate(over="ignore", under="ignore"):
        if dtype != "bf16":
            return numpy.asarray(values, dtype=numpy_dtype(dtype), order="C")
        values = numpy.asarray(values, dtype=numpy.float32, order="C")
    bits = values.view(numpy.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(numpy.uint16)
    rounded = numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), rounded)
    return rounded.view(bf16_dtype())


def _whole_numbers(name: str, values: "NumPyArray", dtype: str) -> "NumPyArray":
    """Numbers converted to a whole-number type, which must hold all of them."""
    import numpy

    to = numpy_dtype(dtype)
    limits = numpy.iinfo(to)
    wrong = None
    if values.dtype.kind == "f":
        with numpy.errstate(invalid="ignore"):
            wrong = ~(numpy.isfinite(values) & (numpy.trunc(values) == values))
    if values.size and (wrong is None or not wrong.any()):
        # Compared as Python numbers: limits of 64 bits have no exact float.
        for extreme in (values.argmin(), values.argmax()):
            if not limits.min <= int(values.flat[extreme]) <= limits.max:
                wrong = numpy.zeros(values.shape, bool)
                wrong.flat[extreme] = True
                break
    if wrong is not None and wrong.any():
        at = numpy.unravel_index(int(wrong.argmax()), values.shape)
        where = f" at {[int(i) for i in at]}" if at else ""
        raise ArgumentError(f"{name}: {values[at]}{where}; {dtype} holds whole numbers from {limits.min} to {limits.max}")
    return numpy.asarray(values, dtype=to, order="C")


def to_bf16(values: Any) -> "NumPyArray":
    """A NumPy array rounded to bf16: to nearest, ties to even. NaN stays NaN."""
    return converted("values", values, "bf16")


def to_float(values: Any) -> "NumPyArray":
    """A NumPy array of real numbers as f32. A uint16 array counts as bits of bf16."""
    import numpy

    values = numbers("values", values)
    if values.dtype != numpy.uint16 and not is_bf16(values.dtype):
        with numpy.errstate(over="ignore", under="ignore"):
            return values.astype(numpy.float32)
    bits = numpy.asarray(values, order="C").view(numpy.uint16)
    # A plain 16 would make 64 bits of an array without dimensions.
    return (bits.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)
