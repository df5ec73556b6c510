//! Conversions between float formats, and rounding in all directions. Loops over lanes vectorise.

/// A rounding mode, with MODE's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// To nearest, ties to even.
    Nearest,
    /// Towards plus infinity.
    Up,
    /// Towards minus infinity.
    Down,
    /// Towards zero.
    Zero,
}

impl Round {
    /// Rounding mode of the two bits of MODE.
    #[inline(always)]
    pub(crate) fn from_mode(bits: u32) -> Round {
        match bits & 3 {
            0 => Round::Nearest,
            1 => Round::Up,
            2 => Round::Down,
            _ => Round::Zero,
        }
    }
}

/// The value of an f16 in the low 16 bits of `h`. Exact; a NaN keeps its payload.
#[inline(always)]
pub(crate) fn f16_to_f32(h: u32) -> f32 {
    let sign = (h & 0x8000) << 16;
    let em = h & 0x7fff;
    let normal = (em << 13).wrapping_add(112 << 23);
    let special = em << 13 | 0x7f80_0000;
    let tiny = (em as i32 as f32 * (1.0 / 16_777_216.0)).to_bits();
    let finite = if em < 0x400 { tiny } else { normal };
    f32::from_bits(sign | if em >= 0x7c00 { special } else { finite })
}

/// f32 to f16, to nearest even. A NaN becomes quiet.
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u32 {
    let bits = x.to_bits();
    let sign = bits >> 16 & 0x8000;
    let a = bits & 0x7fff_ffff;
    let normal = a
        .wrapping_add(0xfff + (a >> 13 & 1))
        .wrapping_sub(112 << 23)
        >> 13;
    // The last place of numbers in 0.5..1 is that of f16's denormals.
    let tiny = (f32::from_bits(a) + 0.5)
        .to_bits()
        .wrapping_sub(0x3f00_0000);
    let finite = if a < 0x3880_0000 { tiny } else { normal };
    let huge = if a > 0x7f80_0000 {
        0x7e00 | (a >> 13 & 0x3ff)
    } else {
        0x7c00
    };
    sign | if a >= 0x4780_0000 { huge } else { finite }
}

/// f32 to f16, towards zero.
#[inline(always)]
pub(crate) fn f32_to_f16_rtz(x: f32) -> u32 {
    let bits = x.to_bits();
    let sign = bits >> 16 & 0x8000;
    let a = bits & 0x7fff_ffff;
    let normal = a.wrapping_sub(112 << 23) >> 13;
    let small = f32::from_bits(if a < 0x3880_0000 { a } else { 0 });
    let tiny = (small * 16_777_216.0) as i32 as u32;
    let finite = if a < 0x3880_0000 { tiny } else { normal };
    let special = if a > 0x7f80_0000 {
        0x7e00 | (a >> 13 & 0x3ff)
    } else {
        0x7c00
    };
    let large = if a >= 0x7f80_0000 { special } else { 0x7bff };
    sign | if a >= 0x4780_0000 { large } else { finite }
}

/// f32 to f16 in any direction.
pub(crate) fn f32_to_f16_round(x: f32, round: Round) -> u32 {
    if round == Round::Nearest || !x.is_finite() {
        return f32_to_f16(x);
    }
    let t = f32_to_f16_rtz(x);
    let away = match round {
        Round::Up => x > 0.0,
        Round::Down => x < 0.0,
        _ => false,
    };
    if away && f16_to_f32(t) != x { t + 1 } else { t }
}

/// The value of a bf16 in the low 16 bits of `h`.
#[inline(always)]
#[allow(dead_code)]
pub(crate) fn bf16_to_f32(h: u32) -> f32 {
    f32::from_bits(h << 16)
}

/// f32 to bf16, to nearest even. A NaN becomes quiet.
#[inline(always)]
#[allow(dead_code)]
pub(crate) fn f32_to_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        bits >> 16 | 0x40
    } else {
        rounded
    }
}

/// f64 to f32, rounded to odd: truncated, with the last bit set if anything was lost. A second rounding to a format
/// with at least two bits less gives the correctly rounded result.
#[inline(always)]
pub(crate) fn f64_to_f32_odd(x: f64) -> f32 {
    let r = x as f32;
    let back = f64::from(r);
    let bits = r.to_bits();
    // Rounding to nearest may have gone away from zero: step back, then set the last bit.
    let over = back.abs() > x.abs();
    let t = if over { bits.wrapping_sub(1) } else { bits };
    let lost = back != x && !x.is_nan();
    f32::from_bits(if lost { t | 1 } else { t })
}

/// f64 to f32 in any direction.
pub(crate) fn f64_to_f32_round(x: f64, round: Round) -> f32 {
    let r = x as f32;
    if round == Round::Nearest || x.is_nan() || f64::from(r) == x {
        return r;
    }
    let (below, above) = if f64::from(r) < x {
        (r, r.next_up())
    } else {
        (r.next_down(), r)
    };
    match round {
        Round::Up => above,
        Round::Down => below,
        _ if x > 0.0 => below,
        _ => above,
    }
}

/// `a * b + c` for values that came from f16, rounded to odd in f64.
#[inline(always)]
pub(crate) fn fma_f16_odd(a: f32, b: f32, c: f32) -> f64 {
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let s = p + c;
    let t = s - p;
    let err = (p - (s - t)) + (c - t);
    let bits = s.to_bits();
    let lost = err != 0.0 && s.is_finite() && err.is_finite();
    // The exact sum lies on err's side of s; odd numbers stay, even ones move towards err.
    let towards_zero = (err < 0.0) != (s < 0.0);
    let odd = if bits & 1 != 0 {
        bits
    } else if towards_zero {
        bits.wrapping_sub(1)
    } else {
        bits | 1
    };
    f64::from_bits(if lost { odd } else { bits })
}

/// An 8-bit float format in AMD's FNUZ form: no infinities, no negative zero, NaN is 0x80.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fnuz {
    /// e4m3, bias 8.
    Fp8,
    /// e5m2, bias 16.
    Bf8,
}

impl Fnuz {
    /// Mantissa bits and exponent bias.
    const fn layout(self) -> (u32, i32) {
        match self {
            Fnuz::Fp8 => (3, 8),
            Fnuz::Bf8 => (2, 16),
        }
    }

    /// The value of the low byte of `x`.
    pub(crate) fn decode(self, x: u32) -> f32 {
        let (m, bias) = self.layout();
        let x = x & 0xff;
        if x == 0x80 {
            return f32::NAN;
        }
        let fraction = x & ((1 << m) - 1);
        let exponent = (x >> m & (0x7f >> m)) as i32;
        let (significand, e) = if exponent == 0 {
            (fraction, 1)
        } else {
            (fraction | 1 << m, exponent)
        };
        let scale = f32::from_bits(((127 + e - bias - m as i32) as u32) << 23);
        let v = significand as f32 * scale;
        if x & 0x80 != 0 { -v } else { v }
    }

    /// Rounds to nearest even, or stochastically with 32 random bits. Overflow gives NaN, or the
    /// largest finite value when `saturate`.
    pub(crate) fn encode(self, x: f32, random: Option<u32>, saturate: bool) -> u32 {
        let (m, bias) = self.layout();
        let bits = x.to_bits();
        let sign = bits >> 24 & 0x80;
        if x.is_nan() || (x.is_infinite() && !saturate) {
            return 0x80;
        }
        if x.is_infinite() {
            return sign | 0x7f;
        }
        if x == 0.0 {
            return 0;
        }
        let exponent = (bits >> 23 & 0xff).max(1) as i32 - 127;
        let significand =
            u64::from(bits & 0x7f_ffff) | if bits & 0x7f80_0000 != 0 { 1 << 23 } else { 0 };
        // Bits dropped: 23 - m for normal results, more for denormal ones.
        let below = (1 - bias - exponent).max(0);
        let drop = (23 - m as i32 + below).min(40) as u32;
        let rounded = match random {
            Some(r) => (significand + (u64::from(r) << 8 >> (40 - drop))) >> drop,
            None => {
                let half = 1u64 << (drop - 1);
                (significand + half - 1 + (significand >> drop & 1)) >> drop
            }
        };
        let field = if below > 0 {
            rounded
        } else {
            rounded + (((exponent + bias - 1) as u64) << m)
        };
        if field > 0x7f {
            return if saturate { sign | 0x7f } else { 0x80 };
        }
        if field == 0 { 0 } else { sign | field as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_survives_f32() {
        for h in 0..0x1_0000u32 {
            let x = f16_to_f32(h);
            assert_eq!(
                f64::from(x).to_bits(),
                half::f16::from_bits(h as u16).to_f64().to_bits()
            );
            let quiet = if x.is_nan() { h | 0x200 } else { h };
            assert_eq!(f32_to_f16(x), quiet);
            assert_eq!(f32_to_f16_rtz(x), quiet);
        }
    }

    #[test]
    fn f32_to_f16_rounds_as_half_does() {
        let mut x = 0u32;
        for _ in 0..2_000_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let v = f32::from_bits(x ^ x >> 16);
            let want = half::f16::from_f32(v);
            if v.is_nan() {
                continue;
            }
            assert_eq!(f32_to_f16(v), u32::from(want.to_bits()), "{v:e}");
            let t = f16_to_f32(f32_to_f16_rtz(v));
            assert!(t.abs() <= v.abs());
            assert_eq!(f32_to_bf16(v), u32::from(half::bf16::from_f32(v).to_bits()));
        }
    }

    #[test]
    fn fnuz_values_survive() {
        for format in [Fnuz::Fp8, Fnuz::Bf8] {
            for b in 0..256 {
                assert_eq!(format.encode(format.decode(b), None, false), b);
                assert_eq!(format.encode(format.decode(b), Some(u32::MAX), true), b);
            }
            assert_eq!(format.encode(1e9, None, false), 0x80);
            assert_eq!(format.encode(-1e9, None, true), 0xff);
        }
        assert_eq!(Fnuz::Fp8.decode(0x7f), 240.0);
        assert_eq!(Fnuz::Bf8.decode(0x7f), 57344.0);
        assert_eq!(Fnuz::Fp8.decode(0x40), 1.0);
    }
}
