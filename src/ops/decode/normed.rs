//! Decode with the gated norm of its outputs.

use super::lower::{self, LaunchArguments};
use super::{Decode, DecodeTensors, Drafts};
use crate::alias::{self, Span};
use crate::check::Checked;
use crate::error::{ArgumentError, ArgumentKind, Error, Result};
use crate::norm::{self, GatedNorm, OutputGate};
use crate::runtime::Stream;
use crate::tensor::{Tensor, Tokens, TokensMut};
use crate::types::{Dtype, StateLayout};

/// A gated norm of the outputs: `o / sqrt(mean(o^2) + eps) * weight * gate(z)` takes the place of o, with the bits of
/// [`GatedNorm`] in place.
#[derive(Clone, Debug)]
pub struct OutputNorm<'a> {
    /// `[rows, blocks, heads * V]`, as [`GatedNorm::z`].
    pub z: Tensor<'a, 3>,
    /// `[V]`, f32, bf16 or fp16. Absent: 1.
    pub weight: Option<Tensor<'a, 1>>,
    /// Number added to the mean of the squares: at least the smallest normal f32.
    pub eps: f32,
    /// The gate, a function of z.
    pub gate: OutputGate,
}

/// Names of arguments: the norm's name, the decode's name.
const NAMES: [(&str, &str); 3] = [("y", "o"), ("weight", "norm_weight"), ("eps", "norm_eps")];

impl OutputNorm<'_> {
    /// Checks the norm and returns its launch arguments.
    pub(super) fn lower(
        &self,
        decode: &Decode,
        stream: &Stream,
        x: &DecodeTensors<'_>,
    ) -> Result<norm::LaunchArguments> {
        let Tokens(o, dense) = &x.o.0;
        if *dense {
            let allowed = "with a norm it must be packed, [rows, HV, V]";
            let was = format!("shape {:?}", o.shape);
            return Err(ArgumentError::new("o", ArgumentKind::Shape, was, allowed).into());
        }
        let norm = GatedNorm {
            x: None,
            z: self.z.clone(),
            weight: self.weight.clone(),
            eps: self.eps,
            gate: self.gate,
            y: TokensMut(Tokens(o.clone(), false)),
        };
        norm.lower(&decode.context, stream)
            .map_err(|error| match error {
                Error::Argument(error) => {
                    let name = NAMES.iter().find(|(own, _)| *own == error.argument);
                    Error::Argument(ArgumentError {
                        argument: name.map_or(error.argument, |(_, name)| (*name).to_owned()),
                        ..error
                    })
                }
                other => other,
            })
    }

    /// Checks that no output shares memory with the norm's inputs.
    pub(super) fn check_overlaps(&self, outputs: &[Span<'_>; 3]) -> Checked<()> {
        let inputs = [
            Span::of("z", &self.z),
            Span::maybe("norm_weight", self.weight.as_ref()),
        ];
        alias::check(outputs, &inputs, &[])
    }
}

impl Decode {
    /// Names of the kernels that [`Decode::launch_normed`] runs on a pool of type `states` in `layout`, in order, for
    /// tensors as [`Decode::kernel`] expects them. `drafts`: whether it is given drafts.
    pub fn normed_kernels(
        &self,
        states: Dtype,
        layout: StateLayout,
        drafts: bool,
    ) -> Vec<&'static str> {
        let fused = match drafts {
            true => self.shape.draft_norm_kernel().map(|k| k.name()),
            false => self.shape.norm_kernel().map(|k| k.name()),
        };
        let norm = crate::kernels::norm(self.shape.dtype()).name();
        match (fused, drafts) {
            (Some(fused), _) => vec![fused],
            (None, true) => vec![self.draft_kernel(), norm],
            (None, false) => vec![self.kernel(states, layout), norm],
        }
    }

    /// Enqueues the decode, of drafts if they are given, and the norm of its outputs: the kernels that
    /// [`Decode::normed_kernels`] names, nothing else. That is one kernel if V is 128, K at most 128 and that is
    /// faster for the batch.
    ///
    /// Outputs of padding stay zeros. Rows of no sequence, which the decode leaves as they were, must be zeros if they are
    /// to stay so.
    ///
    /// # Errors
    /// As [`Decode::launch`], [`Decode::launch_drafts`] and [`GatedNorm::launch`]; outputs that are not packed.
    pub fn launch_normed(
        &self,
        stream: &Stream,
        tensors: &DecodeTensors<'_>,
        drafts: Option<&Drafts<'_>>,
        norm: &OutputNorm<'_>,
    ) -> Result<()> {
        let mut lowered = match drafts {
            Some(drafts) => Lowered::Drafts(self.lower_drafts(stream, tensors, drafts)?),
            None => Lowered::Tokens(self.lower(stream, tensors)?),
        };
        let of_norm = norm.lower(self, stream, tensors)?;
        if lowered.groups() == 0 {
            return Ok(());
        }
        lower::check_overlaps(tensors)?;
        let outputs = lower::outputs(tensors);
        if let Some(drafts) = drafts {
            drafts.check_overlaps(&outputs)?;
        }
        norm.check_overlaps(&outputs)?;
        let fused = match &mut lowered {
            Lowered::Tokens(lowered) => self.fuse(lowered, &of_norm),
            Lowered::Drafts(lowered) => self.shape.fuse_drafts(lowered, &of_norm),
        };
        self.context.make_current()?;
        let _turn = stream.turn();
        match &lowered {
            Lowered::Tokens(lowered) => self.enqueue(stream, lowered)?,
            Lowered::Drafts(lowered) => self.enqueue_drafts(stream, lowered)?,
        }
        if fused {
            return Ok(());
        }
        of_norm.enqueue(&self.context, stream)
    }
}

/// Launch arguments with and without drafts.
pub(super) enum Lowered {
    Tokens(LaunchArguments),
    Drafts(lower::DraftArguments),
}

impl Lowered {
    fn groups(&self) -> u32 {
        match self {
            Lowered::Tokens(lowered) => lowered.groups,
            Lowered::Drafts(lowered) => lowered.groups,
        }
    }
}
