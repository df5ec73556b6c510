//! Devices, streams, events and graphs: everything that a launch needs, and no launch itself.
//!
//! `context.rs` loads the kernels on a device, `stream.rs` orders work, `graph.rs` replays it, `launch.rs` starts a kernel.

mod context;
mod graph;
mod launch;
mod stream;

pub use context::Context;
pub(crate) use context::same_context;
pub use graph::Graph;
pub use stream::{Event, Stream};

/// Which runtime executes the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// A GPU where one is found that this crate has kernels for, else the simulator. `DELTAWAVE_BACKEND` (`hip`,
    /// `simulator`) decides it from outside.
    #[default]
    Auto,
    /// A GPU: an AMD one through the HIP runtime, or an NVIDIA one through the CUDA driver under HIP's names
    /// ([`Hip::load`] says which; [`Context::runtime`] says it for people).
    Hip,
    /// The gfx942 simulator, if the crate is built with its feature `simulator`, which is on by default.
    Simulator,
}

impl Backend {
    /// `hip` or `simulator`, where it is decided.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Hip => "hip",
            Backend::Simulator => "simulator",
        }
    }
}

/// What a device is.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its architecture without features: `gfx942`, `sm_90a`.
    pub arch: String,
    /// Compute units.
    pub compute_units: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

/// What a compiled kernel takes of a compute unit.
#[derive(Clone, Debug)]
pub struct KernelInfo {
    /// Its name.
    pub name: &'static str,
    /// Vector registers, both kinds.
    pub registers: u32,
    /// Bytes of LDS.
    pub lds_bytes: u32,
    /// Bytes of private memory per lane.
    pub private_bytes: u32,
}
