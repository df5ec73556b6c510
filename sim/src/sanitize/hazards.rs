//! Hazard check: wait states that the hardware needs between two instructions and does not insert itself.
//!
//! An instruction is one wait state; `s_nop N` is N + 1. The rules are those of LLVM's `GCNHazardRecognizer.cpp` for
//! gfx940, and of "Manually Inserted Wait States" in AMD's instruction set guide of MI300:
//!
//! | before | after | states |
//! |---|---|---|
//! | VALU writes an SGPR | vector memory reads it | 5 |
//! | VALU writes an SGPR or VCC | VALU reads it | 2 |
//! | VALU writes an SGPR | `v_readlane`, `v_writelane` take it as the lane | 4 |
//! | VALU writes VCC | `v_div_fmas` | 4 |
//! | VALU writes EXEC | DPP / `v_readlane`, `v_readfirstlane`, `v_writelane`, MFMA | 5 / 4 |
//! | VALU writes a VGPR | DPP reads it / `v_readlane`, `v_readfirstlane` read it | 2 / 1 |
//! | VALU writes a VGPR | MFMA reads it | 2 |
//! | transcendental writes a VGPR | other VALU reads it | 1 |
//! | VALU writes a part of a VGPR (SDWA, op_sel) | VALU reads it | 1 |
//! | dot product writes a VGPR | anything but the same one's accumulator uses it | 3 |
//! | store of more than 64 bits | VALU writes the data | 2 |
//! | SALU writes M0 | `s_movrel`, `s_sendmsg`, LDS with lane number, load to LDS | 1 |
//! | `s_setreg` | `s_getreg`, `s_setreg` of the same register | 2 |
//! | f64 MFMA | `v_fma_f64` | 2 |
//! | MFMA of p passes | see [`Matrix`] | |

mod remember;

use super::class::{Class, Unit, is_dma};
use super::matrix::Matrix;
use super::report;
use super::uses::{Role, Use, Uses};
use crate::exec::Env;
use crate::fault::FaultKind;
use crate::inst::{EXEC, Inst, VCC, flag};
use crate::op::Op::{self, *};
use crate::wave::Wave;

/// Maximum distance of two instructions in a rule, in wait states.
const LONGEST: u32 = 20;
/// Number of wait states for which the log remembers the instruction that began there.
const LOG: usize = 32;

/// A recent result.
#[derive(Clone, Copy, Default)]
struct Recent {
    time: u32,
    first: u16,
    count: u16,
    op: Option<Op>,
}

impl Recent {
    fn overlaps(&self, first: usize, count: usize) -> bool {
        let from = usize::from(self.first);
        from < first + count && first < from + usize::from(self.count)
    }
}

/// Last events of a wave, as wait state numbers. 0 is long ago.
pub(super) struct Hazards {
    now: u32,
    /// Last write of each register by the vector unit, without matrix products.
    vector: Box<[u32; 512]>,
    scalar: [u32; 128],
    /// Last matrix product that writes each register, and last that reads it as C.
    result: Box<[u32; 512]>,
    addend: Box<[u32; 512]>,
    last_matrix: u32,
    matrices: [Option<Matrix>; LOG],
    /// Instruction that began in each recent wait state.
    log: [u32; LOG],
    transcendental: Recent,
    part: Recent,
    dots: [Recent; 3],
    stores: [Recent; 2],
    m0: u32,
    /// Last `s_setreg` instructions: wait state and number of the hardware register.
    setreg: [(u32, u32); 2],
}

impl Default for Hazards {
    fn default() -> Self {
        Hazards {
            now: 64,
            vector: Box::new([0; 512]),
            scalar: [0; 128],
            result: Box::new([0; 512]),
            addend: Box::new([0; 512]),
            last_matrix: 0,
            matrices: [None; LOG],
            log: [0; LOG],
            transcendental: Recent::default(),
            part: Recent::default(),
            dots: Default::default(),
            stores: Default::default(),
            m0: 0,
            setreg: Default::default(),
        }
    }
}

/// A hazard: start, number of wait states needed, and rule.
struct Found {
    since: u32,
    needed: u32,
    rule: &'static str,
    register: Option<(bool, usize)>,
}

type Check = Result<(), Found>;

impl Hazards {
    /// Checks an instruction that is about to be executed, and advances the wait states.
    pub fn step(
        &mut self,
        (w, at, inst, uses): (&Wave, u32, &Inst, &Uses),
        env: &Env,
    ) -> Result<(), FaultKind> {
        let checked = match uses.class {
            Class::Scalar => self.before_scalar(inst),
            Class::Vector | Class::Matrix { .. } => self.before_vector(w, inst, uses),
            Class::Local | Class::Memory | Class::Flat => self.before_memory(w, inst, uses),
            _ => Ok(()),
        };
        if let Err(found) = checked {
            return Err(self.fault(w, found, env));
        }
        self.log[self.now as usize % LOG] = at;
        self.remember(w, inst, uses);
        self.now += match inst.op {
            S_NOP => (inst.imm as u32 & 15) + 1,
            // The instructions are fetched again, which takes longer than any result.
            S_SETPC_B64 | S_SWAPPC_B64 => LONGEST,
            _ => 1,
        };
        Ok(())
    }

    /// Faults unless `needed` wait states lie between the instruction at `since` and the next one.
    fn need(
        &self,
        since: u32,
        needed: u32,
        rule: &'static str,
        register: Option<(bool, usize)>,
    ) -> Check {
        if since != 0 && self.now - since - 1 < needed {
            return Err(Found {
                since,
                needed,
                rule,
                register,
            });
        }
        Ok(())
    }

    fn need_scalar(&self, u: &Use, needed: u32, rule: &'static str) -> Check {
        if u.first < 128 {
            for s in usize::from(u.first)..(usize::from(u.first) + usize::from(u.count)).min(128) {
                self.need(self.scalar[s], needed, rule, Some((false, s)))?;
            }
        }
        Ok(())
    }

    fn before_scalar(&self, inst: &Inst) -> Check {
        match inst.op {
            S_MOVRELS_B32 | S_MOVRELS_B64 | S_MOVRELD_B32 | S_MOVRELD_B64 | S_SENDMSG
            | S_SENDMSGHALT | S_TTRACEDATA => {
                self.need(self.m0, 1, "SALU writes M0, then it is read", None)
            }
            S_GETREG_B32 | S_SETREG_B32 | S_SETREG_IMM32_B32 => {
                let id = inst.imm as u32 & 63;
                for (time, other) in self.setreg {
                    if other == id {
                        self.need(
                            time,
                            2,
                            "s_setreg, then s_getreg or s_setreg of the same register",
                            None,
                        )?;
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn before_memory(&self, w: &Wave, inst: &Inst, uses: &Uses) -> Check {
        if uses.class.is_vmem() {
            for u in uses.reads().iter().filter(|u| u.role == Role::Address) {
                self.need_scalar(u, 5, "VALU writes an SGPR, then vector memory reads it")?;
            }
        }
        let by_lane = matches!(inst.op, DS_READ_ADDTID_B32 | DS_WRITE_ADDTID_B32);
        if is_dma(inst) || by_lane {
            self.need(self.m0, 1, "SALU writes M0, then it is read", None)?;
        }
        self.results(w, uses, true, None)
    }

    fn before_vector(&self, w: &Wave, inst: &Inst, uses: &Uses) -> Check {
        if let Class::Matrix { unit, passes } = uses.class {
            return self.before_matrix(w, uses, unit, passes.into());
        }
        let lane_access = matches!(
            inst.op,
            V_READLANE_B32 | V_READFIRSTLANE_B32 | V_WRITELANE_B32
        );
        if lane_access {
            self.lane_access(w, inst, uses)?;
        }
        for u in uses.reads() {
            match u.role {
                Role::Source0 | Role::Source1 | Role::Source2 | Role::Mask => {
                    self.need_scalar(u, 2, "VALU writes an SGPR, then VALU reads it")?;
                }
                _ => {}
            }
        }
        if matches!(inst.op, V_DIV_FMAS_F32 | V_DIV_FMAS_F64) {
            let vcc = usize::from(VCC);
            let time = self.scalar[vcc].max(self.scalar[vcc + 1]);
            self.need(time, 4, "VALU writes VCC, then v_div_fmas", None)?;
        }
        if inst.has(flag::DPP) {
            let exec = usize::from(EXEC);
            let time = self.scalar[exec].max(self.scalar[exec + 1]);
            self.need(time, 5, "VALU writes EXEC, then DPP", None)?;
            for (v, count) in vectors(w, uses.reads()) {
                for v in v..v + count {
                    self.need(
                        self.vector[v],
                        2,
                        "VALU writes a VGPR, then DPP reads it",
                        Some((true, v)),
                    )?;
                }
            }
        }
        self.forwarded(w, uses)?;
        if matches!(inst.op, V_FMA_F64 | V_FMAC_F64)
            && let Some(m) = self.matrices[self.last_matrix as usize % LOG]
            && m.unit == Unit::Double
        {
            self.need(self.last_matrix, 2, "f64 MFMA, then v_fma_f64", None)?;
        }
        for (v, count) in vectors(w, uses.writes()) {
            for s in self.stores.iter().filter(|s| s.overlaps(v, count)) {
                let rule = "a store of more than 64 bits, then VALU writes its data";
                self.need(s.time, 2, rule, Some((true, v.max(s.first.into()))))?;
            }
        }
        self.results(w, uses, false, Some(inst.op))
    }

    fn lane_access(&self, w: &Wave, inst: &Inst, uses: &Uses) -> Check {
        let exec = usize::from(EXEC);
        let time = self.scalar[exec].max(self.scalar[exec + 1]);
        self.need(
            time,
            4,
            "VALU writes EXEC, then a single lane is read or written",
            None,
        )?;
        if inst.op != V_READFIRSTLANE_B32
            && let Some(u) = uses.role(Role::Source1)
        {
            self.need_scalar(u, 4, "VALU writes an SGPR, then it selects a lane")?;
        }
        if inst.op != V_WRITELANE_B32 {
            for (v, _) in vectors(w, uses.reads()) {
                self.need(
                    self.vector[v],
                    1,
                    "VALU writes a VGPR, then v_readlane reads it",
                    Some((true, v)),
                )?;
            }
        }
        Ok(())
    }

    /// Checks results that cannot be forwarded to the next instruction.
    fn forwarded(&self, w: &Wave, uses: &Uses) -> Check {
        if self.transcendental.time + 1 != self.now && self.part.time + 1 != self.now {
            return Ok(());
        }
        for u in uses.reads().iter().filter(|u| u.role != Role::Kept) {
            let Some(v) = u.vector(w.accum_offset) else {
                continue;
            };
            let count = usize::from(u.count);
            let (t, p) = (&self.transcendental, &self.part);
            if t.overlaps(v, count) && !uses.transcendental {
                let rule = "a transcendental instruction, then another VALU reads its result";
                self.need(t.time, 1, rule, Some((true, v.max(t.first.into()))))?;
            }
            if p.overlaps(v, count) {
                let rule = "VALU writes a part of a VGPR, then VALU reads it";
                self.need(p.time, 1, rule, Some((true, v)))?;
            }
        }
        Ok(())
    }

    /// Checks results of dot and matrix products that other vector instructions or memory accesses use.
    fn results(&self, w: &Wave, uses: &Uses, memory: bool, op: Option<Op>) -> Check {
        for dot in self.dots.iter().filter(|d| d.time + 4 > self.now) {
            let same = dot.op == op;
            for u in uses.reads() {
                let Some(v) = u.vector(w.accum_offset) else {
                    continue;
                };
                let addend = matches!(u.role, Role::Source2 | Role::Accumulator);
                if dot.overlaps(v, u.count.into()) && !(same && addend) {
                    self.need(
                        dot.time,
                        3,
                        "a dot product, then its result is read",
                        Some((true, v)),
                    )?;
                }
            }
            for (v, count) in vectors(w, uses.writes()) {
                if dot.overlaps(v, count) && !same {
                    self.need(
                        dot.time,
                        3,
                        "a dot product, then its result is overwritten",
                        Some((true, v)),
                    )?;
                }
            }
        }
        if self.last_matrix + LONGEST < self.now {
            return Ok(());
        }
        for (v, count) in vectors(w, uses.reads()) {
            for v in v..v + count {
                if let Some(m) = self.matrix(self.result[v]) {
                    let needed = m.to_use(memory, false);
                    self.need(
                        self.result[v],
                        needed,
                        "MFMA, then its result is read",
                        Some((true, v)),
                    )?;
                }
            }
        }
        for (v, count) in vectors(w, uses.writes()) {
            for v in v..v + count {
                let register = Some((true, v));
                if let Some(m) = self.matrix(self.result[v]) {
                    let needed = m.to_use(memory, true);
                    self.need(
                        self.result[v],
                        needed,
                        "MFMA, then its result is overwritten",
                        register,
                    )?;
                }
                if let Some(m) = self.matrix(self.addend[v]) {
                    let needed = m.to_overwrite_addend();
                    self.need(
                        self.addend[v],
                        needed,
                        "MFMA, then its C is overwritten",
                        register,
                    )?;
                }
            }
        }
        Ok(())
    }

    fn before_matrix(&self, w: &Wave, uses: &Uses, unit: Unit, passes: u32) -> Check {
        let exec = usize::from(EXEC);
        let time = self.scalar[exec].max(self.scalar[exec + 1]);
        self.need(time, 4, "VALU writes EXEC, then MFMA", None)?;
        let sparse = uses.role(Role::Accumulator).is_some();
        for u in uses.reads() {
            let Some(first) = u.vector(w.accum_offset) else {
                continue;
            };
            let addend = u.role == Role::Accumulator || u.role == Role::Source2 && !sparse;
            for v in first..(first + usize::from(u.count)).min(512) {
                let register = Some((true, v));
                self.need(
                    self.vector[v],
                    2,
                    "VALU writes a VGPR, then MFMA reads it",
                    register,
                )?;
                let Some(m) = self.matrix(self.result[v]) else {
                    continue;
                };
                let same = usize::from(m.first) == first && m.count == u16::from(u.count);
                let (needed, rule) = if addend {
                    let needed = m.to_addend(unit, passes, same);
                    (needed, "MFMA, then MFMA takes its result as C")
                } else {
                    (m.to_factor(), "MFMA, then MFMA takes its result as A or B")
                };
                self.need(self.result[v], needed, rule, register)?;
            }
        }
        Ok(())
    }

    /// Matrix product that began at `time`; `None` if that is long ago.
    fn matrix(&self, time: u32) -> Option<Matrix> {
        if time + LONGEST < self.now {
            return None;
        }
        self.matrices[time as usize % LOG]
    }

    #[cold]
    fn fault(&self, w: &Wave, found: Found, env: &Env) -> FaultKind {
        FaultKind::Hazard {
            rule: found.rule,
            register: found.register.map(|(vector, r)| {
                if vector {
                    report::vector(w, r)
                } else {
                    report::scalar(r as u16)
                }
            }),
            before: report::instruction(env, self.log[found.since as usize % LOG]),
            needed: found.needed,
            found: self.now - found.since - 1,
        }
    }
}

/// Vector registers of some uses.
fn vectors<'a>(w: &'a Wave, uses: &'a [Use]) -> impl Iterator<Item = (usize, usize)> + 'a {
    uses.iter().filter_map(|u| {
        let first = u.vector(w.accum_offset)?;
        Some((first, usize::from(u.count).min(512 - first)))
    })
}
