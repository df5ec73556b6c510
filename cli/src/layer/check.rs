//! A layer against the f64 layer, beside the chain of kernels that others use.

use deltawave::norm::OutputGate;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::{SMALL_SHAPE_SLACK, compare};
use deltawave_lab::oracle::layer::{LayerProblem, layer, unfused_layer};

use super::Workload;
use super::device::Output;
use crate::conv::wrong_states;
use crate::failure::Failure;
use crate::report::Verdict;
use crate::verdict::{Error, of_errors};

/// A state after a few tokens has no error to speak of in the chain of kernels either.
const LEAST_STATE_LIMIT: f64 = 1e-5;

impl Workload<'_> {
    pub(super) fn judge(&self, output: &Output) -> Result<Verdict, Failure> {
        let s = &self.spec;
        let (channels, values) = (s.conv().total_channels(), s.heads.value * s.heads.value_dim);
        let rows = self.projections.values.chunks_exact(channels + values);
        let (x, z): (Vec<_>, Vec<_>) = rows.map(|row| row.split_at(channels)).unzip();
        let [conv_state, state] = match &self.states {
            Some(states) => states.each_ref().map(|t| Some(&t.values[..])),
            None => [None; 2],
        };
        let problem = LayerProblem {
            dtype: s.dtype,
            tokens: self.tokens,
            key_heads: s.heads.key,
            value_heads: s.heads.value,
            key_dim: s.heads.key_dim,
            value_dim: s.heads.value_dim,
            width: s.width,
            x: &x.concat(),
            z: &z.concat(),
            a: &self.a.values,
            b: &self.b.values,
            conv_weight: &self.conv_weight.values,
            conv_bias: None,
            a_log: &self.a_log.values,
            dt_bias: Some(&self.dt_bias.values),
            norm_weight: Some(&self.norm_weight.values),
            allow_neg_eigval: s.allow_neg_eigval,
            l2_norm: s.qk_l2norm,
            head_map: s.heads.map,
            eps: s.eps.into(),
            silu: s.gate == OutputGate::Silu,
            cu_seqlens: &self.cu_seqlens,
            conv_state,
            state,
            has_initial_state: None,
            padding: None,
        };
        let (exact, chain) = (layer(&problem)?, unfused_layer(&problem)?);
        let rounded = |values: &[f64], dtype: Dtype| -> Vec<f32> {
            values.iter().map(|x| dtype.round(*x as f32)).collect()
        };
        let error = |found: &HostTensor, unfused: &[f64], exact: &[f64]| Error {
            ratio: compare(&found.values, exact).rms_ratio,
            limit: SMALL_SHAPE_SLACK * compare(&rounded(unfused, found.dtype), exact).rms_ratio,
        };
        // A sequence without tokens writes nothing: without a state to start from, its slot may hold anything.
        let mut found = output.state.values.clone();
        let size = values * s.heads.key_dim;
        for (n, ends) in self.cu_seqlens.windows(2).enumerate() {
            if ends[0] == ends[1] && self.states.is_none() {
                found[n * size..(n + 1) * size].fill(0.0);
            }
        }
        let found = HostTensor::new(output.state.dtype, found);
        let mut state = error(&found, &chain.state, &exact.state);
        state.limit = state.limit.max(LEAST_STATE_LIMIT);
        let y = error(&output.y, &chain.y, &exact.y);
        let conv_states = HostTensor::new(s.dtype, exact.conv_state);
        let wrong = wrong_states(&conv_states, &output.conv_state, &self.cu_seqlens);
        Ok(of_errors("y", y, state, Some(wrong)))
    }
}
