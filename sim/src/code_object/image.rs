//! The loaded segments of a code object: one block of host memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::LoadError;
use crate::memory::Extent;

/// Segments keep their relative distances, so pc-relative addresses hold, and the block is aligned to
/// the pages that the linker laid them out for.
const ALIGN: usize = 4096;

/// Zeroed host memory that kernels read and write through its address.
pub(crate) struct Image {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block is only reached through raw copies and by kernels, whose launches answer for races.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Image {
    /// Zeroed memory of at least `size` bytes.
    pub fn new(size: usize) -> Result<Self, LoadError> {
        let error = LoadError::OutOfMemory { size };
        let Ok(layout) = Layout::from_size_align(size.max(ALIGN), ALIGN) else {
            return Err(error);
        };
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(error)?;
        Ok(Image { start, layout })
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Where it lies.
    pub fn extent(&self) -> Extent {
        Extent {
            start: self.address(),
            end: self.address() + self.layout.size() as u64,
        }
    }

    /// Copies `bytes` to `offset`; false if they do not fit.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        let Some(at) = self.range(offset, bytes.len()) else {
            return false;
        };
        // SAFETY: `range` checked that the bytes lie in the block; the source is other memory.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(at), bytes.len())
        };
        true
    }

    /// Sets `size` bytes from `offset`; what lies beyond the end is left out.
    pub fn fill(&self, offset: usize, size: usize, value: u8) {
        let size = size.min(self.layout.size().saturating_sub(offset));
        if size > 0 {
            // SAFETY: the bytes lie in the block.
            unsafe { self.start.as_ptr().add(offset).write_bytes(value, size) };
        }
    }

    /// Copies `N` bytes from `offset`.
    pub fn read<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let at = self.range(offset, N)?;
        let mut out = [0; N];
        // SAFETY: `range` checked that the bytes lie in the block.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(at), out.as_mut_ptr(), N) };
        Some(out)
    }

    fn range(&self, offset: u64, len: usize) -> Option<usize> {
        let at = usize::try_from(offset).ok()?;
        (at.checked_add(len)? <= self.layout.size()).then_some(at)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
