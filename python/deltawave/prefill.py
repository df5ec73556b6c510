"""Prefill: Gated DeltaNet over sequences of tokens. include/deltawave.h specifies it."""

from ctypes import byref, c_int64, c_size_t
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Tuple, Union

from . import _abi, arrays, structs
from .context import Context
from .errors import ArgumentError
from .library import Library
from .plan import Launch, PlanWithWorkspace, memory_of
from .values import shown, whole, wholes


@dataclass(frozen=True)
class PrefillSpec:
    """Heads, dimensions and options of a prefill, for any batch."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # a multiple of 16 up to 256
    value_dim: int  # a multiple of 16 up to 256
    dtype: str = "bf16"  # of q, k, v and o: "bf16", "fp16", or a torch or NumPy dtype
    head_map: str = "grouped"  # value head h reads key head h // (HV / HK); "tiled": h % HK
    qk_l2norm: bool = False  # the kernels l2-normalise the rows of q and k
    scale: Optional[float] = None  # None or 0: K ** -0.5
    segments: Optional[int] = None  # number of segments of each sequence; None: least estimated time
    compute_units: Optional[int] = None  # compute units that launches can use; None: all of the device
    path: str = "auto"  # kernels: "fused", "split", "short", or the faster ones as estimated
    # context that launches may save for the backward: "nothing"; "boundaries", the states between rounds of the backward, whose
    # workspace is then bounded; or the most tokens of a round, a multiple of 64
    save: Union[str, int] = "nothing"

    def struct(self) -> _abi.dw_prefill_spec:
        """The C struct."""
        choices = {"head_map": structs.HEAD_MAPS, "path": structs.PATHS}
        return structs.spec(_abi.dw_prefill_spec, choices, **vars(self))


class _PlanWithContext(PlanWithWorkspace):
    """A plan whose launches take `context`: memory, of which `context_bytes` bytes are used."""

    context_bytes: int

    def bind(self, workspace: Any = None, context: Any = None, **tensors: Any) -> Launch:
        if "context_bytes" in tensors:
            raise ArgumentError("context_bytes: no argument of a launch; it follows from the context")
        given: Mapping[str, Any] = {}
        if context is not None:
            address, size = memory_of(self.context, context, self.context_bytes, "context")
            given = {"context": address, "context_bytes": size} if address else {}
        launch = super().bind(workspace=workspace, **tensors, **given)
        launch.kept += (context,)
        return launch


class Prefill(_PlanWithContext):
    """A prefill of one batch shape. `packed`, `dense` and `device` make one.

    Launches take, as arrays of the context or tensors of its device. Shapes are of packed batches; dense batches have a
    leading batch dimension:

    - q, k `[T, HK, K]`, v `[T, HV, V]`, and o `[T, HV, V]`, an output; rows past the last sequence become 0
    - g `[T, HV]` f32, natural logarithms of the decay; absent: no decay. beta `[T, HV]` of any type; absent: 1
    - or raw gates a, b `[T, HV]` with a_log, dt_bias `[HV]`, of any type; `allow_neg_eigval=True` doubles beta. Repeated
      keys without decay are ill-conditioned for beta from 1.5 to 2: bf16 then has errors of 20% to 80% and more, here and
      in unfused kernels (docs/results/accuracy.md)
    - initial_state and final_state `[N, HV, K, V]`, f32, bf16 or fp16; `[N, HV, V, K]` with `initial_layout` and
      `final_layout="value_major"`. For a sequence without tokens final_state is the initial state, or zeros
    - or a pool `[slots, HV, K, V]`, updated in place, with `pool_layout` as above. slots `[N]` i32 are read and written;
      write_slots `[N]` i32 are written instead. `set_slots` sets both on the host. A slot that is negative or beyond the
      pool is no slot; a sequence without slots is padding. A sequence without tokens writes nothing to the pool, whatever
      has_initial_state holds
    - has_initial_state `[N]`, bytes or booleans; 0: the sequence starts from zeros
    - snapshots `[slots, HV, K, V]`, with `snapshot_layout`: states after chunks of 64 tokens, in the slots of
      snapshot_slots `[chunk_entries]` i32 or of `set_snapshots`; without the tensor, in the pool
    - cu_seqlens `[N + 1]`, i32 or i64, with plans of `device`
    - context: `context_bytes` of memory aligned to 256 bytes, a tensor or an address, in which the launch saves what the
      spec's `save` says; absent: nothing is saved
    - workspace: `workspace_bytes` of memory aligned to 256 bytes, a tensor or an address. Launches on one stream may share
      it, also from several threads. Launches on different streams may share it only in an order that the caller makes.
      Without a workspace the plan allocates one for each stream. Before a capture by other means than torch's, launch on
      the stream once, or give a workspace
    """

    NAME, TENSORS = "prefill", _abi.dw_prefill_tensors
    CHOICES = {name: structs.STATE_LAYOUTS
               for name in ("initial_layout", "final_layout", "pool_layout", "snapshot_layout")}

    def __init__(self, context: Context, sequences: int, constructor: str, *arguments: Any) -> None:
        super().__init__(context, sequences, constructor, *arguments)
        entries = c_int64()
        context.library.call("dw_prefill_chunk_entries", self.handle, byref(entries))
        self.chunk_entries = entries.value
        size = c_size_t()
        context.library.call("dw_prefill_context_bytes", self.handle, byref(size))
        self.context_bytes = size.value

    @classmethod
    def packed(cls, context: Context, spec: PrefillSpec, cu_seqlens: Any, tokens: int) -> "Prefill":
        """A plan for packed sequences whose lengths the host knows: n has rows `cu_seqlens[n]` to `cu_seqlens[n + 1]`."""
        lengths = arrays.host_lengths(cu_seqlens)
        tokens, spec = whole("tokens", tokens, 64), structs.made(spec, PrefillSpec)
        return cls(context, lengths.entries - 1, "packed", spec, byref(lengths), tokens)

    @classmethod
    def dense(cls, context: Context, spec: PrefillSpec, batch: int, tokens: int) -> "Prefill":
        """A plan for `batch` sequences of `tokens` rows each."""
        batch, tokens = whole("batch", batch, 64), whole("tokens", tokens, 64)
        return cls(context, batch, "dense", structs.made(spec, PrefillSpec), batch, tokens)

    @classmethod
    def device(cls, context: Context, spec: PrefillSpec, tokens: int, sequences: int) -> "Prefill":
        """A plan for packed sequences whose lengths are on the device alone. Entries of cu_seqlens that decrease or exceed
        `tokens` are replaced by the nearest allowed ones. Sequences are cut into segments there as on the host for as many
        rows. After a launch the first 4 bytes of the workspace are 0, or 1 + the index of the first wrong entry."""
        tokens, sequences = whole("tokens", tokens, 64), whole("sequences", sequences, 64)
        return cls(context, sequences, "device", structs.made(spec, PrefillSpec), tokens, sequences)

    def set_slots(self, slots: Any, write_slots: Any = None) -> None:
        """Sets slots on the host, for all later launches without slots. Refused: two sequences that write one slot, and a
        sequence that reads a slot which another one writes. Launches refuse a pool that lacks one of the slots. Nothing
        else may use the plan during the call, and no captured graph may need the plan."""
        read = wholes("slots", slots, 32)
        write = None if write_slots is None else wholes("write_slots", write_slots, 32)
        if write is not None and len(write) != len(read):
            raise ArgumentError(f"write_slots: {len(write)} slots; there must be as many as slots, {len(read)}")
        self.context.library.call("dw_prefill_set_slots", self.handle, read, write, len(read))

    def set_snapshots(self, snapshots: Iterable[Tuple[int, int, int]]) -> None:
        """Sets snapshots for all later launches without snapshot_slots: a list of `(sequence, tokens, slot)`. `tokens` is the
        number of tokens before the state, a multiple of 64. The conditions of `set_slots` on the plan hold."""
        try:
            snapshots = list(snapshots)
        except Exception:  # raised by the caller's object
            raise ArgumentError(f"snapshots: {shown(snapshots)}; it must be a list of (sequence, tokens, slot)") from None
        each = [tuple(wholes("snapshots", one, 64)) for one in snapshots]
        if any(len(one) != 3 for one in each):
            raise ArgumentError(f"snapshots: {shown(snapshots)}; each must be (sequence, tokens, slot)")
        found = (_abi.dw_snapshot * len(each))(*(_abi.dw_snapshot(*one) for one in each))
        self.context.library.call("dw_prefill_set_snapshots", self.handle, found, len(found))

    def entries(self, name: str) -> int:
        return self.chunk_entries if name == "snapshot_slots" else super().entries(name)


class PrefillBackward(_PlanWithContext):
    """The backward of a `Prefill`, for the same batches. Launches take its inputs and

    - d_o `[T, HV, V]`, of any strides that inputs may have, and d_final_state, as final_state; absent: zeros
    - the gradients to compute, outputs; those that are absent are not computed: d_q, d_k `[T, HK, K]` and d_v
      `[T, HV, V]` of the type of q; d_g and d_beta `[T, HV]` of any type, with raw gates the gradients of a and b;
      d_a_log and d_dt_bias `[HV]` f32, with raw gates; d_initial_state, as initial_state, f32, bf16 or fp16, with
      `d_initial_layout`. Rows past the last sequence become 0
    - context, that a launch of the prefill saved from the same inputs, if `context_bytes` is not 0
    """

    NAME, TENSORS = "prefill_backward", _abi.dw_prefill_backward_tensors
    CHOICES = {name: structs.STATE_LAYOUTS for name in ("initial_layout", "d_final_layout", "d_initial_layout")}

    def __init__(self, prefill: Prefill) -> None:
        if not isinstance(prefill, Prefill):
            raise ArgumentError(f"prefill: {shown(prefill)}; it must be a Prefill")
        super().__init__(prefill.context, prefill.sequences, "create", prefill.handle)
        self.context_bytes = prefill.context_bytes

    def origin(self) -> Tuple[Any, ...]:
        return ()


def round_tokens(library: Library, spec: PrefillSpec) -> int:
    """Most tokens of a round of the backward, a multiple of 64; 0: there are no rounds."""
    tokens = c_int64()
    library.call("dw_prefill_round_tokens", structs.made(spec, PrefillSpec), byref(tokens))
    return tokens.value
