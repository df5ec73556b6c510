//! Backward of the gates: gradients of a, b, `A_log` and `dt_bias`.

use std::ffi::c_void;
use std::ptr;

use super::{THREADS, block_heads_of, ensure_packed, in_blocks};
use crate::abi::{self, dwk_gate_args, dwk_gate_backward_args};
use crate::alias::{self, Span};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels;
use crate::ops::sums;
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Tensor, TensorMut, TokenScalars, TokenScalarsMut};
use crate::types::Dtype;
use crate::workspace::{WORKSPACE_ALIGN, Workspace, check_workspace};

/// Most heads that adjacent threads have, as a power of two.
const MOST_LANES_LOG2: u32 = 8;
/// Tokens of a thread for which a workgroup is worthwhile.
const LEAST_TOKENS: usize = 4;

/// The tensors of the backward of a [`Gate`](super::Gate) over `T` tokens and `HV` value heads: its inputs, gradients of g
/// and beta, and the gradients to compute. Absent gradients are not computed. Nothing is kept from the forward, which may
/// have been part of a [`Conv`](crate::conv::Conv).
///
/// A launch refuses outputs that share memory with other arguments.
#[derive(Debug)]
pub struct GateBackward<'a> {
    /// `[T, HV]`, f32, bf16 or fp16, any strides; heads may lie in blocks ([`TokenScalars::in_blocks`]).
    pub a: TokenScalars<'a>,
    /// `[T, HV]`, as a.
    pub b: TokenScalars<'a>,
    /// `[HV]`, f32, bf16 or fp16.
    pub a_log: Tensor<'a, 1>,
    /// `[HV]`; absent is 0.
    pub dt_bias: Option<Tensor<'a, 1>>,
    /// Whether beta was doubled.
    pub allow_neg_eigval: bool,
    /// Gradient of g, `[T, HV]`, f32; absent: zeros.
    pub d_g: Option<TokenScalars<'a>>,
    /// Gradient of beta, `[T, HV]`, f32; absent: zeros.
    pub d_beta: Option<TokenScalars<'a>>,
    /// `[T, HV]`, f32, bf16 or fp16; heads may lie in blocks ([`TokenScalarsMut::in_blocks`]).
    pub d_a: Option<TokenScalarsMut<'a>>,
    /// `[T, HV]`, as d_a.
    pub d_b: Option<TokenScalarsMut<'a>>,
    /// `[HV]`, f32.
    pub d_a_log: Option<TensorMut<'a, 1>>,
    /// `[HV]`, f32.
    pub d_dt_bias: Option<TensorMut<'a, 1>>,
}

/// Launch arguments: those of both kernels.
pub(crate) struct LaunchArguments {
    arguments: dwk_gate_backward_args,
    groups: u32,
    sums: Option<sums::LaunchArguments>,
}

const MOST_TOKENS: usize = (1 << 31) - 1;
const MOST_HEADS: usize = (1 << 24) - 1;

/// Division of tokens among workgroups, and of heads among threads.
struct Division {
    rows: usize,
    groups: usize,
    lanes_log2: u32,
}

impl Division {
    fn new(compute_units: u32, tokens: usize, heads: usize) -> Self {
        let lanes_log2 = heads.max(1).next_power_of_two().ilog2();
        let lanes_log2 = lanes_log2.min(MOST_LANES_LOG2);
        let slices = THREADS as usize >> lanes_log2;
        let most = (sums::RESIDENT * compute_units) as usize;
        let rows = tokens.div_ceil(most).max(LEAST_TOKENS * slices);
        let groups = if heads == 0 { 0 } else { tokens.div_ceil(rows) };
        Division {
            rows,
            groups,
            lanes_log2,
        }
    }
}

impl GateBackward<'_> {
    /// Bytes of workspace that a launch needs: at most 32 bytes per compute unit and head.
    ///
    /// # Errors
    /// More tokens or value heads than a launch takes.
    pub fn workspace_bytes(context: &Context, tokens: usize, value_heads: usize) -> Result<usize> {
        let most = [
            ("tokens", tokens, MOST_TOKENS),
            ("value_heads", value_heads, MOST_HEADS),
        ];
        check::sizes(&most)?;
        Ok(Self::workspace_of(context, tokens, value_heads))
    }

    /// [`GateBackward::workspace_bytes`] of numbers that were checked.
    pub(crate) fn workspace_of(context: &Context, tokens: usize, value_heads: usize) -> usize {
        let division = Division::new(context.device().compute_units, tokens, value_heads);
        let bytes = division.groups * 2 * value_heads * size_of::<f32>();
        bytes.next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Names of the kernels that a launch runs, in order.
    pub fn kernels(&self) -> Vec<&'static str> {
        let wants_sums = self.d_a_log.is_some() || self.d_dt_bias.is_some();
        let sums = wants_sums.then(|| kernels::gradient_sums().name());
        std::iter::once(kernels::gate_backward().name())
            .chain(sums)
            .collect()
    }

    /// Enqueues the backward: the kernels that [`GateBackward::kernels`] names, nothing else.
    ///
    /// # Errors
    /// A tensor of another shape, type or context, gradients that share memory with other arguments, a workspace that is
    /// too small; nothing is then enqueued. A launch that the runtime refuses.
    pub fn launch(
        &self,
        context: &Context,
        stream: &Stream,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        ensure_packed("a", &self.a)?;
        let [_, tokens, blocks, heads] = self.a.0.shape;
        let heads = blocks.saturating_mul(heads);
        check_elements(tokens, heads)?;
        let bytes = Self::workspace_of(context, tokens, heads);
        check_workspace(&workspace, bytes, context)?;
        let lowered = self.lower(context, stream, (tokens, heads), workspace.address())?;
        self.check_overlaps(workspace.span())?;
        context.make_current()?;
        let _turn = stream.turn();
        lowered.enqueue(context, stream)
    }

    /// All checks but those of overlaps and of the workspace's size. Returns the launch arguments.
    pub(crate) fn lower(
        &self,
        context: &Context,
        stream: &Stream,
        (tokens, heads): (usize, usize),
        scratch: *mut c_void,
    ) -> Result<LaunchArguments> {
        check::stream(stream, context)?;
        let scalars = |t: &'_ Option<TokenScalarsMut<'_>>| t.as_ref().map(|t| t.0.0.owner.clone());
        let owners = [
            ("a", Some(self.a.0.owner.clone())),
            ("b", Some(self.b.0.owner.clone())),
            ("a_log", Some(self.a_log.owner.clone())),
            ("dt_bias", self.dt_bias.as_ref().map(|t| t.owner.clone())),
            ("d_g", self.d_g.as_ref().map(|t| t.0.owner.clone())),
            ("d_beta", self.d_beta.as_ref().map(|t| t.0.owner.clone())),
            ("d_a", scalars(&self.d_a)),
            ("d_b", scalars(&self.d_b)),
            ("d_a_log", self.d_a_log.as_ref().map(|t| t.0.owner.clone())),
            (
                "d_dt_bias",
                self.d_dt_bias.as_ref().map(|t| t.0.owner.clone()),
            ),
        ];
        for (name, owner) in owners {
            owner.map_or(Ok(()), |owner| check::device(name, &owner, context))?;
        }
        let compute_units = context.device().compute_units;
        Ok(self.lower_tensors(compute_units, tokens, heads, scratch)?)
    }

    fn lower_tensors(
        &self,
        compute_units: u32,
        tokens: usize,
        heads: usize,
        scratch: *mut c_void,
    ) -> Checked<LaunchArguments> {
        check_elements(tokens, heads)?;
        let batch = Batch::Packed { tokens };
        let blocks = block_heads_of(
            heads,
            [
                ("a", Some(&self.a)),
                ("b", Some(&self.b)),
                ("d_a", self.d_a.as_ref().map(|t| &t.0)),
                ("d_b", self.d_b.as_ref().map(|t| &t.0)),
            ],
        )?;
        let (a_strides, a_block) = in_blocks("a", &self.a, tokens, heads, blocks)?;
        let (b_strides, b_block) = in_blocks("b", &self.b, tokens, heads, blocks)?;
        let a_log_stride = check::per_head("a_log", &self.a_log, heads)?;
        let dt_bias = self.dt_bias.as_ref();
        let dt_bias_stride = dt_bias.map_or(Ok(0), |t| check::per_head("dt_bias", t, heads))?;
        let given = |name, t: &Option<TokenScalars<'_>>| match t {
            Some(t) => {
                let strides = check::scalars(name, t, batch, heads, &[Dtype::F32])?;
                Checked::Ok((t.0.address.cast(), strides))
            }
            None => Ok((ptr::null_mut(), Default::default())),
        };
        let (g, g_strides) = given("d_g", &self.d_g)?;
        let (beta, beta_strides) = given("d_beta", &self.d_beta)?;
        let output = |name, t: &Option<TokenScalarsMut<'_>>| match t {
            Some(TokenScalarsMut(t)) => {
                let (strides, block) = in_blocks(name, t, tokens, heads, blocks)?;
                check::no_overlap(name, &t.0.shape, &t.0.strides)?;
                Checked::Ok((t.0.address, strides, block, check::type_code(t.0.dtype)))
            }
            None => Ok((ptr::null_mut(), Default::default(), 0, 0)),
        };
        let (d_a, d_a_strides, d_a_block, d_a_type) = output("d_a", &self.d_a)?;
        let (d_b, d_b_strides, d_b_block, d_b_type) = output("d_b", &self.d_b)?;
        let division = Division::new(compute_units, tokens, heads);
        let sums = sums::LaunchArguments::new(
            scratch,
            division.groups,
            sums::vector("d_a_log", &self.d_a_log, heads)?,
            sums::vector("d_dt_bias", &self.d_dt_bias, heads)?,
        );
        let arguments = dwk_gate_backward_args {
            gate: dwk_gate_args {
                a: self.a.0.address,
                b: self.b.0.address,
                a_log: self.a_log.address,
                dt_bias: dt_bias.map_or(ptr::null(), |t| t.address.cast_const()),
                g,
                beta,
                a_strides,
                b_strides,
                g_strides,
                beta_strides,
                a_block,
                b_block,
                a_log_stride,
                dt_bias_stride,
                tokens: tokens as i64,
                value_heads: heads as i32,
                block_heads: blocks.max(1) as i32,
                flags: match self.allow_neg_eigval {
                    true => abi::DWK_NEGATIVE_EIGENVALUES,
                    false => 0,
                },
                a_type: check::type_code(self.a.0.dtype),
                b_type: check::type_code(self.b.0.dtype),
                a_log_type: check::type_code(self.a_log.dtype),
                dt_bias_type: dt_bias.map_or(0, |t| check::type_code(t.dtype)),
                groups: division.groups as i32,
            },
            d_a,
            d_b,
            partials: match sums {
                Some(_) => scratch.cast(),
                None => ptr::null_mut(),
            },
            d_a_strides,
            d_b_strides,
            d_a_block,
            d_b_block,
            d_a_type,
            d_b_type,
            rows: division.rows as i32,
            lanes_log2: division.lanes_log2 as i32,
        };
        Ok(LaunchArguments {
            arguments,
            groups: division.groups as u32,
            sums,
        })
    }

    /// Checks that no gradient shares memory with another argument.
    fn check_overlaps(&self, workspace: Span<'_>) -> Checked<()> {
        let outputs = [
            Span::maybe("d_a", self.d_a.as_ref().map(|t| &t.0.0)),
            Span::maybe("d_b", self.d_b.as_ref().map(|t| &t.0.0)),
            Span::maybe("d_a_log", self.d_a_log.as_ref().map(|t| &t.0)),
            Span::maybe("d_dt_bias", self.d_dt_bias.as_ref().map(|t| &t.0)),
            workspace,
        ];
        let inputs = [
            Span::of("a", &self.a.0),
            Span::of("b", &self.b.0),
            Span::of("a_log", &self.a_log),
            Span::maybe("dt_bias", self.dt_bias.as_ref()),
            Span::maybe("d_g", self.d_g.as_ref().map(|t| &t.0)),
            Span::maybe("d_beta", self.d_beta.as_ref().map(|t| &t.0)),
        ];
        alias::check(&outputs, &inputs, &[])
    }
}

fn check_elements(tokens: usize, heads: usize) -> Checked<()> {
    let elements = (tokens as u64).saturating_mul(heads as u64);
    let fits = tokens <= MOST_TOKENS && heads <= MOST_HEADS && elements < 1 << 32;
    check::ensure(fits, || {
        let was = format!("{tokens} tokens of {heads} heads");
        let allowed = "fewer than 2^31 tokens, 2^24 heads and 2^32 elements";
        ArgumentError::new("a", ArgumentKind::Shape, was, allowed)
    })
}

impl LaunchArguments {
    /// Enqueues the kernels on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<()> {
        if self.groups > 0 {
            let kernel = kernels::gate_backward();
            // SAFETY: the tensors were checked against each other, and lie in the memory that they were made from.
            unsafe { context.launch(stream, kernel, self.groups, THREADS, &self.arguments)? };
        }
        (self.sums.as_ref()).map_or(Ok(()), |sums| sums.enqueue(context, stream))
    }
}
