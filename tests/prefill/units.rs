//! Workgroups of `prefill_fused` or `prefill_scan` that walk several units of work, because the batch has more units of few
//! chunks than the device has compute units: the bits of one workgroup for each unit.

use deltawave::prefill::{Prefill, PrefillPath};
use deltawave::types::{Dtype, StateLayout};

use crate::common::{
    Case, Entry, Layout, PoolCase, SnapshotCase, assert_same_bits, bits, check_output, check_pool,
    context, is_cdna, run, run_snapshots, spec,
};
use crate::short::{kind, vary};

const LENGTHS: [usize; 11] = [128, 17, 0, 64, 65, 1, 100, 0, 33, 127, 128];

/// Cases that between them use every option, type and size of K with which workgroups of a path walk several units.
fn cases(path: PrefillPath) -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = match path {
        // V has at most one slab.
        PrefillPath::Fused => [
            (128, 128),
            (16, 16),
            (48, 112),
            (64, 32),
            (96, 48),
            (112, 16),
        ],
        // On sm_90a K is from 65 to 128, and V has more than 64 columns.
        _ => [
            (128, 128),
            (80, 256),
            (128, 176),
            (128, 80),
            (96, 144),
            (112, 96),
        ],
    };
    for (i, (k, v)) in sizes.into_iter().enumerate() {
        let dtype = [Dtype::Bf16, Dtype::F16][i % 2];
        let mut case = Case::new(spec(dtype, 2, 4, k, v), &LENGTHS);
        vary(&mut case, i);
        case.spec.path = path;
        if i == 3 {
            case.initial = None;
        }
        cases.push(case);
    }
    cases
}

/// The case on a device of so few compute units that workgroups walk several units.
fn crowded(case: &Case, compute_units: u32) -> Case {
    let mut case = case.clone();
    case.spec.compute_units = Some(compute_units);
    case
}

/// Lengths on the host and on the device.
#[test]
fn bits_of_a_workgroup_for_each_unit() {
    for (i, case) in [PrefillPath::Fused, PrefillPath::Split]
        .into_iter()
        .flat_map(cases)
        .enumerate()
    {
        let data = case.data();
        let expected = run(&context(), &case, &data);
        check_output(&case, &data, &expected, 2.0);
        for (compute_units, entry) in [
            (1 + i as u32 % 5, Entry::Packed),
            (7, Entry::Packed),
            (3, Entry::Device { wide: false }),
        ] {
            let mut crowded = crowded(&case, compute_units);
            crowded.entry = entry;
            let output = run(&context(), &crowded, &data);
            let name = format!("case {i}, {compute_units} compute units, {entry:?}");
            assert_same_bits(&expected, &output, &name);
        }
    }
}

/// States in f32 without gaps, which the copy engine of sm_90a moves: in both layouts, with boxes past K and V, with several
/// slabs, with sequences that start from zeros, and beside tokens that it cannot move.
#[test]
fn states_without_gaps() {
    for (i, (k, v)) in [(128, 128), (80, 256), (128, 176), (96, 80), (112, 96)]
        .into_iter()
        .enumerate()
    {
        for (layout, other) in [
            (StateLayout::KeyMajor, StateLayout::ValueMajor),
            (StateLayout::ValueMajor, StateLayout::KeyMajor),
        ] {
            let mut case = Case::new(spec(Dtype::Bf16, 2, 4, k, v), &LENGTHS);
            case.spec.path = PrefillPath::Split;
            case.initial = kind(Dtype::F32, layout, 0);
            case.final_state = kind(Dtype::F32, other, 0);
            case.layout = [Layout::Dense, Layout::Padded(3, 5, 1)][i % 2];
            let has_initial = [1, 0, 1, 1, 1].into_iter().cycle();
            case.has_initial = (i % 2 == 0).then(|| has_initial.take(LENGTHS.len()).collect());
            let data = case.data();
            let expected = run(&context(), &case, &data);
            check_output(&case, &data, &expected, 2.0);
            for compute_units in [1, 5] {
                let output = run(&context(), &crowded(&case, compute_units), &data);
                assert_same_bits(&expected, &output, &format!("K {k}, V {v}, {layout:?}"));
            }
        }
    }
}

/// Equal sequences of more chunks than those that are walked so because they are short.
#[test]
fn equal_sequences() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 128, 128), &[1930, 1984, 1921]);
    case.spec.path = PrefillPath::Split;
    case.spec.segments = Some(1);
    case.initial = kind(Dtype::F32, StateLayout::KeyMajor, 0);
    case.final_state = kind(Dtype::F32, StateLayout::ValueMajor, 0);
    let data = case.data();
    let expected = run(&context(), &crowded(&case, 1 << 20), &data);
    check_output(&case, &data, &expected, 2.0);
    for compute_units in [1, 4] {
        let output = run(&context(), &crowded(&case, compute_units), &data);
        assert_same_bits(
            &expected,
            &output,
            &format!("{compute_units} compute units"),
        );
    }
}

/// No unit has chunks, or one has, or all are of one chunk.
#[test]
fn few_chunks() {
    for lengths in [
        &[0, 0, 0][..],
        &[0, 0, 70, 0],
        &[64; 9],
        &[1],
        &[20, 128, 20, 20, 20],
    ] {
        for initial in [None, kind(Dtype::F32, StateLayout::KeyMajor, 0)] {
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 48), lengths);
            (case.spec.path, case.initial) = (PrefillPath::Fused, initial);
            case.final_state = kind(Dtype::F32, StateLayout::ValueMajor, 0);
            let data = case.data();
            let expected = run(&context(), &case, &data);
            let output = run(&context(), &crowded(&case, 1), &data);
            assert_same_bits(&expected, &output, &format!("{lengths:?}"));
        }
    }
}

/// A pool in place, with padding and sequences without tokens.
#[test]
fn pools() {
    for (layout, dtype) in [
        (StateLayout::KeyMajor, Dtype::F32),
        (StateLayout::ValueMajor, Dtype::F32),
        (StateLayout::ValueMajor, Dtype::Bf16),
    ] {
        for (path, k, v, gaps) in [
            (PrefillPath::Fused, 64, 48, [3, 5]),
            (PrefillPath::Split, 128, 128, [0, 0]),
            (PrefillPath::Split, 128, 96, [4, 8]),
            (PrefillPath::Split, 96, 176, [0, 4]),
            (PrefillPath::Split, 80, 144, [3, 5]),
        ] {
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, k, v), &[100, 128, 0, 17, 70, 64]);
            case.spec.path = path;
            case.spec.compute_units = Some(2);
            case.padding = 30;
            // The copy engine of sm_90a moves states whose strides are multiples of 16 bytes.
            let kind = kind(dtype, layout, gaps[0] % 2).expect("a kind");
            let mut pool = PoolCase::new(kind, 7, &[4, -1, 3, 0, 6, 1]);
            pool.gaps = gaps;
            check_pool(&context(), &case, &pool);
            // Only read from there, and only written there.
            pool.write_slots = Some(vec![2, -1, 3, -1, 5, 1]);
            pool.slots = Some(vec![4, -1, 3, 0, -1, 1]);
            let output = check_pool(&context(), &case, &pool);
            case.spec.compute_units = None;
            let expected = check_pool(&context(), &case, &pool);
            assert_same_bits(&expected, &output, "a pool");
        }
    }
}

#[test]
fn snapshots() {
    check_snapshots(PrefillPath::Fused, 32, 48);
    check_snapshots(PrefillPath::Split, 128, 128);
}

fn check_snapshots(path: PrefillPath, key_dim: usize, value_dim: usize) {
    let heads = spec(Dtype::Bf16, 1, 2, key_dim, value_dim);
    let mut case = Case::new(heads, &[128, 100, 64, 0, 90]);
    case.spec.path = path;
    let data = case.data();
    let plan = Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens());
    let wanted = SnapshotCase {
        to: kind(Dtype::F32, StateLayout::KeyMajor, 0).map(|kind| (kind, 9)),
        list: plan
            .expect("a plan")
            .snapshots_every(64)
            .expect("snapshots"),
        planned: false,
    };
    let of = |case: &Case| run_snapshots(&context(), case, &data, None, &wanted);
    let (expected, taken) = of(&case);
    let (output, same) = of(&crowded(&case, 2));
    assert_same_bits(&expected, &output, "outputs");
    assert!(bits(&taken) == bits(&same), "snapshots");
}

/// NaN and infinity in one sequence do not reach the sequences before and after it in memory. The one before ends in a chunk
/// of fewer than 64 tokens, with which the copy engine of sm_90a also reads rows of this one.
#[test]
fn neighbours_do_not_leak() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 128, 128), &[70, 100, 90, 0, 5]);
    case.spec.path = PrefillPath::Split;
    for compute_units in [None, Some(3)] {
        case.spec.compute_units = compute_units;
        crate::varlen::check_isolation(case.clone());
    }
}

/// Where lengths on the device choose the path, the same launch serves both.
#[test]
fn the_device_chooses() {
    if !is_cdna(&context()) {
        println!("skipped: on this device lengths do not choose the path");
        return;
    }
    for lengths in [[100; 40].to_vec(), [vec![64 * 60], vec![10; 39]].concat()] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 16, 128), &lengths);
        case.spec.compute_units = Some(8);
        case.padding = 10;
        let data = case.data();
        let expected = run(&context(), &case, &data);
        case.entry = Entry::Device { wide: true };
        assert_same_bits(&expected, &run(&context(), &case, &data), "on the device");
    }
}
