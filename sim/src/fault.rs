//! Faults of a running kernel, and their messages.

use thiserror::Error;

use crate::memory::Extent;

/// Reason why a wave stopped before its `s_endpgm`.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FaultKind {
    #[error("invalid or unknown instruction {bytes:08x?}")]
    InvalidInstruction { bytes: Vec<u32> },
    #[error("instruction {mnemonic} is not implemented by the simulator")]
    Unimplemented { mnemonic: String },
    #[error("{access} of {size} bytes at {address:#x} by lane {lane} is outside every allocation{}", nearest.as_ref().map(|n| format!("; {n}")).unwrap_or_default())]
    OutOfBounds {
        access: &'static str,
        address: u64,
        size: u32,
        lane: u32,
        nearest: Option<String>,
    },
    #[error(
        "{access} of {size} bytes at LDS address {address:#x} by lane {lane} is outside the workgroup's {limit} bytes"
    )]
    LdsOutOfBounds {
        access: &'static str,
        address: u32,
        size: u32,
        lane: u32,
        limit: u32,
    },
    #[error(
        "{access} of {size} bytes at scratch offset {address:#x} by lane {lane} is outside the lane's {limit} bytes"
    )]
    ScratchOutOfBounds {
        access: &'static str,
        address: u64,
        size: u32,
        lane: u32,
        limit: u32,
    },
    #[error("{access} at {address:#x} by lane {lane} is not aligned to {align} bytes")]
    Misaligned {
        access: &'static str,
        address: u64,
        align: u32,
        lane: u32,
    },
    #[error("s_trap {id}")]
    Trap { id: u8 },
    #[error("pc {target:#x} is outside the program")]
    BadPc { target: u64 },
    #[error("register {register} is outside the {limit} registers of the wave")]
    BadRegister { register: String, limit: u32 },
    #[error("the launch hangs: no wave changes its state any more{}{}", unstarted(*not_started), list(waves))]
    Deadlock {
        waves: Vec<WaveState>,
        /// Workgroups that start only after this one has ended.
        not_started: u64,
    },
    #[error(
        "{register} is {used} while a load that will write it may be outstanding: {load}; `{wait}` is missing before this"
    )]
    NotWaitedFor {
        register: String,
        used: &'static str,
        /// The load.
        load: String,
        /// The `s_waitcnt` that covers it.
        wait: String,
    },
    #[error(
        "too few wait states: {rule}{}; {needed} are needed after {before}, there are {found}",
        register.as_ref().map(|r| format!(" ({r})")).unwrap_or_default()
    )]
    Hazard {
        rule: &'static str,
        register: Option<String>,
        /// The first of the two instructions.
        before: String,
        needed: u32,
        found: u32,
    },
    #[error(
        "{register}{} is undefined and decides {decides}: {origin}",
        lane.map(|l| format!(" of lane {l}")).unwrap_or_default()
    )]
    Undefined {
        register: String,
        /// Lane of a vector register; `None` for a scalar register.
        lane: Option<u32>,
        decides: &'static str,
        /// Origin of the value.
        origin: String,
    },
    #[error("the launch exceeded {limit} wave-instructions{}", list(waves))]
    InstructionLimit { limit: u64, waves: Vec<WaveState> },
    #[error(
        "{} lanes (exec bits {lanes:#x}) are on that were off when their wave passed the s_barrier at pc {barrier_pc:#x}; only work-items that have returned may leave out __syncthreads",
        lanes.count_ones()
    )]
    DivergentBarrier { barrier_pc: u64, lanes: u64 },
    #[error(
        "this wave waits at another s_barrier than wave {other_wave}, which waits at pc {other_pc:#x}; hardware opens both, but HIP requires that all work-items reach the same __syncthreads"
    )]
    DifferentBarriers { other_wave: u32, other_pc: u64 },
    #[error("{0}")]
    Race(Box<Race>),
}

/// State of one wave in a launch that does not end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct WaveState {
    pub wave: u32,
    /// Byte offset in `.text` of the next instruction, or of the barrier at which the wave waits.
    pub pc: u64,
    pub instruction: String,
    /// `Some(true)`: waits at a barrier; `Some(false)`: runs; `None`: has ended.
    pub waits: Option<bool>,
    pub exec: u64,
    /// Instructions executed.
    pub executed: u64,
}

fn list(waves: &[WaveState]) -> String {
    let mut text = String::new();
    for w in waves {
        let WaveState {
            wave,
            pc,
            instruction,
            exec,
            executed,
            ..
        } = w;
        text += &match w.waits {
            None => format!("\n  wave {wave}: has ended after {executed} instructions"),
            Some(waits) => {
                let does = if waits { "waits at" } else { "runs at" };
                format!(
                    "\n  wave {wave}: {does} pc {pc:#x} ({instruction}), exec {exec:#018x}, {executed} instructions executed"
                )
            }
        };
    }
    text
}

fn unstarted(count: u64) -> String {
    match count {
        0 => String::new(),
        n => format!(
            "; {n} workgroups have not started, and no wave may wait for one of them: workgroups need not run at the same time"
        ),
    }
}

/// A race: two unordered accesses of the same byte, at least one of them a write. The fault's own wave and pc belong to
/// one of the two.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "race on {place}: this {action} and the {other_action} by wave {other_wave} of workgroup {other_workgroup:?} at pc {other_pc:#x} ({other_instruction}) are not ordered: {reason}"
)]
#[allow(missing_docs)]
pub struct Race {
    pub place: RacePlace,
    pub action: &'static str,
    pub other_action: &'static str,
    pub other_workgroup: [u32; 3],
    pub other_wave: u32,
    /// Byte offset of the other instruction in `.text`.
    pub other_pc: u64,
    pub other_instruction: String,
    pub reason: RaceReason,
}

/// The first byte of a race.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum RacePlace {
    #[error("LDS address {address:#x}")]
    Lds { address: u64 },
    #[error("address {address:#x}{}", within.map(|e| format!(", byte {} of the allocation {:#x}..{:#x}", address - e.start, e.start, e.end)).unwrap_or_default())]
    Global {
        address: u64,
        within: Option<Extent>,
    },
}

/// Reason why two accesses are not ordered.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum RaceReason {
    #[error("no s_barrier and no atomic is between them")]
    Waves,
    #[error(
        "the s_barrier between them does not wait for LDS; before it, s_waitcnt {counter}(0) is missing in the other wave"
    )]
    Undrained { counter: &'static str },
    #[error(
        "the scalar cache does not see vector stores; s_waitcnt vmcnt(0) after the store, or s_dcache_inv before the scalar load, is missing"
    )]
    ScalarCache,
    #[error(
        "workgroups of a launch run in any order, and no flag orders these two; a flag that is written before s_waitcnt vmcnt(0) orders nothing"
    )]
    Workgroups,
    #[error(
        "a flag orders them, but each die has its own L2: before the flag is written, the other wave needs buffer_wbl2 sc1 and s_waitcnt vmcnt(0), a release at agent scope"
    )]
    NoRelease,
    #[error(
        "a flag orders them, but caches may hold old bytes: after the flag was read, this wave needs s_waitcnt vmcnt(0) and buffer_inv sc1, an acquire at agent scope"
    )]
    NoAcquire,
}

/// Unordered stores by two waves of the same bytes to the same address. They are no race: memory holds these bytes
/// whichever store is last. Reported if [`Options::notes`](crate::launch::Options::notes) is set.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "stores of the same bytes to {} by two {}, not ordered, {times} times: pc {pc:#x} ({instruction}) and pc {other_pc:#x} ({other_instruction})",
    if *lds { "LDS" } else { "memory" },
    if *lds { "waves" } else { "waves or workgroups" }
)]
#[allow(missing_docs)]
pub struct SameStores {
    pub lds: bool,
    /// Byte offsets in `.text`; equal if both waves execute the same instruction.
    pub pc: u64,
    pub instruction: String,
    pub other_pc: u64,
    pub other_instruction: String,
    /// Number of times that a store met one of another wave.
    pub times: u64,
}

/// A fault, with the wave and the instruction where it happened.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "kernel {kernel}, workgroup {workgroup:?}, wave {wave}, pc {pc:#x} ({instruction}): {kind}"
)]
#[allow(missing_docs)]
pub struct Fault {
    pub kind: FaultKind,
    pub kernel: String,
    pub workgroup: [u32; 3],
    pub wave: u32,
    /// Byte offset of the instruction in `.text`.
    pub pc: u64,
    /// The instruction as text.
    pub instruction: String,
}
