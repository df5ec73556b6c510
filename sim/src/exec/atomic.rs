//! Read-modify-write of memory, lane by lane, with the host's atomics because workgroups run in parallel.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::lanes::{Addresses, lanes};
use crate::op::Op::{self, *};
use crate::wave::Wave;

/// Operation of an atomic on the old value, the data and, for compare-and-swap and masked or, a second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Add,
    Sub,
    /// data - old
    Rsub,
    /// `old >= data ? 0 : old + 1`
    Inc,
    /// `old == 0
    ///  old > data ? data : old - 1`
    Dec,
    Smin,
    Smax,
    Umin,
    Umax,
    And,
    Or,
    Xor,
    /// `old & !data | second`
    Mskor,
    Swap,
    /// `old == second ? data : old`
    Cmpswap,
    /// `Cmpswap` with float comparison.
    CmpswapFloat,
    AddFloat,
    MinFloat,
    MaxFloat,
    PkAddF16,
    PkAddBf16,
    /// `old >= data ? old - data : old + second`
    Wrap,
    /// Each half: data without its top bit, if that is set.
    CondXchg,
}

/// An atomic of 32 or 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Atomic {
    pub change: Change,
    /// 64 bits.
    pub wide: bool,
}

impl Atomic {
    /// Number of dwords in one operand.
    pub(crate) fn dwords(self) -> usize {
        1 + usize::from(self.wide)
    }
    /// Whether there is a second operand.
    pub(crate) fn has_second(self) -> bool {
        use Change::*;
        matches!(self.change, Mskor | Cmpswap | CmpswapFloat | Wrap)
    }
}

/// The atomic that an instruction performs.
#[rustfmt::skip]
pub(crate) fn atomic_of(op: Op) -> Option<Atomic> {
    use Change::*;
    let (change, wide) = match op {
        DS_ADD_U32 | DS_ADD_RTN_U32 | FLAT_ATOMIC_ADD | GLOBAL_ATOMIC_ADD | BUFFER_ATOMIC_ADD => (Add, false),
        DS_SUB_U32 | DS_SUB_RTN_U32 | FLAT_ATOMIC_SUB | GLOBAL_ATOMIC_SUB | BUFFER_ATOMIC_SUB => (Sub, false),
        DS_RSUB_U32 | DS_RSUB_RTN_U32 => (Rsub, false),
        DS_INC_U32 | DS_INC_RTN_U32 | FLAT_ATOMIC_INC | GLOBAL_ATOMIC_INC | BUFFER_ATOMIC_INC => (Inc, false),
        DS_DEC_U32 | DS_DEC_RTN_U32 | FLAT_ATOMIC_DEC | GLOBAL_ATOMIC_DEC | BUFFER_ATOMIC_DEC => (Dec, false),
        DS_MIN_I32 | DS_MIN_RTN_I32 | FLAT_ATOMIC_SMIN | GLOBAL_ATOMIC_SMIN | BUFFER_ATOMIC_SMIN => (Smin, false),
        DS_MAX_I32 | DS_MAX_RTN_I32 | FLAT_ATOMIC_SMAX | GLOBAL_ATOMIC_SMAX | BUFFER_ATOMIC_SMAX => (Smax, false),
        DS_MIN_U32 | DS_MIN_RTN_U32 | FLAT_ATOMIC_UMIN | GLOBAL_ATOMIC_UMIN | BUFFER_ATOMIC_UMIN => (Umin, false),
        DS_MAX_U32 | DS_MAX_RTN_U32 | FLAT_ATOMIC_UMAX | GLOBAL_ATOMIC_UMAX | BUFFER_ATOMIC_UMAX => (Umax, false),
        DS_AND_B32 | DS_AND_RTN_B32 | FLAT_ATOMIC_AND | GLOBAL_ATOMIC_AND | BUFFER_ATOMIC_AND => (And, false),
        DS_OR_B32 | DS_OR_RTN_B32 | FLAT_ATOMIC_OR | GLOBAL_ATOMIC_OR | BUFFER_ATOMIC_OR => (Or, false),
        DS_XOR_B32 | DS_XOR_RTN_B32 | FLAT_ATOMIC_XOR | GLOBAL_ATOMIC_XOR | BUFFER_ATOMIC_XOR => (Xor, false),
        DS_MSKOR_B32 | DS_MSKOR_RTN_B32 => (Mskor, false),
        DS_WRXCHG_RTN_B32 | FLAT_ATOMIC_SWAP | GLOBAL_ATOMIC_SWAP | BUFFER_ATOMIC_SWAP => (Swap, false),
        DS_CMPST_B32 | DS_CMPST_RTN_B32 | FLAT_ATOMIC_CMPSWAP | GLOBAL_ATOMIC_CMPSWAP | BUFFER_ATOMIC_CMPSWAP => (Cmpswap, false),
        DS_CMPST_F32 | DS_CMPST_RTN_F32 => (CmpswapFloat, false),
        DS_ADD_F32 | DS_ADD_RTN_F32 | FLAT_ATOMIC_ADD_F32 | GLOBAL_ATOMIC_ADD_F32 | BUFFER_ATOMIC_ADD_F32 => (AddFloat, false),
        DS_MIN_F32 | DS_MIN_RTN_F32 => (MinFloat, false),
        DS_MAX_F32 | DS_MAX_RTN_F32 => (MaxFloat, false),
        DS_PK_ADD_F16 | DS_PK_ADD_RTN_F16 | FLAT_ATOMIC_PK_ADD_F16 | GLOBAL_ATOMIC_PK_ADD_F16 | BUFFER_ATOMIC_PK_ADD_F16 => (PkAddF16, false),
        DS_PK_ADD_BF16 | DS_PK_ADD_RTN_BF16 | FLAT_ATOMIC_PK_ADD_BF16 | GLOBAL_ATOMIC_PK_ADD_BF16 => (PkAddBf16, false),
        DS_WRAP_RTN_B32 => (Wrap, false),
        DS_ADD_U64 | DS_ADD_RTN_U64 | FLAT_ATOMIC_ADD_X2 | GLOBAL_ATOMIC_ADD_X2 | BUFFER_ATOMIC_ADD_X2 => (Add, true),
        DS_SUB_U64 | DS_SUB_RTN_U64 | FLAT_ATOMIC_SUB_X2 | GLOBAL_ATOMIC_SUB_X2 | BUFFER_ATOMIC_SUB_X2 => (Sub, true),
        DS_RSUB_U64 | DS_RSUB_RTN_U64 => (Rsub, true),
        DS_INC_U64 | DS_INC_RTN_U64 | FLAT_ATOMIC_INC_X2 | GLOBAL_ATOMIC_INC_X2 | BUFFER_ATOMIC_INC_X2 => (Inc, true),
        DS_DEC_U64 | DS_DEC_RTN_U64 | FLAT_ATOMIC_DEC_X2 | GLOBAL_ATOMIC_DEC_X2 | BUFFER_ATOMIC_DEC_X2 => (Dec, true),
        DS_MIN_I64 | DS_MIN_RTN_I64 | FLAT_ATOMIC_SMIN_X2 | GLOBAL_ATOMIC_SMIN_X2 | BUFFER_ATOMIC_SMIN_X2 => (Smin, true),
        DS_MAX_I64 | DS_MAX_RTN_I64 | FLAT_ATOMIC_SMAX_X2 | GLOBAL_ATOMIC_SMAX_X2 | BUFFER_ATOMIC_SMAX_X2 => (Smax, true),
        DS_MIN_U64 | DS_MIN_RTN_U64 | FLAT_ATOMIC_UMIN_X2 | GLOBAL_ATOMIC_UMIN_X2 | BUFFER_ATOMIC_UMIN_X2 => (Umin, true),
        DS_MAX_U64 | DS_MAX_RTN_U64 | FLAT_ATOMIC_UMAX_X2 | GLOBAL_ATOMIC_UMAX_X2 | BUFFER_ATOMIC_UMAX_X2 => (Umax, true),
        DS_AND_B64 | DS_AND_RTN_B64 | FLAT_ATOMIC_AND_X2 | GLOBAL_ATOMIC_AND_X2 | BUFFER_ATOMIC_AND_X2 => (And, true),
        DS_OR_B64 | DS_OR_RTN_B64 | FLAT_ATOMIC_OR_X2 | GLOBAL_ATOMIC_OR_X2 | BUFFER_ATOMIC_OR_X2 => (Or, true),
        DS_XOR_B64 | DS_XOR_RTN_B64 | FLAT_ATOMIC_XOR_X2 | GLOBAL_ATOMIC_XOR_X2 | BUFFER_ATOMIC_XOR_X2 => (Xor, true),
        DS_MSKOR_B64 | DS_MSKOR_RTN_B64 => (Mskor, true),
        DS_WRXCHG_RTN_B64 | FLAT_ATOMIC_SWAP_X2 | GLOBAL_ATOMIC_SWAP_X2 | BUFFER_ATOMIC_SWAP_X2 => (Swap, true),
        DS_CMPST_B64 | DS_CMPST_RTN_B64 | FLAT_ATOMIC_CMPSWAP_X2 | GLOBAL_ATOMIC_CMPSWAP_X2 | BUFFER_ATOMIC_CMPSWAP_X2 => (Cmpswap, true),
        DS_CMPST_F64 | DS_CMPST_RTN_F64 => (CmpswapFloat, true),
        DS_ADD_F64 | DS_ADD_RTN_F64 | FLAT_ATOMIC_ADD_F64 | GLOBAL_ATOMIC_ADD_F64 | BUFFER_ATOMIC_ADD_F64 => (AddFloat, true),
        DS_MIN_F64 | DS_MIN_RTN_F64 | FLAT_ATOMIC_MIN_F64 | GLOBAL_ATOMIC_MIN_F64 | BUFFER_ATOMIC_MIN_F64 => (MinFloat, true),
        DS_MAX_F64 | DS_MAX_RTN_F64 | FLAT_ATOMIC_MAX_F64 | GLOBAL_ATOMIC_MAX_F64 | BUFFER_ATOMIC_MAX_F64 => (MaxFloat, true),
        DS_CONDXCHG32_RTN_B64 => (CondXchg, true),
        _ => return None,
    };
    Some(Atomic { change, wide })
}

/// Executes an atomic for every active lane, in ascending order.
///
/// `data` and `second` are the first registers of the operands. `old` is the first register of the result, if it is
/// wanted.
///
/// # Safety
/// Addresses of active lanes must be valid and aligned to the operand's size; the registers must exist.
pub(super) unsafe fn perform(
    w: &mut Wave,
    atomic: Atomic,
    data: usize,
    second: usize,
    old: Option<usize>,
    mask: u64,
    addresses: &Addresses,
) {
    let read = |w: &Wave, first: usize, lane: usize| {
        let low = u64::from(w.vgpr[first].0[lane]);
        if atomic.wide {
            low | u64::from(w.vgpr[first + 1].0[lane]) << 32
        } else {
            low
        }
    };
    for lane in lanes(mask) {
        let x = read(w, data, lane);
        let y = if atomic.has_second() {
            read(w, second, lane)
        } else {
            0
        };
        // SAFETY: the address is valid and aligned, by the contract.
        let before = unsafe {
            if atomic.wide {
                let cell = AtomicU64::from_ptr(addresses[lane] as *mut u64);
                cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                    Some(change64(atomic.change, old, x, y))
                })
                .unwrap_or_else(|old| old)
            } else {
                let cell = AtomicU32::from_ptr(addresses[lane] as *mut u32);
                u64::from(
                    cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                        Some(change32(atomic.change, old, x as u32, y as u32))
                    })
                    .unwrap_or_else(|old| old),
                )
            }
        };
        if let Some(first) = old {
            w.vgpr[first].0[lane] = before as u32;
            if atomic.wide {
                w.vgpr[first + 1].0[lane] = (before >> 32) as u32;
            }
        }
    }
}

/// Arithmetic that is the same for both widths.
macro_rules! change {
    ($name:ident, $unsigned:ty, $signed:ty, $float:ty) => {
        fn $name(change: Change, old: $unsigned, x: $unsigned, y: $unsigned) -> $unsigned {
            let float = |bits| <$float>::from_bits(bits);
            match change {
                Change::Add => old.wrapping_add(x),
                Change::Sub => old.wrapping_sub(x),
                Change::Rsub => x.wrapping_sub(old),
                Change::Inc => {
                    if old >= x {
                        0
                    } else {
                        old + 1
                    }
                }
                Change::Dec => {
                    if old == 0 || old > x {
                        x
                    } else {
                        old - 1
                    }
                }
                Change::Smin => (old as $signed).min(x as $signed) as $unsigned,
                Change::Smax => (old as $signed).max(x as $signed) as $unsigned,
                Change::Umin => old.min(x),
                Change::Umax => old.max(x),
                Change::And => old & x,
                Change::Or => old | x,
                Change::Xor => old ^ x,
                Change::Mskor => old & !x | y,
                Change::Swap => x,
                Change::Cmpswap if old == y => x,
                Change::CmpswapFloat if float(old) == float(y) => x,
                Change::Cmpswap | Change::CmpswapFloat => old,
                Change::AddFloat => (float(old) + float(x)).to_bits(),
                Change::MinFloat if float(x) < float(old) || float(old).is_nan() => x,
                Change::MaxFloat if float(x) > float(old) || float(old).is_nan() => x,
                Change::MinFloat | Change::MaxFloat => old,
                Change::PkAddF16 => halves(old as u32, x as u32, add_f16) as $unsigned,
                Change::PkAddBf16 => halves(old as u32, x as u32, add_bf16) as $unsigned,
                Change::Wrap => {
                    if old >= x {
                        old - x
                    } else {
                        old.wrapping_add(y)
                    }
                }
                Change::CondXchg => {
                    let half = |shift: u32| {
                        let (o, x) = ((old as u64 >> shift) as u32, (x as u64 >> shift) as u32);
                        u64::from(if x >> 31 != 0 { x & 0x7fff_ffff } else { o }) << shift
                    };
                    (half(0) | half(32)) as $unsigned
                }
            }
        }
    };
}
change!(change32, u32, i32, f32);
change!(change64, u64, i64, f64);

fn halves(a: u32, b: u32, f: fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

fn add_f16(a: u16, b: u16) -> u16 {
    let wide = |x| f64::from(super::mfma::f16_to_f32(x));
    narrow::<10>(wide(a) + wide(b))
}

fn add_bf16(a: u16, b: u16) -> u16 {
    let wide = |x: u16| f64::from(f32::from_bits(u32::from(x) << 16));
    narrow::<7>(wide(a) + wide(b))
}

/// Rounds to a 16-bit float with `FRACTION` fraction bits, to nearest even. A sum of two such numbers
/// rounded to f64 first gives the same.
fn narrow<const FRACTION: i32>(x: f64) -> u16 {
    let bias = (1 << (14 - FRACTION)) - 1;
    let infinity = ((2 * bias + 1) << FRACTION) as u16;
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let x = x.abs();
    if x.is_nan() {
        return sign | infinity | 1 << (FRACTION - 1);
    }
    let exponent = ((x.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    if exponent > bias {
        return sign | infinity;
    }
    // In units of the last place: below 2^(FRACTION + 1), or equal after rounding up, when the carry
    // into the exponent field is right as it stands.
    let units = (x * 2f64.powi(FRACTION - exponent)).round_ties_even() as u32;
    let field = ((exponent + bias - 1) as u32) << FRACTION;
    sign | (field + units) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_sums_are_rounded_to_nearest_even() {
        assert_eq!(add_bf16(0x3f80, 0x3f80), 0x4000);
        // 256 + 1 is a tie in bf16, to even; 258 + 1 goes up.
        assert_eq!(add_bf16(0x4380, 0x3f80), 0x4380);
        assert_eq!(add_bf16(0x4381, 0x3f80), 0x4382);
        assert_eq!(add_f16(0x3c00, 0xbc00), 0);
        assert_eq!(add_f16(0x7bff, 0x7bff), 0x7c00);
        assert_eq!(add_f16(0x0001, 0x0001), 0x0002);
        assert_eq!(add_f16(0x03ff, 0x0001), 0x0400);
    }

    #[test]
    fn changes() {
        assert_eq!(change32(Change::Inc, 5, 5, 0), 0);
        assert_eq!(change32(Change::Dec, 0, 7, 0), 7);
        assert_eq!(change32(Change::Smin, u32::MAX, 1, 0), u32::MAX);
        assert_eq!(change64(Change::Cmpswap, 3, 9, 3), 9);
        assert_eq!(change64(Change::Cmpswap, 4, 9, 3), 4);
        assert_eq!(change32(Change::Mskor, 0xff, 0x0f, 0x100), 0x1f0);
        assert_eq!(
            change64(Change::CondXchg, 0x1_0000_0002, 0x8000_0005_0000_0007, 0),
            0x0000_0005_0000_0002
        );
    }
}
