"""SGLang plugin: the linear-attention backend `deltawave` for Gated DeltaNet (Qwen3-Next, Qwen3.5).

SGLang finds it by the entry point `sglang.srt.plugins` once the package is installed:

    python -m sglang.launch_server ... --linear-attn-backend deltawave

`--linear-attn-decode-backend`, `--linear-attn-prefill-backend` and `--linear-attn-verify-backend` take it too. Trees of
drafts stay with SGLang's Triton kernel, as for every backend. States are updated in place, in f32, bf16 or fp16;
snapshots for prefix caches are written by the prefill itself. Padded rows have slot 0, which SGLang reserves: they are
computed like others. ReplaySSM raises `Unsupported`. Tested with SGLang 0.5.23.

Memory: decode, extend and verify allocate o only; extend with `output=` allocates nothing. The slots of snapshots `[T / 64 +
N]` are made once a step, those of drafts `[B, T]` once for each batch size. Workspaces are kept.
"""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from . import drafts, ops
from .errors import ArgumentError, Unsupported

SGLANG_VERSIONS = ("0.5.23",)
NAME = "deltawave"
CHUNK = 64  # tokens between states that prefill can write
_registered: List[bool] = []


def decode(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
           cache_indices: Tensor) -> Tensor:
    """One token of every sequence. Returns o `[1, B, HV, V]`, and updates `ssm_states` in place.

    q, k `[1, B, HK, K]`, v `[1, B, HV, V]`, a, b `[B, HV]`, ssm_states `[slots, HV, V, K]`, cache_indices `[B]` i32.
    """
    o = ops.decode(q.squeeze(0), k.squeeze(0), v.squeeze(0), ssm_states, cache_indices, a=_gates(a), b=_gates(b), a_log=A_log,
                   dt_bias=dt_bias, qk_l2norm=True, pool_layout="value_major")
    return o.unsqueeze(0)


def _gates(x: Tensor) -> Tensor:
    """Raw gates `[1, T, HV]` or `[T, HV]` as `[T, HV]`."""
    return x.squeeze(0) if x.dim() == 3 else x


def extend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ssm_states: Tensor, cache_indices: Tensor,
           query_start_loc: Tensor, output: Optional[Tensor] = None, track_state: Optional[Tensor] = None,
           snapshot_slots: Optional[Tensor] = None) -> Tensor:
    """Prefill of packed sequences. Returns o `[1, T, HV, V]`, which is `output` if that is given, and updates `ssm_states`.

    q, k `[1, T, HK, K]`, v `[1, T, HV, V]`, g, beta `[1, T, HV]`, query_start_loc `[N + 1]`. `track_state` `[N, HV, V, K]`
    receives the states before the chunks that `snapshot_slots` (`tracked_slots`) chooses, and else the initial states:
    those are the states before chunk 0, which no chunk leaves behind.
    """
    if track_state is not None:
        initial = ssm_states.index_select(0, cache_indices) if ssm_states.dtype != track_state.dtype else None
        if initial is None:
            torch.index_select(ssm_states, 0, cache_indices, out=track_state)
        else:
            track_state.copy_(initial)
    out = None if output is None else output.view(v.shape)
    return ops.prefill_pool(q, k, v, ssm_states, cache_indices, g=g, beta=beta, cu_seqlens=query_start_loc, qk_l2norm=True,
                            pool_layout="value_major", snapshot_slots=snapshot_slots, snapshots=track_state,
                            snapshot_layout="value_major", out=out)


def tracked_slots(track_chunk_idx: Tensor, query_start_loc: Tensor, tokens: int) -> Tensor:
    """Snapshot slots of a prefill of `tokens` rows: sequence n's state before chunk `track_chunk_idx[n]` goes to row n of
    `track_state`. A chunk index below 1 asks for none: no chunk is before it. Computed on the device."""
    count = query_start_loc.shape[0] - 1
    entries = tokens // CHUNK + count
    starts = torch.div(query_start_loc[:-1], CHUNK, rounding_mode="floor").to(torch.int64)
    rows = torch.arange(count, dtype=torch.int64, device=query_start_loc.device)
    chunk = track_chunk_idx.to(torch.int64)
    # One entry more, for the sequences without a snapshot.
    place = torch.where(chunk > 0, starts + rows + chunk - 1, entries)
    slots = torch.full((entries + 1,), -1, dtype=torch.int32, device=query_start_loc.device)
    return slots.scatter_(0, place, rows.to(torch.int32))[:entries]


def verify_slots(indices: Tensor, batch: int, steps: int, rows: int, room: int) -> Tensor:
    """Slots `[batch, steps]` i32 of a buffer `[rows, room, ...]` seen as `[rows room, ...]`: drafts of sequence n go to row
    `indices[n]`, one after the other. A row that is not there has no slot. Computed on the device."""
    row = indices[:batch].to(torch.int64)
    row = torch.where((row >= 0) & (row < rows), row * room, -room)
    steps_of = torch.arange(steps, dtype=torch.int64, device=indices.device)
    return (row.unsqueeze(1) + steps_of).to(torch.int32)


def target_verify(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
                  cache_indices: Tensor, buffer: Tensor, slots: Tensor, query_start_loc: Optional[Tensor] = None) -> Tensor:
    """Verifies chains of drafts. Returns o `[1, rows, HV, V]`; writes the states after all tokens to `buffer`, and leaves
    `ssm_states` as they are.

    q, k `[1, rows, HK, K]`, v `[1, rows, HV, V]`, a, b `[rows, HV]`, buffer `[rows, steps, HV, V, K]`, f32, bf16 or fp16,
    slots of `verify_slots` `[B, T]`. Sequence n has `query_start_loc[n]` to `query_start_loc[n + 1]`, at most T tokens; without
    query_start_loc all have T.
    """
    batch, tokens = slots.shape
    q, k, v, a, b = q.squeeze(0), k.squeeze(0), v.squeeze(0), _gates(a), _gates(b)
    if query_start_loc is None:
        if q.shape[0] != batch * tokens:
            raise ArgumentError(f"q: {q.shape[0]} tokens; without query_start_loc they must be {batch} times {tokens}")
        q, k, v, a, b = (x.view(batch, tokens, *x.shape[1:]) for x in (q, k, v, a, b))
    if buffer.stride(0) != buffer.shape[1] * buffer.stride(1):
        allowed = "a row must follow the last step of the row before it"
        raise ArgumentError(f"intermediate_states_buffer: strides {list(buffer.stride())}; {allowed}")
    o = drafts.verify_drafts(q, k, v, ssm_states, buffer.flatten(0, 1), slots, cache_indices[:batch],
                             None if query_start_loc is None else query_start_loc[:batch + 1], a=a, b=b, a_log=A_log,
                             dt_bias=dt_bias, qk_l2norm=True, pool_layout="value_major")
    return (o.flatten(0, 1) if query_start_loc is None else o).unsqueeze(0)


def kernel_class(base: type) -> type:
    """A subclass of SGLang's `LinearAttnKernelBase`."""

    class DeltawaveGDNKernel(base):  # type: ignore[misc]
        supports_packed_decode = True
        supports_track_state_snapshot = True
        supports_strided_target_verify_qkv = True

        def __init__(self) -> None:
            super().__init__()
            self.tracked: Optional[Tuple[Any, ...]] = None
            self.verified: Dict[Tuple[int, ...], Tuple[Any, ...]] = {}
            self.pinned: List[Tensor] = []

        def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
                          ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int,
                          **kwargs: Any) -> Tensor:
            if kwargs.get("replayssm_write_pos") is not None:
                raise Unsupported("replayssm_write_pos: ReplaySSM is not supported; start without "
                                  "--enable-linear-replayssm")
            key_dim = ssm_states.shape[-1]
            keys = mixed_qkv.shape[1] - num_v_heads * head_v_dim
            q, k, v = mixed_qkv[:, :keys // 2], mixed_qkv[:, keys // 2:keys], mixed_qkv[:, keys:]
            q, k, v = (x.view(1, x.shape[0], -1, dim) for x, dim in ((q, key_dim), (k, key_dim), (v, head_v_dim)))
            return decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices)

        def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
                   ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **kwargs: Any) -> Tensor:
            return decode(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices)

        def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
                   cache_indices: Tensor, query_start_loc: Tensor, inplace_update: bool = True,
                   **kwargs: Any) -> Tuple[Tensor, None, None]:
            if not inplace_update:
                raise Unsupported("inplace_update: False; multi-item scoring needs --linear-attn-prefill-backend triton")
            track_state, chunks = kwargs.get("track_state"), kwargs.get("track_chunk_idx")
            slots = None
            if track_state is not None:
                if chunks is None:
                    raise ArgumentError("track_chunk_idx: None; it must come with track_state")
                slots = self._tracked_slots(chunks, query_start_loc, q.shape[1])
            o = extend(q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, kwargs.get("output"), track_state, slots)
            return o, None, None

        def _tracked_slots(self, chunks: Tensor, query_start_loc: Tensor, tokens: int) -> Tensor:
            """`tracked_slots`, kept for the other layers of the step: as long as nothing writes its tensors."""
            key = (chunks, chunks._version, query_start_loc, query_start_loc._version, tokens)
            kept = self.tracked
            same = kept is not None and all(x is y or not isinstance(x, Tensor) and x == y for x, y in zip(kept[0], key))
            if kept is None or not same or query_start_loc.is_cuda and torch.cuda.is_current_stream_capturing():
                kept = self.tracked = (key, tracked_slots(chunks, query_start_loc, tokens))
            return kept[1]

        def target_verify(self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
                          ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
                          intermediate_states_buffer: Tensor, intermediate_state_indices: Tensor, cache_steps: int,
                          retrieve_parent_token: Optional[Tensor] = None, **kwargs: Any) -> Tensor:
            if retrieve_parent_token is not None:
                raise Unsupported("retrieve_parent_token: trees of drafts are not supported; it must be None")
            batch = q.shape[1] // cache_steps if query_start_loc is None else query_start_loc.shape[0] - 1
            slots = self._verify_slots(intermediate_state_indices, batch, cache_steps, intermediate_states_buffer)
            return target_verify(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, intermediate_states_buffer, slots,
                                 query_start_loc)

        def _verify_slots(self, indices: Tensor, batch: int, steps: int, buffer: Tensor) -> Tensor:
            """`verify_slots`, kept for all layers and steps with these indices, as long as nothing writes them: SGLang has
            one tensor of indices, or makes one for each layer with stable rows."""
            given = (batch, steps, *buffer.shape[:2])
            capturing = indices.is_cuda and torch.cuda.is_current_stream_capturing()
            kept = self.verified.get(given)
            if kept is None or kept[0] is not indices or kept[1] != indices._version:
                kept = (indices, indices._version, verify_slots(indices, *given))
                if capturing:
                    return kept[2]
                self.verified[given] = kept
            elif capturing:
                # A graph reads it as long as it may be replayed.
                self.pinned.append(kept[2])
            return kept[2]

    return DeltawaveGDNKernel


def _chosen(mamba: Any) -> Tuple[bool, bool, bool]:
    """Whether SGLang's options name deltawave for decode, prefill and verify."""
    base = mamba.linear_attn_backend
    names = (mamba.linear_attn_decode_backend or base, mamba.linear_attn_prefill_backend or base,
             mamba.linear_attn_verify_backend)
    return names[0] == NAME, names[1] == NAME, names[2] == NAME


def make_dispatcher(original: Any, dispatcher: Any, decode_backend: Any, prefill_backend: Any,
                    verify_backend: Any = None) -> None:
    """Around `GDNKernelDispatcher.__init__`: constructs it with Triton's kernels where deltawave was chosen, then puts
    deltawave's in their place. SGLang has no other way yet to add a kernel."""
    from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.runtime_context import get_exec

    chosen = _chosen(get_exec().mamba)
    triton = LinearAttnKernelBackend.TRITON
    backends = [triton if ours else given for ours, given in zip(chosen, (decode_backend, prefill_backend, verify_backend))]
    original(dispatcher, *backends)
    if not any(chosen):
        return
    kernel = kernel_class(LinearAttnKernelBase)()
    if chosen[0]:
        dispatcher.decode_kernel, dispatcher.supports_packed_decode = kernel, kernel.supports_packed_decode
    if chosen[1]:
        dispatcher.extend_kernel = kernel
    if chosen[2]:
        dispatcher.verify_kernel, dispatcher.verify_kernel_is_flashinfer = kernel, False


def register() -> None:
    """The plugin's entry point: adds the choice `deltawave`, and the hook that serves it, once per process.

    Raises `Unsupported` if SGLang lacks one of the hook points.
    """
    if _registered:
        return
    try:
        from sglang.srt.arg_groups.choices import (LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
                                                   add_linear_attn_kernel_backend_choices)
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as problem:
        tested = " and ".join(SGLANG_VERSIONS)
        raise Unsupported(f"sglang: {problem}; the plugin is for release {tested}") from None
    if NAME not in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        add_linear_attn_kernel_backend_choices([NAME])
    HookRegistry.register("sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher.__init__", make_dispatcher,
                          HookType.AROUND)
    _registered.append(True)
