//! A Gated DeltaNet layer between its input and output projections: convolution, gates, recurrence, gated norm.
//!
//! Each stage is computed by that stage's own oracle. Stages hand their results over in the dtype of the activations,
//! so they are rounded in between: `q, k, v = [conv(x)]`, `o = [recurrence(q, k, v)]`, `y = norm(o, z)`, where `[x]` is
//! x rounded to the dtype. `y` is not rounded.

use super::conv::{ConvProblem, conv};
use super::norm::{NormProblem, gated_norm};
use super::{Beta, Gate, Problem, ProblemError, Solution, prefill, unfused};
use deltawave::types::{Dtype, HeadMap};

/// A layer over a packed batch of sequences. All tensors are dense.
#[derive(Clone, Copy, Debug)]
pub struct LayerProblem<'a> {
    /// The dtype of the activations.
    pub dtype: Dtype,
    /// Tokens, `T`.
    pub tokens: usize,
    /// Key heads, `HK`.
    pub key_heads: usize,
    /// Value heads, `HV`, a multiple of `HK`.
    pub value_heads: usize,
    /// Width of a row of q and k, `K`.
    pub key_dim: usize,
    /// Width of a row of v, `V`.
    pub value_dim: usize,
    /// Taps of the convolution: an output depends on `width` tokens.
    pub width: usize,
    /// Projections q, k and v side by side, `[T, 2 HK K + HV V]`.
    pub x: &'a [f32],
    /// Input of the output gate, `[T, HV, V]`.
    pub z: &'a [f32],
    /// Raw gate inputs, `[T, HV]`.
    pub a: &'a [f32],
    /// Logits of beta, `[T, HV]`.
    pub b: &'a [f32],
    /// `[channels, width]`.
    pub conv_weight: &'a [f32],
    /// `[channels]`; absent is 0.
    pub conv_bias: Option<&'a [f32]>,
    /// `[HV]`.
    pub a_log: &'a [f32],
    /// `[HV]`; absent is 0.
    pub dt_bias: Option<&'a [f32]>,
    /// `[V]`; absent is 1.
    pub norm_weight: Option<&'a [f32]>,
    /// Whether beta is `2 sigmoid(b)` instead of `sigmoid(b)`.
    pub allow_neg_eigval: bool,
    /// Whether rows of q and k are l2-normalised after the convolution.
    pub l2_norm: bool,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
    /// The term that the gated norm adds to the mean of squares.
    pub eps: f64,
    /// Output gate: SiLU if true, the sigmoid if false.
    pub silu: bool,
    /// Start of each sequence and end of the last, `[N + 1]`.
    pub cu_seqlens: &'a [i32],
    /// Conv states before the batch, `[N, channels, width - 1]`; absent is 0.
    pub conv_state: Option<&'a [f32]>,
    /// Recurrent states before the batch, `[N, HV, K, V]`; absent is 0.
    pub state: Option<&'a [f32]>,
    /// `[N]`: true if the sequence reads its states, false if it starts from 0; absent: all read them.
    pub has_initial_state: Option<&'a [bool]>,
    /// `[N]`: whether a sequence is padding; absent: none is.
    pub padding: Option<&'a [bool]>,
}

/// The outputs and states that a layer computes.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSolution {
    /// `[T, HV, V]`; rows of padding and past the last sequence are 0.
    pub y: Vec<f64>,
    /// Conv states after the batch, `[N, channels, width - 1]`. Padding and empty sequences keep their input state.
    pub conv_state: Vec<f32>,
    /// Recurrent states after the batch, `[N, HV, K, V]`. Entries of padding are unspecified.
    pub state: Vec<f64>,
}

/// Computes the layer with the f64 recurrence.
///
/// # Errors
/// A tensor whose length does not match its shape, or an invalid `cu_seqlens`.
pub fn layer(p: &LayerProblem<'_>) -> Result<LayerSolution, ProblemError> {
    layer_of(p, prefill)
}

/// Computes the layer with the unfused chunk form as its recurrence. Its errors are the yardstick for a layer's errors.
///
/// # Errors
/// The same as [`layer`].
pub fn unfused_layer(p: &LayerProblem<'_>) -> Result<LayerSolution, ProblemError> {
    layer_of(p, |problem| unfused(problem, p.dtype))
}

impl LayerProblem<'_> {
    /// The convolution of the layer.
    pub(super) fn conv(&self) -> ConvProblem<'_> {
        ConvProblem {
            tokens: self.tokens,
            channels: 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim,
            width: self.width,
            x: self.x,
            weight: self.conv_weight,
            bias: self.conv_bias,
            silu: true,
            norms: None,
            cu_seqlens: self.cu_seqlens,
            state: self.conv_state,
            columns: self.width.saturating_sub(1),
            has_initial_state: self.has_initial_state,
            padding: self.padding,
        }
    }

    /// q, k and v, rounded, and the conv states after the batch.
    pub(super) fn convolved(&self) -> Result<([Vec<f32>; 3], Vec<f32>), ProblemError> {
        let keys = self.key_heads * self.key_dim;
        let problem = self.conv();
        let convolved = conv(&problem)?;
        let rounded = |x: &f64| self.dtype.round(*x as f32);
        let part = |first: usize, last: usize| -> Vec<f32> {
            let rows = convolved.y.chunks_exact(problem.channels);
            rows.flat_map(|row| row[first..last].iter().map(rounded))
                .collect()
        };
        let parts = [
            part(0, keys),
            part(keys, 2 * keys),
            part(2 * keys, problem.channels),
        ];
        Ok((parts, convolved.state))
    }

    /// The recurrence of the layer, of its rounded q, k and v.
    pub(super) fn recurrence<'a>(&'a self, [q, k, v]: &'a [Vec<f32>; 3]) -> Problem<'a> {
        Problem {
            tokens: self.tokens,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            q,
            k,
            v,
            gate: Gate::Raw {
                a: self.a,
                a_log: self.a_log,
                dt_bias: self.dt_bias,
            },
            beta: Beta::Logits {
                b: self.b,
                allow_neg_eigval: self.allow_neg_eigval,
            },
            cu_seqlens: self.cu_seqlens,
            initial_state: self.state,
            has_initial_state: self.has_initial_state,
            scale: None,
            head_map: self.head_map,
            l2_norm: self.l2_norm,
        }
    }
}

fn layer_of(
    p: &LayerProblem<'_>,
    recurrence: impl Fn(&Problem<'_>) -> Result<Solution, ProblemError>,
) -> Result<LayerSolution, ProblemError> {
    let rounded = |x: &f64| p.dtype.round(*x as f32);
    let (parts, conv_state) = p.convolved()?;
    let Solution { o, final_state } = recurrence(&p.recurrence(&parts))?;
    let o: Vec<f32> = o.iter().map(rounded).collect();
    let y = gated_norm(&NormProblem {
        value_dim: p.value_dim,
        x: &o,
        z: p.z,
        weight: p.norm_weight,
        eps: p.eps,
        silu: p.silu,
    })?;
    Ok(LayerSolution {
        y,
        conv_state,
        state: final_state,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One head, one number wide, two tokens, computed by hand.
    #[test]
    fn by_hand() {
        let silu = |x: f64| x / (1.0 + f64::exp(-x));
        let problem = LayerProblem {
            dtype: Dtype::F32,
            tokens: 2,
            key_heads: 1,
            value_heads: 1,
            key_dim: 1,
            value_dim: 1,
            width: 2,
            x: &[1.0, 2.0, 3.0, 0.5, 0.25, -1.0],
            z: &[1.0, -2.0],
            a: &[0.0, 0.0],
            b: &[0.0, 0.0],
            // Channels q and k read the token before, channel v the token itself.
            conv_weight: &[0.0, 1.0, 0.0, 1.0, 1.0, 1.0],
            conv_bias: None,
            a_log: &[0.0],
            dt_bias: None,
            norm_weight: Some(&[3.0]),
            allow_neg_eigval: true,
            l2_norm: false,
            head_map: HeadMap::Grouped,
            eps: 1e-6,
            silu: true,
            cu_seqlens: &[0, 2],
            conv_state: None,
            state: None,
            has_initial_state: None,
            padding: None,
        };
        let solved = layer(&problem).unwrap();
        // beta is 1, and the gate is exp(-ln 2).
        let (k, v) = ([silu(2.0), silu(0.25)], [silu(3.0), silu(2.0)]);
        let first = k[0] * v[0];
        let second = 0.5 * first + k[1] * (v[1] - 0.5 * first * k[1]);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        close(solved.state[0], second);
        for (t, (state, q)) in [(first, silu(1.0)), (second, silu(0.5))]
            .into_iter()
            .enumerate()
        {
            let (o, z) = (state * q, f64::from(problem.z[t]));
            close(solved.y[t], o / (o * o + 1e-6).sqrt() * 3.0 * silu(z));
        }
        assert_eq!(solved.conv_state, [0.5, 0.25, -1.0]);
        let padded = layer(&LayerProblem {
            padding: Some(&[true]),
            ..problem
        });
        assert_eq!(padded.unwrap().y, [0.0, 0.0]);
        let unfused = unfused_layer(&problem).unwrap();
        close(unfused.y[1], solved.y[1]);
    }
}
