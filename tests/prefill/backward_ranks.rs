//! The backward of sequences that several ranks share: ranks in one process, which exchange summaries by copies. Gradients
//! have one rank's bits, and one rank's are accurate.

use std::thread;

use deltawave::Result;
use deltawave::gates::Gating;
use deltawave::parallel::Communicator;
use deltawave::prefill::{
    BackwardTensors, Fragment, ParallelPrefill, ParallelPrefillBackward, RankLayout,
};
use deltawave::state::{InitialState, State, StateMut};
use deltawave::tensor::Buffer;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Gates, Tensor as HostTensor};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use crate::collectives::{join, library};
use crate::common::backward::{Given, Gradients, NAMES, judge_backward};
use crate::common::{Case, Data, GateKind, StateKind, bits, context, spec};
use crate::ranks::case;

/// Rows past the fragments.
const PADDING: usize = 3;

/// What ends the launches of a rank.
enum Stage<'a> {
    Summarise(&'a mut Buffer<u8>),
    Finish(&'a mut Buffer<u8>),
    /// Everything, with memory for the rank's summaries and for those of all ranks.
    All(&'a Communicator, [&'a mut Buffer<u8>; 2]),
}

struct Rank {
    plan: ParallelPrefillBackward,
    fragments: Vec<Fragment>,
    tokens: usize,
    /// q, k, v, both gates, dO.
    inputs: [Buffer<u8>; 6],
    per_head: [Buffer<f32>; 2],
    /// Initial states and the gradients of final states.
    states: [Option<Buffer<u8>>; 2],
    has: Option<Buffer<u8>>,
    /// dq, dk, dv, and the gradients of both gates in f32.
    outputs: [Buffer<u8>; 5],
    d_per_head: [Buffer<f32>; 2],
    d_initial: Buffer<f32>,
    workspace: Buffer<u8>,
}

fn kind(case: &Case) -> StateKind {
    case.final_state.expect("a kind of state")
}

impl Rank {
    fn new(case: &Case, data: &Data, given: &Given, layout: &RankLayout, rank: usize) -> Self {
        let context = context();
        let fragments = layout.fragments(rank).to_vec();
        let tokens = fragments.iter().map(|f| f.tokens).sum::<usize>() + PADDING;
        let forward = ParallelPrefill::new(&context, case.spec, layout, rank, tokens);
        let plan = ParallelPrefillBackward::of(&forward.expect("a plan")).expect("a plan");
        let h = case.spec.heads;
        let up = |bytes: &[u8]| context.upload(bytes).expect("memory");
        let nan = |values: usize| up(&vec![0xff; values]);
        let cu = case.cu_seqlens();
        let rows = |x: &HostTensor, row: usize| {
            let size = x.dtype.size() * row;
            let mut bytes = Vec::new();
            for f in &fragments {
                let begin = cu[f.sequence] as usize + f.begin;
                bytes.extend(&x.bytes[begin * size..(begin + f.tokens) * size]);
            }
            bytes.resize(bytes.len() + PADDING * size, 0xff);
            up(&bytes)
        };
        let f32s = |x: &[f32]| HostTensor::new(Dtype::F32, x.to_vec());
        let gates = match case.gate_kind {
            GateKind::Raw { .. } => {
                [&data.gate_inputs.a, &data.gate_inputs.b].map(|x| rows(x, h.value))
            }
            _ => [&data.inputs.g, &data.inputs.beta].map(|x| rows(&f32s(x), h.value)),
        };
        let [g, beta] = gates;
        let state = h.value * h.key_dim * h.value_dim;
        let kind = kind(case);
        // States of fragments at the ends of sequences; NaN for others, which must not be read.
        let states = |x: &HostTensor, has: &dyn Fn(&Fragment) -> bool| {
            let each = fragments.iter().flat_map(|f| match has(f) {
                true => {
                    let values = &x.values[f.sequence * state..(f.sequence + 1) * state];
                    let values = (kind.layout).from_key_major(values, h.key_dim, h.value_dim);
                    HostTensor::new(kind.dtype, values).bytes
                }
                false => vec![0xff; state * kind.dtype.size()],
            });
            up(&each.collect::<Vec<u8>>())
        };
        let last = |f: &Fragment| f.begin + f.tokens == case.lengths[f.sequence];
        let has = case.has_initial.as_ref().map(|has| {
            let has: Vec<u8> = fragments.iter().map(|f| has[f.sequence]).collect();
            up(&has)
        });
        let numbers = |n: usize| context.upload(&vec![f32::NAN; n]).expect("memory");
        let size = case.spec.dtype.size();
        Rank {
            inputs: [
                rows(&data.inputs.q, h.key * h.key_dim),
                rows(&data.inputs.k, h.key * h.key_dim),
                rows(&data.inputs.v, h.value * h.value_dim),
                g,
                beta,
                rows(&given.d_o, h.value * h.value_dim),
            ],
            per_head: [&data.gate_inputs.a_log, &data.gate_inputs.dt_bias]
                .map(|x| context.upload(x).expect("memory")),
            states: [
                (data.initial.as_ref()).map(|x| states(x, &|f: &Fragment| f.begin == 0)),
                given.d_final.as_ref().map(|x| states(x, &last)),
            ],
            has,
            outputs: [
                nan(tokens * h.key * h.key_dim * size),
                nan(tokens * h.key * h.key_dim * size),
                nan(tokens * h.value * h.value_dim * size),
                nan(tokens * h.value * 4),
                nan(tokens * h.value * 4),
            ],
            d_per_head: [numbers(h.value), numbers(h.value)],
            d_initial: numbers(fragments.len().max(1) * state),
            workspace: nan(plan.workspace_bytes()),
            plan,
            fragments,
            tokens,
        }
    }

    fn launch(&mut self, case: &Case, stage: Stage<'_>) -> Result<()> {
        let stream = context().stream()?;
        let h = case.spec.heads;
        let dtype = case.spec.dtype;
        let dense = |[_, b, c]: [usize; 3]| [b * c, c, 1];
        let rows = |heads, dim| [self.tokens, heads, dim];
        let (key, value) = (rows(h.key, h.key_dim), rows(h.value, h.value_dim));
        let scalars = [self.tokens, h.value];
        let [q, k, v, g, beta, d_o] = &self.inputs;
        let [a_log, dt_bias] = &self.per_head;
        let gate_dtype = match case.gate_kind {
            GateKind::Raw { dtype, .. } => dtype,
            _ => Dtype::F32,
        };
        let raw = matches!(case.gate_kind, GateKind::Raw { .. });
        let scalar = |x| Buffer::<u8>::tensor_of(x, gate_dtype, scalars, [h.value, 1], 0);
        let gating = match case.gate_kind {
            GateKind::Raw {
                allow_neg_eigval, ..
            } => Gating::Raw {
                a: scalar(g)?.into(),
                b: scalar(beta)?.into(),
                a_log: a_log.tensor([h.value])?,
                dt_bias: Some(dt_bias.tensor([h.value])?),
                allow_neg_eigval,
            },
            _ => Gating::Given {
                g: Some(scalar(g)?.into()),
                beta: Some(scalar(beta)?.into()),
            },
        };
        let n = self.fragments.len();
        let kind = kind(case);
        let shape = match kind.layout {
            StateLayout::KeyMajor => [n, h.value, h.key_dim, h.value_dim],
            StateLayout::ValueMajor => [n, h.value, h.value_dim, h.key_dim],
        };
        let strides = |[_, a, b, c]: [usize; 4]| [a * b * c, b * c, c, 1];
        let [initial, d_final] = &self.states;
        let state = |x: Option<_>| {
            x.map(|x| Buffer::<u8>::tensor_of(x, kind.dtype, shape, strides(shape), 0))
                .transpose()
        };
        let layout = kind.layout;
        let [d_q, d_k, d_v, d_g, d_beta] = &mut self.outputs;
        let [d_a_log, d_dt_bias] = &mut self.d_per_head;
        let key_major = [n, h.value, h.key_dim, h.value_dim];
        let tensors = BackwardTensors {
            cu_seqlens: None,
            q: q.tensor_of(dtype, key, dense(key), 0)?.into(),
            k: k.tensor_of(dtype, key, dense(key), 0)?.into(),
            v: v.tensor_of(dtype, value, dense(value), 0)?.into(),
            gating,
            initial: state(initial.as_ref())?.map(|tensor| InitialState {
                state: State { tensor, layout },
                has_initial_state: self.has.as_ref().map(Into::into),
            }),
            d_o: d_o.tensor_of(dtype, value, dense(value), 0)?.into(),
            d_final: state(d_final.as_ref())?.map(|tensor| State { tensor, layout }),
            d_q: Some(d_q.tensor_of_mut(dtype, key, dense(key), 0)?.into()),
            d_k: Some(d_k.tensor_of_mut(dtype, key, dense(key), 0)?.into()),
            d_v: Some(d_v.tensor_of_mut(dtype, value, dense(value), 0)?.into()),
            d_g: Some(
                d_g.tensor_of_mut(Dtype::F32, scalars, [h.value, 1], 0)?
                    .into(),
            ),
            d_beta: Some(
                d_beta
                    .tensor_of_mut(Dtype::F32, scalars, [h.value, 1], 0)?
                    .into(),
            ),
            d_a_log: match raw {
                true => Some(d_a_log.tensor_mut([h.value])?),
                false => None,
            },
            d_dt_bias: match raw {
                true => Some(d_dt_bias.tensor_mut([h.value])?),
                false => None,
            },
            d_initial: Some(StateMut {
                tensor: self.d_initial.tensor_mut(key_major)?,
                layout: StateLayout::KeyMajor,
            }),
        };
        let workspace = Workspace::new(&mut self.workspace);
        match stage {
            Stage::Summarise(to) => {
                let to = Workspace::new(to);
                (self.plan).summarise_launch(&stream, &tensors, to, workspace)?;
            }
            Stage::Finish(gathered) => {
                let gathered = Workspace::new(gathered);
                (self.plan).finish_launch(&stream, &tensors, gathered, workspace)?;
            }
            Stage::All(communicator, memory) => {
                let memory = memory.map(Workspace::new);
                let plan = &self.plan;
                communicator.prefill_backward(plan, &stream, &tensors, memory, workspace)?;
                communicator.synchronize(&stream)?;
            }
        }
        stream.synchronize()
    }
}

fn poison(bytes: usize) -> Buffer<u8> {
    context().upload(&vec![0xff; bytes]).expect("memory")
}

/// Gradients of all ranks together. Those of `A_log` and `dt_bias` are added up.
fn share(case: &Case, data: &Data, given: &Given, layout: &RankLayout) -> Gradients {
    let stream = context().stream().expect("a stream");
    let h = case.spec.heads;
    let rank = |rank| Rank::new(case, data, given, layout, rank);
    let mut ranks: Vec<Rank> = (0..layout.ranks()).map(rank).collect();
    let mut all = Vec::new();
    for rank in &mut ranks {
        let mut summary = poison(rank.plan.summary_bytes());
        rank.launch(case, Stage::Summarise(&mut summary))
            .expect("the first stage");
        all.extend(summary.download(&stream).expect("a copy"));
        assert_eq!(rank.plan.gathered_bytes(), layout.ranks() * summary.len());
    }
    let state = h.value * h.key_dim * h.value_dim;
    let widths = [
        h.key * h.key_dim,
        h.key * h.key_dim,
        h.value * h.value_dim,
        h.value,
        h.value,
    ];
    let cu = case.cu_seqlens();
    let mut rows = widths.map(|width| vec![f32::NAN; case.tokens() * width]);
    let mut per_head = [vec![0.0; h.value], vec![0.0; h.value]];
    let mut d_initial = vec![f32::NAN; case.lengths.len() * state];
    for rank in &mut ranks {
        let mut gathered = context().upload(&all).expect("memory");
        rank.launch(case, Stage::Finish(&mut gathered))
            .expect("the second stage");
        assert!(gathered.download(&stream).expect("a copy") == all);
        for (i, (out, width)) in rows.iter_mut().zip(widths).enumerate() {
            let dtype = if i < 3 { case.spec.dtype } else { Dtype::F32 };
            let bytes = rank.outputs[i].download(&stream).expect("a copy");
            let values = HostTensor::from_bytes(dtype, bytes).values;
            let (own, padding) = values.split_at(values.len() - PADDING * width);
            assert!(padding.iter().all(|x| x.to_bits() == 0), "padding");
            let mut at = 0;
            for f in &rank.fragments {
                let to = (cu[f.sequence] as usize + f.begin) * width;
                let n = f.tokens * width;
                out[to..to + n].copy_from_slice(&own[at..at + n]);
                at += n;
            }
        }
        for (sum, own) in per_head.iter_mut().zip(&rank.d_per_head) {
            let own = own.download(&stream).expect("a copy");
            sum.iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
        }
        let states = rank.d_initial.download(&stream).expect("a copy");
        for (f, own) in rank.fragments.iter().zip(states.chunks_exact(state)) {
            match f.begin {
                0 => d_initial[f.sequence * state..][..state].copy_from_slice(own),
                _ => assert!(own.iter().all(|x| x.is_nan()), "dS0 of a fragment within"),
            }
        }
    }
    let end = case.lengths.iter().sum::<usize>();
    for (out, width) in rows.iter_mut().zip(widths) {
        out[end * width..].fill(0.0);
    }
    let raw = matches!(case.gate_kind, GateKind::Raw { .. });
    let [q, k, v, g, beta] = rows.map(Some);
    let [a_log, dt_bias] = per_head.map(|x| raw.then_some(x));
    [q, k, v, g, beta, a_log, dt_bias, Some(d_initial)]
}

fn assert_same(alone: &Gradients, shared: &Gradients, what: &str) {
    // Those of A_log and dt_bias are sums of ranks' sums.
    for i in [0, 1, 2, 3, 4, 7] {
        let [a, b] = [alone, shared].map(|x| bits(x[i].as_ref().expect("wanted")));
        assert!(a == b, "{} differs: {what}", NAMES[i]);
    }
}

fn assert_accurate(case: &Case, data: &Data, given: &Given, found: &Gradients, slack: f64) {
    for (name, error, chain) in judge_backward(case, data, given, found) {
        let limit = (slack * chain).max(4e-3);
        assert!(error <= limit, "{name}: {error:.2e} above {limit:.2e}");
    }
}

/// All ways to share a case, against one rank; and one rank, and the most ranks, against the oracle.
fn check_layouts(case: &Case, block: usize, ranks: &[usize]) {
    let (data, given) = (case.data(), Given::new(case));
    let lengths = &case.lengths;
    let one = RankLayout::contiguous(lengths, block, 1).expect("a layout");
    let alone = share(case, &data, &given, &one);
    assert_accurate(case, &data, &given, &alone, 1.2);
    for &ranks in ranks {
        for (name, layout) in [
            ("contiguous", RankLayout::contiguous(lengths, block, ranks)),
            ("zig-zag", RankLayout::zigzag(lengths, block, ranks)),
            ("packed", RankLayout::packed(lengths, block, ranks)),
        ] {
            let shared = share(case, &data, &given, &layout.expect("a layout"));
            assert_same(&alone, &shared, &format!("{ranks} ranks, {name}"));
            assert_accurate(case, &data, &given, &shared, 1.2);
        }
    }
}

/// One sequence over 1 to 8 ranks, some of them empty, with dS_T and dS0.
#[test]
fn one_sequence_over_ranks() {
    for (gates, dtype) in [
        (Gates::Zero, Dtype::Bf16),
        (Gates::Mixed, Dtype::F16),
        (Gates::Strong, Dtype::Bf16),
    ] {
        let case = case(dtype, &[64 * 7 + 5], gates);
        check_layouts(&case, 64, &[2, 3, 5, 8]);
        check_layouts(&case, 192, &[2]);
    }
}

/// Sequences without tokens, of one block, and that end on a rank's border; both layouts of states; raw gates.
#[test]
fn packed_sequences_over_ranks() {
    let mut case = case(Dtype::Bf16, &[128, 0, 300, 64, 1, 256, 65], Gates::Mixed);
    case.has_initial = Some(vec![1, 1, 0, 1, 0, 1, 1]);
    case.spec.qk_l2norm = true;
    case.spec.heads.map = HeadMap::Tiled;
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
    check_layouts(&case, 128, &[2, 5]);
    check_layouts(&case, 64, &[3, 8]);
}

/// The block decides the bits: the test of equal bits could fail.
#[test]
fn another_block_gives_other_bits() {
    let case = case(Dtype::Bf16, &[512], Gates::Zero);
    let (data, given) = (case.data(), Given::new(&case));
    let [a, b] = [64, 256].map(|block| {
        let layout = RankLayout::contiguous(&case.lengths, block, 2).expect("a layout");
        share(&case, &data, &given, &layout)
    });
    assert!(a[1] != b[1]);
}

/// Sizes, kernels, and what a launch refuses.
#[test]
fn plans_and_launches_are_checked() {
    let mut case = case(Dtype::Bf16, &[640], Gates::Zero);
    case.spec = spec(Dtype::Bf16, 1, 2, 32, 48);
    let (data, given) = (case.data(), Given::new(&case));
    let layout = RankLayout::contiguous(&case.lengths, 128, 2).expect("a layout");
    let [mut a, b] = [0, 1].map(|rank| Rank::new(&case, &data, &given, &layout, rank));
    // Blocks 0, 1, 2 and 3, 4: three summaries each, for both directions, of two heads with N and M.
    assert_eq!(a.plan.summary_bytes(), 2 * 3 * 2 * 2 * 48 * 32 * 4 + 256);
    assert_eq!(a.plan.summary_bytes(), b.plan.summary_bytes());
    let [first, second] = a.plan.kernels(false);
    assert_eq!((first.len(), second.len()), (2, 4));
    let mut small = poison(a.plan.summary_bytes() - 256);
    let error = a
        .launch(&case, Stage::Summarise(&mut small))
        .expect_err("too small");
    assert!(error.to_string().starts_with("summary"), "{error}");
    let mut small = poison(a.plan.gathered_bytes() - 256);
    let error = a
        .launch(&case, Stage::Finish(&mut small))
        .expect_err("too small");
    assert!(error.to_string().starts_with("gathered"), "{error}");
    // Nothing is exchanged if no sequence has two blocks.
    let apart = RankLayout::contiguous(&[128, 128], 128, 2).expect("a layout");
    let plan = ParallelPrefill::new(&context(), case.spec, &apart, 0, 128).expect("a plan");
    let plan = ParallelPrefillBackward::of(&plan).expect("a plan");
    assert_eq!((plan.summary_bytes(), plan.gathered_bytes()), (0, 0));
    assert_eq!(plan.rank_of(), (0, 2));
}

/// One call with a communicator does what the stages do, and refuses a plan of another rank.
#[test]
fn one_call_does_all_steps_of_the_backward() {
    let Some(library) = library() else { return };
    let case = case(Dtype::Bf16, &[400, 70], Gates::Zero);
    let (case, data, given) = (&case, &case.data(), &Given::new(&case));
    let layout = &RankLayout::zigzag(&case.lengths, 64, 3).expect("a layout");
    let rank = |rank| Rank::new(case, data, given, layout, rank);
    let outputs = |rank: &Rank| {
        let stream = context().stream().expect("a stream");
        let copies = rank.outputs.iter().map(|x| x.download(&stream));
        copies.collect::<Result<Vec<_>>>().expect("copies")
    };
    let stream = context().stream().expect("a stream");
    let mut staged: Vec<Rank> = (0..3).map(rank).collect();
    let mut all = Vec::new();
    for rank in &mut staged {
        let mut summary = poison(rank.plan.summary_bytes());
        rank.launch(case, Stage::Summarise(&mut summary))
            .expect("the first stage");
        all.extend(summary.download(&stream).expect("a copy"));
    }
    let id = library.unique_id().expect("an id");
    let run = |i| {
        let communicator = join(&library, id, i, 3, 60_000).expect("a communicator");
        let mut rank = rank(i);
        let [mut own, mut all] =
            [rank.plan.summary_bytes(), rank.plan.gathered_bytes()].map(poison);
        rank.launch(case, Stage::All(&communicator, [&mut own, &mut all]))
            .expect("a launch");
        outputs(&rank)
    };
    let found: Vec<_> = thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = (0..3).map(|i| scope.spawn(move || run(i))).collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended.map(|outputs| outputs.expect("a rank")).collect()
    });
    let mut gathered = context().upload(&all).expect("memory");
    for (i, (rank, found)) in staged.iter_mut().zip(found).enumerate() {
        rank.launch(case, Stage::Finish(&mut gathered))
            .expect("the second stage");
        assert!(outputs(rank) == found, "rank {i}");
    }
    let id = library.unique_id().expect("an id");
    let alone = join(&library, id, 0, 1, 1000).expect("a communicator");
    let mut own = poison(staged[1].plan.summary_bytes());
    let stage = Stage::All(&alone, [&mut own, &mut gathered]);
    let error = staged[1].launch(case, stage).expect_err("rank 1 of 3");
    assert!(error.to_string().contains("plan: rank 1 of 3"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        // An eighth of what is asked for: each case is a backward of up to six ranks.
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).map_or(12, |n: u32| n.div_ceil(8)),
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    /// Blocks dealt to ranks at random, fragments in a random order: one rank's bits.
    #[test]
    fn random_layouts_of_the_backward(
        lengths in prop::collection::vec(prop_oneof![Just(0usize), 1usize..300, (1usize..5).prop_map(|n| 64 * n)], 1..4),
        block in 1usize..3, ranks in 1usize..7, deal in prop::collection::vec(any::<u8>(), 16),
        zero: bool, f16: bool, initial: bool, last: bool,
    ) {
        let gates = if zero { Gates::Zero } else { Gates::Mixed };
        let mut case = case(if f16 { Dtype::F16 } else { Dtype::Bf16 }, &lengths, gates);
        case.spec.heads.key_dim = 16;
        case.spec.heads.value_dim = 32;
        if !initial {
            case.initial = None;
        }
        let block = 64 * block;
        let mut fragments = vec![Vec::<Fragment>::new(); ranks];
        for (sequence, &tokens) in lengths.iter().enumerate() {
            for b in 0..tokens.div_ceil(block).max(1) {
                let at = (5 * sequence + b) % deal.len();
                let begin = b * block;
                let of_block = block.min(tokens - begin);
                let to = &mut fragments[deal[at] as usize % ranks];
                match to.last_mut() {
                    Some(f) if f.sequence == sequence && f.begin + f.tokens == begin => f.tokens += of_block,
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
        let (data, mut given) = (case.data(), Given::new(&case));
        if !last {
            given.d_final = None;
        }
        let alone = share(&case, &data, &given, &one);
        assert_same(&alone, &share(&case, &data, &given, &layout), &format!("{layout:?}"));
    }
}
