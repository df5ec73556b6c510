//! A prefill as the driver runs it.

use std::rc::Rc;

use deltawave::prefill::{Part, Prefill, PrefillTensors, Snapshots};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::state::{InitialState, State, StateMut, StatePool, States};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::{judge, oracle};

use super::{PrefillRun, Source, describe};
use crate::device::{Fallible, Results, Slots, Views};
use crate::driver::{Operation, Options};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::recurrence;
use crate::report::{Checked, Description};

impl PrefillRun<'_> {
    /// Draws the tensors, or takes them from a file; saves them if `save` and the arguments say so.
    pub(super) fn whole(&self, save: bool) -> Result<Rc<PrefillFile>, Failure> {
        let data = match &self.source {
            Source::File(file) => Rc::clone(file),
            Source::Drawn(draw) => Rc::new(draw.tensors(&self.cu_seqlens)),
        };
        if let Some(path) = self.args.save_input.as_ref().filter(|_| save) {
            data.write(path)
                .map_err(Failure::file("--save-input", path))?;
        }
        Ok(data)
    }
}

impl Operation for PrefillRun<'_> {
    type Plan = Prefill;
    type Data = Rc<PrefillFile>;

    const NAME: &'static str = "prefill";
    const CHECKED: &'static str = "o_rms_ratio o_max_abs state_rms_ratio state_max_abs unfused_o_rms_ratio \
        unfused_state_rms_ratio o_rms_ratio_limit state_rms_ratio_limit o_worst state_worst \
        non_finite";
    const CHECK_STEPS: usize = 2;

    fn plan(&self, context: &Context) -> Result<Prefill, Failure> {
        let plan = match self.dense {
            Some([batch, len]) => Prefill::dense(context, self.spec, batch, len),
            None => Prefill::packed(context, self.spec, &self.cu_seqlens, self.tokens),
        };
        let mut plan = plan.map_err(Failure::during("planning the prefill failed"))?;
        if let Some(slots) = self.pool {
            self.plan_pool(&mut plan, slots)?;
        }
        if let Some(tokens) = self.args.snapshots {
            let all = plan.snapshots_every(tokens);
            all.and_then(|all| plan.set_snapshots(&all))
                .map_err(Failure::during("the snapshots are refused"))?;
        }
        Ok(plan)
    }

    fn draw(&mut self, plan: &Prefill) -> Result<Rc<PrefillFile>, Failure> {
        let data = self.whole(true)?;
        let snapshots = (self.args.snapshots).map(|tokens| plan.snapshots_every(tokens));
        self.snapshots =
            (snapshots.transpose()).map_err(Failure::during("the snapshots are refused"))?;
        Ok(data)
    }

    fn slots<'a>(&self, plan: &Prefill, data: &'a Rc<PrefillFile>) -> Slots<'a> {
        let (sequences, dtype) = (self.sequences(), self.args.state.state_dtype);
        let initial = self.initial(data);
        let slots = Slots::new(plan.workspace_bytes()).starts(sequences, initial.is_some());
        let slots = recurrence::inputs(slots, data, self.neg_eigval);
        let slots = slots.output("o", self.spec.dtype, data.v.values.len());
        let slots = match (self.pool(dtype), initial) {
            (Some(pool), initial) => slots.in_place("states", dtype, pool.before(initial.as_ref())),
            (None, initial) => slots
                .output("states", dtype, self.states(sequences).elements())
                .made_some("initial", initial),
        };
        match &self.snapshots {
            Some(all) => slots.output("snapshots", Dtype::F32, self.states(all.len()).elements()),
            None => slots,
        }
    }

    fn kernels(&self, plan: &Prefill) -> Vec<&'static str> {
        plan.kernels()
    }

    fn launch(
        &self,
        mut views: Views,
        stream: &Stream,
        plan: &Prefill,
        part: Part,
    ) -> Fallible<()> {
        let (h, layout, rows) = (&self.spec.heads, self.args.state.state_layout, self.rows());
        let (keys, values) = ([h.key, h.key_dim], [h.value, h.value_dim]);
        let shape = self.states(self.pool.unwrap_or(self.sequences())).shape();
        let tensor = views.get_mut("states", shape)?;
        let states = match self.pool {
            Some(_) => States::Pool {
                pool: StatePool {
                    tensor,
                    layout,
                    slots: None,
                    write_slots: None,
                },
                has_initial_state: Some(views.starts.into()),
            },
            None => States::Separate {
                initial: (views.get_some("initial", shape)?).map(|tensor| InitialState {
                    state: State { tensor, layout },
                    has_initial_state: None,
                }),
                last: Some(StateMut { tensor, layout }),
            },
        };
        let wanted = self.snapshots.as_ref().map_or(0, Vec::len);
        let snapshots = views.get_some_mut("snapshots", self.states(wanted).shape())?;
        let tensors = PrefillTensors {
            cu_seqlens: None,
            q: views.tokens("q", rows, keys)?,
            k: views.tokens("k", rows, keys)?,
            v: views.tokens("v", rows, values)?,
            gating: recurrence::gating(&mut views, rows, h.value, self.neg_eigval)?,
            states,
            o: views.tokens_mut("o", rows, values)?,
            snapshots: snapshots.map(|tensor| Snapshots {
                to: Some(StateMut { tensor, layout }),
                slots: None,
            }),
        };
        plan.launch_part(stream, &tensors, Workspace::new(views.workspace), part)
    }

    fn parts(plan: &Prefill) -> Vec<(&'static str, Part)> {
        (plan.parts().into_iter().map(|part| (part.name(), part))).collect()
    }

    /// Inputs, outputs and states: each once.
    fn minimal_bytes(&self, data: &Rc<PrefillFile>) -> usize {
        data.minimal_bytes(self.sequences(), self.args.state.state_dtype)
    }

    fn finish(
        &mut self,
        context: &Context,
        plan: &Prefill,
        data: &Rc<PrefillFile>,
        results: &mut Results,
        options: &Options,
    ) -> Result<(), Failure> {
        self.outcome.simulated = context.backend() == Backend::Simulator;
        self.outcome.others = self.settle(data, results);
        self.write_output(results)?;
        // A profile counts the launches of the whole alone.
        if options.check && options.count.is_none() {
            self.outcome.resumed = self.resume(context, plan, data, results)?;
        }
        Ok(())
    }

    fn check(&self, data: &Rc<PrefillFile>, results: &Results, progress: &mut Progress) -> Checked {
        let problem = self.problem(data);
        let exact = progress.step("oracle", || oracle::prefill(&problem))?;
        let unfused = || oracle::unfused(&problem, self.spec.dtype);
        let unfused = progress.step("unfused form", unfused)?;
        let drawn = match &self.source {
            Source::Drawn(draw) => Some(draw),
            Source::File(_) => None,
        };
        let (o, state) = (&results["o"], &results["states"]);
        let judged = judge::prefill(data, drawn, [o, state], &exact, &unfused);
        let past = &o.values[judge::output_end(data)..];
        Ok(describe::verdict(&judged, past, &self.outcome))
    }

    fn describe(&self, plan: &Prefill, data: &Rc<PrefillFile>) -> Description {
        self.description(plan.workspace_bytes(), data)
    }
}
