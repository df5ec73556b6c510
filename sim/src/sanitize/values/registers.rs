//! Shadows of a wave's registers.

use crate::inst::Operand;
use crate::sanitize::uses::SCC;
use crate::wave::Wave;

/// Origin of an undefined value.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Origin {
    #[default]
    Unknown,
    /// A register that nothing wrote.
    Unwritten { place: u16 },
    /// A load returned it.
    Loaded {
        /// The load's index in the program.
        at: u32,
        space: &'static str,
        address: u64,
        lane: u8,
        /// Whether an undefined value was stored there; otherwise nothing was.
        stored: bool,
    },
}

/// An undefined value that decides something.
pub(super) struct Undefined {
    pub operand: Operand,
    /// Index in [`Registers::origin`].
    pub place: usize,
    pub lane: Option<u32>,
    pub decides: &'static str,
    pub origin: Origin,
}

/// Number of registers: vector, then scalar, then SCC.
const PLACES: usize = 512 + 128 + 1;

pub(super) fn scalar_place(operand: Operand) -> usize {
    if operand == SCC {
        PLACES - 1
    } else {
        512 + usize::from(operand & 127)
    }
}

pub(super) fn scalar_operand(place: usize) -> Operand {
    if place == PLACES - 1 {
        SCC
    } else {
        (place - 512) as Operand
    }
}

/// Defined values of a wave.
pub(in crate::sanitize) struct Registers {
    /// By index in the unified file: one bit per lane.
    pub(super) vector: Box<[u64; 512]>,
    /// By register: one bit per bit.
    pub(super) scalar: [u32; 128],
    pub(super) scc: bool,
    /// By dword of a lane's scratch: one bit per lane.
    pub(super) scratch: Vec<u64>,
    /// Origin of the undefined bits of each register; unspecified for defined registers.
    pub(super) origin: Box<[Origin; PLACES]>,
}

impl Registers {
    /// Shadows of a wave that has been set up; `scalars` are the scalar registers with values.
    pub fn new(w: &Wave, scalars: u128) -> Self {
        let mut origin = Box::new([Origin::Unknown; PLACES]);
        for (place, origin) in origin.iter_mut().enumerate() {
            let place = place as u16;
            *origin = Origin::Unwritten { place };
        }
        let mut vector = Box::new([0; 512]);
        // The numbers of the work-items.
        vector[0] = w.exec();
        Registers {
            vector,
            scalar: std::array::from_fn(|s| if scalars >> s & 1 != 0 { !0 } else { 0 }),
            scc: false,
            scratch: vec![0; w.scratch_stride as usize / 4],
            origin,
        }
    }

    /// Defined bits of a scalar pair.
    #[inline(always)]
    pub(super) fn pair(&self, operand: Operand) -> u64 {
        let i = usize::from(operand);
        u64::from(self.scalar[i & 127]) | u64::from(self.scalar[(i + 1) & 127]) << 32
    }

    /// Records a write to `lanes` of a vector register, with defined values in `defined`.
    #[inline(always)]
    pub(super) fn write_vector(&mut self, v: usize, lanes: u64, defined: u64, origin: Origin) {
        let v = v & 511;
        self.vector[v] = self.vector[v] & !lanes | defined & lanes;
        if lanes & !defined != 0 {
            self.origin[v] = origin;
        }
    }

    /// Records a write to a scalar register.
    #[inline(always)]
    pub(super) fn write_scalar(&mut self, operand: Operand, defined: u32, origin: Origin) {
        let s = usize::from(operand) & 127;
        self.scalar[s] = defined;
        if defined != !0 {
            self.origin[512 + s] = origin;
        }
    }

    pub(super) fn write_scc(&mut self, defined: bool, origin: Origin) {
        self.scc = defined;
        if !defined {
            self.origin[PLACES - 1] = origin;
        }
    }
}
