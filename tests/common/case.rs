//! A case: what is run, its inputs on the host, and what a device made of them.

use deltawave::prefill::PrefillSpec;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{
    GateInputs, Gates, InputSpec, Inputs, Keys, Tensor as HostTensor, random_state,
};
use deltawave_lab::oracle::{Beta, Gate, Problem};

/// Where the lengths come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Entry {
    Packed,
    Dense,
    Device { wide: bool },
}

/// Where gates come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateKind {
    Given,
    NoDecay,
    NoBeta,
    Raw {
        dtype: Dtype,
        dt_bias: bool,
        allow_neg_eigval: bool,
    },
}

/// How tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// Dense.
    Dense,
    /// Rows padded, an offset in front: `(elements between heads, between tokens, in front)`.
    Padded(usize, usize, usize),
    /// `[H, T, D]` in memory.
    HeadMajor,
    /// A dense batch as `[T, B, H, D]` in memory.
    TokenMajor,
}

/// A state tensor's type and order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateKind {
    pub dtype: Dtype,
    pub layout: StateLayout,
    /// Elements between rows.
    pub pad: usize,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub spec: PrefillSpec,
    pub lengths: Vec<usize>,
    /// Rows past the last sequence.
    pub padding: usize,
    pub gates: Gates,
    pub keys: Keys,
    pub gate_kind: GateKind,
    pub layout: Layout,
    /// Elements between the sequences of a dense batch.
    pub batch_gap: usize,
    pub initial: Option<StateKind>,
    pub has_initial: Option<Vec<u8>>,
    pub final_state: Option<StateKind>,
    pub entry: Entry,
    pub seed: u64,
}

impl Case {
    pub fn new(spec: PrefillSpec, lengths: &[usize]) -> Self {
        Case {
            spec,
            lengths: lengths.to_vec(),
            padding: 0,
            gates: Gates::Normal,
            keys: Keys::Normal,
            gate_kind: GateKind::Given,
            layout: Layout::Dense,
            batch_gap: 0,
            initial: None,
            has_initial: None,
            final_state: Some(StateKind {
                dtype: Dtype::F32,
                layout: StateLayout::KeyMajor,
                pad: 0,
            }),
            entry: Entry::Packed,
            seed: 1,
        }
    }

    /// The case as a Rust expression in one line, to be put into a test.
    pub fn expression(&self) -> String {
        let s = &self.spec;
        let paths = |text: String| {
            text.replace("dtype: ", "dtype: Dtype::")
                .replace("layout: ", "layout: StateLayout::")
                .replace("Some(StateKind", "Some(common::StateKind")
        };
        let has = self.has_initial.as_ref();
        let has = has.map_or("None".to_owned(), |h| format!("Some(vec!{h:?})"));
        format!(
            "common::check(&common::context(), &Case {{ spec: PrefillSpec {{ head_map: HeadMap::{:?}, qk_l2norm: {}, \
             scale: {:?}, segments: {:?}, path: PrefillPath::{:?}, ..common::spec(Dtype::{:?}, {}, {}, {}, {}) }}, padding: {}, gates: Gates::{:?}, \
             keys: Keys::{:?}, gate_kind: GateKind::{}, layout: Layout::{:?}, batch_gap: {}, initial: {}, \
             has_initial: {has}, final_state: {}, entry: Entry::{:?}, seed: {}, \
             ..Case::new(common::spec(Dtype::Bf16, 1, 1, 16, 16), &{:?}) }});",
            s.heads.map,
            s.qk_l2norm,
            s.scale,
            s.segments,
            s.path,
            s.dtype,
            s.heads.key,
            s.heads.value,
            s.heads.key_dim,
            s.heads.value_dim,
            self.padding,
            self.gates,
            self.keys,
            paths(format!("{:?}", self.gate_kind)),
            self.layout,
            self.batch_gap,
            paths(format!("{:?}", self.initial)),
            paths(format!("{:?}", self.final_state)),
            self.entry,
            self.seed,
            self.lengths
        )
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum::<usize>() + self.padding
    }

    pub fn cu_seqlens(&self) -> Vec<i32> {
        let mut cu = vec![0];
        for n in &self.lengths {
            cu.push(cu.last().expect("not empty") + *n as i32);
        }
        cu
    }

    /// The host's side of it.
    pub fn data(&self) -> Data {
        let s = &self.spec;
        let input = InputSpec {
            dtype: s.dtype,
            tokens: self.tokens(),
            key_heads: s.heads.key,
            value_heads: s.heads.value,
            key_dim: s.heads.key_dim,
            value_dim: s.heads.value_dim,
            gates: self.gates,
            keys: self.keys,
            unit_rows: !s.qk_l2norm,
            seed: self.seed,
        };
        let gate_dtype = match self.gate_kind {
            GateKind::Raw { dtype, .. } => dtype,
            _ => s.dtype,
        };
        let states = self.lengths.len() * s.heads.value * s.heads.key_dim * s.heads.value_dim;
        Data {
            inputs: Inputs::new(input),
            gate_inputs: GateInputs::new(InputSpec {
                dtype: gate_dtype,
                ..input
            }),
            cu_seqlens: self.cu_seqlens(),
            initial: self
                .initial
                .map(|k| random_state(k.dtype, states, self.seed)),
            has: self
                .has_initial
                .as_ref()
                .map(|h| h.iter().map(|x| *x != 0).collect()),
        }
    }
}

pub struct Data {
    pub inputs: Inputs,
    pub gate_inputs: GateInputs,
    pub cu_seqlens: Vec<i32>,
    pub initial: Option<HostTensor>,
    pub has: Option<Vec<bool>>,
}

impl Data {
    pub fn problem(&self, case: &Case) -> Problem<'_> {
        let mut p = self.inputs.problem(&self.cu_seqlens);
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
        p.initial_state = self.initial.as_ref().map(|t| &t.values[..]);
        p.has_initial_state = self.has.as_deref();
        p.scale = case.spec.scale.map(f64::from);
        p.head_map = case.spec.heads.map;
        p
    }
}

/// What a device computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[T, HV, V]`.
    pub o: Vec<f32>,
    /// `[N, HV, K, V]`.
    pub state: Option<Vec<f32>>,
}

/// bf16 or fp16, grouped heads, the default scale.
pub fn spec(
    dtype: Dtype,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
) -> PrefillSpec {
    PrefillSpec {
        dtype,
        ..PrefillSpec::new(key_heads, value_heads, key_dim, value_dim)
    }
}

/// The shape of a state tensor of a case.
pub(super) fn state_shape(case: &Case, layout: StateLayout) -> [usize; 4] {
    let s = &case.spec;
    let n = case.lengths.len();
    match layout {
        StateLayout::KeyMajor => [n, s.heads.value, s.heads.key_dim, s.heads.value_dim],
        StateLayout::ValueMajor => [n, s.heads.value, s.heads.value_dim, s.heads.key_dim],
    }
}
