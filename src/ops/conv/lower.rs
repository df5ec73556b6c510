//! Checks tensors and computes the kernel's arguments and grid. Pure: uses no device.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use super::{Activation, ConvSpec, ConvState, ConvStateLayout, ConvTensors, MAX_NORM_DIM, WIDTHS};
use crate::abi::{self, dwk_conv_args, dwk_conv_draft_args, dwk_conv_lengths_args, dwk_conv_part};
use crate::alias::{self, Span};
use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::gate;
use crate::kernels::{self, Kernel};
use crate::runtime::Context;
use crate::tensor::{Batch, Tensor, TensorMut, TokensMut};
use crate::types::Dtype;

/// Threads of a workgroup.
pub(super) const THREADS: u32 = 256;
/// Channels of a thread.
const OCTET: usize = 8;
/// Most channels in total, so that channel indices stay far below 2^31.
const MAX_CHANNELS: usize = 1 << 24;
/// Most tokens of a thread where there are no more tokens than sequences.
const DECODES_RUN: u32 = 32;
/// Log2 of the least tokens of a thread: the number that it loads at once.
const SHORTEST_RUN_LOG2: u32 = 2;
/// Most workgroups that compute gates. Few suffice: they start first and run while the others convolve.
const MOST_GATE_GROUPS: u32 = 64;
/// Workgroups that check lengths, if they do.
pub(super) const LENGTHS_GROUPS: u32 = 1;
/// Log2 of the most runs of a block of tokens.
const MOST_RUNS_LOG2: u32 = 4;

/// Properties of a batch that decide the launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) spec: ConvSpec,
    pub(super) tokens: usize,
    pub(super) sequences: usize,
    /// Conv states are read and not written.
    pub(super) keeps_states: bool,
    lane_group: LaneGroup,
    division: Division,
}

/// Adjacent threads that share a head of q or k and sum its squares. Without norms each thread is on its own (`log2`
/// 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LaneGroup {
    log2: u32,
    /// Threads that share a token's channels of q, k and v.
    lanes: [usize; 3],
}

impl LaneGroup {
    fn new(spec: &ConvSpec) -> Self {
        let octets = |n: usize| n.div_ceil(OCTET);
        let [q, k, v] = spec.channels();
        if !spec.qk_l2norm {
            let lanes = [q, k, v].map(octets);
            return LaneGroup { log2: 0, lanes };
        }
        let log2 = if octets(spec.heads.key_dim) <= 16 {
            4
        } else {
            5
        };
        let keys = spec.heads.key << log2;
        // Multiples of a lane group, so that no group crosses a wave.
        let lanes = [keys, keys, octets(v).next_multiple_of(1 << log2)];
        LaneGroup { log2, lanes }
    }
}

/// Division of tokens and channels among threads and workgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Log2 of tokens per thread.
    run_log2: u32,
    /// Log2 of tokens per block; a block has `groups` workgroups.
    block_log2: u32,
    groups: u32,
    /// Dies of the device. Workgroups of adjacent tokens, which both read some rows, go to one die and share its cache.
    dies: u32,
    /// Workgroups of the launch, rounded up to a multiple of the dies.
    grid: u64,
}

/// Launch arguments: the kernel's argument struct and grid.
pub(crate) struct LaunchArguments {
    pub(super) arguments: dwk_conv_args,
    pub(super) groups: u32,
}

impl Division {
    /// Chooses runs per block so that few threads are idle, then shortens runs until every compute unit has work.
    fn new(
        lanes: usize,
        tokens: usize,
        sequences: usize,
        [compute_units, dies]: [u32; 2],
        longest_run: u32,
    ) -> Self {
        let groups = |runs_log2: u32| (lanes << runs_log2).div_ceil(THREADS as usize);
        let idle = |runs_log2: &u32| groups(*runs_log2) * THREADS as usize - (lanes << runs_log2);
        // Idle threads in sixteenths, rounded down.
        let share =
            |runs_log2: &u32| 16 * idle(runs_log2) / (groups(*runs_log2) * THREADS as usize);
        let runs_log2 = (0..=MOST_RUNS_LOG2).min_by_key(share).unwrap_or(0);
        let of_run = |run_log2: u32| {
            let block_log2 = run_log2 + runs_log2;
            // Most blocks that the sequences can have, and blocks of the rows past them.
            let blocks = (tokens >> block_log2) as u64 + sequences as u64 + 1;
            Division {
                run_log2,
                block_log2,
                groups: groups(runs_log2) as u32,
                dies,
                grid: (blocks * groups(runs_log2) as u64).next_multiple_of(dies.into()),
            }
        };
        // As if all tokens were of one sequence: many sequences of one token would leave few workgroups for a long one
        // beside them. In a step of decodes each token is a block, whatever the run, and long runs make the fewest others.
        let decodes = tokens <= sequences;
        let enough = |d: &Division| {
            let as_one = ((tokens >> d.block_log2) as u64 + 2) * u64::from(d.groups);
            let workgroups = if decodes { d.grid } else { as_one };
            workgroups >= 2 * u64::from(compute_units)
        };
        // A plan for decodes may be used for one long sequence.
        let longest_run = match decodes {
            true => longest_run.min(DECODES_RUN),
            false => longest_run,
        };
        let longer = (SHORTEST_RUN_LOG2 + 1..=longest_run.ilog2()).rev();
        let found = longer.map(of_run).find(enough);
        found.unwrap_or_else(|| of_run(SHORTEST_RUN_LOG2))
    }
}

/// Checks that there is a key head, and that value heads are a multiple of key heads.
pub(super) fn check_heads(spec: &ConvSpec) -> Checked<()> {
    for (name, number) in [
        ("key_heads", spec.heads.key),
        ("key_dim", spec.heads.key_dim),
        ("value_heads", spec.heads.value),
        ("value_dim", spec.heads.value_dim),
    ] {
        check::ensure(number > 0, || {
            ArgumentError::new(name, ArgumentKind::Shape, number, "it must be at least 1")
        })?;
    }
    check::ensure(spec.heads.value.is_multiple_of(spec.heads.key), || {
        let allowed = format!("it must be a multiple of the {} key heads", spec.heads.key);
        let was = spec.heads.value;
        ArgumentError::new("value_heads", ArgumentKind::Shape, was, allowed)
    })
}

/// Weights and biases as kernel arguments.
pub(super) struct Weights {
    pub(super) weight: *const c_void,
    pub(super) bias: *const c_void,
    /// Strides of channels and taps.
    pub(super) strides: [i64; 2],
    pub(super) bias_stride: i64,
    /// Types of weight and bias.
    pub(super) types: [i32; 2],
}

impl Weights {
    /// Checks the tensors.
    pub(super) fn new(
        spec: &ConvSpec,
        weight: &Tensor<'_, 2>,
        bias: Option<&Tensor<'_, 1>>,
    ) -> Checked<Self> {
        let channels = spec.total_channels();
        let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        check::dtype("weight", weight.dtype, &any)?;
        check_shape("weight", &weight.shape, &[channels, spec.width])?;
        check::pointer("weight", weight.address, weight.dtype.size(), false)?;
        let strides = check::element_strides("weight", weight.strides)?;
        let bias_stride = match bias {
            Some(bias) => {
                check::dtype("bias", bias.dtype, &any)?;
                check_shape("bias", &bias.shape, &[channels])?;
                check::pointer("bias", bias.address, bias.dtype.size(), false)?;
                check::element_strides("bias", bias.strides)?[0]
            }
            None => 0,
        };
        Ok(Weights {
            weight: weight.address.cast_const(),
            bias: bias.map_or(ptr::null(), |t| t.address.cast_const()),
            strides,
            bias_stride,
            types: [
                check::type_code(weight.dtype),
                bias.map_or(0, |t| check::type_code(t.dtype)),
            ],
        })
    }
}

impl Shape {
    /// Threads that share a token's channels of q, k and v.
    pub(super) fn lanes(&self) -> [usize; 3] {
        self.lane_group.lanes
    }

    /// Log2 of the threads of a head of q or k, with norms.
    pub(super) fn lane_group_log2(&self) -> u32 {
        self.lane_group.log2
    }

    pub(super) fn new(
        spec: ConvSpec,
        tokens: usize,
        sequences: usize,
        context: &Context,
    ) -> Checked<Shape> {
        check::dtype("dtype", spec.dtype, &[Dtype::Bf16, Dtype::F16])?;
        check_heads(&spec)?;
        check::ensure(spec.total_channels() <= MAX_CHANNELS, || {
            let was = format!("{} channels", spec.total_channels());
            let allowed = format!("at most {MAX_CHANNELS} in q, k and v");
            ArgumentError::new("heads and dims", ArgumentKind::Shape, was, allowed)
        })?;
        check::ensure(WIDTHS.contains(&spec.width), || {
            let allowed = format!("it must be from {} to {}", WIDTHS.start(), WIDTHS.end());
            ArgumentError::new("width", ArgumentKind::Shape, spec.width, allowed)
        })?;
        // Workgroups past the last block (fewer than the dies) compute token numbers beyond the batch.
        let longest_run = context.target().conv_longest_run;
        let beyond = 32 * (longest_run << MOST_RUNS_LOG2) as usize;
        let most_tokens = i32::MAX as usize - beyond;
        check::ensure(tokens <= most_tokens, || {
            let allowed = format!("at most {most_tokens} tokens");
            ArgumentError::new("tokens", ArgumentKind::Shape, tokens, allowed)
        })?;
        check::ensure(sequences < 1 << 24, || {
            let allowed = "fewer than 2^24 sequences";
            ArgumentError::new("sequences", ArgumentKind::Lengths, sequences, allowed)
        })?;
        check::ensure(
            !spec.qk_l2norm || spec.heads.key_dim <= MAX_NORM_DIM,
            || {
                let allowed = format!("at most {MAX_NORM_DIM} with norms");
                ArgumentError::new("key_dim", ArgumentKind::Shape, spec.heads.key_dim, allowed)
            },
        )?;
        let lane_group = LaneGroup::new(&spec);
        let lanes = lane_group.lanes.iter().sum();
        let device = [context.device().compute_units, context.dies()];
        let division = Division::new(lanes, tokens, sequences, device, longest_run);
        check::ensure(division.grid < 1 << 24, || {
            let was = format!(
                "{tokens} tokens, {sequences} sequences, {} channels",
                spec.total_channels()
            );
            let allowed = "a launch must have fewer than 2^32 threads";
            let argument = "tokens, sequences and heads";
            ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
        })?;
        Ok(Shape {
            spec,
            tokens,
            sequences,
            keeps_states: false,
            lane_group,
            division,
        })
    }

    pub(super) fn kernel(&self) -> Kernel<dwk_conv_args> {
        kernels::conv(self.spec.dtype)
    }

    /// The kernel whose first workgroup checks lengths.
    pub(super) fn lengths_kernel(&self) -> Kernel<dwk_conv_lengths_args> {
        kernels::conv_lengths(self.spec.dtype)
    }

    /// The kernel for drafts.
    pub(super) fn draft_kernel(&self) -> Kernel<dwk_conv_draft_args> {
        kernels::conv_draft(self.spec.dtype)
    }

    /// Checks the tensors and returns the launch arguments. `cu_seqlens`: address, and whether entries have 64 bits.
    /// `slot_columns`: entries of `slots` for each sequence.
    pub(super) fn lower(
        &self,
        x: &ConvTensors<'_>,
        (cu_seqlens, wide): (*const c_void, bool),
        slot_columns: usize,
    ) -> Checked<LaunchArguments> {
        let spec = &self.spec;
        let weights = Weights::new(spec, &x.weight, x.bias.as_ref())?;
        let (key_heads, value_heads) = (spec.heads.key, spec.heads.value);
        let (key_dim, value_dim) = (spec.heads.key_dim, spec.heads.value_dim);
        let flag = |set: bool, bit| if set { bit } else { 0 };
        let mut arguments = dwk_conv_args {
            q: self.part(["x.q", "q"], &x.x.q, &x.q, key_heads, key_dim)?,
            k: self.part(["x.k", "k"], &x.x.k, &x.k, key_heads, key_dim)?,
            v: self.part(["x.v", "v"], &x.x.v, &x.v, value_heads, value_dim)?,
            weight: weights.weight,
            bias: weights.bias,
            slots: match &x.slots {
                Some(slots) => slots.checked("slots", self.sequences * slot_columns)?,
                None => ptr::null(),
            },
            cu_seqlens,
            weight_channel: weights.strides[0],
            weight_tap: weights.strides[1],
            bias_stride: weights.bias_stride,
            tokens: self.tokens as i32,
            sequences: self.sequences as i32,
            width: spec.width as i32,
            weight_type: weights.types[0],
            bias_type: weights.types[1],
            run_log2: self.division.run_log2 as i32,
            block_log2: self.division.block_log2 as i32,
            groups: self.division.groups as i32,
            dies: self.division.dies as i32,
            die_groups: (self.division.grid / u64::from(self.division.dies)) as i32,
            lane_group_log2: self.lane_group.log2 as i32,
            flags: flag(spec.activation == Activation::Silu, abi::DWK_CONV_SILU)
                | flag(spec.qk_l2norm, abi::DWK_CONV_QK_L2NORM)
                | flag(wide, abi::DWK_CONV_WIDE_LENGTHS)
                | flag(self.keeps_states, abi::DWK_CONV_KEEP_STATES),
            ..Default::default()
        };
        if let Some(state) = &x.state {
            self.lower_state(state, x.slots.is_some(), &mut arguments)?;
        }
        let [q, k, v] = self.lane_group.lanes.map(|n| n as i32);
        (arguments.q.lanes, arguments.k.lanes, arguments.v.lanes) = (q, k, v);
        let mut grid = self.division.grid as u32;
        if let Some(gates) = &x.gates {
            arguments.gates = gates.lower(self.tokens, value_heads)?;
            let groups = (arguments.gates.groups as u32).min(MOST_GATE_GROUPS);
            // A multiple of the dies, so that the other workgroups go to the same dies as without gates.
            let groups = groups.next_multiple_of(self.division.dies);
            arguments.gates.groups = groups as i32;
            grid += groups;
        }
        check::ensure(grid + LENGTHS_GROUPS < 1 << 24, || {
            let was = format!("{} tokens of {value_heads} gates", self.tokens);
            let allowed = "a launch must have fewer than 2^32 threads";
            ArgumentError::new("gates", ArgumentKind::Shape, was, allowed)
        })?;
        let groups = if self.tokens == 0 { 0 } else { grid };
        Ok(LaunchArguments { arguments, groups })
    }

    /// Checks that no output shares memory with another argument; g may be a, and beta may be b. Without tokens nothing
    /// is written and nothing is checked.
    pub(super) fn check_overlaps(
        &self,
        x: &ConvTensors<'_>,
        accepted: Option<&PerSequence<'_, i32>>,
    ) -> Checked<()> {
        if self.tokens == 0 {
            return Ok(());
        }
        let state = x.state.as_ref();
        let tensor = Span::maybe("state", state.map(|s| &s.tensor.0));
        let [written, read] = match self.keeps_states {
            false => [tensor, Span::NONE],
            true => [Span::NONE, tensor],
        };
        let ([g, beta], [a, b, a_log, dt_bias]) =
            (x.gates.as_ref()).map_or(([Span::NONE; 2], [Span::NONE; 4]), |gates| gates.spans());
        let outputs = [
            Span::of("q", &x.q.0.0),
            Span::of("k", &x.k.0.0),
            Span::of("v", &x.v.0.0),
            written,
            g,
            beta,
        ];
        let has_initial_state = state.and_then(|s| s.has_initial_state.as_ref());
        let inputs = [
            Span::of("x.q", &x.x.q),
            Span::of("x.k", &x.x.k),
            Span::of("x.v", &x.x.v),
            Span::of("weight", &x.weight),
            Span::maybe("bias", x.bias.as_ref()),
            read,
            a,
            b,
            a_log,
            dt_bias,
            Span::numbers("slots", x.slots.as_ref()),
            Span::numbers("has_initial_state", has_initial_state),
            Span::numbers("accepted", accepted),
            Span::lengths(x.cu_seqlens.as_ref()),
        ];
        alias::check(&outputs, &inputs, gate::SAME)
    }

    /// Arguments of q, k or v: address and strides of input and output.
    fn part(
        &self,
        [from, to]: [&str; 2],
        x: &Tensor<'_, 3>,
        out: &TokensMut<'_>,
        heads: usize,
        dim: usize,
    ) -> Checked<dwk_conv_part> {
        let dtype = [self.spec.dtype];
        let batch = Batch::Packed {
            tokens: self.tokens,
        };
        let out_strides = check::output_tokens(to, &out.0, batch, heads, dim, &dtype)?;
        let from = projection(from, x, self.spec.dtype, self.tokens, heads * dim)?;
        Ok(dwk_conv_part {
            out: out.0.0.address,
            out_token: out_strides.token,
            out_head: out_strides.head,
            dim: dim as i32,
            ..from
        })
    }

    fn lower_state(
        &self,
        state: &ConvState<'_>,
        has_slots: bool,
        out: &mut dwk_conv_args,
    ) -> Checked<()> {
        // Without slots, sequence n has slot n.
        let least_slots = if has_slots { 1 } else { self.sequences };
        // The kernel doubles columns, and adds tokens to them, in 32 bits.
        let most_columns = (i32::MAX as usize - self.tokens).min(1 << 30);
        let checked = state_strides(
            "state",
            &state.tensor,
            state.layout,
            self.spec.dtype,
            self.spec.total_channels(),
            self.spec.width - 1..most_columns,
            least_slots..i32::MAX as usize,
        )?;
        [out.state_slot, out.state_channel, out.state_column] = checked.strides;
        out.state = state.tensor.0.address;
        out.state_slots = checked.slots;
        out.state_columns = checked.columns;
        if let Some(has) = &state.has_initial_state {
            out.has_initial_state = has.checked("has_initial_state", self.sequences)?;
        }
        Ok(())
    }
}

/// Input of q, k or v: its channels in the projections of `tokens` tokens.
pub(crate) fn projection(
    argument: &str,
    x: &Tensor<'_, 3>,
    dtype: Dtype,
    tokens: usize,
    channels: usize,
) -> Checked<dwk_conv_part> {
    check::dtype(argument, x.dtype, &[dtype])?;
    let [rows, blocks, block] = x.shape;
    check::ensure(
        rows == tokens && blocks.checked_mul(block) == Some(channels),
        || {
            let was = format!("shape {:?}", x.shape);
            let allowed = format!(
                "it must be [{tokens}, blocks, channels of a block], of {channels} channels"
            );
            ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
        },
    )?;
    check::ensure(x.strides[2] == 1 || block == 1, || {
        let was = format!("an innermost stride of {}", x.strides[2]);
        let allowed = "the innermost stride must be 1";
        ArgumentError::new(argument, ArgumentKind::Stride, was, allowed)
    })?;
    check::pointer(argument, x.address, x.dtype.size(), tokens == 0)?;
    let [x_token, x_block] = check::element_strides(argument, [x.strides[0], x.strides[1]])?;
    Ok(dwk_conv_part {
        x: x.address,
        x_token,
        x_block,
        block: block as i32,
        channels: channels as i32,
        ..Default::default()
    })
}

/// A pool of conv states, as kernel arguments.
pub(crate) struct StateStrides {
    /// Strides of slots, channels and columns.
    pub(crate) strides: [i64; 3],
    pub(crate) slots: i32,
    pub(crate) columns: i32,
}

/// Checks a pool of conv states that is written.
pub(crate) fn state_strides(
    argument: &str,
    tensor: &TensorMut<'_, 3>,
    layout: ConvStateLayout,
    dtype: Dtype,
    wanted: usize,
    columns_allowed: Range<usize>,
    slots_allowed: Range<usize>,
) -> Checked<StateStrides> {
    let t = &tensor.0;
    let found = state_view(
        argument,
        t,
        layout,
        dtype,
        wanted,
        columns_allowed,
        slots_allowed,
    )?;
    check::no_overlap(argument, &t.shape, &t.strides)?;
    Ok(found)
}

/// Checks a pool of conv states.
pub(super) fn state_view(
    argument: &str,
    t: &Tensor<'_, 3>,
    layout: ConvStateLayout,
    dtype: Dtype,
    wanted: usize,
    columns_allowed: Range<usize>,
    slots_allowed: Range<usize>,
) -> Checked<StateStrides> {
    check::dtype(argument, t.dtype, &[dtype])?;
    // [slots, channels, columns]
    let ordered = |[slots, a, b]: [usize; 3]| match layout {
        ConvStateLayout::ChannelMajor => [slots, a, b],
        ConvStateLayout::TokenMajor => [slots, b, a],
    };
    let [slots, channels, columns] = ordered(t.shape);
    check::ensure(
        channels == wanted && columns_allowed.contains(&columns) && slots_allowed.contains(&slots),
        || {
            let order = match layout {
                ConvStateLayout::ChannelMajor => "[slots, channels, columns]",
                ConvStateLayout::TokenMajor => "[slots, columns, channels]",
            };
            let number = |allowed: &Range<usize>| match allowed.len() {
                1 => allowed.start.to_string(),
                _ => format!("at least {}", allowed.start),
            };
            let (columns, slots) = (number(&columns_allowed), number(&slots_allowed));
            let allowed = format!(
                "it must be {order} of {wanted} channels, {columns} columns and {slots} slots"
            );
            let was = format!("shape {:?}", t.shape);
            ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
        },
    )?;
    check::pointer(argument, t.address, t.dtype.size(), slots == 0)?;
    Ok(StateStrides {
        strides: check::element_strides(argument, ordered(t.strides))?,
        slots: slots as i32,
        columns: columns as i32,
    })
}

pub(super) fn check_shape(argument: &str, given: &[usize], wanted: &[usize]) -> Checked<()> {
    check::ensure(given == wanted, || {
        let was = format!("shape {given:?}");
        ArgumentError::new(
            argument,
            ArgumentKind::Shape,
            was,
            format!("it must be {wanted:?}"),
        )
    })
}

/// Checks that every tensor with a known context belongs to `context`.
pub(super) fn check_devices(x: &ConvTensors<'_>, context: &Context) -> Checked<()> {
    if let Some(gates) = &x.gates {
        gates.check_devices(context)?;
    }
    let always = [
        ("x.q", &x.x.q.owner),
        ("x.k", &x.x.k.owner),
        ("x.v", &x.x.v.owner),
        ("weight", &x.weight.owner),
        ("q", &x.q.0.0.owner),
        ("k", &x.k.0.0.owner),
        ("v", &x.v.0.0.owner),
    ];
    let state = x.state.as_ref();
    let optional = [
        ("bias", x.bias.as_ref().map(|t| &t.owner)),
        ("state", state.map(|s| &s.tensor.0.owner)),
        ("slots", x.slots.as_ref().map(|s| s.owner())),
        (
            "has_initial_state",
            state.and_then(|s| Some(s.has_initial_state.as_ref()?.owner())),
        ),
    ];
    let optional = optional.into_iter().filter_map(|(n, o)| Some((n, o?)));
    let mut all = always.into_iter().chain(optional);
    all.try_for_each(|(name, owner)| check::device(name, owner, context))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn division(octets: usize, tokens: usize, sequences: usize) -> (u32, u32, u32) {
        let d = Division::new(octets, tokens, sequences, [304, 8], 32);
        (1 << d.run_log2, 1 << d.block_log2, d.groups)
    }

    #[test]
    fn few_threads_are_idle_and_small_batches_are_spread() {
        // 8192 channels: four workgroups, one run per thread.
        assert_eq!(division(1024, 8192, 1), (32, 32, 4));
        assert_eq!(division(1024, 512, 1), (4, 4, 4));
        // 3072 channels: two runs fill three workgroups.
        assert_eq!(division(384, 32_768, 1), (32, 64, 3));
        // 384 channels: sixteen shorter runs, so that every compute unit has two workgroups.
        assert_eq!(division(48, 32_768, 1), (8, 128, 3));
        assert_eq!(division(1, 7, 3).0, 4);
        // Tokens make runs long, not sequences.
        let run = |tokens, sequences| {
            let d = Division::new(1024, tokens, sequences, [132, 1], 128);
            1 << d.run_log2
        };
        assert_eq!(
            [1024, 2048, 4096, 8192].map(|n| run(n, 1)),
            [16, 32, 64, 128]
        );
        assert_eq!(run(64 + 512, 65), 8);
        assert_eq!(run(8192, 64), 128);
        assert_eq!(run(701, 700), 8);
        assert_eq!([16, 64, 700].map(|n| run(n, n)), [4, 32, 32]);
        for octets in 1..2000 {
            let d = Division::new(octets, 8192, 5, [304, 8], 32);
            let runs = 1 << (d.block_log2 - d.run_log2);
            assert!(d.groups as usize * THREADS as usize >= octets * runs);
            assert!(d.grid.is_multiple_of(8));
            // Every token has a thread.
            assert!(d.grid >= (8192 >> d.block_log2) * u64::from(d.groups));
        }
    }
}
