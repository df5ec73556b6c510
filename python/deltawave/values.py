"""Numbers and words of callers, checked before ctypes sees them: it would cut off the bits that a field does not have."""

import ctypes
import operator

from .errors import ArgumentError

INTEGERS = {32: ctypes.c_int32, 64: ctypes.c_int64}


def whole(name, value, bits):
    """A whole number that `bits` hold, with a sign; those of NumPy and torch become Python's."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}: {value!r}; it must be a whole number") from None
    end = 1 << (bits - 1)
    if not -end <= number < end:
        raise ArgumentError(f"{name}: {number}; it must be a whole number from {-end} to {end - 1}")
    return number


def wholes(name, values, bits):
    """A ctypes array of whole numbers that the host has: a list, a NumPy array, a tensor."""
    try:
        values = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        raise ArgumentError(f"{name}: {values!r}; it must be a list of whole numbers") from None
    return (INTEGERS[bits] * len(values))(*(whole(name, value, bits) for value in values))


def single(name, value):
    """A number rounded to f32."""
    try:
        return ctypes.c_float(value).value
    except (TypeError, OverflowError):
        raise ArgumentError(f"{name}: {value!r}; it must be a number") from None


def number(name, value, kind):
    """A number for a field of a ctypes type. Addresses and sizes of more than 63 bits there are not."""
    return single(name, value) if kind is ctypes.c_float else whole(name, value, 8 * ctypes.sizeof(kind))


def choice(name, value, choices):
    """The number of a word."""
    try:
        return choices[value]
    except (KeyError, TypeError):  # what has no hash is a TypeError
        raise ArgumentError(f"{name}: {value!r}; it must be one of {', '.join(choices)}") from None
