"""The backward of `ops.prefill_parallel` and `ops.conv_parallel`, each with one exchange between all ranks.

A prefill's has the stages of `ParallelPrefillBackward`. A convolution's runs on each fragment and the width - 1 rows after it,
which the rank of the next fragment sends with their gradients: the gradient of a row is then computed once, where the row is,
from the same numbers as in one process."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import ops
from .parallel import ParallelPrefill, ParallelPrefillBackward


class Saved(NamedTuple):
    """What a backward needs beside tensors that autograd keeps."""

    plan: ParallelPrefill
    group: Any
    ranks: int
    allow_neg_eigval: bool
    state_layout: str


_TENSORS = ("q", "k", "v", "g", "beta", "a", "b", "a_log", "dt_bias", "initial_state")


def gathered(plan: Any, summary: Tensor, group: Any, ranks: int) -> Tensor:
    """Summaries of all ranks, in one all-gather unless there is nothing to send."""
    if not plan.summary_bytes or ranks == 1:
        return summary
    import torch.distributed as dist
    every = ops.empty((plan.gathered_bytes,), torch.uint8, summary.device)
    dist.all_gather_into_tensor(every, summary, group=group)
    return every


def gradients(saved: Saved, x: Dict[str, Optional[Tensor]], d_o: Tensor, d_final: Optional[Tensor],
              wanted: Dict[str, bool]) -> Dict[str, Tensor]:
    """Gradients by the name of their input. `x`: the inputs. All ranks call it together, those without tokens too."""
    plan = saved.plan
    backward = ops._plan((ParallelPrefillBackward, plan), lambda: ParallelPrefillBackward(plan))
    q, k, v = (x[name] for name in "qkv")
    assert q is not None and k is not None and v is not None
    device = q.device
    raw = {"g": "a", "beta": "b"} if x["a"] is not None else {}
    sources = [raw.get(name, name) for name in ops._GRADIENTS.values()]
    wants = [wanted[name] for name in sources]
    found = ops.prefill_gradients(q, k, v, x["g"], x["beta"], x["a"], x["b"], x["a_log"], x["dt_bias"], x["initial_state"], wants,
                                  ops.empty)
    outputs = {name: t for name, t, want in zip(ops._GRADIENTS, found, wants) if want}
    if "d_initial_state" in outputs:
        outputs["d_initial_state"].zero_()  # fragments that do not begin a sequence write none
    given = {**x, "d_o": ops._dense_rows(d_o), "d_final_state": None if d_final is None else d_final.contiguous(), **outputs}
    if not plan.fragments:
        given = {name: t for name, t in given.items() if "state" not in name}
    tensors = {**ops._all_reachable(given, device), "allow_neg_eigval": saved.allow_neg_eigval}
    if plan.fragments:
        tensors.update({name: saved.state_layout for name in ("initial_layout", "d_final_layout", "d_initial_layout")})
    workspace = ops.empty((backward.workspace_bytes,), torch.uint8, device)
    # Zeros: bytes past the summaries of a rank with fewer blocks are sent, too.
    summary = ops.empty((backward.summary_bytes,), torch.uint8, device).zero_()
    backward.summarise(summary, workspace, **tensors)
    backward.finish(gathered(backward, summary, saved.group, saved.ranks), workspace, **tensors)
    return {name: t for name, t, want in zip(sources, found, wants) if want}


def _once(name: str, made: List[Optional[Tensor]], inputs: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
    """Gradients that refuse to be differentiated, where autograd would record that."""
    if not torch.is_grad_enabled():
        return made
    needed = [t for t in inputs if t is not None and t.requires_grad]
    text = f"{name}: no gradients of gradients; the backward of {name} cannot be differentiated"
    each = iter(ops._WithoutBackward.apply(text, [t for t in made if t is not None], *needed))
    return [None if t is None else next(each) for t in made]


class PrefillFunction(torch.autograd.Function):  # type: ignore[misc]
    """A prefill over ranks with its backward. `launch` returns o, the final states and the plan."""

    @staticmethod
    def forward(ctx: Any, launch: Callable[[], Tuple[Tensor, Tensor, Saved]], has_initial_state: Optional[Tensor],
                *inputs: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        o, final_state, ctx.saved = launch()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(has_initial_state, *inputs)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_final: Optional[Tensor]) -> Any:
        has, *inputs = ctx.saved_tensors
        x = {**dict(zip(_TENSORS, inputs)), "has_initial_state": has}
        wanted = {name: bool(need) for name, need in zip(_TENSORS, ctx.needs_input_grad[2:])}
        with torch.no_grad():
            # All ranks take part, whether or not a gradient reaches this rank's results.
            found = gradients(ctx.saved, x, torch.zeros_like(x["v"]) if d_o is None else d_o, d_final, wanted)
            made = [found[name].to(t.dtype) if wanted[name] else None for name, t in zip(_TENSORS, inputs)]
        return (None, None, *_once("prefill_parallel", made, (d_o, d_final, *inputs)))


class SavedConv(NamedTuple):
    """What the backward of a convolution needs beside tensors that autograd keeps."""

    plan: ParallelPrefill
    group: Any
    ranks: int
    before: Tensor  # conv states before the fragments
    ends_sequence: List[bool]  # of the fragments
    heads: Tuple[int, int, int, int]
    activation: str
    x_layout: str
    state_layout: str
    qk_l2norm: bool


def _after(saved: SavedConv, rows: Sequence[Tensor], d_states: Tensor) -> Tuple[List[List[Tensor]], Tensor]:
    """What follows the fragments in their sequences: for each fragment up to width - 1 rows of each of `rows`, and the gradient
    of the states after these rows where their sequence ends with them. Every rank puts the first rows of its fragments into
    the places that `tails` has for the rows before them, zeros elsewhere; a sum of bytes over ranks leaves each as it is."""
    plan, channels = saved.plan, d_states.shape[1:].numel()
    width = (d_states.shape[2] if saved.state_layout == "channel_major" else d_states.shape[1]) + 1
    columns = [x[:1].numel() if x.shape[0] else x.shape[1:].numel() for x in rows]
    item = rows[0].element_size()
    # Number of rows, rows of each tensor, gradient of states.
    sizes = [8, *((width - 1) * n * item for n in columns), channels * item]
    sent = torch.zeros((saved.ranks * plan.tail_slots, -(-sum(sizes) // 8) * 8), dtype=torch.uint8, device=rows[0].device)
    begin = 0
    for n, ((_, before), (_, _, tokens)) in enumerate(zip(plan.tails, plan.fragments)):
        if before >= 0:
            count = min(tokens, width - 1)
            sent[before, 0] = count
            at = 8
            for x, size in zip(rows, sizes[1:]):
                own = x[begin:begin + count].contiguous().view(-1).view(torch.uint8)
                sent[before, at:at + own.numel()] = own
                at += size
            if saved.ends_sequence[n] and tokens < width - 1:
                sent[before, at:at + sizes[-1]] = d_states[n].contiguous().view(-1).view(torch.uint8)
        begin += tokens
    if saved.ranks > 1 and sent.numel():
        import torch.distributed as dist
        dist.all_reduce(sent, group=saved.group)
    following: List[List[Tensor]] = []
    d_after = torch.zeros_like(d_states)
    first = (dist_rank(saved) if saved.ranks > 1 else 0) * plan.tail_slots
    for n, (slot, _) in enumerate(plan.tails):
        if slot < 0:
            following.append([x[:0] for x in rows])
            continue
        own, at = sent[first + slot], 8
        count, found = int(own[0]), []
        for x, size, of_row in zip(rows, sizes[1:], columns):
            part = own[at:at + count * of_row * item].contiguous().view(x.dtype)
            found.append(part.view(count, *x.shape[1:]))
            at += size
        d_after[n] = own[at:at + sizes[-1]].contiguous().view(d_states.dtype).view(d_states.shape[1:])
        following.append(found)
    return following, d_after


def dist_rank(saved: SavedConv) -> int:
    """This rank within the group."""
    import torch.distributed as dist
    return int(dist.get_rank(saved.group))


def conv_gradients(saved: SavedConv, x: Tensor, weight: Tensor, bias: Optional[Tensor], upstream: Sequence[Tensor],
                   d_states: Tensor, wanted: List[bool]) -> List[Tensor]:
    """Gradients of x, weight, bias and initial states. All ranks call it together."""
    plan = saved.plan
    of_end = torch.zeros_like(d_states)
    for n, ends in enumerate(saved.ends_sequence):
        if ends:
            of_end[n] = d_states[n]
    following, d_after = _after(saved, (x, *upstream), of_end) if plan.tail_slots else ([], of_end)
    found = ops.conv_gradients(x, weight, saved.before, None, wanted, ops.empty)
    if not plan.fragments:
        return [t.zero_() for t in found]
    options = (saved.activation, saved.x_layout, saved.state_layout, saved.qk_l2norm)

    def launched(rows: Sequence[Tensor], tokens: Sequence[int], d_final: Tensor, wants: List[bool]) -> List[Tensor]:
        offsets = torch.tensor([0, *tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        made: List[Tensor] = ops.conv_backward(*rows[1:], d_final, rows[0], weight, bias, saved.before, None, *saved.heads,
                                               offsets, *options, wants)
        return made

    tokens = [n for _, _, n in plan.fragments]
    if wanted[0] or wanted[3]:
        own = [t.split(tokens) for t in (x[:sum(tokens)], *(t[:sum(tokens)] for t in upstream))]
        if following:
            joined = [torch.cat([t for n, part in enumerate(parts) for t in (part, following[n][i])])
                      for i, parts in enumerate(own)]
            lengths = [n + following[i][0].shape[0] for i, n in enumerate(tokens)]
        else:
            joined, lengths = [torch.cat(parts) for parts in own], tokens
        d_final = torch.where(torch.tensor(saved.ends_sequence, device=x.device).view(-1, 1, 1), of_end, d_after)
        made = launched(joined, lengths, d_final, [wanted[0], False, False, wanted[3]])
        if wanted[0]:
            at = 0
            found[0].zero_()
            for to, n, length in zip(found[0][:sum(tokens)].split(tokens), tokens, lengths):
                to.copy_(made[0][at:at + n])
                at += length
        if wanted[3]:
            found[3].zero_()
            for n, (_, begin, _) in enumerate(plan.fragments):
                if not begin:
                    found[3][n] = made[3][n]
    if wanted[1] or wanted[2]:
        # Sums over this rank's rows alone.
        made = launched([t[:sum(tokens)] for t in (x, *upstream)], tokens, of_end, [False, wanted[1], wanted[2], False])
        found[1:3] = made[1:3]
    return found


class ConvFunction(torch.autograd.Function):  # type: ignore[misc]
    """A convolution over ranks with its backward. `launch` returns q, k, v, the states after the fragments, and SavedConv."""

    @staticmethod
    def forward(ctx: Any, launch: Callable[[], Tuple[Any, ...]], *inputs: Optional[Tensor]) -> Tuple[Tensor, ...]:
        *results, ctx.saved = launch()
        ctx.set_materialize_grads(False)
        ctx.shapes = [t.shape for t in results]
        ctx.save_for_backward(*inputs)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Optional[Tensor]) -> Any:
        x, weight, bias, initial = inputs = ctx.saved_tensors
        wanted = [bool(need) for need in ctx.needs_input_grad[1:]]
        with torch.no_grad():
            d = [torch.zeros(shape, dtype=x.dtype, device=x.device) if t is None else t for t, shape in zip(upstream, ctx.shapes)]
            found = conv_gradients(ctx.saved, x, weight, bias, d[:3], d[3], wanted)
            made = [t.to(of.dtype) if want else None for t, of, want in zip(found, inputs, wanted)]
        return (None, *_once("conv_parallel", made, (*upstream, *inputs)))
