"""An empty stand-in for PyTorch: fla-core imports torch for its host code, which does not run here.

Every name in `torch` and its submodules exists. It can be called, subclassed, indexed, and used as a decorator, and has no
effect.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())


class Anything(metaclass=_Anything):
    """Every class, function and value of the stand-in."""

    def __new__(cls, *arguments, **options):
        # A decorator without arguments returns what it decorates, as far as anyone here can tell.
        if cls is Anything and len(arguments) == 1 and not options and isinstance(arguments[0], types.FunctionType):
            return arguments[0]
        return super().__new__(cls)

    def __init__(self, *arguments, **options):
        pass

    def __call__(self, *arguments, **options):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Module(types.ModuleType):
    """A module in which everything is found."""

    __path__ = []
    __version__ = "2.9.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below the names that are stood in for."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


def install(*names):
    """Puts the stand-in in the place of the modules named."""
    sys.meta_path.insert(0, Finder(names))
