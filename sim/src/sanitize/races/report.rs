//! Messages of races.

use std::collections::BTreeMap;

use super::shadow::Tag;
use crate::disasm;
use crate::fault::{FaultKind, Race, RacePlace, RaceReason, SameStores};
use crate::inst::Program;
use crate::memory::Memory;

/// Context of a message.
#[derive(Clone, Copy)]
pub(crate) struct Scene<'a> {
    pub program: &'a Program,
    pub memory: &'a Memory,
    /// Number of workgroups in x, y, z.
    pub counts: [u32; 3],
    /// Whether stores of the same bytes are noted.
    pub notes: bool,
}

/// Unordered stores of the same bytes: whether they are in LDS, the two instructions, and the number of times.
#[derive(Clone, Default)]
pub(crate) struct Notes(BTreeMap<(bool, u32, u32), u64>);

impl Notes {
    pub fn add(&mut self, lds: bool, at: u32, other: u32) {
        *self
            .0
            .entry((lds, at.min(other), at.max(other)))
            .or_default() += 1;
    }

    pub fn join(&mut self, from: Notes) {
        for (key, count) in from.0 {
            *self.0.entry(key).or_default() += count;
        }
    }

    /// The notes, for users.
    pub fn tell(&self, program: &Program) -> Vec<SameStores> {
        let tell = |(&(lds, first, second), &times): (&(bool, u32, u32), &u64)| {
            let place = |at: u32| {
                let pc = program.offsets.get(at as usize).copied();
                let pc = u64::from(pc.unwrap_or_default());
                let inst = program.insts.get(at as usize);
                (pc, inst.map(|i| disasm::text(i, pc)).unwrap_or_default())
            };
            let ((pc, instruction), (other_pc, other_instruction)) = (place(first), place(second));
            SameStores {
                lds,
                pc,
                instruction,
                other_pc,
                other_instruction,
                times,
            }
        };
        self.0.iter().map(tell).collect()
    }
}

/// Wave and instruction of one of two racing accesses.
pub(super) struct Site {
    pub workgroup: u64,
    pub wave: u32,
    pub at: u32,
    pub action: &'static str,
}

impl Scene<'_> {
    /// `lds`: the workgroup whose LDS the address is in; otherwise it is a device address.
    #[cold]
    pub(super) fn race(
        &self,
        lds: Option<u64>,
        address: u64,
        action: &'static str,
        other: &Site,
        reason: RaceReason,
    ) -> FaultKind {
        let pc = self.program.offsets.get(other.at as usize);
        let pc = u64::from(pc.copied().unwrap_or_default());
        let inst = self.program.insts.get(other.at as usize);
        FaultKind::Race(Box::new(Race {
            place: match lds {
                Some(_) => RacePlace::Lds { address },
                None => RacePlace::Global {
                    address,
                    within: self.memory.containing(address),
                },
            },
            action,
            other_action: other.action,
            other_workgroup: crate::launch::place(other.workgroup, self.counts),
            other_wave: other.wave,
            other_pc: pc,
            other_instruction: inst.map(|i| disasm::text(i, pc)).unwrap_or_default(),
            reason,
        }))
    }
}

/// Word for an access in a message.
pub(super) fn action(tag: Tag, write: bool) -> &'static str {
    match (write, tag) {
        (true, tag) if tag.has(Tag::DMA) => "load to LDS",
        (true, tag) if tag.has(Tag::COHERENT) => "atomic or coherent store",
        (true, _) => "store",
        (false, tag) if tag.has(Tag::SCALAR) => "scalar load",
        (false, tag) if tag.has(Tag::COHERENT) => "coherent load",
        (false, _) => "load",
    }
}
