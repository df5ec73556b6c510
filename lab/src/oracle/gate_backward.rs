//! Gradients of the gates, in f64.

use super::gates;

/// Inputs of gates over `HV` heads: a and b `[T, HV]`.
#[derive(Clone, Copy, Debug)]
pub struct GateProblem<'a> {
    /// Value heads.
    pub heads: usize,
    /// `[T, HV]`.
    pub a: &'a [f32],
    /// `[T, HV]`.
    pub b: &'a [f32],
    /// `[HV]`.
    pub a_log: &'a [f32],
    /// `[HV]`; absent is 0.
    pub dt_bias: Option<&'a [f32]>,
    /// Whether beta is doubled.
    pub allow_neg_eigval: bool,
}

/// Gradients of the gates' inputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GateGradients {
    /// `[T, HV]`.
    pub a: Vec<f64>,
    /// `[T, HV]`.
    pub b: Vec<f64>,
    /// `[HV]`.
    pub a_log: Vec<f64>,
    /// `[HV]`.
    pub dt_bias: Vec<f64>,
}

/// Computes gradients from those of g and beta, `[T, HV]` each. Where that of g is 0, so is that of a.
pub fn gate_backward(p: &GateProblem<'_>, d_g: &[f32], d_beta: &[f32]) -> GateGradients {
    let mut out = GateGradients {
        a_log: vec![0.0; p.heads],
        dt_bias: vec![0.0; p.heads],
        ..GateGradients::default()
    };
    let most = if p.allow_neg_eigval { 2.0 } else { 1.0 };
    for (i, (a, b)) in p.a.iter().zip(p.b).enumerate() {
        let h = i % p.heads;
        // The sum of a and its bias is one of f32.
        let sum = f64::from(a + p.dt_bias.map_or(0.0, |x| x[h]));
        let d = f64::from(d_g[i]);
        let rate = libm::exp(f64::from(p.a_log[h]));
        let [d_a, d_a_log] = match d == 0.0 {
            true => [0.0, 0.0],
            false => [
                -d * rate * gates::sigmoid(sum),
                -d * rate * gates::softplus(sum),
            ],
        };
        let b = f64::from(*b);
        out.a.push(d_a);
        out.b
            .push(f64::from(d_beta[i]) * most * gates::sigmoid(b) * gates::sigmoid(-b));
        out.a_log[h] += d_a_log;
        out.dt_bias[h] += d_a;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::dual::Dual;
    use super::*;

    #[test]
    fn gradients_are_the_derivatives_of_the_gates() {
        // Numbers whose sums are exact in f32.
        let (a, b) = ([0.5, -3.0, 2.0, -0.25], [1.0, -4.0, 0.0, 6.5]);
        let (a_log, dt_bias) = ([0.25, -1.5], [1.0, -2.0]);
        let (d_g, d_beta) = ([0.5, -1.0, 2.0, 0.75], [1.0, 3.0, -0.5, 2.0]);
        for allow_neg_eigval in [false, true] {
            let p = GateProblem {
                heads: 2,
                a: &a,
                b: &b,
                a_log: &a_log,
                dt_bias: Some(&dt_bias),
                allow_neg_eigval,
            };
            let found = gate_backward(&p, &d_g, &d_beta);
            let all = [&found.a, &found.b, &found.a_log, &found.dt_bias];
            for (which, values) in all.into_iter().enumerate() {
                for (index, value) in values.iter().enumerate() {
                    let get = |name: usize, x: &[f32], i: usize| {
                        Dual::of(f64::from(x[i]), name == which && i == index)
                    };
                    let (one, mut loss) = (Dual(1.0, 0.0), Dual(0.0, 0.0));
                    for i in 0..4 {
                        let sum = get(0, &a, i) + get(3, &dt_bias, i % 2);
                        let g = -(get(2, &a_log, i % 2).exp() * (one + sum.exp()).ln());
                        let most = Dual(if allow_neg_eigval { 2.0 } else { 1.0 }, 0.0);
                        let beta = most * get(1, &b, i).sigmoid();
                        loss = loss + Dual(d_g[i].into(), 0.0) * g;
                        loss = loss + Dual(d_beta[i].into(), 0.0) * beta;
                    }
                    assert!((value - loss.1).abs() <= 1e-12, "{which} {index}");
                }
            }
        }
    }

    #[test]
    fn a_gate_without_gradient_gives_none() {
        let p = GateProblem {
            heads: 1,
            a: &[1.0],
            b: &[0.0],
            a_log: &[1e30],
            dt_bias: None,
            allow_neg_eigval: false,
        };
        let found = gate_backward(&p, &[0.0], &[4.0]);
        assert_eq!((found.a[0], found.a_log[0], found.b[0]), (0.0, 0.0, 1.0));
    }
}
