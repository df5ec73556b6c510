"""Compiles Triton kernels for gfx942 without a GPU, and launches them on the simulator.

Triton's own launcher cannot be used: it asks ROCm's PyTorch for the device. This module does the launcher's work: it
specialises the arguments as Triton's HIP backend does, and appends two pointers to scratch.
"""

import ctypes
import time

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

import simulator
from simulator import Buffer

TARGET = GPUTarget("hip", "gfx942", 64)
SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}



class Driver:
    """Answers of a device's driver that Triton and FLA request before a launch."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0


triton.runtime.driver.set_active(Driver())

# Kernels that ran: name, bytes of the code object, seconds.
launched = []


def unwrap(kernel, arguments, choose):
    """The function beneath decorators; adds to `arguments` what heuristics and the chosen configuration say."""
    options, heuristics = {}, []
    while not isinstance(kernel, JITFunction):
        if isinstance(kernel, Heuristics):
            heuristics.append(kernel.values)
        elif isinstance(kernel, Autotuner):
            config = choose(kernel.configs) if choose else kernel.configs[0]
            arguments.update(config.kwargs)
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        kernel = kernel.fn
    for values in heuristics:
        for name, value in values.items():
            arguments[name] = value(arguments)
    return kernel, options


def specialise(kernel, arguments):
    """Signature, constants and attributes of a launch, and the values that remain arguments."""
    signature, constants, attributes, values = {}, {}, {}, []
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in arguments:
            value = arguments[name]
        elif parameter.has_default:
            value = parameter.default
        else:
            raise TypeError(f"{kernel.__name__}: no argument {name}")
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, Buffer):
            signature[name] = f"*{value.kind}"
            # Allocations are aligned and far below 2 GiB: the backend may use buffer instructions.
            attributes[(index,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
            values.append(value.pointer)
        else:
            kind = "fp32" if isinstance(value, float) else "i32" if -2**31 <= value < 2**31 else "i64"
            signature[name] = kind
            if special and kind != "fp32" and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
            values.append(SCALARS[kind](value))
    return signature, constants, attributes, values


class Trial:
    """Stands for a choice: all configurations of a kernel run, one after the other, on the same arguments.

    `ran(number, configuration, error)` is called after each of them; the error is None, or says that it does not fit on the
    device. Kernels that are not autotuned run once, with the number 0.
    """

    def __init__(self, ran):
        self.ran = ran

    def run(self, kernel, grid, **arguments):
        tuned = kernel
        while not isinstance(tuned, (Autotuner, JITFunction)):
            tuned = tuned.fn
        for number, config in enumerate(tuned.configs if isinstance(tuned, Autotuner) else [None]):
            error = None
            try:
                run(kernel, grid, lambda _, config=config: config, **arguments)
            except (simulator.HipError, OutOfResources) as found:
                error = found
            self.ran(number, config, error)


def run(kernel, grid, choose=None, num_warps=None, num_stages=None, **arguments):
    """Compiles a kernel for these arguments and runs it. `choose` picks a configuration of an autotuned kernel."""
    if isinstance(choose, Trial):
        return choose.run(kernel, grid, **arguments)
    kernel, options = unwrap(kernel, arguments, choose)
    if num_warps:
        options["num_warps"] = num_warps
    if num_stages:
        options["num_stages"] = num_stages
    signature, constants, attributes, values = specialise(kernel, arguments)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    meta = compiled.metadata
    if getattr(meta, "global_scratch_size", 0) or getattr(meta, "profile_scratch_size", 0):
        raise NotImplementedError(f"{meta.name} wants scratch of the launcher")
    values += [ctypes.c_void_p(), ctypes.c_void_p()]
    if callable(grid):
        grid = grid(arguments)
    image = compiled.asm["hsaco"]
    start = time.monotonic()
    simulator.launch(image, meta.name, grid, (meta.num_warps * 64,), meta.shared, values)
    launched.append((meta.name, len(image), time.monotonic() - start))
    return compiled
