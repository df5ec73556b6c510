//! Devices, streams, events and graphs: everything that a launch needs, and no launch itself.
//!
//! `context.rs` loads the kernels on a device, `stream.rs` orders work, `graph.rs` replays it, `launch.rs` starts a
//! kernel.

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
    /// A GPU if one is found for which this crate has kernels, otherwise the simulator. The environment variable
    /// `DELTAWAVE_BACKEND` (`hip`, `simulator`) overrides it.
    #[default]
    Auto,
    /// A GPU: an AMD one through the HIP runtime, or an NVIDIA one through the CUDA driver under HIP's names
    /// ([`Hip::load`](hip_sys::Hip::load) decides which). [`Context::runtime`] describes it in words.
    Hip,
    /// The gfx942 simulator, if the crate is built with its feature `simulator`, which is on by default.
    Simulator,
}

impl Backend {
    /// Name of the backend: `auto`, `hip` or `simulator`.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Hip => "hip",
            Backend::Simulator => "simulator",
        }
    }
}

/// Properties of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name.
    pub name: String,
    /// Architecture without features: `gfx942`, `sm_90a`.
    pub arch: String,
    /// Compute units.
    pub compute_units: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

/// Resources of a compute unit that a compiled kernel uses.
#[derive(Clone, Debug)]
pub struct KernelInfo {
    /// Name.
    pub name: &'static str,
    /// Vector registers per lane, accumulation registers included.
    pub registers: u32,
    /// Bytes of LDS per workgroup.
    pub lds_bytes: u32,
    /// Bytes of private memory per lane.
    pub private_bytes: u32,
}
