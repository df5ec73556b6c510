//! Chunked Gated DeltaNet prefill.
//!
//! Per value head, with a state `S` of shape `[K, V]`, token after token:
//!
//! ```text
//! S   <- exp(g_t) S
//! d_t  = beta_t (v_t - S^T k_t)
//! S   <- S + k_t d_t^T
//! o_t  = scale S^T q_t
//! ```
//!
//! Two kernels, `prefill_prepare` and `prefill_scan`, compute this in chunks of 64 tokens, or one, `prefill_fused`
//! ([`PrefillPath`]). If sequences are cut into segments, kernels that find the states between segments run before the
//! last. A [`Prefill`] is made once per batch shape.
//! The lengths are known on the host ([`Prefill::packed`], [`Prefill::dense`]) or only on the device
//! ([`Prefill::device`]). A launch allocates nothing, waits for nothing and reads nothing back, so a graph can capture
//! it.

mod backward;
mod by_gates;
mod lengths;
mod lower;
mod parallel;
mod parallel_backward;
#[cfg(all(test, feature = "simulator"))]
mod pieces;
mod plan;
mod ranks;
mod rounds;
mod shape;
mod snapshots;
mod states;
mod workgroups;

pub use backward::{BackwardTensors, PrefillBackward};
use by_gates::{ByGates, Lists};
pub(crate) use lengths::{
    DeviceLengths, DeviceSegments, DeviceTables, LaunchArguments as LoweredLengths,
};
pub(crate) use lower::LaunchArguments;
use lower::{Kernels, LoweredSave, Tables};
pub use parallel::ParallelPrefill;
pub use parallel_backward::ParallelPrefillBackward;
use plan::Counts;
pub use ranks::{AGREEMENT_BYTES, Fragment, RankLayout, Tail};
use rounds::Boundaries;
pub use rounds::Save;
use shape::Shape;
pub use snapshots::{Snapshot, Snapshots};
use states::PlanSlots;

use std::ffi::c_void;
use std::ptr;

use crate::abi::{self, dwk_prefill_by_gates};
use crate::alias::Span;
use crate::batch::{CuSeqlens, checked_cu_seqlens};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::gates::Gating;
use crate::kernels;
use crate::model::Heads;
use crate::runtime::{Context, Stream};
use crate::state::{HostSlots, States};
use crate::tensor::{Batch, Buffer, Tokens, TokensMut};
use crate::types::Dtype;
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_workspace};

/// Tokens of a chunk.
pub const CHUNK: usize = abi::DWK_CHUNK as usize;

/// Parameters of a prefill that do not depend on the batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillSpec {
    /// Element type of q, k, v and o: [`Dtype::Bf16`] or [`Dtype::F16`].
    pub dtype: Dtype,
    /// Heads; `K` and `V` are multiples of 16 up to [`MAX_HEAD_DIM`](crate::model::MAX_HEAD_DIM).
    pub heads: Heads,
    /// Whether rows of q and k are l2-normalised inside: `x / sqrt(sum(x^2) + 1e-6)`, in f32 and never rounded.
    pub qk_l2norm: bool,
    /// Factor of the output; absent is `K^-0.5`.
    pub scale: Option<f32>,
    /// Number of segments of each sequence, at most its number of chunks. A sequence's results then do not depend on the
    /// other sequences of its batch. 1: no sequence is cut. Absent: the planner estimates the fastest numbers from the
    /// lengths of the batch, and cuts only if that saves some percent. [`SEGMENTS_VARIABLE`] overrides it.
    pub segments: Option<usize>,
    /// Compute units that launches can use, if not all of the device's.
    pub compute_units: Option<u32>,
    /// Kernels that compute the prefill. [`PATH_VARIABLE`] overrides it.
    pub path: PrefillPath,
    /// Context that [`Prefill::launch_saving`] saves for the backward.
    pub save: Save,
}

/// Kernels that compute a prefill. Results differ by rounding only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PrefillPath {
    /// The plan chooses the fastest by its model of the device. On gfx942 it may leave a choice to the gates of each
    /// launch that does not overwrite v: between [`Fused`] and [`Split`] ([`Prefill::path`]), or between segments and whole
    /// sequences of [`Fused`]. Only a number of segments ([`PrefillSpec::segments`]) fixes them.
    ///
    /// [`Fused`]: PrefillPath::Fused
    /// [`Split`]: PrefillPath::Split
    #[default]
    Auto,
    /// `prefill_fused`: one kernel without records, for `K` up to 128. If sequences are cut, `prefill_fused_summarise`
    /// and, if need be, `prefill_combine` run before it.
    Fused,
    /// `prefill_prepare` and `prefill_scan`, with `prefill_summarise` and `prefill_combine` between them if sequences
    /// are cut.
    Split,
    /// `prefill_short` for sequences of at most 16 tokens, for `K` up to 128; the plan chooses for the others. `Auto` takes it
    /// where it has the bits of the other kernels: not on NVIDIA GPUs.
    Short,
}

impl PrefillPath {
    /// Every path.
    pub const ALL: [PrefillPath; 4] = [
        PrefillPath::Auto,
        PrefillPath::Fused,
        PrefillPath::Split,
        PrefillPath::Short,
    ];

    /// Its name in [`PATH_VARIABLE`].
    pub fn name(self) -> &'static str {
        match self {
            PrefillPath::Auto => "auto",
            PrefillPath::Fused => "fused",
            PrefillPath::Split => "split",
            PrefillPath::Short => "short",
        }
    }
}

/// Environment variable that overrides [`PrefillSpec::segments`]. `1` switches segments off.
pub const SEGMENTS_VARIABLE: &str = "DELTAWAVE_SEGMENTS";

/// Environment variable that overrides [`PrefillSpec::path`]: `auto`, `fused`, `split` or `short`.
pub const PATH_VARIABLE: &str = "DELTAWAVE_PREFILL";

impl PrefillSpec {
    /// Spec with bf16, grouped heads, no norm of q and k, the default scale.
    pub fn new(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> Self {
        PrefillSpec {
            dtype: Dtype::Bf16,
            heads: Heads::new(key_heads, value_heads, key_dim, value_dim),
            qk_l2norm: false,
            scale: None,
            segments: None,
            compute_units: None,
            path: PrefillPath::Auto,
            save: Save::Nothing,
        }
    }

    pub(crate) fn validate(&self) -> Checked<()> {
        check::dtype("dtype", self.dtype, &[Dtype::Bf16, Dtype::F16])?;
        self.heads.check_recurrence()?;
        let positive = |name: &str, n: Option<usize>| {
            check::ensure(n != Some(0), || {
                ArgumentError::new(name, ArgumentKind::Value, 0, "it must be at least 1")
            })
        };
        positive("segments", self.segments)?;
        positive("compute_units", self.compute_units.map(|n| n as usize))?;
        self.save.validate()?;
        check::scale(self.scale)
    }

    pub(crate) fn scale(&self) -> f32 {
        self.scale.unwrap_or_else(|| self.heads.default_scale())
    }

    fn kernels(&self) -> Kernels {
        Kernels {
            prepare: kernels::prefill_prepare(self.dtype),
            summarise: kernels::prefill_summarise(self.dtype, self.heads.key_dim),
            combine: kernels::prefill_combine(self.heads.key_dim),
            scan: kernels::prefill_scan(self.dtype, self.heads.key_dim),
            fused: kernels::prefill_fused(self.dtype, self.heads.key_dim),
            fused_summarise: kernels::prefill_fused_summarise(self.dtype, self.heads.key_dim),
            short: kernels::prefill_short(self.dtype, self.heads.key_dim),
        }
    }
}

/// The tensors of one prefill. Packed batches have `[T, H, D]`, dense ones `[B, T, H, D]`.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct PrefillTensors<'a> {
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
    /// Initial and final states.
    pub states: States<'a>,
    /// `[T, HV, V]`. Rows past the last sequence become zeros. It may be v: where sequences are cut, bits may then be others.
    pub o: TokensMut<'a>,
    /// States after some chunks of sequences, stored in addition to the final states.
    pub snapshots: Option<Snapshots<'a>>,
}

/// Kernels of a prefill to launch: all, or one of them for measurements. A single kernel reads from the workspace the
/// results of the kernels before it, which must have run. A kernel that the plan does not need is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All kernels.
    Whole,
    /// `prefill_lengths`, for plans of [`Prefill::device`].
    Lengths,
    /// `prefill_prepare`.
    Prepare,
    /// `prefill_summarise`.
    Summarise,
    /// `prefill_combine`. Each launch needs a [`Part::Summarise`] or [`Part::FusedSummarise`] before it. Plans of few summaries
    /// have none where `prefill_scan` chains them, on CDNA.
    Combine,
    /// `prefill_scan`.
    Scan,
    /// `prefill_fused_summarise`.
    FusedSummarise,
    /// `prefill_fused`.
    Fused,
    /// `prefill_short`.
    Short,
}

impl Part {
    /// Stem of the kernel's source file, or `prefill` for all kernels.
    pub fn name(self) -> &'static str {
        match self {
            Part::Whole => "prefill",
            Part::Lengths => "prefill_lengths",
            Part::Prepare => "prefill_prepare",
            Part::Summarise => "prefill_summarise",
            Part::Combine => "prefill_combine",
            Part::Scan => "prefill_scan",
            Part::FusedSummarise => "prefill_fused_summarise",
            Part::Fused => "prefill_fused",
            Part::Short => "prefill_short",
        }
    }
}

/// Plan of a prefill for batches of one shape: validated and uploaded once, launched any number of times.
#[derive(Debug)]
pub struct Prefill {
    context: Context,
    shape: Shape,
    kernels: Kernels,
    lengths: Lengths,
    slots: PlanSlots,
}

/// Lengths of the sequences, known on the host or only on the device.
#[derive(Debug)]
enum Lengths {
    Host {
        cu_seqlens: Vec<i32>,
        counts: Counts,
        /// Items, chains, `cu_seqlens`, short sequences, and items of `by_gates`.
        tables: Buffer<i32>,
        /// Segments of the fused path, if gates choose between them and the plan.
        by_gates: Option<ByGates>,
        /// States that launches may save.
        boundaries: Option<Boundaries>,
    },
    Device(DeviceLengths),
}

impl Prefill {
    /// A packed batch of `tokens` rows; sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`. Rows past the last
    /// sequence belong to no sequence.
    ///
    /// # Errors
    /// A spec, lengths or [`SEGMENTS_VARIABLE`] that are not allowed; no memory for the lengths.
    pub fn packed<L: Copy + Into<i64>>(
        context: &Context,
        spec: PrefillSpec,
        cu_seqlens: &[L],
        tokens: usize,
    ) -> Result<Self> {
        let sequences = cu_seqlens.len().saturating_sub(1);
        let shape = Shape::new(spec, Batch::Packed { tokens }, sequences, context)?;
        let checked = checked_cu_seqlens(cu_seqlens, tokens)?;
        Self::of_host(context, shape, checked)
    }

    /// A dense batch: `batch` sequences of `tokens` rows each, tensors `[B, T, ...]`.
    ///
    /// # Errors
    /// A spec or [`SEGMENTS_VARIABLE`] that is not allowed; no memory for the lengths.
    pub fn dense(
        context: &Context,
        spec: PrefillSpec,
        batch: usize,
        tokens: usize,
    ) -> Result<Self> {
        let shape = Shape::new(spec, Batch::Dense { batch, tokens }, batch, context)?;
        let cu_seqlens: Vec<i32> = (0..=batch).map(|n| (n * tokens) as i32).collect();
        Self::of_host(context, shape, cu_seqlens)
    }

    /// Packed batches of exactly `sequences` sequences, some of which may be empty, in `tokens` rows. Launches read
    /// [`PrefillTensors::cu_seqlens`] on the device.
    ///
    /// One more kernel checks the lengths there. Entries that decrease or exceed the tokens are replaced by the nearest
    /// allowed number, so nothing is accessed out of bounds. The first 4 bytes of the workspace are the status after a
    /// launch: 0, or 1 + the index of the first entry that was replaced. The kernel also cuts sequences into segments, as a
    /// plan with the lengths on the host, as many rows and as many sequences would. Results have the same bits.
    ///
    /// The workspace has room for the segments of any lengths, and kernels that find no segments there return at once. No
    /// room and no such launches are needed if one sequence of all rows would not be cut, and gates have no choice.
    ///
    /// # Errors
    /// A spec or sizes that are not allowed; context to save, since only lengths on the host say where rounds begin.
    pub fn device(
        context: &Context,
        spec: PrefillSpec,
        tokens: usize,
        sequences: usize,
    ) -> Result<Self> {
        let shape = Shape::new(spec, Batch::Packed { tokens }, sequences, context)?;
        (spec.save)
            .refuse("it must be nothing: only lengths on the host say where rounds begin")?;
        let shape = shape.of_device()?;
        let lengths = DeviceLengths {
            sequences,
            tokens,
            decodes: 0,
            segments: shape.device_segments()?,
        };
        Ok(Self::with(context, shape, Lengths::Device(lengths)))
    }

    fn of_host(context: &Context, shape: Shape, cu_seqlens: Vec<i32>) -> Result<Self> {
        let mut shape = shape.of_lengths(&cu_seqlens);
        let partition = shape.partition(&cu_seqlens)?;
        let mut tables = partition.table(&cu_seqlens);
        let by_gates = shape
            .partition_by_gates(&cu_seqlens)
            .map(|(fused, in_place)| {
                let choice = [shape.is_fused(), in_place];
                ByGates::append(&fused, choice, &cu_seqlens, &mut tables)
            });
        shape.waiting = by_gates.map_or(0, |by_gates| by_gates.cut);
        let lengths = Lengths::Host {
            counts: partition.counts(),
            by_gates,
            tables: context.upload(&tables)?,
            boundaries: Boundaries::of(context, &shape, &cu_seqlens)?,
            cu_seqlens,
        };
        Ok(Self::with(context, shape, lengths))
    }

    fn with(context: &Context, shape: Shape, lengths: Lengths) -> Self {
        Prefill {
            context: context.clone(),
            kernels: shape.spec.kernels(),
            shape,
            lengths,
            slots: PlanSlots::default(),
        }
    }

    /// The lengths, or an error that names `argument` if only the device knows them.
    fn host_cu_seqlens(&self, argument: &str) -> Checked<&[i32]> {
        match &self.lengths {
            Lengths::Host { cu_seqlens, .. } => Ok(cu_seqlens),
            Lengths::Device(_) => {
                let was = "given to a plan whose lengths are on the device";
                let allowed = "pass them to each launch of such a plan";
                Err(ArgumentError::new(
                    argument,
                    ArgumentKind::Presence,
                    was,
                    allowed,
                ))
            }
        }
    }

    /// Sets the slots of the pool for all following launches, checked and uploaded once, in place of
    /// [`StatePool::slots`](crate::state::StatePool::slots) and
    /// [`StatePool::write_slots`](crate::state::StatePool::write_slots). Launches refuse slots beyond their pool. Do
    /// not change a plan that a captured graph uses.
    ///
    /// # Errors
    /// A plan of [`Prefill::device`]; a number of slots other than the number of sequences; a slot, unless negative,
    /// that two sequences write, or that one reads and another writes; no memory for the slots.
    pub fn set_slots(&mut self, slots: &[i32], write_slots: Option<&[i32]>) -> Result<()> {
        self.host_cu_seqlens("slots")?;
        let sequences = self.shape.sequences;
        self.slots.pool = Some(HostSlots::new(
            &self.context,
            sequences,
            slots,
            write_slots,
        )?);
        let both = slots.iter().chain(write_slots.unwrap_or_default());
        self.slots.sequence_slots = both.copied().collect();
        Ok(())
    }

    /// Sets the snapshots that all following launches write, checked and uploaded once, in place of
    /// [`Snapshots::slots`]. Do not change a plan that a captured graph uses.
    ///
    /// # Errors
    /// A plan of [`Prefill::device`]; a sequence out of range; tokens that are not a multiple of [`CHUNK`] within the
    /// sequence; a slot, or a state, that is named twice; no memory.
    pub fn set_snapshots(&mut self, snapshots: &[Snapshot]) -> Result<()> {
        let cu_seqlens = self.host_cu_seqlens("snapshots")?;
        let table = snapshots::table(cu_seqlens, self.chunk_entries(), snapshots)?;
        self.slots.snapshots = Some(self.context.upload(&table)?);
        self.slots.snapshot_slots = table.into_iter().filter(|&slot| slot >= 0).collect();
        Ok(())
    }

    /// Snapshots after every `tokens` tokens, a multiple of [`CHUNK`], sequence by sequence, in the slots 0, 1, 2, ...
    ///
    /// # Errors
    /// A plan of [`Prefill::device`]; tokens that are not a positive multiple of [`CHUNK`].
    pub fn snapshots_every(&self, tokens: usize) -> Result<Vec<Snapshot>> {
        let cu_seqlens = self.host_cu_seqlens("snapshots")?;
        Ok(snapshots::every(cu_seqlens, tokens)?)
    }

    /// Number of entries of [`Snapshots::slots`].
    pub fn chunk_entries(&self) -> usize {
        self.shape.chunk_entries()
    }

    fn counts(&self) -> Counts {
        match &self.lengths {
            Lengths::Host { counts, .. } => *counts,
            Lengths::Device(lengths) => match &lengths.segments {
                Some(segments) => self.shape.with_short(segments.most),
                None => self.shape.with_short(self.shape.whole()),
            },
        }
    }

    /// How the device divides sequences into segments, for plans of [`Prefill::device`] that let it.
    pub(crate) fn device_segments(&self) -> Option<DeviceSegments> {
        match &self.lengths {
            Lengths::Host { .. } => None,
            Lengths::Device(lengths) => lengths.segments,
        }
    }

    /// Bytes of workspace that a launch needs.
    pub fn workspace_bytes(&self) -> usize {
        self.lengths_bytes() + self.record_bytes()
    }

    /// Bytes of workspace for checked lengths.
    fn lengths_bytes(&self) -> usize {
        match &self.lengths {
            Lengths::Host { .. } => 0,
            Lengths::Device(lengths) => lengths.bytes(),
        }
    }

    /// Bytes of workspace for records and summaries.
    pub(crate) fn record_bytes(&self) -> usize {
        let bytes = self.shape.workspace(self.counts()).bytes;
        match self.by_gates() {
            Some(by_gates) => {
                bytes.next_multiple_of(WORKSPACE_ALIGN) + by_gates.bytes(self.counts())
            }
            None => bytes,
        }
    }

    fn by_gates(&self) -> Option<&ByGates> {
        match &self.lengths {
            Lengths::Host { by_gates, .. } => by_gates.as_ref(),
            Lengths::Device(_) => None,
        }
    }

    /// Whether each launch may leave a choice to its gates ([`PrefillPath::Auto`]): of the path, or of the segments.
    pub fn gates_choose(&self) -> bool {
        let on_device = self.device_segments().and_then(|segments| segments.uneven);
        self.by_gates().is_some() || on_device.is_some()
    }

    /// Whether gates choose the path, not just the segments of the fused one.
    fn leaves_path_to_gates(&self) -> bool {
        self.by_gates().is_some_and(|by_gates| !by_gates.or_whole)
    }

    /// Total number of segments. A sequence that is not cut counts as one. A plan of [`Prefill::device`]: at most. Gates
    /// that forget may let a launch cut otherwise ([`PrefillPath::Auto`]).
    pub fn segments(&self) -> usize {
        let counts = self.counts();
        match &self.lengths {
            Lengths::Host { .. } => counts.items + counts.short,
            Lengths::Device(_) => counts.items,
        }
    }

    /// Kernels that compute the prefill, as the spec, [`PATH_VARIABLE`] or the planner chose. A batch without sequences has
    /// the split path. [`PrefillPath::Auto`]: each launch chooses. A plan of [`Prefill::device`] chooses by the lengths, and
    /// another plan by the gates. Kernels of both paths are then launched, and some find no work. A launch that overwrites v
    /// takes the split path, if its plan chooses by the gates. With [`PrefillPath::Fused`] gates may still choose the segments.
    /// If final states overwrite initial ones, they wait until all segments have read these, and `prefill_scan` stores them.
    pub fn path(&self) -> PrefillPath {
        match self.device_segments() {
            _ if self.leaves_path_to_gates() => PrefillPath::Auto,
            Some(segments) if segments.choice.is_some() => PrefillPath::Auto,
            _ => self.shape.path,
        }
    }

    /// [`Part::Whole`], then each kernel of the plan.
    pub fn parts(&self) -> Vec<Part> {
        let counts = self.counts();
        let device = matches!(self.lengths, Lengths::Device(_));
        let both = self.path() == PrefillPath::Auto;
        let fused = (both || self.shape.is_fused()) && !counts.only_short();
        let split = !self.shape.is_fused() && !counts.only_short();
        let first = both && fused;
        let in_place = !split && self.by_gates().is_some_and(|by_gates| by_gates.in_place);
        [
            (Part::Whole, true),
            (Part::Lengths, device),
            (Part::Short, counts.short > 0),
            (Part::Fused, first),
            // Where lengths or gates choose, `prefill_fused` does its work. A launch that leaves no choice to the gates
            // runs it: one that overwrites v, for example.
            (
                Part::Prepare,
                split && (!first || self.leaves_path_to_gates()),
            ),
            (Part::Summarise, split && counts.summaries > 0),
            (
                Part::FusedSummarise,
                fused && counts.summaries > 0 && !first,
            ),
            (
                Part::Combine,
                counts.chains > 0 && !self.shape.scan_chains(counts),
            ),
            (Part::Scan, split),
            (Part::Fused, fused && !first),
            // It has no workgroups unless final states wait.
            (Part::Scan, in_place),
        ]
        .into_iter()
        .filter_map(|(part, launched)| launched.then_some(part))
        .collect()
    }

    /// Names of the kernels that a launch runs, in order: two, or up to four if sequences are cut. One more if lengths are on
    /// the device, where sequences of any lengths that may be cut count as cut. If gates choose between segments and whole
    /// sequences, the last one, `prefill_scan`, runs only in launches whose final states overwrite initial ones.
    pub fn kernels(&self) -> Vec<&'static str> {
        let parts = self.parts().into_iter();
        parts
            .filter_map(|part| self.kernels.name_of(part))
            .collect()
    }

    /// Names of the kernels after `prefill_lengths`.
    pub(crate) fn kernels_after_lengths(&self) -> impl Iterator<Item = &'static str> {
        let parts = self.parts().into_iter();
        let parts = parts.filter(|part| *part != Part::Lengths);
        parts.filter_map(|part| self.kernels.name_of(part))
    }

    /// Addresses of the tables for kernels. `made`: those of a plan of [`Prefill::device`].
    fn tables(&self, made: Option<DeviceTables>) -> Tables {
        match &self.lengths {
            Lengths::Host {
                counts,
                tables,
                by_gates,
                ..
            } => {
                let items: *const i32 = tables.address().cast_const().cast();
                let chains = items.wrapping_add(counts.items * plan::ITEM_WORDS);
                let cu_seqlens = chains.wrapping_add(counts.chains as usize * plan::CHAIN_WORDS);
                // Equal sequences are in their own order: kernels then need not load what their work is. A choice by the
                // gates copies the list.
                let whole = counts.even && counts.items == self.shape.sequences;
                let in_order = whole && by_gates.is_none_or(|by_gates| by_gates.or_whole);
                Tables {
                    cu_seqlens,
                    items: if in_order { ptr::null() } else { items.cast() },
                    chains,
                    short: cu_seqlens.wrapping_add(self.shape.sequences + 1),
                    counts: *counts,
                }
            }
            Lengths::Device(_) => Tables {
                cu_seqlens: made.map_or(ptr::null(), |tables| tables.cu_seqlens),
                items: made.map_or(ptr::null(), |tables| tables.items),
                chains: made.map_or(ptr::null(), |tables| tables.chains),
                short: ptr::null(),
                counts: self.counts(),
            },
        }
    }

    /// Enqueues the prefill: the kernels that [`Prefill::kernels`] names, nothing else. No other launch of this crate
    /// on the stream, from any thread, comes between them.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, a workspace that is too small: then
    /// nothing was enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        self.launch_part(stream, tensors, workspace, Part::Whole)
    }

    /// [`Prefill::launch`] of a part.
    ///
    /// # Errors
    /// As [`Prefill::launch`].
    pub fn launch_part(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
        part: Part,
    ) -> Result<()> {
        self.launch_with(stream, tensors, workspace, part, None)
    }

    fn launch_with(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        workspace: Workspace<'_>,
        part: Part,
        save: Option<LoweredSave>,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let scratch = workspace.span();
        let (address, records) = workspace.split(self.lengths_bytes());
        let lengths = self.lower_lengths(tensors, address)?;
        let tables = lengths.as_ref().map(LoweredLengths::tables);
        let mut lowered = self.lower(tensors, tables, records.address())?;
        let saved = save.as_ref().map_or(Span::NONE, |save| save.span);
        lower::check_overlaps(tensors, scratch, saved, [Span::NONE; 2])?;
        if let Some(save) = save {
            lowered.save(&save);
        }
        self.context.make_current()?;
        let _turn = stream.turn();
        if let Some(lengths) = lengths
            && matches!(part, Part::Whole | Part::Lengths)
        {
            lengths.enqueue(&self.context, stream)?;
        }
        self.enqueue(stream, &lowered, part)
    }

    /// Launch arguments of the kernel that checks lengths on the device, for plans that need it.
    fn lower_lengths(
        &self,
        tensors: &PrefillTensors<'_>,
        address: *mut c_void,
    ) -> Result<Option<LoweredLengths>> {
        match &self.lengths {
            Lengths::Host { .. } => {
                CuSeqlens::refuse(&tensors.cu_seqlens)?;
                Ok(None)
            }
            Lengths::Device(lengths) => {
                let cu_seqlens = CuSeqlens::required(&tensors.cu_seqlens)?;
                let waits = !Shape::keeps_initial_states(&tensors.states);
                Ok(Some(lengths.lower(
                    &self.context,
                    cu_seqlens,
                    address,
                    waits,
                )?))
            }
        }
    }

    /// All checks of a launch except those of the stream, lengths on the device, the workspace and overlaps. Returns
    /// the launch arguments.
    pub(crate) fn lower(
        &self,
        tensors: &PrefillTensors<'_>,
        tables: Option<DeviceTables>,
        records: *mut c_void,
    ) -> Result<LaunchArguments> {
        Shape::check_devices(tensors, &self.context)?;
        let own = self.tables(tables);
        if let Some(by_gates) = self.by_gates()
            && !Shape::overwrites_v(tensors)
            && (by_gates.in_place || Shape::keeps_initial_states(&tensors.states))
        {
            return Ok(self.lower_by_gates(by_gates, tensors, own, records)?);
        }
        let Some(choosing) = tables.filter(|tables| !tables.split_items.is_null()) else {
            return Ok((self.shape).lower(tensors, own, &self.slots, records)?);
        };
        let split = Tables {
            items: choosing.split_items,
            ..own
        };
        let uneven = (self.device_segments()).and_then(|segments| segments.uneven);
        let counts = match uneven {
            Some(uneven) => self.shape.of_uneven(&uneven),
            None => self.shape.whole(),
        };
        let whole = Tables {
            counts: self.shape.with_short(counts),
            ..own
        };
        let mut lowered = (self.shape).lower(tensors, split, &self.slots, records)?;
        let fused = (self.shape.fused_whole()).lower(tensors, whole, &self.slots, records)?;
        let device = (self.shape.compute_units as u32, self.shape.dies);
        lowered.choose(fused, choosing.split_items, device);
        if uneven.is_some() {
            lowered.by_gates(dwk_prefill_by_gates {
                items: choosing.split_items,
                chains: choosing.chains,
                split_items: choosing.split_items,
                split_chains: choosing.chains,
                samples: choosing.samples,
                items_count: own.counts.items as i32,
                chains_count: own.counts.chains as i32,
                // The lists may have segments all the same.
                soon: match Shape::overwrites_v(tensors) {
                    true => 0,
                    false => self.shape.soon(),
                },
                pad0: 0,
            });
            self.let_states_wait(tensors, &mut lowered);
        }
        Ok(lowered)
    }

    /// Lets final states that overwrite initial ones wait until `prefill_fused` has ended, where gates choose.
    fn let_states_wait(&self, tensors: &PrefillTensors<'_>, lowered: &mut LaunchArguments) {
        if !Shape::keeps_initial_states(&tensors.states) {
            lowered.let_states_wait(self.shape.waiting);
        }
    }

    /// [`Prefill::lower`] of a plan that leaves the choice of the path, or of the segments, to the gates.
    fn lower_by_gates(
        &self,
        by_gates: &ByGates,
        tensors: &PrefillTensors<'_>,
        own: Tables,
        records: *mut c_void,
    ) -> Checked<LaunchArguments> {
        let Lengths::Host { tables, .. } = &self.lengths else {
            unreachable!("lengths on the device have no segments of their own");
        };
        let tables = tables.address().cast_const().cast();
        let bytes = self.shape.workspace(own.counts).bytes;
        let lists = Lists {
            items: own.items,
            chains: own.chains,
            counts: own.counts,
            workspace: records.wrapping_byte_add(bytes.next_multiple_of(WORKSPACE_ALIGN)),
        };
        let waits = !Shape::keeps_initial_states(&tensors.states);
        let args = by_gates.lower(tables, &lists, self.shape.soon(), waits);
        let cut = Tables {
            items: by_gates.items(tables),
            counts: by_gates.counts,
            ..own
        };
        let split = Tables {
            items: args.split_items,
            chains: args.split_chains,
            counts: match by_gates.or_whole {
                // Items without chunks, of final states that wait.
                true => Counts {
                    items: by_gates.cut,
                    ..self.shape.whole()
                },
                false => own.counts,
            },
            ..own
        };
        let fused = (self.shape.fused_whole()).lower(tensors, cut, &self.slots, records)?;
        let mut lowered =
            (self.shape.on_split_path()).lower(tensors, split, &self.slots, records)?;
        match by_gates.or_whole {
            true => lowered.put_before_scan(fused, waits),
            false => {
                let device = (self.shape.compute_units as u32, self.shape.dies);
                lowered.choose(fused, ptr::null(), device);
            }
        }
        lowered.by_gates(args);
        self.let_states_wait(tensors, &mut lowered);
        Ok(lowered)
    }

    /// Enqueues checked launch arguments on the current device.
    pub(crate) fn enqueue(
        &self,
        stream: &Stream,
        lowered: &LaunchArguments,
        part: Part,
    ) -> Result<()> {
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe {
            self.shape
                .enqueue(&self.context, stream, self.kernels, lowered, part)
        }
    }
}
