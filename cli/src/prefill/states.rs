//! `--pool` and `--snapshots`: states in slots, and sequences that are continued from their last snapshot.

use deltawave::prefill::{Part, Prefill, PrefillSpec, Snapshot};
use deltawave::runtime::Context;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::compare;
use deltawave_lab::safetensors_io::{FileBeta, FileGate, PrefillFile};
use serde_json::{Value, json};

use super::Workload;
use super::device::Output;
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

impl Workload<'_> {
    /// The bytes of the pool before a run, given the initial states in its layout.
    pub(super) fn pool_before(&self, initial: Option<&HostTensor>) -> Vec<u8> {
        let slots = self.pool.unwrap_or(0);
        let each = self.states(1).each() * self.args.state.state_dtype.size();
        let mut before = vec![0xff; slots * each];
        if let Some(initial) = initial {
            let states = initial.bytes.chunks_exact(each.max(1));
            for (slot, state) in self::slots(self.sequences(), slots).into_iter().zip(states) {
                before[slot as usize * each..][..each].copy_from_slice(state);
            }
        }
        before
    }

    /// The sequences' states, and what became of the other slots.
    pub(super) fn of_pool(&self, now: &HostTensor, before: &[u8]) -> (HostTensor, Option<Others>) {
        let slots = self.pool.unwrap_or(0);
        let each = now.bytes.len() / slots.max(1);
        let own = self::slots(self.sequences(), slots);
        let range = |slot: usize| slot * each..(slot + 1) * each;
        // A sequence without tokens writes nothing: without a state to start from, its slot may hold anything.
        let empty = |n: usize| self.data.cu_seqlens[n] == self.data.cu_seqlens[n + 1];
        let zeros = vec![0; each];
        let states = own.iter().enumerate().flat_map(|(n, &slot)| {
            match empty(n) && self.data.initial_state.is_none() {
                true => &zeros[..],
                false => &now.bytes[range(slot as usize)],
            }
        });
        let states = states.copied().collect();
        // The sequences have the last slots.
        let others = slots - own.len();
        let of_empty = own.iter().enumerate().filter(|(n, _)| empty(*n));
        let kept = (0..others).chain(of_empty.map(|(_, &slot)| slot as usize));
        let changed = kept.filter(|&slot| now.bytes[range(slot)] != before[range(slot)]);
        let others = Others {
            slots: others,
            changed: changed.count(),
        };
        (HostTensor::from_bytes(now.dtype, states), Some(others))
    }

    /// Continues every sequence from the last snapshot before its end; `None`: there is none.
    pub(super) fn resume(
        &self,
        context: &Context,
        plan: &Prefill,
        output: &Output,
    ) -> Result<Option<Resumed>, Failure> {
        let (Some(wanted), Some(states)) = (&self.snapshots, &output.snapshots) else {
            return Ok(None);
        };
        let d = &self.data;
        let last = |n: usize| {
            let [begin, end] = [d.cu_seqlens[n] as usize, d.cu_seqlens[n + 1] as usize];
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
        let state = self.states(1).each();
        let part = Workload {
            args: self.args,
            spec: PrefillSpec {
                segments: Some(1),
                ..self.spec
            },
            dense: None,
            neg_eigval: self.neg_eigval,
            drawn: None,
            data: PrefillFile {
                initial_state: Some(taken(states, state, &slots)),
                cu_seqlens: crate::args::cu_seqlens("--seqlens", &lengths)?,
                ..of_rows(d, &rows)
            },
            pool: None,
            snapshots: None,
        };
        let again = Prefill::packed(context, part.spec, &part.data.cu_seqlens, rows.len());
        let again = again.map_err(Failure::during("planning the rest of the sequences failed"))?;
        let found = driver::run_alone(context, &again, &part)
            .map_err(Failure::during("the prefill failed"))?;
        let whole = taken(&output.o, d.value_heads * d.value_dim, &rows);
        let exact: Vec<f64> = whole.values.iter().map(|x| f64::from(*x)).collect();
        let sequences: Vec<usize> = rest.iter().map(|(n, ..)| *n).collect();
        let states = taken(&output.final_state, state, &sequences);
        Ok(Some(Resumed {
            sequences: rest.len(),
            tokens: rows.len(),
            same_bits: found.o.bytes == whole.bytes && found.final_state.bytes == states.bytes,
            must: !plan.parts().contains(&Part::Summarise),
            rms_ratio: compare(&found.o.values, &exact).rms_ratio,
        }))
    }

    /// Figures and words for the pool, and for the snapshots.
    pub(super) fn state_figures(&self, output: &Output) -> [Option<(Value, String)>; 2] {
        let pool = self.pool.zip(output.others).map(|(all, others)| {
            let Others { slots, changed } = others;
            let figures = json!({"slots": all, "other_slots": slots, "changed_slots": changed});
            let text = format!("{all} slots, {slots} unused, {changed} of them changed");
            (figures, text)
        });
        let snapshots = (self.args.snapshots.zip(self.snapshots.as_ref())).map(|(every, all)| {
            let resumed = output.resumed;
            let figures = json!({
                "every": every,
                "states": all.len(),
                "resumed_sequences": resumed.map(|r| r.sequences),
                "resumed_tokens": resumed.map(|r| r.tokens),
                "resumed_same_bits": resumed.map(|r| r.same_bits),
                "resumed_rms_ratio": resumed.map(|r| r.rms_ratio),
            });
            let continued = resumed.map_or(String::new(), |r| {
                let how = match r.same_bits {
                    true => "the bits of the whole".to_owned(),
                    false => format!("{:.2e} off the whole", r.rms_ratio),
                };
                format!(
                    "; {} sequences continued from their last one: {how}",
                    r.sequences
                )
            });
            let states = all.len();
            (
                figures,
                format!("{states} states, every {every} tokens{continued}"),
            )
        });
        [pool, snapshots]
    }
}

/// Rows of a tensor; `row`: elements of each.
fn taken(t: &HostTensor, row: usize, rows: &[usize]) -> HostTensor {
    let size = row * t.dtype.size();
    let of = |n: &usize| &t.bytes[n * size..(n + 1) * size];
    HostTensor::from_bytes(t.dtype, rows.iter().flat_map(of).copied().collect())
}

/// Some tokens of a prefill.
fn of_rows(d: &PrefillFile, rows: &[usize]) -> PrefillFile {
    let keys = |t| taken(t, d.key_heads * d.key_dim, rows);
    let heads = |t| taken(t, d.value_heads, rows);
    PrefillFile {
        tokens: rows.len(),
        q: keys(&d.q),
        k: keys(&d.k),
        v: taken(&d.v, d.value_heads * d.value_dim, rows),
        gate: match &d.gate {
            FileGate::None => FileGate::None,
            FileGate::Log(g) => FileGate::Log(heads(g)),
            FileGate::Raw { a, a_log, dt_bias } => FileGate::Raw {
                a: heads(a),
                a_log: a_log.clone(),
                dt_bias: dt_bias.clone(),
            },
        },
        beta: match &d.beta {
            FileBeta::One => FileBeta::One,
            FileBeta::Given(beta) => FileBeta::Given(heads(beta)),
            FileBeta::Logits(b) => FileBeta::Logits(heads(b)),
        },
        initial_state: None,
        cu_seqlens: Vec::new(),
        ..*d
    }
}
