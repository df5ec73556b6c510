//! States in a pool, read and written in place: the bits of a run with states of their own, and no other byte changes.

use deltawave::error::{ArgumentKind, Error};
use deltawave::prefill::{CHUNK, Part, Prefill, Snapshot};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Gates;

use crate::common::{
    Case, Entry, Loaded, PoolCase, SnapshotCase, StateKind, check_output, check_pool, context,
    run_snapshots, spec,
};

const LAYOUTS: [StateLayout; 2] = [StateLayout::KeyMajor, StateLayout::ValueMajor];

fn kind(dtype: Dtype, layout: StateLayout) -> StateKind {
    StateKind {
        dtype,
        layout,
        pad: 0,
    }
}

/// Whole and cut sequences, some of them empty.
fn case(dtype: Dtype, segments: usize) -> Case {
    let mut case = Case::new(spec(dtype, 1, 2, 64, 48), &[70, 0, 200, 3, 129]);
    case.spec.segments = Some(segments);
    case.gates = Gates::Mixed;
    case
}

/// Types, layouts and strides of pools, slots out of order, whether the plan or the launch has them.
#[test]
fn in_place() {
    for (i, segments) in [1, 2, 4].into_iter().enumerate() {
        for (dtype, layout) in [
            (Dtype::F32, LAYOUTS[i % 2]),
            (Dtype::Bf16, LAYOUTS[(i + 1) % 2]),
            (Dtype::F16, LAYOUTS[i % 2]),
        ] {
            let mut case = case([Dtype::Bf16, Dtype::F16][i % 2], segments);
            case.has_initial = (i == 1).then(|| vec![1, 1, 0, 1, 0]);
            let mut pool = PoolCase::new(kind(dtype, layout), 9, &[7, 0, 3, 8, 1]);
            pool.planned = i == 1;
            (pool.kind.pad, pool.gaps) = (i, [8 * i, 5]);
            let expected = check_pool(&context(), &case, &pool);
            // What both do is right.
            (case.initial, case.final_state) = (Some(pool.kind), Some(pool.kind));
            check_output(&case, &case.data(), &expected, 1.15);
        }
    }
}

/// The first segment of a sequence may run after its last one has replaced the state: what it starts from is elsewhere
/// by then. V beyond K, and beyond a slab.
#[test]
fn in_place_of_segments() {
    for (k, v) in [(64, 144), (128, 32), (32, 32)] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 1, k, v), &[130, 330]);
        case.spec.segments = Some(5);
        let pool = PoolCase::new(kind(Dtype::F32, StateLayout::ValueMajor), 2, &[1, 0]);
        let expected = check_pool(&context(), &case, &pool);
        // The scan alone, when the pool holds nothing any more.
        case.initial = Some(pool.kind);
        let stream = context().stream().unwrap();
        let mut loaded = Loaded::on_pool(&context(), &case, &case.data(), &pool);
        for part in [Part::Prepare, Part::Summarise, Part::Combine] {
            loaded.launch_part(&case, &stream, part).unwrap();
        }
        loaded.poison_pool(&stream);
        loaded.launch_part(&case, &stream, Part::Scan).unwrap();
        assert_eq!(expected.o, loaded.read(&case, &stream).o);
    }
}

/// A sequence without tokens writes nothing, whether it has an initial state, shares its slot with nobody, or would leave
/// its state elsewhere. A captured batch, of which no sequence has tokens, leaves even slot 0 as it was.
#[test]
fn sequences_without_tokens_write_nothing() {
    let device = |wide| Entry::Device { wide };
    for (i, entry) in [Entry::Packed, device(false), device(true), Entry::Dense]
        .into_iter()
        .enumerate()
    {
        for has in [None, Some(0), Some(1)] {
            for (lengths, write) in [
                (&[0, 70, 0][..], None),
                (&[70, 0, 3], Some(vec![1, 4, 0])),
                (&[0, 0, 0], Some(vec![5, 0, 1])),
                (&[0, 0, 0], None),
            ] {
                if entry == Entry::Dense && lengths.iter().any(|n| *n > 0) {
                    continue;
                }
                let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 32, 48), lengths);
                (case.entry, case.padding) = (entry, if entry == Entry::Dense { 0 } else { i });
                case.has_initial = has.map(|has| vec![has; 3]);
                let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
                let mut pool = PoolCase::new(kind(types[i % 3], LAYOUTS[i % 2]), 6, &[3, 0, 2]);
                pool.write_slots = write;
                check_pool(&context(), &case, &pool);
                (pool.slots, pool.size) = (None, 3 + 3 * usize::from(pool.write_slots.is_some()));
                if pool.write_slots.is_none() {
                    check_pool(&context(), &case, &pool);
                }
            }
        }
    }
}

/// Nor do snapshots of the others change that.
#[test]
fn sequences_without_tokens_have_no_snapshots() {
    let pool = PoolCase::new(kind(Dtype::F32, LAYOUTS[0]), 4, &[3, 0, 2]);
    let snapshots = SnapshotCase {
        to: None,
        list: vec![Snapshot {
            sequence: 1,
            tokens: 64,
            slot: 1,
        }],
        planned: false,
    };
    let mut case = Case::new(spec(Dtype::Bf16, 1, 1, 32, 48), &[0, 70, 0]);
    case.initial = Some(pool.kind);
    case.has_initial = Some(vec![0; 3]);
    let data = case.data();
    let (output, taken) = run_snapshots(&context(), &case, &data, Some(&pool), &snapshots);
    let (states, before) = (output.state.unwrap(), data.initial.unwrap().values);
    let each = 32 * 48;
    assert!(states[..each] == before[..each] && states[2 * each..] == before[2 * each..]);
    assert!(states[each..2 * each] != before[each..2 * each]);
    assert!(taken.iter().all(|x| x.is_finite()));
}

/// Without slots, sequence n has slot n of a pool that may be larger.
#[test]
fn slots_are_optional() {
    let mut pool = PoolCase::new(kind(Dtype::F32, StateLayout::KeyMajor), 6, &[]);
    pool.slots = None;
    check_pool(&context(), &case(Dtype::Bf16, 1), &pool);
    // Only read from there.
    pool.write_slots = Some(vec![-1, 1, 5, -1, 4]);
    check_pool(&context(), &case(Dtype::Bf16, 2), &pool);
}

/// Survey 49: negative slots and, of those on the device, slots beyond the pool. Without both, outputs are zeros; without one to read, a sequence
/// starts from zeros; without one to write, it leaves no state.
#[test]
fn padding() {
    for segments in [1, 3] {
        for planned in [false, true] {
            let beyond = |slot: i32| if planned { -slot } else { slot };
            let mut pool = PoolCase::new(
                kind(Dtype::F32, StateLayout::KeyMajor),
                4,
                &[-1, 2, beyond(4), i32::MIN, 0],
            );
            pool.planned = planned;
            check_pool(&context(), &case(Dtype::Bf16, segments), &pool);
            pool.slots = Some(vec![3, -1, 2, beyond(i32::MAX), 0]);
            pool.write_slots = Some(vec![-1, 1, 2, -5, beyond(4)]);
            check_pool(&context(), &case(Dtype::F16, segments), &pool);
            // Few workgroups, which may take several sequences each.
            let mut crowded = case(Dtype::Bf16, segments);
            crowded.spec.compute_units = Some(2);
            check_pool(&context(), &crowded, &pool);
        }
    }
    // A batch of nothing else, with a pool of no slots.
    let pool = PoolCase::new(
        kind(Dtype::Bf16, StateLayout::KeyMajor),
        0,
        &[-1, 0, 1, 2, 3],
    );
    check_pool(&context(), &case(Dtype::Bf16, 1), &pool);
}

/// Nothing is made of the tokens of padding: where its records and summaries would be, the workspace is as it was.
#[test]
fn padding_is_not_prepared() {
    let context = context();
    let stream = context.stream().unwrap();
    let slots = [-1, 2, 3, -1, 0];
    let mut pool = PoolCase::new(kind(Dtype::F32, StateLayout::KeyMajor), 3, &slots);
    // The third is none: it leaves a state.
    pool.write_slots = Some(vec![3, 2, 1, i32::MIN, 0]);
    let padding = [true, false, false, true, false];
    for segments in [1, 3, 5] {
        let mut case = case(Dtype::Bf16, segments);
        case.lengths = vec![200, 0, 130, 70, 260];
        case.initial = Some(pool.kind);
        let cu_seqlens = case.cu_seqlens();
        let mut spec = case.spec;
        spec.segments = Some(1);
        let whole = Prefill::packed(&context, spec, &cu_seqlens, case.tokens()).unwrap();
        let record_bytes = whole.workspace_bytes();
        let mut loaded = Loaded::on_pool(&context, &case, &case.data(), &pool);
        loaded.poison(&stream);
        loaded.launch(&case, &stream).unwrap();
        let workspace = loaded.workspace(&stream);
        let (records, summaries) = workspace.split_at(record_bytes);
        let each = record_bytes / whole.chunk_entries();
        let summary = spec.heads.value * (48 + 64) * 64 * size_of::<f32>();
        let segment = 5usize.div_ceil(segments);
        let mut before = 0;
        for (n, &length) in case.lengths.iter().enumerate() {
            let chunks = length.div_ceil(CHUNK);
            let first = cu_seqlens[n] as usize / CHUNK + n;
            let followed = chunks.saturating_sub(1) / segment;
            let of_this = [
                &records[first * each..(first + chunks) * each],
                &summaries[before * summary..(before + followed) * summary],
            ];
            before += followed;
            for made in of_this.into_iter().filter(|made| !made.is_empty()) {
                let untouched = made.iter().all(|&byte| byte == 0xff);
                assert_eq!(untouched, padding[n], "{n}, {segments} segments");
            }
        }
    }
}

/// Slots that are read apart from those that are written, several sequences starting from one.
#[test]
fn shared_prefixes() {
    for planned in [false, true] {
        let mut pool = PoolCase::new(kind(Dtype::F32, StateLayout::KeyMajor), 8, &[0, 6, 0, 7, 0]);
        pool.write_slots = Some(vec![1, 6, 2, -1, 3]);
        pool.planned = planned;
        let mut case = case(Dtype::Bf16, 2);
        case.initial = Some(pool.kind);
        let mut data = case.data();
        let each = 2 * 64 * 48;
        let initial = data.initial.as_mut().expect("states");
        for n in [2, 4] {
            initial.values.copy_within(0..each, n * each);
        }
        *initial = deltawave_lab::inputs::Tensor::new(Dtype::F32, initial.values.clone());
        let expected = crate::common::run(&context(), &case, &data);
        case.initial = Some(pool.kind);
        let output = crate::common::run_pool(&context(), &case, &data, &pool);
        assert_eq!(expected.o, output.o);
        let (a, b) = (expected.state.unwrap(), output.state.unwrap());
        assert!(a[..3 * each] == b[..3 * each] && a[4 * each..] == b[4 * each..]);
        assert!(b[3 * each..4 * each].iter().all(|x| x.is_nan()));
    }
}

/// Dense batches, and lengths that the device alone knows.
#[test]
fn other_plans() {
    let mut pool = PoolCase::new(kind(Dtype::F32, StateLayout::ValueMajor), 5, &[4, -1, 2]);
    let mut case = Case::new(spec(Dtype::Bf16, 2, 4, 32, 48), &[75; 3]);
    case.entry = Entry::Dense;
    check_pool(&context(), &case, &pool);
    case.lengths = vec![64, 3, 130];
    case.padding = 9;
    for wide in [false, true] {
        case.entry = Entry::Device { wide };
        check_pool(&context(), &case, &pool);
        pool.write_slots = Some(vec![1, -1, 3]);
    }
}

/// A launch on a pool continues where the one before ended: two halves of every sequence, in place.
#[test]
fn halves_of_sequences() {
    let context = context();
    let stream = context.stream().unwrap();
    let pool = PoolCase::new(kind(Dtype::F32, StateLayout::KeyMajor), 3, &[2, 0]);
    let mut case = Case::new(spec(Dtype::Bf16, 1, 2, 64, 32), &[128, 64]);
    case.initial = Some(pool.kind);
    let data = case.data();
    let mut loaded = Loaded::on_pool(&context, &case, &data, &pool);
    for _ in 0..2 {
        loaded.launch(&case, &stream).unwrap();
    }
    let twice = loaded.pool_states(&case, &pool, &stream);
    // The same tokens again, as states that the first launch left.
    case.final_state = Some(pool.kind);
    let first = crate::common::run(&context, &case, &data);
    let mut again = case.data();
    let values = first.state.unwrap();
    again.initial = Some(deltawave_lab::inputs::Tensor::new(Dtype::F32, values));
    let second = crate::common::run(&context, &case, &again);
    assert_eq!(second.state.unwrap(), twice);
}

/// Slots that the host knows are checked: survey 52.
#[test]
fn slots_of_plans() {
    let case = case(Dtype::Bf16, 1);
    let plan = |read: &[i32], write: Option<&[i32]>| {
        Prefill::packed(&context(), case.spec, &case.cu_seqlens(), case.tokens())
            .expect("a plan")
            .set_slots(read, write)
    };
    let refused = |result: Result<(), Error>, argument: &str, kind, words: &str| {
        let Err(Error::Argument(error)) = result else {
            panic!("{result:?} instead of {words}");
        };
        assert_eq!((error.argument.as_str(), error.kind), (argument, kind));
        assert!(error.to_string().contains(words), "{error}");
    };
    use ArgumentKind::{Shape, Value};
    let read = [3, -1, 4, -1, 5];
    assert!(plan(&read, None).is_ok());
    assert!(plan(&[3, 3, 3, 3, 3], Some(&[-1, 0, 1, 2, 4])).is_ok());
    refused(plan(&read[..4], None), "slots", Shape, "4 slots");
    refused(plan(&read, Some(&[1])), "write_slots", Shape, "1 slots");
    let words = "slot 4, written by the sequences 2 and 4";
    refused(plan(&[3, -1, 4, 0, 4], None), "slots", Value, words);
    refused(
        plan(&read, Some(&[-1, -1, 4, 3, 4])),
        "write_slots",
        Value,
        words,
    );
    let words = "slot 5, read by sequence 4 and written by sequence 1";
    refused(
        plan(&read, Some(&[3, 5, 4, -1, -1])),
        "write_slots",
        Value,
        words,
    );
}
