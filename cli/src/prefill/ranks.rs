//! `deltawave prefill --ranks N`: a prefill that ranks share.
//!
//! Local ranks are plans of one process on one device, and the exchange copies through the host. Otherwise each rank is a
//! process with a device of its own: this process is rank 0, and starts the others with the same arguments and `--join`.

use std::cell::RefCell;
use std::env;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use deltawave::parallel::{Collectives, Communicator, UniqueId};
use deltawave::prefill::{Fragment, ParallelPrefill, Part, PrefillTensors, RankLayout};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::state::{InitialState, State, StateMut, States};
use deltawave::tensor::{Buffer, TokenScalars, dense_strides};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::workload::taken;
use serde_json::json;

use super::PrefillRun;
use super::args::{EXCHANGES, Exchange, Join, RANK_LAYOUTS, RankLayoutKind};
use crate::args::word;
use crate::device::{Fallible, Results, Slots, Views};
use crate::driver::{self, Operation, Options};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::recurrence;
use crate::report::{Checked, Description, Report};
use crate::table::bytes;

/// Runs a prefill that ranks share.
pub(super) fn run(run: PrefillRun<'_>, options: &Options) -> Result<Report, Failure> {
    let args = &run.args.ranks;
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
    let Some(join) = join else {
        return driver::run(shared, options);
    };
    let mut of_process = options.run.clone();
    of_process.device = join.device;
    let options = Options {
        run: &of_process,
        check: false,
        ..*options
    };
    driver::run(shared, &options)
}

/// A prefill over ranks.
struct RanksRun<'a> {
    run: PrefillRun<'a>,
    layout: RankLayout,
    /// Rank of this process, if another one started it.
    join: Option<Join>,
    bits_equal: Option<bool>,
}

/// The ranks of this process.
struct Plan {
    ranks: Vec<(usize, ParallelPrefill)>,
    memory: RefCell<Vec<Memory>>,
    others: Option<Others>,
}

/// Scratch memory of a rank.
struct Memory {
    summary: Buffer<u8>,
    gathered: Buffer<u8>,
    workspace: Buffer<u8>,
}

/// Ranks in other processes.
struct Others {
    communicator: Communicator,
    processes: RefCell<Processes>,
}

/// Processes that this one started; ended with it.
struct Processes(Vec<(usize, Child)>);

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
    fn wait(&mut self) -> Result<(), Failure> {
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
struct Data {
    whole: Rc<PrefillFile>,
    own: PrefillFile,
}

/// Tensors of a launch.
struct Tensors<'a> {
    q: (&'a Buffer<u8>, Dtype),
    k: (&'a Buffer<u8>, Dtype),
    v: (&'a Buffer<u8>, Dtype),
    o: (&'a mut Buffer<u8>, Dtype),
    g: Option<(&'a Buffer<u8>, Dtype)>,
    beta: Option<(&'a Buffer<u8>, Dtype)>,
    raw: Option<[(&'a Buffer<u8>, Dtype); 3]>,
    dt_bias: Option<(&'a Buffer<u8>, Dtype)>,
    initial: Option<(&'a Buffer<u8>, Dtype)>,
    states: (&'a mut Buffer<u8>, Dtype),
}

impl RanksRun<'_> {
    /// Rows of the whole batch that a rank has, in the order of its batch.
    fn rows(&self, rank: usize) -> impl Iterator<Item = usize> {
        let begin = |f: &Fragment| self.run.cu_seqlens[f.sequence] as usize + f.begin;
        let fragments = self.layout.fragments(rank).iter();
        fragments.flat_map(move |f| begin(f)..begin(f) + f.tokens)
    }

    fn tokens(&self, rank: usize) -> usize {
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

    /// Results of all ranks, rank by rank, from those of each process.
    fn gather(&self, plan: &Plan, results: &mut Results) -> Fallible<()> {
        let Some(others) = &plan.others else {
            return Ok(());
        };
        let (communicator, ranks) = (&others.communicator, self.layout.ranks());
        let (_, own) = &plan.ranks[0];
        let context = plan.memory.borrow()[0].summary.context().clone();
        let stream = context.stream()?;
        let h = &self.run.spec.heads;
        let row = h.value * h.value_dim;
        let state = h.value * h.key_dim * h.value_dim;
        debug_assert_eq!(own.rank_of().1, ranks);
        for (name, count) in [
            (
                "o",
                (0..ranks).map(|r| self.tokens(r) * row).collect::<Vec<_>>(),
            ),
            (
                "states",
                (0..ranks)
                    .map(|r| self.layout.fragments(r).len() * state)
                    .collect(),
            ),
        ] {
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

    /// Brings outputs and final states of all ranks, rank by rank, to the order of the whole.
    fn settle(&self, results: &mut Results) {
        let h = &self.run.spec.heads;
        let (row, state) = (h.value * h.value_dim, h.value * h.key_dim * h.value_dim);
        let ranks = 0..self.layout.ranks();
        // Rows past the last sequence are on no rank.
        let o = &results["o"];
        let size = row * o.dtype.size();
        let mut whole = vec![0; self.run.tokens * size];
        for (n, to) in ranks.clone().flat_map(|rank| self.rows(rank)).enumerate() {
            whole[to * size..(to + 1) * size].copy_from_slice(&o.bytes[n * size..(n + 1) * size]);
        }
        let o = HostTensor::from_bytes(o.dtype, whole);
        let states = &results["states"];
        let mut last = vec![0; self.run.sequences()];
        for (n, f) in ranks.flat_map(|r| self.layout.fragments(r)).enumerate() {
            if f.begin + f.tokens == self.layout.lengths()[f.sequence] {
                last[f.sequence] = n;
            }
        }
        let states = taken(states, state, &last);
        let states = self.run.states(0).key_major(&states);
        results.insert("o", o);
        results.insert("states", states);
    }

    /// Whether one rank with the same blocks has the same bits.
    fn one_rank(&self, context: &Context, data: &Data, results: &Results) -> Result<bool, Failure> {
        let layout = RankLayout::contiguous(self.layout.lengths(), self.layout.block_tokens(), 1);
        let mut alone = RanksRun {
            run: PrefillRun::of_file(self.run.args, Rc::clone(&data.whole)),
            layout: layout.map_err(Failure::during("the layout of one rank is refused"))?,
            join: None,
            bits_equal: None,
        };
        alone.run.spec = self.run.spec;
        let plan = alone.local(context)?;
        let of_one = alone.own(&plan, Rc::clone(&data.whole));
        let mut found = driver::run_alone(context, &plan, &alone, &of_one)
            .map_err(Failure::during("the prefill on one rank failed"))?;
        alone.settle(&mut found);
        let same = |name| found[name].bytes == results[name].bytes;
        Ok(same("o") && same("states"))
    }

    /// All ranks in this process.
    fn local(&self, context: &Context) -> Result<Plan, Failure> {
        let ranks = 0..self.layout.ranks();
        let ranks = ranks.map(|rank| Ok((rank, self.of_rank(context, rank)?)));
        self.of_plans(context, ranks.collect::<Result<_, Failure>>()?, None)
    }

    fn of_plans(
        &self,
        context: &Context,
        ranks: Vec<(usize, ParallelPrefill)>,
        others: Option<Others>,
    ) -> Result<Plan, Failure> {
        let memory = ranks.iter().map(|(_, plan)| {
            Ok(Memory {
                summary: context.alloc(plan.summary_bytes())?,
                gathered: context.alloc(plan.gathered_bytes())?,
                workspace: context.alloc(plan.workspace_bytes())?,
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

    /// Tensors of the ranks of this process.
    fn own(&self, plan: &Plan, whole: Rc<PrefillFile>) -> Data {
        let ranks = plan.ranks.iter().map(|(rank, _)| *rank);
        let rows: Vec<usize> = ranks.clone().flat_map(|rank| self.rows(rank)).collect();
        let fragments: Vec<_> = ranks.flat_map(|rank| self.layout.fragments(rank)).collect();
        let mut cu_seqlens = vec![0];
        let mut end = 0;
        for f in &fragments {
            end += f.tokens as i32;
            cu_seqlens.push(end);
        }
        let initial = whole.initial_state.as_ref().map(|t| {
            // NaN for fragments that do not begin a sequence: nothing may read them.
            let sequences: Vec<_> = fragments.iter().map(|f| f.sequence).collect();
            let mut bytes = taken(t, whole.state_elements(), &sequences).bytes;
            let size = whole.state_elements() * t.dtype.size();
            for (n, _) in fragments.iter().enumerate().filter(|(_, f)| f.begin > 0) {
                bytes[n * size..(n + 1) * size].fill(0xff);
            }
            HostTensor::from_bytes(t.dtype, bytes)
        });
        let own = whole.of_rows(&rows, cu_seqlens, initial);
        Data { whole, own }
    }

    fn tensors<'t>(
        &self,
        t: &'t mut Tensors<'_>,
        first_row: usize,
        rows: usize,
        first_fragment: usize,
        fragments: usize,
    ) -> Fallible<PrefillTensors<'t>> {
        let (h, layout) = (&self.run.spec.heads, self.run.args.state.state_layout);
        let tokens = |(x, dtype): (&'t Buffer<u8>, Dtype), heads: usize, dim: usize| {
            let shape = [rows, heads, dim];
            x.tensor_of(dtype, shape, dense_strides(shape), first_row * heads * dim)
        };
        let scalars = |(x, dtype): (&'t Buffer<u8>, Dtype)| -> Fallible<TokenScalars<'t>> {
            let shape = [rows, h.value];
            let offset = first_row * h.value;
            Ok(x.tensor_of(dtype, shape, dense_strides(shape), offset)?
                .into())
        };
        let per_head = |(x, dtype): (&'t Buffer<u8>, Dtype)| x.tensor_of(dtype, [h.value], [1], 0);
        let gating = match t.raw {
            Some([a, b, a_log]) => deltawave::gates::Gating::Raw {
                a: scalars(a)?,
                b: scalars(b)?,
                a_log: per_head(a_log)?,
                dt_bias: t.dt_bias.map(per_head).transpose()?,
                allow_neg_eigval: self.run.neg_eigval,
            },
            None => deltawave::gates::Gating::Given {
                g: t.g.map(scalars).transpose()?,
                beta: t.beta.map(scalars).transpose()?,
            },
        };
        let shape = self.run.states(fragments).shape();
        let offset = first_fragment * self.run.states(1).elements();
        let states = match fragments {
            0 => States::None,
            _ => States::Separate {
                initial: match t.initial {
                    None => None,
                    Some((x, dtype)) => Some(InitialState {
                        state: State {
                            tensor: x.tensor_of(dtype, shape, dense_strides(shape), offset)?,
                            layout,
                        },
                        has_initial_state: None,
                    }),
                },
                last: Some(StateMut {
                    tensor: (t.states.0).tensor_of_mut(
                        t.states.1,
                        shape,
                        dense_strides(shape),
                        offset,
                    )?,
                    layout,
                }),
            },
        };
        let o_shape = [rows, h.value, h.value_dim];
        let o_offset = first_row * h.value * h.value_dim;
        Ok(PrefillTensors {
            cu_seqlens: None,
            q: tokens(t.q, h.key, h.key_dim)?.into(),
            k: tokens(t.k, h.key, h.key_dim)?.into(),
            v: tokens(t.v, h.value, h.value_dim)?.into(),
            gating,
            states,
            o: (t.o.0)
                .tensor_of_mut(t.o.1, o_shape, dense_strides(o_shape), o_offset)?
                .into(),
            snapshots: None,
        })
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
    type Plan = Plan;
    type Data = Data;

    const NAME: &'static str = "prefill";
    const CHECKED: &'static str = PrefillRun::CHECKED;
    const CHECK_STEPS: usize = PrefillRun::CHECK_STEPS;

    fn plan(&self, context: &Context) -> Result<Plan, Failure> {
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

    fn draw(&mut self, plan: &Plan) -> Result<Data, Failure> {
        let whole = self.run.whole(self.join.is_none())?;
        Ok(self.own(plan, whole))
    }

    fn slots<'a>(&self, _: &Plan, data: &'a Data) -> Slots<'a> {
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

    fn kernels(plan: &Plan) -> Vec<&'static str> {
        const ORDER: [&str; 5] = ["prepare", "summarise", "collect", "combine", "scan"];
        let mut names: Vec<_> = (plan.ranks.iter())
            .flat_map(|(_, plan)| plan.kernels().concat())
            .collect();
        names.sort_by_key(|name| (ORDER.iter().position(|part| name.contains(part)), *name));
        names.dedup();
        names
    }

    fn launch(&self, mut views: Views, stream: &Stream, plan: &Plan, _: Part) -> Fallible<()> {
        let mut t = {
            let mut get = |name| views.buffer(name);
            let mut input = |name| get(name).map(|(x, dtype)| (&*x, dtype));
            let needed = "an operation has the tensors of its list";
            let raw = ["a", "b", "a_log"].map(&mut input);
            Tensors {
                q: input("q").expect(needed),
                k: input("k").expect(needed),
                v: input("v").expect(needed),
                g: input("g"),
                beta: input("beta"),
                raw: match raw {
                    [Some(a), Some(b), Some(a_log)] => Some([a, b, a_log]),
                    _ => None,
                },
                dt_bias: input("dt_bias"),
                initial: input("initial"),
                o: get("o").expect(needed),
                states: get("states").expect(needed),
            }
        };
        let mut memory = plan.memory.borrow_mut();
        for m in memory.iter_mut() {
            // A byte that no kernel writes shows.
            for buffer in [&mut m.summary, &mut m.gathered, &mut m.workspace] {
                buffer.fill_bytes(0xff, stream)?;
            }
        }
        // First row and fragment of each rank of this process, and their numbers.
        let mut parts = Vec::new();
        let (mut row, mut fragment) = (0, 0);
        for (rank, _) in &plan.ranks {
            let (rows, fragments) = (self.tokens(*rank), self.layout.fragments(*rank).len());
            parts.push((row, rows, fragment, fragments));
            (row, fragment) = (row + rows, fragment + fragments);
        }
        if let Some(others) = &plan.others {
            let (a, b, c, d) = parts[0];
            let tensors = self.tensors(&mut t, a, b, c, d)?;
            let m = &mut memory[0];
            let scratch = [&mut m.summary, &mut m.gathered].map(Workspace::new);
            let workspace = Workspace::new(&mut m.workspace);
            let own = &plan.ranks[0].1;
            (others.communicator).prefill(own, stream, &tensors, scratch, workspace)?;
            // Other ranks may have ended: the wait has a limit.
            return others.communicator.synchronize(stream);
        }
        for (((_, own), m), &(a, b, c, d)) in plan.ranks.iter().zip(memory.iter_mut()).zip(&parts) {
            let tensors = self.tensors(&mut t, a, b, c, d)?;
            let summary = Workspace::new(&mut m.summary);
            let workspace = Workspace::new(&mut m.workspace);
            own.summarise_launch(stream, &tensors, summary, workspace)?;
        }
        let mut gathered = Vec::new();
        for m in memory.iter() {
            gathered.extend(m.summary.download(stream)?);
        }
        for (((_, own), m), &(a, b, c, d)) in plan.ranks.iter().zip(memory.iter_mut()).zip(&parts) {
            m.gathered.write(&gathered)?;
            let tensors = self.tensors(&mut t, a, b, c, d)?;
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
        plan: &Plan,
        data: &Data,
        results: &mut Results,
        options: &Options,
    ) -> Result<(), Failure> {
        self.run.outcome.simulated = context.backend() == Backend::Simulator;
        self.gather(plan, results)
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

    fn describe(&self, plan: &Plan, data: &Data) -> Description {
        let workspaces = plan.ranks.iter().map(|(_, plan)| plan.workspace_bytes());
        let mut description = self
            .run
            .description(workspaces.max().unwrap_or(0), &data.whole);
        let ranks = self.layout.ranks();
        let tokens: Vec<usize> = (0..ranks).map(|rank| self.tokens(rank)).collect();
        let (_, own) = &plan.ranks[0];
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
                "summary_bytes": own.summary_bytes(),
                "gathered_bytes": own.gathered_bytes(),
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
            bytes(own.summary_bytes() as u64)
        ));
        description
    }
}
