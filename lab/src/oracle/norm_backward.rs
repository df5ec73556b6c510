//! Gradients of the gated RMS norm, in f64.

use super::norm::NormProblem;
use super::{ProblemError, gates};

/// Gradients of a gated norm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NormGradients {
    /// `[rows, V]`.
    pub x: Vec<f64>,
    /// `[rows, V]`.
    pub z: Vec<f64>,
    /// `[V]`.
    pub weight: Vec<f64>,
}

/// Computes the gradients of a gated norm, from those of its outputs `[rows, V]`. With `n = x r` and `r` the factor of a row:
/// `dn = dy w gate(z)`, `dx = r (dn - n mean(n dn))`, `dz = dy w n gate'(z)`, `dw = sum dy n gate(z)`.
///
/// # Errors
/// A tensor whose length does not match its shape.
pub fn gated_norm_backward(
    p: &NormProblem<'_>,
    d_y: &[f32],
) -> Result<NormGradients, ProblemError> {
    p.validate()?;
    if d_y.len() != p.x.len() {
        return Err(ProblemError::Length {
            name: "d_y",
            shape: "[rows, V]",
            expected: p.x.len(),
            actual: d_y.len(),
        });
    }
    let dim = p.value_dim;
    let mut out = NormGradients {
        x: vec![0.0; p.x.len()],
        z: vec![0.0; p.x.len()],
        weight: vec![0.0; dim],
    };
    for row in 0..p.x.len() / dim {
        let own = row * dim..(row + 1) * dim;
        let x: Vec<f64> = p.x[own.clone()].iter().map(|x| f64::from(*x)).collect();
        let squares: f64 = x.iter().map(|x| x * x).sum();
        let factor = 1.0 / (squares / dim as f64 + p.eps).sqrt();
        let mut d_normed = vec![0.0; dim];
        for (i, at) in own.clone().enumerate() {
            let (z, d) = (f64::from(p.z[at]), f64::from(d_y[at]));
            let s = gates::sigmoid(z);
            let (gate, slope) = match (x[i] == 0.0 && !z.is_finite(), p.silu) {
                (true, _) => (0.0, 0.0),
                (_, true) => (z * s, s * (1.0 + z * gates::sigmoid(-z))),
                (_, false) => (s, s * gates::sigmoid(-z)),
            };
            let weight = p.weight.map_or(1.0, |w| f64::from(w[i]));
            d_normed[i] = d * weight * gate;
            out.z[at] = d * weight * x[i] * factor * slope;
            out.weight[i] += d * x[i] * factor * gate;
        }
        let pairs = x.iter().zip(&d_normed);
        let mean = pairs.map(|(x, d)| x * factor * d).sum::<f64>() / dim as f64;
        for (i, at) in own.enumerate() {
            out.x[at] = factor * (d_normed[i] - x[i] * factor * mean);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::dual::Dual;
    use super::*;
    use crate::inputs::random_normal;
    use deltawave::types::Dtype;

    /// `<d_y, y>`, and its derivative by one element of x (0), z (1) or the weight (2).
    fn derivative(p: &NormProblem<'_>, d_y: &[f32], which: usize, index: usize) -> f64 {
        let get = |name: usize, x: &[f32], i: usize| {
            Dual::of(f64::from(x[i]), name == which && i == index)
        };
        let mut loss = Dual(0.0, 0.0);
        for row in 0..p.x.len() / p.value_dim {
            let at = |i: usize| row * p.value_dim + i;
            let mut mean = Dual(p.eps, 0.0);
            for i in 0..p.value_dim {
                let x = get(0, p.x, at(i));
                mean = mean + x * x / Dual(p.value_dim as f64, 0.0);
            }
            for i in 0..p.value_dim {
                let z = get(1, p.z, at(i));
                let gate = match p.silu {
                    true => z * z.sigmoid(),
                    false => z.sigmoid(),
                };
                let weight = p.weight.map_or(Dual(1.0, 0.0), |w| get(2, w, i));
                let y = get(0, p.x, at(i)) / mean.sqrt() * weight * gate;
                loss = loss + Dual(f64::from(d_y[at(i)]), 0.0) * y;
            }
        }
        loss.1
    }

    #[test]
    fn gradients_are_the_derivatives_of_the_norm() {
        let draw = |name, n| random_normal(Dtype::F32, name, n, 5).values;
        let (mut x, z, d_y, weight) = (draw("x", 24), draw("z", 24), draw("dy", 24), draw("w", 6));
        x[6..12].fill(0.0);
        for (silu, weight) in [(true, Some(&weight[..])), (false, None)] {
            let p = NormProblem {
                value_dim: 6,
                x: &x,
                z: &z,
                weight,
                eps: 1e-3,
                silu,
            };
            let found = gated_norm_backward(&p, &d_y).unwrap();
            let all = [&found.x, &found.z, &found.weight];
            for (which, values) in all.into_iter().enumerate().take(2 + usize::from(silu)) {
                for (i, value) in values.iter().enumerate() {
                    let wanted = derivative(&p, &d_y, which, i);
                    assert!(
                        (value - wanted).abs() <= 1e-11,
                        "{which} {i}: {value}, {wanted}"
                    );
                }
            }
        }
    }
}
