//! `deltawave info`: the runtime, the device and the kernels in this program.

use std::fmt::Write as _;
use std::path::Path;

use deltawave::Error;
use deltawave::code_objects::{self, CODE_OBJECTS, CodeObject, MISSING, VERIFIED_ARCHS, is_nvidia};
use deltawave::runtime::{Backend, Context};
use hip_sys::LoadError;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::InfoArgs;
use crate::failure::{Failure, causes};
use crate::report::{Figures, Report, figures, mfma_mode, pretty};
use crate::resources::{self, Resources, cell};
use crate::table::{Table, bytes};

/// Looks around, and saves the kernels if that is asked for.
pub fn run(args: &InfoArgs) -> Result<Report, Failure> {
    if let Some(folder) = &args.save_kernels {
        code_objects::save(folder).map_err(Failure::io("--save-kernels", folder))?;
    }
    let chosen = Context::new(Backend::Auto, args.device);
    let objections = match &chosen {
        Err(error @ (Error::NoSuchDevice { count: 1.., .. } | Error::Argument(_))) => causes(error),
        _ => Vec::new(),
    };
    let hip = HipRuntime::of(args.device, &chosen);
    let objects = Object::all(chosen.as_ref().ok());
    Ok(Report {
        json: pretty(&figures(&chosen, &hip, &objects)),
        text: text(&chosen, &hip, &objects),
        objections,
    })
}

/// The HIP runtime.
#[derive(Serialize)]
struct HipRuntime {
    library: Option<String>,
    /// Why it is not used, step by step.
    error: Option<Vec<String>>,
    /// Libraries that could not be loaded, and why.
    tried: Vec<Attempt>,
}

#[derive(Serialize)]
struct Attempt {
    library: String,
    error: String,
}

impl HipRuntime {
    fn of(device: usize, chosen: &Result<Context, Error>) -> Self {
        let used = |context: &Context, error| HipRuntime {
            library: Some(context.hip().library().to_owned()),
            error,
            tried: Vec::new(),
        };
        match chosen {
            Ok(context) if context.backend() == Backend::Hip => used(context, None),
            Ok(_) => match Context::new(Backend::Hip, device) {
                Ok(context) => {
                    let library = context.hip().library();
                    let why = "could be used, and DELTAWAVE_BACKEND asks for the simulator";
                    used(&context, Some(vec![format!("{library} {why}")]))
                }
                Err(error) => Self::failed(&error),
            },
            Err(error) => Self::failed(error),
        }
    }

    fn failed(error: &Error) -> Self {
        let tried = match error {
            Error::Load(LoadError::NotFound { tried }) => &tried[..],
            _ => &[],
        };
        let tried = tried.iter().map(|attempt| {
            let source = attempt.error.source();
            let why = source.map_or_else(|| attempt.error.to_string(), ToString::to_string);
            Attempt {
                library: attempt.library.clone(),
                error: why,
            }
        });
        HipRuntime {
            library: match error {
                Error::Hip(e) => Some(e.library().to_owned()),
                Error::NoSuchDevice { library, .. } => Some(library.clone()),
                _ => None,
            },
            error: Some(causes(error)),
            tried: tried.collect(),
        }
    }
}

/// A code object of this program, and its kernels.
struct Object {
    code: &'static CodeObject,
    error: Option<String>,
    kernels: Vec<Resources>,
}

impl Object {
    /// All of them; kernels that are loaded are described by the runtime.
    fn all(context: Option<&Context>) -> Vec<Object> {
        let running = context.map(resources::of_context).unwrap_or_default();
        let object = |code: &'static CodeObject| {
            let here = context.is_some_and(|c| c.device().arch == code.arch);
            let best = |kernel: Resources| {
                let known = running.iter().find(|k| here && k.name == kernel.name);
                known.cloned().unwrap_or(kernel)
            };
            let (kernels, error) = match resources::of(code) {
                Ok(kernels) => (kernels.into_iter().map(best).collect(), None),
                Err(error) => (Vec::new(), Some(error.to_string())),
            };
            Object {
                code,
                error,
                kernels,
            }
        };
        CODE_OBJECTS.iter().map(object).collect()
    }

    fn verified(&self) -> bool {
        VERIFIED_ARCHS.contains(&self.code.arch)
    }

    fn json(&self) -> Value {
        json!({
            "name": self.code.name,
            "arch": self.code.arch,
            "verified": self.verified(),
            "compiler": self.code.compiler,
            "bytes": self.code.bytes.len(),
            "error": self.error,
            "kernels": self.kernels,
        })
    }
}

/// The MFMA mode, if the simulator runs the kernels.
fn simulated_mode(context: &Context) -> Option<&'static str> {
    (context.backend() == Backend::Simulator).then(mfma_mode)
}

fn figures(chosen: &Result<Context, Error>, hip: &HipRuntime, objects: &[Object]) -> Figures {
    let context = chosen.as_ref().ok();
    let device = context.map(Context::device);
    let missing = MISSING.iter();
    let missing = missing.map(|(arch, reason)| json!({"arch": arch, "reason": reason}));
    figures! {
        version: env!("CARGO_PKG_VERSION"),
        backend: context.map(|c| c.backend().name()),
        library: context.map(|c| c.hip().library()),
        runtime: context.map(Context::runtime),
        device: device.map(|d| &d.name),
        arch: device.map(|d| &d.arch),
        compute_units: device.map(|d| d.compute_units),
        memory_bytes: device.map(|d| d.memory_bytes),
        mfma_mode: context.and_then(simulated_mode),
        hip: hip,
        unusable: chosen.as_ref().err().map(|e| causes(e)),
        code_objects: objects.iter().map(Object::json).collect::<Vec<_>>(),
        missing: missing.collect::<Vec<_>>(),
    }
}

fn text(chosen: &Result<Context, Error>, hip: &HipRuntime, objects: &[Object]) -> String {
    let mut out = format!("deltawave {}\n\n", env!("CARGO_PKG_VERSION"));
    let _ = writeln!(out, "{}", place(chosen, hip));
    out += &kernel_table(objects).to_string();
    out += "\n  VGPRs counts accumulation registers (AGPRs) too; LDS, private (per lane) and kernarg are bytes.\n";
    if objects.iter().any(|o| is_nvidia(o.code.arch)) {
        out += "  On NVIDIA GPUs: all registers of a thread, static shared and local memory, as the driver reports them.\n";
    }
    for alike in objects.chunk_by(|a, b| a.code.arch == b.code.arch) {
        let (arch, compiler) = (alike[0].code.arch, Path::new(alike[0].code.compiler));
        let size: usize = alike.iter().map(|o| o.code.bytes.len()).sum();
        let kernels: usize = alike.iter().map(|o| o.kernels.len()).sum();
        let _ = writeln!(
            out,
            "  {arch}: {kernels} kernels in {} code objects, {}, compiled by {}; {}.",
            alike.len(),
            bytes(size as u64),
            compiler.display(),
            code_objects::verification(arch)
        );
    }
    for object in objects {
        if let Some(error) = &object.error {
            let code = object.code;
            let _ = writeln!(out, "  {} ({}): {error}", code.name, code.arch);
        }
    }
    for (arch, reason) in MISSING {
        let _ = writeln!(out, "  {arch}: no kernels: {reason}");
    }
    out
}

/// The device, and why it is not a GPU.
fn place(chosen: &Result<Context, Error>, hip: &HipRuntime) -> Table {
    let mut table = Table::new(2, &[]);
    let mut line = |name: &str, text: String| table.row([name.to_owned(), text]);
    match chosen {
        Ok(context) => {
            let runs_on = match simulated_mode(context) {
                Some(_) => "simulator: executes the code objects on this host's CPU".to_owned(),
                None => context.runtime(),
            };
            line("runs on", format!("the {runs_on}"));
            let d = context.device();
            line("device", d.name.clone());
            line("arch", d.arch.clone());
            line("compute units", d.compute_units.to_string());
            line("memory", bytes(d.memory_bytes));
            if let Some(mode) = simulated_mode(context) {
                let what = match mode {
                    "fast" => "chains of f32 fused multiply-adds",
                    _ => "the published model of the hardware's rounding",
                };
                line("MFMA mode", format!("{mode}: {what}"));
            }
        }
        Err(error) => {
            line("runs on", "nothing".to_owned());
            causes(error).into_iter().for_each(|cause| line("", cause));
        }
    }
    let mut name = "HIP runtime";
    // The causes of a search that found nothing are the list that follows.
    let shown = if hip.tried.is_empty() { usize::MAX } else { 1 };
    for cause in hip.error.iter().flatten().take(shown) {
        line(std::mem::take(&mut name), cause.clone());
    }
    for Attempt { library, error } in &hip.tried {
        line("", format!("tried {library}: {error}"));
    }
    table
}

fn kernel_table(objects: &[Object]) -> Table {
    let titles = [
        "kernel", "arch", "VGPRs", "AGPRs", "SGPRs", "LDS", "spills", "private", "kernarg",
    ];
    let mut table = Table::new(2, &titles);
    for object in objects {
        let note = match object.verified() {
            true => "",
            false => " (unverified)",
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
            let names = [k.name.clone(), format!("{}{note}", object.code.arch)];
            table.row(names.into_iter().chain(numbers.map(cell)));
        }
    }
    table
}
