//! Batches: lengths of sequences (`cu_seqlens`), and one number per sequence on the device.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;

use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::tensor::{Buffer, Element, Owner};

/// One number for each sequence, on the device: `u8` flags, `i32` slots.
#[derive(Clone, Debug)]
pub struct PerSequence<'a, T: Element> {
    address: *const T,
    len: usize,
    owner: Owner,
    borrow: PhantomData<&'a ()>,
}

impl<'a, T: Element> From<&'a Buffer<T>> for PerSequence<'a, T> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        PerSequence {
            address: buffer.address().cast_const().cast(),
            len: buffer.len(),
            owner: buffer.owner(),
            borrow: PhantomData,
        }
    }
}

impl<T: Element> PerSequence<'_, T> {
    /// A view of the caller's memory.
    ///
    /// # Safety
    /// `len` elements at `address` are memory of the context's device while work that reads them is under way.
    pub unsafe fn from_raw(address: *const T, len: usize) -> Self {
        PerSequence {
            address,
            len,
            owner: None,
            borrow: PhantomData,
        }
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Address and size in bytes.
    pub(crate) fn memory(&self) -> (usize, usize) {
        let bytes = self.len.saturating_mul(size_of::<T>());
        (self.address.addr(), bytes)
    }

    /// The entries of a range of sequences. Not bounds-checked.
    pub(crate) fn part(&self, sequences: Range<usize>) -> Self {
        PerSequence {
            address: self.address.wrapping_add(sequences.start),
            len: sequences.len(),
            ..self.clone()
        }
    }

    /// Its address, or an error unless it has `wanted` elements.
    pub(crate) fn checked(&self, argument: &str, wanted: usize) -> Checked<*const T> {
        self.checked_as(argument, wanted, ArgumentKind::Shape)
    }

    fn checked_as(&self, argument: &str, wanted: usize, kind: ArgumentKind) -> Checked<*const T> {
        check::ensure(self.len == wanted, || {
            let was = format!("{} elements", self.len);
            let allowed = format!("exactly {wanted} are needed");
            ArgumentError::new(argument, kind, was, allowed)
        })?;
        let bytes = self.len.saturating_mul(size_of::<T>());
        check::region(argument, self.address.cast(), bytes, bytes, align_of::<T>())?;
        Ok(self.address)
    }
}

/// `cu_seqlens` on the device, `[N + 1]`: first row of each sequence, then the end of the last sequence.
#[derive(Clone, Debug)]
pub enum CuSeqlens<'a> {
    /// 32-bit entries.
    I32(PerSequence<'a, i32>),
    /// 64-bit entries.
    I64(PerSequence<'a, i64>),
}

impl<'a> CuSeqlens<'a> {
    /// The lengths, or an error if a launch that needs them was given none.
    pub(crate) fn required(given: &'a Option<Self>) -> Checked<&'a Self> {
        given.as_ref().ok_or_else(|| {
            let allowed = "it must be given: the plan has lengths on the device";
            ArgumentError::new("cu_seqlens", ArgumentKind::Presence, "absent", allowed)
        })
    }

    /// Refuses lengths in launches of plans that already have them.
    pub(crate) fn refuse(given: &Option<Self>) -> Checked<()> {
        check::ensure(given.is_none(), || {
            let was = "given to a plan that already has lengths";
            ArgumentError::new(
                "cu_seqlens",
                ArgumentKind::Presence,
                was,
                "it must be absent",
            )
        })
    }

    pub(crate) fn owner(&self) -> &Owner {
        match self {
            CuSeqlens::I32(x) => x.owner(),
            CuSeqlens::I64(x) => x.owner(),
        }
    }

    /// The address, and whether entries have 64 bits. An error unless there are `sequences + 1` entries.
    pub(crate) fn checked(&self, sequences: usize) -> Checked<(*const c_void, bool)> {
        let (argument, kind) = ("cu_seqlens", ArgumentKind::Lengths);
        Ok(match self {
            CuSeqlens::I32(x) => (x.checked_as(argument, sequences + 1, kind)?.cast(), false),
            CuSeqlens::I64(x) => (x.checked_as(argument, sequences + 1, kind)?.cast(), true),
        })
    }
}

impl<'a> From<&'a Buffer<i32>> for CuSeqlens<'a> {
    fn from(buffer: &'a Buffer<i32>) -> Self {
        CuSeqlens::I32(buffer.into())
    }
}

impl<'a> From<&'a Buffer<i64>> for CuSeqlens<'a> {
    fn from(buffer: &'a Buffer<i64>) -> Self {
        CuSeqlens::I64(buffer.into())
    }
}

/// The host's `cu_seqlens` as i32. An error unless they start at 0, never decrease and end within the tokens.
pub(crate) fn checked_cu_seqlens<L: Copy + Into<i64>>(
    cu_seqlens: &[L],
    tokens: usize,
) -> Checked<Vec<i32>> {
    let refuse = |was: String, allowed: String| {
        ArgumentError::new("cu_seqlens", ArgumentKind::Lengths, was, allowed)
    };
    check::ensure(!cu_seqlens.is_empty(), || {
        let allowed = "it must have one entry more than there are sequences";
        refuse("it is empty".to_owned(), allowed.to_owned())
    })?;
    let most = i64::try_from(tokens).unwrap_or(i64::MAX);
    let most = most.min(i32::MAX.into());
    let mut checked = Vec::with_capacity(cu_seqlens.len());
    let mut before = 0i64;
    for (i, &entry) in cu_seqlens.iter().enumerate() {
        let entry: i64 = entry.into();
        let was = || format!("entry {i} is {entry}");
        check::ensure(i > 0 || entry == 0, || {
            refuse(was(), "the first entry must be 0".to_owned())
        })?;
        check::ensure(entry >= before, || {
            let was = format!("{}, after {before}", was());
            refuse(was, "entries must not decrease".to_owned())
        })?;
        check::ensure(entry <= most, || {
            refuse(
                was(),
                format!("entries must be at most the {tokens} tokens"),
            )
        })?;
        before = entry;
        checked.push(entry as i32);
    }
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        assert_eq!(
            checked_cu_seqlens(&[0i64, 3, 3, 7], 9),
            Ok(vec![0, 3, 3, 7])
        );
        assert_eq!(checked_cu_seqlens(&[0i32], 0), Ok(vec![0]));
        for (wrong, words) in [
            (vec![], "it is empty"),
            (vec![1i64, 2], "entry 0 is 1"),
            (vec![0, 5, 4], "entry 2 is 4, after 5"),
            (vec![0, 10], "entry 1 is 10"),
            (vec![0, i64::MAX], "at most the 9 tokens"),
        ] {
            let error = checked_cu_seqlens(&wrong, 9).unwrap_err();
            assert_eq!(error.kind, ArgumentKind::Lengths);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
