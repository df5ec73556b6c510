"""The torch custom ops on a card: against NumPy in double precision, on torch's current stream, in CUDA graphs."""

import unittest

from . import reference
from .common import np
from .test_ops import HK, HV, K, TOKENS, V, exact, inputs, torch
from .test_ops_layer import CHANNELS, DECODES, OFFSETS, step

if torch is not None:
    from deltawave import DeviceError, DriverError, LibraryError, ops, training

    from . import differentiable
    from . import test_ops_layer_autograd as layers

    # Inputs of a layer in the order of their gradients.
    ORDER = ("x", "z", "a", "b", "conv_weight", "conv_bias", "a_log", "dt_bias", "norm_weight", "initial_conv_state",
             "initial_state")


def missing():
    """Why these tests cannot run, or None."""
    if torch is None or np is None:
        return "torch 2.4 or newer, with NumPy, is not installed"
    if not torch.cuda.is_available():
        return "torch has no card here"
    try:
        ops.context_of(torch.device("cuda"))
    except (DeviceError, DriverError, LibraryError) as problem:
        return f"the library has nothing for this card: {problem}"
    return None


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def doubles(*tensors):
    return [t.double().numpy() for t in tensors]


class Call:
    """A call of an op. `run` returns the tensors that it writes, `check` takes these, on the CPU."""

    bar = 8e-3

    def __init__(self, test):
        self.test, self.given = test, self.inputs()

    def close(self, found, wanted, bar=None):
        self.test.assertLess(reference.error(found.double().numpy(), wanted), self.bar if bar is None else bar)

    def same(self, found, wanted):
        self.test.assertTrue(torch.equal(found, wanted))


class Prefill(Call):
    def inputs(self):
        return {**inputs(torch.bfloat16), "cu_seqlens": i32(0, 65, TOKENS)}

    def run(self, t):
        return ops.prefill(**t)

    def check(self, o, states):
        x = exact({name: self.given[name] for name in ("q", "k", "v", "g", "beta")})
        wanted = reference.prefill(**x, cu_seqlens=[0, 65, TOKENS], states=np.zeros((2, HV, K, V)), scale=K ** -0.5)
        self.close(o, wanted[0])
        self.close(states, wanted[1])


class PrefillPool(Prefill):
    def inputs(self):
        pool = torch.rand(4, HV, K, V, generator=torch.Generator().manual_seed(5))
        return {**super().inputs(), "pool": pool, "slots": i32(3, 1), "has_initial_state": i32(0, 0).bool()}

    def run(self, t):
        return ops.prefill_pool(**t), t["pool"]

    def check(self, o, pool):
        super().check(o, pool[[3, 1]])
        self.same(pool[[0, 2]], self.given["pool"][[0, 2]])


class Decode(Call):
    def inputs(self):
        pool = torch.rand(3, HV, K, V, generator=torch.Generator().manual_seed(6))
        return {**inputs(torch.bfloat16, (2,)), "pool": pool, "slots": i32(2, 0)}

    def run(self, t):
        return ops.decode(**t), t["pool"]

    def check(self, o, pool):
        x = exact({name: self.given[name] for name in ("q", "k", "v", "g", "beta")})
        start = self.given["pool"][[2, 0]].double().numpy()
        wanted = reference.prefill(**x, cu_seqlens=[0, 1, 2], states=start, scale=K ** -0.5)
        self.close(o, wanted[0])
        self.close(pool[[2, 0]], wanted[1], 1e-5)
        self.same(pool[1], self.given["pool"][1])


class Verify(Call):
    def inputs(self):
        pool = torch.rand(3, HV, K, V, generator=torch.Generator().manual_seed(6))
        return {**inputs(torch.bfloat16, (2, 3)), "pool": pool, "slots": i32(2, 0)}

    def run(self, t):
        return (*ops.verify(**t), t["pool"])

    def check(self, o, states, pool):
        x = exact({name: self.given[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")})
        start = pool[[2, 0]].double().numpy()
        wanted = reference.prefill(**x, cu_seqlens=[0, 3, 6], states=start, scale=K ** -0.5)
        self.close(o.flatten(0, 1), wanted[0])
        self.close(states[:, -1], wanted[1], 1e-5)
        self.same(pool, self.given["pool"])


class Commit(Call):
    def inputs(self):
        made = torch.Generator().manual_seed(9)
        return {"accepted": i32(2, 0), "states": torch.rand(2, 3, HV, K, V, generator=made),
                "pool": torch.rand(3, HV, K, V, generator=made), "slots": i32(2, 0),
                "conv_state": torch.rand(3, CHANNELS, 3, generator=made).bfloat16(),
                "x": torch.rand(6, CHANNELS, generator=made).bfloat16()}

    def run(self, t):
        ops.commit(**t)
        return t["pool"], t["conv_state"]

    def check(self, pool, conv_state):
        given = self.given
        self.same(pool, torch.stack([*given["pool"][:2], given["states"][0, 1]]))
        moved = torch.cat([given["conv_state"][2][:, 2:], given["x"][:2].T], 1)
        self.same(conv_state, torch.stack([*given["conv_state"][:2], moved]))


class Conv(Call):
    def inputs(self):
        given = step()
        return {"x": given["x"], "weight": given["conv_weight"], "bias": given["conv_bias"],
                "state": given["conv_state"], "cu_seqlens": given["cu_seqlens"], "slots": given["slots"]}

    def run(self, t):
        t = dict(t)
        first = [t.pop(name) for name in ("x", "weight", "bias", "state")]
        return (*ops.conv(*first, HK, HV, K, V, **t), first[-1])

    def check(self, q, k, v, state):
        given = self.given
        x, weight, bias, start = doubles(given["x"][:, :CHANNELS], given["weight"], given["bias"],
                                         given["state"][given["slots"].long()])
        y, states = reference.conv(x, weight, bias, OFFSETS, start)
        self.close(torch.cat([part.flatten(1) for part in (q, k, v)], 1), y)
        self.test.assertTrue((state[given["slots"].long()].double().numpy() == states).all())


class Gate(Call):
    bar = 1e-5

    def inputs(self):
        return {name: step()[name] for name in ("a", "b", "a_log", "dt_bias")}

    def run(self, t):
        return ops.gate(**t)

    def check(self, g, beta):
        for found, wanted in zip((g, beta), reference.gates(*doubles(*self.given.values()))):
            self.close(found, wanted)


class Norm(Call):
    def inputs(self):
        x = inputs(torch.bfloat16)["v"]
        return {"x": x, "z": x.flip(0), "weight": torch.linspace(.5, 1.5, V)}

    def run(self, t):
        return (ops.norm(**t),)

    def check(self, y):
        x, z, weight = doubles(*self.given.values())
        wanted = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight * z * reference.sigmoid(z)
        self.close(y, wanted)


class Layer(Call):
    bar = 1e-2

    def inputs(self):
        return {name: t for name, t in step().items() if isinstance(t, torch.Tensor)}

    def run(self, t):
        y = ops.layer(**t, key_heads=HK, value_heads=HV, key_dim=K, value_dim=V, decodes=DECODES)
        return y, t["conv_state"], t["pool"]

    def check(self, y, conv_state, pool):
        given, offsets = self.given, self.given["cu_seqlens"].tolist()
        weights = ("conv_weight", "conv_bias", "a_log", "dt_bias", "norm_weight")
        x, a, b, *weights = doubles(*(given[name] for name in ("x", "a", "b", *weights)))
        slots, has = given["slots"].long(), given["has_initial_state"]
        starts = [t * has.numpy().reshape(-1, *[1] * (t.ndim - 1))
                  for t in doubles(given["conv_state"][slots], given["pool"][slots])]
        z = x[:, CHANNELS:].reshape(len(x), HV, V)
        wanted = reference.layer(x[:, :CHANNELS], z, a, b, *weights, offsets, *starts)
        self.close(y, wanted[0])
        self.test.assertTrue((conv_state[slots].double().numpy() == wanted[1]).all())
        self.close(pool[slots], wanted[2])


class LayerGradients(Call):
    """The backward of a layer, by the ops that autograd calls, with the numbers of the test of autograd."""

    bar = 2e-2

    def inputs(self):
        self.of = layers.Gradients()
        self.of.setUp()
        self.x, self.upstream = self.of.inputs(), self.of.upstream()
        return {**self.x, **{f"d_{i}": d for i, d in enumerate(self.upstream)}, "cu_seqlens": self.of.offsets.int()}

    def run(self, t):
        given = [*(t[n] for n in layers.NAMES[:5]), layers.HK, layers.HV, layers.K, layers.V,
                 *(t[n] for n in layers.NAMES[5:]), t["cu_seqlens"], *layers.OPTIONS.values()]
        _, o, _, _ = ops.layer_forward(*given)
        return ops.layer_backward(t["d_0"], t["d_1"], t["d_2"], o, *given, [True] * 11)

    def check(self, *found):
        wanted = self.of.gradients({n: t.double() for n, t in self.x.items()}, self.upstream, layers.exact)
        for name, d in zip(ORDER, found):
            self.close(d, wanted[name].numpy())


class GateGradients(Call):
    bar = 4e-3

    def inputs(self):
        made = torch.Generator().manual_seed(9)
        return {name: torch.randn(*shape, generator=made) for name, shape in (
            ("a", (TOKENS, HV)), ("b", (TOKENS, HV)), ("a_log", (HV,)), ("dt_bias", (HV,)), ("d_g", (TOKENS, HV)),
            ("d_beta", (TOKENS, HV)))}

    def run(self, t):
        return ops.gate_backward(t["d_g"], t["d_beta"], t["a"], t["b"], t["a_log"], t["dt_bias"], False, [True] * 4)

    def check(self, *found):
        x = {name: t.double().requires_grad_() for name, t in self.given.items()}
        inputs = [x[n] for n in ("a", "b", "a_log", "dt_bias")]
        for d, wanted in zip(found, torch.autograd.grad(differentiable.gates(*inputs), inputs, [x["d_g"], x["d_beta"]])):
            self.close(d, wanted.numpy())


ALL = (Prefill, PrefillPool, Decode, Verify, Commit, Conv, Gate, Norm, Layer, LayerGradients, GateGradients)


class Cuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        reason = missing()
        if reason:
            raise unittest.SkipTest(reason)

    def of_each(self, test):
        for kind in ALL:
            with self.subTest(kind.__name__):
                test(kind(self))

    @staticmethod
    def spoiled(given):
        """The tensors of a call on the card, whose floating-point ones are NaN."""
        return {n: torch.full_like(t, float("nan"), device="cuda") if t.is_floating_point() else t.cuda()
                for n, t in given.items()}

    def check(self, call, outputs):
        call.check(*(t.cpu() for t in outputs))

    def test_results(self):
        def test(call):
            self.check(call, call.run({name: t.cuda() for name, t in call.given.items()}))

        self.of_each(test)

    def test_the_current_stream(self):
        stream = torch.cuda.Stream()

        def test(call):
            source, tensors = {n: t.cuda() for n, t in call.given.items()}, self.spoiled(call.given)
            call.run({name: t.clone() for name, t in source.items()})  # makes the plan
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                # What runs on another stream does not wait for this, and finds no numbers.
                torch.cuda._sleep(100_000_000)
                for name, tensor in tensors.items():
                    tensor.copy_(source[name], non_blocking=True)
                outputs = call.run(tensors)
            stream.synchronize()
            self.check(call, outputs)

        self.of_each(test)

    def test_graphs(self):
        def test(call):
            tensors = self.spoiled(call.given)
            outputs, graph = self.captured(call, tensors)
            for _ in range(2):
                for name, tensor in tensors.items():
                    tensor.copy_(call.given[name])
                graph.replay()
                torch.cuda.synchronize()
                self.check(call, outputs)

        self.of_each(test)

    def captured(self, call, tensors):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            call.run({name: t.clone() for name, t in tensors.items()})
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs = call.run(tensors)
        return outputs, graph

    def test_one_graph_of_a_layer_for_all_lengths(self):
        call = Layer(self)
        tensors = self.spoiled(call.given)
        outputs, graph = self.captured(call, tensors)
        for offsets in ([0, 1, 2, 45, 45], [0, 1, 2, 30, 33], OFFSETS):
            call.given["cu_seqlens"] = i32(*offsets)
            for name, tensor in tensors.items():
                tensor.copy_(call.given[name])
            graph.replay()
            torch.cuda.synchronize()
            y, conv_state, pool = (t.cpu() for t in outputs)
            self.assertTrue((y[offsets[-1]:] == 0).all(), "rows past the last sequence")
            call.check(y, conv_state, pool)

    def test_training_steps(self):
        """Autograd calls the backward on a thread of its own, on the stream of the forward."""
        runs = []
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            torch.manual_seed(5)
            layer = training.GatedDeltaNet(32, key_heads=1, value_heads=2, key_dim=32, value_dim=32).cuda()
            given, wanted = (torch.randn(2, 70, 32).cuda() for _ in range(2))
            optimiser, losses = torch.optim.AdamW(layer.parameters(), lr=1e-2), []
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(8):
                    loss = (layer(given) - wanted).square().mean()
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                    losses.append(loss.detach())
            stream.synchronize()
            runs.append(([x.item() for x in losses], [p.detach().clone() for p in layer.parameters()]))
        (losses, one), (again, other) = runs
        self.assertLess(losses[-1], losses[0])
        for a, b in zip(losses, again):
            self.assertAlmostEqual(a, b, delta=1e-3 * a)
        for a, b in zip(one, other):
            self.assertLess(float((a - b).norm()), 1e-2 * float(a.norm()) + 1e-6)
