//! Registers, LDS and private memory of kernels, from their code objects; those of PTX from the driver that compiles it.

use deltawave::code_objects::{self, CodeObject, is_nvidia};
use deltawave::kernels::TABLE;
use deltawave::runtime::{Context, KernelInfo};
use deltawave_sim::code_object::{KernelMetadata, LoadError};
use serde::Serialize;

/// One kernel of one architecture; figures that are unknown or do not exist there are absent.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Resources {
    /// Its name.
    pub name: String,
    /// Vector registers, both kinds; on an NVIDIA GPU all registers of a thread.
    pub vgprs: Option<u32>,
    /// Accumulation registers among them.
    pub agprs: Option<u32>,
    /// Scalar registers.
    pub sgprs: Option<u32>,
    /// Bytes of LDS, which NVIDIA calls shared memory.
    pub lds_bytes: Option<u32>,
    /// Registers that were spilled to memory, of either kind.
    pub spills: Option<u32>,
    /// Bytes of private memory per lane, which NVIDIA calls local.
    pub private_bytes: Option<u32>,
    /// Bytes of arguments.
    pub kernarg_bytes: Option<u32>,
}

impl From<KernelMetadata> for Resources {
    fn from(m: KernelMetadata) -> Self {
        Resources {
            name: m.name,
            vgprs: Some(m.vgpr_count),
            agprs: Some(m.agpr_count),
            sgprs: Some(m.sgpr_count),
            lds_bytes: Some(m.group_segment_fixed_size),
            spills: Some(m.vgpr_spill_count + m.sgpr_spill_count),
            private_bytes: Some(m.private_segment_fixed_size),
            kernarg_bytes: Some(m.kernarg_segment_size),
        }
    }
}

impl From<&KernelInfo> for Resources {
    fn from(k: &KernelInfo) -> Self {
        Resources {
            vgprs: Some(k.registers),
            lds_bytes: Some(k.lds_bytes),
            private_bytes: Some(k.private_bytes),
            ..Self::unknown(k.name)
        }
    }
}

impl Resources {
    /// A kernel whose code object says nothing.
    pub fn unknown(name: &str) -> Self {
        Resources {
            name: name.to_owned(),
            ..Default::default()
        }
    }
}

/// The kernels of a code object; of one for NVIDIA GPUs, their names.
pub fn of(object: &CodeObject) -> Result<Vec<Resources>, LoadError> {
    if is_nvidia(object.arch) {
        let rows = TABLE.iter().filter(|row| row.object == object.name);
        return Ok(rows.map(|row| Resources::unknown(row.name)).collect());
    }
    let kernels = deltawave_sim::code_object::CodeObject::metadata(object.bytes)?;
    Ok(kernels.into_iter().map(Resources::from).collect())
}

/// The kernels that a context runs.
pub fn of_context(context: &Context) -> Vec<Resources> {
    let arch = &context.device().arch;
    if is_nvidia(arch) {
        let kernels = context.kernels().unwrap_or_default();
        return kernels.iter().map(Resources::from).collect();
    }
    code_objects::for_arch(arch)
        .filter_map(|object| of(object).ok())
        .flatten()
        .collect()
}

/// A number in a table.
pub fn cell(number: Option<u32>) -> String {
    number.map_or("-".to_owned(), |n| n.to_string())
}
