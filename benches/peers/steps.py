"""The other operations of a layer as rows: decode, gated norm, convolution, and the layer itself between its projections.
Each makes its inputs and a float64 reference, and says what the contestants' outputs are called."""

import types
from dataclasses import dataclass

from cases import D

WIDTH = 4  # of the convolution
EPS = 1e-6


@dataclass(frozen=True)
class Step:
    operation: str
    batch: int  # sequences
    tokens: int  # of each
    state: str = "f32"  # of the pool
    key_heads: int = 16
    value_heads: int = 32
    dtype: str = "bf16"

    @property
    def name(self):
        heads = f"{self.operation} {self.key_heads}:{self.value_heads}"
        if self.operation == "decode":
            return f"{heads} {self.batch} x {self.tokens}, {self.state} states"
        return f"{heads} {self.tokens} tokens"

    @property
    def outputs(self):
        """Names of what a contestant returns, in order."""
        return {"decode": ("o", "state"), "norm": ("y",), "conv": ("q", "k", "v"), "layer": ("y", "state")}[self.operation]

    @property
    def channels(self):
        return (2 * self.key_heads + self.value_heads) * D

    @property
    def state_bytes(self):
        """Recurrent states, read and written."""
        each = self.value_heads * D * D * {"f32": 4, "bf16": 2}[self.state]
        return 2 * self.batch * each if self.operation in ("decode", "layer") else 0

    @property
    def io_bytes(self):
        """All that each token reads and writes, once, but states."""
        values = self.value_heads * D
        numbers = {"decode": self.channels + values + 2 * self.value_heads, "norm": 3 * values,
                   "conv": 2 * self.channels, "layer": self.channels + 2 * values + 2 * self.value_heads}
        return 2 * self.batch * self.tokens * numbers[self.operation]

    def line(self):
        """The row in results.jsonl, but its results."""
        return {"operation": self.operation, "dtype": self.dtype, "key_heads": self.key_heads,
                "value_heads": self.value_heads, "batch": self.batch, "tokens": self.tokens, "state": self.state,
                "io_bytes": self.io_bytes, "state_bytes": self.state_bytes}

    def inputs(self, device="cuda", seed=7):
        """Tensors by name, all sequences in rows one after the other."""
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)
        element = torch.bfloat16
        rows, hk, hv = self.batch * self.tokens, self.key_heads, self.value_heads

        def normal(*shape, dtype=element, scale=1.0):
            return (scale * torch.randn(*shape, generator=generator, device=device)).to(dtype)

        def uniform(*shape):
            return torch.rand(*shape, generator=generator, device=device)

        x = types.SimpleNamespace(case=self, scale=D**-0.5)
        if self.operation == "norm":
            x.x, x.z, x.weight = normal(rows, hv, D), normal(rows, hv, D), 1 + normal(D, scale=0.1)
            return x
        if self.operation in ("conv", "layer"):
            # A layer's rows hold z after q, k and v.
            x.x = normal(rows, self.channels + (hv * D if self.operation == "layer" else 0))
            x.conv_weight = (uniform(self.channels, WIDTH) - 0.5).to(element)
            x.norm_weight = 1 + normal(D, scale=0.1)
        else:
            x.q, x.k, x.v = normal(rows, hk, D), normal(rows, hk, D), normal(rows, hv, D)
        x.a, x.b = normal(rows, hv), normal(rows, hv)
        x.a_log = torch.log(0.001 + (16 - 0.001) * uniform(hv))
        step = 0.001 * 100 ** uniform(hv)
        x.dt_bias = step + torch.log(-torch.expm1(-step))
        pool = {"f32": torch.float32, "bf16": torch.bfloat16}[self.state]
        x.pool = normal(self.batch, hv, D, D, dtype=pool, scale=0.25)
        return x

    def reference(self, x):
        """The outputs in float64."""
        return {"decode": decode, "norm": norm, "conv": conv, "layer": layer}[self.operation](self, x)


def unit(t):
    """Rows l2-normalised as the operations do it."""
    return t * (t.square().sum(-1, keepdim=True) + EPS).rsqrt()


def gates(x):
    """g and beta in float64."""
    import torch.nn.functional as F

    g = -x.a_log.double().exp() * F.softplus(x.a.double() + x.dt_bias.double(), threshold=1e9)
    return g, x.b.double().sigmoid()


def recurrence(step, x, q, k, v, state):
    """Token by token: rows [B T, heads, D] in float64, states [B, HV, D, D]."""
    import torch

    group = step.value_heads // step.key_heads
    g, beta = gates(x)
    shaped = lambda t: t.view(step.batch, step.tokens, *t.shape[1:])  # noqa: E731
    q, k = (shaped(unit(t).repeat_interleave(group, 1)) for t in (q, k))
    v, g, beta = shaped(v), shaped(g), shaped(beta)
    o = torch.empty_like(v)
    for t in range(step.tokens):
        state = state * g[:, t, :, None, None].exp()
        delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        o[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * x.scale
    return o.flatten(0, 1), state


def decode(step, x):
    return recurrence(step, x, x.q.double(), x.k.double(), x.v.double(), x.pool.double())


def normed(o, z, weight):
    import torch.nn.functional as F

    return o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double() * F.silu(z.double())


def norm(step, x):
    return (normed(x.x.double(), x.z, x.weight),)


def convolved(step, x):
    """q, k and v of one sequence after a convolution that starts from zeros, and SiLU."""
    import torch
    import torch.nn.functional as F

    t = x.x[:, :step.channels].double()
    weight = x.conv_weight.double()
    out = torch.zeros_like(t)
    for back in range(WIDTH):
        out[back:] += t[:len(t) - back] * weight[:, WIDTH - 1 - back]
    keys = step.key_heads * D
    q, k, v = F.silu(out).split([keys, keys, step.value_heads * D], -1)
    return tuple(part.reshape(len(t), -1, D) for part in (q, k, v))


def conv(step, x):
    return convolved(step, x)


def layer(step, x):
    from measure import reference

    group = types.SimpleNamespace(key_heads=step.key_heads, value_heads=step.value_heads, tokens=step.tokens,
                                  lengths=(step.tokens,))
    q, k, v = convolved(step, x)
    g, beta = gates(x)
    whole = types.SimpleNamespace(case=group, scale=x.scale, offsets=[0, step.tokens], q=unit(q)[None], k=unit(k)[None],
                                  v=v[None], g=g[None], beta=beta[None])
    o, state = reference(whole)
    return normed(o[0], x.x[:, step.channels:].reshape(o[0].shape), x.norm_weight), state


def all_steps():
    """Decodes that compile the same kernels follow each other."""
    found = [Step("decode", batch, tokens, state) for state in ("f32", "bf16") for tokens in (1, 4)
             for batch in (1, 8, 32, 128, 256)]
    found += [Step("decode", 32, tokens, state) for state in ("f32", "bf16") for tokens in (2, 3)]
    found += [Step("norm", 1, tokens) for tokens in (32, 8192)]
    found += [Step("conv", 1, tokens) for tokens in (1024, 8192, 32768)]
    found += [Step("layer", 1, tokens) for tokens in (2048, 8192, 32768)]
    return found
