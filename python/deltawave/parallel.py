"""Prefill of sequences that several ranks share. include/deltawave.h specifies it."""

from ctypes import addressof, byref, c_char, c_int32, c_int64
from typing import Any, Iterable, Optional, Sequence, Tuple, Union

from . import _abi, structs
from .context import Context, stream_address, stream_of
from .errors import ArgumentError
from .plan import Launch, Plan
from .prefill import Prefill, PrefillBackward, PrefillSpec
from .values import shown, whole, wholes

KINDS = {"contiguous": _abi.DW_RANKS_CONTIGUOUS, "zigzag": _abi.DW_RANKS_ZIGZAG, "packed": _abi.DW_RANKS_PACKED}
KINDS_ALLOWED = "contiguous, zigzag, packed, or the fragments of each rank"


class RankLayout:
    """Which rank has which tokens; equal on all ranks.

    lengths: tokens of each sequence. ranks: their number. kind: "contiguous" (the packed sequences in runs of equal length),
    "zigzag" (rank r has pieces r and 2 R - 1 - r of each sequence), "packed" (whole sequences, the longest first, each on the
    rank with the fewest blocks so far), or a list with the fragments of each rank, `(sequence, begin, tokens)`. block: tokens of a block, a multiple of 64; fragments begin and end at blocks, or with their sequence.
    None: chosen by the lengths and the value heads. Results depend on the block, and neither on the ranks nor on the kind."""

    def __init__(self, lengths: Sequence[int], ranks: int, kind: Any = "contiguous", block: Optional[int] = None) -> None:
        self.lengths, self.ranks = tuple(wholes("lengths", lengths, 64)), whole("ranks", ranks, 32)
        self.block = 0 if block is None else whole("block", block, 64)
        if block is not None and not self.block:
            raise ArgumentError("block: 0; it must be a positive multiple of 64")
        if isinstance(kind, str):
            if kind not in KINDS:
                raise ArgumentError(f"kind: {shown(kind)}; it must be {KINDS_ALLOWED}")
            self.kind: Union[str, Tuple[Any, ...]] = kind
        else:
            try:
                self.kind = tuple(tuple(tuple(wholes("fragments", f, 64)) for f in rank) for rank in kind)
            except TypeError:
                raise ArgumentError(f"kind: {shown(kind)}; it must be {KINDS_ALLOWED}") \
                    from None
            if any(len(f) != 3 for rank in self.kind for f in rank):
                raise ArgumentError("fragments: each must be (sequence, begin, tokens)")
            if len(self.kind) != self.ranks:
                raise ArgumentError(f"fragments: of {len(self.kind)} ranks; there are {self.ranks}")

    def key(self) -> Tuple[Any, ...]:
        """What makes two layouts equal."""
        return self.lengths, self.ranks, self.kind, self.block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankLayout) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def struct(self) -> Any:
        """The C struct, which keeps its arrays."""
        made: Any = _abi.dw_rank_layout(sequences=len(self.lengths), block=self.block, ranks=self.ranks)
        made.kept = [(c_int64 * max(len(self.lengths), 1))(*self.lengths)]
        made.lengths = addressof(made.kept[0])
        if isinstance(self.kind, str):
            made.kind = KINDS[self.kind]
        else:
            made.kind = _abi.DW_RANKS_FRAGMENTS
            every = [f for rank in self.kind for f in rank]
            made.kept += [(_abi.dw_fragment * max(len(every), 1))(*every),
                          (c_int64 * max(self.ranks, 1))(*map(len, self.kind))]
            made.fragments, made.fragment_counts = made.kept[1], addressof(made.kept[2])
        return made


class _Stages(Plan):
    """A plan of two stages with an all-gather between them."""

    summary_bytes: int
    gathered_bytes: int
    workspace_bytes: int

    def _memory(self, name: str, x: Any, least: int) -> Tuple[int, int]:
        """Address and bytes of memory."""
        if x is None:
            x = 0
        if isinstance(x, int):
            return x, least
        found = self.context.describe(name, x)
        if not found.is_dense():
            raise ArgumentError(f"{name}: strides {list(found.strides)}; it must be dense")
        return found.address, found.extent()

    def _launch(self, stage: str, stream: Any, workspace: Any, tensors: Any, *memory: Any) -> None:
        address, size = self._memory("workspace", workspace, self.workspace_bytes)
        arguments = structs.tensors(self.TENSORS, self.CHOICES, self.context, self.entries,
                                    {**tensors, "workspace": address, "workspace_bytes": size})
        stream = stream_address(stream_of(stream, tensors.values()))
        self.context.library.call(f"dw_{self.NAME}_{stage}_launch", self.handle, stream, byref(arguments), *memory)

    def summarise(self, summary: Any, workspace: Any, stream: Any = None, **tensors: Any) -> None:
        """Enqueues the first stage, which writes `summary`."""
        memory = self._memory("summary", summary, self.summary_bytes)
        self._launch("summarise", stream, workspace, tensors, *memory)

    def bind(self, **tensors: Any) -> Launch:
        raise ArgumentError("a parallel prefill and its backward have two stages: call summarise and finish")


class ParallelPrefill(_Stages):
    """One rank's part of a prefill, in two stages:

        plan.summarise(summary, workspace=workspace, **tensors)
        # all-gather of summary_bytes of each rank, on the same stream, unless summary_bytes is 0
        plan.finish(gathered, workspace=workspace, **tensors)

    Tensors are those of `Prefill` for a packed batch, whose sequences are `fragments`, `(sequence, begin, tokens)`. A
    fragment with the first token of a sequence reads its initial state, one with the last token writes its final state.
    Slots of a pool must be the same for all fragments of a sequence. summary, gathered and workspace are dense tensors of
    bytes, or addresses, aligned to 256; both stages need the same workspace, unchanged between them.

    tails: for a convolution, `(sent, before)` of each fragment. A fragment that another follows sends its last width - 1 rows
    as tail `sent` of the rank's `tail_slots` tails; the rows before a fragment are tail `before` of those of all ranks, rank
    by rank. -1: none. block: tokens of a block."""

    NAME, TENSORS, CHOICES = "parallel_prefill", Prefill.TENSORS, Prefill.CHOICES

    def __init__(self, context: Context, spec: PrefillSpec, layout: RankLayout, rank: int, tokens: int) -> None:
        rank, tokens = whole("rank", rank, 32), whole("tokens", tokens, 64)
        if not isinstance(layout, RankLayout):
            raise ArgumentError(f"layout: {shown(layout)}; it must be a RankLayout")
        super().__init__(context, 0, "create", structs.made(spec, PrefillSpec), byref(layout.struct()), rank, tokens)
        sizes = _abi.dw_parallel_prefill_sizes()
        context.library.call("dw_parallel_prefill_get_sizes", self.handle, byref(sizes))
        self.summary_bytes, self.gathered_bytes = sizes.summary_bytes, sizes.gathered_bytes
        self.workspace_bytes, self.chunk_entries = sizes.workspace_bytes, sizes.chunk_entries
        self.sequences, self.block = sizes.fragments, sizes.block
        fragments = (_abi.dw_fragment * max(self.sequences, 1))()
        order = (c_int32 * max(sizes.order_entries, 1))()
        context.library.call("dw_parallel_prefill_tables", self.handle, fragments, self.sequences, order,
                             sizes.order_entries)
        self.fragments = [(f.sequence, f.begin, f.tokens) for f in fragments[:self.sequences]]
        self.order = list(order[:sizes.order_entries])
        slots, (sent, before) = c_int64(), ((c_int32 * max(self.sequences, 1))() for _ in range(2))
        context.library.call("dw_parallel_prefill_tails", self.handle, byref(slots), sent, before, self.sequences)
        self.tail_slots, self.tails = slots.value, list(zip(sent, before))[:self.sequences]

    def agreement(self) -> bytes:
        """Layout and spec as bytes, for `check_agreement` on all ranks."""
        found = (c_char * _abi.DW_AGREEMENT_BYTES)()
        self.context.library.call("dw_parallel_prefill_agreement", self.handle, found)
        return found.raw

    def check_agreement(self, agreements: Sequence[bytes]) -> None:
        """Compares the `agreement` of all ranks, in their order. RanksError names what differs. Call it once per plan, before
        the first launch: ranks with different plans wait for each other, or read each other's bytes as something else."""
        every = b"".join(agreements)
        self.context.library.call("dw_parallel_prefill_check_agreement", self.handle, every, len(every))

    def entries(self, name: str) -> int:
        return self.chunk_entries if name == "snapshot_slots" else super().entries(name)

    def set_snapshots(self, snapshots: Iterable[Tuple[int, int, int]]) -> None:
        """As `Prefill.set_snapshots`: sequences are fragments, and tokens count from a fragment's begin."""
        each = [tuple(wholes("snapshots", one, 64)) for one in snapshots]
        if any(len(one) != 3 for one in each):
            raise ArgumentError(f"snapshots: {shown(snapshots)}; each must be (sequence, tokens, slot)")
        found = (_abi.dw_snapshot * len(each))(*(_abi.dw_snapshot(*one) for one in each))
        self.context.library.call("dw_parallel_prefill_set_snapshots", self.handle, found, len(found))

    def finish(self, gathered: Any, workspace: Any, order: Any = None, stream: Any = None, **tensors: Any) -> None:
        """Enqueues the second stage. `gathered`: summaries of all ranks, rank by rank. `order`: i32 on the device, instead of
        the plan's order."""
        memory = self._memory("gathered", gathered, self.gathered_bytes)
        if order is not None:
            order = structs.dense_vector("order", self.context.describe("order", order), len(self.order), "i32")
        self._launch("finish", stream, workspace, tensors, *memory, order)


class ParallelPrefillBackward(_Stages):
    """The backward of a `ParallelPrefill`, in two stages:

        plan.summarise(summary, workspace=workspace, **tensors)
        # all-gather of summary_bytes of each rank, on the same stream, unless summary_bytes is 0
        plan.finish(gathered, workspace=workspace, **tensors)

    Sizes are its own, not those of the `ParallelPrefill`. Tensors are those of `PrefillBackward` for the rank's batch, without
    cu_seqlens and context. A fragment with the first token of a sequence reads its initial state and writes the gradient of it,
    one with the last token reads the gradient of its final state; the others do neither. Gradients have the same bits for any
    number of ranks and any kind of layout, if the block is the same; those of a_log and dt_bias are sums over the rank's
    tokens."""

    NAME, TENSORS = "parallel_prefill_backward", _abi.dw_prefill_backward_tensors
    CHOICES = PrefillBackward.CHOICES

    def __init__(self, prefill: ParallelPrefill) -> None:
        if not isinstance(prefill, ParallelPrefill):
            raise ArgumentError(f"prefill: {shown(prefill)}; it must be a ParallelPrefill")
        super().__init__(prefill.context, prefill.sequences, "create", prefill.handle)
        sizes = _abi.dw_parallel_prefill_backward_sizes()
        prefill.context.library.call("dw_parallel_prefill_backward_get_sizes", self.handle, byref(sizes))
        self.summary_bytes, self.gathered_bytes = sizes.summary_bytes, sizes.gathered_bytes
        self.workspace_bytes, self.block = sizes.workspace_bytes, sizes.block
        self.fragments = prefill.fragments

    def origin(self) -> Tuple[Any, ...]:
        return ()

    def finish(self, gathered: Any, workspace: Any, stream: Any = None, **tensors: Any) -> None:
        """Enqueues the second stage. `gathered`: summaries of all ranks, rank by rank."""
        memory = self._memory("gathered", gathered, self.gathered_bytes)
        self._launch("finish", stream, workspace, tensors, *memory)
