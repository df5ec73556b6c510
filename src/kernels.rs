//! Table of kernels: name, code object, argument struct and role of each.
//!
//! The loader, launches, [`save`](crate::code_objects::save) and the tests read it. A `Kernel` carries the type of its
//! argument struct, so that a launch with another struct does not compile. [`Target`] says how many threads, value
//! columns and bytes of shared memory a role has on an architecture.

use std::fmt;
use std::marker::PhantomData;

use crate::abi;
use crate::types::{Dtype, StateLayout};

mod target;

pub use target::Target;
pub(crate) use target::{Costs, KernelCost, Walk, dies};

/// Key dimensions for which kernels that walk chunks are compiled. Other dimensions are padded with zeros in registers,
/// up to the next bucket.
pub const KEY_BUCKETS: [usize; 5] = [64, 96, 128, 192, 256];

/// Number of [`KEY_BUCKETS`] for which `prefill_fused` is compiled: those whose state and operands fit on chip.
pub const FUSED_BUCKETS: usize = 3;

/// Number of [`KEY_BUCKETS`] for which `prefill_short` is compiled: those whose state one wave holds.
pub const SHORT_BUCKETS: usize = 3;

/// Key dimensions for which the kernels of the backward are compiled.
pub const BACKWARD_BUCKETS: [usize; 3] = [64, 128, 256];

/// Computation of a kernel. `usize` fields are its key bucket: the largest key dimension that it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Copies states after accepted tokens into the pools.
    Commit,
    /// Convolution of q, k and v with SiLU; optionally norms and gates.
    Conv,
    /// The recurrence over a few tokens.
    Decode(usize),
    /// [`Role::Decode`] for few sequences: teams have half as many columns.
    DecodeFew,
    /// [`Role::Decode`] with the gated norm of whole output rows.
    DecodeNorm,
    /// g and beta from the projections.
    Gate,
    /// Gated RMS norm.
    Norm,
    /// Checks `cu_seqlens` on the device and divides sequences into segments.
    PrefillLengths,
    /// T and P of each chunk.
    PrefillPrepare,
    /// M and N of each segment that another segment follows.
    PrefillSummarise(usize),
    /// The state at the start of each segment.
    PrefillCombine(usize),
    /// Summaries that ranks gathered, in the order of their sequences.
    PrefillCollect,
    /// Outputs and final states.
    PrefillScan(usize),
    /// T and P, outputs and final states in one kernel.
    PrefillFused(usize),
    /// How segments of a fused prefill start, and M and N where they need them.
    PrefillFusedSummarise(usize),
    /// Sequences of at most 16 tokens in one kernel.
    PrefillShort(usize),
    /// T and P of each chunk, for the backward.
    BackwardPrepare,
    /// What each segment leaves, in both directions of the backward.
    BackwardSummarise(usize),
    /// States and their gradients, chunk by chunk.
    BackwardWalk(usize),
    /// Gradients of q, k and gates.
    BackwardGradients(usize),
    /// Gradients of `A_log` and `dt_bias`.
    BackwardSums,
    /// Gradients of a gated norm.
    NormBackward,
    /// Gradients of a convolution.
    ConvBackward,
    /// Gradients of a and b.
    GateBackward,
    /// Gradients of weights, from the sums of workgroups.
    GradientSums,
}

/// A row of [`TABLE`].
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its symbol in the code object.
    pub name: &'static str,
    /// Stem of its source in `hip/kernels/`, and name of its code object.
    pub object: &'static str,
    /// Bytes of its argument struct in `hip/kernel_args.h`.
    pub argument_bytes: usize,
    /// Its computation.
    pub role: Role,
}

/// A kernel with the argument struct `Args`, passed by value.
pub(crate) struct Kernel<Args> {
    index: usize,
    args: PhantomData<fn(&Args)>,
}

impl<Args> Clone for Kernel<Args> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<Args> Copy for Kernel<Args> {}

impl<Args> fmt::Debug for Kernel<Args> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl<Args> Kernel<Args> {
    /// The kernel of this name, looked up at compile time.
    const fn named(name: &str) -> Self {
        let mut index = 0;
        while !same(TABLE[index].name.as_bytes(), name.as_bytes()) {
            index += 1;
        }
        Kernel {
            index,
            args: PhantomData,
        }
    }

    /// Its row of [`TABLE`].
    pub(crate) fn index(self) -> usize {
        self.index
    }

    /// Its symbol in the code object.
    pub(crate) fn name(self) -> &'static str {
        TABLE[self.index].name
    }

    /// Its computation.
    pub(crate) fn role(self) -> Role {
        TABLE[self.index].role
    }
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

/// Declares families of kernels: code object, argument struct, and each kernel's name and role.
macro_rules! kernels {
    ($($family:ident: $args:ident in $object:literal {
        $($name:literal => $role:expr,)+
    })+) => {
        /// Every kernel of this crate.
        pub const TABLE: &[Entry] = &[$($(Entry {
            name: $name,
            object: $object,
            argument_bytes: size_of::<abi::$args>(),
            role: $role,
        },)+)+];

        $(const $family: &[Kernel<abi::$args>] = &[$(Kernel::named($name),)+];)+
    };
}

kernels! {
    COMMIT: dwk_commit_args in "commit" {
        "dw_commit" => Role::Commit,
    }
    CONV: dwk_conv_args in "conv" {
        "dw_conv_bf16" => Role::Conv,
        "dw_conv_f16" => Role::Conv,
    }
    CONV_DRAFT: dwk_conv_draft_args in "conv_draft" {
        "dw_conv_draft_bf16" => Role::Conv,
        "dw_conv_draft_f16" => Role::Conv,
    }
    CONV_LENGTHS: dwk_conv_lengths_args in "conv_lengths" {
        "dw_conv_lengths_bf16" => Role::Conv,
        "dw_conv_lengths_f16" => Role::Conv,
    }
    DECODE: dwk_decode_args in "decode" {
        "dw_decode_bf16_k128" => Role::Decode(128),
        "dw_decode_bf16_k256" => Role::Decode(256),
        "dw_decode_f16_k128" => Role::Decode(128),
        "dw_decode_f16_k256" => Role::Decode(256),
    }
    DECODE_FULL: dwk_decode_full_args in "decode" {
        "dw_decode_full_bf16_s32_kv" => Role::Decode(128),
        "dw_decode_full_bf16_s32_vk" => Role::Decode(128),
        "dw_decode_full_bf16_s16_kv" => Role::Decode(128),
        "dw_decode_full_bf16_s16_vk" => Role::Decode(128),
        "dw_decode_full_f16_s32_kv" => Role::Decode(128),
        "dw_decode_full_f16_s32_vk" => Role::Decode(128),
        "dw_decode_full_f16_s16_kv" => Role::Decode(128),
        "dw_decode_full_f16_s16_vk" => Role::Decode(128),
    }
    DECODE_FEW: dwk_decode_full_args in "decode" {
        "dw_decode_few_bf16_s32_kv" => Role::DecodeFew,
        "dw_decode_few_bf16_s32_vk" => Role::DecodeFew,
        "dw_decode_few_bf16_s16_kv" => Role::DecodeFew,
        "dw_decode_few_bf16_s16_vk" => Role::DecodeFew,
        "dw_decode_few_f16_s32_kv" => Role::DecodeFew,
        "dw_decode_few_f16_s32_vk" => Role::DecodeFew,
        "dw_decode_few_f16_s16_kv" => Role::DecodeFew,
        "dw_decode_few_f16_s16_vk" => Role::DecodeFew,
    }
    DECODE_DRAFT: dwk_decode_draft_args in "decode_draft" {
        "dw_decode_draft_bf16_k128" => Role::Decode(128),
        "dw_decode_draft_bf16_k256" => Role::Decode(256),
        "dw_decode_draft_f16_k128" => Role::Decode(128),
        "dw_decode_draft_f16_k256" => Role::Decode(256),
    }
    DECODE_DRAFT_NORM: dwk_decode_draft_args in "decode_draft" {
        "dw_decode_draft_norm_bf16" => Role::DecodeNorm,
        "dw_decode_draft_norm_f16" => Role::DecodeNorm,
    }
    DECODE_NORM: dwk_decode_args in "decode" {
        "dw_decode_norm_bf16" => Role::DecodeNorm,
        "dw_decode_norm_f16" => Role::DecodeNorm,
    }
    GATE: dwk_gate_args in "gate" {
        "dw_gate" => Role::Gate,
    }
    NORM: dwk_norm_args in "norm" {
        "dw_norm_bf16" => Role::Norm,
        "dw_norm_f16" => Role::Norm,
    }
    PREFILL_LENGTHS: dwk_prefill_lengths_args in "prefill_lengths" {
        "dw_prefill_lengths" => Role::PrefillLengths,
    }
    PREFILL_PREPARE: dwk_prefill_prepare_args in "prefill_prepare" {
        "dw_prefill_prepare_bf16" => Role::PrefillPrepare,
        "dw_prefill_prepare_f16" => Role::PrefillPrepare,
    }
    PREFILL_SUMMARISE: dwk_prefill_scan_args in "prefill_summarise" {
        "dw_prefill_summarise_bf16_k64" => Role::PrefillSummarise(64),
        "dw_prefill_summarise_bf16_k96" => Role::PrefillSummarise(96),
        "dw_prefill_summarise_bf16_k128" => Role::PrefillSummarise(128),
        "dw_prefill_summarise_bf16_k192" => Role::PrefillSummarise(192),
        "dw_prefill_summarise_bf16_k256" => Role::PrefillSummarise(256),
        "dw_prefill_summarise_f16_k64" => Role::PrefillSummarise(64),
        "dw_prefill_summarise_f16_k96" => Role::PrefillSummarise(96),
        "dw_prefill_summarise_f16_k128" => Role::PrefillSummarise(128),
        "dw_prefill_summarise_f16_k192" => Role::PrefillSummarise(192),
        "dw_prefill_summarise_f16_k256" => Role::PrefillSummarise(256),
    }
    PREFILL_COMBINE: dwk_prefill_combine_args in "prefill_combine" {
        "dw_prefill_combine_k64" => Role::PrefillCombine(64),
        "dw_prefill_combine_k96" => Role::PrefillCombine(96),
        "dw_prefill_combine_k128" => Role::PrefillCombine(128),
        "dw_prefill_combine_k192" => Role::PrefillCombine(192),
        "dw_prefill_combine_k256" => Role::PrefillCombine(256),
    }
    PREFILL_COLLECT: dwk_prefill_collect_args in "prefill_collect" {
        "dw_prefill_collect" => Role::PrefillCollect,
    }
    PREFILL_SCAN: dwk_prefill_scan_args in "prefill_scan" {
        "dw_prefill_scan_bf16_k64" => Role::PrefillScan(64),
        "dw_prefill_scan_bf16_k96" => Role::PrefillScan(96),
        "dw_prefill_scan_bf16_k128" => Role::PrefillScan(128),
        "dw_prefill_scan_bf16_k192" => Role::PrefillScan(192),
        "dw_prefill_scan_bf16_k256" => Role::PrefillScan(256),
        "dw_prefill_scan_f16_k64" => Role::PrefillScan(64),
        "dw_prefill_scan_f16_k96" => Role::PrefillScan(96),
        "dw_prefill_scan_f16_k128" => Role::PrefillScan(128),
        "dw_prefill_scan_f16_k192" => Role::PrefillScan(192),
        "dw_prefill_scan_f16_k256" => Role::PrefillScan(256),
    }
    PREFILL_FUSED: dwk_prefill_fused_args in "prefill_fused" {
        "dw_prefill_fused_bf16_k64" => Role::PrefillFused(64),
        "dw_prefill_fused_bf16_k96" => Role::PrefillFused(96),
        "dw_prefill_fused_bf16_k128" => Role::PrefillFused(128),
        "dw_prefill_fused_f16_k64" => Role::PrefillFused(64),
        "dw_prefill_fused_f16_k96" => Role::PrefillFused(96),
        "dw_prefill_fused_f16_k128" => Role::PrefillFused(128),
    }
    PREFILL_FUSED_SUMMARISE: dwk_prefill_fused_args in "prefill_fused_summarise" {
        "dw_prefill_fused_summarise_bf16_k64" => Role::PrefillFusedSummarise(64),
        "dw_prefill_fused_summarise_bf16_k96" => Role::PrefillFusedSummarise(96),
        "dw_prefill_fused_summarise_bf16_k128" => Role::PrefillFusedSummarise(128),
        "dw_prefill_fused_summarise_f16_k64" => Role::PrefillFusedSummarise(64),
        "dw_prefill_fused_summarise_f16_k96" => Role::PrefillFusedSummarise(96),
        "dw_prefill_fused_summarise_f16_k128" => Role::PrefillFusedSummarise(128),
    }
    PREFILL_SHORT: dwk_prefill_short_args in "prefill_short" {
        "dw_prefill_short_bf16_k64" => Role::PrefillShort(64),
        "dw_prefill_short_bf16_k96" => Role::PrefillShort(96),
        "dw_prefill_short_bf16_k128" => Role::PrefillShort(128),
        "dw_prefill_short_f16_k64" => Role::PrefillShort(64),
        "dw_prefill_short_f16_k96" => Role::PrefillShort(96),
        "dw_prefill_short_f16_k128" => Role::PrefillShort(128),
    }
    BACKWARD_PREPARE: dwk_prefill_backward_args in "prefill_backward_prepare" {
        "dw_prefill_backward_prepare_bf16" => Role::BackwardPrepare,
        "dw_prefill_backward_prepare_f16" => Role::BackwardPrepare,
    }
    BACKWARD_SUMMARISE: dwk_prefill_backward_args in "prefill_backward_summarise" {
        "dw_prefill_backward_summarise_bf16_k64" => Role::BackwardSummarise(64),
        "dw_prefill_backward_summarise_bf16_k128" => Role::BackwardSummarise(128),
        "dw_prefill_backward_summarise_bf16_k256" => Role::BackwardSummarise(256),
        "dw_prefill_backward_summarise_f16_k64" => Role::BackwardSummarise(64),
        "dw_prefill_backward_summarise_f16_k128" => Role::BackwardSummarise(128),
        "dw_prefill_backward_summarise_f16_k256" => Role::BackwardSummarise(256),
    }
    BACKWARD_WALK: dwk_prefill_backward_args in "prefill_backward_walk" {
        "dw_prefill_backward_walk_bf16_k64" => Role::BackwardWalk(64),
        "dw_prefill_backward_walk_bf16_k128" => Role::BackwardWalk(128),
        "dw_prefill_backward_walk_bf16_k256" => Role::BackwardWalk(256),
        "dw_prefill_backward_walk_f16_k64" => Role::BackwardWalk(64),
        "dw_prefill_backward_walk_f16_k128" => Role::BackwardWalk(128),
        "dw_prefill_backward_walk_f16_k256" => Role::BackwardWalk(256),
    }
    BACKWARD_GRADIENTS: dwk_prefill_backward_args in "prefill_backward_gradients" {
        "dw_prefill_backward_gradients_bf16_k64" => Role::BackwardGradients(64),
        "dw_prefill_backward_gradients_bf16_k128" => Role::BackwardGradients(128),
        "dw_prefill_backward_gradients_bf16_k256" => Role::BackwardGradients(256),
        "dw_prefill_backward_gradients_f16_k64" => Role::BackwardGradients(64),
        "dw_prefill_backward_gradients_f16_k128" => Role::BackwardGradients(128),
        "dw_prefill_backward_gradients_f16_k256" => Role::BackwardGradients(256),
    }
    BACKWARD_SUMS: dwk_prefill_backward_args in "prefill_backward_sums" {
        "dw_prefill_backward_sums" => Role::BackwardSums,
    }
    NORM_BACKWARD: dwk_norm_backward_args in "norm_backward" {
        "dw_norm_backward_bf16" => Role::NormBackward,
        "dw_norm_backward_f16" => Role::NormBackward,
    }
    CONV_BACKWARD: dwk_conv_backward_args in "conv_backward" {
        "dw_conv_backward_bf16" => Role::ConvBackward,
        "dw_conv_backward_f16" => Role::ConvBackward,
    }
    GATE_BACKWARD: dwk_gate_backward_args in "gate_backward" {
        "dw_gate_backward" => Role::GateBackward,
    }
    GRADIENT_SUMS: dwk_gradient_sums_args in "gradient_sums" {
        "dw_gradient_sums" => Role::GradientSums,
    }
}

/// A family's kernels for a type. The first half of a family is bf16, the second fp16.
fn typed<Args>(family: &[Kernel<Args>], dtype: Dtype) -> &[Kernel<Args>] {
    let (bf16, f16) = family.split_at(family.len() / 2);
    if dtype == Dtype::F16 { f16 } else { bf16 }
}

/// Index of the smallest key bucket that holds `key_dim`. `key_dim` is at most the largest bucket.
pub(crate) fn bucket_index(key_dim: usize) -> usize {
    let larger = KEY_BUCKETS.iter().filter(|&&bucket| bucket >= key_dim);
    KEY_BUCKETS.len() - larger.count().max(1)
}

pub(crate) fn commit() -> Kernel<abi::dwk_commit_args> {
    COMMIT[0]
}

pub(crate) fn conv(dtype: Dtype) -> Kernel<abi::dwk_conv_args> {
    typed(CONV, dtype)[0]
}

pub(crate) fn decode(dtype: Dtype, key_dim: usize) -> Kernel<abi::dwk_decode_args> {
    typed(DECODE, dtype)[usize::from(key_dim > 128)]
}

/// Key dimension of the kernels of [`decode_full`] and [`decode_few`].
pub(crate) const FULL_KEY_DIM: usize = 128;

/// Index of the kernel of [`decode_full`] and [`decode_few`] for states of a type and a layout.
fn for_states(states: Dtype, layout: StateLayout) -> usize {
    2 * usize::from(states != Dtype::F32) + usize::from(layout == StateLayout::ValueMajor)
}

/// The decode for K = 128, V a multiple of 32, rows that begin at multiples of 16 bytes, and offsets of 32 bits.
pub(crate) fn decode_full(
    dtype: Dtype,
    states: Dtype,
    layout: StateLayout,
) -> Kernel<abi::dwk_decode_full_args> {
    typed(DECODE_FULL, dtype)[for_states(states, layout)]
}

/// The decode for the same heads and few sequences, with the same bits.
pub(crate) fn decode_few(
    dtype: Dtype,
    states: Dtype,
    layout: StateLayout,
) -> Kernel<abi::dwk_decode_full_args> {
    typed(DECODE_FEW, dtype)[for_states(states, layout)]
}

/// The convolution of drafts.
pub(crate) fn conv_draft(dtype: Dtype) -> Kernel<abi::dwk_conv_draft_args> {
    typed(CONV_DRAFT, dtype)[0]
}

/// The convolution whose first workgroup makes lengths on the device safe.
pub(crate) fn conv_lengths(dtype: Dtype) -> Kernel<abi::dwk_conv_lengths_args> {
    typed(CONV_LENGTHS, dtype)[0]
}

/// The decode of drafts.
pub(crate) fn decode_draft(dtype: Dtype, key_dim: usize) -> Kernel<abi::dwk_decode_draft_args> {
    typed(DECODE_DRAFT, dtype)[usize::from(key_dim > 128)]
}

/// The decode of drafts with the gated norm.
pub(crate) fn decode_draft_norm(dtype: Dtype) -> Kernel<abi::dwk_decode_draft_args> {
    typed(DECODE_DRAFT_NORM, dtype)[0]
}

pub(crate) fn decode_norm(dtype: Dtype) -> Kernel<abi::dwk_decode_args> {
    typed(DECODE_NORM, dtype)[0]
}

pub(crate) fn gate() -> Kernel<abi::dwk_gate_args> {
    GATE[0]
}

pub(crate) fn norm(dtype: Dtype) -> Kernel<abi::dwk_norm_args> {
    typed(NORM, dtype)[0]
}

pub(crate) fn prefill_lengths() -> Kernel<abi::dwk_prefill_lengths_args> {
    PREFILL_LENGTHS[0]
}

pub(crate) fn prefill_prepare(dtype: Dtype) -> Kernel<abi::dwk_prefill_prepare_args> {
    typed(PREFILL_PREPARE, dtype)[0]
}

pub(crate) fn prefill_summarise(
    dtype: Dtype,
    key_dim: usize,
) -> Kernel<abi::dwk_prefill_scan_args> {
    typed(PREFILL_SUMMARISE, dtype)[bucket_index(key_dim)]
}

pub(crate) fn prefill_combine(key_dim: usize) -> Kernel<abi::dwk_prefill_combine_args> {
    PREFILL_COMBINE[bucket_index(key_dim)]
}

pub(crate) fn prefill_collect() -> Kernel<abi::dwk_prefill_collect_args> {
    PREFILL_COLLECT[0]
}

pub(crate) fn prefill_scan(dtype: Dtype, key_dim: usize) -> Kernel<abi::dwk_prefill_scan_args> {
    typed(PREFILL_SCAN, dtype)[bucket_index(key_dim)]
}

/// The fused kernel, if one is compiled for this key dimension.
pub(crate) fn prefill_fused(
    dtype: Dtype,
    key_dim: usize,
) -> Option<Kernel<abi::dwk_prefill_fused_args>> {
    (typed(PREFILL_FUSED, dtype).get(bucket_index(key_dim))).copied()
}

/// The kernel that summarises segments for the fused kernel, if one is compiled for this key dimension.
pub(crate) fn prefill_fused_summarise(
    dtype: Dtype,
    key_dim: usize,
) -> Option<Kernel<abi::dwk_prefill_fused_args>> {
    (typed(PREFILL_FUSED_SUMMARISE, dtype).get(bucket_index(key_dim))).copied()
}

/// The kernel for short sequences, if one is compiled for this key dimension.
pub(crate) fn prefill_short(
    dtype: Dtype,
    key_dim: usize,
) -> Option<Kernel<abi::dwk_prefill_short_args>> {
    (typed(PREFILL_SHORT, dtype).get(bucket_index(key_dim))).copied()
}

pub(crate) fn norm_backward(dtype: Dtype) -> Kernel<abi::dwk_norm_backward_args> {
    typed(NORM_BACKWARD, dtype)[0]
}

pub(crate) fn conv_backward(dtype: Dtype) -> Kernel<abi::dwk_conv_backward_args> {
    typed(CONV_BACKWARD, dtype)[0]
}

pub(crate) fn gate_backward() -> Kernel<abi::dwk_gate_backward_args> {
    GATE_BACKWARD[0]
}

/// The kernel that adds up what workgroups left for gradients of weights.
pub(crate) fn gradient_sums() -> Kernel<abi::dwk_gradient_sums_args> {
    GRADIENT_SUMS[0]
}

/// Index in [`BACKWARD_BUCKETS`] of the bucket that holds `key_dim`. `key_dim` is at most the largest bucket.
pub(crate) fn backward_index(key_dim: usize) -> usize {
    let last = BACKWARD_BUCKETS.len() - 1;
    (BACKWARD_BUCKETS.iter().position(|&b| b >= key_dim)).unwrap_or(last)
}

/// That bucket.
pub(crate) fn backward_bucket(key_dim: usize) -> usize {
    BACKWARD_BUCKETS[backward_index(key_dim)]
}

/// The kernels of the backward: prepare, summarise, walk, gradients and sums.
pub(crate) fn prefill_backward(
    dtype: Dtype,
    key_dim: usize,
) -> [Kernel<abi::dwk_prefill_backward_args>; 5] {
    let index = backward_index(key_dim);
    [
        typed(BACKWARD_PREPARE, dtype)[0],
        typed(BACKWARD_SUMMARISE, dtype)[index],
        typed(BACKWARD_WALK, dtype)[index],
        typed(BACKWARD_GRADIENTS, dtype)[index],
        BACKWARD_SUMS[0],
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_what_the_row_says() {
        for (i, entry) in TABLE.iter().enumerate() {
            assert!(TABLE[..i].iter().all(|e| e.name != entry.name), "{entry:?}");
            let family = format!("dw_{}", entry.object);
            assert!(entry.name.starts_with(&family), "{entry:?}");
        }
    }

    #[test]
    fn kernels_are_found_by_type_and_key_dimension() {
        assert_eq!(conv(Dtype::F16).name(), "dw_conv_f16");
        assert_eq!(decode(Dtype::Bf16, 128).name(), "dw_decode_bf16_k128");
        assert_eq!(decode(Dtype::F16, 144).name(), "dw_decode_f16_k256");
        assert_eq!(conv_draft(Dtype::F16).name(), "dw_conv_draft_f16");
        let wide = decode_draft(Dtype::F16, 144).name();
        assert_eq!(wide, "dw_decode_draft_f16_k256");
        for (key_dim, bucket) in [
            (16, 64),
            (64, 64),
            (80, 96),
            (112, 128),
            (144, 192),
            (256, 256),
        ] {
            for (dtype, word) in [(Dtype::Bf16, "bf16"), (Dtype::F16, "f16")] {
                let name = format!("dw_prefill_scan_{word}_k{bucket}");
                assert_eq!(prefill_scan(dtype, key_dim).name(), name);
                let name = format!("dw_prefill_summarise_{word}_k{bucket}");
                assert_eq!(prefill_summarise(dtype, key_dim).name(), name);
            }
            let name = format!("dw_prefill_combine_k{bucket}");
            assert_eq!(prefill_combine(key_dim).name(), name);
            assert_eq!(
                prefill_scan(Dtype::F16, key_dim).role(),
                Role::PrefillScan(bucket)
            );
            let name = format!("dw_prefill_fused_summarise_bf16_k{bucket}");
            let fused = prefill_fused_summarise(Dtype::Bf16, key_dim).map(Kernel::name);
            assert_eq!(fused, (bucket <= 128).then_some(&name[..]));
            let bucket = bucket.next_power_of_two();
            let names = prefill_backward(Dtype::F16, key_dim).map(Kernel::name);
            for (i, stem) in [(1, "summarise"), (2, "walk"), (3, "gradients")] {
                let name = format!("dw_prefill_backward_{stem}_f16_k{bucket}");
                assert_eq!(names[i], name);
            }
        }
    }
}
