//! Lengths of sequences (`cu_seqlens`), on the host or on the device.

use std::ffi::c_void;
use std::slice;

use deltawave::batch::{CuSeqlens, PerSequence};
use deltawave::error::ArgumentKind;

use crate::abi::{self, dw_lengths};
use crate::read::{self, Checked};
use crate::status::refuse;

/// Checked `dw_lengths`.
pub(crate) struct Lengths {
    data: *const c_void,
    entries: usize,
    wide: bool,
}

impl Lengths {
    /// # Safety
    /// The pointer is null or valid.
    pub unsafe fn read(pointer: *const dw_lengths) -> Checked<Lengths> {
        // SAFETY: the caller keeps the promise under `# Safety`.
        let lengths = unsafe { read::structure("cu_seqlens", pointer) }?;
        let types = [
            (abi::DW_I32, "DW_I32", false),
            (abi::DW_I64, "DW_I64", true),
        ];
        Ok(Lengths {
            data: lengths.data,
            entries: read::natural("cu_seqlens.entries", lengths.entries)?,
            wide: read::choice("cu_seqlens.dtype", lengths.dtype, &types)?,
        })
    }

    /// `cu_seqlens` of a launch in device memory; absent if the pointer is null.
    ///
    /// # Safety
    /// The pointer is null or valid. The entries stay in device memory until the work that reads them is done.
    pub unsafe fn given(pointer: *const dw_lengths) -> Checked<Option<CuSeqlens<'static>>> {
        if pointer.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller keeps the promise under `# Safety`.
        unsafe { Ok(Some(Self::read(pointer)?.device())) }
    }

    pub fn sequences(&self) -> usize {
        self.entries.saturating_sub(1)
    }

    /// Copies the entries from host memory.
    ///
    /// # Safety
    /// The address is null or has `entries` entries.
    pub unsafe fn host(&self) -> Checked<Vec<i64>> {
        if self.entries > 0 {
            read::given("cu_seqlens.data", self.data)?;
        }
        // SAFETY: the caller keeps the promise under `# Safety`.
        unsafe {
            if self.wide {
                Ok(host_slice("cu_seqlens", self.data.cast::<i64>(), self.entries)?.to_vec())
            } else {
                let narrow = host_slice("cu_seqlens", self.data.cast::<i32>(), self.entries)?;
                Ok(narrow.iter().map(|&x| x.into()).collect())
            }
        }
    }

    /// The entries as an argument in device memory.
    ///
    /// # Safety
    /// The entries stay in device memory until the work that reads them is done.
    unsafe fn device(&self) -> CuSeqlens<'static> {
        // SAFETY: the caller keeps the promise under `# Safety`.
        unsafe {
            if self.wide {
                CuSeqlens::I64(PerSequence::from_raw(self.data.cast(), self.entries))
            } else {
                CuSeqlens::I32(PerSequence::from_raw(self.data.cast(), self.entries))
            }
        }
    }
}

/// Array of `entries` elements in host memory.
///
/// # Safety
/// The address is null or has `entries` elements.
pub(crate) unsafe fn host_slice<'a, T>(
    name: &'static str,
    data: *const T,
    entries: usize,
) -> Checked<&'a [T]> {
    if entries == 0 {
        return Ok(&[]);
    }
    let data = read::given(name, data)?;
    let whole = entries.checked_mul(size_of::<T>());
    if !data.is_aligned() || whole.is_none_or(|bytes| bytes > isize::MAX as usize) {
        let was = format!("{entries} entries at {data:p}");
        let allowed = "an aligned array that fits into memory";
        return Err(refuse(name, ArgumentKind::Pointer, was, allowed));
    }
    // SAFETY: aligned, and the caller answers for the rest.
    Ok(unsafe { slice::from_raw_parts(data, entries) })
}
