//! Sequences that several ranks share: ranks in one process, which exchange summaries by copies. Outputs, states and
//! snapshots have one rank's bits.

use deltawave::batch::PerSequence;
use deltawave::gates::Gating;
use deltawave::parallel::Communicator;
use deltawave::prefill::{
    CHUNK, Fragment, ParallelPrefill, PrefillPath, PrefillTensors, RankLayout, Snapshot, Snapshots,
};
use deltawave::runtime::{Context, Stream};
use deltawave::state::{InitialState, State, StateMut, StatePool, States};
use deltawave::tensor::Buffer;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave::workspace::Workspace;
use deltawave::{Error, Result};
use deltawave_lab::inputs::{Gates, Keys, Tensor as HostTensor};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use crate::common::{Case, Data, GateKind, Output, StateKind, check_output, context, spec};

/// Kernels that a launch enqueues.
pub(super) enum Step<'a> {
    Summarise,
    Finish(&'a mut Buffer<u8>, Option<PerSequence<'a, i32>>),
    /// Everything, with a communicator, and memory for the summaries of all ranks.
    All(&'a Communicator, &'a mut Buffer<u8>),
}

/// Where states are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Where {
    /// Tensors with a state for each fragment.
    Separate,
    /// Slots of a pool, read and written in place.
    Pool,
}

/// What ranks computed together: the output, and the state after each chunk of each sequence.
#[derive(Debug, PartialEq)]
struct Shared {
    output: Output,
    after_chunks: Vec<Vec<f32>>,
}

/// A rank's tensors on the device.
pub(super) struct Rank {
    pub(super) plan: ParallelPrefill,
    fragments: Vec<Fragment>,
    tokens: usize,
    q: Buffer<u8>,
    k: Buffer<u8>,
    v: Buffer<u8>,
    o: Buffer<u8>,
    gates: [Buffer<u8>; 2],
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    initial: Option<Buffer<u8>>,
    has: Option<Buffer<u8>>,
    last: Buffer<u8>,
    slots: Buffer<i32>,
    snapshots: Buffer<u8>,
    snapshot_slots: Buffer<i32>,
    summary: Buffer<u8>,
    workspace: Buffer<u8>,
}

/// Rows past the fragments.
const PADDING: usize = 3;

/// Rows of a tensor `[T, row]` that fragments have, then padding.
fn rows(x: &HostTensor, row: usize, case: &Case, fragments: &[Fragment]) -> Vec<u8> {
    let cu = case.cu_seqlens();
    let size = x.dtype.size() * row;
    let mut bytes = Vec::new();
    for f in fragments {
        let begin = cu[f.sequence] as usize + f.begin;
        bytes.extend(&x.bytes[begin * size..(begin + f.tokens) * size]);
    }
    bytes.resize(bytes.len() + PADDING * size, 0xff);
    bytes
}

fn kind(case: &Case) -> StateKind {
    case.final_state.expect("a kind of state")
}

impl Rank {
    pub(super) fn new(
        context: &Context,
        case: &Case,
        data: &Data,
        layout: &RankLayout,
        rank: usize,
        states: Where,
    ) -> Self {
        let fragments = layout.fragments(rank).to_vec();
        let tokens = fragments.iter().map(|f| f.tokens).sum::<usize>() + PADDING;
        let mut plan =
            ParallelPrefill::new(context, case.spec, layout, rank, tokens).expect("a plan");
        let h = case.spec.heads;
        let up = |bytes: &[u8]| context.upload(bytes).expect("memory");
        let poison = |bytes: usize| up(&vec![0xff; bytes]);
        let f32s = |x: &[f32]| HostTensor::new(Dtype::F32, x.to_vec());
        let row = |x: &HostTensor, n: usize| up(&rows(x, n, case, &fragments));
        let gates = match case.gate_kind {
            GateKind::Raw { .. } => {
                [&data.gate_inputs.a, &data.gate_inputs.b].map(|x| row(x, h.value))
            }
            _ => [&data.inputs.g, &data.inputs.beta].map(|x| row(&f32s(x), h.value)),
        };
        let state_kind = kind(case);
        let state = h.value * h.key_dim * h.value_dim;
        let size = state_kind.dtype.size();
        // Initial states of fragments that begin a sequence; NaN for others, which must not be read.
        let initial_of = |sequence: usize| {
            let x = data.initial.as_ref().expect("initial states");
            let values = &x.values[sequence * state..(sequence + 1) * state];
            let values = (state_kind.layout).from_key_major(values, h.key_dim, h.value_dim);
            HostTensor::new(state_kind.dtype, values).bytes
        };
        let nan = vec![0xff; state * size];
        let initial = data.initial.as_ref().map(|_| {
            let all: Vec<u8> = match states {
                Where::Separate => (fragments.iter())
                    .flat_map(|f| {
                        if f.begin == 0 {
                            initial_of(f.sequence)
                        } else {
                            nan.clone()
                        }
                    })
                    .collect(),
                Where::Pool => (0..case.lengths.len()).flat_map(initial_of).collect(),
            };
            up(&all)
        });
        let slots: Vec<i32> = fragments.iter().map(|f| f.sequence as i32).collect();
        let has = case.has_initial.as_ref().map(|has| {
            let has: Vec<u8> = fragments.iter().map(|f| has[f.sequence]).collect();
            up(&has)
        });
        // A snapshot after every chunk, in half of the ranks from the plan's slots.
        let entries = plan.chunk_entries();
        let mut table = vec![-1; entries];
        let mut list = Vec::new();
        for (n, f) in fragments.iter().enumerate() {
            for chunk in 0..f.tokens / CHUNK {
                let slot = list.len();
                table[plan.cu_seqlens()[n] as usize / CHUNK + n + chunk] = slot as i32;
                list.push(Snapshot {
                    sequence: n,
                    tokens: (chunk + 1) * CHUNK,
                    slot,
                });
            }
        }
        if rank.is_multiple_of(2) {
            plan.set_snapshots(&list).expect("snapshots");
        }
        Rank {
            q: row(&data.inputs.q, h.key * h.key_dim),
            k: row(&data.inputs.k, h.key * h.key_dim),
            v: row(&data.inputs.v, h.value * h.value_dim),
            o: poison(tokens * h.value * h.value_dim * case.spec.dtype.size()),
            gates,
            a_log: context.upload(&data.gate_inputs.a_log).expect("memory"),
            dt_bias: context.upload(&data.gate_inputs.dt_bias).expect("memory"),
            initial,
            has,
            last: poison(fragments.len().max(1) * state * size),
            slots: context.upload(&slots).expect("memory"),
            snapshots: poison(list.len().max(1) * state * 4),
            snapshot_slots: context.upload(&table).expect("memory"),
            summary: poison(plan.summary_bytes()),
            workspace: poison(plan.workspace_bytes()),
            plan,
            fragments,
            tokens,
        }
    }

    /// Launches a stage: the first, or the second with the summaries of all ranks.
    pub(super) fn launch(
        &mut self,
        case: &Case,
        stream: &Stream,
        states: Where,
        rank: usize,
        step: Step<'_>,
    ) -> Result<()> {
        let h = case.spec.heads;
        let dtype = case.spec.dtype;
        let n = self.fragments.len();
        let dense = |[_, b, c]: [usize; 3]| [b * c, c, 1];
        let scalars = [self.tokens, h.value];
        let gate_dtype = match case.gate_kind {
            GateKind::Raw { dtype, .. } => dtype,
            _ => Dtype::F32,
        };
        let [g, beta] = &self.gates;
        let scalar = |x| Buffer::<u8>::tensor_of(x, gate_dtype, scalars, [h.value, 1], 0);
        let gating = match case.gate_kind {
            GateKind::Raw {
                allow_neg_eigval, ..
            } => Gating::Raw {
                a: scalar(g)?.into(),
                b: scalar(beta)?.into(),
                a_log: self.a_log.tensor([h.value])?,
                dt_bias: Some(self.dt_bias.tensor([h.value])?),
                allow_neg_eigval,
            },
            _ => Gating::Given {
                g: Some(scalar(g)?.into()),
                beta: Some(scalar(beta)?.into()),
            },
        };
        let kind = kind(case);
        let state_shape = |n| match kind.layout {
            StateLayout::KeyMajor => [n, h.value, h.key_dim, h.value_dim],
            StateLayout::ValueMajor => [n, h.value, h.value_dim, h.key_dim],
        };
        let strides = |[_, a, b, c]: [usize; 4]| [a * b * c, b * c, c, 1];
        let has_initial_state = self.has.as_ref().map(Into::into);
        let states = match states {
            Where::Separate => States::Separate {
                initial: match &self.initial {
                    None => None,
                    Some(x) => Some(InitialState {
                        state: State {
                            tensor: x.tensor_of(
                                kind.dtype,
                                state_shape(n),
                                strides(state_shape(n)),
                                0,
                            )?,
                            layout: kind.layout,
                        },
                        has_initial_state,
                    }),
                },
                last: Some(StateMut {
                    tensor: (self.last).tensor_of_mut(
                        kind.dtype,
                        state_shape(n),
                        strides(state_shape(n)),
                        0,
                    )?,
                    layout: kind.layout,
                }),
            },
            Where::Pool => {
                let shape = state_shape(case.lengths.len());
                let pool = self.initial.as_mut().expect("a pool");
                States::Pool {
                    pool: StatePool {
                        tensor: pool.tensor_of_mut(kind.dtype, shape, strides(shape), 0)?,
                        layout: kind.layout,
                        slots: Some((&self.slots).into()),
                        write_slots: None,
                    },
                    has_initial_state,
                }
            }
        };
        let snapshot_shape = [
            self.fragments.iter().map(|f| f.tokens / CHUNK).sum(),
            h.value,
            h.key_dim,
            h.value_dim,
        ];
        let snapshots = (snapshot_shape[0] > 0).then_some(());
        let view = |x, heads, dim| {
            let shape = [self.tokens, heads, dim];
            Buffer::<u8>::tensor_of(x, dtype, shape, dense(shape), 0)
        };
        let o = [self.tokens, h.value, h.value_dim];
        let tensors = PrefillTensors {
            cu_seqlens: None,
            q: view(&self.q, h.key, h.key_dim)?.into(),
            k: view(&self.k, h.key, h.key_dim)?.into(),
            v: view(&self.v, h.value, h.value_dim)?.into(),
            gating,
            states,
            o: self.o.tensor_of_mut(dtype, o, dense(o), 0)?.into(),
            snapshots: match snapshots {
                // A plan with slots needs a tensor, even without slots.
                None if rank % 2 == 1 => None,
                _ => Some(Snapshots {
                    to: Some(StateMut {
                        tensor: self.snapshots.tensor_of_mut(
                            Dtype::F32,
                            snapshot_shape,
                            strides(snapshot_shape),
                            0,
                        )?,
                        layout: StateLayout::KeyMajor,
                    }),
                    slots: (rank % 2 == 1).then(|| (&self.snapshot_slots).into()),
                }),
            },
        };
        let workspace = Workspace::new(&mut self.workspace);
        match step {
            Step::Summarise => {
                let summary = Workspace::new(&mut self.summary);
                self.plan
                    .summarise_launch(stream, &tensors, summary, workspace)
            }
            Step::Finish(gathered, order) => {
                let gathered = Workspace::new(gathered);
                (self.plan).finish_launch(stream, &tensors, gathered, order, workspace)
            }
            Step::All(communicator, gathered) => {
                let memory = [&mut self.summary, gathered].map(Workspace::new);
                communicator.prefill(&self.plan, stream, &tensors, memory, workspace)
            }
        }
    }

    /// Its summaries, after the first stage.
    pub(super) fn summary(&self, stream: &Stream) -> Vec<u8> {
        self.summary.download(stream).expect("a copy")
    }

    /// The output and the states of the last launch, as they lie in memory.
    pub(super) fn results(&self, stream: &Stream) -> [Vec<u8>; 2] {
        [&self.o, &self.last].map(|x| x.download(stream).expect("a copy"))
    }
}

/// Runs all ranks of a layout.
fn share(case: &Case, data: &Data, layout: &RankLayout, states: Where) -> Shared {
    let context = context();
    let stream = context.stream().expect("a stream");
    let h = case.spec.heads;
    let mut ranks: Vec<Rank> = (0..layout.ranks())
        .map(|rank| Rank::new(&context, case, data, layout, rank, states))
        .collect();
    let mut gathered = Vec::new();
    for (i, rank) in ranks.iter_mut().enumerate() {
        rank.launch(case, &stream, states, i, Step::Summarise)
            .expect("the first stage");
        gathered.extend(rank.summary.download(&stream).expect("a copy"));
    }
    let row = h.value * h.value_dim;
    let state = h.value * h.key_dim * h.value_dim;
    let kind = kind(case);
    let cu = case.cu_seqlens();
    let mut o = vec![f32::NAN; case.tokens() * row];
    let mut last = vec![f32::NAN; case.lengths.len() * state];
    let mut after_chunks: Vec<Vec<f32>> = (case.lengths.iter())
        .map(|n| vec![f32::NAN; n / CHUNK * state])
        .collect();
    for (i, rank) in ranks.iter_mut().enumerate() {
        let mut gathered = context.upload(&gathered).expect("memory");
        let order = context.upload(rank.plan.order()).expect("memory");
        // Every third rank gives the order itself.
        let order = (i % 3 == 2).then(|| (&order).into());
        rank.launch(case, &stream, states, i, Step::Finish(&mut gathered, order))
            .expect("the second stage");
        let bytes = rank.o.download(&stream).expect("a copy");
        let values = HostTensor::from_bytes(case.spec.dtype, bytes).values;
        let (of_fragments, padding) = values.split_at(values.len() - PADDING * row);
        assert!(padding.iter().all(|x| x.to_bits() == 0), "padding");
        let states_of = |x: &Buffer<u8>, kind: StateKind| {
            let bytes = x.download(&stream).expect("a copy");
            let values = HostTensor::from_bytes(kind.dtype, bytes).values;
            kind.layout.to_key_major(&values, h.key_dim, h.value_dim)
        };
        let finals = match states {
            Where::Separate => states_of(&rank.last, kind),
            Where::Pool => states_of(rank.initial.as_ref().expect("a pool"), kind),
        };
        let f32_kind = StateKind {
            dtype: Dtype::F32,
            layout: StateLayout::KeyMajor,
            pad: 0,
        };
        let taken = states_of(&rank.snapshots, f32_kind);
        let (mut at, mut slot) = (0, 0);
        for (n, f) in rank.fragments.iter().enumerate() {
            let to = (cu[f.sequence] as usize + f.begin) * row;
            o[to..to + f.tokens * row].copy_from_slice(&of_fragments[at..at + f.tokens * row]);
            at += f.tokens * row;
            let chunks = f.tokens / CHUNK;
            let to = f.begin / CHUNK * state;
            assert!(
                taken[slot..slot + chunks * state]
                    .iter()
                    .all(|x| x.is_finite()),
                "snapshots"
            );
            after_chunks[f.sequence][to..to + chunks * state]
                .copy_from_slice(&taken[slot..slot + chunks * state]);
            slot += chunks * state;
            let from = match states {
                Where::Separate => n,
                Where::Pool => f.sequence,
            } * state;
            let own = &finals[from..from + state];
            if f.begin + f.tokens == case.lengths[f.sequence] {
                last[f.sequence * state..][..state].copy_from_slice(own);
            } else if states == Where::Separate {
                assert!(
                    own.iter().all(|x| x.is_nan()),
                    "a state of a fragment that is followed"
                );
            }
        }
    }
    // The oracle takes rows past the last sequence as zeros.
    o[case.lengths.iter().sum::<usize>() * row..].fill(0.0);
    Shared {
        output: Output {
            o,
            state: Some(last),
        },
        after_chunks,
    }
}

fn assert_same(a: &Shared, b: &Shared, what: &str) {
    crate::common::assert_same_bits(&a.output, &b.output, what);
    let bits = |x: &Shared| {
        x.after_chunks
            .iter()
            .flatten()
            .map(|x| x.to_bits())
            .collect::<Vec<_>>()
    };
    assert!(bits(a) == bits(b), "snapshots differ: {what}");
}

/// All ways to share a case, against one rank; and one rank against the oracle.
fn check_layouts(case: &Case, block: usize, ranks: &[usize], states: Where) {
    let data = case.data();
    let lengths = &case.lengths;
    let one = RankLayout::contiguous(lengths, block, 1).expect("a layout");
    let alone = share(case, &data, &one, states);
    check_output(case, &data, &alone.output, 1.15);
    for &ranks in ranks {
        let contiguous = RankLayout::contiguous(lengths, block, ranks).expect("a layout");
        let zigzag = RankLayout::zigzag(lengths, block, ranks).expect("a layout");
        for (name, layout) in [("contiguous", contiguous), ("zig-zag", zigzag)] {
            let shared = share(case, &data, &layout, states);
            assert_same(&alone, &shared, &format!("{ranks} ranks, {name}"));
        }
    }
}

pub(super) fn case(dtype: Dtype, lengths: &[usize], gates: Gates) -> Case {
    let mut case = Case::new(spec(dtype, 1, 2, 32, 48), lengths);
    case.gates = gates;
    case.initial = Some(kind(&case));
    case
}

/// One long sequence over 1 to 8 ranks, with gates that forget and that do not; with as many blocks as ranks, and fewer,
/// so that ranks are empty.
#[test]
fn one_sequence_over_ranks() {
    for gates in [Gates::Zero, Gates::Mixed, Gates::Strong] {
        let case = case(Dtype::Bf16, &[64 * 7 + 5], gates);
        check_layouts(&case, 64, &[2, 3, 5, 8], Where::Separate);
        check_layouts(&case, 192, &[2, 5], Where::Separate);
    }
}

/// Packed sequences, some without tokens, of which some end on a rank's border, in a pool in place.
#[test]
fn packed_sequences_in_a_pool() {
    let lengths = [128, 0, 300, 64, 1, 256, 65];
    let mut case = case(Dtype::F16, &lengths, Gates::Mixed);
    case.has_initial = Some(vec![1, 1, 0, 1, 0, 1, 1]);
    case.final_state = Some(StateKind {
        dtype: Dtype::F32,
        layout: StateLayout::ValueMajor,
        pad: 0,
    });
    case.gate_kind = GateKind::Raw {
        dtype: Dtype::Bf16,
        dt_bias: true,
        allow_neg_eigval: true,
    };
    check_layouts(&case, 128, &[2, 3, 5, 8], Where::Separate);
    // A sequence without tokens writes no slot of a pool: it keeps its initial state, which `has_initial` may not drop.
    check_layouts(&case, 64, &[2, 3, 8], Where::Pool);
}

/// Fragments in any order, several of one sequence on a rank, and ranks without any.
#[test]
fn any_fragments() {
    let mut case = case(Dtype::Bf16, &[64 * 6, 200], Gates::Mixed);
    case.spec.heads.map = HeadMap::Tiled;
    case.spec.qk_l2norm = true;
    let of = |sequence, begin, tokens| Fragment {
        sequence,
        begin,
        tokens,
    };
    let fragments = vec![
        vec![],
        vec![of(0, 256, 64), of(1, 128, 72), of(0, 64, 128)],
        vec![],
        vec![of(0, 320, 64), of(0, 0, 64), of(1, 0, 128), of(0, 192, 64)],
    ];
    let layout = RankLayout::new(&case.lengths, 64, fragments).expect("a layout");
    let one = RankLayout::contiguous(&case.lengths, 64, 1).expect("a layout");
    let data = case.data();
    for states in [Where::Separate, Where::Pool] {
        let alone = share(&case, &data, &one, states);
        check_output(&case, &data, &alone.output, 1.15);
        assert_same(
            &alone,
            &share(&case, &data, &layout, states),
            "any fragments",
        );
    }
}

/// Every bucket of K.
#[test]
fn all_dimensions() {
    for (k, v) in [(64, 64), (96, 32), (128, 128), (176, 48), (256, 16)] {
        let mut case = case(Dtype::Bf16, &[300], Gates::Zero);
        case.spec.heads.key_dim = k;
        case.spec.heads.value_dim = v;
        case.keys = Keys::Silu;
        check_layouts(&case, 64, &[3], Where::Separate);
    }
}

/// Blocks of one rank are the segments of a plan for one rank.
#[test]
fn blocks_are_segments() {
    let mut case = case(Dtype::Bf16, &[512], Gates::Zero);
    let data = case.data();
    let layout = RankLayout::contiguous(&case.lengths, 128, 3).expect("a layout");
    let shared = share(&case, &data, &layout, Where::Separate);
    case.spec.segments = Some(4);
    case.spec.path = PrefillPath::Split;
    let whole = crate::common::run(&context(), &case, &data);
    crate::common::assert_same_bits(&whole, &shared.output, "segments and blocks");
}

/// The block decides the bits: the test of equal bits could fail.
#[test]
fn another_block_gives_other_bits() {
    let case = case(Dtype::Bf16, &[512], Gates::Zero);
    let data = case.data();
    let [a, b] = [64, 256].map(|block| {
        let layout = RankLayout::contiguous(&case.lengths, block, 2).expect("a layout");
        share(&case, &data, &layout, Where::Separate).output
    });
    assert!(a.o != b.o);
}

/// An order with slots that do not exist reads nothing out of bounds.
#[test]
fn wrong_orders_stay_within_bounds() {
    let case = case(Dtype::Bf16, &[320], Gates::Zero);
    let data = case.data();
    let (context, layout) = (
        context(),
        RankLayout::contiguous(&case.lengths, 64, 1).expect("a layout"),
    );
    let stream = context.stream().expect("a stream");
    let mut rank = Rank::new(&context, &case, &data, &layout, 0, Where::Separate);
    rank.launch(&case, &stream, Where::Separate, 0, Step::Summarise)
        .expect("a launch");
    let bytes = rank.summary.download(&stream).expect("a copy");
    let mut gathered = context.upload(&bytes).expect("memory");
    let mut outputs = Vec::new();
    for slot in [i32::MIN, -1, 4, 1 << 20, i32::MAX] {
        let order = context.upload(&[slot; 4]).expect("memory");
        let given = Step::Finish(&mut gathered, Some((&order).into()));
        rank.launch(&case, &stream, Where::Separate, 0, given)
            .expect("a launch");
        stream.synchronize().expect("no fault");
        outputs.push(rank.o.download(&stream).expect("a copy"));
    }
    // Slot 0 stands for all of them.
    assert!(outputs.iter().all(|o| *o == outputs[0]));
    let given = Step::Finish(&mut gathered, None);
    rank.launch(&case, &stream, Where::Separate, 0, given)
        .expect("a launch");
    assert!(rank.o.download(&stream).expect("a copy") != outputs[0]);
    let order = context.upload(&[0; 3]).expect("memory");
    let given = Step::Finish(&mut gathered, Some((&order).into()));
    let error = rank
        .launch(&case, &stream, Where::Separate, 0, given)
        .expect_err("3 of 4");
    assert!(
        error.to_string().contains("exactly 4 are needed"),
        "{error}"
    );
}

/// Layouts that a plan refuses, and the sizes that it names.
#[test]
fn plans_are_checked() {
    let context = context();
    let layout = RankLayout::contiguous(&[640], 128, 2).expect("a layout");
    let good = spec(Dtype::Bf16, 1, 2, 32, 48);
    let plan = |spec, rank, tokens| ParallelPrefill::new(&context, spec, &layout, rank, tokens);
    for (result, words) in [
        (plan(good, 2, 640), "rank"),
        (plan(good, 0, 383), "at least 384"),
        (
            plan(
                deltawave::prefill::PrefillSpec {
                    segments: Some(2),
                    ..good
                },
                0,
                640,
            ),
            "segments",
        ),
        (
            plan(
                deltawave::prefill::PrefillSpec {
                    path: PrefillPath::Fused,
                    ..good
                },
                0,
                640,
            ),
            "path",
        ),
    ] {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    let [a, b] =
        [(0, 384), (1, 256)].map(|(rank, tokens)| plan(good, rank, tokens).expect("a plan"));
    // Blocks 0, 1, 2 and 3, 4: three slots each, of two heads with N and M of 48 x 32 and 48 x 32 numbers.
    assert_eq!(layout.rank_slots(), 3);
    assert_eq!(a.summary_bytes(), 3 * 2 * 2 * 48 * 32 * 4 + 256);
    assert_eq!(a.summary_bytes(), b.summary_bytes());
    assert_eq!((a.order(), b.order()), (&[0, 1][..], &[0, 1, 2, 3][..]));
    // Nothing is exchanged if no sequence has two blocks.
    let apart = RankLayout::contiguous(&[128, 128], 128, 2).expect("a layout");
    let plan = ParallelPrefill::new(&context, good, &apart, 0, 128).expect("a plan");
    assert_eq!((plan.summary_bytes(), plan.gathered_bytes()), (0, 0));
    let [first, second] = plan.kernels();
    assert_eq!(first, ["dw_prefill_prepare_bf16"]);
    assert_eq!(second, ["dw_prefill_scan_bf16_k64"]);
}

/// Whole sequences on one rank where they fit, runs of an equal share where not.
#[test]
fn packed_layouts_keep_sequences_whole() {
    let f = |sequence, begin, tokens| Fragment {
        sequence,
        begin,
        tokens,
    };
    let layout = RankLayout::packed(&[64, 640, 100, 0, 64], 64, 2).expect("a layout");
    // 14 blocks, a share of 7: the long sequence in 7 and 3 blocks, then the shorter ones beside the 3.
    assert_eq!(layout.fragments(0), [f(1, 0, 448), f(3, 0, 0)]);
    let second = [f(0, 0, 64), f(1, 448, 192), f(2, 0, 100), f(4, 0, 64)];
    assert_eq!(layout.fragments(1), second);
    // More ranks than sequences: some have nothing.
    let layout = RankLayout::packed(&[64, 64], 64, 4).expect("a layout");
    assert_eq!(layout.fragments(1), [f(1, 0, 64)]);
    assert!(layout.fragments(2).is_empty() && layout.fragments(3).is_empty());
    assert_eq!(layout.rank_slots(), 0);
    for wrong in [
        RankLayout::packed(&[1], 65, 1),
        RankLayout::packed(&[1], 64, 0),
        RankLayout::packed(&[usize::MAX], 64, 1),
    ] {
        wrong.expect_err("a block, ranks or lengths that are not allowed");
    }
    let case = case(Dtype::Bf16, &[330, 0, 64, 150], Gates::Mixed);
    let data = case.data();
    let run = |layout: Result<RankLayout>| {
        share(&case, &data, &layout.expect("a layout"), Where::Separate)
    };
    let alone = run(RankLayout::contiguous(&case.lengths, 64, 1));
    for ranks in [2, 3, 8] {
        let shared = run(RankLayout::packed(&case.lengths, 64, ranks));
        assert_same(&alone, &shared, &format!("{ranks} ranks"));
    }
}

/// Plans of different layouts or specs: the error names what differs, and the rank.
#[test]
fn plans_that_do_not_agree() {
    let context = context();
    let lengths = [330, 150];
    let layout = RankLayout::contiguous(&lengths, 64, 3).expect("a layout");
    let spec = spec(Dtype::Bf16, 1, 2, 16, 32);
    let plan = |layout: &RankLayout, spec, rank| {
        ParallelPrefill::new(&context, spec, layout, rank, 480).expect("a plan")
    };
    let ours: Vec<_> = (0..3).map(|rank| plan(&layout, spec, rank)).collect();
    let bytes = |plans: [&ParallelPrefill; 3]| plans.map(ParallelPrefill::agreement).concat();
    let all = bytes([&ours[0], &ours[1], &ours[2]]);
    for rank in &ours {
        rank.check_agreement(&all).expect("equal plans");
    }
    let zigzag = RankLayout::zigzag(&lengths, 64, 3).expect("a layout");
    let other =
        |lengths: &[usize], block| RankLayout::contiguous(lengths, block, 3).expect("a layout");
    let f16 = deltawave::prefill::PrefillSpec {
        dtype: Dtype::F16,
        ..spec
    };
    let wider = self::spec(Dtype::Bf16, 1, 2, 16, 48);
    for (layout, spec, what, theirs) in [
        (&zigzag, spec, "fragments of the ranks", None),
        (
            &other(&lengths, 128),
            spec,
            "tokens of a block",
            Some("128"),
        ),
        (
            &other(&[320, 160], 64),
            spec,
            "lengths of the sequences",
            None,
        ),
        (
            &other(&[330, 151], 64),
            spec,
            "tokens of all sequences",
            Some("481"),
        ),
        (&other(&[480], 64), spec, "number of sequences", Some("1")),
        (
            &layout,
            f16,
            "element type, head map, scale or norm of the spec",
            None,
        ),
        (&layout, wider, "value dimension", Some("48")),
    ] {
        let tokens = layout.lengths().iter().sum();
        let second = ParallelPrefill::new(&context, spec, layout, 1, tokens).expect("a plan");
        let all = bytes([&ours[0], &second, &ours[2]]);
        let error = ours[0].check_agreement(&all).expect_err("rank 1 differs");
        let Error::Ranks(found) = &error else {
            panic!("{error}")
        };
        assert_eq!((found.what, found.rank, found.own), (what, 1, 0));
        assert!(theirs.is_none_or(|n| found.theirs == n), "{error}");
        assert_ne!(found.theirs, found.ours);
        assert!(error.to_string().contains(what), "{error}");
        // The rank that differs learns of it, too.
        let error = second
            .check_agreement(&all)
            .expect_err("it differs from rank 0");
        assert!(
            matches!(&error, Error::Ranks(found) if found.rank == 0),
            "{error}"
        );
    }
    let error = ours[0]
        .check_agreement(&all[1..])
        .expect_err("a byte too few");
    assert!(
        error.to_string().contains("agreements: 383 bytes"),
        "{error}"
    );
}

/// Lengths, a block, and the rank of each block.
fn any_layout() -> impl Strategy<Value = (Vec<usize>, usize, usize, Vec<u8>)> {
    let lengths = prop::collection::vec(
        prop_oneof![Just(0usize), 1usize..400, (1usize..6).prop_map(|n| 64 * n)],
        0..5,
    );
    (
        lengths,
        1usize..4,
        1usize..9,
        prop::collection::vec(any::<u8>(), 32),
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        // An eighth of what is asked for: each case is a prefill of several ranks.
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).map_or(24, |n: u32| n.div_ceil(8)),
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    /// Blocks dealt to ranks at random, fragments in a random order: one rank's bits.
    #[test]
    fn random_layouts((lengths, block, ranks, deal) in any_layout(), gates in 0usize..3, f16: bool, pool: bool) {
        let gates = [Gates::Mixed, Gates::Zero, Gates::Normal][gates];
        let dtype = if f16 { Dtype::F16 } else { Dtype::Bf16 };
        let mut case = case(dtype, &lengths, gates);
        case.spec.heads.key_dim = 16;
        case.spec.heads.value_dim = 32;
        let block = 64 * block;
        let mut fragments = vec![Vec::<Fragment>::new(); ranks];
        for (sequence, &tokens) in lengths.iter().enumerate() {
            for b in 0..tokens.div_ceil(block).max(1) {
                let at = (7 * sequence + b) % deal.len();
                let to = &mut fragments[deal[at] as usize % ranks];
                let begin = b * block;
                let of_block = block.min(tokens - begin);
                let joins = |f: &Fragment| f.sequence == sequence && f.begin + f.tokens == begin;
                match to.last_mut() {
                    Some(f) if joins(f) && deal[at] < 128 => f.tokens += of_block,
                    _ => to.push(Fragment { sequence, begin, tokens: of_block }),
                }
            }
        }
        for (of_rank, turn) in fragments.iter_mut().zip(&deal) {
            let turn = *turn as usize % of_rank.len().max(1);
            of_rank.rotate_left(turn);
        }
        let layout = RankLayout::new(&lengths, block, fragments).expect("a layout");
        let one = RankLayout::contiguous(&lengths, block, 1).expect("a layout");
        let states = if pool && !lengths.is_empty() { Where::Pool } else { Where::Separate };
        let data = case.data();
        let alone = share(&case, &data, &one, states);
        if !lengths.is_empty() {
            check_output(&case, &data, &alone.output, 1.3);
        }
        assert_same(&alone, &share(&case, &data, &layout, states), &format!("{layout:?}"));
    }
}
