//! Errors: a call that failed, a function that is missing, a runtime that cannot be loaded.

use crate::hipError_t;
use std::fmt;
use std::sync::Arc;

/// A failed call of the HIP runtime.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum HipError {
    /// The function returned a status other than `hipSuccess`.
    Status {
        /// The function.
        call: &'static str,
        /// The status that it returned.
        code: hipError_t,
        /// Name of the status.
        name: Arc<str>,
        /// Whether every later call will fail too ([`hipError_t::is_poisoned`]).
        poisoned: bool,
        /// Name or path of the library.
        library: Arc<str>,
        /// The CUDA driver's own message, if the functions are on the CUDA driver
        /// ([`Hip::is_cuda`](crate::Hip::is_cuda)).
        detail: Option<Arc<str>>,
    },
    /// The runtime lacks the function.
    MissingSymbol {
        /// The function.
        symbol: &'static str,
        /// Name or path of the library.
        library: Arc<str>,
        /// The CUDA driver function that it needs, if that one is missing.
        behind: Option<&'static str>,
        /// The dynamic loader's message, if the loader was asked.
        source: Option<Arc<libloading::Error>>,
    },
}

impl HipError {
    /// The function that failed or is missing.
    pub fn call(&self) -> &'static str {
        match self {
            HipError::Status { call, .. } => call,
            HipError::MissingSymbol { symbol, .. } => symbol,
        }
    }

    /// The status code; `None` if the function is missing.
    pub fn code(&self) -> Option<hipError_t> {
        match self {
            HipError::Status { code, .. } => Some(*code),
            HipError::MissingSymbol { .. } => None,
        }
    }

    /// Whether retrying is useless because the device is lost to this process.
    pub fn is_poisoned(&self) -> bool {
        matches!(self, HipError::Status { poisoned: true, .. })
    }

    /// Whether this is the status 'not done yet' of `hipStreamQuery` and `hipEventQuery`.
    pub fn is_not_ready(&self) -> bool {
        self.code() == Some(hipError_t::hipErrorNotReady)
    }

    /// Name or path of the library that was called.
    pub fn library(&self) -> &str {
        match self {
            HipError::Status { library, .. } | HipError::MissingSymbol { library, .. } => library,
        }
    }
}

impl fmt::Display for HipError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HipError::Status {
                call,
                code,
                name,
                poisoned,
                library,
                detail,
            } => {
                write!(f, "{call} failed with {name} ({}) in {library}", code.0)?;
                if *poisoned {
                    f.write_str("; the device is lost to this process, retrying is useless")?;
                }
                match detail {
                    Some(detail) => write!(f, ": {detail}"),
                    None => Ok(()),
                }
            }
            HipError::MissingSymbol {
                symbol,
                library,
                behind,
                ..
            } => match behind {
                Some(behind) => write!(
                    f,
                    "{library} has no function {behind}, which {symbol} needs"
                ),
                None => write!(f, "{library} has no function {symbol}"),
            },
        }
    }
}

impl std::error::Error for HipError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            HipError::MissingSymbol {
                source: Some(source),
                ..
            } => Some(source.as_ref()),
            _ => None,
        }
    }
}

/// A library that was tried, and the reason why it was not used.
#[derive(Debug)]
pub struct Attempt {
    /// The name or path.
    pub library: String,
    /// The dynamic loader's message, or the error of the library.
    pub error: Box<dyn std::error::Error + Send + Sync>,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.library)?;
        // On Windows libloading keeps the system's message in the source.
        match self.error.source() {
            Some(source) => write!(f, "{source}"),
            None => write!(f, "{}", self.error),
        }
    }
}

/// Reason why no HIP runtime could be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library that the caller named could not be loaded. Nothing else was tried.
    #[error("cannot load the HIP runtime {library}, which was given explicitly")]
    Explicit {
        /// The path that was given.
        library: String,
        /// The dynamic loader's message.
        source: libloading::Error,
    },
    /// The library that the environment names could not be loaded. Nothing else was tried.
    #[error("cannot load the HIP runtime {library}, which the variable {variable} names")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value.
        library: String,
        /// The dynamic loader's message.
        source: libloading::Error,
    },
    /// The process already uses another CUDA driver.
    #[error(
        "cannot load the CUDA driver {library}: this process already uses {loaded}, and a process can use only one"
    )]
    SecondDriver {
        /// The library that was asked for.
        library: String,
        /// The driver that is loaded.
        loaded: String,
    },
    /// No HIP runtime was found in any of the usual places, and no CUDA driver with a GPU.
    #[error("found no HIP runtime; tried {}", list(tried))]
    NotFound {
        /// Every library that was tried, in order.
        tried: Vec<Attempt>,
    },
}

fn list(tried: &[Attempt]) -> String {
    let texts: Vec<String> = tried.iter().map(Attempt::to_string).collect();
    texts.join("; ")
}
