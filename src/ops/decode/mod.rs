//! Gated DeltaNet decode: one or a few tokens of every sequence, on a pool of states.
//!
//! The recurrence of [`prefill`](crate::prefill), token after token, in one launch:
//!
//! ```text
//! S   <- exp(g_t) S
//! d_t  = beta_t (v_t - S^T k_t)
//! S   <- S + k_t d_t^T
//! o_t  = scale S^T q_t
//! ```
//!
//! Gates, norms, sums and the state are f32. An output is rounded once. The state is rounded when it is stored: to a
//! pool of 16 bits after the last token of a launch. A sequence's bits do not depend on the other sequences of the batch.
//!
//! With one token a launch is a step of generation. With several tokens it verifies a draft: with
//! [`DecodeTensors::states`] it writes the state after every token there and does not write the pool.
//! [`Commit`](crate::commit::Commit) updates the pool once it is known how many tokens are accepted. With [`Drafts`] the
//! state after every token has a slot in the pool, and the next launch reads the accepted one.

mod drafts;
mod full;
pub(crate) mod lower;
mod normed;

pub use drafts::Drafts;
pub(crate) use lower::LaunchArguments;
use lower::{DraftArguments, Shape};
pub use normed::OutputNorm;

use crate::abi::dwk_decode_args;
use crate::batch::PerSequence;
use crate::check;
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::gates::Gating;
use crate::kernels::Kernel;
use crate::model::Heads;
use crate::norm;
use crate::runtime::{Context, Stream};
use crate::state::{HostSlots, StatePool};
use crate::tensor::{TensorMut, Tokens, TokensMut};
use crate::types::{Dtype, StateLayout};

/// Most tokens of a sequence in a launch.
pub const MAX_TOKENS: usize = 16;

/// Relation between a sequence's tokens in one launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Draft {
    /// Each token follows the one before it.
    #[default]
    Chain,
    /// Each token follows a named token. Not supported yet: refused.
    Tree,
}

/// Parameters of a decode that do not depend on the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeSpec {
    /// Element type of q, k, v and o: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// Heads; `K` and `V` are multiples of 16 up to [`MAX_HEAD_DIM`](crate::model::MAX_HEAD_DIM).
    pub heads: Heads,
    /// Whether rows of q and k are l2-normalised inside: `x / sqrt(sum(x^2) + 1e-6)`, in f32 and never rounded.
    pub qk_l2norm: bool,
    /// Factor of the output; absent is `K^-0.5`.
    pub scale: Option<f32>,
    /// `T`, tokens of every sequence, 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// Relation between a sequence's tokens.
    pub draft: Draft,
}

impl DecodeSpec {
    /// Spec with bf16, grouped heads, no norm of q and k, the default scale, one token.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        DecodeSpec {
            dtype: Dtype::Bf16,
            heads: Heads::new(key_heads, value_heads, key_dim, value_dim),
            qk_l2norm: false,
            scale: None,
            tokens: 1,
            draft: Draft::Chain,
        }
    }
}

/// The tensors of one decode of `B` sequences. A tensor over tokens is `[B, T, ...]`, or `[B T, ...]` with adjacent
/// tokens of a sequence, as [`conv`](crate::conv) writes them.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct DecodeTensors<'a> {
    /// `[B, T, HK, K]`.
    pub q: Tokens<'a>,
    /// `[B, T, HK, K]`.
    pub k: Tokens<'a>,
    /// `[B, T, HV, V]`.
    pub v: Tokens<'a>,
    /// Gates, `[B, T, HV]`.
    pub gating: Gating<'a>,
    /// The states, read and written in place. Rows of a head may be up to 2^21 elements apart.
    pub pool: StatePool<'a>,
    /// One byte per sequence. 0: the sequence starts from zeros instead of its slot's contents. Absent: every sequence
    /// has a state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
    /// State after every token, for [`Commit`](crate::commit::Commit): `[B, T, HV, K, V]`, or `[B, T, HV, V, K]` if the
    /// pool has that layout; f32, bf16 or fp16. The pool is then not written. States of padding are not written here.
    pub states: Option<TensorMut<'a, 5>>,
    /// `[B, T, HV, V]`. It may be v.
    pub o: TokensMut<'a>,
}

/// Plan of a decode for batches of one size: validated once, launched any number of times.
#[derive(Debug)]
pub struct Decode {
    context: Context,
    shape: Shape,
    slots: Option<HostSlots>,
}

impl Decode {
    /// Plan for batches of `batch` sequences.
    ///
    /// # Errors
    /// A spec or a size that is not allowed.
    pub fn new(context: &Context, spec: DecodeSpec, batch: usize) -> Result<Self> {
        Ok(Decode {
            context: context.clone(),
            shape: Shape::new(spec, batch, context)?,
            slots: None,
        })
    }

    /// Sets the sequences' slots in the pool, as [`Prefill::set_slots`](crate::prefill::Prefill::set_slots) does.
    ///
    /// # Errors
    /// As [`Prefill::set_slots`](crate::prefill::Prefill::set_slots).
    pub fn set_slots(&mut self, slots: &[i32], write_slots: Option<&[i32]>) -> Result<()> {
        let batch = self.shape.batch;
        self.slots = Some(HostSlots::new(&self.context, batch, slots, write_slots)?);
        Ok(())
    }

    /// Name of the kernel that a launch runs on a pool of type `states` in `layout`, if all rows begin at multiples of 16
    /// bytes, and tensors of tokens and the states of a slot span at most 2^31 elements. Otherwise the kernel for all tensors
    /// runs.
    pub fn kernel(&self, states: Dtype, layout: StateLayout) -> &'static str {
        let full = self.shape.full_kernel(states, layout);
        full.map_or(self.shape.kernel().name(), Kernel::name)
    }

    /// Workgroups of a launch: one for every sequence, value head and 32 value columns.
    pub fn workgroups(&self) -> usize {
        self.shape.workgroups() as usize
    }

    /// Enqueues the decode: one kernel, nothing else.
    ///
    /// # Errors
    /// A tensor of the wrong shape, type or context, or strides that are not allowed; nothing is then enqueued. A
    /// launch that the runtime refuses.
    pub fn launch(&self, stream: &Stream, tensors: &DecodeTensors<'_>) -> Result<()> {
        let lowered = self.lower(stream, tensors)?;
        if lowered.groups > 0 {
            lower::check_overlaps(tensors)?;
        }
        self.context.make_current()?;
        let _turn = stream.turn();
        self.enqueue(stream, &lowered)
    }

    /// Name of the kernel that [`Decode::launch_drafts`] runs.
    pub fn draft_kernel(&self) -> &'static str {
        self.shape.draft_kernel().name()
    }

    /// Enqueues the decode of drafts: one kernel, nothing else.
    ///
    /// # Errors
    /// As [`Decode::launch`]; slots both of the plan and of the launch; [`Drafts`] that need something absent.
    pub fn launch_drafts(
        &self,
        stream: &Stream,
        tensors: &DecodeTensors<'_>,
        drafts: &Drafts<'_>,
    ) -> Result<()> {
        let lowered = self.lower_drafts(stream, tensors, drafts)?;
        if lowered.groups == 0 {
            return Ok(());
        }
        lower::check_overlaps(tensors)?;
        drafts.check_overlaps(&lower::outputs(tensors))?;
        self.context.make_current()?;
        let _turn = stream.turn();
        self.enqueue_drafts(stream, &lowered)
    }

    /// All checks of [`Decode::launch_drafts`] except those of overlaps.
    fn lower_drafts(
        &self,
        stream: &Stream,
        tensors: &DecodeTensors<'_>,
        drafts: &Drafts<'_>,
    ) -> Result<DraftArguments> {
        check::stream(stream, &self.context)?;
        lower::check_devices(tensors, &self.context)?;
        drafts.check_devices(&self.context)?;
        check::ensure(self.slots.is_none(), || {
            let allowed = "drafts have slots on the device alone";
            ArgumentError::new("slots", ArgumentKind::Presence, "set in the plan", allowed)
        })?;
        let lowered = self.shape.lower(tensors, None, Some(drafts))?;
        Ok(DraftArguments {
            kernel: self.shape.draft_kernel(),
            arguments: drafts.lower(&self.shape, tensors, lowered.arguments)?,
            groups: lowered.groups,
        })
    }

    /// Enqueues checked launch arguments of drafts on the current device, of which there are some.
    fn enqueue_drafts(&self, stream: &Stream, lowered: &DraftArguments) -> Result<()> {
        let (kernel, groups) = (lowered.kernel, lowered.groups);
        let threads = self.context.target().threads(kernel.role());
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe { (self.context).launch(stream, kernel, groups, threads, &lowered.arguments) }
    }

    /// All checks of [`Decode::launch`] except those of overlaps.
    pub(crate) fn lower(
        &self,
        stream: &Stream,
        tensors: &DecodeTensors<'_>,
    ) -> Result<LaunchArguments> {
        check::stream(stream, &self.context)?;
        lower::check_devices(tensors, &self.context)?;
        Ok(self.shape.lower(tensors, self.slots.as_ref(), None)?)
    }

    /// Enqueues checked launch arguments on the current device.
    pub(crate) fn enqueue(&self, stream: &Stream, lowered: &LaunchArguments) -> Result<()> {
        if lowered.groups == 0 {
            return Ok(());
        }
        let (target, groups) = (self.context.target(), lowered.groups);
        if let Some(kernel) = lowered.full
            && let Some(arguments) = full::arguments(&lowered.arguments)
        {
            let threads = target.threads(kernel.role());
            // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
            return unsafe { (self.context).launch(stream, kernel, groups, threads, &arguments) };
        }
        let (kernel, arguments) = (lowered.kernel, &lowered.arguments);
        let threads = target.threads(kernel.role());
        // SAFETY: as above.
        unsafe { (self.context).launch(stream, kernel, groups, threads, arguments) }
    }

    /// The kernel with the gated norm fused in, if there is one for this shape, and it is faster.
    pub(crate) fn norm_kernel(&self) -> Option<Kernel<dwk_decode_args>> {
        self.shape.norm_kernel()
    }

    /// Fuses the in-place norm of the outputs into the decode kernel. Returns false if no kernel for this shape has it, or two are
    /// faster.
    pub(crate) fn fuse(&self, lowered: &mut LaunchArguments, norm: &norm::LaunchArguments) -> bool {
        if let Some(kernel) = self.norm_kernel() {
            lowered.fuse(kernel, norm.arguments());
        }
        self.norm_kernel().is_some()
    }
}
