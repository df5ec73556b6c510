//! Stages of a layer that do not depend on whether the host knows the lengths: all except prefill.

use super::LayerSpec;
use crate::conv::{self, Conv};
use crate::decode::{self, Decode};
use crate::error::Result;
use crate::kernels::{self, Kernel};
use crate::norm;
use crate::prefill::{self, LoweredLengths};
use crate::runtime::{Context, Stream};
use crate::state::HostSlots;
use crate::tensor::Buffer;
use crate::types::{Dtype, StateLayout};

/// Launch arguments of all stages.
pub(super) struct LaunchArguments {
    pub(super) conv: conv::LaunchArguments,
    pub(super) decode: Option<decode::LaunchArguments>,
    pub(super) prefill: Option<prefill::LaunchArguments>,
    /// Norm of the rows that decode does not norm.
    pub(super) norm: Option<norm::LaunchArguments>,
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
    /// Slots 0, 1, 2, ... for callers without slots, if a batch has decodes and prefills.
    pub(super) counted: Option<Buffer<i32>>,
    /// Slots of the plan, if it has any.
    pub(super) slots: Option<HostSlots>,
}

impl Stages {
    /// Stages for `sequences` sequences in `tokens` rows. The first `decodes` sequences have one row each.
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

    /// Whether there is a prefill stage. It also writes zeros to rows past the last sequence. Sequences without tokens
    /// do not need it.
    pub(super) fn prefills(&self) -> bool {
        self.tokens > self.decodes || self.decodes == 0
    }

    /// Names of the kernels in order. `states`, `layout`: of the recurrent states. `on_device`: whether only the device knows
    /// the lengths. `prefill`: names of the prefill's kernels.
    pub(super) fn kernels(
        &self,
        states: Dtype,
        layout: StateLayout,
        on_device: bool,
        prefill: impl IntoIterator<Item = &'static str>,
    ) -> Vec<&'static str> {
        let normed = self.decode.as_ref().and_then(Decode::norm_kernel);
        let normed = normed.map(Kernel::name);
        let decode = self
            .decode
            .iter()
            .map(|d| normed.unwrap_or(d.kernel(states, layout)));
        let rest = normed.is_none() || self.tokens > self.decodes;
        let norm = rest.then(|| kernels::norm(self.spec.dtype).name());
        let conv = match on_device {
            true => self.conv.lengths_kernel(),
            false => self.conv.kernel(),
        };
        std::iter::once(conv)
            .chain(decode)
            .chain(prefill)
            .chain(norm)
            .collect()
    }

    /// Enqueues the stages, on the current device. `lengths`: those that only the device knows.
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        lowered: &LaunchArguments,
        lengths: Option<&LoweredLengths>,
        prefill: impl FnOnce(&prefill::LaunchArguments) -> Result<()>,
    ) -> Result<()> {
        match lengths {
            Some(lengths) => (self.conv).enqueue_with_lengths(stream, &lowered.conv, lengths)?,
            None => self.conv.enqueue(stream, &lowered.conv)?,
        }
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
