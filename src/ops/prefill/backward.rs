//! Backward of a prefill: gradients of its inputs, from gradients of its outputs and final states.
//!
//! With saved boundaries (`rounds.rs`) these kernels run once for each round.
//!
//! Three kernels, four with raw gates, and one or two more where sequences are cut into segments:
//! `prefill_backward_prepare` computes T, P and row factors of every chunk; `prefill_backward_summarise` and
//! `prefill_combine` the states between segments and the gradients of these;
//! `prefill_backward_walk` the states before every chunk and the gradients of the states after it, in both directions
//! at the same time; `prefill_backward_gradients` the gradients of q, k and gates; `prefill_backward_sums` those of
//! `A_log` and `dt_bias`. The backward computes the states of the forward
//! again; the forward only saves those that rounds start from. It uses no atomics,
//! so two launches give the same bits.

use std::ffi::c_void;
use std::ptr;

use super::plan::{self, Counts, Partition};
use super::rounds::{Round, SLAB_ROWS_BYTES, TILES};
use super::shape::{BACKWARD_COLUMNS as SLAB, Shape};
use super::{DeviceLengths, Lengths, LoweredLengths, Prefill};
use crate::abi::{
    self, dwk_prefill_backward_args, dwk_prefill_combine_args, dwk_prefill_prepare_args,
    dwk_token_strides,
};
use crate::alias::{self, Span};
use crate::batch::CuSeqlens;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::gates::Gating;
use crate::kernels::{self, Kernel};
use crate::model::Heads;
use crate::runtime::{Context, Stream};
use crate::state::{InitialState, State, StateMut, state_shape};
use crate::tensor::{Buffer, TensorMut, TokenScalarsMut, Tokens, TokensMut};
use crate::types::{Dtype, HeadMap, StateLayout};
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_memory, check_workspace};

const RECORD_BYTES: usize = abi::DWK_BACKWARD_RECORD_BYTES as usize;

/// The tensors of one backward: the inputs of the prefill, the gradients of what it returned, and the gradients to
/// compute. Absent gradients are not computed. Rows past the last sequence become zeros.
///
/// A launch refuses outputs that share memory with other arguments.
#[derive(Debug)]
pub struct BackwardTensors<'a> {
    /// `[N + 1]`, lengths for a plan of [`Prefill::device`]. Absent for other plans.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// `[T, HK, K]`.
    pub q: Tokens<'a>,
    /// `[T, HK, K]`.
    pub k: Tokens<'a>,
    /// `[T, HV, V]`.
    pub v: Tokens<'a>,
    /// Gates.
    pub gating: Gating<'a>,
    /// Initial states; absent: sequences started from zeros.
    pub initial: Option<InitialState<'a>>,
    /// Gradient of o, `[T, HV, V]`, of any strides that inputs may have, 0 among them.
    pub d_o: Tokens<'a>,
    /// Gradient of the final states; absent: zeros.
    pub d_final: Option<State<'a>>,
    /// `[T, HK, K]`.
    pub d_q: Option<TokensMut<'a>>,
    /// `[T, HK, K]`.
    pub d_k: Option<TokensMut<'a>>,
    /// `[T, HV, V]`.
    pub d_v: Option<TokensMut<'a>>,
    /// Gradient of g or, with raw gates, of a: `[T, HV]`, f32, bf16 or fp16.
    pub d_g: Option<TokenScalarsMut<'a>>,
    /// Gradient of beta or, with raw gates, of b: `[T, HV]`, f32, bf16 or fp16.
    pub d_beta: Option<TokenScalarsMut<'a>>,
    /// `[HV]`, f32, with raw gates.
    pub d_a_log: Option<TensorMut<'a, 1>>,
    /// `[HV]`, f32, with raw gates.
    pub d_dt_bias: Option<TensorMut<'a, 1>>,
    /// Gradient of the initial states, or of zeros where there were none. Zeros for sequences that did not read theirs.
    pub d_initial: Option<StateMut<'a>>,
}

/// Plan of the backward of a prefill, for the same batches.
#[derive(Debug)]
pub struct PrefillBackward {
    pub(super) context: Context,
    pub(super) shape: Shape,
    pub(super) kernels: [Kernel<dwk_prefill_backward_args>; 5],
    pub(super) combine: Kernel<dwk_prefill_combine_args>,
    /// In the order of rows. The last one is computed first.
    pub(super) rounds: Vec<RoundPlan>,
    /// Of the forward: bytes of the states that rounds start from.
    context_bytes: usize,
}

/// One round: a batch of its own, in a part of the caller's tensors.
#[derive(Debug)]
pub(super) struct RoundPlan {
    round: Round,
    shape: Shape,
    lengths: PlanLengths,
    pub(super) counts: Counts,
    /// Chunk indices of the rounds before it.
    records_before: usize,
}

#[derive(Debug)]
enum PlanLengths {
    /// Items, chains of both directions, `cu_seqlens`.
    Host(Buffer<i32>),
    Device(DeviceLengths),
}

/// Offsets in bytes of the parts of the workspace of a round.
struct Layout {
    states: usize,
    d_states: usize,
    errors: usize,
    d_updates: usize,
    boundaries: usize,
    retained: usize,
    forgotten: usize,
    bytes: usize,
}

/// Device addresses of the tables that kernels read.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    cu_seqlens: *const i32,
    /// Null: no sequence is cut.
    items: *const abi::dwk_prefill_item,
    pub(super) chains: *const i32,
}

fn aligned(numbers: usize) -> usize {
    (numbers * size_of::<f32>()).next_multiple_of(WORKSPACE_ALIGN)
}

fn size_of_type(code: i32) -> i64 {
    if code == abi::DWK_F32 as i32 { 4 } else { 2 }
}

/// Parts of the workspace of a launch.
pub(super) struct Memory {
    /// Of all rounds.
    pub(super) partials: *mut f32,
    /// What a round hands from kernel to kernel.
    round: *mut c_void,
    /// Gradients of the states between rounds, of which one is read and the other written.
    carries: [*mut c_void; 2],
}

impl RoundPlan {
    /// A batch whose sequences are cut as `partition` says.
    pub(super) fn of_partition(
        context: &Context,
        shape: Shape,
        round: Round,
        partition: &Partition,
        cu_seqlens: &[i32],
    ) -> Result<Self> {
        Ok(RoundPlan {
            round,
            shape,
            counts: partition.counts(),
            lengths: PlanLengths::Host(context.upload(&table(partition, cu_seqlens))?),
            records_before: 0,
        })
    }

    /// Chunks of all sequences, at most.
    fn records(&self) -> usize {
        self.shape.chunk_entries()
    }

    /// Workgroups of prepare, summarise, walk, gradients (one more chunk for rows past the last sequence) and sums.
    pub(super) fn grids(&self) -> [u64; 5] {
        let Heads { key, value, .. } = self.shape.spec.heads;
        let chunks = self.records() as u64;
        let slabs = self.shape.backward_division(self.counts).slabs as u64;
        let of_heads = |count: usize, each| count as u64 * value as u64 * each;
        [
            chunks * key as u64,
            of_heads(self.counts.summaries, self.matrices()),
            of_heads(self.counts.items, 2 * slabs),
            self.shape.gradient_groups((chunks + 1) * key as u64),
            value as u64,
        ]
    }

    /// Workgroups of summarise for a segment and value head.
    pub(super) fn matrices(&self) -> u64 {
        let heads = &self.shape.spec.heads;
        let slabs = |columns: usize| columns.div_ceil(self.shape.backward_walk().columns);
        (2 * slabs(heads.value_dim) + slabs(heads.key_dim)) as u64
    }

    /// Chains of both directions.
    fn chains(&self) -> usize {
        2 * self.counts.chains as usize
    }

    fn combine_grid(&self) -> u64 {
        let slabs = self.shape.combine_slabs() as u64;
        self.chains() as u64 * self.shape.spec.heads.value as u64 * slabs
    }

    fn layout(&self) -> Layout {
        let Heads {
            value,
            key_dim,
            value_dim,
            ..
        } = self.shape.spec.heads;
        let places = self.records() * value;
        // Whole slabs of the walk.
        let columns = value_dim.next_multiple_of(self.shape.backward_walk().columns);
        let blocks = columns.div_ceil(SLAB) * SLAB_ROWS_BYTES;
        let state = kernels::backward_bucket(key_dim) / 16 * blocks;
        let states = places * RECORD_BYTES;
        let d_states = states + places * state;
        let errors = d_states + places * state;
        let d_updates = errors + places * 2 * TILES * blocks;
        let boundaries = d_updates + places * TILES * blocks;
        let summaries = self.counts.summaries;
        let retained = boundaries
            + self
                .shape
                .summary_bytes(2 * summaries)
                .next_multiple_of(WORKSPACE_ALIGN);
        let forgotten = retained + if summaries > 0 { aligned(places) } else { 0 };
        Layout {
            states,
            d_states,
            errors,
            d_updates,
            boundaries,
            retained,
            forgotten,
            bytes: forgotten + aligned(2 * summaries * value),
        }
    }

    /// Addresses of the tables. `made`: lengths that a launch checks.
    pub(super) fn tables(&self, made: Option<&LoweredLengths>) -> Tables {
        match &self.lengths {
            PlanLengths::Host(tables) => {
                let items: *const i32 = tables.address().cast_const().cast();
                let chains = items.wrapping_add(self.counts.items * plan::ITEM_WORDS);
                Tables {
                    cu_seqlens: chains.wrapping_add(self.chains() * plan::CHAIN_WORDS),
                    items: match self.counts.summaries {
                        0 => ptr::null(),
                        _ => items.cast(),
                    },
                    chains,
                }
            }
            PlanLengths::Device(_) => Tables {
                cu_seqlens: made.map_or(ptr::null(), LoweredLengths::checked),
                items: ptr::null(),
                chains: ptr::null(),
            },
        }
    }

    /// Arguments of the round, from those of the whole batch. `saved`: the states of the forward.
    pub(super) fn arguments(
        &self,
        whole: &dwk_prefill_backward_args,
        tables: Tables,
        memory: &Memory,
        saved: *const c_void,
    ) -> dwk_prefill_backward_args {
        let (layout, round) = (self.layout(), &self.round);
        let at = |offset: usize| memory.round.wrapping_byte_add(offset);
        // Rows are numbered from the round's first one on, and sequences from its first one on.
        let rows = |strides: &dwk_token_strides, bytes: i64| {
            let elements =
                round.first as i64 * strides.sequence + round.begin as i64 * strides.token;
            (elements * bytes) as isize
        };
        let moved = |p: *const c_void, by: isize| match p.is_null() {
            true => p,
            false => p.wrapping_byte_offset(by),
        };
        let moved_mut = |p: *mut c_void, by: isize| moved(p, by).cast_mut();
        let sequences = |strides: &abi::dwk_state_strides, kind: i32| {
            (round.first as i64 * strides.sequence * size_of_type(kind)) as isize
        };
        let mut x = *whole;
        let p = &mut x.prepare;
        p.q = moved(p.q, rows(&p.q_strides, 2));
        p.k = moved(p.k, rows(&p.k_strides, 2));
        p.g = moved(p.g, rows(&p.g_strides, size_of_type(p.g_type)));
        p.beta = moved(p.beta, rows(&p.beta_strides, size_of_type(p.beta_type)));
        p.cu_seqlens = tables.cu_seqlens;
        p.records = memory.round;
        p.retained = match self.counts.summaries {
            0 => ptr::null_mut(),
            _ => at(layout.retained).cast(),
        };
        p.sequences = self.shape.sequences as i32;
        p.tokens = self.shape.batch.rows() as i32;
        x.v = moved(x.v, rows(&x.v_strides, 2));
        x.d_o = moved(x.d_o, rows(&x.d_o_strides, 2));
        x.d_q = moved_mut(x.d_q, rows(&x.d_q_strides, 2));
        x.d_k = moved_mut(x.d_k, rows(&x.d_k_strides, 2));
        x.d_v = moved_mut(x.d_v, rows(&x.d_v_strides, 2));
        x.d_g = moved_mut(x.d_g, rows(&x.d_g_strides, size_of_type(x.d_g_type)));
        x.d_beta = moved_mut(
            x.d_beta,
            rows(&x.d_beta_strides, size_of_type(x.d_beta_type)),
        );
        x.initial_state = moved(
            x.initial_state,
            sequences(&x.initial_strides, x.initial_type),
        );
        x.has_initial_state = moved(x.has_initial_state.cast(), round.first as isize).cast();
        x.d_final = moved(x.d_final, sequences(&x.d_final_strides, x.d_final_type));
        x.d_initial = moved_mut(
            x.d_initial,
            sequences(&x.d_initial_strides, x.d_initial_type),
        );
        x.states = at(layout.states).cast();
        x.d_states = at(layout.d_states).cast();
        x.errors = at(layout.errors).cast();
        x.d_updates = at(layout.d_updates).cast();
        let values = self.shape.spec.heads.value;
        x.partials = memory
            .partials
            .wrapping_add(2 * self.records_before * values);
        x.items = tables.items;
        x.boundaries = at(layout.boundaries).cast();
        x.forgotten = at(layout.forgotten).cast();
        x.summaries = self.counts.summaries as i32;
        x.mirror = 2 * x.summaries;
        x.records = self.records() as i32;
        // States between rounds are f32, [HV, K, V]. Rounds alternate between two gradients of such states.
        let (kind, strides) = (abi::DWK_F32 as i32, self.shape.boundary_strides());
        if let Some(slot) = round.boundary {
            let bytes = slot * self.shape.boundary_bytes();
            x.initial_state = saved.wrapping_byte_add(bytes);
            (x.initial_type, x.initial_strides) = (kind, strides);
            x.has_initial_state = ptr::null();
            x.prepare.flags &= !abi::DWK_INITIAL_VALUE_MAJOR;
            x.d_initial = memory.carries[slot % 2];
            (x.d_initial_type, x.d_initial_strides) = (kind, strides);
            x.d_initial_value_major = 0;
        }
        if let Some(next) = round.next {
            x.d_final = memory.carries[next % 2];
            (x.d_final_type, x.d_final_strides) = (kind, strides);
            x.d_final_value_major = 0;
        }
        x
    }
}

impl PrefillBackward {
    /// The backward of `prefill`. It needs a workspace of its own size.
    ///
    /// It cuts sequences into [`segments`](super::PrefillSpec::segments), or into as many as the planner finds fastest for
    /// it. With lengths that only the device knows, it cuts none. [`PrefillSpec::save`](super::PrefillSpec::save) says
    /// whether it has rounds, each of which is planned as a batch of its own.
    ///
    /// # Errors
    /// [`SEGMENTS_VARIABLE`](super::SEGMENTS_VARIABLE) that is not allowed, no memory for the lengths.
    pub fn of(prefill: &Prefill) -> Result<Self> {
        let shape = prefill.shape;
        let rounds = match &prefill.lengths {
            Lengths::Host { cu_seqlens, .. } => {
                let mut records_before = 0;
                let rounds = shape.rounds(cu_seqlens).into_iter().map(|round| {
                    let made = host_round(&prefill.context, shape, round, cu_seqlens)?;
                    let records = made.records();
                    let made = RoundPlan {
                        records_before,
                        ..made
                    };
                    records_before += records;
                    Ok(made)
                });
                rounds.collect::<Result<Vec<_>>>()?
            }
            Lengths::Device(lengths) => vec![RoundPlan {
                round: Round::whole(shape.sequences, shape.batch.rows()),
                shape,
                lengths: PlanLengths::Device(DeviceLengths {
                    segments: None,
                    ..*lengths
                }),
                counts: shape.whole(),
                records_before: 0,
            }],
        };
        Self::of_rounds(&prefill.context, shape, rounds, prefill.context_bytes())
    }

    pub(super) fn of_rounds(
        context: &Context,
        shape: Shape,
        rounds: Vec<RoundPlan>,
        context_bytes: usize,
    ) -> Result<Self> {
        let plan = PrefillBackward {
            context: context.clone(),
            kernels: kernels::prefill_backward(shape.spec.dtype, shape.spec.heads.key_dim),
            combine: kernels::prefill_combine(shape.spec.heads.key_dim),
            shape,
            rounds,
            context_bytes,
        };
        let grids = |round: &RoundPlan| round.grids().into_iter().chain([round.combine_grid()]);
        let most = plan.rounds.iter().flat_map(grids).max().unwrap_or_default();
        check::ensure(most < 1 << 23, || {
            let was = format!("{most} workgroups");
            let allowed = "fewer than 2^23 workgroups in the backward: use fewer tokens or heads";
            ArgumentError::new("tokens", ArgumentKind::Shape, was, allowed)
        })?;
        Ok(plan)
    }

    /// Chunk indices of all rounds.
    fn records(&self) -> usize {
        self.rounds.iter().map(RoundPlan::records).sum()
    }

    fn partials_bytes(&self) -> usize {
        aligned(2 * self.records() * self.shape.spec.heads.value)
    }

    fn round_bytes(&self) -> usize {
        let bytes = self.rounds.iter().map(|round| round.layout().bytes);
        bytes.max().unwrap_or_default()
    }

    /// Bytes of a gradient of a state between rounds.
    fn carry_bytes(&self) -> usize {
        match self.context_bytes {
            0 => 0,
            _ => (self.shape.boundary_bytes()).next_multiple_of(WORKSPACE_ALIGN),
        }
    }

    fn lengths_bytes(&self) -> usize {
        match self.rounds.first().map(|round| &round.lengths) {
            Some(PlanLengths::Device(lengths)) => lengths.bytes(),
            _ => 0,
        }
    }

    /// Number of segments of all sequences. A sequence that is not cut counts as one in each of its rounds.
    pub fn segments(&self) -> usize {
        self.rounds.iter().map(|round| round.counts.items).sum()
    }

    /// Number of rounds: 1 unless the forward's [`PrefillSpec::save`](super::PrefillSpec::save) bounds the workspace.
    pub fn rounds(&self) -> usize {
        self.rounds.len()
    }

    /// Bytes of the forward's context that a launch reads: [`Prefill::context_bytes`].
    pub fn context_bytes(&self) -> usize {
        self.context_bytes
    }

    /// Bytes of workspace that a launch needs: about 129 KiB per chunk of a round and value head at `K = V = 128`, and
    /// 256 KiB per segment that another follows. All rounds share it.
    pub fn workspace_bytes(&self) -> usize {
        self.lengths_bytes() + self.partials_bytes() + self.round_bytes() + 2 * self.carry_bytes()
    }

    /// Names of the kernels that a launch runs, in order. `raw_gates`: whether gates are [`Gating::Raw`].
    pub fn kernels(&self, raw_gates: bool) -> Vec<&'static str> {
        let [prepare, summarise, walk, gradients, sums] = self.kernels.map(Kernel::name);
        let mut names = Vec::new();
        for round in self.rounds.iter().rev() {
            if matches!(round.lengths, PlanLengths::Device(_)) {
                names.push(kernels::prefill_lengths().name());
            }
            names.push(prepare);
            if round.counts.summaries > 0 {
                names.push(summarise);
            }
            if round.counts.chains > 0 {
                names.push(self.combine.name());
            }
            names.extend([walk, gradients]);
        }
        if raw_gates {
            names.push(sums);
        }
        names
    }

    /// Enqueues the backward: the kernels that [`PrefillBackward::kernels`] names, nothing else.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, gradients that share memory with other
    /// arguments, a workspace that is too small, or a plan that reads saved context: then nothing was enqueued. A launch
    /// that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.launch_between(stream, tensors, workspace, || Ok(()), || Ok(()))
    }

    /// [`PrefillBackward::launch`] with the context that [`Prefill::launch_saving`] wrote, from the same inputs.
    /// A context without bytes serves plans that read none.
    ///
    /// # Errors
    /// As [`PrefillBackward::launch`]; a context that is too small or shares memory with a gradient.
    pub fn launch_saved(
        &self,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        context: Workspace<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let nothing = || Ok(());
        self.launch_all(
            stream,
            tensors,
            Some(context),
            workspace,
            (nothing, nothing),
        )
    }

    /// [`PrefillBackward::launch`] between kernels that `before` and `after` enqueue: no other launch of this crate on the
    /// stream comes between them. If a check fails, neither is called.
    pub(crate) fn launch_between(
        &self,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        workspace: Workspace<'_>,
        before: impl FnOnce() -> Result<()>,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.launch_all(stream, tensors, None, workspace, (before, after))
    }

    fn launch_all(
        &self,
        stream: &Stream,
        tensors: &BackwardTensors<'_>,
        saved: Option<Workspace<'_>>,
        workspace: Workspace<'_>,
        (before, after): (impl FnOnce() -> Result<()>, impl FnOnce() -> Result<()>),
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let (saved, saved_span) = self.check_saved(saved)?;
        check_devices(tensors, &self.context)?;
        let scratch = workspace.span();
        let (address, rest) = workspace.split(self.lengths_bytes());
        let lengths = self.lower_lengths(tensors, address)?;
        let memory = self.memory(rest.address());
        let whole = self.lower(tensors)?;
        check_overlaps(tensors, [scratch, Span::NONE], saved_span)?;
        self.context.make_current()?;
        let _turn = stream.turn();
        before()?;
        if let Some(lengths) = &lengths {
            lengths.enqueue(&self.context, stream)?;
        }
        for round in self.rounds.iter().rev() {
            let tables = round.tables(lengths.as_ref());
            let arguments = round.arguments(&whole, tables, &memory, saved);
            self.enqueue_round(stream, round, &arguments, tables.chains)?;
        }
        self.enqueue_sums(stream, &whole, &memory)?;
        after()
    }

    /// Enqueues the kernel that sums over all rounds, if its results are wanted.
    pub(super) fn enqueue_sums(
        &self,
        stream: &Stream,
        whole: &dwk_prefill_backward_args,
        memory: &Memory,
    ) -> Result<()> {
        if whole.d_a_log.is_null() && whole.d_dt_bias.is_null() {
            return Ok(());
        }
        let arguments = dwk_prefill_backward_args {
            partials: memory.partials,
            records: self.records() as i32,
            ..*whole
        };
        let [.., sums] = self.kernels;
        self.enqueue(stream, sums, self.shape.spec.heads.value as u64, &arguments)
    }

    /// Enqueues one kernel, unless it has no workgroup.
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        kernel: Kernel<dwk_prefill_backward_args>,
        groups: u64,
        arguments: &dwk_prefill_backward_args,
    ) -> Result<()> {
        let threads = self.shape.target.threads(kernel.role());
        self.enqueue_threads(stream, kernel, (groups, threads), arguments)
    }

    /// Enqueues the walks of a round.
    pub(super) fn enqueue_walk(
        &self,
        stream: &Stream,
        round: &RoundPlan,
        arguments: &dwk_prefill_backward_args,
    ) -> Result<()> {
        let [_, _, walk, ..] = self.kernels;
        let [_, _, groups, ..] = round.grids();
        let threads = round.shape.backward_division(round.counts).threads;
        self.enqueue_threads(stream, walk, (groups, threads), arguments)
    }

    fn enqueue_threads(
        &self,
        stream: &Stream,
        kernel: Kernel<dwk_prefill_backward_args>,
        (groups, threads): (u64, u32),
        arguments: &dwk_prefill_backward_args,
    ) -> Result<()> {
        if groups == 0 {
            return Ok(());
        }
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views. What kernels hand on is in
        // the workspace.
        unsafe { (self.context).launch(stream, kernel, groups as u32, threads, arguments) }
    }

    /// Address and span of the forward's context.
    fn check_saved(&self, saved: Option<Workspace<'_>>) -> Checked<(*const c_void, Span<'static>)> {
        let Some(saved) = saved else {
            check::ensure(self.context_bytes == 0, || {
                let allowed = "it must be given: the plan starts rounds from saved states";
                ArgumentError::new("context", ArgumentKind::Presence, "absent", allowed)
            })?;
            return Ok((ptr::null(), Span::NONE));
        };
        check_memory("context", &saved, self.context_bytes, &self.context)?;
        Ok((saved.address(), saved.span_of("context")))
    }

    /// Parts of the workspace after the lengths.
    pub(super) fn memory(&self, at: *mut c_void) -> Memory {
        let round = at.wrapping_byte_add(self.partials_bytes());
        let carries = round.wrapping_byte_add(self.round_bytes());
        Memory {
            partials: at.cast(),
            round,
            carries: [carries, carries.wrapping_byte_add(self.carry_bytes())],
        }
    }

    /// Enqueues the kernels of a round, but for the sums over all rounds.
    fn enqueue_round(
        &self,
        stream: &Stream,
        round: &RoundPlan,
        arguments: &dwk_prefill_backward_args,
        chains: *const i32,
    ) -> Result<()> {
        for (kernel, groups) in self.kernels.into_iter().zip(round.grids()) {
            let role = kernel.role();
            match role {
                kernels::Role::BackwardSums => {}
                kernels::Role::BackwardWalk(_) => self.enqueue_walk(stream, round, arguments)?,
                _ => self.enqueue(stream, kernel, groups, arguments)?,
            }
            if matches!(role, kernels::Role::BackwardSummarise(_)) {
                self.launch_combine(stream, round, arguments, chains)?;
            }
        }
        Ok(())
    }

    /// Enqueues the kernel that chains summaries, in both directions.
    pub(super) fn launch_combine(
        &self,
        stream: &Stream,
        round: &RoundPlan,
        x: &dwk_prefill_backward_args,
        chains: *const i32,
    ) -> Result<()> {
        let groups = round.combine_grid();
        if groups == 0 {
            return Ok(());
        }
        let arguments = dwk_prefill_combine_args {
            states: x.boundaries,
            forgotten: x.forgotten,
            chains,
            chains_count: round.chains() as i32,
            value_heads: x.prepare.value_heads,
            key_dim: x.prepare.key_dim,
            value_dim: x.prepare.value_dim,
            slabs: self.shape.combine_slabs() as i32,
            summaries: 2 * x.summaries,
            dies: x.prepare.dies,
            pad0: 0,
        };
        let threads = self.shape.target.threads(self.combine.role());
        // SAFETY: the summaries are in the workspace, the chains in a buffer of the plan.
        unsafe { (self.context).launch(stream, self.combine, groups as u32, threads, &arguments) }
    }

    fn lower_lengths(
        &self,
        tensors: &BackwardTensors<'_>,
        address: *mut c_void,
    ) -> Result<Option<LoweredLengths>> {
        match self.rounds.first().map(|round| &round.lengths) {
            Some(PlanLengths::Device(lengths)) => {
                let cu_seqlens = CuSeqlens::required(&tensors.cu_seqlens)?;
                Ok(Some(lengths.lower(
                    &self.context,
                    cu_seqlens,
                    address,
                    false,
                )?))
            }
            _ => {
                CuSeqlens::refuse(&tensors.cu_seqlens)?;
                Ok(None)
            }
        }
    }

    /// Checks the tensors and returns the launch arguments of the whole batch, without those that differ from round to
    /// round.
    pub(super) fn lower(&self, x: &BackwardTensors<'_>) -> Checked<dwk_prefill_backward_args> {
        let Shape {
            spec,
            batch,
            sequences,
            ..
        } = self.shape;
        let dtype = spec.dtype;
        let Heads {
            key: key_heads,
            value: value_heads,
            key_dim,
            value_dim,
            map,
        } = spec.heads;
        let (scale, unit) = power_and_unit(spec.scale());
        let mut flags = 0;
        if spec.qk_l2norm {
            flags |= abi::DWK_QK_L2NORM;
        }
        if map == HeadMap::Tiled {
            flags |= abi::DWK_TILED_HEADS;
        }
        let gates = x.gating.lower(value_heads, |_| batch)?;
        flags |= gates.flags;
        let mut out = dwk_prefill_backward_args {
            prepare: dwk_prefill_prepare_args {
                q: x.q.0.address,
                k: x.k.0.address,
                q_strides: check::tokens("q", &x.q, batch, key_heads, key_dim, &[dtype])?,
                k_strides: check::tokens("k", &x.k, batch, key_heads, key_dim, &[dtype])?,
                key_heads: key_heads as i32,
                value_heads: value_heads as i32,
                key_dim: key_dim as i32,
                value_dim: value_dim as i32,
                g: gates.g,
                beta: gates.beta,
                a_log: gates.a_log,
                dt_bias: gates.dt_bias,
                g_strides: gates.g_strides,
                beta_strides: gates.beta_strides,
                a_log_stride: gates.a_log_stride,
                dt_bias_stride: gates.dt_bias_stride,
                g_type: gates.g_type,
                beta_type: gates.beta_type,
                a_log_type: gates.a_log_type,
                dt_bias_type: gates.dt_bias_type,
                head_groups: 1,
                group_heads: (value_heads / key_heads) as i32,
                dies: self.shape.dies as i32,
                ..Default::default()
            },
            v: x.v.0.address,
            v_strides: check::tokens("v", &x.v, batch, value_heads, value_dim, &[dtype])?,
            d_o: x.d_o.0.address,
            d_o_strides: check::tokens("d_o", &x.d_o, batch, value_heads, value_dim, &[dtype])?,
            scale,
            unit,
            per_unit: unit.recip(),
            ..Default::default()
        };
        let rows = |name, t: &Option<TokensMut<'_>>, heads, dim| match t {
            Some(t) => {
                let strides = check::output_tokens(name, &t.0, batch, heads, dim, &[dtype])?;
                Checked::Ok((t.0.0.address, strides))
            }
            None => Ok((ptr::null_mut(), Default::default())),
        };
        (out.d_q, out.d_q_strides) = rows("d_q", &x.d_q, key_heads, key_dim)?;
        (out.d_k, out.d_k_strides) = rows("d_k", &x.d_k, key_heads, key_dim)?;
        (out.d_v, out.d_v_strides) = rows("d_v", &x.d_v, value_heads, value_dim)?;
        let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        let scalars = |name, t: &Option<TokenScalarsMut<'_>>| match t {
            Some(t) => {
                let strides = check::output_scalars(name, &t.0, batch, value_heads, &any)?;
                Checked::Ok((t.0.0.address, strides, check::type_code(t.0.0.dtype)))
            }
            None => Ok((ptr::null_mut(), Default::default(), 0)),
        };
        (out.d_g, out.d_g_strides, out.d_g_type) = scalars("d_g", &x.d_g)?;
        (out.d_beta, out.d_beta_strides, out.d_beta_type) = scalars("d_beta", &x.d_beta)?;
        let raw = matches!(x.gating, Gating::Raw { .. });
        let per_head = |name, t: &Option<TensorMut<'_, 1>>| match t {
            Some(t) => {
                check::ensure(raw, || {
                    let allowed = "it must be absent: gates are given, not raw";
                    ArgumentError::new(name, ArgumentKind::Presence, "given", allowed)
                })?;
                check::dtype(name, t.0.dtype, &[Dtype::F32])?;
                let stride = check::per_head(name, &t.0, value_heads)?;
                check::no_overlap(name, &t.0.shape, &t.0.strides)?;
                Checked::Ok((t.0.address.cast(), stride))
            }
            None => Ok((ptr::null_mut(), 0)),
        };
        (out.d_a_log, out.d_a_log_stride) = per_head("d_a_log", &x.d_a_log)?;
        (out.d_dt_bias, out.d_dt_bias_stride) = per_head("d_dt_bias", &x.d_dt_bias)?;
        let shape = |layout| state_shape(&spec.heads, sequences, layout);
        let value_major = |layout| u32::from(layout == StateLayout::ValueMajor);
        if let Some(InitialState {
            state,
            has_initial_state,
        }) = &x.initial
        {
            let t = &state.tensor;
            out.initial_strides = check::state("initial_state", t, shape(state.layout), false)?;
            out.initial_state = t.address;
            out.initial_type = check::type_code(t.dtype);
            flags |= value_major(state.layout) * abi::DWK_INITIAL_VALUE_MAJOR;
            if let Some(has) = has_initial_state {
                out.has_initial_state = has.checked("has_initial_state", sequences)?;
            }
        }
        if let Some(state) = &x.d_final {
            let t = &state.tensor;
            out.d_final_strides = check::state("d_final_state", t, shape(state.layout), false)?;
            out.d_final = t.address;
            out.d_final_type = check::type_code(t.dtype);
            out.d_final_value_major = value_major(state.layout);
        }
        if let Some(state) = &x.d_initial {
            let t = &state.tensor.0;
            out.d_initial_strides = check::state("d_initial_state", t, shape(state.layout), true)?;
            out.d_initial = t.address;
            out.d_initial_type = check::type_code(t.dtype);
            out.d_initial_value_major = value_major(state.layout);
        }
        out.prepare.flags = flags;
        Ok(out)
    }
}

/// The plan of a round of a batch whose lengths the host knows.
fn host_round(
    context: &Context,
    shape: Shape,
    round: Round,
    cu_seqlens: &[i32],
) -> Result<RoundPlan> {
    let shape = shape.of_round(round.rows, round.count);
    let (begin, end) = (round.begin as i32, (round.begin + round.rows) as i32);
    let bounds = &cu_seqlens[round.first..=round.first + round.count];
    let bounds: Vec<i32> = (bounds.iter())
        .map(|&row| row.clamp(begin, end) - begin)
        .collect();
    let partition = shape.partition_backward(&bounds)?;
    RoundPlan::of_partition(context, shape, round, &partition, &bounds)
}

/// Words to upload: items, chains of both directions, `cu_seqlens`. Without cuts the kernels read `cu_seqlens` alone.
fn table(partition: &Partition, cu_seqlens: &[i32]) -> Vec<i32> {
    let both = partition.chains.iter().flat_map(|&[first, count]| {
        // Summary n of the reverse walk has the number 2 summaries - n: hip/prefill/backward/segment.h.
        let reverse = 2 * partition.summaries as i32 - first - count;
        [[first, count], [reverse, count]]
    });
    let both = Partition {
        chains: both.collect(),
        items: partition.items.clone(),
        ..Partition::default()
    };
    both.table(cu_seqlens)
}

/// Checks that every tensor with a known context belongs to `context`.
pub(super) fn check_devices(x: &BackwardTensors<'_>, context: &Context) -> Checked<()> {
    let d_final = x.d_final.as_ref().map(|s| &s.tensor.owner);
    let initial = x.initial.as_ref();
    let has = initial.and_then(|i| i.has_initial_state.as_ref());
    let tokens = |t: &'_ Option<TokensMut<'_>>| t.as_ref().map(|t| t.0.0.owner.clone());
    let scalars = |t: &'_ Option<TokenScalarsMut<'_>>| t.as_ref().map(|t| t.0.0.owner.clone());
    let owners = [
        ("q", Some(x.q.0.owner.clone())),
        ("k", Some(x.k.0.owner.clone())),
        ("v", Some(x.v.0.owner.clone())),
        (
            "initial_state",
            initial.map(|i| i.state.tensor.owner.clone()),
        ),
        ("has_initial_state", has.map(|has| has.owner().clone())),
        ("d_o", Some(x.d_o.0.owner.clone())),
        ("d_final_state", d_final.cloned()),
        ("d_q", tokens(&x.d_q)),
        ("d_k", tokens(&x.d_k)),
        ("d_v", tokens(&x.d_v)),
        ("d_g", scalars(&x.d_g)),
        ("d_beta", scalars(&x.d_beta)),
        ("d_a_log", x.d_a_log.as_ref().map(|t| t.0.owner.clone())),
        ("d_dt_bias", x.d_dt_bias.as_ref().map(|t| t.0.owner.clone())),
        (
            "d_initial_state",
            x.d_initial.as_ref().map(|s| s.tensor.0.owner.clone()),
        ),
    ];
    for (name, owner) in owners {
        owner.map_or(Ok(()), |owner| check::device(name, &owner, context))?;
    }
    x.gating.check_devices(context)
}

/// The factor of the output as a power of two with its sign, and the rest, in [1, 2). 0 and subnormal numbers are not
/// divided.
fn power_and_unit(scale: f32) -> (f32, f32) {
    if !scale.is_normal() {
        return (scale, 1.0);
    }
    let mantissa = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    let power = f32::from_bits(scale.to_bits() & !mantissa);
    (power, scale / power)
}

/// Checks that no gradient shares memory with another argument.
///
/// `scratch`: memory that the launch writes besides. `context`: memory that it reads besides.
pub(super) fn check_overlaps(
    x: &BackwardTensors<'_>,
    scratch: [Span<'_>; 2],
    context: Span<'_>,
) -> Checked<()> {
    let [workspace, summary] = scratch;
    let outputs = [
        Span::maybe("d_q", x.d_q.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_k", x.d_k.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_v", x.d_v.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_g", x.d_g.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_beta", x.d_beta.as_ref().map(|t| &t.0.0)),
        Span::maybe("d_a_log", x.d_a_log.as_ref().map(|t| &t.0)),
        Span::maybe("d_dt_bias", x.d_dt_bias.as_ref().map(|t| &t.0)),
        Span::maybe("d_initial_state", x.d_initial.as_ref().map(|s| &s.tensor.0)),
        workspace,
        summary,
    ];
    let [g, beta, a_log, dt_bias] = x.gating.spans();
    let initial = x.initial.as_ref();
    let has = initial.and_then(|i| i.has_initial_state.as_ref());
    let inputs = [
        Span::of("q", &x.q.0),
        Span::of("k", &x.k.0),
        Span::of("v", &x.v.0),
        g,
        beta,
        a_log,
        dt_bias,
        Span::maybe("initial_state", initial.map(|i| &i.state.tensor)),
        Span::numbers("has_initial_state", has),
        Span::of("d_o", &x.d_o.0),
        Span::maybe("d_final_state", x.d_final.as_ref().map(|s| &s.tensor)),
        Span::lengths(x.cu_seqlens.as_ref()),
        context,
    ];
    alias::check(&outputs, &inputs, &[])
}

#[cfg(test)]
mod tests {
    use super::power_and_unit;

    #[test]
    fn scale_is_a_power_of_two_times_its_unit() {
        assert_eq!(power_and_unit(0.0625), (0.0625, 1.0));
        assert_eq!(power_and_unit(-3.0), (-2.0, 1.5));
        assert_eq!(power_and_unit(0.0), (0.0, 1.0));
        let subnormal = f32::from_bits(3);
        assert_eq!(power_and_unit(subnormal), (subnormal, 1.0));
        for scale in [128f32.powf(-0.5), 0.3, f32::MAX, f32::MIN_POSITIVE * 1.7] {
            let (power, unit) = power_and_unit(scale);
            assert_eq!(power * unit, scale);
            assert!((1.0..2.0).contains(&unit), "{scale}");
        }
    }
}
