"""Callers that have neither NumPy nor torch: memory of the context by its address."""

import ctypes
import struct
import unittest

import deltawave as dw
from deltawave import _abi

from .common import simulator

K, V = 16, 32


def bf16(x):
    """The 16 bits of a number that has no more."""
    return struct.unpack("<I", struct.pack("<f", x))[0] >> 16


class Addresses(unittest.TestCase):
    def test_one_token(self):
        context, kept = simulator(), []

        def upload(element, values):
            host = (element * len(values))(*values)
            kept.append(dw.Memory(context, ctypes.sizeof(host)))
            context.copy(kept[-1].address, ctypes.addressof(host), ctypes.sizeof(host), _abi.DW_TO_DEVICE)
            return kept[-1].address

        q, k = ([bf16(x)] * K for x in (0.5, 0.25))
        v = [bf16(float(j)) for j in range(V)]
        rows = {name: dw.array(upload(ctypes.c_uint16, values), "bf16", [1, 1, len(values)])
                for name, values in (("q", q), ("k", k), ("v", v), ("o", [0x7FC0] * V))}
        beta = dw.array(upload(ctypes.c_float, [0.5]), "f32", [1, 1])
        plan = dw.Prefill.packed(context, dw.PrefillSpec(1, 1, K, V, scale=2.0), [0, 1], 1)
        plan.launch(**rows, beta=beta)
        context.synchronize()
        o = (ctypes.c_uint16 * V)()
        context.copy(ctypes.addressof(o), rows["o"].address, ctypes.sizeof(o), _abi.DW_TO_HOST)
        # From a state of zeros: scale beta (q . k) v = 2 * 0.5 * 2 * v.
        self.assertEqual(list(o), [bf16(2.0 * j) for j in range(V)])

        with self.assertRaises(dw.ArgumentError) as caught:
            plan.launch(**{**rows, "v": dw.array(rows["v"].address, "bf16", [2, 1, V])})
        self.assertIn("v: shape [2, 1, 32]", str(caught.exception))
