//! MFMA with i8 inputs and i32 results, and MFMA with f64.

use super::{
    Addend, Env, Exec, Flow, Inst, Level, Operands, Wave, constant, register, row_place, settle,
    sparse,
};
use crate::exec::leveled;
use crate::inst::VGPR0;
use crate::op::Op::*;

/// The function that executes an i8 or f64 MFMA.
pub(super) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    Some(match inst.op {
        V_MFMA_I32_32X32X4_2B_I8 => i8_32x32x4_2b(level),
        V_MFMA_I32_16X16X4_4B_I8 => i8_16x16x4_4b(level),
        V_MFMA_I32_4X4X4_16B_I8 => i8_4x4x4_16b(level),
        V_MFMA_I32_32X32X16_I8 => i8_32x32x16(level),
        V_MFMA_I32_16X16X32_I8 => i8_16x16x32(level),
        V_SMFMAC_I32_16X16X64_I8 => sparse_i8_16x16x64(level),
        V_SMFMAC_I32_32X32X32_I8 => sparse_i8_32x32x32(level),
        V_MFMA_F64_16X16X4_F64 => f64_16x16x4(level),
        V_MFMA_F64_4X4X4_4B_F64 => f64_4x4x4_4b(level),
        _ => return None,
    })
}

leveled!(fn i8_32x32x4_2b = int8::<32, 2, 4>);
leveled!(fn i8_16x16x4_4b = int8::<16, 4, 4>);
leveled!(fn i8_4x4x4_16b = int8::<4, 16, 4>);
leveled!(fn i8_32x32x16 = int8::<32, 1, 8>);
leveled!(fn i8_16x16x32 = int8::<16, 1, 8>);
leveled!(fn sparse_i8_16x16x64 = sparse::int8::<16>);
leveled!(fn sparse_i8_32x32x32 = sparse::int8::<32>);
leveled!(fn f64_16x16x4 = double::<16>);
leveled!(fn f64_4x4x4_4b = double::<4>);

/// Computes i8 blocks; sums wrap.
#[inline(always)]
unsafe fn int8<const MN: usize, const BLOCKS: usize, const KV: usize>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let mut o = match Operands::new(w, inst, e, [KV / 4, KV / 4, MN * MN * BLOCKS / 64]) {
        Ok(o) => o,
        Err(flow) => return flow,
    };
    let value = |first: usize, j: usize, lane: usize| {
        i32::from((w.vgpr[first + j / 4].0[lane] >> (8 * (j % 4))) as i8)
    };
    let mut a = [[0i32; 64]; KV];
    let mut b = [[0i32; 64]; KV];
    for j in 0..KV {
        for lane in 0..64 {
            a[j][lane] = value(o.a, j, lane);
            b[j][lane] = value(o.b, j, 16 * o.b_group(lane / 16) + lane % 16);
        }
    }
    o.settle(w, MN * MN * BLOCKS / 64);
    for block in 0..BLOCKS {
        let a_block = o.a_block(block) % BLOCKS;
        for row in 0..MN {
            let (register, lane) = if MN == 4 {
                (row, 4 * block)
            } else {
                row_place::<MN>(block, row)
            };
            let mut acc: [u32; MN] = match o.c {
                Addend::Registers(c) => std::array::from_fn(|n| w.vgpr[c + register].0[lane + n]),
                Addend::Constant(bits) => [bits; MN],
            };
            for group in 0..64 / (MN * BLOCKS) {
                for j in 0..KV {
                    let x = a[j][MN * (a_block + BLOCKS * group) + row];
                    let y = &b[j][MN * (block + BLOCKS * group)..][..MN];
                    for (acc, y) in acc.iter_mut().zip(y) {
                        *acc = acc.wrapping_add((x * y) as u32);
                    }
                }
            }
            w.vgpr[o.d + register].0[lane..lane + MN].copy_from_slice(&acc);
        }
    }
    Flow::Next
}

/// Computes f64 blocks: one of 16x16 or four of 4x4, k = 4, a chain of fused multiply-adds.
#[inline(always)]
unsafe fn double<const MN: usize>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let pairs = if MN == 16 { 4 } else { 1 };
    let checked = (|| {
        let c = inst.src[2];
        let c = if c >= VGPR0 {
            Addend::Registers(register(w, e, c, 2 * pairs)?)
        } else {
            Addend::Constant(constant(c).ok_or_else(|| super::bad_register(e, c))?)
        };
        let a = register(w, e, inst.src[0], 2)?;
        let b = register(w, e, inst.src[1], 2)?;
        Ok((a, b, c, register(w, e, inst.vdst, 2 * pairs)?))
    })();
    let (a, b, mut c, d) = match checked {
        Ok(o) => o,
        Err(flow) => return flow,
    };
    // BLGP negates A, B, C.
    let negate = inst.ctrl >> 8;
    let sign = |bit: u32| u64::from(negate >> bit & 1) << 63;
    let load = |w: &Wave, first: usize, lane: usize, bit: u32| {
        let low = u64::from(w.vgpr[first].0[lane]);
        let high = u64::from(w.vgpr[first + 1].0[lane]);
        f64::from_bits((low | high << 32) ^ sign(bit))
    };
    let x: [f64; 64] = std::array::from_fn(|lane| load(w, a, lane, 0));
    let y: [f64; 64] = std::array::from_fn(|lane| load(w, b, lane, 1));
    settle(w, &mut c, d, 2 * pairs);
    for pair in 0..pairs {
        for lane in 0..64 {
            let (row, column) = (4 * pair + lane / 16, lane % 16);
            // 16x16: lanes of row `row`; 4x4: lanes of this row within the block of this column.
            let a_lane = if MN == 16 { row } else { (column & !3) + row };
            let mut acc = match c {
                Addend::Registers(c) => load(w, c + 2 * pair, lane, 2),
                Addend::Constant(bits) => {
                    f64::from_bits(constant64(inst.src[2], bits).to_bits() ^ sign(2))
                }
            };
            for k in 0..4 {
                acc = x[16 * k + a_lane].mul_add(y[16 * k + column], acc);
            }
            let bits = acc.to_bits();
            w.vgpr[d + 2 * pair].0[lane] = bits as u32;
            w.vgpr[d + 2 * pair + 1].0[lane] = (bits >> 32) as u32;
        }
    }
    Flow::Next
}

/// An inline constant as f64: floats by value, integers by bits, sign-extended.
#[inline(always)]
fn constant64(operand: u16, bits: u32) -> f64 {
    match operand {
        248 => std::f64::consts::FRAC_1_PI / 2.0,
        240..=247 => f64::from(f32::from_bits(bits)),
        _ => f64::from_bits(i64::from(bits as i32) as u64),
    }
}
