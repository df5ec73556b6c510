//! Hang detection: finds launches that would never end, and describes their waves.
//!
//! A wave repeats itself if it returns to the same registers and pc while no wave of its workgroup writes memory or
//! reads a clock. It then repeats for ever, unless another workgroup writes. The launch hangs if this holds for all
//! workgroups that run.

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

/// Wave-instructions of a workgroup between two inspections.
pub(super) const INTERVAL: u64 = 1 << 20;
/// Number of instructions within which a wave must return to its state for an inspection to succeed.
const PATIENCE: u64 = 1 << 14;

/// State that decides a wave's next instructions.
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

/// One inspection of a workgroup's waves while they run.
pub(super) struct Look {
    waves: Vec<Option<(Snapshot, bool)>>,
    /// Whether memory was written or a clock read.
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

    /// Result for the waves that run. `None`: not known yet; `Some(true)`: all of them only repeat themselves.
    pub fn result(&self, runs: impl Fn(usize) -> bool) -> Option<bool> {
        if self.moved || self.left == 0 {
            return Some(false);
        }
        let repeats = |wave: &Option<(Snapshot, bool)>| wave.as_ref().is_some_and(|(_, r)| *r);
        let mut running = self.waves.iter().enumerate().filter(|(i, _)| runs(*i));
        running.all(|(_, wave)| repeats(wave)).then_some(true)
    }
}

/// Runs a [`Look`] beside another watcher.
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

/// The workgroups of a launch that only repeat themselves.
#[derive(Default)]
pub(super) struct Stuck(Mutex<Proofs>);

#[derive(Default)]
struct Proofs {
    /// Number of times that a workgroup got stuck.
    entered: u64,
    /// For each stuck workgroup: the value of `entered` before its last inspection began. An inspection proves nothing
    /// about later writes of a workgroup that got stuck after it.
    looks: HashMap<u64, u64>,
    /// Number of host threads that run workgroups.
    threads: usize,
}

impl Stuck {
    fn lock(&self) -> std::sync::MutexGuard<'_, Proofs> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Registers a host thread that begins (`true`) or ends (`false`).
    pub fn thread(&self, begins: bool) {
        let mut proofs = self.lock();
        match begins {
            true => proofs.threads += 1,
            false => proofs.threads -= 1,
        }
    }

    /// Begins an inspection. Pass the result to [`Stuck::looked`].
    pub fn look(&self) -> u64 {
        self.lock().entered
    }

    /// Ends an inspection of a workgroup. Returns whether all running workgroups are stuck.
    pub fn looked(&self, workgroup: u64, began: u64, stuck: bool) -> bool {
        let mut proofs = self.lock();
        if !stuck {
            proofs.looks.remove(&workgroup);
            return false;
        }
        if proofs.looks.insert(workgroup, began).is_none() {
            proofs.entered += 1;
            // A single running workgroup needs no second look.
            return proofs.threads == 1;
        }
        let entered = proofs.entered;
        proofs.looks.len() == proofs.threads && proofs.looks.values().all(|l| *l == entered)
    }
}

/// States of a workgroup's waves, for a report.
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
