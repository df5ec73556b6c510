//! Sequences that are cut into segments: the state passes from one to the next through summaries.

use deltawave::error::Error;
use deltawave::prefill::{Part, Prefill, PrefillPath};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Keys, Tensor as HostTensor};
use deltawave_lab::metrics::compare;

use crate::common::{
    Case, Data, Entry, GateKind, Layout, Loaded, Output, StateKind, assert_same_bits, bits, check,
    check_data, check_output, context, is_cdna, judge, run, spec,
};

const F32_STATE: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

/// A case whose longest sequence has so many segments.
fn cut(spec: deltawave::prefill::PrefillSpec, lengths: &[usize], segments: usize) -> Case {
    let mut case = Case::new(spec, lengths);
    case.spec.segments = Some(segments);
    case.gates = Gates::Mixed;
    case.initial = Some(F32_STATE);
    case
}

fn plan(case: &Case) -> Prefill {
    Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).expect("a plan")
}

/// Lengths around the ends of chunks and segments: of two chunks, of one; beside sequences that stay whole.
#[test]
fn boundaries_of_segments() {
    for longest in [255, 256, 257, 319, 320, 321] {
        let lengths = [longest, 0, 1, 127, 128, 129, 63, 64, 65];
        let case = cut(spec(Dtype::Bf16, 1, 2, 64, 48), &lengths, 3);
        assert!(plan(&case).segments() > lengths.len());
        check(&context(), &case);
        let mut case = cut(spec(Dtype::F16, 1, 2, 48, 32), &lengths, 100);
        case.padding = 70;
        // Every chunk is a segment.
        let chunks: usize = lengths.iter().map(|n| n.div_ceil(64).max(1)).sum();
        assert_eq!(plan(&case).segments(), chunks);
        check(&context(), &case);
    }
}

/// One long sequence among many short ones is cut, and they are not: their bits are those of a run without segments.
#[test]
fn short_sequences_stay_whole() {
    let mut lengths = vec![40; 20];
    lengths.insert(7, 700);
    let mut case = cut(spec(Dtype::Bf16, 2, 4, 64, 64), &lengths, 4);
    let segments = plan(&case).segments();
    assert_eq!(segments, 20 + 4);
    let data = case.data();
    let output = run(&context(), &case, &data);
    check_output(&case, &data, &output, 1.15);
    case.spec.segments = Some(1);
    let whole = run(&context(), &case, &data);
    let row = 4 * 64;
    let (a, b) = (bits(&output.o), bits(&whole.o));
    assert!(a[..280 * row] == b[..280 * row] && a[980 * row..] == b[980 * row..]);
    // The first segment of the long one starts from the same state, too.
    assert!(a[280 * row..(280 + 192) * row] == b[280 * row..(280 + 192) * row]);
}

/// All buckets of K, both dtypes, layouts and types of states, head maps, gates that the kernels compute.
#[test]
fn all_options() {
    let dims = [(32, 144), (96, 192), (128, 128), (176, 48), (256, 32)];
    for (i, (k, v)) in dims.into_iter().enumerate() {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut case = cut(spec(dtype, 2, 6, k, v), &[200, 75, 0, 130], 2 + i % 3);
            case.gates = [Gates::Mixed, Gates::Strong, Gates::Normal, Gates::Zero][i % 4];
            case.keys = [Keys::Normal, Keys::Silu][i % 2];
            case.spec.qk_l2norm = i % 2 == 0;
            case.spec.heads.map = [HeadMap::Grouped, HeadMap::Tiled][i % 2];
            let state = [Dtype::F32, Dtype::Bf16][i % 2];
            let layouts = [StateLayout::KeyMajor, StateLayout::ValueMajor];
            case.initial = Some(StateKind {
                dtype: state,
                layout: layouts[(i + 1) % 2],
                pad: i,
            });
            case.has_initial = (i == 3).then(|| vec![1, 0, 1, 0]);
            case.final_state = Some(StateKind {
                dtype: state,
                layout: layouts[i % 2],
                pad: 1,
            });
            case.layout = [Layout::Dense, Layout::HeadMajor, Layout::Padded(3, 8, 5)][i % 3];
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

/// A sequence of a case with `key` and `value` heads' dimensions, one key head and two value heads, by itself.
fn alone(case: &Case, data: &Data, n: usize, [key, value]: [usize; 2]) -> (Case, Data) {
    let begin: usize = case.lengths[..n].iter().sum();
    let end = begin + case.lengths[n];
    let rows = |t: &HostTensor, width: usize| {
        HostTensor::new(t.dtype, t.values[begin * width..end * width].to_vec())
    };
    let mut one = case.clone();
    one.lengths = vec![case.lengths[n]];
    let mut of_one = one.data();
    of_one.inputs.q = rows(&data.inputs.q, key);
    of_one.inputs.k = rows(&data.inputs.k, key);
    of_one.inputs.v = rows(&data.inputs.v, 2 * value);
    of_one.inputs.g = data.inputs.g[2 * begin..2 * end].to_vec();
    of_one.inputs.beta = data.inputs.beta[2 * begin..2 * end].to_vec();
    of_one.initial = data.initial.as_ref().map(|initial| {
        let state = 2 * key * value;
        let own = initial.values[n * state..(n + 1) * state].to_vec();
        HostTensor::new(initial.dtype, own)
    });
    (one, of_one)
}

/// Where summaries are few, `prefill_scan` chains them itself on CDNA: the same bits as those of `prefill_combine`.
#[test]
fn chains_have_the_bits_of_combine() {
    // Ten summaries, and eight.
    let batches = [
        [64 * 13 + 7, 64 * 8, 64 * 6 + 1],
        [64 * 13 + 7, 64 * 8, 64 * 2 + 1],
    ];
    for (dtype, key, value, gates) in [
        (Dtype::Bf16, 64, 48, Gates::Mixed),
        (Dtype::F16, 96, 32, Gates::Zero),
        (Dtype::Bf16, 80, 16, Gates::Zero),
        (Dtype::Bf16, 128, 80, Gates::Mixed),
        (Dtype::F16, 112, 128, Gates::Zero),
        (Dtype::Bf16, 192, 48, Gates::Zero),
    ] {
        for (lengths, segments) in batches.into_iter().zip([5, 4]) {
            let mut case = cut(spec(dtype, 1, 2, key, value), &lengths, segments);
            (case.gates, case.spec.path) = (gates, PrefillPath::Split);
            let chains = key <= 128 && is_cdna(&context());
            let combines = |case: &Case| plan(case).parts().contains(&Part::Combine);
            assert_eq!(combines(&case), segments == 5 || !chains);
            let data = case.data();
            let all = run(&context(), &case, &data);
            check_output(&case, &data, &all, 1.15);
            for n in [0, 2] {
                let (one, of_one) = alone(&case, &data, n, [key, value]);
                assert_eq!(combines(&one), !chains);
                let output = run(&context(), &one, &of_one);
                let begin: usize = lengths[..n].iter().sum();
                let rows = begin * 2 * value..(begin + lengths[n]) * 2 * value;
                assert!(bits(&output.o) == bits(&all.o[rows]), "sequence {n}");
                let (last, state) = (output.state.expect("a state"), 2 * key * value);
                let states = all.state.as_ref().expect("states");
                assert!(bits(&last) == bits(&states[n * state..(n + 1) * state]));
            }
        }
    }
}

/// A dense batch is cut as a packed one.
#[test]
fn dense_batches_are_cut() {
    let mut case = cut(spec(Dtype::Bf16, 2, 4, 64, 32), &[200; 3], 2);
    let packed = run(&context(), &case, &case.data());
    case.entry = Entry::Dense;
    case.batch_gap = 24;
    let data = case.data();
    let dense = run(&context(), &case, &data);
    assert_same_bits(&packed, &dense, "packed and dense");
    check_output(&case, &data, &dense, 1.15);
}

/// Keys longer than 1 that nothing decays: M grows, so that no gate may be a reason to leave it out, and a large initial
/// state reaches the last segment.
#[test]
fn long_keys_and_large_states() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let mut case = cut(spec(dtype, 1, 2, 64, 32), &[448, 130], 7);
        case.gates = Gates::Zero;
        let mut data = case.data();
        let scaled = |t: &HostTensor, factor: f32| {
            HostTensor::new(t.dtype, t.values.iter().map(|x| x * factor).collect())
        };
        // beta |k|^2 is above 2 for a part of the tokens, on which a component of the state is multiplied by less than -1.
        data.inputs.k = scaled(&data.inputs.k, 1.7);
        let initial = data.initial.take().expect("an initial state");
        data.initial = Some(scaled(&initial, 1000.0));
        let output = run(&context(), &case, &data);
        check_output(&case, &data, &output, 1.15);
        // Without its initial state the last segment's outputs are other ones: the test sees it.
        let last = |x: &Output| x.o[400 * 64..448 * 64].to_vec();
        let mut without = case.clone();
        without.initial = None;
        let other = run(&context(), &without, &data);
        let other: Vec<f64> = last(&other).into_iter().map(f64::from).collect();
        assert!(compare(&last(&output), &other).rms_ratio > 0.1);
    }
}

/// Gates that decay to nothing within a segment, with states and summaries that must not become NaN.
#[test]
fn strong_gates() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let mut case = cut(spec(dtype, 1, 3, 128, 64), &[520], 4);
        case.gates = Gates::Strong;
        check(&context(), &case);
    }
}

/// What a sequence holds does not reach its neighbours through summaries, not even NaN and infinity.
#[test]
fn neighbours_do_not_leak() {
    crate::varlen::check_isolation(cut(spec(Dtype::Bf16, 1, 2, 64, 32), &[200, 300, 250], 3));
}

/// A poisoned value of one token reaches its own value column alone, in its segment and in later ones, which do not forget
/// it: the head has no decay.
#[test]
fn a_column_keeps_its_poison() {
    let mut case = cut(spec(Dtype::Bf16, 1, 1, 64, 32), &[400], 3);
    case.gates = Gates::Zero;
    let mut data = case.data();
    let expected = run(&context(), &case, &data);
    let mut values = data.inputs.v.values.clone();
    values[70 * 32 + 5] = f32::NAN;
    data.inputs.v = HostTensor::new(Dtype::Bf16, values);
    let output = run(&context(), &case, &data);
    for (at, (a, b)) in expected.o.iter().zip(&output.o).enumerate() {
        let (token, column) = (at / 32, at % 32);
        if column == 5 && token >= 128 {
            assert!(b.is_nan(), "token {token}");
        } else if column != 5 || token < 64 {
            assert_eq!(a.to_bits(), b.to_bits(), "token {token}, column {column}");
        }
    }
}

/// The error of a run with segments is that of one without, pooled over heads of all gates.
#[test]
fn segments_cost_no_accuracy() {
    let context = context();
    let stream = context.stream().expect("a stream");
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let mut squares = [[0.0; 2]; 2];
        for gates in [Gates::Normal, Gates::Mixed, Gates::Zero] {
            let mut case = cut(spec(dtype, 4, 8, 64, 64), &[1024], 1);
            case.gates = gates;
            let data = case.data();
            for (segments, squares) in [1, 8].into_iter().zip(&mut squares) {
                case.spec.segments = Some(segments);
                let mut loaded = Loaded::new(&context, &case, &data);
                loaded.poison(&stream);
                loaded.launch(&case, &stream).expect("a launch");
                let j = judge(&case, &data, &loaded.read(&case, &stream));
                squares[0] += j.o.rms_ratio.powi(2);
                squares[1] += j.state.rms_ratio.powi(2);
            }
        }
        let [whole, cut] = squares.map(|s| s.map(f64::sqrt));
        println!("{dtype}: whole {whole:.3?}, in segments {cut:.3?}");
        for (whole, cut) in whole.into_iter().zip(cut) {
            assert!(cut <= 1.05 * whole, "{dtype}: {cut:.3e}, whole {whole:.3e}");
        }
    }
}

/// A launch runs the kernels that the plan names: two where nothing is cut, three with one summary, four with more (on CDNA
/// with more than eight); its parts, one after the other, are the launch.
#[test]
fn kernels_and_parts() {
    let context = context();
    let stream = context.stream().unwrap();
    let few = if is_cdna(&context) { 3 } else { 4 };
    for (segments, kernels) in [(1, 2), (2, 3), (3, few), (11, 4)] {
        let case = cut(spec(Dtype::Bf16, 1, 2, 64, 48), &[700, 70], segments);
        let names = plan(&case).kernels();
        assert_eq!(names.len(), kernels, "{names:?}");
        let parts = plan(&case).parts();
        assert_eq!(parts[0], Part::Whole);
        assert_eq!(parts.len(), 1 + kernels);
        let data = case.data();
        let expected = run(&context, &case, &data);
        let mut loaded = Loaded::new(&context, &case, &data);
        loaded.poison(&stream);
        for part in [Part::Prepare, Part::Summarise, Part::Combine, Part::Scan] {
            loaded.launch_part(&case, &stream, part).unwrap();
        }
        assert_same_bits(&expected, &loaded.read(&case, &stream), "its parts");
    }
}

/// The planner cuts what leaves the device idle, and nothing else; the results of its choice are right.
#[test]
fn the_planner_chooses() {
    let context = context();
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[4096, 64, 0, 100]);
    case.gates = Gates::Mixed;
    let segments = plan(&case).segments();
    assert!(segments > 4, "{segments}");
    check(&context, &case);
    // The same lengths give the same plan, and fewer compute units fewer segments.
    assert_eq!(plan(&case).segments(), segments);
    case.spec.compute_units = Some(1);
    assert_eq!(plan(&case).segments(), 4);
    // Heads enough for the whole device.
    let full = Case::new(spec(Dtype::Bf16, 64, 2048, 64, 32), &[4096]);
    assert_eq!(plan(&full).segments(), 1);
}

/// Numbers of segments that make no sense, and segments of lengths that the host does not know.
#[test]
fn refusals() {
    let refused = |result: Result<(), Error>, words: &str| {
        let error = result.expect_err(words);
        assert!(matches!(error, Error::Argument(_)), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let case = cut(spec(Dtype::Bf16, 1, 1, 32, 16), &[200], 0);
    let packed = |case: &Case| {
        Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).map(drop)
    };
    refused(packed(&case), "segments: 0; it must be at least 1");
    let mut case = cut(case.spec, &[200], 1);
    case.spec.compute_units = Some(0);
    refused(packed(&case), "compute_units: 0; it must be at least 1");
    case.spec.compute_units = None;
    assert!(Prefill::device(&context(), case.spec, 200, 1).is_ok());
    // More threads than a launch can have.
    let many = cut(spec(Dtype::Bf16, 1, 1 << 19, 16, 16), &[64 * 64], 64);
    refused(packed(&many), "in 64 segments");
}

/// Where workgroups do not all fit on the device at once, some architectures give one of them twice the columns: the same
/// bits. V has columns for a part of those, for all of them, and for two workgroups.
#[test]
fn a_crowded_device() {
    for (dtype, key_dim, value_dim, layout) in [
        (Dtype::Bf16, 64, 192, Layout::Dense),
        (Dtype::Bf16, 128, 128, Layout::Dense),
        (Dtype::F16, 96, 80, Layout::Padded(1, 3, 1)),
        (Dtype::F16, 128, 256, Layout::Dense),
    ] {
        for segments in [1, 4] {
            let mut case = cut(
                spec(dtype, 1, 2, key_dim, value_dim),
                &[390, 64, 0, 65],
                segments,
            );
            case.layout = layout;
            case.padding = 7;
            // The planner's path depends on the device.
            case.spec.path = PrefillPath::Split;
            let data = case.data();
            case.spec.compute_units = Some(1);
            let crowded = run(&context(), &case, &data);
            check_output(&case, &data, &crowded, 1.15);
            case.spec.compute_units = Some(1 << 20);
            let roomy = run(&context(), &case, &data);
            assert_same_bits(&crowded, &roomy, "a crowded and a roomy device");
        }
    }
}

/// Keys of rows at addresses that are no multiple of 16 bytes, in all kernels.
#[test]
fn unaligned_rows() {
    let mut case = cut(spec(Dtype::Bf16, 1, 2, 64, 32), &[300], 3);
    case.layout = Layout::Padded(1, 3, 1);
    check(&context(), &case);
    let data = case.data();
    check_data(&context(), &case, &data);
}

/// Where all segments are short, some architectures let a workgroup walk several: the same bits, however many there are.
#[test]
fn workgroups_walk_several_short_segments() {
    for (dtype, key_dim, value_dim) in [
        (Dtype::Bf16, 128, 128),
        (Dtype::F16, 64, 192),
        (Dtype::Bf16, 96, 80),
        (Dtype::F16, 192, 64),
        (Dtype::Bf16, 256, 128),
    ] {
        for segments in [1, 3] {
            let mut case = cut(
                spec(dtype, 2, 4, key_dim, value_dim),
                &[65, 0, 256, 1, 130, 64, 17, 200],
                segments,
            );
            case.padding = 7;
            case.spec.path = PrefillPath::Split;
            case.initial = Some(StateKind {
                layout: [StateLayout::KeyMajor, StateLayout::ValueMajor][segments / 2],
                ..F32_STATE
            });
            case.final_state = case.initial;
            let data = case.data();
            case.spec.compute_units = Some(1 << 20);
            let each = run(&context(), &case, &data);
            check_output(&case, &data, &each, 1.15);
            for units in [1, 3, 16] {
                case.spec.compute_units = Some(units);
                let several = run(&context(), &case, &data);
                assert_same_bits(&each, &several, "workgroups that walk several segments");
            }
        }
    }
}
