"""Trains two layers of Gated DeltaNet on associative recall and on copying, with deltawave's kernels, beside the same model in
float64 and with FLA's kernels.

    python3 train.py                    on the simulator, minutes
    python3 train.py --steps 30         seconds
    python3 train.py --device cuda --steps 500 --tokens 2048 --hidden 256 --pairs 64

Recall: pairs of a key and a value, then the keys again in another order; the model must say each value. Copying: random
tokens, a mark, and the same tokens again. All models see the same data and start from the same numbers; AdamW trains each, at
a rate that rises for 20 steps and then falls to 0.
Only what is between the projections differs: `deltawave` has bf16 (or fp16) inputs of the kernels and f32 for the rest,
`exact` is the chunked form in float64 by torch's autograd, `fla` FLA's kernels. Without a GPU FLA cannot run: `emulated` is its
chain of kernels in torch, with bf16 where the kernels hand something on.

`--curves FILE` writes the losses as lines of JSON, which docs/draw.py draws.
"""

import argparse
import json
import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltawave.training import GatedDeltaNet

CHUNK = 64
Batch = Tuple[Tensor, Tensor]  # tokens, and the tokens to predict at each position, -1: none


def recall(batch: int, tokens: int, pairs: int, vocabulary: int, random: torch.Generator) -> Batch:
    """Rows of `key value key value ...` and then, up to the end, `key value` again in random order."""
    half = vocabulary // 2
    rows, wanted = torch.zeros(batch, tokens, dtype=torch.int64), torch.full((batch, tokens), -1)
    for n in range(batch):
        keys = torch.randperm(half, generator=random)[:pairs]
        values = half + torch.randint(half, (pairs,), generator=random)
        asked = torch.cat([torch.randperm(pairs, generator=random) for _ in range(tokens // 2 // pairs)])[:tokens // 2 - pairs]
        order = torch.cat([torch.arange(pairs), asked])
        rows[n, :2 * len(order)] = torch.stack([keys[order], values[order]], 1).flatten()
        wanted[n, 2 * pairs:2 * len(order):2] = values[asked]
    return rows, wanted


def copying(batch: int, tokens: int, pairs: int, vocabulary: int, random: torch.Generator) -> Batch:
    """Rows of tokens, a 0 and the same tokens."""
    length = (tokens - 1) // 2
    part = 1 + torch.randint(vocabulary - 1, (batch, length), generator=random)
    rows, wanted = torch.zeros(batch, tokens, dtype=torch.int64), torch.full((batch, tokens), -1)
    rows[:, :length], rows[:, length + 1:2 * length + 1] = part, part
    wanted[:, length:2 * length] = part
    return rows, wanted


TASKS: Dict[str, Callable[..., Batch]] = {"recall": recall, "copying": copying}


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution of each channel of x `[B, T, C]`, in the type of x; sums in the type of the weights."""
    width, tokens = weight.shape[1], x.shape[1]
    padded = F.pad(x.to(weight.dtype), (0, 0, width - 1, 0))
    y = torch.stack([padded[:, tap:tap + tokens] * weight[:, tap] for tap in range(width)]).sum(0)
    return F.silu(y).to(x.dtype)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """`weight * rms_norm(x) * silu(z)` of rows `[..., V]`, in the type of x."""
    y = x.to(weight.dtype)
    y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight * F.silu(z.to(weight.dtype))
    return y.to(x.dtype)


def by_chunks(x: Tensor) -> Tensor:
    """x `[B, T, H, D]` as `[chunks, B, H, 64, D]`, with zeros after the last token."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).transpose(2, 3).movedim(1, 0)


def exact_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """o `[B, T, HV, V]` of the gated delta rule by chunks, in the type of its inputs. q, k `[B, T, HK, K]` are normalised
    here; g, beta `[B, T, HV]`."""
    tokens, group = q.shape[1], v.shape[2] // q.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    q, k, v, rates, g = (by_chunks(x) for x in (q, k, v, beta[..., None], g[..., None]))
    total = g.cumsum(-2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total - total.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    mixed = decay * (q @ k.transpose(-1, -2))
    unit = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    solved = unit + rates * (decay * (k @ k.transpose(-1, -2))).tril(-1)
    state = q.new_zeros(*q.shape[1:3], q.shape[-1], v.shape[-1])
    outputs = []
    for n in range(len(q)):
        grown = total[n].exp()
        error = rates[n] * (v[n] - grown * (k[n] @ state))
        update = torch.linalg.solve_triangular(solved[n], error, upper=False, unitriangular=True)
        outputs.append(grown * (q[n] @ state) + mixed[n] @ update)
        last = total[n][..., -1:, :]
        state = last.exp() * state + k[n].transpose(-1, -2) @ ((last - total[n]).exp() * update)
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :tokens]
    return o * q.shape[-1] ** -0.5


class Parts(GatedDeltaNet):
    """A layer whose recurrence is `rule`. `dtype`: the type of its inputs."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """o `[B, T, HV, V]` of q and k that are not normalised yet."""
        raise NotImplementedError

    def mix(self, x: Tensor, z: Tensor, a: Tensor, b: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
        assert cu_seqlens is None
        key_heads, value_heads, key_dim, value_dim = self.heads
        rows = causal_conv(x.to(self.dtype), self.conv_weight)
        q, k, v = rows.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), 2)
        q, k = (part.unflatten(2, (key_heads, key_dim)) for part in (q, k))
        g = -self.a_log.exp() * F.softplus(a.to(self.a_log.dtype) + self.dt_bias)
        o = self.rule(q, k, v.unflatten(2, (value_heads, value_dim)), g, b.to(g.dtype).sigmoid())
        return gated_norm(o, z.to(self.dtype), self.norm_weight)


class Exact(Parts):
    """In float64."""

    def mix(self, x: Tensor, z: Tensor, a: Tensor, b: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
        self.dtype = torch.float64
        return super().mix(x, z, a, b, cu_seqlens)

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return exact_rule(q, k, v, g, beta)


class Rounded(Parts):
    """In float64, of inputs in bf16 (or fp16), with outputs in bf16: the least that any such kernel rounds."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return exact_rule(q.double(), k.double(), v.double(), g.double(), beta.double()).to(q.dtype)


def emulated_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`exact_rule` as FLA's chain of kernels rounds it: sums in f32, and what a kernel hands on to the next one, q and k after
    the norm, the inverse, w, u, states, new values and outputs, in the type of q. Gradients of these are rounded, too."""
    dtype, tokens, group = q.dtype, q.shape[1], v.shape[2] // q.shape[2]

    def handed(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, k = (x.float() for x in (q, k))
    q, k = (handed(x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 2) for x in (q, k))
    q, k, v, rates, g = (by_chunks(x) for x in (q, k, v.float(), beta.float()[..., None], g.float()[..., None]))
    total = g.cumsum(-2)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total - total.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    unit = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    solved = unit + rates * (decay * (k @ k.transpose(-1, -2))).tril(-1)
    inverse = handed(torch.linalg.solve_triangular(solved, unit.expand_as(solved), upper=False, unitriangular=True))
    w, u = handed(inverse @ handed(rates * total.exp() * k)), handed(inverse @ handed(rates * v))
    mixed = handed(decay * (q @ k.transpose(-1, -2)))
    state = q.new_zeros(*q.shape[1:3], q.shape[-1], v.shape[-1])
    outputs = []
    for n in range(len(q)):
        before = handed(state)
        new = u[n] - w[n] @ before
        outputs.append(total[n].exp() * (q[n] @ before) + mixed[n] @ handed(new))
        last = total[n][..., -1:, :]
        state = last.exp() * state + k[n].transpose(-1, -2) @ handed((last - total[n]).exp() * new)
    o = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :tokens]
    return (o * q.shape[-1] ** -0.5).to(dtype)


class Emulated(Parts):
    """With the roundings of FLA's kernels."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return emulated_rule(q, k, v, g, beta)


class Fla(Parts):
    """With FLA's kernels."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return o


LAYERS = {"exact": Exact, "rounded": Rounded, "emulated": Emulated, "fla": Fla, "deltawave": GatedDeltaNet}


class Model(nn.Module):
    """Embedding, two layers and a head."""

    def __init__(self, kind: str, vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        key_dim = value_dim = hidden // 2
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            LAYERS[kind](hidden, key_heads=1, value_heads=2, key_dim=key_dim, value_dim=value_dim, dtype=dtype) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(3))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x))
        logits: Tensor = self.head(self.norms[2](x))
        return logits


def made(kind: str, vocabulary: int, hidden: int, dtype: torch.dtype, device: str) -> Model:
    """A model, whose parameters have the same numbers for every kind."""
    torch.manual_seed(1)
    model = Model(kind, vocabulary, hidden, dtype).to(device)
    return model.double() if kind == "exact" else model


def loss_of(model: Model, batch: Batch) -> Tensor:
    """Mean loss in nats of the positions that have something to predict."""
    tokens, wanted = batch
    logits: Tensor = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1)


def train(kind: str, task: str, options: argparse.Namespace) -> List[float]:
    """The loss of each step."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    model = made(kind, options.vocabulary, options.hidden, dtype, options.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 20) * (1 - step / options.steps))
    random = torch.Generator().manual_seed(options.seed)
    losses = []
    began = time.monotonic()
    for step in range(options.steps):
        batch = TASKS[task](options.batch, options.tokens, options.pairs, options.vocabulary, random)
        loss = loss_of(model, (batch[0].to(options.device), batch[1].to(options.device)))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    print(f"{task} {kind}: loss {losses[0]:.3f} at first, {sum(losses[-20:]) / len(losses[-20:]):.3f} at the end, "
          f"{(time.monotonic() - began) / options.steps:.2f} s a step", flush=True)
    return losses


def running(losses: List[float], count: int = 20) -> List[float]:
    """Means of `count` losses in a row."""
    return [sum(losses[i:i + count]) / count for i in range(len(losses) - count + 1)]


def distance(losses: List[float], exact: List[float]) -> Tuple[float, float]:
    """The largest difference of two running means, in nats and as a share of the exact one."""
    pairs = list(zip(running(losses), running(exact)))
    return max(abs(a - b) for a, b in pairs), max(abs(a - b) / b for a, b in pairs)


def within(losses: List[float], exact: List[float]) -> bool:
    """Whether each running mean is within 2% or 0.01 nats of the exact one."""
    return all(abs(a - b) <= max(0.02 * b, 0.01) for a, b in zip(running(losses), running(exact)))


def choose_first_configurations() -> None:
    """Lets Triton kernels take their first configuration. To try all of FLA's takes many minutes, and decides about time and the
    order of sums."""
    from triton.runtime.autotuner import Autotuner

    made: Any = Autotuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: List[Any], *rest: Any, **named: Any) -> None:
        made(self, fn, arg_names, configs[:1], *rest, **named)

    Autotuner.__init__ = first


def fla_is_missing(device: str) -> Optional[str]:
    """Why FLA's kernels cannot run here, or None. Imports them: before that, what they depend on is set."""
    if device != "cuda":
        return "its kernels need a GPU"
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA's own kernels, not FlashQLA's where that is installed
    try:
        choose_first_configurations()
        import fla.ops.gated_delta_rule  # noqa: F401
    except ImportError as problem:
        return str(problem)
    return None


def main(arguments: Optional[List[str]] = None) -> Dict[Tuple[str, str], List[float]]:
    """Trains, and returns the losses by task and kind."""
    parser = argparse.ArgumentParser(description="two layers of Gated DeltaNet on associative recall and on copying")
    for name, value, text in (("steps", 500, "steps of AdamW"), ("batch", 32, "sequences in a step"),
                              ("tokens", 64, "tokens of a sequence"), ("hidden", 64, "numbers per token"),
                              ("vocabulary", 32, "tokens that exist"), ("pairs", 4, "keys in a sequence of recall"),
                              ("seed", 2, "of the data")):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text}; default {value}")
    parser.add_argument("--rate", type=float, default=4e-3, help="AdamW's largest rate; default 0.004")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu: the simulator")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="inputs of the kernels")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--curves", help="a file for the losses, as lines of JSON")
    options = parser.parse_args(arguments)
    missing = fla_is_missing(options.device)
    if missing:
        print(f"fla: {missing}; its chain is emulated")
    theirs = "emulated" if missing else "fla"
    kinds = ["exact", theirs, "deltawave"]
    if options.device == "cpu":
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "the simulator"
    found: Dict[Tuple[str, str], List[float]] = {}
    lines: List[Dict[str, Any]] = []
    failed = False
    for task in options.tasks:
        for kind in kinds:
            found[task, kind] = train(kind, task, options)
            lines.append({"task": task, "kind": kind, "where": "torch" if kind in ("exact", "emulated") else where,
                          "dtype": options.dtype, "tokens": options.tokens, "hidden": options.hidden, "batch": options.batch,
                          "losses": [round(x, 4) for x in found[task, kind]]})
        for kind in kinds[1:]:
            nats, share = distance(found[task, kind], found[task, "exact"])
            print(f"{task} {kind}: running means of 20 losses differ from float64's by at most {nats:.4f} nats, {share:.2%}")
        ours, others = (distance(found[task, kind], found[task, "exact"])[0] for kind in ("deltawave", theirs))
        failed |= not within(found[task, "deltawave"], found[task, "exact"]) and ours > others
    if options.curves:
        with open(options.curves, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    if failed:
        sys.exit("deltawave's running mean is further from float64's than 2%, 0.01 nats and FLA's")
    return found


if __name__ == "__main__":
    main()
