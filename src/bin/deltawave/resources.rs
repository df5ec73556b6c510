//! What kernels take of a compute unit, as their code objects state it.

use deltawave::code_objects::{self, CodeObject};
use deltawave_sim::code_object::{KernelMetadata, LoadError};
use serde::Serialize;

/// One kernel of one architecture.
#[derive(Clone, Debug, Serialize)]
pub struct Resources {
    /// Its name.
    pub name: String,
    /// Vector registers, both kinds.
    pub vgprs: u32,
    /// Accumulation registers among them.
    pub agprs: u32,
    /// Scalar registers.
    pub sgprs: u32,
    /// Bytes of LDS.
    pub lds_bytes: u32,
    /// Registers that were spilled to memory, of either kind.
    pub spills: u32,
    /// Bytes of private memory per lane.
    pub private_bytes: u32,
    /// Bytes of arguments.
    pub kernarg_bytes: u32,
}

impl From<KernelMetadata> for Resources {
    fn from(m: KernelMetadata) -> Self {
        Resources {
            name: m.name,
            vgprs: m.vgpr_count,
            agprs: m.agpr_count,
            sgprs: m.sgpr_count,
            lds_bytes: m.group_segment_fixed_size,
            spills: m.vgpr_spill_count + m.sgpr_spill_count,
            private_bytes: m.private_segment_fixed_size,
            kernarg_bytes: m.kernarg_segment_size,
        }
    }
}

impl Resources {
    /// Of a kernel whose code object says nothing.
    pub fn unknown(name: &str) -> Self {
        KernelMetadata {
            name: name.to_owned(),
            ..Default::default()
        }
        .into()
    }
}

/// The kernels of a code object.
pub fn of(object: &CodeObject) -> Result<Vec<Resources>, LoadError> {
    let kernels = deltawave_sim::code_object::CodeObject::metadata(object.bytes)?;
    Ok(kernels.into_iter().map(Resources::from).collect())
}

/// A kernel by its name.
pub fn of_kernel(arch: &str, name: &str) -> Option<Resources> {
    code_objects::for_arch(arch)
        .filter_map(|object| of(object).ok())
        .flatten()
        .find(|kernel| kernel.name == name)
}
