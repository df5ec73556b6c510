//! The gated norm through the C interface: a result, and what is refused, by the name of the argument.

use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};

use deltawave_c::abi::{self, DW_ERROR_ARGUMENT, DW_OK, dw_norm_tensors, dw_tensor};
use deltawave_c::*;
use half::bf16;

#[track_caller]
fn expect(status: c_int, wanted: &str) {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    let text = text.to_str().expect("UTF-8");
    if wanted.is_empty() {
        assert_eq!(status, DW_OK as c_int, "{text}");
    } else {
        assert_eq!(status, DW_ERROR_ARGUMENT as c_int, "{text}");
        assert!(text.starts_with(wanted), "wanted `{wanted}`, was `{text}`");
    }
}

#[test]
fn results_and_refusals() {
    const N: usize = 2 * 3 * 16;
    let (mut context, mut memory) = (null_mut(), null_mut());
    // x and z, all twos.
    let twos = vec![bf16::from_f32(2.0); 2 * N];
    // SAFETY: the pointers are valid, and the copy has that many bytes on both sides.
    unsafe {
        let simulator = abi::DW_BACKEND_SIMULATOR as c_int;
        expect(dw_context_create(simulator, 0, &mut context), "");
        expect(dw_malloc(context, 6 * N, &mut memory), "");
        let from = twos.as_ptr().cast();
        let to_device = abi::DW_TO_DEVICE as c_int;
        expect(dw_copy(context, memory, from, 4 * N, to_device), "");
    }
    let tensor = |part: usize| dw_tensor {
        size: size_of::<dw_tensor>(),
        data: memory.wrapping_byte_add(2 * N * part),
        dtype: abi::DW_BF16 as i32,
        rank: 3,
        shape: [2, 3, 16, 0],
        strides: [48, 16, 1, 0],
    };
    let (x, z, y) = (tensor(0), tensor(1), tensor(2));
    let run = |change: &dyn Fn(&mut dw_norm_tensors)| {
        let mut tensors = dw_norm_tensors {
            size: size_of::<dw_norm_tensors>(),
            x: &x,
            z: &z,
            y: &y,
            eps: 12.0,
            gate: abi::DW_GATE_SIGMOID as i32,
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid, or null.
        unsafe { dw_norm_launch(context, null_mut(), &tensors) }
    };
    let read = |part: usize| {
        let mut found = [bf16::ZERO; N];
        let to_host = abi::DW_TO_HOST as c_int;
        let from = memory.wrapping_byte_add(2 * N * part);
        // SAFETY: both sides have that many bytes.
        unsafe {
            expect(dw_synchronize(context, null_mut()), "");
            let to = found.as_mut_ptr().cast();
            expect(dw_copy(context, to, from, 2 * N, to_host), "");
        }
        found.map(bf16::to_f32)
    };
    // The mean of the squares and eps make 16.
    let sigmoid = 0.5 / (1.0 + f32::exp(-2.0));
    expect(run(&|_| {}), "");
    assert_eq!(read(2), [bf16::from_f32(sigmoid).to_f32(); N]);
    let in_place = |t: &mut dw_norm_tensors| (t.x, t.y, t.gate) = (null(), &x, 0);
    expect(run(&in_place), "");
    assert_eq!(read(0), [bf16::from_f32(2.0 * sigmoid).to_f32(); N]);

    expect(run(&|t| t.size = 8), "tensors.size: 8");
    expect(run(&|t| t.z = null()), "z: a null pointer");
    expect(run(&|t| t.y = null()), "y: a null pointer");
    expect(run(&|t| t.weight = &x), "weight: shape [2, 3, 16]");
    expect(run(&|t| t.gate = 2), "gate: 2");
    expect(run(&|t| t.eps = 0.0), "eps: 0");
    // SAFETY: made above, and used by nobody.
    unsafe {
        expect(dw_free(context, memory), "");
        dw_context_destroy(context);
    }
}
