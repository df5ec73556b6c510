//! Progress of a wave's memory instructions, by the counters that `s_waitcnt` waits for.
//!
//! Every memory instruction of a wave gets a time: 1, 2, 3 and so on. 'Done up to 7' means that the first seven have
//! completed.

use std::collections::VecDeque;

use crate::inst::{Format, Inst};
use crate::op::Op;

/// Maximum of gfx9's counters. A wave stalls before it issues more.
const VM_LIMIT: usize = 63;
const LGKM_LIMIT: usize = 15;

/// Outstanding memory instructions of one wave.
#[derive(Default)]
pub(super) struct Progress {
    /// Time of the last instruction issued.
    pub now: u32,
    /// Time of the last instruction that accesses LDS, by lgkmcnt and by vmcnt (a load to LDS).
    pub last_lds: u32,
    pub last_dma: u32,
    vm: VecDeque<u32>,
    /// Time of each operation, and whether it is scalar: those return in any order.
    lgkm: VecDeque<(u32, bool)>,
}

impl Progress {
    /// Records an instruction that is issued. Returns its time.
    pub fn issue(&mut self, inst: &Inst) -> u32 {
        self.now += 1;
        let (vm, lgkm) = match inst.format {
            Format::Ds | Format::Smem => (false, true),
            Format::Flat => (true, true),
            Format::Mubuf if inst.op == Op::BUFFER_INV => (false, false),
            _ => (true, false),
        };
        if vm {
            self.vm.push_back(self.now);
            if self.vm.len() > VM_LIMIT {
                self.vm.pop_front();
            }
        }
        if lgkm {
            self.lgkm.push_back((self.now, inst.format == Format::Smem));
            if self.lgkm.len() > LGKM_LIMIT {
                self.lgkm.pop_front();
            }
        }
        self.now
    }

    /// Records an `s_waitcnt` with this constant.
    pub fn wait(&mut self, constant: i32) {
        let vm = (constant & 15 | (constant >> 14 & 3) << 4) as usize;
        let lgkm = (constant >> 8 & 15) as usize;
        while self.vm.len() > vm {
            self.vm.pop_front();
        }
        if lgkm > 0 && self.lgkm.iter().any(|(_, scalar)| *scalar) {
            // It is not known which operations are left.
            return;
        }
        while self.lgkm.len() > lgkm {
            self.lgkm.pop_front();
        }
    }

    /// Time up to which everything that vmcnt counts is done.
    pub fn vm_done(&self) -> u32 {
        self.vm.front().map_or(self.now, |t| t - 1)
    }

    /// Time up to which everything that lgkmcnt counts is done.
    pub fn lgkm_done(&self) -> u32 {
        self.lgkm.front().map_or(self.now, |(t, _)| t - 1)
    }

    /// Whether no access to LDS is outstanding.
    pub fn lds_is_quiet(&self) -> bool {
        self.last_lds <= self.lgkm_done() && self.last_dma <= self.vm_done()
    }
}
