//! A simulator of AMD's gfx942 (MI300) that executes real code objects.
//!
//! | concept | type | file |
//! |---|---|---|
//! | instruction, decoded | [`inst::Inst`], [`op::Op`] | `inst.rs`, `op.rs` |
//! | machine code to instructions | [`decode`] | `decode.rs` |
//! | instructions to text | [`disasm`] | `disasm.rs` |
//! | code object (ELF, descriptor, metadata) | [`code_object`] | `code_object.rs` |
//! | one wave's registers | [`wave::Wave`] | `wave.rs` |
//! | what an instruction does | [`exec`] | `exec/` |
//! | device memory, bounds checked | [`memory::Memory`] | `memory.rs` |
//! | a launch: grid, workgroups, waves | [`launch`] | `launch.rs` |
//! | the HIP runtime in front of all this | [`hip`] | `hip/` |
//! | what a launch costs: exact counters | [`count::Counts`], [`count::Totals`] | `count/` |
//! | what an instruction costs | [`cost::Cost`] | `cost.rs` |
//! | the GPUs that counters are set against | [`gpu::Gpu`] | `gpu.rs` |
//! | how many waves a compute unit holds | [`occupancy::Occupancy`] | `occupancy.rs` |
//! | how long a launch would take, modelled | [`timing::Model`] | `timing/` |
//! | checks of what hardware hides | [`sanitize::Checks`] | `sanitize/` |
//! | what can go wrong in a kernel | [`fault::Fault`] | `fault.rs` |

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
