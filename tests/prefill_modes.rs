//! The same prefill in every way in which the simulator can execute it: both models of the matrix unit, every order of
//! waves with every check of the simulator on, any number of threads, every host level. On a card there is one way, and
//! nothing to compare.

mod common;

use common::backward::{ALL, Given, NAMES, run_backward};
use common::{
    Case, Entry, GateKind, PoolCase, StateKind, assert_same_bits, bits, check_output, context,
    is_cdna, run, run_pool, simulated, spec,
};
use deltawave::prefill::{Prefill, PrefillPath};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::launch::{Options, WaveOrder};
use deltawave_sim::sanitize::Checks;

/// One case for every bucket of K, between them all options.
fn cases() -> Vec<Case> {
    let kind = |dtype, layout| {
        Some(StateKind {
            dtype,
            layout,
            pad: 0,
        })
    };
    let mut cases = Vec::new();
    for (i, (k, v)) in [(32, 144), (96, 64), (128, 128), (192, 48), (256, 32)]
        .into_iter()
        .enumerate()
    {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = Case::new(spec(dtype, 1, 2, k, v), &[75, 0, 130]);
            case.gates = [Gates::Mixed, Gates::Strong, Gates::Normal, Gates::Zero][i % 4];
            case.keys = [Keys::Normal, Keys::Silu][i % 2];
            case.spec.qk_l2norm = i % 2 == 0;
            case.initial = kind(Dtype::F32, StateLayout::KeyMajor);
            case.final_state = kind(Dtype::F32, StateLayout::ValueMajor);
            case.entry = [Entry::Packed, Entry::Device { wide: true }][i % 2];
            if i == 2 {
                case.gate_kind = GateKind::Raw {
                    dtype: Dtype::Bf16,
                    dt_bias: true,
                    allow_neg_eigval: true,
                };
            }
            cases.push(case);
        }
    }
    // Two segments without summaries: one starts early, or both walk the whole sequence.
    for gates in [Gates::Normal, Gates::Zero] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[64 * 34 + 5]);
        case.spec.path = PrefillPath::Split;
        (case.gates, case.final_state) = (gates, kind(Dtype::F32, StateLayout::KeyMajor));
        let cut_in_two = (4..100).find(|&units| {
            case.spec.compute_units = Some(units);
            let plan = Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens());
            plan.expect("a plan").segments() == 2
        });
        assert!(cut_in_two.is_some());
        cases.push(case);
    }
    // Gates choose between the fused path and the split path. Other targets have no such plans.
    for gates in [Gates::Normal, Gates::Zero] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 4, 32, 128), &[64 * 140 + 5]);
        (case.gates, case.final_state) = (gates, kind(Dtype::F32, StateLayout::KeyMajor));
        let chooses = (2..40).find(|&units| {
            case.spec.compute_units = Some(units);
            let plan = Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens());
            plan.expect("a plan").path() == PrefillPath::Auto
        });
        assert!(chooses.is_some() || !context().device().arch.starts_with("gfx942"));
        cases.push(case);
    }
    // Gates choose between segments and whole sequences of the fused path, on lists of the host and of the device.
    for gates in [Gates::Normal, Gates::Zero] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 128), &[64 * 32 + 9; 5]);
        (case.gates, case.final_state) = (gates, kind(Dtype::F32, StateLayout::KeyMajor));
        case.spec.compute_units = Some(4);
        cases.push(case.clone());
        case.entry = Entry::Device { wide: false };
        cases.push(case);
    }
    // Short sequences, alone and beside a long one.
    for (i, (k, lengths)) in [
        (64, vec![16, 3, 0]),
        (96, vec![9, 70, 1]),
        (128, vec![16, 15]),
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = Case::new(spec(dtype, 1, 2, k, 48), &lengths);
            case.spec.path = PrefillPath::Short;
            case.spec.qk_l2norm = i % 2 == 0;
            case.padding = 20 * i;
            case.initial = kind(
                Dtype::F32,
                [StateLayout::ValueMajor, StateLayout::KeyMajor][i % 2],
            );
            case.final_state = kind(Dtype::Bf16, StateLayout::ValueMajor);
            case.entry = [Entry::Packed, Entry::Device { wide: false }][i % 2];
            cases.push(case);
        }
    }
    // Operands that do not fit in the last cache, because empty sequences have records.
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 16), &[75, 0, 130]);
    (case.spec.path, case.final_state) = (PrefillPath::Split, None);
    case.lengths.resize(12_000, 0);
    cases.push(case);
    cases
}

/// Whether a launch takes seconds on the simulator. Such cases run in one mode and three orders.
fn is_large(case: &Case) -> bool {
    case.lengths.len() > 1000 || case.lengths.iter().any(|&tokens| tokens > 64 * 64)
}

/// Sequences whose backward is cut: segments that forget and some that do not, chains of both directions.
fn cut_cases() -> Vec<Case> {
    let state = StateKind {
        dtype: Dtype::F32,
        layout: StateLayout::KeyMajor,
        pad: 0,
    };
    let shapes = [
        (Dtype::Bf16, 128, 48, Gates::Mixed, 4),
        (Dtype::F16, 64, 32, Gates::Zero, 3),
        (Dtype::Bf16, 256, 32, Gates::Normal, 2),
        (Dtype::F16, 144, 16, Gates::Strong, 3),
    ];
    let case = |(dtype, k, v, gates, segments)| {
        let mut case = Case::new(spec(dtype, 1, 2, k, v), &[260, 0, 70]);
        (case.initial, case.gates) = (Some(state), gates);
        case.spec.segments = Some(segments);
        case
    };
    shapes.into_iter().map(case).collect()
}

/// One test, because the options are those of the whole process.
#[test]
fn every_way_of_execution() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    // In every order of waves the kernels are clean under every check.
    if std::env::var_os("DELTAWAVE_SIM_CHECKS").is_none() {
        assert_eq!(usual.checks, Checks::ALL);
    }
    assert_eq!(usual.order, WaveOrder::RunAhead);
    let with = |options: Options, case: &Case| {
        deltawave_sim::hip::set_options(options);
        let output = run(&context, case, &case.data());
        deltawave_sim::hip::set_options(usual);
        output
    };
    // In place on a pool, whole and cut, in every order. Without a number of segments, the gates choose them.
    for (segments, path, tokens) in [
        (Some(1), PrefillPath::Split, 200),
        (Some(3), PrefillPath::Split, 200),
        (Some(1), PrefillPath::Short, 200),
        (None, PrefillPath::Auto, 64 * 150 + 9),
    ] {
        let state = StateKind {
            dtype: Dtype::F32,
            layout: StateLayout::ValueMajor,
            pad: 0,
        };
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 48), &[75, tokens, 9]);
        (case.initial, case.spec.segments) = (Some(state), segments);
        case.spec.path = path;
        if segments.is_none() {
            case.spec.heads.value_dim = 128;
            let chooses = (2..40).find(|&units| {
                case.spec.compute_units = Some(units);
                let plan = Prefill::packed(&context, case.spec, &case.cu_seqlens(), case.tokens());
                plan.expect("a plan").path() == PrefillPath::Auto
            });
            assert!(chooses.is_some() || !is_cdna(&context));
        }
        let pool = PoolCase::new(state, 4, &[3, 1, -1]);
        let expected = run_pool(&context, &case, &case.data(), &pool);
        for order in [WaveOrder::InStep, WaveOrder::Seeded(1)] {
            deltawave_sim::hip::set_options(Options { order, ..usual });
            let other = run_pool(&context, &case, &case.data(), &pool);
            deltawave_sim::hip::set_options(usual);
            assert_same_bits(&expected, &other, &format!("a pool, {order:?}"));
        }
    }
    // Gradients: sums of gates cross waves, where other kernels raced.
    for (case, mfma) in cases()
        .into_iter()
        .filter(|case| !is_large(case))
        .step_by(3)
        .chain(cut_cases())
        .zip([MfmaMode::Exact, MfmaMode::Fast].into_iter().cycle())
    {
        let mut case = Case {
            final_state: case.initial,
            ..case
        };
        case.spec.path = PrefillPath::Auto;
        if case.spec.heads.key_dim > 100 {
            case.spec.heads.value_dim = 32;
        }
        let (data, given) = (case.data(), Given::new(&case));
        let with = |options: Options| {
            deltawave_sim::hip::set_options(options);
            let found = run_backward(&context, &case, &data, &given, ALL);
            deltawave_sim::hip::set_options(usual);
            found
        };
        let base = Options { mfma, ..usual };
        let expected = with(base);
        let one = Options {
            threads: Some(1),
            xccs: 1,
            ..base
        };
        let order = |order| Options { order, ..base };
        for options in [
            order(WaveOrder::InStep),
            order(WaveOrder::Seeded(1)),
            order(WaveOrder::Seeded(2)),
            one,
        ] {
            for ((a, b), name) in expected.iter().zip(&with(options)).zip(NAMES) {
                let same = a.as_deref().map(bits) == b.as_deref().map(bits);
                assert!(same, "{name}, {:?}: {}", options.order, case.expression());
            }
        }
    }
    for case in cases() {
        let data = case.data();
        for mfma in [MfmaMode::Fast, MfmaMode::Exact] {
            let base = Options { mfma, ..usual };
            let expected = with(base, &case);
            check_output(&case, &data, &expected, 1.15);
            if mfma == MfmaMode::Exact && case.spec.heads.key_dim > 100 {
                continue;
            }
            // What depends on the order would also show as other bits.
            let orders = [
                WaveOrder::InStep,
                WaveOrder::Seeded(1),
                WaveOrder::Seeded(2),
                WaveOrder::Seeded(3),
            ];
            let count = if is_large(&case) { 2 } else { orders.len() };
            for order in orders.into_iter().take(count) {
                let other = with(Options { order, ..base }, &case);
                assert_same_bits(&expected, &other, &format!("{mfma:?}, {order:?}"));
            }
            if is_large(&case) {
                break;
            }
            let one = Options {
                threads: Some(1),
                xccs: 1,
                ..base
            };
            assert_same_bits(&expected, &with(one, &case), "one thread");
        }
    }
}
