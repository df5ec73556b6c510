//! Launches that would never end: how they are told, and what is said of their waves.
//!
//! A wave that comes back to the very state of registers and pc that it was in, while no wave of its workgroup has
//! written memory or read a clock, will do so for ever, unless another workgroup writes. If that holds for all
//! workgroups that run, the launch hangs.

use std::collections::HashMap;
use std::sync::Mutex;

use super::workgroup::Watch;
use crate::code_object::CodeObject;
use crate::disasm;
use crate::exec::Env;
use crate::fault::{FaultKind, WaveState};
use crate::inst::{Format, Inst};
use crate::op::Op;
use crate::wave::{VReg, Wave};

/// Wave-instructions of a workgroup between two looks.
pub(super) const INTERVAL: u64 = 1 << 20;
/// Instructions in which a wave has to come back for a look to succeed.
const PATIENCE: u64 = 1 << 14;

/// The state of a wave that decides what it does next.
struct Snapshot {
    pc: u32,
    scc: bool,
    mode: u32,
    sgpr: [u32; 128],
    vgpr: Vec<VReg>,
}

impl Snapshot {
    fn of(w: &Wave) -> Self {
        Snapshot {
            pc: w.pc,
            scc: w.scc,
            mode: w.mode,
            sgpr: w.sgpr,
            vgpr: w.vgpr[..usize::from(w.vgpr_count)].to_vec(),
        }
    }

    fn is(&self, w: &Wave) -> bool {
        self.pc == w.pc
            && (self.scc, self.mode) == (w.scc, w.mode)
            && self.sgpr == w.sgpr
            && self.vgpr.iter().zip(w.vgpr.iter()).all(|(a, b)| a.0 == b.0)
    }
}

/// A look at the waves of a workgroup while they run.
pub(super) struct Look {
    waves: Vec<Option<(Snapshot, bool)>>,
    /// Something was written, or a clock read.
    moved: bool,
    left: u64,
}

impl Look {
    pub fn new(count: usize) -> Self {
        Look {
            waves: (0..count).map(|_| None).collect(),
            moved: false,
            left: PATIENCE * count as u64,
        }
    }

    /// What it shows of the waves that run: `None`, not known yet; else whether all of them only repeat themselves.
    pub fn result(&self, runs: impl Fn(usize) -> bool) -> Option<bool> {
        if self.moved || self.left == 0 {
            return Some(false);
        }
        let repeats = |wave: &Option<(Snapshot, bool)>| wave.as_ref().is_some_and(|(_, r)| *r);
        let mut running = self.waves.iter().enumerate().filter(|(i, _)| runs(*i));
        running.all(|(_, wave)| repeats(wave)).then_some(true)
    }
}

/// [`Look`] beside another watch.
pub(super) struct Looking<'a, W> {
    pub look: &'a mut Look,
    pub inner: &'a mut W,
}

impl<W: Watch> Watch for Looking<'_, W> {
    fn before(&mut self, w: &Wave, at: u32, inst: &Inst, env: &Env) -> Result<(), FaultKind> {
        let place = &mut self.look.waves[w.id as usize];
        match place {
            None => *place = Some((Snapshot::of(w), false)),
            Some((_, true)) => {}
            Some((snapshot, repeats)) => *repeats = snapshot.is(w),
        }
        self.look.left = self.look.left.saturating_sub(1);
        self.look.moved |= moves(inst);
        self.inner.before(w, at, inst, env)
    }
}

/// Whether an instruction writes memory or reads a clock.
fn moves(inst: &Inst) -> bool {
    match inst.format {
        Format::Ds => !inst.op.mnemonic().starts_with("ds_read"),
        Format::Flat | Format::Global | Format::Scratch | Format::Mubuf | Format::Mtbuf => {
            let name = inst.op.mnemonic();
            name.contains("_store_") || name.contains("_atomic_") || name.contains("_lds_")
        }
        Format::Smem => matches!(inst.op, Op::S_MEMTIME | Op::S_MEMREALTIME),
        _ => matches!(inst.op, Op::S_BARRIER | Op::S_GETREG_B32),
    }
}

/// Which workgroups of a launch only repeat themselves.
#[derive(Default)]
pub(super) struct Stuck(Mutex<Proofs>);

#[derive(Default)]
struct Proofs {
    /// Counts the workgroups that got stuck.
    entered: u64,
    /// For each that is: the count before its last look began. A look proves nothing about later writes of a
    /// workgroup that got stuck after it.
    looks: HashMap<u64, u64>,
    /// Host threads that run workgroups.
    threads: usize,
}

impl Stuck {
    fn lock(&self) -> std::sync::MutexGuard<'_, Proofs> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A host thread begins, or (`false`) ends.
    pub fn thread(&self, begins: bool) {
        let mut proofs = self.lock();
        match begins {
            true => proofs.threads += 1,
            false => proofs.threads -= 1,
        }
    }

    /// A look begins: what to give to [`Stuck::looked`].
    pub fn look(&self) -> u64 {
        self.lock().entered
    }

    /// A look at a workgroup has ended. Whether all that run are stuck.
    pub fn looked(&self, workgroup: u64, began: u64, stuck: bool) -> bool {
        let mut proofs = self.lock();
        if !stuck {
            proofs.looks.remove(&workgroup);
            return false;
        }
        if proofs.looks.insert(workgroup, began).is_none() {
            proofs.entered += 1;
            // Alone, it needs no second look.
            return proofs.threads == 1;
        }
        let entered = proofs.entered;
        proofs.looks.len() == proofs.threads && proofs.looks.values().all(|l| *l == entered)
    }
}

/// What the waves of a workgroup do, for a report.
pub(super) fn dump<'a>(
    code: &CodeObject,
    waves: impl Iterator<Item = (&'a Wave, Option<bool>)>,
) -> Vec<WaveState> {
    let program = code.program();
    let state = |(w, waits): (&Wave, Option<bool>)| {
        // A wave that waits has passed its s_barrier.
        let at = (w.pc - u32::from(waits == Some(true))) as usize;
        let pc = u64::from(program.offsets.get(at).copied().unwrap_or_default());
        let inst = program.insts.get(at);
        WaveState {
            wave: w.id,
            pc,
            instruction: inst.map(|i| disasm::text(i, pc)).unwrap_or_default(),
            waits,
            exec: w.exec(),
            executed: w.executed,
        }
    };
    waves.map(state).collect()
}
