//! `--pool` and `--snapshots`: states in slots, and sequences that are continued from their last snapshot.

use std::rc::Rc;

use deltawave::prefill::{Part, Prefill, PrefillSpec, Snapshot};
use deltawave::runtime::Context;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::compare;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::workload::taken;
use serde_json::{Value, json};

use super::{PrefillRun, Source};
use crate::args::cu_seqlens;
use crate::device::Results;
use crate::driver;
use crate::failure::Failure;

/// The slot of each sequence: the last ones, backwards.
pub(super) fn slots(sequences: usize, pool: usize) -> Vec<i32> {
    (1..=sequences).map(|n| (pool - n) as i32).collect()
}

/// Slots without a sequence.
#[derive(Clone, Copy)]
pub(super) struct Others {
    pub slots: usize,
    /// How many of them, and of the slots of sequences without tokens, have other bits than before.
    pub changed: usize,
}

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
    /// The bytes of the pool before a run, given the initial states in its layout.
    pub(super) fn pool_before(&self, initial: Option<&HostTensor>) -> Vec<u8> {
        let slots = self.pool.unwrap_or(0);
        let each = self.states(1).elements() * self.args.state.state_dtype.size();
        let mut before = vec![0xff; slots * each];
        if let Some(initial) = initial {
            let states = initial.bytes.chunks_exact(each.max(1));
            for (slot, state) in self::slots(self.sequences(), slots).into_iter().zip(states) {
                before[slot as usize * each..][..each].copy_from_slice(state);
            }
        }
        before
    }

    /// Brings the states of a run to `[.., HV, K, V]`, those of the sequences alone; says what became of a pool's others.
    pub(super) fn settle(&self, data: &PrefillFile, results: &mut Results) -> Option<Others> {
        let key_major = |t: &HostTensor| self.states(0).key_major(t);
        let pool = &results["states"];
        let (states, others) = match self.pool {
            Some(slots) => {
                let (states, others) = self.of_pool(data, pool, slots);
                (key_major(&states), Some(others))
            }
            None => (key_major(pool), None),
        };
        results.insert("states", states);
        if let Some(snapshots) = results.get_mut("snapshots") {
            *snapshots = key_major(snapshots);
        }
        others
    }

    /// The sequences' states, and what became of the other slots.
    fn of_pool(&self, data: &PrefillFile, now: &HostTensor, slots: usize) -> (HostTensor, Others) {
        let each = now.bytes.len() / slots.max(1);
        let own = self::slots(self.sequences(), slots);
        let range = |slot: usize| slot * each..(slot + 1) * each;
        // A sequence without tokens writes nothing: without a state to start from, its slot may hold anything.
        let empty = |n: usize| self.cu_seqlens[n] == self.cu_seqlens[n + 1];
        let zeros = vec![0; each];
        let states = own.iter().enumerate().flat_map(|(n, &slot)| {
            match empty(n) && data.initial_state.is_none() {
                true => &zeros[..],
                false => &now.bytes[range(slot as usize)],
            }
        });
        let states = HostTensor::from_bytes(now.dtype, states.copied().collect());
        // The sequences have the last slots.
        let others = slots - own.len();
        let initial = (data.initial_state.as_ref())
            .map(|t| self.states(self.sequences()).laid_out(t, t.dtype));
        let before = self.pool_before(initial.as_ref());
        let of_empty = own.iter().enumerate().filter(|(n, _)| empty(*n));
        let kept = (0..others).chain(of_empty.map(|(_, &slot)| slot as usize));
        let changed = kept.filter(|&slot| now.bytes[range(slot)] != before[range(slot)]);
        let others = Others {
            slots: others,
            changed: changed.count(),
        };
        (states, others)
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
        let last = |n: usize| {
            let [begin, end] = [self.cu_seqlens[n] as usize, self.cu_seqlens[n + 1] as usize];
            let before_end = |s: &&Snapshot| s.sequence == n && s.tokens < end - begin;
            let found = wanted.iter().filter(before_end).max_by_key(|s| s.tokens)?;
            Some((n, found.slot, begin + found.tokens..end))
        };
        let rest: Vec<_> = (0..self.sequences()).filter_map(last).collect();
        if rest.is_empty() {
            return Ok(None);
        }
        let rows: Vec<usize> = rest.iter().flat_map(|(_, _, rows)| rows.clone()).collect();
        let slots: Vec<usize> = rest.iter().map(|(_, slot, _)| *slot).collect();
        let lengths: Vec<usize> = rest.iter().map(|(_, _, rows)| rows.len()).collect();
        let state = data.state_elements();
        let cu_seqlens = cu_seqlens("--seqlens", &lengths)?;
        let data = data.of_rows(&rows, cu_seqlens.clone(), taken(states, state, &slots));
        let data = Rc::new(data);
        let spec = PrefillSpec {
            segments: Some(1),
            ..self.spec
        };
        let source = Source::File(Rc::clone(&data));
        let part = PrefillRun {
            neg_eigval: self.neg_eigval,
            ..PrefillRun::of_source(self.args, spec, cu_seqlens, rows.len(), source)
        };
        let again = Prefill::packed(context, spec, &part.cu_seqlens, rows.len())
            .map_err(Failure::during("planning the rest of the sequences failed"))?;
        let mut found = driver::run_alone(context, &again, &part, &data)
            .map_err(Failure::during("the prefill failed"))?;
        part.settle(&data, &mut found);
        let whole = taken(&results["o"], data.value_heads * data.value_dim, &rows);
        let exact: Vec<f64> = whole.values.iter().map(|x| f64::from(*x)).collect();
        let sequences: Vec<usize> = rest.iter().map(|(n, ..)| *n).collect();
        let states = taken(&results["states"], state, &sequences);
        let (o, ends) = (&found["o"], &found["states"]);
        Ok(Some(Resumed {
            sequences: rest.len(),
            tokens: rows.len(),
            same_bits: o.bytes == whole.bytes && ends.bytes == states.bytes,
            must: !plan.parts().contains(&Part::Summarise),
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
