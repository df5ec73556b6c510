//! A Gated DeltaNet layer from its input projections to its output projection, in place on an engine's states.
//!
//! ```text
//! q, k, v = silu(conv(x))                                conv
//! o       = recurrence(q, k, v, g(a), beta(b), state)    decode, prefill
//! y       = rmsnorm(o) * weight * gate(z)                norm
//! ```
//!
//! A batch begins with the decodes, sequences of one token each. Prefills of any lengths follow. One call runs both:
//! the convolution and the norm over all rows, decode over the first rows, prefill over the rest. Stages pass results
//! in the type of the activations. o is written to y, where the norm works in place; q, k and v lie in the workspace.
//! If a or b lies in blocks, the convolution computes g and beta, also in the workspace. If V is 128, K at most 128
//! and that is faster for the batch, decode computes the norm too: same bits, one launch less.

mod backward;
mod lower;
mod stages;

pub use backward::{LayerBackward, LayerBackwardTensors, LayerInitial, LayerWeightGradients};
use stages::Stages;

use std::ptr;
use std::sync::Arc;

use crate::batch::{CuSeqlens, PerSequence, checked_cu_seqlens};
use crate::check;
use crate::conv::{Activation, ConvInput, ConvSpec, ConvStateLayout};
use crate::decode::{DecodeSpec, Draft};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::model::Heads;
use crate::norm::OutputGate;
use crate::prefill::{
    DeviceLengths, LoweredLengths, Part, Prefill, PrefillPath, PrefillSpec, PrefillTensors, Save,
};
use crate::runtime::{Context, Stream};
use crate::state::HostSlots;
use crate::tensor::{Buffer, Tensor, TensorMut, TokenScalars, TokensMut};
use crate::types::{Dtype, StateLayout};
use crate::workspace::{Workspace, check_workspace};

/// Parameters of a layer that do not depend on the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    /// Element type of x, z, y and of the conv state: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// Heads; `K` and `V` are multiples of 16 up to [`MAX_HEAD_DIM`](crate::model::MAX_HEAD_DIM).
    pub heads: Heads,
    /// Tokens that an output of the convolution depends on: 2, 3 or 4.
    pub width: usize,
    /// Whether rows of q and k are l2-normalised.
    pub qk_l2norm: bool,
    /// Factor of the recurrence's output; absent is `K^-0.5`.
    pub scale: Option<f32>,
    /// Whether beta is `2 sigmoid(b)` (OLMo-Hybrid). [`crate::gates::Gating::Raw`] describes the effect on errors.
    pub allow_neg_eigval: bool,
    /// Number that the norm adds to the mean of the squares.
    pub eps: f32,
    /// The norm's gate, a function of z.
    pub gate: OutputGate,
    /// As [`PrefillSpec::segments`].
    pub segments: Option<usize>,
    /// As [`PrefillSpec::path`].
    pub path: PrefillPath,
}

impl LayerSpec {
    /// Spec of Qwen3.5: bf16, grouped heads, width 4, l2-normalised q and k, eps 1e-6, SiLU.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        LayerSpec {
            dtype: Dtype::Bf16,
            heads: Heads::new(key_heads, value_heads, key_dim, value_dim),
            width: 4,
            qk_l2norm: true,
            scale: None,
            allow_neg_eigval: false,
            eps: 1e-6,
            gate: OutputGate::Silu,
            segments: None,
            path: PrefillPath::Auto,
        }
    }

    /// Spec of the layer's convolution, for views of packed projections ([`ConvInput`]).
    pub fn conv(&self) -> ConvSpec {
        ConvSpec {
            dtype: self.dtype,
            heads: self.heads,
            width: self.width,
            activation: Activation::Silu,
            qk_l2norm: false,
        }
    }

    fn decode(&self) -> DecodeSpec {
        DecodeSpec {
            dtype: self.dtype,
            heads: self.heads,
            qk_l2norm: self.qk_l2norm,
            scale: self.scale,
            tokens: 1,
            draft: Draft::Chain,
        }
    }

    fn prefill(&self) -> PrefillSpec {
        PrefillSpec {
            dtype: self.dtype,
            heads: self.heads,
            qk_l2norm: self.qk_l2norm,
            scale: self.scale,
            segments: self.segments,
            compute_units: None,
            path: self.path,
            save: Save::Nothing,
        }
    }
}

/// The weights of a layer, each f32, bf16 or fp16.
#[derive(Clone, Debug)]
pub struct LayerWeights<'a> {
    /// `[channels, width]`, channels of q, then k, then v; the newest token's weight last.
    pub conv: Tensor<'a, 2>,
    /// `[channels]`; absent: 0.
    pub conv_bias: Option<Tensor<'a, 1>>,
    /// `[HV]`.
    pub a_log: Tensor<'a, 1>,
    /// `[HV]`; absent: 0.
    pub dt_bias: Option<Tensor<'a, 1>>,
    /// `[V]`; absent: 1.
    pub norm: Option<Tensor<'a, 1>>,
}

/// The states of an engine's sequences, updated in place. A sequence has the same slot in both pools.
#[derive(Debug)]
pub struct LayerStates<'a> {
    /// `[slots, channels, columns]` or `[slots, columns, channels]`, as [`ConvState`](crate::conv::ConvState).
    pub conv: TensorMut<'a, 3>,
    /// Order of the last two dimensions.
    pub conv_layout: ConvStateLayout,
    /// `[slots, HV, K, V]` or `[slots, HV, V, K]`, f32, bf16 or fp16.
    pub recurrent: TensorMut<'a, 4>,
    /// Order of the last two dimensions.
    pub recurrent_layout: StateLayout,
    /// Slot of each sequence in both pools. Absent: slot n for sequence n. Negative, or beyond the pools: padding,
    /// whose rows of y become zeros and which touches no state. No two sequences may share a slot. Both pools have the
    /// same number of slots. [`Layer::set_slots`] checks slots that the host knows.
    pub slots: Option<PerSequence<'a, i32>>,
    /// One byte per sequence. 0: both states read as zeros instead of the slot's contents. Absent: every sequence has
    /// states. The states of a sequence without tokens never change.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// The tensors of one layer over `T` packed rows.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct LayerTensors<'a> {
    /// `[N + 1]`, lengths for a plan of [`Layer::device`]. Absent for other plans.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// Projections q, k and v: [`ConvInput::flat`], [`ConvInput::interleaved`] or separate tensors.
    pub x: ConvInput<'a>,
    /// Projection z: [`ConvInput::flat_z`], [`ConvInput::interleaved_z`] or any other `[T, blocks, heads * V]`.
    pub z: Tensor<'a, 3>,
    /// `[T, HV]`, f32, bf16 or fp16, any strides; heads may lie in blocks, as
    /// [`Gate::interleaved`](crate::gate::Gate::interleaved) gives them.
    pub a: TokenScalars<'a>,
    /// `[T, HV]`, as a.
    pub b: TokenScalars<'a>,
    /// Weights.
    pub weights: LayerWeights<'a>,
    /// States, read and updated in place.
    pub states: LayerStates<'a>,
    /// `[T, HV, V]`. Rows past the last sequence become zeros.
    pub y: TokensMut<'a>,
}

/// Plan of a layer for packed batches of one shape: validated and uploaded once, launched any number of times.
#[derive(Debug)]
pub struct Layer {
    stages: Stages,
    lengths: Lengths,
    prefill: Option<Prefill>,
}

/// Lengths of the sequences, known on the host or only on the device.
#[derive(Debug)]
enum Lengths {
    /// `cu_seqlens`, uploaded.
    Host(Arc<Buffer<i32>>),
    Device(Box<DeviceLengths>),
}

impl Layer {
    /// A packed batch of `tokens` rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`, and the first `decodes`
    /// sequences have one each. Rows past the last sequence belong to no sequence.
    ///
    /// # Errors
    /// A spec or lengths that are not allowed; no memory for the lengths.
    pub fn packed<L: Copy + Into<i64>>(
        context: &Context,
        spec: LayerSpec,
        cu_seqlens: &[L],
        tokens: usize,
        decodes: usize,
    ) -> Result<Self> {
        let cu_seqlens = checked_cu_seqlens(cu_seqlens, tokens)?;
        let sequences = cu_seqlens.len() - 1;
        let single = |n: usize| cu_seqlens.get(n + 1) == Some(&(n as i32 + 1));
        check::ensure((0..decodes).all(single), || {
            let was = format!("{decodes} of {sequences} sequences");
            let allowed = "each decode must be a sequence of one token";
            ArgumentError::new("decodes", ArgumentKind::Lengths, was, allowed)
        })?;
        let stages = Stages::new(context, spec, tokens, sequences, decodes)?;
        let rest = cu_seqlens[decodes..].iter().map(|c| c - decodes as i32);
        let rest: Vec<i32> = rest.collect();
        let prefill = (stages.prefills())
            .then(|| Prefill::packed(context, spec.prefill(), &rest, tokens - decodes))
            .transpose()?;
        Ok(Layer {
            stages,
            lengths: Lengths::Host(Arc::new(context.upload(&cu_seqlens)?)),
            prefill,
        })
    }

    /// Packed batches of exactly `sequences` sequences in `tokens` rows. Launches read the lengths on the device
    /// ([`LayerTensors::cu_seqlens`]), so a graph that was captured once serves batches of varying lengths.
    ///
    /// The first `decodes` sequences have one token each, the others any number, also 0. Give an unused decode a
    /// negative slot and an unused prefill no tokens. Unused rows lie past the last sequence.
    ///
    /// The convolution's launch checks the lengths, too. It replaces entries by the nearest allowed number if they are not 0, 1, 2,
    /// ... up to `decodes`, if they decrease, or if they exceed the tokens. The first 4 bytes of the workspace are the
    /// status after a launch: 0, or 1 + the index of the first entry that was replaced. It also cuts prefills into
    /// segments, as [`Prefill::device`] does.
    ///
    /// # Errors
    /// A spec or sizes that are not allowed; no memory for the plan.
    pub fn device(
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
            .then(|| Prefill::device(context, spec.prefill(), rows, rest))
            .transpose()?;
        Ok(Layer {
            stages,
            lengths: Lengths::Device(Box::new(DeviceLengths {
                sequences,
                tokens,
                decodes,
                segments: prefill.as_ref().and_then(Prefill::device_segments),
            })),
            prefill,
        })
    }

    /// Sets the slots of the pools for all launches that follow, checked and uploaded once, in place of
    /// [`LayerStates::slots`]. Launches refuse slots beyond their pools. Not for plans that a captured graph needs.
    ///
    /// # Errors
    /// A plan of [`Layer::device`]; a number of slots other than the number of sequences; two sequences with the same
    /// slot, unless it is negative; no memory for the slots.
    pub fn set_slots(&mut self, slots: &[i32]) -> Result<()> {
        check::ensure(matches!(self.lengths, Lengths::Host(_)), || {
            let was = "given to a plan whose lengths are on the device";
            let allowed = "pass them to each launch of such a plan";
            ArgumentError::new("slots", ArgumentKind::Presence, was, allowed)
        })?;
        let Stages {
            context, sequences, ..
        } = &self.stages;
        self.stages.slots = Some(HostSlots::new(context, *sequences, slots, None)?);
        Ok(())
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        let records = (self.prefill.as_ref()).map_or(0, Prefill::record_bytes);
        self.lengths_bytes() + self.stages.activations().bytes + records
    }

    /// Bytes of workspace for checked lengths.
    fn lengths_bytes(&self) -> usize {
        match &self.lengths {
            Lengths::Host(_) => 0,
            Lengths::Device(lengths) => lengths.bytes(),
        }
    }

    /// Names of the kernels that a launch runs with recurrent states of type `states` in `layout`, in order, for tensors as
    /// [`Decode::kernel`](crate::decode::Decode::kernel) expects them.
    pub fn kernels(&self, states: Dtype, layout: StateLayout) -> Vec<&'static str> {
        let on_device = matches!(self.lengths, Lengths::Device(_));
        let prefill = self.prefill.iter().flat_map(Prefill::kernels_after_lengths);
        self.stages.kernels(states, layout, on_device, prefill)
    }

    /// Enqueues the layer: the kernels that [`Layer::kernels`] names, nothing else. No other launch of this crate on
    /// the stream, from any thread, comes between them.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, a workspace that is too small: then
    /// nothing was enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        tensors: &LayerTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.launch_stages(stream, tensors, None, workspace)
    }

    /// As [`Layer::launch`], and keeps `o` `[T, HV, V]`, what the norm reads, for [`LayerBackward`]: the norm does not work
    /// in place, and decodes do not compute it. The bits of y are the same.
    ///
    /// # Errors
    /// As [`Layer::launch`].
    pub fn launch_saving(
        &self,
        stream: &Stream,
        tensors: &LayerTensors<'_>,
        o: &TokensMut<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.launch_stages(stream, tensors, Some(o), workspace)
    }

    fn launch_stages(
        &self,
        stream: &Stream,
        tensors: &LayerTensors<'_>,
        saved: Option<&TokensMut<'_>>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let (context, stages) = (&self.stages.context, &self.stages);
        check::stream(stream, context)?;
        check_workspace(&workspace, self.workspace_bytes(), context)?;
        let scratch = workspace.span();
        let (address, rest) = workspace.split(self.lengths_bytes());
        let lengths = match &self.lengths {
            Lengths::Host(_) => {
                CuSeqlens::refuse(&tensors.cu_seqlens)?;
                None
            }
            Lengths::Device(lengths) => {
                let cu_seqlens = CuSeqlens::required(&tensors.cu_seqlens)?;
                Some(lengths.lower(context, cu_seqlens, address, true)?)
            }
        };
        let of_host = match &self.lengths {
            Lengths::Host(own) => own.address().cast_const().cast(),
            Lengths::Device(_) => ptr::null(),
        };
        let of_prefills = lengths.as_ref().map(LoweredLengths::tables);
        let (activations, records) = rest.split(stages.activations().bytes);
        let prefill = (self.prefill.as_ref())
            .map(|plan| |x: &PrefillTensors<'_>| plan.lower(x, of_prefills, records.address()));
        let lowered = stages.lower(stream, tensors, saved, of_host, activations, prefill)?;
        Stages::check_overlaps(tensors, saved, scratch)?;
        context.make_current()?;
        let _turn = stream.turn();
        stages.enqueue(stream, &lowered, lengths.as_ref(), |prefill| {
            match &self.prefill {
                Some(plan) => plan.enqueue(stream, prefill, Part::Whole),
                None => Ok(()),
            }
        })
    }
}
