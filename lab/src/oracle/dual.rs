//! Dual numbers: derivatives of the forward, in other words than the gradients that they check.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// A number and its derivative.
#[derive(Clone, Copy)]
pub struct Dual(pub f64, pub f64);
impl Add for Dual {
    type Output = Dual;
    fn add(self, y: Dual) -> Dual {
        Dual(self.0 + y.0, self.1 + y.1)
    }
}
impl Sub for Dual {
    type Output = Dual;
    fn sub(self, y: Dual) -> Dual {
        Dual(self.0 - y.0, self.1 - y.1)
    }
}
impl Mul for Dual {
    type Output = Dual;
    fn mul(self, y: Dual) -> Dual {
        Dual(self.0 * y.0, self.1 * y.0 + self.0 * y.1)
    }
}
impl Div for Dual {
    type Output = Dual;
    fn div(self, y: Dual) -> Dual {
        Dual(self.0 / y.0, (self.1 * y.0 - self.0 * y.1) / (y.0 * y.0))
    }
}
impl Neg for Dual {
    type Output = Dual;
    fn neg(self) -> Dual {
        Dual(-self.0, -self.1)
    }
}
impl Dual {
    /// A constant, or the number that the derivative is by.
    pub fn of(x: f64, varies: bool) -> Dual {
        Dual(x, f64::from(u8::from(varies)))
    }
    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(self) -> Dual {
        let one = Dual(1.0, 0.0);
        one / (one + (-self).exp())
    }
    pub fn exp(self) -> Dual {
        Dual(self.0.exp(), self.1 * self.0.exp())
    }
    pub fn ln(self) -> Dual {
        Dual(self.0.ln(), self.1 / self.0)
    }
    pub fn sqrt(self) -> Dual {
        Dual(self.0.sqrt(), self.1 / (2.0 * self.0.sqrt()))
    }
}
