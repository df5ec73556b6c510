//! Propagates undefined lanes through vector instructions.

use super::Step;
use super::registers::{Origin, Undefined};
use crate::exec::{Ty, dpp_sources, scalar32, scalar64, written_lanes};
use crate::inst::{Operand, VGPR0, flag};
use crate::op::Op::*;
use crate::sanitize::uses::{Role, Use};

impl Step<'_> {
    /// Propagates the shadow of the sources to the results. Faults if EXEC or the number of a lane is undefined.
    pub(super) fn vector(&mut self) -> Result<(), Undefined> {
        match self.inst.op {
            V_READLANE_B32 | V_READFIRSTLANE_B32 => return self.read_lane(),
            V_WRITELANE_B32 => return self.write_lane(),
            _ => {}
        }
        let exec = self.w.exec();
        let mut defined = exec;
        for u in self.uses.reads() {
            match (u.vector(self.w.accum_offset), u.role) {
                (_, Role::Kept | Role::Lanes | Role::Index) => {}
                (Some(v), _) => {
                    for v in v..v + usize::from(u.count) {
                        defined &= self.shadow.vector[v & 511];
                    }
                }
                (None, Role::Mask) => defined &= self.shadow.pair(u.first),
                (None, _) => {
                    for s in usize::from(u.first)..usize::from(u.first) + usize::from(u.count) {
                        if s < 128 && self.shadow.scalar[s] == 0 {
                            defined = 0;
                        }
                    }
                }
            }
        }
        let lanes = if self.inst.has(flag::DPP) {
            written_lanes(self.w, self.inst)
        } else {
            exec
        };
        if defined == exec {
            for u in self.uses.writes() {
                match u.vector(self.w.accum_offset) {
                    Some(v) => {
                        for v in v..v + usize::from(u.count) {
                            self.shadow.vector[v & 511] |= lanes;
                        }
                    }
                    None => self.shadow_mask(u.first, !0, Origin::Unknown),
                }
            }
            return Ok(());
        }
        self.undefined_vector(defined, lanes)
    }

    /// Sets the defined bits of a lane mask.
    fn shadow_mask(&mut self, first: Operand, defined: u64, origin: Origin) {
        self.shadow.write_scalar(first, defined as u32, origin);
        self.shadow
            .write_scalar(first + 1, (defined >> 32) as u32, origin);
    }

    fn read_lane(&mut self) -> Result<(), Undefined> {
        let first = self.inst.op == V_READFIRSTLANE_B32;
        let lane = if first {
            self.w.exec().trailing_zeros() & 63
        } else {
            if let Some(u) = self.uses.role(Role::Source1) {
                self.undefined(u, 1, "the lane that is read")?;
            }
            self.lane_number(1)
        };
        let Some(u) = self.uses.role(Role::Source0) else {
            return self.write_all_scalars(true, Origin::Unknown);
        };
        let (defined, origin) = match u.vector(self.w.accum_offset) {
            Some(v) => (
                self.shadow.vector[v] >> lane & 1 != 0,
                self.shadow.origin[v],
            ),
            None => (
                self.shadow.scalar[usize::from(u.first) & 127] == !0,
                self.source_origin(),
            ),
        };
        self.write_all_scalars(defined, origin)
    }

    fn write_all_scalars(&mut self, defined: bool, origin: Origin) -> Result<(), Undefined> {
        for u in self.uses.writes() {
            self.shadow
                .write_scalar(u.first, if defined { !0 } else { 0 }, origin);
        }
        Ok(())
    }

    /// Value of a source that names a lane.
    fn lane_number(&self, n: usize) -> u32 {
        let s = self.inst.src[n];
        if s >= VGPR0 {
            self.w.vgpr[self.w.vreg(s) & 511].0[0] & 63
        } else {
            scalar32(self.w, self.inst, s) & 63
        }
    }

    fn write_lane(&mut self) -> Result<(), Undefined> {
        if let Some(u) = self.uses.role(Role::Source1) {
            self.undefined(u, 1, "the lane that is written")?;
        }
        let one = 1u64 << self.lane_number(1);
        let value = self.uses.role(Role::Source0);
        // Scalar registers are saved in lanes. Among them are lane masks, some of whose bits are unused.
        let defined = value.is_none_or(|u| self.operand_lanes(u.first, 0) & 1 != 0);
        let origin = if defined {
            Origin::Unknown
        } else {
            self.source_origin()
        };
        for (v, _) in vectors(self, self.uses.writes()) {
            let lanes = if defined { one } else { 0 };
            self.shadow.write_vector(v, one, lanes, origin);
        }
        Ok(())
    }

    /// Handles sources that are undefined in active lanes. `defined`: lanes in which all sources are defined.
    #[cold]
    fn undefined_vector(&mut self, defined: u64, lanes: u64) -> Result<(), Undefined> {
        let origin = self.source_origin();
        let exec = self.w.exec();
        let inst = self.inst;
        let same = inst.src[0] == inst.src[1] && inst.src[0] != crate::inst::NONE;
        let mut defined = if inst.has(flag::DPP) {
            self.moved_lanes()
        } else {
            defined
        };
        match inst.op {
            // Zero whatever the register holds.
            V_XOR_B32 | V_SUB_U32 | V_SUB_I32 | V_SUBREV_U32 | V_SUB_CO_U32 if same => {
                defined = exec
            }
            V_AND_B32 => defined |= self.deciding_lanes(0),
            V_OR_B32 if inst.has(flag::SDWA) => defined |= self.combined_lanes(),
            V_OR_B32 => defined |= self.deciding_lanes(!0),
            V_CNDMASK_B32 => defined = self.selected_lanes(),
            V_PERM_B32 | V_ALIGNBIT_B32 | V_ALIGNBYTE_B32 | V_PACK_B32_F16 | V_BFI_B32
            | V_LSHL_OR_B32 | V_AND_OR_B32 | V_OR3_B32 => defined |= self.combined_lanes(),
            V_SWAP_B32 => {
                let of = |u: &Use| u.vector(self.w.accum_offset).unwrap_or(0) & 511;
                if let [a, b] = self.uses.writes() {
                    let (a, b) = (of(a), of(b));
                    let (x, y) = (self.shadow.vector[a], self.shadow.vector[b]);
                    let origins = (self.shadow.origin[a], self.shadow.origin[b]);
                    self.shadow.write_vector(a, exec, y, origins.1);
                    self.shadow.write_vector(b, exec, x, origins.0);
                }
                return Ok(());
            }
            V_MOV_B64 | V_PK_MOV_B32 | V_PK_FMA_F32 | V_PK_MUL_F32 | V_PK_ADD_F32
            | V_MAD_U64_U32 | V_MAD_I64_I32 | V_LSHL_ADD_U64 | V_LSHLREV_B64 | V_LSHRREV_B64
            | V_ASHRREV_I64 => {
                self.write_halves(lanes, defined, origin);
                return Ok(());
            }
            _ => {}
        }
        for u in self.uses.writes() {
            match u.vector(self.w.accum_offset) {
                Some(v) => {
                    for v in v..v + usize::from(u.count) {
                        self.shadow.write_vector(v, lanes, defined, origin);
                    }
                }
                // The bits of lanes that are off are 0.
                None => self.shadow_mask(u.first, defined | !exec, origin),
            }
        }
        if inst.op.mnemonic().starts_with("v_cmpx") {
            self.exec_is_defined()?;
        }
        Ok(())
    }

    /// Records a 64-bit result whose halves depend on different registers.
    fn write_halves(&mut self, lanes: u64, defined: u64, origin: Origin) {
        let halves = [self.half(0), self.half(1)];
        for u in self.uses.writes() {
            match u.vector(self.w.accum_offset) {
                Some(v) => {
                    self.shadow.write_vector(v, lanes, halves[0], origin);
                    self.shadow.write_vector(v + 1, lanes, halves[1], origin);
                }
                None => self.shadow_mask(u.first, defined | !self.w.exec(), origin),
            }
        }
    }

    /// Lanes in which source `n` is defined.
    fn source(&self, n: usize) -> u64 {
        self.operand_lanes(self.inst.src[n], 0)
    }

    /// Lanes in which a register of an operand is defined.
    fn operand_lanes(&self, operand: Operand, register: usize) -> u64 {
        match operand {
            VGPR0.. if operand != crate::inst::NONE => {
                self.shadow.vector[(self.w.vreg(operand) + register) & 511]
            }
            0..=127 => {
                let s = (usize::from(operand) + register) & 127;
                if self.shadow.scalar[s] != 0 { !0 } else { 0 }
            }
            _ => !0,
        }
    }

    /// Lanes in which all sources of a DPP instruction are defined, after its first source has moved.
    fn moved_lanes(&self) -> u64 {
        let exec = self.w.exec();
        let first = self.source(0);
        let from = dpp_sources(self.inst.ctrl);
        let mut moved = 0u64;
        for (lane, &f) in from.iter().enumerate() {
            // A lane without a source, or whose source is off, reads 0.
            let reads_zero = f >= 64 || exec >> f & 1 == 0;
            let defined = reads_zero || first >> f & 1 != 0;
            moved |= u64::from(defined) << lane;
        }
        let mut defined = moved & exec;
        for u in self.uses.reads() {
            match u.role {
                Role::Source1 | Role::Accumulator => defined &= self.operand_lanes(u.first, 0),
                Role::Mask => defined &= self.shadow.pair(u.first),
                _ => {}
            }
        }
        defined
    }

    /// Lanes in which a defined source has `value`, which decides the result of an `and` or `or`.
    fn deciding_lanes(&self, value: u32) -> u64 {
        let mut lanes = 0;
        for n in 0..2 {
            let operand = self.inst.src[n];
            let equal = if operand >= VGPR0 {
                let register = &self.w.vgpr[self.w.vreg(operand) & 511].0;
                (0..64).fold(0, |m, l| m | u64::from(register[l] == value) << l)
            } else if scalar32(self.w, self.inst, operand) == value {
                !0
            } else {
                0
            };
            lanes |= equal & self.source(n);
        }
        lanes
    }

    /// Lanes in which a part of a combination of bytes and halves is defined, which is enough for a dword.
    fn combined_lanes(&self) -> u64 {
        // A constant need not stay in the result.
        let part = |n: usize| match self.inst.src[n] {
            128..VGPR0 => 0,
            _ => self.source(n),
        };
        match self.inst.op {
            V_PERM_B32 | V_ALIGNBIT_B32 | V_ALIGNBYTE_B32 => (part(0) | part(1)) & self.source(2),
            V_BFI_B32 => self.source(0) & (part(1) | part(2)),
            V_LSHL_OR_B32 | V_AND_OR_B32 => self.source(0) & self.source(1) | part(2),
            V_OR3_B32 => part(0) | part(1) | part(2),
            _ => part(0) | part(1),
        }
    }

    /// Lanes in which `v_cndmask` selects a defined value.
    fn selected_lanes(&self) -> u64 {
        let Some(mask) = self.uses.role(Role::Mask) else {
            return 0;
        };
        let known = if mask.first < 128 {
            self.shadow.pair(mask.first)
        } else {
            !0
        };
        let select = scalar64(self.w, self.inst, mask.first, Ty::B64);
        let (a, b) = (self.source(0), self.source(1));
        let same = self.inst.src[0] == self.inst.src[1];
        known & (select & b | !select & a) | if same { a } else { 0 }
    }

    /// Lanes in which one half of a 64-bit shift is defined. The half that bits are shifted towards depends on both
    /// halves, or only on the other one if the shift is 32 or more.
    fn shifted_half(&self, half: usize) -> u64 {
        let inst = self.inst;
        let from = usize::from(inst.op != V_LSHLREV_B64);
        let far = inst.src[0] < VGPR0 && scalar32(self.w, inst, inst.src[0]) & 63 >= 32;
        let [near, away] = [1 - from, from].map(|n| self.operand_lanes(inst.src[1], n));
        let defined = match (half == from, far) {
            // Zeros, or copies of the sign.
            (true, true) if inst.op != V_ASHRREV_I64 => !0,
            (true, _) | (false, true) => away,
            (false, false) => near & away,
        };
        defined & self.source(0)
    }

    /// Lanes in which one half of a 64-bit result is defined.
    fn half(&self, half: usize) -> u64 {
        let inst = self.inst;
        let picked = |n: usize, bits: u8| usize::from(bits >> n & 1);
        match inst.op {
            V_MOV_B64 => self.operand_lanes(inst.src[0], half),
            // Carries go from the low half up, never down.
            V_MAD_U64_U32 | V_MAD_I64_I32 => {
                let low = self.source(0) & self.source(1) & self.source(2);
                low & if half == 0 {
                    !0
                } else {
                    self.operand_lanes(inst.src[2], 1)
                }
            }
            V_LSHL_ADD_U64 => {
                let of = |n: usize| self.operand_lanes(inst.src[n], half);
                self.source(0) & self.source(1) & self.source(2) & of(0) & of(2)
            }
            V_LSHLREV_B64 | V_LSHRREV_B64 | V_ASHRREV_I64 => self.shifted_half(half),
            V_PK_MOV_B32 => self.operand_lanes(inst.src[half], picked(half, inst.op_sel)),
            _ => {
                let bits = if half == 0 {
                    inst.op_sel
                } else {
                    inst.op_sel_hi
                };
                (0..3).fold(!0, |defined, n| {
                    defined & self.operand_lanes(inst.src[n], picked(n, bits))
                })
            }
        }
    }
}

/// Vector registers of some uses.
pub(super) fn vectors(step: &Step, uses: &[Use]) -> Vec<(usize, usize)> {
    let place = |u: &Use| {
        let first = u.vector(step.w.accum_offset)?;
        Some((first, usize::from(u.count).min(512 - first)))
    };
    uses.iter().filter_map(place).collect()
}
