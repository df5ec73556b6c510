//! Backward of a convolution: gradients of the projections, the weights and the conv states.

use std::ffi::c_void;

use super::lower::{self, Shape, projection, state_strides, state_view};
use super::{Activation, Conv, ConvInput, ConvSpec, ConvStateLayout};
use crate::abi::{self, dwk_conv_args, dwk_conv_backward_args, dwk_conv_backward_part};
use crate::abi::{dwk_conv_part, dwk_gradient_sums_part};
use crate::alias::{self, Span};
use crate::batch::{CuSeqlens, PerSequence};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels;
use crate::ops::sums;
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Tensor, TensorMut, Tokens};
use crate::types::Dtype;
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_workspace};

const THREADS: u32 = 128;
/// Log2 of the most and the least tokens of a run. A run also reads `width - 1` tokens on either side.
const RUN_LOG2: std::ops::RangeInclusive<u32> = 4..=7;
/// Log2 of the most runs of a block of tokens.
const MOST_RUNS_LOG2: u32 = 4;

/// Gradients of q, k and v of the projections: views as those of [`ConvInput`].
#[derive(Debug)]
pub struct ConvInputMut<'a> {
    /// `HK K` channels.
    pub q: TensorMut<'a, 3>,
    /// `HK K` channels.
    pub k: TensorMut<'a, 3>,
    /// `HV V` channels.
    pub v: TensorMut<'a, 3>,
}

impl<'a> ConvInputMut<'a> {
    /// Rows `q | k | v`: [`ConvInput::flat`]. Other columns are not written.
    ///
    /// # Errors
    /// As [`ConvInput::flat`].
    pub fn flat(x: TensorMut<'a, 2>, spec: &ConvSpec) -> Result<Self> {
        Ok(Self::of(ConvInput::flat(&x.0, spec)?))
    }

    /// Rows of groups `q | k | v | z`: [`ConvInput::interleaved`]. z's columns are not written.
    ///
    /// # Errors
    /// As [`ConvInput::interleaved`].
    pub fn interleaved(x: TensorMut<'a, 2>, spec: &ConvSpec) -> Result<Self> {
        Ok(Self::of(ConvInput::interleaved(&x.0, spec)?))
    }

    /// z's columns of rows `q | k | v | z`: [`ConvInput::flat_z`].
    ///
    /// # Errors
    /// As [`ConvInput::flat_z`].
    pub fn flat_z(x: TensorMut<'a, 2>, spec: &ConvSpec) -> Result<TensorMut<'a, 3>> {
        Ok(TensorMut(ConvInput::flat_z(&x.0, spec)?))
    }

    /// z's columns of the rows of [`ConvInputMut::interleaved`]: [`ConvInput::interleaved_z`].
    ///
    /// # Errors
    /// As [`ConvInput::interleaved_z`].
    pub fn interleaved_z(x: TensorMut<'a, 2>, spec: &ConvSpec) -> Result<TensorMut<'a, 3>> {
        Ok(TensorMut(ConvInput::interleaved_z(&x.0, spec)?))
    }

    /// The same views, for a stage of a layer.
    pub(crate) fn again(&self) -> Self {
        Self::of(ConvInput {
            q: self.q.0.clone(),
            k: self.k.0.clone(),
            v: self.v.0.clone(),
        })
    }

    fn of(x: ConvInput<'a>) -> Self {
        ConvInputMut {
            q: TensorMut(x.q),
            k: TensorMut(x.k),
            v: TensorMut(x.v),
        }
    }
}

/// Conv states that are read: `[N, channels, columns]` or `[N, columns, channels]`, of the type of x, any strides. Row n is
/// sequence n's; there are at least `width - 1` columns, the newest last.
#[derive(Clone, Debug)]
pub struct ConvStates<'a> {
    /// The states.
    pub tensor: Tensor<'a, 3>,
    /// Order of its dimensions.
    pub layout: ConvStateLayout,
}

/// [`ConvStates`] that are written.
#[derive(Debug)]
pub struct ConvStatesMut<'a> {
    /// The states.
    pub tensor: TensorMut<'a, 3>,
    /// Order of its dimensions.
    pub layout: ConvStateLayout,
}

/// The tensors of one backward: the inputs of the convolution, gradients of what it returned, and the gradients to compute.
/// Absent gradients are not computed. Rows of d_x past the last sequence become zeros. y is computed again from x, so
/// nothing is kept from the forward but a copy of the initial states, which a forward on a pool overwrites.
///
/// A launch refuses outputs that share memory with other arguments.
#[derive(Debug)]
pub struct ConvBackwardTensors<'a> {
    /// `[N + 1]`, lengths for a plan of [`Conv::device`]. Absent for other plans.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// The projections.
    pub x: ConvInput<'a>,
    /// `[channels, width]`, as in the forward.
    pub weight: Tensor<'a, 2>,
    /// `[channels]`; absent: 0.
    pub bias: Option<Tensor<'a, 1>>,
    /// Conv states before the batch. Absent: sequences started from zeros.
    pub initial: Option<ConvStates<'a>>,
    /// One byte per sequence; 0: the sequence started from zeros. Absent: every sequence has a state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
    /// Gradient of q, `[T, HK, K]`, of any strides that inputs may have, 0 among them.
    pub d_q: Tokens<'a>,
    /// Gradient of k, `[T, HK, K]`.
    pub d_k: Tokens<'a>,
    /// Gradient of v, `[T, HV, V]`.
    pub d_v: Tokens<'a>,
    /// Gradient of the states after the batch; absent: zeros.
    pub d_final: Option<ConvStates<'a>>,
    /// Gradient of the projections.
    pub d_x: Option<ConvInputMut<'a>>,
    /// `[channels, width]`, f32, any strides.
    pub d_weight: Option<TensorMut<'a, 2>>,
    /// `[channels]`, f32.
    pub d_bias: Option<TensorMut<'a, 1>>,
    /// Gradient of the initial states, or of zeros where there were none. Zeros for sequences that did not read theirs.
    pub d_initial: Option<ConvStatesMut<'a>>,
}

/// Plan of the backward of a convolution, for the same batches.
#[derive(Debug)]
pub struct ConvBackward {
    context: Context,
    shape: Shape,
    division: Division,
    /// Absent: launches read [`ConvBackwardTensors::cu_seqlens`].
    cu_seqlens: Option<super::Lengths>,
}

/// Division of tokens and channels among threads and workgroups.
#[derive(Clone, Copy, Debug)]
struct Division {
    run_log2: u32,
    block_log2: u32,
    /// Workgroups of a walker.
    groups: usize,
    /// Blocks of tokens, at most.
    blocks: usize,
    /// Groups of workgroups that share the blocks.
    walkers: usize,
}

impl Division {
    fn new(lanes: usize, tokens: usize, sequences: usize, compute_units: u32) -> Self {
        let threads = THREADS as usize;
        let groups = |runs_log2: u32| (lanes << runs_log2).div_ceil(threads);
        // Idle threads in sixteenths, rounded down.
        let idle = |runs_log2: &u32| {
            let all = groups(*runs_log2) * threads;
            16 * (all - (lanes << runs_log2)) / all.max(1)
        };
        let runs_log2 = (0..=MOST_RUNS_LOG2).min_by_key(idle).unwrap_or(0);
        let groups = groups(runs_log2).max(1);
        let room = (sums::RESIDENT * compute_units) as usize;
        let blocks = |run_log2: u32| (tokens >> (run_log2 + runs_log2)) + sequences + 1;
        let enough = |run_log2: &u32| blocks(*run_log2) * groups >= room;
        let run_log2 = RUN_LOG2.rev().find(enough).unwrap_or(*RUN_LOG2.start());
        let blocks = blocks(run_log2);
        // As many blocks for each walker.
        let turns = blocks.div_ceil((room / groups).max(1));
        Division {
            run_log2,
            block_log2: run_log2 + runs_log2,
            groups,
            blocks,
            walkers: blocks.div_ceil(turns),
        }
    }

    /// Records of sums that the walkers leave.
    fn records(&self) -> usize {
        self.walkers << (self.block_log2 - self.run_log2)
    }
}

/// Launch arguments: those of both kernels.
pub(crate) struct LaunchArguments {
    arguments: dwk_conv_backward_args,
    groups: u32,
    sums: Option<sums::LaunchArguments>,
}

impl ConvBackward {
    /// The backward of `conv`. It needs a workspace.
    ///
    /// # Errors
    /// Too many channels.
    pub fn of(conv: &Conv) -> Result<Self> {
        let shape = conv.shape;
        let lanes = shape.lanes().iter().sum();
        let compute_units = conv.context.device().compute_units;
        let division = Division::new(lanes, shape.tokens, shape.sequences, compute_units);
        let grid = division.walkers.saturating_mul(division.groups);
        check::ensure(grid < 1 << 24 && division.blocks < 1 << 31, || {
            let was = format!("{} channels", shape.spec.total_channels());
            let allowed = "a launch must have fewer than 2^31 threads";
            ArgumentError::new("heads and dims", ArgumentKind::Shape, was, allowed)
        })?;
        Ok(ConvBackward {
            context: conv.context.clone(),
            shape,
            division,
            cu_seqlens: conv.cu_seqlens.clone(),
        })
    }

    /// Bytes of workspace that a launch needs: sums of d_weight and d_bias, at most 80 KiB per compute unit.
    pub fn workspace_bytes(&self) -> usize {
        let numbers = (self.shape.spec.width + 1) * self.shape.spec.total_channels();
        (self.division.records() * numbers * size_of::<f32>()).next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Names of the kernels that a launch runs, in order. `weights`: whether gradients of weight or bias are wanted.
    pub fn kernels(&self, weights: bool) -> Vec<&'static str> {
        let sums = weights.then(|| kernels::gradient_sums().name());
        std::iter::once(kernels::conv_backward(self.shape.spec.dtype).name())
            .chain(sums)
            .collect()
    }

    /// Enqueues the backward: the kernels that [`ConvBackward::kernels`] names, nothing else.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, strides that are not allowed, gradients that share memory with other
    /// arguments, a workspace that is too small: then nothing was enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        stream: &Stream,
        tensors: &ConvBackwardTensors<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        check::stream(stream, &self.context)?;
        check_workspace(&workspace, self.workspace_bytes(), &self.context)?;
        let lengths = match &self.cu_seqlens {
            Some(own) => {
                CuSeqlens::refuse(&tensors.cu_seqlens)?;
                (own.address().cast_const(), false)
            }
            None => {
                let given = CuSeqlens::required(&tensors.cu_seqlens)?;
                check::device("cu_seqlens", given.owner(), &self.context)?;
                given.checked(self.shape.sequences)?
            }
        };
        let lowered = self.lower(stream, lengths, tensors, workspace.address())?;
        check_overlaps(tensors, workspace.span())?;
        self.context.make_current()?;
        let _turn = stream.turn();
        self.enqueue(stream, &lowered)
    }

    /// All checks of [`ConvBackward::launch`] except those of overlaps, lengths and the workspace's size.
    pub(crate) fn lower(
        &self,
        stream: &Stream,
        (cu_seqlens, wide): (*const c_void, bool),
        x: &ConvBackwardTensors<'_>,
        scratch: *mut c_void,
    ) -> Result<LaunchArguments> {
        check::stream(stream, &self.context)?;
        check_devices(x, &self.context)?;
        Ok(self.lower_tensors((cu_seqlens, wide), x, scratch)?)
    }

    fn lower_tensors(
        &self,
        (cu_seqlens, wide): (*const c_void, bool),
        x: &ConvBackwardTensors<'_>,
        scratch: *mut c_void,
    ) -> Checked<LaunchArguments> {
        let Shape { spec, tokens, .. } = self.shape;
        let weights = lower::Weights::new(&spec, &x.weight, x.bias.as_ref())?;
        let heads = spec.heads;
        let keys = (heads.key, heads.key_dim);
        let flag = |set: bool, bit| if set { bit } else { 0 };
        let [q_lanes, k_lanes, v_lanes] = self.shape.lanes().map(|n| n as i32);
        let values = (heads.value, heads.value_dim);
        let conv = dwk_conv_args {
            q: self.part(["x.q", "d_q"], &x.x.q, &x.d_q, keys, q_lanes)?,
            k: self.part(["x.k", "d_k"], &x.x.k, &x.d_k, keys, k_lanes)?,
            v: self.part(["x.v", "d_v"], &x.x.v, &x.d_v, values, v_lanes)?,
            weight: weights.weight,
            bias: weights.bias,
            cu_seqlens,
            weight_channel: weights.strides[0],
            weight_tap: weights.strides[1],
            bias_stride: weights.bias_stride,
            tokens: tokens as i32,
            sequences: self.shape.sequences as i32,
            width: spec.width as i32,
            weight_type: weights.types[0],
            bias_type: weights.types[1],
            run_log2: self.division.run_log2 as i32,
            block_log2: self.division.block_log2 as i32,
            groups: self.division.groups as i32,
            lane_group_log2: self.shape.lane_group_log2() as i32,
            flags: flag(spec.activation == Activation::Silu, abi::DWK_CONV_SILU)
                | flag(spec.qk_l2norm, abi::DWK_CONV_QK_L2NORM)
                | flag(wide, abi::DWK_CONV_WIDE_LENGTHS)
                | abi::DWK_CONV_KEEP_STATES,
            ..Default::default()
        };
        let mut out = dwk_conv_backward_args {
            conv,
            blocks: self.division.blocks as i32,
            walkers: self.division.walkers as i32,
            ..Default::default()
        };
        if let Some(d_x) = &x.d_x {
            let [q, k, v] = spec.channels();
            out.q = gradient("d_x.q", &d_x.q, spec.dtype, tokens, q)?;
            out.k = gradient("d_x.k", &d_x.k, spec.dtype, tokens, k)?;
            out.v = gradient("d_x.v", &d_x.v, spec.dtype, tokens, v)?;
        } else {
            // The kernel divides by the channels of a block.
            (out.q.block, out.k.block, out.v.block) = (1, 1, 1);
        }
        self.lower_states(x, &mut out)?;
        let (first, second) = self.outputs_of_sums(x)?;
        let records = match tokens {
            0 => 0,
            _ => self.division.records(),
        };
        let sums = sums::LaunchArguments::new(scratch, records, first, second);
        if sums.is_some() {
            out.partials = scratch.cast();
        }
        // Without tokens only states are handed on.
        let idle = tokens == 0 && (out.d_initial.is_null() || self.shape.sequences == 0);
        let groups = match idle {
            true => 0,
            false => self.division.walkers * self.division.groups,
        };
        Ok(LaunchArguments {
            arguments: out,
            groups: groups as u32,
            sums,
        })
    }

    /// Arguments of q, k or v: address and strides of the input and of the output's gradient.
    fn part(
        &self,
        [from, to]: [&str; 2],
        x: &Tensor<'_, 3>,
        d_y: &Tokens<'_>,
        (heads, dim): (usize, usize),
        lanes: i32,
    ) -> Checked<dwk_conv_part> {
        let (tokens, dtype) = (self.shape.tokens, self.shape.spec.dtype);
        let batch = Batch::Packed { tokens };
        let strides = check::tokens(to, d_y, batch, heads, dim, &[dtype])?;
        Ok(dwk_conv_part {
            out: d_y.0.address,
            out_token: strides.token,
            out_head: strides.head,
            dim: dim as i32,
            lanes,
            ..projection(from, x, dtype, tokens, heads * dim)?
        })
    }

    fn lower_states(
        &self,
        x: &ConvBackwardTensors<'_>,
        out: &mut dwk_conv_backward_args,
    ) -> Checked<()> {
        let Shape {
            spec, sequences, ..
        } = self.shape;
        let channels = spec.total_channels();
        // The kernel adds tokens to columns in 32 bits.
        let most = (i32::MAX as usize - self.shape.tokens).min(1 << 30);
        // A row for each sequence.
        let rows = sequences..sequences + 1;
        // All have as many columns.
        let mut next = spec.width - 1..most;
        if let Some(states) = &x.initial {
            let found = state_view(
                "initial_state",
                &states.tensor,
                states.layout,
                spec.dtype,
                channels,
                next.clone(),
                rows.clone(),
            )?;
            out.conv.state_columns = found.columns;
            next = found.columns as usize..found.columns as usize + 1;
            [
                out.conv.state_slot,
                out.conv.state_channel,
                out.conv.state_column,
            ] = found.strides;
            out.conv.state = states.tensor.address;
        }
        if let Some(states) = &x.d_final {
            let found = state_view(
                "d_final_state",
                &states.tensor,
                states.layout,
                spec.dtype,
                channels,
                next.clone(),
                rows.clone(),
            )?;
            out.conv.state_columns = found.columns;
            next = found.columns as usize..found.columns as usize + 1;
            [out.d_final_slot, out.d_final_channel, out.d_final_column] = found.strides;
            out.d_final = states.tensor.address;
        }
        if let Some(states) = &x.d_initial {
            let found = state_strides(
                "d_initial_state",
                &states.tensor,
                states.layout,
                spec.dtype,
                channels,
                next,
                rows.clone(),
            )?;
            out.conv.state_columns = found.columns;
            [
                out.d_initial_slot,
                out.d_initial_channel,
                out.d_initial_column,
            ] = found.strides;
            out.d_initial = states.tensor.0.address;
        }
        if let Some(has) = &x.has_initial_state {
            out.conv.has_initial_state = has.checked("has_initial_state", sequences)?;
        }
        Ok(())
    }

    /// Outputs of the sums over records `[width + 1, channels]`.
    fn outputs_of_sums(
        &self,
        x: &ConvBackwardTensors<'_>,
    ) -> Checked<(dwk_gradient_sums_part, dwk_gradient_sums_part)> {
        let spec = &self.shape.spec;
        let channels = spec.total_channels();
        let mut first = dwk_gradient_sums_part {
            columns: (spec.width * channels) as i32,
            inner: channels as i32,
            ..Default::default()
        };
        if let Some(TensorMut(t)) = &x.d_weight {
            check::dtype("d_weight", t.dtype, &[Dtype::F32])?;
            lower::check_shape("d_weight", &t.shape, &[channels, spec.width])?;
            check::pointer("d_weight", t.address, t.dtype.size(), false)?;
            check::no_overlap("d_weight", &t.shape, &t.strides)?;
            [first.inner_stride, first.outer_stride] =
                check::element_strides("d_weight", t.strides)?;
            first.out = t.address.cast();
        }
        Ok((first, sums::vector("d_bias", &x.d_bias, channels)?))
    }

    /// Enqueues checked launch arguments on the current device.
    pub(crate) fn enqueue(&self, stream: &Stream, lowered: &LaunchArguments) -> Result<()> {
        let LaunchArguments {
            arguments,
            groups,
            sums,
        } = lowered;
        if *groups > 0 {
            let kernel = kernels::conv_backward(self.shape.spec.dtype);
            // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
            unsafe { (self.context).launch(stream, kernel, *groups, THREADS, arguments)? };
        }
        (sums.as_ref()).map_or(Ok(()), |sums| sums.enqueue(&self.context, stream))
    }
}

/// Gradient of q, k or v of the projections.
fn gradient(
    argument: &str,
    TensorMut(x): &TensorMut<'_, 3>,
    dtype: Dtype,
    tokens: usize,
    channels: usize,
) -> Checked<dwk_conv_backward_part> {
    let found = projection(argument, x, dtype, tokens, channels)?;
    check::no_overlap(argument, &x.shape, &x.strides)?;
    Ok(dwk_conv_backward_part {
        d_x: x.address,
        token: found.x_token,
        block_stride: found.x_block,
        block: found.block,
        pad0: 0,
    })
}

/// Checks that every tensor with a known context belongs to `context`.
fn check_devices(x: &ConvBackwardTensors<'_>, context: &Context) -> Checked<()> {
    let d_x = x.d_x.as_ref();
    let owners = [
        ("x.q", Some(&x.x.q.owner)),
        ("x.k", Some(&x.x.k.owner)),
        ("x.v", Some(&x.x.v.owner)),
        ("weight", Some(&x.weight.owner)),
        ("bias", x.bias.as_ref().map(|t| &t.owner)),
        ("initial_state", x.initial.as_ref().map(|s| &s.tensor.owner)),
        (
            "has_initial_state",
            x.has_initial_state.as_ref().map(|has| has.owner()),
        ),
        ("d_q", Some(&x.d_q.0.owner)),
        ("d_k", Some(&x.d_k.0.owner)),
        ("d_v", Some(&x.d_v.0.owner)),
        ("d_final_state", x.d_final.as_ref().map(|s| &s.tensor.owner)),
        ("d_x.q", d_x.map(|x| &x.q.0.owner)),
        ("d_x.k", d_x.map(|x| &x.k.0.owner)),
        ("d_x.v", d_x.map(|x| &x.v.0.owner)),
        ("d_weight", x.d_weight.as_ref().map(|t| &t.0.owner)),
        ("d_bias", x.d_bias.as_ref().map(|t| &t.0.owner)),
        (
            "d_initial_state",
            x.d_initial.as_ref().map(|s| &s.tensor.0.owner),
        ),
    ];
    let mut given = owners.into_iter().filter_map(|(n, o)| Some((n, o?)));
    given.try_for_each(|(name, owner)| check::device(name, owner, context))
}

/// Checks that no gradient shares memory with another argument.
fn check_overlaps(x: &ConvBackwardTensors<'_>, workspace: Span<'_>) -> Checked<()> {
    let d_x = x.d_x.as_ref();
    let outputs = [
        Span::maybe("d_x.q", d_x.map(|x| &x.q.0)),
        Span::maybe("d_x.k", d_x.map(|x| &x.k.0)),
        Span::maybe("d_x.v", d_x.map(|x| &x.v.0)),
        Span::maybe("d_weight", x.d_weight.as_ref().map(|t| &t.0)),
        Span::maybe("d_bias", x.d_bias.as_ref().map(|t| &t.0)),
        Span::maybe("d_initial_state", x.d_initial.as_ref().map(|s| &s.tensor.0)),
        workspace,
    ];
    let inputs = [
        Span::of("x.q", &x.x.q),
        Span::of("x.k", &x.x.k),
        Span::of("x.v", &x.x.v),
        Span::of("weight", &x.weight),
        Span::maybe("bias", x.bias.as_ref()),
        Span::maybe("initial_state", x.initial.as_ref().map(|s| &s.tensor)),
        Span::numbers("has_initial_state", x.has_initial_state.as_ref()),
        Span::of("d_q", &x.d_q.0),
        Span::of("d_k", &x.d_k.0),
        Span::of("d_v", &x.d_v.0),
        Span::maybe("d_final_state", x.d_final.as_ref().map(|s| &s.tensor)),
        Span::lengths(x.cu_seqlens.as_ref()),
    ];
    alias::check(&outputs, &inputs, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_has_a_walker() {
        for lanes in [1, 16, 48, 96, 384, 1024, 4096] {
            for tokens in [0, 1, 64, 8192, 100_000] {
                for sequences in [0, 1, 300] {
                    let d = Division::new(lanes, tokens, sequences, 304);
                    let runs = 1 << (d.block_log2 - d.run_log2);
                    assert!(d.groups * THREADS as usize >= lanes * runs);
                    assert!(d.blocks << d.block_log2 >= tokens, "{d:?}");
                    let room = (sums::RESIDENT as usize * 304).max(d.groups);
                    assert!(d.walkers * d.groups <= room && d.walkers > 0, "{d:?}");
                    assert!(d.walkers <= d.blocks, "{d:?}");
                }
            }
        }
        // 8192 channels: 16 workgroups' worth of threads in 8, two turns of 128 walkers.
        let d = Division::new(1024, 8192, 1, 304);
        assert_eq!((d.run_log2, d.groups, d.walkers), (5, 8, 129));
    }
}
