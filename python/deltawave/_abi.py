"""include/deltawave.h in ctypes, made by generate_abi.py: see there. Do not edit."""

from ctypes import (POINTER, Structure, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64,
                    c_void_p, sizeof)
from typing import Any


class Sized(Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=sizeof(type(self)), **fields)


DW_ABI_VERSION = 1
DW_OK = 0
DW_ERROR_ARGUMENT = 1
DW_ERROR_DEVICE = 2
DW_ERROR_RUNTIME = 3
DW_ERROR_INTERNAL = 4
DW_ERROR_RANKS = 5
DW_BACKEND_AUTO = 0
DW_BACKEND_HIP = 1
DW_BACKEND_SIMULATOR = 2
DW_F32 = 0
DW_BF16 = 1
DW_F16 = 2
DW_I32 = 3
DW_I64 = 4
DW_HEADS_GROUPED = 0
DW_HEADS_TILED = 1
DW_STATE_KEY_MAJOR = 0
DW_STATE_VALUE_MAJOR = 1
DW_TO_DEVICE = 0
DW_TO_HOST = 1
DW_ON_DEVICE = 2
DW_PATH_AUTO = 0
DW_PATH_FUSED = 1
DW_PATH_SPLIT = 2
DW_PATH_SHORT = 3
DW_SAVE_NOTHING = 0
DW_SAVE_BOUNDARIES = 1
DW_RANKS_CONTIGUOUS = 0
DW_RANKS_ZIGZAG = 1
DW_RANKS_FRAGMENTS = 2
DW_RANKS_PACKED = 3
DW_AGREEMENT_BYTES = 128
DW_UNIQUE_ID_BYTES = 128
DW_CONV_FLAT = 0
DW_CONV_INTERLEAVED = 1
DW_CONV_SEPARATE = 2
DW_ACTIVATION_SILU = 0
DW_ACTIVATION_NONE = 1
DW_CONV_CHANNEL_MAJOR = 0
DW_CONV_TOKEN_MAJOR = 1
DW_DRAFT_CHAIN = 0
DW_DRAFT_TREE = 1
DW_GATE_SILU = 0
DW_GATE_SIGMOID = 1


class dw_device_info(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("memory_bytes", c_uint64),
        ("compute_units", c_uint32),
        ("pad0", c_uint32),
        ("backend", c_char * 16),
        ("arch", c_char * 32),
        ("name", c_char * 256),
    ]


class dw_tensor(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * 4),
        ("strides", c_int64 * 4),
    ]


class dw_lengths(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("data", c_void_p),
        ("entries", c_int64),
        ("dtype", c_int32),
        ("pad0", c_int32),
    ]


class dw_prefill_spec(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("dtype", c_int32),
        ("head_map", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("qk_l2norm", c_int32),
        ("scale", c_float),
        ("segments", c_int32),
        ("compute_units", c_int32),
        ("path", c_int32),
        ("save", c_int32),
    ]


class dw_prefill_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("q", POINTER(dw_tensor)),
        ("k", POINTER(dw_tensor)),
        ("v", POINTER(dw_tensor)),
        ("o", POINTER(dw_tensor)),
        ("g", POINTER(dw_tensor)),
        ("beta", POINTER(dw_tensor)),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("allow_neg_eigval", c_int32),
        ("initial_layout", c_int32),
        ("initial_state", POINTER(dw_tensor)),
        ("has_initial_state", c_void_p),
        ("final_state", POINTER(dw_tensor)),
        ("final_layout", c_int32),
        ("pad0", c_int32),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("pool", POINTER(dw_tensor)),
        ("slots", c_void_p),
        ("write_slots", c_void_p),
        ("snapshots", POINTER(dw_tensor)),
        ("snapshot_slots", c_void_p),
        ("pool_layout", c_int32),
        ("snapshot_layout", c_int32),
        ("context", c_void_p),
        ("context_bytes", c_size_t),
    ]


class dw_snapshot(Structure):
    _fields_ = [
        ("sequence", c_int64),
        ("tokens", c_int64),
        ("slot", c_int64),
    ]


class dw_prefill_backward_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("q", POINTER(dw_tensor)),
        ("k", POINTER(dw_tensor)),
        ("v", POINTER(dw_tensor)),
        ("g", POINTER(dw_tensor)),
        ("beta", POINTER(dw_tensor)),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("allow_neg_eigval", c_int32),
        ("initial_layout", c_int32),
        ("initial_state", POINTER(dw_tensor)),
        ("has_initial_state", c_void_p),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("d_o", POINTER(dw_tensor)),
        ("d_final_state", POINTER(dw_tensor)),
        ("d_q", POINTER(dw_tensor)),
        ("d_k", POINTER(dw_tensor)),
        ("d_v", POINTER(dw_tensor)),
        ("d_g", POINTER(dw_tensor)),
        ("d_beta", POINTER(dw_tensor)),
        ("d_a_log", POINTER(dw_tensor)),
        ("d_dt_bias", POINTER(dw_tensor)),
        ("d_initial_state", POINTER(dw_tensor)),
        ("d_final_layout", c_int32),
        ("d_initial_layout", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("context", c_void_p),
        ("context_bytes", c_size_t),
    ]


class dw_fragment(Structure):
    _fields_ = [
        ("sequence", c_int64),
        ("begin", c_int64),
        ("tokens", c_int64),
    ]


class dw_rank_layout(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("lengths", c_void_p),
        ("sequences", c_int64),
        ("block", c_int64),
        ("ranks", c_int32),
        ("kind", c_int32),
        ("fragments", POINTER(dw_fragment)),
        ("fragment_counts", c_void_p),
    ]


class dw_parallel_prefill_sizes(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("summary_bytes", c_size_t),
        ("gathered_bytes", c_size_t),
        ("workspace_bytes", c_size_t),
        ("fragments", c_int64),
        ("order_entries", c_int64),
        ("chunk_entries", c_int64),
        ("block", c_int64),
    ]


class dw_parallel_prefill_backward_sizes(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("summary_bytes", c_size_t),
        ("gathered_bytes", c_size_t),
        ("workspace_bytes", c_size_t),
        ("fragments", c_int64),
        ("block", c_int64),
    ]


class dw_gate_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("g", POINTER(dw_tensor)),
        ("beta", POINTER(dw_tensor)),
        ("allow_neg_eigval", c_int32),
        ("pad0", c_int32),
    ]


class dw_gate_backward_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("d_g", POINTER(dw_tensor)),
        ("d_beta", POINTER(dw_tensor)),
        ("d_a", POINTER(dw_tensor)),
        ("d_b", POINTER(dw_tensor)),
        ("d_a_log", POINTER(dw_tensor)),
        ("d_dt_bias", POINTER(dw_tensor)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("allow_neg_eigval", c_int32),
        ("pad0", c_int32),
    ]


class dw_conv_spec(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("dtype", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("width", c_int32),
        ("activation", c_int32),
        ("keep_states", c_int32),
        ("qk_l2norm", c_int32),
        ("pad0", c_int32),
    ]


class dw_conv_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(dw_tensor)),
        ("x_q", POINTER(dw_tensor)),
        ("x_k", POINTER(dw_tensor)),
        ("x_v", POINTER(dw_tensor)),
        ("weight", POINTER(dw_tensor)),
        ("bias", POINTER(dw_tensor)),
        ("state", POINTER(dw_tensor)),
        ("slots", c_void_p),
        ("has_initial_state", c_void_p),
        ("q", POINTER(dw_tensor)),
        ("k", POINTER(dw_tensor)),
        ("v", POINTER(dw_tensor)),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("x_layout", c_int32),
        ("state_layout", c_int32),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("g", POINTER(dw_tensor)),
        ("beta", POINTER(dw_tensor)),
        ("allow_neg_eigval", c_int32),
        ("pad0", c_int32),
        ("accepted", c_void_p),
        ("slot_columns", c_int32),
        ("has_null_slot", c_int32),
        ("null_slot", c_int32),
        ("pad1", c_int32),
    ]


class dw_conv_backward_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(dw_tensor)),
        ("x_q", POINTER(dw_tensor)),
        ("x_k", POINTER(dw_tensor)),
        ("x_v", POINTER(dw_tensor)),
        ("weight", POINTER(dw_tensor)),
        ("bias", POINTER(dw_tensor)),
        ("initial_state", POINTER(dw_tensor)),
        ("has_initial_state", c_void_p),
        ("d_q", POINTER(dw_tensor)),
        ("d_k", POINTER(dw_tensor)),
        ("d_v", POINTER(dw_tensor)),
        ("d_final_state", POINTER(dw_tensor)),
        ("d_x", POINTER(dw_tensor)),
        ("d_x_q", POINTER(dw_tensor)),
        ("d_x_k", POINTER(dw_tensor)),
        ("d_x_v", POINTER(dw_tensor)),
        ("d_weight", POINTER(dw_tensor)),
        ("d_bias", POINTER(dw_tensor)),
        ("d_initial_state", POINTER(dw_tensor)),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("x_layout", c_int32),
        ("initial_layout", c_int32),
        ("d_final_layout", c_int32),
        ("d_initial_layout", c_int32),
    ]


class dw_decode_spec(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("dtype", c_int32),
        ("head_map", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("qk_l2norm", c_int32),
        ("scale", c_float),
        ("tokens", c_int32),
        ("draft", c_int32),
    ]


class dw_decode_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("q", POINTER(dw_tensor)),
        ("k", POINTER(dw_tensor)),
        ("v", POINTER(dw_tensor)),
        ("o", POINTER(dw_tensor)),
        ("g", POINTER(dw_tensor)),
        ("beta", POINTER(dw_tensor)),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("pool", POINTER(dw_tensor)),
        ("slots", c_void_p),
        ("write_slots", c_void_p),
        ("has_initial_state", c_void_p),
        ("states", POINTER(dw_tensor)),
        ("allow_neg_eigval", c_int32),
        ("pool_layout", c_int32),
        ("draft_slots", c_void_p),
        ("read_slots", c_void_p),
        ("accepted", c_void_p),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("read_columns", c_int32),
        ("has_null_slot", c_int32),
        ("null_slot", c_int32),
        ("pad0", c_int32),
        ("z", POINTER(dw_tensor)),
        ("norm_weight", POINTER(dw_tensor)),
        ("norm_eps", c_float),
        ("norm_gate", c_int32),
    ]


class dw_commit_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("accepted", c_void_p),
        ("slots", c_void_p),
        ("states", POINTER(dw_tensor)),
        ("pool", POINTER(dw_tensor)),
        ("conv_state", POINTER(dw_tensor)),
        ("x", POINTER(dw_tensor)),
        ("x_q", POINTER(dw_tensor)),
        ("x_k", POINTER(dw_tensor)),
        ("x_v", POINTER(dw_tensor)),
        ("has_initial_state", c_void_p),
        ("pool_layout", c_int32),
        ("x_layout", c_int32),
        ("conv_layout", c_int32),
        ("pad0", c_int32),
    ]


class dw_norm_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(dw_tensor)),
        ("z", POINTER(dw_tensor)),
        ("weight", POINTER(dw_tensor)),
        ("y", POINTER(dw_tensor)),
        ("eps", c_float),
        ("gate", c_int32),
    ]


class dw_norm_backward_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(dw_tensor)),
        ("z", POINTER(dw_tensor)),
        ("weight", POINTER(dw_tensor)),
        ("d_y", POINTER(dw_tensor)),
        ("d_x", POINTER(dw_tensor)),
        ("d_z", POINTER(dw_tensor)),
        ("d_weight", POINTER(dw_tensor)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("eps", c_float),
        ("gate", c_int32),
    ]


class dw_layer_spec(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("dtype", c_int32),
        ("head_map", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("width", c_int32),
        ("qk_l2norm", c_int32),
        ("scale", c_float),
        ("eps", c_float),
        ("gate", c_int32),
        ("allow_neg_eigval", c_int32),
        ("segments", c_int32),
        ("path", c_int32),
    ]


class dw_layer_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(dw_tensor)),
        ("x_q", POINTER(dw_tensor)),
        ("x_k", POINTER(dw_tensor)),
        ("x_v", POINTER(dw_tensor)),
        ("z", POINTER(dw_tensor)),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("conv_weight", POINTER(dw_tensor)),
        ("conv_bias", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("norm_weight", POINTER(dw_tensor)),
        ("conv_state", POINTER(dw_tensor)),
        ("pool", POINTER(dw_tensor)),
        ("slots", c_void_p),
        ("has_initial_state", c_void_p),
        ("y", POINTER(dw_tensor)),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("x_layout", c_int32),
        ("conv_layout", c_int32),
        ("pool_layout", c_int32),
        ("pad0", c_int32),
        ("o", POINTER(dw_tensor)),
    ]


class dw_layer_backward_tensors(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("x", POINTER(dw_tensor)),
        ("x_q", POINTER(dw_tensor)),
        ("x_k", POINTER(dw_tensor)),
        ("x_v", POINTER(dw_tensor)),
        ("z", POINTER(dw_tensor)),
        ("a", POINTER(dw_tensor)),
        ("b", POINTER(dw_tensor)),
        ("conv_weight", POINTER(dw_tensor)),
        ("conv_bias", POINTER(dw_tensor)),
        ("a_log", POINTER(dw_tensor)),
        ("dt_bias", POINTER(dw_tensor)),
        ("norm_weight", POINTER(dw_tensor)),
        ("initial_conv_state", POINTER(dw_tensor)),
        ("initial_state", POINTER(dw_tensor)),
        ("has_initial_state", c_void_p),
        ("o", POINTER(dw_tensor)),
        ("d_y", POINTER(dw_tensor)),
        ("d_final_conv_state", POINTER(dw_tensor)),
        ("d_final_state", POINTER(dw_tensor)),
        ("d_x", POINTER(dw_tensor)),
        ("d_x_q", POINTER(dw_tensor)),
        ("d_x_k", POINTER(dw_tensor)),
        ("d_x_v", POINTER(dw_tensor)),
        ("d_z", POINTER(dw_tensor)),
        ("d_a", POINTER(dw_tensor)),
        ("d_b", POINTER(dw_tensor)),
        ("d_conv_weight", POINTER(dw_tensor)),
        ("d_conv_bias", POINTER(dw_tensor)),
        ("d_a_log", POINTER(dw_tensor)),
        ("d_dt_bias", POINTER(dw_tensor)),
        ("d_norm_weight", POINTER(dw_tensor)),
        ("d_initial_conv_state", POINTER(dw_tensor)),
        ("d_initial_state", POINTER(dw_tensor)),
        ("cu_seqlens", POINTER(dw_lengths)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("x_layout", c_int32),
        ("conv_layout", c_int32),
        ("pool_layout", c_int32),
        ("pad0", c_int32),
    ]


# Result and parameters.
FUNCTIONS = {
    "dw_abi_version": (c_int, []),
    "dw_version": (c_char_p, []),
    "dw_archs": (c_char_p, []),
    "dw_last_error": (c_char_p, []),
    "dw_context_create": (c_int, [c_int, c_int, POINTER(c_void_p)]),
    "dw_context_destroy": (None, [c_void_p]),
    "dw_context_info": (c_int, [c_void_p, POINTER(dw_device_info)]),
    "dw_malloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "dw_free": (c_int, [c_void_p, c_void_p]),
    "dw_copy": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int]),
    "dw_synchronize": (c_int, [c_void_p, c_void_p]),
    "dw_prefill_packed": (c_int, [c_void_p, POINTER(dw_prefill_spec), POINTER(dw_lengths), c_int64, POINTER(c_void_p)]),
    "dw_prefill_dense": (c_int, [c_void_p, POINTER(dw_prefill_spec), c_int64, c_int64, POINTER(c_void_p)]),
    "dw_prefill_device": (c_int, [c_void_p, POINTER(dw_prefill_spec), c_int64, c_int64, POINTER(c_void_p)]),
    "dw_prefill_destroy": (None, [c_void_p]),
    "dw_prefill_workspace_bytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "dw_prefill_round_tokens": (c_int, [POINTER(dw_prefill_spec), c_void_p]),
    "dw_prefill_context_bytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "dw_prefill_chunk_entries": (c_int, [c_void_p, c_void_p]),
    "dw_prefill_set_slots": (c_int, [c_void_p, c_void_p, c_void_p, c_int64]),
    "dw_prefill_set_snapshots": (c_int, [c_void_p, POINTER(dw_snapshot), c_int64]),
    "dw_prefill_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_prefill_tensors)]),
    "dw_prefill_backward_create": (c_int, [c_void_p, POINTER(c_void_p)]),
    "dw_prefill_backward_destroy": (None, [c_void_p]),
    "dw_prefill_backward_workspace_bytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "dw_prefill_backward_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_prefill_backward_tensors)]),
    "dw_parallel_prefill_create": (c_int, [c_void_p, POINTER(dw_prefill_spec), POINTER(dw_rank_layout), c_int32, c_int64, POINTER(c_void_p)]),
    "dw_parallel_prefill_destroy": (None, [c_void_p]),
    "dw_parallel_prefill_get_sizes": (c_int, [c_void_p, POINTER(dw_parallel_prefill_sizes)]),
    "dw_parallel_prefill_tables": (c_int, [c_void_p, POINTER(dw_fragment), c_int64, c_void_p, c_int64]),
    "dw_parallel_prefill_set_snapshots": (c_int, [c_void_p, POINTER(dw_snapshot), c_int64]),
    "dw_parallel_prefill_summarise_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_prefill_tensors), c_void_p, c_size_t]),
    "dw_parallel_prefill_finish_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_prefill_tensors), c_void_p, c_size_t, c_void_p]),
    "dw_parallel_prefill_agreement": (c_int, [c_void_p, c_void_p]),
    "dw_parallel_prefill_check_agreement": (c_int, [c_void_p, c_void_p, c_size_t]),
    "dw_parallel_prefill_tails": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64]),
    "dw_parallel_prefill_backward_create": (c_int, [c_void_p, POINTER(c_void_p)]),
    "dw_parallel_prefill_backward_destroy": (None, [c_void_p]),
    "dw_parallel_prefill_backward_get_sizes": (c_int, [c_void_p, POINTER(dw_parallel_prefill_backward_sizes)]),
    "dw_parallel_prefill_backward_summarise_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_prefill_backward_tensors), c_void_p, c_size_t]),
    "dw_parallel_prefill_backward_finish_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_prefill_backward_tensors), c_void_p, c_size_t]),
    "dw_communicator_unique_id": (c_int, [c_void_p, c_void_p, c_void_p]),
    "dw_communicator_create": (c_int, [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int64, POINTER(c_void_p)]),
    "dw_communicator_destroy": (None, [c_void_p]),
    "dw_communicator_agree": (c_int, [c_void_p, c_void_p]),
    "dw_communicator_prefill": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(dw_prefill_tensors), c_void_p, c_size_t, c_void_p, c_size_t]),
    "dw_communicator_prefill_backward": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(dw_prefill_backward_tensors), c_void_p, c_size_t, c_void_p, c_size_t]),
    "dw_communicator_all_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_size_t]),
    "dw_communicator_synchronize": (c_int, [c_void_p, c_void_p]),
    "dw_gate_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_gate_tensors)]),
    "dw_gate_backward_workspace_bytes": (c_int, [c_void_p, c_int64, c_int64, POINTER(c_size_t)]),
    "dw_gate_backward_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_gate_backward_tensors)]),
    "dw_conv_packed": (c_int, [c_void_p, POINTER(dw_conv_spec), POINTER(dw_lengths), c_int64, POINTER(c_void_p)]),
    "dw_conv_device": (c_int, [c_void_p, POINTER(dw_conv_spec), c_int64, c_int64, POINTER(c_void_p)]),
    "dw_conv_destroy": (None, [c_void_p]),
    "dw_conv_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_conv_tensors)]),
    "dw_conv_backward_create": (c_int, [c_void_p, POINTER(c_void_p)]),
    "dw_conv_backward_destroy": (None, [c_void_p]),
    "dw_conv_backward_workspace_bytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "dw_conv_backward_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_conv_backward_tensors)]),
    "dw_decode_create": (c_int, [c_void_p, POINTER(dw_decode_spec), c_int64, POINTER(c_void_p)]),
    "dw_decode_destroy": (None, [c_void_p]),
    "dw_decode_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_decode_tensors)]),
    "dw_commit_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_commit_tensors)]),
    "dw_norm_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_norm_tensors)]),
    "dw_norm_backward_workspace_bytes": (c_int, [c_void_p, c_int64, c_int64, c_int64, POINTER(c_size_t)]),
    "dw_norm_backward_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_norm_backward_tensors)]),
    "dw_layer_packed": (c_int, [c_void_p, POINTER(dw_layer_spec), POINTER(dw_lengths), c_int64, c_int64, POINTER(c_void_p)]),
    "dw_layer_device": (c_int, [c_void_p, POINTER(dw_layer_spec), c_int64, c_int64, c_int64, POINTER(c_void_p)]),
    "dw_layer_destroy": (None, [c_void_p]),
    "dw_layer_workspace_bytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "dw_layer_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_layer_tensors)]),
    "dw_layer_backward_create": (c_int, [c_void_p, POINTER(c_void_p)]),
    "dw_layer_backward_destroy": (None, [c_void_p]),
    "dw_layer_backward_workspace_bytes": (c_int, [c_void_p, POINTER(c_size_t)]),
    "dw_layer_backward_launch": (c_int, [c_void_p, c_void_p, POINTER(dw_layer_backward_tensors)]),
}
