"""What the tests share: the simulator, and random arrays."""

import functools
import unittest

import deltawave as dw

try:
    import numpy as np
except ImportError:
    np = None

needs_numpy = unittest.skipIf(np is None, "NumPy is not installed")


@functools.lru_cache(maxsize=None)
def simulator():
    """One context for all tests."""
    return dw.Context("simulator")


class Numbers:
    """Random arrays as the device has them, and in double precision with the same values."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def uniform(self, low, high, shape, dtype):
        made = simulator().array(self.random.uniform(low, high, shape), dtype)
        return made, dw.to_float(made).astype(np.float64)


def poisoned(shape, dtype):
    """An array that is NaN all over."""
    return simulator().array(np.full(shape, np.nan), dtype)
