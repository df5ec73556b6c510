//! Errors of this crate.

use std::fmt;

use hip_sys::{HipError, LoadError};
use thiserror::Error;

/// Kind of fault of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArgumentKind {
    /// A shape or a dimension.
    Shape,
    /// A stride.
    Stride,
    /// An element type.
    Dtype,
    /// A sequence length or an entry of `cu_seqlens`.
    Lengths,
    /// A pointer that is null or not aligned.
    Pointer,
    /// A buffer or workspace that is too small.
    Size,
    /// A tensor that is missing, or given although nothing reads it.
    Presence,
    /// A number outside its range.
    Value,
    /// Memory or a stream of another device.
    Device,
    /// An output that shares memory with another argument.
    Overlap,
}

/// An argument that was refused. Nothing was launched, written or lost.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{argument}: {was}; {allowed}")]
pub struct ArgumentError {
    /// The argument, as the API names it.
    pub argument: String,
    /// Kind of fault.
    pub kind: ArgumentKind,
    /// Description of the refused value.
    pub was: String,
    /// Description of allowed values.
    pub allowed: String,
}

impl ArgumentError {
    pub(crate) fn new(
        argument: impl Into<String>,
        kind: ArgumentKind,
        was: impl fmt::Display,
        allowed: impl fmt::Display,
    ) -> Self {
        ArgumentError {
            argument: argument.into(),
            kind,
            was: was.to_string(),
            allowed: allowed.to_string(),
        }
    }
}

/// Ranks of a shared prefill with different plans. No summary was sent.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "ranks differ in {what}: {theirs} on rank {rank}, {ours} on rank {own}; all ranks must make the same layout and spec"
)]
pub struct RankMismatch {
    /// What differs.
    pub what: &'static str,
    /// The other rank.
    pub rank: usize,
    /// Its value, or a hash of it.
    pub theirs: String,
    /// This rank.
    pub own: usize,
    /// The value of this rank, or a hash of it.
    pub ours: String,
}

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument was refused.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// A call of the runtime failed.
    #[error(transparent)]
    Hip(#[from] HipError),
    /// A collective of RCCL or NCCL failed, or was not complete in time.
    #[error(transparent)]
    Collective(#[from] hip_sys::CclError),
    /// Ranks have different layouts or specs.
    #[error(transparent)]
    Ranks(#[from] RankMismatch),
    /// No runtime was found.
    #[error("no HIP runtime could be loaded")]
    Load(#[from] LoadError),
    /// The simulator was asked for, and this crate was built without its feature `simulator`.
    #[error("this build has no simulator: the feature `simulator` of the crate deltawave is off")]
    NoSimulator,
    /// The runtime has no such device.
    #[error("device {device} does not exist: the runtime {library} has {count}")]
    NoSuchDevice {
        /// The device that was asked for.
        device: usize,
        /// Number of devices.
        count: usize,
        /// Name of the runtime's library.
        library: String,
    },
    /// Kernels for the device's architecture are missing, all or some.
    #[error("there are no kernels for {arch} ({device}): {object} is missing; {reason}")]
    MissingKernels {
        /// The architecture.
        arch: String,
        /// The device.
        device: String,
        /// The first code object that is missing.
        object: &'static str,
        /// Reason, and how to get them.
        reason: String,
    },
    /// A code object lacks a kernel that this crate expects in it.
    #[error("code object {object} lacks the kernel {kernel}")]
    MissingKernel {
        /// The code object.
        object: &'static str,
        /// The kernel.
        kernel: String,
        /// The runtime's error.
        source: HipError,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
