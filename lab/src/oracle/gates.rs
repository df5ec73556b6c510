//! The scalar functions of the layer preamble, in f64.

/// `ln(1 + exp(x))`, exact to f64 precision for any `x`: no threshold, and no cancellation for very negative `x`.
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

/// `1 / (1 + exp(-x))`, without overflow for any `x`.
pub fn sigmoid(x: f64) -> f64 {
    let e = libm::exp(-x.abs());
    let p = 1.0 / (1.0 + e);
    if x >= 0.0 { p } else { e * p }
}

/// The log gate `-exp(a_log) * softplus(a + dt_bias)`, at most 0.
pub fn log_gate(a: f64, a_log: f64, dt_bias: f64) -> f64 {
    -libm::exp(a_log) * softplus(a + dt_bias)
}

/// `sigmoid(b)`; `2 * sigmoid(b)` if `allow_neg_eigval`, so that the transition may have negative eigenvalues.
pub fn beta(b: f64, allow_neg_eigval: bool) -> f64 {
    sigmoid(b) * if allow_neg_eigval { 2.0 } else { 1.0 }
}

/// The l2 norm's factor for a row: `1 / sqrt(sum(x^2) + 1e-6)`.
pub fn l2_factor(row: impl Iterator<Item = f64>) -> f64 {
    1.0 / (row.map(|x| x * x).sum::<f64>() + L2_EPSILON).sqrt()
}

/// The term that the l2 norm adds to the sum of squares, inside the root.
pub const L2_EPSILON: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() <= 4e-16 * b.abs(), "{a:e} is not {b:e}");
    }

    #[test]
    fn softplus_is_exact_at_both_ends() {
        // For x << 0 softplus is exp(x) - exp(2x)/2; for x >> 0 it is x + exp(-x).
        for x in [-700.0, -100.0, -40.0, -20.0, -17.0] {
            let e = f64::exp(x);
            close(softplus(x), e - e * e / 2.0 + e * e * e / 3.0);
        }
        for x in [20.0, 40.0, 100.0, 1e4, 1e300] {
            close(softplus(x), x + f64::exp(-x));
        }
        close(softplus(0.0), std::f64::consts::LN_2);
        // softplus(x) - softplus(-x) = x
        for i in -400..=400 {
            let x = f64::from(i) / 10.0;
            assert!((softplus(x) - softplus(-x) - x).abs() <= 1e-14);
        }
        assert_eq!(softplus(f64::NEG_INFINITY), 0.0);
        assert!(softplus(f64::NAN).is_nan());
    }

    #[test]
    fn beta_stays_in_range() {
        for b in [-1e4, -700.0, -20.0, -1.0, 0.0, 1.0, 20.0, 700.0, 1e4] {
            assert!((0.0..=1.0).contains(&beta(b, false)));
            assert!((0.0..=2.0).contains(&beta(b, true)));
            close(sigmoid(b) + sigmoid(-b), 1.0);
        }
        assert_eq!(beta(0.0, true), 1.0);
        close(sigmoid(-40.0), f64::exp(-40.0));
        assert!(beta(f64::NAN, false).is_nan());
    }

    #[test]
    fn gates_never_grow() {
        close(log_gate(0.0, 0.0, 0.0), -std::f64::consts::LN_2);
        assert!(log_gate(3.0, f64::ln(16.0), 1.0) < -64.0);
        let weak = log_gate(-60.0, 0.0, 0.0);
        assert!(weak < 0.0 && weak > -1e-25);
        assert_eq!(log_gate(1.0, f64::NEG_INFINITY, 0.0), 0.0);
    }

    #[test]
    fn l2_factor_has_its_epsilon_inside_the_root() {
        assert_eq!(l2_factor([0.0; 4].into_iter()), 1.0 / L2_EPSILON.sqrt());
        close(
            l2_factor([3.0, 4.0].into_iter()),
            1.0 / (25.0f64 + 1e-6).sqrt(),
        );
    }
}
