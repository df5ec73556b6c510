//! Gates and their gradients: launches.

use std::ffi::{c_int, c_void};

use deltawave::error::Result;
use deltawave::gate::{Gate, GateBackward};
use deltawave::workspace::Workspace;

use crate::abi::{dw_context, dw_gate_backward_tensors, dw_gate_tensors, dw_tensor};
use crate::context::context;
use crate::read::{self, Argument};
use crate::status::guard;

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_gate_launch(
    context: *const dw_context,
    stream: *mut c_void,
    tensors: *const dw_gate_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (context, t) = unsafe {
            (
                self::context(context)?,
                read::structure("tensors", tensors)?,
            )
        };
        // SAFETY: as above.
        let gate = unsafe { gate(&t) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { context.borrow_stream(stream) };
        gate.launch(context, &stream)
    })
}

/// Tensors of gates, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn gate(t: &dw_gate_tensors) -> Result<Gate<'static>> {
    let argument = |name, pointer: *const dw_tensor| -> Argument {
        // SAFETY: the caller passes a null or valid pointer.
        unsafe { Argument::new(name, pointer) }
    };
    let dt_bias = argument("dt_bias", t.dt_bias).optional();
    Ok(Gate {
        a: argument("a", t.a).scalars_in_blocks()?,
        b: argument("b", t.b).scalars_in_blocks()?,
        a_log: argument("a_log", t.a_log).per_head()?,
        dt_bias: dt_bias.map(Argument::per_head).transpose()?,
        allow_neg_eigval: read::flag("allow_neg_eigval", t.allow_neg_eigval)?,
        g: argument("g", t.g).scalars_mut()?,
        beta: argument("beta", t.beta).scalars_mut()?,
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_gate_backward_workspace_bytes(
    context: *const dw_context,
    tokens: i64,
    value_heads: i64,
    bytes: *mut usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (out, context) = unsafe { (read::output("bytes", bytes)?, self::context(context)?) };
        *out = GateBackward::workspace_bytes(
            context,
            read::natural("tokens", tokens)?,
            read::natural("value_heads", value_heads)?,
        )?;
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_gate_backward_launch(
    context: *const dw_context,
    stream: *mut c_void,
    tensors: *const dw_gate_backward_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (context, t) = unsafe {
            (
                self::context(context)?,
                read::structure("tensors", tensors)?,
            )
        };
        // SAFETY: as above.
        let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
        let given = |name, pointer| argument(name, pointer).optional();
        let scalars = |name, pointer| given(name, pointer).map(Argument::scalars).transpose();
        let outputs = |name, pointer| {
            given(name, pointer)
                .map(Argument::scalars_in_blocks_mut)
                .transpose()
        };
        let per_head = |name, pointer| given(name, pointer).map(Argument::per_head_mut).transpose();
        let dt_bias = given("dt_bias", t.dt_bias);
        let backward = GateBackward {
            a: argument("a", t.a).scalars_in_blocks()?,
            b: argument("b", t.b).scalars_in_blocks()?,
            a_log: argument("a_log", t.a_log).per_head()?,
            dt_bias: dt_bias.map(Argument::per_head).transpose()?,
            allow_neg_eigval: read::flag("allow_neg_eigval", t.allow_neg_eigval)?,
            d_g: scalars("d_g", t.d_g)?,
            d_beta: scalars("d_beta", t.d_beta)?,
            d_a: outputs("d_a", t.d_a)?,
            d_b: outputs("d_b", t.d_b)?,
            d_a_log: per_head("d_a_log", t.d_a_log)?,
            d_dt_bias: per_head("d_dt_bias", t.d_dt_bias)?,
        };
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        backward.launch(context, &stream, workspace)
    })
}
