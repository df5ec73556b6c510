//! `deltawave info`.

use std::fmt::Write as _;
use std::path::Path;

use deltawave::Error;
use deltawave::code_objects::{CODE_OBJECTS, MISSING, VERIFIED_ARCHS, verification};
use deltawave::runtime::{Backend, Context};
use hip_sys::LoadError;
use serde::Serialize;

use crate::args::InfoArgs;
use crate::failure::{Failure, causes};
use crate::report::{Report, mfma_mode, pretty};
use crate::resources::{self, Resources, cell};
use crate::table::{Table, bytes};

/// Looks around, and saves the kernels if that is asked for.
pub fn run(args: &InfoArgs) -> Result<Report, Failure> {
    if let Some(folder) = &args.save_kernels {
        deltawave::code_objects::save(folder).map_err(Failure::io("--save-kernels", folder))?;
    }
    let context = Context::new(Backend::Auto, args.device);
    let objections = match &context {
        Err(error @ (Error::NoSuchDevice { .. } | Error::Argument(_))) => causes(error),
        _ => Vec::new(),
    };
    let info = Info::new(args.device, context);
    Ok(Report {
        json: pretty(&info),
        text: info.text(),
        objections,
    })
}

/// What this program can run, and on what.
#[derive(Serialize)]
struct Info {
    version: &'static str,
    backend: Option<&'static str>,
    library: Option<String>,
    runtime: Option<String>,
    device: Option<String>,
    arch: Option<String>,
    compute_units: Option<u32>,
    memory_bytes: Option<u64>,
    mfma_mode: Option<&'static str>,
    hip: HipInfo,
    /// Why nothing can be run, where that is so.
    unusable: Option<Vec<String>>,
    code_objects: Vec<CodeObjectInfo>,
    missing: Vec<Missing>,
}

/// The HIP runtime.
#[derive(Serialize)]
struct HipInfo {
    library: Option<String>,
    /// Why it is not used, step by step.
    error: Option<Vec<String>>,
    tried: Vec<Tried>,
}

#[derive(Serialize)]
struct Tried {
    library: String,
    error: String,
}

#[derive(Serialize)]
struct CodeObjectInfo {
    name: &'static str,
    arch: &'static str,
    verified: bool,
    compiler: &'static str,
    bytes: usize,
    error: Option<String>,
    kernels: Vec<Resources>,
}

#[derive(Serialize)]
struct Missing {
    arch: &'static str,
    reason: &'static str,
}

impl Info {
    /// Describes a device; one that is missing is part of the answer.
    fn new(device: usize, chosen: Result<Context, Error>) -> Self {
        let hip = match &chosen {
            Ok(context) if context.backend() == Backend::Hip => HipInfo {
                library: Some(context.hip().library().to_owned()),
                error: None,
                tried: Vec::new(),
            },
            Ok(_) => HipInfo::probe(device),
            Err(error) => HipInfo::failed(error),
        };
        let context = chosen.as_ref().ok();
        let device = context.map(Context::device);
        let running = context.map(resources::of_context).unwrap_or_default();
        Info {
            version: env!("CARGO_PKG_VERSION"),
            backend: context.map(|c| c.backend().name()),
            library: context.map(|c| c.hip().library().to_owned()),
            runtime: context.map(Context::runtime),
            device: device.map(|d| d.name.clone()),
            arch: device.map(|d| d.arch.clone()),
            compute_units: device.map(|d| d.compute_units),
            memory_bytes: device.map(|d| d.memory_bytes),
            mfma_mode: context
                .filter(|c| c.backend() == Backend::Simulator)
                .map(|_| mfma_mode()),
            hip,
            unusable: chosen.as_ref().err().map(|e| causes(e)),
            code_objects: CODE_OBJECTS
                .iter()
                .map(|object| {
                    let here = device.is_some_and(|d| d.arch == object.arch);
                    let best = |kernel: Resources| {
                        let known = running.iter().find(|k| here && k.name == kernel.name);
                        known.cloned().unwrap_or(kernel)
                    };
                    let (kernels, error) = match resources::of(object) {
                        Ok(kernels) => (kernels.into_iter().map(best).collect(), None),
                        Err(error) => (Vec::new(), Some(error.to_string())),
                    };
                    CodeObjectInfo {
                        name: object.name,
                        arch: object.arch,
                        verified: VERIFIED_ARCHS.contains(&object.arch),
                        compiler: object.compiler,
                        bytes: object.bytes.len(),
                        error,
                        kernels,
                    }
                })
                .collect(),
            missing: (MISSING.iter())
                .map(|&(arch, reason)| Missing { arch, reason })
                .collect(),
        }
    }

    /// The tables.
    fn text(&self) -> String {
        let mut out = format!("deltawave {}\n\n", self.version);
        let mut table = Table::new(2, &[]);
        let mut line = |name: &str, text: String| table.row([name.to_owned(), text]);
        match (self.backend, &self.runtime) {
            (Some("simulator"), _) => line(
                "runs on",
                "the simulator: executes the code objects on this host's CPU".to_owned(),
            ),
            (Some(_), Some(runtime)) => line("runs on", format!("the {runtime}")),
            _ => line("runs on", "nothing".to_owned()),
        }
        for cause in self.unusable.iter().flatten() {
            line("", cause.clone());
        }
        if let (Some(device), Some(arch)) = (&self.device, &self.arch) {
            line("device", device.clone());
            line("arch", arch.clone());
        }
        if let (Some(units), Some(memory)) = (self.compute_units, self.memory_bytes) {
            line("compute units", units.to_string());
            line("memory", bytes(memory));
        }
        if let Some(mode) = self.mfma_mode {
            let what = match mode {
                "fast" => "chains of f32 fused multiply-adds",
                _ => "the published model of the hardware's rounding",
            };
            line("MFMA mode", format!("{mode}: {what}"));
        }
        if self.backend != Some("hip") {
            let mut name = "HIP runtime";
            // The causes of a search that found nothing are the list that follows.
            let shown = if self.hip.tried.is_empty() {
                usize::MAX
            } else {
                1
            };
            for cause in self.hip.error.iter().flatten().take(shown) {
                line(std::mem::take(&mut name), cause.clone());
            }
            for tried in &self.hip.tried {
                line("", format!("tried {}: {}", tried.library, tried.error));
            }
        }
        let _ = writeln!(out, "{table}");
        out += &self.kernel_table().to_string();
        out += "\n  VGPRs counts accumulation registers (AGPRs) too; LDS, private (per lane) and kernarg are bytes.\n";
        if self
            .code_objects
            .iter()
            .any(|o| deltawave::code_objects::is_ptx(o.arch))
        {
            out += "  Of NVIDIA GPUs: all registers, static shared and local memory, where the driver of one says them.\n";
        }
        for (arch, objects) in self.by_arch() {
            let size: usize = objects.iter().map(|o| o.bytes).sum();
            let kernels: usize = objects.iter().map(|o| o.kernels.len()).sum();
            let compiler = Path::new(objects[0].compiler);
            let _ = writeln!(
                out,
                "  {arch}: {kernels} kernels in {} code objects, {}, compiled by {}; {}.",
                objects.len(),
                bytes(size as u64),
                compiler.display(),
                verification(arch)
            );
        }
        for object in &self.code_objects {
            if let Some(error) = &object.error {
                let _ = writeln!(out, "  {} ({}): {error}", object.name, object.arch);
            }
        }
        for m in &self.missing {
            let _ = writeln!(out, "  {}: no kernels: {}", m.arch, m.reason);
        }
        out
    }

    fn kernel_table(&self) -> Table {
        let titles = [
            "kernel", "arch", "VGPRs", "AGPRs", "SGPRs", "LDS", "spills", "private", "kernarg",
        ];
        let mut table = Table::new(2, &titles);
        for object in &self.code_objects {
            let arch = match object.verified {
                true => object.arch.to_owned(),
                false => format!("{} (unverified)", object.arch),
            };
            for k in &object.kernels {
                let numbers = [
                    k.vgprs,
                    k.agprs,
                    k.sgprs,
                    k.lds_bytes,
                    k.spills,
                    k.private_bytes,
                    k.kernarg_bytes,
                ];
                let names = [k.name.clone(), arch.clone()];
                table.row(names.into_iter().chain(numbers.map(cell)));
            }
        }
        table
    }

    fn by_arch(&self) -> Vec<(&'static str, Vec<&CodeObjectInfo>)> {
        let mut out: Vec<(&'static str, Vec<&CodeObjectInfo>)> = Vec::new();
        for object in &self.code_objects {
            match out.iter_mut().find(|(arch, _)| *arch == object.arch) {
                Some((_, objects)) => objects.push(object),
                None => out.push((object.arch, vec![object])),
            }
        }
        out
    }
}

impl HipInfo {
    /// Why the simulator was taken.
    fn probe(device: usize) -> Self {
        match Context::new(Backend::Hip, device) {
            Ok(context) => HipInfo {
                library: Some(context.hip().library().to_owned()),
                error: Some(vec![format!(
                    "{} could be used, and DELTAWAVE_BACKEND asks for the simulator",
                    context.hip().library()
                )]),
                tried: Vec::new(),
            },
            Err(error) => Self::failed(&error),
        }
    }

    fn failed(error: &Error) -> Self {
        let tried = match error {
            Error::Load(LoadError::NotFound { tried }) => tried
                .iter()
                .map(|attempt| Tried {
                    library: attempt.library.clone(),
                    error: (attempt.error.source())
                        .map_or_else(|| attempt.error.to_string(), ToString::to_string),
                })
                .collect(),
            _ => Vec::new(),
        };
        HipInfo {
            library: match error {
                Error::Hip(e) => Some(e.library().to_owned()),
                Error::NoSuchDevice { library, .. } => Some(library.clone()),
                _ => None,
            },
            error: Some(causes(error)),
            tried,
        }
    }
}
