//! The gated RMS norm in f64.

use rayon::prelude::*;

use super::{ProblemError, gates};

/// A gated RMS norm of rows. All tensors are dense.
#[derive(Clone, Copy, Debug)]
pub struct NormProblem<'a> {
    /// Numbers per row, `V`.
    pub value_dim: usize,
    /// Rows to normalise, `[rows, V]`.
    pub x: &'a [f32],
    /// Input of the output gate, `[rows, V]`.
    pub z: &'a [f32],
    /// `[V]`; absent is 1.
    pub weight: Option<&'a [f32]>,
    /// The term that is added to the mean of squares.
    pub eps: f64,
    /// Output gate: SiLU if true, the sigmoid if false.
    pub silu: bool,
}

impl NormProblem<'_> {
    pub(super) fn validate(&self) -> Result<(), ProblemError> {
        let p = self;
        if p.value_dim == 0 {
            return Err(ProblemError::Zero { name: "value_dim" });
        }
        let whole = p.x.len().next_multiple_of(p.value_dim);
        let given = [
            ("x", "[rows, V]", p.x.len(), whole),
            ("z", "[rows, V]", p.z.len(), whole),
            (
                "weight",
                "[V]",
                p.weight.map_or(p.value_dim, <[_]>::len),
                p.value_dim,
            ),
        ];
        for (name, shape, actual, expected) in given {
            if actual != expected {
                return Err(ProblemError::Length {
                    name,
                    shape,
                    expected,
                    actual,
                });
            }
        }
        Ok(())
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight * gate(z)` for each row, `[rows, V]`. An element is 0 where x is 0, whatever z
/// is.
///
/// # Errors
/// A tensor whose length does not match its shape.
pub fn gated_norm(p: &NormProblem<'_>) -> Result<Vec<f64>, ProblemError> {
    p.validate()?;
    let mut y = vec![0.0; p.x.len()];
    let rows = y.par_chunks_exact_mut(p.value_dim).enumerate();
    rows.for_each(|(row, y)| {
        let own = row * p.value_dim..(row + 1) * p.value_dim;
        let (x, z) = (&p.x[own.clone()], &p.z[own]);
        let squares: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let factor = 1.0 / (squares / p.value_dim as f64 + p.eps).sqrt();
        for (i, y) in y.iter_mut().enumerate() {
            let z = f64::from(z[i]);
            let gate = match x[i] == 0.0 && !z.is_finite() {
                true => 0.0,
                false => gates::sigmoid(z) * if p.silu { z } else { 1.0 },
            };
            let weight = p.weight.map_or(1.0, |w| f64::from(w[i]));
            *y = f64::from(x[i]) * factor * weight * gate;
        }
    });
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let problem = NormProblem {
            value_dim: 2,
            x: &[3.0, -4.0, 0.0, 0.0],
            z: &[0.0, 2.0, 1.0, 1.0],
            weight: Some(&[10.0, 2.0]),
            eps: 12.5,
            silu: true,
        };
        // mean of squares + eps = 25.
        let second = -0.8 * 2.0 * 2.0 / (1.0 + f64::exp(-2.0));
        let close = |x: &[f64], wanted: &[f64]| {
            let pairs = x.iter().zip(wanted);
            assert!(
                pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-14),
                "{x:?}"
            );
        };
        close(&gated_norm(&problem).unwrap(), &[0.0, second, 0.0, 0.0]);
        let sigmoid = NormProblem {
            silu: false,
            weight: None,
            ..problem
        };
        close(
            &gated_norm(&sigmoid).unwrap(),
            &[0.3, -0.8 / (1.0 + f64::exp(-2.0)), 0.0, 0.0],
        );
        let wrong = gated_norm(&NormProblem {
            weight: Some(&[1.0]),
            ..problem
        });
        assert!(matches!(
            wrong,
            Err(ProblemError::Length { name: "weight", .. })
        ));
    }
}
