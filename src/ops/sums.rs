//! Gradients of weights: sums of what the workgroups of a backward kernel leave, in an order that does not vary.

use std::ffi::c_void;

use crate::abi::{dwk_gradient_sums_args, dwk_gradient_sums_part};
use crate::check::{self, Checked};
use crate::kernels;
use crate::runtime::{Context, Stream};
use crate::tensor::TensorMut;
use crate::types::Dtype;

/// Columns of a workgroup.
const COLUMNS: u32 = 16;

/// Workgroups on a compute unit beyond which a backward kernel gains nothing.
pub(crate) const RESIDENT: u32 = 4;

/// Launch arguments.
pub(crate) struct LaunchArguments(dwk_gradient_sums_args);

/// An output of `elements` numbers, `[elements]`. Absent: columns that are skipped.
pub(crate) fn vector(
    argument: &str,
    t: &Option<TensorMut<'_, 1>>,
    elements: usize,
) -> Checked<dwk_gradient_sums_part> {
    let mut part = dwk_gradient_sums_part {
        columns: elements as i32,
        inner: elements.max(1) as i32,
        ..Default::default()
    };
    if let Some(TensorMut(t)) = t {
        check::dtype(argument, t.dtype, &[Dtype::F32])?;
        part.inner_stride = check::vector(argument, t, elements)?;
        check::no_overlap(argument, &t.shape, &t.strides)?;
        part.out = t.address.cast();
    }
    Ok(part)
}

impl LaunchArguments {
    /// Sums of `records` records at `partials`, for one output or two. None if neither is wanted.
    pub(crate) fn new(
        partials: *mut c_void,
        records: usize,
        first: dwk_gradient_sums_part,
        second: dwk_gradient_sums_part,
    ) -> Option<Self> {
        let wanted = !first.out.is_null() || !second.out.is_null();
        wanted.then_some(LaunchArguments(dwk_gradient_sums_args {
            partials: partials.cast_const().cast(),
            first,
            second,
            records: records as i32,
            columns: first.columns + second.columns,
        }))
    }

    /// Enqueues the kernel on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> crate::Result<()> {
        let kernel = kernels::gradient_sums();
        let groups = (self.0.columns as u32).div_ceil(COLUMNS);
        if groups == 0 {
            return Ok(());
        }
        let threads = context.target().threads(kernel.role());
        // SAFETY: the outputs were checked; the caller vouches for the workspace.
        unsafe { context.launch(stream, kernel, groups, threads, &self.0) }
    }
}
