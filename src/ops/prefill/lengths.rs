//! Lengths that only the device knows. A kernel of one workgroup checks them there before other kernels index with them,
//! divides sequences into segments, and chooses between the fused path and the split path.

use std::ffi::c_void;
use std::ptr;

use super::plan::{self, Balance, Choice, Counts, Machine, Uneven};
use crate::abi::{
    dwk_prefill_choice, dwk_prefill_item, dwk_prefill_lengths_args, dwk_prefill_machine,
    dwk_prefill_plan,
};
use crate::batch::CuSeqlens;
use crate::check::{self, Checked};
use crate::error::Result;
use crate::kernels;
use crate::runtime::{Context, Stream};
use crate::workspace::WORKSPACE_ALIGN;

/// Bytes of the workspace before the checked lengths: the status word.
const STATUS_BYTES: usize = WORKSPACE_ALIGN;

/// Lengths of `sequences` sequences in `tokens` tokens. The first `decodes` sequences have one token each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLengths {
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
    /// At most `sequences`, and at most `tokens`.
    pub(crate) decodes: usize,
    /// Segments of the sequences after the decodes, if the device divides them.
    pub(crate) segments: Option<DeviceSegments>,
}

/// How the device divides sequences into segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceSegments {
    /// Bounds for all lengths.
    pub(super) most: Counts,
    /// Segments of each sequence; 0: the device chooses.
    pub(super) segments: i32,
    pub(super) rule: Rule,
    /// Whether and how the device chooses the path. On the fused path it then cuts no sequence, unless gates may choose.
    pub(super) choice: Option<Choice>,
    /// How the device cuts the segments that gates may choose, with a `choice`.
    pub(super) uneven: Option<Uneven>,
    /// Nanoseconds for final states that wait, where gates choose.
    pub(super) wait_time: i32,
}

/// Rule by which the device cuts sequences, if their number of segments is not given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rule {
    /// Rule of the fused path.
    Balance(Balance),
    /// Rule of the split path. `halves`: whether two segments of a sequence may need no summaries.
    Machine { machine: Machine, halves: bool },
}

/// Device addresses of checked lengths and of lists of segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceTables {
    pub(super) cu_seqlens: *const i32,
    /// Null: every sequence is one item.
    pub(super) items: *const dwk_prefill_item,
    pub(super) chains: *mut i32,
    /// Null unless the device chooses the path; `items` is then the fused path's list.
    pub(super) split_items: *mut dwk_prefill_item,
    /// Samples of gates, as in [`dwk_prefill_by_gates`](crate::abi::dwk_prefill_by_gates); null: gates choose nothing.
    pub(super) samples: *const i32,
}

/// Bytes of the samples of gates.
const SAMPLE_BYTES: usize =
    (plan::SAMPLE_WORDS * size_of::<i32>()).next_multiple_of(WORKSPACE_ALIGN);

fn item_bytes(items: usize) -> usize {
    let bytes = items * plan::ITEM_WORDS * size_of::<i32>();
    bytes.next_multiple_of(WORKSPACE_ALIGN)
}

impl DeviceSegments {
    fn chain_bytes(&self) -> usize {
        let bytes = self.most.chains as usize * plan::CHAIN_WORDS * size_of::<i32>();
        bytes.next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Items of the fused path, of so many sequences.
    fn fused_items(&self, sequences: usize) -> usize {
        sequences + self.uneven.map_or(0, |uneven| uneven.room())
    }

    /// Bytes of all lists of so many sequences: chains, items and, if the device chooses the path, samples and the fused
    /// path's items.
    fn bytes(&self, sequences: usize) -> usize {
        let of_choice = (self.choice).map_or(0, |_| {
            SAMPLE_BYTES + item_bytes(self.fused_items(sequences))
        });
        self.chain_bytes() + item_bytes(self.most.items) + of_choice
    }

    /// Kernel arguments with the lists at an address. `waits`: whether final states wait where gates choose.
    fn lower(&self, address: *mut c_void, waits: bool) -> (dwk_prefill_plan, dwk_prefill_choice) {
        let items = address.wrapping_byte_add(self.chain_bytes());
        let samples = items.wrapping_byte_add(item_bytes(self.most.items));
        let after = samples.wrapping_byte_add(SAMPLE_BYTES);
        let mut plan = dwk_prefill_plan {
            items: items.cast(),
            chains: address.cast(),
            items_count: self.most.items as i32,
            chains_count: self.most.chains as i32,
            segments: self.segments,
            pieces: self.most.pieces as i32,
            ..match &self.rule {
                Rule::Balance(balance) => balance.lower(),
                Rule::Machine { .. } => dwk_prefill_plan::default(),
            }
        };
        let Some(choice) = &self.choice else {
            return (plan, dwk_prefill_choice::default());
        };
        plan.items = after.cast();
        let choice = dwk_prefill_choice {
            split_items: items.cast(),
            ..choice.lower()
        };
        let choice = match self.uneven {
            None => choice,
            Some(uneven) => dwk_prefill_choice {
                samples: samples.cast(),
                room: uneven.room() as i32,
                least_chunks: uneven.least_chunks,
                start: uneven.start,
                warm_up: uneven.warm_up,
                least_time: plan::LEAST_TIME,
                without_work: plan::WITHOUT_WORK,
                wait_time: if waits { self.wait_time } else { 0 },
                ..choice
            },
        };
        (plan, choice)
    }

    fn lower_machine(&self) -> dwk_prefill_machine {
        match &self.rule {
            Rule::Balance(_) => dwk_prefill_machine::default(),
            Rule::Machine { machine, halves } => dwk_prefill_machine {
                halves: i32::from(*halves),
                ..machine.lower()
            },
        }
    }
}

/// The arguments of a launch.
pub(crate) struct LaunchArguments(dwk_prefill_lengths_args);

impl DeviceLengths {
    fn checked_bytes(&self) -> usize {
        ((self.sequences + 1) * 4).next_multiple_of(WORKSPACE_ALIGN)
    }

    fn rest_bytes(&self) -> usize {
        match self.decodes {
            0 => 0,
            decodes => ((self.sequences - decodes + 1) * 4).next_multiple_of(WORKSPACE_ALIGN),
        }
    }

    /// Bytes of workspace: the status word, the checked lengths and the lists of segments.
    pub(crate) fn bytes(&self) -> usize {
        let rest = self.sequences - self.decodes;
        let lists = (self.segments.as_ref()).map_or(0, |segments| segments.bytes(rest));
        STATUS_BYTES + self.checked_bytes() + self.rest_bytes() + lists
    }

    /// Checks the lengths' tensor and returns the launch arguments, with workspace at an address. `in_place`: whether final
    /// states may overwrite initial ones.
    pub(crate) fn lower(
        &self,
        context: &Context,
        cu_seqlens: &CuSeqlens<'_>,
        workspace: *mut c_void,
        in_place: bool,
    ) -> Checked<LaunchArguments> {
        check::device("cu_seqlens", cu_seqlens.owner(), context)?;
        let (lengths, wide) = cu_seqlens.checked(self.sequences)?;
        let checked = workspace.wrapping_byte_add(STATUS_BYTES);
        let rest = match self.decodes {
            0 => ptr::null_mut(),
            _ => checked.wrapping_byte_add(self.checked_bytes()),
        };
        let lists = checked
            .wrapping_byte_add(self.checked_bytes())
            .wrapping_byte_add(self.rest_bytes());
        let segments = self.segments.as_ref();
        let (plan, choice) = (segments.map(|s| s.lower(lists, in_place))).unwrap_or_default();
        Ok(LaunchArguments(dwk_prefill_lengths_args {
            cu_seqlens: lengths,
            checked: checked.cast(),
            status: workspace.cast(),
            rest: rest.cast(),
            sequences: self.sequences as i32,
            tokens: self.tokens as i32,
            wide: i32::from(wide),
            decodes: self.decodes as i32,
            plan,
            choice,
            machine: (segments.map(DeviceSegments::lower_machine)).unwrap_or_default(),
        }))
    }
}

impl LaunchArguments {
    /// The kernel's arguments, for a kernel that does the same beside other work.
    pub(crate) fn arguments(&self) -> dwk_prefill_lengths_args {
        self.0
    }

    /// `cu_seqlens` of all sequences, which the launch writes.
    pub(crate) fn checked(&self) -> *const i32 {
        self.0.checked
    }

    /// Tables of the sequences after the decodes, whose `cu_seqlens` count from 0.
    pub(crate) fn tables(&self) -> DeviceTables {
        DeviceTables {
            cu_seqlens: match self.0.decodes {
                0 => self.0.checked,
                _ => self.0.rest,
            },
            items: self.0.plan.items,
            chains: self.0.plan.chains,
            split_items: self.0.choice.split_items,
            samples: self.0.choice.samples,
        }
    }

    /// Enqueues the kernel on the current device.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<()> {
        let kernel = kernels::prefill_lengths();
        let threads = context.target().threads(kernel.role());
        // SAFETY: the caller of `lower` vouches for the workspace; lengths are borrowed, or callers of `from_raw`
        // vouch.
        unsafe { context.launch(stream, kernel, 1, threads, &self.0) }
    }
}

#[cfg(all(test, feature = "simulator"))]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::plan::Cut;
    use super::super::shape::tests::shape;
    use super::*;
    use crate::abi::DWK_ITEM_HALF;
    use crate::kernels::Target;
    use crate::tensor::Batch;

    /// Memory after a launch: status, items, chains, and the items of the other path.
    struct Lists {
        status: i32,
        items: Vec<[i32; 4]>,
        chains: Vec<[i32; 2]>,
        others: Vec<[i32; 4]>,
        /// Words of the samples of gates.
        samples: Vec<i32>,
    }

    fn made_by(lengths: &DeviceLengths, cu_seqlens: &[i32], in_place: bool) -> Result<Lists> {
        let context = Context::simulator()?;
        let stream = context.stream()?;
        let given = context.upload(cu_seqlens)?;
        let memory = context.upload(&vec![0x55_i32; lengths.bytes() / 4])?;
        let lowered = lengths.lower(&context, &(&given).into(), memory.address(), in_place)?;
        lowered.enqueue(&context, &stream)?;
        let words = memory.download(&stream)?;
        let at =
            |pointer: *const c_void| (pointer.addr() - memory.address().addr()) / size_of::<i32>();
        let items = |pointer: *const dwk_prefill_item, count: usize| {
            let found = &words[at(pointer.cast())..][..count * plan::ITEM_WORDS];
            found.as_chunks().0.to_vec()
        };
        let most = lengths.segments.expect("lists").most;
        let (plan, choice) = (lowered.0.plan, lowered.0.choice);
        let whole = lengths.sequences - lengths.decodes;
        let of_fused = lengths.segments.expect("lists").fused_items(whole);
        let chains = &words[at(plan.chains.cast())..][..2 * most.chains as usize];
        Ok(Lists {
            status: words[0],
            chains: chains.as_chunks().0.to_vec(),
            items: match choice.split_items.is_null() {
                true => items(plan.items, most.items),
                false => items(choice.split_items, most.items),
            },
            others: match choice.split_items.is_null() {
                true => Vec::new(),
                false => items(plan.items, of_fused),
            },
            samples: match choice.samples.is_null() {
                true => Vec::new(),
                false => words[at(choice.samples.cast())..][..plan::SAMPLE_WORDS].to_vec(),
            },
        })
    }

    /// Checks that a list holds the host's items, and ends with none: those that another follows in the same order, the
    /// others in any.
    fn assert_lists(
        found: &[[i32; 4]],
        chains: &[[i32; 2]],
        expected: &plan::Partition,
        halves: bool,
    ) {
        let longest_chain = expected
            .chains
            .iter()
            .map(|chain| chain[1])
            .max()
            .unwrap_or(0);
        let half = match halves && longest_chain <= expected.pieces as i32 {
            true => DWK_ITEM_HALF as i32,
            false => 0,
        };
        let of_host =
            |item: &dwk_prefill_item| [item.sequence, item.first_chunk, item.chunks, item.summary];
        let mut items: Vec<_> = expected.items.iter().map(of_host).collect();
        let (made, ended) = found.split_at(items.len());
        assert!(ended.iter().all(|item| item[0] == -1), "{ended:?}");
        let is_cut = |sequence: i32| items.iter().filter(|i| i[0] == sequence).count() > 1;
        let mut made: Vec<_> = (made.iter())
            .map(|&[sequence, first, chunks, summary]| {
                let bit = if is_cut(sequence) {
                    half
                } else {
                    summary & DWK_ITEM_HALF as i32
                };
                [sequence, first, chunks, summary ^ bit]
            })
            .collect();
        let followed = expected.summaries / expected.pieces as usize;
        assert_eq!(made[..followed], items[..followed]);
        made.sort_unstable();
        items.sort_unstable();
        assert_eq!(made, items);
        let (made, ended) = chains.split_at(expected.chains.len());
        assert_eq!(made, expected.chains);
        assert!(ended.iter().all(|chain| *chain == [0, 0]), "{ended:?}");
    }

    fn most_of(machine: &Machine, sequences: usize, pieces: usize) -> Counts {
        let followed = machine.most_summaries as usize;
        Counts {
            items: sequences + followed,
            summaries: followed * pieces,
            pieces: pieces as u32,
            chains: (followed * pieces / 2).min(sequences) as u32,
            longest_chunks: 0,
            even: false,
            short: 0,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Also with the costs of other targets, whose kernels the simulator cannot run.
        #[test]
        fn the_device_makes_the_lists_of_the_host(
            arch in prop_oneof![Just("gfx942"), Just("sm_90a")],
            compute_units in prop_oneof![Just(16usize), Just(80), Just(132), Just(304)],
            heads in prop_oneof![1usize..5, Just(16), Just(32)],
            lengths in prop_oneof![
                vec(prop_oneof![0usize..100, 0usize..3000, 2000usize..200_000], 0..12),
                vec(prop_oneof![9 => 0usize..400, 1 => 0usize..60_000], 50..140),
            ],
            (padding, decodes) in (0usize..300, prop_oneof![Just(0usize), 1usize..9]),
            (halves, chooses, by_gates, pieces) in (any::<bool>(), any::<bool>(), any::<bool>(), 1usize..3),
        ) {
            let (rows, sequences) = (lengths.iter().sum::<usize>() + padding, lengths.len());
            let workgroups = [2 * heads, 4 * heads, 8 * heads];
            let machine = Machine::new(compute_units, &Target::of(arch).costs, workgroups, 1 << 12)
                .bounded(rows.div_ceil(super::super::CHUNK), sequences);
            let walk = |chunk, start| plan::WalkTime { workgroups: heads as i32, chunk, start };
            let choice = Choice {
                compute_units: compute_units as i32,
                fused: walk(4610, 11_000),
                cut_chunk: 5200,
                scan: walk(1000, 5500),
                prepare_start: 14_200,
                prepare_chunk: 1300 * heads as i32,
            };
            let uneven = Uneven {
                workgroups: heads as i32,
                compute_units: compute_units as i32,
                least_chunks: 8,
                start: 53,
                warm_up: 20,
            };
            let uneven = Some(uneven).filter(|uneven| {
                chooses && by_gates && sequences <= Uneven::MOST_SEQUENCES && uneven.room() > 0
            });
            let device = DeviceLengths {
                sequences: sequences + decodes,
                tokens: rows + decodes,
                decodes,
                segments: Some(DeviceSegments {
                    most: most_of(&machine, sequences, pieces),
                    segments: 0,
                    rule: Rule::Machine { machine, halves },
                    choice: chooses.then_some(choice),
                    uneven,
                    wait_time: 0,
                }),
            };
            let mut cu_seqlens: Vec<i32> = (0..=decodes as i32).collect();
            for n in &lengths {
                cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *n as i32);
            }
            let lists = made_by(&device, &cu_seqlens, false).expect("a launch");
            prop_assert_eq!(lists.status, 0);
            let chunks = plan::chunks_of(&cu_seqlens[decodes..]);
            let segments = machine.choose(&chunks);
            let split = plan::cut(&chunks, Cut::Chunks(plan::segment_chunks(&chunks, segments)), pieces);
            prop_assert!(split.summaries / pieces <= machine.most_summaries as usize);
            let fused = chooses && choice.takes_fused(&chunks);
            let nothing = plan::Partition::default();
            match fused {
                true => assert_lists(&lists.items, &lists.chains, &nothing, false),
                false => assert_lists(&lists.items, &lists.chains, &split, halves),
            }
            let cut = uneven.and_then(|uneven| plan::segments_by_gates(&uneven, &choice, &machine, &chunks, 0));
            let cut = cut.map(|(segments, _)| segments);
            let whole = match fused {
                true => plan::cut(&chunks, Cut::Segments(1), 1),
                false => nothing,
            };
            let items = cut.map(|segments| segments.items);
            if uneven.is_some() {
                let cu_seqlens: Vec<i32> = cu_seqlens[decodes..].iter().map(|n| n - decodes as i32).collect();
                let expected = plan::samples(items.as_deref().unwrap_or_default(), !fused, &cu_seqlens);
                prop_assert_eq!(&lists.samples[..1], &expected[..1]);
                if expected[0] > 0 {
                    prop_assert_eq!(&lists.samples[..expected.len()], &expected);
                }
            }
            let others = match items {
                Some(items) => plan::Partition { items, ..plan::Partition::default() },
                None => whole,
            };
            assert_lists(&lists.others, &[], &others, false);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Plans of an MI300X whose gates may choose: the device makes the lists and samples that the host makes.
        #[test]
        fn the_device_makes_the_lists_of_a_choice_by_gates(
            heads in prop_oneof![Just([2, 8]), Just([8, 16]), Just([16, 32]), Just([16, 64])],
            lengths in prop_oneof![
                vec(8000usize..66_000, 1..4),
                (2usize..13, prop_oneof![Just(2048usize), Just(4096), Just(8192)]).prop_map(|(n, of_each)| vec![of_each; n]),
                vec(0usize..9000, 1..31),
            ],
            (padding, decodes) in (0usize..300, prop_oneof![Just(0usize), 1usize..9]),
            in_place in any::<bool>(),
        ) {
            let (rows, sequences) = (lengths.iter().sum::<usize>() + padding, lengths.len());
            let mut shape = shape(heads, &lengths);
            shape.batch = Batch::Packed { tokens: rows };
            let Some(segments) = shape.of_device().expect("a plan").device_segments().expect("a grid") else {
                return Ok(());
            };
            let device = DeviceLengths {
                sequences: sequences + decodes,
                tokens: rows + decodes,
                decodes,
                segments: Some(segments),
            };
            let mut given: Vec<i32> = (0..=decodes as i32).collect();
            for n in &lengths {
                given.push(given[given.len() - 1] + *n as i32);
            }
            let lists = made_by(&device, &given, in_place).expect("a launch");
            prop_assert_eq!(lists.status, 0);

            let cu_seqlens: Vec<i32> = given[decodes..].iter().map(|n| n - decodes as i32).collect();
            let host = shape.of_lengths(&cu_seqlens);
            let by_gates = (host.partition_by_gates(&cu_seqlens))
                .filter(|(_, worth_in_place)| *worth_in_place || !in_place)
                .map(|(cut, _)| cut);
            let planned = host.partition(&cu_seqlens).expect("a plan");
            let nothing = plan::Partition::default();
            if segments.choice.is_none() {
                prop_assert!(by_gates.is_none() && !host.is_fused());
                assert_lists(&lists.items, &lists.chains, &planned, true);
                return Ok(());
            }
            match host.is_fused() {
                true => assert_lists(&lists.items, &lists.chains, &nothing, false),
                false => assert_lists(&lists.items, &lists.chains, &planned, true),
            }
            if segments.uneven.is_some() {
                let items = by_gates.as_ref().map_or(&[][..], |cut| &cut.items);
                let expected = plan::samples(items, !host.is_fused(), &cu_seqlens);
                prop_assert_eq!(lists.samples[0], expected[0]);
                if expected[0] > 0 {
                    prop_assert_eq!(&lists.samples[..expected.len()], &expected);
                }
            }
            let whole = if host.is_fused() { planned } else { nothing };
            assert_lists(&lists.others, &[], &by_gates.unwrap_or(whole), false);
        }
    }

    /// Wrong lengths and the most segments: no list overflows.
    #[test]
    fn forced_segments_fill_their_lists() {
        for (cu_seqlens, status) in [
            ([0, 640, 1280, 1920], 0),
            ([0, 1920, 1920, 1920], 0),
            ([0, -1, i32::MAX, 9], 2),
        ] {
            let most = Counts {
                items: 3 + 30,
                summaries: 30,
                pieces: 1,
                chains: 3,
                longest_chunks: 0,
                even: false,
                short: 0,
            };
            let machine = Machine::new(8, &Target::of("gfx942").costs, [1; 3], 30);
            let device = DeviceLengths {
                sequences: 3,
                tokens: 1920,
                decodes: 0,
                segments: Some(DeviceSegments {
                    most,
                    segments: i32::MAX,
                    rule: Rule::Machine {
                        machine,
                        halves: true,
                    },
                    choice: None,
                    uneven: None,
                    wait_time: 0,
                }),
            };
            let lists = made_by(&device, &cu_seqlens, false).expect("a launch");
            assert_eq!(lists.status, status);
            let exist = lists.items.iter().filter(|item| item[0] >= 0);
            assert!(
                exist
                    .clone()
                    .all(|item| item[2] <= 1 && item[3] & DWK_ITEM_HALF as i32 == 0)
            );
            assert_eq!(exist.map(|item| item[2]).sum::<i32>(), 30);
        }
    }
}
