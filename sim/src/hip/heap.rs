//! Device memory and pinned host memory: host memory at its own address, with exact extents.

use super::device::total_memory;
use super::state::Outcome;
use crate::memory::{Extent, Memory, Written};
use hip_sys::{hipError_t, hipMemoryType};
use memmap2::MmapMut;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Alignment of every allocation.
const ALIGN: usize = 256;
/// Minimum size in bytes of allocations that come straight from the system: zeroed, and committed when touched.
const MAP_FROM: usize = 64 << 10;

/// Zeroed host memory.
enum Block {
    Small {
        start: *mut u8,
        layout: std::alloc::Layout,
    },
    Mapped(MmapMut),
}

// SAFETY: the block owns its memory, and is only reached through raw addresses.
unsafe impl Send for Block {}

impl Block {
    fn new(size: usize) -> Option<Block> {
        if size >= MAP_FROM {
            let options = memmap2::MmapOptions::new()
                .len(size)
                .no_reserve_swap()
                .map_anon();
            return options.ok().map(Block::Mapped);
        }
        let layout = std::alloc::Layout::from_size_align(size, ALIGN).ok()?;
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(Block::Small { start, layout })
    }

    fn address(&self) -> u64 {
        match self {
            Block::Small { start, .. } => *start as u64,
            Block::Mapped(map) => map.as_ptr() as u64,
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Block::Small { start, layout } = self {
            // SAFETY: allocated in `new` with this layout, freed once.
            unsafe { std::alloc::dealloc(*start, *layout) };
        }
    }
}

/// One allocation.
pub(super) struct Allocation {
    block: Block,
    /// Exact size in bytes.
    pub size: usize,
    /// Device memory or pinned host memory.
    pub kind: hipMemoryType,
    /// Flags of `hipHostMalloc`.
    pub flags: u32,
    /// Tracker of written bytes, if a check asks for it.
    written: Option<Arc<Written>>,
}

/// All allocations by address.
#[derive(Default)]
pub(super) struct Heap {
    allocations: BTreeMap<u64, Allocation>,
    /// Loaded code objects: end by start address.
    images: BTreeMap<u64, u64>,
    used: usize,
    snapshot: Option<Arc<Memory>>,
}

impl Heap {
    /// Allocates. Size 0 gives the null pointer.
    pub fn allocate(&mut self, size: usize, kind: hipMemoryType, flags: u32) -> Outcome<u64> {
        const OUT: hipError_t = hipError_t::hipErrorOutOfMemory;
        if size == 0 {
            return Ok(0);
        }
        let device = kind == hipMemoryType::hipMemoryTypeDevice;
        if device && size > total_memory() - self.used {
            return Err(OUT);
        }
        let block = Block::new(size).ok_or(OUT)?;
        let address = block.address();
        if device {
            self.used += size;
        }
        let allocation = Allocation {
            block,
            size,
            kind,
            flags,
            written: None,
        };
        debug_assert_eq!(allocation.block.address() % ALIGN as u64, 0);
        self.allocations.insert(address, allocation);
        self.snapshot = None;
        Ok(address)
    }

    /// Tracks writes to an allocation from now on. Nothing has been written to it yet.
    pub fn track(&mut self, address: u64) {
        if let Some(a) = self.allocations.get_mut(&address) {
            let end = address + a.size as u64;
            let start = address;
            // Without memory for the tracker, everything counts as written.
            a.written = Written::nothing(Extent { start, end }).ok().map(Arc::new);
            self.snapshot = None;
        }
    }

    /// Marks everything as written, because a kernel runs without tracking.
    pub fn untrack(&mut self) {
        let mut tracked = false;
        for a in self.allocations.values_mut() {
            tracked |= a.written.take().is_some();
        }
        if tracked {
            self.snapshot = None;
        }
    }

    fn written(&self, address: u64) -> Option<&Written> {
        self.find(address)?.1.written.as_deref()
    }

    /// Marks bytes as written: copied from `source`, or from known values if that is `None`.
    pub fn wrote(&self, destination: u64, source: Option<u64>, size: usize) {
        if let Some(to) = self.written(destination) {
            let from = source.and_then(|at| Some((self.written(at)?, at)));
            to.copy(destination, from, size);
        }
    }

    /// Frees the allocation of this kind at exactly this address.
    pub fn free(&mut self, address: u64, kind: hipMemoryType) -> Outcome {
        match self.allocations.get(&address) {
            Some(a) if a.kind == kind => {
                if kind == hipMemoryType::hipMemoryTypeDevice {
                    self.used -= a.size;
                }
                self.allocations.remove(&address);
                self.snapshot = None;
                Ok(())
            }
            _ => Err(hipError_t::hipErrorInvalidValue),
        }
    }

    /// Finds the allocation that contains an address, and its start.
    pub fn find(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.size as u64).then_some((*start, allocation))
    }

    /// Whether `[address, address + size)` lies in one allocation or code object.
    pub fn contains(&self, address: u64, size: usize) -> bool {
        let Some(end) = address.checked_add(size as u64) else {
            return false;
        };
        let allocated = self
            .find(address)
            .is_some_and(|(start, a)| end <= start + a.size as u64);
        allocated || {
            let image = self.images.range(..=address).next_back();
            image.is_some_and(|(_, image_end)| end <= *image_end)
        }
    }

    /// Whether an address lies in an allocation or a code object.
    pub fn is_device(&self, address: u64) -> bool {
        self.contains(address, 1)
    }

    /// Makes a code object's segments accessible.
    pub fn add_image(&mut self, extent: Extent) {
        self.images.insert(extent.start, extent.end);
        self.snapshot = None;
    }

    /// Removes a code object's segments.
    pub fn remove_image(&mut self, extent: Extent) {
        self.images.remove(&extent.start);
        self.snapshot = None;
    }

    /// Allocated bytes of device memory.
    pub fn used(&self) -> usize {
        self.used
    }

    /// The allocations that a kernel may touch now.
    pub fn memory(&mut self) -> Arc<Memory> {
        let (allocations, images) = (&self.allocations, &self.images);
        let snapshot = self.snapshot.get_or_insert_with(|| {
            let allocated = allocations.iter().map(|(start, a)| Extent {
                start: *start,
                end: start + a.size as u64,
            });
            let images = images.iter().map(|(start, end)| Extent {
                start: *start,
                end: *end,
            });
            let written = allocations.values().filter_map(|a| a.written.clone());
            let memory = Memory::new(allocated.chain(images).collect());
            Arc::new(memory.track(written.collect()))
        });
        snapshot.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: hipMemoryType = hipMemoryType::hipMemoryTypeDevice;
    const HOST: hipMemoryType = hipMemoryType::hipMemoryTypeHost;

    #[test]
    fn extents_are_exact() {
        let mut heap = Heap::default();
        for size in [1, 255, 256, 257, MAP_FROM, MAP_FROM + 3] {
            let a = heap.allocate(size, DEVICE, 0).unwrap();
            assert_eq!(a % ALIGN as u64, 0);
            assert!(heap.contains(a, size));
            assert!(!heap.contains(a, size + 1));
            assert!(!heap.is_device(a + size as u64));
            assert_eq!(heap.used(), size);
            assert!(heap.free(a, HOST).is_err());
            heap.free(a, DEVICE).unwrap();
            assert!(heap.free(a, DEVICE).is_err());
            assert!(!heap.contains(a, 1));
        }
        assert_eq!(heap.used(), 0);
    }

    #[test]
    fn the_device_has_an_end() {
        let mut heap = Heap::default();
        let error = heap.allocate(total_memory() + 1, DEVICE, 0);
        assert_eq!(error, Err(hipError_t::hipErrorOutOfMemory));
        assert_eq!(heap.allocate(0, DEVICE, 0), Ok(0));
    }
}
