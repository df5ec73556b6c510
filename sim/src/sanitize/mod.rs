//! Sanitizers: checks for errors that hardware does not report, so that correct results are not luck.
//!
//! They run beside the execution: `Sanitizer::before` gets each instruction and the wave's registers before it is
//! executed. The executing functions do not know them. They cost nothing if no check is on.

pub(crate) mod accesses;
mod barriers;
mod class;
mod hazards;
mod matrix;
mod operands;
pub(crate) mod races;
mod report;
pub(crate) mod uses;
mod values;
mod waits;

use std::str::FromStr;

use crate::exec::Env;
use crate::fault::FaultKind;
use crate::inst::Inst;
use crate::wave::Wave;
use accesses::Accesses;
use barriers::Barriers;
use hazards::Hazards;
use races::Races;
use uses::Uses;
use values::{Lds, Registers};
use waits::Waits;

/// Checks of a launch. Accesses outside of allocations, LDS and scratch are always checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Uninitialized values in registers, LDS, scratch or memory must not decide an address, a branch, the active
    /// lanes, or data that is stored to memory.
    pub uninitialized: bool,
    /// A register that an outstanding load will write must not be used before an `s_waitcnt` that covers the load.
    pub waits: bool,
    /// Wait states that MFMA and other instructions need between a write and a use of a register.
    pub hazards: bool,
    /// Two waves must not access the same bytes, one of them writing, unless something orders the accesses.
    pub races: bool,
    /// All lanes of all waves of a workgroup must reach the same `s_barrier`.
    pub barriers: bool,
}

impl Checks {
    /// Every check.
    pub const ALL: Checks = Checks {
        uninitialized: true,
        waits: true,
        hazards: true,
        races: true,
        barriers: true,
    };
    /// No check.
    pub const NONE: Checks = Checks {
        uninitialized: false,
        waits: false,
        hazards: false,
        races: false,
        barriers: false,
    };

    /// Whether any check is on.
    pub fn any(self) -> bool {
        self != Checks::NONE
    }
}

impl Default for Checks {
    fn default() -> Self {
        Checks::NONE
    }
}

impl FromStr for Checks {
    type Err = String;

    /// Parses `all`, `none`, or names separated by commas: `uninitialized`, `waits`, `hazards`, `races`, `barriers`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => return Ok(Checks::ALL),
            "none" => return Ok(Checks::NONE),
            _ => {}
        }
        let mut checks = Checks::NONE;
        for name in text.split(',') {
            *match name {
                "uninitialized" => &mut checks.uninitialized,
                "waits" => &mut checks.waits,
                "hazards" => &mut checks.hazards,
                "races" => &mut checks.races,
                "barriers" => &mut checks.barriers,
                _ => {
                    return Err(format!(
                        "`{name}` is no check: all, none, or some of uninitialized, waits, hazards, races, barriers"
                    ));
                }
            } = true;
        }
        Ok(checks)
    }
}

/// Checks of one workgroup while it runs.
pub(crate) struct Sanitizer<'a> {
    checks: Checks,
    /// Accesses of the instruction that is about to be executed, for checks that look at memory.
    accesses: Accesses,
    /// Register uses of each instruction of the program.
    uses: &'a [Uses],
    waves: Vec<WaveChecks>,
    /// Defined bytes of LDS.
    lds: Lds,
    races: Option<Races<'a>>,
    barriers: Option<Barriers>,
}

/// Check state of one wave.
struct WaveChecks {
    waits: Waits,
    hazards: Hazards,
    /// Defined values, if `uninitialized` is checked.
    registers: Option<Registers>,
}

/// A workgroup that has been set up and not started.
pub(crate) struct Start<'w, 'a> {
    pub waves: &'w [Wave],
    /// Scalar registers that have a value, one bit each.
    pub scalars: u128,
    /// LDS in bytes.
    pub lds: usize,
    /// Register uses of each instruction of the program.
    pub uses: &'a [Uses],
    /// Race check, if races are checked.
    pub races: Option<Races<'a>>,
}

impl<'a> Sanitizer<'a> {
    /// Creates the checks of a workgroup that is about to run.
    pub fn new(checks: Checks, start: Start<'_, 'a>) -> Self {
        let wave = |w: &Wave| WaveChecks {
            waits: Waits::default(),
            hazards: Hazards::default(),
            registers: checks
                .uninitialized
                .then(|| Registers::new(w, start.scalars)),
        };
        Sanitizer {
            checks,
            accesses: Accesses::default(),
            uses: start.uses,
            waves: start.waves.iter().map(wave).collect(),
            races: start.races,
            barriers: checks.barriers.then(|| Barriers::new(start.waves)),
            lds: Lds::new(if checks.uninitialized { start.lds } else { 0 }),
        }
    }

    /// Checks instruction `at` (its index in the program) of a wave before it is executed.
    pub fn before(&mut self, w: &Wave, at: u32, inst: &Inst, env: &Env) -> Result<(), FaultKind> {
        let (Some(mut uses), Some(wave)) = (
            self.uses.get(at as usize),
            self.waves.get_mut(w.id as usize),
        ) else {
            return Ok(());
        };
        let resolved;
        if uses.relative
            && let Some(to) = uses::resolved(w, inst)
        {
            resolved = Uses::of(&to);
            uses = &resolved;
        }
        let waits = self.checks.waits && wave.waits.needs_accesses(inst);
        if self.checks.uninitialized || self.checks.races || waits {
            self.accesses.find(w, inst);
        }
        let instruction = (w, at, inst, uses);
        if self.checks.waits {
            wave.waits.step(instruction, &self.accesses, env)?;
        }
        if self.checks.hazards {
            wave.hazards.step(instruction, env)?;
        }
        if let Some(registers) = &mut wave.registers {
            values::step(registers, &mut self.lds, instruction, &self.accesses, env)?;
        }
        if let Some(barriers) = &mut self.barriers {
            barriers.before(w, at, inst, env)?;
        }
        if let Some(races) = &mut self.races {
            races.before(w, at, inst, &self.accesses, env)?;
        }
        Ok(())
    }

    /// Checks a barrier that all running waves have reached. `at[wave]` is the wave's instruction; `None` for waves
    /// that have ended.
    pub fn barrier(&mut self, at: &[Option<u32>], env: &Env) -> Result<(), (usize, FaultKind)> {
        if let Some(barriers) = &self.barriers {
            barriers.opens(at, env)?;
        }
        if let Some(races) = &mut self.races {
            let waiting = at.iter().position(Option::is_some).unwrap_or(0);
            races
                .barrier(|i| at[i].is_some())
                .map_err(|kind| (waiting, kind))?;
        }
        Ok(())
    }

    /// Wave and instruction of a fault, if they are not the ones that were being checked.
    pub fn blame(&self) -> Option<(u32, u32)> {
        self.races.as_ref()?.blame
    }

    /// Ends the checks: all waves have ended.
    pub fn end(self) -> Result<(), races::Found> {
        self.races.map_or(Ok(()), Races::end)
    }
}
