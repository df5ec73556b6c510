//! The reference of the convolution: sums in f32 in the specified order, everything after them in f64, norms included.

use rayon::prelude::*;

use super::{ProblemError, gates, validate_cu_seqlens};

/// A convolution over a packed batch of sequences. All tensors are dense.
#[derive(Clone, Copy, Debug)]
pub struct ConvProblem<'a> {
    /// Rows of x, `T`, including rows past the last sequence.
    pub tokens: usize,
    /// Channels of a row of x.
    pub channels: usize,
    /// Taps: an output depends on `width` tokens.
    pub width: usize,
    /// `[T, channels]`.
    pub x: &'a [f32],
    /// `[channels, width]`; the newest token's tap is the last.
    pub weight: &'a [f32],
    /// `[channels]`; absent is 0.
    pub bias: Option<&'a [f32]>,
    /// Whether SiLU is applied to the sums.
    pub silu: bool,
    /// L2 norms of the rows of q and k, applied last; absent: no norms.
    pub norms: Option<RowNorms>,
    /// Start of each sequence and end of the last, `[N + 1]`.
    pub cu_seqlens: &'a [i32],
    /// States before the batch, `[N, channels, columns]`, the newest token last; `columns >= width - 1`; absent is 0.
    pub state: Option<&'a [f32]>,
    /// Columns of a state, at least `width - 1`.
    pub columns: usize,
    /// `[N]`: true if the sequence reads its state, false if it starts from 0; absent: all read it.
    pub has_initial_state: Option<&'a [bool]>,
    /// `[N]`: whether a sequence is padding; absent: none is.
    pub padding: Option<&'a [bool]>,
}

/// Channels that form rows with an l2 norm. A row is divided by `sqrt(sum of squares + 1e-6)`.
#[derive(Clone, Copy, Debug)]
pub struct RowNorms {
    /// Number of channels that are normalised, from channel 0 on.
    pub channels: usize,
    /// Channels of one row.
    pub dim: usize,
}

/// The outputs and states that a convolution computes.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvSolution {
    /// `[T, channels]`, not rounded; rows of padding and past the last sequence are 0.
    pub y: Vec<f64>,
    /// States after the batch, `[N, channels, columns]`. Padding and empty sequences keep their input state.
    pub state: Vec<f32>,
}

impl ConvProblem<'_> {
    /// Number of sequences, `N`.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1)
    }

    pub(super) fn validate(&self) -> Result<(), ProblemError> {
        for (name, x) in [("channels", self.channels), ("width", self.width)] {
            if x == 0 {
                return Err(ProblemError::Zero { name });
            }
        }
        if let Some(norms) = self.norms {
            let whole = norms.dim > 0 && norms.channels.is_multiple_of(norms.dim);
            let fits = whole && norms.channels <= self.channels;
            if !fits {
                return Err(ProblemError::Length {
                    name: "norms",
                    shape: "rows of the first channels",
                    expected: self.channels,
                    actual: norms.channels,
                });
            }
        }
        validate_cu_seqlens(self.cu_seqlens, self.tokens)?;
        let n = self.sequences();
        let given = [
            (
                "x",
                "[T, channels]",
                Some(self.x.len()),
                self.tokens * self.channels,
            ),
            (
                "weight",
                "[channels, width]",
                Some(self.weight.len()),
                self.channels * self.width,
            ),
            (
                "bias",
                "[channels]",
                self.bias.map(<[_]>::len),
                self.channels,
            ),
            (
                "state",
                "[N, channels, columns]",
                self.state.map(<[_]>::len),
                n * self.channels * self.columns,
            ),
            (
                "has_initial_state",
                "[N]",
                self.has_initial_state.map(<[_]>::len),
                n,
            ),
            ("padding", "[N]", self.padding.map(<[_]>::len), n),
        ];
        for (name, shape, actual, expected) in given {
            if let Some(actual) = actual.filter(|a| *a != expected) {
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

    /// State of sequence `n` before the batch, for one channel and column.
    pub(super) fn initial(&self, n: usize, channel: usize, column: usize) -> f32 {
        let used = self.has_initial_state.is_none_or(|has| has[n]);
        let at = (n * self.channels + channel) * self.columns + column;
        self.state.filter(|_| used).map_or(0.0, |s| s[at])
    }
}

/// Computes the convolution.
///
/// # Errors
/// A tensor whose length does not match its shape, or an invalid `cu_seqlens`.
pub fn conv(p: &ConvProblem<'_>) -> Result<ConvSolution, ProblemError> {
    p.validate()?;
    let mut y = vec![0.0; p.tokens * p.channels];
    let states = p.sequences() * p.channels * p.columns;
    let mut state = p.state.map_or_else(|| vec![0.0; states], <[f32]>::to_vec);
    for n in 0..p.sequences() {
        let (first, last) = (p.cu_seqlens[n] as usize, p.cu_seqlens[n + 1] as usize);
        if first == last || p.padding.is_some_and(|padding| padding[n]) {
            continue;
        }
        // The input `back` tokens before token `t` of the batch: from the sequence, else from its state, else 0.
        let input = |t: usize, back: usize, c: usize| {
            let own = t - first;
            if back <= own {
                p.x[(t - back) * p.channels + c]
            } else if back - own <= p.columns {
                p.initial(n, c, p.columns - (back - own))
            } else {
                0.0
            }
        };
        let rows = y[first * p.channels..last * p.channels].par_chunks_exact_mut(p.channels);
        rows.enumerate().for_each(|(row, out)| {
            for (c, out) in out.iter_mut().enumerate() {
                let mut sum = p.bias.map_or(0.0, |b| b[c]);
                for j in 0..p.width {
                    let x = input(first + row, p.width - 1 - j, c);
                    sum = p.weight[c * p.width + j].mul_add(x, sum);
                }
                let sum = f64::from(sum);
                *out = if p.silu {
                    sum * gates::sigmoid(sum)
                } else {
                    sum
                };
            }
            if let Some(norms) = p.norms {
                for row in out[..norms.channels].chunks_exact_mut(norms.dim) {
                    let factor = gates::l2_factor(row.iter().copied());
                    row.iter_mut().for_each(|y| *y *= factor);
                }
            }
        });
        for c in 0..p.channels {
            for column in 0..p.columns {
                let at = (n * p.channels + c) * p.columns + column;
                state[at] = input(last - 1, p.columns - 1 - column, c);
            }
        }
    }
    Ok(ConvSolution { y, state })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two channels, width 3, computed by hand.
    #[test]
    fn small_cases() {
        let problem = ConvProblem {
            tokens: 4,
            channels: 2,
            width: 3,
            x: &[1.0, 10.0, 2.0, 20.0, 4.0, 40.0, 8.0, 80.0],
            weight: &[1.0, 10.0, 100.0, 1.0, 0.0, 0.0],
            bias: Some(&[0.5, 0.0]),
            silu: false,
            norms: None,
            cu_seqlens: &[0, 3, 3, 4],
            state: Some(&[
                -1.0, -2.0, -3.0, -4.0, 5.0, 6.0, 7.0, 8.0, 3.0, 5.0, 7.0, 9.0,
            ]),
            columns: 2,
            has_initial_state: Some(&[true, true, false]),
            padding: None,
        };
        let solved = conv(&problem).unwrap();
        let channel = |c: usize| {
            solved
                .y
                .iter()
                .skip(c)
                .step_by(2)
                .copied()
                .collect::<Vec<_>>()
        };
        assert_eq!(channel(0), [79.5 - 0.0, 208.5, 421.5, 800.5]);
        assert_eq!(channel(1), [-3.0, -4.0, 10.0, 0.0]);
        let expected = [
            2.0, 4.0, 20.0, 40.0, 5.0, 6.0, 7.0, 8.0, 0.0, 8.0, 0.0, 80.0,
        ];
        assert_eq!(solved.state, expected);
        // A sequence shorter than the state keeps its newest part.
        let kept = conv(&ConvProblem {
            has_initial_state: None,
            ..problem
        });
        assert_eq!(kept.unwrap().state[8..], [5.0, 8.0, 9.0, 80.0]);
        let padded = conv(&ConvProblem {
            padding: Some(&[true, false, true]),
            ..problem
        })
        .unwrap();
        assert_eq!(padded.y, [0.0; 8]);
        assert_eq!(Some(&padded.state[..]), problem.state);
        let silu = conv(&ConvProblem {
            silu: true,
            ..problem
        })
        .unwrap();
        let expected = -3.0 / (1.0 + f64::exp(3.0));
        assert!((silu.y[1] - expected).abs() < 1e-15);
        // Two rows of one channel, then one of two.
        let [a, b] = [79.5, -3.0f64];
        for (dim, expected) in [(1, [1.0, -1.0]), (2, [a, b].map(|y| y / a.hypot(b)))] {
            let norms = Some(RowNorms { channels: 2, dim });
            let normed = conv(&ConvProblem { norms, ..problem }).unwrap();
            for (y, expected) in normed.y.iter().zip(expected) {
                assert!((y - expected).abs() < 1e-6, "{y} is not {expected}");
            }
        }
        let norms = Some(RowNorms {
            channels: 2,
            dim: 3,
        });
        let unequal = conv(&ConvProblem { norms, ..problem });
        assert!(matches!(
            unequal,
            Err(ProblemError::Length { name: "norms", .. })
        ));
        let wrong = conv(&ConvProblem {
            columns: 3,
            ..problem
        });
        assert!(matches!(
            wrong,
            Err(ProblemError::Length { name: "state", .. })
        ));
    }
}
