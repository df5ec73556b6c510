//! Errors of the commands, and their exit statuses.

use std::path::PathBuf;

use deltawave_sim::code_object::LoadError;
use deltawave_sim::launch::LaunchError;
use thiserror::Error;

use crate::buffer::BufferError;
use crate::value::ValueError;

/// Reason why a command failed.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum Failure {
    #[error("{}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{} cannot be loaded", path.display())]
    Load { path: PathBuf, source: LoadError },
    #[error("no kernel `{name}`: the code object has {}", kernels(present))]
    NoKernel { name: String, present: Vec<String> },
    #[error("--kernel is needed: the code object has {}", kernels(present))]
    WhichKernel { present: Vec<String> },
    #[error("--arg")]
    Value(#[from] ValueError),
    #[error("kernel {kernel} takes {expected} arguments, {got} were given:{signature}")]
    Count {
        kernel: String,
        expected: usize,
        got: usize,
        signature: String,
    },
    #[error(
        "argument {index}{}: `{text}` is {bytes} bytes, the kernel takes {expected}",
        named(name)
    )]
    Size {
        index: usize,
        name: Option<String>,
        text: String,
        bytes: usize,
        expected: u32,
    },
    #[error(
        "argument {index}{}: `{text}` is {what}, the kernel takes a pointer: give in:, zeros:, inout:, out: or null",
        named(name)
    )]
    Pointer {
        index: usize,
        name: Option<String>,
        text: String,
        what: &'static str,
    },
    #[error("kernel {kernel} takes {expected} bytes of arguments, {got} were given")]
    Total {
        kernel: String,
        expected: usize,
        got: usize,
    },
    #[error("argument {index}: `{text}`")]
    Buffer {
        index: usize,
        text: String,
        source: BufferError,
    },
    #[error("the results cannot be written")]
    Output(#[source] BufferError),
    #[error("the launch was refused")]
    Refused(#[source] LaunchError),
    #[error("the launch failed")]
    Failed {
        source: LaunchError,
        buffers: String,
    },
    #[error("{} cannot be written", path.display())]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the launch has no workgroup to record")]
    NoWorkgroup,
    #[error("standard output")]
    Print(#[source] std::io::Error),
}

fn kernels(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        names => names.join(", "),
    }
}

fn named(name: &Option<String>) -> String {
    name.as_ref().map(|n| format!(" ({n})")).unwrap_or_default()
}

impl Failure {
    /// Error of a launch that failed. `buffers` lists the buffers' addresses.
    pub fn launch(source: LaunchError, buffers: String) -> Failure {
        match source {
            LaunchError::Fault(_) | LaunchError::OutOfMemory { .. } => {
                Failure::Failed { source, buffers }
            }
            source => Failure::Refused(source),
        }
    }

    /// Further lines that help to understand the error.
    pub fn note(&self) -> &str {
        match self {
            Failure::Failed { buffers, .. } => buffers,
            _ => "",
        }
    }

    /// Exit status. 2: the request is invalid for this code object. 1: any other failure.
    pub fn status(&self) -> u8 {
        match self {
            Failure::NoKernel { .. }
            | Failure::WhichKernel { .. }
            | Failure::Value(_)
            | Failure::Count { .. }
            | Failure::Size { .. }
            | Failure::Pointer { .. }
            | Failure::Total { .. }
            | Failure::Refused(_) => 2,
            Failure::Output(BufferError::TwiceWritten { .. }) => 2,
            _ => 1,
        }
    }
}
