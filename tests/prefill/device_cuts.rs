//! Lengths that only the device knows on the split path: cut as the host cuts them, bit for bit.

use deltawave::gates::Gating;
use deltawave::prefill::{Part, Prefill, PrefillPath, PrefillTensors};
use deltawave::state::States;
use deltawave::tensor::{Tensor, TensorMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};

use crate::common::{
    Case, Entry, Loaded, Output, PoolCase, SnapshotCase, StateKind, assert_same_bits, bits,
    check_output, context, is_cdna, run, run_pool, run_snapshots, spec,
};

const F32: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};
const BF16: StateKind = StateKind {
    dtype: Dtype::Bf16,
    layout: StateLayout::ValueMajor,
    pad: 4,
};

fn host_plan(case: &Case) -> Prefill {
    Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).expect("a plan")
}

fn device_plan(case: &Case) -> Prefill {
    Prefill::device(&context(), case.spec, case.tokens(), case.lengths.len()).expect("a plan")
}

/// A split-path case for a device of so many compute units.
fn split(spec: deltawave::prefill::PrefillSpec, lengths: &[usize], units: u32) -> Case {
    let mut case = Case::new(spec, lengths);
    case.spec.path = PrefillPath::Split;
    case.spec.compute_units = Some(units);
    case.gates = Gates::Mixed;
    case
}

fn assert_device_cuts_as_host(case: &Case, name: &str) {
    let mut case = case.clone();
    let data = case.data();
    let host = run(&context(), &case, &data);
    check_output(&case, &data, &host, 1.15);
    let cut = host_plan(&case).segments();
    assert!(cut <= device_plan(&case).segments(), "{name}");
    for wide in [false, true] {
        case.entry = Entry::Device { wide };
        let device = run(&context(), &case, &data);
        assert_same_bits(&host, &device, &format!("{name}: {cut} segments"));
    }
}

/// Planned and forced segments, of all buckets of K, of one long sequence and of ragged batches of more sequences than a
/// wave has lanes.
#[test]
fn the_device_cuts_as_the_host() {
    let ragged: Vec<usize> = (0..9).map(|i| 64 * (i * i % 23) + i).collect();
    let many: Vec<usize> = (0..70)
        .map(|i| if i == 41 { 64 * 31 + 9 } else { i * 37 % 40 })
        .collect();
    let mut planned = 0;
    for (i, (k, v, lengths, segments, units)) in [
        (128, 16, &[64 * 40 + 3][..], None, 40),
        (64, 32, &[64 * 70, 64 * 3, 0, 64 * 20 + 7], None, 60),
        // Summaries in two pieces, on targets that have them.
        (64, 16, &[64 * 100], None, 3),
        (128, 16, &[64 * 150, 64 * 10 - 3], None, 3),
        (192, 16, &ragged, None, 80),
        (256, 16, &many, None, 30),
        (16, 16, &many, Some(3), 8),
        (208, 32, &ragged, Some(2), 8),
        (96, 16, &[0, 0], None, 40),
        (32, 16, &[1], Some(9), 40),
    ]
    .into_iter()
    .enumerate()
    {
        let mut case = split(spec(Dtype::Bf16, 1, 1, k, v), lengths, units);
        case.spec.segments = segments;
        case.padding = i % 3 * 40;
        case.initial = [Some(F32), Some(BF16), None][i % 3];
        case.final_state = [Some(BF16), Some(F32)][i % 2];
        let cut = host_plan(&case).segments() > lengths.len();
        planned += usize::from(cut && segments.is_none());
        assert_device_cuts_as_host(&case, &format!("{i}"));
    }
    assert!(planned >= 3, "{planned} batches are cut");
}

/// More units of work than workgroups: some targets launch a few for each compute unit, and each takes several, with
/// walks that gates make shorter or leave out.
#[test]
fn workgroups_take_several_summaries() {
    let lengths = [64 * 9 + 5, 0, 64 * 12, 70, 64 * 7 + 1];
    for (i, (k, v, segments, units, gates)) in [
        (128, 128, 5, 1, Gates::Mixed),
        (96, 192, 4, 2, Gates::Zero),
        (128, 48, 5, 1, Gates::Strong),
        (80, 144, 5, 3, Gates::Zero),
        (176, 48, 4, 1, Gates::Mixed),
        (240, 32, 3, 1, Gates::Zero),
    ]
    .into_iter()
    .enumerate()
    {
        let mut case = split(spec(Dtype::Bf16, 1, 2, k, v), &lengths, units);
        (case.spec.segments, case.gates) = (Some(segments), gates);
        case.padding = 30;
        case.initial = [Some(F32), None][i % 2];
        case.final_state = Some(F32);
        let plan = host_plan(&case);
        assert!(plan.parts().contains(&Part::Combine));
        assert!(plan.segments() >= lengths.len() + 6);
        assert_device_cuts_as_host(&case, &format!("{k} x {v}, {units} units, {gates:?}"));
    }
    let mut case = split(spec(Dtype::F16, 1, 2, 128, 64), &lengths, 1);
    (case.spec.segments, case.initial) = (Some(4), Some(F32));
    let pool = PoolCase::new(F32, 6, &[4, 0, -1, 3, 1]);
    let data = case.data();
    let host = run_pool(&context(), &case, &data, &pool);
    case.entry = Entry::Device { wide: false };
    let device = run_pool(&context(), &case, &data, &pool);
    assert_same_bits(&host, &device, "a pool with padding");
}

/// Every number of compute units that cuts a sequence otherwise: whole, in two without summaries, in more.
#[test]
fn one_long_sequence() {
    let (mut found, mut early) = (Vec::new(), 0);
    for units in (1..90).step_by(3) {
        let mut case = split(spec(Dtype::F16, 1, 1, 32, 16), &[64 * 36 + 11], units);
        let segments = host_plan(&case).segments();
        if found.contains(&segments) {
            continue;
        }
        found.push(segments);
        for gates in [Gates::Normal, Gates::Zero] {
            case.gates = gates;
            assert_device_cuts_as_host(&case, &format!("{units} units, {gates:?}"));
        }
        early += usize::from(segments == 2 && is_cdna(&context()));
        // An initial state needs summaries.
        case.initial = Some(F32);
        assert_device_cuts_as_host(&case, &format!("{units} units, from a state"));
    }
    assert!(
        found.contains(&1) && found.iter().any(|&n| n > 2),
        "{found:?}"
    );
    assert!(early > 0 || !is_cdna(&context()), "{found:?}");
}

/// Sequences cut in two beside whole ones: on CDNA without summaries, as the device finds. Elsewhere plans may prefer more
/// segments.
#[test]
fn sequences_in_two() {
    let lengths = [130, 64 * 43 + 1, 64 * 9, 0, 64 * 40];
    for key_dim in [64, 128] {
        let is_wanted = |case: &Case| {
            let plan = host_plan(case);
            match is_cdna(&context()) {
                true => {
                    !plan.parts().contains(&Part::Combine) && plan.segments() == lengths.len() + 2
                }
                false => plan.segments() >= lengths.len() + 2,
            }
        };
        let mut case = (4..100)
            .step_by(4)
            .map(|units| split(spec(Dtype::Bf16, 1, 2, key_dim, 48), &lengths, units))
            .find(is_wanted)
            .expect("a device on which two sequences are cut");
        let plan = host_plan(&case);
        case.padding = 20;
        assert_device_cuts_as_host(&case, &format!("K = {key_dim}"));
        let list = plan.snapshots_every(64 * 7).expect("whole chunks");
        let wanted = SnapshotCase {
            to: Some((F32, list.len())),
            list,
            planned: false,
        };
        let data = case.data();
        let (host, taken) = run_snapshots(&context(), &case, &data, None, &wanted);
        case.entry = Entry::Device { wide: false };
        let (device, same) = run_snapshots(&context(), &case, &data, None, &wanted);
        assert_same_bits(&host, &device, "with snapshots");
        assert!(bits(&taken) == bits(&same), "snapshots");
    }
}

#[test]
fn states_of_a_pool() {
    let lengths = [64 * 30 + 1, 70, 0, 64 * 11];
    for (kind, segments, units) in [(F32, None, 60), (BF16, None, 30), (F32, Some(3), 60)] {
        let mut case = split(spec(Dtype::Bf16, 1, 1, 48, 32), &lengths, units);
        (case.spec.segments, case.initial) = (segments, Some(kind));
        let pool = PoolCase::new(kind, 6, &[4, 0, 3, -1]);
        let data = case.data();
        let host = run_pool(&context(), &case, &data, &pool);
        assert!(host_plan(&case).segments() > lengths.len());
        case.entry = Entry::Device { wide: true };
        let device = run_pool(&context(), &case, &data, &pool);
        assert_same_bits(&host, &device, "states of a pool");
    }
}

/// Lengths beyond the tokens are replaced before they are cut, and reported. Nothing is out of bounds, as the simulator's
/// checks show.
#[test]
fn wrong_lengths_are_cut_too() {
    for segments in [None, Some(4)] {
        for (given, replaced, status) in [
            ([0, 900, 300, i32::MAX], [900, 0, 3100], 3),
            ([0, -5, 4000, 4001], [0, 4000, 0], 2),
            ([7, 7, 7, 4000], [7, 0, 3993], 1),
            ([0, i32::MIN, i32::MAX, -1], [0, 4000, 0], 2),
        ] {
            let mut case = split(spec(Dtype::Bf16, 1, 1, 32, 16), &replaced, 60);
            case.spec.segments = segments;
            let data = case.data();
            assert!(host_plan(&case).segments() > 3, "{replaced:?}");
            let expected = run(&context(), &case, &data);
            case.entry = Entry::Device { wide: false };
            let mut wrong = case.data();
            wrong.cu_seqlens = given.to_vec();
            let output = run(&context(), &case, &wrong);
            assert_same_bits(&expected, &output, &format!("{given:?}"));
            let stream = context().stream().expect("a stream");
            let mut loaded = Loaded::new(&context(), &case, &wrong);
            loaded.launch(&case, &stream).expect("a launch");
            assert_eq!(loaded.status(&stream), status, "{given:?}");
        }
    }
}

/// One plan, as a captured graph launches it, for lengths that are cut otherwise or not at all.
#[test]
fn a_plan_serves_all_lengths() {
    let batches = [
        [2000, 0, 0, 0, 0, 0],
        [334, 333, 333, 333, 333, 334],
        [1000, 1000, 0, 0, 0, 0],
        [1700, 100, 50, 50, 50, 50],
        [5, 4, 3, 2, 1, 0],
    ];
    // With K = 128, workgroups without work end at once on sm_90a.
    for key_dim in [32, 128] {
        let mut case = split(spec(Dtype::Bf16, 1, 1, key_dim, 16), &batches[0], 60);
        case.entry = Entry::Device { wide: false };
        for lengths in &batches {
            let mut host = split(case.spec, lengths, 60);
            host.padding = 2000 - lengths.iter().sum::<usize>();
            let data = host.data();
            let expected = run(&context(), &host, &data);
            assert_same_bits(
                &expected,
                &run(&context(), &case, &data),
                &format!("K = {key_dim}, {lengths:?}"),
            );
        }
    }
}

/// Where nothing can be cut, nothing more is launched; otherwise the kernels for segments are.
#[test]
fn kernels_for_segments_are_launched_where_there_may_be_some() {
    let parts = |units: u32, segments: Option<usize>| {
        let mut case = split(spec(Dtype::Bf16, 2, 4, 128, 128), &[700, 20], units);
        case.spec.segments = segments;
        device_plan(&case).parts()
    };
    let whole = [Part::Whole, Part::Lengths, Part::Prepare, Part::Scan];
    assert_eq!(parts(2, None), whole);
    assert_eq!(parts(304, Some(1)), whole);
    let cut = [
        Part::Whole,
        Part::Lengths,
        Part::Prepare,
        Part::Summarise,
        Part::Combine,
        Part::Scan,
    ];
    assert_eq!(parts(2, Some(8)), cut);
    // On CDNA, scan chains few summaries itself.
    let few = cut
        .into_iter()
        .filter(|part| *part != Part::Combine || !is_cdna(&context()));
    assert_eq!(parts(2, Some(3)), few.collect::<Vec<_>>());
}

/// Outputs in place of v: segments may not start early then, on the device neither.
#[test]
fn o_in_the_place_of_v() {
    let stream = context().stream().expect("a stream");
    let dense = deltawave::tensor::dense_strides::<3>;
    for units in [12, 40] {
        let mut case = split(spec(Dtype::Bf16, 1, 1, 32, 16), &[64 * 36], units);
        case.final_state = None;
        let data = case.data();
        let tokens = case.tokens();
        let upload = |bytes: &[u8]| context().upload(bytes).expect("a tensor");
        let f32s = |x: &[f32]| context().upload(x).expect("a tensor");
        let [q, key] = [&data.inputs.q, &data.inputs.k].map(|t| upload(&t.bytes));
        let [g, beta] = [&data.inputs.g, &data.inputs.beta].map(|x| f32s(x));
        let lengths = context().upload(&data.cu_seqlens).expect("lengths");
        let run_in_place = |plan: &Prefill, on_device: bool| {
            let value = upload(&data.inputs.v.bytes);
            let mut workspace = upload(&vec![0xff; plan.workspace_bytes()]);
            let (of_k, of_v) = ([tokens, 1, 32], [tokens, 1, 16]);
            // SAFETY: the buffers live until the stream is synchronised, and v may be o.
            let gate = |x: *mut f32| unsafe {
                Tensor::from_raw(x.cast(), Dtype::F32, [tokens, 1], [1, 1]).into()
            };
            // SAFETY: as above.
            unsafe {
                let tensors = PrefillTensors {
                    cu_seqlens: on_device.then(|| (&lengths).into()),
                    q: Tensor::from_raw(q.address(), Dtype::Bf16, of_k, dense(of_k)).into(),
                    k: Tensor::from_raw(key.address(), Dtype::Bf16, of_k, dense(of_k)).into(),
                    v: Tensor::from_raw(value.address(), Dtype::Bf16, of_v, dense(of_v)).into(),
                    gating: Gating::Given {
                        g: Some(gate(g.address().cast())),
                        beta: Some(gate(beta.address().cast())),
                    },
                    states: States::None,
                    o: TensorMut::from_raw(value.address(), Dtype::Bf16, of_v, dense(of_v)).into(),
                    snapshots: None,
                };
                let workspace = Workspace::new(&mut workspace);
                plan.launch(&stream, &tensors, workspace).expect("a launch");
            }
            let o = value.download(&stream).expect("a copy");
            Output {
                o: HostTensor::from_bytes(Dtype::Bf16, o).values,
                state: None,
            }
        };
        let plan = host_plan(&case);
        assert!(plan.segments() > 1, "{units} units");
        let host = run_in_place(&plan, false);
        check_output(&case, &data, &host, 1.15);
        let device = run_in_place(&device_plan(&case), true);
        assert_same_bits(&host, &device, &format!("{units} units"));
    }
}

/// Graphs that were captured once: every replay cuts the lengths of its time.
#[test]
fn graphs() {
    let stream = context().stream().expect("a stream");
    for key_dim in [64, 128] {
        let mut case = split(spec(Dtype::Bf16, 1, 1, key_dim, 16), &[64 * 40, 0, 0], 60);
        case.entry = Entry::Device { wide: false };
        let mut loaded = Loaded::new(&context(), &case, &case.data());
        stream.synchronize().expect("loaded");
        let graph = stream
            .capture(|s| loaded.launch(&case, s))
            .expect("a graph");
        for lengths in [
            [64 * 40, 0, 0],
            [64 * 13, 64 * 14, 64 * 13],
            [100, 64 * 20, 50],
        ] {
            let mut host = split(case.spec, &lengths, 60);
            host.padding = 64 * 40 - lengths.iter().sum::<usize>();
            let data = host.data();
            let expected = run(&context(), &host, &data);
            loaded.set_lengths(&data.cu_seqlens);
            loaded.poison(&stream);
            // SAFETY: `loaded` is alive until the stream has been read.
            unsafe { graph.launch(&stream).expect("a replay") };
            assert_same_bits(&expected, &loaded.read(&case, &stream), "replayed");
        }
    }
}
