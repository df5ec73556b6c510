//! `wavesim run`: launches a kernel once on buffers from files.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;
use deltawave_sim::code_object::{Arg, Kernel};
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::fault::{Fault, FaultKind, SameStores};
use deltawave_sim::launch::{Launch, LaunchError, Options, Stats, WaveOrder};
use deltawave_sim::memory::Memory;
use deltawave_sim::sanitize::Checks;
use safetensors::Dtype;
use serde_json::{Value as Json, json};

use crate::buffer::{self, Filled};
use crate::failure::Failure;
use crate::value::{Buffer, Parser, Place, Value};

/// Text of `run --help` after the options.
pub const EXAMPLES: &str = "\
Arguments: one --arg for each parameter of the kernel, in their order:
  i32:-5 u64:0x10 f32:1.5   numbers: i8 u8 i16 u16 i32 u32 i64 u64
                            f16 bf16 f32 f64
  in:FILE                   a buffer with the bytes of a file
  in:FILE.safetensors#NAME  a buffer with a tensor
  zeros:SIZE                a buffer of zeros
  'inout:FILE->OUT'         a buffer from a file, written to OUT afterwards
  'out:SIZE->OUT'           a buffer of NaN, written to OUT afterwards
  'zeros:SIZE->OUT'         a buffer of zeros, written to OUT afterwards
  null                      a null pointer
  'struct(FIELD,FIELD,..)'  a struct by value: fields as above, laid out as in C
  hex:00ff12                bytes
SIZE is a number of bytes, or TYPE[DIM,..] such as f32[16,64]. OUT is a file,
FILE.safetensors#NAME, or - to print the values. Quote what the shell would
take for its own: > [ ] ( ). A buffer ends where its data ends: an access
beyond is a fault that names pc, lane and address, and nothing is written.

Checks stop the launch at errors that hardware does not report:
  uninitialized  values that nothing wrote decide something or are stored
  waits          a register is used before the s_waitcnt for its load
  hazards        wait states are missing, such as after an MFMA
  races          two waves or workgroups touch a byte, one writes, unordered
  barriers       lanes or waves skip an s_barrier
They cost time: --checks none is the fastest. Accesses outside of buffers, LDS
and scratch, and launches that hang, are found in any case. A race is found
in every --order; results that change with the order point to other faults.
Stores of the same bytes are no race: --notes lists them.

Examples:
  wavesim run saxpy.co --kernel saxpy --grid 4 --block 256 \\
    --arg 'inout:y.bin->y-new.bin' --arg in:data.safetensors#x \\
    --arg f32:2.5 --arg i32:1000
  wavesim run gemm.co --kernel gemm --grid 8,8 --block 16,16 --lds 4096 \\
    --mfma exact --order seeded:7 \\
    --arg in:ab.safetensors#a --arg in:ab.safetensors#b \\
    --arg 'out:f32[128,128]->c.safetensors#c'
  wavesim run k.co --grid 1 --block 64 --arg 'out:u32[64]->-'";

/// Command line of `run`.
#[derive(clap::Args)]
pub struct Args {
    /// Code object, or an offload bundle that has one for gfx942
    file: PathBuf,
    /// Kernel to launch; optional if the code object has only one
    #[arg(long)]
    kernel: Option<String>,
    /// Number of workgroups in each dimension
    #[arg(long, value_name = "X[,Y,Z]", value_parser = dims)]
    grid: [u32; 3],
    /// Work-items per workgroup in each dimension
    #[arg(long, value_name = "X[,Y,Z]", value_parser = dims)]
    block: [u32; 3],
    /// Dynamic LDS in bytes, in addition to the kernel's static LDS
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    lds: u32,
    /// One argument of the kernel; wavesim run --help explains the forms
    #[arg(long = "arg", value_name = "ARG", allow_hyphen_values = true)]
    args: Vec<String>,
    /// MFMA arithmetic: fast (chains of f32 FMAs) or exact (the published model of the hardware)
    #[arg(long, value_enum, default_value_t = Mfma::Fast)]
    mfma: Mfma,
    /// Order of a workgroup's waves: run-ahead, in-step or seeded:SEED
    #[arg(long, default_value_t)]
    order: WaveOrder,
    /// Checks while it runs: all, none, or some of uninitialized, waits, hazards, races, barriers, separated by commas
    /// [default: all; profile, model: none]
    #[arg(long)]
    checks: Option<Checks>,
    /// Report stores of the same bytes by several waves, which are no race
    #[arg(long)]
    notes: bool,
    /// Number of host threads; all cores if absent
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    threads: Option<u32>,
    /// Number of wave-instructions after which the launch counts as hung
    #[arg(long, value_name = "N", default_value_t = Options::default().instruction_limit)]
    instruction_limit: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mfma {
    Fast,
    Exact,
}

fn dims(text: &str) -> Result<[u32; 3], String> {
    let mut dims = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 3 {
        return Err("at most three dimensions".into());
    }
    for (dim, part) in dims.iter_mut().zip(parts) {
        *dim = part
            .trim()
            .parse()
            .map_err(|_| format!("`{part}` is not a number of 32 bits"))?;
    }
    Ok(dims)
}

/// The parameters of a kernel, one per line.
pub fn signature<'a>(args: impl Iterator<Item = &'a Arg>) -> String {
    let mut text = String::new();
    for (i, a) in args.enumerate() {
        let _ = write!(
            text,
            "\n  {i}: {} bytes at offset {}, {}",
            a.size, a.offset, a.value_kind
        );
        if let Some(name) = &a.name {
            let _ = write!(text, ", {name}");
        }
    }
    text
}

/// Runs the launch and returns the report.
pub fn run(args: &Args) -> Result<String, Failure> {
    launch(args, args.options(Checks::ALL), |launch, done| {
        done.write()?;
        let outputs: Vec<Output> = (done.buffers.iter().zip(done.filled).zip(done.owners))
            .filter_map(|((buffer, filled), &argument)| Output::new(buffer, filled, argument))
            .collect();
        let (kernel, stats, seconds) = (launch.kernel, &done.stats, done.seconds);
        Ok(if args.json {
            let outputs: Vec<Json> = outputs.iter().map(Output::json).collect();
            let mut json = json!({
                "kernel": kernel.name(),
                "grid": args.grid,
                "block": args.block,
                "dynamic_lds_bytes": args.lds,
                "mfma_mode": match args.mfma { Mfma::Fast => "fast", Mfma::Exact => "exact" },
                "order": args.order.to_string(),
                "workgroups": stats.workgroups,
                "waves": stats.waves,
                "wave_instructions": stats.wave_instructions,
                "seconds": seconds,
                "outputs": outputs,
            });
            if args.notes {
                json["notes"] = stats.notes.iter().map(note).collect();
            }
            crate::json(&json)
        } else {
            report(kernel, stats, seconds, &outputs)
        })
    })
}

impl Args {
    /// Whether `--json` was given.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Simulation options from the command line; `checks` if `--checks` is absent.
    pub fn options(&self, checks: Checks) -> Options {
        Options {
            mfma: match self.mfma {
                Mfma::Fast => MfmaMode::Fast,
                Mfma::Exact => MfmaMode::Exact,
            },
            threads: self.threads.map(|n| n as usize),
            order: self.order,
            instruction_limit: self.instruction_limit,
            checks: self.checks.unwrap_or(checks),
            notes: self.notes,
            ..Options::default()
        }
    }
}

/// Results of a launch.
pub struct Done<'a> {
    pub stats: Stats,
    pub seconds: f64,
    buffers: &'a [Buffer],
    filled: &'a [Filled],
    /// Index of the argument that each buffer belongs to.
    owners: &'a [usize],
}

impl Done<'_> {
    /// Writes the outputs to their files.
    pub fn write(&self) -> Result<(), Failure> {
        buffer::write(self.buffers, self.filled).map_err(Failure::Output)
    }
}

/// Launches the kernel as the command line says, and passes its results on.
pub fn launch(
    args: &Args,
    options: Options,
    then: impl FnOnce(&Launch, Done) -> Result<String, Failure>,
) -> Result<String, Failure> {
    let code = crate::load(&args.file)?;
    let kernel = match (&args.kernel, code.kernels()) {
        (Some(name), _) => crate::find(&code, name)?,
        (None, [only]) => only,
        (None, _) => {
            let present = crate::names(&code);
            return Err(Failure::WhichKernel { present });
        }
    };

    let mut parser = Parser::default();
    let mut values = Vec::new();
    // Index of the argument that each buffer belongs to.
    let mut owners = Vec::new();
    for (i, text) in args.args.iter().enumerate() {
        values.push(parser.value(text)?);
        owners.resize(parser.buffers.len(), i);
    }
    let buffers = parser.buffers;
    // Sizes and kinds do not depend on the addresses: refuse before files are read.
    kernarg(kernel, &values, &args.args, &vec![0; buffers.len()])?;
    buffer::check_outputs(&buffers).map_err(Failure::Output)?;
    let mut filled = Vec::new();
    for (buffer, &index) in buffers.iter().zip(&owners) {
        filled.push(
            Filled::new(&buffer.content).map_err(|source| Failure::Buffer {
                index,
                text: args.args[index].clone(),
                source,
            })?,
        );
    }

    let extents: Vec<_> = filled.iter_mut().map(Filled::extent).collect();
    let addresses: Vec<u64> = extents.iter().map(|e| e.start).collect();
    let kernarg = kernarg(kernel, &values, &args.args, &addresses)?;
    let memory = Memory::new(extents);
    let launch = Launch {
        code: &code,
        kernel,
        grid: args.grid,
        remainder: [0; 3],
        block: args.block,
        dynamic_lds: args.lds,
        kernarg: &kernarg,
        memory: &memory,
    };
    let start = Instant::now();
    // SAFETY: the extents are vectors of `filled`, which lives on and is not touched until the end.
    let stats = unsafe { launch.run(&options) }.map_err(|source| {
        if let (true, LaunchError::Fault(fault)) = (args.json, &source) {
            // The failure itself is printed on standard error, as always.
            let _ = crate::print(&crate::json(&finding(fault)));
        }
        let mut map = String::new();
        for ((address, filled), &argument) in addresses.iter().zip(&filled).zip(&owners) {
            let (bytes, text) = (filled.shape.bytes, &args.args[argument]);
            let end = address + bytes as u64;
            let _ = writeln!(
                map,
                "  argument {argument}, `{text}`: {address:#x}..{end:#x} ({bytes} bytes)"
            );
        }
        Failure::launch(source, map)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    then(
        &launch,
        Done {
            stats,
            seconds,
            buffers: &buffers,
            filled: &filled,
            owners: &owners,
        },
    )
}

/// A note as JSON.
fn note(note: &SameStores) -> Json {
    json!({
        "place": if note.lds { "LDS" } else { "memory" },
        "pc": note.pc,
        "instruction": note.instruction,
        "other": { "pc": note.other_pc, "instruction": note.other_instruction },
        "times": note.times,
    })
}

/// A fault as JSON. A race has the pc and the text of both instructions.
fn finding(fault: &Fault) -> Json {
    let mut json = json!({
        "kernel": fault.kernel,
        "fault": fault.kind.to_string(),
        "workgroup": fault.workgroup,
        "wave": fault.wave,
        "pc": fault.pc,
        "instruction": fault.instruction,
    });
    if let FaultKind::Race(race) = &fault.kind {
        json["race"] = json!({
            "place": race.place.to_string(),
            "action": race.action,
            "reason": race.reason.to_string(),
            "other": {
                "action": race.other_action,
                "workgroup": race.other_workgroup,
                "wave": race.other_wave,
                "pc": race.other_pc,
                "instruction": race.other_instruction,
            },
        });
    }
    json
}

fn report(kernel: &Kernel, stats: &Stats, seconds: f64, outputs: &[Output]) -> String {
    let mut out = format!(
        "{}: {} workgroups, {} waves, {} wave-instructions in {seconds:.6} s of the host ({:.1} million per second)\n",
        kernel.name(),
        stats.workgroups,
        stats.waves,
        stats.wave_instructions,
        stats.wave_instructions as f64 / seconds.max(1e-9) / 1e6
    );
    for note in &stats.notes {
        let _ = writeln!(out, "note: {note}");
    }
    for o in outputs {
        match o.place {
            Place::Print => {
                let _ = writeln!(out, "argument {}: {}", o.argument, o.values().join(" "));
                let more = o.count().saturating_sub(SHOWN);
                if more > 0 {
                    let _ = writeln!(out, "... and {more} more");
                }
            }
            place => {
                let bytes = o.filled.shape.bytes;
                let _ = writeln!(out, "argument {}: {bytes} bytes to {place}", o.argument);
            }
        }
    }
    out
}

/// The explicit arguments in the layout of the kernel's metadata.
fn kernarg(
    kernel: &Kernel,
    values: &[Value],
    texts: &[String],
    addresses: &[u64],
) -> Result<Vec<u8>, Failure> {
    let size = kernel.explicit_size() as usize;
    let explicit = || kernel.metadata.args.iter().filter(|a| !a.is_hidden());
    let expected = explicit().count();
    if kernel.metadata.args.is_empty() && size > 0 {
        // The compiler did not describe the arguments: assume C's layout.
        let mut bytes = Vec::new();
        for value in values {
            value.lower(addresses, &mut bytes);
        }
        if bytes.len() > size {
            return Err(Failure::Total {
                kernel: kernel.name().into(),
                expected: size,
                got: bytes.len(),
            });
        }
        bytes.resize(size, 0);
        return Ok(bytes);
    }
    if values.len() != expected {
        return Err(Failure::Count {
            kernel: kernel.name().into(),
            expected,
            got: values.len(),
            signature: signature(explicit()),
        });
    }
    let mut kernarg = vec![0; size];
    for (index, ((value, text), arg)) in values.iter().zip(texts).zip(explicit()).enumerate() {
        let (name, text) = (arg.name.clone(), text.clone());
        let is_pointer = arg.value_kind == "global_buffer";
        if is_pointer && matches!(value, Value::Scalar { .. }) {
            return Err(Failure::Pointer {
                index,
                name,
                text,
                what: value.describe(),
            });
        }
        let mut bytes = Vec::new();
        value.lower(addresses, &mut bytes);
        if bytes.len() != arg.size as usize {
            return Err(Failure::Size {
                index,
                name,
                text,
                bytes: bytes.len(),
                expected: arg.size,
            });
        }
        let at = arg.offset as usize;
        kernarg[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(kernarg)
}

/// Maximum number of values that are printed.
const SHOWN: usize = 1024;

/// An output buffer.
struct Output<'a> {
    argument: usize,
    place: &'a Place,
    filled: &'a Filled,
}

impl<'a> Output<'a> {
    fn new(buffer: &'a Buffer, filled: &'a Filled, argument: usize) -> Option<Self> {
        let place = buffer.output.as_ref()?;
        Some(Output {
            argument,
            place,
            filled,
        })
    }

    fn size(&self) -> usize {
        (self.filled.shape.dtype.bitsize() / 8).max(1)
    }

    fn count(&self) -> usize {
        self.filled.shape.bytes / self.size()
    }

    /// The first values as text, at most [`SHOWN`].
    fn values(&self) -> Vec<String> {
        let elements = self.filled.data().chunks_exact(self.size()).take(SHOWN);
        elements
            .map(|b| element(self.filled.shape.dtype, b))
            .collect()
    }

    fn json(&self) -> Json {
        let shape = &self.filled.shape;
        let mut value = json!({
            "argument": self.argument,
            "bytes": shape.bytes,
            "dtype": shape.dtype.to_string(),
            "shape": shape.dims,
        });
        match self.place {
            // JSON has no NaN: values are numbers where it has them, else text.
            Place::Print => {
                let values: Vec<Json> = self
                    .values()
                    .into_iter()
                    .map(|v| serde_json::from_str(&v).unwrap_or(Json::String(v)))
                    .collect();
                value["values"] = values.into();
            }
            place => value["file"] = place.to_string().into(),
        }
        value
    }
}

/// One element as text; types without a Rust counterpart as hexadecimal.
fn element(dtype: Dtype, b: &[u8]) -> String {
    macro_rules! number {
        ($t:ty) => {
            <$t>::from_le_bytes(b.try_into().unwrap_or_default()).to_string()
        };
    }
    match dtype {
        Dtype::I8 => number!(i8),
        Dtype::U8 | Dtype::BOOL => number!(u8),
        Dtype::I16 => number!(i16),
        Dtype::U16 => number!(u16),
        Dtype::I32 => number!(i32),
        Dtype::U32 => number!(u32),
        Dtype::I64 => number!(i64),
        Dtype::U64 => number!(u64),
        Dtype::F16 => number!(half::f16),
        Dtype::BF16 => number!(half::bf16),
        Dtype::F32 => number!(f32),
        Dtype::F64 => number!(f64),
        _ => b.iter().map(|b| format!("{b:02x}")).collect(),
    }
}
