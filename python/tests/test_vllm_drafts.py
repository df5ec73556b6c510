"""Speculative decoding in the adapter of vLLM, on stand-ins of its layers and metadata: steps of ragged drafts, alone and
beside prefills, whose accepted counts the next step reads; and the layer of OLMo-Hybrid."""

import types
import unittest
from unittest import mock

from . import reference, test_adapters
from .common import np
from .test_adapters import CHANNELS, HV, WIDTH, H, K, V, real
from .test_fla import torch_stand_in

DRAFTS = 2
TOKENS = DRAFTS + 1
ALL = WIDTH - 1 + DRAFTS  # columns of a conv state
TABLE = [[1, 5, 2], [3, 6, 7]]  # slots of the drafts of two sequences
PREFILLED = 4  # slot of a sequence that is prefilled beside them


@unittest.skipIf(np is None, "NumPy is not installed")
class OnStandIn(unittest.TestCase):
    tensor, array, close = (getattr(test_adapters.OnStandIn, name) for name in ("tensor", "array", "close"))
    inside, allocations = test_adapters.OnStandIn.inside, test_adapters.OnStandIn.allocations
    plugin, vllm_modules = test_adapters.OnStandIn.plugin, test_adapters.OnStandIn.vllm_modules

    def setUp(self):
        self.torch = torch_stand_in
        self.made = torch_stand_in.package("ops", "drafts", "vllm")

    def layer(self, interleaved=False, states="float32", **more):
        """A layer of vLLM's, and the numbers of its parameters and states."""
        random = np.random.default_rng(5)

        def draw(low, high, shape, dtype="float32"):
            return self.inside(random.uniform(low, high, shape), dtype)

        made, exact = {}, {}
        for name, low, high, shape, dtype in (
                ("conv", -1, 1, (8, ALL, CHANNELS), "bfloat16"), ("pool", -1, 1, (8, HV, V, K), states),
                ("weight", -1, 1, (CHANNELS, 1, WIDTH), "bfloat16"), ("a_log", 0, 1, (HV,), "float32"),
                ("bias", -4, -2, (HV,), "float32"), ("norm", 0.5, 1.5, (V,), "float32")):
            made[name], exact[name] = draw(low, high, shape, dtype)
        exact["pool"] = exact["pool"].reshape(8, HV, K, V)  # as vLLM's CPU build has it
        norm = types.SimpleNamespace(weight=made["norm"], eps=1e-6, activation="swish")
        layer = types.SimpleNamespace(
            num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, tp_size=1, gqa_interleaved_layout=interleaved,
            conv_kernel_size=WIDTH, kv_cache=(made["conv"], made["pool"]), A_log=made["a_log"], dt_bias=made["bias"],
            conv1d=types.SimpleNamespace(weight=made["weight"], bias=None), norm=norm, o_norm=norm, activation="silu",
            num_spec=DRAFTS, split_ba=lambda ba: (ba[:, :HV], ba[:, HV:]),
            model_config=types.SimpleNamespace(dtype=self.torch.bfloat16),
            get_state_dtype=lambda: (self.torch.bfloat16, getattr(self.torch, states)))
        vars(layer).update(more)
        return layer, exact

    def metadata(self, lengths, masks, accepted, padding=0):
        """A step's metadata as vLLM's builder makes it. Sequences with drafts have `masks`; `padding`: rows that a captured
        graph has beyond them."""
        masks = np.array(masks, bool)
        of_token = np.repeat(masks, lengths)
        order = np.argsort(of_token, kind="stable")
        others = int(sum(n for n, mask in zip(lengths, masks) if not mask))
        spec = [n for n, mask in zip(lengths, masks) if mask]
        ends = np.concatenate([[0], np.cumsum(spec)])
        rest = np.concatenate([[0], np.cumsum([n for n, mask in zip(lengths, masks) if not mask])])
        table = TABLE[:len(spec)] + [[0] * TOKENS] * padding
        made = types.SimpleNamespace(
            num_decodes=0, num_decode_tokens=0, num_prefills=int((~masks).sum()), num_prefill_tokens=others,
            num_spec_decodes=len(spec), num_spec_decode_tokens=int(sum(spec)), num_actual_tokens=int(sum(lengths)),
            checkpoint=None, spec_sequence_masks=masks, spec_sequence_masks_cpu=self.tensor(masks, "uint8")[0],
            spec_token_indx=self.tensor(order[others:], "int64")[0],
            non_spec_token_indx=self.tensor(order[:others], "int64")[0],
            spec_state_indices_tensor=self.inside(table, "int32")[0],
            spec_query_start_loc=self.inside(np.concatenate([ends, [ends[-1]] * padding]), "int32")[0],
            num_accepted_tokens=self.inside(list(accepted) + [1] * padding, "int32")[0],
            non_spec_query_start_loc=self.inside(rest, "int32")[0],
            non_spec_state_indices_tensor=self.inside([PREFILLED] * len(rest[1:]), "int32")[0],
            has_initial_state=self.inside([1] * len(rest[1:]), "uint8")[0])
        made.num_spec_decodes += padding
        return made

    def rows(self, count, interleaved, seed):
        """Rows of vLLM's projections, and their parts in double precision: q | k | v, z, b and a."""
        random = np.random.default_rng(seed)
        x, exact = self.inside(random.uniform(-1, 1, (count, CHANNELS + HV * V)), "bfloat16")
        ba, gates = self.inside(random.uniform(-1, 1, (count, 2 * HV)), "bfloat16")
        if not interleaved:
            b, a = np.split(gates, 2, axis=1)
            return x, ba, (exact[:, :CHANNELS], exact[:, CHANNELS:].reshape(count, HV, V), b, a)
        *qkv, z = np.split(exact.reshape(count, H, -1), np.cumsum([K, K, HV // H * V]), axis=2)
        b, a = (t.reshape(count, HV) for t in np.split(gates.reshape(count, H, -1), 2, axis=2))
        return x, ba, (np.concatenate([t.reshape(count, -1) for t in qkv], 1), z.reshape(count, HV, V), b, a)

    def wanted(self, exact, parts, conv, state):
        """Outputs and final states of one sequence from these states on."""
        flat, z, b, a = parts
        y, conv, state = reference.layer(flat, z, a, b, exact["weight"][:, 0], 0, exact["a_log"], exact["bias"],
                                         exact["norm"], [0, len(flat)], conv[None], state[None])
        return y, conv[0], state[0]

    def steps(self, interleaved, orders, padding=0, states="float32"):
        """Two steps through a layer. `orders`: for each step the sequences in the batch, 0 and 1 with drafts, 2 without."""
        layer, exact = self.layer(interleaved, states)
        lengths = [{0: 3, 1: 2, 2: 37}, {0: 2, 1: 3, 2: 21}]
        accepted = [(1, 1), (2, 1)]
        heads = {n: TABLE[n][0] if n < 2 else PREFILLED for n in range(3)}
        seen = {n: None for n in range(3)}
        for step, order in enumerate(orders):
            counts = [lengths[step][n] for n in order]
            extra = 4  # rows of padding, as in a captured graph of pieces
            x, ba, parts = self.rows(sum(counts) + extra, interleaved, step)
            metadata = self.metadata(counts, [n < 2 for n in order], accepted[step], padding)
            y = self.made.ops.empty((sum(counts) + extra, HV, V), x.dtype).zero_()
            self.made.vllm.layer_step(layer, metadata, x, ba, y, "token_major")
            found, begin = self.array(y), 0
            self.assertTrue((found[sum(counts):] == 0).all())
            for n, count in zip(order, counts):
                own = [t[begin:begin + count] for t in parts]
                # Tokens of earlier steps that were accepted, then this step's.
                kept = 0 if seen[n] is None else len(seen[n][0]) if n == 2 else accepted[step][n]
                whole = own if not kept else [np.concatenate([s[:kept], t]) for s, t in zip(seen[n], own)]
                start = exact["conv"][heads[n]][:WIDTH - 1].T, exact["pool"][heads[n]]
                wanted, _, state = self.wanted(exact, whole, *start)
                self.assertLess(reference.error(found[begin:begin + count], wanted[kept:]), 1e-2, (step, n))
                pool = self.array(layer.kv_cache[1]).reshape(exact["pool"].shape)
                if n == 2:
                    self.assertLess(reference.error(pool[PREFILLED], state), 1e-2)
                else:
                    for t in range(count):
                        _, _, state = self.wanted(exact, [part[:kept + t + 1] for part in whole], *start)
                        self.assertLess(reference.error(pool[TABLE[n][t]], state), 1e-2, (step, n, t))
                seen[n], begin = own, begin + count
        self.assertTrue((pool[0] == exact["pool"][0]).all())
        return layer

    def test_ragged_drafts_and_their_accepted_counts(self):
        for interleaved in (False, True):
            for padding in (0, 2):
                with self.subTest(interleaved=interleaved, padding=padding):
                    self.steps(interleaved, [(0, 1), (0, 1)], padding)

    def test_drafts_beside_prefills(self):
        for interleaved in (False, True):
            # The drafts first, as slices; then in between, gathered.
            for orders in ([(0, 1, 2), (0, 1, 2)], [(0, 2, 1), (2, 0, 1)]):
                with self.subTest(interleaved=interleaved, orders=orders):
                    self.steps(interleaved, orders)

    def test_drafts_in_pools_of_16_bits(self):
        for states in ("bfloat16", "float16"):
            with self.subTest(states=states):
                self.steps(False, [(0, 1, 2), (0, 1, 2)], states=states)
                self.steps(True, [(0, 1), (0, 1)], 2, states)

    def test_a_step_of_drafts_allocates_nothing(self):
        layer, _ = self.layer()
        x, ba, _ = self.rows(42, False, 3)
        y = self.made.ops.empty((42, HV, V), x.dtype)
        for lengths, masks in (([3, 2], [1, 1]), ([3, 2, 37], [1, 1, 0])):
            rows = sum(lengths)
            metadata = self.metadata(lengths, masks, (1, 1))
            given = (layer, metadata, x[:rows], ba[:rows], y[:rows], "token_major")
            self.made.vllm.layer_step(*given)
            if len(masks) == 3:
                key, slots = metadata._deltawave_slots
                metadata._deltawave_slots = key, self.made.ops.on_device(slots)
            with self.allocations() as counts:
                self.made.vllm.layer_step(*given)
            self.assertEqual(counts, {})

    def test_tables_that_are_not_dense_are_copied_once_a_step(self):
        layer, _ = self.layer()
        x, ba, _ = self.rows(5, False, 3)
        outputs = []
        for wide in (False, True):
            metadata = self.metadata([3, 2], [1, 1], (1, 1))
            if wide:
                blocks = np.concatenate([TABLE, [[9, 9], [9, 9]]], 1)
                metadata.spec_state_indices_tensor = self.inside(blocks, "int32")[0][:, :TOKENS]
            layer, _ = self.layer()
            y = self.made.ops.empty((5, HV, V), x.dtype).zero_()
            self.made.vllm.layer_step(layer, metadata, x, ba, y, "token_major")
            outputs.append(self.array(y))
        self.assertTrue((outputs[0] == outputs[1]).all())
        kept = self.made.vllm.draft_slots_of(metadata, 2)
        self.assertIs(self.made.vllm.draft_slots_of(metadata, 2), kept)
        self.assertEqual(kept.tolist(), TABLE)

    def test_the_layer_of_olmo(self):
        registered, context, log = self.plugin("layer")
        given, exact = self.layer(allow_neg_eigval=True, prefix="layer.0")
        x, ba, (flat, z, b, a) = self.rows(5, False, 7)
        metadata = self.metadata([3, 2], [1, 1], (1, 1))
        context.attn_metadata = {"layer.0": metadata}
        made = registered["OlmoHybridGatedDeltaNetAttention"](
            **vars(given), in_proj_qkvg=lambda h: (x, None), b_proj=lambda h: (ba[:, :HV], None),
            a_proj=lambda h: (ba[:, HV:], None), o_proj=lambda h: (h, None))
        output = self.made.ops.empty((5, HV * V), x.dtype).zero_()
        made._full_forward(x, output)
        gates = reference.gates
        with mock.patch.object(reference, "gates", lambda *given: gates(*given, allow_neg_eigval=True)):
            for n, rows in enumerate((slice(0, 3), slice(3, 5))):
                start = exact["conv"][TABLE[n][0]][:WIDTH - 1].T, exact["pool"][TABLE[n][0]]
                wanted, *_ = self.wanted(exact, [part[rows] for part in (flat, z, b, a)], *start)
                self.assertLess(reference.error(self.array(output)[rows], wanted.reshape(len(wanted), -1)), 1e-2)
        self.assertEqual((made.steps, log), ({"deltawave": 1, "vllm": 0}, []))
        # Only profiled: zeros. With checkpoints, or a layer that does not fit: vLLM's own.
        context.attn_metadata = None
        made._full_forward(x, output)
        self.assertTrue((self.array(output) == 0).all())
        context.attn_metadata = {"layer.0": metadata}
        metadata.checkpoint = object()
        made._full_forward(x, output)
        self.assertEqual((made.steps, log), ({"deltawave": 1, "vllm": 1}, ["olmo"]))
        with self.assertLogs(self.made.vllm.__name__, "WARNING"):
            other = registered["OlmoHybridGatedDeltaNetAttention"](**{**vars(given), "head_k_dim": 100})
        other._full_forward(x, output)
        self.assertEqual(log, ["olmo", "olmo"])


@unittest.skipIf(real is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class OnTorch(OnStandIn):
    def setUp(self):
        from deltawave import drafts, ops, vllm

        self.torch, self.made = real, types.SimpleNamespace(ops=ops, drafts=drafts, vllm=vllm)
        real.set_grad_enabled(False)
        self.addCleanup(lambda: real.set_grad_enabled(True))
