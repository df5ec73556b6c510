//! Gated RMS norm and its gradients: launches.

use std::ffi::{c_int, c_void};

use deltawave::norm::{GatedNorm, GatedNormBackward, OutputGate};
use deltawave::workspace::Workspace;

use crate::abi::{self, dw_context, dw_norm_backward_tensors, dw_norm_tensors};
use crate::context::context;
use crate::read::{self, Argument, Checked};
use crate::status::guard;

/// Output gate: the activation of z.
pub(crate) fn output_gate(argument: &str, gate: i32) -> Checked<OutputGate> {
    let gates = [
        (abi::DW_GATE_SILU, "DW_GATE_SILU", OutputGate::Silu),
        (abi::DW_GATE_SIGMOID, "DW_GATE_SIGMOID", OutputGate::Sigmoid),
    ];
    read::choice(argument, gate, &gates)
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_norm_launch(
    context: *const dw_context,
    stream: *mut c_void,
    tensors: *const dw_norm_tensors,
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
        let norm = GatedNorm {
            x: (argument("x", t.x).optional())
                .map(Argument::tokens)
                .transpose()?,
            z: argument("z", t.z).blocks()?,
            weight: (argument("weight", t.weight).optional())
                .map(Argument::vector)
                .transpose()?,
            eps: t.eps,
            gate: output_gate("gate", t.gate)?,
            y: argument("y", t.y).tokens_mut()?,
        };
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { context.borrow_stream(stream) };
        norm.launch(context, &stream)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_norm_backward_workspace_bytes(
    context: *const dw_context,
    tokens: i64,
    value_heads: i64,
    value_dim: i64,
    bytes: *mut usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (out, context) = unsafe { (read::output("bytes", bytes)?, self::context(context)?) };
        *out = GatedNormBackward::workspace_bytes(
            context,
            read::natural("tokens", tokens)?,
            read::natural("value_heads", value_heads)?,
            read::natural("value_dim", value_dim)?,
        )?;
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_norm_backward_launch(
    context: *const dw_context,
    stream: *mut c_void,
    tensors: *const dw_norm_backward_tensors,
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
        let backward = GatedNormBackward {
            x: argument("x", t.x).tokens()?,
            z: argument("z", t.z).blocks()?,
            weight: given("weight", t.weight)
                .map(Argument::vector)
                .transpose()?,
            eps: t.eps,
            gate: output_gate("gate", t.gate)?,
            d_y: argument("d_y", t.d_y).tokens()?,
            d_x: given("d_x", t.d_x).map(Argument::tokens_mut).transpose()?,
            d_z: given("d_z", t.d_z).map(Argument::blocks_mut).transpose()?,
            d_weight: given("d_weight", t.d_weight)
                .map(Argument::vector_mut)
                .transpose()?,
        };
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        backward.launch(context, &stream, workspace)
    })
}
