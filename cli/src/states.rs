//! `prefill --pool` and `--snapshots`: states in slots, what happened to the others, and sequences that are continued from
//! the state in their course.

use deltawave::prefill::{Part, Prefill, PrefillSpec, Snapshot, StateMut, StatePool};
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::compare;
use deltawave_lab::safetensors_io::{FileBeta, FileGate, PrefillFile};
use serde::Serialize;

use crate::args::PrefillArgs;
use crate::failure::Failure;
use crate::run::{self, Outcome, StateFormat};
use crate::workload::Workload;

type Fallible<T> = deltawave::Result<T>;

/// The slot of each sequence: the last ones, backwards.
pub fn slots(sequences: usize, pool: usize) -> Vec<i32> {
    (1..=sequences).map(|n| (pool - n) as i32).collect()
}

/// The shape of so many states.
fn shape(w: &Workload, layout: StateLayout, slots: usize) -> [usize; 4] {
    let s = &w.spec;
    match layout {
        StateLayout::KeyMajor => [slots, s.value_heads, s.key_dim, s.value_dim],
        StateLayout::ValueMajor => [slots, s.value_heads, s.value_dim, s.key_dim],
    }
}

/// A state as the host has it, `[HV, K, V]`.
fn key_major(w: &Workload, layout: StateLayout, dtype: Dtype, bytes: Vec<u8>) -> HostTensor {
    let state = HostTensor::from_bytes(dtype, bytes);
    match layout {
        StateLayout::KeyMajor => state,
        StateLayout::ValueMajor => {
            let (k, v) = (w.spec.key_dim, w.spec.value_dim);
            HostTensor::new(dtype, layout.to_key_major(&state.values, k, v))
        }
    }
}

/// A pool of states on the device, of which a few belong to sequences.
pub struct Pool {
    buffer: Buffer<u8>,
    /// Before a run: initial states in their slots, NaN elsewhere.
    before: Vec<u8>,
    slots: usize,
    format: StateFormat,
}

/// Slots of no sequence.
#[derive(Clone, Copy)]
pub struct Others {
    /// How many there are.
    pub slots: usize,
    /// How many have other bits than before.
    pub changed: usize,
}

impl Pool {
    /// Of so many slots.
    pub fn new(
        context: &Context,
        w: &Workload,
        format: StateFormat,
        slots: usize,
    ) -> Fallible<Self> {
        let d = &w.data;
        let each = d.value_heads * d.key_dim * d.value_dim * format.dtype.size();
        let mut before = vec![0xff; slots * each];
        if let Some(initial) = &d.initial_state {
            let ordered = (format.layout).from_key_major(&initial.values, d.key_dim, d.value_dim);
            let states = HostTensor::new(format.dtype, ordered);
            let all = self::slots(w.sequences(), slots);
            for (slot, state) in all.into_iter().zip(states.bytes.chunks_exact(each.max(1))) {
                before[slot as usize * each..][..each].copy_from_slice(state);
            }
        }
        Ok(Pool {
            buffer: context.alloc(before.len())?,
            before,
            slots,
            format,
        })
    }

    /// As it was before the first run.
    pub fn reset(&mut self) -> Fallible<()> {
        self.buffer.write(&self.before)
    }

    /// Of a launch whose plan has the slots.
    pub fn view(&mut self, w: &Workload) -> Fallible<StatePool<'_>> {
        let shape = shape(w, self.format.layout, self.slots);
        let tensor =
            (self.buffer).tensor_of_mut(self.format.dtype, shape, dense_strides(shape), 0)?;
        Ok(StatePool {
            tensor,
            layout: self.format.layout,
            slots: None,
            write_slots: None,
        })
    }

    /// The sequences' states, `[N, HV, K, V]`, and what became of the other slots.
    pub fn read(&self, stream: &Stream, w: &Workload) -> Fallible<(HostTensor, Others)> {
        let now = self.buffer.download(stream)?;
        let each = now.len() / self.slots.max(1);
        let own = slots(w.sequences(), self.slots);
        let state = |slot: &i32| &now[*slot as usize * each..][..each];
        let states = own.iter().flat_map(state).copied().collect();
        let StateFormat { layout, dtype } = self.format;
        // Those of the sequences are the last ones.
        let slots = self.slots - own.len();
        let pairs = (0..slots).map(|slot| slot * each..(slot + 1) * each);
        let changed = pairs.filter(|slot| now[slot.clone()] != self.before[slot.clone()]);
        let others = Others {
            slots,
            changed: changed.count(),
        };
        Ok((key_major(w, layout, dtype, states), others))
    }
}

/// States in the course of sequences, in f32, in slots of their own.
pub struct Taken {
    buffer: Buffer<u8>,
    wanted: Vec<Snapshot>,
    layout: StateLayout,
}

impl Taken {
    /// Of a plan that has them.
    pub fn new(
        context: &Context,
        w: &Workload,
        layout: StateLayout,
        wanted: &[Snapshot],
    ) -> Fallible<Self> {
        let elements: usize = shape(w, layout, wanted.len()).iter().product();
        Ok(Taken {
            buffer: context.upload(&vec![0xff; elements * 4])?,
            wanted: wanted.to_vec(),
            layout,
        })
    }

    /// Of a launch.
    pub fn view(&mut self, w: &Workload) -> Fallible<StateMut<'_>> {
        let shape = shape(w, self.layout, self.wanted.len());
        let tensor = (self.buffer).tensor_of_mut(Dtype::F32, shape, dense_strides(shape), 0)?;
        Ok(StateMut {
            tensor,
            layout: self.layout,
        })
    }

    /// What they are of, and `[snapshots, HV, K, V]`.
    pub fn read(&self, stream: &Stream, w: &Workload) -> Fallible<(Vec<Snapshot>, HostTensor)> {
        let states = self.buffer.download(stream)?;
        let states = key_major(w, self.layout, Dtype::F32, states);
        Ok((self.wanted.clone(), states))
    }
}

/// Sequences that were continued from their last snapshot.
#[derive(Clone, Copy)]
pub struct Resumed {
    /// How many, and how many of their tokens.
    pub sequences: usize,
    pub tokens: usize,
    /// Whether outputs and final states have the bits of the whole.
    pub same_bits: bool,
    /// Whether they must: no sequence of the whole was cut into segments.
    pub must: bool,
    /// How far the outputs are from those of the whole.
    pub rms_ratio: f64,
}

/// Continues every sequence from the last snapshot before its end; `None`: there is none.
pub fn resume(
    context: &Context,
    plan: &Prefill,
    w: &Workload,
    outcome: &Outcome,
    format: StateFormat,
) -> Result<Option<Resumed>, Failure> {
    let Some((wanted, states)) = &outcome.snapshots else {
        return Ok(None);
    };
    let d = &w.data;
    let ends = |n: usize| [d.cu_seqlens[n] as usize, d.cu_seqlens[n + 1] as usize];
    let last = |n: usize| {
        let [begin, end] = ends(n);
        let before_end = |s: &&Snapshot| s.sequence == n && s.tokens < end - begin;
        let found = wanted.iter().filter(before_end).max_by_key(|s| s.tokens)?;
        Some((n, found.slot, begin + found.tokens..end))
    };
    let rest: Vec<_> = (0..w.sequences()).filter_map(last).collect();
    if rest.is_empty() {
        return Ok(None);
    }
    let rows: Vec<usize> = rest.iter().flat_map(|(_, _, rows)| rows.clone()).collect();
    let state = d.value_heads * d.key_dim * d.value_dim;
    let chosen = rest
        .iter()
        .flat_map(|(_, slot, _)| &states.values[slot * state..][..state]);
    let lengths = rest.iter().map(|(_, _, rows)| rows.len() as i32);
    let ends = lengths.scan(0, |end, n| {
        *end += n;
        Some(*end)
    });
    let cu_seqlens: Vec<i32> = std::iter::once(0).chain(ends).collect();
    let part = Workload {
        spec: PrefillSpec {
            segments: Some(1),
            ..w.spec
        },
        dense: None,
        neg_eigval: w.neg_eigval,
        drawn: None,
        data: PrefillFile {
            initial_state: Some(HostTensor::new(Dtype::F32, chosen.copied().collect())),
            cu_seqlens,
            ..of_rows(d, &rows)
        },
    };
    let again = Prefill::packed(context, part.spec, &part.data.cu_seqlens, rows.len()).map_err(
        Failure::during("the rest of the sequences cannot be planned"),
    )?;
    let found = run::run(context, &again, &part, &run::Wanted::new(format))?;
    let row = d.value_heads * d.value_dim;
    let whole = taken(&outcome.o, row, &rows);
    let of_whole: Vec<f64> = whole.values.iter().map(|x| f64::from(*x)).collect();
    let sequences: Vec<usize> = rest.iter().map(|(n, ..)| *n).collect();
    let states = taken(&outcome.final_state, state, &sequences);
    Ok(Some(Resumed {
        sequences: rest.len(),
        tokens: rows.len(),
        same_bits: found.o.bytes == whole.bytes && found.final_state.bytes == states.bytes,
        must: !plan.parts().contains(&Part::Summarise),
        rms_ratio: compare(&found.o.values, &of_whole).rms_ratio,
    }))
}

/// Some rows of a tensor that has so many elements in each.
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

/// What a report says of a pool.
#[derive(Serialize)]
pub struct PoolLine {
    slots: u32,
    other_slots: usize,
    changed_slots: usize,
}

impl PoolLine {
    /// Of a run in one.
    pub fn new(args: &PrefillArgs, outcome: &Outcome) -> Option<Self> {
        let others = outcome.others?;
        Some(PoolLine {
            slots: args.pool?,
            other_slots: others.slots,
            changed_slots: others.changed,
        })
    }

    /// In words.
    pub fn text(&self) -> String {
        let (all, others, changed) = (self.slots, self.other_slots, self.changed_slots);
        format!("{all} slots, {others} of no sequence, of which {changed} changed")
    }
}

/// What a report says of states in the course of sequences.
#[derive(Serialize)]
pub struct SnapshotLine {
    every: usize,
    states: usize,
    resumed_sequences: Option<usize>,
    resumed_tokens: Option<usize>,
    resumed_same_bits: Option<bool>,
    resumed_rms_ratio: Option<f64>,
}

impl SnapshotLine {
    /// Of a run that kept them.
    pub fn new(args: &PrefillArgs, outcome: &Outcome, resumed: Option<Resumed>) -> Option<Self> {
        let (wanted, _) = outcome.snapshots.as_ref()?;
        Some(SnapshotLine {
            every: args.snapshots?,
            states: wanted.len(),
            resumed_sequences: resumed.map(|r| r.sequences),
            resumed_tokens: resumed.map(|r| r.tokens),
            resumed_same_bits: resumed.map(|r| r.same_bits),
            resumed_rms_ratio: resumed.map(|r| r.rms_ratio),
        })
    }

    /// In words.
    pub fn text(&self) -> String {
        let mut out = format!("{} states, every {} tokens", self.states, self.every);
        if let Some((sequences, same_bits)) = self.resumed_sequences.zip(self.resumed_same_bits) {
            let off = self.resumed_rms_ratio.unwrap_or_default();
            out += &format!("; {sequences} sequences continued from their last one: ");
            out += &match same_bits {
                true => "the bits of the whole".to_owned(),
                false => format!("{off:.2e} off the whole"),
            };
        }
        out
    }
}
