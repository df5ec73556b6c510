//! Prefill of batches whose lengths the device alone knows.

use std::ptr;

use super::lower::{Kernels, Shape, Tables};
use super::states::PlanSlots;
use super::{Part, PrefillSpec, PrefillTensors, WORKSPACE_ALIGN, Workspace, check_workspace};
use crate::abi::dw_prefill_lengths_args;
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

/// Bytes of the workspace before the checked lengths: the status word.
const STATUS_BYTES: usize = WORKSPACE_ALIGN;

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

    fn lengths_bytes(&self) -> usize {
        ((self.shape.sequences + 1) * 4).next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        STATUS_BYTES + self.lengths_bytes() + self.shape.record_bytes()
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
        Shape::check_devices(tensors, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let cu_seqlens = cu_seqlens.into();
        check::device("cu_seqlens", cu_seqlens.owner(), &self.context)?;
        let (lengths, wide) = cu_seqlens.checked(self.shape.sequences)?;
        let checked = workspace.address.wrapping_byte_add(STATUS_BYTES);
        let records = checked.wrapping_byte_add(self.lengths_bytes());
        let tables = Tables {
            cu_seqlens: checked.cast_const().cast(),
            items: ptr::null(),
            chains: ptr::null(),
            counts: self.shape.whole(),
        };
        let slots = PlanSlots::default();
        let lowered = self.shape.lower(tensors, tables, &slots, records)?;
        let arguments = dw_prefill_lengths_args {
            cu_seqlens: lengths,
            checked: checked.cast(),
            status: workspace.address.cast(),
            sequences: self.shape.sequences as i32,
            tokens: self.shape.batch.rows() as i32,
            wide: i32::from(wide),
            pad0: 0,
        };
        self.context.make_current()?;
        // SAFETY: as in `Prefill::launch`; the workspace holds status, lengths and records.
        unsafe {
            self.context.launch(
                stream,
                "dw_prefill_lengths",
                1,
                self.shape.launch.lengths_threads,
                &arguments,
            )?;
            self.shape
                .enqueue(&self.context, stream, self.kernels, &lowered, Part::Whole)
        }
    }
}
