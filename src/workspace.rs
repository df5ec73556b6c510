//! Scratch memory of launches.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::alias::Span;
use crate::check::{self, Checked};
use crate::runtime::Context;
use crate::tensor::{Buffer, Owner};

/// Alignment of the workspace.
pub const WORKSPACE_ALIGN: usize = 256;

/// Scratch memory of the caller, through which one launch passes data between its kernels. The contents mean nothing
/// before and after the launch. Launches on one stream may share it, also from several threads: each launch is enqueued
/// as a whole. Launches on different streams may share it only if the caller orders them.
#[derive(Debug)]
pub struct Workspace<'a> {
    address: *mut c_void,
    bytes: usize,
    owner: Owner,
    borrow: PhantomData<&'a mut ()>,
}

impl<'a> Workspace<'a> {
    /// Workspace of a whole buffer.
    pub fn new(buffer: &'a mut Buffer<u8>) -> Self {
        Workspace {
            address: buffer.address(),
            bytes: buffer.len(),
            owner: buffer.owner(),
            borrow: PhantomData,
        }
    }

    /// Memory range of the whole workspace, for the overlap check: nothing else may use it during a launch.
    pub(crate) fn span(&self) -> Span<'static> {
        self.span_of("workspace")
    }

    /// Memory range, for an argument of another name.
    pub(crate) fn span_of(&self, argument: &'static str) -> Span<'static> {
        Span::bytes(argument, self.address.addr(), self.bytes)
    }

    /// Splits off the first `bytes` bytes: their address, and the rest. Not bounds-checked.
    pub(crate) fn split(self, bytes: usize) -> (*mut c_void, Self) {
        let rest = Workspace {
            address: self.address.wrapping_byte_add(bytes),
            bytes: self.bytes - bytes,
            ..self
        };
        (self.address, rest)
    }

    /// The same memory, for a call that ends before the next use.
    pub(crate) fn again(&self) -> Workspace<'_> {
        Workspace {
            owner: self.owner.clone(),
            ..*self
        }
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.address
    }

    /// Workspace in the caller's memory.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory of the context's device, and nothing else uses them while a launch that
    /// was given them is under way.
    pub unsafe fn from_raw(address: *mut c_void, bytes: usize) -> Self {
        Workspace {
            address,
            bytes,
            owner: None,
            borrow: PhantomData,
        }
    }
}

pub(crate) fn check_workspace(
    workspace: &Workspace<'_>,
    bytes: usize,
    context: &Context,
) -> Checked<()> {
    check_memory("workspace", workspace, bytes, context)
}

/// [`check_workspace`] for an argument of another name.
pub(crate) fn check_memory(
    argument: &str,
    workspace: &Workspace<'_>,
    bytes: usize,
    context: &Context,
) -> Checked<()> {
    check::device(argument, &workspace.owner, context)?;
    // A launch that needs none may be given one without bytes, at any address.
    if bytes == 0 && workspace.bytes == 0 {
        return Ok(());
    }
    check::region(
        argument,
        workspace.address,
        workspace.bytes,
        bytes,
        WORKSPACE_ALIGN,
    )
}
