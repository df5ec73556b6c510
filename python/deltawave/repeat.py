"""Launches like earlier ones. A decode step launches the same plans on tensors of the same layouts again and again: the
structs of the step before are right but for their addresses."""

import sys
from ctypes import POINTER, Structure
from typing import TYPE_CHECKING, Any, Dict, Hashable, List, Mapping, NamedTuple, Optional, Tuple

from . import _abi, arrays

if TYPE_CHECKING:
    from .context import Context

# Types of fields that point to structs with an address.
POINTERS = (POINTER(_abi.dw_tensor), POINTER(_abi.dw_lengths))


class Repeat(NamedTuple):
    """A filled struct. `targets` says for each tensor its name, the struct that holds its address (None: the field does),
    and its bytes."""

    arguments: Structure
    targets: List[Tuple[str, Any, int]]


class Repeats:
    """Filled structs of one kind of launch, by the layouts of their tensors and the values of the other arguments.

    What Python checks of an argument depends on these, except whether the simulator owns the memory, which `take` checks.
    What depends on addresses the library checks at every launch. A struct is here or in use, never both, so threads do not
    share one."""

    MOST = 64

    def __init__(self) -> None:
        self._kept: Dict[Hashable, Repeat] = {}

    @staticmethod
    def key(tensors: Mapping[str, Any]) -> Optional[Hashable]:
        """The layouts and values. None: a launch with these arguments is not kept."""
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        kinds = (torch.Tensor, torch.nn.Parameter)
        parts: List[Any] = [tuple(tensors)]
        for x in tensors.values():
            kind = type(x)
            if kind in kinds:
                try:
                    parts.append((x.dtype, x.shape, x.stride(), x.device))
                except Exception:  # a layout without strides
                    return None
            elif x is None:
                parts.append(None)
            elif kind in (bool, int, float, str):
                parts.append((kind, x))
            else:
                return None
        return tuple(parts)

    def take(self, key: Optional[Hashable], context: "Context", tensors: Mapping[str, Any]) -> Optional[Repeat]:
        """A struct with the addresses of these tensors, to `give` back after the launch. None: there is none."""
        found = None if key is None else self._kept.pop(key, None)
        if found is None:
            return None
        arguments = found.arguments
        for name, target, extent in found.targets:
            try:
                address = tensors[name].data_ptr()
            except RuntimeError:  # no memory
                return None
            if context.is_simulator and extent and not context.memories.contains(address, extent):
                return None
            if target is None:
                setattr(arguments, name, address)
            else:
                target.data = address
        return found

    def give(self, key: Hashable, repeat: Repeat) -> None:
        """Keeps a struct that is no longer in use."""
        if len(self._kept) >= self.MOST:
            self._kept.clear()
        self._kept[key] = repeat

    def keep(self, key: Hashable, arguments: Structure, tensors: Mapping[str, Any]) -> None:
        """Keeps the struct of a launch on these tensors."""
        self.give(key, Repeat(arguments, targets_of(arguments, tensors)))


def targets_of(arguments: Structure, tensors: Mapping[str, Any]) -> List[Tuple[str, Any, int]]:
    """Where addresses of tensors are in a filled struct, as `Repeat` has them."""
    kinds, targets = dict(field[:2] for field in type(arguments)._fields_), []
    for name, x in tensors.items():
        if arrays.is_torch(x):
            target = getattr(arguments, name).contents if kinds[name] in POINTERS else None
            targets.append((name, target, arrays.describe(name, x).extent()))
    return targets
