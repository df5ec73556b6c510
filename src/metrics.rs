//! How far a result is from its reference, and how far it may be.

use crate::inputs::Gates;
use crate::types::Dtype;

/// The best public kernel's errors of o and of the final state: pooled rms ratios measured on an H200 on the standard
/// inputs, 128 by 128 heads, 8 of them or more, 1024 tokens or more. For gates that were not measured, 1.5 times those
/// of [`Gates::Mixed`].
pub fn bar(dtype: Dtype, gates: Gates) -> (f64, f64) {
    match (dtype, gates) {
        (Dtype::Bf16, Gates::Normal) => (2.9e-3, 1.7e-3),
        (Dtype::Bf16, Gates::Mixed) => (3.9e-3, 3.1e-3),
        (Dtype::Bf16, _) => (1.5 * 3.9e-3, 1.5 * 3.1e-3),
        (_, Gates::Normal) => (3.7e-4, 2.1e-4),
        (_, Gates::Mixed) => (5.1e-4, 4.2e-4),
        (_, _) => (1.5 * 5.1e-4, 1.5 * 4.2e-4),
    }
}

/// How much more than [`bar`] shapes smaller than those of its measurement may have: small samples scatter.
pub const SMALL_SHAPE_SLACK: f64 = 1.15;
/// How much more than the error of [`crate::oracle::unfused`] a result may have.
pub const UNFUSED_SLACK: f64 = 1.05;
/// What storing a final state in bf16 adds to its error: 1.7e-3 in the mean.
pub const BF16_STATE_ROUNDING: f64 = 1.8e-3;

/// The distance of a tensor from a reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// `rms(x - reference) / rms(reference)`. 0 where both are all zeros or empty; infinite where only the reference
    /// is all zeros, and where the result holds a NaN or an infinity.
    pub rms_ratio: f64,
    /// The largest `|x - reference|`; infinite where the result holds a NaN or an infinity.
    pub max_abs: f64,
    /// How many elements were compared.
    pub elements: usize,
    /// How many elements of the result are NaN or infinite.
    pub non_finite: usize,
}

impl Comparison {
    /// Whether every element of the result is finite.
    pub fn finite(&self) -> bool {
        self.non_finite == 0
    }
}

/// Sums that comparisons of parts can be pooled from.
#[derive(Clone, Copy, Default)]
struct Sums {
    error: f64,
    reference: f64,
    max_abs: f64,
    elements: usize,
    non_finite: usize,
}

impl Sums {
    fn add<T: Copy + Into<f64>>(&mut self, x: &[T], reference: &[f64]) {
        assert_eq!(
            x.len(),
            reference.len(),
            "a result and its reference have the same length"
        );
        for (&x, &r) in x.iter().zip(reference) {
            let x: f64 = x.into();
            let d = (x - r).abs();
            self.error += d * d;
            self.reference += r * r;
            self.max_abs = self.max_abs.max(d);
            self.non_finite += usize::from(!x.is_finite());
        }
        self.elements += x.len();
    }

    fn comparison(&self) -> Comparison {
        let broken = self.non_finite > 0 || !self.error.is_finite();
        Comparison {
            rms_ratio: match self {
                _ if broken => f64::INFINITY,
                Sums { error: 0.0, .. } => 0.0,
                _ => (self.error / self.reference).sqrt(),
            },
            max_abs: if broken { f64::INFINITY } else { self.max_abs },
            elements: self.elements,
            non_finite: self.non_finite,
        }
    }
}

/// Compares two tensors, all elements pooled.
///
/// # Panics
///
/// If the lengths differ.
pub fn compare<T: Copy + Into<f64>>(x: &[T], reference: &[f64]) -> Comparison {
    let mut sums = Sums::default();
    sums.add(x, reference);
    sums.comparison()
}

/// The comparison of one head of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadComparison {
    /// The sequence.
    pub sequence: usize,
    /// The value head.
    pub head: usize,
    /// The distance.
    pub comparison: Comparison,
}

/// Compares outputs `[T, HV, V]` per sequence and value head; rows outside of every sequence are left out.
///
/// # Panics
///
/// If the lengths differ, or `cu_seqlens` reaches past the tokens.
pub fn compare_outputs<T: Copy + Into<f64>>(
    x: &[T],
    reference: &[f64],
    cu_seqlens: &[i32],
    value_heads: usize,
    value_dim: usize,
) -> Vec<HeadComparison> {
    assert_eq!(
        x.len(),
        reference.len(),
        "a result and its reference have the same length"
    );
    let mut out = Vec::new();
    for (sequence, w) in cu_seqlens.windows(2).enumerate() {
        for head in 0..value_heads {
            let mut sums = Sums::default();
            for t in w[0] as usize..w[1] as usize {
                let row =
                    (t * value_heads + head) * value_dim..(t * value_heads + head + 1) * value_dim;
                sums.add(&x[row.clone()], &reference[row]);
            }
            out.push(HeadComparison {
                sequence,
                head,
                comparison: sums.comparison(),
            });
        }
    }
    out
}

/// Compares states `[N, HV, K, V]` per sequence and value head. `state_size` is `K * V`.
///
/// # Panics
///
/// If the lengths differ, or are not a multiple of `value_heads * state_size`.
pub fn compare_states<T: Copy + Into<f64>>(
    x: &[T],
    reference: &[f64],
    value_heads: usize,
    state_size: usize,
) -> Vec<HeadComparison> {
    assert_eq!(
        x.len(),
        reference.len(),
        "a result and its reference have the same length"
    );
    assert!(
        x.len().is_multiple_of(value_heads * state_size),
        "not a whole number of sequences"
    );
    (x.chunks_exact(state_size)
        .zip(reference.chunks_exact(state_size))
        .enumerate())
    .map(|(i, (x, r))| HeadComparison {
        sequence: i / value_heads,
        head: i % value_heads,
        comparison: compare(x, r),
    })
    .collect()
}

/// The comparison with the largest rms ratio.
pub fn worst(parts: &[HeadComparison]) -> Option<HeadComparison> {
    parts
        .iter()
        .copied()
        .max_by(|a, b| a.comparison.rms_ratio.total_cmp(&b.comparison.rms_ratio))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_and_maxima() {
        let c = compare(&[1.0f32, 2.0, 2.0], &[1.0, 2.0, 1.0]);
        assert_eq!(c.max_abs, 1.0);
        assert!((c.rms_ratio - (1.0f64 / 6.0).sqrt()).abs() < 1e-15);
        assert_eq!((c.elements, c.finite()), (3, true));
        assert_eq!(compare::<f32>(&[], &[]).rms_ratio, 0.0);
        assert_eq!(compare(&[0.0f32], &[0.0]).rms_ratio, 0.0);
        assert_eq!(compare(&[1.0f32], &[0.0]).rms_ratio, f64::INFINITY);
    }

    #[test]
    fn a_nan_is_never_a_small_error() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let c = compare(&[1.0, bad], &[1.0, 1.0]);
            assert_eq!(
                (c.rms_ratio, c.max_abs, c.non_finite),
                (f64::INFINITY, f64::INFINITY, 1)
            );
        }
        assert_eq!(compare(&[1.0f32], &[f64::NAN]).rms_ratio, f64::INFINITY);
    }

    #[test]
    fn parts_are_told_apart() {
        // Two sequences of 1 and 2 tokens, 2 heads of 1 column, a padding row that does not count.
        let reference = vec![1.0; 8];
        let mut x = vec![1.0f32; 8];
        x[5] = 3.0;
        x[6] = 9.0;
        let parts = compare_outputs(&x, &reference, &[0, 1, 3], 2, 1);
        assert_eq!(parts.len(), 4);
        let w = worst(&parts).unwrap();
        assert_eq!(
            (
                w.sequence,
                w.head,
                w.comparison.max_abs,
                w.comparison.elements
            ),
            (1, 1, 2.0, 2)
        );
        let w = worst(&compare_states(&x, &reference, 2, 2)).unwrap();
        assert_eq!((w.sequence, w.head, w.comparison.max_abs), (1, 1, 8.0));
    }
}
