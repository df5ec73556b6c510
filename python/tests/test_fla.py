"""`deltawave.fla` and `deltawave.causal_conv1d` against the recurrence in double precision, and what they refuse: on torch
where that is installed, and on a stand-in."""

import unittest

import deltawave as dw

from . import reference
from .common import np
from .test_ops import torch as real

if np is not None:
    from . import torch_stand_in

B, T, H, HV, K, V = 2, 70, 2, 4, 16, 32
CHANNELS = 2 * H * K + HV * V


@unittest.skipIf(np is None, "NumPy is not installed")
class OnStandIn(unittest.TestCase):
    def setUp(self):
        self.torch = torch_stand_in
        made = torch_stand_in.package("ops", "fla", "causal_conv1d")
        self.fla, self.conv = made.fla, made.causal_conv1d

    def tensor(self, values, dtype="float32"):
        """A tensor of these numbers, and the numbers as it holds them."""
        values = np.asarray(values)
        if self.torch is torch_stand_in:
            made = torch_stand_in.tensor(values, getattr(torch_stand_in, dtype))
        else:
            made = real.tensor(values).to(getattr(real, dtype))
        return made, self.array(made)

    def array(self, x):
        if self.torch is torch_stand_in:
            return (x.float().values if x.dtype is torch_stand_in.bfloat16 else x.values).astype(np.float64)
        return x.double().numpy()

    def inputs(self, seed=1, tokens=T, batch=B, dtype="bfloat16", across=False):
        """q, k, v, g and beta, and their numbers. `across`: tokens are adjacent in memory, not channels."""
        random = np.random.default_rng(seed)
        shape = (batch, tokens, CHANNELS)
        rows = random.uniform(-0.5, 0.5, shape)
        if across:
            x, exact = self.tensor(np.ascontiguousarray(rows.swapaxes(1, 2)), dtype)
            x, exact = x.transpose(1, 2), exact.swapaxes(1, 2)
        else:
            x, exact = self.tensor(rows, dtype)
        parts, numbers = {}, {}
        for name, begin, heads, dim in (("q", 0, H, K), ("k", H * K, H, K), ("v", 2 * H * K, HV, V)):
            parts[name] = x[:, :, begin:begin + heads * dim].unflatten(2, (heads, dim))
            numbers[name] = exact[:, :, begin:begin + heads * dim].reshape(batch, tokens, heads, dim)
        parts["g"], numbers["g"] = self.tensor(random.uniform(-0.2, 0, (batch, tokens, HV)))
        parts["beta"], numbers["beta"] = self.tensor(random.uniform(0, 1, (batch, tokens, HV)), dtype)
        return parts, numbers

    def wanted(self, x, states, l2norm=True, lengths=None):
        """o and final states of dense or packed numbers."""
        q, k = (reference.l2_normalised(x[n]) if l2norm else x[n] for n in "qk")
        batch, tokens = q.shape[:2]
        flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, x["v"], x["g"], x["beta"])]
        lengths = range(0, batch * tokens + 1, tokens) if lengths is None else lengths
        o, after = reference.prefill(*flat, lengths, states, K ** -0.5)
        return o.reshape(x["v"].shape), after

    def close(self, found, wanted, bar=8e-3):
        found = self.array(found)
        self.assertEqual(found.shape, wanted.shape)
        self.assertLess(reference.error(found, wanted), bar)

    def states(self, dtype="float32", count=B, seed=3):
        return self.tensor(np.random.default_rng(seed).uniform(-1, 1, (count, HV, K, V)), dtype)

    def test_chunk(self):
        for dtype, across in (("bfloat16", False), ("bfloat16", True), ("float16", False)):
            with self.subTest(dtype=dtype, across=across):
                x, exact = self.inputs(dtype=dtype, across=across)
                initial, start = self.states()
                o, after = self.fla.chunk_gated_delta_rule(**x, initial_state=initial, output_final_state=True,
                                                           use_qk_l2norm_in_kernel=True)
                wanted, last = self.wanted(exact, start)
                self.close(o, wanted)
                self.close(after, last)
                self.assertEqual((o.dtype, after.dtype), (x["q"].dtype, self.torch.float32))
                self.assertTrue((self.array(initial) == start).all(), "the initial state was written")
                by_value, _ = self.tensor(np.ascontiguousarray(start.swapaxes(2, 3)))
                again, transposed = self.fla.chunk_gated_delta_rule(
                    **x, initial_state=by_value, output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True)
                self.assertTrue((self.array(again) == self.array(o)).all())
                self.close(transposed, last.swapaxes(2, 3))

    def test_states_of_other_types(self):
        x, exact = self.inputs()
        for dtype in ("bfloat16", "float16"):
            initial, start = self.states(dtype)
            o, after = self.fla.chunk_gated_delta_rule(**x, initial_state=initial, output_final_state=True,
                                                       use_qk_l2norm_in_kernel=True)
            wanted, last = self.wanted(exact, start)
            self.close(o, wanted)
            self.close(after, last)
            self.assertEqual(after.dtype, self.torch.float32)

    def test_packed(self):
        x, exact = self.inputs(batch=1)
        lengths, _ = self.tensor([0, 7, 7, T], "int64")
        initial, start = self.states(count=3)
        for function in (self.fla.chunk_gated_delta_rule, self.fla.fused_recurrent_gated_delta_rule):
            o, after = function(**x, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True,
                                cu_seqlens=lengths)
            wanted, last = self.wanted(exact, start, lengths=[0, 7, 7, T])
            self.close(o, wanted)
            self.close(after, last)
        o, none = self.fla.chunk_gated_delta_rule(**x, cu_seqlens=lengths)
        self.close(o, self.wanted(exact, np.zeros(start.shape), False, [0, 7, 7, T])[0])
        self.assertIsNone(none)

    def test_recurrent(self):
        for tokens, initial_too in ((1, True), (1, False), (3, True)):
            with self.subTest(tokens=tokens, initial_too=initial_too):
                x, exact = self.inputs(tokens=tokens)
                initial, start = self.states()
                start = start if initial_too else np.zeros(start.shape)
                o, after = self.fla.fused_recurrent_gated_delta_rule(
                    **x, initial_state=initial if initial_too else None, output_final_state=True,
                    use_qk_l2norm_in_kernel=True)
                wanted, last = self.wanted(exact, start)
                self.close(o, wanted)
                self.close(after, last, 1e-5 if tokens == 1 and initial_too else 8e-3)
                if initial_too:
                    self.assertTrue((self.array(initial) == start).all(), "the initial state was written")
        # g and beta absent: no decay, and 1.
        x, exact = self.inputs(tokens=1)
        exact.update(g=np.zeros((B, 1, HV)), beta=np.ones((B, 1, HV)))
        o, none = self.fla.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], use_qk_l2norm_in_kernel=True)
        self.close(o, self.wanted(exact, np.zeros((B, HV, K, V)))[0])
        self.assertIsNone(none)

    def test_raw_gates(self):
        x, exact = self.inputs()
        random = np.random.default_rng(5)
        (a, a_exact), (b, b_exact) = (self.tensor(random.uniform(-2, 2, (B, T, HV)), "bfloat16") for _ in range(2))
        (a_log, a_log_exact), (bias, bias_exact) = (self.tensor(random.uniform(-1, 1, HV)) for _ in range(2))
        zeros = np.zeros((B, HV, K, V))
        for raw_g, raw_beta, negative in ((True, True, True), (True, False, False), (False, True, True)):
            g, beta = reference.gates(a_exact, b_exact, a_log_exact, bias_exact, negative)
            numbers = {**exact, **({"g": g} if raw_g else {}), **({"beta": beta} if raw_beta else {})}
            given = {**x, **({"g": a} if raw_g else {}), **({"beta": b} if raw_beta else {})}
            more = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": bias} if raw_g else {}
            more.update({"use_beta_sigmoid_in_kernel": raw_beta, "allow_neg_eigval": negative})
            for function in (self.fla.chunk_gated_delta_rule, self.fla.fused_recurrent_gated_delta_rule):
                with self.subTest(raw_g=raw_g, raw_beta=raw_beta, function=function.__name__):
                    o, _ = function(**given, **more, use_qk_l2norm_in_kernel=True)
                    self.close(o, self.wanted(numbers, zeros)[0], 1.5e-2)
        g = self.fla.fused_gdn_gate(a, a_log, bias)
        self.close(g, reference.gates(a_exact, b_exact, a_log_exact, bias_exact)[0], 1e-6)
        self.assertEqual(g.dtype, self.torch.float32)
        self.assertEqual(self.fla.fused_gdn_gate(a, a_log, output_dtype=self.torch.bfloat16).dtype, self.torch.bfloat16)

    def refused(self, start, call, kind=dw.Unsupported):
        with self.assertRaises(kind) as caught:
            call()
        self.assertTrue(str(caught.exception).startswith(start + ":"), str(caught.exception))

    def test_refusals_name_the_argument(self):
        x, _ = self.inputs()
        chunk, recurrent = self.fla.chunk_gated_delta_rule, self.fla.fused_recurrent_gated_delta_rule
        single = {**x, "q": x["q"].float()}
        odd, _ = self.tensor(np.zeros((B, T, HV, 24)), "bfloat16")
        per_channel, _ = self.tensor(np.zeros((B, T, HV, V)))
        for function in (chunk, recurrent):
            self.refused("q", lambda: function(**single))
            self.refused("v", lambda: function(**{**x, "v": odd}))
            self.refused("beta", lambda: function(**{**x, "beta": per_channel}))
            self.refused("allow_neg_eigval", lambda: function(**x, allow_neg_eigval=True), dw.ArgumentError)
            self.refused("A_log", lambda: function(**x, use_gate_in_kernel=True), dw.ArgumentError)
            lengths, _ = self.tensor([0, 3, T], "int32")
            self.refused("q", lambda: function(**x, cu_seqlens=lengths), dw.ArgumentError)
            self.refused("v", lambda: function(**{**x, "v": x["v"][:, :, :3]}), dw.ArgumentError)
        self.refused("gk", lambda: recurrent(**x, gk=per_channel))
        self.refused("gv", lambda: recurrent(**x, gv=per_channel))
        self.refused("cp_context", lambda: chunk(**x, cp_context=object()))
        self.refused("head_first", lambda: chunk(**x, head_first=True))
        self.refused("chunk_size", lambda: chunk(**x, chunk_size=128), dw.ArgumentError)
        state, _ = self.tensor(np.zeros((B, HV, K, V)), "float64")
        self.refused("initial_state", lambda: chunk(**x, initial_state=state))

    def test_a_convolution_that_updates_its_state_refuses_gradients(self):
        rows, _ = self.tensor(np.zeros((B, CHANNELS, 1)), "bfloat16")
        weight, _ = self.tensor(np.ones((CHANNELS, 4)), "bfloat16")
        state, _ = self.tensor(np.zeros((B, CHANNELS, 3)), "bfloat16")
        weight.requires_grad = True
        self.refused("weight", lambda: self.conv.causal_conv1d_update(rows, state, weight))

    def test_the_old_name_of_state_v_first(self):
        x, _ = self.inputs()
        with self.assertWarns(DeprecationWarning):
            _, after = self.fla.chunk_gated_delta_rule(**x, output_final_state=True, transpose_state_layout=True)
        self.assertEqual(tuple(after.shape), (B, HV, V, K))

    def convolved(self, rows, weight, bias, states, silu):
        """y `[B, C, T]` and the states afterwards, of x `[B, C, T]`."""
        batch, channels, tokens = rows.shape
        flat = rows.swapaxes(1, 2).reshape(-1, channels)
        y, after = reference.conv(flat, weight, bias, range(0, batch * tokens + 1, tokens), states, silu)
        return y.reshape(batch, tokens, channels).swapaxes(1, 2), after

    def conv_inputs(self, tokens, channels, width, by_token, dtype="bfloat16"):
        random = np.random.default_rng(tokens + channels)
        numbers = random.uniform(-1, 1, (B, tokens, channels) if by_token else (B, channels, tokens))
        x, exact = self.tensor(numbers, dtype)
        x, exact = (x.transpose(1, 2), exact.swapaxes(1, 2)) if by_token else (x, exact)
        weight, bias = (self.tensor(random.uniform(-1, 1, s), "bfloat16") for s in ((channels, width), (channels,)))
        return x, exact, weight, bias

    def test_convolution(self):
        for tokens, channels, width, by_token in ((9, 20, 4, True), (9, 20, 4, False), (2, 3, 2, True), (1, 64, 3, False)):
            with self.subTest(tokens=tokens, channels=channels, width=width, by_token=by_token):
                x, exact, (weight, w), (bias, b) = self.conv_inputs(tokens, channels, width, by_token)
                zeros = np.zeros((B, channels, width - 1))
                y = self.conv.causal_conv1d_fn(x, weight, bias, activation="silu")
                self.close(y, self.convolved(exact, w, b, zeros, True)[0])
                # What the convolution writes, prefill reads without a copy.
                self.assertEqual(y.transpose(1, 2).stride()[2], 1)
                initial, start = self.tensor(np.random.default_rng(1).uniform(-1, 1, zeros.shape), "bfloat16")
                wanted, last = self.convolved(exact, w, 0, start, False)
                y, final = self.conv.causal_conv1d_fn(x, weight, initial_states=initial, return_final_states=True)
                self.close(y, wanted)
                self.assertTrue((self.array(final) == last).all())
                self.assertTrue((self.array(initial) == start).all(), "the initial states were written")
                self.close(self.conv.causal_conv1d_fn(x, weight, initial_states=initial), wanted)
                out, _ = self.tensor(np.full(zeros.shape, 9.0), "bfloat16")
                _, final = self.conv.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=out)
                self.assertIs(final, out)
                self.assertTrue((self.array(out) == self.convolved(exact, w, 0, zeros, False)[1]).all())

    def test_convolution_of_packed_sequences(self):
        x, exact, (weight, w), (bias, b) = self.conv_inputs(9, 20, 4, True)
        seq_idx, _ = self.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, 1]], "int32")
        flat = exact.swapaxes(1, 2).reshape(-1, 20)
        begins = [0, 3, 5, 6, 9, 17, 18]
        wanted, _ = reference.conv(flat, w, b, begins, np.zeros((6, 20, 3)))
        y = self.conv.causal_conv1d_fn(x, weight, bias, seq_idx, activation="swish")
        self.close(y, wanted.reshape(B, 9, 20).swapaxes(1, 2))

    def test_convolution_of_next_tokens(self):
        for columns in (3, 5):
            for tokens in (1, 2):
                x, exact, (weight, w), (bias, b) = self.conv_inputs(tokens, 20, 4, True)
                state, start = self.tensor(np.random.default_rng(2).uniform(-1, 1, (4, 20, columns)), "bfloat16")
                slots, _ = self.tensor([3, 1], "int32")
                y = self.conv.causal_conv1d_update(x, state, weight, bias, "silu", conv_state_indices=slots)
                wanted, last = self.convolved(exact, w, b, start[[3, 1]], True)
                self.close(y, wanted)
                after = self.array(state)
                self.assertTrue((after[[3, 1]] == last).all() and (after[[0, 2]] == start[[0, 2]]).all())
        # One token, without its dimension.
        state, start = self.tensor(np.zeros((B, 20, 3)), "bfloat16")
        row = x[:, :, 0]
        y = self.conv.causal_conv1d_update(row, state, weight)
        self.assertEqual(tuple(y.shape), (B, 20))

    def test_refusals_of_the_convolution(self):
        x, _, (weight, _), _ = self.conv_inputs(9, 20, 4, True)
        fn, update = self.conv.causal_conv1d_fn, self.conv.causal_conv1d_update
        state, _ = self.tensor(np.zeros((B, 20, 3)), "bfloat16")
        lengths, _ = self.tensor([1, 1], "int32")
        self.refused("x", lambda: fn(x.float(), weight))
        self.refused("x", lambda: fn(x[:, :2], weight[:2]))
        self.refused("activation", lambda: fn(x, weight, activation="gelu"))
        self.refused("cache_seqlens", lambda: update(x, state, weight, cache_seqlens=lengths))
        self.refused("weight", lambda: fn(x, weight[:19]), dw.ArgumentError)
        self.refused("conv_state", lambda: update(x, state[:1], weight), dw.ArgumentError)
        seq_idx, _ = self.tensor(np.zeros((B, 9), int), "int32")
        self.refused("initial_states", lambda: fn(x, weight, None, seq_idx, state), dw.ArgumentError)


@unittest.skipIf(real is None or np is None, "torch 2.4 or newer, with NumPy, is not installed")
class OnTorch(OnStandIn):
    def setUp(self):
        from deltawave import causal_conv1d, fla

        self.torch, self.fla, self.conv = real, fla, causal_conv1d


class OnCard(OnStandIn):
    """The same on a GPU, where torch has one and the library has kernels for it."""

    def setUp(self):
        from .test_cuda import missing

        why = missing()
        if why:
            self.skipTest(why)
        OnTorch.setUp(self)

    def tensor(self, values, dtype="float32"):
        made, exact = super().tensor(values, dtype)
        return made.cuda(), exact

    def array(self, x):
        return super().array(x.cpu())

    def test_calls_wait_for_nothing_and_allocate_what_they_return(self):
        x, _ = self.inputs()
        one, _ = self.inputs(tokens=1)
        initial, _ = self.states()
        rows, _, (weight, _), _ = self.conv_inputs(9, 24, 4, True)
        state, _ = self.tensor(np.zeros((B, 24, 4)), "bfloat16")
        chunk, recurrent = self.fla.chunk_gated_delta_rule, self.fla.fused_recurrent_gated_delta_rule
        given = {"initial_state": initial, "output_final_state": True}
        calls = {"chunk": (lambda: chunk(**x, **given), 2), "chunk without a state": (lambda: chunk(**x), 1),
                 "recurrent": (lambda: recurrent(**one, **given), 2),
                 "conv": (lambda: self.conv.causal_conv1d_fn(rows, weight), 1),
                 "update": (lambda: self.conv.causal_conv1d_update(rows[:, :, :1], state, weight), 1)}
        for name, (call, wanted) in calls.items():
            call()
            real.cuda.synchronize()
            before = real.cuda.memory_stats()["allocation.all.allocated"]
            real.cuda.set_sync_debug_mode("error")
            try:
                found = call()
            finally:
                real.cuda.set_sync_debug_mode("default")
            with self.subTest(name=name):
                self.assertEqual(real.cuda.memory_stats()["allocation.all.allocated"] - before, wanted)
            del found
