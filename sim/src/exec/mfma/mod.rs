//! Matrix fused multiply-add: `D = A * B + C` over blocks held across the lanes of a wave.
//!
//! MFMA ignores EXEC and MODE. Subnormal inputs and results are kept. Lane layouts, for square
//! blocks of `MN` rows, `BLOCKS` of them, and `KV` consecutive k per lane (lane l, value j):
//!
//! * A: row `l % MN`, block `l / MN % BLOCKS`, k = `KV * (l / (MN * BLOCKS)) + j`;
//! * B: the same with columns for rows;
//! * C and D, 32x32: register `16 * block + i`, row `8 * (i / 4) + 4 * (l / 32) + i % 4`, column `l % 32`;
//! * C and D, 16x16: register `4 * block + i`, row `4 * (l / 16) + i`, column `l % 16`
//!   (f64: register pair i, row `4 * i + l / 16`);
//! * C and D, 4x4: register = row, block `l / 4`, column `l % 4` (f64: row `l / 16`, block `l / 4 % 4`).
//!
//! Blocks of A may be broadcast: CBSZ makes groups of `2^CBSZ` blocks read the block ABID of their group.
//! BLGP rearranges the four groups of sixteen lanes of B; for f64 its bits negate A, B and C.

mod exact;
mod fast;
mod input;
mod integer;
mod sparse;
mod vector;

use super::{Env, Exec, Flow, Level, MfmaMode};
use crate::fault::FaultKind;
use crate::inst::{Format, Inst, NONE, Operand, VGPR0};
use crate::op::Op;
use crate::wave::{VReg, Wave};
use input::{Bf8, Bf16, F16, F32, Fp8, Input, Xf32};
pub(super) use vector::f16_to_f32;
use vector::{Lanes16, Portable};

/// The function that executes an MFMA instruction.
pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    if inst.format != Format::Mai && inst.format != Format::Vop3p {
        return None;
    }
    use Op::*;
    Some(match inst.op {
        V_MFMA_F32_32X32X1_2B_F32 => float::<F32, F32, 32, 2, 1>(level),
        V_MFMA_F32_16X16X1_4B_F32 => float::<F32, F32, 16, 4, 1>(level),
        V_MFMA_F32_4X4X1_16B_F32 => small::<F32, 1>(level),
        V_MFMA_F32_32X32X2_F32 => float::<F32, F32, 32, 1, 1>(level),
        V_MFMA_F32_16X16X4_F32 => float::<F32, F32, 16, 1, 1>(level),
        V_MFMA_F32_32X32X4_XF32 => float::<Xf32, Xf32, 32, 1, 2>(level),
        V_MFMA_F32_16X16X8_XF32 => float::<Xf32, Xf32, 16, 1, 2>(level),
        V_MFMA_F32_32X32X4_2B_F16 => float::<F16, F16, 32, 2, 4>(level),
        V_MFMA_F32_16X16X4_4B_F16 => float::<F16, F16, 16, 4, 4>(level),
        V_MFMA_F32_4X4X4_16B_F16 => small::<F16, 4>(level),
        V_MFMA_F32_32X32X8_F16 => float::<F16, F16, 32, 1, 4>(level),
        V_MFMA_F32_16X16X16_F16 => float::<F16, F16, 16, 1, 4>(level),
        V_MFMA_F32_32X32X4_2B_BF16 => float::<Bf16, Bf16, 32, 2, 4>(level),
        V_MFMA_F32_16X16X4_4B_BF16 => float::<Bf16, Bf16, 16, 4, 4>(level),
        V_MFMA_F32_4X4X4_16B_BF16 => small::<Bf16, 4>(level),
        V_MFMA_F32_32X32X8_BF16 => float::<Bf16, Bf16, 32, 1, 4>(level),
        V_MFMA_F32_16X16X16_BF16 => float::<Bf16, Bf16, 16, 1, 4>(level),
        V_MFMA_F32_32X32X16_BF8_BF8 => float::<Bf8, Bf8, 32, 1, 8>(level),
        V_MFMA_F32_32X32X16_BF8_FP8 => float::<Bf8, Fp8, 32, 1, 8>(level),
        V_MFMA_F32_32X32X16_FP8_BF8 => float::<Fp8, Bf8, 32, 1, 8>(level),
        V_MFMA_F32_32X32X16_FP8_FP8 => float::<Fp8, Fp8, 32, 1, 8>(level),
        V_MFMA_F32_16X16X32_BF8_BF8 => float::<Bf8, Bf8, 16, 1, 8>(level),
        V_MFMA_F32_16X16X32_BF8_FP8 => float::<Bf8, Fp8, 16, 1, 8>(level),
        V_MFMA_F32_16X16X32_FP8_BF8 => float::<Fp8, Bf8, 16, 1, 8>(level),
        V_MFMA_F32_16X16X32_FP8_FP8 => float::<Fp8, Fp8, 16, 1, 8>(level),
        V_SMFMAC_F32_16X16X32_F16 => sparse::<F16, F16, 16, 4, 8>(level),
        V_SMFMAC_F32_32X32X16_F16 => sparse::<F16, F16, 32, 4, 8>(level),
        V_SMFMAC_F32_16X16X32_BF16 => sparse::<Bf16, Bf16, 16, 4, 8>(level),
        V_SMFMAC_F32_32X32X16_BF16 => sparse::<Bf16, Bf16, 32, 4, 8>(level),
        V_SMFMAC_F32_16X16X64_BF8_BF8 => sparse::<Bf8, Bf8, 16, 8, 16>(level),
        V_SMFMAC_F32_16X16X64_BF8_FP8 => sparse::<Bf8, Fp8, 16, 8, 16>(level),
        V_SMFMAC_F32_16X16X64_FP8_BF8 => sparse::<Fp8, Bf8, 16, 8, 16>(level),
        V_SMFMAC_F32_16X16X64_FP8_FP8 => sparse::<Fp8, Fp8, 16, 8, 16>(level),
        V_SMFMAC_F32_32X32X32_BF8_BF8 => sparse::<Bf8, Bf8, 32, 8, 16>(level),
        V_SMFMAC_F32_32X32X32_BF8_FP8 => sparse::<Bf8, Fp8, 32, 8, 16>(level),
        V_SMFMAC_F32_32X32X32_FP8_BF8 => sparse::<Fp8, Bf8, 32, 8, 16>(level),
        V_SMFMAC_F32_32X32X32_FP8_FP8 => sparse::<Fp8, Fp8, 32, 8, 16>(level),
        _ => return integer::handler(inst, level),
    })
}

/// Compiles a generic body for the vector extensions of [`Level::Avx2`] and [`Level::Avx512`].
macro_rules! at_levels {
    ($level:expr, [$($generic:tt)*], [$($argument:tt)*], $($body:ident)::+, $wide:literal, $narrow:literal) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(
            enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512cd"
        )]
        unsafe fn avx512<$($generic)*>(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
            // SAFETY: the contract of `Exec` is passed on; the extension is enabled here.
            unsafe { $($body)::+::<vector::Avx512, $($argument)*, $wide>(w, i, e) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
        unsafe fn avx2<$($generic)*>(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
            // SAFETY: the contract of `Exec` is passed on; the extension is enabled here.
            unsafe { $($body)::+::<vector::Avx2, $($argument)*, $narrow>(w, i, e) }
        }
        unsafe fn baseline<$($generic)*>(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
            // SAFETY: the contract of `Exec` is passed on.
            unsafe { $($body)::+::<Portable, $($argument)*, $narrow>(w, i, e) }
        }
        match $level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::<$($argument)*>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::<$($argument)*>,
            _ => baseline::<$($argument)*>,
        }
    }};
}

/// 16x16 and 32x32 blocks with f32 results. Sixteen rows of accumulators fit AVX-512, four AVX2.
fn float<A: Input, B: Input, const MN: usize, const BLOCKS: usize, const KV: usize>(
    level: Level,
) -> Exec {
    at_levels!(
        level,
        [A: Input, B: Input, const MN: usize, const BLOCKS: usize, const KV: usize],
        [A, B, MN, BLOCKS, KV],
        fast::blocks,
        16,
        4
    )
}

/// Sixteen 4x4 blocks with f32 results.
fn small<T: Input, const KV: usize>(level: Level) -> Exec {
    at_levels!(level, [T: Input, const KV: usize], [T, KV], fast::blocks4, 0, 0)
}

/// Sparse A, f32 results.
fn sparse<A: Input, B: Input, const MN: usize, const KV: usize, const KV2: usize>(
    level: Level,
) -> Exec {
    at_levels!(
        level,
        [A: Input, B: Input, const MN: usize, const KV: usize, const KV2: usize],
        [A, B, MN, KV, KV2],
        sparse::blocks,
        0,
        0
    )
}

/// Register positions of an instruction's matrices.
#[derive(Clone, Copy)]
struct Operands {
    /// First registers in the unified file.
    a: usize,
    b: usize,
    c: Addend,
    d: usize,
    /// CBSZ, ABID, BLGP.
    cbsz: usize,
    abid: usize,
    blgp: usize,
}

/// The C operand of a product.
#[derive(Clone, Copy)]
enum Addend {
    /// First register.
    Registers(usize),
    /// An inline constant, in every element.
    Constant(u32),
}

impl Operands {
    /// Checks that all registers exist; otherwise sets the fault.
    #[inline(always)]
    fn new(w: &Wave, inst: &Inst, e: &mut Env, [a, b, d]: [usize; 3]) -> Result<Operands, Flow> {
        let c = inst.src[2];
        let c = if c >= VGPR0 {
            Addend::Registers(register(w, e, c, d)?)
        } else {
            match constant(c) {
                Some(bits) => Addend::Constant(bits),
                None => return Err(bad_register(e, c)),
            }
        };
        Ok(Operands {
            a: register(w, e, inst.src[0], a)?,
            b: register(w, e, inst.src[1], b)?,
            c,
            d: register(w, e, inst.vdst, d)?,
            cbsz: (inst.ctrl & 7) as usize,
            abid: (inst.ctrl >> 4 & 15) as usize,
            blgp: (inst.ctrl >> 8 & 7) as usize,
        })
    }

    /// Prepares C, `count` registers in all, for D being written row by row. A and B have been read already.
    #[inline(always)]
    fn settle(&mut self, w: &mut Wave, count: usize) {
        settle(w, &mut self.c, self.d, count);
    }

    /// The block of A that `block` reads.
    #[inline(always)]
    fn a_block(&self, block: usize) -> usize {
        let group = (1 << self.cbsz) - 1;
        (block & !group) + (self.abid & group)
    }

    /// The group of sixteen lanes of B that is read in place of `group`.
    #[inline(always)]
    fn b_group(&self, group: usize) -> usize {
        match self.blgp {
            0 => group,
            1 => group & 1,
            2 => (group & 1) + 2,
            3 => (group + 1) & 3,
            n => n - 4,
        }
    }
}

/// Moves C into D if the two overlap in part. The matrix units read all of C before they write D, and compilers rely on
/// that.
#[inline(always)]
fn settle(w: &mut Wave, c: &mut Addend, d: usize, count: usize) {
    if let Addend::Registers(from) = *c
        && from != d
        && from.abs_diff(d) < count
    {
        w.vgpr.copy_within(from..from + count, d);
        *c = Addend::Registers(d);
    }
}

/// Index of a vector operand of `count` registers, if all exist.
#[inline(always)]
fn register(w: &Wave, e: &mut Env, operand: Operand, count: usize) -> Result<usize, Flow> {
    if operand < VGPR0 || operand == NONE {
        return Err(bad_register(e, operand));
    }
    let first = w.vreg(operand);
    if first + count > w.vgpr.len() {
        return Err(bad_register(e, operand));
    }
    Ok(first)
}

#[cold]
#[inline(never)]
fn bad_register(e: &mut Env, operand: Operand) -> Flow {
    e.fault = Some(FaultKind::BadRegister {
        register: format!("operand {operand}"),
        limit: 512,
    });
    Flow::Fault
}

/// The bits of an inline constant.
fn constant(operand: Operand) -> Option<u32> {
    Some(match operand {
        128..=192 => u32::from(operand - 128),
        193..=208 => (192 - i32::from(operand)) as u32,
        240 => 0.5f32.to_bits(),
        241 => (-0.5f32).to_bits(),
        242 => 1f32.to_bits(),
        243 => (-1f32).to_bits(),
        244 => 2f32.to_bits(),
        245 => (-2f32).to_bits(),
        246 => 4f32.to_bits(),
        247 => (-4f32).to_bits(),
        248 => 0x3e22_f983,
        _ => return None,
    })
}

/// Register (beyond the first) and first lane of a row of C or D, for blocks of 16 or 32 rows.
#[inline(always)]
const fn row_place<const MN: usize>(block: usize, row: usize) -> (usize, usize) {
    if MN == 32 {
        (16 * block + 4 * (row / 8) + row % 4, 32 * (row / 4 % 2))
    } else {
        (4 * block + row % 4, 16 * (row / 4))
    }
}

/// Values of every lane as f32: `[j][lane]`.
type Expanded<const KV: usize> = [[f32; 64]; KV];

/// Reads the values of A or B. `group` maps each group of sixteen lanes to the one that is read in its place.
///
/// # Safety
/// As for [`Lanes16`]; the registers from `first` on must exist.
#[inline(always)]
unsafe fn expand<V: Lanes16, T: Input, const KV: usize>(
    file: &[VReg; 512],
    first: usize,
    group: impl Fn(usize) -> usize,
) -> Expanded<KV> {
    let mut out = [[0f32; 64]; KV];
    for j in 0..KV {
        for g in 0..4 {
            let from = &file[first + j / T::PER_DWORD].0[16 * group(g)..][..16];
            // SAFETY: both slices have sixteen elements.
            unsafe {
                T::expand::<V>(from.as_ptr(), j).store(out[j][16 * g..][..16].as_mut_ptr());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
