"""The torch custom ops on arguments that they refuse, and on first use by several threads: on torch where that is
installed, and on a stand-in."""

import functools
import threading
import unittest
from unittest import mock

import deltawave as dw
from deltawave import library
from deltawave.plan import Plans

from .common import np
from .test_ops import torch as real

if np is not None:
    from . import torch_stand_in

HK, HV, K, V, TOKENS = 1, 2, 16, 32, 5
CHANNELS = 2 * HK * K + HV * V


def at_once(call, threads=8):
    """What `call` returns in threads that begin together, or raises."""
    barrier, found = threading.Barrier(threads), [None] * threads

    def run(i):
        barrier.wait()
        try:
            found[i] = call()
        except Exception as problem:
            found[i] = problem

    each = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


@unittest.skipIf(np is None, "NumPy is not installed")
class OnStandIn(unittest.TestCase):
    def setUp(self):
        self.torch, self.ops = torch_stand_in, torch_stand_in.ops()

    def tensor(self, shape, dtype="bfloat16"):
        values = np.linspace(-0.5, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        return self.torch.tensor(values if dtype[0] != "i" else np.zeros(shape, int), dtype=getattr(self.torch, dtype))

    def calls(self):
        """Every op with valid arguments."""
        t = self.tensor
        rows = {"q": t((TOKENS, HK, K)), "k": t((TOKENS, HK, K)), "v": t((TOKENS, HV, V))}
        gates = {"g": t((TOKENS, HV), "float32"), "beta": t((TOKENS, HV), "float32")}
        raw = {"a": t((TOKENS, HV)), "b": t((TOKENS, HV)), "a_log": t((HV,), "float32"), "dt_bias": t((HV,), "float32")}
        lengths = {"cu_seqlens": self.torch.tensor([0, 2, TOKENS], dtype=self.torch.int32)}
        pool, has = t((2, HV, K, V), "float32"), self.torch.tensor([1, 0], dtype=self.torch.uint8)
        slots = self.torch.tensor([0, 1], dtype=self.torch.int32)
        heads = {"key_heads": HK, "value_heads": HV, "key_dim": K, "value_dim": V}
        of_two = {"slots": slots, "has_initial_state": has}
        few = {name: x[:2] if real is not None and isinstance(x, real.Tensor) else x._of(x.values[:2])
               for name, x in {**rows, **gates}.items()}
        drafts = {"q": t((2, 3, HK, K)), "k": t((2, 3, HK, K)), "v": t((2, 3, HV, V))}
        return {
            "prefill": {**rows, **gates, **lengths, "initial_state": t((2, HV, K, V), "float32"), "has_initial_state": has},
            "prefill_pool": {**rows, **raw, **lengths, **of_two, "pool": pool},
            "decode": {**few, **of_two, "pool": pool},
            "verify": {**drafts, **of_two, "pool": pool},
            "commit": {"accepted": slots, "states": t((2, 3, HV, K, V), "float32"), "pool": pool, "slots": slots,
                       "conv_state": t((2, CHANNELS, 5)), "x": t((6, CHANNELS)), "has_initial_state": has},
            "conv": {"x": t((TOKENS, CHANNELS)), "weight": t((CHANNELS, 4)), "bias": t((CHANNELS,)),
                     "state": t((2, CHANNELS, 3)), **heads, **lengths, **of_two},
            "gate": raw,
            "norm": {"x": t((TOKENS, HV, V)), "z": t((TOKENS, HV, V)), "weight": t((V,), "float32")},
            "layer": {"x": t((TOKENS, CHANNELS)), "z": t((TOKENS, HV, V)), **raw, "conv_state": t((2, CHANNELS, 3)),
                      "pool": pool, "conv_weight": t((CHANNELS, 4)), "conv_bias": t((CHANNELS,)),
                      "norm_weight": t((V,), "float32"), **heads, **lengths, **of_two},
        }

    def refused(self, names, call):
        names = (names,) if isinstance(names, str) else names
        try:
            call()
        except dw.ArgumentError as problem:
            text = str(problem)
            self.assertIn(text.partition(":")[0].partition(".")[0], names, text)
        except Exception as problem:
            self.fail(f"{names}: a raw {type(problem).__name__}: {problem}")
        else:
            self.fail(f"{names}: accepted")

    def test_tensors(self):
        """Tensors of no dimensions, empty ones, of 1 and of 6 dimensions, and of types that are none here."""
        shapes = {"0-d": (), "empty": (0,), "1-d": (7,), "6-d": (1,) * 6, "empty of 4": (0, 1, 1, 1)}
        for op, good in self.calls().items():
            call = getattr(self.ops, op)
            call(**good)
            for name, value in good.items():
                if isinstance(value, int):
                    continue
                wrong = {what: self.tensor(shape) for what, shape in shapes.items()}
                wrong["float64"] = self.tensor(tuple(value.shape), "float64")
                if value.dtype in (self.torch.int32, self.torch.uint8):
                    wrong["floats"] = self.tensor(tuple(value.shape), "float32")
                if name == "cu_seqlens":
                    several = {"of none": [], "negative": [0, -1], "beyond": [0, 99], "falls": [0, 3, 2]}
                    for what, numbers in several.items():
                        wrong[what] = self.torch.tensor(numbers, dtype=self.torch.int64)
                for what, x in wrong.items():
                    # A shape that is one may be refused of the tensor that does not match it.
                    names = tuple(good) if what == "empty of 4" or (op, name) == ("gate", "a") else (name,)
                    with self.subTest(op=op, name=name, what=what):
                        self.refused(names, lambda: call(**{**good, name: x}))

    def test_q_of_f32_is_named(self):
        for op, name in (("prefill", "q"), ("decode", "q"), ("verify", "q"), ("conv", "x"), ("layer", "x"), ("norm", "x")):
            good = self.calls()[op]
            wrong = self.tensor(tuple(good[name].shape), "float32")
            with self.assertRaises(dw.ArgumentError) as caught:
                getattr(self.ops, op)(**{**good, name: wrong})
            wanted = f"{name}: dtype torch.float32; it must be one of bf16, fp16"
            self.assertEqual(str(caught.exception), wanted)

    def test_tensors_of_another_device(self):
        stranger = torch_stand_in.Tensor
        for op, good in self.calls().items():
            first = next(iter(name for name in ("q", "x", "states", "a") if name in good and (op, name) != ("commit", "x")))
            for name, value in good.items():
                # q, or what stands for it, decides where the others must be; on the host lengths may always be.
                if name in (first, "cu_seqlens") or not isinstance(value, stranger):
                    continue
                with self.subTest(op=op, name=name):
                    elsewhere = stranger(value.values, value.dtype, "cuda:0")
                    self.refused(name, lambda: getattr(self.ops, op)(**{**good, name: elsewhere}))

    def test_words_and_numbers(self):
        calls = self.calls()
        for op, names in {"prefill": ("head_map", "state_layout"), "prefill_pool": ("head_map", "pool_layout"),
                          "decode": ("head_map", "pool_layout"), "verify": ("head_map", "pool_layout"),
                          "commit": ("pool_layout", "x_layout", "conv_layout"),
                          "conv": ("activation", "x_layout", "state_layout"), "norm": ("gate",),
                          "layer": ("gate", "head_map", "x_layout", "conv_layout", "pool_layout")}.items():
            for name in names:
                self.refused(name, lambda: getattr(self.ops, op)(**{**calls[op], name: "rows"}))
        for op in ("conv", "layer"):
            for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
                for wrong in (-1, 0, 1 << 40):
                    self.refused(name, lambda: getattr(self.ops, op)(**{**calls[op], name: wrong}))
        self.refused("decodes", lambda: self.ops.layer(**calls["layer"], decodes=-1))
        for wrong in (-1, 1 << 31, 1 << 40, 1 << 63, 1 << 70):
            with self.assertRaises(dw.ArgumentError) as caught:
                self.ops.prefill(**calls["prefill"], segments=wrong)
            text = f"segments: {wrong}; it must be a whole number from 0 to {(1 << 31) - 1}"
            self.assertEqual(str(caught.exception), text)
        self.refused("scale", lambda: self.ops.prefill(**calls["prefill"], scale=float("nan")))
        self.refused("scale", lambda: self.ops.decode(**calls["decode"], scale=1e-50))
        self.ops.prefill(**calls["prefill"], scale=0.0)
        self.refused("eps", lambda: self.ops.norm(**calls["norm"], eps=0.0))

    def test_conv_takes_rows_of_two_dimensions(self):
        given = self.calls()["conv"]
        x = given["x"].reshape((TOKENS, 1, CHANNELS))
        with self.assertRaises(dw.ArgumentError) as caught:
            self.ops.conv(**{**given, "x": x})
        text = f"x: shape {[TOKENS, 1, CHANNELS]}; it must have 2 dimensions"
        self.assertEqual(str(caught.exception), text)

    def test_memory(self):
        for dtype in ("bf16", None, np.float32, 5):
            self.refused("dtype", lambda: self.ops.empty((3,), dtype))
        for shape in (None, "abc", -1, (2, -1), 1.5, (1 << 70,), [None]):
            self.refused("shape", lambda: self.ops.empty(shape, self.torch.float32))
        for device in ("abc", None, 1.5):
            self.refused("device", lambda: self.ops.empty((3,), self.torch.float32, device))
        self.assertEqual(tuple(self.ops.empty(3, self.torch.float32).shape), (3,))

    def test_first_use_by_several_threads(self):
        # As in a new process; the contexts and plans of other tests stay.
        none_yet = functools.lru_cache(maxsize=None)(self.ops._context.__wrapped__)
        with mock.patch.multiple(self.ops, _plans=Plans(most=256), _context=none_yet):
            context = dw.Context
            made = []

            def slow(*arguments):
                made.append(arguments)
                return context(*arguments)

            good = self.calls()["norm"]
            with mock.patch.object(self.ops, "Context", slow):
                inside = self.ops.empty
                found = at_once(lambda: (self.ops.context_of(self.torch.device("cpu")),
                                         self.ops.norm(**{**good, "z": inside((TOKENS, HV, V), self.torch.bfloat16)
                                                          .copy_(good["z"])})))
            self.assertEqual(len({id(one) for one, _ in found}), 1)
            self.assertEqual(made, [("simulator",)])
            # cpu:0 is the same device.
            self.assertIs(self.ops.context_of(self.torch.device("cpu:0")), found[0][0])


@unittest.skipIf(real is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class OnTorch(OnStandIn):
    def setUp(self):
        from deltawave import ops

        self.torch, self.ops = real, ops

    # torch takes an op on tensors of several devices to the function of one of them.
    test_tensors_of_another_device = None


class FirstUse(unittest.TestCase):
    def test_the_library_is_loaded_once(self):
        library._default.cache_clear()
        made = []

        def slow():
            made.append(threading.current_thread())
            threading.Event().wait(0.05)
            return object()

        try:
            with mock.patch.object(library, "Library", slow):
                found = at_once(library.default)
        finally:
            library._default.cache_clear()
        self.assertEqual((len(made), len({id(one) for one in found})), (1, 1))

    def test_a_plan_is_made_once(self):
        plans, made = Plans(most=2), []

        def slow():
            made.append(object())
            threading.Event().wait(0.05)
            return made[-1]

        found = at_once(lambda: plans.get("key", slow, False))
        self.assertEqual((len(made), len({id(one) for one in found})), (1, 1))
