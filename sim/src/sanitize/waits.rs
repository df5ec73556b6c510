//! Wait check: finds uses of registers that an outstanding load will still write.
//!
//! Counters hold the number of outstanding memory operations of each kind; `s_waitcnt` waits until a counter is low
//! enough. Vector memory operations complete in order, and so do LDS operations. A wait for a count above zero
//! therefore covers the oldest ones. Scalar loads complete in any order: only a wait for zero covers one. A flat
//! operation counts for the memory that its lanes access. Sources: "Memory Model gfx942" in LLVM's AMDGPU usage guide,
//! and `SIInsertWaitcnts.cpp`.

use std::collections::VecDeque;

use super::accesses::{Access, Action, Space};
use super::class::{Class, is_dma};
use super::report;
use super::uses::{Role, Use, Uses};
use crate::exec::lanes::lanes;
use crate::exec::{Env, SHARED_BASE_HI};
use crate::fault::FaultKind;
use crate::inst::{Inst, VGPR0};
use crate::op::Op::*;
use crate::wave::Wave;

/// Words of a set of all registers: vector registers by index in the unified file, then scalar ones.
const WORDS: usize = (512 + 128) / 64;
const SCALARS: usize = 512;

/// An outstanding memory operation.
struct Operation {
    /// Index in the program.
    at: u32,
    /// Registers that it will write.
    first: u16,
    count: u8,
    /// Whether it completes in any order: a scalar load.
    unordered: bool,
    /// First and last address in LDS that a load to LDS will write.
    lds: Option<(u64, u64)>,
}

/// One counter.
#[derive(Default)]
struct Counter {
    outstanding: VecDeque<Operation>,
}

impl Counter {
    /// Waits until at most `left` operations are outstanding. Returns whether any completed.
    fn wait(&mut self, left: usize) -> bool {
        let n = self.outstanding.len();
        if n <= left || left > 0 && self.outstanding.iter().any(|o| o.unordered) {
            return false;
        }
        self.outstanding.drain(..n - left);
        true
    }

    /// Counter value for which `s_waitcnt` has to wait to complete operation `i`.
    fn needed(&self, i: usize) -> usize {
        if self.outstanding.iter().any(|o| o.unordered) {
            return 0;
        }
        self.outstanding.len() - 1 - i
    }
}

/// Outstanding operations of a wave.
#[derive(Default)]
pub(super) struct Waits {
    /// `vmcnt`: vector memory.
    vm: Counter,
    /// `lgkmcnt`: LDS, scalar memory, messages.
    lgkm: Counter,
    /// Registers that outstanding operations will write.
    pending: [u64; WORDS],
    any: bool,
    /// Whether loads to LDS are outstanding.
    to_lds: bool,
}

/// Maximum values of the counters. As an operand they mean no wait.
const VM_MOST: usize = 63;
const LGKM_MOST: usize = 15;

impl Waits {
    /// Checks an instruction that is about to be executed, and counts it.
    pub fn step(
        &mut self,
        (w, at, inst, uses): (&Wave, u32, &Inst, &Uses),
        accesses: &[Access],
        env: &Env,
    ) -> Result<(), FaultKind> {
        if self.to_lds {
            self.check_lds(accesses, env)?;
        }
        if self.any {
            for u in uses.reads() {
                if self.touches(w, u) {
                    return Err(self.fault(w, u, "read", env));
                }
            }
            for u in uses.writes() {
                if self.touches(w, u) && !self.in_order(w, u, uses.class) {
                    return Err(self.fault(w, u, "written", env));
                }
            }
        }
        match uses.class {
            Class::Scalar if inst.op == S_WAITCNT => self.wait(inst.imm as u32),
            Class::Scalar if matches!(inst.op, S_SENDMSG | S_SENDMSGHALT) => {
                self.count((w, at, inst, uses), accesses, false)
            }
            Class::ScalarMemory | Class::Local => self.count((w, at, inst, uses), accesses, false),
            Class::Memory => self.count((w, at, inst, uses), accesses, true),
            Class::Flat => {
                let (lds, elsewhere) = flat_targets(w, uses);
                if elsewhere || !lds {
                    self.count((w, at, inst, uses), accesses, true);
                }
                if lds {
                    self.count((w, at, inst, uses), accesses, false);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether [`Waits::step`] needs the instruction's accesses.
    #[inline(always)]
    pub fn needs_accesses(&self, inst: &Inst) -> bool {
        self.to_lds || is_dma(inst)
    }

    /// Faults if an access uses LDS that an outstanding load will write. The loads themselves complete in order.
    #[cold]
    fn check_lds(&self, accesses: &[Access], env: &Env) -> Result<(), FaultKind> {
        let loads_to_lds = accesses
            .iter()
            .any(|a| a.register.is_none() && a.space == Space::Global);
        for a in accesses
            .iter()
            .filter(|a| a.space == Space::Lds && !loads_to_lds)
        {
            for lane in lanes(a.lanes) {
                let (first, last) = (a.addresses[lane], a.addresses[lane] + u64::from(a.size) - 1);
                let outstanding = &self.vm.outstanding;
                let overlap =
                    |o: &Operation| o.lds.is_some_and(|(from, to)| from <= last && first <= to);
                if let Some(i) = outstanding.iter().rposition(overlap) {
                    return Err(FaultKind::NotWaitedFor {
                        register: format!("LDS address {first:#x}"),
                        used: if a.action == Action::Load {
                            "read"
                        } else {
                            "written"
                        },
                        load: report::instruction(env, outstanding[i].at),
                        wait: format!("s_waitcnt vmcnt({})", self.vm.needed(i)),
                    });
                }
            }
        }
        Ok(())
    }

    fn touches(&self, w: &Wave, u: &Use) -> bool {
        let (first, count) = place(w, u);
        (first..first + count).any(|r| self.pending[r / 64] >> (r % 64) & 1 != 0)
    }

    /// Whether an instruction may write a pending register because results complete in order: the second load of a
    /// register returns after the first.
    fn in_order(&self, w: &Wave, u: &Use, class: Class) -> bool {
        class.is_vmem()
            && self
                .lgkm
                .outstanding
                .iter()
                .all(|o| !overlaps(o, place(w, u)))
    }

    fn wait(&mut self, operand: u32) {
        let vm = (operand & 15 | operand >> 10 & 0x30) as usize;
        let lgkm = (operand >> 8 & 15) as usize;
        let ended = vm < VM_MOST && self.vm.wait(vm);
        if lgkm < LGKM_MOST && self.lgkm.wait(lgkm) || ended {
            self.some_ended();
        }
    }

    /// Recomputes the pending registers after operations have completed.
    fn some_ended(&mut self) {
        self.pending = [0; WORDS];
        let (vm, lgkm) = (&self.vm.outstanding, &self.lgkm.outstanding);
        for o in vm.iter().chain(lgkm) {
            mark(&mut self.pending, o);
        }
        self.to_lds = vm.iter().any(|o| o.lds.is_some());
        self.any = self.pending.iter().any(|w| *w != 0);
    }

    fn count(
        &mut self,
        (w, at, inst, uses): (&Wave, u32, &Inst, &Uses),
        accesses: &[Access],
        vm: bool,
    ) {
        let name = inst.op;
        if matches!(
            name,
            DS_NOP
                | BUFFER_INV
                | BUFFER_WBINVL1
                | BUFFER_WBINVL1_VOL
                | S_DCACHE_INV
                | S_DCACHE_INV_VOL
                | S_DCACHE_WB
                | S_DCACHE_WB_VOL
        ) {
            return;
        }
        let (first, count) = uses.writes().first().map_or((0, 0), |u| place(w, u));
        let operation = Operation {
            at,
            first: first as u16,
            count: count as u8,
            unordered: uses.class == Class::ScalarMemory,
            lds: if is_dma(inst) {
                accesses.iter().find(|a| a.space == Space::Lds).map(range)
            } else {
                None
            },
        };
        self.to_lds |= operation.lds.is_some();
        if count > 0 {
            mark(&mut self.pending, &operation);
            self.any = true;
        }
        let counter = if vm { &mut self.vm } else { &mut self.lgkm };
        counter.outstanding.push_back(operation);
        // The first operation completes before more are issued than the counter can count.
        if vm && counter.wait(VM_MOST) {
            self.some_ended();
        }
    }

    #[cold]
    fn fault(&self, w: &Wave, u: &Use, used: &'static str, env: &Env) -> FaultKind {
        let wanted = place(w, u);
        let find = |c: &Counter| c.outstanding.iter().rposition(|o| overlaps(o, wanted));
        let mut waits = Vec::new();
        let mut found = None;
        for (counter, name) in [(&self.vm, "vmcnt"), (&self.lgkm, "lgkmcnt")] {
            if let Some(i) = find(counter) {
                waits.push(format!("{name}({})", counter.needed(i)));
                found = Some(&counter.outstanding[i]);
            }
        }
        let register = found.map_or(wanted.0, |o| wanted.0.max(usize::from(o.first)));
        FaultKind::NotWaitedFor {
            register: match register {
                SCALARS.. => report::scalar((register - SCALARS) as u16),
                _ => report::vector(w, register),
            },
            used,
            load: found.map_or(String::new(), |o| report::instruction(env, o.at)),
            wait: format!("s_waitcnt {}", waits.join(" ")),
        }
    }
}

/// Adds the registers that an operation will write to `pending`.
fn mark(pending: &mut [u64; WORDS], o: &Operation) {
    for r in usize::from(o.first)..usize::from(o.first) + usize::from(o.count) {
        pending[r / 64] |= 1 << (r % 64);
    }
}

/// First and last address that the lanes access.
fn range(a: &Access) -> (u64, u64) {
    let each = || lanes(a.lanes).map(|l| a.addresses[l]);
    let last = each().max().unwrap_or(0) + u64::from(a.size) - 1;
    (each().min().unwrap_or(0), last)
}

/// Index of a use in the set of all registers. SCC and constants are in none.
fn place(w: &Wave, u: &Use) -> (usize, usize) {
    match u.vector(w.accum_offset) {
        Some(v) => (v, usize::from(u.count).min(512 - v)),
        None if u.first < 128 => {
            let first = usize::from(u.first);
            (SCALARS + first, usize::from(u.count).min(128 - first))
        }
        None => (0, 0),
    }
}

fn overlaps(o: &Operation, (first, count): (usize, usize)) -> bool {
    let from = usize::from(o.first);
    from < first + count && first < from + usize::from(o.count)
}

/// Whether a flat access has lanes in LDS, and whether it has lanes elsewhere.
fn flat_targets(w: &Wave, uses: &Uses) -> (bool, bool) {
    let address = uses.role(Role::Address).filter(|u| u.first >= VGPR0);
    let Some(v) = address.and_then(|u| u.vector(w.accum_offset)) else {
        return (false, true);
    };
    let exec = w.exec();
    let high = &w.vgpr[(v + 1) & 511].0;
    let mut lds = 0u64;
    for (lane, x) in high.iter().enumerate() {
        lds |= u64::from(*x == SHARED_BASE_HI) << lane;
    }
    (lds & exec != 0, !lds & exec != 0)
}
