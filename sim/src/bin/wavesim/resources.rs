//! `wavesim resources`: prints each kernel's registers, LDS, scratch, spills and arguments.

use std::fmt::Write as _;
use std::path::PathBuf;

use deltawave_sim::code_object::{CodeObject, Kernel};
use serde_json::{Value, json};

use crate::failure::Failure;

/// Command line of `resources`.
#[derive(clap::Args)]
pub struct Args {
    /// Code object, or an offload bundle that has one for gfx942
    file: PathBuf,
    /// Print this kernel only
    #[arg(long)]
    kernel: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Returns the report.
pub fn text(args: &Args) -> Result<String, Failure> {
    let code = crate::load(&args.file)?;
    let kernels: Vec<&Kernel> = match &args.kernel {
        Some(name) => vec![crate::find(&code, name)?],
        None => code.kernels().iter().collect(),
    };
    if args.json {
        let kernels: Vec<Value> = kernels.into_iter().map(object).collect();
        let variables: Vec<Value> = variables(&code);
        return Ok(crate::json(
            &json!({ "arch": "gfx942", "kernels": kernels, "variables": variables }),
        ));
    }
    Ok(table(&kernels))
}

/// Waves per SIMD that the registers allow.
fn waves_per_simd(k: &Kernel) -> u32 {
    (512 / k.descriptor.vgprs()).clamp(1, 8)
}

fn object(k: &Kernel) -> Value {
    let m = &k.metadata;
    let args: Vec<Value> = m
        .args
        .iter()
        .map(|a| {
            json!({
                "name": a.name, "offset": a.offset, "size": a.size, "value_kind": a.value_kind,
                "hidden": a.is_hidden(),
            })
        })
        .collect();
    json!({
        "name": m.name,
        "symbol": m.symbol,
        "vgprs": m.vgpr_count,
        "agprs": m.agpr_count,
        "vgprs_allocated": k.descriptor.vgprs(),
        "accum_offset": k.descriptor.accum_offset(),
        "sgprs": m.sgpr_count,
        "lds_bytes": m.group_segment_fixed_size,
        "scratch_bytes": m.private_segment_fixed_size,
        "dynamic_stack": m.uses_dynamic_stack,
        "vgpr_spills": m.vgpr_spill_count,
        "sgpr_spills": m.sgpr_spill_count,
        "waves_per_simd": waves_per_simd(k),
        "max_workgroup_size": m.max_flat_workgroup_size,
        "kernarg_bytes": m.kernarg_segment_size,
        "explicit_kernarg_bytes": k.explicit_size(),
        "preloaded_dwords": k.descriptor.preload().1,
        "args": args,
    })
}

fn variables(code: &CodeObject) -> Vec<Value> {
    let globals = code.globals().iter();
    globals
        .map(|(name, g)| json!({ "name": name, "size": g.size }))
        .collect()
}

/// The kernels as rows of a table, then the arguments of each.
fn table(kernels: &[&Kernel]) -> String {
    let head = [
        "kernel",
        "VGPR",
        "AGPR",
        "SGPR",
        "LDS",
        "scratch",
        "spills",
        "waves/SIMD",
        "kernarg",
        "args",
    ];
    let mut rows = vec![head.map(String::from)];
    for k in kernels {
        let m = &k.metadata;
        let explicit = m.args.iter().filter(|a| !a.is_hidden()).count();
        // The metadata's count covers both halves of the register file.
        let architectural = m.vgpr_count.saturating_sub(m.agpr_count);
        rows.push([
            m.name.clone(),
            architectural.to_string(),
            m.agpr_count.to_string(),
            m.sgpr_count.to_string(),
            m.group_segment_fixed_size.to_string(),
            m.private_segment_fixed_size.to_string(),
            format!("{}v {}s", m.vgpr_spill_count, m.sgpr_spill_count),
            waves_per_simd(k).to_string(),
            format!("{}/{}", k.explicit_size(), m.kernarg_segment_size),
            explicit.to_string(),
        ]);
    }
    let widths: [usize; 10] =
        std::array::from_fn(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0));
    let mut out = String::new();
    for row in &rows {
        let _ = write!(out, "{:<1$}", row[0], widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1) {
            let _ = write!(out, "  {cell:>width$}");
        }
        out.push('\n');
    }
    out.push_str("\nLDS, scratch (of a lane) and kernarg (explicit/all) in bytes; spills of VGPRs and SGPRs.\n");
    for k in kernels {
        let explicit = k.metadata.args.iter().filter(|a| !a.is_hidden());
        let _ = write!(out, "\n{}:{}", k.name(), crate::run::signature(explicit));
        out.push('\n');
    }
    out
}
