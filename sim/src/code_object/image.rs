//! Loaded segments of a code object, in one block of host memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::LoadError;
use crate::memory::Extent;

/// Alignment of the block: the page size that the linker used. Segments keep their relative distances, so pc-relative
/// addresses hold.
const ALIGN: usize = 4096;

/// Alignment that the host's allocator gives to zeroed pages without writing them. At a higher alignment it would clear
/// them by hand: too slow for a file that claims 2 GiB.
const HOST_ALIGN: usize = 16;

/// Zeroed host memory that kernels read and write through its address.
pub(crate) struct Image {
    block: NonNull<u8>,
    layout: Layout,
    /// The first byte, aligned, in `block`.
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: the block is only reached through raw copies and by kernels, whose launches answer for races.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Image {
    /// Allocates at least `size` zeroed bytes.
    pub fn new(size: usize) -> Result<Self, LoadError> {
        let error = LoadError::OutOfMemory { size };
        let size = size.max(ALIGN);
        let Some(layout) = size
            .checked_add(ALIGN)
            .and_then(|room| Layout::from_size_align(room, HOST_ALIGN).ok())
        else {
            return Err(error);
        };
        // SAFETY: the layout has a size above zero.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(error)?;
        // SAFETY: less than `ALIGN`, and the block has that much more than `size`.
        let start = unsafe { block.add(block.as_ptr().align_offset(ALIGN)) };
        Ok(Image {
            block,
            layout,
            start,
            size,
        })
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Address range.
    pub fn extent(&self) -> Extent {
        Extent {
            start: self.address(),
            end: self.address() + self.size as u64,
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

    /// Sets `size` bytes from `offset` on. Bytes beyond the end are left out.
    pub fn fill(&self, offset: usize, size: usize, value: u8) {
        let size = size.min(self.size.saturating_sub(offset));
        if size > 0 {
            // SAFETY: the bytes lie in the block.
            unsafe { self.start.as_ptr().add(offset).write_bytes(value, size) };
        }
    }

    /// Reads `N` bytes at `offset`; `None` if they do not fit.
    pub fn read<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let at = self.range(offset, N)?;
        let mut out = [0; N];
        // SAFETY: `range` checked that the bytes lie in the block.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(at), out.as_mut_ptr(), N) };
        Some(out)
    }

    fn range(&self, offset: u64, len: usize) -> Option<usize> {
        let at = usize::try_from(offset).ok()?;
        (at.checked_add(len)? <= self.size).then_some(at)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.block.as_ptr(), self.layout) };
    }
}
