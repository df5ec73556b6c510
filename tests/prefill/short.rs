//! Sequences of at most 16 tokens in `prefill_short`: the bits of the other kernels, alone and mixed with longer ones.
//! On sm_90a the last bits of states differ, so there the results are compared as numbers.

use deltawave::error::{ArgumentKind, Error};
use deltawave::prefill::{Prefill, PrefillPath, Snapshot};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Keys};

use crate::common::{
    Case, Entry, GateKind, Layout, Output, PoolCase, SnapshotCase, StateKind, assert_same_bits,
    bits, check_output, check_pool, context, is_cdna, run, run_pool, run_snapshots, spec,
};
use deltawave_lab::metrics::compare;

const SHORT: &str = "dw_prefill_short_bf16_k";

pub fn kind(dtype: Dtype, layout: StateLayout, pad: usize) -> Option<StateKind> {
    Some(StateKind { dtype, layout, pad })
}

/// Chooses options by the number of a case, so that a list of six cases in both types uses each of them.
pub fn vary(case: &mut Case, i: usize) {
    let half = usize::from(case.spec.dtype == Dtype::F16);
    let layouts = [StateLayout::KeyMajor, StateLayout::ValueMajor];
    let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    case.initial = kind(types[(i + half) % 3], layouts[(i / 2 + half) % 2], i % 3);
    case.final_state = kind(types[i / 2 % 3], layouts[(i + half) % 2], (i + half) % 3);
    let has_initial = [1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1].into_iter().cycle();
    case.has_initial = (i == 4).then(|| has_initial.take(case.lengths.len()).collect());
    case.gates = [Gates::Mixed, Gates::Strong, Gates::Normal, Gates::Zero][(i + half) % 4];
    case.keys = [Keys::Normal, Keys::Silu][i % 2];
    case.spec.qk_l2norm = (i + half).is_multiple_of(2);
    case.spec.heads.map = [HeadMap::Grouped, HeadMap::Tiled][(i + half) % 2];
    case.layout = [Layout::Dense, Layout::Padded(3, 5, 1), Layout::HeadMajor][i % 3];
    case.padding = [0, 21][half];
    case.gate_kind = match i {
        1 => GateKind::NoDecay,
        2 => GateKind::NoBeta,
        3 | 5 | 6 => GateKind::Raw {
            dtype: [Dtype::Bf16, Dtype::F32][half],
            dt_bias: half == 0,
            allow_neg_eigval: true,
        },
        _ => GateKind::Given,
    };
}

/// Cases that between them use every option, state and size.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = [
        (16, 16),
        (48, 144),
        (64, 32),
        (80, 256),
        (96, 48),
        (112, 16),
        (128, 128),
    ];
    for (i, (k, v)) in sizes.into_iter().enumerate() {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = Case::new(spec(dtype, 2, 4, k, v), &[16, 0, 1, 7, 16, 3, 15]);
            vary(&mut case, i);
            cases.push(case);
        }
    }
    cases
}

fn with_path(case: &Case, path: PrefillPath) -> Case {
    let mut case = case.clone();
    case.spec.path = path;
    case
}

fn kernels(case: &Case) -> Vec<&'static str> {
    let plan = match case.entry {
        Entry::Device { .. } => {
            Prefill::device(&context(), case.spec, case.tokens(), case.lengths.len())
        }
        _ => Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()),
    };
    plan.expect("a plan").kernels()
}

/// The bits of the walk on CDNA; elsewhere its numbers, up to the rounding of a stored type.
fn assert_as_walk(walk: &Output, short: &Output, what: &str) {
    if is_cdna(&context()) {
        return assert_same_bits(walk, short, what);
    }
    assert_near(&walk.o, &short.o, &format!("o: {what}"));
    match (&walk.state, &short.state) {
        (Some(walk), Some(short)) => assert_near(walk, short, &format!("final state: {what}")),
        (walk, short) => assert_eq!(walk.is_some(), short.is_some(), "{what}"),
    }
}

/// Numbers that nobody wrote are the same bits on both sides, whatever they are.
fn assert_near(walk: &[f32], short: &[f32], what: &str) {
    assert_eq!(walk.len(), short.len(), "{what}");
    let written = |x: f32| x.is_finite() && x.abs() < 1e30;
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    for (&a, &b) in walk.iter().zip(short) {
        if written(a) && written(b) {
            expected.push(f64::from(a));
            found.push(b);
        } else {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}: what nobody writes");
        }
    }
    if expected.iter().any(|x| *x != 0.0) {
        let error = compare(&found, &expected).rms_ratio;
        assert!(error < 1e-3, "{what}: {error:.2e}");
    } else {
        assert!(found.iter().all(|x| *x == 0.0), "{what}: zeros");
    }
}

/// Runs a case with and without `prefill_short`, with lengths on the host and on the device: the same bits.
fn check_paths(case: &Case) {
    let data = case.data();
    let expected = run(&context(), &with_path(case, PrefillPath::Split), &data);
    check_output(case, &data, &expected, 2.0);
    for entry in [Entry::Packed, Entry::Device { wide: false }] {
        let mut short = with_path(case, PrefillPath::Short);
        short.entry = entry;
        assert!(kernels(&short).iter().any(|k| k.contains("prefill_short")));
        let output = run(&context(), &short, &data);
        assert_as_walk(&expected, &output, &format!("short and split, {entry:?}"));
    }
}

#[test]
fn short_sequences_have_the_bits_of_the_walk() {
    for case in cases() {
        check_paths(&case);
    }
}

/// Long sequences, whole and cut, go through the other kernels of the same launch.
#[test]
fn mixed_batches_have_the_bits_of_the_walk() {
    for (i, mut case) in cases().into_iter().enumerate().step_by(3) {
        case.lengths = vec![75, 16, 0, 130, 5, 17, 16];
        case.has_initial = None;
        check_paths(&case);
        case.spec.segments = Some(2 + i % 2);
        check_paths(&case);
    }
}

/// Every length up to the limit and past it, alone: which kernel computes it shows in no bit.
#[test]
fn every_length_alone() {
    for n in 0..=18 {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 48), &[n]);
        case.initial = kind(Dtype::F32, StateLayout::KeyMajor, 0);
        case.padding = n % 3 * 40;
        let data = case.data();
        let expected = run(&context(), &with_path(&case, PrefillPath::Split), &data);
        let output = run(&context(), &with_path(&case, PrefillPath::Short), &data);
        assert_as_walk(&expected, &output, &format!("{n} tokens"));
        let short = with_path(&case, PrefillPath::Short);
        assert_eq!(kernels(&short).len(), if n <= 16 { 1 } else { 2 }, "{n}");
    }
}

/// Pools in place, with slots of padding, and separate slots to write.
#[test]
fn pools() {
    for (i, lengths) in [[16, 9, 0, 4, 16], [16, 70, 0, 4, 17]]
        .into_iter()
        .enumerate()
    {
        for layout in [StateLayout::KeyMajor, StateLayout::ValueMajor] {
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 48), &lengths);
                case.spec.path = PrefillPath::Short;
                case.spec.qk_l2norm = i == 0;
                let state = StateKind {
                    dtype,
                    layout,
                    pad: i,
                };
                case.initial = Some(state);
                let mut pool = PoolCase::new(state, 7, &[5, -1, 2, 7, 0]);
                check_pool(&context(), &case, &pool);
                pool.write_slots = Some(vec![1, 3, -1, -1, 0]);
                check_pool(&context(), &case, &pool);
                let data = case.data();
                let expected = run_pool(
                    &context(),
                    &with_path(&case, PrefillPath::Split),
                    &data,
                    &pool,
                );
                let output = run_pool(&context(), &case, &data, &pool);
                assert_as_walk(&expected, &output, "a pool");
            }
        }
    }
}

/// A slot for the only chunk of a short sequence: its snapshot is the final state, on every path.
#[test]
fn snapshots() {
    for (i, kind) in [
        (Dtype::F32, StateLayout::ValueMajor),
        (Dtype::Bf16, StateLayout::KeyMajor),
        (Dtype::F16, StateLayout::ValueMajor),
    ]
    .into_iter()
    .enumerate()
    {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 48), &[16, 70, 5, 0]);
        let state = StateKind {
            dtype: kind.0,
            layout: kind.1,
            pad: i,
        };
        case.final_state = Some(state);
        // The only chunk of sequences 0 and 2 ends beyond their tokens, and so would a planned snapshot.
        let at = |sequence, slot| Snapshot {
            sequence,
            tokens: 64,
            slot,
        };
        let wanted = SnapshotCase {
            to: Some((state, 5)),
            list: vec![at(0, 3), at(1, 0), at(2, 1)],
            planned: false,
        };
        let data = case.data();
        let of = |path, entry| {
            let mut case = with_path(&case, path);
            case.entry = entry;
            run_snapshots(&context(), &case, &data, None, &wanted)
        };
        let (expected, taken) = of(PrefillPath::Split, Entry::Packed);
        for entry in [Entry::Packed, Entry::Device { wide: true }] {
            let (output, same) = of(PrefillPath::Short, entry);
            assert_as_walk(&expected, &output, "with snapshots");
            match is_cdna(&context()) {
                true => assert!(bits(&taken) == bits(&same), "{entry:?}"),
                false => assert_near(&taken, &same, &format!("{entry:?}")),
            }
        }
        let each = 2 * 64 * 48;
        let last = expected.state.expect("states");
        for (taken, n) in [(&taken[..each], 0), (&taken[2 * each..], 2)] {
            assert!(
                bits(taken) == bits(&last[n * each..][..each]),
                "sequence {n}"
            );
        }
    }
}

/// The plan takes `prefill_short` where sequences have at most a chunk on average, whether the host or the device knows
/// their lengths; alone if all are short. Longer keys stay with the other kernels.
#[test]
fn the_plan_chooses() {
    let names = |lengths: &[usize], key_dim: usize, entry: Entry| {
        let mut case = Case::new(spec(Dtype::Bf16, 16, 32, key_dim, 128), lengths);
        case.entry = entry;
        kernels(&case)
    };
    let (host, device) = (Entry::Packed, Entry::Device { wide: false });
    let short = format!("{SHORT}128");
    if !is_cdna(&context()) {
        // It has not the bits of the walk.
        assert!(
            names(&[16; 3], 128, host)
                .iter()
                .all(|name| !name.contains("short"))
        );
        return;
    }
    assert_eq!(names(&[16; 3], 128, host), std::slice::from_ref(&short));
    assert_eq!(names(&[0, 1], 96, host), [format!("{SHORT}96")]);
    let mut mixed = vec![4000];
    mixed.extend([16; 100]);
    assert_eq!(names(&mixed, 128, host)[0], short);
    assert_eq!(names(&mixed, 128, device)[1], short);
    for entry in [host, device] {
        assert!(!names(&[4000, 16], 128, entry).contains(&short.as_str()));
        // One more launch for few short sequences.
        assert!(!names(&[16, 16, 16, 16, 64], 128, entry).contains(&short.as_str()));
        let longer_keys = names(&[16; 3], 144, entry);
        assert!(longer_keys.iter().all(|name| !name.contains("short")));
    }
    // No records are needed.
    let context = context();
    let plan = |path| {
        let mut spec = spec(Dtype::Bf16, 1, 1, 64, 64);
        spec.path = path;
        Prefill::packed(&context, spec, &[0, 16, 20], 20).expect("a plan")
    };
    assert_eq!(plan(PrefillPath::Short).workspace_bytes(), 0);
    assert_eq!(plan(PrefillPath::Short).segments(), 2);
    assert!(plan(PrefillPath::Split).workspace_bytes() > 0);
}

#[test]
fn longer_keys_are_refused() {
    let mut spec = spec(Dtype::Bf16, 1, 1, 144, 64);
    spec.path = PrefillPath::Short;
    let error = Prefill::packed(&context(), spec, &[0, 16], 16).expect_err("K above 128");
    let Error::Argument(error) = &error else {
        panic!("{error}");
    };
    assert_eq!(error.kind, ArgumentKind::Value);
    assert!(error.to_string().contains("K = 144"), "{error}");
}
