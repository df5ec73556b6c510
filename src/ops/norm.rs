//! Gated RMS norm of the outputs of a Gated DeltaNet layer, for each token and value head.
//!
//! ```text
//! y = x / sqrt(mean(x^2) + eps) * weight * gate(z)
//! ```
//!
//! in f32, rounded once, to nearest even. The norm comes before the gate, as in Qwen3-Next and in FLA's layers. A row
//! of zeros, such as outputs of padding or past the last sequence, stays zeros for any z.

mod backward;

use std::ptr;

pub use backward::GatedNormBackward;
pub(crate) use backward::LaunchArguments as BackwardArguments;

use crate::abi::{self, dwk_norm_args};
use crate::alias::{self, Span};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels::{self, Kernel, Target};
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Tensor, Tokens, TokensMut};
use crate::types::Dtype;

/// Largest row.
pub const MAX_VALUE_DIM: usize = 256;

/// Threads of a workgroup where there are few tokens, and most threads of any workgroup.
const THREADS: u32 = 256;
/// Numbers of a row that a lane owns.
const LANE_ELEMENTS: usize = 8;
/// Lanes of a row of up to 128 numbers, and of a longer one.
const ROW_LANES: [usize; 2] = [16, 32];

/// Gate of the norm, a function of z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OutputGate {
    /// `z / (1 + exp(-z))`.
    #[default]
    Silu,
    /// `1 / (1 + exp(-z))`.
    Sigmoid,
}

/// The tensors of a gated norm over `T` tokens and `HV` value heads. All but the weight are of one type, bf16 or fp16.
///
/// A launch refuses outputs that share memory with other arguments, except as `docs/reference/aliasing.md` lists.
#[derive(Debug)]
pub struct GatedNorm<'a> {
    /// `[T, HV, V]`, V a multiple of 16 up to 256; absent: y, in place.
    pub x: Option<Tokens<'a>>,
    /// `[T, blocks, heads * V]`: blocks of adjacent heads, `HV` in all, such as `[T, HV, V]`.
    /// [`ConvInput::flat_z`](crate::conv::ConvInput::flat_z) and
    /// [`ConvInput::interleaved_z`](crate::conv::ConvInput::interleaved_z) make it of packed projections.
    pub z: Tensor<'a, 3>,
    /// `[V]`, f32, bf16 or fp16. Absent: 1.
    pub weight: Option<Tensor<'a, 1>>,
    /// Number added to the mean of the squares: at least the smallest normal f32.
    pub eps: f32,
    /// The gate, a function of z.
    pub gate: OutputGate,
    /// `[T, HV, V]`. It may be x.
    pub y: TokensMut<'a>,
}

/// Launch arguments: the kernel's argument struct and grid.
pub(crate) struct LaunchArguments {
    kernel: Kernel<dwk_norm_args>,
    arguments: dwk_norm_args,
    groups: u32,
    threads: u32,
}

/// Checks that eps is a finite, positive normal f32, so that the root is normal too.
pub(crate) fn check_eps(eps: f32) -> Checked<()> {
    check::ensure(eps >= f32::MIN_POSITIVE && eps.is_finite(), || {
        let allowed = "it must be a positive, normal number";
        ArgumentError::new("eps", ArgumentKind::Value, eps, allowed)
    })
}

impl GatedNorm<'_> {
    /// Name of the kernel that a launch runs.
    pub fn kernel(&self) -> &'static str {
        kernels::norm(self.y.0.0.dtype).name()
    }

    fn lower_tensors(&self, target: &Target, compute_units: u32) -> Checked<LaunchArguments> {
        let y = &self.y.0;
        let [_, tokens, value_heads, value_dim] = y.0.shape;
        let dtype = y.0.dtype;
        check::dtype("y", dtype, &[Dtype::Bf16, Dtype::F16])?;
        let refuse_shape = |allowed: String| {
            let was = format!("shape {:?}", &y.0.shape[usize::from(!y.1)..]);
            ArgumentError::new("y", ArgumentKind::Shape, was, allowed)
        };
        check::ensure(!y.1, || {
            refuse_shape("it must be [tokens, value heads, V]".to_owned())
        })?;
        let fits = value_dim > 0 && value_dim.is_multiple_of(16) && value_dim <= MAX_VALUE_DIM;
        check::ensure(fits, || {
            refuse_shape(format!(
                "V must be a multiple of 16 from 16 to {MAX_VALUE_DIM}"
            ))
        })?;
        check::ensure((1..1 << 20).contains(&value_heads), || {
            refuse_shape("there must be at least one value head, and fewer than 2^20".to_owned())
        })?;
        let batch = Batch::Packed { tokens };
        let y_strides = check::output_tokens("y", y, batch, value_heads, value_dim, &[dtype])?;
        let (x, x_strides) = match &self.x {
            Some(x) => {
                let strides = check::tokens("x", x, batch, value_heads, value_dim, &[dtype])?;
                (x.0.address, strides)
            }
            None => (y.0.address, y_strides),
        };
        let z = lower_z("z", &self.z, tokens, value_heads, value_dim, dtype)?;
        let weight_stride = match &self.weight {
            Some(weight) => check::vector("weight", weight, value_dim)?,
            None => 0,
        };
        check_eps(self.eps)?;

        let row_lanes = row_lanes(value_dim);
        let groups = |run: usize, threads: u32| {
            let rows = (tokens.div_ceil(run) as u64).saturating_mul(value_heads as u64);
            rows.div_ceil(u64::from(threads) / row_lanes as u64)
        };
        let many = groups(target.norm_run, THREADS) >= 2 * u64::from(compute_units);
        let (run, threads) = match many {
            true => (target.norm_run, target.norm_threads),
            false => (1, THREADS),
        };
        let groups = groups(run, threads);
        check::ensure(
            groups < (1 << 32) / u64::from(threads) && i32::try_from(tokens).is_ok(),
            || refuse_shape("a launch must have fewer than 2^32 threads".to_owned()),
        )?;
        let arguments = dwk_norm_args {
            x,
            z: self.z.address,
            weight: (self.weight.as_ref()).map_or(ptr::null(), |t| t.address.cast_const()),
            y: y.0.address,
            x_strides,
            y_strides,
            z_token: z.token,
            z_block: z.block,
            weight_stride,
            tokens: tokens as i32,
            value_heads: value_heads as i32,
            value_dim: value_dim as i32,
            block_heads: z.heads as i32,
            run: run as i32,
            weight_type: (self.weight.as_ref()).map_or(0, |t| check::type_code(t.dtype)),
            mean: 1.0 / value_dim as f32,
            eps: self.eps,
            flags: match self.gate {
                OutputGate::Silu => abi::DWK_NORM_SILU,
                OutputGate::Sigmoid => 0,
            },
            group_heads: (threads as usize / row_lanes) as i32,
        };
        Ok(LaunchArguments {
            kernel: kernels::norm(dtype),
            arguments,
            groups: groups as u32,
            threads,
        })
    }

    /// Enqueues the computation: one kernel.
    ///
    /// # Errors
    /// A tensor of the wrong shape, type or context, or strides or an eps that are not allowed; nothing is then
    /// enqueued. A launch that the runtime refuses.
    pub fn launch(&self, context: &Context, stream: &Stream) -> Result<()> {
        let lowered = self.lower(context, stream)?;
        self.check_overlaps()?;
        context.make_current()?;
        let _turn = stream.turn();
        lowered.enqueue(context, stream)
    }

    /// Checks that y shares no memory with another argument. y may be x: a lane writes elements that it has read
    /// itself.
    fn check_overlaps(&self) -> Checked<()> {
        let outputs = [Span::of("y", &self.y.0.0)];
        let inputs = [
            Span::maybe("x", self.x.as_ref().map(|t| &t.0)),
            Span::of("z", &self.z),
            Span::maybe("weight", self.weight.as_ref()),
        ];
        alias::check(&outputs, &inputs, &[("y", "x")])
    }

    /// All checks except those of overlaps. Returns the launch arguments.
    pub(crate) fn lower(&self, context: &Context, stream: &Stream) -> Result<LaunchArguments> {
        check::stream(stream, context)?;
        let owners = [
            ("x", self.x.as_ref().map(|t| &t.0.owner)),
            ("z", Some(&self.z.owner)),
            ("weight", self.weight.as_ref().map(|t| &t.owner)),
            ("y", Some(&self.y.0.0.owner)),
        ];
        for (name, owner) in owners {
            owner.map_or(Ok(()), |owner| check::device(name, owner, context))?;
        }
        Ok(self.lower_tensors(context.target(), context.device().compute_units)?)
    }
}

impl LaunchArguments {
    /// The kernel's arguments, for kernels with the norm fused in.
    pub(crate) fn arguments(&self) -> &dwk_norm_args {
        &self.arguments
    }

    /// Enqueues the kernel on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<()> {
        if self.groups == 0 {
            return Ok(());
        }
        let (groups, threads) = (self.groups, self.threads);
        // SAFETY: views of buffers borrow their memory; callers of `from_raw` vouch for raw views.
        unsafe { context.launch(stream, self.kernel, groups, threads, &self.arguments) }
    }
}

/// Lanes of a row of `value_dim` numbers.
fn row_lanes(value_dim: usize) -> usize {
    let [short, long] = ROW_LANES;
    match value_dim <= short * LANE_ELEMENTS {
        true => short,
        false => long,
    }
}

/// Checks z, or its gradient.
fn lower_z(
    argument: &str,
    z: &Tensor<'_, 3>,
    tokens: usize,
    value_heads: usize,
    value_dim: usize,
    dtype: Dtype,
) -> Checked<Blocks> {
    check::dtype(argument, z.dtype, &[dtype])?;
    let [rows, blocks, size] = z.shape;
    let whole = size > 0 && size.is_multiple_of(value_dim);
    let all = blocks.checked_mul(size) == value_heads.checked_mul(value_dim);
    check::ensure(rows == tokens && whole && all, || {
        let was = format!("shape {:?}", z.shape);
        let allowed = format!(
            "it must be [{tokens}, blocks, heads of a block * {value_dim}], of {value_heads} heads"
        );
        ArgumentError::new(argument, ArgumentKind::Shape, was, allowed)
    })?;
    check::ensure(z.strides[2] == 1, || {
        let was = format!("an innermost stride of {}", z.strides[2]);
        let allowed = "the innermost stride must be 1";
        ArgumentError::new(argument, ArgumentKind::Stride, was, allowed)
    })?;
    check::ensure(z.strides[0] <= check::MAX_TOKEN_STRIDE, || {
        let was = format!("a token stride of {}", z.strides[0]);
        let most = check::MAX_TOKEN_STRIDE;
        let allowed = format!("at most {most} elements from token to token");
        ArgumentError::new(argument, ArgumentKind::Stride, was, allowed)
    })?;
    check::pointer(argument, z.address, dtype.size(), tokens == 0)?;
    let [token, block, _] = check::element_strides(argument, z.strides)?;
    Ok(Blocks {
        token,
        block,
        heads: size / value_dim,
    })
}

/// Layout of the heads of z: strides, and heads per block.
struct Blocks {
    token: i64,
    block: i64,
    heads: usize,
}

impl Blocks {
    /// One block of all heads, of a tensor that is absent.
    fn whole(heads: usize) -> Self {
        Blocks {
            token: 0,
            block: 0,
            heads,
        }
    }
}
