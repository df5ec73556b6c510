//! Runs the same programs on the simulator in this process and through the drop-in library.

#[path = "../../tests/common/mod.rs"]
mod common;

use hip_sys::{Hip, HipError, hipError_t, types::*};
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const TO_DEVICE: hipMemcpyKind = hipMemcpyKind::hipMemcpyHostToDevice;
const TO_HOST: hipMemcpyKind = hipMemcpyKind::hipMemcpyDeviceToHost;

/// The drop-in lies beside the test, where cargo puts it.
fn drop_in() -> Hip {
    let test = std::env::current_exe().expect("this test's path");
    let path = test.with_file_name("libhip_on_simulator.so");
    Hip::load(Some(&path)).expect("the drop-in loads")
}

fn runtimes() -> [Hip; 2] {
    [deltawave_sim::hip::runtime(), drop_in()]
}

/// Device memory with contents.
unsafe fn upload<T: Copy>(hip: &Hip, data: &[T]) -> Result<*mut c_void, HipError> {
    let mut pointer = null_mut();
    // SAFETY: the allocation is as large as the slice.
    unsafe {
        hip.hipMalloc(&mut pointer, size_of_val(data))?;
        hip.hipMemcpy(pointer, data.as_ptr().cast(), size_of_val(data), TO_DEVICE)?;
    }
    Ok(pointer)
}

unsafe fn download<T: Copy + Default>(
    hip: &Hip,
    pointer: *const c_void,
    count: usize,
) -> Result<Vec<T>, HipError> {
    let mut data = vec![T::default(); count];
    let size = size_of_val(&data[..]);
    // SAFETY: the vector is as large as the copy.
    unsafe { hip.hipMemcpy(data.as_mut_ptr().cast(), pointer, size, TO_HOST)? };
    Ok(data)
}

#[test]
fn the_drop_in_exports_every_function() {
    for hip in runtimes() {
        let missing: Vec<_> = Hip::FUNCTIONS.iter().filter(|f| !hip.has(f)).collect();
        assert!(missing.is_empty(), "{}: {missing:?}", hip.library());
    }
}

#[test]
fn memory() -> Result<(), HipError> {
    for hip in runtimes() {
        // SAFETY: pointers and sizes match.
        unsafe {
            let data: Vec<u32> = (0..1000).collect();
            let pointer = upload(&hip, &data)?;
            assert_eq!(download::<u32>(&hip, pointer, 1000)?, data);
            hip.hipMemsetAsync(pointer, 0xff, 2000, hipStream_t::NULL)?;
            hip.hipStreamSynchronize(hipStream_t::NULL)?;
            let back = download::<u32>(&hip, pointer, 1000)?;
            assert!(back[..500].iter().all(|v| *v == u32::MAX) && back[500..] == data[500..]);
            hip.hipFree(pointer)?;
            let error = hip.hipFree(pointer).expect_err("freed twice");
            assert_eq!(error.code(), Some(hipError_t::hipErrorInvalidValue));
        }
    }
    Ok(())
}

struct Kernels {
    module: hipModule_t,
    saxpy: hipFunction_t,
    matmul: hipFunction_t,
}

unsafe fn load(hip: &Hip, code: &[u8]) -> Result<Kernels, HipError> {
    let mut kernels = Kernels {
        module: hipModule_t::NULL,
        saxpy: hipFunction_t::NULL,
        matmul: hipFunction_t::NULL,
    };
    // SAFETY: the code object is whole, the names are C strings.
    unsafe {
        hip.hipModuleLoadData(&mut kernels.module, code.as_ptr().cast())?;
        hip.hipModuleGetFunction(&mut kernels.saxpy, kernels.module, c"saxpy".as_ptr())?;
        hip.hipModuleGetFunction(&mut kernels.matmul, kernels.module, c"matmul16".as_ptr())?;
    }
    Ok(kernels)
}

#[test]
fn saxpy() -> Result<(), HipError> {
    const N: usize = 1000;
    let Some(code) = common::compile("milestone.hip", &[]) else {
        return Ok(());
    };
    for hip in runtimes() {
        let x: Vec<f32> = (0..N).map(|i| i as f32).collect();
        let y = vec![1.0f32; N];
        // SAFETY: the arguments are those of the kernel, and live through the launch.
        unsafe {
            let kernels = load(&hip, &code)?;
            let (mut dx, mut dy) = (upload(&hip, &x)?, upload(&hip, &y)?);
            let (mut a, mut n) = (2.0f32, N as i32);
            let mut arguments: [*mut c_void; 4] = [
                (&raw mut dy).cast(),
                (&raw mut dx).cast(),
                (&raw mut a).cast(),
                (&raw mut n).cast(),
            ];
            let mut stream = hipStream_t::NULL;
            hip.hipStreamCreateWithFlags(&mut stream, HIP_STREAM_NON_BLOCKING)?;
            let (mut start, mut stop) = (hipEvent_t::NULL, hipEvent_t::NULL);
            hip.hipEventCreateWithFlags(&mut start, HIP_EVENT_DEFAULT)?;
            hip.hipEventCreateWithFlags(&mut stop, HIP_EVENT_DEFAULT)?;
            hip.hipEventRecord(start, stream)?;
            hip.hipModuleLaunchKernel(
                kernels.saxpy,
                4,
                1,
                1,
                256,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                null_mut(),
            )?;
            hip.hipEventRecord(stop, stream)?;
            hip.hipEventSynchronize(stop)?;
            let mut milliseconds = -1.0;
            hip.hipEventElapsedTime(&mut milliseconds, start, stop)?;
            assert!(milliseconds > 0.0);
            let expected: Vec<f32> = x.iter().map(|x| 2.0 * x + 1.0).collect();
            assert_eq!(download::<f32>(&hip, dy, N)?, expected, "{}", hip.library());

            // Once more, arguments as one buffer, with another value of the global variable.
            let (mut offset, mut size) = (null_mut(), 0);
            hip.hipModuleGetGlobal(&mut offset, &mut size, kernels.module, c"offset".as_ptr())?;
            assert_eq!(size, 4);
            hip.hipMemcpy(offset, (&raw const a).cast(), 4, TO_DEVICE)?;
            let mut buffer = Vec::new();
            buffer.extend((dy as u64).to_le_bytes());
            buffer.extend((dx as u64).to_le_bytes());
            buffer.extend(a.to_le_bytes());
            buffer.extend(n.to_le_bytes());
            let mut size = buffer.len();
            let mut extra = [
                HIP_LAUNCH_PARAM_BUFFER_POINTER,
                buffer.as_mut_ptr().cast(),
                HIP_LAUNCH_PARAM_BUFFER_SIZE,
                (&raw mut size).cast(),
                HIP_LAUNCH_PARAM_END,
            ];
            hip.hipModuleLaunchKernel(
                kernels.saxpy,
                4,
                1,
                1,
                256,
                1,
                1,
                0,
                stream,
                null_mut(),
                extra.as_mut_ptr(),
            )?;
            hip.hipStreamSynchronize(stream)?;
            let expected: Vec<f32> = x.iter().map(|x| 4.0 * x + 3.0).collect();
            assert_eq!(download::<f32>(&hip, dy, N)?, expected, "{}", hip.library());

            hip.hipEventDestroy(start)?;
            hip.hipEventDestroy(stop)?;
            hip.hipStreamDestroy(stream)?;
            hip.hipFree(dx)?;
            hip.hipFree(dy)?;
            hip.hipModuleUnload(kernels.module)?;
        }
    }
    Ok(())
}

#[test]
fn matmul() -> Result<(), HipError> {
    let Some(code) = common::compile("milestone.hip", &[]) else {
        return Ok(());
    };
    // Small integers: every product and sum is exact.
    let value = |i: usize, m: usize| (i * 7 % m) as f32 - (m / 2) as f32;
    let a: Vec<f32> = (0..256).map(|i| value(i, 13)).collect();
    let b: Vec<f32> = (0..256).map(|i| value(i, 11)).collect();
    let c: Vec<f32> = (0..256).map(|i| value(i, 17)).collect();
    let bf16 = |v: &[f32]| -> Vec<u16> { v.iter().map(|x| (x.to_bits() >> 16) as u16).collect() };
    let expected: Vec<f32> = (0..256)
        .map(|i| {
            let (m, n) = (i / 16, i % 16);
            c[i] + (0..16).map(|k| a[m * 16 + k] * b[k * 16 + n]).sum::<f32>()
        })
        .collect();
    for hip in runtimes() {
        // SAFETY: the arguments are those of the kernel, and live through the launch.
        unsafe {
            let kernels = load(&hip, &code)?;
            let mut buffers = [
                upload(&hip, &[f32::NAN; 256])?,
                upload(&hip, &bf16(&a))?,
                upload(&hip, &bf16(&b))?,
                upload(&hip, &c)?,
            ];
            let mut arguments = buffers.each_mut().map(|b| (&raw mut *b).cast::<c_void>());
            let stream = hipStream_t::NULL;
            hip.hipModuleLaunchKernel(
                kernels.matmul,
                1,
                1,
                1,
                64,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                null_mut(),
            )?;
            hip.hipDeviceSynchronize()?;
            let found = download::<f32>(&hip, buffers[0], 256)?;
            assert_eq!(found, expected, "{}", hip.library());
            for buffer in buffers {
                hip.hipFree(buffer)?;
            }
            hip.hipModuleUnload(kernels.module)?;
        }
    }
    Ok(())
}

#[test]
fn a_captured_launch_is_replayed() -> Result<(), HipError> {
    const N: usize = 256;
    let Some(code) = common::compile("milestone.hip", &[]) else {
        return Ok(());
    };
    for hip in runtimes() {
        // SAFETY: the arguments are those of the kernel; the buffers live through the replays.
        unsafe {
            let kernels = load(&hip, &code)?;
            let x = vec![1.0f32; N];
            let (mut dx, mut dy) = (upload(&hip, &x)?, upload(&hip, &x)?);
            let (mut a, mut n) = (3.0f32, N as i32);
            let mut stream = hipStream_t::NULL;
            hip.hipStreamCreateWithFlags(&mut stream, HIP_STREAM_NON_BLOCKING)?;
            hip.hipStreamBeginCapture(stream, hipStreamCaptureMode::hipStreamCaptureModeRelaxed)?;
            hip.hipMemsetD32Async(dy, 2.0f32.to_bits() as i32, N, stream)?;
            {
                // Arguments are copied when the launch is recorded.
                let mut arguments: [*mut c_void; 4] = [
                    (&raw mut dy).cast(),
                    (&raw mut dx).cast(),
                    (&raw mut a).cast(),
                    (&raw mut n).cast(),
                ];
                hip.hipModuleLaunchKernel(
                    kernels.saxpy,
                    1,
                    1,
                    1,
                    256,
                    1,
                    1,
                    0,
                    stream,
                    arguments.as_mut_ptr(),
                    null_mut(),
                )?;
            }
            (a, n) = (0.0, 0);
            let _ = (a, n);
            let mut graph = hipGraph_t::NULL;
            hip.hipStreamEndCapture(stream, &mut graph)?;
            assert_eq!(download::<f32>(&hip, dy, N)?, x, "nothing has run yet");
            let mut executable = hipGraphExec_t::NULL;
            hip.hipGraphInstantiate(&mut executable, graph, null_mut(), null_mut(), 0)?;
            hip.hipGraphDestroy(graph)?;
            for _ in 0..2 {
                hip.hipGraphLaunch(executable, stream)?;
                hip.hipStreamSynchronize(stream)?;
                assert_eq!(download::<f32>(&hip, dy, N)?, [5.0; N]);
            }
            hip.hipGraphExecDestroy(executable)?;
            hip.hipStreamDestroy(stream)?;
            hip.hipFree(dx)?;
            hip.hipFree(dy)?;
            hip.hipModuleUnload(kernels.module)?;
        }
    }
    Ok(())
}

#[test]
fn what_is_no_code_object_is_refused() {
    for hip in runtimes() {
        let mut module = hipModule_t::NULL;
        // SAFETY: the image is longer than any header that is read before the magic is checked.
        let error = unsafe { hip.hipModuleLoadData(&mut module, [0u8; 4096].as_ptr().cast()) };
        let code = error.expect_err("no code object").code();
        assert_eq!(code, Some(hipError_t::hipErrorInvalidImage));
        // SAFETY: null pointers are refused.
        let error = unsafe { hip.hipModuleLoadData(&mut module, null()) };
        let code = error.expect_err("null").code();
        assert_eq!(code, Some(hipError_t::hipErrorInvalidValue));
    }
}
