//! What can go wrong while a kernel runs.

use thiserror::Error;

/// Why a wave stopped before its `s_endpgm`.
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
    #[error("waves wait at a barrier that others can never reach")]
    Deadlock,
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
        /// Of a vector register.
        lane: Option<u32>,
        decides: &'static str,
        /// Where the value came from.
        origin: String,
    },
    #[error("the launch exceeded {limit} wave-instructions")]
    InstructionLimit { limit: u64 },
}

/// A fault, and where it happened.
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
