//! Operations (copies, fills, kernel launches) and how they run.

use super::CountedLaunch;
use super::state::{Device, Outcome, Working, device, explain, working};
use crate::code_object::CodeObject;
use crate::exec::MfmaMode;
use crate::fault::FaultKind;
use crate::launch::{Launch, LaunchError, Options, Record};
use crate::memory::Memory;
use crate::timing;
use core::ffi::c_void;
use hip_sys::{hipError_t, hipMemcpyKind, hipStream_t};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

/// A kernel of a loaded module.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The code object that contains it.
    pub code: Arc<CodeObject>,
    /// Index of the kernel in `code`.
    pub index: usize,
}

impl Kernel {
    pub fn info(&self) -> &crate::code_object::Kernel {
        &self.code.kernels()[self.index]
    }
}

/// A launch with its arguments.
#[derive(Debug)]
pub(super) struct KernelLaunch {
    kernel: Arc<Kernel>,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic_lds: u32,
    kernarg: Vec<u8>,
}

/// An operation of a stream.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    /// Copies bytes.
    Copy {
        destination: u64,
        source: u64,
        size: usize,
        kind: hipMemcpyKind,
    },
    /// Repeats a value of `width` bytes.
    Fill {
        destination: u64,
        value: u32,
        width: usize,
        count: usize,
    },
    /// Runs a kernel.
    Launch(Arc<KernelLaunch>),
}

/// Enqueues an operation: records it if the stream is being captured, else runs it.
pub(super) fn enqueue(
    stream: hipStream_t,
    prepare: impl FnOnce(&Device) -> Outcome<Option<Operation>>,
) -> Outcome {
    let work = working();
    let mut state = device();
    let stream = state.stream(stream)?;
    state.alive_for(state.session_of(stream))?;
    let Some(operation) = prepare(&state)? else {
        return Ok(());
    };
    operation.check(&state)?;
    if state.is_capturing(stream) {
        return state.capture(stream, [operation]);
    }
    state.no_implicit_dependency(stream)?;
    drop(state);
    run(&work, stream, &operation)
}

/// Runs an operation now. If it has become impossible since it was captured, that is a fault.
pub(super) fn run(work: &Working, stream: usize, operation: &Operation) -> Outcome {
    let start = Instant::now();
    let outcome = match operation {
        Operation::Launch(launch) => run_kernel(work, stream, launch),
        _ => run_transfer(work, stream, operation),
    };
    let seconds = start.elapsed().as_secs_f64();
    let mut state = device();
    state.busy += seconds;
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.busy += seconds;
    }
    outcome
}

impl Operation {
    /// Checks that all device memory that a copy or fill touches is allocated.
    fn check(&self, state: &Device) -> Outcome {
        const BAD: Outcome = Err(hipError_t::hipErrorInvalidValue);
        match *self {
            Operation::Copy {
                destination,
                source,
                size,
                kind,
            } => {
                let (to_device, from_device) = match kind {
                    hipMemcpyKind::hipMemcpyHostToHost => (false, false),
                    hipMemcpyKind::hipMemcpyHostToDevice => (true, false),
                    hipMemcpyKind::hipMemcpyDeviceToHost => (false, true),
                    hipMemcpyKind::hipMemcpyDeviceToDevice => (true, true),
                    hipMemcpyKind::hipMemcpyDefault => (false, false),
                    _ => return Err(hipError_t::hipErrorInvalidMemcpyDirection),
                };
                for (name, address, device) in [
                    ("destination", destination, to_device),
                    ("source", source, from_device),
                ] {
                    let device = device || state.heap.is_device(address);
                    if device && !state.heap.contains(address, size) {
                        return explain(
                            hipError_t::hipErrorInvalidValue,
                            format!(
                                "copy of {size} bytes: the {name} {address:#x} is not inside one \
                                 allocation"
                            ),
                        );
                    }
                }
                Ok(())
            }
            Operation::Fill {
                destination,
                width,
                count,
                ..
            } => {
                let Some(size) = width.checked_mul(count) else {
                    return BAD;
                };
                if state.heap.contains(destination, size) {
                    return Ok(());
                }
                explain(
                    hipError_t::hipErrorInvalidValue,
                    format!(
                        "fill of {size} bytes: the destination {destination:#x} is not inside one \
                         allocation"
                    ),
                )
            }
            Operation::Launch(_) => Ok(()),
        }
    }
}

fn run_transfer(_: &Working, stream: usize, operation: &Operation) -> Outcome {
    {
        let mut state = device();
        if operation.check(&state).is_err() {
            state.poison(
                stream,
                hipError_t::hipErrorIllegalAddress,
                format!("memory of a captured {operation:x?} is no longer allocated"),
            );
            return Err(hipError_t::hipErrorIllegalAddress);
        }
    }
    match *operation {
        Operation::Copy {
            destination,
            source,
            size,
            ..
        } => {
            // SAFETY: device memory was checked, and cannot be freed while `Working` is held; the
            // caller vouches for host memory. The ranges may overlap.
            unsafe { std::ptr::copy(source as *const u8, destination as *mut u8, size) };
            device().heap.wrote(destination, Some(source), size);
        }
        Operation::Fill {
            destination,
            value,
            width,
            count,
        } => {
            if width == 1 {
                // SAFETY: checked, and cannot be freed while `Working` is held.
                unsafe { std::ptr::write_bytes(destination as *mut u8, value as u8, count) };
            } else {
                let bytes = value.to_le_bytes();
                for i in 0..count {
                    let to = (destination as *mut u8).wrapping_add(i * width);
                    // SAFETY: as above; `width` is 2 or 4.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, width) };
                }
            }
            device().heap.wrote(destination, None, width * count);
        }
        Operation::Launch(_) => {}
    }
    Ok(())
}

fn run_kernel(_: &Working, stream: usize, launch: &KernelLaunch) -> Outcome {
    let (memory, options) = {
        let mut state = device();
        if !state.options.checks.uninitialized {
            state.heap.untrack();
        }
        (state.heap.memory(), state.options)
    };
    let kernel = launch.kernel.info();
    let start = Instant::now();
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let launch = Launch {
            code: &launch.kernel.code,
            kernel,
            grid: launch.grid,
            remainder: [0; 3],
            block: launch.block,
            dynamic_lds: launch.dynamic_lds,
            kernarg: &launch.kernarg,
            memory: &memory,
        };
        // SAFETY: every extent is an allocation or a loaded code object, none of which is freed while
        // `Working` is held.
        unsafe { launch.run(&options) }
    }));
    let seconds = start.elapsed().as_secs_f64();
    let mut state = device();
    match result {
        Ok(Ok(stats)) => {
            let name = kernel.name();
            if !state.statistics.contains_key(name) {
                state.statistics.insert(name.to_owned(), Default::default());
            }
            if let Some(s) = state.statistics.get_mut(name) {
                s.launches += 1;
                s.wave_instructions += stats.wave_instructions;
                s.seconds += seconds;
            }
            if stats.counts.is_some() {
                state.counted.add(CountedLaunch {
                    code: launch.kernel.code.clone(),
                    index: launch.kernel.index,
                    grid: launch.grid,
                    block: launch.block,
                    lds: kernel.descriptor.group_segment_fixed_size + launch.dynamic_lds,
                    stats,
                    seconds,
                });
            }
        }
        Ok(Err(error)) => state.poison(stream, code_of(&error), error.to_string()),
        Err(_) => state.poison(
            stream,
            hipError_t::hipErrorLaunchFailure,
            format!("kernel {}: the simulator itself failed", kernel.name()),
        ),
    }
    // As on a device, the launch succeeds and later calls fail.
    Ok(())
}

/// Status of a launch error. If the launch is refused, the launch returns it; if the kernel faults, later calls return
/// it.
fn code_of(error: &LaunchError) -> hipError_t {
    match error {
        LaunchError::Fault(fault) => match fault.kind {
            FaultKind::OutOfBounds { .. } | FaultKind::ScratchOutOfBounds { .. } => {
                hipError_t::hipErrorIllegalAddress
            }
            _ => hipError_t::hipErrorLaunchFailure,
        },
        LaunchError::ZeroDimension { .. }
        | LaunchError::BlockTooLarge { .. }
        | LaunchError::Remainder { .. }
        | LaunchError::GridTooLarge { .. } => hipError_t::hipErrorInvalidConfiguration,
        LaunchError::LdsTooLarge { .. }
        | LaunchError::ScratchTooLarge { .. }
        | LaunchError::TooManyRegisters { .. } => hipError_t::hipErrorLaunchOutOfResources,
        LaunchError::KernargSize { .. } => hipError_t::hipErrorInvalidValue,
        LaunchError::OutOfMemory { .. } => hipError_t::hipErrorOutOfMemory,
    }
}

/// Grid and workgroup dimensions of a launch.
pub(super) struct Geometry {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_lds: u32,
}

/// Checks a launch and packs its arguments.
///
/// # Safety
/// `parameters` is null or an array with one pointer per argument of the kernel. `extra` is null or a list that ends
/// with `HIP_LAUNCH_PARAM_END`. All memory that they point to is readable.
pub(super) unsafe fn prepare_launch(
    kernel: Arc<Kernel>,
    geometry: Geometry,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome<Operation> {
    let Geometry {
        grid,
        block,
        dynamic_lds,
    } = geometry;
    let info = kernel.info();
    // SAFETY: passed on.
    let kernarg = unsafe { pack(info, parameters, extra)? };
    let launch = Launch {
        code: &kernel.code,
        kernel: info,
        grid,
        remainder: [0; 3],
        block,
        dynamic_lds,
        kernarg: &kernarg,
        memory: &Memory::default(),
    };
    if let Err(error) = launch.check() {
        return explain(code_of(&error), error);
    }
    Ok(Operation::Launch(Arc::new(KernelLaunch {
        kernel,
        grid,
        block,
        dynamic_lds,
        kernarg,
    })))
}

/// Packs the explicit arguments of a kernel.
///
/// # Safety
/// As for [`prepare_launch`].
unsafe fn pack(
    kernel: &crate::code_object::Kernel,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome<Vec<u8>> {
    let explicit = kernel.explicit_size() as usize;
    let bad = |text: &str| {
        explain(
            hipError_t::hipErrorInvalidValue,
            format!("kernel {}: {text}", kernel.name()),
        )
    };
    if !parameters.is_null() && !extra.is_null() {
        return bad("both kernelParams and extra are given");
    }
    let mut bytes = vec![0u8; explicit];
    if !parameters.is_null() {
        if explicit > 0 && kernel.metadata.args.is_empty() {
            return bad("its metadata does not describe its arguments; use extra");
        }
        let arguments = kernel.metadata.args.iter().filter(|a| !a.is_hidden());
        for (i, argument) in arguments.enumerate() {
            // SAFETY: the array has a pointer for each argument.
            let from = unsafe { parameters.add(i).read_unaligned() };
            if from.is_null() {
                return bad("a pointer in kernelParams is null");
            }
            let (offset, size) = (argument.offset as usize, argument.size as usize);
            let Some(to) = bytes.get_mut(offset..offset + size) else {
                return bad("an argument lies outside the argument segment");
            };
            // SAFETY: the pointer leads to an argument of this size.
            unsafe { std::ptr::copy_nonoverlapping(from.cast(), to.as_mut_ptr(), size) };
        }
        return Ok(bytes);
    }
    if extra.is_null() {
        return if explicit == 0 {
            Ok(bytes)
        } else {
            bad("it has arguments, but neither kernelParams nor extra are given")
        };
    }
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), None);
    let mut at = extra;
    loop {
        // SAFETY: the list goes on until its end marker.
        let key = unsafe { at.read_unaligned() };
        if key == hip_sys::HIP_LAUNCH_PARAM_END {
            break;
        }
        // SAFETY: every key but the end has a value.
        let value = unsafe { at.add(1).read_unaligned() };
        if key == hip_sys::HIP_LAUNCH_PARAM_BUFFER_POINTER {
            buffer = value.cast();
        } else if key == hip_sys::HIP_LAUNCH_PARAM_BUFFER_SIZE && !value.is_null() {
            // SAFETY: the value of this key points to a size.
            size = Some(unsafe { value.cast::<usize>().read_unaligned() });
        } else {
            return bad("extra has an unknown key");
        }
        at = at.wrapping_add(2);
    }
    match size {
        Some(size) if size >= explicit && (!buffer.is_null() || explicit == 0) => {
            // SAFETY: the buffer has `size` bytes, of which the kernel's arguments take the first.
            unsafe { std::ptr::copy_nonoverlapping(buffer, bytes.as_mut_ptr(), explicit) };
            Ok(bytes)
        }
        Some(size) => bad(&format!(
            "the argument buffer has {size} bytes, the arguments take {explicit}"
        )),
        None => bad("extra has no buffer size"),
    }
}

/// Reads the simulation options from the environment. An invalid value is reported on stderr and ignored.
///
/// - `DELTAWAVE_SIM_MFMA`: `fast` or `exact`.
/// - `DELTAWAVE_SIM_THREADS`: number of host threads.
/// - `DELTAWAVE_SIM_ORDER`: `run-ahead`, `in-step` or `seeded:SEED`.
/// - `DELTAWAVE_SIM_CHECKS`: `all`, `none`, or names of [`Checks`](crate::sanitize::Checks).
/// - `DELTAWAVE_SIM_PROFILE`: a file to which each launch appends its counters as a line of JSON.
/// - `DELTAWAVE_SIM_GPU`: `mi300x`, `mi325x` or `mi308x`, the GPU that the device reports and that times are modelled
///   for.
pub fn options_from_environment() -> Options {
    let mut options = Options::default();
    let mut read = |name: &str, set: &mut dyn FnMut(&mut Options, &str) -> Option<()>| {
        if let Ok(value) = std::env::var(name)
            && !value.is_empty()
            && set(&mut options, &value).is_none()
        {
            eprintln!("gfx942 simulator: {name}={value} is invalid and ignored");
        }
    };
    read("DELTAWAVE_SIM_MFMA", &mut |options, value| {
        options.mfma = match value {
            "fast" => MfmaMode::Fast,
            "exact" => MfmaMode::Exact,
            _ => return None,
        };
        Some(())
    });
    read("DELTAWAVE_SIM_THREADS", &mut |options, value| {
        options.threads = Some(value.parse().ok()?);
        Some(())
    });
    read("DELTAWAVE_SIM_ORDER", &mut |options, value| {
        options.order = value.parse().ok()?;
        Some(())
    });
    read("DELTAWAVE_SIM_CHECKS", &mut |options, value| {
        options.checks = value.parse().ok()?;
        Some(())
    });
    read("DELTAWAVE_SIM_PROFILE", &mut |options, _| {
        options.count = true;
        Some(())
    });
    read("DELTAWAVE_SIM_GPU", &mut |options, value| {
        options.xccs = crate::gpu::Gpu::named(value)?.xcds;
        options.record = Record::Some(timing::SAMPLE);
        Some(())
    });
    options
}
