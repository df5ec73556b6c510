//! Gradients of the convolution: sums of inputs in f32 as the outputs have them, everything after them in f64.

use super::conv::ConvProblem;
use super::{ProblemError, gates};

/// Gradients of a convolution.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ConvGradients {
    /// `[T, channels]`; rows of padding and past the last sequence are 0.
    pub x: Vec<f64>,
    /// `[channels, width]`.
    pub weight: Vec<f64>,
    /// `[channels]`, of a bias that may have been absent.
    pub bias: Vec<f64>,
    /// `[N, channels, columns]`, of states that may have been absent. 0 for sequences that do not read theirs.
    pub state: Vec<f64>,
}

/// Computes the gradients of a convolution from those of its outputs, `[T, channels]`, and of the states that it leaves, `[N,
/// channels, columns]`; absent is 0.
///
/// # Errors
/// A tensor whose length does not match its shape, or an invalid `cu_seqlens`.
pub fn conv_backward(
    p: &ConvProblem<'_>,
    d_y: &[f32],
    d_state: Option<&[f32]>,
) -> Result<ConvGradients, ProblemError> {
    p.validate()?;
    let (c, w, columns) = (p.channels, p.width, p.columns);
    let states = p.sequences() * c * columns;
    for (name, shape, actual, expected) in [
        ("d_y", "[T, channels]", Some(d_y.len()), p.tokens * c),
        (
            "d_state",
            "[N, channels, columns]",
            d_state.map(<[_]>::len),
            states,
        ),
    ] {
        if let Some(actual) = actual.filter(|actual| *actual != expected) {
            return Err(ProblemError::Length {
                name,
                shape,
                expected,
                actual,
            });
        }
    }
    let mut out = ConvGradients {
        x: vec![0.0; p.tokens * c],
        weight: vec![0.0; c * w],
        bias: vec![0.0; c],
        state: vec![0.0; states],
    };
    for n in 0..p.sequences() {
        if p.padding.is_some_and(|padding| padding[n]) {
            continue;
        }
        let (first, last) = (p.cu_seqlens[n] as usize, p.cu_seqlens[n + 1] as usize);
        let length = last - first;
        // The state's columns, then the tokens, of each channel; and their gradients.
        let row = columns + length;
        let mut d_row = vec![0.0; c * row];
        let at = |channel: usize, i: usize| match i < columns {
            true => f64::from(p.initial(n, channel, i)),
            false => f64::from(p.x[(first + i - columns) * c + channel]),
        };
        if let Some(d) = d_state {
            for channel in 0..c {
                for j in 0..columns {
                    d_row[channel * row + length + j] +=
                        f64::from(d[(n * c + channel) * columns + j]);
                }
            }
        }
        for t in 0..length {
            let token = (first + t) * c;
            let mut y = vec![0.0; c];
            let mut slope = vec![1.0; c];
            for channel in 0..c {
                // The outputs' own sum: a norm of rows near 0 divides its rounding by their length.
                let mut s = p.bias.map_or(0.0, |b| b[channel]);
                for j in 0..w {
                    let x = at(channel, columns + t + j + 1 - w) as f32;
                    s = p.weight[channel * w + j].mul_add(x, s);
                }
                let s = f64::from(s);
                y[channel] = s;
                if p.silu {
                    let open = gates::sigmoid(s);
                    y[channel] = s * open;
                    slope[channel] = open * (1.0 + s * gates::sigmoid(-s));
                }
            }
            let own = d_y[token..token + c].iter().map(|d| f64::from(*d));
            let mut d: Vec<f64> = own.collect();
            if let Some(norms) = p.norms {
                for from in (0..norms.channels).step_by(norms.dim) {
                    let (y, d) = (&y[from..from + norms.dim], &mut d[from..from + norms.dim]);
                    let r = gates::l2_factor(y.iter().copied());
                    let along: f64 = y.iter().zip(&*d).map(|(y, d)| y * r * d).sum();
                    for (y, d) in y.iter().zip(d) {
                        *d = r * (*d - y * r * along);
                    }
                }
            }
            for channel in 0..c {
                let ds = d[channel] * slope[channel];
                out.bias[channel] += ds;
                for j in 0..w {
                    let i = columns + t + j + 1 - w;
                    out.weight[channel * w + j] += ds * at(channel, i);
                    d_row[channel * row + i] += ds * f64::from(p.weight[channel * w + j]);
                }
            }
        }
        let starts = p.has_initial_state.is_none_or(|has| has[n]);
        for channel in 0..c {
            let d = &d_row[channel * row..(channel + 1) * row];
            if starts {
                let to = (n * c + channel) * columns;
                out.state[to..to + columns].copy_from_slice(&d[..columns]);
            }
            for t in 0..length {
                out.x[(first + t) * c + channel] = d[columns + t];
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::conv::RowNorms;
    use super::super::dual::Dual;
    use super::*;
    use crate::inputs::random_normal;
    use deltawave::types::Dtype;

    /// The derivative of `<d_y, y> + <d_state, state>` by one element of x (0), the weight (1), the bias (2) or the state
    /// (3).
    fn derivative(
        p: &ConvProblem<'_>,
        d_y: &[f32],
        d_state: &[f32],
        which: usize,
        index: usize,
    ) -> f64 {
        let get = |name: usize, x: &[f32], i: usize| {
            Dual::of(f64::from(x[i]), name == which && i == index)
        };
        let c = p.channels;
        let mut loss = Dual(0.0, 0.0);
        for n in 0..p.sequences() {
            let (first, last) = (p.cu_seqlens[n] as usize, p.cu_seqlens[n + 1] as usize);
            // x of a token, also before the sequence.
            let input = |t: isize, channel: usize| {
                if t >= first as isize {
                    return get(0, p.x, t as usize * c + channel);
                }
                let column = p.columns as isize + t - first as isize;
                let reads = p.has_initial_state.is_none_or(|has| has[n]);
                match p.state {
                    Some(state) if reads && column >= 0 => {
                        get(3, state, (n * c + channel) * p.columns + column as usize)
                    }
                    _ => Dual(0.0, 0.0),
                }
            };
            for t in first..last {
                let mut y: Vec<Dual> = (0..c)
                    .map(|channel| {
                        let mut s = p.bias.map_or(Dual(0.0, 0.0), |b| get(2, b, channel));
                        for back in 0..p.width {
                            let tap = get(1, p.weight, channel * p.width + p.width - 1 - back);
                            s = s + tap * input(t as isize - back as isize, channel);
                        }
                        if p.silu { s * s.sigmoid() } else { s }
                    })
                    .collect();
                if let Some(norms) = p.norms {
                    for row in y[..norms.channels].chunks_exact_mut(norms.dim) {
                        let start = Dual(gates::L2_EPSILON, 0.0);
                        let sum = row.iter().fold(start, |s, y| s + *y * *y);
                        row.iter_mut().for_each(|y| *y = *y / sum.sqrt());
                    }
                }
                for (channel, y) in y.into_iter().enumerate() {
                    loss = loss + Dual(d_y[t * c + channel].into(), 0.0) * y;
                }
            }
            for channel in 0..c {
                for column in 0..p.columns {
                    let d = d_state[(n * c + channel) * p.columns + column];
                    let t = last as isize - p.columns as isize + column as isize;
                    loss = loss + Dual(d.into(), 0.0) * input(t, channel);
                }
            }
        }
        loss.1
    }

    #[test]
    fn gradients_are_the_derivatives_of_the_convolution() {
        let (c, cu, tokens) = (5, [0, 1, 1, 3, 9], 11);
        let has = [true, true, false, true];
        for (width, columns, silu, norms, states) in [
            (4, 3, true, true, true),
            (3, 5, true, false, true),
            (2, 1, false, true, false),
        ] {
            // Multiples of 1/16, whose sums are the same in f32 and f64.
            let draw = |name, n| {
                let mut x = random_normal(Dtype::F32, name, n, 7).values;
                x.iter_mut().for_each(|x| *x = (*x * 16.0).round() / 16.0);
                x
            };
            let (x, weight, bias) = (draw("x", tokens * c), draw("w", c * width), draw("b", c));
            let (state, d_state) = (draw("s", 4 * c * columns), draw("ds", 4 * c * columns));
            let d_y = draw("dy", tokens * c);
            let p = ConvProblem {
                tokens,
                channels: c,
                width,
                x: &x,
                weight: &weight,
                bias: Some(&bias),
                silu,
                norms: norms.then_some(RowNorms {
                    channels: 4,
                    dim: 2,
                }),
                cu_seqlens: &cu,
                state: states.then_some(&state),
                columns,
                has_initial_state: states.then_some(&has),
                padding: None,
            };
            let found = conv_backward(&p, &d_y, Some(&d_state)).unwrap();
            let all = [&found.x, &found.weight, &found.bias, &found.state];
            let given = 3 + usize::from(states);
            for (which, values) in all.into_iter().enumerate().take(given) {
                for (i, value) in values.iter().enumerate() {
                    let wanted = derivative(&p, &d_y, &d_state, which, i);
                    let close = (value - wanted).abs() <= 1e-11;
                    assert!(close, "{width} {which} {i}: {value}, {wanted}");
                }
            }
            assert!(found.x[9 * c..].iter().all(|x| *x == 0.0));
        }
    }
}
