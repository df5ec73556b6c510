//! Prefill of batches whose lengths the device alone knows.

use std::ffi::c_void;
use std::ptr;

use super::lengths::DeviceLengths;
use super::lower::{Kernels, Lowered, Shape, Tables};
use super::states::PlanSlots;
use super::{Part, PrefillSpec, PrefillTensors, Workspace, check_workspace};
use crate::alias::Span;
use crate::check::{self, Batch};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::runtime::{Context, Stream};
use crate::sequences::CuSeqlens;

/// A prefill of packed batches whose lengths are on the device alone. One kernel more checks them there: entries that
/// decrease or exceed the tokens are replaced by the nearest allowed ones, never followed out of bounds, and the
/// status says so. No sequence is cut into segments, which takes lengths that the host knows.
#[derive(Debug)]
pub struct DevicePrefill {
    context: Context,
    shape: Shape,
    kernels: Kernels,
}

impl DevicePrefill {
    /// Batches of exactly `sequences` sequences (some may be empty) in `tokens` rows.
    ///
    /// # Errors
    /// A spec or sizes that are not allowed; more than one segment.
    pub fn new(
        context: &Context,
        spec: PrefillSpec,
        tokens: usize,
        sequences: usize,
    ) -> Result<Self> {
        let shape = Shape::new(spec, Batch::Packed { tokens }, sequences, context)?;
        check::ensure(spec.segments.is_none_or(|n| n == 1), || {
            let was = spec.segments.unwrap_or_default();
            let allowed = "sequences whose lengths the device alone knows are not cut";
            ArgumentError::new("segments", ArgumentKind::Value, was, allowed)
        })?;
        Ok(DevicePrefill {
            context: context.clone(),
            shape,
            kernels: spec.kernels(),
        })
    }

    /// How many entries [`Snapshots::slots`](super::Snapshots::slots) has.
    pub fn chunk_entries(&self) -> usize {
        self.shape.slots()
    }

    fn lengths(&self) -> DeviceLengths {
        DeviceLengths {
            sequences: self.shape.sequences,
            tokens: self.shape.batch.rows(),
            singles: 0,
        }
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.lengths().bytes() + self.record_bytes()
    }

    /// Those of its last kernels, which are given lengths that were checked.
    pub(crate) fn record_bytes(&self) -> usize {
        self.shape.record_bytes()
    }

    /// The names of these.
    pub(crate) fn kernels(&self) -> [&'static str; 2] {
        [self.kernels.prepare, self.kernels.scan]
    }

    /// Enqueues the prefill: three kernels. The first 4 bytes of the workspace are the status afterwards: 0, or 1 + the
    /// index of the first entry of `cu_seqlens` that had to be replaced.
    ///
    /// # Errors
    /// As [`Prefill::launch`](super::Prefill::launch).
    pub fn launch<'a>(
        &self,
        stream: &Stream,
        cu_seqlens: impl Into<CuSeqlens<'a>>,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let cu_seqlens = cu_seqlens.into();
        let spans = (workspace.span(), Span::lengths(&cu_seqlens));
        let lengths = self.lengths();
        let (address, _) = workspace.split(lengths.bytes());
        let records = address.wrapping_byte_add(lengths.bytes());
        let lengths = lengths.lower(&self.context, &cu_seqlens, address)?;
        let lowered = self.lower(tensors, lengths.checked(), records)?;
        Shape::check_overlaps(tensors, spans.0, spans.1)?;
        self.context.make_current()?;
        let _turn = stream.turn();
        lengths.enqueue(&self.context, stream)?;
        self.enqueue(stream, &lowered)
    }

    /// All checks of a launch but those of the stream, of the workspace, which holds records, and of memory that arguments
    /// share.
    pub(crate) fn lower(
        &self,
        tensors: &PrefillTensors<'_>,
        cu_seqlens: *const i32,
        records: *mut c_void,
    ) -> Result<Lowered> {
        Shape::check_devices(tensors, &self.context)?;
        let tables = Tables {
            cu_seqlens,
            items: ptr::null(),
            chains: ptr::null(),
            counts: self.shape.whole(),
        };
        Ok((self.shape).lower(tensors, tables, &PlanSlots::default(), records)?)
    }

    /// The kernels after the one that checks lengths, on the current device.
    pub(crate) fn enqueue(&self, stream: &Stream, lowered: &Lowered) -> Result<()> {
        // SAFETY: as in `Prefill::enqueue`.
        unsafe { (self.shape).enqueue(&self.context, stream, self.kernels, lowered, Part::Whole) }
    }
}
