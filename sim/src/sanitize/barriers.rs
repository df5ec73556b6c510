//! Barrier check: all lanes of a wave must reach `s_barrier` together, and all waves of a workgroup the same one.
//!
//! Hardware counts waves and requires neither. HIP allows `__syncthreads` only if all work-items that have not ended
//! reach it. Compilers rely on that and keep the barriers of a program apart: LLVM does not duplicate `convergent`
//! instructions into branches. The check reports waves that wait at different barriers. It also reports lanes that were
//! off at a barrier and are on later: they went around it. Lanes and waves that ended before a barrier are not missed.
//! Waves with different priorities (`s_setprio`) have different roles in a kernel, written for hardware that counts
//! waves: they may meet at different barriers.

use crate::exec::Env;
use crate::fault::FaultKind;
use crate::inst::{EXEC, Format, Inst};
use crate::op::Op;
use crate::wave::Wave;

/// The inline constant -1.
const ALL_ONES: u16 = 193;

/// Barrier check of one workgroup.
pub(crate) struct Barriers {
    waves: Vec<Lanes>,
}

/// Lanes of one wave.
struct Lanes {
    /// The lanes that were on at the start.
    start: u64,
    /// Lanes of `start` that were off at a barrier, and that barrier.
    missing: u64,
    barrier: u32,
    /// Priority that `s_setprio` set.
    priority: u8,
    /// Whether the compiler turned on all lanes for its own purposes (whole wave mode), including lanes that have
    /// returned.
    whole: bool,
}

impl Barriers {
    pub fn new(waves: &[Wave]) -> Self {
        let lanes = |w: &Wave| Lanes {
            start: w.exec(),
            missing: 0,
            barrier: 0,
            priority: 0,
            whole: false,
        };
        Barriers {
            waves: waves.iter().map(lanes).collect(),
        }
    }

    #[inline]
    pub fn before(&mut self, w: &Wave, at: u32, inst: &Inst, env: &Env) -> Result<(), FaultKind> {
        let lanes = &mut self.waves[w.id as usize];
        let barrier = inst.op == Op::S_BARRIER;
        if lanes.missing != 0 {
            lanes.returned(w, inst, env)?;
        }
        if barrier {
            lanes.missing |= lanes.start & !w.exec();
            lanes.barrier = at;
        } else if inst.op == Op::S_SETPRIO {
            lanes.priority = (inst.imm & 3) as u8;
        }
        Ok(())
    }

    /// Checks the instructions at which the waves wait; `None` for waves that have ended.
    pub fn opens(&self, at: &[Option<u32>], env: &Env) -> Result<(), (usize, FaultKind)> {
        let mut first = [None; 4];
        for (wave, place) in at.iter().enumerate() {
            let Some(place) = *place else { continue };
            let (other, at) =
                *first[usize::from(self.waves[wave].priority)].get_or_insert((wave, place));
            if at != place {
                return Err((
                    wave,
                    FaultKind::DifferentBarriers {
                        other_wave: other as u32,
                        other_pc: pc(env, at),
                    },
                ));
            }
        }
        Ok(())
    }
}

impl Lanes {
    #[cold]
    fn returned(&mut self, w: &Wave, inst: &Inst, env: &Env) -> Result<(), FaultKind> {
        let back = w.exec() & self.missing;
        if back == 0 {
            self.whole = false;
        }
        let scalar = matches!(
            inst.format,
            Format::Sop1 | Format::Sop2 | Format::Sopc | Format::Sopk | Format::Sopp | Format::Smem
        );
        if back != 0 && !self.whole && (!scalar || inst.op == Op::S_BARRIER) {
            return Err(FaultKind::DivergentBarrier {
                barrier_pc: pc(env, self.barrier),
                lanes: back,
            });
        }
        let saves = inst.op == Op::S_OR_SAVEEXEC_B64;
        let sets = inst.op == Op::S_MOV_B64 && inst.sdst == EXEC;
        if (saves || sets) && inst.src[0] == ALL_ONES {
            self.whole = true;
        }
        Ok(())
    }
}

/// Byte offset of an instruction.
fn pc(env: &Env, at: u32) -> u64 {
    let offset = env.program.offsets.get(at as usize);
    u64::from(offset.copied().unwrap_or_default())
}
