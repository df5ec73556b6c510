//! Operands: scalar reads, sources as 64 lanes, masked results, SDWA and DPP.
//!
//! A source is a pointer to 64 lanes: the register itself if nothing modifies it, otherwise a buffer of the caller that
//! is filled here. Each operation therefore needs one loop, whatever its sources.

use std::sync::LazyLock;

use std::mem::MaybeUninit;

use crate::exec::{PRIVATE_BASE_HI, SHARED_BASE_HI};
use crate::inst::{Inst, LITERAL, Operand, VGPR0, flag};
use crate::wave::{LANES, VReg, Wave};

/// Type of an operand's bits. Decides inline constants, modifiers and the effect of `op_sel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    /// 32 bits without a sign to negate.
    B32,
    /// Low 16 bits, integer.
    B16,
    /// f32.
    F32,
    /// f16 in the low 16 bits.
    F16,
    /// 64 bits, unsigned or untyped: a literal is zero-extended.
    B64,
    /// Signed 64 bits: a literal is sign-extended.
    I64,
    /// f64: a literal is the high half.
    F64,
}

/// For each byte of a mask: its bits as eight lanes, all ones where the bit is set.
static SPREAD: [[u32; 8]; 256] = {
    let mut t = [[0; 8]; 256];
    let mut k = 0;
    while k < 256 * 8 {
        if (k / 8) >> (k % 8) & 1 != 0 {
            t[k / 8][k % 8] = !0;
        }
        k += 1;
    }
    t
};

const fn inline_constants(half: bool) -> [u32; 128] {
    let mut t = [0u32; 128];
    let mut n = 0;
    while n <= 64 {
        t[n] = n as u32;
        n += 1;
    }
    n = 1;
    while n <= 16 {
        t[64 + n] = (n as u32).wrapping_neg();
        n += 1;
    }
    let f = if half {
        [
            0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118,
        ]
    } else {
        [
            0x3f00_0000,
            0xbf00_0000,
            0x3f80_0000,
            0xbf80_0000,
            0x4000_0000,
            0xc000_0000,
            0x4080_0000,
            0xc080_0000,
            0x3e22_f983,
        ]
    };
    n = 0;
    while n < 9 {
        t[240 - 128 + n] = f[n];
        n += 1;
    }
    t
}

static CONST32: [u32; 128] = inline_constants(false);
static CONST16: [u32; 128] = inline_constants(true);
static CONST_F64: [u64; 9] = [
    0x3fe0_0000_0000_0000,
    0xbfe0_0000_0000_0000,
    0x3ff0_0000_0000_0000,
    0xbff0_0000_0000_0000,
    0x4000_0000_0000_0000,
    0xc000_0000_0000_0000,
    0x4010_0000_0000_0000,
    0xc010_0000_0000_0000,
    0x3fc4_5f30_6dc9_c882,
];

/// Reads a scalar operand (below v0) as 32 bits.
#[inline(always)]
pub(crate) fn scalar32(w: &Wave, i: &Inst, s: Operand) -> u32 {
    match s {
        0..=127 => w.sgpr[s as usize],
        LITERAL => i.literal,
        251..=253 => condition(w, s),
        _ => CONST32[(s & 127) as usize],
    }
}

/// Reads a scalar operand of an f16 instruction: float constants are f16 in the low half, with zeros above.
#[inline(always)]
pub(crate) fn scalar16(w: &Wave, i: &Inst, s: Operand) -> u32 {
    match s {
        240..=248 => CONST16[(s & 127) as usize],
        _ => scalar32(w, i, s),
    }
}

/// vccz, execz, scc.
#[cold]
fn condition(w: &Wave, s: Operand) -> u32 {
    u32::from(match s {
        251 => w.vcc() == 0,
        252 => w.exec() == 0,
        _ => w.scc,
    })
}

/// Reads a scalar operand (below v0) as 64 bits.
#[inline(always)]
pub(crate) fn scalar64(w: &Wave, i: &Inst, s: Operand, ty: Ty) -> u64 {
    match s {
        0..=127 => w.s64(s),
        LITERAL => match ty {
            Ty::F64 => u64::from(i.literal) << 32,
            Ty::I64 => i.literal as i32 as i64 as u64,
            _ => u64::from(i.literal),
        },
        240..=248 => CONST_F64[(s - 240) as usize],
        235 => u64::from(SHARED_BASE_HI) << 32,
        236 => u64::from(SHARED_BASE_HI) << 32 | 0xffff_ffff,
        237 => u64::from(PRIVATE_BASE_HI) << 32,
        238 => u64::from(PRIVATE_BASE_HI) << 32 | 0xffff_ffff,
        _ => scalar32(w, i, s) as i32 as i64 as u64,
    }
}

/// Buffers for sources that must be materialised.
pub(crate) struct Scratch<const N: usize>(MaybeUninit<[VReg; N]>);

impl<const N: usize> Scratch<N> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Scratch(MaybeUninit::uninit())
    }

    /// The 64 lanes of buffer `n`.
    #[inline(always)]
    pub(crate) fn at(&mut self, n: usize) -> *mut u32 {
        assert!(n < N);
        // SAFETY: `n` is inside the array.
        unsafe { self.0.as_mut_ptr().cast::<u32>().add(n * LANES) }
    }
}

/// Fills 64 lanes with one value.
///
/// # Safety
/// `buf` points to 64 writable lanes.
#[inline(always)]
pub(crate) unsafe fn splat(buf: *mut u32, value: u32) {
    for l in 0..LANES {
        // SAFETY: `l` is below 64.
        unsafe { buf.add(l).write(value) };
    }
}

/// Pointer to a register of the unified file.
#[inline(always)]
pub(crate) fn lanes(w: &Wave, register: usize) -> *const u32 {
    w.vgpr[register & 511].0.as_ptr()
}

/// Whether a source or the destination is more than a plain 32-bit operand.
#[inline(always)]
pub(crate) fn modified(i: &Inst) -> bool {
    (i.flags & (flag::SDWA | flag::DPP)) != 0 || (i.neg | i.abs | i.op_sel) != 0
}

/// Source `n` as 64 lanes of 32 bits (16-bit types: in the low half, the high half unspecified).
///
/// # Safety
/// `buf` points to 64 writable lanes; the result is valid while it and `w` are.
#[inline(always)]
pub(crate) unsafe fn src32(w: &Wave, i: &Inst, n: usize, ty: Ty, buf: *mut u32) -> *const u32 {
    if modified(i) {
        // SAFETY: passed on.
        return unsafe { modified32(w, i, n, ty, buf) };
    }
    // SAFETY: passed on.
    unsafe { plain32(w, i, i.src[n], ty, buf) }
}

/// An operand as 64 lanes, without modifiers.
///
/// # Safety
/// As [`src32`].
#[inline(always)]
pub(crate) unsafe fn plain32(w: &Wave, i: &Inst, s: Operand, ty: Ty, buf: *mut u32) -> *const u32 {
    if s >= VGPR0 {
        return lanes(w, w.vreg(s));
    }
    let value = if ty == Ty::F16 {
        scalar16(w, i, s)
    } else {
        scalar32(w, i, s)
    };
    // SAFETY: passed on.
    unsafe { splat(buf, value) };
    buf
}

#[cold]
#[inline(never)]
unsafe fn modified32(w: &Wave, i: &Inst, n: usize, ty: Ty, buf: *mut u32) -> *const u32 {
    // SAFETY: `buf` holds 64 lanes; a plain operand is a register or that buffer.
    let out = unsafe {
        let p = plain32(w, i, i.src[n], ty, buf);
        if !std::ptr::eq(p, buf) {
            std::ptr::copy_nonoverlapping(p, buf, LANES);
        }
        &mut *buf.cast::<[u32; LANES]>()
    };
    if i.has(flag::DPP) && n == 0 {
        dpp_move(i.ctrl, w.exec(), out);
    }
    if i.has(flag::SDWA) && n < 2 {
        let c = i.ctrl >> (16 + 8 * n);
        let (sel, sext) = (c & 7, c & 8 != 0);
        for x in out.iter_mut() {
            *x = sdwa_select(*x, sel, sext);
        }
    }
    let bit = 1u8 << n;
    if matches!(ty, Ty::F16 | Ty::B16) && i.op_sel & bit != 0 && !i.has(flag::SDWA) {
        for x in out.iter_mut() {
            *x >>= 16;
        }
    }
    let sign = match ty {
        Ty::F32 => 1 << 31,
        Ty::F16 => 1 << 15,
        _ => 0,
    };
    let keep = if i.abs & bit != 0 { !sign } else { !0 };
    let flip = if i.neg & bit != 0 { sign } else { 0 };
    for x in out.iter_mut() {
        *x = (*x & keep) ^ flip;
    }
    buf
}

/// Source `n` as twice 64 lanes: low halves and high halves.
///
/// # Safety
/// `buf` must point to 128 writable lanes.
#[inline(always)]
pub(crate) unsafe fn src64(
    w: &Wave,
    i: &Inst,
    n: usize,
    ty: Ty,
    buf: *mut u32,
) -> (*const u32, *const u32) {
    let s = i.src[n];
    // SAFETY: `buf` has room for both halves.
    let p = unsafe { plain64(w, i, s, ty, buf) };
    if modified(i) {
        // SAFETY: passed on.
        unsafe { modified64(w, i, n, ty, p, buf) };
        // SAFETY: `buf` has 128 lanes.
        return unsafe { (buf.cast_const(), buf.add(LANES).cast_const()) };
    }
    p
}

/// A 64-bit operand without modifiers.
///
/// # Safety
/// As [`src64`].
#[inline(always)]
pub(crate) unsafe fn plain64(
    w: &Wave,
    i: &Inst,
    s: Operand,
    ty: Ty,
    buf: *mut u32,
) -> (*const u32, *const u32) {
    if s >= VGPR0 {
        let r = w.vreg(s);
        return (lanes(w, r), lanes(w, r + 1));
    }
    let v = scalar64(w, i, s, ty);
    // SAFETY: `buf` has 128 lanes.
    unsafe {
        splat(buf, v as u32);
        splat(buf.add(LANES), (v >> 32) as u32);
        (buf, buf.add(LANES))
    }
}

#[cold]
#[inline(never)]
unsafe fn modified64(
    w: &Wave,
    i: &Inst,
    n: usize,
    ty: Ty,
    p: (*const u32, *const u32),
    buf: *mut u32,
) {
    // SAFETY: both pointers have 64 lanes, `buf` 128; a source may be the buffer itself.
    let (lo, hi) = unsafe {
        std::ptr::copy(p.0, buf, LANES);
        std::ptr::copy(p.1, buf.add(LANES), LANES);
        (
            &mut *buf.cast::<[u32; LANES]>(),
            &mut *buf.add(LANES).cast::<[u32; LANES]>(),
        )
    };
    if i.has(flag::DPP) && n == 0 {
        dpp_move(i.ctrl, w.exec(), lo);
        dpp_move(i.ctrl, w.exec(), hi);
    }
    if ty == Ty::F64 {
        let keep = if i.abs >> n & 1 != 0 { !(1 << 31) } else { !0 };
        let flip = if i.neg >> n & 1 != 0 { 1 << 31 } else { 0 };
        for x in hi.iter_mut() {
            *x = (*x & keep) ^ flip;
        }
    }
}

/// A byte, word or dword of a source (SDWA select 0..=6).
fn sdwa_select(x: u32, sel: u32, sext: bool) -> u32 {
    let (shift, bits) = match sel {
        0..=3 => (8 * sel, 8),
        4 | 5 => (16 * (sel - 4), 16),
        _ => return x,
    };
    let up = x << (32 - bits - shift);
    if sext {
        (up as i32 >> (32 - bits)) as u32
    } else {
        up >> (32 - bits)
    }
}

/// Lane pattern of a DPP control: for each lane the lane that it reads (64: none), and a mask of the lanes that read
/// one.
struct DppPattern {
    from: [u8; LANES],
    valid: u64,
}

/// Patterns of all DPP controls, computed once.
static DPP_PATTERNS: LazyLock<Vec<DppPattern>> =
    LazyLock::new(|| (0..512).map(dpp_pattern).collect());

fn dpp_pattern(how: u32) -> DppPattern {
    let n = (how & 15) as i32;
    let mut pattern = DppPattern {
        from: [64; LANES],
        valid: 0,
    };
    for l in 0..LANES as i32 {
        let (row, at) = (l & !15, l & 15);
        let in_row = |x: i32| if (0..16).contains(&x) { row + x } else { 64 };
        let f = match how {
            0..=0xff => (l & !3) + (how >> (2 * (l & 3)) & 3) as i32,
            0x101..=0x10f => in_row(at + n),
            0x111..=0x11f => in_row(at - n),
            0x121..=0x12f => row + ((at - n) & 15),
            0x130 => l + 1,
            0x134 => (l + 1) & 63,
            0x138 if l > 0 => l - 1,
            0x13c => (l - 1) & 63,
            0x140 => row + 15 - at,
            0x141 => (l & !7) + 7 - (l & 7),
            0x142 if l >= 16 => row - 1,
            0x143 if l >= 32 => 31,
            0x150..=0x15f => row + n,
            _ => 64,
        };
        if f < 64 {
            pattern.from[l as usize] = f as u8;
            pattern.valid |= 1 << l;
        }
    }
    pattern
}

fn pattern_of(ctrl: u32) -> &'static DppPattern {
    &DPP_PATTERNS[(ctrl >> 8 & 0x1ff) as usize]
}

/// For each lane the lane that a DPP control reads; 64: none.
pub(crate) fn dpp_sources(ctrl: u32) -> &'static [u8; LANES] {
    &pattern_of(ctrl).from
}

/// Lanes of the pattern whose source lane is active.
fn dpp_valid(pattern: &DppPattern, exec: u64) -> u64 {
    if exec == !0 {
        return pattern.valid;
    }
    let source_on = |l: &usize| exec.checked_shr(pattern.from[*l].into()).unwrap_or(0) & 1 != 0;
    (0..LANES)
        .filter(source_on)
        .fold(0, |mask, l| mask | 1 << l)
}

/// Moves lanes as DPP does. A lane reads 0 if it has no source or its source is inactive.
pub(crate) fn dpp_move(ctrl: u32, exec: u64, x: &mut [u32; LANES]) {
    let mut padded = [0u32; LANES + 1];
    for l in 0..LANES {
        padded[l] = if exec >> l & 1 != 0 { x[l] } else { 0 };
    }
    for (x, f) in x.iter_mut().zip(&pattern_of(ctrl).from) {
        *x = padded[usize::from(*f).min(LANES)];
    }
}

/// Active lanes that a DPP instruction writes.
fn dpp_written(ctrl: u32, exec: u64) -> u64 {
    let (banks, rows) = (ctrl >> 24 & 15, ctrl >> 28 & 15);
    let spread = |bits: u32, lanes: u32| {
        (0..4u32)
            .filter(|i| bits >> i & 1 != 0)
            .fold(0u64, |m, i| m | (((1u64 << lanes) - 1) << (i * lanes)))
    };
    let on = spread(rows, 16) & (spread(banks, 4) * 0x0001_0001_0001_0001);
    if ctrl >> 19 & 1 != 0 {
        return on;
    }
    on & dpp_valid(pattern_of(ctrl), exec)
}

/// The lanes that an instruction writes.
#[inline(always)]
pub(crate) fn written_lanes(w: &Wave, i: &Inst) -> u64 {
    if i.has(flag::DPP) {
        return dpp_written(i.ctrl, w.exec()) & w.exec();
    }
    w.exec()
}

/// Writes the lanes of `mask` of a register.
#[inline(always)]
pub(crate) fn blend(w: &mut Wave, register: usize, r: &[u32; LANES], mask: u64) {
    let d = &mut w.vgpr[register & 511].0;
    if mask == !0 {
        *d = *r;
        return;
    }
    let m = spread_mask(mask);
    for l in 0..LANES {
        d[l] = r[l] & m[l] | d[l] & !m[l];
    }
}

/// Writes a 32-bit result to `vdst` under EXEC, DPP masks and SDWA's destination select.
#[inline(always)]
pub(crate) fn put32(w: &mut Wave, i: &Inst, r: &[u32; LANES]) {
    if i.flags & (flag::SDWA | flag::DPP) != 0 {
        put_modified(w, i, r);
        return;
    }
    let (register, mask) = (w.vreg(i.vdst), w.exec());
    blend(w, register, r, mask);
}

#[cold]
#[inline(never)]
fn put_modified(w: &mut Wave, i: &Inst, r: &[u32; LANES]) {
    let (register, mask) = (w.vreg(i.vdst), written_lanes(w, i));
    if !i.has(flag::SDWA) {
        blend(w, register, r, mask);
        return;
    }
    let (sel, unused) = (i.ctrl >> 8 & 7, i.ctrl >> 11 & 3);
    let (shift, bits) = match sel {
        0..=3 => (8 * sel, 8),
        4 | 5 => (16 * (sel - 4), 16),
        _ => (0, 32),
    };
    let field = (u32::MAX >> (32 - bits)) << shift;
    let old = w.vgpr[register & 511].0;
    let mut out = [0; LANES];
    for l in 0..LANES {
        let placed = r[l] << shift & field;
        out[l] = match unused {
            1 => ((placed << (32 - bits - shift)) as i32 >> (32 - bits - shift)) as u32,
            2 => old[l] & !field | placed,
            _ => placed,
        };
    }
    blend(w, register, &out, mask);
}

/// Writes a 16-bit result to the half of `vdst` that `op_sel` names and keeps the other half.
#[inline(always)]
pub(crate) fn put16_half(w: &mut Wave, i: &Inst, r: &mut [u32; LANES]) {
    let old = &w.vgpr[w.vreg(i.vdst) & 511].0;
    if i.op_sel & 8 != 0 {
        for l in 0..LANES {
            r[l] = r[l] << 16 | old[l] & 0xffff;
        }
    } else {
        for l in 0..LANES {
            r[l] = r[l] & 0xffff | old[l] & 0xffff_0000;
        }
    }
    put32(w, i, r);
}

/// Writes a 64-bit result to `vdst` and its successor.
#[inline(always)]
pub(crate) fn put64(w: &mut Wave, i: &Inst, lo: &[u32; LANES], hi: &[u32; LANES]) {
    let mask = written_lanes(w, i);
    let register = w.vreg(i.vdst);
    blend(w, register, lo, mask);
    blend(w, register + 1, hi, mask);
}

/// Packs 64 truth values, each 0 or 1, into a mask.
#[inline(always)]
pub(crate) fn pack_mask(b: &[u8; LANES]) -> u64 {
    let mut m = 0;
    for k in 0..8 {
        let mut x = [0; 8];
        x.copy_from_slice(&b[8 * k..8 * k + 8]);
        let byte = u64::from_le_bytes(x).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        m |= byte << (8 * k);
    }
    m
}

/// Spreads a mask over lanes: all ones where the bit is set.
#[inline(always)]
pub(crate) fn spread_mask(mask: u64) -> [u32; LANES] {
    let mut r = [0; LANES];
    for (chunk, byte) in r.chunks_exact_mut(8).zip(mask.to_le_bytes()) {
        chunk.copy_from_slice(&SPREAD[byte as usize]);
    }
    r
}
