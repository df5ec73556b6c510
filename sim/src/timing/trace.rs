//! Recorded instructions and accesses of a workgroup's waves, which the model replays.

use std::sync::Mutex;

use super::machine::{L1_WIDTH, LINE};
use crate::count::banks::{Banks, PERMUTE_CLK, Use};
use crate::exec::lanes::lanes;
use crate::inst::{Format, Inst};
use crate::sanitize::accesses::{Accesses, Action, Space};
use crate::wave::Wave;

/// One instruction of a wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Index of the instruction in the program.
    pub at: u32,
    /// Index of its access in [`Trace`], or [`NO_ACCESS`].
    pub access: u32,
}

/// Marks a step without a memory access.
pub(crate) const NO_ACCESS: u32 = u32::MAX;

/// Load of a memory instruction on the units behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Access {
    /// Clocks of the LDS banks.
    pub lds_clocks: u16,
    /// Bytes to or from LDS.
    pub lds_bytes: u16,
    /// Clocks of the vector L1. In a clock it takes the addresses of 16 lanes, one line's tag, and 64 bytes.
    pub l1_clocks: u16,
    /// First of its cache lines in [`Trace::lines`].
    pub first: u32,
    pub lines: u16,
    pub scalar: bool,
    pub store: bool,
}

/// Recorded execution of one workgroup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Number of the workgroup in the launch.
    pub workgroup: u64,
    pub(crate) waves: Vec<Vec<Step>>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) lines: Vec<u64>,
}

impl Trace {
    /// Instructions executed, counted once per wave.
    pub fn wave_instructions(&self) -> u64 {
        self.waves.iter().map(|w| w.len() as u64).sum()
    }
}

/// Recording: the workgroups of a launch to record, and their traces.
#[derive(Debug, Default)]
pub struct Recording {
    /// Numbers of the workgroups to record, ascending.
    wanted: Vec<u64>,
    traces: Mutex<Vec<Trace>>,
}

impl Recording {
    /// Selects `count` neighbours on one of `dies` dies, from the middle of `total` workgroups.
    pub fn new(total: u64, dies: u32, count: u32) -> Self {
        let (dies, count) = (u64::from(dies.max(1)), u64::from(count));
        let all = total.div_ceil(dies);
        let count = count.min(all);
        // Start at a multiple of `count`: workgroups that share memory are often numbered in powers of two.
        let first = (all - count) / 2;
        let first = first - first % count.max(1);
        Recording {
            wanted: (first..first + count).map(|i| i * dies).collect(),
            traces: Mutex::default(),
        }
    }

    /// Numbers of the workgroups to record, ascending.
    pub fn wanted(&self) -> &[u64] {
        &self.wanted
    }

    /// Returns the traces, in the order of the workgroups.
    pub fn finish(self) -> Vec<Trace> {
        let mut traces = self.traces.into_inner().unwrap_or_else(|e| e.into_inner());
        traces.sort_by_key(|t| t.workgroup);
        traces
    }

    pub(crate) fn recorder(&self, workgroup: u64, waves: usize) -> Option<Recorder> {
        self.wanted.binary_search(&workgroup).ok()?;
        Some(Recorder {
            trace: Trace {
                workgroup,
                waves: vec![Vec::new(); waves],
                ..Trace::default()
            },
            found: Accesses::default(),
            banks: Box::default(),
        })
    }

    pub(crate) fn add(&self, recorder: Recorder) {
        let mut traces = self.traces.lock().unwrap_or_else(|e| e.into_inner());
        traces.push(recorder.trace);
    }
}

/// Records a workgroup while it runs.
pub(crate) struct Recorder {
    trace: Trace,
    found: Accesses,
    banks: Box<Banks>,
}

impl Recorder {
    /// Records an instruction of a wave before it is executed.
    pub fn before(&mut self, w: &Wave, at: u32, inst: &Inst) {
        let memory = matches!(
            inst.format,
            Format::Ds
                | Format::Smem
                | Format::Flat
                | Format::Global
                | Format::Scratch
                | Format::Mubuf
                | Format::Mtbuf
        );
        let mut access = NO_ACCESS;
        if memory {
            self.found.find(w, inst);
            access = self.trace.accesses.len() as u32;
            let one = self.access(w, inst);
            self.trace.accesses.push(one);
        }
        self.trace.waves[w.id as usize].push(Step { at, access });
    }

    fn access(&mut self, w: &Wave, inst: &Inst) -> Access {
        let lines = &mut self.trace.lines;
        let first = lines.len();
        let mut one = Access {
            first: first as u32,
            ..Access::default()
        };
        if crate::cost::is_permute(inst.op) {
            one.lds_clocks = PERMUTE_CLK as u16;
            one.lds_bytes = 4 * w.exec().count_ones() as u16;
        }
        let mut bytes = 0;
        for a in self.found.iter() {
            if a.space == Space::Lds {
                let kind = match a.action {
                    Action::Load => Use::Load,
                    Action::Store => Use::Store,
                    Action::Atomic { .. } => Use::Atomic,
                };
                let clocks = self.banks.clocks(kind, a.size, a.lanes, &a.addresses);
                one.lds_clocks += clocks.total as u16;
                one.lds_bytes += (a.lanes.count_ones() * a.size) as u16;
                continue;
            }
            one.scalar |= a.scalar;
            one.store |= a.action != Action::Load;
            bytes += u64::from(a.lanes.count_ones() * a.size);
            for lane in lanes(a.lanes) {
                let mut address = a.addresses[lane];
                if a.space == Space::Scratch {
                    // Scratch interleaves the dwords of the lanes.
                    address = w.scratch + address * 64 + 4 * lane as u64;
                }
                for line in address / LINE..=(address + u64::from(a.size) - 1) / LINE {
                    if !lines[first..].iter().rev().take(4).any(|l| *l == line) {
                        lines.push(line);
                    }
                }
            }
        }
        lines[first..].sort_unstable();
        let mut kept = first;
        for i in first..lines.len() {
            if i == first || lines[i] != lines[kept - 1] {
                lines[kept] = lines[i];
                kept += 1;
            }
        }
        lines.truncate(kept);
        one.lines = (kept - first) as u16;
        if !one.scalar && one.lines > 0 {
            let data = bytes.div_ceil(L1_WIDTH);
            one.l1_clocks = data.max(4).max(u64::from(one.lines)) as u16;
        }
        one
    }
}
