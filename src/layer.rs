//! A Gated DeltaNet layer between its input projections and its output projection, in place on an engine's states.
//!
//! ```text
//! q, k, v = silu(conv(x))                                conv
//! o       = recurrence(q, k, v, g(a), beta(b), state)    decode, prefill
//! y       = rmsnorm(o) * weight * gate(z)                norm
//! ```
//!
//! A batch begins with the sequences that have one token each, the decodes; then come prefills of any lengths. One call
//! runs both: the convolution and the norm over all rows, decode over the first, prefill over the rest. Every stage hands
//! its result over in the type of the activations: o goes to y, where the norm works in place, and q, k and v lie in the
//! workspace, and so do g and beta where a or b lies in blocks: then they are the convolution's. Where V is 128 and K at
//! most that, decode has the norm in it: the same bits, one launch less.

mod device;
mod lower;
mod stages;

pub use device::DeviceLayer;
use stages::Stages;

use crate::check;
use crate::conv::{ConvInput, ConvSpec, ConvStateLayout};
use crate::decode::DecodeSpec;
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::norm::OutputGate;
use crate::prefill::{
    HostSlots, Part, Prefill, PrefillSpec, PrefillTensors, Workspace, check_workspace,
};
use crate::runtime::{Context, Stream};
use crate::sequences::{PerSequence, checked_cu_seqlens};
use crate::tensor::{Buffer, Tensor, TensorMut, TokenScalars, TokensMut};
use crate::types::{Dtype, HeadMap, StateLayout};

/// What a layer computes, whatever the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    /// Element type of x, z, y and of the conv state: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// `HK`, at least 1.
    pub key_heads: usize,
    /// `HV`, a multiple of `HK`.
    pub value_heads: usize,
    /// `K`, a multiple of 16 up to 256.
    pub key_dim: usize,
    /// `V`, a multiple of 16 up to 256.
    pub value_dim: usize,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
    /// Tokens that an output of the convolution depends on: 2, 3 or 4.
    pub width: usize,
    /// Whether rows of q and k are l2-normalised.
    pub qk_l2norm: bool,
    /// Factor of the recurrence's output; absent is `K^-0.5`.
    pub scale: Option<f32>,
    /// Whether beta is `2 sigmoid(b)` (OLMo-Hybrid); [`crate::prefill::Gating::Raw`] says what that does to errors.
    pub allow_neg_eigval: bool,
    /// What the norm adds to the mean of the squares.
    pub eps: f32,
    /// What the norm makes of z.
    pub gate: OutputGate,
    /// As [`PrefillSpec::segments`].
    pub segments: Option<usize>,
}

impl LayerSpec {
    /// As in Qwen3.5: bf16, grouped heads, width 4, l2-normalised q and k, an eps of 1e-6, SiLU.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        LayerSpec {
            dtype: Dtype::Bf16,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            head_map: HeadMap::Grouped,
            width: 4,
            qk_l2norm: true,
            scale: None,
            allow_neg_eigval: false,
            eps: 1e-6,
            gate: OutputGate::Silu,
            segments: None,
        }
    }

    /// The convolution, whose channels and views of packed projections are the layer's.
    pub fn conv(&self) -> ConvSpec {
        ConvSpec {
            dtype: self.dtype,
            width: self.width,
            ..ConvSpec::new(
                self.key_heads,
                self.value_heads,
                self.key_dim,
                self.value_dim,
            )
        }
    }

    fn decode(&self) -> DecodeSpec {
        DecodeSpec {
            dtype: self.dtype,
            head_map: self.head_map,
            qk_l2norm: self.qk_l2norm,
            scale: self.scale,
            ..DecodeSpec::new(
                self.key_heads,
                self.value_heads,
                self.key_dim,
                self.value_dim,
            )
        }
    }

    fn prefill(&self) -> PrefillSpec {
        PrefillSpec {
            dtype: self.dtype,
            head_map: self.head_map,
            qk_l2norm: self.qk_l2norm,
            scale: self.scale,
            segments: self.segments,
            ..PrefillSpec::new(
                self.key_heads,
                self.value_heads,
                self.key_dim,
                self.value_dim,
            )
        }
    }
}

/// The weights of a layer, each f32, bf16 or fp16.
#[derive(Clone, Debug)]
pub struct LayerWeights<'a> {
    /// `[channels, width]`: those of q, k and v; the newest token's last.
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
    /// Which of the two.
    pub conv_layout: ConvStateLayout,
    /// `[slots, HV, K, V]` or `[slots, HV, V, K]`, f32 or bf16.
    pub recurrent: TensorMut<'a, 4>,
    /// Which of the two.
    pub recurrent_layout: StateLayout,
    /// The slot of each sequence; absent: slot n for sequence n. A sequence with a negative one, or one beyond the pools,
    /// is padding: its rows of y become zeros, and no state is touched. No two sequences may share a slot. Both pools have
    /// as many. Of slots that the host knows, [`Layer::set_slots`] checks that.
    pub slots: Option<PerSequence<'a, i32>>,
    /// One byte per sequence, 0: its states read as zeros, whatever the slot holds; absent: all have them. Of a new
    /// sequence without tokens the recurrent state becomes zeros, the conv state stays as it is.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// The tensors of one layer over `T` packed rows.
#[derive(Debug)]
pub struct LayerTensors<'a> {
    /// q, k and v as the projections give them: [`ConvInput::flat`], [`ConvInput::interleaved`] or tensors of their own.
    pub x: ConvInput<'a>,
    /// z: [`ConvInput::flat_z`], [`ConvInput::interleaved_z`] or any other `[T, blocks, heads * V]`.
    pub z: Tensor<'a, 3>,
    /// `[T, HV]`, f32, bf16 or fp16, any strides; heads may lie in blocks, as [`Gate::interleaved`](crate::gate::Gate::interleaved)
    /// gives them.
    pub a: TokenScalars<'a>,
    /// `[T, HV]`, likewise.
    pub b: TokenScalars<'a>,
    /// What the layer has learnt.
    pub weights: LayerWeights<'a>,
    /// Where sequences start from and what they leave behind.
    pub states: LayerStates<'a>,
    /// `[T, HV, V]`. Rows past the last sequence become zeros. Other memory than x and z.
    pub y: TokensMut<'a>,
}

/// A layer over batches whose lengths the host knows: validated and uploaded once, launched any number of times.
#[derive(Debug)]
pub struct Layer {
    stages: Stages,
    cu_seqlens: Buffer<i32>,
    prefill: Option<Prefill>,
}

impl Layer {
    /// A packed batch of `tokens` rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`, and the first `decodes`
    /// sequences have one each. Rows past the last sequence belong to none.
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
            let allowed = "each of them must exist and have one token";
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
            cu_seqlens: context.upload(&cu_seqlens)?,
            prefill,
        })
    }

    /// The slots of the pools that the sequences have: what [`LayerStates::slots`] says for a launch, for all that follow,
    /// checked and uploaded once. Launches refuse those beyond their pools. Not for plans that a captured graph needs.
    ///
    /// # Errors
    /// Not as many slots as sequences; a slot of two sequences, where it is not negative. No memory for the slots.
    pub fn set_slots(&mut self, slots: &[i32]) -> Result<()> {
        let Stages {
            context, sequences, ..
        } = &self.stages;
        self.stages.slots = Some(HostSlots::new(context, *sequences, slots, None)?);
        Ok(())
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        let prefill = (self.prefill.as_ref()).map_or(0, Prefill::workspace_bytes);
        self.stages.activations().bytes + prefill
    }

    /// Names of the kernels that a launch runs, in order.
    pub fn kernels(&self) -> Vec<&'static str> {
        let prefill = self.prefill.iter().flat_map(Prefill::kernels);
        self.stages.kernels(prefill)
    }

    /// Enqueues the layer: the kernels that [`Layer::kernels`] names, nothing else.
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
        let (context, stages) = (&self.stages.context, &self.stages);
        check::stream(stream, context)?;
        check_workspace(&workspace, self.workspace_bytes(), context)?;
        let (address, scratch) = workspace.split(stages.activations().bytes);
        let cu_seqlens = self.cu_seqlens.address().cast_const().cast();
        let prefill = (self.prefill.as_ref())
            .map(|plan| |x: &PrefillTensors<'_>| plan.lower(stream, x, scratch));
        let lowered = stages.lower(stream, tensors, cu_seqlens, address, prefill)?;
        context.make_current()?;
        stages.enqueue(stream, &lowered, |prefill| match &self.prefill {
            Some(plan) => plan.enqueue(stream, prefill, Part::Whole),
            None => Ok(()),
        })
    }
}
