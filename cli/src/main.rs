//! The program `deltawave`: the kernels of the crate `deltawave`, run and checked from the command line.
//!
//! Each operation says what its tensors are, how they are launched, checked and described; one driver runs them all.
//! Tensors are drawn and judged by the crate `deltawave-lab`.
//!
//! | concept | file |
//! |---|---|
//! | arguments: subcommands, shared options, parsers | `args.rs` |
//! | from arguments to a report: plan, draw, launch, check, time | `driver.rs` |
//! | reports: JSON and tables | `report.rs`, `verdict.rs`, `table.rs`, `time.rs`, `resources.rs` |
//! | operations | `prefill/`, `conv/`, `decode/`, `layer/` |
//! | `profile`: counters of a prefill | `prefill/profile.rs` |
//! | `info` | `info.rs` |
//! | tensors on the device | `device.rs`, `recurrence.rs` |
//! | errors and exit statuses | `failure.rs`, `console.rs` |
//! | files, memory and progress | `files.rs`, `memory.rs`, `progress.rs` |

mod args;
mod console;
mod conv;
mod decode;
mod device;
mod driver;
mod failure;
mod files;
mod info;
mod layer;
mod memory;
mod prefill;
mod progress;
mod recurrence;
mod report;
mod resources;
mod table;
mod time;
mod verdict;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Cli, Command};
use crate::failure::Failure;
use crate::report::Report;

fn main() -> ExitCode {
    match Cli::try_parse().map_err(Failure::from).and_then(run) {
        Ok((report, json)) => console::conclude(&report, json),
        Err(failure) => console::fail(&failure),
    }
}

/// A report, and whether it is printed as JSON.
fn run(cli: Cli) -> Result<(Report, bool), Failure> {
    let (name, report, json) = match cli.command {
        Command::Info(args) => ("info", info::run(&args), args.json),
        Command::Prefill(args) => ("prefill", prefill::run(&args), args.json),
        Command::Profile(args) => ("profile", prefill::profile::run(&args), args.prefill.json),
        Command::Conv(args) => ("conv", conv::run(&args), args.json),
        Command::Decode(args) => ("decode", decode::run(&args), args.json),
        Command::Layer(args) => ("layer", layer::run(&args), args.json),
    };
    Ok((report.map_err(|failure| failure.of_command(name))?, json))
}
