//! Parses the `NT_AMDGPU_METADATA` note: the compiler's description of each kernel, in MessagePack.

use rmpv::Value;

use super::LoadError;

/// One kernel argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arg {
    /// Name in the source, if the compiler kept it.
    pub name: Option<String>,
    /// Byte offset in the kernel arguments.
    pub offset: u32,
    /// Size in bytes.
    pub size: u32,
    /// Kind of the argument: `by_value`, `global_buffer`, `hidden_block_count_x` and so on.
    pub value_kind: String,
}

impl Arg {
    /// Whether the runtime supplies the value, not the caller.
    pub fn is_hidden(&self) -> bool {
        self.value_kind.starts_with("hidden_")
    }
}

/// Metadata of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct KernelMetadata {
    /// Name in the source.
    pub name: String,
    /// Symbol of the descriptor.
    pub symbol: String,
    /// Arguments, explicit ones first.
    pub args: Vec<Arg>,
    pub kernarg_segment_size: u32,
    pub kernarg_segment_align: u32,
    pub group_segment_fixed_size: u32,
    pub private_segment_fixed_size: u32,
    pub wavefront_size: u32,
    /// Vector registers, architectural and accumulation.
    pub vgpr_count: u32,
    /// Accumulation registers among `vgpr_count`.
    pub agpr_count: u32,
    pub sgpr_count: u32,
    pub vgpr_spill_count: u32,
    pub sgpr_spill_count: u32,
    pub max_flat_workgroup_size: u32,
    pub uses_dynamic_stack: bool,
}

/// Maximum nesting depth: deeper than any real note, small enough for any stack.
const MAX_DEPTH: usize = 32;

/// Parses the kernels of a note.
pub(super) fn parse(note: &[u8]) -> Result<Vec<KernelMetadata>, LoadError> {
    let root = rmpv::decode::read_value_with_max_depth(&mut &note[..], MAX_DEPTH)
        .map_err(|_| LoadError::Malformed("metadata note: not MessagePack"))?;
    let Some(kernels) = get(&root, "amdhsa.kernels") else {
        return Ok(Vec::new());
    };
    let kernels = kernels
        .as_array()
        .ok_or(LoadError::Malformed("metadata note: amdhsa.kernels"))?;
    kernels.iter().map(kernel).collect()
}

fn kernel(map: &Value) -> Result<KernelMetadata, LoadError> {
    let mut args = Vec::new();
    if let Some(list) = get(map, ".args") {
        let list = list
            .as_array()
            .ok_or(LoadError::Malformed("metadata note: .args"))?;
        for a in list {
            args.push(Arg {
                name: get(a, ".name").and_then(Value::as_str).map(String::from),
                offset: number(a, ".offset")?,
                size: number(a, ".size")?,
                value_kind: text(a, ".value_kind")?,
            });
        }
    }
    let or = |key, default| match get(map, key) {
        None => Ok(default),
        Some(_) => number(map, key),
    };
    Ok(KernelMetadata {
        name: text(map, ".name")?,
        symbol: text(map, ".symbol")?,
        args,
        kernarg_segment_size: number(map, ".kernarg_segment_size")?,
        kernarg_segment_align: or(".kernarg_segment_align", 8)?,
        group_segment_fixed_size: number(map, ".group_segment_fixed_size")?,
        private_segment_fixed_size: number(map, ".private_segment_fixed_size")?,
        wavefront_size: or(".wavefront_size", 64)?,
        vgpr_count: or(".vgpr_count", 0)?,
        agpr_count: or(".agpr_count", 0)?,
        sgpr_count: or(".sgpr_count", 0)?,
        vgpr_spill_count: or(".vgpr_spill_count", 0)?,
        sgpr_spill_count: or(".sgpr_spill_count", 0)?,
        max_flat_workgroup_size: or(".max_flat_workgroup_size", 1024)?,
        uses_dynamic_stack: get(map, ".uses_dynamic_stack").and_then(Value::as_bool) == Some(true),
    })
}

fn get<'a>(map: &'a Value, key: &str) -> Option<&'a Value> {
    let entry = map
        .as_map()?
        .iter()
        .find(|(k, _)| k.as_str() == Some(key))?;
    Some(&entry.1)
}

fn number(map: &Value, key: &'static str) -> Result<u32, LoadError> {
    get(map, key)
        .and_then(Value::as_u64)
        .and_then(|n| u32::try_from(n).ok())
        .ok_or(LoadError::Metadata { key })
}

fn text(map: &Value, key: &'static str) -> Result<String, LoadError> {
    get(map, key)
        .and_then(Value::as_str)
        .map(String::from)
        .ok_or(LoadError::Metadata { key })
}
