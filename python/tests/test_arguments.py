"""Whatever is passed as an argument, the error is an ArgumentError that begins with the argument's name."""

import ctypes
import unittest
from types import SimpleNamespace

import deltawave as dw
from deltawave import arrays, values

from .common import needs_numpy, np, poisoned, simulator

HK, HV, K, V, TOKENS = 1, 2, 16, 32, 3


class NoNumber:
    """An object that fails in ways of its own."""

    def __index__(self):
        raise KeyError("no index")

    def __iter__(self):
        raise KeyError("no items")

    def __repr__(self):
        raise KeyError("no text")


# What no argument of a launch is: of another type, shape or memory. Numbers are addresses to some arguments.
NOT_TENSORS = {"str": "abc", "list": [1.0], "bytes": b"abc", "dict": {}, "object": NoNumber(), "class": dw.Array,
               "complex": 1j, "float": 1.5, "function": len, "tuple": (1, 2)}
# What no whole number is, for numbers of any size.
NOT_WHOLE = {"none": None, "str": "abc", "list": [1], "float": 1.5, "object": NoNumber(), "huge": 1 << 80,
             "negative and huge": -(1 << 80), "complex": 1j, "dict": {}, "digits": 10 ** 5000, "nan": float("nan")}


def not_arrays():
    """Arrays that no argument of a launch takes, by what is wrong with them."""
    context = simulator()
    record = np.zeros(3, [("x", "f4")])
    return {"object": np.array([None, 1]), "float64": np.zeros((3, 2)), "complex": np.zeros(3, np.complex64),
            "other endian": context.zeros((3, 2)).view(">f4"), "text": np.array(["a"]), "record": record,
            "i8": np.zeros(3, np.int8), "host": np.zeros((3, 2), np.float32), "scalar": np.float32(1),
            "no dimensions": context.empty((), "f32"), "five": context.zeros((1, 1, 1, 1, 1)),
            "one": context.zeros(7, "bf16"), "empty": context.empty((0,), "bf16"),
            "negative": context.zeros((3, 2, 5))[::-1, ::-1], "odd strides": odd(),
            "array of junk": dw.Array("x", None, 5, None), "array of too few strides": dw.Array(0, "f32", (1, 2), (1,))}


def odd():
    """f32 numbers that are not whole elements apart."""
    return np.ndarray((3, 2), np.float32, simulator().zeros(64, "u8"), 0, (10, 5))


class Named(unittest.TestCase):
    def refused(self, name, call):
        """`call` raises an ArgumentError that begins with the name."""
        try:
            call()
        except dw.ArgumentError as problem:
            text = str(problem)
            self.assertTrue(text.startswith(tuple(f"{name}{after}" for after in ":.[ ")), f"wanted {name}, was {text}")
        except Exception as problem:
            self.fail(f"{name}: a raw {type(problem).__name__}: {problem}")
        else:
            self.fail(f"{name}: accepted")

    def each(self, table, name, call, without=()):
        for what, value in table.items():
            if what not in without:
                with self.subTest(name=name, what=what):
                    self.refused(name, lambda: call(value))

    def launches(self):
        """Launches with valid tensors, of which a test changes one: what takes them, and these."""
        c = simulator()

        def bf16(*shape):
            return c.zeros(shape, "bf16")

        def f32(*shape):
            return c.zeros(shape, "f32")

        def i32(*numbers):
            return c.array(numbers, "i32")

        rows = {"q": bf16(TOKENS, HK, K), "k": bf16(TOKENS, HK, K), "v": bf16(TOKENS, HV, V), "o": bf16(TOKENS, HV, V)}
        given = {"g": f32(TOKENS, HV), "beta": f32(TOKENS, HV)}
        raw = {"a": bf16(TOKENS, HV), "b": bf16(TOKENS, HV), "a_log": f32(HV), "dt_bias": f32(HV)}
        states = {"initial_state": f32(1, HV, K, V), "final_state": f32(1, HV, K, V), "has_initial_state": c.zeros(1, "u8")}
        channels, flags = 2 * HK * K + HV * V, c.zeros(1, "u8")
        conv = {"x": bf16(TOKENS, channels), "weight": bf16(channels, 4), "bias": bf16(channels),
                "state": bf16(2, channels, 3), "slots": i32(0), "has_initial_state": flags, "q": bf16(TOKENS, HK, K),
                "k": bf16(TOKENS, HK, K), "v": bf16(TOKENS, HV, V)}
        layer = {"x": bf16(TOKENS, channels), "z": bf16(TOKENS, HV, V), "a": raw["a"], "b": raw["b"],
                 "conv_weight": bf16(channels, 4), "conv_bias": bf16(channels), "a_log": f32(HV), "dt_bias": f32(HV),
                 "norm_weight": f32(V), "conv_state": bf16(2, channels, 3), "pool": f32(2, HV, K, V), "slots": i32(0),
                 "has_initial_state": flags, "y": bf16(TOKENS, HV, V)}
        pool = {"pool": f32(4, HV, K, V), "slots": i32(0), "write_slots": i32(1), "snapshots": f32(2, HV, K, V),
                "snapshot_slots": i32(1)}
        spec = dw.PrefillSpec(HK, HV, K, V, path="split")
        packed = dw.Prefill.packed(c, spec, [0, TOKENS], TOKENS)
        device = dw.Prefill.device(c, spec, TOKENS, 1)
        decode = dw.Decode(c, dw.DecodeSpec(HK, HV, K, V), TOKENS)
        many = {"slots": i32(0, 1, 2), "write_slots": i32(0, 1, 2), "has_initial_state": c.zeros(3, "u8")}
        return {
            "prefill": (packed.launch, {**rows, **given, **states}),
            "prefill of raw gates": (packed.launch, {**rows, **raw}),
            "prefill on a pool": (packed.launch, {**rows, **pool}),
            "prefill of the device": (device.launch, {**rows, "cu_seqlens": i32(0, TOKENS)}),
            "conv": (dw.Conv.packed(c, dw.ConvSpec(HK, HV, K, V), [0, TOKENS], TOKENS).launch, conv),
            "decode": (decode.launch, {**rows, **given, **many, "pool": pool["pool"]}),
            "verify": (decode.launch, {**rows, "pool": pool["pool"], "states": f32(TOKENS, HV, K, V)}),
            "commit": (decode.commit, {"accepted": i32(0, 1, 1), "states": f32(TOKENS, HV, K, V), "pool": pool["pool"],
                                       "slots": many["slots"]}),
            "norm": (lambda **t: dw.norm(c, **t), {"x": bf16(TOKENS, HV, V), "z": bf16(TOKENS, HV, V), "weight": f32(V),
                                                   "y": bf16(TOKENS, HV, V)}),
            "gate": (lambda **t: dw.gate(c, **t), {**raw, **given}),
            "layer": (dw.Layer.packed(c, dw.LayerSpec(HK, HV, K, V), [0, TOKENS], TOKENS).launch, layer),
        }

    @needs_numpy
    def test_tensors_of_launches(self):
        wrong = {**NOT_TENSORS, **not_arrays(), "true": True, "number": 5, "huge": 1 << 80, "negative": -1}
        for operation, (call, good) in self.launches().items():
            call(**good)
            for name in good:
                with self.subTest(operation=operation):
                    self.each(wrong, name, lambda value: call(**{**good, name: value}))
        simulator().synchronize()

    @needs_numpy
    def test_names_streams_and_words_of_launches(self):
        words = {"prefill": ("initial_layout", "final_layout"), "prefill on a pool": ("pool_layout", "snapshot_layout"),
                 "conv": ("x_layout", "state_layout"), "decode": ("pool_layout",),
                 "commit": ("pool_layout", "conv_layout", "x_layout"), "norm": ("gate",),
                 "layer": ("x_layout", "conv_layout", "pool_layout")}
        for operation, (call, good) in self.launches().items():
            with self.subTest(operation=operation):
                for name in ("qq", "seq_lens", "size", "pad0"):
                    self.refused(name, lambda: call(**{**good, name: next(iter(good.values()))}))
                for stream in ("abc", b"abc", -1, 1 << 64, 1.5, True, [0], NoNumber(), 0xdead, np.zeros(2),
                               SimpleNamespace(cuda_stream="x"), SimpleNamespace(cuda_stream=-5)):
                    self.refused("stream", lambda: call(**good, stream=stream))
                for stream in (None, 0, 1, ctypes.c_void_p(0), np.int64(0), SimpleNamespace(cuda_stream=0)):
                    call(**good, stream=stream)
                for name in words.get(operation, ()):
                    wrong = {"str": "rows", "list": ["flat"], "number": 1, "bytes": b"flat", "object": NoNumber()}
                    self.each(wrong, name, lambda value: call(**{**good, name: value}))
                if operation in ("prefill of raw gates", "gate"):
                    wrong = {k: v for k, v in NOT_WHOLE.items() if k != "none"}
                    self.each({**wrong, "two": 2}, "allow_neg_eigval",
                              lambda value: call(**good, allow_neg_eigval=value))
                if "prefill" in operation or operation == "layer":
                    wrong = {**NOT_TENSORS, "negative": -256, "odd": 3, "huge": 1 << 80, "true": True,
                             "other way around": simulator().zeros(1 << 20, "u8")[::-1],
                             "every other": simulator().zeros(1 << 20, "u8")[::2], "host": np.zeros(1 << 20, np.uint8)}
                    self.each(wrong, "workspace", lambda value: call(**good, workspace=value))
                    self.refused("workspace_bytes", lambda: call(**good, workspace_bytes=1 << 20))
                    call(**good, workspace=dw.Memory(simulator(), 1 << 20))
        for eps in (None, "x", [1], 1j, 0, -1.0, float("nan"), float("inf"), 10 ** 400, np.complex64(1j)):
            call, good = self.launches()["norm"]
            self.refused("eps", lambda: call(**good, eps=eps))
        simulator().synchronize()

    @needs_numpy
    def test_streams_elsewhere(self):
        c = simulator()
        call, good = self.launches()["prefill"]
        plan = call.__self__
        for stream in ("abc", -1, 1 << 64, 0xdead, 1.5, True, SimpleNamespace(cuda_stream=None, x=1)):
            if getattr(stream, "x", None):
                c.synchronize(stream)
                continue
            self.refused("stream", lambda: c.synchronize(stream))
            self.refused("stream", lambda: plan.bind(**good)(stream))
        c.synchronize(SimpleNamespace(cuda_stream=0))

    @needs_numpy
    def test_outputs_are_writable(self):
        outputs = {"prefill": ("o", "final_state"), "prefill on a pool": ("o", "pool", "snapshots"),
                   "conv": ("q", "k", "v", "state"), "decode": ("o", "pool"), "verify": ("o", "states"),
                   "commit": ("pool",), "norm": ("y",), "gate": ("g", "beta"), "layer": ("y", "pool", "conv_state")}
        for operation, (call, good) in self.launches().items():
            for name, value in good.items():
                view = value.view()
                view.flags.writeable = False
                with self.subTest(operation=operation, name=name):
                    if name in outputs.get(operation, ("o",)):
                        self.refused(name, lambda: call(**{**good, name: view}))
                    else:
                        call(**{**good, name: view})
        # States that are kept are not written.
        call, good = self.launches()["conv"]
        good["state"].flags.writeable = False
        self.refused("state", lambda: call(**good))
        spec = dw.ConvSpec(HK, HV, K, V, keep_states=True)
        dw.Conv.packed(simulator(), spec, [0, TOKENS], TOKENS).launch(**good)
        lengths = simulator().array([0, TOKENS], "i32")
        dw.Conv.device(simulator(), spec, TOKENS, 1).launch(**good, cu_seqlens=lengths)
        call, good = self.launches()["verify"]
        good["pool"].flags.writeable = False
        call(**good)
        simulator().synchronize()

    def test_specs_and_plans(self):
        c = simulator()
        heads = dict(key_heads=HK, value_heads=HV, key_dim=K, value_dim=V)
        made = {
            dw.PrefillSpec: (lambda s: dw.Prefill.packed(c, s, [0, 3], 3), ("segments", "compute_units")),
            dw.ConvSpec: (lambda s: dw.Conv.packed(c, s, [0, 3], 3), ("width",)),
            dw.DecodeSpec: (lambda s: dw.Decode(c, s, 3), ("tokens",)),
            dw.LayerSpec: (lambda s: dw.Layer.packed(c, s, [0, 3], 3), ("width", "segments")),
        }
        for kind, (plan, numbers) in made.items():
            plan(kind(**heads))
            for name in (*heads, *numbers, "qk_l2norm"):
                optional = ("none",) if name in ("segments", "compute_units") else ()
                if name in heads:
                    # None is 0 in the struct, of which there are no heads.
                    self.refused(name, lambda: plan(kind(**{**heads, name: None})))
                self.each(NOT_WHOLE, name, lambda v: plan(kind(**{**heads, name: v})), optional + ("none",))
                self.each({"-1": -1, "1 << 31": 1 << 31}, name, lambda v: plan(kind(**{**heads, name: v})))
            if "scale" in kind.__dataclass_fields__:
                wrong = {"str": "x", "nan": float("nan"), "inf": float("inf"), "huge": 10 ** 5000, "complex": 1j,
                         "tiny": 1e-50, "list": [1.0], "object": NoNumber()}
                self.each(wrong, "scale", lambda v: plan(kind(**heads, scale=v)))
                # As in C, where a struct of zeros means the default.
                self.assertEqual({kind(**heads, scale=s).struct().scale for s in (None, 0, 0.0, -0.0)}, {0.0})
                plan(kind(**heads, scale=0))
            for name in ("dtype", "head_map", "activation", "gate", "draft"):
                if name in kind.__dataclass_fields__:
                    wrong = {"str": "int8", "list": ["bf16"], "number": 1, "none": None, "f32": "f32", "float": float,
                             "object": NoNumber(), "bytes": b"bf16"}
                    self.each(wrong, name, lambda v: plan(kind(**heads, **{name: v})))
            for wrong in (None, "spec", heads, dw.PrefillSpec, NoNumber(), object()):
                self.refused("spec", lambda: plan(wrong))
            self.refused("spec", lambda: plan((dw.ConvSpec if kind is not dw.ConvSpec else dw.DecodeSpec)(**heads)))

    def test_numbers_of_plans(self):
        c, spec, conv = simulator(), dw.PrefillSpec(HK, HV, K, V), dw.ConvSpec(HK, HV, K, V)
        layer, decode = dw.LayerSpec(HK, HV, K, V), dw.DecodeSpec(HK, HV, K, V)
        calls = {
            ("tokens", "Prefill.packed"): lambda v: dw.Prefill.packed(c, spec, [0, 3], v),
            ("batch", "Prefill.dense"): lambda v: dw.Prefill.dense(c, spec, v, 3),
            ("tokens", "Prefill.dense"): lambda v: dw.Prefill.dense(c, spec, 3, v),
            ("tokens", "Prefill.device"): lambda v: dw.Prefill.device(c, spec, v, 3),
            ("sequences", "Prefill.device"): lambda v: dw.Prefill.device(c, spec, 3, v),
            ("tokens", "Conv.packed"): lambda v: dw.Conv.packed(c, conv, [0, 3], v),
            ("tokens", "Conv.device"): lambda v: dw.Conv.device(c, conv, v, 3),
            ("sequences", "Conv.device"): lambda v: dw.Conv.device(c, conv, 3, v),
            ("batch", "Decode"): lambda v: dw.Decode(c, decode, v),
            ("tokens", "Layer.packed"): lambda v: dw.Layer.packed(c, layer, [0, 3], v),
            ("decodes", "Layer.packed"): lambda v: dw.Layer.packed(c, layer, [0, 3], 3, v),
            ("tokens", "Layer.device"): lambda v: dw.Layer.device(c, layer, v, 3),
            ("sequences", "Layer.device"): lambda v: dw.Layer.device(c, layer, 3, v),
            ("decodes", "Layer.device"): lambda v: dw.Layer.device(c, layer, 3, 3, v),
            ("nbytes", "Memory"): lambda v: dw.Memory(c, v),
            ("nbytes", "copy"): lambda v: c.copy(0, 0, v, 0),
            ("direction", "copy"): lambda v: c.copy(0, 0, 0, v),
            ("device", "Context"): lambda v: dw.Context("simulator", v),
            ("address", "array"): lambda v: dw.array(v, "f32", [1]),
        }
        for (name, where), call in calls.items():
            with self.subTest(where=where):
                self.each({**NOT_WHOLE, "-1": -1}, name, call)
        addresses = {**NOT_TENSORS, "huge": 1 << 80, "negative": -1, "true": True}
        self.each(addresses, "to", lambda v: c.copy(v, 0, 0, 0))
        self.each(addresses, "source", lambda v: c.copy(0, v, 0, 0))
        self.refused("to", lambda: c.copy(None, 0, 4, 0))
        contexts = {"none": None, "str": "simulator", "class": dw.Context, "object": object(), "number": 0}
        for call in (lambda v: dw.Memory(v, 4), lambda v: dw.Prefill.packed(v, spec, [0, 3], 3),
                     lambda v: dw.Decode(v, decode, 3), lambda v: dw.Layer.device(v, layer, 3, 3),
                     lambda v: dw.Conv.device(v, conv, 3, 3), lambda v: dw.norm(v), lambda v: dw.gate(v)):
            self.each(contexts, "context", call)
        self.each({**NOT_TENSORS, "none": None, "number": 1}, "backend", dw.Context)
        for path in (5, ["x"], 1.5, object()):
            self.refused("path", lambda: dw.Library(path))
            self.refused("path", lambda: dw.Context("simulator", path=path))
        for name, arguments in (("dw_none", ()), ("dw_free", ("x",)), ("dw_copy", (None, 1j, None, 4, 0))):
            self.refused(name, lambda: c.library.call(name, *arguments))
        for path in ("/nowhere.so", "a\0b", __file__):
            with self.assertRaises(dw.LibraryError):
                dw.Library(path)

    def test_lists_of_the_host(self):
        c, spec = simulator(), dw.PrefillSpec(HK, HV, K, V)
        plan = dw.Prefill.packed(c, spec, [0, 1, 3], 3)
        lists = {"none": None, "number": 5, "float": 1.5, "text": "abc", "floats": [0, 1.5], "nested": [[0, 3]],
                 "huge": [0, 1 << 80], "of none": [0, None], "object": NoNumber(), "objects": [NoNumber()],
                 "digits": [10 ** 5000], "dict of text": {"a": 1}, "class": list}
        if np is not None:
            lists.update({"no dimensions": np.array(3), "float32": np.array([0, 3], np.float32),
                          "two dimensions": np.array([[0, 3]]), "objects of NumPy": np.array([0, None])})
        short = {"empty": [], "negative": [0, -1], "decreasing": [0, 3, 2], "beyond": [0, 4]}
        if np is not None:
            short["empty array"] = np.zeros(0, np.int64)
        for kind, of in ((dw.Prefill, spec), (dw.Conv, dw.ConvSpec(HK, HV, K, V)), (dw.Layer, dw.LayerSpec(HK, HV, K, V))):
            self.each({**lists, **short}, "cu_seqlens", lambda v: kind.packed(c, of, v, 3))
        self.each(lists, "slots", plan.set_slots)
        self.each({**lists, "three": [1, 2, 3]}, "write_slots", lambda v: plan.set_slots([0, 1], v), ("none",))
        flat = {"pairs": [(0, 64)], "numbers": [1, 2, 3]}
        self.each({**lists, **flat}, "snapshots", plan.set_snapshots, ("nested",))
        shapes = {**lists, "negative": -1, "negatives": [2, -1]}
        self.each(shapes, "shape", lambda v: dw.array(0, "f32", v), ("number", "no dimensions"))
        self.each({**lists, "two": [1, 1]}, "strides", lambda v: dw.array(0, "f32", [1], v), ("none",))
        if np is not None:
            large = {"2^62": [1 << 62], "2^70": [1 << 35, 1 << 35], "100": [1] * 100}
            for make in (c.empty, c.zeros):
                self.each({**shapes, **large}, "shape", make, ("number", "no dimensions"))
                for shape in (5, np.int64(5), np.array(5), [5], (5,), np.array([5]), range(5, 6)):
                    self.assertEqual(make(shape).shape, (5,))
        for dtype in (None, "f64", "float64", float, 5, ["f32"], {}, NoNumber(), object, int):
            self.refused("dtype", lambda: dw.array(0, dtype, [1]))
            if np is not None:
                for call in (c.empty, c.zeros, *([c.array] if dtype is not None else [])):
                    self.refused("dtype", lambda: call([1], dtype))

    @needs_numpy
    def test_dtypes_of_other_packages(self):
        torch_dtype = type("dtype", (), {"__init__": lambda self, word: setattr(self, "word", word), "itemsize": 2,
                                         "__repr__": lambda self: f"torch.{self.word}"})
        ml_dtypes = type("bfloat16", (), {})
        words = {"bf16": ("bf16", "bfloat16", "torch.bfloat16", torch_dtype("bfloat16"), ml_dtypes, arrays.bf16_dtype()),
                 "fp16": ("fp16", "float16", np.float16, np.dtype(np.float16), torch_dtype("float16"))}
        for kind in (dw.PrefillSpec, dw.ConvSpec, dw.DecodeSpec, dw.LayerSpec):
            for word, dtypes in words.items():
                for dtype in dtypes:
                    self.assertEqual(kind(HK, HV, K, V, dtype=dtype).struct().dtype, arrays.DTYPES[word])
            for dtype in (np.float32, torch_dtype("float32"), np.dtype(">f2"), np.uint8):
                self.refused("dtype", lambda: kind(HK, HV, K, V, dtype=dtype).struct())
        for dtype in (np.float32, np.int32, np.int64, np.uint8, np.bool_, bool, "bool", torch_dtype("int32")):
            simulator().empty(3, dtype)

    @needs_numpy
    def test_strides_that_lead_nowhere(self):
        """NumPy gives dimensions of length 1 any stride, of torch's tensors every one is met."""
        c = simulator()
        random = np.random.default_rng(3)
        spec = dw.PrefillSpec(1, 1, K, V)
        plan = dw.Prefill.packed(c, spec, [0, 1], 1)
        x = {n: c.array(random.uniform(-1, 1, (1, 1, d)), "bf16") for n, d in (("q", K), ("k", K), ("v", V))}
        x["g"] = c.array(random.uniform(-1, 0, (1, 1)), "f32")
        slots, flags = c.array([0], "i32"), c.array([1], "u8")
        found = []
        for wild in (None, 0, -3, 1 << 41, (1 << 62) + 5, -(1 << 62)):
            def odd(a):
                if wild is None:
                    return a
                d = arrays.describe("a", a)
                strides = [wild if n == 1 else s for n, s in zip(d.shape, d.strides)]
                return dw.array(d.address, d.dtype, d.shape, strides)

            o, pool = poisoned((1, 1, V), "bf16"), c.array(np.ones((1, 1, K, V)), "f32")
            plan.launch(**{n: odd(a) for n, a in x.items()}, o=odd(o), pool=odd(pool), slots=odd(slots),
                        has_initial_state=odd(flags))
            c.synchronize()
            found.append((o.tobytes(), pool.tobytes()))
        self.assertEqual(len(set(found)), 1)
        # As NumPy has them: reversed and sliced dimensions of one element.
        o = poisoned((2, 1, 2 * V), "bf16")[1::7, ::-1, :V]
        plan.launch(**{n: a[::-1, ::-1] for n, a in x.items()}, o=o)


@needs_numpy
class Numbers(unittest.TestCase):
    refused = Named.refused

    def test_whole_numbers_never_wrap(self):
        c = simulator()
        for dtype, low, high in (("i32", -2 ** 31, 2 ** 31 - 1), ("i64", -2 ** 63, 2 ** 63 - 1), ("u8", 0, 255)):
            for good in ([low, high], [[low], [high]], [True, False], [1.0, 0.0], np.array([low, 7]), []):
                self.assertEqual(c.array(good, dtype).tolist(), np.array(good).tolist())
            for wrong in ([high + 1], [low - 1], [1e10 if dtype != "i64" else 2.0 ** 63], [-1e30], [0.5], [np.nan],
                          [np.inf], [-np.inf], [0, 1j], ["1"], [None], [10 ** 30], [[1], [1, 2]], [0, b"1"],
                          np.array([1.5], np.float16), np.array(["2020"], "M8[D]"), {1}, object(), NoNumber()):
                with self.subTest(dtype=dtype, wrong=type(wrong)):
                    self.refused("values", lambda: c.array(wrong, dtype))
        with self.assertRaises(dw.ArgumentError) as caught:
            c.array([[0, 1], [2, 300]], "u8")
        self.assertEqual(str(caught.exception), "values: 300 at [1, 1]; u8 holds whole numbers from 0 to 255")
        self.refused("values", lambda: c.array(np.array([2 ** 64 - 1], np.uint64), "i64"))
        self.assertEqual(c.array(np.array([258, 3], ">i2"), "i64").tolist(), [258, 3])
        self.assertEqual(c.array(np.array([65535], np.uint16), "i32").tolist(), [65535])

    def test_floats_round_and_complex_numbers_are_refused(self):
        c = simulator()
        for dtype in ("f32", "fp16", "bf16"):
            for wrong in ([1j], np.array([1 + 2j], np.complex64), ["x"], [None], [10 ** 400]):
                self.refused("values", lambda: c.array(wrong, dtype))
            self.assertEqual(dw.to_float(c.array([1e300, -1e300, 1, -2.5], dtype)).tolist(), [np.inf, -np.inf, 1, -2.5])
        for call in (c.array, dw.to_bf16, dw.to_float):
            self.refused("values", lambda: call(np.array([1j])))
        made = c.array([1.0, 2.0])
        self.assertEqual((made.dtype, made.tolist()), (np.float32, [1, 2]))
        self.assertEqual(c.array(1.5, "bf16").shape, ())
        self.assertEqual(dw.to_float(c.array(np.arange(6.0).reshape(2, 3).T, "bf16")).tolist(), [[0, 3], [1, 4], [2, 5]])
        self.assertEqual(dw.to_float(np.array([0.5])).tolist(), [0.5])

    def test_uint16_is_bits_where_it_says_so(self):
        c = simulator()
        bits = np.array([0x3F80, 0xC000], np.uint16)
        # Launches and copies take it as bf16, conversions do not guess.
        self.assertEqual(dw.to_float(c.array(bits)).tolist(), [1, -2])
        for dtype in ("bf16", "f32", "fp16"):
            self.refused("values", lambda: c.array(bits, dtype))
            self.assertEqual(dw.to_float(c.array(dw.bf16_bits(bits), dtype)).tolist(), [1, -2])
            self.assertEqual(dw.to_float(c.array(bits.astype(np.float32), dtype)).tolist(), [16256, 49152])
        self.refused("values", lambda: dw.to_bf16(bits))
        self.assertEqual(dw.to_float(bits).tolist(), [1, -2])
        self.assertEqual(dw.to_float(dw.bf16_bits(bits.astype(">u2"))).tolist(), [1, -2])
        self.assertEqual(c.array(dw.bf16_bits(bits), "i32").tolist(), [1, -2])
        self.refused("values", lambda: c.array(dw.to_bf16([0.5]), "i32"))
        # The mark stays with views and copies.
        for made in (dw.to_bf16([1, -2]), c.array([1, -2], "bf16"), c.array(dw.to_bf16([1, -2])), c.zeros(2, "bf16")):
            made[:] = dw.to_bf16([1, -2])
            for view in (made, made[::-1][::-1], made.copy(), made.reshape(2, 1)[:, 0], made[[0, 1]]):
                self.assertEqual(dw.to_float(c.array(view, "bf16")).tolist(), [1, -2])
        for wrong in ([0x3F80], np.zeros(2, np.int16), np.zeros(2), None, "x"):
            self.refused("bits", lambda: dw.bf16_bits(wrong))

    def test_bits_of_bf16_are_no_numbers_of_a_spec(self):
        c = simulator()
        for half in (dw.to_bf16(0.5), dw.to_bf16([0.5]), c.array(0.5, "bf16")):
            # With ml_dtypes it is the number 0.5, which is a scale and no number of segments.
            for name in ("scale", "segments") if half.dtype == np.uint16 else ("segments",):
                self.refused(name, lambda: dw.PrefillSpec(1, 2, 16, 32, **{name: half}).struct())
        # One number without dimensions is converted as others are.
        self.assertEqual(dw.to_float(dw.to_bf16(-0.5)).tolist(), -0.5)
        self.assertEqual(c.array(dw.to_bf16(3.0), "i32").tolist(), 3)


class Foreign(unittest.TestCase):
    """Objects that look like something else, and lack a part of it."""

    refused = Named.refused

    def test_specs_are_not_copied(self):
        for wrong in (ctypes.c_void_p(1), ctypes, memoryview(b"abc"), iter(())):
            for kind in (dw.PrefillSpec, dw.DecodeSpec, dw.ConvSpec, dw.LayerSpec):
                self.refused("key_dim", lambda: kind(1, 2, wrong, 32).struct())

    def test_paths(self):
        for wrong in (0, False, [], {}, 1.5, NoNumber()):
            self.refused("path", lambda: dw.Context("simulator", path=wrong))

    def test_text_is_no_list_of_numbers(self):
        for wrong in ("", "12", b"12", {1: 2}):
            self.refused("shape", lambda: arrays.dimensions("shape", wrong))
            self.refused("slots", lambda: values.wholes("slots", wrong, 32))

    def test_tensors_of_other_packages(self):
        part = {"dtype": "float32", "shape": (3,)}
        for wrong in (SimpleNamespace(data_ptr=5), SimpleNamespace(**part, data_ptr=lambda: 64, stride=lambda: (1,)),
                      SimpleNamespace(**part, __array_interface__={}),
                      SimpleNamespace(**part, __array_interface__={"data": (64, False)})):
            self.refused("x", lambda: arrays.describe("x", wrong))


class Values(unittest.TestCase):
    def test_what_is_shown(self):
        self.assertEqual(values.shown("x"), "'x'")
        self.assertEqual(values.shown(NoNumber()), "a NoNumber")
        self.assertEqual(len(values.shown("x" * 10000)), 503)
