"""The gated RMS norm on the simulator against NumPy in double precision."""

import unittest

import deltawave as dw

from . import reference
from .common import Numbers, needs_numpy, np, poisoned, simulator

TOKENS, HK, HV, V = 9, 2, 4, 48


@needs_numpy
class Norm(unittest.TestCase):
    def test_both_gates_and_where_z_may_lie(self):
        numbers = Numbers(7)
        for dtype, step in (("bf16", 2 ** -8), ("fp16", 2 ** -11)):
            x, exact_x = numbers.uniform(-2, 2, (TOKENS, HV, V), dtype)
            weight, exact_weight = numbers.uniform(0.5, 1.5, (V,), "f32")
            # z behind q, k and v of its key head, as interleaved projections have it.
            rows, exact_rows = numbers.uniform(-3, 3, (TOKENS, HK, 100 + HV // HK * V), dtype)
            z, exact_z = rows[..., 100:], exact_rows[..., 100:].reshape(TOKENS, HV, V)
            for gate in ("silu", "sigmoid"):
                with self.subTest(dtype=dtype, gate=gate):
                    wanted = exact_x / np.sqrt((exact_x ** 2).mean(-1, keepdims=True) + 1e-6) * exact_weight
                    wanted *= reference.sigmoid(exact_z) * (exact_z if gate == "silu" else 1)
                    y = poisoned((TOKENS, HV, V), dtype)
                    dw.norm(simulator(), x=x, z=z, weight=weight, y=y, gate=gate)
                    np.testing.assert_allclose(dw.to_float(y), wanted, rtol=step, atol=1e-6)
                    again = simulator().array(x)
                    dw.norm(simulator(), z=z, weight=weight, y=again, gate=gate)
                    self.assertEqual(again.tobytes(), y.tobytes(), "in place")

    def test_what_is_refused(self):
        y = poisoned((TOKENS, HV, V), "bf16")
        for start, changed in (("eps", {"eps": 0.0}), ("gate: 'tanh'", {"gate": "tanh"}), ("z", {"z": y[:, :1]})):
            with self.assertRaises(dw.ArgumentError) as caught:
                dw.norm(simulator(), **{"z": simulator().array(y), "y": y, **changed})
            self.assertTrue(str(caught.exception).startswith(start), caught.exception)
