//! Collectives of RCCL or NCCL, which have the same names and signatures, loaded at run time and never linked.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

use libloading::Library;
use thiserror::Error;

use crate::Attempt;

/// Environment variable that names the library of collectives to load.
pub const CCL_VARIABLE: &str = "DELTAWAVE_CCL_LIBRARY";

/// File names, in the order in which they are tried.
const RCCL: [&str; 2] = ["librccl.so.1", "librccl.so"];
const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Bytes by which the processes of a communicator find each other.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
#[allow(non_camel_case_types)]
pub struct ncclUniqueId(pub [u8; 128]);

/// Handle of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
#[allow(non_camel_case_types)]
pub struct ncclComm_t(pub *mut c_void);

/// Options of a communicator: the fields of version 2.17, which later versions and RCCL read as such.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(non_camel_case_types, missing_docs)]
pub struct ncclConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
}

impl ncclConfig_t {
    /// Calls return before they are complete: [`Ccl::ncclCommGetAsyncError`] says when they are.
    pub fn non_blocking() -> Self {
        ncclConfig_t {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21700,
            blocking: 0,
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
        }
    }
}

/// Status of a call.
pub const NCCL_SUCCESS: c_int = 0;
/// The call goes on.
pub const NCCL_IN_PROGRESS: c_int = 7;
/// Element type of bytes.
pub const NCCL_UINT8: c_int = 1;

/// A failure of a library of collectives.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum CclError {
    /// No library was found.
    #[error("no library of collectives could be loaded; tried {}", .tried.join(", "))]
    NotFound {
        /// Each name, with the loader's message.
        tried: Vec<String>,
    },
    /// The library lacks a function.
    #[error("{library} has no function {symbol}")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
        /// Name or path of the library.
        library: Arc<str>,
    },
    /// A call failed, or a call that went on failed later.
    #[error("{call} failed with {name} ({code}) in {library}")]
    Status {
        /// The function.
        call: &'static str,
        /// Its status.
        code: c_int,
        /// The library's words for it.
        name: Arc<str>,
        /// Name or path of the library.
        library: Arc<str>,
    },
    /// A call was not complete in time: another rank died, or never made the same call.
    #[error("{call} was not complete after {milliseconds} ms; the communicator was aborted")]
    Timeout {
        /// The function.
        call: &'static str,
        /// The limit.
        milliseconds: u128,
    },
    /// An earlier call failed or was not complete in time.
    #[error("{call} was refused: the communicator was aborted")]
    Aborted {
        /// The function.
        call: &'static str,
    },
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*);)+) => {
        /// A loaded library of collectives. Calls with wrong pointers are undefined behaviour.
        #[allow(non_snake_case)]
        pub struct Ccl {
            name: Arc<str>,
            error_string: Option<unsafe extern "C" fn(c_int) -> *const c_char>,
            $($name: unsafe extern "C" fn($($kind),*) -> c_int,)+
            /// Never unloaded: the library has threads of its own, which a unique id starts.
            _library: ManuallyDrop<Library>,
        }

        impl Ccl {
            #[allow(non_snake_case)]
            fn adopt(library: Library, name: Arc<str>) -> Result<Self, CclError> {
                $(
                    // SAFETY: the function has this signature in RCCL and NCCL.
                    let $name = match unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) } {
                        Ok(function) => *function,
                        Err(_) => {
                            let symbol = stringify!($name);
                            return Err(CclError::MissingSymbol { symbol, library: name });
                        }
                    };
                )+
                // SAFETY: as above.
                let error_string = unsafe { library.get(b"ncclGetErrorString\0") }.ok().map(|f| *f);
                Ok(Ccl { name, error_string, $($name,)+ _library: ManuallyDrop::new(library) })
            }

            $(
                /// The function of this name. Its status, if that is success or 'in progress'.
                ///
                /// # Errors
                /// Any other status.
                ///
                /// # Safety
                /// The arguments are valid for the call.
                #[allow(non_snake_case)]
                pub unsafe fn $name(&self, $($argument: $kind),*) -> Result<c_int, CclError> {
                    // SAFETY: the caller answers for the arguments.
                    let code = unsafe { (self.$name)($($argument),*) };
                    self.status(stringify!($name), code)
                }
            )+
        }
    };
}

functions! {
    ncclGetUniqueId(id: *mut ncclUniqueId);
    ncclCommInitRankConfig(comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t);
    ncclCommGetAsyncError(comm: ncclComm_t, error: *mut c_int);
    ncclCommFinalize(comm: ncclComm_t);
    ncclCommDestroy(comm: ncclComm_t);
    ncclCommAbort(comm: ncclComm_t);
    ncclAllGather(send: *const c_void, receive: *mut c_void, count: usize, kind: c_int, comm: ncclComm_t, stream: *mut c_void);
}

impl std::fmt::Debug for Ccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ccl").field(&self.name).finish()
    }
}

impl Ccl {
    /// Loads the library at `path`, or the one that [`CCL_VARIABLE`] names, or else RCCL (`librccl.so`) or NCCL
    /// (`libnccl.so.2`). `nvidia`: NCCL is tried first.
    ///
    /// # Errors
    /// No library, or one without a function.
    pub fn load(path: Option<&Path>, nvidia: bool) -> Result<Self, CclError> {
        let variable = std::env::var_os(CCL_VARIABLE).filter(|x| !x.is_empty());
        let names: Vec<OsString> = match path.map(OsString::from).or(variable) {
            Some(named) => vec![named],
            None if nvidia => NCCL.iter().chain(&RCCL).map(OsString::from).collect(),
            None => RCCL.iter().chain(&NCCL).map(OsString::from).collect(),
        };
        let mut tried = Vec::new();
        for name in names {
            let text = name.to_string_lossy().into_owned();
            match open(&name) {
                Ok(library) => return Self::adopt(library, text.into()),
                Err(error) => {
                    let attempt = Attempt {
                        library: text,
                        error: error.into(),
                    };
                    tried.push(format!("{} ({})", attempt.library, attempt.error));
                }
            }
        }
        Err(CclError::NotFound { tried })
    }

    /// Name or path of the library.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A status as a result: success and 'in progress' are none of the errors.
    ///
    /// # Errors
    /// Any other status.
    pub fn status(&self, call: &'static str, code: c_int) -> Result<c_int, CclError> {
        if matches!(code, NCCL_SUCCESS | NCCL_IN_PROGRESS) {
            return Ok(code);
        }
        let name = self.error_string.map(|f| {
            // SAFETY: the function takes any status.
            let text = unsafe { f(code) };
            match text.is_null() {
                true => "an unknown status".into(),
                // SAFETY: it returns a constant string.
                false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into(),
            }
        });
        Err(CclError::Status {
            call,
            code,
            name: name.unwrap_or_else(|| "an unknown status".into()),
            library: self.name.clone(),
        })
    }
}

fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: loading a library of collectives runs its initialisers, which is what the caller asks for.
    unsafe { Library::new(name) }
}
