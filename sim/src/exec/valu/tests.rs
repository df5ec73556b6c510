//! Compares each operation with plain scalar arithmetic. Cases: all lanes on with plain registers; some lanes off, a
//! scalar operand and modifiers; the same bits at every level.

use crate::exec::{Env, Flow, Level, prepare};
use crate::inst::{EXEC, Format, Inst, LITERAL, NONE, Operand, Program, VCC, VGPR0, flag};
use crate::memory::Memory;
use crate::op::Op;
use crate::wave::{LANES, Wave};

const V: Operand = VGPR0;
const SOME: u64 = 0xf0f0_1234_8000_0001;

/// An instruction with nothing special about it.
pub(super) fn inst(op: Op, format: Format, vdst: Operand, src: &[Operand]) -> Inst {
    let mut s = [NONE; 3];
    s[..src.len()].copy_from_slice(src);
    Inst {
        op,
        format,
        size: 8,
        flags: 0,
        vdst,
        sdst: NONE,
        src: s,
        imm: 0,
        literal: 0,
        ctrl: 0,
        target: u32::MAX,
        neg: 0,
        abs: 0,
        op_sel: 0,
        op_sel_hi: 0,
        omod: 0,
    }
}

pub(super) fn wave() -> Wave {
    let mut w = Wave::new(0);
    w.mode = 0x3f0;
    w
}

/// Executes one instruction at every level and checks that they agree.
pub(super) fn run(i: &Inst, w: &Wave) -> Wave {
    let mut first: Option<Wave> = None;
    for level in [Level::Baseline, Level::Avx2, Level::Avx512] {
        if level > Level::detect() {
            continue;
        }
        let mut w = copy(w);
        assert_eq!(step(i, &mut w, level), Flow::Next, "{i:?}");
        if let Some(f) = &first {
            assert!(f.sgpr == w.sgpr && f.scc == w.scc, "{i:?} at {level:?}");
            for (r, (x, y)) in f.vgpr.iter().zip(w.vgpr.iter()).enumerate() {
                assert_eq!(x.0, y.0, "v{r} of {i:?} at {level:?}");
            }
        } else {
            first = Some(w);
        }
    }
    first.expect("a level")
}

fn copy(w: &Wave) -> Wave {
    let mut c = Wave::new(w.id);
    c.vgpr.copy_from_slice(&w.vgpr[..]);
    c.sgpr = w.sgpr;
    (c.scc, c.mode, c.pc) = (w.scc, w.mode, w.pc);
    c
}

pub(super) fn step(i: &Inst, w: &mut Wave, level: Level) -> Flow {
    let memory = Memory::new(vec![]);
    let program = Program::default();
    let mut env = Env {
        xcc: 3,
        ..Env::new(&mut [], &memory, &program)
    };
    // SAFETY: the level is one of this host's; the memory is empty.
    unsafe { prepare(i, level)(w, i, &mut env) }
}

const EDGES: [u32; 24] = [
    0,
    1,
    2,
    31,
    32,
    0x7f,
    0x80,
    0xffff,
    0x8000,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0x8000_0001,
    0xffff_ffff,
    0x3f80_0000,
    0xbf80_0000,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_0001,
    0x7f80_0001,
    0x0080_0000,
    0x7f7f_ffff,
    0x4b80_0001,
    0xc0a0_0000,
];

/// Three registers of values: edges against edges, then pseudo-random ones.
#[allow(clippy::needless_range_loop)]
fn rounds() -> Vec<[[u32; LANES]; 3]> {
    let mut x = 0x1234_5678u32;
    let mut random = move || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        x ^ x >> 15
    };
    (0..30)
        .map(|n| {
            let mut v = [[0; LANES]; 3];
            for l in 0..LANES {
                let k = n * LANES + l;
                v[0][l] = if n < 20 { EDGES[k % 24] } else { random() };
                v[1][l] = if n < 18 { EDGES[k / 24 % 24] } else { random() };
                v[2][l] = if n < 10 { EDGES[k / 5 % 24] } else { random() };
            }
            v
        })
        .collect()
}

/// Compares an operation on 32-bit values with `f`; NaNs are compared as bits too.
fn check(op: Op, count: usize, f: impl Fn(u32, u32, u32) -> u32) {
    let format = if count == 3 {
        Format::Vop3
    } else {
        Format::Vop2
    };
    let sources = [V + 1, V + 2, V + 3];
    for v in rounds() {
        for exec in [!0, SOME] {
            for scalar in [None, Some(0), Some(count - 1)] {
                for alias in [9, 1] {
                    let mut w = wave();
                    for (n, v) in v.iter().enumerate() {
                        w.vgpr[n + 1].0 = *v;
                    }
                    w.vgpr[9].0 = [0xdead_beef; LANES];
                    w.set_exec(exec);
                    let mut i = inst(op, format, V + alias, &sources[..count]);
                    if let Some(n) = scalar {
                        i.src[n] = 7;
                        w.sgpr[7] = v[n][5];
                    }
                    let r = run(&i, &w);
                    for l in 0..LANES {
                        let mut a = [v[0][l], v[1][l], v[2][l]];
                        if let Some(n) = scalar {
                            a[n] = v[n][5];
                        }
                        let old = w.vgpr[alias as usize].0[l];
                        let want = if exec >> l & 1 != 0 {
                            f(a[0], a[1], a[2])
                        } else {
                            old
                        };
                        let got = r.vgpr[alias as usize].0[l];
                        assert_eq!(got, want, "{op:?} {a:x?} lane {l}: {got:x} not {want:x}");
                    }
                }
            }
        }
    }
}

fn f(x: u32) -> f32 {
    f32::from_bits(x)
}

/// The result of an f32 operation, a NaN chosen as the machine does.
fn nan(v: f32, s: &[u32]) -> u32 {
    if !v.is_nan() {
        return v.to_bits();
    }
    s.iter()
        .find(|x| f(**x).is_nan())
        .map_or(0x7fc0_0000, |x| x | 0x40_0000)
}

#[test]
fn integers() {
    check(Op::V_MOV_B32, 1, |a, _, _| a);
    check(Op::V_NOT_B32, 1, |a, _, _| !a);
    check(Op::V_FFBH_U32, 1, |a, _, _| {
        a.checked_ilog2().map_or(!0, |k| 31 - k)
    });
    check(Op::V_ADD_U32, 2, |a, b, _| a.wrapping_add(b));
    check(Op::V_SUBREV_U32, 2, |a, b, _| b.wrapping_sub(a));
    check(Op::V_LSHLREV_B32, 2, |a, b, _| b.wrapping_shl(a));
    check(Op::V_ASHRREV_I32, 2, |a, b, _| {
        (b as i32).wrapping_shr(a) as u32
    });
    check(Op::V_MUL_LO_U32, 2, |a, b, _| a.wrapping_mul(b));
    check(Op::V_MUL_HI_I32, 2, |a, b, _| {
        ((a as i32 as i128 * b as i32 as i128) >> 32) as u32
    });
    check(Op::V_MUL_HI_U32, 2, |a, b, _| {
        ((a as u128 * b as u128) >> 32) as u32
    });
    check(Op::V_MAX_I32, 2, |a, b, _| (a as i32).max(b as i32) as u32);
    check(Op::V_ADD3_U32, 3, |a, b, c| {
        a.wrapping_add(b).wrapping_add(c)
    });
    check(Op::V_LSHL_ADD_U32, 3, |a, b, c| {
        a.wrapping_shl(b).wrapping_add(c)
    });
    check(Op::V_BFI_B32, 3, |a, b, c| c ^ (a & (b ^ c)));
    check(Op::V_ALIGNBIT_B32, 3, |a, b, c| {
        (((a as u64) << 32 | b as u64) >> (c % 32)) as u32
    });
    check(Op::V_BFE_U32, 3, |a, b, c| {
        (0..c % 32).fold(0, |r, k| {
            r | (a.checked_shr(b % 32 + k).unwrap_or(0) & 1) << k
        })
    });
    check(Op::V_BFE_I32, 3, |a, b, c| {
        let (o, n) = (b % 32, c % 32);
        let wide = a as i32 as i64;
        if n == 0 {
            0
        } else {
            (((wide >> o) << (64 - n)) >> (64 - n)) as u32
        }
    });
    check(Op::V_MED3_I32, 3, |a, b, c| {
        let mut v = [a as i32, b as i32, c as i32];
        v.sort();
        v[1] as u32
    });
    check(Op::V_PERM_B32, 3, |a, b, c| {
        let bytes = [b.to_le_bytes(), a.to_le_bytes()].concat();
        u32::from_le_bytes(c.to_le_bytes().map(|s| match s {
            0..=7 => bytes[s as usize],
            8..=11 => ((bytes[2 * (s as usize - 8) + 1] as i8) >> 7) as u8,
            12 => 0,
            _ => 255,
        }))
    });
    check(Op::V_MAD_I32_I24, 3, |a, b, c| {
        let s = |x: u32| ((x << 8) as i32 >> 8) as i64;
        (s(a) * s(b) + c as i64) as u32
    });
    check(Op::V_XAD_U32, 3, |a, b, c| (a ^ b).wrapping_add(c));
    check(Op::V_SAD_U8, 3, |a, b, c| {
        let sum: u32 = (0..4)
            .map(|k| u32::from(a.to_le_bytes()[k].abs_diff(b.to_le_bytes()[k])))
            .sum();
        sum.wrapping_add(c)
    });
}

#[test]
fn floats() {
    check(Op::V_ADD_F32, 2, |a, b, _| nan(f(a) + f(b), &[a, b]));
    check(Op::V_SUBREV_F32, 2, |a, b, _| nan(f(b) - f(a), &[a, b]));
    check(Op::V_MUL_F32, 2, |a, b, _| nan(f(a) * f(b), &[a, b]));
    check(Op::V_FMA_F32, 3, |a, b, c| {
        nan(f(a).mul_add(f(b), f(c)), &[a, b, c])
    });
    check(Op::V_FLOOR_F32, 1, |a, _, _| nan(f(a).floor(), &[a]));
    check(Op::V_RNDNE_F32, 1, |a, _, _| {
        nan(f(a).round_ties_even(), &[a])
    });
    check(Op::V_CVT_I32_F32, 1, |a, _, _| f(a) as i32 as u32);
    check(Op::V_CVT_U32_F32, 1, |a, _, _| f(a) as u32);
    check(Op::V_CVT_F32_I32, 1, |a, _, _| (a as i32 as f32).to_bits());
    check(Op::V_CVT_F32_U32, 1, |a, _, _| (a as f32).to_bits());
    check(Op::V_CVT_F32_UBYTE2, 1, |a, _, _| {
        (a.to_le_bytes()[2] as f32).to_bits()
    });
    check(Op::V_CVT_F16_F32, 1, |a, _, _| {
        half::f16::from_f32(f(a)).to_bits().into()
    });
    check(Op::V_CVT_F32_F16, 1, |a, _, _| {
        let v = half::f16::from_bits(a as u16);
        let quiet = if v.is_nan() { 0x40_0000 } else { 0 };
        v.to_f32().to_bits() | quiet
    });
    for larger in [false, true] {
        let op = if larger { Op::V_MAX_F32 } else { Op::V_MIN_F32 };
        check(op, 2, |a, b, _| {
            let signalling = |x: u32| f(x).is_nan() && x & 0x40_0000 == 0;
            match (f(a).is_nan(), f(b).is_nan()) {
                _ if signalling(a) => a | 0x40_0000,
                _ if signalling(b) => b | 0x40_0000,
                (true, _) => b,
                (_, true) => a,
                _ if (f(a).total_cmp(&f(b)).is_gt()) == larger => a,
                _ => b,
            }
        });
    }
}

/// Units in the last place between two results.
fn ulps(got: u32, want: f64) -> f64 {
    let (g, w) = (f64::from(f(got)), want as f32);
    if f(got).is_nan() && want.is_nan() || f64::from(w) == g {
        return 0.0;
    }
    let ulp = f64::from(w.abs().next_up()) - f64::from(w.abs());
    (g - want).abs() / ulp.max(1e-45)
}

#[test]
#[allow(clippy::needless_range_loop)]
fn transcendental_functions_are_within_one_ulp() {
    let flush = |x: f64| {
        if x.abs() < f64::from(f32::MIN_POSITIVE) {
            0.0 * x
        } else {
            x
        }
    };
    type Function = fn(f64) -> f64;
    let cases: [(Op, Function); 5] = [
        (Op::V_EXP_F32, f64::exp2),
        (Op::V_LOG_F32, f64::log2),
        (Op::V_RCP_F32, f64::recip),
        (Op::V_RSQ_F32, |x| 1.0 / x.sqrt()),
        (Op::V_SQRT_F32, f64::sqrt),
    ];
    for (op, reference) in cases {
        let mut values = rounds();
        for (n, v) in values.iter_mut().enumerate().skip(10) {
            for (l, x) in v[0].iter_mut().enumerate() {
                let t = (n * LANES + l) as f32;
                *x = (t * 0.173 - 150.0).to_bits();
                if op != Op::V_EXP_F32 {
                    *x = (1.0 + (t - 1200.0) * 3e-4).to_bits();
                }
            }
        }
        for v in values {
            let mut w = wave();
            w.vgpr[1].0 = v[0];
            let r = run(&inst(op, Format::Vop1, V + 9, &[V + 1]), &w);
            for l in 0..LANES {
                let want = flush(reference(flush(f64::from(f(v[0][l])))));
                let got = r.vgpr[9].0[l];
                let e = ulps(got, want);
                assert!(
                    e <= 1.0,
                    "{op:?} of {:e}: {:e} not {want:e}",
                    f(v[0][l]),
                    f(got)
                );
            }
        }
    }
}

#[test]
fn modifiers() {
    let mut w = wave();
    for l in 0..LANES {
        w.vgpr[1].0[l] = (l as f32 - 30.5).to_bits();
        w.vgpr[2].0[l] = (0.25 * l as f32).to_bits();
    }
    let mut i = inst(Op::V_ADD_F32, Format::Vop3, V + 3, &[V + 1, V + 2]);
    (i.neg, i.abs) = (2, 1);
    i.flags = flag::CLAMP;
    let r = run(&i, &w);
    for l in 0..LANES {
        let want = ((l as f32 - 30.5).abs() - 0.25 * l as f32).clamp(0.0, 1.0);
        assert_eq!(f(r.vgpr[3].0[l]), want);
    }
    // Output modifiers work where denormals are flushed only.
    let mut i = inst(Op::V_MUL_F32, Format::Vop3, V + 3, &[V + 1, 242]);
    i.omod = 1;
    assert_eq!(f(run(&i, &w).vgpr[3].0[0]), -30.5);
    w.mode = 0x3c0;
    assert_eq!(f(run(&i, &w).vgpr[3].0[0]), -61.0);
    // Flushed denormals, in and out.
    w.vgpr[1].0 = [1; LANES];
    assert_eq!(run(&i, &w).vgpr[3].0[0], 0);
    w.mode = 0x3f0;
    i.omod = 0;
    assert_eq!(run(&i, &w).vgpr[3].0[0], 1);
}

#[test]
fn rounding_modes() {
    let mut w = wave();
    w.vgpr[1].0 = [1.0f32.to_bits(); LANES];
    w.vgpr[2].0 = [1e-20f32.to_bits(); LANES];
    let i = inst(Op::V_ADD_F32, Format::Vop2, V + 3, &[V + 1, V + 2]);
    for (mode, want) in [(0, 1.0), (1, 1.0f32.next_up()), (2, 1.0), (3, 1.0)] {
        w.mode = 0x3f0 | mode;
        assert_eq!(f(run(&i, &w).vgpr[3].0[7]), want);
    }
    w.vgpr[1].0 = [(-1.0f32).to_bits(); LANES];
    let i = inst(Op::V_SUB_F32, Format::Vop2, V + 3, &[V + 1, V + 2]);
    w.mode = 0x3f2;
    assert_eq!(f(run(&i, &w).vgpr[3].0[7]), (-1.0f32).next_down());
}

#[test]
fn comparisons_write_masks() {
    for v in rounds() {
        for exec in [!0, SOME] {
            let mut w = wave();
            (w.vgpr[1].0, w.vgpr[2].0) = (v[0], v[1]);
            w.set_exec(exec);
            type Compare = fn(u32, u32) -> bool;
            let cases: [(Op, Compare); 8] = [
                (Op::V_CMP_LT_F32, |a, b| f(a) < f(b)),
                (Op::V_CMP_NGE_F32, |a, b| {
                    f(a) < f(b) || f(a).is_nan() || f(b).is_nan()
                }),
                (Op::V_CMP_LG_F32, |a, b| f(a) < f(b) || f(a) > f(b)),
                (Op::V_CMP_U_F32, |a, b| f(a).is_nan() || f(b).is_nan()),
                (Op::V_CMP_GT_I32, |a, b| a as i32 > b as i32),
                (Op::V_CMP_NE_U32, |a, b| a != b),
                (Op::V_CMP_LE_U16, |a, b| a as u16 <= b as u16),
                (Op::V_CMPX_EQ_U32, |a, b| a == b),
            ];
            for (op, reference) in cases {
                let mut i = inst(op, Format::Vop3, NONE, &[V + 1, V + 2]);
                i.sdst = 10;
                let r = run(&i, &w);
                let want = (0..LANES).fold(0, |m, l| {
                    m | u64::from(exec >> l & 1 != 0 && reference(v[0][l], v[1][l])) << l
                });
                assert_eq!(r.s64(10), want, "{op:?}");
                let exec_want = if op == Op::V_CMPX_EQ_U32 { want } else { exec };
                assert_eq!(r.s64(EXEC), exec_want);
            }
        }
    }
    let mut w = wave();
    let classes = [
        0x7f80_0001,
        0x7fc0_0000,
        0xff80_0000,
        0xbf80_0000,
        0x8000_0001,
        0x8000_0000,
        0,
        1,
        0x3f80_0000,
        0x7f80_0000,
    ];
    w.vgpr[1].0[..10].copy_from_slice(&classes);
    for bit in 0..10 {
        w.sgpr[4] = 1 << bit;
        let mut i = inst(Op::V_CMP_CLASS_F32, Format::Vop3, NONE, &[V + 1, 4]);
        i.sdst = VCC;
        let zeros = if bit == 6 { !0x3ff } else { 0 };
        assert_eq!(run(&i, &w).vcc(), 1 << bit | zeros);
    }
}

#[test]
fn select_and_carry() {
    let mut w = wave();
    for l in 0..LANES {
        (w.vgpr[1].0[l], w.vgpr[2].0[l]) = (u32::MAX - l as u32, 2 * l as u32);
    }
    w.set_s64(20, SOME);
    let i = inst(Op::V_CNDMASK_B32, Format::Vop3, V + 3, &[V + 1, V + 2, 20]);
    let r = run(&i, &w);
    for l in 0..LANES {
        let from = if SOME >> l & 1 != 0 { 2 } else { 1 };
        assert_eq!(r.vgpr[3].0[l], w.vgpr[from].0[l]);
    }
    let mut i = inst(Op::V_ADDC_CO_U32, Format::Vop3, V + 3, &[V + 1, V + 2, 20]);
    i.sdst = 22;
    let r = run(&i, &w);
    for l in 0..LANES {
        let sum = u64::from(u32::MAX) - l as u64 + 2 * l as u64 + (SOME >> l & 1);
        assert_eq!(r.vgpr[3].0[l], sum as u32);
        assert_eq!(r.s64(22) >> l & 1, sum >> 32);
    }
    let mut i = inst(Op::V_SUBREV_CO_U32, Format::Vop2, V + 3, &[V + 1, V + 2]);
    i.sdst = VCC;
    let r = run(&i, &w);
    for l in 0..LANES {
        let (d, borrow) = w.vgpr[2].0[l].overflowing_sub(w.vgpr[1].0[l]);
        assert_eq!((r.vgpr[3].0[l], r.vcc() >> l & 1 != 0), (d, borrow));
    }
    let mut i = inst(
        Op::V_MAD_U64_U32,
        Format::Vop3,
        V + 4,
        &[V + 1, V + 2, V + 6],
    );
    i.sdst = 22;
    w.vgpr[7].0 = [5; LANES];
    let r = run(&i, &w);
    for l in 0..LANES {
        let want = u64::from(w.vgpr[1].0[l]) * u64::from(w.vgpr[2].0[l]) + (5 << 32);
        let got = u64::from(r.vgpr[4].0[l]) | u64::from(r.vgpr[5].0[l]) << 32;
        assert_eq!(got, want);
    }
}

/// The sum of 65 bits of the instruction set's document: 64 bits of result, and bit 64 as carry.
#[test]
fn multiply_adds_of_64_bits_carry_bit_64() {
    let factors: [u32; 8] = [0, 1, 2, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, !0 - 1, !0];
    let addends: [u64; 8] = [
        0,
        1,
        0x7fff_ffff_ffff_ffff,
        0x8000_0000_0000_0000,
        0x8000_0000_0000_0001,
        0xc000_0000_0000_0000,
        0x4000_0000_0000_0000,
        !0,
    ];
    for c in addends {
        let mut w = wave();
        for (l, (a, b)) in (0..LANES).map(|l| (l, (factors[l / 8], factors[l % 8]))) {
            (w.vgpr[1].0[l], w.vgpr[2].0[l]) = (a, b);
            (w.vgpr[6].0[l], w.vgpr[7].0[l]) = (c as u32, (c >> 32) as u32);
        }
        for op in [Op::V_MAD_U64_U32, Op::V_MAD_I64_I32] {
            let mut i = inst(op, Format::Vop3, V + 4, &[V + 1, V + 2, V + 6]);
            i.sdst = 22;
            let r = run(&i, &w);
            for l in 0..LANES {
                let (a, b) = (w.vgpr[1].0[l], w.vgpr[2].0[l]);
                let sum = if op == Op::V_MAD_U64_U32 {
                    i128::from(a) * i128::from(b) + i128::from(c)
                } else {
                    i128::from(a as i32) * i128::from(b as i32) + i128::from(c as i64)
                };
                let got = u64::from(r.vgpr[4].0[l]) | u64::from(r.vgpr[5].0[l]) << 32;
                let carry = r.s64(22) >> l & 1;
                let want = (sum as u64, (sum >> 64) as u64 & 1);
                assert_eq!((got, carry), want, "{op:?} {a:#x} * {b:#x} + {c:#x}");
            }
        }
    }
}

#[test]
fn packed_f32_selects_and_negates_halves() {
    let mut w = wave();
    for l in 0..LANES {
        for (r, v) in [(2, 1.0), (3, 2.0), (4, 10.0), (5, 20.0)] {
            w.vgpr[r].0[l] = (v + l as f32).to_bits();
        }
    }
    let mut i = inst(Op::V_PK_ADD_F32, Format::Vop3p, V + 6, &[V + 2, V + 4]);
    (i.op_sel, i.op_sel_hi, i.neg, i.abs) = (1, 2, 2, 1);
    let r = run(&i, &w);
    for l in 0..LANES {
        let x = l as f32;
        assert_eq!(f(r.vgpr[6].0[l]), (2.0 + x) - (10.0 + x));
        assert_eq!(f(r.vgpr[7].0[l]), -(1.0 + x) + (20.0 + x));
    }
    let mut i = inst(Op::V_PK_FMA_F32, Format::Vop3p, V + 6, &[V + 2, 30, 242]);
    i.op_sel_hi = 3;
    (w.sgpr[30], w.sgpr[31]) = (2.0f32.to_bits(), 3.0f32.to_bits());
    let r = run(&i, &w);
    assert_eq!(f(r.vgpr[6].0[1]), 2.0 * 2.0 + 1.0);
    assert_eq!(f(r.vgpr[7].0[1]), 3.0 * 3.0 + 1.0);
    let mut i = inst(Op::V_PK_MOV_B32, Format::Vop3p, V + 6, &[V + 2, V + 4]);
    (i.op_sel, i.op_sel_hi) = (2, 1);
    let r = run(&i, &w);
    assert_eq!(f(r.vgpr[6].0[1]), 2.0);
    assert_eq!(f(r.vgpr[7].0[1]), 21.0);
}

#[test]
fn packed_f16_and_dots() {
    use half::f16;
    let pair = |a: f32, b: f32| {
        u32::from(f16::from_f32(a).to_bits()) | u32::from(f16::from_f32(b).to_bits()) << 16
    };
    let mut w = wave();
    w.vgpr[1].0 = [pair(1.5, -2.0); LANES];
    w.vgpr[2].0 = [pair(4.0, 0.5); LANES];
    let mut i = inst(
        Op::V_PK_FMA_F16,
        Format::Vop3p,
        V + 3,
        &[V + 1, V + 2, V + 2],
    );
    i.op_sel_hi = 7;
    i.neg = 1;
    assert_eq!(run(&i, &w).vgpr[3].0[0], pair(-2.0, -0.5));
    let mut i = inst(Op::V_PK_ADD_U16, Format::Vop3p, V + 3, &[V + 1, 193]);
    i.op_sel_hi = 3;
    let x = pair(1.5, -2.0);
    assert_eq!(run(&i, &w).vgpr[3].0[0], x.wrapping_sub(0x0001_0001));
    let i = inst(Op::V_FMA_MIX_F32, Format::Vop3p, V + 3, &[V + 1, 242, 128]);
    let mut mixed = i;
    (mixed.op_sel, mixed.op_sel_hi) = (1, 1);
    assert_eq!(f(run(&mixed, &w).vgpr[3].0[0]), -2.0);
    let mut i = inst(
        Op::V_DOT2_F32_F16,
        Format::Vop3p,
        V + 3,
        &[V + 1, V + 2, 242],
    );
    i.op_sel_hi = 7;
    assert_eq!(f(run(&i, &w).vgpr[3].0[0]), 6.0);
    w.vgpr[1].0 = [0x80ff_7f01; LANES];
    w.vgpr[2].0 = [0x0202_0202; LANES];
    let i = inst(
        Op::V_DOT4_I32_I8,
        Format::Vop3p,
        V + 3,
        &[V + 1, V + 2, 193],
    );
    assert_eq!(run(&i, &w).vgpr[3].0[0] as i32, 2 * (1 + 127 - 1 - 128) - 1);
}

/// The second dword of a DPP instruction.
fn dpp(control: u32, bound_zero: bool, rows: u32, banks: u32) -> u32 {
    control << 8 | u32::from(bound_zero) << 19 | banks << 24 | rows << 28
}

#[test]
fn dpp_moves_lanes() {
    let mut w = wave();
    for l in 0..LANES {
        w.vgpr[1].0[l] = 100 + l as u32;
        w.vgpr[2].0[l] = 7;
    }
    let mut i = inst(Op::V_MOV_B32, Format::Vop1, V + 2, &[V + 1]);
    i.flags = flag::DPP;
    type From = fn(usize) -> Option<usize>;
    let cases: [(u32, From); 10] = [
        (0b10_11_00_01, |l| Some((l & !3) + [1, 0, 3, 2][l & 3])),
        (0x101, |l| (l % 16 < 15).then_some(l + 1)),
        (0x118, |l| (l % 16 >= 8).then(|| l - 8)),
        (0x124, |l| Some((l & !15) + (l + 12) % 16)),
        (0x138, |l| l.checked_sub(1)),
        (0x140, |l| Some((l & !15) + 15 - l % 16)),
        (0x141, |l| Some((l & !7) + 7 - l % 8)),
        (0x142, |l| (l >= 16).then(|| (l & !15) - 1)),
        (0x143, |l| (l >= 32).then_some(31)),
        (0x153, |l| Some((l & !15) + 3)),
    ];
    for (control, from) in cases {
        for zero in [false, true] {
            i.ctrl = dpp(control, zero, 15, 15);
            let r = run(&i, &w);
            for l in 0..LANES {
                let want = from(l).map_or(if zero { 0 } else { 7 }, |k| 100 + k as u32);
                assert_eq!(r.vgpr[2].0[l], want, "{control:x} lane {l}");
            }
        }
    }
    // A lane that is off is not read, rows and banks that are off are not written.
    i.ctrl = dpp(0x101, false, 0b0001, 0b0001);
    w.set_exec(!4);
    let r = run(&i, &w).vgpr[2].0;
    assert_eq!(r[..6], [101, 7, 7, 104, 7, 7]);
}

#[test]
fn sdwa_selects() {
    let mut w = wave();
    w.vgpr[1].0 = [0x8070_6050; LANES];
    w.vgpr[2].0 = [0x1111_1111; LANES];
    let mut i = inst(Op::V_ADD_U32, Format::Vop2, V + 2, &[V + 1, V + 1]);
    i.flags = flag::SDWA;
    // Word 1 and sign-extended byte 3, into the whole register.
    i.ctrl = 6 << 8 | 5 << 16 | (3 | 8) << 24;
    assert_eq!(run(&i, &w).vgpr[2].0[3], 0x8070 - 0x80);
    // Into byte 1, the rest preserved, sign-extended, padded.
    for (unused, want) in [(2, 0x1111_a011), (1, 0xffff_a000), (0, 0x0000_a000)] {
        i.ctrl = 1 << 8 | unused << 11;
        assert_eq!(run(&i, &w).vgpr[2].0[3], want);
    }
}

/// A 16-bit result has zeros above it in the whole register (LLVM's `zeroesHigh16BitsOfDest` for gfx9). In a selected
/// part of a register, SDWA defines the other bits.
#[test]
fn sdwa_shifts_of_16_bits() {
    let old = 0x1234_5678;
    for value in [
        0u32,
        1,
        0x7fff,
        0x8000,
        0x8001,
        0xffff,
        0x8000_7fff,
        0x7fff_8000,
        !0,
    ] {
        for by in [0u32, 1, 7, 8, 15, 16, 17, 31, !0] {
            let mut w = wave();
            w.vgpr[1].0 = [by; LANES];
            w.vgpr[2].0 = [value; LANES];
            w.vgpr[3].0 = [old; LANES];
            // The operand after the source's select and sign extension, and its low half.
            for (select, operand) in [
                (6, value as i16),
                (4, value as i16),
                (5, (value >> 16) as i16),
                (0, value as u8 as i16),
                (8, value as i8 as i16),
                (3 | 8, (value >> 24) as i8 as i16),
            ] {
                let result = u32::from((operand >> (by & 15)) as u16);
                let byte = (result & 0xff) << 8;
                for (sel, unused, want) in [
                    (6, 0, result),
                    (6, 1, result),
                    (6, 2, result),
                    (4, 0, result),
                    (4, 1, result as u16 as i16 as u32),
                    (4, 2, old & 0xffff_0000 | result),
                    (5, 0, result << 16),
                    (5, 1, result << 16),
                    (5, 2, old & 0xffff | result << 16),
                    (1, 0, byte),
                    (1, 1, byte as u16 as i16 as u32),
                    (1, 2, old & 0xffff_00ff | byte),
                ] {
                    let mut i = inst(Op::V_ASHRREV_I16, Format::Vop2, V + 3, &[V + 1, V + 2]);
                    i.flags = flag::SDWA;
                    i.ctrl = sel << 8 | unused << 11 | 6 << 16 | select << 24;
                    let got = run(&i, &w).vgpr[3].0[5];
                    assert_eq!(got, want, "{value:#x} >> {by}, {sel} {unused} {select}");
                }
            }
        }
    }
}

#[test]
fn lanes() {
    let mut w = wave();
    for l in 0..LANES {
        w.vgpr[1].0[l] = 100 + l as u32;
    }
    let mut i = inst(Op::V_READFIRSTLANE_B32, Format::Vop1, NONE, &[V + 1]);
    i.sdst = 5;
    for (exec, want) in [(!0, 100), (0x50, 104), (0, 100)] {
        w.set_exec(exec);
        assert_eq!(run(&i, &w).sgpr[5], want);
    }
    let mut i = inst(Op::V_READLANE_B32, Format::Vop3, NONE, &[V + 1, 6]);
    i.sdst = 5;
    w.sgpr[6] = 64 + 9;
    assert_eq!(run(&i, &w).sgpr[5], 109);
    let i = inst(Op::V_WRITELANE_B32, Format::Vop3, V + 1, &[6, 128 + 2]);
    assert_eq!(run(&i, &w).vgpr[1].0[2], 73);
    w.set_exec(!0);
    let lo = run(
        &inst(Op::V_MBCNT_LO_U32_B32, Format::Vop3, V + 2, &[193, 128]),
        &w,
    );
    let hi = run(
        &inst(Op::V_MBCNT_HI_U32_B32, Format::Vop3, V + 2, &[193, V + 2]),
        &lo,
    );
    for l in 0..LANES {
        assert_eq!(hi.vgpr[2].0[l], l as u32);
    }
}

/// Division as compilers expand it.
#[test]
fn division_steps() {
    let values: [f32; 14] = [
        1.0,
        3.0,
        -7.5,
        1e-38,
        1e-42,
        3e38,
        -1e38,
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NAN,
        1.7e-30,
        5e20,
        0.1,
    ];
    for n in values {
        for d in values {
            let mut w = wave();
            w.vgpr[1].0 = [n.to_bits(); LANES];
            w.vgpr[2].0 = [d.to_bits(); LANES];
            let mut step = |op, dst: u16, src: &[u16], neg| {
                let mut i = inst(op, Format::Vop3, V + dst, src);
                i.neg = neg;
                if op == Op::V_DIV_SCALE_F32 {
                    i.sdst = VCC;
                }
                w = run(&i, &w);
            };
            step(Op::V_DIV_SCALE_F32, 3, &[V + 2, V + 2, V + 1], 0);
            step(Op::V_DIV_SCALE_F32, 4, &[V + 1, V + 2, V + 1], 0);
            step(Op::V_RCP_F32, 5, &[V + 3], 0);
            step(Op::V_FMA_F32, 6, &[V + 3, V + 5, 242], 1);
            step(Op::V_FMA_F32, 5, &[V + 6, V + 5, V + 5], 0);
            step(Op::V_MUL_F32, 6, &[V + 4, V + 5], 0);
            step(Op::V_FMA_F32, 7, &[V + 3, V + 6, V + 4], 1);
            step(Op::V_FMA_F32, 6, &[V + 7, V + 5, V + 6], 0);
            step(Op::V_FMA_F32, 7, &[V + 3, V + 6, V + 4], 1);
            step(Op::V_DIV_FMAS_F32, 6, &[V + 7, V + 5, V + 6], 0);
            step(Op::V_DIV_FIXUP_F32, 6, &[V + 6, V + 2, V + 1], 0);
            let (got, want) = (f(w.vgpr[6].0[40]), n / d);
            assert!(
                got == want || got.is_nan() && want.is_nan(),
                "{n:e} / {d:e}: {got:e}"
            );
        }
    }
}

#[test]
fn doubles() {
    let values = [
        1.5,
        -2.25e300,
        1e-310,
        0.0,
        -0.0,
        f64::INFINITY,
        f64::NAN,
        0.1,
    ];
    for a in values {
        for b in values {
            let mut w = wave();
            for (r, x) in [(2, a), (4, b)] {
                w.vgpr[r].0 = [x.to_bits() as u32; LANES];
                w.vgpr[r + 1].0 = [(x.to_bits() >> 32) as u32; LANES];
            }
            let get = |op, src: &[u16]| {
                let r = run(&inst(op, Format::Vop3, V + 6, src), &w);
                f64::from_bits(u64::from(r.vgpr[6].0[9]) | u64::from(r.vgpr[7].0[9]) << 32)
            };
            let same = |x: f64, y: f64| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            assert!(same(get(Op::V_ADD_F64, &[V + 2, V + 4]), a + b));
            assert!(same(get(Op::V_MUL_F64, &[V + 2, V + 4]), a * b));
            assert!(same(
                get(Op::V_FMA_F64, &[V + 2, V + 4, 242]),
                a.mul_add(b, 1.0)
            ));
            assert!(same(get(Op::V_LDEXP_F64, &[V + 2, 128 + 3]), a * 8.0));
            assert!(same(get(Op::V_RNDNE_F64, &[V + 2]), a.round_ties_even()));
        }
    }
    let mut w = wave();
    w.vgpr[2].0 = [7; LANES];
    let mut i = inst(
        Op::V_LSHL_ADD_U64,
        Format::Vop3,
        V + 6,
        &[V + 2, 128 + 4, 12],
    );
    w.set_s64(12, 0x1_ffff_ffff);
    let r = run(&i, &w);
    assert_eq!((r.vgpr[6].0[0], r.vgpr[7].0[0]), (0x6f, 2));
    i = inst(Op::V_ADD_F64, Format::Vop3, V + 6, &[LITERAL, 242]);
    i.literal = 0x4000_0000;
    let r = run(&i, &w);
    assert_eq!((r.vgpr[6].0[0], r.vgpr[7].0[0]), (0, 0x4008_0000));
}

/// Prints nanoseconds per instruction: `cargo test -p deltawave-sim --lib speed -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn speed() {
    for (op, format, n) in [
        (Op::V_MOV_B32, Format::Vop1, 1),
        (Op::V_ADD_U32, Format::Vop2, 2),
        (Op::V_MUL_F32, Format::Vop2, 2),
        (Op::V_FMA_F32, Format::Vop3, 3),
        (Op::V_PK_FMA_F32, Format::Vop3p, 3),
        (Op::V_MAX_F32, Format::Vop2, 2),
        (Op::V_EXP_F32, Format::Vop1, 1),
        (Op::V_CMP_GT_I32, Format::Vopc, 2),
        (Op::V_CNDMASK_B32, Format::Vop2, 2),
        (Op::V_PERM_B32, Format::Vop3, 3),
        (Op::V_LSHL_ADD_U64, Format::Vop3, 3),
        (Op::V_CVT_F32_U32, Format::Vop1, 1),
        (Op::V_CVT_F16_F32, Format::Vop1, 1),
        (Op::V_MUL_LO_U32, Format::Vop3, 2),
    ] {
        for (exec, scalar) in [(!0, false), (!0, true), (SOME, false)] {
            let mut w = wave();
            w.set_exec(exec);
            let i = {
                let mut i = inst(op, format, V + 9, &[V + 1, V + 3, V + 5][..n]);
                if scalar {
                    i.src[0] = 4;
                }
                if op == Op::V_CNDMASK_B32 {
                    i.src[2] = VCC;
                }
                i
            };
            let memory = Memory::new(vec![]);
            let program = Program::default();
            let mut env = Env::new(&mut [], &memory, &program);
            let exec_fn = prepare(&i, Level::detect());
            let start = std::time::Instant::now();
            const N: u32 = 1_000_000;
            for _ in 0..N {
                let i = std::hint::black_box(&i);
                // SAFETY: the level is this host's; the memory is empty.
                unsafe { exec_fn(&mut w, i, &mut env) };
                if op == Op::V_CMP_GT_I32 {
                    w.set_exec(exec);
                }
            }
            let ns = start.elapsed().as_nanos() as f64 / f64::from(N);
            println!("{op:?} exec {exec:x} scalar {scalar}: {ns:.1} ns");
        }
    }
}
