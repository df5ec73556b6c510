//! The functions of the runtime that prefill and gates do not need themselves, on the device of the tests: they must do
//! on a GPU, AMD's or NVIDIA's, what they do on the simulator.

mod common;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use common::context;
use deltawave::abi::dwk_prefill_lengths_args;
use deltawave::code_objects;
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::Buffer;
use hip_sys::*;

/// A kernel loaded by hand: `prefill_lengths`, whose results are easy to know.
struct Lengths {
    module: hipModule_t,
    function: hipFunction_t,
    given: Buffer<i32>,
    checked: Buffer<i32>,
    status: Buffer<u32>,
}

/// One wave, for which the kernel is made.
fn threads(hip: &Hip) -> c_int {
    if hip.is_cuda() { 32 } else { 64 }
}

const GIVEN: [i32; 4] = [0, 7, 5, 9];
const CHECKED: [i32; 4] = [0, 7, 7, 9];

impl Lengths {
    fn new(context: &Context) -> Self {
        let code = code_objects::for_arch(&context.device().arch)
            .find(|c| c.name == "prefill_lengths")
            .expect("the context has it");
        let (mut module, mut function) = (hipModule_t::NULL, hipFunction_t::NULL);
        // SAFETY: the bytes are a whole code object, the others are valid for writes.
        unsafe {
            let hip = context.hip();
            hip.hipModuleLoadData(&mut module, code.bytes.as_ptr().cast())
                .expect("a module");
            hip.hipModuleGetFunction(&mut function, module, c"dw_prefill_lengths".as_ptr())
                .expect("a function");
        }
        Lengths {
            module,
            function,
            given: context.upload(&GIVEN).expect("memory"),
            checked: context.upload(&[-1; 4]).expect("memory"),
            status: context.upload(&[99]).expect("memory"),
        }
    }

    fn arguments(&self) -> dwk_prefill_lengths_args {
        dwk_prefill_lengths_args {
            cu_seqlens: self.given.address(),
            checked: self.checked.address().cast(),
            status: self.status.address().cast(),
            sequences: 3,
            tokens: 9,
            ..Default::default()
        }
    }

    fn launch(
        &self,
        stream: &Stream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Result<(), HipError> {
        let stream_handle = hipStream_t(stream.handle());
        let hip = stream.context().hip();
        // SAFETY: the arguments are of the kernel, and their memory outlives it: the results are waited for.
        unsafe {
            hip.hipModuleLaunchKernel(
                self.function,
                1,
                1,
                1,
                threads(hip) as u32,
                1,
                1,
                0,
                stream_handle,
                parameters,
                extra,
            )
        }
    }

    #[track_caller]
    fn expect_results(&mut self, stream: &Stream) {
        assert_eq!(self.checked.download(stream).expect("a copy"), CHECKED);
        assert_eq!(self.status.download(stream).expect("a copy"), [3]);
        self.checked.write(&[-1; 4]).expect("a copy");
        self.status.write(&[99]).expect("a copy");
    }
}

/// Arguments one by one, and packed; what the runtime knows of a kernel.
#[test]
fn kernels_are_loaded_and_launched() {
    let context = context();
    let hip = context.hip();
    let stream = context.stream().expect("a stream");
    let mut kernel = Lengths::new(&context);
    let mut arguments = kernel.arguments();
    let whole = (&raw mut arguments).cast::<c_void>();
    let launched = kernel.launch(&stream, [whole].as_mut_ptr(), null_mut());
    launched.expect("a launch");
    kernel.expect_results(&stream);

    let mut size = size_of_val(&arguments);
    let mut extra = [
        HIP_LAUNCH_PARAM_BUFFER_POINTER,
        whole,
        HIP_LAUNCH_PARAM_BUFFER_SIZE,
        (&raw mut size).cast(),
        HIP_LAUNCH_PARAM_END,
    ];
    let launched = kernel.launch(&stream, null_mut(), extra.as_mut_ptr());
    launched.expect("a launch");
    kernel.expect_results(&stream);

    let (mut registers, mut blocks) = (0, 0);
    let which = hipFunction_attribute::HIP_FUNC_ATTRIBUTE_NUM_REGS;
    // SAFETY: the function is loaded, the others are valid for writes.
    unsafe {
        hip.hipFuncGetAttribute(&mut registers, which, kernel.function)
            .expect("registers");
        hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            kernel.function,
            threads(hip),
            0,
        )
        .expect("an occupancy");
        let none = hip.hipModuleGetFunction(
            &mut hipFunction_t::default(),
            kernel.module,
            c"no_such_kernel".as_ptr(),
        );
        let none = none.expect_err("no such kernel");
        assert_eq!(none.code(), Some(hipError_t::hipErrorNotFound), "{none}");
        hip.hipModuleUnload(kernel.module).expect("unloaded");
    }
    assert!((1..=256).contains(&registers), "{registers}");
    assert!((1..=64).contains(&blocks), "{blocks}");
}

/// Bytes that are no code object are refused, by the call that was given them.
#[test]
fn what_is_no_code_is_refused() {
    let context = context();
    let mut module = hipModule_t::NULL;
    let text = c".version 8.3\n.target sm_90a\n.address_size 64\nno such directive\n";
    // SAFETY: the text ends with a null byte, `module` is valid for a write.
    let error = unsafe {
        let hip = context.hip();
        hip.hipModuleLoadData(&mut module, text.as_ptr().cast())
            .expect_err("no code")
    };
    assert_eq!(error.call(), "hipModuleLoadData");
    assert!(!error.is_poisoned());
    if context.hip().is_cuda() {
        assert_eq!(error.code(), Some(hipError_t::hipErrorInvalidKernelFile));
        // The log of the driver's compiler.
        assert!(error.to_string().contains("line 4"), "{error}");
    }
    context.alloc::<u8>(1).expect("nothing is lost");
}

/// Copies in every direction, fills of bytes and words, with a stream and without.
#[test]
fn copies_and_fills() {
    let context = context();
    let hip = context.hip();
    let stream = context.stream().expect("a stream");
    let handle = hipStream_t(stream.handle());
    let source: Vec<u32> = (0..5000).collect();
    let bytes = size_of_val(&source[..]);
    let mut target = vec![0u32; source.len()];
    let one = context.upload(&source).expect("memory");
    let two = context.alloc::<u32>(source.len()).expect("memory");
    type Kind = hipMemcpyKind;
    for kinds in [
        [Kind::hipMemcpyDeviceToDevice, Kind::hipMemcpyDeviceToHost],
        [Kind::hipMemcpyDefault; 2],
    ] {
        // SAFETY: all memory has `bytes` bytes, and outlives the work, which is waited for.
        unsafe {
            hip.hipMemset(two.address(), 0xee, bytes).expect("a fill");
            hip.hipMemcpy(two.address(), one.address(), bytes, kinds[0])
                .expect("a copy");
            hip.hipMemcpy(target.as_mut_ptr().cast(), two.address(), bytes, kinds[1])
                .expect("a copy");
            assert_eq!(target, source);
            target.fill(0);
            hip.hipMemsetAsync(two.address(), 0xee, bytes, handle)
                .expect("a fill");
            hip.hipMemcpyAsync(two.address(), one.address(), bytes, kinds[0], handle)
                .expect("a copy");
            hip.hipMemcpyAsync(
                target.as_mut_ptr().cast(),
                two.address(),
                bytes,
                kinds[1],
                handle,
            )
            .expect("a copy");
        }
        stream.synchronize().expect("done");
        assert_eq!(target, source);
    }
    let word = 0x1234_5678;
    // SAFETY: the buffer has so many words.
    unsafe { hip.hipMemsetD32Async(two.address(), word, 4999, handle) }.expect("a fill");
    let filled = two.download(&stream).expect("a copy");
    assert!(filled[..4999].iter().all(|x| *x == word as u32) && filled[4999] == 4999);
}

/// Pinned host memory, and what the runtime knows of pointers.
#[test]
fn pointers_are_known() {
    let context = context();
    let hip = context.hip();
    let buffer = context.upload(&[1u8; 64]).expect("memory");
    let mut pinned = null_mut();
    // SAFETY: `pinned` is valid for a write.
    unsafe { hip.hipHostMalloc(&mut pinned, 64, HIP_HOST_MALLOC_DEFAULT) }.expect("memory");
    let of = |pointer: *const c_void| {
        let mut found = hipPointerAttribute_t::default();
        // SAFETY: `found` is valid for a write, the pointer is only looked up.
        unsafe { hip.hipPointerGetAttributes(&mut found, pointer) }.expect("an answer");
        found
    };
    let inside = buffer.address().wrapping_byte_add(5).cast_const();
    let device = of(inside);
    assert_eq!(device.r#type, hipMemoryType::hipMemoryTypeDevice);
    assert_eq!(
        (device.devicePointer.cast_const(), device.device),
        (inside, 0)
    );
    assert_eq!(of(pinned).r#type, hipMemoryType::hipMemoryTypeHost);
    let local = 0u8;
    let unknown = of((&raw const local).cast());
    assert_eq!(unknown.r#type, hipMemoryType::hipMemoryTypeUnregistered);
    // SAFETY: both have 64 bytes; the memory is freed once.
    unsafe {
        hip.hipMemcpy(
            pinned,
            buffer.address(),
            64,
            hipMemcpyKind::hipMemcpyDeviceToHost,
        )
        .expect("a copy");
        assert_eq!(std::slice::from_raw_parts(pinned.cast::<u8>(), 64), [1; 64]);
        hip.hipHostFree(pinned).expect("freed");
    }
}

/// Versions, attributes, a stream's device, and devices that do not exist.
#[test]
fn devices_are_described() {
    let context = context();
    let hip = context.hip();
    let stream = context.stream().expect("a stream");
    let (mut version, mut device, mut warp, mut cache) = (0, -1, 0, 0);
    let mut properties = hipDeviceProp_tR0600::zeroed();
    type Attribute = hipDeviceAttribute_t;
    // SAFETY: all are valid for writes.
    unsafe {
        hip.hipDriverGetVersion(&mut version).expect("a version");
        hip.hipGetDevicePropertiesR0600(&mut properties, 0)
            .expect("properties");
        hip.hipDeviceGetAttribute(&mut warp, Attribute::hipDeviceAttributeWarpSize, 0)
            .expect("an attribute");
        hip.hipDeviceGetAttribute(&mut cache, Attribute::hipDeviceAttributeL2CacheSize, 0)
            .expect("an attribute");
        if hip.has("hipStreamGetDevice") {
            hip.hipStreamGetDevice(hipStream_t(stream.handle()), &mut device)
                .expect("a device");
            assert_eq!(device, 0);
        }
        let mut count: c_int = 0;
        hip.hipGetDeviceCount(&mut count).expect("a count");
        let error = hip.hipSetDevice(count).expect_err("one too many");
        assert_eq!(error.code(), Some(hipError_t::hipErrorInvalidDevice));
        assert_eq!(
            hip.hipGetLastError().expect("a code"),
            hipError_t::hipErrorInvalidDevice
        );
        let name = hip.hipGetErrorName(hipError_t::hipErrorInvalidDevice);
        let name = CStr::from_ptr(name.expect("a name"));
        assert_eq!(name, c"hipErrorInvalidDevice");
    }
    assert!(version > 0 && cache > 0, "{version} {cache}");
    assert_eq!(warp, if hip.is_cuda() { 32 } else { 64 });
    assert_eq!((properties.warpSize, properties.l2CacheSize), (warp, cache));
    assert!(properties.arch_name().starts_with(&context.device().arch));
    assert!(properties.totalGlobalMem > 1 << 30 && properties.multiProcessorCount > 0);
    stream.synchronize().expect("the device works on");
}

/// Work that is enqueued has happened once its event has, and a stream that is captured says so.
#[test]
fn events_and_captures_are_queried() {
    let context = context();
    let hip = context.hip();
    let stream = context.stream().expect("a stream");
    let handle = hipStream_t(stream.handle());
    let mut buffer = context.alloc::<u8>(1 << 20).expect("memory");
    buffer.fill_bytes(1, &stream).expect("a fill");
    let start = stream.record().expect("an event");
    buffer.fill_bytes(2, &stream).expect("a fill");
    let end = stream.record().expect("an event");
    end.synchronize().expect("done");
    assert!(end.milliseconds_since(&start).expect("a time") >= 0.0);
    // SAFETY: the stream is alive.
    unsafe { hip.hipStreamQuery(handle) }.expect("nothing is under way");
    let mut status = hipStreamCaptureStatus(9);
    let mut query = || {
        // SAFETY: the stream is alive, `status` is valid for a write.
        unsafe { hip.hipStreamIsCapturing(handle, &mut status) }.expect("an answer");
        status
    };
    assert_eq!(query(), hipStreamCaptureStatus::hipStreamCaptureStatusNone);
    let graph = stream.capture(|stream| {
        assert_eq!(
            query(),
            hipStreamCaptureStatus::hipStreamCaptureStatusActive
        );
        buffer.fill_bytes(3, stream)
    });
    let graph = graph.expect("a graph");
    assert!(
        buffer
            .download(&stream)
            .expect("a copy")
            .iter()
            .all(|b| *b == 2)
    );
    // SAFETY: the buffer is alive until it was read.
    unsafe { graph.launch(&stream) }.expect("a launch");
    assert!(
        buffer
            .download(&stream)
            .expect("a copy")
            .iter()
            .all(|b| *b == 3)
    );
}
