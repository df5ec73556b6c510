"""Imports FlashInfer's Gated DeltaNet kernels without the rest of FlashInfer, whose import needs a dozen packages more and
compiles C++. The kernel files themselves are as they were published; what they import of the rest is stood in for here."""

import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types
from pathlib import Path

_buffers, _retired = {}, []


def scratch(name, num_bytes, device, zero_init=False):
    """A buffer that is kept from call to call. A larger one does not free it: a captured graph may still use it."""
    import torch

    found = _buffers.get((name, device))
    if found is None or found.numel() < num_bytes:
        _retired.append(found)
        make = torch.zeros if zero_init else torch.empty
        found = _buffers[name, device] = make(num_bytes, dtype=torch.uint8, device=device)
    return found


def forget():
    """Frees the buffers. Graphs that use them must be gone."""
    _buffers.clear()
    _retired.clear()


def properties(device):
    import torch

    return torch.cuda.get_device_properties(device)


def stand_ins():
    """The modules that the kernels import, and what of them they use."""

    def compile_now(module_name, kernel_name, compile_fn, extra_key_files=()):
        return compile_fn()

    def traced(*args, **kwargs):
        """A decorator, with or without arguments, that changes nothing."""
        return args[0] if args and callable(args[0]) else (lambda function: function)

    return {
        "flashinfer": {},
        "flashinfer.gdn_kernels": {},
        "flashinfer.jit": {},
        "flashinfer.utils": {
            "_get_cache_buf": scratch,
            "get_compute_capability": functools.cache(lambda device: (properties(device).major, properties(device).minor)),
            "get_device_name": functools.cache(lambda device: properties(device).name),
            "get_device_sm_count": functools.cache(lambda device: properties(device).multi_processor_count),
        },
        "flashinfer.jit.core": {"logger": logging.getLogger("flashinfer")},
        "flashinfer.jit.cute_dsl_core": {"build_and_load_cute_dsl_kernel": compile_now},
        "flashinfer.api_logging": {"flashinfer_api": traced},
    }


def folder():
    """Where FlashInfer is installed, or None. Nothing of it is imported."""
    if "flashinfer" in sys.modules:
        return Path(sys.modules["flashinfer"].__path__[0])
    spec = importlib.util.find_spec("flashinfer")
    return Path(spec.submodule_search_locations[0]) if spec else None


def module(name):
    """The module `flashinfer.NAME`."""
    root = folder()
    if root is None:
        raise ImportError("the Python package flashinfer is not installed")
    if "flashinfer" not in sys.modules:
        for whole, contents in stand_ins().items():
            made = types.ModuleType(whole)
            made.__spec__ = importlib.machinery.ModuleSpec(whole, None)
            path = root.joinpath(*whole.split(".")[1:])
            if whole == "flashinfer.jit":
                made.__path__ = []  # nothing else of it can be imported
            elif path.is_dir():
                made.__path__ = [str(path)]
            vars(made).update(contents)
            sys.modules[whole] = made
    return importlib.import_module(f"flashinfer.{name}")
