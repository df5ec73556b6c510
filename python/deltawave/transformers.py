"""deltawave in transformers: Qwen3-Next, Qwen3.5 (dense and mixture of experts) and OLMo-Hybrid.

    import deltawave.transformers
    deltawave.transformers.enable()     # before or after a model is made; disable() undoes it

`enable` replaces the forward of the Gated DeltaNet layers, so that one call of deltawave computes everything between a layer's
projections and writes the states of the cache in place. It also replaces the functions that these layers call by name: the
gated delta rule, the convolution and the gated norm. They serve what the whole layer does not: gradients, packed sequences
(`cu_seq_lens_q`), caches that record the past. `enable(layers=False)` replaces the functions alone.

Where deltawave cannot serve a call (f32, other devices), the function that was there before runs, and a warning says once
which argument was refused. In training the chunked gated delta rule, the convolution and the norm run on deltawave, with their
backward kernels; single tokens stay with transformers. Models on the CPU stay as they are, unless `enable(simulator=True)` asks for
deltawave's simulator, which is for tests. `hub_mapping` and `register_hub_kernels` are the same functions and norms, not
whole layers, for the `kernels` package (`use_kernels=True`), which has none of these for AMD GPUs.

Tested with transformers 5.17.0 and 5.23.0. Another release works if its modules have the same names, else `enable` raises.
"""

import functools
import importlib
import inspect
import logging
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from . import ops
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .errors import ArgumentError, Unsupported
from .fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, refuse_gradients

TRANSFORMERS_VERSIONS = ("5.17.0", "5.23.0")
# Modules transformers.models.NAME.modeling_NAME with Gated DeltaNet layers.
MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")


@functools.wraps(fused_recurrent_gated_delta_rule)
def _recurrent(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Any:
    """`fused_recurrent_gated_delta_rule`, which leaves calls that need a gradient to the function that was there before."""
    refuse_gradients(q=q, k=k, v=v, **dict(zip(("g", "gk", "gv", "beta"), arguments)), **named)
    return fused_recurrent_gated_delta_rule(q, k, v, *arguments, **named)


# Functions in these modules, and those that replace them.
FUNCTIONS: Dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _recurrent,
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
}
# Names of activations in configurations, and in `deltawave.ops.norm`.
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}

_log = logging.getLogger(__name__)
_said: Set[str] = set()
# What `enable` replaced: owner, attribute, the value before.
_replaced: List[Tuple[Any, str, Any]] = []
# Calls that deltawave answered, by function.
answered: Dict[str, int] = {}
# Types of devices whose tensors go to deltawave.
_devices = ["cuda"]


def rms_norm_gated(hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """`weight * rms_norm(hidden_states) * activation(gate)` of rows `[..., V]`, bf16 or fp16.

    Gradients flow to all three. Raises `Unsupported` for other types and other activations.
    """
    if hidden_states.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"hidden_states: dtype {hidden_states.dtype}; it must be torch.bfloat16 or torch.float16")
    if activation not in GATES:
        raise Unsupported(f"activation: {activation!r}; it must be one of {', '.join(GATES)}")
    if hidden_states.shape[-1] % 16 or hidden_states.shape[-1] > 256:
        raise Unsupported(f"hidden_states: rows of {hidden_states.shape[-1]}; it must be a multiple of 16 up to 256")
    by_row = (-1, 1, hidden_states.shape[-1])
    y = ops.norm(hidden_states.reshape(by_row), gate.to(hidden_states.dtype).reshape(by_row), weight, eps, GATES[activation])
    return y.view(hidden_states.shape)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning(text)


def _with_fallback(name: str, ours: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, called with the keywords that it has. `before` answers what `ours` refuses."""
    known = frozenset(inspect.signature(ours).parameters)

    @functools.wraps(before)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_exporting() or _first(arguments, named).device.type not in _devices:
            return before(*arguments, **named)
        try:
            result = ours(*arguments, **{key: value for key, value in named.items() if key in known})
        except Unsupported as problem:
            if not torch.compiler.is_compiling():
                _say_once(f"deltawave does not run {name}: {problem}. The function that was there before runs.")
            return before(*arguments, **named)
        if not torch.compiler.is_compiling():
            answered[name] = answered.get(name, 0) + 1
        return result

    return call


def _first(arguments: Tuple[Any, ...], named: Dict[str, Any]) -> Tensor:
    """The first tensor of a call."""
    return next(x for x in (*arguments, *named.values()) if isinstance(x, Tensor))


def _norm_forward(layer: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return rms_norm_gated(hidden_states, gate, layer.weight, layer.variance_epsilon, layer.activation)


def _serves_whole(layer: Any, hidden_states: Tensor, cache: Any, kwargs: Dict[str, Any]) -> bool:
    """Whether one call may serve a layer. Otherwise the layer's own forward runs, with the functions replaced."""
    if torch.compiler.is_exporting() or hidden_states.device.type not in _devices or 0 in hidden_states.shape:
        return False
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("seq_idx") is not None:
        return False
    # Nothing calls the convolution and the norm: their hooks, which move weights for accelerate, would be passed over.
    if any(_is_hooked(module) for module in (layer.conv1d, _norm_of(layer))):
        return False
    if cache is not None:
        if getattr(cache, "offloading", False) or layer.layer_idx >= len(cache.layers):
            return False
        kept = cache.layers[layer.layer_idx]
        if not hasattr(kept, "recurrent_states") or kept.record_past:
            return False
    return not torch.is_grad_enabled() or not (hidden_states.requires_grad or any(x.requires_grad for x in layer.parameters()))


def _norm_of(layer: Any) -> Any:
    """The gated norm of a layer: OLMo-Hybrid calls it `o_norm`."""
    return layer.o_norm if hasattr(layer, "o_norm") else layer.norm


def _is_hooked(module: Any) -> bool:
    """Whether a call of a module does more than the forward of its class."""
    names = ["_hf_hook"]
    if not torch.compiler.is_compiling():  # whose graphs have no hooks of single modules
        names += ["_forward_hooks", "_forward_pre_hooks"]
        if "forward" in module.__dict__:
            return True
    return any(getattr(module, name, None) for name in names)


def _layer_forward(layer: Any, hidden_states: Tensor, cache: Any, attention_mask: Optional[Tensor]) -> Tensor:
    """The forward of a Gated DeltaNet layer of transformers, by `ops.layer` between its projections."""
    if hidden_states.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"hidden_states: dtype {hidden_states.dtype}; it must be torch.bfloat16 or torch.float16")
    key_heads, value_heads, key_dim, value_dim = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    for dim in (key_dim, value_dim):
        if dim % 16 or dim > 256:
            raise Unsupported(f"head dimension: {dim}; it must be a multiple of 16 up to 256")
    norm, project = _norm_of(layer), layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj
    if layer.activation not in ("silu", "swish") or norm.activation not in GATES:
        raise Unsupported(f"activations: {layer.activation!r} and {norm.activation!r}; they must be 'silu', and one of "
                          f"{', '.join(GATES)}")
    weight = layer.conv1d.weight.squeeze(1)
    channels, width = weight.shape
    if channels != 2 * key_heads * key_dim + value_heads * value_dim:
        raise Unsupported(f"conv1d: {channels} channels; it must have those of all heads of the layer")
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    batch, tokens = hidden_states.shape[:2]
    x, z, a, b, layout = _projected(layer, hidden_states)
    kept, has = None if cache is None else cache.layers[layer.layer_idx], None
    if kept is not None and kept.has_previous_state[0]:
        conv_state, state = kept.conv_states[0], kept.recurrent_states[0]
        if conv_state.shape[0] != batch:
            raise ArgumentError(f"cache_params: states of {conv_state.shape[0]} sequences; hidden_states has {batch}")
    else:
        conv_state = torch.empty((batch, channels, width), dtype=x.dtype, device=x.device)
        state = torch.empty((batch, value_heads, key_dim, value_dim), dtype=torch.float32, device=x.device)
        has = torch.zeros((batch,), dtype=torch.uint8, device=x.device)
    decodes = batch if tokens == 1 and has is None else 0
    lengths = None if batch == 1 or decodes else ops.equal_lengths(batch, tokens)
    y = ops.layer(x, a, b, conv_state, state, weight, layer.A_log, key_heads, value_heads, key_dim, value_dim, z,
                  layer.conv1d.bias, layer.dt_bias, norm.weight, lengths, decodes, None, has, norm.variance_epsilon,
                  GATES[norm.activation], allow_neg_eigval=getattr(layer, "allow_neg_eigval", False), x_layout=layout)
    if has is not None and cache is not None:
        cache.update_conv_state(conv_state, layer.layer_idx, conv_kernel_size=width)
        cache.update_recurrent_state(state, layer.layer_idx)
    result: Tensor = project(y.view(batch, tokens, value_heads * value_dim))
    return result


def _projected(layer: Any, hidden_states: Tensor) -> Tuple[Tensor, Optional[Tensor], Tensor, Tensor, str]:
    """Rows of q, k and v, z, a and b of all tokens, and the layout of the rows."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next: z lies in x
        x, ba = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        share = layer.num_v_heads // layer.num_k_heads
        ba = ba.view(-1, layer.num_k_heads, 2 * share)
        return x.flatten(0, 1), None, ba[:, :, share:], ba[:, :, :share], "interleaved"
    if hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        x, z = layer.in_proj_qkv(hidden_states), layer.in_proj_z(hidden_states)
        b, a = layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
    else:  # OLMo-Hybrid
        x = torch.cat([layer.q_proj(hidden_states), layer.k_proj(hidden_states), layer.v_proj(hidden_states)], -1)
        b, a, z = layer.b_proj(hidden_states), layer.a_proj(hidden_states), layer.g_proj(hidden_states)
    rows = x.shape[0] * x.shape[1]
    x, a, b = (t.view(rows, t.shape[-1]) for t in (x, a, b))
    return x, z.view(rows, 1, z.shape[-1]), a, b, "flat"


def _layer_with_fallback(before: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer by `_layer_forward`, or by `before` where one call does not serve it."""

    @functools.wraps(before)
    def forward(layer: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Optional[Tensor] = None,
                **kwargs: Any) -> Any:
        if _serves_whole(layer, hidden_states, cache_params, kwargs):
            try:
                result = _layer_forward(layer, hidden_states, cache_params, attention_mask)
            except Unsupported as problem:
                if not torch.compiler.is_compiling():
                    _say_once(f"deltawave does not run the whole layer: {problem}. The functions in it run one by one.")
            else:
                if not torch.compiler.is_compiling():
                    answered["layer"] = answered.get("layer", 0) + 1
                return result
        return before(layer, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)

    return forward


def _modules(models: Optional[Iterable[str]]) -> List[Any]:
    """Modules of the models. All that this release has, or those asked for, which must exist."""
    found = []
    for name in MODELS if models is None else models:
        if name not in MODELS:
            raise ArgumentError(f"models: {name!r}; it must be among {', '.join(MODELS)}")
        try:
            found.append(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))
        except ModuleNotFoundError as problem:
            if models is not None or problem.name == "transformers":
                raise Unsupported(f"models: {name} is not in the installed transformers ({problem})") from None
    return found


def _classes(module: Any, ending: str) -> List[type]:
    """Classes of a module whose names end so, without those that it imports."""
    return [x for name, x in vars(module).items()
            if name.endswith(ending) and isinstance(x, type) and x.__module__ == module.__name__]


def enable(models: Optional[Iterable[str]] = None, simulator: bool = False, layers: bool = True) -> List[str]:
    """Replaces functions of transformers by deltawave's, in the modules of `models` (names of `MODELS`; None: all), and with
    `layers` the forward of their Gated DeltaNet layers; without it earlier calls' layers are put back. Returns the names that
    are replaced now. Models that exist already use them too. With `simulator`, tensors on the CPU go to deltawave's simulator;
    without it they stay with transformers' own code.

    Raises `Unsupported` if transformers is missing, or if a module lacks one of the names; then nothing is replaced.
    """
    _devices[:] = ["cuda", "cpu"] if simulator else ["cuda"]
    targets: List[Tuple[Any, str, Optional[Callable[..., Any]]]] = []
    for module in _modules(models):
        norms, whole = (_classes(module, ending) for ending in ("RMSNormGated", "GatedDeltaNet"))
        missing = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
        if missing or not norms or layers and not whole:
            import transformers

            lacks = ", ".join(missing or ["a class *GatedDeltaNet" if norms else "a class *RMSNormGated"])
            tested = " and ".join(TRANSFORMERS_VERSIONS)
            raise Unsupported(f"transformers: {module.__name__} of release {transformers.__version__} lacks {lacks}; "
                              f"releases {tested} have it")
        targets += [(module, name, ours) for name, ours in FUNCTIONS.items()]
        targets += [(norm, "forward", _norm_forward) for norm in norms]
        if layers:
            targets += [(layer, "forward", None) for layer in whole]
        else:
            _restore([entry for entry in _replaced if entry[0] in whole])
    for owner, name, ours in targets:
        if any(owner is known and name == attribute for known, attribute, _ in _replaced):
            continue
        before = getattr(owner, name)
        _replaced.append((owner, name, before))
        label = name if inspect.ismodule(owner) else "RMSNormGated"
        setattr(owner, name, _with_fallback(label, ours, before) if ours else _layer_with_fallback(before))
    return [f"{getattr(owner, '__qualname__', owner.__name__)}.{name}" for owner, name, _ in _replaced]


def disable() -> None:
    """Undoes `enable`."""
    _restore([*_replaced])


def _restore(entries: List[Tuple[Any, str, Callable[..., Any]]]) -> None:
    """Puts back what `enable` replaced, the latest first."""
    for entry in reversed(entries):
        owner, name, before = entry
        _replaced.remove(entry)
        setattr(owner, name, before)


class ChunkGatedDeltaRule(nn.Module):  # type: ignore[misc]
    """`chunk_gated_delta_rule` as a layer of the `kernels` package: stateless, parameters of transformers' function."""

    has_backward = True
    can_torch_compile = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
                initial_state: Optional[Tensor] = None, output_final_state: bool = False,
                use_qk_l2norm_in_kernel: bool = False, **kwargs: Any) -> Tuple[Tensor, Optional[Tensor]]:
        return chunk_gated_delta_rule(query, key, value, g, beta, None, initial_state, output_final_state,
                                      use_qk_l2norm_in_kernel, cu_seqlens=kwargs.get("cu_seqlens"))


class RecurrentGatedDeltaRule(nn.Module):  # type: ignore[misc]
    """`fused_recurrent_gated_delta_rule` as a layer of the `kernels` package."""

    has_backward = False
    can_torch_compile = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
                initial_state: Optional[Tensor] = None, output_final_state: bool = False,
                use_qk_l2norm_in_kernel: bool = False, **kwargs: Any) -> Tuple[Tensor, Optional[Tensor]]:
        return fused_recurrent_gated_delta_rule(
            query, key, value, g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=kwargs.get("cu_seqlens"))


class CausalConv1dFn(nn.Module):  # type: ignore[misc]
    """`causal_conv1d_fn` as a layer of the `kernels` package."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                activation: Optional[str] = None, **kwargs: Any) -> Tensor:
        out = causal_conv1d_fn(hidden_states, weight, bias, kwargs.get("seq_idx"), activation=activation)
        assert isinstance(out, Tensor)
        return out


class CausalConv1dUpdate(nn.Module):  # type: ignore[misc]
    """`causal_conv1d_update` as a layer of the `kernels` package."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                activation: Optional[str] = None) -> Tensor:
        return causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class RMSNormGated(nn.Module):  # type: ignore[misc]
    """The gated RMS norm as a layer of the `kernels` package. Attributes are those of the layer that it replaces."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return _norm_forward(self, hidden_states, gate)


# Names of hub layers in transformers' models.
LAYERS = {"chunk_gated_delta_rule": ChunkGatedDeltaRule, "fused_recurrent_gated_delta_rule": RecurrentGatedDeltaRule,
          "causal_conv1d_fn": CausalConv1dFn, "causal_conv1d_update": CausalConv1dUpdate, "RMSNormGated": RMSNormGated}


class InstalledLayer:
    """A repository of the `kernels` package whose layer is in this package: nothing is downloaded."""

    def __init__(self, layer: type) -> None:
        self.layer = layer

    def load(self) -> type:
        """The class of the layer."""
        return self.layer


def hub_mapping(device: str = "rocm") -> Dict[str, Dict[str, Dict[Any, InstalledLayer]]]:
    """A kernel mapping for inference on a type of device ("rocm", "cuda" or "cpu"), for `kernels.register_kernel_mapping`,
    `use_kernel_mapping` and transformers' `KernelConfig`. Raises `Unsupported` without the `kernels` package."""
    if device not in ("rocm", "cuda", "cpu"):
        raise ArgumentError(f"device: {device!r}; it must be 'rocm', 'cuda' or 'cpu'")
    try:
        from kernels import Mode
    except ImportError as problem:
        raise Unsupported(f"kernels: {problem}; install the package for use_kernels=True") from None
    return {name: {device: {Mode.INFERENCE: InstalledLayer(layer)}} for name, layer in LAYERS.items()}


def register_hub_kernels(device: str = "rocm") -> None:
    """Adds `hub_mapping(device)` to the mapping that `kernels.kernelize` uses, also through transformers'
    `use_kernels=True`. Entries for other devices stay."""
    mapping = hub_mapping(device)
    from kernels import register_kernel_mapping

    register_kernel_mapping(mapping)
