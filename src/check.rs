//! Argument checks that operations share. Each error names the argument.

use crate::abi::{dwk_state_strides, dwk_token_strides};
use crate::error::{ArgumentError, ArgumentKind};
use crate::runtime::{Context, Stream};
use crate::tensor::{Batch, Owner, Tensor, TokenScalars, Tokens};
use crate::types::Dtype;

pub(crate) type Checked<T> = Result<T, ArgumentError>;

/// Largest stride from token to token: the 64 rows of a chunk are addressed by 31-bit byte offsets.
pub(crate) const MAX_TOKEN_STRIDE: usize = (1 << 24) - 16;

pub(crate) fn ensure(condition: bool, error: impl FnOnce() -> ArgumentError) -> Checked<()> {
    if condition { Ok(()) } else { Err(error()) }
}

/// Checks numbers, given with their names and the most that is allowed.
pub(crate) fn sizes(numbers: &[(&str, usize, usize)]) -> Checked<()> {
    numbers.iter().try_for_each(|&(argument, given, most)| {
        ensure(given <= most, || {
            let allowed = format!("it must be at most {most}");
            ArgumentError::new(argument, ArgumentKind::Value, given.to_string(), allowed)
        })
    })
}

pub(crate) fn dtype(argument: &str, given: Dtype, allowed: &[Dtype]) -> Checked<()> {
    ensure(allowed.contains(&given), || {
        let names: Vec<_> = allowed.iter().map(|d| d.name()).collect();
        ArgumentError::new(
            argument,
            ArgumentKind::Dtype,
            format!("dtype {given}"),
            format!("it must be {}", names.join(" or ")),
        )
    })
}

/// Checks that an address is aligned, and not null unless its view is empty.
pub(crate) fn pointer(
    argument: &str,
    address: *const std::ffi::c_void,
    align: usize,
    empty: bool,
) -> Checked<()> {
    ensure(empty || !address.is_null(), || {
        ArgumentError::new(
            argument,
            ArgumentKind::Pointer,
            "a null pointer",
            "it must point to the tensor",
        )
    })?;
    ensure(address.addr().is_multiple_of(align), || {
        let was = format!("address {address:p}");
        ArgumentError::new(
            argument,
            ArgumentKind::Pointer,
            was,
            format!("it must be aligned to {align} bytes"),
        )
    })
}

/// Checks that memory with a known context belongs to the launching context.
pub(crate) fn device(argument: &str, owner: &Owner, context: &Context) -> Checked<()> {
    ensure(owner.as_ref().is_none_or(|o| o.is_same(context)), || {
        ArgumentError::new(
            argument,
            ArgumentKind::Device,
            "memory of another context",
            "it must be of the context that launches",
        )
    })
}

/// Checks that a stream belongs to the launching context.
pub(crate) fn stream(stream: &Stream, context: &Context) -> Checked<()> {
    ensure(stream.context().is_same(context), || {
        ArgumentError::new(
            "stream",
            ArgumentKind::Device,
            "a stream of another context",
            "it must be of the context that launches",
        )
    })
}

/// Checks that no two elements of an output share an address: with dimensions ordered by stride, each stride must
/// exceed the extent of all smaller ones.
pub(crate) fn no_overlap<const R: usize>(
    argument: &str,
    shape: &[usize; R],
    strides: &[usize; R],
) -> Checked<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut dims: [_; R] = std::array::from_fn(|i| (strides[i], shape[i]));
    dims.sort_unstable();
    let mut below = 1usize;
    for (stride, n) in dims.into_iter().filter(|&(_, n)| n > 1) {
        ensure(stride >= below, || {
            let was = format!("strides {strides:?} for shape {shape:?}");
            ArgumentError::new(
                argument,
                ArgumentKind::Stride,
                was,
                "no two elements of an output may overlap",
            )
        })?;
        below = below.max((n - 1).saturating_mul(stride).saturating_add(below));
    }
    Ok(())
}

fn token_strides(argument: &str, t: &Tensor<'_, 4>, batch: Batch) -> Checked<dwk_token_strides> {
    let [batch_stride, token, head, _] = t.strides;
    ensure(token <= MAX_TOKEN_STRIDE, || {
        let allowed = format!("at most {MAX_TOKEN_STRIDE} elements from token to token");
        ArgumentError::new(
            argument,
            ArgumentKind::Stride,
            format!("a token stride of {token}"),
            allowed,
        )
    })?;
    let fits = |x: usize| i64::try_from(x).ok().filter(|x| *x < 1 << 40);
    let too_large = |what: &str, x: usize| {
        ArgumentError::new(
            argument,
            ArgumentKind::Stride,
            format!("a {what} stride of {x}"),
            "it must be below 2^40 elements",
        )
    };
    let head = fits(head).ok_or_else(|| too_large("head", head))?;
    let batch_stride = fits(batch_stride).ok_or_else(|| too_large("batch", batch_stride))?;
    let token = token as i64;
    let sequence = match batch {
        Batch::Packed { .. } => 0,
        // Kernels number tokens through the whole batch: token b * tokens + t lies b * (stride - tokens * token)
        // further.
        Batch::Dense { tokens, .. } => batch_stride - tokens as i64 * token,
    };
    Ok(dwk_token_strides {
        sequence,
        token,
        head,
    })
}

fn token_shape(
    argument: &str,
    t: &Tensor<'_, 4>,
    dense: bool,
    batch: Batch,
    heads: usize,
    dim: Option<usize>,
) -> Checked<()> {
    let (wanted_batch, wanted_tokens, wants_dense) = match batch {
        Batch::Packed { tokens } => (1, tokens, false),
        Batch::Dense { batch, tokens } => (batch, tokens, true),
    };
    let wanted = [wanted_batch, wanted_tokens, heads, dim.unwrap_or(1)];
    ensure(dense == wants_dense && t.shape == wanted, || {
        let show = |s: [usize; 4], dense: bool| {
            let end = if dim.is_some() { 4 } else { 3 };
            format!("{:?}", &s[usize::from(!dense)..end])
        };
        let was = format!("shape {}", show(t.shape, dense));
        ArgumentError::new(
            argument,
            ArgumentKind::Shape,
            was,
            format!("it must be {}", show(wanted, wants_dense)),
        )
    })
}

/// Checks the factor of outputs, if one is given.
pub(crate) fn scale(scale: Option<f32>) -> Checked<()> {
    let given = scale.unwrap_or(1.0);
    ensure(given.is_finite(), || {
        ArgumentError::new("scale", ArgumentKind::Value, given, "it must be finite")
    })
}

/// Checks a tensor `[T, heads, dim]` or `[B, T, heads, dim]` and returns its address and strides.
pub(crate) fn tokens(
    argument: &str,
    t: &Tokens<'_>,
    batch: Batch,
    heads: usize,
    dim: usize,
    allowed: &[Dtype],
) -> Checked<dwk_token_strides> {
    dtype(argument, t.0.dtype, allowed)?;
    token_shape(argument, &t.0, t.1, batch, heads, Some(dim))?;
    pointer(argument, t.0.address, t.0.dtype.size(), batch.rows() == 0)?;
    ensure(t.0.strides[3] == 1 || dim == 1, || {
        let was = format!("an innermost stride of {}", t.0.strides[3]);
        ArgumentError::new(
            argument,
            ArgumentKind::Stride,
            was,
            "the innermost stride must be 1",
        )
    })?;
    token_strides(argument, &t.0, batch)
}

/// [`tokens`] for an output.
pub(crate) fn output_tokens(
    argument: &str,
    t: &Tokens<'_>,
    batch: Batch,
    heads: usize,
    dim: usize,
    allowed: &[Dtype],
) -> Checked<dwk_token_strides> {
    let strides = tokens(argument, t, batch, heads, dim, allowed)?;
    no_overlap(argument, &t.0.shape, &t.0.strides)?;
    Ok(strides)
}

/// Checks scalars `[T, heads]` or `[B, T, heads]` and returns their address and strides.
pub(crate) fn scalars(
    argument: &str,
    t: &TokenScalars<'_>,
    batch: Batch,
    heads: usize,
    allowed: &[Dtype],
) -> Checked<dwk_token_strides> {
    dtype(argument, t.0.dtype, allowed)?;
    ensure(t.0.shape[3] == 1, || {
        let was = format!("blocks of {} heads", t.0.shape[3]);
        let allowed = "heads must be at one distance from one another";
        ArgumentError::new(argument, ArgumentKind::Stride, was, allowed)
    })?;
    token_shape(argument, &t.0, t.1, batch, heads, None)?;
    pointer(argument, t.0.address, t.0.dtype.size(), batch.rows() == 0)?;
    token_strides(argument, &t.0, batch)
}

/// [`scalars`] for an output.
pub(crate) fn output_scalars(
    argument: &str,
    t: &TokenScalars<'_>,
    batch: Batch,
    heads: usize,
    allowed: &[Dtype],
) -> Checked<dwk_token_strides> {
    let strides = scalars(argument, t, batch, heads, allowed)?;
    no_overlap(argument, &t.0.shape, &t.0.strides)?;
    Ok(strides)
}

/// Checks a vector of one number per head, of any type. Returns its stride.
pub(crate) fn per_head(argument: &str, t: &Tensor<'_, 1>, heads: usize) -> Checked<i64> {
    vector(argument, t, heads)
}

/// Checks a vector of `elements` numbers of any type. Returns its stride.
pub(crate) fn vector(argument: &str, t: &Tensor<'_, 1>, elements: usize) -> Checked<i64> {
    dtype(argument, t.dtype, &[Dtype::F32, Dtype::Bf16, Dtype::F16])?;
    ensure(t.shape == [elements], || {
        ArgumentError::new(
            argument,
            ArgumentKind::Shape,
            format!("shape {:?}", t.shape),
            format!("it must be [{elements}]"),
        )
    })?;
    pointer(argument, t.address, t.dtype.size(), false)?;
    i64::try_from(t.strides[0]).map_err(|_| {
        ArgumentError::new(
            argument,
            ArgumentKind::Stride,
            t.strides[0],
            "it must be below 2^63",
        )
    })
}

/// Checks that strides are below 2^40 elements, for kernels with 64-bit offsets.
pub(crate) fn element_strides<const R: usize>(
    argument: &str,
    strides: [usize; R],
) -> Checked<[i64; R]> {
    ensure(strides.iter().all(|s| *s < 1 << 40), || {
        let was = format!("strides {strides:?}");
        let allowed = "they must be below 2^40 elements";
        ArgumentError::new(argument, ArgumentKind::Stride, was, allowed)
    })?;
    Ok(strides.map(|s| s as i64))
}

/// Checks that a state tensor has the given shape, and returns its strides.
pub(crate) fn state(
    argument: &str,
    t: &Tensor<'_, 4>,
    shape: [usize; 4],
    output: bool,
) -> Checked<dwk_state_strides> {
    dtype(argument, t.dtype, &[Dtype::F32, Dtype::Bf16, Dtype::F16])?;
    ensure(t.shape == shape, || {
        ArgumentError::new(
            argument,
            ArgumentKind::Shape,
            format!("shape {:?}", t.shape),
            format!("it must be {shape:?}"),
        )
    })?;
    pointer(argument, t.address, t.dtype.size(), shape[0] == 0)?;
    ensure(t.strides[3] == 1, || {
        let was = format!("an innermost stride of {}", t.strides[3]);
        ArgumentError::new(
            argument,
            ArgumentKind::Stride,
            was,
            "the innermost stride must be 1",
        )
    })?;
    let limit = |what: &str, x: usize| {
        i64::try_from(x)
            .ok()
            .filter(|x| *x < 1 << 40)
            .ok_or_else(|| {
                ArgumentError::new(
                    argument,
                    ArgumentKind::Stride,
                    format!("a {what} stride of {x}"),
                    "it must be below 2^40 elements",
                )
            })
    };
    let strides = dwk_state_strides {
        sequence: limit("sequence", t.strides[0])?,
        head: limit("head", t.strides[1])?,
        row: limit("row", t.strides[2])?,
    };
    if output {
        no_overlap(argument, &t.shape, &t.strides)?;
    }
    Ok(strides)
}

/// Checks a raw region: at least `bytes` bytes at an address aligned to `align`.
pub(crate) fn region(
    argument: &str,
    address: *const std::ffi::c_void,
    given: usize,
    bytes: usize,
    align: usize,
) -> Checked<()> {
    ensure(given >= bytes, || {
        ArgumentError::new(
            argument,
            ArgumentKind::Size,
            format!("{given} bytes"),
            format!("at least {bytes} bytes are needed"),
        )
    })?;
    pointer(argument, address, align, bytes == 0)
}

/// Number of an element type in `hip/kernel_args.h`.
pub(crate) fn type_code(dtype: Dtype) -> i32 {
    let code = match dtype {
        Dtype::F32 => crate::abi::DWK_F32,
        Dtype::Bf16 => crate::abi::DWK_BF16,
        Dtype::F16 => crate::abi::DWK_F16,
    };
    code as i32
}
