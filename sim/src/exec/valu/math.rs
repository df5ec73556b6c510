//! Transcendental functions. They are computed in f64 and rounded to f32 once, within one unit in the last place. No
//! fused operations are used, so every level gives the same bits.

/// Replaces a denormal by zero of the same sign.
#[inline(always)]
pub(crate) fn flushed(x: f32) -> f32 {
    f32::from_bits(super::float::flush32(x.to_bits()))
}

/// `1 / sqrt(x)`.
#[inline(always)]
pub(crate) fn rsq(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}

/// `2^x`.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    exp2_f64(f64::from(x)) as f32
}

/// `2^x` for `x` that came from f32, with a relative error below 2^-40.
#[inline(always)]
fn exp2_f64(x: f64) -> f64 {
    let y = if x.is_nan() {
        x
    } else {
        x.clamp(-1000.0, 1000.0)
    };
    // Adding 1.5 * 2^52 leaves the nearest integer in the low bits.
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let shifted = y + MAGIC;
    let n = shifted - MAGIC;
    let t = (y - n) * std::f64::consts::LN_2;
    let mut p = 1.0 / 39_916_800.0;
    for c in [
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p * t + c;
    }
    let scale = f64::from_bits((shifted.to_bits().wrapping_add(1023)) << 52);
    p * scale
}

/// The base-2 logarithm.
#[inline(always)]
pub(crate) fn log2(x: f32) -> f32 {
    let r = log2_f64(f64::from(x)) as f32;
    let r = if x == 0.0 { f32::NEG_INFINITY } else { r };
    let r = if x == f32::INFINITY { x } else { r };
    if x < 0.0 || x.is_nan() { f32::NAN } else { r }
}

/// The base-2 logarithm of a positive normal number.
#[inline(always)]
fn log2_f64(x: f64) -> f64 {
    // x = 2^e * m, m in sqrt(1/2)..sqrt(2).
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x0009_5f61_9980_c433);
    let e = (up >> 52) as i32 - 1023;
    let m = f64::from_bits(bits.wrapping_sub(((up >> 52).wrapping_sub(1023)) << 52));
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 1.0 / 21.0;
    for c in [
        1.0 / 19.0,
        1.0 / 17.0,
        1.0 / 15.0,
        1.0 / 13.0,
        1.0 / 11.0,
        1.0 / 9.0,
        1.0 / 7.0,
        1.0 / 5.0,
        1.0 / 3.0,
        1.0,
    ] {
        p = p * z + c;
    }
    f64::from(e) + 2.0 * std::f64::consts::LOG2_E * (s * p)
}

/// Sine of `x` turns; 0 outside -256..256.
#[inline(always)]
pub(crate) fn sin_turns(x: f32) -> f32 {
    if x.abs() > 256.0 && x.is_finite() {
        return 0.0;
    }
    let x = f64::from(x);
    let t = x - x.round_ties_even();
    // Quarter points are exact.
    if t.abs() == 0.5 || t == 0.0 {
        return (x * 0.0) as f32;
    }
    (t * std::f64::consts::TAU).sin() as f32
}

/// Cosine of `x` turns; 1 outside -256..256.
#[inline(always)]
pub(crate) fn cos_turns(x: f32) -> f32 {
    if x.abs() > 256.0 && x.is_finite() {
        return 1.0;
    }
    let x = f64::from(x);
    let t = (x - x.round_ties_even()).abs();
    if t == 0.25 {
        return 0.0;
    }
    (t * std::f64::consts::TAU).cos() as f32
}
