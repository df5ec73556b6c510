//! Vectors of sixteen f32 lanes, for each of the host's vector levels.

/// Sixteen f32 values in host registers.
///
/// # Safety
/// The methods may only run where the host has the vector extension of the implementing type.
/// Pointers must be valid for sixteen 32-bit elements; no alignment is needed.
#[allow(clippy::missing_safety_doc)]
pub(super) trait Lanes16: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// The dwords at `p` with the bits of `mask` kept, as f32.
    unsafe fn load_masked(p: *const u32, mask: u32) -> Self;
    /// The low halves of the dwords at `p`, as the high halves of f32: bf16 to f32.
    unsafe fn load_low_bf16(p: *const u32) -> Self;
    /// The low (`HIGH` = false) or high halves of the dwords at `p`, converted from f16.
    unsafe fn load_f16<const HIGH: bool>(p: *const u32) -> Self;
}

/// f16 to f32, exactly.
pub(in crate::exec) fn f16_to_f32(h: u16) -> f32 {
    let sign = u32::from(h & 0x8000) << 16;
    let exponent = u32::from(h >> 10) & 31;
    let mantissa = u32::from(h & 0x3ff);
    match exponent {
        0 => {
            let magnitude = mantissa as f32 * (1.0 / 16_777_216.0);
            f32::from_bits(magnitude.to_bits() | sign)
        }
        31 => f32::from_bits(
            sign | 0x7f80_0000 | mantissa << 13 | if mantissa != 0 { 0x40_0000 } else { 0 },
        ),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | mantissa << 13),
    }
}

/// Plain Rust, for hosts without a wider level.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 16]);

impl Lanes16 for Portable {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 16])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: sixteen elements are readable, by the trait's contract.
        Portable(unsafe { p.cast::<[f32; 16]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: sixteen elements are writable, by the trait's contract.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        let mut out = c.0;
        for ((out, a), b) in out.iter_mut().zip(self.0).zip(b.0) {
            *out = a.mul_add(b, *out);
        }
        Portable(out)
    }
    #[inline(always)]
    unsafe fn load_masked(p: *const u32, mask: u32) -> Self {
        // SAFETY: sixteen elements are readable, by the trait's contract.
        let x = unsafe { p.cast::<[u32; 16]>().read_unaligned() };
        Portable(x.map(|x| f32::from_bits(x & mask)))
    }
    #[inline(always)]
    unsafe fn load_low_bf16(p: *const u32) -> Self {
        // SAFETY: sixteen elements are readable, by the trait's contract.
        let x = unsafe { p.cast::<[u32; 16]>().read_unaligned() };
        Portable(x.map(|x| f32::from_bits(x << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16<const HIGH: bool>(p: *const u32) -> Self {
        // SAFETY: sixteen elements are readable, by the trait's contract.
        let x = unsafe { p.cast::<[u32; 16]>().read_unaligned() };
        Portable(x.map(|x| f16_to_f32((if HIGH { x >> 16 } else { x }) as u16)))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

// SAFETY comments below rely on the contract of `Lanes16`: the extension is there, the pointers
// are valid for sixteen elements.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes16;
    use std::arch::x86_64::*;

    /// AVX2, FMA and F16C.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256, __m256);

    impl Lanes16 for Avx2 {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: contract of the trait.
            unsafe { Avx2(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: contract of the trait.
            unsafe { Avx2(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: contract of the trait.
            unsafe {
                _mm256_storeu_ps(p, self.0);
                _mm256_storeu_ps(p.add(8), self.1);
            }
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                Avx2(
                    _mm256_fmadd_ps(self.0, b.0, c.0),
                    _mm256_fmadd_ps(self.1, b.1, c.1),
                )
            }
        }
        #[inline(always)]
        unsafe fn load_masked(p: *const u32, mask: u32) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                let mask = _mm256_set1_ps(f32::from_bits(mask));
                let x = Self::load(p.cast());
                Avx2(_mm256_and_ps(x.0, mask), _mm256_and_ps(x.1, mask))
            }
        }
        #[inline(always)]
        unsafe fn load_low_bf16(p: *const u32) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                let half = |p: *const u32| {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(p.cast())))
                };
                Avx2(half(p), half(p.add(8)))
            }
        }
        #[inline(always)]
        unsafe fn load_f16<const HIGH: bool>(p: *const u32) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                let half = |p: *const u32| {
                    let x = _mm256_loadu_si256(p.cast());
                    let x = if HIGH {
                        _mm256_srli_epi32::<16>(x)
                    } else {
                        _mm256_and_si256(x, _mm256_set1_epi32(0xffff))
                    };
                    let packed = _mm256_permute4x64_epi64::<0x08>(_mm256_packus_epi32(x, x));
                    _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
                };
                Avx2(half(p), half(p.add(8)))
            }
        }
    }

    /// AVX-512 F and BW.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    impl Lanes16 for Avx512 {
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: contract of the trait.
            unsafe { Avx512(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: contract of the trait.
            unsafe { Avx512(_mm512_loadu_ps(p)) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: contract of the trait.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: contract of the trait.
            unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
        }
        #[inline(always)]
        unsafe fn load_masked(p: *const u32, mask: u32) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                let x = _mm512_loadu_si512(p.cast());
                let mask = _mm512_set1_epi32(mask as i32);
                Avx512(_mm512_castsi512_ps(_mm512_and_si512(x, mask)))
            }
        }
        #[inline(always)]
        unsafe fn load_low_bf16(p: *const u32) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                let x = _mm512_loadu_si512(p.cast());
                Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)))
            }
        }
        #[inline(always)]
        unsafe fn load_f16<const HIGH: bool>(p: *const u32) -> Self {
            // SAFETY: contract of the trait.
            unsafe {
                let x = _mm512_loadu_si512(p.cast());
                let x = if HIGH { _mm512_srli_epi32::<16>(x) } else { x };
                Avx512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)))
            }
        }
    }
}
