//! Kinds of workgroups in a launch, and which workgroups the busiest compute units run.
//!
//! Workgroups may differ: items of several lengths, empty ones beside long ones, persistent ones that walk several items.
//! The simulator counts the instructions of each workgroup. Here they stand for its work, to find out which compute unit
//! has most; how long that takes is then modelled from the traces of its workgroups' kinds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::memory::Sharing;
use super::trace::{KindBounds, Recorded, Trace, class};
use crate::gpu::Gpu;

/// Recorded workgroups of a kind, those with most instructions first.
pub(super) struct Kind<'a> {
    pub traces: Vec<&'a Trace>,
    pub sharing: Sharing,
    /// Its least class.
    number: u32,
}

/// A workgroup of a compute unit, and the trace that it executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Next {
    /// Index of the kind.
    pub kind: usize,
    /// Index of the trace of that kind.
    pub sample: usize,
    /// How often this compute unit has executed that trace before.
    pub turn: u64,
    /// Work, in units that all workgroups of the launch share.
    pub work: u64,
}

/// Workgroups of a compute unit, in the order in which they start.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Share {
    pub workgroups: Vec<Next>,
    /// Their part of the launch's work.
    pub part: f64,
}

/// Work of a launch.
pub(super) struct Dispatch {
    /// The compute units that may take longest: the one with most work, and the one with the longest workgroup.
    pub shares: Vec<Share>,
    /// Number of compute units with workgroups.
    pub active: u32,
}

/// Sorts traces by kind.
pub(super) fn kinds(recorded: &Recorded) -> Vec<Kind<'_>> {
    let mut found: Vec<(u32, Vec<&Trace>)> = Vec::new();
    let bounds = bounds(recorded);
    for trace in &recorded.traces {
        // Without the others' instructions nobody knows how many are like this one.
        let number = match recorded.instructions.is_empty() {
            true => 0,
            false => bounds.kind(class(trace.wave_instructions())),
        };
        match found.iter_mut().find(|k| k.0 == number) {
            Some(k) => k.1.push(trace),
            None => found.push((number, vec![trace])),
        }
    }
    found.into_iter().map(Kind::new).collect()
}

fn bounds(recorded: &Recorded) -> KindBounds {
    KindBounds::of(recorded.instructions.iter().map(|n| class(*n)))
}

impl<'a> Kind<'a> {
    fn new((number, mut traces): (u32, Vec<&'a Trace>)) -> Self {
        traces.sort_by_key(|t| Reverse(t.wave_instructions()));
        let sharing = Sharing::of(&traces);
        Kind {
            traces,
            sharing,
            number,
        }
    }
}

/// Spreads workgroups over compute units: workgroup `i` runs on die `i % dies`, and begins on the compute unit of that
/// die that has the least work so far. `recorded` has at least one trace.
pub(super) fn dispatch(
    gpu: &Gpu,
    workgroups: u64,
    kinds: &[Kind],
    recorded: &Recorded,
) -> Dispatch {
    let active = u64::from(gpu.cus).min(workgroups) as u32;
    let instructions = &recorded.instructions;
    if kinds.len() < 2 || instructions.is_empty() {
        let share = workgroups.div_ceil(u64::from(gpu.cus));
        return Dispatch {
            shares: vec![Share {
                workgroups: turns(kinds, (0..share).map(|_| (0, 1))),
                part: share as f64 / workgroups.max(1) as f64,
            }],
            active,
        };
    }
    let dies = gpu.xcds.max(1) as usize;
    let of_a_die = (gpu.cus as usize / dies).max(1);
    let mut free: Vec<BinaryHeap<Reverse<(u64, usize)>>> = (0..dies)
        .map(|die| {
            (0..of_a_die)
                .map(|i| Reverse((0, die * of_a_die + i)))
                .collect()
        })
        .collect();
    // Work, longest workgroup.
    let mut loads = vec![(0, 0); dies * of_a_die];
    let mut places = Vec::with_capacity(instructions.len());
    for (i, &work) in instructions.iter().enumerate() {
        let Some(mut least) = free[i % dies].peek_mut() else {
            continue;
        };
        let (load, cu) = &mut least.0;
        *load += work;
        loads[*cu] = (*load, loads[*cu].1.max(work));
        places.push(*cu);
    }
    let total: u64 = instructions.iter().sum();
    let most = |key: fn((u64, u64)) -> (u64, u64)| {
        // The first one of several.
        (0..loads.len()).rev().max_by_key(|cu| key(loads[*cu]))
    };
    let busiest = most(|(load, longest)| (load, longest));
    let longest = most(|(load, longest)| (longest, load));
    let mut cus: Vec<usize> = busiest.into_iter().collect();
    cus.extend(longest.filter(|cu| busiest.is_none_or(|b| loads[b].1 < loads[*cu].1)));
    let bounds = bounds(recorded);
    let share = |cu: usize| {
        let own = (places.iter().zip(instructions)).filter(|(place, _)| **place == cu);
        let nearest = |work: u64| {
            let number = bounds.kind(class(work));
            let distance = |k: &usize| kinds[*k].number.abs_diff(number);
            (0..kinds.len()).min_by_key(distance).unwrap_or(0)
        };
        let part = loads[cu].0 as f64 / total.max(1) as f64;
        Share {
            workgroups: turns(kinds, own.map(|(_, work)| (nearest(*work), *work))),
            part: part.max(1.0 / f64::from(active.max(1))),
        }
    };
    Dispatch {
        shares: cus.into_iter().map(share).collect(),
        active,
    }
}

/// Workgroups of a kind execute its traces in turn.
fn turns(kinds: &[Kind], workgroups: impl Iterator<Item = (usize, u64)>) -> Vec<Next> {
    let mut before = vec![0; kinds.len()];
    let next = |(kind, work): (usize, u64)| {
        let samples = kinds[kind].traces.len();
        let n: usize = before[kind];
        before[kind] += 1;
        Next {
            kind,
            sample: n % samples,
            turn: (n / samples) as u64,
            work,
        }
    };
    workgroups.map(next).collect()
}

impl Share {
    /// Number of its first workgroups that have `count` workgroups of at least half of the mean work among them.
    pub fn prefix(&self, count: u64) -> usize {
        let all: u64 = self.workgroups.iter().map(|w| w.work).sum();
        let long = |w: &Next| 2 * w.work * self.workgroups.len() as u64 >= all;
        let ends = self.workgroups.iter().enumerate().filter(|(_, w)| long(w));
        let last = ends
            .map(|(i, _)| i + 1)
            .nth(count.saturating_sub(1) as usize);
        last.unwrap_or(self.workgroups.len())
    }

    /// Work of its workgroups from `from` on, up to but without `to`.
    pub fn work(&self, from: usize, to: usize) -> f64 {
        self.workgroups[from..to]
            .iter()
            .map(|w| w.work as f64)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{MI300X, MI308X};

    /// Traces of the lengths that occur, and the lengths of all workgroups.
    fn recorded(instructions: Vec<u64>) -> Recorded {
        let mut traces: Vec<Trace> = Vec::new();
        for (i, n) in instructions.iter().enumerate() {
            if traces.iter().all(|t| t.wave_instructions() != *n) {
                traces.push(Trace::of_length(i as u64, *n as usize));
            }
        }
        Recorded {
            traces,
            instructions,
        }
    }

    fn shares(gpu: &Gpu, instructions: Vec<u64>) -> Vec<Share> {
        let workgroups = instructions.len() as u64;
        let recorded = recorded(instructions);
        dispatch(gpu, workgroups, &kinds(&recorded), &recorded).shares
    }

    fn work(share: &Share) -> Vec<u64> {
        share.workgroups.iter().map(|w| w.work).collect()
    }

    #[test]
    fn like_workgroups_are_spread_evenly() {
        let found = shares(&MI300X, vec![100; 305]);
        assert_eq!(found.len(), 1);
        assert_eq!(work(&found[0]), [1, 1]);
        // Bandwidth is shared by work: the last workgroup has it to itself.
        assert_eq!(found[0].part, 2.0 / 305.0);
    }

    #[test]
    fn the_longest_first_are_filled_up_with_short_ones() {
        let lengths = [vec![100; 80], vec![10; 80 * 5]].concat();
        let found = shares(&MI308X, lengths);
        assert_eq!(found.len(), 1);
        assert_eq!(work(&found[0]), [100, 10, 10, 10, 10, 10]);
        assert_eq!(found[0].part, 1.0 / 80.0);
        assert_eq!(found[0].workgroups.last().map(|w| w.turn), Some(4));
    }

    #[test]
    fn short_ones_go_where_there_is_least_work() {
        // Die 0 has 20 compute units: one takes the long one, the others share the rest.
        let lengths = (0..4 * 39).map(|i| if i == 0 { 1000 } else { 100 });
        let found = shares(&MI308X, lengths.collect());
        assert_eq!(found.len(), 1);
        assert_eq!(work(&found[0]), [1000]);
    }

    #[test]
    fn the_longest_and_the_busiest_may_be_two() {
        // Many short ones on one compute unit are more work than the long one of another die.
        let lengths = (0..4 * 20 * 10).map(|i| match i % 4 {
            0 => 100,
            1 if i == 1 => 300,
            _ => 10,
        });
        let found = shares(&MI308X, lengths.collect());
        assert_eq!(found.len(), 2);
        assert_eq!(work(&found[0]), [100; 10]);
        assert_eq!(work(&found[1])[0], 300);
    }

    #[test]
    fn a_prefix_counts_long_workgroups() {
        let lengths = [100, 1, 1, 100, 1, 100, 1, 1];
        let share = Share {
            workgroups: (lengths.iter())
                .map(|work| Next {
                    kind: 0,
                    sample: 0,
                    turn: 0,
                    work: *work,
                })
                .collect(),
            part: 1.0,
        };
        assert_eq!(share.prefix(1), 1);
        assert_eq!(share.prefix(2), 4);
        assert_eq!(share.prefix(4), 8);
        assert_eq!(share.work(1, 4), 102.0);
    }
}
