//! Scratch memory of launches.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::alias::Span;
use crate::check::{self, Checked};
use crate::runtime::Context;
use crate::tensor::{Buffer, Owner};

/// Alignment of the workspace.
pub const WORKSPACE_ALIGN: usize = 256;

/// Scratch memory of the caller: what one launch hands from kernel to kernel. Its content means nothing before and
/// after. Launches on one stream may share it, from several threads, too: each is enqueued whole, in some order. Launches
/// on different streams may share it only in an order that the caller makes.
#[derive(Debug)]
pub struct Workspace<'a> {
    address: *mut c_void,
    bytes: usize,
    owner: Owner,
    borrow: PhantomData<&'a mut ()>,
}

impl<'a> Workspace<'a> {
    /// A whole buffer.
    pub fn new(buffer: &'a mut Buffer<u8>) -> Self {
        Workspace {
            address: buffer.address(),
            bytes: buffer.len(),
            owner: buffer.owner(),
            borrow: PhantomData,
        }
    }

    /// All of it, whatever a launch needs: nothing else may use it meanwhile.
    pub(crate) fn span(&self) -> Span<'static> {
        Span::bytes("workspace", self.address.addr(), self.bytes)
    }

    /// The address of the first `bytes` bytes, and the rest. Not bounds-checked.
    pub(crate) fn split(self, bytes: usize) -> (*mut c_void, Self) {
        let rest = Workspace {
            address: self.address.wrapping_byte_add(bytes),
            bytes: self.bytes - bytes,
            ..self
        };
        (self.address, rest)
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.address
    }

    /// The caller's own memory.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory of the context's device, and nothing else uses them while a launch that was
    /// given them is under way.
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
    check::device("workspace", &workspace.owner, context)?;
    check::region(
        "workspace",
        workspace.address,
        workspace.bytes,
        bytes,
        WORKSPACE_ALIGN,
    )
}
