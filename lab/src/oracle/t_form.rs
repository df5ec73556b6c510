//! The T-form with the roundings of the fused kernels: the accuracy that they can reach.
//!
//! ```text
//! X  = beta (v - exp(G) (k [S]))
//! U  = X + [T - I] [X]
//! o  = [scale (exp(G) (q [S]) + [tril(P, -1)] [U] + diag(P) U)],  P = q k^T exp(G_i - G_j)
//! S  = exp(G_last) S + k^T [exp(G_last - G) U]
//! ```
//!
//! Values in brackets are rounded to the input dtype, as operands of 16-bit products. All else is f32.

use super::linalg::{Real, multiply, multiply_add, rounded, unit_lower_inverse};
use super::unfused::Chunk;

/// Computes one chunk of the T-form: advances `state`, returns the outputs.
pub(super) fn chunk<R: Real>(c: &Chunk<R>, state: &mut [R]) -> Vec<R> {
    let (n, kd, vd) = (c.len(), c.key_dim, c.value_dim);
    let round = |x: &[R]| rounded(x, c.dtype);
    let before = round(state);
    let ks = multiply(&c.k, &before, kd, vd);
    let x: Vec<R> = (0..n * vd)
        .map(|at| {
            let i = at / vd;
            c.beta[i] * (c.v[at] - c.decay_to(i) * ks[at])
        })
        .collect();

    let mut t = unit_lower_inverse(&c.key_products(), n);
    let mut p = c.query_products();
    let mut diagonal = Vec::with_capacity(n);
    for i in 0..n {
        t[i * n + i] = R::ZERO;
        diagonal.push(std::mem::replace(&mut p[i * n + i], R::ZERO));
    }
    let mut u = x.clone();
    multiply_add(&mut u, &round(&t), &round(&x), n, vd);

    let mut o = c.scale_rows(&multiply(&c.q, &before, kd, vd), |i| c.decay_to(i));
    multiply_add(&mut o, &round(&p), &round(&u), n, vd);
    for (o, pu) in o.iter_mut().zip(c.scale_rows(&u, |i| diagonal[i])) {
        *o = ((*o + pu) * c.scale).round(c.dtype);
    }

    let last = n - 1;
    c.advance(state, &round(&c.scale_rows(&u, |i| c.decay(last, i))));
    o
}
