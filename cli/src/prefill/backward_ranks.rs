//! `deltawave prefill --backward --ranks N`: the backward of a prefill that ranks share.

use std::rc::Rc;

use deltawave::prefill::{BackwardTensors, ParallelPrefill, ParallelPrefillBackward, Part};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::state::{State, StateMut};
use deltawave::tensor::{Buffer, TensorMut, TokenScalarsMut, TokensMut, dense_strides};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::workload::taken;

use super::backward::{self, CHECKED, is_raw};
use super::ranks::{
    Given, Inputs, LISTED, Place, Plan, RanksRun, Stages, exchange, in_order, tokens,
};
use crate::device::{Fallible, Results, Slots, Views};
use crate::driver::{self, Operation, Options};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::recurrence;
use crate::report::{Checked, Description};

/// The backward of a prefill over ranks.
pub(super) struct BackwardRanksRun<'a>(pub(super) RanksRun<'a>);

impl Stages for ParallelPrefillBackward {
    fn of(prefill: ParallelPrefill) -> Result<Self, Failure> {
        ParallelPrefillBackward::of(&prefill)
            .map_err(Failure::during("planning the backward failed"))
    }

    fn sizes(&self) -> [usize; 3] {
        let [summary, gathered] = [self.summary_bytes(), self.gathered_bytes()];
        [summary, gathered, self.workspace_bytes()]
    }
}

/// The ranks of this process, and whether gates are raw.
pub(super) struct BackwardPlan {
    shared: Plan<ParallelPrefillBackward>,
    raw: bool,
}

/// Tensors of the whole, and of the ranks of this process.
pub(super) struct Data {
    whole: backward::Data,
    own: PrefillFile,
    own_d_o: HostTensor,
    own_d_final: HostTensor,
}

/// Memory that is written.
type Written<'a> = &'a mut Buffer<u8>;

/// Tensors of a launch.
struct Tensors<'a> {
    inputs: Inputs<'a>,
    d_o: Given<'a>,
    d_final: Given<'a>,
    d_q: Written<'a>,
    d_k: Written<'a>,
    d_v: Written<'a>,
    d_g: Written<'a>,
    d_beta: Written<'a>,
    d_initial: Written<'a>,
    per_head: Option<[Written<'a>; 2]>,
}

/// Rows of a gradient over tokens that a rank has.
fn tokens_mut<'t>(
    x: &'t mut Buffer<u8>,
    dtype: Dtype,
    place: Place,
    heads: usize,
    dim: usize,
) -> Fallible<TokensMut<'t>> {
    let shape = [place.rows, heads, dim];
    let [offset, _] = place.offsets(heads * dim, 0);
    Ok((x.tensor_of_mut(dtype, shape, dense_strides(shape), offset)?).into())
}

/// The same of a gradient of gates.
fn scalars_mut<'t>(
    x: &'t mut Buffer<u8>,
    place: Place,
    heads: usize,
) -> Fallible<TokenScalarsMut<'t>> {
    let shape = [place.rows, heads];
    let [offset, _] = place.offsets(heads, 0);
    Ok((x.tensor_of_mut(Dtype::F32, shape, dense_strides(shape), offset)?).into())
}

impl BackwardRanksRun<'_> {
    /// Numbers of each token, in the gradients over tokens.
    fn rows(&self) -> [(&'static str, usize); 5] {
        let h = &self.0.run.spec.heads;
        [
            ("d_q", h.key * h.key_dim),
            ("d_k", h.key * h.key_dim),
            ("d_v", h.value * h.value_dim),
            ("d_g", h.value),
            ("d_beta", h.value),
        ]
    }

    /// Gradients that have the bits of one rank.
    fn compared(&self) -> impl Iterator<Item = &'static str> {
        let rows = self.rows().map(|(name, _)| name);
        rows.into_iter().chain(["d_initial"])
    }

    /// `index`: the rank among those of this process.
    fn tensors<'t>(
        &self,
        t: &'t mut Tensors<'_>,
        index: usize,
        place: Place,
    ) -> Fallible<BackwardTensors<'t>> {
        let (run, inputs) = (&self.0.run, &t.inputs);
        let (h, dtype, layout) = (&run.spec.heads, run.spec.dtype, run.args.state.state_layout);
        let shape = run.states(place.fragments).shape();
        let [_, offset] = place.offsets(0, run.states(1).elements());
        let any = place.fragments > 0;
        let per_head = |x: &'t mut Buffer<u8>| -> Fallible<TensorMut<'t, 1>> {
            x.tensor_of_mut(Dtype::F32, [h.value], [1], index * h.value)
        };
        let [d_a_log, d_dt_bias] = match &mut t.per_head {
            Some([a_log, dt_bias]) => [Some(per_head(a_log)?), Some(per_head(dt_bias)?)],
            None => [None, None],
        };
        let (d_final, d_initial) = (t.d_final, &mut *t.d_initial);
        Ok(BackwardTensors {
            cu_seqlens: None,
            q: tokens(inputs.q, place, h.key, h.key_dim)?,
            k: tokens(inputs.k, place, h.key, h.key_dim)?,
            v: tokens(inputs.v, place, h.value, h.value_dim)?,
            gating: self.0.gating(inputs, place)?,
            initial: self.0.initial(inputs, place)?,
            d_o: tokens(t.d_o, place, h.value, h.value_dim)?,
            d_final: match any {
                true => Some(State {
                    tensor: (d_final.0).tensor_of(
                        d_final.1,
                        shape,
                        dense_strides(shape),
                        offset,
                    )?,
                    layout,
                }),
                false => None,
            },
            d_q: Some(tokens_mut(t.d_q, dtype, place, h.key, h.key_dim)?),
            d_k: Some(tokens_mut(t.d_k, dtype, place, h.key, h.key_dim)?),
            d_v: Some(tokens_mut(t.d_v, dtype, place, h.value, h.value_dim)?),
            d_g: Some(scalars_mut(t.d_g, place, h.value)?),
            d_beta: Some(scalars_mut(t.d_beta, place, h.value)?),
            d_a_log,
            d_dt_bias,
            d_initial: match any {
                true => Some(StateMut {
                    tensor: d_initial.tensor_of_mut(
                        Dtype::F32,
                        shape,
                        dense_strides(shape),
                        offset,
                    )?,
                    layout,
                }),
                false => None,
            },
        })
    }

    /// Tensors of the ranks of this process.
    fn own(&self, plan: &BackwardPlan, whole: backward::Data) -> Data {
        let (ranks, h) = (&self.0, &self.0.run.spec.heads);
        let (rows, fragments) = ranks.parts(&plan.shared);
        let state = h.value * h.key_dim * h.value_dim;
        Data {
            own: ranks.own(&plan.shared, &whole.file),
            own_d_o: taken(&whole.d_o, h.value * h.value_dim, &rows),
            own_d_final: RanksRun::of_fragments(&whole.d_final, state, &fragments, |f| {
                ranks.ends(f)
            }),
            whole,
        }
    }

    /// Brings gradients of all ranks, rank by rank, to the order of the whole, and adds up those of `A_log` and `dt_bias`.
    fn settle(&self, results: &mut Results) {
        for (name, row) in self.rows() {
            let settled = self.0.settled(&results[name], row);
            results.insert(name, settled);
        }
        let d_initial = (self.0).of_sequences(&results["d_initial"], |f| f.begin == 0);
        results.insert("d_initial", d_initial);
        for name in ["d_a_log", "d_dt_bias"] {
            if let Some(each) = results.get(name) {
                let heads = self.0.run.spec.heads.value;
                let mut sums = vec![0.0; heads];
                for of_rank in each.values.chunks_exact(heads) {
                    sums.iter_mut().zip(of_rank).for_each(|(sum, x)| *sum += x);
                }
                results.insert(name, HostTensor::new(Dtype::F32, sums));
            }
        }
    }

    /// Whether one rank with the same blocks has the same bits.
    fn one_rank(&self, context: &Context, data: &Data, results: &Results) -> Result<bool, Failure> {
        let alone = BackwardRanksRun(self.0.alone(&data.whole.file)?);
        let plan = BackwardPlan {
            shared: alone.0.local(context)?,
            raw: is_raw(&alone.0.run),
        };
        let whole = backward::Data {
            file: Rc::clone(&data.whole.file),
            d_o: data.whole.d_o.clone(),
            d_final: data.whole.d_final.clone(),
        };
        let of_one = alone.own(&plan, whole);
        let mut found = driver::run_alone(context, &plan, &alone, &of_one)
            .map_err(Failure::during("the backward on one rank failed"))?;
        alone.settle(&mut found);
        Ok(self
            .compared()
            .all(|name| found[name].bytes == results[name].bytes))
    }
}

impl Operation for BackwardRanksRun<'_> {
    type Plan = BackwardPlan;
    type Data = Data;

    const NAME: &'static str = "backward";
    const CHECKED: &'static str = CHECKED;
    const CHECK_STEPS: usize = 2;

    fn plan(&self, context: &Context) -> Result<Self::Plan, Failure> {
        Ok(BackwardPlan {
            shared: self.0.plans(context)?,
            raw: is_raw(&self.0.run),
        })
    }

    fn draw(&mut self, plan: &Self::Plan) -> Result<Data, Failure> {
        let file = self.0.run.whole(self.0.join.is_none())?;
        let whole = backward::Data::draw(&self.0.run, file);
        Ok(self.own(plan, whole))
    }

    fn slots<'a>(&self, plan: &Self::Plan, data: &'a Data) -> Slots<'a> {
        let (run, file) = (&self.0.run, &data.own);
        let (h, dtype) = (&run.spec.heads, run.spec.dtype);
        let states = run.states(file.sequences());
        let initial = file.initial_state.as_ref();
        let scalars = file.tokens * h.value;
        let slots = recurrence::inputs(Slots::new(0), file, run.neg_eigval)
            .made_some("initial", initial.map(|t| states.laid_out(t, t.dtype)))
            .input("d_o", &data.own_d_o)
            .made("d_final", states.laid_out(&data.own_d_final, Dtype::F32))
            .output("d_q", dtype, file.q.values.len())
            .output("d_k", dtype, file.k.values.len())
            .output("d_v", dtype, file.v.values.len())
            .output("d_g", Dtype::F32, scalars)
            .output("d_beta", Dtype::F32, scalars)
            .output("d_initial", Dtype::F32, states.elements());
        let per_head = plan.shared.ranks.len() * h.value;
        match plan.raw {
            true => slots.output("d_a_log", Dtype::F32, per_head).output(
                "d_dt_bias",
                Dtype::F32,
                per_head,
            ),
            false => slots,
        }
    }

    fn kernels(&self, plan: &Self::Plan) -> Vec<&'static str> {
        in_order(
            (plan.shared.ranks.iter())
                .flat_map(|(_, of_rank)| of_rank.kernels(plan.raw).concat())
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
        let inputs = Inputs::of(&mut views);
        let mut given = |name| {
            let (x, dtype) = views.buffer(name).expect(LISTED);
            (&*x, dtype)
        };
        let (d_o, d_final) = (given("d_o"), given("d_final"));
        let mut written = |name| views.buffer(name).map(|(x, _)| x);
        let per_head = [written("d_a_log"), written("d_dt_bias")];
        let mut needed = |name| written(name).expect(LISTED);
        let mut t = Tensors {
            inputs,
            d_o,
            d_final,
            d_q: needed("d_q"),
            d_k: needed("d_k"),
            d_v: needed("d_v"),
            d_g: needed("d_g"),
            d_beta: needed("d_beta"),
            d_initial: needed("d_initial"),
            per_head: match per_head {
                [Some(a_log), Some(dt_bias)] => Some([a_log, dt_bias]),
                _ => None,
            },
        };
        let plan = &plan.shared;
        let mut memory = plan.poisoned(stream)?;
        let places = self.0.places(plan);
        if let Some(others) = &plan.others {
            let tensors = self.tensors(&mut t, 0, places[0])?;
            let m = &mut memory[0];
            let scratch = [&mut m.summary, &mut m.gathered].map(Workspace::new);
            let workspace = Workspace::new(&mut m.workspace);
            let (own, communicator) = (&plan.ranks[0].1, &others.communicator);
            communicator.prefill_backward(own, stream, &tensors, scratch, workspace)?;
            // Other ranks may have ended: the wait has a limit.
            return communicator.synchronize(stream);
        }
        let all = plan.ranks.iter().zip(&places).enumerate();
        for ((i, ((_, own), &place)), m) in all.clone().zip(memory.iter_mut()) {
            let tensors = self.tensors(&mut t, i, place)?;
            let summary = Workspace::new(&mut m.summary);
            let workspace = Workspace::new(&mut m.workspace);
            own.summarise_launch(stream, &tensors, summary, workspace)?;
        }
        exchange(&mut memory, stream)?;
        for ((i, ((_, own), &place)), m) in all.zip(memory.iter_mut()) {
            let tensors = self.tensors(&mut t, i, place)?;
            let gathered = Workspace::new(&mut m.gathered);
            let workspace = Workspace::new(&mut m.workspace);
            own.finish_launch(stream, &tensors, gathered, workspace)?;
        }
        Ok(())
    }

    fn minimal_bytes(&self, data: &Data) -> usize {
        data.whole.minimal_bytes(&self.0.run)
    }

    fn finish(
        &mut self,
        context: &Context,
        plan: &Self::Plan,
        data: &Data,
        results: &mut Results,
        options: &Options,
    ) -> Result<(), Failure> {
        self.0.run.outcome.simulated = context.backend() == Backend::Simulator;
        let mut counts: Vec<_> = (self.rows().into_iter())
            .map(|(name, row)| (name, self.0.of_rows(row)))
            .collect();
        counts.push(("d_initial", self.0.of_states()));
        if plan.raw {
            let each = vec![self.0.run.spec.heads.value; self.0.layout.ranks()];
            counts.push(("d_a_log", each.clone()));
            counts.push(("d_dt_bias", each));
        }
        (self.0.gather(&plan.shared, results, &counts))
            .map_err(Failure::during("gathering the results failed"))?;
        if let Some(others) = &plan.shared.others {
            others.processes.borrow_mut().wait()?;
        }
        if self.0.join.is_some() {
            return Ok(());
        }
        self.settle(results);
        backward::write_output(&self.0.run, &data.whole, results)?;
        if options.check {
            self.0.bits_equal = Some(self.one_rank(context, data, results)?);
        }
        Ok(())
    }

    fn check(&self, data: &Data, results: &Results, progress: &mut Progress) -> Checked {
        let mut verdict = backward::check(&self.0.run, &data.whole, results, progress)?;
        if self.0.bits_equal == Some(false) {
            let why = "ranks: gradients differ from those of one rank";
            verdict.objections.push(why.to_owned());
        }
        Ok(verdict)
    }

    fn describe(&self, plan: &Self::Plan, data: &Data) -> Description {
        let workspaces = plan
            .shared
            .ranks
            .iter()
            .map(|(_, plan)| plan.workspace_bytes());
        let workspace = workspaces.max().unwrap_or(0);
        let mut description = self.0.run.description(workspace, &data.whole.file);
        description.title[0] = backward::title(&description.title[0]);
        self.0.describe_ranks(&plan.shared, &mut description);
        description
    }
}
