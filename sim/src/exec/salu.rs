//! Scalar instructions: SOP1, SOP2, SOPK, SOPC and SOPP.

use super::valu::operand::{Ty, scalar32, scalar64};
use super::{Env, Exec, Flow};
use crate::fault::FaultKind;
use crate::inst::{EXEC, Format, Inst, M0};
use crate::op::Op;
use crate::wave::Wave;

/// `table! { fn NAME via SHAPE: (TYPES) -> TYPE { OP | OP = |a, b| expression, } }` defines
/// `fn NAME(&Inst) -> Option<Exec>`.
macro_rules! table {
    ($(fn $name:ident via $shape:ident $x:tt: $args:ty => $ret:ty {
        $($($op:ident)|+ = |$($arg:ident),*| $body:expr,)*
    })*) => {$(
        fn $name(inst: &Inst) -> Option<Exec> {
            match inst.op {
                $($(Op::$op)|+ => {
                    #[inline(always)]
                    #[allow(unused_variables)]
                    fn f(($($arg,)*): $args) -> $ret {
                        $body
                    }
                    #[allow(unused_parens)]
                    unsafe fn exec(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
                        $shape(w, i, $x, f);
                        Flow::Next
                    }
                    Some(exec)
                })*
                _ => None,
            }
        }
    )*};
}

#[inline(always)]
fn put32(w: &mut Wave, i: &Inst, v: u32) {
    w.sgpr[(i.sdst & 127) as usize] = v;
}

#[inline(always)]
fn put64(w: &mut Wave, i: &Inst, v: u64) {
    w.set_s64(i.sdst, v);
}

/// One 32-bit source.
#[inline(always)]
fn unary(w: &mut Wave, i: &Inst, scc: bool, f: impl Fn((u32,)) -> u32) {
    let r = f((scalar32(w, i, i.src[0]),));
    put32(w, i, r);
    if scc {
        w.scc = r != 0;
    }
}

/// One 64-bit source, 64-bit result.
#[inline(always)]
fn unary64(w: &mut Wave, i: &Inst, scc: bool, f: impl Fn((u64,)) -> u64) {
    let r = f((scalar64(w, i, i.src[0], Ty::B64),));
    put64(w, i, r);
    if scc {
        w.scc = r != 0;
    }
}

/// One 64-bit source, 32-bit result.
#[inline(always)]
fn narrow(w: &mut Wave, i: &Inst, scc: bool, f: impl Fn((u64,)) -> u32) {
    let r = f((scalar64(w, i, i.src[0], Ty::B64),));
    put32(w, i, r);
    if scc {
        w.scc = r != 0;
    }
}

/// One 32-bit source, 64-bit result.
#[inline(always)]
fn widen(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u32,)) -> u64) {
    let r = f((scalar32(w, i, i.src[0]),));
    put64(w, i, r);
}

/// The second source of SOP2, or the constant of SOPK.
#[inline(always)]
fn second(w: &Wave, i: &Inst) -> u32 {
    scalar32(w, i, i.src[1])
}

/// Two 32-bit sources; SCC = result is non-zero.
#[inline(always)]
fn logic(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u32, u32)) -> u32) {
    let r = f((scalar32(w, i, i.src[0]), second(w, i)));
    put32(w, i, r);
    w.scc = r != 0;
}

/// Two 64-bit sources; SCC = result is non-zero.
#[inline(always)]
fn logic64(w: &mut Wave, i: &Inst, ty: Ty, f: impl Fn((u64, u64)) -> u64) {
    let r = f((scalar64(w, i, i.src[0], ty), scalar64(w, i, i.src[1], ty)));
    put64(w, i, r);
    w.scc = r != 0;
}

/// A 64-bit and a 32-bit source; SCC = result is non-zero.
#[inline(always)]
fn shift64(w: &mut Wave, i: &Inst, ty: Ty, f: impl Fn((u64, u32)) -> u64) {
    let r = f((scalar64(w, i, i.src[0], ty), second(w, i)));
    put64(w, i, r);
    w.scc = r != 0;
}

/// Two 32-bit sources; SCC is kept.
#[inline(always)]
fn quiet(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u32, u32)) -> u32) {
    let r = f((scalar32(w, i, i.src[0]), second(w, i)));
    put32(w, i, r);
}

/// Two 32-bit sources and SCC; the function returns the new SCC.
#[inline(always)]
fn carry(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u32, u32, u32)) -> (u32, bool)) {
    let (r, scc) = f((scalar32(w, i, i.src[0]), second(w, i), u32::from(w.scc)));
    put32(w, i, r);
    w.scc = scc;
}

/// A comparison.
#[inline(always)]
fn compare(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u32, u32)) -> bool) {
    w.scc = f((scalar32(w, i, i.src[0]), scalar32(w, i, i.src[1])));
}

#[inline(always)]
fn compare64(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u64, u64)) -> bool) {
    w.scc = f((
        scalar64(w, i, i.src[0], Ty::B64),
        scalar64(w, i, i.src[1], Ty::B64),
    ));
}

/// A comparison of a 64-bit and a 32-bit source.
#[inline(always)]
fn compare_bit64(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u64, u32)) -> bool) {
    w.scc = f((scalar64(w, i, i.src[0], Ty::B64), scalar32(w, i, i.src[1])));
}

/// The destination of SOPK and the constant.
#[inline(always)]
fn compare_k(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u32, i32)) -> bool) {
    w.scc = f((w.sgpr[(i.sdst & 127) as usize], i.imm));
}

/// `exec = f(source, exec)`; the old EXEC is saved in the destination.
#[inline(always)]
fn save_exec(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u64, u64)) -> u64) {
    let old = w.exec();
    let r = f((scalar64(w, i, i.src[0], Ty::B64), old));
    put64(w, i, old);
    w.set_s64(EXEC, r);
    w.scc = r != 0;
}

/// `exec = destination = f(source, exec)`.
#[inline(always)]
fn write_exec(w: &mut Wave, i: &Inst, _: (), f: impl Fn((u64, u64)) -> u64) {
    let r = f((scalar64(w, i, i.src[0], Ty::B64), w.exec()));
    put64(w, i, r);
    w.set_s64(EXEC, r);
    w.scc = r != 0;
}

fn quad_mask(x: u64) -> u64 {
    (0..16).fold(0, |m, q| m | u64::from(x >> (4 * q) & 15 != 0) << q)
}

fn whole_quad(x: u64) -> u64 {
    (0..16).fold(0, |m, q| {
        if x >> (4 * q) & 15 != 0 {
            m | 15 << (4 * q)
        } else {
            m
        }
    })
}

#[inline(always)]
fn first_u32(x: u32) -> u32 {
    if x == 0 { !0 } else { x.trailing_zeros() }
}

#[inline(always)]
fn first_u64(x: u64) -> u32 {
    if x == 0 { !0 } else { x.trailing_zeros() }
}

#[inline(always)]
fn lead_u32(x: u32) -> u32 {
    if x == 0 { !0 } else { x.leading_zeros() }
}

#[inline(always)]
fn lead_u64(x: u64) -> u32 {
    if x == 0 { !0 } else { x.leading_zeros() }
}

/// Doubles each bit.
fn replicate(x: u32) -> u64 {
    (0..32).fold(0, |r, b| r | (u64::from(x >> b & 1) * 3) << (2 * b))
}

/// Bit offset and width in a bit field operand.
#[inline(always)]
fn field(b: u32) -> (u32, u32) {
    (b & 31, b >> 16 & 127)
}

fn bfe_u64(a: u64, b: u32) -> u64 {
    let (offset, width) = (b & 63, b >> 16 & 127);
    let v = a >> offset;
    if width >= 64 {
        v
    } else {
        v & ((1 << width) - 1)
    }
}

fn bfe_i64(a: u64, b: u32) -> u64 {
    let (offset, width) = (b & 63, b >> 16 & 127);
    let v = a as i64 >> offset;
    match width {
        0 => 0,
        1..64 if offset + width < 64 => (v << (64 - width) >> (64 - width)) as u64,
        _ => v as u64,
    }
}

fn bfe_u32(a: u32, b: u32) -> u32 {
    let (offset, width) = field(b);
    let v = a >> offset;
    if width >= 32 {
        v
    } else {
        v & ((1 << width) - 1)
    }
}

fn bfe_i32(a: u32, b: u32) -> u32 {
    let (offset, width) = field(b);
    let v = a as i32 >> offset;
    match width {
        0 => 0,
        1..32 if offset + width < 32 => (v << (32 - width) >> (32 - width)) as u32,
        _ => v as u32,
    }
}

#[inline(always)]
fn lshl_add(a: u32, b: u32, n: u32) -> (u32, bool) {
    let s = (u64::from(a) << n) + u64::from(b);
    (s as u32, s >> 32 != 0)
}

/// Sign-overflow of `a + b = s`.
#[inline(always)]
fn add_overflow(a: u32, b: u32) -> (u32, bool) {
    let (s, o) = (a as i32).overflowing_add(b as i32);
    (s as u32, o)
}

table! {
    fn moves via unary(false): (u32,) => u32 {
        S_MOV_B32 = |a| a,
        S_BREV_B32 = |a| a.reverse_bits(),
        S_FF0_I32_B32 = |a| first_u32(!a),
        S_FF1_I32_B32 = |a| first_u32(a),
        S_FLBIT_I32_B32 = |a| lead_u32(a),
        S_FLBIT_I32 = |a| lead_u32(a ^ (a as i32 >> 31) as u32),
        S_SEXT_I32_I8 = |a| a as i8 as i32 as u32,
        S_SEXT_I32_I16 = |a| a as i16 as i32 as u32,
    }
    fn unaries via unary(true): (u32,) => u32 {
        S_NOT_B32 = |a| !a,
        S_WQM_B32 = |a| whole_quad(a.into()) as u32,
        S_QUADMASK_B32 = |a| quad_mask(a.into()) as u32,
        S_BCNT0_I32_B32 = |a| a.count_zeros(),
        S_BCNT1_I32_B32 = |a| a.count_ones(),
        S_ABS_I32 = |a| (a as i32).wrapping_abs() as u32,
    }
    fn moves64 via unary64(false): (u64,) => u64 {
        S_MOV_B64 = |a| a,
        S_BREV_B64 = |a| a.reverse_bits(),
    }
    fn unaries64 via unary64(true): (u64,) => u64 {
        S_NOT_B64 = |a| !a,
        S_WQM_B64 = |a| whole_quad(a),
        S_QUADMASK_B64 = |a| quad_mask(a),
    }
    fn counts via narrow(true): (u64,) => u32 {
        S_BCNT0_I32_B64 = |a| a.count_zeros(),
        S_BCNT1_I32_B64 = |a| a.count_ones(),
    }
    fn finds via narrow(false): (u64,) => u32 {
        S_FF0_I32_B64 = |a| first_u64(!a),
        S_FF1_I32_B64 = |a| first_u64(a),
        S_FLBIT_I32_B64 = |a| lead_u64(a),
        S_FLBIT_I32_I64 = |a| lead_u64(a ^ (a as i64 >> 63) as u64),
    }
    fn widens via widen(): (u32,) => u64 {
        S_BITREPLICATE_B64_B32 = |a| replicate(a),
    }
    fn logics via logic(): (u32, u32) => u32 {
        S_AND_B32 = |a, b| a & b,
        S_OR_B32 = |a, b| a | b,
        S_XOR_B32 = |a, b| a ^ b,
        S_ANDN2_B32 = |a, b| a & !b,
        S_ORN2_B32 = |a, b| a | !b,
        S_NAND_B32 = |a, b| !(a & b),
        S_NOR_B32 = |a, b| !(a | b),
        S_XNOR_B32 = |a, b| !(a ^ b),
        S_LSHL_B32 = |a, b| a << (b & 31),
        S_LSHR_B32 = |a, b| a >> (b & 31),
        S_ASHR_I32 = |a, b| (a as i32 >> (b & 31)) as u32,
        S_BFE_U32 = |a, b| bfe_u32(a, b),
        S_BFE_I32 = |a, b| bfe_i32(a, b),
        S_ABSDIFF_I32 = |a, b| (a as i32).wrapping_sub(b as i32).wrapping_abs() as u32,
    }
    fn logics64 via logic64(Ty::B64): (u64, u64) => u64 {
        S_AND_B64 = |a, b| a & b,
        S_OR_B64 = |a, b| a | b,
        S_XOR_B64 = |a, b| a ^ b,
        S_ANDN2_B64 = |a, b| a & !b,
        S_ORN2_B64 = |a, b| a | !b,
        S_NAND_B64 = |a, b| !(a & b),
        S_NOR_B64 = |a, b| !(a | b),
        S_XNOR_B64 = |a, b| !(a ^ b),
    }
    fn shifts64 via shift64(Ty::B64): (u64, u32) => u64 {
        S_LSHL_B64 = |a, b| a << (b & 63),
        S_LSHR_B64 = |a, b| a >> (b & 63),
        S_BFE_U64 = |a, b| bfe_u64(a, b),
    }
    fn signed64 via shift64(Ty::I64): (u64, u32) => u64 {
        S_ASHR_I64 = |a, b| (a as i64 >> (b & 63)) as u64,
        S_BFE_I64 = |a, b| bfe_i64(a, b),
    }
    fn quiets via quiet(): (u32, u32) => u32 {
        S_MUL_I32 = |a, b| a.wrapping_mul(b),
        S_MUL_HI_U32 = |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32,
        S_MUL_HI_I32 = |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32,
        S_BFM_B32 = |a, b| ((1u32 << (a & 31)) - 1) << (b & 31),
        S_PACK_LL_B32_B16 = |a, b| a & 0xffff | b << 16,
        S_PACK_LH_B32_B16 = |a, b| a & 0xffff | b & 0xffff_0000,
        S_PACK_HH_B32_B16 = |a, b| a >> 16 | b & 0xffff_0000,
    }
    fn carries via carry(): (u32, u32, u32) => (u32, bool) {
        S_ADD_U32 = |a, b, c| a.overflowing_add(b),
        S_SUB_U32 = |a, b, c| a.overflowing_sub(b),
        S_ADD_I32 = |a, b, c| add_overflow(a, b),
        S_SUB_I32 = |a, b, c| {
            let (d, o) = (a as i32).overflowing_sub(b as i32);
            (d as u32, o)
        },
        S_ADDC_U32 = |a, b, c| {
            let s = u64::from(a) + u64::from(b) + u64::from(c);
            (s as u32, s >> 32 != 0)
        },
        S_SUBB_U32 = |a, b, c| {
            let d = u64::from(a).wrapping_sub(u64::from(b)).wrapping_sub(u64::from(c));
            (d as u32, d >> 63 != 0)
        },
        S_MIN_I32 = |a, b, c| ((a as i32).min(b as i32) as u32, (a as i32) < b as i32),
        S_MIN_U32 = |a, b, c| (a.min(b), a < b),
        S_MAX_I32 = |a, b, c| ((a as i32).max(b as i32) as u32, a as i32 > b as i32),
        S_MAX_U32 = |a, b, c| (a.max(b), a > b),
        S_CSELECT_B32 = |a, b, c| (if c != 0 { a } else { b }, c != 0),
        S_LSHL1_ADD_U32 = |a, b, c| lshl_add(a, b, 1),
        S_LSHL2_ADD_U32 = |a, b, c| lshl_add(a, b, 2),
        S_LSHL3_ADD_U32 = |a, b, c| lshl_add(a, b, 3),
        S_LSHL4_ADD_U32 = |a, b, c| lshl_add(a, b, 4),
    }
    fn compares via compare(): (u32, u32) => bool {
        S_CMP_EQ_I32 | S_CMP_EQ_U32 = |a, b| a == b,
        S_CMP_LG_I32 | S_CMP_LG_U32 = |a, b| a != b,
        S_CMP_GT_I32 = |a, b| a as i32 > b as i32,
        S_CMP_GE_I32 = |a, b| a as i32 >= b as i32,
        S_CMP_LT_I32 = |a, b| (a as i32) < b as i32,
        S_CMP_LE_I32 = |a, b| a as i32 <= b as i32,
        S_CMP_GT_U32 = |a, b| a > b,
        S_CMP_GE_U32 = |a, b| a >= b,
        S_CMP_LT_U32 = |a, b| a < b,
        S_CMP_LE_U32 = |a, b| a <= b,
        S_BITCMP0_B32 = |a, b| a >> (b & 31) & 1 == 0,
        S_BITCMP1_B32 = |a, b| a >> (b & 31) & 1 != 0,
    }
    fn compares64 via compare64(): (u64, u64) => bool {
        S_CMP_EQ_U64 = |a, b| a == b,
        S_CMP_LG_U64 = |a, b| a != b,
    }
    fn bits64 via compare_bit64(): (u64, u32) => bool {
        S_BITCMP0_B64 = |a, b| a >> (b & 63) & 1 == 0,
        S_BITCMP1_B64 = |a, b| a >> (b & 63) & 1 != 0,
    }
    fn compares_k via compare_k(): (u32, i32) => bool {
        S_CMPK_EQ_I32 = |a, k| a as i32 == k,
        S_CMPK_LG_I32 = |a, k| a as i32 != k,
        S_CMPK_GT_I32 = |a, k| a as i32 > k,
        S_CMPK_GE_I32 = |a, k| a as i32 >= k,
        S_CMPK_LT_I32 = |a, k| (a as i32) < k,
        S_CMPK_LE_I32 = |a, k| a as i32 <= k,
        S_CMPK_EQ_U32 = |a, k| a == u32::from(k as u16),
        S_CMPK_LG_U32 = |a, k| a != u32::from(k as u16),
        S_CMPK_GT_U32 = |a, k| a > u32::from(k as u16),
        S_CMPK_GE_U32 = |a, k| a >= u32::from(k as u16),
        S_CMPK_LT_U32 = |a, k| a < u32::from(k as u16),
        S_CMPK_LE_U32 = |a, k| a <= u32::from(k as u16),
    }
    fn save_execs via save_exec(): (u64, u64) => u64 {
        S_AND_SAVEEXEC_B64 = |s, x| s & x,
        S_OR_SAVEEXEC_B64 = |s, x| s | x,
        S_XOR_SAVEEXEC_B64 = |s, x| s ^ x,
        S_ANDN2_SAVEEXEC_B64 = |s, x| s & !x,
        S_ORN2_SAVEEXEC_B64 = |s, x| s | !x,
        S_NAND_SAVEEXEC_B64 = |s, x| !(s & x),
        S_NOR_SAVEEXEC_B64 = |s, x| !(s | x),
        S_XNOR_SAVEEXEC_B64 = |s, x| !(s ^ x),
        S_ANDN1_SAVEEXEC_B64 = |s, x| !s & x,
        S_ORN1_SAVEEXEC_B64 = |s, x| !s | x,
    }
    fn write_execs via write_exec(): (u64, u64) => u64 {
        S_ANDN1_WREXEC_B64 = |s, x| !s & x,
        S_ANDN2_WREXEC_B64 = |s, x| s & !x,
    }
}

/// Executes the instructions that fit no table.
unsafe fn other(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    match i.op {
        Op::S_CSELECT_B64 => {
            let s = if w.scc { i.src[0] } else { i.src[1] };
            let v = scalar64(w, i, s, Ty::B64);
            put64(w, i, v);
        }
        Op::S_CMOV_B32 if w.scc => {
            let v = scalar32(w, i, i.src[0]);
            put32(w, i, v);
        }
        Op::S_CMOV_B64 if w.scc => {
            let v = scalar64(w, i, i.src[0], Ty::B64);
            put64(w, i, v);
        }
        Op::S_BFM_B64 => {
            let (a, b) = (scalar32(w, i, i.src[0]) & 63, scalar32(w, i, i.src[1]) & 63);
            put64(w, i, ((1 << a) - 1) << b);
        }
        Op::S_BITSET0_B32 | Op::S_BITSET1_B32 => {
            let bit = 1 << (scalar32(w, i, i.src[0]) & 31);
            let old = w.sgpr[(i.sdst & 127) as usize];
            let set = i.op == Op::S_BITSET1_B32;
            put32(w, i, if set { old | bit } else { old & !bit });
        }
        Op::S_BITSET0_B64 | Op::S_BITSET1_B64 => {
            let bit = 1u64 << (scalar32(w, i, i.src[0]) & 63);
            let old = w.s64(i.sdst);
            let set = i.op == Op::S_BITSET1_B64;
            put64(w, i, if set { old | bit } else { old & !bit });
        }
        Op::S_MOVRELS_B32 | Op::S_MOVRELS_B64 | Op::S_MOVRELD_B32 | Op::S_MOVRELD_B64 => {
            return move_relative(w, i, e);
        }
        Op::S_MOVK_I32 => put32(w, i, i.imm as u32),
        Op::S_CMOVK_I32 if w.scc => put32(w, i, i.imm as u32),
        Op::S_ADDK_I32 => {
            let (v, o) = add_overflow(w.sgpr[(i.sdst & 127) as usize], i.imm as u32);
            put32(w, i, v);
            w.scc = o;
        }
        Op::S_MULK_I32 => {
            let v = w.sgpr[(i.sdst & 127) as usize].wrapping_mul(i.imm as u32);
            put32(w, i, v);
        }
        Op::S_GETREG_B32 => {
            let (id, offset, width) = hardware_field(i.imm);
            let v = bits(hardware_register(w, e, id), offset, width);
            put32(w, i, v);
        }
        Op::S_SETREG_B32 => {
            let v = w.sgpr[(i.sdst & 127) as usize];
            let v = if i.src[0] < 128 {
                scalar32(w, i, i.src[0])
            } else {
                v
            };
            set_hardware_register(w, i.imm, v);
        }
        Op::S_SETREG_IMM32_B32 => set_hardware_register(w, i.imm, i.literal),
        _ => {}
    }
    Flow::Next
}

#[cold]
fn move_relative(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let m0 = w.sgpr[M0 as usize];
    let from = matches!(i.op, Op::S_MOVRELS_B32 | Op::S_MOVRELS_B64);
    let wide = matches!(i.op, Op::S_MOVRELS_B64 | Op::S_MOVRELD_B64);
    let base = if from { i.src[0] } else { i.sdst };
    let limit = if wide { 100 } else { 101 };
    let register = u32::from(base).saturating_add(m0);
    if register > limit {
        e.fault = Some(FaultKind::BadRegister {
            register: format!("s{register}"),
            limit: 102,
        });
        return Flow::Fault;
    }
    let r = register as u16;
    let (s, d) = if from { (r, i.sdst) } else { (i.src[0], r) };
    if wide {
        let v = scalar64(w, i, s, Ty::B64);
        w.set_s64(d, v);
    } else {
        w.sgpr[(d & 127) as usize] = scalar32(w, i, s);
    }
    Flow::Next
}

/// Number, offset and width of the field of `s_getreg` and `s_setreg`.
fn hardware_field(imm: i32) -> (u32, u32, u32) {
    let k = imm as u32;
    (k & 63, k >> 6 & 31, (k >> 11 & 31) + 1)
}

fn bits(v: u32, offset: u32, width: u32) -> u32 {
    (u64::from(v) >> offset & ((1u64 << width) - 1)) as u32
}

/// The hardware registers that a kernel can read.
fn hardware_register(w: &Wave, e: &Env, id: u32) -> u32 {
    match id {
        1 => w.mode,
        // STATUS: SCC, EXECZ, VCCZ.
        2 => u32::from(w.scc) | u32::from(w.exec() == 0) << 9 | u32::from(w.vcc() == 0) << 10,
        // HW_ID: the wave's number.
        4 => w.id & 15,
        // GPR_ALLOC: vector registers in units of 8.
        5 => u32::from(w.vgpr_count.div_ceil(8).saturating_sub(1)) << 8,
        // LDS_ALLOC: size in units of 512 bytes.
        6 => (e.lds.len().div_ceil(512) as u32 & 0x1ff) << 12,
        20 => e.xcc,
        // SQ_SHADER_TBA, SQ_SHADER_TMA, TRAPSTS, IB_STS and the rest: nothing pending.
        _ => 0,
    }
}

/// `s_setreg`: only MODE can be written.
fn set_hardware_register(w: &mut Wave, imm: i32, value: u32) {
    let (id, offset, width) = hardware_field(imm);
    if id == 1 {
        let mask = ((1u64 << width) - 1) << offset;
        w.mode = (u64::from(w.mode) & !mask | u64::from(value) << offset & mask) as u32;
    }
}

/// Bit of MODE that `s_set_gpr_idx_on` sets: vector register numbers are relative to M0.
pub(crate) const GPR_IDX_EN: u32 = 1 << 27;

fn is_valu(format: Format) -> bool {
    matches!(
        format,
        Format::Vop1 | Format::Vop2 | Format::Vopc | Format::Vop3 | Format::Vop3p | Format::Mai
    )
}

/// `s_set_gpr_idx_*`: the index in M0 bits 0..8, the operands that it moves in bits 12..16.
unsafe fn gpr_index(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let m0 = w.sgpr[M0 as usize];
    let which = (i.imm as u32 & 15) << 12;
    match i.op {
        Op::S_SET_GPR_IDX_OFF => {
            w.mode &= !GPR_IDX_EN;
            return Flow::Next;
        }
        Op::S_SET_GPR_IDX_ON => {
            let index = scalar32(w, i, i.src[0]) & 255;
            w.sgpr[M0 as usize] = m0 & !0xf0ff | index | which;
            w.mode |= GPR_IDX_EN;
        }
        Op::S_SET_GPR_IDX_IDX => {
            let index = scalar32(w, i, i.src[0]) & 255;
            w.sgpr[M0 as usize] = m0 & !0xff | index;
            return Flow::Next;
        }
        _ => w.sgpr[M0 as usize] = m0 & !0xf000 | which,
    }
    // Only moves are indexed by the simulator: anything else before the mode ends is refused.
    let rest = e.program.insts.get(w.pc as usize..).unwrap_or_default();
    let other = rest
        .iter()
        .take_while(|n| n.op != Op::S_SET_GPR_IDX_OFF)
        .find(|n| is_valu(n.format) && n.op != Op::V_MOV_B32);
    if let Some(n) = other {
        e.fault = Some(FaultKind::Unimplemented {
            mnemonic: format!("{:?} after s_set_gpr_idx_on", n.op).to_lowercase(),
        });
        return Flow::Fault;
    }
    Flow::Next
}

/// Device address of the next instruction.
fn next_address(w: &Wave, e: &Env) -> u64 {
    let n = w.pc as usize;
    let offset = match e.program.offsets.get(n) {
        Some(o) => u64::from(*o),
        None => 4 * e.program.index_of_dword.len() as u64,
    };
    e.program.base.wrapping_add(offset)
}

/// Jumps to a device address.
fn jump(w: &mut Wave, e: &mut Env, target: u64) -> Flow {
    let offset = target.wrapping_sub(e.program.base);
    let index = usize::try_from(offset / 4)
        .ok()
        .and_then(|d| e.program.index_of_dword.get(d).copied());
    match index {
        Some(n) if n != u32::MAX && offset.is_multiple_of(4) => {
            w.pc = n;
            Flow::Next
        }
        _ => {
            e.fault = Some(FaultKind::BadPc { target });
            Flow::Fault
        }
    }
}

unsafe fn get_pc(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let pc = next_address(w, e);
    put64(w, i, pc);
    Flow::Next
}

unsafe fn set_pc(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let target = scalar64(w, i, i.src[0], Ty::B64);
    jump(w, e, target)
}

unsafe fn swap_pc(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let target = scalar64(w, i, i.src[0], Ty::B64);
    let pc = next_address(w, e);
    put64(w, i, pc);
    jump(w, e, target)
}

unsafe fn call(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let pc = next_address(w, e);
    put64(w, i, pc);
    jump(w, e, pc.wrapping_add((i64::from(i.imm as i16) * 4) as u64))
}

/// Takes a branch whose target the decoder has resolved.
#[inline(always)]
fn branch(w: &mut Wave, i: &Inst, e: &mut Env, taken: bool) -> Flow {
    if !taken {
        return Flow::Next;
    }
    if i.target == u32::MAX {
        let target = next_address(w, e).wrapping_add((i64::from(i.imm) * 4) as u64);
        e.fault = Some(FaultKind::BadPc { target });
        return Flow::Fault;
    }
    w.pc = i.target;
    Flow::Next
}

macro_rules! branches {
    ($($name:ident = |$w:ident| $taken:expr;)*) => {$(
        unsafe fn $name($w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
            let taken = $taken;
            branch($w, i, e, taken)
        }
    )*};
}

branches! {
    always = |_w| true;
    scc0 = |w| !w.scc;
    scc1 = |w| w.scc;
    vccz = |w| w.vcc() == 0;
    vccnz = |w| w.vcc() != 0;
    execz = |w| w.exec() == 0;
    execnz = |w| w.exec() != 0;
    never = |_w| false;
}

unsafe fn nothing(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Next
}

unsafe fn barrier(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Barrier
}

unsafe fn sleep(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Yield
}

unsafe fn end(w: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    w.ended = true;
    Flow::End
}

unsafe fn trap(_: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    e.fault = Some(FaultKind::Trap { id: i.imm as u8 });
    Flow::Fault
}

pub(crate) fn handler(inst: &Inst) -> Option<Exec> {
    if !matches!(
        inst.format,
        Format::Sop1 | Format::Sop2 | Format::Sopk | Format::Sopc | Format::Sopp
    ) {
        return None;
    }
    moves(inst)
        .or_else(|| unaries(inst))
        .or_else(|| moves64(inst))
        .or_else(|| unaries64(inst))
        .or_else(|| counts(inst))
        .or_else(|| finds(inst))
        .or_else(|| widens(inst))
        .or_else(|| logics(inst))
        .or_else(|| logics64(inst))
        .or_else(|| shifts64(inst))
        .or_else(|| signed64(inst))
        .or_else(|| quiets(inst))
        .or_else(|| carries(inst))
        .or_else(|| compares(inst))
        .or_else(|| compares64(inst))
        .or_else(|| bits64(inst))
        .or_else(|| compares_k(inst))
        .or_else(|| save_execs(inst))
        .or_else(|| write_execs(inst))
        .or_else(|| control(inst))
}

fn control(inst: &Inst) -> Option<Exec> {
    Some(match inst.op {
        Op::S_CSELECT_B64
        | Op::S_CMOV_B32
        | Op::S_CMOV_B64
        | Op::S_BFM_B64
        | Op::S_BITSET0_B32
        | Op::S_BITSET1_B32
        | Op::S_BITSET0_B64
        | Op::S_BITSET1_B64
        | Op::S_MOVRELS_B32
        | Op::S_MOVRELS_B64
        | Op::S_MOVRELD_B32
        | Op::S_MOVRELD_B64
        | Op::S_MOVK_I32
        | Op::S_CMOVK_I32
        | Op::S_ADDK_I32
        | Op::S_MULK_I32
        | Op::S_GETREG_B32
        | Op::S_SETREG_B32
        | Op::S_SETREG_IMM32_B32 => other,
        Op::S_SET_GPR_IDX_ON
        | Op::S_SET_GPR_IDX_OFF
        | Op::S_SET_GPR_IDX_IDX
        | Op::S_SET_GPR_IDX_MODE => gpr_index,
        Op::S_GETPC_B64 => get_pc,
        Op::S_SETPC_B64 => set_pc,
        Op::S_SWAPPC_B64 => swap_pc,
        Op::S_CALL_B64 => call,
        Op::S_BRANCH => always,
        Op::S_CBRANCH_SCC0 => scc0,
        Op::S_CBRANCH_SCC1 => scc1,
        Op::S_CBRANCH_VCCZ => vccz,
        Op::S_CBRANCH_VCCNZ => vccnz,
        Op::S_CBRANCH_EXECZ => execz,
        Op::S_CBRANCH_EXECNZ => execnz,
        // No debugger is attached.
        Op::S_CBRANCH_CDBGSYS
        | Op::S_CBRANCH_CDBGUSER
        | Op::S_CBRANCH_CDBGSYS_OR_USER
        | Op::S_CBRANCH_CDBGSYS_AND_USER => never,
        Op::S_BARRIER => barrier,
        Op::S_SLEEP => sleep,
        Op::S_ENDPGM | Op::S_ENDPGM_SAVED | Op::S_ENDPGM_ORDERED_PS_DONE => end,
        Op::S_TRAP => trap,
        Op::S_NOP
        | Op::S_WAITCNT
        | Op::S_SETHALT
        | Op::S_SETPRIO
        | Op::S_ICACHE_INV
        | Op::S_SENDMSG
        | Op::S_SENDMSGHALT
        | Op::S_SETKILL
        | Op::S_WAKEUP
        | Op::S_INCPERFLEVEL
        | Op::S_DECPERFLEVEL
        | Op::S_TTRACEDATA => nothing,
        _ => return None,
    })
}
