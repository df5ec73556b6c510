//! `wavesim`: runs, disassembles and describes gfx942 code objects on a machine without a GPU.
//!
//! | content | file |
//! |---|---|
//! | `run` | `run.rs` |
//! | the language of `--arg` | `value.rs` |
//! | buffers and their files | `buffer.rs` |
//! | `disasm` | `disasm.rs` |
//! | `resources` | `resources.rs` |
//! | `model` | `model.rs` |
//! | `profile` | `profile.rs` |
//! | errors and exit statuses | `failure.rs` |

mod buffer;
mod disasm;
mod failure;
mod model;
mod profile;
mod resources;
mod run;
mod value;

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use deltawave_sim::code_object::{CodeObject, Kernel};

use failure::Failure;

const EXAMPLES: &str = "\
Examples:
  Compile a kernel without ROCm, and look at it:
    clang++-19 -x hip -nogpuinc -nogpulib -O3 --offload-arch=gfx942 \\
      --offload-device-only --no-gpu-bundle-output -o saxpy.co saxpy.hip
    wavesim resources saxpy.co
    wavesim disasm saxpy.co --kernel saxpy

  Run saxpy(float* y, const float* x, float a, int n), 4 workgroups of 256:
    wavesim run saxpy.co --kernel saxpy --grid 4 --block 256 \\
      --arg 'inout:y.bin->y-new.bin' --arg in:data.safetensors#x \\
      --arg f32:2.5 --arg i32:1000

Exit status:
  0  success
  1  failure: a file, the code object, or a fault in the kernel
  2  the command line is invalid, or does not fit the code object";

/// Runs, disassembles and describes AMD gfx942 (MI300) code objects, with no GPU and no ROCm.
#[derive(Parser)]
#[command(name = "wavesim", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Launch a kernel on buffers from files.
    #[command(after_help = run::EXAMPLES)]
    Run(run::Args),
    /// Print the machine code: pc, bytes, instruction.
    Disasm(disasm::Args),
    /// Count a launch: instructions, unit clocks, bank conflicts, memory lines, occupancy; model its time.
    #[command(after_help = profile::EXAMPLES)]
    Profile(profile::Args),
    /// Print the resources of each kernel: registers, LDS, scratch, spills, arguments.
    Resources(resources::Args),
    /// Model the time of a launch on a GPU, from a few of its workgroups.
    Model(model::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is the reader's choice.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Profile(args) => profile::text(&args),
        Command::Disasm(args) => disasm::text(&args),
        Command::Resources(args) => resources::text(&args),
        Command::Model(args) => model::text(&args),
    };
    match result.and_then(|text| print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            let mut cause = failure.source();
            while let Some(error) = cause {
                eprintln!("  caused by: {error}");
                cause = error.source();
            }
            eprint!("{}", failure.note());
            ExitCode::from(failure.status())
        }
    }
}

/// Writes to standard output. A pipe that the reader has closed is no failure.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(Failure::Print),
    }
}

/// Loads a code object or an offload bundle.
fn load(path: &Path) -> Result<CodeObject, Failure> {
    let bytes = std::fs::read(path).map_err(|source| Failure::Read {
        path: path.into(),
        source,
    })?;
    CodeObject::load(&bytes).map_err(|source| Failure::Load {
        path: PathBuf::from(path),
        source,
    })
}

fn names(code: &CodeObject) -> Vec<String> {
    code.kernels().iter().map(|k| k.name().into()).collect()
}

/// Finds the kernel named `name`.
fn find<'a>(code: &'a CodeObject, name: &str) -> Result<&'a Kernel, Failure> {
    code.kernel(name).ok_or_else(|| Failure::NoKernel {
        name: name.into(),
        present: names(code),
    })
}

/// JSON text with a newline at its end.
fn json(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}
