//! Gated DeltaNet decode: the same few tokens of every sequence, on a pool of states.
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
//! Gates, norms, sums and the state are f32; an output is rounded once, and so is the state, when it is stored: in a bf16
//! pool after the last token of a launch. The bits of a sequence do not depend on the batch that it is in.
//!
//! With one token a launch is a step of generation. With several it verifies those that a draft model proposed: given
//! [`DecodeTensors::states`], it leaves the state after every token there and the pool as it is, until it is known how many
//! tokens are accepted ([`Commit`](crate::commit::Commit)).

pub(crate) mod lower;

pub(crate) use lower::Lowered;
use lower::Shape;

use crate::abi::dwk_decode_args;
use crate::batch::PerSequence;
use crate::check;
use crate::error::Result;
use crate::gates::Gating;
use crate::kernels::Kernel;
use crate::model::Heads;
use crate::norm;
use crate::runtime::{Context, Stream};
use crate::state::{HostSlots, StatePool};
use crate::tensor::{TensorMut, Tokens, TokensMut};
use crate::types::Dtype;

/// Most tokens of a sequence in a launch.
pub const MAX_TOKENS: usize = 16;

/// What the tokens of a sequence in one launch are to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Draft {
    /// Each follows the one before it.
    #[default]
    Chain,
    /// Each follows one that is named. No kernel does that yet: it is refused.
    Tree,
}

/// What a decode computes, whatever the batch.
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
    /// What several tokens are to each other.
    pub draft: Draft,
}

impl DecodeSpec {
    /// bf16, grouped heads, no norm inside, the default scale, one token.
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

/// The tensors of one decode of `B` sequences. A tensor over tokens is `[B, T, ...]`, or `[B T, ...]` with the tokens of
/// a sequence one after the other, as [`conv`](crate::conv) leaves them.
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
    /// One byte per sequence, 0: it starts from zeros whatever its slot holds; absent: all have a state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
    /// `[B, T, HV, K, V]`, or with the last two exchanged as in the pool; f32 or bf16: the state after every token, for
    /// [`Commit`](crate::commit::Commit). The pool is then not written; of padding nothing is written here.
    pub states: Option<TensorMut<'a, 5>>,
    /// `[B, T, HV, V]`. It may be v.
    pub o: TokensMut<'a>,
}

/// A decode of batches of one size: validated once, launched any number of times.
#[derive(Debug)]
pub struct Decode {
    context: Context,
    shape: Shape,
    slots: Option<HostSlots>,
}

impl Decode {
    /// Batches of `batch` sequences.
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

    /// The slots of a pool that the sequences have, as [`Prefill::set_slots`](crate::prefill::Prefill::set_slots).
    ///
    /// # Errors
    /// As there.
    pub fn set_slots(&mut self, slots: &[i32], write_slots: Option<&[i32]>) -> Result<()> {
        let batch = self.shape.batch;
        self.slots = Some(HostSlots::new(&self.context, batch, slots, write_slots)?);
        Ok(())
    }

    /// The name of the kernel that a launch runs.
    pub fn kernel(&self) -> &'static str {
        self.shape.kernel().name()
    }

    /// Workgroups of a launch: one for every sequence, value head and 32 value columns.
    pub fn workgroups(&self) -> usize {
        self.shape.workgroups() as usize
    }

    /// Enqueues the decode: one kernel, nothing else.
    ///
    /// # Errors
    /// A tensor of the wrong shape, type or context, or strides that are not allowed; nothing is then enqueued. A launch
    /// that the runtime refuses.
    pub fn launch(&self, stream: &Stream, tensors: &DecodeTensors<'_>) -> Result<()> {
        let lowered = self.lower(stream, tensors)?;
        if lowered.groups > 0 {
            lower::check_overlaps(tensors)?;
        }
        self.context.make_current()?;
        let _turn = stream.turn();
        self.enqueue(stream, &lowered)
    }

    /// All checks of [`Decode::launch`] but those of memory that arguments share.
    pub(crate) fn lower(&self, stream: &Stream, tensors: &DecodeTensors<'_>) -> Result<Lowered> {
        check::stream(stream, &self.context)?;
        lower::check_devices(tensors, &self.context)?;
        Ok(self.shape.lower(tensors, self.slots.as_ref())?)
    }

    /// Enqueues checked launch arguments on the current device.
    pub(crate) fn enqueue(&self, stream: &Stream, lowered: &Lowered) -> Result<()> {
        if lowered.groups == 0 {
            return Ok(());
        }
        let (kernel, groups) = (lowered.kernel, lowered.groups);
        let threads = self.context.target().threads(kernel.role());
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe { (self.context).launch(stream, kernel, groups, threads, &lowered.arguments) }
    }

    /// The kernel that has the gated norm in it, where there is one for the shape.
    pub(crate) fn norm_kernel(&self) -> Option<Kernel<dwk_decode_args>> {
        self.shape.norm_kernel()
    }

    /// Puts the norm of the outputs, in place, in the kernel that makes them; false: there is none that has it in it.
    pub(crate) fn fuse(&self, lowered: &mut Lowered, norm: &norm::Lowered) -> bool {
        if let Some(kernel) = self.norm_kernel() {
            lowered.fuse(kernel, norm.arguments());
        }
        self.norm_kernel().is_some()
    }
}
