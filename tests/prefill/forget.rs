//! Segments whose gates leave less than 2^-64 of the state before them: their M is left out, and only the last chunks are
//! walked. What is left counts if it is more.

use std::f32::consts::LN_2;

use deltawave::prefill::{Prefill, PrefillPath, PrefillSpec};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle;

use crate::common::{
    Case, Data, GateKind, Output, StateKind, check, check_output, context, judge, run, spec,
};

const BOTH: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

fn cut(path: PrefillPath, spec: PrefillSpec, lengths: &[usize], segments: usize) -> Case {
    let mut case = Case::new(spec, lengths);
    (case.spec.path, case.spec.segments) = (path, Some(segments));
    case.initial = Some(StateKind {
        dtype: Dtype::F32,
        layout: StateLayout::KeyMajor,
        pad: 0,
    });
    case
}

/// Data whose gates are a function of token and head.
fn with_gates(case: &Case, g: impl Fn(usize, usize) -> f32) -> Data {
    let mut data = case.data();
    let heads = case.spec.heads.value;
    for (i, x) in data.inputs.g.iter_mut().enumerate() {
        *x = g(i / heads, i % heads);
    }
    data
}

fn scaled(t: &HostTensor, by: f32) -> HostTensor {
    HostTensor::new(t.dtype, t.values.iter().map(|x| x * by).collect())
}

/// Heads that forget in a chunk, in some, just so, or never, in one launch; segments that forget before, between and after
/// others that do not; more chunks than a wave reads bounds of at once.
fn gates_of_every_strength(path: PrefillPath) {
    for dtype in BOTH {
        let mut case = cut(
            path,
            spec(dtype, 3, 6, 64, 48),
            &[64 * 9 + 5, 130, 64 * 8],
            5,
        );
        let data = with_gates(&case, |t, h| match h {
            0 => 0.0,
            1 => -0.4,
            2 => -0.75,
            3 => -0.1,
            4 => [-30.0, 0.0][t / 128 % 2],
            _ => [-0.01, -3.0, -0.01][t % 128 / 43],
        });
        check_output(&case, &data, &run(&context(), &case, &data), 1.15);
        case.spec.qk_l2norm = true;
        check_output(&case, &data, &run(&context(), &case, &data), 1.15);
    }
    // Summaries of 290 chunks, of which the last 14 or so count, or all.
    let mut case = cut(
        path,
        spec(Dtype::Bf16, 1, 2, 16, 16),
        &[64 * 580, 64 * 302],
        2,
    );
    case.gates = Gates::Mixed;
    check(&context(), &case);
    case.gates = Gates::Zero;
    check(&context(), &case);
    let mut case = cut(path, spec(Dtype::F16, 2, 4, 128, 128), &[1000], 3);
    (case.gates, case.gate_kind) = (
        Gates::Strong,
        GateKind::Raw {
            dtype: Dtype::F32,
            dt_bias: true,
            allow_neg_eigval: true,
        },
    );
    check(&context(), &case);
}

/// Holds the outputs from a token on, and the final state, to the accuracy that a chunk's rounding allows.
fn check_from(case: &Case, data: &Data, token: usize) -> Output {
    let output = run(&context(), case, data);
    let expected = oracle::prefill(&data.problem(case)).expect("a problem");
    let from = token * case.spec.heads.value * case.spec.heads.value_dim;
    let o = compare(&output.o[from..], &expected.o[from..]);
    assert!(o.rms_ratio < 1.5e-2, "o: {o:?}");
    let state = compare(
        output.state.as_ref().expect("a state"),
        &expected.final_state,
    );
    assert!(state.rms_ratio < 1.5e-2, "state: {state:?}");
    output
}

/// A state far above all others that decays by up to 2^-64 within a segment, or since the beginning of a segment: as little
/// as is left of it, it is all that there is.
fn what_is_left_counts(path: PrefillPath) {
    for decay in [-30.0f32, -50.0, -64.0] {
        // Segments of four chunks, of which the second decays. Tokens add nothing.
        let mut case = cut(path, spec(Dtype::Bf16, 1, 1, 64, 32), &[64 * 12], 3);
        let mut data = with_gates(&case, |t, _| match t / 256 {
            1 => decay * LN_2 / 256.0,
            _ => 0.0,
        });
        data.inputs.beta.fill(0.0);
        let initial = data.initial.take().expect("an initial state");
        data.initial = Some(scaled(&initial, 100f32.exp2()));
        check_from(&case, &data, 512);

        // Values of the first chunk that decay in the rest of the first segment.
        case.initial = None;
        let mut data = with_gates(&case, |t, _| match t / 64 {
            1..4 => decay * LN_2 / 192.0,
            _ => 0.0,
        });
        data.inputs.beta[64..].fill(0.0);
        data.inputs.v = scaled(&data.inputs.v, 100f32.exp2());
        check_from(&case, &data, 256);
    }
}

/// The same over more chunks than a wave reads bounds of at once.
fn what_is_left_of_long_segments_counts(path: PrefillPath) {
    let case = cut(path, spec(Dtype::Bf16, 1, 1, 16, 16), &[64 * 960], 3);
    let mut data = with_gates(&case, |t, _| match t / (64 * 320) {
        1 => -62.0 * LN_2 / (64.0 * 320.0),
        _ => 0.0,
    });
    data.inputs.beta.fill(0.0);
    let initial = data.initial.take().expect("an initial state");
    data.initial = Some(scaled(&initial, 60f32.exp2()));
    check_from(&case, &data, 64 * 640);
}

/// A segment in which a state grows along long keys and decays, in either order: it is the product that counts.
fn growth_counts(path: PrefillPath) {
    for growing in [4, 7] {
        let case = cut(path, spec(Dtype::Bf16, 1, 1, 64, 32), &[64 * 12], 3);
        // In one chunk of the second segment the state along the key is doubled by every token.
        let mut data = with_gates(&case, |t, _| match t / 64 {
            chunk @ 4..8 if chunk != growing => -120.0 * LN_2 / 192.0,
            _ => 0.0,
        });
        for (t, beta) in data.inputs.beta.iter_mut().enumerate() {
            *beta = if t / 64 == growing { 0.75 } else { 0.0 };
        }
        let mut keys = vec![0.0; data.inputs.k.values.len()];
        for row in keys.chunks_exact_mut(64) {
            row[3] = 2.0;
        }
        data.inputs.k = HostTensor::new(Dtype::Bf16, keys);
        data.inputs.v = scaled(&data.inputs.v, 0.0);
        let output = run(&context(), &case, &data);
        let expected = oracle::prefill(&data.problem(&case)).expect("a problem");
        let from = 512 * 32;
        let o = compare(&output.o[from..], &expected.o[from..]);
        assert!(o.rms_ratio < 3e-2, "{growing}: {o:?}");
    }
}

/// A segment that scales the state before it by less than 2^-64 drops that state: its walk begins from zeros, and adds nothing.
fn less_is_dropped(path: PrefillPath) {
    // The fused path does not know here that states cannot grow, and keeps what f32 can hold.
    let case = cut(path, spec(Dtype::Bf16, 1, 1, 64, 32), &[64 * 12], 3);
    let mut data = with_gates(&case, |t, _| match t / 256 {
        1 => -66.0 * LN_2 / 256.0,
        _ => 0.0,
    });
    data.inputs.beta.fill(0.0);
    let state = run(&context(), &case, &data).state.expect("a state");
    let nothing = state.iter().all(|&x| x == 0.0);
    assert_eq!(nothing, path == PrefillPath::Split);
}

/// Gates that alone would leave nothing, on keys so long that the state along them does not decay: beta |k|^2 - 1 is what
/// exp(-g) is.
fn long_keys_remember(path: PrefillPath) {
    for dtype in BOTH {
        let case = cut(path, spec(dtype, 1, 2, 64, 32), &[64 * 16], 4);
        let along: f32 = 0.75 * 4.0 - 1.0;
        let mut data = with_gates(&case, |_, _| -along.ln());
        data.inputs.beta.fill(0.75);
        let mut keys = vec![0.0; data.inputs.k.values.len()];
        for row in keys.chunks_exact_mut(64) {
            row[3] = 2.0;
        }
        data.inputs.k = HostTensor::new(dtype, keys);
        // Tokens add less to it than it is.
        let initial = data.initial.take().expect("an initial state");
        data.initial = Some(scaled(&initial, 100.0));
        check_from(&case, &data, 64 * 12);
    }
}

/// Segments whose last chunks forget, but not what grew before: on targets that summarise a segment in two pieces, the
/// second piece forgets by itself. Both kernels must decide by that.
fn growth_before_a_piece_that_forgets(path: PrefillPath) {
    let mut case = cut(path, spec(Dtype::Bf16, 1, 1, 64, 16), &[64 * 100], 1);
    (case.spec.segments, case.spec.compute_units) = (None, Some(3));
    let plan = Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens());
    let segments = plan.expect("a plan").segments();
    assert!(segments > 2, "{segments} segments");
    let segment = 100usize.div_ceil(segments);
    for growing in [0, 3, segment / 2 - 1] {
        // In one chunk of each segment the state along the key is doubled by every token; the last two leave 2^-80.
        let mut data = with_gates(&case, |t, _| match t / 64 % segment {
            chunk if chunk + 2 >= segment => -40.0 * LN_2 / 64.0,
            _ => 0.0,
        });
        let mut keys = data.inputs.k.values.clone();
        for (t, row) in keys.chunks_exact_mut(64).enumerate() {
            if t / 64 % segment == growing {
                row.fill(0.0);
                row[3] = 2.0;
                data.inputs.beta[t] = 0.75;
            }
        }
        data.inputs.k = HostTensor::new(Dtype::Bf16, keys);
        let output = run(&context(), &case, &data);
        let expected = oracle::prefill(&data.problem(&case)).expect("a problem");
        // The first chunks of each further segment, before its own growth.
        for begin in (1..segments).map(|i| i * segment * 64) {
            let rows = begin * 16..(begin + 64 * growing.min(2)) * 16;
            let o = compare(&output.o[rows.clone()], &expected.o[rows]);
            assert!(growing == 0 || o.rms_ratio < 1.5e-2, "{growing}: {o:?}");
        }
        let state = output.state.expect("a state");
        let state = compare(&state, &expected.final_state);
        assert!(state.rms_ratio < 1.5e-2, "{growing}: {state:?}");
    }
}

/// Segments that forget cost no accuracy, as the planner cuts them: it does not know of gates.
fn forgetting_costs_no_accuracy(path: PrefillPath) {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 64), &[6000, 0, 100]);
    (case.gates, case.spec.path) = (Gates::Normal, path);
    let plan = Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens());
    assert!(plan.expect("a plan").segments() > 4);
    let data = case.data();
    let [cut, whole] = [None, Some(1)].map(|segments| {
        case.spec.segments = segments;
        let judged = judge(&case, &data, &run(&context(), &case, &data));
        [judged.o.rms_ratio, judged.state.rms_ratio]
    });
    for (cut, whole) in cut.into_iter().zip(whole) {
        assert!(cut <= 1.05 * whole, "{cut:.3e}, whole {whole:.3e}");
    }
}

/// Runs each test on both paths that cut sequences.
macro_rules! on_both_paths {
    ($($name:ident),*) => {
        mod split {
            use deltawave::prefill::PrefillPath::Split;
            $(#[test] fn $name() { super::$name(Split) })*
        }
        mod fused {
            use deltawave::prefill::PrefillPath::Fused;
            $(#[test] fn $name() { super::$name(Fused) })*
        }
    };
}
on_both_paths!(
    gates_of_every_strength,
    what_is_left_counts,
    what_is_left_of_long_segments_counts,
    growth_counts,
    growth_before_a_piece_that_forgets,
    less_is_dropped,
    long_keys_remember,
    forgetting_costs_no_accuracy
);

/// A segment with a gate that is not a number does not forget, however its other chunks decay: the segment after it starts
/// from a state that is not a number either.
#[test]
fn a_segment_with_nan_gates_does_not_forget() {
    const CHUNKS: usize = 4; // of a segment
    let case = cut(
        PrefillPath::Split,
        spec(Dtype::Bf16, 1, 2, 64, 16),
        &[64 * 3 * CHUNKS],
        3,
    );
    for chunk in [0, 2, 5, 7] {
        let data = with_gates(&case, |t, head| match (t, head) {
            (t, 0) if t == 64 * chunk + 9 => f32::NAN,
            _ => -3.0,
        });
        let output = run(&context(), &case, &data);
        let segment_end = 64 * CHUNKS * (chunk / CHUNKS + 2);
        for (i, row) in output.o.chunks_exact(16).enumerate() {
            let (token, head) = (i / 2, i % 2);
            if head == 1 || token < 64 * chunk {
                assert!(row.iter().all(|x| x.is_finite()), "{chunk}: {token}");
            } else if token >= 64 * chunk + 9 && token < segment_end {
                assert!(row.iter().all(|x| x.is_nan()), "{chunk}: {token}");
            }
        }
    }
}
