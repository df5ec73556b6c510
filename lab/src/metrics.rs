//! Error figures: the distance of a result from its reference, and its limits.

use crate::inputs::{Gates, Tensor};
use deltawave::types::Dtype;

/// Errors of the best public kernel, as (`o`, final state): pooled rms ratios, measured on an H200 on the standard
/// inputs, `K = V = 128`, at least 8 heads and 1024 tokens. For gates that were not measured: 1.5 times the errors of
/// [`Gates::Mixed`].
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

/// Factor on [`bar`] that a smaller shape than the measured ones may have: small samples scatter.
pub const SMALL_SHAPE_SLACK: f64 = 1.15;
/// Factor on the error of [`crate::oracle::unfused`] that a result may have.
pub const UNFUSED_SLACK: f64 = 1.05;
/// Rms ratio that storing a final state in bf16 adds to its error: 1.7e-3 on average.
pub const BF16_STATE_ROUNDING: f64 = 1.8e-3;
/// The same for f16, which has three more bits.
pub const F16_STATE_ROUNDING: f64 = BF16_STATE_ROUNDING / 8.0;

/// The distance of a tensor from its reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// `rms(x - reference) / rms(reference)`. 0 if both are all zeros or empty. Infinite if only the reference is all
    /// zeros, or if the result holds a NaN or an infinity.
    pub rms_ratio: f64,
    /// The largest `|x - reference|`. Infinite if the result holds a NaN or an infinity.
    pub max_abs: f64,
    /// Number of elements compared.
    pub elements: usize,
    /// Number of elements of the result that are NaN or infinite.
    pub non_finite: usize,
}

impl Comparison {
    /// Whether every element of the result is finite.
    pub fn finite(&self) -> bool {
        self.non_finite == 0
    }
}

/// Sums from which comparisons of parts are pooled.
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

/// Compares two tensors of equal length, all elements pooled.
///
/// # Panics
///
/// If the lengths differ.
pub fn compare<T: Copy + Into<f64>>(x: &[T], reference: &[f64]) -> Comparison {
    let mut sums = Sums::default();
    sums.add(x, reference);
    sums.comparison()
}

/// The rms ratio of rounding alone: `reference` rounded to `dtype`, against `reference`.
pub fn rounding_ratio(reference: &[f64], dtype: Dtype) -> f64 {
    let narrow = reference.iter().map(|x| *x as f32).collect();
    compare(&Tensor::new(dtype, narrow).values, reference).rms_ratio
}

/// The distance of a 16-bit tensor from its reference rounded once to the same dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UlpComparison {
    /// Number of elements compared.
    pub elements: usize,
    /// Number of elements whose bits differ from the rounded reference. Zeros of either sign are equal, and so are
    /// NaNs.
    pub different: usize,
    /// The largest distance, in units in the last place. `u32::MAX` if only one of the two is NaN.
    pub max_ulps: u32,
}

impl UlpComparison {
    /// Share of elements that equal the rounded reference, 0..1.
    pub fn equal_share(&self) -> f64 {
        1.0 - self.different as f64 / self.elements.max(1) as f64
    }

    /// Pools two comparisons.
    pub fn and(self, other: Self) -> Self {
        UlpComparison {
            elements: self.elements + other.elements,
            different: self.different + other.different,
            max_ulps: self.max_ulps.max(other.max_ulps),
        }
    }
}

/// Compares a 16-bit tensor with its reference.
///
/// # Panics
///
/// If the lengths differ, or `x` is f32.
pub fn compare_ulps(x: &Tensor, reference: &[f64]) -> UlpComparison {
    assert_eq!(
        x.values.len(),
        reference.len(),
        "one reference for each element"
    );
    assert_eq!(x.dtype.size(), 2, "a tensor of 16 bits");
    // Maps neighbouring numbers to neighbouring integers, through zero.
    let place = |bits: u16| {
        let magnitude = i32::from(bits & 0x7fff);
        if bits & 0x8000 == 0 {
            magnitude
        } else {
            -magnitude
        }
    };
    let mut out = UlpComparison {
        elements: reference.len(),
        ..Default::default()
    };
    for ((bytes, value), &wanted) in x.bytes.chunks_exact(2).zip(&x.values).zip(reference) {
        let rounded = round_once(wanted, x.dtype);
        let ulps = match (value.is_nan(), wanted.is_nan()) {
            (true, true) => 0,
            (false, false) => {
                place(u16::from_le_bytes([bytes[0], bytes[1]])).abs_diff(place(rounded))
            }
            _ => u32::MAX,
        };
        out.different += usize::from(ulps > 0);
        out.max_ulps = out.max_ulps.max(ulps);
    }
    out
}

/// The bits of `x` rounded to a 16-bit type, to nearest even. Rounds to f32 with round-to-odd on the way: rounding to
/// nearest there would round twice.
fn round_once(x: f64, dtype: Dtype) -> u16 {
    let mut near = x as f32;
    if f64::from(near) != x && near.to_bits() & 1 == 0 && near.is_finite() {
        let toward_zero = f64::from(near).abs() > x.abs();
        near = f32::from_bits(if toward_zero {
            near.to_bits() - 1
        } else {
            near.to_bits() + 1
        });
    }
    match dtype {
        Dtype::Bf16 => half::bf16::from_f32(near).to_bits(),
        _ => half::f16::from_f32(near).to_bits(),
    }
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

/// Compares outputs `[T, HV, V]` per sequence and value head. Rows outside of every sequence are left out.
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

/// The comparison with the largest rms ratio; `None` if `parts` is empty.
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
    fn ulps_are_counted_once_rounded() {
        // Just above half an ulp in f64. Rounding to f32 first would make it a tie.
        let tie = 1.0 + 1.0 / 256.0;
        assert_eq!(round_once(tie, Dtype::Bf16), 0x3f80);
        assert_eq!(round_once(tie + 1e-12, Dtype::Bf16), 0x3f81);
        assert_eq!(round_once(-tie - 1e-12, Dtype::Bf16), 0xbf81);
        assert_eq!(round_once(65520.0, Dtype::F16), 0x7c00);
        assert_eq!(round_once(65520.0 - 1e-9, Dtype::F16), 0x7bff);
        assert_eq!(round_once(1e300, Dtype::Bf16), 0x7f80);
        assert_eq!(round_once(-1e-300, Dtype::F16), 0x8000);
        let x = Tensor::new(
            Dtype::Bf16,
            vec![1.0, -0.0, f32::NAN, 1.0, f32::NAN, -1e-39],
        );
        let wanted = [1.0, 0.0, f64::NAN, tie + 1e-12, 0.0, 1e-39];
        let found = compare_ulps(&x, &wanted);
        assert_eq!(
            (found.elements, found.different, found.max_ulps),
            (6, 3, u32::MAX)
        );
        assert_eq!(found.equal_share(), 0.5);
        let near = compare_ulps(&x, &[1.0, 0.0, f64::NAN, tie + 1e-12, f64::NAN, -1e-39]);
        assert_eq!((near.different, near.max_ulps), (1, 1));
        assert_eq!(near.and(found).different, 4);
    }

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
        // Two sequences of 1 and 2 tokens, 2 heads, 1 column, one padding row that does not count.
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
