//! Layers whose lengths are on the device alone: the bits of layers whose lengths the host has, one graph for batches of
//! varying lengths, and lengths that are wrong.

#[path = "common/layer/mod.rs"]
mod cases;
mod common;

use cases::{Case, Data, Loaded, check, run};
use common::context;
use deltawave::ArgumentError;
use deltawave::Error;
use deltawave::layer::Layer;
use deltawave::layer::LayerSpec;
use deltawave::prefill::PrefillPath;
use deltawave::runtime::Context;
use deltawave::types::{Dtype, StateLayout};

/// Three decodes and three prefills, in 100 rows.
const SEQUENCES: usize = 6;
const DECODES: usize = 3;
const TOKENS: usize = 100;

fn case(spec: LayerSpec, lengths: &[usize]) -> Case {
    Case {
        tail: TOKENS - lengths.iter().sum::<usize>(),
        device: true,
        ..Case::new(spec, lengths, DECODES)
    }
}

#[test]
fn the_bits_of_lengths_on_the_host() {
    let context = context();
    let spec = LayerSpec::new(2, 4, 32, 128);
    let wide = LayerSpec {
        dtype: Dtype::F16,
        ..LayerSpec::new(1, 2, 48, 32)
    };
    let fused = LayerSpec {
        path: PrefillPath::Fused,
        ..spec
    };
    let cut = LayerSpec {
        segments: Some(2),
        ..fused
    };
    let split = LayerSpec {
        path: PrefillPath::Split,
        ..cut
    };
    // One long prefill leaves most of the device idle: the planner cuts it.
    let planned = LayerSpec::new(1, 1, 16, 16);
    for (spec, lengths, decodes, padding, has_slots) in [
        (spec, &[1, 1, 1, 70, 0, 5][..], 3, 0b00_0010, true),
        (wide, &[1, 65], 1, 0, false),
        (spec, &[3, 0, 66], 0, 0b100, true),
        (spec, &[1; 4], 4, 0b1000, true),
        (spec, &[1, 1, 0, 0], 2, 0, true),
        (wide, &[], 0, 0, true),
        (fused, &[1, 1, 1, 70, 0, 5], 3, 0b00_0010, true),
        (cut, &[1, 1, 200, 0, 65], 2, 0, true),
        (cut, &[3, 0, 130], 0, 0b100, true),
        (split, &[1, 1, 200, 0, 65], 2, 0, true),
        (planned, &[1, 1, 64 * 40 + 3, 0, 65], 2, 0b00_0010, true),
    ] {
        let device = Case {
            tail: lengths.len() % 3,
            has_slots,
            padding,
            device: true,
            ..Case::new(spec, lengths, decodes)
        };
        let host = Case {
            device: false,
            ..device.clone()
        };
        let data = Data::new(&host);
        assert!(run(&context, &device, &data) == run(&context, &host, &data));
    }
    check(&context, &case(spec, &[1, 1, 1, 33, 0, 64]));
}

/// Captured once, replayed for other lengths, slots, states and inputs: padding among the decodes, fewer prefills, none.
#[test]
fn one_graph_for_all_lengths() {
    let spec = LayerSpec::new(1, 2, 32, 48);
    one_graph(spec);
    let fused = LayerSpec {
        path: PrefillPath::Fused,
        ..spec
    };
    one_graph(fused);
    for path in [PrefillPath::Fused, PrefillPath::Split] {
        one_graph(LayerSpec {
            segments: Some(2),
            path,
            ..spec
        });
    }
}

fn one_graph(spec: LayerSpec) {
    let context = context();
    let first = case(spec, &[1, 1, 1, 0, 0, 0]);
    let stream = context.stream().unwrap();
    let mut loaded = Loaded::new(&context, &first, &Data::new(&first));
    let graph = stream.capture(|s| loaded.launch(&first, s)).unwrap();
    for (seed, lengths, padding) in [
        (2, [1, 1, 1, 97, 0, 0], 0),
        (3, [1, 1, 1, 20, 65, 3], 0b00_0110),
        (4, [1, 1, 1, 0, 1, 0], 0b11_0111),
        (5, [1, 1, 1, 0, 0, 0], 0b11_1000),
        (6, [1, 1, 1, 1, 1, 1], 0),
    ] {
        let next = Case {
            padding,
            has_initial: 0b1011_0110 >> (seed % 4),
            seed,
            ..case(spec, &lengths)
        };
        let data = Data::new(&next);
        loaded.replace(&next, &data);
        loaded.reset(&stream);
        // SAFETY: the plan and all that was captured are alive.
        unsafe { graph.launch(&stream) }.unwrap();
        assert_eq!(loaded.status(&stream), 0);
        let host = Case {
            device: false,
            ..next.clone()
        };
        let expected = run(&context, &host, &data);
        assert!(loaded.output(&next, &stream) == expected, "{next:?}");
    }
}

/// What is said of lengths that are wrong, and what they are replaced by.
#[test]
fn wrong_lengths_are_replaced_and_reported() {
    let context = context();
    let stream = context.stream().unwrap();
    let spec = LayerSpec::new(1, 1, 16, 16);
    for (given, replaced, status) in [
        ([0, 1, 2, 3, 9, 9, 90], [1, 1, 1, 6, 0, 81], 0),
        ([0, 2, 2, 3, 9, 9, 90], [1, 1, 1, 6, 0, 81], 2),
        ([5, 1, 2, 3, 9, 9, 90], [1, 1, 1, 6, 0, 81], 1),
        ([0, 1, 2, 4, 9, 9, 90], [1, 1, 1, 6, 0, 81], 4),
        ([0, 1, 2, 3, 1, 9, 90], [1, 1, 1, 0, 6, 81], 5),
        ([0, 1, 2, 3, 9, 4, 101], [1, 1, 1, 6, 0, 91], 6),
        ([0, 1, 2, 3, -7, i32::MAX, 9], [1, 1, 1, 0, 97, 0], 5),
    ] {
        let good = case(spec, &replaced);
        let data = Data::new(&good);
        let expected = run(&context, &good, &data);
        let mut loaded = Loaded::new(&context, &good, &data);
        loaded.set_lengths(&given);
        loaded.launch(&good, &stream).unwrap();
        assert_eq!(loaded.status(&stream), status, "{given:?}");
        assert!(loaded.output(&good, &stream) == expected, "{given:?}");
    }
}

/// More sequences than a wave has lanes, among decodes and prefills, and wrong lengths among the last ones.
#[test]
fn many_sequences() {
    let (context, decodes) = (context(), 90);
    let stream = context.stream().unwrap();
    let whole = LayerSpec::new(1, 2, 16, 16);
    let fused = LayerSpec {
        path: PrefillPath::Fused,
        ..whole
    };
    let cut = LayerSpec {
        segments: Some(3),
        ..fused
    };
    let split = LayerSpec {
        path: PrefillPath::Split,
        ..cut
    };
    for spec in [whole, fused, cut, split] {
        let prefills = (0..160).map(|n| if n % 61 == 7 { 150 } else { n * 5 % 4 });
        let lengths: Vec<usize> = std::iter::repeat_n(1, decodes).chain(prefills).collect();
        let tokens = lengths.iter().sum::<usize>() + 3;
        let given = Case::new(spec, &lengths, decodes).cu_seqlens();
        for wrong in [
            &[][..],
            &[(40, 39), (160, given[160] + 2), (200, -3)],
            &[(163, 1), (249, i32::MAX)],
        ] {
            let mut given = given.clone();
            for &(index, entry) in wrong {
                given[index] = entry;
            }
            let mut replaced: Vec<i32> = (0..=decodes as i32).collect();
            for &entry in &given[decodes + 1..] {
                let before = replaced[replaced.len() - 1];
                replaced.push(entry.clamp(before, tokens as i32));
            }
            let lengths: Vec<usize> = (replaced.windows(2))
                .map(|pair| (pair[1] - pair[0]) as usize)
                .collect();
            let good = Case {
                tail: tokens - lengths.iter().sum::<usize>(),
                device: true,
                padding: 0b00_0010,
                ..Case::new(spec, &lengths, decodes)
            };
            let data = Data::new(&good);
            let mut loaded = Loaded::new(&context, &good, &data);
            loaded.set_lengths(&given);
            loaded.launch(&good, &stream).unwrap();
            let bad = given.iter().zip(&replaced).position(|(a, b)| a != b);
            assert_eq!(loaded.status(&stream), bad.map_or(0, |i| 1 + i as u32));
            let host = Case {
                device: false,
                ..good.clone()
            };
            let expected = run(&context, &host, &data);
            assert!(
                loaded.output(&good, &stream) == expected,
                "{spec:?} {wrong:?}"
            );
        }
    }
}

#[test]
fn kernels_and_refusals() {
    let context = context();
    let spec = LayerSpec::new(16, 32, 128, 128);
    let kernels = |decodes| {
        let plan = Layer::device(&context, spec, TOKENS, SEQUENCES, decodes).unwrap();
        plan.kernels(Dtype::F32, StateLayout::KeyMajor).len()
    };
    // Also on CDNA, where the device chooses between two paths of prefill.
    assert_eq!([kernels(0), kernels(DECODES)], [4, 5]);
    for (argument, spec, sequences, decodes) in [
        ("decodes", spec, 2, 3),
        ("decodes", spec, 200, 101),
        ("eps", LayerSpec { eps: -1.0, ..spec }, 2, 1),
    ] {
        assert_eq!(refused(&context, spec, sequences, decodes), argument);
    }
}

/// The argument that a plan is refused for.
fn refused(context: &Context, spec: LayerSpec, sequences: usize, decodes: usize) -> String {
    match Layer::device(context, spec, TOKENS, sequences, decodes) {
        Err(Error::Argument(ArgumentError { argument, .. })) => argument,
        other => panic!("{other:?}"),
    }
}
