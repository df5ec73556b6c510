//! Lengths that only the device knows. A kernel of one wave checks them there before other kernels index with them.

use std::ffi::c_void;
use std::ptr;

use crate::abi::dwk_prefill_lengths_args;
use crate::batch::CuSeqlens;
use crate::check::{self, Checked};
use crate::error::Result;
use crate::kernels;
use crate::runtime::{Context, Stream};
use crate::workspace::WORKSPACE_ALIGN;

/// Bytes of the workspace before the checked lengths: the status word.
const STATUS_BYTES: usize = WORKSPACE_ALIGN;

/// Lengths of `sequences` sequences in `tokens` tokens. The first `decodes` sequences have one token each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLengths {
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    /// At most `sequences`, and at most `tokens`.
    pub(crate) decodes: usize,
}

/// The arguments of a launch.
pub(crate) struct LaunchArguments(dwk_prefill_lengths_args);

impl DeviceLengths {
    fn checked_bytes(&self) -> usize {
        ((self.sequences + 1) * 4).next_multiple_of(WORKSPACE_ALIGN)
    }

    fn rest_bytes(&self) -> usize {
        match self.decodes {
            0 => 0,
            decodes => ((self.sequences - decodes + 1) * 4).next_multiple_of(WORKSPACE_ALIGN),
        }
    }

    /// Bytes of workspace: the status word and the checked lengths.
    pub(crate) fn bytes(&self) -> usize {
        STATUS_BYTES + self.checked_bytes() + self.rest_bytes()
    }

    /// Checks the lengths' tensor and returns the launch arguments, with workspace at an address.
    pub(crate) fn lower(
        &self,
        context: &Context,
        cu_seqlens: &CuSeqlens<'_>,
        workspace: *mut c_void,
    ) -> Checked<LaunchArguments> {
        check::device("cu_seqlens", cu_seqlens.owner(), context)?;
        let (lengths, wide) = cu_seqlens.checked(self.sequences)?;
        let checked = workspace.wrapping_byte_add(STATUS_BYTES);
        let rest = match self.decodes {
            0 => ptr::null_mut(),
            _ => checked.wrapping_byte_add(self.checked_bytes()),
        };
        Ok(LaunchArguments(dwk_prefill_lengths_args {
            cu_seqlens: lengths,
            checked: checked.cast(),
            status: workspace.cast(),
            rest: rest.cast(),
            sequences: self.sequences as i32,
            tokens: self.tokens as i32,
            wide: i32::from(wide),
            decodes: self.decodes as i32,
        }))
    }
}

impl LaunchArguments {
    /// `cu_seqlens` of all sequences, which the launch writes.
    pub(crate) fn checked(&self) -> *const i32 {
        self.0.checked
    }

    /// `cu_seqlens` of the sequences after the decodes, counted from 0.
    pub(crate) fn rest(&self) -> *const i32 {
        match self.0.decodes {
            0 => self.0.checked,
            _ => self.0.rest,
        }
    }

    /// Enqueues the kernel on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<()> {
        let kernel = kernels::prefill_lengths();
        let threads = context.target().threads(kernel.role());
        // SAFETY: the caller of `lower` vouches for the workspace; lengths are borrowed, or callers of `from_raw`
        // vouch.
        unsafe { context.launch(stream, kernel, 1, threads, &self.0) }
    }
}
