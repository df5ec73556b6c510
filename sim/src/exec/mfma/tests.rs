//! Compares MFMA with products in f64, at all levels and in both modes.

use super::*;
use crate::exec::MfmaMode;
use crate::inst::{AGPR0, Program};
use crate::memory::Memory;

/// A small generator (xorshift) so that the tests are reproducible.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

fn levels() -> impl Iterator<Item = Level> {
    [Level::Baseline, Level::Avx2, Level::Avx512]
        .into_iter()
        .filter(|l| *l <= Level::detect())
}

fn inst(op: Op) -> Inst {
    Inst {
        op,
        format: Format::Mai,
        size: 8,
        flags: 0,
        vdst: VGPR0 + 64,
        sdst: NONE,
        src: [VGPR0, AGPR0 + 8, VGPR0 + 64],
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

fn execute(w: &mut Wave, inst: &Inst, level: Level, mode: MfmaMode) -> (Flow, Option<FaultKind>) {
    let memory = Memory::default();
    let program = Program::default();
    let mut lds = [];
    let mut env = Env {
        mfma: mode,
        ..Env::new(&mut lds, &memory, &program)
    };
    let f = handler(inst, level).expect("implemented");
    // SAFETY: the level is supported and no memory is accessed.
    let flow = unsafe { f(w, inst, &mut env) };
    (flow, env.fault)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Type {
    F32,
    Xf32,
    F16,
    Bf16,
    Fp8,
    Bf8,
    I8,
}

impl Type {
    fn bits(self) -> usize {
        match self {
            Type::F32 | Type::Xf32 => 32,
            Type::F16 | Type::Bf16 => 16,
            _ => 8,
        }
    }
    /// A random value and its encoding.
    fn random(self, r: &mut Random) -> (f64, u32) {
        match self {
            Type::F32 => {
                let x = r.float();
                (f64::from(x), x.to_bits())
            }
            Type::Xf32 => {
                let x = r.float().to_bits();
                (f64::from(f32::from_bits(x & 0xffff_e000)), x)
            }
            Type::Bf16 => {
                let x = r.float().to_bits() >> 16;
                (f64::from(f32::from_bits(x << 16)), x)
            }
            Type::F16 => {
                let x = (r.next() as u16 & 0x83ff) | ((8 + r.next() as u16 % 8) << 10);
                (f64::from(vector::f16_to_f32(x)), u32::from(x))
            }
            // Exponents near 1, so that sums stay comparable.
            Type::Fp8 => {
                let (m, e, s) = (r.next() & 7, 4 + r.next() % 5, r.next() & 1);
                let x = (1.0 + m as f64 / 8.0) * 2f64.powi(e as i32 - 8);
                (if s == 1 { -x } else { x }, (s << 7 | e << 3 | m) as u32)
            }
            Type::Bf8 => {
                let (m, e, s) = (r.next() & 3, 12 + r.next() % 5, r.next() & 1);
                let x = (1.0 + m as f64 / 4.0) * 2f64.powi(e as i32 - 16);
                (if s == 1 { -x } else { x }, (s << 7 | e << 2 | m) as u32)
            }
            Type::I8 => {
                let x = r.next() as i8;
                (f64::from(x), u32::from(x as u8))
            }
        }
    }
}

/// Shapes: op, types of A and B, rows, blocks, values of k per lane.
const SHAPES: &[(Op, Type, Type, usize, usize, usize)] = {
    use Op::*;
    use Type::*;
    &[
        (V_MFMA_F32_32X32X1_2B_F32, F32, F32, 32, 2, 1),
        (V_MFMA_F32_16X16X1_4B_F32, F32, F32, 16, 4, 1),
        (V_MFMA_F32_4X4X1_16B_F32, F32, F32, 4, 16, 1),
        (V_MFMA_F32_32X32X2_F32, F32, F32, 32, 1, 1),
        (V_MFMA_F32_16X16X4_F32, F32, F32, 16, 1, 1),
        (V_MFMA_F32_32X32X4_XF32, Xf32, Xf32, 32, 1, 2),
        (V_MFMA_F32_16X16X8_XF32, Xf32, Xf32, 16, 1, 2),
        (V_MFMA_F32_32X32X4_2B_F16, F16, F16, 32, 2, 4),
        (V_MFMA_F32_16X16X4_4B_F16, F16, F16, 16, 4, 4),
        (V_MFMA_F32_4X4X4_16B_F16, F16, F16, 4, 16, 4),
        (V_MFMA_F32_32X32X8_F16, F16, F16, 32, 1, 4),
        (V_MFMA_F32_16X16X16_F16, F16, F16, 16, 1, 4),
        (V_MFMA_F32_32X32X4_2B_BF16, Bf16, Bf16, 32, 2, 4),
        (V_MFMA_F32_16X16X4_4B_BF16, Bf16, Bf16, 16, 4, 4),
        (V_MFMA_F32_4X4X4_16B_BF16, Bf16, Bf16, 4, 16, 4),
        (V_MFMA_F32_32X32X8_BF16, Bf16, Bf16, 32, 1, 4),
        (V_MFMA_F32_16X16X16_BF16, Bf16, Bf16, 16, 1, 4),
        (V_MFMA_F32_32X32X16_BF8_BF8, Bf8, Bf8, 32, 1, 8),
        (V_MFMA_F32_32X32X16_BF8_FP8, Bf8, Fp8, 32, 1, 8),
        (V_MFMA_F32_32X32X16_FP8_BF8, Fp8, Bf8, 32, 1, 8),
        (V_MFMA_F32_32X32X16_FP8_FP8, Fp8, Fp8, 32, 1, 8),
        (V_MFMA_F32_16X16X32_BF8_BF8, Bf8, Bf8, 16, 1, 8),
        (V_MFMA_F32_16X16X32_BF8_FP8, Bf8, Fp8, 16, 1, 8),
        (V_MFMA_F32_16X16X32_FP8_BF8, Fp8, Bf8, 16, 1, 8),
        (V_MFMA_F32_16X16X32_FP8_FP8, Fp8, Fp8, 16, 1, 8),
        (V_MFMA_I32_32X32X4_2B_I8, I8, I8, 32, 2, 4),
        (V_MFMA_I32_16X16X4_4B_I8, I8, I8, 16, 4, 4),
        (V_MFMA_I32_4X4X4_16B_I8, I8, I8, 4, 16, 4),
        (V_MFMA_I32_32X32X16_I8, I8, I8, 32, 1, 8),
        (V_MFMA_I32_16X16X32_I8, I8, I8, 16, 1, 8),
    ]
};

/// Lane and value index of A[block][row][k] (and of B, with columns for rows).
fn a_place(
    mn: usize,
    blocks: usize,
    kv: usize,
    block: usize,
    row: usize,
    k: usize,
) -> (usize, usize) {
    (row + mn * block + mn * blocks * (k / kv), k % kv)
}

/// Register and lane of D[block][row][column].
fn d_place(mn: usize, block: usize, row: usize, column: usize) -> (usize, usize) {
    match mn {
        32 => (
            16 * block + 4 * (row / 8) + row % 4,
            32 * (row / 4 % 2) + column,
        ),
        16 => (4 * block + row % 4, 16 * (row / 4) + column),
        _ => (row, 4 * block + column),
    }
}

type Matrices = (Wave, Vec<f64>, Vec<f64>, Vec<f64>);

/// A wave with random matrices, and A[b][m][k], B[b][k][n], C[b][m][n].
fn random_wave(shape: (Op, Type, Type, usize, usize, usize), seed: u64) -> Matrices {
    let (_, ta, tb, mn, blocks, kv) = shape;
    let k_count = kv * 64 / (mn * blocks);
    let mut r = Random(seed);
    let mut w = Wave::new(0);
    w.set_exec(0x1234);
    let mut a = vec![];
    let mut b = vec![];
    let mut c = vec![];
    let put = |w: &mut Wave, first: usize, t: Type, (lane, j): (usize, usize), bits: u32| {
        let per = 32 / t.bits();
        w.vgpr[first + j / per].0[lane] |= bits << (t.bits() * (j % per));
    };
    for block in 0..blocks {
        for row in 0..mn {
            for k in 0..k_count {
                let place = a_place(mn, blocks, kv, block, row, k);
                let (x, bits) = ta.random(&mut r);
                put(&mut w, 0, ta, place, bits);
                a.push(x);
                let (x, bits) = tb.random(&mut r);
                put(&mut w, 256 + 8, tb, place, bits);
                b.push(x);
            }
        }
    }
    for block in 0..blocks {
        for row in 0..mn {
            for column in 0..mn {
                let (register, lane) = d_place(mn, block, row, column);
                let (x, bits) = if ta == Type::I8 {
                    let x = r.next() as i32 >> 4;
                    (f64::from(x), x as u32)
                } else {
                    let x = r.float();
                    (f64::from(x), x.to_bits())
                };
                w.vgpr[64 + register].0[lane] = bits;
                c.push(x);
            }
        }
    }
    (w, a, b, c)
}

#[test]
fn every_shape_is_the_matrix_product() {
    for &shape in SHAPES {
        let (op, ta, _, mn, blocks, kv) = shape;
        let k_count = kv * 64 / (mn * blocks);
        for mode in [MfmaMode::Fast, MfmaMode::Exact] {
            let mut first: Option<Vec<u32>> = None;
            for level in levels() {
                let (mut w, a, b, c) = random_wave(shape, 77);
                assert_eq!(execute(&mut w, &inst(op), level, mode), (Flow::Next, None));
                let mut bits = vec![];
                for block in 0..blocks {
                    for row in 0..mn {
                        for column in 0..mn {
                            let at = (block * mn + row) * mn + column;
                            let mut exact = c[at];
                            let mut magnitude = c[at].abs();
                            for k in 0..k_count {
                                let p = a[(block * mn + row) * k_count + k]
                                    * b[(block * mn + column) * k_count + k];
                                exact += p;
                                magnitude += p.abs();
                            }
                            let (register, lane) = d_place(mn, block, row, column);
                            let got = w.vgpr[64 + register].0[lane];
                            bits.push(got);
                            if ta == Type::I8 {
                                assert_eq!(f64::from(got as i32), exact, "{op:?}");
                            } else {
                                let error = (f64::from(f32::from_bits(got)) - exact).abs();
                                let bound = magnitude * k_count as f64 * 2f64.powi(-23);
                                assert!(
                                    error <= bound,
                                    "{op:?} {mode:?} {level:?} [{block}][{row}][{column}]: {} instead of {exact}",
                                    f32::from_bits(got)
                                );
                            }
                        }
                    }
                }
                match &first {
                    None => first = Some(bits),
                    Some(first) => assert!(*first == bits, "{op:?} {level:?} differs"),
                }
            }
        }
    }
}

#[test]
#[allow(clippy::needless_range_loop)]
fn f64_shapes_are_the_matrix_product() {
    for level in levels() {
        for (op, mn, blocks, negate) in [
            (Op::V_MFMA_F64_16X16X4_F64, 16, 1, 0),
            (Op::V_MFMA_F64_16X16X4_F64, 16, 1, 5),
            (Op::V_MFMA_F64_4X4X4_4B_F64, 4, 4, 0),
            (Op::V_MFMA_F64_4X4X4_4B_F64, 4, 4, 2),
        ] {
            let mut r = Random(5);
            let mut w = Wave::new(0);
            let mut fill = |w: &mut Wave, register: usize| -> Vec<f64> {
                (0..64)
                    .map(|lane| {
                        let x = f64::from(r.float()) + f64::from(r.float()) * 1e-9;
                        w.vgpr[register].0[lane] = x.to_bits() as u32;
                        w.vgpr[register + 1].0[lane] = (x.to_bits() >> 32) as u32;
                        x
                    })
                    .collect()
            };
            let a = fill(&mut w, 0);
            let b = fill(&mut w, 256 + 8);
            let c: Vec<Vec<f64>> = (0..4).map(|p| fill(&mut w, 64 + 2 * p)).collect();
            let mut i = inst(op);
            i.ctrl = negate << 8;
            execute(&mut w, &i, level, MfmaMode::Fast);
            let sign = |bit: u32| if negate >> bit & 1 != 0 { -1.0 } else { 1.0 };
            for pair in 0..(if mn == 16 { 4 } else { 1 }) {
                for lane in 0..64 {
                    let (row, column, block) = if mn == 16 {
                        (4 * pair + lane / 16, lane % 16, 0)
                    } else {
                        (lane / 16, lane % 4, lane / 4 % 4)
                    };
                    let mut exact = sign(2) * c[pair][lane];
                    for k in 0..4 {
                        exact += sign(0)
                            * sign(1)
                            * a[row + mn * block + mn * blocks * k]
                            * b[column + mn * block + mn * blocks * k];
                    }
                    let got = f64::from_bits(
                        u64::from(w.vgpr[64 + 2 * pair].0[lane])
                            | u64::from(w.vgpr[64 + 2 * pair + 1].0[lane]) << 32,
                    );
                    assert!((got - exact).abs() < 1e-14, "{op:?} {got} {exact}");
                }
            }
        }
    }
}

#[test]
fn sparse_products() {
    use Type::*;
    for (op, t, mn, kv) in [
        (Op::V_SMFMAC_F32_16X16X32_F16, F16, 16, 4),
        (Op::V_SMFMAC_F32_32X32X16_BF16, Bf16, 32, 4),
        (Op::V_SMFMAC_F32_16X16X64_FP8_FP8, Fp8, 16, 8),
        (Op::V_SMFMAC_F32_32X32X32_BF8_BF8, Bf8, 32, 8),
        (Op::V_SMFMAC_I32_16X16X64_I8, I8, 16, 8),
        (Op::V_SMFMAC_I32_32X32X32_I8, I8, 32, 8),
    ] {
        for (level, mode) in levels().flat_map(|l| [(l, MfmaMode::Fast), (l, MfmaMode::Exact)]) {
            let mut r = Random(99);
            let mut w = Wave::new(0);
            let per = 32 / t.bits();
            let k_count = 2 * kv * 64 / mn;
            let mut a = vec![0f64; mn * k_count];
            let mut b = vec![0f64; mn * k_count];
            for lane in 0..64 {
                let (row, group) = (lane % mn, lane / mn);
                for j in 0..2 * kv {
                    let (x, bits) = t.random(&mut r);
                    w.vgpr[256 + 8 + j / per].0[lane] |= bits << (t.bits() * (j % per));
                    b[row * k_count + 2 * kv * group + j] = x;
                }
                // The second set of index bits.
                for pair in 0..kv / 2 {
                    let (first, second) = [(0, 1), (0, 3), (1, 2), (2, 3)][r.next() as usize % 4];
                    for (i, k) in [(2 * pair, first), (2 * pair + 1, second)] {
                        let (x, bits) = t.random(&mut r);
                        w.vgpr[i / per].0[lane] |= bits << (t.bits() * (i % per));
                        w.vgpr[40].0[lane] |= (k as u32) << (2 * kv + 2 * i);
                        a[row * k_count + 2 * kv * group + 4 * pair + k] = x;
                    }
                }
            }
            let mut i = inst(op);
            i.src[2] = VGPR0 + 40;
            i.ctrl = 1 << 4;
            assert_eq!(execute(&mut w, &i, level, mode), (Flow::Next, None));
            for row in 0..mn {
                for column in 0..mn {
                    let terms =
                        (0..k_count).map(|k| a[row * k_count + k] * b[column * k_count + k]);
                    let (exact, magnitude) =
                        terms.fold((0.0, 0.0), |(s, m), x| (s + x, m + x.abs()));
                    let (register, lane) = d_place(mn, 0, row, column);
                    let got = w.vgpr[64 + register].0[lane];
                    let got = if t == I8 {
                        f64::from(got as i32)
                    } else {
                        f64::from(f32::from_bits(got))
                    };
                    assert!(
                        (got - exact).abs() <= magnitude * 1e-5,
                        "{op:?} {level:?} {mode:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn constants_and_broadcasts() {
    for level in levels() {
        // C = 1.0, A and B zero.
        let mut w = Wave::new(0);
        let mut i = inst(Op::V_MFMA_F32_16X16X16_BF16);
        i.src[2] = 242;
        execute(&mut w, &i, level, MfmaMode::Fast);
        assert!(w.vgpr[64].0.iter().all(|x| *x == 1f32.to_bits()));
        i.src[2] = 128;
        execute(&mut w, &i, level, MfmaMode::Exact);
        assert!(w.vgpr[67].0.iter().all(|x| *x == 0));

        // Four 16x16x1 blocks; A of block 2 for blocks 2 and 3 (CBSZ 1, ABID 0), B of lanes 0..16 everywhere.
        let mut w = Wave::new(0);
        for lane in 0..64 {
            w.vgpr[0].0[lane] = (lane as f32).to_bits();
            w.vgpr[256 + 8].0[lane] = (1.0 + lane as f32).to_bits();
        }
        let mut i = inst(Op::V_MFMA_F32_16X16X1_4B_F32);
        i.src[2] = 128;
        i.ctrl = 1 | 4 << 8;
        execute(&mut w, &i, level, MfmaMode::Fast);
        for block in 0..4 {
            for row in 0..16 {
                for column in 0..16 {
                    let (register, lane) = d_place(16, block, row, column);
                    let expected = (16 * (block & !1) + row) as f32 * (1 + column) as f32;
                    assert_eq!(f32::from_bits(w.vgpr[64 + register].0[lane]), expected);
                }
            }
        }
    }
}

#[test]
fn d_may_overlap_c_in_part() {
    use crate::op::Op::*;
    let start = || {
        let mut random = Random(3);
        let mut w = Wave::new(0);
        for register in w.vgpr.iter_mut() {
            register.0 = std::array::from_fn(|_| random.float().to_bits() & 0xbf7f_3f3f);
        }
        w
    };
    let f64s = [V_MFMA_F64_16X16X4_F64, V_MFMA_F64_4X4X4_4B_F64];
    let modes = levels().flat_map(|l| [(l, MfmaMode::Fast), (l, MfmaMode::Exact)]);
    for (level, mode) in modes {
        for op in SHAPES.iter().map(|s| s.0).chain(f64s) {
            let run = |c: u16, d: u16| {
                let mut w = start();
                w.vgpr.copy_within(100..132, usize::from(c));
                let mut i = inst(op);
                (i.src[2], i.vdst) = (VGPR0 + c, VGPR0 + d);
                let done = execute(&mut w, &i, level, mode);
                assert!(matches!(done, (Flow::Next, None)), "{op:?}");
                let d = &w.vgpr[usize::from(d)..][..32];
                d.iter().map(|r| r.0).collect::<Vec<_>>()
            };
            let (before, apart) = (start(), run(60, 160));
            let written = (0..32)
                .take_while(|&r| apart[r] != before.vgpr[160 + r].0)
                .count();
            assert!(written >= 2, "{op:?}");
            for shift in 1..4 {
                let (up, down) = (run(60, 60 + shift), run(60 + shift, 60));
                assert!(apart[..written] == up[..written], "{op:?} +{shift}");
                assert!(apart[..written] == down[..written], "{op:?} -{shift}");
            }
        }
    }
}

#[test]
fn a_register_outside_the_file_is_a_fault() {
    let mut w = Wave::new(0);
    let mut i = inst(Op::V_MFMA_F32_32X32X8_F16);
    i.vdst = AGPR0 + 250;
    let (flow, fault) = execute(&mut w, &i, Level::detect(), MfmaMode::Fast);
    assert_eq!(flow, Flow::Fault);
    assert!(matches!(fault, Some(FaultKind::BadRegister { .. })));
}

/// Sixteen columns at once give the bits of one column at a time, also where exponents are far apart.
#[test]
fn exact_strips_equal_single_dots() {
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    for round in 0..2000 {
        let spread = [4, 40, 250][round % 3];
        let mut number = |mask: u32| {
            let exponent = 127u32
                .wrapping_add(next() % (2 * spread))
                .wrapping_sub(spread)
                & 255;
            let bits = (next() & 0x807f_ffff | exponent << 23) & mask;
            if next() % 16 == 0 {
                0.0
            } else {
                f32::from_bits(bits)
            }
        };
        let a: [f32; 16] = std::array::from_fn(|_| number(0xffff_0000));
        let b: [[f32; 16]; 16] =
            std::array::from_fn(|_| std::array::from_fn(|_| number(0xffff_0000)));
        let c: [f32; 16] = std::array::from_fn(|_| number(u32::MAX));
        let Some(strips) = exact::dot_strips::<Bf16>(&a, &b, c) else {
            continue;
        };
        for l in 0..16 {
            let y: [f32; 16] = std::array::from_fn(|k| b[k][l]);
            let single = exact::dot::<Bf16, Bf16>(&a, &y, c[l]);
            assert_eq!(
                strips[l].to_bits(),
                single.to_bits(),
                "round {round}: {a:?} {y:?} {}",
                c[l]
            );
        }
    }
}

#[test]
fn exact_mode_by_hand() {
    use exact::dot;
    // 1 + 2^-24 - 2^-24: the products are aligned to 2^0 with 24 fractional bits, so nothing is lost.
    let eps = 2f32.powi(-12);
    assert_eq!(
        dot::<Bf16, Bf16>(&[1.0, eps, -eps], &[1.0, eps, eps], 0.0),
        1.0
    );
    // 2^-25 is below the 24 fractional bits: both signs are truncated to zero.
    let half = 2f32.powi(-13);
    assert_eq!(dot::<Bf16, Bf16>(&[1.0, -eps], &[1.0, half], 0.0), 1.0);
    // A tiny negative sum of products beside an accumulator of 1 is rounded down to -2^-31; RNE gives 1.
    let tiny = 2f32.powi(-30);
    assert_eq!(dot::<Bf16, Bf16>(&[-tiny], &[tiny], 1.0), 1.0);
    // A negative accumulator of -2^-40 beside a sum of 1 is rounded down to -2^-24 (a tie, to even: 1 - 2^-24).
    assert_eq!(
        dot::<Bf16, Bf16>(&[1.0], &[1.0], -(2f32.powi(-40))),
        1.0 - 2f32.powi(-24)
    );
    // The same with a positive accumulator: lost.
    assert_eq!(dot::<Bf16, Bf16>(&[1.0], &[1.0], 2f32.powi(-40)), 1.0);
    // Groups of eight: 1 is rounded away by 2^30 within a group, but not in the next group.
    let big = [2f32.powi(15), 1.0, -(2f32.powi(15))];
    let unit = [2f32.powi(15), 1.0, 2f32.powi(15)];
    assert_eq!(dot::<F16, F16>(&big, &unit, 0.0), 0.0);
    let mut x = [0f32; 16];
    let mut y = [0f32; 16];
    (x[0], y[0], x[7], y[7], x[8], y[8]) = (big[0], unit[0], big[2], unit[2], 1.0, 1.0);
    assert_eq!(dot::<F16, F16>(&x, &y, 0.0), 1.0);
    // Special values.
    let inf = f32::INFINITY;
    assert!(dot::<F16, F16>(&[inf], &[0.0], 1.0).is_nan());
    assert!(dot::<F16, F16>(&[inf, 1.0], &[1.0, 1.0], -inf).is_nan());
    assert_eq!(dot::<F16, F16>(&[inf, 1.0], &[-1.0, 1.0], 3.0), -inf);
    // Subnormal results are kept.
    assert_eq!(
        dot::<Bf16, Bf16>(&[2f32.powi(-70)], &[2f32.powi(-70)], 0.0),
        2f32.powi(-140)
    );
}

/// `cargo test -p deltawave-sim --release -- --ignored mfma_speed --nocapture`
#[test]
#[ignore = "a measurement"]
fn mfma_speed() {
    for level in levels() {
        for &shape in SHAPES {
            let (mut w, ..) = random_wave(shape, 9);
            let i = inst(shape.0);
            let memory = Memory::default();
            let program = Program::default();
            let mut lds = [];
            for mode in [MfmaMode::Fast, MfmaMode::Exact] {
                let mut env = Env {
                    mfma: mode,
                    ..Env::new(&mut lds, &memory, &program)
                };
                let f = handler(&i, level).expect("implemented");
                let count = if mode == MfmaMode::Fast { 20_000 } else { 500 };
                let start = std::time::Instant::now();
                for _ in 0..count {
                    // SAFETY: the level is supported and no memory is accessed.
                    unsafe { std::hint::black_box(f)(&mut w, &i, &mut env) };
                }
                let ns = start.elapsed().as_nanos() as f64 / f64::from(count);
                println!("{level:?} {mode:?} {:?}: {ns:.0} ns", shape.0);
            }
        }
    }
}
