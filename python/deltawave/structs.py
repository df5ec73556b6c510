"""C structs filled from keyword arguments. Keywords are the header's field names. An array becomes the type of its field: a
tensor, lengths or a vector."""

import ctypes
import functools
from ctypes import POINTER, byref
from typing import Any, Callable, Collection, Dict, Mapping, Set, TYPE_CHECKING, Tuple, Type, TypeVar, Union

from . import _abi, arrays
from .errors import ArgumentError
from .values import choice, number, scale, shown, whole

if TYPE_CHECKING:
    from .context import Context

Struct = TypeVar("Struct", bound=ctypes.Structure)
# Types of fields that are arrays.
TENSOR, LENGTHS = POINTER(_abi.dw_tensor), POINTER(_abi.dw_lengths)

# Words for the constants of fields that are choices.
HEAD_MAPS = {"grouped": _abi.DW_HEADS_GROUPED, "tiled": _abi.DW_HEADS_TILED}
PATHS = {"auto": _abi.DW_PATH_AUTO, "fused": _abi.DW_PATH_FUSED, "split": _abi.DW_PATH_SPLIT,
         "short": _abi.DW_PATH_SHORT}
SAVES = {"nothing": _abi.DW_SAVE_NOTHING, "boundaries": _abi.DW_SAVE_BOUNDARIES}
STATE_LAYOUTS = {"key_major": _abi.DW_STATE_KEY_MAJOR, "value_major": _abi.DW_STATE_VALUE_MAJOR}

# Fields that are vectors in device memory, and their element types.
VECTORS = {"has_initial_state": "u8", "slots": "i32", "write_slots": "i32", "snapshot_slots": "i32", "accepted": "i32",
           "draft_slots": "i32", "read_slots": "i32"}


# Fields that launches write, by struct.
WRITTEN: Dict[Type[ctypes.Structure], Set[str]] = {
    _abi.dw_prefill_tensors: {"o", "final_state", "pool", "snapshots"},
    _abi.dw_prefill_backward_tensors: {"d_q", "d_k", "d_v", "d_g", "d_beta", "d_a_log", "d_dt_bias", "d_initial_state"},
    _abi.dw_gate_tensors: {"g", "beta"},
    _abi.dw_gate_backward_tensors: {"d_a", "d_b", "d_a_log", "d_dt_bias"},
    _abi.dw_conv_backward_tensors: {"d_x", "d_x_q", "d_x_k", "d_x_v", "d_weight", "d_bias", "d_initial_state"},
    _abi.dw_norm_backward_tensors: {"d_x", "d_z", "d_weight"},
    _abi.dw_conv_tensors: {"q", "k", "v", "g", "beta", "state"},
    _abi.dw_decode_tensors: {"o", "pool", "states"},
    _abi.dw_commit_tensors: {"pool", "conv_state"},
    _abi.dw_norm_tensors: {"y"},
    _abi.dw_layer_tensors: {"y", "o", "pool", "conv_state"},
    _abi.dw_layer_backward_tensors: {"d_x", "d_x_q", "d_x_k", "d_x_v", "d_z", "d_a", "d_b", "d_conv_weight", "d_conv_bias",
                                     "d_a_log", "d_dt_bias", "d_norm_weight", "d_initial_conv_state", "d_initial_state"},
}


def spec(struct: Type[Struct], choices: Mapping[str, Mapping[str, int]], **values: Any) -> Struct:
    """A spec struct of numbers and words. None becomes 0, the default of the field."""
    made, kinds = struct(), fields(struct)
    for name, value in values.items():
        if name == "dtype":
            made.dtype = arrays.DTYPES[arrays.dtype_name(value, allowed=("bf16", "fp16"))]
        elif name in choices:
            setattr(made, name, choice(name, value, choices[name]))
        elif name == "save":
            made.save = _save(value)
        elif value is not None:
            setattr(made, name, scale(value) if name == "scale" else _of_spec(name, value, kinds[name]))
    return made


def _of_spec(name: str, value: Any, kind: Any) -> Union[int, float]:
    """A number of a spec. Numbers of segments and of compute units are not negative."""
    if name in ("segments", "compute_units"):
        return whole(name, value, 8 * ctypes.sizeof(kind), 0)
    return number(name, value, kind)


def _save(value: Any) -> int:
    """The number of a spec's `save`: a word, or tokens of a round, whose small numbers are words in C."""
    if isinstance(value, str):
        return choice("save", value, SAVES)
    tokens = number("save", value, ctypes.c_int32)
    if tokens < 64:
        raise ArgumentError(f"save: {tokens}; it must be one of {', '.join(SAVES)}, or a positive multiple of 64")
    return int(tokens)


def made(value: Any, kind: Type[Any]) -> Any:
    """A pointer to the C struct of a caller's spec."""
    if not isinstance(value, kind):
        raise ArgumentError(f"spec: {shown(value)}; it must be a {kind.__name__}")
    return byref(value.struct())


@functools.lru_cache(maxsize=None)
def fields(struct: Type[ctypes.Structure]) -> Dict[str, Any]:
    """Fields that callers may set, and their types."""
    return {name: kind for name, kind, *_ in struct._fields_ if name != "size" and not name.startswith("pad")}


def tensors(struct: Type[Struct], choices: Mapping[str, Mapping[str, int]], context: "Context",
            entries: Callable[[str], int], values: Mapping[str, Any], unwritten: Collection[str] = ()) -> Struct:
    """A struct of a launch's tensors. It keeps the structs that it points to, not the memory of the arrays. `entries(name)`
    is the number of entries of a vector. `unwritten` names the outputs that this launch does not write."""
    made, kept, kinds = struct(), [], fields(struct)
    for name, value in values.items():
        if name not in kinds:
            raise ArgumentError(f"{name}: no argument of this launch; it must be one of {', '.join(kinds)}")
        if value is None:
            continue
        kind = kinds[name]
        if name in WRITTEN[struct] and name not in unwritten and is_read_only(value):
            raise ArgumentError(f"{name}: a read-only array; it must be writable")
        if kind is TENSOR:
            value = arrays.tensor_struct(name, context.describe(name, value, arrays.FLOATS))
        elif kind is LENGTHS:
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


def no_vectors(name: str) -> int:
    """The entries of a vector, for launches that take none."""
    raise AssertionError(name)


def with_null_slot(tensors: Mapping[str, Any]) -> Dict[str, Any]:
    """`tensors` with the field that says whether there is a null slot."""
    return {**tensors, "has_null_slot": 1} if tensors.get("null_slot") is not None else dict(tensors)


def is_read_only(x: Any) -> bool:
    """Whether a NumPy array is read-only. Other arrays do not tell."""
    return getattr(getattr(x, "flags", None), "writeable", True) is False


def vector(name: str, a: arrays.Array, entries: Any) -> int:
    """The address of a vector on the device, of the type that `name` has."""
    return dense_vector(name, a, entries, VECTORS[name])


def dense_vector(name: str, a: arrays.Array, entries: Any, dtype: str) -> int:
    """The address of a vector on the device. `entries`: how many it has, or rows and columns of a table. Columns None: any
    number of them."""
    kind = "vector"
    wanted: Tuple[Any, ...] = (entries,)
    if isinstance(entries, tuple):
        kind, (entries, columns) = "table", entries
        wanted = (entries, columns or a.shape[-1] if a.shape else 1)
        entries = f"{entries} rows and {columns or 'some'} columns of"
    if a.dtype != dtype or a.shape != wanted or 0 in wanted[1:] or not a.is_dense():
        allowed = f"it must be a dense {kind} of {entries} {dtype}"
        raise ArgumentError(f"{name}: {a.dtype} of shape {list(a.shape)}; {allowed}")
    return a.address
