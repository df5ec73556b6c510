//! Tests of the planner of segments.

use proptest::collection::vec;
use proptest::prelude::*;

use super::machine::{Cost, Profile, Short};
use super::*;
use crate::kernels::{Costs, KernelCost, Target};

static COSTS: Costs = costs(1.03);

const fn costs(fewer: f64) -> Costs {
    Costs {
        scan: KernelCost {
            chunk: 4.0,
            chunk_shared: 5.0,
            residency: 2,
        },
        summarise: KernelCost {
            chunk: 3.0,
            chunk_shared: 4.0,
            residency: 2,
        },
        combine: 1.0,
        launch: 5.0,
        combine_launch: 5.0,
        shared_start: 0.0,
        worthwhile: 0.85,
        summarised: 1.0,
        early_starts: false,
        starts_soon: false,
        two_pieces: None,
        fewer,
        fills: false,
    }
}

/// A device of `compute_units` compute units, and `heads` value heads of 128 by 128.
fn machine(compute_units: usize, heads: usize) -> Machine {
    machine_of(&COSTS, compute_units, heads)
}

fn machine_of(costs: &Costs, compute_units: usize, heads: usize) -> Machine {
    let most = MOST_SUMMARY_BYTES / (heads << 17);
    Machine::new(compute_units, costs, [heads, 2 * heads, 8 * heads], most)
}

fn choose(lengths: &[usize], machine: &Machine) -> usize {
    machine.choose(lengths)
}

#[test]
fn every_chunk_is_in_one_segment() {
    let lengths = [5, 0, 12, 1, 13, 24, 4];
    for (segment, pieces) in (1..=30).flat_map(|segment| [(segment, 1), (segment, 2)]) {
        let cut = cut(&lengths, Cut::Chunks(segment), pieces);
        let mut covered: Vec<Vec<bool>> = lengths.iter().map(|&n| vec![false; n]).collect();
        for item in &cut.items {
            let chunks = &mut covered[item.sequence as usize];
            for chunk in item.first_chunk..item.first_chunk + item.chunks {
                assert!(!std::mem::replace(&mut chunks[chunk as usize], true));
            }
            assert!(item.chunks as usize <= segment);
        }
        assert!(covered.iter().flatten().all(|&c| c), "{segment}");
        // Every sequence, empty ones included, ends in exactly one item.
        let ends = |n: usize| {
            let ending = |i: &&dwk_prefill_item| i.sequence as usize == n;
            let mut items = cut.items.iter().filter(ending);
            items.any(|i| (i.first_chunk + i.chunks) as usize == lengths[n])
        };
        assert!((0..lengths.len()).all(ends), "{segment}");
        // `counts` agrees with the division.
        let (made, known) = (cut.counts(), counts(&lengths, Cut::Chunks(segment), pieces));
        let numbers = |c: Counts| (c.items, c.summaries, c.pieces, c.chains, c.even);
        assert_eq!(numbers(made), numbers(known));
    }
}

#[test]
fn even_batches_are_found() {
    for (chunks, segment, even) in [
        (&[5, 5, 5][..], 5, true),
        (&[5, 5, 5], 9, true),
        (&[5, 5, 4], 5, false),
        (&[5, 0, 5], 5, false),
        (&[4, 4], 2, false), // cut
        (&[7], 7, true),
        (&[], 1, true),
    ] {
        assert_eq!(
            counts(chunks, Cut::Chunks(segment), 1).even,
            even,
            "{chunks:?}"
        );
        assert_eq!(cut(chunks, Cut::Chunks(segment), 1).counts().even, even);
    }
}

#[test]
fn summaries_follow_each_other() {
    for pieces in [1, 2, 3] {
        let cut = cut(&[5, 2, 0, 6, 4, 1], Cut::Chunks(2), pieces);
        let followed = cut.summaries / pieces;
        // Segments that another follows are first, and segment i has the summaries from i * pieces on.
        for (at, item) in cut.items[..followed].iter().enumerate() {
            assert_eq!((item.summary as usize, item.chunks), (at * pieces, 2));
        }
        for item in &cut.items[followed..] {
            if item.first_chunk > 0 {
                let before = &cut.items[item.summary as usize / pieces - 1];
                assert_eq!(before.sequence, item.sequence);
                assert_eq!(before.first_chunk + before.chunks, item.first_chunk);
            }
        }
        assert_eq!(followed, 2 + 2 + 1);
        // The sequence of two segments has one summary and needs no combine, unless that is made in pieces.
        let n = pieces as i32;
        let chains = [[0, 2 * n], [2 * n, 2 * n], [4 * n, n]];
        assert_eq!(cut.chains, chains[..if pieces > 1 { 3 } else { 2 }]);
        let rest: Vec<i32> = cut.items[followed..].iter().map(|i| i.chunks).collect();
        assert!(rest.is_sorted_by(|a, b| a >= b), "{rest:?}");
    }
}

#[test]
fn what_is_uploaded() {
    let cut = cut(&[3], Cut::Chunks(1), 1);
    let table = cut.table(&[0, 130]);
    let counts = cut.counts();
    assert_eq!((counts.items, counts.summaries, counts.chains), (3, 2, 1));
    assert_eq!(table[..8], [0, 0, 1, 0, 0, 1, 1, 1]);
    assert_eq!(table[8..], [0, 2, 1, 2, 0, 2, 0, 130]);
}

#[test]
fn segments_are_as_asked() {
    assert_eq!(segment_chunks(&[100, 7], 8), 13);
    assert_eq!(segment_chunks(&[100, 7], 1), 100);
    assert_eq!(segment_chunks(&[3], 100), 1);
    assert_eq!(segment_chunks(&[0, 0], 4), 1);
    assert_eq!(segment_chunks(&[], 4), 1);
}

/// When shorter sequences have ended, the longest one has its compute unit for itself.
#[test]
fn a_long_sequence_beside_short_ones_is_walked_alone() {
    let machine = machine(100, 40);
    let time = |lengths: &[usize]| {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let profile = Profile::of(lengths.iter().map(|&n| (n, 1)), longest);
        machine.scan(lengths.len(), &profile, lengths.iter().sum())
    };
    // 40 workgroups are alone, 120 share: 4 and 5 us a chunk.
    assert_eq!(time(&[64]), 64 * 4000);
    assert_eq!(time(&[64, 64, 64]), 64 * 5000);
    assert_eq!(time(&[64, 32, 32]), 32 * 5000 + 32 * 4000);
    assert_eq!(time(&[64, 7, 0]), 64 * 4000);
    assert_eq!(time(&[3, 3, 1]), 3 * (2 * 5000 + 6 * 4000) / 8);
    assert_eq!(time(&[]), 0);
    assert_eq!(time(&[0, 0]), 0);
}

#[test]
fn a_full_device_cuts_nothing() {
    assert_eq!(choose(&[128; 40], &machine(304, 32)), 1);
    assert_eq!(choose(&[512], &machine(304, 700)), 1);
    assert_eq!(choose(&[], &machine(304, 8)), 1);
    assert_eq!(choose(&[0, 0], &machine(304, 8)), 1);
    // Too short to be worth two more kernels.
    assert_eq!(choose(&[4, 3], &machine(304, 8)), 1);
}

#[test]
fn an_idle_device_cuts_long_sequences() {
    let few = choose(&[512], &machine(304, 8));
    assert!((16..=128).contains(&few), "{few}");
    // More heads leave less of the device idle.
    let more = choose(&[512], &machine(304, 64));
    assert!((2..few).contains(&more), "{more} of {few}");
    // A smaller device gains less.
    assert!(choose(&[512], &machine(80, 8)) < few);
    // One long sequence among many short ones.
    let mut lengths = vec![2; 60];
    lengths.push(512);
    let segments = choose(&lengths, &machine(304, 8));
    assert!(segments >= 8, "{segments}");
    let segment = segment_chunks(&lengths, segments);
    let items = cut(&lengths, Cut::Chunks(segment), 1).items.len();
    assert_eq!(items, 60 + 512usize.div_ceil(segment));
}

#[test]
fn summaries_take_bounded_memory() {
    let mut machine = machine(304, 8);
    let lengths = [4096; 4];
    let many = choose(&lengths, &machine);
    machine.most_summaries = 8;
    let few = choose(&lengths, &machine);
    assert!(1 < few && few < many, "{few} of {many}");
    let cut = Cut::Chunks(segment_chunks(&lengths, few));
    assert!(counts(&lengths, cut, 1).summaries <= 8);
    machine.most_summaries = 1;
    assert_eq!(choose(&lengths, &machine), 1);
}

#[test]
fn a_choice_costs_no_more_than_none() {
    for heads in [1, 3, 8, 32, 64] {
        for lengths in [&[16][..], &[128, 70, 3], &[512; 4], &[1000, 10]] {
            let machine = machine(304, heads);
            let cost = |s| cost(lengths, &machine, s).ns;
            let chosen = choose(lengths, &machine);
            assert!(cost(chosen) <= cost(1), "{heads} heads, {lengths:?}");
            assert_eq!(chosen, choose(lengths, &machine));
        }
    }
}

/// Modelled cost if the longest sequence has `segments` segments.
fn cost(lengths: &[usize], machine: &Machine, segments: usize) -> Cost {
    let segment = segment_chunks(lengths, segments);
    let mut long = lengths.to_vec();
    long.sort_unstable_by(|a, b| b.cmp(a));
    machine.cost(&long, &Short::default(), lengths.iter().sum(), segment)
}

/// Best number of segments by exhaustive search, as [`Machine::choose`] specifies it.
fn best(lengths: &[usize], machine: &Machine) -> usize {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let affordable: Vec<(usize, i64)> = (machine.candidates(lengths.len(), longest))
        .map(|s| (s, cost(lengths, machine, s)))
        .filter(|(_, c)| c.summaries <= machine.most_summaries as usize)
        .map(|(s, c)| (s, c.ns))
        .collect();
    let least = affordable.iter().map(|&(_, ns)| ns).min();
    let fewer = least.unwrap_or_default() * i64::from(machine.fewer);
    let most = fewer.min(cost(lengths, machine, 1).ns * i64::from(machine.worthwhile));
    let chosen = affordable.into_iter().find(|&(_, ns)| 1024 * ns <= most);
    chosen.map_or(1, |(segments, _)| segments)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_not_tried_would_not_be_chosen(
        arch in prop_oneof![Just("gfx942"), Just("sm_90a")],
        (compute_units, heads) in (prop_oneof![Just(80), Just(132), Just(304)], 1usize..12),
        longest in 1usize..3000,
        others in (0u32..12).prop_flat_map(|bits| vec(0..=1usize << bits, 0..200)),
    ) {
        let machine = machine_of(&Target::of(arch).costs, compute_units, heads);
        let mut lengths = others;
        lengths.insert(lengths.len() / 2, longest);
        prop_assert_eq!(choose(&lengths, &machine), best(&lengths, &machine));
    }
}

#[test]
fn fewer_segments_may_take_a_little_longer() {
    static PATIENT: Costs = costs(1.5);
    let lengths = [512];
    let segments = choose(&lengths, &machine(304, 8));
    let machine = machine_of(&PATIENT, 304, 8);
    let fewer = choose(&lengths, &machine);
    let cost = |s| cost(&lengths, &machine, s).ns;
    assert!(1 < fewer && fewer < segments, "{fewer} of {segments}");
    assert!(2 * cost(fewer) <= 3 * cost(segments));
}

/// On an MI300X, gates that forget make summaries cheap, and gates that do not cost 4% more than without segments.
#[test]
fn summaries_are_expected_to_forget() {
    // Nine segments of (2,8) x 32768 fill the device.
    for (heads, segments, chunks) in [(32, 2, 128), (16, 4, 128), (8, 9, 512)] {
        let workgroups = [4 * heads, 8 * heads, 8 * heads];
        let most = MOST_SUMMARY_BYTES / (heads << 17);
        let machine = Machine::new(304, &Target::of("gfx942").costs, workgroups, most);
        assert_eq!(choose(&[chunks], &machine), segments, "{heads} heads");
    }
}

#[test]
fn two_workgroups_in_one_where_not_all_fit_alone() {
    let cost = KernelCost {
        chunk: 5.0,
        chunk_shared: 9.0,
        residency: 2,
    };
    let even = |segments: usize| two_in_one(&cost, 132, segments, [2, 1], 64, 64 * segments);
    for (segments, shared) in [
        (1, false),
        (66, false),
        (80, true),
        (128, true),
        (132, true),
    ] {
        assert_eq!(even(segments), shared, "{segments}");
    }
    // Three slabs become two wide ones, in two rounds of 18 us a chunk. Narrow ones take two rounds of 5 us.
    assert!(!two_in_one(&cost, 132, 88, [3, 2], 64, 64 * 88));
    // The longest sequence dominates, and a wide workgroup takes longer per chunk.
    assert!(!two_in_one(&cost, 132, 132, [2, 1], 640, 640 + 131));
}

fn balance(compute_units: i32, workgroups: i32) -> Balance {
    Balance {
        workgroups,
        compute_units,
        most_summaries: 1 << 20,
        least_chunks: 8,
        start: 32,
        warm_up: 48,
        summaries: 40,
        worthwhile: 15,
    }
}

/// Segments that a balance makes of lengths.
fn segments_of(balance: &Balance, lengths: &[usize]) -> Partition {
    cut(lengths, Cut::AtMost(balance.choose(lengths).0), 1)
}

#[test]
fn a_balance_fills_rounds_of_the_device() {
    // 64 heads on 304 units: 4 segments fill 84%, 19 fill four rounds exactly.
    let whole = segments_of(&balance(304, 64), &[512]);
    assert!(
        [4, 9, 14, 19].contains(&whole.items.len()),
        "{}",
        whole.items.len()
    );
    assert!((whole.items.iter()).all(|i| i.chunks <= 128));
    // 8 heads: 38 segments would be 14 chunks each.
    assert_eq!(segments_of(&balance(304, 8), &[512]).items.len(), 37);
    // A full device, and sequences too short to be cut.
    assert_eq!(segments_of(&balance(132, 32), &[64; 33]).summaries, 0);
    assert_eq!(segments_of(&balance(132, 8), &[8, 3, 0]).summaries, 0);
    assert_eq!(segments_of(&balance(132, 8), &[]).items.len(), 0);
    // One long sequence among short ones is cut. They are not.
    let mut lengths = vec![2; 40];
    lengths.push(500);
    let cut = segments_of(&balance(132, 8), &lengths);
    assert!(cut.summaries >= 4, "{}", cut.summaries);
    assert!(cut.items[..cut.summaries].iter().all(|i| i.sequence == 40));
}

#[test]
fn a_sequence_is_cut_evenly() {
    for (chunks, most, each) in [(65, 16, 13), (64, 16, 16), (9, 4, 3), (1, 8, 1), (0, 8, 1)] {
        assert_eq!(
            Cut::AtMost(most).segment(chunks),
            each,
            "{chunks} by {most}"
        );
    }
    for (chunks, segments, each) in [(7, 4, 2), (3, 9, 1), (0, 2, 1), (100, 1, 100)] {
        assert_eq!(Cut::Segments(segments).segment(chunks), each);
    }
}

proptest! {
    #[test]
    fn a_balance_keeps_its_bounds(
        units in 1i32..400,
        workgroups in 1i32..200,
        most_summaries in 0i32..60,
        tokens in vec(prop_oneof![0usize..300, 0usize..60_000], 0..40),
    ) {
        let balance = Balance { most_summaries, ..balance(units, workgroups) };
        let lengths: Vec<usize> = tokens.iter().map(|n| n.div_ceil(CHUNK)).collect();
        let (longest, cost) = balance.choose(&lengths);
        let cut = cut(&lengths, Cut::AtMost(longest), 1);
        // Lists that the device makes have room for this.
        prop_assert!(cut.summaries <= balance.most_summaries(tokens.iter().sum()));
        prop_assert!(cut.chains.len() <= (cut.summaries / 2).min(lengths.len()));
        prop_assert!(cut.summaries == 0 || longest >= 8);
        // Cutting costs no more than not cutting.
        let uncut = Balance { most_summaries: 0, ..balance }.choose(&lengths).1;
        prop_assert!(cost <= uncut, "{cost}, uncut {uncut}");
    }
}
