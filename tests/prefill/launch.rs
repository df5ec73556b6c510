//! Workspaces, streams, graphs, and the same bits every time.

use deltawave::prefill::{Part, Prefill, PrefillPath};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::Gates;

use crate::common::{
    Case, Entry, GateKind, Loaded, Output, StateKind, assert_same_bits, bits, check_output,
    context, run, simulated, spec,
};

fn mixed_case(entry: Entry) -> Case {
    let mut case = Case::new(spec(Dtype::Bf16, 2, 4, 64, 48), &[70, 0, 64, 129]);
    case.entry = entry;
    case.gates = Gates::Mixed;
    case.initial = Some(StateKind {
        dtype: Dtype::F32,
        layout: StateLayout::KeyMajor,
        pad: 0,
    });
    case
}

/// Trap 13, survey 55 and 56: nothing depends on what workspace and outputs held. The harness poisons both with 0xff;
/// other bytes, and what another launch left, give the same bits.
#[test]
fn what_memory_held_does_not_matter() {
    let context = context();
    let stream = context.stream().unwrap();
    for entry in [Entry::Packed, Entry::Device { wide: false }] {
        let case = mixed_case(entry);
        let data = case.data();
        let expected = run(&context, &case, &data);
        let mut loaded = Loaded::new(&context, &case, &data);
        for byte in [0x00, 0x7f, 0x80, 0x01] {
            loaded.fill_workspace(byte, &stream);
            loaded.launch(&case, &stream).unwrap();
            // Also over what the launch before left in outputs and workspace.
            loaded.launch(&case, &stream).unwrap();
            assert_same_bits(&expected, &loaded.read(&case, &stream), "old contents");
        }
    }
}

/// Launches of different batches on one stream and one workspace, none of which is waited for: where a kernel begins before
/// the one before has ended, neither sees what the other leaves there.
#[test]
fn launches_share_a_workspace() {
    let context = context();
    let stream = context.stream().unwrap();
    for (entry, segments) in [
        (Entry::Packed, 1),
        (Entry::Packed, 3),
        (Entry::Device { wide: false }, 1),
    ] {
        let mut cases = [mixed_case(entry), mixed_case(entry)];
        cases[1].lengths.reverse();
        for (case, seed) in cases.iter_mut().zip([11, 12]) {
            case.seed = seed;
            case.spec.segments = Some(segments);
        }
        let data = cases.each_ref().map(Case::data);
        let expected = [0, 1].map(|i| run(&context, &cases[i], &data[i]));
        let [mut first, mut second] = [0, 1].map(|i| Loaded::new(&context, &cases[i], &data[i]));
        let rounds = if simulated(&context) { 2 } else { 40 };
        for _ in 0..rounds {
            first.launch(&cases[0], &stream).unwrap();
            first.swap_workspaces(&mut second);
            second.launch(&cases[1], &stream).unwrap();
            first.swap_workspaces(&mut second);
        }
        for (i, loaded) in [first, second].iter().enumerate() {
            let output = loaded.read(&cases[i], &stream);
            assert_same_bits(&expected[i], &output, "launches in a row");
        }
    }
}

/// Workgroups of prepare share the value heads of a key head where there is room for many, and one has all of them where
/// there is not: the same bits.
#[test]
fn value_heads_share_a_workgroup_or_do_not() {
    let context = context();
    let raw = GateKind::Raw {
        dtype: Dtype::Bf16,
        dt_bias: true,
        allow_neg_eigval: false,
    };
    for (key_heads, value_heads, head_map, gate_kind) in [
        (1, 6, HeadMap::Grouped, GateKind::Given),
        (2, 18, HeadMap::Grouped, raw),
        (2, 10, HeadMap::Tiled, GateKind::Given),
        (1, 3, HeadMap::Tiled, GateKind::NoBeta),
    ] {
        let mut case = mixed_case(Entry::Packed);
        case.spec = spec(Dtype::Bf16, key_heads, value_heads, 64, 48);
        case.spec.heads.map = head_map;
        case.spec.segments = Some(1);
        case.gate_kind = gate_kind;
        let data = case.data();
        let mut of_units = |units| {
            case.spec.compute_units = Some(units);
            run(&context, &case, &data)
        };
        // Room for a workgroup of each value head, for one of some, and for none but the first.
        let expected = of_units(304);
        for units in [8, 1] {
            assert_same_bits(&expected, &of_units(units), "workgroups of prepare");
        }
        check_output(&case, &data, &expected, 1.15);
    }
}

/// Survey 83: the workspace is exactly as large as said (the harness allocates no more, and the simulator faults on
/// the first byte past it), and a function of the shape alone.
#[test]
fn workspace_bytes_follow_the_shape() {
    let context = context();
    let s = spec(Dtype::Bf16, 2, 4, 64, 48);
    let bytes = |cu: &[i32], tokens| {
        Prefill::packed(&context, s, cu, tokens)
            .unwrap()
            .workspace_bytes()
    };
    assert_eq!(bytes(&[0, 10, 100], 100), bytes(&[0, 64, 99], 100));
    assert!(bytes(&[0, 100], 100) < bytes(&[0, 100], 1000));
    assert_eq!(bytes(&[0], 0), 0);
    let device = Prefill::device(&context, s, 100, 2).unwrap();
    assert!(device.workspace_bytes() > bytes(&[0, 10, 100], 100));
    // The worst case of chunks for tokens: every sequence ends just past a boundary.
    for lengths in [&[65, 65, 65, 65][..], &[1; 20], &[64, 1, 127, 1, 63, 66]] {
        let mut case = Case::new(spec(Dtype::Bf16, 1, 3, 16, 16), lengths);
        for entry in [Entry::Packed, Entry::Device { wide: true }] {
            case.entry = entry;
            let data = case.data();
            check_output(&case, &data, &run(&context, &case, &data), 1.15);
        }
    }
}

/// Survey 67 and 85: the same bits, run after run, while another stream works.
#[test]
fn runs_repeat_bit_by_bit() {
    let context = context();
    let case = mixed_case(Entry::Packed);
    let data = case.data();
    let expected = run(&context, &case, &data);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stream = context.stream().unwrap();
                let mut loaded = Loaded::new(&context, &case, &data);
                for _ in 0..7 {
                    loaded.poison(&stream);
                    loaded.launch(&case, &stream).unwrap();
                    assert_same_bits(&expected, &loaded.read(&case, &stream), "under load");
                }
            });
        }
    });
}

/// Two streams with their own workspaces, launches interleaved, one plan each.
#[test]
fn two_streams() {
    let context = context();
    let cases = [mixed_case(Entry::Packed), {
        let mut case = mixed_case(Entry::Device { wide: true });
        case.seed = 2;
        case.lengths = vec![100, 3];
        case
    }];
    let data = [cases[0].data(), cases[1].data()];
    let expected: Vec<Output> = (0..2).map(|i| run(&context, &cases[i], &data[i])).collect();
    let streams = [context.stream().unwrap(), context.stream().unwrap()];
    let mut loaded: Vec<Loaded> = (0..2)
        .map(|i| Loaded::new(&context, &cases[i], &data[i]))
        .collect();
    for _ in 0..3 {
        for i in 0..2 {
            loaded[i].poison(&streams[i]);
        }
        for i in 0..2 {
            loaded[i].launch(&cases[i], &streams[i]).unwrap();
        }
        for i in (0..2).rev() {
            let output = loaded[i].read(&cases[i], &streams[i]);
            assert_same_bits(&expected[i], &output, "two streams");
        }
    }
    // Ordered by an event: the second stream reads what the first one was told to compute.
    loaded[0].poison(&streams[0]);
    loaded[0].launch(&cases[0], &streams[0]).unwrap();
    let done = streams[0].record().unwrap();
    streams[1].wait(&done).unwrap();
    let output = loaded[0].read(&cases[0], &streams[1]);
    assert_same_bits(&expected[0], &output, "an event between streams");
}

/// Survey 78 and 80: a launch can be captured (so it neither waits, allocates nor reads back) and replayed with other
/// inputs, lengths included where they are on the device.
#[test]
fn graphs_replay_with_other_inputs() {
    let context = context();
    let stream = context.stream().unwrap();
    for entry in [Entry::Packed, Entry::Device { wide: false }] {
        let case = mixed_case(entry);
        let data = case.data();
        let mut loaded = Loaded::new(&context, &case, &data);
        loaded.poison(&stream);
        stream.synchronize().unwrap();
        let graph = stream.capture(|s| loaded.launch(&case, s)).unwrap();
        // Nothing ran yet.
        assert!(loaded.read(&case, &stream).o.iter().all(|x| x.is_nan()));
        for seed in [1, 7, 8] {
            let mut other = case.clone();
            other.seed = seed;
            let mut inputs = other.data();
            inputs.initial = case.data().initial;
            loaded.set_inputs(&inputs);
            loaded.poison(&stream);
            // SAFETY: `loaded` is alive until the stream has been read.
            unsafe { graph.launch(&stream).unwrap() };
            let replayed = loaded.read(&case, &stream);
            assert_same_bits(&run(&context, &case, &inputs), &replayed, "a replay");
            check_output(&case, &inputs, &replayed, 1.15);
        }
        if entry != Entry::Packed {
            let mut shorter = case.clone();
            shorter.lengths = vec![1, 130, 0, 64];
            shorter.padding = case.tokens() - 195;
            let mut inputs = case.data();
            inputs.cu_seqlens = shorter.cu_seqlens();
            loaded.set_inputs(&inputs);
            loaded.set_lengths(&inputs.cu_seqlens);
            loaded.poison(&stream);
            // SAFETY: as above.
            unsafe { graph.launch(&stream).unwrap() };
            let replayed = loaded.read(&case, &stream);
            assert_eq!(loaded.status(&stream), 0);
            check_output(&shorter, &inputs, &replayed, 1.15);
        }
    }
}

/// Survey 29: what passes from chunk to chunk and from kernel to kernel is in one domain: the second and third chunk
/// are as accurate as the first.
#[test]
fn later_chunks_are_as_accurate() {
    let context = context();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let mut case = Case::new(spec(dtype, 1, 4, 64, 64), &[192]);
        case.gates = Gates::Mixed;
        let data = case.data();
        let output = run(&context, &case, &data);
        let reference = deltawave_lab::oracle::prefill(&data.problem(&case)).unwrap();
        let row = 4 * 64;
        let limit = if dtype == Dtype::Bf16 { 5.5e-3 } else { 7e-4 };
        for chunk in 0..3 {
            let rows = chunk * 64 * row..(chunk + 1) * 64 * row;
            let c = deltawave_lab::metrics::compare(&output.o[rows.clone()], &reference.o[rows]);
            assert!(c.rms_ratio < limit, "chunk {chunk}: {c:?}");
        }
    }
}

/// A launch runs the kernels that the plan names, and no others.
#[test]
fn a_launch_is_two_kernels() {
    let context = context();
    let mut case = mixed_case(Entry::Packed);
    case.spec.path = PrefillPath::Split;
    let plan = Prefill::packed(&context, case.spec, &case.cu_seqlens(), case.tokens()).unwrap();
    assert_eq!(
        plan.kernels(),
        ["dw_prefill_prepare_bf16", "dw_prefill_scan_bf16_k64"]
    );
    let data = case.data();
    let output = run(&context, &case, &data);
    assert_eq!(bits(&output.o).len(), case.tokens() * 4 * 48);
    if simulated(&context) {
        let statistics = deltawave_sim::hip::statistics();
        for kernel in plan.kernels() {
            assert!(statistics[kernel].launches >= 2, "{kernel}");
        }
    }
}

/// The parts of a launch, one after the other, are the launch; a scan can be repeated, and is nothing without a
/// preparation.
#[test]
fn parts_make_the_whole() {
    let context = context();
    let stream = context.stream().unwrap();
    let mut case = mixed_case(Entry::Packed);
    case.spec.path = PrefillPath::Split;
    let data = case.data();
    let expected = run(&context, &case, &data);
    let mut loaded = Loaded::new(&context, &case, &data);
    loaded.poison(&stream);
    loaded.launch_part(&case, &stream, Part::Prepare).unwrap();
    // Of the outputs, a preparation writes none: there are no rows past the last sequence.
    assert!(loaded.read(&case, &stream).o.iter().all(|x| x.is_nan()));
    for _ in 0..2 {
        loaded.launch_part(&case, &stream, Part::Scan).unwrap();
        let output = loaded.read(&case, &stream);
        assert_same_bits(&expected, &output, "its parts");
    }
}

/// A panic while a stream is captured ends the capture: the device works on.
#[test]
fn a_panic_ends_the_capture() {
    let context = context();
    let stream = context.stream().unwrap();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = stream.capture(|_| panic!("on purpose"));
    }));
    assert!(panicked.is_err());
    stream.synchronize().unwrap();
    context.alloc::<u8>(16).unwrap();
}
