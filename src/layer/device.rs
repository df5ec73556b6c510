//! Layers over batches whose lengths the device alone knows.

use super::stages::Stages;
use super::{LayerSpec, LayerTensors};
use crate::alias::Span;
use crate::check;
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::prefill::{
    DeviceLengths, DevicePrefill, LoweredLengths, PrefillTensors, Workspace, check_workspace,
};
use crate::runtime::{Context, Stream};
use crate::sequences::CuSeqlens;

/// A layer over packed batches whose lengths are on the device alone, so that a graph that was captured once serves batches
/// of varying lengths. The host knows the sizes, and how many sequences, the first ones, have one token each: decodes
/// that are not there have a negative slot, prefills that are not there have no tokens, rows that are not there lie past
/// the last sequence.
///
/// One kernel more than a [`Layer`](super::Layer) has checks the lengths: entries that are not 0, 1, 2, ... up to the
/// decodes, that decrease or exceed the tokens are replaced by the nearest allowed ones, and the status says so. No sequence
/// is cut into segments.
#[derive(Debug)]
pub struct DeviceLayer {
    stages: Stages,
    lengths: DeviceLengths,
    prefill: Option<DevicePrefill>,
}

impl DeviceLayer {
    /// Batches of exactly `sequences` sequences in `tokens` rows. The first `decodes` sequences have one token each, others
    /// any number, also none.
    ///
    /// # Errors
    /// A spec or sizes that are not allowed; more than one segment; no memory for the plan.
    pub fn new(
        context: &Context,
        spec: LayerSpec,
        tokens: usize,
        sequences: usize,
        decodes: usize,
    ) -> Result<Self> {
        check::ensure(decodes <= sequences && decodes <= tokens, || {
            let allowed =
                format!("at most the {sequences} sequences, and at most the {tokens} tokens");
            ArgumentError::new("decodes", ArgumentKind::Lengths, decodes, allowed)
        })?;
        let stages = Stages::new(context, spec, tokens, sequences, decodes)?;
        let (rows, rest) = (tokens - decodes, sequences - decodes);
        let prefill = (stages.prefills())
            .then(|| DevicePrefill::new(context, spec.prefill(), rows, rest))
            .transpose()?;
        Ok(DeviceLayer {
            stages,
            prefill,
            lengths: DeviceLengths {
                sequences,
                tokens,
                singles: decodes,
            },
        })
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        let records = (self.prefill.as_ref()).map_or(0, DevicePrefill::record_bytes);
        self.lengths.bytes() + self.stages.activations().bytes + records
    }

    /// Names of the kernels that a launch runs, in order.
    pub fn kernels(&self) -> Vec<&'static str> {
        let prefill = self.prefill.iter().flat_map(DevicePrefill::kernels);
        let mut kernels = self.stages.kernels(prefill);
        kernels.insert(0, LoweredLengths::KERNEL);
        kernels
    }

    /// Enqueues the layer: the kernels that [`DeviceLayer::kernels`] names, nothing else. The first 4 bytes of the workspace
    /// are the status afterwards: 0, or 1 + the index of the first entry of `cu_seqlens` that had to be replaced.
    ///
    /// # Errors
    /// As [`Layer::launch`](super::Layer::launch).
    pub fn launch<'a>(
        &self,
        stream: &Stream,
        cu_seqlens: impl Into<CuSeqlens<'a>>,
        tensors: &LayerTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let (context, stages) = (&self.stages.context, &self.stages);
        check::stream(stream, context)?;
        check_workspace(&workspace, self.workspace_bytes(), context)?;
        let cu_seqlens = cu_seqlens.into();
        let spans = (workspace.span(), Span::lengths(&cu_seqlens));
        let (address, rest) = workspace.split(self.lengths.bytes());
        let lengths = self.lengths.lower(context, &cu_seqlens, address)?;
        let (address, _) = rest.split(stages.activations().bytes);
        let records = address.wrapping_byte_add(stages.activations().bytes);
        let prefill = (self.prefill.as_ref())
            .map(|plan| |x: &PrefillTensors<'_>| plan.lower(x, lengths.rest(), records));
        let lowered = stages.lower(stream, tensors, lengths.checked(), address, prefill)?;
        Stages::check_overlaps(tensors, spans.0, spans.1)?;
        context.make_current()?;
        let _turn = stream.turn();
        lengths.enqueue(context, stream)?;
        stages.enqueue(stream, &lowered, |prefill| match &self.prefill {
            Some(plan) => plan.enqueue(stream, prefill),
            None => Ok(()),
        })
    }
}
