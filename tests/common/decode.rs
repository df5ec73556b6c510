//! Running one decode on the device under hostile conditions, and judging it by the oracle.
#![allow(dead_code, reason = "each test uses a part of it")]

use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::gates::Gating;
use deltawave::runtime::Context;
use deltawave::state::StatePool;
use deltawave::tensor::{Buffer, TokenScalars, Tokens, TokensMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{
    GateInputs, Gates, InputSpec, Inputs, Keys, Tensor as HostTensor, random_state,
};
use deltawave_lab::metrics::{compare, rounding_ratio};
use deltawave_lab::oracle::{self, Beta, Gate, Problem};

use crate::common::GateKind;

#[derive(Clone, Debug)]
pub struct Case {
    pub spec: DecodeSpec,
    pub batch: usize,
    pub gates: Gates,
    pub keys: Keys,
    pub gate_kind: GateKind,
    /// Tensors `[B T, ...]`; else `[B, T, ...]`, with a gap after each sequence.
    pub packed: bool,
    /// Elements between heads, between tokens, between sequences, and in front.
    pub pads: [usize; 4],
    pub state_dtype: Dtype,
    pub layout: StateLayout,
    /// Elements between the rows of a state, and between slots.
    pub row_pad: usize,
    pub slot_pad: usize,
    pub has_slots: bool,
    /// States are written to other slots than they are read from.
    pub moves: bool,
    /// Which sequences have an initial state, and which are padding: bit n % 8.
    pub has_initial: u8,
    pub padding: u8,
    /// The states after every token are wanted, of this type.
    pub states: Option<Dtype>,
    pub seed: u64,
}

pub fn spec(dtype: Dtype, heads: [usize; 2], dims: [usize; 2], tokens: usize) -> DecodeSpec {
    DecodeSpec {
        dtype,
        tokens,
        ..DecodeSpec::new(heads[0], heads[1], dims[0], dims[1])
    }
}

impl Case {
    pub fn new(spec: DecodeSpec, batch: usize) -> Self {
        Case {
            spec,
            batch,
            gates: Gates::Mixed,
            keys: Keys::Normal,
            gate_kind: GateKind::Given,
            packed: true,
            pads: [0; 4],
            state_dtype: Dtype::F32,
            layout: StateLayout::KeyMajor,
            row_pad: 0,
            slot_pad: 0,
            has_slots: true,
            moves: false,
            has_initial: 0b1110_1101,
            padding: 0,
            states: None,
            seed: 1,
        }
    }

    pub fn rows(&self) -> usize {
        self.batch * self.spec.tokens
    }

    pub fn has_initial(&self) -> Vec<bool> {
        (0..self.batch)
            .map(|n| self.has_initial >> (n % 8) & 1 == 1)
            .collect()
    }

    pub fn is_padding(&self, n: usize) -> bool {
        self.has_slots && self.padding >> (n % 8) & 1 == 1
    }

    /// Three slots for each sequence, so that some belong to nobody.
    pub fn pool(&self) -> usize {
        3 * self.batch + 1
    }

    pub fn read_slot(&self, n: usize) -> usize {
        if self.has_slots {
            3 * (self.batch - n)
        } else {
            n
        }
    }

    pub fn write_slot(&self, n: usize) -> usize {
        if self.moves {
            3 * n + 1
        } else {
            self.read_slot(n)
        }
    }

    /// Rows and columns of the state of a head, as it lies in memory.
    pub fn matrix(&self) -> [usize; 2] {
        let s = &self.spec;
        match self.layout {
            StateLayout::KeyMajor => [s.heads.key_dim, s.heads.value_dim],
            StateLayout::ValueMajor => [s.heads.value_dim, s.heads.key_dim],
        }
    }

    /// Strides of `[slots, HV, rows, columns]`.
    pub fn state_strides(&self) -> [usize; 4] {
        let [rows, columns] = self.matrix();
        let row = columns + self.row_pad;
        let head = rows * row;
        [self.spec.heads.value * head + self.slot_pad, head, row, 1]
    }

    /// Where element (row, head) of a token tensor lies.
    fn at(&self, heads: usize, dim: usize, row: usize, head: usize) -> usize {
        let [_, _, gap, front] = self.pads;
        let [token, head_stride] = self.token_strides(heads, dim);
        let gap = if self.packed { 0 } else { gap };
        front + row * token + row / self.spec.tokens * gap + head * head_stride
    }

    fn token_strides(&self, heads: usize, dim: usize) -> [usize; 2] {
        let head = dim + self.pads[0];
        [heads * head + self.pads[1], head]
    }
}

/// Bytes of a NaN that no kernel makes, whatever the type.
pub const POISON: u8 = 0xff;

pub struct Data {
    pub inputs: Inputs,
    pub gate_inputs: GateInputs,
    /// `[B, HV, K, V]`.
    pub initial: HostTensor,
}

impl Data {
    pub fn new(case: &Case) -> Data {
        let s = &case.spec;
        let input = InputSpec {
            dtype: s.dtype,
            tokens: case.rows(),
            key_heads: s.heads.key,
            value_heads: s.heads.value,
            key_dim: s.heads.key_dim,
            value_dim: s.heads.value_dim,
            gates: case.gates,
            keys: case.keys,
            unit_rows: !s.qk_l2norm,
            seed: case.seed,
        };
        let gate_dtype = match case.gate_kind {
            GateKind::Raw { dtype, .. } => dtype,
            _ => s.dtype,
        };
        let elements = case.batch * s.heads.value * s.heads.key_dim * s.heads.value_dim;
        Data {
            inputs: Inputs::new(input),
            gate_inputs: GateInputs::new(InputSpec {
                dtype: gate_dtype,
                ..input
            }),
            initial: random_state(case.state_dtype, elements, case.seed),
        }
    }

    pub fn problem<'a>(
        &'a self,
        case: &Case,
        cu_seqlens: &'a [i32],
        has_initial: &'a [bool],
    ) -> Problem<'a> {
        let mut p = self.inputs.problem(cu_seqlens);
        match case.gate_kind {
            GateKind::Given => {}
            GateKind::NoDecay => p.gate = Gate::None,
            GateKind::NoBeta => p.beta = Beta::One,
            GateKind::Raw {
                dt_bias,
                allow_neg_eigval,
                ..
            } => {
                p.gate = Gate::Raw {
                    a: &self.gate_inputs.a.values,
                    a_log: &self.gate_inputs.a_log,
                    dt_bias: dt_bias.then_some(&self.gate_inputs.dt_bias),
                };
                p.beta = Beta::Logits {
                    b: &self.gate_inputs.b.values,
                    allow_neg_eigval,
                };
            }
        }
        p.initial_state = Some(&self.initial.values);
        p.has_initial_state = Some(has_initial);
        p.scale = case.spec.scale.map(f64::from);
        p.head_map = case.spec.heads.map;
        p
    }
}

/// What a decode left behind.
pub struct Output {
    /// `[B T, HV, V]`.
    pub o: HostTensor,
    /// The pool's bytes, before and after.
    pub before: Vec<u8>,
    pub pool: Vec<u8>,
    /// `[B, T, HV, rows, columns]`.
    pub states: Option<HostTensor>,
}

impl Output {
    /// All that was written.
    pub fn bytes(&self) -> [&[u8]; 3] {
        let states = self.states.as_ref().map_or(&[][..], |t| &t.bytes);
        [&self.o.bytes, &self.pool, states]
    }
}

/// A token tensor on the device, poisoned where it has no elements.
struct Placed {
    buffer: Buffer<u8>,
    dtype: Dtype,
    heads: usize,
    dim: usize,
}

impl Placed {
    fn new(context: &Context, case: &Case, tensor: &HostTensor, heads: usize, dim: usize) -> Self {
        let size = tensor.dtype.size();
        let mut bytes = vec![POISON; Self::elements(case, heads, dim) * size];
        for (i, run) in tensor.bytes.chunks_exact(dim * size).enumerate() {
            let at = case.at(heads, dim, i / heads, i % heads) * size;
            bytes[at..at + run.len()].copy_from_slice(run);
        }
        Placed {
            buffer: context.upload(&bytes).unwrap(),
            dtype: tensor.dtype,
            heads,
            dim,
        }
    }

    fn elements(case: &Case, heads: usize, dim: usize) -> usize {
        case.at(heads, dim, case.rows().max(1) - 1, heads - 1) + dim + 5
    }

    fn tokens(&self, case: &Case) -> Tokens<'_> {
        let [token, head] = case.token_strides(self.heads, self.dim);
        let (t, [_, _, gap, front]) = (case.spec.tokens, case.pads);
        let (h, d) = (self.heads, self.dim);
        if case.packed {
            let view =
                self.buffer
                    .tensor_of(self.dtype, [case.rows(), h, d], [token, head, 1], front);
            view.unwrap().into()
        } else {
            let strides = [t * token + gap, token, head, 1];
            let view = self
                .buffer
                .tensor_of(self.dtype, [case.batch, t, h, d], strides, front);
            view.unwrap().into()
        }
    }

    fn tokens_mut(&mut self, case: &Case) -> TokensMut<'_> {
        let [token, head] = case.token_strides(self.heads, self.dim);
        let (t, [_, _, gap, front]) = (case.spec.tokens, case.pads);
        let (h, d) = (self.heads, self.dim);
        if case.packed {
            let shape = [case.rows(), h, d];
            let view = self
                .buffer
                .tensor_of_mut(self.dtype, shape, [token, head, 1], front);
            view.unwrap().into()
        } else {
            let strides = [t * token + gap, token, head, 1];
            let shape = [case.batch, t, h, d];
            let view = self.buffer.tensor_of_mut(self.dtype, shape, strides, front);
            view.unwrap().into()
        }
    }

    fn scalars(&self, case: &Case) -> TokenScalars<'_> {
        let [token, head] = case.token_strides(self.heads, 1);
        let (t, [_, _, gap, front]) = (case.spec.tokens, case.pads);
        if case.packed {
            let shape = [case.rows(), self.heads];
            let view = self
                .buffer
                .tensor_of(self.dtype, shape, [token, head], front);
            view.unwrap().into()
        } else {
            let strides = [t * token + gap, token, head];
            let shape = [case.batch, t, self.heads];
            let view = self.buffer.tensor_of(self.dtype, shape, strides, front);
            view.unwrap().into()
        }
    }
}

/// The elements of a tensor of states; every byte of the buffer that is none becomes poison.
fn take_state(case: &Case, bytes: &mut [u8], dtype: Dtype, first: usize) -> Vec<f32> {
    let [rows, columns] = case.matrix();
    let [_, head, row, _] = case.state_strides();
    let size = dtype.size();
    let mut out = Vec::new();
    for h in 0..case.spec.heads.value {
        for r in 0..rows {
            let at = (first + h * head + r * row) * size;
            let run = &mut bytes[at..at + columns * size];
            out.extend(HostTensor::from_bytes(dtype, run.to_vec()).values);
            run.fill(POISON);
        }
    }
    let s = &case.spec;
    case.layout
        .to_key_major(&out, s.heads.key_dim, s.heads.value_dim)
}

/// The pool: initial states in the slots that are read, the rest poisoned.
pub fn pool_bytes(case: &Case, data: &Data) -> Vec<u8> {
    let s = &case.spec;
    let [rows, columns] = case.matrix();
    let [slot, head, row, _] = case.state_strides();
    let size = case.state_dtype.size();
    let mut bytes = vec![POISON; (case.pool() * slot + 3) * size];
    let each = s.heads.value * s.heads.key_dim * s.heads.value_dim;
    let has_initial = case.has_initial();
    for (n, state) in data.initial.values.chunks_exact(each).enumerate() {
        if !has_initial[n] || case.is_padding(n) {
            continue;
        }
        let ordered = case
            .layout
            .from_key_major(state, s.heads.key_dim, s.heads.value_dim);
        let ordered = HostTensor::new(case.state_dtype, ordered).bytes;
        for (i, run) in ordered.chunks_exact(columns * size).enumerate() {
            let at = (case.read_slot(n) * slot + i / rows * head + i % rows * row) * size;
            bytes[at..at + run.len()].copy_from_slice(run);
        }
    }
    bytes
}

/// Runs a case twice and returns the result, the same bits both times.
#[track_caller]
pub fn run(context: &Context, case: &Case, data: &Data) -> Output {
    let first = run_once(context, case, data);
    assert!(
        first.bytes() == run_once(context, case, data).bytes(),
        "two runs differ: {case:?}"
    );
    first
}

pub fn run_once(context: &Context, case: &Case, data: &Data) -> Output {
    let stream = context.stream().unwrap();
    let s = case.spec;
    let (hk, hv) = (s.heads.key, s.heads.value);
    let place = |t: &HostTensor, heads, dim| Placed::new(context, case, t, heads, dim);
    let f32s = |x: &[f32]| HostTensor::new(Dtype::F32, x.to_vec());
    let (inputs, raw) = (&data.inputs, &data.gate_inputs);
    let q = place(&inputs.q, hk, s.heads.key_dim);
    let k = place(&inputs.k, hk, s.heads.key_dim);
    let v = place(&inputs.v, hv, s.heads.value_dim);
    let (g, beta) = (
        place(&f32s(&inputs.g), hv, 1),
        place(&f32s(&inputs.beta), hv, 1),
    );
    let (a, b) = (place(&raw.a, hv, 1), place(&raw.b, hv, 1));
    let a_log = context.upload(&raw.a_log).unwrap();
    let dt_bias = context.upload(&raw.dt_bias).unwrap();
    let before = pool_bytes(case, data);
    let mut pool = context.upload(&before).unwrap();
    let slots = |slot: &dyn Fn(usize) -> usize| {
        let all = (0..case.batch).map(|n| match case.is_padding(n) {
            true if n % 2 == 0 => -1,
            true => i32::MAX,
            false => slot(n) as i32,
        });
        context.upload(&all.collect::<Vec<_>>()).unwrap()
    };
    let (read, write) = (
        slots(&|n| case.read_slot(n)),
        slots(&|n| case.write_slot(n)),
    );
    let has: Vec<u8> = case.has_initial().iter().map(|x| u8::from(*x)).collect();
    let has = context.upload(&has).unwrap();
    let empty = HostTensor::new(s.dtype, Vec::new());
    let mut o = Placed::new(context, case, &empty, hv, s.heads.value_dim);
    let [rows, columns] = case.matrix();
    let states_shape = [case.batch, s.tokens, hv, rows, columns];
    let elements: usize = states_shape.iter().product();
    let mut states = case.states.map(|dtype| {
        let bytes = vec![POISON; elements * dtype.size()];
        (context.upload(&bytes).unwrap(), dtype)
    });
    {
        let tensors = DecodeTensors {
            q: q.tokens(case),
            k: k.tokens(case),
            v: v.tokens(case),
            gating: match case.gate_kind {
                GateKind::Raw {
                    dt_bias: has_bias,
                    allow_neg_eigval,
                    ..
                } => Gating::Raw {
                    a: a.scalars(case),
                    b: b.scalars(case),
                    a_log: a_log.tensor([hv]).unwrap(),
                    dt_bias: has_bias.then(|| dt_bias.tensor([hv]).unwrap()),
                    allow_neg_eigval,
                },
                kind => Gating::Given {
                    g: (kind != GateKind::NoDecay).then(|| g.scalars(case)),
                    beta: (kind != GateKind::NoBeta).then(|| beta.scalars(case)),
                },
            },
            pool: StatePool {
                tensor: pool
                    .tensor_of_mut(
                        case.state_dtype,
                        [case.pool(), hv, rows, columns],
                        case.state_strides(),
                        0,
                    )
                    .unwrap(),
                layout: case.layout,
                slots: case.has_slots.then(|| (&read).into()),
                write_slots: case.moves.then(|| (&write).into()),
            },
            has_initial_state: Some((&has).into()),
            states: states.as_mut().map(|(buffer, dtype)| {
                let strides = deltawave::tensor::dense_strides(states_shape);
                let view = buffer.tensor_of_mut(*dtype, states_shape, strides, 0);
                view.unwrap()
            }),
            o: o.tokens_mut(case),
        };
        let plan = Decode::new(context, s, case.batch).unwrap();
        plan.launch(&stream, &tensors).unwrap();
    }
    // Outputs, gathered; what lies between them must be as it was.
    let mut bytes = o.buffer.download(&stream).unwrap();
    let run = s.heads.value_dim * s.dtype.size();
    let mut dense = Vec::with_capacity(case.rows() * hv * run);
    for i in 0..case.rows() * hv {
        let at = case.at(hv, s.heads.value_dim, i / hv, i % hv) * s.dtype.size();
        dense.extend_from_slice(&bytes[at..at + run]);
        bytes[at..at + run].fill(POISON);
    }
    assert!(
        bytes.iter().all(|b| *b == POISON),
        "written outside of o: {case:?}"
    );
    Output {
        o: HostTensor::from_bytes(s.dtype, dense),
        before,
        pool: pool.download(&stream).unwrap(),
        states: states.map(|(buffer, dtype)| {
            HostTensor::from_bytes(dtype, buffer.download(&stream).unwrap())
        }),
    }
}

/// Runs a case and compares it with the oracle.
#[track_caller]
pub fn check(context: &Context, case: &Case) {
    let data = Data::new(case);
    let output = run(context, case, &data);
    check_output(case, &data, &output);
}

/// What rounding the reference costs, and what sums in f32 may.
pub fn limit(reference: &[f64], dtype: Dtype) -> f64 {
    1.02 * rounding_ratio(reference, dtype) + 3e-6
}

#[track_caller]
pub fn check_output(case: &Case, data: &Data, output: &Output) {
    let s = &case.spec;
    let cu_seqlens: Vec<i32> = (0..=case.batch).map(|n| (n * s.tokens) as i32).collect();
    let has_initial = case.has_initial();
    let solution = oracle::prefill(&data.problem(case, &cu_seqlens, &has_initial)).unwrap();
    let (mut o, mut wanted_o) = (Vec::new(), Vec::new());
    let (mut state, mut wanted_state) = (Vec::new(), Vec::new());
    let of_sequence = s.tokens * s.heads.value * s.heads.value_dim;
    let each = s.heads.value * s.heads.key_dim * s.heads.value_dim;
    let mut pool = output.pool.clone();
    let mut before = output.before.clone();
    let slot_stride = case.state_strides()[0];
    for n in 0..case.batch {
        let rows = n * of_sequence..(n + 1) * of_sequence;
        if case.is_padding(n) {
            let zeros = output.o.values[rows].iter().all(|x| x.to_bits() == 0);
            assert!(zeros, "outputs of padding: {case:?}");
            continue;
        }
        o.extend_from_slice(&output.o.values[rows.clone()]);
        wanted_o.extend_from_slice(&solution.o[rows]);
        wanted_state.extend_from_slice(&solution.final_state[n * each..(n + 1) * each]);
        if case.states.is_none() {
            let first = case.write_slot(n) * slot_stride;
            take_state(case, &mut before, case.state_dtype, first);
            state.extend(take_state(case, &mut pool, case.state_dtype, first));
        }
    }
    assert!(
        pool == before,
        "written outside of the sequences' states: {case:?}"
    );
    let mut state_dtype = case.state_dtype;
    if let (Some(states), Some(dtype)) = (&output.states, case.states) {
        state_dtype = dtype;
        for (n, of_sequence) in states.values.chunks_exact(s.tokens * each).enumerate() {
            if case.is_padding(n) {
                let untouched = of_sequence.iter().all(|x| x.is_nan());
                assert!(untouched, "states of padding: {case:?}");
            } else {
                let last = &of_sequence[(s.tokens - 1) * each..];
                state.extend(
                    case.layout
                        .to_key_major(last, s.heads.key_dim, s.heads.value_dim),
                );
            }
        }
    }
    for (name, error, limit) in [
        ("o", compare(&o, &wanted_o), limit(&wanted_o, s.dtype)),
        (
            "state",
            compare(&state, &wanted_state),
            limit(&wanted_state, state_dtype),
        ),
    ] {
        assert!(
            error.rms_ratio <= limit,
            "{name}: {error:?}, limit {limit:.1e}: {case:?}"
        );
    }
}
