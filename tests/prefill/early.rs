//! Sequences that the planner cuts in two, from zeros: no summaries. The second segment starts early where gates forget,
//! and both walk the whole sequence in narrower slabs where they do not. Elsewhere than on CDNA there are summaries.

use deltawave::prefill::{Part, Prefill, PrefillPath, PrefillSpec};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Gates;

use crate::common::{
    Case, Data, Entry, GateKind, Layout, Loaded, PoolCase, StateKind, assert_same_bits, bits,
    check_output, check_pool, context, is_cdna, run, spec,
};
use crate::snapshots::assert_near_whole;

const F32: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

/// Whether plans have early starts; says that a test is skipped where not.
fn early_starts() -> bool {
    let have = is_cdna(&context());
    if !have {
        println!("skipped: sequences cut in two have summaries on this device");
    }
    have
}

/// A case of the split path, for a device on which the planner cuts so many of the sequences in two, and no other.
fn in_two(spec: PrefillSpec, lengths: &[usize], cut: usize) -> Case {
    let mut case = Case::new(spec, lengths);
    (case.spec.path, case.final_state) = (PrefillPath::Split, Some(F32));
    for units in (4..100).step_by(4) {
        case.spec.compute_units = Some(units);
        if plan(&case).segments() == lengths.len() + cut {
            return case;
        }
    }
    panic!("{lengths:?}: {cut} sequences in two on no device");
}

fn plan(case: &Case) -> Prefill {
    Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).expect("a plan")
}

/// Gates that forget in 1, 2, 7 and 19 chunks, never, and in turn.
fn gates(case: &Case) -> Data {
    let mut data = case.data();
    let heads = case.spec.heads.value;
    for (i, g) in data.inputs.g.iter_mut().enumerate() {
        let (token, head) = (i / heads, i % heads);
        *g = match head {
            0 => 0.0,
            1 => -2.0,
            2 => -0.4,
            3 => -0.1,
            4 => -0.037,
            _ => [-30.0, 0.0, -0.01, -0.4][token / 192 % 4],
        };
    }
    data
}

/// What the prepared records and the last kernel give, without any summary.
fn last_kernel_alone(case: &Case, data: &Data) -> crate::common::Output {
    let stream = context().stream().expect("a stream");
    let mut loaded = Loaded::new(&context(), case, data);
    loaded.poison(&stream);
    loaded.fill_workspace(0xff, &stream);
    for part in [Part::Prepare, Part::Scan] {
        loaded.launch_part(case, &stream, part).expect("a launch");
    }
    loaded.read(case, &stream)
}

/// Heads that start early and heads that are walked whole, side by side, beside sequences that are not cut. A memory of 19
/// chunks makes an early start too long.
#[test]
fn heads_that_forget_and_heads_that_do_not() {
    if !early_starts() {
        return;
    }
    for (i, dtype) in [Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
        for longest in [64 * 44, 64 * 43 + 1, 64 * 42 + 63] {
            let mut case = in_two(spec(dtype, 3, 6, 64, 48), &[130, longest, 64 * 9, 0, 64], 1);
            case.padding = 3 * i;
            let data = gates(&case);
            let output = run(&context(), &case, &data);
            check_output(&case, &data, &output, 1.15);
            assert_same_bits(&output, &last_kernel_alone(&case, &data), "no summaries");
        }
    }
}

/// Where no gate forgets, narrow slabs give whole sequences, bit for bit. Where all do, the second ones are not.
#[test]
fn narrow_slabs_have_the_bits_of_wide_ones() {
    if !early_starts() {
        return;
    }
    for (k, v) in [(64, 32), (96, 48), (128, 128), (192, 16), (256, 32)] {
        let mut case = in_two(spec(Dtype::Bf16, 1, 2, k, v), &[64 * 34 + 7, 64 * 33], 2);
        let mut whole = case.clone();
        whole.spec.segments = Some(1);
        case.gates = Gates::Zero;
        let data = case.data();
        let output = run(&context(), &case, &data);
        assert_same_bits(&run(&context(), &whole, &data), &output, "nothing forgets");
        case.gates = Gates::Normal;
        let data = case.data();
        let output = run(&context(), &case, &data);
        check_output(&case, &data, &output, 1.15);
        assert_same_bits(&output, &last_kernel_alone(&case, &data), "all forget");
        // The outputs of the first segment are those of a run without segments.
        let of_whole = run(&context(), &whole, &data);
        let first = 64 * 17 * 2 * v;
        assert!(bits(&of_whole.o)[..first] == bits(&output.o)[..first]);
    }
}

/// Strides, raw gates, norms, states of other types and layouts; no final state.
#[test]
fn options() {
    if !early_starts() {
        return;
    }
    for (i, gates) in [Gates::Normal, Gates::Mixed, Gates::Model, Gates::Strong]
        .into_iter()
        .enumerate()
    {
        let dtype = [Dtype::Bf16, Dtype::F16][i % 2];
        let mut case = in_two(spec(dtype, 2, 4, 112, 80), &[64 * 40 + 9 * i, 300], 1);
        (case.gates, case.spec.qk_l2norm) = (gates, i % 2 == 1);
        case.layout = [Layout::Dense, Layout::HeadMajor, Layout::Padded(3, 8, 5)][i % 3];
        case.final_state = (i != 2).then_some(StateKind {
            dtype: [Dtype::F32, Dtype::Bf16][i / 2],
            layout: [StateLayout::ValueMajor, StateLayout::KeyMajor][i % 2],
            pad: i,
        });
        if i % 2 == 1 {
            case.gate_kind = GateKind::Raw {
                dtype: Dtype::Bf16,
                dt_bias: true,
                allow_neg_eigval: true,
            };
        }
        let data = case.data();
        let output = run(&context(), &case, &data);
        check_output(&case, &data, &output, 1.15);
        assert_same_bits(&output, &last_kernel_alone(&case, &data), "no summaries");
    }
    // A dense batch is cut as a packed one.
    let mut case = in_two(spec(Dtype::Bf16, 1, 2, 64, 32), &[64 * 34; 2], 2);
    case.gates = Gates::Mixed;
    let packed = run(&context(), &case, &case.data());
    (case.entry, case.batch_gap) = (Entry::Dense, 24);
    let data = case.data();
    let dense = run(&context(), &case, &data);
    assert_same_bits(&packed, &dense, "packed and dense");
    check_output(&case, &data, &dense, 1.15);
}

/// Each snapshot is taken once: by the segment that has its chunk, or by the walks of the whole sequence.
#[test]
fn snapshots_of_both_segments() {
    if !early_starts() {
        return;
    }
    let case = in_two(
        spec(Dtype::Bf16, 3, 6, 32, 48),
        &[70, 64 * 44 + 5, 64 * 4],
        1,
    );
    let data = gates(&case);
    let expected = run(&context(), &case, &data);
    assert_near_whole(&case, &data, &expected, &[1, 3, 22]);
}

/// Gates that are NaN forget nothing: both segments find so.
#[test]
fn gates_that_are_not_numbers() {
    if !early_starts() {
        return;
    }
    let case = in_two(spec(Dtype::Bf16, 1, 2, 64, 32), &[64 * 34], 1);
    let mut data = case.data();
    for (i, g) in data.inputs.g.iter_mut().enumerate() {
        *g = if i == 2 * 64 * 16 { f32::NAN } else { -2.0 };
    }
    let output = run(&context(), &case, &data);
    // The second of two heads has no NaN. It forgets after a chunk, whatever the first does.
    let second = |row: usize| &output.o[(2 * row + 1) * 32..(2 * row + 2) * 32];
    assert!((0..64 * 34).all(|row| second(row).iter().all(|x| x.is_finite())));
    let first = |row: usize| &output.o[2 * row * 32..(2 * row + 1) * 32];
    assert!((64 * 17..64 * 34).all(|row| first(row).iter().all(|x| x.is_nan())));
}

/// With initial states, summaries remain: the last segment may overwrite a slot that the first still reads.
#[test]
fn initial_states_need_summaries() {
    if !early_starts() {
        return;
    }
    let mut case = in_two(spec(Dtype::Bf16, 1, 2, 64, 32), &[64 * 34 + 7, 64 * 33], 2);
    case.gates = Gates::Mixed;
    (case.initial, case.final_state) = (None, None);
    let pool = PoolCase::new(F32, 2, &[1, 0]);
    check_pool(&context(), &case, &pool);
    (case.initial, case.final_state) = (Some(F32), Some(F32));
    for has in [None, Some(vec![0, 1])] {
        case.has_initial = has;
        let data = case.data();
        check_output(&case, &data, &run(&context(), &case, &data), 1.15);
    }
}
