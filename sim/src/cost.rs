//! Class of an instruction, and the clocks for which it keeps its unit busy, whatever its data.
//!
//! A SIMD executes 16 lanes a clock, so 64 lanes take 4 clocks. Transcendental functions run at a quarter of that rate.
//! A matrix product takes 4 clocks for each of its passes. Rates and passes are those of LLVM's scheduling model of
//! gfx942 (`SISchedule.td`, `SIDPGFX942FullSpeedModel`). A test compares the passes with llvm-mca.

use crate::inst::{Format, Inst, NONE};
use crate::op::Op::{self, *};

/// Class of an instruction. Each instruction belongs to exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Matrix products.
    Mfma,
    /// Moves between architectural and accumulation registers.
    Accvgpr,
    /// Vector arithmetic, DPP included.
    Valu,
    /// Transcendental functions.
    Trans,
    /// Exchanges between lanes: `v_readlane`, `v_readfirstlane`, `v_writelane`, `ds_permute`, `ds_bpermute`,
    /// `ds_swizzle`.
    Xlane,
    /// Scalar arithmetic.
    Salu,
    /// Scalar memory.
    Smem,
    /// Loads from global memory or scratch, and atomics that return.
    VmemLoad,
    /// Stores to global memory or scratch, and atomics that do not return.
    VmemStore,
    /// Loads from LDS, and atomics that return.
    LdsLoad,
    /// Stores to LDS, and atomics that do not return.
    LdsStore,
    /// `s_barrier`.
    Barrier,
    /// `s_waitcnt`.
    Waitcnt,
    /// `s_nop`, `v_nop`.
    Nop,
    /// Branches and calls.
    Branch,
    /// `s_endpgm`, `s_sleep`, `s_setprio`, messages and the like, and cache control.
    Other,
}

impl Class {
    /// All classes, in the order of their numbers.
    pub const ALL: [Class; 16] = [
        Class::Mfma,
        Class::Accvgpr,
        Class::Valu,
        Class::Trans,
        Class::Xlane,
        Class::Salu,
        Class::Smem,
        Class::VmemLoad,
        Class::VmemStore,
        Class::LdsLoad,
        Class::LdsStore,
        Class::Barrier,
        Class::Waitcnt,
        Class::Nop,
        Class::Branch,
        Class::Other,
    ];

    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Class::Mfma => "mfma",
            Class::Accvgpr => "accvgpr",
            Class::Valu => "valu",
            Class::Trans => "trans",
            Class::Xlane => "xlane",
            Class::Salu => "salu",
            Class::Smem => "smem",
            Class::VmemLoad => "vmem_load",
            Class::VmemStore => "vmem_store",
            Class::LdsLoad => "lds_load",
            Class::LdsStore => "lds_store",
            Class::Barrier => "barrier",
            Class::Waitcnt => "waitcnt",
            Class::Nop => "nop",
            Class::Branch => "branch",
            Class::Other => "other",
        }
    }
}

/// Class of an instruction, and the clocks for which it keeps units of a SIMD busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Class.
    pub class: Class,
    /// Clocks of the matrix unit.
    pub mfma_clk: u32,
    /// Clocks of the vector unit, matrix products excluded.
    pub valu_clk: u32,
    /// Clocks of the scalar unit.
    pub salu_clk: u32,
}

/// Clocks of a vector instruction over 64 lanes, and between a SIMD's turns at the scalar unit.
pub const WAVE_CLK: u32 = 4;
/// Clocks of a transcendental function.
pub const TRANS_CLK: u32 = 16;

/// The cost of an instruction.
pub fn of(inst: &Inst) -> Cost {
    let class = class(inst);
    let vector = matches!(
        inst.format,
        Format::Vop1 | Format::Vop2 | Format::Vopc | Format::Vop3 | Format::Vop3p | Format::Mai
    );
    Cost {
        class,
        mfma_clk: WAVE_CLK * mfma_passes(inst.op),
        valu_clk: match class {
            Class::Mfma => 0,
            Class::Trans => TRANS_CLK,
            _ if vector => WAVE_CLK,
            _ => 0,
        },
        salu_clk: match class {
            Class::Salu => WAVE_CLK,
            _ => 0,
        },
    }
}

fn class(inst: &Inst) -> Class {
    match inst.format {
        Format::Sop1 | Format::Sop2 | Format::Sopk | Format::Sopc => match inst.op {
            S_SETPC_B64 | S_SWAPPC_B64 | S_CALL_B64 | S_CBRANCH_I_FORK | S_CBRANCH_G_FORK
            | S_CBRANCH_JOIN | S_RFE_B64 | S_RFE_RESTORE_B64 => Class::Branch,
            _ => Class::Salu,
        },
        Format::Sopp => match inst.op {
            S_BARRIER => Class::Barrier,
            S_WAITCNT => Class::Waitcnt,
            S_NOP => Class::Nop,
            op if op == S_BRANCH || op.mnemonic().starts_with("s_cbranch") => Class::Branch,
            _ => Class::Other,
        },
        Format::Smem => Class::Smem,
        Format::Vop1 | Format::Vop2 | Format::Vopc | Format::Vop3 | Format::Vop3p => {
            match inst.op {
                V_READLANE_B32 | V_READFIRSTLANE_B32 | V_WRITELANE_B32 => Class::Xlane,
                V_ACCVGPR_MOV_B32 => Class::Accvgpr,
                V_NOP => Class::Nop,
                op if is_transcendental(op) => Class::Trans,
                _ => Class::Valu,
            }
        }
        Format::Mai => match inst.op {
            V_ACCVGPR_READ_B32 | V_ACCVGPR_WRITE_B32 => Class::Accvgpr,
            _ => Class::Mfma,
        },
        Format::Ds => match inst.op {
            op if is_permute(op) => Class::Xlane,
            DS_NOP => Class::Nop,
            _ if inst.vdst == NONE => Class::LdsStore,
            _ => Class::LdsLoad,
        },
        Format::Flat | Format::Global | Format::Scratch | Format::Mubuf | Format::Mtbuf => {
            vmem(inst)
        }
        Format::Invalid => Class::Other,
    }
}

fn vmem(inst: &Inst) -> Class {
    let name = inst.op.mnemonic();
    if name.contains("_load_") {
        Class::VmemLoad
    } else if name.contains("_store_") {
        Class::VmemStore
    } else if !name.contains("_atomic_") {
        Class::Other
    } else if inst.has(crate::inst::flag::SC0) {
        Class::VmemLoad
    } else {
        Class::VmemStore
    }
}

/// Whether an instruction exchanges values between lanes through the LDS's crossbar without an access to LDS.
pub fn is_permute(op: Op) -> bool {
    matches!(op, DS_PERMUTE_B32 | DS_BPERMUTE_B32 | DS_SWIZZLE_B32)
}

/// Whether an instruction uses the transcendental unit.
pub fn is_transcendental(op: Op) -> bool {
    let name = op.mnemonic();
    let functions = [
        "v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_",
    ];
    functions.iter().any(|f| name.starts_with(f))
}

/// Passes of a matrix product, 0 for any other instruction. From LLVM's scheduling model of gfx942 (`SISchedule.td`,
/// `SIDPGFX942FullSpeedModel`). Results of 16 x 16 take 4 passes, 32 x 32 take 8. Products of f32, and products of
/// several small blocks, which use half of the unit, take twice as many.
pub fn mfma_passes(op: Op) -> u32 {
    let name = op.mnemonic();
    let large = name.contains("_32x32x");
    if name.starts_with("v_smfmac_") {
        return if large { 8 } else { 4 };
    }
    if !name.starts_with("v_mfma_") {
        return 0;
    }
    match op {
        V_MFMA_F32_4X4X1_16B_F32
        | V_MFMA_F32_4X4X4_16B_F16
        | V_MFMA_F32_4X4X4_16B_BF16
        | V_MFMA_I32_4X4X4_16B_I8 => 2,
        V_MFMA_F32_32X32X1_2B_F32
        | V_MFMA_F32_32X32X2_F32
        | V_MFMA_F32_32X32X4_2B_F16
        | V_MFMA_F32_32X32X4_2B_BF16
        | V_MFMA_I32_32X32X4_2B_I8 => 16,
        V_MFMA_F32_16X16X1_4B_F32
        | V_MFMA_F32_16X16X4_F32
        | V_MFMA_F32_16X16X4_4B_F16
        | V_MFMA_F32_16X16X4_4B_BF16
        | V_MFMA_I32_16X16X4_4B_I8
        | V_MFMA_F64_16X16X4_F64 => 8,
        _ if large => 8,
        _ => 4,
    }
}

/// Operations of a matrix product, with a multiplication and an addition counted as two; 0 for any other instruction.
pub fn mfma_flops(op: Op) -> u64 {
    if mfma_passes(op) == 0 {
        return 0;
    }
    // v_mfma_f32_16x16x4_4b_f16: rows, columns, depth, and blocks if there are several.
    let mut parts = op.mnemonic().split('_').skip(3);
    let shape = parts.next().unwrap_or_default().split('x');
    let shape: u64 = shape.map(|n| n.parse::<u64>().unwrap_or(0)).product();
    let blocks = parts.next().and_then(|p| p.strip_suffix('b')?.parse().ok());
    2 * shape * blocks.unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_of_matrix_products() {
        for (op, flops) in [
            (V_MFMA_F32_16X16X16_BF16, 8192),
            (V_MFMA_F32_32X32X8_F16, 16384),
            (V_MFMA_F32_16X16X4_4B_F16, 8192),
            (V_MFMA_F32_4X4X4_16B_BF16, 2048),
            (V_MFMA_F32_16X16X4_F32, 2048),
            (V_SMFMAC_F32_16X16X64_FP8_BF8, 32768),
            (V_ADD_F32, 0),
        ] {
            assert_eq!(mfma_flops(op), flops, "{op:?}");
        }
    }
}
