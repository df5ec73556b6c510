//! Small dense products in f32 or f64, row-major.

use std::ops::{Add, AddAssign, Mul, Sub};

use deltawave::types::Dtype;

/// The arithmetic of an emulation: f32 as on the device, or f64 to check a formula without roundings.
pub(crate) trait Real:
    Copy + Send + Sync + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + AddAssign
{
    const ZERO: Self;
    const ONE: Self;
    fn of(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    /// Rounds to `dtype`; `F32` keeps the value.
    fn round(self, dtype: Dtype) -> Self;
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn exp(self) -> f32 {
        libm::expf(self)
    }
    #[inline]
    fn round(self, dtype: Dtype) -> f32 {
        dtype.round(self)
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    fn of(x: f64) -> f64 {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn exp(self) -> f64 {
        libm::exp(self)
    }
    fn round(self, dtype: Dtype) -> f64 {
        match dtype {
            Dtype::F32 => self,
            _ => f64::from(dtype.round(self as f32)),
        }
    }
}

/// Rounds every element to `dtype`.
pub(crate) fn rounded<R: Real>(x: &[R], dtype: Dtype) -> Vec<R> {
    x.iter().map(|x| x.round(dtype)).collect()
}

/// `c += a b`, where `a` has rows of `k` elements and `b` and `c` have rows of `n`.
pub(crate) fn multiply_add<R: Real>(c: &mut [R], a: &[R], b: &[R], k: usize, n: usize) {
    for (c, a) in c.chunks_exact_mut(n).zip(a.chunks_exact(k)) {
        for (&a, b) in a.iter().zip(b.chunks_exact(n)) {
            for (c, &b) in c.iter_mut().zip(b) {
                *c += a * b;
            }
        }
    }
}

/// `a b`, where `a` has rows of `k` elements and `b` has rows of `n`.
pub(crate) fn multiply<R: Real>(a: &[R], b: &[R], k: usize, n: usize) -> Vec<R> {
    let mut c = vec![R::ZERO; a.len() / k * n];
    multiply_add(&mut c, a, b, k, n);
    c
}

/// The transpose of a matrix with rows of `n` elements.
pub(crate) fn transposed<R: Real>(a: &[R], n: usize) -> Vec<R> {
    (0..n)
        .flat_map(|j| a.iter().skip(j).step_by(n).copied())
        .collect()
}

/// `(I + a)^-1` of a strictly lower triangular `n` by `n` matrix, by forward substitution.
pub(crate) fn unit_lower_inverse<R: Real>(a: &[R], n: usize) -> Vec<R> {
    let mut t = vec![R::ZERO; n * n];
    for i in 0..n {
        let (done, rest) = t.split_at_mut(i * n);
        let row = &mut rest[..n];
        row[i] = R::ONE;
        for (&a, above) in a[i * n..i * n + i].iter().zip(done.chunks_exact(n)) {
            for (x, &y) in row[..i].iter_mut().zip(above) {
                *x = *x - a * y;
            }
        }
    }
    t
}
