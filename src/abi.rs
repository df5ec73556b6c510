//! Arguments of the kernels, generated from `hip/kernel_args.h` by bindgen. Do not edit: see `tests/abi.rs`.
#![allow(
    missing_docs,
    non_camel_case_types,
    dead_code,
    clippy::undocumented_unsafe_blocks
)]

pub const DWK_F32: _bindgen_ty_1 = 0;
pub const DWK_BF16: _bindgen_ty_1 = 1;
pub const DWK_F16: _bindgen_ty_1 = 2;
pub type _bindgen_ty_1 = ::core::ffi::c_uint;
pub const DWK_QK_L2NORM: _bindgen_ty_2 = 1;
pub const DWK_RAW_GATES: _bindgen_ty_2 = 2;
pub const DWK_NEGATIVE_EIGENVALUES: _bindgen_ty_2 = 4;
pub const DWK_TILED_HEADS: _bindgen_ty_2 = 8;
pub const DWK_INITIAL_VALUE_MAJOR: _bindgen_ty_2 = 16;
pub const DWK_FINAL_VALUE_MAJOR: _bindgen_ty_2 = 32;
pub const DWK_SNAPSHOT_VALUE_MAJOR: _bindgen_ty_2 = 64;
pub const DWK_FROM_HBM: _bindgen_ty_2 = 128;
pub const DWK_STARTS_EARLY: _bindgen_ty_2 = 256;
pub const DWK_ALIGNED: _bindgen_ty_2 = 512;
pub const DWK_STARTS_SOON: _bindgen_ty_2 = 1024;
pub const DWK_KEEPS_STATES: _bindgen_ty_2 = 2048;
pub const DWK_CHAINS: _bindgen_ty_2 = 4096;
pub const DWK_DEFERS_STATES: _bindgen_ty_2 = 8192;
pub type _bindgen_ty_2 = ::core::ffi::c_uint;
pub const DWK_CONV_SILU: _bindgen_ty_3 = 1;
pub const DWK_CONV_WIDE_LENGTHS: _bindgen_ty_3 = 2;
pub const DWK_CONV_KEEP_STATES: _bindgen_ty_3 = 4;
pub const DWK_CONV_QK_L2NORM: _bindgen_ty_3 = 8;
pub type _bindgen_ty_3 = ::core::ffi::c_uint;
pub const DWK_NORM_SILU: _bindgen_ty_4 = 1;
pub type _bindgen_ty_4 = ::core::ffi::c_uint;
pub const DWK_CHUNK: _bindgen_ty_5 = 64;
pub const DWK_RECORD_BYTES: _bindgen_ty_5 = 11776;
pub const DWK_SHORT_TOKENS: _bindgen_ty_5 = 16;
pub const DWK_BACKWARD_RECORD_BYTES: _bindgen_ty_5 = 17152;
pub const DWK_MAPS_BYTES: _bindgen_ty_5 = 704;
pub type _bindgen_ty_5 = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_divisor {
    pub multiplier: u32,
    pub shift: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_divisor"][::core::mem::size_of::<dwk_divisor>() - 8usize];
    ["Alignment of dwk_divisor"][::core::mem::align_of::<dwk_divisor>() - 4usize];
    ["Offset of field: dwk_divisor::multiplier"]
        [::core::mem::offset_of!(dwk_divisor, multiplier) - 0usize];
    ["Offset of field: dwk_divisor::shift"][::core::mem::offset_of!(dwk_divisor, shift) - 4usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_token_strides {
    pub sequence: i64,
    pub token: i64,
    pub head: i64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_token_strides"][::core::mem::size_of::<dwk_token_strides>() - 24usize];
    ["Alignment of dwk_token_strides"][::core::mem::align_of::<dwk_token_strides>() - 8usize];
    ["Offset of field: dwk_token_strides::sequence"]
        [::core::mem::offset_of!(dwk_token_strides, sequence) - 0usize];
    ["Offset of field: dwk_token_strides::token"]
        [::core::mem::offset_of!(dwk_token_strides, token) - 8usize];
    ["Offset of field: dwk_token_strides::head"]
        [::core::mem::offset_of!(dwk_token_strides, head) - 16usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_state_strides {
    pub sequence: i64,
    pub head: i64,
    pub row: i64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_state_strides"][::core::mem::size_of::<dwk_state_strides>() - 24usize];
    ["Alignment of dwk_state_strides"][::core::mem::align_of::<dwk_state_strides>() - 8usize];
    ["Offset of field: dwk_state_strides::sequence"]
        [::core::mem::offset_of!(dwk_state_strides, sequence) - 0usize];
    ["Offset of field: dwk_state_strides::head"]
        [::core::mem::offset_of!(dwk_state_strides, head) - 8usize];
    ["Offset of field: dwk_state_strides::row"]
        [::core::mem::offset_of!(dwk_state_strides, row) - 16usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_token_steps {
    pub sequence: u32,
    pub token: u32,
    pub head: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_token_steps"][::core::mem::size_of::<dwk_token_steps>() - 12usize];
    ["Alignment of dwk_token_steps"][::core::mem::align_of::<dwk_token_steps>() - 4usize];
    ["Offset of field: dwk_token_steps::sequence"]
        [::core::mem::offset_of!(dwk_token_steps, sequence) - 0usize];
    ["Offset of field: dwk_token_steps::token"]
        [::core::mem::offset_of!(dwk_token_steps, token) - 4usize];
    ["Offset of field: dwk_token_steps::head"]
        [::core::mem::offset_of!(dwk_token_steps, head) - 8usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_state_steps {
    pub sequence: u32,
    pub head: u32,
    pub row: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_state_steps"][::core::mem::size_of::<dwk_state_steps>() - 12usize];
    ["Alignment of dwk_state_steps"][::core::mem::align_of::<dwk_state_steps>() - 4usize];
    ["Offset of field: dwk_state_steps::sequence"]
        [::core::mem::offset_of!(dwk_state_steps, sequence) - 0usize];
    ["Offset of field: dwk_state_steps::head"]
        [::core::mem::offset_of!(dwk_state_steps, head) - 4usize];
    ["Offset of field: dwk_state_steps::row"]
        [::core::mem::offset_of!(dwk_state_steps, row) - 8usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_prefill_item {
    pub sequence: i32,
    pub first_chunk: i32,
    pub chunks: i32,
    pub summary: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_item"][::core::mem::size_of::<dwk_prefill_item>() - 16usize];
    ["Alignment of dwk_prefill_item"][::core::mem::align_of::<dwk_prefill_item>() - 4usize];
    ["Offset of field: dwk_prefill_item::sequence"]
        [::core::mem::offset_of!(dwk_prefill_item, sequence) - 0usize];
    ["Offset of field: dwk_prefill_item::first_chunk"]
        [::core::mem::offset_of!(dwk_prefill_item, first_chunk) - 4usize];
    ["Offset of field: dwk_prefill_item::chunks"]
        [::core::mem::offset_of!(dwk_prefill_item, chunks) - 8usize];
    ["Offset of field: dwk_prefill_item::summary"]
        [::core::mem::offset_of!(dwk_prefill_item, summary) - 12usize];
};
pub const DWK_ITEM_CONTINUES: _bindgen_ty_6 = 1073741824;
pub const DWK_ITEM_FOLLOWED: _bindgen_ty_6 = 1073741824;
pub const DWK_ITEM_HALF: _bindgen_ty_6 = 1073741824;
pub type _bindgen_ty_6 = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_plan {
    pub items: *mut dwk_prefill_item,
    pub chains: *mut i32,
    pub items_count: i32,
    pub chains_count: i32,
    pub segments: i32,
    pub workgroups: i32,
    pub compute_units: i32,
    pub most_summaries: i32,
    pub least_chunks: i32,
    pub start: i32,
    pub warm_up: i32,
    pub summaries: i32,
    pub worthwhile: i32,
    pub pieces: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_plan"][::core::mem::size_of::<dwk_prefill_plan>() - 64usize];
    ["Alignment of dwk_prefill_plan"][::core::mem::align_of::<dwk_prefill_plan>() - 8usize];
    ["Offset of field: dwk_prefill_plan::items"]
        [::core::mem::offset_of!(dwk_prefill_plan, items) - 0usize];
    ["Offset of field: dwk_prefill_plan::chains"]
        [::core::mem::offset_of!(dwk_prefill_plan, chains) - 8usize];
    ["Offset of field: dwk_prefill_plan::items_count"]
        [::core::mem::offset_of!(dwk_prefill_plan, items_count) - 16usize];
    ["Offset of field: dwk_prefill_plan::chains_count"]
        [::core::mem::offset_of!(dwk_prefill_plan, chains_count) - 20usize];
    ["Offset of field: dwk_prefill_plan::segments"]
        [::core::mem::offset_of!(dwk_prefill_plan, segments) - 24usize];
    ["Offset of field: dwk_prefill_plan::workgroups"]
        [::core::mem::offset_of!(dwk_prefill_plan, workgroups) - 28usize];
    ["Offset of field: dwk_prefill_plan::compute_units"]
        [::core::mem::offset_of!(dwk_prefill_plan, compute_units) - 32usize];
    ["Offset of field: dwk_prefill_plan::most_summaries"]
        [::core::mem::offset_of!(dwk_prefill_plan, most_summaries) - 36usize];
    ["Offset of field: dwk_prefill_plan::least_chunks"]
        [::core::mem::offset_of!(dwk_prefill_plan, least_chunks) - 40usize];
    ["Offset of field: dwk_prefill_plan::start"]
        [::core::mem::offset_of!(dwk_prefill_plan, start) - 44usize];
    ["Offset of field: dwk_prefill_plan::warm_up"]
        [::core::mem::offset_of!(dwk_prefill_plan, warm_up) - 48usize];
    ["Offset of field: dwk_prefill_plan::summaries"]
        [::core::mem::offset_of!(dwk_prefill_plan, summaries) - 52usize];
    ["Offset of field: dwk_prefill_plan::worthwhile"]
        [::core::mem::offset_of!(dwk_prefill_plan, worthwhile) - 56usize];
    ["Offset of field: dwk_prefill_plan::pieces"]
        [::core::mem::offset_of!(dwk_prefill_plan, pieces) - 60usize];
};
impl Default for dwk_prefill_plan {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_kernel_time {
    pub workgroups: i32,
    pub chunk: i32,
    pub each_more: i32,
    pub residency: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_kernel_time"][::core::mem::size_of::<dwk_kernel_time>() - 16usize];
    ["Alignment of dwk_kernel_time"][::core::mem::align_of::<dwk_kernel_time>() - 4usize];
    ["Offset of field: dwk_kernel_time::workgroups"]
        [::core::mem::offset_of!(dwk_kernel_time, workgroups) - 0usize];
    ["Offset of field: dwk_kernel_time::chunk"]
        [::core::mem::offset_of!(dwk_kernel_time, chunk) - 4usize];
    ["Offset of field: dwk_kernel_time::each_more"]
        [::core::mem::offset_of!(dwk_kernel_time, each_more) - 8usize];
    ["Offset of field: dwk_kernel_time::residency"]
        [::core::mem::offset_of!(dwk_kernel_time, residency) - 12usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct dwk_prefill_machine {
    pub scan: dwk_kernel_time,
    pub summarise: dwk_kernel_time,
    pub compute_units: i32,
    pub combine_workgroups: i32,
    pub combine: i32,
    pub launch: i32,
    pub combine_launch: i32,
    pub shared_start: i32,
    pub summarised: i32,
    pub worthwhile: i32,
    pub fewer: i32,
    pub filling: i32,
    pub most_summaries: i32,
    pub halves: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_machine"][::core::mem::size_of::<dwk_prefill_machine>() - 80usize];
    ["Alignment of dwk_prefill_machine"][::core::mem::align_of::<dwk_prefill_machine>() - 4usize];
    ["Offset of field: dwk_prefill_machine::scan"]
        [::core::mem::offset_of!(dwk_prefill_machine, scan) - 0usize];
    ["Offset of field: dwk_prefill_machine::summarise"]
        [::core::mem::offset_of!(dwk_prefill_machine, summarise) - 16usize];
    ["Offset of field: dwk_prefill_machine::compute_units"]
        [::core::mem::offset_of!(dwk_prefill_machine, compute_units) - 32usize];
    ["Offset of field: dwk_prefill_machine::combine_workgroups"]
        [::core::mem::offset_of!(dwk_prefill_machine, combine_workgroups) - 36usize];
    ["Offset of field: dwk_prefill_machine::combine"]
        [::core::mem::offset_of!(dwk_prefill_machine, combine) - 40usize];
    ["Offset of field: dwk_prefill_machine::launch"]
        [::core::mem::offset_of!(dwk_prefill_machine, launch) - 44usize];
    ["Offset of field: dwk_prefill_machine::combine_launch"]
        [::core::mem::offset_of!(dwk_prefill_machine, combine_launch) - 48usize];
    ["Offset of field: dwk_prefill_machine::shared_start"]
        [::core::mem::offset_of!(dwk_prefill_machine, shared_start) - 52usize];
    ["Offset of field: dwk_prefill_machine::summarised"]
        [::core::mem::offset_of!(dwk_prefill_machine, summarised) - 56usize];
    ["Offset of field: dwk_prefill_machine::worthwhile"]
        [::core::mem::offset_of!(dwk_prefill_machine, worthwhile) - 60usize];
    ["Offset of field: dwk_prefill_machine::fewer"]
        [::core::mem::offset_of!(dwk_prefill_machine, fewer) - 64usize];
    ["Offset of field: dwk_prefill_machine::filling"]
        [::core::mem::offset_of!(dwk_prefill_machine, filling) - 68usize];
    ["Offset of field: dwk_prefill_machine::most_summaries"]
        [::core::mem::offset_of!(dwk_prefill_machine, most_summaries) - 72usize];
    ["Offset of field: dwk_prefill_machine::halves"]
        [::core::mem::offset_of!(dwk_prefill_machine, halves) - 76usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_choice {
    pub split_items: *mut dwk_prefill_item,
    pub samples: *mut i32,
    pub compute_units: i32,
    pub fused_workgroups: i32,
    pub fused_chunk: i32,
    pub fused_start: i32,
    pub scan_workgroups: i32,
    pub scan_chunk: i32,
    pub scan_start: i32,
    pub prepare_start: i32,
    pub prepare_chunk: i32,
    pub room: i32,
    pub least_chunks: i32,
    pub start: i32,
    pub warm_up: i32,
    pub least_time: i32,
    pub without_work: i32,
    pub wait_time: i32,
    pub cut_chunk: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_choice"][::core::mem::size_of::<dwk_prefill_choice>() - 88usize];
    ["Alignment of dwk_prefill_choice"][::core::mem::align_of::<dwk_prefill_choice>() - 8usize];
    ["Offset of field: dwk_prefill_choice::split_items"]
        [::core::mem::offset_of!(dwk_prefill_choice, split_items) - 0usize];
    ["Offset of field: dwk_prefill_choice::samples"]
        [::core::mem::offset_of!(dwk_prefill_choice, samples) - 8usize];
    ["Offset of field: dwk_prefill_choice::compute_units"]
        [::core::mem::offset_of!(dwk_prefill_choice, compute_units) - 16usize];
    ["Offset of field: dwk_prefill_choice::fused_workgroups"]
        [::core::mem::offset_of!(dwk_prefill_choice, fused_workgroups) - 20usize];
    ["Offset of field: dwk_prefill_choice::fused_chunk"]
        [::core::mem::offset_of!(dwk_prefill_choice, fused_chunk) - 24usize];
    ["Offset of field: dwk_prefill_choice::fused_start"]
        [::core::mem::offset_of!(dwk_prefill_choice, fused_start) - 28usize];
    ["Offset of field: dwk_prefill_choice::scan_workgroups"]
        [::core::mem::offset_of!(dwk_prefill_choice, scan_workgroups) - 32usize];
    ["Offset of field: dwk_prefill_choice::scan_chunk"]
        [::core::mem::offset_of!(dwk_prefill_choice, scan_chunk) - 36usize];
    ["Offset of field: dwk_prefill_choice::scan_start"]
        [::core::mem::offset_of!(dwk_prefill_choice, scan_start) - 40usize];
    ["Offset of field: dwk_prefill_choice::prepare_start"]
        [::core::mem::offset_of!(dwk_prefill_choice, prepare_start) - 44usize];
    ["Offset of field: dwk_prefill_choice::prepare_chunk"]
        [::core::mem::offset_of!(dwk_prefill_choice, prepare_chunk) - 48usize];
    ["Offset of field: dwk_prefill_choice::room"]
        [::core::mem::offset_of!(dwk_prefill_choice, room) - 52usize];
    ["Offset of field: dwk_prefill_choice::least_chunks"]
        [::core::mem::offset_of!(dwk_prefill_choice, least_chunks) - 56usize];
    ["Offset of field: dwk_prefill_choice::start"]
        [::core::mem::offset_of!(dwk_prefill_choice, start) - 60usize];
    ["Offset of field: dwk_prefill_choice::warm_up"]
        [::core::mem::offset_of!(dwk_prefill_choice, warm_up) - 64usize];
    ["Offset of field: dwk_prefill_choice::least_time"]
        [::core::mem::offset_of!(dwk_prefill_choice, least_time) - 68usize];
    ["Offset of field: dwk_prefill_choice::without_work"]
        [::core::mem::offset_of!(dwk_prefill_choice, without_work) - 72usize];
    ["Offset of field: dwk_prefill_choice::wait_time"]
        [::core::mem::offset_of!(dwk_prefill_choice, wait_time) - 76usize];
    ["Offset of field: dwk_prefill_choice::cut_chunk"]
        [::core::mem::offset_of!(dwk_prefill_choice, cut_chunk) - 80usize];
    ["Offset of field: dwk_prefill_choice::pad0"]
        [::core::mem::offset_of!(dwk_prefill_choice, pad0) - 84usize];
};
impl Default for dwk_prefill_choice {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_lengths_args {
    pub cu_seqlens: *const ::core::ffi::c_void,
    pub checked: *mut i32,
    pub status: *mut u32,
    pub rest: *mut i32,
    pub sequences: i32,
    pub tokens: i32,
    pub wide: i32,
    pub decodes: i32,
    pub plan: dwk_prefill_plan,
    pub choice: dwk_prefill_choice,
    pub machine: dwk_prefill_machine,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_lengths_args"]
        [::core::mem::size_of::<dwk_prefill_lengths_args>() - 280usize];
    ["Alignment of dwk_prefill_lengths_args"]
        [::core::mem::align_of::<dwk_prefill_lengths_args>() - 8usize];
    ["Offset of field: dwk_prefill_lengths_args::cu_seqlens"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, cu_seqlens) - 0usize];
    ["Offset of field: dwk_prefill_lengths_args::checked"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, checked) - 8usize];
    ["Offset of field: dwk_prefill_lengths_args::status"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, status) - 16usize];
    ["Offset of field: dwk_prefill_lengths_args::rest"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, rest) - 24usize];
    ["Offset of field: dwk_prefill_lengths_args::sequences"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, sequences) - 32usize];
    ["Offset of field: dwk_prefill_lengths_args::tokens"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, tokens) - 36usize];
    ["Offset of field: dwk_prefill_lengths_args::wide"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, wide) - 40usize];
    ["Offset of field: dwk_prefill_lengths_args::decodes"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, decodes) - 44usize];
    ["Offset of field: dwk_prefill_lengths_args::plan"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, plan) - 48usize];
    ["Offset of field: dwk_prefill_lengths_args::choice"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, choice) - 112usize];
    ["Offset of field: dwk_prefill_lengths_args::machine"]
        [::core::mem::offset_of!(dwk_prefill_lengths_args, machine) - 200usize];
};
impl Default for dwk_prefill_lengths_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_prepare_args {
    pub q: *const ::core::ffi::c_void,
    pub k: *const ::core::ffi::c_void,
    pub g: *const ::core::ffi::c_void,
    pub beta: *const ::core::ffi::c_void,
    pub a_log: *const ::core::ffi::c_void,
    pub dt_bias: *const ::core::ffi::c_void,
    pub o: *mut ::core::ffi::c_void,
    pub cu_seqlens: *const i32,
    pub records: *mut ::core::ffi::c_void,
    pub retained: *mut f32,
    pub read_slots: *const i32,
    pub write_slots: *const i32,
    pub q_strides: dwk_token_strides,
    pub k_strides: dwk_token_strides,
    pub g_strides: dwk_token_strides,
    pub beta_strides: dwk_token_strides,
    pub o_strides: dwk_token_strides,
    pub a_log_stride: i64,
    pub dt_bias_stride: i64,
    pub sequences: i32,
    pub tokens: i32,
    pub key_heads: i32,
    pub value_heads: i32,
    pub key_dim: i32,
    pub value_dim: i32,
    pub flags: u32,
    pub g_type: i32,
    pub beta_type: i32,
    pub a_log_type: i32,
    pub dt_bias_type: i32,
    pub head_groups: i32,
    pub group_heads: i32,
    pub dies: i32,
    pub slots: i32,
    pub least_tokens: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_prepare_args"]
        [::core::mem::size_of::<dwk_prefill_prepare_args>() - 296usize];
    ["Alignment of dwk_prefill_prepare_args"]
        [::core::mem::align_of::<dwk_prefill_prepare_args>() - 8usize];
    ["Offset of field: dwk_prefill_prepare_args::q"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, q) - 0usize];
    ["Offset of field: dwk_prefill_prepare_args::k"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, k) - 8usize];
    ["Offset of field: dwk_prefill_prepare_args::g"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, g) - 16usize];
    ["Offset of field: dwk_prefill_prepare_args::beta"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, beta) - 24usize];
    ["Offset of field: dwk_prefill_prepare_args::a_log"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, a_log) - 32usize];
    ["Offset of field: dwk_prefill_prepare_args::dt_bias"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, dt_bias) - 40usize];
    ["Offset of field: dwk_prefill_prepare_args::o"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, o) - 48usize];
    ["Offset of field: dwk_prefill_prepare_args::cu_seqlens"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, cu_seqlens) - 56usize];
    ["Offset of field: dwk_prefill_prepare_args::records"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, records) - 64usize];
    ["Offset of field: dwk_prefill_prepare_args::retained"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, retained) - 72usize];
    ["Offset of field: dwk_prefill_prepare_args::read_slots"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, read_slots) - 80usize];
    ["Offset of field: dwk_prefill_prepare_args::write_slots"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, write_slots) - 88usize];
    ["Offset of field: dwk_prefill_prepare_args::q_strides"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, q_strides) - 96usize];
    ["Offset of field: dwk_prefill_prepare_args::k_strides"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, k_strides) - 120usize];
    ["Offset of field: dwk_prefill_prepare_args::g_strides"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, g_strides) - 144usize];
    ["Offset of field: dwk_prefill_prepare_args::beta_strides"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, beta_strides) - 168usize];
    ["Offset of field: dwk_prefill_prepare_args::o_strides"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, o_strides) - 192usize];
    ["Offset of field: dwk_prefill_prepare_args::a_log_stride"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, a_log_stride) - 216usize];
    ["Offset of field: dwk_prefill_prepare_args::dt_bias_stride"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, dt_bias_stride) - 224usize];
    ["Offset of field: dwk_prefill_prepare_args::sequences"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, sequences) - 232usize];
    ["Offset of field: dwk_prefill_prepare_args::tokens"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, tokens) - 236usize];
    ["Offset of field: dwk_prefill_prepare_args::key_heads"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, key_heads) - 240usize];
    ["Offset of field: dwk_prefill_prepare_args::value_heads"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, value_heads) - 244usize];
    ["Offset of field: dwk_prefill_prepare_args::key_dim"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, key_dim) - 248usize];
    ["Offset of field: dwk_prefill_prepare_args::value_dim"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, value_dim) - 252usize];
    ["Offset of field: dwk_prefill_prepare_args::flags"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, flags) - 256usize];
    ["Offset of field: dwk_prefill_prepare_args::g_type"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, g_type) - 260usize];
    ["Offset of field: dwk_prefill_prepare_args::beta_type"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, beta_type) - 264usize];
    ["Offset of field: dwk_prefill_prepare_args::a_log_type"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, a_log_type) - 268usize];
    ["Offset of field: dwk_prefill_prepare_args::dt_bias_type"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, dt_bias_type) - 272usize];
    ["Offset of field: dwk_prefill_prepare_args::head_groups"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, head_groups) - 276usize];
    ["Offset of field: dwk_prefill_prepare_args::group_heads"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, group_heads) - 280usize];
    ["Offset of field: dwk_prefill_prepare_args::dies"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, dies) - 284usize];
    ["Offset of field: dwk_prefill_prepare_args::slots"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, slots) - 288usize];
    ["Offset of field: dwk_prefill_prepare_args::least_tokens"]
        [::core::mem::offset_of!(dwk_prefill_prepare_args, least_tokens) - 292usize];
};
impl Default for dwk_prefill_prepare_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_scan_args {
    pub q: *const ::core::ffi::c_void,
    pub k: *const ::core::ffi::c_void,
    pub v: *const ::core::ffi::c_void,
    pub o: *mut ::core::ffi::c_void,
    pub initial_state: *const ::core::ffi::c_void,
    pub has_initial_state: *const u8,
    pub final_state: *mut ::core::ffi::c_void,
    pub read_slots: *const i32,
    pub write_slots: *const i32,
    pub snapshots: *mut ::core::ffi::c_void,
    pub snapshot_slots: *const i32,
    pub cu_seqlens: *const i32,
    pub records: *const ::core::ffi::c_void,
    pub items: *const dwk_prefill_item,
    pub states: *mut f32,
    pub retained: *mut f32,
    pub forgotten: *mut i32,
    pub q_strides: dwk_token_strides,
    pub k_strides: dwk_token_strides,
    pub v_strides: dwk_token_strides,
    pub o_strides: dwk_token_strides,
    pub initial_strides: dwk_state_strides,
    pub final_strides: dwk_state_strides,
    pub snapshot_strides: dwk_state_strides,
    pub sequences: i32,
    pub key_heads: i32,
    pub value_heads: i32,
    pub key_dim: i32,
    pub value_dim: i32,
    pub flags: u32,
    pub scale: f32,
    pub initial_type: i32,
    pub final_type: i32,
    pub slabs: i32,
    pub tokens: i32,
    pub items_count: i32,
    pub summaries: i32,
    pub dies: i32,
    pub slots: i32,
    pub snapshot_count: i32,
    pub snapshot_type: i32,
    pub least_tokens: i32,
    pub pieces: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_scan_args"][::core::mem::size_of::<dwk_prefill_scan_args>() - 384usize];
    ["Alignment of dwk_prefill_scan_args"]
        [::core::mem::align_of::<dwk_prefill_scan_args>() - 8usize];
    ["Offset of field: dwk_prefill_scan_args::q"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, q) - 0usize];
    ["Offset of field: dwk_prefill_scan_args::k"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, k) - 8usize];
    ["Offset of field: dwk_prefill_scan_args::v"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, v) - 16usize];
    ["Offset of field: dwk_prefill_scan_args::o"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, o) - 24usize];
    ["Offset of field: dwk_prefill_scan_args::initial_state"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, initial_state) - 32usize];
    ["Offset of field: dwk_prefill_scan_args::has_initial_state"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, has_initial_state) - 40usize];
    ["Offset of field: dwk_prefill_scan_args::final_state"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, final_state) - 48usize];
    ["Offset of field: dwk_prefill_scan_args::read_slots"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, read_slots) - 56usize];
    ["Offset of field: dwk_prefill_scan_args::write_slots"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, write_slots) - 64usize];
    ["Offset of field: dwk_prefill_scan_args::snapshots"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, snapshots) - 72usize];
    ["Offset of field: dwk_prefill_scan_args::snapshot_slots"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, snapshot_slots) - 80usize];
    ["Offset of field: dwk_prefill_scan_args::cu_seqlens"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, cu_seqlens) - 88usize];
    ["Offset of field: dwk_prefill_scan_args::records"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, records) - 96usize];
    ["Offset of field: dwk_prefill_scan_args::items"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, items) - 104usize];
    ["Offset of field: dwk_prefill_scan_args::states"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, states) - 112usize];
    ["Offset of field: dwk_prefill_scan_args::retained"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, retained) - 120usize];
    ["Offset of field: dwk_prefill_scan_args::forgotten"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, forgotten) - 128usize];
    ["Offset of field: dwk_prefill_scan_args::q_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, q_strides) - 136usize];
    ["Offset of field: dwk_prefill_scan_args::k_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, k_strides) - 160usize];
    ["Offset of field: dwk_prefill_scan_args::v_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, v_strides) - 184usize];
    ["Offset of field: dwk_prefill_scan_args::o_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, o_strides) - 208usize];
    ["Offset of field: dwk_prefill_scan_args::initial_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, initial_strides) - 232usize];
    ["Offset of field: dwk_prefill_scan_args::final_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, final_strides) - 256usize];
    ["Offset of field: dwk_prefill_scan_args::snapshot_strides"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, snapshot_strides) - 280usize];
    ["Offset of field: dwk_prefill_scan_args::sequences"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, sequences) - 304usize];
    ["Offset of field: dwk_prefill_scan_args::key_heads"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, key_heads) - 308usize];
    ["Offset of field: dwk_prefill_scan_args::value_heads"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, value_heads) - 312usize];
    ["Offset of field: dwk_prefill_scan_args::key_dim"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, key_dim) - 316usize];
    ["Offset of field: dwk_prefill_scan_args::value_dim"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, value_dim) - 320usize];
    ["Offset of field: dwk_prefill_scan_args::flags"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, flags) - 324usize];
    ["Offset of field: dwk_prefill_scan_args::scale"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, scale) - 328usize];
    ["Offset of field: dwk_prefill_scan_args::initial_type"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, initial_type) - 332usize];
    ["Offset of field: dwk_prefill_scan_args::final_type"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, final_type) - 336usize];
    ["Offset of field: dwk_prefill_scan_args::slabs"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, slabs) - 340usize];
    ["Offset of field: dwk_prefill_scan_args::tokens"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, tokens) - 344usize];
    ["Offset of field: dwk_prefill_scan_args::items_count"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, items_count) - 348usize];
    ["Offset of field: dwk_prefill_scan_args::summaries"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, summaries) - 352usize];
    ["Offset of field: dwk_prefill_scan_args::dies"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, dies) - 356usize];
    ["Offset of field: dwk_prefill_scan_args::slots"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, slots) - 360usize];
    ["Offset of field: dwk_prefill_scan_args::snapshot_count"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, snapshot_count) - 364usize];
    ["Offset of field: dwk_prefill_scan_args::snapshot_type"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, snapshot_type) - 368usize];
    ["Offset of field: dwk_prefill_scan_args::least_tokens"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, least_tokens) - 372usize];
    ["Offset of field: dwk_prefill_scan_args::pieces"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, pieces) - 376usize];
    ["Offset of field: dwk_prefill_scan_args::pad0"]
        [::core::mem::offset_of!(dwk_prefill_scan_args, pad0) - 380usize];
};
impl Default for dwk_prefill_scan_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_by_gates {
    pub items: *const dwk_prefill_item,
    pub chains: *const i32,
    pub split_items: *mut dwk_prefill_item,
    pub split_chains: *mut i32,
    pub samples: *const i32,
    pub items_count: i32,
    pub chains_count: i32,
    pub soon: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_by_gates"][::core::mem::size_of::<dwk_prefill_by_gates>() - 56usize];
    ["Alignment of dwk_prefill_by_gates"][::core::mem::align_of::<dwk_prefill_by_gates>() - 8usize];
    ["Offset of field: dwk_prefill_by_gates::items"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, items) - 0usize];
    ["Offset of field: dwk_prefill_by_gates::chains"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, chains) - 8usize];
    ["Offset of field: dwk_prefill_by_gates::split_items"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, split_items) - 16usize];
    ["Offset of field: dwk_prefill_by_gates::split_chains"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, split_chains) - 24usize];
    ["Offset of field: dwk_prefill_by_gates::samples"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, samples) - 32usize];
    ["Offset of field: dwk_prefill_by_gates::items_count"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, items_count) - 40usize];
    ["Offset of field: dwk_prefill_by_gates::chains_count"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, chains_count) - 44usize];
    ["Offset of field: dwk_prefill_by_gates::soon"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, soon) - 48usize];
    ["Offset of field: dwk_prefill_by_gates::pad0"]
        [::core::mem::offset_of!(dwk_prefill_by_gates, pad0) - 52usize];
};
impl Default for dwk_prefill_by_gates {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_fused_args {
    pub prepare: dwk_prefill_prepare_args,
    pub scan: dwk_prefill_scan_args,
    pub split_items: *const dwk_prefill_item,
    pub preparing_groups: i32,
    pub warm_up: i32,
    pub by_gates: dwk_prefill_by_gates,
    pub walkers: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_fused_args"][::core::mem::size_of::<dwk_prefill_fused_args>() - 760usize];
    ["Alignment of dwk_prefill_fused_args"]
        [::core::mem::align_of::<dwk_prefill_fused_args>() - 8usize];
    ["Offset of field: dwk_prefill_fused_args::prepare"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, prepare) - 0usize];
    ["Offset of field: dwk_prefill_fused_args::scan"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, scan) - 296usize];
    ["Offset of field: dwk_prefill_fused_args::split_items"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, split_items) - 680usize];
    ["Offset of field: dwk_prefill_fused_args::preparing_groups"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, preparing_groups) - 688usize];
    ["Offset of field: dwk_prefill_fused_args::warm_up"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, warm_up) - 692usize];
    ["Offset of field: dwk_prefill_fused_args::by_gates"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, by_gates) - 696usize];
    ["Offset of field: dwk_prefill_fused_args::walkers"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, walkers) - 752usize];
    ["Offset of field: dwk_prefill_fused_args::pad0"]
        [::core::mem::offset_of!(dwk_prefill_fused_args, pad0) - 756usize];
};
impl Default for dwk_prefill_fused_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_short_args {
    pub prepare: dwk_prefill_prepare_args,
    pub scan: dwk_prefill_scan_args,
    pub items: *const i32,
    pub clears: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_short_args"][::core::mem::size_of::<dwk_prefill_short_args>() - 696usize];
    ["Alignment of dwk_prefill_short_args"]
        [::core::mem::align_of::<dwk_prefill_short_args>() - 8usize];
    ["Offset of field: dwk_prefill_short_args::prepare"]
        [::core::mem::offset_of!(dwk_prefill_short_args, prepare) - 0usize];
    ["Offset of field: dwk_prefill_short_args::scan"]
        [::core::mem::offset_of!(dwk_prefill_short_args, scan) - 296usize];
    ["Offset of field: dwk_prefill_short_args::items"]
        [::core::mem::offset_of!(dwk_prefill_short_args, items) - 680usize];
    ["Offset of field: dwk_prefill_short_args::clears"]
        [::core::mem::offset_of!(dwk_prefill_short_args, clears) - 688usize];
    ["Offset of field: dwk_prefill_short_args::pad0"]
        [::core::mem::offset_of!(dwk_prefill_short_args, pad0) - 692usize];
};
impl Default for dwk_prefill_short_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_combine_args {
    pub states: *mut f32,
    pub forgotten: *const i32,
    pub chains: *const i32,
    pub chains_count: i32,
    pub value_heads: i32,
    pub key_dim: i32,
    pub value_dim: i32,
    pub slabs: i32,
    pub summaries: i32,
    pub dies: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_combine_args"]
        [::core::mem::size_of::<dwk_prefill_combine_args>() - 56usize];
    ["Alignment of dwk_prefill_combine_args"]
        [::core::mem::align_of::<dwk_prefill_combine_args>() - 8usize];
    ["Offset of field: dwk_prefill_combine_args::states"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, states) - 0usize];
    ["Offset of field: dwk_prefill_combine_args::forgotten"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, forgotten) - 8usize];
    ["Offset of field: dwk_prefill_combine_args::chains"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, chains) - 16usize];
    ["Offset of field: dwk_prefill_combine_args::chains_count"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, chains_count) - 24usize];
    ["Offset of field: dwk_prefill_combine_args::value_heads"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, value_heads) - 28usize];
    ["Offset of field: dwk_prefill_combine_args::key_dim"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, key_dim) - 32usize];
    ["Offset of field: dwk_prefill_combine_args::value_dim"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, value_dim) - 36usize];
    ["Offset of field: dwk_prefill_combine_args::slabs"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, slabs) - 40usize];
    ["Offset of field: dwk_prefill_combine_args::summaries"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, summaries) - 44usize];
    ["Offset of field: dwk_prefill_combine_args::dies"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, dies) - 48usize];
    ["Offset of field: dwk_prefill_combine_args::pad0"]
        [::core::mem::offset_of!(dwk_prefill_combine_args, pad0) - 52usize];
};
impl Default for dwk_prefill_combine_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_backward_args {
    pub prepare: dwk_prefill_prepare_args,
    pub v: *const ::core::ffi::c_void,
    pub d_o: *const ::core::ffi::c_void,
    pub initial_state: *const ::core::ffi::c_void,
    pub has_initial_state: *const u8,
    pub d_final: *const ::core::ffi::c_void,
    pub d_initial: *mut ::core::ffi::c_void,
    pub d_q: *mut ::core::ffi::c_void,
    pub d_k: *mut ::core::ffi::c_void,
    pub d_v: *mut ::core::ffi::c_void,
    pub d_g: *mut ::core::ffi::c_void,
    pub d_beta: *mut ::core::ffi::c_void,
    pub d_a_log: *mut f32,
    pub d_dt_bias: *mut f32,
    pub states: *mut ::core::ffi::c_char,
    pub d_states: *mut ::core::ffi::c_char,
    pub errors: *mut ::core::ffi::c_char,
    pub d_updates: *mut ::core::ffi::c_char,
    pub partials: *mut f32,
    pub items: *const dwk_prefill_item,
    pub boundaries: *mut f32,
    pub forgotten: *mut i32,
    pub v_strides: dwk_token_strides,
    pub d_o_strides: dwk_token_strides,
    pub d_q_strides: dwk_token_strides,
    pub d_k_strides: dwk_token_strides,
    pub d_v_strides: dwk_token_strides,
    pub d_g_strides: dwk_token_strides,
    pub d_beta_strides: dwk_token_strides,
    pub initial_strides: dwk_state_strides,
    pub d_final_strides: dwk_state_strides,
    pub d_initial_strides: dwk_state_strides,
    pub d_a_log_stride: i64,
    pub d_dt_bias_stride: i64,
    pub initial_type: i32,
    pub d_final_type: i32,
    pub d_initial_type: i32,
    pub d_g_type: i32,
    pub d_beta_type: i32,
    pub scale: f32,
    pub unit: f32,
    pub per_unit: f32,
    pub d_final_value_major: u32,
    pub d_initial_value_major: u32,
    pub records: i32,
    pub summaries: i32,
    pub mirror: i32,
    pub blocks: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_backward_args"]
        [::core::mem::size_of::<dwk_prefill_backward_args>() - 776usize];
    ["Alignment of dwk_prefill_backward_args"]
        [::core::mem::align_of::<dwk_prefill_backward_args>() - 8usize];
    ["Offset of field: dwk_prefill_backward_args::prepare"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, prepare) - 0usize];
    ["Offset of field: dwk_prefill_backward_args::v"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, v) - 296usize];
    ["Offset of field: dwk_prefill_backward_args::d_o"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_o) - 304usize];
    ["Offset of field: dwk_prefill_backward_args::initial_state"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, initial_state) - 312usize];
    ["Offset of field: dwk_prefill_backward_args::has_initial_state"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, has_initial_state) - 320usize];
    ["Offset of field: dwk_prefill_backward_args::d_final"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_final) - 328usize];
    ["Offset of field: dwk_prefill_backward_args::d_initial"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_initial) - 336usize];
    ["Offset of field: dwk_prefill_backward_args::d_q"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_q) - 344usize];
    ["Offset of field: dwk_prefill_backward_args::d_k"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_k) - 352usize];
    ["Offset of field: dwk_prefill_backward_args::d_v"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_v) - 360usize];
    ["Offset of field: dwk_prefill_backward_args::d_g"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_g) - 368usize];
    ["Offset of field: dwk_prefill_backward_args::d_beta"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_beta) - 376usize];
    ["Offset of field: dwk_prefill_backward_args::d_a_log"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_a_log) - 384usize];
    ["Offset of field: dwk_prefill_backward_args::d_dt_bias"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_dt_bias) - 392usize];
    ["Offset of field: dwk_prefill_backward_args::states"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, states) - 400usize];
    ["Offset of field: dwk_prefill_backward_args::d_states"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_states) - 408usize];
    ["Offset of field: dwk_prefill_backward_args::errors"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, errors) - 416usize];
    ["Offset of field: dwk_prefill_backward_args::d_updates"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_updates) - 424usize];
    ["Offset of field: dwk_prefill_backward_args::partials"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, partials) - 432usize];
    ["Offset of field: dwk_prefill_backward_args::items"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, items) - 440usize];
    ["Offset of field: dwk_prefill_backward_args::boundaries"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, boundaries) - 448usize];
    ["Offset of field: dwk_prefill_backward_args::forgotten"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, forgotten) - 456usize];
    ["Offset of field: dwk_prefill_backward_args::v_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, v_strides) - 464usize];
    ["Offset of field: dwk_prefill_backward_args::d_o_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_o_strides) - 488usize];
    ["Offset of field: dwk_prefill_backward_args::d_q_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_q_strides) - 512usize];
    ["Offset of field: dwk_prefill_backward_args::d_k_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_k_strides) - 536usize];
    ["Offset of field: dwk_prefill_backward_args::d_v_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_v_strides) - 560usize];
    ["Offset of field: dwk_prefill_backward_args::d_g_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_g_strides) - 584usize];
    ["Offset of field: dwk_prefill_backward_args::d_beta_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_beta_strides) - 608usize];
    ["Offset of field: dwk_prefill_backward_args::initial_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, initial_strides) - 632usize];
    ["Offset of field: dwk_prefill_backward_args::d_final_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_final_strides) - 656usize];
    ["Offset of field: dwk_prefill_backward_args::d_initial_strides"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_initial_strides) - 680usize];
    ["Offset of field: dwk_prefill_backward_args::d_a_log_stride"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_a_log_stride) - 704usize];
    ["Offset of field: dwk_prefill_backward_args::d_dt_bias_stride"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_dt_bias_stride) - 712usize];
    ["Offset of field: dwk_prefill_backward_args::initial_type"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, initial_type) - 720usize];
    ["Offset of field: dwk_prefill_backward_args::d_final_type"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_final_type) - 724usize];
    ["Offset of field: dwk_prefill_backward_args::d_initial_type"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_initial_type) - 728usize];
    ["Offset of field: dwk_prefill_backward_args::d_g_type"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_g_type) - 732usize];
    ["Offset of field: dwk_prefill_backward_args::d_beta_type"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_beta_type) - 736usize];
    ["Offset of field: dwk_prefill_backward_args::scale"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, scale) - 740usize];
    ["Offset of field: dwk_prefill_backward_args::unit"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, unit) - 744usize];
    ["Offset of field: dwk_prefill_backward_args::per_unit"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, per_unit) - 748usize];
    ["Offset of field: dwk_prefill_backward_args::d_final_value_major"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_final_value_major) - 752usize];
    ["Offset of field: dwk_prefill_backward_args::d_initial_value_major"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, d_initial_value_major) - 756usize];
    ["Offset of field: dwk_prefill_backward_args::records"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, records) - 760usize];
    ["Offset of field: dwk_prefill_backward_args::summaries"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, summaries) - 764usize];
    ["Offset of field: dwk_prefill_backward_args::mirror"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, mirror) - 768usize];
    ["Offset of field: dwk_prefill_backward_args::blocks"]
        [::core::mem::offset_of!(dwk_prefill_backward_args, blocks) - 772usize];
};
impl Default for dwk_prefill_backward_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_prefill_collect_args {
    pub gathered: *const ::core::ffi::c_void,
    pub order: *const i32,
    pub states: *mut f32,
    pub forgotten: *mut i32,
    pub rank_bytes: i64,
    pub ranks: i32,
    pub rank_slots: i32,
    pub value_heads: i32,
    pub words: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_prefill_collect_args"]
        [::core::mem::size_of::<dwk_prefill_collect_args>() - 56usize];
    ["Alignment of dwk_prefill_collect_args"]
        [::core::mem::align_of::<dwk_prefill_collect_args>() - 8usize];
    ["Offset of field: dwk_prefill_collect_args::gathered"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, gathered) - 0usize];
    ["Offset of field: dwk_prefill_collect_args::order"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, order) - 8usize];
    ["Offset of field: dwk_prefill_collect_args::states"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, states) - 16usize];
    ["Offset of field: dwk_prefill_collect_args::forgotten"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, forgotten) - 24usize];
    ["Offset of field: dwk_prefill_collect_args::rank_bytes"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, rank_bytes) - 32usize];
    ["Offset of field: dwk_prefill_collect_args::ranks"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, ranks) - 40usize];
    ["Offset of field: dwk_prefill_collect_args::rank_slots"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, rank_slots) - 44usize];
    ["Offset of field: dwk_prefill_collect_args::value_heads"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, value_heads) - 48usize];
    ["Offset of field: dwk_prefill_collect_args::words"]
        [::core::mem::offset_of!(dwk_prefill_collect_args, words) - 52usize];
};
impl Default for dwk_prefill_collect_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_gate_args {
    pub a: *const ::core::ffi::c_void,
    pub b: *const ::core::ffi::c_void,
    pub a_log: *const ::core::ffi::c_void,
    pub dt_bias: *const ::core::ffi::c_void,
    pub g: *mut f32,
    pub beta: *mut f32,
    pub a_strides: dwk_token_strides,
    pub b_strides: dwk_token_strides,
    pub g_strides: dwk_token_strides,
    pub beta_strides: dwk_token_strides,
    pub a_block: i64,
    pub b_block: i64,
    pub a_log_stride: i64,
    pub dt_bias_stride: i64,
    pub tokens: i64,
    pub value_heads: i32,
    pub block_heads: i32,
    pub flags: u32,
    pub a_type: i32,
    pub b_type: i32,
    pub a_log_type: i32,
    pub dt_bias_type: i32,
    pub groups: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_gate_args"][::core::mem::size_of::<dwk_gate_args>() - 216usize];
    ["Alignment of dwk_gate_args"][::core::mem::align_of::<dwk_gate_args>() - 8usize];
    ["Offset of field: dwk_gate_args::a"][::core::mem::offset_of!(dwk_gate_args, a) - 0usize];
    ["Offset of field: dwk_gate_args::b"][::core::mem::offset_of!(dwk_gate_args, b) - 8usize];
    ["Offset of field: dwk_gate_args::a_log"]
        [::core::mem::offset_of!(dwk_gate_args, a_log) - 16usize];
    ["Offset of field: dwk_gate_args::dt_bias"]
        [::core::mem::offset_of!(dwk_gate_args, dt_bias) - 24usize];
    ["Offset of field: dwk_gate_args::g"][::core::mem::offset_of!(dwk_gate_args, g) - 32usize];
    ["Offset of field: dwk_gate_args::beta"]
        [::core::mem::offset_of!(dwk_gate_args, beta) - 40usize];
    ["Offset of field: dwk_gate_args::a_strides"]
        [::core::mem::offset_of!(dwk_gate_args, a_strides) - 48usize];
    ["Offset of field: dwk_gate_args::b_strides"]
        [::core::mem::offset_of!(dwk_gate_args, b_strides) - 72usize];
    ["Offset of field: dwk_gate_args::g_strides"]
        [::core::mem::offset_of!(dwk_gate_args, g_strides) - 96usize];
    ["Offset of field: dwk_gate_args::beta_strides"]
        [::core::mem::offset_of!(dwk_gate_args, beta_strides) - 120usize];
    ["Offset of field: dwk_gate_args::a_block"]
        [::core::mem::offset_of!(dwk_gate_args, a_block) - 144usize];
    ["Offset of field: dwk_gate_args::b_block"]
        [::core::mem::offset_of!(dwk_gate_args, b_block) - 152usize];
    ["Offset of field: dwk_gate_args::a_log_stride"]
        [::core::mem::offset_of!(dwk_gate_args, a_log_stride) - 160usize];
    ["Offset of field: dwk_gate_args::dt_bias_stride"]
        [::core::mem::offset_of!(dwk_gate_args, dt_bias_stride) - 168usize];
    ["Offset of field: dwk_gate_args::tokens"]
        [::core::mem::offset_of!(dwk_gate_args, tokens) - 176usize];
    ["Offset of field: dwk_gate_args::value_heads"]
        [::core::mem::offset_of!(dwk_gate_args, value_heads) - 184usize];
    ["Offset of field: dwk_gate_args::block_heads"]
        [::core::mem::offset_of!(dwk_gate_args, block_heads) - 188usize];
    ["Offset of field: dwk_gate_args::flags"]
        [::core::mem::offset_of!(dwk_gate_args, flags) - 192usize];
    ["Offset of field: dwk_gate_args::a_type"]
        [::core::mem::offset_of!(dwk_gate_args, a_type) - 196usize];
    ["Offset of field: dwk_gate_args::b_type"]
        [::core::mem::offset_of!(dwk_gate_args, b_type) - 200usize];
    ["Offset of field: dwk_gate_args::a_log_type"]
        [::core::mem::offset_of!(dwk_gate_args, a_log_type) - 204usize];
    ["Offset of field: dwk_gate_args::dt_bias_type"]
        [::core::mem::offset_of!(dwk_gate_args, dt_bias_type) - 208usize];
    ["Offset of field: dwk_gate_args::groups"]
        [::core::mem::offset_of!(dwk_gate_args, groups) - 212usize];
};
impl Default for dwk_gate_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_gate_backward_args {
    pub gate: dwk_gate_args,
    pub d_a: *mut ::core::ffi::c_void,
    pub d_b: *mut ::core::ffi::c_void,
    pub partials: *mut f32,
    pub d_a_strides: dwk_token_strides,
    pub d_b_strides: dwk_token_strides,
    pub d_a_block: i64,
    pub d_b_block: i64,
    pub d_a_type: i32,
    pub d_b_type: i32,
    pub rows: i32,
    pub lanes_log2: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_gate_backward_args"][::core::mem::size_of::<dwk_gate_backward_args>() - 320usize];
    ["Alignment of dwk_gate_backward_args"]
        [::core::mem::align_of::<dwk_gate_backward_args>() - 8usize];
    ["Offset of field: dwk_gate_backward_args::gate"]
        [::core::mem::offset_of!(dwk_gate_backward_args, gate) - 0usize];
    ["Offset of field: dwk_gate_backward_args::d_a"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_a) - 216usize];
    ["Offset of field: dwk_gate_backward_args::d_b"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_b) - 224usize];
    ["Offset of field: dwk_gate_backward_args::partials"]
        [::core::mem::offset_of!(dwk_gate_backward_args, partials) - 232usize];
    ["Offset of field: dwk_gate_backward_args::d_a_strides"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_a_strides) - 240usize];
    ["Offset of field: dwk_gate_backward_args::d_b_strides"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_b_strides) - 264usize];
    ["Offset of field: dwk_gate_backward_args::d_a_block"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_a_block) - 288usize];
    ["Offset of field: dwk_gate_backward_args::d_b_block"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_b_block) - 296usize];
    ["Offset of field: dwk_gate_backward_args::d_a_type"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_a_type) - 304usize];
    ["Offset of field: dwk_gate_backward_args::d_b_type"]
        [::core::mem::offset_of!(dwk_gate_backward_args, d_b_type) - 308usize];
    ["Offset of field: dwk_gate_backward_args::rows"]
        [::core::mem::offset_of!(dwk_gate_backward_args, rows) - 312usize];
    ["Offset of field: dwk_gate_backward_args::lanes_log2"]
        [::core::mem::offset_of!(dwk_gate_backward_args, lanes_log2) - 316usize];
};
impl Default for dwk_gate_backward_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_gradient_sums_part {
    pub out: *mut f32,
    pub outer_stride: i64,
    pub inner_stride: i64,
    pub columns: i32,
    pub inner: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_gradient_sums_part"][::core::mem::size_of::<dwk_gradient_sums_part>() - 32usize];
    ["Alignment of dwk_gradient_sums_part"]
        [::core::mem::align_of::<dwk_gradient_sums_part>() - 8usize];
    ["Offset of field: dwk_gradient_sums_part::out"]
        [::core::mem::offset_of!(dwk_gradient_sums_part, out) - 0usize];
    ["Offset of field: dwk_gradient_sums_part::outer_stride"]
        [::core::mem::offset_of!(dwk_gradient_sums_part, outer_stride) - 8usize];
    ["Offset of field: dwk_gradient_sums_part::inner_stride"]
        [::core::mem::offset_of!(dwk_gradient_sums_part, inner_stride) - 16usize];
    ["Offset of field: dwk_gradient_sums_part::columns"]
        [::core::mem::offset_of!(dwk_gradient_sums_part, columns) - 24usize];
    ["Offset of field: dwk_gradient_sums_part::inner"]
        [::core::mem::offset_of!(dwk_gradient_sums_part, inner) - 28usize];
};
impl Default for dwk_gradient_sums_part {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_gradient_sums_args {
    pub partials: *const f32,
    pub first: dwk_gradient_sums_part,
    pub second: dwk_gradient_sums_part,
    pub records: i32,
    pub columns: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_gradient_sums_args"][::core::mem::size_of::<dwk_gradient_sums_args>() - 80usize];
    ["Alignment of dwk_gradient_sums_args"]
        [::core::mem::align_of::<dwk_gradient_sums_args>() - 8usize];
    ["Offset of field: dwk_gradient_sums_args::partials"]
        [::core::mem::offset_of!(dwk_gradient_sums_args, partials) - 0usize];
    ["Offset of field: dwk_gradient_sums_args::first"]
        [::core::mem::offset_of!(dwk_gradient_sums_args, first) - 8usize];
    ["Offset of field: dwk_gradient_sums_args::second"]
        [::core::mem::offset_of!(dwk_gradient_sums_args, second) - 40usize];
    ["Offset of field: dwk_gradient_sums_args::records"]
        [::core::mem::offset_of!(dwk_gradient_sums_args, records) - 72usize];
    ["Offset of field: dwk_gradient_sums_args::columns"]
        [::core::mem::offset_of!(dwk_gradient_sums_args, columns) - 76usize];
};
impl Default for dwk_gradient_sums_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_conv_part {
    pub x: *const ::core::ffi::c_void,
    pub out: *mut ::core::ffi::c_void,
    pub x_token: i64,
    pub x_block: i64,
    pub out_token: i64,
    pub out_head: i64,
    pub block: i32,
    pub dim: i32,
    pub channels: i32,
    pub lanes: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_conv_part"][::core::mem::size_of::<dwk_conv_part>() - 64usize];
    ["Alignment of dwk_conv_part"][::core::mem::align_of::<dwk_conv_part>() - 8usize];
    ["Offset of field: dwk_conv_part::x"][::core::mem::offset_of!(dwk_conv_part, x) - 0usize];
    ["Offset of field: dwk_conv_part::out"][::core::mem::offset_of!(dwk_conv_part, out) - 8usize];
    ["Offset of field: dwk_conv_part::x_token"]
        [::core::mem::offset_of!(dwk_conv_part, x_token) - 16usize];
    ["Offset of field: dwk_conv_part::x_block"]
        [::core::mem::offset_of!(dwk_conv_part, x_block) - 24usize];
    ["Offset of field: dwk_conv_part::out_token"]
        [::core::mem::offset_of!(dwk_conv_part, out_token) - 32usize];
    ["Offset of field: dwk_conv_part::out_head"]
        [::core::mem::offset_of!(dwk_conv_part, out_head) - 40usize];
    ["Offset of field: dwk_conv_part::block"]
        [::core::mem::offset_of!(dwk_conv_part, block) - 48usize];
    ["Offset of field: dwk_conv_part::dim"][::core::mem::offset_of!(dwk_conv_part, dim) - 52usize];
    ["Offset of field: dwk_conv_part::channels"]
        [::core::mem::offset_of!(dwk_conv_part, channels) - 56usize];
    ["Offset of field: dwk_conv_part::lanes"]
        [::core::mem::offset_of!(dwk_conv_part, lanes) - 60usize];
};
impl Default for dwk_conv_part {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_conv_args {
    pub q: dwk_conv_part,
    pub k: dwk_conv_part,
    pub v: dwk_conv_part,
    pub gates: dwk_gate_args,
    pub weight: *const ::core::ffi::c_void,
    pub bias: *const ::core::ffi::c_void,
    pub state: *mut ::core::ffi::c_void,
    pub slots: *const i32,
    pub has_initial_state: *const u8,
    pub cu_seqlens: *const ::core::ffi::c_void,
    pub weight_channel: i64,
    pub weight_tap: i64,
    pub bias_stride: i64,
    pub state_slot: i64,
    pub state_channel: i64,
    pub state_column: i64,
    pub tokens: i32,
    pub sequences: i32,
    pub state_slots: i32,
    pub state_columns: i32,
    pub width: i32,
    pub weight_type: i32,
    pub bias_type: i32,
    pub run_log2: i32,
    pub block_log2: i32,
    pub groups: i32,
    pub dies: i32,
    pub die_groups: i32,
    pub flags: u32,
    pub lane_group_log2: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_conv_args"][::core::mem::size_of::<dwk_conv_args>() - 560usize];
    ["Alignment of dwk_conv_args"][::core::mem::align_of::<dwk_conv_args>() - 8usize];
    ["Offset of field: dwk_conv_args::q"][::core::mem::offset_of!(dwk_conv_args, q) - 0usize];
    ["Offset of field: dwk_conv_args::k"][::core::mem::offset_of!(dwk_conv_args, k) - 64usize];
    ["Offset of field: dwk_conv_args::v"][::core::mem::offset_of!(dwk_conv_args, v) - 128usize];
    ["Offset of field: dwk_conv_args::gates"]
        [::core::mem::offset_of!(dwk_conv_args, gates) - 192usize];
    ["Offset of field: dwk_conv_args::weight"]
        [::core::mem::offset_of!(dwk_conv_args, weight) - 408usize];
    ["Offset of field: dwk_conv_args::bias"]
        [::core::mem::offset_of!(dwk_conv_args, bias) - 416usize];
    ["Offset of field: dwk_conv_args::state"]
        [::core::mem::offset_of!(dwk_conv_args, state) - 424usize];
    ["Offset of field: dwk_conv_args::slots"]
        [::core::mem::offset_of!(dwk_conv_args, slots) - 432usize];
    ["Offset of field: dwk_conv_args::has_initial_state"]
        [::core::mem::offset_of!(dwk_conv_args, has_initial_state) - 440usize];
    ["Offset of field: dwk_conv_args::cu_seqlens"]
        [::core::mem::offset_of!(dwk_conv_args, cu_seqlens) - 448usize];
    ["Offset of field: dwk_conv_args::weight_channel"]
        [::core::mem::offset_of!(dwk_conv_args, weight_channel) - 456usize];
    ["Offset of field: dwk_conv_args::weight_tap"]
        [::core::mem::offset_of!(dwk_conv_args, weight_tap) - 464usize];
    ["Offset of field: dwk_conv_args::bias_stride"]
        [::core::mem::offset_of!(dwk_conv_args, bias_stride) - 472usize];
    ["Offset of field: dwk_conv_args::state_slot"]
        [::core::mem::offset_of!(dwk_conv_args, state_slot) - 480usize];
    ["Offset of field: dwk_conv_args::state_channel"]
        [::core::mem::offset_of!(dwk_conv_args, state_channel) - 488usize];
    ["Offset of field: dwk_conv_args::state_column"]
        [::core::mem::offset_of!(dwk_conv_args, state_column) - 496usize];
    ["Offset of field: dwk_conv_args::tokens"]
        [::core::mem::offset_of!(dwk_conv_args, tokens) - 504usize];
    ["Offset of field: dwk_conv_args::sequences"]
        [::core::mem::offset_of!(dwk_conv_args, sequences) - 508usize];
    ["Offset of field: dwk_conv_args::state_slots"]
        [::core::mem::offset_of!(dwk_conv_args, state_slots) - 512usize];
    ["Offset of field: dwk_conv_args::state_columns"]
        [::core::mem::offset_of!(dwk_conv_args, state_columns) - 516usize];
    ["Offset of field: dwk_conv_args::width"]
        [::core::mem::offset_of!(dwk_conv_args, width) - 520usize];
    ["Offset of field: dwk_conv_args::weight_type"]
        [::core::mem::offset_of!(dwk_conv_args, weight_type) - 524usize];
    ["Offset of field: dwk_conv_args::bias_type"]
        [::core::mem::offset_of!(dwk_conv_args, bias_type) - 528usize];
    ["Offset of field: dwk_conv_args::run_log2"]
        [::core::mem::offset_of!(dwk_conv_args, run_log2) - 532usize];
    ["Offset of field: dwk_conv_args::block_log2"]
        [::core::mem::offset_of!(dwk_conv_args, block_log2) - 536usize];
    ["Offset of field: dwk_conv_args::groups"]
        [::core::mem::offset_of!(dwk_conv_args, groups) - 540usize];
    ["Offset of field: dwk_conv_args::dies"]
        [::core::mem::offset_of!(dwk_conv_args, dies) - 544usize];
    ["Offset of field: dwk_conv_args::die_groups"]
        [::core::mem::offset_of!(dwk_conv_args, die_groups) - 548usize];
    ["Offset of field: dwk_conv_args::flags"]
        [::core::mem::offset_of!(dwk_conv_args, flags) - 552usize];
    ["Offset of field: dwk_conv_args::lane_group_log2"]
        [::core::mem::offset_of!(dwk_conv_args, lane_group_log2) - 556usize];
};
impl Default for dwk_conv_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_conv_draft_args {
    pub conv: dwk_conv_args,
    pub accepted: *const i32,
    pub columns: i32,
    pub slot_stride: i32,
    pub null_slot: i32,
    pub keep_states: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_conv_draft_args"][::core::mem::size_of::<dwk_conv_draft_args>() - 584usize];
    ["Alignment of dwk_conv_draft_args"][::core::mem::align_of::<dwk_conv_draft_args>() - 8usize];
    ["Offset of field: dwk_conv_draft_args::conv"]
        [::core::mem::offset_of!(dwk_conv_draft_args, conv) - 0usize];
    ["Offset of field: dwk_conv_draft_args::accepted"]
        [::core::mem::offset_of!(dwk_conv_draft_args, accepted) - 560usize];
    ["Offset of field: dwk_conv_draft_args::columns"]
        [::core::mem::offset_of!(dwk_conv_draft_args, columns) - 568usize];
    ["Offset of field: dwk_conv_draft_args::slot_stride"]
        [::core::mem::offset_of!(dwk_conv_draft_args, slot_stride) - 572usize];
    ["Offset of field: dwk_conv_draft_args::null_slot"]
        [::core::mem::offset_of!(dwk_conv_draft_args, null_slot) - 576usize];
    ["Offset of field: dwk_conv_draft_args::keep_states"]
        [::core::mem::offset_of!(dwk_conv_draft_args, keep_states) - 580usize];
};
impl Default for dwk_conv_draft_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_conv_lengths_args {
    pub conv: dwk_conv_args,
    pub lengths: dwk_prefill_lengths_args,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_conv_lengths_args"][::core::mem::size_of::<dwk_conv_lengths_args>() - 840usize];
    ["Alignment of dwk_conv_lengths_args"]
        [::core::mem::align_of::<dwk_conv_lengths_args>() - 8usize];
    ["Offset of field: dwk_conv_lengths_args::conv"]
        [::core::mem::offset_of!(dwk_conv_lengths_args, conv) - 0usize];
    ["Offset of field: dwk_conv_lengths_args::lengths"]
        [::core::mem::offset_of!(dwk_conv_lengths_args, lengths) - 560usize];
};
impl Default for dwk_conv_lengths_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_conv_backward_part {
    pub d_x: *mut ::core::ffi::c_void,
    pub token: i64,
    pub block_stride: i64,
    pub block: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_conv_backward_part"][::core::mem::size_of::<dwk_conv_backward_part>() - 32usize];
    ["Alignment of dwk_conv_backward_part"]
        [::core::mem::align_of::<dwk_conv_backward_part>() - 8usize];
    ["Offset of field: dwk_conv_backward_part::d_x"]
        [::core::mem::offset_of!(dwk_conv_backward_part, d_x) - 0usize];
    ["Offset of field: dwk_conv_backward_part::token"]
        [::core::mem::offset_of!(dwk_conv_backward_part, token) - 8usize];
    ["Offset of field: dwk_conv_backward_part::block_stride"]
        [::core::mem::offset_of!(dwk_conv_backward_part, block_stride) - 16usize];
    ["Offset of field: dwk_conv_backward_part::block"]
        [::core::mem::offset_of!(dwk_conv_backward_part, block) - 24usize];
    ["Offset of field: dwk_conv_backward_part::pad0"]
        [::core::mem::offset_of!(dwk_conv_backward_part, pad0) - 28usize];
};
impl Default for dwk_conv_backward_part {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_conv_backward_args {
    pub conv: dwk_conv_args,
    pub q: dwk_conv_backward_part,
    pub k: dwk_conv_backward_part,
    pub v: dwk_conv_backward_part,
    pub d_final: *const ::core::ffi::c_void,
    pub d_initial: *mut ::core::ffi::c_void,
    pub partials: *mut f32,
    pub d_final_slot: i64,
    pub d_final_channel: i64,
    pub d_final_column: i64,
    pub d_initial_slot: i64,
    pub d_initial_channel: i64,
    pub d_initial_column: i64,
    pub blocks: i32,
    pub walkers: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_conv_backward_args"][::core::mem::size_of::<dwk_conv_backward_args>() - 736usize];
    ["Alignment of dwk_conv_backward_args"]
        [::core::mem::align_of::<dwk_conv_backward_args>() - 8usize];
    ["Offset of field: dwk_conv_backward_args::conv"]
        [::core::mem::offset_of!(dwk_conv_backward_args, conv) - 0usize];
    ["Offset of field: dwk_conv_backward_args::q"]
        [::core::mem::offset_of!(dwk_conv_backward_args, q) - 560usize];
    ["Offset of field: dwk_conv_backward_args::k"]
        [::core::mem::offset_of!(dwk_conv_backward_args, k) - 592usize];
    ["Offset of field: dwk_conv_backward_args::v"]
        [::core::mem::offset_of!(dwk_conv_backward_args, v) - 624usize];
    ["Offset of field: dwk_conv_backward_args::d_final"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_final) - 656usize];
    ["Offset of field: dwk_conv_backward_args::d_initial"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_initial) - 664usize];
    ["Offset of field: dwk_conv_backward_args::partials"]
        [::core::mem::offset_of!(dwk_conv_backward_args, partials) - 672usize];
    ["Offset of field: dwk_conv_backward_args::d_final_slot"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_final_slot) - 680usize];
    ["Offset of field: dwk_conv_backward_args::d_final_channel"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_final_channel) - 688usize];
    ["Offset of field: dwk_conv_backward_args::d_final_column"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_final_column) - 696usize];
    ["Offset of field: dwk_conv_backward_args::d_initial_slot"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_initial_slot) - 704usize];
    ["Offset of field: dwk_conv_backward_args::d_initial_channel"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_initial_channel) - 712usize];
    ["Offset of field: dwk_conv_backward_args::d_initial_column"]
        [::core::mem::offset_of!(dwk_conv_backward_args, d_initial_column) - 720usize];
    ["Offset of field: dwk_conv_backward_args::blocks"]
        [::core::mem::offset_of!(dwk_conv_backward_args, blocks) - 728usize];
    ["Offset of field: dwk_conv_backward_args::walkers"]
        [::core::mem::offset_of!(dwk_conv_backward_args, walkers) - 732usize];
};
impl Default for dwk_conv_backward_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_norm_args {
    pub x: *const ::core::ffi::c_void,
    pub z: *const ::core::ffi::c_void,
    pub weight: *const ::core::ffi::c_void,
    pub y: *mut ::core::ffi::c_void,
    pub x_strides: dwk_token_strides,
    pub y_strides: dwk_token_strides,
    pub z_token: i64,
    pub z_block: i64,
    pub weight_stride: i64,
    pub tokens: i32,
    pub value_heads: i32,
    pub value_dim: i32,
    pub block_heads: i32,
    pub run: i32,
    pub weight_type: i32,
    pub mean: f32,
    pub eps: f32,
    pub flags: u32,
    pub group_heads: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_norm_args"][::core::mem::size_of::<dwk_norm_args>() - 144usize];
    ["Alignment of dwk_norm_args"][::core::mem::align_of::<dwk_norm_args>() - 8usize];
    ["Offset of field: dwk_norm_args::x"][::core::mem::offset_of!(dwk_norm_args, x) - 0usize];
    ["Offset of field: dwk_norm_args::z"][::core::mem::offset_of!(dwk_norm_args, z) - 8usize];
    ["Offset of field: dwk_norm_args::weight"]
        [::core::mem::offset_of!(dwk_norm_args, weight) - 16usize];
    ["Offset of field: dwk_norm_args::y"][::core::mem::offset_of!(dwk_norm_args, y) - 24usize];
    ["Offset of field: dwk_norm_args::x_strides"]
        [::core::mem::offset_of!(dwk_norm_args, x_strides) - 32usize];
    ["Offset of field: dwk_norm_args::y_strides"]
        [::core::mem::offset_of!(dwk_norm_args, y_strides) - 56usize];
    ["Offset of field: dwk_norm_args::z_token"]
        [::core::mem::offset_of!(dwk_norm_args, z_token) - 80usize];
    ["Offset of field: dwk_norm_args::z_block"]
        [::core::mem::offset_of!(dwk_norm_args, z_block) - 88usize];
    ["Offset of field: dwk_norm_args::weight_stride"]
        [::core::mem::offset_of!(dwk_norm_args, weight_stride) - 96usize];
    ["Offset of field: dwk_norm_args::tokens"]
        [::core::mem::offset_of!(dwk_norm_args, tokens) - 104usize];
    ["Offset of field: dwk_norm_args::value_heads"]
        [::core::mem::offset_of!(dwk_norm_args, value_heads) - 108usize];
    ["Offset of field: dwk_norm_args::value_dim"]
        [::core::mem::offset_of!(dwk_norm_args, value_dim) - 112usize];
    ["Offset of field: dwk_norm_args::block_heads"]
        [::core::mem::offset_of!(dwk_norm_args, block_heads) - 116usize];
    ["Offset of field: dwk_norm_args::run"][::core::mem::offset_of!(dwk_norm_args, run) - 120usize];
    ["Offset of field: dwk_norm_args::weight_type"]
        [::core::mem::offset_of!(dwk_norm_args, weight_type) - 124usize];
    ["Offset of field: dwk_norm_args::mean"]
        [::core::mem::offset_of!(dwk_norm_args, mean) - 128usize];
    ["Offset of field: dwk_norm_args::eps"][::core::mem::offset_of!(dwk_norm_args, eps) - 132usize];
    ["Offset of field: dwk_norm_args::flags"]
        [::core::mem::offset_of!(dwk_norm_args, flags) - 136usize];
    ["Offset of field: dwk_norm_args::group_heads"]
        [::core::mem::offset_of!(dwk_norm_args, group_heads) - 140usize];
};
impl Default for dwk_norm_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_norm_backward_args {
    pub norm: dwk_norm_args,
    pub d_x: *mut ::core::ffi::c_void,
    pub d_z: *mut ::core::ffi::c_void,
    pub partials: *mut f32,
    pub cu_seqlens: *const ::core::ffi::c_void,
    pub d_x_strides: dwk_token_strides,
    pub d_z_token: i64,
    pub d_z_block: i64,
    pub d_z_heads: i32,
    pub last: i32,
    pub wide: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_norm_backward_args"][::core::mem::size_of::<dwk_norm_backward_args>() - 232usize];
    ["Alignment of dwk_norm_backward_args"]
        [::core::mem::align_of::<dwk_norm_backward_args>() - 8usize];
    ["Offset of field: dwk_norm_backward_args::norm"]
        [::core::mem::offset_of!(dwk_norm_backward_args, norm) - 0usize];
    ["Offset of field: dwk_norm_backward_args::d_x"]
        [::core::mem::offset_of!(dwk_norm_backward_args, d_x) - 144usize];
    ["Offset of field: dwk_norm_backward_args::d_z"]
        [::core::mem::offset_of!(dwk_norm_backward_args, d_z) - 152usize];
    ["Offset of field: dwk_norm_backward_args::partials"]
        [::core::mem::offset_of!(dwk_norm_backward_args, partials) - 160usize];
    ["Offset of field: dwk_norm_backward_args::cu_seqlens"]
        [::core::mem::offset_of!(dwk_norm_backward_args, cu_seqlens) - 168usize];
    ["Offset of field: dwk_norm_backward_args::d_x_strides"]
        [::core::mem::offset_of!(dwk_norm_backward_args, d_x_strides) - 176usize];
    ["Offset of field: dwk_norm_backward_args::d_z_token"]
        [::core::mem::offset_of!(dwk_norm_backward_args, d_z_token) - 200usize];
    ["Offset of field: dwk_norm_backward_args::d_z_block"]
        [::core::mem::offset_of!(dwk_norm_backward_args, d_z_block) - 208usize];
    ["Offset of field: dwk_norm_backward_args::d_z_heads"]
        [::core::mem::offset_of!(dwk_norm_backward_args, d_z_heads) - 216usize];
    ["Offset of field: dwk_norm_backward_args::last"]
        [::core::mem::offset_of!(dwk_norm_backward_args, last) - 220usize];
    ["Offset of field: dwk_norm_backward_args::wide"]
        [::core::mem::offset_of!(dwk_norm_backward_args, wide) - 224usize];
    ["Offset of field: dwk_norm_backward_args::pad0"]
        [::core::mem::offset_of!(dwk_norm_backward_args, pad0) - 228usize];
};
impl Default for dwk_norm_backward_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_decode_args {
    pub by_slabs: dwk_divisor,
    pub by_value_heads: dwk_divisor,
    pub by_key_heads: dwk_divisor,
    pub slabs: i32,
    pub value_heads: i32,
    pub key_heads: i32,
    pub tokens: i32,
    pub value_dim: i32,
    pub key_dim: i32,
    pub slots: *const i32,
    pub write_slots: *const i32,
    pub has_initial_state: *const u8,
    pub g: *const ::core::ffi::c_void,
    pub beta: *const ::core::ffi::c_void,
    pub flags: u32,
    pub g_type: i32,
    pub beta_type: i32,
    pub a_log_type: i32,
    pub dt_bias_type: i32,
    pub state_type: i32,
    pub g_strides: dwk_token_strides,
    pub beta_strides: dwk_token_strides,
    pub a_log: *const ::core::ffi::c_void,
    pub dt_bias: *const ::core::ffi::c_void,
    pub a_log_stride: i64,
    pub dt_bias_stride: i64,
    pub q: *const ::core::ffi::c_void,
    pub k: *const ::core::ffi::c_void,
    pub v: *const ::core::ffi::c_void,
    pub q_strides: dwk_token_strides,
    pub k_strides: dwk_token_strides,
    pub v_strides: dwk_token_strides,
    pub state: *mut ::core::ffi::c_void,
    pub slot_count: i32,
    pub scale: f32,
    pub state_strides: dwk_state_strides,
    pub o: *mut ::core::ffi::c_void,
    pub o_strides: dwk_token_strides,
    pub states: *mut ::core::ffi::c_void,
    pub states_strides: dwk_state_strides,
    pub states_token: i64,
    pub states_type: i32,
    pub batch: i32,
    pub dies: i32,
    pub pad0: i32,
    pub norm: dwk_norm_args,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_decode_args"][::core::mem::size_of::<dwk_decode_args>() - 560usize];
    ["Alignment of dwk_decode_args"][::core::mem::align_of::<dwk_decode_args>() - 8usize];
    ["Offset of field: dwk_decode_args::by_slabs"]
        [::core::mem::offset_of!(dwk_decode_args, by_slabs) - 0usize];
    ["Offset of field: dwk_decode_args::by_value_heads"]
        [::core::mem::offset_of!(dwk_decode_args, by_value_heads) - 8usize];
    ["Offset of field: dwk_decode_args::by_key_heads"]
        [::core::mem::offset_of!(dwk_decode_args, by_key_heads) - 16usize];
    ["Offset of field: dwk_decode_args::slabs"]
        [::core::mem::offset_of!(dwk_decode_args, slabs) - 24usize];
    ["Offset of field: dwk_decode_args::value_heads"]
        [::core::mem::offset_of!(dwk_decode_args, value_heads) - 28usize];
    ["Offset of field: dwk_decode_args::key_heads"]
        [::core::mem::offset_of!(dwk_decode_args, key_heads) - 32usize];
    ["Offset of field: dwk_decode_args::tokens"]
        [::core::mem::offset_of!(dwk_decode_args, tokens) - 36usize];
    ["Offset of field: dwk_decode_args::value_dim"]
        [::core::mem::offset_of!(dwk_decode_args, value_dim) - 40usize];
    ["Offset of field: dwk_decode_args::key_dim"]
        [::core::mem::offset_of!(dwk_decode_args, key_dim) - 44usize];
    ["Offset of field: dwk_decode_args::slots"]
        [::core::mem::offset_of!(dwk_decode_args, slots) - 48usize];
    ["Offset of field: dwk_decode_args::write_slots"]
        [::core::mem::offset_of!(dwk_decode_args, write_slots) - 56usize];
    ["Offset of field: dwk_decode_args::has_initial_state"]
        [::core::mem::offset_of!(dwk_decode_args, has_initial_state) - 64usize];
    ["Offset of field: dwk_decode_args::g"][::core::mem::offset_of!(dwk_decode_args, g) - 72usize];
    ["Offset of field: dwk_decode_args::beta"]
        [::core::mem::offset_of!(dwk_decode_args, beta) - 80usize];
    ["Offset of field: dwk_decode_args::flags"]
        [::core::mem::offset_of!(dwk_decode_args, flags) - 88usize];
    ["Offset of field: dwk_decode_args::g_type"]
        [::core::mem::offset_of!(dwk_decode_args, g_type) - 92usize];
    ["Offset of field: dwk_decode_args::beta_type"]
        [::core::mem::offset_of!(dwk_decode_args, beta_type) - 96usize];
    ["Offset of field: dwk_decode_args::a_log_type"]
        [::core::mem::offset_of!(dwk_decode_args, a_log_type) - 100usize];
    ["Offset of field: dwk_decode_args::dt_bias_type"]
        [::core::mem::offset_of!(dwk_decode_args, dt_bias_type) - 104usize];
    ["Offset of field: dwk_decode_args::state_type"]
        [::core::mem::offset_of!(dwk_decode_args, state_type) - 108usize];
    ["Offset of field: dwk_decode_args::g_strides"]
        [::core::mem::offset_of!(dwk_decode_args, g_strides) - 112usize];
    ["Offset of field: dwk_decode_args::beta_strides"]
        [::core::mem::offset_of!(dwk_decode_args, beta_strides) - 136usize];
    ["Offset of field: dwk_decode_args::a_log"]
        [::core::mem::offset_of!(dwk_decode_args, a_log) - 160usize];
    ["Offset of field: dwk_decode_args::dt_bias"]
        [::core::mem::offset_of!(dwk_decode_args, dt_bias) - 168usize];
    ["Offset of field: dwk_decode_args::a_log_stride"]
        [::core::mem::offset_of!(dwk_decode_args, a_log_stride) - 176usize];
    ["Offset of field: dwk_decode_args::dt_bias_stride"]
        [::core::mem::offset_of!(dwk_decode_args, dt_bias_stride) - 184usize];
    ["Offset of field: dwk_decode_args::q"][::core::mem::offset_of!(dwk_decode_args, q) - 192usize];
    ["Offset of field: dwk_decode_args::k"][::core::mem::offset_of!(dwk_decode_args, k) - 200usize];
    ["Offset of field: dwk_decode_args::v"][::core::mem::offset_of!(dwk_decode_args, v) - 208usize];
    ["Offset of field: dwk_decode_args::q_strides"]
        [::core::mem::offset_of!(dwk_decode_args, q_strides) - 216usize];
    ["Offset of field: dwk_decode_args::k_strides"]
        [::core::mem::offset_of!(dwk_decode_args, k_strides) - 240usize];
    ["Offset of field: dwk_decode_args::v_strides"]
        [::core::mem::offset_of!(dwk_decode_args, v_strides) - 264usize];
    ["Offset of field: dwk_decode_args::state"]
        [::core::mem::offset_of!(dwk_decode_args, state) - 288usize];
    ["Offset of field: dwk_decode_args::slot_count"]
        [::core::mem::offset_of!(dwk_decode_args, slot_count) - 296usize];
    ["Offset of field: dwk_decode_args::scale"]
        [::core::mem::offset_of!(dwk_decode_args, scale) - 300usize];
    ["Offset of field: dwk_decode_args::state_strides"]
        [::core::mem::offset_of!(dwk_decode_args, state_strides) - 304usize];
    ["Offset of field: dwk_decode_args::o"][::core::mem::offset_of!(dwk_decode_args, o) - 328usize];
    ["Offset of field: dwk_decode_args::o_strides"]
        [::core::mem::offset_of!(dwk_decode_args, o_strides) - 336usize];
    ["Offset of field: dwk_decode_args::states"]
        [::core::mem::offset_of!(dwk_decode_args, states) - 360usize];
    ["Offset of field: dwk_decode_args::states_strides"]
        [::core::mem::offset_of!(dwk_decode_args, states_strides) - 368usize];
    ["Offset of field: dwk_decode_args::states_token"]
        [::core::mem::offset_of!(dwk_decode_args, states_token) - 392usize];
    ["Offset of field: dwk_decode_args::states_type"]
        [::core::mem::offset_of!(dwk_decode_args, states_type) - 400usize];
    ["Offset of field: dwk_decode_args::batch"]
        [::core::mem::offset_of!(dwk_decode_args, batch) - 404usize];
    ["Offset of field: dwk_decode_args::dies"]
        [::core::mem::offset_of!(dwk_decode_args, dies) - 408usize];
    ["Offset of field: dwk_decode_args::pad0"]
        [::core::mem::offset_of!(dwk_decode_args, pad0) - 412usize];
    ["Offset of field: dwk_decode_args::norm"]
        [::core::mem::offset_of!(dwk_decode_args, norm) - 416usize];
};
impl Default for dwk_decode_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_decode_full_args {
    pub by_slabs: dwk_divisor,
    pub by_value_heads: dwk_divisor,
    pub by_key_heads: dwk_divisor,
    pub slabs: i32,
    pub value_heads: i32,
    pub key_heads: i32,
    pub tokens: i32,
    pub flags: u32,
    pub slot_count: i32,
    pub slots: *const i32,
    pub write_slots: *const i32,
    pub has_initial_state: *const u8,
    pub g: *const ::core::ffi::c_void,
    pub beta: *const ::core::ffi::c_void,
    pub g_type: i32,
    pub beta_type: i32,
    pub a_log_type: i32,
    pub dt_bias_type: i32,
    pub state_type: i32,
    pub scale: f32,
    pub g_strides: dwk_token_steps,
    pub beta_strides: dwk_token_steps,
    pub a_log: *const ::core::ffi::c_void,
    pub dt_bias: *const ::core::ffi::c_void,
    pub a_log_stride: u32,
    pub dt_bias_stride: u32,
    pub q: *const ::core::ffi::c_void,
    pub k: *const ::core::ffi::c_void,
    pub v: *const ::core::ffi::c_void,
    pub state: *mut ::core::ffi::c_void,
    pub q_strides: dwk_token_steps,
    pub k_strides: dwk_token_steps,
    pub v_strides: dwk_token_steps,
    pub state_strides: dwk_state_steps,
    pub o: *mut ::core::ffi::c_void,
    pub states: *mut ::core::ffi::c_void,
    pub o_strides: dwk_token_steps,
    pub states_strides: dwk_state_steps,
    pub states_token: u32,
    pub states_type: i32,
    pub batch: i32,
    pub dies: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_decode_full_args"][::core::mem::size_of::<dwk_decode_full_args>() - 296usize];
    ["Alignment of dwk_decode_full_args"][::core::mem::align_of::<dwk_decode_full_args>() - 8usize];
    ["Offset of field: dwk_decode_full_args::by_slabs"]
        [::core::mem::offset_of!(dwk_decode_full_args, by_slabs) - 0usize];
    ["Offset of field: dwk_decode_full_args::by_value_heads"]
        [::core::mem::offset_of!(dwk_decode_full_args, by_value_heads) - 8usize];
    ["Offset of field: dwk_decode_full_args::by_key_heads"]
        [::core::mem::offset_of!(dwk_decode_full_args, by_key_heads) - 16usize];
    ["Offset of field: dwk_decode_full_args::slabs"]
        [::core::mem::offset_of!(dwk_decode_full_args, slabs) - 24usize];
    ["Offset of field: dwk_decode_full_args::value_heads"]
        [::core::mem::offset_of!(dwk_decode_full_args, value_heads) - 28usize];
    ["Offset of field: dwk_decode_full_args::key_heads"]
        [::core::mem::offset_of!(dwk_decode_full_args, key_heads) - 32usize];
    ["Offset of field: dwk_decode_full_args::tokens"]
        [::core::mem::offset_of!(dwk_decode_full_args, tokens) - 36usize];
    ["Offset of field: dwk_decode_full_args::flags"]
        [::core::mem::offset_of!(dwk_decode_full_args, flags) - 40usize];
    ["Offset of field: dwk_decode_full_args::slot_count"]
        [::core::mem::offset_of!(dwk_decode_full_args, slot_count) - 44usize];
    ["Offset of field: dwk_decode_full_args::slots"]
        [::core::mem::offset_of!(dwk_decode_full_args, slots) - 48usize];
    ["Offset of field: dwk_decode_full_args::write_slots"]
        [::core::mem::offset_of!(dwk_decode_full_args, write_slots) - 56usize];
    ["Offset of field: dwk_decode_full_args::has_initial_state"]
        [::core::mem::offset_of!(dwk_decode_full_args, has_initial_state) - 64usize];
    ["Offset of field: dwk_decode_full_args::g"]
        [::core::mem::offset_of!(dwk_decode_full_args, g) - 72usize];
    ["Offset of field: dwk_decode_full_args::beta"]
        [::core::mem::offset_of!(dwk_decode_full_args, beta) - 80usize];
    ["Offset of field: dwk_decode_full_args::g_type"]
        [::core::mem::offset_of!(dwk_decode_full_args, g_type) - 88usize];
    ["Offset of field: dwk_decode_full_args::beta_type"]
        [::core::mem::offset_of!(dwk_decode_full_args, beta_type) - 92usize];
    ["Offset of field: dwk_decode_full_args::a_log_type"]
        [::core::mem::offset_of!(dwk_decode_full_args, a_log_type) - 96usize];
    ["Offset of field: dwk_decode_full_args::dt_bias_type"]
        [::core::mem::offset_of!(dwk_decode_full_args, dt_bias_type) - 100usize];
    ["Offset of field: dwk_decode_full_args::state_type"]
        [::core::mem::offset_of!(dwk_decode_full_args, state_type) - 104usize];
    ["Offset of field: dwk_decode_full_args::scale"]
        [::core::mem::offset_of!(dwk_decode_full_args, scale) - 108usize];
    ["Offset of field: dwk_decode_full_args::g_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, g_strides) - 112usize];
    ["Offset of field: dwk_decode_full_args::beta_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, beta_strides) - 124usize];
    ["Offset of field: dwk_decode_full_args::a_log"]
        [::core::mem::offset_of!(dwk_decode_full_args, a_log) - 136usize];
    ["Offset of field: dwk_decode_full_args::dt_bias"]
        [::core::mem::offset_of!(dwk_decode_full_args, dt_bias) - 144usize];
    ["Offset of field: dwk_decode_full_args::a_log_stride"]
        [::core::mem::offset_of!(dwk_decode_full_args, a_log_stride) - 152usize];
    ["Offset of field: dwk_decode_full_args::dt_bias_stride"]
        [::core::mem::offset_of!(dwk_decode_full_args, dt_bias_stride) - 156usize];
    ["Offset of field: dwk_decode_full_args::q"]
        [::core::mem::offset_of!(dwk_decode_full_args, q) - 160usize];
    ["Offset of field: dwk_decode_full_args::k"]
        [::core::mem::offset_of!(dwk_decode_full_args, k) - 168usize];
    ["Offset of field: dwk_decode_full_args::v"]
        [::core::mem::offset_of!(dwk_decode_full_args, v) - 176usize];
    ["Offset of field: dwk_decode_full_args::state"]
        [::core::mem::offset_of!(dwk_decode_full_args, state) - 184usize];
    ["Offset of field: dwk_decode_full_args::q_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, q_strides) - 192usize];
    ["Offset of field: dwk_decode_full_args::k_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, k_strides) - 204usize];
    ["Offset of field: dwk_decode_full_args::v_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, v_strides) - 216usize];
    ["Offset of field: dwk_decode_full_args::state_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, state_strides) - 228usize];
    ["Offset of field: dwk_decode_full_args::o"]
        [::core::mem::offset_of!(dwk_decode_full_args, o) - 240usize];
    ["Offset of field: dwk_decode_full_args::states"]
        [::core::mem::offset_of!(dwk_decode_full_args, states) - 248usize];
    ["Offset of field: dwk_decode_full_args::o_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, o_strides) - 256usize];
    ["Offset of field: dwk_decode_full_args::states_strides"]
        [::core::mem::offset_of!(dwk_decode_full_args, states_strides) - 268usize];
    ["Offset of field: dwk_decode_full_args::states_token"]
        [::core::mem::offset_of!(dwk_decode_full_args, states_token) - 280usize];
    ["Offset of field: dwk_decode_full_args::states_type"]
        [::core::mem::offset_of!(dwk_decode_full_args, states_type) - 284usize];
    ["Offset of field: dwk_decode_full_args::batch"]
        [::core::mem::offset_of!(dwk_decode_full_args, batch) - 288usize];
    ["Offset of field: dwk_decode_full_args::dies"]
        [::core::mem::offset_of!(dwk_decode_full_args, dies) - 292usize];
};
impl Default for dwk_decode_full_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_decode_draft_args {
    pub decode: dwk_decode_args,
    pub accepted: *const i32,
    pub cu_seqlens: *const ::core::ffi::c_void,
    pub rows: i32,
    pub wide_lengths: i32,
    pub read_columns: i32,
    pub write_columns: i32,
    pub null_slot: i32,
    pub states_slots: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_decode_draft_args"][::core::mem::size_of::<dwk_decode_draft_args>() - 600usize];
    ["Alignment of dwk_decode_draft_args"]
        [::core::mem::align_of::<dwk_decode_draft_args>() - 8usize];
    ["Offset of field: dwk_decode_draft_args::decode"]
        [::core::mem::offset_of!(dwk_decode_draft_args, decode) - 0usize];
    ["Offset of field: dwk_decode_draft_args::accepted"]
        [::core::mem::offset_of!(dwk_decode_draft_args, accepted) - 560usize];
    ["Offset of field: dwk_decode_draft_args::cu_seqlens"]
        [::core::mem::offset_of!(dwk_decode_draft_args, cu_seqlens) - 568usize];
    ["Offset of field: dwk_decode_draft_args::rows"]
        [::core::mem::offset_of!(dwk_decode_draft_args, rows) - 576usize];
    ["Offset of field: dwk_decode_draft_args::wide_lengths"]
        [::core::mem::offset_of!(dwk_decode_draft_args, wide_lengths) - 580usize];
    ["Offset of field: dwk_decode_draft_args::read_columns"]
        [::core::mem::offset_of!(dwk_decode_draft_args, read_columns) - 584usize];
    ["Offset of field: dwk_decode_draft_args::write_columns"]
        [::core::mem::offset_of!(dwk_decode_draft_args, write_columns) - 588usize];
    ["Offset of field: dwk_decode_draft_args::null_slot"]
        [::core::mem::offset_of!(dwk_decode_draft_args, null_slot) - 592usize];
    ["Offset of field: dwk_decode_draft_args::states_slots"]
        [::core::mem::offset_of!(dwk_decode_draft_args, states_slots) - 596usize];
};
impl Default for dwk_decode_draft_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct dwk_commit_args {
    pub accepted: *const i32,
    pub slots: *const i32,
    pub has_initial_state: *const u8,
    pub states: *const ::core::ffi::c_void,
    pub pool: *mut ::core::ffi::c_void,
    pub conv_state: *mut ::core::ffi::c_void,
    pub q: dwk_conv_part,
    pub k: dwk_conv_part,
    pub v: dwk_conv_part,
    pub states_strides: dwk_state_strides,
    pub pool_strides: dwk_state_strides,
    pub states_token: i64,
    pub conv_slot: i64,
    pub conv_channel: i64,
    pub conv_column: i64,
    pub batch: i32,
    pub tokens: i32,
    pub pool_slots: i32,
    pub conv_slots: i32,
    pub value_heads: i32,
    pub rows: i32,
    pub columns: i32,
    pub states_type: i32,
    pub pool_type: i32,
    pub conv_columns: i32,
    pub blocks: i32,
    pub pad0: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of dwk_commit_args"][::core::mem::size_of::<dwk_commit_args>() - 368usize];
    ["Alignment of dwk_commit_args"][::core::mem::align_of::<dwk_commit_args>() - 8usize];
    ["Offset of field: dwk_commit_args::accepted"]
        [::core::mem::offset_of!(dwk_commit_args, accepted) - 0usize];
    ["Offset of field: dwk_commit_args::slots"]
        [::core::mem::offset_of!(dwk_commit_args, slots) - 8usize];
    ["Offset of field: dwk_commit_args::has_initial_state"]
        [::core::mem::offset_of!(dwk_commit_args, has_initial_state) - 16usize];
    ["Offset of field: dwk_commit_args::states"]
        [::core::mem::offset_of!(dwk_commit_args, states) - 24usize];
    ["Offset of field: dwk_commit_args::pool"]
        [::core::mem::offset_of!(dwk_commit_args, pool) - 32usize];
    ["Offset of field: dwk_commit_args::conv_state"]
        [::core::mem::offset_of!(dwk_commit_args, conv_state) - 40usize];
    ["Offset of field: dwk_commit_args::q"][::core::mem::offset_of!(dwk_commit_args, q) - 48usize];
    ["Offset of field: dwk_commit_args::k"][::core::mem::offset_of!(dwk_commit_args, k) - 112usize];
    ["Offset of field: dwk_commit_args::v"][::core::mem::offset_of!(dwk_commit_args, v) - 176usize];
    ["Offset of field: dwk_commit_args::states_strides"]
        [::core::mem::offset_of!(dwk_commit_args, states_strides) - 240usize];
    ["Offset of field: dwk_commit_args::pool_strides"]
        [::core::mem::offset_of!(dwk_commit_args, pool_strides) - 264usize];
    ["Offset of field: dwk_commit_args::states_token"]
        [::core::mem::offset_of!(dwk_commit_args, states_token) - 288usize];
    ["Offset of field: dwk_commit_args::conv_slot"]
        [::core::mem::offset_of!(dwk_commit_args, conv_slot) - 296usize];
    ["Offset of field: dwk_commit_args::conv_channel"]
        [::core::mem::offset_of!(dwk_commit_args, conv_channel) - 304usize];
    ["Offset of field: dwk_commit_args::conv_column"]
        [::core::mem::offset_of!(dwk_commit_args, conv_column) - 312usize];
    ["Offset of field: dwk_commit_args::batch"]
        [::core::mem::offset_of!(dwk_commit_args, batch) - 320usize];
    ["Offset of field: dwk_commit_args::tokens"]
        [::core::mem::offset_of!(dwk_commit_args, tokens) - 324usize];
    ["Offset of field: dwk_commit_args::pool_slots"]
        [::core::mem::offset_of!(dwk_commit_args, pool_slots) - 328usize];
    ["Offset of field: dwk_commit_args::conv_slots"]
        [::core::mem::offset_of!(dwk_commit_args, conv_slots) - 332usize];
    ["Offset of field: dwk_commit_args::value_heads"]
        [::core::mem::offset_of!(dwk_commit_args, value_heads) - 336usize];
    ["Offset of field: dwk_commit_args::rows"]
        [::core::mem::offset_of!(dwk_commit_args, rows) - 340usize];
    ["Offset of field: dwk_commit_args::columns"]
        [::core::mem::offset_of!(dwk_commit_args, columns) - 344usize];
    ["Offset of field: dwk_commit_args::states_type"]
        [::core::mem::offset_of!(dwk_commit_args, states_type) - 348usize];
    ["Offset of field: dwk_commit_args::pool_type"]
        [::core::mem::offset_of!(dwk_commit_args, pool_type) - 352usize];
    ["Offset of field: dwk_commit_args::conv_columns"]
        [::core::mem::offset_of!(dwk_commit_args, conv_columns) - 356usize];
    ["Offset of field: dwk_commit_args::blocks"]
        [::core::mem::offset_of!(dwk_commit_args, blocks) - 360usize];
    ["Offset of field: dwk_commit_args::pad0"]
        [::core::mem::offset_of!(dwk_commit_args, pad0) - 364usize];
};
impl Default for dwk_commit_args {
    fn default() -> Self {
        let mut s = ::core::mem::MaybeUninit::<Self>::uninit();
        unsafe {
            ::core::ptr::write_bytes(s.as_mut_ptr(), 0, 1);
            s.assume_init()
        }
    }
}
