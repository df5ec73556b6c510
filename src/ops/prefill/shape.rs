//! Properties of a batch that decide its launches: its path, how its sequences are cut, its workspace. Pure: uses no
//! device.

use super::lengths::{DeviceSegments, Rule};
use super::plan::{self, Balance, Choice, Counts, Cut, Machine, Partition, WalkTime};
use super::{CHUNK, PATH_VARIABLE, PrefillPath, PrefillSpec, PrefillTensors};
use crate::abi;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::kernels::{self, FUSED_BUCKETS, SHORT_BUCKETS, Target, bucket_index};
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
    pub(super) may_be_fused: bool,
    /// Whether the planner cuts sequences, not the caller.
    planned_segments: bool,
    /// Whether segments may start early. Otherwise every segment starts from a summary, as ranks' do.
    early_segments: bool,
    /// Whether `prefill_short` computes short sequences.
    short: bool,
    /// Segments by which columns are divided among workgroups, if only the device knows the lengths: a guess.
    pub(super) guess: Option<Counts>,
    /// Sequences whose final states may wait in the memory of summaries, where gates choose.
    pub(super) waiting: usize,
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
            early_segments: true,
            short: false,
            guess: None,
            waiting: 0,
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
            early_segments: false,
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
    pub(super) fn choice(&self) -> Choice {
        let (costs, heads) = (&self.target.fused_costs, self.spec.heads.value);
        let ns = |us: f64| (1e3 * us) as i32;
        let start = f64::from(costs.start) / 16.0 * costs.chunk;
        let (scan, _) = self.most_slabs();
        let [scan_chunk, prepare_chunk] = self.split_us();
        Choice {
            compute_units: self.compute_units.min(1 << 24) as i32,
            fused: WalkTime {
                workgroups: (heads * self.fused_slabs()) as i32,
                chunk: ns(costs.chunk),
                start: ns(start),
            },
            scan: WalkTime {
                workgroups: (heads * scan) as i32,
                chunk: ns(scan_chunk),
                start: ns(costs.scan_start),
            },
            cut_chunk: ns(match self.spec.qk_l2norm {
                true => costs.chunk_with_norms,
                false => costs.chunk,
            }),
            prepare_start: ns(costs.prepare_start + self.target.costs.launch),
            prepare_chunk: ns(prepare_chunk * heads as f64),
        }
    }

    /// How [`PrefillPath::Auto`] chooses the path of a batch. `None`: the split path, whatever the lengths, because the
    /// fused path would not even take less time if all sequences were equally long, and gates have no choice.
    pub(super) fn choice_by_lengths(&self) -> Option<Choice> {
        (self.may_be_fused.then(|| self.choice()))
            .filter(|choice| choice.takes_fused(&self.equal_chunks()) || self.uneven().is_some())
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

    /// The shape on the fused path, where [`PrefillPath::Auto`] takes it without summaries: no sequence is cut, or gates
    /// choose.
    pub(super) fn fused_whole(self) -> Shape {
        Shape {
            path: PrefillPath::Fused,
            ..self
        }
    }

    /// The shape on the split path.
    pub(super) fn on_split_path(self) -> Shape {
        Shape {
            path: PrefillPath::Split,
            ..self
        }
    }

    /// Chunks within which gates must forget to choose segments: these begin at most a chunk earlier than plans count on.
    pub(super) fn soon(&self) -> i32 {
        self.target.fused_costs.warm_up / 16 + 1
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
        let counts = plan::counts(&chunks, self.split_cut(&chunks)?, self.pieces());
        Ok(Shape {
            guess: Some(counts),
            waiting: self.uneven().map_or(0, |uneven| self.most_cut(&uneven)),
            ..self
        })
    }

    /// Summaries of a segment that another follows, by how one sequence of all rows is cut: host and device must make
    /// equally many, whatever the lengths.
    pub(super) fn pieces(&self) -> usize {
        #[cfg(all(test, feature = "simulator"))]
        if let Some(pieces) = super::pieces::PIECES.get() {
            return pieces;
        }
        let planned = self.planned_segments && !self.is_fused();
        match self.target.costs.two_pieces.filter(|_| planned) {
            Some(least) => self
                .machine()
                .pieces(self.batch.rows().div_ceil(CHUNK), least),
            None => 1,
        }
    }

    /// Whether segments of `prefill_scan` start early where few chunks before them forget. Workgroups that walk several
    /// units have no registers for it. So batches of short sequences, which they may walk, start from summaries,
    /// whoever knows the lengths; with a number of segments they start early, whatever the batch.
    pub(super) fn starts_soon(&self) -> bool {
        let long = self.whole().longest_chunks > self.target.units_chunks;
        let may = self.early_segments && self.target.costs.starts_soon && !self.is_fused();
        may && (long || !self.planned_segments)
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
        let pieces = self.pieces();
        let most = Counts {
            items: self.sequences + summaries,
            summaries: summaries * pieces,
            pieces: pieces as u32,
            chains: (summaries * pieces / 2).min(self.sequences) as u32,
            longest_chunks: self.whole().longest_chunks,
            even: false,
            short: 0,
        };
        self.check_grids(most)?;
        let uneven = choice.and_then(|_| self.uneven());
        Ok(Some(DeviceSegments {
            most,
            segments: forced.map_or(0, |n| n.min(i32::MAX as usize) as i32),
            rule,
            choice,
            uneven,
            wait_time: self.wait_time(),
        }))
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
            pieces: 1,
            chains: 0,
            longest_chunks: self.chunk_entries().div_ceil(self.sequences.max(1)) as u32,
            even: false,
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
        let pieces = self.target.costs.two_pieces.map_or(1, |_| 2);
        let most = plan::MOST_SUMMARY_BYTES / self.summary_bytes(pieces).max(1);
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
        let pieces = self.pieces();
        self.check_grids(plan::counts(&chunks, cut, pieces))?;
        let mut partition = plan::cut(&chunks, cut, pieces);
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
        Ok(plan::cut(&chunks, cut, 1))
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

    fn record_bytes(&self, counts: Counts) -> usize {
        if self.is_fused() || counts.only_short() {
            return 0;
        }
        self.chunk_entries() * self.spec.heads.value * RECORD_BYTES
    }

    /// Whether the bandwidth of HBM limits `prefill_scan`: its data do not fit in the Infinity Cache, and its workgroups
    /// fill three quarters of the device. Lengths may leave rows and records unused.
    pub(super) fn is_from_hbm(&self, counts: Counts) -> bool {
        let workgroups = counts.items * self.spec.heads.value * self.scan_division(counts).slabs;
        self.exceeds_cache(self.record_bytes(counts)) && 4 * workgroups >= 3 * self.compute_units
    }

    /// Whether Q, K, V, O and so many bytes of records do not fit in the Infinity Cache of a CDNA 3 device.
    fn exceeds_cache(&self, records: usize) -> bool {
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
        self.batch.rows() * token + records > INFINITY_CACHE
    }

    /// Modelled microseconds of the split path: a chunk of `prefill_scan`, and a (chunk, value head) of
    /// `prefill_prepare` on a compute unit.
    pub(super) fn split_us(&self) -> [f64; 2] {
        let costs = &self.target.fused_costs;
        let of_scan = self.target.costs.scan.chunk;
        match self.exceeds_cache(self.chunk_entries() * self.spec.heads.value * RECORD_BYTES) {
            true => [
                of_scan * costs.scan_from_hbm,
                costs.prepare * costs.prepare_from_hbm,
            ],
            false => [of_scan, costs.prepare],
        }
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
    /// per summary and value head. A fused prefill has neither records nor bounds, but two words. Final states may wait in
    /// place of N.
    pub(super) fn workspace(&self, counts: Counts) -> WorkspaceLayout {
        let heads = self.spec.heads.value;
        let states = self.record_bytes(counts);
        let retained = states + self.summary_bytes(counts.summaries.max(self.waiting));
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
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Shape of an `auto` plan on an MI300X.
    pub(in super::super) fn shape(heads: [usize; 2], lengths: &[usize]) -> Shape {
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
            early_segments: true,
            short: false,
            guess: None,
            waiting: 0,
        }
    }

    pub(in super::super) fn cu_seqlens(lengths: &[usize]) -> Vec<i32> {
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
    pub(in super::super) fn on_an_h200(heads: [usize; 2], lengths: &[usize]) -> Shape {
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

    /// Numbers of segments that were fast on average over gates `normal`, `mixed` and `model`, and that cost at most 13% with
    /// `zero` (docs/results/history/h200-tuning.md).
    #[test]
    fn one_sequence_is_cut_as_measured_on_an_h200() {
        for (heads, tokens, segments) in [
            ([2, 8], 8192, 8),
            ([2, 8], 32768, 16),
            ([2, 8], 65536, 16),
            ([8, 16], 8192, 4),
            ([8, 16], 32768, 8),
            ([16, 16], 2048, 4),
            ([16, 16], 8192, 4),
            ([16, 16], 32768, 8),
            ([16, 32], 4096, 2),
            ([16, 32], 8192, 4),
            ([16, 32], 32768, 4),
            ([12, 24], 8192, 5),
            ([16, 16], 131_072, 8),
            ([16, 48], 32768, 1),
            ([16, 48], 131_072, 1),
            ([16, 64], 8192, 1),
        ] {
            let partition = on_an_h200(heads, &[tokens])
                .partition(&[0, tokens as i32])
                .expect("a plan");
            let name = format!("{heads:?} x {tokens}");
            assert_eq!(segments_of_first(&partition), segments, "{name}");
        }
        // Shorter sequences beside a long one do not change how it is cut.
        let lengths = [8192, 1024, 1024, 1024, 1024];
        let plan = on_an_h200([16, 32], &lengths).partition(&cu_seqlens(&lengths));
        assert_eq!(segments_of_first(&plan.expect("a plan")), 4);
        // A batch that fills the device stays whole.
        let lengths = [4096; 8];
        let plan = on_an_h200([16, 32], &lengths).partition(&cu_seqlens(&lengths));
        assert_eq!(plan.expect("a plan").summaries, 0);
    }

    /// Two pieces where they were faster on average over the gates (docs/results/history/h200-tuning.md).
    #[test]
    fn segments_are_summarised_in_two_pieces_as_measured_on_an_h200() {
        for (heads, tokens, pieces) in [
            ([16, 32], 8192, 1),
            ([16, 32], 16384, 2),
            ([16, 32], 32768, 2),
            ([16, 32], 131_072, 2),
            ([16, 16], 2048, 1),
            ([16, 16], 8192, 2),
            ([16, 16], 131_072, 2),
            ([8, 16], 8192, 2),
            ([8, 16], 32768, 1),
            ([12, 24], 8192, 1),
            ([16, 32], 9216, 1),
            ([16, 16], 32768, 1),
            ([2, 8], 32768, 1),
            ([2, 8], 65536, 1),
            ([4, 8], 8192, 1),
            ([16, 48], 32768, 1),
            ([16, 32], 4096, 1),
        ] {
            let shape = on_an_h200(heads, &[tokens]);
            assert_eq!(shape.pieces(), pieces, "{heads:?} x {tokens}");
        }
        // Shapes with which tests/prefill/device_cuts.rs compares lists of the host and of the device.
        for (keys, tokens) in [
            (64, 64 * 100),
            (64, 64 * 101),
            (128, 64 * 160),
            (128, 64 * 162),
        ] {
            let mut small = on_an_h200([1, 1], &[tokens]);
            small.spec = PrefillSpec::new(1, 1, keys, 16);
            small.compute_units = 3;
            assert_eq!(small.pieces(), 2, "{keys}, {tokens}");
        }
        let mut forced = on_an_h200([16, 32], &[32768]);
        forced.planned_segments = false;
        assert_eq!(forced.pieces(), 1);
        assert_eq!(shape([16, 32], &[32768]).pieces(), 1);
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
        assert!(!chooses([16, 32], &[4096]));
        assert!(!chooses([2, 8], &[512; 4]));
        // Gates may choose.
        assert!(chooses([16, 32], &[8192]));
    }
}
