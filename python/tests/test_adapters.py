"""The adapters of transformers, FLA's registry, vLLM and SGLang, on stand-ins of these packages' classes: results, fallbacks,
refusals, and the tensors that they allocate. On torch where that is installed, and on a stand-in."""

import contextlib
import logging
import os
import sys
import types
import unittest
from unittest import mock

import deltawave as dw

from . import reference
from .common import np
from .test_fla import OnStandIn as Base
from .test_fla import torch_stand_in
from .test_ops import torch as real

H, HV, K, V, WIDTH = 2, 4, 16, 32, 4
CHANNELS = 2 * H * K + HV * V
NAMES = ("ops", "drafts", "fla", "causal_conv1d", "transformers", "vllm", "sglang")


def modules(**contents):
    """Modules by dotted name, given as `a__b=dict(...)`, and the packages above them."""
    made = {}
    for name, attributes in contents.items():
        dotted, above = name.replace("__", "."), ""
        for part in dotted.split("."):
            above = f"{above}.{part}" if above else part
            if above not in made:
                made[above] = types.ModuleType(above)
                made[above].__path__ = []
        vars(made[dotted]).update(attributes)
        for full, module in list(made.items()):
            parent, _, last = full.rpartition(".")
            if parent in made:
                setattr(made[parent], last, module)
    return mock.patch.dict(sys.modules, made)


@unittest.skipIf(np is None, "NumPy is not installed")
class OnStandIn(unittest.TestCase):
    tensor, array, close = Base.tensor, Base.array, Base.close

    def setUp(self):
        self.torch = torch_stand_in
        self.made = torch_stand_in.package(*NAMES)

    def inside(self, values, dtype="float32"):
        """A tensor in the simulator's memory, as a GPU's tensors are on the GPU, and its numbers."""
        x, exact = self.tensor(values, dtype)
        return self.made.ops.empty(tuple(x.shape), x.dtype).copy_(x), exact

    @contextlib.contextmanager
    def allocations(self):
        """Counts the tensors that are made inside, by what makes them. Views are none."""
        counts = {}

        def counted(owner, name):
            before = getattr(owner, name)

            def call(*arguments, **named):
                counts[name] = counts.get(name, 0) + 1
                return before(*arguments, **named)

            return mock.patch.object(owner, name, call)

        stand_in = sys.modules.get("torch") if self.torch is not torch_stand_in else None
        owners = [self.made.ops.torch if stand_in is None else stand_in]
        with contextlib.ExitStack() as stack:
            for name in ("empty", "zeros", "full", "ones", "where"):
                stack.enter_context(counted(owners[0], name))
            stack.enter_context(counted(self.made.ops, "Memory"))
            kind = self.torch.Tensor
            for name in ("contiguous", "clone", "copy_", "masked_fill", "index_select"):
                stack.enter_context(counted(kind, name))
            yield counts

    # transformers

    def modeling(self):
        """A stand-in of a modeling module: functions that say that they were called."""
        log = []

        def function(name):
            def call(*arguments, **named):
                log.append(name)
                return name

            return call

        class TinyRMSNormGated:
            __module__ = "transformers.models.qwen3_next.modeling_qwen3_next"

            def forward(self, hidden_states, gate):
                log.append("norm")
                return "norm"

        class TinyGatedDeltaNet:
            __module__ = TinyRMSNormGated.__module__

            def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
                log.append(("layer", kwargs))
                return "layer"

        names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn",
                 "causal_conv1d_update")
        contents = {name: function(name) for name in names}
        return {**contents, "TinyRMSNormGated": TinyRMSNormGated, "TinyGatedDeltaNet": TinyGatedDeltaNet}, log

    def transformers(self, contents):
        return modules(transformers={"__version__": "5.23.0"},
                       transformers__models__qwen3_next__modeling_qwen3_next=contents)

    def rows(self, tokens, inside=False, seed=1):
        random = np.random.default_rng(seed)
        make = self.inside if inside else self.tensor
        shapes = {"q": (1, tokens, H, K), "k": (1, tokens, H, K), "v": (1, tokens, HV, V)}
        made = {n: make(random.uniform(-0.5, 0.5, s), "bfloat16") for n, s in shapes.items()}
        made["g"] = make(random.uniform(-0.2, 0, (1, tokens, HV)))
        made["beta"] = make(random.uniform(0, 1, (1, tokens, HV)), "bfloat16")
        return {n: x for n, (x, _) in made.items()}, {n: x for n, (_, x) in made.items()}

    def test_transformers(self):
        contents, log = self.modeling()
        hooks = self.made.transformers
        x, exact = self.rows(9)
        gates = {"g": x["g"], "beta": x["beta"]}
        with self.transformers(contents):
            module = sys.modules["transformers.models.qwen3_next.modeling_qwen3_next"]
            before = dict(vars(module))
            names = hooks.enable(["qwen3_next"], simulator=True)
            self.assertEqual(len(names), 6)
            self.assertEqual(hooks.enable(["qwen3_next"], simulator=True), names)
            # Keywords that a model passes on are not deltawave's: they are dropped, as transformers does.
            o, state = module.torch_chunk_gated_delta_rule(x["q"], x["k"], x["v"], **gates, initial_state=None,
                                                           output_final_state=True, use_qk_l2norm_in_kernel=True,
                                                           cu_seqlens=None, position_ids=None)
            q, k = (reference.l2_normalised(exact[n][0]) for n in "qk")
            wanted, last = reference.prefill(q, k, exact["v"][0], exact["g"][0], exact["beta"][0], [0, 9],
                                             np.zeros((1, HV, K, V)), K ** -0.5)
            self.close(o, wanted[None])
            self.close(state, last)
            self.assertEqual(log, [])
            # What deltawave refuses, the function that was there answers, with a warning that says why.
            with self.assertLogs(hooks.__name__, logging.WARNING) as caught:
                single = {n: t.float() for n, t in x.items()}
                answer = module.torch_chunk_gated_delta_rule(single["q"], single["k"], single["v"], **gates)
            self.assertEqual((answer, log), ("torch_chunk_gated_delta_rule",) + (["torch_chunk_gated_delta_rule"],))
            self.assertIn("q: dtype", caught.output[0])
            # The gated norm.
            layer = module.TinyRMSNormGated()
            layer.weight, w = self.tensor(np.linspace(0.5, 1.5, V))
            layer.variance_epsilon, layer.activation = 1e-6, "silu"
            (h, h_exact), (z, z_exact) = (self.tensor(np.random.default_rng(i).uniform(-1, 1, (7, V)), "bfloat16")
                                          for i in range(2))
            norm = h_exact / np.sqrt((h_exact ** 2).mean(-1, keepdims=True) + 1e-6) * w
            self.close(layer.forward(h, z), norm * z_exact * reference.sigmoid(z_exact))
            layer.activation = "gelu"
            with self.assertLogs(hooks.__name__, logging.WARNING):
                self.assertEqual(layer.forward(h, z), "norm")
            hooks.disable()
            self.assertEqual({n: vars(module)[n] for n in before}, before)
            # Without `simulator`, tensors on the CPU are transformers' own.
            hooks.enable(["qwen3_next"])
            self.assertEqual(module.torch_chunk_gated_delta_rule(x["q"], x["k"], x["v"], **gates),
                             "torch_chunk_gated_delta_rule")
            hooks.disable()

    def layer_of_transformers(self, kind, layer):
        """Gives a stand-in of transformers' layers its attributes, and returns the numbers of its weights. Its projections
        return what `layer.rows` holds by name."""
        random = np.random.default_rng(3)

        def draw(low, high, shape, dtype="bfloat16"):
            return self.inside(random.uniform(low, high, shape), dtype)

        weight, w = draw(-1, 1, (CHANNELS, 1, WIDTH))
        layer.A_log, a_log = draw(0, 1, (HV,), "float32")
        layer.dt_bias, bias = draw(-4, -2, (HV,), "float32")
        norm_weight, norm = draw(0.5, 1.5, (V,), "float32")
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim = H, HV, K, V
        layer.layer_idx, layer.activation, layer.rows = 0, "silu", {}
        layer.conv1d = types.SimpleNamespace(weight=weight, bias=None)
        layer.parameters = lambda: []
        named = {"qwen3_next": ("in_proj_qkvz", "in_proj_ba"),
                 "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
                 "olmo_hybrid": ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")}[kind]
        for name in named:
            setattr(layer, name, lambda hidden, name=name: layer.rows[name])
        olmo = kind == "olmo_hybrid"
        gated = types.SimpleNamespace(weight=norm_weight, variance_epsilon=1e-6, activation="silu")
        setattr(layer, "o_norm" if olmo else "norm", gated)
        setattr(layer, "o_proj" if olmo else "out_proj", lambda y: y)
        return w[:, 0], 0, a_log, bias, norm

    def rows_of_transformers(self, kind, layer, batch, tokens, seed):
        """Outputs of the projections, given to the layer, and x, z, a and b of all tokens as numbers."""
        random = np.random.default_rng(seed)

        def draw(columns):
            return self.inside(random.uniform(-1, 1, (batch, tokens, columns)), "bfloat16")

        count, share, found = batch * tokens, HV // H, {}
        if kind == "qwen3_next":
            (found["in_proj_qkvz"], rows), (found["in_proj_ba"], gates) = draw(CHANNELS + HV * V), draw(2 * HV)
            parts = np.split(rows.reshape(count, H, -1), np.cumsum([K, K, share * V]), axis=2)
            *qkv, z = (t.reshape(count, -1) for t in parts)
            x = np.concatenate(qkv, 1)
            b, a = (t.reshape(count, HV) for t in np.split(gates.reshape(count, H, 2 * share), 2, axis=2))
        else:
            names = {"z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a"} if kind == "qwen3_5" else {
                "z": "g_proj", "b": "b_proj", "a": "a_proj"}
            columns = {"in_proj_qkv": CHANNELS} if kind == "qwen3_5" else {"q_proj": H * K, "k_proj": H * K, "v_proj": HV * V}
            exact = {}
            for name, width in {**columns, names["z"]: HV * V, names["b"]: HV, names["a"]: HV}.items():
                found[name], exact[name] = draw(width)
            x = np.concatenate([exact[name].reshape(count, -1) for name in columns], 1)
            z, b, a = (exact[names[name]].reshape(count, -1) for name in "zba")
        layer.rows = found
        return x, z.reshape(count, HV, V), a, b

    def cache_of_transformers(self):
        """A stand-in of a cache of transformers with one layer of states."""
        made = self.made.ops.empty
        kept = types.SimpleNamespace(has_previous_state={0: False}, conv_states={0: None}, recurrent_states={0: None},
                                     record_past=False)

        def update_conv_state(states, index, conv_kernel_size):
            kept.conv_states[0] = made(tuple(states.shape), states.dtype).copy_(states)
            kept.has_previous_state[0] = True

        def update_recurrent_state(states, index):
            kept.recurrent_states[0] = made(tuple(states.shape), states.dtype).copy_(states)

        return types.SimpleNamespace(layers=[kept], update_conv_state=update_conv_state,
                                     update_recurrent_state=update_recurrent_state), kept

    def test_whole_layers_of_transformers(self):
        hooks, contents = self.made.transformers, self.modeling()[0]
        kinds = ("qwen3_5", "qwen3_next") + (("olmo_hybrid",) if self.torch is not torch_stand_in else ())
        for kind in kinds:
            with self.subTest(kind), self.transformers(contents):
                hooks.enable(["qwen3_next"], simulator=True)
                self.addCleanup(hooks.disable)
                layer = contents["TinyGatedDeltaNet"]()
                weights = self.layer_of_transformers(kind, layer)
                cache, kept = self.cache_of_transformers()
                conv, states = np.zeros((2, CHANNELS, WIDTH - 1)), np.zeros((2, HV, K, V))
                hooks.answered.clear()
                # A prompt, two tokens one by one, a prompt that goes on, and a token.
                for step, tokens in enumerate((5, 1, 1, 3, 1)):
                    x, z, a, b = self.rows_of_transformers(kind, layer, 2, tokens, step)
                    hidden, _ = self.tensor(np.zeros((2, tokens, 8)), "bfloat16")
                    before = kept.conv_states[0], kept.recurrent_states[0]
                    y = layer.forward(hidden, cache_params=cache)
                    exact, conv, states = reference.layer(x, z, a, b, *weights, [0, tokens, 2 * tokens], conv, states)
                    self.assertEqual(tuple(y.shape), (2, tokens, HV * V))
                    self.close(y, exact.reshape(2, tokens, HV * V), 1e-2)
                    self.assertTrue((self.array(kept.conv_states[0])[:, :, 1:] == conv).all())
                    self.assertLess(reference.error(self.array(kept.recurrent_states[0]), states), 1e-2)
                    if step:  # in place
                        self.assertIs(kept.conv_states[0], before[0])
                        self.assertIs(kept.recurrent_states[0], before[1])
                self.assertEqual(hooks.answered, {"layer": 5})
                with self.allocations() as counts:  # of a token: y, and the memory that it is in
                    self.rows_of_transformers(kind, layer, 2, 1, 9)
                    made = dict(counts)
                    layer.forward(hidden, cache_params=cache)
                # The rows that OLMo-Hybrid's layer puts together are copied to where the simulator reaches them.
                wanted = {"Memory": 2, "copy_": 1} if kind == "olmo_hybrid" else {"Memory": 1}
                self.assertEqual({n: c - made.get(n, 0) for n, c in counts.items() if c != made.get(n, 0)}, wanted)
                # Without a cache: the prompt again, with other rows.
                x, z, a, b = self.rows_of_transformers(kind, layer, 2, 5, 7)
                y = layer.forward(self.tensor(np.zeros((2, 5, 8)), "bfloat16")[0])
                exact, *_ = reference.layer(x, z, a, b, *weights, [0, 5, 10], 0 * conv, 0 * states)
                self.close(y, exact.reshape(2, 5, HV * V), 1e-2)
                hooks.disable()

    def test_layers_that_transformers_runs_itself(self):
        hooks, (contents, log) = self.made.transformers, self.modeling()
        with self.transformers(contents):
            hooks.enable(["qwen3_next"], simulator=True)
            self.addCleanup(hooks.disable)
            layer = contents["TinyGatedDeltaNet"]()
            self.layer_of_transformers("qwen3_5", layer)
            hidden, _ = self.tensor(np.zeros((2, 1, 8)), "bfloat16")
            (cache, kept), packed = self.cache_of_transformers(), {"cu_seq_lens_q": object()}
            self.assertEqual(layer.forward(hidden, **packed), "layer")
            self.assertEqual(log.pop(), ("layer", packed))
            kept.record_past = True
            self.assertEqual(layer.forward(hidden, cache_params=cache), "layer")
            self.assertEqual(layer.forward(hidden, cache_params=types.SimpleNamespace(layers=[])), "layer")
            self.assertEqual(layer.forward(hidden, cache_params=types.SimpleNamespace(layers=[object()])), "layer")
            layer.conv1d._hf_hook = object()
            self.assertEqual(layer.forward(hidden), "layer")
            layer.conv1d._hf_hook = None
            layer.norm._forward_hooks = {0: print}
            self.assertEqual(layer.forward(hidden), "layer")
            layer.norm._forward_hooks = {}
            for name, value, wrong in (("head_k_dim", 24, "head dimension"), ("activation", "gelu", "activations"),
                                       ("num_v_heads", 2 * HV, "conv1d")):
                before = getattr(layer, name)
                self.rows_of_transformers("qwen3_5", layer, 2, 1, 0)
                setattr(layer, name, value)
                with self.assertLogs(hooks.__name__, logging.WARNING) as caught:
                    self.assertEqual(layer.forward(hidden), "layer")
                self.assertIn(wrong, caught.output[0])
                setattr(layer, name, before)
            with self.assertLogs(hooks.__name__, logging.WARNING):
                self.assertEqual(layer.forward(hidden.float()), "layer")
            # States of another batch.
            kept.record_past = False
            layer.forward(hidden, cache_params=cache)
            self.rows_of_transformers("qwen3_5", layer, 1, 1, 0)
            with self.assertRaises(dw.ArgumentError):
                layer.forward(hidden[:1], cache_params=cache)
            # Without layers the functions stay.
            left = hooks.enable(["qwen3_next"], simulator=True, layers=False)
            self.assertEqual(layer.forward(hidden), "layer")
            self.assertFalse([name for name in left if "GatedDeltaNet" in name])
            self.assertTrue(left)
            hooks.disable()
            self.assertEqual(layer.forward(hidden), "layer")
            self.assertEqual(hooks._replaced, [])

    def test_another_release_of_transformers_is_refused(self):
        contents, _ = self.modeling()
        del contents["causal_conv1d_update"]
        with self.transformers(contents):
            with self.assertRaises(dw.Unsupported) as caught:
                self.made.transformers.enable(["qwen3_next"])
        self.assertIn("causal_conv1d_update", str(caught.exception))
        self.assertEqual(self.made.transformers._replaced, [])
        with modules(transformers={"__version__": "4.0"}), self.assertRaises(dw.Unsupported):
            self.made.transformers.enable(["olmo_hybrid"])
        with self.assertRaises(dw.ArgumentError):
            self.made.transformers.enable(["llama"])

    def test_hub_layers(self):
        hooks = self.made.transformers
        with modules(kernels={"Mode": types.SimpleNamespace(INFERENCE="inference"), "register_kernel_mapping": None}):
            taken = []
            sys.modules["kernels"].register_kernel_mapping = taken.append
            hooks.register_hub_kernels()
        mapping = taken[0]
        self.assertEqual(sorted(mapping), sorted(hooks.LAYERS))
        for name, devices in mapping.items():
            self.assertEqual(devices["rocm"]["inference"].load(), hooks.LAYERS[name])
        x, _ = self.rows(9)
        state, _ = self.tensor(np.zeros((1, HV, K, V)))
        chunk = hooks.ChunkGatedDeltaRule()
        o, _ = chunk.forward(x["q"], x["k"], x["v"], x["g"], x["beta"], use_qk_l2norm_in_kernel=True)
        wanted, _ = self.made.fla.chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
        self.assertTrue((self.array(o) == self.array(wanted)).all())
        one = {n: t[:, :1] for n, t in x.items()}
        o, after = hooks.RecurrentGatedDeltaRule().forward(one["q"], one["k"], one["v"], one["g"], one["beta"], state, True)
        self.assertEqual((tuple(o.shape), tuple(after.shape)), ((1, 1, HV, V), (1, HV, K, V)))

    # FLA's registry

    def test_the_backend_of_fla(self):
        taken = {}

        class BaseBackend:
            pass

        def register(operation):
            return lambda backend: taken.setdefault(operation, backend)

        with modules(fla__backends={"BaseBackend": BaseBackend, "register": register}):
            backend = self.made.fla.register(simulator=True)()
            careful = self.made.fla.register()()
            with mock.patch.dict(os.environ, {"FLA_DISABLE_BACKEND_DISPATCH": "1"}), self.assertRaises(dw.Unsupported):
                self.made.fla.register()
        self.assertIsInstance(backend, taken["gated_delta_rule"])
        self.assertEqual((backend.backend_type, backend.env_var), ("deltawave", "FLA_DELTAWAVE"))
        x, _ = self.rows(9)
        self.assertEqual(backend.chunk_gated_delta_rule_verifier(**x), (True, None))
        self.assertFalse(careful.chunk_gated_delta_rule_verifier(**x)[0])
        for wrong in ({"q": x["q"].float()}, {"cp_context": object()}, {"beta": self.tensor(np.ones((1, 9, HV, V)))[0]}):
            accepted, reason = backend.chunk_gated_delta_rule_verifier(**{**x, **wrong})
            self.assertFalse(accepted)
            self.assertTrue(reason.startswith(next(iter(wrong)) + ":"), reason)
        o, state = backend.chunk_gated_delta_rule(**x, output_final_state=True)
        wanted, last = self.made.fla.chunk_gated_delta_rule(**x, output_final_state=True)
        self.assertTrue((self.array(o) == self.array(wanted)).all() and (self.array(state) == self.array(last)).all())
        self.assertEqual(type(backend).calls, 1)
        with mock.patch.dict(sys.modules, {"fla": None, "fla.backends": None}), self.assertRaises(dw.Unsupported):
            self.made.fla.register()

    # vLLM

    def vllm_step(self, interleaved, share=HV // H, dtype="float32"):
        """A layer of vLLM's, its step's metadata, projections and what they should give."""
        random = np.random.default_rng(11)
        lengths, decodes, slots = [0, 1, 2, 40, 45], 2, [3, 0, 4, 1]
        tokens = lengths[-1]
        z_of = HV * V

        def draw(low, high, shape, dtype="bfloat16"):
            return self.inside(random.uniform(low, high, shape), dtype)

        x, rows = draw(-1, 1, (tokens, CHANNELS + z_of))
        ba, gates = draw(-1, 1, (tokens, 2 * HV))
        conv_state, conv_start = draw(-1, 1, (6, WIDTH - 1, CHANNELS))
        # On the CPU vLLM keeps [slots, HV, K, V] in memory that it calls [slots, HV, V, K].
        pool, start = draw(-1, 1, (6, HV, V, K), dtype)
        start = start.reshape(6, HV, K, V)
        weight, w = draw(-1, 1, (CHANNELS, 1, WIDTH))
        a_log, a_log_exact = draw(0, 1, (HV,), "float32")
        bias, bias_exact = draw(-4, -2, (HV,), "float32")
        norm_weight, norm_exact = draw(0.5, 1.5, (V,), "float32")
        layer = types.SimpleNamespace(
            num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, tp_size=1, gqa_interleaved_layout=interleaved,
            conv_kernel_size=WIDTH, kv_cache=(conv_state, pool), conv1d=types.SimpleNamespace(weight=weight, bias=None),
            A_log=a_log, dt_bias=bias, norm=types.SimpleNamespace(weight=norm_weight, eps=1e-6, activation="swish"),
            split_ba=lambda ba: (ba[:, :HV], ba[:, HV:]))
        i32 = self.inside(lengths, "int32")[0]
        metadata = types.SimpleNamespace(num_decodes=decodes, num_prefills=2, num_actual_tokens=tokens,
                                         non_spec_query_start_loc=i32,
                                         non_spec_state_indices_tensor=self.inside(slots, "int32")[0],
                                         has_initial_state=self.inside([1, 1, 0, 1], "uint8")[0],
                                         spec_sequence_masks=None, num_spec_decodes=0, checkpoint=None)
        if interleaved:
            of_head = rows.reshape(tokens, H, -1)
            cut = np.cumsum([K, K, share * V])
            q, k, v, z = np.split(of_head, cut, axis=2)
            flat = np.concatenate([t.reshape(tokens, -1) for t in (q, k, v)], 1)
            b, a = (t.reshape(tokens, HV) for t in np.split(gates.reshape(tokens, H, 2 * share), 2, axis=2))
        else:
            flat, z, (b, a) = rows[:, :CHANNELS], rows[:, CHANNELS:], np.split(gates, 2, axis=1)
        has = np.array([1, 0, 0, 1])  # slot 0 is vLLM's null block: padding, whose rows are zeros
        starts = [s[slots] * has.reshape(-1, *[1] * (s.ndim - 1)) for s in (conv_start.swapaxes(1, 2), start)]
        wanted = reference.layer(flat, z.reshape(tokens, HV, V), a, b, w[:, 0], 0, a_log_exact, bias_exact, norm_exact,
                                 lengths, *starts)
        wanted[0][1] = 0
        return layer, metadata, (x, ba), wanted, slots, (conv_start, start)

    def test_the_layer_of_vllm(self):
        for interleaved, dtype in ((False, "float32"), (True, "float32"), (False, "bfloat16"), (True, "float16")):
            with self.subTest(interleaved=interleaved, dtype=dtype):
                layer, metadata, (x, ba), (y, conv, states), slots, (conv_start, start) = self.vllm_step(
                    interleaved, dtype=dtype)
                out = self.made.ops.empty((x.shape[0], HV, V), x.dtype)
                self.made.vllm.layer_step(layer, metadata, x, ba, out, "token_major")
                self.close(out, y, 1e-2)
                found_conv, found = (self.array(t) for t in layer.kv_cache)
                found = found.reshape(start.shape)
                for n in (0, 2, 3):
                    self.assertTrue((found_conv[slots[n]].T == conv[n]).all())
                    self.assertLess(reference.error(found[slots[n]], states[n]), 1e-2)
                for slot in (0, 2, 5):
                    self.assertTrue((found[slot] == start[slot]).all() and (found_conv[slot] == conv_start[slot]).all())

    def test_the_layer_of_vllm_allocates_nothing(self):
        layer, metadata, (x, ba), *_ = self.vllm_step(False)
        out = self.made.ops.empty((x.shape[0], HV, V), x.dtype)
        self.made.vllm.layer_step(layer, metadata, x, ba, out, "token_major")
        # The step's slots, where the simulator reaches them, as a GPU reaches its own.
        key, slots = metadata._deltawave_slots
        metadata._deltawave_slots = key, self.made.ops.on_device(slots)
        with self.allocations() as counts:
            self.made.vllm.layer_step(layer, metadata, x, ba, out, "token_major")
        self.assertEqual(counts, {})
        # The first layer of the next step makes the slots, and nothing else.
        del metadata._deltawave_slots
        with self.allocations() as counts:
            self.made.vllm.layer_step(layer, metadata, x, ba, out, "token_major")
        self.assertEqual(counts.get("masked_fill"), 1)

    def test_layers_that_vllm_runs_itself(self):
        torch, why = self.torch, self.made.vllm.unsupported

        def layer(**changed):
            given = {"model_config": types.SimpleNamespace(dtype=torch.bfloat16), "head_k_dim": K, "head_v_dim": V,
                     "activation": "silu", "norm": types.SimpleNamespace(activation="silu"), "in_proj_qkvz": object(),
                     "conv_kernel_size": 4, "num_spec": 15, "get_state_dtype": lambda: (torch.bfloat16, torch.float32), **changed}
            return types.SimpleNamespace(**given)

        for state in (torch.float32, torch.bfloat16, torch.float16):
            self.assertIsNone(why(layer(get_state_dtype=lambda: (torch.bfloat16, state))))
        for changed in ({"model_config": types.SimpleNamespace(dtype=torch.float32)}, {"head_k_dim": 24},
                        {"head_v_dim": 512}, {"activation": "gelu"}, {"in_proj_qkv": object()}, {"conv_kernel_size": 5},
                        {"norm": types.SimpleNamespace(activation="gelu")}, {"num_spec": 16},
                        {"get_state_dtype": lambda: (torch.bfloat16, torch.uint8)},
                        {"get_state_dtype": lambda: (torch.float16, torch.float16)}):
            self.assertIsInstance(why(layer(**changed)), str, changed)

    def vllm_modules(self, on_cpu, metadata=None):
        """vLLM's modules as far as the plugin uses them."""
        registered = {}

        class Registry:
            @staticmethod
            def register_oot(name):
                return lambda made: registered.setdefault(name, made)

        class ChunkGatedDeltaRule:
            def __init__(self):
                self._forward_method = None

        log = []

        class QwenGatedDeltaNetAttention:
            def __init__(self, **attributes):
                vars(self).update(attributes)
                self._forward_method = self.forward_vllm

            def forward_vllm(self, hidden_states):
                return "vllm"

            def split_ba(self, ba):
                return ba[:, :HV], ba[:, HV:]

            def prepare_gdn_attention_core_inputs(self, qkvz, ba, tokens):
                return qkvz[:, :CHANNELS], qkvz[:, CHANNELS:].unflatten(1, (HV, V)), *self.split_ba(ba)

            def _forward_core(self, mixed_qkv, b, a, core_attn_out):
                log.append("core")

            def _forward_core_rocm(self, qkvz, ba, z_out, core_attn_out):
                log.append("rocm")

        context = types.SimpleNamespace(attn_metadata=metadata)
        platform = types.SimpleNamespace(is_cpu=lambda: on_cpu)
        class OlmoHybridGatedDeltaNetAttention:
            def __init__(self, **attributes):
                vars(self).update(attributes)

            def _full_forward(self, hidden_states, output):
                log.append("olmo")

        theirs = {"ChunkGatedDeltaRule": ChunkGatedDeltaRule, "QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention,
                  "get_forward_context": lambda: context, "is_conv_state_dim_first": lambda: False,
                  "_encode_layer_name": lambda name: name}
        olmo = {name: theirs[name] for name in ("get_forward_context", "is_conv_state_dim_first")}
        olmo["OlmoHybridGatedDeltaNetAttention"] = OlmoHybridGatedDeltaNetAttention
        patched = modules(vllm__platforms={"current_platform": platform},
                          vllm__model_executor__custom_op={"CustomOp": Registry, "PluggableLayer": Registry},
                          vllm__model_executor__layers__mamba__gdn__qwen_gdn_linear_attn=theirs,
                          vllm__model_executor__layers__mamba__gdn__olmo_gdn_linear_attn=olmo)
        return patched, registered, context, log

    def plugin(self, word, on_cpu=False):
        """What the plugin registers under DELTAWAVE_VLLM=word."""
        patched, registered, *rest = self.vllm_modules(on_cpu)
        environment = {name: x for name, x in os.environ.items() if name != "DELTAWAVE_VLLM"}
        environment.update({} if word is None else {"DELTAWAVE_VLLM": word})
        with patched, mock.patch.dict(os.environ, environment, clear=True), \
                mock.patch.object(self.made.vllm, "_registered", []):
            self.made.vllm.register()
            self.made.vllm.register()
        return registered, *rest

    def test_what_the_plugin_of_vllm_registers(self):
        layer, prefill = ["QwenGatedDeltaNetAttention", "OlmoHybridGatedDeltaNetAttention"], ["ChunkGatedDeltaRule"]
        for word, on_cpu, wanted in ((None, False, layer), (None, True, []), ("layer", True, layer), ("0", False, []),
                                     ("prefill", False, prefill)):
            with self.subTest(word=word, on_cpu=on_cpu):
                self.assertEqual(list(self.plugin(word, on_cpu)[0]), wanted)
        with self.assertRaises(dw.ArgumentError):
            self.plugin("all")
        with modules(vllm__platforms={"current_platform": types.SimpleNamespace(is_cpu=lambda: False)}), \
                mock.patch.object(self.made.vllm, "_registered", []), self.assertRaises(dw.Unsupported) as caught:
            self.made.vllm.register()
        self.assertTrue(str(caught.exception).startswith("vllm:"))

    def test_the_layer_class_of_vllm(self):
        registered, context, log = self.plugin("layer")
        layer, metadata, (x, ba), (y, *_), *_ = self.vllm_step(False)
        made = registered["QwenGatedDeltaNetAttention"](
            **{**vars(layer), "prefix": "layer.0", "activation": "silu", "in_proj_qkvz": lambda h: (x, None),
               "in_proj_ba": lambda h: (ba, None), "out_proj": lambda h: (h, None),
               "model_config": types.SimpleNamespace(dtype=self.torch.bfloat16), "num_spec": 2,
               "get_state_dtype": lambda: (self.torch.bfloat16, self.torch.float32)})
        context.attn_metadata = {"layer.0": metadata}

        def core(qkvz, ba, z_out, core_attn_out, name, use_aiter):
            made._forward_core_rocm(qkvz, ba, z_out, core_attn_out)

        named = types.SimpleNamespace(qwen_gdn_attention_core=core,
                                      cpu_gdn_attention_core=lambda *arguments: log.append("core"))
        with mock.patch.object(self.made.vllm.torch.ops, "vllm", named, create=True):
            output = made.forward_deltawave(x)
            self.close(output, y.reshape(len(y), -1), 1e-2)
            self.assertEqual(made.steps, {"deltawave": 1, "vllm": 0})
            # Only profiled: nothing runs.
            context.attn_metadata = None
            self.assertTrue((self.array(made.forward_deltawave(x)) == 0).all())
            # A batch with checkpoints inside its prompts: vLLM's kernels, then its norm.
            metadata.checkpoint = object()
            context.attn_metadata = {"layer.0": metadata}
            made.norm = lambda core, z: core
            made.forward_deltawave(x)
        self.assertEqual((made.steps, log), ({"deltawave": 1, "vllm": 1}, ["core"]))
        with self.assertLogs(self.made.vllm.__name__, logging.WARNING) as caught:
            other = registered["QwenGatedDeltaNetAttention"](
                prefix="layer.1", model_config=types.SimpleNamespace(dtype=self.torch.float32))
        self.assertIn("layer.1", caught.output[0])
        self.assertEqual(other._forward_method("x"), "vllm")

    def test_the_prefill_op_of_vllm(self):
        registered, *_ = self.plugin("prefill")
        op = registered["ChunkGatedDeltaRule"]()
        x, exact = self.rows(70, inside=True)
        lengths, _ = self.inside([0, 30, 70], "int32")
        initial, start = self.inside(np.random.default_rng(4).uniform(-1, 1, (2, HV, V, K)))
        core, _ = self.inside(np.zeros((80, HV, V)), "bfloat16")
        given = {**x, "initial_state": initial, "output_final_state": True, "cu_seqlens": lengths}
        o, state = op._forward_method(**given, use_qk_l2norm_in_kernel=False, core_attn_out=core)
        flat = [exact[n][0] for n in ("q", "k", "v", "g", "beta")]
        wanted, last = reference.prefill(*flat, [0, 30, 70], start.swapaxes(2, 3), K ** -0.5)
        self.close(o, wanted[None])
        self.close(state, last.swapaxes(2, 3))
        self.assertTrue((self.array(core)[:70] == self.array(o)[0]).all() and (self.array(core)[70:] == 0).all())
        self.assertIsNone(op._forward_method(**{**given, "output_final_state": False})[1])

    # SGLang

    def sglang_kernel(self):
        class LinearAttnKernelBase:
            pass

        return self.made.sglang.kernel_class(LinearAttnKernelBase)()

    # Types of states, and the error that rounding them once may cost.
    STATES = (("float32", 1e-5), ("bfloat16", 3e-3), ("float16", 4e-4))

    def sglang_step(self, tokens, dtype="float32"):
        random = np.random.default_rng(13)
        x, exact = self.rows(tokens, inside=True)
        pool, start = self.inside(random.uniform(-1, 1, (5, HV, V, K)), dtype)
        (a, a_exact), (b, b_exact) = (self.inside(random.uniform(-1, 1, (tokens, HV)), "bfloat16") for _ in range(2))
        (a_log, a_log_exact), (bias, bias_exact) = (self.inside(random.uniform(-1, 1, HV)) for _ in range(2))
        g, beta = reference.gates(a_exact, b_exact, a_log_exact, bias_exact)
        exact = {n: t[0] for n, t in exact.items()}
        exact["q"], exact["k"] = (reference.l2_normalised(exact[n]) for n in "qk")
        return x, exact, pool, start.swapaxes(2, 3), {"a": a, "b": b, "A_log": a_log, "dt_bias": bias}, (g, beta)

    def test_extend_of_sglang(self):
        for dtype, _ in self.STATES:
            with self.subTest(dtype=dtype):
                self.extended(dtype)

    def extended(self, dtype):
        kernel = self.sglang_kernel()
        x, exact, pool, start, *_ = self.sglang_step(150, dtype)
        lengths, _ = self.inside([0, 20, 150], "int32")
        slots, _ = self.inside([2, 4], "int32")
        # The state before chunk 2 of the second sequence; the first one is not tracked, and has its initial state.
        chunks, _ = self.inside([-1, 2], "int32")
        track, _ = self.inside(np.zeros((2, HV, V, K)), dtype)
        output, _ = self.inside(np.zeros((1, 150, HV, V)), "bfloat16")
        given = {"ssm_states": pool, "cache_indices": slots, "query_start_loc": lengths, "output": output,
                 "layer_id": 0, "extend_prefix_lens": None}
        o, none, no_h = kernel.extend(**x, **given, track_state=track, track_chunk_idx=chunks)
        self.assertEqual((none, no_h), (None, None))
        wanted, last = reference.prefill(*(exact[n] for n in ("q", "k", "v", "g", "beta")), [0, 20, 150], start[[2, 4]],
                                         K ** -0.5)
        self.close(o, wanted[None])
        self.assertTrue((self.array(output) == self.array(o)).all())
        found = self.array(pool).swapaxes(2, 3)
        self.assertLess(reference.error(found[[2, 4]], last), 8e-3)
        self.assertTrue((found[[0, 1, 3]] == start[[0, 1, 3]]).all())
        _, part = reference.prefill(*(exact[n][20:148] for n in ("q", "k", "v", "g", "beta")), [0, 128], start[[4]],
                                    K ** -0.5)
        tracked = self.array(track).swapaxes(2, 3)
        self.assertLess(reference.error(tracked[1], part[0]), 8e-3)
        self.assertTrue((tracked[0] == start[2]).all())
        # Other layers of the step allocate nothing, with and without tracking.
        with self.allocations() as counts:
            kernel.extend(**x, **given)
        self.assertEqual(counts, {})
        kernel.tracked = kernel.tracked[0], self.made.ops.on_device(kernel.tracked[1])
        with self.allocations() as counts:
            kernel.extend(**x, **given, track_state=track, track_chunk_idx=chunks)
        # The stand-in's index_select with `out` is a copy of a new tensor.
        self.assertEqual(counts, {"index_select": 1, "copy_": 1} if self.torch is torch_stand_in else {})
        with self.assertRaises(dw.Unsupported):
            kernel.extend(**x, **given, inplace_update=False)

    def test_decode_of_sglang(self):
        for dtype, bar in self.STATES:
            with self.subTest(dtype=dtype):
                self.decoded(dtype, bar)

    def decoded(self, dtype, bar):
        kernel = self.sglang_kernel()
        x, exact, pool, start, raw, (g, beta) = self.sglang_step(3, dtype)
        slots, _ = self.inside([2, 4, 1], "int32")
        q, k, v = x["q"], x["k"], x["v"]
        wanted, last = reference.prefill(exact["q"], exact["k"], exact["v"], g, beta, range(4), start[[2, 4, 1]], K ** -0.5)
        with self.allocations() as counts:
            o = kernel.decode(q, k, v, **raw, ssm_states=pool, cache_indices=slots, query_start_loc=None)
        self.close(o, wanted[None])
        self.assertLess(reference.error(self.array(pool).swapaxes(2, 3)[[2, 4, 1]], last), bar)
        self.assertEqual(counts.get("Memory"), 1, "o, and nothing else")
        # Packed: rows of the convolution.
        _, _, pool, *_ = self.sglang_step(3, dtype)
        mixed = np.concatenate([self.array(t).reshape(3, -1) for t in (q, k, v)], 1)
        packed = kernel.packed_decode(self.inside(mixed, "bfloat16")[0], **raw, scale=K ** -0.5, ssm_states=pool,
                                      cache_indices=slots, num_v_heads=HV, head_v_dim=V)
        self.assertTrue((self.array(packed) == self.array(o)).all())
        with self.assertRaises(dw.Unsupported):
            kernel.packed_decode(self.inside(mixed, "bfloat16")[0], **raw, scale=1.0, ssm_states=pool, cache_indices=slots,
                                 num_v_heads=HV, head_v_dim=V, replayssm_write_pos=slots)

    def test_target_verify_of_sglang(self):
        for dtype, bar in self.STATES:
            with self.subTest(dtype=dtype):
                self.verified(dtype, bar)

    def verified(self, dtype, bar):
        kernel = self.sglang_kernel()
        batch, steps = 2, 3
        x, exact, pool, start, raw, (g, beta) = self.sglang_step(batch * steps, dtype)
        slots, _ = self.inside([2, 4, 0], "int32")
        lengths, _ = self.inside([0, 3, 6], "int32")
        indices, _ = self.inside([0, 1, 2], "int32")
        for rows, room in ((4, steps), (4, steps + 1), (1, steps)):
            buffer, _ = self.inside(np.zeros((rows, room, HV, V, K)), dtype)
            given = {"ssm_states": pool, "cache_indices": slots, "query_start_loc": lengths,
                     "intermediate_states_buffer": buffer, "intermediate_state_indices": indices, "cache_steps": steps}
            kernel.target_verify(q=x["q"], k=x["k"], v=x["v"], **raw, **given, retrieve_parent_token=None)
            kept = next(iter(kernel.verified.values()))
            kernel.verified = {key: (*kept[:2], self.made.ops.on_device(kept[2])) for key, kept in kernel.verified.items()}
            with self.allocations() as counts:
                o = kernel.target_verify(q=x["q"], k=x["k"], v=x["v"], **raw, **given, retrieve_parent_token=None)
            flat = (exact["q"], exact["k"], exact["v"], g, beta)
            wanted, _ = reference.prefill(*flat, [0, 3, 6], start[[2, 4]], K ** -0.5)
            self.close(o, wanted[None])
            found = self.array(buffer).swapaxes(3, 4)
            for t in range(steps):
                ends = [part[[*range(t + 1), *range(steps, steps + t + 1)]] for part in flat]
                _, after = reference.prefill(*ends, [0, t + 1, 2 * t + 2], start[[2, 4]], K ** -0.5)
                count = min(rows, batch)
                self.assertLess(reference.error(found[:count, t], after[:count]), bar)
            self.assertTrue((found[batch:] == 0).all())
            self.assertTrue((self.array(pool).swapaxes(2, 3) == start).all())
            self.assertEqual(counts, {"Memory": 1}, "o alone")
        with self.assertRaises(dw.Unsupported):
            kernel.target_verify(q=x["q"], k=x["k"], v=x["v"], **raw, **given, retrieve_parent_token=slots)

    def test_target_verify_of_sglang_with_rows_and_lengths(self):
        """Rows of the buffer that belong to requests, as with stable rows, and sequences of different lengths."""
        kernel = self.sglang_kernel()
        x, exact, pool, start, raw, (g, beta) = self.sglang_step(6)
        slots, _ = self.inside([2, 4, 1], "int32")
        indices, _ = self.inside([3, 0, 9], "int32")
        lengths, _ = self.inside([0, 3, 5, 6], "int32")
        buffer, _ = self.inside(np.zeros((4, 3, HV, V, K)))
        for _ in range(2):
            o = kernel.target_verify(q=x["q"], k=x["k"], v=x["v"], **raw, ssm_states=pool, cache_indices=slots,
                                     query_start_loc=lengths, intermediate_states_buffer=buffer,
                                     intermediate_state_indices=indices, cache_steps=3, retrieve_parent_token=None,
                                     stable_rows=True)
        flat = (exact["q"], exact["k"], exact["v"], g, beta)
        wanted, _ = reference.prefill(*flat, [0, 3, 5, 6], start[[2, 4, 1]], K ** -0.5)
        self.close(o, wanted[None])
        found = self.array(buffer).swapaxes(3, 4)
        for n, (row, begin, end) in enumerate(((3, 0, 3), (0, 3, 5))):
            for t in range(end - begin):
                _, after = reference.prefill(*(part[begin:begin + t + 1] for part in flat), [0, t + 1],
                                             start[[(2, 4)[n]]], K ** -0.5)
                self.assertLess(reference.error(found[row, t], after[0]), 1e-5)
        self.assertTrue((found[[1, 2]] == 0).all() and (found[0, 2] == 0).all())
        self.assertTrue((self.array(pool).swapaxes(2, 3) == start).all())
        # Indices that change in place have other slots.
        indices.copy_(self.inside([1, 0, 9], "int32")[0])
        if self.torch is not torch_stand_in:
            kernel.target_verify(q=x["q"], k=x["k"], v=x["v"], **raw, ssm_states=pool, cache_indices=slots,
                                 query_start_loc=lengths, intermediate_states_buffer=buffer,
                                 intermediate_state_indices=indices, cache_steps=3, retrieve_parent_token=None)
            self.assertTrue((self.array(buffer)[1] == self.array(buffer)[3]).all())
        with self.assertRaises(dw.ArgumentError) as caught:
            self.made.sglang.target_verify(x["q"], x["k"], x["v"], raw["a"], raw["b"], raw["A_log"], raw["dt_bias"], pool,
                                           slots, buffer, self.made.sglang.verify_slots(indices, 3, 3, 4, 3))
        self.assertTrue(str(caught.exception).startswith("q: 6 tokens"))

    def test_the_plugin_of_sglang(self):
        registered, choices = [], ["triton"]

        class LinearAttnKernelBase:
            pass

        backend = types.SimpleNamespace(TRITON="triton kernels")
        mamba = types.SimpleNamespace(linear_attn_backend="deltawave", linear_attn_decode_backend=None,
                                      linear_attn_prefill_backend=None, linear_attn_verify_backend="triton")
        hooks = types.SimpleNamespace(register=lambda *arguments: registered.append(arguments))
        linear = "sglang__srt__layers__attention__linear__"
        with modules(sglang__srt__arg_groups__choices={"LINEAR_ATTN_KERNEL_BACKEND_CHOICES": choices,
                                                       "add_linear_attn_kernel_backend_choices": choices.extend},
                     sglang__srt__plugins__hook_registry={"HookRegistry": hooks,
                                                          "HookType": types.SimpleNamespace(AROUND="around")},
                     sglang__srt__runtime_context={"get_exec": lambda: types.SimpleNamespace(mamba=mamba)},
                     **{linear + "kernels__kernel_backend": {"LinearAttnKernelBase": LinearAttnKernelBase},
                        linear + "utils": {"LinearAttnKernelBackend": backend}}), \
                mock.patch.object(self.made.sglang, "_registered", []):
            self.made.sglang.register()
            self.made.sglang.register()
            self.assertEqual((choices, len(registered)), (["triton", "deltawave"], 1))
            target, hook, kind = registered[0]
            self.assertTrue(target.endswith("GDNKernelDispatcher.__init__"))

            def original(dispatcher, *backends):
                dispatcher.given = backends
                dispatcher.decode_kernel = dispatcher.extend_kernel = dispatcher.verify_kernel = "triton"
                dispatcher.supports_packed_decode = dispatcher.verify_kernel_is_flashinfer = False

            dispatcher = types.SimpleNamespace()
            hook(original, dispatcher, "custom", "custom", "triton")
            self.assertEqual(dispatcher.given, ("triton kernels", "triton kernels", "triton"))
            self.assertIsInstance(dispatcher.decode_kernel, LinearAttnKernelBase)
            self.assertIs(dispatcher.extend_kernel, dispatcher.decode_kernel)
            self.assertEqual((dispatcher.verify_kernel, dispatcher.supports_packed_decode), ("triton", True))
            # Another plugin's backend is left to it.
            mamba.linear_attn_backend = "other"
            hook(original, dispatcher, "custom", "custom")
            self.assertEqual((dispatcher.given, dispatcher.decode_kernel), (("custom", "custom", None), "triton"))
        with mock.patch.dict(sys.modules, {"sglang": None}), mock.patch.object(self.made.sglang, "_registered", []), \
                self.assertRaises(dw.Unsupported):
            self.made.sglang.register()

    # FLA's functions

    def test_functions_allocate_only_what_they_return(self):
        x, _ = self.rows(9, inside=True)
        state, _ = self.inside(np.zeros((1, HV, K, V)))
        chunk, recurrent = self.made.fla.chunk_gated_delta_rule, self.made.fla.fused_recurrent_gated_delta_rule
        conv = self.made.causal_conv1d.causal_conv1d_fn
        rows, _ = self.inside(np.zeros((1, 9, CHANNELS)), "bfloat16")
        weight, _ = self.inside(np.ones((CHANNELS, WIDTH)), "bfloat16")
        calls = {
            "o and the state": (lambda: chunk(**x, initial_state=state, output_final_state=True), 2),
            "o": (lambda: chunk(**x, initial_state=state), 1),
            "y": (lambda: conv(rows.transpose(1, 2), weight), 1),
        }
        for what, (call, wanted) in calls.items():
            call()
            with self.subTest(what=what), self.allocations() as counts:
                call()
            self.assertEqual({n: c for n, c in counts.items() if n not in ("empty",)}, {"Memory": wanted}, what)
        one = {n: t[:, :1] for n, t in x.items()}
        recurrent(**one, initial_state=state, output_final_state=True)
        with self.allocations() as counts:
            recurrent(**one, initial_state=state, output_final_state=True)
        self.assertNotIn("contiguous", counts)
        self.assertNotIn("clone", counts)


@unittest.skipIf(real is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class OnTorch(OnStandIn):
    def setUp(self):
        from deltawave import causal_conv1d, fla, ops, sglang, transformers, vllm

        self.torch = real
        self.made = types.SimpleNamespace(ops=ops, fla=fla, causal_conv1d=causal_conv1d, transformers=transformers, vllm=vllm,
                                          sglang=sglang)
        self.grad = real.set_grad_enabled(False)
        self.addCleanup(lambda: real.set_grad_enabled(True))
