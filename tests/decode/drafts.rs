//! Drafts against the oracle: every number of tokens with every number of accepted ones, and slots, counts and lengths
//! that make no sense.

use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Drafts};
use deltawave::gates::Gating;
use deltawave::state::StatePool;
use deltawave::tensor::{Buffer, Tensor};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{InputSpec, Inputs, Tensor as HostTensor, random_state};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle::{self, Beta, Gate, Problem};

use crate::cases::{POISON, limit, spec};
use crate::common::context;

const MOST: usize = 4;
const COLUMNS: usize = 3;
const NULL: i32 = 5;

/// One batch of drafts, and what it left behind.
struct Run {
    spec: DecodeSpec,
    state_dtype: Dtype,
    layout: StateLayout,
    cu_seqlens: Vec<i32>,
    /// `[B, COLUMNS]`, and `[B, MOST]`.
    read: Vec<i32>,
    write: Vec<i32>,
    accepted: Vec<i32>,
    has: Vec<u8>,
    rows: usize,
}

struct Left {
    o: HostTensor,
    before: Vec<u8>,
    pool: Vec<u8>,
}

impl Run {
    fn slots(&self) -> usize {
        self.accepted.len() * (COLUMNS + MOST) + NULL as usize + 1
    }

    fn each(&self) -> usize {
        self.spec.heads.value * self.spec.heads.key_dim * self.spec.heads.value_dim
    }

    fn launch(&self, inputs: &Inputs) -> Left {
        self.launch_to(inputs, None)
    }

    /// `states`: the type of states of their own, which the slots of drafts are then slots of. Returned as the pool.
    fn launch_to(&self, inputs: &Inputs, states: Option<Dtype>) -> Left {
        let context = context();
        let stream = context.stream().unwrap();
        let (s, rows, heads) = (self.spec, self.rows, self.spec.heads);
        let before = random_state(self.state_dtype, self.slots() * self.each(), 9).bytes;
        let mut pool = context.upload(&before).unwrap();
        let own = random_state(states.unwrap_or(Dtype::F32), self.slots() * self.each(), 9).bytes;
        let mut own_states = context.upload(&own).unwrap();
        let upload = |t: &HostTensor| context.upload(&t.bytes).unwrap();
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(upload);
        let [g, beta] = [&inputs.g, &inputs.beta].map(|x| context.upload(x).unwrap());
        let [read, write, accepted, lengths] =
            [&self.read, &self.write, &self.accepted, &self.cu_seqlens]
                .map(|x| context.upload(x).unwrap());
        let has = context.upload(&self.has).unwrap();
        let mut o = context
            .upload(&vec![POISON; rows * heads.value * heads.value_dim * 2])
            .unwrap();
        let view = |b: &'_ Buffer<u8>, h: usize, d: usize| {
            let base = b.address().cast_const();
            // SAFETY: the rows lie in the buffer, which outlives the launch.
            unsafe { Tensor::from_raw(base, s.dtype, [rows, h, d], [h * d, d, 1]) }
        };
        let [a, b] = match self.layout {
            StateLayout::KeyMajor => [heads.key_dim, heads.value_dim],
            StateLayout::ValueMajor => [heads.value_dim, heads.key_dim],
        };
        let of_head = heads.value_dim;
        let tensors = DecodeTensors {
            q: view(&q, heads.key, heads.key_dim).into(),
            k: view(&k, heads.key, heads.key_dim).into(),
            v: view(&v, heads.value, of_head).into(),
            gating: Gating::Given {
                g: Some(g.tensor([rows, heads.value]).unwrap().into()),
                beta: Some(beta.tensor([rows, heads.value]).unwrap().into()),
            },
            pool: StatePool {
                tensor: pool
                    .tensor_of_mut(
                        self.state_dtype,
                        [self.slots(), heads.value, a, b],
                        [self.each(), a * b, b, 1],
                        0,
                    )
                    .unwrap(),
                layout: self.layout,
                slots: None,
                write_slots: None,
            },
            has_initial_state: Some((&has).into()),
            states: states.map(|dtype| {
                let shape = [self.slots(), 1, heads.value, a, b];
                let each = self.each();
                (own_states.tensor_of_mut(dtype, shape, [each, each, a * b, b, 1], 0)).unwrap()
            }),
            o: o.tensor_of_mut(
                s.dtype,
                [rows, heads.value, of_head],
                [heads.value * of_head, of_head, 1],
                0,
            )
            .unwrap()
            .into(),
        };
        let drafts = Drafts {
            draft_slots: Some((&write).into()),
            read_slots: Some((&read).into()),
            accepted: Some((&accepted).into()),
            cu_seqlens: Some((&lengths).into()),
            null_slot: Some(NULL),
        };
        let plan = Decode::new(&context, s, self.accepted.len()).unwrap();
        plan.launch_drafts(&stream, &tensors, &drafts).unwrap();
        let o = HostTensor::from_bytes(s.dtype, o.download(&stream).unwrap());
        let pool = pool.download(&stream).unwrap();
        if states.is_none() {
            return Left { o, before, pool };
        }
        assert!(pool == before, "the pool of states of their own");
        let pool = own_states.download(&stream).unwrap();
        Left {
            o,
            before: own,
            pool,
        }
    }

    /// A state of a pool, `[HV, K, V]`.
    fn state(&self, pool: &[u8], slot: usize) -> Vec<f32> {
        let bytes = self.each() * self.state_dtype.size();
        let state = pool[slot * bytes..][..bytes].to_vec();
        let values = HostTensor::from_bytes(self.state_dtype, state).values;
        let heads = &self.spec.heads;
        self.layout
            .to_key_major(&values, heads.key_dim, heads.value_dim)
    }

    fn inputs(&self) -> Inputs {
        let s = &self.spec;
        Inputs::new(InputSpec {
            dtype: s.dtype,
            tokens: self.rows,
            key_heads: s.heads.key,
            value_heads: s.heads.value,
            key_dim: s.heads.key_dim,
            value_dim: s.heads.value_dim,
            seed: 4,
            ..Default::default()
        })
    }

    /// Every pair of counts. Some states have no slot to be written to, some sequences none to read, one is padding.
    fn of_all_counts(spec: DecodeSpec, state_dtype: Dtype, layout: StateLayout) -> Run {
        let pairs: Vec<(usize, i32)> = (0..=MOST)
            .flat_map(|count| (-1..=COLUMNS as i32 + 1).map(move |accepted| (count, accepted)))
            .collect();
        let mut cu_seqlens = vec![0i32];
        for (count, _) in &pairs {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *count as i32);
        }
        let batch = pairs.len();
        let of = |columns: usize, offset: usize| -> Vec<i32> {
            let slot = |i: usize| {
                let n = i / columns;
                match (n, i % columns) {
                    _ if n == batch - 2 => [-1, i32::MAX, NULL][i % 3],
                    _ if n % 7 == 3 && offset == 0 => [NULL, -9][i % 2],
                    (_, t) if n % 4 == 1 && t == 1 && offset > 0 => [NULL, i32::MIN][n % 2],
                    (_, t) => (NULL as usize + 1 + n * (COLUMNS + MOST) + offset + t) as i32,
                }
            };
            (0..batch * columns).map(slot).collect()
        };
        Run {
            spec,
            state_dtype,
            layout,
            rows: cu_seqlens[batch] as usize + 2,
            read: of(COLUMNS, 0),
            write: of(MOST, COLUMNS),
            accepted: pairs.iter().map(|(_, accepted)| *accepted).collect(),
            has: (0..batch).map(|n| u8::from(n % 6 != 2)).collect(),
            cu_seqlens,
        }
    }

    /// Slot that a sequence reads, if it has one.
    fn slot_of(&self, n: usize) -> Option<usize> {
        let column = (self.accepted[n] - 1).clamp(0, COLUMNS as i32 - 1) as usize;
        self.there(self.read[n * COLUMNS + column])
    }

    fn there(&self, slot: i32) -> Option<usize> {
        let slot = (slot != NULL).then(|| usize::try_from(slot).ok()).flatten();
        slot.filter(|slot| *slot < self.slots())
    }

    fn check(&self) {
        let inputs = self.inputs();
        let left = self.launch(&inputs);
        let (batch, each, heads) = (self.accepted.len(), self.each(), self.spec.heads);
        let initial: Vec<f32> = (0..batch)
            .flat_map(|n| match self.slot_of(n) {
                Some(slot) => self.state(&left.before, slot),
                None => vec![0.0; each],
            })
            .collect();
        let has: Vec<bool> = (0..batch)
            .map(|n| self.has[n] != 0 && self.slot_of(n).is_some())
            .collect();
        let is_padding = |n: usize| {
            let count = (self.cu_seqlens[n + 1] - self.cu_seqlens[n]) as usize;
            let writes = &self.write[n * MOST..][..count];
            self.slot_of(n).is_none() && writes.iter().all(|slot| self.there(*slot).is_none())
        };
        let mut expected = left.before.clone();
        let (mut states, mut wanted_states) = (Vec::new(), Vec::new());
        let of_row = heads.value * heads.value_dim;
        // The states after `most` tokens, and after all of shorter sequences.
        for most in 1..=MOST {
            let mut cu_seqlens = vec![0i32];
            let mut taken = Vec::new();
            for n in 0..batch {
                let (first, end) = (self.cu_seqlens[n] as usize, self.cu_seqlens[n + 1] as usize);
                taken.extend(first..end.min(first + most));
                cu_seqlens.push(taken.len() as i32);
            }
            let gather = |x: &[f32], width: usize| -> Vec<f32> {
                let rows = taken.iter().flat_map(|row| &x[row * width..][..width]);
                rows.copied().collect()
            };
            let keys = heads.key * heads.key_dim;
            let [q, k] = [&inputs.q, &inputs.k].map(|t| gather(&t.values, keys));
            let v = gather(&inputs.v.values, of_row);
            let [g, beta] = [&inputs.g, &inputs.beta].map(|x| gather(x, heads.value));
            let solution = oracle::prefill(&Problem {
                tokens: taken.len(),
                q: &q,
                k: &k,
                v: &v,
                gate: Gate::Log(&g),
                beta: Beta::Given(&beta),
                initial_state: Some(&initial),
                has_initial_state: Some(&has),
                ..inputs.problem(&cu_seqlens)
            })
            .unwrap();
            for n in 0..batch {
                let count = (self.cu_seqlens[n + 1] - self.cu_seqlens[n]) as usize;
                if count < most {
                    continue;
                }
                if let Some(slot) = self.there(self.write[n * MOST + most - 1]) {
                    states.extend(self.state(&left.pool, slot));
                    wanted_states.extend_from_slice(&solution.final_state[n * each..][..each]);
                    let bytes = each * self.state_dtype.size();
                    expected[slot * bytes..][..bytes]
                        .copy_from_slice(&left.pool[slot * bytes..][..bytes]);
                }
            }
            if most == MOST {
                let (mut o, mut wanted) = (Vec::new(), Vec::new());
                for n in 0..batch {
                    let rows = self.cu_seqlens[n] as usize * of_row
                        ..self.cu_seqlens[n + 1] as usize * of_row;
                    if is_padding(n) {
                        assert!(
                            left.o.values[rows].iter().all(|x| x.to_bits() == 0),
                            "padding {n}"
                        );
                        continue;
                    }
                    o.extend_from_slice(&left.o.values[rows.clone()]);
                    wanted.extend_from_slice(&solution.o[rows]);
                }
                let (error, limit) = (compare(&o, &wanted), limit(&wanted, self.spec.dtype));
                assert!(error.rms_ratio <= limit, "o: {error:?}, limit {limit:.1e}");
            }
        }
        let (error, limit) = (
            compare(&states, &wanted_states),
            limit(&wanted_states, self.state_dtype),
        );
        assert!(
            error.rms_ratio <= limit,
            "states: {error:?}, limit {limit:.1e}"
        );
        assert!(
            expected == left.pool,
            "written outside of the drafts' slots"
        );
        let end = self.cu_seqlens[batch] as usize * of_row;
        assert!(
            left.o.values[end..].iter().all(|x| x.is_nan()),
            "rows of no sequence"
        );
    }
}

#[test]
fn every_count_of_tokens_and_of_accepted_ones() {
    for (dtype, dims, state_dtype, layout) in [
        (Dtype::Bf16, [32, 48], Dtype::F32, StateLayout::KeyMajor),
        (Dtype::F16, [64, 32], Dtype::F32, StateLayout::ValueMajor),
        (Dtype::Bf16, [128, 32], Dtype::Bf16, StateLayout::KeyMajor),
        (Dtype::F16, [144, 16], Dtype::Bf16, StateLayout::ValueMajor),
        (Dtype::Bf16, [256, 16], Dtype::F32, StateLayout::KeyMajor),
        (Dtype::Bf16, [64, 32], Dtype::F16, StateLayout::ValueMajor),
        (Dtype::F16, [144, 48], Dtype::F16, StateLayout::KeyMajor),
    ] {
        Run::of_all_counts(spec(dtype, [1, 2], dims, MOST), state_dtype, layout).check();
    }
}

/// States in slots of their own: the bits of those in the pool, or rounded to another type.
#[test]
fn states_of_their_own() {
    let s = spec(Dtype::Bf16, [1, 2], [32, 48], MOST);
    for (state_dtype, own, layout) in [
        (Dtype::F32, Dtype::F32, StateLayout::ValueMajor),
        (Dtype::Bf16, Dtype::Bf16, StateLayout::KeyMajor),
        (Dtype::F32, Dtype::Bf16, StateLayout::KeyMajor),
        (Dtype::Bf16, Dtype::F32, StateLayout::ValueMajor),
        (Dtype::F16, Dtype::F16, StateLayout::ValueMajor),
        (Dtype::F32, Dtype::F16, StateLayout::KeyMajor),
        (Dtype::F16, Dtype::Bf16, StateLayout::ValueMajor),
    ] {
        let run = Run::of_all_counts(s, state_dtype, layout);
        let inputs = run.inputs();
        let (wanted, found) = (run.launch(&inputs), run.launch_to(&inputs, Some(own)));
        assert!(found.o.bytes == wanted.o.bytes, "o");
        if own == state_dtype {
            assert!(found.pool == wanted.pool, "states");
            continue;
        }
        let values = |dtype, bytes: &[u8]| HostTensor::from_bytes(dtype, bytes.to_vec()).values;
        let [before, after] = [&found.before, &found.pool].map(|b| values(own, b));
        let [unwritten, exact] = [&wanted.before, &wanted.pool].map(|b| values(state_dtype, b));
        for slot in (0..after.len()).step_by(run.each()) {
            let all = slot..slot + run.each();
            if exact[all.clone()] == unwritten[all.clone()] {
                assert!(after[all.clone()] == before[all], "slot of nobody");
                continue;
            }
            let wanted: Vec<f64> = exact[all.clone()].iter().map(|x| f64::from(*x)).collect();
            let error = compare(&after[all], &wanted);
            assert!(error.rms_ratio < 4e-3, "states: {error:?}");
        }
    }
}

/// States of another shape than `[slots, 1, HV, ...]`.
#[test]
fn states_of_their_own_that_are_refused() {
    let context = context();
    let (s, stream) = (
        spec(Dtype::Bf16, [1, 2], [32, 32], 2),
        context.stream().unwrap(),
    );
    let zeros = |n: usize| context.upload(&vec![0u8; n]).unwrap();
    let (q, k, v) = (zeros(2 * 64), zeros(2 * 64), zeros(2 * 128));
    let (mut o, mut pool, mut states) = (zeros(2 * 128), zeros(2 * 8192), zeros(4 * 8192));
    let table = context.upload(&[0i32, 1]).unwrap();
    let tensors = DecodeTensors {
        q: q.tensor_of(s.dtype, [1, 2, 1, 32], [64, 32, 32, 1], 0)
            .unwrap()
            .into(),
        k: k.tensor_of(s.dtype, [1, 2, 1, 32], [64, 32, 32, 1], 0)
            .unwrap()
            .into(),
        v: v.tensor_of(s.dtype, [1, 2, 2, 32], [128, 64, 32, 1], 0)
            .unwrap()
            .into(),
        gating: Gating::Given {
            g: None,
            beta: None,
        },
        pool: StatePool {
            tensor: (pool.tensor_of_mut(Dtype::F32, [2, 2, 32, 32], [2048, 1024, 32, 1], 0))
                .unwrap(),
            layout: StateLayout::KeyMajor,
            slots: None,
            write_slots: None,
        },
        has_initial_state: None,
        states: Some(
            (states.tensor_of_mut(Dtype::F32, [2, 2, 2, 32, 32], [4096, 2048, 1024, 32, 1], 0))
                .unwrap(),
        ),
        o: o.tensor_of_mut(s.dtype, [1, 2, 2, 32], [128, 64, 32, 1], 0)
            .unwrap()
            .into(),
    };
    let drafts = Drafts {
        draft_slots: Some((&table).into()),
        ..Default::default()
    };
    let plan = Decode::new(&context, s, 1).unwrap();
    let error = plan.launch_drafts(&stream, &tensors, &drafts).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("states: shape [2, 2, 2, 32, 32]"),
        "{error}"
    );
}

/// Lengths that decrease, exceed the rows or the tokens, or are negative: nothing out of bounds, nothing in slots of
/// nobody, and the first sequence as without them. No rows are those of two sequences: the simulator would call that a
/// race.
#[test]
fn lengths_that_make_no_sense() {
    let good = |cu_seqlens: Vec<i32>| {
        let s = spec(Dtype::Bf16, [1, 2], [32, 32], MOST);
        let batch = cu_seqlens.len() - 1;
        let mut run = Run::of_all_counts(s, Dtype::F32, StateLayout::KeyMajor);
        run.rows = 16;
        run.read = (0..batch as i32 * COLUMNS as i32)
            .map(|i| NULL + 1 + i)
            .collect();
        let own = NULL + 1 + (batch * COLUMNS) as i32;
        run.write = (0..batch as i32 * MOST as i32).map(|i| own + i).collect();
        run.accepted = vec![1; batch];
        run.has = vec![1; batch];
        run.cu_seqlens = cu_seqlens;
        run
    };
    let of_row = 2 * 32;
    let reference = good(vec![0, 2, 4, 8, 8]);
    let inputs = reference.inputs();
    let wanted = reference.launch(&inputs);
    for lengths in [
        vec![0, 2, i32::MAX, i32::MAX, i32::MAX],
        vec![i32::MIN, 2, -3, -1 << 20, -1],
        vec![0, 2, 9, 3, 3],
        vec![0, 2, 16, 17, 1 << 20],
    ] {
        let run = good(lengths);
        let found = run.launch(&inputs);
        assert!(
            found.o.bytes[..2 * of_row * 2] == wanted.o.bytes[..2 * of_row * 2],
            "o of 0"
        );
        for slot in &run.write[..2] {
            let states = [&found.pool, &wanted.pool].map(|p| run.state(p, *slot as usize));
            assert!(states[0] == states[1], "state of 0");
        }
        for slot in 0..=NULL as usize {
            let states = [&found.pool, &found.before].map(|p| run.state(p, slot));
            assert!(states[0] == states[1], "slot of nobody");
        }
    }
}
