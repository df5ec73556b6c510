"""The rows of the comparison, and their inputs: the same for everyone."""

import types
from dataclasses import dataclass

D = 128  # K and V
RAGGED = (1024, 4096, 2047, 3100, 1500, 3600, 2500, 1300, 3900, 1801, 2300, 3333, 1155, 2800, 4001, 1409)
GATES = ("normal", "mixed")


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


def all_cases():
    """In the order in which they are measured: of each head configuration a long sequence first, because peers that
    tune themselves do so on the first shape that they see."""
    lengths = {"32K": (32768,), "8K": (8192,), "2K": (2048,), "128K": (131072,)}
    cases = []
    for dtype in ("bf16", "fp16"):
        for size in lengths.values():
            cases += [Case(dtype, 16, 16, size, gates) for gates in GATES]
        if dtype == "bf16":
            shapes = [(16, 32, lengths["32K"]), (16, 32, lengths["8K"]), (16, 32, (4096,) * 8), (16, 32, RAGGED),
                      (16, 64, lengths["8K"]), (2, 8, lengths["32K"]), (2, 8, lengths["8K"]), (2, 8, (65536,))]
            cases += [Case(dtype, *shape, gates) for shape in shapes for gates in GATES]
    return cases


def make_inputs(case, device="cuda", seed=7):
    """q, k, v of `case.dtype` and f32 gates whose values are exact in it, so that peers which take 16-bit gates see
    the same numbers. q and k are l2-normalised; `normal` gates are logsigmoid(N(0, 1)), `mixed` ones a sixteenth of
    that, and none in every fourth head."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]

    def normal(*shape):
        return torch.randn(1, case.tokens, *shape, generator=generator, device=device, dtype=torch.float32)

    x = types.SimpleNamespace(case=case, scale=D**-0.5)
    x.q = F.normalize(normal(case.key_heads, D), dim=-1).to(dtype)
    x.k = F.normalize(normal(case.key_heads, D), dim=-1).to(dtype)
    x.v = normal(case.value_heads, D).to(dtype)
    g = F.logsigmoid(normal(case.value_heads))
    if case.gates == "mixed":
        g = g / 16
        g[:, :, ::4] = 0
    x.g = g.to(dtype).float()
    x.beta = normal(case.value_heads).sigmoid().to(dtype).float()
    x.offsets = [0]
    for n in case.lengths:
        x.offsets.append(x.offsets[-1] + n)
    x.cu_seqlens = torch.tensor(x.offsets, dtype=torch.int32, device=device)
    return x
