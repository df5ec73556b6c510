//! Opcode tables of the scalar formats.

use super::table::{Entry, e};
use crate::op::Op::*;

/// SOP2: destination, two sources.
#[rustfmt::skip]
pub(super) static SOP2: &[Entry] = &[
    e(0, S_ADD_U32, [1, 1, 1, 0]), e(1, S_SUB_U32, [1, 1, 1, 0]), e(2, S_ADD_I32, [1, 1, 1, 0]),
    e(3, S_SUB_I32, [1, 1, 1, 0]), e(4, S_ADDC_U32, [1, 1, 1, 0]), e(5, S_SUBB_U32, [1, 1, 1, 0]),
    e(6, S_MIN_I32, [1, 1, 1, 0]), e(7, S_MIN_U32, [1, 1, 1, 0]), e(8, S_MAX_I32, [1, 1, 1, 0]),
    e(9, S_MAX_U32, [1, 1, 1, 0]), e(10, S_CSELECT_B32, [1, 1, 1, 0]), e(11, S_CSELECT_B64, [2, 2, 2, 0]),
    e(12, S_AND_B32, [1, 1, 1, 0]), e(13, S_AND_B64, [2, 2, 2, 0]), e(14, S_OR_B32, [1, 1, 1, 0]),
    e(15, S_OR_B64, [2, 2, 2, 0]), e(16, S_XOR_B32, [1, 1, 1, 0]), e(17, S_XOR_B64, [2, 2, 2, 0]),
    e(18, S_ANDN2_B32, [1, 1, 1, 0]), e(19, S_ANDN2_B64, [2, 2, 2, 0]), e(20, S_ORN2_B32, [1, 1, 1, 0]),
    e(21, S_ORN2_B64, [2, 2, 2, 0]), e(22, S_NAND_B32, [1, 1, 1, 0]), e(23, S_NAND_B64, [2, 2, 2, 0]),
    e(24, S_NOR_B32, [1, 1, 1, 0]), e(25, S_NOR_B64, [2, 2, 2, 0]), e(26, S_XNOR_B32, [1, 1, 1, 0]),
    e(27, S_XNOR_B64, [2, 2, 2, 0]), e(28, S_LSHL_B32, [1, 1, 1, 0]), e(29, S_LSHL_B64, [2, 2, 1, 0]),
    e(30, S_LSHR_B32, [1, 1, 1, 0]), e(31, S_LSHR_B64, [2, 2, 1, 0]), e(32, S_ASHR_I32, [1, 1, 1, 0]),
    e(33, S_ASHR_I64, [2, 2, 1, 0]), e(34, S_BFM_B32, [1, 1, 1, 0]), e(35, S_BFM_B64, [2, 1, 1, 0]),
    e(36, S_MUL_I32, [1, 1, 1, 0]), e(37, S_BFE_U32, [1, 1, 1, 0]), e(38, S_BFE_I32, [1, 1, 1, 0]),
    e(39, S_BFE_U64, [2, 2, 1, 0]), e(40, S_BFE_I64, [2, 2, 1, 0]), e(41, S_CBRANCH_G_FORK, [0, 2, 2, 0]),
    e(42, S_ABSDIFF_I32, [1, 1, 1, 0]), e(43, S_RFE_RESTORE_B64, [0, 2, 1, 0]),
    e(44, S_MUL_HI_U32, [1, 1, 1, 0]), e(45, S_MUL_HI_I32, [1, 1, 1, 0]), e(46, S_LSHL1_ADD_U32, [1, 1, 1, 0]),
    e(47, S_LSHL2_ADD_U32, [1, 1, 1, 0]), e(48, S_LSHL3_ADD_U32, [1, 1, 1, 0]),
    e(49, S_LSHL4_ADD_U32, [1, 1, 1, 0]), e(50, S_PACK_LL_B32_B16, [1, 1, 1, 0]),
    e(51, S_PACK_LH_B32_B16, [1, 1, 1, 0]), e(52, S_PACK_HH_B32_B16, [1, 1, 1, 0]),
];

/// SOP1: destination, source.
#[rustfmt::skip]
pub(super) static SOP1: &[Entry] = &[
    e(0, S_MOV_B32, [1, 1, 0, 0]), e(1, S_MOV_B64, [2, 2, 0, 0]), e(2, S_CMOV_B32, [1, 1, 0, 0]),
    e(3, S_CMOV_B64, [2, 2, 0, 0]), e(4, S_NOT_B32, [1, 1, 0, 0]), e(5, S_NOT_B64, [2, 2, 0, 0]),
    e(6, S_WQM_B32, [1, 1, 0, 0]), e(7, S_WQM_B64, [2, 2, 0, 0]), e(8, S_BREV_B32, [1, 1, 0, 0]),
    e(9, S_BREV_B64, [2, 2, 0, 0]), e(10, S_BCNT0_I32_B32, [1, 1, 0, 0]), e(11, S_BCNT0_I32_B64, [1, 2, 0, 0]),
    e(12, S_BCNT1_I32_B32, [1, 1, 0, 0]), e(13, S_BCNT1_I32_B64, [1, 2, 0, 0]),
    e(14, S_FF0_I32_B32, [1, 1, 0, 0]), e(15, S_FF0_I32_B64, [1, 2, 0, 0]), e(16, S_FF1_I32_B32, [1, 1, 0, 0]),
    e(17, S_FF1_I32_B64, [1, 2, 0, 0]), e(18, S_FLBIT_I32_B32, [1, 1, 0, 0]),
    e(19, S_FLBIT_I32_B64, [1, 2, 0, 0]), e(20, S_FLBIT_I32, [1, 1, 0, 0]),
    e(21, S_FLBIT_I32_I64, [1, 2, 0, 0]), e(22, S_SEXT_I32_I8, [1, 1, 0, 0]),
    e(23, S_SEXT_I32_I16, [1, 1, 0, 0]), e(24, S_BITSET0_B32, [1, 1, 0, 0]),
    e(25, S_BITSET0_B64, [2, 1, 0, 0]), e(26, S_BITSET1_B32, [1, 1, 0, 0]), e(27, S_BITSET1_B64, [2, 1, 0, 0]),
    e(28, S_GETPC_B64, [2, 0, 0, 0]), e(29, S_SETPC_B64, [0, 2, 0, 0]), e(30, S_SWAPPC_B64, [2, 2, 0, 0]),
    e(31, S_RFE_B64, [0, 2, 0, 0]), e(32, S_AND_SAVEEXEC_B64, [2, 2, 0, 0]),
    e(33, S_OR_SAVEEXEC_B64, [2, 2, 0, 0]), e(34, S_XOR_SAVEEXEC_B64, [2, 2, 0, 0]),
    e(35, S_ANDN2_SAVEEXEC_B64, [2, 2, 0, 0]), e(36, S_ORN2_SAVEEXEC_B64, [2, 2, 0, 0]),
    e(37, S_NAND_SAVEEXEC_B64, [2, 2, 0, 0]), e(38, S_NOR_SAVEEXEC_B64, [2, 2, 0, 0]),
    e(39, S_XNOR_SAVEEXEC_B64, [2, 2, 0, 0]), e(40, S_QUADMASK_B32, [1, 1, 0, 0]),
    e(41, S_QUADMASK_B64, [2, 2, 0, 0]), e(42, S_MOVRELS_B32, [1, 1, 0, 0]),
    e(43, S_MOVRELS_B64, [2, 2, 0, 0]), e(44, S_MOVRELD_B32, [1, 1, 0, 0]), e(45, S_MOVRELD_B64, [2, 2, 0, 0]),
    e(46, S_CBRANCH_JOIN, [0, 1, 0, 0]), e(48, S_ABS_I32, [1, 1, 0, 0]),
    e(50, S_SET_GPR_IDX_IDX, [0, 1, 0, 0]), e(51, S_ANDN1_SAVEEXEC_B64, [2, 2, 0, 0]),
    e(52, S_ORN1_SAVEEXEC_B64, [2, 2, 0, 0]), e(53, S_ANDN1_WREXEC_B64, [2, 2, 0, 0]),
    e(54, S_ANDN2_WREXEC_B64, [2, 2, 0, 0]), e(55, S_BITREPLICATE_B64_B32, [2, 1, 0, 0]),
];

/// SOPC: no destination, two sources.
#[rustfmt::skip]
pub(super) static SOPC: &[Entry] = &[
    e(0, S_CMP_EQ_I32, [0, 1, 1, 0]), e(1, S_CMP_LG_I32, [0, 1, 1, 0]), e(2, S_CMP_GT_I32, [0, 1, 1, 0]),
    e(3, S_CMP_GE_I32, [0, 1, 1, 0]), e(4, S_CMP_LT_I32, [0, 1, 1, 0]), e(5, S_CMP_LE_I32, [0, 1, 1, 0]),
    e(6, S_CMP_EQ_U32, [0, 1, 1, 0]), e(7, S_CMP_LG_U32, [0, 1, 1, 0]), e(8, S_CMP_GT_U32, [0, 1, 1, 0]),
    e(9, S_CMP_GE_U32, [0, 1, 1, 0]), e(10, S_CMP_LT_U32, [0, 1, 1, 0]), e(11, S_CMP_LE_U32, [0, 1, 1, 0]),
    e(12, S_BITCMP0_B32, [0, 1, 1, 0]), e(13, S_BITCMP1_B32, [0, 1, 1, 0]), e(14, S_BITCMP0_B64, [0, 2, 1, 0]),
    e(15, S_BITCMP1_B64, [0, 2, 1, 0]), e(16, S_SETVSKIP, [0, 1, 1, 0]), e(17, S_SET_GPR_IDX_ON, [0, 1, 0, 0]),
    e(18, S_CMP_EQ_U64, [0, 2, 2, 0]), e(19, S_CMP_LG_U64, [0, 2, 2, 0]),
];

/// SOPK: destination.
#[rustfmt::skip]
pub(super) static SOPK: &[Entry] = &[
    e(0, S_MOVK_I32, [1, 0, 0, 0]), e(1, S_CMOVK_I32, [1, 0, 0, 0]), e(2, S_CMPK_EQ_I32, [1, 0, 0, 0]),
    e(3, S_CMPK_LG_I32, [1, 0, 0, 0]), e(4, S_CMPK_GT_I32, [1, 0, 0, 0]), e(5, S_CMPK_GE_I32, [1, 0, 0, 0]),
    e(6, S_CMPK_LT_I32, [1, 0, 0, 0]), e(7, S_CMPK_LE_I32, [1, 0, 0, 0]), e(8, S_CMPK_EQ_U32, [1, 0, 0, 0]),
    e(9, S_CMPK_LG_U32, [1, 0, 0, 0]), e(10, S_CMPK_GT_U32, [1, 0, 0, 0]), e(11, S_CMPK_GE_U32, [1, 0, 0, 0]),
    e(12, S_CMPK_LT_U32, [1, 0, 0, 0]), e(13, S_CMPK_LE_U32, [1, 0, 0, 0]), e(14, S_ADDK_I32, [1, 0, 0, 0]),
    e(15, S_MULK_I32, [1, 0, 0, 0]), e(16, S_CBRANCH_I_FORK, [2, 0, 0, 0]), e(17, S_GETREG_B32, [1, 0, 0, 0]),
    e(18, S_SETREG_B32, [1, 0, 0, 0]), e(20, S_SETREG_IMM32_B32, [1, 0, 0, 0]),
    e(21, S_CALL_B64, [2, 0, 0, 0]),
];

/// SOPP: no registers.
#[rustfmt::skip]
pub(super) static SOPP: &[Entry] = &[
    e(0, S_NOP, [0, 0, 0, 0]), e(1, S_ENDPGM, [0, 0, 0, 0]), e(2, S_BRANCH, [0, 0, 0, 0]),
    e(3, S_WAKEUP, [0, 0, 0, 0]), e(4, S_CBRANCH_SCC0, [0, 0, 0, 0]), e(5, S_CBRANCH_SCC1, [0, 0, 0, 0]),
    e(6, S_CBRANCH_VCCZ, [0, 0, 0, 0]), e(7, S_CBRANCH_VCCNZ, [0, 0, 0, 0]),
    e(8, S_CBRANCH_EXECZ, [0, 0, 0, 0]), e(9, S_CBRANCH_EXECNZ, [0, 0, 0, 0]), e(10, S_BARRIER, [0, 0, 0, 0]),
    e(11, S_SETKILL, [0, 0, 0, 0]), e(12, S_WAITCNT, [0, 0, 0, 0]), e(13, S_SETHALT, [0, 0, 0, 0]),
    e(14, S_SLEEP, [0, 0, 0, 0]), e(15, S_SETPRIO, [0, 0, 0, 0]), e(16, S_SENDMSG, [0, 0, 0, 0]),
    e(17, S_SENDMSGHALT, [0, 0, 0, 0]), e(18, S_TRAP, [0, 0, 0, 0]), e(19, S_ICACHE_INV, [0, 0, 0, 0]),
    e(20, S_INCPERFLEVEL, [0, 0, 0, 0]), e(21, S_DECPERFLEVEL, [0, 0, 0, 0]),
    e(22, S_TTRACEDATA, [0, 0, 0, 0]), e(23, S_CBRANCH_CDBGSYS, [0, 0, 0, 0]),
    e(24, S_CBRANCH_CDBGUSER, [0, 0, 0, 0]), e(25, S_CBRANCH_CDBGSYS_OR_USER, [0, 0, 0, 0]),
    e(26, S_CBRANCH_CDBGSYS_AND_USER, [0, 0, 0, 0]), e(27, S_ENDPGM_SAVED, [0, 0, 0, 0]),
    e(28, S_SET_GPR_IDX_OFF, [0, 0, 0, 0]), e(29, S_SET_GPR_IDX_MODE, [0, 0, 0, 0]),
    e(30, S_ENDPGM_ORDERED_PS_DONE, [0, 0, 0, 0]),
];

/// SMEM: data, base.
#[rustfmt::skip]
pub(super) static SMEM: &[Entry] = &[
    e(0, S_LOAD_DWORD, [1, 2, 0, 0]), e(1, S_LOAD_DWORDX2, [2, 2, 0, 0]), e(2, S_LOAD_DWORDX4, [4, 2, 0, 0]),
    e(3, S_LOAD_DWORDX8, [8, 2, 0, 0]), e(4, S_LOAD_DWORDX16, [16, 2, 0, 0]),
    e(5, S_SCRATCH_LOAD_DWORD, [1, 2, 0, 0]), e(6, S_SCRATCH_LOAD_DWORDX2, [2, 2, 0, 0]),
    e(7, S_SCRATCH_LOAD_DWORDX4, [4, 2, 0, 0]), e(8, S_BUFFER_LOAD_DWORD, [1, 4, 0, 0]),
    e(9, S_BUFFER_LOAD_DWORDX2, [2, 4, 0, 0]), e(10, S_BUFFER_LOAD_DWORDX4, [4, 4, 0, 0]),
    e(11, S_BUFFER_LOAD_DWORDX8, [8, 4, 0, 0]), e(12, S_BUFFER_LOAD_DWORDX16, [16, 4, 0, 0]),
    e(16, S_STORE_DWORD, [1, 2, 0, 0]), e(17, S_STORE_DWORDX2, [2, 2, 0, 0]),
    e(18, S_STORE_DWORDX4, [4, 2, 0, 0]), e(21, S_SCRATCH_STORE_DWORD, [1, 2, 0, 0]),
    e(22, S_SCRATCH_STORE_DWORDX2, [2, 2, 0, 0]), e(23, S_SCRATCH_STORE_DWORDX4, [4, 2, 0, 0]),
    e(24, S_BUFFER_STORE_DWORD, [1, 4, 0, 0]), e(25, S_BUFFER_STORE_DWORDX2, [2, 4, 0, 0]),
    e(26, S_BUFFER_STORE_DWORDX4, [4, 4, 0, 0]), e(32, S_DCACHE_INV, [0, 0, 0, 0]),
    e(33, S_DCACHE_WB, [0, 0, 0, 0]), e(34, S_DCACHE_INV_VOL, [0, 0, 0, 0]),
    e(35, S_DCACHE_WB_VOL, [0, 0, 0, 0]), e(36, S_MEMTIME, [2, 0, 0, 0]), e(37, S_MEMREALTIME, [2, 0, 0, 0]),
    e(38, S_ATC_PROBE, [0, 2, 0, 0]), e(39, S_ATC_PROBE_BUFFER, [0, 4, 0, 0]),
    e(40, S_DCACHE_DISCARD, [0, 2, 0, 0]), e(41, S_DCACHE_DISCARD_X2, [0, 2, 0, 0]),
    e(64, S_BUFFER_ATOMIC_SWAP, [1, 4, 0, 0]), e(65, S_BUFFER_ATOMIC_CMPSWAP, [2, 4, 0, 0]),
    e(66, S_BUFFER_ATOMIC_ADD, [1, 4, 0, 0]), e(67, S_BUFFER_ATOMIC_SUB, [1, 4, 0, 0]),
    e(68, S_BUFFER_ATOMIC_SMIN, [1, 4, 0, 0]), e(69, S_BUFFER_ATOMIC_UMIN, [1, 4, 0, 0]),
    e(70, S_BUFFER_ATOMIC_SMAX, [1, 4, 0, 0]), e(71, S_BUFFER_ATOMIC_UMAX, [1, 4, 0, 0]),
    e(72, S_BUFFER_ATOMIC_AND, [1, 4, 0, 0]), e(73, S_BUFFER_ATOMIC_OR, [1, 4, 0, 0]),
    e(74, S_BUFFER_ATOMIC_XOR, [1, 4, 0, 0]), e(75, S_BUFFER_ATOMIC_INC, [1, 4, 0, 0]),
    e(76, S_BUFFER_ATOMIC_DEC, [1, 4, 0, 0]), e(96, S_BUFFER_ATOMIC_SWAP_X2, [2, 4, 0, 0]),
    e(97, S_BUFFER_ATOMIC_CMPSWAP_X2, [4, 4, 0, 0]), e(98, S_BUFFER_ATOMIC_ADD_X2, [2, 4, 0, 0]),
    e(99, S_BUFFER_ATOMIC_SUB_X2, [2, 4, 0, 0]), e(100, S_BUFFER_ATOMIC_SMIN_X2, [2, 4, 0, 0]),
    e(101, S_BUFFER_ATOMIC_UMIN_X2, [2, 4, 0, 0]), e(102, S_BUFFER_ATOMIC_SMAX_X2, [2, 4, 0, 0]),
    e(103, S_BUFFER_ATOMIC_UMAX_X2, [2, 4, 0, 0]), e(104, S_BUFFER_ATOMIC_AND_X2, [2, 4, 0, 0]),
    e(105, S_BUFFER_ATOMIC_OR_X2, [2, 4, 0, 0]), e(106, S_BUFFER_ATOMIC_XOR_X2, [2, 4, 0, 0]),
    e(107, S_BUFFER_ATOMIC_INC_X2, [2, 4, 0, 0]), e(108, S_BUFFER_ATOMIC_DEC_X2, [2, 4, 0, 0]),
    e(128, S_ATOMIC_SWAP, [1, 2, 0, 0]), e(129, S_ATOMIC_CMPSWAP, [2, 2, 0, 0]),
    e(130, S_ATOMIC_ADD, [1, 2, 0, 0]), e(131, S_ATOMIC_SUB, [1, 2, 0, 0]),
    e(132, S_ATOMIC_SMIN, [1, 2, 0, 0]), e(133, S_ATOMIC_UMIN, [1, 2, 0, 0]),
    e(134, S_ATOMIC_SMAX, [1, 2, 0, 0]), e(135, S_ATOMIC_UMAX, [1, 2, 0, 0]),
    e(136, S_ATOMIC_AND, [1, 2, 0, 0]), e(137, S_ATOMIC_OR, [1, 2, 0, 0]), e(138, S_ATOMIC_XOR, [1, 2, 0, 0]),
    e(139, S_ATOMIC_INC, [1, 2, 0, 0]), e(140, S_ATOMIC_DEC, [1, 2, 0, 0]),
    e(160, S_ATOMIC_SWAP_X2, [2, 2, 0, 0]), e(161, S_ATOMIC_CMPSWAP_X2, [4, 2, 0, 0]),
    e(162, S_ATOMIC_ADD_X2, [2, 2, 0, 0]), e(163, S_ATOMIC_SUB_X2, [2, 2, 0, 0]),
    e(164, S_ATOMIC_SMIN_X2, [2, 2, 0, 0]), e(165, S_ATOMIC_UMIN_X2, [2, 2, 0, 0]),
    e(166, S_ATOMIC_SMAX_X2, [2, 2, 0, 0]), e(167, S_ATOMIC_UMAX_X2, [2, 2, 0, 0]),
    e(168, S_ATOMIC_AND_X2, [2, 2, 0, 0]), e(169, S_ATOMIC_OR_X2, [2, 2, 0, 0]),
    e(170, S_ATOMIC_XOR_X2, [2, 2, 0, 0]), e(171, S_ATOMIC_INC_X2, [2, 2, 0, 0]),
    e(172, S_ATOMIC_DEC_X2, [2, 2, 0, 0]),
];
