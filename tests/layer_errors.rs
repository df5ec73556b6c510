//! Layers that are refused: each by the name of the argument, and before any of their stages is enqueued.

#[path = "common/layer/mod.rs"]
mod cases;
mod common;

use cases::{Case, Data, Loaded};
use common::context;
use deltawave::batch::PerSequence;
use deltawave::error::ArgumentKind::{
    self, Dtype as WrongDtype, Lengths, Presence, Shape, Size, Value,
};
use deltawave::layer::{Layer, LayerSpec, LayerTensors};
use deltawave::tensor::{Tensor, TensorMut, TokenScalars, dense_strides};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave::{ArgumentError, Error};

#[track_caller]
fn expect<T>(outcome: Result<T, Error>, argument: &str, kind: ArgumentKind) {
    match outcome {
        Err(Error::Argument(ArgumentError {
            argument: a,
            kind: k,
            was,
            allowed,
        })) => assert_eq!((a.as_str(), k), (argument, kind), "{was}; {allowed}"),
        Err(other) => panic!("{argument}: {other}"),
        Ok(_) => panic!("{argument} was not refused"),
    }
}

/// A view of no memory: what is refused is never touched.
fn nowhere<const R: usize>(dtype: Dtype, shape: [usize; R]) -> Tensor<'static, R> {
    let address = std::ptr::without_provenance(1 << 12);
    // SAFETY: as above.
    unsafe { Tensor::from_raw(address, dtype, shape, dense_strides(shape)) }
}

fn nowhere_mut<const R: usize>(dtype: Dtype, shape: [usize; R]) -> TensorMut<'static, R> {
    let address = std::ptr::without_provenance_mut(1 << 12);
    // SAFETY: as above.
    unsafe { TensorMut::from_raw(address, dtype, shape, dense_strides(shape)) }
}

/// Two heads in each of three blocks.
fn three_blocks(tokens: usize) -> TokenScalars<'static> {
    let address = std::ptr::without_provenance(1 << 12);
    // SAFETY: as above.
    let t = unsafe { Tensor::from_raw(address, Dtype::Bf16, [tokens, 3, 2], [30, 10, 1]) };
    TokenScalars::in_blocks(t)
}

#[test]
fn tensors_that_are_refused() {
    let context = context();
    let stream = context.stream().unwrap();
    // 2 decodes and a prefill of 5 tokens; 224 channels.
    let case = Case::new(LayerSpec::new(1, 2, 32, 48), &[1, 1, 5], 2);
    let data = Data::new(&case);
    let mut loaded = Loaded::new(&context, &case, &data);
    let before = loaded.output(&case, &stream);
    type Change = fn(&mut LayerTensors<'_>);
    const BF16: Dtype = Dtype::Bf16;
    let cases: &[(&str, ArgumentKind, Change)] = &[
        ("x.k", Shape, |t| t.x.k = nowhere(BF16, [7, 1, 31])),
        ("x.v", WrongDtype, |t| {
            t.x.v = nowhere(Dtype::F16, [7, 2, 48]);
        }),
        ("z", Shape, |t| t.z = nowhere(BF16, [7, 2, 47])),
        ("a", Shape, |t| t.a = nowhere(BF16, [6, 2]).into()),
        ("a", Shape, |t| t.a = nowhere(BF16, [1, 7, 2]).into()),
        ("b", Shape, |t| t.b = nowhere(BF16, [7, 3]).into()),
        ("a", Shape, |t| t.a = three_blocks(7)),
        ("b", Shape, |t| t.b = three_blocks(7)),
        ("weights.conv", Shape, |t| {
            t.weights.conv = nowhere(BF16, [160, 3]);
        }),
        ("weights.conv_bias", Shape, |t| {
            t.weights.conv_bias = Some(t.weights.a_log.clone());
        }),
        ("weights.a_log", Shape, |t| {
            t.weights.a_log = nowhere(BF16, [3]);
        }),
        ("weights.dt_bias", Shape, |t| {
            t.weights.dt_bias = Some(nowhere(BF16, [1]));
        }),
        ("weights.norm", Shape, |t| {
            t.weights.norm = Some(t.weights.a_log.clone());
        }),
        ("states.conv", Shape, |t| {
            t.states.conv = nowhere_mut(BF16, [7, 160, 2]);
        }),
        ("states.conv", WrongDtype, |t| {
            t.states.conv = nowhere_mut(Dtype::F32, [7, 160, 3]);
        }),
        ("states.recurrent", Shape, |t| {
            t.states.recurrent = nowhere_mut(Dtype::F32, [7, 2, 48, 32]);
        }),
        ("states.recurrent", Shape, |t| {
            t.states.slots = None;
            t.states.recurrent = nowhere_mut(Dtype::F32, [2, 2, 32, 48]);
        }),
        ("states.conv", Shape, |t| {
            t.states.conv = nowhere_mut(BF16, [6, 160, 3]);
        }),
        ("states.slots", Shape, |t| {
            // SAFETY: it is not read.
            let slots = unsafe { PerSequence::from_raw(std::ptr::without_provenance(1 << 12), 2) };
            t.states.slots = Some(slots);
        }),
        ("states.has_initial_state", Shape, |t| {
            // SAFETY: as above.
            let has = unsafe { PerSequence::from_raw(std::ptr::without_provenance(1 << 12), 4) };
            t.states.has_initial_state = Some(has);
        }),
        ("y", Shape, |t| t.y = nowhere_mut(BF16, [7, 2, 47]).into()),
        ("y", Shape, |t| {
            t.y = nowhere_mut(BF16, [1, 7, 2, 48]).into()
        }),
        ("y", WrongDtype, |t| {
            t.y = nowhere_mut(Dtype::F16, [7, 2, 48]).into();
        }),
    ];
    for (argument, kind, change) in cases {
        let outcome = loaded.launch_changed(&case, &stream, change);
        expect(outcome, argument, *kind);
        // Not even the stages before the one that refused have run.
        let after = loaded.output(&case, &stream);
        assert!(after == before, "{argument}: something ran");
    }
    loaded.launch(&case, &stream).expect("the request is valid");
}

#[test]
fn plans_that_are_refused() {
    let context = context();
    let spec = LayerSpec::new(1, 2, 32, 48);
    let plan = |spec, lengths: &[i32], tokens, decodes| {
        Layer::packed(&context, spec, lengths, tokens, decodes)
    };
    expect(plan(spec, &[], 0, 0), "cu_seqlens", Lengths);
    expect(plan(spec, &[0, 2, 1], 2, 0), "cu_seqlens", Lengths);
    for (lengths, decodes) in [(&[0, 1, 3][..], 2), (&[0, 0, 1], 1), (&[0, 1], 2)] {
        expect(plan(spec, lengths, 3, decodes), "decodes", Lengths);
    }
    let wrong = LayerSpec { width: 5, ..spec };
    expect(plan(wrong, &[0, 1], 1, 0), "width", Shape);
    let wrong = LayerSpec::new(1, 2, 24, 48);
    expect(plan(wrong, &[0, 1], 1, 1), "key_dim", Shape);
    expect(plan(wrong, &[0, 1], 1, 0), "key_dim", Shape);
    let wrong = LayerSpec { eps: 0.0, ..spec };
    expect(plan(wrong, &[0, 1], 1, 0), "eps", Value);
    let wrong = LayerSpec {
        dtype: Dtype::F32,
        ..spec
    };
    expect(plan(wrong, &[0, 1], 1, 0), "dtype", WrongDtype);
}

#[test]
fn the_workspace_is_measured() {
    let context = context();
    let stream = context.stream().unwrap();
    let case = Case::new(LayerSpec::new(1, 1, 16, 16), &[1, 3], 1);
    let data = Data::new(&case);
    let mut loaded = Loaded::new(&context, &case, &data);
    let plan = Layer::packed(&context, case.spec, &case.cu_seqlens(), 4, 1).unwrap();
    let mut short = context.alloc::<u8>(plan.workspace_bytes() - 1).unwrap();
    let mut outcome = None;
    loaded
        .launch_changed(&case, &stream, |t| {
            outcome = Some(plan.launch(&stream, t, Workspace::new(&mut short)));
        })
        .unwrap();
    expect(outcome.unwrap(), "workspace", Size);
}

/// Slots that the host knows are checked when a plan gets them, and against the pools at launches; then they do what
/// slots on the device do.
#[test]
fn slots_that_the_host_knows() {
    let context = context();
    let stream = context.stream().unwrap();
    let case = Case::new(LayerSpec::new(1, 2, 32, 48), &[1, 1, 5], 2);
    let data = Data::new(&case);
    let mut plan = Layer::packed(&context, case.spec, &case.cu_seqlens(), 7, 2).unwrap();
    expect(plan.set_slots(&[0, 1]), "slots", Shape);
    expect(plan.set_slots(&[4, 0, 4]), "slots", Value);
    plan.set_slots(&[-1, -1, 0]).unwrap();

    let mut workspace = context.alloc::<u8>(plan.workspace_bytes()).unwrap();
    let mut run = |loaded: &mut Loaded, plan: &Layer, own: bool| {
        let mut outcome = None;
        let refused = loaded.launch_changed(&case, &stream, |t| {
            let given = t.states.slots.take();
            t.states.slots = given.filter(|_| !own);
            outcome = Some(plan.launch(&stream, t, Workspace::new(&mut workspace)));
            // The plan that has no slots is not to run, too.
            t.z = nowhere(Dtype::Bf16, [7, 2, 47]);
        });
        expect(refused, "z", Shape);
        outcome.unwrap()
    };
    let mut loaded = Loaded::new(&context, &case, &data);
    let before = loaded.output(&case, &stream);
    expect(run(&mut loaded, &plan, false), "states.slots", Presence);
    plan.set_slots(&[0, case.pool() as i32, 1]).unwrap();
    expect(run(&mut loaded, &plan, true), "states.slots", Value);
    assert!(loaded.output(&case, &stream) == before, "something ran");

    let slots: Vec<i32> = (0..3).map(|n| case.slot(n) as i32).collect();
    plan.set_slots(&slots).unwrap();
    run(&mut loaded, &plan, true).unwrap();
    let mut expected = Loaded::new(&context, &case, &data);
    expected.launch(&case, &stream).unwrap();
    assert!(loaded.output(&case, &stream) == expected.output(&case, &stream));
}
