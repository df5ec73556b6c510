"""As much of torch as `deltawave.ops` uses, on NumPy: tests of what needs no kernel of torch's run where it is not
installed. Tensors are of the CPU, or say that they are of another device; bf16 is kept as its bits."""

import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np

import deltawave as dw


class dtype:
    """An element type, which prints as torch's do and has no name."""

    def __init__(self, name, numpy, itemsize):
        self.word, self.numpy, self.itemsize = name, np.dtype(numpy), itemsize

    def __repr__(self):
        return f"torch.{self.word}"


float32, float64, float16 = dtype("float32", "f4", 4), dtype("float64", "f8", 8), dtype("float16", "f2", 2)
bfloat16, int32, int64 = dtype("bfloat16", "u2", 2), dtype("int32", "i4", 4), dtype("int64", "i8", 8)
uint8, bool_, complex64 = dtype("uint8", "u1", 1), dtype("bool", "?", 1), dtype("complex64", "c8", 8)


class device:
    def __init__(self, kind):
        if isinstance(kind, device):
            self.type, self.index = kind.type, kind.index
        elif isinstance(kind, str) and kind.partition(":")[0] in ("cpu", "cuda", "meta"):
            self.type, _, index = kind.partition(":")
            self.index = int(index) if index else None
        else:
            raise RuntimeError(f"Invalid device string: {kind!r}")

    def __eq__(self, other):
        return (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))

    def __repr__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor:
    def __init__(self, values, dtype, where="cpu"):
        self.values, self.dtype, self.device = values, dtype, device(where)

    shape = property(lambda self: self.values.shape)
    is_cuda = property(lambda self: self.device.type == "cuda")

    def dim(self):
        return self.values.ndim

    def data_ptr(self):
        return self.values.ctypes.data

    def stride(self):
        return tuple(step // self.dtype.itemsize for step in self.values.strides)

    def tolist(self):
        return self.values.tolist()

    def copy_(self, other):
        self.values[...] = other.values
        return self

    def _of(self, values):
        return Tensor(values, self.dtype, self.device)

    def view(self, *shape):
        return self._of(self.values.reshape(shape[0] if isinstance(shape[0], tuple) else shape))

    reshape = view

    def flatten(self, first, last):
        shape = self.shape
        return self._of(self.values.reshape(*shape[:first], -1, *shape[last + 1:]))

    def squeeze(self, at):
        return self._of(self.values.squeeze(at)) if self.dim() and self.shape[at] == 1 else self

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(dw.to_float(self.values), float32)

    def __array__(self, dtype=None, copy=None):
        if self.dtype is bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


def empty(shape, dtype, device="cpu"):
    return Tensor(np.empty(shape, dtype.numpy), dtype, device)


def tensor(values, dtype):
    """A tensor of the CPU."""
    values = dw.to_bf16(values).view(np.uint16) if dtype is bfloat16 else np.array(values, dtype.numpy)
    return Tensor(values, dtype)


def frombuffer(buffer, dtype, count):
    return Tensor(np.frombuffer(buffer, dtype.numpy, count), dtype)


def custom_op(name, mutates_args):
    """The function itself, and what was registered as its fake one."""
    def made(function):
        def register_fake(fake):
            function.fake = fake
            return fake

        function.register_fake = register_fake
        function.register_autograd = lambda backward, setup_context: None
        return function

    return made


def modules():
    """What `import torch` finds."""
    made = types.ModuleType("torch")
    for name in ("Tensor", "dtype", "device", "empty", "tensor", "frombuffer", "float32", "float64", "float16",
                 "bfloat16", "int32", "int64", "uint8", "complex64"):
        setattr(made, name, globals()[name])
    made.library = types.SimpleNamespace(custom_op=custom_op)
    made.version = types.SimpleNamespace(hip=None)
    made.cuda = types.SimpleNamespace(is_available=lambda: False)
    return {"torch": made}


def ops():
    """A module of its own made of `deltawave.ops`, whose torch is this one; the real ones stay."""
    name = "deltawave.ops_on_a_stand_in"
    path = Path(dw.__file__).with_name("ops.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {**modules(), name: module}):
        spec.loader.exec_module(module)
    return module
