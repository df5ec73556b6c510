//! Recorded instructions and accesses of a workgroup's waves, which the model replays.

use std::collections::{BTreeMap, BTreeSet};
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

#[cfg(test)]
impl Trace {
    /// A trace of one wave.
    pub(crate) fn of_length(workgroup: u64, steps: usize) -> Self {
        let step = Step {
            at: 0,
            access: NO_ACCESS,
        };
        Trace {
            workgroup,
            waves: vec![vec![step; steps]],
            ..Trace::default()
        }
    }
}

/// Class of a number of instructions. Numbers of one class differ by less than a twentieth.
pub(crate) fn class(instructions: u64) -> u32 {
    (16.0 * (instructions.max(1) as f64).log2()) as u32
}

/// Kinds of workgroups: runs of classes. Workgroups of one kind differ by less than a fifth in the instructions that
/// they execute. The first kind begins with the fewest instructions, so no bound divides workgroups that are all alike.
#[derive(Debug)]
pub(crate) struct KindBounds {
    /// The least class of each kind, ascending.
    first: Vec<u32>,
}

impl KindBounds {
    /// Classes of a kind.
    const CLASSES: u32 = 4;

    /// Kinds of workgroups of these classes.
    pub fn of(classes: impl IntoIterator<Item = u32>) -> Self {
        let mut first: Vec<u32> = Vec::new();
        for class in classes.into_iter().collect::<BTreeSet<_>>() {
            if first.last().is_none_or(|f| class >= f + Self::CLASSES) {
                first.push(class);
            }
        }
        KindBounds { first }
    }

    /// The least class of the kind of a workgroup of this class.
    pub fn kind(&self, class: u32) -> u32 {
        let kinds_before = self.first.partition_point(|f| *f <= class);
        self.first[kinds_before.saturating_sub(1)]
    }
}

/// Recording of a launch: for each kind of workgroup, the traces of a few neighbours on one die, as near to the middle
/// of the launch as there are any.
///
/// Which traces are kept does not depend on the order in which workgroups end.
#[derive(Debug)]
pub struct Recording {
    dies: u64,
    /// Maximum number of traces of a kind.
    count: u64,
    /// The middle group of `count` neighbours of a die. Groups start at multiples of `count`: workgroups that share
    /// memory are often numbered in powers of two.
    middle: u64,
    /// Numbers of the workgroups to record, ascending; `None`: all are recorded, and those of each class are kept.
    only: Option<Vec<u64>>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Traces of each class, the best first. Which classes are of one kind is known when all workgroups have ended.
    classes: BTreeMap<u32, Vec<Trace>>,
    /// Instructions of each workgroup, unless only some run.
    instructions: Vec<u64>,
    /// Traces that were not kept, for their memory.
    spare: Vec<Trace>,
}

/// Workgroups of a launch as the model sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Traces of a few workgroups of each kind, in the order of the workgroups.
    pub traces: Vec<Trace>,
    /// Instructions of each workgroup of the launch, counted once per wave. Empty if only the recorded ones ran: then
    /// the others are taken to be like them.
    pub instructions: Vec<u64>,
}

impl Recording {
    /// Records all of `total` workgroups on `dies` dies, and keeps `count` of each kind.
    pub fn all(total: u64, dies: u32, count: u32) -> Self {
        let (dies, count) = (u64::from(dies.max(1)), u64::from(count.max(1)));
        let of_a_die = total.div_ceil(dies);
        let first = (of_a_die - count.min(of_a_die)) / 2;
        Recording {
            dies,
            count,
            middle: first / count,
            only: None,
            kept: Mutex::default(),
        }
    }

    /// Selects `count` neighbours on one of `dies` dies, from the middle of `total` workgroups. The others do not run.
    pub fn only(total: u64, dies: u32, count: u32) -> Self {
        let mut all = Recording::all(total, dies, count);
        let of_a_die = total.div_ceil(all.dies);
        let count = all.count.min(of_a_die);
        let first = (of_a_die - count) / 2;
        let first = first - first % count.max(1);
        all.only = Some((first..first + count).map(|i| i * all.dies).collect());
        all
    }

    /// Numbers of the workgroups to run, ascending; `None`: all.
    pub fn wanted(&self) -> Option<&[u64]> {
        self.only.as_deref()
    }

    /// Returns the traces that were kept.
    pub fn finish(self) -> Recorded {
        let kept = std::mem::take(&mut *self.lock());
        let bounds = KindBounds::of(kept.classes.keys().copied());
        let mut kinds: BTreeMap<u32, Vec<Trace>> = BTreeMap::new();
        for (class, traces) in kept.classes {
            kinds.entry(bounds.kind(class)).or_default().extend(traces);
        }
        for traces in kinds.values_mut() {
            traces.sort_by_key(|t| self.rank(t.workgroup));
            traces.truncate(self.best(traces));
        }
        let mut traces: Vec<Trace> = kinds.into_values().flatten().collect();
        traces.sort_by_key(|t| t.workgroup);
        Recorded {
            traces,
            instructions: kept.instructions,
        }
    }

    /// Order in which workgroups of a kind are kept: those of the first die that has any, the middle ones first.
    fn rank(&self, workgroup: u64) -> (u64, u64, u64) {
        let group = workgroup / self.dies / self.count;
        (
            workgroup % self.dies,
            group.abs_diff(self.middle),
            workgroup,
        )
    }

    /// Number of traces to keep, of those of a kind or class in the order of [`Self::rank`]: some of one die.
    fn best(&self, traces: &[Trace]) -> usize {
        let Some(first) = traces.first() else {
            return 0;
        };
        let die = first.workgroup % self.dies;
        let same = traces.partition_point(|t| t.workgroup % self.dies == die);
        same.min(self.count as usize)
    }

    pub(crate) fn recorder(&self, workgroup: u64, waves: usize) -> Option<Recorder> {
        if let Some(only) = &self.only {
            only.binary_search(&workgroup).ok()?;
        }
        let mut trace = self.lock().spare.pop().unwrap_or_default();
        trace.workgroup = workgroup;
        trace.waves.resize(waves, Vec::new());
        Some(Recorder {
            trace,
            found: Accesses::default(),
            banks: Box::default(),
        })
    }

    pub(crate) fn add(&self, recorder: Recorder) {
        let trace = recorder.trace;
        let (workgroup, instructions) = (trace.workgroup, trace.wave_instructions());
        let kept = &mut *self.lock();
        if self.only.is_none() {
            let at = workgroup as usize;
            if kept.instructions.len() <= at {
                kept.instructions.resize(at + 1, 0);
            }
            kept.instructions[at] = instructions;
        }
        let class = match self.only {
            Some(_) => 0,
            None => class(instructions),
        };
        let traces = kept.classes.entry(class).or_default();
        let at = traces.partition_point(|t| self.rank(t.workgroup) < self.rank(workgroup));
        traces.insert(at, trace);
        let best = self.best(traces);
        for mut unused in traces.drain(best..) {
            unused.waves.iter_mut().for_each(Vec::clear);
            unused.accesses.clear();
            unused.lines.clear();
            kept.spare.push(unused);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Records workgroups `i` of `lengths[i]` instructions in this order, and returns which were kept.
    fn kept(lengths: &[usize], order: &[usize], dies: u32, count: u32) -> Vec<u64> {
        let recording = Recording::all(lengths.len() as u64, dies, count);
        for &i in order {
            let mut recorder = recording.recorder(i as u64, 1).expect("all are recorded");
            assert!(recorder.trace.waves[0].is_empty());
            recorder.trace.waves = Trace::of_length(i as u64, lengths[i]).waves;
            recording.add(recorder);
        }
        let recorded = recording.finish();
        assert!(
            recorded
                .instructions
                .iter()
                .zip(lengths)
                .all(|(a, b)| *a == *b as u64)
        );
        recorded.traces.iter().map(|t| t.workgroup).collect()
    }

    #[test]
    fn neighbours_in_the_middle_stand_for_a_launch_of_like_workgroups() {
        let lengths = vec![100; 1024];
        let order: Vec<usize> = (0..1024).collect();
        let expected: Vec<u64> = (56..64).map(|i| 8 * i).collect();
        assert_eq!(kept(&lengths, &order, 8, 8), expected);
        let only = Recording::only(1024, 8, 8);
        assert_eq!(only.wanted(), Some(&expected[..]));
    }

    #[test]
    fn every_kind_is_kept_whatever_the_order() {
        // Kinds that are on one die only, single workgroups, and empty ones.
        let mut lengths: Vec<usize> = (0..200).map(|i| [0, 1000, 2000][i % 3]).collect();
        lengths[100] = 10_000;
        let forwards: Vec<usize> = (0..200).collect();
        let first = kept(&lengths, &forwards, 2, 4);
        for kind in [0, 1000, 2000] {
            let of_kind = first.iter().filter(|i| lengths[**i as usize] == kind);
            let of_kind: Vec<u64> = of_kind.copied().collect();
            assert_eq!(of_kind.len(), 4, "{first:?}");
            assert!(of_kind.iter().all(|i| i % 2 == 0), "of one die: {first:?}");
        }
        assert!(first.contains(&100));
        let backwards: Vec<usize> = (0..200).rev().collect();
        assert_eq!(kept(&lengths, &backwards, 2, 4), first);
        let mixed: Vec<usize> = (0..200).map(|i| i * 77 % 200).collect();
        assert_eq!(kept(&lengths, &mixed, 2, 4), first);
        // All of a kind on another die.
        let lengths: Vec<usize> = (0..64).map(|i| [1000, 10][i % 2]).collect();
        let all: Vec<usize> = (0..64).collect();
        let odd = kept(&lengths, &all, 2, 4)
            .into_iter()
            .filter(|i| i % 2 == 1);
        assert_eq!(odd.count(), 4);
    }

    /// Kinds of workgroups with these numbers of instructions.
    fn kinds(instructions: &[u64]) -> Vec<u32> {
        let bounds = KindBounds::of(instructions.iter().map(|n| class(*n)));
        instructions
            .iter()
            .map(|n| bounds.kind(class(*n)))
            .collect()
    }

    #[test]
    fn kinds_are_near_in_length() {
        for n in [7_u64, 100, 12_345, 1 << 40] {
            let found = kinds(&[n, n + n / 8, n + n / 4 + 1, n]);
            assert_eq!(found[0], found[1], "{n}");
            assert_ne!(found[0], found[2], "{n}");
            assert_eq!(found[0], found[3], "{n}");
        }
        assert_eq!(class(0), class(1));
    }

    #[test]
    fn like_workgroups_are_of_one_kind_wherever_their_class_ends() {
        for n in 1000..2000 {
            let found = kinds(&[n, n + n / 50, n - n / 50, n / 2]);
            assert!(
                found[..3].iter().all(|kind| *kind == found[0]),
                "{n}: {found:?}"
            );
            assert_ne!(found[0], found[3], "{n}");
        }
        // Neighbours in the middle, though every second one is a little longer.
        let lengths: Vec<usize> = (0..1024)
            .map(|i| if i % 16 < 8 { 1000 } else { 1030 })
            .collect();
        let order: Vec<usize> = (0..1024).collect();
        let expected: Vec<u64> = (56..64).map(|i| 8 * i).collect();
        assert_eq!(kept(&lengths, &order, 8, 8), expected);
    }
}
