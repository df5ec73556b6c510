"""What can go wrong: the statuses of the C library as exceptions, with its text."""

from . import _abi


class Error(Exception):
    """Any error of this package."""


class LibraryError(Error, OSError):
    """libdeltawave_c.so was not found, cannot be loaded, or is of another version."""


class ArgumentError(Error, ValueError):
    """An argument was refused. The text begins with its name; nothing was enqueued or written."""


class DeviceError(Error, RuntimeError):
    """There is no runtime, no such device, or there are no kernels for it."""


class DriverError(Error, RuntimeError):
    """A call of the device's runtime failed."""


class InternalError(Error, RuntimeError):
    """A bug of the library."""


OF_STATUS = {
    _abi.DW_ERROR_ARGUMENT: ArgumentError,
    _abi.DW_ERROR_DEVICE: DeviceError,
    _abi.DW_ERROR_RUNTIME: DriverError,
    _abi.DW_ERROR_INTERNAL: InternalError,
}
