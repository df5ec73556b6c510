"""Search for libdeltawave_c.so, and calls of its functions."""

import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import Any, Optional, Tuple, Union

from . import _abi
from .errors import OF_STATUS, ArgumentError, InternalError, LibraryError
from .values import shown

NAME = "libdeltawave_c.so"
HERE = Path(__file__).resolve().parent


def find() -> Path:
    """The path of the library: DELTAWAVE_C_LIBRARY, else beside this package, else in target/release of the repository
    that contains the package. The library that DELTAWAVE_C_LIBRARY names must exist."""
    named = os.environ.get("DELTAWAVE_C_LIBRARY")
    if named:
        return Path(named)
    for path in (HERE / NAME, HERE.parents[1] / "target/release" / NAME):
        if path.exists():
            return path
    raise LibraryError(f"{NAME} is neither beside {HERE} nor in target/release: cargo build --release -p deltawave-c "
                       "makes it, and DELTAWAVE_C_LIBRARY says where it is")


class Library:
    """The functions of include/deltawave.h. `call` raises an exception if a function returns an error."""

    def __init__(self, path: "Optional[Union[str, os.PathLike[str]]]" = None) -> None:
        try:
            self.path = find() if path is None else Path(path)
        except TypeError:
            raise ArgumentError(f"path: {shown(path)}; it must be a path") from None
        try:
            self.c = ctypes.CDLL(str(self.path))
            for name, (result, parameters) in _abi.FUNCTIONS.items():
                function = getattr(self.c, name)
                function.restype, function.argtypes = result, parameters
        except (OSError, AttributeError, ValueError) as problem:
            raise LibraryError(f"{self.path}: {problem}") from problem
        version = self.c.dw_abi_version()
        if version != _abi.DW_ABI_VERSION:
            raise LibraryError(f"{self.path} has ABI version {version}, this package is for {_abi.DW_ABI_VERSION}")

    def version(self) -> str:
        """The library's version."""
        return str(self.c.dw_version().decode())

    def archs(self) -> Tuple[str, ...]:
        """The architectures that the library has kernels for: `("gfx942", "sm_90a")`."""
        listed: str = self.c.dw_archs().decode()
        return tuple(listed.split(",")) if listed else ()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns a status."""
        try:
            status = getattr(self.c, name)(*arguments)
        except (AttributeError, TypeError, ctypes.ArgumentError) as problem:  # no such function, or wrong arguments
            raise ArgumentError(f"{name}: {problem}") from None
        if status != _abi.DW_OK:
            text = self.c.dw_last_error().decode(errors="replace")
            raise OF_STATUS.get(status, InternalError)(text)


_lock = threading.Lock()


@functools.lru_cache(maxsize=None)
def _default() -> Library:
    return Library()


def default() -> Library:
    """The library that `find` finds, loaded once, whichever thread asks first."""
    with _lock:
        return _default()
