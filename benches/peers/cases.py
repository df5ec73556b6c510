"""The rows of the comparison, and their inputs: the same for everyone."""

import types
from dataclasses import dataclass

D = 128  # K and V
RAGGED = (1024, 4096, 2047, 3100, 1500, 3600, 2500, 1300, 3900, 1801, 2300, 3333, 1155, 2800, 4001, 1409)
# 64 prompts in no order: half of them under 220 tokens, the longest of 8,192.
TAIL = tuple(round(64 * 128 ** ((29 * i % 64 / 63) ** 2)) for i in range(64))
GATES = ("normal", "mixed", "model", "zero")


@dataclass(frozen=True)
class Case:
    dtype: str
    key_heads: int
    value_heads: int
    lengths: tuple
    gates: str

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def batch(self):
        """What the lengths are, in words."""
        n, first = len(self.lengths), self.lengths[0]
        if n == 1:
            return f"{first // 1024}K"
        return f"{n} x {first}" if set(self.lengths) == {first} else f"{n} ragged, {self.tokens}"

    @property
    def name(self):
        return f"{self.dtype} {self.key_heads}:{self.value_heads} {self.batch} {self.gates}"

    @property
    def io_bytes(self):
        """q, k, v and o, once each."""
        return 2 * self.tokens * D * 2 * (self.key_heads + self.value_heads)

    @property
    def state_bytes(self):
        """The final states, in f32. Initial ones are absent."""
        return 4 * len(self.lengths) * self.value_heads * D * D

    operation, outputs = "prefill", ("o", "state")

    def line(self):
        """The row in results.jsonl, but its results."""
        return {"operation": self.operation, "dtype": self.dtype, "key_heads": self.key_heads,
                "value_heads": self.value_heads, "batch": self.batch, "tokens": self.tokens, "gates": self.gates,
                "io_bytes": self.io_bytes, "state_bytes": self.state_bytes}

    def inputs(self):
        return make_inputs(self)

    def reference(self, x):
        from measure import reference

        return reference(x)

    @property
    def correlated(self):
        """Whether q, k and v went through a convolution and SiLU, which leaves neighbours and heads correlated."""
        return self.gates in ("model", "zero")


def all_cases():
    """In the order in which they are measured: of each head configuration a long sequence first, because peers that
    tune themselves do so on the first shape that they see. All gates of a shape follow each other."""
    lengths = {"32K": (32768,), "8K": (8192,), "2K": (2048,), "128K": (131072,)}
    shapes = [(16, 16, size) for size in lengths.values()]
    shapes += [(16, 32, lengths["32K"]), (16, 32, lengths["8K"]), (16, 32, (4096,) * 8), (16, 32, RAGGED)]
    # Batches as engines have them.
    shapes += [(16, 32, (2048,) * 8), (16, 32, (512,) * 64), (16, 32, (128,) * 256), (16, 32, TAIL)]
    shapes += [(16, 48, lengths["32K"]), (16, 48, lengths["8K"]), (16, 48, (512,) * 64)]
    shapes += [(16, 64, lengths["8K"]), (2, 8, lengths["32K"]), (2, 8, lengths["8K"]), (2, 8, (65536,))]
    cases = [Case("bf16", *shape, gates) for shape in shapes for gates in GATES]
    cases += [Case("fp16", 16, 16, size, gates) for size in lengths.values() for gates in GATES[:2]]
    return cases


def matches(name, only):
    """Whether a row is chosen: `TEXT+TEXT` is in its name, all of it; commas stand between alternatives."""
    return any(all(text in name for text in choice.split("+")) for choice in only.split(","))


def convolved(t, offsets, generator):
    """A causal depthwise convolution of width 4 in each sequence, then SiLU. Weights are uniform in +-1/2, as PyTorch
    initialises them. [1, T, heads, D]"""
    import torch

    weights = torch.rand(4, *t.shape[2:], generator=generator, device=t.device) - 0.5
    position = torch.cat([torch.arange(b - a, device=t.device) for a, b in zip(offsets, offsets[1:])])
    out = t * weights[0]
    for back in range(1, 4):
        out[:, back:] += t[:, :-back] * weights[back] * (position[back:] >= back)[:, None, None]
    return torch.nn.functional.silu(out)


def make_inputs(case, device="cuda", seed=7):
    """q, k, v of `case.dtype` and f32 gates whose values are exact in it, so that peers which take 16-bit gates see
    the same numbers. q and k are l2-normalised; where the case says so they and v went through a convolution and SiLU.
    Gates g: `normal` is logsigmoid(N(0, 1)); `mixed` a sixteenth of that, and none in every fourth head; `zero` is none;
    `model` is -A softplus(N(0, 1) + dt_bias) with the A and dt_bias of each head that models are initialised with: A
    uniform in 0.001..16, softplus(dt_bias) in 0.001..0.1, uniform in its logarithm; `strong`, for gradients, is
    -16 softplus(N(0, 1) / 2 + 1), about -22 a token."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]

    def normal(*shape):
        return torch.randn(1, case.tokens, *shape, generator=generator, device=device, dtype=torch.float32)

    def uniform():
        return torch.rand(case.value_heads, generator=generator, device=device, dtype=torch.float32)

    def row(*shape):
        drawn = normal(*shape)
        return convolved(drawn, x.offsets, generator) if case.correlated else drawn

    x = types.SimpleNamespace(case=case, scale=D**-0.5, offsets=[0])
    for n in case.lengths:
        x.offsets.append(x.offsets[-1] + n)
    x.q = F.normalize(row(case.key_heads, D), dim=-1).to(dtype)
    x.k = F.normalize(row(case.key_heads, D), dim=-1).to(dtype)
    x.v = row(case.value_heads, D).to(dtype)
    g = normal(case.value_heads)
    if case.gates == "model":
        rate = 0.001 + (16 - 0.001) * uniform()
        step = 0.001 * 100 ** uniform()
        g = -rate * F.softplus(g + step + torch.log(-torch.expm1(-step)))
    elif case.gates == "zero":
        g = torch.zeros_like(g)
    elif case.gates == "strong":
        g = -16 * F.softplus(g / 2 + 1)
    else:
        g = F.logsigmoid(g)
        if case.gates == "mixed":
            g = g / 16
            g[:, :, ::4] = 0
    x.g = g.to(dtype).float()
    x.beta = normal(case.value_heads).sigmoid().to(dtype).float()
    x.cu_seqlens = torch.tensor(x.offsets, dtype=torch.int32, device=device)
    return x
