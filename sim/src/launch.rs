//! Launches: runs a grid of workgroups of waves on the host's cores.
//!
//! The waves of a workgroup take turns on one host thread; workgroups are spread over threads. Results do not depend on
//! which thread runs a workgroup, or when. Atomics whose order shows in their results would be an exception, so kernels
//! with such atomics run their workgroups one after the other.

mod abi;
mod hang;
mod workgroup;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use crate::code_object::{CodeObject, Image, Kernel, property};
use crate::count::{Counting, Counts};
use crate::exec::{Level, MfmaMode};
use crate::fault::{Fault, FaultKind, SameStores};
use crate::memory::Memory;
use crate::occupancy::Occupancy;
use crate::sanitize::Checks;
use crate::sanitize::races::Ledger;
use crate::timing::trace::{Recorded, Recording};
use abi::Setup;
use hang::Stuck;
use workgroup::{Machine, Shared};

/// LDS of a compute unit in bytes.
pub const LDS_LIMIT: u32 = 64 << 10;
/// Maximum number of work-items in a workgroup.
pub const BLOCK_LIMIT: u32 = 1024;
/// Maximum scratch of one lane in bytes.
pub const SCRATCH_LIMIT: u32 = 128 << 10;
/// Vector registers of a SIMD for each lane. A workgroup's waves share four SIMDs.
const SIMD_REGISTERS: u32 = 512;
const SIMDS: u32 = 4;

/// Order in which the waves of a workgroup execute. A correct kernel gives the same results in every order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WaveOrder {
    /// Runs a wave until it has to wait, then the next one. The fastest order.
    #[default]
    RunAhead,
    /// Runs one instruction of each wave in turn.
    InStep,
    /// Runs random waves for random times. The same seed gives the same order.
    Seeded(u64),
}

impl std::str::FromStr for WaveOrder {
    type Err = String;

    /// Parses `run-ahead`, `in-step` or `seeded:SEED`; `seed:SEED` is an older spelling of the last.
    fn from_str(text: &str) -> Result<Self, String> {
        let seed = || text.strip_prefix("seeded:").or(text.strip_prefix("seed:"));
        match text {
            "run-ahead" => Ok(WaveOrder::RunAhead),
            "in-step" => Ok(WaveOrder::InStep),
            _ => (seed().and_then(|seed| seed.parse().ok()))
                .map(WaveOrder::Seeded)
                .ok_or_else(|| "expected run-ahead, in-step or seeded:SEED".to_owned()),
        }
    }
}

impl std::fmt::Display for WaveOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            WaveOrder::RunAhead => f.write_str("run-ahead"),
            WaveOrder::InStep => f.write_str("in-step"),
            WaveOrder::Seeded(seed) => write!(f, "seeded:{seed}"),
        }
    }
}

/// Options of a simulated launch.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// MFMA arithmetic.
    pub mfma: MfmaMode,
    /// Maximum number of host threads; all cores if absent.
    pub threads: Option<usize>,
    /// Host vector extensions; lowered to those that the host has.
    pub level: Level,
    /// Order of the waves in a workgroup.
    pub order: WaveOrder,
    /// Wave-instructions after which a launch counts as hung.
    pub instruction_limit: u64,
    /// Number of accelerator dies: workgroup `i` runs on die `i % xccs`.
    pub xccs: u32,
    /// Minimum scratch of a lane in bytes, for kernels whose need is not known at compile time.
    pub dynamic_stack: u32,
    /// Checks during the launch.
    pub checks: Checks,
    /// Whether the race check notes unordered stores of the same bytes ([`Stats::notes`]).
    pub notes: bool,
    /// Whether to count instructions, unit clocks and memory traffic ([`Stats::counts`]).
    pub count: bool,
    /// Workgroups to record ([`Stats::recorded`]).
    pub record: Record,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mfma: MfmaMode::default(),
            threads: None,
            level: Level::detect(),
            order: WaveOrder::default(),
            instruction_limit: 1 << 36,
            xccs: 8,
            dynamic_stack: 16 << 10,
            checks: Checks::default(),
            notes: false,
            count: false,
            record: Record::default(),
        }
    }
}

/// Workgroups to record for [`crate::timing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Record {
    /// Records nothing.
    #[default]
    None,
    /// Records all workgroups, and keeps at most this many of each kind: those whose numbers of instructions are alike.
    Some(u32),
    /// Runs and records this many neighbours on one die, from the middle of the launch, and no others: for kernels whose
    /// workgroups are alike and do not wait for each other.
    Only(u32),
}

/// Results of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Instructions executed, counted once per wave.
    pub wave_instructions: u64,
    /// Workgroups run.
    pub workgroups: u64,
    /// Waves run.
    pub waves: u64,
    /// Counters of each instruction, if [`Options::count`] is set.
    pub counts: Option<Box<Counts>>,
    /// Workgroups that [`Options::record`] selects.
    pub recorded: Recorded,
    /// Unordered stores of the same bytes, if [`Options::notes`] is set.
    pub notes: Vec<SameStores>,
}

/// Reason why a launch was refused or stopped.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum LaunchError {
    #[error(transparent)]
    Fault(#[from] Box<Fault>),
    #[error("kernel {kernel}: {what} {dims:?} has a dimension of zero")]
    ZeroDimension {
        kernel: String,
        what: &'static str,
        dims: [u32; 3],
    },
    #[error("kernel {kernel}: a workgroup of {block:?} has more than {limit} work-items")]
    BlockTooLarge {
        kernel: String,
        block: [u32; 3],
        limit: u32,
    },
    #[error("kernel {kernel}: a remainder of {remainder:?} is not below the workgroup {block:?}")]
    Remainder {
        kernel: String,
        remainder: [u32; 3],
        block: [u32; 3],
    },
    #[error(
        "kernel {kernel}: the grid {grid:?} of {block:?} has 2^32 or more work-items in a dimension"
    )]
    GridTooLarge {
        kernel: String,
        grid: [u32; 3],
        block: [u32; 3],
    },
    #[error(
        "kernel {kernel}: {fixed} static and {dynamic} dynamic bytes of LDS are more than {LDS_LIMIT}"
    )]
    LdsTooLarge {
        kernel: String,
        fixed: u32,
        dynamic: u32,
    },
    #[error("kernel {kernel}: {size} bytes of scratch for a lane are more than {SCRATCH_LIMIT}")]
    ScratchTooLarge { kernel: String, size: u32 },
    #[error("kernel {kernel}: {got} bytes of arguments were given, it takes {expected}")]
    KernargSize {
        kernel: String,
        got: usize,
        expected: u32,
    },
    #[error(
        "kernel {kernel}: {waves} waves of {vgprs} vector registers do not fit on a compute unit"
    )]
    TooManyRegisters {
        kernel: String,
        waves: u32,
        vgprs: u32,
    },
    #[error("kernel {kernel}: no memory for {size} bytes of arguments or scratch")]
    OutOfMemory { kernel: String, size: usize },
}

/// A kernel, its grid, arguments and memory: everything that one launch needs.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// The loaded code object.
    pub code: &'a CodeObject,
    /// A kernel of `code`.
    pub kernel: &'a Kernel,
    /// Number of whole workgroups in x, y, z.
    pub grid: [u32; 3],
    /// Work-items of an additional, partial workgroup at the end of each dimension; 0: none. HIP launches have none.
    /// HSA grids have one if the grid is no multiple of the workgroup.
    pub remainder: [u32; 3],
    /// Work-items per workgroup in x, y, z.
    pub block: [u32; 3],
    /// Dynamic LDS in bytes, in addition to the kernel's static LDS.
    pub dynamic_lds: u32,
    /// The explicit arguments in the layout of the metadata. Padding at the end may be missing, or be up to 15 bytes
    /// longer.
    pub kernarg: &'a [u8],
    /// The allocations that the kernel may touch. The code object's own segments need not be listed.
    pub memory: &'a Memory,
}

impl Launch<'_> {
    /// Runs the launch to its end.
    ///
    /// # Safety
    /// Every extent of `memory` must be host memory that is valid for reads and writes until this returns. No Rust
    /// reference to it may be used until then.
    pub unsafe fn run(&self, options: &Options) -> Result<Stats, LaunchError> {
        let kernel = || self.kernel.name().to_string();
        self.check()?;
        let stride = self.scratch_stride(options)?;
        let counts = self.workgroups();
        let total = counts.iter().map(|n| u64::from(*n)).product::<u64>();
        let checks = options.checks;
        let threads = if self.kernel.ordered || checks.races && self.kernel.communicates {
            1
        } else {
            let cores = || std::thread::available_parallelism().map_or(1, usize::from);
            let most = options.threads.unwrap_or_else(cores).max(1);
            usize::try_from(total).map_or(most, |total| most.min(total))
        };
        let lds = self.kernel.descriptor.group_segment_fixed_size + self.dynamic_lds;

        let out_of_memory = |size| LaunchError::OutOfMemory {
            kernel: kernel(),
            size,
        };
        let setup = Setup::new(self, stride).map_err(out_of_memory)?;
        let waves = self.waves_per_workgroup();
        let mut extents = setup.extents();
        extents.push(self.code.extent());
        let mut scratch = Vec::new();
        if stride > 0 {
            let size = waves as usize * 64 * stride as usize;
            for _ in 0..threads {
                let image = Image::new(size).map_err(|_| out_of_memory(size))?;
                extents.push(image.extent());
                scratch.push(image);
            }
        }
        let memory = self.memory.with(&extents);
        let program = self.code.program();
        let counting = options.count.then(|| Counting::new(program, &memory));
        let recording = match options.record {
            Record::None => None,
            Record::Some(n) => Some(Recording::all(total, options.xccs, n)),
            Record::Only(n) => Some(Recording::only(total, options.xccs, n)),
        };
        let only = recording.as_ref().and_then(Recording::wanted);
        let level = options.level.min(Level::detect());
        let shared = Shared {
            launch: self,
            options,
            setup: &setup,
            memory: &memory,
            insts: &program.insts,
            exec: self.code.prepared(level),
            lds: lds as usize,
            stride,
            executed: AtomicU64::new(0),
            stop: AtomicU64::new(u64::MAX),
            total,
            started: AtomicU64::new(0),
            stuck: Stuck::default(),
            // A sample of the workgroups cannot show races between all of them.
            ledger: (checks.races && only.is_none()).then(Ledger::default),
        };
        let queue = Queue {
            next: AtomicU64::new(0),
            total: only.map_or(total, |only| only.len() as u64),
            only,
            waves: AtomicU64::new(0),
            fault: Mutex::new(None),
        };
        let observers = Observers {
            counting: counting.as_ref(),
            recording: recording.as_ref(),
        };
        std::thread::scope(|scope| {
            for i in 1..threads {
                let (shared, queue) = (&shared, &queue);
                let scratch = scratch.get(i);
                // SAFETY: the caller vouches for the memory, and the level is one of this host.
                scope.spawn(move || unsafe { work(shared, queue, counts, scratch, observers) });
            }
            // SAFETY: as above.
            unsafe { work(&shared, &queue, counts, scratch.first(), observers) };
        });

        let fault = queue.fault.into_inner().unwrap_or_else(|e| e.into_inner());
        if let Some((_, fault)) = fault {
            return Err(LaunchError::Fault(fault));
        }
        Ok(Stats {
            wave_instructions: shared.executed.into_inner(),
            workgroups: queue.total,
            waves: queue.waves.into_inner(),
            counts: counting.map(|counting| {
                let occupancy = Occupancy::of(self.kernel, waves, lds);
                Box::new(counting.finish(occupancy))
            }),
            recorded: recording.map_or_else(Recorded::default, Recording::finish),
            notes: shared
                .ledger
                .map_or_else(Vec::new, |ledger| ledger.notes().tell(program)),
        })
    }

    /// Number of workgroups in each dimension, partial ones included.
    fn workgroups(&self) -> [u32; 3] {
        std::array::from_fn(|d| self.grid[d] + u32::from(self.remainder[d] > 0))
    }

    fn waves_per_workgroup(&self) -> u32 {
        self.block.iter().product::<u32>().div_ceil(64)
    }

    fn scratch_stride(&self, options: &Options) -> Result<u32, LaunchError> {
        let k = self.kernel;
        let mut size = k.descriptor.private_segment_fixed_size;
        if k.metadata.uses_dynamic_stack || k.descriptor.has(property::DYNAMIC_STACK) {
            size = size.saturating_add(options.dynamic_stack);
        }
        if size > SCRATCH_LIMIT {
            return Err(LaunchError::ScratchTooLarge {
                kernel: k.name().to_string(),
                size,
            });
        }
        Ok(size.next_multiple_of(16))
    }

    /// Refuses a launch that the hardware or the runtime would refuse.
    pub fn check(&self) -> Result<(), LaunchError> {
        let kernel = self.kernel.name().to_string();
        let (grid, block, remainder) = (self.grid, self.block, self.remainder);
        if block.contains(&0) {
            let (what, dims) = ("workgroup", block);
            return Err(LaunchError::ZeroDimension { kernel, what, dims });
        }
        if (0..3).any(|d| remainder[d] >= block[d]) {
            return Err(LaunchError::Remainder {
                kernel,
                remainder,
                block,
            });
        }
        if (0..3).any(|d| grid[d] == 0 && remainder[d] == 0) {
            let (what, dims) = ("grid", grid);
            return Err(LaunchError::ZeroDimension { kernel, what, dims });
        }
        let limit = match self.kernel.metadata.max_flat_workgroup_size {
            0 => BLOCK_LIMIT,
            size => size.min(BLOCK_LIMIT),
        };
        let items = block.iter().map(|n| u128::from(*n)).product::<u128>();
        if items > u128::from(limit) {
            return Err(LaunchError::BlockTooLarge {
                kernel,
                block,
                limit,
            });
        }
        let too_long = |d: usize| {
            let items = u64::from(grid[d]) * u64::from(block[d]) + u64::from(remainder[d]);
            items > u64::from(u32::MAX)
        };
        if (0..3).any(too_long) {
            return Err(LaunchError::GridTooLarge {
                kernel,
                grid,
                block,
            });
        }
        let fixed = self.kernel.descriptor.group_segment_fixed_size;
        let dynamic = self.dynamic_lds;
        if fixed.checked_add(dynamic).is_none_or(|n| n > LDS_LIMIT) {
            return Err(LaunchError::LdsTooLarge {
                kernel,
                fixed,
                dynamic,
            });
        }
        let (waves, vgprs) = (self.waves_per_workgroup(), self.kernel.descriptor.vgprs());
        if waves.div_ceil(SIMDS) * vgprs > SIMD_REGISTERS {
            return Err(LaunchError::TooManyRegisters {
                kernel,
                waves,
                vgprs,
            });
        }
        let expected = self.kernel.explicit_size();
        let got = self.kernarg.len();
        if got < expected as usize || got > expected as usize + 15 {
            return Err(LaunchError::KernargSize {
                kernel,
                got,
                expected,
            });
        }
        Ok(())
    }
}

/// Workgroups that have not run, handed out in order.
struct Queue<'a> {
    next: AtomicU64,
    total: u64,
    /// Numbers of these workgroups; `None`: all from 0 on.
    only: Option<&'a [u64]>,
    waves: AtomicU64,
    /// Fault of the first faulting workgroup in order. All earlier workgroups run to their end before it is reported,
    /// so it is the same in every run.
    fault: Mutex<Option<(u64, Box<Fault>)>>,
}

/// Observers of a launch's workgroups.
#[derive(Clone, Copy)]
struct Observers<'a> {
    counting: Option<&'a Counting>,
    recording: Option<&'a Recording>,
}

/// Register files of threads that have finished a launch, for reuse by the next launch.
static MACHINES: Mutex<Vec<Machine>> = Mutex::new(Vec::new());

fn machines() -> std::sync::MutexGuard<'static, Vec<Machine>> {
    MACHINES.lock().unwrap_or_else(|e| e.into_inner())
}

/// Runs workgroups until none is left.
///
/// # Safety
/// As [`Launch::run`]; `shared.exec` must be for a level of this host.
unsafe fn work(
    shared: &Shared,
    queue: &Queue,
    counts: [u32; 3],
    scratch: Option<&Image>,
    observers: Observers,
) {
    let mut machine = machines().pop().unwrap_or_default();
    let mut counter = observers.counting.map(Counting::counter);
    let waves = shared.launch.waves_per_workgroup() as usize;
    shared.stuck.thread(true);
    loop {
        let next = queue.next.fetch_add(1, Ordering::Relaxed);
        if next >= queue.total {
            break;
        }
        let linear = queue.only.map_or(next, |only| only[next as usize]);
        if linear > shared.stop.load(Ordering::Relaxed) {
            break;
        }
        let mut recorder = observers.recording.and_then(|r| r.recorder(linear, waves));
        let id = place(linear, counts);
        shared.started.fetch_max(linear + 1, Ordering::Relaxed);
        // SAFETY: passed on.
        let result = unsafe {
            machine.run(
                shared,
                linear,
                id,
                scratch,
                counter.as_mut(),
                recorder.as_mut(),
            )
        };
        if let (Some(recording), Some(recorder)) = (observers.recording, recorder) {
            recording.add(recorder);
        }
        // The workgroup has ended, so it is no longer stuck.
        shared.stuck.looked(linear, 0, false);
        match result {
            Ok(waves) => {
                queue.waves.fetch_add(waves, Ordering::Relaxed);
            }
            Err(None) => break,
            Err(Some(stopped)) => {
                let linear = stopped.workgroup;
                shared.stop.fetch_min(linear, Ordering::Relaxed);
                let fault = Box::new(describe(shared, place(linear, counts), stopped));
                let mut first = queue.fault.lock().unwrap_or_else(|e| e.into_inner());
                if first.as_ref().is_none_or(|(at, _)| linear < *at) {
                    *first = Some((linear, fault));
                }
            }
        }
    }
    shared.stuck.thread(false);
    machines().push(machine);
}

/// Coordinates of workgroup number `linear` in a grid of `counts`.
pub(crate) fn place(linear: u64, counts: [u32; 3]) -> [u32; 3] {
    let [nx, ny, _] = counts.map(u64::from);
    [linear % nx, linear / nx % ny, linear / nx / ny].map(|i| i as u32)
}

/// Place and reason of a fault.
struct Stopped {
    kind: FaultKind,
    /// Workgroup at fault. Not always the one that ran: a race between two workgroups may be found when a third one
    /// ends.
    workgroup: u64,
    wave: u32,
    /// Index of the instruction in the program.
    at: u32,
}

fn describe(shared: &Shared, workgroup: [u32; 3], stopped: Stopped) -> Fault {
    let program = shared.launch.code.program();
    let at = stopped.at as usize;
    let (pc, instruction) = match (program.insts.get(at), program.offsets.get(at)) {
        (Some(inst), Some(&offset)) => {
            let pc = u64::from(offset);
            (pc, crate::disasm::text(inst, pc))
        }
        _ => {
            let end = program.index_of_dword.len() as u64 * 4;
            (end, "no instruction".to_string())
        }
    };
    Fault {
        kind: stopped.kind,
        kernel: shared.launch.kernel.name().to_string(),
        workgroup,
        wave: stopped.wave,
        pc,
        instruction,
    }
}

#[cfg(test)]
mod order_tests {
    use super::WaveOrder;

    #[test]
    fn one_spelling_everywhere() {
        for text in ["run-ahead", "in-step", "seeded:7"] {
            assert_eq!(text.parse::<WaveOrder>().unwrap().to_string(), text);
        }
        assert_eq!("seed:7".parse(), Ok(WaveOrder::Seeded(7)));
        for wrong in ["", "seeded", "seeded:x", "random"] {
            let error = wrong.parse::<WaveOrder>().unwrap_err();
            assert!(error.contains("seeded:SEED"), "{error}");
        }
    }
}
