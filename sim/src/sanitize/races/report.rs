//! The texts of races.

use super::shadow::Tag;
use crate::disasm;
use crate::fault::{FaultKind, Race, RacePlace, RaceReason};
use crate::inst::Program;
use crate::memory::Memory;

/// What the text of a report needs.
#[derive(Clone, Copy)]
pub(crate) struct Scene<'a> {
    pub program: &'a Program,
    pub memory: &'a Memory,
    /// Workgroups in x, y, z.
    pub counts: [u32; 3],
}

/// Where one of two racing accesses was made.
pub(super) struct Site {
    pub workgroup: u64,
    pub wave: u32,
    pub at: u32,
    pub action: &'static str,
}

impl Scene<'_> {
    /// `lds`: the address is one of LDS, of a workgroup.
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

/// What kind of access a report calls it.
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
