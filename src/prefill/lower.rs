//! From the shape of a batch and its tensors to the kernels' arguments and grids: pure, no device.

use std::ffi::c_void;
use std::ptr;

use super::plan::{self, Machine, Partition};
use super::states::{self, PlanSlots};
use super::{CHUNK, Part, PrefillSpec, PrefillTensors};
use crate::abi::{
    self, dwk_prefill_combine_args, dwk_prefill_item, dwk_prefill_prepare_args,
    dwk_prefill_scan_args,
};
use crate::check::{self, Batch, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::launch::{COMBINE_COLUMNS, LaunchShape, combine_threads};
use crate::runtime::{Context, Stream};
use crate::types::HeadMap;

const RECORD_BYTES: usize = abi::DWK_RECORD_BYTES as usize;

/// A batch, as far as it decides launches: a pure value, no device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) spec: PrefillSpec,
    pub(super) batch: Batch,
    pub(super) sequences: usize,
    pub(super) launch: &'static LaunchShape,
    dies: u32,
    pub(super) compute_units: usize,
}

/// What the kernels read of the batch's lengths, on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tables {
    pub(super) cu_seqlens: *const i32,
    /// Null: every sequence is one.
    pub(super) items: *const dwk_prefill_item,
    pub(super) chains: *const i32,
    pub(super) counts: Counts,
}

/// How many segments there are, how many of them another follows, and how many sequences are of more than two; the
/// chunks of the longest segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) items: usize,
    pub(super) summaries: usize,
    pub(super) chains: u32,
    pub(super) longest: u32,
}

/// Offsets of the parts of the workspace, in bytes.
pub(super) struct WorkspaceParts {
    states: usize,
    retained: usize,
    forgotten: usize,
    /// All of it.
    pub(super) bytes: usize,
}

/// Names of the kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    pub(super) prepare: &'static str,
    pub(super) summarise: &'static str,
    pub(super) combine: &'static str,
    pub(super) scan: &'static str,
}

impl Kernels {
    /// The kernel that is a part.
    pub(super) fn of(&self, part: Part) -> Option<&'static str> {
        match part {
            Part::Whole => None,
            Part::Prepare => Some(self.prepare),
            Part::Summarise => Some(self.summarise),
            Part::Combine => Some(self.combine),
            Part::Scan => Some(self.scan),
        }
    }
}

/// Arguments and grids of one launch; a grid of no workgroups is not launched.
pub(crate) struct Lowered {
    prepare: dwk_prefill_prepare_args,
    prepare_groups: u32,
    summarise: dwk_prefill_scan_args,
    summarise_groups: u32,
    summarise_threads: u32,
    combine: dwk_prefill_combine_args,
    combine_groups: u32,
    scan: dwk_prefill_scan_args,
    scan_groups: u32,
    scan_threads: u32,
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
        let shape = Shape {
            spec,
            batch,
            sequences,
            launch: context.launch_shape(),
            dies: context.dies(),
            compute_units: compute_units.max(1) as usize,
        };
        shape.check_grids(shape.whole())?;
        Ok(shape)
    }

    /// No more threads than a launch can have.
    pub(super) fn check_grids(&self, counts: Counts) -> Checked<()> {
        let [prepare, summarise, combine, scan] = self.grids(counts);
        let fit = prepare < 1 << 26 && summarise.max(scan) < 1 << 24 && combine < 1 << 23;
        check::ensure(fit, || {
            let was = format!(
                "{} tokens, {} sequences in {} segments, {} value heads",
                self.batch.rows(),
                self.sequences,
                counts.items,
                self.spec.value_heads
            );
            ArgumentError::new(
                "tokens, sequences, segments and heads",
                ArgumentKind::Shape,
                was,
                "a launch must have fewer than 2^32 threads",
            )
        })
    }

    /// Counts where no sequence is cut.
    pub(super) fn whole(&self) -> Counts {
        Counts {
            items: self.sequences,
            summaries: 0,
            chains: 0,
            longest: self.slots().div_ceil(self.sequences.max(1)) as u32,
        }
    }

    /// Chunks of the batch, at most: the sequences' own, rounded up where they lie unfavourably.
    pub(super) fn slots(&self) -> usize {
        self.batch.rows() / CHUNK + self.sequences
    }

    /// What the planner of segments takes the device for.
    pub(super) fn machine(&self) -> Machine {
        let heads = self.spec.value_heads;
        let (scan, summarise) = self.most_slabs();
        Machine {
            compute_units: self.compute_units,
            costs: &self.launch.costs,
            scan: heads * scan,
            summarise: heads * summarise,
            combine: heads * self.combine_slabs(),
            summary_bytes: self.summary_bytes(1),
        }
    }

    /// How the batch is cut: as the environment says, as the spec says, or at the least cost.
    pub(super) fn partition(&self, cu_seqlens: &[i32]) -> Checked<Partition> {
        let lengths = cu_seqlens.windows(2).map(|c| (c[1] - c[0]) as usize);
        let chunks: Vec<usize> = lengths.map(|n| n.div_ceil(CHUNK)).collect();
        let segments = match plan::segments_of_environment()?.or(self.spec.segments) {
            Some(segments) => segments,
            None => plan::choose(&chunks, &self.machine()),
        };
        let segment = plan::segment_chunks(&chunks, segments);
        self.check_grids(plan::counts(&chunks, segment))?;
        Ok(plan::cut(&chunks, segment))
    }

    pub(super) fn combine_slabs(&self) -> usize {
        self.spec.value_dim.div_ceil(COMBINE_COLUMNS)
    }

    /// Workgroups of prepare (one more slot for rows past the last sequence), summarise, combine and scan.
    pub(super) fn grids(&self, counts: Counts) -> [u64; 4] {
        let of_heads =
            |items: usize, slabs: usize| items as u64 * self.spec.value_heads as u64 * slabs as u64;
        [
            (self.slots() as u64 + 1) * (self.spec.key_heads * self.prepare_parts()) as u64,
            of_heads(counts.summaries, self.summarise_division(counts).slabs),
            of_heads(counts.chains as usize, self.combine_slabs()),
            of_heads(counts.items, self.scan_division(counts).slabs),
        ]
    }

    /// Value heads of a workgroup of prepare: all that read its key head, or fewer where the device has room for more
    /// workgroups beside each other, though each makes the products of q and k.
    fn prepare_heads(&self) -> usize {
        let group = self.spec.value_heads / self.spec.key_heads;
        let room = self.compute_units * self.launch.prepare_room;
        let parts = room / (self.slots() * self.spec.key_heads).max(1);
        group.div_ceil(parts.max(1))
    }

    /// Workgroups of prepare for a (chunk, key head).
    fn prepare_parts(&self) -> usize {
        (self.spec.value_heads / self.spec.key_heads).div_ceil(self.prepare_heads())
    }

    pub(super) fn record_bytes(&self) -> usize {
        self.slots() * self.spec.value_heads * RECORD_BYTES
    }

    /// N of every summary, and M or the initial state.
    pub(super) fn summary_bytes(&self, summaries: usize) -> usize {
        let PrefillSpec {
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.spec;
        let words = (value_dim + key_dim.max(value_dim)) * key_dim;
        summaries * value_heads * words * size_of::<f32>()
    }

    /// Where the parts of the workspace lie: the records and, if sequences are cut, N and M of the summaries, a bound for
    /// each record, a word for each summary and value head.
    pub(super) fn workspace(&self, counts: Counts) -> WorkspaceParts {
        let heads = self.spec.value_heads;
        let states = self.record_bytes();
        let retained = states + self.summary_bytes(counts.summaries);
        let cut = usize::from(counts.summaries > 0);
        let forgotten = retained + cut * self.slots() * heads * size_of::<f32>();
        WorkspaceParts {
            states,
            retained,
            forgotten,
            bytes: forgotten + counts.summaries * heads * size_of::<i32>(),
        }
    }

    /// Checks the tensors and makes the kernels' arguments. Touches no device.
    pub(super) fn lower(
        &self,
        x: &PrefillTensors<'_>,
        tables: Tables,
        plan: &PlanSlots,
        records: *mut c_void,
    ) -> Checked<Lowered> {
        let (cu_seqlens, counts) = (tables.cu_seqlens, tables.counts);
        let PrefillSpec {
            dtype,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.spec;
        let q_strides = check::tokens("q", &x.q, self.batch, key_heads, key_dim, &[dtype])?;
        let k_strides = check::tokens("k", &x.k, self.batch, key_heads, key_dim, &[dtype])?;
        let v_strides = check::tokens("v", &x.v, self.batch, value_heads, value_dim, &[dtype])?;
        let o_strides =
            check::output_tokens("o", &x.o.0, self.batch, value_heads, value_dim, &[dtype])?;

        let mut flags = 0;
        if self.spec.qk_l2norm {
            flags |= abi::DWK_QK_L2NORM;
        }
        if self.spec.head_map == HeadMap::Tiled {
            flags |= abi::DWK_TILED_HEADS;
        }
        let gates = x.gating.lower(value_heads, |_| self.batch)?;
        flags |= gates.flags;
        let parts = self.workspace(counts);
        let retained = match counts.summaries {
            0 => ptr::null_mut(),
            _ => records.wrapping_byte_add(parts.retained).cast(),
        };
        let mut prepare = dwk_prefill_prepare_args {
            q: x.q.0.address,
            k: x.k.0.address,
            o: x.o.0.0.address,
            cu_seqlens,
            records,
            retained,
            q_strides,
            k_strides,
            o_strides,
            sequences: self.sequences as i32,
            tokens: self.batch.rows() as i32,
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
            parts: self.prepare_parts() as i32,
            part_heads: self.prepare_heads() as i32,
            dies: self.dies as i32,
            ..Default::default()
        };

        let (scan_division, summarise_division) =
            (self.scan_division(counts), self.summarise_division(counts));
        let mut scan = dwk_prefill_scan_args {
            q: prepare.q,
            k: prepare.k,
            v: x.v.0.address,
            o: prepare.o,
            initial_state: ptr::null(),
            has_initial_state: ptr::null(),
            final_state: ptr::null_mut(),
            read_slots: ptr::null(),
            write_slots: ptr::null(),
            snapshots: ptr::null_mut(),
            snapshot_slots: ptr::null(),
            cu_seqlens,
            records,
            q_strides,
            k_strides,
            v_strides,
            o_strides,
            sequences: self.sequences as i32,
            key_heads: key_heads as i32,
            value_heads: value_heads as i32,
            key_dim: key_dim as i32,
            value_dim: value_dim as i32,
            scale: self.spec.scale(),
            slabs: scan_division.slabs as i32,
            tokens: self.batch.rows() as i32,
            items: tables.items,
            items_count: counts.items as i32,
            states: records.wrapping_byte_add(parts.states).cast(),
            retained,
            forgotten: records.wrapping_byte_add(parts.forgotten).cast(),
            summaries: counts.summaries as i32,
            dies: self.dies as i32,
            ..Default::default()
        };
        flags |= self.lower_states(x, plan, &mut scan)?;
        flags |= self.lower_snapshots(x, plan, &mut scan)?;
        prepare.flags = flags;
        [prepare.read_slots, prepare.write_slots] = [scan.read_slots, scan.write_slots];
        prepare.slots = scan.slots;
        scan.flags = flags;
        let [
            prepare_groups,
            summarise_groups,
            combine_groups,
            scan_groups,
        ] = self.grids(counts).map(|groups| groups as u32);
        // Segments that another follows are the first items.
        let summarise = dwk_prefill_scan_args {
            items_count: counts.summaries as i32,
            slabs: summarise_division.slabs as i32,
            ..scan
        };
        let combine = dwk_prefill_combine_args {
            states: scan.states,
            forgotten: scan.forgotten,
            chains: tables.chains,
            chains_count: counts.chains as i32,
            value_heads: value_heads as i32,
            key_dim: key_dim as i32,
            value_dim: value_dim as i32,
            slabs: self.combine_slabs() as i32,
            summaries: counts.summaries as i32,
            dies: self.dies as i32,
            pad0: 0,
        };
        Ok(Lowered {
            prepare,
            prepare_groups,
            summarise,
            summarise_groups,
            summarise_threads: summarise_division.threads,
            combine,
            combine_groups,
            scan,
            scan_groups,
            scan_threads: scan_division.threads,
        })
    }

    /// Every tensor whose context is known must be of `context`.
    pub(super) fn check_devices(x: &PrefillTensors<'_>, context: &Context) -> Checked<()> {
        check::device("q", &x.q.0.owner, context)?;
        check::device("k", &x.k.0.owner, context)?;
        check::device("v", &x.v.0.owner, context)?;
        check::device("o", &x.o.0.0.owner, context)?;
        x.gating.check_devices(context)?;
        states::check_devices(x, context)
    }

    /// Enqueues the kernels of a launch, or of a part of one.
    ///
    /// # Safety
    /// `lowered` was made for memory that is alive.
    pub(super) unsafe fn enqueue(
        &self,
        context: &Context,
        stream: &Stream,
        kernels: Kernels,
        lowered: &Lowered,
        part: Part,
    ) -> Result<()> {
        let wants = |kernel| part == Part::Whole || part == kernel;
        let x = lowered;
        let bucket = self.spec.key_bucket();
        // Kernel, workgroups and their threads.
        let prepare = (
            kernels.prepare,
            x.prepare_groups,
            self.launch.prepare_threads,
        );
        let summarise = (kernels.summarise, x.summarise_groups, x.summarise_threads);
        let combine = (kernels.combine, x.combine_groups, combine_threads(bucket));
        let scan = (kernels.scan, x.scan_groups, x.scan_threads);
        let to = (context, stream, part);
        // SAFETY: the caller answers for the memory; the arguments were checked when they were lowered.
        unsafe {
            if wants(Part::Prepare) {
                launch(to, prepare, &x.prepare)?;
            }
            if wants(Part::Summarise) && x.summarise_groups > 0 {
                launch(to, summarise, &x.summarise)?;
            }
            if wants(Part::Combine) && x.combine_groups > 0 {
                launch(to, combine, &x.combine)?;
            }
            if wants(Part::Scan) && x.scan_groups > 0 {
                launch(to, scan, &x.scan)?;
            }
        }
        Ok(())
    }
}

/// A kernel, the workgroups and their threads: after the kernels before it in a whole prefill, whose ends it overlaps, or
/// alone.
///
/// # Safety
/// As for [`Context::launch`].
unsafe fn launch<A>(
    (context, stream, part): (&Context, &Stream, Part),
    (kernel, workgroups, threads): (&str, u32, u32),
    arguments: &A,
) -> Result<()> {
    // SAFETY: the caller keeps the contract; every kernel of a prefill waits for the one before.
    unsafe {
        match part {
            Part::Whole => {
                context.launch_overlapping(stream, kernel, workgroups, threads, arguments)
            }
            _ => context.launch(stream, kernel, workgroups, threads, arguments),
        }
    }
}
