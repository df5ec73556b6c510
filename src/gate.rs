//! The gates of a Gated DeltaNet layer, as an operation of its own.
//!
//! ```text
//! g    = -exp(A_log) * softplus(a + dt_bias)
//! beta = sigmoid(b), or 2 sigmoid(b)
//! ```
//!
//! Prefill computes them inside when it is given raw inputs; this is for callers that need the values.

use std::ptr;

use crate::abi::{self, dw_gate_args};
use crate::check::{self, Batch, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::runtime::{Context, Stream};
use crate::tensor::{Tensor, TokenScalars, TokenScalarsMut};
use crate::types::Dtype;

const THREADS: u32 = 256;

/// The tensors of a gate computation over `T` tokens and `HV` value heads.
#[derive(Debug)]
pub struct Gate<'a> {
    /// `[T, HV]`, f32, bf16 or fp16, any strides.
    pub a: TokenScalars<'a>,
    /// `[T, HV]`, f32, bf16 or fp16, any strides.
    pub b: TokenScalars<'a>,
    /// `[HV]`, f32, bf16 or fp16. Keep it f32: `exp` of it is what a 16-bit type rounds.
    pub a_log: Tensor<'a, 1>,
    /// `[HV]`; absent is 0.
    pub dt_bias: Option<Tensor<'a, 1>>,
    /// Whether beta is doubled (OLMo-Hybrid).
    pub allow_neg_eigval: bool,
    /// `[T, HV]`, f32: natural logarithms, at most 0.
    pub g: TokenScalarsMut<'a>,
    /// `[T, HV]`, f32.
    pub beta: TokenScalarsMut<'a>,
}

impl Gate<'_> {
    /// The kernel's arguments and its number of workgroups.
    fn lower(&self) -> Checked<(dw_gate_args, u32)> {
        let [_, tokens, heads, _] = self.a.0.shape;
        ensure_packed("a", &self.a)?;
        let batch = Batch::Packed { tokens };
        let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        let a_strides = check::scalars("a", &self.a, batch, heads, &any)?;
        let b_strides = check::scalars("b", &self.b, batch, heads, &any)?;
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
        let groups = (tokens as u64 * heads as u64).div_ceil(u64::from(THREADS));
        check::ensure(groups < 1 << 24, || {
            let was = format!("{tokens} tokens of {heads} heads");
            ArgumentError::new("a", ArgumentKind::Shape, was, "fewer than 2^32 elements")
        })?;
        let arguments = dw_gate_args {
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
            a_log_stride,
            dt_bias_stride,
            tokens: tokens as i64,
            value_heads,
            flags: if self.allow_neg_eigval {
                abi::DW_NEGATIVE_EIGENVALUES
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
        };
        Ok((arguments, groups as u32))
    }

    /// Enqueues the computation.
    ///
    /// # Errors
    /// A tensor of another shape or type, or of another context; a launch that the runtime refuses.
    pub fn launch(&self, context: &Context, stream: &Stream) -> Result<()> {
        check::stream(stream, context)?;
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
        if let Some(t) = &self.dt_bias {
            check::device("dt_bias", &t.owner, context)?;
        }
        let (arguments, groups) = self.lower()?;
        if groups == 0 {
            return Ok(());
        }
        context.make_current()?;
        // SAFETY: the tensors were checked against each other, and lie in the memory that they were made from.
        unsafe { context.launch(stream, "dw_gate", groups, THREADS, &arguments) }
    }
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
