//! Refused launches, and kernels that fault. A fault poisons the whole process, so all of it is one test.

mod common;

use hip_sys::{Hip, HipError, hipError_t, types::*};
use std::ffi::c_void;
use std::ptr::null_mut;

fn code(result: Result<(), HipError>) -> hipError_t {
    result
        .err()
        .and_then(|e| e.code())
        .unwrap_or(hipError_t::hipSuccess)
}

struct Launcher<'a> {
    hip: &'a Hip,
    kernel: hipFunction_t,
    y: *mut c_void,
    x: *mut c_void,
}

impl Launcher<'_> {
    fn saxpy(&self, grid: u32, block: u32, lds: u32, n: i32) -> Result<(), HipError> {
        let (mut y, mut x, mut a, mut n) = (self.y, self.x, 2.0f32, n);
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut y).cast(),
            (&raw mut x).cast(),
            (&raw mut a).cast(),
            (&raw mut n).cast(),
        ];
        // SAFETY: the arguments are those of the kernel; the simulator checks every access.
        unsafe {
            self.hip.hipModuleLaunchKernel(
                self.kernel,
                grid,
                1,
                1,
                block,
                1,
                1,
                lds,
                hipStream_t::NULL,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        }
    }
}

#[test]
fn refusals_and_faults() {
    let Some(object) = common::compile("launch.hip", &[]) else {
        return;
    };
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        let hip = deltawave_sim::hip::runtime();
        let mut module = hipModule_t::NULL;
        hip.hipModuleLoadData(&mut module, object.as_ptr().cast())
            .unwrap();
        let mut kernel = hipFunction_t::NULL;
        let unknown = hip.hipModuleGetFunction(&mut kernel, module, c"nothing".as_ptr());
        assert_eq!(code(unknown), hipError_t::hipErrorNotFound);
        hip.hipModuleGetFunction(&mut kernel, module, c"saxpy".as_ptr())
            .unwrap();
        let mut value = 0;
        let threads = hipFunction_attribute::HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        hip.hipFuncGetAttribute(&mut value, threads, kernel)
            .unwrap();
        assert_eq!(value, 1024);
        hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&mut value, kernel, 256, 40 << 10)
            .unwrap();
        assert_eq!(value, 1);

        let (mut x, mut y) = (null_mut(), null_mut());
        hip.hipMalloc(&mut x, 4 * 1000).unwrap();
        hip.hipMalloc(&mut y, 4 * 1000).unwrap();
        let launcher = Launcher {
            hip: &hip,
            kernel,
            y,
            x,
        };

        // Refused: nothing ran, the device works.
        for (grid, block, lds, expected, text) in [
            (0, 256, 0, hipError_t::hipErrorInvalidConfiguration, "zero"),
            (1, 0, 0, hipError_t::hipErrorInvalidConfiguration, "zero"),
            (1, 1025, 0, hipError_t::hipErrorInvalidConfiguration, "1024"),
            (
                u32::MAX,
                2,
                0,
                hipError_t::hipErrorInvalidConfiguration,
                "2^32",
            ),
            (
                1,
                64,
                65537,
                hipError_t::hipErrorLaunchOutOfResources,
                "65536",
            ),
        ] {
            assert_eq!(code(launcher.saxpy(grid, block, lds, 0)), expected);
            let message = deltawave_sim::hip::last_message().unwrap();
            assert!(message.contains(text), "{message}");
        }
        hip.hipDeviceSynchronize().unwrap();
        assert_eq!(deltawave_sim::hip::last_fault(), None);

        // It runs, and is counted.
        deltawave_sim::hip::reset_statistics();
        launcher.saxpy(4, 256, 0, 1000).unwrap();
        hip.hipDeviceSynchronize().unwrap();
        let counted = deltawave_sim::hip::statistics()["saxpy"];
        assert_eq!(counted.launches, 1);
        assert!(counted.wave_instructions >= 16 && counted.seconds > 0.0);

        // Out of bounds: the launch succeeds, all that follows fails.
        launcher.saxpy(4, 256, 0, 1001).unwrap();
        let error = hip.hipDeviceSynchronize().expect_err("fault");
        assert_eq!(error.code(), Some(hipError_t::hipErrorIllegalAddress));
        assert!(error.is_poisoned());
        assert_eq!(
            code(launcher.saxpy(1, 64, 0, 0)),
            hipError_t::hipErrorIllegalAddress
        );
        assert_eq!(
            code(hip.hipMemset(x, 0, 4)),
            hipError_t::hipErrorIllegalAddress
        );
        let text = deltawave_sim::hip::last_fault().unwrap();
        for part in [
            "saxpy",
            "global",
            "lane 40",
            "0 bytes past the end",
            "4000 bytes",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }

        // Forgotten: everything is as before.
        deltawave_sim::hip::clear_fault();
        launcher.saxpy(4, 256, 0, 1000).unwrap();
        hip.hipDeviceSynchronize().unwrap();

        // A fault is that of one session: another one goes on, and its streams do in whatever thread.
        let session = deltawave_sim::hip::Session::new();
        let mut own = hipStream_t::NULL;
        session.enter();
        hip.hipStreamCreateWithFlags(&mut own, 0).unwrap();
        launcher.saxpy(4, 256, 0, 1001).unwrap();
        assert_eq!(
            code(hip.hipDeviceSynchronize()),
            hipError_t::hipErrorIllegalAddress
        );
        std::thread::scope(|scope| {
            let process = scope.spawn(|| {
                let hip = deltawave_sim::hip::runtime();
                hip.hipDeviceSynchronize().unwrap();
                code(hip.hipStreamSynchronize(own))
            });
            let of_stream = process.join().expect("a thread");
            assert_eq!(of_stream, hipError_t::hipErrorIllegalAddress);
        });
        let other = deltawave_sim::hip::Session::new();
        other.enter();
        launcher.saxpy(4, 256, 0, 1000).unwrap();
        hip.hipDeviceSynchronize().unwrap();
        assert!(deltawave_sim::hip::last_fault().is_some());
        session.enter();
        assert!(hip.hipDeviceSynchronize().is_err());
        drop(session);
        assert_eq!(deltawave_sim::hip::last_fault(), None);
        hip.hipDeviceSynchronize().unwrap();

        // Reset: everything is gone, and the device works.
        launcher.saxpy(4, 256, 0, 1001).unwrap();
        assert_eq!(
            code(hip.hipDeviceSynchronize()),
            hipError_t::hipErrorIllegalAddress
        );
        hip.hipDeviceReset().unwrap();
        hip.hipDeviceSynchronize().unwrap();
        assert_eq!(code(hip.hipFree(x)), hipError_t::hipErrorInvalidValue);
        assert_eq!(
            code(launcher.saxpy(1, 64, 0, 0)),
            hipError_t::hipErrorInvalidHandle
        );
    }
}
