"""What is refused, as which exception, by the name of the argument. Nothing of it reaches the device."""

import gc
import unittest

import deltawave as dw

from .common import needs_numpy, np, poisoned, simulator


class Refused(unittest.TestCase):
    def refused(self, start, call, kind=dw.ArgumentError):
        with self.assertRaises(kind) as caught:
            call()
        self.assertTrue(str(caught.exception).startswith(start), f"wanted {start!r}, was {caught.exception}")

    def test_devices(self):
        self.refused("device 7 does not exist", lambda: dw.Context("simulator", 7), dw.DeviceError)
        self.refused("device: -1", lambda: dw.Context("simulator", -1))
        self.refused("backend: 'gpu'", lambda: dw.Context("gpu"))
        self.assertTrue(issubclass(dw.ArgumentError, ValueError) and issubclass(dw.ArgumentError, dw.Error))

    def test_specs_and_lengths(self):
        good = dict(key_heads=2, value_heads=4, key_dim=32, value_dim=32)

        def plan(lengths=(0, 5), tokens=5, **changed):
            return dw.Prefill.packed(simulator(), dw.PrefillSpec(**{**good, **changed}), lengths, tokens)

        plan()
        self.refused("value_heads: 3", lambda: plan(value_heads=3))
        self.refused("key_dim: 24", lambda: plan(key_dim=24))
        self.refused("dtype: 'int8'", lambda: plan(dtype="int8"))
        self.refused("dtype: dtype f32", lambda: plan(dtype="f32"))
        self.refused("head_map: 'mixed'", lambda: plan(head_map="mixed"))
        self.refused("scale: 0", lambda: plan(scale=0.0))
        self.refused("spec: ", lambda: plan(key_dim="32"))
        self.refused("cu_seqlens", lambda: plan(lengths=[0, 6]))
        self.refused("cu_seqlens: [0, 1.5]", lambda: plan(lengths=[0, 1.5]))
        self.refused("cu_seqlens", lambda: plan(lengths=[]))
        self.refused("width: 5", lambda: dw.Conv.packed(simulator(), dw.ConvSpec(1, 1, 4, 4, width=5), [0, 1], 1))

    @needs_numpy
    def test_tensors(self):
        context = simulator()
        plan = dw.Prefill.packed(context, dw.PrefillSpec(1, 2, 16, 16), [0, 3], 3)
        good = {"q": poisoned((3, 1, 16), "bf16"), "k": poisoned((3, 1, 16), "bf16"), "v": poisoned((3, 2, 16), "bf16"),
                "o": poisoned((3, 2, 16), "bf16")}

        def launch(**changed):
            return plan.launch(**{**good, **changed})

        launch()
        self.refused("q: shape [2, 1, 16]", lambda: launch(q=good["q"][:2]))
        self.refused("k: dtype fp16", lambda: launch(k=poisoned((3, 1, 16), "fp16")))
        self.refused("v", lambda: launch(v=None))
        self.refused("o: an innermost stride of 2", lambda: launch(o=poisoned((3, 2, 32), "bf16")[..., ::2]))
        self.refused("q.strides[0]: -16", lambda: launch(q=good["q"][::-1]))
        self.refused("q: memory of the host", lambda: launch(q=np.zeros((3, 1, 16), np.uint16)))
        self.refused("q: a list", lambda: launch(q=[1]))
        self.refused("dtype: float64", lambda: launch(g=np.zeros((3, 2))))
        self.refused("g: i32 of shape", lambda: launch(g=context.zeros((3, 2), "i32")))
        self.refused("initial_layout: 'rows'", lambda: launch(initial_layout="rows"))
        self.refused("has_initial_state: u8 of shape [2]", lambda: launch(has_initial_state=context.zeros(2, "u8")))
        self.refused("cu_seqlens: given to a plan", lambda: launch(cu_seqlens=context.zeros(2, "i32")))
        self.refused("workspace", lambda: launch(workspace=context.empty(16, "u8")))
        self.refused("dw_prefill_tensors has no 'z'", lambda: launch(z=good["q"]), TypeError)

    @needs_numpy
    def test_memory(self):
        context = dw.Context("simulator")
        made = context.array(np.arange(6.0).reshape(2, 3), "bf16")
        self.assertEqual(dw.to_float(made).tolist(), [[0, 1, 2], [3, 4, 5]])
        self.assertTrue(context.owns(made[1:, ::2]) and not context.owns(np.zeros(3, np.float32)))
        self.assertEqual(context.empty((0, 3)).shape, (0, 3))
        # Views keep memory alive, and it is given back with the last of them.
        view = made[1]
        del made
        gc.collect()
        self.assertTrue(context.owns(view))
        del view
        gc.collect()
        self.assertEqual(len(context.memories.starts), 0)
        edge = np.array([1 + 2 ** -8, 1 + 3 * 2 ** -8, np.nan, -np.inf], np.float32)
        self.assertEqual(dw.to_bf16(edge).view(np.uint16).tolist(), [0x3F80, 0x3F82, 0x7FC0, 0xFF80])
