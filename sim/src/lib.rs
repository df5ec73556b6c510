//! A simulator of AMD's gfx942 (MI300) that executes real code objects.
//!
//! | concept | type | file |
//! |---|---|---|
//! | instruction, decoded | [`inst::Inst`], [`op::Op`] | `inst.rs`, `op.rs` |
//! | decoder: machine code to instructions | [`decode`] | `decode.rs` |
//! | disassembler: instructions to text | [`disasm`] | `disasm.rs` |
//! | code object (ELF, descriptor, metadata) | [`code_object`] | `code_object.rs` |
//! | registers of one wave | [`wave::Wave`] | `wave.rs` |
//! | execution of instructions | [`exec`] | `exec/` |
//! | device memory with bounds checks | [`memory::Memory`] | `memory.rs` |
//! | a launch: grid, workgroups, waves | [`launch`] | `launch.rs` |
//! | HIP runtime on the simulated device | [`hip`] | `hip/` |
//! | exact counters of a launch | [`count::Counts`], [`count::Totals`] | `count/` |
//! | class and clocks of an instruction | [`cost::Cost`] | `cost.rs` |
//! | GPUs: units, clocks, bandwidths | [`gpu::Gpu`] | `gpu.rs` |
//! | occupancy: waves on a compute unit | [`occupancy::Occupancy`] | `occupancy.rs` |
//! | modelled time of a launch | [`timing::Model`] | `timing/` |
//! | sanitizers: races, barriers, waits, hazards, uninitialized values | [`sanitize::Checks`] | `sanitize/` |
//! | faults of a kernel | [`fault::Fault`] | `fault.rs` |

pub mod code_object;
pub mod cost;
pub mod count;
pub mod decode;
pub mod disasm;
pub mod exec;
pub mod fault;
pub mod gpu;
pub mod hip;
pub mod inst;
pub mod launch;
pub mod memory;
pub mod occupancy;
pub mod op;
pub mod sanitize;
pub mod timing;
pub mod wave;
