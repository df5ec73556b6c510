//! The program `deltawave`: the kernels of this crate, run and checked from the command line.
//!
//! | what | file |
//! |---|---|
//! | arguments | `args.rs`, `models.rs` |
//! | `info` | `info.rs`, `resources.rs` |
//! | `prefill`: tensors on the host | `workload.rs` |
//! | `prefill`: on the device | `run.rs`, `states.rs`, `time.rs` |
//! | `prefill`: against the reference | `check.rs` |
//! | `prefill`: what is printed | `report.rs`, `table.rs`, `progress.rs` |
//! | `profile` | `profile.rs` |
//! | `conv` | `conv.rs`, `conv/` |
//! | `decode` | `decode.rs`, `decode/` |
//! | `layer` | `layer.rs`, `layer/` |
//! | which files are the same | `files.rs` |
//! | runs that are repeated | `repeat.rs` |
//! | errors and exit statuses | `failure.rs` |

mod args;
mod check;
mod conv;
mod decode;
mod failure;
mod files;
mod info;
mod layer;
mod models;
mod profile;
mod progress;
mod repeat;
mod report;
mod reported;
mod resources;
mod run;
mod simulator;
mod states;
mod table;
mod time;
mod workload;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser as _;
use deltawave::prefill::{Prefill, Snapshot};
use deltawave::runtime::{Backend, Context};
use deltawave_lab::safetensors_io::{self, FileError, Named};
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::launch::Record;
use deltawave_sim::timing::SAMPLE;
use serde::Serialize;

use crate::args::{BackendArg, Cli, Command, InfoArgs, MfmaArg, PrefillArgs, ProfileArgs};
use crate::check::Verdict;
use crate::failure::Failure;
use crate::info::Info;
use crate::profile::Profile;
use crate::progress::Progress;
use crate::report::Report;
use crate::reported::Reported;
use crate::run::{Outcome, StateFormat, Wanted};
use crate::states::Resumed;
use crate::workload::{Request, Workload};

fn main() -> ExitCode {
    let result = Cli::try_parse()
        .map_err(Failure::from)
        .and_then(|cli| match cli.command {
            Command::Info(args) => info(&args),
            Command::Prefill(args) => prefill(&args),
            Command::Profile(args) => profile(&args),
            Command::Conv(args) => Ok(conclude(args.json, &conv::run(&args)?)),
            Command::Decode(args) => Ok(conclude(args.json, &decode::run(&args)?)),
            Command::Layer(args) => Ok(conclude(args.json, &layer::run(&args)?)),
        });
    match result {
        Ok(code) => code,
        Err(failure) => report_failure(&failure),
    }
}

fn info(args: &InfoArgs) -> Result<ExitCode, Failure> {
    if let Some(folder) = &args.save_kernels {
        deltawave::code_objects::save(folder).map_err(|source| Failure::File {
            argument: "--save-kernels",
            path: folder.clone(),
            source: Box::new(FileError::Io {
                path: folder.clone(),
                source,
            }),
        })?;
    }
    let info = Info::new(args);
    print(&if args.json { json(&info) } else { info.text() });
    Ok(conclude_with(&info.refusal))
}

/// A prefill that ran.
struct Ran {
    context: Context,
    workload: Workload,
    format: StateFormat,
    outcome: Outcome,
    resumed: Option<Resumed>,
    verdict: Option<Verdict>,
}

fn prefill(args: &PrefillArgs) -> Result<ExitCode, Failure> {
    refuse_overwriting(args, None)?;
    let ran = run_prefill(args, args.backend.into(), None)?;
    let report = Report::new(
        args,
        &ran.context,
        &ran.workload,
        ran.format,
        &ran.outcome,
        ran.resumed,
        ran.verdict.as_ref(),
    );
    Ok(conclude(args.json, &report))
}

fn profile(args: &ProfileArgs) -> Result<ExitCode, Failure> {
    let prefill = &args.prefill;
    if matches!(prefill.backend, BackendArg::Hip) || prefill.repeat > 1 {
        let why =
            "profile counts one run on the simulator: --backend hip and --repeat are not for it";
        return Err(workload::usage(why.to_owned()));
    }
    refuse_overwriting(prefill, args.roofline.as_ref())?;
    let ran = run_prefill(prefill, Backend::Simulator, Some(&args.gpu))?;
    let launches = deltawave_sim::hip::take_counted_launches();
    let profile = Profile::new(args.gpu, &ran.workload, ran.format, &launches);
    if let Some(path) = &args.roofline {
        let written = std::fs::write(path, profile.roofline());
        written.map_err(|source| Failure::File {
            argument: "--roofline",
            path: path.clone(),
            source: Box::new(FileError::Io {
                path: path.clone(),
                source,
            }),
        })?;
    }
    print(&if prefill.json {
        json(&profile.json())
    } else {
        profile.text()
    });
    let objections = ran.verdict.map(|v| v.objections).unwrap_or_default();
    Ok(conclude_with(&objections))
}

/// Prints a report; fails where something was found wrong.
fn conclude(as_json: bool, report: &impl Reported) -> ExitCode {
    print(&match as_json {
        true => json(report),
        false => report.text(),
    });
    conclude_with(&report.objections())
}

fn conclude_with(objections: &[String]) -> ExitCode {
    complain(objections);
    match objections.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Runs what the arguments ask for. `counted` for a GPU: the simulator counts what the launches do.
fn run_prefill(
    args: &PrefillArgs,
    backend: Backend,
    counted: Option<&Gpu>,
) -> Result<Ran, Failure> {
    if let Some(threads) = args.threads {
        // A second pool would be refused, and there is none yet.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global();
    }
    let steps = if args.check { 4 } else { 2 };
    let mut progress = Progress::new(steps);
    let request = Request::new(args)?;
    if let Some(gpu) = counted {
        // What is counted for a GPU is planned for it.
        deltawave_sim::hip::set_gpu(*gpu);
    }
    request.check_memory(args.check)?;
    let context = Context::new(backend, args.device)
        .map_err(Failure::during("there is nothing to run on"))?;
    configure_simulator(args, &context, counted)?;
    let mut plan = request.plan(&context)?;
    let format = StateFormat {
        layout: args.state_layout.into(),
        dtype: args.state_dtype,
    };
    let wanted = Wanted {
        repeat: args.repeat,
        replays: args.time,
        pool: args.pool.map(|slots| slots as usize),
        snapshots: plan_states(args, &mut plan, &request)?,
        ..Wanted::new(format)
    };
    let workload = progress.step("inputs", || request.load());
    if let Some(path) = &args.save_input {
        let written = workload.data.write(path);
        written.map_err(|source| Failure::File {
            argument: "--save-input",
            path: path.clone(),
            source: source.into(),
        })?;
    }
    let outcome = progress.step("kernels", || run::run(&context, &plan, &workload, &wanted))?;
    if args.output.is_some() {
        write_output(args, &workload, &outcome)?;
    }
    // What is counted are the launches of the whole.
    let resumed = match args.check && counted.is_none() {
        true => states::resume(&context, &plan, &workload, &outcome, format)?,
        false => None,
    };
    let verdict = match args.check {
        true => Some(check::check(&workload, &outcome, resumed, &mut progress)?),
        false => None,
    };
    Ok(Ran {
        context,
        workload,
        format,
        outcome,
        resumed,
        verdict,
    })
}

/// Gives the plan its slots and snapshots, and returns the latter.
fn plan_states(
    args: &PrefillArgs,
    plan: &mut Prefill,
    request: &Request,
) -> Result<Option<Vec<Snapshot>>, Failure> {
    let sequences = request.cu_seqlens.len() - 1;
    if let Some(slots) = args.pool.map(|slots| slots as usize) {
        if slots < sequences {
            let why = format!("{sequences} sequences need as many slots");
            return Err(workload::usage(format!(
                "invalid value '{slots}' for '--pool <SLOTS>': {why}"
            )));
        }
        if let Some(dtype) = request.initial_state().filter(|d| *d != args.state_dtype) {
            return Err(workload::usage(format!(
                "a pool has states of one type: the initial ones are {dtype}, --state-dtype is {}",
                args.state_dtype
            )));
        }
        let refused = Failure::during("the slots are refused");
        plan.set_slots(&states::slots(sequences, slots), None)
            .map_err(refused)?;
    }
    let refused = Failure::during("the snapshots are refused");
    let Some(tokens) = args.snapshots else {
        return Ok(None);
    };
    let wanted = plan.snapshots_every(tokens).map_err(&refused)?;
    plan.set_snapshots(&wanted).map_err(refused)?;
    Ok(Some(wanted))
}

/// No file may be written over another one that this run reads or writes.
fn refuse_overwriting(args: &PrefillArgs, roofline: Option<&PathBuf>) -> Result<(), Failure> {
    let files = [
        ("--input", args.input.as_ref()),
        ("--save-input", args.save_input.as_ref()),
        ("--output", args.output.as_ref()),
        ("--roofline", roofline),
    ];
    for (i, (first, a)) in files.iter().enumerate() {
        for (second, b) in &files[i + 1..] {
            let (Some(a), Some(b)) = (a, b) else { continue };
            if files::same(a, b) {
                let path = b.display();
                return Err(workload::usage(format!(
                    "{second} {path} would overwrite the file of {first}"
                )));
            }
        }
    }
    Ok(())
}

fn configure_simulator(
    args: &PrefillArgs,
    context: &Context,
    counted: Option<&Gpu>,
) -> Result<(), Failure> {
    if context.backend() != Backend::Simulator {
        return match args.mfma {
            Some(_) => Err(workload::usage(
                "--mfma chooses the simulator's arithmetic, and this runs on a GPU".to_owned(),
            )),
            None => Ok(()),
        };
    }
    if args.time.is_some() {
        return Err(workload::usage(
            "--time measures a GPU, and this runs on the simulator, whose times are those of this host".to_owned(),
        ));
    }
    let mut options = deltawave_sim::hip::options();
    match args.mfma {
        Some(MfmaArg::Fast) => options.mfma = MfmaMode::Fast,
        Some(MfmaArg::Exact) => options.mfma = MfmaMode::Exact,
        None => {}
    }
    options.threads = args.threads.map(usize::from).or(options.threads);
    if counted.is_some() {
        options.count = true;
        options.record = Record::Some(SAMPLE);
    }
    deltawave_sim::hip::set_options(options);
    Ok(())
}

fn write_output(args: &PrefillArgs, w: &Workload, outcome: &Outcome) -> Result<(), Failure> {
    let Some(path) = &args.output else {
        return Ok(());
    };
    let d = &w.data;
    let tensors = [
        Named {
            name: "o",
            shape: &[d.tokens, d.value_heads, d.value_dim],
            dtype: outcome.o.dtype,
            bytes: &outcome.o.bytes,
        },
        Named {
            name: "final_state",
            shape: &[w.sequences(), d.value_heads, d.key_dim, d.value_dim],
            dtype: outcome.final_state.dtype,
            bytes: &outcome.final_state.bytes,
        },
    ];
    safetensors_io::write(path, &tensors).map_err(|source| Failure::File {
        argument: "--output",
        path: path.clone(),
        source: source.into(),
    })
}

fn json(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("reports have string keys");
    text.push('\n');
    text
}

/// Writes to stdout. A reader that went away wants no more; a full disk must not look like success.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            complain(&["stdout cannot be written".to_owned(), error.to_string()]);
            std::process::exit(1);
        }
        _ => {}
    }
}

fn complain(lines: &[String]) {
    let mut err = std::io::stderr().lock();
    for (i, line) in lines.iter().enumerate() {
        let label = if i == 0 { "error" } else { "  because" };
        let _ = writeln!(err, "{label}: {line}");
    }
}

/// What a failure looks like with `--json`.
#[derive(Serialize)]
struct JsonFailure {
    error: String,
    causes: Vec<String>,
}

fn report_failure(failure: &Failure) -> ExitCode {
    let lines = match failure {
        Failure::Usage(error) => {
            // This prints help to stdout and errors to stderr, in colour on a terminal.
            let _ = error.print();
            if !error.use_stderr() {
                return ExitCode::SUCCESS;
            }
            let text = error.to_string();
            // Its first paragraph says what is wrong, over several lines where arguments are missing.
            let message = text.lines().map(str::trim).take_while(|l| !l.is_empty());
            let message = message.collect::<Vec<_>>().join(" ");
            vec![message.trim_start_matches("error: ").to_owned()]
        }
        _ => {
            let lines = failure.chain();
            complain(&lines);
            lines
        }
    };
    // The arguments may not have been understood, so that they are looked for here.
    if std::env::args_os().any(|a| a == "--json") {
        let mut lines = lines.into_iter();
        print(&json(&JsonFailure {
            error: lines.next().unwrap_or_default(),
            causes: lines.collect(),
        }));
    }
    ExitCode::from(failure.status())
}
