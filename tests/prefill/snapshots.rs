//! States in the course of sequences: those that the walk goes on with, on every path of the planner.

use deltawave::error::{ArgumentKind, Error};
use deltawave::prefill::{Prefill, Snapshot};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle;

use crate::common::{
    Case, Data, Entry, Loaded, Output, PoolCase, SnapshotCase, StateKind, assert_same_bits, bits,
    context, run, run_pool, run_snapshots, spec,
};

const F32: StateKind = StateKind {
    dtype: Dtype::F32,
    layout: StateLayout::KeyMajor,
    pad: 0,
};

fn case(dtype: Dtype, segments: usize) -> Case {
    let mut case = Case::new(spec(dtype, 1, 2, 64, 48), &[300, 64, 0, 63, 130]);
    case.spec.segments = Some(segments);
    case.gates = Gates::Mixed;
    case.initial = Some(F32);
    case
}

/// Takes each, and every so many, of the snapshots of a case that is cut: outputs and final states keep the bits of
/// `expected`, and snapshots are near those of whole sequences.
pub fn assert_near_whole(case: &Case, data: &Data, expected: &Output, every: &[usize]) {
    let mut whole = case.clone();
    whole.spec.segments = Some(1);
    let heads = &case.spec.heads;
    let each = heads.value * heads.key_dim * heads.value_dim;
    let list = plan(case).snapshots_every(64).expect("whole chunks");
    for every in every {
        let wanted = SnapshotCase {
            to: Some((F32, list.len())),
            list: list
                .iter()
                .filter(|s| s.tokens / 64 % every == 0)
                .copied()
                .collect(),
            planned: true,
        };
        let (output, taken) = run_snapshots(&context(), case, data, None, &wanted);
        assert_same_bits(expected, &output, "with snapshots");
        let (_, of_whole) = run_snapshots(&context(), &whole, data, None, &wanted);
        for (s, (a, b)) in (wanted.list.iter()).zip(taken.chunks(each).zip(of_whole.chunks(each))) {
            let b: Vec<f64> = b.iter().map(|&x| f64::from(x)).collect();
            let distance = compare(a, &b);
            assert!(distance.rms_ratio < 4e-3, "{s:?}: {distance:?}");
        }
    }
}

fn plan(case: &Case) -> Prefill {
    Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens()).expect("a plan")
}

/// All of them, in slots from the last to the first.
fn all(case: &Case) -> Vec<Snapshot> {
    let mut list = plan(case).snapshots_every(64).expect("whole chunks");
    let last = list.len() - 1;
    list.iter_mut().for_each(|s| s.slot = last - s.slot);
    list
}

/// Tokens of one sequence, from one on to another, and its state before them.
fn part(case: &Case, data: &Data, n: usize, [from, to]: [usize; 2], state: &[f32]) -> Output {
    let begin = case.lengths[..n].iter().sum::<usize>();
    let (from, to) = (begin + from, begin + to);
    let mut one = case.clone();
    one.lengths = vec![to - from];
    let mut rest = case.data();
    let s = &case.spec;
    let cut =
        |t: &HostTensor, w: usize| HostTensor::new(t.dtype, t.values[from * w..to * w].to_vec());
    let (i, whole) = (&mut rest.inputs, &data.inputs);
    let (keys, values) = (
        s.heads.key * s.heads.key_dim,
        s.heads.value * s.heads.value_dim,
    );
    (i.q, i.k, i.v) = (
        cut(&whole.q, keys),
        cut(&whole.k, keys),
        cut(&whole.v, values),
    );
    let heads = s.heads.value;
    i.g = whole.g[from * heads..to * heads].to_vec();
    i.beta = whole.beta[from * heads..to * heads].to_vec();
    i.spec.tokens = to - from;
    rest.gate_inputs.a = cut(&data.gate_inputs.a, heads);
    rest.gate_inputs.b = cut(&data.gate_inputs.b, heads);
    rest.cu_seqlens = one.cu_seqlens();
    rest.initial = Some(HostTensor::new(Dtype::F32, state.to_vec()));
    run(&context(), &one, &rest)
}

/// Survey 65: a sequence that is resumed from any of its 64-token boundaries has the bits of the whole run, which the
/// snapshots leave as it was. At the end of a sequence a snapshot is the final state.
#[test]
fn resuming_is_the_whole_run() {
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let case = case(dtype, 1);
        let data = case.data();
        let expected = run(&context(), &case, &data);
        let wanted = SnapshotCase {
            to: Some((F32, 7)),
            list: all(&case),
            planned: true,
        };
        assert_eq!(wanted.list.len(), 4 + 1 + 2);
        let (output, taken) = run_snapshots(&context(), &case, &data, None, &wanted);
        assert_same_bits(&expected, &output, "with snapshots");
        let (each, row) = (2 * 64 * 48, 2 * 48);
        let last = output.state.as_ref().expect("states");
        for (s, state) in wanted.list.iter().zip(taken.chunks(each)) {
            let (n, length) = (s.sequence, case.lengths[s.sequence]);
            let own = &last[n * each..(n + 1) * each];
            if s.tokens == length {
                assert!(bits(state) == bits(own), "{s:?}: the end");
                continue;
            }
            let rest = part(&case, &data, n, [s.tokens, length], state);
            let begin = (data.cu_seqlens[n] as usize + s.tokens) * row;
            let end = data.cu_seqlens[n + 1] as usize * row;
            assert!(bits(&rest.o) == bits(&output.o[begin..end]), "{s:?}");
            assert!(bits(&rest.state.expect("a state")) == bits(own), "{s:?}");
        }
    }
}

/// On every path of the planner, in every bucket of K: the states of the recurrence, as accurate as final ones.
#[test]
fn snapshots_are_states() {
    for (i, (k, v)) in [(32, 144), (96, 64), (128, 32), (192, 48), (256, 32)]
        .into_iter()
        .enumerate()
    {
        for segments in [1, 2, 5] {
            let mut case = case([Dtype::Bf16, Dtype::F16][i % 2], segments);
            (case.spec.heads.key_dim, case.spec.heads.value_dim) = (k, v);
            case.lengths = vec![330, 70];
            let data = case.data();
            let expected = run(&context(), &case, &data);
            let layout = [StateLayout::KeyMajor, StateLayout::ValueMajor][i % 2];
            let wanted = SnapshotCase {
                to: Some((
                    StateKind {
                        layout,
                        pad: i,
                        ..F32
                    },
                    9,
                )),
                list: all(&case),
                planned: segments == 2,
            };
            let (output, taken) = run_snapshots(&context(), &case, &data, None, &wanted);
            assert_same_bits(&expected, &output, "with snapshots");
            let each = 2 * k * v;
            for (s, state) in wanted.list.iter().zip(taken.chunks(each)) {
                // The oracle of the sequences' first tokens.
                let mut shorter = case.data();
                let begin = data.cu_seqlens[s.sequence];
                shorter.cu_seqlens = vec![0, begin, begin + s.tokens as i32];
                let initial = data.initial.as_ref().expect("states");
                let own = initial.values[s.sequence * each..(s.sequence + 1) * each].to_vec();
                shorter.initial =
                    Some(HostTensor::new(Dtype::F32, [vec![0.0; each], own].concat()));
                let reference = oracle::prefill(&shorter.problem(&case)).expect("a problem");
                let c = compare(state, &reference.final_state[each..]);
                let bar = if case.spec.dtype == Dtype::Bf16 {
                    8e-3
                } else {
                    1e-3
                };
                assert!(
                    c.rms_ratio < bar,
                    "{k}x{v}, {segments} segments, {s:?}: {c:?}"
                );
            }
            // 16 bits are the same, rounded.
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let narrow = SnapshotCase {
                    to: Some((StateKind { dtype, ..F32 }, 6)),
                    ..wanted.clone()
                };
                let (_, rounded) = run_snapshots(&context(), &case, &data, None, &narrow);
                let taken = HostTensor::new(dtype, taken.clone()).values;
                assert!(
                    bits(&rounded) == bits(&taken),
                    "{k}x{v}, {segments} segments, {dtype}"
                );
            }
        }
    }
}

/// A few of many chunks: further apart than a wave has lanes, on both sides of that, of cut sequences and whole ones.
#[test]
fn far_apart() {
    let mut case = Case::new(spec(Dtype::Bf16, 1, 1, 16, 16), &[64 * 135 + 5, 3, 64 * 70]);
    case.spec.segments = Some(1);
    case.gates = Gates::Mixed;
    case.initial = Some(F32);
    let data = case.data();
    let at = |sequence, chunks: usize, slot| Snapshot {
        sequence,
        tokens: 64 * chunks,
        slot,
    };
    let list = vec![at(0, 64, 0), at(0, 65, 3), at(0, 129, 1), at(2, 70, 2)];
    let run_cut = |segments| {
        let mut case = case.clone();
        case.spec.segments = Some(segments);
        let wanted = SnapshotCase {
            to: Some((F32, 4)),
            list: list.clone(),
            planned: true,
        };
        run_snapshots(&context(), &case, &data, None, &wanted)
    };
    let (output, whole) = run_cut(1);
    let last = output.state.expect("states");
    assert!(bits(&whole[3 * 256..]) == bits(&last[2 * 256..]));
    for s in &list[..3] {
        let state = &whole[256 * list.iter().position(|x| x == s).expect("of the list")..][..256];
        let rest = part(&case, &data, 0, [s.tokens, case.lengths[0]], state);
        assert!(
            bits(&rest.state.expect("a state")) == bits(&last[..256]),
            "{s:?}"
        );
    }
    let (_, cut) = run_cut(3);
    let reference: Vec<f64> = whole.iter().map(|&x| f64::from(x)).collect();
    let c = compare(&cut, &reference);
    assert!(c.rms_ratio < 8e-3, "{c:?}");
}

/// Into slots of the pool that the sequences are in, of which padding takes none.
#[test]
fn in_the_pool() {
    for segments in [1, 3] {
        let case = case(Dtype::Bf16, segments);
        let mut pool = PoolCase::new(F32, 12, &[3, -1, 7, 9, 0]);
        let data = case.data();
        let expected = run_pool(&context(), &case, &data, &pool);
        let mut wanted = SnapshotCase {
            to: Some((F32, 12)),
            list: all(&case),
            planned: true,
        };
        wanted.list.retain(|s| s.sequence != 1);
        for (s, slot) in wanted.list.iter_mut().zip([1, 2, 4, 5, 11, 10]) {
            s.slot = slot;
        }
        let (_, apart) = run_snapshots(&context(), &case, &data, Some(&pool), &wanted);
        for planned in [false, true] {
            (wanted.to, wanted.planned, pool.planned) = (None, planned, planned);
            let (output, taken) = run_snapshots(&context(), &case, &data, Some(&pool), &wanted);
            assert_same_bits(&expected, &output, "with snapshots");
            assert!(bits(&taken) == bits(&apart));
        }
    }
}

/// Lengths and slots that the device alone knows.
#[test]
fn device_plans() {
    let mut case = case(Dtype::Bf16, 1);
    let data = case.data();
    let wanted = SnapshotCase {
        to: Some((F32, 8)),
        list: all(&case),
        planned: false,
    };
    let (expected, taken) = run_snapshots(&context(), &case, &data, None, &wanted);
    case.entry = Entry::Device { wide: false };
    let (output, same) = run_snapshots(&context(), &case, &data, None, &wanted);
    assert_same_bits(&expected, &output, "device");
    assert!(bits(&taken) == bits(&same));
}

/// Snapshots that the host knows are checked, when they are planned and when they are launched.
#[test]
fn refusals() {
    let case = case(Dtype::Bf16, 1);
    let at = |sequence, tokens, slot| Snapshot {
        sequence,
        tokens,
        slot,
    };
    let refused = |result: Result<(), Error>, argument: &str, kind, words: &str| {
        let Err(Error::Argument(error)) = result else {
            panic!("{result:?} instead of {words}");
        };
        assert_eq!((error.argument.as_str(), error.kind), (argument, kind));
        assert!(error.to_string().contains(words), "{error}");
    };
    use ArgumentKind::{Presence, Shape, Value};
    for (list, words) in [
        (&[at(5, 64, 0)][..], "sequence 5; the batch has 5"),
        (&[at(usize::MAX, 64, 0)], "the batch has 5"),
        (&[at(0, 0, 0)], "after 0 tokens"),
        (&[at(0, 300, 0)], "after 300 tokens"),
        (&[at(1, 128, 0)], "128 tokens of sequence 1; it has 64"),
        (&[at(0, 64, 1), at(4, 64, 1)], "slot 1; each slot"),
        (&[at(0, 64, usize::MAX)], "each slot"),
        (
            &[at(4, 64, 1), at(4, 64, 2)],
            "two slots after 64 tokens of sequence 4",
        ),
    ] {
        refused(plan(&case).set_snapshots(list), "snapshots", Value, words);
    }
    let every = plan(&case).snapshots_every(100).map(drop);
    refused(every, "snapshots", Value, "after 100 tokens");

    let data = case.data();
    let stream = context().stream().expect("a stream");
    let pool = PoolCase {
        planned: true,
        ..PoolCase::new(F32, 6, &[3, -1, 2, 1, 0])
    };
    let launch = |on_pool: bool, snapshots: &SnapshotCase| {
        let context = context();
        let mut loaded = match on_pool {
            true => Loaded::on_pool(&context, &case, &data, &pool),
            false => Loaded::new(&context, &case, &data),
        }
        .with_snapshots(&context, &case, snapshots);
        loaded.launch(&case, &stream)
    };
    let mut wanted = SnapshotCase {
        to: None,
        list: vec![at(0, 64, 4)],
        planned: true,
    };
    assert!(launch(true, &wanted).is_ok());
    refused(
        launch(false, &wanted),
        "snapshots",
        Presence,
        "without a tensor",
    );
    wanted.list[0].slot = 2;
    refused(
        launch(true, &wanted),
        "snapshots",
        Value,
        "slot 2; it must be below 6",
    );
    wanted.to = Some((F32, 2));
    refused(
        launch(false, &wanted),
        "snapshots",
        Value,
        "slot 2; it must be below 2",
    );
    wanted.to = Some((F32, 3));
    assert!(launch(true, &wanted).is_ok());
    // Without slots, and with those of a launch beside those of the plan.
    let mut loaded = Loaded::new(&context(), &case, &data);
    let given = SnapshotCase {
        planned: false,
        ..wanted.clone()
    };
    loaded = loaded.with_snapshots(&context(), &case, &given);
    loaded.drop_snapshot_slots();
    refused(
        loaded.launch(&case, &stream),
        "snapshot_slots",
        Presence,
        "the plan has none",
    );
    let mut loaded = loaded.with_snapshots(&context(), &case, &wanted);
    loaded.drop_snapshots();
    refused(
        loaded.launch(&case, &stream),
        "snapshots",
        Presence,
        "absent",
    );
    loaded = loaded.with_snapshots(&context(), &case, &given);
    refused(
        loaded.launch(&case, &stream),
        "snapshot_slots",
        Presence,
        "given to a plan",
    );
    // Of another number of chunks, and of another shape.
    let mut other = case.clone();
    other.lengths.push(0);
    let mut loaded =
        Loaded::new(&context(), &case, &data).with_snapshots(&context(), &other, &given);
    refused(
        loaded.launch(&case, &stream),
        "snapshot_slots",
        Shape,
        "elements",
    );
    let mut other = case.clone();
    other.spec.heads.value_dim = 32;
    let mut loaded =
        Loaded::new(&context(), &case, &data).with_snapshots(&context(), &other, &given);
    refused(loaded.launch(&case, &stream), "snapshots", Shape, "shape");
}
