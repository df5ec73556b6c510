//! Gates of the recurrence: g and beta, or the projections that they are computed from.

use std::ffi::c_void;
use std::ptr;

use crate::abi::{self, dwk_token_strides};
use crate::alias::Span;
use crate::check::{self, Checked};
use crate::runtime::Context;
use crate::tensor::{Batch, Tensor, TokenScalars};
use crate::types::Dtype;

/// The gates of a recurrence.
#[derive(Clone, Debug)]
pub enum Gating<'a> {
    /// g and beta themselves.
    Given {
        /// `[T, HV]`, f32, natural logarithms, at most 0; absent: no decay.
        g: Option<TokenScalars<'a>>,
        /// `[T, HV]`, f32, bf16 or fp16; absent: 1.
        beta: Option<TokenScalars<'a>>,
    },
    /// Projections a and b; kernels compute g and beta from them.
    Raw {
        /// `[T, HV]`, f32, bf16 or fp16.
        a: TokenScalars<'a>,
        /// `[T, HV]`, f32, bf16 or fp16.
        b: TokenScalars<'a>,
        /// `[HV]`, f32, bf16 or fp16.
        a_log: Tensor<'a, 1>,
        /// `[HV]`; absent: 0.
        dt_bias: Option<Tensor<'a, 1>>,
        /// Whether beta is `2 sigmoid(b)`. Beta of 1.5 to 2 on repeated keys without decay is ill-conditioned: in bf16,
        /// outputs and states then have errors of 20% to 80% of their rms and more, here and in unfused kernels
        /// (`docs/results/accuracy.md`).
        allow_neg_eigval: bool,
    },
}

/// Addresses, strides and types of g and beta, or of a, b, `A_log` and `dt_bias`.
pub(crate) struct GatingArguments {
    pub(crate) g: *const c_void,
    pub(crate) beta: *const c_void,
    pub(crate) a_log: *const c_void,
    pub(crate) dt_bias: *const c_void,
    pub(crate) g_strides: dwk_token_strides,
    pub(crate) beta_strides: dwk_token_strides,
    pub(crate) a_log_stride: i64,
    pub(crate) dt_bias_stride: i64,
    pub(crate) g_type: i32,
    pub(crate) beta_type: i32,
    pub(crate) a_log_type: i32,
    pub(crate) dt_bias_type: i32,
    pub(crate) flags: u32,
}

impl Default for GatingArguments {
    fn default() -> Self {
        GatingArguments {
            g: ptr::null(),
            beta: ptr::null(),
            a_log: ptr::null(),
            dt_bias: ptr::null(),
            g_strides: dwk_token_strides::default(),
            beta_strides: dwk_token_strides::default(),
            a_log_stride: 0,
            dt_bias_stride: 0,
            g_type: 0,
            beta_type: 0,
            a_log_type: 0,
            dt_bias_type: 0,
            flags: 0,
        }
    }
}

impl Gating<'_> {
    /// Checks the tensors. `batch`: number of tokens, and whether tensors are packed or dense.
    pub(crate) fn lower(
        &self,
        heads: usize,
        batch: impl Fn(&TokenScalars<'_>) -> Batch,
    ) -> Checked<GatingArguments> {
        let any = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        let scalars =
            |name, t: &TokenScalars<'_>, types| check::scalars(name, t, batch(t), heads, types);
        let mut out = GatingArguments::default();
        match self {
            Gating::Given { g, beta } => {
                if let Some(g) = g {
                    out.g_strides = scalars("g", g, &[Dtype::F32])?;
                    out.g = g.0.address;
                }
                if let Some(beta) = beta {
                    out.beta_strides = scalars("beta", beta, &any)?;
                    out.beta = beta.0.address;
                    out.beta_type = check::type_code(beta.0.dtype);
                }
            }
            Gating::Raw {
                a,
                b,
                a_log,
                dt_bias,
                allow_neg_eigval,
            } => {
                out.g_strides = scalars("a", a, &any)?;
                out.beta_strides = scalars("b", b, &any)?;
                out.a_log_stride = check::per_head("a_log", a_log, heads)?;
                out.g = a.0.address;
                out.beta = b.0.address;
                out.a_log = a_log.address;
                out.g_type = check::type_code(a.0.dtype);
                out.beta_type = check::type_code(b.0.dtype);
                out.a_log_type = check::type_code(a_log.dtype);
                if let Some(dt_bias) = dt_bias {
                    out.dt_bias_stride = check::per_head("dt_bias", dt_bias, heads)?;
                    out.dt_bias = dt_bias.address;
                    out.dt_bias_type = check::type_code(dt_bias.dtype);
                }
                out.flags = abi::DWK_RAW_GATES;
                if *allow_neg_eigval {
                    out.flags |= abi::DWK_NEGATIVE_EIGENVALUES;
                }
            }
        }
        Ok(out)
    }

    /// Memory that kernels read.
    #[inline]
    pub(crate) fn spans(&self) -> [Span<'_>; 4] {
        match self {
            Gating::Given { g, beta } => [
                Span::maybe("g", g.as_ref().map(|t| &t.0)),
                Span::maybe("beta", beta.as_ref().map(|t| &t.0)),
                Span::NONE,
                Span::NONE,
            ],
            Gating::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            } => [
                Span::of("a", &a.0),
                Span::of("b", &b.0),
                Span::of("a_log", a_log),
                Span::maybe("dt_bias", dt_bias.as_ref()),
            ],
        }
    }

    /// Checks that every tensor with a known context belongs to `context`.
    pub(crate) fn check_devices(&self, context: &Context) -> Checked<()> {
        match self {
            Gating::Given { g, beta } => {
                let given = [("g", g), ("beta", beta)].into_iter();
                let mut given = given.filter_map(|(name, t)| Some((name, t.as_ref()?)));
                given.try_for_each(|(name, t)| check::device(name, &t.0.owner, context))
            }
            Gating::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            } => {
                check::device("a", &a.0.owner, context)?;
                check::device("b", &b.0.owner, context)?;
                check::device("a_log", &a_log.owner, context)?;
                dt_bias
                    .as_ref()
                    .map_or(Ok(()), |t| check::device("dt_bias", &t.owner, context))
            }
        }
    }
}
