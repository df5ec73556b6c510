//! Gates of a Gated DeltaNet layer, as a separate operation or within [`conv`](crate::conv).
//!
//! ```text
//! g    = -exp(A_log) * softplus(a + dt_bias)
//! beta = sigmoid(b), or 2 sigmoid(b)
//! ```
//!
//! Prefill and decode compute gates themselves from raw inputs. This operation is for callers that need the values.

mod backward;

use std::ptr;

pub use backward::GateBackward;
pub(crate) use backward::LaunchArguments as BackwardArguments;

use crate::abi::{self, dwk_gate_args, dwk_token_strides};
use crate::alias::{self, Span};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels;
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Tensor, TokenScalars, TokenScalarsMut};
use crate::types::Dtype;

const THREADS: u32 = 256;

/// Outputs that may be the same memory as an input: each element is written by the thread that has read it.
pub(crate) const SAME: &[(&str, &str)] = &[("g", "a"), ("beta", "b")];

/// The tensors of a gate computation over `T` tokens and `HV` value heads.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct Gate<'a> {
    /// `[T, HV]`, f32, bf16 or fp16, any strides; heads may lie in blocks ([`TokenScalars::in_blocks`]).
    pub a: TokenScalars<'a>,
    /// `[T, HV]`, as a.
    pub b: TokenScalars<'a>,
    /// `[HV]`, f32, bf16 or fp16. Prefer f32: `exp` magnifies the rounding of a 16-bit type.
    pub a_log: Tensor<'a, 1>,
    /// `[HV]`; absent is 0.
    pub dt_bias: Option<Tensor<'a, 1>>,
    /// Whether beta is doubled (OLMo-Hybrid). [`crate::gates::Gating::Raw`] describes the effect on errors.
    pub allow_neg_eigval: bool,
    /// `[T, HV]`, f32: natural logarithms, at most 0. It may be a if that is f32.
    pub g: TokenScalarsMut<'a>,
    /// `[T, HV]`, f32. It may be b if that is f32.
    pub beta: TokenScalarsMut<'a>,
}

impl<'a> Gate<'a> {
    /// Views of a and b in projected rows `b | a`, as in Qwen3.5. `ba` is `[T, 2 HV]` and may have more columns.
    ///
    /// # Errors
    /// Too few columns.
    pub fn flat(ba: &Tensor<'a, 2>, value_heads: usize) -> Result<[TokenScalars<'a>; 2]> {
        Self::interleaved(ba, 1, value_heads)
    }

    /// Views of a and b in projected rows of `HK` groups `b | a`, each for one key head's value heads, as in
    /// Qwen3-Next.
    ///
    /// # Errors
    /// Too few columns; heads that cannot be grouped.
    pub fn interleaved(
        ba: &Tensor<'a, 2>,
        key_heads: usize,
        value_heads: usize,
    ) -> Result<[TokenScalars<'a>; 2]> {
        check::ensure(
            key_heads > 0 && value_heads.is_multiple_of(key_heads),
            || {
                let allowed = format!("it must be a multiple of the {key_heads} key heads");
                ArgumentError::new("value_heads", ArgumentKind::Shape, value_heads, allowed)
            },
        )?;
        let columns = value_heads.saturating_mul(2);
        check::ensure(ba.shape[1] >= columns, || {
            let was = format!("shape {:?}", ba.shape);
            let allowed = format!("it must have at least {columns} columns");
            ArgumentError::new("ba", ArgumentKind::Shape, was, allowed)
        })?;
        let ([rows, _], [row, column]) = (ba.shape, ba.strides);
        let heads = value_heads / key_heads;
        let part = |offset: usize| {
            let strides = [row, heads.saturating_mul(2).saturating_mul(column), column];
            let shape = [rows, key_heads, heads];
            TokenScalars::in_blocks(ba.part(shape, strides, offset.saturating_mul(column)))
        };
        Ok([part(heads), part(0)])
    }
}

impl Gate<'_> {
    /// Checks the tensors and returns the kernel's arguments, with a workgroup for every 256 elements.
    pub(crate) fn lower(&self, tokens: usize, heads: usize) -> Checked<dwk_gate_args> {
        let batch = Batch::Packed { tokens };
        let all = [("a", Some(&self.a)), ("b", Some(&self.b))];
        let block_heads = block_heads_of(heads, all)?;
        let (a_strides, a_block) = in_blocks("a", &self.a, tokens, heads, block_heads)?;
        let (b_strides, b_block) = in_blocks("b", &self.b, tokens, heads, block_heads)?;
        let a_log_stride = check::per_head("a_log", &self.a_log, heads)?;
        let dt_bias_stride = self
            .dt_bias
            .as_ref()
            .map_or(Ok(0), |t| check::per_head("dt_bias", t, heads))?;
        let g_strides = check::output_scalars("g", &self.g.0, batch, heads, &[Dtype::F32])?;
        let beta_strides =
            check::output_scalars("beta", &self.beta.0, batch, heads, &[Dtype::F32])?;
        let value_heads = i32::try_from(heads).map_err(|_| {
            ArgumentError::new("a", ArgumentKind::Shape, heads, "at most 2^31 heads")
        })?;
        let groups = (tokens as u64).saturating_mul(heads as u64);
        let groups = groups.div_ceil(u64::from(THREADS));
        check::ensure(groups < 1 << 24, || {
            let was = format!("{tokens} tokens of {heads} heads");
            ArgumentError::new("a", ArgumentKind::Shape, was, "fewer than 2^32 elements")
        })?;
        let arguments = dwk_gate_args {
            a: self.a.0.address,
            b: self.b.0.address,
            a_log: self.a_log.address,
            dt_bias: self
                .dt_bias
                .as_ref()
                .map_or(ptr::null(), |t| t.address.cast_const()),
            g: self.g.0.0.address.cast(),
            beta: self.beta.0.0.address.cast(),
            a_strides,
            b_strides,
            g_strides,
            beta_strides,
            a_block,
            b_block,
            a_log_stride,
            dt_bias_stride,
            tokens: tokens as i64,
            value_heads,
            // At least 1, because the kernel divides by it.
            block_heads: block_heads.max(1) as i32,
            flags: if self.allow_neg_eigval {
                abi::DWK_NEGATIVE_EIGENVALUES
            } else {
                0
            },
            a_type: check::type_code(self.a.0.dtype),
            b_type: check::type_code(self.b.0.dtype),
            a_log_type: check::type_code(self.a_log.dtype),
            dt_bias_type: self
                .dt_bias
                .as_ref()
                .map_or(0, |t| check::type_code(t.dtype)),
            groups: groups as i32,
        };
        Ok(arguments)
    }

    /// Memory that is written, and memory that is read.
    #[inline]
    pub(crate) fn spans(&self) -> ([Span<'_>; 2], [Span<'_>; 4]) {
        (
            [Span::of("g", &self.g.0.0), Span::of("beta", &self.beta.0.0)],
            [
                Span::of("a", &self.a.0),
                Span::of("b", &self.b.0),
                Span::of("a_log", &self.a_log),
                Span::maybe("dt_bias", self.dt_bias.as_ref()),
            ],
        )
    }

    /// Checks that every tensor with a known context belongs to `context`.
    pub(crate) fn check_devices(&self, context: &Context) -> Checked<()> {
        let owners = [
            ("a", &self.a.0.owner),
            ("b", &self.b.0.owner),
            ("a_log", &self.a_log.owner),
            ("g", &self.g.0.0.owner),
            ("beta", &self.beta.0.0.owner),
        ];
        for (name, owner) in owners {
            check::device(name, owner, context)?;
        }
        match &self.dt_bias {
            Some(t) => check::device("dt_bias", &t.owner, context),
            None => Ok(()),
        }
    }

    /// Enqueues the computation.
    ///
    /// # Errors
    /// A tensor of another shape or type, or of another context; a launch that the runtime refuses.
    pub fn launch(&self, context: &Context, stream: &Stream) -> Result<()> {
        check::stream(stream, context)?;
        self.check_devices(context)?;
        ensure_packed("a", &self.a)?;
        let [_, tokens, blocks, heads] = self.a.0.shape;
        let arguments = self.lower(tokens, blocks.saturating_mul(heads))?;
        let (outputs, inputs) = self.spans();
        alias::check(&outputs, &inputs, SAME)?;
        let groups = arguments.groups as u32;
        if groups == 0 {
            return Ok(());
        }
        context.make_current()?;
        let _turn = stream.turn();
        // SAFETY: the tensors were checked against each other, and lie in the memory that they were made from.
        unsafe { context.launch(stream, kernels::gate(), groups, THREADS, &arguments) }
    }
}

/// Heads per block of tensors of which some have blocks; all heads if none has.
fn block_heads_of<const N: usize>(
    heads: usize,
    tensors: [(&str, Option<&TokenScalars<'_>>); N],
) -> Checked<usize> {
    let mut found: Option<(&str, usize)> = None;
    for (name, t) in tensors {
        let Some(own) = t.map(|t| t.0.shape[3]).filter(|n| *n > 1) else {
            continue;
        };
        let (first, wanted) = *found.get_or_insert((name, own));
        check::ensure(own == wanted, || {
            let allowed = format!("blocks of {wanted} heads, as in {first}");
            let was = format!("blocks of {own} heads");
            ArgumentError::new(name, ArgumentKind::Shape, was, allowed)
        })?;
    }
    Ok(found.map_or(heads, |(_, own)| own))
}

/// Checks scalars with heads in blocks of `block_heads`. Returns strides within a block, and the stride of blocks.
fn in_blocks(
    argument: &str,
    t: &TokenScalars<'_>,
    tokens: usize,
    heads: usize,
    block_heads: usize,
) -> Checked<(dwk_token_strides, i64)> {
    let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    let batch = Batch::Packed { tokens };
    let [_, rows, blocks, of_block] = t.0.shape;
    if of_block <= 1 {
        let strides = check::scalars(argument, t, batch, heads, &any)?;
        return Ok((strides, strides.head.saturating_mul(block_heads as i64)));
    }
    check::ensure(blocks.checked_mul(of_block) == Some(heads), || {
        let was = format!("shape {:?}", [rows, blocks, of_block]);
        let allowed = format!("it must have {heads} heads in its blocks");
        ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
    })?;
    let [_, token, block, head] = t.0.strides;
    // Checks one head of each block, then the heads of one block, as separate scalars.
    let of_blocks = t.0.part([1, rows, blocks, 1], [0, token, block, 1], 0);
    let of_heads = t.0.part([1, rows, of_block, 1], [0, token, head, 1], 0);
    let outer = check::scalars(argument, &TokenScalars(of_blocks, t.1), batch, blocks, &any)?;
    let inner = check::scalars(
        argument,
        &TokenScalars(of_heads, t.1),
        batch,
        of_block,
        &any,
    )?;
    Ok((inner, outer.head))
}

fn ensure_packed(argument: &str, t: &TokenScalars<'_>) -> Checked<()> {
    check::ensure(!t.1, || {
        ArgumentError::new(
            argument,
            ArgumentKind::Shape,
            format!("shape {:?}", &t.0.shape[..3]),
            "it must be [tokens, value heads]",
        )
    })
}
