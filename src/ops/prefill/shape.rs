//! Grids and workspace of a batch: division of chunks, heads and columns among workgroups. Pure: uses no device.
//!
//! Kernels that walk chunks divide value columns into slabs, one per workgroup. If not all workgroups fit on the device
//! at once, slabs of twice the columns may be faster: they share the copies of K, Q, T and P.

use super::lengths::{DeviceSegments, Rule};
use super::plan::{self, Balance, Choice, Counts, Cut, Machine, Partition, WalkTime};
use super::{CHUNK, PATH_VARIABLE, PrefillPath, PrefillSpec, PrefillTensors};
use crate::abi;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::kernels::{
    self, COMBINE_COLUMNS, FUSED_BUCKETS, KernelCost, SHORT_BUCKETS, Target, Walk, bucket_index,
};
use crate::model::Heads;
use crate::runtime::Context;
use crate::state::States;
use crate::tensor::Batch;

const RECORD_BYTES: usize = abi::DWK_RECORD_BYTES as usize;
/// Value columns of the pairs that the backward's kernels hand on.
pub(super) const BACKWARD_COLUMNS: usize = 32;

/// Properties of a batch that decide its launches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) spec: PrefillSpec,
    pub(super) batch: Batch,
    pub(super) sequences: usize,
    pub(super) target: &'static Target,
    pub(super) dies: u32,
    pub(super) compute_units: usize,
    /// [`PrefillPath::Fused`] or [`PrefillPath::Split`], for sequences that `prefill_short` does not compute.
    pub(super) path: PrefillPath,
    /// Whether [`PrefillPath::Auto`] may take the fused path in place of the split path, if the lengths suggest it.
    may_be_fused: bool,
    /// Whether the planner cuts sequences, not the caller.
    planned_segments: bool,
    /// Whether `prefill_short` computes short sequences.
    short: bool,
    /// Segments by which columns are divided among workgroups, if only the device knows the lengths: a guess.
    guess: Option<Counts>,
}

/// Path that the environment or the spec asks for, in this order.
fn wanted_path(spec: &PrefillSpec) -> Checked<PrefillPath> {
    let (argument, path) = match plan::path_of_environment()? {
        Some(path) => (PATH_VARIABLE, path),
        None => ("path", spec.path),
    };
    check::ensure(path != PrefillPath::Fused || is_compiled(spec), || {
        let was = format!("fused with K = {}", spec.heads.key_dim);
        let allowed = "the fused kernel needs K of at most 128";
        ArgumentError::new(argument, ArgumentKind::Value, was, allowed)
    })?;
    check::ensure(path != PrefillPath::Short || has_short(spec), || {
        let was = format!("short with K = {}", spec.heads.key_dim);
        let allowed = "the kernel for short sequences needs K of at most 128";
        ArgumentError::new(argument, ArgumentKind::Value, was, allowed)
    })?;
    Ok(path)
}

/// Whether the fused kernels are compiled for this K.
fn is_compiled(spec: &PrefillSpec) -> bool {
    bucket_index(spec.heads.key_dim) < FUSED_BUCKETS
}

/// Whether the kernel for short sequences is compiled for this K.
fn has_short(spec: &PrefillSpec) -> bool {
    bucket_index(spec.heads.key_dim) < SHORT_BUCKETS
}

/// Layout of the workspace: offsets in bytes.
pub(super) struct WorkspaceLayout {
    pub(super) states: usize,
    pub(super) retained: usize,
    pub(super) forgotten: usize,
    /// Total size.
    pub(super) bytes: usize,
}

/// Division of the columns of a segment and value head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// Workgroups.
    pub(super) slabs: usize,
    /// Threads of each workgroup.
    pub(super) threads: u32,
}

impl Shape {
    pub(super) fn new(
        spec: PrefillSpec,
        batch: Batch,
        sequences: usize,
        context: &Context,
    ) -> Checked<Shape> {
        spec.validate()?;
        let rows = match batch {
            Batch::Packed { tokens } => Some(tokens),
            Batch::Dense { batch, tokens } => batch.checked_mul(tokens),
        };
        check::ensure(
            rows.is_some_and(|rows| rows <= i32::MAX as usize - CHUNK),
            || {
                let was = rows.map_or("more than 2^64".to_owned(), |r| r.to_string());
                ArgumentError::new(
                    "tokens",
                    ArgumentKind::Shape,
                    was,
                    format!("at most {} tokens", i32::MAX as usize - CHUNK),
                )
            },
        )?;
        check::ensure(sequences < 1 << 24, || {
            ArgumentError::new(
                "sequences",
                ArgumentKind::Lengths,
                sequences,
                "fewer than 2^24 sequences",
            )
        })?;
        let compute_units = (spec.compute_units).unwrap_or(context.device().compute_units);
        let wanted = wanted_path(&spec)?;
        let mut shape = Shape {
            spec,
            batch,
            sequences,
            target: context.target(),
            dies: context.dies(),
            compute_units: compute_units.max(1) as usize,
            path: PrefillPath::Split,
            may_be_fused: false,
            planned_segments: false,
            short: false,
            guess: None,
        };
        // A batch without sequences has no workgroup of the fused kernel that could clear o.
        if wanted == PrefillPath::Fused && sequences > 0 {
            shape.path = PrefillPath::Fused;
        }
        // With a number of segments, bits must not depend on the batch, and neither may the path.
        let segments = plan::segments_of_environment()?.or(spec.segments);
        shape.planned_segments = segments.is_none();
        shape.may_be_fused = wanted == PrefillPath::Auto
            && sequences > 0
            && segments.is_none()
            && is_compiled(&spec)
            && shape.target.fused_costs.automatic;
        shape.short = match wanted {
            PrefillPath::Auto => {
                shape.target.short_has_bits_of_scan
                    && has_short(&spec)
                    && plan::uses_short(batch.rows(), sequences)
            }
            forced => forced == PrefillPath::Short,
        };
        shape.check_grids(shape.whole())?;
        Ok(shape)
    }

    /// [`Shape::new`] with the split path for all sequences, whatever is fastest.
    pub(super) fn split(
        spec: PrefillSpec,
        batch: Batch,
        sequences: usize,
        context: &Context,
    ) -> Checked<Shape> {
        let shape = Shape::new(spec, batch, sequences, context)?;
        Ok(Shape {
            path: PrefillPath::Split,
            may_be_fused: false,
            planned_segments: false,
            short: false,
            ..shape
        })
    }

    /// The shape of a round of the backward: a packed batch of its own.
    pub(super) fn of_round(self, tokens: usize, sequences: usize) -> Shape {
        Shape {
            batch: Batch::Packed { tokens },
            sequences,
            ..self
        }
    }

    /// Whether one kernel computes the outputs without records.
    pub(super) fn is_fused(&self) -> bool {
        self.path == PrefillPath::Fused
    }

    /// Chunks of each sequence if all are equally long.
    fn equal_chunks(&self) -> Vec<usize> {
        let tokens = self.batch.rows().div_ceil(self.sequences.max(1));
        vec![tokens.div_ceil(CHUNK); self.sequences]
    }

    /// Device and modelled times by which [`PrefillPath::Auto`] chooses the fused path or the split path.
    fn choice(&self) -> Choice {
        let (costs, heads) = (&self.target.fused_costs, self.spec.heads.value);
        let ns = |us: f64| (1e3 * us) as i32;
        let start = f64::from(costs.start) / 16.0 * costs.chunk;
        let (scan, _) = self.most_slabs();
        Choice {
            compute_units: self.compute_units.min(1 << 24) as i32,
            fused: WalkTime {
                workgroups: (heads * self.fused_slabs()) as i32,
                chunk: ns(costs.chunk),
                start: ns(start),
            },
            scan: WalkTime {
                workgroups: (heads * scan) as i32,
                chunk: ns(self.target.costs.scan.chunk),
                start: ns(costs.scan_start),
            },
            prepare_start: ns(costs.prepare_start + self.target.costs.launch),
            prepare_chunk: ns(costs.prepare * heads as f64),
        }
    }

    /// How [`PrefillPath::Auto`] chooses the path of a batch. `None`: the split path, whatever the lengths, because the
    /// fused path would not even take less time if all sequences were equally long.
    pub(super) fn choice_by_lengths(&self) -> Option<Choice> {
        (self.may_be_fused.then(|| self.choice()))
            .filter(|choice| choice.takes_fused(&self.equal_chunks()))
    }

    /// The shape with the path that [`PrefillPath::Auto`] chooses for these lengths.
    pub(super) fn of_lengths(self, cu_seqlens: &[i32]) -> Shape {
        let Some(choice) = self.choice_by_lengths() else {
            return self;
        };
        if choice.takes_fused(&plan::chunks_of(cu_seqlens)) {
            self.fused_whole()
        } else {
            self
        }
    }

    /// The shape on the fused path, where [`PrefillPath::Auto`] takes it: no sequence is cut, or gates choose.
    pub(super) fn fused_whole(self) -> Shape {
        Shape {
            path: PrefillPath::Fused,
            ..self
        }
    }

    /// Whether gates may choose the path, if a sequence is cut.
    pub(super) fn leaves_choice(&self) -> bool {
        self.may_be_fused && !self.is_fused()
    }

    /// Whether every sequence starts from zeros. Otherwise the last segment of a sequence may overwrite an initial state
    /// that others still read.
    fn from_zeros(states: &States<'_>) -> bool {
        matches!(
            states,
            States::None | States::Separate { initial: None, .. }
        )
    }

    /// Whether o is v. A segment may then not start early: the segment before it may have replaced the rows of V.
    pub(super) fn overwrites_v(x: &PrefillTensors<'_>) -> bool {
        x.o.0.0.address == x.v.0.address
    }

    /// Whether no launch overwrites an initial state: there is none, or the final states have memory of their own. A
    /// launch refuses memory that is shared in part.
    pub(super) fn keeps_initial_states(states: &States<'_>) -> bool {
        match states {
            States::None | States::Separate { initial: None, .. } => true,
            States::Separate {
                initial: Some(initial),
                last,
            } => (last.as_ref()).is_none_or(|l| l.tensor.0.address != initial.state.tensor.address),
            States::Pool { .. } => false,
        }
    }

    /// Whether a launch needs no summaries although sequences are cut, because each has at most two segments: the second
    /// starts early where gates forget, and both walk the whole sequence in narrower slabs where they do not.
    pub(super) fn starts_early(&self, counts: Counts, x: &PrefillTensors<'_>) -> bool {
        counts.summaries > 0 && counts.chains == 0 && self.may_start_early(x)
    }

    /// Whether a launch needs no summaries if each sequence has at most two segments.
    pub(super) fn may_start_early(&self, x: &PrefillTensors<'_>) -> bool {
        let may = self.planned_segments && !self.is_fused() && self.target.costs.early_starts;
        may && Shape::from_zeros(&x.states) && !Shape::overwrites_v(x)
    }

    /// Device and costs by which a fused prefill is cut.
    pub(super) fn balance(&self) -> Balance {
        let costs = &self.target.fused_costs;
        let bytes = self.summary_bytes(1).max(1);
        Balance {
            workgroups: (self.spec.heads.value * self.fused_slabs()) as i32,
            compute_units: self.compute_units.min(1 << 24) as i32,
            most_summaries: (plan::MOST_SUMMARY_BYTES / bytes) as i32,
            least_chunks: costs.least_chunks,
            start: costs.start,
            warm_up: costs.warm_up,
            summaries: costs.summaries,
            worthwhile: costs.worthwhile,
        }
    }

    /// The shape of a plan whose lengths only the device knows. It divides columns as if all sequences were equally long.
    pub(super) fn of_device(self) -> Checked<Shape> {
        if self.is_fused() {
            return Ok(self);
        }
        let chunks = self.equal_chunks();
        let counts = plan::counts(&chunks, self.split_cut(&chunks)?);
        Ok(Shape {
            guess: Some(counts),
            ..self
        })
    }

    /// How sequences of the split path are cut.
    fn split_cut(&self, chunks: &[usize]) -> Checked<Cut> {
        Ok(
            match plan::segments_of_environment()?.or(self.spec.segments) {
                Some(segments) => Cut::Segments(segments),
                None => {
                    let segments = self.machine().choose(chunks);
                    Cut::Chunks(plan::segment_chunks(chunks, segments))
                }
            },
        )
    }

    /// Segments of a batch whose lengths only the device knows, or nothing if it makes no lists: whatever the lengths, no
    /// sequence is cut, and the path is known.
    pub(super) fn device_segments(&self) -> Checked<Option<DeviceSegments>> {
        let forced = plan::segments_of_environment()?.or(self.spec.segments);
        let tokens = self.batch.rows();
        let choice = match self.is_fused() {
            true => None,
            false => self.choice_by_lengths(),
        };
        let (rule, planned) = match self.is_fused() {
            true => {
                let balance = self.balance();
                (Rule::Balance(balance), balance.most_summaries(tokens))
            }
            false => {
                let machine = self.machine();
                let halves = self.planned_segments && self.target.costs.early_starts;
                let most = machine.most_summaries as usize;
                (Rule::Machine { machine, halves }, most)
            }
        };
        let summaries = match forced {
            Some(n) => self.sequences.saturating_mul(n - 1).min(tokens / CHUNK),
            None => planned,
        };
        let nothing_to_cut = summaries == 0 || self.sequences == 0;
        if nothing_to_cut && choice.is_none() && !self.is_fused() {
            return Ok(None);
        }
        let most = Counts {
            items: self.sequences + summaries,
            summaries,
            chains: (summaries / 2).min(self.sequences) as u32,
            longest_chunks: self.whole().longest_chunks,
            short: 0,
        };
        self.check_grids(most)?;
        Ok(Some(DeviceSegments {
            most,
            segments: forced.map_or(0, |n| n.min(i32::MAX as usize) as i32),
            rule,
            choice,
        }))
    }

    /// Checks that no grid has more threads than a launch can have.
    pub(super) fn check_grids(&self, counts: Counts) -> Checked<()> {
        let [prepare, summarise, combine, scan] = self.grids(counts);
        let fit = prepare < 1 << 26 && summarise.max(scan) < 1 << 24 && combine < 1 << 23;
        check::ensure(fit, || {
            let was = format!(
                "{} tokens, {} sequences in {} segments, {} value heads",
                self.batch.rows(),
                self.sequences,
                counts.items,
                self.spec.heads.value
            );
            ArgumentError::new(
                "tokens, sequences, segments and heads",
                ArgumentKind::Shape,
                was,
                "a launch must have fewer than 2^32 threads",
            )
        })
    }

    /// Counts of a plan whose lengths only the device knows, with its short sequences.
    pub(super) fn with_short(&self, counts: Counts) -> Counts {
        Counts {
            short: if self.short { self.sequences } else { 0 },
            ..counts
        }
    }

    /// Counts if no sequence is cut, and none is left to `prefill_short`.
    pub(super) fn whole(&self) -> Counts {
        Counts {
            items: self.sequences,
            summaries: 0,
            chains: 0,
            longest_chunks: self.chunk_entries().div_ceil(self.sequences.max(1)) as u32,
            short: 0,
        }
    }

    /// Chunk indices of the batch, an upper bound on its chunks. Sequence n has the indices from cu_seqlens[n] / 64 + n
    /// on.
    pub(super) fn chunk_entries(&self) -> usize {
        self.batch.rows() / CHUNK + self.sequences
    }

    /// Model of the device for the planner of segments.
    pub(super) fn machine(&self) -> Machine {
        let heads = self.spec.heads.value;
        let (scan, summarise) = self.most_slabs();
        let workgroups = [scan, summarise, self.combine_slabs()].map(|slabs| heads * slabs);
        let most = plan::MOST_SUMMARY_BYTES / self.summary_bytes(1).max(1);
        Machine::new(self.compute_units, &self.target.costs, workgroups, most)
            .bounded(self.batch.rows().div_ceil(CHUNK), self.sequences)
    }

    /// Divides the batch into segments by the environment variable, by the spec, or by the planner, in this order.
    pub(super) fn partition(&self, cu_seqlens: &[i32]) -> Checked<Partition> {
        let chunks = plan::chunks_of(cu_seqlens);
        let cut = match plan::segments_of_environment()?.or(self.spec.segments) {
            Some(segments) => Cut::Segments(segments),
            None if self.may_be_fused && self.is_fused() => Cut::Segments(1),
            None if self.is_fused() => Cut::AtMost(self.balance().choose(&chunks).0),
            None => self.split_cut(&chunks)?,
        };
        self.check_grids(plan::counts(&chunks, cut))?;
        let mut partition = plan::cut(&chunks, cut);
        self.leave_short(&mut partition, cu_seqlens);
        Ok(partition)
    }

    /// Leaves short sequences to `prefill_short`, if it computes them.
    pub(super) fn leave_short(&self, partition: &mut Partition, cu_seqlens: &[i32]) {
        if self.short {
            partition.leave_short(cu_seqlens);
        }
    }

    /// [`Shape::partition`] for the backward.
    pub(super) fn partition_backward(&self, cu_seqlens: &[i32]) -> Checked<Partition> {
        let chunks = plan::chunks_of(cu_seqlens);
        let cut = match plan::segments_of_environment()?.or(self.spec.segments) {
            Some(segments) => Cut::Segments(segments),
            None => {
                let segments = self.backward_machine().choose(&chunks);
                Cut::AtMost(plan::segment_chunks(&chunks, segments))
            }
        };
        Ok(plan::cut(&chunks, cut))
    }

    /// Workgroups of the backward's walks and summaries.
    pub(super) fn backward_walk(&self) -> &'static Walk {
        (self.target).backward_walk(kernels::backward_index(self.spec.heads.key_dim))
    }

    /// Workgroups of `prefill_backward_gradients` for so many chunks of key heads.
    pub(super) fn gradient_groups(&self, chunks: u64) -> u64 {
        let index = kernels::backward_index(self.spec.heads.key_dim);
        match self.target.backward_gradients(index).persistent {
            true => chunks.min(self.compute_units as u64),
            false => chunks,
        }
    }

    /// Division of the columns of V in the backward's walks, of each direction.
    pub(super) fn backward_division(&self, counts: Counts) -> Division {
        let heads = &self.spec.heads;
        let costs = (self.target).backward_costs(kernels::backward_index(heads.key_dim));
        let longest = counts.longest_chunks as usize;
        // Both directions are matrices of their own.
        let both = self.divide(
            self.backward_walk(),
            &costs.scan,
            &[heads.value_dim; 2],
            (counts.items, longest, self.chunk_entries()),
        );
        Division {
            slabs: both.slabs / 2,
            ..both
        }
    }

    /// Model of the device for the planner of the backward's segments.
    fn backward_machine(&self) -> Machine {
        let Heads {
            value,
            key_dim,
            value_dim,
            ..
        } = self.spec.heads;
        let slabs = |columns: usize| columns.div_ceil(self.backward_walk().columns);
        let workgroups = [
            value * 2 * slabs(value_dim),
            value * (2 * slabs(value_dim) + slabs(key_dim)),
            value * 2 * self.combine_slabs(),
        ];
        let costs = (self.target).backward_costs(kernels::backward_index(key_dim));
        let most = plan::MOST_SUMMARY_BYTES / self.summary_bytes(2).max(1);
        Machine::new(self.compute_units, costs, workgroups, most)
    }

    pub(super) fn combine_slabs(&self) -> usize {
        self.spec.heads.value_dim.div_ceil(COMBINE_COLUMNS)
    }

    /// Workgroups of prepare (one more chunk index for rows past the last sequence), summarise, combine and scan.
    pub(super) fn grids(&self, counts: Counts) -> [u64; 4] {
        let of_heads =
            |items: usize, slabs: usize| items as u64 * self.spec.heads.value as u64 * slabs as u64;
        [
            match self.is_fused() {
                true => 0,
                false => {
                    (self.chunk_entries() as u64 + 1)
                        * (self.spec.heads.key * self.prepare_head_groups()) as u64
                }
            },
            of_heads(counts.summaries, self.summarise_slabs(counts)),
            of_heads(counts.chains as usize, self.combine_slabs()),
            of_heads(counts.items, self.walk_slabs(counts)),
        ]
    }

    /// Workgroups of scan, of `threads` threads, that are launched for `units` of work: fewer where each walks several.
    pub(super) fn scan_workgroups(&self, counts: Counts, threads: u32, units: u32) -> u32 {
        let key_dim = self.spec.heads.key_dim;
        // Only these are compiled for that (`walks_units`).
        let wide = threads > self.target.scan(bucket_index(key_dim)).threads
            && (65..=128).contains(&key_dim);
        let most = self.target.units_chunks;
        match wide && most > 0 && counts.longest_chunks <= most {
            true => units.min(self.compute_units as u32),
            false => units,
        }
    }

    /// Workgroups of summarise and of combine that are launched for so many units of work. Lists that the device makes
    /// often have fewer, and starting workgroups that find none would take longer than a walk. So fewer are launched, and
    /// each takes several units.
    pub(super) fn summary_workgroups(&self, [summarise, combine]: [u32; 2]) -> [u32; 2] {
        /// Workgroups for each compute unit: several, so that those of long walks take none besides.
        const OF_SUMMARISE: usize = 3;
        if self.guess.is_none() || self.target.units_chunks == 0 {
            return [summarise, combine];
        }
        // Only these are compiled for that (`walks_units`).
        let walks_units = (65..=128).contains(&self.spec.heads.key_dim);
        [
            match walks_units {
                true => summarise.min((OF_SUMMARISE * self.compute_units) as u32),
                false => summarise,
            },
            combine.min(self.compute_units as u32),
        ]
    }

    /// Workgroups of `prefill_fused` that share `units` of work, where each walks several. 0: each has one.
    pub(super) fn fused_walkers(&self, counts: Counts, units: u32) -> u32 {
        let most = self.target.fused_costs.units_chunks;
        // If only the device knows the lengths, that of the longest sequence is a guess, and the mean decides. It also does
        // where the longest sequence happens to be as long as the guess.
        let guess = self.whole().longest_chunks;
        let mean = (self.batch.rows().div_ceil(self.sequences.max(1))).div_ceil(CHUNK) as u32;
        // Without any chunks, too, some targets have one unit in a workgroup.
        let few = |chunks: u32| most > 0 && chunks <= most;
        let walks = self.is_fused()
            && counts.summaries == 0
            && counts.items <= self.sequences
            && self.fused_slabs() == 1
            && (few(counts.longest_chunks) || counts.longest_chunks == guess && few(mean))
            && units > self.compute_units as u32;
        if walks { self.compute_units as u32 } else { 0 }
    }

    /// Value heads per workgroup of prepare: all heads that read its key head, or fewer if the device has room for more
    /// workgroups. Each workgroup computes the products of q and k.
    pub(super) fn prepare_heads(&self) -> usize {
        let group = self.spec.heads.value / self.spec.heads.key;
        let room = self.compute_units * self.target.prepare_room;
        let parts = room / (self.chunk_entries() * self.spec.heads.key).max(1);
        group.div_ceil(parts.max(1))
    }

    /// Workgroups of prepare per (chunk, key head).
    pub(super) fn prepare_head_groups(&self) -> usize {
        (self.spec.heads.value / self.spec.heads.key).div_ceil(self.prepare_heads())
    }

    /// Workgroups of scan or of fused per item and value head.
    pub(super) fn walk_slabs(&self, counts: Counts) -> usize {
        match self.is_fused() {
            true => self.fused_slabs(),
            false => self.scan_division(counts).slabs,
        }
    }

    /// Workgroups of summarise or of fused_summarise per item and value head.
    pub(super) fn summarise_slabs(&self, counts: Counts) -> usize {
        match self.is_fused() {
            true => self.fused_summarise_slabs(),
            false => self.summarise_division(counts).slabs,
        }
    }

    /// Workgroups of fused_summarise per item and value head.
    fn fused_summarise_slabs(&self) -> usize {
        let Heads {
            key_dim, value_dim, ..
        } = self.spec.heads;
        let bucket = bucket_index(key_dim).min(FUSED_BUCKETS - 1);
        let columns = self.target.fused_summarise(bucket).columns;
        value_dim.div_ceil(columns) + key_dim.div_ceil(columns)
    }

    /// Workgroups of fused per item and value head.
    pub(super) fn fused_slabs(&self) -> usize {
        let bucket = bucket_index(self.spec.heads.key_dim).min(FUSED_BUCKETS - 1);
        let columns = self.target.fused(bucket).columns;
        self.spec.heads.value_dim.div_ceil(columns)
    }

    /// Workgroups of short per sequence and value head.
    pub(super) fn short_slabs(&self) -> usize {
        (self.spec.heads.value_dim).div_ceil(self.target.short_columns)
    }

    fn record_bytes(&self, counts: Counts) -> usize {
        if self.is_fused() || counts.only_short() {
            return 0;
        }
        self.chunk_entries() * self.spec.heads.value * RECORD_BYTES
    }

    /// Whether the bandwidth of HBM limits `prefill_scan`: Q, K, V, O and records do not fit in the Infinity Cache, and
    /// its workgroups fill three quarters of the device. Lengths may leave rows and records unused.
    pub(super) fn is_from_hbm(&self, counts: Counts) -> bool {
        /// Bytes of the Infinity Cache of every CDNA 3 device.
        const INFINITY_CACHE: usize = 256 << 20;
        let Heads {
            key: key_heads,
            value: value_heads,
            key_dim,
            value_dim,
            ..
        } = self.spec.heads;
        // Q and K, V and O.
        let token = 2 * (key_heads * key_dim + value_heads * value_dim) * size_of::<u16>();
        let far = self.batch.rows() * token + self.record_bytes(counts) > INFINITY_CACHE;
        let workgroups = counts.items * value_heads * self.scan_division(counts).slabs;
        far && 4 * workgroups >= 3 * self.compute_units
    }

    /// Bytes of all summaries: N, and M or the initial state.
    pub(super) fn summary_bytes(&self, summaries: usize) -> usize {
        let Heads {
            value: value_heads,
            key_dim,
            value_dim,
            ..
        } = self.spec.heads;
        let words = (value_dim + key_dim.max(value_dim)) * key_dim;
        summaries * value_heads * words * size_of::<f32>()
    }

    /// Layout of the workspace: records and, if sequences are cut, N and M of the summaries, a bound per record, a word
    /// per summary and value head. A fused prefill has neither records nor bounds, but two words.
    pub(super) fn workspace(&self, counts: Counts) -> WorkspaceLayout {
        let heads = self.spec.heads.value;
        let states = self.record_bytes(counts);
        let retained = states + self.summary_bytes(counts.summaries);
        let cut = usize::from(counts.summaries > 0 && !self.is_fused());
        let words = 1 + usize::from(self.is_fused());
        let forgotten = retained + cut * self.chunk_entries() * heads * size_of::<f32>();
        WorkspaceLayout {
            states,
            retained,
            forgotten,
            bytes: forgotten + counts.summaries * heads * words * size_of::<i32>(),
        }
    }

    /// Divides the columns of `matrices` into slabs, of twice the columns if that is faster. A slab belongs to one
    /// matrix.
    fn divide(
        &self,
        walk: &Walk,
        cost: &KernelCost,
        matrices: &[usize],
        (items, longest_chunks, chunks): (usize, usize, usize),
    ) -> Division {
        let slabs = |columns: usize| matrices.iter().map(|n| n.div_ceil(columns)).sum::<usize>();
        let [narrow, wide] = [walk.columns, 2 * walk.columns].map(slabs);
        if walk.wide_threads > walk.threads
            && narrow > wide
            && plan::two_in_one(
                cost,
                self.compute_units,
                items,
                [narrow, wide].map(|slabs| self.spec.heads.value * slabs),
                longest_chunks,
                chunks,
            )
        {
            return Division {
                slabs: wide,
                threads: walk.wide_threads,
            };
        }
        Division {
            slabs: narrow,
            threads: walk.threads,
        }
    }

    /// Division of the columns of V in scan.
    pub(super) fn scan_division(&self, counts: Counts) -> Division {
        let counts = self.guess.unwrap_or(counts);
        self.divide(
            self.target.scan(bucket_index(self.spec.heads.key_dim)),
            &self.target.costs.scan,
            &[self.spec.heads.value_dim],
            (
                counts.items,
                counts.longest_chunks as usize,
                self.chunk_entries(),
            ),
        )
    }

    /// Division of the columns of N and M in summarise.
    pub(super) fn summarise_division(&self, counts: Counts) -> Division {
        let counts = self.guess.unwrap_or(counts);
        let longest_chunks = counts.longest_chunks as usize;
        self.divide(
            self.target.summarise(bucket_index(self.spec.heads.key_dim)),
            &self.target.costs.summarise,
            &[self.spec.heads.value_dim, self.spec.heads.key_dim],
            (
                counts.summaries,
                longest_chunks,
                counts.summaries * longest_chunks,
            ),
        )
    }

    /// Most workgroups of scan and of summarise for a segment and value head.
    pub(super) fn most_slabs(&self) -> (usize, usize) {
        let bucket = bucket_index(self.spec.heads.key_dim);
        let slabs = |n: usize, walk: &Walk| n.div_ceil(walk.columns);
        let (scan, summarise) = (self.target.scan(bucket), self.target.summarise(bucket));
        let of_m = slabs(self.spec.heads.key_dim, summarise);
        (
            slabs(self.spec.heads.value_dim, scan),
            slabs(self.spec.heads.value_dim, summarise) + of_m,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shape of an `auto` plan on an MI300X.
    fn shape(heads: [usize; 2], lengths: &[usize]) -> Shape {
        Shape {
            spec: PrefillSpec::new(heads[0], heads[1], 128, 128),
            batch: Batch::Packed {
                tokens: lengths.iter().sum(),
            },
            sequences: lengths.len(),
            target: Target::of("gfx942"),
            dies: 8,
            compute_units: 304,
            path: PrefillPath::Split,
            may_be_fused: true,
            planned_segments: true,
            short: false,
            guess: None,
        }
    }

    fn cu_seqlens(lengths: &[usize]) -> Vec<i32> {
        let mut out = vec![0];
        for n in lengths {
            out.push(out[out.len() - 1] + *n as i32);
        }
        out
    }

    fn takes_fused(heads: [usize; 2], lengths: &[usize]) -> bool {
        let cu_seqlens = cu_seqlens(lengths);
        shape(heads, lengths).of_lengths(&cu_seqlens).is_fused()
    }

    /// Shape of an `auto` plan on an H200.
    fn on_an_h200(heads: [usize; 2], lengths: &[usize]) -> Shape {
        Shape {
            target: Target::of("sm_90a"),
            dies: 1,
            compute_units: 132,
            may_be_fused: false,
            ..shape(heads, lengths)
        }
    }

    /// Segments of the longest sequence, the first one.
    fn segments_of_first(partition: &Partition) -> usize {
        let items = partition.items.iter();
        items.filter(|item| item.sequence == 0).count()
    }

    /// The fastest number of segments measured, or one within 2% of it. Of [16, 48] and of 131,072 tokens only this
    /// plan was measured.
    #[test]
    fn one_sequence_is_cut_as_measured_on_an_h200() {
        for (heads, tokens, segments) in [
            ([2, 8], 8192, 8),
            ([2, 8], 32768, 8),
            ([16, 16], 2048, 4),
            ([16, 16], 8192, 4),
            ([16, 16], 32768, 8),
            ([16, 32], 8192, 2),
            ([16, 32], 32768, 4),
            ([16, 32], 131_072, 4),
            ([16, 48], 32768, 1),
            ([16, 64], 8192, 1),
        ] {
            let partition = on_an_h200(heads, &[tokens])
                .partition(&[0, tokens as i32])
                .expect("a plan");
            let name = format!("{heads:?} x {tokens}");
            assert_eq!(segments_of_first(&partition), segments, "{name}");
        }
        // A batch that fills the device stays whole.
        let lengths = [4096; 8];
        let plan = on_an_h200([16, 32], &lengths).partition(&cu_seqlens(&lengths));
        assert_eq!(plan.expect("a plan").summaries, 0);
    }

    /// One workgroup for each multiprocessor where all segments are short, as measured on an H200.
    #[test]
    fn workgroups_of_scan_walk_several_short_segments() {
        for (sequences, tokens, groups) in [
            (256, 128_usize, 132),
            (1024, 64, 132),
            (128, 256, 132),
            (2, 128, 64),
            (128, 257, 4096),
            (8, 4096, 256),
        ] {
            let counts = Counts {
                items: sequences,
                summaries: 0,
                chains: 0,
                longest_chunks: tokens.div_ceil(64) as u32,
                short: 0,
            };
            let units = 32 * sequences as u32;
            let lengths = vec![tokens; sequences];
            let shape_of = on_an_h200([16, 32], &lengths);
            assert_eq!(shape_of.scan_workgroups(counts, 384, units), groups);
            assert_eq!(shape_of.scan_workgroups(counts, 256, units), units);
            let cdna = shape([16, 32], &lengths);
            assert_eq!(cdna.scan_workgroups(counts, 512, units), units);
        }
    }

    /// Some workgroups for each multiprocessor, where the device makes the list of segments.
    #[test]
    fn workgroups_of_summaries_take_several_units_of_lists_of_the_device() {
        let known = on_an_h200([16, 32], &[8192; 4]);
        let of_device = known.of_device().expect("a plan");
        assert_eq!(known.summary_workgroups([4096, 1024]), [4096, 1024]);
        assert_eq!(of_device.summary_workgroups([4096, 1024]), [396, 132]);
        assert_eq!(of_device.summary_workgroups([128, 32]), [128, 32]);
        assert_eq!(of_device.summary_workgroups([0, 0]), [0, 0]);
        for keys in [64, 192] {
            let mut other = of_device;
            other.spec.heads.key_dim = keys;
            assert_eq!(other.summary_workgroups([4096, 1024]), [4096, 132]);
        }
        let cdna = shape([16, 32], &[8192; 4]).of_device().expect("a plan");
        assert_eq!(cdna.summary_workgroups([4096, 1024]), [4096, 1024]);
    }

    /// As many workgroups as compute units where there are more units of few chunks, whoever knows the lengths.
    #[test]
    fn workgroups_of_fused_walk_several_units_of_few_chunks() {
        let ragged: Vec<usize> = (0..60).map(|i| 17 + i * 53 % 112).collect();
        let one_long = [vec![17; 59], vec![700]].concat();
        for (lengths, host, device) in [
            (vec![128; 120], 304, 304),
            (vec![64; 256], 304, 304),
            (vec![128; 9], 0, 0),
            (vec![256; 64], 304, 304),
            (vec![257; 120], 0, 0),
            (vec![1024; 64], 0, 0),
            (ragged, 304, 304),
            (one_long, 0, 304),
            (vec![0; 40], 304, 304),
        ] {
            let fused = shape([16, 32], &lengths).fused_whole();
            let partition = fused.partition(&cu_seqlens(&lengths)).expect("a plan");
            let units = 32 * lengths.len() as u32;
            let name = format!("{} x {}", lengths.len(), lengths[0]);
            let walkers = |counts| fused.fused_walkers(counts, units);
            assert_eq!(walkers(partition.counts()), host, "{name}");
            assert_eq!(walkers(fused.whole()), device, "{name}");
            // More value columns than a slab has.
            let mut wide = fused;
            wide.spec.heads.value_dim = 144;
            assert_eq!(wide.fused_walkers(fused.whole(), 2 * units), 0, "{name}");
            // Another target, which has one unit in a workgroup.
            let sm90 = on_an_h200([16, 32], &lengths).fused_whole();
            assert_eq!(sm90.fused_walkers(sm90.whole(), units), 0, "{name}");
            // Sequences are cut.
            let mut cut = partition.counts();
            cut.summaries = 1;
            assert_eq!(walkers(cut), 0, "{name}");
        }
        let split = shape([16, 32], &[128; 120]);
        assert_eq!(split.fused_walkers(split.whole(), 3840), 0);
    }

    /// The fused path takes less time where the workgroups of equal sequences fill the device.
    #[test]
    fn equal_sequences_that_fill_the_device_are_fused() {
        for (heads, sequences, tokens, fused) in [
            ([16, 32], 8, 1024, true),
            ([16, 32], 8, 2048, true),
            ([16, 32], 8, 4096, true),
            ([16, 32], 64, 512, true),
            ([16, 32], 120, 128, true),
            ([16, 32], 256, 128, true),
            ([16, 32], 4, 64, true),
            ([16, 32], 1, 64, true),
            ([16, 64], 1, 32768, false),
            ([16, 32], 1, 8192, false),
            ([16, 32], 1, 1024, false),
            ([16, 48], 1, 8192, false),
            ([2, 8], 1, 32768, false),
            ([4, 8], 1, 8192, false),
            ([2, 8], 4, 512, false),
        ] {
            let name = format!("{heads:?}, {sequences} x {tokens}");
            let lengths = vec![tokens; sequences];
            assert_eq!(takes_fused(heads, &lengths), fused, "{name}");
        }
    }

    /// One long sequence is walked chunk by chunk, and a chunk takes four times as long in the fused kernel.
    #[test]
    fn a_batch_with_one_long_sequence_is_split() {
        let lengths = [4096, 1024, 1024, 512, 512, 512, 256, 256];
        assert!(!takes_fused([16, 32], &lengths));
        // As many tokens in sequences of equal length, and with padding.
        assert!(takes_fused([16, 32], &[1024; 8]));
        let short = [vec![128; 100], vec![0; 20]].concat();
        assert!(takes_fused([16, 32], &short));
        let mut long = vec![128; 119];
        long.push(8192);
        assert!(!takes_fused([16, 32], &long));
        // The long sequence is short beside the rest.
        let mut among_many = vec![512; 200];
        among_many.push(4096);
        assert!(takes_fused([16, 32], &among_many));
    }

    /// Also where the records of empty sequences alone do not fit.
    #[test]
    fn large_batches_come_from_hbm() {
        for (heads, lengths, from_hbm) in [
            ([16, 64], vec![32768], true),
            // The workgroups leave a third of the device idle.
            ([16, 48], vec![8192], false),
            ([16, 32], vec![8192], false),
            ([2, 8], vec![32768], false),
            ([1, 2], vec![330, 64, 75], false),
            ([1, 2], [vec![330, 64, 75], vec![0; 11_997]].concat(), true),
        ] {
            let shape = shape(heads, &lengths);
            let found = shape.is_from_hbm(shape.whole());
            assert_eq!(found, from_hbm, "{heads:?}, {} sequences", lengths.len());
        }
    }

    /// [2, 8]: the fastest of 1, 4 and 8 segments measured. Whole [16, 32] was measured, but nothing beside it. Nothing
    /// was measured of [16, 16] in two segments: the model says so.
    #[test]
    fn a_backward_is_cut_as_costs_of_an_h200_say() {
        for (heads, tokens, sequences, segments) in [
            ([16, 16], 8192, 1, 2),
            ([16, 32], 8192, 1, 1),
            ([2, 8], 32768, 1, 8),
            ([16, 32], 4096, 8, 1),
        ] {
            let lengths = vec![tokens; sequences];
            let machine = on_an_h200(heads, &lengths).backward_machine();
            let chunks = plan::chunks_of(&cu_seqlens(&lengths));
            let name = format!("{heads:?}, {sequences} x {tokens}");
            assert_eq!(machine.choose(&chunks), segments, "{name}");
        }
    }

    /// Summaries of two rounds of the device, or none where even one sequence of all rows stays whole.
    #[test]
    fn lists_of_the_device_are_bounded() {
        let summaries = |shape: Shape| {
            let segments = shape.device_segments().expect("a grid");
            segments.map(|s| (s.most.summaries, s.most.chains))
        };
        let of = |heads, lengths: &[usize]| summaries(on_an_h200(heads, lengths));
        assert_eq!(of([16, 32], &[8192]), Some((9, 1)));
        assert_eq!(of([16, 32], &[2048; 4]), Some((9, 4)));
        assert_eq!(of([2, 8], &[4096; 8]), Some((33, 8)));
        assert_eq!(of([16, 64], &[8192]), None);
        assert_eq!(of([16, 32], &[64; 3]), None);
        assert_eq!(summaries(shape([16, 32], &[8192])), Some((5, 1)));
    }

    /// Only the fused path has a list if the path does not depend on the lengths.
    #[test]
    fn the_device_chooses_where_lengths_decide() {
        let chooses = |heads, lengths: &[usize]| {
            let segments = shape(heads, lengths).device_segments();
            segments
                .expect("a grid")
                .is_some_and(|s| s.choice.is_some())
        };
        assert!(chooses([16, 32], &[1024; 8]));
        assert!(!chooses([16, 32], &[8192]));
        assert!(!chooses([2, 8], &[512; 4]));
    }
}
