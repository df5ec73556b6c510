"""As much of torch as `deltawave.ops` uses, on NumPy: tests of what needs no kernel of torch's run where it is not
installed. Tensors are of the CPU, or say that they are of another device; bf16 is kept as its bits."""

import contextlib
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

    requires_grad = False
    layout = "strided"
    _version = 0
    shape = property(lambda self: self.values.shape)
    is_cuda = property(lambda self: self.device.type == "cuda")

    def dim(self):
        return self.values.ndim

    def data_ptr(self):
        return self.values.ctypes.data

    def stride(self, at=None):
        strides = tuple(step // self.dtype.itemsize for step in self.values.strides)
        return strides if at is None else strides[at]

    def tolist(self):
        return self.values.tolist()

    def copy_(self, other):
        self.values[...] = other.values
        return self

    def size(self, at=None):
        return self.shape if at is None else self.shape[at]

    def numel(self):
        return self.values.size

    def contiguous(self):
        return self._of(np.ascontiguousarray(self.values))

    def is_contiguous(self):
        return self.values.flags.c_contiguous

    def clone(self):
        return self._of(self.values.copy())

    def transpose(self, a, b):
        return self._of(self.values.swapaxes(a, b))

    def unsqueeze(self, at):
        return self._of(np.expand_dims(self.values, at))

    def unflatten(self, at, sizes):
        at %= self.dim()
        return self._view(*self.shape[:at], *sizes, *self.shape[at + 1:])

    def split(self, sizes, dim):
        return [self._of(part) for part in np.split(self.values, np.cumsum(sizes)[:-1], axis=dim)]

    def _view(self, *shape):
        """A view, also of a tensor that is not dense: NumPy would copy."""
        made = self.values.view()
        made.shape = shape
        return self._of(made)

    def __getitem__(self, at):
        at = at.values if isinstance(at, Tensor) else at
        return self._of(self.values[at])

    def __setitem__(self, at, value):
        self.values[at] = value.values if isinstance(value, Tensor) else value

    def __len__(self):
        return len(self.values)

    def _compared(self, other, compare):
        return Tensor(compare(self.values, other.values if isinstance(other, Tensor) else other), bool_, self.device)

    def eq(self, other):
        return self._compared(other, np.equal)

    def ne(self, other):
        return self._compared(other, np.not_equal)

    def gt(self, other):
        return self._compared(other, np.greater)

    __gt__, __eq__, __ne__ = gt, eq, ne

    def __ge__(self, other):
        return self._compared(other, np.greater_equal)

    def __lt__(self, other):
        return self._compared(other, np.less)

    def __and__(self, other):
        return self._of(self.values & other.values)

    def __mul__(self, other):
        return self._of(self.values * other)

    __hash__ = object.__hash__

    def __add__(self, other):
        return self._of(self.values + (other.values if isinstance(other, Tensor) else other))

    def __sub__(self, other):
        return self._of(self.values - (other.values if isinstance(other, Tensor) else other))

    def masked_fill(self, mask, value):
        return self._of(np.where(mask.values, np.array(value, self.values.dtype), self.values))

    def cumsum(self, at):
        return Tensor(self.values.cumsum(at, dtype=np.int64), int64, self.device)

    def scatter_(self, at, index, source):
        np.put_along_axis(self.values, index.values, source.values, at)
        return self

    def index_select(self, at, index):
        return self._of(self.values.take(index.values, at))

    def new_empty(self, *shape):
        return empty(shape[0] if isinstance(shape[0], tuple) else shape, self.dtype, self.device)

    def zero_(self):
        self.values[...] = 0
        return self

    def to(self, dtype):
        if dtype is self.dtype:
            return self
        if dtype is bfloat16:
            return Tensor(dw.to_bf16(self.float().values).view(np.uint16), bfloat16, self.device)
        values = self.float().values if self.dtype is bfloat16 else self.values
        return Tensor(values.astype(dtype.numpy), dtype, self.device)

    def as_strided(self, shape, strides):
        """As torch's: from the tensor's first element on, whatever its own shape is."""
        steps = tuple(self.dtype.itemsize * stride for stride in strides)
        return self._of(np.lib.stride_tricks.as_strided(self.values, tuple(shape), steps))

    def _of(self, values):
        return Tensor(values, self.dtype, self.device)

    def index_copy_(self, at, index, source):
        assert at == 0
        self.values[index.values] = source.values
        return self

    def all(self):
        return self.values.all()

    def view(self, *shape):
        if isinstance(shape[0], dtype):
            return Tensor(self.values.view(shape[0].numpy), shape[0], self.device)
        return self._of(self.values.reshape(shape[0] if isinstance(shape[0], tuple) else shape))

    reshape = view

    def flatten(self, first, last=-1):
        shape = self.shape
        first, last = first % self.dim(), last % self.dim()
        return self._of(self.values.reshape(*shape[:first], -1, *shape[last + 1:]))

    def squeeze(self, at):
        return self._of(self.values.squeeze(at)) if self.dim() and self.shape[at] == 1 else self

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return self if self.dtype is float32 else Tensor(dw.to_float(self.values), float32, self.device)

    def __array__(self, dtype=None, copy=None):
        if self.dtype is bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


def empty(shape, dtype, device="cpu"):
    return Tensor(np.empty(shape, dtype.numpy), dtype, device)


def zeros(shape, dtype, device="cpu"):
    return Tensor(np.zeros(shape, dtype.numpy), dtype, device)


def ones(shape, dtype, device="cpu"):
    return Tensor(np.ones(shape, dtype.numpy), dtype, device)


def full(shape, value, dtype, device="cpu"):
    return Tensor(np.full(shape, value, dtype.numpy), dtype, device)


def arange(*numbers, dtype, device="cpu"):
    return Tensor(np.arange(*numbers, dtype=dtype.numpy), dtype, device)


def where(mask, a, b):
    first = a if isinstance(a, Tensor) else b
    values = [np.asarray(x.values if isinstance(x, Tensor) else x, first.values.dtype) for x in (a, b)]
    return first._of(np.where(mask.values, *values))


def div(a, b, rounding_mode):
    assert rounding_mode == "floor"
    return a._of(a.values // b)


def index_select(x, at, index, out):
    return out.copy_(x.index_select(at, index))


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
    for name in ("Tensor", "dtype", "device", "empty", "zeros", "ones", "full", "arange", "where", "div", "index_select",
                 "tensor", "frombuffer", "float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8",
                 "complex64"):
        setattr(made, name, globals()[name])
    made.bool, made.strided = bool_, Tensor.layout
    made.is_grad_enabled = lambda: grad_enabled
    made.compiler = types.SimpleNamespace(is_exporting=lambda: False, is_compiling=lambda: False)
    made.nn = types.SimpleNamespace(Module=object, Parameter=Tensor)
    made.autograd = types.SimpleNamespace(Function=object, forward_ad=types.SimpleNamespace(_current_level=-1))
    made.library = types.SimpleNamespace(custom_op=custom_op)
    made.version = types.SimpleNamespace(hip=None)
    made.cuda = types.SimpleNamespace(is_initialized=lambda: False)
    made.ops = types.SimpleNamespace()
    return {"torch": made}


# Whether autograd would record.
grad_enabled = True


def package(*names):
    """Modules of the package made again by name, in this order, with this torch; the real ones stay."""
    made = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules()))
        for name in names:
            full = f"deltawave.{name}"
            spec = importlib.util.spec_from_file_location(full, Path(dw.__file__).with_name(f"{name}.py"))
            module = importlib.util.module_from_spec(spec)
            stack.enter_context(mock.patch.dict(sys.modules, {full: module}))
            stack.enter_context(mock.patch.object(dw, name, module, create=True))
            spec.loader.exec_module(module)
            made[name] = module
    return types.SimpleNamespace(**made)


def ops():
    """A module of its own made of `deltawave.ops`, whose torch is this one; the real ones stay."""
    name = "deltawave.ops_on_a_stand_in"
    path = Path(dw.__file__).with_name("ops.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {**modules(), name: module}):
        spec.loader.exec_module(module)
    return module
