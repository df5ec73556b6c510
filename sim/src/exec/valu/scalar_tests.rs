//! Tests of scalar instructions, with the helpers of the vector tests.

use super::tests::{inst, run, step, wave};
use crate::exec::{Flow, Level};
use crate::inst::{EXEC, Format, LITERAL, NONE};
use crate::op::Op;

#[test]
fn scalars() {
    let mut w = wave();
    w.sgpr[4..8].copy_from_slice(&[0xffff_ffff, 2, 0x8000_0000, 0x1234]);
    let mut go = |op, format, sdst: u16, src: &[u16], imm| {
        let mut i = inst(op, format, NONE, src);
        (i.sdst, i.imm) = (sdst, imm);
        w = run(&i, &w);
        (w.s64(sdst & 127), w.scc, w.exec())
    };
    use Format::{Sop1, Sop2, Sopc, Sopk};
    let low = |x: (u64, bool, u64)| (x.0 as u32, x.1);
    assert_eq!(low(go(Op::S_ADD_U32, Sop2, 8, &[4, 5], 0)), (1, true));
    assert_eq!(low(go(Op::S_ADDC_U32, Sop2, 8, &[5, 5], 0)), (5, false));
    assert_eq!(
        low(go(Op::S_SUB_I32, Sop2, 8, &[6, 129], 0)),
        (0x7fff_ffff, true)
    );
    assert_eq!(
        low(go(Op::S_ASHR_I32, Sop2, 8, &[6, 131], 0)),
        (0xf000_0000, true)
    );
    assert_eq!(low(go(Op::S_BFE_U32, Sop2, 8, &[7, LITERAL], 0)).0, 0);
    assert_eq!(low(go(Op::S_FF1_I32_B32, Sop1, 8, &[6], 0)).0, 31);
    assert_eq!(go(Op::S_MOV_B64, Sop1, 8, &[193], 0).0, u64::MAX);
    assert_eq!(go(Op::S_MOV_B64, Sop1, 8, &[235], 0).0, 1 << 48);
    assert_eq!(go(Op::S_LSHL_B64, Sop2, 8, &[4, 132], 0).0, 0x2f_ffff_fff0);
    assert!(go(Op::S_CMP_GT_I32, Sopc, 8, &[5, 4], 0).1);
    assert!(go(Op::S_CMPK_EQ_U32, Sopk, 7, &[], 0x1234).1);
    assert_eq!(go(Op::S_CSELECT_B64, Sop2, 8, &[4, 6], 0).0, 0x2_ffff_ffff);
    assert_eq!(go(Op::S_BITREPLICATE_B64_B32, Sop1, 8, &[5], 0).0, 0b1100);
    assert_eq!(low(go(Op::S_GETREG_B32, Sopk, 8, &[], 31 << 11 | 20)).0, 3);
    assert_eq!(
        low(go(Op::S_GETREG_B32, Sopk, 8, &[], 3 << 11 | 4 << 6 | 1)).0,
        15
    );
    let saved = go(Op::S_AND_SAVEEXEC_B64, Sop1, 10, &[4], 0);
    assert_eq!(saved, (u64::MAX, true, 0x2_ffff_ffff));
    assert_eq!(
        go(Op::S_ANDN2_B64, Sop2, 8, &[10, EXEC], 0).0,
        !0x2_ffff_ffff
    );
}

#[test]
fn control_flow() {
    let mut w = wave();
    let level = Level::Baseline;
    let mut i = inst(Op::S_CBRANCH_SCC1, Format::Sopp, NONE, &[]);
    i.target = 7;
    assert_eq!(step(&i, &mut w, level), Flow::Next);
    assert_eq!(w.pc, 0);
    w.scc = true;
    step(&i, &mut w, level);
    assert_eq!(w.pc, 7);
    i.target = u32::MAX;
    assert_eq!(step(&i, &mut w, level), Flow::Fault);
    for (op, flow) in [
        (Op::S_BARRIER, Flow::Barrier),
        (Op::S_SLEEP, Flow::Yield),
        (Op::S_NOP, Flow::Next),
        (Op::S_TRAP, Flow::Fault),
        (Op::S_ENDPGM, Flow::End),
    ] {
        assert_eq!(
            step(&inst(op, Format::Sopp, NONE, &[]), &mut w, level),
            flow
        );
    }
    assert!(w.ended);
}
