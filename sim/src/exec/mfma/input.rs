//! Element types of the A and B matrices.

use std::sync::LazyLock;

use super::vector::Lanes16;

/// An element type of A or B whose values are all representable in f32.
pub(super) trait Input {
    /// Values in one register of one lane.
    const PER_DWORD: usize;
    /// Exponent of the smallest normal number; subnormals share it.
    const MIN_EXPONENT: i32;
    /// Number of consecutive k that the matrix unit adds in one step; 1: a fused multiply-add for each.
    const GROUP: usize;
    /// Value `j` of a register, for the sixteen lanes that start at `p`, as f32.
    ///
    /// # Safety
    /// As for [`Lanes16`].
    unsafe fn expand<V: Lanes16>(p: *const u32, j: usize) -> V;
}

pub(super) struct F32;
pub(super) struct Xf32;
pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct Fp8;
pub(super) struct Bf8;

impl Input for F32 {
    const PER_DWORD: usize = 1;
    const MIN_EXPONENT: i32 = -126;
    const GROUP: usize = 1;
    #[inline(always)]
    unsafe fn expand<V: Lanes16>(p: *const u32, _: usize) -> V {
        // SAFETY: contract of the method.
        unsafe { V::load(p.cast()) }
    }
}

/// The matrix unit reads sign, exponent and the upper ten bits of the fraction.
impl Input for Xf32 {
    const PER_DWORD: usize = 1;
    const MIN_EXPONENT: i32 = -126;
    const GROUP: usize = 4;
    #[inline(always)]
    unsafe fn expand<V: Lanes16>(p: *const u32, _: usize) -> V {
        // SAFETY: contract of the method.
        unsafe { V::load_masked(p, 0xffff_e000) }
    }
}

impl Input for Bf16 {
    const PER_DWORD: usize = 2;
    const MIN_EXPONENT: i32 = -126;
    const GROUP: usize = 8;
    #[inline(always)]
    unsafe fn expand<V: Lanes16>(p: *const u32, j: usize) -> V {
        // SAFETY: contract of the method.
        unsafe {
            if j.is_multiple_of(2) {
                V::load_low_bf16(p)
            } else {
                V::load_masked(p, 0xffff_0000)
            }
        }
    }
}

impl Input for F16 {
    const PER_DWORD: usize = 2;
    const MIN_EXPONENT: i32 = -14;
    const GROUP: usize = 8;
    #[inline(always)]
    unsafe fn expand<V: Lanes16>(p: *const u32, j: usize) -> V {
        // SAFETY: contract of the method.
        unsafe {
            if j.is_multiple_of(2) {
                V::load_f16::<false>(p)
            } else {
                V::load_f16::<true>(p)
            }
        }
    }
}

/// All values of an 8-bit FNUZ format: no infinities, no negative zero; 0x80 is NaN.
fn fnuz_table(mantissa_bits: u32, bias: i32) -> [f32; 256] {
    std::array::from_fn(|code| {
        let code = code as u32;
        if code == 0x80 {
            return f32::NAN;
        }
        let mantissa = (code & ((1 << mantissa_bits) - 1)) as f32 / (1u32 << mantissa_bits) as f32;
        let exponent = ((code & 0x7f) >> mantissa_bits) as i32;
        let magnitude = if exponent == 0 {
            mantissa * 2f32.powi(1 - bias)
        } else {
            (1.0 + mantissa) * 2f32.powi(exponent - bias)
        };
        if code & 0x80 != 0 {
            -magnitude
        } else {
            magnitude
        }
    })
}

static FP8: LazyLock<[f32; 256]> = LazyLock::new(|| fnuz_table(3, 8));
static BF8: LazyLock<[f32; 256]> = LazyLock::new(|| fnuz_table(2, 16));

#[inline(always)]
unsafe fn expand_byte<V: Lanes16>(table: &[f32; 256], p: *const u32, j: usize) -> V {
    let mut out = [0f32; 16];
    for (lane, out) in out.iter_mut().enumerate() {
        // SAFETY: sixteen dwords are readable, by the contract of `Input::expand`.
        let word = unsafe { p.add(lane).read() };
        *out = table[(word >> (8 * (j % 4)) & 255) as usize];
    }
    // SAFETY: `out` has sixteen elements.
    unsafe { V::load(out.as_ptr()) }
}

impl Input for Fp8 {
    const PER_DWORD: usize = 4;
    const MIN_EXPONENT: i32 = -7;
    const GROUP: usize = 16;
    #[inline(always)]
    unsafe fn expand<V: Lanes16>(p: *const u32, j: usize) -> V {
        // SAFETY: contract of the method.
        unsafe { expand_byte(&FP8, p, j) }
    }
}

impl Input for Bf8 {
    const PER_DWORD: usize = 4;
    const MIN_EXPONENT: i32 = -15;
    const GROUP: usize = 16;
    #[inline(always)]
    unsafe fn expand<V: Lanes16>(p: *const u32, j: usize) -> V {
        // SAFETY: contract of the method.
        unsafe { expand_byte(&BF8, p, j) }
    }
}
