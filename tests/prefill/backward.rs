//! The backward of a prefill against the f64 oracle. Limits are the errors of FLA's chain on the same inputs.

use deltawave::model::Heads;
use deltawave::prefill::{Prefill, PrefillBackward, PrefillSpec};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Keys, Tensor as HostTensor};
use deltawave_lab::oracle;

use crate::common::backward::{
    ALL, Given, LoadedBackward, NAMES, check_backward, judge_backward, run_backward,
};
use crate::common::{Case, Entry, GateKind, Layout, StateKind, bits, context, spec};

const F32_STATE: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};
const RAW: GateKind = GateKind::Raw {
    dtype: Dtype::Bf16,
    dt_bias: true,
    allow_neg_eigval: false,
};
const GATES: [Gates; 5] = [
    Gates::Normal,
    Gates::Mixed,
    Gates::Zero,
    Gates::Strong,
    Gates::Model,
];

/// Factors on the errors of FLA's chain: errors of single batches scatter, of small ones more.
const SCATTER: f64 = 1.1;
const SMALL: f64 = 1.3;

fn floor(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 1.2e-3,
        _ => 8e-3,
    }
}

fn with_norm(spec: PrefillSpec, map: HeadMap) -> PrefillSpec {
    PrefillSpec {
        qk_l2norm: true,
        heads: Heads { map, ..spec.heads },
        ..spec
    }
}

#[test]
fn backward_of_every_kind_of_gates() {
    for (dtype, seed) in [(Dtype::Bf16, 1), (Dtype::F16, 2)] {
        for gates in GATES {
            let mut case = Case::new(spec(dtype, 2, 4, 128, 128), &[200, 64, 313]);
            case.initial = Some(F32_STATE);
            case.gates = gates;
            case.seed = seed;
            check_backward(&context(), &case, SCATTER, 0.0);
        }
    }
}

#[test]
fn backward_with_norms_and_raw_gates() {
    for (map, allow_neg_eigval, dt_bias) in [
        (HeadMap::Grouped, false, true),
        (HeadMap::Tiled, true, false),
    ] {
        let mut case = Case::new(with_norm(spec(Dtype::Bf16, 2, 8, 128, 64), map), &[130, 77]);
        case.initial = Some(F32_STATE);
        case.gate_kind = GateKind::Raw {
            dtype: Dtype::Bf16,
            dt_bias,
            allow_neg_eigval,
        };
        check_backward(&context(), &case, SCATTER, 2.5e-3);
    }
}

/// Lengths around every tile and chunk boundary, empty sequences and rows past the last one.
#[test]
fn backward_of_lengths_around_boundaries() {
    let lengths = [0, 1, 15, 16, 0, 17, 63, 64, 65, 0, 129];
    for (dtype, entry) in [
        (Dtype::Bf16, Entry::Packed),
        (Dtype::F16, Entry::Device { wide: false }),
    ] {
        let mut case = Case::new(spec(dtype, 1, 2, 64, 48), &lengths);
        case.initial = Some(F32_STATE);
        case.padding = 70;
        case.entry = entry;
        check_backward(&context(), &case, SMALL, floor(dtype));
        case.gate_kind = RAW;
        check_backward(&context(), &case, SMALL, floor(dtype));
    }
    for lengths in [&[][..], &[0], &[0, 0, 75], &[75, 0, 0], &[1]] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 1, 32, 16), lengths);
        case.padding = 3;
        check_backward(&context(), &case, 2.0, 2e-2);
    }
}

#[test]
fn backward_of_every_dimension() {
    for (key_dim, value_dim) in [
        (16, 256),
        (80, 112),
        (96, 192),
        (144, 32),
        (192, 80),
        (256, 256),
    ] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = Case::new(
                with_norm(spec(dtype, 1, 2, key_dim, value_dim), HeadMap::Grouped),
                &[100],
            );
            case.initial = Some(F32_STATE);
            case.gates = Gates::Mixed;
            check_backward(&context(), &case, 1.1, floor(dtype) / 2.0);
        }
    }
}

#[test]
fn backward_of_every_layout() {
    let states = [
        (Dtype::F32, StateLayout::ValueMajor, 3),
        (Dtype::Bf16, StateLayout::KeyMajor, 0),
        (Dtype::Bf16, StateLayout::ValueMajor, 5),
        (Dtype::F16, StateLayout::ValueMajor, 0),
        (Dtype::F16, StateLayout::KeyMajor, 2),
    ];
    let layouts = [
        Layout::Padded(3, 5, 1),
        Layout::HeadMajor,
        Layout::Padded(16, 0, 0),
        Layout::Dense,
        Layout::Padded(3, 5, 1),
    ];
    for ((dtype, layout, pad), place) in states.into_iter().zip(layouts) {
        let kind = StateKind { dtype, layout, pad };
        let mut case = Case::new(spec(Dtype::Bf16, 2, 2, 64, 32), &[70, 70]);
        (case.initial, case.final_state) = (Some(kind), Some(kind));
        case.layout = place;
        case.gates = Gates::Mixed;
        check_backward(&context(), &case, 1.1, 4e-3);
        case.entry = Entry::Dense;
        case.batch_gap = 11;
        check_backward(&context(), &case, 1.1, 4e-3);
    }
    for kind in [GateKind::NoDecay, GateKind::NoBeta] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[150]);
        case.gate_kind = kind;
        case.has_initial = None;
        check_backward(&context(), &case, 1.1, 8e-3);
    }
}

/// Each gradient alone has the bits that it has among all, and nothing else is written.
#[test]
fn backward_of_each_gradient_alone() {
    let mut case = Case::new(
        with_norm(spec(Dtype::Bf16, 1, 2, 64, 32), HeadMap::Tiled),
        &[90, 3],
    );
    case.gate_kind = RAW;
    case.initial = Some(F32_STATE);
    case.has_initial = Some(vec![1, 0]);
    let (data, given) = (case.data(), Given::new(&case));
    let all = run_backward(&context(), &case, &data, &given, ALL);
    judge_backward(&case, &data, &given, &all);
    let state = all[7].as_ref().expect("wanted");
    assert!(
        state[state.len() / 2..].iter().all(|x| *x == 0.0),
        "a sequence that does not read its initial state gives it no gradient"
    );
    for (i, name) in NAMES.iter().enumerate() {
        let alone = run_backward(&context(), &case, &data, &given, 1 << i);
        let [a, b] = [&alone, &all].map(|g| bits(g[i].as_ref().expect("wanted")));
        assert!(a == b, "{name} alone differs");
    }
    run_backward(&context(), &case, &data, &given, 0);
}

/// Scaling what comes in by a power of two scales every gradient exactly.
#[test]
fn backward_is_linear() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[150]);
    case.initial = Some(F32_STATE);
    let (data, given) = (case.data(), Given::new(&case));
    let scaled =
        |t: &HostTensor| HostTensor::new(t.dtype, t.values.iter().map(|x| 0.125 * x).collect());
    let less = Given {
        d_o: scaled(&given.d_o),
        d_final: given.d_final.as_ref().map(scaled),
    };
    let whole = run_backward(&context(), &case, &data, &given, ALL);
    let part = run_backward(&context(), &case, &data, &less, ALL);
    for ((a, b), name) in whole.iter().zip(&part).zip(NAMES) {
        if let (Some(a), Some(b)) = (a, b) {
            let a: Vec<f32> = a.iter().map(|x| 0.125 * x).collect();
            assert!(bits(&a) == bits(b), "{name}");
        }
    }
}

/// A sequence's gradients do not depend on its batch.
#[test]
fn backward_does_not_depend_on_the_batch() {
    assert_first_alone(&Case {
        initial: Some(F32_STATE),
        ..Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[130, 70])
    });
}

/// The gradients of a batch's first sequence have the bits of that sequence alone.
pub fn assert_first_alone(case: &Case) {
    let heads = &case.spec.heads;
    let tokens = case.lengths[0];
    let (data, given) = (case.data(), Given::new(case));
    let all = run_backward(&context(), case, &data, &given, ALL);
    let first = Case {
        lengths: vec![tokens],
        ..case.clone()
    };
    let mut own = first.data();
    let rows = |t: &HostTensor, n: usize| HostTensor::new(t.dtype, t.values[..n].to_vec());
    let (of_keys, of_values) = (heads.key * heads.key_dim, heads.value * heads.value_dim);
    own.inputs.q = rows(&data.inputs.q, tokens * of_keys);
    own.inputs.k = rows(&data.inputs.k, tokens * of_keys);
    own.inputs.v = rows(&data.inputs.v, tokens * of_values);
    own.inputs.g = data.inputs.g[..tokens * heads.value].to_vec();
    own.inputs.beta = data.inputs.beta[..tokens * heads.value].to_vec();
    let state = of_values * heads.key_dim;
    own.initial = data.initial.as_ref().map(|t| rows(t, state));
    let up = Given {
        d_o: rows(&given.d_o, tokens * of_values),
        d_final: given.d_final.as_ref().map(|t| rows(t, state)),
    };
    let alone = run_backward(&context(), &first, &own, &up, ALL);
    for ((a, b), name) in alone.iter().zip(&all).zip(NAMES) {
        if let (Some(a), Some(b)) = (a, b) {
            assert!(bits(a) == bits(&b[..a.len()]), "{name}");
        }
    }
}

/// What scaling of the initial state and v puts in comes out, by the kernels' own gradients.
#[test]
fn backward_conserves() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 128, 64), &[300]);
    case.initial = Some(F32_STATE);
    case.gates = Gates::Mixed;
    let (data, given) = (case.data(), Given::new(&case));
    let found = run_backward(&context(), &case, &data, &given, ALL);
    let problem = data.problem(&case);
    let forward = oracle::prefill(&problem).expect("a problem");
    let dot = |a: &[f32], b: &mut dyn Iterator<Item = f64>| -> (f64, f64) {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * b);
        products.fold((0.0, 0.0), |(s, n), x| (s + x, n + x * x))
    };
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let (v, state) = (wide(problem.v), wide(problem.initial_state.expect("given")));
    let terms = [
        dot(found[2].as_ref().expect("dv"), &mut v.into_iter()),
        dot(found[7].as_ref().expect("ds0"), &mut state.into_iter()),
        dot(&given.d_o.values, &mut forward.o.into_iter().map(|x| -x)),
        dot(
            &given.d_final.as_ref().expect("given").values,
            &mut forward.final_state.into_iter().map(|x| -x),
        ),
    ];
    let sum: f64 = terms.iter().map(|t| t.0).sum();
    let size: f64 = terms.iter().map(|t| t.1).sum::<f64>().sqrt();
    assert!(sum.abs() <= 2e-2 * size, "{sum:e} beside {size:e}");
}

/// beta of 0 and of 2, gates of -infinity, rows of zeros under the norm: finite, and as the oracle has them.
#[test]
fn backward_at_the_edges() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let heads = with_norm(spec(dtype, 1, 2, 64, 32), HeadMap::Grouped);
        let mut case = Case::new(heads, &[140]);
        case.initial = Some(F32_STATE);
        case.gates = Gates::Mixed;
        let mut data = case.data();
        for t in 0..140 {
            for h in 0..2 {
                match (t + h) % 5 {
                    0 => data.inputs.beta[2 * t + h] = 0.0,
                    1 => data.inputs.beta[2 * t + h] = 1e-6,
                    _ => {}
                }
            }
        }
        data.inputs.g[2 * 33] = f32::NEG_INFINITY;
        data.inputs.g[2 * 64] = -745.0;
        let zero = |t: &mut HostTensor, row: usize| {
            let mut values = t.values.clone();
            values[64 * row..64 * (row + 1)].fill(0.0);
            *t = HostTensor::new(t.dtype, values);
        };
        zero(&mut data.inputs.k, 20);
        zero(&mut data.inputs.q, 21);
        let given = Given::new(&case);
        let found = run_backward(&context(), &case, &data, &given, ALL);
        let problem = oracle::Problem {
            l2_norm: true,
            ..data.problem(&case)
        };
        let exact = oracle::backward(&problem, &given.upstream()).expect("a problem");
        let erased = |g: &[f64]| g[2 * 33].abs().max(g[2 * 64].abs());
        assert!(erased(&exact.gate) <= 1e-300);
        let largest = exact.gate.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let dg: Vec<f64> = (found[3].iter().flatten()).map(|x| f64::from(*x)).collect();
        assert!(erased(&dg) <= 1e-5 * largest, "{:e}", erased(&dg));
        // Where beta is 0 its gradient is as accurate as elsewhere.
        let dbeta = found[4].as_ref().expect("wanted");
        let rows = |zero: bool| {
            let of = move |i: &usize| (i / 2 + i % 2).is_multiple_of(5) == zero;
            let error = (0..280)
                .filter(of)
                .map(|i| (f64::from(dbeta[i]) - exact.beta[i]).powi(2));
            let size = (0..280).filter(of).map(|i| exact.beta[i].powi(2));
            (error.sum::<f64>() / size.sum::<f64>()).sqrt()
        };
        assert!(rows(true) <= 1.5 * rows(false), "{:e}", rows(true));
        for (name, error, chain) in judge_backward(&case, &data, &given, &found) {
            // A row of zeros has a gradient a thousand times as large as others: its error is of its own rows.
            assert!(
                error <= (1.2 * chain).max(5e-3),
                "{name}: {error:e}, {chain:e}"
            );
        }
    }
}

/// Where gates forget, the first chunk alone makes the gradient of an initial state. The walk multiplies the rounding errors
/// of its operands too: without them the error is 1.7e-3, as in chains of kernels that round.
#[test]
fn backward_keeps_rounding_errors_for_initial_states() {
    for (key_dim, value_dim, layout) in [
        (64, 32, StateLayout::KeyMajor),
        (128, 128, StateLayout::KeyMajor),
        (256, 48, StateLayout::ValueMajor),
    ] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, key_dim, value_dim), &[200, 64, 30]);
        case.initial = Some(StateKind {
            layout,
            ..F32_STATE
        });
        let (data, given) = (case.data(), Given::new(&case));
        let found = run_backward(&context(), &case, &data, &given, ALL);
        let judged = judge_backward(&case, &data, &given, &found);
        let (_, error, chain) = judged.iter().find(|j| j.0 == "ds0").expect("a gradient");
        assert!(
            *error < 3e-4,
            "ds0: {error:.2e}; FLA's chain has {chain:.2e}"
        );
    }
}

/// The scale, K^-0.5, is no power of two at K = 128. Gradients of o times it would be rounded before they are multiplied, and
/// where nothing is forgotten these errors add up: dS0 then had 2.1e-3 here.
#[test]
fn backward_multiplies_gradients_of_outputs_exactly() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 128, 128), &[512]);
    (case.initial, case.gates) = (Some(F32_STATE), Gates::Zero);
    let (data, mut given) = (case.data(), Given::new(&case));
    let d_final = given.d_final.as_mut().expect("a gradient");
    d_final.values.fill(0.0);
    let found = run_backward(&context(), &case, &data, &given, ALL);
    let judged = judge_backward(&case, &data, &given, &found);
    let (_, error, _) = judged.iter().find(|j| j.0 == "ds0").expect("a gradient");
    assert!(*error < 1.8e-3, "ds0: {error:.2e}");
}

/// The gradient of the state after no tokens is that of the state before them, bit by bit. Beside them a sequence is whole or
/// in segments. K = 128, so that other gradients of final states are divided by the unit, in 16 bits too.
#[test]
fn backward_of_no_tokens_copies() {
    for (dtype, segments) in [
        (Dtype::F32, None),
        (Dtype::F32, Some(3)),
        (Dtype::Bf16, None),
    ] {
        let spec = PrefillSpec {
            segments,
            ..spec(Dtype::Bf16, 1, 2, 128, 32)
        };
        let mut case = Case::new(spec, &[0, 200, 0]);
        let kind = StateKind { dtype, ..F32_STATE };
        (case.initial, case.final_state) = (Some(kind), Some(kind));
        check_backward(&context(), &case, SMALL, floor(Dtype::Bf16));
        let (data, given) = (case.data(), Given::new(&case));
        let found = run_backward(&context(), &case, &data, &given, ALL);
        let d_initial = found[7].as_ref().expect("ds0");
        let d_final = &given.d_final.as_ref().expect("a gradient").values;
        let each = d_final.len() / 3;
        for empty in [0, 2] {
            let range = empty * each..(empty + 1) * each;
            assert!(bits(&d_initial[range.clone()]) == bits(&d_final[range]));
        }
    }
}

/// Strongly correlated keys and short memories, as models have them.
#[test]
fn backward_of_correlated_keys() {
    let mut case = Case::new(
        with_norm(spec(Dtype::Bf16, 1, 4, 128, 128), HeadMap::Grouped),
        &[256],
    );
    case.keys = Keys::Silu;
    case.gates = Gates::Model;
    case.gate_kind = RAW;
    check_backward(&context(), &case, 1.05, 0.0);
}

#[test]
fn backward_refuses_what_it_cannot_do() {
    let case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[20]);
    let (data, given) = (case.data(), Given::new(&case));
    let context = context();
    let stream = context.stream().expect("a stream");
    let mut loaded = LoadedBackward::new(&context, &case, &data, &given);
    loaded.launch(&case, ALL, &stream).expect("a launch");
    let text = |e: deltawave::Error| e.to_string();
    let plan = Prefill::packed(&context, case.spec, &[0, 20], 20).expect("a plan");
    let plan = PrefillBackward::of(&plan).expect("a plan");
    assert!(plan.workspace_bytes() > 0);
    assert_eq!(plan.kernels(false).len(), 3);
    assert_eq!(plan.kernels(true).len(), 4);
    for (message, break_it) in LoadedBackward::BROKEN {
        let mut loaded = LoadedBackward::new(&context, &case, &data, &given);
        break_it(&mut loaded);
        let error = loaded.launch(&case, ALL, &stream).expect_err(message);
        assert_eq!(text(error), *message);
    }
}
