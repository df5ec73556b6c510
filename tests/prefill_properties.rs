//! Prefill on random problems against the f64 oracle. `PROPTEST_CASES` says how many (256); a failing case prints one
//! line that can be pasted into a test, and is tried first from then on (`proptest-regressions/`).

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    Case, Entry, GateKind, Layout, Repeats, StateKind, check_output, context, run, run_repeated,
    simulated, spec,
};
use deltawave::model::Heads;
use deltawave::prefill::{PrefillPath, PrefillSpec};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_sim::launch::WaveOrder;
use deltawave_sim::sanitize::Checks;
use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestRunner};

/// Whether a case has lost the device to this process.
static LOST: AtomicBool = AtomicBool::new(false);

/// Tokens times elements of all states, at most: what a case costs.
const WORK: usize = 8 << 20;

fn dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::Bf16), Just(Dtype::F16)]
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)]
}

fn dim() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => (1usize..=4).prop_map(|n| 16 * n),
        2 => Just(128usize),
        2 => (1usize..=16).prop_map(|n| 16 * n),
    ]
}

/// Every path, where it is compiled.
fn path() -> impl Strategy<Value = PrefillPath> {
    prop_oneof![
        Just(PrefillPath::Auto),
        Just(PrefillPath::Split),
        Just(PrefillPath::Fused),
        Just(PrefillPath::Short)
    ]
}

/// As the planner chooses, which leaves lengths of this size whole, or forced.
fn segments() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![2 => Just(None), 3 => (1usize..=4).prop_map(Some)]
}

fn prefill_spec() -> impl Strategy<Value = PrefillSpec> {
    let scale = prop_oneof![
        3 => Just(None),
        1 => Just(Some(1.0f32)),
        1 => Just(Some(0.37f32)),
        1 => Just(Some(0.0f32))
    ];
    let head_map = prop_oneof![Just(HeadMap::Grouped), Just(HeadMap::Tiled)];
    let options = (head_map, any::<bool>(), scale, segments(), path());
    (dtype(), 1usize..=3, 1usize..=4, dim(), dim(), options).prop_map(
        |(dtype, key_heads, group, k, v, (head_map, qk_l2norm, scale, segments, path))| {
            PrefillSpec {
                heads: Heads {
                    map: head_map,
                    ..Heads::new(key_heads, key_heads * group, k, v)
                },
                qk_l2norm,
                scale,
                segments,
                path: match path {
                    PrefillPath::Short | PrefillPath::Fused if k > 128 => PrefillPath::Auto,
                    path => path,
                },
                ..spec(dtype, key_heads, key_heads * group, k, v)
            }
        },
    )
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => prop::sample::select(vec![0usize, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]),
        2 => 0usize..=150,
        1 => 130usize..=300,
        // More chunks than a segment starts early.
        1 => 700usize..=1300,
        1 => 1usize..=8,
    ]
}

/// Batches of short sequences alone, and of some short ones.
fn short_lengths() -> impl Strategy<Value = Vec<usize>> {
    let short = || prop_oneof![3 => 0usize..=16, 1 => Just(16usize)];
    prop_oneof![
        2 => prop::collection::vec(short(), 1..=9),
        1 => prop::collection::vec(prop_oneof![3 => short(), 1 => length()], 1..=7),
    ]
}

fn lengths() -> impl Strategy<Value = (Entry, Vec<usize>, usize, usize)> {
    let padding = || prop_oneof![2 => Just(0usize), 1 => 1usize..=70];
    let some = || {
        prop_oneof![
            2 => prop::collection::vec(length(), 0..=5),
            1 => short_lengths()
        ]
    };
    let packed = (some(), padding());
    let device = (some(), padding(), any::<bool>());
    let gap = prop_oneof![Just(0usize), (1usize..=6).prop_map(|n| 8 * n)];
    let dense = (1usize..=3, length(), gap);
    prop_oneof![
        3 => packed.prop_map(|(l, p)| (Entry::Packed, l, p, 0)),
        1 => device.prop_map(|(l, p, wide)| (Entry::Device { wide }, l, p, 0)),
        1 => dense.prop_map(|(n, l, gap)| (Entry::Dense, vec![l; n], 0, gap)),
    ]
}

fn gates() -> impl Strategy<Value = (Gates, Keys, GateKind)> {
    let gates = prop_oneof![
        Just(Gates::Normal),
        Just(Gates::Mixed),
        Just(Gates::Zero),
        Just(Gates::Strong)
    ];
    let keys = prop_oneof![Just(Keys::Normal), Just(Keys::Silu)];
    let raw = (any_dtype(), any::<bool>(), any::<bool>()).prop_map(
        |(dtype, dt_bias, allow_neg_eigval)| GateKind::Raw {
            dtype,
            dt_bias,
            allow_neg_eigval,
        },
    );
    let kind = prop_oneof![
        4 => Just(GateKind::Given),
        1 => Just(GateKind::NoDecay),
        1 => Just(GateKind::NoBeta),
        3 => raw
    ];
    (gates, keys, kind)
}

fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![
        2 => Just(Layout::Dense),
        1 => Just(Layout::HeadMajor),
        2 => (0usize..=9, 0usize..=40, 0usize..=9).prop_map(|(h, t, f)| Layout::Padded(h, t, f)),
    ]
}

fn state() -> impl Strategy<Value = Option<StateKind>> {
    let layout = prop_oneof![Just(StateLayout::KeyMajor), Just(StateLayout::ValueMajor)];
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let pad = prop_oneof![2 => Just(0usize), 1 => 1usize..=5];
    prop::option::weighted(
        0.7,
        (dtype, layout, pad).prop_map(|(dtype, layout, pad)| StateKind { dtype, layout, pad }),
    )
}

fn case() -> impl Strategy<Value = Case> {
    let flags = prop::option::weighted(0.3, any::<u8>());
    (
        prefill_spec(),
        lengths(),
        gates(),
        layout(),
        (state(), state(), flags),
        0u64..1000,
    )
        .prop_map(
            |(
                mut spec,
                (entry, mut lengths, padding, batch_gap),
                (gates, keys, gate_kind),
                layout,
                states,
                seed,
            )| {
                let (initial, final_state, flags) = states;
                if matches!(entry, Entry::Device { .. }) && spec.path != PrefillPath::Fused {
                    spec.segments = None;
                }
                let state = spec.heads.value * spec.heads.key_dim * spec.heads.value_dim;
                while lengths.len() > 1 && lengths.iter().sum::<usize>() * state > WORK {
                    lengths.pop();
                }
                let most = (WORK / state).max(1);
                lengths.iter_mut().for_each(|n| *n = (*n).min(most));
                let has_initial = flags
                    .filter(|_| initial.is_some())
                    .map(|bits| (0..lengths.len()).map(|i| bits >> (i % 8) & 1).collect());
                Case {
                    padding,
                    gates,
                    keys,
                    gate_kind,
                    layout,
                    batch_gap,
                    initial,
                    has_initial,
                    final_state,
                    entry,
                    seed,
                    ..Case::new(spec, &lengths)
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/prefill_properties.txt",
        ))),
        max_shrink_iters: 300,
        ..ProptestConfig::default()
    })]

    #[test]
    fn prefill_is_the_recurrence(case in case()) {
        let context = context();
        if LOST.load(Ordering::Relaxed) {
            // On a lost device every case fails: the one that lost it is not to be shrunk.
            return Ok(());
        }
        if simulated(&context) {
            // A fault of the case before, while it is being shrunk.
            deltawave_sim::hip::clear_fault();
        }
        let outcome = std::panic::catch_unwind(|| {
            let data = case.data();
            let output = run_repeated(&context, &case, &data, Repeats::Two);
            // Twice the unfused form's error: some of these problems have a few elements, no more.
            check_output(&case, &data, &output, 2.0);
        });
        if let Err(panic) = outcome {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            let fault = deltawave_sim::hip::last_fault().unwrap_or_default();
            if !simulated(&context) && context.synchronize().is_err() {
                LOST.store(true, Ordering::Relaxed);
            }
            return Err(TestCaseError::fail(format!(
                "{} {fault}\nto reproduce: {}",
                text.unwrap_or_default(),
                case.expression()
            )));
        }
    }
}

/// Cases on the fused path.
fn fused_case() -> impl Strategy<Value = Case> {
    (case(), segments()).prop_map(|(mut case, segments)| {
        case.spec.path = PrefillPath::Fused;
        case.spec.heads.key_dim = case.spec.heads.key_dim.min(128);
        case.spec.segments = segments;
        case
    })
}

/// Cases of which each workgroup of the fused path walks several sequences and heads: more of them than compute units, and
/// few chunks each.
fn units_case() -> impl Strategy<Value = Case> {
    let length = || prop_oneof![6 => 17usize..=128, 1 => Just(0usize), 1 => 1usize..=16];
    let lengths = prop::collection::vec(length(), 2..=9);
    (case(), lengths, 1u32..=4).prop_map(|(mut case, lengths, compute_units)| {
        if matches!(case.entry, Entry::Dense) {
            (case.entry, case.batch_gap) = (Entry::Packed, 0);
        }
        let heads = &mut case.spec.heads;
        heads.key_dim = heads.key_dim.min(128);
        heads.value_dim = heads.value_dim.min(128);
        let bits = case.seed;
        case.has_initial =
            (case.has_initial).map(|_| (0..lengths.len()).map(|i| (bits >> i & 1) as u8).collect());
        (case.spec.path, case.spec.segments) = (PrefillPath::Fused, Some(1));
        case.spec.compute_units = Some(compute_units);
        case.lengths = lengths;
        case
    })
}

/// The fused path with all checks of the simulator, its waves one after the other, in step and in a random order: no
/// finding, the accuracy of other paths, and equal bits. Also those of a larger device.
fn fused_in_every_order(cases: u32, strategy: impl Strategy<Value = Case>) {
    let context = context();
    if !simulated(&context) {
        return;
    }
    let config = ProptestConfig {
        cases,
        max_shrink_iters: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let normal = deltawave_sim::hip::options();
    let outcome = TestRunner::new(config).run(&strategy, |case| {
        deltawave_sim::hip::clear_fault();
        let outcome = std::panic::catch_unwind(|| {
            let data = case.data();
            let mut outputs = Vec::new();
            for order in [
                WaveOrder::RunAhead,
                WaveOrder::InStep,
                WaveOrder::Seeded(case.seed),
            ] {
                let mut options = normal;
                (options.order, options.checks) = (order, Checks::ALL);
                deltawave_sim::hip::set_options(options);
                outputs.push(run(&context, &case, &data));
            }
            if case.spec.segments.is_some() {
                let mut larger = case.clone();
                larger.spec.compute_units = None;
                outputs.push(run(&context, &larger, &data));
            }
            deltawave_sim::hip::set_options(normal);
            check_output(&case, &data, &outputs[0], 2.0);
            for other in &outputs[1..] {
                common::assert_same_bits(&outputs[0], other, "another order of waves or device");
            }
        });
        deltawave_sim::hip::set_options(normal);
        let told = |panic: &(dyn std::any::Any + Send)| {
            let text = panic.downcast_ref::<String>().cloned();
            text.unwrap_or_default()
        };
        outcome.map_err(|panic| {
            let fault = deltawave_sim::hip::last_fault().unwrap_or_default();
            let text = told(&*panic);
            TestCaseError::fail(format!(
                "{text} {fault}\nto reproduce: {}",
                case.expression()
            ))
        })
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[test]
fn fused_batches_in_every_order() {
    fused_in_every_order(ProptestConfig::default().cases.div_ceil(32), fused_case());
}

#[test]
fn units_in_every_order() {
    fused_in_every_order(ProptestConfig::default().cases.div_ceil(16), units_case());
}

/// `cargo test --release --test prefill_properties -- --ignored` takes some minutes.
#[test]
#[ignore = "takes some minutes"]
fn thousands_of_fused_batches_in_every_order() {
    fused_in_every_order(1000, fused_case());
    fused_in_every_order(1000, units_case());
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "proptest-regressions/prefill_backward.txt",
        ))),
        max_shrink_iters: 100,
        cases: ProptestConfig::default().cases / 8,
        ..ProptestConfig::default()
    })]

    #[test]
    fn gradients_are_those_of_the_recurrence(mut case in case()) {
        let context = context();
        if simulated(&context) {
            deltawave_sim::hip::clear_fault();
        }
        // Segments and paths are of the forward alone.
        (case.spec.segments, case.spec.path) = (None, PrefillPath::Auto);
        case.lengths.iter_mut().for_each(|n| *n = (*n).min(200));
        let (slack, floor) = match case.spec.dtype {
            Dtype::F16 => (3.0, 8e-3),
            _ => (3.0, 5e-2),
        };
        let outcome = std::panic::catch_unwind(|| {
            common::backward::check_backward(&context, &case, slack, floor);
        });
        if let Err(panic) = outcome {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            let fault = deltawave_sim::hip::last_fault().unwrap_or_default();
            return Err(TestCaseError::fail(format!("{text} {fault}\n{}", case.expression())));
        }
    }
}
