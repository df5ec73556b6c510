//! The fused path: how segments start, what only the device knows, and refusals. Property tests run it on random problems.

use std::f32::consts::LN_2;

use deltawave::error::Error;
use deltawave::prefill::{Part, Prefill, PrefillPath, PrefillSpec};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle;

use crate::common::{
    Case, Data, Entry, GateKind, Layout, Loaded, PoolCase, StateKind, assert_same_bits, bits,
    check, check_output, check_pool, context, is_cdna, run, spec,
};
use crate::snapshots::assert_near_whole;

const F32: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

fn fused(spec: PrefillSpec, lengths: &[usize], segments: Option<usize>) -> Case {
    let mut case = Case::new(spec, lengths);
    case.spec.path = PrefillPath::Fused;
    case.spec.segments = segments;
    case.initial = Some(F32);
    case
}

fn plan(case: &Case) -> Prefill {
    Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).expect("a plan")
}

/// Gates of 0, 1, 2, 7 and 28 chunks of memory, for ever, and in turn.
fn gates(case: &Case) -> Data {
    let mut data = case.data();
    let heads = case.spec.heads.value;
    for (i, g) in data.inputs.g.iter_mut().enumerate() {
        let (token, head) = (i / heads, i % heads);
        *g = match head {
            0 => 0.0,
            1 => -1.5,
            2 => -0.75,
            3 => -0.2,
            4 => -0.05,
            _ => [-30.0, 0.0, -0.01, -0.4][token / 192 % 4],
        };
    }
    data
}

/// Segments that start early from zeros, from their sequence's first chunk, from N alone, and from N and M, side by side.
#[test]
fn every_start_of_a_segment() {
    for (i, dtype) in [Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
        let lengths = [64 * 23 + 5, 130, 64 * 12, 0, 64];
        for segments in [2, 5] {
            let mut case = fused(spec(dtype, 3, 6, 64, 48), &lengths, Some(segments));
            case.padding = 3;
            let data = gates(&case);
            check_output(&case, &data, &run(&context(), &case, &data), 1.15);
            case.spec.qk_l2norm = true;
            case.layout = [Layout::HeadMajor, Layout::Padded(1, 3, 1)][i];
            case.has_initial = Some(vec![1, 1, 0, 1, 1]);
            let data = gates(&case);
            check_output(&case, &data, &run(&context(), &case, &data), 1.15);
        }
        // Segments of 40 chunks, of which the last 28 forget.
        let case = fused(spec(dtype, 3, 6, 16, 16), &[64 * 120], Some(3));
        let data = gates(&case);
        check_output(&case, &data, &run(&context(), &case, &data), 1.15);
    }
}

/// Every bucket of K that is compiled, V of less than a slab and of two, gates that the kernels compute.
#[test]
fn all_buckets() {
    for (i, (k, v)) in [(64, 16), (96, 144), (128, 128), (80, 256)]
        .into_iter()
        .enumerate()
    {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = fused(spec(dtype, 2, 4, k, v), &[200, 75, 330], Some(2 + i % 2));
            case.gates = [Gates::Mixed, Gates::Normal, Gates::Zero, Gates::Strong][i];
            case.spec.qk_l2norm = i % 2 == 1;
            if i % 2 == 1 {
                case.gate_kind = GateKind::Raw {
                    dtype: Dtype::Bf16,
                    dt_bias: true,
                    allow_neg_eigval: true,
                };
            }
            check(&context(), &case);
        }
    }
}

/// Keys so long that states grow along them: gates that would forget do not.
#[test]
fn growth_hinders_a_warm_up() {
    let case = fused(spec(Dtype::Bf16, 1, 1, 64, 32), &[64 * 14], Some(3));
    let mut data = case.data();
    // Gates alone would forget in seven chunks. But each token multiplies the state along the key by -1.64.
    data.inputs.g.fill(-0.5);
    data.inputs.beta.fill(0.66);
    data.inputs.v.values.fill(0.0);
    data.inputs.v = HostTensor::new(Dtype::Bf16, data.inputs.v.values.clone());
    let mut keys = vec![0.0; data.inputs.k.values.len()];
    for row in keys.chunks_exact_mut(64) {
        row[3] = 2.0;
    }
    let short = std::mem::replace(&mut data.inputs.k, HostTensor::new(Dtype::Bf16, keys));
    let mut whole = case.clone();
    whole.spec.segments = Some(1);
    let state = |case: &Case| {
        let output = run(&context(), case, &data);
        output.state.expect("a state")[3 * 32..4 * 32].to_vec()
    };
    for (a, b) in state(&case).into_iter().zip(state(&whole)) {
        assert!(
            b.abs() > 1e-6 && (a / b - 1.0).abs() < 0.03,
            "{a:e}, not {b:e}"
        );
    }
    // Keys of length 1 do not grow: the same gates forget, and the first chunks leave nothing.
    data.inputs.k = short;
    check_output(&case, &data, &run(&context(), &case, &data), 1.15);
}

/// Chunks before a segment, counted backwards: the first alone forgets, the first two do not, because a state grows in the
/// second, and the first seven leave nothing of any state. So the segment starts three chunks early: what the third added
/// counts.
#[test]
fn growth_before_a_chunk_that_forgets_counts() {
    const HEADS: usize = 2;
    // Along long keys, or, with norms, by beta = 3: each token doubles the state along its key.
    for norm in [false, true] {
        let mut case = fused(spec(Dtype::Bf16, 1, HEADS, 128, 32), &[64 * 20], Some(2));
        case.spec.qk_l2norm = norm;
        let mut data = case.data();
        let mut keys = vec![0.0; 128 * case.tokens()];
        let mut values = vec![0.0; data.inputs.v.values.len()];
        for t in 0..case.tokens() {
            let before = 10_usize.saturating_sub(t / 64);
            let (grows, adds) = (before == 2, before == 3 && t % 64 >= 56);
            for of_token in HEADS * t..HEADS * (t + 1) {
                let decays = (1..8).contains(&before) && !grows;
                data.inputs.g[of_token] = if decays { -66.0 * LN_2 / 64.0 } else { 0.0 };
                data.inputs.beta[of_token] = match (grows, norm) {
                    (true, true) => 3.0,
                    (true, false) => 0.75,
                    (false, _) => 0.5,
                };
                if adds {
                    let of_value = 32 * of_token..32 * (of_token + 1);
                    values[of_value.clone()].copy_from_slice(&data.inputs.v.values[of_value]);
                }
            }
            // Others leave the state along this key as it is.
            let along = if grows || adds { 3 } else { 77 };
            keys[128 * t + along] = if grows && !norm { 2.0 } else { 1.0 };
        }
        data.inputs.k = HostTensor::new(Dtype::Bf16, keys);
        data.inputs.v = HostTensor::new(Dtype::Bf16, values);
        let output = run(&context(), &case, &data);
        let expected = oracle::prefill(&data.problem(&case)).expect("a problem");
        let from = 64 * 10 * HEADS * 32;
        let o = compare(&output.o[from..], &expected.o[from..]);
        assert!(o.rms_ratio < 3e-2, "{norm}: {o:?}");
        let greatest = expected.o[from..]
            .iter()
            .fold(0.0, |m: f64, x| m.max(x.abs()));
        assert!(greatest > 1e-3, "{norm}: {greatest:e} is left");
    }
}

/// Snapshots at and around the begins of segments that start early.
#[test]
fn snapshots_belong_to_one_segment() {
    let mut case = fused(
        spec(Dtype::Bf16, 3, 6, 32, 48),
        &[64 * 9, 70, 64 * 4],
        Some(3),
    );
    case.gates = Gates::Mixed;
    let data = gates(&case);
    let expected = run(&context(), &case, &data);
    assert_near_whole(&case, &data, &expected, &[1, 2]);
}

/// The first segments of a sequence may run after its last one has replaced the state, also those that start at the first
/// chunk of the sequence.
#[test]
fn in_place() {
    for (k, v) in [(64, 144), (128, 32), (32, 32)] {
        let mut case = fused(spec(Dtype::Bf16, 1, 6, k, v), &[130, 64 * 11 + 1], Some(5));
        case.initial = None;
        case.gates = Gates::Mixed;
        let pool = PoolCase::new(F32, 2, &[1, 0]);
        let expected = check_pool(&context(), &case, &pool);
        // The last kernel alone, when the pool holds nothing any more.
        case.initial = Some(pool.kind);
        let stream = context().stream().unwrap();
        let mut loaded = Loaded::on_pool(&context(), &case, &case.data(), &pool);
        for part in [Part::FusedSummarise, Part::Combine] {
            loaded.launch_part(&case, &stream, part).unwrap();
        }
        loaded.poison_pool(&stream);
        loaded.launch_part(&case, &stream, Part::Fused).unwrap();
        assert!(bits(&expected.o) == bits(&loaded.read(&case, &stream).o));
    }
}

/// With a fixed number of segments, a sequence has the same bits in any batch, on either path.
#[test]
fn bits_do_not_depend_on_the_batch() {
    let device = Entry::Device { wide: false };
    for (path, entry) in [
        (PrefillPath::Fused, Entry::Packed),
        (PrefillPath::Split, Entry::Packed),
        (PrefillPath::Fused, device),
        (PrefillPath::Split, device),
    ] {
        let lengths = [700, 64, 129, 500];
        let mut case = fused(spec(Dtype::Bf16, 1, 2, 32, 48), &lengths, Some(3));
        (case.spec.path, case.gates, case.entry) = (path, Gates::Mixed, entry);
        let data = case.data();
        let all = run(&context(), &case, &data);
        let (row, state) = (2 * 48, 2 * 32 * 48);
        for n in 1..lengths.len() {
            // The others lose their tokens.
            let mut alone = case.clone();
            let begin = lengths[..n].iter().sum::<usize>();
            let mut of_one = data.inputs.clone();
            let rows = |t: &HostTensor, w: usize| {
                HostTensor::new(
                    t.dtype,
                    t.values[begin * w..(begin + lengths[n]) * w].to_vec(),
                )
            };
            of_one.q = rows(&data.inputs.q, 32);
            of_one.k = rows(&data.inputs.k, 32);
            of_one.v = rows(&data.inputs.v, row);
            of_one.g = data.inputs.g[begin * 2..(begin + lengths[n]) * 2].to_vec();
            of_one.beta = data.inputs.beta[begin * 2..(begin + lengths[n]) * 2].to_vec();
            of_one.spec.tokens = lengths[n];
            alone.lengths = vec![lengths[n]];
            let mut one = alone.data();
            one.inputs = of_one;
            let initial = data.initial.as_ref().expect("an initial state");
            let own = initial.values[n * state..(n + 1) * state].to_vec();
            one.initial = Some(HostTensor::new(initial.dtype, own));
            let output = run(&context(), &alone, &one);
            let of_all = &all.o[begin * row..(begin + lengths[n]) * row];
            assert!(bits(&output.o) == bits(of_all), "{path:?}: sequence {n}");
            let states = all.state.as_ref().expect("states");
            let last = output.state.expect("a state");
            assert!(bits(&last) == bits(&states[n * state..(n + 1) * state]));
        }
    }
}

/// Lengths that only the device knows: cut as the host cuts them.
#[test]
fn the_device_cuts_as_the_host() {
    let one_long = [64 * 70, 64 * 3, 0, 64 * 20 + 7];
    let many: Vec<usize> = (0..150).map(|i| i * 37 % 400).collect();
    let ragged: Vec<usize> = (0..20).map(|i| 64 * (i * i % 47) + i).collect();
    for (i, (lengths, segments, units)) in [
        (&one_long[..], None, None),
        (&one_long, None, Some(12)),
        (&one_long, Some(7), None),
        (&many, Some(3), None),
        (&ragged, None, Some(25)),
        (&[64 * 40], None, Some(3)),
        (&[0, 0], None, None),
        (&[1], Some(9), None),
    ]
    .into_iter()
    .enumerate()
    {
        let mut case = fused(spec(Dtype::Bf16, 1, 1, 16, 16), lengths, segments);
        case.spec.compute_units = units;
        (case.gates, case.padding) = ([Gates::Zero, Gates::Mixed][i % 2], i % 3 * 40);
        let data = case.data();
        let host = run(&context(), &case, &data);
        let cut = plan(&case).segments();
        let is_cut = lengths.iter().any(|&n| n > 64 * 8) || segments == Some(3);
        assert_eq!(cut > lengths.len(), is_cut, "{i}: {cut} segments");
        for wide in [false, true] {
            case.entry = Entry::Device { wide };
            let device = run(&context(), &case, &data);
            assert_same_bits(&host, &device, &format!("{i}: host and device"));
            let tokens = case.tokens();
            let most = Prefill::device(&context(), case.spec, tokens, lengths.len()).unwrap();
            assert!(cut <= most.segments(), "{i}: {cut} segments");
        }
    }
}

/// Lengths that are wrong are replaced before they are cut. Nothing is out of bounds, as the simulator's checks show.
#[test]
fn wrong_lengths_are_cut_too() {
    for segments in [None, Some(4)] {
        for (given, replaced) in [
            ([0, 900, 300, i32::MAX], [900, 0, 600]),
            ([0, -5, 1500, 1501], [0, 1500, 0]),
            ([7, 7, 7, 1500], [7, 0, 1493]),
            ([0, i32::MIN, i32::MAX, -1], [0, 1500, 0]),
        ] {
            let mut case = fused(spec(Dtype::Bf16, 1, 1, 32, 16), &replaced, segments);
            case.gates = Gates::Mixed;
            let data = case.data();
            let expected = run(&context(), &case, &data);
            case.entry = Entry::Device { wide: false };
            let mut wrong = case.data();
            wrong.cu_seqlens = given.to_vec();
            let output = run(&context(), &case, &wrong);
            assert_same_bits(&expected, &output, &format!("{given:?}"));
        }
    }
}

/// `auto` takes a path by the lengths of a batch, on the host or on the device, and bits are those of that path.
#[test]
fn lengths_choose_the_path() {
    if !is_cdna(&context()) {
        // The split path is faster for all lengths.
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 16, 128), &[128; 12]);
        case.spec.compute_units = Some(8);
        assert_eq!(plan(&case).path(), PrefillPath::Split);
        let device = Prefill::device(&context(), case.spec, case.tokens(), 12);
        assert_eq!(device.unwrap().path(), PrefillPath::Split);
        return;
    }
    let equal = [128; 12];
    let mut one_long = [40; 12];
    one_long[7] = 64 * 31;
    let padded = [200, 130, 0, 0, 190, 260, 150, 0, 170, 200, 128, 108];
    for (i, (lengths, path)) in [
        (equal, PrefillPath::Fused),
        (one_long, PrefillPath::Split),
        (padded, PrefillPath::Fused),
    ]
    .into_iter()
    .enumerate()
    {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 16, 128), &lengths);
        case.spec.compute_units = Some(8);
        (case.initial, case.gates, case.padding) = (Some(F32), Gates::Mixed, 70 * i);
        let data = case.data();
        let chosen = plan(&case);
        assert_eq!(chosen.path(), path, "{i}");
        assert_eq!(chosen.segments(), lengths.len(), "{i}: no sequence is cut");
        let host = run(&context(), &case, &data);
        for wide in [false, true] {
            case.entry = Entry::Device { wide };
            let device = run(&context(), &case, &data);
            assert_same_bits(&host, &device, &format!("{i}: host and device"));
        }
        let device = Prefill::device(&context(), case.spec, case.tokens(), lengths.len()).unwrap();
        assert_eq!(device.path(), PrefillPath::Auto, "{i}");
        // `prefill_fused` also does what `prefill_prepare` would.
        let launched = [Part::Whole, Part::Lengths, Part::Fused, Part::Scan];
        assert_eq!(device.parts(), launched, "{i}");
        case.entry = Entry::Packed;
        (case.spec.path, case.spec.segments) = (path, Some(1));
        let forced = run(&context(), &case, &data);
        assert_same_bits(&host, &forced, &format!("{i}: the path by itself"));
    }
    // A number of segments, and a device that one sequence cannot fill.
    for (lengths, segments, units) in [(&equal[..], Some(1), 8), (&[640], None, 8)] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 16, 128), lengths);
        (case.spec.segments, case.spec.compute_units) = (segments, Some(units));
        assert_eq!(plan(&case).path(), PrefillPath::Split);
        let device = Prefill::device(&context(), case.spec, case.tokens(), lengths.len());
        assert_eq!(device.unwrap().path(), PrefillPath::Split);
    }
}

/// The device keeps lengths in registers if a wave has a lane for each start, 63 sequences on CDNA and 31 on NVIDIA, and
/// takes them from memory otherwise.
#[test]
fn the_device_cuts_as_the_host_at_the_end_of_a_wave() {
    let wave = if is_cdna(&context()) { 64 } else { 32 };
    for sequences in [wave - 1, wave, wave + 1] {
        let mut lengths: Vec<usize> = (0..sequences).map(|i| 17 + i * 29 % 48).collect();
        for (long, path, segments, chosen) in [
            (130, PrefillPath::Auto, None, PrefillPath::Fused),
            (64 * 160, PrefillPath::Auto, None, PrefillPath::Split),
            (64 * 40, PrefillPath::Fused, None, PrefillPath::Fused),
            (130, PrefillPath::Fused, Some(2), PrefillPath::Fused),
        ] {
            lengths[sequences - 1] = long;
            let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 16, 128), &lengths);
            (case.spec.path, case.spec.segments) = (path, segments);
            case.spec.compute_units = Some(8);
            (case.gates, case.padding) = (Gates::Mixed, 70);
            let name = format!("{sequences} sequences, {long} tokens, {path:?}");
            if is_cdna(&context()) {
                assert_eq!(plan(&case).path(), chosen, "{name}");
            }
            let data = case.data();
            let host = run(&context(), &case, &data);
            case.entry = Entry::Device { wide: false };
            let device = run(&context(), &case, &data);
            assert_same_bits(&host, &device, &name);
        }
    }
}

/// One plan, as a captured graph launches it, for lengths of either path and wrong ones.
#[test]
fn a_plan_serves_lengths_of_both_paths() {
    let equal = [200; 12];
    let mut one_long = [40; 12];
    one_long[7] = 200 * 12 - 40 * 11;
    let mut case = Case::new(spec(Dtype::F16, 1, 2, 16, 128), &equal);
    (case.spec.compute_units, case.gates) = (Some(8), Gates::Mixed);
    let device_of = |lengths: &[usize; 12], case: &Case| {
        let mut data = case.data();
        data.cu_seqlens = (0..=12)
            .map(|n| lengths[..n].iter().sum::<usize>() as i32)
            .collect();
        data
    };
    for lengths in [equal, one_long] {
        let mut host = Case::new(case.spec, &lengths);
        host.gates = case.gates;
        let fused = lengths == equal && is_cdna(&context());
        let path = [PrefillPath::Split, PrefillPath::Fused][usize::from(fused)];
        assert_eq!(plan(&host).path(), path);
        case.entry = Entry::Device { wide: false };
        let data = device_of(&lengths, &case);
        let expected = run(&context(), &host, &data);
        assert_same_bits(&expected, &run(&context(), &case, &data), "the lengths");
        // The last entry is past the tokens, so it is replaced.
        let mut wrong = device_of(&lengths, &case);
        wrong.cu_seqlens[12] = i32::MAX;
        assert_same_bits(&expected, &run(&context(), &case, &wrong), "wrong lengths");
    }
}

/// Kernels of a plan, and parts that make the whole.
#[test]
fn kernels_and_parts() {
    let stream = context().stream().unwrap();
    for (segments, kernels) in [(1, 1), (2, 2), (3, 3)] {
        let case = fused(spec(Dtype::Bf16, 1, 2, 64, 48), &[300, 70], Some(segments));
        assert_eq!(plan(&case).kernels().len(), kernels);
        assert_eq!(plan(&case).parts().len(), 1 + kernels);
        let data = case.data();
        let expected = run(&context(), &case, &data);
        let mut loaded = Loaded::new(&context(), &case, &data);
        loaded.poison(&stream);
        for part in [Part::FusedSummarise, Part::Combine, Part::Fused] {
            loaded.launch_part(&case, &stream, part).unwrap();
        }
        assert_same_bits(&expected, &loaded.read(&case, &stream), "its parts");
    }
}

#[test]
fn refusals() {
    let refused = |spec: PrefillSpec, words: &str| {
        let error = Prefill::device(&context(), spec, 200, 1).expect_err(words);
        assert!(matches!(error, Error::Argument(_)), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let mut wide = spec(Dtype::Bf16, 1, 1, 144, 16);
    wide.path = PrefillPath::Fused;
    refused(
        wide,
        "path: fused with K = 144; the fused kernel needs K of at most 128",
    );
    // Lists that no launch could walk.
    let mut many = spec(Dtype::Bf16, 1, 1 << 19, 16, 16);
    for path in [PrefillPath::Fused, PrefillPath::Split] {
        (many.path, many.segments) = (path, Some(64));
        let error = Prefill::device(&context(), many, 64 * 64, 1).map(drop);
        assert!(error.expect_err("a grid").to_string().contains("segments"));
    }
}
