//! Gates: launches.

use std::ffi::{c_int, c_void};

use deltawave::error::Result;
use deltawave::gate::Gate;

use crate::abi::{dw_context, dw_gate_tensors, dw_tensor};
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
