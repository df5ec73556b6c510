"""vLLM plugin: the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 and OLMo-Hybrid on deltawave's kernels.

vLLM finds it by the entry point `vllm.general_plugins` once the package is installed. DELTAWAVE_VLLM chooses:

- `layer`, the default on GPUs: everything between the input projections and the output projection is `deltawave.ops.layer`, in
  place on vLLM's caches. Sequences with draft tokens to verify are `deltawave.drafts.layer_drafts`, or all are
  `deltawave.drafts.layer_step` if those come first.
- `prefill`: only vLLM's op `ChunkGatedDeltaRule` is replaced.
- `0`, the default on CPUs: nothing is replaced. With `layer` or `prefill` vLLM's CPU build runs on deltawave's simulator,
  which is for tests.

Layers that deltawave cannot serve (f32 models, LoRA projections, head dimensions that are no multiple of 16, more than 15
draft tokens) run vLLM's code, with a warning that says why. So do steps that export checkpoints inside of a prompt, which
vLLM asks for only with FlashInfer's prefill. Tested with vLLM 0.32.0; 0.33 has the same hook points.

Memory: the layer allocates its output, which is the input of the output projection, and once a step the slots `[N]` in
which vLLM's null block 0 is -1. Drafts in one step with prefills are copied out of the batch and back, as vLLM does,
unless they come first in it. Workspaces are kept.
"""

import logging
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from . import drafts, ops
from .errors import ArgumentError, Unsupported

VLLM_VERSIONS = ("0.32.0", "0.33.0")
MODES = ("layer", "prefill", "0")
# vLLM's null block, the slot of padding.
NULL_BLOCK = 0
# Tokens of a sequence to verify: drafts, and the one before them.
MOST_DRAFTS = 16

_log = logging.getLogger(__name__)
_registered: List[str] = []


def mode(on_cpu: bool = False) -> str:
    """What DELTAWAVE_VLLM asks for, or the default. Raises `ArgumentError` for a word that is not in `MODES`."""
    word = os.environ.get("DELTAWAVE_VLLM") or ("0" if on_cpu else "layer")
    if word not in MODES:
        raise ArgumentError(f"DELTAWAVE_VLLM: {word!r}; it must be one of {', '.join(MODES)}")
    return word


def register() -> None:
    """The plugin's entry point. Registers the classes that DELTAWAVE_VLLM asks for, once per process.

    Raises `Unsupported` if vLLM lacks a class or method that the plugin replaces.
    """
    if mode() == "0" or _registered:
        return
    try:
        from vllm.platforms import current_platform

        wanted = mode(current_platform.is_cpu())
        if wanted == "0":
            return
        from vllm.model_executor.custom_op import CustomOp, PluggableLayer
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as theirs

        bases = {name: getattr(theirs, name) for name in ("ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention")}
        for name in ("_forward_core", "_forward_core_rocm", "split_ba", "prepare_gdn_attention_core_inputs"):
            getattr(bases["QwenGatedDeltaNetAttention"], name)
        if wanted == "layer":
            from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as of_olmo

            olmo = of_olmo.OlmoHybridGatedDeltaNetAttention
            getattr(olmo, "_full_forward")
    except (ImportError, AttributeError) as problem:
        tested = " and ".join(VLLM_VERSIONS)
        raise Unsupported(f"vllm: {problem}; the plugin is for releases {tested}. DELTAWAVE_VLLM=0 switches it off") from None
    if wanted == "prefill":
        CustomOp.register_oot(name="ChunkGatedDeltaRule")(prefill_class(bases["ChunkGatedDeltaRule"]))
    else:
        PluggableLayer.register_oot(name="QwenGatedDeltaNetAttention")(
            layer_class(bases["QwenGatedDeltaNetAttention"], theirs))
        PluggableLayer.register_oot(name="OlmoHybridGatedDeltaNetAttention")(olmo_class(olmo, of_olmo))
    _registered.append(wanted)


def prefill_class(base: type) -> type:
    """A subclass of vLLM's `ChunkGatedDeltaRule` whose forward is `prefill`."""

    class DeltawaveChunkGatedDeltaRule(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._forward_method = prefill

    return DeltawaveChunkGatedDeltaRule


def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool,
            cu_seqlens: Optional[Tensor] = None, chunk_indices: Optional[Tensor] = None,
            chunk_offsets: Optional[Tensor] = None, use_qk_l2norm_in_kernel: bool = True,
            core_attn_out: Optional[Tensor] = None,
            aiter_prefill_metadata: Any = None) -> Tuple[Tensor, Optional[Tensor]]:
    """vLLM's prefill op. Returns o `[1, T, HV, V]` and the final states `[N, HV, V, K]` f32, or None.

    q, k `[1, T, HK, K]`, v `[1, T, HV, V]`, bf16 or fp16; g, beta `[1, T, HV]`; initial_state `[N, HV, V, K]`, f32, bf16 or
    fp16. o is the beginning of `core_attn_out` if that is given. Arguments without a use here: chunk_indices,
    chunk_offsets, aiter_prefill_metadata.
    """
    out = None
    if core_attn_out is not None:
        out = core_attn_out.view(-1)[: v.numel()].view(v.shape)
    o, state = ops.prefill(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
                           qk_l2norm=use_qk_l2norm_in_kernel, state_layout="value_major",
                           output_final_state=output_final_state, out=out)
    return o, state if output_final_state else None


def unsupported(layer: Any) -> Optional[str]:
    """Why a layer of vLLM's for Qwen3-Next or Qwen3.5 cannot run here, or None."""
    if hasattr(layer, "in_proj_qkv") or not hasattr(layer, "in_proj_qkvz"):
        return "projections of their own for q, k, v and z, as with LoRA"
    return _unsupported(layer, layer.norm)


def unsupported_olmo(layer: Any) -> Optional[str]:
    """Why a layer of vLLM's for OLMo-Hybrid cannot run here, or None."""
    return _unsupported(layer, layer.o_norm)


def _unsupported(layer: Any, norm: Any) -> Optional[str]:
    dtype = layer.model_config.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"model dtype {dtype}, not bfloat16 or float16"
    for name in ("head_k_dim", "head_v_dim"):
        dim = getattr(layer, name)
        if dim % 16 or not 0 < dim <= 256:
            return f"{name} {dim}, not a multiple of 16 up to 256"
    if layer.activation not in ("silu", "swish"):
        return f"activation {layer.activation!r}, not 'silu'"
    if norm.activation not in ("silu", "swish", "sigmoid"):
        return f"output gate {norm.activation!r}, neither 'silu' nor 'sigmoid'"
    if not 2 <= layer.conv_kernel_size <= 4:
        return f"a convolution of width {layer.conv_kernel_size}, not 2 to 4"
    if layer.num_spec >= MOST_DRAFTS:
        return f"{layer.num_spec} draft tokens, not at most {MOST_DRAFTS - 1}"
    conv_dtype, state_dtype = layer.get_state_dtype()[:2]
    if conv_dtype != dtype or state_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"caches of {conv_dtype} and {state_dtype}, not of {dtype} and of float32, bfloat16 or float16"
    return None


def _once_a_step(metadata: Any, name: str, count: int, make: Any) -> Any:
    """What `make` returns, kept with the step's metadata for its other layers, or with those of a captured graph."""
    capturing = ops.capturing()
    kept = getattr(metadata, name, None)
    if kept is None or kept[0] != (capturing, count):
        kept = ((capturing, count), make())
        setattr(metadata, name, kept)
    return kept[1]


def slots_of(metadata: Any, count: int) -> Tensor:
    """State slots of the first `count` sequences without drafts, i32, with -1 for vLLM's null block. Computed by the first
    layer of a step (or of a captured graph) and kept with the step's metadata."""

    def make() -> Tensor:
        given = metadata.non_spec_state_indices_tensor[:count]
        return given.masked_fill(given == NULL_BLOCK, -1).to(torch.int32)

    return _once_a_step(metadata, "_deltawave_slots", count, make)


def draft_slots_of(metadata: Any, count: int) -> Tensor:
    """State slots `[count, T]` of the drafts of sequences, i32 and dense: vLLM's table, or a copy that is kept with the
    step's metadata."""
    given = metadata.spec_state_indices_tensor[:count]
    if given.dtype == torch.int32 and given.is_contiguous():
        return given
    return _once_a_step(metadata, "_deltawave_draft_slots", count, lambda: given.to(torch.int32).contiguous())


def conv_weight(layer: Any) -> Tensor:
    """The convolution's weight `[channels, width]`. vLLM's CPU build packs it, and keeps the unpacked one."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    weight = layer.conv1d.weight if weight is None else weight
    return weight.view(weight.shape[0], -1).detach()


@dataclass(frozen=True)
class Parts:
    """Arguments of `deltawave.ops.layer` that are the same in all steps of a layer."""

    norm: Any
    x_layout: str
    conv_layout: str
    allow_neg_eigval: bool = False


def layer_step(layer: Any, metadata: Any, x: Tensor, ba: Tensor, y: Tensor, conv_layout: str) -> None:
    """Runs a step's batch through a layer of Qwen3-Next or Qwen3.5. x `[T, qkvz]` and ba `[T, 2 HV]` are outputs of vLLM's
    projections. y `[T, HV, V]`, zeros, is written, but for the rows past the last sequence."""
    if layer.gqa_interleaved_layout:
        key_heads = layer.num_k_heads // layer.tp_size
        share = layer.num_v_heads // layer.num_k_heads
        of_head = ba.view(-1, key_heads, 2 * share)
        b, a, x_layout = of_head[:, :, :share], of_head[:, :, share:], "interleaved"
    else:
        (b, a), x_layout = layer.split_ba(ba), "flat"
    run_step(layer, Parts(layer.norm, x_layout, conv_layout), metadata, x, a, b, y)


def run_step(layer: Any, parts: Parts, metadata: Any, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
    """Runs a step's batch: sequences with drafts, and all others. `layer_step` documents the tensors."""
    drafted = metadata.num_spec_decodes if metadata.spec_sequence_masks is not None else 0
    others = metadata.num_decodes + metadata.num_prefills
    if not drafted:
        return _run_others(layer, parts, metadata, others, x, a, b, y)
    if not others:
        return _run_drafts(layer, parts, metadata, drafted, x, a, b, y)
    masks = metadata.spec_sequence_masks_cpu
    if masks is not None and bool(masks[:drafted].all()):
        # The drafts come first: their rows and the others' are slices.
        end = metadata.num_spec_decode_tokens
        last = end + metadata.num_decode_tokens + metadata.num_prefill_tokens
        drafts.layer_step(x[:last], a[:last], b[:last], draft_rows=end, out=y[:last], draft_slots=draft_slots_of(metadata, drafted),
                          accepted=metadata.num_accepted_tokens[:drafted],
                          draft_cu_seqlens=metadata.spec_query_start_loc[:drafted + 1], null_slot=NULL_BLOCK,
                          **_others(metadata, others), **_given(layer, parts))
        return None
    for run, count, index in ((_run_drafts, drafted, metadata.spec_token_indx),
                              (_run_others, others, metadata.non_spec_token_indx)):
        rows = [t.index_select(0, index) for t in (x, a, b, y)]
        run(layer, parts, metadata, count, *rows)
        y.index_copy_(0, index, rows[3])


def _given(layer: Any, parts: Parts) -> Dict[str, Any]:
    """Arguments of `ops.layer` and `drafts.layer_drafts` but x, a, b and out. The conv state has all columns."""
    key_heads, value_heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
    conv_state, pool = layer.kv_cache[0], layer.kv_cache[1]
    pool_layout = "value_major"
    if not pool.is_cuda:
        # vLLM's kernels for CPUs read the same memory as [slots, HV, K, V].
        pool, pool_layout = pool.view(pool.shape[0], value_heads, layer.head_k_dim, layer.head_v_dim), "key_major"
    bias, norm = layer.conv1d.bias, parts.norm
    return {"conv_state": conv_state, "pool": pool, "conv_weight": conv_weight(layer), "a_log": layer.A_log.detach(),
            "key_heads": key_heads, "value_heads": value_heads, "key_dim": layer.head_k_dim, "value_dim": layer.head_v_dim,
            "conv_bias": None if bias is None else bias.detach(), "dt_bias": layer.dt_bias.detach(),
            "norm_weight": norm.weight.detach(), "eps": norm.eps,
            "gate": "sigmoid" if norm.activation == "sigmoid" else "silu", "allow_neg_eigval": parts.allow_neg_eigval,
            "x_layout": parts.x_layout, "conv_layout": parts.conv_layout, "pool_layout": pool_layout}


def _run_others(layer: Any, parts: Parts, metadata: Any, count: int, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
    """Runs `count` sequences without drafts: decodes, then prefills."""
    named, columns = _given(layer, parts), layer.conv_kernel_size - 1
    # Further columns are for draft tokens; the first ones hold the state.
    state = named["conv_state"]
    named["conv_state"] = state[:, :columns] if parts.conv_layout == "token_major" else state[:, :, :columns]
    ops.layer(x, a, b, out=y, **_others(metadata, count), **named)


def _others(metadata: Any, count: int) -> Dict[str, Any]:
    """Arguments for the `count` sequences without drafts."""
    has = metadata.has_initial_state
    return {"cu_seqlens": metadata.non_spec_query_start_loc[:count + 1], "decodes": metadata.num_decodes,
            "slots": slots_of(metadata, count), "has_initial_state": None if has is None else has[:count]}


def _run_drafts(layer: Any, parts: Parts, metadata: Any, count: int, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
    """Runs `count` sequences with drafts to verify. Each starts from the state after the draft that the step before
    accepted last, and stores the states after all of its own."""
    drafts.layer_drafts(x, a, b, draft_slots=draft_slots_of(metadata, count),
                        accepted=metadata.num_accepted_tokens[:count],
                        cu_seqlens=metadata.spec_query_start_loc[:count + 1], null_slot=NULL_BLOCK, out=y,
                        **_given(layer, parts))


def layer_class(base: type, theirs: Any) -> type:
    """A subclass of vLLM's `QwenGatedDeltaNetAttention`, whose module is `theirs`."""

    class DeltawaveGatedDeltaNetAttention(base):  # type: ignore[misc]
        """Projections and caches are vLLM's. Its custom op, which graphs are split at, calls `_forward_core_rocm`."""

        steps: Dict[str, int] = {"deltawave": 0, "vllm": 0}  # batches by who ran them, for tests

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            why = unsupported(self)
            if why:
                _log.warning("deltawave: %s runs vLLM's own code: it has %s", self.prefix, why)
            else:
                self._forward_method = self.forward_deltawave

        def forward_deltawave(self, hidden_states: Tensor) -> Tensor:
            """hidden_states `[T, hidden]` to the layer's output, of the same shape."""
            x, _ = self.in_proj_qkvz(hidden_states)
            ba, _ = self.in_proj_ba(hidden_states)
            heads = self.num_v_heads // self.tp_size
            # Zeros: rows of a batch that is only profiled are not written.
            y = torch.zeros((x.shape[0], heads, self.head_v_dim), dtype=x.dtype, device=x.device)
            torch.ops.vllm.qwen_gdn_attention_core(x, ba, x.new_empty(0), y, theirs._encode_layer_name(self.prefix), True)
            output, _ = self.out_proj(y.flatten(-2))
            return output

        def _forward_core_rocm(self, qkvz: Tensor, ba: Tensor, z_out: Tensor, core_attn_out: Tensor) -> None:
            if self._forward_method != self.forward_deltawave:
                return super()._forward_core_rocm(qkvz, ba, z_out, core_attn_out)
            all_metadata = theirs.get_forward_context().attn_metadata
            metadata = all_metadata.get(self.prefix) if isinstance(all_metadata, dict) else None
            if metadata is None or not metadata.num_actual_tokens:
                return None
            if getattr(metadata, "checkpoint", None) is not None:
                return self._run_by_vllm(qkvz, ba, core_attn_out)
            self.steps["deltawave"] += 1
            layout = "channel_major" if theirs.is_conv_state_dim_first() else "token_major"
            layer_step(self, metadata, qkvz, ba, core_attn_out, layout)

        def _run_by_vllm(self, qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
            """A batch with checkpoints inside its prompts, by vLLM's kernels."""
            self.steps["vllm"] += 1
            mixed, z, b, a = self.prepare_gdn_attention_core_inputs(qkvz, ba, qkvz.shape[0])
            if core_attn_out.is_cuda:
                self._forward_core(mixed, b, a, core_attn_out)
            else:
                name = theirs._encode_layer_name(self.prefix)
                torch.ops.vllm.cpu_gdn_attention_core(mixed, b, a, core_attn_out, name)
            core_attn_out.copy_(self.norm(core_attn_out, z))

    return DeltawaveGatedDeltaNetAttention


def olmo_class(base: type, theirs: Any) -> type:
    """A subclass of vLLM's `OlmoHybridGatedDeltaNetAttention`, whose module is `theirs`."""

    class DeltawaveOlmoGatedDeltaNetAttention(base):  # type: ignore[misc]
        """Projections and caches are vLLM's, whose custom op, which holds the whole layer, calls `_full_forward`."""

        steps: Dict[str, int] = {"deltawave": 0, "vllm": 0}  # batches by who ran them, for tests

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            why = unsupported_olmo(self)
            self._runs_here = why is None
            if why:
                _log.warning("deltawave: %s runs vLLM's own code: it has %s", self.prefix, why)

        def _full_forward(self, hidden_states: Tensor, output: Tensor) -> None:
            all_metadata = theirs.get_forward_context().attn_metadata
            metadata = all_metadata.get(self.prefix) if isinstance(all_metadata, dict) else None
            exported = metadata is not None and getattr(metadata, "checkpoint", None) is not None
            if not self._runs_here or exported:
                self.steps["vllm"] += metadata is not None
                return super()._full_forward(hidden_states, output)
            x, _ = self.in_proj_qkvg(hidden_states)
            b, _ = self.b_proj(hidden_states)
            a, _ = self.a_proj(hidden_states)
            # Zeros: rows of a batch that is only profiled are not written.
            y = torch.zeros((x.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim), dtype=x.dtype, device=x.device)
            if metadata is not None and metadata.num_actual_tokens:
                self.steps["deltawave"] += 1
                layout = "channel_major" if theirs.is_conv_state_dim_first() else "token_major"
                run_step(self, Parts(self.o_norm, "flat", layout, self.allow_neg_eigval), metadata, x, a, b, y)
            output[:x.shape[0]], _ = self.o_proj(y.flatten(-2))

    return DeltawaveOlmoGatedDeltaNetAttention
