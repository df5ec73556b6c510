//! What contexts leave behind, whose a fault is, and what threads may share.
#![cfg(target_os = "linux")]

#[allow(dead_code, reason = "shared with tests/host_cost.rs")]
mod null_runtime;

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use deltawave::Error;
use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::gates::Gating;
use deltawave::layer::{Layer, LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::state::States;
use deltawave::tensor::{Buffer, Tensor, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::memory::least_growth;
use half::bf16;
use hip_sys::{Hip, hipError_t, types::*};

/// Memory of the process and the calls of a runtime are counted, so the tests take turns. None, and a line that says why,
/// in a build without kernels.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    if deltawave::code_objects::for_arch("gfx942").next().is_some() {
        return Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
    }
    let why = deltawave::code_objects::why_missing("gfx942");
    let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
    assert!(!required, "{why}");
    println!("skipped: {why}");
    None
}

const TOKENS: usize = 130;
const HK: usize = 1;
const HV: usize = 2;
const K: usize = 32;
const V: usize = 32;

/// A tensor of memory that there is not.
unsafe fn nowhere(shape: [usize; 3]) -> Tensor<'static, 3> {
    let address = std::ptr::without_provenance_mut(4096);
    // SAFETY: the caller answers for it.
    unsafe { Tensor::from_raw(address, Dtype::Bf16, shape, dense_strides(shape)) }
}

/// Everything that a context can make, dropped in an order in which the context is not the last.
fn life() -> deltawave::Result<()> {
    let context = Context::simulator()?;
    let plan = Prefill::packed(&context, PrefillSpec::new(HK, HV, K, V), &[0, 130], TOKENS)?;
    let on_device = Prefill::device(&context, PrefillSpec::new(HK, HV, K, V), TOKENS, 1)?;
    let layer = Layer::packed(
        &context,
        LayerSpec::new(HK, HV, K, V),
        &[0, 1, 130],
        TOKENS,
        1,
    )?;
    let stream = context.stream()?;
    let event = stream.record()?;
    let mut y = context.alloc::<bf16>(2 * V)?;
    let graph = stream.capture(|stream| {
        let shape = [2, 1, V];
        let y = y.tensor_mut(shape)?;
        // SAFETY: the graph is never launched.
        let z = unsafe { nowhere(shape) };
        let norm = GatedNorm {
            x: None,
            z,
            weight: None,
            eps: 1e-6,
            gate: OutputGate::Silu,
            y: y.into(),
        };
        norm.launch(&context, stream)
    })?;
    drop(context);
    drop((event, stream, plan, layer, on_device, y));
    drop(graph);
    Ok(())
}

#[test]
fn contexts_leave_nothing_behind() -> deltawave::Result<()> {
    let Some(_alone) = alone() else {
        return Ok(());
    };
    let mut result = Ok(());
    let grown = least_growth(50, || {
        if let Err(error) = life() {
            result = Err(error);
        }
    });
    assert!(grown < 200 << 10, "50 contexts leave {grown} bytes");
    result
}

/// Of a runtime whose device is lost, too.
#[test]
fn kernels_are_unloaded() -> deltawave::Result<()> {
    let Some(_alone) = alone() else {
        return Ok(());
    };
    let count = |calls: &[(&str, u64)], name: &str| -> u64 {
        let found = calls.iter().find(|(called, _)| *called == name);
        found.map_or(0, |(_, count)| *count)
    };
    null_runtime::take_calls();
    let context = null_runtime::context()?;
    let stream = context.stream()?;
    drop(context);
    let calls = null_runtime::take_calls();
    let loaded = count(&calls, "hipModuleLoadData");
    assert!(
        loaded >= 10 && count(&calls, "hipModuleUnload") == 0,
        "{calls:?}"
    );
    drop(stream);
    let calls = null_runtime::take_calls();
    assert_eq!(count(&calls, "hipModuleUnload"), loaded, "{calls:?}");
    assert_eq!(count(&calls, "hipDeviceSynchronize"), 1, "{calls:?}");

    // Half of them are loaded, then a kernel is missing.
    static FOUND: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn find(
        _: *mut hipFunction_t,
        _: hipModule_t,
        _: *const c_char,
    ) -> hipError_t {
        match FOUND.fetch_add(1, Ordering::Relaxed) {
            0..12 => hipError_t::hipSuccess,
            _ => hipError_t::hipErrorNotFound,
        }
    }
    fn resolver(name: &str) -> *const c_void {
        type Find =
            unsafe extern "C" fn(*mut hipFunction_t, hipModule_t, *const c_char) -> hipError_t;
        match name {
            "hipModuleGetFunction" => (find as Find) as *const c_void,
            name => null_runtime::resolver(name),
        }
    }
    // SAFETY: the casts check that the functions have the signatures of the table.
    let hip = unsafe { Hip::from_resolver("a runtime that lacks a kernel", resolver) };
    let outcome = Context::with_runtime(hip, 0);
    assert!(
        matches!(outcome, Err(Error::MissingKernel { .. })),
        "{outcome:?}"
    );
    let calls = null_runtime::take_calls();
    let loaded = count(&calls, "hipModuleLoadData");
    assert!(loaded > 1 && loaded < 10, "{calls:?}");
    assert_eq!(count(&calls, "hipModuleUnload"), loaded, "{calls:?}");
    Ok(())
}

/// A context whose kernel has faulted says so ever after; another one of the process does not, whether it was there before
/// or comes after.
#[test]
fn a_fault_is_one_contexts() -> deltawave::Result<()> {
    let Some(_alone) = alone() else {
        return Ok(());
    };
    let (before, lost) = (Context::simulator()?, Context::simulator()?);
    let stream = lost.stream()?;
    let event = stream.record()?;
    let shape = [2, 1, V];
    let norm = |context: &Context, stream: &Stream, broken: bool| -> deltawave::Result<Vec<bf16>> {
        let ones = context.upload(&[bf16::ONE; 2 * V])?;
        let mut y = context.upload(&[bf16::ONE; 2 * V])?;
        let norm = GatedNorm {
            x: None,
            z: match broken {
                // SAFETY: the simulator checks every access.
                true => unsafe { nowhere(shape) },
                false => ones.tensor(shape)?,
            },
            weight: None,
            eps: 1e-6,
            gate: OutputGate::Silu,
            y: y.tensor_mut(shape)?.into(),
        };
        norm.launch(context, stream)?;
        y.download(stream)
    };
    let wanted = norm(&lost, &stream, false)?;
    assert!(norm(&lost, &stream, true).is_err());
    let fault = deltawave_sim::hip::last_fault().expect("a fault");
    assert!(fault.contains("dw_norm_bf16"), "{fault}");
    for round in 0..2 {
        let after = Context::simulator()?;
        for context in [&before, &after] {
            assert_eq!(norm(context, &context.stream()?, false)?, wanted);
            context.synchronize()?;
        }
        // Nor does it depend on the thread, or on which context it used last.
        std::thread::scope(|scope| {
            let old = scope.spawn(|| {
                assert!(lost.alloc::<u8>(16).is_err() && lost.stream().is_err());
                assert!(stream.synchronize().is_err() && event.synchronize().is_err());
            });
            old.join().expect("the old context is lost");
        });
        let fresh = after.upload(&[1u8])?;
        let others = after.stream()?;
        assert!(lost.synchronize().is_err(), "round {round}");
        assert_eq!(fresh.download(&others)?, [1]);
        others.synchronize()?;
        assert!(norm(&lost, &stream, false).is_err());
    }
    Ok(())
}

/// A thread's tensors: everything but the workspace.
struct Own {
    given: Buffer<bf16>,
    numbers: Buffer<f32>,
    new: Buffer<u8>,
    pool: Buffer<f32>,
    conv_pool: Buffer<bf16>,
    out: Buffer<bf16>,
}

const COLUMNS: usize = 2 * HK * K + 2 * HV * V;

impl Own {
    fn new(context: &Context, thread: usize) -> deltawave::Result<Self> {
        let given = (0..TOKENS * COLUMNS).map(|i| ((i * (7 + thread)) % 61) as f32 / 61.0 - 0.5);
        let given: Vec<bf16> = given.map(bf16::from_f32).collect();
        Ok(Own {
            given: context.upload(&given)?,
            numbers: context.upload(&vec![-0.5; TOKENS * COLUMNS])?,
            new: context.upload(&[0; 2])?,
            pool: context.alloc(2 * HV * K * V)?,
            conv_pool: context.alloc(2 * COLUMNS * 3)?,
            out: context.alloc(TOKENS * HV * V)?,
        })
    }

    fn of_prefill(&mut self) -> deltawave::Result<PrefillTensors<'_>> {
        Ok(PrefillTensors {
            cu_seqlens: None,
            q: self.given.tensor([TOKENS, HK, K])?.into(),
            k: self.given.tensor([TOKENS, HK, K])?.into(),
            v: self.given.tensor([TOKENS, HV, V])?.into(),
            gating: Gating::Given {
                g: Some(self.numbers.tensor([TOKENS, HV])?.into()),
                beta: None,
            },
            states: States::None,
            o: self.out.tensor_mut([TOKENS, HV, V])?.into(),
            snapshots: None,
        })
    }

    fn of_layer(&mut self, spec: &LayerSpec) -> deltawave::Result<LayerTensors<'_>> {
        let (conv, channels) = (spec.conv(), spec.conv().total_channels());
        let x = self.given.tensor([TOKENS, COLUMNS])?;
        Ok(LayerTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&x, &conv)?,
            z: ConvInput::flat_z(&x, &conv)?,
            a: self.numbers.tensor([TOKENS, HV])?.into(),
            b: self.numbers.tensor([TOKENS, HV])?.into(),
            weights: LayerWeights {
                conv: self.numbers.tensor([channels, 4])?,
                conv_bias: None,
                a_log: self.numbers.tensor([HV])?,
                dt_bias: None,
                norm: None,
            },
            states: LayerStates {
                conv: self.conv_pool.tensor_mut([2, channels, 3])?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: self.pool.tensor_mut([2, HV, K, V])?,
                recurrent_layout: StateLayout::KeyMajor,
                slots: None,
                has_initial_state: Some((&self.new).into()),
            },
            y: self.out.tensor_mut([TOKENS, HV, V])?.into(),
        })
    }
}

/// Three threads launch on one stream, whose launches share a workspace: each has the outputs that it has alone.
#[test]
fn threads_share_a_workspace_on_one_stream() -> deltawave::Result<()> {
    let Some(_alone) = alone() else {
        return Ok(());
    };
    let context = Context::simulator()?;
    let stream = context.stream()?;
    let spec = PrefillSpec {
        qk_l2norm: true,
        segments: Some(2),
        ..PrefillSpec::new(HK, HV, K, V)
    };
    let whole = PrefillSpec {
        segments: None,
        ..spec
    };
    let of_layer = LayerSpec::new(HK, HV, K, V);
    let prefill = Prefill::packed(&context, spec, &[0, TOKENS as i32], TOKENS)?;
    let on_device = Prefill::device(&context, whole, TOKENS, 1)?;
    let layer = Layer::packed(&context, of_layer, &[0, 1, TOKENS as i32], TOKENS, 1)?;
    let lengths = context.upload(&[0, TOKENS as i32])?;
    let sizes = [
        prefill.workspace_bytes(),
        on_device.workspace_bytes(),
        layer.workspace_bytes(),
    ];
    let bytes = sizes.into_iter().max().unwrap_or_default();
    let workspace = context.alloc::<u8>(bytes)?;
    let address = workspace.address().addr();
    let launch = |own: &mut Own, which: usize| -> deltawave::Result<Vec<bf16>> {
        let address = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: launches of one stream may share it, and it outlives them.
        let shared = unsafe { Workspace::from_raw(address, bytes) };
        match which {
            0 => prefill.launch(&stream, &own.of_prefill()?, shared)?,
            1 => {
                let mut tensors = own.of_prefill()?;
                tensors.cu_seqlens = Some((&lengths).into());
                on_device.launch(&stream, &tensors, shared)?
            }
            _ => layer.launch(&stream, &own.of_layer(&of_layer)?, shared)?,
        }
        own.out.download(&stream)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                let mut own = Own::new(&context, thread).expect("memory");
                let wanted = [0, 1, 2].map(|which| launch(&mut own, which).expect("a launch"));
                (thread, own, wanted)
            })
            .collect();
        for (thread, mut own, wanted) in threads {
            let launch = &launch;
            scope.spawn(move || {
                for round in 0..60 {
                    let which = (round + thread) % 3;
                    let found = launch(&mut own, which).expect("a launch");
                    assert!(
                        found == wanted[which],
                        "thread {thread}, launch {which}, round {round}"
                    );
                }
            });
        }
    });
    Ok(())
}
