//! Plans that leave the choice between the fused path and the split path to the gates, where they cut sequences.

use deltawave::gates::Gating;
use deltawave::prefill::{Part, Prefill, PrefillPath, PrefillSpec, PrefillTensors};
use deltawave::state::States;
use deltawave::tensor::{Tensor, TensorMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};

use crate::common::{
    Case, Data, Entry, GateKind, Layout, Loaded, Output, PoolCase, SnapshotCase, StateKind,
    assert_same_bits, check_output, check_pool, context, is_cdna, run, run_pool, run_snapshots,
    spec,
};

const F32: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

fn plan(case: &Case) -> Prefill {
    Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).expect("a plan")
}

/// A case whose plan leaves the choice to the gates, on a device that the split path does not fill.
fn choosing(spec: PrefillSpec, lengths: &[usize]) -> Option<Case> {
    let mut case = Case::new(spec, lengths);
    case.final_state = Some(F32);
    for units in 2..40 {
        case.spec.compute_units = Some(units);
        if plan(&case)
            .kernels()
            .first()
            .is_some_and(|k| k.contains("fused"))
            && plan(&case).path() == PrefillPath::Auto
        {
            return Some(case);
        }
    }
    // Only gfx942 has such plans.
    assert!(
        !context().device().arch.starts_with("gfx942"),
        "{lengths:?}: on no device"
    );
    None
}

fn forced(case: &Case, data: &Data, path: PrefillPath) -> Output {
    let mut case = case.clone();
    case.spec.path = path;
    run(&context(), &case, data)
}

fn set_gates(data: &mut Data, heads: usize, g: impl Fn(usize, usize) -> f32) {
    for (i, gate) in data.inputs.g.iter_mut().enumerate() {
        *gate = g(i / heads, i % heads);
    }
}

/// Gates that forget soon give the bits of the fused path, others those of the split path, and all the right results.
#[test]
fn gates_choose_the_path() {
    for (dtype, k) in [(Dtype::Bf16, 64), (Dtype::F16, 128)] {
        let Some(mut case) = choosing(spec(dtype, 1, 2, k, 128), &[64 * 150 + 9]) else {
            return;
        };
        // With K = 128, which takes longer, one of each path.
        for (gates, path) in [
            (Gates::Normal, PrefillPath::Fused),
            (Gates::Strong, PrefillPath::Fused),
            (Gates::Mixed, PrefillPath::Split),
            (Gates::Zero, PrefillPath::Split),
        ]
        .into_iter()
        .step_by(if k == 64 { 1 } else { 3 })
        {
            case.gates = gates;
            let data = case.data();
            let output = run(&context(), &case, &data);
            let name = format!("{gates:?}, {path:?}");
            assert_same_bits(&forced(&case, &data, path), &output, &name);
            if k == 64 {
                check_output(&case, &data, &output, 1.15);
            }
        }
    }
}

/// Strides, raw gates, norms, padding; no final state; sequences that are cut beside sequences that are not.
#[test]
fn options() {
    let lengths = [17, 64 * 150 + 63, 0, 130];
    let Some(mut case) = choosing(spec(Dtype::Bf16, 2, 4, 48, 112), &lengths) else {
        return;
    };
    case.padding = 70;
    case.spec.qk_l2norm = true;
    case.layout = Layout::HeadMajor;
    for (i, gates) in [Gates::Normal, Gates::Model].into_iter().enumerate() {
        case.gates = gates;
        case.gate_kind = GateKind::Raw {
            dtype: Dtype::Bf16,
            dt_bias: i == 0,
            allow_neg_eigval: i == 1,
        };
        let data = case.data();
        check_output(&case, &data, &run(&context(), &case, &data), 1.15);
        case.final_state = None;
    }
}

/// One sequence forgets and another does not: the batch is split. Gates that are strong only where they are sampled take
/// the fused path, whose segments then start many chunks early, or at the first.
#[test]
fn gates_that_change() {
    const TOKENS: usize = 64 * 120;
    let Some(case) = choosing(spec(Dtype::Bf16, 1, 2, 32, 128), &[TOKENS; 2]) else {
        return;
    };
    let mut data = case.data();
    set_gates(
        &mut data,
        2,
        |token, _| if token < TOKENS { -30.0 } else { 0.0 },
    );
    let output = run(&context(), &case, &data);
    check_output(&case, &data, &output, 1.15);
    assert_same_bits(
        &forced(&case, &data, PrefillPath::Split),
        &output,
        "one forgets",
    );
    // One head of two, and a NaN.
    for (weak, of_head) in [(1, 0.0), (0, f32::NAN)] {
        set_gates(
            &mut data,
            2,
            |_, head| if head == weak { of_head } else { -2.0 },
        );
        let output = run(&context(), &case, &data);
        assert_same_bits(
            &forced(&case, &data, PrefillPath::Split),
            &output,
            "one head",
        );
    }
    // Sampled are the first tokens of the chunk before a segment.
    for strong in [-2.0, -1.1, -0.67] {
        let mut data = case.data();
        set_gates(
            &mut data,
            2,
            |token, _| if token % 64 < 16 { strong } else { 0.0 },
        );
        let output = run(&context(), &case, &data);
        check_output(&case, &data, &output, 1.15);
        let fused = forced(&case, &data, PrefillPath::Fused);
        let split = forced(&case, &data, PrefillPath::Split);
        assert!(output.o != split.o, "{strong}: the fused path");
        assert!(output.o == fused.o, "{strong}: the same starts");
    }
}

/// A sequence whose gates decay where they are sampled, before its second segment, and nowhere before. That segment starts
/// at the first chunk: without the initial state its outputs, which are of that state alone, would be zeros.
fn check_start_at_the_first_chunk(case: &Case) {
    const HEADS: usize = 2;
    let both = |data: &mut Data, kept: usize| {
        set_gates(data, HEADS, |token, _| {
            let decays = token >= 64 * kept && token % 64 < 16;
            if decays { -0.67 } else { 0.0 }
        });
        [PrefillPath::Auto, PrefillPath::Split].map(|path| forced(case, data, path).o)
    };
    // The gates choose the fused path if at most so many chunks keep everything: those before the sampled one.
    let mut data = case.data();
    let kept: Vec<usize> = (1..case.tokens() / 64).collect();
    let most = kept.partition_point(|&kept| {
        let [auto, split] = both(&mut data, kept);
        auto != split
    });
    assert!(most > 0, "the fused path");
    data.inputs.beta.fill(0.0);
    for x in &mut data.initial.as_mut().expect("an initial state").values {
        *x *= 65536.0; // the sampled chunk leaves 2^-15.5
    }
    let row = HEADS * case.spec.heads.value_dim;
    let second = (most + 1) * 64 * row;
    let [auto, split] = both(&mut data, most).map(|o| o[second..second + row].to_vec());
    let greatest = split.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    assert!(greatest > 1e-2, "{most}: {greatest}");
    for (a, b) in auto.iter().zip(&split) {
        assert!((a - b).abs() < 0.02 * greatest, "{most}: {a}, {b}");
    }
}

/// Segments that start at their sequence's first chunk read the initial state.
#[test]
fn initial_states() {
    let Some(mut case) = choosing(spec(Dtype::Bf16, 1, 2, 64, 128), &[64 * 150]) else {
        return;
    };
    case.initial = Some(F32);
    let mut data = case.data();
    set_gates(
        &mut data,
        2,
        |token, _| if token % 64 < 16 { -0.67 } else { 0.0 },
    );
    let output = run(&context(), &case, &data);
    check_output(&case, &data, &output, 1.15);
    let split = forced(&case, &data, PrefillPath::Split);
    assert!(output.o != split.o, "the fused path");
    check_start_at_the_first_chunk(&case);
}

/// Final states in the place of initial ones wait until every segment has read those, in every type and layout: the bits
/// of states of their own, for either choice, whoever knows the lengths.
#[test]
fn states_in_place() {
    let spec = spec(Dtype::Bf16, 1, 2, 64, 128);
    let lengths = [64 * 150 + 9, 0, 40];
    let Some(path) = choosing(spec, &lengths) else {
        return;
    };
    let [segments, _] = choosing_segments(spec).expect("the same target");
    for (i, (mut case, gates)) in [
        (path.clone(), Gates::Normal),
        (path, Gates::Zero),
        (segments.clone(), Gates::Normal),
        (segments, Gates::Zero),
    ]
    .into_iter()
    .enumerate()
    {
        let kind = StateKind {
            dtype: [Dtype::F32, Dtype::Bf16][i % 2],
            layout: [StateLayout::ValueMajor, StateLayout::KeyMajor][i / 2],
            pad: 8,
        };
        case.gates = gates;
        let slots: Vec<i32> = (0..case.lengths.len() as i32).rev().collect();
        let mut pool = PoolCase::new(kind, slots.len() + 1, &slots);
        check_pool(&context(), &case, &pool);
        case.entry = Entry::Device { wide: true };
        // One sequence leaves its state in another slot than it came from, and one nowhere.
        let mut written = slots;
        written[0] = pool.size as i32 - 1;
        written[1] = -1;
        pool.write_slots = Some(written);
        check_pool(&context(), &case, &pool);
    }
}

/// The device chooses what the host would: between the same lists, by the same samples.
#[test]
fn lengths_on_the_device() {
    let spec = spec(Dtype::Bf16, 1, 2, 32, 128);
    let Some(path) = choosing(spec, &[64 * 150 + 9, 70, 0]) else {
        return;
    };
    let [segments, _] = choosing_segments(spec).expect("the same target");
    for mut case in [path, segments] {
        case.padding = 70;
        for gates in [Gates::Normal, Gates::Mixed, Gates::Zero] {
            (case.gates, case.entry) = (gates, Entry::Packed);
            let mut data = case.data();
            let expected = run(&context(), &case, &data);
            let cut = is_cut(&case, &mut data);
            case.entry = Entry::Device { wide: false };
            let output = run(&context(), &case, &data);
            assert_same_bits(&expected, &output, &format!("{gates:?}"));
            assert_eq!(is_cut(&case, &mut data), cut, "{gates:?}");
            assert_eq!(cut, gates == Gates::Normal, "{gates:?}");
        }
    }
}

/// A captured graph serves gates of both kinds, one after the other, and parts make the whole.
#[test]
fn graphs_and_parts() {
    let Some(mut case) = choosing(spec(Dtype::Bf16, 1, 2, 64, 128), &[64 * 150 + 30]) else {
        return;
    };
    let stream = context().stream().expect("a stream");
    let first = case.data();
    let mut loaded = Loaded::new(&context(), &case, &first);
    stream.synchronize().expect("loaded");
    let graph = stream
        .capture(|s| loaded.launch(&case, s))
        .expect("a graph");
    for gates in [Gates::Zero, Gates::Normal, Gates::Zero] {
        case.gates = gates;
        let data = case.data();
        let expected = run(&context(), &case, &data);
        loaded.set_inputs(&data);
        loaded.poison(&stream);
        // SAFETY: `loaded` is alive until the stream has been read.
        unsafe { graph.launch(&stream).expect("a replay") };
        assert_same_bits(
            &expected,
            &loaded.read(&case, &stream),
            &format!("{gates:?}, replayed"),
        );
        loaded.poison(&stream);
        loaded.fill_workspace(0xff, &stream);
        let parts = plan(&case).parts();
        assert_eq!(parts[1], Part::Fused);
        for &part in &parts[1..] {
            loaded.launch_part(&case, &stream, part).expect("a part");
        }
        assert_same_bits(
            &expected,
            &loaded.read(&case, &stream),
            &format!("{gates:?}, parts"),
        );
    }
}

/// Parts of a launch in place make the whole, also where `prefill_scan` runs for final states alone.
#[test]
fn parts_in_place() {
    let Some([mut case, _]) = choosing_segments(spec(Dtype::Bf16, 1, 2, 64, 128)) else {
        return;
    };
    (case.initial, case.final_state) = (Some(F32), None);
    let data = case.data();
    let slots: Vec<i32> = (0..case.lengths.len() as i32).collect();
    let pool = PoolCase::new(F32, slots.len(), &slots);
    let expected = run_pool(&context(), &case, &data, &pool);
    let stream = context().stream().expect("a stream");
    let mut loaded = Loaded::on_pool(&context(), &case, &data, &pool);
    loaded.poison(&stream);
    loaded.reset_states();
    let parts = plan(&case).parts();
    assert_eq!(parts[1..], [Part::Fused, Part::Scan]);
    for &part in &parts[1..] {
        loaded.launch_part(&case, &stream, part).expect("a part");
    }
    let mut output = loaded.read(&case, &stream);
    output.state = Some(loaded.pool_states(&case, &pool, &stream));
    assert_same_bits(&expected, &output, "parts");
}

/// Each snapshot is taken once, on either path.
#[test]
fn snapshots_on_both_paths() {
    let Some(mut case) = choosing(spec(Dtype::Bf16, 1, 2, 32, 128), &[64 * 160 + 5]) else {
        return;
    };
    for (gates, path) in [
        (Gates::Normal, PrefillPath::Fused),
        (Gates::Zero, PrefillPath::Split),
    ] {
        case.gates = gates;
        let data = case.data();
        let list = plan(&case).snapshots_every(64 * 7).expect("whole chunks");
        let wanted = SnapshotCase {
            to: Some((F32, list.len())),
            list,
            planned: true,
        };
        let (output, taken) = run_snapshots(&context(), &case, &data, None, &wanted);
        assert_same_bits(&run(&context(), &case, &data), &output, "with snapshots");
        let mut other = case.clone();
        other.spec.path = path;
        let (_, expected) = run_snapshots(&context(), &other, &data, None, &wanted);
        assert!(taken.iter().all(|x| x.is_finite()));
        assert!(taken == expected, "{gates:?}");
    }
}

/// Whether a launch cuts a sequence: NaNs in the first rows of v do not reach the last row of o.
fn is_cut(case: &Case, data: &mut Data) -> bool {
    let heads = &case.spec.heads;
    let (value, row) = (heads.value_dim, heads.value * heads.value_dim);
    let mut v = data.inputs.v.values.clone();
    let first_rows = data.cu_seqlens.iter().take(case.lengths.len());
    first_rows.for_each(|&token| v[token as usize * row..][..value].fill(f32::NAN));
    let with_nans = HostTensor::new(data.inputs.v.dtype, v);
    let v = std::mem::replace(&mut data.inputs.v, with_nans);
    let o = run(&context(), case, data).o;
    data.inputs.v = v;
    let ends = &data.cu_seqlens[1..=case.lengths.len()];
    ends.iter()
        .any(|&end| !o[(end as usize - 1) * row].is_nan())
}

/// A case on the fused path, by its lengths, whose segments the gates choose, and the same with whole sequences: ten walks
/// for four compute units.
fn choosing_segments(spec: PrefillSpec) -> Option<[Case; 2]> {
    let mut case = Case::new(spec, &[64 * 32 + 9; 5]);
    case.final_state = Some(F32);
    case.spec.compute_units = Some(4);
    let mut whole = case.clone();
    (whole.spec.path, whole.spec.segments) = (PrefillPath::Fused, Some(1));
    let chosen = is_cdna(&context());
    chosen.then(|| assert_eq!(plan(&case).path(), PrefillPath::Fused));
    chosen.then_some([case, whole])
}

/// Where the lengths choose the fused path, gates choose between its segments and whole sequences.
#[test]
fn gates_choose_segments() {
    let spec = spec(Dtype::Bf16, 1, 2, 32, 128);
    let Some([mut case, mut whole]) = choosing_segments(spec) else {
        return;
    };
    case.initial = Some(F32);
    whole.initial = case.initial;
    let mut data = case.data();
    assert!(is_cut(&case, &mut data));
    check_output(&case, &data, &run(&context(), &case, &data), 1.15);
    for gates in [Gates::Zero, Gates::Mixed] {
        case.gates = gates;
        let mut data = case.data();
        assert!(!is_cut(&case, &mut data), "{gates:?}");
        let output = run(&context(), &case, &data);
        assert_same_bits(&run(&context(), &whole, &data), &output, "whole sequences");
        check_output(&case, &data, &output, 1.15);
    }
    // One head of two.
    case.gates = Gates::Normal;
    let mut data = case.data();
    for g in data.inputs.g.iter_mut().skip(1).step_by(2) {
        *g = -0.01;
    }
    assert!(!is_cut(&case, &mut data), "one head remembers");
    // Snapshots are taken once.
    case.gates = Gates::Normal;
    let list = plan(&case).snapshots_every(64 * 7).expect("whole chunks");
    let wanted = SnapshotCase {
        to: Some((F32, list.len())),
        list,
        planned: true,
    };
    for gates in [Gates::Normal, Gates::Zero] {
        case.gates = gates;
        let data = case.data();
        let (output, taken) = run_snapshots(&context(), &case, &data, None, &wanted);
        assert_same_bits(&run(&context(), &case, &data), &output, "with snapshots");
        assert!(taken.iter().all(|x| x.is_finite()), "{gates:?}");
        if gates == Gates::Zero {
            let (_, expected) = run_snapshots(&context(), &whole, &data, None, &wanted);
            assert!(taken == expected);
        }
    }
    case.gates = Gates::Normal;
    case.initial = None;
    let mut data = case.data();
    assert!(is_cut(&case, &mut data), "no initial states");
}

/// o in the place of v: a segment that started early would read rows of V that the segment before has replaced.
#[test]
fn o_in_the_place_of_v() {
    let (k, v, heads) = (32, 128, 4);
    let mut case = match choosing(spec(Dtype::Bf16, 1, heads, k, v), &[64 * 150]) {
        Some(case) => case,
        None => Case::new(spec(Dtype::Bf16, 1, heads, k, v), &[64 * 150]),
    };
    case.final_state = None;
    let data = case.data();
    let stream = context().stream().expect("a stream");
    // The plan's choice, also part by part, early starts of prefill_fused, and two segments of prefill_scan.
    for (path, units, by_parts) in [
        (PrefillPath::Auto, case.spec.compute_units, false),
        (PrefillPath::Auto, case.spec.compute_units, true),
        (PrefillPath::Fused, case.spec.compute_units, false),
        (PrefillPath::Split, Some(40), false),
    ] {
        (case.spec.path, case.spec.compute_units) = (path, units);
        let tokens = case.tokens();
        let upload = |bytes: &[u8]| context().upload(bytes).expect("a tensor");
        let f32s = |x: &[f32]| context().upload(x).expect("a tensor");
        let [q, key, value] =
            [&data.inputs.q, &data.inputs.k, &data.inputs.v].map(|t| upload(&t.bytes));
        let [g, beta] = [&data.inputs.g, &data.inputs.beta].map(|x| f32s(x));
        let plan = plan(&case);
        assert!(
            plan.path() == PrefillPath::Auto || plan.segments() > 1,
            "{path:?}"
        );
        let mut workspace = upload(&vec![0xff; plan.workspace_bytes()]);
        let dense = deltawave::tensor::dense_strides::<3>;
        let (of_k, of_v) = ([tokens, 1, k], [tokens, heads, v]);
        // SAFETY: the buffers live until the stream is synchronised, and v may be o.
        unsafe {
            let tensors = PrefillTensors {
                cu_seqlens: None,
                q: Tensor::from_raw(q.address(), Dtype::Bf16, of_k, dense(of_k)).into(),
                k: Tensor::from_raw(key.address(), Dtype::Bf16, of_k, dense(of_k)).into(),
                v: Tensor::from_raw(value.address(), Dtype::Bf16, of_v, dense(of_v)).into(),
                gating: Gating::Given {
                    g: Some(
                        Tensor::from_raw(g.address(), Dtype::F32, [tokens, heads], [heads, 1])
                            .into(),
                    ),
                    beta: Some(
                        Tensor::from_raw(beta.address(), Dtype::F32, [tokens, heads], [heads, 1])
                            .into(),
                    ),
                },
                states: States::None,
                o: TensorMut::from_raw(value.address(), Dtype::Bf16, of_v, dense(of_v)).into(),
                snapshots: None,
            };
            let bytes = plan.workspace_bytes();
            let memory = || Workspace::from_raw(workspace.address().cast(), bytes);
            let parts = match by_parts {
                true => &plan.parts()[1..],
                false => &[Part::Whole],
            };
            for &part in parts {
                plan.launch_part(&stream, &tensors, memory(), part)
                    .expect("a launch");
            }
        }
        let o = value.download(&stream).expect("a copy");
        let output = Output {
            o: HostTensor::from_bytes(Dtype::Bf16, o).values,
            state: None,
        };
        workspace.fill_bytes(0, &stream).expect("a fill");
        check_output(&case, &data, &output, 1.15);
    }
}

/// No choice: a number of segments, a path, a batch that would not gain.
#[test]
fn no_choice() {
    let Some(case) = choosing(spec(Dtype::Bf16, 1, 2, 64, 128), &[64 * 150]) else {
        return;
    };
    assert!(
        plan(&case).kernels().len() >= 2,
        "{:?}",
        plan(&case).kernels()
    );
    let path = |change: &dyn Fn(&mut Case)| {
        let mut other = case.clone();
        change(&mut other);
        plan(&other).path()
    };
    assert_eq!(path(&|_| ()), PrefillPath::Auto);
    assert_eq!(path(&|c| c.spec.segments = Some(2)), PrefillPath::Split);
    assert_eq!(
        path(&|c| c.spec.path = PrefillPath::Split),
        PrefillPath::Split
    );
    assert_eq!(
        path(&|c| c.spec.path = PrefillPath::Fused),
        PrefillPath::Fused
    );
    assert_ne!(path(&|c| c.lengths = vec![64 * 20]), PrefillPath::Auto);
}
