//! Backward of a gated norm: gradients of x, z and the weight.

use std::ffi::c_void;
use std::ptr;

use super::{Blocks, MAX_VALUE_DIM, OutputGate, check_eps, lower_z, row_lanes};
use crate::abi::{self, dwk_gradient_sums_part, dwk_norm_args, dwk_norm_backward_args};
use crate::alias::{self, Span};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels::{self, Kernel};
use crate::ops::sums;
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Tensor, TensorMut, Tokens, TokensMut};
use crate::types::Dtype;
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_workspace};

const THREADS: usize = 256;

/// The tensors of the backward of a [`GatedNorm`](super::GatedNorm) over `T` tokens and `HV` value heads: its inputs, the
/// gradient of y, and the gradients to compute. Absent gradients are not computed.
///
/// x is what the norm read: a norm in place has overwritten it, and cannot be differentiated. Nothing else is kept from the
/// forward. A launch refuses outputs that share memory with other arguments.
#[derive(Debug)]
pub struct GatedNormBackward<'a> {
    /// `[T, HV, V]`, V a multiple of 16 up to 256: bf16 or fp16, the type of z and of all gradients but the weight's.
    pub x: Tokens<'a>,
    /// `[T, blocks, heads * V]`, as in [`GatedNorm::z`](super::GatedNorm::z).
    pub z: Tensor<'a, 3>,
    /// `[V]`, f32, bf16 or fp16. Absent: 1.
    pub weight: Option<Tensor<'a, 1>>,
    /// As in the forward.
    pub eps: f32,
    /// As in the forward.
    pub gate: OutputGate,
    /// Gradient of y, `[T, HV, V]`, of any strides that inputs may have, 0 among them.
    pub d_y: Tokens<'a>,
    /// `[T, HV, V]`.
    pub d_x: Option<TokensMut<'a>>,
    /// `[T, blocks, heads * V]`, with blocks of its own: it may lie where z lies in a tensor of packed projections.
    pub d_z: Option<TensorMut<'a, 3>>,
    /// `[V]`, f32.
    pub d_weight: Option<TensorMut<'a, 1>>,
}

/// Launch arguments: those of both kernels.
pub(crate) struct LaunchArguments {
    kernel: Kernel<dwk_norm_backward_args>,
    arguments: dwk_norm_backward_args,
    groups: u32,
    sums: Option<sums::LaunchArguments>,
}

const MOST_TOKENS: usize = (1 << 31) - 1;
const MOST_HEADS: usize = (1 << 20) - 1;

/// Division of rows among workgroups.
struct Division {
    /// Rows of a row of lanes.
    run: usize,
    groups: usize,
}

impl Division {
    fn new(compute_units: u32, tokens: usize, value_heads: usize, value_dim: usize) -> Self {
        let at_once = THREADS / row_lanes(value_dim);
        let steps = tokens.saturating_mul(value_heads).div_ceil(at_once);
        let run = steps
            .div_ceil((sums::RESIDENT * compute_units) as usize)
            .max(1);
        Division {
            run,
            groups: steps.div_ceil(run),
        }
    }
}

impl GatedNormBackward<'_> {
    /// Bytes of workspace that a launch needs: at most 4 KiB per compute unit at V = 256.
    ///
    /// # Errors
    /// More tokens, value heads or numbers in a row than a launch takes.
    pub fn workspace_bytes(
        context: &Context,
        tokens: usize,
        value_heads: usize,
        value_dim: usize,
    ) -> Result<usize> {
        check::sizes(&[
            ("tokens", tokens, MOST_TOKENS),
            ("value_heads", value_heads, MOST_HEADS),
            ("value_dim", value_dim, MAX_VALUE_DIM),
        ])?;
        Ok(Self::workspace_of(context, tokens, value_heads, value_dim))
    }

    /// [`GatedNormBackward::workspace_bytes`] of numbers that were checked.
    pub(crate) fn workspace_of(
        context: &Context,
        tokens: usize,
        value_heads: usize,
        value_dim: usize,
    ) -> usize {
        let compute_units = context.device().compute_units;
        let division = Division::new(compute_units, tokens, value_heads, value_dim);
        (division.groups * value_dim * size_of::<f32>()).next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Names of the kernels that a launch runs, in order.
    pub fn kernels(&self) -> Vec<&'static str> {
        let sums = (self.d_weight.as_ref()).map(|_| kernels::gradient_sums().name());
        std::iter::once(kernels::norm_backward(self.x.0.dtype).name())
            .chain(sums)
            .collect()
    }

    /// Enqueues the backward: the kernels that [`GatedNormBackward::kernels`] names, nothing else.
    ///
    /// # Errors
    /// A tensor of the wrong shape, type or context, strides or an eps that are not allowed, gradients that share memory
    /// with other arguments, a workspace that is too small; nothing is then enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        context: &Context,
        stream: &Stream,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let [_, tokens, heads, dim] = self.x.0.shape;
        self.check_x()?;
        let bytes = Self::workspace_of(context, tokens, heads, dim);
        check_workspace(&workspace, bytes, context)?;
        let lowered = self.lower(context, stream, workspace.address())?;
        self.check_overlaps(workspace.span())?;
        context.make_current()?;
        let _turn = stream.turn();
        lowered.enqueue(context, stream)
    }

    fn check_x(&self) -> Checked<()> {
        let Tokens(x, dense) = &self.x;
        let [_, tokens, value_heads, value_dim] = x.shape;
        check::dtype("x", x.dtype, &[Dtype::Bf16, Dtype::F16])?;
        let refuse_shape = |allowed: String| {
            let was = format!("shape {:?}", &x.shape[usize::from(!dense)..]);
            ArgumentError::new("x", ArgumentKind::Shape, was, allowed)
        };
        check::ensure(!dense, || {
            refuse_shape("it must be [tokens, value heads, V]".to_owned())
        })?;
        let fits = value_dim > 0 && value_dim.is_multiple_of(16) && value_dim <= MAX_VALUE_DIM;
        check::ensure(fits, || {
            refuse_shape(format!(
                "V must be a multiple of 16 from 16 to {MAX_VALUE_DIM}"
            ))
        })?;
        check::ensure((1..=MOST_HEADS).contains(&value_heads), || {
            refuse_shape("there must be at least one value head, and fewer than 2^20".to_owned())
        })?;
        let rows = tokens.checked_mul(value_heads);
        let few = rows.is_some_and(|rows| rows <= MOST_TOKENS) && tokens <= MOST_TOKENS;
        check::ensure(few, || {
            refuse_shape("there must be fewer than 2^31 rows".to_owned())
        })
    }

    /// All checks but those of overlaps and of the workspace's size. Returns the launch arguments.
    pub(crate) fn lower(
        &self,
        context: &Context,
        stream: &Stream,
        scratch: *mut c_void,
    ) -> Result<LaunchArguments> {
        check::stream(stream, context)?;
        let owners = [
            ("x", Some(&self.x.0.owner)),
            ("z", Some(&self.z.owner)),
            ("weight", self.weight.as_ref().map(|t| &t.owner)),
            ("d_y", Some(&self.d_y.0.owner)),
            ("d_x", self.d_x.as_ref().map(|t| &t.0.0.owner)),
            ("d_z", self.d_z.as_ref().map(|t| &t.0.owner)),
            ("d_weight", self.d_weight.as_ref().map(|t| &t.0.owner)),
        ];
        for (name, owner) in owners {
            owner.map_or(Ok(()), |owner| check::device(name, owner, context))?;
        }
        Ok(self.lower_tensors(context.device().compute_units, scratch)?)
    }

    fn lower_tensors(&self, compute_units: u32, scratch: *mut c_void) -> Checked<LaunchArguments> {
        self.check_x()?;
        let [_, tokens, value_heads, value_dim] = self.x.0.shape;
        let dtype = self.x.0.dtype;
        let batch = Batch::Packed { tokens };
        let rows = |name, t| check::tokens(name, t, batch, value_heads, value_dim, &[dtype]);
        let (x_strides, y_strides) = (rows("x", &self.x)?, rows("d_y", &self.d_y)?);
        let blocks = |name, t| lower_z(name, t, tokens, value_heads, value_dim, dtype);
        let z = blocks("z", &self.z)?;
        let weight_stride = match &self.weight {
            Some(weight) => check::vector("weight", weight, value_dim)?,
            None => 0,
        };
        check_eps(self.eps)?;
        let (d_x, d_x_strides) = match &self.d_x {
            Some(TokensMut(t)) => (
                t.0.address,
                check::output_tokens("d_x", t, batch, value_heads, value_dim, &[dtype])?,
            ),
            None => (ptr::null_mut(), Default::default()),
        };
        let (d_z, of_d_z) = match &self.d_z {
            Some(TensorMut(t)) => {
                let found = blocks("d_z", t)?;
                check::no_overlap("d_z", &t.shape, &t.strides)?;
                (t.address, found)
            }
            None => (ptr::null_mut(), Blocks::whole(value_heads)),
        };
        let first = sums::vector("d_weight", &self.d_weight, value_dim)?;
        let division = Division::new(compute_units, tokens, value_heads, value_dim);
        let second = dwk_gradient_sums_part {
            inner: 1,
            ..Default::default()
        };
        let sums = sums::LaunchArguments::new(scratch, division.groups, first, second);
        let arguments = dwk_norm_backward_args {
            norm: dwk_norm_args {
                x: self.x.0.address,
                z: self.z.address,
                weight: (self.weight.as_ref()).map_or(ptr::null(), |t| t.address.cast_const()),
                y: self.d_y.0.address,
                x_strides,
                y_strides,
                z_token: z.token,
                z_block: z.block,
                weight_stride,
                tokens: tokens as i32,
                value_heads: value_heads as i32,
                value_dim: value_dim as i32,
                block_heads: z.heads as i32,
                run: division.run as i32,
                weight_type: (self.weight.as_ref()).map_or(0, |t| check::type_code(t.dtype)),
                mean: 1.0 / value_dim as f32,
                eps: self.eps,
                flags: match self.gate {
                    OutputGate::Silu => abi::DWK_NORM_SILU,
                    OutputGate::Sigmoid => 0,
                },
                group_heads: 0,
            },
            d_x,
            d_z,
            partials: match sums {
                Some(_) => scratch.cast(),
                None => ptr::null_mut(),
            },
            d_x_strides,
            d_z_token: of_d_z.token,
            d_z_block: of_d_z.block,
            d_z_heads: of_d_z.heads as i32,
            ..Default::default()
        };
        Ok(LaunchArguments {
            kernel: kernels::norm_backward(dtype),
            arguments,
            groups: division.groups as u32,
            sums,
        })
    }

    /// Checks that no gradient shares memory with another argument.
    fn check_overlaps(&self, workspace: Span<'_>) -> Checked<()> {
        let outputs = [
            Span::maybe("d_x", self.d_x.as_ref().map(|t| &t.0.0)),
            Span::maybe("d_z", self.d_z.as_ref().map(|t| &t.0)),
            Span::maybe("d_weight", self.d_weight.as_ref().map(|t| &t.0)),
            workspace,
        ];
        let inputs = [
            Span::of("x", &self.x.0),
            Span::of("z", &self.z),
            Span::maybe("weight", self.weight.as_ref()),
            Span::of("d_y", &self.d_y.0),
        ];
        alias::check(&outputs, &inputs, &[])
    }
}

impl LaunchArguments {
    /// Lengths `[sequences + 1]`: address, and whether entries have 64 bits. Gradients of rows past the last sequence
    /// become zeros, and these rows count for no weight.
    pub(crate) fn within(
        mut self,
        (cu_seqlens, wide): (*const c_void, bool),
        sequences: usize,
    ) -> Self {
        self.arguments.cu_seqlens = cu_seqlens;
        self.arguments.last = sequences as i32;
        self.arguments.wide = i32::from(wide);
        self
    }

    /// Enqueues the kernels on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<()> {
        if self.groups > 0 {
            let (groups, threads) = (self.groups, THREADS as u32);
            // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
            unsafe { context.launch(stream, self.kernel, groups, threads, &self.arguments)? };
        }
        (self.sums.as_ref()).map_or(Ok(()), |sums| sums.enqueue(context, stream))
    }
}
