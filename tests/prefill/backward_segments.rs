//! The backward of sequences that are cut into segments, against the f64 oracle.

use std::f32::consts::LN_2;

use deltawave::model::Heads;
use deltawave::prefill::{Prefill, PrefillBackward, PrefillSpec};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};

use crate::backward::assert_first_alone;
use crate::common::backward::{ALL, Given, NAMES, check_backward, judge_backward, run_backward};
use crate::common::{Case, Entry, GateKind, StateKind, bits, context, spec};

const F32_STATE: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};
const RAW: GateKind = GateKind::Raw {
    dtype: Dtype::Bf16,
    dt_bias: true,
    allow_neg_eigval: true,
};

fn cut(spec: PrefillSpec, segments: usize) -> PrefillSpec {
    PrefillSpec {
        segments: Some(segments),
        ..spec
    }
}

/// Segments that forget, some that do not, chains of both directions; with and without states at both ends.
#[test]
fn backward_in_segments_of_every_kind_of_gates() {
    let kinds = [
        (Gates::Normal, true, true),
        (Gates::Mixed, true, true),
        (Gates::Mixed, false, true),
        (Gates::Zero, true, false),
        (Gates::Zero, false, false),
        (Gates::Zero, true, true),
        (Gates::Strong, true, true),
        (Gates::Model, true, true),
    ];
    for (i, (gates, initial, last)) in kinds.into_iter().enumerate() {
        let dtype = [Dtype::Bf16, Dtype::F16][i % 2];
        let segments = [2, 3, 5, 4][i % 4];
        let lengths = [0, 400, 64, 10, 333, 0];
        let mut case = Case::new(cut(spec(dtype, 1, 2, 128, 128), segments), &lengths);
        case.initial = initial.then_some(F32_STATE);
        case.final_state = last.then_some(F32_STATE);
        case.gates = gates;
        case.seed = 20 + i as u64;
        check_backward(&context(), &case, 1.1, 0.0);
    }
}

/// Walks of the long segments of one sequence begin and end in other chunks where gates forget.
#[test]
fn backward_in_long_segments() {
    for (gates, segments) in [(Gates::Normal, 2), (Gates::Zero, 3), (Gates::Mixed, 4)] {
        let mut case = Case::new(cut(spec(Dtype::Bf16, 1, 1, 64, 32), segments), &[4500]);
        case.initial = Some(F32_STATE);
        case.gates = gates;
        check_backward(&context(), &case, 1.1, 0.0);
    }
}

/// A segment in which a state grows along long keys and decays, in either order. Both directions have the same product, and
/// keep what it leaves.
#[test]
fn backward_counts_growth() {
    for growing in [4, 7] {
        let errors = [3, 1].map(|segments| {
            let mut case = Case::new(cut(spec(Dtype::Bf16, 1, 1, 64, 32), segments), &[64 * 12]);
            case.initial = Some(F32_STATE);
            let mut data = case.data();
            // In one chunk of the second of three segments the state along the key is doubled by every token.
            for (t, g) in data.inputs.g.iter_mut().enumerate() {
                let decays = (4..8).contains(&(t / 64)) && t / 64 != growing;
                *g = if decays { -66.0 * LN_2 / 192.0 } else { 0.0 };
            }
            for (t, beta) in data.inputs.beta.iter_mut().enumerate() {
                *beta = if t / 64 == growing { 0.75 } else { 0.0 };
            }
            let mut keys = vec![0.0; data.inputs.k.values.len()];
            for row in keys.chunks_exact_mut(64) {
                row[3] = 2.0;
            }
            data.inputs.k = HostTensor::new(Dtype::Bf16, keys);
            let given = Given::new(&case);
            let found = run_backward(&context(), &case, &data, &given, ALL);
            judge_backward(&case, &data, &given, &found)
        });
        let [cut, whole] = &errors;
        for ((name, error, chain), (_, whole, _)) in cut.iter().zip(whole) {
            let limit = 1.3 * whole.max(*chain);
            assert!(
                *error <= limit,
                "{name}: {error:.2e}, whole {whole:.2e}, FLA's chain {chain:.2e}"
            );
        }
    }
}

#[test]
fn backward_in_segments_of_every_dimension() {
    for (key_dim, value_dim) in [(16, 96), (80, 48), (112, 16), (144, 32), (256, 80)] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut heads = spec(dtype, 1, 2, key_dim, value_dim);
            heads.qk_l2norm = true;
            heads.heads = Heads {
                map: HeadMap::Tiled,
                ..heads.heads
            };
            let mut case = Case::new(cut(heads, 4), &[250]);
            case.initial = Some(StateKind {
                layout: StateLayout::ValueMajor,
                ..F32_STATE
            });
            case.gates = Gates::Zero;
            let floor = if dtype == Dtype::F16 { 6e-4 } else { 4e-3 };
            check_backward(&context(), &case, 1.1, floor);
            case.gate_kind = RAW;
            case.gates = Gates::Mixed;
            // Sums over two heads scatter.
            check_backward(&context(), &case, 1.3, 2.0 * floor);
        }
    }
}

/// A gradient alone has the bits that it has among all, also where the gradient of the initial states is not wanted.
#[test]
fn backward_in_segments_of_each_gradient_alone() {
    let mut case = Case::new(cut(spec(Dtype::Bf16, 1, 2, 64, 32), 3), &[300, 70]);
    case.gate_kind = RAW;
    case.gates = Gates::Mixed;
    case.initial = Some(F32_STATE);
    case.has_initial = Some(vec![0, 1]);
    let (data, given) = (case.data(), Given::new(&case));
    let all = run_backward(&context(), &case, &data, &given, ALL);
    judge_backward(&case, &data, &given, &all);
    for (i, name) in NAMES.iter().enumerate() {
        let alone = run_backward(&context(), &case, &data, &given, 1 << i);
        let [a, b] = [&alone, &all].map(|g| bits(g[i].as_ref().expect("wanted")));
        assert!(a == b, "{name} alone differs");
    }
}

/// With a number of segments, a sequence's gradients do not depend on its batch.
#[test]
fn backward_in_segments_does_not_depend_on_the_batch() {
    assert_first_alone(&Case {
        initial: Some(F32_STATE),
        gates: Gates::Mixed,
        ..Case::new(cut(spec(Dtype::Bf16, 1, 2, 64, 32), 3), &[330, 700, 64])
    });
}

/// Kernels of a plan: those of segments only where a sequence is cut, and chains only of more than two segments.
#[test]
fn backward_plans_segments() {
    let context = context();
    let kernels = |segments, tokens: usize| {
        let spec = PrefillSpec {
            segments,
            ..spec(Dtype::Bf16, 1, 2, 64, 32)
        };
        let plan = Prefill::packed(&context, spec, &[0, tokens as i32], tokens).expect("a plan");
        let plan = PrefillBackward::of(&plan).expect("a plan");
        (plan.segments(), plan.kernels(false).len())
    };
    assert_eq!(kernels(Some(1), 640), (1, 3));
    assert_eq!(kernels(Some(2), 640), (2, 4));
    assert_eq!(kernels(Some(5), 640), (5, 5));
    assert_eq!(kernels(Some(5), 64), (1, 3));
    // Few heads leave most of the device idle: the planner cuts long sequences, and leaves short ones.
    assert_eq!(kernels(None, 640).0, 1);
    assert!(kernels(None, 65536).0 > 8);
    // Lengths that only the device knows are not cut.
    let spec = spec(Dtype::Bf16, 1, 2, 64, 32);
    let plan = Prefill::device(&context, spec, 65536, 1).expect("a plan");
    assert_eq!(PrefillBackward::of(&plan).expect("a plan").segments(), 1);
}

/// Lengths on the device give the bits of a plan that knows them, where none is cut.
#[test]
fn backward_of_lengths_on_the_device_is_whole() {
    let mut case = Case::new(cut(spec(Dtype::Bf16, 1, 2, 64, 32), 1), &[200, 0, 90]);
    case.initial = Some(F32_STATE);
    let (data, given) = (case.data(), Given::new(&case));
    let host = run_backward(&context(), &case, &data, &given, ALL);
    case.entry = Entry::Device { wide: false };
    let device = run_backward(&context(), &case, &data, &given, ALL);
    for ((a, b), name) in host.iter().zip(&device).zip(NAMES) {
        let same = a.as_deref().map(bits) == b.as_deref().map(bits);
        assert!(same, "{name}");
    }
}
