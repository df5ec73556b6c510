//! A layer's batch, and its tensors on the host.

use deltawave::layer::LayerSpec;
use deltawave::norm::OutputGate;
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::oracle::layer::LayerProblem;

use super::Output;

#[derive(Clone, Debug)]
pub struct Case {
    pub spec: LayerSpec,
    pub lengths: Vec<usize>,
    pub decodes: usize,
    /// Rows past the last sequence.
    pub tail: usize,
    /// Rows of the projections grouped by key head; else `q | k | v | z`.
    pub interleaved: bool,
    pub state_dtype: Dtype,
    pub value_major: bool,
    pub token_major: bool,
    pub has_slots: bool,
    /// Lengths are on the device alone: a `Layer`.
    pub device: bool,
    /// Which sequences have an initial state, and which are padding: bit n % 8.
    pub has_initial: u8,
    pub padding: u8,
    pub seed: u64,
}

impl Case {
    pub fn new(spec: LayerSpec, lengths: &[usize], decodes: usize) -> Self {
        Case {
            spec,
            lengths: lengths.to_vec(),
            decodes,
            tail: 0,
            interleaved: false,
            state_dtype: Dtype::F32,
            value_major: false,
            token_major: false,
            has_slots: true,
            device: false,
            has_initial: 0b1101_0101,
            padding: 0,
            seed: 1,
        }
    }

    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum::<usize>() + self.tail
    }

    pub fn cu_seqlens(&self) -> Vec<i32> {
        let ends = self.lengths.iter().scan(0, |end, n| {
            *end += *n as i32;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    pub fn layout(&self) -> StateLayout {
        match self.value_major {
            true => StateLayout::ValueMajor,
            false => StateLayout::KeyMajor,
        }
    }

    pub fn bits(&self, mask: u8) -> Vec<bool> {
        let all = 0..self.sequences();
        all.map(|n| mask >> (n % 8) & 1 == 1).collect()
    }

    pub fn has_initial(&self) -> Vec<bool> {
        self.bits(self.has_initial)
    }

    pub fn padding(&self) -> Vec<bool> {
        self.bits(if self.has_slots { self.padding } else { 0 })
    }

    /// Two slots for each sequence, so that half of them belong to nobody.
    pub fn pool(&self) -> usize {
        2 * self.sequences() + 1
    }

    pub fn slot(&self, n: usize) -> usize {
        match self.has_slots {
            true => 2 * (self.sequences() - n),
            false => n,
        }
    }

    pub fn channels(&self) -> usize {
        self.spec.conv().total_channels()
    }

    pub fn values(&self) -> usize {
        self.spec.heads.value * self.spec.heads.value_dim
    }

    pub fn columns(&self) -> usize {
        self.spec.width - 1
    }

    /// Numbers of a conv state, and of a recurrent one.
    pub fn sizes(&self) -> (usize, usize) {
        (
            self.channels() * self.columns(),
            self.values() * self.spec.heads.key_dim,
        )
    }

    /// Where channel `c` of (q, k, v, z) lies in a row of the projections.
    pub fn column(&self, c: usize) -> usize {
        if !self.interleaved {
            return c;
        }
        let s = &self.spec;
        let (keys, own) = (s.heads.key * s.heads.key_dim, self.values() / s.heads.key);
        let group = 2 * (s.heads.key_dim + own);
        let (size, offset, c) = match c {
            c if c < keys => (s.heads.key_dim, 0, c),
            c if c < 2 * keys => (s.heads.key_dim, s.heads.key_dim, c - keys),
            c if c < 2 * keys + self.values() => (own, 2 * s.heads.key_dim, c - 2 * keys),
            c => (own, 2 * s.heads.key_dim + own, c - 2 * keys - self.values()),
        };
        c / size * group + offset + c % size
    }
}

/// Inputs of a case, dense.
#[derive(Clone)]
pub struct Data {
    /// `[T, channels]`.
    pub x: HostTensor,
    /// `[T, HV, V]`.
    pub z: HostTensor,
    /// `[T, HV]`.
    pub a: HostTensor,
    pub b: HostTensor,
    pub conv_weight: HostTensor,
    pub conv_bias: HostTensor,
    pub a_log: HostTensor,
    pub dt_bias: HostTensor,
    pub norm_weight: HostTensor,
    /// `[N, channels, width - 1]`.
    pub conv_state: HostTensor,
    /// `[N, HV, K, V]`, of the pool's type.
    pub state: HostTensor,
}

impl Data {
    pub fn new(case: &Case) -> Self {
        let s = &case.spec;
        let (tokens, heads) = (case.tokens(), s.heads.value);
        let draw = |dtype, name, n| random_normal(dtype, name, n, case.seed);
        let (conv, state) = case.sizes();
        // Gates as models have them: A from 1 to 16, softplus(dt_bias) from 0.001 to 0.1.
        let a_log = (0..heads).map(|h| ((h % 16 + 1) as f32).ln());
        let dt_bias = (0..heads).map(|h| (0.001 * 100f32.powf(h as f32 / heads as f32)).ln());
        Data {
            x: draw(s.dtype, "x", tokens * case.channels()),
            z: draw(s.dtype, "z", tokens * case.values()),
            a: draw(s.dtype, "a", tokens * heads),
            b: draw(s.dtype, "b", tokens * heads),
            conv_weight: draw(s.dtype, "conv_weight", case.channels() * s.width),
            conv_bias: draw(Dtype::F32, "conv_bias", case.channels()),
            a_log: HostTensor::new(Dtype::F32, a_log.collect()),
            dt_bias: HostTensor::new(Dtype::F32, dt_bias.collect()),
            norm_weight: draw(Dtype::F32, "norm_weight", s.heads.value_dim),
            conv_state: draw(s.dtype, "conv_state", case.sequences() * conv),
            state: draw(case.state_dtype, "state", case.sequences() * state),
        }
    }

    /// The inputs of `case`, one sequence, whose tokens are these from row `first` on.
    pub fn rows(&self, case: &Case, first: usize) -> Self {
        let pick = |t: &HostTensor, row: usize| {
            let rows = first * row..(first + case.tokens()) * row;
            HostTensor::new(t.dtype, t.values[rows].to_vec())
        };
        let heads = case.spec.heads.value;
        Data {
            x: pick(&self.x, case.channels()),
            z: pick(&self.z, case.values()),
            a: pick(&self.a, heads),
            b: pick(&self.b, heads),
            ..self.clone()
        }
    }

    /// Starts each sequence where another run left it.
    pub fn go_on_from(&mut self, case: &Case, output: &Output) {
        let (conv, state) = case.sizes();
        let slots = (0..case.sequences()).map(|n| case.slot(n));
        let (mut convs, mut states) = (Vec::new(), Vec::new());
        for slot in slots {
            convs.extend_from_slice(&output.conv_states.values[slot * conv..][..conv]);
            states.extend_from_slice(&output.states.values[slot * state..][..state]);
        }
        self.conv_state = HostTensor::new(case.spec.dtype, convs);
        self.state = HostTensor::new(case.state_dtype, states);
    }

    pub fn problem<'a>(
        &'a self,
        case: &Case,
        cu_seqlens: &'a [i32],
        has_initial_state: &'a [bool],
        padding: &'a [bool],
    ) -> LayerProblem<'a> {
        let s = &case.spec;
        LayerProblem {
            dtype: s.dtype,
            tokens: case.tokens(),
            key_heads: s.heads.key,
            value_heads: s.heads.value,
            key_dim: s.heads.key_dim,
            value_dim: s.heads.value_dim,
            width: s.width,
            x: &self.x.values,
            z: &self.z.values,
            a: &self.a.values,
            b: &self.b.values,
            conv_weight: &self.conv_weight.values,
            conv_bias: Some(&self.conv_bias.values),
            a_log: &self.a_log.values,
            dt_bias: Some(&self.dt_bias.values),
            norm_weight: Some(&self.norm_weight.values),
            allow_neg_eigval: s.allow_neg_eigval,
            l2_norm: s.qk_l2norm,
            head_map: s.heads.map,
            eps: s.eps.into(),
            silu: s.gate == OutputGate::Silu,
            cu_seqlens,
            conv_state: Some(&self.conv_state.values),
            state: Some(&self.state.values),
            has_initial_state: Some(has_initial_state),
            padding: Some(padding),
        }
    }
}
