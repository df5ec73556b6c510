//! The f64 reference of the kernels: the token recurrence and the layer preamble.
//!
//! [`prefill`] is the reference of every accuracy figure. Each value head has a state `S` of shape `[K, V]`:
//!
//! ```text
//! S   <- exp(g_t) * S
//! d_t  = beta_t * (v_t - S^T k_t)
//! S   <- S + k_t d_t^T
//! o_t  = scale * S^T q_t
//! ```
//!
//! [`unfused`] is the yardstick for errors: the kernel chain of public implementations, with its intermediates rounded
//! as they round them.
//!
//! Elementary functions come from `libm`, and nothing is contracted to FMA. Results have the same bits on every host.

mod backward;
pub mod conv;
pub mod conv_backward;
#[cfg(test)]
mod dual;
pub mod gate_backward;
pub mod gates;
pub mod layer;
pub mod layer_backward;
mod linalg;
pub mod norm;
pub mod norm_backward;
#[cfg(test)]
mod t_form;
#[cfg(test)]
mod tests;
mod unfused;

use std::ops::Range;

use rayon::prelude::*;

use deltawave::types::HeadMap;

pub use backward::{Gradients, Upstream, backward, unfused_backward};
pub use unfused::{CHUNK, unfused};

/// Source of the log gates of a prefill.
#[derive(Clone, Copy, Debug)]
pub enum Gate<'a> {
    /// No decay: `g = 0`.
    None,
    /// `g`, `[T, HV]`, natural logarithms, at most 0.
    Log(&'a [f32]),
    /// `g = -exp(a_log) * softplus(a + dt_bias)`.
    Raw {
        /// `[T, HV]`.
        a: &'a [f32],
        /// `[HV]`.
        a_log: &'a [f32],
        /// `[HV]`; absent is 0.
        dt_bias: Option<&'a [f32]>,
    },
}

/// Source of the write strengths of a prefill.
#[derive(Clone, Copy, Debug)]
pub enum Beta<'a> {
    /// `beta = 1`.
    One,
    /// `beta` itself, `[T, HV]`.
    Given(&'a [f32]),
    /// `beta = sigmoid(b)`, or `2 sigmoid(b)`.
    Logits {
        /// `[T, HV]`.
        b: &'a [f32],
        /// Doubles beta, so that the transition may have negative eigenvalues.
        allow_neg_eigval: bool,
    },
}

/// A prefill over a packed batch of sequences. All tensors are dense and token-major.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// Rows of the token tensors, `T`, including rows past the last sequence.
    pub tokens: usize,
    /// Key heads, `HK`.
    pub key_heads: usize,
    /// Value heads, `HV`, a multiple of `HK`.
    pub value_heads: usize,
    /// Width of a row of q and k, `K`.
    pub key_dim: usize,
    /// Width of a row of v, `V`.
    pub value_dim: usize,
    /// `[T, HK, K]`.
    pub q: &'a [f32],
    /// `[T, HK, K]`.
    pub k: &'a [f32],
    /// `[T, HV, V]`.
    pub v: &'a [f32],
    /// The log gates.
    pub gate: Gate<'a>,
    /// The write strengths.
    pub beta: Beta<'a>,
    /// Start of each sequence and end of the last, `[N + 1]`.
    pub cu_seqlens: &'a [i32],
    /// `[N, HV, K, V]`; absent is 0.
    pub initial_state: Option<&'a [f32]>,
    /// `[N]`: true if the sequence reads its initial state, false if it starts from 0; absent: all read it.
    pub has_initial_state: Option<&'a [bool]>,
    /// Factor of the output; absent is `K^-0.5`.
    pub scale: Option<f64>,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
    /// Whether rows of q and k are l2-normalised first: `x / sqrt(sum(x^2) + 1e-6)`.
    pub l2_norm: bool,
}

/// The outputs and states that a prefill computes.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// `[T, HV, V]`; rows past the last sequence are 0.
    pub o: Vec<f64>,
    /// States after the batch, `[N, HV, K, V]`. An empty sequence keeps its initial state.
    pub final_state: Vec<f64>,
}

/// Reason why a problem is not a valid prefill.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// The length of a tensor does not match its shape.
    #[error("{name} has {actual} elements, its shape {shape} has {expected}")]
    Length {
        /// The tensor.
        name: &'static str,
        /// Its shape, in symbols.
        shape: &'static str,
        /// Elements that the shape has.
        expected: usize,
        /// Elements that the tensor has.
        actual: usize,
    },
    /// A dimension is zero.
    #[error("{name} is 0, it must be at least 1")]
    Zero {
        /// The dimension.
        name: &'static str,
    },
    /// The value heads are not a multiple of the key heads.
    #[error("{value_heads} value heads are not a multiple of {key_heads} key heads")]
    Heads {
        /// `HK`.
        key_heads: usize,
        /// `HV`.
        value_heads: usize,
    },
    /// `cu_seqlens` has no entries.
    #[error("cu_seqlens is empty, its first entry must be 0")]
    NoCuSeqlens,
    /// `cu_seqlens` does not start at 0, decreases, or ends past the tokens.
    #[error("cu_seqlens[{index}] is {value}, it must be {allowed}")]
    CuSeqlens {
        /// Index of the entry.
        index: usize,
        /// Value of the entry.
        value: i64,
        /// Values that it may have.
        allowed: String,
    },
}

impl<'a> Problem<'a> {
    /// Number of sequences, `N`.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1)
    }

    /// Token rows of sequence `n`. `cu_seqlens` must be valid.
    pub fn rows(&self, n: usize) -> Range<usize> {
        self.cu_seqlens[n] as usize..self.cu_seqlens[n + 1] as usize
    }

    /// Factor of the output: `scale`, or its default.
    pub fn scale(&self) -> f64 {
        self.scale
            .unwrap_or_else(|| 1.0 / (self.key_dim as f64).sqrt())
    }

    /// Initial state of sequence `n` and `value_head`, `[K, V]`. `None` if it starts from 0.
    pub fn initial_state_of(&self, n: usize, value_head: usize) -> Option<&'a [f32]> {
        let size = self.key_dim * self.value_dim;
        let used = self.has_initial_state.is_none_or(|has| has[n]);
        self.initial_state
            .filter(|_| used)
            .map(|s| &s[(n * self.value_heads + value_head) * size..][..size])
    }

    /// Checks that every tensor has the length of its shape, and that dimensions, heads and `cu_seqlens` are valid.
    pub fn validate(&self) -> Result<(), ProblemError> {
        for (name, x) in [
            ("HK", self.key_heads),
            ("HV", self.value_heads),
            ("K", self.key_dim),
            ("V", self.value_dim),
        ] {
            if x == 0 {
                return Err(ProblemError::Zero { name });
            }
        }
        if !self.value_heads.is_multiple_of(self.key_heads) {
            return Err(ProblemError::Heads {
                key_heads: self.key_heads,
                value_heads: self.value_heads,
            });
        }
        validate_cu_seqlens(self.cu_seqlens, self.tokens)?;
        let (t, hk, hv) = (self.tokens, self.key_heads, self.value_heads);
        let n = self.sequences();
        let length = |name, shape, actual, dims: &[usize]| {
            let expected = dims.iter().fold(1, |a: usize, &b| a.saturating_mul(b));
            if expected == actual {
                Ok(())
            } else {
                Err(ProblemError::Length {
                    name,
                    shape,
                    expected,
                    actual,
                })
            }
        };
        length("q", "[T, HK, K]", self.q.len(), &[t, hk, self.key_dim])?;
        length("k", "[T, HK, K]", self.k.len(), &[t, hk, self.key_dim])?;
        length("v", "[T, HV, V]", self.v.len(), &[t, hv, self.value_dim])?;
        match self.gate {
            Gate::None => {}
            Gate::Log(g) => length("g", "[T, HV]", g.len(), &[t, hv])?,
            Gate::Raw { a, a_log, dt_bias } => {
                length("a", "[T, HV]", a.len(), &[t, hv])?;
                length("A_log", "[HV]", a_log.len(), &[hv])?;
                if let Some(dt_bias) = dt_bias {
                    length("dt_bias", "[HV]", dt_bias.len(), &[hv])?;
                }
            }
        }
        match self.beta {
            Beta::One => {}
            Beta::Given(beta) => length("beta", "[T, HV]", beta.len(), &[t, hv])?,
            Beta::Logits { b, .. } => length("b", "[T, HV]", b.len(), &[t, hv])?,
        }
        if let Some(s) = self.initial_state {
            length(
                "initial_state",
                "[N, HV, K, V]",
                s.len(),
                &[n, hv, self.key_dim, self.value_dim],
            )?;
        }
        if let Some(has) = self.has_initial_state {
            length("has_initial_state", "[N]", has.len(), &[n])?;
        }
        Ok(())
    }

    /// Computes the log gates, `[T, HV]`.
    pub fn log_gates(&self) -> Vec<f64> {
        match self.gate {
            Gate::None => vec![0.0; self.tokens * self.value_heads],
            Gate::Log(g) => g.iter().map(|&g| f64::from(g)).collect(),
            Gate::Raw { a, a_log, dt_bias } => (a.iter().enumerate())
                .map(|(i, &a)| {
                    let h = i % self.value_heads;
                    let bias = dt_bias.map_or(0.0, |b| f64::from(b[h]));
                    gates::log_gate(f64::from(a), f64::from(a_log[h]), bias)
                })
                .collect(),
        }
    }

    /// Computes the write strengths, `[T, HV]`.
    pub fn betas(&self) -> Vec<f64> {
        match self.beta {
            Beta::One => vec![1.0; self.tokens * self.value_heads],
            Beta::Given(beta) => beta.iter().map(|&b| f64::from(b)).collect(),
            Beta::Logits {
                b,
                allow_neg_eigval,
            } => b
                .iter()
                .map(|&b| gates::beta(f64::from(b), allow_neg_eigval))
                .collect(),
        }
    }

    /// Rows of q or k in f64, l2-normalised if `l2_norm`.
    fn rows_of(&self, x: &[f32]) -> Vec<f64> {
        let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        if self.l2_norm {
            for row in out.chunks_exact_mut(self.key_dim) {
                let factor = gates::l2_factor(row.iter().copied());
                row.iter_mut().for_each(|x| *x *= factor);
            }
        }
        out
    }

    /// Every pair (sequence, value head), sequences outermost.
    fn sequence_heads(&self) -> Vec<(usize, usize)> {
        (0..self.sequences())
            .flat_map(|n| (0..self.value_heads).map(move |h| (n, h)))
            .collect()
    }
}

/// Checks that `cu_seqlens` starts at 0, never decreases and ends at most at `tokens`.
pub fn validate_cu_seqlens(cu_seqlens: &[i32], tokens: usize) -> Result<(), ProblemError> {
    let error = |index, value: i32, allowed: String| {
        Err(ProblemError::CuSeqlens {
            index,
            value: i64::from(value),
            allowed,
        })
    };
    match cu_seqlens.first() {
        None => return Err(ProblemError::NoCuSeqlens),
        Some(&first) if first != 0 => return error(0, first, "0".to_owned()),
        _ => {}
    }
    for (i, w) in cu_seqlens.windows(2).enumerate() {
        if w[1] < w[0] {
            return error(i + 1, w[1], format!("at least its predecessor, {}", w[0]));
        }
    }
    let last = cu_seqlens[cu_seqlens.len() - 1];
    if last as usize > tokens {
        return error(
            cu_seqlens.len() - 1,
            last,
            format!("at most the {tokens} tokens"),
        );
    }
    Ok(())
}

/// Value columns that one task carries through a sequence. Columns of a state are independent, so a narrow slab of them
/// stays in the L1 cache from the first token to the last.
const COLUMNS: usize = 8;

/// Computes the token recurrence in f64: the reference.
pub fn prefill(problem: &Problem<'_>) -> Result<Solution, ProblemError> {
    problem.validate()?;
    let p = problem;
    let (q, k) = (p.rows_of(p.q), p.rows_of(p.k));
    let (g, beta) = (p.log_gates(), p.betas());
    let tasks: Vec<(usize, usize, usize)> = (p.sequence_heads().into_iter())
        .flat_map(|(n, h)| (0..p.value_dim).step_by(COLUMNS).map(move |c| (n, h, c)))
        .collect();
    let slabs: Vec<_> = tasks
        .par_iter()
        .map(|&(n, h, c)| scan(p, &q, &k, &g, &beta, n, h, c))
        .collect();

    let (hv, kd, vd) = (p.value_heads, p.key_dim, p.value_dim);
    let mut o = vec![0.0; p.tokens * hv * vd];
    let mut final_state = vec![0.0; p.sequences() * hv * kd * vd];
    for (&(n, h, c), (rows, state)) in tasks.iter().zip(&slabs) {
        let width = COLUMNS.min(vd - c);
        for (t, row) in p.rows(n).zip(rows) {
            o[(t * hv + h) * vd + c..][..width].copy_from_slice(&row[..width]);
        }
        for (i, row) in state.iter().enumerate() {
            final_state[((n * hv + h) * kd + i) * vd + c..][..width].copy_from_slice(&row[..width]);
        }
    }
    Ok(Solution { o, final_state })
}

type Slab = Vec<[f64; COLUMNS]>;

/// Carries up to `COLUMNS` columns of one state through its sequence, from `column` on. Returns the outputs and the
/// final state.
#[expect(
    clippy::too_many_arguments,
    reason = "the preamble's results, and which slab"
)]
fn scan(
    p: &Problem<'_>,
    q: &[f64],
    k: &[f64],
    g: &[f64],
    beta: &[f64],
    n: usize,
    head: usize,
    column: usize,
) -> (Slab, Slab) {
    let (hk, hv, kd, vd) = (p.key_heads, p.value_heads, p.key_dim, p.value_dim);
    let key_head = p.head_map.key_head(head, hk, hv);
    let width = COLUMNS.min(vd - column);
    let scale = p.scale();
    let mut state: Slab = vec![[0.0; COLUMNS]; kd];
    if let Some(initial) = p.initial_state_of(n, head) {
        for (row, from) in state.iter_mut().zip(initial.chunks_exact(vd)) {
            for (x, &s) in row.iter_mut().zip(&from[column..column + width]) {
                *x = f64::from(s);
            }
        }
    }
    let mut outputs = Vec::with_capacity(p.rows(n).len());
    for t in p.rows(n) {
        let k = &k[(t * hk + key_head) * kd..][..kd];
        let q = &q[(t * hk + key_head) * kd..][..kd];
        let decay = libm::exp(g[t * hv + head]);
        let mut read = [0.0; COLUMNS];
        for (&k, row) in k.iter().zip(&state) {
            for (r, s) in read.iter_mut().zip(row) {
                *r += k * s;
            }
        }
        let v = &p.v[(t * hv + head) * vd + column..][..width];
        let mut d = [0.0; COLUMNS];
        for ((d, &v), r) in d.iter_mut().zip(v).zip(&read) {
            *d = beta[t * hv + head] * (f64::from(v) - decay * r);
        }
        let mut out = [0.0; COLUMNS];
        for ((&k, &q), row) in k.iter().zip(q).zip(&mut state) {
            for ((s, d), o) in row.iter_mut().zip(&d).zip(&mut out) {
                *s = decay * *s + k * d;
                *o += q * *s;
            }
        }
        outputs.push(out.map(|o| scale * o));
    }
    (outputs, state)
}
