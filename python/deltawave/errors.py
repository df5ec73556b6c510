"""Exceptions for the error statuses of the C library, with its error texts."""

from typing import Dict, Type

from . import _abi


class Error(Exception):
    """Any error of this package."""


class LibraryError(Error, OSError):
    """libdeltawave_c.so was not found, cannot be loaded, or has another version."""


class ArgumentError(Error, ValueError):
    """An argument was refused. The text begins with the argument's name. Nothing was enqueued or written."""


class Unsupported(ArgumentError):
    """A valid argument of another package's function that this library cannot serve. The text names the argument."""


class DeviceError(Error, RuntimeError):
    """No runtime, no such device, or no kernels for the device."""


class DriverError(Error, RuntimeError):
    """A call of the device's runtime failed."""


class RanksError(Error, RuntimeError):
    """Ranks differ in layout or spec, a rank did not come in time, or the library of collectives failed."""


class InternalError(Error, RuntimeError):
    """A bug of the library."""


OF_STATUS: Dict[int, Type[Error]] = {
    _abi.DW_ERROR_ARGUMENT: ArgumentError,
    _abi.DW_ERROR_DEVICE: DeviceError,
    _abi.DW_ERROR_RUNTIME: DriverError,
    _abi.DW_ERROR_INTERNAL: InternalError,
    _abi.DW_ERROR_RANKS: RanksError,
}
