//! Search for a HIP runtime or CUDA driver, and loading it.

use crate::cuda::{self, Driver};
use crate::{Attempt, LoadError};
use libloading::Library;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Environment variable that names the HIP runtime to load.
pub const LIBRARY_VARIABLE: &str = "DELTAWAVE_HIP_LIBRARY";

/// The name that selects the CUDA driver instead of a HIP library.
pub const CUDA: &str = "cuda";

/// File names of the HIP runtime, newest first.
#[cfg(not(windows))]
const NAMES: &[&str] = &[
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "libamdhip64.so",
];
#[cfg(windows)]
const NAMES: &[&str] = &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"];

/// A library, and the name that it was found by.
pub(crate) struct Loaded<L = Library> {
    pub library: L,
    pub name: String,
}

/// Result of the search.
pub(crate) enum Found {
    /// The library that the caller or the environment names.
    Named(Loaded),
    /// A HIP runtime in one of the usual places.
    Searched(Loaded),
    /// The CUDA driver, named by the caller or the environment.
    Cuda(&'static Driver),
}

/// How to open a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Only if the process has it mapped already.
    IfMapped,
    /// By the dynamic loader's rules.
    Load,
}

/// Inputs of the search: the caller's path and the environment.
struct Wishes {
    path: Option<OsString>,
    variable: Option<OsString>,
    rocm_path: Option<OsString>,
}

pub(crate) fn load(path: Option<&Path>) -> Result<Found, LoadError> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let driver = |name: OsString| match name == CUDA {
        true => cuda::LIBRARY.into(),
        false => name,
    };
    let wishes = Wishes {
        path: path.map(|path| driver(path.into())),
        variable: set(LIBRARY_VARIABLE).map(driver),
        rocm_path: set("ROCM_PATH"),
    };
    let named = wishes.path.is_some() || wishes.variable.is_some();
    let found = search(wishes, open)?;
    match named {
        true if is_driver(&found.library) => adopt(found).map(Found::Cuda),
        true => Ok(Found::Named(found)),
        false => Ok(Found::Searched(found)),
    }
}

/// The CUDA driver, if neither the caller nor the environment names a library.
pub(crate) fn cuda() -> Result<&'static Driver, Box<dyn std::error::Error + Send + Sync>> {
    let library = open(OsStr::new(cuda::LIBRARY), How::Load)?;
    let name = cuda::LIBRARY.to_owned();
    Ok(adopt(Loaded { library, name })?)
}

fn adopt(Loaded { library, name }: Loaded) -> Result<&'static Driver, LoadError> {
    Driver::adopt(library, &name).map_err(|loaded| LoadError::SecondDriver {
        library: name,
        loaded: loaded.to_owned(),
    })
}

/// Whether a library is a CUDA driver and not a HIP runtime.
fn is_driver(library: &Library) -> bool {
    // SAFETY: the symbols are only looked for.
    let has = |name: &[u8]| unsafe { library.get::<*mut core::ffi::c_void>(name) }.is_ok();
    has(b"cuInit") && !has(b"hipInit")
}

fn search<L>(
    wishes: Wishes,
    mut open: impl FnMut(&OsStr, How) -> Result<L, libloading::Error>,
) -> Result<Loaded<L>, LoadError> {
    let text = |name: &OsStr| name.to_string_lossy().into_owned();
    if let Some(path) = wishes.path {
        let name = text(&path);
        return match open(&path, How::Load) {
            Ok(library) => Ok(Loaded { library, name }),
            Err(source) => Err(LoadError::Explicit {
                library: name,
                source,
            }),
        };
    }
    if let Some(path) = wishes.variable {
        let name = text(&path);
        return match open(&path, How::Load) {
            Ok(library) => Ok(Loaded { library, name }),
            Err(source) => Err(LoadError::Environment {
                variable: LIBRARY_VARIABLE,
                library: name,
                source,
            }),
        };
    }
    // A second copy of the runtime would not know the streams of the first.
    for name in NAMES {
        if let Ok(library) = open(OsStr::new(name), How::IfMapped) {
            let name = (*name).into();
            return Ok(Loaded { library, name });
        }
    }
    let folders = wishes
        .rocm_path
        .map(|rocm| Path::new(&rocm).join("lib"))
        .into_iter()
        .chain(cfg!(unix).then(|| "/opt/rocm/lib".into()));
    let in_folders =
        folders.flat_map(|folder| NAMES.iter().map(move |name| folder.join(name).into()));
    let candidates = NAMES.iter().map(OsString::from).chain(in_folders);
    let mut tried = Vec::new();
    for candidate in candidates {
        match open(&candidate, How::Load) {
            Ok(library) => {
                let name = text(&candidate);
                return Ok(Loaded { library, name });
            }
            Err(error) => tried.push(Attempt {
                library: text(&candidate),
                error: error.into(),
            }),
        }
    }
    Err(LoadError::NotFound { tried })
}

#[cfg(unix)]
fn open(name: &OsStr, how: How) -> Result<Library, libloading::Error> {
    use libloading::os::unix;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const RTLD_NOLOAD: i32 = 4;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const RTLD_NOLOAD: i32 = 0x10;
    let flags = unix::RTLD_NOW | unix::RTLD_LOCAL;
    let flags = match how {
        How::IfMapped => flags | RTLD_NOLOAD,
        How::Load => flags,
    };
    // SAFETY: loading a HIP runtime runs its initialisers, which is what the caller asks for.
    unsafe { unix::Library::open(Some(name), flags) }.map(Library::from)
}

#[cfg(windows)]
fn open(name: &OsStr, how: How) -> Result<Library, libloading::Error> {
    use libloading::os::windows;
    match how {
        How::IfMapped => windows::Library::open_already_loaded(name).map(Library::from),
        // SAFETY: loading a HIP runtime runs its initialisers, which is what the caller asks for.
        How::Load => unsafe { windows::Library::new(name) }.map(Library::from),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    const NONE: Wishes = Wishes {
        path: None,
        variable: None,
        rocm_path: None,
    };

    /// Records what is opened; everything fails except `present`.
    fn attempts(wishes: Wishes, present: Option<(&str, How)>) -> (Vec<(String, How)>, bool) {
        let mut asked = Vec::new();
        let found = search(wishes, |name, how| {
            let name = name.to_str().expect("UTF-8").to_owned();
            let hit = present.is_some_and(|(p, h)| p == name && h == how);
            asked.push((name, how));
            if hit {
                Ok(())
            } else {
                open(OsStr::new("/nonexistent/libamdhip64.so"), How::Load).map(drop)
            }
        });
        (asked, found.is_ok())
    }

    #[test]
    fn an_explicit_path_is_the_only_one_tried() {
        let wishes = Wishes {
            path: Some("/a/lib.so".into()),
            variable: Some("/b/lib.so".into()),
            ..NONE
        };
        let (asked, ok) = attempts(wishes, None);
        assert!(!ok);
        assert_eq!(asked, [("/a/lib.so".into(), How::Load)]);
    }

    #[test]
    fn the_variable_comes_next_and_is_no_hint_either() {
        let wishes = Wishes {
            variable: Some("/b/lib.so".into()),
            ..NONE
        };
        let (asked, ok) = attempts(wishes, None);
        assert!(!ok);
        assert_eq!(asked, [("/b/lib.so".into(), How::Load)]);
    }

    #[test]
    fn a_mapped_runtime_comes_before_any_that_would_be_loaded() {
        let (asked, ok) = attempts(NONE, Some(("libamdhip64.so.5", How::IfMapped)));
        assert!(ok);
        let expected = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"];
        assert_eq!(asked, expected.map(|name| (name.into(), How::IfMapped)));
    }

    #[test]
    fn then_the_loaders_names_then_the_folders() {
        let wishes = Wishes {
            rocm_path: Some("/rocm".into()),
            ..NONE
        };
        let (asked, ok) = attempts(wishes, None);
        assert!(!ok);
        let loads: Vec<&str> = asked[NAMES.len()..]
            .iter()
            .map(|(name, how)| {
                assert_eq!(*how, How::Load);
                name.as_str()
            })
            .collect();
        let expected = [
            "libamdhip64.so.7",
            "libamdhip64.so.6",
            "libamdhip64.so.5",
            "libamdhip64.so",
            "/rocm/lib/libamdhip64.so.7",
            "/rocm/lib/libamdhip64.so.6",
            "/rocm/lib/libamdhip64.so.5",
            "/rocm/lib/libamdhip64.so",
            "/opt/rocm/lib/libamdhip64.so.7",
            "/opt/rocm/lib/libamdhip64.so.6",
            "/opt/rocm/lib/libamdhip64.so.5",
            "/opt/rocm/lib/libamdhip64.so",
        ];
        assert_eq!(loads, expected);
    }

    #[test]
    fn absence_lists_what_was_tried() {
        let error = search(NONE, |_, _| -> Result<(), _> {
            open(OsStr::new("/nonexistent/libamdhip64.so"), How::Load).map(drop)
        })
        .err()
        .expect("nothing opens");
        let text = error.to_string();
        assert!(text.contains("libamdhip64.so.7: "), "{text}");
        assert!(
            text.contains("/opt/rocm/lib/libamdhip64.so: /nonexistent"),
            "{text}"
        );
    }
}
