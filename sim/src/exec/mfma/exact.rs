//! MFMA arithmetic of CDNA3's matrix units, bit for bit as far as it is published.
//!
//! Implements the description in "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (arXiv
//! 2511.10909). f32 inputs: a chain of fused multiply-adds in ascending k. Other types are summed in groups of
//! consecutive k (xf32: 4, 16-bit: 8, 8-bit: 16, or all k if there are fewer). Each group adds to the accumulator of
//! the group before:
//!
//! 1. Products are exact. Their exponent is the sum of the factors' exponents (subnormals have the
//!    exponent of the smallest normal), not normalised. All products of the group are aligned to the
//!    largest exponent and truncated toward zero to 24 fractional bits, then added exactly. 8-bit types do
//!    this for even and odd k apart, then align the two sums to the larger exponent in the same way.
//! 2. The sum is aligned to the larger one of its exponent and the accumulator's, with 31 fractional
//!    bits; the accumulator with 24. Here xf32 and 16-bit types round toward minus infinity, 8-bit types
//!    toward zero.
//! 3. The exact sum of both is rounded to the nearest f32, ties to even; subnormals are kept.
//!
//! A product of 2^128 or more counts as an infinity; opposite infinities, infinity times zero and NaN
//! inputs give NaN.

// Loops run over lanes of several arrays at once.
#![allow(clippy::needless_range_loop)]

use super::{Addend, Expanded, Input, Operands, Wave, row_place};

/// Fractional bits of aligned products and of the aligned accumulator.
const FRACTION: i32 = 24;
/// Fractional bits of the sum of products when it meets the accumulator.
const SUM_FRACTION: i32 = 31;
/// 2^128: a finite product is smaller.
const OVERFLOW: f64 = 340_282_366_920_938_463_463_374_607_431_768_211_456.0;
/// Exponent that represents zero.
const ZERO_EXPONENT: i32 = -126;

/// Computes blocks of 16x16 or 32x32 from expanded inputs.
#[inline(always)]
pub(super) fn blocks<A: Input, B: Input, const MN: usize, const BLOCKS: usize, const KV: usize>(
    w: &mut Wave,
    o: &Operands,
    a: &Expanded<KV>,
    b: &Expanded<KV>,
) {
    let k_count = KV * 64 / (MN * BLOCKS);
    for block in 0..BLOCKS {
        let a_block = o.a_block(block) % BLOCKS;
        let mut strips = [Strip::ZERO; 64];
        let by_strips = A::GROUP > 1 && A::PER_DWORD < 4 && k_count * (MN / 16) <= strips.len();
        if by_strips {
            for k in 0..k_count {
                let (group, j) = (k / KV, k % KV);
                for strip in 0..MN / 16 {
                    let at = MN * (block + BLOCKS * group) + 16 * strip;
                    strips[strip * k_count + k].set::<B>(&b[j], at);
                }
            }
        }
        for row in 0..MN {
            let (register, lane) = row_place::<MN>(block, row);
            let mut first = 0;
            if by_strips {
                let mut x = [Factor::ZERO; 32];
                for (k, x) in x[..k_count].iter_mut().enumerate() {
                    let (group, j) = (k / KV, k % KV);
                    *x = Factor::new::<A>(a[j][MN * (a_block + BLOCKS * group) + row]);
                }
                while first < MN {
                    let y = &strips[first / 16 * k_count..][..k_count];
                    let mut d = [0f32; 16];
                    for (l, d) in d.iter_mut().enumerate() {
                        *d = addend(w, o, register, lane + first + l);
                    }
                    if !dot16::<A>(&x[..k_count], y, &mut d) {
                        break;
                    }
                    for (l, d) in d.iter().enumerate() {
                        w.vgpr[o.d + register].0[lane + first + l] = d.to_bits();
                    }
                    first += 16;
                }
            }
            for column in first..MN {
                let mut x = [0f32; 32];
                let mut y = [0f32; 32];
                for k in 0..k_count {
                    let (group, j) = (k / KV, k % KV);
                    x[k] = a[j][MN * (a_block + BLOCKS * group) + row];
                    y[k] = b[j][MN * (block + BLOCKS * group) + column];
                }
                let c = addend(w, o, register, lane + column);
                let d = dot::<A, B>(&x[..k_count], &y[..k_count], c);
                w.vgpr[o.d + register].0[lane + column] = d.to_bits();
            }
        }
    }
}

/// Computes sixteen 4x4 blocks from expanded inputs.
pub(super) fn blocks4<T: Input, const KV: usize>(
    w: &mut Wave,
    o: &Operands,
    a: &Expanded<KV>,
    b: &Expanded<KV>,
) {
    for row in 0..4 {
        for lane in 0..64 {
            let from = 4 * (o.a_block(lane / 4) & 15) + row;
            let x: [f32; KV] = a.map(|a| a[from]);
            let y: [f32; KV] = b.map(|b| b[lane]);
            let c = addend(w, o, row, lane);
            w.vgpr[o.d + row].0[lane] = dot::<T, T>(&x, &y, c).to_bits();
        }
    }
}

/// Exponent of a zero factor: below the sum of any two others.
const NO_EXPONENT: i32 = -1000;

/// The exponent of a factor.
#[inline(always)]
fn exponent_of<T: Input>(x: f32) -> i32 {
    let field = (x.to_bits() >> 23 & 255) as i32;
    if x == 0.0 {
        NO_EXPONENT
    } else {
        (field - 127).max(T::MIN_EXPONENT)
    }
}

/// A factor of a row.
#[derive(Clone, Copy)]
struct Factor {
    value: f64,
    exponent: i32,
}

impl Factor {
    const ZERO: Self = Factor {
        value: 0.0,
        exponent: NO_EXPONENT,
    };

    #[inline(always)]
    fn new<T: Input>(x: f32) -> Self {
        Factor {
            value: f64::from(x),
            exponent: exponent_of::<T>(x),
        }
    }
}

/// The factors of sixteen columns.
#[derive(Clone, Copy)]
struct Strip {
    value: [f64; 16],
    exponent: [i32; 16],
}

impl Strip {
    const ZERO: Self = Strip {
        value: [0.0; 16],
        exponent: [NO_EXPONENT; 16],
    };

    #[inline(always)]
    fn set<T: Input>(&mut self, x: &[f32], at: usize) {
        let x = &x[at..at + 16];
        for l in 0..16 {
            self.value[l] = f64::from(x[l]);
            self.exponent[l] = exponent_of::<T>(x[l]);
        }
    }
}

/// `2^n`. `n` must be the exponent of a normal number.
#[inline(always)]
fn power(n: i32) -> f64 {
    f64::from_bits(((1023 + n) as u64) << 52)
}

/// Computes [`dot`] for sixteen columns at once in f64, where every step is exact. Returns `false`, and leaves `c`
/// unspecified, if a NaN, an infinity or a product of 2^128 or more takes part.
#[inline(always)]
fn dot16<A: Input>(a: &[Factor], b: &[Strip], c: &mut [f32; 16]) -> bool {
    // Sum values that must stay below a bound. A NaN or an infinity exceeds it too.
    let mut largest = [0f64; 16];
    let mut start = 0;
    while start < a.len() {
        let end = (start + A::GROUP).min(a.len());
        let mut exponent = [2 * NO_EXPONENT; 16];
        for k in start..end {
            for l in 0..16 {
                let e = a[k].exponent + b[k].exponent[l];
                let e = if e < 2 * ZERO_EXPONENT {
                    ZERO_EXPONENT
                } else {
                    e
                };
                exponent[l] = exponent[l].max(e);
            }
        }
        let mut scale = [0f64; 16];
        for l in 0..16 {
            scale[l] = power(FRACTION - exponent[l]);
        }
        let mut sum = [0f64; 16];
        for k in start..end {
            for l in 0..16 {
                let product = a[k].value * b[k].value[l];
                let magnitude = product.abs();
                largest[l] = if magnitude < OVERFLOW {
                    largest[l]
                } else {
                    f64::INFINITY
                };
                sum[l] += (product * scale[l]).trunc();
            }
        }
        for l in 0..16 {
            let field = (c[l].to_bits() >> 23 & 255) as i32;
            largest[l] = if field == 255 {
                f64::INFINITY
            } else {
                largest[l]
            };
            let c_exponent = field.max(1) - 127;
            let top = exponent[l].max(c_exponent);
            let products = (sum[l] * power(SUM_FRACTION - FRACTION + exponent[l] - top)).floor();
            let addend = (f64::from(c[l]) * power(FRACTION - top)).floor();
            let total = products + addend * power(SUM_FRACTION - FRACTION);
            c[l] = (total * power(top - SUM_FRACTION)) as f32;
        }
        start = end;
    }
    largest.iter().all(|x| *x == 0.0)
}

/// [`dot16`] of one row with sixteen columns, for tests.
#[cfg(test)]
pub(super) fn dot_strips<T: Input>(
    a: &[f32; 16],
    b: &[[f32; 16]; 16],
    c: [f32; 16],
) -> Option<[f32; 16]> {
    let a = a.map(Factor::new::<T>);
    let mut strips = [Strip::ZERO; 16];
    for (strip, b) in strips.iter_mut().zip(b) {
        strip.set::<T>(b, 0);
    }
    let mut d = c;
    dot16::<T>(&a, &strips, &mut d).then_some(d)
}

#[inline(always)]
fn addend(w: &Wave, o: &Operands, register: usize, lane: usize) -> f32 {
    f32::from_bits(match o.c {
        Addend::Registers(c) => w.vgpr[c + register].0[lane],
        Addend::Constant(bits) => bits,
    })
}

/// `c` plus the dot product of two rows of k.
pub(super) fn dot<A: Input, B: Input>(a: &[f32], b: &[f32], c: f32) -> f32 {
    if A::GROUP == 1 {
        return a.iter().zip(b).fold(c, |c, (a, b)| a.mul_add(*b, c));
    }
    let size = A::GROUP.min(a.len());
    a.chunks(size)
        .zip(b.chunks(size))
        .fold(c, |c, (a, b)| group::<A, B>(a, b, c))
}

/// A number `significand * 2^(exponent - bits)`. `bits` depends on the use.
#[derive(Clone, Copy)]
struct Scaled {
    significand: i64,
    exponent: i32,
}

/// A finite f32 with 23 fractional bits, exponents not below `min_exponent`.
fn scaled(x: f32, min_exponent: i32) -> Scaled {
    let bits = x.to_bits();
    let field = (bits >> 23 & 255) as i32;
    let fraction = i64::from(bits & 0x7f_ffff);
    let (magnitude, exponent) = if field == 0 {
        (fraction, -126)
    } else {
        (fraction | 0x80_0000, field - 127)
    };
    let (magnitude, exponent) = match magnitude {
        0 => (0, ZERO_EXPONENT),
        m if exponent < min_exponent => (m >> (min_exponent - exponent).min(63), min_exponent),
        m => (m, exponent),
    };
    Scaled {
        significand: if x.is_sign_negative() {
            -magnitude
        } else {
            magnitude
        },
        exponent,
    }
}

/// Shifts right by `count` (left if negative), toward zero.
fn truncate(x: i64, count: i32) -> i64 {
    match count {
        ..=0 => x << -count,
        1..=62 => x / (1 << count),
        _ => 0,
    }
}

/// Shifts right by `count` (left if negative), toward minus infinity.
fn floor(x: i64, count: i32) -> i64 {
    match count {
        ..=0 => x << -count,
        _ => x >> count.min(63),
    }
}

/// Aligns products to their largest exponent and adds them, with [`FRACTION`] fractional bits.
fn sum_products(products: impl Iterator<Item = Scaled> + Clone) -> Scaled {
    let exponent = products
        .clone()
        .map(|p| p.exponent)
        .max()
        .unwrap_or(ZERO_EXPONENT);
    // The products have 46 fractional bits.
    let significand = products
        .map(|p| truncate(p.significand, 46 - FRACTION + exponent - p.exponent))
        .sum();
    Scaled {
        significand,
        exponent,
    }
}

/// Adds one group of products to the accumulator.
fn group<A: Input, B: Input>(a: &[f32], b: &[f32], c: f32) -> f32 {
    if let Some(special) = special(a, b, c) {
        return special;
    }
    let products = a.iter().zip(b).map(|(&a, &b)| {
        let (a, b) = (scaled(a, A::MIN_EXPONENT), scaled(b, B::MIN_EXPONENT));
        match a.significand * b.significand {
            0 => Scaled {
                significand: 0,
                exponent: ZERO_EXPONENT,
            },
            significand => Scaled {
                significand,
                exponent: a.exponent + b.exponent,
            },
        }
    });
    let c = scaled(c, -126);
    let halves = A::PER_DWORD == 4;
    let align = if halves { truncate } else { floor };
    let sum = if halves {
        let even = sum_products(products.clone().step_by(2));
        let odd = sum_products(products.skip(1).step_by(2));
        let exponent = even.exponent.max(odd.exponent);
        Scaled {
            significand: truncate(even.significand, exponent - even.exponent)
                + truncate(odd.significand, exponent - odd.exponent),
            exponent,
        }
    } else {
        sum_products(products)
    };
    let exponent = sum.exponent.max(c.exponent);
    let products = align(
        sum.significand,
        FRACTION - SUM_FRACTION + exponent - sum.exponent,
    );
    // The accumulator has 23 fractional bits.
    let c = align(c.significand, 23 - FRACTION + exponent - c.exponent);
    let total = products + (c << (SUM_FRACTION - FRACTION));
    // Below 2^53, so the product with a power of two is exact, and only the conversion rounds.
    (total as f64 * 2f64.powi(exponent - SUM_FRACTION)) as f32
}

/// Result if a NaN or an infinity takes part; `None` otherwise.
fn special(a: &[f32], b: &[f32], c: f32) -> Option<f32> {
    let (mut plus, mut minus, mut nan) = (c == f32::INFINITY, c == f32::NEG_INFINITY, c.is_nan());
    for (&a, &b) in a.iter().zip(b) {
        let product = f64::from(a) * f64::from(b);
        nan |= product.is_nan();
        plus |= product >= OVERFLOW;
        minus |= product <= -OVERFLOW;
    }
    match (plus, minus, nan) {
        (false, false, false) => None,
        (true, false, false) => Some(f32::INFINITY),
        (false, true, false) => Some(f32::NEG_INFINITY),
        _ => Some(f32::NAN),
    }
}
