//! Causal depthwise convolution of a layer's packed projections, split into q, k and v, in one launch.
//!
//! ```text
//! y[t, c] = activation(bias[c] + sum over j of weight[c, j] x[t - (width - 1) + j, c])
//! ```
//!
//! in f32: products are added to the bias by fused multiply-adds, the oldest token's first, and the result is rounded
//! once, to nearest even. The last `width - 1` columns of the conv state, or zeros, stand for the tokens before a
//! sequence. Afterwards the conv state holds the last tokens of (old state, sequence): inputs, bit for bit. An empty
//! sequence does not change its state.
//!
//! With [`ConvSpec::qk_l2norm`] every row of q and k is then divided by `sqrt(sum of squares + 1e-6)`, before it is
//! rounded. With [`ConvTensors::gates`] the same launch computes g and beta. A following [`prefill`](crate::prefill)
//! then uses given gates and no norms.
//!
//! A [`Conv`] is made once per batch shape. The lengths are known on the host ([`Conv::packed`]) or only on the device
//! ([`Conv::device`]).

mod backward;
mod drafts;
mod lower;

use std::ffi::c_void;
use std::sync::Arc;

pub(crate) use backward::LaunchArguments as BackwardArguments;
pub use backward::{ConvBackward, ConvBackwardTensors, ConvInputMut, ConvStates, ConvStatesMut};
pub use drafts::ConvDrafts;
use lower::Shape;
pub(crate) use lower::{LaunchArguments, projection, state_strides};

use crate::abi::dwk_conv_lengths_args;
use crate::batch::{CuSeqlens, PerSequence, checked_cu_seqlens};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::gate::Gate;
use crate::model::Heads;
use crate::prefill::LoweredLengths;
use crate::runtime::{Context, Stream};
use crate::tensor::{Buffer, Tensor, TensorMut, TokensMut};
use crate::types::Dtype;

/// Allowed widths.
pub const WIDTHS: std::ops::RangeInclusive<usize> = 2..=4;

/// Most channels of a row of q or k with a norm, as in the recurrences.
pub const MAX_NORM_DIM: usize = 256;

/// Activation of the sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// The identity.
    None,
    /// `x / (1 + exp(-x))`.
    #[default]
    Silu,
}

/// Parameters of a convolution that do not depend on the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvSpec {
    /// Element type of x, q, k, v and of the conv state: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// Heads; `K` and `V` are at least 1. The head map has no effect.
    pub heads: Heads,
    /// Tokens that an output depends on: 2, 3 or 4.
    pub width: usize,
    /// Activation of the sums.
    pub activation: Activation,
    /// Whether rows of q and k are l2-normalised, in f32, before they are rounded. `K` is then at most
    /// [`MAX_NORM_DIM`].
    pub qk_l2norm: bool,
}

impl ConvSpec {
    /// bf16, width 4, SiLU, no norms.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        ConvSpec {
            dtype: Dtype::Bf16,
            heads: Heads::new(key_heads, value_heads, key_dim, value_dim),
            width: 4,
            activation: Activation::Silu,
            qk_l2norm: false,
        }
    }

    /// Channels of q, k and v. Weights, biases and states have them in this order.
    pub fn channels(&self) -> [usize; 3] {
        self.heads.channels()
    }

    /// Total channels: `2 HK K + HV V`.
    pub fn total_channels(&self) -> usize {
        self.channels().into_iter().fold(0, usize::saturating_add)
    }
}

/// Views of q, k and v in the projections.
///
/// Each is `[T, blocks, size]`: `blocks` blocks of `size` adjacent channels, with any strides between blocks and
/// tokens. [`ConvInput::flat`] and [`ConvInput::interleaved`] make the views from one packed tensor. Separate
/// projections are passed as they are.
#[derive(Clone, Debug)]
pub struct ConvInput<'a> {
    /// `HK K` channels.
    pub q: Tensor<'a, 3>,
    /// `HK K` channels.
    pub k: Tensor<'a, 3>,
    /// `HV V` channels.
    pub v: Tensor<'a, 3>,
}

impl<'a> ConvInput<'a> {
    /// Rows `q | k | v`, as in Qwen3.5; more may follow, such as z. `x` is `[T, columns]`.
    ///
    /// # Errors
    /// Too few columns; columns that are not adjacent.
    pub fn flat(x: &Tensor<'a, 2>, spec: &ConvSpec) -> Result<Self> {
        let [q, k, v] = spec.channels();
        check_columns(x, spec.total_channels())?;
        let view = |channels, offset| {
            x.part(
                [x.shape[0], 1, channels],
                [x.strides[0], channels, 1],
                offset,
            )
        };
        Ok(ConvInput {
            q: view(q, 0),
            k: view(k, q),
            v: view(v, q + k),
        })
    }

    /// Rows of `HK` groups, each `q | k | v | z` for one key head and its value heads, as in Qwen3-Next. `x` is `[T,
    /// columns]`.
    ///
    /// # Errors
    /// Too few columns; columns that are not adjacent; heads that cannot be grouped.
    pub fn interleaved(x: &Tensor<'a, 2>, spec: &ConvSpec) -> Result<Self> {
        lower::check_heads(spec)?;
        let (keys, values) = (
            spec.heads.key_dim,
            (spec.heads.value / spec.heads.key).saturating_mul(spec.heads.value_dim),
        );
        let group = keys.saturating_add(values).saturating_mul(2);
        check_columns(x, group.saturating_mul(spec.heads.key))?;
        let view = |channels, offset| {
            let shape = [x.shape[0], spec.heads.key, channels];
            x.part(shape, [x.strides[0], group, 1], offset)
        };
        Ok(ConvInput {
            q: view(keys, 0),
            k: view(keys, keys),
            v: view(values, 2 * keys),
        })
    }

    /// z of rows `q | k | v | z`, for [`GatedNorm::z`](crate::norm::GatedNorm::z). `x` is `[T, columns]`.
    ///
    /// # Errors
    /// As [`ConvInput::flat`].
    pub fn flat_z(x: &Tensor<'a, 2>, spec: &ConvSpec) -> Result<Tensor<'a, 3>> {
        let ([.., values], before) = (spec.channels(), spec.total_channels());
        check_columns(x, before.saturating_add(values))?;
        let shape = [x.shape[0], 1, values];
        Ok(x.part(shape, [x.strides[0], values, 1], before))
    }

    /// z of the rows of [`ConvInput::interleaved`], for [`GatedNorm::z`](crate::norm::GatedNorm::z).
    ///
    /// # Errors
    /// As [`ConvInput::interleaved`].
    pub fn interleaved_z(x: &Tensor<'a, 2>, spec: &ConvSpec) -> Result<Tensor<'a, 3>> {
        let v = Self::interleaved(x, spec)?.v;
        // z has the shape of v and follows it in each group.
        Ok(v.part(v.shape, v.strides, v.shape[2]))
    }
}

fn check_columns(x: &Tensor<'_, 2>, columns: usize) -> Checked<()> {
    check::ensure(x.shape[1] >= columns, || {
        let was = format!("shape {:?}", x.shape);
        let allowed = format!("it must have at least {columns} columns");
        ArgumentError::new("x", ArgumentKind::Shape, was, allowed)
    })?;
    check::ensure(x.strides[1] == 1, || {
        let was = format!("an innermost stride of {}", x.strides[1]);
        ArgumentError::new(
            "x",
            ArgumentKind::Stride,
            was,
            "the innermost stride must be 1",
        )
    })
}

/// Order of the last two dimensions of a pool of conv states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ConvStateLayout {
    /// `[slots, channels, columns]`: the tokens of a channel are adjacent.
    #[default]
    ChannelMajor,
    /// `[slots, columns, channels]`: the channels of a token are adjacent.
    TokenMajor,
}

/// Conv states, updated in place.
///
/// A column is a token, the newest last. There are at least `width - 1` columns; more columns keep more tokens. Pass a
/// view without columns that serve other purposes.
#[derive(Debug)]
pub struct ConvState<'a> {
    /// Same type as x, any strides.
    pub tensor: TensorMut<'a, 3>,
    /// Order of its dimensions.
    pub layout: ConvStateLayout,
    /// One byte per sequence. 0: the state reads as zeros instead of the slot's contents. Absent: every sequence has a
    /// state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// The tensors of one convolution over `T` packed rows.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct ConvTensors<'a> {
    /// `[N + 1]`, lengths for a plan of [`Conv::device`]. Absent for other plans.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// The projections.
    pub x: ConvInput<'a>,
    /// `[channels, width]`, f32, bf16 or fp16, any strides; the newest token's weight last. Dense rows of the type of x
    /// are the fastest.
    pub weight: Tensor<'a, 2>,
    /// `[channels]`, f32, bf16 or fp16; absent: 0.
    pub bias: Option<Tensor<'a, 1>>,
    /// Conv states, read and updated. Absent: sequences start from zeros, and no state is written.
    pub state: Option<ConvState<'a>>,
    /// Slot of each sequence. Absent: slot n for sequence n. Negative, or beyond the pool: padding, whose outputs
    /// become zeros and which touches no state. No two sequences may share a slot.
    pub slots: Option<PerSequence<'a, i32>>,
    /// `[T, HK, K]`. Rows past the last sequence become zeros, here and in k and v.
    pub q: TokensMut<'a>,
    /// `[T, HK, K]`.
    pub k: TokensMut<'a>,
    /// `[T, HV, V]`.
    pub v: TokensMut<'a>,
    /// Gates g and beta of all rows, computed in the same launch. Absent: not computed.
    pub gates: Option<Gate<'a>>,
}

/// `cu_seqlens` of a plan, which its backward shares.
type Lengths = Arc<Buffer<i32>>;

/// Plan of a convolution for packed batches of one shape: validated and uploaded once, launched any number of times.
#[derive(Debug)]
pub struct Conv {
    context: Context,
    shape: Shape,
    /// Absent: launches read [`ConvTensors::cu_seqlens`].
    cu_seqlens: Option<Lengths>,
    /// Tokens of the longest sequence; 0 if only the device knows.
    longest: usize,
}

impl Conv {
    /// A packed batch of `tokens` rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`. Rows past the last
    /// sequence belong to no sequence.
    ///
    /// # Errors
    /// A spec or lengths that are not allowed; no memory for the lengths.
    pub fn packed<L: Copy + Into<i64>>(
        context: &Context,
        spec: ConvSpec,
        cu_seqlens: &[L],
        tokens: usize,
    ) -> Result<Self> {
        let sequences = cu_seqlens.len().saturating_sub(1);
        let shape = Shape::new(spec, tokens, sequences, context)?;
        let cu_seqlens = checked_cu_seqlens(cu_seqlens, tokens)?;
        let longest = cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).max();
        Ok(Conv {
            context: context.clone(),
            shape,
            cu_seqlens: Some(Arc::new(context.upload(&cu_seqlens)?)),
            longest: longest.unwrap_or(0) as usize,
        })
    }

    /// Packed batches of exactly `sequences` sequences, some of which may be empty, in `tokens` rows. Launches read
    /// [`ConvTensors::cu_seqlens`] on the device.
    ///
    /// Entries that decrease or exceed the tokens never lead out of bounds, but outputs of the affected sequences are
    /// then unspecified. A [`Prefill`](crate::prefill::Prefill) with the same lengths reports such entries.
    ///
    /// # Errors
    /// A spec or sizes that are not allowed.
    pub fn device(
        context: &Context,
        spec: ConvSpec,
        tokens: usize,
        sequences: usize,
    ) -> Result<Self> {
        Ok(Conv {
            context: context.clone(),
            shape: Shape::new(spec, tokens, sequences, context)?,
            cu_seqlens: None,
            longest: 0,
        })
    }

    /// Changes the plan so that launches do not write conv states, for tokens that are yet to be verified.
    /// [`Commit`](crate::commit::Commit) writes the states later.
    #[must_use]
    pub fn keeping_states(mut self) -> Self {
        self.shape.keeps_states = true;
        self
    }

    /// Name of the kernel that a launch runs.
    pub fn kernel(&self) -> &'static str {
        self.shape.kernel().name()
    }

    /// Enqueues the convolution: one kernel, nothing else.
    ///
    /// # Errors
    /// A tensor of the wrong shape, type or context, or strides that are not allowed; nothing is then enqueued. A
    /// launch that the runtime refuses.
    pub fn launch(&self, stream: &Stream, tensors: &ConvTensors<'_>) -> Result<()> {
        let lowered = self.lower(stream, self.lengths(tensors)?, tensors)?;
        self.shape.check_overlaps(tensors, None)?;
        self.context.make_current()?;
        let _turn = stream.turn();
        self.enqueue(stream, &lowered)
    }

    /// Name of the kernel that [`Conv::launch_drafts`] runs.
    pub fn draft_kernel(&self) -> &'static str {
        self.shape.draft_kernel().name()
    }

    /// Enqueues the convolution of drafts: one kernel, nothing else.
    ///
    /// # Errors
    /// As [`Conv::launch`]; a state with too few columns for the plan's lengths. With lengths on the device, tokens that
    /// do not fit into the columns are not stored.
    pub fn launch_drafts(
        &self,
        stream: &Stream,
        tensors: &ConvTensors<'_>,
        drafts: &ConvDrafts<'_>,
    ) -> Result<()> {
        let lengths = self.lengths(tensors)?;
        check::stream(stream, &self.context)?;
        lower::check_devices(tensors, &self.context)?;
        if let Some(accepted) = &drafts.accepted {
            check::device("accepted", accepted.owner(), &self.context)?;
        }
        let columns = drafts.slot_columns()?;
        let lowered = self.shape.lower(tensors, lengths, columns)?;
        let arguments = drafts.lower(&self.shape, tensors, self.longest, lowered.arguments)?;
        if lowered.groups == 0 {
            return Ok(());
        }
        (self.shape).check_overlaps(tensors, drafts.accepted.as_ref())?;
        self.context.make_current()?;
        let _turn = stream.turn();
        let (kernel, groups) = (self.shape.draft_kernel(), lowered.groups);
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe { (self.context).launch(stream, kernel, groups, lower::THREADS, &arguments) }
    }

    /// The lengths of a launch: address, and whether entries have 64 bits.
    fn lengths(&self, tensors: &ConvTensors<'_>) -> Result<(*const c_void, bool)> {
        match &self.cu_seqlens {
            Some(own) => {
                CuSeqlens::refuse(&tensors.cu_seqlens)?;
                Ok((own.address().cast_const(), false))
            }
            None => {
                let given = CuSeqlens::required(&tensors.cu_seqlens)?;
                check::device("cu_seqlens", given.owner(), &self.context)?;
                Ok(given.checked(self.shape.sequences)?)
            }
        }
    }

    /// All checks of [`Conv::launch`] except those of overlaps and lengths. `lengths`: address, and whether entries
    /// have 64 bits.
    pub(crate) fn lower(
        &self,
        stream: &Stream,
        lengths: (*const c_void, bool),
        tensors: &ConvTensors<'_>,
    ) -> Result<LaunchArguments> {
        check::stream(stream, &self.context)?;
        lower::check_devices(tensors, &self.context)?;
        Ok(self.shape.lower(tensors, lengths, 1)?)
    }

    /// Enqueues checked launch arguments on the current device.
    pub(crate) fn enqueue(&self, stream: &Stream, lowered: &LaunchArguments) -> Result<()> {
        let LaunchArguments { arguments, groups } = lowered;
        if *groups == 0 {
            return Ok(());
        }
        let (kernel, threads) = (self.shape.kernel(), lower::THREADS);
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe { (self.context).launch(stream, kernel, *groups, threads, arguments) }
    }

    /// Name of the kernel that [`Conv::enqueue_with_lengths`] runs.
    pub(crate) fn lengths_kernel(&self) -> &'static str {
        self.shape.lengths_kernel().name()
    }

    /// As [`Conv::enqueue`], with the work of `prefill_lengths` in the same launch. The convolution takes its lengths from
    /// there.
    pub(crate) fn enqueue_with_lengths(
        &self,
        stream: &Stream,
        lowered: &LaunchArguments,
        lengths: &LoweredLengths,
    ) -> Result<()> {
        let arguments = dwk_conv_lengths_args {
            conv: lowered.arguments,
            lengths: lengths.arguments(),
        };
        // Without tokens, too: later kernels read the lengths, and callers the status.
        let groups = lowered.groups + lower::LENGTHS_GROUPS;
        let (kernel, threads) = (self.shape.lengths_kernel(), lower::THREADS);
        // SAFETY: as in `enqueue`; the caller of `DeviceLengths::lower` vouches for the workspace.
        unsafe { (self.context).launch(stream, kernel, groups, threads, &arguments) }
    }
}
