//! Tests of the checks `uninitialized`, `waits` and `hazards`.
//!
//! Every case is a kernel in assembly. Lines that start with `+` stand only in its correct twin; without them the line
//! marked `; here` must be reported, with the line marked `; cause`.

mod common;

use common::asm::{self, PROLOGUE};
use deltawave_sim::code_object::CodeObject;
use deltawave_sim::fault::{Fault, FaultKind};
use deltawave_sim::launch::{LaunchError, Options};
use deltawave_sim::memory::{Extent, Memory, Written};
use deltawave_sim::sanitize::Checks;
use std::sync::Arc;

/// A name, a body, and what the fault's text contains. No text: the body is correct.
type Case = (&'static str, &'static str, &'static str);

fn lines(body: &'static str, correct: bool) -> Vec<&'static str> {
    let lines = body.lines().map(str::trim).filter(|l| !l.is_empty());
    lines
        .filter(|l| correct || !l.starts_with('+'))
        .map(|l| l.trim_start_matches('+').trim())
        .collect()
}

/// Runs a kernel on two buffers of 4 KiB, the second of which holds nothing yet.
fn run(code: &CodeObject, name: &str, checks: Checks) -> Result<(), Box<Fault>> {
    let (mut a, mut b) = (vec![1u32; 1024], vec![0u32; 1024]);
    let pointers = [a.as_mut_ptr() as u64, b.as_mut_ptr() as u64];
    let extents = pointers.map(|start| Extent {
        start,
        end: start + 4096,
    });
    let unwritten = Written::nothing(extents[1]).expect("memory for a shadow");
    let memory = Memory::new(extents.to_vec()).track(vec![Arc::new(unwritten)]);
    let options = Options {
        checks,
        ..Options::default()
    };
    match asm::run(code, name, 64, pointers, &memory, &options) {
        Ok(_) => Ok(()),
        Err(LaunchError::Fault(fault)) => Err(fault),
        Err(other) => panic!("{name}: {other}"),
    }
}

/// The byte offset of the line of a kernel's body that has a mark.
fn offset(code: &CodeObject, name: &str, body: &[&str], mark: &str) -> Option<u64> {
    let instructions = body.iter().filter(|l| !l.ends_with(':'));
    let line = instructions.clone().position(|l| l.ends_with(mark))?;
    let entry = code.kernel(name)?.entry as usize;
    Some(code.program().offsets[entry + PROLOGUE.len() + line].into())
}

fn check(cases: &[Case], checks: Checks, is_kind: fn(&FaultKind) -> bool) {
    let mut kernels = Vec::new();
    for (name, body, _) in cases {
        kernels.push((format!("{name}_bad"), lines(body, false)));
        kernels.push((format!("{name}_good"), lines(body, true)));
    }
    let Some(bytes) = common::assemble(&asm::source(&kernels)) else {
        return;
    };
    let code = CodeObject::load(&bytes).expect("a code object of clang's");
    let mut wrong = Vec::new();
    for (name, body, expected) in cases {
        if let Err(fault) = run(&code, &format!("{name}_good"), checks) {
            wrong.push(format!("{name}, correct: {fault}"));
        }
        let bad = format!("{name}_bad");
        let result = run(&code, &bad, checks);
        if expected.is_empty() {
            continue;
        }
        let Err(fault) = result else {
            wrong.push(format!("{name}: not found"));
            continue;
        };
        let text = fault.to_string();
        let body = lines(body, false);
        let here = offset(&code, &bad, &body, "; here");
        if here != Some(fault.pc) || !is_kind(&fault.kind) || !text.contains(expected) {
            wrong.push(format!(
                "{name}: at {here:x?} `{expected}` was expected: {text}"
            ));
        }
        if let Some(cause) = offset(&code, &bad, &body, "; cause")
            && !text.contains(&format!("pc {cause:#x} ("))
        {
            wrong.push(format!("{name}: does not name pc {cause:#x}: {text}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const WAITS: &[Case] = &[
    (
        "global_load",
        "global_load_dword v3, v1, s[4:5] ; cause
         + s_waitcnt vmcnt(0)
         v_add_u32 v4, v3, v1 ; here",
        "v3 is read while a load that will write it may be outstanding",
    ),
    (
        "oldest_of_two",
        "global_load_dword v3, v1, s[4:5] ; cause
         global_load_dword v4, v1, s[4:5]
         + s_waitcnt vmcnt(1)
         v_add_u32 v5, v3, v1 ; here",
        "`s_waitcnt vmcnt(1)`",
    ),
    (
        "too_weak",
        "global_load_dword v3, v1, s[4:5]
         global_load_dword v4, v1, s[4:5] ; cause
         s_waitcnt vmcnt(1)
         + s_waitcnt vmcnt(0)
         v_add_u32 v5, v4, v1 ; here",
        "`s_waitcnt vmcnt(0)`",
    ),
    (
        "stores_count",
        "global_load_dword v3, v1, s[4:5] ; cause
         global_store_dword v1, v1, s[6:7]
         + s_waitcnt vmcnt(1)
         v_add_u32 v5, v3, v1 ; here",
        "`s_waitcnt vmcnt(1)`",
    ),
    (
        "wrong_counter",
        "global_load_dword v3, v1, s[4:5] ; cause
         s_waitcnt lgkmcnt(0)
         + s_waitcnt vmcnt(0)
         v_add_u32 v5, v3, v1 ; here",
        "vmcnt(0)",
    ),
    (
        "second_register",
        "global_load_dwordx2 v[8:9], v1, s[4:5] ; cause
         + s_waitcnt vmcnt(0)
         v_add_u32 v5, v9, v1 ; here",
        "v9 is read",
    ),
    (
        "scalar_load",
        "s_load_dword s8, s[4:5], 0x0 ; cause
         + s_waitcnt lgkmcnt(0)
         s_add_u32 s9, s8, 1 ; here",
        "s8 is read",
    ),
    (
        "scalar_loads_in_any_order",
        "s_load_dword s8, s[4:5], 0x0 ; cause
         s_load_dword s9, s[4:5], 0x4
         s_waitcnt lgkmcnt(1)
         + s_waitcnt lgkmcnt(0)
         s_add_u32 s10, s8, 1 ; here",
        "`s_waitcnt lgkmcnt(0)`",
    ),
    (
        "vector_reads_scalar_load",
        "s_load_dword s8, s[4:5], 0x0 ; cause
         + s_waitcnt lgkmcnt(0)
         v_mov_b32 v3, s8 ; here",
        "s8 is read",
    ),
    (
        "lds_in_order",
        "ds_read_b32 v3, v1 ; cause
         ds_read_b32 v4, v1
         + s_waitcnt lgkmcnt(1)
         v_add_u32 v5, v3, v1 ; here",
        "`s_waitcnt lgkmcnt(1)`",
    ),
    (
        "lds_among_scalar_loads",
        "ds_read_b32 v3, v1 ; cause
         s_load_dword s8, s[4:5], 0x0
         s_waitcnt lgkmcnt(1)
         + s_waitcnt lgkmcnt(0)
         v_add_u32 v5, v3, v1 ; here",
        "`s_waitcnt lgkmcnt(0)`",
    ),
    (
        "overwritten",
        "ds_read_b32 v3, v1 ; cause
         + s_waitcnt lgkmcnt(0)
         v_mov_b32 v3, 0 ; here",
        "v3 is written",
    ),
    (
        "stored_too_early",
        "global_load_dword v3, v1, s[4:5] ; cause
         + s_waitcnt vmcnt(0)
         global_store_dword v1, v3, s[6:7] ; here",
        "v3 is read",
    ),
    (
        "loaded_half_is_kept",
        "v_mov_b32 v3, 0
         global_load_short_d16 v3, v1, s[4:5] ; cause
         + s_waitcnt vmcnt(0)
         global_load_short_d16_hi v3, v1, s[4:5] ; here",
        "v3 is read",
    ),
    (
        "flat_load_of_lds",
        "s_mov_b64 s[8:9], src_shared_base
         v_mov_b32 v4, v1
         v_mov_b32 v5, s9
         flat_load_dword v3, v[4:5] ; cause
         s_waitcnt vmcnt(0)
         + s_waitcnt lgkmcnt(0)
         v_add_u32 v5, v3, v1 ; here",
        "lgkmcnt(0)",
    ),
    (
        "flat_load_of_memory",
        "v_mov_b32 v4, s4
         v_mov_b32 v5, s5
         flat_load_dword v3, v[4:5] ; cause
         s_waitcnt lgkmcnt(0)
         + s_waitcnt vmcnt(0)
         v_add_u32 v5, v3, v1 ; here",
        "vmcnt(0)",
    ),
    (
        "atomic_with_result",
        "global_atomic_add v3, v1, v1, s[6:7] sc0 ; cause
         + s_waitcnt vmcnt(0)
         v_add_u32 v5, v3, v1 ; here",
        "v3 is read",
    ),
    (
        "accumulation_register",
        "global_load_dword a3, v1, s[4:5] ; cause
         + s_waitcnt vmcnt(0)
         v_accvgpr_read_b32 v5, a3 ; here",
        "a3 is read",
    ),
    (
        "load_to_lds",
        "s_mov_b32 m0, 0x100
         v_mov_b32 v3, v1
         global_load_lds_dword v1, s[4:5] ; cause
         ds_read_b32 v4, v1 offset:512
         + s_waitcnt vmcnt(0)
         ds_read_b32 v5, v3 offset:256 ; here",
        "LDS address 0x100 is read",
    ),
    (
        "data_of_a_store_may_be_overwritten",
        "global_store_dword v1, v1, s[6:7]
         v_mov_b32 v1, 0",
        "",
    ),
    (
        "two_loads_of_one_register",
        "global_load_dword v3, v1, s[4:5]
         global_load_dword v3, v1, s[4:5]
         s_waitcnt vmcnt(0)
         v_mov_b32 v4, v3",
        "",
    ),
];

#[test]
fn missing_waits() {
    let checks = Checks {
        waits: true,
        ..Checks::NONE
    };
    check(WAITS, checks, |k| {
        matches!(k, FaultKind::NotWaitedFor { .. })
    });
}

const HAZARDS: &[Case] = &[
    (
        "sgpr_to_memory",
        "v_readfirstlane_b32 s4, v6 ; cause
         s_nop 3
         + s_nop 0
         global_load_dword v3, v1, s[4:5] ; here",
        "vector memory reads it (s4); 5 are needed",
    ),
    (
        "mask_to_valu",
        "v_cmp_eq_u32 s[8:9], v1, v0 ; cause
         s_nop 0
         + s_nop 0
         v_cndmask_b32 v3, v0, v1, s[8:9] ; here",
        "VALU reads it (s8); 2 are needed",
    ),
    (
        "vcc_to_carry",
        "v_add_co_u32 v3, vcc, v1, v1 ; cause
         + s_nop 1
         v_addc_co_u32 v4, vcc, v1, v1, vcc ; here",
        "VALU reads it (vcc_lo); 2 are needed",
    ),
    (
        "lane_number",
        "v_readfirstlane_b32 s8, v0 ; cause
         s_nop 2
         + s_nop 0
         v_readlane_b32 s9, v1, s8 ; here",
        "selects a lane (s8); 4 are needed",
    ),
    (
        "div_fmas",
        "v_cmp_eq_u32 vcc, v0, v1 ; cause
         s_nop 2
         + s_nop 0
         v_div_fmas_f32 v3, v1, v1, v1 ; here",
        "v_div_fmas; 4 are needed",
    ),
    (
        "exec_to_dpp",
        "v_cmpx_eq_u32 exec, v0, v0 ; cause
         s_nop 3
         + s_nop 0
         v_mov_b32_dpp v3, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf ; here",
        "then DPP; 5 are needed",
    ),
    (
        "exec_to_lane",
        "v_cmpx_eq_u32 exec, v0, v0 ; cause
         s_nop 2
         + s_nop 0
         v_readfirstlane_b32 s8, v1 ; here",
        "single lane is read or written; 4 are needed",
    ),
    (
        "exec_to_mfma",
        "v_cmpx_eq_u32 exec, v0, v0 ; cause
         s_nop 2
         + s_nop 0
         v_mfma_f32_4x4x1_16b_f32 a[0:3], v1, v1, 0 ; here",
        "then MFMA; 4 are needed",
    ),
    (
        "vgpr_to_dpp",
        "v_mov_b32 v3, v1 ; cause
         s_nop 0
         + s_nop 0
         v_mov_b32_dpp v4, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf ; here",
        "DPP reads it (v3); 2 are needed",
    ),
    (
        "vgpr_to_lane",
        "v_add_u32 v3, v1, v1 ; cause
         + s_nop 0
         v_readfirstlane_b32 s8, v3 ; here",
        "v_readlane reads it (v3); 1 are needed",
    ),
    (
        "vgpr_to_mfma",
        "v_mov_b32 v3, v1 ; cause
         s_nop 0
         + s_nop 0
         v_mfma_f32_4x4x1_16b_f32 a[0:3], v3, v1, 0 ; here",
        "MFMA reads it (v3); 2 are needed",
    ),
    (
        "transcendental",
        "v_exp_f32 v3, v1 ; cause
         + s_nop 0
         v_add_f32 v4, v3, v1 ; here",
        "transcendental instruction, then another VALU reads its result (v3); 1 are needed",
    ),
    (
        "part_of_a_register",
        "v_add_u16_sdwa v3, v1, v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:WORD_0 ; cause
         + s_nop 0
         v_add_u32 v4, v3, v1 ; here",
        "a part of a VGPR, then VALU reads it (v3); 1 are needed",
    ),
    (
        "dot",
        "v_dot2c_f32_f16 v3, v1, v1 ; cause
         s_nop 1
         + s_nop 0
         v_add_f32 v4, v3, v1 ; here",
        "a dot product, then its result is read (v3); 3 are needed",
    ),
    (
        "dots_accumulate",
        "v_dot2c_f32_f16 v3, v1, v1
         v_dot2c_f32_f16 v3, v1, v1",
        "",
    ),
    (
        "wide_store",
        "global_store_dwordx4 v1, v[8:11], s[6:7] ; cause
         s_nop 0
         + s_nop 0
         v_mov_b32 v9, 0 ; here",
        "VALU writes its data (v9); 2 are needed",
    ),
    (
        "m0",
        "s_mov_b32 m0, 0 ; cause
         + s_nop 0
         s_movrels_b32 s8, s9 ; here",
        "SALU writes M0, then it is read; 1 are needed",
    ),
    (
        "setreg",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0 ; cause
         s_nop 0
         + s_nop 0
         s_getreg_b32 s8, hwreg(HW_REG_MODE) ; here",
        "2 are needed",
    ),
    (
        "mfma_of_2_passes_read",
        "v_mfma_f32_4x4x4_16b_f16 a[0:3], v[2:3], v[2:3], 0 ; cause
         s_nop 3
         + s_nop 0
         v_accvgpr_read_b32 v4, a0 ; here",
        "MFMA, then its result is read (a0); 5 are needed",
    ),
    (
        "mfma_of_16_passes_stored",
        "v_mfma_f32_32x32x4_2b_f16 a[0:31], v[2:3], v[2:3], 0 ; cause
         s_nop 15
         s_nop 1
         + s_nop 0
         global_store_dword v1, a5, s[6:7] ; here",
        "MFMA, then its result is read (a5); 19 are needed",
    ),
    (
        "mfma_of_f32_read",
        "v_mfma_f32_16x16x4_f32 a[0:3], v2, v3, 0 ; cause
         s_nop 8
         + s_nop 0
         v_accvgpr_read_b32 v4, a3 ; here",
        "MFMA, then its result is read (a3); 10 are needed",
    ),
    (
        "mfma_as_factor",
        "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[2:3], 0 ; cause
         s_nop 5
         + s_nop 0
         v_mfma_f32_16x16x16_f16 a[0:3], v[8:9], v[2:3], 0 ; here",
        "takes its result as A or B (v8); 7 are needed",
    ),
    (
        "mfma_as_other_addend",
        "v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[2:3], 0 ; cause
         s_nop 7
         + s_nop 0
         v_mfma_f32_32x32x8_f16 a[32:47], v[2:3], v[2:3], a[4:19] ; here",
        "takes its result as C (a4); 9 are needed",
    ),
    (
        "mfma_accumulates",
        "v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[2:3], 0
         v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[2:3], a[0:15]",
        "",
    ),
    (
        "mfma_of_2_passes_accumulates",
        "v_mfma_f32_4x4x4_16b_f16 a[0:3], v[2:3], v[2:3], 0 ; cause
         s_nop 0
         + s_nop 0
         v_mfma_f32_4x4x4_16b_f16 a[0:3], v[2:3], v[2:3], a[0:3] ; here",
        "takes its result as C (a0); 2 are needed",
    ),
    (
        "mfma_addend_overwritten",
        "v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[2:3], a[4:7] ; cause
         s_nop 1
         + s_nop 0
         v_accvgpr_write_b32 a4, 0 ; here",
        "MFMA, then its C is overwritten (a4); 3 are needed",
    ),
    (
        "mfma_result_overwritten",
        "v_mfma_f32_16x16x16_f16 a[0:3], v[2:3], v[2:3], 0 ; cause
         s_nop 5
         + s_nop 0
         v_accvgpr_write_b32 a1, 0 ; here",
        "MFMA, then its result is overwritten (a1); 7 are needed",
    ),
    (
        "mfma_of_f64_stored",
        "v_mfma_f64_4x4x4_4b_f64 a[0:1], v[2:3], v[2:3], 0 ; cause
         s_nop 7
         + s_nop 0
         global_store_dword v1, a0, s[6:7] ; here",
        "MFMA, then its result is read (a0); 9 are needed",
    ),
    (
        "mfma_of_f64_then_fma",
        "v_mfma_f64_4x4x4_4b_f64 a[0:1], v[2:3], v[2:3], 0 ; cause
         s_nop 0
         + s_nop 0
         v_fma_f64 v[8:9], v[2:3], v[2:3], v[2:3] ; here",
        "f64 MFMA, then v_fma_f64; 2 are needed",
    ),
    (
        "sparse_index",
        "v_mfma_f32_16x16x16_f16 v[8:11], v[2:3], v[2:3], 0 ; cause
         s_nop 5
         + s_nop 0
         v_smfmac_f32_16x16x32_f16 a[0:3], v[2:3], v[12:15], v8 ; here",
        "takes its result as A or B (v8); 7 are needed",
    ),
];

#[test]
fn missing_wait_states() {
    let checks = Checks {
        hazards: true,
        ..Checks::NONE
    };
    check(HAZARDS, checks, |k| matches!(k, FaultKind::Hazard { .. }));
}

const UNDEFINED: &[Case] = &[
    (
        "address",
        "+ v_mov_b32 v9, v1
         global_load_dword v3, v9, s[4:5] ; here",
        "v9 of lane 0 is undefined and decides an address: nothing wrote v9",
    ),
    (
        "scalar_address",
        "+ s_mov_b64 s[10:11], s[4:5]
         s_load_dword s8, s[10:11], 0x0 ; here",
        "s10 is undefined and decides an address: nothing wrote s10",
    ),
    (
        "buffer",
        "s_mov_b64 s[8:9], s[4:5]
         s_mov_b32 s10, 0x1000
         + s_mov_b32 s11, 0x20000
         buffer_load_dword v3, v1, s[8:11], 0 offen ; here",
        "s11 is undefined and decides an address",
    ),
    (
        "lds_address",
        "+ v_mov_b32 v9, v1
         ds_write_b32 v9, v1 ; here",
        "v9 of lane 0 is undefined and decides an address",
    ),
    (
        "stored",
        "+ v_mov_b32 v9, v1
         global_store_dword v1, v9, s[6:7] ; here",
        "v9 of lane 0 is undefined and decides what is stored to memory: nothing wrote v9",
    ),
    (
        "carried_on",
        "+ v_mov_b32 v9, v1
         v_mov_b32 v10, v9
         v_fma_f32 v11, v1, v1, v10
         global_store_dword v1, v11, s[6:7] ; here",
        "v11 of lane 0 is undefined and decides what is stored to memory: nothing wrote v9",
    ),
    (
        "atomic",
        "+ v_mov_b32 v9, v1
         global_atomic_add v1, v9, s[6:7] ; here",
        "decides what an atomic does to memory",
    ),
    (
        "some_lanes",
        "+ v_mov_b32 v9, 2
         s_mov_b64 exec, 0xff
         v_mov_b32 v9, 1
         s_mov_b64 exec, -1
         global_store_dword v1, v9, s[6:7] ; here",
        "v9 of lane 8 is undefined",
    ),
    (
        "scalar_branch",
        "+ s_mov_b32 s10, 0
         s_cmp_gt_u32 s10, 1
         s_cbranch_scc1 0 ; here",
        "scc is undefined and decides the next instruction: nothing wrote s10",
    ),
    (
        "vector_branch",
        "+ v_mov_b32 v9, 0
         v_cmp_eq_u32 vcc, v9, v1
         s_cbranch_vccz 0 ; here",
        "vcc_lo is undefined and decides the next instruction: nothing wrote v9",
    ),
    (
        "exec_mask",
        "+ v_mov_b32 v9, 0
         v_cmp_eq_u32 s[10:11], v9, v1
         s_and_saveexec_b64 s[12:13], s[10:11] ; here",
        "exec_lo is undefined and decides the active lanes: nothing wrote v9",
    ),
    (
        "compare_to_exec",
        "+ v_mov_b32 v9, 0
         v_cmpx_eq_u32 exec, v9, v1 ; here",
        "decides the active lanes",
    ),
    (
        "m0",
        "+ s_mov_b32 m0, 0
         ds_append v3 ; here",
        "m0 is undefined and decides an address",
    ),
    (
        "lds_unwritten",
        "+ ds_write_b32 v1, v1
         ds_read_b32 v3, v1 ; cause
         s_waitcnt lgkmcnt(0)
         global_store_dword v1, v3, s[6:7] ; here",
        "by lane 0 from LDS address 0x0, which nothing wrote",
    ),
    (
        "lds_written_in_part",
        "ds_write_b32 v1, v1
         + ds_write_b32 v1, v1 offset:256
         ds_read_b32 v3, v1 offset:128 ; cause
         s_waitcnt lgkmcnt(0)
         global_store_dword v1, v3, s[6:7] ; here",
        "by lane 32 from LDS address 0x100, which nothing wrote",
    ),
    (
        "lds_holds_undefined",
        "+ v_mov_b32 v9, v1
         ds_write_b32 v1, v9
         ds_read_b32 v3, v1 ; cause
         s_waitcnt lgkmcnt(0)
         global_store_dword v1, v3, s[6:7] ; here",
        "from LDS address 0x0, where an undefined value was stored",
    ),
    (
        "scratch_unwritten",
        "+ scratch_store_dword off, v1, off offset:16
         scratch_load_dword v3, off, off offset:16 ; cause
         s_waitcnt vmcnt(0)
         global_store_dword v1, v3, s[6:7] ; here",
        "from scratch offset 0x10, which nothing wrote",
    ),
    (
        "memory_unwritten",
        "+ global_store_dword v1, v1, s[6:7]
         global_load_dword v3, v1, s[6:7] ; cause
         s_waitcnt vmcnt(0)
         global_store_dword v1, v3, s[4:5] ; here",
        "which nothing wrote",
    ),
    (
        "memory_unwritten_scalar",
        "+ global_store_dword v1, v1, s[6:7]
         s_load_dword s8, s[6:7], 0x0 ; cause
         s_waitcnt lgkmcnt(0)
         v_mov_b32 v3, s8
         global_store_dword v1, v3, s[4:5] ; here",
        "which nothing wrote",
    ),
    (
        "lane_read",
        "+ v_mov_b32 v9, 0
         v_readlane_b32 s8, v9, 3
         s_load_dword s9, s[4:5], s8 ; here",
        "s8 is undefined and decides an address: nothing wrote v9",
    ),
    (
        "row_of_a_product",
        "s_mov_b32 exec_lo, 0xffffffdf
         v_mov_b32 v9, 1.0
         s_mov_b32 exec_lo, -1
         + v_mov_b32 v9, 1.0
         v_mov_b32 v10, 1.0
         v_mfma_f32_16x16x4_f32 a[0:3], v9, v10, 0
         s_nop 15
         v_accvgpr_read_b32 v11, a0
         global_store_dword v1, v11, s[6:7]
         v_accvgpr_read_b32 v11, a1
         global_store_dword v1, v11, s[6:7] ; here",
        "v11 of lane 16 is undefined and decides what is stored to memory: nothing wrote v9",
    ),
    (
        "column_of_a_product",
        "s_mov_b32 exec_lo, 0xffffffdf
         v_mov_b32 v9, 1.0
         s_mov_b32 exec_lo, -1
         + v_mov_b32 v9, 1.0
         v_mov_b32 v10, 1.0
         v_mfma_f32_16x16x4_f32 a[0:3], v10, v9, 0
         s_nop 15
         v_accvgpr_read_b32 v11, a1
         global_store_dword v1, v11, s[6:7] ; here",
        "v11 of lane 5 is undefined",
    ),
    (
        "moved_between_lanes",
        "s_mov_b64 exec, 0xf
         v_mov_b32 v9, 1
         s_mov_b64 exec, -1
         + v_mov_b32 v9, 1
         v_mov_b32 v10, 0
         s_nop 1
         v_mov_b32_dpp v10, v9 row_shr:1 row_mask:0xf bank_mask:0xf
         global_store_dword v1, v10, s[6:7] ; here",
        "v10 of lane 5 is undefined",
    ),
    (
        "pulled_from_lanes",
        "s_mov_b64 exec, 0xf
         v_mov_b32 v9, 1
         s_mov_b64 exec, -1
         + v_mov_b32 v9, 1
         v_add_u32 v3, 4, v1
         ds_bpermute_b32 v10, v3, v9
         s_waitcnt lgkmcnt(0)
         global_store_dword v1, v10, s[6:7] ; here",
        "v10 of lane 3 is undefined",
    ),
    (
        "selected",
        "v_cmp_gt_u32 s[10:11], 32, v0
         + v_mov_b32 v9, 0
         s_nop 1
         v_cndmask_b32 v3, v9, v1, s[10:11]
         global_store_dword v1, v3, s[6:7] ; here",
        "v3 of lane 32 is undefined",
    ),
    (
        "zeroed_by_itself",
        "v_xor_b32 v9, v9, v9
         s_xor_b32 s10, s10, s10
         v_add_u32 v9, s10, v9
         global_store_dword v1, v9, s[6:7]",
        "",
    ),
    (
        "the_defined_one_is_selected",
        "v_cmp_le_u32 s[10:11], 0, v1
         s_nop 1
         v_cndmask_b32 v3, v9, v1, s[10:11]
         global_store_dword v1, v3, s[6:7]",
        "",
    ),
    (
        "garbage_is_saved_and_restored",
        "scratch_store_dwordx2 off, v[40:41], off
         v_mov_b32 v40, v1
         s_mov_b32 s40, s30
         v_writelane_b32 v41, s31, 2
         s_waitcnt vmcnt(0)
         scratch_load_dwordx2 v[40:41], off, off
         s_waitcnt vmcnt(0)
         global_store_dword v1, v1, s[6:7]",
        "",
    ),
    (
        "a_zero_decides_an_and",
        "v_mov_b32 v8, 0
         v_and_b32 v3, v9, v8
         s_and_b32 s10, s11, 0
         s_cbranch_scc1 0
         v_add_u32 v3, s10, v3
         global_store_dword v1, v3, s[6:7]",
        "",
    ),
    (
        "lanes_that_are_off",
        "s_mov_b64 exec, 0xff
         v_mov_b32 v9, v1
         global_store_dword v9, v1, s[6:7]
         v_cmp_eq_u32 vcc, v9, v1
         s_and_saveexec_b64 s[10:11], vcc
         global_store_dword v9, v1, s[6:7]",
        "",
    ),
    (
        "halves_put_together",
        "s_mov_b32 s10, 0x7060302
         v_perm_b32 v10, v1, v9, s10
         v_lshl_or_b32 v10, v1, 16, v10
         v_perm_b32 v10, v1, v10, s10
         global_store_dword v1, v10, s[6:7]",
        "",
    ),
    (
        "halves_of_nothing",
        "s_mov_b32 s10, 0x7060302
         + v_mov_b32 v9, 0
         v_perm_b32 v10, v9, v9, s10
         global_store_dword v1, v10, s[6:7] ; here",
        "v10 of lane 0 is undefined",
    ),
    (
        "a_high_half_that_is_not_used",
        "v_mov_b32 v8, 1
         v_mad_u64_u32 v[10:11], s[10:11], v1, v1, v[8:9]
         v_lshl_add_u64 v[10:11], v[10:11], 2, v[8:9]
         v_lshlrev_b64 v[12:13], 32, v[10:11]
         v_lshrrev_b64 v[14:15], 3, v[12:13]
         v_add_u32 v10, v10, v14
         global_store_dword v1, v10, s[6:7]",
        "",
    ),
    (
        "a_high_half_that_is_used",
        "v_mov_b32 v8, 1
         + v_mov_b32 v9, 1
         v_lshl_add_u64 v[10:11], v[8:9], 2, v[8:9]
         global_store_dword v1, v11, s[6:7] ; here",
        "v11 of lane 0 is undefined",
    ),
    (
        "one_half_of_a_pair",
        "v_mov_b32 v8, 1.0
         v_pk_mul_f32 v[10:11], v[8:9], v[8:9] op_sel_hi:[0,0]
         global_store_dwordx2 v1, v[10:11], s[6:7]",
        "",
    ),
];

#[test]
fn undefined_values() {
    let checks = Checks {
        uninitialized: true,
        ..Checks::NONE
    };
    check(UNDEFINED, checks, |k| {
        matches!(k, FaultKind::Undefined { .. })
    });
}
