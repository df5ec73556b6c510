"""The backward of `ops.prefill_parallel`. Every block of a layout is a sequence of `ops.prefill_backward`, from the state
before it and with the gradient of the state after it. Blocks fix both, so gradients do not depend on the ranks.

A block maps the gradient of the state after it to that of the state before it, dS = N' + M^T dS_after. A rank sends N' and
M^T of each block that another one precedes. Every rank folds the blocks of a sequence one by one, from the last."""

import itertools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import ops
from .parallel import ParallelPrefill, RankLayout
from .prefill import PrefillSpec

CHUNK = 64


class Block(NamedTuple):
    """A block of this rank."""

    fragment: int
    sequence: int
    number: int  # within its sequence
    tokens: int
    end: int  # within its fragment
    last: bool  # of its sequence


class Blocks:
    """Blocks of a rank, and where those of all ranks lie once gathered."""

    def __init__(self, layout: RankLayout, plan: ParallelPrefill, every: Sequence[Sequence[Tuple[int, int, int]]],
                 value_heads: int) -> None:
        self.block = size = layout.block or default_block(layout.lengths, value_heads)
        self.counts = [max(-(-tokens // size), 1) for tokens in layout.lengths]
        self.local = [Block(n, s, (begin + at) // size, min(size, tokens - at), min(at + size, tokens),
                            (begin + at) // size == self.counts[s] - 1)
                      for n, (s, begin, tokens) in enumerate(plan.fragments) for at in range(0, max(tokens, 1), size)]
        self.place = {(b.sequence, b.number): i for i, b in enumerate(self.local)}
        # Blocks of each rank that another one precedes: their summaries are sent.
        sent = [[(s, (begin + at) // size) for s, begin, tokens in fragments for at in range(0, max(tokens, 1), size)
                 if begin + at > 0] for fragments in every]
        self.each = max(map(len, sent), default=0)
        self.slots = {key: rank * self.each + i for rank, keys in enumerate(sent) for i, key in enumerate(keys)}
        self.offsets = torch.tensor([0, *itertools.accumulate(b.tokens for b in self.local)], dtype=torch.int32)
        # Blocks that another one follows: the forward leaves the states after them.
        self.followed = [i for i, b in enumerate(self.local) if not b.last]
        self.ends = {place: i for i, place in enumerate(self.followed)}

    def snapshot_slots(self, plan: ParallelPrefill) -> List[int]:
        """Entries of snapshot_slots for the states after the blocks that another one follows."""
        table = [-1] * plan.chunk_entries
        begins = [0, *itertools.accumulate(tokens for _, _, tokens in plan.fragments)]
        for slot, place in enumerate(self.followed):
            block = self.local[place]
            table[begins[block.fragment] // CHUNK + block.fragment + block.end // CHUNK - 1] = slot
        return table


def default_block(lengths: Sequence[int], value_heads: int) -> int:
    """Tokens of a block where the layout names none, as `RankLayout::default_block` in Rust."""
    chunks = -(-max(lengths, default=0) // CHUNK)
    blocks = min(max(512 // max(value_heads, 1), 16), 64)
    return min(max(-(-chunks // blocks), 4), 1 << 24) * CHUNK


def blocks_of(device: torch.device, spec: PrefillSpec, layout: RankLayout, plan: ParallelPrefill, rank: int) -> Blocks:
    """The blocks of the rank that `plan` is for, made once."""

    def make() -> Blocks:
        if not isinstance(layout.kind, str):
            return Blocks(layout, plan, layout.kind, spec.value_heads)
        context, total = ops.context_of(device), sum(layout.lengths)
        every = [ParallelPrefill(context, spec, layout, other, total).fragments for other in range(layout.ranks)]
        return Blocks(layout, plan, every, spec.value_heads)

    found: Blocks = ops._plan((Blocks, device, spec, layout, rank), make)
    return found


class Saved(NamedTuple):
    """What a backward needs beside tensors that autograd keeps."""

    blocks: Blocks
    plan: ParallelPrefill
    group: Any
    ranks: int
    allow_neg_eigval: bool
    scale: Optional[float]
    qk_l2norm: bool
    head_map: str
    state_layout: str


def _key_major(x: Tensor, layout: str) -> Tensor:
    return x if layout == "key_major" else x.transpose(-1, -2)


def _gathered(send: Sequence[Tensor], saved: Saved) -> List[Tensor]:
    """`send` of all ranks, each with the ranks' entries one after the other, in one all-gather."""
    if saved.ranks == 1:
        return list(send)
    import torch.distributed as dist
    flat = torch.cat([x.reshape(-1) for x in send])
    every = flat.new_empty((saved.ranks, flat.numel()))
    dist.all_gather_into_tensor(every.view(-1), flat, group=saved.group)
    parts = every.split([x.numel() for x in send], dim=1)
    return [part.reshape(-1, *x.shape[1:]) for part, x in zip(parts, send)]


def _folded(blocks: Blocks, maps: Tensor, after: Tensor) -> None:
    """Fills in `after`, the gradients of the states after this rank's blocks, where another block follows. `maps`: N' and M^T
    of the blocks of all ranks, `[slots, HV, K, V + K]`. Products are in f64: their rounding to f32 does not depend on how a
    library sums, nor on whether it may use a shorter type for f32."""
    value_dim = after.shape[-1]
    for sequence in sorted({b.sequence for b in blocks.local}):
        first = min(b.number for b in blocks.local if b.sequence == sequence)
        gradient: Optional[Tensor] = None
        for index in range(blocks.counts[sequence] - 1, first, -1):
            own = maps[blocks.slots[sequence, index]]
            before = own[..., :value_dim]
            if gradient is not None:
                before = (before.double() + own[..., value_dim:].double() @ gradient.double()).float()
            gradient = before
            place = blocks.place.get((sequence, index - 1))
            if place is not None:
                after[place] = gradient


def gradients(saved: Saved, x: Dict[str, Optional[Tensor]], ends: Tensor, d_o: Tensor, d_final: Optional[Tensor],
              wanted: Dict[str, bool]) -> Dict[str, Tensor]:
    """Gradients by the name of their input. `x`: the inputs. `ends`: states after the blocks that another one follows.
    All ranks call it together, those without tokens too."""
    blocks, plan = saved.blocks, saved.plan
    q, k, v = (x[name] for name in "qkv")
    assert q is not None and k is not None and v is not None
    heads, key_dim, value_dim, device, count = v.shape[1], k.shape[2], v.shape[2], q.device, len(blocks.local)
    f32 = {"dtype": torch.float32, "device": device}
    after = torch.zeros((count, heads, key_dim, value_dim), **f32)
    has_last = [(i, b.fragment) for i, b in enumerate(blocks.local) if b.last]
    if d_final is not None:
        d_final = _key_major(d_final, saved.state_layout)
        for i, fragment in has_last:
            after[i] = d_final[fragment]

    def launched(values: Tensor, upstream: Tensor, last: Tensor, first: Tensor, names: Sequence[str]) -> Dict[str, Tensor]:
        sources = [x["a"] is not None and raw or name for name, raw in
                   (("q", ""), ("k", ""), ("v", ""), ("g", "a"), ("beta", "b"), ("a_log", ""), ("dt_bias", ""),
                    ("initial_state", ""))]
        wants = [name in names for name in sources]
        found = ops.prefill_backward(
            upstream, last, q, k, values, x["g"], x["beta"], x["a"], x["b"], x["a_log"], x["dt_bias"],
            saved.allow_neg_eigval, first, None, blocks.offsets, saved.scale, saved.qk_l2norm, saved.head_map, "key_major",
            wants, 1)  # one segment: the planner's would depend on how many blocks the rank has
        return {name: d for name, d, want in zip(sources, found, wants) if want}

    starts = torch.zeros_like(after)
    if blocks.each:
        tails = torch.zeros((plan.tail_slots, heads, key_dim, value_dim), **f32)
        maps = torch.zeros((blocks.each, heads, key_dim, value_dim + key_dim), **f32)
        sent = [(i, b) for i, b in enumerate(blocks.local) if b.number]
        if sent:
            identity = torch.eye(key_dim, **f32).expand(count, heads, key_dim, key_dim).contiguous()
            nothing = torch.zeros((v.shape[0], heads, key_dim), dtype=v.dtype, device=device)
            state = ("initial_state",)
            own = launched(v, d_o, after, torch.zeros_like(after), state)["initial_state"]
            of_identity = launched(nothing, nothing, identity, torch.zeros_like(identity), state)["initial_state"]
            for slot, (i, _) in enumerate(sent):
                maps[slot] = torch.cat([own[i], of_identity[i]], dim=-1)
        for i, b in enumerate(blocks.local):
            slot = plan.tails[b.fragment][0]
            if slot >= 0 and b.end == plan.fragments[b.fragment][2]:
                tails[slot] = ends[blocks.ends[i]]
        tails, maps = _gathered((tails, maps), saved)
        _folded(blocks, maps, after)
        for i, b in enumerate(blocks.local):
            if b.number:
                # The block before may lie in the fragment before.
                before = i - 1 if i and blocks.local[i - 1].fragment == b.fragment else None
                starts[i] = tails[plan.tails[b.fragment][1]] if before is None else ends[blocks.ends[before]]
    initial, has = x["initial_state"], x["has_initial_state"]
    reads = [(i, b.fragment) for i, b in enumerate(blocks.local) if not b.number]
    if initial is not None:
        given = _key_major(initial, saved.state_layout)
        for i, fragment in reads:
            starts[i] = given[fragment] if has is None else torch.where(has[fragment] != 0, given[fragment].float(), 0.0)
    names = [name for name, want in wanted.items() if want]
    if not count:
        return {name: torch.zeros_like(t) for name, t in x.items() if name in names and t is not None}
    found = launched(v, d_o, after, starts, names)
    if "initial_state" in found:
        assert initial is not None
        own, d_initial = found["initial_state"], torch.zeros_like(initial, dtype=torch.float32)
        for i, fragment in reads:
            d = own[i] if has is None else torch.where(has[fragment] != 0, own[i], 0.0)
            _key_major(d_initial, saved.state_layout)[fragment] = d
        found["initial_state"] = d_initial
    return found


_TENSORS = ("q", "k", "v", "g", "beta", "a", "b", "a_log", "dt_bias", "initial_state")


class RanksFunction(torch.autograd.Function):  # type: ignore[misc]
    """A prefill over ranks with its backward. `launch` returns o, the final states, the states after blocks, and Saved."""

    @staticmethod
    def forward(ctx: Any, launch: Any, has_initial_state: Optional[Tensor], *inputs: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        o, final_state, ends, ctx.saved = launch()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(has_initial_state, ends, *inputs)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_final: Optional[Tensor]) -> Any:
        has, ends, *inputs = ctx.saved_tensors
        x = {**dict(zip(_TENSORS, inputs)), "has_initial_state": has}
        wanted = {name: bool(need) for name, need in zip(_TENSORS, ctx.needs_input_grad[2:])}
        with torch.no_grad():
            # All ranks take part, whether or not a gradient reaches this rank's results.
            found = gradients(ctx.saved, x, ends, torch.zeros_like(x["v"]) if d_o is None else d_o, d_final, wanted)
            made = [found[name].to(t.dtype) if wanted[name] else None for name, t in zip(_TENSORS, inputs)]
        if torch.is_grad_enabled():
            needed = [t for t in (d_o, d_final, *inputs) if t is not None and t.requires_grad]
            text = "prefill_parallel: no gradients of gradients; the backward of prefill_parallel cannot be differentiated"
            each = iter(ops._WithoutBackward.apply(text, [t for t in made if t is not None], *needed))
            made = [None if t is None else next(each) for t in made]
        return (None, None, *made)
