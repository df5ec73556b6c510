//! Checks tensors and computes the kernels' arguments and grids. Pure: uses no device.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

use hip_sys::{BoxedTensor, TensorMap};

use super::plan::{self, Counts};
use super::shape::Shape;
use super::states::{self, PlanSlots};
use super::{Part, PrefillTensors, snapshots};
use crate::abi::{
    self, dwk_prefill_by_gates, dwk_prefill_combine_args, dwk_prefill_fused_args, dwk_prefill_item,
    dwk_prefill_prepare_args, dwk_prefill_scan_args, dwk_prefill_short_args, dwk_state_strides,
    dwk_token_strides,
};
use crate::alias::{self, Span};
use crate::check::{self, Checked};
use crate::error::Result;
use crate::kernels::{self, Kernel};
use crate::model::Heads;
use crate::runtime::{Context, Stream};
use crate::state::States;
use crate::types::HeadMap;

/// Device addresses of the tables that kernels read: lengths, items and chains.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tables {
    pub(super) cu_seqlens: *const i32,
    /// Null: every sequence is one item.
    pub(super) items: *const dwk_prefill_item,
    pub(super) chains: *const i32,
    /// Sequences of `prefill_short`; null: all sequences.
    pub(super) short: *const i32,
    pub(super) counts: Counts,
}

/// The kernels of a prefill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    pub(super) prepare: Kernel<dwk_prefill_prepare_args>,
    pub(super) summarise: Kernel<dwk_prefill_scan_args>,
    pub(super) combine: Kernel<dwk_prefill_combine_args>,
    pub(super) scan: Kernel<dwk_prefill_scan_args>,
    /// Absent for key dimensions for which it is not compiled.
    pub(super) fused: Option<Kernel<dwk_prefill_fused_args>>,
    pub(super) fused_summarise: Option<Kernel<dwk_prefill_fused_args>>,
    /// Absent for key dimensions for which it is not compiled.
    pub(super) short: Option<Kernel<dwk_prefill_short_args>>,
}

impl Kernels {
    /// Name of the kernel of a part.
    pub(super) fn name_of(&self, part: Part) -> Option<&'static str> {
        match part {
            Part::Whole => None,
            Part::Lengths => Some(kernels::prefill_lengths().name()),
            Part::Prepare => Some(self.prepare.name()),
            Part::Summarise => Some(self.summarise.name()),
            Part::Combine => Some(self.combine.name()),
            Part::Scan => Some(self.scan.name()),
            Part::Fused => self.fused.map(Kernel::name),
            Part::FusedSummarise => self.fused_summarise.map(Kernel::name),
            Part::Short => self.short.map(Kernel::name),
        }
    }
}

/// Summaries that a rank makes of its blocks, in memory that the caller sends.
pub(super) struct SentSummaries {
    /// `[count]`: blocks that another follows.
    pub(super) items: *const dwk_prefill_item,
    pub(super) count: usize,
    /// Chunks of the longest block.
    pub(super) longest_chunks: u32,
    pub(super) states: *mut c_void,
    pub(super) forgotten: *mut c_void,
}

/// Launch arguments of all kernels, with their grids. Kernels with an empty grid are not launched.
pub(crate) struct LaunchArguments {
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
    /// Of `scan` and `summarise`, where they take them; made when one of both is launched first.
    maps: OnceLock<TensorMaps>,
    short: dwk_prefill_short_args,
    short_groups: u32,
    /// `prefill_fused`, where it has the arguments above: on the fused path.
    fused: FusedArguments,
}

/// Descriptions of q, k, v and states for the copy engine of NVIDIA GPUs (TMA).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TensorMaps {
    tensors: [TensorMap; 5],
    /// Bits: [`Self::TOKENS`], [`Self::FINAL_STATE`], [`Self::INITIAL_STATE`]. Without a bit, threads of the kernels move
    /// that data themselves, which works for any strides.
    usable: u32,
    /// Tokens of each sequence in a tensor with a stride for sequences.
    sequence_tokens: u32,
}

const _: () = assert!(size_of::<TensorMaps>() == abi::DWK_MAPS_BYTES as usize);

impl TensorMaps {
    /// q, k and v are described.
    const TOKENS: u32 = 1;
    /// The final state is described.
    const FINAL_STATE: u32 = 2;
    /// The initial state is described.
    const INITIAL_STATE: u32 = 4;

    fn new(x: &dwk_prefill_scan_args, context: &Context) -> TensorMaps {
        let mut maps = TensorMaps::default();
        let tokens = || {
            Some([
                Self::of_tokens(x, context, x.q, x.q_strides, [x.key_heads, x.key_dim])?,
                Self::of_tokens(x, context, x.k, x.k_strides, [x.key_heads, x.key_dim])?,
                Self::of_tokens(x, context, x.v, x.v_strides, [x.value_heads, x.value_dim])?,
            ])
        };
        if let Some(tensors) = tokens() {
            maps.tensors[..3].copy_from_slice(&tensors);
            maps.usable |= Self::TOKENS;
            maps.sequence_tokens = Self::sequence_tokens(x) as u32;
        }
        let states = [
            (
                Self::INITIAL_STATE,
                x.initial_state,
                x.initial_type,
                x.initial_strides,
                abi::DWK_INITIAL_VALUE_MAJOR,
            ),
            (
                Self::FINAL_STATE,
                x.final_state.cast_const(),
                x.final_type,
                x.final_strides,
                abi::DWK_FINAL_VALUE_MAJOR,
            ),
        ];
        for (map, (bit, address, dtype, strides, flag)) in maps.tensors[3..].iter_mut().zip(states)
        {
            let value_major = x.flags & flag != 0;
            if let Some(state) = Self::of_state(x, context, address, dtype, strides, value_major) {
                *map = state;
                maps.usable |= bit;
            }
        }
        maps
    }

    fn sequence_tokens(x: &dwk_prefill_scan_args) -> i32 {
        x.tokens.checked_div(x.sequences).unwrap_or(0)
    }

    /// q, k or v in boxes of 64 tokens and 64 columns of a head.
    fn of_tokens(
        x: &dwk_prefill_scan_args,
        context: &Context,
        address: *const c_void,
        strides: dwk_token_strides,
        [heads, columns]: [i32; 2],
    ) -> Option<TensorMap> {
        // A tensor without a stride for sequences is one sequence of all tokens.
        let (tokens, sequences) = match strides.sequence {
            0 => (x.tokens, 1),
            _ => (Self::sequence_tokens(x), x.sequences),
        };
        let sequence_stride = strides.sequence + i64::from(tokens) * strides.token;
        Self::describe(
            context,
            2,
            address,
            columns,
            [
                (heads, strides.head),
                (tokens, strides.token),
                (sequences, sequence_stride),
            ],
            [1, 64, 1],
        )
    }

    /// A state in boxes of 32 columns of 128 keys or, if it is value-major, of 32 keys of 64 columns. Only f32.
    fn of_state(
        x: &dwk_prefill_scan_args,
        context: &Context,
        address: *const c_void,
        dtype: i32,
        strides: dwk_state_strides,
        value_major: bool,
    ) -> Option<TensorMap> {
        if address.is_null() || dtype != abi::DWK_F32 as i32 {
            return None;
        }
        let (columns, rows, rows_of_box) = match value_major {
            true => (x.key_dim, x.value_dim, 64),
            false => (x.value_dim, x.key_dim, 128),
        };
        let slots = if x.slots > 0 { x.slots } else { x.sequences };
        Self::describe(
            context,
            4,
            address,
            columns,
            [
                (rows, strides.row),
                (x.value_heads, strides.head),
                (slots, strides.sequence),
            ],
            [rows_of_box, 1, 1],
        )
    }

    /// A tensor of contiguous rows of `columns`; `outer`: elements and stride, in elements, of each other dimension.
    fn describe(
        context: &Context,
        element_bytes: u32,
        address: *const c_void,
        columns: i32,
        outer: [(i32, i64); 3],
        of_box: [u32; 3],
    ) -> Option<TensorMap> {
        let mut tensor = BoxedTensor {
            element_bytes,
            address,
            dimensions: [columns as u64, 0, 0, 0],
            strides: [0; 3],
            of_box,
        };
        for (i, (count, stride)) in outer.into_iter().enumerate() {
            tensor.dimensions[i + 1] = count as u64;
            // A dimension of one element may have any stride.
            tensor.strides[i] = match count {
                1 => 16,
                _ => u64::try_from(i64::from(element_bytes) * stride).ok()?,
            };
        }
        context.hip().tensor_map(&tensor)
    }
}

/// Waves of a workgroup of `prefill_fused` that prepare a chunk each, where its chunks are few.
const PREPARING_WAVES: u32 = 4;

/// Arguments of `prefill_fused`, whose grid may be empty.
struct FusedArguments {
    prepare: dwk_prefill_prepare_args,
    scan: dwk_prefill_scan_args,
    groups: u32,
    /// Whether it runs before the kernels of the split path: gates or lengths on the device choose.
    first: bool,
    /// The split path's list, where lengths choose, and workgroups that prepare its chunks.
    split_items: *const dwk_prefill_item,
    preparing_groups: u32,
    by_gates: dwk_prefill_by_gates,
    warm_up: i32,
    /// Workgroups that walk several units of work each; 0: a workgroup for each unit.
    walkers: u32,
}

/// States that a launch saves for the backward, as snapshots.
pub(super) struct LoweredSave {
    pub(super) to: *mut c_void,
    pub(super) slots: *const i32,
    pub(super) strides: dwk_state_strides,
    pub(super) count: i32,
    pub(super) span: Span<'static>,
}

impl LaunchArguments {
    /// Lets every kernel that walks chunks save states. The launch has no other snapshots.
    pub(super) fn save(&mut self, save: &LoweredSave) {
        let walks = [
            &mut self.scan,
            &mut self.summarise,
            &mut self.short.scan,
            &mut self.fused.scan,
        ];
        for scan in walks {
            scan.snapshots = save.to;
            scan.snapshot_slots = save.slots;
            scan.snapshot_strides = save.strides;
            scan.snapshot_type = abi::DWK_F32 as i32;
            scan.snapshot_count = save.count;
        }
    }

    /// Launches `prefill_fused` in place of `prefill_prepare`, with the arguments of `fused`. It does the work of one of
    /// both, as the lists that the device made say. `compute_units`, `dies`: of the device.
    pub(super) fn choose(
        &mut self,
        fused: LaunchArguments,
        split_items: *const dwk_prefill_item,
        device: (u32, u32),
    ) {
        self.put_first(fused, device);
        self.fused.split_items = split_items;
    }

    /// Launches `prefill_fused`, with the arguments of `fused`, before `prefill_scan` or in place of it, if final states do
    /// not `wait` for that.
    pub(super) fn put_before_scan(&mut self, fused: LaunchArguments, wait: bool) {
        self.fused = FusedArguments {
            first: true,
            ..fused.fused
        };
        // Its workspace has no records.
        self.scan.states = self.fused.scan.states;
        self.short = fused.short;
        self.short_groups = fused.short_groups;
        self.prepare_groups = 0;
        self.summarise_groups = 0;
        self.combine_groups = 0;
        if !wait {
            self.scan_groups = 0;
        }
    }

    /// Lets `prefill_fused` choose by the gates. It leaves to the other kernels their lists, or empty ones.
    pub(super) fn by_gates(&mut self, by_gates: dwk_prefill_by_gates) {
        // Its segments of a sequence are no units of a workgroup that walks several.
        debug_assert_eq!(self.fused.walkers, 0);
        self.fused.by_gates = by_gates;
    }

    /// Lets final states of up to `count` sequences that `prefill_fused` cuts wait in place of summaries for `prefill_scan`.
    pub(super) fn let_states_wait(&mut self, count: usize) {
        let fused = &mut self.fused.scan;
        fused.states = self.scan.states;
        fused.summaries = count as i32;
        fused.flags |= abi::DWK_DEFERS_STATES;
        self.scan.summaries = self.scan.summaries.max(count as i32);
    }

    fn put_first(&mut self, fused: LaunchArguments, (compute_units, dies): (u32, u32)) {
        // A wave on each SIMD, more only where all compute units have work.
        let preparing = self.prepare_groups.div_ceil(PREPARING_WAVES);
        let preparing_groups = preparing.min(compute_units).next_multiple_of(dies);
        self.fused = FusedArguments {
            prepare: self.prepare,
            first: true,
            preparing_groups,
            groups: fused.fused.groups.max(preparing_groups),
            ..fused.fused
        };
        self.prepare_groups = 0;
    }

    /// Where combine and scan read summaries, and the flags of those.
    pub(super) fn summaries(&self) -> (*mut f32, *mut i32) {
        (self.scan.states, self.scan.forgotten)
    }
}

impl Shape {
    /// Checks the tensors and returns the launch arguments.
    pub(super) fn lower(
        &self,
        x: &PrefillTensors<'_>,
        tables: Tables,
        plan: &PlanSlots,
        records: *mut c_void,
    ) -> Checked<LaunchArguments> {
        let (cu_seqlens, counts) = (tables.cu_seqlens, tables.counts);
        let dtype = self.spec.dtype;
        let Heads {
            key: key_heads,
            value: value_heads,
            key_dim,
            value_dim,
            map,
        } = self.spec.heads;
        let q_strides = check::tokens("q", &x.q, self.batch, key_heads, key_dim, &[dtype])?;
        let k_strides = check::tokens("k", &x.k, self.batch, key_heads, key_dim, &[dtype])?;
        let v_strides = check::tokens("v", &x.v, self.batch, value_heads, value_dim, &[dtype])?;
        let o_strides =
            check::output_tokens("o", &x.o.0, self.batch, value_heads, value_dim, &[dtype])?;

        let mut flags = 0;
        if self.spec.qk_l2norm {
            flags |= abi::DWK_QK_L2NORM;
        }
        if map == HeadMap::Tiled {
            flags |= abi::DWK_TILED_HEADS;
        }
        let gates = x.gating.lower(value_heads, |_| self.batch)?;
        flags |= gates.flags;
        let parts = self.workspace(counts);
        let retained = match counts.summaries {
            _ if self.is_fused() => ptr::null_mut(),
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
            head_groups: self.prepare_head_groups() as i32,
            group_heads: self.prepare_heads() as i32,
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
            slabs: self.walk_slabs(counts) as i32,
            tokens: self.batch.rows() as i32,
            items: tables.items,
            items_count: counts.items as i32,
            states: records.wrapping_byte_add(parts.states).cast(),
            retained,
            forgotten: records.wrapping_byte_add(parts.forgotten).cast(),
            summaries: counts.summaries as i32,
            pieces: counts.pieces as i32,
            dies: self.dies as i32,
            ..Default::default()
        };
        flags |= states::lower(self, x, plan, &mut scan)?;
        flags |= snapshots::lower(self, x, plan, &mut scan)?;
        prepare.flags = flags;
        [prepare.read_slots, prepare.write_slots] = [scan.read_slots, scan.write_slots];
        prepare.slots = scan.slots;
        scan.flags = flags;
        let starts_early = self.starts_early(counts, x);
        if starts_early {
            scan.summaries = 0;
        }
        if self.may_start_early(x) {
            // Lists that the device makes say whether each sequence has at most two segments.
            scan.flags |= abi::DWK_STARTS_EARLY;
        }
        if self.is_from_hbm(counts) {
            scan.flags |= abi::DWK_FROM_HBM;
        }
        if counts.short > 0 {
            [prepare.least_tokens, scan.least_tokens] = [plan::SHORT_TOKENS as i32 + 1; 2];
        }
        let short = dwk_prefill_short_args {
            prepare,
            scan: dwk_prefill_scan_args {
                items: ptr::null(),
                items_count: counts.short as i32,
                slabs: self.short_slabs() as i32,
                ..scan
            },
            items: tables.short,
            clears: i32::from(counts.only_short()),
            pad0: 0,
        };
        let short_groups = counts.short * value_heads * self.short_slabs();
        let [
            prepare_groups,
            summarise_groups,
            combine_groups,
            scan_groups,
        ] = self.grids(counts).map(|groups| groups as u32);
        let walkers = self.fused_walkers(counts, scan_groups);
        let scan_workgroups = self.scan_workgroups(counts, scan_division.threads, scan_groups);
        if counts.summaries > 0 && self.starts_soon() {
            if !Shape::overwrites_v(x) {
                scan.flags |= abi::DWK_STARTS_SOON;
            }
            if Shape::keeps_initial_states(&x.states) {
                scan.flags |= abi::DWK_KEEPS_STATES;
            }
        }
        let [summarise_groups, combine_groups] =
            self.summary_workgroups([summarise_groups, combine_groups]);
        if self.scan_chains(counts) {
            scan.flags |= abi::DWK_CHAINS;
        }
        // Segments that another segment follows come first in the items. Units of work are their pieces.
        let summarise = dwk_prefill_scan_args {
            items_count: counts.summaries as i32,
            slabs: self.summarise_slabs(counts) as i32,
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
        Ok(LaunchArguments {
            prepare,
            prepare_groups: match counts.only_short() {
                true => 0,
                false => prepare_groups,
            },
            summarise,
            summarise_groups: if starts_early { 0 } else { summarise_groups },
            summarise_threads: summarise_division.threads,
            combine,
            combine_groups,
            scan,
            scan_groups: scan_workgroups,
            scan_threads: scan_division.threads,
            maps: OnceLock::new(),
            short,
            short_groups: short_groups as u32,
            fused: FusedArguments {
                prepare,
                scan,
                groups: match (self.is_fused(), walkers) {
                    (false, _) => 0,
                    (true, 0) => scan_groups,
                    (true, walkers) => walkers,
                },
                first: false,
                split_items: ptr::null(),
                preparing_groups: 0,
                by_gates: dwk_prefill_by_gates::default(),
                warm_up: match Shape::overwrites_v(x) {
                    true => 0,
                    false => self.target.fused_costs.most_warm_up,
                },
                walkers,
            },
        })
    }

    /// Checks that every tensor with a known context belongs to `context`.
    pub(super) fn check_devices(x: &PrefillTensors<'_>, context: &Context) -> Checked<()> {
        check::device("q", &x.q.0.owner, context)?;
        check::device("k", &x.k.0.owner, context)?;
        check::device("v", &x.v.0.owner, context)?;
        check::device("o", &x.o.0.0.owner, context)?;
        x.gating.check_devices(context)?;
        states::check_devices(x, context)
    }

    /// Lets summarise make the summaries that a rank sends, in place of those that combine and scan read.
    pub(super) fn send(&self, lowered: &mut LaunchArguments, sent: &SentSummaries) {
        let counts = Counts {
            items: sent.count,
            summaries: sent.count,
            pieces: 1,
            chains: 0,
            longest_chunks: sent.longest_chunks,
            even: false,
            short: 0,
        };
        lowered.summarise = dwk_prefill_scan_args {
            items: sent.items,
            items_count: sent.count as i32,
            slabs: self.summarise_slabs(counts) as i32,
            states: sent.states.cast(),
            forgotten: sent.forgotten.cast(),
            summaries: sent.count as i32,
            pieces: 1,
            ..lowered.scan
        };
        lowered.summarise_groups = self.grids(counts)[1] as u32;
        lowered.summarise_threads = self.summarise_division(counts).threads;
    }

    /// Enqueues all kernels of a launch, or one part.
    ///
    /// # Safety
    /// All memory in `lowered` is still allocated.
    pub(super) unsafe fn enqueue(
        &self,
        context: &Context,
        stream: &Stream,
        kernels: Kernels,
        lowered: &LaunchArguments,
        part: Part,
    ) -> Result<()> {
        let wants = |kernel| part == Part::Whole || part == kernel;
        let x = lowered;
        // (kernel, workgroups, threads per workgroup)
        let prepare = (
            kernels.prepare,
            x.prepare_groups,
            self.target.threads(kernels.prepare.role()),
        );
        let summarise = (kernels.summarise, x.summarise_groups, x.summarise_threads);
        let combine = (
            kernels.combine,
            x.combine_groups,
            self.target.threads(kernels.combine.role()),
        );
        let scan = (kernels.scan, x.scan_groups, x.scan_threads);
        let to = (context, stream, part);
        let maps = |role| match self.target.second_argument_bytes(role) {
            0 => Context::no_maps(),
            _ => ptr::from_ref(x.maps.get_or_init(|| TensorMaps::new(&x.scan, context))).cast(),
        };
        let args = |prepare, scan| dwk_prefill_fused_args {
            prepare,
            scan,
            split_items: x.fused.split_items,
            preparing_groups: x.fused.preparing_groups as i32,
            warm_up: x.fused.warm_up,
            by_gates: x.fused.by_gates,
            walkers: x.fused.walkers as i32,
            pad0: 0,
        };
        let fused = || {
            let Some(kernel) = kernels.fused.filter(|_| wants(Part::Fused)) else {
                return Ok(());
            };
            if x.fused.groups == 0 {
                return Ok(());
            }
            let threads = self.target.threads(kernel.role());
            let args = args(x.fused.prepare, x.fused.scan);
            // SAFETY: the caller vouches for the memory; `lower` checked the arguments.
            unsafe { launch(to, (kernel, x.fused.groups, threads), &args) }
        };
        // SAFETY: the caller vouches for the memory; `lower` checked the arguments.
        unsafe {
            if let Some(short) = kernels.short
                && wants(Part::Short)
                && x.short_groups > 0
            {
                let threads = self.target.threads(short.role());
                launch(to, (short, x.short_groups, threads), &x.short)?;
            }
            if x.fused.first {
                fused()?;
            }
            let split = !self.is_fused();
            let scan_runs = split || x.fused.first; // final states may wait for it
            if wants(Part::Prepare) && split && x.prepare_groups > 0 {
                launch(to, prepare, &x.prepare)?;
            }
            if wants(Part::Summarise) && split && x.summarise_groups > 0 {
                launch_with(to, summarise, &x.summarise, maps(kernels.summarise.role()))?;
            }
            if let Some(kernel) = kernels.fused_summarise
                && wants(Part::FusedSummarise)
                && !split
                && x.summarise_groups > 0
            {
                let threads = self.target.threads(kernel.role());
                let args = args(x.prepare, x.summarise);
                launch(to, (kernel, x.summarise_groups, threads), &args)?;
            }
            if wants(Part::Combine) && x.combine_groups > 0 {
                launch(to, combine, &x.combine)?;
            }
            if wants(Part::Scan) && scan_runs && x.scan_groups > 0 {
                launch_with(to, scan, &x.scan, maps(kernels.scan.role()))?;
            }
            if !x.fused.first {
                fused()?;
            }
        }
        Ok(())
    }
}

/// Launches a kernel with a number of workgroups and threads. In a whole prefill it overlaps the end of the kernel
/// before.
///
/// # Safety
/// As for [`Context::launch`].
unsafe fn launch<A>(
    to: (&Context, &Stream, Part),
    kernel: (Kernel<A>, u32, u32),
    arguments: &A,
) -> Result<()> {
    // SAFETY: the caller keeps the contract.
    unsafe { launch_with(to, kernel, arguments, Context::no_maps()) }
}

/// The same for a kernel that may take maps.
///
/// # Safety
/// As for [`Context::launch_with`].
unsafe fn launch_with<A>(
    (context, stream, part): (&Context, &Stream, Part),
    (kernel, workgroups, threads): (Kernel<A>, u32, u32),
    arguments: &A,
    maps: *const c_void,
) -> Result<()> {
    // SAFETY: the caller keeps the contract; every kernel of a prefill waits for the kernel before.
    unsafe {
        match part {
            Part::Whole => {
                context.launch_overlapping(stream, kernel, workgroups, threads, arguments, maps)
            }
            _ => context.launch_with(stream, kernel, workgroups, threads, arguments, maps),
        }
    }
}

/// Checks that no output shares memory with another argument. o may be v: a workgroup reads elements of v before it
/// writes the same elements of o. The final state may be the initial state. `output`, `first` and `second` are one more
/// output and two more inputs.
pub(super) fn check_overlaps(
    x: &PrefillTensors<'_>,
    workspace: Span<'_>,
    output: Span<'_>,
    [first, second]: [Span<'_>; 2],
) -> Checked<()> {
    let pool = x.states.pool();
    let (initial, last, has_initial_state) = match &x.states {
        States::None => (None, None, None),
        States::Separate { initial, last } => {
            let has = initial.as_ref().and_then(|i| i.has_initial_state.as_ref());
            (initial.as_ref().map(|i| &i.state), last.as_ref(), has)
        }
        States::Pool {
            has_initial_state, ..
        } => (None, None, has_initial_state.as_ref()),
    };
    let snapshots = x.snapshots.as_ref();
    let to = snapshots.and_then(|s| s.to.as_ref());
    let outputs = [
        Span::of("o", &x.o.0.0),
        Span::maybe("snapshots", to.map(|to| &to.tensor.0)),
        Span::maybe("final_state", last.map(|s| &s.tensor.0)),
        Span::maybe("pool", pool.map(|p| &p.tensor.0)),
        workspace,
        output,
    ];
    let [g, beta, a_log, dt_bias] = x.gating.spans();
    let inputs = [
        Span::of("q", &x.q.0),
        Span::of("k", &x.k.0),
        Span::of("v", &x.v.0),
        g,
        beta,
        a_log,
        dt_bias,
        Span::maybe("initial_state", initial.map(|s| &s.tensor)),
        Span::numbers("has_initial_state", has_initial_state),
        Span::numbers("slots", pool.and_then(|p| p.slots.as_ref())),
        Span::numbers("write_slots", pool.and_then(|p| p.write_slots.as_ref())),
        Span::numbers("snapshot_slots", snapshots.and_then(|s| s.slots.as_ref())),
        Span::lengths(x.cu_seqlens.as_ref()),
        first,
        second,
    ];
    let same = [("o", "v"), ("final_state", "initial_state")];
    let same = match initial.map(|s| s.layout) == last.map(|s| s.layout) {
        true => &same[..],
        false => &same[..1],
    };
    alias::check(&outputs, &inputs, same)
}
