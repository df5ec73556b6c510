//! Commit: writes the states after the accepted tokens of a verified draft.
//!
//! [`Decode`](crate::decode::Decode) of several tokens, given [`states`](crate::decode::DecodeTensors::states), does
//! not write the pool. A [`Conv`](crate::conv::Conv) that [keeps the conv states](crate::conv::Conv::keeping_states)
//! does not write them either. Once it is known how many leading tokens of each sequence are accepted, a commit writes
//! both: it copies the state after the last accepted token to the sequence's slot, and moves the accepted tokens'
//! columns of x into its conv state. A sequence without accepted tokens keeps both states. One launch does this; the
//! counts are on the device.

use std::ptr;

use crate::abi::dwk_commit_args;
use crate::alias::{self, Span};
use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::conv::{self, ConvInput, ConvStateLayout};
use crate::decode::{DecodeSpec, MAX_TOKENS, lower as decode};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels;
use crate::runtime::{Context, Stream};
use crate::tensor::{Tensor, TensorMut};
use crate::types::StateLayout;

const THREADS: u32 = 256;

/// Conv states of a commit.
#[derive(Debug)]
pub struct CommitConv<'a> {
    /// The projections of all tokens, accepted or not: `[B T, ...]`, the tokens of a sequence one after the other.
    pub x: ConvInput<'a>,
    /// Pool of conv states, as in the convolution.
    pub state: TensorMut<'a, 3>,
    /// Order of its dimensions.
    pub layout: ConvStateLayout,
    /// One byte per sequence. 0: the old state reads as zeros instead of the slot's contents. Absent: every sequence
    /// has a state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// The tensors of one commit of `B` sequences.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct CommitTensors<'a> {
    /// `[B]`, accepted tokens of each sequence, 0 to `T`. Values outside are clamped.
    pub accepted: PerSequence<'a, i32>,
    /// Slot of each sequence in both pools. Absent: slot n for sequence n. Negative, or beyond a pool: nothing is
    /// written there. No two sequences may share a slot.
    pub slots: Option<PerSequence<'a, i32>>,
    /// `[B, T, HV, K, V]` or `[B, T, HV, V, K]`: the states after every token.
    pub states: Tensor<'a, 5>,
    /// f32, bf16 or fp16, `[slots, HV, K, V]` or `[slots, HV, V, K]`.
    pub pool: TensorMut<'a, 4>,
    /// Order of the last two dimensions of `states` and `pool`.
    pub layout: StateLayout,
    /// Conv states; absent: none are written.
    pub conv: Option<CommitConv<'a>>,
}

/// Plan of a commit for batches of one size: validated once, launched any number of times.
#[derive(Debug)]
pub struct Commit {
    context: Context,
    spec: DecodeSpec,
    batch: usize,
}

impl Commit {
    /// Commits tokens that a decode of this spec and batch size verifies.
    ///
    /// # Errors
    /// A spec or a size that is not allowed.
    pub fn new(context: &Context, spec: DecodeSpec, batch: usize) -> Result<Self> {
        decode::Shape::new(spec, batch, context)?;
        Ok(Commit {
            context: context.clone(),
            spec,
            batch,
        })
    }

    /// Name of the kernel that a launch runs.
    pub fn kernel(&self) -> &'static str {
        kernels::commit().name()
    }

    /// Enqueues the commit: one kernel, nothing else.
    ///
    /// # Errors
    /// A tensor of the wrong shape, type or context, or strides that are not allowed; nothing is then enqueued. A
    /// launch that the runtime refuses.
    pub fn launch(&self, stream: &Stream, tensors: &CommitTensors<'_>) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_devices(tensors, &self.context)?;
        let (arguments, groups) = self.lower(tensors)?;
        if groups == 0 {
            return Ok(());
        }
        check_overlaps(tensors)?;
        self.context.make_current()?;
        let _turn = stream.turn();
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe { (self.context).launch(stream, kernels::commit(), groups, THREADS, &arguments) }
    }

    /// Checks the tensors and returns the kernel's arguments and grid.
    fn lower(&self, x: &CommitTensors<'_>) -> Checked<(dwk_commit_args, u32)> {
        let (spec, batch) = (&self.spec, self.batch);
        let [rows, columns] = decode::matrix(spec, x.layout);
        let (states_strides, states_token) = decode::check_states(
            "states",
            &x.states,
            batch,
            spec.tokens,
            spec.heads.value,
            [rows, columns],
        )?;
        let pool = &x.pool.0;
        let least = if x.slots.is_some() { 1 } else { batch };
        decode::check_slot_count("pool", pool, least)?;
        let shape = [pool.shape[0], spec.heads.value, rows, columns];
        let pool_strides = check::state("pool", pool, shape, true)?;
        decode::check_row_stride("pool", pool.strides[2])?;
        let mut arguments = dwk_commit_args {
            accepted: x.accepted.checked("accepted", batch)?,
            slots: match &x.slots {
                Some(slots) => slots.checked("slots", batch)?,
                None => ptr::null(),
            },
            states: x.states.address,
            pool: pool.address,
            states_strides,
            pool_strides,
            states_token,
            batch: batch as i32,
            tokens: spec.tokens as i32,
            pool_slots: pool.shape[0] as i32,
            value_heads: spec.heads.value as i32,
            rows: rows as i32,
            columns: columns as i32,
            states_type: check::type_code(x.states.dtype),
            pool_type: check::type_code(pool.dtype),
            ..Default::default()
        };
        if let Some(conv) = &x.conv {
            self.lower_conv(conv, least, &mut arguments)?;
        }
        let of_sequence = spec.heads.value as u64 + arguments.blocks as u64;
        let groups = batch as u64 * of_sequence;
        check::ensure(groups < 1 << 24, || {
            let was = format!("{batch} sequences of {of_sequence} workgroups each");
            let allowed = "a launch must have fewer than 2^32 threads";
            ArgumentError::new("batch", ArgumentKind::Shape, was, allowed)
        })?;
        Ok((arguments, groups as u32))
    }

    fn lower_conv(
        &self,
        x: &CommitConv<'_>,
        least_slots: usize,
        out: &mut dwk_commit_args,
    ) -> Checked<()> {
        let spec = &self.spec;
        let keys = spec.heads.key * spec.heads.key_dim;
        let values = spec.heads.value * spec.heads.value_dim;
        let tokens = self.batch * spec.tokens;
        let part = |name, t: &Tensor<'_, 3>, channels| {
            conv::projection(name, t, spec.dtype, tokens, channels)
        };
        out.q = part("x.q", &x.x.q, keys)?;
        out.k = part("x.k", &x.x.k, keys)?;
        out.v = part("x.v", &x.x.v, values)?;
        let channels = 2 * keys + values;
        let columns = 1..(1 << 30) - MAX_TOKENS;
        let state = conv::state_strides(
            "conv.state",
            &x.state,
            x.layout,
            spec.dtype,
            channels,
            columns,
            least_slots.max(1)..i32::MAX as usize,
        )?;
        [out.conv_slot, out.conv_channel, out.conv_column] = state.strides;
        out.conv_state = x.state.0.address;
        out.conv_slots = state.slots;
        out.conv_columns = state.columns;
        out.blocks = channels.div_ceil(THREADS as usize) as i32;
        if let Some(has) = &x.has_initial_state {
            out.has_initial_state = has.checked("has_initial_state", self.batch)?;
        }
        Ok(())
    }
}

/// Checks that no output shares memory with another argument.
fn check_overlaps(x: &CommitTensors<'_>) -> Checked<()> {
    let conv = x.conv.as_ref();
    let outputs = [
        Span::of("pool", &x.pool.0),
        Span::maybe("conv.state", conv.map(|c| &c.state.0)),
    ];
    let has_initial_state = conv.and_then(|c| c.has_initial_state.as_ref());
    let inputs = [
        Span::of("states", &x.states),
        Span::maybe("x.q", conv.map(|c| &c.x.q)),
        Span::maybe("x.k", conv.map(|c| &c.x.k)),
        Span::maybe("x.v", conv.map(|c| &c.x.v)),
        Span::numbers("accepted", Some(&x.accepted)),
        Span::numbers("slots", x.slots.as_ref()),
        Span::numbers("has_initial_state", has_initial_state),
    ];
    alias::check(&outputs, &inputs, &[])
}

/// Checks that every tensor with a known context belongs to `context`.
fn check_devices(x: &CommitTensors<'_>, context: &Context) -> Checked<()> {
    let conv = x.conv.as_ref();
    let known = [
        ("accepted", Some(x.accepted.owner())),
        ("slots", x.slots.as_ref().map(|s| s.owner())),
        ("states", Some(&x.states.owner)),
        ("pool", Some(&x.pool.0.owner)),
        ("x.q", conv.map(|c| &c.x.q.owner)),
        ("x.k", conv.map(|c| &c.x.k.owner)),
        ("x.v", conv.map(|c| &c.x.v.owner)),
        ("conv.state", conv.map(|c| &c.state.0.owner)),
        (
            "has_initial_state",
            conv.and_then(|c| Some(c.has_initial_state.as_ref()?.owner())),
        ),
    ];
    let mut known = known.into_iter().filter_map(|(n, o)| Some((n, o?)));
    known.try_for_each(|(name, owner)| check::device(name, owner, context))
}
