//! Gradients of a layer: those of its stages, one after the other. Stages of the forward hand their results over in the
//! type of the activations, and so the gradients are those at the rounded q, k, v and o.

use super::conv_backward::conv_backward;
use super::layer::LayerProblem;
use super::norm::NormProblem;
use super::norm_backward::gated_norm_backward;
use super::{Gradients, Problem, ProblemError, Upstream, backward, unfused_backward};

/// Gradients of what a layer returns.
#[derive(Clone, Copy, Debug)]
pub struct LayerUpstream<'a> {
    /// `[T, HV, V]`; rows past the last sequence do not count.
    pub d_y: &'a [f32],
    /// `[N, channels, width - 1]`; absent is 0.
    pub d_conv_state: Option<&'a [f32]>,
    /// `[N, HV, K, V]`; absent is 0.
    pub d_state: Option<&'a [f32]>,
}

/// Gradients of a layer's inputs, in the shapes of [`LayerProblem`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerGradients {
    /// `[T, channels]`.
    pub x: Vec<f64>,
    /// `[T, HV, V]`.
    pub z: Vec<f64>,
    /// `[T, HV]`.
    pub a: Vec<f64>,
    /// `[T, HV]`.
    pub b: Vec<f64>,
    /// `[channels, width]`.
    pub conv_weight: Vec<f64>,
    /// `[channels]`.
    pub conv_bias: Vec<f64>,
    /// `[HV]`.
    pub a_log: Vec<f64>,
    /// `[HV]`.
    pub dt_bias: Vec<f64>,
    /// `[V]`.
    pub norm_weight: Vec<f64>,
    /// `[N, channels, width - 1]`.
    pub conv_state: Vec<f64>,
    /// `[N, HV, K, V]`.
    pub state: Vec<f64>,
}

/// Computes the gradients in f64, from the o that the forward kept, `[T, HV, V]`.
///
/// # Errors
/// A tensor whose length does not match its shape, or an invalid `cu_seqlens`.
pub fn layer_backward(
    p: &LayerProblem<'_>,
    o: &[f32],
    upstream: &LayerUpstream<'_>,
) -> Result<LayerGradients, ProblemError> {
    stages(p, o, upstream, false, backward)
}

/// Computes the gradients as unfused kernels do: stages hand gradients on in the type of the activations, and the
/// recurrence's are those of FLA's chain. Its errors are the yardstick for a layer's errors.
///
/// # Errors
/// As [`layer_backward`].
pub fn unfused_layer_backward(
    p: &LayerProblem<'_>,
    o: &[f32],
    upstream: &LayerUpstream<'_>,
) -> Result<LayerGradients, ProblemError> {
    let recurrence =
        |problem: &Problem<'_>, up: &Upstream<'_>| unfused_backward(problem, up, p.dtype);
    stages(p, o, upstream, true, recurrence)
}

fn stages(
    p: &LayerProblem<'_>,
    o: &[f32],
    upstream: &LayerUpstream<'_>,
    rounds: bool,
    recurrence: impl Fn(&Problem<'_>, &Upstream<'_>) -> Result<Gradients, ProblemError>,
) -> Result<LayerGradients, ProblemError> {
    let handed_on = |x: &[f64]| -> Vec<f32> {
        let single = x.iter().map(|x| *x as f32);
        match rounds {
            true => single.map(|x| p.dtype.round(x)).collect(),
            false => single.collect(),
        }
    };
    let end = p.cu_seqlens.last().map_or(0, |end| *end as usize) * p.value_heads * p.value_dim;
    let within = |x: &[f32]| -> Vec<f32> {
        let mut x = x.to_vec();
        x.iter_mut().skip(end).for_each(|x| *x = 0.0);
        x
    };
    let (o, z, d_y) = (within(o), within(p.z), within(upstream.d_y));
    let norm = gated_norm_backward(
        &NormProblem {
            value_dim: p.value_dim,
            x: &o,
            z: &z,
            weight: p.norm_weight,
            eps: p.eps,
            silu: p.silu,
        },
        &d_y,
    )?;
    let (parts, _) = p.convolved()?;
    let d_o = handed_on(&norm.x);
    let of_recurrence = recurrence(
        &p.recurrence(&parts),
        &Upstream {
            d_o: &d_o,
            d_final: upstream.d_state,
        },
    )?;
    let problem = p.conv();
    let mut d_convolved = vec![0.0; p.tokens * problem.channels];
    let keys = p.key_heads * p.key_dim;
    let of_parts = [
        (0, keys, &of_recurrence.q),
        (keys, keys, &of_recurrence.k),
        (2 * keys, p.value_heads * p.value_dim, &of_recurrence.v),
    ];
    for (first, row, values) in of_parts {
        for (t, row) in handed_on(values).chunks_exact(row.max(1)).enumerate() {
            d_convolved[t * problem.channels + first..][..row.len()].copy_from_slice(row);
        }
    }
    let conv = conv_backward(&problem, &d_convolved, upstream.d_conv_state)?;
    Ok(LayerGradients {
        x: conv.x,
        z: norm.z,
        a: of_recurrence.gate,
        b: of_recurrence.beta,
        conv_weight: conv.weight,
        conv_bias: conv.bias,
        a_log: of_recurrence.a_log,
        dt_bias: of_recurrence.dt_bias,
        norm_weight: norm.weight,
        conv_state: conv.state,
        state: of_recurrence.initial_state,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::random_normal;
    use crate::oracle::layer::layer;
    use crate::oracle::{Solution, prefill};
    use deltawave::types::{Dtype, HeadMap};

    /// Differences of the layer in f64 along each input.
    #[test]
    fn gradients_are_the_differences_of_the_layer() {
        let (hk, hv, k, v, width, tokens) = (1, 2, 3, 2, 3, 7);
        let channels = 2 * hk * k + hv * v;
        let draw = |name, n| random_normal(Dtype::F32, name, n, 9).values;
        let cu_seqlens = [0, 2, 6];
        let inputs = [
            draw("x", tokens * channels),
            draw("z", tokens * hv * v),
            draw("a", tokens * hv),
            draw("b", tokens * hv),
            draw("w", channels * width),
            draw("bias", channels),
            draw("a_log", hv),
            draw("dt", hv),
            draw("norm", v),
            draw("cs", 2 * channels * (width - 1)),
            draw("s", 2 * hv * k * v),
        ];
        let problem = |inputs: &[Vec<f32>; 11], solve: &mut dyn FnMut(&LayerProblem<'_>)| {
            let [
                x,
                z,
                a,
                b,
                conv_weight,
                bias,
                a_log,
                dt,
                norm,
                conv_state,
                state,
            ] = inputs;
            solve(&LayerProblem {
                dtype: Dtype::F32,
                tokens,
                key_heads: hk,
                value_heads: hv,
                key_dim: k,
                value_dim: v,
                width,
                x,
                z,
                a,
                b,
                conv_weight,
                conv_bias: Some(bias),
                a_log,
                dt_bias: Some(dt),
                norm_weight: Some(norm),
                allow_neg_eigval: true,
                l2_norm: true,
                head_map: HeadMap::Grouped,
                eps: 1e-2,
                silu: true,
                cu_seqlens: &cu_seqlens,
                conv_state: Some(conv_state),
                state: Some(state),
                has_initial_state: None,
                padding: None,
            });
        };
        let (d_y, d_conv) = (draw("dy", tokens * hv * v), draw("dcs", inputs[9].len()));
        let d_state = draw("ds", inputs[10].len());
        let loss = |inputs: &[Vec<f32>; 11]| {
            let mut loss = 0.0;
            problem(inputs, &mut |p| {
                let solved = layer(p).unwrap();
                let dot = |a: &[f32], b: &mut dyn Iterator<Item = f64>| -> f64 {
                    a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum()
                };
                loss = dot(&d_y, &mut solved.y.iter().copied())
                    + dot(
                        &d_conv,
                        &mut solved.conv_state.iter().map(|x| f64::from(*x)),
                    )
                    + dot(&d_state, &mut solved.state.iter().copied());
            });
            loss
        };
        let mut found = LayerGradients::default();
        problem(&inputs, &mut |p| {
            let (parts, _) = p.convolved().unwrap();
            let Solution { o, .. } = prefill(&p.recurrence(&parts)).unwrap();
            let o: Vec<f32> = o.iter().map(|x| *x as f32).collect();
            let upstream = LayerUpstream {
                d_y: &d_y,
                d_conv_state: Some(&d_conv),
                d_state: Some(&d_state),
            };
            found = layer_backward(p, &o, &upstream).unwrap();
            let unfused = unfused_layer_backward(p, &o, &upstream).unwrap();
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * (1.0 + a.abs());
            assert!(unfused.x.iter().zip(&found.x).all(close));
        });
        let all = [
            &found.x,
            &found.z,
            &found.a,
            &found.b,
            &found.conv_weight,
            &found.conv_bias,
            &found.a_log,
            &found.dt_bias,
            &found.norm_weight,
            &found.conv_state,
            &found.state,
        ];
        let step = 1.0 / 256.0;
        for (which, values) in all.into_iter().enumerate() {
            for (i, value) in values.iter().enumerate() {
                let at = |by: f32| {
                    let mut inputs = inputs.clone();
                    inputs[which][i] += by;
                    (loss(&inputs), f64::from(inputs[which][i]))
                };
                // The step is doubled, too: the error of second order drops out.
                let slope = |by: f32| {
                    let ((more, high), (less, low)) = (at(by), at(-by));
                    (more - less) / (high - low)
                };
                let wanted = (4.0 * slope(step) - slope(2.0 * step)) / 3.0;
                let limit = 2e-3 * (1.0 + wanted.abs());
                assert!(
                    (value - wanted).abs() <= limit,
                    "{which} {i}: {value} {wanted}"
                );
            }
        }
    }
}
