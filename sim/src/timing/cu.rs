//! Models one compute unit clock by clock: waves on four SIMDs, shared units, and stalls.
//!
//! In each turn of four clocks a SIMD issues at most one instruction of each kind, of different waves: the waves of the
//! highest priority (`s_setprio`) first, and of these the oldest. The time of an instruction's results is known when it is issued. The model therefore goes from issue to
//! issue, not from clock to clock.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::kinds::{Kind, Next};
use super::machine::*;
use super::memory::{Memory, Path, Traffic, lines_of};
use super::program::{REGISTERS, Span, Static, Unit};
use super::trace::{NO_ACCESS, Trace};

/// Reason why a wave did not issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stall {
    /// The unit was taken by another wave, or by another instruction of this wave.
    Issue,
    /// The matrix unit was busy.
    Matrix,
    /// A register was not ready: arithmetic.
    Dependency,
    /// `s_waitcnt` on global memory.
    Vm,
    /// `s_waitcnt` on LDS or scalar memory.
    Lgkm,
    /// `s_barrier`.
    Barrier,
}

impl Stall {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Stall; 6] = [
        Stall::Issue,
        Stall::Matrix,
        Stall::Dependency,
        Stall::Vm,
        Stall::Lgkm,
        Stall::Barrier,
    ];

    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Stall::Issue => "issue",
            Stall::Matrix => "mfma_busy",
            Stall::Dependency => "dependency",
            Stall::Vm => "wait_vm",
            Stall::Lgkm => "wait_lgkm",
            Stall::Barrier => "barrier",
        }
    }
}

/// Issues and stalls of all waves at one instruction. Modelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// Number of issues.
    pub hits: u64,
    /// Clocks that waves waited for it, by [`Stall`].
    pub stalls: [u64; Stall::ALL.len()],
}

/// Issue of an instruction by a wave. Modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Number of the SIMD.
    pub simd: u8,
    /// Workgroup in order of arrival, and wave in the workgroup.
    pub wave: (u32, u8),
    /// Index of the instruction in the program.
    pub at: u32,
    /// Clock at which the wave became ready for it.
    pub from: u64,
    /// Clock of the issue.
    pub issued: u64,
    /// Reason for waiting in between, if it waited.
    pub stall: Option<Stall>,
}

/// A run of a compute unit.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub clocks: u64,
    pub sites: Vec<Site>,
    pub events: Vec<Event>,
    pub traffic: Traffic,
}

struct Wave {
    group: usize,
    number: u8,
    simd: usize,
    position: usize,
    priority: u8,
    /// Clock at which the wave could issue if nothing kept it; clock at which it can; reason for the difference.
    base: u64,
    ready: u64,
    reason: Stall,
    registers: Box<[u64; REGISTERS]>,
    /// Registers of a matrix product's result, and the clock from which on another product can accumulate to them.
    forward: Option<(Span, u64)>,
    vm: VecDeque<u64>,
    lgkm: VecDeque<u64>,
    at_barrier: bool,
}

struct Group {
    next: Next,
    alive: usize,
    arrived: usize,
}

/// Clocks from which on the units of a SIMD take their next instruction.
#[derive(Clone, Copy, Default)]
struct Simd {
    vector: u64,
    matrix: u64,
    scalar: u64,
    scalar_memory: u64,
    memory: u64,
    local: u64,
    branch: u64,
}

impl Simd {
    fn unit(&mut self, unit: Unit) -> Option<&mut u64> {
        Some(match unit {
            Unit::Vector | Unit::Matrix => &mut self.vector,
            Unit::Scalar => &mut self.scalar,
            Unit::ScalarMemory => &mut self.scalar_memory,
            Unit::Memory => &mut self.memory,
            Unit::Local => &mut self.local,
            Unit::Branch => &mut self.branch,
            Unit::Barrier | Unit::Wait | Unit::End | Unit::Idle => return None,
        })
    }
}

/// Input of the model of one compute unit.
pub(super) struct Work<'a> {
    pub code: &'a [Static],
    pub kinds: &'a [Kind<'a>],
    pub path: Path,
    /// Workgroups in the order in which they start.
    pub workgroups: &'a [Next],
    /// Number of workgroups at a time.
    pub resident: u32,
    /// Maximum number of events to keep.
    pub events: usize,
}

impl<'a> Work<'a> {
    fn trace(&self, next: Next) -> &'a Trace {
        self.kinds[next.kind].traces[next.sample]
    }
}

struct Cu<'a> {
    work: &'a Work<'a>,
    memory: Memory,
    waves: Vec<Wave>,
    groups: Vec<Group>,
    simds: [Simd; 4],
    /// Clocks from which on the LDS is free: its banks, and its ports of two SIMDs each.
    banks: u64,
    ports: [u64; 2],
    run: Run,
}

/// Runs the work to its end.
pub(super) fn run(work: &Work) -> Run {
    let mut cu = Cu {
        work,
        memory: Memory::new(work.path),
        waves: Vec::new(),
        groups: Vec::new(),
        simds: Default::default(),
        banks: 0,
        ports: [0; 2],
        run: Run {
            sites: vec![Site::default(); work.code.len()],
            ..Run::default()
        },
    };
    for _ in 0..work.workgroups.len().min(work.resident.max(1) as usize) {
        cu.start(0);
    }
    while let Some((i, now)) = cu.first() {
        cu.issue(i, now);
    }
    cu.run.traffic = cu.memory.traffic;
    cu.run
}

impl Cu<'_> {
    /// Starts a workgroup at clock `now`. Its waves go to the SIMDs with the fewest waves.
    fn start(&mut self, now: u64) {
        let group = self.groups.len();
        let next = self.work.workgroups[group];
        let trace = self.work.trace(next);
        self.groups.push(Group {
            next,
            alive: 0,
            arrived: 0,
        });
        for number in 0..trace.waves.len() {
            if trace.waves[number].is_empty() {
                continue;
            }
            self.groups[group].alive += 1;
            let crowd = |s: usize| self.waves.iter().filter(|w| w.simd == s).count();
            let simd = (0..4).min_by_key(|s| crowd(*s)).unwrap_or(0);
            let mut wave = Wave {
                group,
                number: number as u8,
                simd,
                position: 0,
                priority: 0,
                base: now,
                ready: now,
                reason: Stall::Issue,
                registers: Box::new([0; REGISTERS]),
                forward: None,
                vm: VecDeque::new(),
                lgkm: VecDeque::new(),
                at_barrier: false,
            };
            self.look(&mut wave);
            self.waves.push(wave);
        }
    }

    fn step(&self, w: &Wave) -> super::trace::Step {
        let trace = self.work.trace(self.groups[w.group].next);
        trace.waves[usize::from(w.number)][w.position]
    }

    /// Finds the clock at which a wave can issue its next instruction, and the reason for its waiting.
    fn look(&self, w: &mut Wave) {
        let code = &self.work.code[self.step(w).at as usize];
        (w.ready, w.reason) = (w.base, Stall::Issue);
        let mut wait = |until: u64, reason| {
            if until > w.ready {
                (w.ready, w.reason) = (until, reason);
            }
        };
        for span in code.reads.iter().chain(&code.writes) {
            if Some(*span) == code.accumulator {
                continue;
            }
            for r in &w.registers[usize::from(span.first)..][..usize::from(span.count)] {
                wait(*r, Stall::Dependency);
            }
        }
        if let Some(span) = code.accumulator {
            match w.forward {
                Some((same, at)) if same == span => wait(at, Stall::Dependency),
                _ => {
                    for r in &w.registers[usize::from(span.first)..][..usize::from(span.count)] {
                        wait(*r, Stall::Dependency);
                    }
                }
            }
        }
        let left = |queue: &VecDeque<u64>, most: usize| match queue.len().checked_sub(most) {
            Some(n) if n > 0 => queue.iter().take(n).copied().max().unwrap_or(0),
            _ => 0,
        };
        if let Some((vm, lgkm)) = code.wait {
            wait(left(&w.vm, vm), Stall::Vm);
            wait(left(&w.lgkm, lgkm), Stall::Lgkm);
        }
        match code.unit {
            Unit::Memory => wait(left(&w.vm, VM_MOST - 1), Stall::Vm),
            Unit::Local | Unit::ScalarMemory => wait(left(&w.lgkm, LGKM_MOST - 1), Stall::Lgkm),
            _ => {}
        }
    }

    /// Clock at which a wave can issue, with its units free.
    fn when(&self, w: &Wave) -> u64 {
        let unit = self.work.code[self.step(w).at as usize].unit;
        let mut simd = self.simds[w.simd];
        let mut at = w.ready;
        if let Some(free) = simd.unit(unit) {
            at = at.max(*free);
        }
        if unit == Unit::Matrix {
            at = at.max(simd.matrix);
        }
        at
    }

    /// The wave that issues next, and its clock.
    fn first(&self) -> Option<(usize, u64)> {
        let waves = self.waves.iter().enumerate().filter(|(_, w)| !w.at_barrier);
        waves
            .map(|(i, w)| (i, self.when(w), Reverse(w.priority)))
            .min_by_key(|(_, at, priority)| (*at, *priority))
            .map(|(i, at, _)| (i, at))
    }

    fn issue(&mut self, i: usize, now: u64) {
        let work = self.work;
        let step = self.step(&self.waves[i]);
        let code = &work.code[step.at as usize];
        let w = &mut self.waves[i];
        let simd = &mut self.simds[w.simd];

        let site = &mut self.run.sites[step.at as usize];
        site.hits += 1;
        site.stalls[w.reason as usize] += w.ready - w.base;
        let busy = if code.unit == Unit::Matrix && simd.matrix == now {
            Stall::Matrix
        } else {
            Stall::Issue
        };
        site.stalls[busy as usize] += now - w.ready;
        if self.run.events.len() < work.events {
            let stall = if w.ready > w.base { w.reason } else { busy };
            self.run.events.push(Event {
                simd: w.simd as u8,
                wave: (w.group as u32, w.number),
                at: step.at,
                from: w.base,
                issued: now,
                stall: (now > w.base).then_some(stall),
            });
        }

        let pair = w.simd / 2;
        let group = w.group;
        let next = self.groups[group].next;
        if let Some(priority) = code.priority {
            w.priority = priority;
        }
        if code.unit == Unit::Matrix {
            simd.matrix = now + code.busy;
        }
        if let Some(free) = simd.unit(code.unit) {
            *free = now
                + if code.unit == Unit::Matrix {
                    TURN
                } else {
                    code.busy
                };
        }
        if step.access != NO_ACCESS {
            let trace = work.trace(next);
            let access = &trace.accesses[step.access as usize];
            let local = access.lds_clocks > 0;
            if local {
                let bytes = u64::from(access.lds_bytes);
                let clocks = u64::from(access.lds_clocks);
                // Banks and port each serve in the order of issue, independently of each other.
                self.banks = self.banks.max(now) + clocks;
                let port = &mut self.ports[pair];
                *port = (*port).max(now) + clocks.max(bytes.div_ceil(LDS_PORT));
                let done = self.banks.max(*port) + LDS_LATENCY;
                w.lgkm.push_back(done);
            }
            if !local || access.lines > 0 {
                let lines = lines_of(trace, access);
                let mut done =
                    (self.memory).access(now, access, lines, &work.kinds[next.kind].sharing, next);
                if access.scalar {
                    w.lgkm.push_back(done);
                } else {
                    // Loads return in order.
                    done = done.max(w.vm.back().copied().unwrap_or(0));
                    w.vm.push_back(done);
                }
            }
        }
        while w.vm.front().is_some_and(|d| *d <= now) {
            w.vm.pop_front();
        }
        while w.lgkm.front().is_some_and(|d| *d <= now) {
            w.lgkm.pop_front();
        }
        for span in &code.writes {
            w.registers[usize::from(span.first)..][..usize::from(span.count)]
                .fill(now + code.latency);
        }
        if code.unit == Unit::Matrix {
            w.forward = code.writes.first().map(|s| (*s, now + code.busy));
        }

        w.base = now + code.next;
        self.run.clocks = self.run.clocks.max(w.base);
        let trace = work.trace(next);
        let steps = &trace.waves[usize::from(w.number)];
        let from = step.at;
        w.position += 1;
        if w.position == steps.len() {
            // The next workgroup may begin before this one's last stores arrive. The launch ends after they do.
            let last = w.vm.back().copied().unwrap_or(0);
            self.run.clocks = self.run.clocks.max(last);
            self.leave(i, now);
            return;
        }
        if code.unit == Unit::Branch && steps[w.position].at != from + 1 {
            w.base = now + BRANCH;
        }
        if code.unit == Unit::Barrier {
            w.at_barrier = true;
            self.groups[group].arrived += 1;
            self.open(group, now);
        } else {
            let mut w = self.waves.swap_remove(i);
            self.look(&mut w);
            self.waves.push(w);
            let last = self.waves.len() - 1;
            self.waves.swap(i, last);
        }
    }

    /// Releases the waves of a workgroup if all have reached the barrier.
    fn open(&mut self, group: usize, now: u64) {
        let g = &mut self.groups[group];
        if g.arrived == 0 || g.arrived < g.alive {
            return;
        }
        g.arrived = 0;
        for i in 0..self.waves.len() {
            if self.waves[i].group == group && self.waves[i].at_barrier {
                let at = self.waves[i].position - 1;
                let number = usize::from(self.waves[i].number);
                let trace = self.work.trace(self.groups[group].next);
                let at = trace.waves[number][at].at;
                let mut w = self.waves.swap_remove(i);
                let open = now + BARRIER;
                self.run.sites[at as usize].stalls[Stall::Barrier as usize] +=
                    open.saturating_sub(w.base);
                w.base = w.base.max(open);
                w.at_barrier = false;
                self.look(&mut w);
                self.waves.push(w);
                let last = self.waves.len() - 1;
                self.waves.swap(i, last);
            }
        }
    }

    /// Removes a wave that has ended.
    fn leave(&mut self, i: usize, now: u64) {
        let w = self.waves.remove(i);
        let g = &mut self.groups[w.group];
        g.alive -= 1;
        if g.alive > 0 {
            self.open(w.group, now);
        } else if self.groups.len() < self.work.workgroups.len() {
            self.start(now);
        }
    }
}
