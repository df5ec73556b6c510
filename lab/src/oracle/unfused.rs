//! The unfused chunk form, rounded where public kernel chains round it.
//!
//! flash-linear-attention, and kernels derived from it, write intermediates to memory in the input dtype. Chunks have
//! 64 tokens. `G` is the inclusive sum of g within a chunk; `[x]` is x rounded to the input dtype:
//!
//! ```text
//! A     = strictly lower part of beta_i exp(G_i - G_j) (k_i . k_j)
//! T     = [(I + A)^-1]
//! w     = [T [beta exp(G) k]]          u = [T [beta v]]
//! v'    = u - w [S]
//! o     = [scale (exp(G) (q [S]) + [tril(q k^T exp(G_i - G_j))] [v'])]
//! S     = exp(G_last) S + k^T [exp(G_last - G) v']
//! ```
//!
//! Everything outside of brackets is f32: gates, the inverse, accumulators, the carried state. The order of summation
//! is the host's. Normalised q and k are rounded to the dtype, as a norm kernel ahead of the chain would round them.

use rayon::prelude::*;

use super::linalg::{Real, multiply, multiply_add, rounded, transposed, unit_lower_inverse};
use super::{Problem, ProblemError, Solution};
use deltawave::types::Dtype;

/// Tokens per chunk.
pub const CHUNK: usize = 64;

/// Computes the prefill as an unfused chain of kernels does, with inputs and outputs of `dtype`.
pub fn unfused(problem: &Problem<'_>, dtype: Dtype) -> Result<Solution, ProblemError> {
    run::<f32>(problem, dtype, chunk)
}

/// One chunk of one value head: row-major matrices with one row per token.
pub(super) struct Chunk<R> {
    pub dtype: Dtype,
    pub key_dim: usize,
    pub value_dim: usize,
    pub scale: R,
    /// `[C, K]`.
    pub q: Vec<R>,
    /// `[C, K]`.
    pub k: Vec<R>,
    /// `[C, V]`.
    pub v: Vec<R>,
    /// Inclusive sums of the log gates, `[C]`: `G`.
    pub gate_sum: Vec<R>,
    pub beta: Vec<R>,
}

impl<R: Real> Chunk<R> {
    /// Tokens in the chunk, `C`.
    pub fn len(&self) -> usize {
        self.beta.len()
    }

    /// Decay from token `j` to token `i`: `exp(G_i - G_j)`. Requires `j <= i`.
    pub fn decay(&self, i: usize, j: usize) -> R {
        (self.gate_sum[i] - self.gate_sum[j]).exp()
    }

    /// Decay from the start of the chunk to the end of token `i`: `exp(G_i)`.
    pub fn decay_to(&self, i: usize) -> R {
        self.gate_sum[i].exp()
    }

    /// Decay over the whole chunk: `exp(G_last)`.
    pub fn decay_over(&self) -> R {
        self.decay_to(self.len() - 1)
    }

    /// The strictly lower part of `beta_i exp(G_i - G_j) (k_i . k_j)`.
    pub fn key_products(&self) -> Vec<R> {
        let kk = multiply(
            &self.k,
            &transposed(&self.k, self.key_dim),
            self.key_dim,
            self.len(),
        );
        self.lower(&kk, |i, j, x| {
            if i > j {
                x * self.decay(i, j) * self.beta[i]
            } else {
                R::ZERO
            }
        })
    }

    /// `exp(G_i - G_j) (q_i . k_j)` on and below the diagonal.
    pub fn query_products(&self) -> Vec<R> {
        let qk = multiply(
            &self.q,
            &transposed(&self.k, self.key_dim),
            self.key_dim,
            self.len(),
        );
        self.lower(&qk, |i, j, x| {
            if i >= j {
                x * self.decay(i, j)
            } else {
                R::ZERO
            }
        })
    }

    fn lower(&self, x: &[R], f: impl Fn(usize, usize, R) -> R) -> Vec<R> {
        let n = self.len();
        (0..n * n).map(|at| f(at / n, at % n, x[at])).collect()
    }

    /// Multiplies row `i` of `x` by `factor(i)`.
    pub fn scale_rows(&self, x: &[R], factor: impl Fn(usize) -> R) -> Vec<R> {
        let columns = x.len() / self.len();
        let mut out = Vec::with_capacity(x.len());
        for (i, row) in x.chunks_exact(columns).enumerate() {
            let factor = factor(i);
            out.extend(row.iter().map(|&x| x * factor));
        }
        out
    }

    /// `S = exp(G_last) S + k^T update`, in place in `state`.
    pub fn advance(&self, state: &mut [R], update: &[R]) {
        let decay = self.decay_over();
        state.iter_mut().for_each(|s| *s = *s * decay);
        multiply_add(
            state,
            &transposed(&self.k, self.key_dim),
            update,
            self.len(),
            self.value_dim,
        );
    }
}

/// Runs a chunk form over every sequence and value head. `step` gets a chunk and the state `[K, V]` before it. It
/// leaves the state after the chunk there and returns the outputs `[C, V]`.
pub(super) fn run<R: Real>(
    problem: &Problem<'_>,
    dtype: Dtype,
    step: impl Fn(&Chunk<R>, &mut [R]) -> Vec<R> + Sync,
) -> Result<Solution, ProblemError> {
    problem.validate()?;
    let p = problem;
    let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
    let of = |x: Vec<f64>| x.into_iter().map(R::of).collect::<Vec<R>>();
    let (q, k) = (
        rounded(&of(p.rows_of(p.q)), dtype),
        rounded(&of(p.rows_of(p.k)), dtype),
    );
    let (g, beta) = (of(p.log_gates()), of(p.betas()));

    let tasks = p.sequence_heads();
    let results: Vec<(Vec<R>, Vec<R>)> = (tasks.par_iter())
        .map(|&(n, h)| {
            let key_head = p.head_map.key_head(h, hk, hv);
            let mut state = match p.initial_state_of(n, h) {
                Some(s) => s.iter().map(|&s| R::of(f64::from(s))).collect(),
                None => vec![R::ZERO; kd * vd],
            };
            let mut outputs = Vec::with_capacity(p.rows(n).len() * vd);
            for start in p.rows(n).step_by(CHUNK) {
                let rows = start..p.rows(n).end.min(start + CHUNK);
                let gather = |x: &[R], heads: usize, head: usize, dim: usize| {
                    rows.clone()
                        .flat_map(|t| x[(t * heads + head) * dim..][..dim].iter().copied())
                        .collect::<Vec<R>>()
                };
                let mut sum = R::ZERO;
                let chunk = Chunk {
                    dtype,
                    key_dim: kd,
                    value_dim: vd,
                    scale: R::of(p.scale()),
                    q: gather(&q, hk, key_head, kd),
                    k: gather(&k, hk, key_head, kd),
                    v: (rows.clone())
                        .flat_map(|t| {
                            p.v[(t * hv + h) * vd..][..vd]
                                .iter()
                                .map(|&v| R::of(f64::from(v)))
                        })
                        .collect(),
                    gate_sum: (rows.clone())
                        .map(|t| {
                            sum += g[t * hv + h];
                            sum
                        })
                        .collect(),
                    beta: gather(&beta, hv, h, 1),
                };
                outputs.extend(step(&chunk, &mut state));
            }
            (outputs, state)
        })
        .collect();

    let mut o = vec![0.0; p.tokens * hv * vd];
    let mut final_state = Vec::with_capacity(p.sequences() * hv * kd * vd);
    for (&(n, h), (outputs, state)) in tasks.iter().zip(results) {
        for (t, row) in p.rows(n).zip(outputs.chunks_exact(vd)) {
            for (o, x) in o[(t * hv + h) * vd..][..vd].iter_mut().zip(row) {
                *o = x.to_f64();
            }
        }
        final_state.extend(state.iter().map(|s| s.to_f64()));
    }
    Ok(Solution { o, final_state })
}

/// Computes one chunk of the unfused form: advances `state`, returns the outputs.
pub(super) fn chunk<R: Real>(c: &Chunk<R>, state: &mut [R]) -> Vec<R> {
    let (n, kd, vd) = (c.len(), c.key_dim, c.value_dim);
    let round = |x: &[R]| rounded(x, c.dtype);
    let t = round(&unit_lower_inverse(&c.key_products(), n));
    let w = round(&multiply(
        &t,
        &round(&c.scale_rows(&c.k, |i| c.beta[i] * c.decay_to(i))),
        n,
        kd,
    ));
    let u = round(&multiply(
        &t,
        &round(&c.scale_rows(&c.v, |i| c.beta[i])),
        n,
        vd,
    ));

    let before = round(state);
    let ws = multiply(&w, &before, kd, vd);
    let v_new: Vec<R> = u.iter().zip(&ws).map(|(&u, &ws)| u - ws).collect();

    let mut o = c.scale_rows(&multiply(&c.q, &before, kd, vd), |i| c.decay_to(i));
    multiply_add(&mut o, &round(&c.query_products()), &round(&v_new), n, vd);
    o.iter_mut()
        .for_each(|o| *o = (*o * c.scale).round(c.dtype));

    let last = n - 1;
    c.advance(state, &round(&c.scale_rows(&v_new, |i| c.decay(last, i))));
    o
}
