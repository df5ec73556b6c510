//! The f64 reference of the backward: the token recurrence in reverse.
//!
//! With `dS` the gradient of the state after a token, `S' = exp(g) S` the decayed state before it and `e = v - S'^T k`:
//!
//! ```text
//! dq     = scale S do                  dS  <- dS + scale q do^T
//! dd     = dS^T k                      dbeta = dd . e,  dv = beta dd
//! dk     = dS d - S' dv                dS' = dS - k dv^T
//! dg     = <dS', S'>                   dS  <- exp(g) dS'
//! ```
//!
//! [`unfused_backward`] is the yardstick for errors: FLA's chain of kernels, with its intermediates rounded as it rounds
//! them.

use rayon::prelude::*;

use super::linalg::{multiply, multiply_add, rounded, transposed, unit_lower_inverse};
use super::{Beta, CHUNK, Gate, Problem, ProblemError, gates};
use deltawave::types::Dtype;

/// The gradients of what a prefill returns.
#[derive(Clone, Copy, Debug)]
pub struct Upstream<'a> {
    /// `[T, HV, V]`.
    pub d_o: &'a [f32],
    /// `[N, HV, K, V]`; absent is 0.
    pub d_final: Option<&'a [f32]>,
}

/// The gradients of the inputs of a prefill. Rows past the last sequence are 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients {
    /// `[T, HK, K]`.
    pub q: Vec<f64>,
    /// `[T, HK, K]`.
    pub k: Vec<f64>,
    /// `[T, HV, V]`.
    pub v: Vec<f64>,
    /// Of g or, with [`Gate::Raw`], of a: `[T, HV]`.
    pub gate: Vec<f64>,
    /// Of beta or, with [`Beta::Logits`], of b: `[T, HV]`.
    pub beta: Vec<f64>,
    /// `[HV]`, with [`Gate::Raw`].
    pub a_log: Vec<f64>,
    /// `[HV]`, with [`Gate::Raw`].
    pub dt_bias: Vec<f64>,
    /// `[N, HV, K, V]`. 0 for sequences that do not read their initial state.
    pub initial_state: Vec<f64>,
}

impl Upstream<'_> {
    fn validate(&self, p: &Problem<'_>) -> Result<(), ProblemError> {
        let length = |name, shape, actual: usize, expected: usize| match expected == actual {
            true => Ok(()),
            false => Err(ProblemError::Length {
                name,
                shape,
                expected,
                actual,
            }),
        };
        let values = p.value_heads * p.value_dim;
        length("d_o", "[T, HV, V]", self.d_o.len(), p.tokens * values)?;
        let states = p.sequences() * values * p.key_dim;
        self.d_final.map_or(Ok(()), |d| {
            length("d_final", "[N, HV, K, V]", d.len(), states)
        })
    }
}

/// Gradients of one sequence and value head, with regard to normalised rows and to g and beta.
#[derive(Default)]
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    initial: Vec<f64>,
}

/// Value columns that one task carries through a sequence.
const COLUMNS: usize = 8;

/// Computes the gradients of a prefill in f64: the reference.
///
/// # Errors
/// A problem that is not valid, or gradients of the wrong length.
pub fn backward(problem: &Problem<'_>, upstream: &Upstream<'_>) -> Result<Gradients, ProblemError> {
    problem.validate()?;
    upstream.validate(problem)?;
    let p = problem;
    let (q, k) = (p.rows_of(p.q), p.rows_of(p.k));
    let (g, beta) = (p.log_gates(), p.betas());
    let heads = (p.sequence_heads().par_iter())
        .map(|&(n, h)| {
            let mut all = Head {
                v: vec![0.0; p.rows(n).len() * p.value_dim],
                initial: vec![0.0; p.key_dim * p.value_dim],
                ..Head::default()
            };
            for column in (0..p.value_dim).step_by(COLUMNS) {
                slab(p, upstream, &q, &k, &g, &beta, (n, h, column), &mut all);
            }
            all
        })
        .collect();
    Ok(collect(p, heads, |x, dim, d| norm_backward(p, x, dim, d)))
}

#[expect(
    clippy::too_many_arguments,
    reason = "the preamble's results, and which slab"
)]
fn slab(
    p: &Problem<'_>,
    upstream: &Upstream<'_>,
    q: &[f64],
    k: &[f64],
    g: &[f64],
    beta: &[f64],
    (n, h, column): (usize, usize, usize),
    out: &mut Head,
) {
    let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
    let key_head = p.head_map.key_head(h, hk, hv);
    let width = COLUMNS.min(vd - column);
    let rows = p.rows(n);
    let tokens = rows.len();
    let load = |from: &[f32]| {
        let mut state = vec![[0.0; COLUMNS]; kd];
        for (row, from) in state.iter_mut().zip(from.chunks_exact(vd)) {
            for (x, &s) in row.iter_mut().zip(&from[column..column + width]) {
                *x = f64::from(s);
            }
        }
        state
    };
    let row = |x: &[f32], t: usize| {
        let mut out = [0.0; COLUMNS];
        let from = &x[(t * hv + h) * vd + column..][..width];
        out.iter_mut()
            .zip(from)
            .for_each(|(o, x)| *o = f64::from(*x));
        out
    };
    out.q.resize(tokens * kd, 0.0);
    out.k.resize(tokens * kd, 0.0);
    out.g.resize(tokens, 0.0);
    out.beta.resize(tokens, 0.0);
    // S' and the update of every token.
    let mut state = match p.initial_state_of(n, h) {
        Some(s) => load(s),
        None => vec![[0.0; COLUMNS]; kd],
    };
    let mut before = Vec::with_capacity(tokens * kd);
    let mut errors = Vec::with_capacity(tokens);
    for t in rows.clone() {
        let k = &k[(t * hk + key_head) * kd..][..kd];
        let decay = libm::exp(g[t * hv + h]);
        let mut error = row(p.v, t);
        for (&k, s) in k.iter().zip(&mut state) {
            for (e, s) in error.iter_mut().zip(s) {
                *s *= decay;
                *e -= k * *s;
            }
        }
        before.extend_from_slice(&state);
        for (&k, s) in k.iter().zip(&mut state) {
            for (s, e) in s.iter_mut().zip(&error) {
                *s += k * beta[t * hv + h] * e;
            }
        }
        errors.push(error);
    }
    let size = kd * vd;
    let scale = p.scale();
    let mut d_state = match upstream.d_final {
        Some(d) => load(&d[(n * hv + h) * size..][..size]),
        None => vec![[0.0; COLUMNS]; kd],
    };
    for (i, t) in rows.enumerate().rev() {
        let q = &q[(t * hk + key_head) * kd..][..kd];
        let k = &k[(t * hk + key_head) * kd..][..kd];
        let before = &before[i * kd..][..kd];
        let (error, beta) = (&errors[i], beta[t * hv + h]);
        let d_o = row(upstream.d_o, t).map(|x| scale * x);
        let mut d_update = [0.0; COLUMNS];
        for (c, ds) in d_state.iter_mut().enumerate() {
            let mut dq = 0.0;
            for j in 0..COLUMNS {
                dq += (before[c][j] + k[c] * beta * error[j]) * d_o[j];
                ds[j] += q[c] * d_o[j];
                d_update[j] += ds[j] * k[c];
            }
            out.q[i * kd + c] += dq;
        }
        for j in 0..width {
            out.v[i * vd + column + j] = beta * d_update[j];
            out.beta[i] += d_update[j] * error[j];
        }
        let decay = libm::exp(g[t * hv + h]);
        for (c, ds) in d_state.iter_mut().enumerate() {
            let mut dk = 0.0;
            for j in 0..COLUMNS {
                dk += ds[j] * beta * error[j] - before[c][j] * beta * d_update[j];
                ds[j] -= k[c] * beta * d_update[j];
                out.g[i] += ds[j] * before[c][j];
                ds[j] *= decay;
            }
            out.k[i * kd + c] += dk;
        }
    }
    let starts = p.has_initial_state.is_none_or(|has| has[n]);
    for (to, ds) in out.initial.chunks_exact_mut(vd).zip(&d_state) {
        for (to, ds) in to[column..column + width].iter_mut().zip(ds) {
            *to = if starts { *ds } else { 0.0 };
        }
    }
}

/// Gradient of rows before the norm, from the gradient `d` of normalised rows.
fn norm_backward(p: &Problem<'_>, x: &[f32], dim: usize, d: &mut [f64]) {
    if !p.l2_norm {
        return;
    }
    for (x, d) in x.chunks_exact(dim).zip(d.chunks_exact_mut(dim)) {
        let r = gates::l2_factor(x.iter().map(|x| f64::from(*x)));
        let along: f64 = x.iter().zip(&*d).map(|(x, d)| f64::from(*x) * r * d).sum();
        for (x, d) in x.iter().zip(d) {
            *d = r * (*d - f64::from(*x) * r * along);
        }
    }
}

/// Sums over value heads, then `norm`, and gradients of raw gates.
fn collect(
    p: &Problem<'_>,
    heads: Vec<Head>,
    norm: impl Fn(&[f32], usize, &mut [f64]),
) -> Gradients {
    let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
    let mut out = Gradients {
        q: vec![0.0; p.tokens * hk * kd],
        k: vec![0.0; p.tokens * hk * kd],
        v: vec![0.0; p.tokens * hv * vd],
        gate: vec![0.0; p.tokens * hv],
        beta: vec![0.0; p.tokens * hv],
        ..Gradients::default()
    };
    for ((n, h), head) in p.sequence_heads().into_iter().zip(heads) {
        let key_head = p.head_map.key_head(h, hk, hv);
        for (i, t) in p.rows(n).enumerate() {
            for (to, from) in [(&mut out.q, &head.q), (&mut out.k, &head.k)] {
                let to = &mut to[(t * hk + key_head) * kd..][..kd];
                to.iter_mut()
                    .zip(&from[i * kd..][..kd])
                    .for_each(|(a, b)| *a += b);
            }
            out.v[(t * hv + h) * vd..][..vd].copy_from_slice(&head.v[i * vd..][..vd]);
            out.gate[t * hv + h] = head.g[i];
            out.beta[t * hv + h] = head.beta[i];
        }
        out.initial_state.extend(head.initial);
    }
    norm(p.q, kd, &mut out.q);
    norm(p.k, kd, &mut out.k);
    if let Gate::Raw { a, a_log, dt_bias } = p.gate {
        let g = p.log_gates();
        (out.a_log, out.dt_bias) = (vec![0.0; hv], vec![0.0; hv]);
        for (i, d) in out.gate.iter_mut().enumerate() {
            let h = i % hv;
            let z = f64::from(a[i]) + dt_bias.map_or(0.0, |b| f64::from(b[h]));
            if *d == 0.0 {
                continue; // exp(A_log) may be infinite
            }
            out.a_log[h] += *d * g[i];
            *d *= -libm::exp(f64::from(a_log[h])) * gates::sigmoid(z);
            out.dt_bias[h] += *d;
        }
    }
    if let Beta::Logits {
        allow_neg_eigval, ..
    } = p.beta
    {
        let most = if allow_neg_eigval { 2.0 } else { 1.0 };
        for (d, beta) in out.beta.iter_mut().zip(p.betas()) {
            *d *= beta * (1.0 - beta / most);
        }
    }
    out
}

/// Computes the gradients as FLA's chain of kernels does, with inputs of `dtype`: intermediates are rounded where it
/// stores or casts them. Gradients of q, k and v are rounded to `dtype`.
///
/// # Errors
/// As [`backward`].
pub fn unfused_backward(
    problem: &Problem<'_>,
    upstream: &Upstream<'_>,
    dtype: Dtype,
) -> Result<Gradients, ProblemError> {
    problem.validate()?;
    upstream.validate(problem)?;
    let p = problem;
    let heads = (p.sequence_heads().par_iter())
        .map(|&(n, h)| chain(p, upstream, dtype, n, h))
        .collect();
    Ok(collect(p, heads, |x, dim, d| {
        d.iter_mut()
            .for_each(|d| *d = f64::from(dtype.round(*d as f32)));
        norm_backward(p, x, dim, d);
        d.iter_mut()
            .for_each(|d| *d = f64::from(dtype.round(*d as f32)));
    }))
}

/// A chunk of FLA's forward, kept for its backward.
struct Kept {
    rows: std::ops::Range<usize>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sums: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
    a: Vec<f32>,
    w: Vec<f32>,
    v_new: Vec<f32>,
}

/// FLA's chain for one sequence and value head (`fla/ops/gated_delta_rule/chunk.py`).
fn chain(p: &Problem<'_>, upstream: &Upstream<'_>, dtype: Dtype, n: usize, h: usize) -> Head {
    let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
    let key_head = p.head_map.key_head(h, hk, hv);
    let scale = p.scale() as f32;
    let round = |x: &[f32]| rounded(x, dtype);
    let single = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect::<Vec<f32>>();
    let (q, k) = (
        round(&single(p.rows_of(p.q))),
        round(&single(p.rows_of(p.k))),
    );
    let (g, beta) = (single(p.log_gates()), single(p.betas()));
    let size = kd * vd;
    let mut state = p
        .initial_state_of(n, h)
        .map_or(vec![0.0; size], <[f32]>::to_vec);
    let scaled = |x: &[f32], columns: usize, f: &dyn Fn(usize) -> f32| -> Vec<f32> {
        x.iter()
            .enumerate()
            .map(|(i, x)| x * f(i / columns))
            .collect()
    };
    // Calls f(i, j, element) for the elements of a square matrix of `c` rows.
    let square = |x: &[f32], c: usize, f: &dyn Fn(usize, usize, f32) -> f32| -> Vec<f32> {
        x.iter()
            .enumerate()
            .map(|(at, x)| f(at / c, at % c, *x))
            .collect()
    };
    let minus = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<f32>>();
    let plus = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
    let row_dots = |a: &[f32], b: &[f32], columns: usize| -> Vec<f32> {
        let rows = a.chunks_exact(columns).zip(b.chunks_exact(columns));
        rows.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum())
            .collect()
    };
    let mut kept = Vec::new();
    for start in p.rows(n).step_by(CHUNK) {
        let rows = start..p.rows(n).end.min(start + CHUNK);
        let c = rows.len();
        let gather = |x: &[f32], heads: usize, head: usize, dim: usize| {
            rows.clone()
                .flat_map(|t| x[(t * heads + head) * dim..][..dim].iter().copied())
                .collect::<Vec<f32>>()
        };
        let (q, k) = (gather(&q, hk, key_head, kd), gather(&k, hk, key_head, kd));
        let (v, beta) = (gather(p.v, hv, h, vd), gather(&beta, hv, h, 1));
        let mut sum = 0.0;
        let sums: Vec<f32> = gather(&g, hv, h, 1)
            .into_iter()
            .map(|g| {
                sum += g;
                sum
            })
            .collect();
        let kk = multiply(&k, &transposed(&k, kd), kd, c);
        let lower = square(&kk, c, &|i, j, x| match i > j {
            true => beta[i] * libm::expf(sums[i] - sums[j]) * x,
            false => 0.0,
        });
        let a = round(&unit_lower_inverse(&lower, c));
        let kbg = round(&scaled(&k, kd, &|i| beta[i] * libm::expf(sums[i])));
        let w = round(&multiply(&a, &kbg, c, kd));
        let u = round(&multiply(&a, &round(&scaled(&v, vd, &|i| beta[i])), c, vd));
        let before = round(&state);
        let v_new = minus(&u, &multiply(&w, &before, kd, vd));
        let total = sums[c - 1];
        state.iter_mut().for_each(|s| *s *= libm::expf(total));
        let update = round(&scaled(&v_new, vd, &|i| libm::expf(total - sums[i])));
        multiply_add(&mut state, &transposed(&k, kd), &update, c, vd);
        kept.push(Kept {
            rows,
            q,
            k,
            v,
            sums,
            beta,
            state: before,
            a,
            w,
            v_new: round(&v_new),
        });
    }
    let mut d_state = match upstream.d_final {
        Some(d) => d[(n * hv + h) * size..][..size].to_vec(),
        None => vec![0.0; size],
    };
    let mut chunks = Vec::new();
    for x in kept.iter().rev() {
        let c = x.rows.len();
        let d_o: Vec<f32> = (x.rows.clone())
            .flat_map(|t| upstream.d_o[(t * hv + h) * vd..][..vd].iter().copied())
            .collect();
        let decay = |i: usize, j: usize| libm::expf(x.sums[i] - x.sums[j]);
        let to = |i: usize| libm::expf(x.sums[i]);
        let total = x.sums[c - 1];
        let after = round(&d_state);
        let qk = multiply(&x.q, &transposed(&x.k, kd), kd, c);
        let p_matrix = round(&square(&qk, c, &|i, j, y| match i >= j {
            true => decay(i, j) * scale * y,
            false => 0.0,
        }));
        let local = round(&multiply(&transposed(&p_matrix, c), &d_o, c, vd));
        let from_state = scaled(&multiply(&x.k, &after, kd, vd), vd, &|i| {
            libm::expf(total - x.sums[i])
        });
        let d_new32 = plus(&from_state, &local);
        let d_new = round(&d_new32);
        d_state.iter_mut().for_each(|s| *s *= libm::expf(total));
        let qg = round(&scaled(&x.q, kd, &|i| to(i)));
        let from_q = multiply(&transposed(&qg, kd), &d_o, c, vd);
        let from_w = multiply(&transposed(&x.w, kd), &d_new, c, vd);
        for ((s, a), b) in d_state.iter_mut().zip(&from_q).zip(&from_w) {
            *s += scale * a - b;
        }
        // chunk_bwd_kernel_dqkwg
        let ds = multiply(&d_o, &transposed(&x.v_new, vd), vd, c);
        let ds = round(&square(&ds, c, &|i, j, y| match i >= j {
            true => decay(i, j) * scale * y,
            false => 0.0,
        }));
        let q_part = scaled(
            &multiply(&d_o, &transposed(&x.state, vd), vd, kd),
            kd,
            &|i| to(i) * scale,
        );
        let k_part = scaled(
            &multiply(&x.v_new, &transposed(&after, vd), vd, kd),
            kd,
            &|i| libm::expf(total - x.sums[i]),
        );
        let dw: Vec<f32> = multiply(&d_new, &transposed(&x.state, vd), vd, kd)
            .iter()
            .map(|y| dtype.round(-y))
            .collect();
        let states: f32 = x.state.iter().zip(&after).map(|(a, b)| a * b).sum();
        let last: f32 =
            libm::expf(total) * states + row_dots(&k_part, &x.k, kd).iter().sum::<f32>();
        let dq = plus(&q_part, &multiply(&ds, &x.k, c, kd));
        let dk = plus(&k_part, &multiply(&transposed(&ds, c), &x.q, c, kd));
        let mut dg = minus(&row_dots(&dq, &x.q, kd), &row_dots(&dk, &x.k, kd));
        dg[c - 1] += last;
        let (dq, dk) = (round(&dq), round(&dk));
        // prepare_wy_repr_bwd_kernel
        let kbg = scaled(&x.k, kd, &|i| x.beta[i] * to(i));
        let mut da = multiply(&dw, &transposed(&round(&kbg), kd), kd, c);
        let vb = round(&scaled(&x.v, vd, &|i| x.beta[i]));
        multiply_add(&mut da, &d_new, &transposed(&vb, vd), vd, c);
        let at = transposed(&x.a, c);
        let d_kbg = multiply(&at, &dw, c, kd);
        let mut dk2 = scaled(&d_kbg, kd, &|i| to(i) * x.beta[i]);
        let mut db: Vec<f32> = (row_dots(&d_kbg, &x.k, kd).iter().enumerate())
            .map(|(i, y)| y * to(i))
            .collect();
        let mut dg2 = row_dots(&d_kbg, &kbg, kd);
        let d_vb = multiply(&at, &d_new, c, vd);
        let dv = round(&scaled(&d_vb, vd, &|i| x.beta[i]));
        db = plus(&db, &row_dots(&d_vb, &x.v, vd));
        let strict = |y: &[f32]| square(y, c, &|i, j, y| if i > j { y } else { 0.0 });
        let inner = round(&multiply(&round(&strict(&da)), &at, c, c));
        let da = multiply(&at, &inner, c, c);
        let da = round(&square(&da, c, &|i, j, y| match i > j {
            true => -y * decay(i, j),
            false => 0.0,
        }));
        let kk = multiply(&x.k, &transposed(&x.k, kd), kd, c);
        let d_kb = multiply(&da, &x.k, c, kd);
        db = plus(&db, &row_dots(&d_kb, &x.k, kd));
        dk2 = plus(&dk2, &scaled(&d_kb, kd, &|i| x.beta[i]));
        let kb = round(&scaled(&x.k, kd, &|i| x.beta[i]));
        dk2 = plus(&dk2, &multiply(&transposed(&da, c), &kb, c, kd));
        let pairs = square(&kk, c, &|i, j, y| da[i * c + j] * y * x.beta[i]);
        for i in 0..c {
            for j in 0..c {
                dg2[i] += pairs[i * c + j];
                dg2[j] -= pairs[i * c + j];
            }
        }
        let dk = round(&plus(&dk, &round(&dk2)));
        let mut sum = 0.0;
        let mut suffix = plus(&dg, &dg2);
        for y in suffix.iter_mut().rev() {
            sum += *y;
            *y = sum;
        }
        chunks.push((dq, dk, dv, suffix, db));
    }
    let starts = p.has_initial_state.is_none_or(|has| has[n]);
    let mut out = Head {
        initial: (d_state.iter())
            .map(|s| if starts { f64::from(*s) } else { 0.0 })
            .collect(),
        ..Head::default()
    };
    for (dq, dk, dv, dg, db) in chunks.into_iter().rev() {
        let wide = |to: &mut Vec<f64>, from: Vec<f32>| to.extend(from.into_iter().map(f64::from));
        wide(&mut out.q, dq);
        wide(&mut out.k, dk);
        wide(&mut out.v, dv);
        wide(&mut out.g, dg);
        wide(&mut out.beta, db);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::dual::Dual;
    use super::*;
    use crate::inputs::{GateInputs, Gates, InputSpec, Inputs, Keys, random_state};
    use crate::oracle::prefill;
    use deltawave::types::HeadMap;

    /// The inputs of a problem, in one list that a direction can follow.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Name {
        Q,
        K,
        V,
        Gate,
        Beta,
        ALog,
        DtBias,
        State,
    }

    /// `<d_o, o> + <d_final, final state>` and its derivative by one element of an input: the token recurrence in dual
    /// numbers, in other words than the oracle's.
    fn derivative(p: &Problem<'_>, up: &Upstream<'_>, name: Name, index: usize) -> f64 {
        let get = |which: Name, x: &[f32], i: usize| {
            let d = f64::from(u8::from(which == name && i == index));
            Dual(f64::from(x[i]), d)
        };
        let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
        let one = Dual(1.0, 0.0);
        let row = |which, x: &[f32], t: usize, head: usize| -> Vec<Dual> {
            let mut row: Vec<Dual> = (0..kd)
                .map(|i| get(which, x, (t * hk + head) * kd + i))
                .collect();
            if p.l2_norm {
                let sum = row
                    .iter()
                    .fold(Dual(gates::L2_EPSILON, 0.0), |s, x| s + *x * *x);
                row.iter_mut().for_each(|x| *x = *x / sum.sqrt());
            }
            row
        };
        let mut loss = Dual(0.0, 0.0);
        for n in 0..p.sequences() {
            for h in 0..hv {
                let head = p.head_map.key_head(h, hk, hv);
                let mut s = vec![Dual(0.0, 0.0); kd * vd];
                if p.initial_state_of(n, h).is_some() {
                    for (i, s) in s.iter_mut().enumerate() {
                        let all = p.initial_state.unwrap();
                        *s = get(Name::State, all, (n * hv + h) * kd * vd + i);
                    }
                }
                for t in p.rows(n) {
                    let at = t * hv + h;
                    let g = match p.gate {
                        Gate::None => Dual(0.0, 0.0),
                        Gate::Log(g) => get(Name::Gate, g, at),
                        Gate::Raw { a, a_log, dt_bias } => {
                            let bias = dt_bias.map_or(Dual(0.0, 0.0), |b| get(Name::DtBias, b, h));
                            let z = get(Name::Gate, a, at) + bias;
                            -(get(Name::ALog, a_log, h).exp() * (one + z.exp()).ln())
                        }
                    };
                    let beta = match p.beta {
                        Beta::One => one,
                        Beta::Given(b) => get(Name::Beta, b, at),
                        Beta::Logits {
                            b,
                            allow_neg_eigval,
                        } => {
                            let most = if allow_neg_eigval { 2.0 } else { 1.0 };
                            Dual(most, 0.0) / (one + (-get(Name::Beta, b, at)).exp())
                        }
                    };
                    let (q, k) = (row(Name::Q, p.q, t, head), row(Name::K, p.k, t, head));
                    for c in 0..vd {
                        let mut read = Dual(0.0, 0.0);
                        for i in 0..kd {
                            s[i * vd + c] = s[i * vd + c] * g.exp();
                            read = read + k[i] * s[i * vd + c];
                        }
                        let d = beta * (get(Name::V, p.v, at * vd + c) - read);
                        let mut o = Dual(0.0, 0.0);
                        for i in 0..kd {
                            s[i * vd + c] = s[i * vd + c] + k[i] * d;
                            o = o + q[i] * s[i * vd + c];
                        }
                        let weight = p.scale() * f64::from(up.d_o[at * vd + c]);
                        loss = loss + Dual(weight, 0.0) * o;
                    }
                }
                for (i, s) in s.iter().enumerate() {
                    let weight = up
                        .d_final
                        .map_or(0.0, |d| d[(n * hv + h) * kd * vd + i].into());
                    loss = loss + Dual(weight, 0.0) * *s;
                }
            }
        }
        loss.1
    }

    struct Made {
        inputs: Inputs,
        gates: GateInputs,
        state: Vec<f32>,
        d_o: Vec<f32>,
        d_final: Vec<f32>,
        cu: Vec<i32>,
    }

    fn make(heads: [usize; 2], dims: [usize; 2], cu: &[i32], padding: usize, seed: u64) -> Made {
        let spec = InputSpec {
            dtype: Dtype::F32,
            tokens: *cu.last().unwrap() as usize + padding,
            key_heads: heads[0],
            value_heads: heads[1],
            key_dim: dims[0],
            value_dim: dims[1],
            gates: Gates::Normal,
            keys: Keys::Normal,
            unit_rows: true,
            seed,
        };
        let states = (cu.len() - 1) * heads[1] * dims[0] * dims[1];
        Made {
            inputs: Inputs::new(spec),
            gates: GateInputs::new(spec),
            state: random_state(Dtype::F32, states, seed).values,
            d_o: random_state(Dtype::F32, spec.tokens * heads[1] * dims[1], seed + 1).values,
            d_final: random_state(Dtype::F32, states, seed + 2).values,
            cu: cu.to_vec(),
        }
    }

    impl Made {
        fn problem(&self) -> Problem<'_> {
            Problem {
                initial_state: Some(&self.state),
                ..self.inputs.problem(&self.cu)
            }
        }
        fn raw(&self, allow_neg_eigval: bool) -> Problem<'_> {
            Problem {
                gate: Gate::Raw {
                    a: &self.gates.a.values,
                    a_log: &self.gates.a_log,
                    dt_bias: Some(&self.gates.dt_bias),
                },
                beta: Beta::Logits {
                    b: &self.gates.b.values,
                    allow_neg_eigval,
                },
                l2_norm: true,
                ..self.problem()
            }
        }
        fn upstream(&self) -> Upstream<'_> {
            Upstream {
                d_o: &self.d_o,
                d_final: Some(&self.d_final),
            }
        }
    }

    fn check_derivatives(p: &Problem<'_>, up: &Upstream<'_>) {
        let d = backward(p, up).unwrap();
        for (name, values) in [
            (Name::Q, &d.q),
            (Name::K, &d.k),
            (Name::V, &d.v),
            (Name::Gate, &d.gate),
            (Name::Beta, &d.beta),
            (Name::ALog, &d.a_log),
            (Name::DtBias, &d.dt_bias),
            (Name::State, &d.initial_state),
        ] {
            let largest = values.iter().fold(1e-300f64, |m, x| m.max(x.abs()));
            for (i, found) in values.iter().enumerate() {
                let expected = derivative(p, up, name, i);
                assert!(
                    (found - expected).abs() <= 1e-12 * largest,
                    "{name:?}[{i}]: {found:e}, not {expected:e}"
                );
            }
        }
    }

    #[test]
    fn gradients_are_the_derivatives_of_the_recurrence() {
        let made = make([1, 2], [3, 2], &[0, 5, 5, 6, 13], 2, 1);
        check_derivatives(&made.problem(), &made.upstream());
        let has = [true, false, true, false];
        let some = Problem {
            has_initial_state: Some(&has),
            ..made.problem()
        };
        check_derivatives(&some, &made.upstream());
        let made = make([2, 4], [3, 10], &[0, 9, 11], 0, 2);
        let tiled = Problem {
            head_map: HeadMap::Tiled,
            ..made.raw(false)
        };
        check_derivatives(&tiled, &made.upstream());
        let made = make([2, 6], [2, 3], &[0, 7, 8], 0, 3);
        check_derivatives(&made.raw(true), &made.upstream());
    }

    #[test]
    fn edges_have_the_derivatives_of_the_recurrence() {
        let made = make([1, 2], [3, 2], &[0, 9], 0, 4);
        let (mut g, mut beta) = (made.inputs.g.clone(), made.inputs.beta.clone());
        (g[8], beta[4]) = (-745.0, 0.0);
        let p = Problem {
            gate: Gate::Log(&g),
            beta: Beta::Given(&beta),
            initial_state: None,
            ..made.problem()
        };
        let d = backward(&p, &made.upstream()).unwrap();
        assert_eq!(d.gate[8], 0.0, "an erased state has no gradient");
        assert!(d.gate[..2].iter().all(|x| *x == 0.0), "nothing to decay");
        let p = Problem {
            initial_state: Some(&made.state),
            ..p
        };
        check_derivatives(&p, &made.upstream());
        // A row of zeros under the norm.
        let mut k = made.inputs.k.values.clone();
        k[9..12].fill(0.0);
        let p = Problem {
            k: &k,
            ..made.raw(false)
        };
        check_derivatives(&p, &made.upstream());
    }

    #[test]
    fn what_goes_in_comes_out() {
        // Scaling the state and v scales outputs and the final state.
        let made = make([2, 4], [8, 6], &[0, 40, 41, 41, 130], 3, 5);
        let (p, up) = (made.problem(), made.upstream());
        let d = backward(&p, &up).unwrap();
        let forward = prefill(&p).unwrap();
        let dot =
            |a: &[f64], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum() };
        let inputs = dot(&d.v, p.v) + dot(&d.initial_state, &made.state);
        let outputs = dot(&forward.o, up.d_o) + dot(&forward.final_state, &made.d_final);
        assert!((inputs - outputs).abs() <= 1e-11 * outputs.abs().max(1.0));
    }

    #[test]
    fn the_unfused_chain_is_close_and_exact_without_roundings() {
        let made = make([1, 2], [16, 16], &[0, 100, 190], 0, 6);
        let up = made.upstream();
        for p in [made.problem(), made.raw(true)] {
            let exact = backward(&p, &up).unwrap();
            let ratio = |a: &[f64], b: &[f64]| {
                let error: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
                (error / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
            };
            for (dtype, limit) in [(Dtype::F32, 2e-5), (Dtype::Bf16, 3e-2)] {
                let chain = unfused_backward(&p, &up, dtype).unwrap();
                for (name, a, b) in [
                    ("q", &chain.q, &exact.q),
                    ("k", &chain.k, &exact.k),
                    ("v", &chain.v, &exact.v),
                    ("gate", &chain.gate, &exact.gate),
                    ("beta", &chain.beta, &exact.beta),
                    ("state", &chain.initial_state, &exact.initial_state),
                ] {
                    let found = ratio(a, b);
                    assert!(found <= limit, "{name}: {found:e} above {limit:e}, {dtype}");
                }
            }
        }
    }

    #[test]
    fn lengths_are_checked() {
        let made = make([1, 1], [2, 2], &[0, 3], 0, 7);
        let short = Upstream {
            d_o: &made.d_o[1..],
            d_final: None,
        };
        let error = backward(&made.problem(), &short).unwrap_err();
        assert_eq!(
            error.to_string(),
            "d_o has 5 elements, its shape [T, HV, V] has 6"
        );
    }
}
