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
        self.refused("dtype: 'f32'; it must be one of bf16, fp16", lambda: plan(dtype="f32"))
        self.refused("head_map: 'mixed'", lambda: plan(head_map="mixed"))
        self.refused("path: 'mixed'", lambda: plan(path="mixed"))
        # As in C, 0 is the default; a number that is 0 in f32 alone is not.
        plan(scale=0.0), plan(scale=0), plan(scale=None)
        self.refused("scale: 1e-50", lambda: plan(scale=1e-50))
        self.refused("scale: inf", lambda: plan(scale=1e50))
        self.refused("scale: 'x'", lambda: plan(scale="x"))
        self.refused(f"scale: {10 ** 400}", lambda: plan(scale=10 ** 400))
        self.refused("key_dim: '32'", lambda: plan(key_dim="32"))
        # What has no hash.
        self.refused("dtype: ['bf16']", lambda: plan(dtype=["bf16"]))
        self.refused("head_map: ['tiled']", lambda: plan(head_map=["tiled"]))
        self.refused("head_map: None", lambda: plan(head_map=None))
        self.refused("cu_seqlens", lambda: plan(lengths=[0, 6]))
        self.refused("cu_seqlens: 1.5", lambda: plan(lengths=[0, 1.5]))
        self.refused("cu_seqlens: 5", lambda: plan(lengths=5))
        self.refused("cu_seqlens", lambda: plan(lengths=[]))
        self.refused("width: 5", lambda: dw.Conv.packed(simulator(), dw.ConvSpec(1, 1, 4, 4, width=5), [0, 1], 1))

    def test_whole_numbers_are_not_cut_off(self):
        context, spec = simulator(), dw.PrefillSpec(2, 2, 32, 32)
        plan = dw.Prefill.packed(context, spec, [0, 3, 5], 5)
        conv = dw.ConvSpec(1, 1, 4, 4)
        for name, bits, call in (
                ("device", 32, lambda n: dw.Context("simulator", n)),
                ("key_heads", 32, lambda n: dw.PrefillSpec(n, 2, 32, 32).struct()),
                ("segments", 32, lambda n: dw.PrefillSpec(2, 2, 32, 32, segments=n).struct()),
                ("width", 32, lambda n: dw.ConvSpec(1, 1, 4, 4, n).struct()),
                ("tokens", 32, lambda n: dw.DecodeSpec(2, 2, 32, 32, tokens=n).struct()),
                ("slots", 32, lambda n: plan.set_slots([n, 3])),
                ("write_slots", 32, lambda n: plan.set_slots([1, 2], [0, n])),
                ("snapshots", 64, lambda n: plan.set_snapshots([(0, n, 1)])),
                ("cu_seqlens", 64, lambda n: dw.Prefill.packed(context, spec, [0, n], 5)),
                ("tokens", 64, lambda n: dw.Prefill.packed(context, spec, [0, 5], n)),
                ("tokens", 64, lambda n: dw.Prefill.dense(context, spec, 1, n)),
                ("batch", 64, lambda n: dw.Prefill.dense(context, spec, n, 5)),
                ("tokens", 64, lambda n: dw.Prefill.device(context, spec, n, 1)),
                ("sequences", 64, lambda n: dw.Prefill.device(context, spec, 5, n)),
                ("tokens", 64, lambda n: dw.Conv.packed(context, conv, [0, 5], n)),
                ("tokens", 64, lambda n: dw.Conv.device(context, conv, n, 1)),
                ("sequences", 64, lambda n: dw.Conv.device(context, conv, 5, n)),
                ("batch", 64, lambda n: dw.Decode(context, dw.DecodeSpec(2, 2, 32, 32), n)),
                ("nbytes", 64, lambda n: dw.Memory(context, n)),
                ("nbytes", 64, lambda n: context.copy(0, 0, n, 0)),
                ("direction", 32, lambda n: context.copy(0, 0, 0, n)),
                ("address", 64, lambda n: dw.array(n, "f32", [1])),
                ("shape", 64, lambda n: dw.array(0, "f32", [1, n])),
                ("strides", 64, lambda n: dw.array(0, "f32", [1], [n])),
                ("allow_neg_eigval", 32, lambda n: plan.launch(allow_neg_eigval=n, workspace=0))):
            for number in (2 ** bits + 3, 2 ** (bits - 1), -2 ** (bits - 1) - 1):
                with self.subTest(name=name, number=number):
                    self.refused(f"{name}: {number}; it must be a whole number from ", lambda: call(number))
            self.refused(f"{name}: 1.5; it must be a whole number", lambda: call(1.5))
        self.refused(f"workspace: {2 ** 64 + 256}", lambda: plan.launch(workspace=2 ** 64 + 256))
        self.refused("slots: 5", lambda: plan.set_slots(5))
        self.refused("slots: None", lambda: plan.set_slots(None))
        self.refused("snapshots: [(0, 64)]", lambda: plan.set_snapshots([(0, 64)]))
        plan.set_slots(range(2))

    @needs_numpy
    def test_whole_numbers_of_numpy(self):
        spec = dw.PrefillSpec(*np.array([2, 2, 32, 32]), scale=np.float32(0.5), qk_l2norm=True)
        made = spec.struct()
        self.assertEqual((made.key_heads, made.value_dim, made.scale, made.qk_l2norm), (2, 32, 0.5, 1))
        plan = dw.Prefill.packed(simulator(), spec, np.array([0, 3, 5], np.uint64), np.int32(5))
        plan.set_slots(np.array([4, -1]), np.array([4, 1], np.uint8))
        self.refused("slots: 0.0", lambda: plan.set_slots(np.zeros(2)))
        self.refused("slots: array(3)", lambda: plan.set_slots(np.array(3)))
        self.refused("cu_seqlens: [0, 5]", lambda: dw.Prefill.packed(simulator(), spec, np.array([[0, 5]]), 5))

    @needs_numpy
    def test_tensors(self):
        context = simulator()
        plan = dw.Prefill.packed(context, dw.PrefillSpec(1, 2, 16, 16, path="split"), [0, 3], 3)
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
        self.refused("q: memory of the host", lambda: launch(q=np.array(1.0, np.float32)))
        self.refused("q.rank: 0", lambda: launch(q=context.empty((), "bf16")))
        self.refused("initial_layout: ['key_major']", lambda: launch(initial_layout=["key_major"]))
        self.refused("dtype: ['f32']", lambda: context.empty(3, ["f32"]))
        self.refused("g: dtype float64", lambda: launch(g=np.zeros((3, 2))))
        self.refused("g: dtype int32", lambda: launch(g=context.zeros((3, 2), "i32")))
        self.refused("initial_layout: 'rows'", lambda: launch(initial_layout="rows"))
        self.refused("has_initial_state: u8 of shape [2]", lambda: launch(has_initial_state=context.zeros(2, "u8")))
        self.refused("cu_seqlens: given to a plan", lambda: launch(cu_seqlens=context.zeros(2, "i32")))
        self.refused("workspace", lambda: launch(workspace=context.empty(16, "u8")))
        self.refused("z: no argument of this launch; it must be one of q, k, v, o,", lambda: launch(z=good["q"]))

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
