"""Structs of the C library filled from keyword arguments. Fields have the header's names, and arrays become what a field
of their name wants: tensors, lengths, vectors."""

import ctypes
import functools
from ctypes import POINTER

from . import _abi, arrays
from .errors import ArgumentError
from .values import choice, number

# Words for the numbers of fields that are choices.
HEAD_MAPS = {"grouped": _abi.DW_HEADS_GROUPED, "tiled": _abi.DW_HEADS_TILED}
STATE_LAYOUTS = {"key_major": _abi.DW_STATE_KEY_MAJOR, "value_major": _abi.DW_STATE_VALUE_MAJOR}

# Fields that are vectors in memory of the device, and their types.
VECTORS = {"has_initial_state": "u8", "slots": "i32", "write_slots": "i32", "snapshot_slots": "i32", "accepted": "i32"}


def spec(struct, choices, **values):
    """A struct of numbers and words. None is 0, which the header gives a meaning."""
    made, kinds, choices = struct(), fields(struct), {"dtype": arrays.DTYPES, **choices}
    for name, value in values.items():
        if name in choices:
            setattr(made, name, choice(name, value, choices[name]))
        elif value is not None:
            setattr(made, name, number(name, value, kinds[name]))
            if name == "scale" and made.scale == 0 and value != 0:
                raise ArgumentError(f"scale: {value!r}; it must not round to 0 in f32; 0 and None are K ** -0.5")
    return made


@functools.lru_cache(maxsize=None)
def fields(struct):
    """What callers may set, and its type."""
    return {name: kind for name, kind in struct._fields_ if name != "size" and not name.startswith("pad")}


def tensors(struct, choices, context, entries, values):
    """A struct of a launch's tensors. It keeps what it points to, but for the arrays' memory. `entries` says how many a
    vector has."""
    made, kept, kinds = struct(), [], fields(struct)
    for name, value in values.items():
        if name not in kinds:
            raise TypeError(f"{struct.__name__} has no {name!r}")
        if value is None:
            continue
        kind = kinds[name]
        if kind is POINTER(_abi.dw_tensor):
            value = arrays.tensor_struct(name, context.describe(name, value))
        elif kind is POINTER(_abi.dw_lengths):
            value = arrays.lengths_struct(name, context.describe(name, value))
        elif name in VECTORS:
            value = vector(name, context.describe(name, value), entries(name))
        elif name in choices:
            value = choice(name, value, choices[name])
        else:
            value = number(name, value, kind)
        if isinstance(value, ctypes.Structure):
            kept.append(value)
            value = ctypes.pointer(value)
        setattr(made, name, value)
    made.kept = kept
    return made


def vector(name, a, entries):
    """The address of a vector of the device."""
    if a.dtype != VECTORS[name] or a.shape != (entries,) or not a.is_dense():
        allowed = f"it must be a dense vector of {entries} {VECTORS[name]}"
        raise ArgumentError(f"{name}: {a.dtype} of shape {list(a.shape)}; {allowed}")
    return a.address
