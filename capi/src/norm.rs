//! Gated RMS norm: launches.

use std::ffi::{c_int, c_void};

use deltawave::norm::{GatedNorm, OutputGate};

use crate::abi::{self, dw_context, dw_norm_tensors};
use crate::context::context;
use crate::read::{self, Argument, Checked};
use crate::status::guard;

/// Output gate: the activation of z.
pub(crate) fn output_gate(gate: i32) -> Checked<OutputGate> {
    let gates = [
        (abi::DW_GATE_SILU, "DW_GATE_SILU", OutputGate::Silu),
        (abi::DW_GATE_SIGMOID, "DW_GATE_SIGMOID", OutputGate::Sigmoid),
    ];
    read::choice("gate", gate, &gates)
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
            gate: output_gate(t.gate)?,
            y: argument("y", t.y).tokens_mut()?,
        };
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { context.borrow_stream(stream) };
        norm.launch(context, &stream)
    })
}
