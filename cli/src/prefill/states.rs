//! `--pool` and `--snapshots`: states in slots, and sequences that are continued from their last snapshot.

use std::rc::Rc;

use deltawave::prefill::{Part, Prefill};
use deltawave::runtime::Context;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::compare;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::workload::{Others, Pool, taken};
use serde_json::{Value, json};

use super::PrefillRun;
use crate::device::Results;
use crate::driver;
use crate::failure::Failure;

/// Sequences that were continued from their last snapshot.
#[derive(Clone, Copy)]
pub(super) struct Resumed {
    pub sequences: usize,
    /// Tokens after the snapshots.
    pub tokens: usize,
    /// Whether outputs and final states have the bits of the whole.
    pub same_bits: bool,
    /// Whether they must: no sequence of the whole was cut into segments.
    pub must: bool,
    /// How far the outputs are from those of the whole.
    pub rms_ratio: f64,
}

impl PrefillRun<'_> {
    /// Brings the states of a run to `[.., HV, K, V]`, those of the sequences alone; says what became of a pool's others.
    pub(super) fn settle(&self, data: &PrefillFile, results: &mut Results) -> Option<Others> {
        let key_major = |t: &HostTensor| self.states(0).key_major(t);
        let states = &results["states"];
        let (states, others) = match self.pool(states.dtype) {
            Some(pool) => {
                let (states, others) = pool.split(states, self.initial(data).as_ref());
                (key_major(&states), Some(others))
            }
            None => (key_major(states), None),
        };
        results.insert("states", states);
        if let Some(snapshots) = results.get_mut("snapshots") {
            *snapshots = key_major(snapshots);
        }
        others
    }

    /// The pool that has the states, of this type.
    pub(super) fn pool(&self, dtype: Dtype) -> Option<Pool<'_>> {
        Some(Pool {
            slots: self.pool?,
            state_bytes: self.states(1).elements() * dtype.size(),
            cu_seqlens: &self.cu_seqlens,
        })
    }

    /// The initial states in the layout of the device.
    pub(super) fn initial(&self, data: &PrefillFile) -> Option<HostTensor> {
        let states = self.states(self.sequences());
        let initial = data.initial_state.as_ref();
        initial.map(|t| states.laid_out(t, t.dtype))
    }

    /// Continues every sequence from the last snapshot before its end; `None`: there is none.
    pub(super) fn resume(
        &self,
        context: &Context,
        plan: &Prefill,
        data: &PrefillFile,
        results: &Results,
    ) -> Result<Option<Resumed>, Failure> {
        let (Some(wanted), Some(states)) = (&self.snapshots, results.get("snapshots")) else {
            return Ok(None);
        };
        let Some(rest) = data.rest(wanted, states) else {
            return Ok(None);
        };
        let data = Rc::new(rest.data);
        let mut part = PrefillRun::of_file(self.args, Rc::clone(&data));
        part.spec.segments = Some(1);
        part.spec.path = plan.path();
        part.pool = None;
        let again = Prefill::packed(context, part.spec, &part.cu_seqlens, part.tokens)
            .map_err(Failure::during("planning the rest of the sequences failed"))?;
        let mut found = driver::run_alone(context, &again, &part, &data)
            .map_err(Failure::during("the prefill failed"))?;
        part.settle(&data, &mut found);
        let whole = taken(&results["o"], data.value_heads * data.value_dim, &rest.rows);
        let exact: Vec<f64> = whole.values.iter().map(|x| f64::from(*x)).collect();
        let states = taken(&results["states"], data.state_elements(), &rest.sequences);
        let (o, ends) = (&found["o"], &found["states"]);
        Ok(Some(Resumed {
            sequences: rest.sequences.len(),
            tokens: rest.rows.len(),
            same_bits: o.bytes == whole.bytes && ends.bytes == states.bytes,
            // Where a launch chooses, the rest may choose otherwise.
            must: !plan.gates_choose()
                && [Part::Summarise, Part::FusedSummarise]
                    .iter()
                    .all(|part| !plan.parts().contains(part)),
            rms_ratio: compare(&o.values, &exact).rms_ratio,
        }))
    }

    /// Figures and words for the pool.
    pub(super) fn pool_figures(&self) -> Option<(Value, String)> {
        let (all, Others { slots, changed }) = self.pool.zip(self.outcome.others)?;
        let figures = json!({"slots": all, "other_slots": slots, "changed_slots": changed});
        let text = format!("{all} slots, {slots} unused, {changed} of them changed");
        Some((figures, text))
    }

    /// Figures and words for the snapshots.
    pub(super) fn snapshot_figures(&self) -> Option<(Value, String)> {
        let (every, states) = (self.args.snapshots?, self.snapshots.as_ref()?.len());
        let resumed = self.outcome.resumed;
        let figures = json!({
            "every": every,
            "states": states,
            "resumed_sequences": resumed.map(|r| r.sequences),
            "resumed_tokens": resumed.map(|r| r.tokens),
            "resumed_same_bits": resumed.map(|r| r.same_bits),
            "resumed_rms_ratio": resumed.map(|r| r.rms_ratio),
        });
        let mut text = format!("{states} states, every {every} tokens");
        if let Some(r) = resumed {
            let how = match r.same_bits {
                true => "the bits of the whole".to_owned(),
                false => format!("{:.2e} off the whole", r.rms_ratio),
            };
            let continued = r.sequences;
            text += &format!("; {continued} sequences continued from their last one: {how}");
        }
        Some((figures, text))
    }
}
