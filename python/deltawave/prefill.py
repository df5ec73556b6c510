"""Prefill: Gated DeltaNet over sequences of tokens, as include/deltawave.h specifies it."""

from ctypes import byref, c_int64
from dataclasses import dataclass
from typing import Optional

from . import _abi, arrays, structs
from .errors import ArgumentError
from .plan import PlanWithWorkspace
from .values import shown, whole, wholes


@dataclass(frozen=True)
class PrefillSpec:
    """What a prefill computes, whatever the batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 16 up to 256
    value_dim: int  # a multiple of 16 up to 256
    dtype: str = "bf16"  # of q, k, v and o: "bf16" or "fp16", or torch's or NumPy's dtype
    head_map: str = "grouped"  # value head h reads key head h // (HV / HK); "tiled": h % HK
    qk_l2norm: bool = False  # rows of q and k are l2-normalised inside
    scale: Optional[float] = None  # None or 0: K ** -0.5
    segments: Optional[int] = None  # into which the longest sequence is cut; None: as many as take least time
    compute_units: Optional[int] = None  # that the launches will have; None: all of the device

    def struct(self):
        """The C struct."""
        return structs.spec(_abi.dw_prefill_spec, {"head_map": structs.HEAD_MAPS}, **vars(self))


class Prefill(PlanWithWorkspace):
    """A prefill of one batch shape. `packed`, `dense` and `device` make one.

    Launches take, as arrays of the context or tensors of its device, in packed batches without the batch dimension:

    - q, k `[T, HK, K]`, v `[T, HV, V]`, and o `[T, HV, V]`, which is written; rows past the last sequence become 0
    - g, beta `[T, HV]` f32, natural logarithms and factors; absent: no decay, 1
    - or a, b `[T, HV]` with a_log, dt_bias `[HV]`, as the projections give them; `allow_neg_eigval=True` doubles beta.
      Beta of 1.5 to 2 on repeated keys without decay is ill-conditioned: bf16 then has errors of 20% to 80% and more, here
      and in unfused kernels (docs/results/accuracy.md)
    - initial_state and final_state `[N, HV, K, V]`, f32 or bf16; `[N, HV, V, K]` with `initial_layout` and
      `final_layout="value_major"`
    - or a pool `[slots, HV, K, V]` that is updated in place, with slots `[N]` i32 and write_slots, if others, or `set_slots`:
      one that is negative or beyond the pool is none, and a sequence without any is padding; `pool_layout` as above
    - has_initial_state `[N]`, bytes or booleans
    - snapshots `[slots, HV, K, V]`, with `snapshot_layout`: states after chunks of 64 tokens, in the slots of
      snapshot_slots `[chunk_entries]` i32 or of `set_snapshots`; without the tensor, in the pool
    - cu_seqlens `[N + 1]`, i32 or i64, with plans of `device`
    - workspace: `workspace_bytes` of memory aligned to 256 bytes, a tensor or an address. Launches on one stream may share
      it, from several threads, too; those on different streams only in an order that the caller makes. Without one the
      plan makes its own, one for each stream. Before a stream is captured by other means than torch's, launch on it once,
      or give one.

    In a pool, a sequence without tokens writes nothing, whatever `has_initial_state` says; its `final_state` is its
    initial state, or zeros.
    """

    NAME, TENSORS = "prefill", _abi.dw_prefill_tensors
    CHOICES = {name: structs.STATE_LAYOUTS
               for name in ("initial_layout", "final_layout", "pool_layout", "snapshot_layout")}

    def __init__(self, context, sequences, constructor, *arguments):
        super().__init__(context, sequences, constructor, *arguments)
        entries = c_int64()
        context.library.call("dw_prefill_chunk_entries", self.handle, byref(entries))
        self.chunk_entries = entries.value

    @classmethod
    def packed(cls, context, spec, cu_seqlens, tokens):
        """Of packed sequences; n has rows `cu_seqlens[n]` to `cu_seqlens[n + 1]`, numbers that the host has."""
        lengths = arrays.host_lengths(cu_seqlens)
        tokens, spec = whole("tokens", tokens, 64), structs.made(spec, PrefillSpec)
        return cls(context, lengths.entries - 1, "packed", spec, byref(lengths), tokens)

    @classmethod
    def dense(cls, context, spec, batch, tokens):
        """Of `batch` sequences of `tokens` rows each."""
        batch, tokens = whole("batch", batch, 64), whole("tokens", tokens, 64)
        return cls(context, batch, "dense", structs.made(spec, PrefillSpec), batch, tokens)

    @classmethod
    def device(cls, context, spec, tokens, sequences):
        """Of packed sequences whose lengths are on the device alone. Entries that decrease or exceed the tokens are
        replaced by the nearest allowed ones; the first 4 bytes of the workspace are 0 afterwards, or 1 + the index of the
        first of them."""
        tokens, sequences = whole("tokens", tokens, 64), whole("sequences", sequences, 64)
        return cls(context, sequences, "device", structs.made(spec, PrefillSpec), tokens, sequences)

    def set_slots(self, slots, write_slots=None):
        """Slots that the host knows, for all later launches that are given none: two sequences that write one, and one
        that reads what another writes, are refused, and so is a launch whose pool lacks one. Nothing else may use the
        plan meanwhile, and no captured graph may need it."""
        read = wholes("slots", slots, 32)
        write = None if write_slots is None else wholes("write_slots", write_slots, 32)
        if write is not None and len(write) != len(read):
            raise ArgumentError(f"write_slots: {len(write)} slots; it must be as many as slots, {len(read)}")
        self.context.library.call("dw_prefill_set_slots", self.handle, read, write, len(read))

    def set_snapshots(self, snapshots):
        """Snapshots for all later launches that are given no slots for them: `(sequence, tokens, slot)`, where tokens are
        those of the sequence before the state, a multiple of 64. Otherwise as `set_slots`."""
        try:
            snapshots = list(snapshots)
        except Exception:  # what iterating over a caller's object may raise
            raise ArgumentError(f"snapshots: {shown(snapshots)}; it must be a list of (sequence, tokens, slot)") from None
        each = [tuple(wholes("snapshots", one, 64)) for one in snapshots]
        if any(len(one) != 3 for one in each):
            raise ArgumentError(f"snapshots: {shown(snapshots)}; each must be (sequence, tokens, slot)")
        found = (_abi.dw_snapshot * len(each))(*each)
        self.context.library.call("dw_prefill_set_snapshots", self.handle, found, len(found))

    def entries(self, name):
        return self.chunk_entries if name == "snapshot_slots" else super().entries(name)
