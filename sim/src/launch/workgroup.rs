//! Runs one workgroup: its waves take turns on one host thread.

use std::sync::atomic::{AtomicU64, Ordering};

use super::abi::{FRESH, Setup};
use super::hang::{self, Look, Looking, Stuck};
use super::{Launch, Options, Stopped, WaveOrder};
use crate::code_object::Image;
use crate::count::Counter;
use crate::exec::{Env, Exec, Flow};
use crate::fault::FaultKind;
use crate::inst::Inst;
use crate::memory::Memory;
use crate::sanitize::races::{Ledger, Races, Scene};
use crate::sanitize::{Sanitizer, Start};
use crate::timing::trace::Recorder;
use crate::wave::Wave;

/// Data that all threads of a launch share.
pub(super) struct Shared<'a> {
    pub launch: &'a Launch<'a>,
    pub options: &'a Options,
    pub setup: &'a Setup,
    pub memory: &'a Memory,
    pub insts: &'a [Inst],
    /// Parallel to `insts`.
    pub exec: &'a [Exec],
    /// LDS of a workgroup in bytes.
    pub lds: usize,
    /// Scratch of a lane in bytes.
    pub stride: u32,
    /// Wave-instructions executed so far.
    pub executed: AtomicU64,
    /// Number of the first workgroup known to have a fault. Later workgroups need not run.
    pub stop: AtomicU64,
    /// Number of workgroups in the launch, and number that have started.
    pub total: u64,
    pub started: AtomicU64,
    pub stuck: Stuck,
    /// Accesses of workgroups to global memory, if races are checked.
    pub ledger: Option<Ledger>,
}

impl Shared<'_> {
    /// Context for the texts of reports.
    pub fn scene(&self) -> Scene<'_> {
        Scene {
            program: self.launch.code.program(),
            memory: self.memory,
            counts: self.launch.workgroups(),
            notes: self.options.notes,
        }
    }
}

/// Maximum number of instructions that a wave may run while others could. A wave that spins on memory must let the wave
/// run that will write it.
const TURN: u64 = 1 << 16;

/// Registers and LDS, reused from one workgroup to the next.
#[derive(Default)]
pub(super) struct Machine {
    waves: Vec<Wave>,
    lds: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    Waits,
    Ended,
}

impl Machine {
    /// Runs a workgroup and returns its number of waves. `Err(None)`: given up, because an earlier workgroup has a
    /// fault.
    ///
    /// # Safety
    /// As for [`Launch::run`]; `shared.exec` must be for a level of this host.
    pub unsafe fn run(
        &mut self,
        shared: &Shared,
        linear: u64,
        id: [u32; 3],
        scratch: Option<&Image>,
        counter: Option<&mut Counter>,
        recorder: Option<&mut Recorder>,
    ) -> Result<u64, Option<Stopped>> {
        let launch = shared.launch;
        let items = std::array::from_fn(|d| {
            if id[d] < launch.grid[d] {
                launch.block[d]
            } else {
                launch.remainder[d]
            }
        });
        let count = items.iter().product::<u32>().div_ceil(64) as usize;
        while self.waves.len() < count {
            self.waves.push(Wave::new(0));
        }
        let waves = &mut self.waves[..count];
        for (i, w) in waves.iter_mut().enumerate() {
            w.id = i as u32;
            w.scratch_stride = shared.stride;
            w.scratch = 0;
            if let Some(image) = scratch {
                let size = 64 * shared.stride as usize;
                w.scratch = image.address() + (i * size) as u64;
                image.fill(i * size, size, FRESH);
            }
            shared.setup.start(w, launch, id, items);
        }
        self.lds.clear();
        self.lds.resize(shared.lds, FRESH);
        let mut env = Env {
            mfma: shared.options.mfma,
            xcc: (linear % u64::from(shared.options.xccs.max(1))) as u32,
            ..Env::new(&mut self.lds, shared.memory, launch.code.program())
        };

        let checks = shared.options.checks;
        let mut watchers = Watchers {
            sanitizer: checks.any().then(|| {
                let start = Start {
                    waves,
                    scalars: shared.setup.defined(launch),
                    lds: shared.lds,
                    uses: launch.code.uses(),
                    races: shared
                        .ledger
                        .as_ref()
                        .map(|ledger| Races::new(ledger, shared.scene(), linear, count)),
                };
                Sanitizer::new(checks, start)
            }),
            counter,
            recorder,
        };
        let watched = watchers.any();
        let stopped = |wave: usize, at: u32, kind: FaultKind| Stopped {
            kind,
            workgroup: linear,
            wave: wave as u32,
            at,
        };
        let mut turns = Turns::new(shared.options.order, linear);
        let mut states = [State::Runs; 16];
        let states = &mut states[..count];
        let mut running = count;
        let mut ended = 0;
        let mut unreported = 0;
        let mut last = count - 1;
        // From time to time, look whether the workgroup hangs.
        let mut since = 0;
        let mut look: Option<(Look, u64)> = None;
        while ended < count {
            if running == 0 {
                // Every wave that has not ended waits: the barrier opens.
                if let Some(sanitizer) = &mut watchers.sanitizer {
                    let mut at = [None; 16];
                    for (i, s) in states.iter().enumerate() {
                        at[i] = (*s == State::Waits).then(|| waves[i].pc - 1);
                    }
                    if let Err((i, kind)) = sanitizer.barrier(&at[..count], &env) {
                        let here = (i as u32, at[i].unwrap_or(waves[i].pc));
                        let (wave, at) = sanitizer.blame().unwrap_or(here);
                        return Err(Some(stopped(wave as usize, at, kind)));
                    }
                }
                for s in states.iter_mut().filter(|s| **s == State::Waits) {
                    *s = State::Runs;
                    running += 1;
                }
            }
            let (mut i, quantum) = turns.next(last, count);
            while states[i] != State::Runs {
                i = if i + 1 == count { 0 } else { i + 1 };
            }
            last = i;
            let w = &mut waves[i];
            let before = w.executed;
            let (insts, exec) = (shared.insts, shared.exec);
            // SAFETY: the caller vouches for the memory and for the level of `exec`.
            let stop = unsafe {
                match (&mut look, watched) {
                    (None, false) => run_wave(w, insts, exec, &mut env, quantum, &mut ()),
                    (None, true) => run_wave(w, insts, exec, &mut env, quantum, &mut watchers),
                    (Some((look, _)), _) => {
                        let inner = &mut watchers;
                        let mut watch = Looking { look, inner };
                        run_wave(w, insts, exec, &mut env, quantum, &mut watch)
                    }
                }
            };
            let steps = w.executed - before;
            unreported += steps;
            match stop {
                Stop::Turn => {}
                Stop::Barrier => {
                    states[i] = State::Waits;
                    running -= 1;
                }
                Stop::End => {
                    w.ended = true;
                    states[i] = State::Ended;
                    running -= 1;
                    ended += 1;
                }
                Stop::Fault(at) => {
                    let base = launch.code.program().base;
                    let kind = env.fault.take().unwrap_or(FaultKind::BadPc {
                        target: base + launch.code.program().index_of_dword.len() as u64 * 4,
                    });
                    let sanitizer = watchers.sanitizer.as_ref();
                    let blame = sanitizer.and_then(Sanitizer::blame);
                    let (wave, at) = blame.unwrap_or((i as u32, at));
                    return Err(Some(stopped(wave as usize, at, kind)));
                }
            }
            since += steps;
            if let Some((seen, began)) = &look {
                let runs = |i: usize| states[i] == State::Runs;
                if let Some(stuck) = seen.result(runs).filter(|_| running > 0) {
                    if shared.stuck.looked(linear, *began, stuck) {
                        let not_started = shared.total - shared.started.load(Ordering::Relaxed);
                        let kind = FaultKind::Deadlock {
                            waves: hang::dump(launch.code, with_states(waves, states)),
                            not_started,
                        };
                        return Err(Some(stopped(i, waves[i].pc, kind)));
                    }
                    look = None;
                    since = 0;
                }
            } else if since >= hang::INTERVAL {
                look = Some((Look::new(count), shared.stuck.look()));
            }
            if unreported >= TURN || ended == count {
                let limit = shared.options.instruction_limit;
                let sum = shared.executed.fetch_add(unreported, Ordering::Relaxed) + unreported;
                unreported = 0;
                if sum > limit {
                    let kind = FaultKind::InstructionLimit {
                        limit,
                        waves: hang::dump(launch.code, with_states(waves, states)),
                    };
                    return Err(Some(stopped(i, waves[i].pc, kind)));
                }
                if shared.stop.load(Ordering::Relaxed) < linear {
                    return Err(None);
                }
            }
        }
        if let Some(sanitizer) = watchers.sanitizer {
            sanitizer.end().map_err(|found| {
                Some(Stopped {
                    kind: found.kind,
                    workgroup: found.workgroup,
                    wave: found.wave,
                    at: found.at,
                })
            })?;
        }
        Ok(count as u64)
    }
}

/// Each wave, with whether it waits; `None` if it has ended.
fn with_states<'a>(
    waves: &'a [Wave],
    states: &'a [State],
) -> impl Iterator<Item = (&'a Wave, Option<bool>)> {
    waves.iter().zip(states).map(|(wave, state)| {
        let waits = match state {
            State::Runs => Some(false),
            State::Waits => Some(true),
            State::Ended => None,
        };
        (wave, waits)
    })
}

/// Order of the waves: the next wave, and its number of instructions.
enum Turns {
    RoundRobin(u64),
    Random(u64),
}

impl Turns {
    fn new(order: WaveOrder, workgroup: u64) -> Self {
        match order {
            WaveOrder::RunAhead => Turns::RoundRobin(TURN),
            WaveOrder::InStep => Turns::RoundRobin(1),
            WaveOrder::Seeded(seed) => Turns::Random(seed ^ workgroup.wrapping_mul(GOLDEN)),
        }
    }

    /// The first wave to try in the search for one that runs, and the length of its turn.
    fn next(&mut self, last: usize, count: usize) -> (usize, u64) {
        match self {
            Turns::RoundRobin(quantum) => (if last + 1 == count { 0 } else { last + 1 }, *quantum),
            Turns::Random(state) => {
                // SplitMix64.
                *state = state.wrapping_add(GOLDEN);
                let mut z = *state;
                z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
                z ^= z >> 31;
                ((z >> 32) as usize % count, 1 + (z & 63))
            }
        }
    }
}

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

enum Stop {
    /// The wave's turn is over, or it gave way.
    Turn,
    Barrier,
    End,
    /// Fault at this instruction.
    Fault(u32),
}

/// Observer of each instruction of a wave before it is executed.
pub(super) trait Watch {
    fn before(&mut self, w: &Wave, at: u32, inst: &Inst, env: &Env) -> Result<(), FaultKind>;
}

impl Watch for () {
    #[inline(always)]
    fn before(&mut self, _: &Wave, _: u32, _: &Inst, _: &Env) -> Result<(), FaultKind> {
        Ok(())
    }
}

/// All observers of a workgroup.
struct Watchers<'a, 'b, 'c> {
    sanitizer: Option<Sanitizer<'a>>,
    counter: Option<&'b mut Counter<'c>>,
    recorder: Option<&'b mut Recorder>,
}

impl Watchers<'_, '_, '_> {
    fn any(&self) -> bool {
        self.sanitizer.is_some() || self.counter.is_some() || self.recorder.is_some()
    }
}

impl Watch for Watchers<'_, '_, '_> {
    #[inline(always)]
    fn before(&mut self, w: &Wave, at: u32, inst: &Inst, env: &Env) -> Result<(), FaultKind> {
        if let Some(counter) = &mut self.counter {
            counter.before(w, at, inst, env.xcc);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.before(w, at, inst);
        }
        match &mut self.sanitizer {
            Some(sanitizer) => sanitizer.before(w, at, inst, env),
            None => Ok(()),
        }
    }
}

/// Runs a wave for at most `quantum` instructions.
///
/// # Safety
/// As for [`Exec`], for all of `exec`.
unsafe fn run_wave(
    w: &mut Wave,
    insts: &[Inst],
    exec: &[Exec],
    env: &mut Env,
    quantum: u64,
    watch: &mut impl Watch,
) -> Stop {
    for _ in 0..quantum {
        let pc = w.pc;
        let (Some(inst), Some(run)) = (insts.get(pc as usize), exec.get(pc as usize)) else {
            return Stop::Fault(pc);
        };
        if let Err(kind) = watch.before(w, pc, inst, env) {
            env.fault = Some(kind);
            return Stop::Fault(pc);
        }
        w.pc = pc + 1;
        w.executed += 1;
        env.clock += 1;
        // SAFETY: passed on.
        match unsafe { run(w, inst, env) } {
            Flow::Next => {}
            Flow::Barrier => return Stop::Barrier,
            Flow::Yield => return Stop::Turn,
            Flow::End => return Stop::End,
            Flow::Fault => return Stop::Fault(pc),
        }
    }
    Stop::Turn
}
