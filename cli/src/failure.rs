//! Errors of commands, and their exit statuses.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use clap::error::ErrorKind;
use deltawave_lab::safetensors_io::FileError;

use crate::args::Cli;

/// Reasons why a command ends early.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The arguments make no sense. Help and version texts arrive here too.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// Arguments fit their types, but not each other.
    #[error("{0}")]
    Wrong(String),
    /// A file that an argument names cannot be used.
    #[error("{argument} {}", path.display())]
    File {
        argument: &'static str,
        path: PathBuf,
        source: Box<FileError>,
    },
    /// The library or the runtime refused.
    #[error("{what}")]
    Run {
        what: String,
        source: Box<deltawave::Error>,
        /// The simulator's message beyond the status code.
        detail: Option<String>,
    },
    /// The reference refused the problem.
    #[error("the reference cannot be computed")]
    Oracle(#[from] deltawave_lab::oracle::ProblemError),
    /// The problem does not fit this machine.
    #[error(
        "the tensors (and their reference, where one is computed) take about {needed} of host memory, and this machine has {available}"
    )]
    Memory { needed: String, available: String },
    /// The process of another rank failed.
    #[error("the process of rank {rank} failed: {why}")]
    Rank {
        rank: usize,
        /// Its exit status, or the reason why it could not be started.
        why: String,
    },
    /// Two runs of the same kernels gave different bits.
    #[error("the results of run {run} differ from those of run 1")]
    Unsteady {
        /// The run, counted from 1.
        run: u32,
    },
}

impl Failure {
    /// Wrong usage that the parser of arguments does not see.
    pub fn wrong(message: impl Into<String>) -> Failure {
        Failure::Wrong(message.into())
    }

    /// A file that cannot be read or written.
    pub fn file(argument: &'static str, path: &Path) -> impl FnOnce(FileError) -> Failure + use<> {
        let path = path.to_owned();
        move |source| Failure::File {
            argument,
            path,
            source: source.into(),
        }
    }

    /// The same, of a plain file.
    pub fn io(argument: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure + use<> {
        let path = path.to_owned();
        move |source| {
            let source = FileError::Io {
                path: path.clone(),
                source,
            };
            Failure::file(argument, &path)(source)
        }
    }

    /// Says wrong usage as the parser of a subcommand's arguments does.
    pub fn of_command(self, name: &str) -> Failure {
        let Failure::Wrong(message) = self else {
            return self;
        };
        let mut command = Cli::command();
        command.build();
        let command = command
            .find_subcommand_mut(name)
            .expect("every operation is a subcommand");
        command.error(ErrorKind::ValueValidation, message).into()
    }

    /// Makes a failure of a refusal.
    pub fn during(what: impl Into<String>) -> impl Fn(deltawave::Error) -> Failure {
        let what = what.into();
        move |source| {
            let simulated =
                matches!(&source, deltawave::Error::Hip(e) if e.library() == "simulator");
            let detail = simulated
                .then(|| deltawave_sim::hip::last_fault().or_else(deltawave_sim::hip::last_message))
                .flatten();
            Failure::Run {
                what: what.clone(),
                source: source.into(),
                detail,
            }
        }
    }

    /// The status that the process ends with.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Usage(error) => u8::try_from(error.exit_code()).unwrap_or(2),
            _ => 1,
        }
    }

    /// The failure, then its causes.
    pub fn chain(&self) -> Vec<String> {
        let mut lines = causes(self);
        if let Failure::Run {
            detail: Some(detail),
            ..
        } = self
        {
            lines.push(detail.clone());
        }
        lines
    }
}

/// The texts of an error and of its sources.
pub fn causes(error: &dyn Error) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        // Some errors repeat their cause in their own text.
        if lines.last().is_none_or(|line| !line.ends_with(&text)) {
            lines.push(text);
        }
        next = error.source();
    }
    lines
}
