//! The stages of a layer that do not depend on who knows the lengths: all but prefill.

use super::LayerSpec;
use crate::conv::{self, Conv};
use crate::decode::{self, Decode};
use crate::error::Result;
use crate::kernels::{self, Kernel};
use crate::norm;
use crate::prefill;
use crate::runtime::{Context, Stream};
use crate::state::HostSlots;
use crate::tensor::Buffer;

/// Arguments of the stages of one launch.
pub(super) struct Lowered {
    pub(super) conv: conv::Lowered,
    pub(super) decode: Option<decode::Lowered>,
    pub(super) prefill: Option<prefill::Lowered>,
    /// Of the rows that decode does not norm.
    pub(super) norm: Option<norm::Lowered>,
}

/// Plans of the stages, and the batch that they are for.
#[derive(Debug)]
pub(super) struct Stages {
    pub(super) context: Context,
    pub(super) spec: LayerSpec,
    pub(super) tokens: usize,
    pub(super) sequences: usize,
    pub(super) decodes: usize,
    pub(super) conv: Conv,
    pub(super) decode: Option<Decode>,
    /// 0, 1, 2, ...: of callers without slots, where decodes and prefills share the pool.
    pub(super) counted: Option<Buffer<i32>>,
    /// Those of a plan that has its slots.
    pub(super) slots: Option<HostSlots>,
}

impl Stages {
    /// Of so many sequences in so many rows, the first of which, `decodes`, have a row each.
    pub(super) fn new(
        context: &Context,
        spec: LayerSpec,
        tokens: usize,
        sequences: usize,
        decodes: usize,
    ) -> Result<Self> {
        norm::check_eps(spec.eps)?;
        let conv = Conv::device(context, spec.conv(), tokens, sequences)?;
        let decode = (decodes > 0)
            .then(|| Decode::new(context, spec.decode(), decodes))
            .transpose()?;
        let mut stages = Stages {
            context: context.clone(),
            spec,
            tokens,
            sequences,
            decodes,
            conv,
            decode,
            counted: None,
            slots: None,
        };
        if stages.decode.is_some() && stages.prefills() {
            let slots: Vec<i32> = (0..sequences as i32).collect();
            stages.counted = Some(context.upload(&slots)?);
        }
        Ok(stages)
    }

    /// Whether there is a prefill: it makes zeros of rows past the last sequence, too. Sequences without tokens need none.
    pub(super) fn prefills(&self) -> bool {
        self.tokens > self.decodes || self.decodes == 0
    }

    /// Names of the kernels, with those of the prefill.
    pub(super) fn kernels(
        &self,
        prefill: impl IntoIterator<Item = &'static str>,
    ) -> Vec<&'static str> {
        let normed = self.decode.as_ref().and_then(Decode::norm_kernel);
        let normed = normed.map(Kernel::name);
        let decode = self.decode.iter().map(|d| normed.unwrap_or(d.kernel()));
        let rest = normed.is_none() || self.tokens > self.decodes;
        let norm = rest.then(|| kernels::norm(self.spec.dtype).name());
        std::iter::once(self.conv.kernel())
            .chain(decode)
            .chain(prefill)
            .chain(norm)
            .collect()
    }

    /// Enqueues the stages, on the current device.
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        lowered: &Lowered,
        prefill: impl FnOnce(&prefill::Lowered) -> Result<()>,
    ) -> Result<()> {
        self.conv.enqueue(stream, &lowered.conv)?;
        if let (Some(decode), Some(lowered)) = (&self.decode, &lowered.decode) {
            decode.enqueue(stream, lowered)?;
        }
        lowered.prefill.as_ref().map_or(Ok(()), prefill)?;
        match &lowered.norm {
            Some(norm) => norm.enqueue(&self.context, stream),
            None => Ok(()),
        }
    }
}
