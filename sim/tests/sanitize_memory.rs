//! Tracking of device memory by the HIP runtime: it is unwritten until a copy, a fill or a kernel writes it.

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;

use deltawave_sim::launch::Options;
use deltawave_sim::sanitize::Checks;
use hip_sys::{Hip, hipMemcpyKind, types::*};

const COUNT: usize = 256;
const BYTES: usize = 4 * COUNT;

/// `y = 2 x + y`; the fault, if there is one.
fn saxpy(hip: &Hip, kernel: hipFunction_t, y: *mut c_void, x: *mut c_void) -> Option<String> {
    let (mut y, mut x, mut a, mut n) = (y, x, 2.0f32, COUNT as i32);
    let mut arguments: [*mut c_void; 4] = [
        (&raw mut y).cast(),
        (&raw mut x).cast(),
        (&raw mut a).cast(),
        (&raw mut n).cast(),
    ];
    let (arguments, null) = (arguments.as_mut_ptr(), hipStream_t::NULL);
    // SAFETY: the arguments are those of the kernel.
    unsafe {
        hip.hipModuleLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, null, arguments, null_mut())
            .expect("a launch");
    }
    let fault = deltawave_sim::hip::last_fault();
    deltawave_sim::hip::clear_fault();
    fault
}

#[test]
fn memory_holds_nothing_until_it_is_written() {
    let Some(object) = common::compile("launch.hip", &[]) else {
        return;
    };
    let checked = |uninitialized| Options {
        checks: Checks {
            uninitialized,
            ..Checks::NONE
        },
        ..Options::default()
    };
    deltawave_sim::hip::set_options(checked(true));
    let hip = deltawave_sim::hip::runtime();
    let mut kernel = hipFunction_t::NULL;
    let [mut x, mut y, mut z] = [null_mut(); 3];
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        let mut module = hipModule_t::NULL;
        hip.hipModuleLoadData(&mut module, object.as_ptr().cast())
            .expect("a code object");
        hip.hipModuleGetFunction(&mut kernel, module, c"saxpy".as_ptr())
            .expect("a kernel");
        for p in [&mut x, &mut y, &mut z] {
            hip.hipMalloc(p, BYTES).expect("memory");
        }
        let ones = vec![1f32; COUNT];
        let to_device = hipMemcpyKind::hipMemcpyHostToDevice;
        hip.hipMemcpy(x, ones.as_ptr().cast(), BYTES, to_device)
            .expect("a copy");
    }
    let undefined = |fault: Option<String>| {
        let text = fault.unwrap_or_default();
        text.contains("decides what is stored to memory") && text.contains("which nothing wrote")
    };
    assert!(undefined(saxpy(&hip, kernel, y, x)), "y holds nothing");

    // Half of it is not enough.
    // SAFETY: as above.
    unsafe { hip.hipMemset(y, 0, BYTES / 2).expect("a fill") };
    assert!(
        undefined(saxpy(&hip, kernel, y, x)),
        "half of y holds nothing"
    );
    // SAFETY: as above.
    unsafe { hip.hipMemset(y, 0, BYTES).expect("a fill") };
    assert_eq!(saxpy(&hip, kernel, y, x), None);

    // A copy of nothing is nothing; what a kernel wrote is something.
    let on_device = hipMemcpyKind::hipMemcpyDeviceToDevice;
    let copy = |to, from| {
        // SAFETY: as above.
        unsafe { hip.hipMemcpy(to, from, BYTES, on_device).expect("a copy") };
    };
    copy(x, z);
    assert!(
        undefined(saxpy(&hip, kernel, y, x)),
        "x is a copy of nothing"
    );
    copy(z, y);
    assert_eq!(saxpy(&hip, kernel, y, z), None);

    // A kernel that nothing watched may have written anything.
    deltawave_sim::hip::set_options(checked(false));
    assert_eq!(saxpy(&hip, kernel, y, x), None);
    deltawave_sim::hip::set_options(checked(true));
    assert_eq!(saxpy(&hip, kernel, y, x), None);
}
