//! Sequences of every length, and lengths that only the device knows.

use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};

use crate::common::{
    Case, Data, Entry, GateKind, Layout, Loaded, Output, StateKind, assert_same_bits, bits, check,
    check_output, context, run, spec,
};

const F32_STATE: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

/// Trap 9, survey 5 and 21: lengths around every tile and chunk boundary, in one batch and each alone.
#[test]
fn lengths_around_boundaries() {
    let lengths = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129];
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let mut case = Case::new(spec(dtype, 1, 2, 64, 48), &lengths);
        case.gates = Gates::Mixed;
        case.initial = Some(F32_STATE);
        check(&context(), &case);
        case.lengths.reverse();
        check(&context(), &case);
    }
    for n in lengths {
        check(
            &context(),
            &Case::new(spec(Dtype::Bf16, 1, 1, 32, 16), &[n]),
        );
    }
}

/// Survey 41 and 42: empty sequences anywhere; their final state is the initial one, their neighbours' rows are right.
#[test]
fn empty_sequences() {
    for lengths in [
        &[0, 64, 0, 36][..],
        &[0, 0, 75],
        &[75, 0, 0],
        &[64, 0, 0, 0, 1],
        &[1, 0, 1, 0, 1],
        &[0],
        &[0, 0, 0],
    ] {
        for initial in [None, Some(F32_STATE)] {
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 16), lengths);
            case.initial = initial;
            let data = case.data();
            let output = run(&context(), &case, &data);
            check_output(&case, &data, &output, 1.15);
            let size = 2 * 32 * 16;
            for (n, length) in lengths.iter().enumerate() {
                if *length == 0 {
                    let state = &output.state.as_ref().unwrap()[n * size..][..size];
                    match &data.initial {
                        Some(t) => assert_eq!(state, &t.values[n * size..][..size]),
                        None => assert!(state.iter().all(|x| x.to_bits() == 0)),
                    }
                }
            }
        }
    }
}

/// Survey 87: batches of nothing at all.
#[test]
fn batches_of_nothing() {
    for entry in [Entry::Packed, Entry::Device { wide: false }, Entry::Dense] {
        for lengths in [&[][..], &[0, 0]] {
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 16), lengths);
            case.entry = entry;
            let data = case.data();
            let output = run(&context(), &case, &data);
            assert!(output.o.is_empty());
            assert!(output.state.unwrap().iter().all(|x| x.to_bits() == 0));
        }
    }
    // No sequence, but rows.
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 16), &[]);
    case.padding = 130;
    let output = run(&context(), &case, &case.data());
    assert!(output.o.iter().all(|x| x.to_bits() == 0));
}

/// Trap 4: what a sequence holds does not reach its neighbours, not even NaN and infinity in the same 16 rows.
#[test]
fn neighbours_do_not_leak() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        check_isolation(Case::new(spec(dtype, 2, 4, 64, 32), &[37, 50, 90, 0, 5]));
    }
}

/// NaN and infinities in all that the second sequence holds, its state included, change no bit of the others.
pub fn check_isolation(mut case: Case) {
    case.initial = Some(F32_STATE);
    let s = case.spec;
    let row = s.heads.value * s.heads.value_dim;
    let widths = [
        s.heads.key * s.heads.key_dim,
        s.heads.key * s.heads.key_dim,
        row,
    ];
    let (begin, end) = (case.lengths[0], case.lengths[0] + case.lengths[1]);
    let expected = run(&context(), &case, &case.data());
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut dirty = case.data();
        let i = &mut dirty.inputs;
        for (t, width) in [&mut i.q, &mut i.k, &mut i.v].into_iter().zip(widths) {
            let mut values = t.values.clone();
            values[begin * width..end * width].fill(poison);
            *t = HostTensor::new(s.dtype, values);
        }
        for gates in [&mut i.g, &mut i.beta] {
            gates[begin * s.heads.value..end * s.heads.value].fill(poison);
        }
        let size = row * s.heads.key_dim;
        dirty.initial.as_mut().expect("states").values[size..2 * size].fill(poison);
        let output = run(&context(), &case, &dirty);
        let (a, b) = (bits(&expected.o), bits(&output.o));
        assert!(a[..begin * row] == b[..begin * row] && a[end * row..] == b[end * row..]);
        let state = |x: &Output| bits(x.state.as_ref().expect("states"));
        let (a, b) = (state(&expected), state(&output));
        assert!(a[..size] == b[..size] && a[2 * size..] == b[2 * size..]);
    }
}

/// Traps 4 and 13, survey 51 and 57: rows past the last sequence hold NaN on input and become zeros.
#[test]
fn padding_rows_become_zeros() {
    for (lengths, padding) in [
        (&[211, 0, 100][..], 15),
        (&[64], 1),
        (&[63], 1),
        (&[1], 200),
        (&[65, 62], 129),
    ] {
        for entry in [Entry::Packed, Entry::Device { wide: true }] {
            for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
                let mut case = Case::new(spec(Dtype::Bf16, 2, 6, 32, 48), lengths);
                case.padding = padding;
                case.entry = entry;
                case.spec.heads.map = head_map;
                case.layout = Layout::Padded(8, 24, 16);
                let used: usize = lengths.iter().sum();
                let clean = case.data();
                let mut data = case.data();
                let i = &mut data.inputs;
                for (t, width) in [(&mut i.q, 2 * 32), (&mut i.k, 2 * 32), (&mut i.v, 6 * 48)] {
                    let mut values = t.values.clone();
                    values[used * width..].fill(f32::NAN);
                    *t = HostTensor::new(Dtype::Bf16, values);
                }
                i.g[used * 6..].fill(f32::NAN);
                i.beta[used * 6..].fill(f32::NAN);
                // The oracle is given the clean rows: it reads none of them.
                check_output(&case, &clean, &run(&context(), &case, &data), 1.15);
            }
        }
    }
}

/// Survey 43: one long sequence beside many of one token, all with a state.
#[test]
fn a_long_tail_of_short_sequences() {
    let mut lengths = vec![1500];
    lengths.extend([1; 63]);
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &lengths);
    case.gates = Gates::Mixed;
    case.initial = Some(F32_STATE);
    check(&context(), &case);
}

/// Survey 45 and 46: dense batches, gates of their own for each sequence, the batch stride a number of its own.
#[test]
fn dense_batches() {
    for (batch, tokens) in [(3, 75), (2, 64), (1, 129), (4, 1), (3, 0)] {
        for (layout, batch_gap) in [
            (Layout::Dense, 0),
            (Layout::Dense, 40),
            (Layout::Padded(8, 16, 8), 24),
            (Layout::HeadMajor, 8),
            (Layout::TokenMajor, 0),
        ] {
            let mut case = Case::new(spec(Dtype::Bf16, 2, 6, 32, 48), &vec![tokens; batch]);
            case.initial = Some(F32_STATE);
            let packed = run(&context(), &case, &case.data());
            case.entry = Entry::Dense;
            case.layout = layout;
            case.batch_gap = batch_gap;
            let data = case.data();
            let dense = run(&context(), &case, &data);
            assert_same_bits(&packed, &dense, "packed and dense");
            check_output(&case, &data, &dense, 1.15);
        }
    }
    let mut case = Case::new(spec(Dtype::Bf16, 2, 4, 32, 48), &[70; 3]);
    case.entry = Entry::Dense;
    case.batch_gap = 56;
    case.gate_kind = GateKind::Raw {
        dtype: Dtype::Bf16,
        dt_bias: true,
        allow_neg_eigval: true,
    };
    check(&context(), &case);
}

/// Lengths on the device give the same bits as lengths on the host, in both widths.
#[test]
fn device_lengths() {
    let mut case = Case::new(spec(Dtype::Bf16, 2, 4, 64, 32), &[0, 70, 64, 0, 3, 129, 0]);
    case.initial = Some(F32_STATE);
    case.padding = 9;
    let data = case.data();
    let host = run(&context(), &case, &data);
    check_output(&case, &data, &host, 1.15);
    for wide in [false, true] {
        case.entry = Entry::Device { wide };
        let device = run(&context(), &case, &data);
        assert_same_bits(&host, &device, "lengths on host and device");
    }
    // More sequences than a wave has lanes.
    let lengths: Vec<usize> = (0..150).map(|i| usize::from(i % 3 == 0)).collect();
    let mut case = Case::new(spec(Dtype::Bf16, 1, 1, 16, 16), &lengths);
    case.entry = Entry::Device { wide: false };
    check(&context(), &case);
}

/// Runs a case whose device is told other lengths, and judges it by what the lengths are replaced by.
fn bad_lengths(given: &[i64], replaced: &[i32], status: u32) {
    let context = context();
    let stream = context.stream().unwrap();
    for wide in [false, true] {
        let narrow: Option<Vec<i32>> = given.iter().map(|x| i32::try_from(*x).ok()).collect();
        if !wide && narrow.is_none() {
            continue;
        }
        let sequences = given.len() - 1;
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 16), &vec![0; sequences]);
        case.padding = 200;
        case.entry = Entry::Device { wide };
        case.initial = Some(F32_STATE);
        let mut data: Data = case.data();
        let mut loaded = Loaded::new(&context, &case, &data);
        match narrow {
            Some(narrow) => loaded.set_lengths(&narrow),
            None => loaded.set_wide_lengths(given),
        }
        loaded.poison(&stream);
        loaded.launch(&case, &stream).expect("a launch");
        let output = loaded.read(&case, &stream);
        assert_eq!(loaded.status(&stream), status, "status of {given:?}");
        data.cu_seqlens = replaced.to_vec();
        check_output(&case, &data, &output, 1.15);
    }
}

/// Lengths on the device that are wrong: never out of bounds (the simulator would fault), the status says which entry,
/// and sequences between good entries are right.
#[test]
fn bad_device_lengths() {
    bad_lengths(&[0, 70, 200], &[0, 70, 200], 0);
    bad_lengths(&[0, 70, 50, 130], &[0, 70, 70, 130], 3);
    bad_lengths(&[0, 70, 201], &[0, 70, 200], 3);
    bad_lengths(&[0, 70, 1 << 30, 90], &[0, 70, 200, 200], 3);
    bad_lengths(&[0, -5, 100], &[0, 0, 100], 2);
    bad_lengths(&[0, i64::from(i32::MIN), 100], &[0, 0, 100], 2);
    bad_lengths(&[7, 70, 100], &[0, 70, 100], 1);
    bad_lengths(&[-1, 70, 100], &[0, 70, 100], 1);
    bad_lengths(&[0, 70, 1 << 40], &[0, 70, 200], 3);
    bad_lengths(&[0, (1 << 32) + 5, 7], &[0, 200, 200], 2);
    bad_lengths(&[0, i64::MIN, i64::MAX], &[0, 0, 200], 2);
    // Wrong in the second wave-full of entries.
    let mut given: Vec<i64> = (0..=150).collect();
    let mut replaced: Vec<i32> = (0..=150).collect();
    given[100] = 3;
    replaced[100] = 99;
    bad_lengths(&given, &replaced, 101);
}

/// Trap 10, survey 48: more than 65535 workgroups, and records beyond 2^31 bytes.
#[test]
fn large_grids() {
    let mut lengths = vec![0; 2050];
    lengths[0] = 65;
    lengths[1000] = 1;
    lengths[2049] = 70;
    // Sequences times key heads in prepare, sequences times value heads in scan.
    let mut case = Case::new(spec(Dtype::Bf16, 32, 96, 16, 16), &lengths);
    case.final_state = Some(StateKind {
        dtype: Dtype::Bf16,
        ..F32_STATE
    });
    check(&context(), &case);
}
