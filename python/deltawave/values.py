"""Checks of callers' numbers and words. ctypes would silently cut numbers to the bits of a field."""

import ctypes
import numbers
import operator
from typing import Any, Mapping, Optional, TypeVar, Union

from .errors import ArgumentError

Choice = TypeVar("Choice")
INTEGERS: Mapping[int, Any] = {32: ctypes.c_int32, 64: ctypes.c_int64}


def shown(value: object) -> str:
    """A value for an error's text, cut to 500 characters."""
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, or an error of the caller's class
        return f"a {type(value).__name__}"
    return text if len(text) <= 500 else f"{text[:500]}..."


def _no_bits(value: Any) -> Any:
    """A value, unless it is an array that holds the bits of bf16: they are other numbers."""
    if (getattr(getattr(value, "dtype", None), "metadata", None) or {}).get("bits_of"):
        raise TypeError
    return value


def whole(name: str, value: Any, bits: int, least: Optional[int] = None) -> int:
    """A Python int from a whole number of Python, NumPy or torch. It must fit `bits` with sign, and be at least `least`."""
    try:
        number = operator.index(_no_bits(value))
    except Exception:  # torch raises its own kinds of errors for tensors that are no number
        raise ArgumentError(f"{name}: {shown(value)}; it must be a whole number") from None
    end = 1 << (bits - 1)
    start = -end if least is None else least
    if not start <= number < end:
        raise ArgumentError(f"{name}: {shown(number)}; it must be a whole number from {start} to {end - 1}")
    return number


def wholes(name: str, values: Any, bits: int, least: Optional[int] = None) -> "ctypes.Array[Any]":
    """A ctypes array from whole numbers on the host: a list, a NumPy array, a tensor."""
    try:
        if isinstance(values, (str, bytes, bytearray, dict)):
            raise TypeError  # letters and keys are no numbers
        values = list(values.tolist() if hasattr(values, "tolist") else values)
    except Exception:  # raised by the caller's object, or by the copy of a tensor
        raise ArgumentError(f"{name}: {shown(values)}; it must be a list of whole numbers") from None
    made: "ctypes.Array[Any]" = (INTEGERS[bits] * len(values))(*(whole(name, value, bits, least) for value in values))
    return made


def address(name: str, value: Any) -> Union[None, int, ctypes.c_void_p]:
    """An address of 64 bits: None, a whole number or a `ctypes.c_void_p`."""
    if value is None or isinstance(value, ctypes.c_void_p):
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except Exception:
        number = None
    if number is None or not 0 <= number < 1 << 64:
        raise ArgumentError(f"{name}: {shown(value)}; it must be an address, from 0 to {(1 << 64) - 1}")
    return number


def single(name: str, value: Any) -> float:
    """A number rounded to f32."""
    try:
        # Python's and NumPy's complex numbers would lose a part.
        if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
            raise TypeError
        return ctypes.c_float(_no_bits(value)).value
    except Exception:
        raise ArgumentError(f"{name}: {shown(value)}; it must be a number") from None


def positive(name: str, value: Any) -> float:
    """A number rounded to f32, there positive and normal."""
    rounded = single(name, value)
    if not 2.0**-126 <= rounded < float("inf"):
        raise ArgumentError(f"{name}: {shown(value)}; it must be a positive, normal number")
    return rounded


def scale(value: Any) -> float:
    """`scale` rounded to f32. 0 means the default, as in C, so a nonzero scale that rounds to 0 is refused."""
    rounded = single("scale", value)
    if rounded == 0 and value != 0:
        allowed = "it must not round to 0 in f32: 0 and None mean K ** -0.5"
        raise ArgumentError(f"scale: {shown(value)}; {allowed}")
    return rounded


def number(name: str, value: Any, kind: Any) -> Union[int, float]:
    """A number for a field of a ctypes type. Addresses and sizes are at most 2^63 - 1."""
    if kind is ctypes.c_float:
        return single(name, value)
    return whole(name, value, 8 * ctypes.sizeof(kind), 0 if kind in (ctypes.c_void_p, ctypes.c_size_t) else None)


def choice(name: str, value: Any, choices: Mapping[str, Choice]) -> Choice:
    """The constant of a word."""
    try:
        return choices[value]
    except Exception:  # unknown, or without a hash
        raise ArgumentError(f"{name}: {shown(value)}; it must be one of {', '.join(choices)}") from None
