//! `deltawave prefill --ranks N`: a prefill that ranks share.
//!
//! Local ranks are plans of one process on one device, and the exchange copies through the host. Otherwise each rank is a
//! process with a device of its own: this process is rank 0, and starts the others with the same arguments and `--join`.

use std::cell::{RefCell, RefMut};
use std::env;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use deltawave::gates::Gating;
use deltawave::parallel::{Collectives, Communicator, UniqueId};
use deltawave::prefill::{Fragment, ParallelPrefill, Part, PrefillTensors, RankLayout};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::state::{InitialState, State, StateMut, States};
use deltawave::tensor::{Buffer, TokenScalars, Tokens, dense_strides};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::workload::taken;
use serde_json::json;

use super::PrefillRun;
use super::args::{EXCHANGES, Exchange, Join, RANK_LAYOUTS, RankLayoutKind};
use super::backward_ranks::BackwardRanksRun;
use crate::args::word;
use crate::device::{Fallible, Results, Slots, Views};
use crate::driver::{self, Operation, Options};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::recurrence;
use crate::report::{Checked, Description, Report};
use crate::table::bytes;

/// Runs a prefill that ranks share, or the backward of one.
pub(super) fn run(run: PrefillRun<'_>, options: &Options) -> Result<Report, Failure> {
    let (args, backward) = (&run.args.ranks, run.args.backward);
    let count = args.ranks.unwrap_or(1) as usize;
    let lengths: Vec<usize> = (run.cu_seqlens.windows(2))
        .map(|w| (w[1] - w[0]) as usize)
        .collect();
    let block = (args.rank_block)
        .unwrap_or_else(|| RankLayout::default_block(&lengths, run.spec.heads.value));
    let layout = match args.rank_layout {
        RankLayoutKind::Contiguous => RankLayout::contiguous(&lengths, block, count),
        RankLayoutKind::Zigzag => RankLayout::zigzag(&lengths, block, count),
        RankLayoutKind::Packed => RankLayout::packed(&lengths, block, count),
    };
    let layout = layout.map_err(Failure::during("the layout of the ranks is refused"))?;
    let join = args.join;
    let shared = RanksRun {
        run,
        layout,
        join,
        bits_equal: None,
    };
    let mut of_process = options.run.clone();
    let mut check = options.check;
    if let Some(join) = join {
        of_process.device = join.device;
        check = false;
    }
    let options = Options {
        run: &of_process,
        check,
        ..*options
    };
    match backward {
        true => driver::run(BackwardRanksRun(shared), &options),
        false => driver::run(shared, &options),
    }
}

/// A prefill over ranks.
pub(super) struct RanksRun<'a> {
    pub(super) run: PrefillRun<'a>,
    pub(super) layout: RankLayout,
    /// Rank of this process, if another one started it.
    pub(super) join: Option<Join>,
    pub(super) bits_equal: Option<bool>,
}

/// The part of one rank: stages with an exchange between them.
pub(super) trait Stages: Sized {
    /// Makes it of the prefill's.
    fn of(prefill: ParallelPrefill) -> Result<Self, Failure>;
    /// Bytes of the summaries of a rank, of those of all ranks, and of the workspace.
    fn sizes(&self) -> [usize; 3];
}

impl Stages for ParallelPrefill {
    fn of(prefill: ParallelPrefill) -> Result<Self, Failure> {
        Ok(prefill)
    }

    fn sizes(&self) -> [usize; 3] {
        let [summary, gathered] = [self.summary_bytes(), self.gathered_bytes()];
        [summary, gathered, self.workspace_bytes()]
    }
}

/// The ranks of this process.
pub(super) struct Plan<P> {
    pub(super) ranks: Vec<(usize, P)>,
    pub(super) memory: RefCell<Vec<Memory>>,
    pub(super) others: Option<Others>,
}

/// Scratch memory of a rank.
pub(super) struct Memory {
    pub(super) summary: Buffer<u8>,
    pub(super) gathered: Buffer<u8>,
    pub(super) workspace: Buffer<u8>,
}

impl<P> Plan<P> {
    /// The ranks of this process.
    fn numbers(&self) -> Vec<usize> {
        self.ranks.iter().map(|(rank, _)| *rank).collect()
    }

    /// Scratch memory, of which a byte that no kernel writes shows.
    pub(super) fn poisoned(&self, stream: &Stream) -> Fallible<RefMut<'_, Vec<Memory>>> {
        let mut memory = self.memory.borrow_mut();
        for m in memory.iter_mut() {
            for buffer in [&mut m.summary, &mut m.gathered, &mut m.workspace] {
                buffer.fill_bytes(0xff, stream)?;
            }
        }
        Ok(memory)
    }
}

/// Kernels of all ranks in the order of their launches, each once.
pub(super) fn in_order(mut names: Vec<&'static str>) -> Vec<&'static str> {
    const ORDER: [&str; 8] = [
        "prepare",
        "summarise",
        "collect",
        "combine",
        "scan",
        "walk",
        "gradients",
        "sums",
    ];
    names.sort_by_key(|name| (ORDER.iter().position(|part| name.contains(part)), *name));
    names.dedup();
    names
}

/// Gathers the summaries of ranks in one process, through the host.
pub(super) fn exchange(memory: &mut [Memory], stream: &Stream) -> Fallible<()> {
    let mut all = Vec::new();
    for m in memory.iter() {
        all.extend(m.summary.download(stream)?);
    }
    memory.iter_mut().try_for_each(|m| m.gathered.write(&all))
}

/// First row and fragment of a rank among those of this process, and their numbers.
#[derive(Clone, Copy)]
pub(super) struct Place {
    row: usize,
    pub(super) rows: usize,
    fragment: usize,
    pub(super) fragments: usize,
}

impl Place {
    /// Offset of a tensor over tokens, with `row` elements each, and of states of `state` elements.
    pub(super) fn offsets(&self, row: usize, state: usize) -> [usize; 2] {
        [self.row * row, self.fragment * state]
    }
}

/// Ranks in other processes.
pub(super) struct Others {
    pub(super) communicator: Communicator,
    pub(super) processes: RefCell<Processes>,
}

/// Processes that this one started; ended with it.
pub(super) struct Processes(Vec<(usize, Child)>);

impl Drop for Processes {
    fn drop(&mut self) {
        for (_, process) in &mut self.0 {
            // There is nobody to tell an error: the process may have ended.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Processes {
    pub(super) fn wait(&mut self) -> Result<(), Failure> {
        for (rank, mut process) in self.0.drain(..) {
            let ended = process.wait();
            if !ended.as_ref().is_ok_and(|status| status.success()) {
                let why = ended.map_or_else(|e| e.to_string(), |status| status.to_string());
                return Err(Failure::Rank { rank, why });
            }
        }
        Ok(())
    }
}

/// Tensors of the whole, and of the ranks of this process: one after another, fragment by fragment.
pub(super) struct Data {
    whole: Rc<PrefillFile>,
    own: PrefillFile,
}

/// Memory that is read, and its type.
pub(super) type Given<'a> = (&'a Buffer<u8>, Dtype);

/// Inputs of a launch.
pub(super) struct Inputs<'a> {
    pub(super) q: Given<'a>,
    pub(super) k: Given<'a>,
    pub(super) v: Given<'a>,
    g: Option<Given<'a>>,
    beta: Option<Given<'a>>,
    raw: Option<[Given<'a>; 3]>,
    dt_bias: Option<Given<'a>>,
    initial: Option<Given<'a>>,
}

/// Why a tensor of the list is there.
pub(super) const LISTED: &str = "an operation has the tensors of its list";

impl<'a> Inputs<'a> {
    pub(super) fn of(views: &mut Views<'a>) -> Self {
        let mut input = |name| views.buffer(name).map(|(x, dtype)| (&*x, dtype));
        let raw = ["a", "b", "a_log"].map(&mut input);
        Inputs {
            q: input("q").expect(LISTED),
            k: input("k").expect(LISTED),
            v: input("v").expect(LISTED),
            g: input("g"),
            beta: input("beta"),
            raw: match raw {
                [Some(a), Some(b), Some(a_log)] => Some([a, b, a_log]),
                _ => None,
            },
            dt_bias: input("dt_bias"),
            initial: input("initial"),
        }
    }
}

/// Rows of a tensor over tokens that a rank has.
pub(super) fn tokens<'t>(
    (x, dtype): Given<'t>,
    place: Place,
    heads: usize,
    dim: usize,
) -> Fallible<Tokens<'t>> {
    let shape = [place.rows, heads, dim];
    let [offset, _] = place.offsets(heads * dim, 0);
    Ok((x.tensor_of(dtype, shape, dense_strides(shape), offset)?).into())
}

/// Tensors of a launch.
struct Tensors<'a> {
    inputs: Inputs<'a>,
    o: (&'a mut Buffer<u8>, Dtype),
    states: (&'a mut Buffer<u8>, Dtype),
}

impl RanksRun<'_> {
    /// Rows of the whole batch that a rank has, in the order of its batch.
    pub(super) fn rows(&self, rank: usize) -> impl Iterator<Item = usize> {
        let begin = |f: &Fragment| self.run.cu_seqlens[f.sequence] as usize + f.begin;
        let fragments = self.layout.fragments(rank).iter();
        fragments.flat_map(move |f| begin(f)..begin(f) + f.tokens)
    }

    pub(super) fn tokens(&self, rank: usize) -> usize {
        let fragments = self.layout.fragments(rank).iter();
        fragments.map(|f| f.tokens).sum()
    }

    fn of_rank(&self, context: &Context, rank: usize) -> Result<ParallelPrefill, Failure> {
        ParallelPrefill::new(
            context,
            self.run.spec,
            &self.layout,
            rank,
            self.tokens(rank),
        )
        .map_err(Failure::during("planning the prefill failed"))
    }

    /// Joins the ranks of other processes; rank 0 starts them.
    fn others(&self, context: &Context, plan: &ParallelPrefill) -> Result<Others, Failure> {
        let failed = Failure::during("the ranks cannot be connected");
        let (rank, ranks) = plan.rank_of();
        let library = Collectives::load(context, None).map_err(&failed)?;
        let mut processes = Processes(Vec::new());
        let id = match self.join {
            Some(join) => UniqueId(join.id),
            None => {
                let id = library.unique_id().map_err(&failed)?;
                let first = self.run.args.run.device;
                // A simulated device is the process's own.
                let step = usize::from(context.backend() != Backend::Simulator);
                let last = first + step * (ranks - 1);
                if last != first {
                    drop(Context::new(context.backend(), last).map_err(&failed)?);
                }
                for rank in 1..ranks {
                    let device = first + step * rank;
                    let id = id.0;
                    processes.0.push((rank, start(Join { rank, device, id })?));
                }
                id
            }
        };
        let timeout = Duration::from_secs(self.run.args.ranks.rank_timeout.into());
        let communicator = Communicator::new(context, &library, id, rank, ranks, timeout);
        let communicator = communicator.map_err(&failed)?;
        communicator.agree(plan).map_err(&failed)?;
        Ok(Others {
            communicator,
            processes: processes.into(),
        })
    }

    /// Results of all ranks, rank by rank, from those of each process. `counts`: numbers of each rank, by name.
    pub(super) fn gather<P>(
        &self,
        plan: &Plan<P>,
        results: &mut Results,
        counts: &[(&'static str, Vec<usize>)],
    ) -> Fallible<()> {
        let Some(others) = &plan.others else {
            return Ok(());
        };
        let (communicator, ranks) = (&others.communicator, self.layout.ranks());
        let context = plan.memory.borrow()[0].summary.context().clone();
        let stream = context.stream()?;
        for (name, count) in counts {
            let t = &results[name];
            let most = count.iter().max().copied().unwrap_or(0) * t.dtype.size();
            let mut padded = t.bytes.clone();
            padded.resize(most, 0);
            let mut send = context.upload(&padded)?;
            let mut receive = context.alloc::<u8>(most * ranks)?;
            if most > 0 {
                let memory = [&mut send, &mut receive].map(Workspace::new);
                let [from, to] = &memory;
                communicator.all_gather(&stream, from, to, most)?;
                communicator.synchronize(&stream)?;
            }
            let all = receive.download(&stream)?;
            let mut bytes = Vec::new();
            for (rank, count) in count.iter().enumerate() {
                let begin = rank * most;
                bytes.extend(&all[begin..begin + count * t.dtype.size()]);
            }
            let whole = HostTensor::from_bytes(t.dtype, bytes);
            results.insert(name, whole);
        }
        Ok(())
    }

    /// Numbers of each rank in a tensor over tokens.
    pub(super) fn of_rows(&self, row: usize) -> Vec<usize> {
        let ranks = 0..self.layout.ranks();
        ranks.map(|rank| self.tokens(rank) * row).collect()
    }

    /// Numbers of each rank in states.
    pub(super) fn of_states(&self) -> Vec<usize> {
        let h = &self.run.spec.heads;
        let state = h.value * h.key_dim * h.value_dim;
        let ranks = 0..self.layout.ranks();
        ranks
            .map(|rank| self.layout.fragments(rank).len() * state)
            .collect()
    }

    /// A tensor over tokens of all ranks, rank by rank, in the order of the whole. Rows past the last sequence are on no rank.
    pub(super) fn settled(&self, t: &HostTensor, row: usize) -> HostTensor {
        let size = row * t.dtype.size();
        let mut whole = vec![0; self.run.tokens * size];
        let ranks = 0..self.layout.ranks();
        for (n, to) in ranks.flat_map(|rank| self.rows(rank)).enumerate() {
            whole[to * size..(to + 1) * size].copy_from_slice(&t.bytes[n * size..(n + 1) * size]);
        }
        HostTensor::from_bytes(t.dtype, whole)
    }

    /// States of all fragments, rank by rank: one for each sequence, of its fragment that `has` it.
    pub(super) fn of_sequences(
        &self,
        states: &HostTensor,
        has: impl Fn(&Fragment) -> bool,
    ) -> HostTensor {
        let h = &self.run.spec.heads;
        let mut place = vec![0; self.run.sequences()];
        let ranks = 0..self.layout.ranks();
        for (n, f) in ranks.flat_map(|r| self.layout.fragments(r)).enumerate() {
            if has(f) {
                place[f.sequence] = n;
            }
        }
        taken(states, h.value * h.key_dim * h.value_dim, &place)
    }

    /// Whether a fragment ends its sequence.
    pub(super) fn ends(&self, f: &Fragment) -> bool {
        f.begin + f.tokens == self.layout.lengths()[f.sequence]
    }

    /// Brings outputs and final states of all ranks, rank by rank, to the order of the whole.
    fn settle(&self, results: &mut Results) {
        let h = &self.run.spec.heads;
        let o = self.settled(&results["o"], h.value * h.value_dim);
        let states = self.of_sequences(&results["states"], |f| self.ends(f));
        let states = self.run.states(0).key_major(&states);
        results.insert("o", o);
        results.insert("states", states);
    }

    /// The same with one rank.
    pub(super) fn alone(&self, whole: &Rc<PrefillFile>) -> Result<RanksRun<'_>, Failure> {
        let layout = RankLayout::contiguous(self.layout.lengths(), self.layout.block_tokens(), 1);
        let mut alone = RanksRun {
            run: PrefillRun::of_file(self.run.args, Rc::clone(whole)),
            layout: layout.map_err(Failure::during("the layout of one rank is refused"))?,
            join: None,
            bits_equal: None,
        };
        alone.run.spec = self.run.spec;
        Ok(alone)
    }

    /// Whether one rank with the same blocks has the same bits.
    fn one_rank(&self, context: &Context, data: &Data, results: &Results) -> Result<bool, Failure> {
        let alone = self.alone(&data.whole)?;
        let plan = alone.local(context)?;
        let of_one = Data {
            whole: Rc::clone(&data.whole),
            own: alone.own(&plan, &data.whole),
        };
        let mut found = driver::run_alone(context, &plan, &alone, &of_one)
            .map_err(Failure::during("the prefill on one rank failed"))?;
        alone.settle(&mut found);
        let same = |name| found[name].bytes == results[name].bytes;
        Ok(same("o") && same("states"))
    }

    /// All ranks in this process.
    pub(super) fn local<P: Stages>(&self, context: &Context) -> Result<Plan<P>, Failure> {
        let ranks = 0..self.layout.ranks();
        let ranks = ranks.map(|rank| Ok((rank, self.of_rank(context, rank)?)));
        self.of_plans(context, ranks.collect::<Result<_, Failure>>()?, None)
    }

    /// The ranks of this process: all, or its own.
    pub(super) fn plans<P: Stages>(&self, context: &Context) -> Result<Plan<P>, Failure> {
        let simulated = context.backend() == Backend::Simulator;
        let local = match self.run.args.ranks.exchange {
            Exchange::Auto => simulated,
            Exchange::Local => true,
            Exchange::Processes => false,
        };
        if local {
            return self.local(context);
        }
        let rank = self.join.map_or(0, |join| join.rank);
        let plan = self.of_rank(context, rank)?;
        let others = self.others(context, &plan)?;
        self.of_plans(context, vec![(rank, plan)], Some(others))
    }

    fn of_plans<P: Stages>(
        &self,
        context: &Context,
        ranks: Vec<(usize, ParallelPrefill)>,
        others: Option<Others>,
    ) -> Result<Plan<P>, Failure> {
        let ranks = ranks
            .into_iter()
            .map(|(rank, plan)| Ok((rank, P::of(plan)?)));
        let ranks = ranks.collect::<Result<Vec<_>, Failure>>()?;
        let memory = ranks.iter().map(|(_, plan)| {
            let [summary, gathered, workspace] = plan.sizes();
            Ok(Memory {
                summary: context.alloc(summary)?,
                gathered: context.alloc(gathered)?,
                workspace: context.alloc(workspace)?,
            })
        });
        let memory = memory.collect::<Fallible<Vec<_>>>();
        let memory = memory.map_err(Failure::during("there is no memory for the summaries"))?;
        Ok(Plan {
            ranks,
            memory: memory.into(),
            others,
        })
    }

    /// Rows of the ranks of this process, and their fragments.
    pub(super) fn parts<P>(&self, plan: &Plan<P>) -> (Vec<usize>, Vec<Fragment>) {
        let ranks = plan.numbers();
        let rows = ranks.iter().flat_map(|&rank| self.rows(rank)).collect();
        let fragments = ranks.iter().flat_map(|&rank| self.layout.fragments(rank));
        (rows, fragments.copied().collect())
    }

    /// States of fragments, of `whole`'s sequences; NaN for those that nothing may read.
    pub(super) fn of_fragments(
        whole: &HostTensor,
        state: usize,
        fragments: &[Fragment],
        reads: impl Fn(&Fragment) -> bool,
    ) -> HostTensor {
        let sequences: Vec<_> = fragments.iter().map(|f| f.sequence).collect();
        let mut bytes = taken(whole, state, &sequences).bytes;
        let size = state * whole.dtype.size();
        for (n, _) in fragments.iter().enumerate().filter(|(_, f)| !reads(f)) {
            bytes[n * size..(n + 1) * size].fill(0xff);
        }
        HostTensor::from_bytes(whole.dtype, bytes)
    }

    /// Tensors of the ranks of this process.
    pub(super) fn own<P>(&self, plan: &Plan<P>, whole: &PrefillFile) -> PrefillFile {
        let (rows, fragments) = self.parts(plan);
        let mut cu_seqlens = vec![0];
        let mut end = 0;
        for f in &fragments {
            end += f.tokens as i32;
            cu_seqlens.push(end);
        }
        let initial = whole
            .initial_state
            .as_ref()
            .map(|t| Self::of_fragments(t, whole.state_elements(), &fragments, |f| f.begin == 0));
        whole.of_rows(&rows, cu_seqlens, initial)
    }

    /// Places of the ranks of this process.
    pub(super) fn places<P>(&self, plan: &Plan<P>) -> Vec<Place> {
        let mut places = Vec::new();
        let (mut row, mut fragment) = (0, 0);
        for (rank, _) in &plan.ranks {
            let (rows, fragments) = (self.tokens(*rank), self.layout.fragments(*rank).len());
            places.push(Place {
                row,
                rows,
                fragment,
                fragments,
            });
            (row, fragment) = (row + rows, fragment + fragments);
        }
        places
    }

    /// Gates of a rank.
    pub(super) fn gating<'t>(&self, t: &Inputs<'t>, place: Place) -> Fallible<Gating<'t>> {
        let heads = self.run.spec.heads.value;
        let scalars = |(x, dtype): Given<'t>| -> Fallible<TokenScalars<'t>> {
            let shape = [place.rows, heads];
            let [offset, _] = place.offsets(heads, 0);
            Ok(x.tensor_of(dtype, shape, dense_strides(shape), offset)?
                .into())
        };
        let per_head = |(x, dtype): Given<'t>| x.tensor_of(dtype, [heads], [1], 0);
        Ok(match t.raw {
            Some([a, b, a_log]) => Gating::Raw {
                a: scalars(a)?,
                b: scalars(b)?,
                a_log: per_head(a_log)?,
                dt_bias: t.dt_bias.map(per_head).transpose()?,
                allow_neg_eigval: self.run.neg_eigval,
            },
            None => Gating::Given {
                g: t.g.map(scalars).transpose()?,
                beta: t.beta.map(scalars).transpose()?,
            },
        })
    }

    /// Initial states of a rank, if there are any.
    pub(super) fn initial<'t>(
        &self,
        t: &Inputs<'t>,
        place: Place,
    ) -> Fallible<Option<InitialState<'t>>> {
        let Some((x, dtype)) = t.initial.filter(|_| place.fragments > 0) else {
            return Ok(None);
        };
        let shape = self.run.states(place.fragments).shape();
        let [_, offset] = place.offsets(0, self.run.states(1).elements());
        Ok(Some(InitialState {
            state: State {
                tensor: x.tensor_of(dtype, shape, dense_strides(shape), offset)?,
                layout: self.run.args.state.state_layout,
            },
            has_initial_state: None,
        }))
    }

    fn tensors<'t>(&self, t: &'t mut Tensors<'_>, place: Place) -> Fallible<PrefillTensors<'t>> {
        let h = &self.run.spec.heads;
        let shape = self.run.states(place.fragments).shape();
        let row = h.value * h.value_dim;
        let [o_offset, offset] = place.offsets(row, self.run.states(1).elements());
        let inputs = &t.inputs;
        let states = match place.fragments {
            0 => States::None,
            _ => States::Separate {
                initial: self.initial(inputs, place)?,
                last: Some(StateMut {
                    tensor: (t.states.0).tensor_of_mut(
                        t.states.1,
                        shape,
                        dense_strides(shape),
                        offset,
                    )?,
                    layout: self.run.args.state.state_layout,
                }),
            },
        };
        let o_shape = [place.rows, h.value, h.value_dim];
        Ok(PrefillTensors {
            cu_seqlens: None,
            q: tokens(inputs.q, place, h.key, h.key_dim)?,
            k: tokens(inputs.k, place, h.key, h.key_dim)?,
            v: tokens(inputs.v, place, h.value, h.value_dim)?,
            gating: self.gating(inputs, place)?,
            states,
            o: (t.o.0)
                .tensor_of_mut(t.o.1, o_shape, dense_strides(o_shape), o_offset)?
                .into(),
            snapshots: None,
        })
    }

    /// Adds figures and a note of the ranks.
    pub(super) fn describe_ranks<P: Stages>(&self, plan: &Plan<P>, description: &mut Description) {
        let ranks = self.layout.ranks();
        let tokens: Vec<usize> = (0..ranks).map(|rank| self.tokens(rank)).collect();
        let [summary, gathered, _] = plan.ranks[0].1.sizes();
        let exchange = match plan.others {
            None => Exchange::Local,
            Some(_) => Exchange::Processes,
        };
        let kind = word(RANK_LAYOUTS, &self.run.args.ranks.rank_layout);
        let block = self.layout.block_tokens();
        description.figures.add(
            "ranks",
            Some(json!({
                "count": ranks,
                "layout": kind,
                "exchange": word(EXCHANGES, &exchange),
                "block_tokens": block,
                "rank_tokens": tokens,
                "summary_bytes": summary,
                "gathered_bytes": gathered,
            })),
        );
        description
            .figures
            .add("bits_equal_one_rank", Some(self.bits_equal));
        let same = match self.bits_equal {
            None => String::new(),
            Some(true) => "; the bits of one rank".to_owned(),
            Some(false) => "; OTHER BITS than one rank".to_owned(),
        };
        description.notes.push(format!(
            "  ranks  {ranks}, {kind}, blocks of {block} tokens; tokens of the ranks {tokens:?}; each sends {} to each other{same}\n",
            bytes(summary as u64)
        ));
    }
}

/// Starts the process of a rank: this program with the same arguments, which reports nothing.
fn start(join: Join) -> Result<Child, Failure> {
    let failed = |error: std::io::Error| Failure::Rank {
        rank: join.rank,
        why: error.to_string(),
    };
    let mut command = Command::new(env::current_exe().map_err(failed)?);
    command.args(env::args_os().skip(1)).arg("--join");
    command.arg(join.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().map_err(failed)
}

impl Operation for RanksRun<'_> {
    type Plan = Plan<ParallelPrefill>;
    type Data = Data;

    const NAME: &'static str = "prefill";
    const CHECKED: &'static str = PrefillRun::CHECKED;
    const CHECK_STEPS: usize = PrefillRun::CHECK_STEPS;

    fn plan(&self, context: &Context) -> Result<Self::Plan, Failure> {
        self.plans(context)
    }

    fn draw(&mut self, plan: &Self::Plan) -> Result<Data, Failure> {
        let whole = self.run.whole(self.join.is_none())?;
        let own = self.own(plan, &whole);
        Ok(Data { whole, own })
    }

    fn slots<'a>(&self, _: &Self::Plan, data: &'a Data) -> Slots<'a> {
        let fragments = data.own.sequences();
        let states = self.run.states(fragments);
        let initial = data.own.initial_state.as_ref();
        let initial = initial.map(|t| states.laid_out(t, t.dtype));
        let slots = recurrence::inputs(Slots::new(0), &data.own, self.run.neg_eigval);
        slots
            .output("o", self.run.spec.dtype, data.own.v.values.len())
            .output("states", self.run.args.state.state_dtype, states.elements())
            .made_some("initial", initial)
    }

    fn kernels(&self, plan: &Self::Plan) -> Vec<&'static str> {
        in_order(
            (plan.ranks.iter())
                .flat_map(|(_, plan)| plan.kernels().concat())
                .collect(),
        )
    }

    fn launch(
        &self,
        mut views: Views,
        stream: &Stream,
        plan: &Self::Plan,
        _: Part,
    ) -> Fallible<()> {
        let mut t = Tensors {
            inputs: Inputs::of(&mut views),
            o: views.buffer("o").expect(LISTED),
            states: views.buffer("states").expect(LISTED),
        };
        let mut memory = plan.poisoned(stream)?;
        let places = self.places(plan);
        if let Some(others) = &plan.others {
            let tensors = self.tensors(&mut t, places[0])?;
            let m = &mut memory[0];
            let scratch = [&mut m.summary, &mut m.gathered].map(Workspace::new);
            let workspace = Workspace::new(&mut m.workspace);
            let own = &plan.ranks[0].1;
            (others.communicator).prefill(own, stream, &tensors, scratch, workspace)?;
            // Other ranks may have ended: the wait has a limit.
            return others.communicator.synchronize(stream);
        }
        for (((_, own), m), &place) in plan.ranks.iter().zip(memory.iter_mut()).zip(&places) {
            let tensors = self.tensors(&mut t, place)?;
            let summary = Workspace::new(&mut m.summary);
            let workspace = Workspace::new(&mut m.workspace);
            own.summarise_launch(stream, &tensors, summary, workspace)?;
        }
        exchange(&mut memory, stream)?;
        for (((_, own), m), &place) in plan.ranks.iter().zip(memory.iter_mut()).zip(&places) {
            let tensors = self.tensors(&mut t, place)?;
            let all = Workspace::new(&mut m.gathered);
            let workspace = Workspace::new(&mut m.workspace);
            own.finish_launch(stream, &tensors, all, None, workspace)?;
        }
        Ok(())
    }

    fn minimal_bytes(&self, data: &Data) -> usize {
        self.run.minimal_bytes(&data.whole)
    }

    fn finish(
        &mut self,
        context: &Context,
        plan: &Self::Plan,
        data: &Data,
        results: &mut Results,
        options: &Options,
    ) -> Result<(), Failure> {
        self.run.outcome.simulated = context.backend() == Backend::Simulator;
        let h = &self.run.spec.heads;
        let counts = [
            ("o", self.of_rows(h.value * h.value_dim)),
            ("states", self.of_states()),
        ];
        self.gather(plan, results, &counts)
            .map_err(Failure::during("gathering the results failed"))?;
        if let Some(others) = &plan.others {
            others.processes.borrow_mut().wait()?;
        }
        if self.join.is_some() {
            return Ok(());
        }
        self.settle(results);
        self.run.write_output(results)?;
        if options.check {
            self.bits_equal = Some(self.one_rank(context, data, results)?);
        }
        Ok(())
    }

    fn check(&self, data: &Data, results: &Results, progress: &mut Progress) -> Checked {
        let mut verdict = self.run.check(&data.whole, results, progress)?;
        if self.bits_equal == Some(false) {
            let why = "ranks: outputs or final states differ from those of one rank";
            verdict.objections.push(why.to_owned());
        }
        Ok(verdict)
    }

    fn describe(&self, plan: &Self::Plan, data: &Data) -> Description {
        let workspaces = plan.ranks.iter().map(|(_, plan)| plan.workspace_bytes());
        let workspace = workspaces.max().unwrap_or(0);
        let mut description = self.run.description(workspace, &data.whole);
        self.describe_ranks(plan, &mut description);
        description
    }
}
