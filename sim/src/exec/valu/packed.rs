//! VOP3P: packed f32, f16 and i16, mixed-precision FMA, dot products.

use super::f16::Half;
use super::f32::{max32, min32};
use super::float::{Arith, directed32, finish32, flush32, nan32, needs_finish32, special_mode32};
use super::operand::{self, Scratch, Ty, plain32, plain64, put16_half, put32, put64};
use super::ops;
use super::shape::at;
use crate::exec::convert::{Round, f16_to_f32, f32_to_f16, fma_f16_odd};
use crate::exec::{Env, Exec, Flow, Level};
use crate::inst::{Inst, flag};
use crate::op::Op;
use crate::wave::{LANES, Wave};

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    let clamp = inst.has(flag::CLAMP);
    sums32(inst, level)
        .or_else(|| products32(inst, level))
        .or_else(|| fmas32(inst, level))
        .or_else(|| moves(inst, level))
        .or_else(|| halves(inst, level))
        .or_else(|| half_fmas(inst, level))
        .or_else(|| half_selects(inst, level))
        .or_else(|| if clamp { saturating(inst, level) } else { None })
        .or_else(|| words(inst, level))
        .or_else(|| mixes(inst, level))
        .or_else(|| dots(inst, level))
        .or_else(|| float_dots(inst, level))
}

/// For each half of the result, 64 lanes of source `n` and the bits that negate them.
#[inline(always)]
unsafe fn pair32(w: &Wave, i: &Inst, n: usize, buf: *mut u32) -> ([*const u32; 2], [u32; 2]) {
    let ty = if matches!(i.op, Op::V_PK_MOV_B32) {
        Ty::B64
    } else {
        Ty::B32
    };
    let s = i.src[n];
    // SAFETY: `buf` has 128 lanes.
    let halves = unsafe {
        if (128..crate::inst::VGPR0).contains(&s) && ty == Ty::B32 {
            // A constant is a 32-bit value in the low half.
            let lo = plain32(w, i, s, ty, buf);
            operand::splat(buf.add(LANES), 0);
            (lo, buf.add(LANES).cast_const())
        } else {
            plain64(w, i, s, ty, buf)
        }
    };
    let pick = |mask: u8| {
        if mask >> n & 1 != 0 {
            halves.1
        } else {
            halves.0
        }
    };
    let sign = |mask: u8| if mask >> n & 1 != 0 { 1 << 31 } else { 0 };
    (
        [pick(i.op_sel), pick(i.op_sel_hi)],
        [sign(i.neg), sign(i.abs)],
    )
}

/// Packed f32 with up to three sources.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn packed32(
    w: &mut Wave,
    i: &Inst,
    (kind, count): (Arith, usize),
    f: impl Fn(f32, f32, f32) -> f32,
) -> Flow {
    let mut s = Scratch::<6>::new();
    let mut r = [[0; LANES]; 2];
    let (mode, special) = (w.mode, needs_finish32(w.mode, i));
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let (a, na) = pair32(w, i, 0, s.at(0));
        let (b, nb) = pair32(w, i, 1, s.at(2));
        let (c, nc) = if count > 2 {
            pair32(w, i, 2, s.at(4))
        } else {
            (b, nb)
        };
        for h in 0..2 {
            let (a, b, c) = (a[h], b[h], c[h]);
            let load = |l: usize| [at(a, l) ^ na[h], at(b, l) ^ nb[h], at(c, l) ^ nc[h]];
            let mut bad = 0;
            for l in 0..LANES {
                let [x, y, z] = load(l).map(f32::from_bits);
                let v = f(x, y, z);
                bad |= u32::from(v.is_nan());
                r[h][l] = v.to_bits();
            }
            if bad != 0 || special {
                for l in 0..LANES {
                    repair(mode, kind, load(l), &mut r[h][l], &f);
                }
            }
            if special {
                finish32(mode, i, &mut r[h]);
            }
        }
    }
    put64(w, i, &r[0], &r[1]);
    Flow::Next
}

/// One lane under MODE: source denormals, rounding, NaNs.
#[cold]
#[inline(never)]
fn repair(mode: u32, kind: Arith, s: [u32; 3], r: &mut u32, f: &dyn Fn(f32, f32, f32) -> f32) {
    if special_mode32(mode) {
        let s = if mode & 0x10 == 0 { s.map(flush32) } else { s };
        let round = Round::from_mode(mode);
        let [x, y, z] = s.map(f32::from_bits);
        *r = directed32(kind, s, round).unwrap_or_else(|| f(x, y, z).to_bits());
    }
    if f32::from_bits(*r).is_nan() {
        *r = nan32(if kind == Arith::Fma {
            s
        } else {
            [s[0], s[1], s[1]]
        });
    }
}

#[inline(always)]
unsafe fn packed32_2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    kind: Arith,
    f: impl Fn((f32, f32)) -> f32,
) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { packed32(w, i, (kind, 2), |a, b, _| f((a, b))) }
}

#[inline(always)]
unsafe fn packed32_3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    kind: Arith,
    f: impl Fn((f32, f32, f32)) -> f32,
) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { packed32(w, i, (kind, 3), |a, b, c| f((a, b, c))) }
}

/// The low half from source 0, the high half from source 1.
#[inline(always)]
unsafe fn move_pair(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((u32,)) -> u32) -> Flow {
    let mut s = Scratch::<4>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let (a, _) = pair32(w, i, 0, s.at(0));
        let (b, _) = pair32(w, i, 1, s.at(2));
        for l in 0..LANES {
            lo[l] = f((at(a[0], l),));
            hi[l] = f((at(b[0], l),));
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

/// Shifts and sign flips to read the halves of a 16-bit source, for low and high results.
#[derive(Clone, Copy)]
struct Halves {
    shift: [u32; 2],
    flip: [u32; 2],
}

impl Halves {
    #[inline(always)]
    fn of(i: &Inst, n: usize, float: bool) -> Halves {
        if i.format != crate::inst::Format::Vop3p {
            // v_pk_fmac_f16 has no modifiers.
            return Halves {
                shift: [0, 16],
                flip: [0, 0],
            };
        }
        let bit = |m: u8, v: u32| if m >> n & 1 != 0 { v } else { 0 };
        let sign = if float { 0x8000 } else { 0 };
        Halves {
            shift: [bit(i.op_sel, 16), bit(i.op_sel_hi, 16)],
            flip: [bit(i.neg, sign), bit(i.abs, sign)],
        }
    }

    #[inline(always)]
    fn get(self, x: u32, h: usize) -> u32 {
        (x >> self.shift[h] & 0xffff) ^ self.flip[h]
    }
}

/// Packed 16-bit with up to three sources; `f` returns 16 bits.
#[inline(always)]
unsafe fn packed16(
    w: &mut Wave,
    i: &Inst,
    (float, count, add_to): (bool, usize, bool),
    f: impl Fn(Half, [u32; 3]) -> u32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    let h = Half::of(w, i);
    let ty = if float { Ty::F16 } else { Ty::B32 };
    let [ha, hb, hc] = [0, 1, 2].map(|n| Halves::of(i, n, float));
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = plain32(w, i, i.src[0], ty, s.at(0));
        let b = plain32(w, i, i.src[1], ty, s.at(1));
        let c = if add_to {
            operand::lanes(w, w.vreg(i.vdst))
        } else if count > 2 {
            plain32(w, i, i.src[2], ty, s.at(2))
        } else {
            b
        };
        for (l, r) in r.iter_mut().enumerate() {
            let (x, y, z) = (at(a, l), at(b, l), at(c, l));
            let half = |n: usize| f(h, [ha.get(x, n), hb.get(y, n), hc.get(z, n)]) & 0xffff;
            *r = half(0) | half(1) << 16;
        }
    }
    put32(w, i, &r);
    Flow::Next
}

#[inline(always)]
unsafe fn halves2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((f32, f32)) -> f64,
) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        packed16(w, i, (true, 2, false), |h, x| {
            h.store(f((h.load(x[0]), h.load(x[1]))))
        })
    }
}

#[inline(always)]
unsafe fn halves3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((f32, f32, f32)) -> f64,
) -> Flow {
    let add_to = i.op == Op::V_PK_FMAC_F16;
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        packed16(w, i, (true, 3, add_to), |h, x| {
            h.store(f((h.load(x[0]), h.load(x[1]), h.load(x[2]))))
        })
    }
}

#[inline(always)]
unsafe fn half_bits2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32, u32)) -> u32,
) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        packed16(w, i, (true, 2, false), |h, x| {
            let r = f((h.load(x[0]).to_bits(), h.load(x[1]).to_bits()));
            let r = f32_to_f16(f32::from_bits(r));
            if i.has(flag::CLAMP) { h.clamped(r) } else { r }
        })
    }
}

#[inline(always)]
unsafe fn words3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32, u32, u32)) -> u32,
) -> Flow {
    let count = if matches!(i.op, Op::V_PK_MAD_I16 | Op::V_PK_MAD_U16) {
        3
    } else {
        2
    };
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { packed16(w, i, (false, count, false), |_, x| f((x[0], x[1], x[2]))) }
}

/// A source of `v_fma_mix`: f32, or the half that `op_sel` names.
#[inline(always)]
unsafe fn mixed_source(w: &Wave, i: &Inst, n: usize, buf: *mut u32) {
    let half = i.op_sel_hi >> n & 1 != 0;
    let shift = if i.op_sel >> n & 1 != 0 { 16 } else { 0 };
    let keep = if i.abs >> n & 1 != 0 { !(1 << 31) } else { !0 };
    let flip = if i.neg >> n & 1 != 0 { 1 << 31 } else { 0 };
    let flush = if half {
        w.mode & 0x40 == 0
    } else {
        w.mode & 0x10 == 0
    };
    // SAFETY: `buf` has 64 lanes.
    unsafe {
        let p = plain32(w, i, i.src[n], if half { Ty::F16 } else { Ty::B32 }, buf);
        for l in 0..LANES {
            let x = at(p, l);
            let v = if half {
                let bits = x >> shift & 0xffff;
                let tiny = bits & 0x7c00 == 0;
                f16_to_f32(if flush && tiny { bits & 0x8000 } else { bits }).to_bits()
            } else if flush {
                flush32(x)
            } else {
                x
            };
            buf.add(l).write((v & keep) ^ flip);
        }
    }
}

#[inline(always)]
unsafe fn mix(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((f32, f32, f32)) -> f32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    let single = i.op == Op::V_FMA_MIX_F32;
    let (h, mode) = (Half::of(w, i), w.mode);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let [a, b, c] = [s.at(0), s.at(1), s.at(2)];
        for (n, p) in [a, b, c].into_iter().enumerate() {
            mixed_source(w, i, n, p);
        }
        for (l, r) in r.iter_mut().enumerate() {
            let bits = [at(a, l), at(b, l), at(c, l)];
            let [x, y, z] = bits.map(f32::from_bits);
            *r = if single {
                let round = Round::from_mode(mode);
                let v = f((x, y, z));
                if v.is_nan() {
                    nan32(bits)
                } else if round != Round::Nearest {
                    directed32(Arith::Fma, bits, round).unwrap_or(v.to_bits())
                } else {
                    v.to_bits()
                }
            } else {
                h.store(fma_f16_odd(x, y, z))
            };
        }
    }
    if single {
        if needs_finish32(mode, i) {
            finish32(mode, i, &mut r);
        }
        put32(w, i, &r);
    } else {
        let mut to = *i;
        to.op_sel = if i.op == Op::V_FMA_MIXHI_F16 { 8 } else { 0 };
        put16_half(w, &to, &mut r);
    }
    Flow::Next
}

/// Integer dot products. `f` returns the exact sum of products; source 2 is added to it.
#[inline(always)]
unsafe fn dot(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    signed: bool,
    f: impl Fn((u32, u32)) -> i64,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    let add_to = matches!(
        i.op,
        Op::V_DOT2C_I32_I16 | Op::V_DOT4C_I32_I8 | Op::V_DOT8C_I32_I4
    );
    // SAFETY: sources are 64 lanes.
    unsafe {
        let (a, b, c) = if add_to {
            (
                operand::src32(w, i, 0, Ty::B32, s.at(0)),
                operand::src32(w, i, 1, Ty::B32, s.at(1)),
                operand::lanes(w, w.vreg(i.vdst)),
            )
        } else {
            (
                plain32(w, i, i.src[0], Ty::B32, s.at(0)),
                plain32(w, i, i.src[1], Ty::B32, s.at(1)),
                plain32(w, i, i.src[2], Ty::B32, s.at(2)),
            )
        };
        for (l, r) in r.iter_mut().enumerate() {
            let c = at(c, l);
            let add = if signed {
                i64::from(c as i32)
            } else {
                i64::from(c)
            };
            let sum = f((at(a, l), at(b, l))) + add;
            *r = if !i.has(flag::CLAMP) {
                sum as u32
            } else if signed {
                sum.clamp(i32::MIN.into(), i32::MAX.into()) as u32
            } else {
                sum.clamp(0, u32::MAX.into()) as u32
            };
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// `a.lo * b.lo + a.hi * b.hi + c` in f32.
#[inline(always)]
unsafe fn float_dot(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn(([f32; 2], [f32; 2], f32)) -> f32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    let add_to = i.op == Op::V_DOT2C_F32_F16;
    let (ha, hb) = (Halves::of(i, 0, true), Halves::of(i, 1, true));
    let sign = if !add_to && i.neg & 4 != 0 {
        1 << 31
    } else {
        0
    };
    // SAFETY: sources are 64 lanes.
    unsafe {
        let (a, b, c) = if add_to {
            (
                operand::src32(w, i, 0, Ty::F16, s.at(0)),
                operand::src32(w, i, 1, Ty::F16, s.at(1)),
                operand::lanes(w, w.vreg(i.vdst)),
            )
        } else {
            (
                plain32(w, i, i.src[0], Ty::F16, s.at(0)),
                plain32(w, i, i.src[1], Ty::F16, s.at(1)),
                plain32(w, i, i.src[2], Ty::F32, s.at(2)),
            )
        };
        for (l, r) in r.iter_mut().enumerate() {
            let (x, y) = (at(a, l), at(b, l));
            let v = f((
                [f16_to_f32(ha.get(x, 0)), f16_to_f32(ha.get(x, 1))],
                [f16_to_f32(hb.get(y, 0)), f16_to_f32(hb.get(y, 1))],
                f32::from_bits(at(c, l) ^ sign),
            ));
            *r = if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() };
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

#[inline(always)]
fn s16(x: u32) -> i32 {
    x as u16 as i16 as i32
}

/// Sum of the products of fields of `bits` bits.
#[inline(always)]
fn products(a: u32, b: u32, bits: u32, signed: bool) -> i64 {
    let mut sum = 0;
    for k in 0..32 / bits {
        let field = |x: u32| {
            let up = x << (32 - bits - k * bits);
            if signed {
                i64::from(up as i32 >> (32 - bits))
            } else {
                i64::from(up >> (32 - bits))
            }
        };
        sum += field(a) * field(b);
    }
    sum
}

ops! {
    fn sums32 via packed32_2(Arith::Add): (f32, f32) => f32 {
        V_PK_ADD_F32 = |a, b| a + b,
    }
    fn products32 via packed32_2(Arith::Mul): (f32, f32) => f32 {
        V_PK_MUL_F32 = |a, b| a * b,
    }
    fn fmas32 via packed32_3(Arith::Fma): (f32, f32, f32) => f32 {
        V_PK_FMA_F32 = |a, b, c| a.mul_add(b, c),
    }
    fn moves via move_pair(): (u32,) => u32 {
        V_PK_MOV_B32 = |a| a,
    }
    fn mixes via mix(): (f32, f32, f32) => f32 {
        V_FMA_MIX_F32 | V_FMA_MIXLO_F16 | V_FMA_MIXHI_F16 = |a, b, c| a.mul_add(b, c),
    }
}

ops! { rare
    fn halves via halves2(): (f32, f32) => f64 {
        V_PK_ADD_F16 = |a, b| f64::from(a) + f64::from(b),
        V_PK_MUL_F16 = |a, b| f64::from(a) * f64::from(b),
    }
    fn half_fmas via halves3(): (f32, f32, f32) => f64 {
        V_PK_FMA_F16 | V_PK_FMAC_F16 = |a, b, c| fma_f16_odd(a, b, c),
    }
    fn half_selects via half_bits2(): (u32, u32) => u32 {
        V_PK_MIN_F16 = |a, b| min32(a, b),
        V_PK_MAX_F16 = |a, b| max32(a, b),
    }
    fn words via words3(): (u32, u32, u32) => u32 {
        V_PK_ADD_U16 | V_PK_ADD_I16 = |a, b, _c| a.wrapping_add(b),
        V_PK_SUB_U16 | V_PK_SUB_I16 = |a, b, _c| a.wrapping_sub(b),
        V_PK_MUL_LO_U16 = |a, b, _c| a.wrapping_mul(b),
        V_PK_MAD_U16 | V_PK_MAD_I16 = |a, b, c| a.wrapping_mul(b).wrapping_add(c),
        V_PK_LSHLREV_B16 = |a, b, _c| b << (a & 15),
        V_PK_LSHRREV_B16 = |a, b, _c| b >> (a & 15),
        V_PK_ASHRREV_I16 = |a, b, _c| (s16(b) >> (a & 15)) as u32,
        V_PK_MIN_U16 = |a, b, _c| a.min(b),
        V_PK_MAX_U16 = |a, b, _c| a.max(b),
        V_PK_MIN_I16 = |a, b, _c| s16(a).min(s16(b)) as u32,
        V_PK_MAX_I16 = |a, b, _c| s16(a).max(s16(b)) as u32,
    }
    fn saturating via words3(): (u32, u32, u32) => u32 {
        V_PK_ADD_U16 = |a, b, _c| (a + b).min(0xffff),
        V_PK_SUB_U16 = |a, b, _c| a.saturating_sub(b),
        V_PK_ADD_I16 = |a, b, _c| (s16(a) + s16(b)).clamp(-32768, 32767) as u32,
        V_PK_SUB_I16 = |a, b, _c| (s16(a) - s16(b)).clamp(-32768, 32767) as u32,
        V_PK_MAD_U16 = |a, b, c| a.wrapping_mul(b).saturating_add(c).min(0xffff),
        V_PK_MAD_I16 = |a, b, c| (s16(a) * s16(b)).saturating_add(s16(c)).clamp(-32768, 32767) as u32,
    }
    fn signed_dots via dot(true): (u32, u32) => i64 {
        V_DOT2_I32_I16 | V_DOT2C_I32_I16 = |a, b| products(a, b, 16, true),
        V_DOT4_I32_I8 | V_DOT4C_I32_I8 = |a, b| products(a, b, 8, true),
        V_DOT8_I32_I4 | V_DOT8C_I32_I4 = |a, b| products(a, b, 4, true),
    }
    fn unsigned_dots via dot(false): (u32, u32) => i64 {
        V_DOT2_U32_U16 = |a, b| products(a, b, 16, false),
        V_DOT4_U32_U8 = |a, b| products(a, b, 8, false),
        V_DOT8_U32_U4 = |a, b| products(a, b, 4, false),
    }
    fn float_dots via float_dot(): ([f32; 2], [f32; 2], f32) => f32 {
        V_DOT2_F32_F16 | V_DOT2C_F32_F16 = |a, b, c| a[1].mul_add(b[1], a[0].mul_add(b[0], c)),
    }
}

fn dots(inst: &Inst, level: Level) -> Option<Exec> {
    signed_dots(inst, level).or_else(|| unsigned_dots(inst, level))
}
